"""Vector decays factored at one point of a chunk, for chunks over which no channel fades below exp(−60) (see `vector_decay`).

With s_i = Σ_{k≤i} g_k − μ from the start of the chunk, where μ = Σ_k g_k / 2 is half of all, and s̄_i the part of it that acts
before step i is read (s_i without bonus, s_{i−1} with one),

    R_i = r_i ∘ exp(s̄_i),   F_j = k_j ∘ exp(−s_j),   A = tril(R Fᵀ), with bonus: its diagonal is Σ_n r u k
    o = scale · (A v + R S),   S' = diag(exp(μ + μ')) (S + Fᵀ v)

Here S is the entering state times exp(μ), and S' the leaving one times the exp(μ') of the next chunk, or of 0 after the last.
The sums run over j ≤ i only, where no term exceeds its own final size, so that the factors may be large; what they lose is the
rounding of s. The price is the range, so the caller sees to 2 μ ≥ `smallest_log_decay(Q)`; factors stay within exp(±30).

Gradients of the decays. g_m acts on what passes it: on pairs of a step j < m that writes and a step i that reads, i ≥ m
without and i > m with bonus, on what these i read of S, on what these j leave in S', and on what crosses the chunk. With
ρ_i = r_i ∘ ∂/∂r_i and κ_j = k_j ∘ ∂/∂k_j, as far as decays act there,

    ∂/∂g_m = σ − Σ_{i<m} ρ_i + Σ_{j<m} κ_j (− ρ_m with bonus),   σ = Σ_v S ∘ ∂/∂S, of which all decays act

No decay acts on the pairs of a step with itself, nor with bonus on those of neighbours and on what the first step reads of S.
In ρ, κ and σ these would cancel in exact arithmetic only, and leave rounding of the size of o where strong decays leave
little else, so they are kept apart. The sums run from the start for the same reason: from the end they would begin with
S' ∘ ∂/∂S', which holds what step Q wrote itself.
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
    pass_on,
    product_by_head,
    set_diagonal,
    steps,
    times_by_time,
)


def smallest_log_decay(length: int) -> float:
    """How far a channel may fade over a chunk: factors within exp(±30) leave float32 room for products from 1e−20 to 1e20.

    Short chunks are bounded by the step. The gradient of a decay is formed as a difference, of which a step that forgets
    nearly everything would leave nothing but rounding.
    """
    return max(-60.0, -3.75 * length)


class FactoredDecays(torch.autograd.Function):
    """T divisible by Q; backward written by hand. Shapes: see `vector_decay.chunked`."""

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

            # 1. Decays, and the factors that carry them.
            g = steps(log_decay, length)
            s = over_steps(ones_to(length, 0, g) - 0.5, g)
            middle = s[:, -1].view(batch, count, heads, keys, 1).transpose(0, 1)
            decay = torch.exp(middle + torch.cat([middle[1:], torch.zeros_like(middle[:1])]))
            half = middle[0].exp()
            # With bonus the very numbers of the step before, so that the factors of neighbours cancel to rounding of 1.
            e = (torch.exp(s) if bonus is None else torch.cat([-s[:, -1:], s[:, :-1]], dim=1).exp_()).view(r.shape)
            f = s.neg_().exp_().view(r.shape)
            R, F = product_by_head(r, e, length), product_by_head(k, f, length)
            v_c = by_head(v, length).contiguous()

            # 2. The state after each chunk; states[c] enters chunk c.
            states = r.new_empty(count + 1, batch, heads, keys, values)
            torch.bmm(matrices(F).mT, matrices(v_c), out=matrices(states[1:]))
            states[1:] *= decay
            pass_on(states, decay, None if initial_state is None else initial_state * half)

            # 3. Outputs: what the chunk reads of itself, and of the state that entered it.
            A = torch.bmm(matrices(R), matrices(F).mT)
            if bonus is None:
                A.tril_()
            else:
                A.tril_(-1)
                set_diagonal(A, (r * k * bonus).sum(-1, keepdim=True))
            o = torch.bmm(A, matrices(v_c)).view_as(v_c)
            matrices(o[first:]).baddbmm_(matrices(R[first:]), matrices(states[first:-1]))

            ctx.save_for_backward(r, k, bonus, e, f, R, F, v_c, A, half, decay, states)
            ctx.scale, ctx.length, ctx.first = scale, length, first
            ctx.set_materialize_grads(False)
            # A copy: the caller keeps the final state long after the states between chunks are freed.
            return by_time(o, scale), states[-1].clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        r, k, bonus, e, f, R, F, v_c, A, half, decay, states = ctx.saved_tensors
        length, first = ctx.length, ctx.first
        if do is None and dfinal is None:
            return (None,) * 8
        with without_autocast(r.device):
            do_c = torch.zeros_like(v_c) if do is None else by_head(do, length).mul(ctx.scale).contiguous()

            # 1. Within the chunk; first the pairs on which decays act.
            dA = torch.bmm(matrices(do_c), matrices(v_c).mT)
            dv = torch.bmm(A.mT, matrices(do_c)).view_as(v_c)
            dself = by_time(dA.diagonal(dim1=1, dim2=2).view(*do_c.shape[:-1], 1))
            dneighbours = None if bonus is None else _below_the_diagonal(dA, do_c)
            dA.tril_(-1 if bonus is None else -2)
            dR = torch.bmm(dA, matrices(F)).view_as(R)
            dF = torch.bmm(dA.mT, matrices(R)).view_as(F)

            # 2. Through the states, from the last chunk to the first, and σ on the way. With bonus the first step of a chunk reads
            #    what no decay of the chunk has acted on: it joins after σ.
            faded = slice(0 if bonus is None else 1, None)
            dstates = torch.empty_like(states)
            torch.bmm(matrices(R[first:])[:, faded].mT, matrices(do_c[first:])[:, faded], out=matrices(dstates[first:-1]))
            matrices(dR[first:]).baddbmm_(matrices(do_c[first:]), matrices(states[first:-1]).mT)
            if dfinal is None:
                dstates[-1].zero_()
            else:
                dstates[-1].copy_(dfinal)
            crossing = r.new_zeros(decay.shape[:-1])
            for c in range(decay.shape[0] - 1, first - 1, -1):
                dstates[c].addcmul_(dstates[c + 1], decay[c])
                crossing[c] = (dstates[c] * states[c]).sum(-1)
                if bonus is not None:
                    dstates[c].addcmul_(R[c, :, :, 0].unsqueeze(-1), do_c[c, :, :, :1])
            dbracket = matrices(dstates[1:] * decay)
            matrices(dF).baddbmm_(matrices(v_c), dbracket.mT)
            matrices(dv).baddbmm_(matrices(F), dbracket)

            # 3. Inputs; first the gradients through R and F, and with them the decays.
            dr, dk = times_by_time(dR, e, length), times_by_time(dF, f, length)
            reading = r * dr
            if bonus is not None:
                reading.unflatten(1, (-1, length))[:, :, 0] = 0.0
            passing = (k * dk).sub_(reading)
            before = ones_to(length, -1, passing).expand(crossing.shape[0] * crossing.shape[1], -1, -1)
            entered = crossing.transpose(0, 1).reshape(before.shape[0], 1, -1)
            dg = torch.baddbmm(entered, before, steps(passing, length)).view(r.shape)
            dbonus = None
            own = dself
            if dneighbours is not None:
                dg -= reading
                dr[:, 1:].addcmul_(dneighbours[:, 1:], k[:, :-1])
                dk[:, :-1].addcmul_(dneighbours[:, 1:], r[:, 1:])
                dbonus = (dself * r * k).sum((0, 1))
                own = dself * bonus
            dr.addcmul_(own, k)
            dk.addcmul_(own, r)
            dinitial = dstates[0] * half if first == 0 else None
            return dr, dk, by_time(dv), dg, dbonus, None, dinitial, None


def _below_the_diagonal(dA: Tensor, like: Tensor) -> Tensor:
    """dA (M, Q, Q) at (i, i − 1), zero for the first step of a chunk: (B, T, H, 1); `like` is (T / Q, B, H, Q, X)."""
    entries = dA.new_zeros(*like.shape[:-1], 1)
    entries.view(-1, like.shape[3])[:, 1:] = dA.diagonal(-1, dim1=1, dim2=2)
    return by_time(entries)
