"""Gated linear attention (GLA; Yang et al. 2023, arXiv 2312.06635, Eq. 4): a decay for each key channel.

For one head with K key and V value channels, and the state S (K × V):

    S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ
    o_t = scale · S_tᵀ q_t

`naive` is this definition, one step at a time; `chunked` computes the same from matrix products (`vector_decay`).
Shapes for both:

    q, k, log_decay g (B, T, H, K) · v (B, T, H, V) · scale, None: K^(−1/2)
    initial_state (B, H, K, V) or None (zero) → o (B, T, H, V), final_state (B, H, K, V)

g is at most 0. Both compute in float32, or float64 if an input is; o has the dtype of q, the final state the dtype
computed in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farstate.ops import vector_decay
from farstate.ops.precision import compute_dtype, without_autocast


def naive(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, sequential in time. Shapes: see the module.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    vector_decay.check("q", q, k, v, log_decay, initial_state)
    dtype, out_dtype = compute_dtype(q, k, v, log_decay, initial_state), q.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, _, heads, keys = q.shape
    q, k, v, log_decay = (t.to(dtype) for t in (q, k, v, log_decay))
    state = q.new_zeros(batch, heads, keys, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    # `unbind`: the gradient of an index into time would be a tensor over all of time, for every step.
    with without_autocast(q.device):
        for q_t, k_t, v_t, g_t in zip(*(t.unbind(1) for t in (q, k, v, log_decay)), strict=True):
            state = torch.exp(g_t).unsqueeze(-1) * state + k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
            outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q_t))
    return torch.stack(outputs, dim=1).to(out_dtype), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `naive`, from matrix products over chunks of `chunk_length` steps. Shapes: see the module.

    Any T ≥ 1, decays of any strength and mixture, in the gradients too. First derivatives of both outputs with respect to all
    inputs. Memory is linear in T.

    Args:
        chunk_length: Q, rounded up to a power of two; None takes one that fits the sizes and, on a CPU, the decays.

    Raises:
        ValueError: shapes that do not fit each other, or a chunk length below 1.
    """
    vector_decay.check("q", q, k, v, log_decay, initial_state)
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1, found {chunk_length}")
    if q.shape[1] == 1 or len(q) == 0:
        return naive(q, k, v, log_decay, scale, initial_state)
    dtype, out_dtype = compute_dtype(q, k, v, log_decay, initial_state), q.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, log_decay = (t.to(dtype) for t in (q, k, v, log_decay))
    initial_state = None if initial_state is None else initial_state.to(dtype)
    o, final_state = vector_decay.chunked(q, k, v, log_decay, None, scale, initial_state, chunk_length)
    return o.to(out_dtype), final_state
