"""Vega-Lite specifications of one number a run: against the value of what is varied, or one number against another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from farstate.reports.charts import SCHEMA, Row
from farstate.reports.theme import ArmStyle, Spec, colour_on, colour_signal, configuration, screen_parameters

WIDTH, HEIGHT = 260, 210


@dataclass(frozen=True)
class Summary:
    """One number a run against what is varied.

    Each row has `arm` (a style's name), `label`, `x`, `words` (the value of what is varied, for a hover), `value`, `low`,
    `high`, `interval` and `note`; `low` and `high` may be null. `kind` is "point", "seed" for that of one seed, or "reference" for a
    horizontal line.

    Attributes:
        title: above the chart.
        axis: of what is varied, with its unit.
        unit: of the numbers.
        joined: points of one arm are joined by a line in its colour; otherwise one line joins all of them.
        tolerance: where a line marks it; None: no such line.
        zero: whether the vertical axis must hold zero, which is marked.
        ticks: the values that were tried, where the axis is to show them; logarithmic if `logarithmic`.
        format: of the ticks (d3-format).
    """

    title: str
    axis: str
    unit: str
    joined: bool
    tolerance: float | None
    zero: bool
    ticks: Sequence[float]
    logarithmic: bool
    format: str
    rows: Sequence[Row] = field(repr=False)


def is_logarithmic(values: Sequence[float]) -> bool:
    """Whether values stand on a logarithmic axis: positive and over at least two octaves."""
    return len(values) > 1 and min(values) > 0 and max(values) >= 4 * min(values)


def screen_summary(summary: Summary, styles: Sequence[ArmStyle]) -> Spec:
    """The chart on the page, which supplies the data set `rows`."""
    return {
        "$schema": SCHEMA,
        "description": summary.title,
        "width": "container",
        "height": HEIGHT,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 12, "top": 8, "bottom": 2},
        "params": [*screen_parameters(), {"name": "shown", "value": [style.name for style in styles]}],
        "data": {"name": "rows"},
        "layer": _layers(summary, styles, static=False),
        "config": configuration(static=False),
    }


def static_summary(summary: Summary, styles: Sequence[ArmStyle], heading: str) -> Spec:
    """The chart on a static sheet, its rows in it."""
    return {
        "title": {"text": heading, "offset": 8},
        "width": WIDTH,
        "height": 280,
        "data": {"values": list(summary.rows)},
        "layer": _layers(summary, styles, static=True),
    }


def screen_scatter(styles: Sequence[ArmStyle], tolerance: float, margin: float, x: str, y: str) -> Spec:
    """Two numbers of every run against each other; rows have `arm`, `label`, `words`, `x`, `y` and their `_low`, `_high`.

    Lines mark the `tolerance` of y and the `margin` of x.
    """
    return {
        "$schema": SCHEMA,
        "description": f"{y} against {x}",
        "width": "container",
        "height": 320,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 12, "top": 8, "bottom": 2},
        "params": [*screen_parameters(), {"name": "shown", "value": [style.name for style in styles]}],
        "data": {"name": "rows"},
        "layer": _scatter_layers(styles, tolerance, margin, x, y, static=False),
        "config": configuration(static=False),
    }


def static_scatter(
    rows: Sequence[Row], styles: Sequence[ArmStyle], tolerance: float, margin: float, x: str, y: str, heading: str
) -> Spec:
    """The same on a static sheet."""
    return {
        "title": {"text": heading, "offset": 8},
        "width": 420,
        "height": 280,
        "data": {"values": list(rows)},
        "layer": _scatter_layers(styles, tolerance, margin, x, y, static=True),
    }


def _channels(styles: Sequence[ArmStyle], *, static: bool) -> tuple[Spec, Spec, Spec]:
    """Colour, dash and shape by arm; the page has its own legend, a sheet one above all charts."""
    labels = json.dumps({style.name: style.label for style in styles}, ensure_ascii=False)
    legend: Spec | None = None
    if static:
        legend = {
            **{"title": None, "orient": "top", "columns": 0, "labelExpr": f"{labels}[datum.label]"},
            **{"labelLimit": 400, "columnPadding": 22},
        }
    names = [style.name for style in styles]

    def channel(values: list[Any]) -> Spec:
        return {"field": "arm", "type": "nominal", "scale": {"domain": names, "range": values}, "legend": legend}

    return (
        channel([colour_on(style, dark=False) if static else colour_signal(style) for style in styles]),
        channel([[*style.dash] or [1, 0] for style in styles]),
        channel([style.shape for style in styles]),
    )


def _shown(*, static: bool) -> Spec:
    """What the legend leaves out fades: a summary is read as a whole."""
    if static:
        return {}
    return {"opacity": {"condition": {"test": "indexof(shown, datum.arm) >= 0", "value": 1}, "value": 0.12}}


def _tooltip(*fields: tuple[str, str, str | None]) -> list[Spec]:
    return [{"field": name, "title": title, **({"format": form} if form else {})} for name, title, form in fields]


_HOVER: list[Spec] = [{"name": "hover", "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}]
_INTERVAL: Spec = {
    "calculate": "isValid(datum.low) && isValid(datum.high) ? format(datum.low, ',.4~r') + ' to ' + format(datum.high, ',.4~r') : 'none'",
    "as": "between",
}


def _guide(value: float, *, static: bool, axis: str = "y") -> Spec:
    """A thin dotted line across the chart."""
    soft: Any = "#5c636b" if static else {"expr": "soft"}
    return {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "strokeDash": [2, 3], "color": soft, "aria": False},
        "encoding": {axis: {"datum": value, "type": "quantitative"}},
    }


def _layers(summary: Summary, styles: Sequence[ArmStyle], *, static: bool) -> list[Spec]:
    """Bottom to top: zero, tolerance, references, joining lines, intervals, points."""
    soft: Any = "#5c636b" if static else {"expr": "soft"}
    ink: Any = "#1b1d21" if static else {"expr": "ink"}
    colour, dash, shape = _channels(styles, static=static)
    bare = {key: value for key, value in colour.items() if key != "legend"}
    scale: Spec = (
        {"type": "log", "nice": False, "padding": 16} if summary.logarithmic else {"nice": True, "zero": False, "padding": 16}
    )
    x: Spec = {
        "field": "x",
        "type": "quantitative",
        "scale": scale,
        "axis": {
            "title": summary.axis,
            "values": list(summary.ticks),
            "format": summary.format,
            "labelOverlap": "parity",
            "labelSeparation": 5,
            "grid": False,
        },
    }
    y: Spec = {
        "field": "value",
        "type": "quantitative",
        "scale": {"zero": summary.zero, "nice": True},
        "axis": {"title": summary.unit if static else None, "format": "~r", "tickCount": 5, "minExtent": 40},
    }
    points = [{"filter": "datum.kind == 'point'"}]
    references = [row for row in summary.rows if row["kind"] == "reference"]
    layers: list[Spec] = []
    if summary.zero:
        layers.append(
            {
                "data": {"values": [{"value": 0}]},
                "mark": {"type": "rule", "color": ink, "strokeWidth": 1, "aria": False},
                "encoding": {"y": {**y}},
            }
        )
    if summary.tolerance is not None:
        layers.append(_guide(summary.tolerance, static=static))
    if references:
        only = [{"filter": "datum.kind == 'reference'"}]
        layers += [
            {
                "transform": only,
                "mark": {"type": "rule", "strokeWidth": 1.6, "aria": False},
                "encoding": {"y": y, "color": bare, "strokeDash": {**dash, "legend": None}, **_shown(static=static)},
            },
        ]
    line: Spec = {
        "transform": points,
        "mark": {"type": "line", "strokeWidth": 1.4, "aria": False, **({} if summary.joined else {"color": soft})},
        "encoding": {"x": x, "y": y},
    }
    if summary.joined:
        line["encoding"] |= {"color": bare, "strokeDash": {**dash, "legend": None}, **_shown(static=static)}
    layers.append(line)
    layers.append(
        {
            "transform": [*points, {"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "rule", "strokeWidth": 1.8, "aria": False},
            "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": bare, **_shown(static=static)},
        }
    )
    mark: Spec = {
        "transform": [{"filter": "datum.kind != 'reference'"}, _INTERVAL],
        "mark": {"type": "point", "filled": True, "opacity": 1, "aria": False},
        "encoding": {
            **{"x": x, "y": y, "color": colour, "shape": shape},
            "size": {"condition": {"test": "datum.kind == 'point'", "value": 70}, "value": 12},
            "tooltip": _tooltip(
                ("label", "run", None),
                ("words", summary.axis, None),
                ("value", summary.unit, ",.4~r"),
                ("between", "low to high", None),
                ("interval", "interval", None),
                ("note", "what it is", None),
            ),
            **_shown(static=static),
        },
    }
    if not static:
        mark["params"] = _HOVER
    layers.append(mark)
    return layers


def _scatter_layers(styles: Sequence[ArmStyle], tolerance: float, margin: float, x: str, y: str, *, static: bool) -> list[Spec]:
    """Tolerance and margin as lines: what lies below and left of them repairs and costs nothing."""
    ink: Any = "#1b1d21" if static else {"expr": "ink"}
    colour, _, shape = _channels(styles, static=static)
    bare = {key: value for key, value in colour.items() if key != "legend"}

    def axis(name: str, title: str) -> Spec:
        return {
            "field": name,
            "type": "quantitative",
            "scale": {"zero": True, "nice": True},
            "axis": {"title": title, "format": "~r", "tickCount": 5, "grid": False, "labelOverlap": "parity"},
        }

    across, up = axis("x", x), axis("y", y)
    zero: Spec = {"type": "rule", "color": ink, "strokeWidth": 1, "aria": False}
    bars: Spec = {"type": "rule", "strokeWidth": 1.2, "aria": False}
    mark: Spec = {
        "mark": {"type": "point", "filled": True, "size": 70, "opacity": 1, "aria": False},
        "encoding": {
            **{"x": across, "y": up, "color": colour, "shape": shape},
            "tooltip": _tooltip(
                ("label", "arm", None),
                ("words", "setting", None),
                ("x", x, ",.4~r"),
                ("x_between", "low to high", None),
                ("y", y, ",.4~r"),
                ("y_between", "low to high", None),
                ("note", "what it is", None),
            ),
            **_shown(static=static),
        },
    }
    if not static:
        mark["params"] = _HOVER
    return [
        {"data": {"values": [{"y": 0}]}, "mark": zero, "encoding": {"y": up}},
        {"data": {"values": [{"x": 0}]}, "mark": zero, "encoding": {"x": across}},
        _guide(tolerance, static=static),
        _guide(margin, static=static, axis="x"),
        {
            "transform": [{"filter": "isValid(datum.x_low)"}],
            "mark": bars,
            "encoding": {
                "x": {**across, "field": "x_low"},
                "x2": {"field": "x_high"},
                "y": up,
                "color": bare,
                **_shown(static=static),
            },
        },
        {
            "transform": [{"filter": "isValid(datum.y_low)"}],
            "mark": bars,
            "encoding": {
                "y": {**up, "field": "y_low"},
                "y2": {"field": "y_high"},
                "x": across,
                "color": bare,
                **_shown(static=static),
            },
        },
        mark,
    ]
