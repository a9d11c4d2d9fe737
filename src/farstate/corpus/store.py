"""The token store: the shards of a corpus as one collection of documents."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike

from farstate.corpus import stage
from farstate.corpus.columns import FileColumn, Integers
from farstate.corpus.document_table import LENGTHS, OFFSETS, RAW, SHARDS, DocumentTable
from farstate.corpus.tokens import INDEX, INDEX_SCHEMA, TOKENS
from farstate.errors import FarstateError, nearest
from farstate.files import atomic_path, read_json, read_manifest, write_json, write_manifest

STORE = "store.json"
# 64-bit string offsets: the ids of a few ten million documents pass 2 GiB.
STORE_SCHEMA = pa.schema(
    [
        *(field.with_type(pa.large_string()) if field.type == pa.string() else field for field in INDEX_SCHEMA),
        pa.field("shard", pa.int32(), nullable=False),
    ]
)
_GROUP_DOCUMENTS = 1 << 20
# What is sorted in memory at one time, and what is read of a shard's index at one time.
_BUCKET_DOCUMENTS = 1 << 19
_READ_DOCUMENTS = 1 << 17
# Each is an open file while the shards are read.
_MOST_BUCKETS = 512
_SCRATCH = ".buckets"


def write_store(
    shards: list[Path],
    vocabulary_size: int,
    output: Path,
    *,
    to_train_on: bool = True,
    progress: stage.Progress | None = None,
) -> None:
    """Join results of `write_tokens` into a store in the directory `output`; no token is copied.

    `store.json` lists the shards (paths relative to `output`) and counts documents and tokens per split, per length
    (keys are lower edges: "4096" counts lengths 4096 … 8191) and per pile_set_name. `index.parquet` holds the kept documents
    by (split, id); `offsets.bin`, `lengths.bin` and `shards.bin` are three of its columns as raw little-endian integers (see RAW),
    row by row, for readers. Of documents with the same content in several shards the first is kept.

    An index of more than half a million documents is sorted in parts by the first digits of the ids, which lie beside the result
    until it is finished, so that memory does not grow with the corpus.

    Args:
        to_train_on: whether the training split must hold documents.
        progress: called with the documents sorted so far and those of all shards.

    Raises:
        FarstateError: a shard is unfinished or does not fit the others or the vocabulary; nothing is left to train on.
    """
    stage.begin(output)
    if not shards:
        raise FarstateError("corpus.sources: a token store needs at least one")
    manifests = [read_manifest(shard) for shard in shards]
    for shard, manifest in zip(shards, manifests, strict=True):
        if manifest["vocabulary_size"] != vocabulary_size:
            raise FarstateError(
                f"{shard}: made for a vocabulary of {manifest['vocabulary_size']}, the store's is {vocabulary_size}; delete it and run again"
            )
        if manifest["dtype"] != manifests[0]["dtype"]:
            raise FarstateError(
                f"{shard}: holds {manifest['dtype']}, {shards[0]} holds {manifests[0]['dtype']}; delete one and run again"
            )
    total = sum(pq.read_metadata(shard / INDEX).num_rows for shard in shards)
    done = 0
    with _scratch(output / _SCRATCH) as scratch, _Index(output, scratch) as index:
        for part in _by_content(shards, total, scratch):
            index.add(_first_of_each(part))
            done += part.num_rows
            if progress:
                progress(done, total)
        if to_train_on and not index.splits["train"].documents:
            raise FarstateError(
                f"corpus: the training split is empty ({index.documents} documents in all); lower corpus.split.validation "
                "and corpus.split.test, change corpus.split.salt, or add documents"
            )
        index.finish()
    contents = {
        "dtype": manifests[0]["dtype"],
        "vocabulary_size": vocabulary_size,
        "documents": index.documents,
        "duplicates": total - index.documents,
        "splits": {split: summary.as_json() for split, summary in index.splits.items()},
    }
    records = [
        {
            "path": Path(os.path.relpath(shard, output)).as_posix(),
            "tokens": manifest["tokens"],
            "sha256": manifest["files"][TOKENS]["sha256"],
        }
        for shard, manifest in zip(shards, manifests, strict=True)
    ]
    write_json(output / STORE, {**contents, "shards": records})
    write_manifest(output, contents, [STORE, INDEX, *RAW])


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """An empty folder for the time being; what a killed run left in it is removed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _by_content(shards: list[Path], total: int, scratch: Path) -> Iterator[pa.Table]:
    """The documents of all shards in parts of ascending ids, unsorted within: equal ids are in one part, earlier shards first."""
    count = min(-(-total // _BUCKET_DOCUMENTS), _MOST_BUCKETS)
    if count <= 1:
        yield pa.concat_tables([_numbered(pq.read_table(shard / INDEX), number) for number, shard in enumerate(shards)])
        return
    paths = [scratch / f"{number}.arrow" for number in range(count)]
    with ExitStack() as stack:
        writers = [stack.enter_context(_stream(path)) for path in paths]
        for number, shard in enumerate(shards):
            for batch in stack.enter_context(pq.ParquetFile(shard / INDEX)).iter_batches(_READ_DOCUMENTS):
                table = _numbered(pa.Table.from_batches([batch]), number)
                bucket = _leading(table["id"]) * count >> 16
                table = table.take(pa.array(np.argsort(bucket, kind="stable")))
                ends = np.cumsum(np.bincount(bucket, minlength=count))
                for writer, end, start in zip(writers, ends.tolist(), [0, *ends[:-1].tolist()], strict=True):
                    if end > start:
                        writer.write_table(table.slice(start, end - start))
    for path in paths:
        with pa.OSFile(str(path), "rb") as source:
            yield pa.ipc.open_stream(source).read_all()
        path.unlink()


def _stream(path: Path) -> pa.ipc.RecordBatchStreamWriter:
    return pa.ipc.new_stream(str(path), STORE_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4"))


def _leading(ids: pa.ChunkedArray) -> Integers:
    """(n,): the first 16 bits of ids, which are hexadecimal numbers and sort as such."""
    digits = pc.utf8_slice_codeunits(ids, 0, 4).combine_chunks()
    codes = np.frombuffer(digits.buffers()[2], dtype=np.uint8, count=4 * len(digits)).reshape(-1, 4).astype(np.int64)
    values = np.where(codes > ord("9"), codes - ord("a") + 10, codes - ord("0"))
    return values @ np.array([1 << 12, 1 << 8, 1 << 4, 1])


def _numbered(index: pa.Table, number: int) -> pa.Table:
    shard = pa.array(np.full(index.num_rows, number, dtype=np.int32))
    return index.select(INDEX_SCHEMA.names).append_column(STORE_SCHEMA.field("shard"), shard).cast(STORE_SCHEMA)


def _first_of_each(index: pa.Table) -> pa.Table:
    """Sort by content, then by shard, and keep the first row of each content."""
    index = index.take(pc.sort_indices(index, [("id", "ascending"), ("shard", "ascending")]))
    if index.num_rows < 2:
        return index
    ids = index["id"].combine_chunks()
    new = np.concatenate([[True], pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)])
    return index.filter(pa.array(new))


class _Summary:
    """Counts of a split's documents."""

    def __init__(self) -> None:
        self.documents = self.tokens = self.bytes = 0
        self._lengths: Counter[str] = Counter()
        self._sets: dict[str, Counter[str]] = {}

    def add(self, part: pa.Table) -> None:
        self.documents += part.num_rows
        self.tokens += pc.sum(part["length"]).as_py() or 0
        self.bytes += pc.sum(part["bytes"]).as_py() or 0
        self._lengths.update(length_buckets(part["length"].to_numpy()))
        for row in (
            part.group_by("pile_set_name").aggregate([("length", "sum"), ("length", "count"), ("bytes", "sum")]).to_pylist()
        ):
            if row["pile_set_name"] is not None:
                counts = {"documents": row["length_count"], "tokens": row["length_sum"], "bytes": row["bytes_sum"]}
                self._sets.setdefault(row["pile_set_name"], Counter()).update(counts)

    def as_json(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "lengths": dict(self._lengths),
            "pile_set_names": {name: dict(counts) for name, counts in self._sets.items()},
        }


class _Index:
    """Writes index.parquet and its raw columns, from documents that come by ascending id: split after split.

    All but the first split wait on the disk until the first is complete.
    """

    def __init__(self, output: Path, scratch: Path) -> None:
        self.splits = {split: _Summary() for split in stage.SPLITS}
        self._output = output
        self._waiting = {split: scratch / f"{split}.arrow" for split in stage.SPLITS[1:]}
        self._pending: list[pa.Table] = []
        self._rows = 0

    @property
    def documents(self) -> int:
        return sum(summary.documents for summary in self.splits.values())

    def __enter__(self) -> _Index:
        with ExitStack() as stack:
            self._parquet = stack.enter_context(
                pq.ParquetWriter(stack.enter_context(atomic_path(self._output / INDEX)), STORE_SCHEMA, compression="zstd")
            )
            self._raw: dict[str, IO[bytes]] = {
                name: stack.enter_context(open(stack.enter_context(atomic_path(self._output / name)), "wb")) for name in RAW
            }
            self._waiting_writers = {split: stack.enter_context(_stream(path)) for split, path in self._waiting.items()}
            self._files = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._files.__exit__(*exception)

    def add(self, documents: pa.Table) -> None:
        for split, summary in self.splits.items():
            part = documents.filter(pc.equal(documents["split"], split))
            summary.add(part)
            if split in self._waiting_writers:
                self._waiting_writers[split].write_table(part)
            else:
                self._write(part)

    def finish(self) -> None:
        self._end_split()
        for split, path in self._waiting.items():
            self._waiting_writers[split].close()
            with pa.OSFile(str(path), "rb") as source:
                for batch in pa.ipc.open_stream(source):
                    self._write(pa.Table.from_batches([batch]))
            self._end_split()

    def _write(self, part: pa.Table) -> None:
        for name, column in ((OFFSETS, "offset"), (LENGTHS, "length"), (SHARDS, "shard")):
            part[column].to_numpy().astype(RAW[name], copy=False).tofile(self._raw[name])
        self._pending.append(part)
        self._rows += part.num_rows
        if self._rows >= _GROUP_DOCUMENTS:
            whole = self._rows // _GROUP_DOCUMENTS * _GROUP_DOCUMENTS
            table = pa.concat_tables(self._pending)
            self._groups(table.slice(0, whole))
            self._pending, self._rows = [table.slice(whole)], self._rows - whole

    def _end_split(self) -> None:
        if self._rows:
            self._groups(pa.concat_tables(self._pending))
        self._pending, self._rows = [], 0

    def _groups(self, table: pa.Table) -> None:
        # In one chunk each: the bytes do not depend on how the documents came.
        self._parquet.write_table(table.combine_chunks(), row_group_size=_GROUP_DOCUMENTS)


def length_buckets(lengths: Integers) -> dict[str, int]:
    """How many documents there are from each power of two up to the next, by the power ("0" for empty ones)."""
    exponents = np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
    edges, counts = np.unique(np.where(lengths > 0, np.left_shift(1, np.maximum(exponents - 1, 0)), 0), return_counts=True)
    return {str(int(edge)): int(count) for edge, count in zip(edges, counts, strict=True)}


class TokenStore:
    """A store made by `write_store`; opening takes no longer for a large one, and no more is read than is asked for.

    Raises:
        FarstateError: the store or a shard is missing, unfinished, of the wrong size, or not the one it was made of.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        manifest = read_manifest(self._directory)
        contents = read_json(self._directory / STORE)
        self.vocabulary_size: int = contents["vocabulary_size"]
        self._dtype = np.dtype(contents["dtype"]).newbyteorder("<")
        self._counts = {split: contents["splits"][split]["documents"] for split in stage.SPLITS}
        self._raw = all(name in manifest["files"] for name in RAW)
        self._tables: dict[str, DocumentTable] = {}
        self._shards = [self._open(record) for record in contents["shards"]]

    def documents(self, split: str) -> DocumentTable:
        """The documents of `split` (train, validation or test), ordered by id whatever the order of the shards.

        Raises:
            FarstateError: there is no such split.
        """
        if split not in stage.SPLITS:
            raise FarstateError(f"split '{split}': unknown{nearest(split, stage.SPLITS)}; known: {', '.join(stage.SPLITS)}")
        if split not in self._tables:
            first = sum(self._counts[before] for before in stage.SPLITS[: stage.SPLITS.index(split)])
            self._tables[split] = DocumentTable(self._directory / INDEX, split, first, self._counts[split], raw=self._raw)
        return self._tables[split]

    def read(self, shard: int, offset: int, length: int) -> Integers:
        """A copy of `length` tokens from `offset` on: (length,) int64.

        Raises:
            IndexError: the range is not inside the shard.
        """
        return self.windows(np.array([shard]), np.array([offset]), length)[0]

    def windows(self, shard: ArrayLike, offset: ArrayLike, length: int) -> Integers:
        """Copies of `length` tokens from each (shard, offset): (n, length) int64 from two arrays (n,).

        Raises:
            IndexError: a range is not inside its shard.
            FarstateError: a shard's file was removed or cut short since it was opened.
        """
        shards = np.asarray(shard, dtype=np.int64)
        offsets = np.asarray(offset, dtype=np.int64)
        if length < 0 or (offsets < 0).any() or (shards < 0).any() or (shards >= len(self._shards)).any():
            raise IndexError(f"{self._directory}: no such tokens (shards {shards}, offsets {offsets}, length {length})")
        for number in np.unique(shards) if offsets.size > 1 else ():
            self._shards[number].expect(offsets[shards == number], length)
        rows = np.empty((offsets.size, length), dtype=self._dtype)
        for row, number, start in zip(rows, shards.tolist(), offsets.tolist(), strict=True):
            tokens = self._shards[number]
            if start > len(tokens) - length:
                raise IndexError(f"{self._directory}: shard {number} has {len(tokens)} tokens, asked {length} from {start} on")
            tokens.read_into(row, start)
        return rows.astype(np.int64)

    def _open(self, record: dict[str, Any]) -> FileColumn:
        directory = self._directory / record["path"]
        manifest = read_manifest(directory)
        path = directory / TOKENS
        if (
            manifest["files"][TOKENS]["sha256"] != record["sha256"]
            or path.stat().st_size != record["tokens"] * self._dtype.itemsize
        ):
            raise FarstateError(
                f"{path}: not the shard that {self._directory / STORE} was made of; delete {self._directory} and run again"
            )
        return FileColumn(path, self._dtype, record["tokens"])
