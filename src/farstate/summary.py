"""The main numbers of every figure as small files that git keeps and DVC shows: `summary/`.

`dvc metrics show|diff` and `dvc plots show|diff` read them. Their names carry no keys, so that two sets of parameters can
be held against each other. Nothing is measured here: the numbers are those of the comparisons' tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from farstate.errors import FarstateError
from farstate.files import atomic_path, read_manifest, write_json
from farstate.plan import KINDS, Plan

SUMMARY = Path("summary")
METRICS, CURVES, WORK = "metrics", "curves", "trainings.json"
OF_AN_ARM = (
    "verdict",
    "excess_nll",
    "excess_nll_low",
    "excess_nll_high",
    "excess_nll_base",
    "removed",
    "short_context_cost",
    "tokens",
)
"""Columns of `verdicts` that a metrics file holds; those that an arm does not have (a base's share removed) are left out."""
CURVE_COLUMNS = ("model", "arm", "quantity", "position", "value", "low", "high")
"""`quantity` is excess_nll (nats a token), ppl, or a score (share of right answers); `position` in tokens read; of a score no interval."""
STRICTER = ("strict", "exact")
"""Of each task's scores the one that forgives nothing."""


def write_summary(plan: Plan, root: Path) -> list[str]:
    """Write `summary/` from the finished comparisons of `plan`, and remove files of figures and arms that it does not have.

    - `metrics/trainings.json`: trainings, measurements and tokens, over all figures, what they share once.
    - `metrics/<figure>/<model>.<arm>.json`: the verdict of an arm, or its share of exact answers by length.
    - `curves/<figure>.csv`: `CURVE_COLUMNS`, means over seeds.

    Returns:
        Names of the files, relative to `summary/`.

    Raises:
        FarstateError: a comparison is not there, or its files are not those of its manifest.
    """
    folder = root / SUMMARY
    written = [f"{METRICS}/{WORK}"]
    write_json(folder / METRICS / WORK, _work(plan))
    for page in plan.pages.values():
        for stage in page.shown:
            if stage.rule not in _READERS:
                continue
            if not (root / stage.manifest).exists():
                raise FarstateError(f"{stage.directory}: not there, {page.name} needs it; run `snakemake evaluated`")
            read_manifest(root / stage.directory)
            metrics, curves = _READERS[stage.rule](root / stage.directory)
            for name, values in metrics.items():
                written.append(f"{METRICS}/{page.name}/{name}.json")
                write_json(folder / written[-1], values)
            written.append(f"{CURVES}/{page.name}.csv")
            with atomic_path(folder / written[-1]) as temporary:
                curves.select(CURVE_COLUMNS).write_csv(temporary)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in written:
            path.unlink()
    for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(path.iterdir()):
            path.rmdir()
    return written


def _work(plan: Plan) -> dict[str, int]:
    """Trainings and measurements, and the tokens that pre- and post-trainings read in whole batches."""
    tokens = 0
    for stage in plan.of(rule="pretrain"):
        batch = stage.params["recipe"]["batch_tokens"]
        tokens += stage.params["tokens"] // batch * batch
    for stage in plan.of(rule="posttrain"):
        tokens += stage.params["steps"] * stage.params["recipe"]["batch_tokens"]
    return {
        "trainings": sum(len(plan.of(rule=rule)) for rule in ("pretrain", "posttrain", "tune")),
        "measurements": sum(len(plan.of(rule=rule)) for rule in KINDS["measurements"]),
        "tokens": tokens,
    }


def _perplexity(directory: Path) -> tuple[dict[str, dict[str, Any]], pl.DataFrame]:
    verdicts = pl.read_parquet(directory / "verdicts.parquet").filter(pl.col("seed").is_null())
    metrics = {
        f"{row['model']}.{row['arm']}": {name: row[name] for name in OF_AN_ARM if row[name] is not None}
        for row in verdicts.iter_rows(named=True)
    }
    curves = pl.read_parquet(directory / "curves.parquet")
    shown = curves.filter(pl.col("seed").is_null() & pl.col("metric").is_in(["excess_nll", "ppl"]))
    return metrics, shown.rename({"metric": "quantity"})


def _task(directory: Path) -> tuple[dict[str, dict[str, Any]], pl.DataFrame]:
    """By length, the share of right answers by the stricter score: of BABILong the mean over tasks, else over depths, whose cells
    have equally many examples."""
    scores = pl.read_parquet(directory / "scores.parquet")
    right = scores.filter(pl.col("seed").is_null() & pl.col("score").is_in(STRICTER) & (pl.col("against") == ""))
    over_tasks = right.filter(pl.col("task") == "mean")
    named = (right if over_tasks.is_empty() else over_tasks).with_columns(arm=pl.concat_str("arm", "prompting", separator="."))
    means = named.group_by("model", "arm", "score", "length", maintain_order=True).agg(
        pl.col("value").mean(), position=pl.col("measured").mean()
    )
    metrics: dict[str, dict[str, Any]] = {}
    for row in means.iter_rows(named=True):
        metrics.setdefault(f"{row['model']}.{row['arm']}", {}).setdefault(row["score"], {})[str(row["length"])] = row["value"]
    absent = pl.lit(None, dtype=pl.Float64)
    return metrics, means.rename({"score": "quantity"}).with_columns(low=absent, high=absent)


_READERS = {"compare": _perplexity, "compare_task": _task}


def describe(written: list[str]) -> Iterator[str]:
    """What was written, one line a folder."""
    for kind in (METRICS, CURVES):
        yield f"{SUMMARY}/{kind}: {sum(name.startswith(f'{kind}/') for name in written)} file(s)"
