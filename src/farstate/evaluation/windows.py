"""The two references without a long state: sliding windows of T_train tokens, and a state reset every T_train tokens.

Both are read from the zero state, convolution included. Where the context is no longer than T_train
(positions t ≤ T_train) window, reset and carried state are the same computation; it is done once, by the
carried pass, and its values are used for all three, so that excess is exactly zero there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from farstate.evaluation.stream import Precision, stream_nll
from farstate.models.contract import Model

Integers = npt.NDArray[np.int64]
ReadRow = Callable[[int, int, int], Integers]
"""`read(row, start, count)` gives the tokens x_start … x_{start+count−1} of one row, shape (count,)."""


def stride(context: int) -> int:
    """Tokens between two windows: ⌈T_train / 2⌉.

    Window k ≥ 1 reads the inputs x_b … x_{b+T−1} with b = k · stride, and its last `stride` positions are
    scored: t = T + (k − 1) · stride + 1 … T + k · stride. A scored token so has ⌊T/2⌋ + 1 … T tokens of
    context, more than half a window for odd and even T alike, and T = 1 needs no exception.
    """
    return -(-context // 2)


NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Windows:
    """Stretches of text read from the zero state, as equally long vectors.

    Window i reads the inputs from `start[i]`; the labels x_{start+1} … x_{start+context} are those it can
    score. Positions from `window_from[i]` count for the window reference and from `reset_from[i]` for the
    reset reference, up to the text's length; NEVER: it is not part of that reference.
    """

    start: Integers
    window_from: Integers
    reset_from: Integers

    def __len__(self) -> int:
        return int(self.start.size)

    @property
    def skipped(self) -> Integers:
        """Positions of each window, from its start, that count for neither reference."""
        return np.minimum(self.window_from, self.reset_from) - self.start - 1

    def take(self, which: Integers) -> Windows:
        """The windows at the indices `which`."""
        return Windows(self.start[which], self.window_from[which], self.reset_from[which])


def plan(length: int, context: int) -> Windows:
    """All windows that score the positions context + 1 … length, in the order of their starts.

    For an even T_train every second window starts where the state would be reset: one reading serves both references.
    """
    step = stride(context)
    windows = step * np.arange(1, -(-(length - context) // step) + 1, dtype=np.int64)
    resets = np.arange(context, length, context, dtype=np.int64)
    start = np.union1d(windows, resets)
    window_from = np.where(np.isin(start, windows), start + context - step + 1, NEVER)
    reset_from = np.where(np.isin(start, resets), start + 1, NEVER)
    return Windows(start, window_from, reset_from)


@dataclass(frozen=True)
class Scored:
    """Losses of a batch of windows at consecutive positions of each: `nll[i, j]` belongs to row `rows[i]`, position `first[i] + j`.

    Entries beyond the text's length are NaN and not to be used. `in_window[i, j]` and `in_reset[i, j]` say
    which reference an entry belongs to; neither is set beyond the length.
    """

    rows: Integers
    first: Integers
    nll: npt.NDArray[np.float64]
    in_window: npt.NDArray[np.bool_]
    in_reset: npt.NDArray[np.bool_]

    @property
    def positions(self) -> Integers:
        """Position of every entry, shape of `nll`."""
        return self.first[:, None] + np.arange(self.nll.shape[1])


def window_nll(
    model: Model,
    read: ReadRow,
    rows: int,
    length: int,
    context: int,
    *,
    batch_tokens: int,
    segment_tokens: int,
    device: torch.device,
    vocabulary_size: int | None,
    precision: Precision = "float32",
) -> Iterator[Scored]:
    """Both references for the positions context + 1 … length of `rows` texts, in big batches of windows.

    Args:
        model: the language model, on `device`.
        read: the tokens of one row.
        rows: number of texts R, each of `length + 1` tokens.
        length: last position scored.
        context: T_train in tokens.
        batch_tokens: at most so many tokens are read together (one window when it alone is longer).
        segment_tokens: a window longer than this is read in segments, as the carried state is.
        device: where to compute.
        vocabulary_size, precision: as in `stream_nll`.

    Yields:
        Batches of losses; every (row, position) comes exactly once per reference.
    """
    if length <= context:
        return
    windows = plan(length, context)
    size = max(1, batch_tokens // min(context, segment_tokens))
    # Windows scored over the same part form one batch, so that the head is only paid where it is used.
    for skipped in np.unique(windows.skipped):
        members = np.flatnonzero(windows.skipped == skipped)
        for begin in range(0, rows * members.size, size):
            # All rows of one window, then of the next: a batch covers a short range of positions.
            member, row = np.divmod(np.arange(begin, min(begin + size, rows * members.size)), rows)
            batch = windows.take(members[member])
            inputs = int(min(context, length - batch.start.min()))
            for relative, nll in stream_nll(
                model,
                _reader(read, row, batch.start, length),
                inputs,
                segment_tokens=segment_tokens,
                device=device,
                vocabulary_size=vocabulary_size,
                precision=precision,
                score_from=int(skipped) + 1,
            ):
                first = batch.start + relative
                positions = first[:, None] + np.arange(nll.shape[1])
                inside = positions <= length
                nll[~inside] = np.nan
                in_window = inside & (positions >= batch.window_from[:, None])
                in_reset = inside & (positions >= batch.reset_from[:, None])
                yield Scored(row, first, nll, in_window, in_reset)


def _reader(read: ReadRow, rows: Integers, starts: Integers, length: int) -> Callable[[int, int], Integers]:
    def tokens(start: int, count: int) -> Integers:
        # The last window may run past the text: zeros behind it, which no causal model lets reach what is scored.
        block = np.zeros((rows.size, count), dtype=np.int64)
        for line, (row, first) in enumerate(zip(rows.tolist(), (starts + start).tolist(), strict=True)):
            available = min(count, length + 1 - first)
            if available > 0:
                block[line, :available] = read(row, first, available)
        return block

    return tokens
