"""The blocks of the hybrid: Mamba-2's, and attention in the same pre-norm frame.

x          = norm(residual)
q, k, v    = q_proj(x), k_proj(x), v_proj(x)
o          = attention(rotate(q), rotate(k), v), over the cache and the segment
residual   = residual + o_proj(o)

Rotation: the segment's tokens are at 0 … T − 1, the n cached ones at −n … −1. Scores depend on differences only.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from farstate.errors import FarstateError
from farstate.models.hybrid.shape import HybridConfig
from farstate.models.mamba2.block import Block as Mamba2Block
from farstate.models.mamba2.shape import Mamba2Config
from farstate.models.parts import RMSNorm, draw_uniform, linear
from farstate.ops.attention import attend, rotate
from farstate.ops.precision import compute_dtype
from farstate.state import LayerState


def Block(config: HybridConfig, layer: int) -> nn.Module:
    """Block number `layer`: attention or Mamba-2, as `config.attends` says."""
    if config.attends(layer):
        return AttentionBlock(config)
    # A hybrid's configuration has every field of Mamba-2's.
    return Mamba2Block(cast(Mamba2Config, config), layer)


class Attention(nn.Module):
    """Causal self-attention that takes and returns the keys and values of the tokens before."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        queries, shared = config.attention_heads * config.attention_size, config.kv_heads * config.attention_size
        self.q_proj = linear(config.width, queries)
        self.k_proj, self.v_proj = linear(config.width, shared), linear(config.width, shared)
        self.o_proj = linear(queries, config.width)

    def forward(self, hidden: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """hidden (B, T, D), state of the layer or None for zero → (B, T, D), state after the segment."""
        config = self.config
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (projection(hidden).unflatten(-1, (-1, config.attention_size)) for projection in projections)
        dtype = compute_dtype(hidden)
        keys, values = k.to(dtype), v.to(dtype)
        seen, valid = keys.new_ones(keys.shape[:2]), None
        if state is not None and (cache := _filled(state)):
            keys, values = (torch.cat([cache[name], t], dim=1) for name, t in (("keys", keys), ("values", values)))
            seen = valid = torch.cat([cache["valid"], seen], dim=1)
        time, length = hidden.shape[1], keys.shape[1]
        if config.attention_window is None and length > config.attention_cache:
            raise FarstateError(
                f"an attention layer would carry {length} tokens, more than attention_cache = {config.attention_cache}: it has no "
                "window, and so many has the oldest row read since its state was zero; give attention_window or raise attention_cache"
            )
        q, rotated = q.to(dtype), keys
        if config.rope_theta is not None:
            positions = torch.arange(time - length, time, device=hidden.device)
            q, rotated = rotate(q, positions[-time:], config.rope_theta), rotate(keys, positions, config.rope_theta)
        o = attend(q, rotated, values, valid, config.attention_window)
        return self.o_proj(o.flatten(2).to(hidden.dtype)), self._state(keys, values, seen)

    def _state(self, keys: Tensor, values: Tensor, valid: Tensor) -> LayerState:
        """The entries that a later token can see."""
        window, length = self.config.attention_window, keys.shape[1]
        first = 0 if window is None else max(0, length - (window - 1))
        kept = {"keys": keys, "values": values, "valid": valid}
        if first > 0:
            # A copy: the state outlives the segment and must not keep its other keys alive.
            kept = {name: tensor[:, first:].clone() for name, tensor in kept.items()}
        return LayerState(keys.new_zeros(len(keys), self.config.attention_heads, 0), kept)


class AttentionBlock(nn.Module):
    """Pre-norm residual block around attention."""

    undecayed = ()

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = RMSNorm(config.width, config.norm_epsilon)
        self.mixer = Attention(config)

    def forward(self, residual: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]:
        """residual (B, T, D), state of the layer or None for zero → residual (B, T, D), state after the segment."""
        update, state = self.mixer(self.norm(residual), state)
        if self.config.residual_in_fp32:
            residual = residual.to(compute_dtype(residual))
        return residual + update, state

    def zero_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> LayerState:
        """recurrent (B, H, 0), which has no entries, and an empty cache: keys, values (B, 0, G, size), valid (B, 0)."""
        config = self.config

        def empty(*shape: int) -> Tensor:
            return torch.zeros(batch_size, *shape, device=device, dtype=dtype)

        shared = (0, config.kv_heads, config.attention_size)
        return LayerState(empty(config.attention_heads, 0), {"keys": empty(*shared), "values": empty(*shared), "valid": empty(0)})

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """Uniform in ± fan-in^−½ as in mamba-ssm's attention, the last projection divided by √L like Mamba-2's."""
        config, mixer = self.config, self.mixer
        self.norm.weight.fill_(1.0)
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj):
            bound = 1.0 / math.sqrt(projection.in_features)
            if projection is mixer.o_proj and config.rescale_prenorm_residual:
                bound /= math.sqrt(config.layers)
            draw_uniform(projection.weight, -bound, bound, generator)


def _filled(state: LayerState) -> dict[str, Tensor]:
    """The cache from the first entry on that any row has: nothing if it is empty.

    Caches that were cleared but not shortened (a reset of all rows, `carry_auxiliary: false`) would otherwise grow for ever.
    """
    valid = state.auxiliary["valid"]
    used = (valid != 0).any(0).nonzero()
    if not len(used):
        return {}
    first = int(used[0])
    return {name: tensor[:, first:] for name, tensor in state.auxiliary.items()}
