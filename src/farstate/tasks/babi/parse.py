"""Reading bAbI's own files: numbered sentences, and questions with their answer and the numbers of their supporting facts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farstate.errors import FarstateError

_LINE = re.compile(r"([1-9]\d*) (.+)")


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a story.

    Attributes:
        story: number of the story in the file, from 0.
        facts: the sentences told before the question; questions of the story are none of them.
        question: with its question mark.
        answer: as the file spells it.
        supporting: indices into `facts` of those that justify the answer, in the file's order.
    """

    story: int
    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]


def questions(lines: Iterable[str], where: str) -> Iterator[Question]:
    """The questions of a file in bAbI's format, in order.

    A line is `ID sentence` or `ID question<tab>answer<tab>IDs of supporting facts`; IDs count from 1, and a 1 starts the next
    story.

    Args:
        lines: the file's lines, with or without their ends.
        where: the file's name, for messages.

    Raises:
        FarstateError: a line is not of this form, its number does not follow, or a supporting fact is none of the story's sentences.
    """
    story = -1
    expected = 1
    facts: list[str] = []
    places: dict[int, int] = {}
    for row, line in enumerate(lines, start=1):
        here = f"{where} line {row}"
        found = _LINE.fullmatch(line.rstrip("\r\n"))
        if found is None:
            raise FarstateError(f"{here}: a number from 1 on, a space and a sentence are expected, found '{line.strip()[:60]}'")
        number, text = int(found[1]), found[2]
        if number == 1:
            story, facts, places, expected = story + 1, [], {}, 1
        if number != expected:
            raise FarstateError(f"{here}: is numbered {number}, expected {expected}, or 1 where a story begins")
        expected += 1
        fields = [field.strip() for field in text.split("\t")]
        if len(fields) == 1:
            places[number] = len(facts)
            facts.append(fields[0])
            continue
        if len(fields) != 3 or not all(fields):
            raise FarstateError(f"{here}: a question, its answer and its supporting facts are expected, with tabs between them")
        try:
            supporting = tuple(places[int(each)] for each in fields[2].split())
        except (ValueError, KeyError):
            raise FarstateError(f"{here}: supporting facts '{fields[2]}' are not all numbers of sentences of the story") from None
        yield Question(story, tuple(facts), fields[0], fields[1], supporting)
