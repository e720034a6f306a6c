"""Who waits, and in which order."""

from bisect import insort
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from minivllm.request import Request


class RequestQueue(Protocol):
    """The waiting requests, the next one first."""

    def add(self, request: Request) -> None:
        """Takes a new request in."""

    def put_back(self, request: Request) -> None:
        """Takes one back that was preempted; it goes before all that came after it."""

    def peek(self) -> Request:
        """The next one, which stays."""

    def pop(self) -> Request:
        """The next one, which leaves."""

    def remove(self, request: Request) -> None:
        """Takes out one that stands anywhere.

        Raises:
            ValueError: it is not here.
        """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """First come, first served; what was preempted goes to the front."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        self._requests.appendleft(request)

    def peek(self) -> Request:
        return self._requests[0]

    def pop(self) -> Request:
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue:
    """Lower priority numbers first, and among equals first come, first served."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # the next one last, where taking it out is cheap

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=lambda waiting: [-part for part in rank(waiting)])

    put_back = add

    def peek(self) -> Request:
        return self._requests[-1]

    def pop(self) -> Request:
        return self._requests.pop()

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return reversed(self._requests)


def rank(request: Request) -> tuple[float, ...]:
    """Sorts requests by priority, then by arrival; the largest is the first to lose its memory."""
    return (request.priority, request.arrival_time, request.number, request.index)
