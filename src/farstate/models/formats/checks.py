"""What is wrong with a checkpoint, in one line with names: shared by all formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from farstate.errors import FarstateError, nearest
from farstate.models.config import Config
from farstate.models.registry import ARCHITECTURES, config_from_json

HEAD = "lm_head.weight"
EMBEDDING = "backbone.embedding.weight"
_SHOWN = 3


def unknown_architecture(path: Path, name: str, known: Iterable[str] | None = None) -> FarstateError:
    """The error for an architecture that is not among `known`, by default those of the registry."""
    names = sorted(ARCHITECTURES if known is None else known)
    return FarstateError(f"{path}: unknown architecture '{name}'{nearest(name, names)}; known: {', '.join(names)}")


def validated(values: dict[str, Any], path: Path) -> Config:
    """The configuration of `values`, which have our names.

    Raises:
        FarstateError: an unknown architecture, or the first value that does not fit, naming `path`.
    """
    if values.get("architecture") not in ARCHITECTURES:
        raise unknown_architecture(path, str(values.get("architecture")))
    try:
        return config_from_json(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FarstateError(f"{path}: {where + ': ' if where else ''}{first['msg']} (found {first['input']!r})") from None


def expect(values: Mapping[str, Any], path: Path, required: Mapping[str, Any]) -> None:
    """Refuse options with other values than `required`; an absent option has its required value.

    Raises:
        FarstateError: naming option and value.
    """
    for key, value in required.items():
        if values.get(key, value) != value:
            raise FarstateError(f"{path}: only {key} = {value!r} is supported (found {values[key]!r})")


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
    if head is not embedding and not torch.equal(head, embedding):
        raise FarstateError(f"{source}: {HEAD} and {EMBEDDING} differ although the configuration ties them")
    tensors[EMBEDDING] = tensors[HEAD] = embedding


def check_names_and_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], source: Path) -> None:
    """Hold what a file has against what the model has.

    Raises:
        FarstateError: tensors missing, unexpected, of the wrong shape or not of numbers; all kinds in one line.
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
    if problems:
        raise FarstateError(f"{source}: {'; '.join(problems)}")


def some(names: list[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
