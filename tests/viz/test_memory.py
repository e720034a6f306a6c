"""Figures of memory say what the records say."""

import matplotlib.pyplot as plt
import pytest

from minivllm import viz
from minivllm.kv_cache import Fragmentation, MemoryEvent
from minivllm.viz.memory import replay

EVENTS = [
    MemoryEvent(0, "allocate", "R0", (1,), 2),
    MemoryEvent(1, "grow", "R0", (1,), 3),
    MemoryEvent(1, "allocate", "R10", (0,), 1),
    MemoryEvent(1, "free", "R0", (), 0),
    MemoryEvent(2, "allocate", "R2", (1, 2), 3),
]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def test_replay_gives_every_slot_its_owner_and_its_token():
    owner, stored = replay(EVENTS, num_blocks=3, block_size=2)
    # Owners in natural order: R0, R2, R10. What ends in a step is still seen in it.
    assert owner.T.tolist() == [[-1, -1, 0, 0, -1, -1], [2, 2, 0, 0, -1, -1], [2, 2, 1, 1, 1, 1]]
    assert stored.T.astype(int).tolist() == [[0, 0, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0], [1, 0, 1, 1, 1, 0]]


def test_a_block_given_back_within_a_step_shows_its_next_owner():
    events = [
        MemoryEvent(0, "allocate", "a", (0,), 1),
        MemoryEvent(1, "free", "a", (), 0),
        MemoryEvent(1, "allocate", "b", (0,), 1),
    ]
    owner, _ = replay(events, num_blocks=1, block_size=1)
    assert owner.tolist() == [[0, 1]]


def test_a_request_that_gives_way_is_not_seen_in_that_step():
    events = [
        MemoryEvent(0, "allocate", "A", (0,), 3),
        MemoryEvent(0, "allocate", "B", (1,), 4),
        MemoryEvent(1, "grow", "A", (0,), 4),
        MemoryEvent(1, "free", "B", (), 0),  # refused its next slot, and given up
    ]
    owner, _ = replay(events, num_blocks=2, block_size=4)
    assert owner[4:, 1].tolist() == [-1] * 4


def test_any_request_id_will_do():
    events = [MemoryEvent(0, "allocate", name, (i,), 1) for i, name in enumerate(["a_1", "cmpl-8f3a", "1a", "é1", ""])]
    assert viz.digest(viz.memory_map(events, 5, 1, "T"))


def test_a_map_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no events: set manager\.events"):
        viz.memory_map([], 4, 4, "T")


def test_the_memory_map_counts_owned_and_filled_slots():
    twin = viz.digest(viz.memory_map(EVENTS, 3, 2, "T"))
    assert "image 'owners 12, with a token 9' 6 x 3" in twin
    assert [line for line in twin.splitlines() if "bars" in line] == [
        f"  bars '{name}' n=1: 0" for name in ("R0", "R2", "R10")
    ]


def test_fragmentation_over_time_names_the_averages():
    samples = [Fragmentation(4, 1, 1, 2, 2), Fragmentation(8, 0, 1, 0, 1)]
    twin = viz.digest(viz.fragmentation_over_time([0, 8], samples, "T"))
    for part in ("used 60 %", "to_come 5 %", "internal 10 %", "external 10 %", "free 15 %"):
        assert f"area '{part}'" in twin


def test_stacked_shares_list_every_part():
    twin = viz.digest(viz.stacked_shares({"a": {"used": 40.0, "free": 60.0}, "b": {"used": 90.0}}, "T"))
    assert "  bars 'used' n=2: 40, 90" in twin.splitlines()
    assert "  bars 'free' n=2: 60, 0" in twin.splitlines()


def test_block_tables_are_listed_as_arrows():
    figure = viz.block_tables({"A": [2, 0], "B": [2]}, {"A": 5, "B": 4}, 3, 4, "T")
    assert [line.strip() for line in viz.digest(figure).splitlines()[1:]] == ["line 'A → 2, 0' n=0", "line 'B → 2' n=0"]
