"""BABILong: the facts of a bAbI story hidden in background text, and a question about them at the end.

    {solved stories}{background, with facts between its sentences}{ question Answer:}

and the answer is ` label.`. Every part is in the model's own tokens. Facts and questions are tokenised one by one, with the space
before them: tokenizers that cut at spaces, as all byte-level ones do, write the joined text no other way, so that the tokens of an
inserted part are those of the whole text. It does not hold of the background alone: cut to an exact number of tokens, it may end with
half a word, and where it goes on with another document the two meet without a space.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np

from farstate.errors import FarstateError
from farstate.params import PublishedBabilong
from farstate.tasks.babi.world import Story, story
from farstate.tasks.examples import Cell, Example, Tokens, draws
from farstate.tasks.labels import labels
from farstate.tasks.passkey import end_of_answer
from farstate.tasks.published import published

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from farstate.tasks.background import Background

_TRIES = 100
# Solved stories have the fewest facts that are allowed, or so many more.
_SHOT_FACTS = 2


@dataclass(frozen=True, eq=False)
class _Told:
    """A story in tokens."""

    story: Story
    facts: list[Tokens]
    question: Tokens
    answer: Tokens

    @property
    def size(self) -> int:
        """Tokens of facts and question."""
        return sum(fact.size for fact in self.facts) + self.question.size


class Babilong:
    """Makes stories hidden in text.

    The story of an example is drawn from (seed, split, task, number): the same at every length, so that lengths compare. Background
    and places are drawn for each length. Where a length is too short for some stories, the first that fits is taken.

    Args:
        tokenizer: the model's own.
        background: held-out text (in training: the training split's).
        facts: fewest and most facts of a story.
        shots: solved stories before the text, counted in the length.
        split_labels: whether a label that the tokenizer writes in several tokens is refused.
        tasks: tasks whose labels are checked at once; those of the others are checked when they are first met.
        context: T of a training row, which holds T + 1 tokens of prompt and answer; None where there is no training.
        mixture: how frequent each task is in training, relative to the others; None: all that `tasks` names alike.
        training_lengths: full: a training prompt fills its row; uniform: its length is drawn, from facts and question alone to that.
        seed: of the examples.
        split: `train` and `test` draw independently; short stories are few, and some occur in both.

    Raises:
        FarstateError: the tokenizer has no token for the full stop, cannot spell a label, or splits one that must not be.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        background: Background,
        *,
        facts: tuple[int, int],
        shots: int,
        seed: int,
        split: str,
        split_labels: Literal["allow", "refuse"] = "allow",
        tasks: Sequence[str] = (),
        context: int | None = None,
        mixture: Mapping[str, float] | None = None,
        training_lengths: Literal["full", "uniform"] = "full",
    ) -> None:
        self._tokenizer = tokenizer
        self._background = background
        self._facts = facts
        self._shots = shots
        self._seed = seed
        self._split = split
        self._split_labels = split_labels
        self._context = context
        self._mixture = dict(mixture or dict.fromkeys(tasks, 1.0))
        self._training_lengths = training_lengths
        self._spelled: dict[str, Tokens] = {}
        self._checked: set[str] = set()
        self.end = end_of_answer(tokenizer)
        for task in (*tasks, *self._mixture):
            self._check_labels(task)

    def example(self, cell: Cell, number: int) -> Example:
        """Example `number` of the cell; its prompt has exactly `cell.length` tokens, or, for 0, facts and question alone after the shots.

        Raises:
            FarstateError: the length is shorter than facts and question, or the split has less background text than is needed.
        """
        task, length = cell.task, cell.length
        self._check_labels(task)
        shots = self._solved(task, number)
        room = length - shots.size if length else None
        told = self._fitting(task, draws(self._seed, self._split, task, number), room, answered=False)
        if not isinstance(told, _Told):
            raise FarstateError(
                f"tasks.babilong.lengths: {length} tokens are too few for {task}; with this tokenizer the shortest of {_TRIES} stories "
                f"takes {told + shots.size} with its question{self._with_shots}; take longer prompts, fewer facts or fewer shots"
            )
        generator = draws(self._seed, self._split, f"{task}-{length}", number)
        return self._hidden(told, number, length, shots, told.size if room is None else room, generator)

    def training(self, number: int) -> Example:
        """Training example `number`; prompt and answer fit a row.

        Raises:
            FarstateError: there is no training context or task; a row is shorter than facts, question and answer.
        """
        if self._context is None or not self._mixture:
            raise FarstateError("babilong: training examples need a context and tasks")
        generator = draws(self._seed, self._split, "babilong", number)
        shares = np.cumsum(list(self._mixture.values()))
        task = list(self._mixture)[int(np.searchsorted(shares, generator.random() * shares[-1], side="right"))]
        shots = self._solved(task, number)
        room = self._context + 1 - shots.size
        told = self._fitting(task, generator, room, answered=True)
        if not isinstance(told, _Told):
            raise FarstateError(
                f"tasks.babilong: a training row of {self._context} tokens (T_train) is too short for {task}; with this tokenizer the "
                f"shortest of {_TRIES} stories takes {told + shots.size - 1} with its question and answer{self._with_shots}; take a longer "
                "context, fewer facts or fewer shots"
            )
        size = room - told.answer.size
        if self._training_lengths == "uniform":
            size = int(generator.integers(told.size, size + 1))
        return self._hidden(told, number, shots.size + size, shots, size, generator)

    def published(
        self, source: PublishedBabilong, task: str, length_name: str, *, examples: int | None = None, revision: str | None = None
    ) -> Iterator[Example]:
        """The first `examples` of a published set in our prompt, in its order: solved stories, the set's text, the question.

        Their `length` is what the set's name says (`PublishedBabilong.tokens_of`); how long a prompt is in the model's tokens, it says itself.

        Raises:
            FarstateError: as `farstate.tasks.published.published`; a target that the tokenizer cannot spell; fewer than `examples` records.
        """
        self._check_labels(task)
        number = -1
        for number, asked in enumerate(islice(published(source, task, length_name, revision=revision), examples)):
            prompt = (self._solved(task, number), self._encoded(f" {asked.text}"), self._encoded(f" {asked.question} Answer:"))
            answer = self._answer(asked.target)
            yield Example(task, number, source.tokens_of(length_name), None, np.concatenate(prompt), answer, asked.target)
        if examples is not None and number + 1 < examples:
            raise FarstateError(
                f"tasks.babilong.examples: {examples} are asked for, the published set {length_name} of {task} holds {number + 1}; lower it, or "
                "leave the set out of tasks.babilong.published.lengths"
            )

    def _fitting(self, task: str, generator: np.random.Generator, room: int | None, *, answered: bool) -> _Told | int:
        """The first story drawn that takes at most `room` tokens; where there is none, how many the shortest takes."""
        sizes = []
        for _ in range(_TRIES):
            told = self._told(story(task, generator, self._facts))
            sizes.append(told.size + (told.answer.size if answered else 0))
            if room is None or sizes[-1] <= room:
                return told
        return min(sizes)

    def _hidden(self, told: _Told, number: int, length: int, shots: Tokens, size: int, generator: np.random.Generator) -> Example:
        """The story in `size` tokens: what facts and question leave of them is background."""
        text = self._background.piece(size - told.size, generator)
        # In order, each at any of the places: facts may follow each other.
        places = text.places[np.sort(generator.integers(text.places.size, size=len(told.facts)))]
        parts, starts, position = [shots, text.tokens[: places[0]]], [], shots.size
        for fact, (place, following) in zip(told.facts, pairwise([*places.tolist(), text.tokens.size]), strict=True):
            starts.append(position + place)
            parts += [fact, text.tokens[place:following]]
            position += fact.size
        prompt = np.concatenate([*parts, told.question])
        supporting = tuple(starts[fact] for fact in sorted(told.story.supporting))
        return Example(told.story.task, number, length, None, prompt, told.answer, told.story.answer, supporting)

    def _solved(self, task: str, number: int) -> Tokens:
        generator = draws(self._seed, self._split, f"{task}-shots", number)
        fewest, most = self._facts
        parts = [np.empty(0, dtype=np.int64)]
        for _ in range(self._shots):
            told = self._told(story(task, generator, (fewest, min(most, fewest + _SHOT_FACTS))))
            parts += [*told.facts, told.question, told.answer]
        return np.concatenate(parts)

    @property
    def _with_shots(self) -> str:
        return f" and {self._shots} solved stories before it" if self._shots else ""

    def _told(self, drawn: Story) -> _Told:
        facts = [self._spell(f" {fact}") for fact in drawn.facts]
        return _Told(drawn, facts, self._spell(f" {drawn.question} Answer:"), self._answer(drawn.answer))

    def _answer(self, label: str) -> Tokens:
        return np.append(self._spell(f" {label}"), self.end)

    def _check_labels(self, task: str) -> None:
        if task in self._checked:
            return
        for label in labels(task):
            tokens = self._spell(f" {label}")
            if self._split_labels == "refuse" and tokens.size > 1:
                pieces = ", ".join(f"'{self._tokenizer.decode([token])}'" for token in tokens.tolist())
                raise FarstateError(
                    f"tasks.babilong.split_labels: the tokenizer writes '{label}' of {task} as {tokens.size} tokens ({pieces}); take one with "
                    "more symbols (tokenizer.vocabulary_size), or split_labels: allow"
                )
        self._checked.add(task)

    def _spell(self, text: str) -> Tokens:
        """The tokens of a sentence or a label, which is one of a few thousand."""
        if text not in self._spelled:
            tokens = self._encoded(text)
            back = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
            if back.strip() != text.strip():
                raise FarstateError(
                    f"tasks.babilong: the tokenizer cannot spell '{text.strip()}', it reads back '{back.strip()}'; choose one that knows "
                    "these letters"
                )
            self._spelled[text] = tokens
        return self._spelled[text]

    def _encoded(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
