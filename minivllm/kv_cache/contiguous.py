"""Contiguous memory: one run of neighbouring blocks per request, as systems had it before paging.

How long a run is decides the reservation policy. Runs are found by first fit and merged again when they
are freed, so the holes between them (external fragmentation) come about by themselves.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minivllm.kv_cache.block_pool import KVCacheBlock
from minivllm.kv_cache.manager import KVCacheManager, KVRequest
from minivllm.kv_cache.records import Fragmentation

Reservation = Literal["max", "pow2", "exact"]
RESERVATIONS = ("max", "pow2", "exact")


@dataclass(frozen=True, order=True)
class Run:
    """Neighbouring blocks, from `start` to before `end`."""

    start: int
    end: int

    @property
    def length(self) -> int:
        """Blocks in it."""
        return self.end - self.start


class FreeRuns:
    """The holes of the pool, from left to right; two that touch are one."""

    def __init__(self, num_blocks: int) -> None:
        self.runs = [Run(0, num_blocks)]

    def take(self, length: int) -> Run | None:
        """The left end of the first hole that is long enough; None if there is none."""
        for index, hole in enumerate(self.runs):
            if hole.length >= length:
                taken = Run(hole.start, hole.start + length)
                rest = Run(taken.end, hole.end)
                self.runs[index : index + 1] = [rest] if rest.length else []
                return taken
        return None

    def put(self, run: Run) -> None:
        """Gives a run back.

        Raises:
            AssertionError: a part of it is free already.
        """
        insort(self.runs, run)
        merged: list[Run] = []
        for hole in self.runs:
            assert not merged or merged[-1].end <= hole.start, f"double free: {hole} overlaps {merged[-1]}"
            if merged and merged[-1].end == hole.start:
                merged[-1] = Run(merged[-1].start, hole.end)
            else:
                merged.append(hole)
        self.runs = merged

    def remove(self, run: Run) -> None:
        """Takes exactly this run out of the hole that it lies in."""
        index = next(i for i, hole in enumerate(self.runs) if hole.start <= run.start and run.end <= hole.end)
        hole = self.runs[index]
        sides = [Run(hole.start, run.start), Run(run.end, hole.end)]
        self.runs[index : index + 1] = [side for side in sides if side.length]


class ContiguousKVCache(KVCacheManager):
    """Reserves a run at admission: for the longest text ("max"), for the next power of two, in blocks and up to
    the longest text ("pow2"; grown by doubling), or for exactly what the request may come to ("exact")."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, reservation: Reservation) -> None:
        """Makes an empty cache.

        Raises:
            ValueError: a number below 1, or an unknown reservation.
        """
        super().__init__(num_blocks, block_size)
        if num_blocks < 1 or max_model_len < 1:
            raise ValueError(f"num_blocks and max_model_len must be at least 1, got {num_blocks} and {max_model_len}")
        if reservation not in RESERVATIONS:
            raise ValueError(f"reservation must be one of {', '.join(RESERVATIONS)}, got {reservation!r}")
        self.max_model_len, self.reservation = max_model_len, reservation
        self.free_runs = FreeRuns(num_blocks)
        self._runs: dict[str, Run] = {}
        self._requests: dict[str, KVRequest] = {}

    @property
    def num_free_blocks(self) -> int:
        return sum(run.length for run in self.free_runs.runs)

    def can_ever_fit(self, num_tokens: int) -> bool:
        return self._reserved_blocks(num_tokens, num_tokens) <= self.num_blocks

    def allocate_slots(
        self, request: KVRequest, num_new_tokens: int, computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> bool:
        num_tokens = request.num_computed_tokens + num_new_tokens
        run = self._runs.get(request.request_id)
        self.check_call(request, num_new_tokens, run is not None)
        if run and self.num_blocks_for(num_tokens) <= run.length:
            self.emit("grow", request, num_tokens)
            return True
        length = self._reserved_blocks(num_tokens, request.max_num_tokens - 1)
        if run is None:
            run = self.free_runs.take(length)
            if run is None:
                return False
            self._runs[request.request_id], self._requests[request.request_id] = run, request
            self._note_change(request.request_id, 0)
            self.emit("allocate", request, num_tokens)
            return True
        return self._move(request, run, length, num_tokens)

    def fork(self, parent: KVRequest, child: KVRequest) -> bool:
        """Reserves a run for the child and copies what is computed into it.

        Raises:
            AssertionError: the child has memory already, or has computed more than its parent.
        """
        assert child.request_id not in self._runs, f"{child.request_id} has blocks already"
        assert child.num_computed_tokens <= parent.num_computed_tokens, "a child can't have computed more"
        computed = child.num_computed_tokens
        run = self.free_runs.take(self._reserved_blocks(max(1, computed), child.max_num_tokens - 1))
        if run is None:
            return False
        source = self._runs[parent.request_id]
        for index in range(self.num_blocks_for(computed)):
            self.copies.record(source.start + index, run.start + index)
        self._runs[child.request_id], self._requests[child.request_id] = run, child
        self._note_change(child.request_id, 0)
        self.emit("fork", child, computed)
        return True

    def free(self, request: KVRequest) -> None:
        run = self._runs.pop(request.request_id, None)
        self._requests.pop(request.request_id, None)
        self._changed.pop(request.request_id, None)
        if run:
            self.free_runs.put(run)
            self.copies.drop(range(run.start, run.end))
            self.emit("free", request, 0)

    def num_missing_blocks(self, request: KVRequest, computed_blocks: Sequence[KVCacheBlock] = ()) -> int:
        """By how much its run would have to be longer; for one without a run, the whole run."""
        length = self._reserved_blocks(request.num_tokens, request.max_num_tokens - 1)
        return max(0, length - self._num_blocks_of(request.request_id))

    def _block_ids(self, request_id: str, start: int) -> list[int]:
        run = self._runs.get(request_id)
        return list(range(run.start + start, run.end)) if run else []

    def _num_blocks_of(self, request_id: str) -> int:
        run = self._runs.get(request_id)
        return run.length if run else 0

    def fragmentation(self, waiting: KVRequest | None = None) -> Fragmentation:
        """A hole shorter than the next request's run is of no use to it: its slots are external waste."""
        size = self.block_size
        used = to_come = internal = 0
        for request_id, run in self._runs.items():
            request = self._requests[request_id]
            slots = run.length * size
            here = min(slots, request.num_computed_tokens)
            ever = min(slots, max(here, request.max_num_tokens - 1))
            used, to_come, internal = used + here, to_come + ever - here, internal + slots - ever
        needed = self._reserved_blocks(waiting.num_tokens, waiting.max_num_tokens - 1) if waiting else 0
        external = sum(run.length for run in self.free_runs.runs if run.length < needed)
        free = self.num_free_blocks - external
        return Fragmentation(used, to_come, internal, external * size, free * size)

    def check(self) -> None:
        """Asserts the invariants: runs and holes cover the pool once, and every run covers its tokens."""
        pieces = sorted([*self._runs.values(), *self.free_runs.runs])
        assert [p.start for p in pieces] == [0, *(p.end for p in pieces[:-1])], f"runs overlap or leak: {pieces}"
        assert pieces[-1].end == self.num_blocks, f"the pool ends at {pieces[-1].end}, not {self.num_blocks}"
        for left, right in zip(self.free_runs.runs, self.free_runs.runs[1:], strict=False):
            assert left.end < right.start, f"the holes {left} and {right} touch and are two"
        for request_id, run in self._runs.items():
            covered = run.length * self.block_size
            assert covered >= self._requests[request_id].num_computed_tokens, f"{request_id} has too few blocks"

    def _move(self, request: KVRequest, run: Run, length: int, num_tokens: int) -> bool:
        """Gives a request a longer run; into its own place and its neighbours' holes, if they are the first fit."""
        self.free_runs.put(run)
        new = self.free_runs.take(length)
        if new is None:
            self.free_runs.remove(run)
            return False
        if new.start != run.start:
            # The first fit overlaps the old place only to its left, so the first block can go first.
            for index in range(self.num_blocks_for(request.num_computed_tokens)):
                self.copies.record(run.start + index, new.start + index)
        self._runs[request.request_id] = new
        self._note_change(request.request_id, 0 if new.start != run.start else run.length)
        self.emit("move" if new.start != run.start else "allocate", request, num_tokens)
        return True

    def _reserved_blocks(self, num_tokens: int, max_num_tokens: int) -> int:
        """Length of the run for a request that needs `num_tokens` slots now and may come to `max_num_tokens`."""
        if self.reservation == "max":
            return self.num_blocks_for(max(num_tokens, self.max_model_len))
        if self.reservation == "exact":
            return self.num_blocks_for(max(num_tokens, max_num_tokens))
        needed = self.num_blocks_for(num_tokens)
        power = 1 << (needed - 1).bit_length()
        return max(needed, min(power, self.num_blocks_for(self.max_model_len)))
