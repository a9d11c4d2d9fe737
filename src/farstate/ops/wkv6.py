"""The recurrence of RWKV-6 (Peng et al. 2024, arXiv 2404.05892, Eq. 19): a decay for each key channel, a bonus for the step itself.

For one head with K key and V value channels, and the state S (K × V):

    o_t = (S_{t−1} + diag(u) k_t v_tᵀ)ᵀ r_t
    S_t = diag(exp w_t) S_{t−1} + k_t v_tᵀ

`naive` is this definition, one step at a time; `chunked` computes the same from matrix products (`vector_decay`).
Shapes for both:

    r, k, log_decay w (B, T, H, K) · v (B, T, H, V) · bonus u (H, K)
    initial_state (B, H, K, V) or None (zero) → o (B, T, H, V), final_state (B, H, K, V)

w is at most 0. Both compute in float32, or float64 if an input is; o has the dtype of r, the final state the dtype
computed in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farstate.ops import vector_decay
from farstate.ops.precision import compute_dtype, without_autocast


def naive(
    r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, sequential in time. Shapes: see the module.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    _check(r, k, v, log_decay, bonus, initial_state)
    dtype, out_dtype = compute_dtype(r, k, v, log_decay, bonus, initial_state), r.dtype
    batch, _, heads, keys = r.shape
    r, k, v, log_decay, bonus = (t.to(dtype) for t in (r, k, v, log_decay, bonus))
    state = r.new_zeros(batch, heads, keys, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    # `unbind`: the gradient of an index into time would be a tensor over all of time, for every step.
    with without_autocast(r.device):
        for r_t, k_t, v_t, w_t in zip(*(t.unbind(1) for t in (r, k, v, log_decay)), strict=True):
            increment = k_t.unsqueeze(-1) * v_t.unsqueeze(-2)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state + bonus.unsqueeze(-1) * increment, r_t))
            state = torch.exp(w_t).unsqueeze(-1) * state + increment
    return torch.stack(outputs, dim=1).to(out_dtype), state


def chunked(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
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
    _check(r, k, v, log_decay, bonus, initial_state)
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1, found {chunk_length}")
    if r.shape[1] == 1 or len(r) == 0:
        return naive(r, k, v, log_decay, bonus, initial_state)
    dtype, out_dtype = compute_dtype(r, k, v, log_decay, bonus, initial_state), r.dtype
    r, k, v, log_decay, bonus = (t.to(dtype) for t in (r, k, v, log_decay, bonus))
    initial_state = None if initial_state is None else initial_state.to(dtype)
    o, final_state = vector_decay.chunked(r, k, v, log_decay, bonus, 1.0, initial_state, chunk_length)
    return o.to(out_dtype), final_state


def _check(r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor, initial_state: Tensor | None) -> None:
    vector_decay.check("r", r, k, v, log_decay, initial_state)
    if bonus.shape != r.shape[2:]:
        raise ValueError(f"bonus must have shape {tuple(r.shape[2:])}, found {tuple(bonus.shape)}")
