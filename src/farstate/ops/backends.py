"""Which implementation of an operation runs.

A backend is chosen where and how (config/settings.yaml, `backend`), is recorded in provenance and is in no key: all of them
compute the same function within stated tolerances. Every implementation of an operation has the signature of its `naive`.

| operation          | architecture     | `naive`, `chunked`             |
|--------------------|------------------|--------------------------------|
| `ssd`              | Mamba-2          | `farstate.ops.ssd`             |
| `gated_delta`      | Gated DeltaNet   | `farstate.ops.gated_delta`     |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch

from farstate.errors import FarstateError

BACKENDS = ("auto", "naive", "chunked", "triton", "mamba_ssm", "fla")

OPERATIONS: dict[str, dict[str, str]] = {
    "ssd": {"naive": "farstate.ops.ssd:naive", "chunked": "farstate.ops.ssd:chunked"},
    "gla": {"naive": "farstate.ops.gla:naive", "chunked": "farstate.ops.gla:chunked"},
    "wkv6": {"naive": "farstate.ops.wkv6:naive", "chunked": "farstate.ops.wkv6:chunked"},
    "selective_scan": {"naive": "farstate.ops.selective_scan:naive", "chunked": "farstate.ops.selective_scan:chunked"},
    "gated_delta": {"naive": "farstate.ops.gated_delta:naive", "chunked": "farstate.ops.gated_delta:chunked"},
}
"""By operation and backend, where the implementation is."""

_SELECTED: ContextVar[str] = ContextVar("backend", default="auto")


@contextmanager
def use(backend: str) -> Iterator[None]:
    """Within this context operations run on `backend`.

    Raises:
        FarstateError: no such backend.
    """
    if backend not in BACKENDS:
        raise FarstateError(f"backend: '{backend}' is unknown; known: {', '.join(BACKENDS)}")
    token = _SELECTED.set(backend)
    try:
        yield
    finally:
        _SELECTED.reset(token)


def implementation(operation: str, device: torch.device) -> Callable[..., Any]:
    """The function that computes `operation` on `device` with the selected backend.

    Raises:
        FarstateError: the selected backend does not have the operation.
    """
    backend = _SELECTED.get()
    found = OPERATIONS[operation]
    if backend == "auto":
        backend = "chunked"
    if backend not in found:
        raise FarstateError(f"backend: {backend} has no operation '{operation}'; it has: {', '.join(found)}")
    module, name = found[backend].split(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
