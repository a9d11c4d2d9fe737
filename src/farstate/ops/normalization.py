"""Root-mean-square norms, plain and gated, computed in float32 (float64 if an input is).

rms_norm(x)          = x / sqrt(mean(x²) + ε) · weight
gated_rms_norm(x, z) = rms_norm(x · silu(z)), the mean taken over each of `groups` equal parts of the last dimension
                       (mamba-ssm's RMSNormGated with norm_before_gate = False)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops.precision import compute_dtype
from farstate.ops.slices import row_slices


def naive_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The definition; x (..., D), weight (D,) → (..., D) in the dtype of `weight`."""
    value = x.to(compute_dtype(x, weight))
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon)).to(weight.dtype) * weight


def naive_gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, groups: int = 1) -> Tensor:
    """The definition; x and z (..., D), weight (D,) → (..., D) in the dtype of x."""
    dtype = compute_dtype(x, z, weight)
    gated = (x.to(dtype) * F.silu(z.to(dtype))).unflatten(-1, (groups, -1))
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + epsilon)
    return (normed.flatten(-2) * weight.to(dtype)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The same as `naive_rms_norm` up to rounding, with a backward pass of its own."""
    dtype = compute_dtype(x, weight)
    result: Tensor = _RMSNorm.apply(x.to(dtype).reshape(-1, x.shape[-1]), weight.to(dtype), epsilon)
    return result.view(x.shape).to(weight.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, groups: int = 1) -> Tensor:
    """The same as `naive_gated_rms_norm`, with a backward pass of its own.

    Raises:
        ValueError: D is not a multiple of `groups`, or the shapes of x and z differ.
    """
    if x.shape != z.shape or x.shape[-1] % groups:
        raise ValueError(f"x {tuple(x.shape)} and z {tuple(z.shape)} must agree and end in a multiple of {groups}")
    dtype = compute_dtype(x, z, weight)
    x_rows, z_rows = (t.to(dtype).flatten(0, -2) for t in (x, z))
    result: Tensor = _GatedRMSNorm.apply(x_rows, z_rows, weight.to(dtype), epsilon, groups)
    return result.view(x.shape).to(x.dtype)


def _inverse_rms(x: Tensor, epsilon: float, groups: int) -> Tensor:
    """(rows, D) → (rows, groups, 1)."""
    parts = x.unflatten(-1, (groups, -1))
    mean_square = torch.linalg.vector_norm(parts, dim=-1, keepdim=True).square_().div_(parts.shape[-1])
    return mean_square.add_(epsilon).rsqrt_()


def _norm_backward(dy: Tensor, normed: Tensor, weight: Tensor, scale: Tensor, dx: Tensor) -> Tensor:
    """For y = normed · weight, normed = x · scale(x): write the gradient of x to `dx`, return that of weight.

    dy, normed, dx (rows, D), scale (rows, groups, 1).
    """
    groups = scale.shape[1]
    torch.mul(dy, normed, out=dx)
    dweight = dx.sum(0)
    # Mean of dy · normed · weight over each group, as one matrix-vector product a group: (groups, rows, 1).
    parts = dx.view(-1, groups, dx.shape[-1] // groups).transpose(0, 1)
    overlap = torch.bmm(parts, weight.view(groups, -1, 1)).div_(parts.shape[-1]).transpose(0, 1)
    torch.mul(dy, weight, out=dx)
    dx.unflatten(-1, (groups, -1)).addcmul_(normed.unflatten(-1, (groups, -1)), overlap, value=-1.0).mul_(scale)
    return dweight


class _RMSNorm(torch.autograd.Function):
    """x (rows, D); the backward pass normalises again rather than keep the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = _inverse_rms(x, epsilon, 1)
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale.squeeze(-1)).mul_(weight)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dweight = torch.zeros_like(weight)
        for rows in row_slices(x):
            normed = x[rows] * scale[rows].squeeze(-1)
            dweight += _norm_backward(dy[rows], normed, weight, scale[rows], dx[rows])
        return dx, dweight, None


class _GatedRMSNorm(torch.autograd.Function):
    """x, z (rows, D); the backward pass gates and normalises again, in the cache, rather than keep three tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, epsilon: float, groups: int) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        scale = x.new_empty(x.shape[0], groups, 1)
        for rows in row_slices(x):
            value = _gate(z[rows], None, y[rows]).mul_(x[rows])
            scale[rows] = _inverse_rms(value, epsilon, groups)
            value.unflatten(-1, (groups, -1)).mul_(scale[rows])
            value *= weight
        ctx.save_for_backward(x, z, weight, scale)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, z, weight, scale = ctx.saved_tensors
        groups = scale.shape[1]
        dx, dz = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
        dweight = torch.zeros_like(weight)
        for rows in row_slices(x):
            sigmoid = torch.empty_like(dz[rows])
            gate = _gate(z[rows], sigmoid, torch.empty_like(sigmoid))
            normed = torch.mul(gate, x[rows])
            normed.unflatten(-1, (groups, -1)).mul_(scale[rows])
            dgated = dx[rows]
            dweight += _norm_backward(dy[rows], normed, weight, scale[rows], dgated)
            # d silu(z) / dz = σ + g (1 − σ) with g = z σ.
            torch.add(sigmoid, gate, out=dz[rows]).addcmul_(gate, sigmoid, value=-1.0).mul_(x[rows]).mul_(dgated)
            dgated *= gate
        return dx, dz, dweight, None, None


def _gate(z: Tensor, sigmoid: Tensor | None, out: Tensor) -> Tensor:
    """Write z · σ(z) to `out`, and σ(z) to `sigmoid` if given; z may be a slice of a wider tensor."""
    # σ of a dense copy: over strided rows it is computed one element at a time.
    target = out if sigmoid is None else sigmoid
    torch.sigmoid(target.copy_(z), out=target)
    return torch.mul(target, z, out=out)
