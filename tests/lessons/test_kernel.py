"""What lesson 04 uses beside the kernels: what a program reads (held against the real kernel), runs, costs, checks."""

import os
from dataclasses import replace
from itertools import product

import pytest
import torch

from minivllm.kernels.launch import Launch
from minivllm.lessons import exercises, kernel, kernel_cost, kernel_process
from minivllm.lessons.source import show_kernel, show_launch
from minivllm.model.attention import paged_attention as reference
from minivllm.model.attention import write_kv

ROWS = [(1, 19), (7, 26), (2, 2)]  # decode, a chunk of two query tiles, a whole prompt
SMALL = Launch(block_m=16, block_q=5, tile_n=16, num_warps=4, num_stages=1)


def small_call(**changes):
    call = kernel.random_call(ROWS, num_heads=6, num_kv_heads=2, head_dim=16, block_size=4, seed=3)
    return replace(call, launch=SMALL, **changes)


def programs(call):
    """All programs that have something to do, by their place in the grid."""
    places = product(*map(range, call.grid))
    return {place: reads for place in places if (reads := kernel.program_reads(call, *place)) is not None}


def poison(call, *slots_of_heads):
    """The call with NaN in the values of some slots, for each KV head its own."""
    values = call.values.clone()
    for kv_head, slots in enumerate(slots_of_heads):
        values.flatten(0, 1)[sorted(slots), kv_head] = torch.nan
    return replace(call, values=values)


# With a window of 4, the first keys that the decode and the chunk may see lie on the two sides of a tile's edge.
CASES = {"whole": {}, "splits": {"num_splits": 2}, "window": {"window": 4}}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_the_kernel_reads_what_the_lesson_says_and_nothing_else(changes):
    """NaN spreads to every row of a program that reads it, also to those that may not see it."""
    pytest.importorskip("triton")
    call = small_call(**changes)
    found, num_slots = programs(call), call.keys[..., 0, 0].numel()
    own = [[reads for place, reads in found.items() if place[1] == kv_head] for kv_head in range(2)]
    calls, expected = [call], []
    for tile in sorted({place[0] for place in found}):
        mine = [[reads for place, reads in found.items() if place[:2] == (tile, kv_head)] for kv_head in range(2)]
        slots = [sum((sum(reads.slot_tiles, ()) for reads in parts), ()) for parts in mine]
        # All that these programs leave out; then, of the one KV head, their first key, and of the other, their last.
        for poisoned in ([set(range(num_slots)) - set(read) for read in slots], [{slots[0][0]}, {slots[1][-1]}]):
            calls.append(poison(call, *poisoned))
            hit = [
                reads for bad, all_reads in zip(poisoned, own, strict=True) for reads in all_reads if bad & reads.slots
            ]
            expected.append({row for reads in hit for row in reads.rows if row})
    plain, *outs = (out for out, _ in kernel.run_kernel(*calls))
    assert plain.isfinite().all()
    for out, rows in zip(outs, expected, strict=True):
        assert set(map(tuple, out.isnan().any(-1).nonzero().tolist())) == rows
        assert torch.equal(torch.where(out.isnan(), plain, out), plain)


@pytest.mark.parametrize("window", [None, 6])
def test_a_changed_value_changes_exactly_the_rows_that_see_it(window):
    pytest.importorskip("triton")
    call = small_call(window=window)
    found = programs(call)
    places = [(reads, index, slot) for reads in found.values() for index, slot in enumerate(sum(reads.slot_tiles, ()))]
    calls, expected = [call], []
    for slot in sorted({slot for _, _, slot in places})[::11]:
        values = call.values.clone()
        values.flatten(0, 1)[slot] += 100
        calls.append(replace(call, values=values))
        seen = set()
        for reads, index, other in places:
            key = sum(reads.key_tiles, ())[index]
            for row, position in zip(reads.rows, reads.row_positions, strict=True):
                if other == slot and row and key <= position and (window is None or key > position - window):
                    seen.add(row)
        expected.append(seen)
    plain, *changed = (out for out, _ in kernel.run_kernel(*calls))
    assert [set(map(tuple, (out != plain).any(-1).nonzero().tolist())) for out in changed] == expected


def test_the_rows_of_all_programs_are_the_tokens_of_the_pass_once_per_head_and_split():
    call = small_call(num_splits=2)
    rows = [row for reads in programs(call).values() for row in reads.rows if row]
    assert sorted(rows) == sorted(2 * list(product(range(10), range(6))))


def test_splits_divide_the_keys_of_a_program():
    whole, parts = small_call(), small_call(num_splits=2)
    for (tile, kv_head, _), reads in programs(whole).items():
        tiles = sum((kernel.program_reads(parts, tile, kv_head, split).slot_tiles for split in range(2)), ())
        assert tiles == reads.slot_tiles


def test_a_chunk_by_hand():
    reads = kernel.program_reads(small_call(), tile=1, kv_head=1)
    assert reads.request == 1 and reads.rows[0] == (1, 3) and reads.rows[14] == (5, 5) and reads.rows[15] is None
    assert reads.row_positions[::3] == (19, 20, 21, 22, 23, None)
    assert reads.key_tiles == (tuple(range(16)), tuple(range(16, 24)))
    assert kernel.program_reads(small_call(), tile=2, kv_head=0).rows[:7] == (
        *((token, head) for token in (6, 7) for head in range(3)),
        None,
    )


def test_a_query_tile_more_than_needed_has_nothing_to_do():
    call = kernel.random_call([(2, 2), (3, 3)], num_heads=3, num_kv_heads=1, head_dim=16)
    call = replace(call, launch=SMALL)
    assert call.grid == (3, 1, 1) and kernel.program_reads(call, 2, 0) is None


def test_the_kernel_equals_the_reference_on_the_shape_of_the_model():
    call = kernel.random_call([(1, 1), (1, 15), (1, 16), (1, 17), (20, 100)])
    [(out, lse)] = kernel.run_kernel(call)
    expected, expected_lse = reference(call.q, call.keys, call.values, call.metadata)
    assert call.keys.isnan().any() and out.isfinite().all()
    assert (out - expected).abs().max() < 1e-5 and (lse - expected_lse).abs().max() < 1e-5


def test_the_interpreter_outlives_what_a_function_raises_and_is_started_anew_when_it_ended(capfd):
    interpreter = kernel_process.Interpreter()
    try:
        first = interpreter.call(os.getpid)
        assert first != os.getpid() and interpreter.call(os.getenv, "TRITON_INTERPRET") == "1"
        with pytest.raises(RuntimeError, match=r"interpreter failed:\n(?s:.*)ValueError: .*'no number'"):
            interpreter.call(int, "no number")
        interpreter.call(print, "what is printed does not come between")
        assert interpreter.call(os.getpid) == first
        with pytest.raises(RuntimeError, match="interpreter ended with 3:"):
            interpreter.call(os._exit, 3)
        assert interpreter.call(os.getpid) not in (first, os.getpid())
    finally:
        interpreter.stop()
    assert capfd.readouterr() == ("", "")


def test_what_the_interpreter_said_before_it_ended_is_told():
    interpreter = kernel_process.Interpreter()
    with pytest.raises(RuntimeError, match=r"interpreter ended with 1:\nno such tile$"):
        interpreter.call(exit_with, "no such tile")


def exit_with(sentence):
    raise SystemExit(sentence)


def test_a_changed_kernel_is_wrong_where_the_change_matters():
    pytest.importorskip("triton")
    call = kernel.random_call([(1, 9), (18, 18)], num_heads=3, num_kv_heads=1, head_dim=16)
    expected, _ = reference(call.q, call.keys, call.values, call.metadata)
    changes = [
        ("place <= position[:, None]", "place < position[:, None]"),
        ("slot = block.to(tl.int64)", "slot = (place // BLOCK_SIZE).to(tl.int64)"),
        ("shrink = tl.exp(highest - base)", "shrink = tl.full([BLOCK_M], 1.0, tl.float32)"),
        ("# 4. Tile by tile", "# 4. A comment"),
    ]
    unseeing, tableless, unshrunk, same = (
        ~((out - expected).abs() < 1e-5).flatten(1).all(-1) for out, _ in kernel.run_changes(call, changes)
    )
    assert unseeing.all() and tableless.all() and not same.any()
    assert call.launch.tile_n == 16 and not unshrunk[:17].any() and unshrunk[17:].any()


def test_a_change_must_name_one_place_of_the_kernel():
    call = small_call()
    with pytest.raises(ValueError, match="'no such thing' occurs 0 times in paged_attention_kernel"):
        kernel.run_changed(call, "no such thing", "")
    with pytest.raises(ValueError, match="'base' occurs 3 times in paged_attention_kernel; take a piece that occurs"):
        kernel.run_changed(call, "base", "top")


def test_a_change_that_fails_says_why():
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match=r"failed:\n(?s:.*)NameError: name 'nothing' is not defined$"):
        kernel.run_changed(small_call(), "shrink = tl.exp(highest - base)", "shrink = nothing")


@pytest.mark.parametrize("has_triton", {kernel_process.HAS_TRITON, False})
def test_the_small_kernels_equal_torch(monkeypatch, has_triton):
    monkeypatch.setattr(kernel_process, "HAS_TRITON", has_triton)
    call = small_call()
    keys, table = call.keys[:, :, 1].contiguous(), call.metadata.block_table[1]
    places = torch.arange(26)
    assert torch.equal(kernel.run_toy(keys, table, 26), keys.flatten(0, 1)[table[places // 4] * 4 + places % 4])
    k, v = torch.randn(2, 10, 2, 16)
    slots = call.metadata.slot_mapping.clone()
    slots[3] = -1
    pools = torch.zeros_like(call.keys), torch.zeros_like(call.values)
    written = kernel.run_write(k, v, *pools, slots)
    assert not pools[0].any() and written[0].any()
    write_kv(k, v, *pools, slots)
    assert all(map(torch.equal, written, pools))


def test_without_triton_the_reference_stands_in_and_says_so(monkeypatch):
    monkeypatch.setattr(kernel_process, "HAS_TRITON", False)
    call = small_call(window=6, num_splits=4)
    [(out, lse)] = kernel.run_kernel(call)
    expected = reference(call.q, call.keys, call.values, call.metadata, 6)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    [(out, _)] = kernel.run_changes(call, [("shrink = tl.exp(highest - base)", "shrink = nothing")])
    assert torch.equal(out, expected[0])
    assert "the checks compare it with itself" in kernel_process.where_it_runs()


@pytest.mark.real_model
def test_the_engine_writes_on_the_kernels_what_it_writes_on_torch(monkeypatch, real_llm):
    pytest.importorskip("triton")
    on_kernels = kernel.run_engine(["Once"], 2)
    monkeypatch.setattr(kernel_process, "HAS_TRITON", False)
    assert on_kernels == kernel.run_engine(["Once"], 2) and len(on_kernels[0]) == 2


def test_decode_does_as_many_flops_per_byte_as_heads_share_a_kv_head():
    for batch in (1, 64):
        cost = kernel_cost.attention_cost([(1, 4096)] * batch, 9, 3, 64, itemsize=2)
        assert cost.flops == batch * 4 * 4096 * 9 * 64 and cost.kv_bytes == batch * 2 * 4096 * 3 * 64 * 2
        assert cost.intensity == pytest.approx(3, rel=2e-3)
        assert cost.gather_bytes - cost.query_bytes == 3 * cost.kv_bytes
    chunk = kernel_cost.attention_cost([(3, 5)], 2, 1, 8, itemsize=4)
    assert chunk.flops == 4 * 2 * 8 * (3 + 4 + 5) and chunk.query_bytes == 2 * 3 * 2 * 8 * 4


def test_every_card_has_a_source_and_decode_is_below_its_ridge():
    cards = kernel_cost.cards()
    assert len(cards) == 3 and all(card.source.startswith("https://") for card in cards)
    assert all(100 < card.flops_per_s / card.bytes_per_s < 400 for card in cards)


def test_the_measurement_launches_a_decode_pass(monkeypatch):
    calls = []
    monkeypatch.setattr(kernel_cost, "launch_kernel", calls.append)
    intensity, kernel_rate, copy_rate = kernel_cost.measure_decode(torch.device("cpu"), batch=4, context=64)
    assert calls[0].grid == (4, 3, 1) and calls[0].q.dtype == torch.bfloat16 and calls[0].keys.shape == (16, 16, 3, 64)
    assert 2.5 < intensity < 3 and kernel_rate > 0 and copy_rate > 0


def test_parts_of_a_kernel_are_its_own_lines(monkeypatch):
    shown = []
    monkeypatch.setattr("minivllm.lessons.source.display", lambda code: shown.append(code.data))
    show_kernel("paged_attention_kernel")
    show_kernel("paged_attention_kernel", 1, 3)
    assert shown[0].startswith("@triton.jit") and shown[0].count("\n    # ") >= 5
    first, third = shown[1].split("\n\n")
    assert first.startswith("# 1. Who am I?\nrequest = find_request(") and third.startswith("# 3. The keys")
    for line in shown[1].splitlines():
        assert line in shown[0]
    show_kernel("paged_attention_kernel", 0)
    assert shown[2].startswith("@triton.jit") and shown[2].endswith('"""')
    assert shown[0].startswith(shown[2]) and "WIDEN: tl.constexpr" in shown[2]
    with pytest.raises(ValueError, match="the parts 0 to 5: got 6"):
        show_kernel("paged_attention_kernel", 6)
    with pytest.raises(ValueError, match="no kernel 'attention': there are find_request, paged_attention_kernel"):
        show_kernel("attention")


def test_a_launch_is_shown_with_what_counts_its_programs(monkeypatch):
    shown = []
    monkeypatch.setattr("minivllm.lessons.source.display", lambda code: shown.append(code.data))
    show_launch("gather_kernel")
    show_launch("paged_attention_kernel")
    assert shown[0].splitlines()[0] == "num_blocks = triton.cdiv(num_keys, block_size)"
    assert shown[0].splitlines()[1].startswith("gather_kernel[(num_blocks,)](out, keys")
    assert shown[1].startswith("num_tiles = num_tokens // launch.block_q + num_reqs")
    assert "\n    WIDEN=" in shown[1] and shown[1].endswith("\n)")
    with pytest.raises(ValueError, match="no kernel 'find_request' is launched"):
        show_launch("find_request")


def test_the_source_shown_is_that_of_the_kernel_that_runs(monkeypatch):
    pytest.importorskip("triton")
    import inspect

    from minivllm.kernels.paged_attention import merge_kernel

    shown = []
    monkeypatch.setattr("minivllm.lessons.source.display", lambda code: shown.append(code.data))
    show_kernel("merge_kernel")
    assert shown[0] == inspect.getsource(merge_kernel.fn).rstrip()


def visible(num_queries, seq_len, window):
    """The right answer to `check_visible`."""
    position, key = torch.arange(seq_len - num_queries, seq_len)[:, None], torch.arange(seq_len)
    return (key <= position) & (key > position - (window or seq_len))


def rows_of_tile(ratio, block_m):
    """The right answer to `check_rows_of_tile`."""
    rows = [[query, head] for query in range(block_m // ratio) for head in range(ratio)]
    return rows + [None] * (block_m - len(rows))


def merge(outs, lses):
    """The right answer to `check_merge`."""
    weights = (lses - lses.logsumexp(0)).exp().nan_to_num()
    return weights @ outs, lses.logsumexp(0)


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (exercises.check_visible, visible),
        (exercises.check_visible, lambda *arguments: visible(*arguments).tolist()),
        (exercises.check_visible, lambda *arguments: list(visible(*arguments))),
        (exercises.check_rows_of_tile, lambda *arguments: [r and torch.tensor(r) for r in rows_of_tile(*arguments)]),
        (exercises.check_merge, lambda *arguments: [list(merge(*arguments)[0]), merge(*arguments)[1][None]]),
        (exercises.check_rows_of_tile, rows_of_tile),
        (exercises.check_merge, merge),
    ],
)
def test_a_right_answer_is_right(capsys, check, answer):
    assert check(answer) is True
    assert capsys.readouterr().out == "right: all 6 cases\n"


@pytest.mark.parametrize(
    ("check", "answer", "sentence"),
    [
        (
            exercises.check_visible,
            lambda n, length, w: torch.ones(n, length, dtype=torch.bool).tril(),
            "for 2 queries, 5 tokens, window None query 0, at position 3, and key 1 you got False, it is True",
        ),
        (
            exercises.check_visible,
            lambda n, length, w: visible(n, length, w and w + 1),
            "for 3 queries, 6 tokens, window 2 query 0, at position 3, and key 1 you got True, it is False",
        ),
        (
            exercises.check_visible,
            lambda n, length, w: torch.zeros(n, length).masked_fill(~visible(n, length, w), -torch.inf),
            "the entries must be True or False (a comparison gives them): yours at [0, 0] is 0.0",
        ),
        (exercises.check_visible, lambda *arguments: visible(*arguments).int().tolist(), "True or False"),
        (
            exercises.check_visible,
            lambda n, length, w: visible(length, length, w),
            "for 2 queries, 5 tokens, window None you returned a tensor of the shape [5, 5], and a mask of the shape "
            "[2, 5] is expected",
        ),
        (exercises.check_visible, lambda *arguments: 7, "you returned the number 7, and a mask of the shape [3, 3] is"),
        (exercises.check_visible, lambda *arguments: "no", "you returned 'no', and a mask of the shape [3, 3] is"),
        (exercises.check_visible, lambda *arguments: 1 // 0, "your function raised ZeroDivisionError("),
        (
            exercises.check_rows_of_tile,
            lambda *arguments: [row or -1 for row in rows_of_tile(*arguments)],
            "for ratio 3, 4 rows your row 3 is the number -1: a pair (query, head) is expected, and None for a spare",
        ),
        (
            exercises.check_rows_of_tile,
            lambda *arguments: torch.tensor([row or (-1, -1) for row in rows_of_tile(*arguments)]),
            "your row 3 is (-1, -1): a pair (query, head) is expected, and None for a spare row",
        ),
        (exercises.check_rows_of_tile, lambda *arguments: 4, "you returned the number 4, and a list with an entry per"),
        (
            exercises.check_rows_of_tile,
            lambda ratio, block_m: [divmod(row, ratio) for row in range(block_m)],
            "for ratio 3, 4 rows you got [(0, 0), (0, 1), (0, 2), (1, 0)], it is [(0, 0), (0, 1), (0, 2), None]",
        ),
        (exercises.check_rows_of_tile, lambda ratio, block_m: [None] * block_m, "you got [None, None, None, None]"),
        (exercises.check_merge, lambda outs, lses: (outs.mean(0), lses.logsumexp(0)), "three times the weight you got"),
        (exercises.check_merge, lambda outs, lses: (lses.softmax(0) @ outs, lses.logsumexp(0)), "two empty parts you"),
        (
            exercises.check_merge,
            lambda outs, lses: (lses.exp() @ outs / lses.exp().sum(), lses.exp().sum().log()),
            "for scores around 1000 you got ([nan, nan], inf), it is ([2.5, 5.0], 1001.386)",
        ),
        (
            exercises.check_merge,
            lambda outs, lses: merge(outs, lses)[0],
            "for two parts alike you returned a tensor of the shape [2], and a pair (output of the shape [2], "
            "log-sum-exp) is expected",
        ),
        (
            exercises.check_merge,
            lambda outs, lses: (merge(outs, lses)[0][None], merge(outs, lses)[1]),
            "you returned a pair of a tensor of the shape [1, 2] and the number 0.693",
        ),
        (exercises.check_merge, lambda *arguments: merge(*arguments)[::-1], "log-sum-exp) is expected in this order"),
        (
            exercises.check_merge,
            lambda *arguments: ("a", "b"),
            "you returned a pair of 'a' and 'b', and a pair (output",
        ),
        (exercises.check_merge, lambda outs, lses: ..., "returned Ellipsis; fill in its body"),
    ],
)
def test_a_wrong_answer_is_told_why(capsys, check, answer, sentence):
    assert check(answer) is False
    output = capsys.readouterr().out
    assert output.startswith("not yet: ") and sentence in output
