"""Sentences of the page of shifts, written from the tables by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def bands(row: Row, write: Callable[[Any], str] = number) -> str:
    """Where held-out states that training could have met lie, or an empty string."""
    found = []
    for where, name in (("inside training", "null"), ("at t = T_train", "null_end")):
        if text.finite(row[f"{name}_high"]):
            found.append(f"{where} {write(row[f'{name}_low'])} to {write(row[f'{name}_high'])}")
    return ", ".join(found)


def headline(label: str, runs: Sequence[Run], position: int) -> str:
    """Are the states of the base at the largest position new?"""
    base = next((run for run in runs if run["name"] == "base"), runs[0])
    row = summary_of(base, "novelty", position)
    if row is None:
        return f"{label}: nothing can be said of the states at t = {position:,}; the table gives the reason."
    where = f"at t = {position:,}"
    if not row["with_band"]:
        return (
            f"{label}: {where} the median head of the {_who(base)} lies {number(row['median'])} times as far from training states as those "
            "from each other; there are too few held-out states inside training, or documents, for a comparison with null bands."
        )
    many = _counted(row)
    others = ""
    for run in runs:
        other = None if run["name"] == base["name"] else summary_of(run, "novelty", position)
        if other is not None and other["with_band"] and run["name"] not in ("base", "control"):
            others += f" After {run['label']}{_seed(run, runs)}: {_counted(other)} heads, median {number(other['median'])}."
    if row["above"] == 0:
        return (
            f"{label}: that states of the {_who(base)} {where} are new is not shown: in no head does their distance to training states lie "
            f"above both null bands (median head {number(row['median'])}, {bands(row)}).{others}"
        )
    return (
        f"{label}: {where} {many} heads of the {_who(base)} are in states that training did not meet: their distance to training states "
        f"lies above both null bands, in the median head {number(row['median'])} times that among training states ({bands(row)}).{others}"
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
            f"{comparisons} heads and positions of each arm are compared with each measure. Intervals and bands hold for one head and position "
            "at a time, nothing is corrected, and heads of one model depend on each other: what errs by chance errs in many of them at once.",
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
    lower = now[0].lower() + now[1:]
    if verdict.get("excess") is None:
        return f"Not known: {lower}, without an interval."
    if verdict["excess"] is False:
        if excess["high"] < 0.0:
            return f"There is nothing to explain: {lower}, which is below zero: long states help."
        return f"Not asked: {lower}, which is not established above zero."
    known = {name: words for name, words in _WAYS.items() if verdict.get(name) is not None}
    if not known:
        return f"{now}. What swaps change is not known: {_reason(swaps)}."
    said = f"{now}. " + " ".join(_way(swaps, name == "together", words) for name, words in known.items())
    everything = _swap(swaps, "all", "training state", True)
    if everything is not None:
        said += f" Training states in all {everything['heads']} heads that were looked at change it by {_estimate(everything)}."
    if len(known) > 1:
        said += " The rule is tried both ways, uncorrected."
    passed = [words for name, words in known.items() if verdict[name]]
    failed = [words for name, words in known.items() if not verdict[name]]
    if not passed:
        return f"Not shown: no lowering that goes beyond what random heads and other documents' states bring. {said}"
    if failed:
        return f"The two ways of swapping disagree: {passed[0]} their drift explains some of it, {failed[0]} that is not shown. {said}"
    return f"Yes, in part: their drift explains some of it. {said}"


_WAYS = {"together": "swapped together", "alone": "swapped one at a time"}
"""How heads are swapped, by the names in the verdict."""


def _way(swaps: Sequence[Row], jointly: bool, words: str) -> str:
    """What decides when heads are swapped in this way."""
    top = _swap(swaps, "top", "training state", jointly)
    random = _swap(swaps, "top − random", "training state", jointly)
    foreign = _swap(swaps, "top", "training state − other document", jointly)
    assert top is not None
    assert random is not None
    assert foreign is not None
    return (
        f"Training states in the {top['heads']} heads that drift most, {words}, change it by {_estimate(top)}; less what they change in random "
        f"heads {_estimate(random)}, less what other documents' states change in the same heads {_estimate(foreign)}."
    )


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
    interval = f" ({row['low']:+.2f} to {row['high']:+.2f})" if text.finite(row["low"]) and text.finite(row["high"]) else ""
    return f"{row['value']:+.2f}{interval}, permutation p = {row['p']:.2g}, {row['n']} heads"


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
        if row["with_band"]:
            inside = f", {bands(row)}; {_counted(row)} heads lie above both"
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
