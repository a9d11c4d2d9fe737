"""The project's one grid of snapshot token counts. It is in no key, so that figures share trainings."""

from __future__ import annotations

FIRST = 1 << 16


def snapshot_tokens(total: int) -> list[int]:
    """Powers of two from 65,536 tokens on, below `total`; a snapshot is taken at the first step that reaches one.

    The end of the training is not among them: `model.safetensors` holds it.
    """
    tokens = []
    value = FIRST
    while value < total:
        tokens.append(value)
        value *= 2
    return tokens


def snapshot_file(tokens: int) -> str:
    """File name of the snapshot that is due at `tokens`."""
    return f"snapshot-{tokens:012d}.safetensors"
