"""State-space duality with factored decays, for chunks in which no state fades below exp(−60) (see `farstate.ops.ssd`).

With s_i = Σ_{k≤i} dt_k A from the start of a chunk, exp(s_i − s_j) = e_i f_j with e = exp(s) and f = exp(−s). The decays of
a head then scale the rows of its inputs and outputs, and what is left is the same for all heads of a group:

    F_j = f_j dt_j x_j,   K = tril(C Bᵀ)
    y_i = e_i ( Σ_j K_ij F_j + h C_i ) + D x_i,   h' = e_Q ( h + Σ_j F_j B_jᵀ )

so that the Q × Q masks, one for each head, disappear, and the heads fill one wide matrix product. The factors carry a
relative error each, however large the exponents; the sums run over j ≤ i only, where no term exceeds its own final size.
The price is the range: f must stay finite, so the caller sees to s_Q ≥ `smallest_log_decay(Q)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops.precision import without_autocast
from farstate.ops.ssd_chunks import chunks, head_sums, unchunk


def smallest_log_decay(length: int) -> float:
    """How far a chunk of `length` steps may fade: exp(60) leaves room in float32 for the numbers it multiplies.

    Short chunks are bounded by the step. The gradient of a decay is formed as a difference, of which a step that forgets
    nearly everything would leave nothing but rounding.
    """
    return max(-60.0, -3.75 * length)


class FactoredSSD(torch.autograd.Function):
    """One group of heads with common B and C (B, T, N), T divisible by Q; backward written by hand."""

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
            count, inner = time // length, heads * channels
            x_c, dt_c = chunks(x, length), chunks(dt, length)
            # Dense copies: the products below run half as fast on strided slices of a wider tensor.
            B_c, C_c = (chunks(t, length).contiguous().view(-1, length, state_size) for t in (B, C))

            # 1. Decays in float64: they are few, and everything else is multiplied by them.
            s = torch.cumsum(dt_c.double() * A.double(), dim=2)
            e, f = torch.exp(s).to(x.dtype), torch.exp(-s).to(x.dtype)
            F = x.new_empty(count, batch, length, heads, channels)
            torch.mul(x_c, (dt_c * f).unsqueeze(-1), out=F)
            F_rows = F.view(-1, length, inner)

            # 2. The state after each chunk.
            states = torch.bmm(F_rows.mT, B_c).view(count, batch, heads, channels, state_size)
            end = e[:, :, -1, :, None, None]
            for c in range(count):
                entering = states[c - 1] if c > 0 else initial_state
                if entering is not None:
                    states[c] += entering
                states[c] *= end[c]

            # 3. Outputs: what the chunk reads of itself, and of the state that entered it.
            K = torch.bmm(C_c, B_c.mT).tril_()
            rows = torch.bmm(K, F_rows)
            if initial_state is not None:
                rows[:batch].baddbmm_(C_c[:batch], initial_state.reshape(batch, inner, state_size).mT)
            if count > 1:
                rows[batch:].baddbmm_(C_c[batch:], states[:-1].view(-1, inner, state_size).mT)
            raw = rows.view_as(F)
            if count == 1:
                y = raw.mul_(e.unsqueeze(-1)).view(batch, time, heads, channels)
            else:
                y = x.new_empty(batch, time, heads, channels)
                torch.mul(raw, e.unsqueeze(-1), out=chunks(y, length))
            if D is not None:
                y.addcmul_(x, D[:, None])

            ctx.save_for_backward(x, dt, A, D, B_c, C_c, K, F, e, f, states, initial_state, y)
            ctx.length = length
            ctx.set_materialize_grads(False)
            # A copy: the caller may keep the final state long after the states between chunks are freed.
            return y, states[-1].clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, D, B_c, C_c, K, F, e, f, states, initial_state, y = ctx.saved_tensors
        length = ctx.length
        if dy is None and dfinal is None:
            return (None,) * 8
        with without_autocast(x.device):
            batch, time, heads, channels = x.shape
            state_size = B_c.shape[-1]
            count, inner = time // length, heads * channels
            dy = torch.zeros_like(y) if dy is None else dy
            x_c, dt_c, y_c, dy_c = (chunks(t, length) for t in (x, dt, y, dy))
            F_rows = F.view(-1, length, inner)

            # 1. Within the chunk; g is the gradient of the bracket of y.
            g = torch.empty_like(F)
            torch.mul(dy_c, e.unsqueeze(-1), out=g)
            g_rows = g.view(-1, length, inner)
            dK = torch.bmm(g_rows, F_rows.mT).tril_()
            dF = torch.bmm(K.mT, g_rows)
            dB = torch.bmm(dK.mT, C_c)
            dC = torch.bmm(dK, B_c)

            # 2. Through the states, from the last chunk to the first. dstates[c] is first the gradient of the state that leaves
            #    chunk c, then, times e_Q, that of the bracket of h'. The last chunk's stays absent while nothing depends on it.
            ds_end = None
            dinitial = None
            first = slice(0, batch)
            if initial_state is not None:
                dC[first].baddbmm_(g_rows[first], initial_state.reshape(batch, inner, state_size))
                if ctx.needs_input_grad[6]:
                    dinitial = torch.bmm(g_rows[first].mT, C_c[first]).view(batch, heads, channels, state_size)
            live = count if dfinal is not None else count - 1
            if live > 0:
                dstates = x.new_empty(live, batch, heads, channels, state_size)
                if count > 1:
                    entered = slice(batch, count * batch)
                    torch.bmm(g_rows[entered].mT, C_c[entered], out=dstates[: count - 1].view(-1, inner, state_size))
                    dC[entered].baddbmm_(g_rows[entered], states[:-1].view(-1, inner, state_size))
                if dfinal is not None:
                    dstates[-1].copy_(dfinal)
                ds_end = x.new_zeros(count, batch, heads)
                for c in range(live - 1, -1, -1):
                    ds_end[c] = (dstates[c] * states[c]).sum((-2, -1))
                    dstates[c] *= e[c, :, -1, :, None, None]
                    if c > 0:
                        dstates[c - 1] += dstates[c]
                if dinitial is not None:
                    dinitial += dstates[0]
                reached = slice(0, live * batch)
                dincrement = dstates.view(-1, inner, state_size)
                dF[reached].baddbmm_(B_c[reached], dincrement.mT)
                dB[reached].baddbmm_(F_rows[reached], dincrement)

            # 3. Inputs. s_i scales y_i − D x_i, its negative scales F_i, and s_Q scales h', so
            #    ∂/∂s_i = dy_i·(y_i − D x_i) − dF_i·F_i, and + ⟨dh', h'⟩ at i = Q. Then ∂/∂(dt A) sums from the end.
            dF = dF.view_as(F)
            scale = dt_c * f
            ddt = head_sums(x_c, dF).mul_(f)
            ds = head_sums(dy_c, y_c).double()
            dD = None
            if D is not None:
                xdy = head_sums(x_c, dy_c)
                ds -= D * xdy
                dD = xdy.sum((0, 1, 2))
            ds -= dt_c * ddt
            if ds_end is not None:
                ds[:, :, -1] += ds_end
            da = ds.flip(2).cumsum(2).flip(2)
            dA = (da * dt_c).sum((0, 1, 2)).to(x.dtype)
            ddt.addcmul_(da.to(x.dtype), A)
            dx = x.new_empty(batch, time, heads, channels)
            torch.mul(dF, scale.unsqueeze(-1), out=chunks(dx, length))
            if D is not None:
                dx.addcmul_(dy, D[:, None])
            return dx, unchunk(ddt, batch), dA, unchunk(dB, batch), unchunk(dC, batch), dD, dinitial, None
