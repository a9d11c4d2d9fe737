"""The GLA block, with the equations and the parameter names of fla's `GLABlock`.

x          = attn_norm(residual)
q, k, v    = q_proj(x), k_proj(x), v_proj(x)                       each through silu(conv1d(·)) if there are short convolutions
g          = max(logsigmoid(gk_proj(x)) / gate_logit_normalizer, log_decay_floor)
o          = GLA(q, k, v, g)                                        S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ ; o_t = K^−½ S_tᵀ q_t
residual   = residual + o_proj(rms_norm(o) · silu(g_proj(x)))       the norm over the V channels of a head
residual   = residual + mlp(mlp_norm(residual))                     mlp(x) = down_proj(silu(gate_proj(x)) · up_proj(x))

With fewer key-value heads than heads, k, v and g of one are shared by neighbouring heads.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farstate.models.gla.shape import GLAConfig
from farstate.models.parts import GatedMLP, RMSNorm, draw_normal, draw_uniform, linear, short_convolution
from farstate.ops import backends
from farstate.ops.convolution import causal_conv1d
from farstate.ops.normalization import rms_norm
from farstate.ops.precision import compute_dtype
from farstate.state import LayerState


class GatedLinearAttention(nn.Module):
    """fla's `GatedLinearAttention` that takes and returns its state in segments of any length."""

    def __init__(self, config: GLAConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.channels = {
            "q": config.heads * config.key_size,
            "k": config.shared_heads * config.key_size,
            "v": config.shared_heads * config.value_size,
        }
        values = config.heads * config.value_size
        self.q_proj, self.k_proj, self.v_proj = (linear(width, channels) for channels in self.channels.values())
        self.g_proj = linear(width, values)
        if config.conv_width is not None:
            self.q_conv1d, self.k_conv1d, self.v_conv1d = (
                short_convolution(channels, config.conv_width) for channels in self.channels.values()
            )
        self.gk_proj = nn.Sequential(linear(width, config.decay_rank), linear(config.decay_rank, self.channels["k"], bias=True))
        self.g_norm_swish_gate = RMSNorm(config.value_size, config.norm_epsilon)
        self.o_proj = linear(values, width)

    def forward(self, hidden: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """hidden (B, T, D), state of the layer or None for zero → (B, T, D), state after the segment."""
        config = self.config
        inputs = {"q": self.q_proj(hidden), "k": self.k_proj(hidden), "v": self.v_proj(hidden)}
        columns = {}
        if config.conv_width is not None:
            for name in inputs:
                weight = getattr(self, f"{name}_conv1d").weight.squeeze(1)
                past = None if state is None else state.auxiliary[f"conv_{name}"]
                inputs[name], columns[f"conv_{name}"] = causal_conv1d(inputs[name], weight, None, past)
        q, k = (inputs[name].unflatten(-1, (-1, config.key_size)) for name in "qk")
        v = inputs["v"].unflatten(-1, (-1, config.value_size))
        log_decay = self._log_decay(hidden).unflatten(-1, (-1, config.key_size))
        if (sharing := config.heads // config.shared_heads) > 1:
            k, v, log_decay = (t.repeat_interleave(sharing, dim=2) for t in (k, v, log_decay))
        o, recurrent = backends.implementation("gla", hidden.device)(
            q, k, v, log_decay, initial_state=None if state is None else state.recurrent
        )
        gate = F.silu(self.g_proj(hidden)).unflatten(-1, (config.heads, -1))
        normed = rms_norm(o, self.g_norm_swish_gate.weight, config.norm_epsilon) * gate
        return self.o_proj(normed.flatten(2).to(hidden.dtype)), LayerState(recurrent, columns)

    def _log_decay(self, hidden: Tensor) -> Tensor:
        """(B, T, D) → (B, T, shared heads · K), in float32 at least from the bias on: slow decays are close to zero."""
        first, last = cast("list[nn.Linear]", list(self.gk_proj))
        logits = F.linear(first(hidden), last.weight)
        dtype = compute_dtype(logits, last.bias)
        log_decay = F.logsigmoid(logits.to(dtype) + last.bias.to(dtype)) / self.config.gate_logit_normalizer
        floor = self.config.log_decay_floor
        return log_decay if floor is None else log_decay.clamp(min=floor)


class Block(nn.Module):
    """Two pre-norm residual steps: attention, MLP."""

    undecayed = ()

    def __init__(self, config: GLAConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.attn_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attn = GatedLinearAttention(config)
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
        recurrent = torch.zeros(batch_size, config.heads, config.key_size, config.value_size, device=device, dtype=dtype)
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
        """fla's initialisation: matrices and convolutions normal, biases zero, norms one; the gate's bias from `decay_bias_range`."""
        config = self.config
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                draw_uniform(parameter, *config.decay_bias_range, generator)
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                draw_normal(parameter, config.initializer_range, generator)
