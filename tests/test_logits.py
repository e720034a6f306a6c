"""What requests do to their logits, in which order, and to whose."""

from dataclasses import dataclass, field

import pytest
import torch

from minivllm.logits import process_logits
from minivllm.sampling_params import SamplingParams

INF = float("inf")


@dataclass
class Row:
    """A row's history."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [0])
    output: list[int] = field(default_factory=list)
    stop_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)


def processed(logits, *rows):
    return process_logits(torch.tensor(logits), rows).tolist()


def test_repetition_sees_prompt_and_answer_then_frequency_and_presence_the_answer_only():
    """SMP-05."""
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5)
    assert processed([[2.0, -2.0, 1.0]], Row(params, [0], [1, 1])) == [[1.0, -5.0, 1.0]]
    first = SamplingParams(frequency_penalty=0.25, presence_penalty=0.5)
    assert processed([[2.0, -2.0, 1.0]], Row(first, [0, 1, 2])) == [[2.0, -2.0, 1.0]]
    assert processed([[2.0, -2.0, 1.0]], Row(SamplingParams(repetition_penalty=2.0), [0, 1])) == [[1.0, -4.0, 1.0]]
    negative = SamplingParams(presence_penalty=-1, frequency_penalty=-0.5)
    assert processed([[2.0, -2.0, 1.0]], Row(negative, [0], [2, 2])) == [[2.0, -2.0, 3.0]]


def test_neutral_values_change_no_bit_and_make_no_copy():
    logits = torch.randn(3, 50)
    rows = [Row(SamplingParams(repetition_penalty=1.0, presence_penalty=0, frequency_penalty=0), [1, 2], [3])] * 3
    assert process_logits(logits, rows) is logits
    busy = Row(SamplingParams(repetition_penalty=1.5), [1, 2], [3])
    mixed = process_logits(logits, [rows[0], busy, rows[0]])
    assert torch.equal(mixed[[0, 2]], logits[[0, 2]]) and not torch.equal(mixed[1], logits[1])
    alone = process_logits(logits[1:2], [busy])
    assert torch.equal(mixed[1:2], alone) and torch.equal(process_logits(logits, [busy] * 3)[1], alone[0])


def test_only_allowed_tokens_keep_their_logits():
    params = SamplingParams(allowed_token_ids=[2, 0])
    assert processed([[1.0, 2.0, 3.0, 4.0]], Row(params)) == [[1.0, -INF, 3.0, -INF]]


def test_a_bias_is_added_and_saves_no_token_that_is_not_allowed():
    params = SamplingParams(logit_bias={0: 1.5, 1: -100, 3: 100}, allowed_token_ids=[0, 1, 2])
    assert processed([[1.0, 2.0, 3.0, 4.0]], Row(params)) == [[2.5, -98.0, 3.0, -INF]]


def test_the_last_token_of_a_bad_word_is_impossible_once_the_others_stand_there():
    words = ((3,), (1, 2), (0, 1, 2))

    def banned(prompt, output):
        [row] = processed([[0.0] * 4], Row(SamplingParams(), prompt, output, bad_words=words))
        return [token for token, value in enumerate(row) if value == -INF]

    assert banned([0], []) == [3]
    assert banned([0], [1]) == [2, 3]
    assert banned([0, 1], []) == [3]  # the prompt may hold what the answer must not
    assert banned([0], [1, 1, 0]) == [3]


def test_no_token_ends_an_answer_that_is_too_short():
    params, stops = SamplingParams(min_tokens=2), frozenset({1, 3})
    for output, expected in (([], [1, 3]), ([5], [1, 3]), ([5, 5], [])):
        [row] = processed([[0.0] * 4], Row(params, [0], output, stops))
        assert [token for token, value in enumerate(row) if value == -INF] == expected


def test_the_logits_that_came_in_are_left_alone():
    logits = torch.zeros(1, 4, dtype=torch.bfloat16)
    result = process_logits(logits, [Row(SamplingParams(logit_bias={1: 0.001}))])
    assert (logits == 0).all() and result.dtype == torch.float32 and result[0, 1].item() == pytest.approx(0.001)
