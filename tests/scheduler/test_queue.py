"""Who waits, and in which order: first come, first served, or by priority."""

import pytest

from minivllm.request import Request
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler.queue import FCFSQueue, PriorityQueue, rank
from tests.scheduler.machine import names


def request(name, priority=0, arrival_time=0.0, number=0, index=0):
    made = Request(name, [1], SamplingParams(), 2, priority=priority, arrival_time=arrival_time, index=index)
    made.number = number
    return made


def fill(queue, *requests):
    for item in requests:
        queue.add(item)
    return queue


@pytest.mark.parametrize("make", [FCFSQueue, PriorityQueue])
def test_the_head_is_peeked_at_popped_and_iterated_first(make):
    a, b, c = (request(name, number=number) for number, name in enumerate("abc"))
    queue = fill(make(), a, b, c)
    assert len(queue) == 3 and names(queue) == ["a", "b", "c"]
    assert queue.peek() is a and queue.pop() is a and queue.peek() is b
    assert names(queue) == ["b", "c"] and len(queue) == 2


@pytest.mark.parametrize("make", [FCFSQueue, PriorityQueue])
def test_anyone_can_leave_once(make):
    a, b, c = (request(name, number=number) for number, name in enumerate("abc"))
    queue = fill(make(), a, b, c)
    queue.remove(b)
    assert names(queue) == ["a", "c"]
    with pytest.raises(ValueError):
        queue.remove(b)


def test_fcfs_looks_at_neither_priority_nor_arrival_time():
    queue = fill(FCFSQueue(), request("a", 5, 9.0), request("b", 0, 1.0), request("c", 3, 0.0))
    assert names(queue) == ["a", "b", "c"]


def test_fcfs_what_was_preempted_goes_to_the_front():
    queue = fill(FCFSQueue(), request("a"), request("b"))
    queue.put_back(request("p"))
    queue.put_back(request("q"))
    assert names(queue) == ["q", "p", "a", "b"]


def test_lower_priority_numbers_first_negative_ones_too():
    queue = fill(PriorityQueue(), request("a", 1), request("b", -2), request("c", 0), request("d", 7))
    assert names(queue) == ["b", "c", "a", "d"] and queue.peek().request_id == "b"


def test_equal_priorities_by_arrival_then_by_order_of_adding_then_by_answer():
    queue = fill(
        PriorityQueue(),
        request("late", 1, 2.0, number=0),
        request("second", 1, 1.0, number=2),
        request("first", 1, 1.0, number=1),
        request("second/2", 1, 1.0, number=2, index=2),
        request("second/1", 1, 1.0, number=2, index=1),
    )
    assert names(queue) == ["first", "second", "second/1", "second/2", "late"]


def test_by_priority_what_was_preempted_goes_before_those_that_came_later_and_behind_the_more_urgent():
    queue = fill(PriorityQueue(), request("urgent", 0, 5.0), request("later", 1, 3.0), request("earlier", 1, 1.0))
    queue.put_back(request("preempted", 1, 2.0))
    assert names(queue) == ["urgent", "earlier", "preempted", "later"]


def test_rank_sorts_the_first_to_lose_its_memory_last():
    requests = [request("a", 0, 9.0), request("b", 2, 1.0), request("c", 2, 3.0), request("d", 1, 8.0)]
    assert names(sorted(requests, key=rank)) == ["a", "d", "b", "c"]
