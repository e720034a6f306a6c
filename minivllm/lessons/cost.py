"""What a forward pass must compute and must move, by arithmetic alone.

Norms, rotations and activations are left out: they are under one percent of either.
"""

from dataclasses import dataclass

from minivllm.model.architecture import ModelConfig


@dataclass(frozen=True)
class PassCost:
    """Least work of one forward pass.

    Attributes:
        flops: multiplications and additions.
        weight_bytes: weights read; once per pass, however many tokens share them.
        kv_bytes: keys and values read and written.
    """

    flops: int
    weight_bytes: int
    kv_bytes: int

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: flops per byte moved."""
        return self.flops / (self.weight_bytes + self.kv_bytes)

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Shortest time on a machine that can move and compute at once (the roofline)."""
        return max((self.weight_bytes + self.kv_bytes) / bytes_per_s, self.flops / flops_per_s)


def matrix_parameters(config: ModelConfig) -> int:
    """Weights of all layers that every token is multiplied with (no embedding, no head)."""
    c = config
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    return c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)


def pass_cost(config: ModelConfig, batch: int, new_tokens: int, context: int, itemsize: int) -> PassCost:
    """Cost of running `new_tokens` per row; logits for the last of each row.

    Args:
        config: the model.
        batch: rows.
        new_tokens: tokens per row in this pass: the prompt's length in prefill, 1 in decode.
        context: tokens per row before this pass.
        itemsize: bytes per number.
    """
    tokens = batch * new_tokens
    head = config.vocab_size * config.hidden_size
    # A token at place p of the text is compared and mixed with p keys and values.
    seen = batch * (new_tokens * context + new_tokens * (new_tokens + 1) // 2)
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * seen
    kv_read_and_written = batch * (context + 2 * new_tokens) * config.kv_values_per_token
    return PassCost(
        flops=2 * matrix_parameters(config) * tokens + 2 * head * batch + attention,
        weight_bytes=(matrix_parameters(config) + head) * itemsize,
        kv_bytes=kv_read_and_written * itemsize,
    )
