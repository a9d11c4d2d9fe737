"""State-space duality, the recurrence of Mamba-2 (paper Eq. 1; Dao and Gu 2024, arXiv 2405.21060, Listing 1).

For one head with P channels and N state entries per channel, a scalar decay and the state h (P × N):

    h_t = exp(dt_t A) h_{t−1} + dt_t x_t B_tᵀ
    y_t = h_t C_t + D x_t

`naive` is this definition, one step at a time. `chunked` computes the same from matrix products: within a chunk of Q
steps as an attention with decays, between chunks through the state. Shapes for both:

    x (B, T, H, P) · dt (B, T, H), after softplus · A (H,), negative · B, C (B, T, G, N), H divisible by G
    D (H,) or None · initial_state (B, H, P, N) or None (zero) → y (B, T, H, P), final_state (B, H, P, N)

Both compute in float32, or float64 if an input is; y has the dtype of x, the final state the dtype computed in.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops.precision import compute_dtype, without_autocast
from farstate.ops.ssd_factored import FactoredSSD, smallest_log_decay
from farstate.ops.ssd_masked import MaskedSSD


def naive(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, sequential in time. Shapes: see the module.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    _check(x, dt, A, B, C, D, initial_state)
    dtype = compute_dtype(x, dt, A, B, C, D, initial_state)
    out_dtype = x.dtype
    batch, _, heads, channels = x.shape
    groups, state_size = B.shape[2:]
    x, dt, A = x.to(dtype), dt.to(dtype), A.to(dtype)
    B, C = (t.to(dtype).repeat_interleave(heads // groups, dim=2) for t in (B, C))
    state = x.new_zeros(batch, heads, channels, state_size) if initial_state is None else initial_state.to(dtype)
    outputs = []
    # `unbind`: the gradient of an index into time would be a tensor over all of time, for every step.
    with without_autocast(x.device):
        for x_t, dt_t, B_t, C_t in zip(*(t.unbind(1) for t in (x, dt, B, C)), strict=True):
            increment = torch.einsum("bh,bhp,bhn->bhpn", dt_t, x_t, B_t)
            state = torch.exp(dt_t * A)[..., None, None] * state + increment
            outputs.append(torch.einsum("bhpn,bhn->bhp", state, C_t))
    y = torch.stack(outputs, dim=1)
    if D is not None:
        y = y + D.to(dtype)[:, None] * x
    return y.to(out_dtype), state


def chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as `naive`, from matrix products over chunks of `chunk_length` steps. Shapes: see the module.

    Any T ≥ 1; a T that no whole number of chunks fills is padded with dt = 0, which changes no state. First derivatives
    of both outputs with respect to all inputs. On a CPU, decays that leave at least exp(−60) of a state over a chunk are
    factored (`ssd_factored`, several times faster); stronger ones, in any mixture, go through masks (`ssd_masked`), which
    exponentiate nothing but non-positive differences. Both are safe from overflow, in the gradients too.

    Args:
        chunk_length: Q; None takes the one that balances the Q × Q and the P × N work (`default_chunk_length`), or a
            shorter one if decays can be factored only so.

    Raises:
        ValueError: shapes that do not fit each other, or a chunk length below 1.
    """
    _check(x, dt, A, B, C, D, initial_state)
    if len(x) == 0:
        return naive(x, dt, A, B, C, D, initial_state)
    dtype = compute_dtype(x, dt, A, B, C, D, initial_state)
    out_dtype = x.dtype
    time, groups = x.shape[1], B.shape[2]
    x, dt, A, B, C = (t.to(dtype) for t in (x, dt, A, B, C))
    D = None if D is None else D.to(dtype)
    initial_state = None if initial_state is None else initial_state.to(dtype)
    length, factored = _plan(x, dt, A, B, chunk_length)
    if missing := -time % length:
        x, B, C = (F.pad(t, (0, 0, 0, 0, 0, missing)) for t in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, missing))

    # Heads of one group share B and C, so that a group is a problem of its own; there is one in the usual models.
    per_group = x.shape[2] // groups
    compute = FactoredSSD if factored else MaskedSSD
    results = [
        compute.apply(*parts, length)
        for parts in zip(
            x.split(per_group, dim=2),
            dt.split(per_group, dim=2),
            A.split(per_group),
            B.unbind(dim=2),
            C.unbind(dim=2),
            (None,) * groups if D is None else D.split(per_group),
            (None,) * groups if initial_state is None else initial_state.split(per_group, dim=1),
            strict=True,
        )
    ]
    if groups == 1:
        y, final_state = results[0]
    else:
        y, final_state = (torch.cat(parts, dim=dim) for parts, dim in zip(zip(*results, strict=True), (2, 1), strict=True))
    return y[:, :time].to(out_dtype), final_state


def default_chunk_length(time: int, channels: int, state_size: int) -> int:
    """The Q at which the Q × Q and the P × N work of a head are about the same, in equal parts of `time`."""
    balanced = 2 ** round(math.log2(math.sqrt(channels * state_size)))
    longest = min(max(balanced, 16), 128)
    return -(-time // -(-time // longest))


def _plan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, chunk_length: int | None) -> tuple[int, bool]:
    """The chunk length, and whether decays are weak enough within such chunks to be factored.

    Shorter chunks are tried before giving up the factored form, unless the caller chose the length. The question costs one
    number read back from the device: a GPU is not stopped for it.
    """
    time, channels, state_size = x.shape[1], x.shape[3], B.shape[3]
    if chunk_length is not None and chunk_length < 1:
        raise ValueError(f"chunk_length must be at least 1, found {chunk_length}")
    length = default_chunk_length(time, channels, state_size) if chunk_length is None else min(chunk_length, time)
    if x.device.type != "cpu":
        return length, False
    log_decays = dt.detach() * A.detach()
    shortest = length if chunk_length is not None else min(length, 16)
    shorter = length
    while shorter >= shortest:
        padded = F.pad(log_decays, (0, 0, 0, -time % shorter))
        if padded.unflatten(1, (-1, shorter)).sum(2).min() >= smallest_log_decay(shorter):
            return shorter, True
        shorter //= 2
    return length, False


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None) -> None:
    if x.dim() != 4 or B.dim() != 4 or x.shape[1] < 1:
        raise ValueError(
            f"x must be (B, T, H, P) with T ≥ 1 and B must be (B, T, G, N), found {tuple(x.shape)} and {tuple(B.shape)}"
        )
    batch, time, heads, channels = x.shape
    groups, state_size = B.shape[2:]
    if heads % groups:
        raise ValueError(f"{heads} heads cannot be shared by {groups} groups")
    expected = {
        "dt": (dt, (batch, time, heads)),
        "A": (A, (heads,)),
        "B": (B, (batch, time, groups, state_size)),
        "C": (C, (batch, time, groups, state_size)),
        "D": (D, (heads,)),
        "initial_state": (initial_state, (batch, heads, channels, state_size)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, found {tuple(tensor.shape)}")
