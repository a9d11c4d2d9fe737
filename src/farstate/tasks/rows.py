"""Batches of a task's examples: rows of equal length, and which of their tokens the loss counts."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from farstate.corpus.permutation import permute
from farstate.corpus.readers import Batch, chosen
from farstate.errors import FarstateError
from farstate.tasks.examples import Examples, Tokens

# Keeps the order of the examples apart from other draws of the same seed.
_ORDER = 4


class TaskRows:
    """Every example once, in an order that the seed decides, laid out in rows of T + 1 tokens that begin with an example.

    one_per_row: an example a row. packed: whole examples one behind another, as many as fit. What is left of a row is filled
    with token 0, which the loss does not count: a state passed on from there has read the filling too.

    Args:
        examples: the training set.
        context: T in tokens.
        batch_size: B in rows.
        seed: of the order.
        packing: see above.
        rest_weight: weight in the loss of tokens outside the answers, whose tokens have 1; the first token of an example
            has none.

    Raises:
        FarstateError: an example is longer than a row, or there are fewer rows than one batch.
    """

    def __init__(
        self,
        examples: Examples,
        context: int,
        batch_size: int,
        seed: int,
        packing: Literal["one_per_row", "packed"],
        rest_weight: float,
    ) -> None:
        self._examples = examples
        self._context = context
        self._batch_size = batch_size
        self._rest_weight = rest_weight
        self._order = permute(np.arange(len(examples), dtype=np.int64), len(examples), seed, _ORDER)
        prompt, answer = examples.lengths()
        total = (prompt + answer)[self._order]
        if total.max(initial=0) > context + 1:
            raise FarstateError(
                f"a training example of {total.max()} tokens does not fit a row of {context} (T_train) + 1; raise the model's context, or "
                "shorten the examples"
            )
        self._starts = np.arange(len(examples)) if packing == "one_per_row" else _packed(total, context + 1)
        if not self.steps:
            raise FarstateError(
                f"the training examples fill {self._starts.size} rows of {context} tokens, a batch has {batch_size}; raise training.examples "
                "or lower training.recipe.batch_tokens"
            )

    @property
    def steps(self) -> int:
        """Whole batches in one reading; the last broken one is left out."""
        return self._starts.size // self._batch_size

    def batch(self, step: int, rows: Tokens | None = None) -> Batch:
        """The batch of `step` in [0, steps), or the given rows of it, with weights; every row is fresh."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        numbers = step * self._batch_size + chosen(rows, self._batch_size)
        size, context = numbers.size, self._context
        tokens = np.zeros((size, context + 1), dtype=np.int64)
        weights = np.zeros((size, context), dtype=np.float32)
        first = np.zeros(size, dtype=np.int64)
        for row, number in enumerate(numbers.tolist()):
            start = int(self._starts[number])
            end = int(self._starts[number + 1]) if number + 1 < self._starts.size else self._order.size
            first[row] = self._order[start]
            at = 0
            for index in self._order[start:end]:
                prompt, answer = self._examples.tokens(int(index))
                middle, stop = at + prompt.size, at + prompt.size + answer.size
                tokens[row, at:middle], tokens[row, middle:stop] = prompt, answer
                # weights[j] is that of predicting token j + 1.
                weights[row, at : middle - 1] = self._rest_weight
                weights[row, middle - 1 : stop - 1] = 1.0
                at = stop
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(first),
            torch.zeros(size, dtype=torch.int64),
            torch.ones(size, dtype=torch.bool),
            torch.from_numpy(weights),
        )


def _packed(total: Tokens, room: int) -> Tokens:
    """Where each row begins among the examples, when a row takes as many as fit."""
    starts, used = [0], 0
    for number, size in enumerate(total.tolist()):
        if used + size > room:
            starts.append(number)
            used = 0
        used += size
    return np.array(starts, dtype=np.int64)
