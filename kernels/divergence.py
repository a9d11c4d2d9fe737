"""Total variation, Jensen–Shannon and cosine distance of two predictive distributions, streaming over the vocabulary.

The definition and the formulas are in `farstate.ops.divergence`. Logits exist as tiles of BLOCK_T tokens × BLOCK_V rows of the
head in registers. A program has some tokens and a part of the vocabulary, so that few tokens still fill a GPU; two launches:

1. `divergence_normalizers_fwd_kernel`: of either distribution, over the part, the largest logit, Σ exp(l − largest) and
   Σ exp 2(l − largest).
   Their combination over the parts, log Σ exp l and log (Σ exp 2l)^½, is a few numbers a token.
2. `divergence_distances_fwd_kernel`: the logits again, and the three sums over the part, added up afterwards.

Factors of half precision are widened as they are loaded, products are float32 (never TF32), sums are float32. Both distributions
go through the same instructions, so that equal inputs have distance 0 exactly.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from farstate.kernels.addressing import offsets
from farstate.ops.divergence import SERIES_BELOW, SERIES_TERMS, Divergence, check

TILE = {"BLOCK_T": 64, "BLOCK_V": 64, "BLOCK_D": 16}
# Wider or more stages, and float32 operands spill.
OPTIONS = {"num_warps": 8, "num_stages": 2}
# Tiles of the vocabulary that a program goes through at least.
_SHORTEST_PART = 8

_SERIES_TERMS = tl.constexpr(SERIES_TERMS)
_SERIES_BELOW = tl.constexpr(SERIES_BELOW)
_LOG_2 = tl.constexpr(math.log(2.0))


@triton.jit
def logits_tile(
    h, w, i_t, i_v, tokens, vocabulary, width, stride_ht, stride_hd, stride_wv, stride_wd,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """h[i_t] · w[i_v], (BLOCK_T, BLOCK_V) in float32; rows outside are zero."""
    b_l = tl.zeros((BLOCK_T, BLOCK_V), dtype=tl.float32)
    m_t, m_v = i_t < tokens, i_v < vocabulary
    for start in range(0, width, BLOCK_D):
        i_d = start + tl.arange(0, BLOCK_D)
        m_d = i_d < width
        p_h = h + offsets(i_t, stride_ht)[:, None] + offsets(i_d, stride_hd)[None, :]
        p_w = w + offsets(i_v, stride_wv)[None, :] + offsets(i_d, stride_wd)[:, None]
        b_h = tl.load(p_h, mask=m_t[:, None] & m_d[None, :], other=0.0).to(tl.float32)
        b_w = tl.load(p_w, mask=m_v[None, :] & m_d[:, None], other=0.0).to(tl.float32)
        b_l = tl.dot(b_h, b_w, acc=b_l, input_precision="ieee")
    return b_l


@triton.jit
def divergence_normalizers_fwd_kernel(
    h, w, partial, tokens, vocabulary, width, part,
    stride_ht, stride_hd, stride_wv, stride_wd, stride_pn, stride_ps, stride_pt,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """partial (3, parts, T): largest logit l, Σ exp(l − largest), Σ exp 2(l − largest) over `part` rows of the head."""
    i_s = tl.program_id(1)
    i_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = i_s * part
    last = tl.minimum(first + part, vocabulary)
    b_largest = tl.full((BLOCK_T,), float("-inf"), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_T,), dtype=tl.float32)
    b_sum2 = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for start in range(first, last, BLOCK_V):
        i_v = start + tl.arange(0, BLOCK_V)
        b_l = logits_tile(
            h, w, i_t, i_v, tokens, last, width, stride_ht, stride_hd, stride_wv, stride_wd, BLOCK_T, BLOCK_V, BLOCK_D
        )
        b_l = tl.where((i_v < last)[None, :], b_l, float("-inf"))
        b_now = tl.maximum(b_largest, tl.max(b_l, axis=1))
        b_shrunk = tl.exp(b_largest - b_now)
        b_e = tl.exp(b_l - b_now[:, None])
        b_sum = b_sum * b_shrunk + tl.sum(b_e, axis=1)
        b_sum2 = b_sum2 * b_shrunk * b_shrunk + tl.sum(b_e * b_e, axis=1)
        b_largest = b_now
    p_out = partial + offsets(i_s, stride_ps) + offsets(i_t, stride_pt)
    m_t = i_t < tokens
    # From one plane to the next by addition: the product could leave 32 bits.
    tl.store(p_out, b_largest, mask=m_t)
    p_out += stride_pn
    tl.store(p_out, b_sum, mask=m_t)
    p_out += stride_pn
    tl.store(p_out, b_sum2, mask=m_t)


@triton.jit
def phi(b_a, b_faded):
    """φ(a) for a ≥ 0, with e^−a given (farstate.ops.divergence)."""
    b_exact = _LOG_2 - tl.log(1.0 + b_faded) - b_a * b_faded / (1.0 + b_faded)
    b_delta = (1.0 - b_faded) / (1.0 + b_faded)
    b_square = b_delta * b_delta
    b_series = tl.zeros_like(b_square)
    for n in tl.static_range(_SERIES_TERMS):
        b_series = (b_series + 1.0 / (2 * (_SERIES_TERMS - n) * (2 * (_SERIES_TERMS - n) - 1))) * b_square
    return tl.where(b_square < _SERIES_BELOW, b_series, b_exact)


@triton.jit
def divergence_distances_fwd_kernel(
    h, h_other, w, w_other, norms, partial, tokens, vocabulary, width, part,
    stride_ht, stride_hd, stride_ot, stride_od, stride_wv, stride_wd, stride_xv, stride_xd,
    stride_nn, stride_nt, stride_pn, stride_ps, stride_pt,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """norms (4, T): z, z', n, n'. partial (3, parts, T): the three sums over `part` rows of the head, each halved."""
    i_s = tl.program_id(1)
    i_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = i_t < tokens
    first = i_s * part
    last = tl.minimum(first + part, vocabulary)
    p_n = norms + offsets(i_t, stride_nt)
    b_z = tl.load(p_n, mask=m_t, other=0.0)
    p_n += stride_nn
    b_z_other = tl.load(p_n, mask=m_t, other=0.0)
    p_n += stride_nn
    b_n = tl.load(p_n, mask=m_t, other=0.0)
    p_n += stride_nn
    b_n_other = tl.load(p_n, mask=m_t, other=0.0)
    b_variation = tl.zeros((BLOCK_T,), dtype=tl.float32)
    b_shannon = tl.zeros((BLOCK_T,), dtype=tl.float32)
    b_cosine = tl.zeros((BLOCK_T,), dtype=tl.float32)
    for start in range(first, last, BLOCK_V):
        i_v = start + tl.arange(0, BLOCK_V)
        b_l = logits_tile(
            h, w, i_t, i_v, tokens, last, width, stride_ht, stride_hd, stride_wv, stride_wd, BLOCK_T, BLOCK_V, BLOCK_D
        )
        b_o = logits_tile(
            h_other, w_other, i_t, i_v, tokens, last, width, stride_ot, stride_od, stride_xv, stride_xd,
            BLOCK_T, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        m = m_t[:, None] & (i_v < last)[None, :]
        b_apart = tl.exp(b_l - b_n[:, None]) - tl.exp(b_o - b_n_other[:, None])
        b_l -= b_z[:, None]
        b_o -= b_z_other[:, None]
        b_a = tl.abs(b_l - b_o)
        b_larger = tl.exp(tl.maximum(b_l, b_o))
        b_faded = tl.exp(-b_a)
        b_variation += tl.sum(tl.where(m, b_larger * (1.0 - b_faded), 0.0), axis=1)
        b_shannon += tl.sum(tl.where(m, b_larger * (1.0 + b_faded) * phi(b_a, b_faded), 0.0), axis=1)
        b_cosine += tl.sum(tl.where(m, b_apart * b_apart, 0.0), axis=1)
    p_out = partial + offsets(i_s, stride_ps) + offsets(i_t, stride_pt)
    tl.store(p_out, 0.5 * b_variation, mask=m_t)
    p_out += stride_pn
    tl.store(p_out, 0.5 * b_shannon, mask=m_t)
    p_out += stride_pn
    tl.store(p_out, 0.5 * b_cosine, mask=m_t)


def fused(
    hidden: Tensor,
    other_hidden: Tensor,
    head_weight: Tensor,
    other_head_weight: Tensor | None = None,
    vocabulary_size: int | None = None,
) -> Divergence:
    """`farstate.ops.divergence.streamed` in float32 on a GPU; any strides. Shapes: see there.

    Raises:
        ValueError: shapes that do not fit each other, or a float64 input.
    """
    other_head_weight = check(hidden, other_hidden, head_weight, other_head_weight, vocabulary_size)
    if any(t.dtype == torch.float64 for t in (hidden, other_hidden, head_weight, other_head_weight)):
        raise ValueError("the kernel computes in float32: use farstate.ops.divergence.streamed for float64")
    width, vocabulary = hidden.shape[-1], vocabulary_size or head_weight.shape[0]
    h, other = hidden.reshape(-1, width), other_hidden.reshape(-1, width)
    tokens = h.shape[0]
    if tokens == 0:
        return Divergence(*torch.empty(3, *hidden.shape[:-1], device=h.device))
    part, parts = _parts(tokens, vocabulary, hidden.device)
    grid = (triton.cdiv(tokens, TILE["BLOCK_T"]), parts)
    found = []
    for rows, weight in ((h, head_weight), (other, other_head_weight)):
        partial = torch.empty(3, parts, tokens, dtype=torch.float32, device=h.device)
        divergence_normalizers_fwd_kernel[grid](
            rows,
            weight,
            partial,
            tokens,
            vocabulary,
            width,
            part,
            *rows.stride(),
            *weight.stride(),
            *partial.stride(),
            **TILE,
            **OPTIONS,
        )
        largest, sums, squares = partial.double()
        z = torch.logsumexp(largest + sums.log(), dim=0)
        n = 0.5 * torch.logsumexp(2.0 * largest + squares.log(), dim=0)
        found.append((z, n))
    norms = torch.stack([found[0][0], found[1][0], found[0][1], found[1][1]]).float()
    partial = torch.empty(3, parts, tokens, dtype=torch.float32, device=h.device)
    divergence_distances_fwd_kernel[grid](
        h, other, head_weight, other_head_weight, norms, partial, tokens, vocabulary, width, part,
        *h.stride(), *other.stride(), *head_weight.stride(), *other_head_weight.stride(), *norms.stride(), *partial.stride(),
        **TILE, **OPTIONS,
    )  # fmt: skip
    limits = (1.0, math.log(2.0), 1.0)
    totals = partial.double().sum(1).float()
    return Divergence(*(t.clamp(0.0, limit).view(hidden.shape[:-1]) for t, limit in zip(totals, limits, strict=True)))


def _parts(tokens: int, vocabulary: int, device: torch.device) -> tuple[int, int]:
    """Rows of the head in a part, a multiple of the tile, and how many parts: enough programs for every multiprocessor."""
    tile = TILE["BLOCK_V"]
    tiles = triton.cdiv(vocabulary, tile)
    wanted = triton.cdiv(4 * _processors(device), triton.cdiv(tokens, TILE["BLOCK_T"]))
    part = tile * max(min(tiles, _SHORTEST_PART), triton.cdiv(tiles, wanted))
    return part, triton.cdiv(vocabulary, part)


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
