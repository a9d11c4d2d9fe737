"""Causal depthwise convolution over time that carries its last inputs from segment to segment.

    y[t, c] = activation( bias[c] + Σ_k weight[c, k] · x[t − (width − 1) + k, c] )

Inputs before the segment come from `initial_state`, (B, C, width − 1), oldest first; None is zero. Both functions return
the same kind of state after the segment. A segment shorter than width − 1 shifts the old columns along.
Shapes: x (B, T, C), weight (C, width), bias (C,) or None → y (B, T, C) in the dtype of x, final state in the dtype
computed in (float32, or float64 if an input is).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops import state_moments
from farstate.ops.precision import compute_dtype
from farstate.ops.slices import row_slices

Activation = Literal["silu"] | None


def naive(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None = None, activation: Activation = "silu"
) -> tuple[Tensor, Tensor]:
    """The definition, one output at a time. Shapes: see the module."""
    _check(x, weight, bias, initial_state, activation)
    dtype = compute_dtype(x, weight, bias, initial_state)
    width = weight.shape[1]
    past = x.new_zeros(x.shape[0], x.shape[2], width - 1) if initial_state is None else initial_state
    columns = torch.cat([past.to(dtype), x.to(dtype).transpose(1, 2)], dim=-1)
    outputs = []
    for t in range(x.shape[1]):
        value = (columns[..., t : t + width] * weight.to(dtype)).sum(-1)
        value = value if bias is None else value + bias.to(dtype)
        outputs.append(F.silu(value) if activation == "silu" else value)
    return torch.stack(outputs, dim=1).to(x.dtype), columns[..., x.shape[1] :]


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None = None, activation: Activation = "silu"
) -> tuple[Tensor, Tensor]:
    """The same as `naive`, a handful of passes over x as it lies in memory. Shapes: see the module.

    First derivatives of both outputs with respect to all inputs.

    Raises:
        ValueError: shapes that do not fit each other, or an unknown activation.
    """
    _check(x, weight, bias, initial_state, activation)
    dtype = compute_dtype(x, weight, bias, initial_state)
    out_dtype = x.dtype
    width, time = weight.shape[1], x.shape[1]
    x, weight = x.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    initial_state = None if initial_state is None else initial_state.to(dtype)
    y = _CausalConvolution.apply(x, weight, bias, initial_state, activation == "silu")
    kept = x[:, max(0, time - (width - 1)) :].transpose(1, 2)
    if time < width - 1:
        past = x.new_zeros(x.shape[0], x.shape[2], width - 1) if initial_state is None else initial_state
        kept = torch.cat([past[..., time:], kept], dim=-1)
    else:
        # A copy: the state outlives the segment and must not keep its activations alive.
        kept = kept.clone(memory_format=torch.contiguous_format)
    state_moments.observe_inputs(x, initial_state, kept)
    return y.to(out_dtype), kept


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, activation: str | None) -> None:
    if x.dim() != 3 or weight.dim() != 2 or x.shape[1] < 1 or weight.shape[1] < 1:
        raise ValueError(
            f"x must be (B, T, C) with T ≥ 1 and weight (C, width), found {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    batch, _, channels = x.shape
    if weight.shape[0] != channels or (bias is not None and tuple(bias.shape) != (channels,)):
        raise ValueError(
            f"weight and bias must have {channels} channels, found {tuple(weight.shape)} and {bias if bias is None else tuple(bias.shape)}"
        )
    expected = (batch, channels, weight.shape[1] - 1)
    if initial_state is not None and tuple(initial_state.shape) != expected:
        raise ValueError(f"initial_state must have shape {expected}, found {tuple(initial_state.shape)}")
    if activation not in ("silu", None):
        raise ValueError(f"activation must be 'silu' or None, found {activation!r}")


class _CausalConvolution(torch.autograd.Function):
    """Channels stay innermost, as the projection before and the recurrence after have them: no transposed copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, silu: bool) -> Tensor:
        taps = weight.t().contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sigmoid = torch.empty_like(y) if silu else None
        for rows in row_slices(x):
            value = y[rows]
            _convolve(x[rows], taps, bias, None if past is None else past[rows], value)
            if sigmoid is not None:
                value *= torch.sigmoid(value, out=sigmoid[rows])
        ctx.save_for_backward(x, taps, past, sigmoid, y if silu else None)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, taps, past, sigmoid, y = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dtaps = torch.zeros_like(taps)
        dbias = torch.zeros_like(taps[0]) if ctx.has_bias else None
        dpast = None if past is None or not ctx.needs_input_grad[3] else torch.zeros_like(past)
        for rows in row_slices(x):
            dvalue = dy[rows]
            if sigmoid is not None:
                # d silu(v) / dv = σ + y (1 − σ) with y = v σ: no second exponential.
                dvalue = torch.add(sigmoid[rows], y[rows]).addcmul_(y[rows], sigmoid[rows], value=-1.0).mul_(dvalue)
            if dbias is not None:
                dbias += dvalue.sum((0, 1))
            _convolve_backward(
                dvalue,
                x[rows],
                taps,
                None if past is None else past[rows],
                dx[rows],
                dtaps,
                None if dpast is None else dpast[rows],
            )
        return dx, dtaps.t(), dbias, dpast, None


def _convolve(x: Tensor, taps: Tensor, bias: Tensor | None, past: Tensor | None, out: Tensor) -> None:
    """Write Σ_lag taps[−1 − lag] · x[t − lag] + bias to `out`; x, out (B, T, C), taps (width, C), past (B, C, width − 1)."""
    width, time = taps.shape[0], x.shape[1]
    if bias is None:
        torch.mul(x, taps[-1], out=out)
    else:
        torch.addcmul(bias, x, taps[-1], out=out)
    for lag in range(1, width):
        if lag < time:
            out[:, lag:].addcmul_(x[:, : time - lag], taps[-1 - lag])
        if past is not None:
            reach, start = min(lag, time), width - 1 - lag
            out[:, :reach].addcmul_(past[..., start : start + reach].transpose(1, 2), taps[-1 - lag])


def _convolve_backward(
    dout: Tensor, x: Tensor, taps: Tensor, past: Tensor | None, dx: Tensor, dtaps: Tensor, dpast: Tensor | None
) -> None:
    """Write the gradient of x to `dx` and add those of taps and past to theirs; shapes as in `_convolve`."""
    width, (batch, time, channels) = taps.shape[0], x.shape
    torch.mul(dout, taps[-1], out=dx)
    product = torch.mul(dout, x)
    dtaps[-1] += product.sum((0, 1))
    for lag in range(1, width):
        tap, total = taps[-1 - lag], dtaps[-1 - lag]
        if lag < time:
            dx[:, : time - lag].addcmul_(dout[:, lag:], tap)
            # Packed densely into the same memory: the sum over a strided tensor takes several times as long.
            packed = product.view(-1)[: batch * (time - lag) * channels].view(batch, time - lag, channels)
            total += torch.mul(dout[:, lag:], x[:, : time - lag], out=packed).sum((0, 1))
        if past is not None:
            reach, start = min(lag, time), width - 1 - lag
            early, before = dout[:, :reach], past[..., start : start + reach].transpose(1, 2)
            total += (early * before).sum((0, 1))
            if dpast is not None:
                dpast[..., start : start + reach] += (early * tap).transpose(1, 2)
