"""Σ of the entries and ‖S‖² of a recurrent state after every step, the state in registers.

    S_t = diag(exp g_t) S_{t−1} + k_t u_tᵀ
    u_t = weight_t v_t                                       Mamba-2, GLA, RWKV-6
    u_t = weight_t (v_t − (diag(exp g_t) S_{t−1})ᵀ k_t)      DELTA: Gated DeltaNet

Given k and the decays the columns of S do not know of each other. A program takes one batch row, one head and BLOCK_V columns,
all K rows of them, and walks through time; its state never leaves the registers. So decays of any strength are safe and nothing
drifts: the numbers are those of the definition (`farstate.ops.state_moments.naive`). Squares are summed about the mean, which
keeps the digits of a small variance; what the programs of a head found is put together afterwards, in float64. Offsets into time
and batch are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from farstate.kernels.addressing import offsets

# Entries of the state that a program, one warp, holds: 16 a thread.
_ENTRIES = 512


@triton.jit
def state_moments_fwd_kernel(
    k, v, log_decay, weight, initial, final, partial,
    time, heads, per_group, keys, values,
    stride_kb, stride_kt, stride_kg, stride_kk,
    stride_vb, stride_vt, stride_vh, stride_vv,
    stride_gb, stride_gt, stride_gh, stride_gk,
    stride_wb, stride_wt, stride_wh,
    stride_ib, stride_ih, stride_ik, stride_iv,
    stride_fb, stride_fh, stride_fk, stride_fv,
    stride_pn, stride_pc, stride_pb, stride_pt, stride_ph,
    DELTA: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Shapes: see `scan`. partial (2, column blocks, B, T, H): of the entries in the columns of the program, the mean m and
    Σ (h − m)²."""
    i_c = tl.program_id(0)
    i_b = tl.program_id(1) // heads
    i_h = tl.program_id(1) % heads
    i_k = tl.arange(0, BLOCK_K)
    i_v = i_c * BLOCK_V + tl.arange(0, BLOCK_V)
    m_k, m_v = i_k < keys, i_v < values
    p_k = k + offsets(i_b, stride_kb) + offsets(i_h // per_group, stride_kg) + offsets(i_k, stride_kk)
    p_v = v + offsets(i_b, stride_vb) + offsets(i_h, stride_vh) + offsets(i_v, stride_vv)
    p_g = log_decay + offsets(i_b, stride_gb) + offsets(i_h, stride_gh) + offsets(i_k, stride_gk)
    p_out = partial + offsets(i_c, stride_pc) + offsets(i_b, stride_pb) + offsets(i_h, stride_ph)
    m = m_k[:, None] & m_v[None, :]
    entries = (keys * tl.minimum(BLOCK_V, values - i_c * BLOCK_V)).to(tl.float32)
    if weight is not None:
        p_w = weight + offsets(i_b, stride_wb) + offsets(i_h, stride_wh)
    if initial is None:
        b_s = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    else:
        p_i = initial + offsets(i_b, stride_ib) + offsets(i_h, stride_ih)
        p_i += offsets(i_k, stride_ik)[:, None] + offsets(i_v, stride_iv)[None, :]
        b_s = tl.load(p_i, mask=m, other=0.0).to(tl.float32)
    for _ in range(time):
        b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
        b_u = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
        b_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
        b_s *= tl.exp(b_g)[:, None]
        if DELTA:
            b_u -= tl.sum(b_s * b_k[:, None], axis=0)
        if weight is not None:
            b_u *= tl.load(p_w).to(tl.float32)
            p_w += stride_wt
        b_s += b_k[:, None] * b_u[None, :]
        b_mean = tl.sum(tl.sum(b_s, axis=1), axis=0) / entries
        b_apart = tl.where(m, b_s - b_mean, 0.0)
        tl.store(p_out, b_mean)
        tl.store(p_out + stride_pn, tl.sum(tl.sum(b_apart * b_apart, axis=1), axis=0))
        # One step further at a time: no product that could leave 32 bits.
        p_k += stride_kt
        p_v += stride_vt
        p_g += stride_gt
        p_out += stride_pt
    if final is not None:
        p_f = final + offsets(i_b, stride_fb) + offsets(i_h, stride_fh)
        p_f += offsets(i_k, stride_fk)[:, None] + offsets(i_v, stride_fv)[None, :]
        tl.store(p_f, b_s, mask=m)


def scan(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    delta: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and squared norms (B, T, H), float64, and the final state (B, H, K, V), float32, without gradients; any strides.

    Args:
        k: (B, T, G, K), H divisible by G.
        v: (B, T, H, V).
        log_decay: (B, T, H, K), or (B, T, H) for one decay a head.
        weight: (B, T, H), or None for 1; with `delta`, β.
        initial_state: (B, H, K, V), or None for zero.

    Raises:
        ValueError: shapes that do not fit each other, or a float64 input.
    """
    _check(k, v, log_decay, weight, initial_state)
    batch, time, groups, keys = k.shape
    heads, values = v.shape[2:]
    decay = log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1).expand(batch, time, heads, keys)
    block_k = triton.next_power_of_2(keys)
    block_v = min(triton.next_power_of_2(values), max(1, _ENTRIES // block_k))
    columns = triton.cdiv(values, block_v)
    partial = torch.empty(2, columns, batch, time, heads, dtype=torch.float32, device=k.device)
    final = torch.empty(batch, heads, keys, values, dtype=torch.float32, device=k.device)
    state_moments_fwd_kernel[(columns, batch * heads)](
        k, v, decay, weight, initial_state, final, partial,
        time, heads, heads // groups, keys, values,
        *k.stride(), *v.stride(), *decay.stride(), *((0, 0, 0) if weight is None else weight.stride()),
        *((0, 0, 0, 0) if initial_state is None else initial_state.stride()), *final.stride(), *partial.stride(),
        DELTA=delta, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=1,
    )  # fmt: skip
    mean, about_mean = partial.double()
    entries = keys * torch.arange(0, values, block_v, device=k.device).sub_(values).neg_().clamp_(max=block_v).view(-1, 1, 1, 1)
    return (entries * mean).sum(0), (entries * mean.square() + about_mean).sum(0), final


def _check(k: Tensor, v: Tensor, log_decay: Tensor, weight: Tensor | None, initial_state: Tensor | None) -> None:
    if k.dim() != 4 or v.dim() != 4 or k.shape[1] < 1 or v.shape[2] % k.shape[2]:
        raise ValueError(f"k must be (B, T, G, K) and v (B, T, H, V), H divisible by G, found {tuple(k.shape)}, {tuple(v.shape)}")
    batch, time, _, keys = k.shape
    heads, values = v.shape[2:]
    allowed = {
        "v": (v, [(batch, time, heads, values)]),
        "log_decay": (log_decay, [(batch, time, heads), (batch, time, heads, keys)]),
        "weight": (weight, [(batch, time, heads)]),
        "initial_state": (initial_state, [(batch, heads, keys, values)]),
    }
    for name, (tensor, shapes) in allowed.items():
        if tensor is not None and tuple(tensor.shape) not in shapes:
            raise ValueError(f"{name} must have shape {' or '.join(map(str, shapes))}, found {tuple(tensor.shape)}")
    if any(t is not None and t.dtype == torch.float64 for t in (k, v, log_decay, weight, initial_state)):
        raise ValueError("the kernel computes in float32: use farstate.ops.state_moments for float64")
