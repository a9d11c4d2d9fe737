"""Outside inputs by content: `config/sources.lock`, written by `farstate register`.

Local files, hub data sets and published checkpoints enter a key by what they contain. The lock file holds, for
each, sizes and SHA-256 of its files, or the hub revision (of a data set also its files); the dates under which a file was last found right are kept in
`.farstate/`, so that the lock is the same everywhere. Packages and their checksums stand in the
parameters themselves and need no entry.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from farstate.errors import FarstateError
from farstate.files import read_json, sha256_file, write_json, write_text

LOCK = Path("config/sources.lock")
UNREGISTERED = "unregistered"
INPUTS_ROOT = "FARSTATE_INPUTS_ROOT"
_SEEN = Path(".farstate/seen.json")
_HEADER = "# What outside inputs contain. Written by `farstate register`; commit it, do not edit it by hand.\n"


@dataclass(frozen=True)
class Outside:
    """An input that the project does not make: `kind` is files, hub or checkpoint, `where` its pattern or name."""

    kind: str
    where: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.where}"


def read_lock(path: Path = LOCK) -> dict[str, Any]:
    """The registered inputs by name; an absent file is an empty lock."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        return {}
    except yaml.YAMLError as error:
        raise FarstateError(
            f"{path}: not valid YAML, {' '.join(str(error).split())}; restore it from git or register again"
        ) from None
    if not isinstance(data, dict):
        raise FarstateError(f"{path}: a mapping is expected; restore it from git or register again")
    return data


def local_files(outside: Outside) -> list[Path]:
    """The files an input consists of here, sorted; empty where there are none (a hub name)."""
    root = inputs_root()
    path = root / outside.where
    found: list[Path] = []
    if outside.kind == "checkpoint" and path.is_dir():
        found = [item for item in path.iterdir() if item.is_file() and not item.name.startswith(".")]
    elif outside.kind == "checkpoint" and path.is_file():
        found = [path]
    elif outside.kind == "files":
        found = [root / item for item in glob.glob(outside.where, root_dir=root, recursive=True) if (root / item).is_file()]
    return sorted(Path(os.path.relpath(item, root)) if not Path(outside.where).is_absolute() else item for item in found)


def content(outside: Outside, lock: dict[str, Any]) -> Any:
    """The part of a key that stands for an outside input: its checksums, its revision, or 'unregistered'."""
    entry = lock.get(outside.name)
    if entry is None:
        return UNREGISTERED
    if "revision" in entry:
        return {"revision": entry["revision"]}
    return [record["sha256"] for record in entry["files"]]


def checksum(record: dict[str, Any]) -> str:
    """What stands for one registered file of a hub data set in a key: what it contains, whatever the revision."""
    return f"sha256:{record['sha256']}" if "sha256" in record else f"git:{record['git_sha1']}"


def registered_files(outside: Outside, lock: dict[str, Any]) -> list[str]:
    """Paths of the registered files of an input, in the order of their checksums in the key."""
    entry = lock.get(outside.name) or {}
    return [record["path"] for record in entry.get("files", [])]


def register(outside: Outside, *, path: Path = LOCK, reading: Callable[[Path, int, int], None] | None = None) -> dict[str, Any]:
    """Record what an outside input contains now, and return the entry.

    Args:
        reading: called with each local file before it is read, its number from 1 on, and how many there are.

    Raises:
        FarstateError: nothing is found locally, and the hub cannot be asked.
    """
    files = local_files(outside)
    if files:
        dates = {inputs_root() / file: _dated(inputs_root() / file) for file in files}
        entry: dict[str, Any] = {"files": []}
        for number, file in enumerate(files, start=1):
            if reading:
                reading(file, number, len(files))
            entry["files"].append(_describe(inputs_root() / file) | {"path": file.as_posix()})
        _remember(dates, entry["files"])
    elif outside.kind == "files":
        raise FarstateError(f"{outside.where}: no file matches; give an existing path or glob")
    elif outside.kind == "hub":
        from farstate.corpus import hub

        entry = hub.describe(outside.where)
    else:
        entry = {"revision": _hub_revision(outside)}
    lock = read_lock(path)
    lock[outside.name] = entry
    write_text(path, _HEADER + yaml.safe_dump(lock, sort_keys=True, allow_unicode=True))
    return entry


def check(outside: Outside, *, only: str | None = None, verify: bool = False, path: Path = LOCK) -> dict[str, Any]:
    """Hold an outside input against the lock before it is read, and return its entry.

    Size and date are compared; a date that was not seen with this content before, or `verify`, lets the checksum decide.

    Args:
        only: the one registered file that is read; the others are left alone.

    Raises:
        FarstateError: it is not registered, a file is missing, its content changed, or more files match than are registered.
    """
    where = inputs_root() / path
    entry: dict[str, Any] | None = read_lock(where).get(outside.name)
    if entry is None:
        raise FarstateError(f"{outside.where}: not registered in {path}; run `farstate register` and commit {path}")
    if "revision" in entry:  # what is read at a revision is held against its checksum by who reads it
        return entry
    records = entry.get("files", [])
    new = {file.as_posix() for file in local_files(outside)} - {record["path"] for record in records}
    if records and new:
        raise FarstateError(f"{min(new)}: matches '{outside.where}' but is not registered in {path}; run `farstate register`")
    seen = _read_seen()
    for record in records:
        if only is not None and record["path"] != only:
            continue
        file = inputs_root() / record["path"]
        if not file.exists():
            raise FarstateError(f"{file}: registered in {path} but missing; bring it back or run `farstate register`")
        date = _dated(file)
        if date[0] == record["bytes"] and not verify and seen.get(str(file.resolve())) == [*date, record["sha256"]]:
            continue
        if date[0] != record["bytes"] or sha256_file(file) != record["sha256"]:
            raise FarstateError(
                f"{file}: its content is not what {path} says (sha256 {record['sha256'][:12]}…, {record['bytes']} bytes); "
                "restore it, or run `farstate register` to accept it under a new key"
            )
        _remember({file: date}, [record])
    return entry


def inputs_root() -> Path:
    """The folder that relative paths of outside inputs start from: the workflow says which; by hand, this one."""
    return Path(os.environ.get(INPUTS_ROOT, "."))


def hub_parts(name: str) -> tuple[str, str | None]:
    """A checkpoint's name on the hub: `owner/repository`, or `owner/repository/file` where a repository holds several."""
    parts = name.split("/", 2)
    return "/".join(parts[:2]), parts[2] if len(parts) > 2 else None


def _read_seen() -> dict[str, Any]:
    """Sizes and dates of files whose checksum was found right, kept here and never shared."""
    try:
        value: dict[str, Any] = read_json(_SEEN)
    except FarstateError:
        return {}
    return value


def _remember(dates: dict[Path, list[int]], records: list[dict[str, Any]]) -> None:
    """Note the sizes and dates that files had before they were found to have their checksums."""
    found = {str(file.resolve()): [*date, record["sha256"]] for (file, date), record in zip(dates.items(), records, strict=True)}
    write_json(_SEEN, {**_read_seen(), **found})


def _dated(file: Path) -> list[int]:
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _describe(file: Path) -> dict[str, Any]:
    return {"path": file.as_posix(), "bytes": file.stat().st_size, "sha256": sha256_file(file)}


def _hub_revision(outside: Outside) -> str:
    from huggingface_hub import HfApi

    name = outside.where
    try:
        info = HfApi().model_info(hub_parts(name)[0])
    except Exception as error:  # the client raises many kinds; to the user they are one
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FarstateError(
            f"{name}: neither a local path nor reachable on the hub ({first[:160]}); download it elsewhere, "
            "give its local path in the parameters, and run `farstate register` again"
        ) from None
    return str(info.sha)
