"""ModelConfig: what our decoder must know of a checkpoint, read from its Hugging Face config.

The Llama family differs in a handful of switches, and each is a field here. What the decoder can't compute
is refused here, by name, before a single weight is read.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and switches of a Llama-family decoder.

    Attributes:
        sliding_window: per layer, how many of the latest tokens (its own included) a token attends to;
            None means all.
        qk_norm: RMSNorm on every query and key head before the rotation (Qwen3).
        hf_config: the config it was read from, for the rotary frequencies.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]
    hf_config: PreTrainedConfig

    @classmethod
    def from_hf(cls, config: PreTrainedConfig) -> "ModelConfig":
        """Reads a Hugging Face config.

        Raises:
            ValueError: another architecture, quantized weights, or sizes that do not fit together.
        """
        names = list(config.architectures or [])
        architecture = next((name for name in names if name in SUPPORTED), None)
        if architecture is None:
            raise ValueError(
                f"architecture {', '.join(names) or '(none named)'} (model_type {config.model_type!r}) has no "
                f"back end here; supported are {', '.join(SUPPORTED)}"
            )
        if getattr(config, "quantization_config", None):
            raise ValueError("the checkpoint is quantized (its config has a quantization_config): use full precision")
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads do not divide evenly over {num_kv_heads} key-value heads")
        is_qwen2 = architecture == "Qwen2ForCausalLM"
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            rms_norm_eps=config.rms_norm_eps,
            hidden_act=config.hidden_act,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=is_qwen2 or attention_bias,
            output_bias=attention_bias and not is_qwen2,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_windows(config),
            hf_config=config,
        )

    @property
    def longest_text(self) -> int:
        """Most positions the model can tell apart, in tokens: its context, stretched by its RoPE scaling.

        Configs with linear or dynamic scaling state the context before it; the others the one after it.
        """
        rope = self.hf_config.rope_parameters
        if rope.get("rope_type") in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope["factor"])
        if rope.get("rope_type") == "yarn" and "original_max_position_embeddings" in rope:
            return max(self.max_position_embeddings, int(rope["original_max_position_embeddings"] * rope["factor"]))
        return self.max_position_embeddings

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token leaves in the KV cache: a key and a value per layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def _windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer, from `layer_types` where the config has them."""
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:
        layer_types = ["sliding_attention" if window else "full_attention"] * config.num_hidden_layers
    unknown = sorted(set(layer_types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(f"layer type(s) {', '.join(unknown)} have no back end here")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
