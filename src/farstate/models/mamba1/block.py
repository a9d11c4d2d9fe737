"""The Mamba-1 block, with the equations and the parameter names of mamba-ssm's `Mamba` inside its pre-norm `Block`.

x, z     = in_proj(norm(residual))
x        = silu(conv1d(x))
r, B, C  = x_proj(x)
y        = selective scan(x, softplus(dt_proj(r)), −exp(A_log), B, C, D)
residual = residual + out_proj(y · silu(z))
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farstate.models.mamba1.shape import Mamba1Config
from farstate.models.parts import RMSNorm, draw_uniform, linear, short_convolution
from farstate.ops import backends
from farstate.ops.convolution import causal_conv1d
from farstate.ops.precision import compute_dtype
from farstate.state import LayerState


class Mamba1Mixer(nn.Module):
    """mamba-ssm's `Mamba` that takes and returns its state."""

    def __init__(self, config: Mamba1Config) -> None:
        super().__init__()
        self.config = config
        inner, rank, state_size = config.inner_width, config.time_step_rank, config.state_size
        # The modules below hold parameters under mamba-ssm's names.
        self.in_proj = linear(config.width, 2 * inner, config.linear_bias)
        self.conv1d = short_convolution(inner, config.conv_width, config.conv_bias)
        self.x_proj = linear(inner, rank + 2 * state_size)
        self.dt_proj = linear(rank, inner, bias=True)
        self.A_log = nn.Parameter(torch.empty(inner, state_size))
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = linear(inner, config.width, config.linear_bias)

    def forward(self, hidden: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """hidden (B, T, D), state of the layer or None for zero → (B, T, D), state after the segment."""
        config = self.config
        x, z = self.in_proj(hidden).chunk(2, dim=-1)
        x, columns = causal_conv1d(
            x, self.conv1d.weight.squeeze(1), self.conv1d.bias, None if state is None else state.auxiliary["conv"]
        )
        low_rank, B, C = self.x_proj(x).split([config.time_step_rank, config.state_size, config.state_size], dim=-1)
        # The bias, which sets the slowest time steps, is added in float32 also where the product is not.
        dt = F.linear(low_rank, self.dt_proj.weight)
        dtype = compute_dtype(dt, self.dt_proj.bias)
        y, recurrent = backends.implementation("selective_scan", hidden.device)(
            x,
            F.softplus(dt.to(dtype) + self.dt_proj.bias.to(dtype)),
            -torch.exp(self.A_log.to(dtype)),
            B,
            C,
            self.D,
            None if state is None else state.recurrent,
        )
        return self.out_proj(y * F.silu(z)), LayerState(recurrent, {"conv": columns})


class Block(nn.Module):
    """Pre-norm residual block around the mixer."""

    undecayed = ("A_log", "D")

    def __init__(self, config: Mamba1Config, layer: int) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.width, config.norm_epsilon)
        self.mixer = Mamba1Mixer(config)

    def forward(self, residual: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """residual (B, T, D), state of the layer or None for zero → residual (B, T, D), state after the segment."""
        update, state = self.mixer(self.norm(residual), state)
        if self.config.residual_in_fp32:
            residual = residual.to(compute_dtype(residual))
        return residual + update, state

    def zero_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> LayerState:
        """Zeros: recurrent (B, inner width, N), conv (B, inner width, width − 1)."""
        config = self.config
        return LayerState(
            torch.zeros(batch_size, config.inner_width, config.state_size, device=device, dtype=dtype),
            {"conv": torch.zeros(batch_size, config.inner_width, config.conv_width - 1, device=device, dtype=dtype)},
        )

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """mamba-ssm's initialisation, drawn on the CPU in float32 so that every device and dtype starts alike."""
        config, mixer = self.config, self.mixer

        self.norm.weight.fill_(1.0)
        mixer.D.fill_(1.0)
        bound = 1.0 / math.sqrt(config.width)
        draw_uniform(mixer.in_proj.weight, -bound, bound, generator)
        bound = 1.0 / math.sqrt(config.conv_width)
        draw_uniform(mixer.conv1d.weight, -bound, bound, generator)
        if mixer.conv1d.bias is not None:
            draw_uniform(mixer.conv1d.bias, -bound, bound, generator)
        bound = 1.0 / math.sqrt(config.inner_width)
        draw_uniform(mixer.x_proj.weight, -bound, bound, generator)
        bound /= math.sqrt(config.layers if config.rescale_prenorm_residual else 1)
        draw_uniform(mixer.out_proj.weight, -bound, bound, generator)
        for projection in (mixer.in_proj, mixer.out_proj):
            if projection.bias is not None:
                projection.bias.zero_()
        low, high = config.A_init_range or (1.0, float(config.state_size))
        mixer.A_log.copy_(torch.linspace(low, high, config.state_size).log().expand_as(mixer.A_log))
        bound = config.dt_scale / math.sqrt(config.time_step_rank)
        if config.dt_init == "constant":
            mixer.dt_proj.weight.fill_(bound)
        else:
            draw_uniform(mixer.dt_proj.weight, -bound, bound, generator)
        log_dt = torch.empty(config.inner_width).uniform_(math.log(config.dt_min), math.log(config.dt_max), generator=generator)
        dt = log_dt.exp().clamp(min=config.dt_init_floor)
        # The inverse of softplus.
        mixer.dt_proj.bias.copy_(dt + torch.log(-torch.expm1(-dt)))
