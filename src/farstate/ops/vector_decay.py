"""What the recurrences with a decay for each key channel share (`gla`, `wkv6`): reading the state before the step that is read.

    S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ
    o_t = S_{t−1}ᵀ r_t + diagonal_t v_t

Shapes: r, k, log_decay g (B, T, H, K), v (B, T, H, V), diagonal (B, T, H), initial_state (B, H, K, V) or None.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops.precision import without_autocast


def chunked(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    diagonal: Tensor,
    initial_state: Tensor | None,
    chunk_length: int | None,
) -> tuple[Tensor, Tensor]:
    """Outputs (B, T, H, V) and final state (B, H, K, V); all inputs of one dtype, float32 or float64.

    Raises:
        ValueError: a chunk length below 1.
    """
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1, found {chunk_length}")
    batch, time, heads, keys = r.shape
    length = min(time, 16 if chunk_length is None else chunk_length)
    missing = -time % length
    with without_autocast(r.device):
        r, k, v, g = (F.pad(t, (0, 0, 0, 0, 0, missing)).unflatten(1, (-1, length)) for t in (r, k, v, log_decay))
        diagonal = F.pad(diagonal, (0, 0, 0, missing)).unflatten(1, (-1, length))
        s = g.double().cumsum(2)
        before = s - g
        pairs = torch.exp((before.unsqueeze(3) - s.unsqueeze(2)).clamp(max=0.0)).to(r.dtype)
        A = torch.einsum("bcihk,bcjhk,bcijhk->bchij", r, k, pairs).tril(-1) + torch.diag_embed(diagonal.transpose(2, 3))
        within = torch.einsum("bchij,bcjhv->bcihv", A, v)
        reading = r * torch.exp(before).to(r.dtype)
        leaving = k * torch.exp(s[:, :, -1:] - s).to(r.dtype)
        decay = torch.exp(s[:, :, -1]).to(r.dtype)
        state = r.new_zeros(batch, heads, keys, v.shape[-1]) if initial_state is None else initial_state.to(r.dtype)
        outputs = []
        for c in range(r.shape[1]):
            outputs.append(within[:, c] + torch.einsum("bihk,bhkv->bihv", reading[:, c], state))
            state = decay[:, c].unsqueeze(-1) * state + torch.einsum("bjhk,bjhv->bhkv", leaving[:, c], v[:, c])
        return torch.cat(outputs, dim=1)[:, :time], state


def check(name: str, r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None) -> None:
    """Shapes that fit each other; `name` is what the caller calls r.

    Raises:
        ValueError: they do not.
    """
    if r.dim() != 4 or v.dim() != 4 or r.shape[1] < 1:
        raise ValueError(
            f"{name} must be (B, T, H, K) with T ≥ 1 and v must be (B, T, H, V), found {tuple(r.shape)} and {tuple(v.shape)}"
        )
    batch, time, heads, keys = r.shape
    expected = {
        "k": (k, (batch, time, heads, keys)),
        "v": (v, (batch, time, heads, v.shape[-1])),
        "log_decay": (log_decay, (batch, time, heads, keys)),
        "initial_state": (initial_state, (batch, heads, keys, v.shape[-1])),
    }
    for label, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{label} must have shape {shape}, found {tuple(tensor.shape)}")
