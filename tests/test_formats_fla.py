"""Checkpoints of flash-linear-attention, made and loaded by the library itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import model_checks
from farstate.errors import FarstateError
from farstate.models.checkpoints import detect_format, export, load_model, load_with_origin, save_model
from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES
from fla_oracle import oracle

VOCABULARY = 20
TOLERANCE = 1e-4

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
# By fla's `model_type`, options away from its defaults and what our configuration must say.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "gla",
        {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "conv_size": 3, "intermediate_size": 24, "fuse_norm": False},
        {"heads": 4, "kv_heads": 2, "conv_width": 3, "mlp_width": 24, "key_size": 2, "value_size": 4},
    ),
    ("gla", {"num_heads": 2, "tie_word_embeddings": True, "hidden_ratio": None}, {"conv_width": None, "inner_mlp_width": 256}),
    (
        "rwkv6",
        {"num_heads": 2, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5, "norm_eps": 1e-3},
        {"mix_rank": 3, "decay_rank": 5, "group_norm_epsilon": 1e-3, "inner_ffn_width": 64, "key_size": 4},
    ),
    (
        "mamba2",
        {"head_dim": 8, "state_size": 6, "dt_limit": [0.001, 0.3], "conv_kernel": 2},
        {"dt_limit": (0.001, 0.3), "groups": 1},
    ),
    (
        "mamba2",
        {"head_dim": 8, "state_size": 6, "chunk_size": 8, "use_bias": True, "hidden_act": "swish"},
        {"dt_limit": (0.0, None), "linear_bias": True},
    ),
    (
        "gated_deltanet",
        {"head_dim": 8, "num_heads": 2, "num_v_heads": 4, "intermediate_size": 24, "allow_neg_eigval": True},
        {"value_heads": 4, "value_size": 16, "negative_eigenvalues": True, "conv_width": 4},
    ),
    ("gated_deltanet", {"head_dim": 4, "num_heads": 2, "use_gate": False, "intermediate_size": 24}, {"output_gate": False}),
]


def logits(folder: Path, ids: Tensor) -> Tensor:
    model = load_model(folder)
    with torch.no_grad():
        hidden, _ = model(ids)
        return hidden @ model.head_weight.t()


@pytest.mark.parametrize(("kind", "options", "expected"), CASES)
def test_read_and_written_back(kind: str, options: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    ids = model_checks.tokens(VOCABULARY, 2, 11)
    folder, written = tmp_path / "theirs", tmp_path / "written"
    reference = oracle().make(folder, kind, ids, None, **SIZES, **options)
    assert detect_format(folder) == "fla"
    model = load_model(folder)
    assert {key: getattr(model.config, key) for key in expected} == expected
    assert model.config.architecture == kind
    error = model_checks.relative(logits(folder, ids), reference["logits"])
    print(f"{kind}: logits differ by {error:.1e}")
    assert error <= TOLERANCE

    # The same weights, files and configuration, and for fla the same model, to the bit.
    export(folder, written)
    before, after = load_file(folder / "model.safetensors"), load_file(written / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert json.loads((folder / "config.json").read_text()) == json.loads((written / "config.json").read_text())
    again = oracle().load(written, ids)
    assert again["problems"] == []
    assert again["class"].startswith("fla.")
    assert torch.equal(again["logits"], reference["logits"])


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        ("gla", {"heads": 2, "conv_width": 4, "mlp_width": 24, "log_decay_floor": -0.05}),
        ("rwkv6", {"heads": 2, "mix_rank": 3, "decay_rank": 5, "group_norm_epsilon": 1e-5}),
        ("mamba2", {"head_size": 8, "state_size": 6, "tied_embeddings": False, "dt_limit": (0.0, 0.5)}),
        ("gated_deltanet", {"heads": 2, "head_size": 8, "mlp_width": 24, "conv_width": None}),
    ],
)
def test_models_trained_here_go_to_fla(architecture: str, shape: dict[str, Any], tmp_path: Path) -> None:
    config = ARCHITECTURES[architecture].config(vocabulary_size=VOCABULARY, width=16, layers=2, **shape)
    ids = model_checks.tokens(VOCABULARY, 2, 11)
    save_model(model_checks.random_model(config).float(), tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "fla", "fla")
    theirs = oracle().load(tmp_path / "fla", ids)
    assert (theirs["model_type"], theirs["problems"]) == (architecture, [])
    ours = logits(tmp_path / "ours", ids)
    assert model_checks.relative(ours, theirs["logits"]) <= TOLERANCE
    assert torch.equal(logits(tmp_path / "fla", ids), ours)


def test_the_norm_before_the_gate_has_the_name_that_fla_gives_it(tmp_path: Path) -> None:
    """By `fuse_norm`; under the other name fla would draw it anew."""
    ids = model_checks.tokens(VOCABULARY, 1, 3)
    for fused, right, wrong in ((True, "g_norm_swish_gate", "g_norm"), (False, "g_norm", "g_norm_swish_gate")):
        folder = tmp_path / right
        oracle().make(folder, "gla", ids, None, **SIZES, num_heads=2, intermediate_size=24, fuse_norm=fused)
        load_model(folder)
        tensors = load_file(folder / "model.safetensors")
        renamed = {name.replace(f".{right}.", f".{wrong}."): tensor for name, tensor in tensors.items()}
        assert renamed.keys() != tensors.keys()
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        assert oracle().load(folder, None)["problems"] != []
        with pytest.raises(FarstateError, match=rf"has model.*\.{wrong}\.weight; {right} is its name by fuse_norm = {fused}"):
            load_model(folder)


def test_half_precision_comes_back_bit_by_bit(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    oracle().make(folder, "gla", model_checks.tokens(VOCABULARY, 1, 3), None, **SIZES, num_heads=2, intermediate_size=24)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    data = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(data))
    _, origin = load_with_origin(folder)
    assert (origin["format"], origin["storage"]["dtype"]) == ("fla", "bfloat16")
    export(folder, tmp_path / "written")
    after = load_file(tmp_path / "written/model.safetensors")
    assert all(after[name].dtype == tensor.dtype and torch.equal(after[name], tensor) for name, tensor in tensors.items())
    assert oracle().load(tmp_path / "written", None)["problems"] == []


def test_the_two_mamba2_are_told_apart(tmp_path: Path) -> None:
    # In this process fla is not imported, so that this is transformers' own.
    from transformers import Mamba2Config

    Mamba2Config(hidden_size=16, num_heads=4, head_dim=8, state_size=6, num_hidden_layers=1).save_pretrained(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    assert data["model_type"] == "mamba2"
    assert detect_format(tmp_path) == "transformers"
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "norm_eps": 1e-05, "hidden_size": 16}')
    assert detect_format(tmp_path) == "fla"


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("gla", "feature_map", "relu", "only feature_map = None is supported .found 'relu'"),
        ("gla", "use_output_gate", False, "only use_output_gate = True"),
        ("gla", "hidden_act", "powlu", "only hidden_act = 'swish'"),
        ("gla", "attn", {"layers": [1]}, "only attn = None"),
        ("gla", "num_heads", 3, "hidden_size × expand_k = 8 must be a multiple of num_heads = 3"),
        ("gla", "hidden_size", "wide", "hidden_size: .* integer .found 'wide'"),
        ("gla", "fuse_norm", "false", "fuse_norm: true or false is expected .found 'false'"),
        ("gla", "use_short_conv", "false", "use_short_conv: true or false is expected .found 'false'"),
        ("gla", "clamp_min", float("-inf"), "clamp_min: .* finite"),
        ("gla", "expand_k", 1e308, "sizes beyond what can be computed with"),
        ("gla", "tie_word_embeddings", "false", "tie_word_embeddings: .* boolean"),
        ("gla", "quantization_config", {"bits": 4}, "quantised weights are not read"),
        ("rwkv6", "norm_bias", False, "only norm_bias = True"),
        ("rwkv6", "hidden_act", "relu", "only hidden_act = 'sqrelu'"),
        ("mamba2", "D_has_hdim", True, "only D_has_hdim = False"),
        ("mamba2", "norm_before_gate", True, "only norm_before_gate = False"),
        ("mamba2", "conv_kernel", 1, "conv_kernel: "),
        ("gated_deltanet", "conv_size", 1, "conv_size: "),
        ("mamba2", "num_heads", 3, "only num_heads = 4 is supported"),
        ("mamba2", "dt_limit", [0.1], "two numbers"),
        ("gated_deltanet", "attnres_block_size", 2, "only attnres_block_size = None"),
        ("gated_deltanet", "output_gate_activation", "sigmoid", "only output_gate_activation = 'swish'"),
    ],
)
def test_options_we_do_not_have_are_refused(kind: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    sizes = {"head_dim": 8} if kind in ("mamba2", "gated_deltanet") else {}
    data = {"model_type": kind, "norm_eps": 1e-5, **SIZES, **sizes, key: value}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(FarstateError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "shape", "message"),
    [
        ("gla", {"gate_logit_normalizer": 4.0}, "cannot express gate_logit_normalizer = 4.0, only 16.0"),
        ("gla", {"decay_rank": 8}, "decay_rank = 8"),
        ("rwkv6", {}, "group_norm_epsilon = 0.00064, only 1e-05"),
        ("mamba2", {"head_size": 8, "norm_groups": 2}, "norm_groups = 2"),
    ],
)
def test_what_fla_cannot_say_is_refused(architecture: str, shape: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[architecture].config(vocabulary_size=VOCABULARY, width=16, layers=1, **shape)
    save_model(LanguageModel(config), tmp_path / "ours")
    with pytest.raises(FarstateError, match=message):
        export(tmp_path / "ours", tmp_path / "fla", "fla")
    assert not (tmp_path / "fla").exists()


def test_bad_files_are_explained_in_a_line(tmp_path: Path) -> None:
    good, folder = tmp_path / "good", tmp_path / "bad"
    oracle().make(good, "rwkv6", model_checks.tokens(VOCABULARY, 1, 3), None, **SIZES, num_heads=2)
    folder.mkdir()
    data, tensors = json.loads((good / "config.json").read_text()), load_file(good / "model.safetensors")
    whole = (good / "model.safetensors").read_bytes()

    def refused(match: str, changes: dict[str, Any] | None = None) -> None:
        (folder / "config.json").write_text(json.dumps(data | (changes or {})))
        with pytest.raises(FarstateError, match=match) as caught:
            load_model(folder)
        assert "\n" not in str(caught.value)

    refused("no model.safetensors and no pytorch_model.bin")
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(r"model\.safetensors: damaged or truncated")
    (folder / "model.safetensors").write_bytes(whole)
    refused("unknown architecture 'rwkv8'", {"model_type": "rwkv8"})
    refused("missing backbone.layers.2", {"num_hidden_layers": 3})
    refused("unexpected backbone.layers.1", {"num_hidden_layers": 1})
    refused("unexpected backbone.layers.0.pre_norm", {"norm_first": False})
    save_file(tensors | {"model.layers.0.attn.bonus": torch.zeros(2, 3)}, folder / "model.safetensors")
    refused(r"wrong shape: backbone.layers.0.attn.bonus is \(2, 3\), expected \(2, 4\)")
    save_file({name: tensor for name, tensor in tensors.items() if "mu" not in name}, folder / "model.safetensors")
    refused(r"missing backbone.layers.0.attn.x_proj.0.mu")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(load_model(folder).head_weight, load_model(good).head_weight)
    torch.save({"model": Path("code")}, folder / "pytorch_model.bin")
    refused("holds more than tensors")
