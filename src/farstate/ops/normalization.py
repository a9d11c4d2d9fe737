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
    result: Tensor = _RMSNorm.apply(x.to(dtype), weight.to(dtype), epsilon)
    return result.to(weight.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, epsilon: float, groups: int = 1) -> Tensor:
    """The same as `naive_gated_rms_norm`, with a backward pass of its own.

    Raises:
        ValueError: D is not a multiple of `groups`, or the shapes of x and z differ.
    """
    if x.shape != z.shape or x.shape[-1] % groups:
        raise ValueError(f"x {tuple(x.shape)} and z {tuple(z.shape)} must agree and end in a multiple of {groups}")
    dtype = compute_dtype(x, z, weight)
    result: Tensor = _GatedRMSNorm.apply(x.to(dtype), z.to(dtype), weight.to(dtype), epsilon, groups)
    return result.to(x.dtype)


def _inverse_rms(x: Tensor, epsilon: float, groups: int) -> Tensor:
    """(..., D) → (..., groups, 1)."""
    parts = x.unflatten(-1, (groups, -1))
    mean_square = torch.linalg.vector_norm(parts, dim=-1, keepdim=True).square_().div_(parts.shape[-1])
    return mean_square.add_(epsilon).rsqrt_()


def _norm_backward(dy: Tensor, normed: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight for y = normed · weight, normed = x · scale(x); scale (..., groups, 1)."""
    groups = scale.shape[-2]
    product = dy * normed
    dweight = product.flatten(0, -2).sum(0)
    # Mean of dy · normed · weight over each group, as one matrix-vector product a group: (groups, rows, 1).
    parts = product.view(-1, groups, product.shape[-1] // groups).transpose(0, 1)
    overlap = torch.bmm(parts, weight.view(groups, -1, 1)).div_(parts.shape[-1]).transpose(0, 1).reshape(scale.shape)
    dx = torch.mul(dy, weight, out=product).unflatten(-1, (groups, -1))
    dx.addcmul_(normed.unflatten(-1, (groups, -1)), overlap, value=-1.0).mul_(scale)
    return dx.flatten(-2), dweight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = _inverse_rms(x, epsilon, 1)
        normed = x * scale.squeeze(-2)
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        normed, weight, scale = ctx.saved_tensors
        return *_norm_backward(dy, normed, weight, scale), None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, epsilon: float, groups: int) -> Tensor:
        sigmoid = torch.sigmoid(z)
        gate = sigmoid * z
        normed = gate * x
        scale = _inverse_rms(normed, epsilon, groups)
        normed.unflatten(-1, (groups, -1)).mul_(scale)
        ctx.save_for_backward(x, gate, sigmoid, normed, weight, scale)
        return normed * weight

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, sigmoid, normed, weight, scale = ctx.saved_tensors
        dgated, dweight = _norm_backward(dy, normed, weight, scale)
        # d silu(z) / dz = σ + g (1 − σ) with g = z σ.
        dz = torch.add(sigmoid, gate).addcmul_(gate, sigmoid, value=-1.0).mul_(x).mul_(dgated)
        return dgated.mul_(gate), dz, dweight, None, None
