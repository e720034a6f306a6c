"""What requests do to their logits before a token is drawn: masks, biases and penalties.

Everything is worked out anew in each step from the tokens that a request has, and nothing is kept: so a preemption, a
chunk or another neighbour in the batch can't change it, and a row that another request takes over begins clean. The
order is that of `SamplingParams`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.device import to_device
from minivllm.sampling_params import SamplingParams


class History(Protocol):
    """The tokens behind a row of logits, and what its request asks for.

    Attributes:
        params: of its request.
        token_ids: prompt and answer so far.
        num_prompt_tokens: how many of them are the prompt.
        stop_token_ids: tokens that end it.
        bad_words: the tokens of texts that must not appear.
    """

    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]


def changes_logits(history: History) -> bool:
    """Whether a row is not drawn from as it is."""
    p = history.params
    return bool(p.penalises or p.logit_bias or p.allowed_token_ids or history.bad_words or _too_short(history))


def _too_short(history: History) -> bool:
    return len(history.token_ids) - history.num_prompt_tokens < history.params.min_tokens


def process_logits(logits: Tensor, histories: Sequence[History]) -> Tensor:
    """Applies all that comes before the temperature.

    Args:
        logits: `[num_rows, vocab_size]`, any float type; left as they are.
        histories: one per row.

    Returns:
        Logits in float32, of the same shape; the given ones where no row asks for anything.
    """
    changed = [row for row, history in enumerate(histories) if changes_logits(history)]
    if not changed:
        return logits
    result = logits.float().clone()
    where = [(row, histories[row]) for row in changed]
    _keep_allowed(result, where)
    _set(result, [(row, token, -np.inf) for row, history in where for token in _banned(history)])
    _add(result, [(row, *pair) for row, history in where for pair in (history.params.logit_bias or {}).items()])
    _penalise(result, [(row, history) for row, history in where if history.params.penalises])
    return result


def _keep_allowed(logits: Tensor, where: Sequence[tuple[int, History]]) -> None:
    """Tokens that are not allowed become impossible."""
    for row, history in where:
        if history.params.allowed_token_ids:
            allowed = to_device(np.array(history.params.allowed_token_ids), logits.device)
            kept = logits[row, allowed]
            logits[row] = -torch.inf
            logits[row, allowed] = kept


def _banned(history: History) -> list[int]:
    """Tokens that would complete a bad word, or end an answer too early."""
    tokens = []
    for *before, last in history.bad_words:
        begin = len(history.token_ids) - len(before)
        if begin >= history.num_prompt_tokens and history.token_ids[begin:] == before:
            tokens.append(last)
    return [*tokens, *history.stop_token_ids] if _too_short(history) else tokens


def _penalise(logits: Tensor, where: Sequence[tuple[int, History]]) -> None:
    """The penalties: repetition over prompt and answer, then frequency and presence over the answer."""
    seen, used = [], []
    for row, history in where:
        p, token_ids = history.params, np.array(history.token_ids, dtype=np.int64)
        if p.repetition_penalty != 1:
            tokens = np.unique(token_ids)
            seen.append(_columns(row, tokens, p.repetition_penalty))
        if p.frequency_penalty or p.presence_penalty:
            tokens, counts = np.unique(token_ids[history.num_prompt_tokens :], return_counts=True)
            used.append(_columns(row, tokens, p.frequency_penalty * counts + p.presence_penalty))
    if seen:
        where_seen, factors = _joined(seen, logits)
        found = logits[where_seen]
        logits[where_seen] = torch.where(found > 0, found / factors, found * factors)
    if used:
        where_used, amounts = _joined(used, logits)
        logits[where_used] -= amounts


def _columns(row: int, tokens: np.ndarray, values: Any) -> np.ndarray:
    """Entries of a row as `[3, num_tokens]`: row, token, value."""
    return np.stack(np.broadcast_arrays(float(row), tokens.astype(np.float64), values))


def _joined(columns: Sequence[np.ndarray], logits: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Entries as tensors on the logits' device: where (rows and tokens), and values."""
    rows, tokens, values = np.concatenate(columns, axis=1)
    rows, tokens, values = rows.astype(np.int64), tokens.astype(np.int64), values.astype(np.float32)
    return (to_device(rows, logits.device), to_device(tokens, logits.device)), to_device(values, logits.device)


def _set(logits: Tensor, entries: Sequence[tuple[int, int, float]]) -> None:
    if entries:
        where, values = _joined([np.array(entries, dtype=np.float64).T], logits)
        logits[where] = values


def _add(logits: Tensor, entries: Sequence[tuple[int, int, float]]) -> None:
    if entries:
        where, values = _joined([np.array(entries, dtype=np.float64).T], logits)
        logits[where] += values
