"""The stage of shifts from end to end on a tiny model: tables against direct computations, swaps, reasons where there is no number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

from farstate import params
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation import shift as shift_module
from farstate.evaluation.perplexity import EvaluationSettings, measure
from farstate.evaluation.sampled_states import Head, StateSet
from farstate.evaluation.shift import default_positions, evaluate_shift, positions_of, summary
from farstate.evaluation.swap_effects import explains
from farstate.evaluation.swaps import Swap, continued_nll, donors, plan, replaced, swapped_nll
from farstate.evaluation.texts import select
from farstate.files import read_manifest
from farstate.models.checkpoints import load_model, save_model
from farstate.models.head import token_nll
from farstate.models.hybrid.shape import HybridConfig
from farstate.models.language_model import LanguageModel
from farstate.models.mamba1.shape import Mamba1Config
from farstate.models.mamba2.shape import Mamba2Config
from farstate.params import Evaluate
from test_shift_states import ARMS, CONFIG, CONTEXT, VOCABULARY, make_store, record

SETTINGS = EvaluationSettings(device="cpu", threads=1, rows=7, segment_tokens=16)
LENGTH = 40
LABELS = {"model": "tiny", "arm": "base", "seed": 0}


def shift_of(**changes) -> params.Shift:
    given = {
        **{"length": LENGTH, "minimum_states": 20, "reference_states": 60, "neighbours": 2, "components": 4},
        **{"projections": 8, "folds": 3, "resamples": 100, "swap_heads": 2, "heads": 4},
    }
    return params.Shift(**(given | changes))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shift")
    make_store(root, {"train": [70 + 25 * number for number in range(9)], "test": [90 + 40 * number for number in range(8)]})
    save_model(LanguageModel(CONFIG, torch.Generator().manual_seed(0)), root / "base")
    return root


def run(root: Path, output: Path, arm: str | None = None, checkpoint: Path | None = None, **changes) -> dict:
    training = None if arm is None else record(arm) | {"seed": 3}
    evaluate_shift(
        checkpoint=checkpoint or root / "base",
        store_directory=root / "store",
        shift=shift_of(**changes),
        context=CONTEXT,
        labels=LABELS,
        training=training,
        output=output,
        settings=SETTINGS,
        scratch=output / "scratch",
    )
    tables = {name: pl.read_parquet(output / f"{name}.parquet") for name in ("shift", "association", "swaps")}
    assert not list((output / "scratch").iterdir()), "temporary files are removed"
    return {**tables, "manifest": read_manifest(output, verify=True)}


@pytest.fixture(scope="module")
def base(root, tmp_path_factory) -> dict:
    return run(root, tmp_path_factory.mktemp("base"))


def test_tables_and_manifest(base):
    table, manifest = base["shift"], base["manifest"]
    assert dict(table.schema) == shift_module.SHIFT_SCHEMA
    assert dict(base["association"].schema) == shift_module.ASSOCIATION_SCHEMA
    assert dict(base["swaps"].schema) == shift_module.SWAPS_SCHEMA
    heads, positions = 4, [6, 24, 37]
    assert manifest["positions"] == positions
    assert manifest["heads_of_model"] == CONFIG.layers * 4
    assert table.height == heads * len(positions) * 2 * 4
    assert table["reason"].null_count() == table.height
    assert table.filter(pl.col("measure").is_in(["accuracy", "auc"]))["value"].is_between(0.0, 1.0).all()
    assert (table["low"] <= table["high"]).all()
    assert (table["null_low"] <= table["null_high"]).all()
    assert (table["null_end_low"] <= table["null_end_high"]).all()
    expected = (table["low"] > table["null_high"]) & (table["low"] > table["null_end_high"])
    assert table["beyond"].equals(expected.alias("beyond"))
    # A model that was trained from zero alone met zero starts.
    columns = ["layer", "head", "position", "measure"]
    own, zero = (table.filter(pl.col("reference") == name).sort(columns) for name in ("own training", "zero start"))
    assert own.drop("reference").equals(zero.drop("reference"))
    assert len(manifest["summary"]) == 2 * 4 * len(positions)
    assert manifest["broken_at"] is None


def test_the_same_call_gives_the_same_tables_whatever_the_batches(root, base, tmp_path):
    evaluate_shift(
        checkpoint=root / "base", store_directory=root / "store", shift=shift_of(), context=CONTEXT, labels=LABELS, training=None,
        output=tmp_path, settings=EvaluationSettings(device="cpu", threads=1, rows=3, segment_tokens=5),
    )  # fmt: skip
    for name in ("shift", "swaps"):
        again = pl.read_parquet(tmp_path / f"{name}.parquet")
        for column in ("value", "null"):
            if column in again.columns:
                np.testing.assert_allclose(
                    again[column].cast(pl.Float64).fill_null(-1).to_numpy(),
                    base[name][column].fill_null(-1).to_numpy(),
                    rtol=2e-3,
                    atol=2e-3,
                )


def test_the_excess_is_that_of_the_evaluation(root, base):
    """Over the tokens after the swap position: carried less window, as `farstate.evaluation.perplexity` measures both."""
    store = TokenStore(root / "store")
    evaluate = Evaluate(length=LENGTH, stretches_per_document=16, bins_per_octave=1)
    texts = select(store, evaluate)
    model = load_model(root / "base", device="cpu").eval()
    losses = measure(model, store, texts, evaluate, CONTEXT, SETTINGS)
    position, step = 37, 3
    # The windows of the evaluation start at multiples of 3; that of the swap at 37 + 3 − 6 = 34: compare where they agree.
    expected = losses.positions["carried"].read(position + 1, step).mean()
    window = []
    for text in texts:
        tokens = torch.from_numpy(text.read(store, position + step - CONTEXT, CONTEXT + 1))[None]
        with torch.no_grad():
            hidden, _ = model(tokens[:, :-1])
            window.append(float(token_nll(hidden[:, -step:], model.head_weight, tokens[:, -step:], VOCABULARY).mean()))
    untouched = base["swaps"].filter(pl.col("group") == "untouched").row(0, named=True)
    assert untouched["value"] == pytest.approx(expected - np.mean(window), abs=1e-6)
    # At T_train, the window is one of the evaluation's: both agree exactly.
    reference = losses.positions["window"].read(CONTEXT + 1, step).mean()
    at_edge = run_excess(root, model, store, texts)
    assert at_edge == pytest.approx(losses.positions["carried"].read(CONTEXT + 1, step).mean() - reference, abs=1e-6)


def run_excess(root: Path, model: LanguageModel, store: TokenStore, texts: list) -> float:
    from farstate.evaluation.shift_states import Measurement

    shift = shift_of()
    held = Measurement(model, store, texts, shift, CONTEXT, (CONTEXT,), CONTEXT, SETTINGS, root, lambda *_: None)
    return float(held.carried().excess[:, 0].mean())


@pytest.mark.parametrize("arm", ["passing", "tbtt"])
def test_arms_are_held_against_their_own_training(root, base, tmp_path, arm):
    found = run(root, tmp_path, arm, heads=2, minimum_states=10)
    own, zero = (
        found["shift"].filter(pl.col("reference") == name)["value"].to_numpy() for name in ("own training", "zero start")
    )
    assert np.isfinite(own).all()
    assert not np.allclose(own, zero)
    facts = found["manifest"]["references"]["own training"]
    assert facts["initial_state"] == ARMS[arm]["initial_state"]
    assert facts["null_states"]
    assert facts["null_end_states"] == facts["null_states"][0]
    assert found["shift"]["null_end_high"].null_count() == 0
    assert (facts["chains"] > 0) == (arm == "passing")
    if arm in ("passing", "tbtt"):
        assert facts["age_largest"] > CONTEXT


@pytest.mark.parametrize(
    "config",
    [
        Mamba1Config(width=8, layers=2, state_size=4, vocabulary_size=VOCABULARY),
        HybridConfig(
            width=16, layers=2, state_size=8, head_size=8, attention_every=2, attention_heads=2, attention_window=4,
            vocabulary_size=VOCABULARY,
        ),
    ],
    ids=lambda config: config.architecture,
)  # fmt: skip
def test_other_architectures(root, tmp_path, config):
    """A channel is a head in Mamba-1; the hybrid's attention layer has no recurrence and its cache goes along with a swapped state."""
    save_model(LanguageModel(config, torch.Generator().manual_seed(0)), tmp_path / "model")
    found = run(root, tmp_path / "out", "passing", checkpoint=tmp_path / "model", heads=2, minimum_states=10)
    assert found["shift"]["reason"].null_count() == found["shift"].height
    layers = {0, 1} if config.architecture == "mamba1" else {0}
    assert set(found["shift"]["layer"]) == layers
    assert found["manifest"]["heads_of_model"] == (32 if config.architecture == "mamba1" else 4)
    assert found["swaps"].filter(pl.col("group") == "all")["value"].null_count() == 0


def test_control_met_zero_starts(root, base, tmp_path):
    assert run(root, tmp_path, "zero")["shift"].equals(base["shift"])


def test_too_few_states_give_reasons_and_no_number(root, tmp_path):
    found = run(root, tmp_path, minimum_states=5000)
    assert found["shift"]["value"].null_count() == found["shift"].height
    assert found["shift"]["reason"].str.contains("60 training states; a test needs 5000").all()
    assert found["association"]["value"].null_count() == found["association"].height
    assert found["swaps"]["value"].null_count() == found["swaps"].height - 1, "the excess itself is known"
    assert found["manifest"]["swaps"]["explains"]["together"] is None


def test_one_document_on_a_side_has_no_test_across_documents(tmp_path):
    make_store(tmp_path, {"train": [300, 280, 260], "test": [2000]})
    save_model(LanguageModel(CONFIG, torch.Generator().manual_seed(0)), tmp_path / "base")
    found = run(tmp_path, tmp_path / "out", stretches_per_document=60, heads=2)
    table = found["shift"]
    classified = table.filter(pl.col("measure").is_in(["accuracy", "auc"]))
    assert classified["value"].null_count() == classified.height
    assert classified["reason"].str.contains("one document on a side").all()
    assert table.filter(pl.col("measure") == "novelty")["value"].null_count() == 0
    assert table["interval"].drop_nulls().str.contains("says nothing about other documents").all()
    foreign = found["swaps"].filter(pl.col("source") == "other document")
    assert foreign["reason"].str.contains("no state of another document").all()
    assert found["association"]["reason"].str.contains("documents; a rank correlation needs|heads were swapped").all()


def test_a_broken_model_is_reported_where_it_breaks(root, tmp_path):
    model = LanguageModel(CONFIG, torch.Generator().manual_seed(0))
    with torch.no_grad():
        # The last symbol of the vocabulary poisons; it appears from some position on in every text.
        model.backbone.embedding.weight[0] = float("nan")
    save_model(model, tmp_path / "broken")
    found = run(root, tmp_path / "out", checkpoint=tmp_path / "broken")
    assert found["shift"]["value"].null_count() == found["shift"].height
    assert found["shift"]["reason"].str.contains("not finite").all()
    assert found["manifest"]["broken_at"] is not None


def test_states_that_are_not_finite_are_named(root, monkeypatch, tmp_path):
    """One text's state of one head at one position: there is no number there, and everything else stays."""
    texts = select(TokenStore(root / "store"), shift_of())
    real, calls = StateSet.rows, []

    def spoilt(self: StateSet, number: int, at: np.ndarray) -> np.ndarray:
        values = real(self, number, at).copy()
        if number == 0 and self.count == len(texts) and len(at) == len(texts):
            calls.append(0)
            if len(calls) == 2:  # the first head's sets come in the order of positions
                values[4, 0] = np.nan
        return values

    monkeypatch.setattr(StateSet, "rows", spoilt)
    table = run(root, tmp_path, heads=2)["shift"].filter(pl.col("reference") == "own training")
    lost = table.filter(pl.col("reason").is_not_null())
    assert lost.height == 4
    assert set(lost["position"]) == {24}
    named = (
        f"not finite at position 24 in 1 of {len(texts)} texts, first in document {texts[4].document}, stretch {texts[4].stretch}"
    )
    assert lost["reason"].str.contains(named, literal=True).all()
    assert table.height - table["value"].null_count() == 2 * 3 * 4 - 4


# --- positions ----------------------------------------------------------------------------------------------


def test_positions():
    assert default_positions(32, 2048) == (32, 128, 512, 2032)
    assert default_positions(6, 8) == (5,)
    assert positions_of(shift_of(positions=(30, 6), swap_position=12), CONTEXT) == ((6, 12, 30), 12)
    assert positions_of(shift_of(), CONTEXT)[1] == 37
    for changes, key in (
        ({"positions": (38,)}, "positions"),
        ({"swap_position": 39}, "swap_position"),
        ({"length": 3}, "length"),
    ):
        with pytest.raises(FarstateError, match=rf"shift\.{key}: "):
            positions_of(shift_of(**changes), CONTEXT)


def test_a_vocabulary_that_does_not_fit_is_refused(root, tmp_path):
    small = LanguageModel(Mamba2Config(width=16, layers=1, state_size=4, head_size=8, vocabulary_size=11))
    save_model(small, tmp_path / "small")
    with pytest.raises(FarstateError, match="knows 11 symbols"):
        run(root, tmp_path / "out", checkpoint=tmp_path / "small")


# --- swaps --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_layer() -> LanguageModel:
    """One layer: its convolution's columns depend on the last tokens alone, so that only the recurrent state tells where they began."""
    model = LanguageModel(CONFIG.model_copy(update={"layers": 1}), torch.Generator().manual_seed(4)).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def test_swapping_a_state_for_itself_changes_nothing_and_for_a_zero_start_gives_that_runs_loss(one_layer, tmp_path):
    tokens = torch.randint(0, VOCABULARY, (5, 30), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        _, carried = one_layer(tokens[:, :20])
        _, late = one_layer(tokens[:, 10:20])
    heads = tuple(Head(0, head) for head in range(carried.entries(0).shape[1]))
    sets = []
    for state in (carried, late):
        states = StateSet(heads, carried, 5, tmp_path)
        states.write(np.arange(5), state)
        sets.append(states)
    swaps = [
        Swap("all", tuple(range(len(heads))), "other document"),
        Swap("all", tuple(range(len(heads))), "training state"),
        Swap("top", (1,), "training state"),
    ]
    sources = {"other document": sets[0], "training state": sets[1]}
    same = {"other document": np.arange(5), "training state": np.arange(5)}
    found = swapped_nll(one_layer, tokens[:, 20:], carried, np.arange(5), swaps, sources, same, VOCABULARY, 4)
    untouched = continued_nll(one_layer, tokens[:, 20:], carried, VOCABULARY, 4)
    from_late = continued_nll(one_layer, tokens[:, 20:], late, VOCABULARY, 4)
    with torch.no_grad():
        hidden, _ = one_layer(tokens[:, :-1])
        whole = token_nll(hidden[:, 20:], one_layer.head_weight, tokens[:, 21:], VOCABULARY).mean(1)
    np.testing.assert_allclose(untouched, whole.numpy(), atol=1e-5)
    np.testing.assert_allclose(found[0], untouched, atol=1e-6)
    np.testing.assert_allclose(found[1], from_late, atol=1e-5)
    assert np.abs(from_late - untouched).max() > 1e-4
    assert np.abs(found[2] - untouched).max() > 1e-7
    # Without a donor there is no number, and the others keep theirs.
    some = {"other document": np.array([-1, 1, 2, 3, 4]), "training state": np.arange(5)}
    missing = swapped_nll(one_layer, tokens[:, 20:], carried, np.arange(5), swaps[:1], sources, some, VOCABULARY, 4)
    assert np.isnan(missing[0, 0])
    np.testing.assert_allclose(missing[0, 1:], untouched[1:], atol=1e-6)


def test_only_the_heads_named_are_replaced(one_layer):
    with torch.no_grad():
        _, state = one_layer(torch.arange(12).reshape(2, 6))
    before = state.entries(0).clone()
    other = replaced(state, [(Head(0, 2), torch.full((2, before.shape[2]), 7.0))])
    assert (other.entries(0)[:, 2] == 7.0).all()
    keep = [head for head in range(before.shape[1]) if head != 2]
    assert torch.equal(other.entries(0)[:, keep], before[:, keep])
    assert torch.equal(state.entries(0), before), "the original stays"
    assert torch.equal(other.layers[0].auxiliary["conv"], state.layers[0].auxiliary["conv"])


def test_groups_of_heads():
    drift = np.array([0.1, 5.0, np.nan, 3.0, 2.0, 0.5, 4.0])
    swaps = plan(drift, 2, 7, np.random.default_rng(0))
    trained = [swap for swap in swaps if swap.source == "training state"]
    assert len(swaps) == 2 * len(trained)
    top = [swap.heads for swap in trained if swap.group == "top"]
    assert top == [(1,), (6,), (1, 6)]
    at_random = [swap.heads for swap in trained if swap.group == "random"]
    assert len(at_random) == 3
    assert not {1, 2, 6} & {head for members in at_random for head in members}
    assert trained[-1] == Swap("all", tuple(range(7)), "training state")
    assert [swap.group for swap in plan(drift[:2], 5, 2, np.random.default_rng(0))][:3] == ["top", "top", "top"]


def test_donors_are_of_other_documents():
    names = ["a", "a", "b", "c"] * 5
    chosen = donors(names, 30, np.random.default_rng(0))
    assert all(names[text] != names[donor] for text, donor in enumerate(chosen["other document"]))
    assert chosen["training state"].max() < 30
    assert (donors(["a", "a"], 3, np.random.default_rng(0))["other document"] == -1).all()


def effects(excess, top, contrast, against_foreign) -> list[dict]:
    def row(group, source, together, ends):
        value = None if ends is None else 0.2
        low, high = ends or (None, None)
        return {"group": group, "source": source, "together": together, "layer": None, "value": value, "low": low, "high": high}

    return [
        row("untouched", "none", False, excess),
        row("top", "training state", True, top),
        row("top − random", "training state", True, contrast),
        row("top", "training state − other document", True, against_foreign),
    ]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (((0.1, 0.3), (-0.3, -0.1), (-0.2, -0.1), (-0.2, -0.1)), True),
        (((0.1, 0.3), (-0.3, 0.1), (-0.2, -0.1), (-0.2, -0.1)), False),
        (((0.1, 0.3), (-0.3, -0.1), (-0.2, 0.1), (-0.2, -0.1)), False),
        (((0.1, 0.3), (-0.3, -0.1), (-0.2, -0.1), (-0.2, 0.1)), False),
        (((-0.1, 0.3), (-0.3, -0.1), (-0.2, -0.1), (-0.2, -0.1)), False),
        (((0.1, 0.3), (-0.3, -0.1), None, (-0.2, -0.1)), None),
        (((0.1, 0.3), (-0.3, -0.1), (None, None), (-0.2, -0.1)), None),
        (((0.1, 0.3), (float("nan"), float("nan")), (-0.2, -0.1), (-0.2, -0.1)), None),
        (((None, None), (-0.3, -0.1), (-0.2, -0.1), (-0.2, -0.1)), None),
        (((float("nan"), float("nan")), (-0.3, -0.1), (-0.2, -0.1), (-0.2, -0.1)), None),
    ],
)
def test_explains_is_said_only_when_every_part_shows_it(ends, expected):
    verdict = explains(effects(*ends))
    assert verdict["together"] is expected
    assert verdict["alone"] is None
    known = ends[0][0] is not None and np.isfinite(ends[0][0])
    assert verdict["excess"] is (ends[0][0] > 0.0 if known else None)


def test_summaries_count_heads_above_their_band():
    def row(value, low, null_high, end=1.0):
        return {
            **{"reference": "own training", "measure": "novelty", "position": 8, "value": value, "low": low, "high": low + 1},
            **{"null": 1.0, "null_low": 0.9, "null_high": null_high},
            **{"null_end": 1.0, "null_end_low": 0.9, "null_end_high": end},
        }

    missing = {"reference": "own training", "measure": "novelty", "position": 8, "reason": "x"}
    (found,) = summary([row(3.0, 2.5, 1.1), row(1.2, 1.0, 1.1), row(5.0, 4.0, float("nan")), missing])
    assert (found["median"], found["largest"], found["heads"], found["known"]) == (3.0, 5.0, 4, 3)
    assert (found["with_band"], found["above"]) == (2, 1)
    (found,) = summary([row(3.0, 2.5, 1.1, 2.6), row(3.0, 2.5, 1.1, 2.4), row(3.0, 2.5, 1.1, float("nan")), missing])
    assert (found["with_band"], found["above"], found["null_end_high"]) == (2, 1, None)
    json.dumps(found, allow_nan=False)
