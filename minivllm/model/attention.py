"""Dense attention: all keys and values of a batch lie side by side, one column per token.

This is what attention was before paging, and what the naive stages run on. Rows of different length are
padded on the left, so that the newest token of every row stands in the last column.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_attention(q: Tensor, k: Tensor, v: Tensor, num_padding: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of the newest tokens over all columns so far.

    The queries are the last `num_queries` columns (the mask is aligned at the bottom right). A padding
    column is seen by nobody but itself: a row of the softmax with nothing in it would be NaN.

    Args:
        q: `[batch, num_queries, num_heads, head_dim]`.
        k: `[batch, num_columns, num_kv_heads, head_dim]`; num_heads is a multiple of num_kv_heads, and each
            KV head serves that many neighbouring query heads (grouped-query attention).
        v: like `k`.
        num_padding: `[batch]`, int64, how many columns at the left of each row are padding.
        window: how many of the latest columns, its own included, a token may see; None for all.

    Returns:
        `[batch, num_queries, num_heads, head_dim]`.
    """
    num_columns = k.shape[1]
    key = torch.arange(num_columns, device=q.device)
    query = key[num_columns - q.shape[1] :, None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    mask = (visible & (key >= num_padding[:, None, None])) | (key == query)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True).transpose(1, 2)
