"""In which dtype an operation computes, whatever autocast does around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where any input is, float32 otherwise: recurrences, norms and losses never run in half precision."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which matrix products keep the dtype of their operands."""
    return torch.autocast(device_type=device.type, enabled=False)


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """A context in which the CPU takes numbers below the normal range for zero: they are slow, and slow decays underflow into them.

    torch cannot be asked what it did before, so a product that underflows is: the former behaviour comes back at the end.
    It belongs to the calling thread and to the threads started from it; where the CPU knows no such mode nothing changes.
    """
    before = _flushes()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _flushes() -> bool:
    # A tensor of one element is computed by the calling thread.
    return bool((torch.full((1,), torch.finfo(torch.float32).tiny) * 0.5).eq(0.0).item())
