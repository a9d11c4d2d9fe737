"""A simulator of bAbI's small worlds, tasks qa1 – qa10, written from the definitions of the tasks.

Persons walk between places, take, drop and hand over objects; a story tells what they do, and a question asks for something that
follows. Every person is truly somewhere from the start, told or not, and nobody acts against that: objects are taken where they lie
and given to someone who is there. Words and forms of sentences are bAbI's; so are, roughly, the shares of the kinds of sentences and
of the answers. Two things are ours. One question is asked, at the story's end, about any person or object that the story tells enough
of, where bAbI asks after every second sentence and mostly about what was told last. And in qa5 it is always about the last gift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from numpy.random import Generator

from farstate.errors import FarstateError
from farstate.tasks.labels import check_task

_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_TOWN = ("bedroom", "cinema", "kitchen", "office", "park", "school")
_OBJECTS = ("apple", "football", "milk")
_FAMILY = ("Daniel", "John", "Mary", "Sandra")
_FRIENDS = ("Bill", "Fred", "Jeff", "Mary")
_NEIGHBOURS = ("Bill", "Fred", "Julie", "Mary")
_NUMBERS = ("none", "one", "two", "three")

_MOVES = ("went to", "went back to", "moved to", "travelled to", "journeyed to")
_TAKES = ("got", "took", "grabbed", "picked up")
_DROPS = ("dropped", "left", "discarded", "put down")
_GIFTS = ("gave", "handed", "passed")
_SOMETIMES_THERE = (".", ".", ".", ".", " there.")

# The fewest and the most facts with which a task can be asked, where they are not 1 and any.
_FACTS: dict[str, tuple[int, int | None]] = {"qa2": (2, None), "qa3": (3, None), "qa4": (2, 2), "qa5": (2, None)}

# Relative frequency of what a person does next, where all of it is possible; near bAbI's counts.
_WALK = {"move": 1.0}
_CARRY = {"move": 6.0, "take": 2.0, "drop": 1.5}
_SHARE = {**_CARRY, "give": 2.5}
_ACTIONS = {"qa1": _WALK, "qa2": _CARRY, "qa3": _CARRY, "qa5": _SHARE, "qa6": _CARRY, "qa7": _SHARE, "qa8": _CARRY}

# How often a person of bAbI carries 0, 1, 2, 3 objects when asked.
_CARRIED = {"qa7": (0.47, 0.487, 0.041, 0.002), "qa8": (0.357, 0.578, 0.06, 0.005)}

_Item = TypeVar("_Item")
_Parts = tuple[Sequence[str], ...]
_FETCHED = 64


@dataclass(frozen=True, slots=True)
class Story:
    """A story and its question.

    Attributes:
        task: "qa1" … "qa10".
        facts: sentences in the order told, each with its full stop.
        question: with its question mark.
        answer: one word, or in qa8 the objects in the order the person first had them, with commas between them.
        supporting: indices of the facts that justify the answer, in the order in which bAbI names them.
    """

    task: str
    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]


def story(task: str, generator: Generator, facts: tuple[int, int]) -> Story:
    """A story of the task, with a number of facts drawn uniformly from `facts`, ends included.

    A number with which the task cannot be asked is moved to the nearest one with which it can: qa2 and qa5 need two facts, qa3
    three, and qa4 always has two.

    Args:
        task: "qa1" … "qa10".
        generator: everything is drawn from it.
        facts: (fewest, most).

    Raises:
        FarstateError: the task is unknown, or `facts` is no range of numbers from 1 on.
    """
    check_task(task)
    fewest, most = facts
    if not 1 <= fewest <= most:
        raise FarstateError(f"bAbI facts {fewest} … {most}: the fewest and the most of a story are expected, 1 ≤ fewest ≤ most")
    draws = _Draws(generator)
    least, largest = _FACTS.get(task, (1, None))
    number = max(draws.pick(range(fewest, most + 1)), least)
    number = number if largest is None else min(number, largest)
    carried = _draw_carried(draws, task, number) if task in _CARRIED else 0
    # A story may tell too little for the question; each new one tells enough with the same chance, in the worst case about 1 in 1000.
    while True:
        telling = _Telling(draws)
        if task == "qa4":
            asked: _Asked | None = _relations(telling)
        elif task in ("qa9", "qa10"):
            asked = _statements(telling, task, number)
        else:
            asked = _actions(telling, task, number, carried)
        if asked is not None:
            return Story(task, telling.worded(), asked.question, asked.answer, asked.supporting)


class _Draws:
    """Independent draws. Numbers are fetched many at a time: a story takes hundreds, and a single one is slow to fetch."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._numbers: list[float] = []

    def uniform(self) -> float:
        """In [0, 1)."""
        if not self._numbers:
            self._numbers = self._generator.random(_FETCHED).tolist()
        return self._numbers.pop()

    def pick(self, items: Sequence[_Item]) -> _Item:
        return items[int(self.uniform() * len(items))]

    def weighted(self, weights: dict[_Item, float]) -> _Item:
        """A key, drawn in proportion to its value."""
        rest = self.uniform() * sum(weights.values())
        for item, weight in weights.items():
            chosen = item
            rest -= weight
            if rest < 0:
                break
        return chosen


def _draw_carried(draws: _Draws, task: str, facts: int) -> int:
    """How many objects the person asked about shall carry: bAbI's shares, of those that so many facts can bring about."""
    return draws.weighted({count: share for count, share in enumerate(_CARRIED[task]) if facts >= (count or 2)})


@dataclass(frozen=True, slots=True)
class _Asked:
    question: str
    answer: str
    supporting: tuple[int, ...]


@dataclass(slots=True)
class _Telling:
    """The sentences so far, each as parts of which every one has variants: they are worded when the story is kept."""

    draws: _Draws
    sentences: list[_Parts] = field(default_factory=list)

    def tell(self, *parts: Sequence[str]) -> int:
        """Tell a sentence; its number."""
        self.sentences.append(parts)
        return len(self.sentences) - 1

    def worded(self) -> tuple[str, ...]:
        return tuple(
            "".join(variants[0] if len(variants) == 1 else self.draws.pick(variants) for variants in parts)
            for parts in self.sentences
        )


@dataclass(slots=True)
class _World:
    """Where everybody and everything truly is, and which sentences tell it.

    Attributes:
        place: of each person, told or not.
        arrival: by person, the last movement told.
        lies: place of each object that has been dropped. One that nobody has touched may lie anywhere.
        holder: by object, the person who has it.
        handled: by object, the last taking or dropping, and the movement that tells where it was dropped.
        path: by object, the told places where it has been, each with the movement of its holder that brought or found it there.
        had: by person, and by object in the order first had, the sentences on having it and losing it.
        gift: number, giver, object and receiver of the last gift.
    """

    place: dict[str, str]
    arrival: dict[str, int] = field(default_factory=dict)
    lies: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str] = field(default_factory=dict)
    handled: dict[str, tuple[int, int | None]] = field(default_factory=dict)
    path: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    had: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    gift: tuple[int, str, str, str] | None = None

    def held(self, person: str) -> list[str]:
        return [thing for thing in _OBJECTS if self.holder.get(thing) == person]

    def in_reach(self, person: str) -> list[str]:
        here = self.place[person]
        return [thing for thing in _OBJECTS if thing not in self.holder and self.lies.get(thing, here) == here]

    def beside(self, person: str) -> list[str]:
        return [other for other, place in self.place.items() if other != person and place == self.place[person]]

    def note(self, person: str, thing: str, number: int) -> None:
        self.had.setdefault(person, {}).setdefault(thing, []).append(number)

    def carry(self, person: str, thing: str) -> None:
        """The object is where the person is: a step of its path, if the story tells where that is."""
        if person in self.arrival:
            steps = self.path.setdefault(thing, [])
            if not steps or steps[-1][0] != self.place[person]:
                steps.append((self.place[person], self.arrival[person]))


def _actions(telling: _Telling, task: str, number: int, carried: int) -> _Asked | None:
    """qa1, qa2, qa3, qa5 – qa8: `number` actions and the question; None where they tell too little for it."""
    persons = _FRIENDS if task == "qa5" else _FAMILY
    world = _World({person: telling.draws.pick(_PLACES) for person in persons})
    for _ in range(number):
        _act(telling, world, task, telling.draws.pick(persons))
    if task == "qa2":
        return _where_is(telling, world)
    if task == "qa3":
        return _where_was(telling, world)
    if task == "qa5":
        return _gift(telling, world)
    if task in _CARRIED:
        return _carrying(telling, world, task, carried)
    if not world.arrival:
        return None
    person = telling.draws.pick(list(world.arrival))
    place, support = world.place[person], (world.arrival[person],)
    return (
        _Asked(f"Where is {person}?", place, support) if task == "qa1" else _whether(telling, person, (place,), _PLACES, support)
    )


def _act(telling: _Telling, world: _World, task: str, person: str) -> None:
    """One action, of those that the person can do."""
    held, near, others = world.held(person), world.in_reach(person), world.beside(person)
    possible = {"move": True, "take": bool(near), "drop": bool(held), "give": bool(held and others)}
    kind = telling.draws.weighted({kind: weight for kind, weight in _ACTIONS[task].items() if possible[kind]})
    if kind == "move":
        place = telling.draws.pick([place for place in _PLACES if place != world.place[person]])
        world.place[person] = place
        world.arrival[person] = telling.tell((f"{person} ",), _MOVES, (f" the {place}.",))
        for thing in held:
            world.carry(person, thing)
    elif kind == "take":
        thing = telling.draws.pick(near)
        now = telling.tell((f"{person} ",), _TAKES, (f" the {thing}",), _SOMETIMES_THERE if task == "qa3" else (" there.",))
        world.holder[thing] = person
        world.handled[thing] = (now, None)
        world.note(person, thing, now)
        world.carry(person, thing)
    elif kind == "drop":
        thing = telling.draws.pick(held)
        now = telling.tell((f"{person} ",), _DROPS, (f" the {thing}",), _SOMETIMES_THERE)
        del world.holder[thing]
        world.lies[thing] = world.place[person]
        world.handled[thing] = (now, world.arrival.get(person))
        world.note(person, thing, now)
    else:
        thing, other = telling.draws.pick(held), telling.draws.pick(others)
        now = telling.tell((f"{person} ",), _GIFTS, (f" the {thing} to {other}.",))
        world.holder[thing] = other
        world.gift = (now, person, thing, other)
        world.note(person, thing, now)
        world.note(other, thing, now)


def _where_is(telling: _Telling, world: _World) -> _Asked | None:
    """qa2."""
    told = []
    for thing, (number, dropped_at) in world.handled.items():
        holder = world.holder.get(thing)
        arrival = dropped_at if holder is None else world.arrival.get(holder)
        if arrival is not None:
            told.append((thing, world.lies[thing] if holder is None else world.place[holder], (number, arrival)))
    if not told:
        return None
    thing, place, support = telling.draws.pick(told)
    return _Asked(f"Where is the {thing}?", place, support)


def _where_was(telling: _Telling, world: _World) -> _Asked | None:
    """qa3: before the last visit to a place, of any object and place for which there was a before."""
    told: list[tuple[str, tuple[str, int], tuple[str, int]]] = []
    for thing, steps in world.path.items():
        last_visits = {place: number for number, (place, _) in enumerate(steps)}
        told.extend((thing, steps[number - 1], steps[number]) for number in last_visits.values() if number)
    if not told:
        return None
    thing, (before, came), (after, went) = telling.draws.pick(told)
    return _Asked(f"Where was the {thing} before the {after}?", before, (world.handled[thing][0], went, came))


def _gift(telling: _Telling, world: _World) -> _Asked | None:
    """qa5: the object in one question of three, giver and receiver in as many, as in bAbI."""
    if world.gift is None:
        return None
    number, giver, thing, receiver = world.gift
    what = (f"What did {giver} give to {receiver}?", thing)
    who = (
        (f"Who gave the {thing}?", giver),
        (f"Who gave the {thing} to {receiver}?", giver),
        (f"Who did {giver} give the {thing} to?", receiver),
        (f"Who received the {thing}?", receiver),
    )
    question, answer = telling.draws.pick((what, what, *who))
    return _Asked(question, answer, (number,))


def _carrying(telling: _Telling, world: _World, task: str, carried: int) -> _Asked | None:
    """qa7, qa8: of somebody who has had an object and carries `carried` now."""
    fitting = [person for person in world.had if len(world.held(person)) == carried]
    if not fitting:
        return None
    person = telling.draws.pick(fitting)
    had = world.had[person]
    support = tuple(chain(*had.values()))
    if task == "qa7":
        return _Asked(f"How many objects is {person} carrying?", _NUMBERS[carried], tuple(sorted(support)))
    things = [thing for thing in had if world.holder.get(thing) == person]
    return _Asked(f"What is {person} carrying?", ",".join(things) or "nothing", support)


def _whether(telling: _Telling, person: str, where: tuple[str, ...], places: Sequence[str], support: tuple[int, ...]) -> _Asked:
    """Whether the person is in a place, one of `where` (of which one is true) every other time."""
    if telling.draws.uniform() < 0.5:
        place, answer = telling.draws.pick(where), "yes" if len(where) == 1 else "maybe"
    else:
        place, answer = telling.draws.pick([place for place in places if place not in where]), "no"
    return _Asked(f"Is {person} in the {place}?", answer, support)


def _statements(telling: _Telling, task: str, number: int) -> _Asked:
    """qa9, qa10: `number` statements on where persons are, every other a movement, and the question whether one is somewhere."""
    persons, places = (_FAMILY, _PLACES) if task == "qa9" else (_NEIGHBOURS, _TOWN)
    last: dict[str, tuple[str, tuple[str, ...], int]] = {}
    for _ in range(number):
        person = telling.draws.pick(persons)
        before, named, _ = last.get(person, ("", (), 0))
        subject = (f"{person} ",)
        kind = telling.draws.weighted({"move": 2, "inside": 1, "outside" if task == "qa9" else "either": 1})
        # Nobody is told twice to be, or not to be, in the same place; and who was somewhere is next told to have left there.
        other_than = named if before in ("inside", kind) else ()
        place = telling.draws.pick([place for place in places if place not in other_than])
        if kind == "outside":
            place = named[0] if before == "inside" else place
            now = telling.tell(subject, ("is not in", "is no longer in"), (f" the {place}.",))
            last[person] = ("outside", (place,), now)
        elif kind == "either":
            other = telling.draws.pick([other for other in places if other != place])
            now = telling.tell(subject, (f"is either in the {place} or the {other}.",))
            last[person] = ("either", (place, other), now)
        else:
            now = telling.tell(subject, _MOVES if kind == "move" else ("is in",), (f" the {place}.",))
            last[person] = ("inside", (place,), now)
    person = telling.draws.pick(list(last))
    kind, named, now = last[person]
    if kind == "outside":
        return _Asked(f"Is {person} in the {named[0]}?", "no", (now,))
    return _whether(telling, person, named, places, (now,))


def _relations(telling: _Telling) -> _Asked:
    """qa4: three places in a row, told by two relations, each from either end."""
    way, opposite = telling.draws.pick((("north", "south"), ("east", "west")))
    middle = telling.draws.pick(_PLACES)
    first = telling.draws.pick([place for place in _PLACES if place != middle])
    last = telling.draws.pick([place for place in _PLACES if place not in (first, middle)])
    pairs = [(first, middle), (middle, last)] if telling.draws.uniform() < 0.5 else [(middle, last), (first, middle)]
    for near, far in pairs:
        telling.tell((f"The {near} is {way} of the {far}.", f"The {far} is {opposite} of the {near}."))
    number = telling.draws.pick((0, 1))
    near, far = pairs[number]
    # bAbI names the place in the middle in two questions of three.
    names_near = (near == middle) == (telling.draws.uniform() < 2 / 3)
    if names_near:
        question = telling.draws.pick((f"What is {opposite} of the {near}?", f"What is the {near} {way} of?"))
    else:
        question = telling.draws.pick((f"What is {way} of the {far}?", f"What is the {far} {opposite} of?"))
    return _Asked(question, far if names_near else near, (number,))
