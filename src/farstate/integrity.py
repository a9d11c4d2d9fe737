"""Is a finished result still what was written? Sizes and checksums of its manifest, and what was already found right here.

A stage holds its inputs against their manifests before it reads them. Checksums are computed once: what was found right is
noted in `.farstate/seen/`, by size, date and inode, and looked at again when one of these differs (a copy, a pull, an edit).
A disk that changes bytes under an unchanged date is found by `farstate verify`, or by a run with `--config verify=true`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from farstate.errors import FarstateError
from farstate.files import MANIFEST, read_json, read_manifest, sha256_file, write_json
from farstate.keys import KEY_LENGTH
from farstate.plan import PHASES, SUPERSEDED

SEEN = Path(".farstate/seen")
_STORE = "store.json"


def hold(directory: Path, *, always: bool = False) -> None:
    """Hold a result's files, and the token shards that a store lists, against what was written.

    Args:
        always: compute every checksum, also of files that were found right before.

    Raises:
        FarstateError: the result is unfinished, a file is missing or damaged; the message names it.
    """
    for place in (directory, *_shards(directory)):
        if problems := list(_problems(place, always=always)):
            raise FarstateError(problems[0])


def damaged(directory: Path, progress: Callable[[int], None] | None = None) -> list[str]:
    """What is wrong with a finished result, a line a file; every checksum is computed.

    Args:
        progress: called with a file's bytes when it was read.
    """
    try:
        return list(_problems(directory, always=True, progress=progress))
    except FarstateError as error:
        return [str(error)]


def finished(root: Path, asked: Collection[Path] | None = None) -> list[Path]:
    """The finished results of a working folder, superseded ones too, relative to it.

    Args:
        asked: of these only: results, or folders that hold some.

    Raises:
        FarstateError: a folder that is asked for is no finished result here, and holds none.
    """
    found = [
        path.parent.relative_to(root)
        for place in ("results", str(SUPERSEDED))
        for phase in PHASES
        for path in sorted((root / place / phase).glob(f"*/{MANIFEST}"))
        if re.search(rf"-[0-9a-f]{{{KEY_LENGTH}}}$", path.parent.name) and not path.parent.is_symlink()
    ]
    if asked is None:
        return found
    wanted: dict[Path, None] = {}
    for path in asked:
        place = Path(os.path.relpath(path, root))
        if not (below := [directory for directory in found if directory == place or place in directory.parents]):
            raise FarstateError(
                f"{path}: neither a finished result of this folder nor a folder that holds some; give results/<phase>/<name>-<key>, "
                "results/<phase>, or nothing for all of them"
            )
        wanted |= dict.fromkeys(below)
    return list(wanted)


def size(directory: Path) -> int:
    """Bytes of a result's files."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file() and path.name != MANIFEST)


def note(directory: Path) -> None:
    """Remember a result that was just written: its checksums are those of its manifest."""
    if os.environ.get("RANK", "0") != "0" or not (directory / MANIFEST).exists():  # of several processes the first writes
        return
    manifest = read_manifest(directory)
    _remember(directory, {name: _mark(directory / name, record) for name, record in manifest["files"].items()})


def remove(directory: Path) -> None:
    """Delete a result, its manifest first: what is interrupted leaves an unfinished result, never half of a finished one."""
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory)
    _record(directory).unlink(missing_ok=True)


def _problems(directory: Path, *, always: bool, progress: Callable[[int], None] | None = None) -> Iterator[str]:
    manifest = read_manifest(directory)
    seen = _seen(directory)
    marks: dict[str, Any] = {}
    for name, record in manifest["files"].items():
        path = directory / name
        mark = _mark(path, record)
        if always or seen.get(name) != mark:
            same = sha256_file(path) == record["sha256"]
            if progress:
                progress(record["bytes"])
            if not same:
                yield (
                    f"{path}: its checksum differs from its manifest; delete {directory} and run again "
                    "(`farstate verify --remove` does so for all that is damaged)"
                )
                continue
        marks[name] = mark
    if marks != seen:
        _remember(directory, marks)


def _shards(directory: Path) -> Iterator[Path]:
    if (directory / _STORE).exists():
        for shard in read_json(directory / _STORE)["shards"]:
            yield Path(os.path.normpath(directory / shard["path"]))


def _mark(path: Path, record: dict[str, Any]) -> list[Any]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino, record["sha256"]]


def _record(directory: Path) -> Path:
    absolute = Path(os.path.abspath(directory))
    return SEEN / f"{absolute.parent.name}.{absolute.name}.json"


def _seen(directory: Path) -> dict[str, Any]:
    try:
        value = read_json(_record(directory))
    except FarstateError:
        return {}
    return value if isinstance(value, dict) else {}


def _remember(directory: Path, marks: dict[str, Any]) -> None:
    with suppress(OSError):  # a note that saves time; nothing depends on it
        write_json(_record(directory), marks)
