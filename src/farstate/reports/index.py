"""The page of all results: what was asked, what was found, how sure it is, and each figure beside the paper's.

It is made of the finished pages alone: their records (`farstate.reports.agreement.record`) and the charts that their scripts
draw. What sidecars in `logs/` record is added where they are.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from markupsafe import Markup

from farstate.errors import FarstateError
from farstate.files import write_json, write_text
from farstate.keys import digest
from farstate.plan import INDEX, INDEX_FILES, PAGE_FILES
from farstate.reference import PaperPoint, paper_curves
from farstate.reports import agreement, index_origin, page
from farstate.reports.figures import FIGURES
from farstate.reports.index_origin import duration
from farstate.reports.theme import arm_styles

MAXIMUM_BYTES = 5_000_000
SYMBOLS = {
    agreement.AGREES: "=",
    agreement.DEVIATES: "≠",
    agreement.UNDECIDED: "?",
    agreement.NOT_COMPARABLE: "–",
    agreement.OURS: "+",
}
"""Beside each word, so that nothing is told by colour alone."""
WORDS = {
    agreement.AGREES: "agrees with the paper",
    agreement.DEVIATES: "deviates from the paper",
    agreement.UNDECIDED: "undecided",
    agreement.NOT_COMPARABLE: "not comparable",
    agreement.OURS: "not in the paper",
}
DIGITISED: dict[str, tuple[tuple[str, str], ...]] = {
    "fig1": (("fig1b_ppl", "perplexity by position"), ("fig1e_effrem_T8192", "effective remembrance by start, T = 8,192")),
    "fig4": (("fig4_state_std", "standard deviation of the state by position"),),
    "fig5": (("fig5_ppl", "perplexity by position"),),
    "fig6": (
        ("fig6_babilong_fewshot", "accuracy by length, few-shot"),
        ("fig6_babilong_finetuned", "accuracy by length, fine-tuned"),
    ),
    "fig7": (("fig7_passkey", "share of keys by length, mean over depths"),),
    "table1": (("table1_copy", "share of letters by length of the string"),),
}
"""By figure the digitised values, and what they are."""
MAIN = ("fig5", "fig1")
"""The figures whose answer is the paper's main claim; the first that is there leads the findings."""
QUESTIONS: dict[str, tuple[str, ...]] = {
    "Why do they fail?": ("fig4", "shift", "fig9"),
    "Does other training prevent it?": ("fig2", "fig3", "fig11"),
    "For which architectures?": ("fig1", "fig10"),
    "What is remembered, and is it used?": ("fig13", "fig6", "fig7", "table1"),
    "Is the repair free?": ("cost",),
}
"""What else was asked, and the figures that answer it."""
_SHOWN = 4
"""Charts of a figure that stand open; of several models half as many each."""


@dataclass
class Finished:
    """What a finished page holds.

    Attributes:
        record: its `farstate-findings`.
        group: charts, extents and arms that its script draws.
        titles, texts: by chart, its heading and its description for those who cannot see it.
        legend: by arm, the inside of its button.
    """

    record: dict[str, Any]
    group: dict[str, Any]
    titles: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    legend: dict[str, Markup] = field(default_factory=dict)


def read_page(path: Path) -> Finished:
    """Read a finished page.

    Raises:
        FarstateError: it is missing, or does not carry what the page of all results is made of.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such page; run `snakemake {path}`") from None
    embedded: dict[str, Any] = {}
    for name in ("findings", "charts"):
        found = re.search(rf'<script type="application/json" id="farstate-{name}">(.*?)</script>', content, re.S)
        try:
            embedded[name] = json.loads(found.group(1)) if found else None
        except json.JSONDecodeError:
            embedded[name] = None
        if embedded[name] is None:
            raise FarstateError(
                f"{path}: carries no {name}, it was drawn by another version; delete it and run `snakemake {path}`"
            )
    charts = embedded["charts"]
    (group,) = charts["groups"]
    reader = _Reader()
    reader.feed(re.sub(r"<(script|style)\b.*?</\1>", "", content, flags=re.S))
    legend = {
        html.unescape(arm): Markup(inner)  # our own page's
        for arm, inner in re.findall(r'<button\b[^>]*\bdata-arm="([^"]*)"[^>]*>(.*?)</button>', content, re.S)
    }
    return Finished(embedded["findings"], group, reader.titles, reader.texts, legend)


class _Reader(HTMLParser):
    """Collects headings of charts (`<id>-title`) and the descriptions of their boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.titles: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self._of: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        name = given.get("id", "")
        if re.fullmatch(r"h[1-6]", tag) and name.endswith("-title"):
            self._of = name.removesuffix("-title")
            self.titles[self._of] = ""
        elif "chart" in given.get("class", "").split():
            self.texts[name] = given.get("data-text", "")

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch(r"h[1-6]", tag):
            self._of = None

    def handle_data(self, data: str) -> None:
        if self._of is not None:
            self.titles[self._of] += data


def index_stage(wanted: Mapping[str, Any], folder: Path, root: Path = Path()) -> None:
    """Make the page of all results and its records from the finished pages in `folder`.

    Args:
        wanted: `pages` and `work` by figure, `params`, `version` (`farstate.plan.Index.wanted`).
        folder: where the pages lie, and where index.html, index.json and index.csv go.
        root: of the project, where `logs/` and `.farstate/` lie.

    Raises:
        FarstateError: a page is missing or of another version, or the whole is larger than MAXIMUM_BYTES.
    """
    finished = {name: read_page(folder / f"{name}.html") for name in sorted(wanted["pages"], key=list(FIGURES).index)}
    everything = sorted({directory for work in wanted["work"].values() for directory in work["below"]})
    records = index_origin.records_of(everything, root)
    figures = [_figure(name, page_, wanted["work"][name], records) for name, page_ in finished.items()]
    groups = [_group(name, page_) for name, page_ in finished.items()]
    changes = index_origin.changes_since(wanted["params"], root)
    origin = index_origin.origin(everything, records, wanted["params"])
    summary = {
        "scale": wanted["params"]["report"]["scale"],
        "figures": [{key: value for key, value in figure.items() if key not in _DRAWN} for figure in figures],
        "changes": changes,
        "origin": origin,
    }
    content = page.render(
        "index.html.j2",
        title="All results",
        keys=json.dumps({INDEX: digest(dict(wanted))}),
        note=wanted["params"]["report"]["note"],
        scale=summary["scale"],
        figures=figures,
        counts={word: [figure["name"] for figure in figures if figure["agreement"] == word] for word in SYMBOLS},
        sure=_sure(figures),
        main=_main(figures),
        asked=_asked(figures),
        symbols=SYMBOLS,
        words=WORDS,
        everywhere=_models(groups),
        arms=_arms(finished),
        changes=changes,
        origin=origin,
        duration=duration,
        siblings={kind: f"{INDEX}.{kind}" for kind in INDEX_FILES},
        drawings={"groups": groups},
    )
    if (size := len(content.encode())) > MAXIMUM_BYTES:
        raise FarstateError(
            f"the page of all results would be {size:,} bytes, more than {MAXIMUM_BYTES:,}; take a figure out of `figures` in params.yaml"
        )
    write_json(folder / f"{INDEX}.json", summary)
    write_text(folder / f"{INDEX}.csv", _table(figures))
    write_text(folder / f"{INDEX}.html", content)


_DRAWN = ("panels", "legend", "paper", "files")


def name_of(figure: str) -> str:
    """`Figure 5`, `Table 1`; of a page that is not the paper's, nothing."""
    found = re.fullmatch(r"(fig|table)(\d+)", figure)
    return f"{'Figure' if found.group(1) == 'fig' else 'Table'} {found.group(2)}" if found else ""


def _figure(name: str, finished: Finished, work: Mapping[str, Any], records: Mapping[str, Any]) -> dict[str, Any]:
    """What the template says of a figure: the page's record, its cost, its charts by model, the paper's values."""
    below = work["below"]
    told = [records[directory]["wall_seconds"] for directory in below if directory in records]
    return {
        **finished.record,
        "name": name,
        "called": name_of(name),
        "files": {kind: f"{name}.{kind}" for kind in PAGE_FILES},
        "needs": {kind: {"all": numbers[0], "own": numbers[1]} for kind, numbers in work["needs"].items() if numbers[0]},
        "wall": {"results": len(below), "recorded": len(told), "seconds": sum(told)},
        "panels": _panels(name, finished),
        "legend": list(finished.legend.items()),
        "paper": _paper(name),
    }


def _group(name: str, finished: Finished) -> dict[str, Any]:
    """The charts of a page as the page of all results draws them: their names begin with the figure's."""
    charts = [{**chart, "id": f"{name}-{chart['id']}", "model": chart.get("model", "")} for chart in finished.group["charts"]]
    return {**finished.group, "name": name, "charts": charts}


def _panels(name: str, finished: Finished) -> list[dict[str, Any]]:
    """The charts of a figure by model: those that stand open, and the others."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for chart in finished.group["charts"]:
        own = chart["id"]
        by_model.setdefault(chart.get("model", ""), []).append(
            {
                "id": f"{name}-{own}",
                "title": finished.titles.get(own, own).strip(),
                "text": finished.texts.get(own, ""),
                "broken": [],
            }
        )
    shown = _SHOWN if len(by_model) == 1 else _SHOWN // 2
    return [{"model": model, "open": charts[:shown], "more": charts[shown:]} for model, charts in by_model.items()]


def _arms(finished: Mapping[str, Finished]) -> list[tuple[str, Markup]]:
    """The arms of more than one figure, with the inside of their buttons: picking one shows it in all of them."""
    inside: dict[str, Markup] = {}
    for one in finished.values():
        inside = one.legend | inside  # as the first figure that has the arm calls it; a task calls its control otherwise
    order = [style.name for style in arm_styles(inside)]
    return [(arm, inside[arm]) for arm in order if sum(arm in one.legend for one in finished.values()) > 1]


def _models(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """The models of more than one figure: picking one shows it in all of them."""
    held = [{chart["model"] for chart in group["charts"]} - {""} for group in groups]
    return [
        model
        for model in dict.fromkeys(name for names in held for name in sorted(names))
        if sum(model in names for names in held) > 1
    ]


def _paper(name: str) -> list[dict[str, Any]]:
    """The digitised values of a figure: a line a model and method, its values by position."""
    found = []
    for points, what in DIGITISED.get(name, ()):
        lines = [
            {"model": model, "method": method, "values": _means(several)}
            for (model, method), several in paper_curves(points).items()
        ]
        found.append({"what": what, "lines": lines})
    return found


def _means(points: Sequence[PaperPoint]) -> list[str]:
    """`7.96 ± 0.05 at 2,048`; of several depths the mean, with the tolerance of one."""
    by_position: dict[float, list[PaperPoint]] = {}
    for point in points:
        by_position.setdefault(point.position, []).append(point)
    found = []
    for position, several in by_position.items():
        value = sum(point.value for point in several) / len(several)
        if several[0].lower_bound:
            found.append(f"at least {value:.3g} at {position:,.0f}")
        else:
            found.append(f"{value:.3g} ± {several[0].tolerance:g} at {position:,.0f}")
    return found


def _sure(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Verdicts, documents and seeds over all figures, each result counted once a figure; and what would decide the open ones."""
    known = [figure for figure in figures if figure["certainty"]]
    verdicts = {name: sum(figure["certainty"]["verdicts"][name] for figure in known) for name in ("PASS", "FAIL", "UNDECIDED")}
    return {
        "verdicts": verdicts,
        "documents": sorted({number for figure in known for number in figure["certainty"]["documents"]}),
        "seeds": sorted({number for figure in known for number in figure["certainty"]["seeds"]}),
        "undecided": [{"figure": figure["name"], **row} for figure in known for row in figure["certainty"]["undecided"]],
        "not comparable": [figure["name"] for figure in figures if figure["agreement"] == agreement.NOT_COMPARABLE],
    }


def _main(figures: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    by_name = {figure["name"]: figure for figure in figures}
    return next((by_name[name] for name in MAIN if name in by_name), figures[0] if figures else None)


def _asked(figures: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The questions of QUESTIONS that some figure answers, each with what those figures say, without the numbers."""
    by_name = {figure["name"]: figure for figure in figures}
    answered = []
    for question, names in QUESTIONS.items():
        answers = [{**by_name[name], "brief": brief(by_name[name]["sentence"])} for name in names if name in by_name]
        if answers:
            answered.append({"question": question, "answers": answers})
    return answered


def brief(sentence: str) -> str:
    """`sentence` with the names alone of what stands in brackets: `(one: 0.9 (0.8 to 1.0) nats; two: …)` becomes `(one, two)`."""

    def named(found: re.Match[str]) -> str:
        items = re.sub(r"\([^()]*\)", "", found.group(1)).split(";")
        names = dict.fromkeys(re.split("[:,]", item)[0].strip() for item in items if ":" in item)
        return f" ({', '.join(names)})" if names else ""

    return re.sub(r"\s*\(((?:[^()]|\([^()]*\))*)\)", named, sentence)


def _table(figures: Sequence[Mapping[str, Any]]) -> str:
    """A line a digitised value, or one a figure that has none at its scale."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    columns = ("what", "ours", "low", "high", "paper", "tolerance", "inside")
    writer.writerow(("figure", "scale", "agreement", "sentence", *columns))
    for figure in figures:
        for row in figure["compared"] or [{}]:
            values = ["" if row.get(column) is None else row[column] for column in columns]
            writer.writerow((figure["name"], figure["scale"], figure["agreement"], figure["sentence"], *values))
    return target.getvalue()
