"""Modules that several architectures share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farstate.ops.normalization import gated_rms_norm, rms_norm
from farstate.ops.precision import compute_dtype


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dimension, computed in float32 at least."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) → (..., D) in the dtype of the weight."""
        return rms_norm(x, self.weight, self.epsilon)


class GatedRMSNorm(nn.Module):
    """RMSNorm of x · silu(z), the mean taken over each of `groups` equal parts."""

    def __init__(self, size: int, epsilon: float, groups: int) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z (..., D) → (..., D) in the dtype of x."""
        return gated_rms_norm(x, z, self.weight, self.epsilon, self.groups)


class LayerNorm(nn.Module):
    """(x − mean) / sqrt(variance + ε) · weight + bias over the last dimension, computed in float32 at least."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) → (..., D) in the dtype of the weight."""
        dtype = compute_dtype(x, self.weight)
        normed = F.layer_norm(x.to(dtype), self.weight.shape, self.weight.to(dtype), self.bias.to(dtype), self.epsilon)
        return normed.to(self.weight.dtype)


class GatedMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) · up_proj(x))"""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(width, inner)
        self.up_proj = linear(width, inner)
        self.down_proj = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) → (..., D)"""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Draw nothing. (`nn.utils.skip_init` does the same by way of torch's meta device, whose first use loads 4 s of modules.)"""


class _Conv1d(nn.Conv1d):
    def reset_parameters(self) -> None:
        """Draw nothing."""


def embedding(entries: int, width: int) -> nn.Embedding:
    """A table that is not yet drawn: nothing is ever drawn from torch's global generator."""
    return nn.Embedding(entries, width, _weight=torch.empty(entries, width))


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    """A layer whose parameters are not yet drawn."""
    return _Linear(inputs, outputs, bias=bias)


def short_convolution(channels: int, width: int, bias: bool = False) -> nn.Conv1d:
    """Holds the taps of a depthwise convolution, (channels, 1, width), not yet drawn."""
    return _Conv1d(channels, channels, width, groups=channels, bias=bias)


def draw_uniform(parameter: Tensor, low: float, high: float, generator: torch.Generator) -> None:
    """Fill from U(low, high), drawn on the CPU in float32 so that every device and dtype starts alike."""
    parameter.copy_(torch.empty(parameter.shape).uniform_(low, high, generator=generator))


def draw_normal(parameter: Tensor, deviation: float, generator: torch.Generator) -> None:
    """Fill from N(0, deviation²), drawn on the CPU in float32."""
    parameter.copy_(torch.empty(parameter.shape).normal_(std=deviation, generator=generator))
