"""A checkpoint folder to a `Decoder`: every parameter is filled exactly once, every tensor is used or named.

A head that was never loaded still writes fluent nonsense, so "close enough" is no state a loader may end
in. The fused parameters are filled through views: each name of the checkpoint owns a slice, and the slices
cover the parameter without overlap.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from minivllm.model.architecture import ModelConfig
from minivllm.model.decoder import Decoder
from minivllm.model.rotary import RotaryEmbedding

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Tables that old exporters stored beside the weights; the config says the same.
DERIVED = "rotary_emb.inv_freq"


def load_config(folder: Path) -> PreTrainedConfig:
    """Reads config.json of a checkpoint folder.

    Raises:
        ValueError: it is missing or can't be read.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: it is not a model folder in Hugging Face format")
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:  # a wrong field raises one of a dozen unrelated types
        raise ValueError(f"{folder / 'config.json'} can't be read: {error!r}") from error


def load_decoder(folder: Path, device: torch.device, dtype: torch.dtype, max_model_len: int | None = None) -> Decoder:
    """Builds the decoder of a checkpoint folder and loads its weights.

    Args:
        folder: holds config.json and *.safetensors, in one file or in shards with an index.
        device: where the weights go.
        dtype: what they are cast to.
        max_model_len: number of positions to prepare; None means as many as the model can tell apart.

    Returns:
        The decoder, in eval mode, no parameter requiring a gradient.

    Raises:
        ValueError: unsupported architecture; a file is missing or broken; a tensor is missing, unknown,
            doubled, or of the wrong shape or type.
    """
    config = ModelConfig.from_hf(load_config(folder))
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    if max_model_len is not None and max_model_len > config.longest_text:
        raise ValueError(
            f"max_model_len is {max_model_len}, but {folder.name} can tell only {config.longest_text} positions apart"
        )
    num_positions = max_model_len or config.longest_text
    rotary = RotaryEmbedding(config.hf_config, config.head_dim, num_positions, wide).to(device)
    with torch.device("meta"):
        decoder = Decoder(config, rotary)
    decoder = decoder.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    if config.tie_word_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    with torch.inference_mode(False), torch.no_grad():
        fill_parameters(decoder, read_tensors(folder))
    return decoder


def fill_parameters(decoder: Decoder, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Copies every tensor into its place.

    Raises:
        ValueError: names what is missing, unknown, doubled, misshapen, or not a float.
    """
    places = parameter_places(decoder)
    tied = decoder.config.tie_word_embeddings
    open_names, unknown, spare_head = set(places), [], None
    for name, tensor in tensors:
        if name == "lm_head.weight" and tied:
            spare_head = tensor
        elif name not in places:
            unknown += [] if name.endswith(DERIVED) else [name]
        elif name not in open_names:
            raise ValueError(f"tensor {name} is in the checkpoint twice")
        else:
            _copy(name, tensor, places[name])
            open_names.remove(name)
    if open_names:
        raise ValueError(f"the checkpoint lacks {_some(open_names)}")
    if unknown:
        raise ValueError(
            f"the checkpoint has tensors that {decoder.config.architecture} has no use for: {_some(unknown)}"
        )
    if spare_head is not None and not _equal(spare_head, places["model.embed_tokens.weight"]):
        raise ValueError("the config ties lm_head to the embedding, but the checkpoint has a different lm_head.weight")


def parameter_places(decoder: Decoder) -> dict[str, Tensor]:
    """Where each tensor of a Hugging Face checkpoint goes: its name to a view of our parameter.

    The views cover every parameter exactly once; a tied head has no place of its own.
    """
    places = {
        "model.embed_tokens.weight": decoder.embed_tokens.weight,
        "model.norm.weight": decoder.norm.weight,
    }
    if not decoder.config.tie_word_embeddings:
        places["lm_head.weight"] = decoder.lm_head.weight
    c = decoder.config
    sizes = [count * c.head_dim for count in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
    for layer_index, layer in enumerate(decoder.layers):
        for name, parameter in layer.named_parameters():
            owner, kind = name.rsplit(".", 1)
            parts: Iterable[tuple[str, Tensor]]
            if owner == "self_attn.qkv_proj":
                parts = zip(("q_proj", "k_proj", "v_proj"), parameter.split(sizes), strict=True)
            elif owner == "mlp.gate_up_proj":
                parts = zip(("gate_proj", "up_proj"), parameter.chunk(2), strict=True)
            else:
                parts = zip((owner.rpartition(".")[2],), (parameter,), strict=True)
            parent = f"{owner.rpartition('.')[0]}." if "." in owner else ""
            places.update({f"model.layers.{layer_index}.{parent}{part}.{kind}": view for part, view in parts})
    return places


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) from all safetensors files of a folder, one tensor in memory at a time.

    With an index, exactly its files are read, and each must hold exactly what the index says.

    Raises:
        ValueError: no such file, a shard is missing, or a file is cut short or broken.
    """
    index_file = folder / "model.safetensors.index.json"
    if index_file.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index_file.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
            if not names or any(name != Path(name).name for name in names):
                raise ValueError("weight_map must name files of this folder")
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index_file} is broken: {error!r}") from error
    else:
        weight_map, names = {}, sorted(path.name for path in folder.glob("*.safetensors"))
        if len(names) > 1:
            raise ValueError(f"{folder} has {len(names)} safetensors files and no model.safetensors.index.json")
    if not names:
        raise ValueError(f"{folder} has no *.safetensors file (other formats are not read)")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {_some(missing)}: the download is incomplete")
    for file_name in names:
        try:
            with safe_open(folder / file_name, framework="pt") as file:
                stored = set(file.keys())
                promised = {name for name, owner in weight_map.items() if owner == file_name} or stored
                if stored != promised:
                    raise ValueError(f"{folder / file_name} and its index disagree about {_some(stored ^ promised)}")
                for name in sorted(stored):
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            size = (folder / file_name).stat().st_size
            raise ValueError(
                f"{folder / file_name} ({size} bytes) is cut short or broken: {error}; fetch it again"
            ) from error


def _copy(name: str, tensor: Tensor, place: Tensor) -> None:
    if tensor.shape != place.shape:
        raise ValueError(f"tensor {name} has shape {list(tensor.shape)}, the config asks for {list(place.shape)}")
    if tensor.dtype not in FLOATS:
        raise ValueError(f"tensor {name} is {tensor.dtype}: only full-precision floats are read")
    place.copy_(tensor)


def _equal(tensor: Tensor, place: Tensor) -> bool:
    return tensor.shape == place.shape and torch.equal(tensor.to(place.dtype), place.to(tensor.device))


def _some(names: set[str] | list[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
