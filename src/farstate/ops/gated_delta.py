"""The gated delta rule, the recurrence of Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464, Eq. 10).

For one head with K key and V value channels, a scalar decay exp(g_t), a writing strength β_t and the state S (K × V):

    u_t = β_t (v_t − exp(g_t) S_{t−1}ᵀ k_t)          what is written: the value less what the decayed state recalls for its key
    S_t = exp(g_t) S_{t−1} + k_t u_tᵀ
    o_t = scale · S_tᵀ q_t

`naive` is this definition, one step at a time. `chunked` computes the same from matrix products. Shapes for both:

    q, k (B, T, H, K) · v (B, T, H, V) · log_decay g (B, T, H), not positive · beta (B, T, H)
    scale: None for K^(−1/2) · initial_state (B, H, K, V) or None (zero) → o (B, T, H, V), final_state (B, H, K, V)

With keys of unit length and β in [0, 2] no step expands the state. Nothing is normalised here: the caller does.
Both compute in float32, or float64 if an input is; o has the dtype of v, the final state the dtype computed in.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops.gated_delta_chunks import GatedDelta
from farstate.ops.precision import compute_dtype, without_autocast


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, sequential in time. Shapes: see the module.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    _check(q, k, v, log_decay, beta, initial_state)
    dtype = compute_dtype(q, k, v, log_decay, beta, initial_state)
    out_dtype = v.dtype
    batch, _, heads, keys = q.shape
    scale = keys**-0.5 if scale is None else scale
    state = v.new_zeros(batch, heads, keys, v.shape[-1], dtype=dtype) if initial_state is None else initial_state.to(dtype)
    outputs = []
    # Unbound rather than indexed: the gradient of an index is as large as the whole sequence.
    with without_autocast(q.device):
        for q_t, k_t, v_t, g_t, beta_t in zip(*(t.to(dtype).unbind(dim=1) for t in (q, k, v, log_decay, beta)), strict=True):
            decayed = torch.exp(g_t)[..., None, None] * state
            recalled = torch.einsum("bhkv,bhk->bhv", decayed, k_t)
            written = beta_t.unsqueeze(-1) * (v_t - recalled)
            state = decayed + torch.einsum("bhk,bhv->bhkv", k_t, written)
            outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q_t))
    return torch.stack(outputs, dim=1).to(out_dtype), state


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `naive`, from matrix products over chunks of `chunk_length` steps. Shapes: see the module.

    Any T ≥ 1; a T that no whole number of chunks fills is padded with steps that neither decay nor write. First derivatives of
    both outputs with respect to all inputs. Nothing but non-positive differences of log decays is exponentiated and used:
    decays of any strength, in any mixture, are safe from overflow, in the gradients too. Memory grows linearly with T.

    Args:
        chunk_length: Q; None takes the one that balances the work within chunks and between them (`default_chunk_length`).

    Raises:
        ValueError: shapes that do not fit each other, or a chunk length below 1.
    """
    _check(q, k, v, log_decay, beta, initial_state)
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1, found {chunk_length}")
    dtype = compute_dtype(q, k, v, log_decay, beta, initial_state)
    out_dtype = v.dtype
    time, keys = q.shape[1], q.shape[3]
    if time == 1 or len(q) == 0:
        return naive(q, k, v, log_decay, beta, scale, initial_state)
    scale = keys**-0.5 if scale is None else scale
    length = min(default_chunk_length(time, keys, v.shape[-1]) if chunk_length is None else chunk_length, time)
    q, k, v, log_decay, beta = (t.to(dtype) for t in (q, k, v, log_decay, beta))
    if missing := -time % length:
        q, k, v = (F.pad(t, (0, 0, 0, 0, 0, missing)) for t in (q, k, v))
        log_decay, beta = (F.pad(t, (0, 0, 0, missing)) for t in (log_decay, beta))
    initial_state = None if initial_state is None else initial_state.to(dtype)
    o, final_state = GatedDelta.apply(q * scale, k, v, log_decay, beta, initial_state, length)
    return o[:, :time].to(out_dtype), final_state


def default_chunk_length(time: int, keys: int, values: int) -> int:
    """The Q at which the Q × Q work of a head costs about as much as the K × V work, in equal parts of `time`."""
    balanced = 2 ** round(math.log2(math.sqrt(keys * values) / 2))
    longest = min(max(balanced, 16), 64)
    return -(-time // -(-time // longest))


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None) -> None:
    if q.dim() != 4 or v.dim() != 4 or q.shape[1] < 1:
        raise ValueError(
            f"q must be (B, T, H, K) with T ≥ 1 and v must be (B, T, H, V), found {tuple(q.shape)} and {tuple(v.shape)}"
        )
    batch, time, heads, keys = q.shape
    values = v.shape[-1]
    expected = {
        "k": (k, (batch, time, heads, keys)),
        "v": (v, (batch, time, heads, values)),
        "log_decay": (log_decay, (batch, time, heads)),
        "beta": (beta, (batch, time, heads)),
        "initial_state": (initial_state, (batch, heads, keys, values)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, found {tuple(tensor.shape)}")
