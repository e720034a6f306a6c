"""Launch parameters: how large the tiles of the attention kernel are, how many are in flight, and who shares the keys.

Knows the card's limits and nothing of kernels. Two things bound a tile: the shared memory of a multiprocessor, and the
registers of a thread. A small card gets smaller tiles instead of an error at the first request; and what the compiler
would have to keep outside the registers is not asked for (the tests read that off the compiled code).
"""

from dataclasses import dataclass

SMALLEST_TILE = 16  # rows and columns of a matrix product on tensor cores
SMALL_CARD = 65_536  # bytes of shared memory of the cards before sm_80
SM_89 = 101_376  # of the sm_89 family: tiles that fit there fit on the larger ones too
MOST_SPLITS = 16
LEAST_KEYS = 256  # per split: below, merging costs more than it saves


@dataclass(frozen=True)
class Launch:
    """How the attention kernel is launched.

    Attributes:
        block_m: rows of a query tile: query tokens times the query heads of a KV head, padded to a power of two.
        block_q: query tokens in it.
        tile_n: keys per step of the loop.
        num_warps: warps of 32 threads per program.
        num_stages: tiles that are in flight at once.
    """

    block_m: int
    block_q: int
    tile_n: int
    num_warps: int
    num_stages: int


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is not below a positive integer."""
    return 1 << (value - 1).bit_length()


def shared_memory_bytes(
    block_m: int, tile_n: int, head_dim: int, itemsize: int, num_stages: int, old_card: bool = False
) -> int:
    """Shared memory that a program takes, at most: the tiles of keys and values in flight, and the query tile.

    On a card without asynchronous copies (before sm_80) one tile is in flight, and in 16 bits the operands of both
    products pass through it, so that the query tile counts twice.
    """
    tiles = num_stages * 2 * tile_n + block_m * (2 if old_card and itemsize < 4 else 1)
    return tiles * next_power_of_2(head_dim) * itemsize


def choose_launch(head_dim: int, ratio: int, itemsize: int, shared_limit: int, max_query_len: int = 1) -> Launch:
    """The largest tiles that fit: fewer stages first, then fewer keys, then fewer queries.

    Args:
        head_dim: numbers per head.
        ratio: query heads per KV head.
        itemsize: bytes per number.
        shared_limit: shared memory that a program may use, in bytes.
        max_query_len: most query tokens of a request in the pass; 1 where all decode.

    Raises:
        ValueError: not even the smallest tiles fit.
    """
    width, old_card = next_power_of_2(head_dim), shared_limit <= SMALL_CARD
    # The most that stays in registers, as compiled for sm_75, sm_80, sm_89 and sm_90. Float32 is multiplied without
    # tensor cores, with its operands in registers too.
    if old_card:
        most_rows, most_keys, most_stages = SMALLEST_TILE, 32 if width <= 128 else 16, 1
    elif itemsize < 4:
        most_rows, most_keys, most_stages = (128, 64, 3) if width <= 64 else (128 if width <= 128 else 64, 32, 3)
    else:
        most_rows, most_keys, most_stages = 32 if width <= 128 else 16, 16, 2
    least_rows = max(SMALLEST_TILE, next_power_of_2(ratio))
    rows = max(least_rows, min(most_rows, next_power_of_2(ratio * max_query_len)))
    while True:
        num_warps = 8 if rows >= (64 if itemsize < 4 else 32) or (itemsize == 4 and width >= 128) else 4
        for tile_n in (size for size in (64, 32, 16) if size <= most_keys):
            for num_stages in range(most_stages, 0, -1):
                if shared_memory_bytes(rows, tile_n, head_dim, itemsize, num_stages, old_card) <= shared_limit:
                    return Launch(rows, rows // ratio, tile_n, num_warps, num_stages)
        if rows == least_rows:
            least = shared_memory_bytes(rows, SMALLEST_TILE, head_dim, itemsize, 1, old_card)
            raise ValueError(
                f"heads of {head_dim} numbers and {ratio} query heads per KV head need {least} bytes of shared memory, "
                f"and the card has {shared_limit}: take attention_backend='torch'"
            )
        rows //= 2


def choose_splits(num_programs: int, max_seq_len: int, num_processors: int) -> int:
    """Into how many parts the keys are split, a power of two.

    As many as give every multiprocessor up to two programs, and no split less than `LEAST_KEYS` keys of the longest
    request. Large batches and short texts are not split.

    Args:
        num_programs: with work in them, without splits.
        max_seq_len: keys of the longest request.
        num_processors: multiprocessors of the card.
    """
    most = min(2 * num_processors // num_programs, max_seq_len // LEAST_KEYS, MOST_SPLITS)
    return 1 << max(most.bit_length() - 1, 0)
