"""What is wrong with a checkpoint, in one line with names: shared by all formats."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from farstate.errors import FarstateError, nearest
from farstate.models.config import LARGEST_SIZE, Config
from farstate.models.formats.files import CONFIG, DTYPES, peek
from farstate.models.registry import ARCHITECTURES, config_from_json

HEAD = "lm_head.weight"
EMBEDDING = "backbone.embedding.weight"
_SHOWN = 3
_SHOWN_CHARACTERS = 80


def unknown_architecture(path: Path, name: Any, known: Iterable[str] | None = None) -> FarstateError:
    """The error for an architecture that is not among `known`, by default those of the registry; `name` may be anything."""
    names = sorted(ARCHITECTURES if known is None else known)
    word = name if isinstance(name, str) else ""
    return FarstateError(f"{path}: unknown architecture {shown(name)}{nearest(word, names)}; known: {', '.join(names)}")


def shown(value: Any) -> str:
    """A value from a file, on one line and not endless."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} …"


def validated(values: dict[str, Any], path: Path, names: Mapping[str, str] | None = None) -> Config:
    """The configuration of `values`, which have our names.

    Args:
        names: the file's names for ours, to be used in messages.

    Raises:
        FarstateError: an unknown architecture, or the first value that does not fit, naming `path`.
    """
    names = names or {}
    architecture = values.get("architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise unknown_architecture(path, architecture)
    try:
        return config_from_json(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (names.get(str(part), part) for part in first["loc"]))
        found = f" (found {shown(first['input'])})" if where else ""
        message = str(first["ctx"]["error"]) if first["type"] == "value_error" else first["msg"]
        raise FarstateError(f"{path}: {where + ': ' if where else ''}{_renamed(message, names)}{found}") from None
    except OverflowError:
        raise FarstateError(f"{path}: sizes beyond what can be computed with") from None


def _renamed(message: str, names: Mapping[str, str]) -> str:
    """A message in which our names stand in formulas, `name = 3` or `name × name = 3`, with the file's names."""
    return re.sub(r"\b(\w+)(?= [=×])", lambda found: names.get(found[1], found[1]), message)


def whole(values: Mapping[str, Any], key: str, default: int, path: Path) -> int:
    """The integer under `key`.

    Raises:
        FarstateError: something else.
    """
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST_SIZE:
        raise FarstateError(f"{path}: {key}: an integer up to {LARGEST_SIZE} is expected (found {shown(value)})")
    return value


def truth(values: Mapping[str, Any], key: str, default: bool, path: Path) -> bool:
    """The truth value under `key`.

    Raises:
        FarstateError: something else.
    """
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise FarstateError(f"{path}: {key}: true or false is expected (found {shown(value)})")
    return value


def token_ids(data: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of special tokens in a library's configuration, which mean the same in all that have the keys."""

    def is_id(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    return {
        key: value
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if is_id(value := data.get(key)) or (isinstance(value, list) and all(map(is_id, value)))
    }


def refuse_quantized(folder: Path) -> None:
    """Refuse weights of which `config.json` says that they are codes.

    Raises:
        FarstateError: there is a `quantization_config`.
    """
    if (found := peek(folder).get("quantization_config")) is not None:
        raise FarstateError(
            f"{folder / CONFIG}: quantization_config = {shown(found)}: quantised weights are not read; convert them to "
            f"one of {', '.join(DTYPES)}"
        )


def expect(values: Mapping[str, Any], path: Path, required: Mapping[str, Any]) -> None:
    """Refuse options with other values than `required`; an absent option has its required value.

    Raises:
        FarstateError: naming option and value.
    """
    for key, value in required.items():
        if values.get(key, value) != value:
            raise FarstateError(f"{path}: only {key} = {value!r} is supported (found {shown(values[key])})")


def expressible(config: Config, format_name: str, required: Mapping[str, Any]) -> None:
    """Refuse to write a configuration whose fields have other values than `required`, the only ones the format has.

    Raises:
        FarstateError: naming field and value.
    """
    for key, value in required.items():
        if (found := getattr(config, key)) != value:
            raise FarstateError(f"{format_name}: its files cannot express {key} = {found!r}, only {value!r}")


def untie(tensors: dict[str, Tensor], config: Config, source: Path) -> None:
    """Give a tied model both names of its head, whichever the file has.

    Raises:
        FarstateError: both are there and differ.
    """
    if not config.tied_embeddings:
        return
    embedding = tensors.get(EMBEDDING, tensors.get(HEAD))
    if embedding is None:
        return
    head = tensors.get(HEAD, embedding)
    if not {head.dtype, embedding.dtype} <= set(DTYPES.values()):
        return  # what such weights are called is said by `check_names_and_shapes`
    if head is not embedding and not torch.equal(head, embedding):
        raise FarstateError(f"{source}: {HEAD} and {EMBEDDING} differ although the configuration ties them")
    tensors[EMBEDDING] = tensors[HEAD] = embedding


def check_names_and_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: Path) -> None:
    """Hold what a file has against what the model has.

    Raises:
        FarstateError: tensors missing, unexpected, of the wrong shape or not of plain numbers; all kinds in one line.
    """
    problems = []
    if missing := [name for name in expected if name not in tensors]:
        problems.append(f"missing {some(missing)}")
    if unexpected := [name for name in tensors if name not in expected]:
        problems.append(f"unexpected {some(unexpected)}")
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if wrong:
        problems.append(f"wrong shape: {some(wrong)}")
    if coded := [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()]:
        problems.append(f"not floating point: {some(coded)}")
    if narrow := [
        f"{name} is {tensor.dtype}"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.dtype not in DTYPES.values()
    ]:
        problems.append(f"not of {', '.join(DTYPES)}: {some(narrow)}")
    if problems:
        raise FarstateError(f"{source}: {'; '.join(problems)}")


def some(names: list[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
