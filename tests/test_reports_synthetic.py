"""SYNTHETIC tables of a comparison, for the tests of the reports: invented curves that resemble docs/demo.md, no measurement.

The tests here hold the invention against the schemas of `farstate.evaluation.compare`, so that the figure is
tested on the columns it will really get.
"""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl

from farstate.reports import curves as stage
from farstate.reports import panels
from farstate.reports.page import OUTPUTS

FAR_EXCESS = {"base": 0.67, "control": 0.73, "random_noise": 0.46, "fitted_noise": 0.47, "state_passing": 0.03, "tbtt": 0.004}
COST = {"base": 0.0, "control": -0.012, "random_noise": 0.11, "fitted_noise": 0.045, "state_passing": 0.008, "tbtt": 0.004}
INTERVAL = "95 % two-level bootstrap over 12 documents and their 48 stretches"
HALF = "95 % two-level bootstrap over 12 documents and their 24 stretches"


def write_tables(
    directory: Path,
    *,
    models: tuple[str, ...] = ("small",),
    train_length: int = 32,
    length: int = 4096,
    seeds: tuple[int, ...] = (0, 1, 2),
    arms: tuple[str, ...] = tuple(FAR_EXCESS),
    level: float = 4.2,
    bins_per_octave: int = 2,
) -> Path:
    """Write curves, references, verdicts and ages of invented arms."""
    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(7)
    curves: list[dict[str, Any]] = []
    references: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    ages: list[dict[str, Any]] = []
    edges = sorted({round(2 ** (step / bins_per_octave)) for step in range(int(math.log2(length)) * bins_per_octave + 1)})
    for number, model in enumerate(models):
        floor = level - 0.15 * number
        far = {arm: FAR_EXCESS[arm] * (1 + 0.1 * number) for arm in arms}
        for arm in arms:
            arm_seeds: tuple[int | None, ...] = (None,) if arm == "base" else (None, *seeds)
            for seed in arm_seeds:
                shift = 0.0 if seed is None else draw.gauss(0, 0.03)
                for low, high in pairwise(edges):
                    t = round(math.sqrt(low * high))
                    window = floor + 2.2 / t**0.7 + COST[arm]
                    rise = 1 / (1 + (6 * train_length / t) ** 1.5) if t > train_length else 0.0
                    excess = (far[arm] + shift) * rise - (0.01 if t > train_length else 0.0)
                    width = 0.02 + 0.03 * rise
                    key = {
                        "model": model,
                        "arm": arm,
                        "seed": seed,
                        "train_length": train_length,
                        "position": t,
                        "n_documents": 12,
                        "n_tokens": 48 * t,
                    }
                    nll = window + excess
                    if t <= train_length:
                        excess, width_of_excess = 0.0, 0.0
                    else:
                        width_of_excess = width
                    curves.append(
                        {
                            **key,
                            "metric": "ppl",
                            "value": math.exp(nll),
                            "low": math.exp(nll - width),
                            "high": math.exp(nll + width),
                        }
                    )
                    for metric, value in (("excess_nll", excess), ("excess_nll_base", excess + COST[arm])):
                        curves.append(
                            {
                                **key,
                                "metric": metric,
                                "value": value,
                                "low": value - width_of_excess,
                                "high": value + width_of_excess,
                            }
                        )
                    drop = 0.04 if t > train_length else 0.0
                    for metric, value in (
                        ("ppl_window", math.exp(window)),
                        ("ppl_reset", math.exp(window + drop)),
                    ):
                        references.append({**key, "metric": metric, "value": value, "low": value * 0.98, "high": value * 1.02})
                    references.append({**key, "metric": "reset_excess", "value": drop, "low": drop - 0.01, "high": drop + 0.01})
                verdicts.append(
                    verdict(
                        model=model,
                        arm=arm,
                        seed=seed,
                        excess=far[arm] + shift,
                        base=far.get("base", 0.67),
                        train_length=train_length,
                        length=length,
                        n_seeds=len(seeds),
                    )
                )
                if seed is not None:
                    ages += _ages(model, arm, seed, train_length)
    pl.DataFrame(curves, schema_overrides={"seed": pl.Int64}).select(panels.CURVE_COLUMNS).write_parquet(
        directory / "curves.parquet"
    )
    pl.DataFrame(references, schema_overrides={"seed": pl.Int64}).select(panels.CURVE_COLUMNS).write_parquet(
        directory / "references.parquet"
    )
    pl.DataFrame(verdicts, infer_schema_length=None).write_parquet(directory / "verdicts.parquet")
    schema = {"model": pl.String, "arm": pl.String, "seed": pl.Int64, "age": pl.Int64, "share": pl.Float64}
    pl.DataFrame(ages, schema=schema).write_parquet(directory / "ages.parquet")
    return directory


def verdict(
    *,
    model: str = "small",
    arm: str = "base",
    seed: int | None = None,
    excess: float = 0.67,
    base: float = 0.67,
    train_length: int = 32,
    length: int = 4096,
    n_seeds: int = 3,
    **changes: Any,
) -> dict[str, Any]:
    """One invented row of `verdicts.parquet`; `changes` replace what the excess implies."""
    is_base, is_control = arm == "base", arm == "control"
    outcome = "FAIL" if excess > 0.05 else "UNDECIDED" if excess > 0.01 else "PASS"
    row: dict[str, Any] = {
        **{
            "model": model,
            "arm": arm,
            "seed": seed,
            "train_length": train_length,
            "verdict": outcome,
            "t_star": 27,
            "p_star": 71.4,
        },
        **{"worst_position": length // 2, **_with("gap", excess, 0.02), "tolerance": 0.02, "confidence": 0.95},
        "control": None if is_base or is_control else "control",
        **{"verdict_interval": HALF, "verdict_split": "stretches", "interval": INTERVAL, "n_documents": 12, "n_stretches": 48},
        **{
            "n_seeds": 1 if is_base or seed is not None else n_seeds,
            "broken_at": None,
            "far_from": min(32 * train_length, length // 2),
            "far_to": length,
        },
        **_with("excess_nll", excess, 0.03),
        **_with("excess_nll_base", excess + COST.get(arm, 0.0), 0.03),
        **_with("ppl_far", 70 * math.exp(excess), 3.0),
        **_with("ppl_ratio", math.exp(excess), 0.03),
        **_with("removed", None if is_base else 1 - excess / base, 0.03),
        **_with("removed_base", None if is_base else 1 - (excess + COST.get(arm, 0.0)) / base, 0.03),
        **_with("removed_vs_control", None if is_base or is_control else 1 - excess / (1.09 * base), 0.03),
        **_with(
            "removed_base_vs_control", None if is_base or is_control else 1 - (excess + COST.get(arm, 0.0)) / (1.07 * base), 0.03
        ),
        **_with("short_context_cost", COST.get(arm, 0.0), 0.0 if is_base else 0.006),
        **_with(
            "short_context_cost_vs_control",
            None if is_base or is_control else COST.get(arm, 0.0) - COST["control"],
            0.006,
        ),
        **_with("beats_reset", excess - 0.04, 0.02),
        **_with("beats_base_reset", excess + COST.get(arm, 0.0) - 0.04, 0.02),
    }
    for name in ("excess_nll", "excess_nll_base", "removed", "removed_base", "short_context_cost"):
        known = row[name] is not None and seed is None and n_seeds >= 3 and not is_base
        row[f"{name}_seeds_low"] = row[name] - 0.05 if known else None
        row[f"{name}_seeds_high"] = row[name] + 0.05 if known else None
    row |= (
        {"steps": None, "tokens": None, "learning_rate": None}
        if is_base
        else {"steps": 100, "tokens": 409_600, "learning_rate": 5e-4}
    )
    row |= changes
    return {
        **{"fails_beyond": {"PASS": False, "FAIL": True}.get(row["verdict"]), "worst_beyond": row["worst_position"]},
        **{f"gap_beyond{end}": row[f"gap{end}"] for end in ("", "_low", "_high")},
        **_power(row["verdict"]),
        **row,
    }


def _power(outcome: str) -> dict[str, Any]:
    known = outcome == "UNDECIDED"
    return {"would_be": "FAIL" if known else None, "documents_to_decide": 147.0 if known else None}


def context(
    models: tuple[str, ...] = ("small",), *, scale: str = "demo", train_length: int = 32, paper: bool = False
) -> dict[str, Any]:
    """What the command line hands to the stage."""
    return {
        "models": {
            name: {
                "label": name if paper else f"Mamba-2 {name} (synthetic)",
                "parameters": 197_888,
                "parameters_without_embeddings": 66_816,
                "training_tokens": None if paper else 2_031_616,
                "context": train_length,
                "architecture": "mamba2",
                "paper_model": name if paper else None,
            }
            for name in models
        },
        "scale": scale,
        "budget": "100 steps of 4,096 tokens an arm, after 2.03 M tokens of pre-training.",
        "parameters": [
            {"name": "posttrain.steps", "value": 100},
            {"name": "posttrain.arms.state_passing.reset_probability", "value": 0.05, "differs": "0.1"},
            {"name": "posttrain.arms.state_passing.reset_unit", "value": "sequence", "assumed": True},
            {"name": "posttrain.recipe.weight_decay", "value": 0.1, "assumed": True},
        ],
        "provenance": {"commit": "0000000 (synthetic)", "farstate": "0.1.0", "torch": "2.13.0", "post-training seeds": [0, 1, 2]},
        "note": "Synthetic tables: invented numbers, no measurement.",
    }


def outputs(directory: Path) -> dict[str, Path]:
    """A path for each of the stage's files."""
    return {name: directory / f"fig5.{name}" for name in OUTPUTS}


def _with(name: str, value: float | None, half: float) -> dict[str, float | None]:
    if value is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: value, f"{name}_low": value - half, f"{name}_high": value + half}


def _ages(model: str, arm: str, seed: int, train_length: int) -> list[dict[str, Any]]:
    key = {"model": model, "arm": arm, "seed": seed}
    if arm == "control":
        return [{**key, "age": 0, "share": 1.0}]
    if arm.endswith("noise"):
        return [{**key, "age": None, "share": 1.0}]
    if arm == "state_passing":
        weights = [0.1 * 0.9**step for step in range(100)]
    else:
        weights = [1.0 if step < 90 else 1.0 - (step - 90) / 10 for step in range(100)]
    total = sum(weights)
    return [{**key, "age": step * train_length, "share": weight / total} for step, weight in enumerate(weights)]


def test_the_invention_has_the_columns_of_compare(tmp_path: Path) -> None:
    from farstate.evaluation.compare import AGE_SCHEMA, CURVE_SCHEMA, VERDICT_SCHEMA

    write_tables(tmp_path)
    for name, schema in (("curves", CURVE_SCHEMA), ("references", CURVE_SCHEMA), ("ages", AGE_SCHEMA)):
        assert dict(pl.read_parquet_schema(tmp_path / f"{name}.parquet")) == schema, name
    assert set(pl.read_parquet_schema(tmp_path / "verdicts.parquet")) == set(VERDICT_SCHEMA)


def test_the_figure_asks_only_for_columns_that_compare_writes() -> None:
    from farstate.evaluation.compare import AGE_SCHEMA, CURVE_SCHEMA, VERDICT_SCHEMA

    assert tuple(CURVE_SCHEMA) == panels.CURVE_COLUMNS
    assert tuple(AGE_SCHEMA) == stage.AGE_COLUMNS
    assert set(panels.VERDICT_COLUMNS) <= set(VERDICT_SCHEMA)
