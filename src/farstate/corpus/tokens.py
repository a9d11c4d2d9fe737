"""Tokens: the documents of one source as one flat file of integers, with an index beside it."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from farstate.corpus import stage
from farstate.corpus.documents import SCHEMA as DOCUMENTS_SCHEMA
from farstate.corpus.tokenizer import load_tokenizer, symbols
from farstate.errors import FarstateError
from farstate.files import atomic_path, read_json, read_manifest, sha256_file, write_json, write_manifest
from farstate.params import Store

if TYPE_CHECKING:
    from tokenizers import Encoding

TOKENS = "tokens.bin"
INDEX = "index.parquet"
INDEX_SCHEMA = pa.schema(
    [
        *(DOCUMENTS_SCHEMA.field(name) for name in ("id", "split", "source", "title", "pile_set_name", "bytes")),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
    ]
)

Dtype = Literal["uint16", "uint32"]
Ids = NDArray[Any]
# What the manifest of a shard keeps of that of its documents, so that the store knows what it stands for.
_CARRIED = ("source", "inputs", "skipped", "duplicates")
# An encoded token takes about 100 bytes until it is reduced to its id: batches bound that memory.
_BATCH_BYTES = 1 << 18


def write_tokens(
    documents: Path,
    tokenizer: Path,
    store: Store,
    vocabulary_size: int,
    output: Path,
    *,
    threads: int | None = None,
    progress: stage.Progress | None = None,
) -> None:
    """Tokenise a result of `write_documents` into the directory `output`.

    `tokens.bin` holds the tokens of all documents, one after the other in the order of `documents`, little-endian;
    `index.parquet` (see INDEX_SCHEMA) says where each document starts (`offset`) and how many tokens it has (`length`).
    No special tokens are added. A run that was killed goes on after the last row group it had finished, and ends
    with the same bytes as an undisturbed one.

    Args:
        vocabulary_size: size of the model's embedding; every id must be below it.
        threads: cores for the tokenizer; by default all.

    Raises:
        FarstateError: the tokenizer or the store's dtype does not fit the vocabulary, or an input is unfinished.
    """
    stage.begin(output)
    dtype = choose_dtype(store.dtype, vocabulary_size)
    if (size := symbols(load_tokenizer(tokenizer))) > vocabulary_size:
        raise FarstateError(
            f"{tokenizer}: has {size} symbols, the vocabulary size is {vocabulary_size}; raise tokenizer.vocabulary_size"
        )
    source = stage.part(documents, stage.DOCUMENTS)
    read = read_manifest(source.parent)
    fingerprint = {
        "documents": read["files"][stage.DOCUMENTS]["sha256"],
        "tokenizer": sha256_file(stage.part(tokenizer, stage.TOKENIZER)),
        "dtype": dtype,
    }
    with pq.ParquetFile(source) as file, _Scratch(output, fingerprint, np.dtype(dtype)) as scratch:
        total = file.metadata.num_rows

        def to_ids(encoding: Encoding, row: int) -> Ids:
            ids = np.array(encoding.ids, dtype="<u4")
            if ids.size and int(ids.max()) >= vocabulary_size:
                raise FarstateError(
                    f"{source} row {row + 1}: the tokenizer gave id {ids.max()}, the vocabulary size is {vocabulary_size}"
                )
            return ids.astype(np.dtype(dtype).newbyteorder("<"))

        batches = _batches(file, scratch.groups, scratch.documents)
        for batch, ids in _encoded(tokenizer, batches, to_ids, threads or len(os.sched_getaffinity(0))):
            scratch.append(ids)
            if batch.ends_group:
                scratch.commit()
            if progress:
                progress(scratch.documents, total)
        summary = _write_index(file, scratch.lengths, output / INDEX)
        scratch.finish()
    contents = {
        "dtype": dtype,
        "vocabulary_size": vocabulary_size,
        **summary,
        **{key: read[key] for key in _CARRIED if key in read},
    }
    write_manifest(output, contents, [TOKENS, INDEX])
    scratch.clean()


def choose_dtype(dtype: Literal["auto", "uint16", "uint32"], vocabulary_size: int) -> Dtype:
    """The integer type of the store.

    Raises:
        FarstateError: the asked type is too small for the vocabulary.
    """
    if dtype == "uint16" and vocabulary_size > 1 << 16:
        raise FarstateError(f"store.dtype: uint16 holds 65536 symbols, the vocabulary has {vocabulary_size}; use uint32 or auto")
    if dtype == "auto":
        return "uint16" if vocabulary_size <= 1 << 16 else "uint32"
    return dtype


@dataclass(frozen=True)
class _Batch:
    first_row: int
    texts: list[str]
    ends_group: bool


def _batches(file: pq.ParquetFile, first_group: int, first_row: int) -> Iterator[_Batch]:
    for group in range(first_group, file.num_row_groups):
        table = file.read_row_group(group, columns=["text", "bytes"])
        texts = table["text"].to_pylist()
        ends = np.cumsum(table["bytes"].to_numpy())
        start = 0
        while start < len(texts):
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + _BATCH_BYTES, side="right")))
            yield _Batch(first_row + start, texts[start:stop], stop == len(texts))
            start = stop
        first_row += len(texts)


def _encoded(
    tokenizer: Path, batches: Iterator[_Batch], to_ids: Callable[[Encoding, int], Ids], threads: int
) -> Iterator[tuple[_Batch, list[Ids]]]:
    """Encode on `threads` threads, in order.

    Each thread has a tokenizer of its own: the library's parallel mode shares one cache of words behind a lock, which costs
    a third of its speed. The interpreter is free while the library works.
    """
    own = threading.local()

    def prepare() -> None:
        own.encoder = load_tokenizer(tokenizer)

    def encode(batch: _Batch) -> list[Ids]:
        encodings = own.encoder.encode_batch_fast(batch.texts, add_special_tokens=False)
        return [to_ids(encoding, batch.first_row + number) for number, encoding in enumerate(encodings)]

    with stage.parallelism(False), ThreadPoolExecutor(threads, initializer=prepare) as pool:
        running: deque[tuple[_Batch, Future[list[Ids]]]] = deque()
        for batch in batches:
            running.append((batch, pool.submit(encode, batch)))
            if len(running) > 2 * threads:
                done, future = running.popleft()
                yield done, future.result()
        while running:
            done, future = running.popleft()
            yield done, future.result()


class _Scratch:
    """Unfinished output: tokens and lengths appended batch by batch, and a record of what is safely on disk.

    The record is written after both files have reached the disk. What lies behind it in them is cut off when
    work goes on; a record of other inputs, or one that the files do not bear out, is worth nothing.
    """

    def __init__(self, output: Path, fingerprint: dict[str, str], dtype: np.dtype[Any]) -> None:
        self._final = output / TOKENS
        self._tokens_path = output / ".tokens.part"
        self._lengths_path = output / ".lengths.part"
        self._record_path = output / ".progress.json"
        self._fingerprint = fingerprint
        self._itemsize = dtype.itemsize
        self.groups = self.documents = self._tokens = 0
        # Killed between the last rename and the manifest: the tokens have their final name already. A link, into DVC's cache say,
        # is not this run's to write through.
        if self._final.exists() and not self._tokens_path.exists() and _own(self._final):
            os.replace(self._final, self._tokens_path)
        self._resume()

    def __enter__(self) -> _Scratch:
        with ExitStack() as stack:
            self._tokens_file = stack.enter_context(open(_cut(self._tokens_path, self._tokens * self._itemsize), "ab"))
            self._lengths_file = stack.enter_context(open(_cut(self._lengths_path, self.documents * 8), "ab"))
            self._files = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def append(self, rows: list[Ids]) -> None:
        for row in rows:
            row.tofile(self._tokens_file)
        np.array([row.size for row in rows], dtype="<i8").tofile(self._lengths_file)
        self.documents += len(rows)
        self._tokens += sum(row.size for row in rows)

    def commit(self) -> None:
        """A row group is complete: make it durable, then record it."""
        self.groups += 1
        for file in (self._tokens_file, self._lengths_file):
            file.flush()
            os.fsync(file.fileno())
        record = {"inputs": self._fingerprint, "groups": self.groups, "documents": self.documents, "tokens": self._tokens}
        write_json(self._record_path, record)

    def lengths(self, start: int, count: int) -> NDArray[np.int64]:
        """Tokens of `count` documents from the document `start` on."""
        return np.fromfile(self._lengths_path, dtype="<i8", count=count, offset=8 * start).astype(np.int64)

    def finish(self) -> None:
        os.replace(self._tokens_path, self._final)

    def clean(self) -> None:
        self._lengths_path.unlink(missing_ok=True)
        self._record_path.unlink(missing_ok=True)

    def _resume(self) -> None:
        try:
            record = read_json(self._record_path)
            sizes = self._tokens_path.stat().st_size, self._lengths_path.stat().st_size
            borne_out = sizes[0] >= record["tokens"] * self._itemsize and sizes[1] >= record["documents"] * 8
        except (FarstateError, FileNotFoundError, KeyError, TypeError):
            return
        if borne_out and record["inputs"] == self._fingerprint:
            self.groups, self.documents, self._tokens = record["groups"], record["documents"], record["tokens"]


def _own(path: Path) -> bool:
    """Whether the file has this name alone."""
    return not path.is_symlink() and path.stat().st_nlink == 1


def _cut(path: Path, size: int) -> Path:
    path.touch()
    os.truncate(path, size)
    return path


def _write_index(file: pq.ParquetFile, lengths: Callable[[int, int], NDArray[np.int64]], path: Path) -> dict[str, Any]:
    """Join the documents' names with their places, row group by row group; return the manifest's counts."""
    splits = {split: _nothing() for split in stage.SPLITS}
    sets: dict[str, dict[str, int]] = {}
    row = end = 0
    with atomic_path(path) as temporary, pq.ParquetWriter(temporary, INDEX_SCHEMA, compression="zstd") as writer:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=INDEX_SCHEMA.names[:-2])
            here = lengths(row, table.num_rows)
            ends = end + np.cumsum(here)
            table = table.append_column(INDEX_SCHEMA.field("offset"), pa.array(ends - here))
            table = table.append_column(INDEX_SCHEMA.field("length"), pa.array(here))
            table = table.select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA)
            writer.write_table(table)
            for names, counted in (("split", splits), ("pile_set_name", sets)):
                for found in table.group_by(names).aggregate([("id", "count"), ("length", "sum"), ("bytes", "sum")]).to_pylist():
                    if found[names] is not None:
                        counts = counted.setdefault(found[names], _nothing())
                        for key, column in (("documents", "id_count"), ("tokens", "length_sum"), ("bytes", "bytes_sum")):
                            counts[key] += found[column]
            row += table.num_rows
            end += int(here.sum())
    totals = {key: sum(counts[key] for counts in splits.values()) for key in _nothing()}
    return {**totals, "splits": splits, "pile_set_names": sets}


def _nothing() -> dict[str, int]:
    return {"documents": 0, "tokens": 0, "bytes": 0}
