"""Examples of a task, one interface for all tasks, and the data set that holds them on disk.

A generator makes example `number` of a cell from (seed, split, cell, number) alone: any order, any subset, any length, and
nothing is kept. A data set is an Arrow file: written a batch at a time, mapped into memory when it is read, so that neither
side holds more than a batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from farstate.errors import FarstateError
from farstate.files import atomic_path

Tokens = NDArray[np.int64]

SCHEMA = pa.schema(
    [
        pa.field("task", pa.string(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("length", pa.int64(), nullable=False),
        pa.field("depth", pa.float64()),
        pa.field("label", pa.string(), nullable=False),
        pa.field("prompt", pa.large_list(pa.uint32()), nullable=False),
        pa.field("answer", pa.large_list(pa.uint32()), nullable=False),
        pa.field("facts", pa.large_list(pa.int64()), nullable=False),
    ]
)
_BATCH_TOKENS, _BATCH_EXAMPLES = 1 << 20, 4096


@dataclass(frozen=True)
class Cell:
    """What is asked.

    Attributes:
        task: its name: qa1 … qa10, passkey, copying.
        length: tokens of the prompt, the last before the answer; for copying, letters of the string. BABILong: 0 stands for
            facts and question alone.
        depth: where the fact stands, from 0 at the beginning to 1 before the question; None where there is no such place.
    """

    task: str
    length: int
    depth: float | None = None


@dataclass(frozen=True, eq=False)
class Example:
    """One question and its answer.

    Attributes:
        task, length, depth: of its cell.
        number: within its cell.
        prompt: (P,) int64.
        answer: (A,) int64, what a right model goes on with, the token that ends it included.
        label: the right answer as text, without what ends it.
        facts: positions in the prompt of the tokens where the facts that decide begin.
    """

    task: str
    number: int
    length: int
    depth: float | None
    prompt: Tokens
    answer: Tokens
    label: str
    facts: tuple[int, ...] = ()


class Generator(Protocol):
    """Makes the examples of a task."""

    def example(self, cell: Cell, number: int) -> Example:
        """Example `number` of the cell; raises FarstateError where the cell is impossible."""

    def training(self, number: int) -> Example:
        """Training example `number`; prompt and answer fit a row."""


def draws(seed: int, split: str, cell: str, number: int) -> np.random.Generator:
    """The random numbers of one example, whatever was drawn before."""
    return np.random.default_rng([seed, zlib.crc32(f"{split}/{cell}".encode()), number])


def write_examples(examples: Iterable[Example], path: Path) -> dict[str, Any]:
    """Write a data set, and return what a manifest says of it: examples, tokens, the longest prompt and answer.

    Raises:
        FarstateError: there is no example.
    """
    count, tokens, prompt, answer = 0, 0, 0, 0
    with atomic_path(path) as temporary, pa.OSFile(str(temporary), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        for batch in _batched(examples):
            writer.write_batch(
                pa.record_batch(
                    [pa.array([getattr(example, field.name) for example in batch], field.type) for field in SCHEMA], schema=SCHEMA
                )
            )
            count += len(batch)
            tokens += sum(example.prompt.size + example.answer.size for example in batch)
            prompt = max(prompt, *(example.prompt.size for example in batch))
            answer = max(answer, *(example.answer.size for example in batch))
        if not count:
            raise FarstateError(f"{path}: there is no example to write")
    return {"examples": count, "tokens": tokens, "longest_prompt": prompt, "longest_answer": answer}


def _batched(examples: Iterable[Example]) -> Iterator[list[Example]]:
    batch: list[Example] = []
    tokens = 0
    for example in examples:
        batch.append(example)
        tokens += example.prompt.size
        if tokens >= _BATCH_TOKENS or len(batch) == _BATCH_EXAMPLES:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


class Examples:
    """A data set on disk, mapped into memory.

    Raises:
        FarstateError: the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = pa.ipc.open_file(pa.memory_map(str(path)))
            self._batches = [self._reader.get_batch(number) for number in range(self._reader.num_record_batches)]
        except FileNotFoundError:
            raise FarstateError(f"{path}: no such file; run the rule that makes it") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise FarstateError(f"{path}: damaged or truncated ({error}); delete its folder and run again") from None
        if not self._reader.schema.equals(SCHEMA):
            raise FarstateError(f"{path}: written by another version; delete its folder and run again")
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])
        self._lists = [{name: _pieces(batch, name) for name in ("prompt", "answer", "facts")} for batch in self._batches]

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._ends.size else 0

    def lengths(self) -> tuple[Tokens, Tokens]:
        """Tokens of every prompt and of every answer, (examples,) each."""
        prompt, answer = ([np.diff(lists[name][0]) for lists in self._lists] for name in ("prompt", "answer"))
        return np.concatenate(prompt), np.concatenate(answer)

    def tokens(self, index: int) -> tuple[Tokens, Tokens]:
        """Prompt and answer of one example."""
        number, row = self._place(index)
        return self._list(number, row, "prompt"), self._list(number, row, "answer")

    def __getitem__(self, index: int) -> Example:
        number, row = self._place(index)
        batch = self._batches[number]
        told = {name: batch.column(name)[row].as_py() for name in ("task", "number", "length", "depth", "label")}
        return Example(
            **told,
            prompt=self._list(number, row, "prompt"),
            answer=self._list(number, row, "answer"),
            facts=tuple(self._list(number, row, "facts").tolist()),
        )

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def _place(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - int(self._ends[number] - self._batches[number].num_rows)

    def _list(self, number: int, row: int, name: str) -> Tokens:
        offsets, values = self._lists[number][name]
        found: Tokens = values[offsets[row] : offsets[row + 1]].astype(np.int64)
        return found


def _pieces(batch: pa.RecordBatch, name: str) -> tuple[Tokens, NDArray[Any]]:
    """Offsets and values of a column of lists, not copied."""
    column = batch.column(name)
    return column.offsets.to_numpy(), column.values.to_numpy()
