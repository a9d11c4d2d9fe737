"""Sentences of the page of shifts, written from the tables by rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from farstate.reports import text
from farstate.reports.text import Finding

Row = Mapping[str, Any]
Run = Mapping[str, Any]
"""A measured run: `name` (arm), `label`, `seed`, `summary` of its manifest, `swaps` and `association` rows, `explains`, `facts`."""

OWN = "own training"


def number(value: Any) -> str:
    """Three digits, and as many whole ones as there are."""
    if not text.finite(value):
        return text.NONE
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def summary_of(run: Run, measure: str, position: int) -> Row | None:
    """All heads against the states of the run's own training, or None without a number."""
    for row in run["summary"]:
        if (row["reference"], row["measure"], row["position"]) == (OWN, measure, position) and row["known"]:
            found: Row = row
            return found
    return None


def headline(label: str, runs: Sequence[Run], position: int) -> str:
    """Are the states of the base at the largest position new?"""
    base = next((run for run in runs if run["name"] == "base"), runs[0])
    row = summary_of(base, "novelty", position)
    if row is None:
        return f"{label}: nothing can be said of the states at t = {position:,}; the table gives the reason."
    where = f"at t = {position:,}"
    if row["null_high"] is None:
        return (
            f"{label}: {where} the median head of the {_who(base)} lies {number(row['median'])} times as far from training states as those "
            "from each other; there are too few held-out states inside training for a null band."
        )
    many = _counted(row)
    others = ""
    for run in runs:
        other = None if run["name"] == base["name"] else summary_of(run, "novelty", position)
        if other is not None and other["null_high"] is not None and run["name"] not in ("base", "control"):
            others += f" After {run['label']}{_seed(run, runs)}: {_counted(other)} heads, median {number(other['median'])}."
    if row["above"] == 0:
        return (
            f"{label}: the states of the {_who(base)} {where} are not new: in no head are they further from those met in training than "
            f"held-out states inside training are (median head {number(row['median'])}, inside training {number(row['null'])}).{others}"
        )
    return (
        f"{label}: {where} {many} heads of the {_who(base)} are in states that training did not meet: their distance to training states "
        f"lies above the null band, in the median head {number(row['median'])} times that among training states (inside training "
        f"{number(row['null'])}).{others}"
    )


def findings(runs: Sequence[Run], position: int, swap_position: int, comparisons: int) -> list[Finding]:
    """Every arm's states, whether swapping says that they explain the excess, and what associations show."""
    found = []
    for run in runs:
        found.append(Finding(f"{topic(run, runs)}:", _states(run, position)))
    for run in runs:
        found.append(Finding(f"Does it explain the excess of {topic(run, runs)}?", explained(run, swap_position)))
    found.append(Finding("Across documents, within one t:", _associated(runs)))
    found.append(
        Finding(
            "Many comparisons:",
            f"{comparisons} heads and positions are compared with each measure, each with its own interval and band. That an interval lies "
            f"above the null band by chance alone is rarer than 1 in 40; about {max(1, round(comparisons / 40))} of {comparisons} at most "
            "would be expected of states that are not shifted.",
        )
    )
    return found


def explained(run: Run, position: int) -> str:
    """The rule of `farstate.evaluation.swap_effects.explains`, in words with the numbers."""
    swaps = run["swaps"]
    excess = _swap(swaps, "untouched", "none", False)
    if excess is None:
        return f"Not known: {_reason(swaps)}."
    now = f"Its excess after t = {position:,} is {_estimate(excess)} nats"
    verdict = run["explains"]
    if verdict.get("excess") is False:
        words = "is not above zero" if excess["high"] >= 0.0 else "is below zero: long states help"
        return f"There is nothing to explain: {now[0].lower()}{now[1:]}, which {words}."
    top = _swap(swaps, "top", "training state", True) or _swap(swaps, "top", "training state", False)
    if top is None or (verdict.get("together") is None and verdict.get("alone") is None):
        return f"{now}. What swaps change is not known: {_reason(swaps)}."
    jointly = bool(top["together"])
    random = _swap(swaps, "random", "training state", jointly)
    foreign = _swap(swaps, "top", "other document", jointly)
    everything = _swap(swaps, "all", "training state", True)
    heads = f"the {top['heads']} heads that drift most"
    together = " together" if jointly else ", one at a time"
    said = f"{now}. Training states in place of {heads}{together} change it by {_estimate(top)}"
    if random is not None:
        said += f", in place of {random['heads']} heads at random by {_estimate(random)}"
    if foreign is not None:
        said += f"; states of other documents in those heads by {_estimate(foreign)}"
    if everything is not None:
        said += f"; training states in all {everything['heads']} heads by {_estimate(everything)}"
    if verdict.get("together") or verdict.get("alone"):
        return f"Yes, in part: their drift explains some of it. {said}."
    return f"Not shown. {said}: no lowering that goes beyond what random heads and other documents' states bring."


def association_lines(run: Run, order: Sequence[int]) -> list[dict[str, Any]]:
    """A line for each position: how many heads' novelty goes with the excess of the documents, and the rank correlations' range."""
    lines = []
    for position in order:
        rows = [
            row
            for row in run["association"]
            if row["across"] == "documents" and row["reference"] == OWN and row["position"] == position
        ]
        known = sorted(row["value"] for row in rows if text.finite(row["value"]))
        reason = next((row["reason"] for row in rows if row["reason"]), "")
        lines.append(
            {
                "position": f"{position:,}",
                "heads": len(known),
                "significant": sum(text.finite(row["p_holm"]) and row["p_holm"] < 0.05 for row in rows),
                "range": f"{known[0]:+.2f} to {known[-1]:+.2f}" if known else text.NONE,
                "documents": rows[0]["n"] if rows else 0,
                "reason": "" if known else reason,
            }
        )
    return lines


def across_heads(run: Run) -> str:
    """Drift against what a swap changes, over the heads that were swapped."""
    row = next((row for row in run["association"] if row["across"] == "heads"), None)
    if row is None or not text.finite(row["value"]):
        return f"not known: {row['reason'] if row is not None else 'nothing was swapped'}"
    return f"{row['value']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f}), permutation p = {row['p']:.2g}, {row['n']} heads"


def swap_name(row: Row) -> str:
    """What a row of swaps replaced."""
    if row["group"] == "all":
        return f"all {row['heads']} heads"
    which = {"top": "by drift", "random": "at random"}.get(row["group"], row["group"])
    if row["group"] in ("top", "random"):
        return f"{row['heads']} {which}, {'together' if row['together'] else 'singly'}"
    return f"by drift − at random, {'together' if row['together'] else 'singly'}"


def topic(run: Run, runs: Sequence[Run]) -> str:
    """The arm, and its seed where there are several."""
    return f"{run['label']}{_seed(run, runs)}"


def _seed(run: Run, runs: Sequence[Run]) -> str:
    several = sum(other["name"] == run["name"] for other in runs) > 1
    return f", seed {run['seed']}" if several else ""


def _who(run: Run) -> str:
    return "base model" if run["name"] == "base" else str(run["label"])


def _counted(row: Row) -> str:
    return f"{row['above']} of {row['with_band']}" if row["above"] < row["with_band"] else f"all {row['with_band']}"


def _states(run: Run, position: int) -> str:
    parts = []
    words = (
        ("novelty", "novelty", "times the distance among training states"),
        ("sliced_wasserstein", "Wasserstein distance", "training deviations"),
        ("accuracy", "accuracy of telling them from training states", ""),
    )
    for measure, name, unit in words:
        row = summary_of(run, measure, position)
        if row is None:
            continue
        value = f"{row['median']:.2f}" if measure == "accuracy" else number(row["median"])
        inside = ""
        if row["null_high"] is not None:
            inside = f", inside training {number(row['null_low'])} to {number(row['null_high'])}; {_counted(row)} heads lie above"
        parts.append(f"{name} {value}{' ' + unit if unit else ''} in the median head{inside}")
    if not parts:
        reason = next((row["reason"] for row in run["shift"] if row["reason"]), "no number")
        return f"no number at t = {position:,}: {reason}."
    said = (
        f"at t = {position:,}, "
        + ". ".join(part if number == 0 else part[0].upper() + part[1:] for number, part in enumerate(parts))
        + "."
    )
    if broken := run["broken"]:
        said += f" Losses are not finite from position {min(int(key) for key in broken)} on."
    return said[0].upper() + said[1:]


def _associated(runs: Sequence[Run]) -> str:
    said: list[str] = []
    for run in runs:
        lines = [
            line for line in association_lines(run, sorted({row["position"] for row in run["association"]})) if line["heads"]
        ]
        if lines:
            hits = [
                f"{line['significant']} of {line['heads']} heads at t = {line['position']}"
                for line in lines
                if line["significant"]
            ]
            said.append(f"{topic(run, runs)}: {text.listing(hits) if hits else f'no head at any of {len(lines)} positions'}")
    if not said:
        return "no rank correlation could be computed; the table gives the reason."
    return (
        "the novelty of a document's states is correlated with its excess (by rank, Holm's correction over heads, p < 0.05) in "
        + "; ".join(said)
        + ". An association, not a cause; positions are never pooled."
    )


def _swap(rows: Sequence[Row], group: str, source: str, together: bool) -> Row | None:
    for row in rows:
        if (row["group"], row["source"], row["together"]) == (group, source, together) and row["layer"] is None:
            return row if text.finite(row["value"]) else None
    return None


def _reason(rows: Sequence[Row]) -> str:
    return next((str(row["reason"]) for row in rows if row["reason"]), "a number is missing")


def _estimate(row: Row) -> str:
    return text.estimate({"x": row["value"], "x_low": row["low"], "x_high": row["high"]}, "x", signed)


def signed(value: Any) -> str:
    """Nats with their sign."""
    return f"{value:+.3f}".replace("-", "−") if text.finite(value) else text.NONE
