"""Statistics of the states against states that were materialised after every token; their comparison against what was put in."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from torch import Tensor

from conftest import REPOSITORY
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation import compare_states as comparison_module
from farstate.evaluation import states as module
from farstate.evaluation.bins import log_bins
from farstate.evaluation.compare import Texts
from farstate.evaluation.compare_states import CURVE_SCHEMA, HEAD_SCHEMA, Measured, Run, _Model, compare_states
from farstate.evaluation.perplexity import EvaluationSettings
from farstate.evaluation.stages import compare_states_stage, states_stage
from farstate.evaluation.states import (
    POSITIONS_SCHEMA,
    SAMPLED,
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
from farstate.evaluation.uncertainty import resample
from farstate.files import read_manifest, write_manifest
from farstate.models.checkpoints import save_model
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.params import Compare, States
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


# Comparison


HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]
COLUMNS = (
    *(Column(0, head, "recurrent") for head in (0, 1)),
    Column(0, None, "recurrent"),
    *(Column(1, head, "recurrent") for head in (0, 1)),
    Column(1, None, "recurrent"),
    Column(None, None, "recurrent"),
    Column(0, None, "conv"),
    Column(None, None, "conv"),
)
CACHES = (Column(2, None, "keys"),)


def write_measurement(
    directory: Path,
    arm: str = "base",
    seed: int | None = 0,
    *,
    model: str = "m",
    drift: dict[tuple[int | None, int | None], float] | None = None,
    noise: float = 0.1,
    size: float = 1.0,
    documents: int = 24,
    stretches: int = 1,
    length: int = 1024,
    context: int = 16,
    broken: int | None = None,
    texts: str = "document",
) -> Path:
    """INVENTED result of the stage `states`: standard deviations that are `size` up to T_train and move by `drift` (log2) beyond it.

    Every text moves them by a factor of its own, the same for all arms.
    """
    bins, samples = log_bins(length, context, 2), log_bins(length, context, 1).high
    units = [(f"{texts} {number // stretches:03d}", number % stretches) for number in range(documents * stretches)]
    draw = np.random.default_rng(3).normal(size=(len(units), len(COLUMNS)))
    own = {0: 1.0, 1: 0.5}
    rows: dict[str, list] = {"states": [], "samples": []}
    drift = drift or {}
    for number, (document, stretch) in enumerate(units):
        labels = {"model": model, "arm": arm, "seed": seed, "train_length": context}
        whose = {**labels, "document": document, "stretch": stretch}
        for index, column in enumerate((*COLUMNS, *CACHES)):
            which = column._asdict()
            move = drift.get((column.layer, column.head), 0.0) if column.part == "recurrent" else 0.0

            def std(t: np.ndarray, move: float = move, index: int = index, number: int = number, column: Column = column):
                beyond = np.clip(np.log2(t / context) / 5, 0.0, 1.0)
                spread = draw[number, index] if index < len(COLUMNS) else 0.0
                value = size * own.get(column.head, 1.0) * 2 ** (beyond * (move + noise * spread))
                return np.where(t >= (broken or math.inf), np.nan, value)

            if index < len(COLUMNS):
                of_bins = std(bins.low.astype(float))
                rows["states"] += [
                    {**whose, **which, "position_low": int(low), "position_high": int(high), "tokens": int(high - low + 1)}
                    | {"mean": 0.1 * value, "std": value, "norm": 8 * value}
                    for low, high, value in zip(bins.low, bins.high, of_bins, strict=True)
                ]
            rank = 3.0 if column.head is not None or column.part != "recurrent" else None
            rows["samples"] += [
                {**whose, **which, "position": int(t), "mean": 0.1 * value, "std": value, "norm": 8 * value}
                | {"largest": 4 * value, "effective_rank": rank}
                for t, value in zip(samples, std(samples.astype(float)), strict=True)
            ]
    directory.mkdir(parents=True)
    for name, schema in (("states", STATES_SCHEMA), ("samples", SAMPLES_SCHEMA)):
        pq.write_table(pa.Table.from_pylist(rows[name], schema=schema), directory / f"{name}.parquet")
    contents = {
        "labels": {"model": model, "arm": arm, "seed": seed},
        **{"context": context, "architecture": "mamba2", "layers": 3, "heads": {"0": 2, "1": 2}},
        **{"parameters": 1000, "parameters_without_embeddings": 500},
        "broken_at": None
        if broken is None
        else {"position": broken, "layer": 0, "document": units[0][0], "stretch": 0, "stretches": 3},
    }
    write_manifest(directory, contents, ["states.parquet", "samples.parquet"])
    return directory


DRIFT = {(0, 0): 2.0, (0, 1): 0.0, (1, 0): -1.0, (1, 1): 0.5, (None, None): 1.0}
"""Of the base; further training halves it."""


def compared(root: Path, *directories: Path, arms=("base", "control"), **changes) -> tuple[dict, pl.DataFrame, pl.DataFrame]:
    compare_states(
        evaluations=directories,
        compare=Compare(resamples=400, **changes),
        figure={"models": ["m"], "arms": list(arms)},
        output=root / "out",
    )
    manifest = read_manifest(root / "out", verify=True)
    return manifest, pl.read_parquet(root / "out" / "states.parquet"), pl.read_parquet(root / "out" / "heads.parquet")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, pl.DataFrame, pl.DataFrame]:
    root = tmp_path_factory.mktemp("compare-states")
    half = {key: value / 2 for key, value in DRIFT.items()}
    more = {key: value / 2 + 0.2 for key, value in DRIFT.items()}
    return compared(
        root,
        write_measurement(root / "base", drift=DRIFT),
        write_measurement(root / "control.s0", "control", 0, drift=half, size=1.2),
        write_measurement(root / "control.s1", "control", 1, drift=more, size=1.4),
    )


def test_heads_by_drift(comparison) -> None:
    manifest, _, heads = comparison
    assert heads.schema == HEAD_SCHEMA
    base = heads.filter(pl.col("arm") == "base", pl.col("seed").is_null()).sort("rank")
    assert [(row["layer"], row["head"]) for row in base.iter_rows(named=True)] == [(0, 0), (1, 0), (1, 1), (0, 1)]
    for row in base.iter_rows(named=True):
        put_in = DRIFT[row["layer"], row["head"]]
        assert row["low"] < row["drift"] < row["high"]
        assert row["low"] < put_in < row["high"]
        assert abs(row["drift"] - put_in) < 0.1
        assert row["beyond"] == (put_in != 0.0)
        assert row["std_near"] == pytest.approx([1.0, 0.5][row["head"]], rel=1e-6)
    assert base["against_base"].null_count() == 4
    # Texts move both arms alike: the paired interval is far narrower than those of the drifts.
    control = heads.filter(pl.col("arm") == "control", pl.col("seed") == 0).sort("layer", "head")
    for row in control.iter_rows(named=True):
        expected = -DRIFT[row["layer"], row["head"]] / 2
        assert row["against_base"] == pytest.approx(expected, abs=0.02)
        assert row["against_base_high"] - row["against_base_low"] < 0.2 * (row["high"] - row["low"])
    assert "simultaneous over all heads" in manifest["interval_of_heads"]
    assert "24 documents" in manifest["interval"]


def test_curves_hold_means_over_texts_and_seeds(comparison) -> None:
    manifest, curves, _ = comparison
    assert curves.schema == CURVE_SCHEMA
    assert (manifest["n_documents"], manifest["n_stretches"], manifest["models"]["m"]["heads"]) == (24, 24, {"0": 2, "1": 2})
    head = curves.filter(pl.col("layer") == 0, pl.col("head") == 1, pl.col("statistic") == "std", pl.col("against") == "")
    near = head.filter(pl.col("position_high") == 16).sort("arm", "seed", nulls_last=False)
    assert near["arm"].to_list() == ["base", "base", "control", "control", "control"]
    assert near["seed"].to_list() == [None, 0, None, 0, 1]
    np.testing.assert_allclose(near["value"], [0.5, 0.5, 0.65, 0.6, 0.7], rtol=1e-6)
    assert near["n_tokens"].to_list() == [24 * (16 - near["position_low"][0] + 1)] * 5
    against = curves.filter(pl.col("against") == "base", pl.col("statistic") == "norm", pl.col("layer").is_null())
    assert set(against["arm"]) == {"control"}
    one = against.filter(pl.col("seed") == 0, pl.col("position_high") == 16, pl.col("part") == "recurrent")
    np.testing.assert_allclose(one.select("value", "low", "high").row(0), [8 * 0.2] * 3, rtol=1e-5)
    statistics = {part: set(curves.filter(pl.col("part") == part)["statistic"]) for part in ("recurrent", "conv", "keys")}
    assert statistics["recurrent"] == statistics["conv"] == statistics["keys"] == set(SAMPLED)
    keys = curves.filter(pl.col("part") == "keys", pl.col("statistic") == "std")
    assert (keys["position"] == keys["position_low"]).all()
    ranks = curves.filter(pl.col("part") == "recurrent", pl.col("statistic") == "effective_rank")
    assert ranks["head"].null_count() == 0
    assert ranks.height == 4 * 11 * (5 + 3)  # heads, samples, and arms with seeds, alone and against the base


def test_a_summary_of_each_arm(comparison) -> None:
    manifest, _, _ = comparison
    by_arm = {(record["arm"], record["seed"]): record for record in manifest["summary"]}
    base, control = by_arm["base", None], by_arm["control", None]
    assert (base["n_heads"], base["n_known"], base["n_up"], base["n_down"], base["n_seeds"]) == (4, 4, 2, 1, 1)
    assert control["n_seeds"] == 2
    assert (base["near_to"], base["far_from"], base["far_to"]) == (16, 513, 1024)
    assert base["drift_low"] < base["drift"] < base["drift_high"]
    assert abs(base["drift"] - 1.0) < 0.1
    assert 16 < base["begins"] <= 33
    assert "n_above_base" not in base
    assert control["n_above_base_within"] == control["n_bins_within"] > 0
    assert control["n_above_base"] < control["n_bins"]
    assert control["n_below_base"] > 0


def test_simultaneous_intervals_hold_where_no_head_drifts() -> None:
    """Thirty heads, none of which drifts: simulated over and over, few sets have a head beyond; pointwise, most have."""
    bins, documents = log_bins(256, 16, 1), [f"d{number}" for number in range(25)]
    columns = (*(Column(0, head, "recurrent") for head in range(30)), Column(None, None, "recurrent"))
    measured = Measured(Texts(16, bins, tuple(documents), (0,) * 25), columns, columns, bins.high)
    generator = np.random.default_rng(11)
    sets, beyond, pointwise = 120, 0, 0
    for _ in range(sets):
        noise = generator.normal(scale=0.2, size=(25, 1, 31, 1)) * (bins.low > 16)[None, :, None, None]
        binned = np.broadcast_to(np.exp2(noise), (25, len(bins), 31, 3)).copy()
        run = Run("m", "base", None, binned, np.ones((25, len(bins), 31, 5)), None, {})
        resamples = resample(documents, resamples=300, confidence=0.9, generator=generator)
        model = _Model("m", measured, {"base": [run]}, resamples)
        record = next(model.summary())
        beyond += record["n_up"] + record["n_down"] > 0
        drift, drawn = model._drifts["base", None]
        # About log2 of the mean of a log-normal: what a head without drift has here.
        centre = 0.2**2 * math.log(2) / 2
        low, high = resamples.interval(drift, drawn)
        pointwise += bool(((low > centre) | (high < centre)).any())
        wide_low, wide_high = model._band(drift, drawn)
        assert (wide_high - wide_low >= high - low).all()
    print(f"a head beyond: simultaneous {beyond / sets:.2f}, pointwise {pointwise / sets:.2f}, nominal 0.10")
    assert beyond / sets <= 0.2
    assert pointwise / sets >= 0.6


def test_of_very_many_heads_those_that_drift_most_have_curves(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(comparison_module, "_MANY_HEADS", 3)
    monkeypatch.setattr(comparison_module, "_SHOWN_HEADS", 1)
    monkeypatch.setattr(comparison_module, "_DRAWN", 8000)  # one or two columns at a time
    control = {**DRIFT, (0, 0): 0.0, (1, 1): 3.0}
    _, curves, heads = compared(
        tmp_path,
        write_measurement(tmp_path / "base", drift=DRIFT),
        write_measurement(tmp_path / "control", "control", drift=control),
    )
    shown = curves.filter(pl.col("head").is_not_null()).select("layer", "head").unique().sort("layer", "head").rows()
    assert shown == [(0, 0), (1, 1)]
    assert heads.height == 4 * 4


def test_a_state_that_breaks_has_no_drift_and_says_where(tmp_path: Path) -> None:
    manifest, curves, heads = compared(tmp_path, write_measurement(tmp_path / "base", drift=DRIFT, broken=100), arms=("base",))
    assert manifest["summary"][0]["broken_at"]["position"] == 100
    assert manifest["summary"][0]["n_known"] == 0
    assert manifest["summary"][0]["drift"] is None
    assert heads.select("drift", "low", "high", "beyond", "rank").null_count().row(0) == (heads.height,) * 5
    std = curves.filter(pl.col("statistic") == "std", pl.col("part") == "recurrent")
    assert std.filter(pl.col("position_low") >= 100)["value"].is_nan().all()
    assert std.filter(pl.col("position_high") < 100)["value"].is_finite().all()


def test_a_measurement_within_the_training_length_has_no_drift(tmp_path: Path) -> None:
    manifest, curves, heads = compared(tmp_path, write_measurement(tmp_path / "base", length=16), arms=("base",))
    assert (manifest["summary"][0]["far_from"], manifest["summary"][0]["begins"]) == (None, None)
    assert heads["drift"].null_count() == heads.height
    assert curves["value"].is_finite().all()


def test_few_documents_say_so(tmp_path: Path) -> None:
    manifest, _, heads = compared(tmp_path, write_measurement(tmp_path / "base", drift=DRIFT, documents=1), arms=("base",))
    assert manifest["interval"] == manifest["interval_of_heads"] == "no interval: too few texts"
    assert heads["low"].null_count() == heads.height
    assert heads["drift"].null_count() == 0


def test_measurements_that_do_not_belong_together(tmp_path: Path) -> None:
    base, control = write_measurement(tmp_path / "base"), write_measurement(tmp_path / "control", "control")
    cases = {
        "a second measurement of m / base, seed 0": (base, control, write_measurement(tmp_path / "again")),
        "no measurement of the states of m / control": (base,),
        "measures other / base, which the figure does not show": (write_measurement(tmp_path / "other", model="other"),),
        "read different texts": (base, write_measurement(tmp_path / "texts", "control", texts="other")),
        "different positions, training lengths or heads": (base, write_measurement(tmp_path / "long", "control", length=512)),
    }
    for message, directories in cases.items():
        with pytest.raises(FarstateError, match=message):
            compared(tmp_path, *directories)
    with pytest.raises(FarstateError, match="'base' must be among the arms"):
        compared(tmp_path, control, arms=("control",))
    table = pl.read_parquet(control / "states.parquet")
    table.head(table.height - 1).write_parquet(control / "states.parquet")
    write_manifest(
        control, {k: v for k, v in read_manifest_loosely(control).items() if k != "files"}, ["states.parquet", "samples.parquet"]
    )
    with pytest.raises(FarstateError, match="rows are not 24 texts"):
        compared(tmp_path, base, control)


def read_manifest_loosely(directory: Path) -> dict:
    return json.loads((directory / "manifest.json").read_text())


def test_measured_states_are_compared_by_their_stage(tmp_path: Path, store: TokenStore, result: Path) -> None:
    """What the stage `states` writes is what the comparison reads; a model against itself differs by nothing."""
    same = tmp_path / "same"
    shutil.copytree(result, same)
    manifest = read_manifest_loosely(same)
    manifest["labels"]["arm"] = "control"
    write_manifest(same, {k: v for k, v in manifest.items() if k != "files"}, list(manifest["files"]))
    stage = SimpleNamespace(
        output=tmp_path / "out",
        params={
            "compare": Compare(resamples=100).model_dump(mode="json"),
            "figure": {"models": ["m"], "arms": ["base", "control"]},
        },
        many=lambda role: {"evaluations": [result, same]}[role],
    )
    compare_states_stage(stage)
    curves, heads = (pl.read_parquet(tmp_path / "out" / f"{name}.parquet") for name in ("states", "heads"))
    assert (curves.filter(pl.col("against") == "base")["value"] == 0.0).all()
    assert heads.filter(pl.col("arm") == "control", pl.col("seed").is_null())["against_base"].to_list() == [0.0] * 8
    binned = pl.read_parquet(result / "states.parquet")
    which = ["layer", "head", "part", "position_high"]
    mean = binned.group_by(which).agg(pl.col("std").cast(pl.Float64).mean())
    of_base = curves.filter(pl.col("arm") == "base", pl.col("seed").is_null(), pl.col("statistic") == "std").join(
        mean, on=which, nulls_equal=True
    )
    assert of_base.height == mean.height
    np.testing.assert_allclose(of_base["value"], of_base["std"], rtol=1e-6)


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
