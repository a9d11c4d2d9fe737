"""`summary/`: the numbers of the comparisons' tables, in small files without keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from conftest import REPOSITORY
from farstate.errors import FarstateError
from farstate.files import write_manifest
from farstate.params import merge, read_yaml, validate
from farstate.plan import Plan
from farstate.sources import read_lock
from farstate.summary import OF_AN_ARM, write_summary
from farstate.tasks.compare import SCORE_SCHEMA


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    data = merge(read_yaml(REPOSITORY / "config/test.yaml"), read_yaml(REPOSITORY / "config/test_figures.yaml"))
    return {**data, "figures": {name: data["figures"][name] for name in ("fig4", "fig5", "fig6", "fig7")}}


def plan_of(data: dict[str, Any]) -> Plan:
    return Plan(validate(data, "test"), read_lock(REPOSITORY / "config/sources.lock"))


def result(root: Path, plan: Plan, figure: str, tables: dict[str, pl.DataFrame]) -> None:
    """A finished comparison of `figure` with these tables."""
    directory = root / plan.pages[figure].shown[0].directory
    directory.mkdir(parents=True)
    for name, table in tables.items():
        table.write_parquet(directory / f"{name}.parquet")
    write_manifest(directory, {}, [f"{name}.parquet" for name in tables])


def perplexity(seeds: tuple[int | None, ...] = (None, 0)) -> dict[str, pl.DataFrame]:
    label = {"model": "tiny", "arm": "control"}
    verdicts = [{**label, "seed": seed, **dict.fromkeys(OF_AN_ARM, 0.5), "removed": None, "verdict": "PASS"} for seed in seeds]
    curves = [
        {**label, "seed": seed, "metric": metric, "position": position, "value": position * 1.0, "low": 0.0, "high": 9.0}
        for seed in seeds
        for metric in ("ppl", "excess_nll", "excess_nll_base")
        for position in (1, 2)
    ]
    return {"verdicts": pl.DataFrame(verdicts, schema_overrides={"seed": pl.Int64}), "curves": pl.DataFrame(curves)}


def scores(rows: list[dict[str, Any]]) -> dict[str, pl.DataFrame]:
    label = {"model": "tiny", "arm": "control", "prompting": "fine_tuned", "seed": None, "against": "", "measured": 100.0}
    return {"scores": pl.DataFrame([{**dict.fromkeys(SCORE_SCHEMA), **label, **row} for row in rows], schema=SCORE_SCHEMA)}


BABILONG = [
    {"task": "qa1", "length": 0, "score": "strict", "value": 0.2},
    {"task": "mean", "length": 0, "score": "strict", "value": 0.4},
    {"task": "mean", "length": 192, "score": "strict", "value": 0.6},
    {"task": "mean", "length": 192, "score": "strict", "value": 0.1, "against": "base"},
    {"task": "mean", "length": 192, "score": "strict", "value": 0.7, "seed": 0},
    {"task": "mean", "length": 192, "score": "lenient", "value": 0.9},
]
PASSKEY = [
    {"task": "passkey", "length": 128, "depth": 0.1, "score": "exact", "value": 0.25},
    {"task": "passkey", "length": 128, "depth": 0.9, "score": "exact", "value": 0.75},
    {"task": "passkey", "length": 128, "depth": 0.9, "score": "characters", "value": 1.0},
]


def test_what_is_written(tmp_path: Path, data: dict[str, Any]) -> None:
    plan = plan_of(data)
    result(tmp_path, plan, "fig5", perplexity())
    result(tmp_path, plan, "fig6", scores(BABILONG))
    result(tmp_path, plan, "fig7", scores(PASSKEY))
    stale = tmp_path / "summary/metrics/fig1/tiny.base.json"
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    written = write_summary(plan, tmp_path)
    there = {path.relative_to(tmp_path / "summary").as_posix() for path in (tmp_path / "summary").rglob("*") if path.is_file()}
    assert there == set(written), "nothing of the figure that is gone"
    assert not stale.parent.exists()

    def metrics(name: str) -> Any:
        return json.loads((tmp_path / f"summary/metrics/{name}.json").read_text())

    expected = {**dict.fromkeys(OF_AN_ARM, 0.5), "verdict": "PASS"}
    del expected["removed"]  # the table has none
    assert metrics("fig5/tiny.control") == expected
    assert metrics("fig6/tiny.control.fine_tuned") == {"strict": {"0": 0.4, "192": 0.6}}
    assert metrics("fig7/tiny.control.fine_tuned") == {"exact": {"128": 0.5}}, "the mean over depths"
    curves = pl.read_csv(tmp_path / "summary/curves/fig5.csv")
    assert curves.select("quantity", "position").rows() == [("ppl", 1), ("ppl", 2), ("excess_nll", 1), ("excess_nll", 2)]
    work = metrics("trainings")
    assert work["trainings"] == sum(len(plan.of(rule=rule)) for rule in ("pretrain", "posttrain", "tune"))


def test_a_comparison_that_is_not_there_is_named(tmp_path: Path, data: dict[str, Any]) -> None:
    with pytest.raises(
        FarstateError, match=r"results/evaluate/fig5-[0-9a-f]{8}: not there, fig5 needs it; run `snakemake evaluated`"
    ):
        write_summary(plan_of(data), tmp_path)


def test_without_a_figure_of_losses_or_answers_there_is_still_a_summary(tmp_path: Path, data: dict[str, Any]) -> None:
    """git keeps no empty folder, and DVC records this one."""
    plan = plan_of({**data, "figures": {"fig4": data["figures"]["fig4"]}})
    assert write_summary(plan, tmp_path) == ["metrics/trainings.json"]
