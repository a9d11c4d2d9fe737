"""Log-spaced bins over the positions 1 … length, one of them ending exactly at the training context."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """Contiguous bins of positions, both ends included: bin i holds `low[i] … high[i]`, `low[i + 1] == high[i] + 1`."""

    low: Integers
    high: Integers

    def __post_init__(self) -> None:
        if self.low.ndim != 1 or self.low.shape != self.high.shape or not self.low.size:
            raise ValueError("low and high must be two equally long, non-empty vectors")
        if self.low[0] != 1 or np.any(self.high < self.low) or np.any(self.low[1:] != self.high[:-1] + 1):
            raise ValueError("bins must start at position 1, be contiguous and hold at least one position each")

    def __len__(self) -> int:
        return int(self.low.size)

    @property
    def length(self) -> int:
        """The last position."""
        return int(self.high[-1])

    @property
    def tokens(self) -> Integers:
        """Positions in each bin."""
        return self.high - self.low + 1

    @cached_property
    def position(self) -> Integers:
        """Where a bin is drawn: the geometric mean of its ends, rounded. It lies inside the bin, so it is unique."""
        return np.rint(np.sqrt(self.low.astype(np.float64) * self.high)).astype(np.int64)

    def index(self, positions: npt.ArrayLike) -> Integers:
        """The bin of each position (1 … length)."""
        return np.searchsorted(self.high, np.asarray(positions), side="left").astype(np.int64)


def log_bins(length: int, context: int, per_octave: int) -> Bins:
    """Bins whose upper ends are `round(context · 2^(j / per_octave))` for every integer j that fits, and `length`.

    The ends are integers; those that coincide after rounding (small positions) are one, so no bin is empty.
    What is left between the last such end and `length` is a bin of its own when it is at least half as wide
    as a full bin (on the log scale), and otherwise joins the bin before it, except across `context`.

    Args:
        length: last position measured, in tokens.
        context: T_train in tokens; when it is above `length` no bin ends there.
        per_octave: bins in a factor of two.
    """
    if length < 1 or context < 1 or per_octave < 1:
        raise ValueError("length, context and bins per octave must be at least 1")
    first = -int(np.ceil(per_octave * np.log2(context))) - 1
    last = max(0, int(np.ceil(per_octave * np.log2(length / context)))) + 1
    exact = context * 2.0 ** (np.arange(first, last + 1) / per_octave)
    ends = np.unique(np.rint(exact).astype(np.int64))
    ends = ends[(ends >= 1) & (ends <= length)]
    if not ends.size or ends[-1] < length:
        narrow = ends.size > 1 and ends[-1] != context and np.log2(length / ends[-1]) < 0.5 / per_octave
        ends = np.append(ends[:-1] if narrow else ends, length)
    low = np.append(1, ends[:-1] + 1)
    return Bins(low.astype(np.int64), ends.astype(np.int64))
