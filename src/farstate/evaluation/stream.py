"""Carried-state evaluation: the loss at every position of a text of any length, one segment in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from farstate.models.contract import Model
from farstate.models.head import token_nll
from farstate.state import State

Read = Callable[[int, int], npt.NDArray[np.int64]]
"""`read(start, count)` gives the tokens x_start … x_{start+count−1} of every row, shape (R, count)."""

Precision = Literal["float32", "bf16-mixed"]


def stream_nll(
    model: Model,
    read: Read,
    length: int,
    *,
    segment_tokens: int,
    device: torch.device,
    vocabulary_size: int | None,
    precision: Precision = "float32",
    score_from: int = 1,
) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Negative log-likelihood of x_t given x_0 … x_{t−1}, for t = 1 … length, starting from the zero state.

    The text is read in segments of `segment_tokens` inputs and the state, convolution included, is carried
    from one to the next, so every position has the whole text before it as its context, those at a
    segment's end included: a segment reads the inputs x_a … x_{b−1} and scores the labels x_{a+1} … x_b. One
    segment of tokens, hidden states and losses is alive at a time, whatever `length` is.

    Args:
        model: the language model, on `device`.
        read: the rows' tokens, called once a segment, in order.
        length: last position scored; the rows hold `length + 1` tokens.
        segment_tokens: inputs in a segment; changes memory and speed, and the numbers only by rounding.
        device: where to compute.
        vocabulary_size: the softmax is over this many rows of the head, the symbols of the text's tokenizer; None: over all
            rows, padding included, as published perplexities are [assumed].
        precision: `bf16-mixed` runs the model under bfloat16 autocast; losses are summed in float64 either way.
        score_from: first position whose loss is wanted; the head is skipped before it.

    Yields:
        (t, nll): first scored position of the segment, and the losses in nats, float64, shape (R, ≤ segment_tokens).
        Values that are not finite come out as NaN.
    """
    state: State | None = None
    for start in range(0, length, segment_tokens):
        stop = min(start + segment_tokens, length)
        tokens = torch.from_numpy(read(start, stop - start + 1)).to(device)
        # Entered anew for each segment, so that the consumer's own code never runs in inference mode.
        with torch.inference_mode(), _autocast(device, precision):
            hidden, state = model(tokens[:, :-1], state)
            skip = max(0, score_from - 1 - start)
            if skip >= stop - start:
                continue
            nll = token_nll(hidden[:, skip:], model.head_weight, tokens[:, 1 + skip :], vocabulary_size)
            values = nll.to(device="cpu", dtype=torch.float64).numpy()
        # Freed before the next segment is read, not while it is: two segments never lie side by side.
        del tokens, hidden, nll
        values[~np.isfinite(values)] = np.nan
        yield start + skip + 1, values


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed")
