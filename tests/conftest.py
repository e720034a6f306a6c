"""Builders shared by all tests: tiny random checkpoints, and the real model loaded once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from minivllm.model.decoder import Decoder
from minivllm.model.default_model import ensure_default_model
from minivllm.model.weights import load_decoder

ROOT = Path(__file__).parents[1]
ORACLE = json.loads((ROOT / "data" / "oracle" / "smollm2-135m.json").read_text())
CPU = torch.device("cpu")

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_hf_model(family: str = "Llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random transformers model in float64: family is Llama, Mistral, Qwen2 or Qwen3."""
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    # Biases start at zero, where a dropped one would not be noticed.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def tiny_pair(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, Decoder]]:
    """Makes (transformers model, our decoder loaded from its checkpoint), both in float64."""

    def build(family: str = "Llama", **changes: Any) -> tuple[PreTrainedModel, Decoder]:
        model = tiny_hf_model(family, **changes)
        model.save_pretrained(tmp_path)
        return model, load_decoder(tmp_path, CPU, torch.float64)

    return build


@pytest.fixture(scope="session")
def tiny_llama() -> tuple[PreTrainedModel, Decoder]:
    """A tiny Llama and our decoder with the same weights, float64, shared by all tests that only read."""
    from minivllm.model.architecture import ModelConfig
    from minivllm.model.rotary import RotaryEmbedding
    from minivllm.model.weights import fill_parameters

    model = tiny_hf_model()
    model.config.architectures = ["LlamaForCausalLM"]
    config = ModelConfig.from_hf(model.config)
    rotary = RotaryEmbedding(model.config, config.head_dim, config.longest_text, torch.float64)
    decoder = Decoder(config, rotary).double().eval().requires_grad_(False)
    fill_parameters(decoder, iter(model.state_dict().items()))
    return model, decoder


@torch.inference_mode()
def hf_generate(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate` for one prompt, not stopping at end-of-sequence."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    sequences = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
    )
    return sequences[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """The converted default model."""
    return ensure_default_model()


@pytest.fixture(scope="session")
def real_llm(real_folder: Path) -> Any:
    """The default model in float32 on the readable engine, loaded once."""
    from minivllm import LLM

    return LLM(str(real_folder), dtype="float32", device="cpu", attention_backend="torch")
