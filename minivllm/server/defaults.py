"""What is drawn with where a request doesn't say: the model's generation_config.json, and the operator's own."""

import json
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from minivllm.model.hub import resolve_model
from minivllm.sampling_params import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_defaults(model: str, source: str = "auto", override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults of a server, as vLLM's `--generation-config` and `--override-generation-config` choose them.

    Args:
        model: alias, folder or hub id.
        source: "auto" reads the model's generation_config.json, if it has one; "vllm" takes none; else a folder.
        override: these count instead.

    Returns:
        Of temperature, top_p, top_k, min_p and repetition_penalty, those that are set.

    Raises:
        ValueError: another name, a value out of range, or a folder without such a file.
    """
    unknown = sorted(set(override or {}) - set(NAMES))
    if unknown:
        raise ValueError(
            f"--override-generation-config has {unknown[0]!r}: a server may have defaults of {', '.join(NAMES)}"
        )
    found: dict[str, Any] = {}
    if source != "vllm":
        try:
            found = GenerationConfig.from_pretrained(
                resolve_model(model if source == "auto" else source)
            ).to_diff_dict()
        except OSError as error:
            if source != "auto":
                raise ValueError(f"--generation-config {source}: {error}") from None
    defaults = {name: found[name] for name in NAMES if found.get(name) is not None} | dict(override or {})
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise ValueError(f"the defaults {json.dumps(defaults)} (--generation-config): {error}") from None
    return defaults
