"""Three workloads of random token ids, the same for every engine: no tokenizer stands between, and nothing ends early.

The peers' scripts make the same requests (same generator, same order of draws).
"""

import random

LOWEST, HIGHEST = 100, 40_000  # token ids are drawn from these, both included
NAMES = {
    "W1": "64 mixed requests",
    "W2": "32 with a shared prefix",
    "W3": "one stream",
}
Request = tuple[list[int], int]


def make(name: str, seed: int = 0) -> list[Request]:
    """The requests of a workload: pairs (prompt, output tokens).

    W1: 64 requests at once, prompts of 32 to 256 tokens, outputs of 32 to 128. W2: 32 prompts of the same 512 tokens
    and 32 of their own, 32 tokens out. W3: 128 tokens in, 128 out.
    """
    generator = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [generator.randint(LOWEST, HIGHEST) for _ in range(count)]

    if name == "W1":
        lengths = [(generator.randint(32, 256), generator.randint(32, 128)) for _ in range(64)]
        return [(tokens(prompt), output) for prompt, output in lengths]
    if name == "W2":
        prefix = tokens(512)
        return [(prefix + tokens(32), 32) for _ in range(32)]
    if name == "W3":
        return [(tokens(128), 128)]
    raise ValueError(f"unknown workload {name!r}: give one of {', '.join(NAMES)}")


def warm_up(name: str) -> list[Request]:
    """The same kind of work with other tokens, a fraction of it."""
    count = {"W1": 16, "W2": 4, "W3": 1}[name]
    return [(prompt, min(output, 32)) for prompt, output in make(name, seed=12345)[:count]]
