"""Token ids to text, as they come: what may be shown already, and whether a stop string has been reached.

A token is a piece of bytes and no piece of text: a character may take several tokens, and what a token says may depend
on the one before it (in some vocabularies the space between words is known only there). So new tokens are decoded
together with the last ones whose text is known, and a text that ends in the middle of a character waits. Knows nothing
of scheduling.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # seconds to import
    from transformers import PreTrainedTokenizerBase

INCOMPLETE = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet
LONGEST_WAIT = 8  # tokens; a character has four bytes, so that what is no character by then never becomes one


class Detokenizer:
    """The text of one answer.

    Joined, what `take` returns is what decoding all tokens at once would give, up to where a stop string cuts it off.
    (But for broken characters in vocabularies that spell what they don't know in bytes, as SentencePiece's do: their
    decoder takes the good characters before a broken one back, and a stream can't.)

    Attributes:
        text: what is known so far; the end may still turn out to be a stop string.
        stopped_by: the stop string that was reached.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Begins an empty text.

        Args:
            tokenizer: transformers' tokenizer of the model.
            stop: texts that end it; the first to begin counts, the shortest of those that begin at one place.
            include_stop: whether the stop string stays in the text.
            skip_special_tokens: whether these are left out.
            min_tokens: how many tokens must be there before a stop string counts; one must end behind them.
        """
        self.text, self.stopped_by = "", None  # type: str, str | None
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._stop, self._include_stop, self._min_tokens = tuple(stop), include_stop, min_tokens
        self._longest = max(map(len, self._stop), default=0)
        self._window: list[int] = []  # the last tokens whose text is known, and those whose text is not
        self._num_known, self._known_text = 0, ""  # of the window
        self._num_tokens, self._num_taken, self._protected = 0, 0, 0
        self._finished = False
        self._needs_context = not is_context_free(tokenizer)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", params: SamplingParams) -> "Detokenizer":
        """One as a request asks for it."""
        stop = tuple(params.stop or ())
        return cls(tokenizer, stop, params.include_stop_str_in_output, params.skip_special_tokens, params.min_tokens)

    def empty(self) -> "Detokenizer":
        """Another one like it, for an answer that begins."""
        options = (self._stop, self._include_stop, self._skip, self._min_tokens)
        return Detokenizer(self._tokenizer, *options)

    def append(self, token_id: int) -> str | None:
        """Adds a token.

        Returns:
            The stop string that it completes, if it does.
        """
        self._window.append(token_id)
        self._num_tokens += 1
        decoded = self._decode(self._window)
        stable = decoded
        if decoded.endswith(INCOMPLETE):  # of a character's first bytes a single mark is made, or one of each
            if not self._needs_context:
                stable = decoded[:-1]
            elif len(self._window) - self._num_known < LONGEST_WAIT:
                stable = self._known_text
        self._add(stable[len(self._known_text) :])
        self._known_text = stable
        if len(self._window) > 2 * LONGEST_WAIT and not self._needs_context:
            self._window = self._window[-LONGEST_WAIT:]
            self._known_text = self._decode(self._window)[:-1]
        if stable is decoded and not self._needs_context:
            self._window, self._known_text = [], ""
        elif stable is decoded:
            new = self._window[self._num_known :]
            if text := self._decode(new):  # else it needs what stands before it
                self._window, self._known_text = new, text
            self._num_known = len(self._window)
        return self.stopped_by

    def finish(self) -> None:
        """No token comes any more: what waited for the rest of a character, or of a stop string, is text."""
        if not self._finished and self.stopped_by is None:
            self.text += self._decode(self._window)[len(self._known_text) :]
        self._finished = True

    def take(self) -> str:
        """The text that is certain and has not been taken yet."""
        end = len(self.text) - (0 if self._finished or self.stopped_by is not None else self._num_held_back())
        taken, self._num_taken = self.text[self._num_taken : end], max(end, self._num_taken)
        return taken

    @property
    def shown(self) -> str:
        """All that has been taken."""
        return self.text[: self._num_taken]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip))

    def _add(self, new: str) -> None:
        """Adds text, and looks for a stop string that ends in it."""
        begin = max(len(self.text) - self._longest + 1, 0)
        self.text += new
        if self._num_tokens <= self._min_tokens:
            self._protected = len(self.text)
            return
        found = []
        for order, stop in enumerate(self._stop):
            at = self.text.find(stop, max(begin, self._protected - len(stop) + 1, 0))
            if at >= 0:
                found.append((at, len(stop), order))
        if found:
            at, length, order = min(found)
            self.stopped_by = self._stop[order]
            self.text = self.text[: at + (length if self._include_stop else 0)]

    def _num_held_back(self) -> int:
        """Characters at the end that a stop string may begin with."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            end = self.text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


def is_context_free(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether each token stands for the same bytes wherever it stands."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"


def decode(tokenizer: "PreTrainedTokenizerBase", token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    """The text of an answer that nobody has read before: what a `Detokenizer` would give."""
    if is_context_free(tokenizer):
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    for token_id in token_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    return detokenizer.text
