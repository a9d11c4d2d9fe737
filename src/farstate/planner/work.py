"""Floating-point operations of a model, from its shape; a multiplication and an addition count as two.

Forward, for one token: 2 for each weight of a matrix (the head once; looking up an embedding is free), and what the recurrence does
to each entry of the state: decay 1, write 2, read 2. Gated DeltaNet reads once more before it writes: 7. Attention reads and weighs the keys
and values it sees: 4 for each channel of a head and position. Backward is twice the forward pass.
"""

from __future__ import annotations

from functools import cache

from farstate.models.config import Config, Shape
from farstate.models.gated_deltanet.shape import GatedDeltaNetShape
from farstate.models.gla.shape import GLAShape
from farstate.models.hybrid.shape import HybridShape
from farstate.models.mamba1.shape import Mamba1Shape
from farstate.models.mamba2.shape import Mamba2Shape
from farstate.models.rwkv6.shape import RWKV6Shape

_ENTRY, _DELTA_ENTRY = 5, 7


def recurrent_entries(config: Shape, layer: int) -> int:
    """Numbers of the recurrent state of one layer and sequence."""
    match config:
        case HybridShape() if config.attends(layer):
            return 0
        case Mamba2Shape():
            return config.inner_width * config.state_size
        case Mamba1Shape():
            return config.inner_width * config.state_size
        case GLAShape() | RWKV6Shape():
            return config.heads * config.key_size * config.value_size
        case GatedDeltaNetShape():
            return config.state_heads * config.key_size * config.value_size
    raise NotImplementedError(f"planner: no formula for {type(config).__name__}")


def auxiliary_entries(config: Shape, layer: int, context: int) -> int:
    """Numbers of the auxiliary state of one layer and sequence after `context` tokens."""
    match config:
        case HybridShape() if config.attends(layer):
            seen = context if config.attention_window is None else min(context, config.attention_window - 1)
            return 2 * config.kv_heads * config.attention_size * seen
        case Mamba2Shape():
            return config.channels * (config.conv_width - 1)
        case Mamba1Shape():
            return config.inner_width * (config.conv_width - 1)
        case RWKV6Shape():
            return 2 * config.width
        case GLAShape():
            channels = config.heads * config.key_size + config.shared_heads * (config.key_size + config.value_size)
            return channels * ((config.conv_width or 1) - 1)
        case GatedDeltaNetShape():
            channels = 2 * config.heads * config.key_size + config.state_heads * config.value_size
            return channels * ((config.conv_width or 1) - 1)
    raise NotImplementedError(f"planner: no formula for {type(config).__name__}")


@cache
def state_bytes(config: Config, context: int) -> int:
    """Bytes of the state of one sequence, all layers, float32."""
    layers = range(config.layers)
    return 4 * sum(recurrent_entries(config, layer) + auxiliary_entries(config, layer, context) for layer in layers)


@cache
def parameters_of(config: Config) -> int:
    """All trained numbers."""
    return config.parameter_count()


@cache
def forward_flops(config: Config, context: int) -> float:
    """FLOP of the forward pass, for one token of a sequence of `context` tokens."""
    matrices = config.parameter_count(embeddings=False) + config.padded_vocabulary * config.width
    return 2.0 * matrices + sum(_recurrence(config, layer, context) for layer in range(config.layers))


def training_flops(config: Config, context: int, *, recomputes: bool) -> float:
    """FLOP of forward and backward pass for one token; `recomputes` does the forward pass of the blocks twice."""
    forward = forward_flops(config, context)
    return 3.0 * forward + (forward - 2.0 * config.padded_vocabulary * config.width if recomputes else 0.0)


def _recurrence(config: Shape, layer: int, context: int) -> float:
    if isinstance(config, HybridShape) and config.attends(layer):
        window = context if config.attention_window is None else min(context, config.attention_window)
        seen = window - window * (window - 1) / (2 * context)  # mean over positions
        return 4.0 * config.attention_heads * config.attention_size * seen
    operations = _DELTA_ENTRY if isinstance(config, GatedDeltaNetShape) else _ENTRY
    return float(operations * recurrent_entries(config, layer))
