"""State-space duality with factored decays, for chunks in which no state fades below exp(−60) (see `farstate.ops.ssd`).

With s_i = Σ_{k≤i} dt_k A from the start of a chunk and μ = s_Q / 2, exp(s_i − s_j) = e_i f_j with e = exp(s − μ) and
f = exp(μ − s). The decays of a head then scale the rows of its inputs and outputs, and what is left is the same for all heads
of a group:

    F_j = f_j dt_j x_j,   K = C Bᵀ strictly below the diagonal,   κ_i = C_i · B_i
    y_i = Y_i + (dt_i κ_i + D) x_i,   Y_i = e_i ( Σ_j K_ij F_j + h C_i ),   h' = exp(μ + μ') ( h + Σ_j F_j B_jᵀ )

so that the Q × Q masks, one for each head, disappear, and the heads fill one wide matrix product. The factors carry a
relative error each, however large the exponents; the sums run over j < i only, where no term exceeds its own final size.
Here h is the entering state times exp(μ), and h' the leaving one times the exp(μ') of the next chunk, or of 0 after the last.
The price is the range, so the caller sees to s_Q ≥ `smallest_log_decay(Q)`; thanks to μ factors stay within exp(±30).

Gradients of the decays. The one of step k acts on what passes it: on the pairs j < k ≤ i, on what step i ≥ k reads of h, on
what step j < k leaves in h', and on what crosses the chunk. Of all that involves step i as a reader Y_i is the sum, of all
that involves step j as a writer F_j, so with p_i = dy_i · Y_i − dF_i · F_i

    ∂/∂(dt_k A) = ⟨h, ∂/∂h⟩ − Σ_{i<k} p_i

where ∂/∂h is the whole gradient of the entering state, on which all decays act. No decay acts between a step and itself:
were κ and D part of Y and dF, they would cancel in exact arithmetic only, and leave rounding of the size of y where strong
decays, or small dt, leave little else. The sum runs from the start for the same reason: from the end it would begin with
⟨h', ∂/∂h'⟩, which holds what step Q wrote itself. Only where no later step reads h' is it zero, and ⟨h, ∂/∂h⟩ = Σ_i p_i.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.ops.precision import without_autocast
from farstate.ops.ssd_chunks import chunks, unchunk


def smallest_log_decay(length: int) -> float:
    """How far a chunk of `length` steps may fade: factors within exp(±30) leave float32 room for products from 1e−20 to 1e20.

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
            s -= s[:, :, -1:] / 2
            e, f = torch.exp(s).to(x.dtype), torch.exp(-s).to(x.dtype)
            middle = s[:, :, -1, :, None, None]
            end = torch.exp(middle + torch.cat([middle[1:], torch.zeros_like(middle[:1])])).to(x.dtype)
            if initial_state is not None:
                initial_state = initial_state * e[0, :, -1, :, None, None]
            F = x.new_empty(count, batch, length, heads, channels)
            torch.mul(x_c, (dt_c * f).unsqueeze(-1), out=F)
            F_rows = F.view(-1, length, inner)

            # 2. The state after each chunk.
            states = torch.bmm(F_rows.mT, B_c).view(count, batch, heads, channels, state_size)
            for c in range(count):
                entering = states[c - 1] if c > 0 else initial_state
                if entering is not None:
                    states[c] += entering
                states[c] *= end[c]

            # 3. Outputs: what the chunk reads of itself, and of the state that entered it.
            K = torch.bmm(C_c, B_c.mT)
            own = K.diagonal(dim1=1, dim2=2).clone().view(count, batch, length, 1)
            K.tril_(-1)
            rows = torch.bmm(K, F_rows)
            if initial_state is not None:
                rows[:batch].baddbmm_(C_c[:batch], initial_state.reshape(batch, inner, state_size).mT)
            if count > 1:
                rows[batch:].baddbmm_(C_c[batch:], states[:-1].view(-1, inner, state_size).mT)
            Y = rows.view_as(F).mul_(e.unsqueeze(-1))
            y = x.new_empty(batch, time, heads, channels)
            torch.addcmul(Y, x_c, _of_itself(dt_c, own, D), out=chunks(y, length))

            ctx.save_for_backward(x, dt, A, D, B_c, C_c, K, own, F, e, f, end, states, initial_state, Y)
            ctx.length = length
            ctx.set_materialize_grads(False)
            # A copy: the caller may keep the final state long after the states between chunks are freed.
            return y, states[-1].clone()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, D, B_c, C_c, K, own, F, e, f, end, states, initial_state, Y = ctx.saved_tensors
        length = ctx.length
        if dy is None and dfinal is None:
            return (None,) * 8
        with without_autocast(x.device):
            batch, time, heads, channels = x.shape
            state_size = B_c.shape[-1]
            count, inner = time // length, heads * channels
            dy = torch.zeros_like(x) if dy is None else dy
            x_c, dt_c, dy_c = (chunks(t, length) for t in (x, dt, dy))
            F_rows = F.view(-1, length, inner)

            # 1. Within the chunk; g is the gradient of the bracket of Y. The diagonal of dK is the gradient of κ.
            g = torch.empty_like(F)
            torch.mul(dy_c, e.unsqueeze(-1), out=g)
            g_rows = g.view(-1, length, inner)
            # Until dx is known its memory holds products to be summed: fresh memory costs more than the product.
            dx = x.new_empty(batch, time, heads, channels)
            dx_c = chunks(dx, length)
            xdy = torch.mul(x_c, dy_c, out=dx_c).sum(-1)
            dK = torch.bmm(g_rows, F_rows.mT).tril_(-1)
            dK.diagonal(dim1=1, dim2=2).copy_((dt_c * xdy).sum(-1).view(-1, length))
            dF = torch.bmm(K.mT, g_rows)
            dB = torch.bmm(dK.mT, C_c)
            dC = torch.bmm(dK, B_c)

            # 2. Through the states, from the last chunk to the first. dstates[c] is first the gradient of the state that leaves
            #    chunk c, then, times exp(μ + μ'), that of the bracket of h'. The last chunk's stays absent while nothing depends on it.
            #    entered[c] is ⟨h, ∂/∂h⟩ of the state that enters chunk c.
            entered = x.new_zeros(count, batch, heads)
            dinitial = None
            first = slice(0, batch)
            live = count if dfinal is not None else count - 1
            if initial_state is not None:
                dC[first].baddbmm_(g_rows[first], initial_state.reshape(batch, inner, state_size))
                if ctx.needs_input_grad[6] or live > 0:
                    dinitial = torch.bmm(g_rows[first].mT, C_c[first]).view(batch, heads, channels, state_size)
            if live > 0:
                dstates = x.new_empty(live, batch, heads, channels, state_size)
                if count > 1:
                    later = slice(batch, count * batch)
                    torch.bmm(g_rows[later].mT, C_c[later], out=dstates[: count - 1].view(-1, inner, state_size))
                    dC[later].baddbmm_(g_rows[later], states[:-1].view(-1, inner, state_size))
                if dfinal is not None:
                    dstates[-1].copy_(dfinal)
                for c in range(live - 1, -1, -1):
                    if c < count - 1:
                        entered[c + 1] = (dstates[c] * states[c]).sum((-2, -1))
                    dstates[c] *= end[c]
                    if c > 0:
                        dstates[c - 1] += dstates[c]
                if dinitial is not None:
                    dinitial += dstates[0]
                    entered[0] = (dinitial * initial_state).sum((-2, -1))
                reached = slice(0, live * batch)
                dincrement = dstates.view(-1, inner, state_size)
                dF[reached].baddbmm_(B_c[reached], dincrement.mT)
                dB[reached].baddbmm_(F_rows[reached], dincrement)

            # 3. Inputs, and the decays (see the module). F_i holds f_i dt_i x_i.
            dF = dF.view_as(F)
            ddt = torch.mul(x_c, dF, out=dx_c).sum(-1).mul_(f)
            passing = torch.mul(dy_c, Y, out=dx_c).sum(-1).double()
            passing -= dt_c * ddt
            before = passing.cumsum(2)
            if live == 0:
                entered = before[:, :, -1]
            da = entered.unsqueeze(2) - (before - passing)
            dA = (da * dt_c).sum((0, 1, 2)).to(x.dtype)
            ddt.addcmul_(own, xdy).addcmul_(da.to(x.dtype), A)
            dD = None if D is None else xdy.sum((0, 1, 2))
            torch.mul(dF, (dt_c * f).unsqueeze(-1), out=dx_c)
            dx_c.addcmul_(dy_c, _of_itself(dt_c, own, D))
            if dinitial is not None:
                dinitial *= e[0, :, -1, :, None, None]
            return dx, unchunk(ddt, batch), dA, unchunk(dB, batch), unchunk(dC, batch), dD, dinitial, None


def _of_itself(dt: Tensor, own: Tensor, D: Tensor | None) -> Tensor:
    """dt κ + D, by which a step reads its own input: (T / Q, B, Q, H, 1)."""
    factor = dt * own
    return (factor if D is None else factor.add_(D)).unsqueeze(-1)
