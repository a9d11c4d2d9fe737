"""Σ of the entries and ‖S‖² of a recurrent state at every position, without materialising the states.

Mean, standard deviation and norm of a state follow from these two and the number of its entries. For one head whose state is
written by outer products (Mamba-2, Gated DeltaNet: one decay α_t; `scalar_moments`),

    S_t = α_t S_{t−1} + u_t k_tᵀ
    Σ S_t    = α_t Σ S_{t−1} + (Σ u_t)(Σ k_t)
    ‖S_t‖²   = α_t² ‖S_{t−1}‖² + 2 u_tᵀ(S_t k_t) − ‖u_t‖² ‖k_t‖²

and S_t k_t is one more read-out of the same recurrence, k_t in the place of what it is read with. With a decay for each key
channel (GLA, RWKV-6; `vector_moments`) the same holds for every row S[n, :] of the state. The states at the beginnings of
chunks exist anyway; ‖S‖² and Σ S start anew from them after a few dozen steps, so that nothing drifts. Mamba-1, where every
entry has its own decay, has no such form: its states are reduced chunk by chunk (`diagonal_moments`).

States that hold the last inputs (a convolution's columns, a token shift) are sums of a few numbers each (`window_moments`).

`recording` collects the moments of every recurrence that a model computes, and of what it remembers of its last inputs:

    with state_moments.recording() as record:
        hidden, state = model(tokens, state)
    record.layers[i].norm, .mean, .std         # (B, T, H)
    record.of(state.layers[i].auxiliary["conv"]).std   # (B, T, 1)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from farstate.ops import gated_delta, gla, selective_scan, ssd, wkv6
from farstate.ops.delta_moments import delta_rule
from farstate.ops.diagonal_moments import diagonal_decay
from farstate.ops.precision import compute_dtype
from farstate.ops.scalar_moments import Scan, scalar_decay
from farstate.ops.vector_moments import vector_decay
from farstate.ops.window_moments import window

__all__ = [
    "Moments",
    "Record",
    "delta_rule",
    "diagonal_decay",
    "naive",
    "observe_inputs",
    "observed",
    "recording",
    "scalar_decay",
    "vector_decay",
]

Result = tuple[Tensor, Tensor]
"""Outputs and final state of an operation."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Of a state after every step.

    Attributes:
        sums, squared_norms: Σ of the entries and of their squares, (B, T, H), float64: where entries differ little, most
            digits of the two cancel in `std`. For Mamba-1 a head is one channel.
        entries: how many a head has.
    """

    sums: Tensor
    squared_norms: Tensor
    entries: int

    @property
    def norm(self) -> Tensor:
        return self.squared_norms.sqrt()

    @property
    def mean(self) -> Tensor:
        return self.sums / self.entries

    @property
    def std(self) -> Tensor:
        """Of the entries about their mean, as of a whole population.

        Relative to itself to about 1e-7 · mean / std on average, where states are float32; for Mamba-1 the square of that ratio.
        """
        return (self.squared_norms / self.entries - self.mean.square()).clamp(min=0.0).sqrt()


@dataclass(frozen=True, eq=False)
class Record:
    """Moments of what a model computed.

    Attributes:
        layers: of each recurrence, in the order of the layers; those of a second call follow those of the first.
        inputs: of each state that holds the last inputs, beside that state after the segment.
    """

    layers: list[Moments] = field(default_factory=list)
    inputs: list[tuple[Tensor, Moments]] = field(default_factory=list)

    def of(self, state: Tensor) -> Moments | None:
        """The moments (B, T, 1) of what ended as `state`, an auxiliary tensor that the model returned; None: not recorded."""
        return next((moments for final, moments in self.inputs if final is state), None)


_RECORD: ContextVar[Record | None] = ContextVar("state_moments", default=None)


@contextmanager
def recording() -> Iterator[Record]:
    """Within this context every recurrence also records the moments of its state. They carry no gradient."""
    record = Record()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def observed(operation: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """`function`, which computes `operation`; while `recording` is active, one that also records the moments of its states."""
    record = _RECORD.get()
    if record is None:
        return function

    def with_moments(*args: Any, **kwargs: Any) -> Result:
        result, moments = _OPERATIONS[operation](function, *args, **kwargs)
        record.layers.append(moments)
        return result

    return with_moments


def observe_inputs(x: Tensor, past: Tensor | None, final: Tensor) -> None:
    """While `recording` is active, record the moments of a state that holds the last inputs.

    Args:
        x: inputs of the segment, (B, T, C).
        past: the state before it, (B, C, n), oldest first, or (B, C); None for zero.
        final: the state after it, of the same shape.
    """
    record = _RECORD.get()
    if record is None or not final.numel():
        return
    inputs = 1 if final.dim() == 2 else final.shape[2]
    sums, squares = window(x, past if past is None else past.reshape(*past.shape[:2], inputs), inputs)
    record.inputs.append((final, Moments(sums.unsqueeze(-1), squares.unsqueeze(-1), final[0].numel())))


def naive(
    function: Callable[..., Result], inputs: dict[str, Tensor], constants: dict[str, Any], initial_state: Tensor | None = None
) -> Moments:
    """The definition: one step at a time, the state of each reduced and dropped.

    Args:
        function: the operation, its `naive` for instance.
        inputs: its arguments with a time axis, dimension 1.
        constants: its other arguments, but for the initial state.
    """
    time = next(iter(inputs.values())).shape[1]
    state, sums, squares = initial_state, [], []
    for t in range(time):
        _, state = function(**{name: value[:, t : t + 1] for name, value in inputs.items()}, **constants, initial_state=state)
        entries = state.flatten(2).double()
        sums.append(entries.sum(-1))
        squares.append(entries.square().sum(-1))
    return Moments(torch.stack(sums, dim=1), torch.stack(squares, dim=1), entries.shape[-1])


def _moments(found: Scan, entries: int) -> Moments:
    return Moments(found.sums, found.squared_norms, entries)


def _by_kernel(k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None, **options: Any) -> Scan | None:
    """By the kernel where there is a GPU and no float64; arguments as in `farstate.kernels.state_moments.scan`."""
    tensors = (k, v, log_decay, initial_state, options.get("weight"))
    if not _on_gpu(k) or compute_dtype(*tensors) == torch.float64:
        return None
    from farstate.kernels import state_moments as kernel

    with torch.no_grad():
        sums, squares, final_state = kernel.scan(k, v, log_decay, initial_state=initial_state, **options)
    return Scan(sums, squares, final_state, None)


def _on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _jointly(function: Callable[..., Result], definition: ModuleType, *inputs: Tensor | None) -> bool:
    """Whether outputs and moments may be computed in one go: this is the torch path, and nothing asks for gradients."""
    wants_gradients = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
    return function is definition.chunked and not wants_gradients


def _ssd(
    function: Callable[..., Result],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Result, Moments]:
    joint = not options and _jointly(function, ssd, x, dt, A, B, C, D, initial_state)
    transposed = None if initial_state is None else initial_state.mT
    found = _by_kernel(B, x, dt * A, transposed, weight=dt) or scalar_decay(
        x, B, dt * A, weight=dt, read=C if joint else None, initial_state=initial_state
    )
    if found.y is None:
        result = function(x, dt, A, B, C, D, initial_state, **options)
    else:
        y = found.y if D is None else found.y.addcmul_(x.to(found.y.dtype), D.to(found.y.dtype).unsqueeze(-1))
        result = y.to(x.dtype), found.final_state
    return result, _moments(found, x.shape[-1] * B.shape[-1])


def _gla(
    function: Callable[..., Result],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Result, Moments]:
    joint = not options and _jointly(function, gla, q, k, v, log_decay, initial_state)
    read = q * (q.shape[-1] ** -0.5 if scale is None else scale) if joint else None
    found = _by_kernel(k, v, log_decay, initial_state) or vector_decay(k, v, log_decay, read=read, initial_state=initial_state)
    if found.y is None:
        result = function(q, k, v, log_decay, scale, initial_state, **options)
    else:
        result = found.y.to(q.dtype), found.final_state
    return result, _moments(found, k.shape[-1] * v.shape[-1])


def _wkv6(
    function: Callable[..., Result],
    r: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    bonus: Tensor,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Result, Moments]:
    joint = not options and _jointly(function, wkv6, r, k, v, log_decay, bonus, initial_state)
    diagonal = (r * bonus * k).sum(-1) if joint else None
    found = _by_kernel(k, v, log_decay, initial_state) or vector_decay(
        k, v, log_decay, read=r if joint else None, diagonal=diagonal, initial_state=initial_state
    )
    if found.y is None:
        result = function(r, k, v, log_decay, bonus, initial_state, **options)
    else:
        result = found.y.to(r.dtype), found.final_state
    return result, _moments(found, k.shape[-1] * v.shape[-1])


def _gated_delta(
    function: Callable[..., Result],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Result, Moments]:
    joint = not options and _jointly(function, gated_delta, q, k, v, log_decay, beta, initial_state)
    read = q * (q.shape[-1] ** -0.5 if scale is None else scale) if joint else None
    found = _by_kernel(k, v, log_decay, initial_state, weight=beta, delta=True) or delta_rule(
        k, v, log_decay, beta, read=read, initial_state=initial_state
    )
    if found.y is None:
        result = function(q, k, v, log_decay, beta, scale, initial_state, **options)
    else:
        result = found.y.to(v.dtype), found.final_state
    return result, _moments(found, k.shape[-1] * v.shape[-1])


def _selective_scan(
    function: Callable[..., Result],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    **options: Any,
) -> tuple[Result, Moments]:
    joint = not options and _jointly(function, selective_scan, x, dt, A, B, C, D, initial_state)
    found = diagonal_decay(x, dt, A, B, read=C if joint else None, initial_state=initial_state)
    if found.y is None:
        result = function(x, dt, A, B, C, D, initial_state, **options)
    else:
        y = found.y if D is None else torch.addcmul(found.y, x.to(found.y.dtype), D.to(found.y.dtype))
        result = y.to(x.dtype), found.final_state
    return result, _moments(found, A.shape[1])


_OPERATIONS: dict[str, Callable[..., tuple[Result, Moments]]] = {
    "ssd": _ssd,
    "selective_scan": _selective_scan,
    "gla": _gla,
    "wkv6": _wkv6,
    "gated_delta": _gated_delta,
}
