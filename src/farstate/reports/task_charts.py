"""Vega-Lite specifications of the long-context tasks: a score by length, and maps of a score by length and depth."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farstate.reports.charts import SCHEMA, Extent, Row
from farstate.reports.theme import INK, ArmStyle, Spec, colour_on, colour_signal, configuration, screen_parameters

SMALL = 120
"""Height of a panel that stands among many: it has no words in it."""
_SOFT = "#5c636b"
_GAP = 1.2
"""Octaves between the place of length 0 and the shortest length."""
_LIGHT_FROM = 0.42
"""Value from which viridis is light enough for dark figures: there both have a contrast above 4.3."""


@dataclass(frozen=True)
class Panel:
    """A score, or the difference of one to an arm, by length.

    Each row has `kind` ("mean", "seed" for one of several, "chance" or "paper"), `arm`, `label`, `seed` (text), `length`, `place` (on
    the axis), `value`, `low`, `high`, `over` (interval over seeds, in words), `n` (examples), `measured` and `note`; numbers may be null.

    Attributes:
        metric: key of the panel's extents; panels with the same one share their vertical range.
        unit: of the lengths.
        trained: the training length, or lengths, and below which words it stands.
        highest: the vertical axis reaches at least so far; a difference also as far below zero.
    """

    metric: str
    model: str
    title: str
    axis: str
    unit: str
    height: int
    trained: Mapping[int, str]
    lengths: Sequence[int]
    rows: Sequence[Row] = field(repr=False)
    difference: bool = False
    highest: float = 0.05

    @property
    def least(self) -> int:
        """The shortest length above zero."""
        return min([length for length in self.lengths if length > 0] or [1])


def place(length: int, least: int) -> float:
    """Where a length stands: log2, and 0 left of `least`, the shortest one."""
    return math.log2(length) if length > 0 else math.log2(least) - _GAP


def short(length: int) -> str:
    """A length on an axis: `512`, `2K` for 2,048."""
    return f"{length // 1024:,}K" if length and length % 1024 == 0 else f"{length:,}"


def extents(panels: Iterable[Panel]) -> dict[str, dict[str, dict[str, Extent]]]:
    """By metric and arm the range that is drawn, as `farstate.reports.charts.extents` gives it; there is one view."""
    found: dict[str, dict[str, dict[str, Extent]]] = {}
    for panel in panels:
        for row in panel.rows:
            numbers = [row[key] for key in ("value", "low", "high") if row[key] is not None]
            if not numbers:
                continue
            by_view = found.setdefault(panel.metric, {}).setdefault(row["arm"], {})
            low, high = by_view.get("all", (math.inf, -math.inf))
            by_view["all"] = by_view["near"] = (min(low, *numbers), max(high, *numbers))
    return found


def screen_panel(panel: Panel, styles: Sequence[ArmStyle], y_range: Extent) -> Spec:
    """A panel for the page, which supplies the data set `rows`."""
    return {
        "$schema": SCHEMA,
        "description": f"{panel.title}, {panel.model}",
        "width": "container",
        "height": panel.height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 14, "top": 8 if panel.height == SMALL else 20, "bottom": 2},
        "params": [
            *screen_parameters(),
            {"name": "shown", "value": [style.name for style in styles]},
            {"name": "y_low", "value": y_range[0]},
            {"name": "y_high", "value": y_range[1]},
        ],
        "data": {"name": "rows"},
        "transform": [{"filter": "datum.kind == 'chance' || indexof(shown, datum.arm) >= 0"}, *_TOOLTIP_TEXT],
        "layer": _layers(panel, styles, static=False, y_range=y_range),
        "config": configuration(static=False),
    }


def static_panel(panel: Panel, styles: Sequence[ArmStyle], heading: str, y_range: Extent, width: int = 330) -> Spec:
    """The panel on a static sheet, its rows in it."""
    return {
        "title": {"text": heading, "offset": 6 if panel.height == SMALL else 14},
        "width": width,
        "height": 100 if panel.height == SMALL else 240,
        "data": {"values": list(panel.rows)},
        "transform": list(_TOOLTIP_TEXT),
        "layer": _layers(panel, styles, static=True, y_range=y_range),
    }


def side_by_side(columns: Sequence[Spec], width: int) -> list[Spec]:
    """Static charts in rows of `width`."""
    shared = {"scale": dict.fromkeys(("color", "strokeDash", "shape"), "shared")}
    return [
        {"hconcat": list(columns[first : first + width]), "spacing": 24, "resolve": shared}
        for first in range(0, len(columns), width)
    ]


_TOOLTIP_TEXT: list[Spec] = [
    {
        "calculate": "isValid(datum.low) && isValid(datum.high) ? format(datum.low, '.3~f') + ' to ' + format(datum.high, '.3~f') : 'none'",
        "as": "interval",
    },
    {"calculate": "isValid(datum.n) ? format(datum.n, ',') : 'not given'", "as": "examples"},
    {"calculate": "isValid(datum.measured) ? format(datum.measured, ',.1~f') : 'not given'", "as": "prompt"},
]


def _tooltip(panel: Panel) -> list[Spec]:
    return [
        {"field": "label", "title": "arm"},
        {"field": "seed", "title": "seed"},
        {"field": "length", "title": panel.unit, "format": ",d"},
        {"field": "value", "title": "value", "format": ".3~f"},
        {"field": "interval", "title": "low to high"},
        {"field": "over", "title": "over seeds"},
        {"field": "examples", "title": "examples"},
        {"field": "prompt", "title": "prompt, mean tokens"},
        {"field": "note", "title": "what it is"},
    ]


def _x(panel: Panel) -> Spec:
    places = [place(length, panel.least) for length in panel.lengths]
    marked = [place(length, panel.least) for length in panel.trained]
    number = "round(pow(2, datum.value))"
    zero = math.log2(panel.least) - _GAP / 2
    label = f"datum.value < {zero:.9g} ? '0' : {number} % 1024 == 0 ? format({number} / 1024, ',') + 'K' : format({number}, ',')"
    return {
        "field": "place",
        "type": "quantitative",
        "scale": {"domain": [min(places + marked) - 0.25, max(places + marked) + 0.25], "nice": False, "zero": False},
        "axis": {
            "title": None if panel.height == SMALL else panel.unit,
            "values": places,
            "labelExpr": label,
            "labelOverlap": "greedy",
            "labelSeparation": 6,
            "labelFlush": False,
            "grid": False,
        },
    }


def _y(panel: Panel, *, static: bool, y_range: Extent) -> Spec:
    low, high = (repr(y_range[0]), repr(y_range[1])) if static else ("y_low", "y_high")
    top = f"max({panel.highest:g}, 1.04 * {high})"
    bottom = f"min(-{panel.highest:g}, 1.04 * {low})" if panel.difference else "0"
    return {
        "field": "value",
        "type": "quantitative",
        "scale": {"nice": False, "zero": False, "domain": [{"expr": bottom}, {"expr": top}]},
        "axis": {
            "title": panel.axis if static and panel.height != SMALL else None,
            "format": "~r",
            "tickCount": 3 if panel.height == SMALL else 5,
            "labelOverlap": "greedy",
            **({} if static else {"minExtent": 40, "maxExtent": 40}),
        },
    }


def _channels(styles: Sequence[ArmStyle], *, static: bool) -> tuple[Spec, Spec, Spec]:
    """Colour, dash and shape by arm; the page has its own legend."""
    names = [style.name for style in styles]
    labels = json.dumps({style.name: style.label for style in styles}, ensure_ascii=False)
    legend: Spec | None = None
    if static:
        legend = {
            **{"title": None, "orient": "top", "columns": 0, "labelExpr": f"{labels}[datum.label]"},
            **{"labelLimit": 400, "columnPadding": 22},
        }

    def channel(values: list[Any]) -> Spec:
        return {"field": "arm", "type": "nominal", "scale": {"domain": names, "range": values}, "legend": legend}

    return (
        channel([colour_on(style, dark=False) if static else colour_signal(style) for style in styles]),
        channel([[*style.dash] or [1, 0] for style in styles]),
        channel([style.shape for style in styles]),
    )


def _layers(panel: Panel, styles: Sequence[ArmStyle], *, static: bool, y_range: Extent) -> list[Spec]:
    """Bottom to top: training lengths, chance, zero, bands, seeds, means, points, the paper's values."""
    soft: Any = _SOFT if static else {"expr": "soft"}
    ink: Any = INK if static else {"expr": "ink"}
    x, y = _x(panel), _y(panel, static=static, y_range=y_range)
    colour, dash, shape = _channels(styles, static=static)
    bare, bare_dash, bare_shape = (
        {key: value for key, value in channel.items() if key != "legend"} for channel in (colour, dash, shape)
    )
    kinds = {row["kind"] for row in panel.rows}
    small = panel.height == SMALL
    marks = [{"place": place(length, panel.least), "text": words} for length, words in panel.trained.items()]
    layers: list[Spec] = [
        {
            "data": {"values": marks},
            "mark": {"type": "rule", "strokeDash": [5, 4], "color": soft, "aria": False},
            "encoding": {"x": x},
        }
    ]
    if not small:
        layers.append(
            {
                "data": {"values": marks},
                "mark": {"type": "text", "baseline": "bottom", "fontSize": 11, "color": soft, "aria": False},
                "encoding": {"x": x, "y": {"value": -5}, "text": {"field": "text"}},
            }
        )
    if panel.difference:
        layers.append(
            {
                "data": {"values": [{"value": 0}]},
                "mark": {"type": "rule", "color": ink, "strokeWidth": 1, "aria": False},
                "encoding": {"y": y},
            }
        )
    if "chance" in kinds:
        layers.append(
            {
                "transform": _only("chance"),
                "mark": {"type": "line", "strokeDash": [1, 3], "strokeWidth": 1.6, "color": soft, "aria": False},
                "encoding": {"x": x, "y": y},
            }
        )
    ends = {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": bare}
    known = {"filter": "isValid(datum.low) && isValid(datum.high)"}
    layers += [
        {
            "transform": [*_only("mean"), known, {"filter": "datum.length > 0"}],
            "mark": {"type": "area", "fillOpacity": 0.16, "aria": False},
            "encoding": ends,
        },
        # A band needs two lengths; at one that stands alone a stroke.
        {
            "transform": [*_only("mean"), known, {"filter": f"datum.length == 0 || {sum(n > 0 for n in panel.lengths)} == 1"}],
            "mark": {"type": "rule", "strokeWidth": 1.6, "aria": False},
            "encoding": ends,
        },
    ]
    if "seed" in kinds:
        layers.append(
            {
                "transform": _only("seed"),
                "mark": {"type": "point", "filled": True, "size": 10, "opacity": 0.7, "aria": False},
                "encoding": {"x": x, "y": y, "color": bare},
            }
        )
    layers.append(
        {
            "transform": [*_only("mean"), {"filter": "datum.length > 0"}],
            "mark": {"type": "line", "strokeWidth": 1.3 if small else 1.9, "aria": False},
            "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash},
        }
    )
    points: Spec = {
        "transform": [{"filter": "datum.kind == 'mean' || datum.kind == 'seed'"}],
        "mark": {"type": "point", "filled": True, "opacity": 1, "aria": False},
        "encoding": {
            **{"x": x, "y": y, "color": colour, "shape": shape, "tooltip": _tooltip(panel)},
            "size": {"condition": {"test": "datum.kind == 'mean'", "value": 20 if small else 44}, "value": 8},
        },
    }
    if not static:
        points["params"] = [
            {"name": "hover", "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}
        ]
        points["encoding"]["size"] = {
            "condition": [
                {"param": "hover", "empty": False, "value": 130},
                {"test": "datum.kind == 'mean'", "value": 20 if small else 44},
            ],
            "value": 8,
        }
    layers.append(points)
    if "paper" in kinds:
        layers += [
            {
                "transform": _only("paper"),
                "mark": {"type": "line", "strokeWidth": 0.9, "opacity": 0.75, "aria": False},
                "encoding": {"x": x, "y": y, "color": bare, "strokeDash": bare_dash},
            },
            {
                "transform": _only("paper"),
                "mark": {"type": "rule", "strokeWidth": 1.2, "aria": False},
                "encoding": ends,
            },
            {
                "transform": _only("paper"),
                "mark": {"type": "point", "filled": False, "size": 95, "strokeWidth": 1.6, "aria": False},
                "encoding": {"x": x, "y": y, "color": bare, "shape": bare_shape, "tooltip": _tooltip(panel)},
            },
        ]
    return layers


def _only(kind: str) -> list[Spec]:
    return [{"filter": f"datum.kind == '{kind}'"}]


# Maps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """A score by length and depth.

    Each row has `label`, `length`, `depth`, `value` (null: none, as the cell's `words` say), `low`, `high`, `over`, `n`, `chance` and
    `note`. `lengths` and `depths` span the map; a cell without a row stays empty. `trained`: the training length.
    """

    title: str
    lengths: Sequence[int]
    depths: Sequence[float]
    trained: int
    rows: Sequence[Row] = field(repr=False)


def screen_map(cells: Map) -> Spec:
    """A map for the page, which supplies the data set `rows`."""
    return {
        "$schema": SCHEMA,
        "description": cells.title,
        "width": "container",
        "height": _map_height(cells),
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 8, "top": 20, "bottom": 2},
        "params": screen_parameters(),
        "data": {"name": "rows"},
        "transform": _TOOLTIP_TEXT[:2],
        "layer": _map_layers(cells, static=False),
        "config": configuration(static=False),
    }


def static_map(cells: Map, heading: str) -> Spec:
    """The same on a static sheet, its rows in it."""
    return {
        "title": {"text": heading, "offset": 14},
        "width": max(200, 40 * len(cells.lengths)),
        "height": _map_height(cells),
        "data": {"values": list(cells.rows)},
        "transform": _TOOLTIP_TEXT[:2],
        "layer": _map_layers(cells, static=True),
    }


def _map_height(cells: Map) -> int:
    return 34 * len(cells.depths)


def _map_layers(cells: Map, *, static: bool) -> list[Spec]:
    soft: Any = _SOFT if static else {"expr": "soft"}
    ink: Any = INK if static else {"expr": "ink"}
    faint: Any = "#dfe2e6" if static else {"expr": "faint"}
    names = {str(length): short(length) for length in cells.lengths}
    axis = {"labelAngle": 0, "ticks": False, "domain": False, "grid": False}
    x: Spec = {
        "field": "length",
        "type": "ordinal",
        "scale": {"domain": list(cells.lengths)},
        "axis": {
            **axis,
            "title": "prompt, tokens",
            "labelExpr": f"{json.dumps(names)}[datum.value]",
            "labelOverlap": "greedy",
            "labelSeparation": 4,
        },
    }
    y: Spec = {
        "field": "depth",
        "type": "ordinal",
        "scale": {"domain": list(cells.depths)},
        "axis": {**axis, "title": "depth of the key", "format": "~r"},
    }
    inside = [length for length in cells.lengths if length <= cells.trained]
    edge = {"length": inside[-1] if inside else cells.lengths[0], "text": f"trained on {cells.trained:,}"}
    border = {**x, "bandPosition": 1 if inside else 0}
    # The words stay inside the picture, whatever side the border is on.
    left = len(inside) > len(cells.lengths) / 2
    tooltip: list[Spec] = [
        {"field": "label", "title": "model"},
        {"field": "length", "title": "prompt, tokens", "format": ",d"},
        {"field": "depth", "title": "depth"},
        {"field": "value", "title": "value", "format": ".3~f"},
        {"field": "interval", "title": "low to high"},
        {"field": "over", "title": "over seeds"},
        {"field": "examples", "title": "examples"},
        {"field": "chance", "title": "chance", "format": ".2~g"},
        {"field": "note", "title": "what it is"},
    ]
    return [
        {
            # A cell without a value is drawn too, in grey.
            "mark": {"type": "rect", "stroke": faint, "strokeWidth": 1, "invalid": None, "aria": False},
            "encoding": {
                "x": x,
                "y": y,
                "color": {
                    "condition": {"test": "!isValid(datum.value)", "value": "#8c8c8c"},
                    "field": "value",
                    "type": "quantitative",
                    "scale": {"domain": [0, 1], "scheme": "viridis", "clamp": True},
                    "legend": None,
                },
                "tooltip": tooltip,
            },
        },
        {
            "mark": {"type": "text", "fontSize": 11 if len(cells.lengths) <= 9 else 9, "aria": False},
            "encoding": {
                "x": x,
                "y": y,
                "text": {"field": "words"},
                # The words lie on their cell and would hide its values from the pointer.
                "tooltip": tooltip,
                "color": {
                    "condition": {"test": f"isValid(datum.value) && datum.value < {_LIGHT_FROM}", "value": "#ffffff"},
                    "value": "#111111",
                },
            },
        },
        {
            "data": {"values": [edge]},
            "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.8, "color": ink, "aria": False},
            "encoding": {"x": border},
        },
        {
            "data": {"values": [edge]},
            "mark": {
                **{"type": "text", "baseline": "bottom", "fontSize": 11, "color": soft, "aria": False},
                **{"align": "right" if left else "left", "dx": 3 if left else -3},
            },
            "encoding": {"x": border, "y": {"value": -5}, "text": {"field": "text"}},
        },
    ]
