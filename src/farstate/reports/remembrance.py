"""What models remember: a page of its own (the paper's Figure 13), and a section of pages of perplexity (its Figure 1, bottom).

Reads the table of `farstate.evaluation.compare_remembrance` and draws it. It filters and formats; every number on the page is in
that table or in the parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import polars

from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.reference import paper_points
from farstate.reports import agreement, charts, page, remembrance_charts, remembrance_text, text
from farstate.reports.charts import Row
from farstate.reports.context import Context, ModelCard, read_context
from farstate.reports.figures import About
from farstate.reports.page import OUTPUTS, Section
from farstate.reports.remembrance_charts import MEASURES, Measure, Panel
from farstate.reports.remembrance_text import Arm
from farstate.reports.tables import read_table, rounded
from farstate.reports.theme import ArmStyle, arm_styles

COLUMNS = (
    *("model", "arm", "seed", "train_length", "T", "measure", "target", "distance", "against", "start", "value", "low", "high"),
    *("band_low", "band_high", "n_documents", "n_stretches", "n_tokens", "n_seeds"),
)
FIELDS = ("start", "left", "place", "value", "low", "high", "tokens")
"""What varies along a curve of the charts (`farstate.reports.charts.columns`)."""
SINGLE, CURVE, FAR, SHARE, REACH = "T", "curve", "far", "far_share", "half_reach"
DISTANCES = tuple(measure.name for measure in MEASURES if not measure.difference)
POINTS, POINTS_LENGTH = "fig1e_effrem_T8192", 8192
METHODS = {"base": "base", "SP500": "state_passing"}
"""By the digitised values' method, the arm it is."""


@dataclass(frozen=True)
class _Tables:
    """The table of a comparison and what its manifest says of it; `mean`: the target that is a mean over last positions."""

    table: polars.DataFrame
    interval: str
    band: str
    broken: Sequence[Mapping[str, Any]]
    confidence: float
    length: int
    mean: str


def draw(
    about: About,
    inputs: Mapping[str, Sequence[Path]],
    output: Mapping[str, Path],
    context: dict[str, Any],
    keys: Mapping[str, Any],
) -> None:
    """Draw a comparison by all distances (`page.Draw`); inputs: under "remembrance" one directory with `remembrance.parquet`."""
    page.check_outputs(output)
    card = read_context(context)
    tables = _read(inputs["remembrance"])
    models = _models(tables, card)
    styles = arm_styles(tables.table["arm"].unique())
    panels = [_panel(tables, card, model, measure, styles) for model in models for measure in MEASURES]
    parts = _parts(tables, card, models, panels, styles, all_distances=True)
    drawn = tables.table.filter(measure=CURVE).sort("model", "distance", "against", "target", "arm", "seed", "start")
    title = card.titled(about.title)
    lines = [
        f"{text.listing([card.models[model].label for model in models])}. {card.budget}".strip(),
        f"Thick: mean over the {tables.mean}; thin: the single prediction after T. Bands: {tables.interval}; of the differences, for all start points at once.",
    ]
    rows = remembrance_charts.static_rows(panels, styles, legend=True)
    html = page.render(
        "remembrance.html.j2",
        title=title,
        about=about,
        card=card,
        keys=json.dumps(dict(keys), sort_keys=True, ensure_ascii=False),
        record=agreement.record(
            about,
            card,
            keys,
            agreement.judge(_claims(about, tables, card, models, styles), compared := _compared(panels), card.scale),
            [each["headline"] for each in parts.words["sections"]],
            compared=compared,
        ),
        legend=styles,
        drawings=page.group(output, parts.charts, remembrance_charts.extents(panels), [style.name for style in styles]),
        siblings={name: output[name].name for name in OUTPUTS if name != "html"},
        rows=drawn.height,
        tables=[(card.models[panel.model].label, _data_table(panel, styles, tables.mean)) for panel in panels],
        **parts.words,
    )
    specification = charts.stacked(rows, title, lines)
    page.write(output, html, specification, drawn, "lower remembrance.starts_per_octave or the number of models")


def section(about: About, directories: Sequence[Path], card: Context, styles: Sequence[ArmStyle]) -> Section:
    """The part of a page of perplexity that says what is remembered, in total variation.

    Args:
        about: what the page's figure asks.
        directories: one, with the `remembrance.parquet` of a comparison.
        card: what the page says of its models.
        styles: of the page's arms.

    Raises:
        FarstateError: the table or a column is missing, it is empty, or it holds models or arms that the page does not show.
    """
    tables = _read(directories)
    if unknown := sorted(set(tables.table["arm"]) - {style.name for style in styles}):
        raise FarstateError(f"{directories[0]}: holds {', '.join(unknown)}, which the page does not show")
    models = _models(tables, card)
    shown = [style for style in styles if style.name in set(tables.table["arm"])]
    measures = [measure for measure in MEASURES if measure.name in ("total_variation", "difference")]
    panels = [_panel(tables, card, model, measure, shown) for model in models for measure in measures]
    parts = _parts(tables, card, models, panels, shown, all_distances=False)
    # The static figure has one legend, over all arms and the base's reset.
    static = [*styles, charts.RESET_STYLE]
    sheet = remembrance_charts.static_rows(
        [panel for panel in panels if panel.measure.name == "total_variation"], static, legend=False
    )
    return Section(
        html=page.fragment(
            "remembrance_section.html.j2",
            **parts.words,
            data=[(card.models[panel.model].label, _data_table(panel, shown, tables.mean)) for panel in panels],
        ),
        charts=parts.charts,
        extents=remembrance_charts.extents(panels),
        sheet=sheet,
        leads=[each["headline"] for each in parts.words["sections"]],
        claims=_claims(about, tables, card, models, shown),
        compared=_compared(panels),
    )


def _claims(
    about: About, tables: _Tables, card: Context, models: Sequence[str], styles: Sequence[ArmStyle]
) -> list[agreement.Claim]:
    """What the models of the paper's architectures say to its figure, by every distance where the page shows all."""
    of_paper = [model for model in models if card.models[model].architecture in about.architectures] or models
    return [
        claim
        for model in of_paper
        for claim in agreement.of_remembrance(
            card.models[model].label, _arms(tables, model, styles), all_distances=about.draws == "remembrance"
        )
    ]


def _compared(panels: Sequence[Panel]) -> list[agreement.Compared]:
    return [
        one
        for panel in panels
        if panel.measure.name == "total_variation"
        for one in agreement.compare(f"EffRem of {panel.title}", panel.rows, "start", ours="single")
    ]


# Reading ---------------------------------------------------------------------------------------------------


def _read(directories: Sequence[Path]) -> _Tables:
    if len(directories) != 1:
        raise FarstateError(f"remembrance: {len(directories)} comparisons given, the page shows one")
    directory = Path(directories[0])
    table, manifest = read_table(directory, "remembrance", COLUMNS), read_manifest(directory)
    targets = [target for target in table["target"].unique().sort() if target != SINGLE]
    if SINGLE not in set(table["target"]) or len(targets) > 1:
        raise FarstateError(
            f"{directory / 'remembrance.parquet'}: the targets are {', '.join(table['target'].unique().sort())}, expected '{SINGLE}' and one "
            "mean over last positions; delete it and run again"
        )
    return _Tables(
        table,
        manifest["interval"],
        manifest["band"],
        manifest["broken"],
        manifest["compare"]["confidence"],
        int(table["T"][0]),
        f"{targets[0]} positions" if targets else "",
    )


def _models(tables: _Tables, card: Context) -> list[str]:
    """In the order of the page."""
    held = set(tables.table["model"])
    if unknown := sorted(held - set(card.models)):
        raise FarstateError(f"remembrance.parquet holds {', '.join(unknown)}, of which the context says nothing")
    return [name for name in card.models if name in held]


# Rows of the charts ----------------------------------------------------------------------------------------


def _panel(tables: _Tables, card: Context, model: str, measure: Measure, styles: Sequence[ArmStyle]) -> Panel:
    distance = "total_variation" if measure.difference else measure.name
    mine = tables.table.filter(
        (polars.col("model") == model)
        & (polars.col("measure") == CURVE)
        & (polars.col("distance") == distance)
        & (polars.col("against") == ("base" if measure.difference else ""))
        & polars.col("seed").is_null()
    )
    ends = ("band_low", "band_high") if measure.difference else ("low", "high")
    rows: list[Row] = []
    for style in styles:
        arm = mine.filter(arm=style.name).sort("start")
        means = arm.filter(polars.col("target") != SINGLE)
        last_mean = means["start"].max() if means.height else -1
        for kind, part in (("single", arm.filter(target=SINGLE)), ("mean", means)):
            for record in part.iter_rows(named=True):
                if not text.finite(record["value"]):
                    continue
                low, high = (rounded(record[end]) if text.finite(record[end]) else None for end in ends)
                alone = kind == "single" and record["start"] >= last_mean
                note = "the prediction after T alone" if kind == "single" else f"mean over the {tables.mean}"
                over = f"; mean over {record['n_seeds']} seeds" if record["n_seeds"] > 1 else ""
                rows.append(
                    {
                        **{"kind": kind, "alone": alone, "arm": style.name, "label": style.label, "n": record["n_documents"]},
                        "note": note + over,
                        **_place(record["start"], tables.length),
                        **{"value": rounded(record["value"]), "low": low, "high": high, "tokens": record["n_tokens"]},
                    }
                )
    model_card = card.models[model]
    if measure.name == "total_variation" and model_card.paper_model is not None and tables.length == POINTS_LENGTH:
        rows += _paper_rows(model_card.paper_model, styles, tables.length)
    return Panel(model, model_card.label, measure, model_card.context, tables.length, rows)


def _place(start: float, length: int) -> Row:
    return {"start": start, "left": length + 1 - start, "place": rounded(remembrance_charts.place(start, length))}


def _paper_rows(model: str, styles: Sequence[ArmStyle], length: int) -> list[Row]:
    labels = {style.name: style.label for style in styles}
    rows = []
    for point in paper_points(POINTS, model):
        arm = METHODS.get(point.method)
        if arm is None or arm not in labels:
            continue
        rows.append(
            {
                **{"kind": "paper", "alone": False, "arm": arm, "label": labels[arm], "n": None},
                "note": "read off the paper's figure; low to high is the reading tolerance",
                **_place(round(point.position), length),
                **{"value": rounded(point.value), "low": rounded(point.value - point.tolerance)},
                **{"high": rounded(point.value + point.tolerance), "tokens": None},
            }
        )
    return rows


# Numbers of the text ---------------------------------------------------------------------------------------


def _arms(tables: _Tables, model: str, styles: Sequence[ArmStyle], seed: int | None = None) -> list[Arm]:
    """The base first, then the others in the order of the legend; those that have the seed."""
    mine = tables.table.filter(
        (polars.col("model") == model) & (polars.col("seed").is_null() if seed is None else polars.col("seed") == seed)
    )
    found = []
    for style in sorted(styles, key=lambda style: style.name != "base"):
        own = mine.filter(arm=style.name)
        if own.is_empty():
            continue
        label = "base" if style.name == "base" else style.label
        by_measure = {
            (row["measure"], row["distance"], row["against"]): _numbers(row, tables.length)
            for row in own.filter(polars.col("measure") != CURVE).iter_rows(named=True)
        }
        found.append(
            Arm(
                name=style.name,
                label=label,
                far={(distance, against): row for (measure, distance, against), row in by_measure.items() if measure == FAR},
                share=by_measure.get((SHARE, "total_variation", "")),
                reach=by_measure.get((REACH, "total_variation", "")),
                differs=_differs(own),
            )
        )
    return found


def _numbers(row: Mapping[str, Any], length: int) -> Row:
    """A row with its interval under the names that the text reads."""
    left = None if row["start"] is None else length + 1 - row["start"]
    return {**row, "value_low": row["low"], "value_high": row["high"], "left": left}


def _differs(own: polars.DataFrame) -> list[tuple[int, int, int]]:
    """Runs of start points where the band of the difference to the base excludes zero; by the mean where it exists."""
    difference = own.filter(measure=CURVE, distance="total_variation", against="base")
    means = difference.filter(polars.col("target") != SINGLE)
    singles = difference.filter((polars.col("target") == SINGLE) & ~polars.col("start").is_in(means["start"].to_list()))
    signs = []
    for row in polars.concat([means, singles]).sort("start").iter_rows(named=True):
        known = text.finite(row["band_low"]) and text.finite(row["band_high"])
        signs.append((row["start"], (1 if row["band_low"] > 0 else -1 if row["band_high"] < 0 else 0) if known else 0))
    runs = []
    for sign, run in groupby(signs, key=lambda pair: pair[1]):
        starts = [start for start, _ in run]
        if sign:
            runs.append((starts[0], starts[-1], sign))
    return runs


# Page ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parts:
    """What page and section share: charts for the script, and what the templates print."""

    charts: list[dict[str, Any]]
    words: dict[str, Any]


def _parts(
    tables: _Tables,
    card: Context,
    models: Sequence[str],
    panels: Sequence[Panel],
    styles: Sequence[ArmStyle],
    *,
    all_distances: bool,
) -> _Parts:
    ranges = remembrance_charts.extents(panels)
    by_name = {style.name: style for style in styles}
    drawings: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []
    compared: list[Mapping[str, Any]] = []
    for number, model in enumerate(models):
        mine = [panel for panel in panels if panel.model == model]
        figures = []
        for panel in mine:
            if panel.measure.difference and not panel.rows:
                continue
            name = f"{remembrance_charts.metric(panel.measure)}-{number}"
            limits = charts.joined(ranges.get(remembrance_charts.metric(panel.measure), {}), "all")
            drawings.append(
                {
                    **{"id": name, "metric": remembrance_charts.metric(panel.measure), "model": model, "near": 1},
                    "spec": remembrance_charts.screen_panel(panel, styles, limits),
                    "curves": charts.columns(panel.rows, FIELDS),
                }
            )
            figures.append(
                {
                    **{"id": name, "measure": panel.measure.name, "title": panel.measure.title, "broken": []},
                    "text": _described(panel, styles),
                }
            )
        if figures:
            figures[0]["broken"] = _broken(tables, model, by_name)
        arms = _arms(tables, model, styles)
        label, trained = card.models[model].label, card.models[model].context
        compared += [
            row
            for arm in arms
            for (name, against), row in arm.far.items()
            if against and name == "total_variation" and text.finite(row["value"])
        ]
        sections.append(
            {
                **{
                    "name": model,
                    "card": card.models[model],
                    "figures": figures,
                    "paper": _paper(tables, card.models[model], mine),
                },
                "headline": remembrance_text.headline(label, trained, arms),
                "findings": remembrance_text.findings(arms, all_distances=all_distances),
                "arms": [_line(arm, by_name) for arm in arms],
                "by_seed": [_line(arm, by_name, seed) for seed, arm in _by_seed(tables, model, styles)],
                "far": next((row for row in [arms[0].far.get(("total_variation", ""))] if row is not None), None),
            }
        )
    seeds = sorted({line["n_seeds"] for each in sections for line in each["arms"] if line["name"] != "base" and line["n_seeds"]})
    return _Parts(
        drawings,
        {
            "sections": sections,
            "all_distances": all_distances,
            "length": tables.length,
            "mean": tables.mean,
            "interval": tables.interval,
            "band": tables.band,
            "certainty": remembrance_text.certainty(tables.interval, seeds),
            "comparisons": remembrance_text.comparisons(compared, tables.confidence),
            "has_control": "control" in by_name,
            "has_paper": any(each["paper"] for each in sections),
            "rounded_model": any(row.name == "remembrance.precision" and row.value == "bf16-mixed" for row in card.parameters),
            "write": {"distance": remembrance_text.distance, "count": text.count},
        },
    )


def _by_seed(tables: _Tables, model: str, styles: Sequence[ArmStyle]) -> list[tuple[int, Arm]]:
    """Each seed of the arms that have several."""
    own = tables.table.filter(model=model)
    found = []
    for style in styles:
        seeds = own.filter(arm=style.name)["seed"].drop_nulls().unique().sort().to_list()
        if len(seeds) > 1:
            found += [(seed, arm) for seed in seeds for arm in _arms(tables, model, [style], seed)]
    return found


def _line(arm: Arm, styles: Mapping[str, ArmStyle], seed: int | None = None) -> dict[str, Any]:
    """A row of the table: every cell a row of numbers, or None."""
    far = arm.far.get(("total_variation", ""))
    counts = far or arm.reach or arm.share
    return {
        **{"name": arm.name, "label": arm.label, "style": styles.get(arm.name), "seed": seed, "far": far},
        "against_base": arm.far.get(("total_variation", "base")),
        "against_control": arm.far.get(("total_variation", "control")),
        **{name: arm.far.get((name, "")) for name in DISTANCES if name != "total_variation"},
        **{"share": arm.share, "reach": arm.reach},
        "n_seeds": None if counts is None else counts["n_seeds"],
        "counts": counts,
    }


def _broken(tables: _Tables, model: str, styles: Mapping[str, ArmStyle]) -> list[str]:
    lines = []
    for each in tables.broken:
        if each["model"] == model and each["arm"] in styles:
            seed = "" if each["seed"] is None else f", seed {each['seed']}"
            texts = f"{each['stretches']:,} text{'s' * (each['stretches'] != 1)}"
            lines.append(
                f"{styles[each['arm']].label}{seed}: not a number, first after token {each['position']:,} of document {each['document'][:12]}, read "
                f"from token {each['start']:,} ({texts}); where such a value would enter a mean there is none"
            )
    return lines


def _paper(tables: _Tables, model: ModelCard, panels: Sequence[Panel]) -> str:
    """What is said where the model is the paper's."""
    if model.paper_model is None or not paper_points(POINTS, model.paper_model):
        return ""
    if tables.length != POINTS_LENGTH:
        return f"The paper's values are for T = {POINTS_LENGTH:,} and are not shown beside T = {tables.length:,}."
    if not any(row["kind"] == "paper" for panel in panels for row in panel.rows):
        return ""
    return (
        "Hollow markers are points read off the paper's Fig. 1 (bottom, T = 8,192; arXiv 2507.02782v2), the stroke is the reading tolerance. They "
        "are single predictions after T on other texts, and the paper gives no interval and had no zero-init control."
    )


def _described(panel: Panel, styles: Sequence[ArmStyle]) -> str:
    """What a reader who cannot see the chart is told."""
    ends = []
    for style in styles:
        rows = [row for row in panel.rows if row["arm"] == style.name and row["kind"] == "single"]
        if rows:
            middle = min(rows, key=lambda row: abs(row["start"] - panel.length / 2))
            ends.append(
                f"{style.label}: {remembrance_text.distance(middle['value'])} with t = {middle['start']:,}, "
                f"{remembrance_text.distance(rows[-1]['value'])} with t = {rows[-1]['start']:,}"
            )
    return f"{panel.measure.title} by start point t, {panel.title}, T = {panel.length:,}. {'. '.join(ends)}. All values are in the data table below."


def _data_table(panel: Panel, styles: Sequence[ArmStyle], mean: str) -> dict[str, Any]:
    """A line per start point, a column per arm: the mean over last positions, and the single prediction where there is none."""
    cells: dict[int, dict[str, Row]] = {}
    for row in sorted(panel.rows, key=lambda row: row["kind"] != "single"):
        if row["kind"] != "paper":
            cells.setdefault(row["start"], {})[row["arm"]] = row
    used = [style for style in styles if any(style.name in line for line in cells.values())]
    lines = []
    for start in sorted(cells):
        line = [_cell(cells[start].get(style.name)) for style in used]
        lines.append((f"{start:,}", line))
    return {
        "title": panel.measure.title,
        "unit": f"{panel.measure.axis}; mean over the {mean}, * the single prediction after T",
        "columns": [style.label for style in used],
        "lines": lines,
    }


def _cell(row: Row | None) -> str:
    if row is None:
        return text.NONE
    write = remembrance_text.distance
    known = row["low"] is not None and row["high"] is not None
    interval = f" ({write(row['low'])} to {write(row['high'])})" if known else ""
    return write(row["value"]) + interval + ("" if row["kind"] == "mean" else " *")
