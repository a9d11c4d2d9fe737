"""The Gated DeltaNet block, with the equations and the parameter names of fla's `GatedDeltaNetBlock`.

x          = attn_norm(residual)
q, k, v    = silu(conv1d(q_proj(x))), silu(conv1d(k_proj(x))), silu(conv1d(v_proj(x)))     silu alone without convolutions
q, k       = q / |q|, k / |k|                                       the channels of a head, 1e-6 added to the squared length
g          = −exp(A_log) · softplus(a_proj(x) + dt_bias)
β          = sigmoid(b_proj(x))                                     twice that if negative eigenvalues are allowed
o          = GatedDelta(q, k, v, g, β)
residual   = residual + o_proj(rms_norm(o) · silu(g_proj(x)))       the norm over the V channels of a head
residual   = residual + mlp(mlp_norm(residual))
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farstate.models.gated_deltanet.shape import GatedDeltaNetConfig
from farstate.models.parts import GatedMLP, RMSNorm, draw_normal, linear, short_convolution
from farstate.ops import backends
from farstate.ops.convolution import causal_conv1d
from farstate.ops.normalization import rms_norm
from farstate.ops.precision import compute_dtype
from farstate.state import LayerState

LENGTH_EPSILON = 1e-6


class GatedDeltaNet(nn.Module):
    """fla's `GatedDeltaNet` that takes and returns its state in segments of any length."""

    def __init__(self, config: GatedDeltaNetConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.width, config.state_heads
        keys, values = config.heads * config.key_size, heads * config.value_size
        self.channels = {"q": keys, "k": keys, "v": values}
        self.q_proj, self.k_proj, self.v_proj = (linear(width, channels) for channels in self.channels.values())
        self.a_proj, self.b_proj = linear(width, heads), linear(width, heads)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        if config.conv_width is not None:
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                short_convolution(channels, config.conv_width) for channels in self.channels.values()
            )
        if config.output_gate:
            self.g_proj = linear(width, values)
        self.o_norm = RMSNorm(config.value_size, config.norm_epsilon)
        self.o_proj = linear(values, width)

    def forward(self, hidden: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """hidden (B, T, D), state of the layer or None for zero → (B, T, D), state after the segment."""
        config = self.config
        inputs, columns = {}, {}
        for name in self.channels:
            projected = getattr(self, f"{name}_proj")(hidden)
            if config.conv_width is None:
                inputs[name] = F.silu(projected)
                continue
            weight = getattr(self, f"{name}_conv1d").weight.squeeze(1)
            past = None if state is None else state.auxiliary[f"conv_{name}"]
            inputs[name], columns[f"conv_{name}"] = causal_conv1d(projected, weight, None, past)
        q, k = (unit_length(inputs[name].unflatten(-1, (-1, config.key_size))) for name in "qk")
        v = inputs["v"].unflatten(-1, (-1, config.value_size))
        if (sharing := config.state_heads // config.heads) > 1:
            q, k = (t.repeat_interleave(sharing, dim=2) for t in (q, k))

        steps = self.a_proj(hidden)
        dtype = compute_dtype(steps, self.dt_bias)
        log_decay = -torch.exp(self.A_log.to(dtype)) * F.softplus(steps.to(dtype) + self.dt_bias.to(dtype))
        beta = torch.sigmoid(self.b_proj(hidden).to(dtype))
        if config.negative_eigenvalues:
            beta = 2.0 * beta
        o, recurrent = backends.implementation("gated_delta", hidden.device)(
            q, k, v, log_decay, beta, initial_state=None if state is None else state.recurrent
        )
        o = rms_norm(o, self.o_norm.weight, config.norm_epsilon)
        if config.output_gate:
            o = o * F.silu(self.g_proj(hidden)).unflatten(-1, (config.state_heads, -1))
        return self.o_proj(o.flatten(2).to(hidden.dtype)), LayerState(recurrent, columns)


class Block(nn.Module):
    """Two pre-norm residual steps: the recurrence, the MLP."""

    undecayed = ("A_log", "dt_bias")

    def __init__(self, config: GatedDeltaNetConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.attn_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attn = GatedDeltaNet(config)
        self.mlp_norm = RMSNorm(config.width, config.norm_epsilon)
        self.mlp = GatedMLP(config.width, config.inner_mlp_width)

    def forward(self, residual: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """residual (B, T, D), state of the layer or None for zero → residual (B, T, D), state after the segment."""
        update, state = self.attn(self.attn_norm(residual), state)
        if self.config.residual_in_fp32:
            residual = residual.to(compute_dtype(residual))
        residual = residual + update
        return residual + self.mlp(self.mlp_norm(residual)), state

    def zero_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> LayerState:
        """Zeros: recurrent (B, H, K, V); with short convolutions conv_q, conv_k, conv_v (B, channels, width − 1)."""
        config = self.config
        recurrent = torch.zeros(batch_size, config.state_heads, config.key_size, config.value_size, device=device, dtype=dtype)
        if config.conv_width is None:
            return LayerState(recurrent)
        columns = config.conv_width - 1
        return LayerState(
            recurrent,
            {
                f"conv_{name}": torch.zeros(batch_size, channels, columns, device=device, dtype=dtype)
                for name, channels in self.attn.channels.items()
            },
        )

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """fla's initialisation: matrices and convolutions normal, norms one; A and time steps from their ranges."""
        config = self.config
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            elif parameter.dim() > 1:
                draw_normal(parameter, config.initializer_range, generator)
        heads = config.state_heads
        A = torch.empty(heads).uniform_(*config.A_init_range, generator=generator)
        # A range may begin at zero, which has no logarithm.
        self.attn.A_log.copy_(A.clamp(min=torch.finfo(A.dtype).tiny).log())
        log_dt = torch.empty(heads).uniform_(math.log(config.dt_min), math.log(config.dt_max), generator=generator)
        dt = log_dt.exp().clamp(min=config.dt_init_floor)
        # The inverse of softplus.
        self.attn.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))


def unit_length(x: Tensor) -> Tensor:
    """x / sqrt(|x|² + 1e-6) over the last dimension, in float32 at least: a root-mean-square norm in other units."""
    size = x.shape[-1]
    weight = torch.full((size,), size**-0.5, dtype=compute_dtype(x), device=x.device)
    return rms_norm(x, weight, LENGTH_EPSILON / size)
