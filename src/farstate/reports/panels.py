"""What all pages of curves by position share: reading and checking the tables, rows of the charts, words and tables about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars

from farstate.errors import FarstateError
from farstate.reports import text
from farstate.reports.charts import Panel, Row, trained_on
from farstate.reports.tables import rounded
from farstate.reports.theme import ArmStyle, Spec

CURVE_COLUMNS = (
    *("model", "arm", "seed", "train_length", "metric", "position", "value", "low", "high", "n_documents", "n_tokens"),
)
CURVE_FIELDS = ("position", "value", "low", "high", "tokens")
"""What varies along a curve of `chart_row` (`farstate.reports.charts.columns`)."""
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
        "confidence",
    ),
    *("would_be", "documents_to_decide"),
    *("fails_beyond", "worst_beyond", "gap_beyond", "gap_beyond_low", "gap_beyond_high"),
    *("verdict_interval", "interval", "n_documents", "n_stretches", "n_seeds", "broken_at", "far_from", "far_to"),
    *(f"{name}{end}" for name in _ESTIMATES for end in ("", "_low", "_high")),
    *("excess_nll_seeds_low", "excess_nll_seeds_high", "steps", "tokens", "learning_rate"),
)


def checked(table: polars.DataFrame, metrics: Sequence[str], path: Path) -> polars.DataFrame:
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


def last_position(drawn: polars.DataFrame, verdicts: polars.DataFrame) -> int:
    """The last position measured; without a verdict beyond the training length, that of the last bin's centre."""
    measured = verdicts["far_to"].drop_nulls().to_list()
    return int(max(measured)) if measured else math.ceil(max(drawn["position"].to_list()))


def arm_rows(arm: polars.DataFrame, style: ArmStyle) -> list[Row]:
    """The rows of one arm and metric: the mean over seeds, and each seed where there are several or no mean."""
    rows: list[Row] = []
    seeds = arm["seed"].drop_nulls().unique().sort().to_list()
    has_mean = arm["seed"].null_count() > 0
    if has_mean:
        over = f"mean over {len(seeds)} seeds" if len(seeds) > 1 else f"{seeds[0]}" if seeds else "all"
        rows += curve_rows(arm.filter(polars.col("seed").is_null()), "mean", style.name, style.label, over, "measured")
    if len(seeds) > 1 or not has_mean:
        for seed in seeds:
            of_seed = arm.filter(polars.col("seed") == seed)
            rows += curve_rows(of_seed, "seed", style.name, style.label, str(seed), "measured, one seed")
    return rows


def curve_rows(table: polars.DataFrame, kind: str, arm: str, label: str, seed: str, note: str) -> list[Row]:
    """Rows of one curve; where its values stop being numbers a row `broken` stands at the last good height."""
    rows: list[Row] = []
    last: float | None = None
    has_broken = False
    for record in table.sort("position").iter_rows(named=True):
        value = record["value"]
        if text.finite(value):
            last = rounded(value)
            low, high = (rounded(record[end]) if text.finite(record[end]) else None for end in ("low", "high"))
            counts = record["n_documents"], note, record["n_tokens"]
            rows.append(chart_row(kind, arm, label, seed, record["position"], last, low, high, *counts))
        elif not has_broken:
            has_broken = True
            rows.append(
                chart_row(
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
                    record["n_tokens"],
                )
            )
    return rows


def chart_row(
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
    tokens: int | None = None,
) -> Row:
    """A row as `farstate.reports.charts.Panel` takes it."""
    return {
        **{"kind": kind, "arm": arm, "label": label, "seed": seed, "position": rounded(position)},
        **{"value": value, "low": low, "high": high, "n": documents, "tokens": tokens, "note": note},
    }


def add_drawing(
    drawings: list[dict[str, Any]], name: str, metric: str, model: str, spec: Spec, curves: Sequence[Row]
) -> dict[str, Any]:
    """Add a chart to those the page's script draws; the figure element for it only needs its name."""
    near = next(parameter["value"] for parameter in spec["params"] if parameter["name"] == "x_low")
    drawings.append({"id": name, "metric": metric, "model": model, "near": near, "spec": spec, "curves": curves})
    return {"id": name}


Write = Callable[[Any], str]


def _writer(panel: Panel, write: Write | None) -> Write:
    return write or (text.perplexity if panel.metric.logarithmic else text.nats)


def described(panel: Panel, names: Mapping[str, str], write: Write | None = None) -> str:
    """What a reader who cannot see the chart is told: the axes, and where every curve begins and ends.

    `write`: how a value is written; None: as perplexities and nats are.
    """
    ends = []
    write = _writer(panel, write)
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
    return f"{panel.metric.title}, {panel.title}, {trained_on(panel)}. {'. '.join(ends)}. All values are in the data table below."


def broken(panel: Panel) -> list[str]:
    """A line for each curve that stops being a number."""
    lines = []
    for row in panel.rows:
        if row["kind"] == "broken":
            whose = f"{row['label']}, seed {row['seed']}" if row["seed"].isdigit() else row["label"]
            lines.append(f"{whose}: not a number from position {row['position']:,.0f} on")
    return lines


def data_table(panel: Panel, styles: Sequence[ArmStyle], write: Write | None = None, unit: str | None = None) -> dict[str, Any]:
    """A metric as a table for reading: a line per position, a column per curve over all seeds."""
    columns = [(style.name, style.label) for style in styles]
    cells: dict[float, dict[str, Row]] = {}
    for row in panel.rows:
        if row["kind"] in ("mean", "reference", "broken"):
            cells.setdefault(row["position"], {}).setdefault(row["arm"], row)
    used = [column for column in columns if any(column[0] in line for line in cells.values())]
    write = _writer(panel, write)
    lines = []
    for position in sorted(cells):
        line = [_cell(cells[position].get(arm), write) for arm, _ in used]
        lines.append((f"{position:,.4g}" if position < 1000 else f"{position:,.0f}", line))
    return {
        "title": panel.metric.title,
        "unit": unit or ("perplexity" if panel.metric.logarithmic else "nats"),
        "columns": [label for _, label in used],
        "lines": lines,
    }


def _cell(row: Row | None, write: Callable[[Any], str]) -> str:
    if row is None:
        return text.NONE
    if row["kind"] == "broken" or not text.finite(row["value"]):
        return "not a number"
    return text.estimate({"x": row["value"], "x_low": row["low"], "x_high": row["high"]}, "x", write)
