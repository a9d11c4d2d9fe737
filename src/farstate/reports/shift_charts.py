"""Vega-Lite specifications of the page of shifts: heads by position, all heads as a strip, what swaps change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farstate.reports.charts import SCHEMA, Row
from farstate.reports.theme import ArmStyle, Spec, colour_on, colour_signal, configuration, screen_parameters

_STATIC_WIDTH = 330
_SOURCES = ("training state", "other document")
_SOURCE_COLOURS, _SOURCE_ON_DARK = ("#0072B2", "#B85C00"), ("#3A9BD9", "#E69F00")
_LOW_COLOUR, _HIGH_COLOUR = "#e8edf2", "#0b3c6f"
_LOW_ON_DARK, _HIGH_ON_DARK = "#2a2f37", "#8fd0ff"


@dataclass(frozen=True)
class Measure:
    """How a measure is drawn: `nothing` is its value where states are of one law."""

    name: str
    title: str
    axis: str
    logarithmic: bool
    nothing: float


MEASURES = (
    Measure("novelty", "Novelty", "distance ÷ that among training states", True, 1.0),
    Measure("sliced_wasserstein", "Sliced Wasserstein distance", "training deviations", True, 0.0),
    Measure("accuracy", "Accuracy of the two-sample test", "accuracy", False, 0.5),
)

_TOOLTIP: list[Spec] = [
    {"field": "label", "title": "arm"},
    {"field": "seed", "title": "seed"},
    {"field": "position", "title": "position t", "format": ",d"},
    {"field": "what", "title": "heads"},
    {"field": "value", "title": "value", "format": ".4~r"},
    {"field": "band", "title": "inside training"},
    {"field": "end_band", "title": "at T_train"},
    {"field": "counted", "title": "above both"},
]
_HEAD_TOOLTIP: list[Spec] = [
    {"field": "label", "title": "arm"},
    {"field": "layer", "title": "layer"},
    {"field": "head", "title": "head"},
    {"field": "position", "title": "position t", "format": ",d"},
    {"field": "shown", "title": "value"},
    {"field": "interval", "title": "interval"},
    {"field": "band", "title": "inside training"},
    {"field": "end_band", "title": "at T_train"},
]
_SWAP_TOOLTIP: list[Spec] = [
    {"field": "label", "title": "arm"},
    {"field": "what", "title": "replaced"},
    {"field": "source", "title": "by"},
    {"field": "value", "title": "change, nats", "format": "+.4~f"},
    {"field": "interval", "title": "interval"},
]


def screen_curves(heading: str, measure: Measure, styles: Sequence[ArmStyle], context: int) -> Spec:
    """Median and largest head of every arm by position, for the page, which supplies the data set `rows`.

    Each row has `arm`, `label`, `seed`, `position`, `kind` (median, largest), `what`, `value`, `null_low`, `null_high`, `end` (upper
    end of the null band at T_train), and in words `band`, `end_band` and `counted`.
    """
    return {
        **_frame(heading, 250),
        "params": [*screen_parameters(), {"name": "shown", "value": [style.name for style in styles]}],
        "data": {"name": "rows"},
        "transform": [{"filter": "indexof(shown, datum.arm) >= 0"}],
        "layer": _curve_layers(measure, styles, context, static=False),
        "config": configuration(static=False),
    }


def static_curves(heading: str, measure: Measure, styles: Sequence[ArmStyle], context: int, rows: Sequence[Row]) -> Spec:
    """The same on a static sheet."""
    return {
        "title": {"text": heading, "offset": 8},
        "width": _STATIC_WIDTH,
        "height": 250,
        "data": {"values": list(rows)},
        "layer": _curve_layers(measure, styles, context, static=True),
    }


def screen_strip(heading: str, measure: Measure, rows: Sequence[Row], limit: float) -> Spec:
    """All heads of an arm side by side, a line for each position, coloured by the measure; data set `rows` from the page.

    Each row has `label`, `layer`, `head`, `place` (layer.head), `order`, `position`, `value`, `above`, and in words `shown`, `interval`,
    `band`, `end_band`; a ring marks a head that does not lie above its null bands, grey one without a number.

    Args:
        rows: of the strip, for its height.
        limit: the upper end of the colours.
    """
    return {
        **_frame(heading, _strip_height(rows)),
        "params": screen_parameters(),
        "data": {"name": "rows"},
        "layer": _strip_layers(measure, rows, limit, static=False),
        "config": configuration(static=False),
    }


def static_strip(heading: str, measure: Measure, rows: Sequence[Row], limit: float) -> Spec:
    """The same on a static sheet."""
    return {
        "title": {"text": heading, "offset": 8},
        "width": _STATIC_WIDTH,
        "height": _strip_height(rows),
        "data": {"values": list(rows)},
        "layer": _strip_layers(measure, rows, limit, static=True),
    }


def screen_swaps(heading: str, rows: Sequence[Row]) -> Spec:
    """What swaps change in the loss of an arm, with intervals; data set `rows` from the page.

    Each row has `label`, `what`, `order`, `source`, `kind` (set, single, excess), `value`, `low`, `high` and `interval` in words. A
    dashed line stands where the whole excess would be gone.
    """
    return {
        **_frame(heading, _swap_height(rows)),
        "params": screen_parameters(),
        "data": {"name": "rows"},
        "layer": _swap_layers(static=False),
        "config": configuration(static=False),
    }


def static_swaps(heading: str, rows: Sequence[Row]) -> Spec:
    """The same on a static sheet."""
    return {
        "title": {"text": heading, "offset": 8},
        "width": _STATIC_WIDTH,
        "height": _swap_height(rows),
        "data": {"values": list(rows)},
        "layer": _swap_layers(static=True),
    }


def _frame(heading: str, height: int) -> Spec:
    return {
        "$schema": SCHEMA,
        "description": heading,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 12, "top": 6, "bottom": 2},
    }


def _curve_layers(measure: Measure, styles: Sequence[ArmStyle], context: int, *, static: bool) -> list[Spec]:
    names = [style.name for style in styles]
    colours = [colour_on(style, dark=False) if static else colour_signal(style) for style in styles]
    legend: Spec | None = None
    if static:
        labels = json.dumps({style.name: style.label for style in styles}, ensure_ascii=False)
        legend = {
            "title": None,
            "orient": "top",
            "symbolOpacity": 1,
            "labelExpr": f"{labels}[datum.label]",
            "labelLimit": 300,
            "columnPadding": 22,
        }
    soft: Any = "#5c636b" if static else {"expr": "soft"}
    # A legend that one layer switches off is gone for all of them: those without one only leave it out.
    bare: Spec = {"field": "arm", "type": "nominal", "scale": {"domain": names, "range": colours}}
    colour: Spec = {**bare, "legend": legend}
    shape: Spec = {
        **{"field": "arm", "type": "nominal", "legend": legend},
        "scale": {"domain": names, "range": [style.shape for style in styles]},
    }
    x: Spec = {
        "field": "position",
        "type": "quantitative",
        "scale": {"type": "log", "base": 2, "nice": False, "padding": 10},
        "axis": {"title": "token position t", "format": ",d", "grid": False, "tickCount": 6, "labelOverlap": "greedy"},
    }
    kind = {"type": "log", "nice": False, "padding": 6} if measure.logarithmic else {"zero": False, "nice": True}
    y: Spec = {
        "field": "value",
        "type": "quantitative",
        "scale": kind,
        "axis": {"title": measure.axis, "format": ".3~r", "tickCount": 5, "labelOverlap": "greedy", "minExtent": 44},
    }
    curve = {"type": "nominal", "field": "curve"}
    medians: list[Spec] = [{"filter": "datum.kind === 'median'"}]
    return [
        {
            "transform": [*medians, {"filter": "isValid(datum.null_low)"}],
            "mark": {"type": "area", "opacity": 0.16, "aria": False},
            "encoding": {
                "x": x,
                "y": {**y, "field": "null_low"},
                "y2": {"field": "null_high"},
                "color": bare,
                "detail": curve,
            },
        },
        {
            "transform": [*medians, {"filter": "isValid(datum.end)" + (" && datum.end > 0" if measure.logarithmic else "")}],
            "mark": {"type": "line", "strokeWidth": 1.2, "strokeDash": [1, 2], "aria": False},
            "encoding": {"x": x, "y": {**y, "field": "end"}, "color": bare, "detail": curve},
        },
        {
            "data": {"values": [{"position": context}]},
            "mark": {"type": "rule", "strokeDash": [4, 4], "color": soft, "aria": False},
            "encoding": {"x": x},
        },
        {
            "transform": [{"filter": "datum.kind === 'largest'"}],
            "mark": {"type": "line", "strokeWidth": 1, "strokeDash": [3, 3], "aria": False},
            "encoding": {"x": x, "y": y, "color": bare, "detail": curve},
        },
        {
            "transform": medians,
            "mark": {"type": "line", "strokeWidth": 2, "aria": False},
            "encoding": {"x": x, "y": y, "color": bare, "detail": curve},
        },
        {
            "transform": medians,
            "mark": {"type": "point", "filled": True, "opacity": 1, "size": 58, "aria": False},
            "encoding": {"x": x, "y": y, "color": colour, "shape": shape, "tooltip": _TOOLTIP},
        },
        {
            "transform": [{"filter": "datum.kind === 'largest'"}],
            "mark": {"type": "point", "filled": False, "opacity": 1, "size": 30, "aria": False},
            "encoding": {
                "x": x,
                "y": y,
                "color": bare,
                "shape": shape,
                "tooltip": _TOOLTIP,
            },
        },
    ]


def _strip_height(rows: Sequence[Row]) -> int:
    return 26 * len({row["position"] for row in rows})


def _strip_layers(measure: Measure, rows: Sequence[Row], limit: float, *, static: bool) -> list[Spec]:
    ink: Any = "#1b1d21" if static else {"expr": "ink"}
    low: Any = _LOW_COLOUR if static else {"expr": f"dark ? '{_LOW_ON_DARK}' : '{_LOW_COLOUR}'"}
    high: Any = _HIGH_COLOUR if static else {"expr": f"dark ? '{_HIGH_ON_DARK}' : '{_HIGH_COLOUR}'"}
    many = len({row["place"] for row in rows}) > 24
    x: Spec = {
        "field": "place",
        "type": "ordinal",
        "sort": {"field": "order", "op": "min"},
        "axis": {
            "title": "head, by layer" if many else "layer.head",
            "labels": not many,
            "labelAngle": 0,
            "ticks": False,
            "domain": False,
        },
    }
    x["axis"]["labelOverlap"] = "parity"
    y: Spec = {
        "field": "position",
        "type": "ordinal",
        "axis": {"title": "position t", "format": ",d", "ticks": False, "domain": False, "grid": False, "minExtent": 44},
    }
    scale: Spec = {"domain": [measure.nothing, limit], "range": [low, high], "clamp": True, "interpolate": "rgb"}
    if measure.logarithmic:
        scale["type"] = "log"
    colour: Spec = {
        "condition": {"test": "!isValid(datum.value)", "value": "#8c8c8c"},
        **{"field": "value", "type": "quantitative", "scale": scale},
        "legend": {
            **{"title": measure.name, "orient": "bottom", "gradientLength": 180, "gradientThickness": 10},
            **{"tickCount": 4, "format": ".3~r"},
        },
    }
    return [
        {
            "mark": {"type": "rect", "invalid": None, "aria": False},
            "encoding": {"x": x, "y": y, "color": colour, "tooltip": _HEAD_TOOLTIP},
        },
        {
            "transform": [{"filter": "isValid(datum.above) && !datum.above"}],
            "mark": {
                "type": "point",
                "size": 22 if many else 44,
                "filled": False,
                "color": ink,
                "strokeWidth": 1.3,
                "aria": False,
            },
            "encoding": {"x": x, "y": y, "tooltip": _HEAD_TOOLTIP},
        },
    ]


def _swap_height(rows: Sequence[Row]) -> int:
    return 38 * max(1, len({row["what"] for row in rows if row["kind"] != "excess"}))


def _swap_layers(*, static: bool) -> list[Spec]:
    soft: Any = "#5c636b" if static else {"expr": "soft"}
    ink: Any = "#1b1d21" if static else {"expr": "ink"}
    range_: list[Any] = (
        list(_SOURCE_COLOURS)
        if static
        else [{"expr": f"dark ? '{dark}' : '{light}'"} for light, dark in zip(_SOURCE_COLOURS, _SOURCE_ON_DARK, strict=True)]
    )
    legend = {"title": "replaced by", "orient": "top", "symbolOpacity": 1, "labelLimit": 220}
    bare: Spec = {"field": "source", "type": "nominal", "scale": {"domain": list(_SOURCES), "range": range_}}
    colour: Spec = {**bare, "legend": legend}
    shape: Spec = {
        **{"field": "source", "type": "nominal", "legend": legend},
        "scale": {"domain": list(_SOURCES), "range": ["circle", "square"]},
    }
    x: Spec = {
        "field": "value",
        "type": "quantitative",
        "scale": {"zero": True, "nice": True},
        "axis": {"title": "change of the loss, nats per token", "tickCount": 5, "grid": True, "format": "~g"},
    }
    y: Spec = {
        "field": "what",
        "type": "nominal",
        "sort": {"field": "order", "op": "min"},
        "axis": {"title": None, "ticks": False, "domain": False, "labelLimit": 150},
    }
    rest: Spec = {
        "y": y,
        "yOffset": {"field": "source", "type": "nominal", "sort": list(_SOURCES), "scale": {"paddingOuter": 0.5}},
    }
    moved: list[Spec] = [{"filter": "datum.kind !== 'excess'"}]
    return [
        {"data": {"values": [{"value": 0}]}, "mark": {"type": "rule", "color": ink, "aria": False}, "encoding": {"x": x}},
        {
            "transform": [{"filter": "datum.kind === 'excess' && isValid(datum.value)"}],
            "mark": {"type": "rule", "strokeDash": [5, 4], "color": soft, "strokeWidth": 1.5, "aria": False},
            "encoding": {"x": x, "tooltip": _SWAP_TOOLTIP},
        },
        {
            "transform": [{"filter": "datum.kind === 'single'"}],
            "mark": {"type": "tick", "thickness": 1.5, "size": 9, "opacity": 0.75, "aria": False},
            "encoding": {**rest, "x": x, "color": bare, "tooltip": _SWAP_TOOLTIP},
        },
        {
            "transform": [{"filter": "datum.kind === 'set' && isValid(datum.low)"}],
            "mark": {"type": "rule", "strokeWidth": 2, "aria": False},
            "encoding": {**rest, "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": bare},
        },
        {
            "transform": [*moved, {"filter": "datum.kind === 'set'"}],
            "mark": {"type": "point", "filled": True, "size": 52, "opacity": 1, "aria": False},
            "encoding": {**rest, "x": x, "color": colour, "shape": shape, "tooltip": _SWAP_TOOLTIP},
        },
    ]
