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
NO_INTERVAL = "no interval"


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


def short_count(number: int) -> str:
    """Parameters of a model, as they stand in its label: `197K`, `2.03M`, `1.3B`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


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
        return f"{label} misses Def. 3.2 inside its training length; a failure beyond it is not shown."
    kinds: dict[str, list[str]] = {}
    for arm, row in by_arm.items():
        if arm not in ("base", "control"):
            kinds.setdefault(_kind(row, control), []).append(names[arm])
    parts = []
    if passed := kinds.get("PASS"):
        parts.append(f"{listing(passed)} {_verb(passed, 'repairs', 'repair')} it")
    elif kinds:
        open_ = "UNDECIDED" in kinds or "inside" in kinds
        parts.append("nothing is shown to repair it in full" if open_ else "nothing repairs it in full")
    if helped := kinds.get("helped"):
        parts.append(f"{listing(helped)} {_verb(helped, 'reduces', 'reduce')} the failure")
    if partly := kinds.get("control only"):
        parts.append(
            f"{listing(partly)} {_verb(partly, 'is', 'are')} better than the control, not shown to be better than the base model"
        )
    if inside := kinds.get("inside"):
        parts.append(f"{listing(inside)} {_verb(inside, 'fails', 'fail')} inside the training length, beyond it not shown to")
    if undecided := kinds.get("UNDECIDED"):
        parts.append(f"{listing(undecided)} {_verb(undecided, 'is', 'are')} UNDECIDED")
    if control is None:
        parts.append("without a zero-init control none of it can be credited to the initial state")
    else:
        parts.append(f"the same steps from the zero state {_alone(control)}")
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
    steps = _control(control, base)
    if control is not None and "tbtt" in by_arm:
        steps += f" {names['tbtt']} differs from the control in the order of the data too."
    found = [Finding("Does it fail?", _base(label, context, length, base)), Finding("The steps alone", steps)]
    if others:
        found.append(Finding("What repairs it", _repairs(others, base, control)))
        if structure := _structure(by_arm, names):
            found.append(Finding("Which structure of a state", structure))
        found.append(Finding("Against resetting the state", _reset(others, context)))
        found.append(Finding("Is it free?", _price(others, control, names.get("control", "control"))))
    else:
        found.append(Finding("What repairs it", "No other initial state was tried."))
    return found


def _reference(control: Row | None) -> str:
    """Which column holds the share of the failure removed: against the control, or the base model where there is none."""
    return "removed_base" if control is None else "removed_base_vs_control"


def _fails_beyond(row: Row | None) -> bool:
    """Whether a failure is one of length generalisation: the definition also looks between t* and T_train."""
    if row is None or row["verdict"] != "FAIL":
        return False
    return row["fails_beyond"] is True


def _kind(row: Row, control: Row | None) -> str:
    """What an arm did to a failure beyond the training length: the group it is listed in."""
    if finite(row.get("broken_at")):
        return "broken"
    if row["verdict"] != "FAIL":
        return str(row["verdict"])
    if not _fails_beyond(row):
        return "inside"
    against_base = direction(row, "removed_base")
    effect = direction(row, _reference(control))
    if effect == 1:
        return "helped" if against_base == 1 else "control only"
    return "worse" if effect == -1 else "neither"


def _alone(control: Row) -> str:
    """What the control did, for the headline."""
    if finite(control.get("broken_at")):
        return "break"
    if control["verdict"] == "FAIL" and not _fails_beyond(control):
        return "fail inside the training length, beyond it not shown to"
    return {"PASS": "repair it too", "FAIL": "do not repair it", "UNDECIDED": "are UNDECIDED"}[control["verdict"]]


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
    gap = _gap(base, "gap")
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
        beyond = f", where the widest gap is {_gap(base, 'gap_beyond')}" if finite(base["gap_beyond"]) else ""
        return (
            f"{label} misses Def. 3.2 inside its own training length: {setting}, its loss rises to {gap} above its best at position "
            f"{count(base['t_star'])}, worst near position {count(base['worst_position'])}. A failure beyond the training length, "
            f"one to carry a state, is not shown{beyond}." + _far(base)
        )
    inside = ""
    if finite(base["worst_position"]) and base["worst_position"] <= base["train_length"]:
        inside = f" It misses Def. 3.2 inside that length too, by {gap} near position {count(base['worst_position'])}."
    return (
        f"{label} fails beyond its training length: {setting}, its loss rises to {_gap(base, 'gap_beyond')} above its own best there, "
        f"worst near position {count(base['worst_beyond'])}." + inside + _far(base)
    )


def _gap(row: Row, name: str) -> str:
    return f"{nats(row[name])} nats ({between(row, name) or NO_INTERVAL})"


def _far(row: Row) -> str:
    if not finite(row.get("excess_nll")):
        return ""
    sign = direction(row, "excess_nll")
    change = "costs" if row["excess_nll"] >= 0 else "changes the loss by"
    doubt = {0: ", not established", None: f" ({NO_INTERVAL})"}.get(sign, "")
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
    if control["verdict"] == "FAIL" and not _fails_beyond(control):
        enough = ", so the steps alone may be enough" if _fails_beyond(base) else ""
        return f"{start} fails inside the training length; a failure beyond it is not shown{enough}."
    if not _fails_beyond(base):
        return f"{start} {'passes' if control['verdict'] == 'PASS' else 'fails beyond the training length'}."
    if control["verdict"] == "PASS":
        return f"{start} passes too: the additional training alone is enough here, and no special initial state is needed."
    if not finite(control.get("removed_base")):
        return (
            f"{start} still fails: what share of the base model's far excess the steps alone remove is not defined, "
            f"because {_undefined(base, 'the base model')}."
        )
    amount = _removed(control, "removed_base")
    effect = {
        1: f"the steps alone take away {amount} of the base model's far excess",
        -1: f"the steps alone make it worse, the far excess grows by {amount} of the base model's",
        0: f"the steps alone change nothing that can be established ({amount} of the base model's far excess removed)",
        None: f"the steps alone remove {amount} of the base model's far excess",
    }[direction(control, "removed_base")]
    return f"{start} still fails: {effect}."


def _undefined(reference: Row | None, who: str) -> str:
    """Why no share of the far excess of `reference`, called `who`, can be given."""
    if reference is None:
        return f"the tables do not hold {who}"
    if finite(reference.get("broken_at")):
        return f"{who}'s loss is not a number from position {count(reference['broken_at'])} on"
    if not finite(reference.get("excess_nll_base")):
        return f"{who}'s far excess was not measured"
    return f"{who}'s far excess, {_signed(reference, 'excess_nll_base')} nats, is not clearly above zero"


def _repairs(others: Sequence[tuple[str, Row]], base: Row | None, control: Row | None) -> str:
    if not _fails_beyond(base):
        verdicts = listing([f"{name} {row['verdict']}" for name, row in others])
        return f"No failure beyond the training length is established, so none of these is a repair: {verdicts}."
    references = [("removed_base", base, "the base model", "the base")]
    if control is not None:
        references.insert(0, ("removed_base_vs_control", control, "the control", "the control"))
    groups: dict[str, list[str]] = {}
    for name, row in others:
        kind = _kind(row, control)
        if kind == "broken":
            groups.setdefault(kind, []).append(f"{name}, from position {count(row['broken_at'])}")
        else:
            shares = [f"{_share(row, column)} of {short}'s" for column, _, _, short in references if finite(row.get(column))]
            groups.setdefault(kind, []).append(f"{name} {', '.join(shares) or '(no share)'}")
    sentences = [
        f"{topic}: {'; '.join(groups[kind])}."
        for kind, topic in (
            ("PASS", "Repaired (PASS)"),
            ("helped", "Reduced, not repaired (FAIL)"),
            ("control only", "Better than the control, not shown to be better than the base model (FAIL)"),
            (
                "neither",
                "No effect established (FAIL)" if control is None else "No effect of the initial state established (FAIL)",
            ),
            ("worse", f"Worse than {'the base model' if control is None else 'the control'} (FAIL)"),
            ("inside", "FAIL inside the training length, a failure beyond it is not shown"),
            ("UNDECIDED", "UNDECIDED"),
            ("broken", "Broken, the loss is not a number (FAIL)"),
        )
        if kind in groups
    ]
    if "PASS" not in groups:
        open_ = "UNDECIDED" in groups or "inside" in groups
        shown = "is shown to repair it" if open_ else "repairs it"
        sentences.insert(0, f"By the verdict of Def. 3.2 no initial state {shown} at this budget.")
    whole = [(name, row) for name, row in others if not finite(row.get("broken_at"))]
    if any(finite(row.get(column)) for _, row in whole for column, *_ in references):
        sentences.append(
            "The percentages are the shares of a far excess (against the base model's short windows) that are gone; below zero it grew."
        )
    for column, reference, who, _ in references:
        if whole and not any(finite(row.get(column)) for _, row in whole):
            sentences.append(f"Shares of {who}'s far excess are not defined: {_undefined(reference, who)}.")
    return " ".join(sentences)


_KEPT = {
    "fitted_noise": "one mean and one variance a head",
    "permuted": "each element's own distribution, no correlation",
    "gaussian_head": "means, and covariances within heads",
    "gaussian_joint": "means and all covariances",
}
"""By arm, what it keeps of the real states that state passing hands out."""


def _structure(by_arm: Mapping[str, Row], names: Mapping[str, str]) -> str:
    """What of a real state suffices: the arms that keep parts of it against state passing; nothing where none was tried."""
    real = by_arm.get("state_passing")
    arms = [arm for arm in _KEPT if arm in by_arm and finite(by_arm[arm]["removed_base"])]
    if real is None or not finite(real["removed_base"]) or not set(arms) - {"fitted_noise"}:
        return ""
    groups: dict[str, list[str]] = {"less": [], "no difference shown": [], "more": []}
    for arm in arms:
        row = by_arm[arm]
        ends = [row["removed_base_low"], row["removed_base_high"], real["removed_base_low"], real["removed_base_high"]]
        group = "no difference shown"
        if all(map(finite, ends)):
            group = "less" if ends[1] < ends[2] else "more" if ends[0] > ends[3] else group
        groups[group].append(f"{names[arm]} ({_KEPT[arm]}) {estimate(row, 'removed_base', share)}")
    told = "; ".join(f"{group}: {listing(arms)}" for group, arms in groups.items() if arms)
    return (
        f"Of the base's far excess {names['state_passing']}, which keeps all of a real state, removes "
        f"{estimate(real, 'removed_base', share)}. Of arms that keep less, {told}. Less or more: the intervals do not meet."
    )


def _share(row: Row, name: str) -> str:
    return f"{share(row[name])} ({between(row, name, share) or NO_INTERVAL})"


def _removed(row: Row, name: str) -> str:
    """The share removed with its interval; a growth is written as a positive share."""
    if direction(row, name) != -1:
        return _share(row, name)
    return f"{share(-row[name])} ({share(-row[f'{name}_high'])} to {share(-row[f'{name}_low'])})"


def _reset(others: Sequence[tuple[str, Row]], context: int) -> str:
    """Carried loss minus that of the base model reset: below zero, the arm is worth more than no training at all."""
    groups = _by_direction(others, "beats_base_reset")
    own = [f"{name} {_signed(row, 'beats_reset')}" for name, row in others if finite(row.get("beats_reset"))]
    broken = [name for name, row in others if finite(row.get("broken_at"))]
    if not groups and not own:
        if len(broken) == len(others):
            return f"Not defined: the loss of {listing(broken)} is not a number far out."
        return "Not measured far out by this evaluation."
    sentences = []
    if groups:
        parts = []
        if -1 in groups:
            parts.append(f"carrying beats it for {listing(groups[-1])}")
        if 1 in groups:
            parts.append(f"it would still be better than {listing(groups[1])}")
        if level := [*groups.get(0, []), *groups.get(None, [])]:
            parts.append(f"the two cannot be told apart for {listing(level)}")
        sentences.append(
            f"The alternative that needs no training is the base model, its state reset every {context:,} tokens. "
            f"Far out, in nats of carried loss minus that one's: {'; '.join(parts)}."
        )
    else:
        sentences.append("Against the base model's reset nothing was measured.")
    if own:
        sentences.append(f"Against resetting the arm itself: {listing(own)}.")
    return " ".join(sentences)


def _price(others: Sequence[tuple[str, Row]], control: Row | None, control_name: str) -> str:
    arms = others if control is None else [(control_name, control), *others]
    against_base = [f"{name} {_signed(row, 'short_context_cost')}" for name, row in arms if finite(row.get("short_context_cost"))]
    if not any(finite(row.get("short_context_cost")) for _, row in others):
        return "What the repair costs on short contexts was not measured."
    sentences = [f"Change of the loss inside the training length, in nats. Against the base model: {listing(against_base)}."]
    groups = _by_direction(others, "short_context_cost_vs_control")
    if control is None:
        sentences.append("Without a control, how much of it is due to the steps alone is unknown.")
    elif not groups:
        sentences.append("The cost against the control, the only one that belongs to the initial state, is not defined.")
    else:
        parts = []
        if 1 in groups:
            parts.append(f"not free: {listing(groups[1])}")
        if -1 in groups:
            parts.append(f"better than the control: {listing(groups[-1])}")
        if level := [*groups.get(0, []), *groups.get(None, [])]:
            parts.append(f"no cost established: {listing(level)}")
        sentences.append(f"Only the cost against the control belongs to the initial state; {'; '.join(parts)}.")
    return " ".join(sentences)


def _by_direction(rows: Sequence[tuple[str, Row]], name: str) -> dict[int | None, list[str]]:
    """Names with their values, by what their intervals establish; rows without the value are left out."""
    groups: dict[int | None, list[str]] = {}
    for who, row in rows:
        if finite(row.get(name)):
            groups.setdefault(direction(row, name), []).append(f"{who} {_signed(row, name)}")
    return groups


def _signed(row: Row, name: str) -> str:
    return f"{nats(row[name], signed=True)} ({between(row, name) or NO_INTERVAL})"


def to_decide(row: Row) -> str:
    """Of an UNDECIDED verdict, how much text would decide it which way; an empty string where nothing can be said."""
    needed, there = row.get("documents_to_decide"), row.get("n_documents")
    if row["verdict"] != "UNDECIDED" or there is None or needed is None or math.isnan(needed):
        return ""
    if needed > 100 * there:
        return f"more than 100 times these {count(there)} documents would decide it"
    return f"about {count(float(f'{needed:.2g}'))} documents would show {row['would_be']}, these are {count(there)}"


def comparisons(rows: Sequence[Row]) -> str:
    """Which intervals hold at once, and over how many comparisons nothing is corrected; `rows` are those over all seeds."""
    banded = [row for row in rows if finite(row.get("gap_low")) and finite(row.get("confidence"))]
    if not banded:
        return ""
    level = min(row["confidence"] for row in banded)
    models, arms = len({row["model"] for row in banded}), len({row["arm"] for row in banded})
    missed = f"{(1.0 - level) * len(banded):.2g}"
    return (
        f"Many comparisons: only the bands of the gaps, and the verdicts that rest on them, hold at all positions at once, each for one "
        f"arm of one model. Bands around curves hold at each position by itself, and every other interval for its number alone. Nothing is "
        f"corrected for the {count(len(banded))} verdicts on this page ({models} model{'s' * (models > 1)}, {arms} arm{'s' * (arms > 1)}): "
        f"at {100 * level:g} % each, up to {missed} of so many bands are expected to miss the truth somewhere."
    )


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
