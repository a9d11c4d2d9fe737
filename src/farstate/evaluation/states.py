"""The stage `states`: mean, standard deviation and norm of the recurrent state at every position, and what samples of it look like.

Statistics of the state after t tokens are those of its entries as of a whole population: a head's P · N, all of a layer's heads
together, all layers together (pooled entries: the standard deviation of a layer is not the mean of its heads'). They are exact
and come from `farstate.ops.state_moments` while a text is read in segments; states are materialised at sampled positions only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from farstate import params
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation.bins import log_bins
from farstate.evaluation.perplexity import EvaluationSettings, prepare
from farstate.evaluation.texts import Text
from farstate.files import atomic_path, write_manifest
from farstate.models.contract import Model
from farstate.ops import state_moments
from farstate.ops.precision import flushed_denormals
from farstate.ops.state_moments import Moments
from farstate.state import State

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Called with the tokens read so far and those in all."""

RECURRENT = "recurrent"
STATISTICS = ("mean", "std", "norm")
SAMPLED = (*STATISTICS, "largest", "effective_rank")

_HEAD_POSITIONS = 1 << 25
"""Heads times positions up to which every head is in the table of positions; beyond, layers and the whole model only."""
_SEGMENT_VALUES = 1 << 25
"""Heads times tokens of a segment (of all rows): two float64 numbers each are alive at a time."""
_ROWS = 1 << 20
"""Rows of a table written at a time."""
_MASKS = ("valid",)
"""Auxiliary tensors that say which entries of another count."""

_WHOSE = [
    pa.field("model", pa.string()),
    pa.field("arm", pa.string()),
    pa.field("seed", pa.int64()),
    pa.field("train_length", pa.int64()),
    pa.field("document", pa.string()),
    pa.field("stretch", pa.int64()),
]
_WHICH = [pa.field("layer", pa.int32()), pa.field("head", pa.int32()), pa.field("part", pa.string())]
STATES_SCHEMA = pa.schema(
    [
        *_WHOSE,
        *_WHICH,
        *(pa.field(name, pa.int64()) for name in ("position_low", "position_high", "tokens")),
        *(pa.field(name, pa.float32()) for name in STATISTICS),
    ]
)
SAMPLES_SCHEMA = pa.schema(
    [*_WHOSE, *_WHICH, pa.field("position", pa.int64()), *(pa.field(name, pa.float32()) for name in SAMPLED)]
)
POSITIONS_SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64()),
        *_WHICH,
        *(pa.field(name, pa.float32()) for name in STATISTICS),
        pa.field("documents", pa.int64()),
    ]
)


class Column(NamedTuple):
    """What a statistic is of. `head` None: all heads of the layer together; `layer` None: all layers too."""

    layer: int | None
    head: int | None
    part: str


@dataclass(frozen=True)
class Layout:
    """The columns of a model.

    Attributes:
        columns: the first `streamed` have values at every position, the others (an attention layer's cache) at samples.
        heads: by number of a layer with a recurrence, the columns of its heads, in the order of the layers.
        inputs: layers and names of states that hold the last inputs, in the order of their columns.
        caches: layers and names of the others.
    """

    columns: tuple[Column, ...]
    streamed: int
    heads: Mapping[int, slice]
    inputs: tuple[tuple[int, str], ...]
    caches: tuple[tuple[int, str], ...]

    def at(self, layer: int | None, part: str = RECURRENT) -> int:
        """The column of a whole layer, or of the whole model."""
        return self.columns.index(Column(layer, None, part))

    @property
    def head_count(self) -> int:
        return sum(heads.stop - heads.start for heads in self.heads.values())


def layout_of(model: Model, device: torch.device) -> Layout:
    """What there is to measure, found by reading one token."""
    with torch.inference_mode(), state_moments.recording() as record:
        _, state = model(torch.zeros(1, 1, dtype=torch.int64, device=device))
    recurrent = [number for number, layer in enumerate(state.layers) if layer.recurrent.numel()]
    if len(recurrent) != len(record.layers):
        raise FarstateError(f"{len(recurrent)} layers have a recurrent state, {len(record.layers)} recorded its moments")
    columns: list[Column] = []
    heads = {}
    for number in recurrent:
        count = state.layers[number].recurrent.shape[1]
        heads[number] = slice(len(columns), len(columns) + count)
        columns += [Column(number, head, RECURRENT) for head in range(count)]
        columns.append(Column(number, None, RECURRENT))
    if recurrent:
        columns.append(Column(None, None, RECURRENT))
    named = [(number, name, tensor) for number, layer in enumerate(state.layers) for name, tensor in layer.auxiliary.items()]
    inputs = tuple((number, name) for number, name, tensor in named if record.of(tensor) is not None)
    columns += [Column(number, None, name) for number, name in inputs]
    columns += [Column(None, None, name) for name in dict.fromkeys(name for _, name in inputs)]
    streamed = len(columns)
    caches = tuple(
        (number, name) for number, name, tensor in named if (number, name) not in inputs and name not in _MASKS and tensor.numel()
    )
    columns += [Column(number, None, name) for number, name in caches]
    return Layout(tuple(columns), streamed, heads, inputs, caches)


class RowSums:
    """A row of float64 sums for each of the positions 1 … length, zero at first, in an unnamed temporary file."""

    def __init__(self, length: int, width: int) -> None:
        self.length, self.width = length, width
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (lives as long as the object)
        self._file.truncate(8 * length * width)

    def add(self, first: int, values: Floats) -> None:
        """Add `values` (n, width) to the sums at the positions from `first` on."""
        sums = self.read(first, len(values)) + values
        self._file.seek(8 * self.width * (first - 1))
        self._file.write(sums.view(np.uint8).data)

    def read(self, first: int, count: int) -> Floats:
        """The sums at the positions first … first + count − 1, (count, width).

        Raises:
            IndexError: a position below 1 or above the length.
        """
        if first < 1 or first + count - 1 > self.length:
            raise IndexError(f"positions {first} … {first + count - 1} of {self.length}")
        self._file.seek(8 * self.width * (first - 1))
        sums = np.empty((count, self.width))
        self._file.readinto(sums.view(np.uint8).data)
        return sums


class Batch(NamedTuple):
    """Some texts, from number `begin` on.

    Attributes:
        binned: means over the positions of each bin, (texts, bins, streamed columns, 3), in the order of `STATISTICS`.
        sampled: at each sampled position, (texts, samples, columns, 5), in the order of `SAMPLED`.
    """

    begin: int
    binned: Floats
    sampled: Floats


class Measurement:
    """The statistics of a model on a set of texts: `batches` reads them, `positions` and `broken` are complete after it.

    Attributes:
        bins: of the positions 1 … length; position t is the state that has read t tokens.
        samples: positions at which states are materialised, log-spaced, T_train and the last among them.
        positions: means over texts at every position, each text with the same weight: columns `kept`, three values each.
        broken: by text, the first (position, layer) whose state is not finite.
    """

    def __init__(
        self,
        model: Model,
        store: TokenStore,
        texts: list[Text],
        states: params.States,
        context: int,
        settings: EvaluationSettings,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.store, self.texts, self.settings, self.progress = model, store, texts, settings, progress
        self.device, self.precision, self.length = torch.device(settings.device), states.precision, states.length
        self.layout = layout_of(model, self.device)
        self.bins = log_bins(states.length, context, states.bins_per_octave)
        self.samples = log_bins(states.length, context, states.samples_per_octave).high
        self.every_head = self.layout.head_count * states.length <= _HEAD_POSITIONS
        streamed = self.layout.columns[: self.layout.streamed]
        self.kept = np.array(
            [number for number, column in enumerate(streamed) if self.every_head or column.head is None], dtype=np.int64
        )
        self.positions = RowSums(states.length, 3 * len(self.kept))
        self.broken: dict[int, tuple[int, int]] = {}
        self._done = 0

    def batches(self) -> Iterator[Batch]:
        """Read the texts, `rows` at a time."""
        for begin in range(0, len(self.texts), self.settings.rows):
            yield self._batch(begin, self.texts[begin : begin + self.settings.rows])

    def _batch(self, begin: int, batch: list[Text]) -> Batch:
        layout, rows = self.layout, len(batch)
        binned = np.zeros((rows, len(self.bins), layout.streamed, 3))
        sampled = np.full((rows, len(self.samples), len(layout.columns), len(SAMPLED)), np.nan)
        longest = max(1, min(self.settings.segment_tokens, _SEGMENT_VALUES // max(1, rows * layout.head_count)))
        state: State | None = None
        for start, stop in _segments(self.length, self.samples, longest):
            tokens = torch.from_numpy(np.stack([text.read(self.store, start, stop - start) for text in batch])).to(self.device)
            autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16-mixed")
            with torch.inference_mode(), autocast:
                groups, state = _moments(self.model, tokens, state, layout)
            with torch.inference_mode():
                self._add(begin, start + 1, groups, binned)
                if stop in self.samples:
                    sample = int(np.searchsorted(self.samples, stop))
                    sampled[:, sample] = _sampled(state, layout)
                    self._note_sample(begin, stop, sampled[:, sample])
            self._done += tokens.numel()
            if self.progress is not None:
                self.progress(self._done, len(self.texts) * self.length)
        return Batch(begin, binned / self.bins.tokens[:, None, None], sampled)

    def _add(self, begin: int, first: int, groups: list[Moments], binned: Floats) -> None:
        """Add a segment from position `first` on to the bins, the positions and what is broken."""
        layout = self.layout
        time = groups[0].sums.shape[1]
        at = first + np.arange(time)
        bin_of = self.bins.index(at)
        begins = np.flatnonzero(np.diff(bin_of, prepend=-1))
        means = np.empty((time, layout.streamed, 3))

        def put(columns: slice | int, moments: Moments) -> None:
            values = _numbers(torch.stack([moments.mean, moments.std, moments.norm], dim=-1))
            if isinstance(columns, int):
                columns = slice(columns, columns + 1)
            binned[:, bin_of[begins], columns] += np.add.reduceat(values, begins, axis=1)
            means[:, columns] = values.sum(axis=0) / len(self.texts)

        owners = [*layout.heads, *(number for number, _ in layout.inputs)]
        pooled: dict[str, Moments] = {}
        for number, moments in enumerate(groups):
            recurrent = number < len(layout.heads)
            layer = owners[number]
            part = RECURRENT if recurrent else layout.inputs[number - len(layout.heads)][1]
            if recurrent:
                put(layout.heads[layer], moments)
                moments = Moments(
                    moments.sums.sum(-1, keepdim=True),
                    moments.squared_norms.sum(-1, keepdim=True),
                    moments.entries * moments.sums.shape[-1],
                )
            put(layout.at(layer, part), moments)
            pooled[part] = _together(pooled[part], moments) if part in pooled else moments
            lost = ~np.isfinite(moments.squared_norms.squeeze(-1).cpu().numpy())
            for row in np.flatnonzero(lost.any(axis=1)):
                self._note(begin + int(row), int(at[lost[row].argmax()]), layer)
        for part, moments in pooled.items():
            put(layout.at(None, part), moments)
        self.positions.add(first, means[:, self.kept].reshape(time, -1))

    def _note_sample(self, begin: int, position: int, values: Floats) -> None:
        """Caches have no values but these."""
        for number in range(self.layout.streamed, len(self.layout.columns)):
            layer = self.layout.columns[number].layer
            assert layer is not None
            for row in np.flatnonzero(np.isnan(values[:, number, SAMPLED.index("norm")])):
                self._note(begin + int(row), position, layer)

    def _note(self, text: int, position: int, layer: int) -> None:
        self.broken[text] = min(self.broken.get(text, (position, layer)), (position, layer))

    def broken_at(self) -> dict[str, Any] | None:
        """Where a state that is not finite came first."""
        if not self.broken:
            return None
        number = min(self.broken, key=lambda text: (*self.broken[text], text))
        position, layer = self.broken[number]
        text = self.texts[number]
        return {
            "position": position,
            "layer": layer,
            "document": text.document,
            "stretch": text.stretch,
            "stretches": len(self.broken),
        }


def states(
    *,
    checkpoint: Path,
    store_directory: Path,
    states: params.States,
    context: int,
    labels: Mapping[str, Any],
    output: Path,
    settings: EvaluationSettings,
    progress: Progress | None = None,
) -> None:
    """Measure the states of a checkpoint and write its tables, `manifest.json` last.

    Position t is the state that has read t tokens. `layer` and `head` are counted from 0; a null head is all heads of the layer
    together, a null layer too all layers. `part` is `recurrent` or the name of an auxiliary state. For Mamba-1 a head is a channel.

    - `states.parquet` (STATES_SCHEMA), a row per text, layer, head, part and bin: mean, std and norm of the entries, each the
      mean over the bin's positions.
    - `samples.parquet` (SAMPLES_SCHEMA), a row per text, layer, head, part and sampled position: the same three, the largest
      absolute entry, and the effective rank: of a head's matrix, of a layer's channels × N for Mamba-1, of a layer's auxiliary
      state as a matrix. Null where a thing has no matrix of its own, and for a matrix of zeros.
    - `positions.parquet` (POSITIONS_SCHEMA), a row per position, layer, head and part: means over texts, each text with the same
      weight. With very many heads (`heads_at_every_position` in the manifest) layers and the whole model only.

    A state that is not finite makes the values it enters NaN; the manifest's `broken_at` says where it began.

    Args:
        checkpoint: folder of a model.
        store_directory: the token store.
        states: what is measured.
        context: T_train in tokens.
        labels: `model`, `arm` and `seed` (None: a published checkpoint), copied into the tables.
        output: folder for the result.
        settings: where and how.
        progress: called after every segment.

    Raises:
        FarstateError: no text is long enough, or the store's vocabulary is larger than the model's.
    """
    store, texts, model = prepare(checkpoint, store_directory, states, output, settings)
    found = Measurement(model, store, texts, states, context, settings, progress)
    whose = _Labels(labels, context, texts)
    documents = len({text.document for text in texts})
    with (
        atomic_path(output / "states.parquet") as binned_path,
        atomic_path(output / "samples.parquet") as sampled_path,
        flushed_denormals(),
        pq.ParquetWriter(binned_path, STATES_SCHEMA, compression="zstd") as binned,
        pq.ParquetWriter(sampled_path, SAMPLES_SCHEMA, compression="zstd") as sampled,
    ):
        for batch in found.batches():
            for number in range(len(batch.binned)):
                binned.write_table(_bin_rows(found, whose, batch.begin + number, batch.binned[number]))
                sampled.write_table(_sample_rows(found, whose, batch.begin + number, batch.sampled[number]))
    with atomic_path(output / "positions.parquet") as path:
        write_positions(path, found, documents)
    layout = found.layout
    write_manifest(
        output,
        {
            "labels": {key: labels[key] for key in ("model", "arm", "seed")},
            "context": context,
            "architecture": model.config.architecture,
            "parameters": model.config.parameter_count(),
            "parameters_without_embeddings": model.config.parameter_count(embeddings=False),
            "states": states.model_dump(mode="json"),
            "layers": model.config.layers,
            "heads": {str(layer): heads.stop - heads.start for layer, heads in layout.heads.items()},
            "parts": list(dict.fromkeys(column.part for column in layout.columns)),
            "documents": documents,
            "stretches": len(texts),
            "joined_documents": sum(len(text.pieces) for text in texts) if states.streams == "concatenated" else None,
            "tokens": len(texts) * states.length,
            "bins": len(found.bins),
            "samples": found.samples.tolist(),
            "heads_at_every_position": found.every_head,
            "broken_at": found.broken_at(),
            "positions_mean": "over all stretches, each with the same weight",
        },
        ["states.parquet", "samples.parquet", "positions.parquet"],
    )


def write_positions(path: Path, found: Measurement, documents: int) -> None:
    """Write the table of positions, a block of rows at a time, each block by column and then by position."""
    columns = [found.layout.columns[number] for number in found.kept]
    block = max(1, _ROWS // max(1, len(columns)))
    with pq.ParquetWriter(path, POSITIONS_SCHEMA, compression="zstd") as writer:
        for first in range(1, found.length + 1, block):
            count = min(block, found.length + 1 - first)
            values = found.positions.read(first, count).reshape(count, len(columns), 3).swapaxes(0, 1)
            writer.write_table(
                pa.table(
                    {
                        "position": np.tile(np.arange(first, first + count), len(columns)),
                        **_which(columns, count),
                        **_statistics(values.reshape(-1, 3), STATISTICS),
                        "documents": np.full(count * len(columns), documents),
                    },
                    schema=POSITIONS_SCHEMA,
                )
            )


class _Labels:
    """The columns that say whose numbers a row holds."""

    def __init__(self, labels: Mapping[str, Any], context: int, texts: list[Text]) -> None:
        self.labels, self.context, self.texts = labels, context, texts

    def of(self, text: int, rows: int) -> dict[str, pa.Array]:
        values = {
            **{key: self.labels[key] for key in ("model", "arm", "seed")},
            "train_length": self.context,
            "document": self.texts[text].document,
            "stretch": self.texts[text].stretch,
        }
        return {
            field.name: pa.array([values[field.name]], field.type).take(pa.array(np.zeros(rows, np.int32))) for field in _WHOSE
        }


def _bin_rows(found: Measurement, whose: _Labels, text: int, values: Floats) -> pa.Table:
    """values (bins, streamed columns, 3)."""
    bins, columns = found.bins, found.layout.columns[: found.layout.streamed]
    return pa.table(
        {
            **whose.of(text, len(columns) * len(bins)),
            **_which(columns, len(bins)),
            "position_low": np.tile(bins.low, len(columns)),
            "position_high": np.tile(bins.high, len(columns)),
            "tokens": np.tile(bins.tokens, len(columns)),
            **_statistics(values.swapaxes(0, 1).reshape(-1, 3), STATISTICS),
        },
        schema=STATES_SCHEMA,
    )


def _sample_rows(found: Measurement, whose: _Labels, text: int, values: Floats) -> pa.Table:
    """values (samples, columns, 5)."""
    columns = found.layout.columns
    count = len(found.samples)
    return pa.table(
        {
            **whose.of(text, len(columns) * count),
            **_which(columns, count),
            "position": np.tile(found.samples, len(columns)),
            **_statistics(values.swapaxes(0, 1).reshape(-1, len(SAMPLED)), SAMPLED),
        },
        schema=SAMPLES_SCHEMA,
    )


def _which(columns: list[Column] | tuple[Column, ...], repeat: int) -> dict[str, pa.Array]:
    """Layer, head and part of each column, `repeat` rows one after the other."""
    index = pa.array(np.repeat(np.arange(len(columns)), repeat))
    return {field.name: pa.array([getattr(column, field.name) for column in columns], field.type).take(index) for field in _WHICH}


def _statistics(values: Floats, names: tuple[str, ...]) -> dict[str, pa.Array]:
    """Columns of the tables. An effective rank that is not defined is null, everything else that is not a number NaN."""
    return {
        name: pa.array(
            values[:, number].astype(np.float32), mask=np.isnan(values[:, number]) if name == "effective_rank" else None
        )
        for number, name in enumerate(names)
    }


def _segments(length: int, samples: npt.NDArray[np.int64], longest: int) -> Iterator[tuple[int, int]]:
    """Tokens start … stop − 1 read together, cut at every sampled position."""
    start = 0
    for end in samples.tolist():
        while start < end:
            stop = min(start + longest, end)
            yield start, stop
            start = stop
    assert start == length


def _moments(model: Model, tokens: Tensor, state: State | None, layout: Layout) -> tuple[list[Moments], State]:
    """Moments after every token, of the recurrences and then of `layout.inputs`, and the state after the last.

    Within a chunk of an operation a number that is not finite reaches positions before its own: a segment in which a row breaks
    is read again in halves, until the break is where it belongs.
    """
    with state_moments.recording() as record:
        _, final = model(tokens, state)
    of_inputs = [record.of(final.layers[layer].auxiliary[name]) for layer, name in layout.inputs]
    found = [*record.layers, *(moments for moments in of_inputs if moments is not None)]
    time = tokens.shape[1]
    if time > 1 and bool((_finite_rows(state, len(tokens), tokens.device) & ~_finite_moments(found)).any()):
        earlier, middle = _moments(model, tokens[:, : time // 2], state, layout)
        later, final = _moments(model, tokens[:, time // 2 :], middle, layout)
        found = [
            Moments(
                torch.cat([first.sums, second.sums], dim=1),
                torch.cat([first.squared_norms, second.squared_norms], dim=1),
                first.entries,
            )
            for first, second in zip(earlier, later, strict=True)
        ]
    return found, final


def _finite_rows(state: State | None, rows: int, device: torch.device) -> Tensor:
    """Which rows of a state hold nothing but finite numbers, (rows,)."""
    finite = torch.ones(rows, dtype=torch.bool, device=device)
    for layer in () if state is None else state.layers:
        for tensor in layer.tensors():
            finite &= tensor.flatten(1).isfinite().all(1)
    return finite


def _finite_moments(found: list[Moments]) -> Tensor:
    """Rows all of whose moments are finite, (rows,)."""
    return torch.stack([moments.squared_norms.flatten(1).isfinite().all(1) for moments in found]).all(0)


def _together(first: Moments, second: Moments) -> Moments:
    """Of the entries of both."""
    return Moments(first.sums + second.sums, first.squared_norms + second.squared_norms, first.entries + second.entries)


def _sampled(state: State, layout: Layout) -> Floats:
    """The statistics of a materialised state, (rows, columns, 5), NaN where there is none."""
    found = np.full((state.batch_size, len(layout.columns), len(SAMPLED)), np.nan)
    groups: dict[str, list[Tensor]] = {}
    for layer, heads in layout.heads.items():
        recurrent = state.layers[layer].recurrent
        matrices = recurrent.dim() > 3
        ranks = effective_rank(recurrent.flatten(3) if matrices else recurrent)
        found[:, heads] = _described(recurrent.flatten(2), ranks if matrices else None)
        found[:, layout.at(layer)] = _described(recurrent.flatten(1), None if matrices else ranks)
        groups.setdefault(RECURRENT, []).append(recurrent.flatten(1))
    for layer, name in (*layout.inputs, *layout.caches):
        tensor = state.layers[layer].auxiliary[name]
        found[:, layout.at(layer, name)] = _described(
            tensor.flatten(1), effective_rank(tensor.flatten(2)) if tensor.dim() > 2 else None
        )
        if (layer, name) in layout.inputs:
            groups.setdefault(name, []).append(tensor.flatten(1))
    for part, tensors in groups.items():
        found[:, layout.at(None, part)] = _described(torch.cat(tensors, dim=1), None)
    return found


def _described(entries: Tensor, ranks: Tensor | None) -> Floats:
    """entries (..., n) → (..., 5) in the order of `SAMPLED`."""
    wide = entries.double()
    columns = [
        wide.mean(-1),
        wide.std(-1, correction=0),
        torch.linalg.vector_norm(wide, dim=-1),
        wide.abs().amax(-1),
        torch.full_like(wide[..., 0], torch.nan) if ranks is None else ranks,
    ]
    return _numbers(torch.stack(columns, dim=-1))


def effective_rank(matrices: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values (Roy & Vetterli 2007, "The effective rank", Def. 1), (..., m, n) → (...).

        p_i = σ_i / Σ_j σ_j        exp(−Σ_i p_i ln p_i)        between 1 and min(m, n)

    Float64 for any input. From the eigenvalues of the smaller Gram matrix: singular values below 2e-7 of the largest, which is
    what rounding leaves of a float32 state, count as zero. NaN for a matrix of zeros or one that is not finite.
    """
    wide = matrices.double()
    gram = wide.mT @ wide if wide.shape[-2] >= wide.shape[-1] else wide @ wide.mT
    finite = gram.isfinite().flatten(-2).all(-1)
    values = torch.linalg.eigvalsh(torch.where(finite[..., None, None], gram, torch.zeros_like(gram)))
    values = torch.where(values > 4e-14 * values[..., -1:], values, 0.0).sqrt()
    share = values / values.sum(-1, keepdim=True)
    entropy = -torch.special.xlogy(share, share).sum(-1)
    return torch.where(finite & (values[..., -1] > 0.0), entropy.exp(), torch.nan)


def _numbers(tensor: Tensor) -> Floats:
    """On the CPU; what is not finite is NaN."""
    values: Floats = tensor.to(device="cpu", dtype=torch.float64).numpy()
    return np.where(np.isfinite(values), values, np.nan)
