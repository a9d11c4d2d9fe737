"""Documents: every source in one form, with an identity and a split that depend on the content alone."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from farstate.corpus import stage
from farstate.corpus.hub import ChangedInput, HubFile
from farstate.corpus.records import Damage, Records, read_archive, read_files, read_hub
from farstate.corpus.sources import resolve_files
from farstate.corpus.spool import Spool
from farstate.corpus.trail import OtherBytes, Trail
from farstate.errors import FarstateError
from farstate.files import atomic_path, write_manifest
from farstate.numerics import NUMERICS
from farstate.params import Corpus, Source, Split
from farstate.training.progress import notice

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
_SEEN_CACHE_KIB = 32 << 10
_INSERT = "INSERT OR IGNORE INTO seen VALUES (?)"


def write_documents(
    source: Source,
    corpus: Corpus,
    output: Path,
    *,
    archive: Path | None = None,
    files: Sequence[Path | HubFile] | None = None,
    revision: str | None = None,
    inputs: list[dict[str, Any]] | None = None,
    progress: stage.Progress | None = None,
) -> None:
    """Write `documents.parquet` (see SCHEMA) and a manifest with counts to the directory `output`.

    A document is dropped when it is shorter than `corpus.minimum_bytes` or has the content of an earlier one
    of the source. Memory holds one row group (8 MiB of text, or a single longer document) whatever the input's size; the
    identities that were met lie on disk. A run that was killed goes on after the last row group on disk (at most a second
    before), and ends with the same bytes as an undisturbed one; where a file no longer begins with the bytes that run met, its rows are
    discarded and a notice says so.

    Args:
        archive: the fetched package (or the directory that holds it), for a source of kind package.
        files: the files, local or on the hub; by default the local ones that the source's glob names now.
        revision: of a hub data set that is streamed as a whole, as registered; None: its newest.
        inputs: what was registered of the input (path, size, checksum), for the manifest.

    Raises:
        FarstateError: a record (unless `corpus.damaged_records` is `skip`) or a file that cannot be read, named
            with its line or row; a source without documents.
    """
    stage.begin(output)
    if source.files is not None and files is None:
        files = resolve_files(source.files, source.exclude)
    fingerprint = {
        "source": source.model_dump(mode="json"),
        "corpus": corpus.model_dump(mode="json", include={"damaged_records", "minimum_bytes", "split"}),
        "numerics": NUMERICS["corpus"],
        "revision": revision,
        "inputs": inputs,
        "files": [_identity(file) for file in files or ([] if archive is None else [stage.part(archive, stage.ARCHIVE)])],
    }
    with closing(Spool(output, SCHEMA, fingerprint)) as spool:
        tally = _Tally(spool.facts)
        while not spool.complete:
            try:
                with closing(_records(source, output, archive, files, revision, spool.position, spool.trail)) as records:
                    _read(records, source, corpus, spool, tally, progress)
            except OtherBytes as problem:
                notice(f"{problem}; the rows are discarded, reading begins anew")
                spool.restart()
                tally = _Tally(spool.facts)
            except ChangedInput:
                spool.discard()
                raise
        if not tally.documents:
            spool.discard()
            dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.skipped.items())) or "it held no record"
            raise FarstateError(f"corpus source '{source.name}': no document is left ({dropped})")
        with atomic_path(output / stage.DOCUMENTS) as temporary:
            spool.write_parquet(temporary)
        write_manifest(output, {**tally.summary(source.name), "inputs": inputs}, [stage.DOCUMENTS])
        spool.discard()


def _read(records: Records, source: Source, corpus: Corpus, spool: Spool, tally: _Tally, progress: stage.Progress | None) -> None:
    """Bring what is left of the input to the spool."""
    limit = source.limit_documents
    position = spool.position
    group = _Group(spool)
    with closing(_Seen(spool)) as seen:
        while (limit is None or tally.read < limit) and (record := next(records, None)) is not None:
            position += 1
            if isinstance(record, Damage):
                _refuse_or_count(record, corpus, tally)
                continue
            tally.read += 1
            size = len(record.utf8)
            identity = hashlib.sha256(record.utf8).digest()
            if size < corpus.minimum_bytes:
                tally.skipped["too_short"] += 1
            elif not seen.add(identity):
                tally.duplicates += 1
            else:
                split = split_of(identity, corpus.split) if source.assign == "hash" else source.assign
                tally.keep(split, record.pile_set_name, size)
                row = (identity.hex()[:32], record.utf8, source.name, record.title, record.pile_set_name, size, split)
                if group.add(row, size):
                    spool.commit(position, tally.facts())
                if progress:
                    progress(tally.documents, None)
        group.flush()
        spool.commit(position, tally.facts(), complete=True)


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


def _records(
    source: Source,
    output: Path,
    archive: Path | None,
    files: Sequence[Path | HubFile] | None,
    revision: str | None,
    passed: int,
    trail: Trail,
) -> Records:
    if source.package is not None:
        if archive is None:
            raise FarstateError(f"corpus source '{source.name}': the archive of {source.package} has not been fetched")
        return read_archive(stage.part(archive, stage.ARCHIVE), source, passed)
    if files is not None:
        return read_files(files, source, output, passed, trail)
    return read_hub(source, revision, passed)


def _identity(file: Path | HubFile) -> list[Any]:
    """What changes with a file's content: an unfinished run goes on only with the same."""
    if isinstance(file, HubFile):
        return list(asdict(file).values())
    try:
        stat = os.stat(file)
    except OSError:  # who reads it says so
        return [str(file)]
    return [str(file), stat.st_size, stat.st_mtime_ns]


def _refuse_or_count(damage: Damage, corpus: Corpus, tally: _Tally) -> None:
    if corpus.damaged_records == "stop":
        remedy = f"; {damage.remedy}" if damage.remedy else ""
        raise FarstateError(f"{damage.message}{remedy}; or leave such records out and count them: corpus.damaged_records: skip")
    tally.skipped[damage.reason] += 1


class _Seen:
    """The identities met so far, by the 128 bits that name a document: a temporary table that spills to disk
    (to the folder that TMPDIR names), so that memory stays bounded."""

    def __init__(self, spool: Spool) -> None:
        self._database = sqlite3.connect("")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(f"PRAGMA cache_size = -{_SEEN_CACHE_KIB}")
        self._database.execute("CREATE TABLE seen (identity BLOB PRIMARY KEY) WITHOUT ROWID")
        for rows in spool.groups("id"):
            self._insert([(bytes.fromhex(identity),) for identity in rows["id"].to_pylist()])

    def add(self, identity: bytes) -> bool:
        """Whether the identity is new."""
        return self._database.execute(_INSERT, (identity[:16],)).rowcount == 1

    def close(self) -> None:
        self._database.close()

    def _insert(self, identities: Iterable[tuple[bytes]]) -> None:
        self._database.executemany(_INSERT, identities)


class _Group:
    """Rows on their way to the spool, written as a row group when they are many or large."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._rows: list[tuple[Any, ...]] = []
        self._bytes = 0

    def add(self, row: tuple[Any, ...], size: int) -> bool:
        """Whether the row ended its group."""
        self._rows.append(row)
        self._bytes += size
        full = self._bytes >= _GROUP_BYTES or len(self._rows) >= _GROUP_DOCUMENTS
        if full:
            self.flush()
        return full

    def flush(self) -> None:
        if self._rows:
            columns = [pa.array(column, field.type) for column, field in zip(zip(*self._rows, strict=True), SCHEMA, strict=True)]
            self._spool.append(pa.Table.from_arrays(columns, schema=SCHEMA))
        self._rows = []
        self._bytes = 0


class _Tally:
    """Counts for the manifest; `read` counts the records that could be read, dropped ones included."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.read: int = facts.get("read", 0)
        self.duplicates: int = facts.get("duplicates", 0)
        self.skipped: Counter[str] = Counter(facts.get("skipped", {}))
        self._splits: dict[str, dict[str, int]] = facts.get("splits") or {split: _nothing() for split in stage.SPLITS}
        self._sets: dict[str, dict[str, int]] = facts.get("pile_set_names") or {}

    @property
    def documents(self) -> int:
        return sum(counts["documents"] for counts in self._splits.values())

    def keep(self, split: str, pile_set_name: str | None, size: int) -> None:
        counted = [self._splits[split]]
        if pile_set_name is not None:
            counted.append(self._sets.setdefault(pile_set_name, _nothing()))
        for counts in counted:
            counts["documents"] += 1
            counts["bytes"] += size

    def facts(self) -> dict[str, Any]:
        return {
            "read": self.read,
            "duplicates": self.duplicates,
            "skipped": dict(self.skipped),
            "splits": self._splits,
            "pile_set_names": self._sets,
        }

    def summary(self, source: str) -> dict[str, Any]:
        """Of the records there were, `documents` are kept, `duplicates` and `skipped` (by reason) are not."""
        size = sum(counts["bytes"] for counts in self._splits.values())
        counts = {name: value for name, value in self.facts().items() if name != "read"}
        return {"source": source, "documents": self.documents, "bytes": size, **counts}


def _nothing() -> dict[str, int]:
    return {"documents": 0, "bytes": 0}
