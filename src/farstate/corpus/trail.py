"""What was read of a file until rows were committed: an interrupted reading is gone on with only behind the same bytes."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from typing import Any

from farstate.errors import FarstateError

Mark = tuple[str, int, str]
"""A file's name, a count of its bytes from the beginning, and their digest in hexadecimal."""


class OtherBytes(FarstateError):
    """A file's beginning is not what an interrupted reading met: what that one made of it may not be used."""


class Trail:
    """The digest of the file that is being read, as it lies there (compressed), as far as it was read.

    A stream takes in bytes ahead of the records it gives: a mark covers all that the records until then were made of, and a little more.

    Args:
        marks: those of an interrupted reading, which this one must bear out.
    """

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._given = sorted(mark for mark in marks if mark[1] > 0)
        self._due: list[Mark] = []
        self._name: str | None = None

    def begin(self, name: str, algorithm: str = "sha256", prefix: bytes = b"") -> None:
        """The file `name` is read from its beginning; its digest is that of `prefix` and its bytes."""
        self._due = [mark for mark in self._given if mark[0] == name]
        self._name, self.count, self._digest = name, 0, hashlib.new(algorithm, prefix)

    def room(self, size: int) -> int:
        """How many of the next `size` bytes to read at once: a mark ends what is added."""
        return min(size, self._due[0][1] - self.count) if self._due else size

    def add(self, data: bytes | memoryview) -> None:
        """The file's next bytes; none at its end.

        Raises:
            OtherBytes: a mark is not borne out.
        """
        self._digest.update(data)
        self.count += len(data)
        if self._due and (not data or self._due[0][1] == self.count):
            name, size, digest = self._due.pop(0)
            if size != self.count or digest != self.digest:
                raise OtherBytes(f"{name}: its first {size} bytes are not those that an interrupted reading met")

    @property
    def digest(self) -> str:
        """Of the file so far, in hexadecimal."""
        return self._digest.hexdigest()

    @property
    def marks(self) -> list[Mark]:
        """Where the reading stands, behind the marks that it has not come to."""
        return [] if self._name is None else [*self._due, (self._name, self.count, self.digest)]


class Followed(io.RawIOBase):
    """A stream of bytes that leaves a trail, begun before."""

    def __init__(self, stream: io.BufferedReader, trail: Trail) -> None:
        self._stream = stream
        self._trail = trail

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        count = self._take(view[: self._trail.room(len(view))])
        self._trail.add(view[:count])
        if not count:
            self._at_end()
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _take(self, view: memoryview) -> int:
        return self._stream.readinto(view)

    def _at_end(self) -> None:
        pass
