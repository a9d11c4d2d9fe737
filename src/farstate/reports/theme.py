"""How every figure looks: one colour, dash and shape per arm, and the chart configuration for paper and screen.

Colours are Okabe and Ito's, in their order, without yellow (invisible on white). Their first colour is black:
on screen it is the signal `ink`, which the page turns to near-white on a dark ground. An arm is never told
by its colour alone: dash and shape differ too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Spec = dict[str, Any]

INK = "#1b1d21"
INK_ON_DARK = "#f1f3f5"
FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', 'DejaVu Sans', sans-serif"
STATIC_FONT = "'Liberation Sans', 'DejaVu Sans', Arial, sans-serif"


@dataclass(frozen=True)
class ArmStyle:
    """How an arm, or a value of what is varied, is drawn.

    `colour = None` stands for the ink of the page, black on white; `on_dark` is the colour on a dark ground where it is another.
    """

    name: str
    label: str
    colour: str | None
    dash: tuple[int, ...]
    shape: str
    on_dark: str | None = None


_KNOWN = (
    ArmStyle("base", "base (no post-training)", None, (), "circle"),
    ArmStyle("control", "zero-init control", "#E69F00", (7, 3), "square"),
    ArmStyle("random_noise", "random noise", "#56B4E9", (2, 2), "triangle-up"),
    ArmStyle("fitted_noise", "fitted noise", "#009E73", (8, 3, 2, 3), "triangle-down"),
    ArmStyle("state_passing", "state passing", "#0072B2", (), "diamond"),
    ArmStyle("tbtt", "TBTT", "#D55E00", (12, 4), "cross"),
    # Not the paper's. Distances to the colours above, and among these, stay above 17 (CIELAB) for the colour-blind too.
    ArmStyle("gaussian_joint", "Gaussian, joint covariance", "#7B68EE", (4, 4), "triangle-right"),
    ArmStyle("gaussian_head", "Gaussian, within heads", "#A0522D", (10, 2, 2, 2, 2, 2), "triangle-left"),
    ArmStyle("permuted", "permuted states", "#CC79A7", (1, 3), "wedge"),
)
_FURTHER_COLOURS = ("#999999", "#8C6D31", "#AA3377", "#666666")
_FURTHER_DASHES = ((5, 1), (12, 2, 2, 2), (3, 6), (6, 2, 6, 6))
_FURTHER_SHAPES = ("stroke", "arrow", "triangle", "M0,-1L0.3,-0.3L1,0L0.3,0.3L0,1L-0.3,0.3L-1,0L-0.3,-0.3Z")
_LIGHTER_ON_DARK = {"#0072B2": "#3A9BD9"}


def arm_styles(arms: Iterable[str]) -> list[ArmStyle]:
    """The styles of `arms` in the order of the legend: those above first, others by name after them.

    An arm keeps its style whichever others are drawn, as long as it is one of those above.
    """
    present = set(arms)
    styles = [style for style in _KNOWN if style.name in present]
    for number, name in enumerate(sorted(present - {style.name for style in _KNOWN})):
        pick = number % len(_FURTHER_COLOURS)
        styles.append(
            ArmStyle(name, name.replace("_", " "), _FURTHER_COLOURS[pick], _FURTHER_DASHES[pick], _FURTHER_SHAPES[pick])
        )
    return styles


def ordered_styles(series: Sequence[tuple[str, str]]) -> list[ArmStyle]:
    """The styles of (name, label) in the order of what is varied: a ramp from dark to light, on a dark ground from light to lighter.

    The ramp is viridis, which keeps its order for the colour-blind and in grey; its ends that vanish on the ground are left
    out. Dashes and shapes go round at different lengths, so that neighbours differ in both.
    """
    last = max(1, len(series) - 1)
    return [
        ArmStyle(
            name,
            label,
            _viridis(0.70 * number / last),
            _ORDERED_DASHES[number % len(_ORDERED_DASHES)],
            _ORDERED_SHAPES[number % len(_ORDERED_SHAPES)],
            on_dark=_viridis(0.42 + 0.53 * number / last),
        )
        for number, (name, label) in enumerate(series)
    ]


def _viridis(place: float) -> str:
    """The colour at `place` in 0 … 1, linear between its tenths."""
    number = min(int(10 * place), 9)
    part = 10 * place - number
    low, high = (bytes.fromhex(_VIRIDIS[step]) for step in (number, number + 1))
    return "#" + bytes(round(a + part * (b - a)) for a, b in zip(low, high, strict=True)).hex()


_VIRIDIS = ("440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725")
_ORDERED_DASHES: tuple[tuple[int, ...], ...] = ((), (8, 3), (3, 3), (10, 3, 2, 3), (1, 3))
_ORDERED_SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")


def colour_on(style: ArmStyle, *, dark: bool) -> str:
    """The style's colour as a hexadecimal code on a light or dark ground (blue is lightened for contrast)."""
    if style.colour is None:
        return INK_ON_DARK if dark else INK
    if not dark:
        return style.colour
    return style.on_dark or _LIGHTER_ON_DARK.get(style.colour, style.colour)


def colour_signal(style: ArmStyle) -> str | dict[str, str]:
    """The style's colour for a chart on the page, following the signal `dark` where the ground matters."""
    light, dark = colour_on(style, dark=False), colour_on(style, dark=True)
    return light if light == dark else {"expr": f"dark ? '{dark}' : '{light}'"}


def screen_parameters() -> list[Spec]:
    """The signals a chart on the page is themed with."""
    return [
        {"name": "dark", "value": False},
        {"name": "ink", "expr": f"dark ? '{INK_ON_DARK}' : '{INK}'"},
        {"name": "faint", "expr": "dark ? '#3a3f47' : '#dfe2e6'"},
        {"name": "soft", "expr": "dark ? '#a8afb8' : '#5c636b'"},
    ]


def configuration(*, static: bool) -> Spec:
    """The Vega-Lite `config` of a chart: fixed black on white when `static`, else following the page's signals."""
    ink: Any = INK if static else {"expr": "ink"}
    soft: Any = "#5c636b" if static else {"expr": "soft"}
    faint: Any = "#dfe2e6" if static else {"expr": "faint"}
    return {
        "background": "white" if static else "transparent",
        "font": STATIC_FONT if static else FONT,
        "view": {"stroke": None},
        "axis": {
            "labelColor": soft,
            "titleColor": ink,
            "domainColor": soft,
            "tickColor": soft,
            "gridColor": faint,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "gridWidth": 1,
            "tickSize": 4,
            "labelPadding": 4,
        },
        "title": {
            "color": ink,
            "anchor": "start",
            "fontSize": 13,
            "fontWeight": "bold",
            "subtitleColor": soft,
            "subtitleFontSize": 11,
        },
        "legend": {"labelColor": ink, "titleColor": ink, "labelFontSize": 12, "symbolSize": 90, "symbolStrokeWidth": 1},
    }
