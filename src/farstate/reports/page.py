"""One self-contained HTML page: templates, the charts' script embedded once, data that cannot break out of its element.

A page loads nothing: its content security policy forbids every connection, so a slip would show as an
error in the console and not as a request.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from farstate.reports import text
from farstate.reports.theme import ArmStyle, colour_on

MAXIMUM_BYTES = 2_500_000


def render(template: str, **values: Any) -> str:
    """The page of `template` (a file in `templates/`), with style, script and chart libraries inlined."""
    environment = _environment()
    return environment.get_template(template).render(
        style=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
        libraries=Markup(_libraries()),
        **values,
    )


def embedded_json(value: Any) -> Markup:
    """`value` as JSON for a `<script type="application/json">`: no character in it can end the element."""
    encoded = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(encoded.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"))


def swatch(style: ArmStyle) -> Markup:
    """The legend's picture of an arm: a stretch of its line with its marker, in a colour that follows the ground."""
    light, dark = colour_on(style, dark=False), colour_on(style, dark=True)
    dash = f' stroke-dasharray="{" ".join(map(str, style.dash))}"' if style.dash else ""
    return Markup(
        f'<svg class="swatch" viewBox="0 0 36 12" width="36" height="12" aria-hidden="true" style="--light:{light};--dark:{dark}">'
        f'<line x1="0" y1="6" x2="36" y2="6" stroke="currentColor" stroke-width="2"{dash}/>'
        f'<path d="{_OUTLINES[style.shape]}" transform="translate(18 6)" fill="currentColor"/></svg>'
    )


_OUTLINES = {
    "circle": "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z",
    "square": "M-4,-4h8v8h-8Z",
    "triangle-up": "M0,-5L5,4H-5Z",
    "triangle-down": "M0,5L5,-4H-5Z",
    "triangle-right": "M5,0L-4,5V-5Z",
    "triangle-left": "M-5,0L4,5V-5Z",
    "diamond": "M0,-5.5L4.5,0L0,5.5L-4.5,0Z",
    "cross": "M-5,-1.8h3.2v-3.2h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2Z",
    "stroke": "M-5,-1h10v2h-10Z",
    "wedge": "M0,-5L2.5,4H-2.5Z",
}


@functools.lru_cache(maxsize=1)
def _libraries() -> str:
    """vega, vega-lite and vega-embed as one script that sets `window.vegaEmbed`."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "embedded_json": embedded_json,
        "swatch": swatch,
        "nats": text.nats,
        "share": text.share,
        "perplexity": text.perplexity,
        "count": text.count,
        "magnitude": text.magnitude,
        "scientific": text.scientific,
    }
    environment.globals |= {
        "estimate": text.estimate,
        "between": text.between,
        "share": text.share,
        "finite": text.finite,
        "nats": text.nats,
    }
    return environment
