"""Pages of one model under a quantity that is varied: training context, snapshots, warm-up, noise, and what a repair costs.

The stage reads the tables of `farstate.evaluation.compare` and draws what `context.series` names in them. It filters and
formats; every number is in a table (the loss near the training length as its exponential, a perplexity).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars

from farstate.errors import FarstateError
from farstate.reports import agreement, charts, family_text, page, summary_charts, text
from farstate.reports.charts import METRICS, Metric, Panel, Row
from farstate.reports.context import Context, Series, read_context
from farstate.reports.family_text import Item
from farstate.reports.figures import About
from farstate.reports.page import OUTPUTS
from farstate.reports.panels import (
    CURVE_COLUMNS,
    CURVE_FIELDS,
    VERDICT_COLUMNS,
    add_drawing,
    arm_rows,
    broken,
    checked,
    data_table,
    described,
    last_position,
)
from farstate.reports.summary_charts import Summary
from farstate.reports.tables import read_table, rounded
from farstate.reports.text import Finding
from farstate.reports.theme import ArmStyle, Spec, arm_styles, ordered_styles
from farstate.runs import BASE, CONTROL

DIFFERENCE_COLUMNS = (
    *("model", "arm", "seed", "against_model", "against_arm", "quantity"),
    *("value", "low", "high", "seeds_low", "seeds_high", "n_seeds"),
)
CHINCHILLA = 20
"""Tokens a parameter in the Chinchilla budget."""
FREE = 0.02
"""Nats below which the upper end of a cost counts as none."""
_SETTING = {"post-training steps": "{} steps", "reset probability p": "p = {}", "peak learning rate": "peak rate {}"}
"""By what is varied, a value of it in words."""


@dataclass(frozen=True)
class Quantity:
    """A number of each run that is drawn against what is varied: a column of the verdicts, or `short_loss`."""

    name: str
    title: str
    unit: str
    tolerance: bool = False

    def heading(self, summary: Summary) -> str:
        """The title of its chart, with what the dotted line is."""
        if summary.tolerance is None:
            return self.title
        return f"{self.title} (dotted: {'free below' if self in (_COST, _COST_CONTROL) else 'tolerance'} {summary.tolerance:g})"


_FAR = Quantity("excess_nll", "Far excess, own windows", "far excess, nats", tolerance=True)
_FAR_BASE = Quantity("excess_nll_base", "Far excess, base model's windows", "far excess against base, nats", tolerance=True)
_SHORT = Quantity("short_loss", "Short-context loss", "loss near T_train, nats")
_COST = Quantity("short_context_cost", "Short-context cost, against base", "short-context cost, nats", tolerance=True)
_COST_CONTROL = Quantity(
    "short_context_cost_vs_control", "Short-context cost, against control", "cost against control, nats", tolerance=True
)


@dataclass(frozen=True)
class Kind:
    """What a page of one kind shows: curves by position, numbers against what is varied, columns of the table."""

    heading: str
    metrics: tuple[Metric, ...]
    quantities: tuple[Quantity, ...]
    first: str


KINDS: dict[str, Kind] = {
    "contexts": Kind("Perplexity and excess by training context", METRICS[:2], (_FAR, _SHORT), "Training context"),
    "snapshots": Kind("Perplexity and excess along the training", METRICS[:2], (_FAR, _SHORT), "Snapshot"),
    "warmups": Kind("Perplexity and excess by warm-up", METRICS[:2], (_FAR, _SHORT), "Warm-up"),
    "sigmas": Kind("Perplexity and excess by width of the noise", METRICS, (_FAR, _FAR_BASE, _COST), "σ"),
    "cost": Kind("Repair and price by setting", (), (_FAR, _COST, _COST_CONTROL), "Setting"),
}


@dataclass(frozen=True)
class Group:
    """A panel: the runs of one model.

    Attributes:
        name: the model that is varied.
        title: with its size.
        items: the runs, by value; `styles` names each one's style by its place.
        by_axis: what is varied, with the items it was varied in.
        references: verdicts of the arms that are not varied, base first.
        curves: the curves of all of them; in place of the arm the name of its style.
        train_lengths: by style.
    """

    name: str
    title: str
    items: Sequence[Item]
    styles: Sequence[str]
    by_axis: Mapping[str, Sequence[int]]
    references: Sequence[Row]
    curves: polars.DataFrame = field(repr=False)
    train_lengths: Mapping[str, int] = field(default_factory=dict)


def draw(
    about: About,
    inputs: Mapping[str, Sequence[Path]],
    output: Mapping[str, Path],
    context: dict[str, Any],
    keys: Mapping[str, Any],
) -> None:
    """Draw a family of curves (`page.Draw`).

    `about.family` is the kind of page; inputs: under "comparison" one directory with curves and verdicts (`.parquet`); the context's
    `series` says which runs are drawn.

    Raises:
        FarstateError: as `page.Draw`; a series is not in the tables.
    """
    page.check_outputs(output)
    (comparison,) = inputs["comparison"]
    card, kind = read_context(context), KINDS[about.family]
    if not card.series:
        raise FarstateError("context.series: empty; the page shows one curve or point for each of them")
    curves = checked(
        read_table(comparison, "curves", CURVE_COLUMNS), ("ppl", *(m.name for m in METRICS)), comparison / "curves.parquet"
    )
    verdicts = read_table(comparison, "verdicts", (*VERDICT_COLUMNS, "control"))
    differences = read_table(comparison, "differences", DIFFERENCE_COLUMNS, may_be_empty=True)
    card = card.model_copy(update={"series": [_named(about.family, card, one) for one in card.series]})
    styles = _styles(about.family, card.series, verdicts)
    groups = [
        _group(about.family, card, name, curves, verdicts, comparison) for name in dict.fromkeys(s.panel for s in card.series)
    ]
    length = last_position(curves, verdicts)
    panels = [_panel(group, metric, styles, length) for group in groups for metric in kind.metrics]
    summaries = {group.name: _summaries(about.family, group, kind, styles) for group in groups}
    scatters = {group.name: _scatter_rows(group, styles) for group in groups} if about.family == "cost" else {}
    drawn = _drawn(kind, groups, styles)

    specification = _sheet(about, card, kind, groups, panels, styles, summaries, scatters, verdicts)
    html = _page(about, card, kind, groups, panels, styles, summaries, scatters, drawn, differences, output, keys)
    page.write(output, html, specification, drawn, "lower evaluate.bins_per_octave, or vary fewer values")


# Reading ---------------------------------------------------------------------------------------------------


def _style_name(family: str, series: Series) -> str:
    """By what a run is told in the legend: its value, or where several quantities are varied its arm."""
    return series.of if family == "cost" else series.label


def _named(family: str, card: Context, series: Series) -> Series:
    """The series under the words its legend has: a warm-up in per cent, a snapshot as a multiple of the Chinchilla budget.

    Models of several sizes have other multiples at the same tokens: then the legend says tokens.
    """
    if family == "warmups" and series.value is not None:
        return series.model_copy(update={"label": f"{text.share(series.value)} warm-up"})
    if family == "snapshots" and len({one.panel for one in card.series}) == 1:
        tokens = _tokens(card, series)
        if text.finite(tokens.get("chinchilla")):
            end = ", end of the schedule" if series.arm == BASE else ""
            return series.model_copy(
                update={"label": f"{tokens['chinchilla']:.2g} × Chinchilla ({text.count(tokens['tokens'])} tokens{end})"}
            )
    return series


def _styles(family: str, series: Sequence[Series], verdicts: polars.DataFrame) -> list[ArmStyle]:
    """Arms that are not varied look as on other pages; values are a ramp."""
    varied = {one.arm for one in series}
    fixed = arm_styles([arm for arm in verdicts["arm"].unique() if arm not in varied] if family in ("sigmas", "cost") else [])
    if family == "cost":
        return arm_styles({*(style.name for style in fixed), *(one.of for one in series)})
    labels = {one.label: one.value for one in sorted(series, key=lambda one: -math.inf if one.value is None else one.value)}
    return [*fixed, *ordered_styles([(label, label) for label in labels])]


def _group(family: str, card: Context, name: str, curves: polars.DataFrame, verdicts: polars.DataFrame, where: Path) -> Group:
    series = sorted((s for s in card.series if s.panel == name), key=lambda s: -math.inf if s.value is None else s.value)
    items: list[Item] = []
    names: list[str] = []
    by_axis: dict[str, list[int]] = {}
    parts: list[polars.DataFrame] = []
    lengths: dict[str, int] = {}
    models = list(dict.fromkeys(s.model for s in series))
    of_models = verdicts.filter(polars.col("model").is_in(models))
    shortest = _shortest(of_models, name, where)
    for one in series:
        mine = of_models.filter((polars.col("model") == one.model) & (polars.col("arm") == one.arm))
        overall = mine.filter(polars.col("seed").is_null())
        if overall.height != 1:
            raise FarstateError(
                f"{where / 'verdicts.parquet'}: {overall.height} verdicts over all seeds on {one.model}, {one.arm}, which the page "
                "shows as one; run the comparison again"
            )
        row = overall.row(0, named=True)
        style = _style_name(family, one)
        own = curves.filter((polars.col("model") == one.model) & (polars.col("arm") == one.arm))
        by_axis.setdefault(one.axis, []).append(len(items))
        names.append(style)
        lengths[style] = row["train_length"]
        parts.append(own.with_columns(polars.lit(style).alias("arm")))
        items.append(
            Item(
                label=one.label,
                value=float(one.value) if one.value is not None else math.nan,
                arm=one.arm,
                of=one.of or one.arm,
                row=row,
                seeds=mine.filter(polars.col("seed").is_not_null()).sort("seed").to_dicts(),
                short=_short(own, shortest),
                onset=_onset(own, row),
                tokens=_tokens(card, one),
            )
        )
    varied = {one.arm for one in series}
    rest = of_models.filter(~polars.col("arm").is_in(varied) & polars.col("seed").is_null())
    order = {style.name: number for number, style in enumerate(arm_styles(rest["arm"].unique()))}
    references = sorted(rest.to_dicts(), key=lambda row: order[row["arm"]])
    if family not in ("sigmas", "cost"):
        references = []
    for row in references:
        parts.append(curves.filter((polars.col("model") == row["model"]) & (polars.col("arm") == row["arm"])))
        lengths[row["arm"]] = row["train_length"]
    return Group(
        name=name,
        title=_title_of(card, name, series[0].model),
        items=items,
        styles=names,
        by_axis=by_axis,
        references=references,
        curves=polars.concat(parts),
        train_lengths=lengths if len(set(lengths.values())) > 1 else {},
    )


def _shortest(verdicts: polars.DataFrame, name: str, where: Path) -> int:
    if verdicts.is_empty():
        raise FarstateError(
            f"{where / 'verdicts.parquet'}: holds no model of '{name}', which the page shows; run the comparison again"
        )
    return int(min(verdicts["train_length"].to_list()))


def _title_of(card: Context, name: str, model: str) -> str:
    size = card.sizes.get(model)
    return f"{name} ({text.magnitude(size['parameters']).replace(' ', '')})" if size else name


def _short(own: polars.DataFrame, shortest: int) -> Row:
    """The loss in the last bin inside the shortest training length of the panel: one position for all its curves."""
    inside = own.filter((polars.col("metric") == "ppl") & polars.col("seed").is_null() & (polars.col("position") <= shortest))
    if inside.is_empty():
        return {}
    record = inside.sort("position").row(-1, named=True)
    numbers = {end: record[name] for end, name in (("", "value"), ("_low", "low"), ("_high", "high"))}
    return {"position": record["position"]} | {
        f"short_loss{end}": math.log(value) if text.finite(value) else None for end, value in numbers.items()
    }


def _onset(own: polars.DataFrame, row: Row) -> int | None:
    """The first position beyond the training length where the interval of the excess lies above the tolerance."""
    beyond = own.filter(
        (polars.col("metric") == "excess_nll")
        & polars.col("seed").is_null()
        & (polars.col("position") > row["train_length"])
        & polars.col("low").is_finite()
        & (polars.col("low") > row["tolerance"])
    )
    return None if beyond.is_empty() else int(min(beyond["position"].to_list()))


def _tokens(card: Context, series: Series) -> Row:
    """Training tokens, and what multiple of the Chinchilla budget they are."""
    model, size = card.models.get(series.model), card.sizes.get(series.model)
    tokens = model.training_tokens if model is not None else None
    if series.axis == "training tokens" and series.value is not None:
        tokens = round(series.value)
    found: Row = {"tokens": tokens}
    if tokens is not None and size is not None:
        for name, key in (("chinchilla", "parameters"), ("chinchilla_bare", "parameters_without_embeddings")):
            found[name] = tokens / (CHINCHILLA * size[key])
    return found


# Rows of the charts ----------------------------------------------------------------------------------------


def _panel(group: Group, metric: Metric, styles: Sequence[ArmStyle], length: int) -> Panel:
    rows: list[Row] = []
    for style in styles:
        rows += arm_rows(group.curves.filter((polars.col("arm") == style.name) & (polars.col("metric") == metric.name)), style)
    return Panel(
        model=group.name,
        title=group.title,
        metric=metric,
        train_length=min(item.row["train_length"] for item in group.items),
        length=length,
        rows=rows,
        train_lengths=group.train_lengths,
    )


def _number(item: Item, name: str) -> tuple[float | None, float | None, float | None]:
    source = item.short if name == "short_loss" else item.row
    if text.finite(item.row.get("broken_at")):
        return None, None, None
    value, low, high = (source.get(f"{name}{end}") for end in ("", "_low", "_high"))
    if not text.finite(value):
        return None, None, None
    return rounded(float(value)), *(rounded(float(end)) if text.finite(end) else None for end in (low, high))  # type: ignore[arg-type, return-value]


def _axis(family: str, axis: str) -> tuple[str, str]:
    """The title of the horizontal axis and the format of its ticks."""
    if family == "snapshots":
        return "tokens, multiples of Chinchilla", ".2~g"
    return axis, {"training context, tokens": ",d", "warm-up, share of the steps": "~%", "post-training steps": ",d"}.get(
        axis, "~g"
    )


def _x(family: str, item: Item) -> float:
    if family == "snapshots" and text.finite(item.tokens.get("chinchilla")):
        return rounded(float(item.tokens["chinchilla"]))
    return item.value


def _summaries(family: str, group: Group, kind: Kind, styles: Sequence[ArmStyle]) -> list[tuple[str, Quantity, Summary]]:
    """One chart for each quantity and each thing that is varied."""
    found = []
    for axis, places in group.by_axis.items():
        title, ticks = _axis(family, axis)
        for quantity in kind.quantities:
            summary = _summary(family, group, places, quantity, title, ticks, styles)
            if any(row["kind"] == "point" for row in summary.rows):
                found.append((axis, quantity, summary))
    return found


def _summary(
    family: str, group: Group, places: Sequence[int], quantity: Quantity, axis: str, ticks: str, styles: Sequence[ArmStyle]
) -> Summary:
    labels = {style.name: style.label for style in styles}
    rows: list[Row] = []
    for place in places:
        item, style = group.items[place], group.styles[place]
        value, low, high = _number(item, quantity.name)
        if value is None:
            continue
        common = {"arm": style, "label": labels[style], "x": _x(family, item), "words": item.label}
        seeds = item.row["n_seeds"]
        note = f"mean over {seeds} seeds" if seeds > 1 else "one training"
        if quantity is _COST_CONTROL:
            note = f"against {item.row['control']}, the same steps from the zero state"
        rows.append(
            {
                **common,
                "kind": "point",
                "value": value,
                "low": low,
                "high": high,
                "interval": item.row["interval"] or "none",
                "note": note,
            }
        )
        for seed in item.seeds if len(item.seeds) > 1 and quantity is not _SHORT else ():
            if text.finite(seed[quantity.name]):
                single = {"kind": "seed", "value": rounded(seed[quantity.name]), "low": None, "high": None, "interval": "–"}
                rows.append({**common, **single, "note": f"seed {seed['seed']}"})
    tolerance = FREE if quantity in (_COST, _COST_CONTROL) else group.items[0].row["tolerance"]
    if family == "sigmas":
        for row in group.references:
            if text.finite(row[quantity.name]) and not (quantity.name == "short_context_cost" and row["arm"] == BASE):
                line = {"kind": "reference", "arm": row["arm"], "label": labels[row["arm"]], "x": None, "words": "–"}
                rows.append(
                    {**line, "value": rounded(row[quantity.name]), "low": None, "high": None, "interval": "–", "note": "–"}
                )
    values = sorted({_x(family, group.items[place]) for place in places})
    return Summary(
        title=quantity.title,
        axis=axis,
        unit=quantity.unit,
        joined=family == "cost",
        tolerance=tolerance if quantity.tolerance else None,
        zero=quantity.tolerance,
        ticks=values,
        logarithmic=summary_charts.is_logarithmic(values),
        format=ticks,
        rows=rows,
    )


def _scatter_rows(group: Group, styles: Sequence[ArmStyle]) -> list[Row]:
    """Every setting once: its cost inside the training length and its far excess."""
    labels = {style.name: style.label for style in styles}
    rows = []
    for item in _settings(group, styles, controls=True):
        row, style = item.row, item.of
        cost, excess = _number(item, "short_context_cost"), _number(item, "excess_nll")
        if cost[0] is None or excess[0] is None:
            continue
        rows.append(
            {
                **{"arm": style, "label": labels[style], "words": item.label},
                **{
                    "x": cost[0],
                    "x_low": cost[1],
                    "x_high": cost[2],
                    "x_between": text.between(row, "short_context_cost") or "none",
                },
                **{
                    "y": excess[0],
                    "y_low": excess[1],
                    "y_high": excess[2],
                    "y_between": text.between(row, "excess_nll") or "none",
                },
                "note": row["interval"] or "no interval",
            }
        )
    return rows


def _settings(group: Group, styles: Sequence[ArmStyle], *, controls: bool) -> list[Item]:
    """Every post-training of the panel once, under a label that says what is varied in it."""
    labels = {style.name: style.label for style in styles}
    found: dict[str, Item] = {}
    for axis, places in group.by_axis.items():
        for place in places:
            item = group.items[place]
            if item.arm in found:
                continue
            words = (
                labels[item.of] if item.arm == item.of else f"{labels[item.of]}, {_SETTING.get(axis, '{}').format(item.label)}"
            )
            found[item.arm] = Item(**{**vars(item), "label": words})
    for row in group.references:
        if row["arm"] not in found and row["arm"] != BASE:
            found[row["arm"]] = Item(label=labels[row["arm"]], value=math.nan, arm=row["arm"], of=row["arm"], row=row)
    order = {style.name: number for number, style in enumerate(styles)}
    kept = [item for item in found.values() if controls or item.of != CONTROL]
    return sorted(kept, key=lambda item: (order[item.of], item.arm != item.of))


def _drawn(kind: Kind, groups: Sequence[Group], styles: Sequence[ArmStyle]) -> polars.DataFrame:
    """What is drawn, tidy: curves by position, and the numbers against what is varied at no position."""
    metrics = [metric.name for metric in kind.metrics]
    parts: list[polars.DataFrame] = []
    for group in groups:
        curves = group.curves.filter(polars.col("metric").is_in(metrics)).rename({"arm": "series"})
        parts.append(
            curves.select(
                polars.lit(group.name).alias("panel"),
                "series",
                "seed",
                "train_length",
                "metric",
                polars.lit(None, dtype=polars.String).alias("axis"),
                polars.lit(None, dtype=polars.Float64).alias("varied"),
                "position",
                *("value", "low", "high", "n_documents"),
            )
        )
        rows = []
        for axis, places in group.by_axis.items():
            for place in places:
                item = group.items[place]
                for quantity in kind.quantities:
                    value, low, high = _number(item, quantity.name)
                    rows.append(
                        {
                            **{
                                "panel": group.name,
                                "series": group.styles[place],
                                "seed": None,
                                "train_length": item.row["train_length"],
                            },
                            **{"metric": quantity.name, "axis": axis, "varied": item.value, "position": None},
                            **{"value": value, "low": low, "high": high, "n_documents": item.row["n_documents"]},
                        }
                    )
        parts.append(polars.DataFrame(rows, schema=parts[0].schema))
    return polars.concat(parts)


# Words -----------------------------------------------------------------------------------------------------


def _findings(family: str, group: Group, styles: Sequence[ArmStyle], differences: polars.DataFrame) -> tuple[str, list[Finding]]:
    references = {row["arm"]: row for row in group.references}
    if family == "contexts":
        return family_text.contexts(group.title, group.items)
    if family == "snapshots":
        return family_text.snapshots(group.title, group.items)
    if family == "warmups":
        return family_text.warmups(group.title, group.items, _difference(differences, group.items[0], group.items[-1]))
    if family == "sigmas":
        return family_text.sigmas(group.title, group.items, references.get(BASE), references.get(CONTROL))
    return family_text.cost(group.title, _settings(group, styles, controls=False), references.get(BASE), FREE)


def _claims(about: About, card: Context, groups: Sequence[Group], differences: polars.DataFrame) -> list[agreement.Claim]:
    """What the panels of the paper's architectures say to its figure."""
    known = {group.name: card.models.get(group.items[0].row["model"]) for group in groups}
    of_paper = [
        group for group in groups if (model := known[group.name]) is not None and model.architecture in about.architectures
    ]
    found: list[agreement.Claim] = []
    for group in of_paper or groups:
        if about.family == "contexts":
            found += agreement.of_contexts(group.title, group.items)
        elif about.family == "snapshots":
            found += agreement.of_snapshots(group.title, group.items)
        elif about.family == "warmups":
            found += agreement.of_warmups(group.title, _difference(differences, group.items[0], group.items[-1]).get(None))
        else:
            found += agreement.of_sigmas(group.title, group.items)
    return found


def _difference(table: polars.DataFrame, first: Item, last: Item) -> Mapping[int | None, text.Row]:
    """By seed (None: the mean) the far excess of the last minus that of the first, `difference` with its intervals."""
    found: dict[int | None, text.Row] = {}
    far = table.filter(
        (polars.col("quantity") == "excess_nll") & (polars.col("arm") == BASE) & (polars.col("against_arm") == BASE)
    )
    for row in far.iter_rows(named=True):
        for one, other, sign in ((last, first, 1), (first, last, -1)):
            if (row["model"], row["against_model"]) == (one.row["model"], other.row["model"]) and text.finite(row["value"]):
                numbers: dict[str, Any] = {"difference": sign * row["value"], "n_seeds": row["n_seeds"]}
                for name, low, high in (("difference", "low", "high"), ("difference_seeds", "seeds_low", "seeds_high")):
                    ends = [sign * row[end] if text.finite(row[end]) else None for end in (low, high)]
                    numbers[f"{name}_low"], numbers[f"{name}_high"] = ends if sign == 1 else ends[::-1]
                found[row["seed"]] = numbers
    return found


def _verdict_rows(family: str, group: Group, kind: Kind, styles: Sequence[ArmStyle]) -> list[Row]:
    """A line of the table for each run: its verdict with what the columns need beside it."""
    shown = {style.name: style for style in styles}
    rows = []
    if family == "cost":
        for item in _settings(group, styles, controls=True):
            rows.append(_line(item, shown.get(item.of), item.label))
    else:
        for item, style in zip(group.items, group.styles, strict=True):
            rows.append(_line(item, shown[style], item.label))
    for row in group.references:
        if family != "cost" or row["arm"] == BASE:
            own = group.curves.filter(polars.col("arm") == row["arm"])
            item = Item(
                label=shown[row["arm"]].label, value=math.nan, arm=row["arm"], of=row["arm"], row=row, onset=_onset(own, row)
            )
            rows.insert(0 if row["arm"] == BASE else 1, _line(item, shown[row["arm"]], item.label))
    return rows


def _line(item: Item, style: ArmStyle | None, label: str) -> Row:
    row = item.row
    read = row["far_to"] if text.finite(row["far_to"]) else None
    return {
        **row,
        **item.short,
        **{name: item.tokens.get(name) for name in ("chinchilla", "chinchilla_bare")},
        "trained": item.tokens.get("tokens"),
        **{"label": label, "style": style, "onset": item.onset, "n_tokens": row["n_stretches"] * read if read else None},
    }


# Page ------------------------------------------------------------------------------------------------------


def _sheet(
    about: About,
    card: Context,
    kind: Kind,
    groups: Sequence[Group],
    panels: Sequence[Panel],
    styles: Sequence[ArmStyle],
    summaries: Mapping[str, Sequence[tuple[str, Quantity, Summary]]],
    scatters: Mapping[str, Sequence[Row]],
    verdicts: polars.DataFrame,
) -> Spec:
    subtitle = [f"{text.listing([group.title for group in groups])}. {card.budget}".strip()]
    intervals = sorted(set(verdicts.filter(polars.col("seed").is_null())["interval"].drop_nulls()))
    if intervals:
        subtitle.append(f"{'Bands and bars' if kind.metrics else 'Bars'}: {'; '.join(intervals)}.")
    marked = f"far excess within {groups[0].items[0].row['tolerance']:g} nats" + (
        f", cost below {FREE:g}" if _COST in kind.quantities else ""
    )
    subtitle.append(f"Dotted lines: {marked}.")
    lone = len(groups) == 1
    if kind.metrics:
        further = {
            group.name: [
                summary_charts.static_summary(
                    summary,
                    styles,
                    quantity.title if lone else f"{group.title}: {quantity.title[:1].lower()}{quantity.title[1:]}",
                )
                for _, quantity, summary in summaries[group.name]
            ]
            for group in groups
        }
        return charts.sheet(panels, styles, card.titled(about.title), subtitle, further)
    shared = {"scale": dict.fromkeys(("color", "strokeDash", "shape"), "shared")}
    rows: list[Spec] = []
    for group in groups:
        heading = "Price and repair of every setting" if lone else f"{group.title}: price and repair"
        x, y = _COST.unit, _FAR.unit
        rows.append(
            summary_charts.static_scatter(scatters[group.name], styles, group.items[0].row["tolerance"], FREE, x, y, heading)
        )
        for axis in group.by_axis:
            row = [
                summary_charts.static_summary(summary, styles, quantity.title)
                for own, quantity, summary in summaries[group.name]
                if own == axis
            ]
            if row:
                rows.append({"hconcat": row, "spacing": 28, "resolve": shared})
    return charts.stacked(rows, card.titled(about.title), subtitle)


def _page(
    about: About,
    card: Context,
    kind: Kind,
    groups: Sequence[Group],
    panels: Sequence[Panel],
    styles: Sequence[ArmStyle],
    summaries: Mapping[str, Sequence[tuple[str, Quantity, Summary]]],
    scatters: Mapping[str, Sequence[Row]],
    drawn: polars.DataFrame,
    differences: polars.DataFrame,
    output: Mapping[str, Path],
    keys: Mapping[str, Any],
) -> str:
    ranges = charts.extents(panels)
    names = {style.name: style.label for style in styles}
    drawings: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        mine = {panel.metric.name: panel for panel in panels if panel.model == group.name}
        figures: list[dict[str, Any]] = []
        names_of_models = {item.row["model"] for item in group.items}
        only = names_of_models.pop() if len(names_of_models) == 1 else ""  # where the trainings are varied, each is a model
        for metric in kind.metrics:
            panel = mine[metric.name]
            spec = charts.screen_panel(panel, styles, charts.joined(ranges.get(metric.name, {}), "near"))
            rows = charts.columns(panel.rows, CURVE_FIELDS)
            figures.append(
                {
                    **add_drawing(drawings, f"{metric.name}-{number}", metric.name, only, spec, rows),
                    **{"title": metric.title, "text": described(panel, names), "broken": broken(panel)},
                }
            )
        small: list[dict[str, Any]] = []
        for place, (axis, quantity, summary) in enumerate(summaries[group.name]):
            name = f"summary-{number}-{place}"
            drawings.append(_chart(name, only, summary_charts.screen_summary(summary, styles), summary.rows))
            small.append(
                {
                    **{"id": name, "axis": axis, "broken": []},
                    "title": quantity.heading(summary),
                    "text": _described(summary, group.title),
                }
            )
        scatter = None
        if scatters:
            name = f"prices-{number}"
            prices = scatters[group.name]
            spec = summary_charts.screen_scatter(
                styles,
                group.items[0].row["tolerance"],
                FREE,
                "short-context cost against base, nats",
                "far excess (own windows), nats",
            )
            drawings.append(_chart(name, only, spec, prices))
            scatter = {
                **{"id": name, "broken": []},
                "title": "Every setting: what it leaves far out, and what it costs",
                "text": f"Far excess against short-context cost, {group.title}. All values are in the table below.",
            }
        headline, found = _findings(about.family, group, styles, differences)
        model = card.models.get(group.items[0].row["model"])
        sections.append(
            {
                **{"name": only, "title": group.title, "model": model, "size": card.sizes.get(group.items[0].row["model"])},
                **{"headline": headline, "findings": found, "figures": figures, "small": small, "scatter": scatter},
                "axes": list(group.by_axis),
                "rows": _verdict_rows(about.family, group, kind, styles),
                "meaning": _meaning(group),
                "tables": [data_table(mine[metric.name], styles) for metric in kind.metrics],
                "items": group.items,
                "lengths": sorted({item.row["train_length"] for item in group.items}),
            }
        )
    every = [row for group in groups for row in [*(item.row for item in group.items), *group.references]]
    leads = [section["headline"] for section in sections]
    judgement = (
        agreement.ours(leads)
        if about.family == "cost"
        else agreement.judge(_claims(about, card, groups, differences), scale=card.scale)
    )
    return page.render(
        "families.html.j2",
        record=agreement.record(
            about,
            card,
            keys,
            judgement,
            leads,
            verdicts=every,
            said=[(section["title"], section["findings"]) for section in sections],
        ),
        title=card.titled(about.title),
        about=about,
        kind=kind,
        family=about.family,
        card=card,
        keys=json.dumps(dict(keys), sort_keys=True, ensure_ascii=False),
        sections=sections,
        certainty=_certainty(about.family, every),
        comparisons=text.comparisons(every),
        legend=styles,
        drawings=page.group(output, drawings, ranges, list(names)),
        siblings={name: output[name].name for name in OUTPUTS if name != "html"},
        rows=drawn.height,
        free=FREE,
    )


def _chart(name: str, model: str, spec: Spec, rows: Sequence[Row]) -> dict[str, Any]:
    varying = [key for key in rows[0] if key not in ("arm", "label")] if rows else ["x"]
    return {"id": name, "metric": "", "model": model, "near": 1, "spec": spec, "curves": charts.columns(rows, varying)}


def _described(summary: Summary, title: str) -> str:
    ends = [f"{row['words']}: {text.nats(row['value'])}" for row in summary.rows if row["kind"] == "point"]
    return f"{summary.title} against {summary.axis}, {title}. {'. '.join(ends)}. All values are in the table below."


def _meaning(group: Group) -> str:
    rows = [item.row for item in group.items]
    gaps = text.listing(sorted({row["verdict_interval"] for row in rows if row["verdict_interval"]}))
    others = text.listing(sorted({row["interval"] for row in rows if row["interval"]}))
    tolerance = ", ".join(f"{value:g}" for value in sorted({row["tolerance"] for row in rows}))
    return (
        f"Tolerance {tolerance} nats. Second lines are intervals. Gap: simultaneous over positions, {gaps or 'none'}. "
        f"All others: {others or 'none'}. Over seeds, from three seeds on: Student's t interval."
    )


def _certainty(family: str, rows: Sequence[text.Row]) -> str:
    labels = sorted({str(row["interval"]) for row in rows if row["interval"]})
    words = f"Numbers in brackets are intervals: {'; '.join(labels)}." if labels else "The tables carry no intervals."
    seeds = sorted({row["n_seeds"] for row in rows if row["arm"] != BASE or family == "warmups"})
    training = "pre-training" if family == "warmups" else "post-training"
    if family in ("contexts", "snapshots"):
        return f"{words} One training each: how much another one would differ is in none of them."
    if not seeds:
        return words
    if seeds[-1] == 1:
        return f"{words} One {training} seed: how much another training would differ is in none of them."
    number = text.count(seeds[0]) if seeds[0] == seeds[-1] else f"{text.count(seeds[0])} to {text.count(seeds[-1])}"
    return f"{words} Values are means over {number} {training} seeds, single ones are drawn thin; the spread over them is in the brackets only where it says so."
