"""Vega-Lite specifications of effective remembrance by start point, on an axis that is logarithmic from both ends."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farstate.reports.charts import SCHEMA, Extent, Row, joined
from farstate.reports.theme import ArmStyle, Spec, colour_on, colour_signal, configuration, screen_parameters


@dataclass(frozen=True)
class Measure:
    """What a panel's vertical axis shows; `difference`: a paired one, to the base model."""

    name: str
    title: str
    axis: str
    height: int
    difference: bool = False


MEASURES = (
    Measure("total_variation", "Total variation", "total variation, 0 to 1", 340),
    Measure("difference", "Total variation minus the base model's", "difference of total variation", 200, difference=True),
    Measure("jensen_shannon", "Jensen–Shannon divergence", "nats, 0 to log 2 = 0.693", 160),
    Measure("jensen_shannon_distance", "Jensen–Shannon distance (root of the divergence)", "√nats, 0 to 0.833", 160),
    Measure("cosine_distance", "1 − cosine", "1 − cosine, 0 to 1", 160),
)


@dataclass(frozen=True)
class Panel:
    """The rows of one model and measure.

    Each row has `kind` ("mean": over the last positions; "single": the prediction after x_T; "paper"), `alone` (of a single one: no mean
    exists at this start), `arm`, `label`, `start`, `left` (tokens that are read), `place` (on the axis), `value`, `low`, `high`,
    `n` (documents), `tokens` (predictions compared) and `note`; `low`, `high`, `n` and `tokens` may be null.
    """

    model: str
    title: str
    measure: Measure
    train_length: int
    length: int
    rows: Sequence[Row] = field(repr=False)


def place(start: float, length: int) -> float:
    """Where a start point stands: log2 t up to T / 2, from there on mirrored, log2 (T − t) from the right; 0 and T one step outside."""
    half = math.log2(length / 2)
    if start <= length / 2:
        return math.log2(start) if start >= 1 else -1.0
    return 2 * half - math.log2(length - start) if start <= length - 1 else 2 * half + 1


def extents(panels: Iterable[Panel]) -> dict[str, dict[str, dict[str, Extent]]]:
    """By measure and arm the range that is drawn, as `farstate.reports.charts.extents` gives it; there is one view."""
    found: dict[str, dict[str, dict[str, Extent]]] = {}
    for panel in panels:
        for row in panel.rows:
            numbers = [row[key] for key in ("value", "low", "high") if row[key] is not None]
            by_view = found.setdefault(metric(panel.measure), {}).setdefault(row["arm"], {})
            low, high = by_view.get("all", (math.inf, -math.inf))
            by_view["all"] = by_view["near"] = (min(low, *numbers), max(high, *numbers))
    return found


def metric(measure: Measure) -> str:
    """The measure's key among the extents of a page, which may hold other charts."""
    return f"remembrance-{measure.name}"


def screen_panel(panel: Panel, styles: Sequence[ArmStyle], y_range: Extent) -> Spec:
    """A panel for the page, which supplies the data set `rows`."""
    return {
        "$schema": SCHEMA,
        "description": f"Effective remembrance, {panel.measure.title}, {panel.title}",
        "width": "container",
        "height": panel.measure.height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 14, "top": 20, "bottom": 2},
        "params": [
            *screen_parameters(),
            {"name": "shown", "value": [style.name for style in styles]},
            {"name": "y_low", "value": y_range[0]},
            {"name": "y_high", "value": y_range[1]},
        ],
        "data": {"name": "rows"},
        "transform": [{"filter": "indexof(shown, datum.arm) >= 0"}, *_TOOLTIP_TEXT],
        "layer": _layers(panel, styles, static=False, y_range=y_range),
        "config": configuration(static=False),
    }


def static_panel(panel: Panel, styles: Sequence[ArmStyle], heading: str, y_range: Extent, *, legend: bool) -> Spec:
    """The panel on a static sheet, its rows in it; `legend`: with one above, else that of other panels serves."""
    return {
        "title": {"text": heading, "offset": 14},
        "width": 330,
        "height": 260,
        "data": {"values": list(panel.rows)},
        "transform": list(_TOOLTIP_TEXT),
        "layer": _layers(panel, styles, static=True, y_range=y_range, legend=legend),
    }


def static_rows(panels: Sequence[Panel], styles: Sequence[ArmStyle], *, legend: bool) -> list[Spec]:
    """Panels side by side: those of a model in a row; of several models with one panel each, three to a row.

    Without a legend they stand among other charts, and say what they are.
    """
    ranges = extents(panels)
    models = list(dict.fromkeys(panel.model for panel in panels))
    width = _SIDE_BY_SIDE if len(models) == len(panels) else len(panels) // len(models)
    columns = [
        static_panel(
            panel,
            styles,
            (f"{panel.title}: " if len(models) > 1 else "")
            + (panel.measure.title if legend else "effective remembrance, total variation"),
            joined(ranges.get(metric(panel.measure), {}), "all"),
            legend=legend,
        )
        for panel in panels
    ]
    shared = {"scale": dict.fromkeys(("color", "strokeDash", "shape"), "shared")}
    return [
        {"hconcat": columns[first : first + width], "spacing": 28, "resolve": shared} for first in range(0, len(columns), width)
    ]


_SIDE_BY_SIDE = 3


_TOOLTIP_TEXT: list[Spec] = [
    {
        "calculate": "isValid(datum.low) && isValid(datum.high) ? format(datum.low, ',.3~r') + ' to ' + format(datum.high, ',.3~r') : 'none'",
        "as": "interval",
    },
    {"calculate": "isValid(datum.n) ? format(datum.n, ',') : 'not given'", "as": "documents"},
    {"calculate": "isValid(datum.tokens) ? format(datum.tokens, ',') : 'not given'", "as": "compared"},
]
_TOOLTIP: list[Spec] = [
    {"field": "label", "title": "arm"},
    {"field": "start", "title": "start t, tokens dropped", "format": ",d"},
    {"field": "left", "title": "tokens left", "format": ",d"},
    {"field": "value", "title": "value", "format": ",.4~r"},
    {"field": "interval", "title": "low to high"},
    {"field": "documents", "title": "documents"},
    {"field": "compared", "title": "predictions compared"},
    {"field": "note", "title": "what it is"},
]


def _x(panel: Panel) -> Spec:
    """Powers of two from either end; the left ones are named by t, the right ones by what is left of T."""
    half = math.log2(panel.length / 2)
    powers = list(range(0, max(1, math.ceil(half)), 2))
    left = [float(power) for power in powers if power < half]
    ticks = [-1.0, *left, half, *(2 * half - power for power in reversed(left)), 2 * half + 1]
    label = (
        f"datum.value < -0.5 ? '0' : datum.value < {half - 1e-6:.9g} ? format(pow(2, datum.value), ',d') : "
        f"datum.value < {half + 1e-6:.9g} ? 'T / 2' : datum.value > {2 * half + 0.5:.9g} ? 'T' : "
        f"'T − ' + format(pow(2, {2 * half:.12g} - datum.value), ',d')"
    )
    return {
        "field": "place",
        "type": "quantitative",
        "scale": {"domain": [-1.0, 2 * half + 1], "nice": False, "zero": False},
        "axis": {
            "title": f"start t: the first t of T = {panel.length:,} tokens are dropped",
            "values": ticks,
            "labelExpr": label,
            "labelOverlap": "parity",
            "labelSeparation": 5,
            "labelFlush": False,
            "grid": False,
        },
    }


def _y(panel: Panel, *, static: bool, y_range: Extent) -> Spec:
    low, high = (repr(y_range[0]), repr(y_range[1])) if static else ("y_low", "y_high")
    span = f"max(0.0001, max(0, {high}) - min(0, {low}))"
    bottom = f"min(0, {low}) - {0.06 if panel.measure.difference else 0.0} * {span}"
    axis: Spec = {
        "title": panel.measure.axis if static else None,
        "format": "~r",
        "tickCount": 5,
        "labelOverlap": "greedy",
        **({} if static else {"minExtent": 44, "maxExtent": 44}),
    }
    return {
        "field": "value",
        "type": "quantitative",
        "scale": {"nice": False, "zero": False, "domain": [{"expr": bottom}, {"expr": f"max(0, {high}) + 0.06 * {span}"}]},
        "axis": axis,
    }


def _channels(styles: Sequence[ArmStyle], *, static: bool, legend: bool) -> tuple[Spec, Spec, Spec]:
    """Colour, dash and shape by arm; the page has its own legend."""
    names = [style.name for style in styles]
    labels = json.dumps({style.name: style.label for style in styles}, ensure_ascii=False)
    shown: Mapping[str, Any] = {"legend": None}
    if static:
        shown = {
            "legend": {
                **{"title": None, "orient": "top", "columns": 0, "labelExpr": f"{labels}[datum.label]"},
                **{"labelLimit": 400, "columnPadding": 22},
            }
        }
        if not legend:
            shown = {}

    def channel(values: list[Any]) -> Spec:
        return {"field": "arm", "type": "nominal", "scale": {"domain": names, "range": values}, **shown}

    return (
        channel([colour_on(style, dark=False) if static else colour_signal(style) for style in styles]),
        channel([[*style.dash] or [1, 0] for style in styles]),
        channel([style.shape for style in styles]),
    )


def _layers(panel: Panel, styles: Sequence[ArmStyle], *, static: bool, y_range: Extent, legend: bool = True) -> list[Spec]:
    """Bottom to top: guides, bands, the single prediction, means, points, the paper's values."""
    soft: Any = "#5c636b" if static else {"expr": "soft"}
    ink: Any = "#1b1d21" if static else {"expr": "ink"}
    x, y = _x(panel), _y(panel, static=static, y_range=y_range)
    colour, dash, shape = _channels(styles, static=static, legend=legend)
    bare, bare_shape = ({key: value for key, value in channel.items() if key != "legend"} for channel in (colour, shape))
    layers: list[Spec] = []
    if panel.length + 1 > panel.train_length:
        mark = {"place": place(panel.length + 1 - panel.train_length, panel.length), "text": "T_train tokens left"}
        layers += [
            {
                "data": {"values": [mark]},
                "mark": {"type": "rule", "strokeDash": [5, 4], "color": soft, "aria": False},
                "encoding": {"x": x},
            },
            {
                "data": {"values": [mark]},
                "mark": {"type": "text", "baseline": "bottom", "fontSize": 11, "color": soft, "aria": False},
                "encoding": {"x": x, "y": {"value": -5}, "text": {"field": "text"}},
            },
        ]
    layers.append(
        {
            "data": {"values": [{"value": 0}]},
            "mark": {"type": "rule", "color": ink, "strokeWidth": 1, "aria": False},
            "encoding": {"y": y},
        }
    )
    for kind in ("datum.kind == 'mean'", "datum.kind == 'single' && datum.alone"):
        layers.append(
            {
                "transform": [{"filter": f"{kind} && isValid(datum.low) && isValid(datum.high)"}],
                "mark": {"type": "area", "fillOpacity": 0.16, "aria": False},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": bare},
            }
        )
    layers += [
        {
            "transform": [{"filter": "datum.kind == 'single'"}],
            "mark": {"type": "line", "strokeWidth": 0.9, "opacity": 0.7, "aria": False},
            "encoding": {"x": x, "y": y, "color": bare},
        },
        {
            "transform": [{"filter": "datum.kind == 'mean'"}],
            "mark": {"type": "line", "strokeWidth": 1.9, "aria": False},
            "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash},
        },
    ]
    points: Spec = {
        "transform": [{"filter": "datum.kind != 'paper'"}],
        "mark": {"type": "point", "filled": True, "opacity": 1, "aria": False},
        "encoding": {
            **{"x": x, "y": y, "color": colour, "shape": shape, "tooltip": _TOOLTIP},
            "size": {"condition": {"test": "datum.kind == 'mean'", "value": 34}, "value": 8},
        },
    }
    if not static:
        points["params"] = [
            {"name": "hover", "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}
        ]
        points["encoding"]["size"] = {
            "condition": [{"param": "hover", "empty": False, "value": 130}, {"test": "datum.kind == 'mean'", "value": 34}],
            "value": 8,
        }
    layers.append(points)
    if any(row["kind"] == "paper" for row in panel.rows):
        only = [{"filter": "datum.kind == 'paper'"}]
        layers += [
            {
                "transform": only,
                "mark": {"type": "rule", "strokeWidth": 1.2, "aria": False},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": bare},
            },
            {
                "transform": only,
                "mark": {"type": "point", "filled": False, "size": 95, "strokeWidth": 1.6, "aria": False},
                "encoding": {"x": x, "y": y, "color": bare, "shape": bare_shape, "tooltip": _TOOLTIP},
            },
        ]
    return layers
