"""Answers to questions of bAbI, tasks qa1 – qa10, by keeping track of what each sentence says.

This is the check on the simulator in `world`, and shares nothing with it: no sentence, no word, no state. It knows the
verbs; names of persons, places and objects are whatever stands in their place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

from farstate.errors import FarstateError, nearest


@dataclass(frozen=True, slots=True)
class Solution:
    """An answer, and the facts that justify it: their numbers in the story from 0, in bAbI's order (see each task's rule)."""

    answer: str
    supporting: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Event:
    """What one sentence says: its kind, and the names in it in the order in which the kind's pattern asks for them."""

    kind: str
    names: tuple[str, ...]


_PERSON = r"([A-Z][a-z]+)"
_THING = r"the ([a-z]+)"
_SENTENCES = {
    "move": rf"{_PERSON} (?:(?:went|went back|moved|travelled|journeyed) to) {_THING}",
    "take": rf"{_PERSON} (?:got|took|grabbed|picked up) {_THING}(?: there)?",
    "drop": rf"{_PERSON} (?:dropped|left|discarded|put down) {_THING}(?: there)?",
    "give": rf"{_PERSON} (?:gave|handed|passed) {_THING} to {_PERSON}",
    "inside": rf"{_PERSON} is in {_THING}",
    "outside": rf"{_PERSON} is (?:not|no longer) in {_THING}",
    "either": rf"{_PERSON} is either in {_THING} or {_THING}",
    "relation": rf"The ([a-z]+) is (north|south|east|west) of {_THING}",
}
_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_NUMBERS = ("none", "one", "two", "three", "four", "five", "six")


def solve(task: str, facts: Sequence[str], question: str) -> Solution:
    """The answer to `question` after `facts`, and the facts that justify it.

    Args:
        task: "qa1" … "qa10".
        facts: sentences, each with its full stop, in the order told.
        question: with its question mark.

    Raises:
        FarstateError: the task is unknown, a sentence or the question is none of bAbI's, or the facts leave the answer open.
    """
    if task not in _QUESTIONS:
        raise FarstateError(f"bAbI task '{task}': unknown{nearest(task, _QUESTIONS)}; known: {', '.join(_QUESTIONS)}")
    events = [_parse(sentence) for sentence in facts]
    for pattern, rule in _QUESTIONS[task]:
        if found := re.fullmatch(rf"{pattern}\?", question.strip()):
            solution = rule(events, *found.groups())
            if solution is None:
                raise FarstateError(f"bAbI {task}: the story does not tell '{question.strip()}'; {len(events)} facts")
            return solution
    raise FarstateError(f"bAbI {task}: '{question.strip()}' is no question of this task")


@lru_cache(maxsize=1 << 14)
def _parse(sentence: str) -> _Event:
    for kind, pattern in _SENTENCES.items():
        if found := re.fullmatch(rf"{pattern}\.", sentence.strip()):
            return _Event(kind, found.groups())
    raise FarstateError(f"bAbI: '{sentence.strip()}' is no sentence of tasks qa1 – qa10")


Rule = Callable[..., Solution | None]


def _last(events: Sequence[_Event], kinds: Iterable[str], name: str, place: int = 0, before: int | None = None) -> int | None:
    """The number of the last event of these kinds, before number `before`, with `name` in the given place."""
    for number in reversed(range(len(events) if before is None else before)):
        if events[number].kind in kinds and events[number].names[place] == name:
            return number
    return None


def _place_of_person(events: Sequence[_Event], person: str) -> Solution | None:
    """qa1. Supported by the person's last movement."""
    number = _last(events, ("move",), person)
    return None if number is None else Solution(events[number].names[1], (number,))


def _place_of_object(events: Sequence[_Event], thing: str) -> Solution | None:
    """qa2. Supported by the last taking or dropping of the object, and by the movement that says where that person is (or, once
    dropped, was)."""
    handled = _last(events, ("take", "drop"), thing, 1)
    if handled is None:
        return None
    end = len(events) if events[handled].kind == "take" else handled
    moved = _last(events, ("move",), events[handled].names[0], before=end)
    return None if moved is None else Solution(events[moved].names[1], (handled, moved))


def _place_before(events: Sequence[_Event], thing: str, place: str) -> Solution | None:
    """qa3. Supported by the last taking or dropping of the object, the movement that last brought it to `place`, and the one
    before that, to the answer."""
    path = _path(events, thing)
    handled = _last(events, ("take", "drop"), thing, 1)
    if handled is None:
        return None
    for (earlier, came), (later, went) in reversed(list(pairwise(path))):
        if later == place:
            return Solution(earlier, (handled, went, came))
    return None


def _path(events: Sequence[_Event], thing: str) -> list[tuple[str, int]]:
    """The places where the object was, one after the other, each with the movement of its holder that brought or found it there."""
    path: list[tuple[str, int]] = []
    moved: dict[str, int] = {}
    holder = None
    for number, event in enumerate(events):
        person = event.names[0]
        if event.kind == "move":
            moved[person] = number
        elif event.kind == "take" and event.names[1] == thing:
            holder = person
        elif event.kind == "drop" and event.names[1] == thing:
            holder = None
        if person == holder and person in moved:
            here = events[moved[person]].names[1]
            if not path or path[-1][0] != here:
                path.append((here, moved[person]))
    return path


def _beside(events: Sequence[_Event], *, place: str, direction: str) -> Solution | None:
    for number, event in enumerate(events):
        if event.kind == "relation":
            subject, way, other = event.names
            if (way, other) == (direction, place):
                return Solution(subject, (number,))
            if (_OPPOSITE[way], subject) == (direction, place):
                return Solution(other, (number,))
    return None


def _what_is_beside(events: Sequence[_Event], direction: str, place: str) -> Solution | None:
    """qa4, `What is north of the kitchen?` Supported by the relation between the two."""
    return _beside(events, place=place, direction=direction)


def _what_it_is_beside(events: Sequence[_Event], place: str, direction: str) -> Solution | None:
    """qa4, `What is the kitchen north of?` Supported by the relation between the two."""
    return _beside(events, place=place, direction=_OPPOSITE[direction])


def _gift(asked: int, given: tuple[int, ...]) -> Rule:
    """qa5. Supported by the last gift with the names that the question tells.

    Args:
        asked: which name of a gift (giver, object, receiver) is the answer.
        given: which ones the question tells, in its order.
    """

    def rule(events: Sequence[_Event], *names: str) -> Solution | None:
        for number in reversed(range(len(events))):
            event = events[number]
            if event.kind == "give" and tuple(event.names[place] for place in given) == names:
                return Solution(event.names[asked], (number,))
        return None

    return rule


def _whether_there(events: Sequence[_Event], person: str, place: str) -> Solution | None:
    """qa6, qa9, qa10. Supported by the last sentence on where the person is."""
    number = _last(events, ("move", "inside", "outside", "either"), person)
    if number is None:
        return None
    event = events[number]
    if event.kind == "outside" and event.names[1] != place:
        return None
    if place not in event.names[1:] or event.kind == "outside":
        return Solution("no", (number,))
    return Solution("maybe" if event.kind == "either" else "yes", (number,))


def _carried(events: Sequence[_Event], person: str) -> dict[str, list[int]]:
    """By object, in the order first had: every sentence on how the person came to have it and lost it, by turns."""
    handled: dict[str, list[int]] = {}
    for number, event in enumerate(events):
        gains = (event.kind == "take" and event.names[0] == person) or (event.kind == "give" and event.names[2] == person)
        loses = event.kind in ("drop", "give") and event.names[0] == person
        if gains or loses:
            so_far = handled.setdefault(event.names[1], [])
            if gains != (len(so_far) % 2 == 0):
                state = "already has" if gains else "does not have"
                raise FarstateError(f"bAbI: sentence {number + 1} contradicts the story, {person} {state} the {event.names[1]}")
            so_far.append(number)
    return handled


def _how_many(events: Sequence[_Event], person: str) -> Solution | None:
    """qa7. Supported by every sentence on what the person takes, drops, gives or is given, as told."""
    handled = _carried(events, person).values()
    number = sum(len(numbers) % 2 for numbers in handled)
    return Solution(_NUMBERS[number], tuple(sorted(chain(*handled)))) if handled else None


def _which(events: Sequence[_Event], person: str) -> Solution | None:
    """qa8. The answer lists objects in the order the person first had them; supported as in qa7, object by object."""
    handled = _carried(events, person)
    carried = [thing for thing, numbers in handled.items() if len(numbers) % 2]
    return Solution(",".join(carried) or "nothing", tuple(chain(*handled.values()))) if handled else None


_QUESTIONS: dict[str, tuple[tuple[str, Rule], ...]] = {
    "qa1": ((rf"Where is {_PERSON}", _place_of_person),),
    "qa2": ((rf"Where is {_THING}", _place_of_object),),
    "qa3": ((rf"Where was {_THING} before {_THING}", _place_before),),
    "qa4": (
        (rf"What is (north|south|east|west) of {_THING}", _what_is_beside),
        (rf"What is {_THING} (north|south|east|west) of", _what_it_is_beside),
    ),
    "qa5": (
        (rf"What did {_PERSON} give to {_PERSON}", _gift(1, (0, 2))),
        (rf"Who gave {_THING}", _gift(0, (1,))),
        (rf"Who gave {_THING} to {_PERSON}", _gift(0, (1, 2))),
        (rf"Who did {_PERSON} give {_THING} to", _gift(2, (0, 1))),
        (rf"Who received {_THING}", _gift(2, (1,))),
    ),
    "qa6": ((rf"Is {_PERSON} in {_THING}", _whether_there),),
    "qa7": ((rf"How many objects is {_PERSON} carrying", _how_many),),
    "qa8": ((rf"What is {_PERSON} carrying", _which),),
    "qa9": ((rf"Is {_PERSON} in {_THING}", _whether_there),),
    "qa10": ((rf"Is {_PERSON} in {_THING}", _whether_there),),
}
