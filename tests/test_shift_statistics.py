"""Two-sample tests, novelty and rank correlation, against known answers: same law, shifted law, documents that are alike within."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from farstate import params
from farstate.evaluation.association import holm, spearman
from farstate.evaluation.head_tests import MEASURES, HeadTests
from farstate.evaluation.novelty import novelties, weighted_median
from farstate.evaluation.sampled_states import Head, Sampled, StateSet, grouped_folds
from farstate.evaluation.shift import beyond
from farstate.evaluation.shift_states import Measurement, Reference
from farstate.evaluation.texts import Text
from farstate.evaluation.two_sample import (
    Products,
    accuracy,
    auc,
    directions,
    logistic,
    out_of_fold,
    sliced_wasserstein,
)
from farstate.evaluation.uncertainty import Resamples, resample
from farstate.state import LayerState, State
from golden import check, ramp

ENTRIES, FOLDS = 24, 5


class Side:
    """`documents` · `each` states: a document's own vector of size `alike`, plus noise of size 1, plus `shift` in entry 0."""

    def __init__(self, seed: int, documents: int, each: int, *, alike: float = 0.0, shift: float = 0.0, name: str = "a") -> None:
        generator = np.random.default_rng(seed)
        own = alike * generator.standard_normal((documents, ENTRIES))
        self.values = np.repeat(own, each, axis=0) + generator.standard_normal((documents * each, ENTRIES))
        self.values[:, 0] += shift
        self.documents = np.repeat([f"{name}{number:03d}" for number in range(documents)], each)
        folds = grouped_folds(*np.unique(self.documents, return_counts=True), FOLDS)
        self.folds = np.array([folds[name] for name in self.documents])
        self.resamples = resample(
            self.documents.tolist(), resamples=400, confidence=0.95, generator=np.random.default_rng(seed + 1)
        )


def classify(
    left: Side, right: Side, folds: tuple[np.ndarray, np.ndarray] | None = None
) -> dict[str, tuple[float, float, float]]:
    """By measure: value, low, high."""
    products = Products(torch.from_numpy(left.values), [torch.from_numpy(right.values)])
    ours, theirs = folds or (left.folds, right.folds)
    features = [products.features(np.flatnonzero(ours != fold), 16) for fold in range(FOLDS)]
    count = len(left.values)
    scores = out_of_fold(features, ours, slice(count, count + len(right.values)), theirs)
    found = {}
    for name, measure in (("accuracy", accuracy), ("auc", auc)):
        value, again = measure(scores, left.resamples, right.resamples)
        low, high = right.resamples.interval(value, again)
        found[name] = (value, float(low), float(high))
    return found


@pytest.mark.parametrize("alike", [0.0, 1.5])
def test_no_shift_is_not_found_whether_documents_are_alike_within_or_not(alike):
    found = classify(Side(1, 30, 12, alike=alike), Side(2, 25, 12, alike=alike, name="b"))
    for value, low, high in found.values():
        assert low < 0.5 < high or abs(value - 0.5) < 0.08
        assert 0.3 < value < 0.62


def test_random_folds_find_a_shift_that_is_not_there_and_grouped_folds_do_not():
    """The trap: with random folds the classifier has read every document it is asked about."""
    left, right = Side(3, 8, 50, alike=1.5), Side(4, 8, 50, alike=1.5, name="b")
    generator = np.random.default_rng(0)
    at_random = tuple(generator.integers(FOLDS, size=len(side.values)) for side in (left, right))
    fooled, honest = classify(left, right, at_random), classify(left, right)
    print(f"accuracy without any shift: random folds {fooled['accuracy'][0]:.3f}, grouped {honest['accuracy'][0]:.3f}")
    assert fooled["accuracy"][0] > 0.84
    assert fooled["accuracy"][1] > 0.5, "its interval says so with confidence"
    assert honest["accuracy"][0] < 0.65
    assert honest["accuracy"][1] < 0.5


def test_a_shift_is_found():
    found = classify(Side(5, 30, 12, alike=0.5), Side(6, 25, 12, alike=0.5, shift=4.0, name="b"))
    assert found["accuracy"][1] > 0.8
    assert found["auc"][1] > 0.88


def test_classes_of_unequal_size_and_folds_of_unequal_weight_give_no_signal():
    found = classify(Side(7, 40, 25), Side(8, 12, 20, name="b"))
    assert found["accuracy"][0] == pytest.approx(0.5, abs=0.06)
    assert found["auc"][0] == pytest.approx(0.5, abs=0.06)


def test_the_area_compares_pairs_within_a_fold_and_its_resamples_repeat_states():
    left, right = Side(9, 6, 4), Side(10, 5, 4, shift=1.0, name="b")
    products = Products(torch.from_numpy(left.values), [torch.from_numpy(right.values)])
    features = [products.features(np.flatnonzero(left.folds != fold), 3) for fold in range(FOLDS)]
    scores = out_of_fold(features, left.folds, slice(24, 44), right.folds)
    value, again = auc(scores, left.resamples, right.resamples)

    def direct(ours: np.ndarray, theirs: np.ndarray) -> float:
        """`ours` and `theirs`: which states there are, with repetitions."""
        pairs = [
            1.0 * (scores.other[j] > scores.reference[i]) + 0.5 * (scores.other[j] == scores.reference[i])
            for i in ours
            for j in theirs
            if left.folds[i] == right.folds[j]
        ]
        return float(np.mean(pairs))

    assert value == pytest.approx(direct(np.arange(24), np.arange(20)))
    for number in range(3):
        ours = np.repeat(np.arange(24), left.resamples.weights[number].astype(int))
        theirs = np.repeat(np.arange(20), right.resamples.weights[number].astype(int))
        assert again[number] == pytest.approx(direct(ours, theirs))


def test_principal_components_are_those_of_the_singular_value_decomposition():
    side = Side(11, 10, 30, alike=2.0)
    for fitted, components in ((np.arange(300), 5), (np.arange(40), 16)):
        products = Products(torch.from_numpy(side.values), [])
        features = products.features(fitted, components)
        values = (side.values - side.values.mean(0)) / products.scale
        centre = values[fitted].mean(0)
        _, _, basis = np.linalg.svd(values[fitted] - centre, full_matrices=False)
        expected = (values - centre) @ basis[:components].T
        # In decreasing order of variance, each up to its sign; close ones may have turned into each other by a little.
        np.testing.assert_allclose(np.abs(features[:, : components - 1]), np.abs(expected[:, : components - 1]), atol=0.02)
        np.testing.assert_allclose(features[:, -1], np.log(np.linalg.norm(side.values, axis=1)))


def test_components_that_do_not_exist_are_left_out():
    values = np.random.default_rng(0).standard_normal((200, 3)) @ np.random.default_rng(1).standard_normal((3, ENTRIES))
    assert Products(torch.from_numpy(values), []).features(np.arange(200), 16).shape == (200, 3 + 1)


def test_the_logistic_regression_is_at_its_minimum():
    generator = np.random.default_rng(0)
    features = generator.standard_normal((150, 4))
    labels = features[:, 0] + generator.standard_normal(150) > 0.8
    weights = logistic(features, labels)
    assert weights is not None

    def loss(coefficients: np.ndarray) -> float:
        z = np.column_stack([features, np.ones(150)]) @ coefficients
        weight = np.where(labels, 75.0 / labels.sum(), 75.0 / (~labels).sum())
        return float((weight * np.logaddexp(0.0, np.where(labels, -z, z))).sum() + 0.5 * (coefficients[:-1] ** 2).sum())

    for number in range(5):
        for change in (1e-3, -1e-3):
            assert loss(weights + change * np.eye(5)[number]) > loss(weights)
    assert logistic(features, np.ones(150, dtype=bool)) is None
    separable = logistic(np.linspace(-1.0, 1.0, 50)[:, None] * 100.0, np.arange(50) >= 25)
    assert separable is not None
    assert np.isfinite(separable).all()


def ones(count: int) -> Resamples:
    return Resamples(np.ones((2, count)), "documents", 1.0, 0.95, count, count, count - 1)


def test_sliced_wasserstein_is_the_mean_gap_between_order_statistics():
    generator = np.random.default_rng(0)
    left, right = generator.standard_normal((40, 20)), generator.standard_normal((40, 20)) + 0.7
    value, again = sliced_wasserstein(left, right, ones(40), ones(40))
    assert value == pytest.approx(np.abs(np.sort(left, 0) - np.sort(right, 0)).mean())
    assert again == pytest.approx(value)
    # Sides of unequal size: every state as often as the other side has some.
    more = np.repeat(right[:10], 4, axis=0)
    assert sliced_wasserstein(left, right[:10], ones(40), ones(10))[0] == pytest.approx(
        sliced_wasserstein(left, more, ones(40), ones(40))[0]
    )
    assert sliced_wasserstein(left, left + 3.0, ones(40), ones(40))[0] == pytest.approx(3.0)
    assert sliced_wasserstein(left, left, ones(40), ones(40))[0] == pytest.approx(0.0, abs=1e-12)


def test_a_resampled_distance_is_the_distance_to_first_order():
    """Against the weighted distance itself, where the weights change little and the sides are apart."""
    generator = np.random.default_rng(1)
    left, right = generator.standard_normal((300, 6)), generator.standard_normal((200, 6)) * 1.5 + 0.8
    weights = [1.0 + 0.1 * generator.standard_normal((2, count)) for count in (300, 200)]
    sides = [Resamples(w, "documents", 1.0, 0.95, w.shape[1], w.shape[1], w.shape[1] - 1) for w in weights]
    value, again = sliced_wasserstein(left, right, *sides)

    def direct(number: int) -> float:
        total = 0.0
        for column in range(6):
            points = np.sort(np.concatenate([left[:, column], right[:, column]]))
            levels = [
                ((side[:, column][None] <= points[:, None]) @ w[number]) / w[number].sum()
                for side, w in zip((left, right), weights, strict=True)
            ]
            total += float((np.abs(levels[0] - levels[1])[:-1] * np.diff(points)).sum())
        return total / 6

    for number in range(2):
        assert again[number] - value == pytest.approx(direct(number) - value, rel=0.1, abs=5e-4)


def test_intervals_of_the_area_cover_as_often_as_they_say():
    """Small documents, many trials: the interval over documents holds the value of the law in about 95 % of them."""
    inside, trials = 0, 120
    generator = np.random.default_rng(0)
    # One fixed classifier, x itself: the law's value is known, P(b > a) for a shift of 1 under variance 1 + 0.5² on each side.
    from statistics import NormalDist

    truth = NormalDist().cdf(1.0 / np.sqrt(2 * 1.25))
    for _ in range(trials):
        sides = []
        for shift in (0.0, 1.0):
            own = np.repeat(0.5 * generator.standard_normal(24), 6)
            sides.append(own + generator.standard_normal(144) + shift)
        from farstate.evaluation.two_sample import Scores

        documents = [f"{number}" for number in np.repeat(np.arange(24), 6)]
        resamples = [resample(documents, resamples=200, confidence=0.95, generator=generator) for _ in range(2)]
        zeros = np.zeros(144, dtype=np.int64)
        value, again = auc(Scores(sides[0], sides[1], zeros, zeros), *resamples)
        low, high = resamples[1].interval(value, again)
        inside += int(low <= truth <= high)
    print(f"{inside} of {trials} intervals hold the law's value")
    assert 0.88 * trials <= inside


def test_directions_are_unit_vectors():
    np.testing.assert_allclose(np.linalg.norm(directions(7, 50, np.random.default_rng(0)), axis=0), 1.0)


def test_folds_keep_documents_whole_and_weigh_about_the_same():
    weights = [100, 60, 50, 40, 30, 20, 10, 5]
    names = [f"{number}" for number in range(8)]
    folds = grouped_folds(names, weights, 3)
    loads = np.bincount([folds[name] for name in names], weights=weights)
    assert folds == grouped_folds(names[::-1], weights[::-1], 3), "whatever the order of the documents"
    assert loads.max() - loads.min() <= 10


# --- novelty --------------------------------------------------------------------------------------------


def novelty_of(reference: Side, values: np.ndarray, chains: np.ndarray | None = None, neighbours: int = 5) -> np.ndarray:
    products = Products(torch.from_numpy(reference.values), [torch.from_numpy(values)])
    chains = np.full(len(reference.values), -1) if chains is None else chains
    found = novelties(products.squared_distances(), neighbours, reference.documents, chains, np.random.default_rng(0))
    assert found is not None
    return found[len(reference.values) :]


def test_more_states_of_the_same_law_are_not_new():
    """Also where one document holds a third of the training states, all alike."""
    reference = Side(20, 30, 20, alike=1.0)
    assert np.median(novelty_of(reference, Side(21, 20, 20, alike=1.0, name="b").values)) == pytest.approx(1.0, abs=0.05)
    heavy = Side(22, 30, 20, alike=1.0)
    heavy.documents[:200] = heavy.documents[0]
    heavy.values[:200] += heavy.values[0]
    same = Side(22, 30, 20, alike=1.0)
    same.values[:200] += same.values[0]
    assert np.median(novelty_of(heavy, same.values[200:])) < 1.1


def test_unequal_states_within_the_training_states_are_not_new_and_unexplored_ones_are():
    reference = Side(23, 30, 20)
    narrower = 0.5 * Side(24, 20, 20, name="b").values
    assert np.median(novelty_of(reference, narrower)) < 1.0
    assert np.median(novelty_of(reference, 6.0 * Side(25, 20, 20, name="b").values)) > 3.0


def test_a_direction_that_training_never_took_is_new():
    """In the principal components of the training states the same states would not be seen to move."""
    reference, other = Side(26, 30, 20), Side(27, 20, 20, name="b")
    reference.values[:, -1] = 0.0
    other.values[:, -1] = 0.0
    before = np.median(novelty_of(reference, other.values))
    other.values[:, -1] = 30.0
    assert before == pytest.approx(1.0, abs=0.05)
    assert np.median(novelty_of(reference, other.values)) > 3.0


def test_distances_are_to_other_documents_and_chains():
    reference = Side(28, 4, 5, alike=3.0)
    squared = ((reference.values[:, None] - reference.values[None]) ** 2).sum(2)
    chains = np.arange(20) % 7
    chains[::2] = -1
    found = novelties(squared, 2, reference.documents, chains, np.random.default_rng(0))
    distances = []
    for i in range(20):
        allowed = [
            squared[i, j]
            for j in range(20)
            if reference.documents[i] != reference.documents[j] and not (chains[i] == chains[j] >= 0)
        ]
        distances.append(np.sqrt(sorted(allowed)[1]))
    np.testing.assert_allclose(found, np.array(distances) / np.median(distances))
    assert novelties(squared, 16, reference.documents, chains, np.random.default_rng(0)) is None
    assert novelties(0.0 * squared, 2, reference.documents, chains, np.random.default_rng(0)) is None


def test_a_weighted_median_is_that_of_repeated_values():
    generator = np.random.default_rng(0)
    values, weights = generator.standard_normal(15), generator.integers(0, 4, size=(20, 15)).astype(float)
    expected = [np.sort(np.repeat(values, row.astype(int)))[(int(row.sum()) + 1) // 2 - 1] for row in weights]
    np.testing.assert_array_equal(weighted_median(values, weights), expected)


# --- null bands ------------------------------------------------------------------------------------------


def settled(folder: Path, seed: int, ages: np.ndarray, names: str, heads: int, shift: float = 0.0) -> Sampled:
    """States of an Ornstein–Uhlenbeck process from zero, relaxed after 8 tokens, with an own mean in each document of 10."""
    generator = np.random.default_rng(seed)
    share = 1.0 - np.exp(-ages / 8.0)[:, None, None]
    own = np.repeat(0.5 * generator.standard_normal((ages.size // 10, heads, 8)), 10, axis=0)
    values = share * (own + shift) + np.sqrt(1.0 - (1.0 - share) ** 2) * generator.standard_normal((ages.size, heads, 8))
    state = State((LayerState(torch.from_numpy(values)),))
    states = StateSet([Head(0, head) for head in range(heads)], state, ages.size, folder)
    states.write(np.arange(ages.size), state)
    documents = np.repeat([f"{names}{number:03d}" for number in range(ages.size // 10)], 10)
    folds = np.repeat(np.arange(ages.size // 10) % FOLDS, 10)
    return Sampled(states, np.arange(ages.size), documents, folds, np.full(ages.size, -1), ages, ages)


def test_states_that_have_settled_are_not_beyond_training_and_shifted_ones_are(tmp_path):
    """Training met all ages up to T: states that no longer change differ from that mixture, at T and at 64 T."""
    context, heads = 32, 10
    generator = np.random.default_rng(0)
    run = Measurement.__new__(Measurement)
    run.shift = params.Shift(length=4096, minimum_states=100, resamples=100, projections=16, components=4, neighbours=5)
    run.device, run.folds, run.positions = torch.device("cpu"), FOLDS, (context, 64 * context, 64 * context)
    run.texts = [Text("t", 0, ())] * 200

    def aged(count: int) -> np.ndarray:
        return generator.integers(1, context + 1, size=count)

    reference = Reference(
        settled(tmp_path, 1, aged(400), "a", heads),
        tuple(settled(tmp_path, 2 + draw, aged(200), "b", heads) for draw in range(3)),
        settled(tmp_path, 5, np.full(200, context), "b", heads),
        {},
    )
    tested = [
        settled(tmp_path, 6 + place, np.full(200, age), "b", heads, shift)
        for place, (age, shift) in enumerate([(context, 0.0), (64 * context, 0.0), (64 * context, 3.0)])
    ]
    run.resamples = run.resample(tested[0].documents)
    tests = HeadTests(run, reference)
    results = [tests.of_head(head, tested) for head in range(heads)]
    rows = [[result.row(measure) for result in of_head] for of_head in results for measure in MEASURES]
    found = np.array([[beyond(row) for row in of_head] for of_head in rows]).reshape(heads, len(MEASURES), 3).sum(0)
    one_band = sum(row["low"] > row["null_high"] for of_head in rows for row in of_head[:2])
    print(f"beyond training, of {heads} heads, by measure: {found.tolist()}; above the band inside training alone: {one_band}")
    assert found[:, :2].max() <= 2
    assert found[:, :2].sum() <= 0.05 * 2 * len(MEASURES) * heads
    assert (found[:, 2] == heads).all()
    assert one_band > found[:, :2].sum(), "the band at the end is what keeps them from being called new"


def test_the_two_sides_are_resampled_apart():
    run = Measurement.__new__(Measurement)
    run.shift = params.Shift(length=64, resamples=100)
    names = np.repeat([f"{number}" for number in range(30)], 2)
    ours, theirs = run.resample(names, training=True), run.resample(names)
    assert not np.array_equal(ours.weights, theirs.weights)
    np.testing.assert_array_equal(theirs.weights, run.resample(names).weights)


# --- association ----------------------------------------------------------------------------------------


def correlate(predictors, outcome, resamples: int = 200):
    predictors, outcome = np.asarray(predictors, dtype=float), np.asarray(outcome, dtype=float)
    return spearman(predictors, outcome, np.random.default_rng(0), resamples=resamples, confidence=0.95)


def test_rank_correlations():
    outcome = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    found = correlate([np.exp(outcome), -np.array(outcome), [1, 3, 2, 4, 5, 7, 6], [5.0] * 7, [1, 1, 2, 2, 3, 3, 3]], outcome)
    np.testing.assert_allclose(found.value[:3], [1.0, -1.0, 1.0 - 6.0 * 4.0 / (7 * 48)])
    assert np.isnan([found.value[3], found.p[3], found.p_holm[3], found.low[3], found.high[3]]).all()
    # Tied ranks: Pearson's correlation of mean ranks.
    assert found.value[4] == pytest.approx(np.corrcoef([1.5, 1.5, 3.5, 3.5, 6, 6, 6], outcome)[0, 1])
    assert found.p[0] < 0.002
    assert found.p_holm[0] == pytest.approx(4 * found.p[0], rel=0.6)


def test_p_values_of_unrelated_things_are_spread_evenly():
    generator = np.random.default_rng(2)
    found = correlate(generator.standard_normal((400, 12)), generator.standard_normal(12), resamples=100)
    assert 0.01 <= np.mean(found.p < 0.05) <= 0.11
    assert np.nanmin(found.p_holm) > 0.05
    assert np.mean((found.low <= 0.0) & (found.high >= 0.0)) > 0.85


def test_holm():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, np.nan]), [0.03, 0.06, 0.06, np.nan])
    np.testing.assert_allclose(holm([0.5, 0.9]), [1.0, 1.0])


# --- stored numbers --------------------------------------------------------------------------------------


def test_golden():
    left, right = ramp(20, 12).numpy(), ramp(15, 12, phase=1.0).numpy() + 0.3
    weights = [1.0 + np.abs(ramp(3, count, phase=float(count)).numpy()) for count in (20, 15)]
    sides = [Resamples(w, "documents", 1.0, 0.95, w.shape[1], w.shape[1], w.shape[1] - 1) for w in weights]
    products = Products(torch.from_numpy(left), [torch.from_numpy(right)])
    folds = (np.arange(20) % 3, np.arange(15) % 3)
    features = [products.features(np.flatnonzero(folds[0] != fold), 4) for fold in range(3)]
    scores = out_of_fold(features, folds[0], slice(20, 35), folds[1])
    documents = np.array([f"{number // 4}" for number in range(20)])
    novel = novelties(products.squared_distances()[:20], 2, documents, np.full(20, -1), np.random.default_rng(0))
    assert novel is not None
    distance = sliced_wasserstein(left, right, *sides)
    found = {
        "distance": distance,
        "accuracy": accuracy(scores, *sides),
        "auc": auc(scores, *sides),
        "novelty": (float(np.median(novel)), weighted_median(novel, weights[0])),
    }
    values = {name: torch.from_numpy(np.append(again, value)) for name, (value, again) in found.items()}
    values["features"] = torch.from_numpy(np.abs(features[0]))
    values["scores"] = torch.from_numpy(np.concatenate([scores.reference, scores.other]))
    values["correlation"] = torch.from_numpy(correlate(left.T, left[:, 0] + left[:, 1] ** 2, resamples=100).value)
    check("shift", values)
