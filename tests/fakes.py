"""A runner without a model: it keeps its own account of every request, as a real one must, and checks each plan.

Tokens are a pure function of the text so far, so that an output can be checked without knowing how it was
scheduled. Slots hold what their token and all before it are, as keys and values do, so that a wrong block table, a
lost copy, a premature reuse or a block of another text is noticed.
"""

from minivllm.cache_size import KVCacheSize
from minivllm.clock import VirtualClock
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine, ModelLimits
from minivllm.kv_cache import KVCacheManager
from minivllm.llm import make_manager
from minivllm.sampling_params import SamplingParams
from minivllm.scheduler import ContinuousScheduler, RunnerOutput, Scheduler, SchedulerOutput, StaticScheduler

VOCAB, EOS = 1000, 0


def next_token(token_ids, seed=0):
    """The token after a text."""
    value = seed * 7919 + 17
    for token in token_ids:
        value = (value * 31 + token + 1) % 1_000_003
    return 1 + value % (VOCAB - 1)


def expected_output(prompt, max_tokens, seed=0):
    """What a request puts out, however it is scheduled."""
    token_ids = list(prompt)
    for _ in range(max_tokens):
        token_ids.append(next_token(token_ids, seed))
    return token_ids[len(prompt) :]


class Row:
    def __init__(self, new):
        self.token_ids, self.block_ids = list(new.token_ids), list(new.block_ids)
        self.num_computed_tokens, self.seed = new.num_computed_tokens, new.seed
        self.marks = []
        for token in self.token_ids:
            self.mark(token)

    def append(self, token):
        self.token_ids.append(token)
        self.mark(token)

    def mark(self, token):
        """What the slot of a token holds: the text up to it."""
        self.marks.append(hash((self.marks[-1] if self.marks else None, token)))


class FakeRunner:
    """Computes plans on slots that hold a mark of the text so far.

    A step takes `step_s` seconds and `token_s` more for each token.
    """

    def __init__(self, manager: KVCacheManager, step_s: float = 0.01, token_s: float = 0.0001) -> None:
        self.block_size = manager.block_size
        self.slots: list[object] = [None] * (manager.num_blocks * manager.block_size)
        self.rows: dict[str, Row] = {}
        self.step_s, self.token_s = step_s, token_s
        self.fail: dict[str, str] = {}
        self.num_computed = 0

    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        for name in plan.removed:
            del self.rows[name]
        for new in plan.new_requests:
            assert new.request_id not in self.rows, f"{new.request_id} is new, and the runner knows it"
            self.rows[new.request_id] = Row(new)
        for name, (start, block_ids) in plan.table_changes.items():
            self.rows[name].block_ids[start:] = block_ids
        size = self.block_size
        for source, target in plan.copies:
            self.slots[target * size : target * size + size] = self.slots[source * size : source * size + size]
        sampled, failed = {}, {}
        for name, count in plan.num_scheduled_tokens.items():
            if name in self.fail:
                failed[name] = self.fail.pop(name)
                continue
            row, rerun = self.rows[name], name in plan.rerun
            start = row.num_computed_tokens - rerun
            assert count > 0 and start + count <= len(row.token_ids), f"{name}: {start} + {count}"
            for position in range(start, start + count):
                self.slots[self.slot(row, position)] = row.marks[position]
            row.num_computed_tokens = start + count
            self.num_computed += count
            found = [self.slots[self.slot(row, position)] for position in range(start + count)]
            assert found == row.marks[: start + count], f"{name} reads others' keys and values"
            if row.num_computed_tokens == len(row.token_ids):
                number = plan.num_samples.get(name, 1)
                sampled[name] = [next_token(row.token_ids, row.seed + index) for index in range(number)]
                row.append(sampled[name][0])
        return RunnerOutput(sampled, failed, self.step_s + self.token_s * plan.num_tokens)

    def slot(self, row, position):
        block, offset = divmod(position, self.block_size)
        return row.block_ids[block] * self.block_size + offset


def make_scheduler(num_blocks=64, max_model_len=256, keep_finished_rows=True, **fields) -> Scheduler:
    """A scheduler with its memory; the fields are those of EngineConfig."""
    config = EngineConfig(max_model_len=max_model_len, num_kv_blocks=num_blocks, **fields)
    manager = make_manager(config, KVCacheSize(num_blocks, config.block_size, 0, ""), max_model_len)
    if config.batching == "static":
        return StaticScheduler(config, manager, keep_finished_rows)
    return ContinuousScheduler(config, manager)


def make_engine(num_blocks=64, max_model_len=256, **fields) -> LLMEngine:
    """An engine on a fake runner and a virtual clock."""
    scheduler = make_scheduler(num_blocks, max_model_len, **fields)
    config = EngineConfig(max_model_len=max_model_len, num_kv_blocks=num_blocks, **fields)
    limits = ModelLimits(VOCAB, max_model_len, frozenset([EOS]))
    return LLMEngine(config, scheduler, FakeRunner(scheduler.manager), limits, clock=VirtualClock())


def run_to_end(engine: LLMEngine, max_steps: int = 10_000) -> dict[str, object]:
    """Steps until nothing is left; returns the final output of every request."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_unfinished_requests():
            return outputs
        for output in engine.step():
            if output.finished:
                assert output.request_id not in outputs, f"{output.request_id} ended twice"
                outputs[output.request_id] = output
    raise AssertionError(f"not done after {max_steps} steps")


def sample_trace(requests=None, **fields):
    """A trace of a small busy engine: preemptions, chunks, waiting. `requests` are (prompt length, max_tokens, step
    of arrival)."""
    requests = requests or [(20, 30, 0), (40, 6, 0), (8, 40, 0), (70, 12, 2), (5, 5, 3), (12, 25, 3), (30, 9, 10)]
    fields = {"num_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8} | fields
    engine = make_engine(**fields)
    trace = engine.start_recording()
    step = 0
    pending = sorted(enumerate(requests), key=lambda item: item[1][2])
    while pending or engine.has_unfinished_requests():
        while pending and pending[0][1][2] <= step:
            index, (length, max_tokens, _) = pending.pop(0)
            prompt = [1 + (index * 37 + i) % (VOCAB - 1) for i in range(length)]
            engine.add_request(f"R{index}", prompt, SamplingParams(temperature=0, max_tokens=max_tokens))
        engine.step()
        step += 1
    engine.stop_recording()
    return trace
