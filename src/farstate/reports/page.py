"""One self-contained HTML page: templates, the charts' script embedded once, data that cannot break out of its element.

A page loads nothing: its content security policy forbids every connection, so a slip would show as an
error in the console and not as a request.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Protocol

import jinja2
import polars
import vl_convert
from markupsafe import Markup

from farstate.errors import FarstateError
from farstate.files import atomic_path, write_text
from farstate.reports import text
from farstate.reports.agreement import Claim, Compared
from farstate.reports.figures import About
from farstate.reports.theme import ArmStyle, Spec, colour_on

MAXIMUM_BYTES = 2_500_000
_KEPT = Path(".farstate/libraries")
OUTPUTS = ("html", "svg", "png", "json", "parquet", "csv")
PNG_SCALE = 2.0


class Draw(Protocol):
    """`draw` of every module that draws pages: a page, a static figure, its specification and its data.

    Args:
        about: what the figure asks.
        inputs: by role the results' directories; each module says which it reads.
        output: a path each for html, svg, png, json, parquet and csv, written whole or not at all.
        context: see `farstate.reports.context.Context`.
        keys: content keys of the results shown, carried by the page in `<meta name="farstate-keys">`.

    Raises:
        FarstateError: a table or a column is missing, a table is empty or holds what the page does not know, `context` is incomplete,
            or an output is not named.
    """

    def __call__(
        self,
        about: About,
        inputs: Mapping[str, Sequence[Path]],
        output: Mapping[str, Path],
        context: dict[str, Any],
        keys: Mapping[str, Any],
    ) -> None: ...


@dataclass(frozen=True)
class Section:
    """A part of a page that another module draws than the page's own.

    Attributes:
        html: the finished `<section>`.
        charts: what the page's script draws in it: `id` of its element, `metric` (key of `extents`), `model` (empty where it shows
            several), `spec`, `curves` (`farstate.reports.charts.columns`), and `near`, the first position of the closer view.
        extents: by metric and arm, the ranges of the two views (`farstate.reports.charts.extents`).
        sheet: rows for the static figure, below those of the page.
        leads: a headline a model.
        claims, compared: what it says to the paper's figure.
    """

    html: Markup
    charts: Sequence[dict[str, Any]] = ()
    extents: Mapping[str, Any] = field(default_factory=dict)
    sheet: Sequence[Spec] = ()
    leads: Sequence[str] = ()
    claims: Sequence[Claim] = ()
    compared: Sequence[Compared] = ()


def check_outputs(output: Mapping[str, Path]) -> None:
    """Refuse a page for one of whose files no path is given."""
    if missing := [name for name in OUTPUTS if name not in output]:
        raise FarstateError(f"no path given for {', '.join(missing)}; it writes {', '.join(OUTPUTS)}")


def write(output: Mapping[str, Path], html: str, specification: Spec, drawn: polars.DataFrame, remedy: str) -> None:
    """Write a page with the static figure, its specification and its data; the page last.

    Args:
        output: a path for each of OUTPUTS.
        html: the page.
        specification: Vega-Lite, drawn as SVG and PNG.
        drawn: what is drawn.
        remedy: what to do when the page is too large.

    Raises:
        FarstateError: the page is larger than MAXIMUM_BYTES; nothing is written then.
    """
    encoded = json.dumps(specification, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    svg = vl_convert.vegalite_to_svg(encoded)
    png = vl_convert.svg_to_png(svg, scale=PNG_SCALE)
    if (size := len(html.encode())) > MAXIMUM_BYTES:
        raise FarstateError(f"the page would be {size:,} bytes, more than {MAXIMUM_BYTES:,}; {remedy}")
    with atomic_path(output["parquet"]) as temporary:
        drawn.write_parquet(temporary)
    with atomic_path(output["csv"]) as temporary:
        drawn.write_csv(temporary)
    write_text(output["json"], encoded + "\n")
    write_text(output["svg"], svg)
    with atomic_path(output["png"]) as temporary:
        temporary.write_bytes(png)
    write_text(output["html"], html)


def group(
    output: Mapping[str, Path], charts: Sequence[Mapping[str, Any]], extents: Mapping[str, Any], arms: Sequence[str]
) -> Spec:
    """What the script of a figure's own page draws: one group, named after the figure; a page of several figures holds several.

    Args:
        output: the page's paths.
        charts, extents: as in `Section`.
        arms: what the legend picks among.
    """
    return {"groups": [{"name": output["html"].stem, "arms": list(arms), "extents": extents, "charts": list(charts)}]}


def models_of(drawings: Spec, labels: Mapping[str, str]) -> list[tuple[str, str]]:
    """The models that the page's reader can pick among, with their labels: all that a chart is of, if they are several."""
    names = list(dict.fromkeys(chart["model"] for group in drawings["groups"] for chart in group["charts"] if chart["model"]))
    return [(name, labels.get(name, name)) for name in names] if len(names) > 1 else []


def render(template: str, *, drawings: Spec, record: Mapping[str, Any] | None = None, **values: Any) -> str:
    """The page of `template` (a file in `templates/`), with style, script and chart libraries inlined.

    Args:
        template: its name.
        drawings: what the script draws (`group`).
        record: what the page says, for machines (`farstate.reports.agreement.record`).
        values: what the template needs; the labels of the models are taken from `card`, where there is one.
    """
    environment = _environment()
    labels = {name: model.label for name, model in values["card"].models.items()} if "card" in values else {}
    return environment.get_template(template).render(
        drawings=drawings,
        models=models_of(drawings, labels),
        style=Markup(_resource("page.css")),
        script=Markup(_resource("page.js")),
        libraries=Markup(_libraries()),
        record=record,
        **values,
    )


def fragment(template: str, **values: Any) -> Markup:
    """A part of a page: `template` alone, without style and script."""
    return Markup(_environment().get_template(template).render(**values))


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
    """vega, vega-lite and vega-embed as one script that sets `window.vegaEmbed`.

    Putting it together takes 3 s and depends on nothing but the library's version: a project's pages share it.
    """
    kept = _KEPT / f"vega-{metadata.version('vl-convert-python')}.js"
    if kept.is_file():
        return kept.read_text(encoding="utf-8")
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;").replace("</script", "<\\/script")
    if _KEPT.parent.is_dir():
        write_text(kept, bundle)
    return bundle


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
        "to_decide": text.to_decide,
        "share": text.share,
        "finite": text.finite,
        "nats": text.nats,
    }
    return environment
