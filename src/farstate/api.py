"""What notebooks call: `farstate.load`, `save`, `nll`, `perplexity_by_position`, `effective_remembrance` (docs/python.md).

Thin: the pipeline's own functions on a model and a tensor of tokens, in place of a checkpoint and a token store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farstate.errors import FarstateError
from farstate.evaluation.remembrance import DISTANCES, SINGLE, default_starts, last_target, sweep
from farstate.evaluation.stream import Precision, stream_nll
from farstate.models.checkpoints import Exported, files_beside, load_with_origin, save_in_format
from farstate.models.contract import Model
from farstate.models.importing import locate
from farstate.models.language_model import LanguageModel
from farstate.ops.precision import flushed_denormals

Floats = npt.NDArray[np.float64]


def load(
    checkpoint: str | os.PathLike[str], dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> LanguageModel:
    """The model at `checkpoint`, in any format that Farstate reads, in evaluation mode.

    Args:
        checkpoint: a folder or file (a result of the pipeline, one that transformers, fla, mamba-ssm or BlinkDL wrote), or a name on
            the hub, whose files are fetched.
        dtype: of the parameters; None: float32, whatever the file has.
        device: None: the CPU.

    Raises:
        FarstateError: in one line, what is wrong with which file.
    """
    path = locate(os.fspath(checkpoint))
    model, origin = load_with_origin(path, device or "cpu", dtype or torch.float32)
    if origin and "checkpoint" not in origin:
        folder = path if path.is_dir() else path.parent
        origin |= {"checkpoint": str(folder.resolve()), "beside": files_beside(folder)}
    return model


def save(model: LanguageModel, folder: str | os.PathLike[str], format: str | None = None, dtype: str | None = None) -> Exported:
    """Write `model` into the new folder `folder`, which appears whole or not at all.

    Args:
        model: of `load` or `adapt`, or made here.
        format: `farstate`, `transformers`, `fla`, `mamba-ssm` or `blinkdl`; None: the one that the weights came from, `farstate` for a
            model that was made here.
        dtype: `float32`, `float16` or `bfloat16`; None: that of the source where it loses nothing, else the model's.

    Returns:
        What was written: format, dtype, which tokenizer files were copied along and which were not there to copy.

    Raises:
        FarstateError: `folder` is there already, or the format has no such architecture or no words for its configuration.
    """
    return save_in_format(model, folder, format or model.origin.get("format", "farstate"), dtype)


def nll(
    model: Model,
    tokens: Tensor,
    *,
    segment_tokens: int = 1024,
    vocabulary_size: int | None = None,
    precision: Precision = "float32",
) -> Floats:
    """Negative log likelihood of every token given all before it in its row, from the zero state, in nats.

    The text is read in segments and the state carried, so that memory does not grow with its length but for the result; logits exist
    for a few tokens at a time.

    Args:
        model: what follows `farstate.Model`; read where its head is.
        tokens: (B, T + 1) int64, on any device.
        segment_tokens: of each read; changes memory and speed, and the numbers only by rounding.
        vocabulary_size: the softmax is over this many rows of the head; None: over all, padding included, as published values are.
        precision: `bf16-mixed` runs the model under bfloat16 autocast.

    Returns:
        (B, T) float64; `[:, t − 1]` is −log q(x_t | x_0 … x_{t−1}). NaN where the model's output is not finite.

    Raises:
        FarstateError: tokens of another shape, or outside the model's vocabulary.
    """
    text = _text(model, tokens)
    length = text.shape[1] - 1
    found = np.empty((text.shape[0], length))
    parts = stream_nll(
        model,
        lambda start, count: text[:, start : start + count],
        length,
        segment_tokens=segment_tokens,
        device=model.head_weight.device,
        vocabulary_size=vocabulary_size,
        precision=precision,
    )
    with flushed_denormals():
        for first, values in parts:
            found[:, first - 1 : first - 1 + values.shape[1]] = values
    return found


def perplexity_by_position(
    model: Model,
    tokens: Tensor,
    *,
    segment_tokens: int = 1024,
    vocabulary_size: int | None = None,
    precision: Precision = "float32",
) -> Floats:
    """(T,) float64: exp of the mean NLL over the rows at each position; `[t − 1]` is the perplexity after t tokens. See `nll`."""
    losses = nll(model, tokens, segment_tokens=segment_tokens, vocabulary_size=vocabulary_size, precision=precision)
    values: Floats = np.exp(losses.mean(axis=0))
    return values


@dataclass(frozen=True)
class EffectiveRemembrance:
    """How far a prediction moves when the first `starts[s]` tokens of a text are dropped.

    Attributes:
        starts: (S,) int64, ascending; 0 is the whole text, at distance zero.
        total_variation: (B, S) float64, in [0, 1].
        jensen_shannon: (B, S) in nats, in [0, log 2].
        jensen_shannon_distance: (B, S), its square root, a metric.
        cosine_distance: (B, S), of the probability vectors, in [0, 1].
    """

    starts: npt.NDArray[np.int64]
    total_variation: Floats
    jensen_shannon: Floats
    jensen_shannon_distance: Floats
    cosine_distance: Floats


def effective_remembrance(
    model: Model,
    tokens: Tensor,
    starts: Sequence[int] | None = None,
    *,
    last: int | None = None,
    rows: int = 8,
    segment_tokens: int = 1024,
    vocabulary_size: int | None = None,
    precision: Precision = "float32",
) -> EffectiveRemembrance:
    """EffRem_T(t) = d(q(· | x_0 … x_T), q(· | x_t … x_T)) of every row, all start points in one sweep (paper §3).

    Args:
        model: what follows `farstate.Model`.
        tokens: (B, T + 1) int64: the tokens x_0 … x_T.
        starts: t in 0 … T; None: a grid, dense at both ends.
        last: None: the prediction after x_T alone; a number: the mean over the predictions after the last so many tokens, NaN for
            starts behind the first of them.
        rows: pairs (row, start) read side by side.
        segment_tokens, vocabulary_size, precision: as in `nll`.

    Raises:
        FarstateError: as `nll`; a start outside 0 … T, or more last positions than T.
    """
    text = _text(model, tokens)
    length = text.shape[1] - 1
    with flushed_denormals():
        found = sweep(
            model,
            lambda row, start, count: text[row, start : start + count],
            text.shape[0],
            length,
            default_starts(length, 2) if starts is None else starts,
            last=1 if last is None else last,
            rows=rows,
            segment_tokens=segment_tokens,
            device=model.head_weight.device,
            vocabulary_size=vocabulary_size,
            precision=precision,
        )
    values = found.values[SINGLE if last is None else last_target(last)]
    return EffectiveRemembrance(
        np.array(found.starts, dtype=np.int64), **{name: values[..., number] for number, name in enumerate(DISTANCES)}
    )


def _text(model: Model, tokens: Tensor) -> npt.NDArray[np.int64]:
    """`tokens` as an array, held against the model."""
    if tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2 or tokens.is_floating_point():
        raise FarstateError(
            f"tokens: (B, T + 1) whole numbers with T ≥ 1 are expected, found {tuple(tokens.shape)} of {tokens.dtype}"
        )
    known = model.head_weight.shape[0]
    text: npt.NDArray[np.int64] = tokens.detach().to(device="cpu", dtype=torch.int64).numpy()
    if text.min() < 0 or text.max() >= known:
        raise FarstateError(f"tokens: {text.min()} … {text.max()} do not lie in the model's vocabulary, 0 … {known - 1}")
    return text
