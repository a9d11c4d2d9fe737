"""How the two chunked forms of the state-space duality lay out time."""

from __future__ import annotations

from torch import Tensor


def chunks(tensor: Tensor, length: int) -> Tensor:
    """(B, T, ...) → (T / Q, B, Q, ...), a view. Chunks come first, so that neighbours in time are slices of one buffer."""
    return tensor.unflatten(1, (-1, length)).transpose(0, 1)


def unchunk(tensor: Tensor, batch: int) -> Tensor:
    """(T / Q · B, Q, X) or (T / Q, B, Q, X) → (B, T, X)."""
    length, size = tensor.shape[-2:]
    return tensor.view(-1, batch, length, size).transpose(0, 1).reshape(batch, -1, size)


def head_sums(left: Tensor, right: Tensor) -> Tensor:
    """Σ_p left · right: (..., H, P) twice → (..., H)."""
    return (left * right).sum(-1)
