"""The pages of the long-context tasks, drawn from SYNTHETIC scores: invented numbers, no measurement."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair
import numpy as np
import polars as pl
import pytest

from conftest import REPOSITORY
from farstate.errors import FarstateError
from farstate.files import write_manifest
from farstate.params import Compare, load
from farstate.plan import Plan
from farstate.reference import paper_points
from farstate.reports import babilong, copying, passkey, task_charts, task_text
from farstate.reports.context import Context
from farstate.reports.figures import FIGURES
from farstate.reports.page import MAXIMUM_BYTES, OUTPUTS
from farstate.reports.stage import _context
from farstate.reports.tasks import COLUMNS
from farstate.tasks.compare import SCORE_SCHEMA, compare
from farstate.tasks.measure import ANSWER_SCHEMA
from test_reports_curves import page_data
from test_reports_synthetic import context

SCHEMA = {
    **{"model": pl.String, "arm": pl.String, "prompting": pl.String, "seed": pl.Int64, "task": pl.String, "length": pl.Int64},
    **{"depth": pl.Float64, "score": pl.String, "against": pl.String, "value": pl.Float64, "low": pl.Float64, "high": pl.Float64},
    **{"seeds_low": pl.Float64, "seeds_high": pl.Float64, "n": pl.Int64, "n_seeds": pl.Int64, "chance": pl.Float64},
    **{"train_length": pl.Int64, "measured": pl.Float64},
}
NO_COUNTS = {"uniform": 0.1, "majority": None}
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
        "labels": "3 of 20 labels are split into several tokens, at most 2 (foot + ball)",
        "chance": {task: {"uniform": 0.25, "majority": 0.26} for task in QA} | {"passkey": NO_COUNTS, "copying": NO_COUNTS},
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
QA = ("qa1", "qa2", "qa3")


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


def words(page: str) -> str:
    """What is read: no script, no style, no markup."""
    bare = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]+>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(bare))


def said(figure: str, root: Path, rows: list[dict[str, Any]], about: dict[str, Any] | None = None, **more: Any) -> str:
    output = build(figure, write(root / "tables", rows, **more), root, about or card(figure))
    return words(output["html"].read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    root = tmp_path_factory.mktemp("pages")
    return {
        figure: build(figure, write(root / figure / "tables", rows()), root / figure, card(figure))
        for figure, rows in ROWS.items()
    }


def at_the_papers_scale(root: Path, figures: tuple[str, ...] = tuple(ROWS)) -> dict[str, dict[str, Path]]:
    """With its values beside."""
    lengths = tuple(2048 * 2**power for power in range(8))
    rows = {
        "fig6": babilong_rows(
            fades(2048),
            model="mamba2-780m",
            lengths=(0, 1024, *lengths),
            names=("qa1", "qa2"),
            train_length=2048,
            n=1000,
            seeds=1,
            arms=("base", "state_passing", "tbtt"),
        ),
        "fig7": [
            row
            for model in ("mamba2-370m", "mamba2-780m")
            for row in passkey_rows(fades(2048), model=model, lengths=lengths, train_length=2048)
        ],
        "table1": copying_rows(fades(100), model="mamba2-45m", lengths=(50, 100, 300), train_length=100),
    }
    found = {}
    for figure in figures:
        of_figure = rows[figure]
        names = tuple(dict.fromkeys(row["model"] for row in of_figure))
        about = context(names, scale="paper", train_length=2048, paper=True)
        if figure == "table1":
            about["tasks"] = {"training_lengths": [50, 100], "training": {"packing": "packed", "examples": 1_000_000}}
        found[figure] = build(figure, write(root / figure / "tables", of_figure), root / figure, about)
    return found


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    return at_the_papers_scale(tmp_path_factory.mktemp("paper"))


# --- what the numbers say ----------------------------------------------------------------------------------


def test_the_invention_has_the_columns_of_the_comparison() -> None:
    assert SCORE_SCHEMA == SCHEMA
    assert set(COLUMNS) == set(SCHEMA)


def test_babilong_says_what_was_found(pages: dict[str, dict[str, Path]]) -> None:
    text = words(pages["fig6"]["html"].read_text(encoding="utf-8"))
    assert FIGURES["fig6"].question in text
    few, tuned = re.findall(
        r"Mamba-2 small \(synthetic\), (?:few-shot|fine-tuned on the task): .*?(?= Inside the training)", text
    )[:2]
    assert (
        "the base model answers 0.25 (0.13 to 0.37) of the questions right at 64 tokens (mean of qa1 to qa3, chance 0.25, " in few
    )
    assert "always the most frequent answer 0.26), not above chance for certain" in few
    assert "nothing to lose beyond it" in few
    assert "state passing is above it at none (above the control at none)" in few
    assert "does not appear" not in few + tuned
    assert "Of the 4 lengths beyond the training length, state passing is above it at 3 (above the control at 3)" in tuned
    assert "Above chance for certain at 64 tokens, the base model: qa1 0.98, qa2 0.61" in text
    assert "By the lenient one, at 64 tokens: the base model 0.30" in text
    assert "qa1 0.25 and 0.26; qa2 0.25 and 0.26" in text
    assert "3 of 20 labels are split into several tokens" in text
    assert "fine-tuned, the base model from 0.39 to 0.088, state passing from 0.41 to 0.24" in text, (
        "the paper's finding, from its digitised values"
    )
    assert not re.search(r"repair|help", text.split("Accuracy by length")[0])


def test_babilong_without_a_difference_says_that_it_does_not_appear(tmp_path: Path) -> None:
    def same(arm: str, length: int, depth: float | None) -> float:
        return BEYOND_64("base", length, depth)

    text = said("fig6", tmp_path, babilong_rows(same, names=("qa1", "qa2")))
    assert "mean of qa1 and qa2" not in text
    assert "mean of qa1 to qa2" in text
    assert "state passing is above it at none (above the control at none), TBTT is above it at none" in text
    assert "That other initial states carry facts farther, as in the paper, does not appear here." in text


def test_babilong_of_one_task_without_control_or_means(tmp_path: Path) -> None:
    rows = [row for row in babilong_rows(names=("qa1",), arms=("base", "tbtt")) if row["task"] == "qa1"]
    output = build("fig6", write(tmp_path / "tables", rows), tmp_path, card("fig6"))
    text = words(output["html"].read_text(encoding="utf-8"))
    assert "Without a zero-init control none of it can be credited to the initial state." in text
    assert "By task" not in text
    assert "(qa1, chance 0.25" in text
    titles = [chart["spec"]["description"] for chart in page_data(output["html"].read_text(encoding="utf-8"))["charts"]]
    assert [title.split(", small")[0] for title in titles if title.startswith("Fine-tuned")] == [
        "Fine-tuned, strict scorer",
        "Fine-tuned, strict, minus base",
        "Fine-tuned, lenient scorer",
    ]


def test_passkey_says_what_was_found(pages: dict[str, dict[str, Path]]) -> None:
    text = words(pages["fig7"]["html"].read_text(encoding="utf-8"))
    assert (
        "plain fine-tuning tells 0.97 of the keys inside the training length and 0.001 to 0.79 in the 12 cells beyond it" in text
    )
    assert "fitted noise is above it in all 12 cells there, and state passing is above it in 11 of 12 cells there." in text
    assert (
        "The base model tells 0.001 inside the training length and 0.001 beyond it: above chance for certain in 0 of 18 cells."
        in text
    )
    assert "50 examples a cell; chance of a whole key 0.0011" in text
    assert "Mamba-2 780M: zero-shot nowhere to 4,096, plain fine-tuning 32,768, fitted noise nowhere to 262,144" in text
    assert "it is here to show that" in text, "why there is state passing"


def test_passkey_at_chance_claims_nothing(tmp_path: Path) -> None:
    text = said("fig7", tmp_path, passkey_rows(at_chance))
    assert "not everywhere above chance" in text
    assert "Where the task is not learnt inside the training length, what lies beyond it says nothing." in text
    assert "plain fine-tuning at no length" in text
    assert "fitted noise is above it in none of the 12 cells there" in text


def test_passkey_with_holes_and_values_that_are_none(tmp_path: Path) -> None:
    rows = [row for row in passkey_rows() if (row["arm"], row["length"], row["depth"]) != ("fitted_noise", 256, 0.5)]
    for row in rows:
        if row["arm"] == "control" and row["length"] >= 512:
            row |= dict.fromkeys(("value", "low", "high"))
    broken = [{"model": "small", "arm": "control", "prompting": "fine_tuned", "seed": seed, "examples": 6} for seed in (0, 1)]
    output = build("fig7", write(tmp_path / "tables", rows, broken=broken), tmp_path, card("fig7"))
    page = output["html"].read_text(encoding="utf-8")
    assert (
        "✕ plain fine-tuning, fine-tuned on the task: logits that are not finite in 12 examples, where the answer ends"
        in words(page)
    )
    maps = {chart["id"]: chart["curves"] for chart in page_data(page)["charts"]}
    cells = {name: sum(len(curve["words"]) for curve in curves) for name, curves in maps.items()}
    assert [count for name, count in cells.items() if name.startswith("exact")] == [18, 18, 17, 18]
    crossed = [word for curves in maps.values() for curve in curves for word in curve["words"]].count("✕")
    assert crossed == 2 * 6, "two lengths, three depths, both scores"


def test_copying_says_what_was_found(pages: dict[str, dict[str, Path]], tmp_path: Path) -> None:
    text = words(pages["table1"]["html"].read_text(encoding="utf-8"))
    assert "of strings of 10 letters, trained to 10, plain (zero states) copies 0.97 (0.95 to 0.99) of the letters right" in text
    assert "state passing 0.80 (0.75 to 0.86) there, +0.34 (+0.26 to +0.43) against it: the difference is above zero." in text
    assert "over seeds +0.31 to +0.37" in text
    assert "the paper, plain 300 trained: 50 to 100 0.27 ± 0.03" in text
    assert "the paper, state passing 300 trained: 50 to 100 0.47 ± 0.11" in text
    assert "It does not say what its ± means" in text
    assert "One string per row" in text
    assert "Each seed by itself" in text

    def same(arm: str, length: int, depth: float | None) -> float:
        return BEYOND_10("control", length, depth)

    text = said("table1", tmp_path, copying_rows(same))
    assert "no difference is established" in text
    assert "That passed states let longer strings be copied, as in the paper, does not appear here, at any length." in text


def test_packed_rows_are_explained(paper: dict[str, dict[str, Path]]) -> None:
    assert "every string but a row's first begins in the state that earlier ones left" in words(
        paper["table1"]["html"].read_text(encoding="utf-8")
    )


@pytest.mark.parametrize(
    ("low", "high", "seeds_low", "seeds_high", "expected"),
    [
        (0.01, 0.2, None, None, 1),
        (0.01, 0.2, -0.1, 0.3, 0),
        (0.01, 0.2, 0.02, 0.3, 1),
        (-0.2, -0.01, -0.3, -0.01, -1),
        (-0.2, -0.01, 0.01, 0.3, 0),
        (0.0, 0.2, None, None, 0),
        (None, None, None, None, None),
    ],
)
def test_a_direction_needs_every_interval(
    low: float | None, high: float | None, seeds_low: float | None, seeds_high: float | None, expected: int | None
) -> None:
    ends = {"value_low": low, "value_high": high, "value_seeds_low": seeds_low, "value_seeds_high": seeds_high}
    assert task_text.sign({"value": 0.1, **ends}) == expected


def test_above_chance_means_above_the_most_frequent_answer_too() -> None:
    rows = {("base", "strict", "", 64, None): {"value": 0.3, "low": 0.22, "high": 0.4, "chance": 0.2}}
    arms = {"base": "base"}
    assert task_text.Case("m", arms, 64, rows).above_chance("base", "strict", (64, None))
    assert not task_text.Case("m", arms, 64, rows, frequent=0.25).above_chance("base", "strict", (64, None))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.9712, "0.97"), (0.007, "0.007"), (0.0996, "0.10"), (1.0, "1.00"), (-0.0001, "0.00"), (-0.0123, "−0.012"), (None, "–")],
)
def test_accuracies_as_text(value: float | None, expected: str) -> None:
    assert task_text.accuracy(value) == expected


def test_differences_carry_their_sign() -> None:
    assert (task_text.signed(0.15), task_text.signed(-0.02), task_text.signed(0.0)) == ("+0.15", "−0.020", "0.00")


# --- from a comparison as it is made -----------------------------------------------------------------------


def test_babilong_is_drawn_from_a_real_comparison(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    folders, shown = [], []
    for arm, right in (("base", 0.2), ("state_passing", 0.9)):
        shown.append(("small", arm, "fine_tuned"))
        labels = {"model": "small", "arm": arm, "prompting": "fine_tuned", "seed": 0}
        answers = [
            {
                **labels,
                **{"train_length": 64, "task": task, "length": length, "depth": None, "example": number, "tokens": length},
                **{"label": ("garden", "kitchen")[number % 4 == 0], "generated": "milk", "generated_tokens": 1, "nll": 0.0},
                "finite": True,
                **{"strict": float(hit), "lenient": float(hit)},
            }
            for task in ("qa1", "qa2")
            for length in (64, 512)
            for number, hit in enumerate(generator.random(80) < (0.95 if length == 64 else right))
        ]
        folder = tmp_path / arm
        folder.mkdir()
        pl.DataFrame(answers, schema=ANSWER_SCHEMA).write_parquet(folder / "answers.parquet")
        chance = {key: {"uniform": 1 / 6, "majority": None} for key in ("qa1", "qa2")}
        counts = {"parameters": 197_888, "parameters_without_embeddings": 66_816, "examples": len(answers), "broken": 0}
        write_manifest(
            folder, {"labels": labels, "chance": chance, "spelled": {"milk": ["m", "ilk"]}, **counts}, ["answers.parquet"]
        )
        folders.append(folder)
    out = tmp_path / "comparison"
    compare(
        folders,
        task="babilong",
        figure={"shown": shown, "arms": ["base", "state_passing"]},
        compare=Compare(resamples=100),
        output=out,
    )
    text = words(build("fig6", out, tmp_path, card("fig6"))["html"].read_text(encoding="utf-8"))
    assert "Of the 1 length beyond the training length, state passing is above it at 1." in text
    assert "(mean of qa1 to qa2, chance 0.17, always the most frequent answer 0.75)" in text
    assert "1 of 1 labels are split into several tokens" in text


# --- the paper ---------------------------------------------------------------------------------------------


def test_the_reference_holds_all_three(paper: dict[str, dict[str, Path]]) -> None:
    assert {point.depth for point in paper_points("fig7_passkey", "mamba2-370m")} == {0.1, 0.5, 0.9}
    assert {point.depth for point in paper_points("fig6_babilong_fewshot", "mamba2-780m")} == {None}
    (plain, passing) = paper_points("table1_copy", "mamba2-45m")
    assert (plain.method, plain.value, plain.tolerance) == ("base", 0.27, 0.03)
    assert (passing.method, passing.value, passing.tolerance) == ("SP", 0.47, 0.11)


def test_the_papers_values_stand_beside_ours(paper: dict[str, dict[str, Path]]) -> None:
    charts = page_data(paper["fig6"]["html"].read_text(encoding="utf-8"))["charts"]
    tuned = next(chart for chart in charts if chart["spec"]["description"].startswith("Fine-tuned, strict scorer"))
    (passing,) = [curve for curve in tuned["curves"] if curve["kind"] == "paper" and curve["arm"] == "state_passing"]
    assert dict(zip(passing["length"], passing["value"], strict=True))[262144] == 0.238
    assert passing["low"][-1] == pytest.approx(0.232)
    charts = page_data(paper["fig7"]["html"].read_text(encoding="utf-8"))["charts"]
    theirs = [chart for chart in charts if chart["id"].startswith("paper")]
    assert len(theirs) == 6, "three methods of two models"
    (noise,) = [
        curve
        for chart in theirs
        for curve in chart["curves"]
        if curve["label"] == "the paper, fitted-noise" and 0.12 in curve["value"]
    ]
    assert (noise["length"], noise["depth"])[0][noise["value"].index(0.12)] == 131072
    charts = page_data(paper["table1"]["html"].read_text(encoding="utf-8"))["charts"]
    kinds = [{curve["kind"] for curve in chart["curves"]} for chart in charts]
    assert ["paper" in kind for kind in kinds] == [True, False, False], "the free-running chart alone"


# --- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"score": "fuzzy"}, "holds the score fuzzy, the page knows exact, characters"),
        ({"model": "other"}, "holds other, of which the context says nothing"),
        ({"value": 1.5}, "an accuracy is between 0 and 1"),
        ({"against": "base", "value": -1.5}, "a difference of two between −1 and 1"),
    ],
)
def test_a_table_that_cannot_be_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    rows = passkey_rows(lengths=(64, 128))
    rows[-1] |= change
    with pytest.raises(FarstateError, match=message):
        build("fig7", write(tmp_path / "tables", rows), tmp_path, card("fig7"))


def test_one_comparison_is_shown(tmp_path: Path) -> None:
    tables = write(tmp_path / "tables", passkey_rows(lengths=(64,)))
    output = {name: tmp_path / f"fig7.{name}" for name in OUTPUTS}
    with pytest.raises(FarstateError, match="2 comparisons given, the page shows one"):
        passkey.draw(FIGURES["fig7"], {"task": [tables, tables]}, output, card("fig7"), {})
    with pytest.raises(FarstateError, match="no path given for svg"):
        passkey.draw(FIGURES["fig7"], {"task": [tables]}, {"html": tmp_path / "x"}, card("fig7"), {})


# --- the parameters ----------------------------------------------------------------------------------------


def test_the_page_prints_what_differs_from_the_paper() -> None:
    recipe = {"batch_tokens": 4096, "peak_learning_rate": 3e-3}
    model = {"of": "small", "architecture": "mamba2", "context": 64, "shape": {"width": 64}, "training_tokens": None}
    model |= {"pretrain": None, "posttrain": None, "steps": None}
    report = {
        **{
            "order": ["small.context-22"],
            "models": {"small.context-22": model},
            "paper_models": {"small": "x"},
            "paper_values": True,
            "scale": "demo",
            "note": "",
        },
        **{"figure": {"models": ["small"], "arms": ["control"], "seeds": None}, "series": [], "seeds": [0, 1, 2]},
        "arms": {"passing": {"initial_state": "state_passing", "reset_probability": 0.05, "previous": "batch"}},
    }
    training = {"examples": 64_000, "packing": "packed", "rest_weight": 0.0, "recipe": recipe}
    copied = {
        "alphabet": "ab",
        "training_lengths": [5, 10],
        "lengths": [300],
        "jobs": "cell",
        "examples": 9,
        "training": training,
    }
    about = _context(FIGURES["table1"], report | {"tasks": {"copying": copied}}, {"task": [{"key": "k"}]})
    card = Context.model_validate(about)
    rows = {row.name: row for row in card.parameters}
    assert {name: row.differs for name, row in rows.items() if row.differs} == {
        "arms.passing.reset_probability": "0.1",
        "tasks.copying.training_lengths": "50 to 100",
        "tasks.copying.training.examples": "1000000",
    }
    assert {name for name, row in rows.items() if row.assumed} == {
        *("models.small.context-22", "arms.passing.previous", "tasks.copying.alphabet", "tasks.copying.examples", "optimizer"),
        *("tasks.copying.training.packing", "tasks.copying.training.rest_weight"),
        *("tasks.copying.training.recipe.batch_tokens", "tasks.copying.training.recipe.peak_learning_rate"),
    }
    assert "tasks.copying.jobs" not in rows
    assert card.tasks == copied
    assert card.models["small.context-22"].paper_model == "x", "its name without the length of its rows"
    assert card.budget == "64,000 examples of the task, each read once"
    assert card.provenance["seeds of the training on the task"] == [0, 1, 2]


def test_the_papers_configuration_differs_in_nothing() -> None:
    """Of the tasks: what the plan hands to the pages is read by them, and is the paper's or assumed."""
    pages = Plan(load(REPOSITORY / "config" / "paper.yaml"), {}).pages
    for figure in ROWS:
        report = pages[figure].params
        card = Context.model_validate(_context(FIGURES[figure], report, {"task": [{"key": "k", "models": {}}]}))
        assert {row.name: row.differs for row in card.parameters if row.differs and row.name.startswith("tasks")} == {}
        assert figure == "table1" or all(model.paper_model for model in card.models.values())
        assert card.tasks["training"]["examples"] > 0
        section = report["tasks"][FIGURES[figure].family]
        fewer = {**section, "lengths": section["lengths"][:1], "training": {**section["training"], "examples": 12_800}}
        about = _context(FIGURES[figure], report | {"tasks": {FIGURES[figure].family: fewer}}, {"task": [{"key": "k"}]})
        differs = {
            row["name"]: row["differs"] for row in about["parameters"] if row.get("differs") and row["name"].startswith("tasks")
        }
        assert (
            differs
            == {
                "fig6": {"tasks.babilong.lengths": "0 and 1024 to 262144"},
                "fig7": {
                    "tasks.passkey.lengths": "2048 to 262144",
                    "tasks.passkey.training.examples": "1000 steps, these are 50",
                },
                "table1": {"tasks.copying.lengths": "300", "tasks.copying.training.examples": "1000000"},
            }[figure]
        )


# --- drawing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("figure", sorted(ROWS))
def test_the_specifications_are_valid_and_drawn(
    figure: str, pages: dict[str, dict[str, Path]], paper: dict[str, dict[str, Path]]
) -> None:
    # Validating takes a second: once a kind of chart, with the paper's points.
    altair.LayerChart.from_dict(page_data(paper[figure]["html"].read_text(encoding="utf-8"))["charts"][0]["spec"])
    for output in (pages[figure], paper[figure]):
        page = output["html"].read_text(encoding="utf-8")
        charts = page_data(page)["charts"]
        assert len({chart["id"] for chart in charts}) == len(charts)
        assert all(f'id="{chart["id"]}"' in page for chart in charts)
        assert len(page.encode()) <= MAXIMUM_BYTES
        assert output["png"].stat().st_size > 20_000
        svg = output["svg"].read_text()
        assert "trained" in svg
        assert json.loads(output["json"].read_text())["vconcat"]
        assert pl.read_parquet(output["parquet"]).height > 20
        assert not re.search(r'(?:src|href)="https?://(?!arxiv)', page)


@pytest.mark.parametrize(("length", "expected"), [(0, "0"), (512, "512"), (2048, "2K"), (1500, "1,500"), (262144, "256K")])
def test_lengths_on_an_axis(length: int, expected: str) -> None:
    assert task_charts.short(length) == expected


def test_zero_stands_left_of_the_shortest_length() -> None:
    assert task_charts.place(0, 64) < task_charts.place(64, 64) == 6.0
