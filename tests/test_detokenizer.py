"""Text comes out as soon as it is certain, once, and whole."""

import random
from itertools import pairwise

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minivllm.detokenizer import LONGEST_WAIT, Detokenizer, decode
from minivllm.lessons.serving import CountingTokenizer
from minivllm.tokenizer import load_tokenizer

ABC, DEF, GH, LETTERS = 17638, 33203, 23960, (57, 58, 59)  # LETTERS: I, J, K


@pytest.fixture(scope="module")
def tokenizer(real_folder):
    return load_tokenizer(real_folder)


@pytest.fixture(scope="module")
def pieces():
    """A small vocabulary in the manner of SentencePiece: the space belongs to the word behind it, and the first one is
    dropped; bytes stand for what is no word."""
    words = ["<unk>", "</s>", "▁Hello", "▁world", "!", "▁", "a", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(dict(zip(words, range(len(words)), strict=True)), [], unk_token="<unk>", byte_fallback=True)
    raw = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    raw.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>")


def read(tokenizer, token_ids, **options):
    """The deltas, one per token and what the end brings, and the detokenizer."""
    detokenizer, deltas = Detokenizer(tokenizer, **options), []
    for token_id in token_ids:
        stopped = detokenizer.append(token_id)
        deltas.append(detokenizer.take())
        if stopped is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take())
    assert "".join(deltas) == detokenizer.text == detokenizer.shown
    return deltas, detokenizer


# --- stop strings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "reached", "text", "num_tokens"),
    [
        (["DE"], "DE", " ABC", 2),  # inside a token
        (["EFGHI"], "EFGHI", " ABCD", 4),  # begins and ends inside tokens, and spans three
        ([" ABC"], " ABC", "", 1),  # at the beginning
        (["GH", "EF"], "EF", " ABCD", 2),  # what comes first
        (["FG", "EFG"], "EFG", " ABCD", 3),  # of two that end together, the one that begins first
        (["EFG", "EF"], "EF", " ABCD", 2),
        (["nothing"], None, " ABCDEFGHIJK", 6),
    ],
)
def test_a_stop_string_ends_the_text_where_it_begins(tokenizer, stops, reached, text, num_tokens):
    """STP-01: whichever tokens it lies in; no delta holds what is cut off later."""
    for include in (False, True):
        deltas, detokenizer = read(tokenizer, [ABC, DEF, GH, *LETTERS], stop=stops, include_stop=include)
        assert detokenizer.text == text + (reached or "") * include
        assert detokenizer.stopped_by == reached and len(deltas) == num_tokens + 1


def test_only_what_may_become_a_stop_string_is_held_back(tokenizer):
    assert read(tokenizer, [ABC, DEF, GH, *LETTERS], stop=["FGX"])[0] == [" ABC", "DE", "FGH", "I", "J", "K", ""]
    assert read(tokenizer, [ABC, DEF, GH], stop=["HI"])[0] == [" ABC", "DEF", "G", "H"]
    assert read(tokenizer, [ABC, DEF, GH])[0] == [" ABC", "DEF", "GH", ""]


def test_a_stop_string_counts_only_behind_min_tokens(tokenizer):
    assert read(tokenizer, [ABC, DEF, GH, LETTERS[0]], stop=["DE"], min_tokens=2)[1].text == " ABCDEFGHI"
    assert read(tokenizer, [ABC, DEF, GH, LETTERS[0]], stop=["DE"], min_tokens=1)[1].text == " ABC"
    assert (
        read(tokenizer, [ABC, DEF, GH, LETTERS[0]], stop=["FG"], min_tokens=2)[1].text == " ABCDE"
    )  # it ends behind them


# --- characters ----------------------------------------------------------------------------------------------------


def test_a_character_comes_when_its_last_token_is_there(tokenizer):
    """STP-03."""
    assert read(tokenizer, [10813, 235, 229])[0] == ["", "", "👋", ""]
    assert read(tokenizer, [7906, 240, 178, 239, 230])[0] == ["", "世", "", "", "界", ""]


def test_a_character_that_is_cut_off_becomes_one_mark(tokenizer):
    deltas, _ = read(tokenizer, [10813, 235])
    assert deltas == ["", "", "\ufffd"] and "".join(deltas) == tokenizer.decode([10813, 235])


def test_the_mark_itself_is_text_too(tokenizer):
    mark = tokenizer.encode("\ufffd", add_special_tokens=False)
    deltas, _ = read(tokenizer, [ABC, *mark, DEF, *mark, *mark])
    assert "".join(deltas) == " ABC\ufffdDEF\ufffd\ufffd" and "".join(deltas[: 2 + len(mark)]) == " ABC\ufffdDEF"


@pytest.mark.parametrize("seed", range(50))
def test_long_runs_of_broken_bytes_are_decoded_as_a_whole_would_be(tokenizer, seed):
    """Tokens inside characters, in any order: nearly all of it is broken."""
    rng = random.Random(seed)
    parts = sorted({token for text in ("☺♞東京日本😀🐭λЖ", "\ufffd") for token in tokenizer.encode(text)})
    ids = [rng.choice(parts) for _ in range(200)]
    assert read(tokenizer, ids)[1].text == tokenizer.decode(ids)


def test_marks_without_end_flow_and_cost_no_more_than_other_text(tokenizer, pieces):
    """Neither a vocabulary that has the mark itself, nor bytes that are never a character, stop a stream."""
    for vocabulary, ids in (
        (tokenizer, tokenizer.encode("\ufffd") * 300),
        (tokenizer, tokenizer.encode("☺")[1:2] * 300),
        (pieces, [pieces.convert_tokens_to_ids("<0x80>")] * 300),
    ):
        counting = CountingTokenizer(vocabulary)
        deltas, detokenizer = read(counting, ids)
        assert counting.num_decoded < 30 * len(ids)
        waits = [index for index, delta in enumerate(deltas) if delta]
        assert max(b - a for a, b in pairwise([0, *waits])) <= LONGEST_WAIT
        assert detokenizer.text == vocabulary.decode(ids)


def test_many_characters_in_many_tokens(tokenizer):
    for text in ("👨‍👩‍👧‍👦 family", "naïve café — 世界 ok", " \n\n\t x", "a\u0301\u200d\u00a0b"):
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for end in range(len(token_ids) + 1):
            assert "".join(read(tokenizer, token_ids[:end])[0]) == tokenizer.decode(token_ids[:end])


def test_joined_deltas_are_the_text_of_any_tokens(tokenizer):
    generator = random.Random(0)
    odd = [token for token in range(1000) if "\ufffd" in tokenizer.decode([token])]
    for case in range(1000):
        tokens = [generator.randrange(len(tokenizer)) for _ in range(generator.randrange(1, 40))]
        tokens = [generator.choice(odd) if generator.random() < 0.4 else token for token in tokens]
        deltas, _ = read(tokenizer, tokens, skip_special_tokens=case % 3 > 0)
        assert "".join(deltas) == tokenizer.decode(tokens, skip_special_tokens=case % 3 > 0)
        assert "".join(deltas) == decode(tokenizer, tokens, skip_special_tokens=case % 3 > 0)


def test_joined_deltas_are_the_text_where_tokens_depend_on_each_other(pieces):
    generator = random.Random(0)
    characters = [[7 + byte for byte in character.encode()] for character in "aé世👋"]
    for case in range(500):
        parts = [
            generator.choice([[2], [3], [4], [5], [6], [1], *characters]) for _ in range(generator.randrange(1, 20))
        ]
        tokens = [token for part in parts for token in part]
        deltas, _ = read(pieces, tokens, skip_special_tokens=case % 3 > 0)
        assert "".join(deltas) == pieces.decode(tokens, skip_special_tokens=case % 3 > 0)
        broken = [generator.randrange(len(pieces)) for _ in range(20)]
        assert "".join(read(pieces, broken)[0]) == decode(pieces, broken)


def test_special_tokens_are_left_out_or_not_and_keep_the_space_behind_them(tokenizer, pieces):
    assert read(pieces, [2, 1, 3, 4])[0] == ["Hello", "", " world", "!", ""]
    assert "".join(read(pieces, [2, 1, 3], skip_special_tokens=False)[0]) == "Hello</s> world"
    assert read(tokenizer, [1, ABC], skip_special_tokens=False)[0] == ["<|im_start|>", " ABC", ""]


def test_an_empty_one_is_like_the_other_and_knows_nothing_of_it(tokenizer):
    first = Detokenizer(tokenizer, ["DE"], include_stop=True, min_tokens=1)
    first.append(ABC)
    second = first.empty()
    assert second.text == "" and [second.append(token) for token in (ABC, DEF)] == [None, "DE"]
    assert second.text == " ABCDE" and first.text == " ABC"
