"""ModelRunner: turns the plan of a step into tensors, runs the model and the sampler.

Knows nothing of queues or policies. It keeps its own account of every request, from what the plans say, so that
a plan holds only what is new. All requests of a step run in one pass, whatever each of them is doing.
"""

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from minivllm.backends import start_attention
from minivllm.config import EngineConfig
from minivllm.device import on_device, to_device
from minivllm.logits import changes_logits, process_logits
from minivllm.logprobs import SLICE, token_logprobs
from minivllm.model.attention import KVCache
from minivllm.model.decoder import Decoder
from minivllm.model.inputs import PassInputs, PassRow
from minivllm.request import TokenLogprobs
from minivllm.sampler import Sampler
from minivllm.sampling_params import MAX_SEED, SamplingParams
from minivllm.scheduler.plan import NewRequest, RunnerOutput, SchedulerOutput


@dataclass(slots=True)
class RequestRow:
    """The runner's account of a request."""

    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, new: NewRequest) -> "RequestRow":
        """Begins the account of a request."""
        return cls(
            request_id=new.request_id,
            token_ids=list(new.token_ids),
            block_ids=list(new.block_ids),
            num_computed_tokens=new.num_computed_tokens,
            num_prompt_tokens=new.num_prompt_tokens,
            params=new.params,
            seed=new.seed,
            stop_token_ids=new.stop_token_ids,
            bad_words=new.bad_words,
        )


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """What is computed for a request in this step.

    Attributes:
        row: whose tokens.
        start: position of the first of them.
        end: position behind the last.
        num_samples: tokens to draw from the last one's logits; 0 for a chunk that is not the last.
        rerun: whether it has all been computed before; nothing is kept of it.
    """

    row: RequestRow
    start: int
    end: int
    num_samples: int
    rerun: bool


@dataclass(slots=True)
class RowResult:
    """What came of a row.

    Attributes:
        tokens: drawn from its last logits.
        logprobs: of these.
        prompt_logprobs: of its prompt's tokens behind those that were computed.
        problem: why nothing of it counts.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    problem: str = ""


class ModelRunner:
    """Carries plans out on a decoder and its cache.

    Attributes:
        model: the decoder.
        cache: keys and values of all blocks.
        attention: the back end: makes the `attend` of a pass.
        inputs: the tensors of a pass, in buffers that stay where they are.
    """

    def __init__(self, model: Decoder, num_blocks: int, block_size: int, attention_backend: str = "auto") -> None:
        """Makes the cache that block numbers stand for.

        Raises:
            ValueError: a back end that can't run here; see
                `minivllm.backends.start_attention`.
        """
        self.model = model
        self.cache = KVCache(model.config, num_blocks, block_size, model.dtype, model.device)
        with on_device(model.device):
            self.attention = start_attention(attention_backend, model, self.cache)
        self.inputs = PassInputs(block_size, model.device)
        self.sampler = Sampler()
        self._rows: dict[str, RequestRow] = {}

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> RunnerOutput:
        """Runs one step.

        A request whose logits are not finite fails alone. When a pass raises, its rows are run one by one, so that
        only the one that is to blame fails.
        """
        started = time.perf_counter()
        output = RunnerOutput({}, {})
        self._take_in(plan)
        scheduled = []
        for name, count in plan.num_scheduled_tokens.items():
            try:
                scheduled.append(self._scheduled(self._rows[name], count, plan))
            except Exception as error:
                output.failed[name] = f"{type(error).__name__}: {error}"
        if scheduled:
            with on_device(self.model.device):
                self._run_or_split(scheduled, output)
        output.elapsed_s = time.perf_counter() - started
        return output

    def _take_in(self, plan: SchedulerOutput) -> None:
        """Books what is new, and makes the copies."""
        for name in plan.removed:
            self._rows.pop(name, None)
        for new in plan.new_requests:
            self._rows[new.request_id] = RequestRow.of(new)
        for name, (start, block_ids) in plan.table_changes.items():
            self._rows[name].block_ids[start:] = block_ids
        self.cache.copy_blocks(plan.copies)

    def _scheduled(self, row: RequestRow, count: int, plan: SchedulerOutput) -> ScheduledRow:
        rerun = row.request_id in plan.rerun
        start = row.num_computed_tokens - rerun
        caught_up = start + count == len(row.token_ids) or rerun
        num_samples = plan.num_samples.get(row.request_id, 1) if caught_up else 0
        return ScheduledRow(row, start, start + count, num_samples, rerun)

    def _run_or_split(self, scheduled: list[ScheduledRow], output: RunnerOutput) -> None:
        """Runs rows together, or one by one if that raises: running a row again writes the same keys and values."""
        problem, results = "", list[RowResult]()
        try:
            results = self._run(scheduled)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"  # and not the error itself, which would keep its pass's memory
        if problem:
            if len(scheduled) == 1:
                output.failed[scheduled[0].row.request_id] = problem
                return
            for item in scheduled:
                self._run_or_split([item], output)
            return
        for item, result in zip(scheduled, results, strict=True):
            name = item.row.request_id
            item.row.num_computed_tokens = item.end
            if result.problem:
                output.failed[name] = result.problem
                continue
            if result.prompt_logprobs:
                output.prompt_logprobs[name] = item.start + 1, result.prompt_logprobs
            if result.tokens and not item.rerun:
                output.sampled[name] = result.tokens
                item.row.token_ids.append(result.tokens[0])
                if result.logprobs:
                    output.logprobs[name] = result.logprobs

    def _run(self, scheduled: list[ScheduledRow]) -> list[RowResult]:
        """One pass, and the tokens that are drawn from it.

        The card is waited for once, where the drawn tokens come back, and once more for logprobs.
        """
        rows = [PassRow(item.row.token_ids, item.start, item.end, item.row.block_ids) for item in scheduled]
        metadata, input_ids, positions = self.inputs.pack(rows)
        attend = self.attention(self.cache, metadata, self.model.config.sliding_window)
        hidden = self.model(input_ids, positions, attend)
        draws = [(index, item, branch) for index, item in enumerate(scheduled) for branch in range(item.num_samples)]
        ends = np.cumsum([item.end - item.start for item in scheduled])
        results, tensors = [RowResult() for _ in scheduled], [hidden.new_empty(0, dtype=torch.int64)]
        logits = hidden.new_empty(0, 1)
        if draws:
            last = to_device(ends[[index for index, _, _ in draws]] - 1, hidden.device)
            logits = self.model.compute_logits(hidden[last])
            tensors[0] = self.sampler(
                process_logits(logits, [item.row for _, item, _ in draws]),
                params=[item.row.params for _, item, _ in draws],
                seeds=[(item.row.seed + branch) & MAX_SEED for _, item, branch in draws],
                output_indices=[len(item.row.token_ids) - item.row.num_prompt_tokens for _, item, _ in draws],
            )
        if metadata.max_query_len > 1 or not all(item.num_samples for item in scheduled):
            tensors.append(_not_finite(hidden, metadata.query_start_loc[: len(rows) + 1]).to(torch.int64))
        came_back = torch.cat(tensors).tolist()
        for result, broken in zip(results, came_back[len(draws) :], strict=False):
            result.problem = NOT_FINITE if broken else ""
        for row, ((index, item, _), token) in enumerate(zip(draws, came_back, strict=False)):
            results[index].tokens.append(token)
            if token < 0:
                left_nothing = changes_logits(item.row) and bool(logits[row].max().isfinite())
                results[index].problem = NOTHING_LEFT if left_nothing else NOT_FINITE
        self._add_logprobs(results, draws, logits)
        for result, item, end in zip(results, scheduled, ends, strict=True):
            if item.row.params.prompt_logprobs is not None and not result.problem:
                self._add_prompt_logprobs(result, item, hidden[end - (item.end - item.start) : end])
        return results

    def _add_logprobs(
        self, results: list[RowResult], draws: list[tuple[int, ScheduledRow, int]], logits: Tensor
    ) -> None:
        """Adds those of drawn tokens, for rows that ask."""
        asked = [
            row
            for row, (index, item, _) in enumerate(draws)
            if item.row.params.logprobs is not None and not results[index].problem
        ]
        if asked:
            tokens = [results[draws[row][0]].tokens[draws[row][2]] for row in asked]
            counts = [draws[row][1].row.params.logprobs or 0 for row in asked]
            for row, entry in zip(asked, token_logprobs(logits[asked], tokens, counts), strict=True):
                results[draws[row][0]].logprobs.append(entry)

    def _add_prompt_logprobs(self, result: RowResult, item: ScheduledRow, hidden: Tensor) -> None:
        """Adds those of the prompt's tokens that follow on the computed ones, which are `[num_tokens, hidden_size]`."""
        row, count = item.row, item.row.params.prompt_logprobs or 0
        following = row.token_ids[item.start + 1 : min(item.end + 1, row.num_prompt_tokens)]
        for begin in range(0, len(following), SLICE):
            tokens = following[begin : begin + SLICE]
            logits = self.model.compute_logits(hidden[begin : begin + len(tokens)])
            result.prompt_logprobs += token_logprobs(logits, tokens, [count] * len(tokens))


def _not_finite(hidden: Tensor, query_start_loc: Tensor) -> Tensor:
    """Whether a token of a row came out broken, `[num_reqs]`: its keys and values may be so too, and others may find
    them where this row's logits show nothing (a chunk has none, and a sliding window may have passed it)."""
    broken = torch.nn.functional.pad((~hidden.isfinite().all(-1)).cumsum(0), (1, 0))[query_start_loc]
    return broken[1:] > broken[:-1]


NOT_FINITE = (
    "the model's logits are NaN or infinite: its weights are broken, or its numbers overflow in float16 (take "
    "bfloat16 or float32)"
)


NOTHING_LEFT = (
    "no token may be drawn: allowed_token_ids, bad_words, min_tokens and the stop tokens leave none of the vocabulary"
)


def profile_pass(model: Decoder, config: EngineConfig) -> None:
    """Runs the largest passes that can come, for whoever measures their memory.

    One has as many rows as may run together, all sampled; one is the last chunk of the longest text.
    """
    longest, budget = model.rotary.num_positions, config.max_num_batched_tokens
    params = SamplingParams(temperature=1.0, top_p=0.9)
    num_rows = min(config.max_num_seqs, budget)
    for rows in ([min(longest, budget // num_rows)] * num_rows, [longest]):
        table, plan = 0, SchedulerOutput(0)
        for index, length in enumerate(rows):
            count = min(length, budget)
            blocks = list(range(table, table := table + -(-length // config.block_size)))
            plan.new_requests.append(
                NewRequest(str(index), [0] * length, length - count, blocks, params, seed=0, num_prompt_tokens=length)
            )
            plan.num_scheduled_tokens[str(index)] = count
        runner = ModelRunner(model, table, config.block_size, config.attention_backend)
        for memory in (runner.cache.keys, runner.cache.values):
            memory.zero_()  # the last chunk reads what no chunk before it has written
        output = runner.execute(plan)
        if output.failed:
            raise ValueError(f"the largest pass fails ({len(rows)} rows, {plan.num_tokens} tokens): {output.failed}")
