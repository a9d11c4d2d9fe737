"""Weights on disk: this project's format, and those of other libraries, read and written (`farstate.models.formats`).

What was read from another format keeps where it came from: in the header of `model.safetensors`, through post-training, until
`export` writes it back.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farstate.errors import FarstateError, nearest
from farstate.files import atomic_folder
from farstate.models.config import Config
from farstate.models.formats import FORMATS, Checkpoint, Origin, farstate
from farstate.models.formats.checks import (
    EMBEDDING,
    HEAD,
    check_names_and_shapes,
    refuse_quantized,
    token_ids,
    unknown_architecture,
    untie,
)
from farstate.models.formats.files import CONFIG, DTYPES, SAFETENSORS, dtypes_of, json_object
from farstate.models.language_model import LanguageModel

__all__ = [
    "CONFIG",
    "SAFETENSORS",
    "detect_format",
    "export",
    "load_model",
    "load_with_origin",
    "save_in_format",
    "save_model",
    "write_weights",
]


_DTYPES = ("float32", "float16", "bfloat16")


def save_model(model: LanguageModel, folder: str | os.PathLike[str], origin: Origin | None = None) -> None:
    """Write `model.safetensors` and then `config.json` into `folder`, each whole or not at all.

    The weights' header holds the configuration too, so that a pair of files from two different runs is noticed; and `origin`.
    """
    farstate.write(model.config, dict(model.named_parameters()), Path(folder), origin or {})


def write_weights(
    model: LanguageModel,
    path: Path,
    origin: Origin | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    **facts: str,
) -> None:
    """Write one safetensors file that `load_model` reads beside its `config.json`; `origin` and `facts` enter its header.

    `tensors` are the parameters by name, where the model itself holds shards of them.

    Raises:
        OSError, SafetensorError: the disk refused.
    """
    # A tied tensor is among the parameters once, under the embedding's name.
    owned = dict(model.named_parameters()) if tensors is None else tensors
    farstate.write_weights(model.config, owned, path, origin or {}, **facts)


def load_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """The model at `path`, in any format, in evaluation mode.

    Raises:
        FarstateError: in one line, what is wrong with which file: missing, damaged or truncated, unknown architecture or
            option, tensors missing, unexpected or of the wrong shape.
    """
    return load_with_origin(path, device, dtype)[0]


def load_with_origin(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[LanguageModel, Origin]:
    """As `load_model`, and where the weights come from: empty for a model that was trained here."""
    root = Path(path)
    model, checkpoint = _loaded(root, dtype)
    return model.to(device=device), checkpoint.origin


def detect_format(path: str | os.PathLike[str]) -> str:
    """The name in `FORMATS` of the format at `path`.

    Raises:
        FarstateError: nothing there, or nothing that a format knows.
    """
    root = Path(path)
    if not root.exists():
        raise FarstateError(f"{root}: no such folder; a checkpoint is a folder with {CONFIG} and its weights")
    for name, kind in FORMATS.items():
        if kind.detects(root):
            return name
    if root.is_dir():
        several = sorted(path.name for path in root.glob("*.pth"))
        if len(several) > 1 and not (root / CONFIG).exists():
            raise FarstateError(f"{root}: holds {len(several)} .pth files and no {CONFIG}; name one of them: {root / several[0]}")
        data = json_object(root / CONFIG)
        if "model_type" in data:
            raise unknown_architecture(root / CONFIG, data["model_type"])
        raise FarstateError(f"{root / CONFIG}: not a configuration of {', '.join(FORMATS)}")
    raise FarstateError(f"{root}: not a checkpoint of {', '.join(FORMATS)}")


class Unfilled(LanguageModel):
    """A model whose parameters are about to be read: drawing those of a billion takes half a minute."""

    def _initialize(self, generator: torch.Generator) -> None:
        pass


def _loaded(root: Path, dtype: torch.dtype) -> tuple[LanguageModel, Checkpoint]:
    kind = FORMATS[detect_format(root)]
    refuse_quantized(root)
    checkpoint = kind.read(root)
    untie(checkpoint.tensors, checkpoint.config, checkpoint.source)
    # Memory is taken only for sizes that the file has too.
    check_names_and_shapes(checkpoint.tensors, _shapes(checkpoint), checkpoint.source)
    model = Unfilled(checkpoint.config, dtype=dtype)
    model.load_state_dict(checkpoint.tensors)
    model.origin = checkpoint.origin
    return model.eval(), checkpoint


def _shapes(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """What the model has, on the meta device.

    Raises:
        FarstateError: sizes far beyond those of the file.
    """
    config, source = checkpoint.config, checkpoint.source
    if config.layers > len(checkpoint.tensors):
        raise FarstateError(f"{source}: holds {len(checkpoint.tensors)} tensors, the configuration has {config.layers} layers")
    try:
        with torch.device("meta"):
            return Unfilled(config).state_dict()
    except (RuntimeError, OverflowError, TypeError):
        raise FarstateError(f"{source}: the configuration has sizes that no tensor can have") from None


# What belongs to a checkpoint besides its configuration and its weights.
_BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


def files_beside(folder: Path) -> list[str]:
    """Names of the tokenizer's files and the like in the folder of a checkpoint."""
    return [name for name in _BESIDE if (folder / name).is_file()]


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        format: its name.
        dtype: of most tensors.
        beside: files of the tokenizer and the like that were copied.
        absent: those that the weights once came with and that are not here to copy; `checkpoint` is where they were.
    """

    format: str
    dtype: str
    beside: list[str]
    absent: list[str]
    checkpoint: str | None


def export(
    source: str | os.PathLike[str], output: str | os.PathLike[str], format_name: str | None = None, dtype: str | None = None
) -> Exported:
    """Write the model at `source` into the new folder `output`, which appears whole or not at all.

    Args:
        format_name: by default the format that the weights came from.
        dtype: of all tensors; by default each tensor's dtype in the file it came from where this loses nothing of any, so that
            untouched weights come back bit by bit, and else (after training) the dtype it has.

    Raises:
        FarstateError: `output` is there already, the weights come from no other format and none is given, or the format
            has no such architecture or no words for its configuration, or a weight is too large for `dtype`; and what
            `load_model` raises.
    """
    root, target = Path(source), Path(output)
    model, checkpoint = _loaded(_unless_there(root, target), torch.float32)
    # In the order of the model, which is that of the files that the libraries write.
    tensors = {key: checkpoint.tensors[key] for key in model.state_dict()}
    folder = root if root.is_dir() else root.parent
    return _write(root, checkpoint.config, tensors, checkpoint.origin, folder, target, format_name, dtype)


def save_in_format(
    model: LanguageModel, output: str | os.PathLike[str], format_name: str | None = None, dtype: str | None = None
) -> Exported:
    """Write `model` into the new folder `output`, in the format that it was read from (`model.origin`) unless another is named.

    As `export`, and with the files that came beside the weights where `model.origin["checkpoint"]` is still a folder.

    Raises:
        FarstateError: as `export`.
    """
    target = Path(output)
    _unless_there(target, target)
    came_from = model.origin.get("checkpoint")
    folder = None if came_from is None else Path(came_from)
    tensors = {key: tensor.detach().cpu() for key, tensor in model.state_dict().items()}
    if model.config.tied_embeddings:
        tensors[HEAD] = tensors[EMBEDDING]
    return _write(Path("model"), model.config, tensors, model.origin, folder, target, format_name, dtype, flag="")


def _unless_there(root: Path, target: Path) -> Path:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FarstateError(f"{target}: already there; give the name of a new folder")
    return root


def _write(
    root: Path,
    config: Config,
    tensors: Mapping[str, Tensor],
    origin: Origin,
    folder: Path | None,
    target: Path,
    format_name: str | None,
    dtype: str | None,
    flag: str = "--",
) -> Exported:
    """Write `tensors` into `target`; `root` names the model in messages, `folder` may hold files to copy along, `flag` is what an option begins with."""
    name = format_name or origin.get("format")
    able = [known for known, kind in FORMATS.items() if config.architecture in kind.architectures]
    if name is None:
        raise FarstateError(f"{root}: was trained here and comes from no other format; give {flag}format: {', '.join(able)}")
    if name not in FORMATS:
        raise FarstateError(f"{flag}format: '{name}' is unknown{nearest(name, FORMATS)}; known: {', '.join(FORMATS)}")
    if name not in able:
        raise FarstateError(
            f"{root}: {name} has no architecture '{config.architecture}'; formats that have it: {', '.join(able)}"
        )
    tensors = _cast(tensors, origin.get("storage", {}), dtype, flag)
    with atomic_folder(target) as part:
        kept = origin if name in ("farstate", origin.get("format")) else {"token_ids": token_ids(origin.get("config", {}))}
        FORMATS[name].write(config, tensors, part, kept)
        beside = []
        if folder is not None:
            beside = files_beside(folder)
            for file in beside:
                shutil.copyfile(folder / file, part / file)
    absent = [file for file in origin.get("beside", []) if file not in beside]
    return Exported(name, dtypes_of(tensors)["dtype"], beside, absent, origin.get("checkpoint"))


def _cast(tensors: Mapping[str, Tensor], storage: Mapping[str, Any], dtype: str | None, flag: str) -> dict[str, Tensor]:
    if dtype is not None and dtype not in _DTYPES:
        raise FarstateError(f"{flag}dtype: '{dtype}' is unknown; known: {', '.join(_DTYPES)}")
    given = {name: dtype or storage.get("dtypes", {}).get(name) or storage.get("dtype") for name in tensors}
    wanted = {name: DTYPES[word] if (word := given[name]) else tensor.dtype for name, tensor in tensors.items()}
    if dtype is None and not all(torch.equal(t.to(wanted[name]).to(t.dtype), t) for name, t in tensors.items()):
        return dict(tensors)
    # A tied tensor stays one tensor under its two names.
    done: dict[int, Tensor] = {}
    cast = {name: done.setdefault(id(tensor), tensor.to(wanted[name])) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if (lost := tensor.isfinite() & ~cast[name].isfinite()).any():
            raise FarstateError(
                f"{flag}dtype {dtype}: {name} holds {tensor[lost][0].item():g}, beyond the largest number of {dtype}, "
                f"{torch.finfo(wanted[name]).max:g}; take another"
            )
    return cast
