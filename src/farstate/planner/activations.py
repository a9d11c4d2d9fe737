"""What a training step holds besides weights, gradients and optimizer: counted from the code of the blocks, checked by a test.

Each block keeps for the backward pass what stands here, in numbers a token. They were read off by counting the tensors that autograd
saves (`torch.autograd.graph.saved_tensors_hooks`, storages counted once) for shapes in which all sizes differ; the products of
sizes are exact, sizes below a head's are left out. The recurrence's own part is that of the `chunked` backend.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import accumulate

from farstate.models.config import Config, Shape
from farstate.models.gated_deltanet.shape import GatedDeltaNetShape
from farstate.models.gla.shape import GLAShape
from farstate.models.hybrid.shape import HybridShape
from farstate.models.mamba1.shape import Mamba1Shape
from farstate.models.mamba2.shape import Mamba2Shape
from farstate.models.rwkv6.shape import RWKV6Shape
from farstate.planner.work import auxiliary_entries, recurrent_entries

HALVED = {"mamba1": 1.0, "mamba2": 1.02, "hybrid": 1.05, "gated_deltanet": 0.92, "gla": 0.84, "rwkv6": 0.72}
"""Bytes kept in bf16-mixed, as a share of those in float32: what enters matrix products is halved, what enters a recurrence is kept twice."""
PASSING = {"mamba1": 0.5, "mamba2": 0.6, "hybrid": 0.6, "gated_deltanet": 0.2, "gla": 0.27, "rwkv6": 0.23}
"""What the backward pass of a block needs for a moment, as a share of what the block kept. Measured at 4,096 tokens, two and four layers."""
TILES = 2e6
"""Bytes of the buffers in which the backward pass of Mamba-1's scan computes states again, over what it has freed by then. Measured."""
LOGITS = 1 << 20
"""Logits that exist at a time on a CPU; on a GPU 256 times as many, as in farstate.models.head."""


def block_numbers(config: Config, layer: int, rows: int, context: int, *, kernels: bool) -> float:
    """Numbers that one block keeps for `rows` sequences of `context` tokens.

    Args:
        kernels: fused kernels compute the recurrence (mamba_ssm, fla, triton): nothing of what happens inside is counted, as they
            compute it again.
    """
    around, inside = _around(config, layer, context), 0.0 if kernels else _inside(config, layer, context)
    once = recurrent_entries(config, layer) + auxiliary_entries(config, layer, context)
    return rows * (context * (around + inside) + once)


@cache
def held_bytes(
    config: Config, rows: int, context: int, precision: str, *, recomputes: bool, kernels: bool, gpu: bool
) -> tuple[float, float]:
    """Bytes for `rows` sequences of `context` tokens at the most, weights and their gradients not counted.

    The first are kept from the forward to the backward pass: all blocks', or with `recomputes` what enters each block. The second are
    there for a moment on top: a chunk of logits at the end of the forward pass, or what the backward pass of a block needs.
    """
    share = 4.0 * (HALVED[config.architecture] if precision == "bf16-mixed" else 1.0)
    blocks = [share * block_numbers(config, layer, rows, context, kernels=kernels) for layer in range(config.layers)]
    tokens = rows * context
    kept = [4.0 * tokens * config.width] * config.layers if recomputes else blocks
    again = 1.0 if recomputes else 0.0
    passing = again + PASSING[config.architecture] / getattr(
        config, "groups", 1
    )  # groups of heads are computed one after another
    backward = max(before + passing * one for before, one in zip(accumulate(kept), blocks, strict=True))
    # What the final norm reads and the gradient of its output; tokens and targets are 64-bit.
    ends = 4.0 * tokens * (2 * config.width + 4)
    tiles = TILES if config.architecture == "mamba1" and not kernels else 0.0
    return sum(kept) + ends, max(backward - sum(kept) + tiles, logits_bytes(config, tokens, gpu=gpu))


@cache
def forward_bytes(config: Config, rows: int, context: int) -> float:
    """Bytes at the most in a forward pass without gradients: the widest block's tensors, what enters it, hidden states."""
    widest = max(block_numbers(config, layer, rows, context, kernels=False) for layer in range(config.layers))
    return 4.0 * (widest + rows * context * 2 * config.width)


def logits_bytes(config: Config, tokens: int, *, gpu: bool) -> float:
    """Bytes of the logits that exist at a time, and of the head's gradient, which is formed beside them."""
    chunk = max(256, LOGITS * (256 if gpu else 1) // config.vocabulary_size)
    return 4.0 * min(tokens, chunk) * (config.vocabulary_size + 2 * config.width)


def _around(config: Shape, layer: int, context: int) -> float:
    """Numbers a token: projections, convolutions, norms, gates."""
    width = config.width
    match config:
        case HybridShape() if config.attends(layer):
            return 2 * width + 2 * config.attention_size * (config.attention_heads + config.kv_heads) + config.attention_heads
        case Mamba2Shape():
            projected = config.inner_width + config.channels + config.heads
            return 2 * width + projected + 2 * config.channels + 2 * config.inner_width + 2 * config.heads
        case Mamba1Shape():
            return 2 * width + 9 * config.inner_width + config.time_step_rank + 2 * config.state_size
        case GLAShape():
            keys, values = config.heads * config.key_size, config.heads * config.value_size
            convolved = 2 * (2 * keys + values) if config.conv_width else 0
            return 4 * width + 6 * keys + 5 * values + 4 * config.inner_mlp_width + config.decay_rank + config.heads + convolved
        case RWKV6Shape():
            keys, values = config.heads * config.key_size, config.heads * config.value_size
            return 19 * width + 5 * keys + 5 * values + 2 * config.inner_ffn_width + 5 * config.mix_rank + config.decay_rank + 6
        case GatedDeltaNetShape():
            keys, values = config.heads * config.key_size, config.state_heads * config.value_size
            return 4 * width + 6 * keys + 8 * values + 4 * config.inner_mlp_width + 8 * config.state_heads
    raise NotImplementedError(f"planner: no formula for {type(config).__name__}")


def _inside(config: Shape, layer: int, context: int) -> float:
    """Numbers a token that the chunked form of the recurrence keeps: chunks, their attention, states between chunks."""
    state = recurrent_entries(config, layer)
    match config:
        case HybridShape() if config.attends(layer):
            return 0.0
        case Mamba2Shape():
            Q = _even_chunk(context, _balanced(config.head_size * config.state_size, 16, 128))
            B_and_C = 2 * config.groups * config.state_size
            return 2 * config.inner_width + B_and_C + config.groups * Q + 2 * config.heads + state / Q
        case Mamba1Shape():
            return state / min(context, 32)
        case GLAShape() | RWKV6Shape():
            keys, values = config.heads * config.key_size, config.heads * config.value_size
            Q = _power_chunk(context, config.value_size)
            return 2 * keys + values + config.heads * Q + state / Q
        case GatedDeltaNetShape():
            H, K, V = config.state_heads, config.key_size, config.value_size
            Q = _even_chunk(context, _balanced(K * V / 4, 16, 64))
            return H * (3 * K + 2 * V + 4 * Q) + state / Q
    raise NotImplementedError(f"planner: no formula for {type(config).__name__}")


def _balanced(product: float, shortest: int, longest: int) -> int:
    return min(max(2 ** round(math.log2(math.sqrt(product))), shortest), longest)


def _even_chunk(context: int, longest: int) -> int:
    return -(-context // -(-context // longest))


def _power_chunk(context: int, values: int) -> int:
    length = min(max(2 ** math.ceil(math.log2(values)), 16), 64, 2 ** math.ceil(math.log2(context)))
    while length > 16 and -context % length > context // 8:
        length //= 2
    return length
