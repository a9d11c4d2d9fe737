"""Is it a repair? The rule, as a function of the numbers of a comparison (`farstate.evaluation.compare`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from farstate.evaluation.verdict import to_decide

Outcome = Literal["REPAIRED", "UNDECIDED", "NOT A REPAIR", "NOTHING TO REPAIR"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Judgement:
    """An outcome, its reason in a sentence, and of UNDECIDED how many documents in all would decide it, where that can be said."""

    outcome: Outcome
    reason: str
    documents: float | None = None


@dataclass(frozen=True)
class _Condition:
    """A quantity against a limit: `holds` is True, False, or None where its interval holds the limit or does not exist."""

    holds: bool | None
    words: str
    documents: float | None = None


def judge_repair(
    base: Row, repaired: Row, control: Row | None, difference: Row | None, *, least_removed: float, tolerance: float
) -> Judgement:
    """Call it REPAIRED where the base fails beyond its training length by Def. 3.2 and

    (a) the repaired model does not fail there by the same test, and at least `least_removed` of the base's far excess, against the
        base's own windows, is gone: the interval's lower end says so;
    (b) the interval of the short-context cost, against the base, ends below `tolerance` nats;
    (c) the control, the same steps from the zero state, does not do as well: the interval of the far loss minus the control's
        lies below zero.

    NOT A REPAIR where the interval of any of these lies on the other side, UNDECIDED where one holds the limit.

    Args:
        base, repaired, control: rows of the verdicts over all seeds; control None: there is none, so nothing can be credited to the
            initial state.
        difference: the row `nll` of the differences, repaired minus control.
        least_removed: share in [0, 1].
        tolerance: nats.
    """
    if base["verdict"] == "PASS" or (base["fails_beyond"] is False and base["verdict"] == "FAIL"):
        where = "passes Def. 3.2" if base["verdict"] == "PASS" else "misses Def. 3.2 inside its training length only"
        return Judgement("NOTHING TO REPAIR", f"The base model {where}; a failure beyond the training length is not shown.")
    if base["verdict"] == "UNDECIDED" or not base["fails_beyond"]:
        return Judgement(
            "UNDECIDED",
            "Whether the base model fails is itself undecided, so no repair can be claimed.",
            _number(base.get("documents_to_decide")),
        )
    if _number(repaired.get("broken_at")) is not None:
        return Judgement("NOT A REPAIR", f"Its loss is not a number from position {repaired['broken_at']:,} on.")
    conditions = [*_removes(repaired, least_removed), _cheap(repaired, tolerance), _beyond_control(control, difference)]
    if refuted := [condition for condition in conditions if condition.holds is False]:
        return Judgement("NOT A REPAIR", _sentence([condition.words for condition in refuted]))
    if open_ := [condition for condition in conditions if condition.holds is None]:
        known = [condition.documents for condition in open_]
        needed = None if any(number is None for number in known) else max(number for number in known if number is not None)
        return Judgement("UNDECIDED", _sentence([condition.words for condition in open_]), needed)
    reason = _sentence([condition.words for condition in conditions])
    if repaired["verdict"] != "PASS":
        reason += (
            f" By Def. 3.2 alone it is {repaired['verdict']}: its widest gap beyond the training length is "
            f"{_between(repaired, 'gap_beyond')} nats, so that a rest of the failure is not excluded."
        )
    return Judgement("REPAIRED", reason)


def _removes(row: Row, least: float) -> list[_Condition]:
    if row["fails_beyond"] is True:
        where = f" near position {row['worst_beyond']:,}" if _number(row.get("worst_beyond")) is not None else ""
        gap = _between(row, "gap_beyond")
        found = [_Condition(False, f"it still fails Def. 3.2 beyond the training length ({gap} nats above its best{where})")]
    elif row["fails_beyond"] is None:
        found = [_Condition(None, "whether it still fails Def. 3.2 cannot be tested on these texts")]
    else:
        found = []
    value = _number(row.get("removed_base"))
    if value is None:
        return [
            *found,
            _Condition(None, "the base's far excess is not clearly above zero, so no share of it can be said to be gone"),
        ]
    words = f"of the base's far excess {_percent(value)} {_interval(row, 'removed_base', _percent)} is gone, asked are {_percent(least)}"
    return [*found, _against(row, "removed_base", least, words, above=True)]


def _cheap(row: Row, tolerance: float) -> _Condition:
    value = _number(row.get("short_context_cost"))
    if value is None:
        return _Condition(None, "its short-context cost is not known")
    words = f"the short-context cost is {_nats(value)} nats {_interval(row, 'short_context_cost', _nats)}, allowed are {_nats(tolerance)}"
    return _against(row, "short_context_cost", tolerance, words, above=False)


def _beyond_control(control: Row | None, difference: Row | None) -> _Condition:
    if control is None or difference is None or _number(difference.get("value")) is None:
        return _Condition(None, "without a zero-init control nothing can be credited to the initial state")
    row = {**difference, "value_low": difference["low"], "value_high": difference["high"]}
    words = f"far out its loss is {_nats(row['value'])} nats {_interval(row, 'value', _nats)} from the control's"
    found = _against(row, "value", 0.0, words, above=False)
    return _Condition(False, f"{words}, which does as well") if found.holds is False else found


def _against(row: Row, name: str, limit: float, words: str, *, above: bool) -> _Condition:
    """Hold the interval of a number against a limit that it must lie above, or below."""
    value, low, high = (_number(row.get(name + end)) for end in ("", "_low", "_high"))
    if value is None or low is None or high is None:
        return _Condition(None, f"{words}; without an interval nothing is established")
    if low >= limit if above else high < limit:
        return _Condition(True, words)
    if high < limit if above else low >= limit:
        return _Condition(False, words)
    needed = math.inf
    if documents := row.get("n_documents"):
        _, needed = to_decide(np.array([value]), np.array([(high - low) / 2.0]), limit, int(documents))
    return _Condition(None, words, needed if math.isfinite(needed) else None)


def _sentence(parts: list[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


def _number(value: Any) -> Any:
    """A finite number as it is, else None."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _nats(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %".replace("-", "−")


def _interval(row: Row, name: str, write: Any) -> str:
    low, high = _number(row.get(f"{name}_low")), _number(row.get(f"{name}_high"))
    return "(no interval)" if low is None or high is None else f"({write(low)} to {write(high)})"


def _between(row: Row, name: str) -> str:
    value = _number(row.get(name))
    return "not a number of" if value is None else f"{_nats(value)} {_interval(row, name, _nats)}"
