"""Pages of perplexity by position, every arm, every model (the paper's Figures 1, 5 and 10; `farstate.reports.figures`).

The stage reads the tables of `farstate.evaluation.compare` and draws them. It filters and formats; every
number on the page is in a table or in the parameters.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars

from farstate.errors import FarstateError
from farstate.reference import paper_points
from farstate.reports import charts, page, text
from farstate.reports.charts import METRICS, RESET, RESET_LABEL, Panel, Row
from farstate.reports.context import Context, read_context
from farstate.reports.figures import About
from farstate.reports.page import OUTPUTS, Section
from farstate.reports.tables import read_table, rounded
from farstate.reports.theme import ArmStyle, Spec, arm_styles

CURVE_COLUMNS = ("model", "arm", "seed", "train_length", "metric", "position", "value", "low", "high", "n_documents")
_ESTIMATES = (
    *("excess_nll", "excess_nll_base", "removed", "removed_base", "removed_vs_control", "removed_base_vs_control"),
    *("short_context_cost", "short_context_cost_vs_control", "beats_reset", "beats_base_reset"),
)
VERDICT_COLUMNS = (
    *(
        "model",
        "arm",
        "seed",
        "train_length",
        "verdict",
        "t_star",
        "p_star",
        "worst_position",
        "gap",
        "gap_low",
        "gap_high",
        "tolerance",
    ),
    *("fails_beyond", "worst_beyond", "gap_beyond", "gap_beyond_low", "gap_beyond_high"),
    *("verdict_interval", "interval", "n_documents", "n_stretches", "n_seeds", "broken_at", "far_from", "far_to"),
    *(f"{name}{end}" for name in _ESTIMATES for end in ("", "_low", "_high")),
    *("excess_nll_seeds_low", "excess_nll_seeds_high", "steps", "tokens", "learning_rate"),
)
AGE_COLUMNS = ("model", "arm", "seed", "age", "share")
CURVE_FIELDS, AGE_FIELDS = ("position", "value", "low", "high"), ("age", "share")
METRICS_DRAWN = tuple(metric.name for metric in METRICS)
RESETS = {"ppl": "ppl_reset", "excess_nll_base": "reset_excess"}
"""By metric, the base model's line with its state reset: its own windows are the base's, so its excess is one over those."""


def draw(
    about: About,
    inputs: Mapping[str, Sequence[Path]],
    output: Mapping[str, Path],
    context: dict[str, Any],
    keys: Mapping[str, Any],
) -> None:
    """Draw the tables of a comparison as a page, a static figure, its specification and its data.

    Args:
        about: what the figure asks.
        inputs: under "comparison" one directory with curves, references, verdicts and ages (`.parquet`); under
            "remembrance", if at all, those of the section that `farstate.reports.remembrance.section(directories, card, styles)`
            returns as a `page.Section`.
        output: a path each for html, svg, png, json and parquet, written whole or not at all.
        context: see `farstate.reports.context.Context`.
        keys: content keys of the results shown, carried by the page in `<meta name="farstate-keys">`.

    Raises:
        FarstateError: a table or column is missing, a table is empty, a perplexity is not positive, `context`
            is incomplete, or an output is not named.
    """
    page.check_outputs(output)
    (comparison,) = inputs["comparison"]
    card = read_context(context)
    curves = read_table(comparison, "curves", CURVE_COLUMNS)
    references = read_table(comparison, "references", CURVE_COLUMNS)
    verdicts = read_table(comparison, "verdicts", VERDICT_COLUMNS)
    ages = read_table(comparison, "ages", AGE_COLUMNS, may_be_empty=True)
    drawn = _checked(curves, METRICS_DRAWN, comparison / "curves.parquet")
    resets = _checked(
        references.filter((polars.col("arm") == "base") & polars.col("seed").is_null()),
        tuple(RESETS.values()),
        comparison / "references.parquet",
    )
    models = [name for name in card.models if name in set(drawn["model"])]
    if unknown := sorted(set(drawn["model"]) - set(models)):
        raise FarstateError(f"{comparison / 'curves.parquet'} holds {', '.join(unknown)}, of which the context says nothing")
    styles = arm_styles(curves["arm"].unique())
    length = _length(drawn, verdicts)
    panels = [_panel(about, drawn, resets, card, model, metric, styles, length) for model in models for metric in METRICS]
    further: list[Section] = []
    if inputs.get("remembrance"):
        remembrance = importlib.import_module("farstate.reports.remembrance")  # only where a page has it
        further.append(remembrance.section(inputs["remembrance"], card, styles))

    specification = charts.sheet(panels, styles, _title(about, card), _subtitle(card, models, verdicts))
    specification["vconcat"] += [row for section in further for row in section.sheet]
    html = _page(about, card, models, panels, styles, drawn, verdicts, ages, output, keys, further)
    page.write(output, html, specification, drawn, "lower evaluate.bins_per_octave or the number of seeds")


# Reading ---------------------------------------------------------------------------------------------------


def _checked(table: polars.DataFrame, metrics: Sequence[str], path: Path) -> polars.DataFrame:
    """The rows of `metrics` in a fixed order, their values in the range of an axis."""
    drawn = (
        table.select(CURVE_COLUMNS)
        .filter(polars.col("metric").is_in(list(metrics)))
        .with_columns(polars.col("value", "low", "high").cast(polars.Float64), polars.col("seed", "position").cast(polars.Int64))
        .sort("model", "metric", "arm", "seed", "position", nulls_last=False)
    )
    for column in ("value", "low", "high"):
        bad = drawn.filter(polars.col("metric").is_in(["ppl", "ppl_reset"]) & (polars.col(column) <= 0))
        if not bad.is_empty():
            row = bad.row(0, named=True)
            raise FarstateError(
                f"{path}: {column} = {row[column]:g} in {row['metric']} of {row['model']}, {row['arm']} at position "
                f"{row['position']:g}: a perplexity is positive, and a logarithmic axis would drop it silently; run the comparison again"
            )
    if not (drawn["position"] > 0).all():
        raise FarstateError(f"{path}: a position is not positive, positions start at 1; run the comparison again")
    return drawn


# Rows of the charts ----------------------------------------------------------------------------------------


def _panel(
    about: About,
    drawn: polars.DataFrame,
    resets: polars.DataFrame,
    card: Context,
    model: str,
    metric: charts.Metric,
    styles: Sequence[ArmStyle],
    length: int,
) -> Panel:
    mine = drawn.filter(polars.col("model") == model)
    labels = {style.name: style.label for style in styles}
    model_card = card.models[model]
    rows: list[Row] = []
    for style in styles:
        arm = mine.filter((polars.col("arm") == style.name) & (polars.col("metric") == metric.name))
        seeds = arm["seed"].drop_nulls().unique().sort().to_list()
        has_mean = arm["seed"].null_count() > 0
        if has_mean:
            over = f"mean over {len(seeds)} seeds" if len(seeds) > 1 else f"{seeds[0]}" if seeds else "all"
            rows += _curve(arm.filter(polars.col("seed").is_null()), "mean", style.name, style.label, over, "measured")
        if len(seeds) > 1 or not has_mean:
            for seed in seeds:
                rows += _curve(
                    arm.filter(polars.col("seed") == seed), "seed", style.name, style.label, str(seed), "measured, one seed"
                )
    if metric.name in RESETS:
        line = resets.filter((polars.col("model") == model) & (polars.col("metric") == RESETS[metric.name]))
        rows += _curve(line, "reference", RESET, RESET_LABEL, "–", "reference, not an arm")
    if metric.name == "ppl" and about.points is not None and model_card.paper_model is not None:
        rows += _paper_rows(about, about.points, model_card.paper_model, labels)
    return Panel(
        model=model,
        title=model_card.label,
        metric=metric,
        train_length=model_card.context,
        length=length,
        rows=rows,
    )


def _length(drawn: polars.DataFrame, verdicts: polars.DataFrame) -> int:
    """The last position measured; without a verdict beyond the training length, that of the last bin's centre."""
    measured = verdicts["far_to"].drop_nulls().to_list()
    return int(max(measured)) if measured else math.ceil(max(drawn["position"].to_list()))


def _curve(table: polars.DataFrame, kind: str, arm: str, label: str, seed: str, note: str) -> list[Row]:
    """Rows of one curve; where its values stop being numbers a row `broken` stands at the last good height."""
    rows: list[Row] = []
    last: float | None = None
    broken = False
    for record in table.sort("position").iter_rows(named=True):
        value = record["value"]
        if text.finite(value):
            last = rounded(value)
            low, high = (rounded(record[end]) if text.finite(record[end]) else None for end in ("low", "high"))
            rows.append(_row(kind, arm, label, seed, record["position"], last, low, high, record["n_documents"], note))
        elif not broken:
            broken = True
            rows.append(
                _row(
                    "broken",
                    arm,
                    label,
                    seed,
                    record["position"],
                    last,
                    None,
                    None,
                    record["n_documents"],
                    "not a number from here on",
                )
            )
    return rows


def _paper_rows(about: About, points: str, model: str, labels: Mapping[str, str]) -> list[Row]:
    rows = []
    for point in paper_points(points, model):
        arm = about.methods.get(point.method)
        if arm not in labels:
            continue
        assert arm is not None
        if point.lower_bound:
            low, high, note = None, None, "the paper's figure: above this, off its axis"
        else:
            low, high = rounded(point.value - point.tolerance), rounded(point.value + point.tolerance)
            note = "read off the paper's figure; low to high is the reading tolerance"
        rows.append(_row("paper", arm, labels[arm], "not given", point.position, rounded(point.value), low, high, None, note))
    return rows


def _row(
    kind: str,
    arm: str,
    label: str,
    seed: str,
    position: float,
    value: float | None,
    low: float | None,
    high: float | None,
    documents: int | None,
    note: str,
) -> Row:
    return {
        **{"kind": kind, "arm": arm, "label": label, "seed": seed, "position": rounded(position)},
        **{"value": value, "low": low, "high": high, "n": documents, "note": note},
    }


def _age_rows(ages: polars.DataFrame, model: str, styles: Sequence[ArmStyle]) -> list[Row]:
    """The shares of states by age in tokens, per seed where the table has no mean over seeds; noise has no age."""
    rows: list[Row] = []
    for style in styles:
        arm = ages.filter((polars.col("model") == model) & (polars.col("arm") == style.name) & polars.col("age").is_not_null())
        if arm["seed"].null_count():
            arm = arm.filter(polars.col("seed").is_null())
        for record in arm.sort("seed", "age", nulls_last=False).iter_rows(named=True):
            seed = "all" if record["seed"] is None else str(record["seed"])
            rows.append(
                {"arm": style.name, "label": style.label, "seed": seed, "age": record["age"], "share": rounded(record["share"])}
            )
    return rows


# Page ------------------------------------------------------------------------------------------------------


def _title(about: About, card: Context) -> str:
    return about.title + ("" if card.scale == "paper" else f" ({card.scale})")


def _subtitle(card: Context, models: Sequence[str], verdicts: polars.DataFrame) -> list[str]:
    labels = text.listing([card.models[model].label for model in models])
    intervals = sorted(set(verdicts.filter(polars.col("seed").is_null())["interval"].drop_nulls()))
    lines = [f"{labels}. {card.budget}"]
    if intervals:
        lines.append(f"Bands: {'; '.join(intervals)}. Positions below an eighth of the training length are on the page.")
    return lines


def _page(
    about: About,
    card: Context,
    models: Sequence[str],
    panels: Sequence[Panel],
    styles: Sequence[ArmStyle],
    drawn: polars.DataFrame,
    verdicts: polars.DataFrame,
    ages: polars.DataFrame,
    output: Mapping[str, Path],
    keys: Mapping[str, Any],
    further: Sequence[Section],
) -> str:
    ranges = charts.extents(panels)
    names = {style.name: style.label for style in styles}
    by_name = {style.name: style for style in styles}
    order = {name: number for number, name in enumerate(names)}
    drawings: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []
    for number, model in enumerate(models):
        mine = {panel.metric.name: panel for panel in panels if panel.model == model}
        overall, by_seed = _verdict_rows(verdicts, model, order)
        shown_names = {row["arm"]: row["arm"] for row in overall} | names | {"base": "base"}
        figures: list[dict[str, Any]] = []
        for metric in METRICS:
            panel = mine[metric.name]
            spec = charts.screen_panel(panel, styles, charts.joined(ranges.get(metric.name, {}), "near"))
            figures.append(
                _drawing(drawings, f"{metric.name}-{number}", metric.name, spec, charts.columns(panel.rows, CURVE_FIELDS))
            )
            figures[-1] |= {
                "metric": metric.name,
                "title": metric.title,
                "text": _described(panel, names),
                "broken": _broken(panel),
            }
        age_rows = _age_rows(ages, model, styles)
        if any(row["age"] > 0 for row in age_rows):
            spec = charts.ages_panel(mine["ppl"], styles)
            figures.insert(1, _drawing(drawings, f"ages-{number}", "ages", spec, charts.columns(age_rows, AGE_FIELDS)))
            figures[1] |= {
                "metric": "ages",
                "title": "States met in training: share at least this old",
                "text": f"Step curves: share of training sequences that began from a state at least so many tokens old, {card.models[model].label}.",
                "broken": [],
            }
        length = mine["ppl"].length
        sections.append(
            {
                "card": card.models[model],
                "figures": figures,
                "headline": text.headline(card.models[model].label, overall, shown_names),
                "findings": text.findings(card.models[model].label, card.models[model].context, length, overall, shown_names),
                "meaning": _meaning(overall),
                "verdicts": overall,
                "by_seed": by_seed,
                "ages": _ages_note(age_rows, ages, model, styles, length),
                "tables": [_data_table(mine[metric.name], styles) for metric in METRICS],
                "paper": card.models[model].paper_model,
            }
        )
    certainties = list(dict.fromkeys(text.certainty(section["verdicts"]) for section in sections if section["verdicts"]))
    has_reset = any(RESET in by_arm for by_arm in ranges.values())
    drawings += [chart for section in further for chart in section.charts]
    for section in further:
        ranges |= section.extents
    arms_seen = {row["arm"] for section in sections for row in section["verdicts"]} | set(names)
    return page.render(
        "curves.html.j2",
        title=_title(about, card),
        about=about,
        beyond_paper=text.listing(
            [card.models[name].label for name in models if card.models[name].architecture not in about.architectures]
        ),
        card=card,
        keys=json.dumps(dict(keys), sort_keys=True, ensure_ascii=False),
        sections=sections,
        further=[section.html for section in further],
        certainties=certainties,
        names=names | {"base": "base"},
        styles=by_name,
        legend=[by_name[name] for name in names],
        reset_label=RESET_LABEL if has_reset else None,
        drawings={"charts": drawings, "extents": ranges, "arms": [*names, *([RESET] if has_reset else [])]},
        siblings={name: output[name].name for name in OUTPUTS if name != "html"},
        has_paper=any(row["kind"] == "paper" for panel in panels for row in panel.rows),
        has_control="control" in arms_seen,
        rows=drawn.height,
    )


def _drawing(drawings: list[dict[str, Any]], name: str, metric: str, spec: Spec, curves: Sequence[Row]) -> dict[str, Any]:
    """Add a chart to those the page's script draws; the figure element for it only needs its name."""
    near = next(parameter["value"] for parameter in spec["params"] if parameter["name"] == "x_low")
    drawings.append({"id": name, "metric": metric, "near": near, "spec": spec, "curves": curves})
    return {"id": name}


def _verdict_rows(verdicts: polars.DataFrame, model: str, order: Mapping[str, int]) -> tuple[list[Row], list[Row]]:
    """The model's verdicts over all seeds and those of single seeds, arms in the order of the legend."""
    mine = verdicts.filter(polars.col("model") == model)
    rows = sorted(
        mine.iter_rows(named=True),
        key=lambda row: (order.get(row["arm"], len(order)), row["arm"], row["seed"] is not None, row["seed"] or 0),
    )
    overall = [row for row in rows if row["seed"] is None]
    seeds = [row for row in rows if row["seed"] is not None]
    repeated = {row["arm"] for row in seeds if sum(other["arm"] == row["arm"] for other in seeds) > 1}
    return overall, [row for row in seeds if row["arm"] in repeated]


def _meaning(rows: Sequence[Row]) -> str:
    """The caption of a table of verdicts: what its second lines are, and where "far" is."""
    gaps = text.listing(sorted({row["verdict_interval"] for row in rows if row["verdict_interval"]}))
    others = text.listing(sorted({row["interval"] for row in rows if row["interval"]}))
    far = sorted({(row["far_from"], row["far_to"]) for row in rows if row["far_from"] is not None})
    where = "; ".join(f"positions {first:,} to {last:,}" for first, last in far) or "not reached by this evaluation"
    tolerance = ", ".join(f"{value:g}" for value in sorted({row["tolerance"] for row in rows}))
    return (
        f"Far: {where}. Tolerance {tolerance} nats. Second lines are intervals. Gap: simultaneous over positions, {gaps or 'none'}. "
        f"All others: {others or 'none'}. Over seeds, from three seeds on: Student's t interval."
    )


def _described(panel: Panel, names: Mapping[str, str]) -> str:
    """What a reader who cannot see the chart is told: the axes, and where every curve begins and ends."""
    ends = []
    write = text.perplexity if panel.metric.logarithmic else text.nats
    for arm, label in names.items():
        values = [row for row in panel.rows if row["kind"] == "mean" and row["arm"] == arm]
        if values:
            inside = max(
                (row for row in values if row["position"] <= panel.train_length),
                key=lambda row: row["position"],
                default=values[0],
            )
            ends.append(
                f"{label}: {write(inside['value'])} at position {inside['position']:,.0f}, {write(values[-1]['value'])} at {values[-1]['position']:,.0f}"
            )
    return f"{panel.metric.title}, {panel.title}, trained on {panel.train_length:,} tokens. {'. '.join(ends)}. All values are in the data table below."


def _broken(panel: Panel) -> list[str]:
    lines = []
    for row in panel.rows:
        if row["kind"] == "broken":
            whose = f"{row['label']}, seed {row['seed']}" if row["seed"].isdigit() else row["label"]
            lines.append(f"{whose}: not a number from position {row['position']:,.0f} on")
    return lines


def _ages_note(age_rows: Sequence[Row], ages: polars.DataFrame, model: str, styles: Sequence[ArmStyle], length: int) -> list[str]:
    notes = []
    for style in styles:
        arm = ages.filter((polars.col("model") == model) & (polars.col("arm") == style.name))
        if arm.is_empty():
            continue
        if arm["age"].null_count() == arm.height:
            notes.append(f"{style.label}: noise, a state of no age")
            continue
        zero = [row["share"] for row in age_rows if row["arm"] == style.name and row["age"] == 0]
        oldest = max(row["age"] for row in age_rows if row["arm"] == style.name)
        started = f"{text.share(min(zero))}" if zero else "0 %"
        if zero and text.share(max(zero)) != started:
            started = f"{started} to {text.share(max(zero))}"
        beyond = ", beyond this axis" if oldest > length else ""
        notes.append(
            f"{style.label}: {started} of the sequences from the zero state"
            + (f", oldest state {oldest:,.0f} tokens{beyond}" if oldest else "")
        )
    return notes


def _data_table(panel: Panel, styles: Sequence[ArmStyle]) -> dict[str, Any]:
    """A metric as a table for reading: a line per position, a column per curve over all seeds."""
    columns = [*((style.name, style.label) for style in styles), (RESET, RESET_LABEL)]
    cells: dict[float, dict[str, Row]] = {}
    for row in panel.rows:
        if row["kind"] in ("mean", "reference", "broken"):
            cells.setdefault(row["position"], {}).setdefault(row["arm"], row)
    used = [column for column in columns if any(column[0] in line for line in cells.values())]
    write = text.perplexity if panel.metric.logarithmic else text.nats
    lines = []
    for position in sorted(cells):
        line = [_cell(cells[position].get(arm), write) for arm, _ in used]
        lines.append((f"{position:,.4g}" if position < 1000 else f"{position:,.0f}", line))
    return {
        "title": panel.metric.title,
        "unit": "perplexity" if panel.metric.logarithmic else "nats",
        "columns": [label for _, label in used],
        "lines": lines,
    }


def _cell(row: Row | None, write: Callable[[Any], str]) -> str:
    if row is None:
        return text.NONE
    if row["kind"] == "broken":
        return "not a number"
    return text.estimate({"x": row["value"], "x_low": row["low"], "x_high": row["high"]}, "x", write)
