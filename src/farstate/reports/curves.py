"""Pages of perplexity by position, every arm, every model (the paper's Figures 1, 5 and 10; `farstate.reports.figures`).

The stage reads the tables of `farstate.evaluation.compare` and draws them. It filters and formats; every
number on the page is in a table or in the parameters.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars

from farstate.errors import FarstateError
from farstate.reference import paper_points
from farstate.reports import agreement, charts, page, text
from farstate.reports.charts import METRICS, RESET, RESET_LABEL, RESET_STYLE, Panel, Row
from farstate.reports.context import Context, read_context
from farstate.reports.figures import About
from farstate.reports.page import OUTPUTS, Section
from farstate.reports.panels import (
    CURVE_COLUMNS,
    CURVE_FIELDS,
    VERDICT_COLUMNS,
    add_drawing,
    arm_rows,
    broken,
    chart_row,
    checked,
    curve_rows,
    data_table,
    described,
    last_position,
)
from farstate.reports.tables import read_table, rounded
from farstate.reports.theme import ArmStyle, arm_styles

AGE_COLUMNS = ("model", "arm", "seed", "age", "share")
AGE_FIELDS = ("age", "share")
METRICS_DRAWN = tuple(metric.name for metric in METRICS)
SECTIONS = {"remembrance": "remembrance", "states": "states", "task": "passkey"}
"""By role of the inputs, the module whose `section` draws it below the curves."""
RESETS = {"ppl": "ppl_reset", "excess_nll_base": "reset_excess"}
"""By metric, the base model's line with its state reset: its own windows are the base's, so its excess is one over those."""


def draw(
    about: About,
    inputs: Mapping[str, Sequence[Path]],
    output: Mapping[str, Path],
    context: dict[str, Any],
    keys: Mapping[str, Any],
) -> None:
    """Draw the tables of a comparison (`page.Draw`).

    Inputs: under "comparison" one directory with curves, references, verdicts and ages (`.parquet`); under the roles of SECTIONS, if at all,
    those of the `page.Section` that the module's `section(about, directories, card, styles)` returns; under "reach", if at all, those of
    `farstate.reports.diagnosis.lead`.

    Raises:
        FarstateError: as `page.Draw`; a perplexity is not positive.
    """
    page.check_outputs(output)
    (comparison,) = inputs["comparison"]
    card = read_context(context)
    curves = read_table(comparison, "curves", CURVE_COLUMNS)
    references = read_table(comparison, "references", CURVE_COLUMNS)
    verdicts = read_table(comparison, "verdicts", VERDICT_COLUMNS)
    ages = read_table(comparison, "ages", AGE_COLUMNS, may_be_empty=True)
    drawn = checked(curves, METRICS_DRAWN, comparison / "curves.parquet")
    resets = checked(
        references.filter((polars.col("arm") == "base") & polars.col("seed").is_null()),
        tuple(RESETS.values()),
        comparison / "references.parquet",
    )
    models = [name for name in card.models if name in set(drawn["model"])]
    if unknown := sorted(set(drawn["model"]) - set(models)):
        raise FarstateError(f"{comparison / 'curves.parquet'} holds {', '.join(unknown)}, of which the context says nothing")
    styles = arm_styles(curves["arm"].unique())
    length = last_position(drawn, verdicts)
    panels = [_panel(about, drawn, resets, card, model, metric, styles, length) for model in models for metric in METRICS]
    further: list[Section] = []
    for role, module in SECTIONS.items():
        if inputs.get(role):  # a module is loaded only where a page has its section
            further.append(importlib.import_module(f"farstate.reports.{module}").section(about, inputs[role], card, styles))
    lead: Section | None = None
    if inputs.get("reach"):
        labels = {model: card.models[model].label for model in models}
        lead = importlib.import_module("farstate.reports.diagnosis").lead(inputs, labels, card.figure, card.posttrain)

    specification = charts.sheet(panels, [*styles, RESET_STYLE], card.titled(about.title), _subtitle(card, models, verdicts))
    specification["vconcat"] += [row for section in further for row in section.sheet]
    html = _page(about, card, models, panels, styles, drawn, verdicts, ages, output, keys, further, lead)
    page.write(output, html, specification, drawn, "lower evaluate.bins_per_octave or the number of seeds")


# Reading ---------------------------------------------------------------------------------------------------


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
        rows += arm_rows(arm, style)
    if metric.name in RESETS:
        line = resets.filter((polars.col("model") == model) & (polars.col("metric") == RESETS[metric.name]))
        rows += curve_rows(line, "reference", RESET, RESET_LABEL, "–", "reference, not an arm")
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
        rows.append(
            chart_row("paper", arm, labels[arm], "not given", point.position, rounded(point.value), low, high, None, note)
        )
    return rows


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
    lead: Section | None,
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
            spec = charts.screen_panel(panel, [*styles, RESET_STYLE], charts.joined(ranges.get(metric.name, {}), "near"))
            figures.append(
                add_drawing(
                    drawings, f"{metric.name}-{number}", metric.name, model, spec, charts.columns(panel.rows, CURVE_FIELDS)
                )
            )
            figures[-1] |= {
                "metric": metric.name,
                "title": metric.title,
                "text": described(panel, names),
                "broken": broken(panel),
            }
        age_rows = _age_rows(ages, model, styles)
        if any(row["age"] > 0 for row in age_rows):
            spec = charts.ages_panel(mine["ppl"], styles)
            figures.insert(1, add_drawing(drawings, f"ages-{number}", "ages", model, spec, charts.columns(age_rows, AGE_FIELDS)))
            figures[1] |= {
                "metric": "ages",
                "title": "States met in training: share at least this old",
                "text": f"Step curves: share of training sequences that began from a state at least so many tokens old, {card.models[model].label}.",
                "broken": [],
            }
        length = mine["ppl"].length
        headline = text.headline(card.models[model].label, overall, shown_names)
        findings = text.findings(card.models[model].label, card.models[model].context, length, overall, shown_names)
        if lead is not None and len(overall) == 1:  # nothing was to repair it: the lead says what to try
            headline, findings = lead.leads[number], findings[:1]
        sections.append(
            {
                "name": model,
                "card": card.models[model],
                "figures": figures,
                "headline": headline,
                "findings": findings,
                "meaning": _meaning(overall),
                "verdicts": overall,
                "by_seed": by_seed,
                "ages": _ages_note(age_rows, ages, model, styles, length),
                "tables": [data_table(mine[metric.name], [*styles, RESET_STYLE]) for metric in METRICS],
                "paper": card.models[model].paper_model,
            }
        )
    certainties = list(dict.fromkeys(text.certainty(section["verdicts"]) for section in sections if section["verdicts"]))
    comparisons = text.comparisons([row for section in sections for row in section["verdicts"]])
    has_reset = any(RESET in by_arm for by_arm in ranges.values())
    drawings += [chart for section in further for chart in section.charts]
    for section in further:
        ranges |= section.extents
    arms_seen = {row["arm"] for section in sections for row in section["verdicts"]} | set(names)
    return page.render(
        "curves.html.j2",
        record=_record(about, card, keys, dict(zip(models, sections, strict=True)), panels, further, lead),
        title=card.titled(about.title),
        about=about,
        beyond_paper=text.listing(
            [
                card.models[name].label
                for name in models
                if about.architectures and card.models[name].architecture not in about.architectures
            ]
        ),
        card=card,
        keys=json.dumps(dict(keys), sort_keys=True, ensure_ascii=False),
        sections=sections,
        further=[section.html for section in further],
        lead=lead.html if lead is not None else "",
        certainties=certainties,
        comparisons=comparisons,
        names=names | {"base": "base"},
        styles=by_name,
        legend=[by_name[name] for name in names],
        reset_label=RESET_LABEL if has_reset else None,
        drawings=page.group(output, drawings, ranges, [*names, *([RESET] if has_reset else [])]),
        siblings={name: output[name].name for name in OUTPUTS if name != "html"},
        has_paper=any(row["kind"] == "paper" for panel in panels for row in panel.rows),
        has_control="control" in arms_seen,
        rows=drawn.height,
    )


def _record(
    about: About,
    card: Context,
    keys: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]],
    panels: Sequence[Panel],
    further: Sequence[Section],
    lead: Section | None,
) -> dict[str, Any]:
    """What the page says, for machines; `sections`: by model what the template is given."""
    leads = [*(section["headline"] for section in sections.values()), *(lead for section in further for lead in section.leads)]
    compared = [
        one
        for panel in panels
        if panel.metric.name == "ppl"
        for one in agreement.compare(f"PPL of {panel.title}", panel.rows, "position", agreement.BETWEEN_FIGURES)
    ]
    compared += [one for section in further for one in section.compared]
    of_paper = [name for name in sections if card.models[name].architecture in about.architectures] or list(sections)
    claims = [
        claim
        for name in of_paper
        for claim in agreement.of_perplexity(
            card.models[name].label, sections[name]["verdicts"], noise="random_noise" in about.methods.values()
        )
    ]
    claims += [claim for section in further for claim in section.claims]
    return agreement.record(
        about,
        card,
        keys,
        agreement.judge(claims, compared, card.scale) if about.source else agreement.ours(leads if lead is None else lead.leads),
        leads,
        compared=compared,
        verdicts=[row for section in sections.values() for row in section["verdicts"]],
        said=[(section["card"].label, section["findings"]) for section in sections.values()],
    )


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
