"""Long segments in pieces, for kernels that address their tensors with 32-bit numbers.

Past 2³¹ entries such a kernel reads and writes elsewhere: its results are wrong, and can look right. A recurrence can be cut
anywhere in time, as long as the state is carried across.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ADDRESSABLE = 2**31


def piece_length(rows: int, time: int, features: int, multiple: int) -> int:
    """Positions of a piece, a multiple of `multiple`, such that rows × positions × features stays below 2³¹.

    Args:
        rows: B.
        time: T; nothing is cut if the whole of it fits.
        features: the most entries per position that any tensor of the operation has, the intermediate ones included.
        multiple: the chunk length, so that a piece is computed as the same positions of the whole would be.

    Raises:
        ValueError: not even one chunk fits.
    """
    if rows * time * features < ADDRESSABLE:
        return time
    length = (ADDRESSABLE - 1) // (rows * features) // multiple * multiple
    if length < 1:
        raise ValueError(
            f"{rows} rows of {features} features are past 2³¹ entries within {multiple} positions: lower the batch size"
        )
    return length


def entries_per_position(*tensors: Tensor) -> int:
    """The most entries that memory holds between two positions of any of `tensors`, (B, T, ...): views have more than they show."""
    return max(max(tensor.stride(1) if tensor.shape[1] > 1 else 0, tensor[0, 0].numel()) for tensor in tensors)


def in_pieces(
    operation: Callable[..., tuple[Tensor, Tensor]], over_time: tuple[Tensor, ...], initial_state: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """`operation(*over_time, initial_state)`, `length` positions at a time, the state carried from piece to piece.

    Pieces are contiguous: a view into the whole would keep the strides that a 32-bit kernel cannot follow.
    """
    time = over_time[0].shape[1]
    if length >= time:
        return operation(*over_time, initial_state)
    outputs, state = [], initial_state
    for start in range(0, time, length):
        y, state = operation(*(t[:, start : start + length].contiguous() for t in over_time), state)
        outputs.append(y)
    assert state is not None
    return torch.cat(outputs, dim=1), state
