"""Where a server's sampling defaults come from."""

import json

import pytest

from minivllm.server.defaults import generation_defaults


@pytest.fixture
def folder(tmp_path):
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2, "max_length": 99}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_the_models_file_the_operator_and_nobody(folder, tmp_path):
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert generation_defaults(folder) == own
    assert generation_defaults(folder, override={"top_k": 0, "min_p": 0.1}) == {**own, "top_k": 0, "min_p": 0.1}
    assert generation_defaults(folder, "vllm") == {}
    assert generation_defaults(folder, "vllm", {"temperature": 0}) == {"temperature": 0}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    assert generation_defaults(str(tmp_path / "other")) == {}
    assert generation_defaults(str(tmp_path / "other"), folder) == own


@pytest.mark.parametrize(
    ("source", "override", "words"),
    [
        ("vllm", {"max_tokens": 5}, "'max_tokens'"),
        ("vllm", {"temperature": -1}, "temperature must be at least 0"),
        ("vllm", {"top_p": "high"}, "top_p"),
        ("auto", {"top_k": True}, "top_k"),
    ],
)
def test_what_is_refused(folder, source, override, words):
    with pytest.raises(ValueError, match=words):
        generation_defaults(folder, source, override)


def test_a_folder_without_such_a_file(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="--generation-config"):
        generation_defaults(folder, str(tmp_path / "empty"))
