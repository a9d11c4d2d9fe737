"""Causal softmax attention of a segment to itself and to a cache of keys and values before it, full or within a window.

For one head, with `query` i of the segment at place n + i among n cached and T own keys j:

    o_i = Σ_j p_ij v_j,   p_i = softmax over the visible j of q_i · k_j / sqrt(size)
    j is visible to i if j ≤ n + i, n + i − j < window, and valid_j ≠ 0

Shapes: q (B, T, H, size), k (B, n + T, G, size), v (B, n + T, G, size), valid (B, n + T) or None (all), H divisible by G, heads
H / G · g onwards read keys and values g → o (B, T, H, size). A query that sees nothing gets zeros. Both functions compute in
float32, or float64 if an input is; o has the dtype of q.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops.precision import compute_dtype, without_autocast

# Queries computed together: the mask of a block is (block, keys), whatever the length of the segment.
_BLOCK = 512


def naive(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, window: int | None = None) -> Tensor:
    """The definition, one query at a time. Shapes: see the module."""
    _check(q, k, v, valid, window)
    dtype = compute_dtype(q, k, v)
    sharing, cached = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    keys, values = (t.to(dtype).repeat_interleave(sharing, dim=2) for t in (k, v))
    outputs = []
    for i in range(q.shape[1]):
        start = 0 if window is None else max(0, cached + i + 1 - window)
        seen = slice(start, cached + i + 1)
        scores = torch.einsum("bhc,bjhc->bhj", q[:, i].to(dtype), keys[:, seen]) * q.shape[-1] ** -0.5
        weights = scores.exp() if valid is None else scores.exp() * (valid[:, None, seen] != 0)
        total = weights.sum(-1, keepdim=True)
        # Zero weights have a zero sum: any other divisor leaves them zero.
        weights = weights / torch.where(total == 0, 1.0, total)
        outputs.append(torch.einsum("bhj,bjhc->bhc", weights, values[:, seen]))
    return torch.stack(outputs, dim=1).to(q.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None = None, window: int | None = None) -> Tensor:
    """The same as `naive`, in blocks of queries. Shapes: see the module.

    Keys outside the window of a whole block are never touched, so that work and memory are linear in T with a window; without
    one, work is quadratic and memory linear.

    Raises:
        ValueError: shapes that do not fit each other, or a window below 1.
    """
    _check(q, k, v, valid, window)
    dtype = compute_dtype(q, k, v)
    time, cached = q.shape[1], k.shape[1] - q.shape[1]
    block = min(_BLOCK, time) if window is None else min(max(window, 64), _BLOCK, time)
    with without_autocast(q.device):
        queries, keys, values = (t.to(dtype).transpose(1, 2) for t in (q, k, v))
        outputs = []
        for start in range(0, time, block):
            stop = min(start + block, time)
            first = 0 if window is None else max(0, cached + start + 1 - window)
            seen = slice(first, cached + stop)
            plain = first == cached + start and valid is None and (window is None or window >= stop - start)
            mask = None if plain else _mask(start, stop, cached, first, window, valid, q.device)
            outputs.append(
                F.scaled_dot_product_attention(
                    queries[:, :, start:stop],
                    keys[:, :, seen],
                    values[:, :, seen],
                    attn_mask=mask,
                    is_causal=plain,
                    enable_gqa=q.shape[2] != k.shape[2],
                )
            )
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return o.transpose(1, 2).to(q.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864), the two halves of the channels as the two parts of pairs.

        (x_c, x_{c + size/2}) turned by the angle position · theta^(−2c / size)

    Scores of rotated queries and keys depend on the difference of their positions alone.

    Args:
        x: (B, T, H, size), size even.
        positions: (T,), whole numbers of any sign.

    Returns:
        (B, T, H, size) in float32, or float64 if x is.
    """
    dtype = compute_dtype(x)
    half = x.shape[-1] // 2
    # Angles in float64: a long sequence turns the fast channels many thousand times.
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = (positions.double()[:, None] * frequencies).unsqueeze(1)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = x.to(dtype).split(half, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _mask(
    start: int, stop: int, cached: int, first: int, window: int | None, valid: Tensor | None, device: torch.device
) -> Tensor:
    """Which of the keys from `first` on the queries from `start` to `stop` see: (block, keys) or (B, 1, block, keys), boolean."""
    behind = torch.arange(cached + start, cached + stop, device=device)[:, None] - torch.arange(
        first, cached + stop, device=device
    )
    visible = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return visible if valid is None else visible & (valid[:, None, None, first : cached + stop] != 0)


def _check(q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, window: int | None) -> None:
    if q.dim() != 4 or k.dim() != 4 or q.shape[1] < 1 or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q must be (B, T, H, size) with T ≥ 1 and k (B, n + T, G, size) with H divisible by G, "
            f"found {tuple(q.shape)} and {tuple(k.shape)}"
        )
    batch, time, _, size = q.shape
    expected = (batch, max(time, k.shape[1]), k.shape[2], size)
    for name, tensor in (("k", k), ("v", v)):
        if tuple(tensor.shape) != expected:
            raise ValueError(f"{name} must have shape {expected}, found {tuple(tensor.shape)}")
    if valid is not None and tuple(valid.shape) != expected[:2]:
        raise ValueError(f"valid must have shape {expected[:2]}, found {tuple(valid.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, found {window}")
