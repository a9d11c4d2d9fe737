"""Passkey: a number hidden in filler, to be told at the end (paper Fig. 7; the task of Mohtashami & Jaggi, arXiv 2305.16300).

    {instruction}{filler}{ The pass key is N. Remember it. N is the pass key.}{filler}{ What is the pass key? The pass key is}

and the answer is ` N.`. A prompt has exactly the tokens asked for: the filler gives way, never the key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from farstate.errors import FarstateError
from farstate.tasks.examples import Cell, Example, Tokens, draws

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from farstate.tasks.background import Background

TASK = "passkey"
INSTRUCTION = "There is a pass key hidden in this text. Find it and remember it."
FILLER = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
KEY = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key? The pass key is"
END = "."
_APART_TOKENS, _APART, _TRIES = 8, 0.02, 50
"""Held-out text is drawn again until a sentence ends within so many tokens, or such a share of the filler, of the depth."""


class Passkey:
    """Makes prompts with a hidden number.

    Args:
        tokenizer: the model's own.
        keys: lowest and highest key, all alike.
        background: held-out text for the filler; None: the usual sentences, again and again.
        context: tokens of a training row; None where there is no training.
        seed: of the examples.
        split: `train` and `test` draw independently: with many training examples most keys occur in both, in other places.

    Raises:
        FarstateError: the tokenizer cannot spell a number, or has no token for the full stop.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        keys: tuple[int, int],
        background: Background | None,
        instruction: bool,
        seed: int,
        split: str,
        context: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._keys = keys
        self._background = background
        self._seed = seed
        self._split = split
        self._context = context
        self._instruction = self._encoded(INSTRUCTION) if instruction else np.empty(0, dtype=np.int64)
        self._sentences = [self._encoded(f" {sentence}.") for sentence in FILLER.strip(" .").split(". ")]
        self._question = self._encoded(QUESTION)
        self.end = end_of_answer(tokenizer)
        for said in (*map(str, keys), "0123456789", INSTRUCTION + FILLER + KEY.format(key=keys[0]) + QUESTION):
            told = tokenizer.decode(self._encoded(f" {said}").tolist(), skip_special_tokens=False).strip()
            if told != said:
                raise FarstateError(
                    f"tasks.passkey: the tokenizer cannot spell '{said}', it reads back '{told}'; choose one that knows digits and letters"
                )

    @property
    def chance(self) -> float:
        """Share of keys that a guess gets right."""
        return 1.0 / (self._keys[1] - self._keys[0] + 1)

    def example(self, cell: Cell, number: int) -> Example:
        if cell.depth is None or not 0.0 <= cell.depth <= 1.0:
            raise FarstateError(
                f"tasks.passkey.depths: {cell.depth} is not a depth; from 0 (the beginning) to 1 (before the question)"
            )
        generator = draws(self._seed, self._split, f"{TASK}-{cell.length}-{cell.depth:g}", number)
        key = self._key(generator)
        return self._made(cell.length, cell.depth, key, number, generator)

    def training(self, number: int) -> Example:
        if self._context is None:
            raise FarstateError("passkey: training examples need a context")
        generator = draws(self._seed, self._split, TASK, number)
        key, depth = self._key(generator), float(generator.random())
        # Inputs and answer fill the row: its last target is the full stop.
        return self._made(self._context + 1 - self._answer(key).size, depth, key, number, generator)

    def _key(self, generator: np.random.Generator) -> str:
        return str(int(generator.integers(self._keys[0], self._keys[1] + 1)))

    def _answer(self, key: str) -> Tokens:
        return np.append(self._encoded(f" {key}"), self.end)

    def _made(self, length: int, depth: float, key: str, number: int, generator: np.random.Generator) -> Example:
        told = self._encoded(KEY.format(key=key))
        room = length - self._instruction.size - told.size - self._question.size
        if room < 0:
            raise FarstateError(
                f"tasks.passkey: a prompt of {length} tokens does not hold the key and the question, which take {length - room} with this "
                "tokenizer; take longer lengths (and a longer context), shorter keys, or instruction: false"
            )
        filler, at = self._nearest(room, depth, generator)
        prompt = np.concatenate((self._instruction, filler[:at], told, filler[at:], self._question))
        return Example(TASK, number, length, depth, prompt, self._answer(key), key, facts=(self._instruction.size + at,))

    def _nearest(self, room: int, depth: float, generator: np.random.Generator) -> tuple[Tokens, int]:
        """Filler, and the place between two sentences that is nearest to the depth.

        Text has long sentences: where none ends within a tolerance of the depth, other text is drawn, and at last the best is taken.
        """
        best: tuple[float, Tokens, int] | None = None
        for _ in range(_TRIES if self._background is not None else 1):
            filler, places = self._filler(room, generator)
            at = int(places[np.abs(places - depth * room).argmin()])
            apart = abs(at - depth * room)
            if best is None or apart < best[0]:
                best = apart, filler, at
            if apart <= max(_APART_TOKENS, _APART * room):
                break
        assert best is not None
        return best[1], best[2]

    def _filler(self, room: int, generator: np.random.Generator) -> tuple[Tokens, Tokens]:
        """`room` tokens and the places before, between and after their sentences; the first sentence is cut to fit."""
        if self._background is not None:
            piece = self._background.piece(room, generator)
            return piece.tokens, np.append(piece.places, room)
        sizes = [sentence.size for sentence in self._sentences]
        count = len(sizes) * (-(-room // sum(sizes)) + 1)
        # Counted from the question backwards, so that the last sentence before it is whole.
        ends = np.concatenate(([0], np.cumsum([sizes[-1 - number % len(sizes)] for number in range(count)])))
        tokens = np.concatenate([self._sentences[number % len(sizes)] for number in range(count)])
        places = room - ends[ends <= room][::-1]
        return tokens[tokens.size - room :], np.unique(np.concatenate(([0], places)))

    def _encoded(self, text: str) -> Tokens:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def end_of_answer(tokenizer: Tokenizer) -> int:
    """The token that ends an answer: the full stop.

    Raises:
        FarstateError: the tokenizer does not write a full stop as one token.
    """
    ids = tokenizer.encode(END, add_special_tokens=False).ids
    if len(ids) != 1 or tokenizer.decode(ids) != END:
        raise FarstateError(
            f"tokenizer: writes '{END}' as {len(ids)} tokens, an answer's end must be one; choose another tokenizer"
        )
    return int(ids[0])
