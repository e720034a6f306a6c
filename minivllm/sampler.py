"""Logits to token ids, for a whole batch at once. Knows nothing of scheduling.

Randomness is counter-based: the number drawn for output token i of a request is a pure function of
(request seed, i). There is no generator object whose state could depend on batch mates, on chunking or on
a preemption; the same request draws the same numbers whatever runs beside it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.device import to_device
from minivllm.sampling_params import SamplingParams

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


class Sampler:
    """Chooses the next token of every row.

    A greedy row takes its largest logit (the lowest id among equals). Every other row goes through
    temperature, min-p, top-k and top-p, and takes one token by inverse transform sampling: the first token, in
    vocabulary order, at which the cumulated probability exceeds the row's uniform number.
    """

    def __call__(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        output_indices: Sequence[int],
    ) -> Tensor:
        """Samples one token per row.

        Args:
            logits: `[num_rows, vocab_size]`, any float type.
            params: one per row.
            seeds: one per row, 0 to 2**64 - 1; not read for greedy rows.
            output_indices: how many tokens the row's request has already put out.

        Returns:
            Token ids, `[num_rows]`, int64, on the logits' device; -1 for a row in which a logit is NaN or plus
            infinity, or all are minus infinity.
        """
        best, token_ids = logits.max(dim=-1)
        unusable = ~best.isfinite()
        rows = [row for row, p in enumerate(params) if not p.greedy]
        if rows:
            drawn = to_device(np.array(rows), logits.device)
            token_ids[drawn] = self._draw(logits[drawn].float(), rows, params, seeds, output_indices)
        return token_ids.masked_fill(unusable, -1)

    def _draw(
        self,
        scores: Tensor,
        rows: Sequence[int],
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        output_indices: Sequence[int],
    ) -> Tensor:
        """One token for each of some rows, `[num_drawn]`, from their scores, `[num_drawn, vocab_size]`."""
        device = scores.device
        temperature = to_device(np.array([params[r].temperature for r in rows], dtype=np.float32), device)
        scores = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None]
        if any(params[r].min_p > 0 for r in rows):
            # The likeliest token has score 0; a token min_p times as likely has log(min_p).
            floor = to_device(np.array([params[r].min_p for r in rows], dtype=np.float32), device).log()
            scores = scores.masked_fill(scores < floor[:, None], -torch.inf)
        filtered = [i for i, r in enumerate(rows) if params[r].top_k > 0 or params[r].top_p < 1]
        if filtered:
            top_k = [params[rows[i]].top_k for i in filtered]
            top_p = [params[rows[i]].top_p for i in filtered]
            limited = to_device(np.array(filtered), device)
            scores[limited] = keep_likeliest(scores[limited], top_k, top_p)
        cumulated = scores.double().softmax(-1).cumsum(-1)
        uniform = philox_uniform([seeds[r] for r in rows], [output_indices[r] for r in rows])
        # At most (1 - 2**-53) x the total, which rounds to less than the total: some token's sum exceeds it.
        target = to_device(uniform, device)[:, None] * cumulated[:, -1:]
        return torch.searchsorted(cumulated, target, right=True).squeeze(-1)


def keep_likeliest(scores: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Sets all scores but those that top-k and then top-p keep to -inf.

    Args:
        scores: `[num_rows, vocab_size]`, float, already divided by the temperature.
        top_k: one per row; 0 or less keeps all.
        top_p: one per row, in (0, 1]; 1 keeps all. The token that crosses the limit is kept.

    Returns:
        The scores, `[num_rows, vocab_size]`; every row keeps at least one finite score.
    """
    vocab_size = scores.shape[-1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    k = to_device(np.array([k if 0 < k < vocab_size else vocab_size for k in top_k]), scores.device)
    rank = torch.arange(vocab_size, device=scores.device)
    dropped = rank >= k[:, None]
    probabilities = ordered.masked_fill(dropped, -torch.inf).double().softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    p = to_device(np.array(top_p, dtype=np.float64), scores.device)[:, None]
    dropped |= (before >= p) & (p < 1)
    dropped[:, 0] = False
    return scores.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf)


def philox_uniform(seeds: Sequence[int], indices: Sequence[int]) -> np.ndarray:
    """One uniform number in [0, 1) for each (seed, index): 53 random bits of Philox4x32-10.

    Philox is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
    (SC 2011). The seed is the key, the index is the counter.
    """
    counter = np.asarray(indices, dtype=np.uint64)
    key = np.asarray(seeds, dtype=np.uint64)
    zero = np.zeros_like(counter)
    words = philox4x32(counter & _LOW, counter >> _SHIFT, zero, zero, key & _LOW, key >> _SHIFT)
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return (high * np.uint64(2**26) + low).astype(np.float64) / 2.0**53


def derive_seed(seed: int, number: int) -> int:
    """The seed of an engine's `number`-th request that brought none, 0 to 2**64 - 1."""
    # A counter word that sampling never sets keeps these numbers apart from the requests' own draws.
    words = [np.array([word], dtype=np.uint64) for word in (number, 0, 1, 0, seed & 0xFFFFFFFF, seed >> 32)]
    high, low, _, _ = philox4x32(*words)
    return (int(high[0]) << 32) | int(low[0])


def philox4x32(*words: np.ndarray, rounds: int = 10) -> tuple[np.ndarray, ...]:
    """The Philox4x32 bijection on arrays of 32-bit words held in uint64.

    Args:
        words: the four counter words and the two key words, each `[n]`.
        rounds: 10 is the number its authors recommend.

    Returns:
        Four output words, each `[n]`.
    """
    c0, c1, c2, c3, k0, k1 = words
    for _ in range(rounds):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> _SHIFT) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _SHIFT) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return c0, c1, c2, c3
