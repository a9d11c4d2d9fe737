"""Statistics of the states against states that were materialised after every token; their comparison against what was put in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
import yaml
from torch import Tensor

from conftest import REPOSITORY
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation import states as module
from farstate.evaluation.perplexity import EvaluationSettings
from farstate.evaluation.stages import states_stage
from farstate.evaluation.states import (
    POSITIONS_SCHEMA,
    SAMPLES_SCHEMA,
    STATES_SCHEMA,
    Column,
    Measurement,
    RowSums,
    effective_rank,
    states,
    write_positions,
)
from farstate.evaluation.texts import select
from farstate.files import read_manifest
from farstate.models.checkpoints import save_model
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.params import States
from farstate.state import State
from golden import check, ramp
from model_checks import random_model
from test_evaluation import VOCABULARY, make_store

LENGTH = 37
CONTEXT = 8
LABELS = {"model": "m", "arm": "base", "seed": 0}


def model_of(architecture: str) -> LanguageModel:
    """The tiny model of the tests' configurations, in float64 and away from its initialisation."""
    files = [yaml.safe_load((REPOSITORY / "config" / name).read_text()) for name in ("test.yaml", "test_architectures.yaml")]
    models = [model for file in files for model in file["models"].values()]
    shape = next(model["shape"] for model in models if model["architecture"] == architecture)
    return random_model(config_from_json({**shape, "architecture": architecture, "vocabulary_size": VOCABULARY})).eval()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("states"), [LENGTH + 1, LENGTH + 9, LENGTH + 1])


def measured(model: LanguageModel, store: TokenStore, *, rows: int = 2, segment: int = 7, length: int = LENGTH):
    """The measurement, its bins (texts, bins, columns, 3), its samples (texts, samples, columns, 5) and positions."""
    parameters = States(length=length)
    settings = EvaluationSettings(rows=rows, segment_tokens=segment)
    found = Measurement(model, store, select(store, parameters), parameters, CONTEXT, settings)
    batches = list(found.batches())
    binned = np.concatenate([batch.binned for batch in batches])
    sampled = np.concatenate([batch.sampled for batch in batches])
    positions = found.positions.read(1, length).reshape(length, -1, 3)
    return found, binned, sampled, positions


def tokens_of(store: TokenStore, length: int = LENGTH) -> Tensor:
    return torch.from_numpy(np.stack([text.read(store, 0, length) for text in select(store, States(length=length))]))


def entries(state: State, column: Column) -> Tensor:
    """What a column is of, (rows, entries)."""
    layers = state.layers if column.layer is None else [state.layers[column.layer]]
    if column.part != "recurrent":
        return torch.cat([layer.auxiliary[column.part].flatten(1) for layer in layers if column.part in layer.auxiliary], dim=1)
    tensors = [layer.recurrent if column.head is None else layer.recurrent[:, column.head, None] for layer in layers]
    return torch.cat([tensor.flatten(1) for tensor in tensors if tensor.numel()], dim=1)


def described(tensor: Tensor) -> np.ndarray:
    """(rows, entries) → (rows, 3): mean, std, norm by their definitions."""
    return torch.stack([tensor.mean(1), tensor.std(1, correction=0), tensor.square().sum(1).sqrt()], dim=1).numpy()


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 1e-9) -> None:
    """Relative to the largest value of each statistic of a column: float64 leaves a mean near zero few digits of its own."""
    scale = np.abs(expected).max(axis=tuple(range(expected.ndim - 2)), keepdims=True)
    assert np.isfinite(actual).all()
    assert (np.abs(actual - expected) <= tolerance * np.maximum(scale, 1e-12)).all()


# The measure


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_every_position_is_that_of_the_materialised_state(architecture: str, store: TokenStore) -> None:
    model = model_of(architecture)
    found, binned, sampled, positions = measured(model, store)
    columns = found.layout.columns
    parts = {"mamba1": {"conv"}, "mamba2": {"conv"}, "rwkv6": {"attention_shift", "ffn_shift"}}
    assert {column.part for column in columns} >= parts.get(architecture, set()) | {"recurrent"}
    tokens, state, every = tokens_of(store), None, []
    for t in range(LENGTH):
        _, state = model(tokens[:, t : t + 1], state)
        every.append(np.stack([described(entries(state, column)) for column in columns], axis=1))
        if t + 1 in found.samples:
            sample = sampled[:, list(found.samples).index(t + 1)]
            close(sample[..., :3], every[-1])
            largest = [entries(state, column).abs().amax(1) for column in columns]
            close(sample[..., 3:4], torch.stack(largest, dim=1).unsqueeze(-1).numpy())
    expected = np.stack(every, axis=1)[:, :, : found.layout.streamed]
    assert positions.shape == expected.shape[1:]
    close(positions, expected.mean(axis=0))
    close(binned, np.add.reduceat(expected, found.bins.low - 1, axis=1) / found.bins.tokens[:, None, None])
    assert [int(found.samples[0]), int(found.samples[-1]), CONTEXT in found.samples] == [1, LENGTH, True]


@pytest.mark.parametrize("architecture", ["mamba2", "rwkv6", "hybrid"])
def test_segments_and_rows_change_nothing(architecture: str, store: TokenStore) -> None:
    model = model_of(architecture)
    _, *reference = measured(model, store, rows=3, segment=64)
    for rows, segment in ((1, 1), (2, 5)):
        _, *other = measured(model, store, rows=rows, segment=segment)
        for mine, expected in zip(other, reference, strict=True):
            assert np.array_equal(np.isnan(mine), np.isnan(expected))
            close(np.nan_to_num(mine), np.nan_to_num(expected))


def test_all_heads_together_are_pooled_and_not_averaged(store: TokenStore) -> None:
    model = model_of("mamba2")
    with torch.no_grad():
        # Heads of very different size.
        model.backbone.layers[0].mixer.dt_bias.copy_(torch.linspace(-6.0, 2.0, len(model.backbone.layers[0].mixer.dt_bias)))
    found, binned, _, _ = measured(model, store)
    heads, layer = found.layout.heads[0], found.layout.at(0)
    of_heads = binned[:, -1, heads, 1]
    assert of_heads.max() > 2 * of_heads.min()
    assert (np.abs(binned[:, -1, layer, 1] - of_heads.mean(axis=1)) > 0.1 * binned[:, -1, layer, 1]).all()
    last = found.positions.read(LENGTH, 1).reshape(-1, 3)
    assert last[found.layout.at(None), 2] >= last[layer, 2]


def test_effective_rank_is_that_of_its_definition() -> None:
    matrices = torch.randn(3, 2, 5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for cast in (matrices, matrices.mT, matrices * 1e30, matrices * 1e-30):
        singular = torch.linalg.svdvals(cast)
        share = singular / singular.sum(-1, keepdim=True)
        torch.testing.assert_close(effective_rank(cast), (-(share * share.log()).sum(-1)).exp(), rtol=1e-9, atol=0.0)
    vector = torch.randn(7, generator=torch.Generator().manual_seed(1))
    assert effective_rank(torch.outer(vector, vector[:4])).item() == pytest.approx(1.0, abs=1e-5)
    assert effective_rank(torch.eye(6)).item() == pytest.approx(6.0)
    broken = torch.stack([torch.zeros(3, 3), torch.full((3, 3), torch.nan), torch.full((3, 3), torch.inf)])
    assert effective_rank(broken).isnan().all()


@pytest.mark.parametrize("architecture", ["mamba1", "mamba2", "gla"])
@torch.no_grad()
def test_ranks_of_heads_or_where_a_head_is_a_channel_of_layers(architecture: str, store: TokenStore) -> None:
    model = model_of(architecture)
    found, _, sampled, _ = measured(model, store)
    _, state = model(tokens_of(store))
    for layer, heads in found.layout.heads.items():
        recurrent = state.layers[layer].recurrent
        ranks = effective_rank(recurrent).numpy()
        of_heads, of_layer = sampled[:, -1, heads, 4], sampled[:, -1, found.layout.at(layer), 4]
        if architecture == "mamba1":
            np.testing.assert_allclose(of_layer, ranks)
            assert np.isnan(of_heads).all()
        else:
            np.testing.assert_allclose(of_heads, ranks)
            assert np.isnan(of_layer).all()


class _Marked(torch.nn.Module):
    """A block before which the residual of a marked token becomes infinite."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, residual: Tensor, state=None):
        return self.block(torch.where(residual[..., :1] > 500.0, torch.inf, residual), state)


def mark(model: LanguageModel, store: TokenStore) -> tuple[list[int], int]:
    """Mark a token: the position at which each text has read it (LENGTH + 1: never), the first of them."""
    tokens = tokens_of(store).numpy()
    marked = int(tokens[1, 20])
    with torch.no_grad():
        model.backbone.embedding.weight[marked, 0] = 1e3
    mine = [int(np.flatnonzero(line == marked)[0]) + 1 if marked in line else LENGTH + 1 for line in tokens]
    return mine, min(mine)


@pytest.mark.parametrize("architecture", ["mamba2", "gla", "mamba1"])
def test_a_state_that_is_not_finite_is_reported_where_it_breaks(architecture: str, store: TokenStore) -> None:
    model = model_of(architecture)
    mine, first = mark(model, store)
    _, clean, _, clean_positions = measured(model, store, rows=3)
    model.backbone.layers[1] = _Marked(model.backbone.layers[1])
    found, binned, sampled, positions = measured(model, store, rows=3, segment=64)
    text = found.texts[mine.index(first)]
    assert found.broken_at() == {
        "position": first,
        "layer": 1,
        "document": text.document,
        "stretch": 0,
        "stretches": sum(position <= LENGTH for position in mine),
    }
    # The layer below keeps its numbers, and so does everything before the break.
    below = [number for number, column in enumerate(found.layout.columns[: found.layout.streamed]) if column.layer == 0]
    close(binned[:, :, below], clean[:, :, below])
    close(positions[: first - 1], clean_positions[: first - 1])
    whole = found.layout.at(None)
    assert np.isnan(positions[first - 1 :, whole]).all()
    for number, position in enumerate(mine):
        assert np.array_equal(np.isnan(binned[number, :, whole, 1]), found.bins.high >= position)
        assert np.array_equal(np.isnan(sampled[number, :, whole, 1]), found.samples >= position)


def test_a_cache_that_is_not_finite_is_found_at_the_next_sample(store: TokenStore) -> None:
    model = model_of("hybrid")
    _, first = mark(model, store)
    model.backbone.layers[1] = _Marked(model.backbone.layers[1])
    found, binned, *_ = measured(model, store)
    at = found.broken_at()
    assert at is not None
    assert (at["position"], at["layer"]) == (int(found.samples[found.samples >= first][0]), 1)
    assert np.isfinite(binned[:, :, found.layout.at(None)]).all()


# Tables


def saved(folder: Path) -> Path:
    config = Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=VOCABULARY, dt_min=0.01, dt_max=0.2)
    save_model(LanguageModel(config), folder)
    return folder


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> Path:
    root = tmp_path_factory.mktemp("states-result")
    calls: list[tuple[int, int]] = []
    states(
        checkpoint=saved(root / "model"),
        store_directory=store._directory,
        states=States(length=LENGTH),
        context=CONTEXT,
        labels=LABELS,
        output=root / "result",
        settings=EvaluationSettings(rows=2, segment_tokens=16),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (3 * LENGTH, 3 * LENGTH)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    return root / "result"


def test_tables_agree_with_each_other(result: Path, store: TokenStore) -> None:
    manifest = read_manifest(result, verify=True)
    binned, samples, positions = (pl.read_parquet(result / f"{name}.parquet") for name in ("states", "samples", "positions"))
    for table, schema in ((binned, STATES_SCHEMA), (samples, SAMPLES_SCHEMA), (positions, POSITIONS_SCHEMA)):
        assert table.columns == schema.names
        assert table.select("layer", "head").dtypes == [pl.Int32, pl.Int32]
    assert (manifest["heads"], manifest["layers"], manifest["architecture"]) == ({"0": 4, "1": 4}, 2, "mamba2")
    assert (manifest["broken_at"], manifest["documents"], manifest["stretches"]) == (None, 3, 3)
    assert manifest["parts"] == ["recurrent", "conv"]
    # 8 heads, 2 layers and the model; a convolution a layer, and both.
    assert positions.height == LENGTH * (11 + 3)
    assert binned.height == 3 * manifest["bins"] * (11 + 3)
    assert samples.height == 3 * len(manifest["samples"]) * (11 + 3)
    which = ["layer", "head", "part"]
    # A bin of one position is that position, and a mean over bins weighted by tokens that over positions.
    weighted = binned.group_by(which).agg(((pl.col("std") * pl.col("tokens")).sum() / pl.col("tokens").sum()).alias("std"))
    plain = positions.group_by(which).agg(pl.col("std").mean())
    both = weighted.join(plain, on=which, nulls_equal=True)
    assert both.height == 14
    np.testing.assert_allclose(both["std"], both["std_right"], rtol=1e-5)
    last = samples.filter(pl.col("position") == LENGTH).group_by(which).agg(pl.col("norm").mean())
    both = last.join(positions.filter(pl.col("position") == LENGTH), on=which, nulls_equal=True)
    np.testing.assert_allclose(both["norm"], both["norm_right"], rtol=1e-5)
    ranks = samples.filter(pl.col("part") == "recurrent")
    assert ranks.filter(pl.col("head").is_null())["effective_rank"].null_count() == 3 * 3 * len(manifest["samples"])
    assert ranks.filter(pl.col("head").is_not_null())["effective_rank"].is_between(1.0 - 1e-6, 8.0).all()


def test_very_many_heads_are_in_the_table_of_positions_as_layers(store: TokenStore, tmp_path: Path, monkeypatch) -> None:
    model = model_of("mamba2")
    _, _, _, whole = measured(model, store)
    monkeypatch.setattr(module, "_HEAD_POSITIONS", 10)
    monkeypatch.setattr(module, "_SEGMENT_VALUES", 40)
    monkeypatch.setattr(module, "_ROWS", 20)
    found, binned, _, positions = measured(model, store)
    assert not found.every_head
    close(positions, whole[:, found.kept])
    assert binned.shape[2] == found.layout.streamed
    write_positions(tmp_path / "positions.parquet", found, 3)
    table = pl.read_parquet(tmp_path / "positions.parquet")
    assert table["head"].is_null().all()
    for number, index in enumerate(found.kept):
        layer, _, part = found.layout.columns[index]
        rows = table.filter(pl.col("layer").eq_missing(layer), pl.col("part") == part).sort("position")
        assert rows["position"].to_list() == list(range(1, LENGTH + 1))
        np.testing.assert_allclose(rows["norm"], positions[:, number, 2], rtol=1e-6)


def test_sums_by_row() -> None:
    sums = RowSums(9, 2)
    sums.add(3, np.array([[1.0, 2.0], [3.0, 4.0]]))
    sums.add(4, np.array([[1.0, 1.0]]))
    assert sums.read(1, 9).sum(axis=1).tolist() == [0, 0, 3, 9, 0, 0, 0, 0, 0]
    for first, count in ((0, 1), (9, 2)):
        with pytest.raises(IndexError, match="of 9"):
            sums.read(first, count)


def test_bad_input(tmp_path: Path, store: TokenStore) -> None:
    model = saved(tmp_path / "model")
    arguments = {
        "checkpoint": model,
        "store_directory": store._directory,
        "context": CONTEXT,
        "labels": LABELS,
        "output": tmp_path / "out",
        "settings": EvaluationSettings(),
    }
    with pytest.raises(FarstateError, match=r"10001|10,001"):
        states(states=States(length=10000), **arguments)
    config = Mamba2Config(width=16, layers=1, state_size=8, head_size=8, vocabulary_size=5)
    save_model(LanguageModel(config), tmp_path / "small")
    with pytest.raises(FarstateError, match="knows 5 symbols"):
        states(states=States(length=LENGTH), **{**arguments, "checkpoint": tmp_path / "small"})
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_the_stage_reads_its_record(tmp_path: Path, store: TokenStore, result: Path) -> None:
    checkpoint = saved(tmp_path / "model")
    stage = SimpleNamespace(
        output=tmp_path / "out",
        params={"states": States(length=LENGTH).model_dump(mode="json"), "context": CONTEXT, "labels": LABELS},
        one=lambda role: {"checkpoint": checkpoint, "store": store._directory}[role],
        settings=SimpleNamespace(device="cpu", evaluation_rows=2, evaluation_segment=16),
        threads=1,
    )
    states_stage(stage)
    for name in ("states", "samples", "positions"):
        assert pl.read_parquet(tmp_path / "out" / f"{name}.parquet").equals(pl.read_parquet(result / f"{name}.parquet"))


def test_golden(store: TokenStore) -> None:
    config = Mamba2Config(width=12, layers=2, state_size=4, head_size=8, vocabulary_size=VOCABULARY, dt_min=0.01, dt_max=0.2)
    model = LanguageModel(config, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(ramp(*parameter.shape, phase=float(number), scale=0.4))
    _, binned, sampled, positions = measured(model.eval(), store, length=20)
    values = {
        "binned": torch.from_numpy(binned[:2]),
        "sampled": torch.from_numpy(np.nan_to_num(sampled[:2])),
        "positions": torch.from_numpy(positions[::5]),
    }
    check("states", values)
