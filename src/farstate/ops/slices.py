"""Element-wise passes in pieces that stay in the cache.

An operation made of ten passes over a tensor of several megabytes reads and writes main memory ten times. Over slices of the
first dimension it does so once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

# About 1 MB of float32: a few such slices live in the second- and third-level cache, and a pass over one is still much
# longer than the call that starts it.
_ELEMENTS = 1 << 18


def row_slices(tensor: Tensor) -> Iterator[slice]:
    """Slices of dimension 0 that cover `tensor`, each of about 2¹⁸ elements on a CPU; a GPU gets it whole."""
    rows = tensor.shape[0]
    if tensor.device.type != "cpu":
        yield slice(0, rows)
        return
    step = max(1, _ELEMENTS * rows // max(1, tensor.numel()))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
