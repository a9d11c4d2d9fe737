"""Checkpoints of mamba-ssm: `MambaLMHeadModel.save_pretrained`, and the hub's state-spaces/mamba-* and mamba2-*.

Our parameters have mamba-ssm's names, so only the configuration is translated. Both names of a tied head are stored: its loader
wants each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from farstate.errors import FarstateError
from farstate.models.config import Config
from farstate.models.formats.checkpoint import Checkpoint, Origin
from farstate.models.formats.checks import expect, expressible, shown, unknown_architecture, validated
from farstate.models.formats.files import CONFIG, PICKLED, json_object, peek, read_folder, write_folder

name = "mamba-ssm"
architectures = ("mamba1", "mamba2")

_ARCHITECTURE = {"Mamba1": "mamba1", "Mamba2": "mamba2"}
_LAYER = {architecture: layer for layer, architecture in _ARCHITECTURE.items()}

# Options of a layer under its name and ours.
_OPTIONS: dict[str, dict[str, str]] = {
    "mamba1": {
        "d_state": "state_size",
        "d_conv": "conv_width",
        "expand": "expand",
        "dt_rank": "dt_rank",
        "dt_init": "dt_init",
        "dt_scale": "dt_scale",
        "dt_min": "dt_min",
        "dt_max": "dt_max",
        "dt_init_floor": "dt_init_floor",
        "bias": "linear_bias",
        "conv_bias": "conv_bias",
    },
    "mamba2": {
        "d_state": "state_size",
        "d_conv": "conv_width",
        "expand": "expand",
        "headdim": "head_size",
        "ngroups": "groups",
        "A_init_range": "A_init_range",
        "dt_min": "dt_min",
        "dt_max": "dt_max",
        "dt_init_floor": "dt_init_floor",
        "dt_limit": "dt_limit",
        "bias": "linear_bias",
        "conv_bias": "conv_bias",
    },
}
# Options of which our layer has one value, and such as change speed or the initialisation only.
_REQUIRED: dict[str, dict[str, Any]] = {
    "mamba1": {},
    "mamba2": {"D_has_hdim": False, "rmsnorm": True, "norm_before_gate": False, "d_ssm": None},
}
_IDLE = {
    "mamba1": ("use_fast_path",),
    "mamba2": ("chunk_size", "use_mem_eff_path", "conv_init", "sequence_parallel"),
}
# Keys of the model, ours, and its defaults.
_MODEL: dict[str, tuple[str, Any]] = {
    "d_model": ("width", 2560),
    "n_layer": ("layers", 64),
    "vocab_size": ("vocabulary_size", 50277),
    "pad_vocab_size_multiple": ("vocabulary_multiple", 8),
    "tie_embeddings": ("tied_embeddings", True),
    "residual_in_fp32": ("residual_in_fp32", True),
}
# MambaLMHeadModel knows no other.
_NORM_EPSILON = 1e-5


def detects(path: Path) -> bool:
    """`d_model` and `n_layer` without the `model_type` that transformers adds to the same keys."""
    config = peek(path)
    return "d_model" in config and "n_layer" in config and "model_type" not in config


def read(path: Path) -> Checkpoint:
    """The folder `path`."""
    data = json_object(path / CONFIG)
    config = to_config(data, path / CONFIG)
    tensors, storage, source = read_folder(path)
    return Checkpoint(config, tensors, {"format": name, "config": data, "storage": storage}, source)


def write(config: Config, tensors: Mapping[str, Tensor], folder: Path, origin: Origin) -> None:
    """`config.json` and `pytorch_model.bin`, the only file that its loader looks for."""
    write_folder(folder, tensors, {"file": PICKLED}, from_config(config, origin.get("config")))


def to_config(data: Mapping[str, Any], path: Path) -> Config:
    """Our configuration from the contents of a `config.json`.

    Raises:
        FarstateError: a layer, an option or a value that our models do not have.
    """
    options = data.get("ssm_cfg") or {}
    if not isinstance(options, dict):
        raise FarstateError(f"{path}: ssm_cfg is {shown(options)}, an object is expected")
    options = dict(options)
    layer = options.pop("layer", "Mamba1")
    if not isinstance(layer, str) or layer not in _ARCHITECTURE:
        raise unknown_architecture(path, layer, _ARCHITECTURE)
    if data.get("attn_layer_idx"):
        raise FarstateError(
            f"{path}: attn_layer_idx = {shown(data['attn_layer_idx'])}: mamba-ssm's attention layers are not those of our hybrid"
        )
    expect(data, path, {"d_intermediate": 0, "rms_norm": True})
    architecture = _ARCHITECTURE[layer]
    expect(options, path, _REQUIRED[architecture])
    if "dt_rank" in options and options["dt_rank"] == "auto":
        del options["dt_rank"]
    if "dt_limit" in options:
        options["dt_limit"] = limit(options["dt_limit"], path)
    names = _OPTIONS[architecture]
    known = {*names, *_REQUIRED[architecture], *_IDLE[architecture]}
    if strange := [option for option in options if option not in known]:
        raise FarstateError(f"{path}: ssm_cfg: {shown(strange[0])} is not supported")
    values = {ours: data.get(theirs, default) for theirs, (ours, default) in _MODEL.items()}
    values |= {ours: options[theirs] for theirs, ours in names.items() if theirs in options}
    theirs_of = {ours: theirs for theirs, (ours, _) in _MODEL.items()}
    theirs_of |= {ours: f"ssm_cfg.{theirs}" for theirs, ours in names.items()}
    return validated({"architecture": architecture, **values}, path, theirs_of)


def from_config(config: Config, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The contents of a `config.json`; `original`, what it was, where it still says the same.

    Raises:
        FarstateError: the format has no words for `config`.
    """
    if original is not None and _says(original, config):
        return dict(original)
    required: dict[str, Any] = {"norm_epsilon": _NORM_EPSILON}
    if config.architecture == "mamba2":
        required["norm_groups"] = None
        if getattr(config, "norm_groups", None) == getattr(config, "groups", 1):
            required["norm_groups"] = getattr(config, "groups", 1)
    expressible(config, name, required)
    values = config.model_dump(mode="json")
    options: dict[str, Any] = {"layer": _LAYER[config.architecture]}
    options |= {theirs: values[ours] for theirs, ours in _OPTIONS[config.architecture].items() if values[ours] is not None}
    if "dt_limit" in options:
        low, high = options.pop("dt_limit")
        # Its layer takes the default's fast path only where the option is absent: JSON has no tuple to compare with.
        if low > 0.0 or high is not None:
            options["dt_limit"] = [low, float("inf") if high is None else high]
    return {
        **{theirs: values[ours] for theirs, (ours, _) in _MODEL.items()},
        "d_intermediate": 0,
        "ssm_cfg": options,
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "fused_add_norm": True,
    }


def limit(value: Any, path: Path) -> tuple[float, float | None]:
    """(low, high) of the time step, `None` for no upper limit, as JSON has it in any of its spellings.

    Raises:
        FarstateError: not a pair of numbers.
    """
    try:
        low, high = (float(number["__float__"]) if isinstance(number, dict) else float(number) for number in value)
    except (TypeError, ValueError, KeyError, OverflowError):
        raise FarstateError(f"{path}: the limits of the time step are two numbers (found {shown(value)})") from None
    return low, None if high == float("inf") else high


def _says(original: Mapping[str, Any], config: Config) -> bool:
    try:
        return to_config(original, Path(CONFIG)) == config
    except FarstateError:
        return False
