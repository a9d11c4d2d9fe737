"""A snapshot, one file of weights, is a checkpoint by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from farstate.errors import FarstateError
from farstate.grid import snapshot_file
from farstate.models.checkpoints import detect_format, load_model, save_model, write_weights
from farstate.models.language_model import LanguageModel
from farstate.models.registry import config_from_json

SIZES = {"architecture": "mamba2", "vocabulary_size": 20, "width": 8, "layers": 1, "state_size": 4, "head_size": 4}


def model() -> LanguageModel:
    return LanguageModel(config_from_json(SIZES), torch.Generator().manual_seed(0))


def test_a_snapshot_is_read_from_its_own_header(tmp_path: Path) -> None:
    ours, tokens = model(), torch.arange(6)[None]
    path = tmp_path / snapshot_file(65_536)
    write_weights(ours, path, tokens="65536")
    assert detect_format(path) == "farstate"
    read = load_model(path)
    assert read.config == ours.config
    torch.testing.assert_close(read(tokens)[0], ours(tokens)[0], rtol=0, atol=0)


def test_a_snapshot_beside_the_final_weights_is_itself(tmp_path: Path) -> None:
    final, early = model(), model()
    with torch.no_grad():
        early.backbone.embedding.weight.mul_(2.0)
    save_model(final, tmp_path)
    write_weights(early, tmp_path / snapshot_file(65_536))
    read = load_model(tmp_path / snapshot_file(65_536))
    torch.testing.assert_close(read.backbone.embedding.weight, early.backbone.embedding.weight)


def test_weights_without_a_configuration_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(FarstateError, match=r"a\.safetensors: not a checkpoint of"):
        load_model(tmp_path / "a.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "b.safetensors", {"config": "{}"})
    with pytest.raises(FarstateError, match=r"b\.safetensors: its header holds no configuration of a model"):
        load_model(tmp_path / "b.safetensors")
