"""What a step asks of a card: buffers that stay, padded rows, and one wait.

Without a card, torch's meta device stands for it: shapes without numbers, so that whatever would look at a number
raises.
"""

import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minivllm import LLM, SamplingParams
from minivllm.model import inputs as inputs_module
from minivllm.model.attention import PagedAttention
from minivllm.model.inputs import PassInputs, PassRow, pack_rows
from minivllm.runner import ModelRunner
from minivllm.scheduler.plan import NewRequest, SchedulerOutput
from tests.conftest import ORACLE, hf_generate
from tests.lessons.test_naive import random_prompts
from tests.test_identity import build_engine, run_staggered

CPU, CARD = torch.device("cpu"), torch.device("meta")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def rows_of(*sizes, block_size=4, first_block=0):
    """Rows of (start, end) with tokens 100, 101, … and blocks that count down."""
    rows = []
    for start, end in sizes:
        count = -(-end // block_size)
        rows.append(PassRow(list(range(100, 100 + end)), start, end, list(range(first_block + count, first_block, -1))))
        first_block += count
    return rows


# --- the tensors of a pass ---------------------------------------------------------------------------------------


def test_the_tensors_of_a_mixed_pass():
    metadata, ids, positions = pack_rows(rows_of((0, 6), (4, 5), (2, 9)), 4, CPU)
    assert ids.tolist() == [*range(100, 106), 104, *range(102, 109)]
    assert positions.tolist() == [*range(6), 4, *range(2, 9)]
    assert metadata.query_start_loc.tolist() == [0, 6, 7, 14] and metadata.seq_lens.tolist() == [6, 5, 9]
    assert metadata.block_table.tolist() == [[2, 1, 0], [4, 3, 0], [7, 6, 5]]
    assert metadata.slot_mapping.tolist() == [8, 9, 10, 11, 4, 5, 12, 30, 31, 24, 25, 26, 27, 20]
    assert (metadata.max_query_len, metadata.max_seq_len) == (7, 9)


def test_padded_rows_belong_to_nobody():
    inputs = PassInputs(4, CPU)
    inputs.pack(rows_of((0, 9), (0, 9), (0, 9), (0, 9)))  # leaves its numbers in the buffers
    metadata, ids, positions = inputs.pack(rows_of((5, 6), (2, 3)), num_padded=2)
    assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 4] and metadata.seq_lens.tolist() == [6, 3, 0, 0]
    assert metadata.slot_mapping.tolist() == [5, 14, -1, -1]
    assert metadata.block_table.tolist() == [[2, 1], [3, 0], [0, 0], [0, 0]]
    assert ids.tolist() == [105, 102, 0, 0] and positions.tolist() == [5, 2, 0, 0]


def test_buffers_that_are_large_enough_stay_where_they_are():
    inputs = PassInputs(4, CPU)
    inputs.reserve(num_tokens=16, num_reqs=4, max_blocks=4)

    def places(*sizes, num_padded=0):
        metadata, ids, positions = inputs.pack(rows_of(*sizes), num_padded)
        tensors = (ids, positions, metadata.query_start_loc, metadata.seq_lens, metadata.slot_mapping)
        return [x.data_ptr() for x in (*tensors, metadata.block_table)], metadata.block_table.stride()

    first = places((5, 6), (2, 3), num_padded=2)
    assert places((0, 16)) == first == places((3, 4), (8, 9), (0, 1), (9, 10))
    assert places((0, 17))[0][:2] != first[0][:2]


def test_a_block_table_or_a_text_that_is_too_short_is_found():
    with pytest.raises(AssertionError, match="9 tokens in 2 blocks of 4"):
        pack_rows([PassRow(list(range(9)), 8, 9, [3, 4])], 4, CPU)
    with pytest.raises(AssertionError, match="3 tokens are to be computed and fewer are known"):
        pack_rows([PassRow([7], 0, 3, [0])], 4, CPU)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "ieee"), (torch.bfloat16, "tf32")])
def test_float32_is_multiplied_as_such(monkeypatch, dtype, precision):
    """On tensor cores float32 would be cut to ten bits. The interpreter does not know the difference."""
    paged = pytest.importorskip("minivllm.kernels.paged_attention")
    launch = pytest.importorskip("minivllm.kernels.launch").choose_launch(64, 3, dtype.itemsize, 101_376)
    kernel = FakeKernel()
    monkeypatch.setattr(paged, "paged_attention_kernel", kernel)
    q, memory = (torch.empty(*shape, dtype=dtype, device=CARD) for shape in ((1, 9, 64), (4, 16, 3, 64)))
    row = torch.empty(2, dtype=torch.int64, device=CARD)
    paged.paged_attention(q, memory, memory, row, row[:1], row[:1, None], launch)
    assert ("PRECISION", precision) in kernel.variants[0]


# --- padded batches, as a recorded graph of a decode pass would run them ----------------------------------------


def test_a_batch_padded_to_a_fixed_size_gives_the_same_tokens(tiny_llama):
    reference, decoder = tiny_llama
    prompts = random_prompts([20, 3, 17, 33, 9])
    engine = build_engine(decoder, 40, max_num_seqs=6)
    pack, sizes = engine.runner.inputs.pack, set()

    def padded(rows):
        metadata, ids, positions = pack(rows, num_padded=6 - len(rows))
        sizes.add(len(metadata.seq_lens))
        return metadata, ids, positions

    engine.runner.inputs.pack = padded
    outputs = run_staggered(engine, prompts, [GREEDY] * 5, per_step=2)
    assert [output.outputs[0].token_ids for output in outputs] == [hf_generate(reference, p, 8) for p in prompts]
    assert sizes == {6} and not engine.runner.failures


# --- one wait per step -----------------------------------------------------------------------------------------------


class NoSilentCopies(TorchDispatchMode):
    """Refuses operations between the host and the card, each of which would wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor) and x.dim()]
        devices = {x.device.type for x in tensors}
        assert len(devices) < 2, f"{func} takes and gives tensors on {devices}"
        return result


class NoHostLists(TorchFunctionMode):
    """Refuses tensors made of Python lists, and lists as indices, which go to the card the slow way."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        listed = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and any(
            isinstance(x, (list, np.ndarray)) for x in (args[1] if isinstance(args[1], tuple) else args[1:2])
        )
        assert not listed and func not in (torch.tensor, torch.as_tensor), f"{func} of a list"
        return func(*args, **(kwargs or {}))


class FakeKernel:
    """Stands for a Triton kernel: notes what each launch would be compiled for."""

    def __init__(self):
        self.variants = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            types = (str(x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in args)
            self.variants.append((*types, *sorted(constants.items())))

        return launch


class FakeBuffer:
    """A buffer whose device side is on the stand-in."""

    def __init__(self, shape, device):
        self.np = np.zeros(shape, dtype=np.int64)

    def copy_to_gpu(self, count):
        return torch.empty((count, *self.np.shape[1:]), dtype=torch.int64, device=CARD)


@pytest.fixture
def fake_runner(tiny_pair, monkeypatch):
    """The runner with its model and its cache on the stand-in; `waits` counts what is read back."""
    backend = pytest.importorskip("minivllm.kernels.backend")
    decoder = tiny_pair("Llama")[1]
    kernels = [FakeKernel() for _ in range(3)]
    monkeypatch.setattr("minivllm.kernels.paged_attention.paged_attention_kernel", kernels[0])
    monkeypatch.setattr("minivllm.kernels.paged_attention.merge_kernel", kernels[1])
    monkeypatch.setattr("minivllm.kernels.reshape_and_cache.reshape_and_cache_kernel", kernels[2])
    monkeypatch.setattr(backend, "card_limits", lambda device: (101_376, 128))
    monkeypatch.setattr("minivllm.backends.resolve_attention", lambda *args: backend.TritonAttention)
    monkeypatch.setattr(inputs_module, "CpuGpuBuffer", FakeBuffer)

    def fake_transfer(values, device):
        return torch.empty(values.shape, dtype=torch.from_numpy(values).dtype, device=CARD)

    monkeypatch.setattr("minivllm.runner.to_device", fake_transfer)
    monkeypatch.setattr("minivllm.sampler.to_device", fake_transfer)
    with torch.inference_mode():
        decoder.to(CARD, torch.bfloat16)
        decoder.rotary.to(CARD)
        runner = ModelRunner(decoder, 8, 16)
        runner.kernels, runner.waits = kernels, []

        def read_back(tensor):
            runner.waits.append(tuple(tensor.shape))
            return [0] * tensor.shape[0]

        monkeypatch.setattr(torch.Tensor, "tolist", read_back)
        with NoSilentCopies(), NoHostLists():
            yield runner


def new(name, length, params, table, num_computed=0):
    return NewRequest(name, [5] * length, num_computed, table, params, seed=3, num_prompt_tokens=length)


def test_a_step_waits_for_the_card_once(fake_runner):
    """A prefill beside a chunk, then decodes, greedy and with every filter there is: one read at the end of each."""
    warm = [len(kernel.variants) for kernel in fake_runner.kernels]
    assert min(warm) > 0  # every kernel was tried at the start
    filters = SamplingParams(temperature=0.7, top_k=4, top_p=0.8, min_p=0.05, max_tokens=4)
    plan = SchedulerOutput(0, new_requests=[new("a", 5, GREEDY, [0]), new("b", 20, filters, [1, 2])])
    plan.num_scheduled_tokens = {"a": 5, "b": 12}
    assert fake_runner.execute(plan).failed == {} and fake_runner.waits == [(1 + 2,)]  # one token, two flags
    plan = SchedulerOutput(1, num_scheduled_tokens={"a": 1, "b": 8})
    result = fake_runner.execute(plan)
    assert result.failed == {} and list(result.sampled) == ["a", "b"] and fake_runner.waits[1:] == [(2 + 2,)]
    plan = SchedulerOutput(2, num_scheduled_tokens={"a": 1, "b": 1})
    assert fake_runner.execute(plan).failed == {} and fake_runner.waits[2:] == [(2,)]
    plan = SchedulerOutput(3, new_requests=[new("c", 30, GREEDY, [3, 4])], num_scheduled_tokens={"c": 8})
    assert fake_runner.execute(plan).failed == {} and fake_runner.waits[3:] == [(1,)]
    plan = SchedulerOutput(4, num_scheduled_tokens={"c": 1})  # a chunk of one token has a flag as well
    assert fake_runner.execute(plan).failed == {} and fake_runner.waits[4:] == [(1,)]
    launched = [len(kernel.variants) - before for kernel, before in zip(fake_runner.kernels, warm, strict=True)]
    assert launched == [5 * 2, 0, 5 * 2]  # five passes of two layers: attention, no merging, writing


@pytest.mark.parametrize("peek", ["item", "list", "mask", "copy", "tensor"])
def test_a_look_at_a_number_would_be_noticed(fake_runner, peek):
    """The test above can fail."""
    sample = fake_runner.sampler

    def peeking(logits, **keywords):
        if peek == "item":
            logits.amax().item()
        elif peek == "list":
            logits[[0]]
        elif peek == "tensor":
            logits * torch.tensor([2.0], device=CARD)
        elif peek == "mask":
            logits[logits > 0]
        else:
            logits.cpu()
        return sample(logits, **keywords)

    fake_runner.sampler = peeking
    plan = SchedulerOutput(0, new_requests=[new("a", 5, GREEDY, [0])], num_scheduled_tokens={"a": 5})
    assert list(fake_runner.execute(plan).failed) == ["a"]


def test_whatever_a_pass_launches_was_tried_at_the_start(fake_runner, monkeypatch):
    """So no request waits for a compiler, and what a card refuses it refuses before the first one."""
    warm = [set(kernel.variants) for kernel in fake_runner.kernels]
    monkeypatch.setattr("minivllm.kernels.launch.LEAST_KEYS", 2)
    for step, (count, length) in enumerate([(1, 2), (1, 100), (3, 3), (40, 60), (100, 100), (7, 30)] * 2):
        names = [f"{step}-{index}" for index in range(1 if step < 6 else 9)]
        requests = [new(name, length, GREEDY, list(range(7)), num_computed=length - count) for name in names]
        plan = SchedulerOutput(step, new_requests=requests)
        plan.num_scheduled_tokens = dict.fromkeys(names, count)
        assert fake_runner.execute(plan).failed == {}
    seen = [set(kernel.variants) for kernel in fake_runner.kernels]
    assert seen == warm and [len(variants) for variants in warm] == [8, 4, 1]


def test_a_pass_waits_for_the_copies_of_the_one_before(monkeypatch):
    """It may have been given up while they were under way."""
    log = []
    inputs = PassInputs(4, CPU)
    inputs._sent = SimpleNamespace(synchronize=lambda: log.append("wait"), record=lambda: log.append("sent"))
    fill = inputs_module._fill
    monkeypatch.setattr(inputs_module, "_fill", lambda *args: (log.append("fill"), fill(*args)))
    for _ in range(2):
        inputs.pack(rows_of((0, 6)))
    assert log == ["wait", "fill", "sent"] * 2


def test_what_a_failed_pass_held_is_free_before_its_rows_run_again(tiny_llama):
    engine = build_engine(tiny_llama[1], 40)
    for index, prompt in enumerate(random_prompts([5, 6, 7])):
        engine.add_request(str(index), prompt, GREEDY)
    run, alive, held = engine.runner._run, [], []

    def runs_out(scheduled):
        if len(scheduled) > 1:
            activations = torch.zeros(1000)
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("out of memory")
        alive.extend(ref() is not None for ref in held)
        return run(scheduled)

    engine.runner._run = runs_out
    engine.step()
    assert alive == [False] * 3


def test_auto_takes_plain_torch_where_the_kernels_do_not_start(tiny_llama, monkeypatch, caplog):
    backend = pytest.importorskip("minivllm.kernels.backend")

    def no_compiler(cache, num_heads):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(backend.TritonAttention, "warm_up", no_compiler)
    monkeypatch.setattr("minivllm.backends.resolve_attention", lambda *args: backend.TritonAttention)
    assert ModelRunner(tiny_llama[1], 4, 16).attention is PagedAttention
    assert "attention in plain torch, which is slower: Failed to find C compiler" in caplog.text
    with pytest.raises(RuntimeError, match="C compiler"):
        ModelRunner(tiny_llama[1], 4, 16, "triton")


# --- with a card -----------------------------------------------------------------------------------------------------

on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


@on_a_card
def test_on_a_card_each_step_waits_once(tiny_pair):
    decoder = tiny_pair("Llama")[1].float().to("cuda")
    decoder.rotary.to(torch.device("cuda"))
    engine = build_engine(decoder, 40, attention_backend="triton")
    for index, prompt in enumerate(random_prompts([20, 3, 17])):
        engine.add_request(str(index), prompt, SamplingParams(top_p=0.9, max_tokens=5, ignore_eos=True))
    engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchronizing CUDA operation" in str(w.message)]) == 1


@on_a_card
@pytest.mark.real_model
def test_on_a_card_the_engine_keeps_to_its_share_of_the_memory():
    torch.cuda.reset_peak_memory_stats()
    llm = LLM("smollm2-135m", device="cuda", dtype="float32", gpu_memory_utilization=0.5)
    assert llm.engine.runner.attention.__name__ == "TritonAttention"
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [case["prompt_token_ids"] for case in ORACLE["cases"]]
    outputs = llm.generate(prompts * 16 + [[5] * 2000] * 16, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs[:16]] == [c["token_ids"] for c in ORACLE["cases"]]
    assert torch.cuda.max_memory_reserved() <= 0.5 * torch.cuda.mem_get_info()[1]
