"""Numbers as text, and the findings of a figure as sentences: generated, so that they cannot drift from the tables.

The sentences only read verdicts and intervals that the evaluation computed. A direction is claimed when an
interval excludes zero; otherwise the text says that nothing is established.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
NONE = "–"


def finite(value: Any) -> bool:
    """Whether `value` is a number that can be printed (not null, NaN or infinite)."""
    return isinstance(value, (int, float)) and math.isfinite(value)


def nats(value: Any, *, signed: bool = False) -> str:
    """`0.673`, `−0.003`, `+0.040`; a true minus sign, a dash when there is no number."""
    if not finite(value):
        return NONE
    text = f"{value:+.3f}" if signed else f"{value:.3f}"
    if float(text) == 0:
        text = "0.000"
    return text.replace("-", "−")


def share(value: Any) -> str:
    """A fraction as a percentage without needless digits."""
    if not finite(value):
        return NONE
    text = f"{100 * value:.0f} %"
    return "0 %" if text == "-0 %" else text.replace("-", "−")


def perplexity(value: Any) -> str:
    """Four significant digits, thousands separated."""
    if not finite(value):
        return NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.4g}".rstrip(".")


def count(value: Any) -> str:
    """An integer with thousands separators."""
    return f"{round(value):,}" if finite(value) else NONE


def magnitude(value: Any) -> str:
    """A large count in words: `197 K`, `2.03 M`, `34 B`."""
    if not finite(value):
        return NONE
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:g}"


def scientific(value: Any) -> str:
    """A learning rate: `5e-4`."""
    if not finite(value):
        return NONE
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}".replace("-", "−")


def between(row: Row, name: str, write: Callable[[Any], str] = nats) -> str:
    """The interval of `name` as `0.61 to 0.73`, or an empty string when it has none."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return f"{write(low)} to {write(high)}" if finite(low) and finite(high) else ""


def estimate(row: Row, name: str, write: Callable[[Any], str] = nats) -> str:
    """A value with its interval in brackets."""
    interval = between(row, name, write)
    return write(row.get(name)) + (f" ({interval})" if interval else "")


def direction(row: Row, name: str) -> int | None:
    """+1 or −1 when the interval of `name` excludes zero, 0 when it holds zero, None when there is no interval."""
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return None
    return 1 if low > 0 else -1 if high < 0 else 0


def listing(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"


@dataclass(frozen=True)
class Finding:
    """A short topic and what the numbers say about it."""

    topic: str
    text: str


def headline(label: str, rows: Sequence[Row], names: Mapping[str, str]) -> str:
    """A model's outcome in one line."""
    by_arm = {str(row["arm"]): row for row in rows}
    base, control = by_arm.get("base"), by_arm.get("control")
    if base is None:
        return f"{label}: no verdict on the base model, so nothing can be compared with it."
    if base["verdict"] == "PASS":
        return f"{label} does not fail here, so there is nothing to repair."
    if base["verdict"] == "UNDECIDED":
        return f"{label}: whether it fails is UNDECIDED, so no repair can be claimed."
    if not _fails_beyond(base):
        return f"{label} misses Def. 3.2 already inside its training length, which says nothing about what lies beyond."
    others = {names[arm]: row for arm, row in by_arm.items() if arm not in ("base", "control")}
    against = _reference(control)
    parts = []
    passed = [name for name, row in others.items() if row["verdict"] == "PASS"]
    helped = [name for name, row in others.items() if row["verdict"] == "FAIL" and direction(row, against) == 1]
    undecided = [name for name, row in others.items() if row["verdict"] == "UNDECIDED"]
    if passed:
        parts.append(f"{listing(passed)} {_verb(passed, 'repairs', 'repair')} it")
    elif others:
        parts.append("nothing is shown to repair it in full" if undecided else "nothing repairs it in full")
    if helped:
        parts.append(f"{listing(helped)} {_verb(helped, 'reduces', 'reduce')} the failure")
    if undecided:
        parts.append(f"{listing(undecided)} {_verb(undecided, 'is', 'are')} UNDECIDED")
    if control is None:
        parts.append("without a zero-init control none of it can be credited to the initial state")
    else:
        alone = {"PASS": "repair it too", "FAIL": "do not repair it", "UNDECIDED": "are UNDECIDED"}[control["verdict"]]
        parts.append(f"the same steps from the zero state {alone}")
    return f"{label} fails beyond its training length: {'; '.join(parts)}."


def findings(label: str, context: int, length: int, rows: Sequence[Row], names: Mapping[str, str]) -> list[Finding]:
    """What a model's verdicts say: the failure, the control, the repairs, resetting, the price.

    Args:
        label: the model's name for readers.
        context: its training length in tokens.
        length: the last position measured.
        rows: one verdict an arm, over all seeds (`seed` null), base first.
        names: arm → name for readers.
    """
    by_arm = {str(row["arm"]): row for row in rows}
    base, control = by_arm.get("base"), by_arm.get("control")
    others = [(names[arm], row) for arm, row in by_arm.items() if arm not in ("base", "control")]
    found = [Finding("Does it fail?", _base(label, context, length, base)), Finding("The steps alone", _control(control, base))]
    if others:
        found.append(Finding("What repairs it", _repairs(others, base, control)))
        found.append(Finding("Against resetting the state", _reset(others, context)))
        found.append(Finding("Is it free?", _price(others)))
    else:
        found.append(Finding("What repairs it", "No other initial state was tried."))
    return found


def _reference(control: Row | None) -> str:
    """Which column holds the share of the failure removed: against the control, or the base model where there is none."""
    return "removed_base" if control is None else "removed_base_vs_control"


def _fails_beyond(base: Row | None) -> bool:
    """Whether the base model's failure is one of length generalisation: the definition also looks between t* and T_train."""
    if base is None or base["verdict"] != "FAIL":
        return False
    worst = base["worst_position"]
    return not finite(worst) or finite(base.get("broken_at")) or worst > base["train_length"]


def _verb(subjects: Sequence[str], one: str, many: str) -> str:
    return one if len(subjects) == 1 else many


def _base(label: str, context: int, length: int, base: Row | None) -> str:
    if base is None:
        return f"{label}: the tables hold no verdict on the base model, so nothing here can be called a repair."
    setting = f"trained on {context:,} tokens and run to {length:,}"
    if finite(base.get("broken_at")):
        return f"{label} breaks: {setting}, its loss is not a number any more from position {count(base['broken_at'])} on."
    if not finite(base["gap"]):
        return f"{label}: UNDECIDED, the evaluation holds no position beyond its best one ({setting})."
    gap = f"{nats(base['gap'])} nats" + (f" ({between(base, 'gap')})" if between(base, "gap") else "")
    if base["verdict"] == "PASS":
        return (
            f"{label} does not fail: {setting}, its loss stays within {base['tolerance']:g} nats of its best inside the training length "
            f"(widest gap {gap}). There is nothing to repair, so no initial state can be credited with a repair." + _far(base)
        )
    if base["verdict"] == "UNDECIDED":
        return (
            f"{label}: UNDECIDED whether it fails. {setting.capitalize()}, its widest gap above its own best is {gap}, "
            f"and these data cannot tell that from the tolerance of {base['tolerance']:g} nats." + _far(base)
        )
    if not _fails_beyond(base):
        return (
            f"{label} misses Def. 3.2 inside its own training length: {setting}, its loss rises to {gap} above its best at position "
            f"{count(base['t_star'])}, worst near position {count(base['worst_position'])}. That is no failure to carry a state."
            + _far(base)
        )
    return (
        f"{label} fails beyond its training length: {setting}, its loss rises to {gap} above its own best, "
        f"worst near position {count(base['worst_position'])}." + _far(base)
    )


def _far(row: Row) -> str:
    if not finite(row.get("excess_nll")):
        return ""
    sign = direction(row, "excess_nll")
    change = "costs" if row["excess_nll"] >= 0 else "changes the loss by"
    doubt = ", not established" if sign == 0 else ""
    return (
        f" From position {count(row['far_from'])} on, carrying the state {change} {estimate(row, 'excess_nll')} nats a token{doubt}, "
        "against the same model in fresh short windows."
    )


def _control(control: Row | None, base: Row | None) -> str:
    if control is None:
        return "The zero-init control is missing: whatever changed may be due to the additional training alone."
    steps = f"{count(control.get('steps'))} further steps" if finite(control.get("steps")) else "further steps"
    start = f"The zero-init control, {steps} from the zero state,"
    if finite(control.get("broken_at")):
        return f"{start} broke: its loss is not a number from position {count(control['broken_at'])} on."
    if control["verdict"] == "UNDECIDED":
        return f"{start} is UNDECIDED: whether the steps alone are enough is not settled."
    if not _fails_beyond(base):
        return f"{start} {'passes' if control['verdict'] == 'PASS' else 'fails'}."
    if control["verdict"] == "PASS":
        return f"{start} passes too: the additional training alone is enough here, and no special initial state is needed."
    amount = _removed(control, "removed_base")
    effect = {
        1: f"the steps alone take away {amount} of the base model's far excess",
        -1: f"the steps alone make it worse, the far excess grows by {amount} of the base model's",
        0: f"the steps alone change nothing that can be established ({amount} of the base model's far excess removed)",
        None: f"the steps alone remove {amount} of the base model's far excess, without an interval",
    }[direction(control, "removed_base")]
    return f"{start} still fails: {effect}."


def _repairs(others: Sequence[tuple[str, Row]], base: Row | None, control: Row | None) -> str:
    if not _fails_beyond(base):
        verdicts = listing([f"{name} {row['verdict']}" for name, row in others])
        return f"No failure beyond the training length is established, so none of these is a repair: {verdicts}."
    against = _reference(control)
    groups: dict[str, list[str]] = {}
    for name, row in others:
        if finite(row.get("broken_at")):
            groups.setdefault("broken", []).append(f"{name}, from position {count(row['broken_at'])}")
        else:
            kind = (
                row["verdict"]
                if row["verdict"] != "FAIL"
                else {1: "helped", -1: "worse"}.get(direction(row, against) or 0, "neither")
            )
            groups.setdefault(kind, []).append(f"{name} {_removed(row, against)}")
    sentences = [
        f"{topic}: {listing(groups[kind])}."
        for kind, topic in (
            ("PASS", "Repaired (PASS)"),
            ("helped", "Reduced, not repaired (FAIL)"),
            ("neither", "No effect established (FAIL)"),
            ("worse", "Made worse, by (FAIL)"),
            ("UNDECIDED", "UNDECIDED"),
            ("broken", "Broken, the loss is not a number (FAIL)"),
        )
        if kind in groups
    ]
    if "PASS" not in groups:
        sentences.insert(0, "By the verdict of Def. 3.2 no initial state repairs it at this budget.")
    whose = "the base model's" if control is None else "the control's"
    if any(finite(row.get(against)) for _, row in others):
        sentences.append(
            f"The percentages are the share of {whose} far excess (against the base model's short windows) that is gone."
        )
    else:
        sentences.append(f"Shares are not given: {whose} own far excess is not clearly above zero.")
    return " ".join(sentences)


def _removed(row: Row, name: str) -> str:
    """The share removed with its interval; a growth is written as a positive share."""
    if not finite(row.get(name)):
        return "(no share)"
    if direction(row, name) != -1:
        return estimate(row, name, share)
    return f"{share(-row[name])} ({share(-row[f'{name}_high'])} to {share(-row[f'{name}_low'])})"


def _reset(others: Sequence[tuple[str, Row]], context: int) -> str:
    """Carried minus reset loss of the same model: below zero, carrying is worth it."""
    known = [(name, row) for name, row in others if finite(row.get("beats_reset"))]
    if not known:
        return "Not measured: the evaluation ends too early."
    groups: dict[int | None, list[str]] = {}
    for name, row in known:
        groups.setdefault(direction(row, "beats_reset"), []).append(f"{name} {_signed(row, 'beats_reset')}")
    parts = []
    if -1 in groups:
        parts.append(f"carrying beats resetting for {listing(groups[-1])}")
    if 1 in groups:
        parts.append(f"resetting would still be better for {listing(groups[1])}")
    level = [*groups.get(0, []), *groups.get(None, [])]
    if level:
        parts.append(f"the two cannot be told apart for {listing(level)}")
    return (
        f"The plain alternative is to reset the state every {context:,} tokens. Far out, in nats of carried minus reset loss of the same model: "
        f"{'; '.join(parts)}."
    )


def _price(others: Sequence[tuple[str, Row]]) -> str:
    known = [(name, row) for name, row in others if finite(row.get("short_context_cost"))]
    if not known:
        return "What the repair costs on short contexts was not measured."
    groups: dict[int | None, list[str]] = {}
    for name, row in known:
        groups.setdefault(direction(row, "short_context_cost"), []).append(f"{name} {_signed(row, 'short_context_cost')}")
    parts = []
    if 1 in groups:
        parts.append(f"not free: {listing(groups[1])}")
    if -1 in groups:
        parts.append(f"even better than before: {listing(groups[-1])}")
    level = [*groups.get(0, []), *groups.get(None, [])]
    if level:
        parts.append(f"no cost established: {listing(level)}")
    return f"Change of the loss inside the training length, in nats against the base model; {'; '.join(parts)}."


def _signed(row: Row, name: str) -> str:
    interval = between(row, name)
    return nats(row[name], signed=True) + (f" ({interval})" if interval else "")


def certainty(rows: Sequence[Row]) -> str:
    """What the intervals in the findings are, and what they leave out."""
    labels = sorted({str(row[name]) for row in rows for name in ("verdict_interval", "interval") if row.get(name)})
    seeds = sorted({row["n_seeds"] for row in rows if finite(row.get("n_seeds")) and row["arm"] != "base"})
    measured = f"Numbers in brackets are intervals: {'; '.join(labels)}." if labels else "The tables carry no intervals."
    if not seeds:
        return measured
    if seeds[-1] == 1:
        return f"{measured} One post-training seed: how much another training run would differ is not in them."
    number = count(seeds[0]) if seeds[0] == seeds[-1] else f"{count(seeds[0])} to {count(seeds[-1])}"
    return f"{measured} Values are means over {number} post-training seeds, whose own curves are the thin lines; the spread between seeds is not in the brackets."
