"""Checkpoints of transformers: `MambaForCausalLM` and `Mamba2ForCausalLM`.

Names are mamba-ssm's but for the embedding's. The vocabulary is stored padded, so that how many of its rows are real is not
recorded: `vocabulary_size` is the padded one.

`rescale_prenorm_residual: true`, which is about the initialisation, makes transformers 5 divide `out_proj` by √layers whenever it
loads a file. Here the weights are those of the file; such a configuration keeps the key when it is written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from farstate.errors import FarstateError
from farstate.models.config import Config
from farstate.models.formats.checkpoint import Checkpoint, Origin
from farstate.models.formats.checks import EMBEDDING, HEAD, expect, expressible, unknown_architecture, validated, whole
from farstate.models.formats.files import CONFIG, json_object, peek, read_folder, write_folder
from farstate.models.formats.mamba_ssm import limit
from farstate.models.mamba1.shape import Mamba1Config
from farstate.models.mamba2.shape import Mamba2Config

name = "transformers"
architectures = ("mamba1", "mamba2")

_ARCHITECTURE = {"mamba": "mamba1", "mamba2": "mamba2"}
_MODEL_TYPE = {architecture: kind for kind, architecture in _ARCHITECTURE.items()}
_CLASS = {"mamba": "MambaForCausalLM", "mamba2": "Mamba2ForCausalLM"}
_EMBEDDING = "backbone.embeddings.weight"

# Its keys, ours, and its defaults: some versions write only what differs from them.
_SHARED: dict[str, tuple[str, Any]] = {
    "layer_norm_epsilon": ("norm_epsilon", 1e-5),
    "expand": ("expand", 2),
    "conv_kernel": ("conv_width", 4),
    "use_bias": ("linear_bias", False),
    "use_conv_bias": ("conv_bias", True),
    "residual_in_fp32": ("residual_in_fp32", True),
}
_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "mamba1": {
        **_SHARED,
        "hidden_size": ("width", 768),
        "num_hidden_layers": ("layers", 32),
        "state_size": ("state_size", 16),
        "tie_word_embeddings": ("tied_embeddings", True),
    },
    "mamba2": {
        **_SHARED,
        "hidden_size": ("width", 4096),
        "num_hidden_layers": ("layers", 64),
        "state_size": ("state_size", 128),
        "head_dim": ("head_size", 64),
        "n_groups": ("groups", 8),
        "tie_word_embeddings": ("tied_embeddings", False),
    },
}
_VOCABULARY = {"mamba1": 50280, "mamba2": 32768}
_HEADS = 128


def detects(path: Path) -> bool:
    """A `model_type` that is one of its two."""
    kind = peek(path).get("model_type")
    return isinstance(kind, str) and kind in _ARCHITECTURE


def read(path: Path) -> Checkpoint:
    """The folder `path`."""
    data = json_object(path / CONFIG)
    config = to_config(data, path / CONFIG)
    stored, storage, source = read_folder(path)
    tensors = {our_name(key, data): tensor for key, tensor in stored.items()}
    storage["dtypes"] = {our_name(key, data): dtype for key, dtype in storage["dtypes"].items()}
    return Checkpoint(config, tensors, {"format": name, "config": data, "storage": storage}, source)


def write(config: Config, tensors: Mapping[str, Tensor], folder: Path, origin: Origin) -> None:
    """`config.json` and the weights in the file or the shards they came in, by default one safetensors file."""
    named = {
        _EMBEDDING if key == EMBEDDING else key: tensor
        for key, tensor in tensors.items()
        if key != HEAD or not config.tied_embeddings
    }
    data = origin.get("token_ids", {}) | from_config(config, origin.get("config"))
    dtype = str(tensors[EMBEDDING].dtype).removeprefix("torch.")
    # The key was called torch_dtype once; a file that has it keeps it.
    data["torch_dtype" if "torch_dtype" in data else "dtype"] = dtype
    write_folder(folder, named, origin.get("storage", {}), data)


def to_config(data: Mapping[str, Any], path: Path) -> Config:
    """Our configuration from the contents of a `config.json`.

    Raises:
        FarstateError: another model, an option or a value that ours does not have, sizes that contradict each other.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in _ARCHITECTURE:
        raise unknown_architecture(path, kind, _ARCHITECTURE)
    architecture = _ARCHITECTURE[kind]
    if data.get("hidden_act") != "swish":  # silu by another name
        expect(data, path, {"hidden_act": "silu"})
    values = {ours: data.get(theirs, default) for theirs, (ours, default) in _KEYS[architecture].items()}
    values |= {"vocabulary_size": data.get("vocab_size", _VOCABULARY[architecture]), "vocabulary_multiple": 1}
    names = {ours: theirs for theirs, (ours, _) in _KEYS[architecture].items()}
    names |= {"vocabulary_size": "vocab_size", "dt_limit": "time_step_limit", "dt_rank": "time_step_rank"}
    if isinstance(values["expand"], float) and values["expand"].is_integer():
        values["expand"] = int(values["expand"])
    if architecture == "mamba2":
        if "time_step_limit" in data:
            values["dt_limit"] = limit(data["time_step_limit"], path)
    elif data.get("time_step_rank", "auto") != "auto":
        values["dt_rank"] = data["time_step_rank"]
    config = validated({"architecture": architecture, **values}, path, names)
    if isinstance(config, Mamba2Config):
        heads = whole(data, "num_heads", _HEADS, path) * config.head_size
        if heads != config.inner_width:
            raise FarstateError(
                f"{path}: num_heads × head_dim = {heads} differs from hidden_size × expand = {config.inner_width}"
            )
    elif isinstance(config, Mamba1Config):
        expect(data, path, {"intermediate_size": config.inner_width})
    return config


def from_config(config: Config, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The contents of a `config.json`; `original`, what it was, where it still says the same.

    Raises:
        FarstateError: the format has no words for `config`.
    """
    if original is not None and _says(original, config):
        return dict(original)
    kind = _MODEL_TYPE[config.architecture]
    values = config.model_dump(mode="json")
    data: dict[str, Any] = {theirs: values[ours] for theirs, (ours, _) in _KEYS[config.architecture].items()}
    data |= {"model_type": kind, "architectures": [_CLASS[kind]], "hidden_act": "silu", "vocab_size": config.padded_vocabulary}
    if config.architecture == "mamba2":
        groups = values["groups"]
        expressible(config, name, {"norm_groups": groups if values["norm_groups"] == groups else None})
        data["num_heads"] = config.width * values["expand"] // values["head_size"]
        low, high = values["dt_limit"]
        data["time_step_limit"] = [low, float("inf") if high is None else high]
    elif values["dt_rank"] is not None:
        data["time_step_rank"] = values["dt_rank"]
    return data


def our_name(key: str, data: Mapping[str, Any]) -> str:
    """Our name of the tensor `key`; `data` is the configuration."""
    return EMBEDDING if key == _EMBEDDING else key


def _says(original: Mapping[str, Any], config: Config) -> bool:
    try:
        return to_config(original, Path(CONFIG)) == config
    except FarstateError:
        return False
