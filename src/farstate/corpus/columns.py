"""Columns of integers in raw files, read where they are asked and nowhere else.

Files are read with `pread`, not mapped. Random reads through a map of hundreds of gigabytes read around every page as much as the disk's
read-ahead (2 MB for 4 KB where that is 8 MB), and keep a page and a table of pages for nearly every place that was ever touched; and a
file that another process cuts short would end ours with a bus error. Reads that are known beforehand are announced to the
kernel, so that a disk fetches them side by side.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from farstate.errors import FarstateError

Integers = NDArray[np.int64]


class Column(Protocol):
    """Integers, by their place."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Those at [start, stop), (stop − start,)."""

    def take(self, places: Integers) -> NDArray[Any]:
        """Those at the places, (n,)."""

    def expect(self, starts: Integers, count: int) -> None:
        """Say that `count` integers will be read from each of `starts` on."""


class HeldColumn:
    """A column that is in memory."""

    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return self._values.size

    def read(self, start: int, stop: int) -> NDArray[Any]:
        return self._values[start:stop]

    def take(self, places: Integers) -> NDArray[Any]:
        return self._values[places]

    def expect(self, starts: Integers, count: int) -> None:
        pass


class FileColumn:
    """The integers of a file from place `first` on; the file is opened when it is first read, and closed with this object.

    Safe to use from several threads and after a fork: there is no common position.

    Raises (when read):
        FarstateError: the file is missing or ends before what was asked.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], count: int, first: int = 0) -> None:
        self._path = path
        self._dtype = dtype
        self._count = count
        self._first = first
        self._file: _File | None = None

    def __len__(self) -> int:
        return self._count

    def read(self, start: int, stop: int) -> NDArray[Any]:
        values = np.empty(stop - start, dtype=self._dtype)
        self.read_into(values, start)
        return values

    def take(self, places: Integers) -> NDArray[Any]:
        self.expect(places, 1)
        values = np.empty(places.size, dtype=self._dtype)
        for number, place in enumerate(places.tolist()):
            self.read_into(values[number : number + 1], place)
        return values

    def read_into(self, values: NDArray[Any], start: int) -> None:
        """Fill the contiguous array `values`, (n,) of the column's type, from place `start` on."""
        if not 0 <= start <= self._count - values.size:
            raise IndexError(f"{self._path}: {self._count} integers, asked {values.size} from {start} on")
        file = self._opened()
        left = values.view(np.uint8).data
        at = (self._first + start) * self._dtype.itemsize
        while left:
            done = os.preadv(file.descriptor, [left], at)
            if not done:
                raise FarstateError(
                    f"{self._path}: ends at byte {at}, it was longer when it was opened; restore it, or delete its folder and run again"
                )
            left, at = left[done:], at + done

    def expect(self, starts: Integers, count: int) -> None:
        """Say that `count` integers will be read from each of `starts` on; nothing is read yet."""
        if starts.size < 2 or not hasattr(os, "posix_fadvise"):  # which macOS does not have
            return
        file, size = self._opened(), self._dtype.itemsize
        for start in starts.tolist():
            os.posix_fadvise(file.descriptor, (self._first + start) * size, count * size, os.POSIX_FADV_WILLNEED)

    def _opened(self) -> _File:
        file = self._file
        if file is None:
            file = self._file = _File(self._path)
        return file


class _File:
    """An open file, closed when nothing refers to it any more."""

    descriptor = -1

    def __init__(self, path: Path) -> None:
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FarstateError(f"{path}: was removed; restore it, or delete its folder and run again") from None

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
