"""States sampled for the comparison: which heads, how they are read, and that a replay meets what the training met."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import TypeAdapter

from farstate import params
from farstate.corpus.store import TokenStore, write_store
from farstate.corpus.tokens import INDEX, INDEX_SCHEMA, TOKENS
from farstate.evaluation.sampled_states import Head, Sampled, StateSet, choose_heads, read_to
from farstate.evaluation.training_states import NO_CHAIN, Met, Replay, Training, choose
from farstate.files import write_manifest
from farstate.models.checkpoints import load_model, save_model
from farstate.models.head import token_nll
from farstate.models.hybrid.shape import HybridConfig
from farstate.models.language_model import LanguageModel
from farstate.models.mamba1.shape import Mamba1Config
from farstate.models.mamba2.shape import Mamba2Config
from farstate.models.rwkv6.shape import RWKV6Config
from farstate.state import LayerState, State
from farstate.training import trainer
from farstate.training.initial_states import NO_AGE
from farstate.training.settings import RunSettings

VOCABULARY, CONTEXT, ROWS, STEPS = 23, 6, 8, 9
CONFIG = Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=VOCABULARY, dt_min=0.01, dt_max=0.2)
ARMS = {
    "zero": {"initial_state": "zero"},
    "noise": {"initial_state": "random_noise", "sigma": 0.3},
    "fitted": {"initial_state": "fitted_noise"},
    "passing": {"initial_state": "state_passing", "reset_probability": 0.3},
    "passing by batch": {"initial_state": "state_passing", "reset_probability": 0.3, "reset_unit": "batch"},
    "passing on": {"initial_state": "state_passing", "reset_probability": 0.3, "previous": "micro_batch"},
    "tbtt": {"initial_state": "tbtt"},
    "tbtt kept": {"initial_state": "tbtt", "at_document_end": "keep"},
    "joint": {"initial_state": "gaussian", "scope": "joint", "reset_probability": 0.3},
    "heads": {"initial_state": "gaussian", "scope": "head", "reset_probability": 0.3},
    "permuted": {"initial_state": "permuted", "reset_probability": 0.3},
}


def text(length: int, phase: int) -> np.ndarray:
    return ((np.arange(length, dtype=np.int64) + phase) ** 2 * 7 + np.arange(length) // 3) % VOCABULARY


def make_store(root: Path, lengths: dict[str, list[int]]) -> Path:
    """A store of one shard, written as `write_tokens` would; `lengths` by split."""
    (root / "shard").mkdir(parents=True)
    given = [(split, length) for split, of_split in lengths.items() for length in of_split]
    documents = [text(length, number) for number, (_, length) in enumerate(given)]
    offsets = np.cumsum([0] + [len(document) for document in documents[:-1]])
    rows = [
        {"id": f"{number:064x}", "split": split, "source": "made", "title": str(number), "pile_set_name": None}
        | {"bytes": length, "offset": int(offset), "length": length}
        for number, ((split, length), offset) in enumerate(zip(given, offsets, strict=True))
    ]
    np.concatenate(documents).astype("<u2").tofile(root / "shard" / TOKENS)
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), root / "shard" / INDEX)
    contents = {"dtype": "uint16", "vocabulary_size": VOCABULARY, "tokens": sum(map(len, documents))}
    write_manifest(root / "shard", contents, [TOKENS, INDEX])
    write_store([root / "shard"], VOCABULARY, root / "store")
    return root / "store"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("shift_states")
    make_store(root, {"train": [60 + 30 * number for number in range(10)], "test": [80, 120, 90, 200]})
    save_model(LanguageModel(CONFIG, torch.Generator().manual_seed(0)), root / "base")
    return root


@pytest.fixture(scope="module")
def store(folder) -> TokenStore:
    return TokenStore(folder / "store")


def record(arm: str, micro_batches: int = 1) -> dict:
    recipe = params.Recipe(
        batch_tokens=ROWS * CONTEXT, micro_batches=micro_batches, peak_learning_rate=1e-30, final_learning_rate=0.0, warmup=0.0
    )
    given = TypeAdapter(params.Arm).validate_python(ARMS[arm])
    return {
        "arm": given.model_dump(mode="json"),
        "steps": STEPS,
        "seed": 5,
        "stretch_tokens": 18,
        "recipe": recipe.model_dump(mode="json"),
        "context": CONTEXT,
    }


# --- heads and states ------------------------------------------------------------------------------------


def state_of(heads: list[int], entries: int = 3) -> State:
    return State(tuple(LayerState(torch.zeros(1, count, entries if count else 0)) for count in heads))


def test_heads_are_spread_evenly_over_the_layers_that_have_them():
    state = state_of([4, 0, 4, 2])
    assert choose_heads(state, 64, np.random.default_rng(0)) == tuple(
        Head(layer, head) for layer, count in ((0, 4), (2, 4), (3, 2)) for head in range(count)
    )
    for seed in range(5):
        chosen = choose_heads(state, 7, np.random.default_rng(seed))
        counts = [sum(head.layer == layer for head in chosen) for layer in range(4)]
        assert counts[1] == 0
        assert counts[3] == 2
        assert sorted(counts[:1] + counts[2:3]) == [2, 3]
        assert len(set(chosen)) == 7
    assert len({choose_heads(state, 7, np.random.default_rng(seed)) for seed in range(9)}) > 1
    assert choose_heads(state_of([0]), 5, np.random.default_rng(0)) == ()
    assert {head.layer for head in choose_heads(state_of([2] * 9), 4, np.random.default_rng(0))} <= set(range(9))


def test_a_set_of_states_gives_back_what_was_written(tmp_path):
    heads = (Head(0, 1), Head(2, 0))
    like = State((LayerState(torch.zeros(1, 2, 3)), LayerState(torch.zeros(1, 1, 0)), LayerState(torch.zeros(1, 1, 2, 4))))
    states = StateSet(heads, like, 5, tmp_path)
    generator = torch.Generator().manual_seed(0)
    given = like.map(lambda tensor: torch.randn(5, *tensor.shape[1:], generator=generator))
    order = np.array([3, 0, 4, 1, 2])
    states.write(order[:2], given.select([0, 1]))
    states.write(order[2:], given.select([2, 3, 4]))
    labels = np.arange(5)
    sampled = Sampled(states, labels, np.array(list("aabbc")), labels, labels, labels, labels)
    for number, (layer, head) in enumerate(heads):
        np.testing.assert_array_equal(sampled.values(number)[order], given.entries(layer)[:, head].numpy())
        np.testing.assert_array_equal(sampled.take(np.array([4, 1])).values(number), sampled.values(number)[[4, 1]])
    assert sampled.take(np.array([4, 1])).documents.tolist() == ["c", "a"]
    assert not list(tmp_path.iterdir()), "nothing is left that could be left behind"


@pytest.mark.parametrize("segment_tokens", [3])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        Mamba1Config(width=8, layers=2, state_size=4, vocabulary_size=VOCABULARY),
        RWKV6Config(width=16, layers=2, heads=2, mix_rank=4, decay_rank=4, ffn_width=16, vocabulary_size=VOCABULARY),
        HybridConfig(
            width=16, layers=2, state_size=8, head_size=8, attention_every=2, attention_heads=2, attention_window=4,
            vocabulary_size=VOCABULARY,
        ),
    ],
    ids=lambda value: getattr(value, "architecture", str(value)),
)  # fmt: skip
def test_states_after_so_many_tokens(config, segment_tokens):
    model = LanguageModel(config, dtype=torch.float64).eval()
    tokens = torch.randint(0, VOCABULARY, (5, 9), generator=torch.Generator().manual_seed(1))
    positions = np.array([9, 1, 4, 4, 7])
    with torch.no_grad():
        _, initial = model(tokens.flip(1))
    found: dict[int, State] = {}

    def keep(rows: np.ndarray, state: State) -> None:
        found.update({int(row): state.select([place]) for place, row in enumerate(rows)})

    for start in (None, initial):
        found.clear()
        read_to(model, tokens, positions, start, keep, segment_tokens=segment_tokens)
        assert sorted(found) == list(range(5))
        for row, position in enumerate(positions):
            with torch.no_grad():
                _, expected = model(tokens[row : row + 1, :position], None if start is None else start.select([row]))
            for layer in range(len(expected)):
                torch.testing.assert_close(found[row].entries(layer), expected.entries(layer), rtol=1e-9, atol=1e-12)


# --- replays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arm", "micro_batches"), [*((arm, 1) for arm in ARMS if arm != "zero"), ("passing on", 2), ("permuted", 2)]
)
def test_a_replay_meets_what_the_training_met(folder, store, tmp_path, arm, micro_batches):
    """A training whose rate is next to zero ends with the weights it began with: ages and losses must be those it recorded."""
    given = record(arm, micro_batches)
    trainer.posttrain(
        checkpoint=folder / "base", context=CONTEXT, steps=STEPS, seed=given["seed"], arm=TypeAdapter(params.Arm).validate_python(ARMS[arm]),
        stretch_tokens=given["stretch_tokens"], recipe=params.Recipe.model_validate(given["recipe"] | {"betas": (0.9, 0.95)}),
        store=store, output=tmp_path / "out", scratch=tmp_path / "scratch", settings=RunSettings(device="cpu", threads=1), key="k",
    )  # fmt: skip
    model = load_model(tmp_path / "out", device="cpu").eval()
    wanted = STEPS * ROWS  # so many that no row is left out
    replay = Replay(store, "train", Training.from_json(given), CONTEXT, wanted)
    met = replay.met()
    assert len(met) == STEPS * ROWS

    recorded = pl.read_parquet(tmp_path / "out" / "ages.parquet")
    counted = {(row["step"], NO_AGE if row["age"] is None else row["age"]): row["sequences"] for row in recorded.to_dicts()}
    steps, counts = np.unique(np.stack([met.step + 1, met.age]), axis=1, return_counts=True)
    assert {(int(step), int(age)): int(count) for (step, age), count in zip(steps.T, counts, strict=True)} == counted

    # The states after all T tokens of each window, and with them the losses: written down again, directly.
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    states = StateSet([Head(1, 0)], model.zero_state(1), len(met), tmp_path)
    replay.read(model, met, np.full(len(met), CONTEXT), states, segment_tokens=4)
    intervention = replay._intervention(model.zero_state)
    number = 0
    for step in range(STEPS):
        total = 0.0
        for part_number, part in enumerate(replay.parts(step)):
            with torch.no_grad():
                hidden, final = model(part.tokens[:, :-1], intervention.initial(step, part, part_number))
                total += float(token_nll(hidden, model.head_weight, part.tokens[:, 1:], VOCABULARY).mean()) / replay.micro_batches
            intervention.observe(final, part_number)
            rows = np.arange(number, number + len(part.fresh))
            np.testing.assert_allclose(states.rows(0, rows), final.entries(1)[:, 0].numpy(), rtol=1e-4, atol=1e-6)
            number += len(part.fresh)
        assert total == pytest.approx(losses[step], rel=1e-5)


def test_a_kept_state_chains_the_documents_that_its_row_read(store):
    """Under `keep` all windows of a row are one chain from the first step on; under `reset` none is chained."""
    for arm, chained in (("tbtt kept", True), ("tbtt", False)):
        met = Replay(store, "train", Training.from_json(record(arm)), CONTEXT, STEPS * ROWS).met()
        assert ((met.chain == met.row) if chained else (met.chain == NO_CHAIN)).all()
        assert (met.age == met.step * CONTEXT).all() == chained
    assert max(np.unique(met.document[met.row == row]).size for row in range(ROWS)) > 1


def test_the_first_rows_alone_have_the_states_of_the_whole_batch(store, tmp_path):
    model = LanguageModel(CONFIG, torch.Generator().manual_seed(0)).eval()
    training = Training.from_json(record("passing", 2))
    whole, few = (Replay(store, "train", training, CONTEXT, wanted) for wanted in (10_000, 3))
    assert (whole.rows, few.rows) == (ROWS, 3)
    met, less = whole.met(), few.met()
    same = np.flatnonzero(met.row < 3)
    for name in ("step", "document", "age"):
        np.testing.assert_array_equal(getattr(met, name)[same], getattr(less, name))
    sets = []
    for replay, windows in ((whole, met.take(same)), (few, less)):
        states = StateSet([Head(0, 1), Head(1, 0)], model.zero_state(1), len(windows), tmp_path)
        replay.read(model, windows, 1 + np.arange(len(windows)) % CONTEXT, states, segment_tokens=64)
        sets.append(states)
    rows = np.arange(len(less))
    for head in range(2):
        np.testing.assert_allclose(sets[0].rows(head, rows), sets[1].rows(head, rows), rtol=1e-5, atol=1e-7)


def test_rows_that_depend_on_each_other_are_all_replayed(store):
    for arm, rows in (
        ("fitted", ROWS),
        ("tbtt", ROWS),
        ("passing on", ROWS),
        ("permuted", ROWS),
        ("zero", 1),
        ("noise", 1),
        ("passing", 1),
    ):
        assert Replay(store, "train", Training.from_json(record(arm)), CONTEXT, 1).rows == rows


def test_another_split_is_read_for_all_steps_with_fewer_rows_where_they_are_independent(store):
    windows = sum((length - 1) // CONTEXT for length in (80, 120, 90, 200))
    for steps, rows_apart in ((20, (20, 3)), (100, (windows, 1))):
        assert windows // ROWS < steps
        for arm, (expected, rows) in (("passing", rows_apart), ("tbtt", (windows // ROWS, ROWS))):
            replay = Replay(store, "test", Training.from_json(record(arm) | {"steps": steps}), CONTEXT, 10_000)
            assert (replay.steps, replay.rows) == (expected, rows)
            assert len(replay.met()) == expected * rows
    # Initial states get as old as those of the training do.
    ages = [
        Replay(store, "test", Training.from_json(record("passing") | {"steps": n}), CONTEXT, 10_000).met().age for n in (5, 70)
    ]
    assert ages[1].max() > ages[0].max()
    assert Replay(store, "validation", Training.from_json(record("passing")), CONTEXT, 10).steps == 0


def test_a_chain_is_what_was_read_since_the_state_was_zero(store):
    met = Replay(store, "train", Training.from_json(record("passing")), CONTEXT, 10_000).met()
    for chain in np.unique(met.chain):
        mine = met.take(np.flatnonzero(met.chain == chain))
        assert mine.age.tolist() == [CONTEXT * number for number in range(len(mine))]
        assert len(set(mine.row.tolist())) == 1
        assert mine.step.tolist() == list(range(mine.step[0], mine.step[0] + len(mine)))
    for arm in ("zero", "tbtt", "fitted"):
        assert (Replay(store, "train", Training.from_json(record(arm)), CONTEXT, 10_000).met().chain == NO_CHAIN).all()


def test_the_choice_keeps_documents_and_chains_in_one_fold_and_the_law_as_it_is():
    generator = np.random.default_rng(0)
    count = 30_000
    document = generator.choice(4, size=count, p=[0.5, 0.3, 0.15, 0.05])
    number = np.arange(count)
    met = Met(number, number, number, document, 6 * (number % 5), number // 5)
    folds = {0: 0, 1: 1, 2: 2, 3: 2}
    chosen = choose(met, 4000, folds, 3, None, 7)
    assert len(chosen) == 4000
    assert (np.diff(chosen.step) > 0).all(), "in the order of reading"
    fold = np.array([folds[int(d)] for d in chosen.document])
    for chain in np.unique(chosen.chain):
        assert len(set(fold[chosen.chain == chain].tolist())) == 1
    shares = np.bincount(chosen.document) / 4000
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(np.bincount(chosen.age // 6) / 4000, 0.2, atol=0.03)
    # Without chains nothing is lost; a quota bounds each document.
    unchained = Met(number, number, number, document, 0 * number, np.full(count, NO_CHAIN))
    assert len(choose(unchained, count, folds, 3, None, 7)) == count
    bounded = choose(unchained, count, folds, 3, {0: 5, 3: 2}, 7)
    assert np.bincount(bounded.document).tolist() == [5, 0, 0, 2]
    np.testing.assert_array_equal(choose(met, 100, folds, 3, None, 7).step, choose(met, 100, folds, 3, None, 7).step)
