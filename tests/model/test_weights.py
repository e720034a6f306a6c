"""Loading is all or an error: no parameter unfilled, no tensor unused, nothing guessed."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.model.weights import load_decoder, parameter_places
from tests.conftest import CPU, tiny_hf_model


def save(tmp_path, family="Llama", **changes):
    tiny_hf_model(family, **changes).save_pretrained(tmp_path)
    return tmp_path


def edit(folder, change):
    """Rewrites the tensors of a one-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def load(folder, **kwargs):
    return load_decoder(folder, CPU, torch.float64, **kwargs)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_the_places_cover_every_parameter_exactly_once(tmp_path, family):
    decoder = load(save(tmp_path, family))
    for place in parameter_places(decoder).values():
        place.fill_(0)
    for place in parameter_places(decoder).values():
        place += 1
    assert all((parameter == 1).all() for parameter in decoder.parameters())


def test_a_tied_head_shares_the_embeddings_storage(tmp_path):
    decoder = load(save(tmp_path, tie_word_embeddings=True))
    assert decoder.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
    assert "lm_head.weight" not in parameter_places(decoder)


def test_a_tied_checkpoint_may_repeat_its_head_but_not_differ_from_it(tmp_path):
    folder = save(tmp_path, tie_word_embeddings=True)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(folder)
    edit(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ValueError, match=r"different lm_head\.weight"):
        load(folder)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
    folder = save(tmp_path)
    edit(folder, lambda t: t.pop(name))
    with pytest.raises(ValueError, match=f"lacks {name}"):
        load(folder)


def test_a_tensor_without_use_is_named(tmp_path):
    folder = save(tmp_path)
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(ValueError, match=r"no use for: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_tables_that_old_exporters_stored_are_no_error(tmp_path):
    folder = save(tmp_path)
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load(folder)


def test_a_wrong_shape_is_told_with_both_shapes(tmp_path):
    folder = save(tmp_path)
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[47\], the config asks for \[48\]"):
        load(folder)


def test_integer_weights_are_refused(tmp_path):
    folder = save(tmp_path)
    edit(folder, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is torch\.int8"):
        load(folder)


def test_shards_load_like_one_file(tmp_path):
    model = tiny_hf_model()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load(tmp_path / "one"), load(tmp_path / "many")
    for (name, a), b in zip(one.named_parameters(), many.parameters(), strict=True):
        assert torch.equal(a, b), name


def sharded(tmp_path):
    tiny_hf_model().save_pretrained(tmp_path, max_shard_size="50KB")
    return tmp_path, sorted(tmp_path.glob("*.safetensors"))


def test_a_missing_shard_is_named(tmp_path):
    folder, shards = sharded(tmp_path)
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"lacks {shards[1].name}.*incomplete"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 0.5, -1])
def test_a_shard_that_was_cut_short_is_named_with_its_size(tmp_path, keep):
    folder, shards = sharded(tmp_path)
    data = shards[0].read_bytes()
    cut = data[: int(len(data) * keep)] if isinstance(keep, float) else data[:keep]
    shards[0].write_bytes(cut)
    with pytest.raises(ValueError, match=rf"{shards[0].name} \({len(cut)} bytes\) is cut short or broken"):
        load(folder)


def test_a_shard_that_holds_other_tensors_than_its_index_says_is_refused(tmp_path):
    folder, shards = sharded(tmp_path)
    shutil.copy(shards[1], shards[0])
    with pytest.raises(ValueError, match="and its index disagree about"):
        load(folder)


def test_two_files_without_an_index_are_refused(tmp_path):
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"safetensors files and no model\.safetensors\.index\.json"):
        load(folder)


def test_a_broken_index_is_refused(tmp_path):
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ValueError, match=r"index\.json is broken"):
        load(folder)


def test_a_folder_without_weights_or_config_is_told_apart(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(tmp_path)
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match=r"config\.json can't be read"):
        load(tmp_path)


def test_another_architecture_is_refused_by_name(tmp_path):
    folder = save(tmp_path)
    edit_config(folder, architectures=["GemmaForCausalLM"])
    with pytest.raises(ValueError, match=r"GemmaForCausalLM.*supported are LlamaForCausalLM"):
        load(folder)


LIES = {
    "a word for a number": {"vocab_size": "97"},
    "no number": {"vocab_size": None},
    "nothing": {"hidden_size": 0},
    "less than nothing": {"num_attention_heads": -6},
    "no KV heads": {"num_key_value_heads": -2},
    "a head that is not whole": {"head_dim": 8.5},
    "heads that do not divide": {"num_attention_heads": 5},
    "no positions": {"max_position_embeddings": 1},
    "too many positions": {"max_position_embeddings": 10**12},
    "an unknown activation": {"hidden_act": "nope"},
    "no activation": {"hidden_act": None},
    "a negative eps": {"rms_norm_eps": -1.0},
    "no eps": {"rms_norm_eps": None},
    "a type that is none": {"dtype": "wat"},
    "an architecture that is none": {"architectures": [5]},
    "an architecture that is no list": {"architectures": "GemmaForCausalLM"},
    "an architecture of another type": {"architectures": ["MistralForCausalLM"]},
    "a rope that is none": {"rope_parameters": "x"},
    "a rope without a base": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "a rope with a base of 0": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "a rope without a factor": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    "a rope with an endless factor": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e400}},
}


@pytest.mark.parametrize("changes", LIES.values(), ids=LIES.keys())
def test_a_config_that_can_not_be_is_a_value_error(tmp_path, changes):
    folder = save(tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=r"\w+ \w+"):
        load(folder)


def test_llama_has_no_window_whatever_its_config_says(tmp_path):
    folder = save(tmp_path)
    edit_config(folder, sliding_window=4, layer_types=["sliding_attention"] * 2)
    assert load(folder).config.sliding_window == (None, None)


@pytest.mark.parametrize("weight_map", [[], None, "x", {"a": 5}, {"a": "../x.safetensors"}, {}])
def test_an_index_that_names_no_files_of_its_folder_is_broken(tmp_path, weight_map):
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json is broken"):
        load(folder)


def test_a_quantized_checkpoint_is_refused(tmp_path):
    folder = save(tmp_path)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match="is quantized"):
        load(folder)


def test_heads_that_do_not_divide_are_refused_with_the_numbers(tmp_path):
    folder = save(tmp_path)
    edit_config(folder, num_key_value_heads=4)
    with pytest.raises(ValueError, match="6 query heads do not divide evenly over 4"):
        load(folder)


def test_a_longer_text_than_the_model_knows_is_refused_with_the_numbers(tmp_path):
    folder = save(tmp_path)
    assert load(folder, max_model_len=128).rotary.num_positions == 128
    with pytest.raises(ValueError, match=r"max_model_len is 129.*128 positions"):
        load(folder, max_model_len=129)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"rope_type": "default"}, 128),
        ({"rope_type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_rope_scaling_stretches_the_longest_text(tmp_path, rope, longest):
    folder = save(tmp_path, rope_parameters={"rope_theta": 10_000.0, **rope})
    assert load(folder).rotary.num_positions == longest
