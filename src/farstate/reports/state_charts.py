"""Vega-Lite specifications of drift by head: a map of all heads of an arm, and the heads in their order with intervals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from farstate.reports.charts import SCHEMA, Row
from farstate.reports.theme import ArmStyle, Spec, colour_on, colour_signal, configuration, screen_parameters

NARROWER, WIDER = "#0072B2", "#D55E00"
"""Ends of the scale of drift: told apart by the colour-blind, and not by red and green."""
_EVEN, _EVEN_ON_DARK = "#f0f0f0", "#33373e"
_UNKNOWN = "#8c8c8c"

_WORDS: list[Spec] = [
    {"calculate": "isValid(datum.drift) ? format(datum.drift, '+.3~f') : 'none'", "as": "moved"},
    {"calculate": "isValid(datum.drift) ? '× ' + format(pow(2, datum.drift), '.3~r') : 'none'", "as": "times"},
    {
        "calculate": "isValid(datum.low) && isValid(datum.high) ? format(datum.low, '+.3~f') + ' to ' + format(datum.high, '+.3~f') : 'none'",
        "as": "interval",
    },
    {"calculate": "isValid(datum.against) ? datum.against : 'none'", "as": "against_base"},
]
_TOOLTIP: list[Spec] = [
    {"field": "label", "title": "arm"},
    {"field": "layer", "title": "layer"},
    {"field": "head", "title": "head"},
    {"field": "moved", "title": "drift, log2"},
    {"field": "interval", "title": "simultaneous"},
    {"field": "times", "title": "far ÷ T_train"},
    {"field": "near", "title": "std at T_train"},
    {"field": "far", "title": "std far"},
    {"field": "against_base", "title": "drift − base's"},
    {"field": "rank", "title": "rank"},
]


def screen_map(heading: str, rows: Sequence[Row], limit: float) -> Spec:
    """Layers by heads of one arm, coloured by drift, for the page, which supplies the data set `rows`.

    Each row has `label`, `layer`, `head`, `drift`, `low`, `high`, `beyond`, `near`, `far`, `against`, `rank`; a ring marks a head
    that is not beyond the simultaneous interval, grey one without a drift.

    Args:
        heading: what a reader who cannot see it is told.
        rows: of the map, for its height.
        limit: the scale is from −limit to limit.
    """
    return {
        "$schema": SCHEMA,
        "description": heading,
        "width": "container",
        "height": _map_height(rows),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 12, "top": 6, "bottom": 2},
        "params": screen_parameters(),
        "data": {"name": "rows"},
        "transform": _WORDS,
        "layer": _map_layers(limit, static=False),
        "config": configuration(static=False),
    }


def static_map(heading: str, rows: Sequence[Row], limit: float) -> Spec:
    """The same on a static sheet, its rows in it."""
    return {
        "title": {"text": heading, "offset": 8},
        "width": 330,
        "height": _map_height(rows),
        "data": {"values": list(rows)},
        "transform": _WORDS,
        "layer": _map_layers(limit, static=True),
    }


def _map_height(rows: Sequence[Row]) -> int:
    layers = len({row["layer"] for row in rows})
    return max(60, min(30 * layers, 480))


def _map_layers(limit: float, *, static: bool) -> list[Spec]:
    def axis(name: str) -> Spec:
        shown = {"title": name, "labelOverlap": "parity", "labelAngle": 0, "ticks": False, "domain": False, "grid": False}
        return {"field": name, "type": "ordinal", "axis": shown}

    even: Any = _EVEN if static else {"expr": f"dark ? '{_EVEN_ON_DARK}' : '{_EVEN}'"}
    ink: Any = "#1b1d21" if static else {"expr": "ink"}
    x, y = axis("head"), axis("layer")
    legend = {"title": "drift, log2", "orient": "bottom", "gradientLength": 180, "gradientThickness": 10, "tickCount": 5}
    colour: Spec = {
        "condition": {"test": "!isValid(datum.drift)", "value": _UNKNOWN},
        "field": "drift",
        "type": "quantitative",
        "scale": {"domain": [-limit, 0, limit], "range": [NARROWER, even, WIDER], "interpolate": "rgb"},
        "legend": legend,
    }
    return [
        {
            # Vega-Lite would leave out what has no colour on the scale.
            "mark": {"type": "rect", "invalid": None, "aria": False},
            "encoding": {"x": x, "y": y, "color": colour, "tooltip": _TOOLTIP},
        },
        {
            "transform": [{"filter": "isValid(datum.beyond) && !datum.beyond"}],
            "mark": {
                "type": "point",
                "shape": "circle",
                "size": 40,
                "filled": False,
                "color": ink,
                "strokeWidth": 1.4,
                "aria": False,
            },
            "encoding": {"x": x, "y": y, "tooltip": _TOOLTIP},
        },
    ]


def screen_ranking(heading: str, rows: Sequence[Row], styles: Sequence[ArmStyle]) -> Spec:
    """Heads from the top in the order of the base's drift, every arm with its simultaneous interval; rows as in `screen_map`,
    with `arm`, `place` (the head in words) and `order`."""
    return {
        "$schema": SCHEMA,
        "description": heading,
        "width": "container",
        "height": _ranking_height(rows, styles),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 12, "top": 6, "bottom": 2},
        "params": [*screen_parameters(), {"name": "shown", "value": [style.name for style in styles]}],
        "data": {"name": "rows"},
        "transform": [{"filter": "indexof(shown, datum.arm) >= 0"}, *_WORDS],
        "layer": _ranking_layers(styles, static=False),
        "config": configuration(static=False),
    }


def static_ranking(heading: str, rows: Sequence[Row], styles: Sequence[ArmStyle]) -> Spec:
    """The same on a static sheet, its rows in it."""
    return {
        "title": {"text": heading, "offset": 8},
        "width": 330,
        "height": _ranking_height(rows, styles),
        "data": {"values": list(rows)},
        "transform": _WORDS,
        "layer": _ranking_layers(styles, static=True),
    }


def _ranking_height(rows: Sequence[Row], styles: Sequence[ArmStyle]) -> int:
    return len({row["place"] for row in rows}) * max(18, 8 * len(styles))


def _ranking_layers(styles: Sequence[ArmStyle], *, static: bool) -> list[Spec]:
    names = [style.name for style in styles]
    labels = json.dumps({style.name: style.label for style in styles}, ensure_ascii=False)
    legend: Spec | None = None
    if static:
        legend = {
            **{"title": None, "orient": "top", "columns": 0, "labelExpr": f"{labels}[datum.label]"},
            **{"labelLimit": 400, "columnPadding": 22},
        }
    colours = [colour_on(style, dark=False) if static else colour_signal(style) for style in styles]
    bare: Spec = {"field": "arm", "type": "nominal", "scale": {"domain": names, "range": colours}}
    colour = {**bare, "legend": legend}
    shape: Spec = {
        "field": "arm",
        "type": "nominal",
        "scale": {"domain": names, "range": [style.shape for style in styles]},
        "legend": legend,
    }
    ink: Any = "#1b1d21" if static else {"expr": "ink"}
    y: Spec = {
        "field": "place",
        "type": "ordinal",
        "sort": {"field": "order", "op": "min", "order": "ascending"},
        "axis": {"title": None, "ticks": False, "domain": False, "grid": True, "tickBand": "extent"},
    }
    offset: Spec = {"field": "arm", "type": "nominal", "sort": names, "scale": {"domain": names, "paddingOuter": 0.6}}
    x: Spec = {
        "field": "drift",
        "type": "quantitative",
        "scale": {"zero": True, "nice": True},
        "axis": {"title": "drift: log2 of std far ÷ std at T_train", "tickCount": 6, "grid": True, "labelFlush": False},
    }
    rest: Spec = {"y": y, "yOffset": offset}
    return [
        {
            "data": {"values": [{"drift": 0}]},
            "mark": {"type": "rule", "color": ink, "strokeWidth": 1, "aria": False},
            "encoding": {"x": x},
        },
        {
            "transform": [{"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "rule", "strokeWidth": 1.6, "aria": False},
            "encoding": {**rest, "x": {**x, "field": "low"}, "x2": {"field": "high"}, "color": bare},
        },
        {
            "mark": {"type": "point", "filled": True, "size": 46, "opacity": 1, "aria": False},
            "encoding": {**rest, "x": x, "color": colour, "shape": shape, "tooltip": _TOOLTIP},
        },
    ]
