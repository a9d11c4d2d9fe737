"""Vector decays of any strength: each pair of steps is factored at the middle of the smallest block that holds both (see `vector_decay`).

A chunk of Q steps, a power of two, is halved, its halves are halved, and so on. Two steps j < i part at one level, j in the
first and i in the second half of a block of 2c steps; between them lie the decays after j to the end of the first half, and
those from the start of the second half to step i. With the sums of these,

    X_i = r_i ∘ exp(Σ from the start of its half to i),   X_j = k_j ∘ exp(Σ after j to the end of its half)
    A_ij = X_i · X_j

at each of the log₂ Q levels; the entering and the leaving state are one level more, in which the chunk is the second or
the first half. Every exponent is a sum of decays and of nothing else: no overflow at any strength, no difference of large numbers,
in the gradients neither. The decays that act up to step i include that of step i without bonus, and exclude it with one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops.precision import without_autocast
from farstate.ops.vector_decay_chunks import (
    by_head,
    by_time,
    matrices,
    ones_to,
    over_steps,
    pass_back,
    pass_on,
    product_by_head,
    set_diagonal,
    steps,
    times_by_time,
)

# The product of zero and an infinite log decay would be NaN; exp of this is zero in any precision.
_SMALLEST = -1e4


class HalvedDecays(torch.autograd.Function):
    """T divisible by Q, Q a power of two; backward written by hand. Shapes: see `vector_decay.chunked`."""

    @staticmethod
    def forward(
        ctx: Any,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        bonus: Tensor | None,
        scale: float,
        initial_state: Tensor | None,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(r.device):
            batch, time, heads, keys = r.shape
            count, values = time // length, v.shape[-1]
            first = 0 if initial_state is not None else 1
            g = steps(log_decay.clamp(min=_SMALLEST), length)
            decays = [over_steps(span, g).exp_().view(r.shape) for span in _spans(length, bonus is None, g)]
            chunk_decay = g.sum(1).exp_().view(batch, count, heads, keys, 1).transpose(0, 1)
            v_c = by_head(v, length).contiguous()

            # 1. Pairs of steps, level by level.
            A = r.new_zeros(count * batch * heads, length, length)
            set_diagonal(A, (r * k if bonus is None else r * k * bonus).sum(-1, keepdim=True))
            for half, decay in zip(_halves(length), decays[:-2], strict=True):
                later, earlier = _pair_factors(r, k, decay, half, length)
                pairs = torch.bmm(later, earlier.mT)
                _pairs(A, half).copy_(pairs.view(-1, length // (2 * half), half, half))

            # 2. The state after each chunk; states[c] enters chunk c.
            reading, leaving = product_by_head(r, decays[-2], length), product_by_head(k, decays[-1], length)
            states = r.new_empty(count + 1, batch, heads, keys, values)
            torch.bmm(matrices(leaving).mT, matrices(v_c), out=matrices(states[1:]))
            pass_on(states, chunk_decay, initial_state)

            # 3. Outputs: what the chunk reads of itself, and of the state that entered it.
            o = torch.bmm(A, matrices(v_c)).view_as(v_c)
            matrices(o[first:]).baddbmm_(matrices(reading[first:]), matrices(states[first:-1]))

            ctx.save_for_backward(r, k, bonus, v_c, A, reading, leaving, chunk_decay, states, *decays)
            ctx.scale, ctx.length, ctx.first = scale, length, first
            ctx.set_materialize_grads(False)
            # A copy: the caller keeps the final state long after the states between chunks are freed.
            return by_time(o, scale), states[-1].clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        r, k, bonus, v_c, A, reading, leaving, chunk_decay, states, *decays = ctx.saved_tensors
        length, first = ctx.length, ctx.first
        if do is None and dfinal is None:
            return (None,) * 8
        with without_autocast(r.device):
            do_c = torch.zeros_like(v_c) if do is None else by_head(do, length).mul(ctx.scale).contiguous()

            # 1. Within the chunk: A, and its diagonal, in which no decay acts.
            dA = torch.bmm(matrices(do_c), matrices(v_c).mT)
            dv = torch.bmm(A.mT, matrices(do_c)).view_as(v_c)
            ddiagonal = by_time(dA.diagonal(dim1=1, dim2=2).view(*do_c.shape[:-1], 1))
            dr, dk = ddiagonal * k, ddiagonal * r
            dbonus = None
            if bonus is not None:
                dbonus = (dr * r).sum((0, 1))
                dr *= bonus
                dk *= bonus

            # 2. Through the states, from the last chunk to the first. All decays of a chunk act on what crosses it.
            dstates = torch.empty_like(states)
            dstates[:first].zero_()
            torch.bmm(matrices(reading[first:]).mT, matrices(do_c[first:]), out=matrices(dstates[first:-1]))
            pass_back(dstates, chunk_decay, dfinal)
            crossing = (dstates[1:] * states[:-1]).sum(-1, keepdim=True).mul_(chunk_decay).transpose(0, 1)
            dg = crossing.reshape(-1, 1, r.shape[2] * r.shape[3]).repeat(1, length, 1)
            matrices(dv).baddbmm_(matrices(leaving), matrices(dstates[1:]))
            dreading, dleaving = torch.empty_like(reading), torch.empty_like(leaving)
            dreading[:first].zero_()
            torch.bmm(matrices(do_c[first:]), matrices(states[first:-1]).mT, out=matrices(dreading[first:]))
            torch.bmm(matrices(v_c), matrices(dstates[1:]).mT, out=matrices(dleaving))

            # 3. Factors to their inputs and their decays.
            *pair_spans, reading_span, leaving_span = _spans(length, bonus is None, dg)
            for x, dx, dfactor, decay, span in (
                (r, dr, dreading, decays[-2], reading_span),
                (k, dk, dleaving, decays[-1], leaving_span),
            ):
                scaled = times_by_time(dfactor, decay, length)
                dx += scaled
                _add_over_steps(dg, span, scaled.mul_(x))
            for half, decay, span in zip(_halves(length), decays[:-2], pair_spans, strict=True):
                later, earlier = _pair_factors(r, k, decay, half, length)
                dpairs = _pairs(dA, half).reshape(-1, half, half)
                scaled = torch.empty_like(dr)
                for position, x, dx, dfactor in (
                    (1, r, dr, torch.bmm(dpairs, earlier)),
                    (0, k, dk, torch.bmm(dpairs.mT, later)),
                ):
                    acting, target = (_half_by_head(t, half, position, length) for t in (decay, scaled))
                    torch.mul(dfactor.view(acting.shape), acting, out=target)
                    part = _half(scaled, half, position)
                    _half(dx, half, position).add_(part)
                    part *= _half(x, half, position)
                _add_over_steps(dg, span, scaled)
            dinitial = dstates[0] if first == 0 else None
            return dr, dk, by_time(dv), dg.view(r.shape), dbonus, None, dinitial, None


def _halves(length: int) -> list[int]:
    """c at each level: 1, 2, 4 … Q / 2."""
    return [1 << level for level in range(length.bit_length() - 1)]


def _spans(length: int, inclusive: bool, like: Tensor) -> list[Tensor]:
    """(Q, Q) of 0 and 1 for each level, then for the entering and for the leaving state: row i marks the decays in the factor of step i."""
    before = ones_to(length, 0 if inclusive else -1, like)
    after = ones_to(length, -1, like).mT
    step = torch.arange(length, device=like.device)
    spans = []
    for half in _halves(length):
        block = step // half
        in_block = block.unsqueeze(1) == block
        spans.append(torch.where((block % 2 == 1).unsqueeze(1), before, after) * in_block)
    return [*spans, before, after]


def _half(tensor: Tensor, half: int, position: int) -> Tensor:
    """The first (0) or second (1) halves of all blocks: (B, T, H, X) → (B, T / 2c, c, H, X), a view."""
    return tensor.unflatten(1, (-1, 2, half))[:, :, position]


def _half_by_head(tensor: Tensor, half: int, position: int, length: int) -> Tensor:
    """The same as matrices of a head: (B, T, H, X) → (T / Q, B, H, Q / 2c, c, X), a view."""
    return by_head(tensor, length).unflatten(3, (-1, 2, half))[..., position, :, :]


def _pairs(A: Tensor, half: int) -> Tensor:
    """The part of A (M, Q, Q) whose steps part at this level, second half by first: (M, Q / 2c, c, c), a view."""
    blocks = A.unflatten(2, (-1, 2 * half)).unflatten(1, (-1, 2 * half)).diagonal(dim1=1, dim2=3)
    return blocks[:, half:, :half].permute(0, 3, 1, 2)


def _pair_factors(r: Tensor, k: Tensor, decay: Tensor, half: int, length: int) -> tuple[Tensor, Tensor]:
    """X of the second halves, from r, and of the first, from k: (T / 2c · B · H, c, K) each, dense."""
    factors = []
    for position, x in ((1, r), (0, k)):
        parts = [_half_by_head(t, half, position, length) for t in (x, decay)]
        factors.append(torch.mul(*parts, out=x.new_empty(parts[0].shape)).view(-1, half, x.shape[-1]))
    return factors[0], factors[1]


def _add_over_steps(dg: Tensor, span: Tensor, dsum: Tensor) -> None:
    """Each decay gets the gradients of the sums that hold it; dg (B · T / Q, Q, H · K)."""
    dg.baddbmm_(span.mT.expand(dg.shape[0], -1, -1), steps(dsum, dg.shape[1]))
