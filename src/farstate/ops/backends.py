"""Which implementation of an operation runs. Loads no torch: settings and the command line know the backends by name.

A backend is chosen where and how (config/settings.yaml, `backend`), is recorded in provenance and is in no key: all of them
compute the same function within stated tolerances. Every implementation of an operation has the signature of its `naive`.

| operation        | architecture   | `naive`, `chunked`            | `triton`        | `mamba_ssm`                 | `fla`                    |
|------------------|----------------|-------------------------------|-----------------|-----------------------------|--------------------------|
| `ssd`            | Mamba-2        | `farstate.ops.ssd`            |                 | `mamba_chunk_scan_combined` | `chunk_simple_gla`       |
| `selective_scan` | Mamba-1        | `farstate.ops.selective_scan` | `initial_state` | `selective_scan_fn`         |                          |
| `gla`            | GLA            | `farstate.ops.gla`            |                 |                             | `chunk_gla`              |
| `wkv6`           | RWKV-6         | `farstate.ops.wkv6`           |                 |                             | `chunk_rwkv6`            |
| `gated_delta`    | Gated DeltaNet | `farstate.ops.gated_delta`    |                 |                             | `chunk_gated_delta_rule` |

`auto` is `chunked` on a CPU. On a GPU it is the first of `FASTEST` that is installed and agrees with the definition there, on
small inputs, forward and gradients; else `chunked`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from farstate.errors import FarstateError, nearest

if TYPE_CHECKING:
    import torch

    from farstate.ops import checks

Backend = Literal["auto", "naive", "chunked", "triton", "mamba_ssm", "fla"]
BACKENDS: tuple[str, ...] = get_args(Backend)

OPERATIONS: dict[str, dict[str, str]] = {
    "ssd": {"naive": "farstate.ops.ssd:naive", "chunked": "farstate.ops.ssd:chunked"},
    "gla": {"naive": "farstate.ops.gla:naive", "chunked": "farstate.ops.gla:chunked"},
    "wkv6": {"naive": "farstate.ops.wkv6:naive", "chunked": "farstate.ops.wkv6:chunked"},
    "selective_scan": {"naive": "farstate.ops.selective_scan:naive", "chunked": "farstate.ops.selective_scan:chunked"},
    "gated_delta": {"naive": "farstate.ops.gated_delta:naive", "chunked": "farstate.ops.gated_delta:chunked"},
}
"""By operation and backend, where the implementation in torch is."""

ACCELERATED: dict[str, dict[str, str]] = {
    "ssd": {"mamba_ssm": "farstate.ops.vendors.mamba_ssm:ssd", "fla": "farstate.ops.vendors.fla:ssd"},
    "selective_scan": {
        "triton": "farstate.kernels.initial_state:selective_scan",
        "mamba_ssm": "farstate.ops.vendors.mamba_ssm:selective_scan",
    },
    "gla": {"fla": "farstate.ops.vendors.fla:gla"},
    "wkv6": {"fla": "farstate.ops.vendors.fla:wkv6"},
    "gated_delta": {"fla": "farstate.ops.vendors.fla:gated_delta"},
}
"""The same for kernels: GPUs only, float32 and half precision."""

FASTEST: dict[str, tuple[str, ...]] = {
    "ssd": ("mamba_ssm", "fla"),
    "selective_scan": ("triton", "mamba_ssm"),
    "gla": ("fla",),
    "wkv6": ("fla",),
    "gated_delta": ("fla",),
}
"""What `auto` tries on a GPU, fastest first. For Mamba-1 the vendor's scan comes second: it needs N more positions at both ends
for the states that `triton` takes and returns by itself."""


class Choice(NamedTuple):
    """What runs, and why."""

    backend: str
    why: str


@dataclass(frozen=True)
class Selection:
    """What was asked for within a context, and what came of it."""

    requested: str
    resolved: dict[str, dict[str, str]] = field(default_factory=dict)
    """By operation that has run: each backend that it ran on, and why that one."""

    def record(self) -> dict[str, Any]:
        """For the provenance sidecar; empty if no operation ran."""
        return {name: {"requested": self.requested, "resolved": choices} for name, choices in self.resolved.items()}


_SELECTION: ContextVar[Selection | None] = ContextVar("backend", default=None)


@contextmanager
def use(backend: str) -> Iterator[Selection]:
    """Within this context operations run on `backend`; the value tells afterwards what each resolved to.

    Raises:
        FarstateError: no such backend.
    """
    if backend not in BACKENDS:
        raise FarstateError(f"backend: '{backend}' is unknown{nearest(backend, BACKENDS)}; known: {', '.join(BACKENDS)}")
    selection = Selection(backend)
    token = _SELECTION.set(selection)
    try:
        yield selection
    finally:
        _SELECTION.reset(token)


def implementation(operation: str, device: torch.device) -> Callable[..., Any]:
    """The function that computes `operation` on `device` with the selected backend.

    Kernels have no float64: a call with a float64 input runs `chunked`, and the record says so. While moments of states are
    recorded (`farstate.ops.state_moments`), the function records those of its own.

    Raises:
        FarstateError: the selected backend does not have the operation, is not installed or cannot run on the device.
    """
    from farstate.ops.state_moments import observed

    selection = _SELECTION.get()
    choice = choose(operation, "auto" if selection is None else selection.requested, device)
    chosen = load(operation, choice.backend)
    if choice.backend not in ACCELERATED.get(operation, {}):
        _note(selection, operation, choice)
        return observed(operation, chosen)

    def by_dtype(*args: Any, **kwargs: Any) -> Any:
        if _has_float64(args) or _has_float64(kwargs.values()):
            _note(selection, operation, Choice("chunked", f"float64 inputs, which {choice.backend} does not compute"))
            return load(operation, "chunked")(*args, **kwargs)
        _note(selection, operation, choice)
        return chosen(*args, **kwargs)

    return observed(operation, by_dtype)


def choose(operation: str, backend: str, device: torch.device) -> Choice:
    """What `backend` means for `operation` on `device`.

    Raises:
        FarstateError: an explicitly chosen backend that does not have the operation, is not installed or cannot run there.
    """
    if backend != "auto":
        reason = unavailable(operation, backend, device.type)
        if reason is not None:
            working = [name for name in BACKENDS[1:] if unavailable(operation, name, device.type) is None]
            raise FarstateError(
                f"backend: {backend} cannot compute '{operation}' on {device.type}: {reason}; "
                f"these can: {', '.join(['auto', *working])} (`backend` in config/settings.yaml, `farstate doctor` tells more)"
            )
        return Choice(backend, "chosen in the settings")
    if device.type == "cpu":
        return Choice("chunked", "the fastest on a CPU")
    refused = []
    for name in FASTEST[operation] if device.type == "cuda" else ():
        reason = unavailable(operation, name, device.type) or disagreement(operation, name, device)
        if reason is None:
            return Choice(name, "the fastest that is installed and agrees with naive here")
        refused.append(f"{name}: {reason}")
    return Choice("chunked", "; ".join(refused) or f"no kernels for {device.type}")


def load(operation: str, backend: str) -> Callable[..., Any]:
    """The implementation of `operation` that is `backend`'s; `unavailable` says whether there is one."""
    module, name = _where(operation)[backend].split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


@cache
def unavailable(operation: str, backend: str, device_type: str) -> str | None:
    """Why `backend` cannot compute `operation` on such a device, in a few words; None if it can."""
    where = _where(operation)
    if backend not in where:
        return f"{backend} has no such operation"
    if backend in OPERATIONS[operation]:
        return None
    if find_spec(backend) is None:
        return f"{backend} is not installed"
    if device_type != "cuda":
        return f"{backend} needs a CUDA GPU"
    module = import_module(where[backend].split(":")[0])
    ask = getattr(module, "unavailable", None)
    reason: str | None = None if ask is None else ask(operation)
    return reason


@cache
def agreement(operation: str, backend: str, device: torch.device) -> checks.Errors | str:
    """How far `backend` is from the definition of `operation` on `device`, on small inputs; or how it fails."""
    from farstate.ops import checks

    try:
        return checks.measure(load(operation, backend), load(operation, "naive"), checks.inputs(operation), device)
    except Exception as error:  # whatever a compiler or a driver raises
        return f"fails on small inputs with {type(error).__name__}: {_first_line(error)}"


def disagreement(operation: str, backend: str, device: torch.device) -> str | None:
    """Why `auto` should not take `backend`, or None.

    Asked once per process of what it would take: kernels have been wrong on some GPUs, or with some compilers.
    """
    errors = agreement(operation, backend, device)
    if isinstance(errors, str):
        return errors
    return None if errors.passed else f"differs from naive here ({errors})"


def _where(operation: str) -> dict[str, str]:
    return OPERATIONS[operation] | ACCELERATED.get(operation, {})


def _note(selection: Selection | None, operation: str, choice: Choice) -> None:
    if selection is not None:
        selection.resolved.setdefault(operation, {})[choice.backend] = choice.why


def _has_float64(values: Any) -> bool:
    import torch

    return any(isinstance(value, torch.Tensor) and value.dtype == torch.float64 for value in values)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
