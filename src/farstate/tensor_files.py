"""Tensors on disk: the same numbers are the same bytes, on every run and machine."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from farstate.files import atomic_path

_LENGTH = struct.Struct("<Q")


def write_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all; tensors are copied to the CPU and made contiguous.

    Raises:
        OSError, SafetensorError: the disk refused.
    """
    owned = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_path(path) as temporary:
        save_file(owned, temporary, metadata=metadata)
        os.chmod(temporary, 0o666 & ~_umask())  # the library keeps what it writes to the owner alone
        if metadata and len(metadata) > 1:
            _sort_header(temporary)


def _umask() -> int:
    """What this process takes from the permissions of new files; it can be read by setting it only."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sort_header(path: Path) -> None:
    """Put the metadata in order: safetensors writes it in that of a hash table, which every process seeds anew."""
    with open(path, "r+b") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        header = json.loads(file.read(length))
        ordered = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        text = json.dumps(ordered, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise AssertionError(f"{path}: the ordered header takes {len(text)} bytes instead of {length}")
        file.seek(_LENGTH.size)
        file.write(text.ljust(length))
