"""Sums at every position of a text, in memory that does not depend on how many positions there are."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

BLOCK = 4096
SCHEMA = pa.schema(
    [
        pa.field("position", pa.int64()),
        pa.field("documents", pa.int64()),
        pa.field("nll_carried", pa.float64()),
        pa.field("nll_window", pa.float64()),
    ]
)


class PositionSums:
    """One float64 sum for each of the positions 1 … length, zero at first.

    They lie in an unnamed temporary file, which the system removes however the process ends; the pages that
    are in use stay in its cache.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (lives as long as the object)
        self._file.truncate(8 * length)

    def add(self, positions: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
        """Add `values` to the sums at `positions`, both of shape (n,); a position may come several times.

        The range from the first to the last position is held in memory.
        """
        if not positions.size:
            return
        first = int(positions.min())
        sums = self.read(first, int(positions.max()) - first + 1)
        np.add.at(sums, positions - first, values)
        self._file.seek(8 * (first - 1))
        self._file.write(sums.tobytes())

    def read(self, first: int, count: int) -> npt.NDArray[np.float64]:
        """The sums at the positions first … first + count − 1, shape (count,).

        Raises:
            IndexError: a position below 1 or above the length.
        """
        if first < 1 or first + count - 1 > self.length:
            raise IndexError(f"positions {first} … {first + count - 1} of {self.length}")
        self._file.seek(8 * (first - 1))
        sums = np.empty(count, dtype=np.float64)
        self._file.readinto(sums.view(np.uint8).data)
        return sums


def write_positions(path: Path, carried: PositionSums, window: PositionSums, documents: int) -> None:
    """Write the table of positions (SCHEMA), a block of rows at a time."""
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for first in range(1, carried.length + 1, BLOCK):
            count = min(BLOCK, carried.length + 1 - first)
            columns = [
                np.arange(first, first + count, dtype=np.int64),
                np.full(count, documents, dtype=np.int64),
                carried.read(first, count),
                window.read(first, count),
            ]
            writer.write_table(pa.Table.from_arrays([pa.array(column) for column in columns], schema=SCHEMA))
