"""State-space duality with a decay mask per head, for decays of any strength (see `farstate.ops.ssd`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops.precision import without_autocast
from farstate.ops.ssd_chunks import chunks, head_sums, unchunk


class MaskedSSD(torch.autograd.Function):
    """One group of heads with common B and C (B, T, N), T divisible by Q; backward written by hand.

    Autograd would keep and re-read about ten intermediates of the size of the masks; here the backward pass needs the
    decay masks, the states between chunks and y. In the code, c counts chunks, `u = dt x` and, within one chunk,

        s_i = Σ_{k≤i} dt_k A,   L_ij = exp(s_i − s_j) for i ≥ j else 0,   M = C Bᵀ ∘ L
        y_i = Σ_j M_ij u_j + exp(s_i) h C_i + D x_i,   h' = exp(s_Q) h + Σ_j exp(s_Q − s_j) u_j B_jᵀ
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        initial_state: Tensor | None,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(x.device):
            batch, time, heads, channels = x.shape
            state_size = B.shape[-1]
            count = time // length
            inner = heads * channels
            x_c, dt_c = chunks(x, length), chunks(dt, length)
            B_c, C_c = (chunks(t, length).reshape(count * batch, length, state_size) for t in (B, C))

            # 1. Cumulative log decays. Summed in float64: their differences are what is exponentiated.
            s = torch.cumsum(dt_c.double() * A.double(), dim=2)
            to_end = torch.exp(s[:, :, -1:] - s).to(x.dtype)
            from_start = torch.exp(s).to(x.dtype)
            L = _decay_masks(s.transpose(2, 3).contiguous(), x.dtype)

            # 2. Within the chunk.
            CB = torch.bmm(C_c, B_c.mT)
            M = CB.view(count, batch, 1, length, length) * L
            u_heads = x.new_empty(count, batch, heads, length, channels)
            torch.mul(x_c.transpose(2, 3), dt_c.transpose(2, 3).unsqueeze(-1), out=u_heads)
            y_heads = torch.bmm(M.view(-1, length, length), u_heads.view(-1, length, channels)).view_as(u_heads)
            y = torch.empty(batch, time, heads, channels, dtype=x.dtype, device=x.device)
            y_c = chunks(y, length)
            if D is None:
                y_c.copy_(y_heads.transpose(2, 3))
            else:
                torch.mul(x_c, D[:, None], out=y_c)
                y_c += y_heads.transpose(2, 3)

            # 3. The state after each chunk; states[c] enters chunk c.
            states = x.new_empty(count + 1, batch, heads, channels, state_size)
            if initial_state is None:
                states[0].zero_()
            else:
                states[0].copy_(initial_state)
            weighted = x.new_empty(count, batch, length, heads, channels)
            torch.mul(x_c, (dt_c * to_end).unsqueeze(-1), out=weighted)
            torch.bmm(weighted.view(-1, length, inner).mT, B_c, out=states[1:].view(-1, inner, state_size))
            decay = from_start[:, :, -1, :, None, None]
            enters = initial_state is not None or count > 1
            for c in range(0 if initial_state is not None else 1, count):
                states[c + 1].addcmul_(states[c], decay[c])

            # 4. What the entering state adds to the output.
            if enters:
                read = torch.bmm(C_c, states[:-1].view(-1, inner, state_size).mT).view_as(weighted)
                y_c.addcmul_(read, from_start.unsqueeze(-1))

            ctx.save_for_backward(x, dt, A, D, B_c, C_c, CB, L, to_end, from_start, states)
            ctx.length, ctx.has_initial, ctx.enters = length, initial_state is not None, enters
            ctx.set_materialize_grads(False)
            # A copy: the caller keeps the final state long after the states between chunks are freed.
            return y, states[-1].clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, D, B_c, C_c, CB, L, to_end, from_start, states = ctx.saved_tensors
        length = ctx.length
        if dy is None and dfinal is None:
            return (None,) * 8
        with without_autocast(x.device):
            batch, time, heads, channels = x.shape
            state_size = B_c.shape[-1]
            count = time // length
            inner = heads * channels
            dy = torch.zeros_like(x) if dy is None else dy
            x_c, dt_c, dy_c = (chunks(t, length) for t in (x, dt, dy))

            # 1. Within the chunk: dM = dy uᵀ, of which only the part under the mask counts. The decay at step k acts on the pairs
            #    j < k ≤ i, so its gradient is Σ_{i≥k} Σ_{j<k} dM_ij M_ij. (Differences of row and column sums would give it too,
            #    but strong decays leave nothing of it between them except rounding.)
            dy_heads = dy_c.transpose(2, 3).contiguous().view(-1, length, channels)
            u_heads = x.new_empty(count, batch, heads, length, channels)
            torch.mul(x_c.transpose(2, 3), dt_c.transpose(2, 3).unsqueeze(-1), out=u_heads)
            M = CB.view(count, batch, 1, length, length) * L
            dM = torch.bmm(dy_heads, u_heads.view(-1, length, channels).mT).view_as(L)
            before = torch.ones(length, length, dtype=x.dtype, device=x.device).triu_(1)
            da = torch.matmul(dM * M, before).tril_().sum(-2).transpose(2, 3)
            dCB = dM.mul_(L).sum(2).view(-1, length, length)
            du = torch.bmm(M.view(-1, length, length).mT, dy_heads).view_as(u_heads).transpose(2, 3)
            dB = torch.bmm(dCB.mT, C_c)
            dC = torch.bmm(dCB, B_c)

            # 2. Through the entering states, then backwards through the chunks; dstates[c] is the gradient of states[c].
            #    All decays up to step i act on what step i reads of the entering state.
            after = dfinal is not None or count > 1
            dstates = None
            if ctx.enters:
                entering = states[:-1].view(-1, inner, state_size)
                dread = x.new_empty(count, batch, length, heads, channels)
                torch.mul(dy_c, from_start.unsqueeze(-1), out=dread)
                read = torch.bmm(C_c, entering.mT).view_as(dread)
                da = da + head_sums(dread, read).flip(2).cumsum(2).flip(2)
                dread = dread.view(-1, length, inner)
                dC.baddbmm_(dread, entering)
                dstates = torch.empty_like(states)
                torch.bmm(dread.mT, C_c, out=dstates[:-1].view(-1, inner, state_size))
            elif after:
                dstates = torch.empty_like(states)
                dstates[:-1].zero_()
            if dstates is not None:
                if dfinal is None:
                    dstates[-1].zero_()
                else:
                    dstates[-1].copy_(dfinal)
                decay = from_start[:, :, -1, :, None, None]
                for c in range(count - 1, -1 if ctx.has_initial else 0, -1):
                    dstates[c].addcmul_(dstates[c + 1], decay[c])

            # 3. Through the states that leave: all decays act on what entered, those after step j on the increment of step j.
            if dstates is not None and after:
                dleaving = dstates[1:].view(-1, inner, state_size)
                dweighted = torch.bmm(B_c, dleaving.mT).view(count, batch, length, heads, channels)
                increment = head_sums(x_c, dweighted).mul_(dt_c * to_end)
                da[:, :, 1:] += increment.cumsum(2)[:, :, :-1]
                da = da + (from_start[:, :, -1] * (dstates[1:] * states[:-1]).sum((-2, -1))).unsqueeze(2)
                du = torch.addcmul(du, dweighted, to_end.unsqueeze(-1))
                weighted = torch.mul(x_c, (dt_c * to_end).unsqueeze(-1), out=dweighted)
                dB.baddbmm_(weighted.view(-1, length, inner), dleaving)

            # 4. Inputs.
            ddt = torch.addcmul(head_sums(x_c, du), da, A)
            dA = (da.double() * dt_c).sum((0, 1, 2)).to(x.dtype)
            dx = torch.empty(batch, time, heads, channels, dtype=x.dtype, device=x.device)
            torch.mul(du, dt_c.unsqueeze(-1), out=chunks(dx, length))
            dD = None
            if D is not None:
                dx.addcmul_(dy, D[:, None])
                dD = head_sums(x_c, dy_c).sum((0, 1, 2))
            dinitial = dstates[0] if ctx.has_initial and dstates is not None else None
            return dx, unchunk(ddt, batch), dA, unchunk(dB, batch), unchunk(dC, batch), dD, dinitial, None


def _decay_masks(s: Tensor, dtype: torch.dtype) -> Tensor:
    """L_ij = exp(s_i − s_j) for i ≥ j, else 0: (..., Q) float64, non-increasing → (..., Q, Q).

    The differences above the diagonal are positive and are cut to zero before the exponential. Below, they are cut where
    the result would leave the normal numbers: a decay of 1e-38 is zero, and denormal arithmetic is slow.
    """
    differences = torch.sub(s.unsqueeze(-1), s.unsqueeze(-2)).to(dtype)
    return differences.clamp_(min=math.log(torch.finfo(dtype).tiny), max=0.0).exp_().tril_()
