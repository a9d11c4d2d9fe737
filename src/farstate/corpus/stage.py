"""What the corpus stages share: how a result's directory is begun, and how its parts are found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from farstate.errors import FarstateError
from farstate.files import MANIFEST

ARCHIVE = "archive"
DOCUMENTS = "documents.parquet"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "validation", "test")

Progress = Callable[[int, int | None], None]
"""Called with the documents done so far and the documents in all (None where that is not known)."""


def begin(output: Path) -> None:
    """Make the directory, withdraw the manifest of an earlier result, so that a failure leaves none, and sweep
    what `atomic_path` left when a run was killed."""
    output.mkdir(parents=True, exist_ok=True)
    (output / MANIFEST).unlink(missing_ok=True)
    for leftover in output.glob(".*.*.part"):
        leftover.unlink()


def part(path: Path, name: str) -> Path:
    """The file `name` of the result `path`, where `path` is the result's directory or the file itself.

    Raises:
        FarstateError: there is no such file.
    """
    found = path / name if path.is_dir() else path
    if not found.is_file():
        raise FarstateError(f"{found}: no such file; run the rule that makes it")
    return found


def use_threads(threads: int | None) -> None:
    """Bound the cores of the parallel mode of `tokenizers`; acts only before this process first enters that mode.

    The library reads its settings from the environment, and offers no other way.
    """
    if threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)


@contextmanager
def parallelism(on: bool) -> Iterator[None]:
    """Switch the parallel mode of `tokenizers` on or off."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if on else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
