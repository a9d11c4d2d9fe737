"""The documents of one split of a token store: where each lies, how long it is, what it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farstate.corpus.columns import Column, FileColumn, HeldColumn, Integers

OFFSETS, LENGTHS, SHARDS = "offsets.bin", "lengths.bin", "shards.bin"
RAW: dict[str, np.dtype[Any]] = {OFFSETS: np.dtype("<i8"), LENGTHS: np.dtype("<i8"), SHARDS: np.dtype("<i4")}
"""The columns of a store's index that readers need for every batch, as raw files in the order of index.parquet."""

_SCANNED_AT_ONCE = 1 << 17
_BLOCK = 512
_LOCATED_AT_ONCE = 1024


class DocumentTable:
    """The documents of one split, by content hash; a document's index is its place here.

    `places`, `lengths`, `strings` read what is asked; the attributes below are whole columns, read when first asked for, and
    belong to splits that fit into memory.

    Args:
        index: the store's index.parquet.
        first, count: where the split's rows lie in it.
        raw: whether the columns of RAW lie beside it; stores of earlier versions have none, and theirs are read into memory.

    Attributes:
        shard: (D,) int32, offset: (D,) int64, length: (D,) int64 in tokens.
        ids, source, title: (D,) str; pile_set_name: (D,) object, str or None.
    """

    def __init__(self, index: Path, split: str, first: int, count: int, *, raw: bool) -> None:
        self._index = index
        self.split = split
        self._first = first
        self._count = count
        self._raw = raw

    def __len__(self) -> int:
        return self._count

    def lengths(self, documents: Integers) -> Integers:
        """(n,) int64: tokens of each of `documents`."""
        return self._column(LENGTHS).take(documents)

    def places(self, documents: Integers) -> tuple[NDArray[np.int32], Integers]:
        """Shard and offset of each of `documents`: (n,) int32, (n,) int64."""
        return self._column(SHARDS).take(documents), self._column(OFFSETS).take(documents)

    def scan(self) -> Iterator[Integers]:
        """The lengths of all documents in order, some at a time."""
        column = self._column(LENGTHS)
        for start in range(0, self._count, _SCANNED_AT_ONCE):
            yield column.read(start, min(start + _SCANNED_AT_ONCE, self._count))

    def length_blocks(self, starts: Integers, size: int) -> Integers:
        """(n, size) int64: the lengths of `size` documents from each of `starts` on; 0 behind the last document."""
        column = self._column(LENGTHS)
        column.expect(starts, size)
        blocks = np.zeros((starts.size, size), dtype=np.int64)
        for block, start in zip(blocks, starts.tolist(), strict=True):
            lengths = column.read(start, min(start + size, self._count))
            block[: lengths.size] = lengths
        return blocks

    def strings(self, column: str, documents: Integers) -> NDArray[np.str_]:
        """(n,): a column of index.parquet at `documents`; one row group is in memory at a time."""
        rows = documents + self._first
        found = np.empty(rows.size, dtype=object)
        with pq.ParquetFile(self._index) as file:
            groups = range(file.metadata.num_row_groups)
            ends = np.cumsum([file.metadata.row_group(group).num_rows for group in groups])
            of_row = np.searchsorted(ends, rows, side="right")
            for group in np.unique(of_row):
                here = np.flatnonzero(of_row == group)
                values = file.read_row_group(int(group), columns=[column])[column]
                first = int(ends[group]) - len(values)
                found[here] = values.take(pa.array(rows[here] - first)).to_pylist()
        return found.astype(np.str_)

    @cached_property
    def shard(self) -> NDArray[np.int32]:
        return self._column(SHARDS).read(0, self._count)

    @cached_property
    def offset(self) -> Integers:
        return self._column(OFFSETS).read(0, self._count)

    @cached_property
    def length(self) -> Integers:
        return self._column(LENGTHS).read(0, self._count)

    @cached_property
    def ids(self) -> NDArray[np.str_]:
        return self._strings("id")

    @cached_property
    def source(self) -> NDArray[np.str_]:
        return self._strings("source")

    @cached_property
    def title(self) -> NDArray[np.str_]:
        return self._strings("title")

    @cached_property
    def pile_set_name(self) -> NDArray[np.object_]:
        return np.array([*self._read(["pile_set_name"])["pile_set_name"].to_pylist(), None], dtype=object)[:-1]

    def _column(self, name: str) -> Column:
        return self._columns[name]

    @cached_property
    def _columns(self) -> dict[str, Column]:
        if self._raw:
            return {name: FileColumn(self._index.with_name(name), dtype, self._count, self._first) for name, dtype in RAW.items()}
        numbers = self._read(["offset", "length", "shard"])
        return {
            name: HeldColumn(numbers[column].to_numpy()) for name, column in zip(RAW, ("offset", "length", "shard"), strict=True)
        }

    def _strings(self, column: str) -> NDArray[np.str_]:
        return np.array(self._read([column])[column].to_pylist(), dtype=np.str_)

    def _read(self, columns: list[str]) -> pa.Table:
        return pq.read_table(self._index, columns=columns, filters=pc.field("split") == self.split)


class Pieces:
    """The documents of a table cut into pieces, numbered through: in which document a piece lies, without a list of all.

    Two levels: how many pieces each block of 512 documents has is in memory (3.3 MB for 210 million documents); the lengths within a
    block are read when a piece of it is asked for.

    Args:
        counts: pieces of documents of the given lengths, (n,) → (n,) int64; of length 0 none.

    Attributes:
        total: pieces of all documents.
    """

    def __init__(self, table: DocumentTable, counts: Callable[[Integers], Integers]) -> None:
        self._table = table
        self._counts = counts
        sums = [np.empty(0, dtype=np.int64)]
        for lengths in table.scan():  # whole blocks, but for the last
            sums.append(np.add.reduceat(counts(lengths), np.arange(0, lengths.size, _BLOCK)))
        self._ends = np.cumsum(np.concatenate(sums))
        self.total = int(self._ends[-1]) if self._ends.size else 0

    def locate(self, piece: Integers) -> tuple[Integers, Integers, Integers]:
        """For each of the pieces, (n,) in [0, total): its document, its number there, the document's length; all (n,)."""
        parts = [self._locate(piece[start : start + _LOCATED_AT_ONCE]) for start in range(0, piece.size, _LOCATED_AT_ONCE)]
        if len(parts) == 1:
            return parts[0]
        documents, numbers, lengths = zip(*parts, strict=True) if parts else ([piece], [piece], [piece])
        return np.concatenate(documents), np.concatenate(numbers), np.concatenate(lengths)

    def _locate(self, piece: Integers) -> tuple[Integers, Integers, Integers]:
        of_piece = np.searchsorted(self._ends, piece, side="right")
        blocks, which = np.unique(of_piece, return_inverse=True)
        lengths = self._table.length_blocks(blocks * _BLOCK, _BLOCK)
        counts = self._counts(lengths)
        ends = np.cumsum(counts, axis=1)
        within = piece - (self._ends[of_piece] - ends[which, -1])
        place = (ends[which] <= within[:, None]).sum(axis=1)
        number = within - (ends[which, place] - counts[which, place])
        return of_piece * _BLOCK + place, number, lengths[which, place]
