"""Carried, window and reset losses against their definitions, token by token."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from farstate.corpus.store import TokenStore, write_store
from farstate.corpus.tokens import INDEX, INDEX_SCHEMA, TOKENS
from farstate.errors import FarstateError
from farstate.evaluation import perplexity
from farstate.evaluation.bins import Bins, log_bins
from farstate.evaluation.perplexity import EvaluationSettings, Losses, evaluate, measure
from farstate.evaluation.positions import BLOCK, PositionSums, write_positions
from farstate.evaluation.progress import ScoringProgress
from farstate.evaluation.stages import perplexity_stage
from farstate.evaluation.stream import stream_nll
from farstate.evaluation.texts import select
from farstate.evaluation.uncertainty import resample
from farstate.evaluation.windows import plan, stride, window_nll
from farstate.files import read_manifest, write_manifest
from farstate.models.checkpoints import save_model
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.ops.precision import flushed_denormals
from farstate.params import Evaluate
from golden import check, ramp

VOCABULARY = 23
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_model(dtype: torch.dtype = torch.float64) -> LanguageModel:
    config = Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=VOCABULARY, dt_min=0.01, dt_max=0.2)
    model = LanguageModel(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.copy_(ramp(*parameter.shape, phase=float(number), scale=0.4))
    return model.to(dtype).eval()


def text(length: int, phase: int = 0) -> np.ndarray:
    return ((np.arange(length, dtype=np.int64) + phase) ** 2 * 7 + np.arange(length) // 3) % VOCABULARY


def make_store(root: Path, lengths: list[int], split: str = "test") -> TokenStore:
    """A store of one shard, written as `write_tokens` would; a document of training text comes first."""
    shard = root / "shard"
    shard.mkdir(parents=True)
    documents = [text(10)] + [text(length, phase=number + 1) for number, length in enumerate(lengths)]
    offsets = np.cumsum([0] + [len(d) for d in documents[:-1]])
    rows = [
        {
            "id": f"{number:064x}",
            "split": split if number else "train",
            "source": "made",
            "title": f"document {number}",
            "pile_set_name": None,
            "bytes": len(document),
            "offset": int(offset),
            "length": len(document),
        }
        for number, (document, offset) in enumerate(zip(documents, offsets, strict=True))
    ]
    np.concatenate(documents).astype("<u2").tofile(shard / TOKENS)
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), shard / INDEX)
    contents = {"dtype": "uint16", "vocabulary_size": VOCABULARY, "tokens": sum(map(len, documents))}
    write_manifest(shard, contents, [TOKENS, INDEX])
    write_store([shard], VOCABULARY, root / "store")
    return TokenStore(root / "store")


def direct(model: LanguageModel, tokens: np.ndarray) -> float:
    """−log q(last token | the tokens before it, from the zero state), with the whole softmax."""
    with torch.no_grad():
        hidden, _ = model(torch.from_numpy(tokens[None, :-1].copy()))
        logits = hidden[0, -1] @ model.head_weight[:VOCABULARY].T
        return float(-torch.log_softmax(logits, 0)[int(tokens[-1])])


def streamed(model: LanguageModel, rows: np.ndarray, segment_tokens: int, **options) -> np.ndarray:
    length = rows.shape[1] - 1
    parts = list(
        stream_nll(
            model,
            lambda a, n: rows[:, a : a + n].copy(),
            length,
            segment_tokens=segment_tokens,
            device=CPU,
            vocabulary_size=VOCABULARY,
            **options,
        )
    )
    expected = options.get("score_from", 1)
    for first, nll in parts:
        assert first == expected
        assert nll.dtype == np.float64
        assert nll.shape[1] <= segment_tokens
        expected += nll.shape[1]
    assert expected == length + 1
    return np.concatenate([nll for _, nll in parts], axis=1)


# Bins


@pytest.mark.parametrize("context", [1, 2, 3, 7, 32, 100, 2048])
@pytest.mark.parametrize("per_octave", [1, 2, 3, 8])
@pytest.mark.parametrize("factor", [1, 1.01, 2, 7.3, 64])
def test_bins_are_contiguous_and_one_ends_at_the_context(context, per_octave, factor):
    length = max(2, math.ceil(context * factor))
    bins = log_bins(length, context, per_octave)  # Bins itself refuses gaps and empty bins
    assert bins.length == length
    assert context in bins.high
    assert np.all((bins.position >= bins.low) & (bins.position <= bins.high))
    assert len(set(bins.position.tolist())) == len(bins)
    assert np.array_equal(bins.index(bins.low), np.arange(len(bins)))
    assert np.array_equal(bins.index(bins.high), np.arange(len(bins)))
    assert bins.tokens.sum() == length
    wide = bins.high[bins.low > 4 * per_octave] / bins.low[bins.low > 4 * per_octave]
    assert np.all(wide < 2 ** (1.6 / per_octave) * 1.05)


def test_bins_by_hand():
    bins = log_bins(128, 32, 2)
    assert bins.high.tolist() == [1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128]
    assert bins.position.tolist()[-2:] == [77, 109]
    assert log_bins(130, 32, 2).high.tolist()[-2:] == [91, 130]
    assert log_bins(33, 32, 1).high.tolist()[-2:] == [32, 33]


def test_bins_refuse_gaps():
    with pytest.raises(ValueError, match="contiguous"):
        Bins(np.array([1, 4]), np.array([2, 5]))


# The carried state


@pytest.mark.parametrize("segment_tokens", [1, 3, 7, 32, 100])
def test_segments_are_the_whole(segment_tokens):
    model = small_model()
    rows = np.stack([text(41), text(41, 5)])
    np.testing.assert_allclose(streamed(model, rows, segment_tokens), streamed(model, rows, 40), rtol=1e-9)


def test_every_position_by_the_definition():
    model = small_model()
    rows = np.stack([text(25), text(25, 5)])
    by_definition = [[direct(model, row[: t + 1]) for t in range(1, 25)] for row in rows]
    np.testing.assert_allclose(streamed(model, rows, 6), by_definition, rtol=1e-9)


def test_scoring_from_a_position_leaves_the_rest_out():
    model = small_model()
    rows = np.stack([text(25)])
    whole = streamed(model, rows, 5)
    for first in (1, 2, 5, 6, 17, 24):
        np.testing.assert_allclose(streamed(model, rows, 5, score_from=first), whole[:, first - 1 :], rtol=1e-12)


def test_bfloat16_is_near_and_not_the_same():
    model = small_model(torch.float32)
    rows = np.stack([text(60)])
    half, full = streamed(model, rows, 20, precision="bf16-mixed"), streamed(model, rows, 20)
    assert 0 < np.abs(half - full).max() < 0.1


def test_one_segment_of_tokens_at_a_time():
    model, asked = small_model(), []

    def read(start: int, count: int) -> np.ndarray:
        asked.append((start, count))
        return np.zeros((2, count), dtype=np.int64)

    for _ in stream_nll(model, read, 1000, segment_tokens=64, device=CPU, vocabulary_size=VOCABULARY):
        assert len(asked) * 64 >= asked[-1][0]
    assert max(count for _, count in asked) == 65
    assert [start for start, _ in asked] == list(range(0, 1000, 64))


# The two references


@pytest.mark.parametrize("context", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("length", [10, 17, 18, 40])
def test_plan_scores_every_position_once(context, length):
    windows = plan(length, context)
    step = stride(context)
    for kind, starts in (("window", windows.window_from), ("reset", windows.reset_from)):
        found = []
        for start, first in zip(windows.start, starts, strict=True):
            found += range(first, min(start + context, length) + 1) if first <= length else []
            for t in range(first, min(start + context, length) + 1):
                tokens_read = t - start
                assert tokens_read <= context
                if kind == "window":
                    assert tokens_read > context / 2
                    assert t > start + context - step
        assert sorted(found) == list(range(context + 1, length + 1))


@pytest.mark.parametrize("context", [1, 2, 5, 8, 9])
@pytest.mark.parametrize(("batch_tokens", "segment_tokens"), [(64, 16), (32, 3)])
def test_references_by_brute_force(context, batch_tokens, segment_tokens):
    model = small_model()
    length = 29
    rows = np.stack([text(length + 1), text(length + 1, 5)])
    step = stride(context)
    window, reset = np.full((2, 2, length + 1), np.nan)
    for scored in window_nll(
        model,
        lambda row, a, n: rows[row, a : a + n],
        2,
        length,
        context,
        batch_tokens=batch_tokens,
        segment_tokens=segment_tokens,
        device=CPU,
        vocabulary_size=VOCABULARY,
    ):
        for i, j in np.argwhere(scored.in_window | scored.in_reset):
            at = scored.rows[i], scored.positions[i, j]
            for kind, mask in ((window, scored.in_window), (reset, scored.in_reset)):
                if mask[i, j]:
                    assert np.isnan(kind[at]), "scored twice"
                    kind[at] = scored.nll[i, j]
    for row in range(2):
        for t in range(context + 1, length + 1):
            # The window that scores t is the first of the grid b = k · step that ends at or after it.
            k = -(-(t - context) // step)
            assert window[row, t] == pytest.approx(direct(model, rows[row, k * step : t + 1]), rel=1e-9)
            b = (t - 1) // context * context
            assert reset[row, t] == pytest.approx(direct(model, rows[row, b : t + 1]), rel=1e-9)


def test_windows_are_batched_and_bounded():
    model, sizes = small_model(), []

    class Watched:
        head_weight = model.head_weight

        def __call__(self, tokens, state=None):
            sizes.append(tokens.numel())
            return model(tokens, state)

    for _ in window_nll(
        Watched(),
        lambda row, a, n: np.zeros(n, dtype=np.int64),
        3,
        400,
        8,
        batch_tokens=128,
        segment_tokens=64,
        device=CPU,
        vocabulary_size=None,
    ):
        pass
    assert max(sizes) == 128
    assert len(sizes) == math.ceil(3 * 49 / 16) + math.ceil(3 * 49 / 16)


# The softmax


@pytest.mark.parametrize("softmax", ["real", "padded"])
def test_softmax_over_symbols_or_over_all_rows(softmax, tmp_path):
    """Whatever a configuration takes for its vocabulary, `real` counts the store's symbols and `padded` all rows."""
    store = make_store(tmp_path, [41])
    parameters = Evaluate(length=40, softmax=softmax)
    model = small_model()
    tokens = torch.from_numpy(text(41, 1))[None]
    with torch.no_grad():
        hidden, _ = model(tokens[:, :-1])
        logits = hidden[0] @ model.head_weight[: VOCABULARY if softmax == "real" else None].T
    expected = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum").item()
    for vocabulary_size in (VOCABULARY, 32):
        model.config = model.config.model_copy(update={"vocabulary_size": vocabulary_size})
        assert model.config.padded_vocabulary == 32
        losses = measure(model, store, select(store, parameters), parameters, 6, EvaluationSettings(rows=2, segment_tokens=7))
        assert losses.sums["carried"].sum() == pytest.approx(expected, rel=1e-12)


# The stage


def run(tmp_path: Path, lengths: list[int], name: str = "out", model: LanguageModel | None = None, context: int = 6, **options):
    root = tmp_path / name
    save_model((model or small_model()).float(), root / "model")
    make_store(root, lengths, options.pop("split", "test"))
    settings = EvaluationSettings(threads=1, rows=options.pop("rows", 2), segment_tokens=options.pop("segment_tokens", 16))
    evaluate(
        checkpoint=root / "model",
        store_directory=root / "store",
        evaluate=Evaluate(**{"length": 40, **options}),
        context=context,
        labels={"model": "m", "arm": "base", "seed": 0},
        output=root / "result",
        settings=settings,
    )
    return (
        pl.read_parquet(root / "result/perplexity.parquet"),
        pl.read_parquet(root / "result/positions.parquet"),
        read_manifest(root / "result", verify=True),
    )


def test_stage_tables(tmp_path):
    table, positions, manifest = run(tmp_path, [41, 90, 20, 125], stretches_per_document=2)
    assert table.schema == {
        "model": pl.String,
        "arm": pl.String,
        "seed": pl.Int64,
        "train_length": pl.Int64,
        "document": pl.String,
        "stretch": pl.Int64,
        "position_low": pl.Int64,
        "position_high": pl.Int64,
        "tokens": pl.Int64,
        "nll_carried": pl.Float64,
        "nll_window": pl.Float64,
        "nll_reset": pl.Float64,
    }
    assert manifest["documents"] == 3
    assert manifest["stretches"] == table.select("document", "stretch").n_unique() == 5
    assert manifest["tokens"] == table["tokens"].sum() == 200
    assert manifest["broken_at"] == {"carried": None, "window": None, "reset": None}
    near = table.filter(pl.col("position_high") <= 6)
    assert (near["nll_carried"] == near["nll_window"]).all()
    assert (near["nll_carried"] == near["nll_reset"]).all()
    far = table.filter(pl.col("position_low") > 6)
    assert (far["nll_carried"] != far["nll_window"]).any()
    assert positions.schema == {"position": pl.Int64, "documents": pl.Int64, "nll_carried": pl.Float64, "nll_window": pl.Float64}
    assert positions["position"].to_list() == list(range(1, 41))
    assert (positions["documents"] == 3).all()
    assert (positions["nll_carried"][:6] == positions["nll_window"][:6]).all()


def test_stage_against_the_definition(tmp_path):
    table, positions, manifest = run(tmp_path, [90, 41], stretches_per_document=2)
    model = small_model()
    rows = {(1, 0): text(90, 1)[:41], (1, 1): text(90, 1)[40:81], (2, 0): text(41, 2)}
    nll = {key: np.array([direct(model, row[: t + 1]) for t in range(1, 41)]) for key, row in rows.items()}
    for (document, stretch), values in nll.items():
        own = table.filter((pl.col("document") == f"{document:064x}") & (pl.col("stretch") == stretch))
        for low, high, total in own.select("position_low", "position_high", "nll_carried").iter_rows():
            assert total == pytest.approx(values[low - 1 : high].sum(), rel=1e-4)
    # Every stretch counts once, as in the bins: the two tables tell of the same mean.
    np.testing.assert_allclose(positions["nll_carried"], np.mean(list(nll.values()), axis=0), rtol=1e-4)
    for kind in ("nll_carried", "nll_window"):
        for (low, high), rows_of_bin in table.group_by("position_low", "position_high"):
            pooled = rows_of_bin[kind].sum() / rows_of_bin["tokens"].sum()
            assert positions[kind][low - 1 : high].mean() == pytest.approx(pooled, rel=1e-9)
    assert manifest["positions_mean"] == "over all stretches, each with the same weight"


def test_result_does_not_depend_on_rows_and_segments(tmp_path):
    first, first_positions, _ = run(tmp_path, [41, 90], "a", rows=1, segment_tokens=5)
    second, second_positions, _ = run(tmp_path, [41, 90], "b", rows=8, segment_tokens=64)
    for kind in ("nll_carried", "nll_window", "nll_reset"):
        np.testing.assert_allclose(first[kind], second[kind], rtol=1e-4)
    np.testing.assert_allclose(first_positions["nll_window"], second_positions["nll_window"], rtol=1e-4)


def test_context_as_long_as_the_evaluation(tmp_path):
    table, positions, _ = run(tmp_path, [41], context=40)
    assert (table["nll_carried"] == table["nll_window"]).all()
    assert (table["nll_carried"] == table["nll_reset"]).all()
    assert (positions["nll_carried"] == positions["nll_window"]).all()


def test_joined_documents(tmp_path):
    store = make_store(tmp_path, [30, 25, 9, 50, 8, 8])
    parameters = Evaluate(length=40, streams="concatenated")
    texts = select(store, parameters)
    stored = [text(length, number + 1) for number, length in enumerate([30, 25, 9, 50, 8, 8])]
    assert [t.document for t in texts] == [f"{1:064x}", f"{3:064x}"]
    assert [len(t.pieces) for t in texts] == [2, 2]
    np.testing.assert_array_equal(texts[0].read(store, 0, 41), np.concatenate([stored[0], stored[1]])[:41])
    np.testing.assert_array_equal(texts[1].read(store, 5, 20), np.concatenate([stored[2], stored[3]])[5:25])
    with pytest.raises(IndexError, match="of a text that has 41"):
        texts[0].read(store, 30, 12)
    assert len(select(store, Evaluate(length=40, streams="concatenated", documents=1))) == 1
    with pytest.raises(FarstateError, match=r"split 'test': 201 tokens are needed, all its documents together have 130"):
        select(store, Evaluate(length=200, streams="concatenated"))
    _, _, manifest = run(tmp_path, [30, 25, 9, 50], "stage", streams="concatenated")
    assert (manifest["stretches"], manifest["joined_documents"]) == (2, 4)


def test_no_document_is_long_enough(tmp_path):
    with pytest.raises(FarstateError, match="no document has 41 tokens"):
        run(tmp_path, [20, 30])


def test_a_store_of_another_vocabulary(tmp_path):
    config = Mamba2Config(width=16, layers=1, state_size=8, head_size=8, vocabulary_size=VOCABULARY - 1)
    with pytest.raises(FarstateError, match=r"knows 22 symbols, the token store .* uses 23"):
        run(tmp_path, [41], model=LanguageModel(config))


def test_a_model_that_breaks_is_never_averaged_away(tmp_path, monkeypatch):
    class Broken:
        """Gives NaN from the 20th input of a row that is read with a carried state."""

        def __init__(self, model):
            self.model, self.config, self.head_weight = model, model.config, model.head_weight
            self.read = 0

        def eval(self):
            return self

        def __call__(self, tokens, state=None):
            self.read = 0 if state is None else self.read
            hidden, after = self.model(tokens, state)
            hidden = hidden.clone()
            hidden[-1, max(0, 19 - self.read) :] = math.nan
            self.read += tokens.shape[1]
            return hidden, after

    whole = perplexity.load_model
    monkeypatch.setattr(perplexity, "load_model", lambda *args, **kwargs: Broken(whole(*args, **kwargs)))
    table, positions, manifest = run(tmp_path, [41, 41, 41], rows=3, segment_tokens=8)
    assert manifest["broken_at"]["carried"] == {"position": 20, "document": f"{3:064x}", "stretch": 0, "stretches": 1}
    assert manifest["broken_at"]["window"] is None
    lost = table.filter(pl.col("nll_carried").is_nan())
    assert set(lost["document"]) == {f"{3:064x}"}
    third = table.filter(pl.col("document") == f"{3:064x}")
    assert third["nll_carried"].is_nan().to_list() == (third["position_high"] >= 20).to_list()
    assert positions["nll_carried"][:19].is_finite().all()
    assert positions["nll_carried"][19:].is_nan().all()
    assert positions["nll_window"].is_finite().all()


def test_sums_of_many_positions(tmp_path):
    length = 2 * BLOCK + 5
    carried, window = PositionSums(length), PositionSums(length)
    expected = np.zeros(length)
    for first in (1, 100, BLOCK - 3, length - 9):
        at = np.repeat(np.arange(first, first + 10), 2)
        carried.add(at, np.full(20, 0.5))
        expected[first - 1 : first + 9] += 1.0
    carried.add(np.empty(0, dtype=np.int64), np.empty(0))
    np.testing.assert_array_equal(carried.read(1, length), expected)
    with pytest.raises(IndexError, match="of 8197"):
        carried.read(length, 2)
    write_positions(tmp_path / "positions.parquet", carried, window, 7)
    table = pl.read_parquet(tmp_path / "positions.parquet")
    assert table["position"].to_list() == list(range(1, length + 1))
    np.testing.assert_array_equal(table["nll_carried"], expected)
    assert (table["nll_window"] == 0.0).all()


def test_progress_reaches_the_total(tmp_path):
    store = make_store(tmp_path, [90, 41])
    parameters = Evaluate(length=40, stretches_per_document=2)
    seen: list[tuple[int, int]] = []
    measure(
        small_model(),
        store,
        select(store, parameters),
        parameters,
        6,
        EvaluationSettings(rows=2, segment_tokens=7),
        lambda a, b: seen.append((a, b)),
    )
    done = [a for a, _ in seen]
    assert done == sorted(done)
    assert seen[-1] == (240, 240)


def test_progress_is_shown(tmp_path, capsys):
    save_model(small_model().float(), tmp_path / "model")
    make_store(tmp_path, [90, 41])
    stage = SimpleNamespace(
        one={"checkpoint": tmp_path / "model", "store": tmp_path / "store"}.__getitem__,
        params={
            "evaluate": Evaluate(length=40, stretches_per_document=2).model_dump(mode="json"),
            "context": 6,
            "labels": {"model": "m", "arm": "base", "seed": 0},
        },
        output=tmp_path / "m.base.s0",
        threads=1,
        settings=SimpleNamespace(device="cpu", evaluation_rows=2, evaluation_segment=16),
    )
    perplexity_stage(stage)
    assert re.search(r"farstate: m.base.s0: 100 % scored, \S+ tokens/s, 0:00:00 left\n$", capsys.readouterr().err)


def test_progress_now_and_then(capsys, monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr("farstate.training.progress.time.monotonic", lambda: float(next(clock)))
    with ScoringProgress("long") as progress:
        for done in (100, 200, 300, 300, 400, 500, 600):
            progress(done, 4000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "farstate: long: 7 % scored, 25 tokens/s, 0:02:28 left",
        "farstate: long: 12 % scored, 21 tokens/s, 0:02:48 left",
    ]


def flushes() -> bool:
    return (torch.full((4,), 1.5e-38) * 0.5).eq(0).all().item()


@pytest.mark.parametrize("before", [False, True])
def test_numbers_below_the_normal_range_are_flushed(tmp_path, monkeypatch, before):
    if not torch.set_flush_denormal(before):
        pytest.skip("this CPU cannot flush")
    try:
        with flushed_denormals():
            assert flushes()
        assert flushes() is before
        seen = []
        whole = perplexity.stream_nll
        monkeypatch.setattr(perplexity, "stream_nll", lambda *args, **kwargs: (seen.append(flushes()), whole(*args, **kwargs))[1])
        run(tmp_path, [41])
        assert seen == [True]
        assert flushes() is before
    finally:
        torch.set_flush_denormal(False)


def test_golden(tmp_path, monkeypatch):
    store = make_store(tmp_path, [90, 41])
    parameters = Evaluate(length=40, stretches_per_document=2)
    losses: Losses = measure(
        small_model(), store, select(store, parameters), parameters, 6, EvaluationSettings(rows=2, segment_tokens=16)
    )
    values = {f"sums_{kind}": torch.from_numpy(value) for kind, value in losses.sums.items()}
    values |= {f"positions_{kind}": torch.from_numpy(value.read(1, 40)) for kind, value in losses.positions.items()}
    # NumPy is pinned, so its streams do not move: these hold the bootstrap.
    curves = ramp(24, 5).numpy()
    for name, documents in (("few", [str(i // 4) for i in range(24)]), ("many", [str(i) for i in range(24)])):
        resamples = resample(documents, resamples=400, confidence=0.95, generator=np.random.default_rng(0))
        mean, drawn = resamples.mean(curves, np.ones(24))
        values[f"interval_{name}"] = torch.from_numpy(np.stack(resamples.interval(mean, drawn)))
        values[f"band_{name}"] = torch.from_numpy(np.stack(resamples.band(mean, drawn)))
    check("evaluation", values)
    monkeypatch.delenv("FARSTATE_UPDATE_GOLDEN", raising=False)
    with pytest.raises(AssertionError, match="the numbers of 'evaluation' changed"):
        check("evaluation", values | {"sums_window": values["sums_window"] * (1 + 1e-6)})
