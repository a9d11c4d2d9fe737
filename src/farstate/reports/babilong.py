"""The page of BABILong: questions about facts that are hidden in text, by the length of the text.

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
from farstate.reports.task_charts import SMALL, Panel
from farstate.reports.tasks import MEAN, Scores
from farstate.reports.theme import ArmStyle, Spec

SCORES = ("strict", "lenient")
PROMPTINGS = {"few_shot": "Few-shot", "fine_tuned": "Fine-tuned"}
"""What panels are called by prompting, in their order."""
POINTS = {"few_shot": "fig6_babilong_fewshot", "fine_tuned": "fig6_babilong_finetuned"}
"""By prompting, the digitised figure of the paper."""
METHODS = {"base": "base", "SP": "state_passing", "TBTT": "tbtt"}
"""By the digitised values' method, the arm it is."""
PAPER_MODEL = "mamba2-780m"
_BY_TASK_ROW = 5


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
    scores = tasks.read(inputs["task"], card, SCORES)
    styles = tasks.styles_of(scores, {})
    names = sorted(set(scores.table["task"]) - {MEAN}, key=lambda name: (len(name), name))
    panels: list[Panel] = []
    sections: list[dict[str, Any]] = []
    for model in tasks.models(scores, card):
        ways = [way for way in PROMPTINGS if scores.arms(model, way)]
        cases = [_way(scores, card, model, way, names, styles, panels) for way in ways]
        sections.append(
            {
                **{"name": model, "card": card.models[model], "cases": cases, "broken": tasks.broken(scores, model, styles)},
                "claims": [claim for case in cases for claim in case["claims"]],
                "paper": any(row["kind"] == "paper" for case in cases for panel in case["panels"] for row in panel.rows),
            }
        )
    ranges, drawings = tasks.drawings("task", panels, styles)
    ids = {id(panel): drawing["id"] for panel, drawing in zip(panels, drawings, strict=True)}
    for section in sections:
        for case in section["cases"]:
            case["figures"] = [
                {"id": ids[id(panel)], "title": panel.title, "text": tasks.described(panel, styles), "broken": [], "small": small}
                for panel in case["panels"]
                for small in (panel.height == SMALL,)
            ]
    drawn = scores.table.sort("model", "prompting", "arm", "seed", "task", "score", "against", "length")
    compared = _compared(panels, card)
    judgement = agreement.judge([claim for section in sections for claim in section["claims"]], compared, card.scale)
    html = page.render(
        "babilong.html.j2",
        record=agreement.record(
            about,
            card,
            keys,
            judgement,
            [case["headline"] for section in sections for case in section["cases"]],
            compared=compared,
            remark=_remark(),
        ),
        **tasks.words(about, card, scores, output, keys, drawn),
        legend=styles,
        styles={style.name: style for style in styles},
        sections=sections,
        tasks=_tasks(names),
        remark=_remark(),
        has_paper=any(section["paper"] for section in sections),
        labels=scores.labels,
        guesses=_guesses(scores, names),
        published=card.tasks.get("published"),
        tables=[(card.models[panel.model].label, tasks.data_table(panel, styles, panel.axis)) for panel in panels if panel.rows],
        drawings=page.group(output, drawings, ranges, [style.name for style in styles]),
    )
    lines = [
        f"{text.listing([section['card'].label for section in sections])}. {card.budget}".strip(),
        f"{_tasks(names).capitalize()}. Bands: {scores.interval}; dotted: chance"
        + ("; hollow: read off the paper." if any(section["paper"] for section in sections) else "."),
    ]
    page.write(
        output,
        html,
        charts.stacked(_sheet(panels, styles, ranges, card), card.titled(about.title), lines),
        drawn,
        "show fewer models or tasks",
    )


def _compared(panels: Sequence[Panel], card: Context) -> list[agreement.Compared]:
    """The paper's values beside ours; it does not say which scorer it used, so that of the two that is nearer."""
    by_place: dict[tuple[str, str, str], list[agreement.Compared]] = {}
    for panel in panels:
        if panel.metric == "accuracy":
            way = panel.title.split(",")[0]
            for one in agreement.compare(f"{panel.title} of {card.models[panel.model].label}", panel.rows, "length"):
                by_place.setdefault((panel.model, way, one.what.split(card.models[panel.model].label)[1]), []).append(one)
    return [min(several, key=lambda one: abs(one.ours - one.paper)) for several in by_place.values()]


def _way(
    scores: Scores,
    card: Context,
    model: str,
    way: str,
    names: Sequence[str],
    styles: Sequence[ArmStyle],
    panels: list[Panel],
) -> dict[str, Any]:
    """A model asked in one way: its panels, which are added to `panels`, its sentences and the rows of its table."""
    words, short = task_text.PROMPTINGS[way], PROMPTINGS[way]
    # One task alone has no mean.
    whole = MEAN if len(names) > 1 else names[0]
    mine = [
        _panel(scores, card, model, way, whole, "strict", f"{short}, strict scorer", styles),
        *(
            _panel(scores, card, model, way, whole, "strict", f"{short}, strict, minus {other}", styles, other)
            for other in ("base", "control")
        ),
        _panel(scores, card, model, way, whole, "lenient", f"{short}, lenient scorer", styles),
        *(_panel(scores, card, model, way, name, "strict", name, styles) for name in names if name != whole),
    ]
    mine = [panel for panel in mine if any(row["kind"] == "mean" for row in panel.rows)]
    panels += mine
    case = tasks.case(scores, card, model, way, whole, styles)
    by_task = {name: tasks.case(scores, card, model, way, name, styles) for name in names}
    return {
        **{"way": way, "words": words, "panels": mine},
        "claims": agreement.of_facts(case, way),
        "headline": task_text.babilong_headline(case, way, _tasks(names)),
        "findings": task_text.babilong_findings(case, by_task if len(names) > 1 else {}, has_control="control" in case.arms),
        "lines": [_line(case, arm) for arm in case.arms],
        "inside": case.inside("strict")[-1][0] if case.inside("strict") else None,
        "far": case.beyond("strict")[-1][0] if case.beyond("strict") else None,
        "trained": case.train_length,
    }


def _line(case: task_text.Case, arm: str) -> dict[str, Any]:
    """A row of the table: every cell a row of numbers, or None."""
    inside, far = case.inside("strict")[-1:], case.beyond("strict")[-1:]

    def at(places: Sequence[task_text.Place], score: str, against: str = "") -> text.Row | None:
        return case.at(arm, score, places[0], against) if places else None

    return {
        **{"arm": arm, "label": case.arms[arm], "inside": at(inside, "strict"), "inside_lenient": at(inside, "lenient")},
        **{"far": at(far, "strict"), "far_lenient": at(far, "lenient")},
        **{"against_base": at(far, "strict", "base"), "against_control": at(far, "strict", "control")},
    }


def _panel(
    scores: Scores,
    card: Context,
    model: str,
    way: str,
    task: str,
    score: str,
    title: str,
    styles: Sequence[ArmStyle],
    against: str = "",
) -> Panel:
    single = title == task
    rows = tasks.curve_rows(scores, model, way, task, score, styles, against=against, seeds=not single)
    lengths = scores.lengths(model, way)
    paper_model = card.models[model].paper_model
    if task == MEAN and not against and paper_model is not None:
        least = min([length for length in lengths if length > 0] or [1])
        note = "read off the paper's figure; low to high is the reading tolerance"
        rows += tasks.paper_rows(paper_points(POINTS[way], paper_model), METHODS, styles, least, note)
    return Panel(
        metric="difference" if against else "single" if single else "accuracy",
        model=model,
        title=title,
        axis=f"{score}, minus {against}" if against else f"accuracy, {score}",
        unit="prompt, tokens",
        height=SMALL if single else 300 if score == "strict" and not against else 170,
        trained=tasks.trained(scores, model, way, "trained on {} tokens"),
        lengths=sorted({row["length"] for row in rows if row["kind"] != "chance"}) or lengths,
        rows=rows,
        difference=bool(against),
    )


def _sheet(panels: Sequence[Panel], styles: Sequence[ArmStyle], ranges: Mapping[str, Any], card: Context) -> list[Spec]:
    """The static figure: per model its means side by side, then its tasks."""
    rows: list[Spec] = []
    for model in dict.fromkeys(panel.model for panel in panels):
        mine = [panel for panel in panels if panel.model == model]
        label = card.models[model].label
        for small in (False, True):
            columns = [
                task_charts.static_panel(
                    panel,
                    styles,
                    _heading(panel, label if len({panel.model for panel in panels}) > 1 else "", mine),
                    charts.joined(ranges.get(panel.metric, {}), "all"),
                    190 if small else 480,
                )
                for panel in mine
                if (panel.height == SMALL) == small and not panel.difference
            ]
            rows += task_charts.side_by_side(columns, _BY_TASK_ROW if small else 2)
    return rows


def _heading(panel: Panel, label: str, mine: Sequence[Panel]) -> str:
    if panel.height != SMALL and not label:
        return panel.title
    if panel.height != SMALL:
        return f"{label}: {panel.title[:1].lower()}{panel.title[1:]}"
    before = [one for one in mine[: mine.index(panel)] if one.height != SMALL]
    return f"{panel.title}, {before[-1].title.split(',')[0].lower()}"


def _guesses(scores: Scores, names: Sequence[str]) -> str:
    """What is right without reading, by task."""
    uniform = {
        key[4]: row["chance"] for key, row in scores.rows.items() if key[7:9] == ("strict", "") and row["chance"] is not None
    }
    return "; ".join(
        f"{name} {task_text.accuracy(uniform[name])}"
        + (f" and {task_text.accuracy(scores.frequent[name])}" if name in scores.frequent else "")
        for name in names
        if name in uniform
    )


def _tasks(names: Sequence[str]) -> str:
    """The tasks of the mean in words."""
    if len(names) == 1:
        return names[0]
    whole = [f"qa{number}" for number in range(1, len(names) + 1)]
    listed = f"{names[0]} to {names[-1]}" if list(names) == whole else text.listing(names)
    return f"mean of {listed}"


def _remark() -> str:
    """What the paper found, in its own numbers."""
    first, last = 2048, 262144
    said = []
    for way, words in (("fine_tuned", "fine-tuned"), ("few_shot", "few-shot")):
        values = {(point.method, round(point.position)): point.value for point in paper_points(POINTS[way], PAPER_MODEL)}
        ends = [
            f"{name} from {task_text.accuracy(values[method, first])} to {task_text.accuracy(values[method, last])}"
            for method, name in (("base", "the base model"), ("SP", "state passing"), ("TBTT", "TBTT"))
        ]
        said.append(f"{words}, {text.listing(ends)}")
    return (
        f"The paper's Figure 6 (arXiv 2507.02782v2; Mamba-2 780M, trained on 2,048 tokens): mean accuracy falls between {first:,} and "
        f"{last:,} tokens, {'; '.join(said)}. "
        "It shows no interval and no zero-init control, and does not say which of the two public scorers it used."
    )
