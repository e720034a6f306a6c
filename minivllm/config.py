"""EngineConfig: every knob of the engine, validated in one place.

Knows nothing of the rest of the package. Names are vLLM's where vLLM has them. A field exists only once
the feature behind it does, so that nothing is accepted and then ignored.
"""

from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class EngineConfig:
    """What an `LLM` is built from. Frozen: a changed engine is a new engine.

    Attributes:
        model: an alias ("smollm2-135m"), a folder in Hugging Face format, or a hub id ("Qwen/Qwen3-0.6B").
        tokenizer: folder or hub id of the tokenizer; None means the model's own.
        device: "auto" (CUDA if there is a card, else CPU), "cpu", "cuda" or "cuda:N".
        dtype: "auto", "float32", "bfloat16", "float16" or "float64". Auto is the checkpoint's own type on
            a GPU; on a CPU bfloat16 if it has bf16 matrix units (AMX), else float32.
        seed: feeds the sampled requests that bring no seed of their own; the n-th of them draws the same
            numbers in every run with the same seed.
        max_model_len: longest prompt + output, in tokens; None means what the model was made for.
        max_num_seqs: most requests that run together in one batch.
        kv_cache_memory_bytes: memory for keys and values, in bytes; None means 1 GiB on a CPU and half of
            the memory still free on a GPU.

    Raises:
        ValueError: a field has the wrong type or is out of range; the message names field and value.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    kv_cache_memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("model", "device", "dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a non-empty string, got {value!r}")
        if self.tokenizer is not None and (not isinstance(self.tokenizer, str) or not self.tokenizer):
            raise ValueError(f"tokenizer must be None or a non-empty string, got {self.tokenizer!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        check_int("seed", self.seed, minimum=0, maximum=2**64 - 1)
        check_int("max_num_seqs", self.max_num_seqs, minimum=1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, minimum=2)
        if self.kv_cache_memory_bytes is not None:
            check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, minimum=1)

    @classmethod
    def from_fields(cls, **values: Any) -> "EngineConfig":
        """Builds a config from keyword fields.

        Raises:
            ValueError: a keyword is no field; the message lists those that are.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown option(s) {', '.join(unknown)}; EngineConfig has {', '.join(known)}")
        return cls(**values)


DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


def check_int(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """Raises ValueError unless `value` is an integer (numpy's too, not a bool) within [minimum, maximum]."""
    if not is_int(value):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if value < minimum or (maximum is not None and value > maximum):
        upper = "" if maximum is None else f" and at most {maximum}"
        raise ValueError(f"{name} must be at least {minimum}{upper}, got {value}")


def is_int(value: Any) -> bool:
    """Whether `value` is an integer of any kind (numpy's too) but not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)
