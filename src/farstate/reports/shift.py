"""The page of shifts: are the states far out those that training met, and does it explain the excess?

The stage reads the tables of `farstate.evaluation.shift`, one directory a run, and draws them. It filters, counts and formats;
every number on the page is in a table, in a manifest or in the parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars

from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.reports import agreement, charts, page, shift_charts, shift_text, text
from farstate.reports.charts import Row
from farstate.reports.context import Context, read_context
from farstate.reports.figures import About
from farstate.reports.page import OUTPUTS
from farstate.reports.shift_charts import MEASURES, Measure
from farstate.reports.shift_text import OWN, Run
from farstate.reports.tables import read_table, rounded
from farstate.reports.theme import ArmStyle, Spec, arm_styles, configuration

_LABELS = ("model", "arm", "seed", "train_length", "position")
SHIFT_COLUMNS = (
    *(*_LABELS, "layer", "head", "reference", "measure", "value", "low", "high", "null", "null_low", "null_high"),
    *("null_end", "null_end_low", "null_end_high", "beyond"),
    *("n_states", "n_documents", "n_reference", "n_reference_documents", "interval", "reason"),
)
ASSOCIATION_COLUMNS = (*(*_LABELS, "reference", "across", "layer", "head", "value", "low", "high", "p", "p_holm", "n", "reason"),)
SWAP_COLUMNS = (
    *(*_LABELS, "group", "source", "together", "layer", "head", "heads", "drift", "value", "low", "high"),
    *("n_texts", "n_documents", "interval", "reason"),
)
_VARYING_CURVE = ("position", "value", "null_low", "null_high", "end", "band", "end_band", "counted")
_VARYING_HEAD = ("layer", "head", "place", "order", "position", "value", "above", "shown", "interval", "band", "end_band")
_VARYING_SWAP = ("what", "order", "source", "kind", "value", "low", "high", "interval")


def draw(
    about: About,
    inputs: Mapping[str, Sequence[Path]],
    output: Mapping[str, Path],
    context: dict[str, Any],
    keys: Mapping[str, Any],
) -> None:
    """Draw measurements of shifts (`page.Draw`).

    Inputs: under "shift" a directory for each model, arm and seed, with shift, association and swaps (`.parquet`).
    """
    page.check_outputs(output)
    card = read_context(context)
    runs = [_run(directory) for directory in inputs["shift"]]
    present = {run["model"] for run in runs}
    if unknown := sorted(present - set(card.models)):
        raise FarstateError(f"{inputs['shift'][0]} holds {', '.join(unknown)}, of which the context says nothing")
    styles = arm_styles({run["name"] for run in runs})
    labels = {style.name: style.label for style in styles}
    order = list(labels)
    runs = sorted(
        ({**run, "label": labels[run["name"]]} for run in runs), key=lambda run: (order.index(run["name"]), run["seed"] or 0)
    )
    by_model = {model: [run for run in runs if run["model"] == model] for model in card.models if model in present}
    drawings: list[dict[str, Any]] = []
    sections, sheet = [], []
    for number, (model, mine) in enumerate(by_model.items()):
        section, rows = _section(number, card, model, mine, styles, drawings)
        sections.append(section)
        sheet += rows
    specification = _sheet(about, card, sheet)
    html = page.render(
        "shift.html.j2",
        record=agreement.record(
            about,
            card,
            keys,
            agreement.ours(leads := [section["headline"] for section in sections]),
            [
                *leads,
                *(
                    f"{section['card'].label}: {finding.topic} {finding.text}"
                    for section in sections
                    for finding in section["findings"]
                    if finding.topic.startswith("Does it explain")
                ),
            ],
        ),
        title=card.titled(about.title),
        about=about,
        card=card,
        keys=json.dumps(dict(keys), sort_keys=True, ensure_ascii=False),
        sections=sections,
        legend=styles,
        styles={style.name: style for style in styles},
        interval=text.listing(sorted({run["facts"]["interval"] for run in runs})),
        passed=any(run["passed"] for run in runs),
        drawings=page.group(output, drawings, {}, order),
        siblings={name: output[name].name for name in OUTPUTS if name != "html"},
        has_control="control" in order,
    )
    drawn = polars.concat([run["table"] for run in runs])
    page.write(output, html, specification, drawn, "lower shift.heads or the number of seeds")


def _run(directory: Path) -> dict[str, Any]:
    table = read_table(directory, "shift", SHIFT_COLUMNS)
    association = read_table(directory, "association", ASSOCIATION_COLUMNS, may_be_empty=True)
    swaps = read_table(directory, "swaps", SWAP_COLUMNS, may_be_empty=True)
    manifest = read_manifest(directory)
    if "summary" not in manifest or "swaps" not in manifest:
        raise FarstateError(
            f"{directory}: its manifest has no summary; it was written by another version, delete it and run again"
        )
    first = table.row(0, named=True)
    facts = manifest["references"][OWN]
    return {
        **{"model": first["model"], "name": first["arm"], "seed": first["seed"], "context": first["train_length"]},
        **{"table": table, "shift": table.to_dicts(), "association": association.to_dicts(), "swaps": swaps.to_dicts()},
        **{"summary": manifest["summary"], "explains": manifest["swaps"]["explains"], "facts": manifest, "met": facts},
        **{"positions": manifest["positions"], "swap_position": manifest["swap_position"], "broken": manifest["broken_at"] or {}},
        # Where states go from text to text, those of different folds have texts in common.
        "passed": bool(facts["chains"]),
    }


def _section(
    number: int,
    card: Context,
    model: str,
    runs: Sequence[Run],
    styles: Sequence[ArmStyle],
    drawings: list[dict[str, Any]],
) -> tuple[dict[str, Any], list[Spec]]:
    """What the template says of a model, and its rows of the static figure."""
    label, context = card.models[model].label, card.models[model].context
    mine = [style for style in styles if any(run["name"] == style.name for run in runs)]
    position = max(max(run["positions"]) for run in runs)
    curves, rows_of_sheet = [], []
    static: list[Spec] = []
    for measure in MEASURES:
        rows = [row for run in runs for row in _curve_rows(run, measure)]
        if not rows:
            continue
        heading = f"{measure.title} of the states against those that each arm's own training met, {label}. The values are in the tables below."
        name = f"{measure.name}-{number}"
        curves.append({"id": name, "title": measure.title, "text": heading, "broken": []})
        spec = shift_charts.screen_curves(heading, measure, mine, context)
        drawings.append(_drawing(name, measure.name, model, spec, rows, _VARYING_CURVE))
        static.append(shift_charts.static_curves(f"{label}: {_lower(measure.title)}", measure, mine, context, rows))
    if static:
        rows_of_sheet.append({"hconcat": static, "spacing": 28, "resolve": {"scale": {"color": "shared", "shape": "shared"}}})
    firsts = [next(run for run in runs if run["name"] == style.name) for style in mine]
    strips: list[dict[str, Any]] = []
    for measure in (MEASURES[0], MEASURES[2]):
        limit = _limit(firsts, measure)
        of_measure: list[Spec] = []
        for place, run in enumerate(firsts):
            rows = _head_rows(run, measure)
            if not any(row["value"] is not None for row in rows):
                continue
            heading = (
                f"{run['label']}: {_lower(measure.title)} by head and position, {label}. The values are in the tables below."
            )
            name = f"strip-{measure.name}-{place}-{number}"
            title = f"{run['label']}: {_lower(measure.title)}"
            strips.append({"id": name, "title": title, "text": heading, "broken": [], "measure": measure.name})
            spec = shift_charts.screen_strip(heading, measure, rows, limit)
            drawings.append(_drawing(name, "strip", model, spec, rows, _VARYING_HEAD))
            of_measure.append(shift_charts.static_strip(f"{label}: {run['label']}", measure, rows, limit))
        if of_measure and measure is MEASURES[0]:
            rows_of_sheet += [{"hconcat": of_measure[start : start + 3], "spacing": 28} for start in range(0, len(of_measure), 3)]
    swaps: list[dict[str, Any]] = []
    of_swaps: list[Spec] = []
    for place, run in enumerate(firsts):
        rows = _swap_rows(run)
        if not any(row["kind"] == "set" for row in rows):
            continue
        heading = f"{run['label']}: change of the loss when states are replaced at t = {run['swap_position']:,}, {label}. The values are in the table below."
        name = f"swaps-{place}-{number}"
        swaps.append({"id": name, "title": f"{run['label']}: swapped states", "text": heading, "broken": []})
        drawings.append(_drawing(name, "swaps", model, shift_charts.screen_swaps(heading, rows), rows, _VARYING_SWAP))
        of_swaps.append(shift_charts.static_swaps(f"{label}: {run['label']}, swapped states", rows))
    rows_of_sheet += [{"hconcat": of_swaps[start : start + 3], "spacing": 28} for start in range(0, len(of_swaps), 3)]
    section = {
        "name": model,
        "card": card.models[model],
        "headline": shift_text.headline(label, runs, position),
        "findings": shift_text.findings(runs, position, runs[0]["swap_position"], runs[0]["facts"]["comparisons"]),
        **{"curves": curves, "strips": strips, "swaps": swaps},
        "seeds": len({run["seed"] for run in runs if run["name"] != "base"}) > 1,
        "summary": [line for run in runs for line in _summary_lines(run, runs)],
        "met": [_met(run, runs) for run in runs],
        "effects": [{"topic": shift_text.topic(run, runs), "lines": _effect_lines(run)} for run in runs],
        "associations": [
            {
                "topic": shift_text.topic(run, runs),
                "lines": shift_text.association_lines(run, run["positions"]),
                "across": shift_text.across_heads(run),
            }
            for run in runs
        ],
        "heads": [_head_table(run, runs) for run in runs],
        "position": position,
    }
    return section, rows_of_sheet


def _drawing(name: str, metric: str, model: str, spec: Spec, rows: Sequence[Row], varying: Sequence[str]) -> dict[str, Any]:
    return {**{"id": name, "metric": metric, "model": model, "near": 1}, "spec": spec, "curves": charts.columns(rows, varying)}


# Rows of the charts ----------------------------------------------------------------------------------------


def _curve_rows(run: Run, measure: Measure) -> list[Row]:
    """Median and largest head at each position against the states of the run's own training."""
    rows: list[Row] = []
    for kind, what in (("median", "median head"), ("largest", "largest head")):
        for position in run["positions"]:
            record = shift_text.summary_of(run, measure.name, position)
            if record is None or not text.finite(record[kind]) or (measure.logarithmic and record[kind] <= 0.0):
                continue
            low, high, end = record["null_low"], record["null_high"], record["null_end_high"]
            if low is not None and measure.logarithmic:
                # The band may reach zero, which has no place on a logarithmic axis.
                low = max(low, 0.1 * record["null"])
            rows.append(
                {
                    **{
                        "arm": run["name"],
                        "label": run["label"],
                        "seed": _seed(run),
                        "curve": f"{run['name']} {run['seed']} {kind}",
                    },
                    **{"kind": kind, "what": what, "position": position, "value": rounded(record[kind])},
                    **{"null_low": _rounded(low), "null_high": _rounded(high), "band": _between(record, "null_low", "null_high")},
                    **{"end": _rounded(end), "end_band": _between(record, "null_end_low", "null_end_high")},
                    "counted": f"{record['above']} of {record['with_band']} heads" if record["with_band"] else "no band",
                }
            )
    return rows


def _head_rows(run: Run, measure: Measure) -> list[Row]:
    """Every head at every position."""
    rows = []
    for record in run["shift"]:
        if record["reference"] != OWN or record["measure"] != measure.name:
            continue
        value = _rounded(record["value"])
        rows.append(
            {
                "label": run["label"],
                **{"layer": record["layer"], "head": record["head"], "place": f"{record['layer']}.{record['head']}"},
                "order": record["layer"] * 100_000 + record["head"],
                **{"position": record["position"], "value": value, "above": record["beyond"]},
                "shown": record["reason"] or "none" if value is None else f"{value:.4g}",
                "interval": _between(record, "low", "high"),
                "band": _between(record, "null_low", "null_high"),
                "end_band": _between(record, "null_end_low", "null_end_high"),
            }
        )
    return rows


def _limit(runs: Sequence[Run], measure: Measure) -> float:
    """The upper end of the colours: the largest value, and a range that paints noise pale."""
    if not measure.logarithmic:
        return 1.0
    values = [
        row["value"]
        for run in runs
        for row in run["shift"]
        if row["measure"] == measure.name and row["reference"] == OWN and text.finite(row["value"])
    ]
    return float(max([4.0 * (measure.nothing or 1.0), *values]))


def _swap_rows(run: Run) -> list[Row]:
    """Sets of heads with intervals, single heads beside them, and where the whole excess would be gone."""
    rows: list[Row] = []
    for record in run["swaps"]:
        if not text.finite(record["value"]):
            continue
        if record["group"] == "untouched":
            rows.append(_swap_row(run, record, "all of the excess", 0, "excess", -record["value"], None, None, "–"))
        elif record["group"] in ("top", "random", "all") and "−" not in record["source"]:
            single = record["layer"] is not None
            together = {**record, "heads": record["heads"]}
            if single:
                members = sum(
                    other["layer"] is not None and (other["group"], other["source"]) == (record["group"], record["source"])
                    for other in run["swaps"]
                )
                together["heads"] = members
            what = shift_text.swap_name(together)
            order = {"top": 0, "random": 2, "all": 4}[record["group"]] + bool(record["together"])
            shown = f"layer {record['layer']}, head {record['head']}" if single else _between(record, "low", "high")
            kind = "single" if single else "set"
            rows.append(_swap_row(run, record, what, order, kind, record["value"], record["low"], record["high"], shown))
    return rows


def _swap_row(
    run: Run,
    record: Mapping[str, Any],
    what: str,
    order: int,
    kind: str,
    value: float,
    low: float | None,
    high: float | None,
    interval: str,
) -> Row:
    return {
        **{"label": run["label"], "what": what, "order": order, "source": record["source"], "kind": kind},
        **{"value": rounded(value), "low": _rounded(low), "high": _rounded(high), "interval": interval},
    }


def _lower(title: str) -> str:
    return title[0].lower() + title[1:]


def _rounded(value: Any) -> float | None:
    return rounded(float(value)) if text.finite(value) else None


def _between(record: Mapping[str, Any], low: str, high: str) -> str:
    if not (text.finite(record[low]) and text.finite(record[high])):
        return "none"
    return f"{record[low]:.3g} to {record[high]:.3g}"


def _seed(run: Run) -> str:
    return "none" if run["seed"] is None else str(run["seed"])


# Tables ----------------------------------------------------------------------------------------------------


def _summary_lines(run: Run, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A line for each position: the median head by measure, what lies inside training and at its end, how many heads are above."""
    lines = []
    for position in run["positions"]:
        cells = []
        for measure in MEASURES:
            record = shift_text.summary_of(run, measure.name, position)
            if record is None:
                cells.append({"title": measure.title, "value": text.NONE, "band": "", "above": ""})
                continue
            write = (lambda value: f"{value:.2f}") if measure.name == "accuracy" else shift_text.number
            band, above = shift_text.bands(record, write), ""
            if record["with_band"]:
                above = f"{record['above']} of {record['with_band']} heads above"
            value = f"{write(record['median'])}, largest {write(record['largest'])}"
            cells.append({"title": measure.title, "value": value, "band": band, "above": above})
        reason = next((row["reason"] for row in run["shift"] if row["position"] == position and row["reason"]), "")
        lines.append(
            {
                "arm": run["name"],
                "topic": shift_text.topic(run, runs),
                "position": f"{position:,}",
                "cells": cells,
                "reason": reason,
            }
        )
    return lines


def _met(run: Run, runs: Sequence[Run]) -> str:
    """Which states are the reference of a run."""
    met, facts = run["met"], run["facts"]
    said = f"{shift_text.topic(run, runs)}: {met['states']:,} states of {met['documents']} training documents"
    if met["steps"] is None:
        said += f", from the zero state after 1 to {facts['context']} tokens"
    else:
        said += f", from {met['steps']:,} replayed steps, {met['rows_replayed']} of {met['rows_of_a_batch']} rows of each"
        if met["age_largest"] is not None:
            said += f"; they had read {met['age_median']:,.0f} tokens in the median since they were zero, {met['age_largest']:,} at most"
    if met["null_states"]:
        said += f"; null band: {len(met['null_states'])} × {min(met['null_states']):,} held-out states of {met['null_documents']} documents"
    else:
        said += "; no null band: the held-out split is too small for the replay"
    replayed = met.get("steps_replayed_held_out")
    if replayed is not None and replayed != met["steps_replayed"]:
        said += (
            f". The held-out split has text for {replayed:,} steps only against {met['steps_replayed']:,}: initial states of its null bands "
            "are younger"
        )
    return f"{said}. Tested: {facts['stretches']:,} stretches of {facts['documents']} held-out documents."


def _effect_lines(run: Run) -> list[dict[str, Any]]:
    """A line per swap: what, by what, how much."""
    lines = []
    for record in run["swaps"]:
        if record["group"] == "untouched":
            what, source = "nothing: the excess itself", text.NONE
        elif record["layer"] is not None:
            what = f"layer {record['layer']}, head {record['head']} ({'by drift' if record['group'] == 'top' else 'at random'})"
            source = record["source"]
        else:
            what, source = shift_text.swap_name({**record, "heads": record["heads"] or ""}), record["source"]
            if record["heads"] is None and record["group"] in ("top", "all"):
                what = f"{'heads by drift' if record['group'] == 'top' else 'all heads'}, {'together' if record['together'] else 'singly'}"
        finite = text.finite(record["value"])
        lines.append(
            {
                **{"what": what, "source": source, "single": record["layer"] is not None},
                "drift": shift_text.number(record["drift"]),
                "value": shift_text.signed(record["value"]) if finite else text.NONE,
                "interval": f"{shift_text.signed(record['low'])} to {shift_text.signed(record['high'])}"
                if finite and text.finite(record["low"])
                else "",
                "reason": record["reason"] or "",
            }
        )
    return lines


def _head_table(run: Run, runs: Sequence[Run]) -> dict[str, Any]:
    """All heads of a run as a table for reading: a line per head, a column per position, one table per measure."""
    tables = []
    for measure in MEASURES:
        cells: dict[tuple[int, int], dict[int, str]] = {}
        for record in run["shift"]:
            if record["reference"] == OWN and record["measure"] == measure.name:
                shown = text.NONE
                if text.finite(record["value"]):
                    shown = f"{record['value']:.3g}"
                    if text.finite(record["low"]):
                        shown += f" ({record['low']:.3g} to {record['high']:.3g})"
                cells.setdefault((record["layer"], record["head"]), {})[record["position"]] = shown
        lines = [
            (f"layer {layer}, head {head}", [of_head.get(position, text.NONE) for position in run["positions"]])
            for (layer, head), of_head in sorted(cells.items())
        ]
        columns = [f"t = {position:,}" for position in run["positions"]]
        tables.append({"title": measure.title, "unit": measure.axis, "columns": columns, "lines": lines})
    return {"topic": shift_text.topic(run, runs), "tables": tables}


# Static figure ---------------------------------------------------------------------------------------------


def _sheet(about: About, card: Context, rows: Sequence[Spec]) -> Spec:
    """Curves, the strips of novelty and the swaps of each model below each other."""
    if not rows:
        rows = [
            {
                "data": {"values": [{"text": "No number: the page gives the reasons."}]},
                "mark": "text",
                "encoding": {"text": {"field": "text"}},
            }
        ]
    lines = [
        "Line: median head, dashed: largest; band: held-out states inside training, dotted: upper end of those at its end. "
        "Dashed vertical: training length."
    ]
    if card.budget:
        lines.append(card.budget)
    return {
        "$schema": charts.SCHEMA,
        "title": {"text": card.titled(about.title), "subtitle": lines, "fontSize": 17, "offset": 16},
        "vconcat": list(rows),
        "spacing": 30,
        "resolve": {"scale": {"color": "independent", "shape": "independent"}},
        "config": configuration(static=True),
    }
