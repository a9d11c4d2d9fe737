"""The stage `compare_remembrance`: what the arms of a figure remember, on the same texts, with intervals.

Everything is paired: one set of bootstrap weights over the texts serves every model, arm and seed, so that a difference between
arms has the interval of the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from farstate import params
from farstate.errors import FarstateError
from farstate.evaluation.gathered import Gathered, resamples_of
from farstate.evaluation.remembrance import DISTANCES, SINGLE
from farstate.evaluation.uncertainty import Floats, Resamples, t_interval
from farstate.files import MANIFEST, atomic_path, read_manifest, write_manifest
from farstate.runs import BASE, CONTROL

TABLE_SCHEMA: dict[str, Any] = {
    **{"model": pl.String, "arm": pl.String, "seed": pl.Int64, "train_length": pl.Int64, "T": pl.Int64},
    **{"measure": pl.String, "target": pl.String, "distance": pl.String, "against": pl.String, "start": pl.Int64},
    **dict.fromkeys(("value", "low", "high", "band_low", "band_high", "seeds_low", "seeds_high"), pl.Float64),
    **dict.fromkeys(("n_documents", "n_stretches", "n_tokens", "n_seeds"), pl.Int64),
}
CURVE, FAR, SHARE, REACH = "curve", "far", "far_share", "half_reach"

# A quantity with its resamples: the estimate, shape (…), and the same of every resample, shape (resamples, …).
Drawn = tuple[Floats, Floats]
Units = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Run:
    """One measured checkpoint.

    Attributes:
        context: T_train.
        length: T.
        starts: by target, ascending.
        units: document and stretch of each text.
        values: by target, shape (texts, starts, 4), the last axis as `DISTANCES`.
        broken: what the measurement's manifest says, None where all is finite.
    """

    model: str
    arm: str
    seed: int | None
    context: int
    length: int
    starts: dict[str, tuple[int, ...]]
    units: Units
    values: dict[str, Floats]
    broken: dict[str, Any] | None
    sizes: dict[str, int]


def compare_remembrance(*, evaluations: Sequence[Path], compare: params.Compare, figure: Mapping[str, Any], output: Path) -> None:
    """Join the measurements of a figure and write `remembrance.parquet` (TABLE_SCHEMA) and, last, `manifest.json`.

    A row per model, arm, seed, `measure`, target, distance, `against` and start. `against` is "" for the value itself, the mean
    over all texts; "base" and "control" for the paired difference to that arm (of the same seed where it has it, else to its
    mean over seeds). A null seed is the mean over seeds. `low`, `high` hold for one number, `band_low`, `band_high` for all
    starts of a curve at once; all resample documents. `seeds_low`, `seeds_high`: Student's t over seeds, from three on.
    `n_tokens`: predictions compared behind the number, of one seed. The measures:

    - "curve": effective remembrance by start.
    - "far": that at the last start which leaves at least T_train tokens: what lies farther back than training reached still
      changes so much. By the mean over last positions where it exists at that start, else by the single target.
    - "far_share", of the single target: far as a share of the value when nothing but x_T is left; near 0 where all that counts
      lies within the training length.
    - "half_reach", of the single target: tokens left at the first start where the curve is at half of that last value.

    Where a model's output is not finite the value is null, never a mean over what is left; the manifest's `broken` says where.

    Args:
        evaluations: result folders of the stage `remembrance`.
        compare: confidence, resamples, seed of the bootstrap.
        figure: the `models` and `arms` of the figure.
        output: folder for the result.

    Raises:
        FarstateError: a measurement is missing, unexpected or there twice, or they differ in their texts, T or starts.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    models, arms = list(figure["models"]), list(figure["arms"])
    runs = _load(evaluations, models, arms)
    first = runs[models[0], BASE][0]
    resamples = resamples_of([document for document, _ in first.units], compare)
    tables: list[pl.DataFrame] = []
    for model in models:
        reader = _Model({arm: runs[model, arm] for arm in arms}, resamples, compare.confidence)
        tables += [*reader.curves(), pl.DataFrame(list(reader.summary()), schema=TABLE_SCHEMA)]
    with atomic_path(output / "remembrance.parquet") as path:
        pl.concat(tables).with_columns(pl.col(pl.Float64).fill_nan(None)).write_parquet(path)
    write_manifest(
        output,
        {
            "figure": {"models": models, "arms": arms},
            "models": {model: runs[model, BASE][0].sizes for model in models},
            "compare": compare.model_dump(mode="json"),
            "T": first.length,
            "interval": resamples.label,
            "band": f"{resamples.label}, simultaneous over the start points of a curve",
            "n_documents": resamples.documents,
            "n_stretches": resamples.stretches,
            "evaluations": len(evaluations),
            "broken": [
                {"model": run.model, "arm": run.arm, "seed": run.seed, **run.broken}
                for group in runs.values()
                for run in group
                if run.broken is not None
            ],
        },
        ["remembrance.parquet"],
    )


class _Model:
    """The arms of one model, all on the same resamples."""

    def __init__(self, runs: Mapping[str, Sequence[Run]], resamples: Resamples, confidence: float) -> None:
        self.seeds = {arm: [run.seed for run in group] for arm, group in runs.items()}
        self.values = {
            (arm, seed): values
            for arm, group in runs.items()
            for seed, values in [(None, _mean([run.values for run in group])), *((run.seed, run.values) for run in group)]
        }
        self.first, self.resamples, self.confidence = runs[BASE][0], resamples, confidence

    def curves(self) -> Iterator[pl.DataFrame]:
        for arm, seed in self.values:
            for target, starts in self.first.starts.items():
                for against in self._against(arm):
                    found = self._drawn(arm, seed, target, against)
                    for number, name in enumerate(DISTANCES):
                        value, drawn = found[0][:, number], found[1][:, :, number]
                        low, high = self.resamples.interval(value, drawn)
                        band_low, band_high = self.resamples.band(value, drawn)
                        over = [self._over_seeds(arm, seed, target, against, place, number) for place in range(len(starts))]
                        count = len(starts)
                        columns = {
                            **self._names(arm, seed, count),
                            "measure": [CURVE] * count,
                            "target": [target] * count,
                            "distance": [name] * count,
                            "against": [against] * count,
                            "start": starts,
                            "value": value,
                            "low": low,
                            "high": high,
                            "seeds_low": [each[0] for each in over],
                            "seeds_high": [each[1] for each in over],
                            **self._counts(arm, seed, target, count),
                            "band_low": band_low,
                            "band_high": band_high,
                        }
                        yield pl.DataFrame(columns, schema=TABLE_SCHEMA)

    def summary(self) -> Iterator[dict[str, Any]]:
        single = self.first.starts[SINGLE]
        far = far_start(single, self.first.length, self.first.context)
        for arm, seed in self.values:
            if far is not None:
                target = next((name for name, starts in self.first.starts.items() if name != SINGLE and far in starts), SINGLE)
                place = self.first.starts[target].index(far)
                for against in self._against(arm):
                    estimate, drawn = self._drawn(arm, seed, target, against)
                    for number, name in enumerate(DISTANCES):
                        over = self._over_seeds(arm, seed, target, against, place, number)
                        yield self._row(
                            arm, seed, target, name, FAR, against, far, (estimate[place, number], drawn[:, place, number]), over
                        )
            if single[-1] != self.first.length:
                continue
            estimate, drawn = self._drawn(arm, seed, SINGLE, "")
            for number, name in enumerate(DISTANCES):
                value, resampled = estimate[:, number], drawn[:, :, number]
                if far is not None and far != self.first.length:
                    place = single.index(far)
                    with np.errstate(divide="ignore", invalid="ignore"):
                        share = value[place] / value[-1], resampled[:, place] / resampled[:, -1]
                    yield self._row(arm, seed, SINGLE, name, SHARE, "", far, share, (None, None))
                kept = 1.0 + self.first.length - np.array(single, dtype=np.float64)
                reach = _reach(value[None], kept)[0], _reach(resampled, kept)
                yield self._row(arm, seed, SINGLE, name, REACH, "", None, reach, (None, None))

    def _against(self, arm: str) -> list[str]:
        """The value itself, and the arms it is held against."""
        return ["", *(other for other in (BASE, CONTROL) if other in self.seeds and arm not in (BASE, other))]

    def _drawn(self, arm: str, seed: int | None, target: str, against: str) -> Drawn:
        values = self._values(arm, seed, target, against)
        return self.resamples.mean(values, np.ones(len(values)))

    def _values(self, arm: str, seed: int | None, target: str, against: str) -> Floats:
        values = self.values[arm, seed][target]
        if against:
            # The same seed of the control; of the base, and of a control that lacks it, the mean over seeds.
            other = self.values.get((against, seed)) if against == CONTROL else None
            values = values - (self.values[against, None] if other is None else other)[target]
        return values

    def _over_seeds(
        self, arm: str, seed: int | None, target: str, against: str, place: int, number: int
    ) -> tuple[float | None, float | None]:
        if seed is not None or len(self.seeds[arm]) < 3:
            return None, None
        means = [float(self._values(arm, one, target, against)[:, place, number].mean()) for one in self.seeds[arm]]
        return t_interval(means, self.confidence) or (None, None)

    def _row(
        self,
        arm: str,
        seed: int | None,
        target: str,
        distance: str,
        measure: str,
        against: str,
        start: int | None,
        drawn: tuple[Any, Floats],
        over: tuple[float | None, float | None],
    ) -> dict[str, Any]:
        low, high = self.resamples.interval(*drawn)
        counts = {name: column[0] for name, column in self._counts(arm, seed, target, 1).items()}
        names = {name: column[0] for name, column in self._names(arm, seed, 1).items()}
        return {
            **names,
            **{"target": target, "distance": distance, "measure": measure, "against": against, "start": start},
            **{"value": float(drawn[0]), "low": float(low), "high": float(high), "seeds_low": over[0], "seeds_high": over[1]},
            **counts,
        }

    def _names(self, arm: str, seed: int | None, count: int) -> dict[str, list[Any]]:
        first = self.first
        row = {"model": first.model, "arm": arm, "seed": seed, "train_length": first.context, "T": first.length}
        return {name: [value] * count for name, value in row.items()}

    def _counts(self, arm: str, seed: int | None, target: str, count: int) -> dict[str, list[int]]:
        stretches = self.resamples.stretches
        positions = 1 if target == SINGLE else int(target.rpartition(" ")[2])
        row = {
            "n_documents": self.resamples.documents,
            "n_stretches": stretches,
            "n_tokens": stretches * positions,
            "n_seeds": len(self.seeds[arm]) if seed is None else 1,
        }
        return {name: [value] * count for name, value in row.items()}


def far_start(starts: Sequence[int], length: int, context: int) -> int | None:
    """The last start that leaves at least `context` tokens (but drops one); None where there is none."""
    return max((start for start in starts if 0 < start <= length + 1 - context), default=None)


def _reach(curves: Floats, kept: Floats) -> Floats:
    """Tokens left at the first start where a curve, shape (…, starts), is at half of its last value or above; NaN with it."""
    above = curves >= 0.5 * curves[:, -1:]
    # The last value itself is above its half, so that there always is a first.
    found: Floats = kept[np.argmax(above, axis=1)]
    return np.where(np.isfinite(curves).all(axis=1), found, np.nan)


def _mean(runs: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    return {target: np.mean([run[target] for run in runs], axis=0) for target in runs[0]}


def _load(evaluations: Sequence[Path], models: Sequence[str], arms: Sequence[str]) -> dict[tuple[str, str], list[Run]]:
    """Read and check the measurements: complete, not twice, on the same texts and at the same starts."""
    runs: Gathered[Run] = Gathered(models, arms)
    first: tuple[Path, Run] | None = None
    for directory in map(Path, evaluations):
        run = _read(directory)
        group = runs.add(directory, run)
        first = first or (directory, run)
        for what, mine, theirs in (
            ("texts", run.units, first[1].units),
            ("T", run.length, first[1].length),
            ("start points", run.starts, first[1].starts),
        ):
            if mine != theirs:
                raise FarstateError(
                    f"{directory} and {first[0]} were measured with different {what}; measure them with the same parameters on "
                    "the same store"
                )
        if group[0].context != run.context:
            raise FarstateError(f"{directory}: trained on {run.context} tokens, another seed of it on {group[0].context}")
    return runs.complete()


def _read(directory: Path) -> Run:
    manifest = read_manifest(directory)
    table = pl.read_parquet(directory / "remembrance.parquet").sort("target", "document", "stretch", "start")
    starts: dict[str, tuple[int, ...]] = {}
    values: dict[str, Floats] = {}
    units: Units = ()
    for target in table["target"].unique(maintain_order=True):
        part = table.filter(target=target)
        own: Units = tuple(part.select("document", "stretch").unique(maintain_order=True).iter_rows())
        grid = tuple(part["start"].unique().sort())
        if part.height != len(own) * len(grid) or (units and own != units):
            raise FarstateError(
                f"{directory}: {part.height} rows of target '{target}' are not {len(own)} texts × {len(grid)} starts; delete it and run again"
            )
        units, starts[target] = own, grid
        values[target] = part.select(DISTANCES).to_numpy().reshape(len(own), len(grid), len(DISTANCES))
    if SINGLE not in values:
        raise FarstateError(f"{directory}: holds no distances of the target '{SINGLE}'; delete it and run again")
    labels = manifest["labels"]
    return Run(
        labels["model"],
        labels["arm"],
        labels["seed"],
        manifest["context"],
        manifest["remembrance"]["length"],
        starts,
        units,
        values,
        manifest["broken_at"],
        {name: manifest[name] for name in ("parameters", "parameters_without_embeddings")},
    )
