"""minivllm: a mini vLLM that a person can read, run on a laptop, watch at work, and trust."""

from typing import TYPE_CHECKING, Any

from minivllm.config import EngineConfig
from minivllm.request import CompletionOutput, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from minivllm.engine import LLMEngine
    from minivllm.llm import LLM

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports the engines on first use: they bring torch and transformers along, which takes seconds."""
    if name == "LLM":
        from minivllm.llm import LLM

        return LLM
    if name == "LLMEngine":
        from minivllm.engine import LLMEngine

        return LLMEngine
    raise AttributeError(f"module 'minivllm' has no attribute {name!r}")
