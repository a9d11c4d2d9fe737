"""This project's own format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farstate.errors import FarstateError
from farstate.files import write_json
from farstate.models.config import Config
from farstate.models.formats.checkpoint import Checkpoint, Origin
from farstate.models.formats.checks import HEAD, shown, validated
from farstate.models.formats.files import CONFIG, DTYPES, SAFETENSORS, bare, bare_weights, json_object, peek, read_safetensors
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.tensor_files import write_tensors

name = "farstate"
architectures = tuple(ARCHITECTURES)


def _one_of(holds: Callable[[str], bool], what: str) -> AfterValidator:
    def check(value: str) -> str:
        if not holds(value):
            raise ValueError(f"not {what}")
        return value

    return AfterValidator(check)


def _known(value: str) -> bool:
    from farstate.models.formats import FORMATS  # which imports this module

    return value in FORMATS


_Beside = Annotated[str, _one_of(bare, "the name of a file in a folder")]
_Weights = Annotated[str, _one_of(bare_weights, "the name of a file of weights in a folder")]
_Dtype = Annotated[str, _one_of(DTYPES.__contains__, f"one of {', '.join(DTYPES)}")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Storage(_Strict):
    file: _Weights = SAFETENSORS
    weight_map: dict[str, _Weights] = {}
    dtype: _Dtype = "float32"
    dtypes: dict[str, _Dtype] = {}


class _Origin(_Strict):
    """What a header may say of where weights came from: files are written by these names."""

    format: Annotated[str, _one_of(_known, "the name of a format")]
    config: dict[str, Any] = {}
    storage: _Storage = _Storage()
    file: _Weights = SAFETENSORS
    checkpoint: Annotated[str, _one_of(str.isprintable, "printable")] = ""
    beside: list[_Beside] = []


def detects(path: Path) -> bool:
    """A folder whose `config.json` has an `architecture`, or one file of weights that says so itself: a snapshot."""
    if path.is_file():
        return path.suffix == ".safetensors" and "config" in _header(path)
    return "architecture" in peek(path)


def _header(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def read(path: Path) -> Checkpoint:
    """The folder `path`, whose weights repeat its configuration; or one file of weights, which holds its own.

    What the header says of an origin is held to what an origin may say.
    """
    source = path if path.is_file() else path / SAFETENSORS
    config = None if path.is_file() else validated(json_object(path / CONFIG), path / CONFIG)
    if not source.exists():
        raise FarstateError(f"{path}: no {SAFETENSORS} in it")
    tensors, metadata = read_safetensors(source)
    try:
        stored = json.loads(metadata["config"])
        repeated = config_from_json(stored) if isinstance(stored, dict) else None
    except (KeyError, ValueError, RecursionError, OverflowError, FarstateError):
        repeated = None
    if repeated is None and (config is None or "config" not in metadata):
        raise FarstateError(
            f"{source}: its header holds no configuration of a model, as one that Farstate wrote does; weights that were saved again "
            "lose it: take the original file, or save with its metadata (safetensors: save_file(tensors, path, metadata))"
        )
    if config is not None and repeated != config:
        raise FarstateError(f"{source}: written for another configuration than {path / CONFIG}")
    assert repeated is not None
    return Checkpoint(repeated, tensors, _origin(metadata.get("origin"), source), source)


def _origin(text: str | None, source: Path) -> Origin:
    if text is None:
        return {}
    try:
        origin = json.loads(text)
        _Origin.model_validate(origin)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["origin", *(str(part) for part in first["loc"])])
        reason = first["ctx"]["error"] if first["type"] == "value_error" else first["msg"]
        raise FarstateError(f"{source}: header: {where!r}: {reason} (found {shown(first['input'])})") from None
    except (ValueError, RecursionError):
        raise FarstateError(f"{source}: header: 'origin' is not JSON") from None
    return dict(origin)


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
