"""Moments of the states of the selective scan (see `state_moments`, `selective_scan`), and its outputs with them.

Every entry has a decay of its own, which leaves nothing to factor: the states of a few steps at a time are formed and reduced
where they lie. One product reads them with C and sums them, one more sums their squares. Shapes as in `selective_scan`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farstate.ops.precision import compute_dtype, without_autocast
from farstate.ops.scalar_moments import Scan
from farstate.ops.selective_scan import _tiles

_STEPS = 16


@torch.no_grad()
def selective_scan(
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
    (batch, time, width), size = x.shape, A.shape[1]
    ones = B.new_ones(batch, time, 1, size)
    reads = ones if read is None else torch.cat([read.to(dtype).unsqueeze(2), ones], dim=2)
    found = x.new_empty(batch, time, reads.shape[2] + 1, width)
    final = x.new_empty(batch, width, size)
    with without_autocast(x.device):
        for rows, channels in _tiles(x, size):
            At = A[channels].t().contiguous()
            state = x.new_zeros(rows.stop - rows.start, size, channels.stop - channels.start)
            if initial_state is not None:
                state.copy_(initial_state[rows, channels].mT)
            for start in range(0, time, _STEPS):
                here = (rows, slice(start, min(start + _STEPS, time)), channels)
                # (b, steps, N, channels), as selective_scan lays it out.
                decay = torch.mul(dt[here].unsqueeze(2), At).exp_()
                states = torch.mul((dt[here] * x[here]).unsqueeze(2), B[here[:2]].unsqueeze(3))
                for i in range(states.shape[1]):
                    states[:, i].addcmul_(decay[:, i], state)
                    state = states[:, i]
                state = state.clone()
                found[rows, here[1], :-1, channels] = torch.matmul(reads[here[:2]], states)
                found[rows, here[1], -1:, channels] = torch.matmul(ones[here[:2]], states.square_())
            final[rows, channels] = state.mT
    return Scan(found[:, :, -2], found[:, :, -1], final, None if read is None else found[:, :, 0])
