"""How far two predictive distributions are apart, from hidden states and a head, without their logits.

With l = W h and l' = W' h' over the vocabulary, q = softmax(l), q' = softmax(l') and m = (q + q') / 2, per token

    total variation    ½ Σ |q − q'|                                                  in [0, 1]
    Jensen–Shannon     ½ Σ q log(q / m) + ½ Σ q' log(q' / m), in nats                in [0, log 2]; its root is a distance
    cosine distance    1 − Σ q q' / (‖q‖ ‖q'‖)                                       in [0, 1]

`naive` is these definitions with full rows of logits. `streamed` computes the logits twice, a block of the vocabulary at a time:
first z = log Σ exp l and n = log (Σ exp 2l)^½, then, with d = (l − z) − (l' − z') and a = |d|, sums of terms that are never
negative and all zero where the two agree:

    |q − q'|                        = max(q, q') (1 − e^−a)
    ½ q log(q/m) + ½ q' log(q'/m)   = m φ(a),   φ(a) = log 2 − log(1 + e^−a) − a e^−a / (1 + e^−a)
    1 − cos                         = ½ Σ (exp(l − n) − exp(l' − n'))²

so that equal inputs are at distance 0, not 1e-8, and small distances keep their digits: for small a, φ is a series in
δ² = tanh²(a/2). Rounding can carry a sum over its upper bound only, where it is cut. Shapes:

    hidden, other_hidden (..., D) · head_weight, other_head_weight (padded V, D); the latter None for the same head
    vocabulary_size: how many rows of the head count, None for all → each of the three (...), float32 or float64
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from farstate.ops.precision import compute_dtype, without_autocast


class Divergence(NamedTuple):
    """Per token; see the module."""

    total_variation: Tensor
    jensen_shannon: Tensor
    cosine_distance: Tensor


def naive(
    hidden: Tensor,
    other_hidden: Tensor,
    head_weight: Tensor,
    other_head_weight: Tensor | None = None,
    vocabulary_size: int | None = None,
    chunk_tokens: int = 256,
) -> Divergence:
    """The definitions, from the full logits of `chunk_tokens` tokens at a time. Shapes: see the module.

    Raises:
        ValueError: shapes that do not fit each other, or a vocabulary larger than the head.
    """
    first, second, weight, other_weight = _rows(hidden, other_hidden, head_weight, other_head_weight, vocabulary_size)
    parts = []
    with without_autocast(first.device):
        for h, other in zip(first.split(chunk_tokens), second.split(chunk_tokens), strict=True):
            q, q_other = (h @ weight.t()).softmax(-1), (other @ other_weight.t()).softmax(-1)
            m = (q + q_other) / 2
            total_variation = (q - q_other).abs().sum(-1) / 2
            # xlogy: 0 log 0 = 0.
            entropy_gap = (torch.xlogy(q, q) + torch.xlogy(q_other, q_other)) / 2 - torch.xlogy(m, m)
            cosine = (q * q_other).sum(-1) / (q.norm(dim=-1) * q_other.norm(dim=-1))
            parts.append((total_variation, entropy_gap.sum(-1), 1.0 - cosine))
    return _shaped([torch.cat(values) for values in zip(*parts, strict=True)], hidden.shape[:-1])


@torch.no_grad()
def streamed(
    hidden: Tensor,
    other_hidden: Tensor,
    head_weight: Tensor,
    other_head_weight: Tensor | None = None,
    vocabulary_size: int | None = None,
    block_tokens: int = 512,
    block_vocabulary: int = 512,
) -> Divergence:
    """The same without gradients, from logits of `block_tokens` × `block_vocabulary` at a time. Shapes: see the module.

    About ten such blocks exist together: a twentieth of the two matrices of logits at V = 50,288.

    Raises:
        ValueError: shapes that do not fit each other, or a vocabulary larger than the head.
    """
    first, second, weight, other_weight = _rows(hidden, other_hidden, head_weight, other_head_weight, vocabulary_size)
    found = torch.empty(3, first.shape[0], dtype=first.dtype, device=first.device)
    with without_autocast(first.device):
        for start in range(0, first.shape[0], block_tokens):
            rows = slice(start, start + block_tokens)
            # Copies: equal rows then lie alike in memory, and a matrix product gives them equal bits.
            h, other = first[rows].clone(), second[rows].clone()
            found[:, rows] = _block(h, other, weight, other_weight, block_vocabulary)
    return _shaped(list(found), hidden.shape[:-1])


def divergence(
    hidden: Tensor,
    other_hidden: Tensor,
    head_weight: Tensor,
    other_head_weight: Tensor | None = None,
    vocabulary_size: int | None = None,
) -> Divergence:
    """The fastest of the implementations here: the kernel on a GPU, except in float64, else `streamed`."""
    arguments = (hidden, other_hidden, head_weight, other_head_weight, vocabulary_size)
    if hidden.is_cuda and compute_dtype(hidden, other_hidden, head_weight, other_head_weight) == torch.float32:
        from farstate.kernels import divergence as kernel

        return kernel.fused(*arguments)
    return streamed(*arguments)


def _rows(
    hidden: Tensor, other_hidden: Tensor, head_weight: Tensor, other_head_weight: Tensor | None, vocabulary_size: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Checked, in the dtype computed in: both hidden states as (tokens, D), the rows of both heads that count."""
    other_head_weight = check(hidden, other_hidden, head_weight, other_head_weight, vocabulary_size)
    dtype = compute_dtype(hidden, other_hidden, head_weight, other_head_weight)
    weight = head_weight[:vocabulary_size].to(dtype)
    other_weight = weight if other_head_weight is head_weight else other_head_weight[:vocabulary_size].to(dtype)
    width = hidden.shape[-1]
    return hidden.reshape(-1, width).to(dtype), other_hidden.reshape(-1, width).to(dtype), weight, other_weight


def check(
    hidden: Tensor, other_hidden: Tensor, head_weight: Tensor, other_head_weight: Tensor | None, vocabulary_size: int | None
) -> Tensor:
    """The head of the second distribution, after a look at all shapes.

    Raises:
        ValueError: shapes that do not fit each other, or a vocabulary larger than the head.
    """
    other_head_weight = head_weight if other_head_weight is None else other_head_weight
    if hidden.shape != other_hidden.shape or head_weight.dim() != 2 or hidden.shape[-1] != head_weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, other_hidden {tuple(other_hidden.shape)} and head_weight {tuple(head_weight.shape)} do not fit each other"
        )
    if other_head_weight.shape != head_weight.shape:
        raise ValueError(f"other_head_weight {tuple(other_head_weight.shape)} beside head_weight {tuple(head_weight.shape)}")
    if vocabulary_size is not None and not 1 <= vocabulary_size <= head_weight.shape[0]:
        raise ValueError(f"vocabulary_size must be in 1 … {head_weight.shape[0]}, found {vocabulary_size}")
    return other_head_weight


def _shaped(values: list[Tensor], shape: torch.Size) -> Divergence:
    total_variation, jensen_shannon, cosine = (value.view(shape) for value in values)
    return Divergence(total_variation.clamp(0.0, 1.0), jensen_shannon.clamp(0.0, math.log(2.0)), cosine.clamp(0.0, 1.0))


def _block(h: Tensor, other: Tensor, weight: Tensor, other_weight: Tensor, block: int) -> Tensor:
    """(3, tokens): the sums of all three, for a few tokens."""
    z, n = _normalizers(h, weight, block)
    z_other, n_other = _normalizers(other, other_weight, block)
    # Sums over hundreds of blocks: a few numbers a token, in float64.
    total = torch.zeros(3, h.shape[0], dtype=torch.float64, device=h.device)
    for rows in range(0, weight.shape[0], block):
        logits = h @ weight[rows : rows + block].t()
        other_logits = other @ other_weight[rows : rows + block].t()
        total[2] += (torch.exp(logits - n) - torch.exp(other_logits - n_other)).square_().sum(-1)
        log_q, log_q_other = logits.sub_(z), other_logits.sub_(z_other)
        a = (log_q - log_q_other).abs_()
        larger = torch.maximum(log_q, log_q_other).exp_()
        faded = torch.exp(-a)
        total[0] += (larger * (1.0 - faded)).sum(-1)
        total[1] += (larger * (1.0 + faded) * phi(a, faded)).sum(-1)
    return total.mul_(0.5).to(h.dtype)


def _normalizers(h: Tensor, weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """log Σ exp l and log (Σ exp 2l)^½ of every token, (tokens, 1) each."""
    largest = torch.full((h.shape[0], 1), -math.inf, dtype=h.dtype, device=h.device)
    sums = torch.zeros(2, h.shape[0], 1, dtype=torch.float64, device=h.device)
    for rows in range(0, weight.shape[0], block):
        logits = h @ weight[rows : rows + block].t()
        now = torch.maximum(largest, logits.amax(-1, keepdim=True))
        shrunk = torch.exp(largest - now).double()
        exponentials = torch.exp(logits.sub_(now))
        sums[0] = sums[0] * shrunk + exponentials.sum(-1, keepdim=True)
        sums[1] = sums[1] * shrunk.square() + exponentials.square_().sum(-1, keepdim=True)
        largest = now
    # The difference of two float64 is rounded once.
    z, n = largest.double() + sums[0].log(), largest.double() + 0.5 * sums[1].log()
    return z.to(h.dtype), n.to(h.dtype)


def phi(a: Tensor, faded: Tensor) -> Tensor:
    """φ(a) = log 2 − log(1 + e^−a) − a e^−a / (1 + e^−a) = ½ Σ_± (1 ± δ) log(1 ± δ), δ = tanh(a / 2), for a ≥ 0; `faded` is e^−a."""
    exact = math.log(2.0) - torch.log1p(faded) - a * faded / (1.0 + faded)
    if a.dtype == torch.float64:
        return exact.clamp_(min=0.0)
    # The terms above cancel where a is small; δ² / 2 + δ⁴ / 12 + … + δ²ᵏ / (2k (2k − 1)) do not.
    square = ((1.0 - faded) / (1.0 + faded)).square_()
    series = torch.zeros_like(square)
    for k in range(SERIES_TERMS, 0, -1):
        series = (series + 1.0 / (2 * k * (2 * k - 1))).mul_(square)
    return torch.where(square < SERIES_BELOW, series, exact)


SERIES_TERMS = 6
SERIES_BELOW = 0.1
"""δ² up to which the series is taken. What follows its terms is then 1e-8 of the sum; after five it would be 1.5e-7, more than
rounding to float32 costs."""
