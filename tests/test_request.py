"""Everything a user can get wrong is refused at the door, with the name and the number."""

import math
from dataclasses import replace

import numpy as np
import pytest

from minivllm import EngineConfig, SamplingParams
from minivllm.prompts import as_prompt_list, check_prompt, parse_prompt


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be at least 0"),
        ("temperature", math.nan, "temperature must be a finite number, got nan"),
        ("temperature", math.inf, "temperature must be a finite number, got inf"),
        ("temperature", "hot", "temperature must be a finite number, got 'hot'"),
        ("temperature", 10**400, "temperature must be a finite number"),
        ("temperature", True, "temperature must be a finite number, got True"),
        ("top_p", 0, "top_p must be above 0 and at most 1, got 0"),
        ("top_p", 1.1, "got 1.1"),
        ("top_p", math.nan, "top_p must be a finite number"),
        ("top_k", -2, "top_k must be at least -1, got -2"),
        ("top_k", 2.5, "top_k must be an integer, got 2.5"),
        ("seed", -1, "seed must be at least 0"),
        ("seed", 2**64, "and at most 18446744073709551615, got 18446744073709551616"),
        ("seed", 1.0, "seed must be an integer"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("max_tokens", -1, "max_tokens must be at least 1, got -1"),
        ("max_tokens", 1.5, "max_tokens must be an integer, got 1.5"),
        ("max_tokens", True, "max_tokens must be an integer, got True"),
        ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
        ("min_p", -0.1, "min_p must be at least 0 and at most 1, got -0.1"),
        ("min_p", 1.01, "min_p must be at least 0 and at most 1, got 1.01"),
        ("min_p", math.nan, "min_p must be a finite number, got nan"),
        ("n", 0, "n must be at least 1, got 0"),
        ("n", 2.0, "n must be an integer, got 2.0"),
        ("n", None, "n must be an integer, got None"),
        ("presence_penalty", 2.1, "presence_penalty must be at least -2 and at most 2, got 2.1"),
        ("frequency_penalty", -2.5, "frequency_penalty must be at least -2 and at most 2, got -2.5"),
        ("frequency_penalty", math.nan, "frequency_penalty must be a finite number, got nan"),
        ("repetition_penalty", 0, "repetition_penalty must be at least 1e-06 and at most 1000000.0, got 0"),
        ("repetition_penalty", -1, "repetition_penalty must be at least 1e-06 and at most 1000000.0, got -1"),
        ("repetition_penalty", 1e-38, "repetition_penalty must be at least 1e-06"),
        ("repetition_penalty", 1e7, "repetition_penalty must be at least 1e-06 and at most 1000000.0, got 10000000.0"),
        ("repetition_penalty", math.inf, "repetition_penalty must be a finite number, got inf"),
        ("min_tokens", -1, "min_tokens must be at least 0, got -1"),
        ("min_tokens", 17, "min_tokens is 17 and max_tokens 16: lower min_tokens"),
        ("stop", "", "stop must hold texts that are not empty, got ''"),
        ("stop", ["a", ""], "stop must hold texts that are not empty, got ''"),
        ("stop", ["a", 3], "stop must hold texts that are not empty, got 3"),
        ("stop", {"a": 1}, "stop must be a list of texts, got {'a': 1}"),
        ("bad_words", "word", "bad_words must be a list of texts, got 'word'"),
        ("bad_words", [""], "bad_words must hold texts that are not empty"),
        ("stop_token_ids", [-5], "stop_token_ids must be at least 0, got -5"),
        ("stop_token_ids", 7, "stop_token_ids must be a list of token ids, got 7"),
        ("stop_token_ids", [True], "stop_token_ids must be an integer, got True"),
        ("allowed_token_ids", [], "allowed_token_ids is empty: no token could be drawn; leave it None"),
        ("allowed_token_ids", [1.5], "allowed_token_ids must be an integer, got 1.5"),
        ("logit_bias", [1], "logit_bias must be a dict of token id to number"),
        ("logit_bias", {"x": 1}, "a token id in logit_bias must be an integer, got 'x'"),
        ("logit_bias", {-1: 1}, "a token id in logit_bias must be at least 0, got -1"),
        ("logit_bias", {5: 101}, "logit_bias of token 5 must be at least -100 and at most 100, got 101"),
        ("logit_bias", {5: math.nan}, "logit_bias of token 5 must be a finite number, got nan"),
        ("logprobs", -2, "logprobs must be at least -1, got -2"),
        ("logprobs", True, "logprobs must be an integer, got True"),
        ("prompt_logprobs", 0.5, "prompt_logprobs must be an integer, got 0.5"),
        ("skip_special_tokens", 0, "skip_special_tokens must be True or False, got 0"),
        ("include_stop_str_in_output", None, "include_stop_str_in_output must be True or False, got None"),
    ],
)
def test_sampling_params_refuse_by_field_and_value(field, value, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{field: value})


def test_many_greedy_answers_are_refused():
    for temperature in (0, 1e-6):
        with pytest.raises(ValueError, match=r"n is 3 and the temperature .*: greedy answers are all the same"):
            SamplingParams(n=3, temperature=temperature)


def test_sampling_params_take_the_edges():
    SamplingParams(temperature=0, top_p=1, top_k=-1, seed=0, max_tokens=1)
    SamplingParams(temperature=np.float32(0.5), top_p=np.float64(0.5), top_k=np.int64(3), max_tokens=np.int32(4))
    SamplingParams(temperature=100, top_p=1e-9, top_k=10**9, seed=2**64 - 1, max_tokens=None)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=1e-3, min_tokens=16, logprobs=-1)
    many = SamplingParams(
        stop="a",
        stop_token_ids=[3, np.int64(3)],
        allowed_token_ids=(1, 2),
        logit_bias={np.int64(5): 1},
        bad_words=["b"],
    )
    assert (many.stop, many.stop_token_ids, many.logit_bias) == (("a",), (3,), {5: 1.0})
    assert replace(many) == many and replace(SamplingParams()) == SamplingParams()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", "", "model must be a non-empty string, got ''"),
        ("model", 3, "model must be a non-empty string, got 3"),
        ("tokenizer", "", "tokenizer must be None or a non-empty string"),
        ("dtype", "int8", "dtype must be one of auto, float32, bfloat16, float16, float64, got 'int8'"),
        ("seed", -1, "seed must be at least 0"),
        ("max_model_len", 1, "max_model_len must be at least 2, got 1"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0"),
        ("kv_cache_memory_bytes", 0, "kv_cache_memory_bytes must be at least 1, got 0"),
        ("num_kv_blocks", 0, "num_kv_blocks must be at least 1, got 0"),
        ("block_size", 0, "block_size must be at least 1, got 0"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be at least 1, got 0"),
        ("long_prefill_token_threshold", -1, "long_prefill_token_threshold must be at least 0, got -1"),
        ("gpu_memory_utilization", 0, "gpu_memory_utilization must be above 0 and at most 1, got 0"),
        ("gpu_memory_utilization", 1.5, "at most 1, got 1.5"),
        ("gpu_memory_utilization", math.nan, "at most 1, got nan"),
        ("enable_chunked_prefill", 1, "enable_chunked_prefill must be True or False, got 1"),
        ("scheduling_policy", "lifo", "scheduling_policy must be one of fcfs, priority, got 'lifo'"),
        ("kv_cache", "radix", "kv_cache must be one of paged, contiguous, got 'radix'"),
        ("batching", "none", "batching must be one of continuous, static, got 'none'"),
    ],
)
def test_engine_config_refuses_by_field_and_value(field, value, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_kv_blocks": 4, "kv_cache_memory_bytes": 9},
            "num_kv_blocks is 4 and kv_cache_memory_bytes 9: .* give one",
        ),
        ({"reservation": "max"}, "reservation is 'max', and paged memory reserves nothing"),
        ({"kv_cache": "contiguous", "reservation": "half"}, "reservation must be one of None, max, pow2, exact"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 256},
            "max_num_batched_tokens is 64, max_model_len is 256 and enable_chunked_prefill is False",
        ),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 8},
            "long_prefill_token_threshold is 8 and enable_chunked_prefill is False",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_an_unknown_option_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown option\(s\) max_num_seq; EngineConfig has model, .*max_num_seqs"):
        EngineConfig.from_fields(max_num_seq=4)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("hi", ["hi"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([{"prompt_token_ids": [1]}, "b"], [{"prompt_token_ids": [1]}, "b"]),
    ],
)
def test_one_prompt_or_many(prompts, expected):
    assert as_prompt_list(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "message"),
    [([], "empty list"), (None, "got NoneType"), (3, "got int"), (np.array([1]), "got ndarray")],
)
def test_what_is_no_prompt_is_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        as_prompt_list(prompts)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a", None, 0, None)),
        ([1, np.int64(2)], (None, [1, 2], 0, None)),
        ({"prompt": "a"}, ("a", None, 0, None)),
        ({"prompt": "a", "cache_salt": "s"}, ("a", None, 0, "s")),
        ({"prompt_token_ids": [3]}, (None, [3], 0, None)),
        ({"prompt_token_ids": [3], "priority": -2}, (None, [3], -2, None)),
        ({"prompt_token_ids": [3], "priority": 1, "cache_salt": "\ud800"}, (None, [3], 1, "\ud800")),
        ([], (None, [], 0, None)),
    ],
)
def test_a_prompt_is_text_or_tokens(prompt, expected):
    assert parse_prompt(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, "a"], "token ids must be integers, got 'a' at position 1"),
        ([1, True], "got True at position 1"),
        ([1.0], "got 1.0 at position 0"),
        (None, "got NoneType"),
        ({}, r"a prompt dict is .*got \{\}"),
        ({"prompt": "a", "prompt_token_ids": [1]}, r"got \{'prompt': 'str', 'prompt_token_ids': 'list'\}"),
        ({"text": "a"}, r"got \{'text': 'str'\}"),
        ({1: 2, "a": 3}, r"got \{1: 'int', 'a': 'int'\}"),
        ({"prompt": None}, r"got \{'prompt': 'NoneType'\}"),
        ({"prompt": [1, 2]}, r"got \{'prompt': 'list'\}"),
        ({"prompt_token_ids": "a"}, r"got \{'prompt_token_ids': 'str'\}"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt must be a non-empty string, got '': leave it out to have none"),
        ({"prompt": "a", "cache_salt": None}, "cache_salt must be a non-empty string, got None"),
        ({"prompt": "a", "cache_salt": 7}, "cache_salt must be a non-empty string, got 7"),
        ({"prompt_token_ids": [1], "cache_salt": b"s"}, "cache_salt must be a non-empty string, got b's'"),
        ({"cache_salt": "s"}, r"got \{'cache_salt': 'str'\}"),
    ],
)
def test_a_malformed_prompt_is_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        parse_prompt(prompt)


@pytest.mark.parametrize("length", [8192, 8193])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_lengths(length):
    with pytest.raises(ValueError, match=f"the prompt has {length} tokens and max_model_len is 8192"):
        check_prompt([1] * length, 49152, 8192)


def test_the_longest_prompt_leaves_room_for_one_token():
    check_prompt([1] * 8191, 49152, 8192)
