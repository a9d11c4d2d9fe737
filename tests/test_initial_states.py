"""The interventions by themselves: what they hand out, what they keep, and that nothing else influences it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import get_args

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from farstate import params
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.state import State
from farstate.training.initial_states import NO_AGE, Intervention, Run, build

ROWS, CONTEXT = 8, 5
MODEL = LanguageModel(Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=11))
ARMS = (
    {"initial_state": "zero"},
    {"initial_state": "random_noise", "sigma": 0.5},
    {"initial_state": "fitted_noise"},
    {"initial_state": "state_passing", "reset_probability": 0.4},
    {"initial_state": "tbtt"},
    {"initial_state": "gaussian", "scope": "joint", "reset_probability": 0.4},
    {"initial_state": "gaussian", "scope": "head", "reset_probability": 0.4},
    {"initial_state": "permuted", "reset_probability": 0.4},
)
MADE = [arm for arm in ARMS if arm["initial_state"] in ("gaussian", "permuted")]


def name_of(arm: dict) -> str:
    return "-".join(str(arm[key]) for key in ("initial_state", "scope") if key in arm)


@dataclass
class Rows:
    tokens: torch.Tensor
    fresh: torch.Tensor


def make(arm: dict, micro_batches: int = 1, rows: int = ROWS, seed: int = 3) -> Intervention:
    return build(TypeAdapter(params.Arm).validate_python(arm), Run(seed, rows, micro_batches, CONTEXT, MODEL.zero_state))


def rows(count: int = ROWS, fresh: list[bool] | None = None) -> Rows:
    return Rows(torch.zeros(count, CONTEXT + 1, dtype=torch.int64), torch.tensor(fresh or [False] * count))


def final(number: int, count: int = ROWS) -> State:
    """A state that tells its rows apart: every entry of row i is 100 · number + i + 1, the recurrent one by layer and head too."""
    marks = 100.0 * number + torch.arange(1, count + 1, dtype=torch.float32)
    return MODEL.zero_state(count).map(lambda tensor: tensor + marks.view(-1, *(1,) * (tensor.dim() - 1)))


def random_state(seed: int, count: int = ROWS) -> State:
    generator = torch.Generator().manual_seed(seed)
    state = MODEL.zero_state(count)
    for layer in range(len(state)):
        entries = state.entries(layer)
        heads = torch.arange(1, entries.shape[1] + 1)[:, None]
        state = state.with_entries(layer, torch.randn(entries.shape, generator=generator) * heads + 3 * heads * (layer + 1))
    return state


def equal(left: State | None, right: State | None) -> bool:
    left, right = (state if state is not None else MODEL.zero_state(ROWS) for state in (left, right))
    return all(
        torch.equal(a, b)
        for mine, other in zip(left.layers, right.layers, strict=True)
        for a, b in zip(mine.tensors(), other.tensors(), strict=True)
    )


def marks(state: State | None) -> list[float]:
    """The mark of each row, the same in every recurrent entry."""
    assert state is not None
    for layer in range(len(state)):
        entries = state.entries(layer).flatten(1)
        assert torch.equal(entries, entries[:, :1].expand_as(entries))
    return state.entries(0)[:, 0, 0].tolist()


@pytest.mark.parametrize("name", params.ARMS)
def test_options_and_defaults_are_those_of_the_parameters(name):
    """What one writes in Python and in params.yaml is the same, and means the same where it is left out."""
    parameters, where = params.ARMS[name]
    assert get_args(parameters.model_fields["initial_state"].annotation) == (name,)
    module, _, kind = where.partition(":")
    options = dict(inspect.signature(getattr(import_module(module), kind)).parameters)
    assert next(iter(options)) == "run"
    del options["run"]
    missing = inspect.Parameter.empty
    assert {option: each.default for option, each in options.items()} == {
        field: missing if each.is_required() else each.default
        for field, each in parameters.model_fields.items()
        if field != "initial_state"
    }


@pytest.mark.parametrize("arm", ARMS, ids=name_of)
def test_resumed_is_undisturbed(arm, tmp_path):
    """State after two steps, through a safetensors file into a new object: the same for ever after."""
    reference = make(arm)
    for step in range(2):
        reference.initial(step, rows(fresh=[step == 0] * ROWS), 0)
        reference.observe(random_state(step), 0)
    save_file(reference.state_dict(), tmp_path / "state")
    resumed = make(arm)
    resumed.load_state_dict(load_file(tmp_path / "state"))
    for step in range(2, 5):
        batch = rows(fresh=[step % 2 == row % 2 for row in range(ROWS)])
        assert equal(reference.initial(step, batch, 0), resumed.initial(step, batch, 0))
        assert torch.equal(reference.ages(), resumed.ages())
        for intervention in (reference, resumed):
            intervention.observe(random_state(step), 0)


@pytest.mark.parametrize("arm", ARMS, ids=name_of)
def test_no_gradient_and_no_global_randomness(arm):
    before = torch.get_rng_state()
    intervention = make(arm)
    for step in range(3):
        state = intervention.initial(step, rows(), 0)
        if state is not None:
            assert not any(tensor.requires_grad for layer in state.layers for tensor in layer.tensors())
        assert intervention.ages().shape == (ROWS,)
        assert intervention.ages().dtype == torch.int64
        intervention.observe(random_state(step).map(lambda tensor: tensor.requires_grad_() * 1.0), 0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("arm", ARMS, ids=name_of)
def test_draws_do_not_depend_on_how_a_batch_is_cut(arm):
    whole, parts = make(arm), make(arm, micro_batches=4)
    for step in range(4):
        expected = whole.initial(step, rows(), 0)
        given = []
        for number in range(4):
            state = parts.initial(step, rows(2), number)
            given.append(MODEL.zero_state(2) if state is None else state)
            parts.observe(random_state(step).select(range(2 * number, 2 * number + 2)), number)
        whole.observe(random_state(step), 0)
        joined = State.cat(given)
        expected = MODEL.zero_state(ROWS) if expected is None else expected
        for layer in range(len(joined)):
            torch.testing.assert_close(joined.entries(layer), expected.entries(layer), rtol=1e-5, atol=1e-6)


def test_random_noise_scales_with_sigma():
    one, two = (make({"initial_state": "random_noise", "sigma": sigma}, rows=64) for sigma in (1.0, 0.25))
    unit, quarter = one.initial(7, rows(64), 0), two.initial(7, rows(64), 0)
    assert unit is not None
    assert quarter is not None
    entries = torch.cat([unit.entries(layer).flatten() for layer in range(len(unit))])
    assert abs(entries.mean().item()) < 4.0 / len(entries) ** 0.5
    assert abs(entries.std().item() - 1.0) < 4.0 / (2 * len(entries)) ** 0.5
    for layer in range(len(unit)):
        assert torch.equal(unit.entries(layer) * 0.25, quarter.entries(layer))
        assert not unit.layers[layer].auxiliary["conv"].any()
    assert one.ages().tolist() == [NO_AGE] * 64
    assert not equal(make(ARMS[1]).initial(0, rows(), 0), make(ARMS[1]).initial(1, rows(), 0))
    assert not equal(make(ARMS[1], seed=0).initial(0, rows(), 0), make(ARMS[1], seed=1).initial(0, rows(), 0))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_fitted_moments_are_those_of_the_definition(micro_batches):
    intervention = make(ARMS[2], micro_batches=micro_batches)
    part = ROWS // micro_batches
    expected: dict[str, np.ndarray] = {}
    for step in range(3):
        assert (intervention.initial(step, rows(part), 0) is None) == (step == 0)
        assert intervention.ages().tolist() == [0 if step == 0 else NO_AGE] * part
        state = random_state(step)
        for number in range(micro_batches):
            intervention.observe(state.select(range(number * part, (number + 1) * part)), number)
        values = [state.entries(layer).double().numpy() for layer in range(len(state))]
        new = {
            "mean": np.array([v[:, head].mean() for v in values for head in range(v.shape[1])]),
            "variance": np.array([v[:, head].var() for v in values for head in range(v.shape[1])]),
        }
        expected = {name: new[name] if step == 0 else 0.9 * new[name] + 0.1 * expected[name] for name in new}
    for name, tensor in intervention.state_dict().items():
        np.testing.assert_allclose(tensor.numpy(), expected[name], rtol=1e-6)


def test_fitted_noise_has_the_fitted_moments():
    intervention = make(ARMS[2], rows=512)
    intervention.observe(random_state(0, 512), 0)
    state = intervention.initial(1, rows(512), 0)
    assert state is not None
    moments = {name: tensor.view(len(state), -1) for name, tensor in intervention.state_dict().items()}
    for layer in range(len(state)):
        entries = state.entries(layer)
        count = entries[:, 0].numel()
        deviation = moments["variance"][layer].sqrt()
        assert ((entries.mean((0, 2)) - moments["mean"][layer]).abs() < 4 * deviation / count**0.5).all()
        assert ((entries.std((0, 2)) / deviation - 1).abs() < 4 / (2 * count) ** 0.5).all()
        assert not state.layers[layer].auxiliary["conv"].any()


def test_state_passing_gives_each_row_its_own_state():
    intervention = make({"initial_state": "state_passing", "reset_probability": 0.0})
    assert intervention.initial(0, rows(), 0) is None
    assert intervention.ages().tolist() == [0] * ROWS
    for step in range(1, 4):
        intervention.observe(final(step), 0)
        assert marks(intervention.initial(step, rows(), 0)) == [100.0 * step + row for row in range(1, ROWS + 1)]
        assert intervention.ages().tolist() == [CONTEXT * step] * ROWS


def test_slots_under_accumulation():
    """`batch`: part m begins where part m of the batch before ended. `micro_batch`: where the part just before ended."""
    slots = make({"initial_state": "state_passing", "reset_probability": 0.0}, micro_batches=2)
    chain = make({"initial_state": "state_passing", "reset_probability": 0.0, "previous": "micro_batch"}, micro_batches=2)
    seen: dict[str, list[float | None]] = {"slots": [], "chain": []}
    ages: list[int] = []
    for step in range(3):
        for number in range(2):
            for name, intervention in (("slots", slots), ("chain", chain)):
                state = intervention.initial(step, rows(4), number)
                seen[name].append(None if state is None else marks(state)[0])
                if name == "chain":
                    ages.append(int(intervention.ages()[0]))
                intervention.observe(final(2 * step + number, 4), number)
    assert seen["slots"] == [None, None, 1.0, 101.0, 201.0, 301.0]
    assert seen["chain"] == [None, 1.0, 101.0, 201.0, 301.0, 401.0]
    assert ages == [CONTEXT * passed for passed in range(6)]


def test_resets_are_as_frequent_as_asked_and_by_row():
    arm = {"initial_state": "state_passing", "reset_probability": 0.3}
    intervention = make(arm, rows=200)
    resets = []
    for step in range(50):
        intervention.initial(step, rows(200), 0)
        if step:
            resets.append(intervention.ages() == 0)
        intervention.observe(final(step, 200), 0)
    share = torch.stack(resets).double()
    assert abs(share.mean().item() - 0.3) < 4 * (0.3 * 0.7 / share.numel()) ** 0.5
    assert (share.mean(0) > 0).all()
    assert 0 < share.mean(1).min() < share.mean(1).max() < 1


def test_a_reset_of_the_whole_batch_is_one_draw():
    intervention = make({"initial_state": "state_passing", "reset_probability": 0.5, "reset_unit": "batch"}, micro_batches=2)
    outcomes = set()
    for step in range(20):
        kinds = []
        for number in range(2):
            intervention.initial(step, rows(4), number)
            kinds += (intervention.ages() == 0).tolist()
            intervention.observe(final(step, 4), number)
        assert len(set(kinds)) == 1
        outcomes.add((step > 0, kinds[0]))
    assert outcomes == {(False, True), (True, True), (True, False)}


@pytest.mark.parametrize("reset_auxiliary", [True, False])
@pytest.mark.parametrize("carry_auxiliary", [True, False])
def test_what_a_reset_clears(carry_auxiliary, reset_auxiliary):
    arm = {
        "initial_state": "state_passing",
        "reset_probability": 1.0,
        "carry_auxiliary": carry_auxiliary,
        "reset_auxiliary": reset_auxiliary,
    }
    intervention = make(arm)
    intervention.observe(final(1), 0)
    state = intervention.initial(1, rows(), 0)
    assert state is not None
    for layer in state.layers:
        assert not layer.recurrent.any()
        assert bool(layer.auxiliary["conv"].any()) == (carry_auxiliary and not reset_auxiliary)
    assert intervention.ages().tolist() == [0] * ROWS


@pytest.mark.parametrize("arm", [{"initial_state": "state_passing", "reset_probability": 1.0}, {"initial_state": "tbtt"}])
def test_a_reset_clears_nan(arm):
    intervention = make(arm)
    intervention.observe(final(1).map(lambda tensor: torch.full_like(tensor, float("nan"))), 0)
    assert equal(intervention.initial(1, rows(fresh=[True] * ROWS), 0), None)


def test_tbtt_resets_exactly_the_fresh_rows():
    intervention = make(ARMS[4])
    assert intervention.initial(0, rows(fresh=[True] * ROWS), 0) is None
    intervention.observe(final(1), 0)
    fresh = [row in (0, 3, 7) for row in range(ROWS)]
    state = intervention.initial(1, rows(fresh=fresh), 0)
    assert marks(state) == [0.0 if new else 101.0 + row for row, new in enumerate(fresh)]
    assert intervention.ages().tolist() == [0 if new else CONTEXT for new in fresh]
    intervention.observe(final(2), 0)
    intervention.initial(2, rows(), 0)
    assert intervention.ages().tolist() == [CONTEXT if new else 2 * CONTEXT for new in fresh]


def test_tbtt_may_keep_the_state_at_the_end_of_a_document():
    intervention = make({**ARMS[4], "at_document_end": "keep"})
    assert intervention.initial(0, rows(fresh=[True] * ROWS), 0) is None
    for step in (1, 2):
        intervention.observe(final(step), 0)
        state = intervention.initial(step, rows(fresh=[row in (0, 3, 7) for row in range(ROWS)]), 0)
        assert equal(state, final(step))
        assert intervention.ages().tolist() == [step * CONTEXT] * ROWS


def test_tbtt_keeps_a_state_for_each_part():
    intervention = make(ARMS[4], micro_batches=2)
    for number in range(2):
        intervention.initial(0, rows(4, fresh=[True] * 4), number)
        intervention.observe(final(number, 4), number)
    assert [marks(intervention.initial(1, rows(4), number))[0] for number in range(2)] == [1.0, 101.0]


# --- arms made of the last batch's states ----------------------------------------------------------------


def correlated(count: int = ROWS) -> State:
    """Every head of every layer leans on one number of its row: elements correlate within heads, and between them."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(count, 1, 1, generator=generator)
    state = random_state(9, count)
    for layer in range(len(state)):
        state = state.with_entries(layer, state.entries(layer) + 3.0 * common)
    return state


def side_by_side(state: State) -> np.ndarray:
    """(rows, elements) float64, all heads of all layers side by side."""
    return torch.cat([state.entries(layer).flatten(1) for layer in range(len(state))], dim=1).double().numpy()


def many_draws(arm: dict, seen: State, steps: int) -> np.ndarray:
    intervention = make(arm | {"reset_probability": 0.0}, rows=seen.batch_size)
    intervention.observe(seen, 0)
    drawn = []
    for step in range(1, steps + 1):
        state = intervention.initial(step, rows(seen.batch_size), 0)
        assert state is not None
        assert not any(layer.auxiliary["conv"].any() for layer in state.layers)
        assert intervention.ages().tolist() == [NO_AGE] * seen.batch_size
        drawn.append(side_by_side(state))
    return np.concatenate(drawn)


def within_heads(elements: int) -> np.ndarray:
    """(elements, elements) bool: whether two elements are of one head."""
    heads = [values.shape[1] for values in (MODEL.zero_state(1).entries(layer) for layer in range(2))]
    head = np.repeat(np.arange(sum(heads)), elements // sum(heads))
    return head[:, None] == head[None]


@pytest.mark.parametrize("scope", ["joint", "head"])
def test_gaussian_states_have_the_moments_of_the_batch(scope):
    """Each entry of mean and covariance within six standard errors of a Gaussian's; between heads, `head` has none."""
    seen = correlated()
    drawn = many_draws({"initial_state": "gaussian", "scope": scope}, seen, steps=1500)
    expected = np.cov(side_by_side(seen), rowvar=False)
    inside = within_heads(len(expected))
    assert np.abs(expected[~inside]).mean() > 1.0
    if scope == "head":
        expected = np.where(inside, expected, 0.0)
    variance, count = np.diag(expected), len(drawn)
    assert (np.abs(drawn.mean(0) - side_by_side(seen).mean(0)) < 6.0 * np.sqrt(variance / count)).all()
    error = np.sqrt((variance[:, None] * variance + expected**2) / count)
    assert (np.abs(np.cov(drawn, rowvar=False) - expected) < 6.0 * error).all()
    # Normal, not only of the right moments: the kurtosis of all standardised elements together is near 3.
    kurtosis = (((drawn - drawn.mean(0)) / drawn.std(0)) ** 4).mean()
    assert kurtosis == pytest.approx(3.0, abs=0.1)


def test_joint_states_lie_in_the_span_of_the_batch():
    """Seven centred directions of eight states, and no more: weights are shared by all heads and layers."""
    seen = random_state(4)
    for scope, rank in (("joint", ROWS - 1), ("head", (ROWS - 1) * len(np.unique(within_heads(512), axis=0)))):
        drawn = many_draws({"initial_state": "gaussian", "scope": scope}, seen, steps=20)
        assert np.linalg.matrix_rank(drawn - side_by_side(seen).mean(0), tol=1e-3) == rank


def test_permuted_states_have_the_marginals_and_no_correlation():
    seen = correlated(64)
    before = side_by_side(seen)
    drawn = many_draws({"initial_state": "permuted"}, seen, steps=40)
    for step in drawn.reshape(40, 64, -1):
        assert np.array_equal(np.sort(step, axis=0), np.sort(before, axis=0))
    inside = within_heads(before.shape[1])
    off = ~np.eye(len(inside), dtype=bool)
    assert np.corrcoef(before, rowvar=False)[off].mean() > 0.4
    after = np.corrcoef(drawn, rowvar=False)[off]
    assert abs(after.mean()) < 0.01
    assert np.abs(after).max() < 6.0 / len(drawn) ** 0.5


def test_every_permutation_is_equally_likely():
    """Of three rows: six orders over all elements and steps, by Pearson's statistic (5 degrees, below its 1 − 1e-6 quantile)."""
    seen = random_state(3, 3)
    drawn = many_draws({"initial_state": "permuted"}, seen, steps=20).reshape(20, 3, -1)
    place = (drawn[:, :, None] == side_by_side(seen)).argmax(2)
    counts = np.unique(place[:, 0] * 9 + place[:, 1] * 3 + place[:, 2], return_counts=True)[1]
    assert len(counts) == 6
    expected = counts.sum() / 6
    assert ((counts - expected) ** 2 / expected).sum() < 35.9


@pytest.mark.parametrize("arm", MADE, ids=name_of)
def test_resets_are_those_of_state_passing(arm):
    made, passing = make(arm, rows=200), make({"initial_state": "state_passing", "reset_probability": 0.4}, rows=200)
    share = []
    for step in range(20):
        state = made.initial(step, rows(200), 0)
        passing.initial(step, rows(200), 0)
        reset = passing.ages() == 0
        assert made.ages().tolist() == [0 if zero else NO_AGE for zero in reset]
        if state is None:
            assert step == 0
        else:
            share.append(reset.double().mean().item())
            for layer in range(len(state)):
                assert torch.equal(~state.entries(layer).flatten(1).any(1), reset)
        made.observe(random_state(step, 200), 0)
        passing.observe(random_state(step, 200), 0)
    assert abs(np.mean(share) - 0.4) < 4 * (0.4 * 0.6 / (200 * 19)) ** 0.5


@pytest.mark.parametrize("arm", MADE, ids=name_of)
def test_a_batch_of_one_row_has_no_spread(arm):
    seen = random_state(2, 1)
    assert np.allclose(many_draws(arm, seen, steps=2), side_by_side(seen), rtol=1e-6)


@pytest.mark.parametrize("arm", MADE, ids=name_of)
def test_made_states_are_of_the_last_whole_batch(arm):
    """Whatever was drawn or seen before: step and batch decide alone."""
    first, second = make(arm, micro_batches=2), make(arm, micro_batches=2)
    for step in range(3):
        for number in range(2):
            first.initial(step, rows(4), number)
            first.observe(random_state(step, 4), number)
    for number in range(2):
        second.observe(random_state(2, 4), number)
    second.initial(2, rows(4), 1)
    for number in range(2):
        left, right = first.initial(3, rows(4), number), second.initial(3, rows(4), number)
        assert left is not None
        assert right is not None
        assert all(torch.equal(left.entries(layer), right.entries(layer)) for layer in range(2))
    other = make(arm, micro_batches=2, seed=4)
    other.observe(random_state(2, 4), 0)
    assert other.initial(3, rows(4), 0) is None
    other.observe(random_state(2, 4), 1)
    different, same = other.initial(3, rows(4), 1), second.initial(3, rows(4), 1)
    assert different is not None
    assert same is not None
    assert not torch.equal(different.entries(0), same.entries(0))
