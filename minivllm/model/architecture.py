"""ModelConfig: what our decoder must know of a checkpoint, read from its Hugging Face config.

The Llama family differs in a handful of switches, and each is a field here. What the decoder can't compute
is refused here, by name, before a single weight is read.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from minivllm.config import check_int

# Each architecture, and the model_type that its config must have.
SUPPORTED = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


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
        names = config.architectures if isinstance(config.architectures, list) else [config.architectures]
        architecture = next((name for name in names if name in SUPPORTED), None)
        if architecture is None or config.model_type != SUPPORTED[architecture]:
            raise ValueError(
                f"architecture {', '.join(map(str, names))} with model_type {config.model_type!r} has no back end "
                f"here; supported are {', '.join(SUPPORTED)}"
            )
        for name in SIZES:
            check_int(f"{name} of the config", getattr(config, name, None), minimum=1)
        check_int("max_position_embeddings of the config", config.max_position_embeddings, minimum=2)
        if config.hidden_act not in ACT2FN:
            raise ValueError(f"hidden_act of the config is {config.hidden_act!r}, which transformers does not know")
        if not config.rms_norm_eps >= 0:
            raise ValueError(f"rms_norm_eps of the config must be at least 0, got {config.rms_norm_eps}")
        if getattr(config, "quantization_config", None):
            raise ValueError("the checkpoint is quantized (its config has a quantization_config): use full precision")
        num_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
        check_int("num_key_value_heads of the config", num_kv_heads, minimum=1)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        check_int("head_dim of the config", head_dim, minimum=2)
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
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            hidden_act=config.hidden_act,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=is_qwen2 or attention_bias,
            output_bias=attention_bias and not is_qwen2,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_windows(config, architecture),
            hf_config=config,
        )

    @property
    def longest_text(self) -> int:
        """Most positions the model can tell apart, in tokens: its context, stretched by its RoPE scaling.

        Configs with linear or dynamic scaling state the context before it; the others the one after it.

        Raises:
            ValueError: a scaling factor that is none.
        """
        rope = self.hf_config.rope_parameters
        if rope.get("rope_type") in ("linear", "dynamic", "yarn") and not 0 < float(rope["factor"]) < 1e6:
            raise ValueError(f"the factor of rope_parameters {rope} is not between 0 and a million")
        if rope.get("rope_type") in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope["factor"])
        if rope.get("rope_type") == "yarn" and "original_max_position_embeddings" in rope:
            return max(self.max_position_embeddings, int(rope["original_max_position_embeddings"] * rope["factor"]))
        return self.max_position_embeddings

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token leaves in the KV cache: a key and a value per layer and KV head."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def _windows(config: Any, architecture: str) -> tuple[int | None, ...]:
    """The sliding window of each layer, as transformers reads it: Llama never has one, Mistral has the same in
    every layer, and Qwen has one where `layer_types` says so."""
    window = getattr(config, "sliding_window", None)
    if window is not None:
        check_int("sliding_window of the config", window, minimum=1)
    if architecture == "LlamaForCausalLM":
        return (None,) * config.num_hidden_layers
    if architecture == "MistralForCausalLM":
        return (window,) * config.num_hidden_layers
    layer_types = config.layer_types
    unknown = sorted(set(layer_types) - {"sliding_attention", "full_attention"})
    if unknown or len(layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types of the config has {len(layer_types)} entries for {config.num_hidden_layers} layers, with "
            f"types that have no back end here: {', '.join(unknown) or 'none'}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
