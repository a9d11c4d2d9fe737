"""Moments of a state that holds the last inputs (a convolution's columns, a token shift), after every step.

    state_t = (x_{t−n+1}, …, x_t)      Σ state_t = Σ_{j<n} Σ x_{t−j}      ‖state_t‖² = Σ_{j<n} ‖x_{t−j}‖²

Each input is reduced once; the rest are sums of n numbers, so that an input that is not finite is in n of them and no more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farstate.ops.slices import row_slices


@torch.no_grad()
def window(x: Tensor, past: Tensor | None, inputs: int) -> tuple[Tensor, Tensor]:
    """Σ of the entries and of their squares, float64, (B, T).

    Args:
        x: (B, T, C).
        past: the state before the segment, (B, C, n), oldest first, or None for zero.
        inputs: n ≥ 1.
    """
    before = x.new_zeros(x.shape[0], inputs, x.shape[2]) if past is None else past.transpose(1, 2)
    moments = torch.cat([_reduced(before), _reduced(x)], dim=2)
    sums, squares = moments.unfold(2, inputs, 1)[:, :, 1:].sum(-1)
    return sums, squares


def _reduced(x: Tensor) -> Tensor:
    """(B, T, C) → Σ and Σ of squares over C, (2, B, T)."""
    found = x.new_empty(2, *x.shape[:2], dtype=torch.float64)
    for rows in row_slices(x):
        wide = x[rows].double()
        found[0, rows] = wide.sum(-1)
        found[1, rows] = wide.square().sum(-1)
    return found
