"""Moments of a state with one decay a head, u_t k_tᵀ added at every step (see `state_moments`), and its read-outs with them.

    S_t = exp(g_t) S_{t−1} + weight_t x_t k_tᵀ
    y_t = S_t read_t

What each step adds to ‖S‖² is u_t · (2 S_t k_t − ‖k_t‖² u_t). Within a chunk that is a row of the lower triangle of K Kᵀ with
half its diagonal, times the inputs, so that the squared norms of u and k need no pass of their own; from before the chunk it is
k_t read from the state that entered. Shapes:

    x (B, T, H, P) · k, read (B, T, G, N), H divisible by G · log_decay g, weight (B, T, H) · initial_state (B, H, P, N)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops import moment_scan, ssd
from farstate.ops.precision import compute_dtype, without_autocast
from farstate.ops.ssd_chunks import chunks, unchunk

_Form = Callable[..., tuple[Tensor, Tensor, Tensor]]


class Scan(NamedTuple):
    """sums, squared_norms (B, T, H), float64; final_state (B, H, P, N); y (B, T, H, P) if `read` was given."""

    sums: Tensor
    squared_norms: Tensor
    final_state: Tensor
    y: Tensor | None


@torch.no_grad()
def scalar_decay(
    x: Tensor,
    k: Tensor,
    log_decay: Tensor,
    *,
    weight: Tensor | None = None,
    read: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> Scan:
    """Moments after every step, without gradients. Shapes: see the module; log decays of any strength.

    Raises:
        ValueError: a chunk length below 1.
    """
    dtype = compute_dtype(x, k, log_decay, weight, read, initial_state)
    time, heads = x.shape[1:3]
    groups = k.shape[2]
    x, k = x.to(dtype), k.to(dtype)
    log_decay = log_decay.to(dtype).clamp(min=moment_scan.SMALLEST_LOG_DECAY)
    weight = torch.ones_like(log_decay) if weight is None else weight.to(dtype)
    length, factored = ssd._plan(x, log_decay, log_decay.new_ones(heads), k, chunk_length)
    missing = -time % length
    x, k = (F.pad(t, (0, 0, 0, 0, 0, missing)) for t in (x, k))
    read = None if read is None else F.pad(read.to(dtype), (0, 0, 0, 0, 0, missing))
    log_decay, weight = (F.pad(t, (0, 0, 0, missing)) for t in (log_decay, weight))
    form = _factored if factored else _masked
    per_group = heads // groups
    with without_autocast(x.device):
        parts = [
            _moments(form, length, *group)
            for group in zip(
                x.split(per_group, dim=2),
                weight.split(per_group, dim=2),
                log_decay.split(per_group, dim=2),
                k.unbind(dim=2),
                (None,) * groups if read is None else read.unbind(dim=2),
                (None,) * groups if initial_state is None else initial_state.to(dtype).split(per_group, dim=1),
                strict=True,
            )
        ]
    sums, squares, finals, outputs = zip(*parts, strict=True)
    return Scan(
        torch.cat(sums, dim=2)[:, :time],
        torch.cat(squares, dim=2)[:, :time],
        finals[0] if groups == 1 else torch.cat(finals, dim=1),
        None if read is None else (outputs[0] if groups == 1 else torch.cat(outputs, dim=2))[:, :time],
    )


def _moments(
    form: _Form,
    length: int,
    x: Tensor,
    weight: Tensor,
    log_decay: Tensor,
    k: Tensor,
    read: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    batch, time, heads, channels = x.shape
    count, size = time // length, k.shape[-1]
    x_c, weight_c, g = chunks(x, length), chunks(weight, length), chunks(log_decay, length)
    k_c = chunks(k, length).contiguous().view(-1, length, size)
    # What is read: first the outputs, last what each step adds to ‖S‖² (k, with half of what the step itself wrote).
    reads = k_c if read is None else torch.cat([chunks(read, length).reshape(-1, length, size), k_c], dim=1)
    pairs = torch.bmm(reads, k_c.mT)
    pairs.view(count * batch, -1, length, length).tril_()
    pairs[:, -length:].diagonal(dim1=1, dim2=2).mul_(0.5)
    s = g.double().cumsum(2)
    found, scale, states = form(x_c, weight_c, s, k_c, reads, pairs, initial_state)

    added = found[:, :, -length:].mul_(x_c).sum(-1).mul_(weight_c * scale).mul_(2.0)
    written = x_c.sum(-1).mul_(weight_c).mul_(k_c.sum(-1).view(count, batch, length, 1))
    zero = x.new_zeros(batch, heads, 1, 1)
    before = [zero if initial_state is None else initial_state, *states]
    anchors = moment_scan.reduced([before[c] for c in moment_scan.anchored_chunks(count, length)])
    sums, squares = moment_scan.scan(s, torch.stack([written, added]), anchors)
    y = None
    if read is not None:
        y = x.new_empty(batch, time, heads, channels)
        torch.mul(found[:, :, :length], scale.unsqueeze(-1), out=chunks(y, length))
    return unchunk_heads(sums), unchunk_heads(squares), states[-1].clone(), y


def unchunk_heads(tensor: Tensor) -> Tensor:
    """(T / Q, B, Q, H) → (B, T, H)."""
    return unchunk(tensor, tensor.shape[1])


def _factored(
    x_c: Tensor, weight_c: Tensor, s: Tensor, k_c: Tensor, reads: Tensor, pairs: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(s_i − s_j) as a product, as in `ssd_factored`: what is found lacks the factor exp(s_i), returned beside it."""
    count, batch, length, heads, channels = x_c.shape
    size = k_c.shape[-1]
    e, f = torch.exp(s).to(x_c.dtype), torch.exp(-s).to(x_c.dtype)
    # Dense, unlike x_c: a view of neighbouring steps of one sequence.
    rows = x_c.new_empty(x_c.shape)
    torch.mul(x_c, (weight_c * f).unsqueeze(-1), out=rows)
    rows = rows.view(-1, length, heads * channels)
    states = torch.bmm(rows.mT, k_c).view(count, batch, heads, channels, size)
    _accumulate(states, initial_state, e[:, :, -1], before=True)
    found = torch.bmm(pairs, rows)
    _read_entering(found, reads, states, initial_state)
    return found.view(count, batch, -1, heads, channels), e, states


def _masked(
    x_c: Tensor, weight_c: Tensor, s: Tensor, k_c: Tensor, reads: Tensor, pairs: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """exp(s_i − s_j) as a mask of each head: any decays."""
    count, batch, length, heads, channels = x_c.shape
    size, kinds = k_c.shape[-1], reads.shape[1] // length
    u = x_c * weight_c.unsqueeze(-1)
    leaving = (u * torch.exp(s[:, :, -1:] - s).to(u.dtype).unsqueeze(-1)).reshape(-1, length, heads * channels)
    states = torch.bmm(leaving.mT, k_c).view(count, batch, heads, channels, size)
    _accumulate(states, initial_state, torch.exp(s[:, :, -1]).to(u.dtype), before=False)
    by_head = s.transpose(2, 3)
    L = torch.exp((by_head.unsqueeze(-1) - by_head.unsqueeze(-2)).clamp_(max=0.0)).to(u.dtype)
    weights = pairs.view(count, batch, 1, kinds, length, length) * L.unsqueeze(3)
    within = torch.matmul(weights, u.transpose(2, 3).unsqueeze(3)).permute(0, 1, 3, 4, 2, 5)
    from_before = torch.zeros(count * batch, kinds * length, heads * channels, dtype=u.dtype, device=u.device)
    _read_entering(from_before, reads, states, initial_state)
    from_before = from_before.view(count, batch, kinds, length, heads, channels)
    found = within + from_before * torch.exp(s).to(u.dtype)[:, :, None, :, :, None]
    return found.reshape(count, batch, kinds * length, heads, channels), torch.ones_like(weight_c), states


def _accumulate(states: Tensor, initial_state: Tensor | None, end: Tensor, before: bool) -> None:
    """From the increments of the chunks to the states after them; `end` (chunks, B, H), the decay over a chunk.

    `before`: the increments have not yet decayed to the end of their chunk.
    """
    for c in range(states.shape[0]):
        entering = states[c - 1] if c > 0 else initial_state
        decay = end[c, ..., None, None]
        if before:
            if entering is not None:
                states[c] += entering
            states[c] *= decay
        elif entering is not None:
            states[c].addcmul_(entering, decay)


def _read_entering(found: Tensor, reads: Tensor, states: Tensor, initial_state: Tensor | None) -> None:
    """Add to `found` (chunks · B, R, H P) what `reads` (chunks · B, R, N) find in the states that enter."""
    count, batch = states.shape[:2]
    flat = states.flatten(2, 3)
    if initial_state is not None:
        found[:batch].baddbmm_(reads[:batch], initial_state.flatten(1, 2).mT)
    if count > 1:
        found[batch:].baddbmm_(reads[batch:], flat[:-1].reshape(-1, *flat.shape[2:]).mT)
