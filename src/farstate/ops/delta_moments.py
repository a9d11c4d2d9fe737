"""Moments of the state of the gated delta rule (see `state_moments`, `gated_delta`), and its outputs with them.

    u_t = β_t (v_t − exp(g_t) S_{t−1}ᵀ k_t)
    S_t = exp(g_t) S_{t−1} + k_t u_tᵀ

What is written, u, depends on what the state recalls, so that it is found first, chunk by chunk: with D_ij = exp(s_i − s_j) for
i ≥ j, it solves (1 + diag(β) strictly-lower(K Kᵀ ∘ D)) U = diag(β) (V − exp(s) K S_0). The rest is the scalar case: step t adds
u_t · (2 S_tᵀ k_t − ‖k_t‖² u_t) to ‖S‖². Only non-positive exponents. Shapes:

    q, k (B, T, H, K) · v (B, T, H, V) · log_decay g, beta (B, T, H) · initial_state (B, H, K, V)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops import moment_scan
from farstate.ops.precision import compute_dtype, without_autocast
from farstate.ops.scalar_moments import Scan

_LENGTH = 32


@torch.no_grad()
def delta_rule(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    read: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> Scan:
    """Moments after every step, without gradients; y_t = S_tᵀ read_t if `read` (B, T, H, K) is given. Shapes: see the module."""
    dtype = compute_dtype(k, v, log_decay, beta, read, initial_state)
    batch, time, heads, keys = k.shape
    length = min(time, _LENGTH if chunk_length is None else chunk_length)
    missing = -time % length

    def chunks(tensor: Tensor) -> Tensor:
        """(B, T, H, X) → (chunks, B, H, Q, X), dense."""
        tensor = F.pad(tensor.to(dtype), (0, 0, 0, 0, 0, missing))
        return tensor.unflatten(1, (-1, length)).permute(1, 0, 3, 2, 4).contiguous()

    with without_autocast(k.device):
        state = k.new_zeros(batch, heads, keys, v.shape[-1], dtype=dtype) if initial_state is None else initial_state.to(dtype)
        k, v, g, beta = (chunks(t) for t in (k, v, log_decay.unsqueeze(-1), beta.unsqueeze(-1)))
        s = g.double().cumsum(-2)
        D = (s - s.mT).clamp_(max=0.0).exp_().to(dtype).tril_()
        from_start, to_end = torch.exp(s).to(dtype), torch.exp(s[..., -1:, :] - s).to(dtype)
        overlap = torch.matmul(k, k.mT).mul_(D)
        # 1. U = values − keys_read S_0; from the right-hand sides of both at once.
        faded = k * from_start
        sides = torch.cat([v, faded], dim=-1).mul_(beta)
        solved = torch.linalg.solve_triangular((overlap * beta).tril_(-1), sides, upper=False, unitriangular=True)
        u, keys_read = solved.split([v.shape[-1], keys], dim=-1)
        leaving = (k * to_end).mT
        states, entering = [], []
        for c in range(k.shape[0]):
            entering.append(state)
            u[c] -= torch.matmul(keys_read[c], state)
            state = torch.matmul(leaving[c], u[c]).addcmul_(from_start[c, ..., -1:, :], state)
            states.append(state)
        before = torch.stack(entering)

        # 2. Moments.
        overlap.diagonal(dim1=-2, dim2=-1).mul_(0.5)
        own = torch.matmul(overlap, u)
        own += torch.matmul(faded, before)
        added = (u * own).sum(-1).mul_(2.0)
        written = u.sum(-1) * k.sum(-1)
        anchors = moment_scan.reduced([entering[c] for c in moment_scan.anchored_chunks(len(entering), length)])
        both = torch.stack([written, added]).transpose(3, 4)
        sums, squares = moment_scan.scan(s.squeeze(-1).transpose(2, 3), both, anchors)

        # 3. Outputs.
        y = None
        if read is not None:
            q = chunks(read)
            y = torch.matmul(torch.matmul(q, k.mT).mul_(D), u)
            y += torch.matmul(q.mul_(from_start), before)
            y = y.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :time]

    def steps(tensor: Tensor) -> Tensor:
        """(chunks, B, Q, H) → (B, T, H)."""
        return tensor.transpose(0, 1).flatten(1, 2)[:, :time].to(dtype)

    return Scan(steps(sums), steps(squares), state, y)
