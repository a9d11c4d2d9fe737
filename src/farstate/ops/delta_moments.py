"""Moments of the state of the gated delta rule (see `state_moments`), and its outputs with them.

    u_t = β_t (v_t − exp(g_t) S_{t−1}ᵀ k_t)
    S_t = exp(g_t) S_{t−1} + k_t u_tᵀ

What is written, u, depends on what the state recalls; the chunked form (`gated_delta_chunks`) finds it for all steps of a chunk
and keeps it for its backward pass, with N = K Kᵀ ∘ D below the diagonal and the states that enter the chunks. From there on it is
the scalar case: step t adds u_t · (2 S_tᵀ k_t − ‖k_t‖² u_t) to ‖S‖², and that sum over a chunk is

    U · (2 (N + ½ diag ‖k‖²) U + 2 e^s K S)

Only non-positive exponents. Shapes as in `gated_delta`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops import gated_delta as operation
from farstate.ops import moment_scan
from farstate.ops.gated_delta_chunks import GatedDelta
from farstate.ops.precision import compute_dtype, without_autocast
from farstate.ops.scalar_moments import Scan


class _Kept:
    """Stands in for the context of an autograd function: what its forward pass keeps."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


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
    """Moments after every step, without gradients; y_t = S_tᵀ read_t if `read` (B, T, H, K) is given."""
    dtype = compute_dtype(k, v, log_decay, beta, read, initial_state)
    (batch, time, heads, keys), values = k.shape, v.shape[-1]
    length = min(time, operation.default_chunk_length(time, keys, values) if chunk_length is None else chunk_length)
    missing = -time % length
    k, v = (F.pad(t.to(dtype), (0, 0, 0, 0, 0, missing)) for t in (k, v))
    log_decay = log_decay.to(dtype).clamp(min=moment_scan.SMALLEST_LOG_DECAY)
    log_decay, beta = (F.pad(t.to(dtype), (0, 0, 0, missing)) for t in (log_decay, beta))
    q = k if read is None else F.pad(read.to(dtype), (0, 0, 0, 0, 0, missing))
    initial_state = None if initial_state is None else initial_state.to(dtype)
    kept = _Kept()
    y, final_state = GatedDelta.forward(kept, q, k, v, log_decay, beta, initial_state, length)
    _, k_c, _, _, from_start, _, _, N, _, _, _, U, states = kept.tensors
    width = batch * heads
    with without_autocast(k.device):
        if initial_state is None:
            states[:width].zero_()
        N.diagonal(dim1=1, dim2=2).copy_(0.5 * k_c.square().sum(-1))
        own = torch.bmm(N, U).baddbmm_(k_c * from_start, states[:-width])
        added = own.mul_(U).sum(-1).mul_(2.0)
        written = U.sum(-1).mul_(k_c.sum(-1))

        def steps(by_row: Tensor) -> Tensor:
            """(chunks · B · H, Q) → (chunks, B, Q, H)."""
            return by_row.view(-1, batch, heads, length).transpose(2, 3)

        s = log_decay.double().unflatten(1, (-1, length)).transpose(0, 1).cumsum(2)
        before = states.view(-1, batch, heads, keys, values)
        anchors = moment_scan.reduced([before[c] for c in moment_scan.anchored_chunks(len(before) - 1, length)])
        sums, squares = moment_scan.scan(s, torch.stack([steps(written), steps(added)]), anchors)

    def unchunk(tensor: Tensor) -> Tensor:
        """(chunks, B, Q, H) → (B, T, H)."""
        return tensor.transpose(0, 1).flatten(1, 2)[:, :time]

    return Scan(unchunk(sums), unchunk(squares), final_state, None if read is None else y[:, :time])
