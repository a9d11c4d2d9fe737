"""Opening and reading a token store of the Pile's size at random, against what a user would pick instead.

    python benchmarks/store_reading.py                                  (200 million documents; 5 GB of disk, 10 GB of memory for the rivals)
    python benchmarks/store_reading.py --documents 2000000 --through-write-store --rivals

Makes a store whose token shards are sparse files of 600 GB in all (zeros, which take no disk) with made-up documents laid out over
them; then, each in a process of its own, opens it and reads shuffled batches of 256 windows of 2,049 tokens:

    farstate    TokenStore and ShuffledWindows
    numpy       offsets, lengths and a permutation of all windows in memory, one memory map a shard
    datasets    an Arrow table of the windows, `shuffle(seed)`, memory maps

Prints one JSON object. Memory in MB, above what the process had after its imports: `peak` is the largest resident set (anonymous pages and
mapped pages of files alike), `page_tables` what the kernel keeps for a process's maps and counts nowhere in its resident set.
With --through-write-store the store is made by `write_store` from shards, which is measured too; else its files are written directly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

SHARDS = 30
CONTEXT = 2048
VOCABULARY = 50_277
READERS = ("farstate", "numpy", "datasets")
_AT_ONCE = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=200_000_000)
    parser.add_argument("--bytes", type=int, default=600 * 10**9, help="of all token shards together (default %(default)s)")
    parser.add_argument("--batches", type=int, default=1000, help="read by each (default %(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="windows in a batch (default %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the store is made and removed (default: a temporary folder)")
    parser.add_argument("--through-write-store", action="store_true", help="make the store from shards by write_store")
    parser.add_argument("--rivals", nargs="*", choices=READERS[1:], default=list(READERS[1:]))
    parser.add_argument("--only", choices=(*READERS, "write"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only == "write":
        print(json.dumps(write(arguments.folder)))
    elif arguments.only:
        print(json.dumps(read(arguments.only, arguments.folder / "store", arguments.batches, arguments.rows)))
    else:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
            print(json.dumps(measure(arguments, Path(name)), indent=2))


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    def alone(which: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--only", which, "--folder", str(folder)]
        command += ["--batches", str(arguments.batches), "--rows", str(arguments.rows)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)

    found: dict[str, Any] = {"documents": arguments.documents, "token_bytes": arguments.bytes, "batches": arguments.batches}
    if arguments.through_write_store:
        make_shards(folder, arguments.documents, arguments.bytes)
        found["write_store"] = alone("write")
    else:
        make_store(folder, arguments.documents, arguments.bytes)
    for which in ("farstate", *arguments.rivals):
        found[which] = alone(which)
        print(f"{which}: {json.dumps(found[which])}", file=sys.stderr)
    return found


# --- made-up documents, about as long as the Pile's ------------------------------------------------------


def made_lengths(generator: np.random.Generator, count: int) -> np.ndarray:
    """(n,) tokens: 1,500 on average, half of the documents below 500."""
    return np.clip(generator.lognormal(6.2, 1.5, count), 1, 10**7).astype(np.int64)


def layout(documents: int, size: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids (n, 32) of hexadecimal digits, offsets (n,) and lengths (n,) of a shard's documents, spread over its `size` tokens."""
    generator = np.random.default_rng(number)
    count = documents // SHARDS + (number < documents % SHARDS)
    lengths = made_lengths(generator, count)
    room = size / max(1, int(lengths.sum()))
    if room < 1.0:
        lengths = np.maximum((lengths * room).astype(np.int64), 1)
        room = size / int(lengths.sum())
    ends = np.cumsum(lengths)
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    ids = digits[generator.integers(0, 16, (count, 32), dtype=np.uint8)]
    return ids, np.minimum(((ends - lengths) * room).astype(np.int64), size - lengths), lengths


def make_tokens(folder: Path, number: int, size: int) -> dict[str, Any]:
    """A sparse token file and its manifest."""
    shard = folder / f"tokens.{number}"
    shard.mkdir(parents=True, exist_ok=True)
    (shard / "tokens.bin").touch()
    os.truncate(shard / "tokens.bin", 2 * size)
    # Not the file's checksum, which would take minutes: a store compares it with what it was made of.
    record = {"bytes": 2 * size, "sha256": hashlib.sha256(str(number).encode()).hexdigest()}
    contents = {"dtype": "uint16", "vocabulary_size": VOCABULARY, "tokens": size, "files": {"tokens.bin": record}}
    (shard / "manifest.json").write_text(json.dumps(contents), encoding="utf-8")
    return {"path": f"../tokens.{number}", "tokens": size, "sha256": record["sha256"]}


def make_shards(folder: Path, documents: int, size: int) -> None:
    """Results as the tokens stage leaves them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from farstate.corpus.tokens import INDEX_SCHEMA

    for number in range(SHARDS):
        make_tokens(folder, number, size // 2 // SHARDS)
        ids, offsets, lengths = layout(documents, size // 2 // SHARDS, number)
        splits = np.where(ids[:, -1] == ord("f"), np.where(ids[:, -2] == ord("f"), "validation", "test"), "train")
        count = lengths.size
        columns = {
            "id": pa.StringArray.from_buffers(
                count, pa.py_buffer(np.arange(0, 32 * count + 1, 32, dtype=np.int32)), pa.py_buffer(ids.tobytes())
            ),
            "split": pa.array(splits, pa.string()),
            "source": pa.array(np.full(count, "pile"), pa.string()),
            "title": pa.array(np.char.add(f"{number:02d} row ", np.arange(count).astype("U9")), pa.string()),
            "pile_set_name": pa.array(np.array(["Pile-CC", "ArXiv", "Github", "Books3"])[ids[:, 0] % 4], pa.string()),
            "bytes": pa.array(4 * lengths),
            "offset": pa.array(offsets),
            "length": pa.array(lengths),
        }
        table = pa.table({name: columns[name].cast(INDEX_SCHEMA.field(name).type) for name in INDEX_SCHEMA.names}, INDEX_SCHEMA)
        pq.write_table(table, folder / f"tokens.{number}" / "index.parquet", compression="zstd", row_group_size=1 << 17)


def make_store(folder: Path, documents: int, size: int) -> None:
    """The files of a store that readers read, written directly: documents at random places, which may overlap, and no names."""
    store = folder / "store"
    store.mkdir(parents=True)
    records = [make_tokens(folder, number, size // 2 // SHARDS) for number in range(SHARDS)]
    generator = np.random.default_rng(0)
    names = ("offsets.bin", "lengths.bin", "shards.bin")
    total = 0
    with open(store / names[0], "wb") as offsets, open(store / names[1], "wb") as lengths, open(store / names[2], "wb") as shards:
        for first in range(0, documents, _AT_ONCE):
            count = min(_AT_ONCE, documents - first)
            length = made_lengths(generator, count)
            generator.integers(0, size // 2 // SHARDS - length).astype("<i8").tofile(offsets)
            length.astype("<i8").tofile(lengths)
            generator.integers(0, SHARDS, count, dtype=np.int32).tofile(shards)
            total += int(length.sum())
    (store / "index.parquet").write_bytes(b"")
    counts = {"documents": documents, "tokens": total}
    empty = {"documents": 0, "tokens": 0}
    contents = {
        "dtype": "uint16",
        "vocabulary_size": VOCABULARY,
        "splits": {"train": counts, "validation": empty, "test": empty},
        "shards": records,
    }
    (store / "store.json").write_text(json.dumps(contents), encoding="utf-8")
    listing = {
        name: {"bytes": (store / name).stat().st_size, "sha256": "0" * 64} for name in (*names, "index.parquet", "store.json")
    }
    (store / "manifest.json").write_text(json.dumps({"files": listing}), encoding="utf-8")


# --- what is measured ------------------------------------------------------------------------------------


def memory() -> dict[str, float]:
    """This process's memory in MB, and its peak since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    values = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.endswith("kB")}
    return {
        "peak": values["VmHWM"],
        "resident": values["VmRSS"],
        "anonymous": values["RssAnon"],
        "files": values["RssFile"],
        "page_tables": values["VmPTE"],
    }


def forget_peak() -> dict[str, float]:
    """Begin the peak anew; where the kernel has no such thing, it is that of the whole process, imports included."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory()


def write(folder: Path) -> dict[str, Any]:
    from farstate.corpus.store import write_store

    before, start = forget_peak(), time.perf_counter()
    write_store([folder / f"tokens.{number}" for number in range(SHARDS)], VOCABULARY, folder / "store")
    return {"seconds": round(time.perf_counter() - start, 1), "peak": round(memory()["peak"] - before["resident"], 1)}


def read(which: str, store: Path, batches: int, rows: int) -> dict[str, Any]:
    reader = {"farstate": Ours, "numpy": Numpy, "datasets": Datasets}[which]
    reader.load()
    before = forget_peak()
    start, cpu = time.perf_counter(), time.process_time()
    opened = reader(store, rows)
    open_seconds, open_cpu = time.perf_counter() - start, time.process_time() - cpu
    after = memory()
    start, cpu = time.perf_counter(), time.process_time()
    for step in range(batches):
        opened.batch(step)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    end = memory()
    return {
        "open_seconds": round(open_seconds, 3),
        "open_cpu_seconds": round(open_cpu, 3),
        "batch_milliseconds": round(1000 * seconds / batches, 3),
        "batch_cpu_milliseconds": round(1000 * cpu / batches, 3),
        "open_peak": round(after["peak"] - before["resident"], 1),
        **{name: round(end[name] - before["resident" if name == "peak" else name], 1) for name in ("peak", "anonymous", "files")},
        "page_tables": round(end["page_tables"] - before["page_tables"], 1),
        "windows": opened.windows,
    }


class Ours:
    def __init__(self, store: Path, rows: int) -> None:
        from farstate.corpus.readers import ShuffledWindows
        from farstate.corpus.store import TokenStore

        self._reader = ShuffledWindows(TokenStore(store), "train", CONTEXT, rows, seed=0)
        self.windows = self._reader.windows

    @staticmethod
    def load() -> None:
        import farstate.corpus.readers  # noqa: F401

    def batch(self, step: int) -> Any:
        return self._reader.batch(step).tokens


class _Rival:
    """What both need: the columns in memory, the windows of every document, a map of every shard."""

    def __init__(self, store: Path, rows: int) -> None:
        self.size = rows
        documents = json.loads((store / "store.json").read_text(encoding="utf-8"))["splits"]["train"]["documents"]
        self.offset, self.length, self.shard = (
            np.fromfile(store / name, dtype=dtype, count=documents)
            for name, dtype in (("offsets.bin", "<i8"), ("lengths.bin", "<i8"), ("shards.bin", "<i4"))
        )
        counts = np.maximum(self.length - 1, 0) // CONTEXT
        self.ends = np.cumsum(counts)
        self.starts = self.ends - counts
        self.windows = int(self.ends[-1])
        self.maps = [np.memmap(store.parent / f"tokens.{n}" / "tokens.bin", dtype="<u2", mode="r") for n in range(SHARDS)]

    def tokens(self, shard: np.ndarray, offset: np.ndarray) -> np.ndarray:
        rows = [self.maps[s][o : o + CONTEXT + 1] for s, o in zip(shard.tolist(), offset.tolist(), strict=True)]
        return np.stack(rows).astype(np.int64)


class Numpy(_Rival):
    def __init__(self, store: Path, rows: int) -> None:
        super().__init__(store, rows)
        self.order = np.random.default_rng(0).permutation(self.windows)

    @staticmethod
    def load() -> None:
        import torch  # noqa: F401 (so that every process starts from the same size)

    def batch(self, step: int) -> np.ndarray:
        window = self.order[step * self.size : (step + 1) * self.size]
        document = np.searchsorted(self.ends, window, side="right")
        return self.tokens(self.shard[document], self.offset[document] + (window - self.starts[document]) * CONTEXT)


class Datasets(_Rival):
    def __init__(self, store: Path, rows: int) -> None:
        import pyarrow as pa
        from datasets import Dataset

        super().__init__(store, rows)
        schema = pa.schema([("shard", pa.int32()), ("offset", pa.int64())])
        path = store.parent / "windows.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for first in range(0, self.windows, _AT_ONCE):
                window = np.arange(first, min(first + _AT_ONCE, self.windows))
                document = np.searchsorted(self.ends, window, side="right")
                offset = self.offset[document] + (window - self.starts[document]) * CONTEXT
                writer.write_batch(pa.record_batch([self.shard[document], offset], schema=schema))
        del self.offset, self.length, self.shard, self.ends, self.starts
        shuffled = Dataset.from_file(str(path)).shuffle(seed=0, indices_cache_file_name=str(store.parent / "order.arrow"))
        self.rows = shuffled.with_format("numpy")

    @staticmethod
    def load() -> None:
        import datasets
        import torch  # noqa: F401

        datasets.disable_progress_bars()

    def batch(self, step: int) -> np.ndarray:
        found = self.rows[step * self.size : (step + 1) * self.size]
        return self.tokens(found["shard"], found["offset"])


if __name__ == "__main__":
    main()
