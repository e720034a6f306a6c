"""The account of a padded static batch: what each slot of each slab was used for."""

from collections.abc import Sequence

from minivllm.viz.figures import SlabRow


def slab_rows(prompt_lens: Sequence[int], output_lens: Sequence[int], slab_len: int) -> list[SlabRow]:
    """Divides the slots of every row of a static batch.

    The batch writes the prompts' columns, and one column per step but the last: the token that ends the
    longest answer is never stored, and neither is anybody's last token read.

    Args:
        prompt_lens: tokens, `[batch]`.
        output_lens: tokens that each row put out, `[batch]`.
        slab_len: slots reserved for each row.

    Returns:
        One row per request; the parts of each add up to slab_len.

    Raises:
        ValueError: the slabs are too short for the batch.
    """
    longest_prompt, steps = max(prompt_lens), max(output_lens)
    written = longest_prompt + steps - 1
    if written > slab_len:
        raise ValueError(f"the batch writes {written} columns and the slabs have {slab_len}")
    return [
        SlabRow(
            padding=longest_prompt - prompt_len,
            prompt=prompt_len,
            output=output_len - 1,
            dead=steps - output_len,
            reserved=slab_len - written,
        )
        for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True)
    ]
