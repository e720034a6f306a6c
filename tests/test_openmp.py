"""The helpers that OpenMP keeps for a thread that has computed."""

import os
import threading

import pytest
import torch

from minivllm.openmp import release_threads

linux = pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="GNU's OpenMP, as Linux has it")


def num_threads():
    return len(os.listdir("/proc/self/task"))


@linux
def test_they_go_and_come_back_when_needed():
    wide, counts = torch.ones(2_000_000), []

    def compute_and_release():
        for _ in range(2):
            begin = num_threads()
            assert float(wide.exp().sum()) > 0
            computed = num_threads()
            release_threads()
            counts.append((computed - begin, num_threads() - begin))

    thread = threading.Thread(target=compute_and_release)
    thread.start()
    thread.join()
    helpers = torch.get_num_threads() - 1
    assert counts == [(helpers, 0)] * 2


def test_without_any_it_does_nothing():
    thread = threading.Thread(target=release_threads)
    thread.start()
    thread.join()
