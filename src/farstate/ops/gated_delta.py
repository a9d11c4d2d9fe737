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

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops.precision import compute_dtype


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
    batch, time, heads, keys = q.shape
    scale = keys**-0.5 if scale is None else scale
    q, k, v, beta, decay = q.to(dtype), k.to(dtype), v.to(dtype), beta.to(dtype), log_decay.to(dtype).exp()
    state = v.new_zeros(batch, heads, keys, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for t in range(time):
        decayed = decay[:, t, :, None, None] * state
        recalled = torch.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        written = beta[:, t, :, None] * (v[:, t] - recalled)
        state = decayed + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
        outputs.append(scale * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
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

    Raises:
        ValueError: shapes that do not fit each other, or a chunk length below 1.
    """
    _check(q, k, v, log_decay, beta, initial_state)
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1, found {chunk_length}")
    dtype = compute_dtype(q, k, v, log_decay, beta, initial_state)
    out_dtype = v.dtype
    batch, time, heads, keys = q.shape
    scale = keys**-0.5 if scale is None else scale
    length = min(64 if chunk_length is None else chunk_length, time)
    missing = -time % length

    def chunks(tensor: Tensor) -> Tensor:
        """(B, T, H, X) → (B, H, T / Q, Q, X)."""
        tensor = F.pad(tensor.to(dtype), (0, 0, 0, 0, 0, missing))
        return tensor.unflatten(1, (-1, length)).permute(0, 3, 1, 2, 4)

    q, k, v, s, beta = (chunks(t) for t in (q * scale, k, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1)))
    s = s.double().cumsum(-2)
    D = (s - s.mT).clamp(max=0.0).exp().tril().to(dtype)
    from_start, to_end = s.exp().to(dtype), (s[..., -1:, :] - s).exp().to(dtype)
    A = beta * (k @ k.mT * D).tril(-1)
    identity = torch.eye(length, dtype=dtype, device=v.device)
    inverse = torch.linalg.solve_triangular(A + identity, identity.expand_as(A), upper=False, unitriangular=True)
    values, keys_read = inverse @ (beta * v), inverse @ (beta * from_start * k)
    attention = q @ k.mT * D
    state = v.new_zeros(batch, heads, keys, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    outputs = []
    for c in range(v.shape[2]):
        written = values[:, :, c] - keys_read[:, :, c] @ state
        outputs.append((from_start * q)[:, :, c] @ state + attention[:, :, c] @ written)
        state = from_start[:, :, c, -1:] * state + (to_end * k)[:, :, c].mT @ written
    o = torch.stack(outputs, dim=2).permute(0, 2, 3, 1, 4).flatten(1, 2)
    return o[:, :time].to(out_dtype), state


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
