"""The stage `compare_task`: the scores of a figure's models on the same examples, with intervals.

A score that is 0 or 1 is a proportion: Wilson's interval, which keeps its width where all answers are right or none is. The interval of a
difference is put together from those of both arms and the correlation of their answers to the same examples (Newcombe 1998, paired,
method 10), that of a mean over tasks from those of the tasks, which are independent (MOVER; Zou & Donner 2008). A score that is
a share has a bootstrap over examples, paired for a difference, or Wilson's where all examples agree. With several seeds an example's score is
its mean over them: the intervals say nothing about other trainings; from three seeds on there is a t interval beside them that does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import polars as pl

from farstate import params
from farstate.errors import FarstateError
from farstate.evaluation.uncertainty import Floats, Resamples, resample, t_interval
from farstate.files import MANIFEST, atomic_path, read_manifest, write_manifest
from farstate.runs import BASE, CONTROL
from farstate.task_plan import ANSWERS, SCORES
from farstate.tasks.labels import TASKS, chance
from farstate.tasks.scores import BY_TASK, WHOLE

SCORE_SCHEMA: dict[str, Any] = {
    **{"model": pl.String, "arm": pl.String, "prompting": pl.String, "seed": pl.Int64, "task": pl.String},
    **{"length": pl.Int64, "depth": pl.Float64, "score": pl.String, "against": pl.String},
    **dict.fromkeys(("value", "low", "high", "seeds_low", "seeds_high"), pl.Float64),
    **{"n": pl.Int64, "n_seeds": pl.Int64, "chance": pl.Float64, "train_length": pl.Int64, "measured": pl.Float64},
}
"""One row a cell and score. seed: null for the mean over seeds; task: `mean` over BABILong's tasks; against: empty, or the arm from
which the difference is taken; n: examples; chance: of a guess among the answers; measured: mean tokens of a prompt."""
MEAN = "mean"
Subject = tuple[str, str, str]
Cell = tuple[str, int, float | None]


@dataclass(frozen=True)
class _Estimate:
    """A value in [0, 1] (a difference: [−1, 1]) with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class _Scored:
    """One score of one subject in one cell: `examples` (n,), means over its seeds; `seeds`: by seed the values (n,)."""

    examples: Floats
    seeds: dict[int | None, Floats]
    measured: float
    train_length: int


def compare(evaluations: Sequence[Path], *, task: str, figure: Mapping[str, Any], compare: params.Compare, output: Path) -> None:
    """Write `scores.parquet` (see SCORE_SCHEMA) and, last, `manifest.json`.

    Args:
        evaluations: folders of `measure`.
        task: babilong, passkey or copying.
        figure: `shown`, triples of model, arm and prompting in the order of the figure; `arms`.

    Raises:
        FarstateError: an evaluation is missing, there twice, or of other examples than the rest.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    shown = [(str(model), str(arm), str(prompting)) for model, arm, prompting in figure["shown"]]
    manifests = [read_manifest(directory) for directory in evaluations]
    answers = _read(evaluations, shown)
    chances = _chances(answers, shown[0], manifests)
    guesses = {name: float(level["uniform"]) for name, level in chances.items() if level["uniform"] is not None}
    rows: list[dict[str, Any]] = []
    kinds: set[str] = set()
    for score in BY_TASK[task]:
        scored = _scored(answers, score)
        rows += _rows(scored, score, shown, guesses, compare, kinds)
    table = pl.DataFrame(rows, schema=SCORE_SCHEMA)
    with atomic_path(output / SCORES) as temporary:
        table.write_parquet(temporary, compression="zstd")
    level = f"{100 * compare.confidence:g} %"
    shares = f"; of shares {' and '.join(sorted(kinds))}" if kinds else ""
    write_manifest(
        output,
        {
            "task": task,
            "interval": f"{level} Wilson interval over examples{shares}",
            "difference_interval": f"{level}, from the Wilson intervals of both and the correlation of their answers (Newcombe, paired)"
            + ("; of shares a paired bootstrap over examples" if kinds else ""),
            "confidence": compare.confidence,
            "compare": compare.model_dump(mode="json", include={"confidence", "resamples", "seed"}),
            "models": {
                manifest["labels"]["model"]: {name: manifest[name] for name in ("parameters", "parameters_without_embeddings")}
                for manifest in manifests
            },
            "chance": chances,
            "labels": _spelled(manifests),
            "broken": [{**manifest["labels"], "examples": manifest["broken"]} for manifest in manifests if manifest["broken"]],
        },
        [SCORES],
    )


def _read(evaluations: Sequence[Path], shown: Sequence[Subject]) -> pl.DataFrame:
    """All answers, each once, of the same examples for every subject."""
    tables = []
    for directory in evaluations:
        try:
            tables.append(pl.read_parquet(directory / ANSWERS))
        except pl.exceptions.PolarsError as error:
            raise FarstateError(
                f"{directory / ANSWERS}: damaged ({str(error).splitlines()[0]}); delete it and run again"
            ) from None
    answers = pl.concat(tables) if tables else pl.DataFrame()
    subject = ["model", "arm", "prompting"]
    found = set(answers.select(subject).unique().iter_rows()) if tables else set()
    if missing := [one for one in shown if one not in found]:
        raise FarstateError(f"no answers of {' / '.join(missing[0])}, which the figure shows")
    if strange := sorted(found - set(shown)):
        raise FarstateError(f"answers of {' / '.join(strange[0])}, which the figure does not show")
    once = [*subject, "seed", "task", "length", "depth", "example"]
    if answers.select(once).is_duplicated().any():
        twice = answers.filter(answers.select(once).is_duplicated()).row(0, named=True)
        raise FarstateError(f"answers of {' / '.join(str(twice[name]) for name in once)} are there twice")
    counts = answers.group_by([*subject, "seed", "task", "length", "depth"]).len()
    for cell, several in counts.group_by(["task", "length", "depth"]):
        if several["len"].n_unique() > 1 or several.height != counts.select([*subject, "seed"]).unique().height:
            raise FarstateError(
                f"task {cell[0]}, length {cell[1]}, depth {cell[2]}: the models did not answer the same examples; delete "
                "results/evaluate/task.* and run again"
            )
    return answers


def _chances(
    answers: pl.DataFrame, subject: Subject, manifests: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, float | None]]:
    """By task, how often a guess is right: uniform over the answers, and always the most frequent one of all that were asked."""
    found = {name: level for manifest in manifests for name, level in manifest["chance"].items()}
    model, arm, prompting = subject
    asked = answers.filter(model=model, arm=arm, prompting=prompting).unique(["task", "length", "depth", "example"])
    for (task,), several in asked.group_by("task"):
        if str(task) in TASKS:
            level = chance(str(task), dict(several.group_by("label").len().iter_rows()))
            found[str(task)] = {"uniform": level.uniform, "majority": level.majority}
    return found


def _scored(answers: pl.DataFrame, score: str) -> dict[tuple[Subject, Cell], _Scored]:
    found = {}
    keys = ["model", "arm", "prompting", "task", "length", "depth"]
    for key, table in answers.group_by(keys, maintain_order=True):
        seeds: dict[int | None, Floats] = {}
        for (seed,), own in table.group_by("seed", maintain_order=True):
            seeds[seed] = own.sort("example")[score].to_numpy().astype(np.float64)
        model, arm, prompting, task, length, depth = key
        found[(str(model), str(arm), str(prompting)), (str(task), int(length), depth)] = _Scored(
            np.mean(list(seeds.values()), axis=0),
            seeds,
            float(np.mean(table["tokens"].to_numpy())),
            int(table["train_length"][0]),
        )
    return found


def _rows(
    scored: Mapping[tuple[Subject, Cell], _Scored],
    score: str,
    shown: Sequence[Subject],
    guesses: Mapping[str, float],
    compare: params.Compare,
    kinds: set[str],
) -> Iterator[dict[str, Any]]:
    whole = score in WHOLE
    # The chance in the data is that of a whole key, and that of a single letter of a string.
    guessed = (score == "characters") != ("passkey" in guesses) if score in ("exact", "characters") else True
    estimates: dict[tuple[Subject, Cell], _Estimate] = {}
    differences: dict[tuple[Subject, Subject, Cell], _Estimate] = {}
    drawn: dict[int, Resamples] = {}

    def resamples(count: int) -> Resamples:
        if count not in drawn:
            generator = np.random.default_rng(compare.seed)
            drawn[count] = resample(
                [str(number) for number in range(count)],
                resamples=compare.resamples,
                confidence=compare.confidence,
                generator=generator,
            )
            kinds.add("a bootstrap over examples")
        return drawn[count]

    def estimate(values: Floats) -> _Estimate:
        value = float(values.mean())
        if whole or np.ptp(values) == 0.0:
            return wilson(value, values.size, compare.confidence)
        draws = resamples(values.size)
        centre, redrawn = draws.mean(values, np.ones(values.size))
        low, high = draws.interval(centre, redrawn)
        return _Estimate(value, max(0.0, float(low)), min(1.0, float(high)))

    for (subject, cell), one in scored.items():
        common = _common(subject, cell, score, guesses.get(cell[0]) if guessed else None, one)
        estimates[subject, cell] = estimate(one.examples)
        by_seed = [float(values.mean()) for values in one.seeds.values()]
        yield {**common, "seed": None, "against": "", **_shown(estimates[subject, cell]), **_over_seeds(by_seed, compare)}
        if len(one.seeds) > 1:
            for seed, values in one.seeds.items():
                yield {**common, "seed": seed, "n_seeds": 1, "against": "", **_shown(estimate(values))}
        for against in _against(subject, shown):
            other, theirs = scored[against, cell], estimates.get((against, cell)) or estimate(scored[against, cell].examples)
            difference = paired_difference(estimates[subject, cell], theirs, correlation(one.examples, other.examples))
            apart = one.examples - other.examples
            if not whole and np.ptp(apart) > 0.0:
                draws = resamples(apart.size)
                centre, redrawn = draws.mean(apart, np.ones(apart.size))
                low, high = draws.interval(centre, redrawn)
                difference = _Estimate(float(centre), max(-1.0, float(low)), min(1.0, float(high)))
            differences[subject, against, cell] = difference
            paired = [float(mine.mean() - other.seeds.get(seed, other.examples).mean()) for seed, mine in one.seeds.items()]
            yield {
                **common, "seed": None, "against": against[1], "chance": None, **_shown(difference), **_over_seeds(paired, compare, -1.0)
            }  # fmt: skip
    yield from _means(scored, estimates, differences, score, shown, guesses, compare)


def _means(
    scored: Mapping[tuple[Subject, Cell], _Scored],
    estimates: Mapping[tuple[Subject, Cell], _Estimate],
    differences: Mapping[tuple[Subject, Subject, Cell], _Estimate],
    score: str,
    shown: Sequence[Subject],
    guesses: Mapping[str, float],
    compare: params.Compare,
) -> Iterator[dict[str, Any]]:
    """Means over the tasks at each length, where there are several tasks."""
    tasks = sorted({cell[0] for _, cell in scored})
    if len(tasks) < 2:
        return
    lengths = sorted({cell[1] for _, cell in scored})
    for subject in shown:
        for length in lengths:
            parts = [scored[subject, (task, length, None)] for task in tasks]
            merged = _Scored(
                np.concatenate([part.examples for part in parts]),
                {seed: np.concatenate([part.seeds[seed] for part in parts]) for seed in parts[0].seeds},
                float(np.mean([part.measured for part in parts])),
                parts[0].train_length,
            )
            level = float(np.mean([guesses[task] for task in tasks])) if all(task in guesses for task in tasks) else None
            common = _common(subject, (MEAN, length, None), score, level, merged)
            by_seed = {seed: float(np.mean([part.seeds[seed].mean() for part in parts])) for seed in parts[0].seeds}
            mean = mover_mean([estimates[subject, (task, length, None)] for task in tasks])
            yield {**common, "seed": None, "against": "", **_shown(mean), **_over_seeds(list(by_seed.values()), compare)}
            if len(by_seed) > 1:
                for seed in by_seed:
                    own = mover_mean(
                        [wilson(float(part.seeds[seed].mean()), part.seeds[seed].size, compare.confidence) for part in parts]
                    )
                    yield {**common, "seed": seed, "n_seeds": 1, "against": "", **_shown(own)}
            for against in _against(subject, shown):
                difference = mover_mean([differences[subject, against, (task, length, None)] for task in tasks])
                others = [scored[against, (task, length, None)] for task in tasks]
                paired = [
                    value - float(np.mean([other.seeds.get(seed, other.examples).mean() for other in others]))
                    for seed, value in by_seed.items()
                ]
                yield {
                    **common, "seed": None, "against": against[1], "chance": None, **_shown(difference), **_over_seeds(paired, compare, -1.0)
                }  # fmt: skip


def _common(subject: Subject, cell: Cell, score: str, chance: float | None, one: _Scored) -> dict[str, Any]:
    model, arm, prompting = subject
    task, length, depth = cell
    return {
        **{"model": model, "arm": arm, "prompting": prompting, "task": task, "length": length, "depth": depth, "score": score},
        **{"n": one.examples.size, "n_seeds": len(one.seeds), "chance": chance, "train_length": one.train_length},
        "measured": one.measured,
    }


def _against(subject: Subject, shown: Sequence[Subject]) -> list[Subject]:
    """The base and the control of the same model: asked in the same way, or, where there is one way only for each, in theirs."""
    model, arm, prompting = subject
    found = []
    for name in (BASE, CONTROL):
        others = [one for one in shown if one[:2] == (model, name)]
        same = [one for one in others if one[2] == prompting] or (others if len(others) == 1 else [])
        if name != arm and not (name == CONTROL and arm == BASE):
            found += same
    return found


def _shown(estimate: _Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _over_seeds(values: Sequence[float], compare: params.Compare, lowest: float = 0.0) -> dict[str, float | None]:
    """The t interval over seeds, cut at what is possible: `lowest` … 1."""
    ends = t_interval(values, compare.confidence)
    if ends is None:
        return {"seeds_low": None, "seeds_high": None}
    return {"seeds_low": max(lowest, ends[0]), "seeds_high": min(1.0, ends[1])}


def wilson(value: float, count: int, confidence: float) -> _Estimate:
    """Wilson's score interval of a proportion of `count` trials; for a mean of values in [0, 1] it is too wide, never too narrow.

    A value in [0, 1] varies at most as much as a trial of the same mean.
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
    shrunk = 1.0 + z * z / count
    centre = (value + z * z / (2.0 * count)) / shrunk
    half = z / shrunk * math.sqrt(value * (1.0 - value) / count + z * z / (4.0 * count * count))
    return _Estimate(value, min(value, max(0.0, centre - half)), max(value, min(1.0, centre + half)))


def correlation(first: Floats, second: Floats) -> float:
    """Of two arms' answers to the same examples, (n,) each; a positive one is lowered for small n as Newcombe's φ is. 0 without spread."""
    spread = float(first.std() * second.std())
    if spread == 0.0:
        return 0.0
    together = float(((first - first.mean()) * (second - second.mean())).mean())
    if together > 0.0:
        together = max(0.0, together - 0.5 / first.size)
    return together / spread


def paired_difference(first: _Estimate, second: _Estimate, correlation: float) -> _Estimate:
    """first − second, of answers to the same examples (Newcombe 1998, Statistics in Medicine 17, 2635, method 10)."""
    value = first.value - second.value

    def half(mine: float, theirs: float) -> float:
        return math.sqrt(max(0.0, mine**2 - 2.0 * correlation * mine * theirs + theirs**2))

    return _Estimate(
        value,
        value - half(first.value - first.low, second.high - second.value),
        value + half(first.high - first.value, second.value - second.low),
    )


def mover_mean(parts: Sequence[_Estimate]) -> _Estimate:
    """The mean of independent estimates (Zou & Donner 2008)."""
    value = sum(part.value for part in parts) / len(parts)
    return _Estimate(
        value,
        value - math.sqrt(sum((part.value - part.low) ** 2 for part in parts)) / len(parts),
        value + math.sqrt(sum((part.high - part.value) ** 2 for part in parts)) / len(parts),
    )


def _spelled(manifests: Sequence[Mapping[str, Any]]) -> str:
    """How the tokenizer writes the labels, in words."""
    pieces: dict[str, list[str]] = {}
    for manifest in manifests:
        pieces |= {label: several for label, several in manifest["spelled"].items() if "," not in label}
    if not pieces:
        return ""
    longest = max(pieces, key=lambda label: len(pieces[label]))
    if len(pieces[longest]) == 1:
        return "every label is one token"
    split = sum(len(several) > 1 for several in pieces.values())
    return f"{split} of {len(pieces)} labels are split into several tokens, at most {len(pieces[longest])} ({' + '.join(pieces[longest]).strip()})"
