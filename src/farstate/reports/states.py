"""Pages of the states: the whole model by position (the paper's Figure 4), and its heads by drift (Figure 9).

The stage reads the tables of `farstate.evaluation.compare_states` and draws them. It filters, counts and formats; every number
on the page is in a table, in the comparison's manifest or in the parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars

from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.reference import paper_points
from farstate.reports import agreement, charts, page, state_charts, state_text, text
from farstate.reports.charts import Metric, Panel, Row
from farstate.reports.context import Context, read_context
from farstate.reports.figures import About
from farstate.reports.page import OUTPUTS, Section
from farstate.reports.panels import CURVE_FIELDS, add_drawing, arm_rows, broken, chart_row, data_table, described
from farstate.reports.tables import read_table, rounded
from farstate.reports.text import Finding
from farstate.reports.theme import ArmStyle, Spec, arm_styles
from farstate.runs import BASE

CURVE_COLUMNS = (
    *("model", "arm", "seed", "train_length", "layer", "head", "part", "statistic", "against", "position", "position_low"),
    *("position_high", "value", "low", "high", "n_documents", "n_stretches", "n_tokens"),
)
HEAD_COLUMNS = (
    *("model", "arm", "seed", "layer", "head", "std_near", "std_far", "drift", "low", "high", "beyond", "rank"),
    *("against_base", "against_base_low", "against_base_high"),
)
RECURRENT = "recurrent"
PAPER_MODEL = "mamba2 (size not stated)"
"""The model of the digitised values, as their file names it."""
_LAYERS, _HEADS, _RANKED, _LISTED, _BESIDE = 12, 6, 24, 64, 4
"""At most so many: panels of layers, panels of heads, heads in the ranking, heads in the table, panels of heads in a section."""
_LEAST = 1e-9
"""Span of an axis on which everything is zero."""


@dataclass(frozen=True)
class Drawn:
    """A panel, and where on the page it stands: `large`, `beside`, `small`, or with the heads."""

    panel: Panel
    place: str


def draw(
    about: About,
    inputs: Mapping[str, Sequence[Path]],
    output: Mapping[str, Path],
    context: dict[str, Any],
    keys: Mapping[str, Any],
) -> None:
    """Draw a comparison of states (`page.Draw`).

    `about.family` is `whole` or `heads`; inputs: under "states" one directory with states and heads (`.parquet`), and a summary in its
    manifest; the context's figure says in `heads` which are drawn, None: those that drift most.

    Raises:
        FarstateError: as `page.Draw`; a head is asked for that no model has.
    """
    page.check_outputs(output)
    (directory,) = inputs["states"]
    card = read_context(context)
    curves, heads, manifest = _tables(directory)
    models = _models(curves, card, directory)
    styles = arm_styles(curves["arm"].unique())
    asked = card.figure.get("heads")
    if about.family == "heads":
        _check_heads(asked, heads, models, directory)
    shown = {model: _heads_shown(heads, model, asked) for model in models}
    kept: list[polars.DataFrame] = []
    reader = _Reader(about, card, curves, styles, kept)
    of_model = {model: reader.whole(model) if about.family == "whole" else reader.heads(model, shown[model]) for model in models}
    specification = _sheet(about, card, models, of_model, heads, styles, manifest)
    html = _page(about, card, models, of_model, heads, shown, styles, manifest, output, keys)
    drawn = polars.concat(kept).unique(maintain_order=True)
    if about.family == "heads":
        drawn = polars.concat([drawn, heads], how="diagonal")
    page.write(output, html, specification, drawn, "lower states.bins_per_octave or the number of seeds")


def section(about: About, directories: Sequence[Path], card: Context, styles: Sequence[ArmStyle]) -> Section:
    """The part of a page of perplexity that says whether states drift, and which heads do.

    Args:
        about: what the page asks.
        directories: one, with states and heads (`.parquet`) of a comparison, and a summary in its manifest.
        card: what the page says of its models.
        styles: of the page's arms.

    Raises:
        FarstateError: as `draw`.
    """
    (directory,) = directories
    curves, heads, manifest = _tables(directory)
    models = _models(curves, card, directory)
    names = {style.name: style.label for style in styles}
    drawings: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    reader = _Reader(about, card, curves, styles, [])
    drawn = {
        model: [
            *(one for one in reader.whole(model) if one.place in ("large", "beside")),
            *(one for one in reader.heads(model, _heads_shown(heads, model, None)[:_BESIDE]) if one.place == "heads"),
        ]
        for model in models
    }
    ranges = charts.extents(one.panel for model in models for one in drawn[model])
    for number, model in enumerate(models):
        label = card.models[model].label
        summary = _summary(manifest, model)
        figures = _charted(model, drawn[model], number, ranges, styles, drawings)
        rows = _head_rows(heads, model, styles)
        whole, findings = state_text.whole(label, summary, names)
        of_heads, further = state_text.heads(label, summary, _overall(heads, model).to_dicts(), names)
        parts.append(
            {
                **{"name": model, "card": card.models[model], "figures": figures, "maps": [], "ranking": None, "ranked": 0},
                **_head_drawings(number, model, rows, styles, drawings, card.models[model]),
                **{"headlines": [whole, of_heads], "findings": [*findings, *further], "heads": _head_table(rows, styles)},
                "tables": [data_table(one.panel, styles, state_text.number, one.panel.metric.axis) for one in drawn[model]],
            }
        )
    lines = [line for model in models for line in state_text.lines(_summary(manifest, model), names)]
    return Section(
        html=page.fragment(
            "states_section.html.j2",
            sections=parts,
            legend=styles,
            interval=manifest["interval"],
            interval_of_heads=manifest["interval_of_heads"],
            certainty=state_text.certainty(manifest, lines),
        ),
        charts=drawings,
        extents=ranges,
        leads=[line for part in parts for line in part["headlines"]],
    )


def _tables(directory: Path) -> tuple[polars.DataFrame, polars.DataFrame, dict[str, Any]]:
    """The tables of a comparison of states, and its manifest."""
    curves = read_table(directory, "states", CURVE_COLUMNS).sort(
        "model", "arm", "seed", "layer", "head", "part", "statistic", "position", nulls_last=False
    )
    heads = read_table(directory, "heads", HEAD_COLUMNS, may_be_empty=True)
    manifest = read_manifest(directory)
    if "summary" not in manifest:
        raise FarstateError(
            f"{directory}: its manifest has no summary; it was written by another version, delete it and run again"
        )
    return curves, heads, manifest


def _models(curves: polars.DataFrame, card: Context, directory: Path) -> list[str]:
    """In the order of the page."""
    models = [name for name in card.models if name in set(curves["model"])]
    if unknown := sorted(set(curves["model"]) - set(models)):
        raise FarstateError(f"{directory / 'states.parquet'} holds {', '.join(unknown)}, of which the context says nothing")
    return models


class _Reader:
    """Panels of a model from the table of curves; what they are made of is collected in `kept`."""

    def __init__(
        self, about: About, card: Context, curves: polars.DataFrame, styles: Sequence[ArmStyle], kept: list[polars.DataFrame]
    ) -> None:
        self.about, self.card, self.curves, self.styles, self.kept = about, card, curves, styles, kept
        self.length = int(max(curves["position_high"].to_list()))

    def whole(self, model: str) -> list[Drawn]:
        """The whole model, then its layers and what else it carries."""
        found = [
            self._drawn(
                model, "large", Metric("std", "Standard deviation of all entries", "std of all entries", False, 340, _LEAST)
            ),
            self._drawn(model, "beside", Metric("norm", "Norm of the state, all layers", "norm", False, 210, _LEAST), "norm"),
            self._drawn(
                model, "beside", Metric("largest", "Largest absolute entry", "largest |entry|", False, 210, _LEAST), "largest"
            ),
        ]
        mine = self.curves.filter(polars.col("model") == model)
        layers = mine.filter(polars.col("part") == RECURRENT)["layer"].drop_nulls().unique().sort().to_list()
        for layer in _spread(layers, _LAYERS):
            title = f"Layer {layer}: standard deviation"
            found.append(self._drawn(model, "small", Metric(f"std_{layer}", title, "std", False, 150, _LEAST), layer=layer))
        found.append(self._drawn(model, "other", Metric("mean", "Mean of all entries", "mean", False, 150, _LEAST), "mean"))
        for part in mine.filter(polars.col("layer").is_null() & (polars.col("part") != RECURRENT))["part"].unique().sort():
            title = f"{_part(part)}: standard deviation"
            found.append(self._drawn(model, "other", Metric(f"std_{part}", title, "std", False, 150, _LEAST), part=part))
        return [drawn for drawn in found if drawn.panel.rows]

    def heads(self, model: str, shown: Sequence[tuple[int, int]]) -> list[Drawn]:
        """Standard deviation and effective rank of some heads."""
        found = []
        for layer, head in shown:
            name = f"Layer {layer}, head {head}"
            metric = Metric(f"std_{layer}_{head}", f"{name}: standard deviation", "std", False, 190, _LEAST)
            found.append(self._drawn(model, "heads", metric, layer=layer, head=head))
        for layer, head in shown:
            name = f"Layer {layer}, head {head}"
            metric = Metric(f"rank_{layer}_{head}", f"{name}: effective rank", "effective rank", False, 120, 1.0)
            found.append(self._drawn(model, "ranks", metric, "effective_rank", layer=layer, head=head))
        return [drawn for drawn in found if drawn.panel.rows]

    def _drawn(
        self,
        model: str,
        place: str,
        metric: Metric,
        statistic: str = "std",
        *,
        layer: int | None = None,
        head: int | None = None,
        part: str = RECURRENT,
    ) -> Drawn:
        card = self.card.models[model]
        mine = self.curves.filter(
            (polars.col("model") == model)
            & (polars.col("statistic") == statistic)
            & (polars.col("part") == part)
            & (polars.col("against") == "")
            & polars.col("layer").eq_missing(layer)
            & polars.col("head").eq_missing(head)
        )
        self.kept.append(mine)
        rows: list[Row] = []
        for style in self.styles:
            rows += arm_rows(mine.filter(polars.col("arm") == style.name), style)
        if (
            metric.name == "std"
            and self.about.points is not None
            and card.paper_model is not None
            and card.architecture == "mamba2"
        ):
            rows += self._paper_rows()
        return Drawn(Panel(model, card.label, metric, card.context, self.length, rows), place)

    def _paper_rows(self) -> list[Row]:
        labels = {style.name: style.label for style in self.styles}
        rows = []
        for point in paper_points(self.about.points or "", PAPER_MODEL):
            arm = self.about.methods.get(point.method, "")
            if arm in labels:
                low, high = (rounded(point.value + sign * point.tolerance) for sign in (-1, 1))
                note = "read off the paper's figure, whose model's size is not stated; low to high is the reading tolerance"
                rows.append(
                    chart_row("paper", arm, labels[arm], "not given", point.position, rounded(point.value), low, high, None, note)
                )
        return rows


def _part(name: str) -> str:
    """An auxiliary state in words."""
    if name == "conv" or name.startswith("conv_"):
        return "Convolution state" + (f" of {name.removeprefix('conv_')}" if name != "conv" else "")
    return name.replace("_", " ").capitalize()


def _spread(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of them, evenly, the ends among them."""
    if len(items) <= count:
        return list(items)
    return [items[number] for number in np.unique(np.rint(np.linspace(0, len(items) - 1, count)).astype(int))]


def _check_heads(asked: Any, heads: polars.DataFrame, models: Sequence[str], directory: Path) -> None:
    known = set(heads.select("layer", "head").unique().iter_rows())
    if not known:
        raise FarstateError(f"{directory / 'heads.parquet'}: no model of the figure has a recurrent state with heads")
    for layer, head in asked or ():
        if (layer, head) not in known:
            ranges = []
            for model in models:
                mine = heads.filter(polars.col("model") == model)
                if not mine.is_empty():
                    counts = f"layers {_range(mine['layer'])}, heads {_range(mine['head'])}"
                    ranges.append(f"{model}: {counts}")
            raise FarstateError(
                f"figure.heads: no model has layer {layer}, head {head}, both counted from 0 ({'; '.join(ranges)}); change it or give null"
            )


def _range(values: polars.Series) -> str:
    return f"{min(values.to_list())} to {max(values.to_list())}"


def _heads_shown(heads: polars.DataFrame, model: str, asked: Any) -> list[tuple[int, int]]:
    """Those asked for that the model has, or those that drift most in the base."""
    mine = _overall(heads, model)
    if asked is not None:
        known = set(mine.select("layer", "head").iter_rows())
        return [(int(layer), int(head)) for layer, head in asked if (layer, head) in known]
    base = mine.filter((polars.col("arm") == BASE) & polars.col("rank").is_not_null()).sort("rank")
    if base.is_empty():
        base = mine.filter(polars.col("arm") == BASE).sort("layer", "head")
    return [(int(layer), int(head)) for layer, head in base.head(_HEADS).select("layer", "head").iter_rows()]


def _overall(heads: polars.DataFrame, model: str) -> polars.DataFrame:
    return heads.filter((polars.col("model") == model) & polars.col("seed").is_null())


# Rows of the charts of heads -------------------------------------------------------------------------------


def _head_rows(heads: polars.DataFrame, model: str, styles: Sequence[ArmStyle]) -> list[Row]:
    """All heads of all arms, in the order of the legend and of the base's ranks."""
    mine = _overall(heads, model)
    base = {(row["layer"], row["head"]): row["rank"] for row in mine.filter(polars.col("arm") == BASE).iter_rows(named=True)}
    rows = []
    for style in styles:
        for record in mine.filter(polars.col("arm") == style.name).sort("layer", "head").iter_rows(named=True):
            key = record["layer"], record["head"]
            rows.append(
                {
                    **{"arm": style.name, "label": style.label, "layer": record["layer"], "head": record["head"]},
                    **{name: _rounded(record[name]) for name in ("drift", "low", "high")},
                    "beyond": record["beyond"],
                    "near": state_text.number(record["std_near"]),
                    "far": state_text.number(record["std_far"]),
                    "against": text.estimate(record, "against_base", state_text.signed)
                    if text.finite(record["against_base"])
                    else None,
                    "rank": "none" if record["rank"] is None else str(record["rank"]),
                    "place": f"layer {record['layer']}, head {record['head']}",
                    "order": base.get(key) or 10**9,
                }
            )
    return rows


def _rounded(value: Any) -> float | None:
    return rounded(float(value)) if text.finite(value) else None


def _limit(rows: Sequence[Row]) -> float:
    """The end of the scale of drift; a doubling at least, so that noise is not painted like a drift."""
    return max([1.0, *(abs(row["drift"]) for row in rows if row["drift"] is not None)])


def _ranked(rows: Sequence[Row]) -> list[Row]:
    """The heads whose base drifts most, all arms."""
    order = sorted({row["order"] for row in rows if row["order"] < 10**9})[:_RANKED]
    return [row for row in rows if order and row["order"] <= order[-1] and row["drift"] is not None]


# Static figure ---------------------------------------------------------------------------------------------


def _sheet(
    about: About,
    card: Context,
    models: Sequence[str],
    of_model: Mapping[str, Sequence[Drawn]],
    heads: polars.DataFrame,
    styles: Sequence[ArmStyle],
    manifest: Mapping[str, Any],
) -> Spec:
    """Three panels a row: what stands large, then layers or heads; maps and ranking above the heads."""
    panels: list[Panel] = []
    for model in models:
        chosen = [one.panel for one in of_model[model] if one.place in ("large", "beside", "small", "heads")][:9]
        panels += [replace(panel, model=f"{model}/{number // 3}") for number, panel in enumerate(chosen)]
    lines = [f"{text.listing([card.models[model].label for model in models])}. {card.budget}".strip()]
    lines.append(f"Bands: {manifest['interval']}. Positions below an eighth of the training length are on the page.")
    sheet = charts.sheet(panels, styles, card.titled(about.title), lines)
    if about.family == "heads":
        above: list[Spec] = []
        below: list[Spec] = []
        for model in models:
            rows = _head_rows(heads, model, styles)
            limit, label = _limit(rows), card.models[model].label
            maps = [
                state_charts.static_map(f"{label}: {style.label}", of_arm, limit)
                for style in styles
                if (of_arm := [row for row in rows if row["arm"] == style.name])
            ]
            for start in range(0, len(maps), 3):
                above.append({"hconcat": maps[start : start + 3], "spacing": 28})
            if ranked := _ranked(rows):
                below.append(state_charts.static_ranking(f"{label}: heads by drift", ranked, styles))
        # Maps colour drift, everything else arms: one legend each.
        rankings = [{"hconcat": below[start : start + 3], "spacing": 28} for start in range(0, len(below), 3)]
        arms = {"vconcat": [*rankings, *sheet["vconcat"]], "spacing": sheet["spacing"], "resolve": sheet["resolve"]}
        sheet |= {"vconcat": [*above, arms], "resolve": {"scale": dict.fromkeys(("color", "shape"), "independent")}}
    return sheet


# Page ------------------------------------------------------------------------------------------------------


def _page(
    about: About,
    card: Context,
    models: Sequence[str],
    of_model: Mapping[str, Sequence[Drawn]],
    heads: polars.DataFrame,
    shown: Mapping[str, Sequence[tuple[int, int]]],
    styles: Sequence[ArmStyle],
    manifest: Mapping[str, Any],
    output: Mapping[str, Path],
    keys: Mapping[str, Any],
) -> str:
    ranges = charts.extents(one.panel for model in models for one in of_model[model])
    names = {style.name: style.label for style in styles}
    drawings: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []
    for number, model in enumerate(models):
        figures = _charted(model, of_model[model], number, ranges, styles, drawings)
        summary = _summary(manifest, model)
        rows = _head_rows(heads, model, styles)
        section: dict[str, Any] = {
            "name": model,
            "card": card.models[model],
            "figures": figures,
            "tables": [data_table(one.panel, styles, state_text.number, one.panel.metric.axis) for one in of_model[model]],
            "lines": state_text.lines(summary, names),
            "maps": [],
            "ranking": None,
            "ranked": 0,
            "heads": [],
        }
        if about.family == "whole":
            section["headline"], section["findings"] = state_text.whole(card.models[model].label, summary, names)
        else:
            section["headline"], section["findings"] = state_text.heads(
                card.models[model].label, summary, _overall(heads, model).to_dicts(), names
            )
            section |= _head_drawings(number, model, rows, styles, drawings, card.models[model])
            section["heads"] = _head_table(rows, styles)
        section["findings"] += _remark(about, card, model, summary)
        section["few"] = _few(about, heads, model, of_model[model])
        sections.append(section)
    of_paper = [name for name in models if card.models[name].architecture in about.architectures] or models
    rule = agreement.of_states if about.family == "whole" else agreement.of_heads
    claims = [claim for name in of_paper for claim in rule(card.models[name].label, _summary(manifest, name))]
    compared = [
        one
        for model in models
        for drawn in of_model[model]
        if drawn.panel.metric.name == "std"
        for one in agreement.compare(f"std of {drawn.panel.title}", drawn.panel.rows, "position")
    ]
    return page.render(
        "states.html.j2",
        record=agreement.record(
            about,
            card,
            keys,
            agreement.judge(claims, compared, card.scale),
            [section["headline"] for section in sections],
            compared=compared,
            remark=state_text.PAPER_WHOLE if about.family == "whole" else state_text.PAPER_HEADS,
        ),
        title=card.titled(about.title),
        about=about,
        family=about.family,
        card=card,
        keys=json.dumps(dict(keys), sort_keys=True, ensure_ascii=False),
        sections=sections,
        interval=manifest["interval"],
        interval_of_heads=manifest["interval_of_heads"],
        certainty=state_text.certainty(manifest, [line for section in sections for line in section["lines"]]),
        legend=styles,
        styles={style.name: style for style in styles},
        drawings=page.group(output, drawings, ranges, list(names)),
        siblings={name: output[name].name for name in OUTPUTS if name != "html"},
        has_paper=any(row["kind"] == "paper" for model in models for one in of_model[model] for row in one.panel.rows),
        has_control="control" in names,
        asked=card.figure.get("heads") is not None,
        beyond_paper=text.listing(
            [card.models[name].label for name in models if card.models[name].architecture not in about.architectures]
        ),
        channels=text.listing([card.models[name].label for name in models if card.models[name].architecture == "mamba1"]),
    )


def _charted(
    model: str,
    drawn: Sequence[Drawn],
    number: int,
    ranges: Mapping[str, Any],
    styles: Sequence[ArmStyle],
    drawings: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Add the panels of the model of this number to those that the page's script draws."""
    names = {style.name: style.label for style in styles}
    figures = []
    for one in drawn:
        panel = one.panel
        spec = charts.screen_panel(panel, styles, charts.joined(ranges.get(panel.metric.name, {}), "near"))
        figure = add_drawing(
            drawings, f"{panel.metric.name}-{number}", panel.metric.name, model, spec, charts.columns(panel.rows, CURVE_FIELDS)
        )
        figure |= {
            "place": one.place,
            "title": panel.metric.title,
            "text": described(panel, names, state_text.number),
            "broken": broken(panel),
        }
        figures.append(figure)
    return figures


def _summary(manifest: Mapping[str, Any], model: str) -> dict[str, Row]:
    """By arm what the comparison says of a model, over all seeds."""
    return {record["arm"]: record for record in manifest["summary"] if record["model"] == model and record["seed"] is None}


def _head_drawings(
    number: int, model: str, rows: Sequence[Row], styles: Sequence[ArmStyle], drawings: list[dict[str, Any]], card: Any
) -> dict[str, Any]:
    """The map of each arm, and the ranking."""
    limit = _limit(rows)
    maps = []
    for place, style in enumerate(styles):
        mine = [row for row in rows if row["arm"] == style.name]
        if not mine:
            continue
        beyond = sum(bool(row["beyond"]) for row in mine)
        heading = f"{style.label}: {beyond} of {len(mine)} heads of {card.label} lie beyond the simultaneous interval. All are in the table below."
        spec = state_charts.screen_map(heading, mine, limit)
        maps.append(
            {"id": f"map-{place}-{number}", "title": f"{style.label}: drift by layer and head", "text": heading, "broken": []}
        )
        drawings.append(
            {
                **{"id": maps[-1]["id"], "metric": "map", "model": model, "near": 1},
                **{"spec": spec, "curves": charts.columns(mine, _VARYING)},
            }
        )
    found: dict[str, Any] = {"maps": maps}
    if ranked := _ranked(rows):
        heads = len({row["place"] for row in ranked})
        heading = f"Drift of the {heads} heads that drift most in the base model, all arms, {card.label}. The values are in the table below."
        spec = state_charts.screen_ranking(heading, ranked, styles)
        found["ranking"] = {
            "id": f"ranking-{number}",
            "title": "Heads in the order of the base model's drift",
            "text": heading,
            "broken": [],
        }
        found["ranked"] = heads
        drawings.append(
            {
                **{"id": found["ranking"]["id"], "metric": "ranking", "model": model, "near": 1},
                **{"spec": spec, "curves": charts.columns(ranked, _VARYING)},
            }
        )
    return found


_VARYING = ("layer", "head", "drift", "low", "high", "beyond", "near", "far", "against", "rank", "place", "order")


def _head_table(rows: Sequence[Row], styles: Sequence[ArmStyle]) -> list[Row]:
    """A line per head in the order of the base's drift, a cell per arm."""
    by_head: dict[tuple[int, str], dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: (row["order"], row["layer"], row["head"])):
        by_head.setdefault((row["order"], row["place"]), {})[row["arm"]] = row
    lines = []
    for (_, place), of_arm in list(by_head.items())[:_LISTED]:
        cells = []
        for style in styles:
            mine = of_arm.get(style.name)
            cells.append({"label": style.label, "drift": "–", "interval": "", "beyond": None, "against": None, "ends": ""})
            if mine is not None and mine["drift"] is not None:
                interval = (
                    f"{state_text.signed(mine['low'])} to {state_text.signed(mine['high'])}" if mine["low"] is not None else ""
                )
                cells[-1] |= {"drift": state_text.signed(mine["drift"]), "interval": interval, "beyond": mine["beyond"]}
                cells[-1] |= {"against": mine["against"], "ends": f"{mine['near']} → {mine['far']}"}
        lines.append({"place": place, "cells": cells})
    return lines


def _few(about: About, heads: polars.DataFrame, model: str, drawn: Sequence[Drawn]) -> str:
    """What is left out of a page of many layers or heads."""
    mine = _overall(heads, model).filter(polars.col("arm") == BASE)
    if about.family == "heads":
        if mine.height > _LISTED:
            return f"The table lists the {_LISTED} heads of {mine.height:,} that drift most; the parquet file has all."
        return ""
    layers, panels = mine["layer"].n_unique(), sum(one.place == "small" for one in drawn)
    return (
        f"{panels} of {layers} layers are drawn, evenly spread; the parquet file of the comparison has all."
        if panels < layers
        else ""
    )


def _remark(about: About, card: Context, model: str, summary: Mapping[str, Row]) -> list[Finding]:
    """What the paper found, beside what was found here."""
    passing = summary.get("state_passing")
    if passing is None or not text.finite(passing.get("n_bins")):
        return []
    if about.family == "whole":
        return [Finding("In the paper:", state_text.paper_whole(passing))]
    return [Finding("In the paper:", state_text.PAPER_HEADS)]
