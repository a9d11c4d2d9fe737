"""Negative log likelihoods without logits: the head and the softmax in chunks of tokens.

Shapes: hidden (..., D), head_weight (padded V, D), targets (...), int64. NLL is in nats. Logits of one chunk are all that
ever exists. They are float32 (float64 in a float64 model) even where their factors are bfloat16, as under autocast.

Padding. `vocabulary_size=None` takes the softmax over every row of the head, padding included, as mamba-ssm and
transformers do: their published perplexities contain the padded entries. A number takes the first so many rows only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops.precision import compute_dtype, without_autocast


def token_nll(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    vocabulary_size: int | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """−log q(target) of every token, in nats: (...), float32 or float64. Differentiable in hidden and head_weight.

    The backward pass computes the logits a second time; `mean_nll` does not, and is the one to train with.

    Raises:
        ValueError: shapes that do not fit each other, or a vocabulary larger than the head.
    """
    rows, head_weight, chunk_tokens, factors = _prepare(hidden, head_weight, targets, vocabulary_size, chunk_tokens)
    nll: Tensor = _TokenNLL.apply(rows, head_weight, targets.reshape(-1), chunk_tokens, factors)
    return nll.view(targets.shape)


def mean_nll(
    hidden: Tensor,
    head_weight: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    vocabulary_size: int | None = None,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Σ weights · NLL / Σ weights, a scalar in nats; `weights=None` is the mean over all tokens.

    The linear cross entropy for training: the gradient is formed in the forward pass, chunk by chunk, while the logits are
    there, so that they are computed once. `weights` (...), real or boolean, is a constant.

    Raises:
        ValueError: as `token_nll`; or weights of another shape, or whose sum is not positive.
    """
    rows, head_weight, chunk_tokens, factors = _prepare(hidden, head_weight, targets, vocabulary_size, chunk_tokens)
    if weights is not None:
        if weights.shape != targets.shape:
            raise ValueError(f"weights must have the shape of targets {tuple(targets.shape)}, found {tuple(weights.shape)}")
        weights = weights.detach().flatten().to(compute_dtype(hidden))
        total = weights.sum()
        if not total > 0.0:
            raise ValueError("no token to score: the weights sum to zero")
        weights = weights / total
    loss: Tensor = _MeanNLL.apply(rows, head_weight, targets.reshape(-1), weights, chunk_tokens, factors)
    return loss


def default_chunk_tokens(device: torch.device, rows: int) -> int:
    """Tokens whose logits take about 4 MB on a CPU (they stay in its cache) or 1 GB elsewhere, but not fewer than 256."""
    return max(256, (1 << (20 if device.type == "cpu" else 28)) // rows)


def _prepare(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, vocabulary_size: int | None, chunk_tokens: int | None
) -> tuple[Tensor, Tensor, int, torch.dtype]:
    """Checked: hidden as rows, the rows of the head that count, the chunk, and the dtype in which both are multiplied."""
    if hidden.shape[:-1] != targets.shape or head_weight.dim() != 2 or hidden.shape[-1] != head_weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, head_weight {tuple(head_weight.shape)} and targets {tuple(targets.shape)} do not fit each other"
        )
    if vocabulary_size is not None:
        if not 1 <= vocabulary_size <= head_weight.shape[0]:
            raise ValueError(f"vocabulary_size must be in 1 … {head_weight.shape[0]}, found {vocabulary_size}")
        head_weight = head_weight[:vocabulary_size]
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(hidden.device, head_weight.shape[0])
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, found {chunk_tokens}")
    factors = torch.promote_types(hidden.dtype, head_weight.dtype)
    if factors == torch.float32 and torch.is_autocast_enabled(hidden.device.type):
        factors = torch.get_autocast_dtype(hidden.device.type)
    return hidden.reshape(-1, hidden.shape[-1]), head_weight, chunk_tokens, factors


def _product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """left @ right in float32 (or float64) from half-precision factors; only a GPU has an instruction for it."""
    if left.dtype in (torch.bfloat16, torch.float16):
        if left.is_cuda:
            return torch.mm(left, right, out_dtype=torch.float32)
        left, right = left.float(), right.float()
    return torch.mm(left, right) if out is None else torch.mm(left, right, out=out)


def _chunks_of_logits(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_tokens: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each chunk: its rows, its logits (rows, V), the logit of each target (rows,). The logits' memory is used again."""
    count = hidden.shape[0]
    dtype = compute_dtype(hidden, head_weight)
    buffer = torch.empty(min(chunk_tokens, count), head_weight.shape[0], dtype=dtype, device=hidden.device)
    for start in range(0, count, chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        logits = _product(hidden[rows], head_weight.t(), out=buffer[: min(chunk_tokens, count - start)])
        yield rows, logits, logits.gather(1, targets[rows, None]).squeeze(1)


def _softmax_in_place(logits: Tensor) -> Tensor:
    """Turn logits (rows, V) into probabilities and return log Σ exp of the logits, (rows,).

    One exponential serves both: log Σ exp = max logit − log max probability, and that probability is at least 1 / V.
    """
    largest = logits.amax(1)
    return largest - torch.softmax(logits, dim=1, out=logits).amax(1).log()


class _TokenNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_tokens: int, factors: torch.dtype
    ) -> Tensor:
        with without_autocast(hidden.device):
            nll = torch.empty(targets.shape, dtype=compute_dtype(hidden, head_weight), device=hidden.device)
            chunks = _chunks_of_logits(hidden.to(factors), head_weight.to(factors), targets, chunk_tokens)
            for rows, logits, target_logits in chunks:
                nll[rows] = _softmax_in_place(logits) - target_logits
        ctx.save_for_backward(hidden, head_weight, targets)
        ctx.chunk_tokens, ctx.factors = chunk_tokens, factors
        return nll

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dnll: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight, targets = ctx.saved_tensors
        with without_autocast(hidden.device):
            left, right = hidden.to(ctx.factors), head_weight.to(ctx.factors)
            gradients = _Gradients(left, right, *ctx.needs_input_grad[:2])
            for rows, logits, _ in _chunks_of_logits(left, right, targets, ctx.chunk_tokens):
                gradients.add(rows, torch.softmax(logits, dim=1, out=logits), targets[rows], dnll[rows])
        return gradients.of_hidden(hidden.dtype), gradients.of_weight(head_weight.dtype), None, None, None


class _MeanNLL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        weights: Tensor | None,
        chunk_tokens: int,
        factors: torch.dtype,
    ) -> Tensor:
        dtype = compute_dtype(hidden, head_weight)
        count = targets.shape[0]
        if weights is None:
            weights = torch.full((count,), 1.0 / count, dtype=dtype, device=hidden.device)
        with without_autocast(hidden.device):
            left, right = hidden.to(factors), head_weight.to(factors)
            gradients = _Gradients(left, right, *ctx.needs_input_grad[:2])
            nll = torch.empty(count, dtype=dtype, device=hidden.device)
            for rows, logits, target_logits in _chunks_of_logits(left, right, targets, chunk_tokens):
                nll[rows] = _softmax_in_place(logits) - target_logits
                gradients.add(rows, logits, targets[rows], weights[rows])
            # In float64: the sum over many tokens loses nothing.
            loss = torch.dot(nll.double(), weights.double()).to(dtype)
        ctx.save_for_backward(gradients.of_hidden(hidden.dtype), gradients.of_weight(head_weight.dtype))
        return loss

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = (None if g is None else g * dloss.to(g.dtype) for g in ctx.saved_tensors)
        return dhidden, dweight, None, None, None, None


class _Gradients:
    """Sums, over chunks, the gradients of Σ_t weight_t · NLL_t with respect to hidden and head_weight."""

    def __init__(self, hidden: Tensor, head_weight: Tensor, needs_hidden: bool, needs_weight: bool) -> None:
        self.hidden, self.head_weight = hidden, head_weight
        dtype = compute_dtype(hidden, head_weight)
        self.dhidden = torch.empty(hidden.shape, dtype=dtype, device=hidden.device) if needs_hidden else None
        self.dweight = torch.zeros(head_weight.shape, dtype=dtype, device=hidden.device) if needs_weight else None

    def add(self, rows: slice, probabilities: Tensor, targets: Tensor, weights: Tensor) -> None:
        """`probabilities` (rows, V) is overwritten; weights (rows,) scale the narrow factors, not the logits."""
        if self.dhidden is None and self.dweight is None:
            return
        minus_one = torch.full((targets.shape[0], 1), -1.0, dtype=probabilities.dtype, device=probabilities.device)
        dlogits = probabilities.scatter_add_(1, targets[:, None], minus_one).to(self.hidden.dtype)
        scale = weights[:, None]
        if self.dhidden is not None:
            torch.mul(_product(dlogits, self.head_weight), scale, out=self.dhidden[rows])
        if self.dweight is not None:
            scaled = (self.hidden[rows] * scale).to(self.hidden.dtype)
            if dlogits.dtype == self.dweight.dtype:
                self.dweight.addmm_(dlogits.t(), scaled)
            else:
                self.dweight += _product(dlogits.t(), scaled)

    def of_hidden(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.dhidden is None else self.dhidden.to(dtype)

    def of_weight(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.dweight is None else self.dweight.to(dtype)
