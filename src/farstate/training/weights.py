"""Weights as a declared output: the same numbers are the same bytes, on every run and machine."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from safetensors.torch import save_file

from farstate.files import atomic_path
from farstate.models.language_model import LanguageModel

_LENGTH = struct.Struct("<Q")


def write_weights(model: LanguageModel, path: Path, tokens: int) -> None:
    """Write one safetensors file that `load_model` reads beside its `config.json`, whole or not at all.

    Its header holds the configuration and `tokens`, the exact count that this training had read.

    Raises:
        OSError, SafetensorError: the disk refused.
    """
    metadata = {
        "config": json.dumps(model.config.model_dump(mode="json"), sort_keys=True),
        "format": "farstate.model",
        "tokens": str(tokens),
    }
    # A tied tensor is among the parameters once, under the embedding's name.
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
        _sort_header(temporary)


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
