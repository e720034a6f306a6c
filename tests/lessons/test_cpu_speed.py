"""What appendix 1 measures is what it says it measures."""

import pytest
import torch

from minivllm.backends import fast_decoder
from minivllm.lessons import cpu_speed
from minivllm.lessons.cpu_speed import DecodeStep, attention_ms, decode_inputs, products_of, profile_step
from minivllm.model.attention import PagedAttention

pytest.importorskip("numba")

from minivllm.cpu.paged_attention import NumbaAttention


def test_a_step_is_the_same_on_all_back_ends(tiny_pair):
    decoder = tiny_pair("Llama")[1]
    fast = fast_decoder("numba", tiny_pair("Llama")[1])
    with torch.inference_mode():
        cases = ((decoder, PagedAttention), (decoder, NumbaAttention), (fast, NumbaAttention))
        scores = [DecodeStep(model, backend, 3, 40, num_shared=32).run() for model, backend in cases]
    assert scores[0].shape == (3, decoder.config.vocab_size)
    assert all(torch.allclose(scores[0], other, atol=1e-4) for other in scores[1:])


def test_shared_blocks_are_shared_and_all_others_are_not():
    tables = decode_inputs(batch=3, context=50, num_shared=32)[0].block_table
    assert (tables[:, :2] == tables[0, :2]).all() and tables.shape == (3, 4)
    assert len({*tables[0, :2].tolist(), *tables[:, 2:].flatten().tolist()}) == 8


def test_every_matrix_of_all_layers_is_multiplied_once(tiny_pair):
    decoder = tiny_pair("Llama")[1]
    layers = decoder.config.num_layers
    assert len(products_of(decoder, 2)) == 4 * layers  # gate and up are one
    fast = fast_decoder("numba", tiny_pair("Llama")[1])
    products = products_of(fast, 2)
    assert len(products) == 5 * layers
    with torch.inference_mode():
        for product in products:
            product()


def test_parts_add_up_to_the_step(tiny_pair, monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(cpu_speed.time, "perf_counter", lambda: next(ticks))
    step = profile_step(tiny_pair("Llama")[1], PagedAttention, 2, 20)
    assert step.parts == {"products": 1000, "attention": 1000, "head": 1000, "rest": 0} and step.total == 3000
    assert attention_ms(tiny_pair("Llama")[1], PagedAttention, 2, 20, num_shared=16) == 1000
