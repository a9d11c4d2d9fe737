"""Answers of the bAbI tasks: their labels, how often a guess is right, and the two public ways to score a generated answer.

A *label* is a word that answers a task's questions. An answer of qa8 is a list of labels with commas between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from farstate.errors import FarstateError, nearest

_PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
_LABELS = {
    "qa1": _PLACES,
    "qa2": _PLACES,
    "qa3": _PLACES,
    "qa4": _PLACES,
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
    "qa6": ("no", "yes"),
    "qa7": ("none", "one", "three", "two"),
    "qa8": ("apple", "football", "milk", "nothing"),
    "qa9": ("no", "yes"),
    "qa10": ("maybe", "no", "yes"),
}
TASKS = tuple(_LABELS)

# qa8: nothing, or one, two or three of three objects, in whatever order.
_SETS_OF_OBJECTS = 8


@dataclass(frozen=True, slots=True)
class Chance:
    """How often a guess that reads nothing is right.

    Attributes:
        uniform: one over the number of answers (lists in another order are the same answer).
        majority: share of the most frequent answer; None where no counts are given.
    """

    uniform: float
    majority: float | None


def check_task(task: str) -> None:
    """
    Raises:
        FarstateError: the task is none of qa1 – qa10.
    """
    if task not in _LABELS:
        raise FarstateError(f"bAbI task '{task}': unknown{nearest(task, TASKS)}; known: {', '.join(TASKS)}")


def labels(task: str) -> tuple[str, ...]:
    """The labels of the task, in alphabetical order, capitals first.

    Raises:
        FarstateError: the task is unknown.
    """
    check_task(task)
    return _LABELS[task]


def chance(task: str, counts: Mapping[str, int] | None = None) -> Chance:
    """The chance level of the task.

    Args:
        counts: how many examples have each answer.

    Raises:
        FarstateError: the task is unknown.
    """
    uniform = 1 / (_SETS_OF_OBJECTS if task == "qa8" else len(labels(task)))
    if not counts:
        return Chance(uniform, None)
    merged: dict[frozenset[str], int] = {}
    for answer, count in counts.items():
        merged[_parts(answer)] = merged.get(_parts(answer), 0) + count
    return Chance(uniform, max(merged.values()) / sum(merged.values()))


def strict(generated: str, label: str, labels: Iterable[str]) -> bool:
    """Whether the first sentence of the generated text names the right label and no other one of the task.

    The first sentence ends at the first full stop, or with the text. Labels are looked for as whole words, in any case; one may be
    named repeatedly. A list of labels (qa8) is compared as a set: the sentence names all of its labels and no other one.

    BABILong's own scorer (`compare_answers` in its `metrics.py`) also takes the first sentence of the lower-cased text and demands
    one label. It differs in four ways. It finds labels inside words: "not" counts as "no", and "none" as "one" too, so that "none" is
    never right there. It first drops labels that the question names, so that an answer which repeats the question is not wrong for that. It
    cuts at marks of chat prompts (`<context>`, `<example>`), which no prompt of ours has. And it has no labels for qa8.

    Args:
        generated: the text after the prompt, at least its first sentence.
        label: the right answer.
        labels: all labels of the task.
    """
    sentence = generated.partition(".")[0].lower()
    named = {each.lower() for each in labels if re.search(rf"\b{re.escape(each.lower())}\b", sentence)}
    return named == _parts(label)


def lenient(generated: str, label: str) -> bool:
    """Whether the right answer occurs, in any case and be it inside a word, in the text of the first 16 generated tokens.

    Args:
        generated: the decoded text of those tokens.
        label: the right answer; a list of labels (qa8) as it is spelled.
    """
    return label.lower() in generated.lower()


def _parts(answer: str) -> frozenset[str]:
    return frozenset(answer.lower().split(","))
