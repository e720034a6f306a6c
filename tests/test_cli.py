"""The command line: it answers, it fetches, and a mistake is one sentence."""

import io
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest

import minivllm
from minivllm import SamplingParams
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


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_option_of_an_engine_arrives_in_it(command, tiny_folder, capsys, monkeypatch):  # noqa: F811
    """One value per field of EngineConfig, none of them the default; contradictions apart."""
    from dataclasses import fields

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
        "enable_prefix_caching": False,
        "prefix_caching_hash_algo": "builtin",
        "scheduling_policy": "priority",
        "kv_cache": "contiguous",
        "reservation": "pow2",
        "batching": "static",
        "attention_backend": "torch",
    }
    assert set(values) == {field.name for field in fields(minivllm.EngineConfig)}
    arguments = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        arguments += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    assert main([command, "w5", *arguments]) == 2
    assert seen == [values] and [type(v) for v in seen[0].values()] == [type(v) for v in values.values()]


def stop():
    raise ValueError("far enough")


@pytest.fixture
def spy(monkeypatch):
    """Stands for the LLM: keeps what it is asked, and answers with `answer`, or raises `trouble`."""
    seen = SimpleNamespace(calls=[], answer="an answer", trouble=None)

    def ask(prompt, params, use_tqdm):
        seen.calls.append((prompt, params))
        if seen.trouble is not None:
            raise seen.trouble
        prompts = prompt if isinstance(prompt[0], str) else ["a chat"]
        answers = [SimpleNamespace(text=seen.answer)] * params.n
        return [SimpleNamespace(prompt=f"{text}: ", outputs=answers) for text in prompts]

    monkeypatch.setattr(minivllm, "LLM", lambda **fields: SimpleNamespace(generate=ask, chat=ask))
    return seen


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_every_sampling_option_arrives_in_the_params(command, spy):
    given = {
        "n": 3,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.05,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "max_tokens": 9,
        "min_tokens": 2,
    }
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    options += ["--sampling-seed", "5", "--ignore-eos", "--include-stop-str-in-output", "--no-skip-special-tokens"]
    options += ["--stop", "a", "--stop", "b", "--stop-token-ids", "7", "--logit-bias", "3=-1.5", "--logit-bias", "4=2"]
    options += ["--allowed-token-ids", "3", "--allowed-token-ids", "4", "--bad-words", "two words"]
    assert main([command, "hello", *options]) == 0
    [(_, params)] = spy.calls
    assert params == SamplingParams(
        **given,
        seed=5,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        stop=["a", "b"],
        stop_token_ids=[7],
        logit_bias={3: -1.5, 4: 2},
        allowed_token_ids=[3, 4],
        bad_words=["two words"],
    )
    not_here = {"seed", "logprobs", "prompt_logprobs", "skip_reading_prefix_cache"}
    for field in fields(SamplingParams):
        assert field.name in not_here or getattr(params, field.name) != getattr(SamplingParams(), field.name)


def test_without_options_the_likeliest_64_tokens_are_asked_for(spy):
    assert main(["generate", "hello"]) == 0
    assert spy.calls == [(["hello"], SamplingParams(temperature=0, max_tokens=64))]


def test_all_prompts_of_generate_run_together_and_all_answers_are_printed(spy, capsys):
    assert main(["generate", "one", "two", "--n", "2", "--temperature", "1"]) == 0
    assert [prompt for prompt, _ in spy.calls] == [["one", "two"]]
    assert capsys.readouterr().out.splitlines() == ["one: an answer"] * 2 + ["two: an answer"] * 2


def test_a_chat_is_the_message_after_the_instructions(spy, capsys):
    assert main(["chat", "hello"]) == main(["chat", "hello", "--system", "Be brief."]) == 0
    assert [messages for messages, _ in spy.calls] == [
        [{"role": "user", "content": "hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
    ]
    assert capsys.readouterr().out == "an answer\nan answer\n"


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_ctrl_c_is_one_sentence_and_exit_code_130(command, spy, capsys):
    spy.trouble = KeyboardInterrupt()
    assert main([command, "hello"]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "minivllm: interrupted\n")


class ClosedPipe(io.StringIO):
    """A stdout whose reader has gone: it is noticed when a text is written, or when the buffer is flushed."""

    def __init__(self, when):
        super().__init__()
        self.when = when

    def write(self, text):
        if self.when == "write":
            raise BrokenPipeError
        return super().write(text)

    def flush(self):
        if self.when == "flush":
            raise BrokenPipeError


@pytest.mark.parametrize("when", ["write", "flush"])
def test_a_reader_who_has_seen_enough_is_no_mistake(when, spy, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", ClosedPipe(when))
    assert main(["generate", "hello"]) == 0
    assert sys.stdout is None and capsys.readouterr().err == ""  # the interpreter has nothing to flush at its end


def test_what_a_terminal_cannot_show_does_not_lose_the_answer(spy, monkeypatch):
    written = io.BytesIO()
    stdout = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    spy.answer = "caf\u00e9 \U0001f600!"
    assert main(["chat", "hello"]) == 0
    assert written.getvalue().split(b"\n")[0].strip() == b"caf? ?!"


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


@pytest.mark.parametrize(
    "arguments",
    [[], ["bench"], ["serve", "--prot", "1"], ["generate"], ["model"], ["generate", "x", "--dtype", "int4"]],
)
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
