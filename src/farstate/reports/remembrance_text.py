"""What the tables of effective remembrance say, as sentences: only from values and intervals that the comparison computed.

A direction is claimed where an interval excludes zero; where along the curve, where a band that holds for all starts does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from farstate.reports.text import NO_INTERVAL, NONE, Finding, Row, between, count, direction, finite, listing, share

FLAT, DEEP = 0.25, 0.5
"""The share of a memory that lies farther back than T_train: flat until there when surely below, deep when surely above."""

_WORDS = {1: "more", -1: "less"}


@dataclass(frozen=True)
class Arm:
    """What the text says something of: numbers over all seeds.

    Attributes:
        far: by distance and `against`, the row of the measure "far", its value under `value`.
        share, reach: rows of the measures "far_share" and "half_reach" in total variation, None where there are none.
        differs: runs of start points (first, last, sign) where the band of the difference to the base excludes zero.
    """

    name: str
    label: str
    far: Mapping[tuple[str, str], Row]
    share: Row | None
    reach: Row | None
    differs: Sequence[tuple[int, int, int]] = field(default=())


def distance(value: Any, *, signed: bool = False) -> str:
    """`0.372`, `0.0041`, `−0.012`: three decimals, or two digits of a smaller number."""
    if not finite(value):
        return NONE
    form = ".3f" if abs(value) >= 0.0095 or value == 0 else ".2g"
    return f"{value:{'+' if signed else ''}{form}}".replace("-", "−")


def _signed(value: Any) -> str:
    return distance(value, signed=True)


def estimate(row: Row | None, *, signed: bool = False) -> str:
    """A value with its interval in brackets."""
    if row is None or not finite(row["value"]):
        return "not a number"
    write = _signed if signed else distance
    return f"{write(row['value'])} ({between(row, 'value', write) or NO_INTERVAL})"


def headline(label: str, context: int, arms: Sequence[Arm]) -> str:
    """What the model remembers beyond its training length, and what the arms change, in a sentence."""
    base = arms[0]
    far = base.far.get(("total_variation", ""))
    if far is None:
        return (
            f"{label}: T is within the training length of {context:,} tokens, so nothing lies farther back than training reached."
        )
    if not finite(far["value"]):
        return f"{label}: the base model's output is not a number, so nothing can be said of what it remembers."
    said = f"{label}: dropping all but the last {far['left']:,} tokens moves the base model's prediction by {estimate(far)} in total variation"
    others = [arm for arm in arms if arm.name not in ("base", "control")]
    by_sign: dict[int | None, list[Arm]] = {}
    for arm in others:
        by_sign.setdefault(_sign(arm.far.get(("total_variation", "base"))), []).append(arm)
    parts = []
    for sign in (-1, 1):
        if by_sign.get(sign):
            names = listing([f"{arm.label} ({_of(arm)})" for arm in by_sign[sign]])
            verb = "depends" if len(by_sign[sign]) == 1 else "depend"
            parts.append(f"{names} {verb} {_WORDS[sign]} on what lies farther back")
    if unclear := [*by_sign.get(0, []), *by_sign.get(None, [])]:
        parts.append(f"for {listing([arm.label for arm in unclear])} no difference is established")
    return f"{said}; {', and '.join(parts)}." if parts else f"{said}."


def _of(arm: Arm) -> str:
    row = arm.far[("total_variation", "")]
    return distance(row["value"])


def _sign(row: Row | None) -> int | None:
    return None if row is None or not finite(row["value"]) else direction(row, "value")


def findings(arms: Sequence[Arm], *, all_distances: bool) -> list[Finding]:
    """The paragraphs under the headline."""
    base = arms[0]
    if base.far.get(("total_variation", "")) is None or not finite(base.far["total_variation", ""]["value"]):
        return []
    found = [Finding("Far memory.", _far(arms)), Finding("Where along the text.", _where(arms))]
    if shape := _shape(arms):
        found.append(Finding("Shape.", shape))
    if all_distances:
        found.append(Finding("The distances.", _distances(arms)))
    return found


def _far(arms: Sequence[Arm]) -> str:
    base, control = arms[0], next((arm for arm in arms if arm.name == "control"), None)
    sentences = []
    for arm in arms[1:]:
        row, difference = arm.far.get(("total_variation", "")), arm.far.get(("total_variation", "base"))
        if row is None or not finite(row["value"]):
            sentences.append(f"{_capital(arm.label)}: not a number.")
            continue
        sentence = f"{_capital(arm.label)}: {estimate(row)}, {estimate(difference, signed=True)} against the base"
        against = arm.far.get(("total_variation", "control"))
        if against is not None:
            sentence += f", {estimate(against, signed=True)} against the control"
        sentences.append(sentence + ".")
    others = [arm for arm in arms if arm.name not in ("base", "control")]
    if control is None:
        if others:
            sentences.append("Without a zero-init control none of it can be credited to the initial state.")
    else:
        credited = [arm for arm in others if _sign(arm.far.get(("total_variation", "control"))) in (1, -1)]
        open_ = [arm for arm in others if arm not in credited]
        if credited:
            ways = listing([f"{arm.label} ({_WORDS[_sign(arm.far['total_variation', 'control']) or 1]})" for arm in credited])
            sentences.append(f"The same steps from the zero state do not account for it: {ways}.")
        if open_:
            sentences.append(f"For {listing([arm.label for arm in open_])} no difference to the control is established.")
    if not sentences:
        return f"The base model: {estimate(base.far['total_variation', ''])}."
    return " ".join(sentences)


def _where(arms: Sequence[Arm]) -> str:
    sentences = []
    for arm in arms[1:]:
        ranges: dict[int, list[str]] = {}
        for first, last, sign in arm.differs:
            ranges.setdefault(sign, []).append(f"t = {first:,}" if first == last else f"t = {first:,} to {last:,}")
        parts = [f"{_WORDS[sign]} than the base at {listing(ranges[sign])}" for sign in (-1, 1) if sign in ranges]
        said = " and ".join(parts) if parts else "no start point at which it differs from the base for certain"
        sentences.append(f"{_capital(arm.label)}: {said}.")
    return " ".join(sentences) or "Nothing to compare the base model with."


def _shape(arms: Sequence[Arm]) -> str:
    kinds: dict[str, list[str]] = {}
    numbers = []
    left = 0
    for arm in arms:
        portion, reach = arm.share, arm.reach
        if portion is None or not finite(portion["value"]):
            continue
        left = portion["left"]
        low, high = portion.get("value_low"), portion.get("value_high")
        if finite(high) and high is not None and high < FLAT:
            kind = "flat until the training length is reached, then sharp, as the paper's GLA"
        elif finite(low) and low is not None and low > DEEP:
            kind = "no flat stretch, most of the distance is there before the training length is reached"
        else:
            kind = "neither flat until the training length nor mostly beyond it, as far as these texts tell"
        kinds.setdefault(kind, []).append(arm.label)
        number = f"{arm.label} {share(portion['value'])} ({between(portion, 'value', share) or NO_INTERVAL})"
        if reach is not None and finite(reach["value"]):
            number += f", half with {count(reach['value'])} left ({between(reach, 'value', count) or NO_INTERVAL})"
        numbers.append(number)
    if not numbers:
        return ""
    told = ". ".join(f"{_capital(listing(labels))}: {kind}" for kind, labels in kinds.items())
    return f"{told}. Of the distance with x_T alone is there with {left:,} tokens left: {'; '.join(numbers)}."


NAMES = {
    "total_variation": "total variation",
    "jensen_shannon": "Jensen–Shannon divergence",
    "jensen_shannon_distance": "Jensen–Shannon distance",
    "cosine_distance": "1 − cosine",
}


def _distances(arms: Sequence[Arm]) -> str:
    """Whether the distances agree: on the direction of each arm's difference, and on the order of the arms."""
    sentences = []
    for arm in arms[1:]:
        signs = {name: _sign(arm.far.get((name, "base"))) for name in NAMES}
        if len(set(signs.values())) == 1:
            sign = next(iter(signs.values()))
            words = (
                f"far out all say {_WORDS[sign]} than the base" if sign else "far out none establishes a difference to the base"
            )
            sentences.append(f"{_capital(arm.label)}: {words}.")
        else:
            groups: dict[str, list[str]] = {}
            for name, sign in signs.items():
                groups.setdefault(f"{_WORDS[sign]} than the base" if sign else "no difference established", []).append(
                    NAMES[name]
                )
            told = "; ".join(f"{listing(names)}: {words}" for words, names in groups.items())
            sentences.append(f"{_capital(arm.label)}: they disagree ({told}).")
    orders = set()
    for name in NAMES:
        rows = [(arm.far.get((name, "")), arm.label) for arm in arms]
        known = [(row["value"], label) for row, label in rows if row is not None and finite(row["value"])]
        orders.add(tuple(label for _, label in sorted(known)))
    if len(arms) > 1:
        first = sorted(orders)[0]
        sentences.append(
            f"All order the arms alike far out, from the least distance to the most: {', '.join(first)}."
            if len(orders) == 1
            else "They do not order the arms alike."
        )
    return " ".join(sentences)


def _capital(words: str) -> str:
    return words if words.startswith("TBTT") else words[:1].upper() + words[1:]


def certainty(interval: str, seeds: Sequence[int]) -> str:
    """What the brackets are, and what they leave out. `seeds`: numbers of seeds behind the arms other than the base."""
    said = f"Numbers in brackets: {interval}."
    if not seeds:
        return said
    if max(seeds) == 1:
        return f"{said} One post-training seed: how much another training run would differ is not in them."
    number = count(min(seeds)) if min(seeds) == max(seeds) else f"{count(min(seeds))} to {count(max(seeds))}"
    return f"{said} Values are means over {number} post-training seeds; the spread between seeds is not in the brackets."


def comparisons(rows: Sequence[Row], confidence: float) -> str:
    """How many intervals are read one by one, and what holds at once."""
    if not rows:
        return ""
    missed = f"{(1.0 - confidence) * len(rows):.2g}"
    return (
        f"Many comparisons: {count(len(rows))} differences far out are read here, each with an interval of its own and corrected for nothing; at "
        f"{100 * confidence:g} % each, up to {missed} of them are expected to miss. Only “where along the text” rests on bands that hold for all start "
        "points of a curve at once, each for one arm of one model: the mean over last positions where it exists, behind it the single prediction."
    )
