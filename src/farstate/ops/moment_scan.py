"""The scalar recurrences behind the moments of a state, chunk by chunk, in float64: they are few and sum over all of time.

    r_t = exp(p g_t) r_{t−1} + w_t           p = 1 for the sum of the entries, 2 for their squares

g (chunks, B, Q, H), the log decays; w of the same shape. At the first step of some chunks r is known from the state that enters.
"""

from __future__ import annotations

import torch
from torch import Tensor

ANCHOR_STEPS = 256
"""About how many steps apart r starts anew from the state itself: what rounding has moved it by ends there."""

_LARGEST_EXPONENT = 300.0


def anchored_chunks(count: int, length: int) -> range:
    """The chunks at whose beginning the state is looked at."""
    return range(0, count, max(1, ANCHOR_STEPS // length))


def scan(g: Tensor, w: Tensor, power: int, anchors: Tensor) -> Tensor:
    """r, (chunks, B, Q, H), float64; `anchors` (len(anchored_chunks), B, H) are the values that enter those chunks."""
    count, _, length, _ = g.shape
    g, w, anchors = power * g.double(), w.double(), anchors.double()
    s = g.cumsum(2)
    within = torch.exp(s)
    if s[:, :, -1].amin() > -_LARGEST_EXPONENT:
        local = (torch.exp(-s) * w).cumsum(2) * within
    else:
        decay, local = torch.exp(g), w.clone()
        for i in range(1, length):
            local[:, :, i].addcmul_(decay[:, :, i], local[:, :, i - 1])
    entering = torch.empty_like(local[:, :, 0])
    known = {chunk: number for number, chunk in enumerate(anchored_chunks(count, length))}
    for c in range(count):
        if c in known:
            entering[c] = anchors[known[c]]
        else:
            torch.addcmul(local[c - 1, :, -1], within[c - 1, :, -1], entering[c - 1], out=entering[c])
    return local.addcmul_(within, entering.unsqueeze(2))


def reduced(states: Tensor) -> tuple[Tensor, Tensor]:
    """Σ of the entries and of their squares, over the last two dimensions."""
    return states.sum((-2, -1)), torch.linalg.vector_norm(states, dim=(-2, -1)).double().square()
