"""Compiles the loops for the types that models come in, so that nobody waits for it later: a part of `make setup`.

What is compiled for a model of one small layer serves models of any size.
"""

import subprocess
import sys
from typing import Any

import torch
from transformers import LlamaConfig

DTYPES = ("float32", "bfloat16")


def precompile(name: str) -> None:
    """Compiles for a type, or loads what was compiled before."""
    from minivllm.backends import fast_decoder, start_attention
    from minivllm.model.architecture import ModelConfig
    from minivllm.model.attention import KVCache
    from minivllm.model.decoder import Decoder
    from minivllm.model.rotary import RotaryEmbedding

    dtype, cpu = getattr(torch, name), torch.device("cpu")
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    hf_config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, architectures=["LlamaForCausalLM"])
    config = ModelConfig.from_hf(hf_config)
    decoder = Decoder(config, RotaryEmbedding(hf_config, config.head_dim, 16)).to(dtype)
    start_attention("numba", fast_decoder("numba", decoder), KVCache(config, 1, 16, dtype, cpu))


def main() -> int:
    """Without arguments compiles for all types at a time, each in a process of its own."""
    if len(sys.argv) > 1:
        precompile(sys.argv[1])
        return 0
    running = [subprocess.Popen([sys.executable, "-m", "minivllm.cpu.precompile", name]) for name in DTYPES]
    return max([process.wait() for process in running])


if __name__ == "__main__":
    sys.exit(main())
