"""How likely tokens were, by the model's own logits: for drawn tokens and for those of a prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.request import TokenLogprobs

SLICE = 128  # rows at a time: a vocabulary of 49,152 in float32 takes 25 MB then


def token_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """What `SamplingParams.logprobs` asks for.

    Args:
        logits: `[num_rows, vocab_size]`, any float type.
        token_ids: one per row.
        counts: of the likeliest tokens to name beside it, one per row; -1 names all.
    """
    vocab_size = logits.shape[-1]
    asked = [vocab_size if count < 0 else min(count, vocab_size) for count in counts]
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    values, ids = logprobs.topk(max(asked, default=0), dim=-1)
    rows = zip(token_ids, own[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), asked, strict=True)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(top[:count], best[:count], strict=True)))
        for token, logprob, rank, top, best, count in rows
    ]
