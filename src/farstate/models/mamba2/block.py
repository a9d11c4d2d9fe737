"""The Mamba-2 block, with the equations and the parameter names of mamba-ssm's `Mamba2` inside its pre-norm `Block`.

z, x, B, C, dt = in_proj(norm(residual))
x, B, C        = silu(conv1d(x, B, C))
y              = SSD(x, clamp(softplus(dt + dt_bias)), −exp(A_log), B, C, D)
residual       = residual + out_proj(gated_rms_norm(y, z))
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farstate.models.mamba2.shape import Mamba2Config
from farstate.models.parts import GatedRMSNorm, RMSNorm, draw_uniform, linear, short_convolution
from farstate.ops import backends
from farstate.ops.convolution import causal_conv1d
from farstate.ops.precision import compute_dtype
from farstate.state import LayerState


class Mamba2Mixer(nn.Module):
    """mamba-ssm's `Mamba2` that takes and returns its state."""

    def __init__(self, config: Mamba2Config) -> None:
        super().__init__()
        self.config = config
        inner, heads, channels = config.inner_width, config.heads, config.channels
        # The modules below hold parameters under mamba-ssm's names.
        self.in_proj = linear(config.width, inner + channels + heads, config.linear_bias)
        self.conv1d = short_convolution(channels, config.conv_width, config.conv_bias)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.norm = GatedRMSNorm(inner, config.norm_epsilon, config.norm_groups or config.groups)
        self.out_proj = linear(inner, config.width, config.linear_bias)

    def forward(self, hidden: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """hidden (B, T, D), state of the layer or None for zero → (B, T, D), state after the segment."""
        config = self.config
        inner, group_state = config.inner_width, config.groups * config.state_size
        z, xBC, dt = self.in_proj(hidden).split([inner, config.channels, config.heads], dim=-1)
        xBC, columns = causal_conv1d(
            xBC, self.conv1d.weight.squeeze(1), self.conv1d.bias, None if state is None else state.auxiliary["conv"]
        )
        x, B, C = xBC.split([inner, group_state, group_state], dim=-1)
        dtype = compute_dtype(dt, self.dt_bias)
        dt = F.softplus(dt.to(dtype) + self.dt_bias.to(dtype))
        low, high = config.dt_limit
        if low > 0.0 or high is not None:
            dt = dt.clamp(low, high)
        y, recurrent = backends.implementation("ssd", hidden.device)(
            x.unflatten(-1, (config.heads, config.head_size)),
            dt,
            -torch.exp(self.A_log.to(dtype)),
            B.unflatten(-1, (config.groups, config.state_size)),
            C.unflatten(-1, (config.groups, config.state_size)),
            self.D,
            None if state is None else state.recurrent,
        )
        return self.out_proj(self.norm(y.flatten(2), z)), LayerState(recurrent, {"conv": columns})


class Block(nn.Module):
    """Pre-norm residual block around the mixer."""

    undecayed = ("A_log", "dt_bias", "D")

    def __init__(self, config: Mamba2Config, layer: int) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.width, config.norm_epsilon)
        self.mixer = Mamba2Mixer(config)

    def forward(self, residual: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """residual (B, T, D), state of the layer or None for zero → residual (B, T, D), state after the segment."""
        update, state = self.mixer(self.norm(residual), state)
        if self.config.residual_in_fp32:
            residual = residual.to(compute_dtype(residual))
        return residual + update, state

    def zero_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> LayerState:
        """Zeros: recurrent (B, H, P, N), conv (B, channels, width − 1)."""
        config = self.config
        return LayerState(
            torch.zeros(batch_size, config.heads, config.head_size, config.state_size, device=device, dtype=dtype),
            {"conv": torch.zeros(batch_size, config.channels, config.conv_width - 1, device=device, dtype=dtype)},
        )

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """mamba-ssm's initialisation, drawn on the CPU in float32 so that every device and dtype starts alike."""
        config, mixer = self.config, self.mixer

        self.norm.weight.fill_(1.0)
        mixer.norm.weight.fill_(1.0)
        mixer.D.fill_(1.0)
        bound = 1.0 / math.sqrt(config.width)
        draw_uniform(mixer.in_proj.weight, -bound, bound, generator)
        bound = 1.0 / math.sqrt(config.conv_width)
        draw_uniform(mixer.conv1d.weight, -bound, bound, generator)
        if mixer.conv1d.bias is not None:
            draw_uniform(mixer.conv1d.bias, -bound, bound, generator)
        bound = 1.0 / math.sqrt(config.inner_width * (config.layers if config.rescale_prenorm_residual else 1))
        draw_uniform(mixer.out_proj.weight, -bound, bound, generator)
        for projection in (mixer.in_proj, mixer.out_proj):
            if projection.bias is not None:
                projection.bias.zero_()
        A = torch.empty(config.heads).uniform_(*config.A_init_range, generator=generator)
        mixer.A_log.copy_(A.log())
        log_dt = torch.empty(config.heads).uniform_(math.log(config.dt_min), math.log(config.dt_max), generator=generator)
        dt = log_dt.exp().clamp(min=config.dt_init_floor)
        # The inverse of softplus.
        mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
