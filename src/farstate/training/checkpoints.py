"""Checkpoints: the state from which a killed training goes on. Undeclared scratch, never a result.

A checkpoint is `checkpoint-<step>.safetensors` and, written after it, `checkpoint-<step>.json`: which run it belongs to,
its step, and checksums of itself, of the tensors and of every file that a resumed run relies on. Without an intact record
there is no checkpoint. The one before stays until the next two are complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from farstate.errors import FarstateError, explain_os_error
from farstate.files import sha256_file, write_json
from farstate.tensor_files import write_tensors

Notice = Callable[[str], None]


@dataclass(frozen=True)
class Checkpoint:
    """Resume state.

    Attributes:
        step: optimizer steps completed.
        tensors: by name, on the CPU.
        files: other files a resumed run relies on, relative to the checkpoint's folder, with their SHA-256.
        facts: what is told about the run but has no influence on it (JSON values).
    """

    step: int
    tensors: dict[str, Tensor]
    files: dict[str, str]
    facts: dict[str, Any]


def write_checkpoint(folder: Path, identity: str, checkpoint: Checkpoint) -> None:
    """Write a checkpoint of the run `identity`, then drop all others but the one before it.

    Raises:
        OSError, SafetensorError: the disk refused; the checkpoints before are untouched.
    """
    data = _data(folder, checkpoint.step)
    write_tensors(data, checkpoint.tensors)
    record = {
        "identity": identity,
        "step": checkpoint.step,
        "sha256": sha256_file(data),
        "files": checkpoint.files,
        "facts": checkpoint.facts,
    }
    write_json(data.with_suffix(".json"), {"record": record, "sha256": _digest(record)})
    before = [step for step in _steps(folder) if step < checkpoint.step]
    for step in _steps(folder, "safetensors") + _steps(folder):
        if step != checkpoint.step and step not in before[-1:]:
            for path in (_data(folder, step).with_suffix(".json"), _data(folder, step)):
                path.unlink(missing_ok=True)


def read_checkpoint(folder: Path, identity: str, notice: Notice) -> Checkpoint | None:
    """The newest intact checkpoint of the run `identity`, or None; what is passed over is named through `notice`."""
    passed_over = False
    for step in reversed(_steps(folder)):
        problem, checkpoint = _read(folder, step, identity)
        if checkpoint is not None:
            return checkpoint
        notice(f"{_data(folder, step)}: {problem}; it is not used")
        passed_over = True
    if passed_over:
        notice(f"{folder}: no usable checkpoint, training starts from the beginning")
    return None


def _read(folder: Path, step: int, identity: str) -> tuple[str, Checkpoint | None]:
    """A checkpoint, or what is wrong with it."""
    data = _data(folder, step)
    try:
        content = json.loads(data.with_suffix(".json").read_text(encoding="utf-8"))
        record = content["record"]
        if content["sha256"] != _digest(record):
            return "its record is damaged", None
        if record["identity"] != identity:
            return "belongs to another run (other parameters or another version of the numbers)", None
        if sha256_file(data) != record["sha256"]:
            return "damaged, its checksum differs from its record", None
        for name, digest in record["files"].items():
            if sha256_file(folder / name) != digest:
                return f"relies on {folder / name}, which is damaged", None
        return "", Checkpoint(record["step"], load_file(data), record["files"], record["facts"])
    except FileNotFoundError as error:
        return f"relies on {error.filename}, which is missing", None
    except (ValueError, TypeError, KeyError, SafetensorError):  # ValueError: of JSON and of UTF-8 alike
        return "its record is damaged", None


def clear(folder: Path) -> None:
    """Remove every checkpoint in `folder`."""
    for pattern in ("checkpoint-*.json", "checkpoint-*.safetensors"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def clear_parts(folder: Path) -> None:
    """Remove the temporary files that a killed process left in `folder`."""
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path, hint: str) -> Iterator[None]:
    """Turn the operating system's refusal to write into one line.

    safetensors writes by itself and wraps the error number into its message.
    """
    try:
        yield
    except OSError as error:
        raise FarstateError(f"{explain_os_error(error)} ({hint})") from error
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        code = int(number.group(1)) if number else errno.EIO
        raise FarstateError(f"{explain_os_error(OSError(code, os.strerror(code), str(path)))} ({hint})") from error


def _data(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step:012d}.safetensors"


def _steps(folder: Path, suffix: str = "json") -> list[int]:
    """Steps of which there is a record (or data), in order."""
    return sorted(int(path.stem.removeprefix("checkpoint-")) for path in folder.glob(f"checkpoint-{'[0-9]' * 12}.{suffix}"))


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
