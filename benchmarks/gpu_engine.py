"""Measures the whole engine on random weights of real models' shapes: nothing is downloaded."""

import random
from functools import partial

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks.gpu_kernels import Case, HeadShape
from benchmarks.gpu_timing import Bench, Measured, WrongResult
from minivllm import SamplingParams
from minivllm.cache_size import KVCacheSize
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine, ModelLimits
from minivllm.llm import make_manager, make_scheduler
from minivllm.model.architecture import ModelConfig
from minivllm.model.decoder import Decoder
from minivllm.model.rotary import RotaryEmbedding
from minivllm.runner import ModelRunner

WARM_UP = 4  # output tokens: a prefill pass and decode passes compile what they need
PASS_BYTES = 2**30  # for the tensors of a pass, logits included

QWEN3_0_6B = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1_024,
    intermediate_size=3_072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    tie_word_embeddings=True,
    architectures=["Qwen3ForCausalLM"],
)
SMOLLM2_135M = LlamaConfig(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1_536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8_192,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)


def unfilled_decoder(hf_config: PreTrainedConfig, num_positions: int) -> Decoder:
    """A decoder whose weights have a shape and no memory yet."""
    config = ModelConfig.from_hf(hf_config)
    rotary = RotaryEmbedding(hf_config, config.head_dim, num_positions)
    with torch.device("meta"):
        return Decoder(config, rotary)


def fill_randomly(decoder: Decoder, device: torch.device, dtype: torch.dtype) -> Decoder:
    """Gives it weights: normal numbers, the norms' aside, the same in every call."""
    decoder = decoder.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    decoder.rotary.to(device)
    if decoder.config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    torch.manual_seed(0)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(std=0.02)
    return decoder


def build_engine(decoder: Decoder, num_requests: int, length: int, backend: str) -> LLMEngine:
    """An engine whose memory holds that many requests of that length, and which runs all of them at once."""
    config = EngineConfig(
        max_model_len=length,
        num_kv_blocks=num_requests * -(-length // EngineConfig.block_size),
        max_num_seqs=num_requests,
        enable_prefix_caching=False,  # every round computes all prompts
        attention_backend=backend,
    )
    num_blocks = config.num_kv_blocks or 0
    manager = make_manager(config, KVCacheSize(num_blocks, config.block_size, 0, ""), length)
    runner = ModelRunner(decoder, num_blocks, config.block_size, backend)
    return LLMEngine(config, make_scheduler(config, manager), runner, ModelLimits(decoder.config.vocab_size, length))


def generate(engine: LLMEngine, prompts: list[list[int]], max_tokens: int) -> None:
    """Runs all prompts, which come together.

    Raises:
        WrongResult: a request that did not give its tokens.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params, output_kind="final_only")
    answers = []
    while engine.has_unfinished_requests():
        answers += [output.outputs[0] for output in engine.step()]
    for answer in answers:
        if len(answer.token_ids) != max_tokens:
            raise WrongResult(f"a request ended with {answer.finish_reason!r} ({answer.stop_reason})")


def measure_engine(
    bench: Bench,
    model: str,
    hf_config: PreTrainedConfig,
    num_requests: int,
    lengths: tuple[int, int],
    against_torch: bool = False,
) -> Measured | None:
    """Output tokens of requests that come together, on the Triton kernels; None where it does not fit.

    Args:
        bench: where and how.
        model: its name.
        hf_config: its shape.
        num_requests: how many.
        lengths: tokens of each prompt, and of each answer.
        against_torch: whether the same runs on plain torch too, in turns.
    """
    (num_prompt, num_output), length = lengths, sum(lengths)
    decoder = unfilled_decoder(hf_config, length)
    config, num_weights = decoder.config, sum(parameter.numel() for parameter in decoder.parameters())
    num_slots = num_requests * (length + EngineConfig.block_size) * (1 + against_torch)
    if not bench.fits((num_weights + num_slots * config.kv_values_per_token) * bench.dtype.itemsize + PASS_BYTES):
        return None
    heads = HeadShape(model, config.num_heads, config.num_kv_heads, config.head_dim)
    for num_queries in (1, num_prompt):
        Case(bench, heads, length, num_queries=num_queries).check()
    decoder = fill_randomly(decoder, bench.device, bench.dtype)
    rng = random.Random(0)
    prompts = [[rng.randrange(config.vocab_size) for _ in range(num_prompt)] for _ in range(num_requests)]
    samples = []
    for backend in ("triton", "torch") if against_torch else ("triton",):
        engine = build_engine(decoder, num_requests, length, backend)
        generate(engine, prompts, min(WARM_UP, num_output))
        samples.append(bench.wall(partial(generate, engine, prompts, num_output)))
    seconds, *rival = bench.medians(samples)
    return Measured(model, f"{num_requests}", num_requests * num_output, seconds, rival[0] if rival else None)
