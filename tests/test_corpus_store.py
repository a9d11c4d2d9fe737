"""The token store: counts, duplicates, order, and what is said about shards that are not whole."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farstate.corpus.store import TokenStore, length_buckets, write_store
from farstate.corpus.tokens import INDEX_SCHEMA
from farstate.errors import FarstateError
from farstate.files import MANIFEST, read_manifest, write_manifest

Document = tuple[str, str, int]


def write_shard(
    folder: Path, documents: Sequence[Document], *, dtype: str = "uint16", vocabulary: int = 50_000, sets: bool = False
) -> Path:
    """A shard of made-up documents (title, split, length); token t of a document is (its title's hash + t) mod the vocabulary."""
    folder.mkdir(parents=True)
    rows, parts, offset = [], [np.empty(0, dtype=f"<u{np.dtype(dtype).itemsize}")], 0
    for title, split, length in documents:
        rows.append(
            {
                "id": hashlib.sha256(title.encode()).hexdigest()[:32],
                "split": split,
                "source": folder.name,
                "title": title,
                "pile_set_name": f"set {length % 2}" if sets else None,
                "bytes": 3 * length,
                "offset": offset,
                "length": length,
            }
        )
        parts.append(expected_tokens(title, 0, length, vocabulary).astype(parts[0].dtype))
        offset += length
    np.concatenate(parts).tofile(folder / "tokens.bin")
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), folder / "index.parquet")
    write_manifest(folder, {"dtype": dtype, "vocabulary_size": vocabulary, "tokens": offset}, ["tokens.bin", "index.parquet"])
    return folder


def expected_tokens(title: str, start: int, length: int, vocabulary: int = 50_000) -> np.ndarray:
    base = int(hashlib.sha256(title.encode()).hexdigest()[:8], 16)
    return (base + np.arange(start, start + length)) % vocabulary


def make_store(folder: Path, documents: Sequence[Document], shards: int = 2) -> TokenStore:
    """A store of made-up documents, dealt out to shards."""
    paths = [write_shard(folder / f"shard{n}", documents[n::shards]) for n in range(shards)]
    write_store(paths, 50_000, folder / "store")
    return TokenStore(folder / "store")


DOCUMENTS: list[Document] = [
    *((f"train {n}", "train", n + 1) for n in range(40)),
    *((f"test {n}", "test", 100 * n) for n in range(1, 6)),
    ("validation", "validation", 7),
]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_documents_and_tokens(tmp_path: Path, dtype: str) -> None:
    vocabulary = 50_000 if dtype == "uint16" else 100_000
    paths = [write_shard(tmp_path / f"s{n}", DOCUMENTS[n::3], dtype=dtype, vocabulary=vocabulary, sets=True) for n in range(3)]
    write_store(paths, vocabulary, tmp_path / "store")
    store = TokenStore(tmp_path / "store")
    assert store.vocabulary_size == vocabulary
    for split, count in (("train", 40), ("test", 5), ("validation", 1)):
        table = store.documents(split)
        assert store.documents(split) is table
        assert len(table) == count == table.ids.size == table.title.size == table.source.size == table.pile_set_name.size
        assert table.ids.tolist() == sorted(table.ids.tolist())
        for index in range(count):
            title = str(table.title[index])
            tokens = store.read(int(table.shard[index]), int(table.offset[index]), int(table.length[index]))
            assert tokens.dtype == np.int64
            assert tokens.tolist() == expected_tokens(title, 0, tokens.size, vocabulary).tolist()
            assert table.source[index] == f"s{table.shard[index]}"
            assert table.pile_set_name[index] == f"set {table.length[index] % 2}"
    tokens[:] = 0  # a copy: the store is unharmed
    assert store.read(0, 0, 1)[0] == expected_tokens("train 0", 0, 1, vocabulary)[0]
    with pytest.raises(FarstateError, match=r"split 'tset': unknown \(did you mean 'test'\?\); known: train, validation, test"):
        store.documents("tset")


def test_summary(tmp_path: Path) -> None:
    paths = [write_shard(tmp_path / "deep" / "s", DOCUMENTS, sets=True)]
    write_store(paths, 50_000, tmp_path / "store")
    summary = json.loads((tmp_path / "store" / "store.json").read_text(encoding="utf-8"))
    assert [record["path"] for record in summary["shards"]] == ["../deep/s"]
    test = summary["splits"]["test"]
    assert (test["documents"], test["tokens"], test["bytes"]) == (5, 1500, 4500)
    assert test["lengths"] == {"64": 1, "128": 1, "256": 3}
    assert test["pile_set_names"] == {"set 0": {"documents": 5, "tokens": 1500, "bytes": 4500}}
    assert read_manifest(tmp_path / "store", verify=True)["splits"]["train"]["documents"] == 40
    shutil.move(tmp_path / "deep", tmp_path / "elsewhere")
    with pytest.raises(FarstateError, match=r"deep/s: no manifest\.json"):
        TokenStore(tmp_path / "store")


def test_length_buckets_at_the_edges() -> None:
    lengths = np.array([0, 1, 2, 3, 4, 4095, 4096, 8191, 8192, 2**40 - 1, 2**40])
    assert length_buckets(lengths) == {
        "0": 1,
        "1": 1,
        "2": 2,
        "4": 1,
        "2048": 1,
        "4096": 2,
        "8192": 1,
        str(2**39): 1,
        str(2**40): 1,
    }


def test_order_does_not_depend_on_the_shards(tmp_path: Path) -> None:
    one = make_store(tmp_path / "one", DOCUMENTS, shards=1)
    many = make_store(tmp_path / "many", DOCUMENTS[::-1], shards=4)
    for split in ("train", "test"):
        assert one.documents(split).ids.tolist() == many.documents(split).ids.tolist()
        assert one.documents(split).length.tolist() == many.documents(split).length.tolist()


def test_later_copies_are_dropped(tmp_path: Path) -> None:
    first = write_shard(tmp_path / "first", DOCUMENTS[:10])
    second = write_shard(tmp_path / "second", DOCUMENTS[5:])
    write_store([first, second], 50_000, tmp_path / "store")
    manifest = read_manifest(tmp_path / "store")
    assert manifest["duplicates"] == 5
    table = TokenStore(tmp_path / "store").documents("train")
    assert len(table) == 40
    assert sorted(table.title[table.shard == 0].tolist()) == sorted(title for title, _, _ in DOCUMENTS[:10])


def test_ranges_are_checked(tmp_path: Path) -> None:
    store = make_store(tmp_path, DOCUMENTS)
    size = (tmp_path / "shard0" / "tokens.bin").stat().st_size // 2
    assert store.read(0, size - 3, 3).shape == (3,)
    assert store.read(0, 0, 0).shape == (0,)
    for shard, offset, length in ((0, size - 3, 4), (0, -1, 2), (2, 0, 1), (-1, 0, 1), (0, 0, -1), (1, 2**40, 1)):
        with pytest.raises(IndexError):
            store.read(shard, offset, length)


def test_nothing_to_train_on(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "s", [("a", "test", 5), ("b", "validation", 5)])
    with pytest.raises(FarstateError, match=r"the training split is empty \(2 documents in all\)"):
        write_store([shard], 50_000, tmp_path / "store")
    empty = write_shard(tmp_path / "empty", [])
    with pytest.raises(FarstateError, match=r"the training split is empty \(0 documents in all\)"):
        write_store([empty], 50_000, tmp_path / "store")
    with pytest.raises(FarstateError, match="needs at least one"):
        write_store([], 50_000, tmp_path / "store")
    assert not (tmp_path / "store" / MANIFEST).exists()


def test_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    shards = [
        write_shard(tmp_path / "a", DOCUMENTS),
        write_shard(tmp_path / "b", DOCUMENTS, dtype="uint32"),
        write_shard(tmp_path / "c", DOCUMENTS, vocabulary=300),
    ]
    with pytest.raises(FarstateError, match=r"/b: holds uint32, .*/a holds uint16"):
        write_store(shards[:2], 50_000, tmp_path / "store")
    with pytest.raises(FarstateError, match=r"/c: made for a vocabulary of 300, the store's is 50000"):
        write_store(shards[::2], 50_000, tmp_path / "store")


def test_damaged_shards_are_noticed_at_opening(tmp_path: Path) -> None:
    make_store(tmp_path, DOCUMENTS)
    tokens = tmp_path / "shard1" / "tokens.bin"
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-2])
    with pytest.raises(FarstateError, match=rf"tokens\.bin: {len(whole) - 2} bytes, its manifest says {len(whole)}"):
        TokenStore(tmp_path / "store")
    tokens.unlink()
    with pytest.raises(FarstateError, match=r"tokens\.bin: named in .* but missing"):
        TokenStore(tmp_path / "store")
    shutil.rmtree(tmp_path / "shard1")
    write_shard(tmp_path / "shard1", DOCUMENTS[:3])
    with pytest.raises(FarstateError, match=r"not the shard that .*store\.json was made of"):
        TokenStore(tmp_path / "store")
    (tmp_path / "shard1" / MANIFEST).unlink()
    with pytest.raises(FarstateError, match="the result is unfinished"):
        TokenStore(tmp_path / "store")
    (tmp_path / "store" / MANIFEST).unlink()
    with pytest.raises(FarstateError, match="the result is unfinished"):
        TokenStore(tmp_path / "store")


def test_offsets_are_64_bit(tmp_path: Path) -> None:
    """Tokens beyond 2^32 bytes of a (sparse) file are read where they are."""
    folder = tmp_path / "shard"
    folder.mkdir()
    far = 2**31 + 12_345
    with open(folder / "tokens.bin", "wb") as handle:
        handle.seek(2 * far)
        np.arange(10, dtype="<u2").tofile(handle)
    row = {
        "id": "0" * 32,
        "split": "train",
        "source": "s",
        "title": "far",
        "pile_set_name": None,
        "bytes": 1,
        "offset": far,
        "length": 10,
    }
    pq.write_table(pa.Table.from_pylist([row], schema=INDEX_SCHEMA), folder / "index.parquet")
    record = {"bytes": 2 * (far + 10), "sha256": "0" * 64}  # hashing 4 GiB of zeros would be the slow part of all tests
    listing = {"tokens.bin": record, "index.parquet": {"bytes": (folder / "index.parquet").stat().st_size, "sha256": "0" * 64}}
    manifest = {"dtype": "uint16", "vocabulary_size": 300, "tokens": far + 10, "files": listing}
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    write_store([folder], 300, tmp_path / "store")
    store = TokenStore(tmp_path / "store")
    table = store.documents("train")
    assert store.read(int(table.shard[0]), int(table.offset[0]), 10).tolist() == list(range(10))
