"""What the pages of long-context tasks share: reading their one table, finding its numbers, rows of charts and tables of them.

It filters and formats; every number on those pages is in the table of the comparison, in the parameters or in the paper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars

from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.reference import PaperPoint
from farstate.reports import charts, task_charts, task_text, text
from farstate.reports.charts import Row
from farstate.reports.context import Context
from farstate.reports.figures import About
from farstate.reports.page import OUTPUTS
from farstate.reports.tables import read_table, rounded
from farstate.reports.task_charts import Panel, place
from farstate.reports.theme import ArmStyle, arm_styles

COLUMNS = (
    *("model", "arm", "prompting", "seed", "task", "length", "depth", "score", "against", "value", "low", "high"),
    *("seeds_low", "seeds_high", "n", "n_seeds", "chance", "train_length", "measured"),
)
FIELDS = ("length", "place", "value", "low", "high", "over", "n", "measured")
"""What varies along a curve of `curve_rows` (`farstate.reports.charts.columns`)."""
MEAN = "mean"
"""The task of rows that are a mean over tasks."""
_KEY = ("model", "arm", "prompting", "seed", "task", "length", "depth", "score", "against")


@dataclass(frozen=True)
class Scores:
    """The table of a comparison, by what identifies a row, and what its manifest says of it.

    Attributes:
        interval, difference_interval: in words what low and high are.
        labels: how the tokenizer writes the answers' labels, in words; empty where nothing is said.
        broken: of what was asked, the examples whose logits were not finite.
        frequent: by task, the share of the most frequent answer, where it is known.
    """

    table: polars.DataFrame
    interval: str
    difference_interval: str
    confidence: float
    labels: str
    broken: Sequence[Mapping[str, Any]]
    frequent: Mapping[str, float]
    rows: Mapping[tuple[Any, ...], text.Row] = field(repr=False)

    def at(
        self,
        model: str,
        arm: str,
        prompting: str,
        task: str,
        length: int,
        score: str,
        *,
        against: str = "",
        depth: float | None = None,
        seed: int | None = None,
    ) -> text.Row | None:
        """A row with its intervals under the names that the text reads, or None where the table holds none."""
        return self.rows.get((model, arm, prompting, seed, task, length, depth, score, against))

    def seeds(self, model: str, arm: str, prompting: str) -> list[int]:
        """The seeds of which the table holds rows of their own."""
        return sorted({key[3] for key in self.rows if key[:3] == (model, arm, prompting) and key[3] is not None})

    def lengths(self, model: str, prompting: str = "") -> list[int]:
        """All lengths at which a model was asked (in one way), the shortest first."""
        return sorted({key[5] for key in self.rows if key[0] == model and prompting in ("", key[2])})

    def arms(self, model: str, prompting: str) -> list[str]:
        """The arms of a model that were asked in one way."""
        return list(dict.fromkeys(key[1] for key in self.rows if (key[0], key[2]) == (model, prompting)))


def read(directories: Sequence[Path], card: Context, scores: Sequence[str]) -> Scores:
    """The one comparison that a page shows.

    Args:
        directories: one, with `scores.parquet` and its manifest.
        card: what the page says of its models.
        scores: those that the page knows.

    Raises:
        FarstateError: several comparisons are given; the table or a column is missing or it is empty; it holds a score or a model that
            the page does not know, or a value that cannot be one.
    """
    if len(directories) != 1:
        raise FarstateError(f"task: {len(directories)} comparisons given, the page shows one")
    directory = Path(directories[0])
    path = directory / "scores.parquet"
    table, manifest = read_table(directory, "scores", COLUMNS), read_manifest(directory)
    if strange := sorted(set(table["score"]) - set(scores)):
        raise FarstateError(f"{path}: holds the score {', '.join(strange)}, the page knows {', '.join(scores)}; run it again")
    if unknown := sorted(set(table["model"]) - set(card.models)):
        raise FarstateError(f"{path}: holds {', '.join(unknown)}, of which the context says nothing")
    least = polars.when(polars.col("against") == "").then(0.0).otherwise(-1.0)
    if not (bad := table.filter((polars.col("value") > 1.0 + 1e-9) | (polars.col("value") < least - 1e-9))).is_empty():
        row = bad.row(0, named=True)
        raise FarstateError(
            f"{path}: {row['score']} = {row['value']:g} of {row['model']}, {row['arm']} at length {row['length']:,}: an accuracy is "
            "between 0 and 1, a difference of two between −1 and 1; run the comparison again"
        )
    majority = {task: level["majority"] for task, level in manifest["chance"].items() if level["majority"] is not None}
    if majority and set(majority) >= (several := set(table["task"]) - {MEAN}):
        majority[MEAN] = sum(majority[task] for task in several) / len(several)
    return Scores(
        table,
        manifest["interval"],
        manifest["difference_interval"],
        manifest["confidence"],
        manifest["labels"],
        manifest["broken"],
        majority,
        {tuple(row[key] for key in _KEY): _numbers(row) for row in table.iter_rows(named=True)},
    )


def _numbers(row: Mapping[str, Any]) -> text.Row:
    ends = {f"value_{end}": row[end] for end in ("low", "high", "seeds_low", "seeds_high")}
    return {**row, **ends}


def models(scores: Scores, card: Context) -> list[str]:
    """In the order of the page."""
    held = set(scores.table["model"])
    return [name for name in card.models if name in held]


def styles_of(scores: Scores, labels: Mapping[str, str]) -> list[ArmStyle]:
    """The styles of the arms; `labels`: what they are called on this page, where it is something else."""
    return [replace(style, label=labels.get(style.name, style.label)) for style in arm_styles(scores.table["arm"].unique())]


def curve_rows(
    scores: Scores,
    model: str,
    prompting: str,
    task: str,
    score: str,
    styles: Sequence[ArmStyle],
    *,
    against: str = "",
    seeds: bool = True,
    guessing: bool = True,
) -> list[Row]:
    """Rows of `farstate.reports.task_charts.Panel`: the means over seeds, each seed where there are several, and chance.

    `guessing`: whether the table's chance, one for each task, is that of this score.
    """
    lengths = scores.lengths(model, prompting)
    least = min([length for length in lengths if length > 0] or [1])
    rows: list[Row] = []
    chances: dict[int, float] = {}
    for style in styles:
        each = scores.seeds(model, style.name, prompting) if seeds else []
        for seed in (None, *(each if len(each) > 1 else ())):
            for length in lengths:
                row = scores.at(model, style.name, prompting, task, length, score, against=against, seed=seed)
                if row is None or not text.finite(row["value"]):
                    continue
                rows.append(
                    {
                        **{"kind": "mean" if seed is None else "seed", "arm": style.name, "label": style.label},
                        "seed": _seed(row, seed),
                        **{"length": length, "place": rounded(place(length, least))},
                        **numbers(row),
                        "note": f"minus {against}, on the same examples" if against else "accuracy",
                    }
                )
                if guessing and not against and text.finite(row["chance"]):
                    chances.setdefault(length, row["chance"])
    for length in sorted(chances):
        rows.append(
            {
                **{"kind": "chance", "arm": "", "label": "chance", "seed": "", "length": length},
                **{"place": rounded(place(length, least)), "value": rounded(chances[length]), "low": None, "high": None},
                **{"over": "", "n": None, "measured": None, "note": "guessing"},
            }
        )
    return rows


def numbers(row: text.Row) -> Row:
    """A row's value, intervals and counts as charts show them."""

    def end(name: str) -> float | None:
        return rounded(row[name]) if text.finite(row[name]) else None

    return {
        **{"value": end("value"), "low": end("low"), "high": end("high"), "n": row["n"]},
        "over": text.between(row, "value_seeds", task_text.accuracy) or "none",
        "measured": end("measured"),
    }


def _seed(row: text.Row, seed: int | None) -> str:
    if seed is not None:
        return str(seed)
    return f"mean over {row['n_seeds']} seeds" if row["n_seeds"] > 1 else "one"


def paper_rows(
    points: Sequence[PaperPoint], methods: Mapping[str, str], styles: Sequence[ArmStyle], least: int, note: str
) -> list[Row]:
    """The paper's values as rows of a panel, of the arms that it shows."""
    labels = {style.name: style.label for style in styles}
    return [
        {
            **{"kind": "paper", "arm": methods[point.method], "label": labels[methods[point.method]], "seed": "not stated"},
            **{"length": round(point.position), "place": rounded(place(round(point.position), least))},
            **{"value": rounded(point.value), "low": rounded(point.value - point.tolerance)},
            **{"high": rounded(point.value + point.tolerance), "over": "not given", "n": None, "measured": None, "note": note},
        }
        for point in points
        if methods.get(point.method) in labels
    ]


def trained(scores: Scores, model: str, prompting: str, words: str) -> dict[int, str]:
    """The training lengths of a model asked in one way, with `words` about each ({} stands for the length)."""
    lengths = {row["train_length"] for key, row in scores.rows.items() if (key[0], key[2]) == (model, prompting)}
    return {length: words.format(f"{length:,}") for length in sorted(lengths)}


def described(panel: Panel, styles: Sequence[ArmStyle]) -> str:
    """What a reader who cannot see the chart is told."""
    ends = []
    for style in styles:
        rows = [row for row in panel.rows if row["arm"] == style.name and row["kind"] == "mean"]
        if rows:
            values = [f"{task_text.accuracy(row['value'])} at {row['length']:,}" for row in (rows[0], rows[-1])]
            ends.append(f"{style.label}: {', '.join(values)}")
    return f"{panel.title} by length in {panel.unit}, {panel.model}. {'. '.join(ends)}. All values are in the data tables below."


def data_table(panel: Panel, styles: Sequence[ArmStyle], unit: str) -> dict[str, Any]:
    """A line per length, a column per arm, over all seeds; chance and the paper's values where there are any."""
    write = task_text.signed if panel.difference else task_text.accuracy
    columns = [
        (kind, style.name, label)
        for kind, mark in (("mean", ""), ("paper", ", the paper"))
        for style in styles
        for label in (style.label + mark,)
    ]
    columns.append(("chance", "", "chance"))
    cells = {(row["kind"], row["arm"], row["length"]): row for row in panel.rows}
    used = [column for column in columns if any(key[:2] == column[:2] for key in cells)]
    lines = []
    for length in sorted({key[2] for key in cells}):
        found = [cells.get((kind, arm, length)) for kind, arm, _ in used]
        lines.append((f"{length:,}", [_cell(row, write) for row in found]))
    return {"title": panel.title, "unit": unit, "columns": [label for *_, label in used], "lines": lines}


def _cell(row: Row | None, write: Any) -> str:
    if row is None:
        return text.NONE
    return text.estimate({"x": row["value"], "x_low": row["low"], "x_high": row["high"]}, "x", write)


def broken(scores: Scores, model: str, styles: Sequence[ArmStyle]) -> list[str]:
    """A line for each arm of a model whose logits were not finite somewhere."""
    labels = {style.name: style.label for style in styles}
    counts: dict[tuple[str, str], int] = {}
    for each in scores.broken:
        if each["model"] == model and each["arm"] in labels:
            key = each["arm"], task_text.PROMPTINGS.get(str(each.get("prompting", "")), "")
            counts[key] = counts.get(key, 0) + int(each["examples"])
    return [
        f"{labels[arm]}{f', {way}' if way else ''}: logits that are not finite in {text.count(number)} example{'s' * (number != 1)}, where the answer ends"
        for (arm, way), number in counts.items()
    ]


def case(scores: Scores, card: Context, model: str, prompting: str, task: str, styles: Sequence[ArmStyle]) -> task_text.Case:
    """What the sentences read of a model that was asked in one way."""
    wanted = [style for style in styles if style.name in scores.arms(model, prompting)]
    rows = {
        (key[1], key[7], key[8], key[5], key[6]): row
        for key, row in scores.rows.items()
        if (key[0], key[2], key[3], key[4]) == (model, prompting, None, task)
    }
    return task_text.Case(
        label=card.models[model].label,
        arms={style.name: style.label for style in sorted(wanted, key=lambda style: style.name != "base")},
        train_length=max((row["train_length"] for row in rows.values()), default=card.models[model].context),
        rows=rows,
        frequent=scores.frequent.get(task),
    )


def training_seeds(scores: Scores) -> list[int]:
    """Numbers of seeds behind all that was trained further."""
    return sorted({row["n_seeds"] for key, row in scores.rows.items() if key[1] != "base" and key[3] is None})


def differences(scores: Scores) -> int:
    """How many differences over all seeds have an interval."""
    rows = (row for key, row in scores.rows.items() if key[3] is None and key[8])
    return sum(text.finite(row["low"]) and text.finite(row["high"]) for row in rows)


def drawings(prefix: str, panels: Sequence[Panel], styles: Sequence[ArmStyle]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The ranges of all panels, and what the page's script draws: a chart for each, named by the prefix and its number."""
    ranges = task_charts.extents(panels)
    charted = [
        {
            **{"id": f"{prefix}-{number}", "metric": panel.metric, "model": panel.model, "near": 1},
            "spec": task_charts.screen_panel(panel, styles, charts.joined(ranges.get(panel.metric, {}), "all")),
            "curves": charts.columns(panel.rows, FIELDS),
        }
        for number, panel in enumerate(panels)
    ]
    return ranges, charted


def words(
    about: About, card: Context, scores: Scores, output: Mapping[str, Path], keys: Mapping[str, Any], drawn: polars.DataFrame
) -> dict[str, Any]:
    """What every template of a task is given."""
    return {
        "title": card.titled(about.title),
        "about": about,
        "card": card,
        "keys": json.dumps(dict(keys), sort_keys=True, ensure_ascii=False),
        "certainty": task_text.certainty(scores.interval, scores.difference_interval, training_seeds(scores)),
        "comparisons": task_text.comparisons(differences(scores), scores.confidence),
        "write": {"accuracy": task_text.accuracy, "signed": task_text.signed},
        "siblings": {name: output[name].name for name in OUTPUTS if name != "html"},
        "rows": drawn.height,
    }
