"""Files that are either whole or absent: atomic writes, checksums, manifests, locks."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farstate.errors import FarstateError

MANIFEST = "manifest.json"
_OWN_CHECKSUM = "manifest_sha256"
_BLOCK = 1 << 20


def _part(final: Path) -> Path:
    """A temporary sibling's name that no other process has, on whatever host it runs."""
    return final.with_name(f".{final.name}.{os.getpid()}-{secrets.token_hex(4)}.part")


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary sibling of `path` to write to; on success it becomes `path`, on failure it is removed.

    The file is flushed to disk before it is renamed, so a reader never sees half of it, whenever the
    process or the machine dies. The temporary name starts with a dot and ends with `.part`.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = _part(final)
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, final)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary sibling of the folder `path` to fill; on success it becomes `path`, on failure it is removed.

    `path` must be absent or empty. What is written within should be flushed to disk by its writer.
    """
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = _part(final)
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` atomically as UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` atomically as indented JSON with sorted keys; NaN and infinities are refused."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; a missing or damaged one raises FarstateError naming it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise FarstateError(f"{path}: is a folder, a JSON file is expected") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FarstateError(f"{path}: damaged, not JSON ({error}); delete it and run again") from None
    except RecursionError:
        raise FarstateError(f"{path}: damaged, JSON nested too deeply to be read") from None
    except ValueError:  # Python bounds the digits of an integer that is read
        raise FarstateError(f"{path}: damaged, a number in it has thousands of digits") from None


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def write_manifest(directory: str | os.PathLike[str], contents: dict[str, Any], files: list[str]) -> None:
    """Write `manifest.json`, the last file of a finished result: sizes and checksums of `files`, and its own, beside `contents`.

    `files` are paths relative to `directory`. Whoever finds a manifest finds a complete directory.
    """
    root = Path(directory)
    listing = {name: {"bytes": (root / name).stat().st_size, "sha256": sha256_file(root / name)} for name in sorted(files)}
    told = json.loads(json.dumps({**contents, "files": listing}))  # as it is read again: keys are strings, lists are lists
    told.pop(_OWN_CHECKSUM, None)  # of a manifest whose contents are written again
    write_json(root / MANIFEST, {**told, _OWN_CHECKSUM: _digest(told)})


def _is_whole(manifest: Any) -> bool:
    """Whether a manifest has the form of one and, where it holds its own checksum, the content."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return False
    if not manifest["files"] and _OWN_CHECKSUM not in manifest:
        return False
    for record in manifest["files"].values():
        if not isinstance(record, dict) or not isinstance(record.get("bytes"), int):
            return False
        if not re.fullmatch("[0-9a-f]{64}", str(record.get("sha256"))):
            return False
    told = {key: value for key, value in manifest.items() if key != _OWN_CHECKSUM}
    return manifest.get(_OWN_CHECKSUM, _digest(told)) == _digest(told)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def read_manifest(directory: str | os.PathLike[str], *, verify: bool = False) -> dict[str, Any]:
    """Read a result's manifest and hold its files against it (sizes; with `verify`, checksums too).

    Raises:
        FarstateError: the result is unfinished, a file is missing or differs from what was written.
    """
    root = Path(directory)
    if not (root / MANIFEST).exists():
        raise FarstateError(f"{root}: no {MANIFEST}, the result is unfinished; run the rule that makes it")
    manifest: dict[str, Any] = read_json(root / MANIFEST)
    if not _is_whole(manifest):
        raise FarstateError(f"{root / MANIFEST}: damaged; delete {root} and run again")
    manifest.pop(_OWN_CHECKSUM, None)
    for name, record in manifest["files"].items():
        path = root / name
        if not path.exists():
            raise FarstateError(f"{path}: named in {root / MANIFEST} but missing; delete {root} and run again")
        if path.stat().st_size != record["bytes"]:
            raise FarstateError(
                f"{path}: {path.stat().st_size} bytes, its manifest says {record['bytes']}; delete {root} and run again"
            )
        if verify and sha256_file(path) != record["sha256"]:
            raise FarstateError(f"{path}: its checksum differs from its manifest; delete {root} and run again")
    return manifest


@contextmanager
def only_one(path: str | os.PathLike[str], what: str) -> Iterator[str]:
    """Hold an exclusive lock on the file `path` while `what` runs; a second run is refused in one line.

    The kernel drops the lock when the process dies, however it dies: nothing is left to clean up. The lock spares a second
    run its work; results do not rest on it, since a file system may have none (then it is not held) or keep it to one host.

    Yields:
        the host whose holder died before it let go, empty where the last one ended in order.
    """
    lock = Path(path)
    lock.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _content(handle) or "unknown"
            raise FarstateError(f"{what} is already running (process {owner}, lock {lock}); wait for it or stop it") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
        before = _content(handle).partition(" on ")[2]
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield before
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _content(handle: int) -> str:
    return os.pread(handle, 256, 0).decode(errors="replace").strip()
