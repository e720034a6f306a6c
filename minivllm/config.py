"""EngineConfig: every knob of the engine, validated in one place.

Knows nothing of the rest of the package. Names are vLLM's where vLLM has them. A field exists only once
the feature behind it does, so that nothing is accepted and then ignored.
"""

from dataclasses import dataclass, fields
from numbers import Integral, Real
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
        block_size: tokens per block of the KV cache.
        num_kv_blocks: blocks of the KV cache; None lets the memory decide.
        kv_cache_memory_bytes: memory for keys and values, in bytes; None means 1 GiB on a CPU and, on a GPU,
            what gpu_memory_utilization leaves. Not together with num_kv_blocks.
        gpu_memory_utilization: share of the GPU's memory that the engine may use in all, in (0, 1].
        max_num_seqs: most requests that run together. More than max_num_batched_tokens never do: each takes a
            token per step.
        max_num_batched_tokens: most tokens that are computed in one step.
        enable_chunked_prefill: whether a long prompt may be computed in pieces, beside other requests' tokens.
        long_prefill_token_threshold: most tokens of one prompt per step; 0 sets no limit.
        enable_prefix_caching: whether a request takes over the blocks of earlier ones whose tokens begin alike. None
            means yes for paged memory and no for contiguous, which can't.
        prefix_caching_hash_algo: how blocks are told apart: "sha256", or "builtin": Python's own hash, under which
            somebody may find two equal texts, so that tokens are compared too. Hashing is cheaper, and finding is not.
        scheduling_policy: "fcfs" (first come, first served) or "priority" (lower numbers first).
        kv_cache: "paged" or "contiguous".
        reservation: what contiguous memory reserves at admission: "max" (the longest text, the default), "pow2" or
            "exact". None with paged memory, which reserves nothing.
        batching: "continuous", or "static": a batch runs until its slowest member ends (with max_num_seqs=1 there
            is no batching at all).
        attention_backend: "torch" (readable, anywhere), "triton" (kernels, for a CUDA card), "numba" (compiled loops
            and packed weights, for a CPU), or "auto": triton on a card, numba on a CPU, and torch where these can't
            run.

    Raises:
        ValueError: a field has the wrong type or is out of range, or two contradict each other; the message
            names fields and values.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: str = "sha256"
    scheduling_policy: str = "fcfs"
    kv_cache: str = "paged"
    reservation: str | None = None
    batching: str = "continuous"
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("model", "device"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise ValueError(f"{name} must be a non-empty string, got {value!r}")
        if self.tokenizer is not None and (not isinstance(self.tokenizer, str) or not self.tokenizer):
            raise ValueError(f"tokenizer must be None or a non-empty string, got {self.tokenizer!r}")
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                listed = ", ".join(map(str, choices))
                raise ValueError(f"{name} must be one of {listed}, got {getattr(self, name)!r}")
        check_int("seed", self.seed, minimum=0, maximum=2**64 - 1)
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("long_prefill_token_threshold", self.long_prefill_token_threshold, minimum=0)
        for name, minimum in (("max_model_len", 2), ("num_kv_blocks", 1), ("kv_cache_memory_bytes", 1)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), minimum=minimum)
        if not isinstance(self.enable_chunked_prefill, bool):
            raise ValueError(f"enable_chunked_prefill must be True or False, got {self.enable_chunked_prefill!r}")
        if self.enable_prefix_caching is not None and not isinstance(self.enable_prefix_caching, bool):
            raise ValueError(f"enable_prefix_caching must be None, True or False, got {self.enable_prefix_caching!r}")
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, Real) or not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization!r}")
        for field in fields(self):  # numpy's integers overflow, and are no JSON
            value = getattr(self, field.name)
            if is_int(value):
                object.__setattr__(self, field.name, int(value))
        object.__setattr__(self, "gpu_memory_utilization", float(utilization))
        self._check_together()

    def _check_together(self) -> None:
        """Raises ValueError for fields that contradict each other."""
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise ValueError(
                f"num_kv_blocks is {self.num_kv_blocks} and kv_cache_memory_bytes {self.kv_cache_memory_bytes}: "
                "each says how large the KV cache is; give one and leave the other None"
            )
        if self.kv_cache == "paged" and self.reservation is not None:
            raise ValueError(
                f"reservation is {self.reservation!r}, and paged memory reserves nothing: leave it None, or set "
                "kv_cache='contiguous'"
            )
        if self.kv_cache == "contiguous" and self.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching is True and kv_cache is 'contiguous': prefixes are shared block by block, which "
                "only paged memory can; leave enable_prefix_caching None, or set kv_cache='paged'"
            )
        if self.enable_chunked_prefill:
            return
        if self.long_prefill_token_threshold:
            raise ValueError(
                f"long_prefill_token_threshold is {self.long_prefill_token_threshold} and enable_chunked_prefill is "
                "False: a limit per step cuts prompts into chunks; set one of them back"
            )
        if self.max_model_len is not None and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, max_model_len is {self.max_model_len} and "
                "enable_chunked_prefill is False: a longer prompt would never run; raise max_num_batched_tokens, "
                "lower max_model_len, or allow chunks"
            )

    @property
    def caches_prefixes(self) -> bool:
        """What enable_prefix_caching comes to."""
        return self.kv_cache == "paged" and self.enable_prefix_caching is not False

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
CHOICES: dict[str, tuple[str | None, ...]] = {
    "dtype": DTYPES,
    "prefix_caching_hash_algo": ("sha256", "builtin"),
    "scheduling_policy": ("fcfs", "priority"),
    "kv_cache": ("paged", "contiguous"),
    "reservation": (None, "max", "pow2", "exact"),
    "batching": ("continuous", "static"),
    "attention_backend": ("auto", "torch", "triton", "numba"),
}


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
