"""The stage `compare`: all evaluations of a figure on the same texts, joined, with intervals, verdicts and costs.

Everything is paired: one set of bootstrap weights over the texts serves every model, arm and seed, so that a
difference between arms has the interval of the difference, not of two independent curves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from farstate import params
from farstate.errors import FarstateError
from farstate.evaluation.bins import Bins
from farstate.evaluation.gathered import Gathered, resamples_of
from farstate.evaluation.uncertainty import Floats, Resamples, t_interval
from farstate.evaluation.verdict import judge, octaves
from farstate.files import MANIFEST, atomic_path, read_manifest, write_json, write_manifest
from farstate.runs import BASE, CONTROL

FAR = 32
"""Far positions are those from FAR · T_train on."""

CURVE_SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "arm": pl.String,
    "seed": pl.Int64,
    "train_length": pl.Int64,
    "metric": pl.String,
    "position": pl.Int64,
    "value": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "n_documents": pl.Int64,
    "n_tokens": pl.Int64,
}
_ESTIMATES = (
    "excess_nll",
    "excess_nll_base",
    "ppl_far",
    "ppl_ratio",
    "removed",
    "removed_base",
    "removed_vs_control",
    "removed_base_vs_control",
    "short_context_cost",
    "short_context_cost_vs_control",
    "beats_reset",
    "beats_base_reset",
)
_OVER_SEEDS = ("excess_nll", "excess_nll_base", "removed", "removed_base", "short_context_cost")
VERDICT_SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "arm": pl.String,
    "seed": pl.Int64,
    "train_length": pl.Int64,
    "verdict": pl.String,
    "t_star": pl.Int64,
    "p_star": pl.Float64,
    "worst_position": pl.Int64,
    "gap": pl.Float64,
    "gap_low": pl.Float64,
    "gap_high": pl.Float64,
    "fails_beyond": pl.Boolean,
    "worst_beyond": pl.Int64,
    "gap_beyond": pl.Float64,
    "gap_beyond_low": pl.Float64,
    "gap_beyond_high": pl.Float64,
    "would_be": pl.String,
    "documents_to_decide": pl.Float64,
    "control": pl.String,
    "tolerance": pl.Float64,
    "confidence": pl.Float64,
    "verdict_interval": pl.String,
    "verdict_split": pl.String,
    "interval": pl.String,
    "n_documents": pl.Int64,
    "n_stretches": pl.Int64,
    "n_seeds": pl.Int64,
    "broken_at": pl.Int64,
    "far_from": pl.Int64,
    "far_to": pl.Int64,
    **{name + end: pl.Float64 for name in _ESTIMATES for end in ("", "_low", "_high")},
    **{f"{name}_seeds_{end}": pl.Float64 for name in _OVER_SEEDS for end in ("low", "high")},
    "steps": pl.Int64,
    "tokens": pl.Int64,
    "learning_rate": pl.Float64,
}
AGE_SCHEMA: dict[str, Any] = {"model": pl.String, "arm": pl.String, "seed": pl.Int64, "age": pl.Int64, "share": pl.Float64}
DIFFERENCE_SCHEMA: dict[str, Any] = {
    "model": pl.String,
    "arm": pl.String,
    "seed": pl.Int64,
    "against_model": pl.String,
    "against_arm": pl.String,
    "quantity": pl.String,
    "value": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "seeds_low": pl.Float64,
    "seeds_high": pl.Float64,
    "n_seeds": pl.Int64,
    "n_documents": pl.Int64,
}


@dataclass(frozen=True)
class Run:
    """One evaluated checkpoint: nats summed per text and bin, shape (texts, bins), by kind of context."""

    model: str
    arm: str
    seed: int | None
    carried: Floats
    window: Floats
    reset: Floats
    broken_at: int | None
    sizes: dict[str, int]


@dataclass(frozen=True)
class Texts:
    """What the evaluations of one model share."""

    context: int
    bins: Bins
    documents: tuple[str, ...]
    stretches: tuple[int, ...]

    @cached_property
    def far(self) -> slice:
        """Bins at positions ≥ FAR · T_train; where the evaluation is shorter, its last octave; never within T_train.

        Empty when the evaluation ends at T_train.
        """
        low, length = self.bins.low, self.bins.length
        start = int(np.searchsorted(low, FAR * self.context))
        if start == len(self.bins):
            start = min(int(np.searchsorted(low, length / 2)), len(self.bins) - 1)
        return slice(max(start, self.near.stop), len(self.bins))

    @cached_property
    def near(self) -> slice:
        """Bins within the training context."""
        return slice(0, int(np.searchsorted(self.bins.high, self.context, side="right")))


@dataclass(frozen=True)
class Training:
    """Budget of a post-training, read from its `metrics.jsonl`; `ages` from its `ages.parquet`."""

    steps: int
    tokens: int
    learning_rate: float
    ages: pl.DataFrame


def compare(
    *,
    evaluations: Sequence[Path],
    trainings: Sequence[Mapping[str, Any]],
    compare: params.Compare,
    figure: Mapping[str, Any],
    output: Path,
) -> None:
    """Join the evaluations of a figure and write its tables, the manifest last.

    - `curves.parquet` (CURVE_SCHEMA), `metric` one of `ppl`, `excess_nll` (carried − the same model's windows) and
      `excess_nll_base` (carried − the base model's windows), in a row per model, arm, seed and bin; a null seed is
      the mean over seeds (of the NLL), with the interval over documents. `n_tokens`: of one seed, predicted tokens behind
      the point, the bin's positions times the texts.
    - `references.parquet`, same columns: `ppl_window`, `ppl_reset`, `reset_excess` (reset − windows of the same model).
    - `verdicts.parquet` (VERDICT_SCHEMA), a row per model, arm and seed, null: all seeds together. Negative is better in
      `beats_reset` (far loss of the carried state − that of the same model with its state reset every T_train tokens) and in
      `beats_base_reset` (− that of the *base* model reset so, which needs no post-training and so is what an arm must beat).
      `short_context_cost` is the loss within T_train − the base's, `short_context_cost_vs_control` − the control's.
      `documents_to_decide` and `would_be`, of UNDECIDED, are the power note of `farstate.evaluation.verdict.to_decide`.
      A perplexity too large for a float64 is infinite, a number that does not exist is null.
    - `differences.parquet` (DIFFERENCE_SCHEMA), a row per pair of `figure["pairs"]`, seed and quantity: the first − the second,
      paired by texts and by seeds (those that both have; null: their mean), in nats, of `excess_nll` and `nll` far out and
      of the `short_context_nll`. `low`, `high`: over documents; `seeds_low`, `seeds_high`: Student's t over three seeds and more.
    - `ages.parquet` (AGE_SCHEMA): share of training sequences by the age in tokens of their initial state; null: noise.
    - `metrics.json`: model → arm → a few numbers of the null-seed row.

    Args:
        evaluations: result folders of the stage `evaluate`.
        trainings: of every post-training, `model`, `arm`, `seed` and its `directory`.
        compare: tolerance, confidence, resamples, seed of the bootstrap.
        figure: the `models` and `arms` of the figure; where one asks for them, `controls` (by arm, the arm that is its control,
            null for none; `control` for an arm that is not named), `absent` (each `model`, `arm` that is not shown) and `pairs` (`model`, `arm`, `against_model`, `against_arm`).
        output: folder for the result.

    Raises:
        FarstateError: an evaluation is missing, unexpected or there twice, or evaluations differ in their texts or bins.
    """
    runs, texts = begun(evaluations, figure, output)
    budgets = {(t["model"], t["arm"], t["seed"]): _training(Path(t["directory"])) for t in trainings}

    curves: list[pl.DataFrame] = []
    references: list[pl.DataFrame] = []
    verdicts: list[dict[str, Any]] = []
    shared = next(iter(texts.values()))
    resamples = resamples_of(shared.documents, compare)
    readers: dict[str, _Model] = {}
    for model in figure["models"]:
        of_model = {arm: runs[model, arm] for arm in figure["arms"] if (model, arm) in runs}
        reader = _Model(model, texts[model], of_model, resamples, compare, budgets, figure.get("controls", {}))
        readers[model] = reader
        curves += reader.curves()
        references += reader.references()
        verdicts += reader.verdicts()

    tables = {
        "curves": pl.concat(curves),
        "references": pl.concat(references),
        "verdicts": pl.DataFrame(verdicts, schema=VERDICT_SCHEMA),
        "differences": pl.DataFrame(
            [row for pair in figure.get("pairs", ()) for row in _differences(readers, pair)], schema=DIFFERENCE_SCHEMA
        ),
        "ages": _ages(budgets, figure),
    }
    for name, table in tables.items():
        with atomic_path(output / f"{name}.parquet") as path:
            table.write_parquet(path)
    write_json(output / "metrics.json", _metrics(verdicts))
    write_manifest(
        output,
        {
            "figure": {"models": list(figure["models"]), "arms": list(figure["arms"])},
            "models": {model: runs[model, BASE][0].sizes for model in figure["models"]},
            "compare": compare.model_dump(mode="json"),
            "interval": resamples.label,
            "n_documents": resamples.documents,
            "n_stretches": resamples.stretches,
            "evaluations": len(evaluations),
        },
        [*(f"{name}.parquet" for name in tables), "metrics.json"],
    )


# A quantity with its resamples: the estimate, shape (…), and the same of every resample, shape (resamples, …).
Drawn = tuple[Floats, Floats]


class _Model:
    """The arms of one model, with everything computed on the same resamples."""

    def __init__(
        self,
        name: str,
        texts: Texts,
        runs: dict[str, list[Run]],
        resamples: Resamples,
        settings: params.Compare,
        budgets: Mapping[tuple[str, str, int], Training],
        controls: Mapping[str, str | None],
    ) -> None:
        self.controls = controls
        self.name, self.texts, self.resamples, self.settings, self.budgets = name, texts, resamples, settings, budgets
        self.runs = {(arm, seed): run for arm, group in runs.items() for seed, run in with_mean(group)}
        self.seeds = {arm: [run.seed for run in group] for arm, group in runs.items()}
        self.base = self.runs[BASE, None]

    def curves(self) -> Iterator[pl.DataFrame]:
        for key, run in self.runs.items():
            yield self._curve(key, "ppl", run.carried, perplexity=True)
            yield self._curve(key, "excess_nll", run.carried - run.window)
            yield self._curve(key, "excess_nll_base", run.carried - self.base.window)

    def references(self) -> Iterator[pl.DataFrame]:
        for key, run in self.runs.items():
            yield self._curve(key, "ppl_window", run.window, perplexity=True)
            yield self._curve(key, "ppl_reset", run.reset, perplexity=True)
            yield self._curve(key, "reset_excess", run.reset - run.window)

    def _curve(self, key: tuple[str, int | None], metric: str, sums: Floats, *, perplexity: bool = False) -> pl.DataFrame:
        value, drawn = self.resamples.mean(sums / self.texts.bins.tokens, np.ones(len(sums)))
        low, high = self.resamples.interval(value, drawn)
        if perplexity:
            # The interval is made for the mean NLL and carried over: exp is monotone.
            value, low, high = _exp(value), _exp(low), _exp(high)
        count = len(self.texts.bins)
        return pl.DataFrame(
            {
                "model": [self.name] * count,
                "arm": [key[0]] * count,
                "seed": [key[1]] * count,
                "train_length": [self.texts.context] * count,
                "metric": [metric] * count,
                "position": self.texts.bins.position,
                "value": value,
                "low": low,
                "high": high,
                "n_documents": [self.resamples.documents] * count,
                "n_tokens": self.texts.bins.tokens * len(sums),
            },
            schema=CURVE_SCHEMA,
        )

    def verdicts(self) -> Iterator[dict[str, Any]]:
        for (arm, seed), run in self.runs.items():
            verdict = judge(
                run.carried,
                self.texts.bins,
                self.texts.context,
                self.texts.documents,
                self.texts.stretches,
                tolerance=self.settings.tolerance,
                confidence=self.settings.confidence,
                resamples=self.settings.resamples,
                # The same draws for every model and arm: verdicts are paired as the curves are.
                generator=np.random.default_rng(self.settings.seed),
                broken_at=run.broken_at,
            )
            far = self.texts.bins.low[self.texts.far]
            row: dict[str, Any] = {
                "model": self.name,
                "arm": arm,
                "seed": seed,
                "train_length": self.texts.context,
                "verdict": verdict.outcome,
                "t_star": verdict.t_star,
                "p_star": verdict.p_star,
                "worst_position": verdict.worst_position,
                "gap": verdict.gap,
                "gap_low": verdict.gap_low,
                "gap_high": verdict.gap_high,
                "fails_beyond": verdict.fails_beyond,
                "worst_beyond": verdict.worst_beyond,
                "gap_beyond": verdict.gap_beyond,
                "gap_beyond_low": verdict.gap_beyond_low,
                "gap_beyond_high": verdict.gap_beyond_high,
                "would_be": verdict.would_be,
                "documents_to_decide": verdict.documents_to_decide,
                "control": self._control_of(arm),
                "tolerance": self.settings.tolerance,
                "confidence": self.settings.confidence,
                "verdict_interval": verdict.interval,
                "verdict_split": verdict.split,
                "interval": self.resamples.label,
                "n_documents": self.resamples.documents,
                "n_stretches": self.resamples.stretches,
                "n_seeds": len(self.seeds[arm]) if seed is None else 1,
                "broken_at": run.broken_at,
                "far_from": int(far[0]) if far.size else None,
                "far_to": self.texts.bins.length if far.size else None,
                **self._budget(arm, seed),
            }
            for name, drawn in self._estimates(arm, seed, verdict.t_star).items():
                row |= dict(zip((name, f"{name}_low", f"{name}_high"), self._numbers(name, drawn), strict=True))
            if seed is None:
                row |= self._over_seeds(arm)
            yield {name: _null(row.get(name)) for name in VERDICT_SCHEMA}

    def _estimates(self, arm: str, seed: int | None, t_star: int | None) -> dict[str, Drawn | None]:
        """The numbers of a verdict's row. None: not defined for it (no far positions, no control, nothing to remove)."""
        run, far, near = self.runs[arm, seed], self.texts.far, self.texts.near
        found: dict[str, Drawn | None] = dict.fromkeys(_ESTIMATES)
        if near.stop:
            found["short_context_cost"] = self.mean_over(run.carried - self.base.carried, near)
            if (control := self._control_of(arm)) is not None:
                found["short_context_cost_vs_control"] = self.mean_over(run.carried - self._control(control, seed).carried, near)
        if far.start == far.stop:
            return found
        found["excess_nll"] = self.mean_over(run.carried - run.window, far)
        found["excess_nll_base"] = self.mean_over(run.carried - self.base.window, far)
        found["beats_reset"] = self.mean_over(run.carried - run.reset, far)
        found["beats_base_reset"] = self.mean_over(run.carried - self.base.reset, far)
        level = self.mean_over(run.carried, far)
        found["ppl_far"] = level
        if t_star is not None:
            octave = octaves(self.texts.bins, self.texts.context)
            star = octave[np.searchsorted(self.texts.bins.high, t_star)]
            lowest = self.mean_over(run.carried, slice(*np.searchsorted(octave, (star, star + 1)).tolist()))
            found["ppl_ratio"] = level[0] - lowest[0], level[1] - lowest[1]
        for name, other in (("", None if arm == BASE else BASE), ("_vs_control", self._control_of(arm))):
            if other is None:
                continue
            reference = self.base if other == BASE else self._control(other, seed)
            found[f"removed{name}"] = self._removed(
                found["excess_nll"], self.mean_over(reference.carried - reference.window, far)
            )
            found[f"removed_base{name}"] = self._removed(
                found["excess_nll_base"], self.mean_over(reference.carried - self.base.window, far)
            )
        return found

    def _control_of(self, arm: str) -> str | None:
        """The arm that is this one's control; None for the base, for controls, and where the figure has none."""
        control = self.controls.get(arm, CONTROL)
        is_control = arm == CONTROL or arm in self.controls.values()
        return control if arm != BASE and not is_control and (control, None) in self.runs else None

    def _control(self, control: str, seed: int | None) -> Run:
        """What a seed is held against: the same seed of the control; the mean, and a seed it lacks, against its mean."""
        return self.runs.get((control, seed), self.runs[control, None])

    def mean_over(self, sums: Floats, bins: slice) -> Drawn:
        """Mean over all (text, position) pairs of some bins, each token with the same weight."""
        tokens = float(self.texts.bins.tokens[bins].sum())
        return self.resamples.mean(sums[:, bins].sum(axis=1) / tokens, np.ones(len(sums)))

    def _removed(self, arm: Drawn | None, reference: Drawn) -> Drawn | None:
        """The fraction 1 − arm / reference; None unless the interval of the reference's excess lies above zero.

        A share of something that may be nothing has no meaning and no interval. The rare resample in which the excess
        is not above zero has no share.
        """
        low, _ = self.resamples.interval(*reference)
        floor = float(reference[0] if math.isnan(low) else low)
        if arm is None or not floor > 0.0:
            return None
        shared = reference[1] > 0.0
        return np.asarray(1.0 - arm[0] / reference[0]), 1.0 - arm[1][shared] / reference[1][shared]

    def _numbers(self, name: str, drawn: Drawn | None) -> tuple[float, float, float] | tuple[None, None, None]:
        if drawn is None:
            return None, None, None
        low, high = self.resamples.interval(*drawn)
        numbers = float(drawn[0]), float(low), float(high)
        if name in ("ppl_far", "ppl_ratio"):  # means and differences of NLL until here
            return tuple(_exp(np.array(numbers)).tolist())
        return numbers

    def _over_seeds(self, arm: str) -> dict[str, float]:
        """Student's t intervals over seeds, where there are at least three."""
        row: dict[str, float] = {}
        if len(self.seeds[arm]) < 3:
            return row
        of_seed = [self._estimates(arm, seed, None) for seed in self.seeds[arm]]
        for name in _OVER_SEEDS:
            values = [estimates[name] for estimates in of_seed]
            if any(value is None for value in values):
                continue
            interval = t_interval([float(value[0]) for value in values if value is not None], self.settings.confidence)
            if interval is not None:
                row[f"{name}_seeds_low"], row[f"{name}_seeds_high"] = interval
        return row

    def _budget(self, arm: str, seed: int | None) -> dict[str, float]:
        """Steps, tokens and peak learning rate, where they are the same for all the seeds that a row stands for."""
        seeds = self.seeds[arm] if seed is None else [seed]
        known = [self.budgets[self.name, arm, s] for s in seeds if s is not None and (self.name, arm, s) in self.budgets]
        budgets = {(training.steps, training.tokens, training.learning_rate) for training in known}
        if len(known) != len(seeds) or len(budgets) != 1:
            return {}
        return dict(zip(("steps", "tokens", "learning_rate"), budgets.pop(), strict=True))


def _differences(readers: Mapping[str, _Model], pair: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The rows of one pair: of every seed that both have, and of their mean."""
    first, second = readers[pair["model"]], readers[pair["against_model"]]
    seeds = [seed for seed in first.seeds[pair["arm"]] if seed in second.seeds[pair["against_arm"]]]

    def quantities(seed: int | None) -> dict[str, Drawn]:
        several = [seed] if seed is not None else seeds
        found: dict[str, Drawn] = {}
        for reader, arm, sign in ((first, pair["arm"], 1.0), (second, pair["against_arm"], -1.0)):
            chosen = [reader.runs[arm, each] for each in several]
            carried, window = (np.mean([getattr(run, kind) for run in chosen], axis=0) for kind in ("carried", "window"))
            texts = reader.texts
            given = {"short_context_nll": (carried, texts.near)} if texts.near.stop else {}
            if texts.far.start < texts.far.stop:
                given |= {"excess_nll": (carried - window, texts.far), "nll": (carried, texts.far)}
            for name, (sums, bins) in given.items():
                value, drawn = reader.mean_over(sums, bins)
                old = found.get(name, (np.zeros_like(value), np.zeros_like(drawn)))
                found[name] = old[0] + sign * value, old[1] + sign * drawn
        return found

    by_seed = {seed: quantities(seed) for seed in seeds}
    for seed in (None, *seeds) if seeds else ():
        for name, drawn in (quantities(None) if seed is None else by_seed[seed]).items():
            low, high = first.resamples.interval(*drawn)
            over = None
            if seed is None:
                over = t_interval([float(by_seed[each][name][0]) for each in seeds], first.settings.confidence)
            row = {
                **pair,
                "seed": seed,
                "quantity": name,
                "value": float(drawn[0]),
                "low": float(low),
                "high": float(high),
                "seeds_low": over[0] if over else None,
                "seeds_high": over[1] if over else None,
                "n_seeds": len(seeds) if seed is None else 1,
                "n_documents": first.resamples.documents,
            }
            yield {key: _null(value) for key, value in row.items()}


def with_mean(group: list[Run]) -> Iterator[tuple[int | None, Run]]:
    """The mean over seeds (of the NLL) under the seed None, then each seed's run."""
    first = group[0]
    breaks = [run.broken_at for run in group if run.broken_at is not None]
    mean = Run(
        first.model,
        first.arm,
        None,
        np.mean([run.carried for run in group], axis=0),
        np.mean([run.window for run in group], axis=0),
        np.mean([run.reset for run in group], axis=0),
        min(breaks, default=None),
        first.sizes,
    )
    yield None, mean
    for run in group:
        if run.seed is not None:
            yield run.seed, run


def begun(
    evaluations: Sequence[Path], figure: Mapping[str, Any], output: Path
) -> tuple[dict[tuple[str, str], list[Run]], dict[str, Texts]]:
    """Make `output` an unfinished result, and read the evaluations: complete, not twice, on the same texts and, within a model, in the same bins."""
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    absent = {(pair["model"], pair["arm"]) for pair in figure.get("absent", ())}
    models, arms = list(figure["models"]), list(figure["arms"])
    runs: Gathered[Run] = Gathered(models, arms, noun="evaluation", verb="evaluates", absent=absent)
    texts: dict[str, Texts] = {}
    origin: dict[str, Path] = {}
    first: tuple[Path, Texts] | None = None
    for directory in evaluations:
        run, own = _read(Path(directory))
        runs.add(Path(directory), run)
        if first is None:
            first = Path(directory), own
        if own.documents != first[1].documents or own.stretches != first[1].stretches:
            raise FarstateError(
                f"{directory} and {first[0]} were evaluated on different texts ({_named(own)} and {_named(first[1])}); "
                "evaluate them with the same parameters on the same store"
            )
        known = texts.setdefault(run.model, own)
        origin.setdefault(run.model, Path(directory))
        if known.context != own.context or not np.array_equal(known.bins.high, own.bins.high):
            raise FarstateError(
                f"{directory} and {origin[run.model]} have different bins or training lengths for the same model {run.model}; "
                "evaluate them with the same parameters"
            )
    return runs.complete(), texts


def _read(directory: Path) -> tuple[Run, Texts]:
    manifest = read_manifest(directory)
    table = pl.read_parquet(directory / "perplexity.parquet").sort("document", "stretch", "position_low")
    bins = table.select("position_low", "position_high").unique().sort("position_low")
    units = table.select("document", "stretch").unique(maintain_order=True)
    shape = units.height, bins.height
    if table.height != shape[0] * shape[1]:
        raise FarstateError(
            f"{directory}: {table.height} rows are not {shape[0]} texts × {shape[1]} bins; delete it and run again"
        )
    try:
        found = Bins(bins["position_low"].to_numpy(), bins["position_high"].to_numpy())
    except ValueError as error:
        raise FarstateError(f"{directory}: {error}; delete it and run again") from None
    labels = manifest["labels"]
    broken = manifest["broken_at"]["carried"]
    run = Run(
        labels["model"],
        labels["arm"],
        labels["seed"],
        table["nll_carried"].to_numpy().reshape(shape),
        table["nll_window"].to_numpy().reshape(shape),
        table["nll_reset"].to_numpy().reshape(shape),
        None if broken is None else broken["position"],
        {name: manifest[name] for name in ("parameters", "parameters_without_embeddings")},
    )
    return run, Texts(manifest["context"], found, tuple(units["document"]), tuple(units["stretch"]))


def _named(texts: Texts) -> str:
    return f"{len(texts.documents)} stretches of {len(set(texts.documents))} documents, {texts.bins.length} positions"


def _training(directory: Path) -> Training:
    path = directory / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        training = Training(
            steps=max(int(line["step"]) for line in lines),
            tokens=max(int(line["tokens"]) for line in lines),
            learning_rate=max(float(line["learning_rate"]) for line in lines),
            ages=pl.read_parquet(directory / "ages.parquet"),
        )
    except FileNotFoundError as error:
        raise FarstateError(f"{error.filename or directory}: no such file; run the rule that makes it") from None
    except (ValueError, KeyError) as error:
        raise FarstateError(f"{path}: damaged ({error}); delete {directory} and run again") from None
    return training


def _ages(budgets: Mapping[tuple[str, str, int], Training], figure: Mapping[str, Any]) -> pl.DataFrame:
    parts = [pl.DataFrame(schema=AGE_SCHEMA)]
    for (model, arm, seed), training in budgets.items():
        if model not in figure["models"] or arm not in figure["arms"]:
            continue
        counted = training.ages.group_by("age").agg(pl.col("sequences").sum()).sort("age", nulls_last=True)
        parts.append(
            counted.select(
                pl.lit(model).alias("model"),
                pl.lit(arm).alias("arm"),
                pl.lit(seed, dtype=pl.Int64).alias("seed"),
                pl.col("age").cast(pl.Int64),
                (pl.col("sequences") / pl.col("sequences").sum()).alias("share"),
            )
        )
    return pl.concat(parts)


def _metrics(verdicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Model → arm → the numbers of the row over all seeds; what is not defined is left out, as DVC wants numbers."""
    names = (
        "verdict",
        "gap",
        "excess_nll",
        "excess_nll_base",
        "removed",
        "removed_vs_control",
        "short_context_cost",
        "short_context_cost_vs_control",
        "beats_reset",
        "beats_base_reset",
        "fails_beyond",
        "gap_beyond",
    )
    flat: dict[str, Any] = {}
    for row in verdicts:
        if row["seed"] is None:
            flat.setdefault(row["model"], {})[row["arm"]] = {name: row[name] for name in names if row[name] is not None}
    return flat


def _exp(values: Floats) -> Floats:
    """exp, infinite where it is too large for a float64."""
    with np.errstate(over="ignore"):
        return np.exp(values)


def _null(value: Any) -> Any:
    """NaN becomes null in the table of verdicts: a number that does not exist."""
    return None if isinstance(value, float) and math.isnan(value) else value
