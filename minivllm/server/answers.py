"""What goes out: the engine's outputs as OpenAI's objects, whole or piece by piece.

Rules of a stream, each of which some client needs: one line of JSON per event; a chunk for every token, also where its
text is still empty; the role together with the first token and in a chunk of its own; `finish_reason` on the last
token's chunk; usage, if asked for, behind all choices in a chunk without any; then `[DONE]`.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from minivllm.detokenizer import Detokenizer
from minivllm.request import CompletionOutput, Logprobs, RequestOutput
from minivllm.server.protocol import ChatCompletionRequest, CompletionRequest, Generation

DONE = "data: [DONE]\n\n"
# For Python's splitlines, and so for httpx, these end a line; in server-sent events they don't.
LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


@dataclass
class Reply:
    """One response: its name and time, which all its parts share, and what has been said of it.

    Attributes:
        body: what was asked.
        model: the name to say.
        tokenizer: for the bytes and texts of logprobs.
        id: its name.
        arrival_time: when the request came, in seconds on the engine's clock.
        created: when, in seconds since 1970.
        prompt_tokens: of all prompts.
        cached_tokens: of these, found in the cache.
        completion_tokens: of all answers so far.
    """

    body: Generation
    model: str
    tokenizer: PreTrainedTokenizerBase
    id: str
    arrival_time: float
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    _echoed: dict[int, int] = field(default_factory=dict)  # of each choice that has begun, the prompt's characters
    _read: dict[int, Detokenizer] = field(default_factory=dict)  # its tokens so far, for where they stand in the text

    @property
    def is_chat(self) -> bool:
        """Which of the two routes it is."""
        return isinstance(self.body, ChatCompletionRequest)

    def count(self, output: RequestOutput) -> None:
        """Books an output that is a delta, or whole."""
        self.completion_tokens += sum(len(answer.token_ids) for answer in output.outputs)

    def usage(self) -> dict[str, Any]:
        """How many tokens there were."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response that is not a stream: one output per prompt."""
        choices = []
        for number, output in enumerate(outputs):
            self.count(output)
            for answer in output.outputs:
                choices.append(self._whole_choice(number, output, answer))
        kind = "chat.completion" if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        rest: dict[str, Any] = {"choices": choices, "usage": self.usage()}
        if self.is_chat and self.body.prompt_logprobs is not None:
            rest["prompt_logprobs"] = plain_logprobs(outputs[0].prompt_logprobs)
        return {**head, **rest}

    def _whole_choice(self, number: int, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        index = number * self.body.num_answers + answer.index
        end = {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
        if isinstance(self.body, CompletionRequest):
            text = answer.text
            if self.body.echo:
                echoed, logprobs = self._echo(output)
                text, self._echoed[index] = echoed + text, len(echoed)
            own = self._legacy_logprobs(index, answer)
            if own is not None and self.body.echo:
                own = {name: [*logprobs[name], *values] for name, values in own.items()}
            choice: dict[str, Any] = {"index": index, "text": text, "logprobs": own, **end}
            if self.body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = plain_logprobs(output.prompt_logprobs)
            return choice
        message = {"role": "assistant", "content": answer.text}
        return {"index": index, "message": message, "logprobs": self._chat_logprobs(answer), **end}

    def _echo(self, output: RequestOutput) -> tuple[str, dict[str, Any]]:
        """A prompt's text, and its logprobs (null where there are none)."""
        skip = self.body.skip_special_tokens is not False and output.prompt is None
        text = output.prompt
        if text is None:
            text = str(self.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=skip))
        entries = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
        detokenizer = Detokenizer(self.tokenizer, skip_special_tokens=skip)
        return text, self._legacy(output.prompt_token_ids, entries, detokenizer, 0)

    def chunks(self, number: int, output: RequestOutput) -> list[dict[str, Any]]:
        """The chunks of a delta of the prompt with this number."""
        self.count(output)
        made = []
        for answer in output.outputs:
            index = number * self.body.num_answers + answer.index
            if index not in self._echoed:
                self._echoed[index] = 0
                if self.is_chat:
                    made.append(self._chunk(index, {"role": "assistant", "content": ""}, None, None, None))
                elif isinstance(self.body, CompletionRequest) and self.body.echo:
                    text, logprobs = self._echo(output)
                    self._echoed[index] = len(text)
                    made.append(self._chunk(index, text, logprobs if output.prompt_logprobs else None, None, None))
            if isinstance(self.body, CompletionRequest):
                own: Any = self._legacy_logprobs(index, answer)
                said: Any = answer.text
            else:
                own, said = self._chat_logprobs(answer), {"content": answer.text}
            made.append(self._chunk(index, said, own, answer.finish_reason, answer.stop_reason))
        return made

    def _chunk(
        self, index: int, said: Any, logprobs: Any, finish: str | None, stop: int | str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta" if self.is_chat else "text": said, "logprobs": logprobs}
        return self._event([{**choice, "finish_reason": finish, "stop_reason": stop}])

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        event: dict[str, Any] = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        event["choices"] = choices
        options = self.body.stream_options
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            event["usage"] = self.usage() if options.continuous_usage_stats or not choices else None
        return event

    def last(self) -> list[dict[str, Any]]:
        """What follows on all choices."""
        options = self.body.stream_options
        return [self._event([])] if options is not None and options.include_usage else []

    def _legacy_logprobs(self, index: int, answer: CompletionOutput) -> dict[str, Any] | None:
        """What is new of an answer's logprobs, as /v1/completions gives them."""
        if answer.logprobs is None:
            return None
        skip = self.body.skip_special_tokens is not False
        detokenizer = self._read.setdefault(index, Detokenizer(self.tokenizer, skip_special_tokens=skip))
        return self._legacy(answer.token_ids, answer.logprobs, detokenizer, self._echoed.get(index, 0))

    def _legacy(
        self, token_ids: Sequence[int], entries: Sequence[Logprobs | None], detokenizer: Detokenizer, begin: int
    ) -> dict[str, Any]:
        """Tokens with their logprobs. A token's `text_offset` is the length of the text that is certain before it; of
        tokens that a stop string has cut off, it lies behind the end."""
        tokens, values, tops, offsets = [], [], [], []
        for token_id, entry in zip(token_ids, entries, strict=True):
            own = None if entry is None else entry[token_id]
            tokens.append((own and own.decoded_token) or str(self.tokenizer.decode([token_id])))
            values.append(None if own is None else own.logprob)
            tops.append(None if entry is None else {str(one.decoded_token): one.logprob for one in entry.values()})
            offsets.append(begin + len(detokenizer.text))
            detokenizer.append(token_id)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _chat_logprobs(self, answer: CompletionOutput) -> dict[str, Any] | None:
        """Logprobs as /v1/chat/completions gives them."""
        if answer.logprobs is None:
            return None
        count = getattr(self.body, "top_logprobs", None) or 0
        content = []
        for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            best = sorted(entry.items(), key=lambda item: item[1].rank)[:count]
            top = [self._described(*pair) for pair in best]
            content.append({**self._described(token_id, entry[token_id]), "top_logprobs": top})
        return {"content": content}

    def _described(self, token_id: int, entry: Any) -> dict[str, Any]:
        text = str(entry.decoded_token)
        return {"token": text, "logprob": max(entry.logprob, -9999.0), "bytes": list(text.encode())}


def plain_logprobs(entries: Sequence[Logprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """Prompt logprobs as vLLM gives them: token id to its logprob, rank and text."""
    if entries is None:
        return None
    return [None if one is None else {str(token): each._asdict() for token, each in one.items()} for one in entries]


def sse(event: dict[str, Any]) -> str:
    """An event of a stream, in one line for everybody: what only some readers take for the end of a line is escaped."""
    text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
    for character, escaped in LINE_ENDS.items():
        text = text.replace(character, escaped)
    return f"data: {text}\n\n"


async def merged(streams: Sequence[AsyncIterator[RequestOutput]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The outputs of several streams as they come, with the number of each one's stream."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in stream:
                queue.put_nowait((number, output))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def new_id(body: Generation, header: str | None) -> str:
    """The name of a response: the client's, if it gives one."""
    prefix = "chatcmpl" if isinstance(body, ChatCompletionRequest) else "cmpl"
    return f"{prefix}-{body.request_id or header or uuid.uuid4().hex}"
