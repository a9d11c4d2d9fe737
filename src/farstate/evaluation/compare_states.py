"""The stage `compare_states`: the states of a figure's arms side by side, with intervals, and its heads by drift.

The *drift* of a head is log2 of its standard deviation far beyond the training length over that at the end of it: +1 is twice
as wide a spread, −1 half of it. Of many heads some drift by chance, so their intervals are simultaneous: with the stated
confidence all heads of an arm lie in theirs at once. Everything is paired over the same texts, as in `farstate.evaluation.compare`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from farstate import params
from farstate.errors import FarstateError
from farstate.evaluation.bins import Bins
from farstate.evaluation.compare import Texts
from farstate.evaluation.gathered import Gathered, resamples_of
from farstate.evaluation.states import RECURRENT, SAMPLED, STATISTICS, Column
from farstate.evaluation.uncertainty import Floats, Resamples
from farstate.files import MANIFEST, atomic_path, read_manifest, write_manifest
from farstate.runs import BASE

CURVE_SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "arm": pl.String,
    "seed": pl.Int64,
    "train_length": pl.Int64,
    "layer": pl.Int32,
    "head": pl.Int32,
    "part": pl.String,
    "statistic": pl.String,
    "against": pl.String,
    "position": pl.Int64,
    "position_low": pl.Int64,
    "position_high": pl.Int64,
    "value": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "n_documents": pl.Int64,
    "n_stretches": pl.Int64,
    "n_tokens": pl.Int64,
}
HEAD_SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "arm": pl.String,
    "seed": pl.Int64,
    "train_length": pl.Int64,
    "layer": pl.Int32,
    "head": pl.Int32,
    "std_near": pl.Float64,
    "std_far": pl.Float64,
    "drift": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "beyond": pl.Boolean,
    "rank": pl.Int64,
    "against_base": pl.Float64,
    "against_base_low": pl.Float64,
    "against_base_high": pl.Float64,
    "n_documents": pl.Int64,
    "n_stretches": pl.Int64,
}
_MANY_HEADS, _SHOWN_HEADS = 4096, 64
"""Of a model with more heads than the first, so many with the greatest drift of each arm have curves."""
_DRAWN = 1 << 24
"""Resampled numbers held at a time."""
_STD = STATISTICS.index("std")

Drawn = tuple[Floats, Floats]
"""A quantity and the same of every resample: shape (…) and (resamples, …)."""


@dataclass(frozen=True)
class Run:
    """One measured checkpoint.

    Attributes:
        binned: means over bins, (texts, bins, columns, 3), in the order of `STATISTICS`.
        sampled: at sampled positions, (texts, samples, columns, 5), in the order of `SAMPLED`; further columns at the end.
        broken_at: where a state that is not finite came first.
    """

    model: str
    arm: str
    seed: int | None
    binned: Floats
    sampled: Floats
    broken_at: dict[str, Any] | None
    facts: dict[str, Any]


class Measured(NamedTuple):
    """What the evaluations of one model share."""

    texts: Texts
    columns: tuple[Column, ...]
    sampled_columns: tuple[Column, ...]
    samples: npt.NDArray[np.int64]


def compare_states(*, evaluations: Sequence[Path], compare: params.Compare, figure: Mapping[str, Any], output: Path) -> None:
    """Join the measurements of a figure's arms and write its tables, the manifest last.

    - `states.parquet` (CURVE_SCHEMA): mean, std and norm by bin, largest entry and effective rank (and all five of an attention
      layer's cache) at sampled positions, a row per model, arm, seed, layer, head, part and position. A null seed is the mean over
      seeds, with the pointwise interval over texts; a null head is all heads of a layer together, a null layer too all layers.
      `against` is empty, or `base`: the paired difference to the base model.
    - `heads.parquet` (HEAD_SCHEMA), a row per model, arm, seed, layer and head: `std_near` in the last bin within the training
      length, `std_far` over the far positions (those from 32 T_train on; where the evaluation is shorter, its last octave), `drift` =
      log2(std_far / std_near) with the simultaneous interval over all heads, `beyond`: it does not hold zero, `rank` by |drift|
      (1 the largest), and the paired difference of drifts to the base, simultaneous too. Null: a head whose state is zero or not
      finite.
    - the manifest's `summary`, a record per model, arm and seed: heads beyond the band, the drift of the whole model, where its
      standard deviation first leaves that at the end of training (`begins`), and at how many bins it lies above or below the base's.

    Args:
        evaluations: result folders of the stage `states`.
        compare: confidence, resamples, seed of the bootstrap.
        figure: the `models` and `arms` of the figure.
        output: folder for the result.

    Raises:
        FarstateError: a measurement is missing, unexpected or there twice, or measurements differ in their texts, bins or heads.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    models, arms = list(figure["models"]), list(figure["arms"])
    runs, measured = _load(evaluations, models, arms)
    shared = next(iter(measured.values())).texts
    resamples = resamples_of(shared.documents, compare)
    curves: list[pl.DataFrame] = []
    heads: list[pl.DataFrame] = []
    summary: list[dict[str, Any]] = []
    for model in models:
        reader = _Model(model, measured[model], {arm: runs[model, arm] for arm in arms}, resamples)
        heads += reader.heads()
        curves += reader.curves()
        summary += reader.summary()
    for name, table in (("states", pl.concat(curves)), ("heads", pl.concat(heads))):
        with atomic_path(output / f"{name}.parquet") as path:
            table.write_parquet(path)
    write_manifest(
        output,
        {
            "figure": {"models": models, "arms": arms},
            "models": {model: runs[model, BASE][0].facts for model in models},
            "compare": compare.model_dump(mode="json"),
            "interval": resamples.label,
            "interval_of_heads": _label_of_heads(resamples),
            "summary": summary,
            "n_documents": resamples.documents,
            "n_stretches": resamples.stretches,
            "evaluations": len(evaluations),
        },
        ["states.parquet", "heads.parquet"],
    )


def _label_of_heads(resamples: Resamples) -> str:
    if resamples.kind == "none":
        return resamples.label
    return f"{resamples.label}, simultaneous over all heads of an arm (max-statistic, at least Bonferroni's)"


class _Model:
    """The arms of one model, with everything computed on the same resamples."""

    def __init__(self, name: str, measured: Measured, runs: dict[str, list[Run]], resamples: Resamples) -> None:
        self.name, self.measured, self.texts, self.resamples = name, measured, measured.texts, resamples
        self.runs = {(arm, seed): run for arm, group in runs.items() for seed, run in _with_mean(group)}
        self.base = self.runs[BASE, None]
        self.of_heads = np.array(
            [number for number, column in enumerate(measured.columns) if column.head is not None], dtype=np.int64
        )
        self.whole = measured.columns.index(Column(None, None, RECURRENT)) if len(self.of_heads) else None
        self._drifts = {key: self._drift(run, self.of_heads) for key, run in self.runs.items()}

    # --- drift -------------------------------------------------------------------------------------------

    def _ends(self, run: Run, columns: npt.NDArray[np.int64]) -> tuple[Drawn, Drawn] | None:
        """Standard deviations at the end of training and far beyond it; None where the measurement does not reach so far."""
        near, far = self.texts.near, self.texts.far
        if near.stop == 0 or far.start == far.stop:
            return None
        std = run.binned[:, :, columns, _STD]
        weights = self.texts.bins.tokens[far] / self.texts.bins.tokens[far].sum()
        ones = np.ones(len(std))
        return self.resamples.mean(std[:, near.stop - 1], ones), self.resamples.mean(
            np.einsum("tbc,b->tc", std[:, far], weights), ones
        )

    def _drift(self, run: Run, columns: npt.NDArray[np.int64]) -> Drawn:
        ends = self._ends(run, columns)
        if ends is None:
            return np.full(len(columns), np.nan), np.full((len(self.resamples.weights), len(columns)), np.nan)
        (near, near_drawn), (far, far_drawn) = ends
        return _log2(far, near), _log2(far_drawn, near_drawn)

    def heads(self) -> Iterator[pl.DataFrame]:
        columns = [self.measured.columns[number] for number in self.of_heads]
        for (arm, seed), run in self.runs.items():
            drift, drawn = self._drifts[arm, seed]
            low, high = self._band(drift, drawn)
            base, base_drawn = self._drifts[BASE, None]
            difference = np.full(len(drift), np.nan) if arm == BASE else drift - base
            difference_low, difference_high = self._band(difference, drawn - base_drawn)
            ends = self._ends(run, self.of_heads)
            order = np.argsort(np.where(np.isnan(drift), np.inf, -np.abs(drift)), kind="stable")
            rank = np.empty(len(drift), dtype=np.int64)
            rank[order] = np.arange(1, len(drift) + 1)
            yield pl.DataFrame(
                {
                    **self._whose(arm, seed, len(drift)),
                    "layer": [column.layer for column in columns],
                    "head": [column.head for column in columns],
                    "std_near": np.full(len(drift), np.nan) if ends is None else ends[0][0],
                    "std_far": np.full(len(drift), np.nan) if ends is None else ends[1][0],
                    "drift": drift,
                    "low": low,
                    "high": high,
                    "beyond": [None if math.isnan(a) else bool(a > 0.0 or b < 0.0) for a, b in zip(low, high, strict=True)],
                    "rank": [None if math.isnan(d) else int(r) for d, r in zip(drift, rank, strict=True)],
                    "against_base": difference,
                    "against_base_low": difference_low,
                    "against_base_high": difference_high,
                    "n_documents": [self.resamples.documents] * len(drift),
                    "n_stretches": [self.resamples.stretches] * len(drift),
                },
                schema=HEAD_SCHEMA,
            ).with_columns(pl.col(pl.Float64).fill_nan(None))

    def _band(self, estimate: Floats, drawn: Floats) -> tuple[Floats, Floats]:
        """Simultaneous over the entries that are finite in every resample; NaN for the others."""
        low, high = np.full(len(estimate), np.nan), np.full(len(estimate), np.nan)
        known = np.isfinite(estimate) & np.isfinite(drawn).all(axis=0)
        if known.any():
            low[known], high[known] = self.resamples.band(estimate[known], drawn[:, known])
        return low, high

    # --- curves ------------------------------------------------------------------------------------------

    def curves(self) -> Iterator[pl.DataFrame]:
        shown = self._shown()
        cached = len(self.measured.columns)
        bins = self.texts.bins
        every = np.arange(len(self.measured.sampled_columns))
        at_samples = Bins(np.append(1, self.measured.samples[:-1] + 1), self.measured.samples)
        for (arm, seed), run in self.runs.items():
            for against in ("",) if arm == BASE else ("", BASE):
                binned, sampled = run.binned, run.sampled
                if against:
                    binned, sampled = binned - self.base.binned, sampled - self.base.sampled
                for number, statistic in enumerate(STATISTICS):
                    yield from self._rows(
                        arm, seed, statistic, against, binned[..., number], shown, (bins.position, bins.low, bins.high)
                    )
                where = (at_samples.high, at_samples.high, at_samples.high)
                for number, statistic in enumerate(SAMPLED):
                    # What has values at every position is in the bins already.
                    columns = every[every >= cached] if statistic in STATISTICS else np.concatenate([shown, every[cached:]])
                    # A matrix of zeros has no rank, and neither has what is no matrix.
                    columns = columns[~np.isnan(run.sampled[..., columns, number]).all(axis=(0, 1))]
                    yield from self._rows(arm, seed, statistic, against, sampled[..., number], columns, where)

    def _shown(self) -> npt.NDArray[np.int64]:
        """Columns that have curves: all, but of very many heads those that drift most in some arm."""
        count = len(self.measured.columns)
        if len(self.of_heads) <= _MANY_HEADS:
            return np.arange(count)
        kept = {number for number, column in enumerate(self.measured.columns) if column.head is None}
        for drift, _ in self._drifts.values():
            order = np.argsort(np.where(np.isnan(drift), np.inf, -np.abs(drift)), kind="stable")
            kept |= set(self.of_heads[order[:_SHOWN_HEADS]].tolist())
        return np.array(sorted(kept), dtype=np.int64)

    def _rows(
        self,
        arm: str,
        seed: int | None,
        statistic: str,
        against: str,
        values: Floats,
        columns: npt.NDArray[np.int64],
        where: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]],
    ) -> Iterator[pl.DataFrame]:
        """values (texts, positions, columns); `where`: position, first and last of each."""
        position, first, last = where
        points = len(position)
        step = max(1, _DRAWN // (len(self.resamples.weights) * points))
        for begin in range(0, len(columns), step):
            some = columns[begin : begin + step]
            # (texts, columns, positions): rows of a column stay together.
            value, drawn = self.resamples.mean(values[:, :, some].swapaxes(1, 2), np.ones(len(values)))
            low, high = self.resamples.interval(value, drawn)
            which = [self.measured.sampled_columns[number] for number in some]
            rows = len(some) * points
            yield pl.DataFrame(
                {
                    **self._whose(arm, seed, rows),
                    "layer": [column.layer for column in which for _ in range(points)],
                    "head": [column.head for column in which for _ in range(points)],
                    "part": [column.part for column in which for _ in range(points)],
                    "statistic": [statistic] * rows,
                    "against": [against] * rows,
                    "position": np.tile(position, len(some)),
                    "position_low": np.tile(first, len(some)),
                    "position_high": np.tile(last, len(some)),
                    "value": value.ravel(),
                    "low": low.ravel(),
                    "high": high.ravel(),
                    "n_documents": [self.resamples.documents] * rows,
                    "n_stretches": [self.resamples.stretches] * rows,
                    "n_tokens": np.tile(self.resamples.stretches * (last - first + 1), len(some)),
                },
                schema=CURVE_SCHEMA,
            )

    def _whose(self, arm: str, seed: int | None, rows: int) -> dict[str, Any]:
        return {
            "model": [self.name] * rows,
            "arm": [arm] * rows,
            "seed": [seed] * rows,
            "train_length": [self.texts.context] * rows,
        }

    # --- in a few numbers --------------------------------------------------------------------------------

    def summary(self) -> Iterator[dict[str, Any]]:
        """A record per arm and seed; null where a number does not exist."""
        bins, near, far = self.texts.bins, self.texts.near, self.texts.far
        reach = near.stop > 0 and far.start < far.stop
        for (arm, seed), run in self.runs.items():
            drift, drawn = self._drifts[arm, seed]
            low, high = self._band(drift, drawn)
            up, down = int((low > 0.0).sum()), int((high < 0.0).sum())
            record: dict[str, Any] = {
                "model": self.name,
                "arm": arm,
                "seed": seed,
                "n_seeds": len([s for a, s in self.runs if a == arm and s is not None]) or 1 if seed is None else 1,
                "n_heads": len(drift),
                "n_known": int(np.isfinite(low).sum()),
                "n_up": up,
                "n_down": down,
                "near_from": int(bins.low[near.stop - 1]) if reach else None,
                "near_to": int(bins.high[near.stop - 1]) if reach else None,
                "far_from": int(bins.low[far.start]) if reach else None,
                "far_to": bins.length if reach else None,
                "broken_at": run.broken_at,
                **self._whole(arm, run),
            }
            yield {name: _number(value) for name, value in record.items()}

    def _whole(self, arm: str, run: Run) -> dict[str, Any]:
        """Of all layers together."""
        if self.whole is None:
            return {}
        index = np.array([self.whole])
        drift, drawn = self._drift(run, index)
        low, high = self.resamples.interval(drift, drawn)
        std, std_drawn = self.resamples.mean(run.binned[:, :, self.whole, _STD], np.ones(len(run.binned)))
        near = self.texts.near.stop
        record: dict[str, Any] = {
            "std_near": std[near - 1] if near else None,
            "std_largest": np.max(std) if np.isfinite(std).all() else None,
            "drift": drift[0],
            "drift_low": low[0],
            "drift_high": high[0],
            "begins": None,
        }
        ends = self._ends(run, index)
        record["std_far"] = None if ends is None else ends[1][0][0]
        if 0 < near < len(std):
            away, away_drawn = _log2(std[near:], std[near - 1]), _log2(std_drawn[:, near:], std_drawn[:, near - 1, None])
            away_low, away_high = self._band(away, away_drawn)
            beyond = np.flatnonzero((away_low > 0.0) | (away_high < 0.0))
            record["begins"] = int(self.texts.bins.low[near + beyond[0]]) if beyond.size else None
        if arm != BASE:
            difference, difference_drawn = self.resamples.mean(
                (run.binned - self.base.binned)[:, :, self.whole, _STD], np.ones(len(run.binned))
            )
            below, above = self._band(difference, difference_drawn)
            record |= {
                "n_bins": len(std),
                "n_above_base": int((below > 0.0).sum()),
                "n_below_base": int((above < 0.0).sum()),
                "n_above_base_within": int((below[:near] > 0.0).sum()),
                "n_above_base_beyond": int((below[near:] > 0.0).sum()),
                "n_bins_within": near,
            }
        return record


def _log2(top: Floats, bottom: Floats) -> Floats:
    """log2(top / bottom), NaN unless both are above zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log2(np.where(top > 0.0, top, np.nan) / np.where(bottom > 0.0, bottom, np.nan))
    return np.asarray(ratio)


def _number(value: Any) -> Any:
    """For JSON: NaN becomes null."""
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def _with_mean(group: list[Run]) -> Iterator[tuple[int | None, Run]]:
    """The mean over seeds under the seed None, then each seed's run."""
    broken = [run.broken_at for run in group if run.broken_at is not None]
    mean = replace(
        group[0],
        seed=None,
        binned=np.mean([run.binned for run in group], axis=0),
        sampled=np.mean([run.sampled for run in group], axis=0),
        broken_at=min(broken, key=lambda at: int(at["position"]), default=None),
    )
    yield None, mean
    for run in group:
        if run.seed is not None:
            yield run.seed, run


def _load(
    evaluations: Sequence[Path], models: list[str], arms: list[str]
) -> tuple[dict[tuple[str, str], list[Run]], dict[str, Measured]]:
    """Read and check the measurements: complete, not twice, on the same texts and, within a model, of the same columns."""
    runs: Gathered[Run] = Gathered(models, arms, of=" of the states")
    measured: dict[str, Measured] = {}
    origin: dict[str, Path] = {}
    first: tuple[Path, Texts] | None = None
    for directory in map(Path, evaluations):
        run, own = _read(directory)
        runs.add(directory, run)
        if first is None:
            first = directory, own.texts
        if own.texts.documents != first[1].documents or own.texts.stretches != first[1].stretches:
            raise FarstateError(
                f"{directory} and {first[0]} read different texts ({_named(own.texts)} and {_named(first[1])}); "
                "measure them with the same parameters on the same store"
            )
        known = measured.setdefault(run.model, own)
        origin.setdefault(run.model, directory)
        if (
            known.texts.context != own.texts.context
            or known.columns != own.columns
            or known.sampled_columns != own.sampled_columns
            or not np.array_equal(known.texts.bins.high, own.texts.bins.high)
            or not np.array_equal(known.samples, own.samples)
        ):
            raise FarstateError(
                f"{directory} and {origin[run.model]} have different positions, training lengths or heads for the same model "
                f"{run.model}; measure them with the same parameters"
            )
    return runs.complete(), measured


_WHICH = ("layer", "head", "part")


def _read(directory: Path) -> tuple[Run, Measured]:
    manifest = read_manifest(directory)
    found = {}
    for name, position, statistics in (("states", "position_high", STATISTICS), ("samples", "position", SAMPLED)):
        table = pl.read_parquet(directory / f"{name}.parquet")
        # The file's own order: by text, by column, by position.
        units = table.select("document", "stretch").unique(maintain_order=True)
        columns = tuple(Column(*row) for row in table.select(_WHICH).unique(maintain_order=True).iter_rows())
        positions = table[position].unique().sort()
        shape = units.height, len(columns), len(positions)
        if table.height != math.prod(shape):
            raise FarstateError(
                f"{directory / f'{name}.parquet'}: {table.height} rows are not {shape[0]} texts × {shape[1]} columns × {shape[2]} positions; "
                "delete the folder and run again"
            )
        values = np.stack([table[s].cast(pl.Float64).fill_null(np.nan).to_numpy() for s in statistics], axis=-1)
        found[name] = (units, columns, positions.to_numpy(), values.reshape(*shape, len(statistics)).swapaxes(1, 2))
    (units, columns, high, binned), (_, sampled_columns, samples, sampled) = found["states"], found["samples"]
    if sampled_columns[: len(columns)] != columns:
        raise FarstateError(f"{directory}: its two tables hold different layers and heads; delete it and run again")
    try:
        bins = Bins(np.append(1, high[:-1] + 1), high)
    except ValueError as error:
        raise FarstateError(f"{directory}: {error}; delete it and run again") from None
    labels = manifest["labels"]
    facts = {name: manifest[name] for name in ("parameters", "parameters_without_embeddings", "architecture", "layers", "heads")}
    texts = Texts(manifest["context"], bins, tuple(units["document"]), tuple(units["stretch"]))
    run = Run(labels["model"], labels["arm"], labels["seed"], binned, sampled, manifest["broken_at"], facts)
    return run, Measured(texts, columns, sampled_columns, samples)


def _named(texts: Texts) -> str:
    return f"{len(texts.documents)} stretches of {len(set(texts.documents))} documents, {texts.bins.length} positions"
