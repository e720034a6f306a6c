"""Figures of the prefix cache: their text twins carry what was found, held and evicted."""

import matplotlib.pyplot as plt
import pytest

from minivllm import viz
from minivllm.lessons.prefix import ParentlessHasher
from minivllm.sampling_params import SamplingParams
from minivllm.trace import Trace, summarize
from minivllm.viz.cache_tree import build, walk
from minivllm.viz.prefix_cache import Lookup, lookups
from tests.fakes import make_engine, run_to_end, sample_trace
from tests.viz.shared import BEGINNING, shared_trace


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def trace():
    return shared_trace()


def twin(figure):
    return [line.strip() for line in viz.digest(figure).splitlines()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def written(figure):
    return [text.get_text().strip() for text in figure.axes[0].texts]


def bars(figure):
    """Label to the bars of a container."""
    return {container.get_label(): container.patches for container in figure.axes[0].containers}


# The tree. ------------------------------------------------------------------------------------------------


def test_a_tree_has_a_line_per_run_of_blocks_with_its_holders(trace):
    figure = viz.prefix_tree(trace, step=3)
    assert twin(figure) == [
        "axes 0: 'The prefix cache after step 3: 6 blocks can be found' "
        "x='block of the text, counted from 0 (8 tokens each)' y=''",
        "bars 'place 0–3: blocks 0–3, held by B and B/1' n=4: 0.74, 0.74, 0.74, 0.74",
        "bars 'place 4: block 4, free, used 1 step ago' n=1: 0.74",
        "bars 'place 4: block 5, held by B and B/1' n=1: 0.74",
        "axes 1: '' x='' y='steps since\\nsomebody held it'",
    ]
    assert written(figure) == ["0", "1", "2", "3", "4", "5", "filled by A", "B and B/1"]
    assert legend(figure) == ["free, and can be found", "held by 2 requests"]


def test_the_last_step_is_drawn_unless_another_is_named(trace):
    assert twin(viz.prefix_tree(trace, title="T"))[:3] == [
        "axes 0: 'T' x='block of the text, counted from 0 (8 tokens each)' y=''",
        "bars 'place 0–4: blocks 0–3, 5, free, used 3 steps ago' n=5: 0.74, 0.74, 0.74, 0.74, 0.74",
        "bars 'place 0–1: blocks 6–7, free, used in this step' n=2: 0.74, 0.74",
    ]


def test_blocks_stand_at_their_place_and_parents_between_their_children(trace):
    places = {
        label: [(round(bar.get_x(), 2), bar.get_y() + bar.get_height() / 2) for bar in found]
        for label, found in bars(viz.prefix_tree(trace, step=3)).items()
    }
    assert list(places.values()) == [
        [(0, pytest.approx(0.5)), (1, pytest.approx(0.5)), (2, pytest.approx(0.5)), (3, pytest.approx(0.5))],
        [(4, pytest.approx(0))],
        [(4, pytest.approx(1))],
    ]


def test_outlines_are_wider_where_more_hold_and_colours_paler_where_nobody_did_for_long(trace):
    both, old, _ = bars(viz.prefix_tree(trace, step=3)).values()
    assert both[0].get_linewidth() > old[0].get_linewidth()
    now, older = both[0].get_facecolor(), old[0].get_facecolor()
    assert sum(older[:3]) > sum(now[:3])


def test_a_request_may_go_by_another_name_at_its_end(trace):
    assert written(viz.prefix_tree(trace, step=3, labels={"A": "the first", "B": "a $ question"}))[-2:] == [
        "filled by the first",
        r"a \$ question and B/1",
    ]


def test_who_ends_where_others_go_on_has_a_row_of_its_own():
    engine = make_engine(block_size=8)
    trace = engine.start_recording()
    engine.add_request("long", [*BEGINNING, 99], SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    engine.add_request("short", [*BEGINNING[:16], 98], SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    figure = viz.prefix_tree(trace)
    assert twin(figure)[1:3] == [
        "bars 'place 0–1: blocks 0–1, held by long and short' n=2: 0.74, 0.74",
        "bars 'place 2–3: blocks 2–3, held by long' n=2: 0.74, 0.74",
    ]
    rows = {text.get_text().strip(): text.get_position()[1] for text in figure.axes[0].texts}
    assert (rows["short"], rows["long"], rows["0"]) == (0, 1, 0.5)


def test_blocks_of_one_text_are_one_node():
    engine = make_engine(block_size=8)
    trace = engine.start_recording()
    for name in "AB":  # B computes everything itself
        params = SamplingParams(temperature=0, max_tokens=9, skip_reading_prefix_cache=name == "B")
        engine.add_request(name, BEGINNING, params)
    engine.step()
    figure = viz.prefix_tree(trace)
    assert twin(figure)[0].startswith("axes 0: 'The prefix cache after step 0: 8 blocks can be found'")
    assert twin(figure)[1] == (
        "bars 'place 0–3: blocks 0–3 (the same: 4–7), held by A and B' n=4: 0.74, 0.74, 0.74, 0.74"
    )
    assert written(figure) == ["0, 4", "1, 5", "2, 6", "3, 7", "A and B"]


def test_a_block_whose_parent_is_lost_is_drawn_as_unreachable(trace):
    trace.steps[5].setdefault("cache", []).append({"evict": 1})
    figure = viz.prefix_tree(trace, step=5)
    assert twin(figure)[1:-1] == [
        "bars 'place 0: block 0, free, used in this step' n=1: 0.74",
        "bars 'place 0–1: blocks 2–3, free, used in this step' n=2: 0.74, 0.74",
        "bars 'place 2: block 4, free, used 3 steps ago' n=1: 0.74",
        "bars 'place 2: block 5, free, used in this step' n=1: 0.74",
    ]
    assert written(figure)[-1] == "unreachable: the block before can't be found any more"
    below = [bar.get_y() for bar in bars(figure)["place 0–1: blocks 2–3, free, used in this step"]]
    assert min(below) > 1


def test_keys_without_parents_do_not_send_the_tree_round_in_circles():
    engine = make_engine(block_size=4)
    engine.scheduler.manager._hasher = ParentlessHasher(4)
    trace = engine.start_recording()
    engine.add_request("A", [1, 2, 3, 4, 5, 6, 7, 8] * 2, SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    state = trace.state(0)
    trees = [top for tops in build(state) for top in tops]
    nodes = [node for top in trees for node in walk(top)]
    assert sorted(block for node in nodes for block in node.block_ids) == sorted(state.cached_blocks)
    assert len({node.key for node in nodes}) == len(nodes) == 2
    viz.prefix_tree(trace, step=0)


def test_two_hundred_blocks_are_all_drawn_and_fit_a_page():
    prompts = [[group + 1] * 24 + [100 + number] * 30 for group in range(6) for number in range(6)]
    engine = make_engine(num_blocks=256, block_size=8, max_num_seqs=64, max_num_batched_tokens=2048)
    trace = engine.start_recording()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"R{number}", prompt, SamplingParams(temperature=0, max_tokens=4))
    engine.step()
    engine.step()
    figure = viz.prefix_tree(trace)
    drawn = [bar for found in bars(figure).values() for bar in found]
    assert len(drawn) == len(trace.state(-1).cached_blocks) == 6 * 3 + 36 * 3
    assert figure.get_size_inches()[1] < 10
    figure.canvas.draw()


def test_a_state_without_cached_blocks_is_refused():
    with pytest.raises(ValueError, match="after step 75 no block can be found: choose a later step, or cache prefixes"):
        viz.prefix_tree(sample_trace(enable_prefix_caching=False))
    with pytest.raises(ValueError, match="there is no step 76"):
        viz.prefix_tree(sample_trace(), step=76)


# The hit rate. --------------------------------------------------------------------------------------------


def test_lookups_are_the_admissions_with_what_was_found(trace):
    assert lookups(trace) == [
        Lookup(0, "A", 40, 0, False),
        Lookup(3, "B", 42, 32, False),
        Lookup(6, "C", 17, 0, False),
    ]


def test_the_rate_is_that_of_all_tokens_looked_for_so_far(trace):
    assert twin(viz.hit_rate(trace)) == [
        "axes 0: 'Tokens found in the prefix cache' x='step' y='found (% of the tokens looked for)'",
        "line 'all requests so far: 32.3 % at the end' n=4: 0, 39, 32.3, 32.3",
        "line 'a request is admitted (3)' n=3: 0, 76.2, 0",
    ]
    assert "line 'the last 2: 54.2 % at the end' n=4: 0, 39, 54.2, 54.2" in twin(viz.hit_rate(trace, window=2))


def test_who_comes_back_is_marked_and_left_out_of_the_rate():
    engine = make_engine(num_blocks=12, max_num_seqs=4, max_num_batched_tokens=32, block_size=8)
    trace = engine.start_recording()
    for index in range(5):
        prompt = [*BEGINNING[: 8 * (index % 2)], *range(100 * index, 100 * index + 14)]
        engine.add_request(f"R{index}", prompt, SamplingParams(temperature=0, max_tokens=40))
    run_to_end(engine)
    stats, found = engine.prefix_cache_stats, lookups(trace)
    again = [lookup for lookup in found if lookup.resumed]
    assert len(again) == stats.resumed_requests > 0 and stats.hits > 0
    assert sum(lookup.num_found for lookup in again) == stats.resumed_hits
    assert sum(lookup.num_tokens for lookup in again) == stats.resumed_queries
    assert 100 * stats.hit_rate == pytest.approx(100 * summarize(trace).hit_rate)
    lines = twin(viz.hit_rate(trace))
    assert lines[1].startswith(f"line 'all requests so far: {100 * stats.hit_rate:.1f} % at the end' n=")
    assert lines[2].startswith("line 'a request is admitted (5)' n=5: ")
    assert lines[3].startswith(f"line 'resumed, not in the rate ({len(again)})' n={len(again)}: ")


def test_points_upon_each_other_are_counted():
    engine = make_engine(block_size=8)
    trace = engine.start_recording()
    for index in range(3):
        engine.add_request(f"R{index}", [index + 1] * 9, SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    assert written(viz.hit_rate(trace)) == ["×3"]


def test_a_rate_of_nobody_and_an_empty_window_are_refused(trace):
    with pytest.raises(ValueError, match="the trace admits nobody for the first time"):
        viz.hit_rate(Trace(trace.header, []))
    with pytest.raises(ValueError, match="window must be at least 1 request, got 0"):
        viz.hit_rate(trace, window=0)


# TTFT. ----------------------------------------------------------------------------------------------------


def points(figure):
    """Label to its points."""
    lines = [line for line in figure.axes[0].get_lines() if not line.get_label().startswith("_")]
    return {
        line.get_label(): list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
        for line in lines
    }


def test_ttft_stands_above_the_tokens_that_were_left_to_compute():
    figure = viz.ttft_cold_warm(shared_trace(max_num_batched_tokens=16))
    assert points(figure) == {
        "cold: nothing found (2)": [(40, 3), (17, 2)],
        "warm: a part found (1)": [(10, 1)],
    }
    assert figure.axes[0].get_ylabel() == "TTFT (steps)"


def test_two_traces_are_compared_request_by_request():
    traces = {"off": shared_trace(max_num_batched_tokens=16, enable_prefix_caching=False)}
    traces["on"] = shared_trace(max_num_batched_tokens=16)
    figure = viz.ttft_cold_warm(traces)
    assert points(figure) == {
        "off, cold: nothing found (3)": [(40, 3), (42, 3), (17, 2)],
        "on, cold: nothing found (2)": [(40, 3), (17, 2)],
        "on, warm: a part found (1)": [(10, 1)],
    }
    same = [line for line in figure.axes[0].get_lines() if line.get_label() == "_same request"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in same] == [
        ([40, 40], [3, 3]),
        ([42, 10], [3, 1]),
        ([17, 17], [2, 2]),
    ]


def test_measured_seconds_leave_no_number_of_theirs_in_the_twin(trace):
    figure = viz.ttft_cold_warm({"run": trace}, unit="s", title="T")
    assert [value for _, value in points(figure)["run, warm: a part found (1)"]] == [pytest.approx(0.011, abs=1e-6)]
    assert [line.strip() for line in viz.digest(figure, values=False).splitlines()] == [
        "axes 0: 'T' x='prompt tokens that the request had to compute' y='TTFT (s)'",
        "line 'run, cold: nothing found (2)' n=2",
        "line 'run, warm: a part found (1)' n=1",
    ]


def test_another_unit_and_a_trace_without_tokens_are_refused(trace):
    with pytest.raises(ValueError, match="the unit must be 'step' or 's', got 'seconds'"):
        viz.ttft_cold_warm(trace, unit="seconds")
    with pytest.raises(ValueError, match="no request of the traces put out its first token"):
        viz.ttft_cold_warm({"empty": Trace(trace.header, [])})


# Evictions. -----------------------------------------------------------------------------------------------


def spans(figure, label):
    return [(round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width()) for bar in bars(figure)[label]]


def test_a_block_lives_from_its_publication_to_its_eviction(trace):
    figure = viz.eviction_timeline(trace)
    free, held = "can be found, nobody holds it", "can be found, and held"
    assert sorted(spans(figure, free)) == [
        *[(block, 0, 9) for block in range(4)],
        (4, 0, 6),
        (5, 3, 6),
        (6, 6, 3),
        (7, 6, 3),
    ]
    # A holds the first five for three steps, then B the first four, and C its own.
    assert sorted(spans(figure, held)) == [
        *[(block, 0, 6) for block in range(4)],
        (4, 0, 3),
        (5, 3, 3),
        (6, 6, 3),
        (7, 6, 3),
    ]
    assert points(figure) == {
        "found by a request (4)": [(3.5, 0), (3.5, 1), (3.5, 2), (3.5, 3)],
        "evicted (1)": [(6, 4)],
    }


def test_who_found_its_blocks_and_ended_in_one_step_is_marked_too():
    engine = make_engine(block_size=8)
    trace = engine.start_recording()
    for number in range(2):
        engine.add_request(f"R{number}", [*BEGINNING, 99], SamplingParams(temperature=0, max_tokens=1))
        engine.step()
    assert points(viz.eviction_timeline(trace)) == {"found by a request (4)": [(1.5, block) for block in range(4)]}


def test_many_blocks_share_rows():
    engine = make_engine(num_blocks=1000, block_size=8, max_num_batched_tokens=8192, max_model_len=8192)
    trace = engine.start_recording()
    engine.add_request(
        "A", [1 + number % 900 for number in range(8 * 500)], SamplingParams(temperature=0, max_tokens=1)
    )
    engine.step()
    figure = viz.eviction_timeline(trace)
    rows = {row for row, _, _ in spans(figure, "can be found, and held")}
    assert rows == set(range(167)) and figure.axes[0].get_ylabel() == "first of 3 blocks"
    assert figure.get_size_inches()[1] < 7 and len(figure.axes[0].get_yticks()) <= 14


def test_a_trace_without_cached_blocks_has_no_timeline_of_them():
    with pytest.raises(ValueError, match="no block can be found in any step of the trace"):
        viz.eviction_timeline(sample_trace(enable_prefix_caching=False))


def test_a_request_timeline_tells_how_many_tokens_were_found(trace):
    figure = viz.request_timeline(trace, "T")
    assert twin(figure)[1:] == [
        "bars 'A: prefill, decode' n=2: 1, 2",
        "bars 'B: prefill, decode; 32 found' n=2: 1, 2",
        "bars 'B/1: decode' n=1: 2",
        "bars 'C: prefill, decode' n=2: 1, 2",
    ]
    assert written(figure) == ["32 found"] and "found in the prefix cache (tokens)" in legend(figure)
    cold = viz.request_timeline(shared_trace(enable_prefix_caching=False), "T")
    assert written(cold) == [] and "found in the prefix cache (tokens)" not in legend(cold)
