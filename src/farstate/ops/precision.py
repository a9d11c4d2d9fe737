"""In which dtype an operation computes, whatever autocast does around it."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 where any input is, float32 otherwise: recurrences, norms and losses never run in half precision."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def without_autocast(device: torch.device) -> torch.autocast:
    """A context in which matrix products keep the dtype of their operands."""
    return torch.autocast(device_type=device.type, enabled=False)
