"""States of many texts, of the heads that are looked at: chosen over the layers, kept on disk, one head in memory at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farstate.evaluation.stream import Precision
from farstate.models.contract import Model
from farstate.state import State

Integers = npt.NDArray[np.int64]


class Head(NamedTuple):
    """A head of a layer, both from 0."""

    layer: int
    head: int


def choose_heads(like: State, limit: int, generator: np.random.Generator) -> tuple[Head, ...]:
    """At most `limit` heads, the same number of each layer where it has as many; layers without a recurrence have none.

    Layers, and heads within each, are taken in random order, one head of each layer in turn.
    """
    queues = [
        [Head(layer, int(head)) for head in generator.permutation(like.entries(layer).shape[1])]
        for layer in range(len(like))
        if like.entries(layer).shape[2]
    ]
    order = [queues[number] for number in generator.permutation(len(queues))]
    turns = max((len(queue) for queue in queues), default=0)
    taken = [queue[turn] for turn in range(turns) for queue in order if turn < len(queue)]
    return tuple(sorted(taken[:limit]))


class StateSet:
    """The entries of `heads` in `count` states, float32.

    They lie in an unnamed temporary file, which the system removes however the process ends; what fits stays in its cache.

    Args:
        like: a state of the model, for the number of entries.
        folder: where the file lies; None: the system's place for temporary files.
    """

    def __init__(self, heads: Sequence[Head], like: State, count: int, folder: Path | None = None) -> None:
        self.heads = tuple(heads)
        self.count = count
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives as long as the object)
        sizes = [like.entries(layer).shape[2] for layer, _ in self.heads]
        self._file.truncate(4 * count * sum(sizes))
        self._values = []
        offset = 0
        for size in sizes if count else []:
            self._values.append(np.memmap(self._file, dtype=np.float32, mode="r+", offset=offset, shape=(count, size)))
            offset += 4 * count * size

    def write(self, at: Integers, state: State) -> None:
        """Keep the rows of `state` as the states number `at`, (rows,)."""
        layers = {layer: state.entries(layer).to(device="cpu", dtype=torch.float32).numpy() for layer in self._layers}
        for number, (layer, head) in enumerate(self.heads):
            self._values[number][at] = layers[layer][:, head]

    def rows(self, number: int, at: Integers) -> npt.NDArray[np.float32]:
        """The states `at` of head `number` (its place in `heads`), (len(at), entries)."""
        return np.asarray(self._values[number][at])

    @property
    def _layers(self) -> set[int]:
        return {layer for layer, _ in self.heads}


@dataclass(frozen=True)
class Sampled:
    """Sampled states and where each comes from.

    Attributes:
        states: their entries, among others.
        which: (n,) places in `states`.
        documents: (n,) the document that each state's last tokens are of.
        folds: (n,) which fold of a test each belongs to: neither a document nor a chain is in two of them.
        chains: (n,) states with the same number have a state carried from text to text in common; −1: with no other.
        positions: (n,) tokens read in the state's own text.
        ages: (n,) tokens read since the state was zero; −1 where no text led to the initial state.
    """

    states: StateSet
    which: Integers
    documents: npt.NDArray[np.str_]
    folds: Integers
    chains: Integers
    positions: Integers
    ages: Integers

    def __len__(self) -> int:
        return int(self.documents.size)

    def values(self, number: int) -> npt.NDArray[np.float32]:
        """The entries of head `number` (its place among the analysed heads), (n, entries)."""
        return self.states.rows(number, self.which)

    def take(self, which: Integers) -> Sampled:
        """The states at the indices `which`; no entry is copied."""
        return Sampled(self.states, *(getattr(self, name)[which] for name in list(self.__dataclass_fields__)[1:]))


def grouped_folds(documents: Sequence[str], weights: Sequence[int], folds: int) -> dict[str, int]:
    """A fold for each document, so that the folds weigh about the same: the heaviest document first, to the lightest fold."""
    loads = [0] * folds
    given: dict[str, int] = {}
    for document, weight in sorted(zip(documents, weights, strict=True), key=lambda pair: (-pair[1], pair[0])):
        lightest = min(range(folds), key=loads.__getitem__)
        given[document] = lightest
        loads[lightest] += weight
    return given


@contextmanager
def inference(device: torch.device, precision: Precision) -> Iterator[None]:
    """No gradients, and the autocast that `precision` asks for."""
    with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
        yield


def read_to(
    model: Model,
    tokens: Tensor,
    positions: Integers,
    initial: State | None,
    keep: Callable[[Integers, State], None],
    *,
    segment_tokens: int,
    precision: Precision = "float32",
) -> None:
    """Give `keep` the state of each row after its first `position` tokens: (the rows, their states), in order of positions.

    Args:
        tokens: (n, T) on the model's device.
        positions: (n,) in 1 … T.
        initial: the rows' initial states; None: zero.
        segment_tokens: at most so many tokens are read at a time.
    """
    order = np.argsort(positions, kind="stable")
    state, start = initial, 0
    rows = torch.from_numpy(order).to(tokens.device)
    tokens = tokens.index_select(0, rows)
    with inference(tokens.device, precision):
        if state is not None:
            state = state.select(rows)
        for position in np.unique(positions).tolist():
            while start < position:
                stop = min(start + segment_tokens, position)
                _, state = model(tokens[:, start:stop], state)
                start = stop
            done = int(np.searchsorted(positions[order], position, side="right"))
            assert state is not None
            keep(order[:done], state.select(range(done)))
            if done == order.size:
                return
            order, tokens, state = order[done:], tokens[done:], state.select(range(done, order.size))
