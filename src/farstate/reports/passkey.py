"""The page of the passkey: a number hidden in a text, told at its end, by the length of the text and the depth of the number.

Reads the table of scores of a comparison and draws it; every number on the page is in it, in the parameters or in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farstate.reference import PaperPoint, paper_points
from farstate.reports import agreement, charts, page, task_charts, task_text, tasks, text
from farstate.reports.charts import Row
from farstate.reports.context import Context, read_context
from farstate.reports.figures import About
from farstate.reports.page import Section
from farstate.reports.task_charts import Map
from farstate.reports.tasks import Scores
from farstate.reports.theme import ArmStyle, Spec

SCORES = {"exact": "the whole key", "characters": "its digits"}
TASK = "passkey"
LABELS = {"base": "base, zero-shot", "control": "plain fine-tuning"}
"""What arms are called here; any other is fine-tuned from its own initial states."""
POINTS = "fig7_passkey"
METHODS = {"zero-shot": "base", "fine-tuned": "control", "fitted-noise": "fitted_noise"}
"""By the digitised values' method, the arm it is."""
FIELDS = ("length", "depth", "value", "low", "high", "over", "n", "chance", "words", "note")
_TO_A_ROW = 4


def draw(
    about: About,
    inputs: Mapping[str, Sequence[Path]],
    output: Mapping[str, Path],
    context: dict[str, Any],
    keys: Mapping[str, Any],
) -> None:
    """Draw a comparison (`page.Draw`); inputs: under "task" one directory with `scores.parquet`."""
    page.check_outputs(output)
    card = read_context(context)
    scores = tasks.read(inputs["task"], card, tuple(SCORES))
    styles = tasks.styles_of(scores, LABELS)
    drawings: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []
    sheet: list[Spec] = []
    compared: list[agreement.Compared] = []
    tables: list[tuple[str, dict[str, Any]]] = []
    for model in tasks.models(scores, card):
        label, paper_model = card.models[model].label, card.models[model].paper_model
        points = paper_points(POINTS, paper_model) if paper_model is not None else []
        case = _case(scores, model, label, styles)
        lengths = sorted({length for length, _ in case.places("exact")} | {round(point.position) for point in points})
        depths = sorted(
            {depth for _, depth in case.places("exact") if depth is not None} | {point.depth or 0.0 for point in points}
        )
        ways: list[dict[str, Any]] = []
        for style in styles:
            if style.name not in case.arms:
                continue
            maps = {score: Map(style.label, lengths, depths, case.train_length, _cells(case, style, score)) for score in SCORES}
            own = [point for point in points if METHODS.get(point.method) == style.name]
            if own:
                compared += _compared(label, style, maps["exact"].rows, _paper_cells(own))
                maps["paper"] = Map(f"the paper: {_method(own)}", lengths, depths, case.train_length, _paper_cells(own))
            figures = {}
            for kind, cells in maps.items():
                if not cells.rows:
                    continue
                name = f"{kind}-{len(drawings)}"
                drawings.append(
                    {
                        **{"id": name, "metric": "", "model": model, "near": 1, "spec": task_charts.screen_map(cells)},
                        "curves": charts.columns(cells.rows, FIELDS),
                    }
                )
                figures[kind] = {
                    "id": name,
                    "title": cells.title,
                    "text": _described(cells, label, SCORES.get(kind, SCORES["exact"])),
                    "broken": [],
                }
            ways.append({"maps": maps, "figures": figures})
        sections.append(
            {
                **{"name": model, "card": card.models[model], "ways": ways, "broken": tasks.broken(scores, model, styles)},
                "claims": agreement.of_keys(case),
                **{"headline": task_text.passkey_headline(case), "findings": task_text.passkey_findings(case)},
                **{
                    "paper": any("paper" in way["figures"] for way in ways),
                    "counts": _counts(case),
                    "trained": case.train_length,
                },
            }
        )
        for kind in ("exact", "paper"):
            columns = [
                task_charts.static_map(
                    way["maps"][kind], way["maps"][kind].title if kind == "paper" else f"{label}, {way['maps'][kind].title}"
                )
                for way in ways
                if kind in way["maps"]
            ]
            sheet += _rows(columns)
        tables += [(label, table) for table in _tables(case)]
    drawn = scores.table.sort("model", "arm", "seed", "score", "against", "length", "depth")
    judgement = agreement.judge([claim for section in sections for claim in section["claims"]], compared, card.scale)
    html = page.render(
        "passkey.html.j2",
        record=agreement.record(
            about,
            card,
            keys,
            judgement,
            [section["headline"] for section in sections],
            compared=compared,
            remark=_remark(),
        ),
        **tasks.words(about, card, scores, output, keys, drawn),
        sections=sections,
        remark=_remark(),
        interval=scores.interval,
        passing="state_passing" in {style.name for style in styles},
        tables=tables,
        drawings=page.group(output, drawings, {}, []),
    )
    lines = [
        f"{text.listing([section['card'].label for section in sections])}. {card.budget}".strip(),
        "Share of keys told right, by length of the prompt and depth of the key; dark 0, bright 1.",
    ]
    page.write(output, html, charts.stacked(sheet, card.titled(about.title), lines), drawn, "show fewer models")


def section(about: About, directories: Sequence[Path], card: Context, styles: Sequence[ArmStyle]) -> Section:
    """The part of a page of perplexity that says whether a number is found again by models that were not trained to.

    Args:
        about: what the page asks.
        directories: one, with `scores.parquet`.
        card: what the page says of its models.
        styles: of the page's arms.

    Raises:
        FarstateError: as `tasks.read`.
    """
    scores = tasks.read(directories, card, tuple(SCORES))
    drawings: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for number, model in enumerate(tasks.models(scores, card)):
        label = card.models[model].label
        case = _case(scores, model, label, styles)
        places = case.places("exact")
        lengths = sorted({length for length, _ in places})
        depths = sorted({depth for _, depth in places if depth is not None})
        figures = []
        for style in styles:
            cells = Map(style.label, lengths, depths, case.train_length, _cells(case, style, "exact"))
            if not cells.rows:
                continue
            name = f"passkey-{style.name}-{number}"
            drawings.append(
                {
                    **{"id": name, "metric": "", "model": model, "near": 1, "spec": task_charts.screen_map(cells)},
                    "curves": charts.columns(cells.rows, FIELDS),
                }
            )
            told = _described(cells, label, SCORES["exact"])
            figures.append({"id": name, "title": cells.title, "text": told, "broken": []})
        words = {
            "said": task_text.passkey_zero_shot(case),
            "counts": _counts(case),
            "broken": tasks.broken(scores, model, styles),
        }
        parts.append({"name": model, "label": label, "figures": figures, "tables": _tables(case), **words})
    return Section(
        html=page.fragment("passkey_section.html.j2", sections=parts, interval=scores.interval),
        charts=drawings,
    )


def _case(scores: Scores, model: str, label: str, styles: Sequence[ArmStyle]) -> task_text.Case:
    """All arms of a model together, whatever they were trained on."""
    rows = {
        (key[1], key[7], key[8], key[5], key[6]): row for key, row in scores.rows.items() if key[0] == model and key[3] is None
    }
    held = {key[0] for key in rows}
    return task_text.Case(
        label=label,
        arms={style.name: style.label for style in styles if style.name in held},
        train_length=max(row["train_length"] for row in rows.values()),
        rows=rows,
    )


def _cells(case: task_text.Case, style: ArmStyle, score: str) -> list[Row]:
    rows: list[Row] = []
    for length, depth in case.places(score):
        row = case.at(style.name, score, (length, depth))
        if row is None:
            continue
        known = text.finite(row["value"])
        numbers = tasks.numbers(row)
        rows.append(
            {
                **{"label": style.label, "length": length, "depth": depth},
                **{name: numbers[name] for name in ("value", "low", "high", "over", "n")},
                **{"chance": row["chance"] if score == "exact" else None, "words": _short(row["value"]) if known else "✕"},
                "note": f"share of {'keys' if score == 'exact' else 'digits'} told right" if known else "no value: not finite",
            }
        )
    return rows


def _paper_cells(points: Sequence[PaperPoint]) -> list[Row]:
    return [
        {
            **{
                "label": f"the paper, {point.method}",
                "length": round(point.position),
                "depth": point.depth,
                "value": point.value,
            },
            **{"low": point.value - point.tolerance, "high": point.value + point.tolerance, "over": "not given", "n": None},
            **{
                "chance": None,
                "words": _short(point.value),
                "note": "read off the paper's figure; low to high is the reading tolerance",
            },
        }
        for point in points
    ]


def _compared(label: str, style: ArmStyle, ours: Sequence[Row], paper: Sequence[Row]) -> list[agreement.Compared]:
    """The paper's cells beside ours of the same depth."""
    found = []
    for depth in dict.fromkeys(row["depth"] for row in paper):
        rows = [
            {**row, "kind": kind, "arm": style.name, "label": style.label}
            for kind, several in (("mean", ours), ("paper", paper))
            for row in several
            if row["depth"] == depth
        ]
        found += agreement.compare(f"share of keys of {label} at depth {depth:g}", rows, "length")
    return found


def _short(value: float) -> str:
    """A value in a cell: `0.83`, `1`, `0`."""
    return f"{value:.0f}" if value in (0.0, 1.0) else f"{value:.2f}"


def _method(points: Sequence[PaperPoint]) -> str:
    return points[0].method.replace("-", " ") if points[0].method == "fitted-noise" else points[0].method


def _rows(columns: Sequence[Spec]) -> list[Spec]:
    return task_charts.side_by_side(columns, _TO_A_ROW)


def _counts(case: task_text.Case) -> str:
    """Examples of a cell, seeds and chance, in words."""
    rows = [row for key, row in case.rows.items() if key[1] == "exact" and key[2] == ""]
    examples = sorted({row["n"] for row in rows})
    number = text.count(examples[0]) if len(examples) == 1 else f"{text.count(examples[0])} to {text.count(examples[-1])}"
    chances = sorted({row["chance"] for row in rows if text.finite(row["chance"])})
    return f"{number} examples a cell" + (f"; chance of a whole key {chances[0]:.2g}" if chances else "")


def _described(cells: Map, model: str, what: str) -> str:
    """What a reader who cannot see the map is told."""
    rows = [row for row in cells.rows if row["value"] is not None]
    told = "; ".join(
        f"{length:,} tokens: {', '.join(row['words'] for row in rows if row['length'] == length)}"
        for length in dict.fromkeys(row["length"] for row in rows)
    )
    return (
        f"Share of {what} told right, {model}, {cells.title}, by depth from {cells.depths[0]:g} to {cells.depths[-1]:g}. {told}."
    )


def _tables(case: task_text.Case) -> list[dict[str, Any]]:
    """Values and differences as tables for reading: a line per cell, a column per arm."""
    found = []
    for score, words in SCORES.items():
        for against in ("", "control", "base"):
            arms = [arm for arm in case.arms if any(key[:3] == (arm, score, against) for key in case.rows)]
            if not arms or (against and score != "exact"):
                continue
            write = task_text.difference if against else task_text.estimate
            lines = []
            for length, depth in case.places(score):
                rows = [case.at(arm, score, (length, depth), against) for arm in arms]
                cells = [text.NONE if row is None else write(row) for row in rows]
                name = f"{length:,}" if depth is None else f"{length:,} at {depth:g}"
                lines.append((name, cells))
            minus = f", minus {case.arms.get(against, against)}" if against else ""
            found.append(
                {
                    **{"title": f"share of {words} told right{minus}", "unit": "of 1", "lines": lines},
                    "columns": [case.arms[arm] for arm in arms],
                }
            )
    return found


def _remark() -> str:
    """What the paper found, in its own numbers."""
    said = []
    for model, name in (("mamba2-370m", "370M"), ("mamba2-780m", "780M")):
        parts = []
        for method, words in (("zero-shot", "zero-shot"), ("fine-tuned", "plain fine-tuning"), ("fitted-noise", "fitted noise")):
            points = [point for point in paper_points(POINTS, model) if point.method == method]
            failed = [round(point.position) for point in points if point.value < 0.5]
            last = max(round(point.position) for point in points)
            parts.append(f"{words} {min(failed):,}" if failed else f"{words} nowhere to {last:,}")
        said.append(f"Mamba-2 {name}: {', '.join(parts)}")
    return (
        "The paper's Figure 7 (arXiv 2507.02782v2; trained on 2,048 tokens, depths 0.1, 0.5 and 0.9), by the length at which a cell is "
        f"first below one half. {'. '.join(said)}. "
        "It gives no interval and no number of examples."
    )
