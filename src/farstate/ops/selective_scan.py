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

import math
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
    _check_scan(x, dt, A, B, C, D, initial_state)
    dtype = compute_dtype(x, dt, A, B, C, D, initial_state)
    out_dtype = x.dtype
    x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
    state = x.new_zeros(x.shape[0], *A.shape) if initial_state is None else initial_state.to(dtype)
    outputs = []
    # `unbind`: the gradient of an index into time would be a tensor over all of time, for every step.
    for x_t, dt_t, B_t, C_t in zip(*(t.unbind(1) for t in (x, dt, B, C)), strict=True):
        decay = torch.exp(dt_t[..., None] * A)
        state = decay * state + (dt_t * x_t)[..., None] * B_t[:, None, :]
        outputs.append((state * C_t[:, None, :]).sum(-1))
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
        chunk_length: Q; None takes between 16 and 32, so that the states of a chunk stay in the cache.

    Raises:
        ValueError: shapes that do not fit each other, or a chunk length below 1.
    """
    _check_scan(x, dt, A, B, C, D, initial_state)
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1, found {chunk_length}")
    if len(x) == 0:
        return naive(x, dt, A, B, C, D, initial_state)
    dtype = compute_dtype(x, dt, A, B, C, D, initial_state)
    out_dtype = x.dtype
    inputs = [None if t is None else t.to(dtype) for t in (x, dt, A, B, C, D, initial_state)]
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    length = min(x.shape[1], _chunk_length(x, A.shape[1]) if chunk_length is None else chunk_length)
    y, final_state = _SelectiveScan.apply(*inputs, length, differentiable)
    return y.to(out_dtype), final_state


def naive_increment(dt: Tensor, A: Tensor, C: Tensor, initial_state: Tensor) -> Tensor:
    """What `initial_state` adds to y: Δ_t = Σ_n C_t exp(A Σ_{k≤t} dt_k) h_{−1}, (B, T, D), in the dtype computed in.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    _check_increment(dt, A, C, initial_state)
    dtype = compute_dtype(dt, A, C, initial_state)
    dt, A, C, state = (t.to(dtype) for t in (dt, A, C, initial_state))
    outputs = []
    for dt_t, C_t in zip(dt.unbind(1), C.unbind(1), strict=True):
        state = torch.exp(dt_t[..., None] * A) * state
        outputs.append((state * C_t[:, None, :]).sum(-1))
    return torch.stack(outputs, dim=1)


def _check_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None) -> None:
    """Raise ValueError unless the shapes are those of the module."""
    batch, time, width, state_size = _sizes("x", x, A)
    _check(
        dt=(dt, (batch, time, width)),
        A=(A, (width, state_size)),
        B=(B, (batch, time, state_size)),
        C=(C, (batch, time, state_size)),
        D=(D, (width,)),
        initial_state=(initial_state, (batch, width, state_size)),
    )


def _check_increment(dt: Tensor, A: Tensor, C: Tensor, initial_state: Tensor) -> None:
    """Raise ValueError unless the shapes are those of the module."""
    batch, time, width, state_size = _sizes("dt", dt, A)
    _check(
        A=(A, (width, state_size)),
        C=(C, (batch, time, state_size)),
        initial_state=(initial_state, (batch, width, state_size)),
    )


def _sizes(name: str, leading: Tensor, A: Tensor) -> tuple[int, int, int, int]:
    if leading.dim() != 3 or A.dim() != 2 or leading.shape[1] < 1:
        raise ValueError(
            f"{name} must be (B, T, D) with T ≥ 1 and A must be (D, N), found {tuple(leading.shape)} and {tuple(A.shape)}"
        )
    return (*leading.shape, A.shape[1])


def _check(**expected: tuple[Tensor | None, tuple[int, ...]]) -> None:
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, found {tuple(tensor.shape)}")


# At most so many entries in one step of a tile and in a chunk: enough that the work of a step outweighs its call, few enough
# that the three tensors which the backward pass works on stay in the cache.
_STEP_ENTRIES, _CHUNK_ENTRIES = 1 << 15, 1 << 19


def _tile_size(x: Tensor, state_size: int) -> tuple[int, int]:
    """How many rows and channels, all independent of each other, run together; a GPU takes them all."""
    batch, _, width = x.shape
    if x.device.type != "cpu":
        return batch, width
    # At most half of all, or the working memory of a single sequence would outweigh what is kept of it.
    entries = min(_STEP_ENTRIES, -(-batch * width // 2) * state_size)
    channels = _part(width, entries // state_size)
    return _part(batch, entries // (channels * state_size)), channels


def _chunk_length(x: Tensor, state_size: int) -> int:
    rows, channels = _tile_size(x, state_size)
    return min(32, max(16, _CHUNK_ENTRIES // (rows * channels * state_size)))


def _work(x: Tensor, state_size: int, length: int, count: int) -> list[Tensor]:
    """Memory for `count` tensors of a chunk, which all tiles use in turn."""
    rows, channels = _tile_size(x, state_size)
    return [x.new_empty(length * rows * channels * state_size) for _ in range(count)]


def _tiles(x: Tensor, state_size: int) -> Iterator[tuple[slice, slice]]:
    rows, channels = _tile_size(x, state_size)
    for row in range(0, x.shape[0], rows):
        for channel in range(0, x.shape[2], channels):
            yield slice(row, row + rows), slice(channel, channel + channels)


def _part(total: int, limit: int) -> int:
    """The size of equal parts of at most `limit`: a narrow last one would cost as many calls as a wide one."""
    return -(-total // -(-total // max(1, limit)))


class _Tile:
    """The inputs of b rows and d channels, and the tensors of a chunk of q steps, each (q, b, N, d).

    Time is outermost, so that a step is one dense piece; d is innermost, so that sums over n add long vectors.
    """

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, length: int, work: list[Tensor]) -> None:
        self.x, self.dt, self.B, self.C = (t.transpose(0, 1) for t in (x, dt, B, C))
        self.A = A.t().contiguous()
        # exp2 takes half the time of exp; the factor is rounded once, like A itself.
        self.A_log2 = self.A * math.log2(math.e)
        self.time, self.rows, self.channels = self.x.shape
        self.state_size = A.shape[1]
        shape = (length, self.rows, self.state_size, self.channels)
        self.buffers = [memory[: math.prod(shape)].view(shape) for memory in work]
        self.steps = [buffer.unbind(0) for buffer in self.buffers]
        # Kept too: fresh memory is far slower than what is in the cache, and these are too large for the allocator to keep.
        self.vectors = x.new_empty(5, length, self.rows, self.channels)

    def state(self, value: Tensor | None) -> Tensor:
        """A copy of `value`, (b, d, N), as (b, N, d), or zeros."""
        state = self.x.new_zeros(self.rows, self.state_size, self.channels)
        return state if value is None else state.copy_(value.mT)

    def run(self, chunk: slice, before: Tensor) -> tuple[Tensor, Tensor]:
        """Fill the first two buffers with the decays and the states of a chunk, from the state `before` it.

        Returns dt and dt x, (q, b, d), dense.
        """
        dt, u = self.vectors[:2, : chunk.stop - chunk.start]
        torch.mul(dt.copy_(self.dt[chunk]), self.x[chunk], out=u)
        decay, states = (buffer[: dt.shape[0]] for buffer in self.buffers[:2])
        torch.mul(dt.unsqueeze(2), self.A_log2, out=decay)
        torch.exp2(decay, out=decay)
        torch.mul(u.unsqueeze(2), self.B[chunk].unsqueeze(3), out=states)
        for decay_t, state in zip(self.steps[0][: dt.shape[0]], self.steps[1], strict=False):
            state.addcmul_(decay_t, before)
            before = state
        return dt, u


def _over_states(coefficients: Tensor, states: Tensor, out: Tensor) -> Tensor:
    """Σ_n coefficients[n] states[n, d]: (q, b, N), (q, b, N, d) → `out`, (q, b, d), dense."""
    rows = out.view(-1, 1, out.shape[2])
    torch.bmm(coefficients.reshape(-1, 1, states.shape[2]), states.flatten(0, 1), out=rows)
    return out


def _over_channels(vectors: Tensor, states: Tensor) -> Tensor:
    """Σ_d vectors[d] states[n, d]: (q, b, d), dense, (q, b, N, d) → (q, b, N)."""
    # The vector on the left: on the right the same product takes ten times as long.
    return torch.bmm(vectors.view(-1, 1, states.shape[3]), states.flatten(0, 1).mT).view(*states.shape[:2], -1)


class _SelectiveScan(torch.autograd.Function):
    """Backward written by hand; `entering` holds the states before each chunk, (T / Q, B, N, D)."""

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
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        final = x.new_empty(batch, width, state_size)
        entering = x.new_empty(-(-time // length), batch, state_size, width) if differentiable else None
        with without_autocast(x.device):
            work = _work(x, state_size, length, 2)
            for rows, channels in _tiles(x, state_size):
                part = (rows, slice(None), channels)
                tile = _Tile(x[part], dt[part], A[channels], B[rows], C[rows], length, work)
                state = tile.state(None if initial_state is None else initial_state[rows, channels])
                for number, chunk in enumerate(_chunks(time, length)):
                    if entering is not None:
                        entering[number, rows, :, channels] = state
                    steps = tile.run(chunk, state)[0].shape[0]
                    states = tile.buffers[1][:steps]
                    y_c = _over_states(tile.C[chunk], states, tile.vectors[2, :steps])
                    y[rows, chunk, channels] = y_c.transpose(0, 1)
                    state.copy_(states[-1])
                final[rows, channels] = state.mT
            if D is not None:
                y.addcmul_(x, D)
        ctx.save_for_backward(x, dt, A, B, C, D, entering)
        ctx.length = length
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, entering = ctx.saved_tensors
        if dy is None and dfinal is None:
            return (None,) * 9
        dy = torch.zeros_like(x) if dy is None else dy
        (batch, time, width), state_size = x.shape, A.shape[1]
        dx, ddt = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        dB, dC = (x.new_zeros(time, batch, state_size) for _ in range(2))
        dA = x.new_zeros(state_size, width)
        dD = None if D is None else torch.zeros_like(D)
        dinitial = x.new_empty(batch, width, state_size) if ctx.needs_input_grad[6] else None
        with without_autocast(x.device):
            work = _work(x, state_size, ctx.length, 3)
            for rows, channels in _tiles(x, state_size):
                part = (rows, slice(None), channels)
                tile = _Tile(x[part], dt[part], A[channels], B[rows], C[rows], ctx.length, work)
                # Gradient of the state that leaves the chunk, of all that reads it after the chunk.
                dstate = tile.state(None if dfinal is None else dfinal[rows, channels])
                for number, chunk in reversed(list(enumerate(_chunks(time, ctx.length)))):
                    here = (rows, chunk, channels)
                    before = entering[number, rows, :, channels]
                    dt_c, u = tile.run(chunk, before)
                    decay, states, dstates = (buffer[: dt_c.shape[0]] for buffer in tile.buffers)
                    x_c = tile.x[chunk]
                    dy_c, du, other = tile.vectors[2:, : dt_c.shape[0]]
                    dy_c.copy_(dy[here].transpose(0, 1))
                    dC[chunk, rows] += _over_channels(dy_c, states)

                    # 1. h_t is read by y_t, and by h_{t+1}.
                    torch.mul(dy_c.unsqueeze(2), tile.C[chunk].unsqueeze(3), out=dstates)
                    dstates[-1] += dstate
                    backwards = range(dt_c.shape[0] - 1, 0, -1)
                    decay_at, dstate_at = tile.steps[0], tile.steps[2]
                    for t in backwards:
                        dstate_at[t - 1].addcmul_(decay_at[t], dstate_at[t])
                    torch.mul(decay[0], dstates[0], out=dstate)

                    # 2. Increments u ⊗ B with u = dt x.
                    dB[chunk, rows] += _over_channels(u, dstates)
                    _over_states(tile.B[chunk], dstates, du)
                    dx_c = torch.mul(du, dt_c, out=other)
                    if D is not None:
                        dx_c.addcmul_(dy_c, D[channels])
                    dx[here] = dx_c.transpose(0, 1)
                    if dD is not None:
                        dD[channels] += torch.mul(dy_c, x_c, out=other).sum((0, 1))

                    # 3. ∂/∂(dt A)_t = dh_t · decay_t · h_{t−1}, in the place of the decays; it sums over n to the gradient of dt,
                    #    over time and rows to that of A.
                    decay *= dstates
                    decay[1:] *= states[:-1]
                    decay[0] *= before
                    torch.mul(decay, tile.A, out=states)
                    ddt[here] = torch.sum(states, dim=2, out=other).addcmul_(du, x_c).transpose(0, 1)
                    decay *= dt_c.unsqueeze(2)
                    dA[:, channels] += decay.sum((0, 1))
                if dinitial is not None:
                    dinitial[rows, channels] = dstate.mT
        return dx, ddt, dA.t(), dB.transpose(0, 1), dC.transpose(0, 1), dD, dinitial, None, None


def _chunks(time: int, length: int) -> Iterator[slice]:
    for start in range(0, time, length):
        yield slice(start, min(start + length, time))
