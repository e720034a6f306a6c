"""Streams: what comes out piece by piece is what comes out at once, whoever reads, stops reading, or breaks."""

import asyncio
import threading
import time
from itertools import pairwise

import pytest

from minivllm import LLM, AsyncLLM, EngineDeadError, SamplingParams

pytestmark = pytest.mark.real_model
PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):", "👋 世界 means"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(real_folder):
    return LLM(str(real_folder), dtype="float32", device="cpu", num_kv_blocks=200)


@pytest.fixture
def engine(llm):
    """An engine of its own on the loaded weights, all of whose memory is free at the end."""
    front = AsyncLLM.from_llm(llm.reconfigure())
    yield front
    front.shutdown()
    assert threading.active_count() < 50 and not front._thread.is_alive()


def free(front):
    manager = front.llm.engine.scheduler.manager
    return manager.num_free_blocks == manager.num_blocks


async def settled(front):
    """Waits until nothing runs."""
    for _ in range(500):
        if not front.llm.engine.has_unfinished_requests() and free(front):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("something still runs, or holds blocks")


async def collect(front, prompt, params=GREEDY, **options):
    return [output async for output in front.generate(prompt, params, **options)]


# --- LLM.stream ----------------------------------------------------------------------------------------------------


def test_the_pieces_of_a_stream_are_the_text(llm):
    for prompt in PROMPTS:
        [whole] = llm.generate(prompt, GREEDY, use_tqdm=False)
        pieces = list(llm.stream(prompt, GREEDY))
        assert "".join(pieces) == whole.outputs[0].text and len(pieces) > 10 and "" not in pieces


def test_a_stop_string_ends_a_stream_and_is_never_shown(llm):
    [whole] = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    text = whole.outputs[0].text
    stop = text[30:37]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop, "never written"])
    [stopped] = llm.generate(PROMPTS[1], params, use_tqdm=False)
    [answer] = stopped.outputs
    assert answer.text == text[: text.index(stop)] == "".join(llm.stream(PROMPTS[1], params))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop) and len(answer.token_ids) < 24
    # What stands in the prompt does not count.
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=["Once upon a time"])
    assert llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].text == text


def test_who_stops_reading_ends_the_request(llm):
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert next(stream)
    stream.close()
    manager = llm.engine.scheduler.manager
    assert not llm.engine.has_unfinished_requests() and manager.num_free_blocks == manager.num_blocks


def test_a_bad_request_is_refused_before_the_first_piece(llm):
    for prompt, params, message in (
        ("", GREEDY, "the prompt is empty"),
        (PROMPTS[:2], GREEDY, "stream takes one prompt, got 2"),
        (PROMPTS[0], SamplingParams(n=2), "n is 2, and stream gives the text of one answer"),
        (PROMPTS[0], [GREEDY, GREEDY], "there are 1 prompts and 2 sampling params"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.stream(prompt, params)


def test_bad_words_do_not_appear(llm):
    [plain] = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert " Paris" in plain.outputs[0].text
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words=["Paris", "largest city"])
    [output] = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert "Paris" not in output.outputs[0].text and "largest city" not in output.outputs[0].text


# --- AsyncLLM ------------------------------------------------------------------------------------------------------


def test_streams_are_what_generate_gives(llm, engine):
    """Many at once, of every kind; the deltas join to the whole."""
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)

    async def main():
        kinds = ("delta", "cumulative", "final_only")
        calls = [collect(engine, prompt, output_kind=kind) for prompt in PROMPTS for kind in kinds]
        found = await asyncio.gather(*calls)
        for index, whole in enumerate(expected):
            [answer] = whole.outputs
            deltas, cumulative, final = found[3 * index : 3 * index + 3]
            assert len(deltas) == len(cumulative) == 24 and len(final) == 1
            assert "".join(o.outputs[0].text for o in deltas) == answer.text
            assert [token for o in deltas for token in o.outputs[0].token_ids] == answer.token_ids
            assert [len(o.outputs[0].token_ids) for o in deltas] == [1] * 24
            assert all(b.outputs[0].text.startswith(a.outputs[0].text) for a, b in pairwise(cumulative))
            assert cumulative[-1].outputs == final[0].outputs == whole.outputs
            assert [o.finished for o in deltas] == [False] * 23 + [True]
        await settled(engine)

    asyncio.run(main())


def test_answers_of_one_prompt_are_told_apart(engine):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0)

    async def main():
        deltas = await collect(engine, PROMPTS[0], params, output_kind="delta")
        [whole] = await collect(engine, PROMPTS[0], params, output_kind="final_only")
        for index, answer in enumerate(whole.outputs):
            mine = [a for o in deltas for a in o.outputs if a.index == index]
            assert "".join(a.text for a in mine) == answer.text and len(mine) == 8
            assert [entry for a in mine for entry in a.logprobs] == answer.logprobs
            assert [a.finish_reason for a in mine] == [None] * 7 + ["length"]
        assert [o.prompt_logprobs is None for o in deltas] == [False] + [True] * (len(deltas) - 1)
        assert deltas[0].prompt_logprobs == whole.prompt_logprobs

    asyncio.run(main())


def test_a_reader_that_goes_away_frees_everything(engine):
    """Queued, after the first token, and by being cancelled; the others go on."""
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)

    async def main():
        async def first_only():
            async for _ in engine.generate(PROMPTS[0], endless):
                break

        tasks = [asyncio.create_task(collect(engine, prompt, endless)) for prompt in PROMPTS]
        stays = asyncio.create_task(collect(engine, PROMPTS[1]))
        await first_only()
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        assert (await stays)[-1].outputs[0].finish_reason == "length"
        await settled(engine)

    asyncio.run(main())


def test_readers_on_several_event_loops(llm, engine):
    expected = [output.outputs[0].text for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    found = {}

    def read(index):
        found[index] = asyncio.run(collect(engine, PROMPTS[index]))[-1].outputs[0].text

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(len(PROMPTS))] == expected


def test_a_bad_request_hurts_nobody(engine):
    async def main():
        stays = asyncio.create_task(collect(engine, PROMPTS[0], request_id="a"))
        await asyncio.sleep(0.05)
        for prompt, params, name, message in (
            ("", GREEDY, None, "the prompt is empty"),
            ([49152], GREEDY, None, "token id 49152 at position 0 is out of the vocabulary"),
            (PROMPTS[0], GREEDY, "a", "there is a request 'a' that has not ended"),
        ):
            with pytest.raises(ValueError, match=message):
                await collect(engine, prompt, params, request_id=name)
        assert len(await stays) == 24
        await settled(engine)

    asyncio.run(main())


def test_a_dead_engine_tells_everybody_at_once(engine):
    """SRV-07: who reads, who waits in the queue, and who comes later."""

    async def main():
        engine.check_health()
        streams = [asyncio.create_task(collect(engine, prompt)) for prompt in PROMPTS]
        await asyncio.sleep(0.2)

        def broken(plan):
            raise MemoryError("no more")

        engine.llm.engine.scheduler.update = lambda *args: broken(None)
        started = time.monotonic()
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert time.monotonic() - started < 2
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert "has broken down: MemoryError: no more" in str(results[0])
        with pytest.raises(EngineDeadError, match="MemoryError"):
            await collect(engine, PROMPTS[0])
        with pytest.raises(EngineDeadError):
            engine.check_health()

    asyncio.run(main())


def test_a_shutdown_is_told_too(engine):
    async def main():
        stream = asyncio.create_task(collect(engine, PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True)))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await stream

    asyncio.run(main())
