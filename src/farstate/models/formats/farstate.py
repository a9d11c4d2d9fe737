"""This project's own format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from farstate.errors import FarstateError
from farstate.files import write_json
from farstate.models.config import Config
from farstate.models.formats.checkpoint import Checkpoint, Origin
from farstate.models.formats.checks import HEAD, validated
from farstate.models.formats.files import CONFIG, SAFETENSORS, json_object, peek, read_safetensors
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.tensor_files import write_tensors

name = "farstate"
architectures = tuple(ARCHITECTURES)


def detects(path: Path) -> bool:
    """A `config.json` with an `architecture`."""
    return "architecture" in peek(path)


def read(path: Path) -> Checkpoint:
    """The folder `path`; the weights' header must repeat its configuration."""
    config = validated(json_object(path / CONFIG), path / CONFIG)
    source = path / SAFETENSORS
    if not source.exists():
        raise FarstateError(f"{path}: no {SAFETENSORS} in it")
    tensors, metadata = read_safetensors(source)
    try:
        repeated = config_from_json(json.loads(metadata["config"]))
        origin: Any = json.loads(metadata.get("origin", "{}"))
    except (KeyError, ValueError, FarstateError):
        repeated, origin = None, {}
    if repeated != config:
        raise FarstateError(f"{source}: written for another configuration than {path / CONFIG}")
    return Checkpoint(config, tensors, origin if isinstance(origin, dict) else {}, source)


def write(config: Config, tensors: Mapping[str, Tensor], folder: Path, origin: Origin) -> None:
    """`model.safetensors` and then `config.json`, each whole or not at all."""
    owned = {key: tensor for key, tensor in tensors.items() if key != HEAD or not config.tied_embeddings}
    write_weights(config, owned, folder / SAFETENSORS, origin)
    write_json(folder / CONFIG, config.model_dump(mode="json"))


def write_weights(config: Config, tensors: Mapping[str, Tensor], path: Path, origin: Origin, **facts: str) -> None:
    """One safetensors file that `read` takes beside its `config.json`; `facts` enter its header.

    Raises:
        OSError, SafetensorError: the disk refused.
    """
    if origin:
        facts["origin"] = json.dumps(origin, sort_keys=True)
    repeated = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    write_tensors(path, tensors, {"format": "farstate.model", "config": repeated, **facts})
