"""The explorer without a browser: the view's text, the widget's slider, and what is in the exported page."""

import base64
import gzip
import json
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from minivllm.sampling_params import SamplingParams
from minivllm.trace import Trace
from minivllm.viz import Explorer, export_html, narrate, view
from minivllm.viz.style import request_color
from tests.fakes import make_engine, run_to_end, sample_trace
from tests.viz.shared import shared_trace

ENGINES = {
    "continuous": {},
    "static": {"batching": "static"},
    "contiguous": {"kv_cache": "contiguous"},
    "pow2": {"kv_cache": "contiguous", "reservation": "pow2"},
    "exact": {"kv_cache": "contiguous", "reservation": "exact"},
    "priority": {"scheduling_policy": "priority"},
}


class Page(HTMLParser):
    """Checks that tags are balanced; keeps tags and attributes."""

    VOID = frozenset(["meta", "input", "br"])

    def __init__(self, text):
        super().__init__()
        self.open, self.found = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def texts(html):
    """What a reader sees, without the tags."""
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", html)).split())


def titles(html):
    return [attributes["title"] for _, attributes in Page(html).found if "title" in attributes]


def trace_of_one(name, **params):
    engine = make_engine(num_blocks=16, block_size=8, max_num_seqs=6)
    trace = engine.start_recording()
    engine.add_request(name, list(range(1, 13)), SamplingParams(**({"temperature": 0, "max_tokens": 12} | params)))
    run_to_end(engine)
    return trace


def unpacked(path):
    packed = re.search(r'id="frames">([^<]+)<', path.read_text()).group(1)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


# The view. ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", ENGINES.values(), ids=ENGINES)
def test_every_step_of_every_engine_is_drawn_with_its_sentences(fields):
    trace = sample_trace(**fields)
    for k in range(len(trace)):
        state = trace.state(k)
        html = view(state, trace.header)
        seen = texts(html)
        assert seen.startswith(f"Step {k} from {state.start_s:.3f} s to {state.end_s:.3f} s")
        assert all(" ".join(sentence.split()) in seen for sentence in narrate(state, trace.header))
        assert len([title for title in titles(html) if title.startswith("block ")]) == 12


def test_a_view_is_pure_and_has_no_script_and_no_identifier():
    trace = sample_trace()
    html = view(trace.state(5), trace.header)
    assert html == view(trace.state(5), trace.header)
    assert not any(tag in ("script", "style", "img") or "id" in attributes for tag, attributes in Page(html).found)
    assert "http" not in html and html.startswith('<div style="background:#FFF;color:#222222;')


def test_every_graphic_has_a_name():
    trace = sample_trace()
    graphics = [a for _, a in Page(view(trace.state(5), trace.header)).found if a.get("role") == "img"]
    assert len(graphics) > 12
    assert all(attributes.get("aria-label") or attributes.get("title") for attributes in graphics)


def test_the_budget_bar_tells_kinds_apart():
    trace = sample_trace()
    first, second = (view(trace.state(k), trace.header) for k in (0, 1))
    assert "Token budget of the step: 32 of 32 used" in texts(first)
    assert "Token budget: 32 prefill, 0 decode, 0 useless, 0 not used, of 32." in first
    assert "Token budget: 31 prefill, 1 decode, 0 useless, 0 not used, of 32." in second
    assert {"R0: 1 token, decode", "R1: 28 tokens, prefill", "R2: 3 tokens, prefill"} <= set(titles(second))


def test_useless_rows_of_a_static_batch_are_marked():
    trace = sample_trace(batching="static")
    k = next(k for k in range(len(trace)) if trace.steps[k].get("rerun"))
    html = view(trace.state(k), trace.header)
    assert "R1: 1 token, useless" in titles(html)
    assert "R1 ended" in texts(html) and "useless 1" in texts(html)


def test_blocks_show_holder_fill_and_colour():
    trace = sample_trace()
    html = view(trace.state(0), trace.header)
    shown, key = titles(html), trace.state(0).cached_blocks[0].key[:8]
    assert f"block 0: R0 8 of 8 slots; can be found by key {key} (filled by R0 in step 0)" in shown
    assert "block 2: R0 4 of 8 slots" in shown and "block 5, free" in shown
    assert f"{request_color(0)} 0% 50%,{request_color(0)}38 50% 100%" in html
    assert "Memory after the step: 5 of 12 blocks held (42 %), 8 slots each" in texts(html)
    assert "with a token 32" in texts(html) and "free 56" in texts(html)


def test_a_shared_block_shows_all_its_holders():
    trace = trace_of_one("A", n=3, temperature=1.0, seed=1)
    html = view(trace.state(0), trace.header)
    by_key = f"can be found by key {trace.state(0).cached_blocks[0].key[:8]} (filled by A in step 0)"
    assert f"block 0, shared by 3: A 8 of 8 slots, A/1 8 of 8 slots, A/2 8 of 8 slots; {by_key}" in titles(html)
    cell = html[html.index("block 0, shared") :].split("</div>")[0]
    assert all(request_color(index) in cell for index in range(3)) and "×3 A<" in cell


def test_the_queue_marks_the_preempted_and_the_tables_list_blocks_and_tokens():
    trace = sample_trace()
    k = next(k for k in range(len(trace)) if any(d["kind"] == "preempt" for d in trace.steps[k].get("decisions", ())))
    state = trace.state(k)
    seen = texts(view(state, trace.header))
    assert f"Waiting: {len(state.waiting)} R5 preempted 1×" in seen
    assert f"Running: {len(state.running)} of 4 rows" in seen
    request = state.requests["R3"]
    assert f"{request.num_computed_tokens} / {request.num_tokens} / {request.max_num_tokens}" in seen


def test_who_ended_with_a_step_had_a_row_in_it():
    trace = sample_trace([(4, 3, 0), (4, 3, 0), (4, 3, 0)], max_num_seqs=2)
    state = trace.state(2)
    assert state.running == [] and set(state.finished) == {"R0", "R1"}
    seen = texts(view(state, trace.header))
    assert "Running: 2 of 2 rows R0 ended R1 ended" in seen and "R2 waits: the batch is full (2 of 2 rows)" in seen


def test_long_names_show_their_ends_in_the_block_map():
    trace = trace_of_one("request-number-0", n=2, temperature=1.0, seed=1)
    assert "…ber-0" in view(trace.state(0), trace.header)


def test_names_are_text_and_nothing_else():
    name = '<script>alert("R&D")</script>'
    trace = trace_of_one(name, n=2, temperature=1.0, seed=1)
    for k in range(len(trace)):
        html = view(trace.state(k), trace.header)
        assert "<script" not in html and 'alert("' not in html
        Page(html)
    shown = "&lt;script&gt;alert(&quot;R&amp;D&quot;)&lt;/script&gt;"
    assert f"{shown} admitted: all its 12 tokens" in view(trace.state(0), trace.header)


def test_a_large_pool_is_summed_up_in_groups_and_stays_small():
    small, large = sample_trace(num_blocks=256), sample_trace(num_blocks=100_000)
    assert len([title for title in titles(view(small.state(9), small.header)) if title.startswith("block ")]) == 256
    html = view(large.state(9), large.header)
    groups = [title for title in titles(html) if title.startswith("blocks ")]
    assert len(groups) == 64 and groups[-1] == "blocks 98469 to 99999: 0 of 1531 held"
    assert re.match(r"blocks 0 to 1562: \d+ of 1563 held \(R3 \d+, ", groups[0])
    assert len(html) < 40_000


def test_a_group_of_blocks_names_its_four_largest_holders_and_counts_the_blocks_of_the_others():
    lengths = {"A": 2, "B": 2, "C": 4, "D": 3, "E": 4}
    engine = make_engine(
        num_blocks=1024, block_size=8, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False
    )
    trace = engine.start_recording()
    for name, num_blocks in lengths.items():
        engine.add_request(name, [1] * (8 * num_blocks), SamplingParams(temperature=0, max_tokens=4))
    engine.step()
    html = view(trace.state(0), trace.header)
    first = "blocks 0 to 15: 15 of 16 held (C 4, E 4, D 3, A 2, others 2)"
    assert [title for title in titles(html) if title.startswith("blocks ")][:2] == [
        first,
        "blocks 16 to 31: 0 of 16 held",
    ]
    cell = html[html.index(first) :].split("</div>")[0]
    assert " ".join(re.findall(r"(#\w+ [\d.]+% [\d.]+%)", cell)).split() == [
        *(request_color(2), "0%", "25%"),
        *(request_color(4), "25%", "50%"),
        *(request_color(3), "50%", "68.8%"),
        *(request_color(0), "68.8%", "81.2%"),
        *("#5A5A5A", "81.2%", "93.8%"),
        *("#FFF", "93.8%", "100%"),
    ]
    assert "15/16" in cell


def test_a_block_of_more_than_four_holders_names_all_and_draws_four():
    trace = trace_of_one("A", n=6, temperature=1.0, seed=1)
    html = view(trace.state(0), trace.header)
    holders = ", ".join(["A 8 of 8 slots", *(f"A/{index} 8 of 8 slots" for index in range(1, 6))])
    cell = html[html.index(f"block 0, shared by 6: {holders}") :].split("</div>")[0]
    assert cell.count("linear-gradient") == 4 and "×6 A<" in cell


def test_the_token_bars_of_all_requests_are_on_one_scale():
    engine = make_engine(num_blocks=64, block_size=8, enable_prefix_caching=False)
    trace = engine.start_recording()
    for name, max_tokens in (("short", 10), ("long", 30)):
        engine.add_request(name, [1] * 10, SamplingParams(temperature=0, max_tokens=max_tokens))
    engine.step()
    html = view(trace.state(0), trace.header)
    bars = [part.split("</td>")[0] for part in html.split("10 of 11 tokens in memory, at most ")[1:]]
    # How wide the bar is (its most tokens, of the largest most), then how far it is filled: tokens so far, and cached.
    assert [re.findall(r"width:([\d.]+%)", bar) for bar in bars] == [
        ["50.0%", "55.0%", "50.0%"],
        ["100.0%", "27.5%", "25.0%"],
    ]
    assert "10 / 11 / 20" in texts(html) and "10 / 11 / 40" in texts(html)


def test_the_budget_bar_sums_up_whom_it_does_not_name():
    trace = sample_trace([(8, 20, 0)] * 53, num_blocks=256, max_num_seqs=64, max_num_batched_tokens=512)
    shown = [title for title in titles(view(trace.state(1), trace.header)) if title.endswith(", decode")]
    assert len(shown) == 49 and shown[-2:] == ["R47: 1 token, decode", "5 others: 5 tokens, decode"]


def test_many_requests_stay_small():
    trace = sample_trace([(8, 20, 0)] * 200, num_blocks=256, max_num_seqs=128, max_num_batched_tokens=512)
    html = view(trace.state(3), trace.header)
    assert "and 104 more" in texts(html)  # of 128 that run, 24 are named
    assert len(html) < 150_000


# The prefix cache. ----------------------------------------------------------------------------------------


def cells(html):
    """Number of a block to the style of its cell and what is written in it."""
    found = re.findall(r'<div role="img" title="block (\d+)[^"]*" style="([^"]*)">(.*?)</div>', html)
    return {int(number): (style, texts(inside)) for number, style, inside in found}


def keys_of(state):
    return {block: cached.key for block, cached in state.cached_blocks.items()}


def test_shared_blocks_show_their_count_and_name_all_their_holders():
    trace = shared_trace()
    state = trace.state(3)
    html, keys = view(state, trace.header), keys_of(state)
    shown = titles(html)
    for block in range(4):
        by_key = f"can be found by key {keys[block][:8]} (filled by A in step 0); found by B in this step"
        assert f"block {block}, shared by 2: B 8 of 8 slots, B/1 8 of 8 slots; {by_key}" in shown
    assert "block 6, shared by 2: B 2 of 8 slots, B/1 2 of 8 slots" in shown  # not full: nobody can find it
    assert [inside for _, inside in cells(html).values()] == [
        *[f"{block} ×2 B" for block in range(4)],
        f"4 {keys[4][:3]}",
        "5 ×2 B",
        "6 ×2 B",
        "7",
    ]


def test_a_free_block_that_can_be_found_differs_from_an_empty_one():
    trace = shared_trace()
    state = trace.state(3)
    html = view(state, trace.header)
    key = keys_of(state)[4]
    assert f"block 4, free; can be found by key {key[:8]} (filled by A in step 0)" in titles(html)
    assert "block 7, free" in titles(html)
    (cached, _), (empty, _) = (cells(html)[block] for block in (4, 7))
    assert f"border:1px solid {request_color(0)}" in cached and "repeating-linear-gradient" in cached
    assert "border:1px dashed" in empty and "gradient" not in empty


def test_found_and_evicted_blocks_have_a_ring_and_the_legend_counts():
    trace = shared_trace()
    html, later = (view(trace.state(k), trace.header) for k in (3, 6))
    ringed = [block for block, (style, _) in cells(html).items() if "outline:2px solid" in style]
    assert ringed == [0, 1, 2, 3]
    ringed = [block for block, (style, _) in cells(later).items() if "outline:2px dashed" in style]
    assert ringed == [4]
    key = trace.state(6).evicted[0].key[:8]
    assert f"block 4: C 1 of 8 slots; in this step it was evicted with key {key} (filled by A in step 0)" in titles(
        later
    )
    counts = "held by one {} shared by n (×n) {} free, can be found {} free, nothing to find {} found in this step {} "
    counts += "evicted in this step {}"
    assert counts.format(0, 6, 1, 1, 4, 0) in texts(html)
    assert counts.format(3, 0, 5, 0, 0, 1) in texts(later)


def test_the_table_tells_how_many_tokens_were_found():
    trace = shared_trace()
    seen = texts(view(trace.state(3), trace.header))
    assert "B 10 prefill 42 / 43 / 45 found 32 0–3, 5–6" in seen
    assert "found" not in texts(view(trace.state(6), trace.header)).split("Block tables")[1]


@pytest.mark.parametrize("fields", [{"enable_prefix_caching": False}, {"kv_cache": "contiguous"}])
def test_without_a_prefix_cache_nothing_of_it_is_shown(fields):
    trace = shared_trace(num_blocks=128, **fields)
    for k in range(len(trace)):
        html = view(trace.state(k), trace.header)
        assert "found" not in texts(html) and "evicted" not in texts(html)


def test_groups_of_blocks_count_the_free_ones_that_can_be_found():
    trace = shared_trace(num_blocks=1024)
    groups = [title for title in titles(view(trace.state(3), trace.header)) if title.startswith("blocks ")]
    assert groups[0] == "blocks 0 to 15: 6 of 16 held (B 6), 1 free can be found"
    assert groups[1] == "blocks 16 to 31: 0 of 16 held"


def test_what_was_filled_before_the_trace_says_so():
    engine = make_engine(num_blocks=8, block_size=8)
    for name in ("old", "new"):
        trace = None if name == "old" else engine.start_recording()
        engine.add_request(name, list(range(1, 10)), SamplingParams(temperature=0, max_tokens=1))
        run_to_end(engine)
    key = trace.state(0).cached_blocks[0].key[:8]
    assert f"block 0, free; can be found by key {key} (filled before the trace); found by new in this step" in titles(
        view(trace.state(0), trace.header)
    )


# The widget. ----------------------------------------------------------------------------------------------


def test_the_slider_moves_the_view():
    trace = sample_trace()
    explorer = Explorer(trace)
    assert (explorer.slider.min, explorer.slider.max, explorer.slider.value) == (0, len(trace) - 1, 0)
    assert explorer.sentences[0] == "R0 admitted: all its 20 tokens are computed in this step."
    for k in (1, len(trace) - 1, 5):
        explorer.slider.value = k
        assert explorer.html.value == view(trace.state(k), trace.header)
        assert explorer.sentences == narrate(trace.state(k), trace.header)


def test_an_explorer_begins_where_it_is_told():
    trace = sample_trace()
    explorer = Explorer(trace, step=-1)
    assert explorer.slider.value == explorer.play.value == len(trace) - 1
    with pytest.raises(ValueError, match=f"there is no step {len(trace)}"):
        Explorer(trace, step=len(trace))


def test_a_cell_shows_the_widget_and_tells_its_sentences():
    explorer = Explorer(sample_trace())
    bundle = explorer._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.box.model_id
    assert bundle["text/plain"].startswith("Explorer of 76 steps, at step 0: R0 admitted: all its 20 tokens")


@pytest.mark.parametrize("use", [Explorer, lambda trace: export_html(trace, "never.html")])
def test_an_empty_trace_is_refused_with_what_to_do(use):
    with pytest.raises(ValueError, match=r"the trace has no steps: record some first \(`with llm.trace\(\)"):
        use(Trace(sample_trace().header))
    assert not Path("never.html").exists()


def test_importing_the_figures_does_not_import_the_widgets():
    code = "import sys, minivllm.viz; sys.exit('ipywidgets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# The page. ------------------------------------------------------------------------------------------------


def test_the_page_holds_the_very_views_of_all_steps(tmp_path):
    trace, path = sample_trace(), tmp_path / "trace.html"
    export_html(trace, path, title="A <busy> day")
    found = unpacked(path)
    assert len(found["frames"]) == len(trace)
    for k, (step, time, numbers) in enumerate(found["frames"]):
        state = trace.state(k)
        assert (step, time) == (k, f"{state.end_s:.3f} s")
        assert "<div".join(found["pieces"][number] for number in numbers) == view(state, trace.header)
    page = path.read_text()
    assert "<title>A &lt;busy&gt; day</title>" in page and not re.search(r"https?:|src=|@import|%[A-Z]+%", page)
    Page(page)


def test_the_same_trace_gives_the_same_page(tmp_path):
    for name in ("one", "two"):
        export_html(sample_trace(), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_some_steps_can_be_chosen(tmp_path):
    trace, path = sample_trace(), tmp_path / "trace.html"
    export_html(trace, path, steps=range(10, 40, 10))
    assert [frame[0] for frame in unpacked(path)["frames"]] == [10, 20, 30]
    export_html(trace, path, steps=[3, 0])
    assert [frame[0] for frame in unpacked(path)["frames"]] == [3, 0]  # in the order in which they were named
    with pytest.raises(ValueError, match="steps is empty"):
        export_html(trace, path, steps=range(0))
    with pytest.raises(ValueError, match="there is no step 76"):
        export_html(trace, path, steps=[76])


def test_too_many_steps_are_refused_with_their_number(tmp_path):
    trace = sample_trace()
    long = Trace(trace.header, [{**trace.steps[-1], "step": k, "tokens": {}, "finished": {}} for k in range(2001)])
    with pytest.raises(ValueError, match=r"2001 steps are more than .* \(2000\): .* steps=range\(0, 2000\)"):
        export_html(long, tmp_path / "trace.html")
    assert list(tmp_path.iterdir()) == []


def test_three_hundred_steps_make_a_small_page(tmp_path):
    requests = [(10 + 7 * index, 60 + 3 * index, 12 * index) for index in range(16)]
    trace = sample_trace(requests, num_blocks=64, max_num_seqs=6, max_num_batched_tokens=64, block_size=16)
    assert len(trace) >= 280
    export_html(trace, tmp_path / "trace.html", steps=range(min(300, len(trace))))
    assert (tmp_path / "trace.html").stat().st_size < 200_000
