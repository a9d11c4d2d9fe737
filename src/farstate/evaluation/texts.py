"""The held-out texts an evaluation reads: one fixed set of documents behind every position of a curve."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from farstate.corpus.document_table import DocumentTable
from farstate.corpus.readers import held_out
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.params import Texts


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of the store."""

    shard: int
    offset: int
    length: int


@dataclass(frozen=True)
class Text:
    """`length + 1` tokens that are read from the zero state: a stretch of a document, or documents joined.

    `document` is the document's id (of joined documents: the first one's), `stretch` its number in the document.
    """

    document: str
    stretch: int
    pieces: tuple[Piece, ...]

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(piece.length for piece in self.pieces))

    def read(self, store: TokenStore, start: int, count: int) -> npt.NDArray[np.int64]:
        """The tokens x_start … x_{start+count−1}, shape (count,); nothing else of the text is loaded.

        Raises:
            IndexError: the text is shorter.
        """
        if start < 0 or start + count > self._ends[-1]:
            raise IndexError(f"tokens {start} … {start + count - 1} of a text that has {self._ends[-1]}")
        parts = []
        number, position = bisect_right(self._ends, start), start
        while position < start + count:
            piece, end = self.pieces[number], self._ends[number]
            taken = min(end, start + count) - position
            parts.append(store.read(piece.shard, piece.offset + piece.length - (end - position), taken))
            position += taken
            number += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def select(store: TokenStore, evaluate: Texts) -> list[Text]:
    """The texts of a measurement, ordered by document id and stretch.

    `streams: documents`: documents that hold at least `length + 1` tokens, and of each as many
    non-overlapping stretches as fit, up to `stretches_per_document`. `streams: concatenated`: the split's
    documents in the order of their ids, joined as the store holds them until the length is reached; what
    is left of the last one is dropped, so that no document is part of two texts and texts can be resampled
    as independent units.

    Raises:
        FarstateError: no document (or, joined, not the whole split) is long enough; the message names the parameter
            (evaluate.length, remembrance.length, …).
    """
    key = f"{type(evaluate).__name__.lower()}.length"
    if evaluate.streams == "concatenated":
        texts = list(_joined(store.documents(evaluate.split), evaluate))
        if not texts:
            tokens = int(store.documents(evaluate.split).length.sum())
            raise FarstateError(
                f"split '{evaluate.split}': {evaluate.length + 1} tokens are needed, all its documents together have {tokens}; "
                f"lower {key}, hold out more documents (corpus.split), or add text"
            )
        return texts
    table = store.documents(evaluate.split)
    length = evaluate.length
    return [
        Text(
            found.id,
            found.stretch,
            (Piece(int(table.shard[found.document_index]), int(table.offset[found.document_index]) + found.offset, length + 1),),
        )
        for found in held_out(store, evaluate.split, length, evaluate.documents, evaluate.stretches_per_document, key)
    ]


def _joined(table: DocumentTable, evaluate: Texts) -> Iterator[Text]:
    wanted = evaluate.length + 1
    pieces: list[Piece] = []
    first, held, found = 0, 0, 0
    for number in np.flatnonzero(table.length):
        if found == evaluate.documents:
            return
        if not pieces:
            first = int(number)
        taken = min(int(table.length[number]), wanted - held)
        pieces.append(Piece(int(table.shard[number]), int(table.offset[number]), taken))
        held += taken
        if held == wanted:
            yield Text(str(table.ids[first]), 0, tuple(pieces))
            found += 1
            pieces, held = [], 0
