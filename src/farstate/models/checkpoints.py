"""Weights on disk: this project's format, written and read, and the formats of mamba-ssm and transformers, read.

| format       | folder holds                                                                                              |
|--------------|-----------------------------------------------------------------------------------------------------------|
| farstate     | `config.json` (a `Config`), `model.safetensors` whose header repeats it                              |
| mamba-ssm    | `config.json` (`d_model`, `ssm_cfg`, …), `pytorch_model.bin`                                               |
| transformers | `config.json` (`model_type: mamba2`), `model.safetensors` or `pytorch_model.bin`, one file or with an index |

A tied head is stored once. Nothing is unpickled but tensors.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farstate.errors import FarstateError, nearest
from farstate.files import read_json, write_json
from farstate.models.config import Config
from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.tensor_files import write_tensors

Format = Literal["farstate", "mamba-ssm", "transformers"]

CONFIG = "config.json"
SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
_HEAD = "lm_head.weight"
_EMBEDDING = "backbone.embedding.weight"
_SHOWN = 3


def save_model(model: LanguageModel, folder: str | os.PathLike[str]) -> None:
    """Write `model.safetensors` and then `config.json` into `folder`, each whole or not at all.

    The weights' header holds the configuration too, so that a pair of files from two different runs is noticed.
    """
    root = Path(folder)
    write_weights(model, root / SAFETENSORS)
    write_json(root / CONFIG, model.config.model_dump(mode="json"))


def write_weights(model: LanguageModel, path: Path, **facts: str) -> None:
    """Write one safetensors file that `load_model` reads beside its `config.json`; `facts` enter its header.

    Raises:
        OSError, SafetensorError: the disk refused.
    """
    config = json.dumps(model.config.model_dump(mode="json"), sort_keys=True)
    # A tied tensor is among the parameters once, under the embedding's name.
    write_tensors(path, dict(model.named_parameters()), {"format": "farstate.model", "config": config, **facts})


def load_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> LanguageModel:
    """The model in the folder `path`, in any of the three formats, in evaluation mode.

    Raises:
        FarstateError: in one line, what is wrong with which file: missing, damaged or truncated, unknown architecture or
            option, tensors missing, unexpected or of the wrong shape.
    """
    root = Path(path)
    kind = detect_format(root)
    data = read_json(root / CONFIG)
    readers = {"farstate": _farstate_config, "mamba-ssm": _mamba_ssm_config, "transformers": _transformers_config}
    config = readers[kind](data, root / CONFIG)
    tensors, source = _read_tensors(root, config if kind == "farstate" else None)
    if kind == "transformers":
        tensors = {name.replace("backbone.embeddings.", "backbone.embedding."): tensor for name, tensor in tensors.items()}
    _untie(tensors, config, source)
    model = LanguageModel(config)
    _check_names_and_shapes(tensors, model, source)
    model.to(dtype=dtype)
    model.load_state_dict(tensors)
    return model.to(device=device).eval()


def detect_format(path: str | os.PathLike[str]) -> Format:
    """Which of the three formats the folder `path` holds.

    Raises:
        FarstateError: no folder, no `config.json`, or one of another kind.
    """
    root = Path(path)
    if not root.is_dir():
        raise FarstateError(f"{root}: no such folder; a checkpoint is a folder with {CONFIG} and its weights")
    data = read_json(root / CONFIG)
    if isinstance(data, dict):
        if "architecture" in data:
            return "farstate"
        if "d_model" in data and "n_layer" in data:
            return "mamba-ssm"
        if "model_type" in data:
            return "transformers"
    raise FarstateError(f"{root / CONFIG}: not a configuration of farstate, mamba-ssm or transformers")


def _farstate_config(data: dict[str, Any], path: Path) -> Config:
    architecture = data.get("architecture")
    if architecture not in ARCHITECTURES:
        raise _unknown_architecture(path, str(architecture))
    return _validated(data, path)


def _mamba_ssm_config(data: dict[str, Any], path: Path) -> Config:
    options = dict(data.get("ssm_cfg") or {})
    if (layer := options.pop("layer", "Mamba1")) != "Mamba2":
        raise _unknown_architecture(path, str(layer))
    _expect(data, path, {"d_intermediate": 0, "rms_norm": True, "attn_layer_idx": []})
    _expect(options, path, {"D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False, "d_ssm": None}, drop=True)
    names = {
        "d_state": "state_size",
        "d_conv": "conv_width",
        "expand": "expand",
        "headdim": "head_size",
        "ngroups": "groups",
        "A_init_range": "A_init_range",
        "dt_min": "dt_min",
        "dt_max": "dt_max",
        "dt_init_floor": "dt_init_floor",
        "bias": "linear_bias",
        "conv_bias": "conv_bias",
    }
    values = {ours: options.pop(theirs) for theirs, ours in names.items() if theirs in options}
    if "dt_limit" in options:
        values["dt_limit"] = _limit(options.pop("dt_limit"))
    for harmless in ("chunk_size", "use_mem_eff_path", "conv_init"):
        options.pop(harmless, None)
    if options:
        raise FarstateError(f"{path}: ssm_cfg.{next(iter(options))} is not supported")
    return _validated(
        {
            "architecture": "mamba2",
            "vocabulary_size": data.get("vocab_size"),
            "vocabulary_multiple": data.get("pad_vocab_size_multiple", 8),
            "width": data.get("d_model"),
            "layers": data.get("n_layer"),
            "tied_embeddings": data.get("tie_embeddings", True),
            "residual_in_fp32": data.get("residual_in_fp32", True),
            **values,
        },
        path,
    )


def _transformers_config(data: dict[str, Any], path: Path) -> Config:
    if data["model_type"] != "mamba2":
        raise _unknown_architecture(path, str(data["model_type"]))
    _expect(data, path, {"hidden_act": "silu"})
    try:
        # transformers writes only what differs from its defaults in some versions; these are its defaults.
        heads, head_size = data.get("num_heads", 128), data.get("head_dim", 64)
        width, expand = data.get("hidden_size", 4096), data.get("expand", 2)
        if heads * head_size != width * expand:
            raise FarstateError(
                f"{path}: num_heads × head_dim = {heads * head_size} differs from hidden_size × expand = {width * expand}"
            )
        values = {
            "architecture": "mamba2",
            # Its vocabulary is already padded; how many entries are real is not recorded.
            "vocabulary_size": data.get("vocab_size", 32768),
            "vocabulary_multiple": 1,
            "width": width,
            "layers": data.get("num_hidden_layers", 64),
            "expand": int(expand),
            "state_size": data.get("state_size", 128),
            "head_size": head_size,
            "groups": data.get("n_groups", 8),
            "conv_width": data.get("conv_kernel", 4),
            "conv_bias": data.get("use_conv_bias", True),
            "linear_bias": data.get("use_bias", False),
            "tied_embeddings": data.get("tie_word_embeddings", False),
            "residual_in_fp32": data.get("residual_in_fp32", True),
            "norm_epsilon": data.get("layer_norm_epsilon", 1e-5),
            "dt_limit": _limit(data.get("time_step_limit", (0.0, float("inf")))),
        }
    except TypeError as error:
        raise FarstateError(f"{path}: a size is not a number ({error})") from None
    return _validated(values, path)


def _limit(limit: Any) -> tuple[float, float | None]:
    low, high = (float(value["__float__"]) if isinstance(value, dict) else float(value) for value in limit)
    return low, None if high == float("inf") else high


def _validated(values: dict[str, Any], path: Path) -> Config:
    try:
        return config_from_json(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FarstateError(f"{path}: {where + ': ' if where else ''}{first['msg']} (found {first['input']!r})") from None


def _expect(values: dict[str, Any], path: Path, allowed: dict[str, Any], drop: bool = False) -> None:
    for key, value in allowed.items():
        if (values.pop(key, value) if drop else values.get(key, value)) != value:
            raise FarstateError(f"{path}: only {key} = {value!r} is supported")


def _unknown_architecture(path: Path, name: str) -> FarstateError:
    return FarstateError(
        f"{path}: unknown architecture '{name}'{nearest(name, ARCHITECTURES)}; known: {', '.join(sorted(ARCHITECTURES))}"
    )


def _read_tensors(root: Path, config: Config | None) -> tuple[dict[str, Tensor], Path]:
    """All tensors of a folder, and the file to name in a message. `config`: what the header must repeat."""
    for name in (SAFETENSORS, PICKLED):
        if (root / name).exists():
            return _read_file(root / name, config), root / name
        index = root / f"{name}.index.json"
        if index.exists():
            try:
                shards = sorted(set(read_json(index)["weight_map"].values()))
            except (KeyError, TypeError, AttributeError):
                raise FarstateError(f"{index}: no 'weight_map' in it") from None
            tensors: dict[str, Tensor] = {}
            for shard in shards:
                tensors |= _read_file(root / shard, None)
            return tensors, index
    raise FarstateError(f"{root}: no {SAFETENSORS} and no {PICKLED} in it")


def _read_file(path: Path, config: Config | None) -> dict[str, Tensor]:
    try:
        if path.suffix != ".safetensors":
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
                raise FarstateError(f"{path}: not a dictionary of tensors")
            return loaded
        with safe_open(path, framework="pt") as file:
            if config is not None:
                written = (file.metadata() or {}).get("config")
                if written is None or config_from_json(json.loads(written)) != config:
                    raise FarstateError(f"{path}: written for another configuration than {path.parent / CONFIG}")
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such file") from None
    except pickle.UnpicklingError:
        raise FarstateError(f"{path}: damaged, or holds more than tensors") from None
    except (SafetensorError, BadZipFile, EOFError, RuntimeError, OSError, ValueError) as error:
        raise FarstateError(f"{path}: damaged or truncated ({str(error).splitlines()[0]})") from None


def _untie(tensors: dict[str, Tensor], config: Config, source: Path) -> None:
    """Give a tied model both names, whichever the file has; refuse two that differ."""
    if not config.tied_embeddings:
        return
    embedding = tensors.get(_EMBEDDING, tensors.get(_HEAD))
    if embedding is None:
        return
    head = tensors.get(_HEAD, embedding)
    if head is not embedding and not torch.equal(head, embedding):
        raise FarstateError(f"{source}: {_HEAD} and {_EMBEDDING} differ although the configuration ties them")
    tensors[_EMBEDDING] = tensors[_HEAD] = embedding


def _check_names_and_shapes(tensors: dict[str, Tensor], model: LanguageModel, source: Path) -> None:
    expected = model.state_dict()
    problems = []
    if missing := [name for name in expected if name not in tensors]:
        problems.append(f"missing {_some(missing)}")
    if unexpected := [name for name in tensors if name not in expected]:
        problems.append(f"unexpected {_some(unexpected)}")
    wrong = [
        f"{name} is {tuple(tensors[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if wrong:
        problems.append(f"wrong shape: {_some(wrong)}")
    if problems:
        raise FarstateError(f"{source}: {'; '.join(problems)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
