"""Weights on disk: this project's format, and those of other libraries, read and written (`farstate.models.formats`).

What was read from another format keeps where it came from: in the header of `model.safetensors`, through post-training, until
`export` writes it back.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from farstate.errors import FarstateError
from farstate.models.formats import FORMATS, Checkpoint, Origin, farstate
from farstate.models.formats.checks import check_names_and_shapes, unknown_architecture, untie
from farstate.models.formats.files import CONFIG, SAFETENSORS, json_object
from farstate.models.language_model import LanguageModel

__all__ = ["CONFIG", "SAFETENSORS", "detect_format", "load_model", "load_with_origin", "save_model", "write_weights"]


def save_model(model: LanguageModel, folder: str | os.PathLike[str], origin: Origin | None = None) -> None:
    """Write `model.safetensors` and then `config.json` into `folder`, each whole or not at all.

    The weights' header holds the configuration too, so that a pair of files from two different runs is noticed; and `origin`.
    """
    farstate.write(model.config, dict(model.named_parameters()), Path(folder), origin or {})


def write_weights(model: LanguageModel, path: Path, origin: Origin | None = None, **facts: str) -> None:
    """Write one safetensors file that `load_model` reads beside its `config.json`; `origin` and `facts` enter its header.

    Raises:
        OSError, SafetensorError: the disk refused.
    """
    # A tied tensor is among the parameters once, under the embedding's name.
    farstate.write_weights(model.config, dict(model.named_parameters()), path, origin or {}, **facts)


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
        data = json_object(root / CONFIG)
        if "model_type" in data:
            raise unknown_architecture(root / CONFIG, str(data["model_type"]))
        raise FarstateError(f"{root / CONFIG}: not a configuration of {', '.join(FORMATS)}")
    raise FarstateError(f"{root}: not a checkpoint of {', '.join(FORMATS)}")


def _loaded(root: Path, dtype: torch.dtype) -> tuple[LanguageModel, Checkpoint]:
    checkpoint = FORMATS[detect_format(root)].read(root)
    untie(checkpoint.tensors, checkpoint.config, checkpoint.source)
    model = LanguageModel(checkpoint.config)
    check_names_and_shapes(checkpoint.tensors, model.state_dict(), checkpoint.source)
    model.to(dtype=dtype)
    model.load_state_dict(checkpoint.tensors)
    return model.eval(), checkpoint
