"""minivllm: a mini vLLM that a person can read, run on a laptop, watch at work, and trust."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from minivllm.config import EngineConfig
from minivllm.request import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.async_llm import AsyncLLM, EngineDeadError
    from minivllm.engine import LLMEngine
    from minivllm.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineDeadError",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
]
__version__ = "0.1.0"
LATER = {
    "LLM": "minivllm.llm",
    "LLMEngine": "minivllm.engine",
    "AsyncLLM": "minivllm.async_llm",
    "EngineDeadError": "minivllm.async_llm",
}


def __getattr__(name: str) -> Any:
    """Imports the engines on first use: they bring torch and transformers along, which takes seconds."""
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
