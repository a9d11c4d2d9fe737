"""The selective scan, the recurrence of Mamba-1 (Gu and Dao 2023, arXiv 2312.00752, Algorithm 2).

Every channel d keeps N state entries h (D × N in all), each with a decay of its own:

    h_t[d, n] = exp(dt_t[d] A[d, n]) h_{t−1}[d, n] + dt_t[d] x_t[d] B_t[n]
    y_t[d]    = Σ_n h_t[d, n] C_t[n] + D[d] x_t[d]

`naive` is this definition, one step at a time. `chunked` computes the same in tiles that stay in the cache and keeps states at
the ends of chunks only. Decays that differ in d and n leave no common matrix to multiply by, so both are sequential.
Shapes for both:

    x, dt (B, T, D), dt after softplus · A (D, N), negative · B, C (B, T, N)
    D (D,) or None · initial_state (B, D, N) or None (zero) → y (B, T, D), final_state (B, D, N)

Both compute in float32, or float64 if an input is; y has the dtype of x, the final state the dtype computed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops.precision import compute_dtype, without_autocast


def naive(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, sequential in time. Shapes: see the module.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    check_shapes(x, dt, A, B, C, D, initial_state)
    dtype = compute_dtype(x, dt, A, B, C, D, initial_state)
    out_dtype = x.dtype
    x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
    state = x.new_zeros(x.shape[0], *A.shape) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * A)
        state = decay * state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None, :]
        outputs.append((state * C[:, t, None, :]).sum(-1))
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + D.to(dtype) * x
    return y.to(out_dtype), state


def chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `naive`, in memory of T / Q states instead of several T. Shapes: see the module.

    First derivatives of both outputs with respect to all inputs. The backward pass computes the states within a chunk again
    from the one that entered it. Nothing but dt A is exponentiated, so that decays of any strength are safe, in any mixture.

    Args:
        chunk_length: Q; None takes 16.

    Raises:
        ValueError: shapes that do not fit each other, or a chunk length below 1.
    """
    check_shapes(x, dt, A, B, C, D, initial_state)
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1, found {chunk_length}")
    dtype = compute_dtype(x, dt, A, B, C, D, initial_state)
    out_dtype = x.dtype
    inputs = [None if t is None else t.to(dtype) for t in (x, dt, A, B, C, D, initial_state)]
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    length = min(x.shape[1], _CHUNK_LENGTH if chunk_length is None else chunk_length)
    y, final_state = _SelectiveScan.apply(*inputs, length, differentiable)
    return y.to(out_dtype), final_state


def check_shapes(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None) -> None:
    """Raise ValueError unless the shapes are those of the module."""
    if x.dim() != 3 or A.dim() != 2 or x.shape[1] < 1:
        raise ValueError(f"x must be (B, T, D) with T ≥ 1 and A must be (D, N), found {tuple(x.shape)} and {tuple(A.shape)}")
    (batch, time, width), state_size = x.shape, A.shape[1]
    expected = {
        "dt": (dt, (batch, time, width)),
        "A": (A, (width, state_size)),
        "B": (B, (batch, time, state_size)),
        "C": (C, (batch, time, state_size)),
        "D": (D, (width,)),
        "initial_state": (initial_state, (batch, width, state_size)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, found {tuple(tensor.shape)}")


_CHUNK_LENGTH = 16
# Entries of one step of a tile. A tile of 16 such steps in float32 is 1 MB, and the backward pass works on three.
_STEP = 1 << 14


def _tiles(x: Tensor, state_size: int) -> Iterator[tuple[slice, slice]]:
    """Rows and channels, independent of each other, whose states fit in the cache together; a GPU gets them all."""
    batch, _, width = x.shape
    if x.device.type != "cpu":
        yield slice(0, batch), slice(0, width)
        return
    # Parts of equal size: a narrow last one would cost as many calls as a wide one.
    channels = _part(width, max(1, _STEP // state_size))
    rows = _part(batch, max(1, _STEP // (channels * state_size)))
    for first_row in range(0, batch, rows):
        for first in range(0, width, channels):
            yield slice(first_row, min(first_row + rows, batch)), slice(first, min(first + channels, width))


def _part(total: int, limit: int) -> int:
    count = -(-total // limit)
    return -(-total // count)


class _SelectiveScan(torch.autograd.Function):
    """Backward by hand. Work is laid out (rows, steps, N, channels): sums over n then add long contiguous vectors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial_state: Tensor | None,
        length: int,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        (batch, time, width), state_size = x.shape, A.shape[1]
        count = -(-time // length)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        final = x.new_empty(batch, state_size, width)
        entering = x.new_empty(count, batch, state_size, width) if differentiable else None
        with without_autocast(x.device):
            for rows, channels in _tiles(x, state_size):
                At = A[channels].t().contiguous()
                tile = _Tile(x[rows, :, channels], state_size, length, 2)
                state = tile.state(None if initial_state is None else initial_state[rows, channels])
                for c in range(count):
                    steps = slice(c * length, min((c + 1) * length, time))
                    here = (rows, steps, channels)
                    if entering is not None:
                        entering[c, rows, :, channels] = state
                    decay, states = tile.work(steps)
                    _run(x[here], dt[here], At, B[rows, steps], state, decay, states)
                    y[here] = torch.matmul(C[rows, steps].unsqueeze(2), states).squeeze(2)
                    state.copy_(states[:, -1])
                final[rows, :, channels] = state
            if D is not None:
                y.addcmul_(x, D)
        ctx.save_for_backward(x, dt, A, B, C, D, initial_state, entering)
        ctx.length = length
        ctx.set_materialize_grads(False)
        return y, final.mT.contiguous()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, initial_state, entering = ctx.saved_tensors
        if dy is None and dfinal is None:
            return (None,) * 9
        length = ctx.length
        time, state_size = x.shape[1], A.shape[1]
        dy = torch.zeros_like(x) if dy is None else dy
        dx, ddt = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        dB, dC = (torch.zeros(B.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        dA = torch.zeros_like(A.t(), memory_format=torch.contiguous_format)
        dinitial = torch.empty_like(initial_state) if ctx.needs_input_grad[6] else None
        with without_autocast(x.device):
            for rows, channels in _tiles(x, state_size):
                At = A[channels].t().contiguous()
                tile = _Tile(x[rows, :, channels], state_size, length, 3)
                # The gradient of the state that leaves the chunk.
                dstate = tile.state(None if dfinal is None else dfinal[rows, channels])
                for c in range(entering.shape[0] - 1, -1, -1):
                    steps = slice(c * length, min((c + 1) * length, time))
                    here = (rows, steps, channels)
                    x_c, dt_c, dy_c, B_c, C_c = x[here], dt[here], dy[here], B[rows, steps], C[rows, steps]
                    decay, states, dstates = tile.work(steps)
                    before = entering[c, rows, :, channels]
                    u = _run(x_c, dt_c, At, B_c, before, decay, states)
                    dC[rows, steps] += torch.matmul(states, dy_c.unsqueeze(3)).squeeze(3)

                    # 1. From the last step to the first: what reads h_t is y_t and h_{t+1}.
                    torch.mul(dy_c.unsqueeze(2), C_c.unsqueeze(3), out=dstates)
                    dstates[:, -1] += dstate
                    for t in range(dstates.shape[1] - 2, -1, -1):
                        dstates[:, t].addcmul_(decay[:, t + 1], dstates[:, t + 1])
                    torch.mul(decay[:, 0], dstates[:, 0], out=dstate)

                    # 2. Increments u ⊗ B with u = dt x.
                    dB[rows, steps] += torch.matmul(dstates, u.unsqueeze(3)).squeeze(3)
                    du = torch.matmul(B_c.unsqueeze(2), dstates).squeeze(2)
                    torch.mul(du, dt_c, out=dx[here])

                    # 3. Log decays: ∂/∂(dt A)_t = dh_t · decay_t · h_{t−1}, in the place of the decays.
                    decay *= dstates
                    decay[:, 1:] *= states[:, :-1]
                    decay[:, 0] *= before
                    torch.mul(decay, At, out=states)
                    torch.sum(states, dim=2, out=dstates[:, :, 0])
                    torch.addcmul(dstates[:, :, 0], du, x_c, out=ddt[here])
                    decay *= dt_c.unsqueeze(2)
                    dA[:, channels] += decay.sum((0, 1))
                if dinitial is not None:
                    dinitial[rows, channels] = dstate.mT
        dD = None
        if D is not None:
            dD = (dy * x).sum((0, 1))
            dx.addcmul_(dy, D)
        return dx, ddt, dA.t(), dB, dC, dD, dinitial, None, None


def _run(x: Tensor, dt: Tensor, At: Tensor, B: Tensor, before: Tensor, decay: Tensor, states: Tensor) -> Tensor:
    """Write the decays and states of a chunk from the state `before` it; return dt x.

    x, dt (b, Q, d), At (N, d), B (b, Q, N), before (b, N, d), decay and states (b, Q, N, d).
    """
    torch.mul(dt.unsqueeze(2), At, out=decay)
    torch.exp(decay, out=decay)
    u = dt * x
    torch.mul(u.unsqueeze(2), B.unsqueeze(3), out=states)
    for t in range(states.shape[1]):
        states[:, t].addcmul_(decay[:, t], before)
        before = states[:, t]
    return u


class _Tile:
    """Memory that the chunks of a tile use one after the other."""

    def __init__(self, x: Tensor, state_size: int, length: int, buffers: int) -> None:
        self.rows, self.channels, self.state_size = x.shape[0], x.shape[2], state_size
        self.buffers = [x.new_empty(self.rows * length * state_size * self.channels) for _ in range(buffers)]

    def work(self, steps: slice) -> list[Tensor]:
        """(b, steps, N, d) each, dense."""
        shape = (self.rows, steps.stop - steps.start, self.state_size, self.channels)
        size = shape[0] * shape[1] * shape[2] * shape[3]
        return [buffer[:size].view(shape) for buffer in self.buffers]

    def state(self, value: Tensor | None) -> Tensor:
        """A copy of `value` (b, d, N) as (b, N, d), or zeros."""
        state = self.buffers[0].new_zeros(self.rows, self.state_size, self.channels)
        return state if value is None else state.copy_(value.mT)
