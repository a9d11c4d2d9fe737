"""Copying: a string of letters between `$` and `|`, to be written once more, then `.`; its vocabulary is its own.

The paper's Table 1 names the task and the lengths (50–100 in training, 300 in the test); format, alphabet and
the loss on the answer alone are assumed.
"""

from __future__ import annotations

import numpy as np

from farstate.errors import FarstateError
from farstate.tasks.examples import Cell, Example, Tokens, draws

TASK = "copying"
BEGIN, MIDDLE, END, PADDING = "$", "|", ".", "␀"


class Vocabulary:
    """One token a letter, then `$`, `|`, `.`; 0 is padding, which no example contains and which is shown as ␀."""

    def __init__(self, alphabet: str) -> None:
        self.symbols = [PADDING, *alphabet, BEGIN, MIDDLE, END]
        self._ids = {symbol: number for number, symbol in enumerate(self.symbols)}

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: str) -> list[int]:
        return [self._ids[symbol] for symbol in text]

    def decode(self, tokens: Tokens) -> str:
        return "".join(self.symbols[token] for token in tokens.tolist())


class Copying:
    """Makes strings of letters drawn alike and independently.

    Args:
        alphabet: the letters.
        seed: of the examples.
        split: `train` and `test` draw independently.
        training_lengths: shortest and longest string in training, lengths alike; None where there is no training.
    """

    def __init__(self, alphabet: str, *, seed: int, split: str, training_lengths: tuple[int, int] | None = None) -> None:
        self.vocabulary = Vocabulary(alphabet)
        self._letters = np.array(list(alphabet))
        self._seed = seed
        self._split = split
        self._training_lengths = training_lengths

    @property
    def chance(self) -> float:
        """Share of letters that a guess gets right."""
        return 1.0 / len(self._letters)

    def example(self, cell: Cell, number: int) -> Example:
        if cell.length < 1:
            raise FarstateError(f"tasks.copying.lengths: a string of {cell.length} letters; at least 1")
        generator = draws(self._seed, self._split, f"{TASK}-{cell.length}", number)
        return self._made(cell.length, number, generator)

    def training(self, number: int) -> Example:
        if self._training_lengths is None:
            raise FarstateError("copying: training examples need training_lengths")
        generator = draws(self._seed, self._split, TASK, number)
        shortest, longest = self._training_lengths
        return self._made(int(generator.integers(shortest, longest + 1)), number, generator)

    def _made(self, length: int, number: int, generator: np.random.Generator) -> Example:
        text = "".join(self._letters[generator.integers(0, len(self._letters), size=length)])
        prompt = np.array(self.vocabulary.encode(BEGIN + text + MIDDLE), dtype=np.int64)
        answer = np.array(self.vocabulary.encode(text + END), dtype=np.int64)
        return Example(TASK, number, length, None, prompt, answer, text, facts=(1,))
