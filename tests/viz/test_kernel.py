"""Figures of the attention kernel say what the numbers say."""

from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

from minivllm import viz
from minivllm.lessons import kernel, kernel_cost


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_the_running_sum_is_what_is_kept_and_what_is_added():
    fig = viz.online_softmax([0, 1, 3, 3, 2], 2, "T")
    text = viz.digest(fig)
    assert "line 'running maximum m' n=4: 1, 3, 3, 3" in text
    assert "bars 'kept of the sum so far' n=3: 0, 0.185, 2.19" in text  # (1 + e^-1) e^-2, and + 2
    assert "bars 'added by the tile, in its colour' n=3: 1.37, 2, 0.368" in text
    labels = {item.get_text(): item.get_position() for item in fig.axes[1].texts}
    assert list(labels) == ["kept: × 0.14", "kept: × 1.00"]  # beside the hatched parts
    assert labels["kept: × 1.00"][1] == pytest.approx(2.185 / 2, abs=1e-3)
    with pytest.raises(ValueError, match="no scores"):
        viz.online_softmax([], 2, "T")


def test_a_program_is_drawn_with_its_scores_and_its_slots():
    call = kernel.random_call([(3, 20), (1, 5)], num_heads=3, num_kv_heads=1, head_dim=16, block_size=4)
    call = replace(call, launch=kernel.Launch(16, 2, 16, 4, 1))  # two tokens of three, so that one key is left out
    fig = viz.program_reads(call, kernel.program_reads(call, 0, 0), "T")
    text = viz.digest(fig)
    # 16 rows x 19 keys; three rows of the first token do not see the last of them, ten rows are spare.
    assert "image 'scores: 304 computed, 193 hidden' 16 x 20" in text
    assert 'image "slots: 19 read, 1 of the request\'s not" 10 x 4' in text
    table = ", ".join(map(str, call.metadata.block_table[0].tolist()))
    assert f"axes 1: 'table: {table}'" in text
    numbers = [item.get_text() for item in fig.axes[1].texts]
    assert numbers == ["0"] * 16 + ["1"] * 3
    rows = [label.get_text() for label in fig.axes[0].get_yticklabels()]
    assert rows[0] == "token 0 (at 17), head 0"
    assert rows[5:7] == ["token 1 (at 18), head 2", "spare"]


def test_the_legend_names_what_occurs():
    def legend(call, tile):
        fig = viz.program_reads(call, kernel.program_reads(call, tile, 0), "T")
        return [text.get_text() for text in fig.legends[0].get_texts()]

    alone = kernel.random_call([(1, 16)], num_heads=16, num_kv_heads=1, head_dim=16)
    assert legend(alone, 0) == ["tile 0", "empty"]
    two = kernel.random_call([(3, 20), (1, 5)], num_heads=3, num_kv_heads=1, head_dim=16)
    two = replace(two, launch=kernel.Launch(16, 2, 16, 4, 1))
    hidden, unread, others = "pale: hidden by the mask", "its own, not read", "other requests'"
    assert legend(two, 0) == ["tile 0", "tile 1", hidden, unread, others, "empty"]
    assert legend(two, 2) == ["tile 0", hidden, others, "empty"]


def test_a_window_hides_scores():
    call = replace(kernel.random_call([(1, 16)], num_heads=16, num_kv_heads=1, head_dim=16), window=5)
    text = viz.digest(viz.program_reads(call, kernel.program_reads(call, 0, 0), "T"))
    assert "scores: 256 computed, 176 hidden" in text


def test_a_split_that_has_no_keys_is_drawn_too():
    call = kernel.random_call([(1, 5)], num_heads=3, num_kv_heads=1, head_dim=16)
    call = replace(call, num_splits=2)
    assert "0 computed, 0 hidden" in viz.digest(viz.program_reads(call, kernel.program_reads(call, 0, 0, 1), "T"))


def test_programs_stand_beside_the_multiprocessors():
    text = viz.digest(viz.programs_per_card([1, 4], {"a": [3, 12], "b": [48, 96]}, 132, "T"))
    assert "line 'a' n=2: 3, 12" in text and "line '132 multiprocessors' n=2: 132, 132" in text


def test_a_roofline_per_card_and_the_measured_points():
    cards = [kernel_cost.Card("C", 1e12, 1e14, 10, "https://…")]
    text = viz.digest(viz.card_rooflines(cards, {"decode": 3.0}, "T"))
    assert "line 'C (ridge 100)' n=3: 1.5, 100, 100" in text and "measured" not in text
    text = viz.digest(viz.card_rooflines(cards, {"decode": 3.0}, "T", {"kernel": (3.0, 2e12)}))
    assert "line 'measured: kernel' n=1: 2" in text
