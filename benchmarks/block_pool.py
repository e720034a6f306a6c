"""Times a million block operations: allocate, share, and the two frees that undo them, a quarter each.

Run: .venv/bin/python benchmarks/block_pool.py
"""

import time

from minivllm.kv_cache.block_pool import BlockPool

OPERATIONS = 1_000_000


def measure(num_blocks: int, at_once: int) -> float:
    """Seconds for OPERATIONS block operations, `at_once` blocks per call, in a pool that stays half full."""
    pool = BlockPool(num_blocks)
    held = [pool.allocate(at_once) or [] for _ in range(num_blocks // at_once // 2)]
    rounds = OPERATIONS // (4 * at_once)
    started = time.perf_counter()
    for turn in range(rounds):
        blocks = pool.allocate(at_once)
        assert blocks is not None
        pool.share(blocks)
        pool.free(blocks)
        place = turn % len(held)
        pool.free(held[place])
        held[place] = blocks
    seconds = time.perf_counter() - started
    pool.check()
    return seconds


def main() -> None:
    """Prints the median of three runs for each size."""
    print(f"{OPERATIONS:,} block operations (allocate, share, free, free)")
    for num_blocks in (1_000, 100_000):
        for at_once in (1, 16):
            seconds = sorted(measure(num_blocks, at_once) for _ in range(3))[1]
            print(f"pool of {num_blocks:>7,} blocks, {at_once:>2} at once: {seconds:5.2f} s")


if __name__ == "__main__":
    main()
