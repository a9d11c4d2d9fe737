"""Tensors in files: safetensors or torch's own `.bin`, one file or shards with an index. Nothing is unpickled but tensors."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from farstate.errors import FarstateError
from farstate.files import read_json

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""What weights may be stored in, by name; all else is codes that need a scale from elsewhere."""
_SUFFIXES = (".safetensors", ".bin", ".pth")


def bare(name: str) -> bool:
    """Whether `name` names a file in a given folder, and nothing outside of it."""
    return name not in ("", ".", "..") and len(name) < 256 and name.isprintable() and not set(name) & {"/", "\\"}


def bare_weights(name: str) -> bool:
    """Whether `name` names a file of weights in a given folder."""
    return bare(name) and name.endswith(_SUFFIXES)


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises:
        FarstateError: no such file, or something else in it.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise FarstateError(f"{path}: an object is expected, found {type(value).__name__}")
    return value


def peek(folder: Path) -> dict[str, Any]:
    """The configuration in `folder` for a look at its kind, empty where there is none that can be read."""
    try:
        return json_object(folder / CONFIG)
    except (FarstateError, OSError):
        return {}


def read_folder(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any], Path]:
    """All tensors of `model.safetensors` or `pytorch_model.bin`, whole or in shards.

    Returns:
        tensors: under the file's names.
        storage: `file`, `weight_map` where there are shards, `dtype`, `dtypes`: how they lay, for `write_folder` and for `Origin`.
        source: the file to name in a message.

    Raises:
        FarstateError: no weights, or a file that is missing, damaged, truncated, or holds more than tensors.
    """
    for name in (SAFETENSORS, PICKLED):
        if (folder / name).exists():
            tensors = read_file(folder / name)
            return tensors, {"file": name, **dtypes_of(tensors)}, folder / name
        index = folder / f"{name}.index.json"
        if index.exists():
            try:
                weight_map = {str(tensor): str(shard) for tensor, shard in json_object(index)["weight_map"].items()}
            except (KeyError, AttributeError):
                raise FarstateError(f"{index}: no 'weight_map' in it") from None
            shards = sorted(set(weight_map.values()))
            tensors = {}
            for shard in shards:
                if not bare_weights(shard):
                    raise FarstateError(
                        f"{index}: names {shard!r}, which is not a file beside it that ends in {', '.join(_SUFFIXES)}"
                    )
                found = read_file(folder / shard)
                if lost := [tensor for tensor, where in weight_map.items() if where == shard and tensor not in found]:
                    raise FarstateError(f"{folder / shard}: {index.name} says that it holds {lost[0]}, it does not")
                tensors |= found
            return tensors, {"file": name, "weight_map": weight_map, **dtypes_of(tensors)}, index
    raise FarstateError(f"{folder}: no {SAFETENSORS} and no {PICKLED} in it")


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one file on the CPU; its suffix tells the format, all but `.safetensors` is torch's.

    Raises:
        FarstateError: missing, damaged, truncated, or more than a dictionary of tensors.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)[0]
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such file") from None
    except pickle.UnpicklingError:
        raise FarstateError(f"{path}: damaged, or holds more than tensors (code is never run)") from None
    except (BadZipFile, EOFError, RuntimeError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise FarstateError(f"{path}: not a dictionary of tensors")
    for name, tensor in loaded.items():
        if tensor.is_meta:
            raise FarstateError(f"{path}: {name} has a shape and no numbers (it is on torch's meta device)")
        if tensor.layout != torch.strided:
            raise FarstateError(f"{path}: {name} is {str(tensor.layout).removeprefix('torch.')}; only dense tensors are read")
    return {str(name): tensor for name, tensor in loaded.items()}


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the header's metadata of one safetensors file.

    Raises:
        FarstateError: missing, damaged or truncated.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such file") from None
    except (SafetensorError, RuntimeError, OSError, ValueError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> FarstateError:
    return FarstateError(f"{path}: damaged or truncated ({(str(error) or type(error).__name__).splitlines()[0]})")


def dtypes_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """`dtype`, the most frequent one, and `dtypes` of the tensors that have another: the part of a storage that all formats share."""
    names = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    common = Counter(names.values()).most_common(1)
    usual = common[0][0] if common else "float32"
    return {"dtype": usual, "dtypes": {name: dtype for name, dtype in names.items() if dtype != usual}}


def write_folder(folder: Path, tensors: Mapping[str, Tensor], storage: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write tensors as `storage` (`file`, `weight_map`) says, and `config` as `config.json`; the folder is the caller's to make whole.

    Tensors that share memory are stored once in a `.bin`, and must not be given for safetensors.
    """
    file = str(storage.get("file", SAFETENSORS))
    weight_map: dict[str, str] = storage.get("weight_map", {})
    # A tensor that the map does not name, as a head that used to be tied, goes to the last shard.
    last = max(weight_map.values(), default=file)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(weight_map.get(name, last), {})[name] = tensor
    for name, part in parts.items():
        _write_file(folder / name, part)
    if weight_map:
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": {tensor: name for name, part in parts.items() for tensor in part},
        }
        _write_text(folder / f"{file}.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")
    write_config(folder, config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """`config.json` as the libraries write it; infinities are allowed, as they are there."""
    _write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    if path.suffix == ".safetensors":
        # transformers refuses files without this entry.
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    else:
        torch.save(tensors, path)
    _flush(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _flush(path)


def _flush(path: Path) -> None:
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())
