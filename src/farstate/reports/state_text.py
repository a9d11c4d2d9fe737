"""What the numbers say about states, as sentences by rule: a direction is claimed only where its interval excludes zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farstate.reports import text
from farstate.reports.text import Finding, Row
from farstate.runs import BASE, CONTROL

PASSING = "state_passing"
PAPER_WHOLE = (
    "Fig. 4: the standard deviation of a Mamba-2's state grows beyond the training length (2.23 at 8,192 tokens against 1.33 at 2,048), "
    "and the state after state passing lies above it at many positions: the shift counts, not the size."
)
PAPER_HEADS = (
    "Fig. 9 shows six picked heads of a Mamba-2; state passing lies higher in layer 4, head 2 and in layer 6, head 4, and most "
    "heads show nothing. Its values were not digitised."
)


def number(value: Any) -> str:
    """Four significant digits, a true minus sign."""
    if not text.finite(value):
        return text.NONE
    written = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")
    return written.replace("-", "−")


def signed(value: Any) -> str:
    """A drift: `+1.25`, `−0.40`."""
    return f"{value:+.2f}".replace("-", "−") if text.finite(value) else text.NONE


def factor(value: Any) -> str:
    """A drift as a ratio: `3.97`."""
    return f"{2.0**value:.3g}" if text.finite(value) else text.NONE


def factors(row: Row, name: str = "drift") -> str:
    """A drift as a ratio with its interval."""
    between = text.between(row, name, factor)
    return f"× {factor(row.get(name))}" + (f" ({between})" if between else "")


def whole(label: str, summary: Mapping[str, Row], names: Mapping[str, str]) -> tuple[str, list[Finding]]:
    """A headline and findings about the standard deviation of all layers together."""
    base = summary.get(BASE)
    if base is None or base.get("std_near") is None:
        return f"{label}: no standard deviation of the base model's state inside its training length, so no drift.", []
    if base["broken_at"] is not None:
        headline = (
            f"{label}: the base model's state is not finite from position {base['broken_at']['position']:,} on ({_where(base)})."
        )
    elif base["far_from"] is None:
        headline = f"{label}: the measurement ends at the training length, so nothing can be said of a drift beyond it."
    else:
        headline = _headline(label, base)
    findings = []
    if base["far_from"] is not None and text.finite(base.get("drift")):
        findings.append(Finding("Where it begins.", _begins(base)))
        if base["n_known"]:
            findings.append(Finding("Heads.", _of_heads(base)))
    for arm, row in summary.items():
        if arm != BASE:
            findings.append(Finding(f"{_capital(names.get(arm, arm))}.", _arm(row, base)))
    findings += _together(summary)
    return headline, findings


def _headline(label: str, base: Row) -> str:
    direction = text.direction(base, "drift")
    ends = f"between positions {base['near_from']:,} to {base['near_to']:,} and {base['far_from']:,} to {base['far_to']:,}"
    if direction is None:
        return f"{label}: the standard deviation of the base model's state changes {factors(base)} {ends}; without an interval nothing is established."
    if direction == 0:
        return (
            f"{label}: no drift of the base model's state is established: its standard deviation changes {factors(base)} {ends}."
        )
    moves = "widens" if direction > 0 else "narrows"
    return f"{label}: the base model's state drifts. Its standard deviation {moves} {factors(base)} {ends}."


def _begins(base: Row) -> str:
    if base["begins"] is None:
        return "In no bin beyond the training length does it differ from its end by more than the simultaneous band."
    where = "right beyond it" if base["begins"] == base["near_to"] + 1 else f"{base['begins'] / base['near_to']:.2g} × T_train"
    return (
        f"It leaves the value at the end of training in the bin from position {base['begins']:,} on, {where} (simultaneous over all "
        "bins beyond the training length)."
    )


def _of_heads(row: Row) -> str:
    beyond, known = row["n_up"] + row["n_down"], row["n_known"]
    words = f"{beyond} of {known} heads ({text.share(beyond / known)}) drift beyond the simultaneous interval: {row['n_up']} widen, {row['n_down']} narrow."
    if row["n_heads"] > known:
        words += f" {row['n_heads'] - known} have no drift: their state is zero or not finite."
    return words


def _arm(row: Row, base: Row) -> str:
    if row["broken_at"] is not None:
        return f"Not finite from position {row['broken_at']['position']:,} on ({_where(row)})."
    words = ""
    if text.finite(row.get("drift")):
        direction = text.direction(row, "drift")
        what = {1: "still widens", -1: "narrows", 0: "no drift is established", None: "changes, without an interval,"}[direction]
        words = f"It {what} {factors(row)}" if direction != 0 else f"No drift is established: {factors(row)}"
        words += f"; the base {factors(base)}. " if text.finite(base.get("drift")) else ". "
    if text.finite(row.get("n_bins")):
        words += (
            f"Its standard deviation lies above the base's in {row['n_above_base']} of {row['n_bins']} bins "
            f"({row['n_above_base_beyond']} of {row['n_bins'] - row['n_bins_within']} beyond the training length), below in "
            f"{row['n_below_base']} (paired, simultaneous over the bins)."
        )
    return words.strip()


def _together(summary: Mapping[str, Row]) -> list[Finding]:
    """What the repaired model's size says."""
    passing, control = summary.get(PASSING), summary.get(CONTROL)
    found = []
    if passing is not None and text.finite(passing.get("n_bins")) and passing["n_above_base_beyond"] > 0:
        words = (
            "Beyond the training length the state-passing model's standard deviation exceeds the base's: whatever it repairs, it does "
            "not repair it by keeping the state small. The paper's reading: the shift counts, not the size."
        )
        if (
            control is not None
            and text.finite(control.get("n_bins"))
            and control["n_above_base_beyond"] >= passing["n_above_base_beyond"]
        ):
            words += " The control exceeds the base's as often, so further steps by themselves do it too."
        found.append(Finding("Shift, not size.", words))
    return found


def paper_whole(passing: Row) -> str:
    """What the paper's Figure 4 shows, and whether it is so here."""
    here = passing["n_above_base"]
    agrees = "here too" if here > 0 else "not here"
    return (
        "the standard deviation of the state-passing model lies above the base's at many positions (2.1 against 1.0 at t = 100, about "
        f"equal at t = 8,192): {agrees}, in {here} of {passing['n_bins']} bins."
    )


def heads(label: str, summary: Mapping[str, Row], rows: Sequence[Row], names: Mapping[str, str]) -> tuple[str, list[Finding]]:
    """A headline and findings about single heads; `rows`: those of the table of heads over all seeds."""
    base = summary.get(BASE)
    if base is None or not base["n_heads"]:
        return f"{label}: no recurrent state, so no heads.", []
    if base["broken_at"] is not None:
        return (
            f"{label}: the base model's state is not finite from position {base['broken_at']['position']:,} on ({_where(base)}).",
            [],
        )
    if base["far_from"] is None:
        return f"{label}: the measurement ends at the training length, so no head has a drift beyond it.", []
    mine = sorted((row for row in rows if row["arm"] == BASE and row["rank"] is not None), key=lambda row: row["rank"])
    if not base["n_known"]:
        return f"{label}: no interval, so no drift of a head is established.", [_largest(mine)] if mine else []
    beyond = base["n_up"] + base["n_down"]
    headline = f"{label}: in the base model {beyond} of {base['n_known']} heads drift, {base['n_up']} wider and {base['n_down']} narrower"
    findings = [_largest(mine)]
    for arm, row in summary.items():
        if arm != BASE:
            findings.append(Finding(f"{_capital(names.get(arm, arm))}.", _heads_of(row, [r for r in rows if r["arm"] == arm])))
    return headline + " than at the end of training.", findings


def _largest(ranked: Sequence[Row]) -> Finding:
    parts = [f"layer {row['layer']}, head {row['head']} ({_factor_of(row)})" for row in ranked[:3]]
    last = ranked[-1]
    words = f"The base's largest: {text.listing(parts)}. The smallest: layer {last['layer']}, head {last['head']} ({_factor_of(last)})."
    return Finding("By drift.", words)


def _factor_of(row: Row) -> str:
    interval = f", {factor(row['low'])} to {factor(row['high'])}" if text.finite(row["low"]) and text.finite(row["high"]) else ""
    return f"× {factor(row['drift'])}{interval}"


def _heads_of(row: Row, mine: Sequence[Row]) -> str:
    if row["broken_at"] is not None:
        return f"Not finite from position {row['broken_at']['position']:,} on ({_where(row)})."
    words = _of_heads(row) if row["n_known"] else "No interval, so no drift of a head is established."
    compared = [r for r in mine if text.finite(r["against_base_low"]) and text.finite(r["against_base_high"])]
    if compared:
        lower = sum(r["against_base_high"] < 0 for r in compared)
        higher = sum(r["against_base_low"] > 0 for r in compared)
        words += f" Against the base the drift is lower in {lower}, higher in {higher} and not told apart in {len(compared) - lower - higher} (paired, simultaneous)."
    return words


def lines(summary: Mapping[str, Row], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """The table of arms."""
    found = []
    for arm, row in summary.items():
        broken = row["broken_at"]
        found.append(
            {
                "arm": arm,
                "label": names.get(arm, arm),
                "seeds": row["n_seeds"],
                "near": number(row.get("std_near")),
                "far": number(row.get("std_far")),
                "drift": signed(row.get("drift")),
                "drift_between": text.between(row, "drift", signed),
                "begins": "–" if row.get("begins") is None else f"{row['begins']:,}",
                "heads": f"{row['n_up'] + row['n_down']} of {row['n_known']}" if row["n_known"] else "–",
                "up": row["n_up"],
                "down": row["n_down"],
                "above": None if row.get("n_bins") is None else f"{row['n_above_base']} of {row['n_bins']}",
                "below": None if row.get("n_bins") is None else row["n_below_base"],
                "broken": None if broken is None else f"from position {broken['position']:,}, layer {broken['layer']}",
            }
        )
    return found


def certainty(manifest: Mapping[str, Any], arms: Sequence[Row]) -> str:
    """What the intervals are over, and what they leave out. `arms`: rows of `lines`."""
    words = f"Intervals: {manifest['interval']}. Of heads: {manifest['interval_of_heads']}."
    single = [row["label"] for row in arms if row["seeds"] == 1]
    if single:
        words += (
            f" One training each of {text.listing(list(dict.fromkeys(single)))}: nothing is known of the spread over trainings."
        )
    return words


def _where(row: Row) -> str:
    at = row["broken_at"]
    return f"layer {at['layer']}, document {str(at['document'])[:12]}, stretch {at['stretch']}; {at['stretches']} stretches break"


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
