"""What is remembered, drawn: a page of all distances and a section of pages of perplexity, from invented measurements."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair
import polars as pl
import pytest

from farstate.errors import FarstateError
from farstate.evaluation.compare_remembrance import compare_remembrance
from farstate.evaluation.remembrance import DISTANCES, default_starts
from farstate.files import read_manifest, write_manifest
from farstate.params import Compare
from farstate.reports import curves, remembrance, remembrance_charts, remembrance_text
from farstate.reports.context import Context
from farstate.reports.figures import FIGURES
from farstate.reports.page import MAXIMUM_BYTES, OUTPUTS
from farstate.reports.remembrance_text import Arm
from farstate.reports.theme import arm_styles
from test_reports_curves import page_data
from test_reports_synthetic import context, write_tables

Curve = Callable[[float], float]
"""Total variation by the share of T that is dropped, in [0, 1]."""


def smooth(height: float) -> Curve:
    return lambda dropped: height * dropped**2


def flat(length: int, context: int, height: float) -> Curve:
    """Next to nothing until `context` tokens are left, then steep."""
    return lambda dropped: 0.01 * dropped + (height if (1 - dropped) * length < 0.7 * context else 0.0)


def measurement(root: Path, model: str, arm: str, seed: int, curve: Curve, length: int, train_length: int, **more: Any) -> Path:
    """A folder as the stage writes it: 24 documents that differ by a few per cent."""
    last = 8
    rows = []
    broken = more.get("broken")
    for target, count in (("T", 1), (f"last {last}", last)):
        for document in range(24):
            for start in default_starts(length, 2):
                if start > length + 1 - count:
                    continue
                tv = curve(start / length) * (1 + 0.1 * math.sin(3.1 * document)) * (1.02 if target == "T" else 1.0)
                if broken is not None and document == 3 and start > length / 2:
                    tv = math.nan
                rows.append(
                    {
                        **{
                            "model": model,
                            "arm": arm,
                            "seed": seed,
                            "train_length": train_length,
                            "document": f"{document:064x}",
                        },
                        **{"stretch": 0, "T": length, "start": start, "target": target},
                        **dict(zip(DISTANCES, (tv, tv**2, tv, tv**2 / 2), strict=True)),
                    }
                )
    folder = root / f"{model}.{arm}.{seed}"
    folder.mkdir(parents=True)
    pl.DataFrame(rows).write_parquet(folder / "remembrance.parquet")
    contents = {
        **{"labels": {"model": model, "arm": arm, "seed": seed}, "context": train_length, "remembrance": {"length": length}},
        **{"broken_at": broken, "parameters": 197_888, "parameters_without_embeddings": 66_816},
    }
    write_manifest(folder, contents, ["remembrance.parquet"])
    return folder


def comparison(root: Path, model: str = "small", length: int = 1024, train_length: int = 32, **arms: Curve) -> Path:
    arms = arms or {"base": smooth(0.6), "control": smooth(0.61), "state_passing": smooth(0.3)}
    folders = [
        measurement(root, model, arm, seed, curve, length, train_length)
        for arm, curve in arms.items()
        for seed in ((0,) if arm == "base" else (0, 1))
    ]
    return join(root, folders, [model], list(arms))


def join(root: Path, folders: list[Path], models: list[str], arms: list[str]) -> Path:
    out = root / "comparison"
    compare_remembrance(evaluations=folders, compare=Compare(resamples=200), figure={"models": models, "arms": arms}, output=out)
    return out


def build(tables: Path, root: Path, about: dict[str, Any] | None = None) -> dict[str, Path]:
    output = {name: root / f"fig13.{name}" for name in OUTPUTS}
    remembrance.draw(
        FIGURES["fig13"],
        inputs={"remembrance": [tables]},
        output=output,
        context=about or context(),
        keys={"remembrance": "0123abc"},
    )
    return output


def words(page: str) -> str:
    """What is read: no script, no style, no markup."""
    bare = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]+>", " ", page, flags=re.S)
    return re.sub(r"\s+", " ", bare.replace("&#39;", "'"))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("demo")
    return build(comparison(root), root)


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The paper's model at the paper's T, and an arm that breaks."""
    root = tmp_path_factory.mktemp("paper")
    model, broken = "mamba2-370m", {"position": 5000, "start": 0, "document": "3" * 64, "stretch": 0, "stretches": 2}
    folders = [
        measurement(root, model, "base", 0, smooth(0.2), 8192, 2048),
        measurement(root, model, "state_passing", 0, smooth(0.08), 8192, 2048),
        measurement(root, model, "random_noise", 0, smooth(0.3), 8192, 2048, broken=broken),
    ]
    tables = join(root, folders, [model], ["base", "random_noise", "state_passing"])
    return build(tables, root, context((model,), scale="paper", train_length=2048, paper=True))


# --- the page --------------------------------------------------------------------------------------------


def test_the_page_says_what_it_must(demo: dict[str, Path]) -> None:
    page = demo["html"].read_text(encoding="utf-8")
    said = words(page)
    assert len(page.encode()) < MAXIMUM_BYTES
    for sentence in (
        "What the numbers say",
        "Jensen–Shannon divergence ½ Σ q log(q / m)",
        "natural logarithm",
        "It is sensitivity, not accuracy",
        "useful memory",
        "95 % bootstrap over 24 documents",
        "mean over the last 8 positions",
        "Many comparisons: 3 differences far out",
        "24 stretches, 192 predictions",
        "means over 2 post-training seeds",
        "LongSSM",
        "Synthetic tables",
    ):
        assert sentence in said, sentence
    assert "None" not in said
    assert not re.search(r"\bnan\b", said, re.I)
    assert not re.search(r"(src|href)=[\"']https?://(?!arxiv\.org)", page)
    data = page_data(page)
    assert [chart["id"] for chart in data["charts"]] == [
        f"remembrance-{measure.name}-0" for measure in remembrance_charts.MEASURES
    ]
    assert '<meta name="farstate-keys" content="{&#34;remembrance&#34;: &#34;0123abc&#34;}">' in page


def test_its_sentences_are_the_numbers_of_the_table(demo: dict[str, Path]) -> None:
    said = words(demo["html"].read_text(encoding="utf-8"))
    table = pl.read_parquet(demo["html"].parent / "comparison/remembrance.parquet")
    far = {
        (row["arm"], row["against"]): row
        for row in table.filter(pl.col("seed").is_null(), measure="far", distance="total_variation").iter_rows(named=True)
    }
    assert far["base", ""]["start"] == 992
    value, low, high = (f"{far['base', ''][name]:.3f}" for name in ("value", "low", "high"))
    assert f"dropping all but the last 33 tokens moves the base model's prediction by {value} ({low} to {high})" in said
    assert f"state passing ({far['state_passing', '']['value']:.3f}) depends less on what lies farther back." in said
    against = f"{far['state_passing', 'control']['value']:+.3f}".replace("-", "−")
    assert f"{against} (" in said
    assert "The same steps from the zero state do not account for it: state passing (less)." in said
    assert "State passing: far out all say less than the base." in said
    assert (
        "All order the arms alike far out, from the least distance to the most: state passing, base, zero-init control." in said
    )


def test_the_data_are_what_is_drawn(demo: dict[str, Path]) -> None:
    drawn = pl.read_parquet(demo["parquet"])
    assert set(drawn["measure"]) == {"curve"}
    charts = {chart["id"]: chart for chart in page_data(demo["html"].read_text(encoding="utf-8"))["charts"]}
    for distance in DISTANCES:
        for curve in charts[f"remembrance-{distance}-0"]["curves"]:
            target = "T" if curve["kind"] == "single" else "last 8"
            rows = drawn.filter(pl.col("seed").is_null(), arm=curve["arm"], target=target, distance=distance, against="").sort(
                "start"
            )
            rows = rows.filter(pl.col("start").is_in(curve["start"]))
            assert curve["value"] == pytest.approx(rows["value"].to_list(), rel=1e-5)
            assert curve["low"] == pytest.approx(rows["low"].to_list(), rel=1e-5)
            assert curve["left"] == [1025 - start for start in curve["start"]]
    # Around differences the band that holds for all starts.
    for curve in charts["remembrance-difference-0"]["curves"]:
        target = "T" if curve["kind"] == "single" else "last 8"
        rows = drawn.filter(
            pl.col("seed").is_null(), arm=curve["arm"], target=target, distance="total_variation", against="base"
        ).sort("start")
        rows = rows.filter(pl.col("start").is_in(curve["start"]))
        assert curve["high"] == pytest.approx(rows["band_high"].to_list(), rel=1e-5)


def test_the_axis_is_logarithmic_from_both_ends() -> None:
    for length in (2, 33, 1024, 8192):
        starts = default_starts(length, 2)
        places = [remembrance_charts.place(start, length) for start in starts]
        assert places == sorted(set(places))
        middle = (places[0] + places[-1]) / 2
        assert [2 * middle - place for place in reversed(places)] == pytest.approx(places)
    assert remembrance_charts.place(16, 1024) == 4.0
    assert remembrance_charts.place(1024 - 16, 1024) == 18.0 - 4.0
    assert remembrance_charts.place(512, 1024) == 9.0


def test_the_papers_values_stand_beside_its_models(demo: dict[str, Path], paper: dict[str, Path], tmp_path: Path) -> None:
    data = page_data(paper["html"].read_text(encoding="utf-8"))
    points = [curve for curve in data["charts"][0]["curves"] if curve["kind"] == "paper"]
    assert {curve["arm"]: list(zip(curve["start"], curve["value"], strict=True)) for curve in points} == {
        "base": [(1000, 0.045), (4000, 0.116), (7000, 0.147)],
        "state_passing": [(1000, 0.030), (4000, 0.034), (7000, 0.060)],
    }
    assert all(curve["kind"] != "paper" for chart in data["charts"][1:] for curve in chart["curves"])
    assert "Hollow markers are points read off the paper's Fig. 1 (bottom, T = 8,192" in words(paper["html"].read_text())
    assert "Hollow markers" not in words(demo["html"].read_text())
    # Another T: the values are not comparable, and the page says so.
    model = "mamba2-370m"
    other = build(comparison(tmp_path, model, 1024, 256), tmp_path, context((model,), train_length=256, paper=True))
    assert "The paper's values are for T = 8,192 and are not shown beside T = 1,024" in words(other["html"].read_text())


def test_a_broken_arm_is_said_to_be_and_not_drawn(paper: dict[str, Path]) -> None:
    page = paper["html"].read_text(encoding="utf-8")
    said = words(page)
    assert (
        "random noise, seed 0: not a number, first after token 5,000 of document 333333333333, read from token 0 (2 texts)"
        in said
    )
    assert "Random noise: not a number." in said
    rows = [curve for curve in page_data(page)["charts"][0]["curves"] if curve["arm"] == "random_noise"]
    assert rows
    assert max(start for curve in rows for start in curve["start"]) <= 4096
    assert "Without a zero-init control none of it can be credited to the initial state." in said
    assert "One post-training seed" in said


@pytest.mark.parametrize("which", ["demo", "paper"])
def test_the_specifications_are_valid_and_drawn(which: str, request: pytest.FixtureRequest) -> None:
    output = request.getfixturevalue(which)
    # Validating takes a second: the curves of the one, the paper's points of the other.
    for chart in page_data(output["html"].read_text(encoding="utf-8"))["charts"][:1]:
        altair.LayerChart.from_dict(chart["spec"])
    sheet = json.loads(output["json"].read_text())
    assert len(sheet["vconcat"][0]["hconcat"]) == len(remembrance_charts.MEASURES)
    assert output["png"].stat().st_size > 20_000
    svg = output["svg"].read_text()
    assert "T − 64" in svg
    assert "T_train tokens left" in svg


# --- the section -----------------------------------------------------------------------------------------


def test_pages_of_perplexity_hold_the_section(tmp_path: Path) -> None:
    output = {name: tmp_path / f"fig1.{name}" for name in OUTPUTS}
    tables, remembered = write_tables(tmp_path / "tables"), comparison(tmp_path)
    curves.draw(
        FIGURES["fig1"],
        inputs={"comparison": [tables], "remembrance": [remembered]},
        output=output,
        context=context(),
        keys={},
    )
    page = output["html"].read_text(encoding="utf-8")
    said = words(page)
    assert "What is remembered" in said
    assert "State passing: less than the base at t = " in said
    assert "1 − cosine of the two vectors" not in said
    data = page_data(page)
    ids = [chart["id"] for chart in data["charts"]]
    assert ids[-2:] == ["remembrance-total_variation-0", "remembrance-difference-0"]
    assert len(set(ids)) == len(ids)
    for name in ids:
        assert f'id="{name}"' in page
    assert {"remembrance-total_variation", "ppl"} <= set(data["extents"])
    sheet = json.loads(output["json"].read_text())
    assert len(sheet["vconcat"]) == 2
    assert len(sheet["vconcat"][1]["hconcat"]) == 1
    assert "T_train tokens left" in output["svg"].read_text()


def test_a_section_of_other_arms_or_models_is_refused(tmp_path: Path) -> None:
    tables = comparison(tmp_path)
    card = Context.model_validate(context())
    with pytest.raises(FarstateError, match="holds control, which the page does not show"):
        remembrance.section(FIGURES["fig1"], [tables], card, arm_styles(["base", "state_passing"]))
    with pytest.raises(FarstateError, match="holds small, of which the context says nothing"):
        remembrance.section(
            FIGURES["fig1"],
            [tables],
            Context.model_validate(context(("large",))),
            arm_styles(["base", "control", "state_passing"]),
        )
    with pytest.raises(FarstateError, match="2 comparisons given"):
        remembrance.section(FIGURES["fig1"], [tables, tables], card, arm_styles(["base"]))


def test_tables_that_cannot_be_drawn_are_named(tmp_path: Path) -> None:
    tables = comparison(tmp_path)
    table, contents = pl.read_parquet(tables / "remembrance.parquet"), read_manifest(tables)
    del contents["files"]
    for changed, message in (
        (table.drop("band_low"), "column band_low is missing"),
        (table.clear(), "holds no rows"),
        (table.with_columns(target=pl.lit("last 8")), "expected 'T' and one"),
    ):
        changed.write_parquet(tables / "remembrance.parquet")
        write_manifest(tables, contents, ["remembrance.parquet"])
        with pytest.raises(FarstateError, match=message):
            build(tables, tmp_path)
    assert not (tmp_path / "fig13.html").exists()


# --- sentences -------------------------------------------------------------------------------------------


def texts_of(tables: Path, model: str = "small", train_length: int = 32) -> str:
    card = Context.model_validate(context((model,), train_length=train_length))
    section = remembrance.section(FIGURES["fig1"], [tables], card, arm_styles(read_manifest(tables)["figure"]["arms"]))
    return words(str(section.html))


def test_a_flat_memory_is_called_flat(tmp_path: Path) -> None:
    shaped = {"base": flat(1024, 128, 0.5), "state_passing": smooth(0.6)}
    said = texts_of(comparison(tmp_path, train_length=128, **shaped), train_length=128)
    assert "Base: flat until the training length is reached, then sharp, as the paper's GLA" in said
    assert "State passing: no flat stretch" in said
    assert "is there with 129 tokens left: base " in said
    assert "state passing (" in said
    assert "depends more on what lies farther back" in said


def test_equal_arms_establish_no_difference(tmp_path: Path) -> None:
    said = texts_of(comparison(tmp_path, base=smooth(0.4), control=smooth(0.4), state_passing=smooth(0.4)))
    assert "for state passing no difference is established" in said
    assert "State passing: no start point at which it differs from the base for certain." in said
    assert "For state passing no difference to the control is established." in said


def test_a_text_within_the_training_length(tmp_path: Path) -> None:
    said = texts_of(comparison(tmp_path, train_length=4096), train_length=4096)
    assert "T is within the training length of 4,096 tokens, so nothing lies farther back than training reached" in said


def test_a_base_that_breaks_leaves_nothing_to_say(tmp_path: Path) -> None:
    broken = {"position": 9, "start": 0, "document": "3" * 64, "stretch": 0, "stretches": 1}
    folders = [measurement(tmp_path, "small", "base", 0, smooth(0.5), 1024, 32, broken=broken)]
    said = texts_of(join(tmp_path, folders, ["small"], ["base"]))
    assert "the base model's output is not a number, so nothing can be said of what it remembers" in said
    assert "first after token 9 of document 333333333333" in said


def test_distances_that_disagree_are_said_to() -> None:
    def row(value: float) -> dict[str, Any]:
        return {"value": value, "value_low": value - 0.01, "value_high": value + 0.01, "left": 33}

    base = {(name, ""): row(0.3) for name in DISTANCES}
    other = {(name, ""): row(0.2) for name in DISTANCES} | {(name, "base"): row(-0.1) for name in DISTANCES}
    other |= {("cosine_distance", ""): row(0.4), ("cosine_distance", "base"): row(0.1)}
    arms = [Arm("base", "base", base, None, None), Arm("tbtt", "TBTT", other, None, None)]
    said = {finding.topic: finding.text for finding in remembrance_text.findings(arms, all_distances=True)}
    assert (
        "TBTT: they disagree (total variation, Jensen–Shannon divergence and Jensen–Shannon distance: less than the base; 1 − cosine: more than the base)"
        in said["The distances."]
    )
    assert "They do not order the arms alike." in said["The distances."]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.3721, "0.372"),
        (0.0, "0.000"),
        (0.00412, "0.0041"),
        (-0.0123, "−0.012"),
        (1.3e-7, "1.3e−07"),
        (None, "–"),
        (math.nan, "–"),
    ],
)
def test_distances_as_text(value: float | None, expected: str) -> None:
    assert remembrance_text.distance(value) == expected
