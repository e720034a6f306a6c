"""Figures say what they show: the text twin carries the numbers, and an empty figure is an error."""

import matplotlib.pyplot as plt
import pytest

from minivllm import viz
from minivllm.lessons.static_batch import slab_rows
from minivllm.viz.style import PALETTE, request_color


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


@pytest.fixture
def shown(monkeypatch):
    """What was displayed: (data, metadata) of every call."""
    calls = []
    monkeypatch.setattr("minivllm.viz.display.display", lambda data, raw, metadata: calls.append((data, metadata)))
    return calls


def lines(**series):
    return viz.growth([1, 2, 3], series, "Title", "x (unit)", "y (unit)")


def test_a_figure_is_shown_as_a_picture_with_alt_text_and_a_text_twin(shown):
    viz.show(lines(up=[1, 2, 30]), "It goes up.")
    [(data, metadata)] = shown
    assert data["image/png"].startswith("iVBOR")
    assert metadata == {"image/png": {"alt": "It goes up."}}
    assert data["text/plain"].splitlines() == [
        "[figure] It goes up.",
        "axes 0: 'Title' x='x (unit)' y='y (unit)'",
        "  line 'up' n=3: 1, 2, 30",
    ]
    assert not plt.get_fignums()


def test_the_twin_of_measured_values_has_no_numbers(shown):
    viz.show(lines(up=[1, 2, 30]), "It goes up.", measured=True)
    assert "  line 'up' n=3" in shown[0][0]["text/plain"].splitlines()


def test_a_changed_value_changes_the_twin():
    assert viz.digest(lines(up=[1, 2, 30])) != viz.digest(lines(up=[1, 2, 31]))


def test_long_series_are_shortened_but_counted():
    figure = viz.growth(range(100), {"line": range(100)}, "T", "x", "y")
    assert "  line 'line' n=100: 0, 1, 2, …, 97, 98, 99" in viz.digest(figure).splitlines()


@pytest.mark.parametrize("alt", ["", "  "])
def test_alt_text_is_owed(alt):
    with pytest.raises(ValueError, match="needs alt text"):
        viz.show(lines(up=[1, 2, 3]), alt)


def test_an_empty_figure_is_an_error():
    with pytest.raises(ValueError, match="figure is empty"):
        viz.show(plt.figure(), "Nothing.")


def test_bars_stand_in_the_twin_with_their_sizes():
    figure = viz.horizontal_bars({"a": 1.5, "b": 20}, "T", "MiB", form="{:.1f}")
    assert "  bars 'MiB' n=2: 1.5, 20" in viz.digest(figure).splitlines()


def test_live_rows_count_the_rows_that_still_answer():
    twin = viz.digest(viz.live_rows([3, 1], "T")).splitlines()
    assert "  bars 'rows that answer' n=3: 2, 1, 1" in twin
    assert "  bars 'ended rows' n=3: 0, 1, 1" in twin


def test_the_roof_is_the_lower_of_bandwidth_and_matrix_rate():
    figure = viz.roofline(1e9, 10e9, {"slow": (1.0, 5e8), "fast": (100.0, 9e9)}, "T")
    twin = viz.digest(figure).splitlines()
    assert "  line 'roof of this machine' n=3: 0.1, 10, 10" in twin
    assert "  line 'slow' n=1: 0.5" in twin and "  line 'fast' n=1: 9" in twin


def test_the_slab_map_divides_every_slot():
    rows = slab_rows([4, 2], [1, 5], 12)
    assert rows == [viz.SlabRow(0, 4, 0, 4, 4), viz.SlabRow(2, 2, 4, 0, 4)]
    assert all(sum(vars(row).values()) == 12 for row in rows)
    twin = viz.digest(viz.slab_map(rows, "T")).splitlines()
    assert "  bars 'dead' n=2: 4, 0" in twin


def test_slabs_too_short_for_the_batch_are_refused():
    with pytest.raises(ValueError, match="writes 8 columns and the slabs have 7"):
        slab_rows([4, 2], [1, 5], 7)


def test_a_request_keeps_its_colour_and_neighbours_differ():
    colors = [request_color(index) for index in range(20)]
    assert colors[:8] == list(PALETTE) and colors[8] == colors[0]
    assert len(set(PALETTE)) == 8
