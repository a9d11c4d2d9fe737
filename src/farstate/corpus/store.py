"""The token store: the shards of a corpus as one memory-mapped collection of documents."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from farstate.corpus import stage
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

Integers = NDArray[np.int64]


def write_store(shards: list[Path], vocabulary_size: int, output: Path, *, to_train_on: bool = True) -> None:
    """Join results of `write_tokens` into a store in the directory `output`; no token is copied.

    `store.json` lists the shards (paths relative to `output`) and counts documents and tokens per split, per length
    (keys are lower edges: "4096" counts lengths 4096 … 8191) and per pile_set_name. `index.parquet` holds the kept documents
    by (split, id). Of documents with the same content in several shards the first is kept.

    Args:
        to_train_on: whether the training split must hold documents.

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
    index = pa.concat_tables([_shard_index(shard, number) for number, shard in enumerate(shards)])
    total = index.num_rows
    index = _first_of_each(index)
    parts = {split: index.filter(pc.equal(index["split"], split)) for split in stage.SPLITS}
    if to_train_on and not parts["train"].num_rows:
        raise FarstateError(
            f"corpus: the training split is empty ({index.num_rows} documents in all); lower corpus.split.validation "
            "and corpus.split.test, change corpus.split.salt, or add documents"
        )
    with atomic_path(output / INDEX) as temporary, pq.ParquetWriter(temporary, STORE_SCHEMA, compression="zstd") as writer:
        for part in parts.values():
            if part.num_rows:
                writer.write_table(part, row_group_size=_GROUP_DOCUMENTS)
    contents = {
        "dtype": manifests[0]["dtype"],
        "vocabulary_size": vocabulary_size,
        "documents": index.num_rows,
        "duplicates": total - index.num_rows,
        "splits": {split: _summary(part) for split, part in parts.items()},
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
    write_manifest(output, contents, [STORE, INDEX])


def _shard_index(shard: Path, number: int) -> pa.Table:
    table = pq.read_table(shard / INDEX, schema=INDEX_SCHEMA)
    shard = pa.array(np.full(table.num_rows, number, dtype=np.int32))
    return table.append_column(STORE_SCHEMA.field("shard"), shard).cast(STORE_SCHEMA)


def _first_of_each(index: pa.Table) -> pa.Table:
    """Sort by content, then by shard, and keep the first row of each content."""
    index = index.take(pc.sort_indices(index, [("id", "ascending"), ("shard", "ascending")]))
    if index.num_rows < 2:
        return index
    ids = index["id"].combine_chunks()
    new = np.concatenate([[True], pc.not_equal(ids.slice(1), ids.slice(0, len(ids) - 1)).to_numpy(zero_copy_only=False)])
    return index.filter(pa.array(new))


def _summary(part: pa.Table) -> dict[str, Any]:
    sets = part.group_by("pile_set_name").aggregate([("length", "sum"), ("length", "count")]).to_pylist()
    return {
        "documents": part.num_rows,
        "tokens": pc.sum(part["length"]).as_py() or 0,
        "bytes": pc.sum(part["bytes"]).as_py() or 0,
        "lengths": length_buckets(part["length"].to_numpy()),
        "pile_set_names": {
            row["pile_set_name"]: {"documents": row["length_count"], "tokens": row["length_sum"]}
            for row in sets
            if row["pile_set_name"] is not None
        },
    }


def length_buckets(lengths: Integers) -> dict[str, int]:
    """How many documents there are from each power of two up to the next, by the power ("0" for empty ones)."""
    exponents = np.frexp(lengths.astype(np.float64))[1].astype(np.int64)
    edges, counts = np.unique(np.where(lengths > 0, np.left_shift(1, np.maximum(exponents - 1, 0)), 0), return_counts=True)
    return {str(int(edge)): int(count) for edge, count in zip(edges, counts, strict=True)}


class DocumentTable:
    """The documents of one split, by content hash; a document's index is its place here.

    Attributes:
        shard: (D,) int32, offset: (D,) int64, length: (D,) int64 in tokens.
        ids, source, title: (D,) str; pile_set_name: (D,) object, str or None. Read when first asked for.
    """

    def __init__(self, path: Path, split: str) -> None:
        self._path = path
        self.split = split
        numbers = self._read(["shard", "offset", "length"])
        self.shard: NDArray[np.int32] = numbers["shard"].to_numpy()
        self.offset: Integers = numbers["offset"].to_numpy()
        self.length: Integers = numbers["length"].to_numpy()

    def __len__(self) -> int:
        return self.length.size

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

    def _strings(self, column: str) -> NDArray[np.str_]:
        return np.array(self._read([column])[column].to_pylist(), dtype=np.str_)

    def _read(self, columns: list[str]) -> pa.Table:
        return pq.read_table(self._path, columns=columns, filters=pc.field("split") == self.split)


class TokenStore:
    """A store made by `write_store`, memory-mapped: opening takes no longer for a large one.

    Raises:
        FarstateError: the store or a shard is missing, unfinished, of the wrong size, or not the one it was made of.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        read_manifest(self._directory)
        contents = read_json(self._directory / STORE)
        self.vocabulary_size: int = contents["vocabulary_size"]
        self._dtype = np.dtype(contents["dtype"]).newbyteorder("<")
        self._tables: dict[str, DocumentTable] = {}
        self._shards = [self._map(record) for record in contents["shards"]]

    def documents(self, split: str) -> DocumentTable:
        """The documents of `split` (train, validation or test), ordered by id whatever the order of the shards.

        Raises:
            FarstateError: there is no such split.
        """
        if split not in stage.SPLITS:
            raise FarstateError(f"split '{split}': unknown{nearest(split, stage.SPLITS)}; known: {', '.join(stage.SPLITS)}")
        if split not in self._tables:
            self._tables[split] = DocumentTable(self._directory / INDEX, split)
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
        """
        shards = np.asarray(shard, dtype=np.int64)
        offsets = np.asarray(offset, dtype=np.int64)
        if length < 0 or (offsets < 0).any() or (shards < 0).any() or (shards >= len(self._shards)).any():
            raise IndexError(f"{self._directory}: no such tokens (shards {shards}, offsets {offsets}, length {length})")
        rows = np.empty((offsets.size, length), dtype=np.int64)
        for number in np.unique(shards):
            tokens = self._shards[number]
            here = np.flatnonzero(shards == number)
            if int(offsets[here].max()) > tokens.size - length:
                raise IndexError(
                    f"{self._directory}: shard {number} has {tokens.size} tokens, asked {length} from {offsets[here].max()} on"
                )
            for row in here:
                rows[row] = tokens[offsets[row] : offsets[row] + length]
        return rows

    def _map(self, record: dict[str, Any]) -> NDArray[Any]:
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
        tokens: NDArray[Any] = np.memmap(path, dtype=self._dtype, mode="r")
        return tokens
