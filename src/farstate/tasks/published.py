"""BABILong's published sets: by hub name, or from a local copy of their files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farstate.corpus import compressed
from farstate.errors import FarstateError
from farstate.params import PublishedBabilong
from farstate.tasks.labels import labels

_FIELDS = ("input", "question", "target")
_PARQUET_BATCH = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """A record of a published set: text that holds the facts, the question, and the answer in the labels of the task."""

    text: str
    question: str
    target: str


def published(source: PublishedBabilong, task: str, length_name: str, *, revision: str | None = None) -> Iterator[Asked]:
    """The records of one set, in order, one in memory at a time (but for a `.json` file that holds one list: it is read whole).

    On the hub a set is the split `task` of the configuration `length_name`. A local copy is a folder with
    `data/<task>/<length_name>.json`, `.jsonl` (each also compressed) or `.parquet`, with or without `data/`, or, as some
    copies lie, `<length_name>/<task>-*.parquet`.

    Args:
        task: "qa1" … "qa10".
        length_name: "0k", "1k", … "10M".
        revision: of the hub data set, as registered.

    Raises:
        FarstateError: the task is unknown, there is no such set or it cannot be read, or a record lacks a field or has a target that
            is none of the task's answers; file or set and record are named.
    """
    known = labels(task)
    records = _of_files(Path(source.files), task, length_name) if source.files is not None else None
    for where, value in records or _of_hub(str(source.hub), task, length_name, revision):
        yield _asked(value, known, where)


def _asked(value: Any, known: tuple[str, ...], where: str) -> Asked:
    if not isinstance(value, dict):
        raise FarstateError(f"{where}: an object with {', '.join(_FIELDS)} is expected, found {type(value).__name__}")
    for field in _FIELDS:
        if not isinstance(value.get(field), str) or not value[field].strip():
            raise FarstateError(f"{where}: no text under '{field}'; it has {', '.join(map(str, value)) or 'nothing'}")
    parts = [part.strip() for part in value["target"].split(",")]
    if strange := [part for part in parts if part not in known]:
        raise FarstateError(f"{where}: target '{strange[0]}' is none of the task's labels, {', '.join(known)}")
    return Asked(value["input"].strip(), value["question"].strip(), ",".join(parts))


def _of_hub(name: str, task: str, length_name: str, revision: str | None) -> Iterator[tuple[str, Any]]:
    import datasets

    described = f"hub data set '{name}' ({length_name}), split '{task}'"
    try:
        stream = datasets.load_dataset(name, length_name, split=task, revision=revision, streaming=True)
        for number, row in enumerate(stream, start=1):
            yield f"{described} row {number}", row
    except Exception as error:  # the library lets the errors of a dozen packages through
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise FarstateError(
            f"{described}: cannot be read ({type(error).__name__}: {reason}); offline, copy its files here and give "
            f"tasks.babilong.published.files: '<folder>', with <folder>/data/{task}/{length_name}.json, in the place of hub"
        ) from None


def _of_files(folder: Path, task: str, length_name: str) -> Iterator[tuple[str, Any]]:
    kinds = [
        ".json",
        ".jsonl",
        *(f"{kind}{suffix}" for kind in (".json", ".jsonl") for suffix in compressed.SUFFIXES),
        ".parquet",
    ]
    wanted = [parent / f"{length_name}{kind}" for parent in (folder / "data" / task, folder / task) for kind in kinds]
    files = [path for path in wanted if path.is_file()][:1] or sorted((folder / length_name).glob(f"{task}-*.parquet"))
    if not files:
        raise FarstateError(
            f"tasks.babilong.published.files '{folder}': has no set {length_name} of {task}; expected "
            f"{wanted[0]} (or .jsonl, .parquet)"
        )
    for path in files:
        yield from _parquet(path) if path.suffix == ".parquet" else _json(path)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """One object a line, or one list of objects."""
    for number, line in enumerate(compressed.lines(compressed.blocks(path)), start=1):
        if number == 1 and line.lstrip(b"\xef\xbb\xbf \t\r")[:1] == b"[":
            values = _loaded(b"".join(compressed.blocks(path)), str(path))
            yield from ((f"{path} record {place}", value) for place, value in enumerate(values, start=1))
            return
        if line.strip():
            yield f"{path} line {number}", _loaded(line, f"{path} line {number}")


def _loaded(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FarstateError(f"{where}: damaged, not JSON ({error}); copy the file again") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise FarstateError(f"{path}: damaged parquet file ({' '.join(str(error).split())}); copy it again") from None
