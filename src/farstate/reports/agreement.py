"""Each page against the paper: what its figure showed, whether ours shows the same, and the numbers that say so.

A rule of a figure turns verdicts, intervals and differences that the evaluation computed into claims of the paper that hold, do not
hold or are open here; `judge` makes one sentence of them. A claim holds or fails only where an interval says so. Where a
model is mapped to one of the paper's, at the paper's scale, the digitised values are held against ours too (`compared`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farstate.reports import family_text, remembrance_text, state_text, task_text, text
from farstate.reports.context import Context
from farstate.reports.family_text import BEYOND, BROKEN, WITHIN, Item
from farstate.reports.figures import About
from farstate.reports.tables import rounded
from farstate.reports.text import Finding, Row, direction, finite, listing, nats, share
from farstate.runs import BASE, CONTROL

AGREES, DEVIATES, UNDECIDED, NOT_COMPARABLE, OURS = "agrees", "deviates", "undecided", "not comparable", "ours"
BETWEEN_FIGURES = 0.24
"""PPL by which base curves of one checkpoint differ between the authors' own figures: no comparison is finer than that."""
MOST = 0.5
"""A repair takes most of a failure away when the whole interval of the share removed lies above this."""
_NEAR = 1.25
"""A measured position stands for the paper's when their ratio is at most this."""
_SIZE = re.compile(r" \([\d.,]+[KMB]?\)")
PASSING, NOISE, FITTED = "state_passing", "random_noise", "fitted_noise"

PHRASES: dict[str, tuple[str, str, str]] = {
    "fails": (
        "the base model fails beyond its training length",
        "the base model does not fail beyond its training length",
        "whether the base model fails beyond its training length",
    ),
    "passing": (
        "state passing takes most of the failure away",
        "state passing does not take most of the failure away",
        "whether state passing takes most of the failure away",
    ),
    "order": (
        "state passing takes away more of it than random noise",
        "random noise takes away more of it than state passing",
        "whether state passing takes away more of it than random noise",
    ),
    "context": (
        "the shortest training context leaves more far excess than the longest",
        "the longest training context leaves more far excess than the shortest",
        "which training context leaves more far excess",
    ),
    "more": (
        "more training on the short context makes it worse",
        "more training on the short context makes it better",
        "whether more training on the short context makes it worse",
    ),
    "warmup": (
        "the longer warm-up is worse beyond the training length",
        "the longer warm-up is better beyond the training length",
        "whether the longer warm-up is worse beyond the training length",
    ),
    "narrow": (
        "the smallest σ leaves the failure",
        "the smallest σ repairs it",
        "whether the smallest σ repairs it",
    ),
    "wide": (
        "the largest σ costs more inside the training length than the smallest",
        "the largest σ costs less inside the training length than the smallest",
        "whether the largest σ costs more inside the training length",
    ),
    "drift": (
        "the base model's state widens beyond its training length",
        "the base model's state does not widen beyond its training length",
        "whether the base model's state widens beyond its training length",
    ),
    "above": (
        "the state after state passing lies above the base model's at some positions",
        "the state after state passing lies above the base model's nowhere",
        "whether the state after state passing lies above the base model's",
    ),
    "few": (
        "fewer than half of the heads drift",
        "at least half of the heads drift",
        "how many heads drift",
    ),
    "far memory": (
        "state passing lowers what far text still changes",
        "state passing raises what far text still changes",
        "whether state passing lowers what far text still changes",
    ),
    "facts": (
        "state passing answers more of the longest texts than the base model",
        "state passing answers fewer of the longest texts than the base model",
        "whether state passing answers more of the longest texts",
    ),
    "key": (
        "fitted noise finds the key beyond the training length more often than plain training",
        "fitted noise finds the key beyond the training length less often than plain training",
        "whether fitted noise finds the key beyond the training length more often",
    ),
    "letters": (
        "state passing copies more of the longest strings than plain training",
        "state passing copies less of the longest strings than plain training",
        "whether state passing copies more of the longest strings",
    ),
}
"""By topic what is said where the paper's claim holds here, where it does not, and where it is open."""


@dataclass(frozen=True)
class Claim:
    """One of the paper's findings about one of our models.

    Attributes:
        topic: key of `PHRASES`.
        holds: None where our numbers do not decide it.
        who: the model, for readers.
        numbers: what decides it.
    """

    topic: str
    holds: bool | None
    who: str
    numbers: str


@dataclass(frozen=True)
class Compared:
    """A digitised value of the paper beside ours at the same place; `inside`: our interval meets the paper's tolerance."""

    what: str
    ours: float
    low: float | None
    high: float | None
    paper: float
    tolerance: float
    inside: bool


@dataclass(frozen=True)
class Judgement:
    """Agreement (one of the five words of this module) and the sentence that says why."""

    agreement: str
    sentence: str


def judge(claims: Sequence[Claim], compared: Sequence[Compared] = (), scale: str = "demo") -> Judgement:
    """One sentence and one word about all claims of a figure.

    Deviates: a claim fails, or a digitised value is missed. Agrees: every claim holds (of several models too), every value is met.
    Undecided: a claim is open, none fails.
    """
    if scale == "test":
        return Judgement(NOT_COMPARABLE, "A test of the program with tiny sizes: it is held against nothing.")
    if not claims and not compared:
        return Judgement(NOT_COMPARABLE, "Nothing that the paper's figure says can be asked of these models and arms.")
    said = []
    for holds, lead in ((True, "as in the paper, "), (False, "unlike in the paper, "), (None, "not decided here: ")):
        parts = []
        for topic in dict.fromkeys(claim.topic for claim in claims):
            mine = [claim for claim in claims if (claim.topic, claim.holds) == (topic, holds)]
            if mine:
                # Sizes stand beside every chart; a sentence about several models has no room for them.
                numbers = "; ".join(f"{_SIZE.sub('', claim.who)}: {claim.numbers}" for claim in mine)
                parts.append(f"{PHRASES[topic][{True: 0, False: 1, None: 2}[holds]]} ({numbers})")
        if parts:
            said.append(lead + listing(parts))
    missed = [one for one in compared if not one.inside]
    if compared:
        met = f"{len(compared) - len(missed)} of {len(compared)} digitised values are met within their tolerance"
        if missed:
            worst = max(missed, key=lambda one: abs(one.ours - one.paper) / max(one.tolerance, 1e-9))
            met += f", farthest off {worst.what}: {worst.ours:.4g} against {worst.paper:.4g} ± {worst.tolerance:.2g}"
        said.append(met)
    agreement = (
        DEVIATES
        if missed or any(claim.holds is False for claim in claims)
        else UNDECIDED
        if any(claim.holds is None for claim in claims)
        else AGREES
    )
    sentence = "; ".join(said)
    return Judgement(agreement, f"{sentence[:1].upper()}{sentence[1:]}.")


def ours(leads: Sequence[str]) -> Judgement:
    """Of a page that the paper has no figure for: what it says first."""
    return Judgement(OURS, " ".join(leads) or "Nothing was measured.")


def compare(what: str, rows: Iterable[Row], axis: str, least_tolerance: float = 0.0, ours: str = "mean") -> list[Compared]:
    """The paper's values in the rows of a chart, each beside ours of the same arm at the nearest place.

    Args:
        what: the quantity and the model, for readers.
        rows: of one chart: `kind` ("paper" or that of ours), `arm`, `label`, `value`, `low`, `high` and the place under `axis`; of the paper's rows
            low and high are the reading tolerance, absent where the value is a lower bound.
        least_tolerance: no comparison is finer than this.
        ours: the kind of row that is the paper's quantity.
    """
    kept = list(rows)
    found = []
    for point in (row for row in kept if row["kind"] == "paper"):
        mine = [row for row in kept if row["kind"] == ours and row["arm"] == point["arm"] and finite(row["value"])]
        if not mine:
            continue

        def off(row: Row, at: float = point[axis]) -> float:
            return abs(math.log(max(row[axis], 1) / max(at, 1)))

        nearest = min(mine, key=off)
        if off(nearest) > math.log(_NEAR):
            continue
        low = nearest["low"] if finite(nearest["low"]) else None
        high = nearest["high"] if finite(nearest["high"]) else None
        value, bound = point["value"], not finite(point["high"])
        tolerance = max(0.0 if bound else point["high"] - value, least_tolerance)
        above = (nearest["value"] if high is None else high) >= value - tolerance
        below = bound or (nearest["value"] if low is None else low) <= value + tolerance
        place = f"{what}, {point['label']} at {point[axis]:,.0f}" + (" (at least)" if bound else "")
        found.append(Compared(place, nearest["value"], low, high, value, rounded(tolerance), above and below))
    return found


# Rules, one a kind of figure -------------------------------------------------------------------------------


def of_perplexity(label: str, rows: Sequence[Row], *, noise: bool = False) -> list[Claim]:
    """Figures 1, 5 and 10, one model: it fails beyond its training length, and passed states repair that.

    Args:
        rows: its verdicts over all seeds, one an arm.
        noise: whether random noise is expected to repair less (Figure 5).
    """
    by_arm = {row["arm"]: row for row in rows}
    base = by_arm.get(BASE)
    if base is None:
        return []
    fails = True if base["verdict"] == "FAIL" and base["fails_beyond"] is True else False if base["verdict"] == "PASS" else None
    claims = [
        Claim(
            "fails",
            fails,
            label,
            f"far excess {_nats(base, 'excess_nll')}{', UNDECIDED' if base['verdict'] == 'UNDECIDED' else ''}",
        )
    ]
    passing = by_arm.get(PASSING)
    if not fails or passing is None:
        return claims
    numbers = f"{_share(passing)} of it, far excess {nats(base['excess_nll'])} → {nats(passing['excess_nll'])} nats"
    claims.append(Claim("passing", _most(passing), label, numbers))
    random = by_arm.get(NOISE)
    if noise and random is not None:
        apart = family_text.apart(random, passing, "removed_base")
        claims.append(Claim("order", _where(apart), label, f"{_share(passing)} against {_share(random)}"))
    return claims


def of_contexts(label: str, items: Sequence[Item]) -> list[Claim]:
    """Figure 2, one panel: at equal tokens the shortest training context is worse far out than the longest."""
    if len(items) < 2:
        return []
    first, last = items[0], items[-1]
    numbers = f"{first.label} {_nats(first.row, 'excess_nll')}, {last.label} {_nats(last.row, 'excess_nll')}"
    return [Claim("context", _where(_broken_apart(last, first)), label, numbers)]


def of_snapshots(label: str, items: Sequence[Item]) -> list[Claim]:
    """Figure 3, one panel: the last snapshot is worse far out than the first."""
    if len(items) < 2:
        return []
    first, last = items[0], items[-1]
    numbers = (
        f"far excess {_nats(first.row, 'excess_nll')} after the first, {_nats(last.row, 'excess_nll')} after the last snapshot"
    )
    return [Claim("more", _where(_broken_apart(first, last)), label, numbers)]


def of_warmups(label: str, difference: Row | None) -> list[Claim]:
    """Figure 11: the longest warm-up is worse far out than the shortest, over pre-trainings."""
    if difference is None:
        return []
    over = text.between(difference, "difference_seeds")
    numbers = f"{nats(difference['difference'], signed=True)} nats" + (
        f" ({over} over seeds)" if over else ", no interval over seeds"
    )
    return [Claim("warmup", _where(direction(difference, "difference_seeds")), label, numbers)]


def of_sigmas(label: str, items: Sequence[Item]) -> list[Claim]:
    """Figure 12: too little noise leaves the failure, too much costs perplexity."""
    if len(items) < 2:
        return []
    first, last = items[0], items[-1]
    left = {BEYOND: True, BROKEN: True, WITHIN: False}.get(family_text.status(first.row))
    price = family_text.apart(first.row, last.row, "short_context_cost")
    cost = f"{_nats(last.row, 'short_context_cost')} at σ = {last.label.removeprefix('σ = ')}, {_nats(first.row, 'short_context_cost')} at {first.label}"
    return [
        Claim("narrow", left, label, f"far excess {_nats(first.row, 'excess_nll')} at {first.label}"),
        Claim("wide", _where(price), label, cost),
    ]


def of_states(label: str, summary: Mapping[str, Row]) -> list[Claim]:
    """Figure 4: the base's state widens beyond its training length; after state passing it is no smaller."""
    base, passing = summary.get(BASE), summary.get(PASSING)
    claims = []
    if base is not None and finite(base.get("drift")):
        sign = direction(base, "drift")
        holds = {1: True, -1: False}.get(sign) if sign is not None else None
        claims.append(Claim("drift", holds, label, state_text.factors(base)))
    if passing is not None and finite(passing.get("n_bins")) and passing["n_bins"]:
        above, bins = passing["n_above_base"], passing["n_bins"]
        claims.append(Claim("above", above > 0, label, f"in {above} of {bins} bins"))
    return claims


def of_heads(label: str, summary: Mapping[str, Row]) -> list[Claim]:
    """Figure 9: most heads show nothing."""
    base = summary.get(BASE)
    if base is None or not base["n_heads"]:
        return []
    beyond, known = base["n_up"] + base["n_down"], base["n_known"]
    return [Claim("few", 2 * beyond < known if known else None, label, f"{beyond} of {known}")]


def of_remembrance(label: str, arms: Sequence[remembrance_text.Arm], *, all_distances: bool) -> list[Claim]:
    """Figures 1 (below) and 13: state passing lowers far remembrance, by every distance."""
    passing = next((arm for arm in arms if arm.name == PASSING), None)
    against = {name: row for (name, other), row in passing.far.items() if other == BASE} if passing is not None else {}
    names = list(against) if all_distances else ["total_variation"]
    claims = []
    for name in (name for name in names if name in against):
        sign = direction(against[name], "value")
        who = f"{label}, {remembrance_text.NAMES.get(name, name)}" if all_distances else label
        claims.append(
            Claim("far memory", None if not sign else sign < 0, who, remembrance_text.estimate(against[name], signed=True))
        )
    return claims


def of_facts(case: task_text.Case, way: str) -> list[Claim]:
    """Figure 6, one way of asking: state passing answers more far out than the base."""
    return _of_arm("facts", case, PASSING, BASE, "strict", f"{case.label}, {task_text.PROMPTINGS[way]}")


def of_letters(case: task_text.Case) -> list[Claim]:
    """Table 1: state passing copies more of strings longer than any in training."""
    return _of_arm("letters", case, PASSING, CONTROL, "characters", case.label)


def of_keys(case: task_text.Case) -> list[Claim]:
    """Figure 7: fitted noise finds the key in more of the cells beyond the training length than plain training."""
    beyond = case.beyond("exact")
    found = task_text.tally(case, FITTED, CONTROL, "exact", beyond)
    if not found.read:
        return []
    holds = None if found.above == found.below else found.above > found.below
    numbers = f"above it in {found.above}, below it in {found.below} of {found.read} cells"
    return [Claim("key", holds, case.label, numbers)]


def _of_arm(topic: str, case: task_text.Case, arm: str, other: str, score: str, who: str) -> list[Claim]:
    """The difference of two arms at the greatest length."""
    beyond = case.beyond(score)
    row = case.at(arm, score, beyond[-1], other) if beyond else None
    if row is None:
        return []
    return [Claim(topic, _where(task_text.sign(row)), who, f"{task_text.difference(row)} at {beyond[-1][0]:,}{_over_seeds(row)}")]


def _over_seeds(row: Row) -> str:
    low, high = row.get("value_seeds_low"), row.get("value_seeds_high")
    return f", {task_text.signed(low)} to {task_text.signed(high)} over seeds" if finite(low) and finite(high) else ""


def _where(sign: int | None) -> bool | None:
    return None if not sign else sign > 0


def _broken_apart(one: Item, other: Item) -> int | None:
    """`family_text.apart` of the far excess; what is not a number any more is the worst there is."""
    broken = [family_text.status(item.row) == BROKEN for item in (one, other)]
    if any(broken):
        return 0 if all(broken) else 1 if broken[1] else -1
    return family_text.apart(one.row, other.row, "excess_nll")


def _most(row: Row) -> bool | None:
    low, high = row.get("removed_base_low"), row.get("removed_base_high")
    if finite(row.get("broken_at")):
        return False
    if low is None or high is None or not (finite(low) and finite(high)):
        return None
    return True if low > MOST else False if high < MOST else None


def _share(row: Row) -> str:
    return text.estimate(row, "removed_base", share)


def _nats(row: Row, name: str) -> str:
    if finite(row.get("broken_at")):
        return "not a number"
    return f"{text.estimate(row, name)} nats"


# The record that a page carries ----------------------------------------------------------------------------


def record(
    about: About,
    card: Context,
    keys: Mapping[str, Any],
    judgement: Judgement,
    leads: Sequence[str],
    *,
    compared: Sequence[Compared] = (),
    verdicts: Sequence[Row] = (),
    said: Iterable[tuple[str, Iterable[Finding]]] = (),
    remark: str = "",
) -> dict[str, Any]:
    """What a page says, for machines and for the page of all results.

    Args:
        leads: a headline a model.
        verdicts: over all seeds, of pages that have them.
        said: by model's label the findings under its headline; those on the control and on the price are taken up.
        remark: what the paper's figure shows, where `about` does not say it.
    """
    found = [(label, finding) for label, several in said for finding in several]

    def on(wanted: Callable[[str], bool]) -> list[str]:
        return [f"{label}: {finding.text}" for label, finding in found if wanted(finding.topic)]

    inputs = keys.get("inputs", {})
    return {
        "figure": str(keys.get("figure", "")),
        "title": about.title,
        "question": about.question,
        "scale": card.scale,
        "agreement": judgement.agreement,
        "sentence": judgement.sentence,
        "compared": [vars(one) for one in compared],
        "remark": remark or about.remark,
        "findings": list(leads),
        "control": on(lambda topic: topic == "The steps alone"),
        "price": on(lambda topic: topic == "Is it free?"),
        "certainty": certainty(verdicts),
        "budget": card.budget,
        "models": list(card.models),
        "keys": [str(directory).rsplit("/", 1)[-1] for role in inputs for directory in inputs[role]],
    }


def certainty(verdicts: Sequence[Row]) -> dict[str, Any]:
    """How sure a page with verdicts is: how many of each, over how many documents and seeds, and what would decide the open ones."""
    if not verdicts:
        return {}
    counts = {name: sum(row["verdict"] == name for row in verdicts) for name in ("PASS", "FAIL", "UNDECIDED")}
    open_ = [
        {"model": row["model"], "arm": row["arm"], "decided_by": text.to_decide(row)}
        for row in verdicts
        if row["verdict"] == "UNDECIDED"
    ]
    return {
        "verdicts": counts,
        "undecided": open_,
        "documents": sorted({int(row["n_documents"]) for row in verdicts if finite(row["n_documents"])}),
        "seeds": sorted({int(row["n_seeds"]) for row in verdicts if finite(row["n_seeds"]) and row["arm"] != BASE}),
    }
