"""Families of curves (training context, snapshots, warm-up, noise, price): sentences from invented verdicts, pages from invented tables."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import altair
import polars as pl
import pytest

from farstate.errors import FarstateError
from farstate.reports import families, family_text, summary_charts
from farstate.reports.family_text import Item
from farstate.reports.figures import FIGURES
from farstate.reports.page import MAXIMUM_BYTES, OUTPUTS
from farstate.reports.theme import colour_on, ordered_styles
from test_reports_curves import page_data
from test_reports_synthetic import context, verdict

SIZE = {"parameters": 40_000, "parameters_without_embeddings": 10_000}
FAMILIES = ("fig2", "fig3", "fig11", "fig12", "cost")
Runs = list[dict[str, Any]]
"""Invented runs: panel, model, arm, of, label, value, axis, and excess, cost, train_length, seeds, changes of the verdict."""


def run(panel: str, model: str, arm: str, label: str, value: float, axis: str, excess: float, **more: Any) -> dict[str, Any]:
    given = {"of": "base", "cost": 0.0, "train_length": 32, "seeds": (0,), "loss": 0.0, "changes": {}}
    return {
        **{"panel": panel, "model": model, "arm": arm, "label": label, "value": value, "axis": axis, "excess": excess},
        **given,
        **more,
    }


def runs_of(figure: str) -> Runs:
    """Invented runs that resemble what the paper reports."""
    if figure == "fig2":
        return [
            run(
                panel,
                f"{panel}{'' if t == 32 else f'.context-{t}'}",
                "base",
                f"T_train = {t:,}",
                t,
                "training context, tokens",
                e,
                train_length=t,
            )
            for panel, excesses in (("small", (0.9, 0.3, 0.004)), ("large", (1.3, 0.8, 0.2)))
            for t, e in zip((32, 128, 512), excesses, strict=True)
        ]
    if figure == "fig3":
        return [
            run("small", "small", arm, label, tokens, "training tokens", excess, loss=loss)
            for arm, label, tokens, excess, loss in (
                ("snapshot_65536", "65,536 tokens", 65536, 0.00, 1.5),
                ("snapshot_262144", "262,144 tokens", 262144, 0.0, 0.9),
                ("snapshot_1048576", "1,048,576 tokens", 1048576, 0.5, 0.3),
                ("base", "2,000,000 tokens, end of the schedule", 2_000_000, 0.9, 0.0),
            )
        ]
    if figure == "fig11":
        return [
            run("small", name, "base", words, value, "warm-up, share of the steps", excess, seeds=(0, 1, 2))
            for name, words, value, excess in (("small", "0.1", 0.1, 0.4), ("small.warmup-0.25", "0.25", 0.25, 0.7))
        ]
    fixed = [
        run("small", "small", "base", "", math.nan, "", 0.9),
        run("small", "small", "control", "", math.nan, "", 0.95, of="control", cost=0.03),
    ]
    if figure == "fig12":
        return fixed + [
            run(
                "small",
                "small",
                f"random_noise-sigma-{s:g}",
                f"σ = {s:g}",
                s,
                "σ of every element",
                e,
                of="random_noise",
                cost=c,
                seeds=(0, 1),
            )
            for s, e, c in ((0.01, 0.85, 0.03), (0.1, 0.1, 0.1), (1.0, 0.3, 0.5), (3.0, 0.6, 1.4))
        ]
    grid = [("post-training steps", "steps", (50, 200, 400)), ("reset probability p", "reset_probability", (0.0, 0.05, 0.3))]
    found = [*fixed, run("small", "small", "fitted_noise", "", math.nan, "", 0.2, of="fitted_noise", cost=0.08)]
    for of in ("control", "state_passing"):
        for axis, key, values in grid[: 1 if of == "control" else 2]:
            for value in values:
                usual = value in (200, 0.05)
                arm = of if usual else f"{of}-{key}-{value}".replace(".", "p")
                steps = value if key == "steps" else 200
                excess = 0.95 if of == "control" else 0.001 if value != 50 else 0.3
                price = 0.03 if of == "control" else 0.06
                found.append(
                    run("small", "small", arm, f"{value:g}", value, axis, excess, of=of, cost=price, changes={"steps": steps})
                )
    return found


def write(directory: Path, runs: Runs, *, length: int = 4096) -> Path:
    """Curves and verdicts of invented runs, each once."""
    directory.mkdir(parents=True, exist_ok=True)
    curves: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    edges = sorted({round(2 ** (step / 2)) for step in range(int(math.log2(length)) * 2 + 1)})
    for one in {(r["model"], r["arm"]): r for r in runs}.values():
        t_train, seeds = one["train_length"], one["seeds"]
        for number, seed in enumerate((None, *seeds)):
            shift = 0.0 if seed is None else 0.01 * (number - (len(seeds) + 1) / 2)
            excess = one["excess"] + shift
            key = {
                "model": one["model"],
                "arm": one["arm"],
                "seed": seed,
                "train_length": t_train,
                "n_documents": 12,
                "n_tokens": 99,
            }
            for low, high in pairwise(edges):
                t = round(math.sqrt(low * high))
                rise = 1 / (1 + (6 * t_train / t) ** 1.5) if t > t_train else 0.0
                nll = 4.2 + 2.2 / t**0.7 + one["cost"] + one["loss"] + excess * rise
                width = 0.02 + 0.03 * rise
                values = {"ppl": (math.exp(nll), math.exp(nll - width), math.exp(nll + width))}
                own = 0.002 if t > t_train else 0.0
                values["excess_nll"] = (excess * rise, excess * rise - own, excess * rise + own)
                values["excess_nll_base"] = tuple(v + one["cost"] for v in values["excess_nll"])
                curves += [
                    {**key, "metric": metric, "position": t, "value": v, "low": a, "high": b}
                    for metric, (v, a, b) in values.items()
                ]
            kind = "control" if one["of"] == "control" else "base" if one["of"] == "base" else "state_passing"
            cost = {
                "short_context_cost": one["cost"],
                "short_context_cost_low": one["cost"] - 0.005,
                "short_context_cost_high": one["cost"] + 0.005,
            }
            for end in ("", "_low", "_high"):
                held = None if kind in ("base", "control") else cost[f"short_context_cost{end}"] - 0.03
                cost[f"short_context_cost_vs_control{end}"] = held
            narrow = {f"excess_nll{end}": excess + half for end, half in (("", 0.0), ("_low", -0.01), ("_high", 0.01))}
            narrow |= {f"excess_nll_base{end}": narrow[f"excess_nll{end}"] + one["cost"] for end in ("", "_low", "_high")}
            steps = {} if kind == "base" else {"steps": 200, "learning_rate": 1e-3}
            row = verdict(
                model=one["model"],
                arm=kind,
                seed=seed,
                excess=excess,
                train_length=t_train,
                length=length,
                n_seeds=len(seeds),
                **cost,
                **narrow,
                **steps | one["changes"],
            )
            row |= {"arm": one["arm"], "n_seeds": len(seeds) if seed is None else 1}
            verdicts.append(row)
    pl.DataFrame(curves, schema_overrides={"seed": pl.Int64}).write_parquet(directory / "curves.parquet")
    pl.DataFrame(verdicts, infer_schema_length=None, schema_overrides={"seed": pl.Int64}).write_parquet(
        directory / "verdicts.parquet"
    )
    differences(runs).write_parquet(directory / "differences.parquet")
    return directory


def differences(runs: Runs) -> pl.DataFrame:
    """Those of each model against the first, where a model has several seeds."""
    from farstate.evaluation.compare import DIFFERENCE_SCHEMA

    rows = []
    for one in runs[1:]:
        for seed in (None, *one["seeds"]) if one["axis"].startswith("warm-up") else ():
            value = one["excess"] - runs[0]["excess"]
            over = {"seeds_low": value - 0.1, "seeds_high": value + 0.1} if seed is None and len(one["seeds"]) > 2 else {}
            key = {"model": one["model"], "arm": "base", "seed": seed, "against_model": runs[0]["model"], "against_arm": "base"}
            count = len(one["seeds"]) if seed is None else 1
            numbers = {"value": value, "low": value - 0.02, "high": value + 0.02, "seeds_low": None, "seeds_high": None} | over
            rows.append({**key, "quantity": "excess_nll", **numbers, "n_seeds": count, "n_documents": 12})
    return pl.DataFrame(rows, schema=DIFFERENCE_SCHEMA)


def about_of(runs: Runs) -> dict[str, Any]:
    """The page's context for invented runs."""
    models = tuple(dict.fromkeys(r["model"] for r in runs))
    found = context(models)
    for r in runs:
        found["models"][r["model"]] |= {"context": r["train_length"], "training_tokens": 2_000_000}
    names = ("panel", "model", "arm", "of", "label", "value", "axis")
    return found | {
        "series": [{name: r[name] for name in names} for r in runs if r["label"]],
        "sizes": dict.fromkeys(models, SIZE),
    }


def build(figure: str, root: Path, runs: Runs | None = None) -> dict[str, Path]:
    runs = runs_of(figure) if runs is None else runs
    output = {kind: root / f"{figure}.{kind}" for kind in OUTPUTS}
    tables = write(root / "tables", runs)
    families.draw(
        FIGURES[figure], inputs={"comparison": [tables]}, output=output, context=about_of(runs), keys={"figure": figure}
    )
    return output


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    return {figure: build(figure, tmp_path_factory.mktemp(figure)) for figure in FAMILIES}


@pytest.mark.parametrize("figure", FAMILIES)
def test_every_family_is_drawn(pages: dict[str, dict[str, Path]], figure: str) -> None:
    output = pages[figure]
    page = output["html"].read_text(encoding="utf-8")
    assert len(page.encode()) < MAXIMUM_BYTES
    assert output["svg"].read_text().startswith("<svg")
    assert output["png"].stat().st_size > 20_000
    for sentence in (
        FIGURES[figure].question.replace("'", "&#39;"),
        "What the numbers say",
        "What misleads",
        "Parameters and provenance",
        "Synthetic tables",
        "Intervals over texts say nothing about another training run",
        "12 documents",
        "LongSSM",
    ):
        assert sentence in page, sentence
    assert "None" not in re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S)
    assert not re.search(r"\bnan\b", re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.S), re.I)
    data = page_data(page)
    curves = {"fig2": 4, "fig3": 2, "fig11": 2, "fig12": 3, "cost": 0}[figure]
    small = {"fig2": 4, "fig3": 2, "fig11": 2, "fig12": 3, "cost": 7}[figure]
    assert len(data["charts"]) == curves + small
    table = pl.read_parquet(output["parquet"])
    assert set(table["panel"]) == {r["panel"] for r in runs_of(figure)}
    assert table.filter(pl.col("position").is_null())["metric"].n_unique() == {"fig12": 3, "cost": 3}.get(figure, 2)


def test_their_specifications_are_valid_vega_lite(pages: dict[str, dict[str, Path]]) -> None:
    """One chart of each kind: validating takes a second."""
    for figure, names in (("fig2", ("ppl-0", "summary-0-0")), ("fig12", ("summary-0-0",)), ("cost", ("prices-0", "summary-0-0"))):
        charts = {chart["id"]: chart["spec"] for chart in page_data(pages[figure]["html"].read_text(encoding="utf-8"))["charts"]}
        for name in names:
            altair.LayerChart.from_dict(charts[name])


def lead_of(page: Path) -> list[str]:
    return re.findall(r'<p class="lead">(.*?)</p>', page.read_text(encoding="utf-8"))


def test_each_page_says_in_a_sentence_what_was_found(pages: dict[str, dict[str, Path]]) -> None:
    small, large = lead_of(pages["fig2"]["html"])
    assert small.startswith("small (40K) stops failing from T_train = 512 on, as far as position 4,096 shows")
    assert "not merely moved" in small
    assert large.startswith(
        "large (40K) fails at every training context tried: a longer one does not prevent the failure here, it only moves it"
    )
    assert "All were trained on the same 2,000,000 tokens" in pages["fig2"]["html"].read_text()
    (lead,) = lead_of(pages["fig3"]["html"])
    assert "first clearly exceeds the tolerance at 1,048,576 tokens (1.31 × Chinchilla, 5.24 × without embeddings)" in lead
    assert "0.33 × Chinchilla (262,144 tokens)</button>" in pages["fig3"]["html"].read_text()
    (lead,) = lead_of(pages["fig11"]["html"])
    assert lead.startswith("small (40K): 25 % warm-up is worse beyond the training length than 10 % warm-up")
    assert "+0.300 nats" in lead
    assert "over 3 pre-training seeds" in lead
    (lead,) = lead_of(pages["fig12"]["html"])
    assert "the best is σ = 0.1, with a far excess over the base model&#39;s windows of +0.200 nats (0.190 to 0.210)" in lead
    assert "It does not repair in full" in lead
    (lead,) = lead_of(pages["cost"]["html"])
    assert "4 of 6 settings repair, none of them free" in lead
    assert "costs +0.060 nats (0.055 to 0.065)" in lead


def item(value: float, excess: float | None, half: float = 0.01, **more: Any) -> Item:
    numbers = {"excess_nll": excess, "excess_nll_low": None, "excess_nll_high": None}
    if excess is not None:
        numbers |= {"excess_nll_low": excess - half, "excess_nll_high": excess + half}
    row = verdict(excess=0.0 if excess is None else excess, **numbers, **more.pop("row", {}))
    tokens = {"tokens": round(value), "chinchilla": value / 100, "chinchilla_bare": value / 10}
    return Item(label=f"{value:g}", value=value, arm="base", of="base", row=row, tokens=tokens, **more)


def test_where_the_phenomenon_does_not_appear_the_page_says_so() -> None:
    flat = [item(value, 0.001) for value in (1, 2, 4)]
    assert "fails at none of these training contexts here" in family_text.contexts("m", flat)[0]
    lead, found = family_text.snapshots("m", flat)
    assert "does not begin to fail within 4 tokens" in lead
    assert found[0].text.startswith("In these runs yes")
    base = verdict(excess_nll=0.0, excess_nll_low=-0.01, excess_nll_high=0.01)
    assert (
        "the base model does not fail here"
        in family_text.sigmas("m", [item(1, 0.0, row={"excess_nll_base": 0.0})], base, None)[0]
    )
    assert "there is nothing to repair" in family_text.cost("m", flat, base, 0.02)[0]
    open_ = [item(value, 0.02) for value in (1, 2)]
    assert "established at none" in family_text.contexts("m", open_)[0]


def test_a_failure_that_grows_and_falls_is_not_called_monotone() -> None:
    _, found = family_text.snapshots("m", [item(1, 0.5), item(2, 0.9), item(4, 0.4)])
    assert found[0].text.startswith("No: the far excess falls from 2 tokens to 4 tokens (0.900 to 0.400 nats)")
    _, found = family_text.snapshots("m", [item(1, 0.5), item(2, 0.9), item(4, 0.895)])
    assert found[0].text.startswith("Not shown")
    assert "the intervals meet in every fall" in found[0].text


def test_a_context_read_too_short_is_not_said_to_prevent() -> None:
    failing = item(32, 0.5, onset=320)
    holding = item(512, 0.0, row={"train_length": 512, "far_to": 2048})
    lead, _ = family_text.contexts("m", [failing, holding])
    assert "It was read to 4 times its training length only, and the failing ones begin as late as 10 times theirs" in lead
    broken = item(64, None, row={"broken_at": 900})
    assert family_text.status(broken.row) == family_text.BROKEN
    assert "not a number from position 900 on" in family_text.contexts("m", [broken])[1][1].text


def test_fewer_than_three_seeds_give_no_interval_over_them() -> None:
    items = [item(value, 0.4, short={"position": 26, "short_loss": 4.0}) for value in (0.1, 0.25)]

    def rows(names: tuple[str, str], sign: int, over: tuple[float, float] | None) -> pl.DataFrame:
        for one, name in zip(items, names, strict=True):
            one.row["model"] = name  # type: ignore[index]
        ends = dict(zip(("seeds_low", "seeds_high"), sorted(sign * end for end in over) if over else (None, None), strict=True))
        key = {"model": "long", "against_model": "short", "arm": "base", "against_arm": "base", "quantity": "excess_nll"}
        if sign == -1:
            key |= {"model": "short", "against_model": "long"}
        low, high = sorted((sign * 0.1, sign * 0.2))
        common = {"value": sign * 0.15, "low": low, "high": high}
        return pl.DataFrame([{**key, "seed": None, **common, **ends, "n_seeds": 2}, {**key, "seed": 4, **common, "n_seeds": 1}])

    two = families._difference(rows(("short", "long"), 1, None), *items)
    lead, found = family_text.warmups("m", items, two)
    assert "with 2 pre-training seeds there is no interval over trainings" in lead
    assert "+0.150 nats (0.100 to 0.200 over texts" in lead
    assert found[0].text == "Difference of the far excess, nats, seed 4: +0.150."
    for sign in (1, -1):
        over = families._difference(rows(("short", "long"), sign, (-0.05, 0.35)), *items)
        assert over[None]["difference"] == pytest.approx(0.15)
        lead, _ = family_text.warmups("m", items, over)
        assert "is not shown at this scale" in lead
        assert "(Student's t)" in lead
        assert "−0.050 to 0.350" in lead
    assert "nothing can be compared" in family_text.warmups("m", items, {})[0]


def test_a_price_without_a_control_of_the_same_budget_is_no_number(tmp_path: Path) -> None:
    runs = runs_of("cost")
    build("cost", tmp_path, runs)
    table = pl.read_parquet(tmp_path / "cost.parquet").filter(pl.col("metric") == "short_context_cost_vs_control")
    assert table.filter(pl.col("series") == "control")["value"].null_count() == 3
    passing = table.filter((pl.col("series") == "state_passing") & (pl.col("axis") == "post-training steps"))
    assert passing["value"].to_list() == pytest.approx([0.03] * 3)
    assert passing["low"].to_list() == pytest.approx([0.025] * 3)


def test_free_needs_the_whole_interval_below_the_margin() -> None:
    def setting(cost: float, half: float) -> Item:
        numbers = {"short_context_cost": cost, "short_context_cost_low": cost - half, "short_context_cost_high": cost + half}
        return item(cost, 0.0, row=numbers)

    base = verdict(excess_nll=0.9, excess_nll_low=0.8, excess_nll_high=1.0)
    lead, _ = family_text.cost("m", [setting(0.005, 0.01), setting(0.015, 0.01)], base, 0.02)
    assert "2 of 2 settings repair, and free of cost on short contexts (below 0.02 nats) is 0.005." in lead
    lead, _ = family_text.cost("m", [setting(0.015, 0.01)], base, 0.02)
    assert "1 of 1 settings repairs, none of them free: the cheapest" in lead
    lead, _ = family_text.cost("m", [setting(0.015, 0.03)], base, 0.02)
    assert "none of them shown to be free (below 0.02 nats): the cheapest" in lead


def test_a_series_that_the_tables_lack_is_named(tmp_path: Path) -> None:
    runs = runs_of("fig3")
    tables = write(tmp_path / "tables", runs[:-1])
    output = {kind: tmp_path / f"fig3.{kind}" for kind in OUTPUTS}
    with pytest.raises(FarstateError, match=r"verdicts.parquet: 0 verdicts over all seeds on small, base"):
        families.draw(FIGURES["fig3"], inputs={"comparison": [tables]}, output=output, context=about_of(runs), keys={})
    with pytest.raises(FarstateError, match=r"context.series: empty"):
        families.draw(FIGURES["fig3"], inputs={"comparison": [tables]}, output=output, context=about_of([]), keys={})
    assert not any(path.exists() for path in output.values())


def test_a_ramp_keeps_its_order_and_stands_out_from_its_ground() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    styles = ordered_styles([(str(n), str(n)) for n in range(9)])
    for dark in (False, True):
        ramp = [luminance(colour_on(style, dark=dark)) for style in styles]
        assert ramp == sorted(ramp)
        ground = luminance("#14161a" if dark else "#ffffff")
        assert all((max(value, ground) + 0.05) / (min(value, ground) + 0.05) > 2 for value in ramp)
    assert len({(style.dash, style.shape) for style in styles}) == len(styles)
    for one, other in pairwise(styles):
        assert one.dash != other.dash
        assert one.shape != other.shape


def test_the_axis_is_logarithmic_where_the_values_are() -> None:
    assert summary_charts.is_logarithmic([0.01, 0.1, 1.0])
    assert not summary_charts.is_logarithmic([0.0, 0.1, 1.0])
    assert not summary_charts.is_logarithmic([0.1, 0.25])
    assert json.dumps(families.KINDS["cost"].metrics) == "[]"
