"""The pages of the long-context tasks, drawn from SYNTHETIC scores: invented numbers, no measurement."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from farstate.files import write_manifest
from farstate.reports import babilong, copying, passkey
from farstate.reports.figures import FIGURES
from farstate.reports.page import OUTPUTS
from test_reports_synthetic import context

SCHEMA = {
    **{"model": pl.String, "arm": pl.String, "prompting": pl.String, "seed": pl.Int64, "task": pl.String, "length": pl.Int64},
    **{"depth": pl.Float64, "score": pl.String, "against": pl.String, "value": pl.Float64, "low": pl.Float64, "high": pl.Float64},
    **{"seeds_low": pl.Float64, "seeds_high": pl.Float64, "n": pl.Int64, "n_seeds": pl.Int64, "chance": pl.Float64},
    **{"train_length": pl.Int64, "measured": pl.Float64},
}
DRAWS = {"fig6": babilong.draw, "fig7": passkey.draw, "table1": copying.draw}
Accuracy = Callable[[str, int, float | None], float]
"""Of an arm, a length and a depth."""


def rows_of(
    accuracy: Accuracy,
    *,
    model: str = "small",
    arms: tuple[str, ...],
    prompting: str | Callable[[str], str],
    tasks: tuple[str, ...],
    lengths: tuple[int, ...],
    depths: tuple[float | None, ...] = (None,),
    scores: dict[str, tuple[float, float]],
    train_length: int,
    against: tuple[str, ...] = ("base", "control"),
    seeds: int = 1,
    n: int = 50,
) -> list[dict[str, Any]]:
    """Rows of a comparison; `scores`: by score, its chance and the power that its values are raised to."""
    rows = []
    for arm in arms:
        way = prompting if isinstance(prompting, str) else prompting(arm)
        for task in tasks:
            for length in lengths:
                for depth in depths:
                    for score, (chance, power) in scores.items():

                        def value(
                            arm: str,
                            task: str = task,
                            length: int = length,
                            depth: float | None = depth,
                            chance: float = chance,
                            power: float = power,
                        ) -> float:
                            scale = 1.0 if task in ("mean", "passkey", "copying", "qa1") else 0.5
                            return chance + (1 - chance) * scale * accuracy(arm, length, depth) ** power

                        half = 1.96 * math.sqrt(value(arm) * (1 - value(arm)) / n)
                        key = {"model": model, "arm": arm, "prompting": way, "task": task, "length": length, "depth": depth}
                        common = {"score": score, "n": n, "train_length": train_length, "measured": float(length or 40)}
                        for seed in (None, *(range(seeds) if seeds > 1 else ())):
                            own = min(1.0, max(0.0, value(arm) + (0.0 if seed is None else 0.02 * (seed - 1))))
                            rows.append(
                                {
                                    **key,
                                    **common,
                                    **{
                                        "seed": seed,
                                        "against": "",
                                        "value": own,
                                        "low": max(0.0, own - half),
                                        "high": min(1.0, own + half),
                                    },
                                    **_seeds(own, seeds, seed),
                                    "chance": chance,
                                }
                            )
                        for other in against:
                            if other in arms and other != arm:
                                change = value(arm) - value(other)
                                both = 1.5 * half + 0.002
                                rows.append(
                                    {
                                        **key,
                                        **common,
                                        **{
                                            "seed": None,
                                            "against": other,
                                            "value": change,
                                            "low": change - both,
                                            "high": change + both,
                                        },
                                        **_seeds(change, seeds, None),
                                        "chance": None,
                                    }
                                )
    return rows


def _seeds(value: float, seeds: int, seed: int | None) -> dict[str, Any]:
    known = seeds > 2 and seed is None
    return {
        "seeds_low": value - 0.03 if known else None,
        "seeds_high": value + 0.03 if known else None,
        "n_seeds": seeds if seed is None else 1,
    }


def write(directory: Path, rows: list[dict[str, Any]], **more: Any) -> Path:
    directory.mkdir(parents=True)
    pl.DataFrame(rows, schema=SCHEMA).write_parquet(directory / "scores.parquet")
    contents = {
        "interval": "95 % Wilson intervals over examples",
        "difference_interval": "95 % bootstrap over the same examples",
        **{"confidence": 0.95, "compare": {}, "models": {}, "broken": []},
        "labels": "qa1 has 6 labels, all of one to three tokens.",
    }
    write_manifest(directory, contents | more, ["scores.parquet"])
    return directory


def build(figure: str, tables: Path, root: Path, about: dict[str, Any] | None = None) -> dict[str, Path]:
    output = {name: root / f"{figure}.{name}" for name in OUTPUTS}
    DRAWS[figure](FIGURES[figure], {"task": [tables]}, output, about or context(), {"figure": figure})
    return output


def fades(train_length: int) -> Accuracy:
    """Right inside the training length; beyond it the base fades fast, the control no slower, others slowly."""
    reach = {"base": 2, "control": 2, "fitted_noise": 16, "state_passing": 8, "tbtt": 6}

    def accuracy(arm: str, length: int, depth: float | None) -> float:
        if length <= train_length:
            return 0.97
        return 0.97 * math.exp(-(length / train_length - 1) * (1.3 - (depth or 0.5)) / reach[arm])

    return accuracy


def at_chance(arm: str, length: int, depth: float | None) -> float:
    return 0.0


BEYOND_64, BEYOND_10 = fades(64), fades(10)
LENGTHS = (0, 32, 64, 128, 256, 512, 1024)
QA = tuple(f"qa{number}" for number in range(1, 11))


def babilong_rows(
    accuracy: Accuracy = BEYOND_64, *, lengths: tuple[int, ...] = LENGTHS, names: tuple[str, ...] = QA, **more: Any
) -> list[dict[str, Any]]:
    common: dict[str, Any] = {
        **{"lengths": lengths, "tasks": ("mean", *names), "scores": {"strict": (0.25, 1.0), "lenient": (0.3, 0.8)}},
        **{"train_length": 64, "arms": ("base", "control", "state_passing", "tbtt"), "seeds": 2},
    }
    common |= more
    return rows_of(at_chance, prompting="few_shot", **common) + rows_of(accuracy, prompting="fine_tuned", **common)


def passkey_rows(accuracy: Accuracy = BEYOND_64, **more: Any) -> list[dict[str, Any]]:
    common: dict[str, Any] = {
        **{"arms": ("base", "control", "fitted_noise", "state_passing"), "tasks": ("passkey",), "lengths": LENGTHS[1:]},
        **{"depths": (0.1, 0.5, 0.9), "scores": {"exact": (0.0011, 1.0), "characters": (0.1, 0.5)}, "train_length": 64},
    }
    common |= more

    def some(arm: str, length: int, depth: float | None) -> float:
        return 0.0 if arm == "base" else accuracy(arm, length, depth)

    return rows_of(some, prompting=lambda arm: "zero_shot" if arm == "base" else "fine_tuned", **common)


def copying_rows(accuracy: Accuracy = BEYOND_10, **more: Any) -> list[dict[str, Any]]:
    common: dict[str, Any] = {
        **{
            "arms": ("control", "state_passing"),
            "tasks": ("copying",),
            "lengths": (5, 10, 15, 20, 30),
            "train_length": 10,
            "seeds": 3,
        },
        **{"scores": {"characters": (0.0385, 1.0), "characters_forced": (0.0385, 0.6), "exact": (0.0, 5.0)}, "n": 200},
    }
    return rows_of(accuracy, prompting="trained", **(common | more))


ROWS = {"fig6": babilong_rows, "fig7": passkey_rows, "table1": copying_rows}
COPYING = {"training_lengths": [5, 10], "training": {"packing": "one_per_row", "examples": 64_000}}


def card(figure: str, **more: Any) -> dict[str, Any]:
    given = context(train_length=64, **more)
    given["tasks"] = COPYING if figure == "table1" else {}
    given["budget"] = "20,000 examples of the task, each read once"
    return given
