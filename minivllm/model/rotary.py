"""Rotary position embedding (Su et al., "RoFormer", 2021): the angles, and the rotation.

The frequencies come from transformers' own initialisers, one per RoPE type, so that every type it knows
works here. We run them in float64 and tabulate cos and sin once, because low precision is where RoPE goes
wrong silently: 257 is 256 in bfloat16, and a float32 angle at position 8,191 is off by up to 5e-4. The
table is no module buffer, so casting the model to bfloat16 leaves it alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# 4 Mi positions: a table of a few GiB while it is made.
MAX_POSITIONS = 2**22


class RotaryEmbedding:
    """Tables of cos and sin for positions 0 to max_model_len - 1, and their application."""

    def __init__(
        self, config: PreTrainedConfig, head_dim: int, max_model_len: int, dtype: torch.dtype = torch.float32
    ) -> None:
        """Tabulates.

        Args:
            config: the checkpoint's Hugging Face config.
            head_dim: size of a head; all of it is rotated.
            max_model_len: number of positions.
            dtype: of the tables, float32 or float64.

        Raises:
            ValueError: unknown rope type, or one that rotates only a part of each head.
        """
        if max_model_len > MAX_POSITIONS:
            raise ValueError(f"{max_model_len} positions are more than {MAX_POSITIONS}: give a smaller max_model_len")
        frequencies, scale = rope_frequencies(config, max_model_len)
        if frequencies.shape[-1] * 2 != head_dim:
            raise ValueError(
                f"RoPE rotates {frequencies.shape[-1] * 2} of {head_dim} dimensions of each head; only whole heads "
                "have a back end here"
            )
        self.num_positions = max_model_len
        angles = torch.arange(max_model_len, dtype=torch.float64)[:, None] * frequencies
        self.cos = (angles.cos() * scale).to(dtype)
        self.sin = (angles.sin() * scale).to(dtype)

    def to(self, device: torch.device) -> "RotaryEmbedding":
        """Moves the tables; the data type stays."""
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates the two halves of every head against each other, computed in the tables' precision.

        Args:
            x: `[..., num_heads, head_dim]`.
            positions: `[...]`, int64, each below max_model_len.

        Returns:
            The rotated heads, same shape and type as `x`.
        """
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)
        first, second = x.to(self.cos.dtype).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_frequencies(config: PreTrainedConfig, max_model_len: int) -> tuple[Tensor, float]:
    """The inverse frequencies of a checkpoint, and the factor on cos and sin ("attention scaling").

    Two types depend on the length of the text, and a key in the cache can't be rotated again when the text
    grows. So "dynamic" rotates position p as in a text of p + 1 tokens (what decoding with a cache gives),
    and "longrope" takes its long factors for all positions if max_model_len is beyond the original length.

    Args:
        config: the checkpoint's Hugging Face config.
        max_model_len: number of positions that will be used.

    Returns:
        Frequencies in float64, `[head_dim / 2]`, or `[max_model_len, head_dim / 2]` for "dynamic"; and the
        factor.

    Raises:
        ValueError: a rope type that transformers does not know, or parameters that give no frequencies.
    """
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"unknown rope_type {rope_type!r}; transformers has default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    seq_len: Any = None
    if rope_type == "dynamic":
        seq_len = torch.arange(1, max_model_len + 1)[:, None]
    elif rope_type == "longrope":
        seq_len = max_model_len
    try:
        with _InFloat64():
            if rope_type == "default":
                frequencies, scale = _default_frequencies(config), 1.0
            else:
                frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"rope_parameters {config.rope_parameters} give no frequencies: {error!r}") from error
    if not frequencies.isfinite().all():
        raise ValueError(f"rope_parameters {config.rope_parameters} give frequencies that are not finite")
    return frequencies, scale


def _default_frequencies(config: Any) -> Tensor:
    """theta ** (-2 i / head_dim), the type that transformers keeps with each model instead."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)


class _InFloat64(TorchFunctionMode):
    """Makes torch compute in float64 where the code under it asks for float32."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs).double() if func is torch.Tensor.float else func(*args, **kwargs)
