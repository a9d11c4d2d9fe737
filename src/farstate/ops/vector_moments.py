"""Moments of a state with a decay for each key channel (see `state_moments`), and its read-outs with them.

    S_t = diag(exp g_t) S_{t−1} + k_t v_tᵀ
    o_t = S_tᵀ read_t, or with `diagonal`: S_{t−1}ᵀ read_t + diagonal_t v_t

Every row of the state is a recurrence of its own. What step t adds to ‖S[n, :]‖² is k_t[n] · (2 S_t[n, :] · v_t − k_t[n] ‖v_t‖²):
the state read with v, so that the decays stand on the side of the result. With s the log decays from the start of a chunk, e =
exp(s) and F = k exp(−s), and K-vectors sum_0, square_0 of the rows of the state S_0 that enters,

    R_j      = S_0 v_j + Σ_{l<j} F_l (v_l · v_j) + ½ F_j ‖v_j‖²
    ‖S_i‖²   = e_i² · square_0 + Σ_{j≤i} e_i² · (2 F_j R_j)
    Σ S_i    = e_i · sum_0 + Σ_{j≤i} (e_i · F_j) Σ v_j

from matrix products and cumulative sums over the chunk. They need a range: where a chunk would fade below exp(−30), shorter ones
are tried. If even those of 8 steps do, or if numbers are so large that a product overflows, exponents of differences take the
place of products, one lag after the other. Shapes:

    k, log_decay g, read (B, T, H, K) · v (B, T, H, V) · diagonal (B, T, H) · initial_state (B, H, K, V)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops.moment_scan import SMALLEST_LOG_DECAY, moments
from farstate.ops.precision import compute_dtype, without_autocast
from farstate.ops.scalar_moments import Scan

# A chunk forms exp(−s) twice over, times the squares of k and v, and the largest float32 is exp(88).
_SMALLEST_LOG_DECAY = -30.0
_LENGTHS = (32, 16, 8)
_LAGS = 16


@torch.no_grad()
def vector_decay(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    read: Tensor | None = None,
    diagonal: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> Scan:
    """Moments after every step, without gradients. Shapes: see the module; log decays of any strength.

    Without `read`, and where decays are too strong or numbers too large for products, there is no y: the caller computes it
    otherwise.
    """
    dtype = compute_dtype(k, v, log_decay, read, diagonal, initial_state)
    batch, time, heads, keys = k.shape
    log_decay = log_decay.to(dtype).clamp(min=SMALLEST_LOG_DECAY)
    length = factored_length(log_decay) if chunk_length is None else chunk_length
    factored = length is not None
    length = min(time, _LAGS if length is None else length)
    missing = -time % length

    def chunks(tensor: Tensor) -> Tensor:
        """(B, T, H, X) → (chunks, B, H, Q, X), dense."""
        tensor = F.pad(tensor.to(dtype), (0, 0, 0, 0, 0, missing))
        return tensor.unflatten(1, (-1, length)).permute(1, 0, 3, 2, 4).contiguous()

    with without_autocast(k.device):
        state = k.new_zeros(batch, heads, keys, v.shape[-1], dtype=dtype) if initial_state is None else initial_state.to(dtype)
        k_c, v_c, g = chunks(k), chunks(v), chunks(log_decay)
        if factored:
            read = None if read is None else chunks(read)
            diagonal = None if diagonal is None else chunks(diagonal.unsqueeze(-1))
            sums, squares, states, y = _factored(k_c, v_c, g, read, diagonal, state)
            factored = bool(torch.isfinite(squares).all() and torch.isfinite(states[-1]).all())
        if not factored:
            sums, squares, states, y = *_by_lags(k_c, v_c, g, state), None

    def unchunk(tensor: Tensor) -> Tensor:
        """(chunks, B, H, Q, ...) → (B, T, H, ...)."""
        return tensor.transpose(2, 3).transpose(0, 1).flatten(1, 2)[:, :time]

    return Scan(unchunk(sums), unchunk(squares).clamp_(min=0.0), states[-1].clone(), None if y is None else unchunk(y))


def factored_length(log_decay: Tensor) -> int | None:
    """The longest chunk over which every decay can be written as a product; None if there is none."""
    for length in _LENGTHS:
        padded = F.pad(log_decay.detach(), (0, 0, 0, 0, 0, -log_decay.shape[1] % length))
        if padded.unflatten(1, (-1, length)).sum(2).min() >= _SMALLEST_LOG_DECAY:
            return length
    return None


def _factored(
    k: Tensor, v: Tensor, g: Tensor, read: Tensor | None, diagonal: Tensor | None, initial_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    s = g.cumsum(3)
    e, f = torch.exp(s), torch.exp(-s)
    F_k = k * f
    # before[c] enters chunk c.
    before = k.new_empty(len(k) + 1, *initial_state.shape)
    before[0] = initial_state
    torch.matmul(F_k.mT, v, out=before[1:])
    end = e[..., -1:, :].mT
    for c in range(len(k)):
        before[c + 1].add_(before[c]).mul_(end[c])
    entering = before[:-1]

    G = torch.matmul(v, v.mT).tril_()
    G.diagonal(dim1=-2, dim2=-1).mul_(0.5)
    R = _sum_of_products(G, F_k, v, entering.mT)
    sums, squares = torch.stack([moments(state) for state in entering], dim=1).unsqueeze(-1)
    # The larger part, from before the chunk, in float64: the sums cancel in a variance.
    decay = e.to(torch.float64, copy=True)
    sums = torch.matmul(decay, sums).squeeze(-1)
    squares = torch.matmul(decay.mul_(decay), squares).squeeze(-1)
    squares.add_(R.mul_(F_k).mul_(2.0).cumsum(3).mul_(e).mul_(e).sum(-1))
    sums.add_(torch.mul(F_k, v.sum(-1, keepdim=True), out=R).cumsum(3).mul_(e).sum(-1))
    y = None
    if read is not None:
        reading = read * (e if diagonal is None else torch.exp(s - g))
        A = torch.matmul(reading, F_k.mT).tril_(0 if diagonal is None else -1)
        if diagonal is not None:
            A.diagonal(dim1=-2, dim2=-1).copy_(diagonal.squeeze(-1))
        y = _sum_of_products(A, v, reading, entering)
    return sums, squares, before, y


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """a b + c d, matrices in the last two dimensions, without a pass of its own for the sum."""
    found = torch.matmul(a, b)
    flat = found.flatten(0, -3)
    flat.baddbmm_(c.flatten(0, -3), d.flatten(0, -3))
    return found


def _by_lags(k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Nothing but non-positive exponents: R_j from the steps 0, 1, 2 … before j, then a scan of each row over the chunk."""
    dtype, length = k.dtype, k.shape[3]
    s = g.double().cumsum(3)
    states = torch.matmul((k * torch.exp(s[..., -1:, :] - s).to(dtype)).mT, v)
    end = torch.exp(s[..., -1, :]).to(dtype).unsqueeze(-1)
    for c in range(states.shape[0]):
        states[c].addcmul_(initial_state if c == 0 else states[c - 1], end[c])
    entering = torch.cat([initial_state.unsqueeze(0), states[:-1]])

    R = torch.matmul(v, entering.mT) * torch.exp(s).to(dtype)
    G = torch.matmul(v, v.mT)
    for lag in range(length):
        faded = k[..., : length - lag, :] * torch.exp(s[..., lag:, :] - s[..., : length - lag, :]).to(dtype)
        R[..., lag:, :] += faded * G.diagonal(-lag, dim1=-2, dim2=-1).unsqueeze(-1) * (0.5 if lag == 0 else 1.0)
    added = 2.0 * k * R.double()
    decay = torch.exp(g.double())
    row_sums, row_squares = torch.stack([moments(state) for state in entering], dim=1)
    sums, squares = [], []
    for i in range(length):
        row_sums = decay[..., i, :] * row_sums + k[..., i, :] * v[..., i, :].sum(-1, keepdim=True)
        row_squares = decay[..., i, :].square() * row_squares + added[..., i, :]
        sums.append(row_sums.sum(-1))
        squares.append(row_squares.sum(-1))
    return torch.stack(sums, dim=-1), torch.stack(squares, dim=-1), states
