"""The command line: it answers, it fetches, and a mistake is one sentence."""

import pytest

from minivllm.cli import main
from tests.test_llm import tiny_folder  # noqa: F401


def test_generate_prints_the_text_with_its_continuation(tiny_folder, capsys):  # noqa: F811
    options = ["--model", str(tiny_folder), "--max-tokens", "5", "--ignore-eos", "--dtype", "float64"]
    assert main(["generate", "w5 w6", "w7", *options]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("w5 w6") and second.startswith("w7")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["generate", "x", "--model", "nothing"], "minivllm: unknown model 'nothing'"),
        (["generate", "x", "--max-tokens", "0"], "minivllm: max_tokens must be at least 1, got 0"),
        (["generate", "x", "--device", "cuda:9"], "minivllm: device 'cuda:9' is not there"),
        (["model", "fetch", "nothing"], "minivllm: unknown model 'nothing'"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, sentence, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(sentence) and captured.err.count("\n") == 1


def test_chat_needs_a_template(tiny_folder, capsys):  # noqa: F811
    assert main(["chat", "hello", "--model", str(tiny_folder)]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_every_option_of_an_engine_arrives_in_it(tiny_folder, capsys, monkeypatch):  # noqa: F811
    """One value per field of EngineConfig, none of them the default; contradictions apart."""
    from dataclasses import fields

    import minivllm

    seen = []
    monkeypatch.setattr(minivllm, "LLM", lambda **values: seen.append(values) or stop())
    values = {
        "model": str(tiny_folder),
        "tokenizer": str(tiny_folder),
        "device": "cpu",
        "dtype": "float64",
        "seed": 3,
        "max_model_len": 99,
        "block_size": 4,
        "num_kv_blocks": 50,
        "kv_cache_memory_bytes": 123,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 64,
        "enable_chunked_prefill": False,
        "long_prefill_token_threshold": 8,
        "scheduling_policy": "priority",
        "kv_cache": "contiguous",
        "reservation": "pow2",
        "batching": "static",
    }
    assert set(values) == {field.name for field in fields(minivllm.EngineConfig)}
    arguments = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        arguments += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    assert main(["generate", "w5", *arguments]) == 2
    assert seen == [values] and [type(v) for v in seen[0].values()] == [type(v) for v in values.values()]


def stop():
    raise ValueError("far enough")


def test_the_options_of_an_engine_work(tiny_folder, capsys):  # noqa: F811
    options = ["--model", str(tiny_folder), "--dtype", "float64", "--max-tokens", "5", "--ignore-eos"]
    engine = ["--max-num-seqs", "2", "--max-num-batched-tokens", "9", "--block-size", "4", "--num-kv-blocks", "20"]
    engine += ["--long-prefill-token-threshold", "3", "--seed", "4", "--batching", "static"]
    assert main(["generate", "w5 w6", *options]) == 0
    plain = capsys.readouterr().out
    assert main(["generate", "w5 w6", *options, *engine]) == 0
    assert capsys.readouterr().out == plain
    assert main(["generate", "w5", *options, *engine, "--n", "2", "--temperature", "1.5", "--sampling-seed", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("arguments", [[], ["serve"], ["generate"], ["model"], ["generate", "x", "--dtype", "int4"]])
def test_an_unknown_command_or_option_shows_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2 and "usage: minivllm" in capsys.readouterr().err


@pytest.mark.real_model
def test_fetch_says_where_the_model_lies(real_folder, capsys):
    assert main(["model", "fetch"]) == 0
    assert capsys.readouterr().out == f"smollm2-135m is in {real_folder}\n"


@pytest.mark.real_model
def test_chat_answers(real_folder, capsys):
    assert main(["chat", "What is the capital of Italy?", "--max-tokens", "8", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out.strip()
