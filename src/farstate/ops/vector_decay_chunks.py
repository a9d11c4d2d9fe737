"""Layout and state passing that the two chunked forms of the recurrences with vector decays share (see `vector_decay`).

Element-wise work and sums over steps are done in the layout of the inputs, (B, T, H, X). Matrix products want the steps of one
head beside each other, (T / Q, B, H, Q, X); the pass that makes a factor writes it there. Chunks come first, so that neighbours
in time are slices of one buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_head(tensor: Tensor, length: int) -> Tensor:
    """(B, T, H, X) → (T / Q, B, H, Q, X), a view."""
    return tensor.unflatten(1, (-1, length)).permute(1, 0, 3, 2, 4)


def product_by_head(left: Tensor, right: Tensor, length: int) -> Tensor:
    """left ∘ right, (B, T, H, X) twice → (T / Q, B, H, Q, X), dense."""
    batch, time, heads, size = left.shape
    result = left.new_empty(time // length, batch, heads, length, size)
    return torch.mul(by_head(left, length), by_head(right, length), out=result)


def times_by_time(left: Tensor, right: Tensor, length: int) -> Tensor:
    """left (T / Q, B, H, Q, X) ∘ right (B, T, H, X) → (B, T, H, X), dense."""
    result = torch.empty(right.shape, dtype=right.dtype, device=right.device)
    torch.mul(left, by_head(right, length), out=by_head(result, length))
    return result


def by_time(tensor: Tensor, scale: float = 1.0) -> Tensor:
    """(T / Q, B, H, Q, X) → scale · (B, T, H, X), dense."""
    count, batch, heads, length, size = tensor.shape
    result = tensor.new_empty(batch, count * length, heads, size)
    torch.mul(tensor, scale, out=by_head(result, length))
    return result


def matrices(tensor: Tensor) -> Tensor:
    """(T / Q, B, H, X, Y) → (T / Q · B · H, X, Y), a view of a dense tensor."""
    return tensor.view(-1, *tensor.shape[-2:])


def set_diagonal(A: Tensor, values: Tensor) -> None:
    """In place: the diagonals of A (T / Q · B · H, Q, Q) become `values` (B, T, H, 1)."""
    by_chunk = by_head(values, A.shape[-1]).squeeze(-1)
    A.view(*by_chunk.shape, A.shape[-1]).diagonal(dim1=-2, dim2=-1).copy_(by_chunk)


def steps(tensor: Tensor, length: int) -> Tensor:
    """(B, T, H, X) → (B · T / Q, Q, H · X), a view of a dense tensor, a copy of another."""
    batch, time, heads, size = tensor.shape
    return tensor.reshape(batch * time // length, length, heads * size)


def over_steps(weights: Tensor, rows: Tensor) -> Tensor:
    """Weighted sums over the steps of each chunk: (X, Q) times (B · T / Q, Q, Y)."""
    return torch.bmm(weights.expand(rows.shape[0], -1, -1), rows)


def ones_to(length: int, diagonal: int, like: Tensor) -> Tensor:
    """(Q, Q): 1 where column ≤ row + `diagonal`, else 0: for each step those before it."""
    return torch.ones(length, length, dtype=like.dtype, device=like.device).tril_(diagonal)


def chunk_decay(log_decay: Tensor, length: int) -> Tensor:
    """The decay over each chunk: (B, T, H, K) → (T / Q, B, H, K, 1)."""
    return torch.exp(log_decay.unflatten(1, (-1, length)).sum(2)).transpose(0, 1).unsqueeze(-1)


def pass_on(states: Tensor, decay: Tensor, initial_state: Tensor | None) -> None:
    """In place: states[c + 1] holds what chunk c adds, and then the state after it; states[0] becomes the initial state.

    Shapes: states (T / Q + 1, B, H, K, V), decay (T / Q, B, H, K, 1), initial_state (B, H, K, V).
    """
    if initial_state is None:
        states[0].zero_()
    else:
        states[0].copy_(initial_state)
    for c in range(0 if initial_state is not None else 1, decay.shape[0]):
        states[c + 1].addcmul_(states[c], decay[c])


def pass_back(dstates: Tensor, decay: Tensor, dfinal: Tensor | None) -> None:
    """In place, the transpose of `pass_on`: dstates[c] holds the gradient from chunk c's own reading, then that of states[c]."""
    if dfinal is None:
        dstates[-1].zero_()
    else:
        dstates[-1].copy_(dfinal)
    for c in range(decay.shape[0] - 1, -1, -1):
        dstates[c].addcmul_(dstates[c + 1], decay[c])
