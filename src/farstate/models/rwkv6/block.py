"""The RWKV-6 block, with the parameter names of fla's `RWKV6Block` and the equations of the paper (§4.2, arXiv 2404.05892).

Two residual steps, each reading its input x and that of the token before, x⁻ (the *token shift*; zero before the first):

time mix     x           = attn_norm(residual)                      after pre_norm(residual) in the first block
             mix_c       = x_bias_c + low-rank_c(x + (x⁻ − x) · μ)   for c of r, w, k, v, g
             x_c         = x + (x⁻ − x) · mix_c
             r, k, v, g  = r_proj(x_r), k_proj(x_k), v_proj(x_v), g_proj(x_g)
             log decay   = −exp(bias + low-rank_w(x_w))
             o           = WKV6(r, k, v, log decay, bonus)           o_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t
             residual    = residual + o_proj(group_norm(o) · silu(g))
channel mix  x           = ffn_norm(residual)
             k           = relu(key(x + (x⁻ − x) · μ_k))²
             residual    = residual + sigmoid(receptance(x + (x⁻ − x) · μ_r)) · value(k)
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farstate.models.parts import LayerNorm, draw_uniform, linear
from farstate.models.rwkv6.shape import RWKV6Config
from farstate.ops import backends, state_moments
from farstate.ops.precision import compute_dtype
from farstate.state import LayerState

MIXED = ("r", "w", "k", "v", "g")
"""What the time mix mixes for, in the order of the rows of `x_bias` (fla's order; the official files have w, k, v, r, g)."""


def token_shift(x: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the token before adds over this one: x (B, T, D), last input before the segment (B, D) or None for zero.

    Returns:
        delta: (B, T, D), x_{t−1} − x_t, in the dtype of x.
        last: (B, D), the last input of the segment, float32 at least.
    """
    before = x.new_zeros(x.shape[0], x.shape[2]) if last is None else last.to(x.dtype)
    shifted = torch.cat([before.unsqueeze(1), x[:, :-1]], dim=1)
    # A copy: the state outlives the segment and must not keep its activations alive.
    final = x[:, -1].to(compute_dtype(x), copy=True)
    state_moments.observe_inputs(x, last, final)
    return shifted - x, final


class Projection(nn.Module):
    """fla's `DDLerpLinear`: a matrix behind a mix that is given."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = linear(inputs, outputs)


class MixedProjection(Projection):
    """fla's `LerpLinear`: a matrix behind a constant mix, linear(x + delta · mu)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.mu = nn.Parameter(torch.empty(inputs))

    def forward(self, x: Tensor, delta: Tensor) -> Tensor:
        """x, delta (B, T, inputs) → (B, T, outputs)"""
        return self.linear(torch.addcmul(x, delta, self.mu))


class LowRank(nn.Module):
    """fla's `LoRA`: bias + second(tanh(first(x))), the sum in float32 at least whatever autocast does."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.lora = nn.Sequential(linear(inputs, rank), nn.Tanh(), linear(rank, outputs, bias=True))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) → (..., outputs)"""
        first, second = cast("nn.Linear", self.lora[0]), cast("nn.Linear", self.lora[2])
        value = F.linear(torch.tanh(first(x)), second.weight)
        dtype = compute_dtype(value, second.bias)
        return value.to(dtype) + second.bias.to(dtype)


class DecayProjection(nn.Module):
    """fla's `DDLerpLinear` with a rank."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.linear = LowRank(inputs, outputs, rank)


class GroupNorm(nn.Module):
    """Each group of channels normalised to mean 0 and variance 1, times weight plus bias, in float32 at least."""

    def __init__(self, groups: int, channels: int, epsilon: float) -> None:
        super().__init__()
        self.groups = groups
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) → (B, T, C), the dtype computed in."""
        dtype = compute_dtype(x, self.weight)
        rows = x.to(dtype).flatten(0, 1)
        return F.group_norm(rows, self.groups, self.weight.to(dtype), self.bias.to(dtype), self.epsilon).view(x.shape)


class TimeMix(nn.Module):
    """fla's `RWKV6Attention` that takes and returns its state."""

    def __init__(self, config: RWKV6Config) -> None:
        super().__init__()
        self.config = config
        width, keys, values = config.width, config.heads * config.key_size, config.heads * config.value_size
        mixes = len(MIXED) * config.mix_rank
        self.x_proj = nn.Sequential(MixedProjection(width, mixes), nn.Tanh(), linear(mixes, width))
        self.x_bias = nn.Parameter(torch.empty(len(MIXED), width))
        self.r_proj = Projection(width, keys)
        self.w_proj = DecayProjection(width, keys, config.decay_rank)
        self.k_proj = Projection(width, keys)
        self.v_proj = Projection(width, values)
        self.g_proj = Projection(width, values)
        self.bonus = nn.Parameter(torch.empty(config.heads, config.key_size))
        self.g_norm = GroupNorm(config.heads, values, config.group_norm_epsilon)
        self.o_proj = linear(values, width)

    def forward(self, x: Tensor, recurrent: Tensor | None, last: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, D), recurrent (B, H, K, V) and last input (B, D) or None for zero → (B, T, D), both after the segment."""
        config = self.config
        delta, last = token_shift(x, last)
        inputs = dict(zip(MIXED, self._mixes(x, delta), strict=True))
        r, k, v, g = (getattr(self, f"{name}_proj").linear(inputs[name]) for name in "rkvg")
        log_decay = -torch.exp(self.w_proj.linear(inputs["w"]))
        r, k, log_decay = (t.unflatten(-1, (config.heads, config.key_size)) for t in (r, k, log_decay))
        v = v.unflatten(-1, (config.heads, config.value_size))
        o, recurrent = backends.implementation("wkv6", x.device)(r, k, v, log_decay, self.bonus, initial_state=recurrent)
        gated = self.g_norm(o.flatten(2)) * F.silu(g)
        return self.o_proj(gated.to(x.dtype)), recurrent, last

    def _mixes(self, x: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
        """The five mixed inputs, (B, T, D) each, in the order of `MIXED`."""
        first, second = cast("MixedProjection", self.x_proj[0]), cast("nn.Linear", self.x_proj[2])
        inner = torch.tanh(first(x, delta)).unflatten(-1, (len(MIXED), -1))
        # Columns of the second matrix belong to the mixes in turn: (D, 5, rank).
        weights = second.weight.unflatten(-1, (len(MIXED), -1)).unbind(1)
        rows = zip(inner.unbind(-2), weights, self.x_bias, strict=True)
        return tuple(torch.addcmul(x, delta, F.linear(row, weight, bias)) for row, weight, bias in rows)


class ChannelMix(nn.Module):
    """fla's `RWKV6FeedForward` that takes and returns its state."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.key = MixedProjection(width, inner)
        self.value = linear(inner, width)
        self.receptance = MixedProjection(width, width)

    def forward(self, x: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (B, T, D), last input before the segment (B, D) or None for zero → (B, T, D), last input of the segment."""
        delta, last = token_shift(x, last)
        value = self.value(F.relu(self.key(x, delta)).square())
        return torch.sigmoid(self.receptance(x, delta)) * value, last


class Block(nn.Module):
    """Two pre-norm residual steps: time mix, channel mix."""

    undecayed = ("x_bias", "bonus")

    def __init__(self, config: RWKV6Config, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.pre_norm = LayerNorm(config.width, config.norm_epsilon) if config.norm_first and layer == 0 else None
        self.attn_norm = LayerNorm(config.width, config.norm_epsilon)
        self.attn = TimeMix(config)
        self.ffn_norm = LayerNorm(config.width, config.norm_epsilon)
        self.ffn = ChannelMix(config.width, config.inner_ffn_width)

    def forward(self, residual: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """residual (B, T, D), state of the layer or None for zero → residual (B, T, D), state after the segment."""
        recurrent = None if state is None else state.recurrent
        shifts = {} if state is None else state.auxiliary
        if self.pre_norm is not None:
            residual = self.pre_norm(residual)
        update, recurrent, attention_shift = self.attn(self.attn_norm(residual), recurrent, shifts.get("attention_shift"))
        if self.config.residual_in_fp32:
            residual = residual.to(compute_dtype(residual))
        residual = residual + update
        update, ffn_shift = self.ffn(self.ffn_norm(residual), shifts.get("ffn_shift"))
        return residual + update, LayerState(recurrent, {"attention_shift": attention_shift, "ffn_shift": ffn_shift})

    def zero_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> LayerState:
        """Zeros: recurrent (B, H, K, V), attention_shift and ffn_shift (B, D)."""
        config = self.config
        shift = torch.zeros(batch_size, config.width, device=device, dtype=dtype)
        return LayerState(
            torch.zeros(batch_size, config.heads, config.key_size, config.value_size, device=device, dtype=dtype),
            {"attention_shift": shift, "ffn_shift": shift.clone()},
        )

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """The official initialisation (RWKV-LM, RWKV-v5/src/model.py): mixes and decays by layer and channel, orthogonal matrices.

        Both residual steps start as zero. The range of the decays is `decay_init_range` instead of the constants −6 and −1, and
        embedding and head are the language model's, drawn as in fla.
        """
        config, attn, ffn = self.config, self.attn, self.ffn
        depth = self.layer / max(config.layers - 1, 1)
        remaining = 1.0 - self.layer / config.layers
        for norm in (self.pre_norm, self.attn_norm, self.ffn_norm):
            if norm is not None:
                norm.weight.fill_(1.0)
                norm.bias.zero_()
        attn.g_norm.weight.fill_(((1 + self.layer) / config.layers) ** 0.7)
        attn.g_norm.bias.zero_()

        # 1. Mixes: the later the channel and the layer, the less of the token before.
        channel = torch.arange(config.width) / config.width
        slow, fast = 1.0 - channel**remaining, 1.0 - channel ** (0.5 * remaining)
        shared, last = cast("MixedProjection", attn.x_proj[0]), cast("nn.Linear", attn.x_proj[2])
        for mu in (shared.mu, ffn.key.mu, ffn.receptance.mu):
            mu.copy_(slow)
        mixes = {"r": fast, "w": slow, "k": slow, "v": slow - 0.3 * depth, "g": fast}
        attn.x_bias.copy_(torch.stack([mixes[name] for name in MIXED]))
        shared.linear.weight.zero_()
        draw_uniform(last.weight, -0.01, 0.01, generator)

        # 2. Decays and bonus, by key channel.
        place = torch.linspace(0.0, 1.0, attn.bonus.numel())
        low, high = config.decay_init_range
        down, up = cast("nn.Linear", attn.w_proj.linear.lora[0]), cast("nn.Linear", attn.w_proj.linear.lora[2])
        up.bias.copy_(low + (high - low) * place ** (0.7 + 1.3 * depth))
        down.weight.zero_()
        draw_uniform(up.weight, -0.01, 0.01, generator)
        zigzag = ((torch.arange(attn.bonus.numel()) + 1) % 3 - 1) * 0.1
        attn.bonus.copy_((depth * (1.0 - place) + zigzag).view_as(attn.bonus))

        # 3. Matrices.
        for layer, gain in (
            (attn.r_proj.linear, 1.0),
            (attn.k_proj.linear, 0.1),
            (attn.v_proj.linear, 1.0),
            (attn.g_proj.linear, 0.1),
            (ffn.key.linear, 1.0),
        ):
            draw_orthogonal(layer.weight, gain, generator)
        for layer in (attn.o_proj, ffn.value, ffn.receptance.linear):
            layer.weight.zero_()


def draw_orthogonal(parameter: Tensor, gain: float, generator: torch.Generator) -> None:
    """Fill with `gain` times orthonormal rows or columns, whichever are fewer; drawn on the CPU."""
    drawn = torch.empty(parameter.shape)
    nn.init.orthogonal_(drawn, gain, generator=generator)
    parameter.copy_(drawn)
