"""Figures of traces: their text twins carry the numbers of the steps."""

import matplotlib.pyplot as plt
import pytest

from minivllm import viz
from minivllm.sampling_params import SamplingParams
from minivllm.trace import memory_events, summarize
from tests.fakes import make_engine, sample_trace

WORK = [(5, 4, 0), (9, 10, 0), (3, 2, 1)]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def static():
    return sample_trace(WORK, batching="static", max_num_seqs=2)


@pytest.fixture
def continuous():
    return sample_trace(WORK, max_num_seqs=2)


def twin(figure):
    return [line.strip() for line in viz.digest(figure).splitlines()]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_timeline_has_a_line_per_request_with_its_phases_and_their_steps(static):
    figure = viz.request_timeline(static, "Title")
    assert twin(figure) == [
        "axes 0: 'Title' x='step' y='request'",
        "bars 'R0: prefill, decode, rerun' n=3: 1, 3, 6",
        "bars 'R1: prefill, decode' n=2: 1, 9",
        "bars 'R2: queued, prefill, decode' n=3: 9, 1, 1",
    ]
    assert "ended, still computed" in legend(figure) and not any("preempted" in name for name in legend(figure))


def test_a_timeline_shows_every_chunk_and_every_loss_of_memory():
    figure = viz.request_timeline(sample_trace(), "T")
    lines = twin(figure)
    assert "bars 'R3: queued, prefill, decode' n=5: 40, 1, 1, 1, 11" in lines
    assert "bars 'R5: queued, prefill, decode, preempted' n=9: 41, 1, 2, 2, 1, 1, 5, 1, 19" in lines
    assert "preempted: memory lost, waits" in legend(figure)


def test_a_timeline_in_seconds_has_the_widths_of_time(static):
    assert "bars 'R2: queued, prefill, decode' n=3: 0.0918, 0.0103, 0.0101" in twin(
        viz.request_timeline(static, "T", x="seconds")
    )


def test_forty_requests_have_forty_rows():
    figure = viz.request_timeline(sample_trace([(5, 5, i // 4) for i in range(40)], num_blocks=64), "T")
    assert [line.split(":")[0] for line in twin(figure)[1:]] == [f"bars 'R{i}" for i in range(40)]
    assert figure.get_size_inches()[1] < 10


def test_answers_and_aborts_are_drawn():
    engine = make_engine()
    trace = engine.start_recording()
    engine.add_request("A", [1, 2, 3], SamplingParams(n=2, seed=1, max_tokens=9))
    for _ in range(3):
        engine.step()
    engine.abort_request("A")
    while engine.has_unfinished_requests():
        engine.step()
    figure = viz.request_timeline(trace, "T")
    assert twin(figure)[1:] == ["bars 'A: prefill, decode, idle' n=3: 1, 2, 1", "bars 'A/1: decode, idle' n=2: 2, 1"]
    assert "aborted or failed" in legend(figure) and "end" not in legend(figure)


def test_who_failed_or_was_aborted_has_another_mark_than_who_ended():
    engine = make_engine()
    trace = engine.start_recording()
    for name in ("ends", "fails", "leaves"):
        engine.add_request(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=2))
    engine.step()
    engine.runner.fail["fails"] = "out of luck"
    engine.abort_request("leaves")
    engine.step()
    figure = viz.request_timeline(trace, "T")
    marks = [(line.get_ydata()[0], line.get_xdata()[0], line.get_marker()) for line in figure.axes[0].get_lines()]
    assert [mark for mark in marks if mark[2] != "o"] == [(0, 2, "|"), (1, 2, "x"), (2, 2, "x")]
    assert legend(figure)[-2:] == ["end", "aborted or failed"]


ODD_NAMES = ("$x^{$", "_hidden", "<b>", "two\nlines")


def odd_trace():
    engine = make_engine()
    trace = engine.start_recording()
    for name in ODD_NAMES:
        engine.add_request(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=3))
    while engine.has_unfinished_requests():
        engine.step()
    return trace


def told(figure, kind):
    """The figure's text twin: one line per request, without backslashes (names may be escaped)."""
    return [line.replace("\\", "") for line in twin(figure) if line.startswith(kind)]


@pytest.mark.parametrize(
    ("draw", "kind", "num_panels"),
    [
        (lambda trace: viz.request_timeline(trace, "T"), "bars", 1),
        (lambda trace: viz.compare_traces({"one": trace, "two": trace}, "T"), "bars", 2),
        (lambda trace: viz.token_gaps({"one": trace}, ODD_NAMES, "T"), "line", 1),
    ],
    ids=["request_timeline", "compare_traces", "token_gaps"],
)
def test_any_name_can_be_drawn_and_stands_in_the_twin(draw, kind, num_panels):
    figure = draw(odd_trace())
    figure.canvas.draw()  # no name is read as a formula
    for name in ODD_NAMES:
        shown = [line for line in told(figure, kind) if all(part in line for part in name.splitlines())]
        assert len(shown) == num_panels, name


def test_any_name_stands_in_the_legend_of_the_gaps():
    names = legend(viz.token_gaps({"one": odd_trace()}, ODD_NAMES, "T"))
    assert len(names) == len(ODD_NAMES)
    for name, shown in zip(ODD_NAMES, names, strict=True):
        assert all(part in shown.replace("\\", "") for part in name.splitlines())


def test_two_policies_stand_below_each_other_on_one_axis(static, continuous):
    figure = viz.compare_traces({"static": static, "continuous": continuous}, "Title")
    lines = twin(figure)
    assert "axes 0: 'Title' x='' y='static'" in lines and "axes 1: '' x='step' y='continuous'" in lines
    assert lines.count("bars 'R1: prefill, decode' n=2: 1, 9") == 2
    assert "bars 'R2: queued, prefill, decode' n=3: 3, 1, 1" in lines
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert [ax.texts[0].get_text().strip() for ax in figure.axes] == [
        "all done after 12 steps",
        "all done after 10 steps",
    ]


@pytest.mark.parametrize("number", [1, 4])
def test_one_trace_or_four_are_not_compared(static, number):
    with pytest.raises(ValueError, match=f"two or three traces can be compared, got {number}"):
        viz.compare_traces({str(index): static for index in range(number)}, "T")


@pytest.mark.parametrize("draw", [viz.request_timeline, viz.token_budget, viz.queue_and_usage])
def test_a_trace_without_steps_is_refused(draw):
    with pytest.raises(ValueError, match="has no steps"):
        draw(make_engine().start_recording(), "T")


def test_the_budget_is_divided_among_prefill_decode_and_rows_of_no_use(static):
    lines = twin(viz.token_budget(static, "T"))
    assert "bars 'decode: 13' n=12: 0, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 1" in lines
    assert "bars 'prefill: 17' n=12: 14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3, 0" in lines
    assert "bars 'ended rows, of no use: 6' n=12: 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0" in lines
    assert "line 'token budget: 32' n=2: 32, 32" in lines


def test_a_budget_far_above_does_not_flatten_the_bars():
    figure = viz.token_budget(sample_trace(WORK, max_num_batched_tokens=2048), "T")
    assert figure.axes[0].get_ylim()[1] < 30
    assert figure.axes[0].texts[0].get_text().startswith("token budget: 2048, far above")


def test_rows_and_usage_are_those_of_the_pass_with_who_ended_in_it(static):
    lines = twin(viz.queue_and_usage(static, "T"))
    assert "line 'running (mean 1.3)' n=12: 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1" in lines
    assert "line 'waiting (mean 0.8)' n=12: 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0" in lines
    assert "line 'preempted (mean 0.0)' n=12: " + ", ".join(["0"] * 12) in lines
    usage = "25, 25, 25, 25, 25, 25, 25, 25, 33.3, 33.3, 8.33, 8.33"
    assert f"line 'held by somebody (mean 24 %)' n=12: {usage}" in lines
    filled = "14.6, 16.7, 18.8, 20.8, 21.9, 22.9, 24, 25, 26, 27.1, 3.12, 4.17"
    assert f"line 'with a token in it (19 %)' n=12: {filled}" in lines


def test_the_knee_is_the_smallest_batch_with_nine_tenths_of_the_best():
    rates = {1: 10.0, 4: 35.0, 8: 91.0, 16: 100.0, 32: 89.0}
    points = {size: viz.BatchPoint(rate, 5.0, 1.0, size / 2, 0.25) for size, rate in rates.items()}
    assert viz.knee(points) == 8 and viz.knee(points, share=0.95) == 16
    lines = twin(viz.batch_size_curves(points, "T", "second"))
    assert "line 'output tokens per second' n=5: 10, 35, 91, 100, 89" in lines
    assert "line 'knee (90 % of the best)' n=1: 91" in lines  # measured: no number in the label
    assert "line 'rows in use' n=5: 50, 50, 50, 50, 50" in lines
    assert "line 'KV cache in use' n=5: 25, 25, 25, 25, 25" in lines


def test_batch_sizes_stand_in_their_order_however_they_are_given():
    points = {8: viz.BatchPoint(80.0, 3.0, 1.5, 4.0, 0.5), 1: viz.BatchPoint(10.0, 9.0, 1.0, 1.0, 0.1)}
    points[2] = viz.BatchPoint(19.0, 6.0, 1.2, 1.5, 0.2)
    figure = viz.batch_size_curves(points, "T")
    lines = twin(figure)
    for expected in (
        "line 'output tokens per step' n=3: 10, 19, 80",
        "line 'mean TTFT (steps)' n=3: 9, 6, 3",
        "line 'mean TPOT (steps)' n=3: 1, 1.2, 1.5",
        "line 'rows in use' n=3: 100, 75, 50",
        "line 'KV cache in use' n=3: 10, 20, 50",
        "line 'knee: 8 (90 % of the best)' n=1: 80",
    ):
        assert expected in lines
    assert all(list(ax.get_lines()[0].get_xdata()) == [1, 2, 8] for ax in figure.axes)
    assert [tick.get_text() for tick in figure.axes[2].get_xticklabels()] == ["1", "2", "8"]


def test_a_curve_of_one_point_is_refused():
    with pytest.raises(ValueError, match="at least two batch sizes, got 1"):
        viz.batch_size_curves({1: viz.BatchPoint(1, 1, 1, 1, 1)}, "T")


def test_a_batch_point_is_a_mean_over_the_requests(static):
    summary = summarize(static)
    steps, seconds = viz.batch_point(summary), viz.batch_point(summary, "second")
    assert (steps.throughput, steps.mean_ttft, steps.mean_tpot) == (16 / 12, (1 + 1 + 10) / 3, 1.0)
    assert seconds.throughput == pytest.approx(16 / 0.1236)
    assert seconds.mean_ttft == pytest.approx((0.0114 + 0.0114 + 0.1021) / 3)
    assert steps.mean_running == seconds.mean_running == pytest.approx(16 / 12)
    # Of 12 blocks: 3 in eight steps, 4 in two, 1 in two.
    assert steps.mean_usage == seconds.mean_usage == pytest.approx((8 * 3 + 2 * 4 + 2 * 1) / 12 / 12, abs=1e-6)
    assert summary.peak_usage == pytest.approx(4 / 12, abs=1e-6)


def test_the_stall_of_a_long_prompt_is_seen_and_chunks_spread_it():
    work = [(4, 12, 0), (60, 2, 3)]
    whole = sample_trace(work, num_blocks=64, max_num_batched_tokens=256, enable_chunked_prefill=False)
    chunks = sample_trace(work, num_blocks=64, max_num_batched_tokens=21)
    lines = twin(viz.token_gaps({"whole prompts": whole, "chunks": chunks}, "R0", "T"))
    assert "line 'R0' n=11: 1, 1, 61, 2, 1, 1, 1, 1, 1, 1, 1" in lines
    assert "line 'R0' n=11: 1, 1, 21, 21, 21, 2, 1, 1, 1, 1, 1" in lines
    assert "line 'longest: 61 tokens, 61 × the median' n=2: 61, 61" in lines
    assert "line 'longest: 21 tokens, 21 × the median' n=2: 21, 21" in lines


def test_measured_gaps_leave_no_numbers_in_the_twin(static):
    figure = viz.token_gaps({"static": static}, ["R0", "R1"], "T", x="step", unit="seconds")
    assert [line.strip() for line in viz.digest(figure, values=False).splitlines()[1:]] == [
        "line 'R0' n=3",
        "line 'R1' n=9",
        "line 'longest' n=2",
    ]


def test_gaps_need_two_tokens():
    with pytest.raises(ValueError, match="R0: none has put out two tokens"):
        viz.token_gaps({"one": sample_trace([(3, 1, 0)])}, "R0", "T")


def test_a_memory_map_is_drawn_from_a_trace(static):
    lines = twin(viz.memory_map(memory_events(static), 12, 8, "T"))
    assert "bars 'R2' n=1: 0" in lines
    assert any(line.startswith("image 'owners 272, with a token 216' 96 x 12") for line in lines)
