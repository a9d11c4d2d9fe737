"""Vega-Lite specifications of the curves against position: one panel, the panels of a page, a static sheet.

A panel on the page is as wide as its container and is steered by signals that the page's script sets:
`shown` (arms the legend leaves in), `x_low` (first position drawn), `y_low`, `y_high` (range of what is
drawn, shared by the panels of one metric) and `dark`. The static sheet holds the same panels, fixed in
size, with a Vega-Lite legend; it is what SVG, PNG and the JSON specification show.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farstate.reports.theme import ArmStyle, Spec, colour_on, colour_signal, configuration, screen_parameters

SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
RESET = "reset"
RESET_LABEL = "base, state reset every T_train tokens"
RESET_STYLE = ArmStyle(RESET, RESET_LABEL, "#5c636b", (1, 3), "stroke", on_dark="#a8afb8")
"""The base model's reset, drawn among the arms although it is none."""

Row = dict[str, Any]
Extent = tuple[float, float]


@dataclass(frozen=True)
class Metric:
    """What a panel's vertical axis shows, and how; `least`: the smallest span of a linear one."""

    name: str
    title: str
    axis: str
    logarithmic: bool
    height: int
    least: float = 0.02


METRICS = (
    Metric("ppl", "Perplexity at position t", "PPL(t), log axis", True, 340),
    Metric("excess_nll", "Excess over the model's own short windows", "excess NLL, nats", False, 210),
    Metric("excess_nll_base", "Excess over the base model's short windows", "excess NLL against base, nats", False, 210),
)


@dataclass(frozen=True)
class Panel:
    """The rows of one model and metric.

    Each row has `kind` (mean, seed, broken, reference or paper), `arm`, `label`, `seed` (text), `position`,
    `value`, `low`, `high`, `n` (documents), `tokens` and `note`; `low`, `high`, `n` and `tokens` may be null. `train_lengths`: by arm, where the arms' training
    lengths differ; `train_length` is the shortest then.
    """

    model: str
    title: str
    metric: Metric
    train_length: int
    length: int
    rows: Sequence[Row] = field(repr=False)
    train_lengths: Mapping[str, int] = field(default_factory=dict)

    @property
    def near(self) -> float:
        """The first position of the closer view, an eighth of the training length."""
        return max(1.0, self.train_length / 8)


def extents(panels: Iterable[Panel]) -> dict[str, dict[str, dict[str, Extent]]]:
    """For each metric and arm the least and greatest value drawn, `all` positions and `near` ones.

    Panels of one metric share their vertical range, so that models can be compared; the page joins the
    ranges of the arms that are shown.
    """
    found: dict[str, dict[str, dict[str, Extent]]] = {}
    for panel in panels:
        for row in panel.rows:
            numbers = [row[key] for key in ("value", "low", "high") if row[key] is not None]
            if not numbers:
                continue
            by_view = found.setdefault(panel.metric.name, {}).setdefault(row["arm"], {})
            for view in ("all", "near") if row["position"] >= panel.near else ("all",):
                low, high = by_view.get(view, (math.inf, -math.inf))
                by_view[view] = (min(low, *numbers), max(high, *numbers))
    return found


def joined(by_arm: dict[str, dict[str, Extent]], view: str) -> Extent:
    """The range over all arms in a view; (1, 2) when nothing finite is drawn there."""
    ranges = [by_view[view] for by_view in by_arm.values() if view in by_view]
    if not ranges:
        return (1.0, 2.0)
    return (min(low for low, _ in ranges), max(high for _, high in ranges))


def screen_panel(panel: Panel, styles: Sequence[ArmStyle], y_range: Extent) -> Spec:
    """A panel for the page, which supplies the data set `rows` (see `columns`)."""
    parameters: list[Spec] = [
        *screen_parameters(),
        {"name": "shown", "value": [style.name for style in styles]},
        *_view_parameters(panel, y_range),
    ]
    return {
        "$schema": SCHEMA,
        "description": f"{panel.metric.title}, {panel.title}",
        "width": "container",
        "height": panel.metric.height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 12, "top": 20, "bottom": 2},
        "params": parameters,
        "data": {"name": "rows"},
        "transform": [{"filter": "indexof(shown, datum.arm) >= 0 && datum.position >= x_low"}, *_TOOLTIP_TEXT],
        "layer": _layers(panel, styles, static=False, name=""),
        "config": configuration(static=False),
    }


def ages_panel(panel: Panel, styles: Sequence[ArmStyle]) -> Spec:
    """How old the states were that an arm started from: share of sequences whose state was at least `age` tokens old.

    The horizontal axis is that of the curve above it. Its data set `rows`, given by the page, has arm, label,
    seed (text), age, share; the sum over older ages is taken by the chart.
    """
    x = _x(panel, static=False, field_name="age", title="age of the initial state, tokens")
    return {
        "$schema": SCHEMA,
        "description": f"Ages of the states met in training, {panel.title}",
        "width": "container",
        "height": 130,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "padding": {"left": 2, "right": 12, "top": 4, "bottom": 2},
        "params": [
            *screen_parameters(),
            {"name": "shown", "value": [style.name for style in styles]},
            *_view_parameters(panel, (0.0, 1.0)),
        ],
        "data": {"name": "rows"},
        "transform": [
            {"filter": "indexof(shown, datum.arm) >= 0"},
            {
                "window": [{"op": "sum", "field": "share", "as": "at_least"}],
                "frame": [None, 0],
                "sort": [{"field": "age", "order": "descending"}],
                "groupby": ["arm", "seed"],
            },
            {"filter": f"datum.age >= x_low && datum.age <= {panel.length}"},
        ],
        "layer": [
            _edge(panel, x),
            _training_rule(panel, x, static=False),
            {
                "params": [
                    {"name": "hover", "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}
                ],
                "mark": {"type": "point", "filled": True, "size": 12, "aria": False},
                "encoding": {
                    "x": x,
                    "y": {
                        "field": "at_least",
                        "type": "quantitative",
                        "scale": {"domain": [0, 1]},
                        "axis": {"title": None, "format": "%", "values": [0, 0.25, 0.5, 0.75, 1], **_ALIGNED},
                    },
                    "color": _colour(styles, static=False),
                    "tooltip": [
                        {"field": "label", "title": "arm"},
                        {"field": "seed", "title": "seed"},
                        {"field": "age", "title": "age, tokens", "format": ","},
                        {"field": "at_least", "title": "at least this old", "format": ".3~%"},
                        {"field": "share", "title": "exactly this old", "format": ".3~%"},
                    ],
                },
            },
            {
                "mark": {"type": "line", "interpolate": "step-before", "strokeWidth": 1.6, "aria": False},
                "encoding": {
                    "x": x,
                    "y": {"field": "at_least", "type": "quantitative"},
                    "color": _colour(styles, static=False),
                    "strokeDash": _dash(styles, static=False),
                    "detail": {"field": "seed"},
                },
            },
        ],
        "config": configuration(static=False),
    }


def sheet(
    panels: Sequence[Panel],
    styles: Sequence[ArmStyle],
    title: str,
    subtitle: Sequence[str],
    further: Mapping[str, Sequence[Spec]] | None = None,
) -> Spec:
    """All panels on one sheet, a row per model and a column per metric, from an eighth of the training length on.

    `further`: by model, what stands at the right of its row.
    """
    by_metric = extents(panels)
    models = list(dict.fromkeys(panel.model for panel in panels))
    rows: list[Spec] = []
    names: list[str] = []
    for number, model in enumerate(models):
        columns: list[Spec] = []
        for panel in (panel for panel in panels if panel.model == model):
            names.append(f"{panel.metric.name}_{number}")
            heading = panel.metric.title if len(models) == 1 else f"{panel.title}: {_lower(panel.metric.title)}"
            columns.append(
                {
                    "title": {"text": heading, "offset": 8},
                    "width": 330,
                    "height": 280,
                    "data": {"values": list(panel.rows)},
                    "transform": [{"filter": f"datum.position >= {panel.near:g}"}, *_TOOLTIP_TEXT],
                    "layer": _layers(
                        panel, styles, static=True, name=names[-1], y_range=joined(by_metric.get(panel.metric.name, {}), "near")
                    ),
                }
            )
        columns += (further or {}).get(model, ())
        rows.append(
            {"hconcat": columns, "spacing": 28, "resolve": {"scale": dict.fromkeys(("color", "strokeDash", "shape"), "shared")}}
        )
    return stacked(rows, title, subtitle) | {
        "params": [{"name": "picked", "select": {"type": "point", "fields": ["arm"]}, "bind": "legend", "views": names}]
    }


def stacked(rows: Sequence[Spec], title: str, subtitle: Sequence[str]) -> Spec:
    """Rows of static charts on one sheet with a title."""
    return {
        "$schema": SCHEMA,
        "title": {
            "text": title,
            "subtitle": list(subtitle),
            "fontSize": 17,
            "subtitleFontSize": 12,
            "offset": 14,
            "subtitlePadding": 5,
        },
        "padding": 16,
        "vconcat": list(rows),
        "resolve": {"scale": dict.fromkeys(("color", "strokeDash", "shape"), "shared")},
        "spacing": 30,
        "config": configuration(static=True),
    }


def columns(rows: Iterable[Row], varying: Sequence[str]) -> list[Row]:
    """Rows as one record per curve: what is the same in all its rows once, the `varying` fields as lists.

    The page unpacks them; written out row by row they would be five times as long.
    """
    curves: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        same = {key: value for key, value in row.items() if key not in varying}
        curve = curves.setdefault(tuple(same.items()), {**same, **{key: [] for key in varying}})
        for key in varying:
            curve[key].append(row[key])
    return list(curves.values())


_ALIGNED: Spec = {"minExtent": 44, "maxExtent": 44}
"""Panels above each other share the left edge of their plots, whatever their labels are."""

_TOOLTIP_TEXT: list[Spec] = [
    {
        "calculate": "isValid(datum.low) && isValid(datum.high) ? format(datum.low, ',.4~r') + ' to ' + format(datum.high, ',.4~r') : 'none'",
        "as": "interval",
    },
    {"calculate": "isValid(datum.n) ? format(datum.n, ',') : 'not given'", "as": "documents"},
    {"calculate": "isValid(datum.tokens) ? format(datum.tokens, ',') : 'not given'", "as": "read"},
]

_TOOLTIP: list[Spec] = [
    {"field": "label", "title": "arm"},
    {"field": "seed", "title": "seed"},
    {"field": "position", "title": "position t", "format": ",.4~r"},
    {"field": "value", "title": "value", "format": ",.4~r"},
    {"field": "interval", "title": "low to high"},
    {"field": "documents", "title": "documents"},
    {"field": "read", "title": "tokens"},
    {"field": "note", "title": "what it is"},
]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _view_parameters(panel: Panel, y_range: Extent) -> list[Spec]:
    return [
        {"name": "x_low", "value": panel.near},
        {"name": "y_low", "value": y_range[0]},
        {"name": "y_high", "value": y_range[1]},
    ]


def _powers_of_two(first: float, last: int) -> list[int]:
    return [2**exponent for exponent in range(math.ceil(math.log2(first)), math.floor(math.log2(last)) + 1)]


def _x(panel: Panel, *, static: bool, field_name: str = "position", title: str = "position t, tokens read") -> Spec:
    ticks = _powers_of_two(panel.near, panel.length)
    return {
        "field": field_name,
        "type": "quantitative",
        "scale": {
            "type": "log",
            "base": 2,
            "nice": False,
            "domain": [panel.near if static else {"expr": "x_low"}, panel.length],
        },
        "axis": {
            "title": title,
            "values": ticks if static else {"expr": f"x_low > 1 ? {ticks} : {_powers_of_two(1, panel.length)}"},
            "format": ",d",
            "labelOverlap": "parity",
            "labelSeparation": 5,
            "labelFlush": False,
            "grid": False,
        },
    }


def _y(panel: Panel, *, static: bool, y_range: Extent) -> Spec:
    """The range of what is shown with a little to spare; a linear one always holds zero."""
    low, high = (repr(y_range[0]), repr(y_range[1])) if static else ("y_low", "y_high")
    if panel.metric.logarithmic:
        spare = f"pow(max(1.02, {high} / {low}), 0.06)"
        first, last = f"({low} / {spare})", f"({high} * {spare})"
        scale: Spec = {"type": "log", "nice": False}
        ticks: Spec = {"values": {"expr": _logarithmic_ticks(first, last)}}
    else:
        span = f"max({panel.metric.least:g}, max(0, {high}) - min(0, {low}))"
        first, last = f"min(0, {low}) - 0.06 * {span}", f"max(0, {high}) + 0.06 * {span}"
        scale = {"nice": False, "zero": False}
        ticks = {"tickCount": 6}
    axis: Spec = {
        **ticks,
        "title": panel.metric.axis if static else None,
        "format": ",~r" if panel.metric.logarithmic else "~r",
        "labelOverlap": "greedy",
        "labelSeparation": 2,
        **({} if static else _ALIGNED),
    }
    return {
        "field": "value",
        "type": "quantitative",
        "scale": scale | {"domain": [{"expr": first}, {"expr": last}]},
        "axis": axis,
    }


def _logarithmic_ticks(first: str, last: str) -> str:
    """A Vega expression for the ticks of a perplexity axis: even steps within two octaves, else 1, 2, 5 of every decade.

    Vega's own ticks leave most of a span below one decade without labels.
    """
    ladder = [mantissa * 10**exponent for exponent in range(12) for mantissa in (1, 2, 5)]

    def below(value: str) -> str:
        decade = f"floor(log({value}) / LN10)"
        leading = f"({value} / pow(10, {decade}))"
        return f"(3 * {decade} + ({leading} > 5 ? 3 : {leading} > 2 ? 2 : {leading} > 1 ? 1 : 0))"

    unit = f"pow(10, floor(log(({last} - {first}) / 6) / LN10))"
    ratio = f"(({last} - {first}) / 6 / {unit})"
    step = f"({unit} * ({ratio} >= 5 ? 5 : {ratio} >= 2 ? 2 : 1))"
    even = f"sequence(ceil({first} / {step}) * {step}, {last}, {step})"
    return f"{last} / {first} < 4 ? {even} : slice({ladder}, {below(first)}, {below(last)})"


def _legend(styles: Sequence[ArmStyle], *, static: bool) -> Spec | None:
    if not static:
        return None
    return {
        "title": None,
        "orient": "top",
        "columns": 0,
        "labelExpr": f"{json.dumps({style.name: style.label for style in styles}, ensure_ascii=False)}[datum.label]",
        "labelLimit": 400,
        "columnPadding": 22,
    }


def _domain(styles: Sequence[ArmStyle]) -> list[str]:
    return [style.name for style in styles]


def _colour(styles: Sequence[ArmStyle], *, static: bool) -> Spec:
    colours = [colour_on(style, dark=False) if static else colour_signal(style) for style in styles]
    return {
        "field": "arm",
        "type": "nominal",
        "scale": {"domain": _domain(styles), "range": colours},
        "legend": _legend(styles, static=static),
    }


def _dash(styles: Sequence[ArmStyle], *, static: bool) -> Spec:
    return {
        "field": "arm",
        "type": "nominal",
        "scale": {"domain": _domain(styles), "range": [[*style.dash] or [1, 0] for style in styles]},
        "legend": _legend(styles, static=static),
    }


def _shape(styles: Sequence[ArmStyle], *, static: bool) -> Spec:
    return {
        "field": "arm",
        "type": "nominal",
        "scale": {"domain": _domain(styles), "range": [style.shape for style in styles]},
        "legend": _legend(styles, static=static),
    }


def _training_rule(panel: Panel, x: Spec, *, static: bool) -> Spec:
    soft: Any = "#5c636b" if static else {"expr": "soft"}
    return {
        "data": {"values": [{x["field"]: panel.train_length}]},
        "mark": {"type": "rule", "strokeDash": [5, 4], "color": soft, "aria": False},
        "encoding": {"x": x},
    }


def _training_ticks(panel: Panel, x: Spec, colour: Spec, *, static: bool) -> list[Spec]:
    """The training length of each arm: a faint line, and above it a thick tick in the arm's colour."""
    shown = [] if static else [{"filter": "indexof(shown, datum.arm) >= 0 && datum.position >= x_low"}]
    data: Spec = {"values": [{"arm": arm, "position": length} for arm, length in panel.train_lengths.items()]}
    return [
        {
            "data": data,
            "transform": shown,
            "mark": {"type": "rule", "strokeDash": [2, 4], "strokeWidth": 1.2, "opacity": 1, "aria": False},
            "encoding": {"x": x, "color": colour},
        },
        {
            "data": data,
            "transform": shown,
            "mark": {"type": "rule", "strokeWidth": 4, "opacity": 1, "aria": False},
            "encoding": {"x": x, "y": {"value": 0}, "y2": {"value": 9}, "color": colour},
        },
    ]


def trained_on(panel: Panel) -> str:
    """The training length, or lengths, in words."""
    lengths = sorted(set(panel.train_lengths.values()) or {panel.train_length})
    return f"trained on {', '.join(f'{length:,}' for length in lengths)} tokens"


def _edge(panel: Panel, x: Spec) -> Spec:
    """An invisible marker at the end of the axis: panels above each other keep the same room at the right, whether a marker needs it or not."""
    return {
        "data": {"values": [{x["field"]: panel.length}]},
        "mark": {"type": "point", "size": 130, "opacity": 0, "aria": False},
        "encoding": {"x": x},
    }


def _layers(panel: Panel, styles: Sequence[ArmStyle], *, static: bool, name: str, y_range: Extent = (1.0, 2.0)) -> list[Spec]:
    """Bottom to top: guides, bands, seeds, reference, means, the paper's values, broken ends, the hovered point."""
    soft: Any = "#5c636b" if static else {"expr": "soft"}
    x = _x(panel, static=static)
    y = _y(panel, static=static, y_range=y_range)
    colour, dash, shape = _colour(styles, static=static), _dash(styles, static=static), _shape(styles, static=static)
    # A layer that says nothing about the legend leaves the one that the lines and points declare.
    bare_colour, bare_shape = ({key: value for key, value in channel.items() if key != "legend"} for channel in (colour, shape))
    kinds = {row["kind"] for row in panel.rows}

    def opacity(value: float) -> Spec:
        """In the static sheet the arms that are not picked in the legend fade."""
        return (
            {"opacity": {"condition": {"param": "picked", "value": value}, "value": 0.06}}
            if static
            else {"opacity": {"value": value}}
        )

    def of(kind: str) -> list[Spec]:
        return [{"filter": f"datum.kind == '{kind}'"}]

    layers: list[Spec] = [
        *([] if static else [_edge(panel, x)]),
        *(
            _training_ticks(panel, x, bare_colour, static=static)
            if panel.train_lengths
            else [_training_rule(panel, x, static=static)]
        ),
        {
            "data": {"values": [{"position": panel.train_length, "text": trained_on(panel)}]},
            "mark": {
                **{"type": "text", "baseline": "bottom", "fontSize": 11, "color": soft, "aria": False},
                **({"align": "left", "dx": -4} if panel.train_lengths else {}),
            },
            "encoding": {"x": x, "y": {"value": -5}, "text": {"field": "text"}},
        },
    ]
    if not panel.metric.logarithmic:
        ink: Any = "#1b1d21" if static else {"expr": "ink"}
        layers.append(
            {
                "data": {"values": [{"value": 0}]},
                "mark": {"type": "rule", "color": ink, "strokeWidth": 1, "aria": False},
                "encoding": {"y": y},
            }
        )
    layers.append(
        {
            "transform": [*of("mean"), {"filter": "isValid(datum.low) && isValid(datum.high)"}],
            "mark": {"type": "area", "fillOpacity": 0.16, "aria": False},
            "encoding": {
                "x": x,
                "y": {**y, "field": "low"},
                "y2": {"field": "high"},
                "color": bare_colour,
                **opacity(1),
            },
        }
    )
    if "seed" in kinds:
        layers.append(
            {
                "transform": of("seed"),
                "mark": {"type": "line", "strokeWidth": 0.8, "point": {"size": 9, "filled": True}, "aria": False},
                "encoding": {"x": x, "y": y, "color": bare_colour, "detail": {"field": "seed"}, **opacity(0.5)},
            }
        )
    if "reference" in kinds:
        layers.append(
            {
                "transform": of("reference"),
                "mark": {"type": "line", "strokeWidth": 1.6, "strokeDash": [1, 3], "strokeCap": "round", "aria": False},
                "encoding": {"x": x, "y": y, "color": bare_colour, **opacity(1)},
            }
        )
    layers.append(
        {
            "transform": of("mean"),
            "mark": {"type": "line", "strokeWidth": 1.9, "aria": False},
            "encoding": {"x": x, "y": y, "color": colour, "strokeDash": dash, **opacity(1)},
        }
    )
    points: Spec = {
        "transform": [{"filter": "datum.kind == 'mean' || datum.kind == 'seed' || datum.kind == 'reference'"}],
        "mark": {"type": "point", "filled": True, "aria": False},
        "encoding": {
            "x": x,
            "y": y,
            "color": colour,
            "shape": shape,
            "size": {"condition": {"test": "datum.kind == 'mean'", "value": 34}, "value": 6},
            "tooltip": _TOOLTIP,
            **opacity(1),
        },
    }
    if static:
        points["name"] = name
    else:
        points["params"] = [
            {"name": "hover", "select": {"type": "point", "on": "pointerover", "nearest": True, "clear": "pointerout"}}
        ]
        points["encoding"]["size"] = {
            "condition": [{"param": "hover", "empty": False, "value": 130}, {"test": "datum.kind == 'mean'", "value": 34}],
            "value": 6,
        }
    layers.append(points)
    if "paper" in kinds:
        layers += [
            {
                "transform": [*of("paper"), {"filter": "isValid(datum.low)"}],
                "mark": {"type": "rule", "strokeWidth": 1.2, "aria": False},
                "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": bare_colour, **opacity(1)},
            },
            {
                "transform": [*of("paper"), {"filter": "isValid(datum.low)"}],
                "mark": {"type": "point", "filled": False, "size": 95, "strokeWidth": 1.6, "aria": False},
                "encoding": {
                    "x": x,
                    "y": y,
                    "color": bare_colour,
                    "shape": bare_shape,
                    "tooltip": _TOOLTIP,
                    **opacity(1),
                },
            },
            {
                "transform": [*of("paper"), {"filter": "!isValid(datum.low)"}],
                "mark": {"type": "text", "text": "↑", "fontSize": 18, "fontWeight": "bold", "baseline": "bottom", "aria": False},
                "encoding": {"x": x, "y": y, "color": bare_colour, "tooltip": _TOOLTIP, **opacity(1)},
            },
        ]
    if "broken" in kinds:
        top = f"{y_range[1]!r}" if static else "y_high"
        layers.append(
            {
                "transform": [*of("broken"), {"calculate": f"isValid(datum.value) ? datum.value : {top}", "as": "value"}],
                "mark": {"type": "text", "text": "✕", "fontSize": 15, "fontWeight": "bold", "aria": False},
                "encoding": {"x": x, "y": y, "color": bare_colour, "tooltip": _TOOLTIP, **opacity(1)},
            }
        )
    return layers
