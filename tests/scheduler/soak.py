"""Many random steps of engine, scheduler and memory. Run: python -m tests.scheduler.soak [steps] [seed]"""

import random
import sys
import time
import traceback

from tests.scheduler.machine import compare, random_act, random_world

WORLD_STEPS = 250


def live(seed: int, num_steps: int, with_trace: bool) -> int:
    """The life of one random world; returns its steps."""
    rng = random.Random(seed)
    world = random_world(rng, record=with_trace)
    while world.num_steps < num_steps:
        random_act(world, rng)
        num_broken = world.num_broken
        world.step()
        if with_trace and world.num_broken == num_broken:
            compare(world.trace, world.engine)
    world.drain()
    return world.num_steps


def soak(num_steps: int, first_seed: int = 0, echo=print) -> bool:
    """Lives in many worlds, each from its own seed; returns whether all went well."""
    done, seed, started = 0, first_seed, time.perf_counter()
    while done < num_steps:
        try:
            done += live(seed, WORLD_STEPS, with_trace=seed % 8 == 0)
        except Exception:
            traceback.print_exc()
            echo(f"FAILED: world {seed}, after {done:,} good steps; again: python -m tests.scheduler.soak 1 {seed}")
            return False
        seed += 1
    seconds = time.perf_counter() - started
    echo(f"ok: {done:,} steps in {seed - first_seed:,} worlds, {seconds:.0f} s")
    return True


if __name__ == "__main__":
    arguments = [int(argument) for argument in sys.argv[1:]]
    sys.exit(0 if soak(*(arguments or [100_000])) else 1)
