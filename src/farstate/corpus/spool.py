"""Rows on their way to a parquet file, kept on disk group by group, so that a killed run goes on where it was.

A parquet file is readable only when its end is written, and nothing can be appended to it afterwards. Finished row groups
therefore go to an Arrow file first, each as a stream of its own, and are written as parquet at the end: the same bytes
whether or not the run was interrupted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from farstate.corpus.trail import Trail
from farstate.errors import FarstateError
from farstate.files import read_json, write_json

# A flush to disk can take a large part of a second on a network file system.
_COMMIT_SECONDS = 1.0
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


class Spool:
    """The row groups written so far, and a record of those that are safely on disk.

    The record is written after the rows have reached the disk. What lies behind it is cut off when work goes on; a record
    of other inputs, or one that the file does not bear out, is worth nothing.

    Args:
        output: the result's directory.
        inputs: what the rows are made of, as a JSON value.

    Attributes:
        position: records of the input that the rows on disk account for.
        facts: what was given to `commit` with them, empty at first.
        complete: whether nothing of the input is left to be read.
        trail: for who reads the input; the record says what the rows on disk were made of, and the next reading must bear it out.
    """

    def __init__(self, output: Path, schema: pa.Schema, inputs: Any) -> None:
        self._path = output / ".rows.part"
        self._record_path = output / ".progress.json"
        self._schema = schema
        self._inputs = inputs
        self._bytes = 0
        self.position = 0
        self.facts: dict[str, Any] = {}
        self.complete = False
        self.trail = Trail()
        self._resume()
        self._open()
        self._committed = time.monotonic()

    def append(self, rows: pa.Table) -> None:
        """Write a row group."""
        with pa.ipc.new_stream(self._file, self._schema, options=_OPTIONS) as writer:
            writer.write_table(rows)

    def commit(self, position: int, facts: dict[str, Any], *, complete: bool = False) -> None:
        """Record that the rows account for `position` records of the input; at most once a second until it is complete."""
        if not complete and time.monotonic() - self._committed < _COMMIT_SECONDS:
            return
        os.fsync(self._file.fileno())
        self._bytes = self._file.tell()
        self.position, self.facts, self.complete = position, facts, complete
        names = ("position", "facts", "complete")
        write_json(
            self._record_path,
            {
                **{"inputs": self._inputs, "bytes": self._bytes, "marks": self.trail.marks},
                **{name: getattr(self, name) for name in names},
            },
        )
        self._committed = time.monotonic()

    def groups(self, column: str | None = None) -> Iterator[pa.Table]:
        """The committed row groups, or one column of them."""
        fields = None if column is None else [self._schema.get_field_index(column)]
        with pa.OSFile(str(self._path), "rb") as file:
            while file.tell() < self._bytes:
                with pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(included_fields=fields)) as reader:
                    yield reader.read_all()

    def write_parquet(self, path: Path) -> None:
        """Write the committed rows as a parquet file, one row group each."""
        with pq.ParquetWriter(path, self._schema, compression="zstd") as writer:
            for rows in self.groups():
                writer.write_table(rows, row_group_size=rows.num_rows)

    def close(self) -> None:
        self._file.close()

    def restart(self) -> None:
        """Begin anew: the rows are of no use."""
        self.discard()
        self._bytes = self.position = 0
        self.facts, self.complete, self.trail = {}, False, Trail()
        self._open()

    def discard(self) -> None:
        """Remove everything: the result is finished, or the rows are of no use."""
        self.close()
        self._record_path.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _open(self) -> None:
        self._path.touch()
        os.truncate(self._path, self._bytes)
        self._file = pa.OSFile(str(self._path), "ab")

    def _resume(self) -> None:
        try:
            record = read_json(self._record_path)
            if record["inputs"] != self._inputs or self._path.stat().st_size < record["bytes"]:
                return
            trail = Trail((str(name), int(size), str(digest)) for name, size, digest in record["marks"])
            self._bytes, self.position = int(record["bytes"]), int(record["position"])
            self.facts, self.complete, self.trail = dict(record["facts"]), bool(record["complete"]), trail
        except (FarstateError, FileNotFoundError, KeyError, TypeError, ValueError):
            return
