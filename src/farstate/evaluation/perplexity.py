"""The stage `evaluate`: position-wise loss of one checkpoint on one fixed set of held-out texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch

from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation.bins import Bins, log_bins
from farstate.evaluation.positions import PositionSums, write_positions
from farstate.evaluation.stream import stream_nll
from farstate.evaluation.texts import Text, select
from farstate.evaluation.windows import stride, window_nll
from farstate.files import MANIFEST, atomic_path, write_manifest
from farstate.models.checkpoints import load_model
from farstate.models.contract import Model
from farstate.models.language_model import LanguageModel
from farstate.ops.precision import flushed_denormals
from farstate.params import Evaluate, Texts

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with the token positions scored so far and those in all; carried state and window reference count separately."""

KINDS = ("carried", "window", "reset")


@dataclass(frozen=True)
class EvaluationSettings:
    """Where and how to compute: nothing that enters a key.

    Attributes:
        device: a torch device.
        threads: threads of the CPU backend; None leaves torch's own choice.
        rows: texts read side by side.
        segment_tokens: tokens of each read before the next; `rows · segment_tokens` bounds the memory.
    """

    device: str | torch.device = "cpu"
    threads: int | None = None
    rows: int = 8
    segment_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.rows < 1 or self.segment_tokens < 1 or (self.threads is not None and self.threads < 1):
            raise FarstateError("threads, rows and segment_tokens of an evaluation must be at least 1")


@dataclass(frozen=True)
class Losses:
    """Losses of a set of texts, summed as the tables hold them.

    Attributes:
        bins: the bins of the positions 1 … length.
        sums: by kind (carried, window, reset), nats summed over each bin's positions, shape (texts, bins).
        positions: for carried and window, the mean over texts at every position; every text (stretch) has the same
            weight, so that the mean over a bin's positions is the mean over all its (text, position) pairs.
        broken: by kind, the first position of each text whose loss is not finite, 0 where there is none.
    """

    bins: Bins
    sums: dict[str, Floats]
    positions: dict[str, PositionSums]
    broken: dict[str, npt.NDArray[np.int64]]


def prepare(
    checkpoint: Path, store_directory: Path, given: Texts, output: Path, settings: EvaluationSettings
) -> tuple[TokenStore, list[Text], LanguageModel]:
    """What every measurement begins with: the store, the texts that `given` selects, the model; and `output`, unfinished from here on.

    Raises:
        FarstateError: no text is long enough, no such checkpoint, or the store's vocabulary is larger than the model's; an
            older result in `output` is then as it was.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    store = TokenStore(store_directory)
    texts = select(store, given)
    model = load_model(checkpoint, device=settings.device)
    if store.vocabulary_size > model.config.vocabulary_size:
        raise FarstateError(
            f"{checkpoint}: knows {model.config.vocabulary_size} symbols, the token store {store_directory} uses "
            f"{store.vocabulary_size}; evaluate it on a store made with its own tokenizer"
        )
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    return store, texts, model


def evaluate(
    *,
    checkpoint: Path,
    store_directory: Path,
    evaluate: Evaluate,
    context: int,
    labels: Mapping[str, Any],
    output: Path,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> None:
    """Measure a checkpoint and write `perplexity.parquet`, `positions.parquet` and, last, `manifest.json`.

    `perplexity.parquet` holds one row per text and bin: model, arm, seed, train_length, document, stretch,
    position_low, position_high, tokens, and nll_carried, nll_window, nll_reset, float64 *sums* in nats over
    the bin's positions (divide by tokens). `positions.parquet` holds one row per position: position,
    documents, nll_carried, nll_window, means over all stretches, each with the same weight (as in every curve, so that a
    document of many stretches weighs more than one of few); `documents` says of how many documents they are.
    A loss that is not finite makes the values it enters NaN; the manifest's `broken_at` says where it began.

    Args:
        checkpoint: folder of a model.
        store_directory: the token store.
        evaluate: what is measured.
        context: T_train in tokens.
        labels: `model`, `arm` and `seed` (None: a published checkpoint), copied into the table.
        output: folder for the result.
        settings: where and how.
        progress: called after every segment.

    Raises:
        FarstateError: no text is long enough, or the store's vocabulary is larger than the model's.
    """
    store, texts, model = prepare(checkpoint, store_directory, evaluate, output, settings)
    with flushed_denormals():
        losses = measure(model, store, texts, evaluate, context, settings, progress)

    with atomic_path(output / "perplexity.parquet") as path:
        perplexity_table(losses, texts, labels, context).write_parquet(path)
    documents = len({text.document for text in texts})
    with atomic_path(output / "positions.parquet") as path:
        write_positions(path, losses.positions["carried"], losses.positions["window"], documents)
    write_manifest(
        output,
        {
            "labels": {key: labels[key] for key in ("model", "arm", "seed")},
            "context": context,
            "parameters": model.config.parameter_count(),
            "parameters_without_embeddings": model.config.parameter_count(embeddings=False),
            "evaluate": evaluate.model_dump(mode="json"),
            "documents": documents,
            "stretches": len(texts),
            "joined_documents": sum(len(text.pieces) for text in texts) if evaluate.streams == "concatenated" else None,
            "tokens": len(texts) * evaluate.length,
            "bins": len(losses.bins),
            "window_stride": stride(context),
            "broken_at": {kind: _broken(losses.broken[kind], texts) for kind in KINDS},
            "positions_mean": "over all stretches, each with the same weight",
        },
        ["perplexity.parquet", "positions.parquet"],
    )


def measure(
    model: Model,
    store: TokenStore,
    texts: list[Text],
    evaluate: Evaluate,
    context: int,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> Losses:
    """Carried, window and reset losses of `texts`, in memory that does not grow with the length.

    Per text only the bins' sums are kept; texts are taken `settings.rows` at a time. For positions up to `context` all three kinds are the carried values themselves.
    """
    length, device = evaluate.length, torch.device(settings.device)
    vocabulary_size = store.vocabulary_size if evaluate.softmax == "real" else None
    bins = log_bins(length, context, evaluate.bins_per_octave)
    sums = {kind: np.zeros((len(texts), len(bins))) for kind in KINDS}
    broken = {kind: np.zeros(len(texts), dtype=np.int64) for kind in KINDS}
    positions = {kind: PositionSums(length) for kind in ("carried", "window")}
    total, done = 2 * len(texts) * length, 0

    def report(scored: int) -> None:
        nonlocal done
        done += scored
        if progress is not None:
            progress(done, total)

    for begin in range(0, len(texts), settings.rows):
        batch = texts[begin : begin + settings.rows]
        here = slice(begin, begin + len(batch))

        def rows(start: int, count: int, batch: list[Text] = batch) -> npt.NDArray[np.int64]:
            return np.stack([text.read(store, start, count) for text in batch])

        def row(number: int, start: int, count: int, batch: list[Text] = batch) -> npt.NDArray[np.int64]:
            return batch[number].read(store, start, count)

        for first, nll in stream_nll(
            model,
            rows,
            length,
            segment_tokens=settings.segment_tokens,
            device=device,
            vocabulary_size=vocabulary_size,
            precision=evaluate.precision,
        ):
            at = first + np.arange(nll.shape[1])
            bin_of = bins.index(at)
            begins = np.flatnonzero(np.diff(bin_of, prepend=-1))
            sums["carried"][here, bin_of[begins]] += np.add.reduceat(nll, begins, axis=1)
            mean = nll.sum(axis=0) / len(texts)
            near = at <= context
            positions["carried"].add(at, mean)
            positions["window"].add(at[near], mean[near])
            lines, columns = np.nonzero(np.isnan(nll))
            _note(broken["carried"], begin + lines, at[columns])
            report(nll.size)

        for scored in window_nll(
            model,
            row,
            len(batch),
            length,
            context,
            batch_tokens=settings.rows * settings.segment_tokens,
            segment_tokens=settings.segment_tokens,
            device=device,
            vocabulary_size=vocabulary_size,
            precision=evaluate.precision,
        ):
            lines = np.broadcast_to(begin + scored.rows[:, None], scored.nll.shape)
            for kind, mask in (("window", scored.in_window), ("reset", scored.in_reset)):
                row_of, at, nll = lines[mask], scored.positions[mask], scored.nll[mask]
                np.add.at(sums[kind], (row_of, bins.index(at)), nll)
                if kind in positions:
                    positions[kind].add(at, nll / len(texts))
                lost = np.isnan(nll)
                _note(broken[kind], row_of[lost], at[lost])
            report(int(scored.in_window.sum()))
        report(len(batch) * min(context, length))

    short = bins.high <= context
    for kind in ("window", "reset"):
        sums[kind][:, short] = sums["carried"][:, short]
        inside = (broken["carried"] > 0) & (broken["carried"] <= context)
        broken[kind][inside] = broken["carried"][inside]
    return Losses(bins, sums, positions, broken)


def perplexity_table(losses: Losses, texts: list[Text], labels: Mapping[str, Any], context: int) -> pl.DataFrame:
    """One row per text and bin; the schema is in `evaluate`."""
    bins, count = losses.bins, len(texts)
    repeat = len(bins)
    return pl.DataFrame(
        {
            "model": [labels["model"]] * (count * repeat),
            "arm": [labels["arm"]] * (count * repeat),
            "seed": pl.Series([labels["seed"]] * (count * repeat), dtype=pl.Int64),
            "train_length": np.full(count * repeat, context, dtype=np.int64),
            "document": [text.document for text in texts for _ in range(repeat)],
            "stretch": np.repeat(np.array([text.stretch for text in texts], dtype=np.int64), repeat),
            "position_low": np.tile(bins.low, count),
            "position_high": np.tile(bins.high, count),
            "tokens": np.tile(bins.tokens, count),
            **{f"nll_{kind}": losses.sums[kind].ravel() for kind in KINDS},
        }
    )


def _note(first: npt.NDArray[np.int64], rows: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
    """Lower `first` (0 is none yet) to the positions given for its rows."""
    if rows.size:
        found = np.full_like(first, np.iinfo(np.int64).max)
        np.minimum.at(found, rows, positions)
        changed = np.unique(rows)
        first[changed] = np.where(first[changed] == 0, found[changed], np.minimum(first[changed], found[changed]))


def _broken(first: npt.NDArray[np.int64], texts: list[Text]) -> dict[str, Any] | None:
    broken = np.flatnonzero(first)
    if not broken.size:
        return None
    worst = texts[int(broken[np.argmin(first[broken])])]
    return {
        "position": int(first[broken].min()),
        "document": worst.document,
        "stretch": worst.stretch,
        "stretches": int(broken.size),
    }
