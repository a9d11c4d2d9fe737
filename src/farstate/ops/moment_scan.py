"""The scalar recurrences behind the moments of a state, chunk by chunk, in float64: they are few and sum over all of time.

    r_t = exp(p g_t) r_{t−1} + w_t           p = 1 for the sum of the entries, 2 for their squares

At the beginning of some chunks r is known from the state that enters.
"""

from __future__ import annotations

import torch
from torch import Tensor

ANCHOR_STEPS = 128
"""About how many steps apart r starts anew from the state itself: what rounding has moved it by ends there."""

SMALLEST_LOG_DECAY = -1e3
"""Of one step: less is 0 all the same, but the difference of two infinities is no number."""

# Twice it is still the exponent of a float64.
_SMALLEST_EXPONENT = -300.0


def anchored_chunks(count: int, length: int) -> range:
    """The chunks at whose beginning the state is looked at."""
    return range(0, count, max(1, ANCHOR_STEPS // length))


def scan(s: Tensor, w: Tensor, anchors: Tensor) -> Tensor:
    """r of both, (2, chunks, B, Q, H), float64.

    Args:
        s: (chunks, B, Q, H), the log decays summed from the start of the chunk, float64.
        w: (2, chunks, B, Q, H).
        anchors: (2, len(anchored_chunks), B, H), what enters those chunks.
    """
    count, _, length, _ = s.shape
    local, anchors = w.double(), anchors.double()
    if s[:, :, -1].amin() > _SMALLEST_EXPONENT:
        e, f = torch.exp(s), torch.exp(-s)
        e, f = torch.stack([e, e.square()]), torch.stack([f, f.square()])
        local = local.mul_(f).cumsum(3).mul_(e)
    else:
        e = torch.exp(torch.stack([s, 2.0 * s]))
        steps = torch.exp(torch.diff(torch.stack([s, 2.0 * s]), dim=3))
        for i in range(1, length):
            local[:, :, :, i].addcmul_(steps[:, :, :, i - 1], local[:, :, :, i - 1])
    entering = torch.empty_like(local[:, :, :, 0])
    known = {chunk: number for number, chunk in enumerate(anchored_chunks(count, length))}
    for c in range(count):
        if c in known:
            entering[:, c] = anchors[:, known[c]]
        else:
            torch.addcmul(local[:, c - 1, :, -1], e[:, c - 1, :, -1], entering[:, c - 1], out=entering[:, c])
    local.addcmul_(e, entering.unsqueeze(3))
    local[1].clamp_(min=0.0)
    return local


def reduced(states: list[Tensor]) -> Tensor:
    """Σ of the entries and of their squares, over the last two dimensions of (B, H, P, N) each: (2, states, B, H), float64."""
    return torch.stack([moments(state.flatten(2)) for state in states], dim=1)


def moments(entries: Tensor) -> Tensor:
    """Σ of the n entries h and of their squares, over the last dimension: (2, ...), float64.

    With m the mean as it is rounded and d = h − m: n m + Σ d and n m² + 2 m Σ d + Σ d². So the variance, in which the two cancel,
    keeps its digits.
    """
    count, mean = entries.shape[-1], entries.mean(-1, keepdim=True)
    apart = entries - mean
    mean = mean.squeeze(-1).double()
    sums = torch.add(apart.sum(-1), mean, alpha=count)
    squares = torch.linalg.vector_norm(apart, dim=-1).double().square_()
    # n m² + 2 m Σ d = m (2 (n m + Σ d) − n m).
    return torch.stack([sums, squares.addcmul_(mean, 2.0 * sums - count * mean)])
