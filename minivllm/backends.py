"""Which attention back end a model runs on. Where "auto" finds that one can't run, it takes plain torch and says so."""

import logging

import torch

from minivllm.model.architecture import ModelConfig
from minivllm.model.attention import Attention, KVCache, PagedAttention
from minivllm.model.decoder import Decoder

logger = logging.getLogger(__name__)


def resolve_attention(name: str, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> type[Attention]:
    """The back end of a name: "torch", "triton", "numba", or "auto": Triton on a CUDA card, Numba on a CPU.

    Args:
        name: one of the above.
        config: the model's, for the size of its heads.
        device: where it is.
        dtype: what it computes in.

    Raises:
        ValueError: one that is not installed, or can't compute on this device, in this type or at this size.
    """
    if name == "torch":
        return PagedAttention
    try:
        if name == "numba" or (name == "auto" and device.type == "cpu"):
            return _numba(device, dtype)
        return _triton(config, device, dtype)
    except ValueError as error:
        if name != "auto":
            raise
        return _plain_torch(error)


def fast_decoder(name: str, model: Decoder) -> Decoder:
    """The model as a back end runs it best: Numba's with packed weights and compiled loops, for which it takes
    the given model's parameters over; the others as it is.

    Raises:
        ValueError: see `resolve_attention`.
    """
    if model.device.type != "cpu" or name not in ("auto", "numba"):
        return model
    if resolve_attention(name, model.config, model.device, model.dtype) is PagedAttention:
        return model
    from minivllm.cpu.compiled import announce
    from minivllm.cpu.decoder import CpuDecoder, can_run

    if not can_run(model.config):
        return model
    announce(model.dtype)
    return CpuDecoder(model)


def start_attention(name: str, model: Decoder, cache: KVCache) -> type[Attention]:
    """The back end of a name, tried on a model's cache: whatever a card refuses, it refuses now.

    Raises:
        ValueError: see `resolve_attention`.
    """
    backend = resolve_attention(name, model.config, model.device, model.dtype)
    try:
        backend.warm_up(cache, model.config.num_heads)
    except Exception as error:  # no compiler for what Triton generates, or more of the card than there is
        if name != "auto":
            raise
        return _plain_torch(error)
    return backend


def _plain_torch(error: Exception) -> type[Attention]:
    logger.warning("attention in plain torch, which is slower: %s", error)
    return PagedAttention


def _triton(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> type[Attention]:
    try:
        from minivllm.kernels.backend import TritonAttention, check_backend
    except ModuleNotFoundError as error:
        raise ValueError(f"attention_backend 'triton': {error}; Triton exists for Linux; take 'torch'") from None
    check_backend(config, device, dtype)
    return TritonAttention


def _numba(device: torch.device, dtype: torch.dtype) -> type[Attention]:
    try:
        from minivllm.cpu.paged_attention import NumbaAttention
    except ImportError as error:
        raise ValueError(f"attention_backend 'numba': {error}; install numba, or take 'torch'") from None
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"attention_backend 'numba' computes on a CPU in bfloat16, float32 or float64, and the model is on "
            f"{device.type} in {dtype}: take 'auto' or 'torch'"
        )
    return NumbaAttention
