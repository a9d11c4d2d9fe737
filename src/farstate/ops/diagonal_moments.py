"""Moments of the states of the selective scan (see `state_moments`, `selective_scan`), and its outputs with them.

Every entry has a decay of its own, which leaves nothing to factor: the states of a few steps at a time are formed and reduced
where they lie, two passes more over each. Sums over n have the dtype of the states; a pass about the mean would cost more than it
tells, since the N entries of a channel, with decays of their own, are seldom alike. Shapes as in `selective_scan`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from farstate.ops.precision import compute_dtype, without_autocast
from farstate.ops.scalar_moments import Scan

_STEPS = 16
# Of the states of one step of a tile: two tensors of 16 such steps stay in the cache.
_ENTRIES = 1 << 15


@torch.no_grad()
def diagonal_decay(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    read: Tensor | None = None,
    initial_state: Tensor | None = None,
) -> Scan:
    """Moments of every channel after every step, (B, T, D), without gradients; y = Σ_n h read if `read` (B, T, N) is given."""
    dtype = compute_dtype(x, dt, A, B, read, initial_state)
    x, dt, A, B = (t.to(dtype) for t in (x, dt, A, B))
    C = B if read is None else read.to(dtype)
    (batch, time, width), size = x.shape, A.shape[1]
    sums, squares = (torch.empty(x.shape, dtype=torch.float64, device=x.device) for _ in range(2))
    y = None if read is None else torch.empty_like(x)
    final = x.new_empty(batch, width, size)
    # Time outermost, so that a step is one dense piece; channels innermost, so that sums over n add long vectors.
    A = (A * math.log2(math.e)).t().contiguous()
    with without_autocast(x.device):
        for rows, channels in _tiles(x, size):
            A_tile = A[:, channels]
            state = x.new_zeros(rows.stop - rows.start, size, A_tile.shape[1])
            if initial_state is not None:
                state.copy_(initial_state[rows, channels].mT)
            work = x.new_empty(2, min(_STEPS, time), *state.shape)
            for start in range(0, time, _STEPS):
                chunk = slice(start, min(start + _STEPS, time))
                here = (rows, chunk, channels)
                decay, states = work[:, : chunk.stop - start]
                dt_here = dt[here].transpose(0, 1).contiguous()
                torch.mul(dt_here.unsqueeze(2), A_tile, out=decay).exp2_()
                torch.mul(
                    (dt_here * x[here].transpose(0, 1)).unsqueeze(2), B[rows, chunk].transpose(0, 1).unsqueeze(3), out=states
                )
                before = state
                for decay_t, state_t in zip(decay.unbind(0), states.unbind(0), strict=True):
                    before = state_t.addcmul_(decay_t, before)
                state.copy_(before)
                if y is not None:
                    vectors = C[rows, chunk].transpose(0, 1).reshape(-1, 1, size)
                    y[here] = torch.bmm(vectors, states.flatten(0, 1)).view(dt_here.shape).transpose(0, 1)
                sums[here] = states.sum(2).transpose(0, 1)
                squares[here] = states.square_().sum(2).transpose(0, 1)
            final[rows, channels] = state.mT
    return Scan(sums, squares, final, y)


def _tiles(x: Tensor, state_size: int) -> Iterator[tuple[slice, slice]]:
    """Rows and channels, all independent of each other, that run together; a GPU takes them all."""
    batch, _, width = x.shape
    channels = rows = max(batch, width)
    if x.device.type == "cpu":
        channels = min(width, max(1, _ENTRIES // state_size))
        rows = max(1, _ENTRIES // (channels * state_size))
    for row in range(0, batch, rows):
        for channel in range(0, width, channels):
            yield slice(row, min(row + rows, batch)), slice(channel, min(channel + channels, width))
