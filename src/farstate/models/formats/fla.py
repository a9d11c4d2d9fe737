"""Checkpoints of flash-linear-attention: GLA, RWKV-6, Mamba-2 and Gated DeltaNet, as its `save_pretrained` writes them.

Our blocks have its parameter names, so that a prefix and the configuration are translated. Its Mamba-2 shares the `model_type`
and the parameter names of transformers' but not the keys of the configuration: `norm_eps` and `dt_limit` here,
`layer_norm_epsilon` and `time_step_limit` there. The vocabulary is stored padded: `vocabulary_size` is the padded one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from farstate.errors import FarstateError
from farstate.models.config import Config
from farstate.models.formats.checkpoint import Checkpoint, Origin
from farstate.models.formats.checks import EMBEDDING, HEAD, expect, expressible, truth, unknown_architecture, validated
from farstate.models.formats.files import CONFIG, json_object, peek, read_folder, write_folder
from farstate.models.formats.mamba_ssm import limit
from farstate.models.gated_deltanet.shape import GatedDeltaNetConfig

name = "fla"
architectures = ("gla", "rwkv6", "mamba2", "gated_deltanet")

_CLASS = {
    "gla": "GLAForCausalLM",
    "rwkv6": "RWKV6ForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "gated_deltanet": "GatedDeltaNetForCausalLM",
}

# Keys of fla's Mamba-2 that transformers' does not have.
_MARKS = ("norm_eps", "fuse_norm", "fuse_cross_entropy", "dt_limit")

# Its keys, ours, and its defaults: a file need not hold what equals them.
_SHARED: dict[str, tuple[str, Any]] = {
    "hidden_size": ("width", 2048),
    "vocab_size": ("vocabulary_size", 32000),
    "initializer_range": ("initializer_range", 0.02),
    "tie_word_embeddings": ("tied_embeddings", False),
}
_KEYS: dict[str, dict[str, tuple[str, Any]]] = {
    "gla": {
        **_SHARED,
        "num_hidden_layers": ("layers", 24),
        "num_heads": ("heads", 4),
        "num_kv_heads": ("kv_heads", None),
        "expand_k": ("expand_k", 0.5),
        "expand_v": ("expand_v", 1.0),
        "clamp_min": ("log_decay_floor", None),
        "hidden_ratio": ("mlp_ratio", 4),
        "intermediate_size": ("mlp_width", None),
        "norm_eps": ("norm_epsilon", 1e-6),
    },
    "rwkv6": {
        **_SHARED,
        "num_hidden_layers": ("layers", 24),
        "num_heads": ("heads", 4),
        "expand_k": ("expand_k", 0.5),
        "expand_v": ("expand_v", 1.0),
        "proj_low_rank_dim": ("mix_rank", 32),
        "gate_low_rank_dim": ("decay_rank", 64),
        "hidden_ratio": ("ffn_ratio", 3.5),
        "intermediate_size": ("ffn_width", None),
        "norm_first": ("norm_first", True),
        "norm_eps": ("norm_epsilon", 1e-5),
    },
    "mamba2": {
        **_SHARED,
        "num_hidden_layers": ("layers", 48),
        "state_size": ("state_size", 128),
        "head_dim": ("head_size", 64),
        "expand": ("expand", 2),
        "n_groups": ("groups", 1),
        "conv_kernel": ("conv_width", 4),
        "use_bias": ("linear_bias", False),
        "use_conv_bias": ("conv_bias", True),
        "residual_in_fp32": ("residual_in_fp32", True),
        "A_init_range": ("A_init_range", (1.0, 16.0)),
        "dt_min": ("dt_min", 1e-3),
        "dt_max": ("dt_max", 0.1),
        "dt_init_floor": ("dt_init_floor", 1e-4),
        "dt_limit": ("dt_limit", (0.0, float("inf"))),
        "rescale_prenorm_residual": ("rescale_prenorm_residual", True),
        "norm_eps": ("norm_epsilon", 1e-5),
    },
    "gated_deltanet": {
        **_SHARED,
        "num_hidden_layers": ("layers", 21),
        "num_heads": ("heads", 6),
        "num_v_heads": ("value_heads", None),
        "head_dim": ("head_size", 256),
        "expand_v": ("expand_v", 2.0),
        "use_gate": ("output_gate", True),
        "allow_neg_eigval": ("negative_eigenvalues", False),
        "hidden_ratio": ("mlp_ratio", 4),
        "intermediate_size": ("mlp_width", None),
        "norm_eps": ("norm_epsilon", 1e-6),
    },
}
# Whether its default has short convolutions, of `conv_size`; where it has none of these keys, it has no such option.
_SHORT_CONVOLUTIONS = {"gla": False, "gated_deltanet": True}
# Options of which our block has one value.
_REQUIRED: dict[str, dict[str, Any]] = {
    "gla": {
        "hidden_act": "swish",
        "feature_map": None,
        "use_output_gate": True,
        "elementwise_affine": True,
        "attn": None,
        "attnres_block_size": None,
    },
    "rwkv6": {"hidden_act": "sqrelu", "norm_bias": True, "attn": None},
    "mamba2": {"hidden_act": "silu", "rmsnorm": True, "norm_before_gate": False, "D_has_hdim": False},
    "gated_deltanet": {"hidden_act": "swish", "output_gate_activation": "swish", "attn": None, "attnres_block_size": None},
}
# Ratios that mean its default where the file says null.
_RATIOS = {"hidden_ratio"}
# What its model fixes and ours leaves open.
_FIXED: dict[str, dict[str, Any]] = {
    "gla": {"gate_logit_normalizer": 16.0, "decay_rank": 16},
    "rwkv6": {},
    "mamba2": {},
    "gated_deltanet": {},
}
# Their prefixes and ours, by whether it is Mamba-2.
_PREFIXES: dict[bool, list[tuple[str, str]]] = {
    True: [("backbone.embeddings.", "backbone.embedding.")],
    False: [
        ("model.embeddings.", "backbone.embedding."),
        ("model.layers.", "backbone.layers."),
        ("model.norm.", "backbone.norm_f."),
    ],
}
# GLA's norm before the gate, by `fuse_norm`; ours has the first name.
_GATE_NORM = {True: "g_norm_swish_gate", False: "g_norm"}


def detects(path: Path) -> bool:
    """A `model_type` that only fla has, or Mamba-2 with a key that only fla's has."""
    data = peek(path)
    kind = data.get("model_type")
    return kind in architectures and (kind != "mamba2" or any(mark in data for mark in _MARKS))


def read(path: Path) -> Checkpoint:
    """The folder `path`."""
    data = json_object(path / CONFIG)
    config = to_config(data, path / CONFIG)
    stored, storage, source = read_folder(path)
    kind = config.architecture
    if kind == "gla":
        right = _GATE_NORM[data.get("fuse_norm", True)]
        if wrong := [key for key in stored if ".attn.g_norm" in key and f".attn.{right}." not in key]:
            raise FarstateError(f"{source}: has {wrong[0]}; {right} is its name by fuse_norm = {data.get('fuse_norm', True)}")
    tensors = {our_name(key, data): tensor for key, tensor in stored.items()}
    storage["dtypes"] = {our_name(key, data): dtype for key, dtype in storage["dtypes"].items()}
    return Checkpoint(config, tensors, {"format": name, "config": data, "storage": storage}, source)


def write(config: Config, tensors: Mapping[str, Tensor], folder: Path, origin: Origin) -> None:
    """`config.json` and the weights in the file or the shards they came in, by default one safetensors file."""
    data = origin.get("token_ids", {}) | from_config(config, origin.get("config"))
    named = {_theirs(key, data): tensor for key, tensor in tensors.items() if key != HEAD or not config.tied_embeddings}
    dtype = str(tensors[EMBEDDING].dtype).removeprefix("torch.")
    # The key was called torch_dtype once; a file that has it keeps it.
    data["torch_dtype" if "torch_dtype" in data else "dtype"] = dtype
    write_folder(folder, named, origin.get("storage", {}), data)


def to_config(data: Mapping[str, Any], path: Path) -> Config:
    """Our configuration from the contents of a `config.json`. Keys that fla does not know are ignored, as it ignores them.

    Raises:
        FarstateError: another model, an option or a value that ours does not have, sizes that contradict each other.
    """
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise unknown_architecture(path, kind, _KEYS)
    if kind == "mamba2" and data.get("hidden_act") == "swish":  # silu by another name
        data = {**data, "hidden_act": "silu"}
    expect(data, path, _REQUIRED[kind])
    names = {"conv_width": "conv_size"} | {ours: theirs for theirs, (ours, _) in _KEYS[kind].items()}
    given = {key: value for key, value in data.items() if value is not None or key not in _RATIOS}
    values = {ours: given.get(theirs, default) for theirs, (ours, default) in _KEYS[kind].items()}
    values |= {"architecture": kind, "vocabulary_multiple": 1}
    if kind == "mamba2":
        values["dt_limit"] = limit(values["dt_limit"], path)
        config = validated(values, path, names)
        expect(data, path, {"num_heads": config.width * values["expand"] // values["head_size"]})
        return config
    # Its residual stream has the dtype of the weights.
    values["residual_in_fp32"] = False
    if kind == "rwkv6":
        values["group_norm_epsilon"] = values["norm_epsilon"]
    if kind == "gla":
        truth(data, "fuse_norm", True, path)
    if kind in _SHORT_CONVOLUTIONS:
        short = truth(data, "use_short_conv", _SHORT_CONVOLUTIONS[kind], path)
        values["conv_width"] = data.get("conv_size", 4) if short else None
    return validated(values, path, names)


def from_config(config: Config, original: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The contents of a `config.json`; `original`, what it was, where it still says the same.

    Raises:
        FarstateError: the format has no words for `config`.
    """
    if original is not None and _says(original, config):
        return dict(original)
    kind = config.architecture
    values = config.model_dump(mode="json")
    expressible(config, name, _FIXED[kind])
    data: dict[str, Any] = {theirs: values[ours] for theirs, (ours, _) in _KEYS[kind].items()}
    data |= {**_REQUIRED[kind], "model_type": kind, "architectures": [_CLASS[kind]], "vocab_size": config.padded_vocabulary}
    if kind == "mamba2":
        groups = values["groups"]
        expressible(config, name, {"norm_groups": groups if values["norm_groups"] == groups else None})
        low, high = values["dt_limit"]
        data["dt_limit"] = [low, float("inf") if high is None else high]
        data["num_heads"] = config.width * values["expand"] // values["head_size"]
    elif kind == "rwkv6":
        expressible(config, name, {"group_norm_epsilon": config.norm_epsilon})
    if kind in _SHORT_CONVOLUTIONS:
        data |= {"use_short_conv": values["conv_width"] is not None, "conv_size": values["conv_width"] or 4}
    if isinstance(config, GatedDeltaNetConfig):
        data["head_dim"] = config.key_size
    return data


def our_name(key: str, data: Mapping[str, Any]) -> str:
    """Our name of the tensor `key`; `data` is the configuration."""
    kind = data["model_type"]
    if kind == "gla":
        key = key.replace(f".attn.{_GATE_NORM[False]}.", f".attn.{_GATE_NORM[True]}.")
    return _renamed(key, _PREFIXES[kind == "mamba2"])


def _theirs(key: str, data: Mapping[str, Any]) -> str:
    kind = data["model_type"]
    if kind == "gla":
        key = key.replace(f".attn.{_GATE_NORM[True]}.", f".attn.{_GATE_NORM[data.get('fuse_norm', True)]}.")
    return _renamed(key, [(ours, theirs) for theirs, ours in _PREFIXES[kind == "mamba2"]])


def _renamed(key: str, prefixes: list[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _says(original: Mapping[str, Any], config: Config) -> bool:
    try:
        return to_config(original, Path(CONFIG)) == config
    except FarstateError:
        return False
