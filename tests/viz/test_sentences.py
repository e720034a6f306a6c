"""Each decision, and each thing that a step does, has its sentence."""

import pytest

from minivllm.sampling_params import SamplingParams
from minivllm.trace import RequestState, TraceState
from minivllm.viz import explain, narrate
from minivllm.viz.wording import listed
from tests.fakes import make_engine, run_to_end, sample_trace
from tests.viz.shared import BEGINNING, shared_trace

HEADER = {"config": {}, "num_blocks": 12, "block_size": 8, "token_budget": 32, "max_running": 4}
CONTIGUOUS = {**HEADER, "config": {"kv_cache": "contiguous"}}
STATIC = {**HEADER, "config": {"batching": "static"}}


def decision(kind, cause="", other=None, needed=0, available=0, request_id="R5"):
    return {
        "kind": kind,
        "request_id": request_id,
        "cause": cause,
        "other": other,
        "needed": needed,
        "available": available,
    }


def all_sentences(trace):
    return [sentence for k in range(len(trace)) for sentence in narrate(trace.state(k), trace.header)]


def branching_trace(**fields):
    engine = make_engine(**({"num_blocks": 16, "max_num_seqs": 6, "block_size": 8} | fields))
    trace = engine.start_recording()
    engine.add_request("A", list(range(1, 13)), SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12))
    engine.add_request("B", list(range(1, 9)), SamplingParams(temperature=0, max_tokens=9))
    run_to_end(engine)
    return trace


@pytest.mark.parametrize(
    ("made", "header", "sentence"),
    [
        (decision("admit", needed=20), HEADER, "R5 admitted: 20 tokens are computed in this step."),
        (decision("admit", needed=1), HEADER, "R5 admitted: 1 token is computed in this step."),
        (decision("admit", needed=20), STATIC, "R5 admitted: it joins the new batch with 20 tokens to compute."),
        (
            decision("resume", needed=20),
            HEADER,
            "R5 resumed after its preemption: 20 tokens are computed again in this step.",
        ),
        (
            decision("admit", needed=22, available=48),
            HEADER,
            "R5 admitted: 48 tokens were found in the prefix cache, and 22 tokens are computed in this step.",
        ),
        (
            decision("admit", needed=22, available=48),
            STATIC,
            "R5 admitted: it joins the new batch with 22 tokens to compute, and 48 that were found in the prefix "
            "cache.",
        ),
        (
            decision("resume", needed=1, available=16),
            HEADER,
            "R5 resumed after its preemption: 16 tokens were found in the prefix cache, and 1 token is computed again "
            "in this step.",
        ),
        (
            decision("wait", "prefix", "R1", 64, 32),
            HEADER,
            "R5 waits: R1 is computing the block that R5 needs next, and R5 will take it over (32 of its 96 tokens are "
            "in the prefix cache already).",
        ),
        (
            decision("wait", "prefix", "R1", 96, 0),
            HEADER,
            "R5 waits: R1 is computing the block that R5 needs next, and R5 will take it over (none of its 96 tokens "
            "is in the prefix cache yet).",
        ),
        (decision("resume", needed=9), STATIC, "R5 resumed: it joins the new batch with 9 tokens to compute."),
        (
            decision("preempt", "no_free_block", "R3", 1, 0),
            HEADER,
            "R5 preempted: R3 needed a block and none was free.",
        ),
        (
            decision("preempt", "no_free_block", "R3", 4, 1),
            HEADER,
            "R5 preempted: R3 needed 4 blocks and 1 was free.",
        ),
        (
            decision("preempt", "no_free_block", "R5", 1, 0),
            HEADER,
            "R5 preempted itself: it needed a block and none was free, and it is the last in line.",
        ),
        (
            decision("preempt", "no_free_block", "R3", 2, 4),
            CONTIGUOUS,
            "R5 preempted: R3 needed a run longer by 2 blocks and there was none (4 blocks free in all).",
        ),
        (
            decision("outgrow", "no_free_block", None, 1, 0),
            HEADER,
            "R5 ended: with its next token it is too long for the pool of 12 blocks, even if nobody else were there.",
        ),
        (decision("wait", "memory", None, 6, 2), HEADER, "R5 waits: it needs 6 blocks and 2 are free for it."),
        (decision("wait", "memory", None, 1, -3), HEADER, "R5 waits: it needs 1 block and none is free for it."),
        (
            decision("wait", "memory", None, 4, 6),
            CONTIGUOUS,
            "R5 waits: it needs 4 neighbouring blocks and no free run is that long (6 free in all).",
        ),
        (
            decision("wait", "memory", None, 4, 1),
            CONTIGUOUS,
            "R5 waits: it needs 4 neighbouring blocks and 1 is free for it.",
        ),
        (decision("wait", "max_num_seqs", None, 1, 0), HEADER, "R5 waits: the batch is full (4 of 4 rows)."),
        (
            decision("wait", "max_num_seqs", None, 3, 2),
            HEADER,
            "R5 waits: it needs 3 rows and the batch has 2 left (2 of 4 rows taken).",
        ),
        (
            decision("wait", "token_budget", None, 1, 0),
            HEADER,
            "R5 waits: the token budget of this step is used up (0 of 32 left).",
        ),
        (
            decision("wait", "token_budget", None, 20, 12),
            HEADER,
            "R5 waits: its 20 tokens must be computed in one step and 12 of 32 are left.",
        ),
        (decision("wait", "preempted"), HEADER, "R5 waits: nobody is admitted in a step that preempted somebody."),
        (decision("wait", "batch"), STATIC, "R5 waits: a static batch is running, and nobody joins it."),
    ],
)
def test_each_decision_has_its_sentence(made, header, sentence):
    assert explain(made, header=header) == sentence


def test_a_decision_is_explained_without_header_and_state():
    assert explain(decision("wait", "max_num_seqs", None, 1, 0)) == "R5 waits: the batch is full (0 rows free)."
    assert (
        explain(decision("wait", "token_budget", None, 1, 0))
        == "R5 waits: the token budget of this step is used up (0 left)."
    )
    assert explain(decision("outgrow", "no_free_block", None, 1, 0)).startswith(
        "R5 ended: with its next token it is too long for the whole pool"
    )


@pytest.mark.parametrize(
    "made", [decision("evict"), decision("wait", "weather"), decision("admit", "batch"), decision("preempt", "memory")]
)
def test_an_unknown_decision_is_refused(made):
    with pytest.raises(ValueError, match="no decision has kind"):
        explain(made)


def test_an_ended_row_of_a_static_batch_is_not_preempted_but_loses_its_blocks():
    state = TraceState(step=9, requests={"R5": RequestState("R5", 5, 10, status="length", ended_in_step=4)})
    assert (
        explain(decision("preempt", "no_free_block", "R3", 1, 0), state, STATIC)
        == "R5, which has ended, lost its row and its blocks: R3 needed a block and none was free."
    )


def test_the_first_steps_of_a_busy_engine_in_full():
    trace = sample_trace()
    assert [narrate(trace.state(k), trace.header) for k in range(2)] == [
        [
            "R0 admitted: all its 20 tokens are computed in this step.",
            "R1 admitted: 12 of its 40 tokens are computed in this step.",
            "R2 waits: the token budget of this step is used up (0 of 32 left).",
            "The prefix cache gains R0's blocks 0–1 and R1's block 3.",
            "R0 puts out its first token.",
        ],
        [
            "R2 admitted: 3 of its 8 tokens are computed in this step.",
            "R1 computes tokens 13 to 40 of its prompt of 40.",
            "R0 decodes one token.",
            "The prefix cache gains R1's blocks 4–7.",
            "R1 puts out its first token.",
        ],
    ]


def test_a_busy_engine_tells_of_preemptions_resumptions_and_ends():
    told = all_sentences(sample_trace())
    for sentence in (
        "R5 preempted: R3 needed a block and none was free.",
        "R5 preempted itself: it needed a block and none was free, and it is the last in line.",
        "R5 resumed after its preemption: all its 15 tokens are computed again in this step.",
        "R5 waits: nobody is admitted in a step that preempted somebody.",
        "R3, R4 and R5 put out their first token.",
        "Three requests decode one token each.",
        "R1 ended after 6 tokens of output, the most that it may put out.",
    ):
        assert sentence in told


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"batching": "static"},
        {"kv_cache": "contiguous"},
        {"kv_cache": "contiguous", "reservation": "pow2"},
        {"kv_cache": "contiguous", "reservation": "exact", "batching": "static"},
        {"scheduling_policy": "priority"},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        {"max_num_seqs": 2},
    ],
)
def test_every_step_of_every_engine_is_told_and_every_request_ends_once(fields):
    trace = sample_trace(**fields)
    for k in range(len(trace)):
        assert narrate(trace.state(k), trace.header)
    told = all_sentences(trace)
    assert sum(" ended after " in sentence for sentence in told) == 7
    assert sum(sentence.count("first token.") for sentence in told) >= 1


def test_a_full_batch_and_an_unchunked_prompt_are_told():
    assert "R2 waits: the batch is full (2 of 2 rows)." in all_sentences(sample_trace(max_num_seqs=2))
    one_piece = sample_trace(
        [(90, 4, 0), (90, 4, 0)],
        enable_chunked_prefill=False,
        max_num_batched_tokens=100,
        max_model_len=100,
        num_blocks=64,
    )
    assert "R1 waits: its 90 tokens must be computed in one step and 10 of 100 are left." in all_sentences(one_piece)


def test_a_static_batch_tells_who_is_computed_to_no_use_and_who_may_not_join():
    told = all_sentences(sample_trace(batching="static"))
    assert "R0 admitted: it joins the new batch with 20 tokens to compute." in told
    assert "R1 computes tokens 1 to 12 of its prompt of 40." in told
    assert "R3 waits: a static batch is running, and nobody joins it." in told
    assert any(sentence.startswith("R1 has ended and is computed once more, to no use: ") for sentence in told)


def test_branches_share_their_blocks_and_copy_on_write():
    trace = branching_trace()
    assert "A/1 and A/2 branch off from A, and share its blocks." in narrate(trace.state(0), trace.header)
    assert narrate(trace.state(1), trace.header) == [
        "A writes into a block that others read too, and gets its own copy: block 1 → 3.",
        "A/1 writes into a block that others read too, and gets its own copy: block 1 → 4.",
        "Four requests decode one token each.",
    ]


def test_one_branch_is_told_of_in_the_singular():
    told = narrate(shared_trace().state(3), HEADER)
    assert "B/1 branches off from B, and shares its blocks." in told


def test_what_the_prefix_cache_gives_gains_and_loses_is_told_step_by_step():
    trace = shared_trace()
    assert {k: narrate(trace.state(k), trace.header) for k in (0, 3, 6)} == {
        0: [
            "A admitted: all its 40 tokens are computed in this step.",
            "The prefix cache gains A's blocks 0–4.",
            "A puts out its first token.",
        ],
        3: [
            "B admitted: 32 of its 42 tokens were found in the prefix cache, and the other 10 are computed in this "
            "step.",
            "The prefix cache gains B's block 5.",
            "B/1 branches off from B, and shares its blocks.",
            "B and B/1 put out their first token.",
        ],
        6: [
            "C admitted: all its 17 tokens are computed in this step.",
            "The prefix cache loses A's block 4.",
            "The prefix cache gains C's blocks 6–7.",
            "C puts out its first token.",
        ],
    }


def test_a_chunk_behind_what_was_found_is_told():
    told = all_sentences(shared_trace(max_num_batched_tokens=8))
    assert (
        "B admitted: 32 of its 42 tokens were found in the prefix cache, and 8 of the other 10 are computed in this "
        "step."
    ) in told
    assert "B computes tokens 41 to 42 of its prompt of 42." in told


def test_who_waits_for_a_block_that_another_computes_is_told_and_so_what_it_found():
    engine = make_engine(block_size=8, max_num_batched_tokens=64)
    trace = engine.start_recording()
    for name in ("first", "second"):
        engine.add_request(name, [*BEGINNING, len(name)], SamplingParams(temperature=0, max_tokens=2))
    run_to_end(engine)
    assert (
        "second waits: first is computing the block that second needs next, and second will take it over (none of its "
        "33 tokens is in the prefix cache yet)."
    ) in narrate(trace.state(0), trace.header)
    assert narrate(trace.state(1), trace.header)[0] == (
        "second admitted: 32 of its 33 tokens were found in the prefix cache, and the other 1 is computed in this step."
    )


def test_a_branch_that_comes_back_finds_its_own_blocks():
    engine = make_engine(num_blocks=8, block_size=8)
    trace = engine.start_recording()
    engine.add_request("A", BEGINNING, SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=20))
    run_to_end(engine)
    state = next(state for state in trace.states() if any(d["kind"] == "resume" for d in state.decisions))
    [resumed] = [d for d in state.decisions if d["kind"] == "resume"]
    name, found = resumed["request_id"], resumed["available"]
    total = state.requests[name].num_tokens - state.sampled.get(name, 0)
    assert (name, found, total) == ("A/1", 40, 49)
    assert explain(resumed, state, trace.header) == (
        f"{name} resumed after its preemption: {found} of its {total} tokens were found in the prefix cache, and the "
        f"other {total - found} are computed again in this step."
    )


def test_a_text_that_is_found_in_another_block_too_is_neither_gained_nor_lost():
    engine = make_engine(block_size=8)
    trace = engine.start_recording()
    for name in "AB":  # B computes everything itself, and its blocks are evicted when it ends
        params = SamplingParams(temperature=0, max_tokens=3 - (name == "B"), skip_reading_prefix_cache=name == "B")
        engine.add_request(name, BEGINNING, params)
    run_to_end(engine)
    assert [block.block_id for block in trace.state(1).evicted] == [7, 6, 5, 4]
    told = [sentence for sentence in all_sentences(trace) if "prefix cache" in sentence]
    assert told == ["The prefix cache gains A's blocks 0–3."]


def test_what_could_be_found_before_the_trace_is_told_once():
    engine = make_engine(block_size=8)
    for length in (9, 33):
        engine.add_request("old", [*BEGINNING[: length - 1], 99], SamplingParams(temperature=0, max_tokens=1))
        run_to_end(engine)
    trace = engine.start_recording()
    engine.add_request("new", [7] * 9, SamplingParams(temperature=0, max_tokens=2))
    run_to_end(engine)
    told = [sentence for sentence in all_sentences(trace) if "prefix cache" in sentence]
    assert told == [
        "4 blocks could be found in the prefix cache when the trace began.",
        "The prefix cache gains new's block 4.",
    ]


def test_contiguous_branches_are_copied_and_runs_move():
    trace = branching_trace(kv_cache="contiguous", reservation="pow2")
    assert "A/1 and A/2 branch off from A, each in a run of its own." in narrate(trace.state(0), trace.header)
    assert narrate(trace.state(1), trace.header)[:3] == [
        "A/1 branched off in the step before and gets a copy of what was computed: blocks 0 → 3, 1 → 4.",
        "A/2 branched off in the step before and gets a copy of what was computed: blocks 0 → 5, 1 → 6.",
        "B outgrew its run and moves to a longer one: block 2 → 7.",
    ]


def test_a_branch_that_outgrows_its_run_later_moves_like_any_other():
    engine = make_engine(num_blocks=32, block_size=4, kv_cache="contiguous", reservation="pow2")
    trace = engine.start_recording()
    engine.add_request("A", [1, 2, 3, 4, 5], SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=12))
    run_to_end(engine)
    copies = {k: [told for told in narrate(trace.state(k), trace.header) if "→" in told] for k in range(len(trace))}
    assert {k: told for k, told in copies.items() if told} == {
        1: ["A/1 branched off in the step before and gets a copy of what was computed: blocks 0 → 2, 1 → 3."],
        4: [
            "A outgrew its run and moves to a longer one: blocks 0 → 4, 1 → 5.",
            "A/1 outgrew its run and moves to a longer one: blocks 2 → 0, 3 → 1.",
        ],
    }


def test_branches_without_memory_wait():
    trace = branching_trace(kv_cache="contiguous")
    assert "A/1 and A/2 branch off from A and wait: there is no memory for them yet." in all_sentences(trace)


def test_ends_of_every_kind_are_told():
    engine = make_engine()
    trace = engine.start_recording()
    for name in ("stops", "fails", "leaves"):
        engine.add_request(name, [1, 2, 3], SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    engine.runner.fail["fails"] = "out of luck"
    engine.abort_request("leaves")
    engine.step()
    assert narrate(trace.state(-1), trace.header) == [
        "Two requests decode one token each.",
        "leaves was aborted after 1 token of output.",
        "fails failed after 1 token of output.",
    ]
    state = trace.state(-1)
    state.finished = {"stops": "stop"}
    assert narrate(state, trace.header)[-1] == "stops ended after 2 tokens of output: it came to a stop."


def test_a_step_that_computes_nothing_says_so():
    assert narrate(TraceState(step=0), HEADER) == ["Nothing was computed."]


def test_a_copy_whose_holder_is_gone_is_told_all_the_same():
    assert narrate(TraceState(step=0, copies=[[3, 7]]), HEADER)[0] == "Copied before the pass: block 3 → 7."


def test_long_lists_of_names_are_counted():
    names = [f"R{index}" for index in range(10)]
    assert listed(names[:1]) == "R0"
    assert listed(names[:2]) == "R0 and R1"
    assert listed(names[:7]) == "R0, R1, R2, R3, R4, R5 and R6"
    assert listed(names[:8]) == "R0, R1, R2, R3, R4, R5 and 2 others"
    assert listed(names) == "R0, R1, R2, R3, R4, R5 and 4 others"
    assert names == [f"R{index}" for index in range(10)]


def test_a_sentence_counts_the_names_that_it_leaves_out():
    trace = sample_trace([(4, 2, 0)] * 9, max_num_seqs=16, max_num_batched_tokens=64)
    assert narrate(trace.state(0), trace.header)[-1] == (
        "R0, R1, R2, R3, R4, R5 and 3 others put out their first token."
    )
