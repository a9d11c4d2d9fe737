"""Documents: every source in one form, with an identity and a split that depend on the content alone."""

from __future__ import annotations

import hashlib
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from farstate.corpus import stage
from farstate.corpus.records import Record, Records, read_archive, read_files, read_hub
from farstate.corpus.sources import resolve_files
from farstate.errors import FarstateError
from farstate.files import atomic_path, write_manifest
from farstate.params import Corpus, Source, Split

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.large_string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("title", pa.string(), nullable=False),
        pa.field("pile_set_name", pa.string()),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
    ]
)
# A row group is what one process holds in memory, here and when it is tokenised.
_GROUP_BYTES = 8 << 20
_GROUP_DOCUMENTS = 16_384


def write_documents(
    source: Source,
    corpus: Corpus,
    output: Path,
    *,
    archive: Path | None = None,
    files: list[Path] | None = None,
    revision: str | None = None,
    progress: stage.Progress | None = None,
) -> None:
    """Write `documents.parquet` (see SCHEMA) and a manifest with counts to the directory `output`.

    A document is dropped when it is shorter than `corpus.minimum_bytes` or has the content of an earlier one
    of the source. Memory holds one row group (8 MiB of text, or a single longer document) whatever the input's size.

    Args:
        archive: the fetched package (or the directory that holds it), for a source of kind package.
        files: the local files, for a source of kind files; by default those that its glob names now.
        revision: of a hub data set, as registered; None: its newest.

    Raises:
        FarstateError: a record (unless `corpus.damaged_records` is `skip`) or a file that cannot be read, named
            with its line or row; a source without documents.
    """
    stage.begin(output)
    records = _records(source, output, archive, files, revision)
    tally = _Tally()
    with closing(records), closing(_Seen()) as seen, atomic_path(output / stage.DOCUMENTS) as temporary:
        with pq.ParquetWriter(temporary, SCHEMA, compression="zstd") as writer:
            group = _Group(writer)
            for record in islice(_sound(records, corpus, tally), source.limit_documents):
                size = len(record.utf8)
                identity = hashlib.sha256(record.utf8).digest()
                if size < corpus.minimum_bytes:
                    tally.skipped["too_short"] += 1
                elif not seen.add(identity):
                    tally.duplicates += 1
                else:
                    split = split_of(identity, corpus.split) if source.assign == "hash" else source.assign
                    tally.keep(split, record.pile_set_name, size)
                    group.add(identity.hex()[:32], record.utf8, source.name, record.title, record.pile_set_name, size, split)
                    if progress:
                        progress(tally.documents, None)
            group.flush()
        if not tally.documents:
            dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.skipped.items())) or "it held no record"
            raise FarstateError(f"corpus source '{source.name}': no document is left ({dropped})")
    write_manifest(output, tally.summary(source.name), [stage.DOCUMENTS])


def split_of(identity: bytes, split: Split) -> str:
    """The split of a document by its SHA-256 digest: additions, removals and re-orderings elsewhere move nothing.

    The digest is hashed again with the salt to a number u in [0, 1): test below `split.test`, validation in the
    next `split.validation`, else train; so the share of validation never moves a test document.
    """
    mixed = hashlib.sha256(split.salt.encode() + b"\0" + identity).digest()
    u = int.from_bytes(mixed[:8], "big") / 2.0**64
    if u < split.test:
        return "test"
    return "validation" if u < split.test + split.validation else "train"


def _records(source: Source, output: Path, archive: Path | None, files: list[Path] | None, revision: str | None) -> Records:
    if source.package is not None:
        if archive is None:
            raise FarstateError(f"corpus source '{source.name}': the archive of {source.package} has not been fetched")
        return read_archive(stage.part(archive, stage.ARCHIVE), source)
    if source.files is not None:
        return read_files(resolve_files(source.files, source.exclude) if files is None else files, source, output)
    return read_hub(source, revision)


def _sound(records: Records, corpus: Corpus, tally: _Tally) -> Iterator[Record]:
    for record in records:
        if isinstance(record, Record):
            yield record
        elif corpus.damaged_records == "stop":
            remedy = f"; {record.remedy}" if record.remedy else ""
            raise FarstateError(
                f"{record.message}{remedy}; or leave such records out and count them: corpus.damaged_records: skip"
            )
        else:
            tally.skipped[record.reason] += 1


class _Seen:
    """The identities met so far: a temporary table that spills to disk, so that memory stays bounded."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE seen (identity BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, identity: bytes) -> bool:
        """Whether the identity is new."""
        return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (identity,)).rowcount == 1

    def close(self) -> None:
        self._database.close()


class _Group:
    """Rows on their way to a parquet file, written as a row group when they are many or large."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0

    def add(self, identity: str, utf8: bytes, source: str, title: str, pile_set_name: str | None, size: int, split: str) -> None:
        self._rows.append((identity, utf8, source, title, pile_set_name, size, split))
        self._bytes += size
        if self._bytes >= _GROUP_BYTES or len(self._rows) >= _GROUP_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            columns = [pa.array(column, field.type) for column, field in zip(zip(*self._rows, strict=True), SCHEMA, strict=True)]
            self._writer.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), row_group_size=len(self._rows))
        self._rows = []
        self._bytes = 0


class _Tally:
    """Counts for the manifest."""

    def __init__(self) -> None:
        self.documents = 0
        self.duplicates = 0
        self.skipped: Counter[str] = Counter()
        self._splits = {split: Counter(documents=0, bytes=0) for split in stage.SPLITS}
        self._sets: dict[str, Counter[str]] = {}

    def keep(self, split: str, pile_set_name: str | None, size: int) -> None:
        self.documents += 1
        counters = [self._splits[split]]
        if pile_set_name is not None:
            counters.append(self._sets.setdefault(pile_set_name, Counter()))
        for counter in counters:
            counter["documents"] += 1
            counter["bytes"] += size

    def summary(self, source: str) -> dict[str, Any]:
        return {
            "source": source,
            "documents": self.documents,
            "bytes": sum(counter["bytes"] for counter in self._splits.values()),
            "splits": {split: dict(counter) for split, counter in self._splits.items()},
            "pile_set_names": {name: dict(counter) for name, counter in self._sets.items()},
            "skipped": dict(self.skipped),
            "duplicates": self.duplicates,
        }
