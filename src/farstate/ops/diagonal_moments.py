"""Moments of the states of the selective scan (see `state_moments`, `selective_scan`), and its outputs with them.

Every entry has a decay of its own, which leaves nothing to factor: the states of a few steps at a time are formed and reduced
where they lie, two passes more over each. Shapes as in `selective_scan`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farstate.ops import selective_scan
from farstate.ops.precision import compute_dtype, without_autocast
from farstate.ops.scalar_moments import Scan


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
    sums, squares = (torch.empty(x.shape, dtype=dtype, device=x.device) for _ in range(2))
    y = None if read is None else torch.empty_like(sums)
    final = x.new_empty(batch, width, size)
    length = selective_scan._chunk_length(x, size)
    with without_autocast(x.device):
        work = selective_scan._work(x, size, length, 2)
        for rows, channels in selective_scan._tiles(x, size):
            part = (rows, slice(None), channels)
            tile = selective_scan._Tile(x[part], dt[part], A[channels], B[rows], C[rows], length, work)
            state = tile.state(None if initial_state is None else initial_state[rows, channels])
            for start in range(0, time, length):
                chunk = slice(start, min(start + length, time))
                steps = tile.run(chunk, state)[0].shape[0]
                states = tile.buffers[1][:steps]
                here = (rows, chunk, channels)
                if y is not None:
                    y[here] = selective_scan._over_states(tile.C[chunk], states).transpose(0, 1)
                sums[here] = states.sum(2).transpose(0, 1)
                state.copy_(states[-1])
                squares[here] = states.square_().sum(2).transpose(0, 1)
            final[rows, channels] = state.mT
    return Scan(sums, squares, final, y)
