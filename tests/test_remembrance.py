"""Effective remembrance against its definition, text by text and suffix by suffix."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import golden
import model_checks
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation.compare_remembrance import TABLE_SCHEMA, compare_remembrance, far_start
from farstate.evaluation.perplexity import EvaluationSettings
from farstate.evaluation.remembrance import (
    DISTANCES,
    Break,
    Sweep,
    default_starts,
    evaluate_remembrance,
    measure,
    segment_ends,
    sweep,
)
from farstate.evaluation.texts import select
from farstate.evaluation.uncertainty import t_interval
from farstate.files import read_manifest, write_manifest
from farstate.models.checkpoints import save_model
from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES
from farstate.params import Compare, Remembrance
from farstate.state import State
from test_architectures import VOCABULARY as TINY
from test_architectures import config
from test_evaluation import VOCABULARY, make_store, small_model

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(model, texts: np.ndarray, starts, **options) -> Sweep:
    options = {"last": 5, "rows": 3, "segment_tokens": 8, "vocabulary_size": None} | options
    return sweep(
        model,
        lambda text, start, count: texts[text, start : start + count],
        len(texts),
        texts.shape[1] - 1,
        starts,
        device=CPU,
        **options,
    )


def by_definition(model, texts: np.ndarray, starts, last: int, vocabulary_size: int | None = None) -> dict[str, np.ndarray]:
    """Each suffix read by itself, whole distributions, the distances written out in float64."""
    length = texts.shape[1] - 1

    def predictions(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            hidden, _ = model(torch.from_numpy(tokens[None].copy()))
            logits = hidden[0].double() @ model.head_weight[:vocabulary_size].double().T
        return torch.softmax(logits, dim=-1).numpy()

    def distances(q: np.ndarray, other: np.ndarray) -> list[float]:
        m = (q + other) / 2
        nats = 0.5 * sum(p * math.log(p / c) for p, c in zip(q, m, strict=True) if p > 0)
        nats += 0.5 * sum(p * math.log(p / c) for p, c in zip(other, m, strict=True) if p > 0)
        nats = max(nats, 0.0)
        cosine = float(q @ other) / math.sqrt(float(q @ q) * float(other @ other))
        return [0.5 * float(np.abs(q - other).sum()), nats, math.sqrt(nats), 1.0 - cosine]

    single = np.full((len(texts), len(starts), 4), np.nan)
    mean = single.copy()
    for number, tokens in enumerate(texts):
        whole = predictions(tokens)
        for place, start in enumerate(starts):
            suffix = predictions(tokens[start:])
            single[number, place] = distances(whole[length], suffix[length - start])
            if start <= length - last + 1:
                found = [distances(whole[at], suffix[at - start]) for at in range(length - last + 1, length + 1)]
                mean[number, place] = np.mean(found, axis=0)
    return {"T": single, f"last {last}": mean}


def same(found: Sweep, expected: dict[str, np.ndarray], tolerance: float = 1e-6) -> float:
    """Every number to `tolerance`, the square root too: where the divergence vanishes its root keeps half the digits only."""
    assert found.values.keys() == expected.keys()
    worst = 0.0
    for target, values in expected.items():
        np.testing.assert_array_equal(np.isnan(found.values[target]), np.isnan(values))
        worst = max(worst, float(np.nan_to_num(np.abs(found.values[target] - values)).max()))
    assert worst <= tolerance
    return worst


# --- the definition --------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_the_definition_for_every_architecture(architecture: str) -> None:
    model = model_checks.random_model(config(architecture)).eval()
    texts = model_checks.tokens(TINY, 3, 38).numpy()  # T = 37
    starts = (0, 1, 2, 5, 8, 13, 16, 31, 32, 33, 34, 36, 37)
    expected = by_definition(model, texts, starts, 5)
    found = run(model, texts, starts)
    print(f"{architecture}: worst difference {same(found, expected):.1e}")
    # The measure means something here: dropping tokens moves the prediction.
    assert expected["T"][:, 1:, 0].max() > 1e-3
    assert found.starts == starts
    assert not found.broken
    for values in found.values.values():
        assert (values[:, 0] == 0.0).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("rows", "segment_tokens"), [(1, 4), (7, 7), (100, 1000)])
def test_rows_and_segments_change_rounding_only(architecture: str, rows: int, segment_tokens: int) -> None:
    model = model_checks.random_model(config(architecture)).eval()
    texts = model_checks.tokens(TINY, 2, 24).numpy()
    starts = (0, 1, 3, 11, 20, 21, 23)
    expected = run(model, texts, starts, last=3, rows=4, segment_tokens=9)
    same(run(model, texts, starts, last=3, rows=rows, segment_tokens=segment_tokens), expected.values, 1e-7)


@pytest.mark.parametrize("window", [7, None])
@pytest.mark.parametrize("theta", [10000.0, None])
def test_attention_with_and_without_a_window(window: int | None, theta: float | None) -> None:
    """The cache grows, and holds no token before the start; `attention_cache` is just enough for the whole text."""
    shape = config("hybrid").model_copy(update={"attention_window": window, "rope_theta": theta, "attention_cache": 38})
    model = model_checks.random_model(shape).eval()
    texts = model_checks.tokens(TINY, 2, 38).numpy()
    starts = (0, 3, 19, 30, 37)
    for rows, segment_tokens in ((1, 5), (4, 16), (10, 100)):
        same(run(model, texts, starts, rows=rows, segment_tokens=segment_tokens), by_definition(model, texts, starts, 5))


@settings(max_examples=15, deadline=None)
@given(
    length=st.integers(1, 40),
    rows=st.integers(1, 9),
    segment_tokens=st.integers(1, 50),
    documents=st.integers(1, 4),
    data=st.data(),
)
def test_any_starts_rows_and_segments(length: int, rows: int, segment_tokens: int, documents: int, data: st.DataObject) -> None:
    starts = sorted(data.draw(st.sets(st.integers(0, length), min_size=1, max_size=6)))
    last = data.draw(st.integers(1, min(length, 9)))
    model = small_model()
    texts = model_checks.tokens(VOCABULARY, documents, length + 1).numpy()
    found = run(model, texts, starts, last=last, rows=rows, segment_tokens=segment_tokens, vocabulary_size=VOCABULARY)
    same(found, by_definition(model, texts, starts, last, VOCABULARY))


def test_starts_may_leave_out_the_beginning() -> None:
    model = small_model()
    texts = model_checks.tokens(VOCABULARY, 2, 20).numpy()
    found = run(model, texts, (19, 7, 7))
    assert found.starts == (7, 19)
    same(found, by_definition(model, texts, (7, 19), 5))
    # At the end of T nothing but the last token is read, and a mean over more positions does not exist.
    assert np.isfinite(found.values["T"]).all()
    assert np.isnan(found.values["last 5"][:, 1]).all()


def test_float32_is_safe_at_the_real_vocabulary() -> None:
    """V = 50,288, spiky and flat distributions: within 1e-5 of float64, in range, zero at start 0."""
    vocabulary = 50288
    shape = config("mamba2").model_copy(update={"vocabulary_size": vocabulary, "pad_vocabulary_to": 1})
    model = model_checks.random_model(shape).eval()
    texts = model_checks.tokens(vocabulary, 2, 14).numpy()
    starts = (0, 1, 4, 9, 13)
    for scale in (1.0, 20.0):
        with torch.no_grad():
            model.lm_head.weight.mul_(scale)
        exact = run(model.double(), texts, starts, last=2)
        single = run(model.float(), texts, starts, last=2)
        model.double()
        for target, values in exact.values.items():
            error = np.nanmax(np.abs(single.values[target] - values), axis=(0, 1))
            print(f"scale {scale:g}, {target}: " + ", ".join(f"{n} {e:.1e}" for n, e in zip(DISTANCES, error, strict=True)))
            assert (error < (2e-5, 2e-5, 2e-4, 2e-5)).all()
            assert (single.values[target][:, 0] == 0.0).all()
            assert np.nanmax(single.values[target][..., 1]) <= math.log(2)


# --- start points and segments ---------------------------------------------------------------------------


@given(length=st.integers(1, 200_000), per_octave=st.integers(1, 6))
def test_default_starts_are_dense_at_both_ends(length: int, per_octave: int) -> None:
    starts = default_starts(length, per_octave)
    assert starts == tuple(sorted(set(starts)))
    assert starts[0] == 0
    assert starts[-1] == length
    # The same seen from either end, with the distances 1, 2, 4, … of powers of two all there.
    assert starts == tuple(length - start for start in reversed(starts))
    powers = {2**n for n in range(length.bit_length()) if 2 ** (n + 1) <= length}
    assert powers <= set(starts)
    near = [start for start in starts if start > 0 and 2 * start <= length]
    for this, following in itertools.pairwise(near):
        assert following <= math.ceil(this * 2 ** (1 / per_octave)) + 1


@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=12).map(lambda found: sorted(found, reverse=True)),
    segment_tokens=st.integers(1, 700),
)
def test_segments_waste_little(lengths: list[int], segment_tokens: int) -> None:
    ends = segment_ends(lengths, segment_tokens)
    assert ends == sorted(set(ends))
    assert ends[-1] == lengths[0]
    padding = 0
    for begin, end in zip([0, *ends], ends, strict=False):
        assert end - begin <= segment_tokens
        active = [own for own in lengths if own > begin]
        wasted = sum(max(0, end - own) for own in active)
        assert end - begin <= 64 or wasted * 64 <= (end - begin) * len(active)
        padding += wasted
    assert padding <= sum(lengths) / 32 + 64 * len(lengths)


def test_no_row_reads_more_than_its_suffix() -> None:
    """The tokens that the model is given: the sum of the suffix lengths and little padding, at most `rows` side by side."""
    model = small_model()
    shapes = []

    class Counting:
        head_weight = model.head_weight

        def __call__(self, tokens: torch.Tensor, state: State | None = None):
            shapes.append(tuple(tokens.shape))
            return model(tokens, state)

    length, seen = 512, []
    starts = default_starts(length, 2)
    texts = model_checks.tokens(VOCABULARY, 4, length + 1).numpy()
    run(Counting(), texts, starts, rows=8, segment_tokens=128, progress=lambda done, total: seen.append((done, total)))
    wanted = 4 * sum(length + 1 - start for start in starts)
    assert max(rows for rows, _ in shapes) == 8
    assert max(time for _, time in shapes) <= 128
    assert wanted <= sum(rows * time for rows, time in shapes) <= 1.08 * wanted
    assert seen[-1] == (wanted, wanted)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("starts", [(-1,), (0, 20), ()])
def test_start_points_beyond_the_text(starts: tuple[int, ...]) -> None:
    with pytest.raises(FarstateError, match=r"remembrance.starts: .* 0 … 19"):
        run(small_model(), model_checks.tokens(VOCABULARY, 1, 20).numpy(), starts)


def test_more_last_positions_than_text() -> None:
    with pytest.raises(FarstateError, match=r"remembrance.last: 20 positions"):
        run(small_model(), model_checks.tokens(VOCABULARY, 1, 20).numpy(), (0,), last=20)


@pytest.mark.parametrize("streams", ["documents", "concatenated"])
def test_too_short_documents_name_the_parameter(tmp_path: Path, streams: str) -> None:
    store = make_store(tmp_path, [30, 12])
    with pytest.raises(FarstateError, match=r"remembrance\.length"):
        select(store, Remembrance(length=60, last=4, streams=streams))


class Breaking:
    """A model whose hidden state is not finite once it has read token `token`, in that row from there on."""

    def __init__(self, model: LanguageModel, token: int) -> None:
        self.model, self.token, self.head_weight = model, token, model.head_weight
        self.broken: dict[int, torch.Tensor] = {}

    def __call__(self, tokens: torch.Tensor, state: State | None = None):
        hidden, after = self.model(tokens, state)
        seen = (tokens == self.token).cumsum(1) > 0
        if state is not None:
            seen |= state.layers[0].recurrent.flatten(1).isnan().any(1)[:, None]
        hidden = torch.where(seen[..., None], torch.nan, hidden)
        bad = seen[:, -1]
        layers = [layer.map(lambda t: torch.where(bad.view(-1, *(1,) * (t.dim() - 1)), torch.nan, t)) for layer in after.layers]
        return hidden, State(tuple(layers))


@pytest.mark.parametrize(("rows", "segment_tokens"), [(1, 4), (3, 5), (50, 100)])
def test_a_model_that_breaks(rows: int, segment_tokens: int) -> None:
    """NaN from the token on, in every suffix that holds it; other rows and texts keep their numbers."""
    model = small_model()
    texts = model_checks.tokens(VOCABULARY - 1, 3, 24).numpy()
    texts[1, 9] = VOCABULARY - 1
    starts = (0, 4, 9, 10, 15, 23)
    found = run(Breaking(model, VOCABULARY - 1), texts, starts, rows=rows, segment_tokens=segment_tokens)
    expected = by_definition(model, texts, starts, 5)
    for values in expected.values():
        values[1] = np.nan  # the reference is broken: nothing can be said of this text
    same(found, expected)
    assert sorted(found.broken, key=lambda each: each.start) == [Break(1, 0, 9), Break(1, 4, 9), Break(1, 9, 9)]


def test_padding_brings_nothing_new() -> None:
    """Rows are filled up behind their end with a token that they hold: one that breaks the model does not come in that way."""
    model = small_model()
    texts = 1 + model_checks.tokens(VOCABULARY - 1, 2, 24).numpy()
    starts = (0, 1, 5, 11)
    with torch.no_grad():
        model.backbone.embedding.weight[0] = torch.nan
        model.lm_head.weight = torch.nn.Parameter(torch.nan_to_num(model.lm_head.weight))
    expected = by_definition(model, texts, starts, 5)
    found = run(model, texts, starts, rows=8, segment_tokens=100)
    same(found, expected)
    assert not found.broken


@pytest.mark.parametrize(("rows", "vocabulary_size"), [(1, None), (7, None), (50, VOCABULARY)])
def test_a_head_that_breaks(rows: int, vocabulary_size: int | None) -> None:
    """One row of the head that is not finite leaves no distribution anywhere: not even a whole text is at no distance of itself."""
    model = small_model()
    texts = 1 + model_checks.tokens(VOCABULARY - 1, 2, 24).numpy()
    head = model.head_weight.detach().clone()
    head[0] = torch.nan
    model.lm_head.weight = torch.nn.Parameter(head)
    found = run(model, texts, (0, 4, 22), rows=rows, vocabulary_size=vocabulary_size)
    assert all(np.isnan(values).all() for values in found.values.values())
    # Of the last five predictions the first, of a start behind it the only one that is taken.
    expected = [Break(text, start, at) for start, at in ((0, 19), (4, 19), (22, 23)) for text in (0, 1)]
    assert found.broken == expected


# --- the stage -------------------------------------------------------------------------------------------

LABELS = {"model": "small", "arm": "base", "seed": 0}
WHERE = EvaluationSettings(rows=3, segment_tokens=16)


def evaluated(root: Path, remembrance: Remembrance, model: LanguageModel | None = None, lengths=(75, 40, 33)) -> Path:
    make_store(root / "made", list(lengths))
    save_model(small_model(torch.float32) if model is None else model, root / "model")
    evaluate_remembrance(
        checkpoint=root / "model",
        store_directory=root / "made/store",
        remembrance=remembrance,
        context=8,
        labels=LABELS,
        output=root / "out",
        settings=WHERE,
    )
    return root / "out"


def test_table_and_manifest(tmp_path: Path) -> None:
    wanted = Remembrance(length=32, last=4, starts=(0, 1, 16, 30, 32), stretches_per_document=2)
    out = evaluated(tmp_path, wanted)
    table = pl.read_parquet(out / "remembrance.parquet")
    assert table.columns == [
        *("model", "arm", "seed", "train_length", "document", "stretch", "T", "start", "target"),
        *DISTANCES,
    ]
    store = TokenStore(tmp_path / "made/store")
    texts = select(store, wanted)
    assert [(text.document, text.stretch) for text in texts] == list(
        table.filter(start=0, target="T").select("document", "stretch").iter_rows()
    )
    assert len(texts) == 4
    assert table.filter(target="T")["start"].unique().sort().to_list() == [0, 1, 16, 30, 32]
    assert table.filter(target="last 4")["start"].unique().sort().to_list() == [0, 1, 16]
    assert table.height == 4 * (5 + 3)
    assert set(table["T"]) == {32}
    assert set(table["train_length"]) == {8}
    assert table.filter(start=0).select(pl.sum_horizontal(DISTANCES)).to_series().unique().to_list() == [0.0]
    model = small_model(torch.float32)
    read = np.stack([text.read(store, 0, 33) for text in texts])
    expected = by_definition(model, read, (0, 1, 16, 30, 32), 4, VOCABULARY)
    values = table.filter(target="T").select(DISTANCES).to_numpy().reshape(4, 5, 4)
    np.testing.assert_allclose(values[..., [0, 1, 3]], expected["T"][..., [0, 1, 3]], atol=1e-5)
    manifest = read_manifest(out)
    assert manifest["labels"] == LABELS
    assert manifest["broken_at"] is None
    assert manifest["starts"] == [0, 1, 16, 30, 32]
    assert (manifest["documents"], manifest["stretches"]) == (3, 4)
    assert manifest["tokens"] == 4 * (33 + 32 + 17 + 3 + 1)


def test_a_broken_checkpoint_is_reported_by_document(tmp_path: Path) -> None:
    model = small_model(torch.float32)
    token = 5
    with torch.no_grad():
        model.backbone.embedding.weight[token] = torch.nan
    wanted = Remembrance(length=32, last=4, starts=(0, 1, 16, 32))
    out = evaluated(tmp_path, wanted, model)
    manifest, table = read_manifest(out), pl.read_parquet(out / "remembrance.parquet")
    store = TokenStore(tmp_path / "made/store")
    first = {text.document: np.flatnonzero(text.read(store, 0, 33) == token) for text in select(store, wanted)}
    position = min(int(at[0]) for at in first.values() if at.size)
    broken = manifest["broken_at"]
    # The chunked form of a recurrence knows no NaN within a chunk from another: all of its positions are lost together.
    chunk = 16
    assert position - chunk < broken["position"] <= position
    assert broken["start"] == 0
    assert first[broken["document"]][0] < broken["position"] + chunk
    assert broken["stretches"] == sum(bool(at.size) for at in first.values())
    for document, at in first.items():
        rows = table.filter(document=document)
        assert rows["total_variation"].is_nan().all() == bool(at.size)


def test_a_vocabulary_that_does_not_fit(tmp_path: Path) -> None:
    model = LanguageModel(config("mamba2"))
    with pytest.raises(FarstateError, match=f"knows {TINY} symbols, the token store .* uses {VOCABULARY}"):
        evaluated(tmp_path, Remembrance(length=32, last=4), model)
    assert not (tmp_path / "out/manifest.json").exists()


def test_default_grid_and_padded_softmax(tmp_path: Path) -> None:
    out = evaluated(tmp_path, Remembrance(length=32, last=4, softmax="padded"))
    assert read_manifest(out)["starts"] == list(default_starts(32, 2))


def test_golden() -> None:
    model = small_model()
    texts = np.stack([(np.arange(30) ** 2 * 7 + row) % VOCABULARY for row in range(2)])
    found = run(model, texts, (0, 1, 7, 20, 25, 29), vocabulary_size=VOCABULARY)
    values = {name: torch.from_numpy(np.nan_to_num(each, nan=-1.0)) for name, each in found.values.items()}
    golden.check("remembrance", values)


def test_measure_reads_the_store(tmp_path: Path) -> None:
    store = make_store(tmp_path, [50, 45])
    wanted = Remembrance(length=40, last=3, starts=(0, 11))
    texts = select(store, wanted)
    found = measure(small_model(), store, texts, wanted, WHERE)
    read = np.stack([text.read(store, 0, 41) for text in texts])
    same(found, by_definition(small_model(), read, (0, 11), 3, VOCABULARY))


# --- the comparison --------------------------------------------------------------------------------------

STARTS = (0, 1, 8, 24, 32)  # T = 32, T_train = 8: "far" is the start 24, which leaves 9 tokens
STRETCHES = [(f"{document:02d}", stretch) for document in range(24) for stretch in range(2)]
COMPARE = Compare(resamples=400, confidence=0.9)


def invented(root: Path, name: str, arm: str, seed: int | None, curve, **changes) -> Path:
    """A measurement folder as the stage writes it; `curve(start, target, unit)` is the total variation."""
    starts = changes.pop("starts", STARTS)
    units = changes.pop("units", STRETCHES)
    context = changes.pop("context", 8)
    broken = changes.pop("broken", None)
    rows = []
    for target, last in (("T", 1), ("last 4", 4)):
        for number, (document, stretch) in enumerate(units):
            for start in starts:
                if start <= 33 - last:
                    tv = curve(start, target, number)
                    labels = {"model": name, "arm": arm, "seed": seed, "train_length": context}
                    place = {"document": document, "stretch": stretch, "T": 32, "start": start, "target": target}
                    rows.append(labels | place | dict(zip(DISTANCES, (tv, tv / 2, tv**0.5, tv / 3), strict=True)))
    folder = root / f"{name}.{arm}.{seed}"
    folder.mkdir()
    pl.DataFrame(rows, schema_overrides={"seed": pl.Int64}).write_parquet(folder / "remembrance.parquet")
    contents = {
        "labels": {"model": name, "arm": arm, "seed": seed},
        "context": context,
        "remembrance": {"length": 32},
        "broken_at": broken,
        "parameters": 10,
        "parameters_without_embeddings": 5,
    }
    write_manifest(folder, contents | changes, ["remembrance.parquet"])
    return folder


def wobble(start: int, number: int, size: float = 0.05) -> float:
    return size * math.sin(number * 7.7 + start) if start else 0.0


def base(start: int, target: str, number: int) -> float:
    return (
        {0: 0.0, 1: 0.05, 8: 0.3, 24: 0.4, 32: 0.6}[start]
        + abs(wobble(start, number))
        + (0.01 if target == "T" and start else 0.0)
    )


def repaired(shift: float):
    """Below the base at 8 and 24, above it at 1."""
    return lambda start, target, number: max(
        0.0, base(start, target, number) + {0: 0.0, 1: 0.05, 8: -0.15, 24: -0.2, 32: 0.0}[start] + (shift if start else 0.0)
    )


def joined(root: Path, folders: list[Path], models=("small",), arms=("base", "state_passing", "control")) -> Path:
    out = root / "compared"
    compare_remembrance(evaluations=folders, compare=COMPARE, figure={"models": list(models), "arms": list(arms)}, output=out)
    return out


def four(root: Path) -> list[Path]:
    """Base, control and two seeds of state passing."""
    return [
        invented(root, "small", "base", 0, base),
        invented(root, "small", "control", 0, lambda *at: base(*at) * 1.1),
        invented(root, "small", "state_passing", 0, repaired(0.0)),
        invented(root, "small", "state_passing", 1, repaired(0.02)),
    ]


def test_comparison_is_paired_over_texts_and_averages_seeds(tmp_path: Path) -> None:
    out = joined(tmp_path, four(tmp_path))
    table = pl.read_parquet(out / "remembrance.parquet").filter(measure="curve")
    assert dict(table.schema) == TABLE_SCHEMA
    tv = table.filter(distance="total_variation", target="T")
    assert set(table["distance"]) == set(DISTANCES)

    def curve(arm: str, seed: int | None, against: str) -> pl.DataFrame:
        chosen = pl.col("seed").is_null() if seed is None else pl.col("seed") == seed
        return tv.filter((pl.col("arm") == arm) & chosen & (pl.col("against") == against)).sort("start")

    expected = np.array([[base(start, "T", number) for start in STARTS] for number in range(len(STRETCHES))])
    value = curve("base", None, "")
    np.testing.assert_allclose(value["value"], expected.mean(axis=0))
    assert (value["low"] <= value["value"]).all()
    assert (value["high"] >= value["value"]).all()
    assert value.filter(start=0).select("value", "low", "high", "band_low", "band_high").row(0) == (0.0,) * 5
    # A paired difference of the same wobble has none of it, the mean over seeds is half way.
    difference = curve("state_passing", None, "base")
    np.testing.assert_allclose(difference["value"], [0.0, 0.06, -0.14, -0.19, 0.01], atol=1e-12)
    assert (difference["high"] - difference["low"]).max() < 1e-9
    np.testing.assert_allclose(curve("state_passing", 1, "base")["value"], [0.0, 0.07, -0.13, -0.18, 0.02], atol=1e-12)
    against = curve("state_passing", 1, "control")
    np.testing.assert_allclose(against["value"], expected.mean(axis=0) * -0.1 + [0.0, 0.07, -0.13, -0.18, 0.02], atol=1e-12)
    assert (against["band_low"] <= against["low"] + 1e-12).all()
    assert set(tv.filter(arm="base")["against"]) == {""}
    assert set(tv.filter(arm="control")["against"]) == {"", "base"}
    counts = table.filter(arm="state_passing").select("n_documents", "n_stretches").unique()
    assert counts.rows() == [(24, 48)]
    assert set(tv["n_tokens"]) == {48}
    assert set(table.filter(target="last 4")["n_tokens"]) == {4 * 48}
    assert set(tv.filter(pl.col("seed").is_null(), pl.col("arm") == "state_passing")["n_seeds"]) == {2}
    # Two seeds: nothing is said of seeds.
    assert table["seeds_low"].null_count() == table.height
    manifest = read_manifest(out)
    assert manifest["interval"] == "90 % bootstrap over 24 documents"
    assert "simultaneous" in manifest["band"]
    assert manifest["broken"] == []


def test_summary_far_share_and_reach(tmp_path: Path) -> None:
    summary = pl.read_parquet(joined(tmp_path, four(tmp_path)) / "remembrance.parquet")
    assert set(summary["measure"]) == {"curve", "far", "far_share", "half_reach"}
    tv = summary.filter(pl.col("distance") == "total_variation", pl.col("seed").is_null())
    far = tv.filter(measure="far", against="base", arm="state_passing").to_dicts()
    assert [(row["start"], row["target"], row["n_tokens"]) for row in far] == [(24, "last 4", 192)]
    assert far[0]["value"] == pytest.approx(-0.19)
    share = tv.filter(measure="far_share", arm="base").to_dicts()[0]
    means = np.array([[base(start, "T", number) for start in STARTS] for number in range(len(STRETCHES))]).mean(axis=0)
    assert share["value"] == pytest.approx(means[3] / means[4])
    assert share["low"] < share["value"] < share["high"]
    # Half of 0.64: reached at start 8 by the base, which leaves 25 tokens, and only at the end by state passing.
    reach = {row["arm"]: row for row in tv.filter(measure="half_reach").to_dicts()}
    assert reach["base"]["value"] == 25.0
    assert reach["state_passing"]["value"] == 1.0
    assert reach["base"]["low"] <= 25.0 <= reach["base"]["high"]


def test_three_seeds_have_an_interval_over_seeds(tmp_path: Path) -> None:
    folders = [invented(tmp_path, "small", "base", None, base)]
    folders += [invented(tmp_path, "small", "state_passing", seed, repaired(0.01 * seed)) for seed in range(3)]
    out = joined(tmp_path, folders, arms=("base", "state_passing"))
    row = pl.read_parquet(out / "remembrance.parquet").filter(
        pl.col("seed").is_null(),
        arm="state_passing",
        against="base",
        start=8,
        target="T",
        distance="total_variation",
        measure="curve",
    )
    low, high = t_interval([-0.15, -0.14, -0.13], 0.9)
    assert row["seeds_low"][0] == pytest.approx(low)
    assert row["seeds_high"][0] == pytest.approx(high)
    # Without a control nothing is held against one.
    assert set(pl.read_parquet(out / "remembrance.parquet")["against"]) == {"", "base"}


def test_a_broken_run_has_no_mean(tmp_path: Path) -> None:
    folders = four(tmp_path)
    broken = {"position": 9, "start": 0, "document": "03", "stretch": 0, "stretches": 1}

    def curve(start: int, target: str, number: int) -> float:
        return math.nan if number == 6 and start == 24 else base(start, target, number)

    folders.append(invented(tmp_path, "large", "base", 0, base))
    folders.append(invented(tmp_path, "large", "control", 0, base))
    folders.append(invented(tmp_path, "large", "state_passing", 0, curve, broken=broken))
    out = joined(tmp_path, folders, models=("small", "large"))
    table = pl.read_parquet(out / "remembrance.parquet")
    lost = table.filter(model="large", arm="state_passing", start=24, measure="curve")
    assert lost.height
    for name in ("value", "low", "high", "band_low", "band_high"):
        assert lost[name].null_count() == lost.height
        assert lost[name].is_nan().sum() == 0
    kept = table.filter(model="large", arm="state_passing", start=8)
    assert kept["value"].null_count() == 0
    assert read_manifest(out)["broken"] == [{"model": "large", "arm": "state_passing", "seed": 0, **broken}]
    far = table.filter(model="large", arm="state_passing", measure="far")
    assert far["value"].null_count() == far.height


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"units": STRETCHES[1:]}, "different texts"),
        ({"starts": (0, 1, 8, 32)}, "different start points"),
        ({"remembrance": {"length": 31}}, "different T"),
        ({"context": 16, "arm": "state_passing", "seed": 7}, "trained on 16 tokens"),
        ({"arm": "state_passing", "seed": 1, "name": "other"}, "which the figure does not show"),
    ],
)
def test_measurements_that_do_not_belong_together(tmp_path: Path, changes: dict, message: str) -> None:
    folders = four(tmp_path)
    changes = dict(changes)
    name, arm, seed = changes.pop("name", "small"), changes.pop("arm", "control"), changes.pop("seed", 1)
    folders.append(invented(tmp_path, name, arm, seed, base, **changes))
    with pytest.raises(FarstateError, match=message):
        joined(tmp_path, folders)


def test_missing_and_doubled_measurements(tmp_path: Path) -> None:
    folders = four(tmp_path)
    with pytest.raises(FarstateError, match="a second measurement of small / control, seed 0"):
        joined(tmp_path, [*folders, folders[1]])
    with pytest.raises(FarstateError, match="no measurement of small / control"):
        joined(tmp_path, [folders[0], *folders[2:]])
    with pytest.raises(FarstateError, match="'base' must be among the arms"):
        joined(tmp_path, folders, arms=("control", "state_passing"))


def test_far_start() -> None:
    assert far_start((0, 1, 24, 25, 26, 32), 32, 8) == 25
    assert far_start((0, 32), 32, 8) is None
    assert far_start((0, 1, 32), 32, 64) is None
