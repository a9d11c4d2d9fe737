"""The stage `remembrance`: how far the prediction at the end of a text moves when its first tokens are dropped.

    EffRem_T(t) = d( q(· | x_0 … x_T), q(· | x_t … x_T) )

the same ending, read from the zero state (convolution, token shift and attention cache included) at token t. EffRem_T(0) = 0.
Every pair (text, start) is a row of a batch: rows of nearly equal length begin together and leave the batch when they have
read x_T, so that the work is the sum of the suffix lengths and batches stay full. Only hidden states of the last positions are
kept; the distances (`farstate.ops.divergence`) are taken without logits. Every later T comes for nothing, so that beside the
prediction after x_T the mean over the last positions up to T is reported, under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import torch
from torch import Tensor

from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation.perplexity import EvaluationSettings, Progress, prepare
from farstate.evaluation.stream import Precision
from farstate.evaluation.texts import Text
from farstate.files import atomic_path, write_manifest
from farstate.models.contract import Model
from farstate.ops.divergence import divergence
from farstate.ops.precision import flushed_denormals
from farstate.params import Remembrance
from farstate.state import State

Floats = npt.NDArray[np.float64]

DISTANCES = ("total_variation", "jensen_shannon", "jensen_shannon_distance", "cosine_distance")
"""Total variation in [0, 1]; Jensen–Shannon divergence in nats, in [0, log 2]; its square root, a metric, taken token by token
before any mean; 1 − cosine of the two probability vectors, in [0, 1]."""

SINGLE = "T"
"""The target that is the one prediction after x_T, the paper's."""

# A segment of so few tokens costs what its overhead does: padding within it is free.
_SHORT = 64
# Of longer segments, at most one token in so many is padding.
_PADDED = 64


def last_target(last: int) -> str:
    """Name of the target that is the mean over the last `last` positions T − last + 1 … T."""
    return f"last {last}"


def default_starts(length: int, per_octave: int) -> tuple[int, ...]:
    """Start points from 0 to T = `length`, dense at both ends: 0, ⌈2^(j / per_octave)⌉ up to T / 2, T minus the same, and T."""
    near = {0}
    for step in range(per_octave * length.bit_length() + 1):
        distance = int(np.ceil(2.0 ** (step / per_octave) - 1e-9))
        if 2 * distance > length:
            break
        near.add(distance)
    return tuple(sorted(near | {length - distance for distance in near}))


@dataclass(frozen=True)
class Break:
    """Where a model's output ceases to be a number: after it has read x_position of a text, begun at x_start.

    Chunked recurrences lose a chunk as a whole, so that the position may be early by less than a chunk.
    """

    text: int
    start: int
    position: int


@dataclass(frozen=True)
class Sweep:
    """Distances of a set of texts.

    Attributes:
        starts: start points t, ascending.
        values: by target, float64, shape (texts, starts, 4), the last axis as `DISTANCES`. NaN where the model's output is not
            finite, and, for a mean over last positions, where not all of them lie at or after the start.
        broken: of every row whose hidden states are not all finite, the first such position; and of every other row that has a
            distance that is not finite, as the head alone may make it, the first position of one.
    """

    starts: tuple[int, ...]
    values: dict[str, Floats]
    broken: list[Break]


def evaluate_remembrance(
    *,
    checkpoint: Path,
    store_directory: Path,
    remembrance: Remembrance,
    context: int,
    labels: Mapping[str, Any],
    output: Path,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> None:
    """Measure a checkpoint and write `remembrance.parquet` and, last, `manifest.json`.

    The table holds one row per text, start and target: model, arm, seed, train_length, document, stretch, T, start, target
    ("T": the prediction after x_T; "last 64": the mean over the predictions after x_{T−63} … x_T, for starts that are not behind
    the first of them) and the columns `DISTANCES`. What is not finite is NaN, and the manifest's `broken_at` says where it began:
    after which token of which document, read from which start.

    Args:
        checkpoint: folder of a model.
        store_directory: the token store.
        remembrance: what is measured.
        context: T_train in tokens.
        labels: `model`, `arm` and `seed` (None: a published checkpoint), copied into the table.
        output: folder for the result.
        settings: where and how.
        progress: called after every segment.

    Raises:
        FarstateError: no text is long enough, or the store's vocabulary is larger than the model's.
    """
    store, texts, model = prepare(checkpoint, store_directory, remembrance, output, settings)
    with flushed_denormals():
        found = measure(model, store, texts, remembrance, settings, progress)

    with atomic_path(output / "remembrance.parquet") as path:
        remembrance_table(found, texts, remembrance, labels, context).write_parquet(path)
    write_manifest(
        output,
        {
            "labels": {key: labels[key] for key in ("model", "arm", "seed")},
            "context": context,
            "parameters": model.config.parameter_count(),
            "parameters_without_embeddings": model.config.parameter_count(embeddings=False),
            "remembrance": remembrance.model_dump(mode="json"),
            "starts": list(found.starts),
            "documents": len({text.document for text in texts}),
            "stretches": len(texts),
            "joined_documents": sum(len(text.pieces) for text in texts) if remembrance.streams == "concatenated" else None,
            "tokens": len(texts) * sum(remembrance.length + 1 - start for start in found.starts),
            "broken_at": _broken(found, texts),
        },
        ["remembrance.parquet"],
    )


def measure(
    model: Model,
    store: TokenStore,
    texts: Sequence[Text],
    remembrance: Remembrance,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> Sweep:
    """Effective remembrance of `texts`, `settings.rows` pairs (text, start) side by side, in segments of `settings.segment_tokens`."""
    starts = remembrance.starts or default_starts(remembrance.length, remembrance.starts_per_octave)
    return sweep(
        model,
        lambda text, start, count: texts[text].read(store, start, count),
        len(texts),
        remembrance.length,
        starts,
        last=remembrance.last,
        rows=settings.rows,
        segment_tokens=settings.segment_tokens,
        device=torch.device(settings.device),
        vocabulary_size=store.vocabulary_size if remembrance.softmax == "real" else None,
        precision=remembrance.precision,
        progress=progress,
    )


def sweep(
    model: Model,
    read: Callable[[int, int, int], npt.NDArray[np.int64]],
    texts: int,
    length: int,
    starts: Sequence[int],
    *,
    last: int,
    rows: int,
    segment_tokens: int,
    device: torch.device,
    vocabulary_size: int | None,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> Sweep:
    """EffRem_T(t) and its mean over the last positions, for every text and start.

    Args:
        model: the language model, on `device`.
        read: `read(text, start, count)` gives x_start … x_{start+count−1} of a text, shape (count,).
        texts: how many; each has the tokens x_0 … x_T.
        length: T.
        starts: in 0 … T.
        last: positions of the mean, T − last + 1 … T.
        rows: pairs (text, start) read side by side.
        segment_tokens: tokens of each read before the next; like `rows` it changes memory and speed, and the numbers only by rounding.
        device: where to compute.
        vocabulary_size: the distributions are over this many rows of the head; None: over all.
        precision: `bf16-mixed` runs the model under bfloat16 autocast; the distances are computed in float32 either way.
        progress: called with the tokens read so far and those in all.

    Raises:
        FarstateError: a start outside 0 … T, or more last positions than T.
    """
    wanted = sorted(set(starts))
    if not wanted or wanted[0] < 0 or wanted[-1] > length:
        wrong = next((start for start in wanted if not 0 <= start <= length), None)
        raise FarstateError(f"remembrance.starts: {wrong} is not a start point; give one or more in 0 … {length} (T)")
    if not 1 <= last <= length:
        raise FarstateError(f"remembrance.last: {last} positions up to T = {length} do not exist; give 1 … {length}")
    # Texts with the same start stand together: they are equally long. The whole texts come first, they are what all is held against.
    pairs = [(start, text) for start in sorted({0, *wanted}) for text in range(texts)]
    total, done = sum(length + 1 - start for start, _ in pairs), 0
    values = {target: np.full((texts, len(wanted), len(DISTANCES)), np.nan) for target in (SINGLE, last_target(last))}
    reference: list[Tensor] = []
    broken: list[Break] = []
    for begin in range(0, len(pairs), rows):
        group = pairs[begin : begin + rows]
        lengths = [length + 1 - start for start, _ in group]
        # A mean over positions of which some are missing would be another quantity.
        kept = [last if own >= last else 1 for own in lengths]
        endings: list[Tensor] = []
        for ending, breaks, read_now in _read_group(model, read, group, lengths, kept, segment_tokens, device, precision):
            endings = ending
            broken += [Break(group[row][1], group[row][0], group[row][0] + at) for row, at in breaks]
            done += read_now
            if progress is not None:
                progress(done, total)
        reference += [ending for (start, _), ending in zip(group, endings, strict=True) if start == 0]
        others = [reference[text][-count:] for (_, text), count in zip(group, kept, strict=True)]
        itself = [start == 0 for start, _ in group]
        found = _distances(model, endings, others, itself, vocabulary_size)
        for (start, text), own_ending, other, distances in zip(group, endings, others, found, strict=True):
            lost = np.flatnonzero(~np.isfinite(distances).all(axis=1))
            # A hidden state that is not finite, its own or that of the whole text, has been noted where it began.
            if lost.size and bool((own_ending.isfinite().all() & other.isfinite().all()).item()):
                broken.append(Break(text, start, length + 1 - len(distances) + int(lost[0])))
            if start in wanted:
                place = wanted.index(start)
                values[SINGLE][text, place] = distances[-1]
                if len(distances) == last:
                    values[last_target(last)][text, place] = distances.mean(axis=0)
    return Sweep(tuple(wanted), values, broken)


def _read_group(
    model: Model,
    read: Callable[[int, int, int], npt.NDArray[np.int64]],
    group: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    kept: Sequence[int],
    segment_tokens: int,
    device: torch.device,
    precision: Precision,
) -> Iterator[tuple[list[Tensor], list[tuple[int, int]], int]]:
    """Read the rows `group`, pairs (start, text) by ascending start, all from the zero state and each to its end.

    A row that ends within a segment is filled up behind its end, where nothing it is asked for can see it.

    Yields, after every segment:
        The hidden states of each row's last `kept` positions, (kept, D), complete after the last segment; the rows whose
        first hidden state that is not finite lies in this segment, with its place in the row; the tokens read, without the
        padding.
    """
    endings: list[Tensor] = []
    state: State | None = None
    seen_broken: set[int] = set()
    at = 0
    for end in segment_ends(lengths, segment_tokens):
        active = sum(own > at for own in lengths)
        tokens = np.empty((active, end - at), dtype=np.int64)
        for row, (start, text) in enumerate(group[:active]):
            count = min(end, lengths[row]) - at
            tokens[row, :count] = read(text, start + at, count)
            # Not a token that the text does not hold: a chunk would spread what breaks there to its beginning.
            tokens[row, count:] = tokens[row, count - 1]
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            if state is not None and state.batch_size > active:
                state = state.select(range(active))
            hidden, state = model(torch.from_numpy(tokens).to(device), state)
            if not endings:
                endings = [hidden.new_empty(count, hidden.shape[-1]) for count in kept]
            for row in range(active):
                first = max(at, lengths[row] - kept[row])
                stop = min(end, lengths[row])
                if first < stop:
                    place = first - (lengths[row] - kept[row])
                    endings[row][place : place + stop - first] = hidden[row, first - at : stop - at]
            # One number a position, and one for the segment: where all is well nothing else is looked at.
            sums = hidden.sum(-1)
            breaks = []
            if not bool(sums.isfinite().all()):
                for row, column in (~hidden.isfinite().all(-1)).nonzero().tolist():
                    if at + column < lengths[row] and row not in seen_broken:
                        seen_broken.add(row)
                        breaks.append((row, at + column))
        del hidden
        yield endings, breaks, sum(min(end, own) - at for own in lengths[:active])
        at = end


def segment_ends(lengths: Sequence[int], segment_tokens: int) -> list[int]:
    """Where the segments end in which rows of these lengths (descending) are read, all from their beginning.

    A segment is at most `segment_tokens` long. It ends where a row does, at the furthest such place up to which little is padding.
    """
    ends, at = [], 0
    while at < lengths[0]:
        remaining = [own - at for own in lengths if own > at]
        limit = min(segment_tokens, remaining[0])
        end = 0
        for candidate in sorted({limit, *(own for own in remaining if own < limit)}):
            padding = sum(candidate - own for own in remaining if own < candidate)
            if candidate <= _SHORT or padding * _PADDED <= candidate * len(remaining):
                end = candidate
        at += end
        ends.append(at)
    return ends


def _distances(
    model: Model, endings: Sequence[Tensor], others: Sequence[Tensor], itself: Sequence[bool], vocabulary_size: int | None
) -> Iterator[Floats]:
    """For each row its distances, (kept, 4), float64; zero where it is held against itself, NaN where a hidden state is not finite.

    A head that is not finite gives no distribution: all are NaN.
    """
    compared = [row for row, same in enumerate(itself) if not same]
    found: dict[int, Floats] = {}
    with torch.inference_mode():
        if compared:
            h, other = (torch.cat([side[row] for row in compared]) for side in (endings, others))
            total_variation, divergence_nats, cosine = divergence(h, other, model.head_weight, None, vocabulary_size)
            stacked = torch.stack([total_variation, divergence_nats, divergence_nats.sqrt(), cosine], dim=-1).double()
            stacked[~(h.isfinite().all(-1) & other.isfinite().all(-1))] = torch.nan
            parts = stacked.cpu().numpy()
            at = 0
            for row in compared:
                found[row] = parts[at : at + len(endings[row])]
                at += len(endings[row])
        head_finite = bool(model.head_weight[:vocabulary_size].isfinite().all())
        for row, ending in enumerate(endings):
            if row in found:
                yield found[row]
            else:
                finite = head_finite & ending.isfinite().all(-1).cpu().numpy()
                yield np.where(finite[:, None], np.zeros((len(ending), len(DISTANCES))), np.nan)


def remembrance_table(
    found: Sweep, texts: Sequence[Text], remembrance: Remembrance, labels: Mapping[str, Any], context: int
) -> pl.DataFrame:
    """One row per text, target and start; the schema is in `evaluate_remembrance`."""
    starts = np.array(found.starts, dtype=np.int64)
    parts = []
    for target, values in found.values.items():
        within = starts <= remembrance.length + 1 - (1 if target == SINGLE else remembrance.last)
        count, rows = int(within.sum()), int(within.sum()) * len(texts)
        if not count:
            continue
        columns = values[:, within].reshape(rows, len(DISTANCES))
        parts.append(
            pl.DataFrame(
                {
                    "model": [labels["model"]] * rows,
                    "arm": [labels["arm"]] * rows,
                    "seed": pl.Series([labels["seed"]] * rows, dtype=pl.Int64),
                    "train_length": np.full(rows, context, dtype=np.int64),
                    "document": [text.document for text in texts for _ in range(count)],
                    "stretch": np.repeat(np.array([text.stretch for text in texts], dtype=np.int64), count),
                    "T": np.full(rows, remembrance.length, dtype=np.int64),
                    "start": np.tile(starts[within], len(texts)),
                    "target": [target] * rows,
                    **{name: columns[:, number] for number, name in enumerate(DISTANCES)},
                }
            )
        )
    return pl.concat(parts)


def _broken(found: Sweep, texts: Sequence[Text]) -> dict[str, Any] | None:
    """The earliest break: after x_position of which document, read from which start; and how many texts break anywhere."""
    if not found.broken:
        return None
    worst = min(found.broken, key=lambda each: (each.position, each.start, each.text))
    text = texts[worst.text]
    return {
        "position": worst.position,
        "start": worst.start,
        "document": text.document,
        "stretch": text.stretch,
        "stretches": len({each.text for each in found.broken}),
    }
