"""What the lessons lean on: costs, workloads, predictions, exercise checks, source display."""

import pytest
import torch

from minivllm.kv_cache import hash_block
from minivllm.lessons import exercises
from minivllm.lessons.cost import matrix_parameters, pass_cost
from minivllm.lessons.demo import TextPrinter
from minivllm.lessons.machine import best_seconds, check_machine, measure_rates
from minivllm.lessons.naive import SlabCache
from minivllm.lessons.predictions import compare
from minivllm.lessons.source import show_source
from minivllm.lessons.workload import random_prompt, real_lengths


def test_matrix_parameters_are_the_models_own(tiny_llama):
    _, decoder = tiny_llama
    matrices = [p for name, p in decoder.layers.named_parameters() if p.dim() == 2]
    assert matrix_parameters(decoder.config) == sum(p.numel() for p in matrices)


def test_the_flops_of_a_pass_are_those_that_torch_counts_less_masked_scores(tiny_llama):
    from torch.utils.flop_counter import FlopCounterMode

    from minivllm.model.attention import dense_attention

    _, decoder = tiny_llama
    ids = torch.randint(0, 97, (3, 16))
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        hidden = decoder(
            ids,
            torch.arange(16).expand(3, 16),
            lambda layer, q, k, v: dense_attention(q, k, v, (0, 0, 0)),
        )
        decoder.compute_logits(hidden[:, -1])
    cost = pass_cost(decoder.config, batch=3, new_tokens=16, context=0, itemsize=8)
    c = decoder.config
    # torch counts the masked half of the scores too: for each of 3 rows, 16 x 16 pairs of tokens instead of
    # those that see each other; a product and a sum for the score and for the value of each.
    masked = 3 * (16 * 16 - sum(range(1, 17)))
    assert counter.get_total_flops() == cost.flops + 2 * 2 * c.num_layers * c.num_heads * c.head_dim * masked


def test_the_bytes_of_a_pass_by_hand(tiny_llama):
    config = tiny_llama[1].config
    cost = pass_cost(config, batch=2, new_tokens=1, context=10, itemsize=2)
    per_token = 2 * 2 * 2 * 8 * 2  # keys and values, layers, KV heads, head_dim, bytes
    assert cost.kv_bytes == 2 * (10 + 1 + 1) * per_token
    assert cost.weight_bytes == 2 * (matrix_parameters(config) + 97 * 48)
    assert cost.intensity == cost.flops / (cost.weight_bytes + cost.kv_bytes)


def test_a_pass_takes_as_long_as_its_slower_half(tiny_llama):
    cost = pass_cost(tiny_llama[1].config, 1, 1, 0, 4)
    moved = cost.weight_bytes + cost.kv_bytes
    assert cost.seconds(1.0, 1e30) == moved
    assert cost.seconds(1e30, 1.0) == cost.flops


def test_real_lengths_have_the_spread_of_the_trace():
    lengths = real_lengths(1000)
    prompts, outputs = zip(*lengths, strict=True)
    assert sum(prompts) / 1000 == pytest.approx(2340, rel=0.05)  # the trace's means
    assert sum(outputs) / 1000 == pytest.approx(438.7, rel=0.05)
    assert min(prompts) >= 1 and max(prompts) <= 8141 and max(outputs) <= 1024
    assert real_lengths(8, seed=1) == real_lengths(8, seed=1) != real_lengths(8, seed=2)
    assert sorted(p for p, _ in real_lengths(8, seed=1)) == sorted(p for p, _ in real_lengths(8, seed=2))


@pytest.mark.parametrize("arguments", [{"trace": "nothing"}, {"count": 0}, {"shrink": 0}])
def test_a_bad_workload_is_refused_with_the_known_traces(arguments):
    with pytest.raises(ValueError, match="sharegpt_8k"):
        real_lengths(**{"count": 4, **arguments})


def test_random_prompts_are_repeatable_and_start_alike():
    assert random_prompt(5, seed=1) == random_prompt(9, seed=1)[:5] != random_prompt(5, seed=2)


def test_predictions_stand_beside_what_happened(capsys):
    compare({"a": None, "b": 100, "c": 12, "d": "Paris"}, {"a": 1, "b": 110, "c": 99.5, "d": "paris"})
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["question", "you", "happened"],
        ["a", "-", "1", "(no", "guess", "yet)"],
        ["b", "100", "110", "right"],
        ["c", "12", "99.5", "look", "again"],
        ["d", "Paris", "paris", "right"],
    ]


@pytest.mark.parametrize(
    ("guess", "outcome", "verdict"),
    [
        (11, 14, "look again"),
        (14, 14, "right"),
        (14.0, 14, "right"),
        (1900, 1925, "right"),
        (30, 33.5, "right"),
        (20, 33.5, "look again"),
        ("0, 1, 4 ", "0 1 4", "right"),
        ([0, 1, 4], "0 1 4", "right"),
        ("0 1 3", "0 1 4", "look again"),
        ("a lot", 49.1, "look again"),
    ],
)
def test_small_whole_numbers_are_met_exactly_and_others_within_a_quarter(capsys, guess, outcome, verdict):
    compare({"q": guess}, {"q": outcome})
    assert capsys.readouterr().out.rstrip().endswith(verdict)


def test_a_guess_without_an_outcome_is_an_error():
    with pytest.raises(ValueError, match="no outcome for x"):
        compare({"x": 1}, {"y": 2})


def test_source_is_shown_with_and_without_docstrings(monkeypatch):
    shown = []
    monkeypatch.setattr("minivllm.lessons.source.display", shown.append)
    show_source(SlabCache)
    show_source(SlabCache, docstrings=False)
    full, short = (code.data for code in shown)
    assert full.startswith("class SlabCache:") and '"""Reserves the slabs' in full
    assert '"""' not in short and "self.keys[layer, :, self.length : end] = k" in short
    compile(short, "shown", "exec")


def test_rates_are_measured_on_this_machine():
    rates = measure_rates(torch.device("cpu"))
    assert rates.bytes_per_s > 1e8 and rates.flops_per_s > 1e8
    assert rates.ridge == rates.flops_per_s / rates.bytes_per_s


def test_the_best_of_several_runs_leaves_out_the_warm_up():
    runs = []
    assert best_seconds(lambda: runs.append(1), torch.device("cpu"), repeats=3) >= 0
    assert len(runs) == 4


@pytest.mark.real_model
def test_the_machine_check_says_ok_line_by_line(capsys, real_folder):
    check_machine()
    output = capsys.readouterr().out.splitlines()
    assert len(output) == 7 and all(line.startswith("[ OK ]") for line in output)


def test_the_machine_check_says_what_to_do(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("minivllm.lessons.machine.models_folder", lambda: tmp_path / "models")
    check_machine()
    assert capsys.readouterr().out.splitlines()[-1] == "[FAIL] model smollm2-135m: not here: run `minivllm model fetch`"


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def decode(self, ids, skip_special_tokens=True):
        return bytes(ids).decode("utf-8", errors="replace")


def test_the_printer_waits_for_whole_characters(capsys):
    printer, written = TextPrinter(Bytes()), []
    for byte in "aé😀".encode():
        printer.add(byte)
        written.append(capsys.readouterr().out)
    assert written == ["a", "", "é", "", "", "", "😀"]
    printer.add(0xC3)
    printer.close()
    assert capsys.readouterr().out == "\ufffd"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda p, o, c: None, "returned None; fill in its body"),
        (lambda p, o, c: ..., "returned Ellipsis; fill in its body"),
        (lambda p, o, c: p + o, "for 10 + 1 tokens without a cache you got 11, it is 10"),
        (lambda p: 1, "your function raised TypeError"),
    ],
)
def test_a_check_says_what_is_not_yet_right(capsys, answer, sentence):
    assert exercises.check_tokens_computed(answer) is False
    output = capsys.readouterr().out
    assert output.startswith("not yet: ") and sentence in output


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda lens, batch: [[0, 1]], "you dealt [0, 1]"),
        (lambda lens, batch: [list(range(len(lens)))], "your batches have [4] rows; each should have 2"),
        (lambda lens, batch: [[0, 1], [2, 3]], "cost 32 row-steps as you dealt; 18 is possible"),
        (lambda lens, batch: None, "your function raised TypeError"),
    ],
)
def test_the_check_of_batches_says_what_is_not_yet_right(capsys, answer, sentence):
    assert exercises.check_batches(answer) is False
    assert sentence in capsys.readouterr().out


def plan_step(missing, prompts, budget, max_num_seqs):
    """The right answer to `check_plan_step`; a running request leaves a token for each one behind it."""
    given = []
    for place, count in enumerate(missing, start=1):
        given.append(min(count, budget - sum(given) - (len(missing) - place)))
    for length in prompts:
        if sum(given) < budget and len(given) < max_num_seqs:
            given.append(min(length, budget - sum(given)))
    return given


def continuous_steps(output_lens, rows):
    """The right answer to `check_continuous_steps`: the next request takes the row that is free first."""
    ends = [0] * rows
    for length in output_lens:
        row = ends.index(min(ends))
        ends[row] += length
    return max(ends)


def block_keys(token_ids, block_size, salt):
    """The right answer to `check_block_keys`."""
    parent, keys = bytes(32), []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        extra = [("cache_salt", salt)] if salt and not start else []
        parent = hash_block(parent, token_ids[start : start + block_size], extra)
        keys.append(parent)
    return keys


def tokens_found(prompts, block_size):
    """The right answer to `check_tokens_found`."""
    known, found = set(), []
    for prompt in prompts:
        ends = range(block_size, len(prompt), block_size)
        found.append(next((end - block_size for end in ends if tuple(prompt[:end]) not in known), max(ends, default=0)))
        known |= {tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)}
    return found


def share_of_slots(prompt_lens, output_lens, max_model_len):
    """The right answer to `check_slots`: the last token of an answer is never written."""
    return sum(p + o - 1 for p, o in zip(prompt_lens, output_lens, strict=True)) / (max_model_len * len(prompt_lens))


@pytest.mark.parametrize(
    ("check", "answer", "cases"),
    [
        (exercises.check_plan_step, plan_step, 7),
        (exercises.check_plan_step, lambda *arguments: tuple(plan_step(*arguments)), 7),
        (exercises.check_continuous_steps, continuous_steps, 5),
        (exercises.check_slots, share_of_slots, 3),
        (exercises.check_block_keys, block_keys, 6),
        (exercises.check_tokens_found, tokens_found, 6),
    ],
)
def test_a_right_answer_is_right(capsys, check, answer, cases):
    assert check(answer) is True
    assert capsys.readouterr().out == f"right: all {cases} cases\n"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            lambda missing, prompts, budget, rows: plan_step(missing, prompts, budget, 99),
            "for running miss [1, 1, 1], prompts [5, 5] wait, budget 32, 4 rows you got [1, 1, 1, 5, 5], it is "
            "[1, 1, 1, 5]",
        ),
        (
            lambda missing, prompts, budget, rows: plan_step(missing, prompts, budget, rows - 1),
            "for running miss [1, 1, 1], prompts [5, 5] wait, budget 32, 4 rows you got [1, 1, 1], it is [1, 1, 1, 5]",
        ),
        (
            lambda missing, prompts, budget, rows: plan_step(missing, prompts, budget + 1, rows),
            "for running miss [], prompts [40, 10] wait, budget 32, 4 rows you got [33], it is [32]",
        ),
        (
            lambda missing, prompts, budget, rows: plan_step(missing, prompts, budget - 1, rows),
            "you got [31], it is [32]",
        ),
        (
            lambda missing, prompts, budget, rows: plan_step(missing, prompts, 10**6, rows),
            "you got [40, 10], it is [32]",
        ),
        (
            lambda missing, prompts, budget, rows: (
                [min(count, budget) for count in missing]
                + plan_step([], prompts, budget - sum(missing), rows - len(missing))
            ),
            "for running miss [1, 100, 1], prompts [9] wait, budget 32, 4 rows you got [1, 32, 1], it is [1, 30, 1]",
        ),
        (
            lambda missing, prompts, budget, rows: plan_step(missing, [], budget, rows),
            "you got [1, 1], it is [1, 1, 5]",
        ),
        (lambda *arguments: [*plan_step(*arguments)[:-1], plan_step(*arguments)[-1] + 1], "you got [1, 1, 6], it is"),
        (lambda *arguments: 7, "you got 7, it is [1, 1, 5]"),
    ],
)
def test_a_step_planned_wrongly_is_not_yet_right(capsys, answer, sentence):
    assert exercises.check_plan_step(answer) is False
    output = capsys.readouterr().out
    assert output.startswith("not yet: ") and sentence in output


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda lens, rows: continuous_steps(lens, rows) + 1, "answers of [5, 1, 1] tokens, 2 rows you got 6, it is 5"),
        (lambda lens, rows: continuous_steps(lens, rows) - 1, "answers of [5, 1, 1] tokens, 2 rows you got 4, it is 5"),
        (
            lambda lens, rows: sum(max(lens[start : start + rows]) for start in range(0, len(lens), rows)),  # static
            "for answers of [5, 1, 1] tokens, 2 rows you got 6, it is 5",
        ),
        (lambda lens, rows: max(lens), "for answers of [3, 3, 3, 3] tokens, 2 rows you got 3, it is 6"),
        (lambda lens, rows: max(*lens, 0, -(-sum(lens) // rows)), "for answers of [2, 7, 1, 8, 2, 8] tokens, 2 rows"),
    ],
)
def test_steps_counted_wrongly_are_not_yet_right(capsys, answer, sentence):
    assert exercises.check_continuous_steps(answer) is False
    output = capsys.readouterr().out
    assert output.startswith("not yet: ") and sentence in output


@pytest.mark.parametrize("factor", [0.8, 0.99, 1.001, 1.2, 100])
def test_a_share_that_is_nearly_right_is_not_yet_right(capsys, factor):
    assert exercises.check_slots(lambda *arguments: factor * share_of_slots(*arguments)) is False
    assert f"you got {factor * (14 / 128)!r}, it is 0.109375" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda ids, size, salt: block_keys(ids, size, None), "12 tokens, blocks of 4, salt 'alice'"),
        (lambda ids, size, salt: [*block_keys(ids, size, salt), b"?" * 32], "12 tokens, blocks of 4, salt None"),
        (
            lambda ids, size, salt: [hash_block(bytes(32), ids[s : s + size]) for s in range(0, len(ids), size)],
            "12 tokens, blocks of 4, salt None",
        ),
        (lambda ids, size, salt: ["key"], "you got ['key'], it is ["),
        (lambda ids, size, salt: block_keys([*ids, *[0] * (-len(ids) % size)], size, salt), "13 tokens, blocks of 4"),
    ],
)
def test_keys_made_wrongly_are_not_yet_right(capsys, answer, what):
    assert exercises.check_block_keys(answer) is False
    output = capsys.readouterr().out
    assert output.startswith("not yet: ") and what in output and "\\x" not in output


def all_of_it(prompts, block_size):
    """Forgets that at least one token is computed."""
    found = tokens_found([[*prompt, -1] for prompt in prompts], block_size)
    return [min(count, len(prompt)) for count, prompt in zip(found, prompts, strict=True)]


def own_blocks(prompts, block_size):
    """Knows a block by its own tokens only."""
    known, found = set(), []
    for prompt in prompts:
        blocks = [tuple(prompt[s : s + block_size]) for s in range(0, len(prompt) - block_size + 1, block_size)]
        hits = [block in known for block in blocks]
        found.append(min((len(prompt) - 1) // block_size, [*hits, False].index(False)) * block_size)
        known.update(blocks)
    return found


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (all_of_it, "for prompts of 32, 32, 33 tokens, blocks of 16 you got [0, 32, 32], it is [0, 16, 32]"),
        (own_blocks, "blocks of 16 you got [0, 0, 32], it is [0, 0, 16]"),
        (lambda prompts, size: [0] * len(prompts), "you got [0, 0], it is [0, 32]"),
    ],
)
def test_tokens_counted_wrongly_are_not_yet_right(capsys, answer, sentence):
    assert exercises.check_tokens_found(answer) is False
    output = capsys.readouterr().out
    assert output.startswith("not yet: ") and sentence in output
