"""The selective scan of Mamba-1 from an initial state to a final one, and what the initial state alone adds to the outputs.

Shapes, as in `farstate.ops.selective_scan` (the definitions `naive` and `naive_increment` stand there):

    x, dt, y (B, T, D) · A (D, N) · B, C (B, T, N) · D (D,) · states (B, D, N)

**Scan.** For one channel and one n, with a_t = exp(dt_t A), u_t = dt_t x_t, g_t the gradient of h_t and r_t = dy_t C_t:

1. h_t = a_t h_{t−1} + u_t B_t. Two steps (a, b) after (a', b') are one step (a' a, a b' + b): associative, so that a chunk of
   BLOCK_T steps is one scan in registers, and time is walked through chunk by chunk. Products of decays only shrink.
2. y_t = Σ_n C_t h_t + D x_t. The state before each chunk is written down for the backward pass, nothing else.
3. Backward, from the last chunk to the first. The faded state p_t = a_t h_{t−1} obeys p_t = a_t p_{t−1} + a_t u_{t−1} B_{t−1} and
   starts a chunk with a_0 times the state before it. Then h_t = p_t + u_t B_t: no difference is ever formed.
4. g_t = r_t + a_{t+1} g_{t+1}, the same scan from the end, with decays read one step ahead; the last step of a chunk takes
   the gradient γ of the state that leaves the chunk, and the chunk before it gets γ = a_0 g_0. At the ends of the
   sequence γ is the gradient of the final state, and of the initial state.
5. ∂u_t = Σ_n g_t B_t, ∂x_t = dt_t ∂u_t + D dy_t, ∂dt_t = x_t ∂u_t + Σ_n A g_t p_t, ∂A = Σ_t dt_t g_t p_t, ∂B_t = Σ_d g_t u_t, ∂C_t = Σ_d dy_t h_t,
   ∂D = Σ_t dy_t x_t.

**Increment.** From the initial state alone, with S_t = Σ_{k≤t} dt_k:

6. Δ_t = Σ_n C_t exp(A S_t) h_{−1}: the decays of a channel are powers of one another, and no scan over states is needed.
7. With w_t = dy_t C_t exp(A S_t): ∂h_{−1} = Σ_t w_t, ∂C_t = Σ_d dy_t exp(A S_t) h_{−1}, ∂A = Σ_t S_t w_t h_{−1}, ∂S_t = Σ_n A w_t h_{−1}, ∂dt_t = Σ_{k≥t} ∂S_k.

A program takes one row and BLOCK_D channels. Sums over channels and rows are of several programs: each writes its part, which
are then added, in the same order every time. Steps after the end have dt = 0, and so change nothing. All arithmetic is in
float32, inputs of half precision are converted as they are loaded; all offsets are 64-bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from farstate.kernels.addressing import offsets

# Steps of a chunk, and channels × N of a program: one state of a chunk is as many registers of a thread as a chunk has steps.
_STEPS, _ENTRIES = 16, 256


@triton.jit
def _in_a_row(a_first, b_first, a_second, b_second):
    """h → a h + b, twice."""
    return a_first * a_second, a_second * b_first + b_second


@triton.jit
def selective_scan_fwd_kernel(
    x, dt, A, B, C, D, initial, y, entering, final,
    time, width, state_size,
    stride_xb, stride_xt, stride_xd,
    stride_dtb, stride_dtt, stride_dtd,
    stride_Ad, stride_An,
    stride_Bb, stride_Bt, stride_Bn,
    stride_Cb, stride_Ct, stride_Cn,
    stride_ib, stride_id, stride_in,
    stride_yb, stride_yt, stride_yd,
    stride_eb, stride_ec, stride_ed, stride_en,
    stride_fb, stride_fd, stride_fn,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """entering (B, chunks, D, N) or None; D (D,), dense, or None; initial or None; other shapes as in the module."""
    blocks = tl.cdiv(width, BLOCK_D)
    i_b = tl.program_id(0) // blocks
    i_d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    i_n = tl.arange(0, BLOCK_N)
    i_row = tl.arange(0, BLOCK_T)
    m_d, m_n = i_d < width, i_n < state_size
    m_state = m_d[:, None] & m_n[None, :]
    p_x = x + offsets(i_b, stride_xb) + offsets(i_d, stride_xd)[None, :]
    p_dt = dt + offsets(i_b, stride_dtb) + offsets(i_d, stride_dtd)[None, :]
    p_B = B + offsets(i_b, stride_Bb) + offsets(i_n, stride_Bn)[None, :]
    p_C = C + offsets(i_b, stride_Cb) + offsets(i_n, stride_Cn)[None, :]
    p_y = y + offsets(i_b, stride_yb) + offsets(i_d, stride_yd)[None, :]
    p_A = A + offsets(i_d, stride_Ad)[:, None] + offsets(i_n, stride_An)[None, :]
    b_A = tl.load(p_A, mask=m_state, other=0.0).to(tl.float32)
    if D is not None:
        b_D = tl.load(D + i_d, mask=m_d, other=0.0).to(tl.float32)
    if entering is not None:
        p_e = entering + offsets(i_b, stride_eb) + offsets(i_d, stride_ed)[:, None] + offsets(i_n, stride_en)[None, :]
    if initial is None:
        b_state = tl.zeros((BLOCK_D, BLOCK_N), dtype=tl.float32)
    else:
        p_i = initial + offsets(i_b, stride_ib) + offsets(i_d, stride_id)[:, None] + offsets(i_n, stride_in)[None, :]
        b_state = tl.load(p_i, mask=m_state, other=0.0).to(tl.float32)

    i_t = i_row
    for _ in range(tl.cdiv(time, BLOCK_T)):
        if entering is not None:
            tl.store(p_e, b_state, mask=m_state)
            p_e += stride_ec
        m_t = (i_t < time)[:, None]
        m_td, m_tn = m_t & m_d[None, :], m_t & m_n[None, :]
        b_x = tl.load(p_x + offsets(i_t, stride_xt)[:, None], mask=m_td, other=0.0).to(tl.float32)
        b_dt = tl.load(p_dt + offsets(i_t, stride_dtt)[:, None], mask=m_td, other=0.0).to(tl.float32)
        b_B = tl.load(p_B + offsets(i_t, stride_Bt)[:, None], mask=m_tn, other=0.0).to(tl.float32)
        b_C = tl.load(p_C + offsets(i_t, stride_Ct)[:, None], mask=m_tn, other=0.0).to(tl.float32)
        # 1.
        b_a = tl.exp(b_dt[:, :, None] * b_A[None, :, :])
        b_a, b_h = tl.associative_scan((b_a, (b_dt * b_x)[:, :, None] * b_B[:, None, :]), 0, _in_a_row)
        b_h += b_a * b_state[None, :, :]
        # 2.
        b_y = tl.sum(b_h * b_C[:, None, :], axis=2)
        if D is not None:
            b_y += b_D[None, :] * b_x
        tl.store(p_y + offsets(i_t, stride_yt)[:, None], b_y, mask=m_td)
        b_state = tl.sum(tl.where((i_row == BLOCK_T - 1)[:, None, None], b_h, 0.0), axis=0)
        i_t += BLOCK_T
    p_f = final + offsets(i_b, stride_fb) + offsets(i_d, stride_fd)[:, None] + offsets(i_n, stride_fn)[None, :]
    tl.store(p_f, b_state, mask=m_state)


@triton.jit
def selective_scan_bwd_kernel(
    x, dt, A, B, C, D, entering, dy, dfinal, dx, ddt, dA, dB, dC, dD, dinitial,
    time, width, state_size,
    stride_xb, stride_xt, stride_xd,
    stride_dtb, stride_dtt, stride_dtd,
    stride_Ad, stride_An,
    stride_Bb, stride_Bt, stride_Bn,
    stride_Cb, stride_Ct, stride_Cn,
    stride_eb, stride_ec, stride_ed, stride_en,
    stride_dyb, stride_dyt, stride_dyd,
    stride_dfb, stride_dfd, stride_dfn,
    stride_gb, stride_gt, stride_gd,
    stride_sb, stride_sd, stride_sn,
    stride_mk, stride_mb, stride_mt, stride_mn,
    stride_Db, stride_Dd,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx and ddt (B, T, D) have the strides g; dA and dinitial (B, D, N) the strides s; dB and dC, of each block of channels
    (blocks, B, T, N), the strides m; dD is (B, D). dfinal may be None, and D with dD. Other shapes as in the module."""
    blocks = tl.cdiv(width, BLOCK_D)
    i_b = tl.program_id(0) // blocks
    i_k = tl.program_id(0) % blocks
    i_d = i_k * BLOCK_D + tl.arange(0, BLOCK_D)
    i_n = tl.arange(0, BLOCK_N)
    i_row = tl.arange(0, BLOCK_T)
    m_d, m_n = i_d < width, i_n < state_size
    m_state = m_d[:, None] & m_n[None, :]
    p_x = x + offsets(i_b, stride_xb) + offsets(i_d, stride_xd)[None, :]
    p_dt = dt + offsets(i_b, stride_dtb) + offsets(i_d, stride_dtd)[None, :]
    p_B = B + offsets(i_b, stride_Bb) + offsets(i_n, stride_Bn)[None, :]
    p_C = C + offsets(i_b, stride_Cb) + offsets(i_n, stride_Cn)[None, :]
    p_dy = dy + offsets(i_b, stride_dyb) + offsets(i_d, stride_dyd)[None, :]
    p_g = offsets(i_b, stride_gb) + offsets(i_d, stride_gd)[None, :]
    p_s = offsets(i_b, stride_sb) + offsets(i_d, stride_sd)[:, None] + offsets(i_n, stride_sn)[None, :]
    p_m = offsets(i_k, stride_mk) + offsets(i_b, stride_mb) + offsets(i_n, stride_mn)[None, :]
    p_A = A + offsets(i_d, stride_Ad)[:, None] + offsets(i_n, stride_An)[None, :]
    b_A = tl.load(p_A, mask=m_state, other=0.0).to(tl.float32)
    if D is not None:
        b_D = tl.load(D + i_d, mask=m_d, other=0.0).to(tl.float32)
        b_dD = tl.zeros((BLOCK_D,), dtype=tl.float32)
    # The last chunk of the row is one chunk before the next row.
    p_e = entering + offsets(i_b + 1, stride_eb) + offsets(i_d, stride_ed)[:, None] + offsets(i_n, stride_en)[None, :]
    if dfinal is None:
        b_dstate = tl.zeros((BLOCK_D, BLOCK_N), dtype=tl.float32)
    else:
        p_df = dfinal + offsets(i_b, stride_dfb) + offsets(i_d, stride_dfd)[:, None] + offsets(i_n, stride_dfn)[None, :]
        b_dstate = tl.load(p_df, mask=m_state, other=0.0).to(tl.float32)
    b_dA = tl.zeros((BLOCK_D, BLOCK_N), dtype=tl.float32)

    chunks = tl.cdiv(time, BLOCK_T)
    i_t = (chunks - 1) * BLOCK_T + i_row
    for _ in range(chunks):
        p_e -= stride_ec
        m_t = (i_t < time)[:, None]
        m_td, m_tn = m_t & m_d[None, :], m_t & m_n[None, :]
        b_x = tl.load(p_x + offsets(i_t, stride_xt)[:, None], mask=m_td, other=0.0).to(tl.float32)
        b_dt = tl.load(p_dt + offsets(i_t, stride_dtt)[:, None], mask=m_td, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy + offsets(i_t, stride_dyt)[:, None], mask=m_td, other=0.0).to(tl.float32)
        b_B = tl.load(p_B + offsets(i_t, stride_Bt)[:, None], mask=m_tn, other=0.0).to(tl.float32)
        b_C = tl.load(p_C + offsets(i_t, stride_Ct)[:, None], mask=m_tn, other=0.0).to(tl.float32)
        b_u = b_dt * b_x
        # 3. One step back: nothing before the first step of the chunk but its entering state.
        i_p = i_t - 1
        m_p = m_t & (i_row > 0)[:, None]
        b_up = tl.load(p_x + offsets(i_p, stride_xt)[:, None], mask=m_p & m_d[None, :], other=0.0).to(tl.float32)
        b_up *= tl.load(p_dt + offsets(i_p, stride_dtt)[:, None], mask=m_p & m_d[None, :], other=0.0).to(tl.float32)
        b_Bp = tl.load(p_B + offsets(i_p, stride_Bt)[:, None], mask=m_p & m_n[None, :], other=0.0).to(tl.float32)
        b_a = tl.exp(b_dt[:, :, None] * b_A[None, :, :])
        b_all, b_p = tl.associative_scan((b_a, b_a * b_up[:, :, None] * b_Bp[:, None, :]), 0, _in_a_row)
        b_p += b_all * tl.load(p_e, mask=m_state, other=0.0)[None, :, :]
        b_h = b_p + b_u[:, :, None] * b_B[:, None, :]
        b_dC = tl.sum(b_dy[:, :, None] * b_h, axis=1)
        # 4. One step ahead: what leaves the chunk is not yet faded, and its gradient has been.
        i_f = i_t + 1
        m_f = (i_f < time)[:, None] & (i_row < BLOCK_T - 1)[:, None] & m_d[None, :]
        b_dtf = tl.load(p_dt + offsets(i_f, stride_dtt)[:, None], mask=m_f, other=0.0).to(tl.float32)
        b_af = tl.exp(b_dtf[:, :, None] * b_A[None, :, :])
        b_all, b_g = tl.associative_scan((b_af, b_dy[:, :, None] * b_C[:, None, :]), 0, _in_a_row, reverse=True)
        b_g += b_all * b_dstate[None, :, :]
        b_dstate = tl.sum(tl.where((i_row == 0)[:, None, None], b_a * b_g, 0.0), axis=0)
        # 5.
        b_dB = tl.sum(b_g * b_u[:, :, None], axis=1)
        b_du = tl.sum(b_g * b_B[:, None, :], axis=2)
        b_w = b_g * b_p
        b_ddt = b_x * b_du + tl.sum(b_w * b_A[None, :, :], axis=2)
        b_dA += tl.sum(b_w * b_dt[:, :, None], axis=0)
        b_dx = b_dt * b_du
        if D is not None:
            b_dx += b_D[None, :] * b_dy
            b_dD += tl.sum(b_dy * b_x, axis=0)
        tl.store(dx + p_g + offsets(i_t, stride_gt)[:, None], b_dx, mask=m_td)
        tl.store(ddt + p_g + offsets(i_t, stride_gt)[:, None], b_ddt, mask=m_td)
        tl.store(dB + p_m + offsets(i_t, stride_mt)[:, None], b_dB, mask=m_tn)
        tl.store(dC + p_m + offsets(i_t, stride_mt)[:, None], b_dC, mask=m_tn)
        i_t -= BLOCK_T
    tl.store(dA + p_s, b_dA, mask=m_state)
    tl.store(dinitial + p_s, b_dstate, mask=m_state)
    if D is not None:
        tl.store(dD + offsets(i_b, stride_Db) + offsets(i_d, stride_Dd), b_dD, mask=m_d)


@triton.jit
def increment_fwd_kernel(
    dt, A, C, initial, y, entering,
    time, width, state_size,
    stride_dtb, stride_dtt, stride_dtd,
    stride_Ad, stride_An,
    stride_Cb, stride_Ct, stride_Cn,
    stride_ib, stride_id, stride_in,
    stride_yb, stride_yt, stride_yd,
    stride_eb, stride_ec, stride_ed,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """entering (B, chunks, D): S before each chunk, or None. Other shapes as in the module."""
    blocks = tl.cdiv(width, BLOCK_D)
    i_b = tl.program_id(0) // blocks
    i_d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    i_n = tl.arange(0, BLOCK_N)
    m_d, m_n = i_d < width, i_n < state_size
    m_state = m_d[:, None] & m_n[None, :]
    p_dt = dt + offsets(i_b, stride_dtb) + offsets(i_d, stride_dtd)[None, :]
    p_C = C + offsets(i_b, stride_Cb) + offsets(i_n, stride_Cn)[None, :]
    p_y = y + offsets(i_b, stride_yb) + offsets(i_d, stride_yd)[None, :]
    p_A = A + offsets(i_d, stride_Ad)[:, None] + offsets(i_n, stride_An)[None, :]
    p_i = initial + offsets(i_b, stride_ib) + offsets(i_d, stride_id)[:, None] + offsets(i_n, stride_in)[None, :]
    b_A = tl.load(p_A, mask=m_state, other=0.0).to(tl.float32)
    b_state = tl.load(p_i, mask=m_state, other=0.0).to(tl.float32)
    if entering is not None:
        p_e = entering + offsets(i_b, stride_eb) + offsets(i_d, stride_ed)
    b_S = tl.zeros((BLOCK_D,), dtype=tl.float32)

    i_t = tl.arange(0, BLOCK_T)
    for _ in range(tl.cdiv(time, BLOCK_T)):
        if entering is not None:
            tl.store(p_e, b_S, mask=m_d)
            p_e += stride_ec
        m_t = (i_t < time)[:, None]
        m_td = m_t & m_d[None, :]
        b_dt = tl.load(p_dt + offsets(i_t, stride_dtt)[:, None], mask=m_td, other=0.0).to(tl.float32)
        b_C = tl.load(p_C + offsets(i_t, stride_Ct)[:, None], mask=m_t & m_n[None, :], other=0.0).to(tl.float32)
        # 6.
        b_St = b_S[None, :] + tl.cumsum(b_dt, axis=0)
        b_faded = tl.exp(b_St[:, :, None] * b_A[None, :, :]) * b_state[None, :, :]
        tl.store(p_y + offsets(i_t, stride_yt)[:, None], tl.sum(b_faded * b_C[:, None, :], axis=2), mask=m_td)
        b_S += tl.sum(b_dt, axis=0)
        i_t += BLOCK_T


@triton.jit
def increment_bwd_kernel(
    dt, A, C, initial, entering, dy, ddt, dA, dC, dinitial,
    time, width, state_size,
    stride_dtb, stride_dtt, stride_dtd,
    stride_Ad, stride_An,
    stride_Cb, stride_Ct, stride_Cn,
    stride_ib, stride_id, stride_in,
    stride_eb, stride_ec, stride_ed,
    stride_dyb, stride_dyt, stride_dyd,
    stride_gb, stride_gt, stride_gd,
    stride_sb, stride_sd, stride_sn,
    stride_mk, stride_mb, stride_mt, stride_mn,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """ddt has the strides g; dA and dinitial, (B, D, N), the strides s; dC, (blocks, B, T, N), the strides m."""
    blocks = tl.cdiv(width, BLOCK_D)
    i_b = tl.program_id(0) // blocks
    i_k = tl.program_id(0) % blocks
    i_d = i_k * BLOCK_D + tl.arange(0, BLOCK_D)
    i_n = tl.arange(0, BLOCK_N)
    m_d, m_n = i_d < width, i_n < state_size
    m_state = m_d[:, None] & m_n[None, :]
    p_dt = dt + offsets(i_b, stride_dtb) + offsets(i_d, stride_dtd)[None, :]
    p_C = C + offsets(i_b, stride_Cb) + offsets(i_n, stride_Cn)[None, :]
    p_dy = dy + offsets(i_b, stride_dyb) + offsets(i_d, stride_dyd)[None, :]
    p_ddt = ddt + offsets(i_b, stride_gb) + offsets(i_d, stride_gd)[None, :]
    p_dC = dC + offsets(i_k, stride_mk) + offsets(i_b, stride_mb) + offsets(i_n, stride_mn)[None, :]
    p_s = offsets(i_b, stride_sb) + offsets(i_d, stride_sd)[:, None] + offsets(i_n, stride_sn)[None, :]
    p_A = A + offsets(i_d, stride_Ad)[:, None] + offsets(i_n, stride_An)[None, :]
    p_i = initial + offsets(i_b, stride_ib) + offsets(i_d, stride_id)[:, None] + offsets(i_n, stride_in)[None, :]
    p_e = entering + offsets(i_b + 1, stride_eb) + offsets(i_d, stride_ed)
    b_A = tl.load(p_A, mask=m_state, other=0.0).to(tl.float32)
    b_state = tl.load(p_i, mask=m_state, other=0.0).to(tl.float32)
    b_dstate = tl.zeros((BLOCK_D, BLOCK_N), dtype=tl.float32)
    b_dA = tl.zeros((BLOCK_D, BLOCK_N), dtype=tl.float32)
    b_dS = tl.zeros((BLOCK_D,), dtype=tl.float32)

    chunks = tl.cdiv(time, BLOCK_T)
    i_t = (chunks - 1) * BLOCK_T + tl.arange(0, BLOCK_T)
    for _ in range(chunks):
        p_e -= stride_ec
        m_t = (i_t < time)[:, None]
        m_td, m_tn = m_t & m_d[None, :], m_t & m_n[None, :]
        b_dt = tl.load(p_dt + offsets(i_t, stride_dtt)[:, None], mask=m_td, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy + offsets(i_t, stride_dyt)[:, None], mask=m_td, other=0.0).to(tl.float32)
        b_C = tl.load(p_C + offsets(i_t, stride_Ct)[:, None], mask=m_tn, other=0.0).to(tl.float32)
        # 7.
        b_St = tl.load(p_e, mask=m_d, other=0.0)[None, :] + tl.cumsum(b_dt, axis=0)
        b_read = b_dy[:, :, None] * tl.exp(b_St[:, :, None] * b_A[None, :, :])
        b_dC = tl.sum(b_read * b_state[None, :, :], axis=1)
        b_w = b_read * b_C[:, None, :]
        b_dstate += tl.sum(b_w, axis=0)
        b_w *= b_state[None, :, :]
        b_dA += tl.sum(b_w * b_St[:, :, None], axis=0)
        b_dSt = tl.sum(b_w * b_A[None, :, :], axis=2)
        tl.store(p_ddt + offsets(i_t, stride_gt)[:, None], b_dS[None, :] + tl.cumsum(b_dSt, axis=0, reverse=True), mask=m_td)
        tl.store(p_dC + offsets(i_t, stride_mt)[:, None], b_dC, mask=m_tn)
        b_dS += tl.sum(b_dSt, axis=0)
        i_t -= BLOCK_T
    tl.store(dA + p_s, b_dA, mask=m_state)
    tl.store(dinitial + p_s, b_dstate, mask=m_state)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """y in the dtype of x and the final state in float32, with first derivatives of both with respect to all inputs.

    Shapes: see the module. Any strides, float32 and half precision.

    Args:
        chunk_length: steps that a program holds at a time, a power of two; None takes 16.

    Raises:
        ValueError: shapes that do not fit each other, or a chunk length that is no power of two.
        TypeError: a float64 input.
    """
    _check(x=x, dt=dt, A=A, B=B, C=C, D=D, initial_state=initial_state)
    given = (x, dt, A, B, C, D, initial_state)
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    y, final = _SelectiveScan.apply(*given, _steps(chunk_length), differentiable)
    return y, final


def increment(dt: Tensor, A: Tensor, C: Tensor, initial_state: Tensor, chunk_length: int | None = None) -> Tensor:
    """What `initial_state` adds to the outputs of a scan that starts from zero, (B, T, D) in float32, with first derivatives.

    Arguments and errors as of `selective_scan`.
    """
    _check(dt=dt, A=A, C=C, initial_state=initial_state)
    y: Tensor = _Increment.apply(dt, A, C, initial_state, _steps(chunk_length))
    return y


class _SelectiveScan(torch.autograd.Function):
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
        steps: int,
        differentiable: bool,
    ) -> tuple[Tensor, Tensor]:
        batch, time, width = x.shape
        state_size = A.shape[1]
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        final = _empty(x, batch, width, state_size)
        entering = _empty(x, batch, triton.cdiv(time, steps), width, state_size) if differentiable else None
        D = None if D is None else D.contiguous()
        grid, blocks = _launch(x, state_size, steps)
        with torch.cuda.device_of(x):
            selective_scan_fwd_kernel[grid](
                x, dt, A, B, C, D, initial_state, y, entering, final, time, width, state_size,
                *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(), *_strides(initial_state, 3),
                *y.stride(), *_strides(entering, 4), *final.stride(), **blocks,
            )  # fmt: skip
        ctx.save_for_backward(x, dt, A, B, C, D, entering)
        ctx.has_initial_state, ctx.steps = initial_state is not None, steps
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, entering = ctx.saved_tensors
        if dy is None and dfinal is None:
            return (None,) * 9
        dy = torch.zeros_like(x) if dy is None else dy
        batch, time, width = x.shape
        state_size = A.shape[1]
        grid, blocks = _launch(x, state_size, ctx.steps)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        ddt = torch.empty(x.shape, dtype=dt.dtype, device=x.device)
        dA, dinitial = (_empty(x, batch, width, state_size) for _ in range(2))
        dB, dC = (_empty(x, grid[0] // batch, batch, time, state_size) for _ in range(2))
        dD = None if D is None else _empty(x, batch, width)
        with torch.cuda.device_of(x):
            selective_scan_bwd_kernel[grid](
                x, dt, A, B, C, D, entering, dy, dfinal, dx, ddt, dA, dB, dC, dD, dinitial, time, width, state_size,
                *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(), *entering.stride(), *dy.stride(),
                *_strides(dfinal, 3), *_strides_of_both(dx, ddt), *dA.stride(), *dB.stride(), *_strides(dD, 2), **blocks,
            )  # fmt: skip
        return (
            dx,
            ddt,
            dA.sum(0).to(A.dtype),
            dB.sum(0).to(B.dtype),
            dC.sum(0).to(C.dtype),
            None if D is None or dD is None else dD.sum(0).to(D.dtype),
            dinitial if ctx.has_initial_state else None,
            None,
            None,
        )


class _Increment(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dt: Tensor, A: Tensor, C: Tensor, initial_state: Tensor, steps: int) -> Tensor:
        batch, time, width = dt.shape
        y = _empty(dt, batch, time, width)
        entering = _empty(dt, batch, triton.cdiv(time, steps), width)
        grid, blocks = _launch(dt, A.shape[1], steps)
        with torch.cuda.device_of(dt):
            increment_fwd_kernel[grid](
                dt, A, C, initial_state, y, entering, time, width, A.shape[1],
                *dt.stride(), *A.stride(), *C.stride(), *initial_state.stride(), *y.stride(), *entering.stride(), **blocks,
            )  # fmt: skip
        ctx.save_for_backward(dt, A, C, initial_state, entering)
        ctx.steps = steps
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dt, A, C, initial_state, entering = ctx.saved_tensors
        batch, time, width = dt.shape
        state_size = A.shape[1]
        grid, blocks = _launch(dt, state_size, ctx.steps)
        ddt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
        dA, dinitial = (_empty(dt, batch, width, state_size) for _ in range(2))
        dC = _empty(dt, grid[0] // batch, batch, time, state_size)
        with torch.cuda.device_of(dt):
            increment_bwd_kernel[grid](
                dt, A, C, initial_state, entering, dy, ddt, dA, dC, dinitial, time, width, state_size,
                *dt.stride(), *A.stride(), *C.stride(), *initial_state.stride(), *entering.stride(), *dy.stride(),
                *ddt.stride(), *dA.stride(), *dC.stride(), **blocks,
            )  # fmt: skip
        return ddt, dA.sum(0).to(A.dtype), dC.sum(0).to(C.dtype), dinitial.to(initial_state.dtype), None


def _launch(x: Tensor, state_size: int, steps: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid and the sizes of a program's blocks."""
    block_n = triton.next_power_of_2(state_size)
    block_d = min(triton.next_power_of_2(x.shape[2]), max(1, _ENTRIES // block_n))
    sizes = {"BLOCK_T": steps, "BLOCK_D": block_d, "BLOCK_N": block_n}
    # A thread for each pair of channel and n, so that a scan over time stays within a thread.
    return (x.shape[0] * triton.cdiv(x.shape[2], block_d),), sizes | {"num_warps": min(8, max(1, block_d * block_n // 32))}


def _steps(chunk_length: int | None) -> int:
    if chunk_length is None:
        return _STEPS
    if chunk_length < 1 or chunk_length & (chunk_length - 1):
        raise ValueError(f"chunk_length must be a power of two, found {chunk_length}")
    return chunk_length


def _empty(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _strides(tensor: Tensor | None, dimensions: int) -> tuple[int, ...]:
    return (0,) * dimensions if tensor is None else tensor.stride()


def _strides_of_both(first: Tensor, second: Tensor) -> tuple[int, ...]:
    assert first.stride() == second.stride()
    return first.stride()


def _check(dt: Tensor, A: Tensor, **others: Tensor | None) -> None:
    if dt.dim() != 3 or A.dim() != 2 or dt.shape[1] < 1:
        raise ValueError(f"dt must be (B, T, D) with T ≥ 1 and A must be (D, N), found {tuple(dt.shape)} and {tuple(A.shape)}")
    (batch, time, width), state_size = dt.shape, A.shape[1]
    shapes = {"x": (batch, time, width), "D": (width,), "initial_state": (batch, width, state_size)}
    for name, tensor in {"A": A, **others}.items():
        expected = (width, state_size) if name == "A" else shapes.get(name, (batch, time, state_size))
        if tensor is not None and tuple(tensor.shape) != expected:
            raise ValueError(f"{name} must have shape {expected}, found {tuple(tensor.shape)}")
    if any(t is not None and t.dtype == torch.float64 for t in (dt, A, *others.values())):
        raise TypeError("the kernel computes in float32: use farstate.ops.selective_scan for float64")
