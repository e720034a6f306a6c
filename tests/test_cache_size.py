"""How many blocks there are, on a CPU, with a number given, and on a (pretended) GPU."""

import pytest
import torch

from minivllm.cache_size import choose_cache_size
from minivllm.config import GIB, EngineConfig
from minivllm.runner import profile_pass
from tests.conftest import CPU

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    """A device of 10 TB."""
    monkeypatch.setattr("minivllm.cache_size.total_memory", lambda device: 10**13)


def never():
    raise AssertionError("nothing is profiled when the size is given")


def test_the_number_given_counts():
    size = choose_cache_size(EngineConfig(num_kv_blocks=7, block_size=32), 100, CUDA, never)
    assert (size.num_blocks, size.num_slots, size.num_bytes) == (7, 224, 7 * 3200)
    assert str(size) == "7 blocks of 32 tokens (224 tokens, 0.0 MiB): as num_kv_blocks says"


def test_what_fits_into_the_memory_given():
    for device in (CPU, CUDA):
        size = choose_cache_size(EngineConfig(kv_cache_memory_bytes=16_999, block_size=10), 100, device, never)
        assert size.num_blocks == 16 and size.reason == "kv_cache_memory_bytes"


def test_one_gib_on_a_cpu():
    assert choose_cache_size(EngineConfig(), 46_080, CPU, never).num_blocks == GIB // (16 * 46_080) == 1456


def test_memory_for_less_than_a_block_is_refused():
    with pytest.raises(ValueError, match=r"a block of 16 tokens takes 1600 bytes .* there are 1599"):
        choose_cache_size(EngineConfig(kv_cache_memory_bytes=1599), 100, CPU, never)


def test_more_than_the_device_has_is_refused():
    for fields in ({"num_kv_blocks": 10**10}, {"kv_cache_memory_bytes": 16 * 10**12}):
        with pytest.raises(ValueError, match=f"would take {16 * 10**12} bytes and the cpu has {10**13}"):
            choose_cache_size(EngineConfig(**fields), 100, CPU, never)


def test_the_memory_of_this_machine_is_known(monkeypatch):
    monkeypatch.undo()
    from minivllm.cache_size import total_memory

    assert 10**9 < total_memory(CPU) < 10**14


def test_a_negative_rest_is_nothing(monkeypatch):
    card = PretendedCard(monkeypatch, others=9.5)
    with pytest.raises(ValueError, match="there are 0"):
        choose_cache_size(EngineConfig(gpu_memory_utilization=0.5), GIB // 256, CUDA, card.profile)


def test_the_profile_sorts_the_vocabulary_as_top_p_does(tiny_llama, monkeypatch):
    from minivllm import sampler

    seen = []
    original = sampler.keep_likeliest
    monkeypatch.setattr(sampler, "keep_likeliest", lambda scores, *a: seen.append(len(scores)) or original(scores, *a))
    profile_pass(tiny_llama[1], EngineConfig(max_num_seqs=7, max_num_batched_tokens=70))
    assert seen == [7, 1]


class PretendedCard:
    """A card of 10 GiB, of which others use 2; the model takes 1 and the largest pass 0.5 at its peak."""

    def __init__(self, monkeypatch, others=2.0):
        self.calls, self.peak, self.others = [], 1.0, others
        gib = lambda value: int(value * GIB)  # noqa: E731
        for name, function in {
            "empty_cache": lambda: self.calls.append("empty"),
            "reset_peak_memory_stats": lambda device: self.calls.append("reset"),
            "synchronize": lambda device: self.calls.append("wait"),
            "max_memory_allocated": lambda device: gib(self.peak),
            "memory_reserved": lambda device: gib(1.25),
            "mem_get_info": lambda device: (gib(10 - 1.25 - self.others), gib(10)),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def profile(self):
        self.calls.append("profile")
        self.peak = 1.5


def test_a_gpu_gives_what_the_largest_pass_and_others_leave(monkeypatch):
    card = PretendedCard(monkeypatch)
    size = choose_cache_size(EngineConfig(gpu_memory_utilization=0.8), GIB // 256, CUDA, card.profile)
    # 0.8 of 10, less 1.5 and 2: 4.5 GiB, in blocks of 1/16 GiB.
    assert size.num_blocks == 72
    assert card.calls == ["empty", "reset", "profile", "wait", "empty"]
    assert size.reason == (
        "gpu_memory_utilization 0.8 of 10.0 GiB, less 1.5 GiB for the model and the largest pass and 2.0 GiB that "
        "others use"
    )


def test_a_gpu_without_room_says_so(monkeypatch):
    card = PretendedCard(monkeypatch, others=7.5)
    with pytest.raises(ValueError, match=r"there are 0 \(gpu_memory_utilization 0.9 of 10.0 GiB"):
        choose_cache_size(EngineConfig(), GIB // 256, CUDA, card.profile)


def test_the_largest_passes_run_whatever_the_memory_held_before(tiny_llama, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, torch.nan, **options))
    for fields in ({}, {"max_num_batched_tokens": 40, "max_num_seqs": 7}, {"max_num_batched_tokens": 2}):
        profile_pass(tiny_llama[1], EngineConfig(**fields))
