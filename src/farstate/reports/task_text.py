"""What the tables of the long-context tasks say, as sentences: only from values and intervals that the comparison computed.

A direction is claimed where an interval excludes zero, and the one over seeds too where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farstate.reports.text import NO_INTERVAL, NONE, Finding, Row, between, count, direction, finite, listing

PROMPTINGS = {
    "few_shot": "few-shot",
    "zero_shot": "zero-shot",
    "fine_tuned": "fine-tuned on the task",
    "trained": "trained on the task",
}
"""How a model comes to answer, in words."""

Place = tuple[int, float | None]
"""Length and depth."""


@dataclass(frozen=True)
class Case:
    """A model that was asked in one way.

    Attributes:
        label: of the model, for readers.
        arms: name → label of what was asked, the base model first where it is among them.
        train_length: of its training; what is longer lies beyond it.
        rows: over all seeds, by arm, score, the arm it is compared with ("" for the value itself), length and depth.
        frequent: the share of the task's most frequent answer, where it is known.
    """

    label: str
    arms: Mapping[str, str]
    train_length: int
    rows: Mapping[tuple[str, str, str, int, float | None], Row]
    frequent: float | None = None

    def above_chance(self, arm: str, score: str, place: Place) -> bool:
        """Whether a value's interval lies above guessing, and above giving the most frequent answer always."""
        row = self.at(arm, score, place)
        if row is None or not finite(row["low"]) or not finite(row["chance"]):
            return False
        return bool(row["low"] > max(row["chance"], self.frequent or 0.0))

    def at(self, arm: str, score: str, place: Place, against: str = "") -> Row | None:
        return self.rows.get((arm, score, against, *place))

    def places(self, score: str) -> list[Place]:
        """Where anything was measured, by length and depth."""
        found = {key[3:] for key in self.rows if key[1] == score and key[2] == ""}
        return sorted(found, key=lambda place: (place[0], -1.0 if place[1] is None else place[1]))

    def inside(self, score: str) -> list[Place]:
        return [place for place in self.places(score) if self._reaches(place) <= self.train_length]

    def beyond(self, score: str) -> list[Place]:
        return [place for place in self.places(score) if self._reaches(place) > self.train_length]

    def _reaches(self, place: Place) -> float:
        """How far prompts reach, in the unit of the training length; a published set's name says it in other tokens than the model's."""
        at = [row for key, row in self.rows.items() if key[3:] == place]
        if any(row["task"] == "copying" for row in at):
            return place[0]
        return max((row["measured"] for row in at if finite(row["measured"])), default=place[0])


@dataclass(frozen=True)
class Tally:
    """How many differences to an arm were read, and how many are above or below zero for certain."""

    read: int
    above: int
    below: int


def accuracy(value: Any) -> str:
    """`0.97`; three digits below a tenth, `0.007`; a dash when there is no number."""
    return _written(value, "")


def signed(value: Any) -> str:
    """A difference of accuracies: `+0.15`, `−0.012`."""
    return _written(value, "+")


def _written(value: Any, sign: str) -> str:
    if not finite(value):
        return NONE
    digits = 3 if 0 < abs(value) < 0.0995 else 2
    written = f"{value:{sign}.{digits}f}"
    if float(written) == 0:
        written = "0.00"
    return written.replace("-", "−")


def estimate(row: Row | None) -> str:
    """A value with its interval in brackets."""
    return _with_interval(row, accuracy)


def difference(row: Row | None) -> str:
    """A difference with its interval in brackets."""
    return _with_interval(row, signed)


def _with_interval(row: Row | None, write: Callable[[Any], str]) -> str:
    if row is None or not finite(row["value"]):
        return "not measured"
    return f"{write(row['value'])} ({between(row, 'value', write) or NO_INTERVAL})"


def sign(row: Row | None) -> int | None:
    """+1 or −1 where the interval of a difference excludes zero, over seeds too where that is known; else 0, or None without an interval."""
    if row is None or not finite(row["value"]):
        return None
    found = direction(row, "value")
    over_seeds = direction(row, "value_seeds")
    return found if over_seeds is None or found == over_seeds else 0


def tally(case: Case, arm: str, other: str, score: str, places: Iterable[Place]) -> Tally:
    """Differences of `arm` to `other` at `places`, by what their intervals say."""
    signs = [sign(case.at(arm, score, place, other)) for place in places]
    known = [each for each in signs if each is not None]
    return Tally(len(known), known.count(1), known.count(-1))


def at_length(length: int, unit: str = "tokens") -> str:
    return f"at {length:,} {unit}" if length else "without background text"


def _label(case: Case, arm: str) -> str:
    return "the base model" if arm == "base" else case.arms[arm]


def _capital(words: str) -> str:
    return words if words.startswith("TBTT") else words[:1].upper() + words[1:]


def _times(number: int, of: int, what: str, word: str = "at") -> str:
    """`at all 4 lengths`, `in 3 of 4 cells`, `at none of the 4 lengths`."""
    if number == 0:
        return f"{word} none of the {of} {what}"
    return f"{word} all {of} {what}" if number == of else f"{word} {number} of {of} {what}"


def _verdict(case: Case, arm: str, other: str, score: str, places: Sequence[Place], what: str, word: str = "at") -> str:
    """`above it at 3 of 5 lengths`, with what points the other way; an empty string where nothing was compared."""
    found = tally(case, arm, other, score, places)
    if not found.read:
        return ""
    if found.above and found.below:
        return f"above it {_times(found.above, found.read, what, word)}, below it {word} {found.below}"
    if found.below:
        return f"below it {_times(found.below, found.read, what, word)}, above it {word} none"
    return f"above it {_times(found.above, found.read, what, word)}"


# BABILong --------------------------------------------------------------------------------------------------


def babilong_headline(case: Case, prompting: str, tasks: str) -> str:
    """What a model answers inside and beyond its training length, and what the arms change, in a sentence."""
    who = f"{case.label}, {PROMPTINGS[prompting]}"
    inside, beyond = case.inside("strict"), case.beyond("strict")
    first = next(iter(case.arms), None)
    if first is None:
        return f"{who}: nothing was measured."
    learnt = True
    said = f"{who}: no length inside the training length was asked"
    if inside:
        learnt = case.above_chance(first, "strict", inside[-1])
        guesses = _guesses(case, case.at(first, "strict", inside[-1]))
        said = (
            f"{who}: {_label(case, first)} answers {estimate(case.at(first, 'strict', inside[-1]))} of the questions right "
            f"{at_length(inside[-1][0])} ({tasks}{guesses}){'' if learnt else ', not above chance for certain'}"
        )
    if not beyond:
        return f"{said}; beyond the training length nothing was asked."
    said += f", and {estimate(case.at(first, 'strict', beyond[-1]))} {at_length(beyond[-1][0])}"
    others = [arm for arm in case.arms if arm not in (first, "control")]
    parts = []
    for arm in others:
        found, control = (tally(case, arm, other, "strict", beyond) for other in (first, "control"))
        if found.read:
            words = f"{case.arms[arm]} is above it at {_of(found.above, found.read)}"
            words += f" and below at {found.below}" if found.below else ""
            parts.append(words + (f" (above the control at {_of(control.above, control.read)})" if control.read else ""))
    number = len(beyond)
    said += f". Of the {number} length{'s' * (number != 1)} beyond the training length, {', '.join(parts)}." if parts else "."
    if not learnt:
        said += " A model that answers no better than chance inside its training length has nothing to lose beyond it."
    elif parts and not any(tally(case, arm, first, "strict", beyond).above for arm in others):
        said += " That other initial states carry facts farther, as in the paper, does not appear here."
    return said


def _of(number: int, of: int) -> str:
    return "none" if number == 0 else "all" if number == of and of > 1 else f"{number}"


def _guesses(case: Case, row: Row | None) -> str:
    """What is right without reading, in words that go on in brackets."""
    words = f", chance {accuracy(row['chance'])}" if row is not None and finite(row["chance"]) else ""
    return words + (f", always the most frequent answer {accuracy(case.frequent)}" if case.frequent is not None else "")


def babilong_findings(case: Case, by_task: Mapping[str, Case], *, has_control: bool) -> list[Finding]:
    """The paragraphs under the headline; `by_task`: the same for single tasks."""
    inside, beyond = case.inside("strict"), case.beyond("strict")
    found = []
    if inside:
        values = [f"{_label(case, arm)} {estimate(case.at(arm, 'strict', inside[-1]))}" for arm in case.arms]
        found.append(Finding(f"Inside the training length, {at_length(inside[-1][0])}.", f"{_capital(listing(values))}."))
    if beyond:
        sentences = []
        for arm in case.arms:
            sentence = f"{_capital(_label(case, arm))} {estimate(case.at(arm, 'strict', beyond[-1]))}"
            for other in ("base", "control"):
                row = case.at(arm, "strict", beyond[-1], other)
                if row is not None and arm != "base":
                    sentence += f", {difference(row)} against the {other}"
            sentences.append(f"{sentence}.")
        if not has_control and len(case.arms) > 1:
            sentences.append("Without a zero-init control none of it can be credited to the initial state.")
        found.append(Finding(f"Farthest, {at_length(beyond[-1][0])}.", " ".join(sentences)))
    if by_task:
        found.append(Finding("By task.", _by_task(case, by_task)))
    if any(key[1] == "lenient" for key in case.rows):
        found.append(Finding("The two scorers.", _scorers(case)))
    return found


def _by_task(case: Case, by_task: Mapping[str, Case]) -> str:
    """Which tasks are answered better than by guessing, by the first arm inside its training length and by all arms at the end."""
    first = next(iter(case.arms))
    sentences = []
    for place in case.inside("strict")[-1:]:
        known = {task: row for task, one in by_task.items() if (row := one.at(first, "strict", place)) is not None}
        above = [task for task in known if by_task[task].above_chance(first, "strict", place)]
        words = listing([f"{task} {accuracy(known[task]['value'])}" for task in above]) or "no task"
        rest = [task for task in known if task not in above]
        sentences.append(
            f"Above chance for certain {at_length(place[0])}, {_label(case, first)}: {words}"
            + (f"; not {', '.join(rest)}." if above and rest else ".")
        )
    for place in case.beyond("strict")[-1:]:
        parts, none = [], []
        for arm in case.arms:
            above = [task for task, one in by_task.items() if one.above_chance(arm, "strict", place)]
            if above:
                parts.append(f"{_label(case, arm)} in {', '.join(above)}")
            else:
                none.append(_label(case, arm))
        if none:
            parts.append(f"{listing(none)} in none")
        sentences.append(f"{_capital(at_length(place[0]))}: {'; '.join(parts)}.")
    return " ".join(sentences)


def _scorers(case: Case) -> str:
    """The lenient scorer's values, and whether it says the same of the differences."""
    sentences = []
    for place in [*case.inside("lenient")[-1:], *case.beyond("lenient")[-1:]]:
        values = [
            f"{_label(case, arm)} {accuracy(row['value'])}"
            for arm in case.arms
            if (row := case.at(arm, "lenient", place)) is not None
        ]
        if values:
            sentences.append(f"By the lenient one, {at_length(place[0])}: {listing(values)}.")
    signs = [
        (sign(strict), sign(lenient))
        for arm in case.arms
        for place in case.beyond("strict")
        if (strict := case.at(arm, "strict", place, "base")) is not None
        and (lenient := case.at(arm, "lenient", place, "base")) is not None
    ]
    if signs:
        other = sum(one != two for one, two in signs)
        sentences.append(
            "Beyond the training length both say the same of every difference to the base."
            if not other
            else f"Of {count(len(signs))} differences to the base beyond the training length they judge {count(other)} differently."
        )
    return " ".join(sentences)


# Passkey ---------------------------------------------------------------------------------------------------


def passkey_headline(case: Case) -> str:
    """Where the key is found by the plainly fine-tuned model, and what other initial states change, in a sentence."""
    plain = "control" if "control" in case.arms else next(iter(case.arms), None)
    if plain is None:
        return f"{case.label}: nothing was measured."
    inside, beyond = case.inside("exact"), case.beyond("exact")
    asked = [place for place in inside if case.at(plain, "exact", place) is not None]
    learnt = bool(asked) and all(case.above_chance(plain, "exact", place) for place in asked)
    said = f"{case.label}: {case.arms[plain]} tells {_range(case, plain, inside)} of the keys inside the training length"
    if not inside:
        said = f"{case.label}: no length inside the training length was asked"
    elif not learnt:
        said += ", not everywhere above chance"
    if not beyond:
        return f"{said}; beyond it nothing was asked."
    said += f" and {_range(case, plain, beyond)} in the {count(len(beyond))} cells beyond it"
    parts = []
    others = [arm for arm in case.arms if arm not in ("base", plain)]
    for arm in others:
        if words := _verdict(case, arm, plain, "exact", beyond, "cells there", "in"):
            parts.append(f"{case.arms[arm]} is {words}")
    said += f"; {', and '.join(parts)}." if parts else "."
    if not learnt:
        said += " Where the task is not learnt inside the training length, what lies beyond it says nothing."
    elif parts and not any(tally(case, arm, plain, "exact", beyond).above for arm in others):
        said += " That other initial states carry the key farther, as in the paper, does not appear here."
    return said


def passkey_findings(case: Case) -> list[Finding]:
    """The paragraphs under the headline."""
    inside, beyond = case.inside("exact"), case.beyond("exact")
    found = []
    if "base" in case.arms:
        where = [
            f"{_range(case, 'base', places)} {words}"
            for words, places in (("inside the training length", inside), ("beyond it", beyond))
            if places
        ]
        certain = [place for place in (*inside, *beyond) if case.above_chance("base", "exact", place)]
        found.append(
            Finding(
                "Without training on the task.",
                f"The base model tells {' and '.join(where)}: above chance for certain in {count(len(certain))} of "
                f"{count(len(inside) + len(beyond))} cells.",
            )
        )
    reach = []
    for arm, label in case.arms.items():
        whole = _reach(case, arm)
        reach.append(f"{label} {f'to {whole:,} tokens' if whole else 'at no length'}")
    found.append(Finding("At every depth above chance for certain, and at all shorter lengths,", f"{'; '.join(reach)}."))
    sentences = []
    for arm, label in case.arms.items():
        other = "base" if arm == "control" else "control"
        if arm != "base":
            cells = tally(case, arm, other, "exact", beyond)
            if cells.read:
                name = "the base model" if other == "base" else case.arms.get(other, other)
                sentences.append(
                    f"{_capital(label)} minus {name}: above zero for certain in {count(cells.above)}, below in {count(cells.below)} of "
                    f"{count(cells.read)} cells."
                )
    if sentences:
        found.append(Finding("Beyond the training length.", " ".join(sentences)))
    digits = [
        f"{label} {_range(case, arm, case.beyond('characters'), 'characters')}"
        for arm, label in case.arms.items()
        if case.beyond("characters")
    ]
    if digits:
        found.append(
            Finding("Single digits beyond it.", f"Right, where a guess is right about once in ten: {'; '.join(digits)}.")
        )
    return found


def passkey_zero_shot(case: Case) -> list[str]:
    """Sentences about models that were asked as they are; one that answers at no length is said to tell nothing."""
    certain = {arm: [place for place in case.places("exact") if case.above_chance(arm, "exact", place)] for arm in case.arms}
    if not any(certain.values()):
        who = case.label if len(case.arms) == 1 else "none of the models"
        told = _range(case, next(iter(case.arms)), case.places("exact"))
        return [
            f"{case.label} tells {told} of the keys, at no length above chance for certain: it does not take up the question, so this says "
            "nothing about what its state carries. Small models and models that were never given questions do so."
            if len(case.arms) == 1
            else f"{case.label}: {who} tells a key above chance for certain at any length, so this says nothing about what their states carry."
        ]
    found = []
    for arm, label in case.arms.items():
        reached, count_of = _reach(case, arm), len(certain[arm])
        whole = f"at every depth above chance to {reached:,} tokens" if reached else "at no length above chance at every depth"
        inside = _range(case, arm, case.inside("exact")) if case.inside("exact") else "not asked"
        beyond = _range(case, arm, case.beyond("exact")) if case.beyond("exact") else "not asked"
        found.append(
            f"{_capital(label)}: {whole} ({count(count_of)} of {count(len(case.places('exact')))} cells); inside the training length "
            f"{inside}, beyond it {beyond}."
        )
    return found


def _range(case: Case, arm: str, places: Sequence[Place], score: str = "exact") -> str:
    """The lowest and highest value at `places`."""
    values = [row["value"] for place in places if (row := case.at(arm, score, place)) is not None and finite(row["value"])]
    if not values:
        return "no known share"
    low, high = accuracy(min(values)), accuracy(max(values))
    return low if low == high else f"{low} to {high}"


def _reach(case: Case, arm: str) -> int:
    """The longest length at which, as at all shorter ones, every depth is above chance for certain; 0: there is none."""
    reached = 0
    places = case.places("exact")
    for length in dict.fromkeys(length for length, _ in places):
        asked = [place for place in places if place[0] == length and case.at(arm, "exact", place) is not None]
        if not asked or not all(case.above_chance(arm, "exact", place) for place in asked):
            break
        reached = length
    return reached


# Copying ---------------------------------------------------------------------------------------------------


def copying_headline(case: Case) -> str:
    """What is copied of strings inside and beyond the trained lengths, and what the initial states change, in a sentence."""
    plain = "control" if "control" in case.arms else next(iter(case.arms), None)
    if plain is None:
        return f"{case.label}: nothing was measured."
    inside, beyond = case.inside("characters"), case.beyond("characters")
    said, learnt = case.label, False
    if inside:
        row = case.at(plain, "characters", inside[-1])
        learnt = case.above_chance(plain, "characters", inside[-1])
        said += f": of strings of {inside[-1][0]:,} letters, trained to {case.train_length:,}, {case.arms[plain]} copies {estimate(row)} of the letters right"
        if not learnt:
            said += ", not above chance for certain"
    if not beyond:
        return f"{said}; no longer ones were asked."
    said += f"{', and' if inside else ':'} {estimate(case.at(plain, 'characters', beyond[-1]))} of those of {beyond[-1][0]:,}"
    others = [arm for arm in case.arms if arm != plain]
    if not others:
        return f"{said}. No other initial state was tried."
    parts = []
    for arm in others:
        row = case.at(arm, "characters", beyond[-1], plain)
        words = {
            1: "the difference is above zero",
            -1: "the difference is below zero",
            0: "no difference is established",
            None: "without an interval nothing is established",
        }[sign(row)]
        parts.append(
            f"{case.arms[arm]} {estimate(case.at(arm, 'characters', beyond[-1]))} there, {difference(row)} against it: {words}"
        )
    said += f"; {'; '.join(parts)}."
    gains = [tally(case, arm, plain, "characters", beyond).above for arm in others]
    if inside and not learnt:
        said += " Where copying is not learnt inside the trained lengths, what lies beyond them says nothing."
    elif learnt and not any(gains):
        said += " That passed states let longer strings be copied, as in the paper, does not appear here, at any length."
    return said


def copying_findings(case: Case) -> list[Finding]:
    """The paragraphs under the headline."""
    plain = "control" if "control" in case.arms else next(iter(case.arms), "")
    found = []
    for length, _ in case.beyond("characters"):
        sentences = []
        for arm, label in case.arms.items():
            values = [
                f"{words} {accuracy(row['value'])}"
                for score, words in (
                    ("characters", "free-running"),
                    ("characters_forced", "teacher-forced"),
                    ("exact", "whole strings"),
                )
                if (row := case.at(arm, score, (length, None))) is not None
            ]
            sentence = f"{_capital(label)}: {', '.join(values)}"
            row = case.at(arm, "characters", (length, None), plain)
            if row is not None and arm != plain:
                sentence += f"; free-running {difference(row)} against {case.arms[plain]}"
                over = between(row, "value_seeds", signed)
                sentence += f", over seeds {over}" if over else ""
            sentences.append(f"{sentence}.")
        found.append(Finding(f"{length:,} letters.", " ".join(sentences)))
    return found


# All -------------------------------------------------------------------------------------------------------


def certainty(interval: str, difference_interval: str, seeds: Sequence[int]) -> str:
    """What the brackets are, and what they leave out. `seeds`: numbers of seeds behind the arms that were trained further."""
    same = f"; of differences: {difference_interval}" if difference_interval != interval else ""
    said = f"Numbers in brackets: {interval}{same}."
    if not seeds:
        return said
    if max(seeds) == 1:
        return f"{said} One training seed: how much another training run would differ is not in them."
    number = count(min(seeds)) if min(seeds) == max(seeds) else f"{count(min(seeds))} to {count(max(seeds))}"
    spread = (
        "where an interval over seeds (Student's t) is given, a direction is claimed only if that excludes zero too"
        if max(seeds) > 2
        else "the spread between seeds is not in the brackets"
    )
    return f"{said} Values are means over {number} training seeds; {spread}."


def comparisons(number: int, confidence: float) -> str:
    """How many differences are read one by one."""
    if not number:
        return ""
    missed = f"{(1.0 - confidence) * number:.2g}"
    return (
        f"Many comparisons: {count(number)} differences are read here, each with an interval of its own and corrected for nothing; at "
        f"{100 * confidence:g} % each, up to {missed} of them are expected to miss. A few that point one way, among many that do not, may be luck."
    )
