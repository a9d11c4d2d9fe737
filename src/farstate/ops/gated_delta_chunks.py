"""The gated delta rule over chunks, with a backward pass written by hand (see `farstate.ops.gated_delta`).

Within a chunk of Q steps that S enters, rows i and j of matrices standing for steps, s_i = Σ_{j≤i} g_j and
D_ij = exp(s_i − s_j) for i ≥ j (no other difference is used, so that nothing overflows):

    N = K Kᵀ ∘ D below the diagonal,   M = scale Q Kᵀ ∘ D on and below it
    (I + β N) U = β (V − e^s K S)                  what each step writes depends on what the steps before it wrote
    O = e^s scale Q S + M U,   S' = e^{s_Q} S + (e^{s_Q − s} K)ᵀ U

With T = (I + β N)⁻¹ the writes are U = Tβ V − W S, W = Tβ e^s K (Yang et al. 2024, arXiv 2406.06484: the WY form), and only two
products a chunk are sequential. An entry of T says how a write answers to an earlier one: for unit keys and β in [0, 2] it
is at most 2, so that the inverse is as safe as a solution.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops.precision import without_autocast

# The difference of two infinite sums of log decays would be NaN; exp of this is zero in any precision.
_SMALLEST = -1e4


class GatedDelta(torch.autograd.Function):
    """q (scaled), k (B, T, H, K), v (B, T, H, V), log_decay, beta (B, T, H), T divisible by Q.

    In the code the rows of a batch are chunks, each with all sequences and heads: (T / Q · B · H, Q, ...), R rows in all and
    `width` = B · H in a chunk. States are (R + width, K, V): row r of it enters chunk row r, row r + width leaves it.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None, length: int
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(v.device):
            batch, time, heads, values = v.shape
            width, keys = batch * heads, q.shape[-1]
            rows = time // length * width
            q_c, k_c, v_c = (_rows(t, length).contiguous().view(rows, length, -1) for t in (q, k, v))
            b_c = _rows(beta, length).reshape(rows, length, 1)

            # 1. Decays. Summed in float64: their differences are what is exponentiated.
            s = _rows(log_decay.clamp(min=_SMALLEST), length).reshape(rows, length, 1).double().cumsum(1)
            from_start, to_end = _decays(s, v.dtype), _decays(s[:, -1:] - s, v.dtype)
            D = _decays(s - s.mT, v.dtype).tril_()

            # 2. Within the chunk.
            N = torch.bmm(k_c, k_c.mT).mul_(D).tril_(-1)
            M = torch.bmm(q_c, k_c.mT).mul_(D)
            T = unit_lower_inverse(N * b_c)
            T_beta = T * b_c.mT
            U = torch.bmm(T_beta, v_c)
            W = torch.bmm(T_beta.mul_(from_start.mT), k_c)

            # 3. From chunk to chunk. What no state enters does not read one.
            states = v.new_empty(rows + width, keys, values)
            first = 0 if initial_state is not None else width
            if initial_state is not None:
                states[:width].copy_(initial_state.reshape(width, keys, values))
            k_end, decay = (k_c * to_end).mT, from_start[:, -1:]
            for r in range(0, rows, width):
                here, left = slice(r, r + width), states[r + width : r + 2 * width]
                if r < first:
                    torch.bmm(k_end[here], U[here], out=left)
                else:
                    U[here].baddbmm_(W[here], states[here], alpha=-1.0)
                    torch.mul(states[here], decay[here], out=left)
                    left.baddbmm_(k_end[here], U[here])

            # 4. Outputs.
            o = torch.bmm(M, U)
            o[first:].baddbmm_(q_c[first:] * from_start[first:], states[first:rows])

            ctx.save_for_backward(q_c, k_c, v_c, b_c, from_start, to_end, D, N, M, T, W, U, states)
            ctx.sizes = batch, heads, length, initial_state is not None
            ctx.set_materialize_grads(False)
            # A copy: the caller keeps the final state long after the states between chunks are freed.
            return _unrows(o, batch, heads), states[rows:].clone().view(batch, heads, keys, values)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q_c, k_c, v_c, b_c, from_start, to_end, D, N, M, T, W, U, states = ctx.saved_tensors
        batch, heads, length, has_initial = ctx.sizes
        if do is None and dfinal is None:
            return (None,) * 7
        with without_autocast(v_c.device):
            rows, width = len(v_c), batch * heads
            keys, values = states.shape[1:]
            first = 0 if has_initial else width
            last = rows if dfinal is not None else rows - width
            do_c = torch.zeros_like(v_c) if do is None else _rows(do, length).reshape(rows, length, values)

            # 1. Back from chunk to chunk; dU is the gradient of the writes, dstates[r] that of states[r].
            dU = torch.bmm(M.mT, do_c)
            do_start = do_c * from_start
            dstates = torch.empty_like(states)
            torch.bmm(q_c.mT, do_start, out=dstates[:rows])
            if dfinal is not None:
                dstates[rows:].copy_(dfinal.reshape(width, keys, values))
            k_end, decay = k_c * to_end, from_start[:, -1:]
            for r in range(rows - width, -1, -width):
                here, leaving = slice(r, r + width), dstates[r + width : r + 2 * width]
                if r < last:
                    dU[here].baddbmm_(k_end[here], leaving)
                if r >= first:
                    if r < last:
                        dstates[here].addcmul_(leaving, decay[here])
                    dstates[here].baddbmm_(W[here].mT, dU[here], alpha=-1.0)

            # 2. Through the solution: dX is the gradient of β (V − e^s K S) and of −β N U alike.
            dX = torch.bmm(T.mT, dU)
            dN = torch.bmm(dX, U.mT).neg_().tril_(-1)
            dbeta = (dX * v_c).sum(-1, keepdim=True)
            dbeta += (dN * N).sum(-1, keepdim=True)
            dN *= b_c
            dM = torch.bmm(do_c, U.mT).tril_()

            # 3. The decay at step n acts on the pairs j < n ≤ i, so its gradient is Σ_{i≥n} Σ_{j<n} of dM ∘ M + dN ∘ N. (Differences
            #    of row and column sums would give it too, but strong decays leave nothing of it between them except rounding.)
            before = torch.ones(length, length, dtype=D.dtype, device=D.device).triu_(1)
            pairs = torch.mul(dM, M).addcmul_(dN, N)
            dg = torch.matmul(pairs, before).tril_().sum(1).unsqueeze(-1)
            dM *= D
            dN *= D
            dk = torch.bmm(dM.mT, q_c)
            dk.baddbmm_(dN + dN.mT, k_c)
            dq = torch.bmm(dM, k_c)

            # 4. What entered: all decays up to step i act on what step i reads of it.
            if first < rows:
                entered = slice(first, rows)
                dread = torch.bmm(do_start[entered], states[entered].mT)
                dq[entered] += dread
                reads = (q_c[entered] * dread).sum(-1, keepdim=True)
                dread = torch.bmm(dX[entered], states[entered].mT).mul_(from_start[entered]).neg_()
                recalls = (k_c[entered] * dread).sum(-1, keepdim=True)
                dbeta[entered] += recalls
                dk[entered].addcmul_(dread, b_c[entered])
                reads.addcmul_(recalls, b_c[entered])
                dg[entered] += reads.flip(1).cumsum(1).flip(1)

            # 5. What left: all decays act on what entered, those after step j on the write of step j.
            if last > 0:
                leaving = dstates[width : last + width]
                dwrite = torch.bmm(U[:last], leaving.mT).mul_(to_end[:last])
                dk[:last] += dwrite
                writes = (k_c[:last] * dwrite).sum(-1, keepdim=True)
                dg[:last, 1:] += writes.cumsum(1)[:, :-1]
                if first < last:
                    kept = (dstates[first + width : last + width] * states[first:last]).sum((-2, -1), keepdim=True)
                    dg[first:last] += kept.mul_(decay[first:last])

            dinitial = dstates[:width].view(batch, heads, keys, values) if has_initial else None
            dv = dX.mul_(b_c)
            return (
                *(_unrows(t, batch, heads) for t in (dq, dk, dv)),
                *(_unrows(t, batch, heads)[..., 0] for t in (dg, dbeta)),
                dinitial,
                None,
            )


def unit_lower_inverse(A: Tensor) -> Tensor:
    """(I + A)⁻¹ for A (R, Q, Q), zero on and above the diagonal."""
    length = A.shape[-1]
    if length <= 32:
        identity = torch.eye(length, dtype=A.dtype, device=A.device)
        return torch.linalg.solve_triangular(A + identity, identity.expand_as(A), upper=False, unitriangular=True)
    # The inverse by blocks: matrix products are faster than a long substitution.
    half = length // 2
    top, bottom = unit_lower_inverse(A[:, :half, :half]), unit_lower_inverse(A[:, half:, half:])
    inverse = torch.zeros_like(A)
    inverse[:, :half, :half], inverse[:, half:, half:] = top, bottom
    torch.bmm(bottom, torch.bmm(A[:, half:, :half], top), out=inverse[:, half:, :half]).neg_()
    return inverse


def _decays(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """exp of differences; what would come close to the denormal numbers, which are slow, is zero.

    Positive ones, which stand above the diagonal only, may become infinite until the caller overwrites them.
    """
    smallest = 0.9 * math.log(torch.finfo(dtype).tiny)
    return F.threshold(exponents.to(dtype), smallest, -math.inf).exp_()


def _rows(tensor: Tensor, length: int) -> Tensor:
    """(B, T, H, ...) → (T / Q, B, H, Q, ...), a view."""
    return tensor.unflatten(1, (-1, length)).movedim((1, 0, 3), (0, 1, 2))


def _unrows(tensor: Tensor, batch: int, heads: int) -> Tensor:
    """(T / Q · B · H, Q, X) → (B, T, H, X)."""
    return tensor.unflatten(0, (-1, batch, heads)).permute(1, 0, 3, 2, 4).flatten(1, 2)
