"""The page of copying: strings longer than any in training, written once more by models trained on nothing else.

Reads the table of scores of a comparison and draws it; every number on the page is in it, in the parameters or in the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farstate.reference import paper_points
from farstate.reports import agreement, charts, page, task_charts, task_text, tasks, text
from farstate.reports.context import Context, read_context
from farstate.reports.figures import About
from farstate.reports.task_charts import Panel
from farstate.reports.tasks import Scores
from farstate.reports.theme import ArmStyle, Spec

SCORES = {
    "characters": "Letters right, free-running",
    "characters_forced": "Letters right, teacher-forced",
    "exact": "Whole strings right, free-running",
}
TASK, WAY = "copying", "trained"
LABELS = {"control": "plain (zero states)"}
"""What arms are called here."""
POINTS, PAPER_MODEL = "table1_copy", "mamba2-45m"
METHODS = {"base": "control", "SP": "state_passing"}
"""By the digitised values' method, the arm it is."""


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
    panels: list[Panel] = []
    sections: list[dict[str, Any]] = []
    for model in tasks.models(scores, card):
        case = tasks.case(scores, card, model, WAY, TASK, styles)
        mine = [_panel(scores, card, model, score, styles) for score in SCORES]
        panels += mine
        sections.append(
            {
                **{"name": model, "card": card.models[model], "panels": mine, "broken": tasks.broken(scores, model, styles)},
                "claims": agreement.of_letters(case),
                **{"headline": task_text.copying_headline(case), "findings": task_text.copying_findings(case)},
                **{"lines": _lines(scores, model, case), "trained": case.train_length},
            }
        )
    ranges, drawings = tasks.drawings("copying", panels, styles)
    ids = {id(panel): drawing["id"] for panel, drawing in zip(panels, drawings, strict=True)}
    for section in sections:
        section["figures"] = [
            {"id": ids[id(panel)], "title": panel.title, "text": tasks.described(panel, styles), "broken": []}
            for panel in section["panels"]
        ]
    drawn = scores.table.sort("model", "arm", "seed", "score", "against", "length")
    compared = [
        one
        for panel in panels
        for one in agreement.compare(f"{panel.title} of {card.models[panel.model].label}", panel.rows, "length")
    ]
    judgement = agreement.judge([claim for section in sections for claim in section["claims"]], compared, card.scale)
    html = page.render(
        "copying.html.j2",
        record=agreement.record(about, card, keys, judgement, [section["headline"] for section in sections], compared=compared),
        **tasks.words(about, card, scores, output, keys, drawn),
        legend=styles,
        styles={style.name: style for style in styles},
        sections=sections,
        paper=_paper_lines(),
        packing=_packing(card),
        trained=_trained(card),
        interval=scores.interval,
        tables=[(card.models[panel.model].label, tasks.data_table(panel, styles, panel.axis)) for panel in panels if panel.rows],
        drawings=page.group(output, drawings, ranges, [style.name for style in styles]),
    )
    lines = [
        f"{text.listing([section['card'].label for section in sections])}. {card.budget}".strip(),
        f"Bands: {scores.interval}; dots: single seeds; dotted: chance.",
    ]
    page.write(
        output,
        html,
        charts.stacked(_sheet(panels, styles, ranges, card), card.titled(about.title), lines),
        drawn,
        "show fewer models",
    )


def _panel(scores: Scores, card: Context, model: str, score: str, styles: Sequence[ArmStyle]) -> Panel:
    rows = tasks.curve_rows(scores, model, WAY, TASK, score, styles, guessing=score != "exact")
    lengths = scores.lengths(model, WAY)
    paper_model = card.models[model].paper_model
    if score == "characters" and paper_model is not None:
        note = "the paper's; low to high is its ±, of which it does not say what it means"
        rows += tasks.paper_rows(paper_points(POINTS, paper_model), METHODS, styles, min(lengths), note)
    shortest, longest = card.tasks.get("training_lengths", (None, None))
    trained = tasks.trained(scores, model, WAY, "longest trained: {}")
    if shortest is not None and longest in trained and shortest != longest:
        trained = {shortest: "", longest: f"trained: {shortest:,} to {longest:,}"}
    return Panel(
        metric="accuracy",
        model=model,
        title=SCORES[score],
        axis="share right",
        unit="letters of the string",
        height=280,
        trained=trained,
        lengths=lengths,
        rows=rows,
        highest=1.0,
    )


def _lines(scores: Scores, model: str, case: task_text.Case) -> list[dict[str, Any]]:
    """Rows of the table: an arm at a length, all seeds together and then each by itself."""
    lines = []
    for length, depth in case.places("characters"):
        for arm, label in case.arms.items():
            seeds = scores.seeds(model, arm, WAY)
            for seed in (None, *(seeds if len(seeds) > 1 else ())):
                row = {score: scores.at(model, arm, WAY, TASK, length, score, depth=depth, seed=seed) for score in SCORES}
                if row["characters"] is None:
                    continue
                lines.append(
                    {
                        **{"arm": arm, "label": label, "length": length, "seed": seed, **row},
                        "against": None if seed is not None else case.at(arm, "characters", (length, depth), "control"),
                        "beyond": length > case.train_length,
                    }
                )
    return lines


def _paper_lines() -> list[dict[str, Any]]:
    """The paper's row, as it prints it."""
    names = {"base": "plain", "SP": "state passing"}
    return [
        {"label": names[point.method], "length": round(point.position), "value": f"{point.value:.2f} ± {point.tolerance:.2f}"}
        for point in paper_points(POINTS, PAPER_MODEL)
    ]


def _packing(card: Context) -> str:
    """How strings lie in rows, and what that means for a state that is passed on."""
    packing = card.tasks.get("training", {}).get("packing")
    if packing == "packed":
        return (
            "Packed: a row holds as many whole strings as fit, one after the other, so every string but a row's first begins in the state "
            "that earlier ones left, in all arms alike. Under state passing the row's first one does too."
        )
    if packing == "one_per_row":
        return (
            "One string per row, filled up behind it: without state passing every string begins in the zero state. Under state passing it "
            "begins in a state that holds another string, with its filling, and has to be told apart from it."
        )
    return ""


def _trained(card: Context) -> str:
    """The lengths of the training's strings, in words."""
    shortest, longest = card.tasks.get("training_lengths", (None, None))
    return "" if shortest is None else f"strings of {shortest:,} to {longest:,} letters"


def _sheet(panels: Sequence[Panel], styles: Sequence[ArmStyle], ranges: Mapping[str, Any], card: Context) -> list[Spec]:
    columns = [
        task_charts.static_panel(
            panel,
            styles,
            f"{card.models[panel.model].label}: {panel.title[:1].lower()}{panel.title[1:]}",
            charts.joined(ranges.get(panel.metric, {}), "all"),
        )
        for panel in panels
    ]
    return task_charts.side_by_side(columns, len(SCORES))
