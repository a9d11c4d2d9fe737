"""Intervals that cover what they say, bands that hold everywhere, verdicts that follow from them."""

from __future__ import annotations

import time

import numpy as np
import pytest

from farstate.evaluation.bins import log_bins
from farstate.evaluation.uncertainty import resample, student_t_cdf, student_t_quantile, t_interval
from farstate.evaluation.verdict import halve, judge, to_decide


def draw(documents, seed=0, resamples=1000, confidence=0.95):
    return resample(documents, resamples=resamples, confidence=confidence, generator=np.random.default_rng(seed))


def names(documents: int, stretches: int = 1) -> list[str]:
    return [f"d{number:03d}" for number in range(documents) for _ in range(stretches)]


# Student's t


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    # Standard tables of Student's t.
    [
        (0.975, 1, 12.7062047),
        (0.975, 2, 4.3026527),
        (0.975, 3, 3.1824463),
        (0.95, 4, 2.1318468),
        (0.995, 10, 3.1692727),
        (0.975, 120, 1.9799304),
    ],
)
def test_quantiles_of_t(probability, freedom, expected):
    assert student_t_quantile(probability, freedom) == pytest.approx(expected, abs=1e-7)
    assert student_t_cdf(student_t_quantile(probability, freedom), freedom) == pytest.approx(probability, abs=1e-12)
    assert student_t_cdf(-1.3, freedom) == pytest.approx(1 - student_t_cdf(1.3, freedom))


def test_t_interval_needs_three_seeds():
    assert t_interval([1.0], 0.95) is None
    assert t_interval([1.0, 2.0], 0.95) is None
    assert t_interval([1.0, 2.0, float("nan")], 0.95) is None
    low, high = t_interval([1.0, 2.0, 3.0], 0.95)
    assert (low, high) == pytest.approx((2 - 4.3026527 / 3**0.5, 2 + 4.3026527 / 3**0.5))


# Resamples


def test_weights_by_kind():
    many = draw(names(20, 2))
    assert many.kind == "documents"
    assert np.array_equal(many.weights[:, ::2], many.weights[:, 1::2])
    assert np.all(many.weights[:, ::2].sum(axis=1) == 20)
    assert many.label == "95 % bootstrap over 20 documents"
    few = draw(names(5, 4))
    assert few.kind == "documents and stretches"
    per_document = few.weights.reshape(-1, 5, 4).sum(axis=2)
    assert np.all(per_document % 4 == 0)
    assert np.all(per_document.sum(axis=1) == 20)
    assert few.label == "95 % two-level bootstrap over 5 documents and their 20 stretches"
    assert draw(names(5)).kind == "documents"
    one = draw(names(1, 8))
    assert one.kind == "stretches"
    assert one.label == "95 % bootstrap over 8 stretches of one document; says nothing about other documents"
    two = draw(names(2, 3))
    assert np.all(two.weights.reshape(-1, 2, 3).sum(axis=2) == 3)
    assert two.freedom == 2
    # A document of one stretch would count as free of variance.
    for nothing in (draw(names(1)), draw(names(2)), draw(["a", "b", "b", "b"])):
        assert nothing.kind == "none"
        assert np.isnan(nothing.interval(*nothing.mean(np.ones(len(nothing.weights[0])), np.ones(len(nothing.weights[0]))))).all()


def test_same_seed_same_weights():
    assert np.array_equal(draw(names(30)).weights, draw(names(30)).weights)
    assert not np.array_equal(draw(names(30)).weights, draw(names(30), seed=1).weights)


def test_mean_pools_pairs():
    """A bin's value is the mean over all its (document, position) pairs, not the mean of document means."""
    resamples = draw(names(20))
    counts = np.arange(1.0, 21.0)
    sums = counts * np.linspace(1.0, 2.0, 20)
    value, drawn = resamples.mean(sums, counts)
    assert value == pytest.approx(sums.sum() / counts.sum())
    weights = resamples.weights[7]
    assert drawn[7] == pytest.approx((weights * sums).sum() / (weights * counts).sum())
    curves, drawn = resamples.mean(np.stack([sums, 2 * sums], axis=1), counts)
    assert curves == pytest.approx([value, 2 * value])
    assert drawn.shape == (1000, 2)


@pytest.mark.parametrize(
    ("documents", "stretches", "between", "least"),
    [(30, 1, 1.0, 0.92), (20, 3, 0.5, 0.92), (5, 6, 0.0, 0.92), (5, 6, 0.6, 0.92), (3, 6, 0.6, 0.92), (1, 12, 0.0, 0.91)],
)
def test_coverage(documents, stretches, between, least):
    """Of 400 samples with a known mean at least `least` must lie in their 95 % interval (two standard errors below it)."""
    generator = np.random.default_rng(1)
    held = 0
    for _ in range(400):
        common = between**0.5 * generator.normal(size=(documents, 1))
        values = (common + (1 - between) ** 0.5 * generator.normal(size=(documents, stretches))).ravel()
        resamples = resample(names(documents, stretches), resamples=300, confidence=0.95, generator=generator)
        low, high = resamples.interval(*resamples.mean(values, np.ones(values.size)))
        held += bool(low <= 0.0 <= high)
    print(f"{documents} × {stretches}, between {between}: {held / 400:.3f}")
    assert held / 400 >= least


def test_band_holds_everywhere_at_once():
    generator = np.random.default_rng(2)
    inside = pointwise = 0
    for _ in range(300):
        curve = np.cumsum(generator.normal(size=(25, 12)), axis=1)  # correlated along positions, as losses are
        resamples = resample(names(25), resamples=300, confidence=0.95, generator=generator)
        mean = resamples.mean(curve, np.ones(25))
        low, high = resamples.band(*mean)
        inside += bool(np.all((low <= 0) & (high >= 0)))
        low, high = resamples.interval(*mean)
        pointwise += bool(np.all((low <= 0) & (high >= 0)))
    print(f"band {inside / 300:.3f}, pointwise intervals all at once {pointwise / 300:.3f}")
    assert inside / 300 >= 0.92
    assert pointwise < inside


@pytest.mark.parametrize(("documents", "stretches"), [(5, 1), (12, 1), (20, 1), (5, 4)])
def test_band_of_few_documents_with_independent_positions(documents, stretches):
    """The hardest case for a simultaneous band: nothing is learnt about one position from another."""
    generator = np.random.default_rng(4)
    trials, inside = 500, 0
    for _ in range(trials):
        curve = np.repeat(generator.normal(size=(documents, 20)), stretches, axis=0)
        if stretches > 1:
            curve += 0.5 * generator.normal(size=curve.shape)
        resamples = resample(names(documents, stretches), resamples=200, confidence=0.95, generator=generator)
        low, high = resamples.band(*resamples.mean(curve, np.ones(len(curve))))
        inside += bool(np.all((low <= 0) & (high >= 0)))
    print(f"{documents} documents × {stretches}: {inside / trials:.3f}")
    assert inside / trials >= 0.93


@pytest.mark.parametrize(("first", "second"), [(4, 4), (3, 9)])
def test_coverage_within_two_documents(first, second):
    generator = np.random.default_rng(6)
    documents, held = ["a"] * first + ["b"] * second, 0
    for _ in range(400):
        values = generator.normal(size=first + second)
        resamples = resample(documents, resamples=300, confidence=0.95, generator=generator)
        low, high = resamples.interval(*resamples.mean(values, np.ones(values.size)))
        held += bool(low <= 0.0 <= high)
    print(f"stretches {first} + {second}: {held / 400:.3f}")
    assert held / 400 >= 0.92


def test_pairing_narrows_a_difference():
    generator = np.random.default_rng(3)
    text = generator.normal(size=40)  # what makes a document hard is the same for both arms
    first, second = text + 0.1 * generator.normal(size=40), text + 0.3 + 0.1 * generator.normal(size=40)
    resamples = draw(names(40))
    (a, a_drawn), (b, b_drawn) = resamples.mean(first, np.ones(40)), resamples.mean(second, np.ones(40))
    low, high = resamples.interval(b - a, b_drawn - a_drawn)
    assert 0.2 < low < high < 0.4
    alone = np.subtract(*resamples.interval(a, a_drawn))
    assert abs(alone) > 4 * (high - low)


def test_no_spread_no_width():
    resamples = draw(names(25))
    curve = np.tile([0.1, 0.2], (25, 1))
    low, high = resamples.band(*resamples.mean(curve, np.ones(25)))
    assert low == pytest.approx([0.1, 0.2])
    assert high == pytest.approx([0.1, 0.2])


def test_a_large_figure_takes_little_time():
    generator = np.random.default_rng(0)
    sums = generator.normal(size=(200, 40, 20))
    begin = time.process_time()
    resamples = resample(names(200), resamples=2000, confidence=0.95, generator=generator)
    resamples.interval(*resamples.mean(sums, np.ones(200)))
    seconds = time.process_time() - begin
    print(f"2000 resamples × 40 models × 20 bins: {seconds:.2f} s")
    assert seconds < 2.0


# Definition 3.2

BINS = log_bins(1024, 32, 2)
OCTAVES = log_bins(1024, 32, 1)
"""What a verdict is judged by, whatever the bins."""


def losses(shape, documents=40, stretches=1, noise=0.05, seed=0):
    """Nats summed per text and bin: `shape(position)` + a level of the document + noise of each bin."""
    generator = np.random.default_rng(seed)
    units = documents * stretches
    level = np.repeat(0.3 * generator.normal(size=documents), stretches)[:, None]
    mean = shape(BINS.position.astype(float))
    return (mean + level + noise * generator.normal(size=(units, len(BINS)))) * BINS.tokens


def falling(position):
    return 4.0 - 0.3 * np.log2(np.minimum(position, BINS.position[BINS.high == 16]))


def verdict_of(sums, documents=40, stretches=1, **options):
    return judge(
        sums,
        BINS,
        32,
        names(documents, stretches),
        [number % stretches for number in range(documents * stretches)],
        **{"tolerance": 0.02, "confidence": 0.95, "resamples": 1000, "generator": np.random.default_rng(0), **options},
    )


def test_a_model_that_keeps_gaining_passes():
    result = verdict_of(losses(lambda t: 4.0 - 0.3 * np.log2(t)))
    assert result.outcome == "PASS"
    assert result.t_star == OCTAVES.position[OCTAVES.high == 32][0]
    assert result.gap < 0
    assert result.gap_high <= 0.02
    assert result.interval == "95 % bootstrap over 20 documents"
    assert result.split == "documents"


def test_a_model_that_diverges_fails_where_it_is_worst():
    result = verdict_of(losses(lambda t: falling(t) + 0.4 * np.log2(np.maximum(t / 32, 1))))
    assert result.outcome == "FAIL"
    assert result.worst_position == OCTAVES.position[-1]
    assert result.gap == pytest.approx(0.4 * np.log2(OCTAVES.position[-1] / 32), rel=0.1)
    assert 0.02 < result.gap_low < result.gap < result.gap_high


def test_a_noisy_curve_is_undecided():
    assert verdict_of(losses(lambda t: falling(t) + 0.02 * (t > 32), noise=0.5)).outcome == "UNDECIDED"


@pytest.mark.parametrize(
    ("gap", "half", "expected"),
    [
        ([0.06, 0.01], [0.08, 0.08], ("FAIL", 160.0)),  # one position above the tolerance: (0.08 / 0.04)² of 40 documents
        ([0.06, 0.03], [0.08, 0.01], ("FAIL", 40.0)),  # the position that is shown first decides
        ([0.00, -0.06], [0.06, 0.08], ("PASS", 360.0)),  # every position must be within: the last one decides
        ([0.02, 0.00], [0.06, 0.06], ("PASS", np.inf)),  # exactly the tolerance: never
        ([0.00, 0.02], [0.03, 0.0], ("PASS", 90.0)),  # the tolerance without any spread is within it
    ],
)
def test_documents_to_decide(gap, half, expected):
    assert to_decide(np.array(gap), np.array(half), 0.02, 40) == (expected[0], pytest.approx(expected[1]))


@pytest.mark.parametrize(("rise", "seed", "outcome"), [(0.10, 2, "FAIL"), (0.10, 5, "FAIL"), (-0.05, 0, "PASS")])
def test_so_many_documents_decide(rise, seed, outcome):
    """Copies of the texts leave the estimates nearly as they are; twice the number named is enough, a quarter is not."""
    sums = losses(lambda t: falling(t) + rise * (t > 32), noise=0.35, seed=seed)
    result = verdict_of(sums)
    assert (result.outcome, result.would_be) == ("UNDECIDED", outcome)
    assert result.documents_to_decide is not None
    assert result.documents_to_decide > 40
    outcomes = []
    for times in (0.25, 2.0):
        copies = max(1, round(times * result.documents_to_decide / 40))
        outcomes.append(verdict_of(np.tile(sums, (copies, 1)), documents=40 * copies).outcome)
    assert outcomes == ["UNDECIDED", outcome]


def test_what_is_decided_or_has_no_band_needs_no_documents():
    for result in (verdict_of(losses(falling, noise=0.01)), verdict_of(losses(falling, 1, 1), 1, 1)):
        assert (result.would_be, result.documents_to_decide) == (None, None)
    # Two documents: a band, over their stretches, which says nothing about others.
    within = verdict_of(losses(lambda t: falling(t) + 0.02 * (t > 32), 2, 20, noise=0.5), 2, 20)
    assert within.outcome == "UNDECIDED"
    assert np.isfinite(within.gap_low)
    assert within.documents_to_decide is None


def test_a_flat_curve_within_the_tolerance_passes():
    assert verdict_of(losses(falling, noise=0.01)).outcome == "PASS"
    assert verdict_of(losses(falling, noise=0.01), tolerance=0.0).outcome == "UNDECIDED"


def test_the_error_rate_on_flat_curves():
    """A model exactly at p* everywhere must not FAIL: choosing t* on the tested texts would let it."""
    outcomes = [
        verdict_of(losses(lambda t: np.full_like(t, 3.0), seed=seed), tolerance=0.0, resamples=300).outcome for seed in range(200)
    ]
    assert outcomes.count("FAIL") / 200 <= 0.05


def test_a_broken_model_fails_with_its_position():
    sums = losses(falling)
    sums[3, -2:] = np.nan
    result = verdict_of(sums, broken_at=777)
    assert (result.outcome, result.worst_position) == ("FAIL", 777)
    assert np.isnan(result.gap)
    assert verdict_of(sums).worst_position == BINS.low[-2]
    assert (result.fails_beyond, result.worst_beyond) == (True, 777)
    assert np.isnan([result.gap_beyond, result.gap_beyond_low, result.gap_beyond_high]).all()
    sums[3] = np.nan
    assert verdict_of(sums, broken_at=5).worst_position == 5
    assert verdict_of(sums, broken_at=5).worst_beyond == 33
    sums = losses(falling)
    sums[3, 0] = np.nan
    result = verdict_of(sums)
    assert (result.outcome, result.fails_beyond, result.worst_beyond) == ("FAIL", None, None)


def bumped(beyond):
    """A loss that is lowest at 8, higher by 1 from there to the training context, and by `beyond` after it."""
    return lambda t: 4.0 - 0.3 * np.log2(np.minimum(t, 5)) + 1.0 * ((t > 8) & (t <= 32)) + beyond * (t > 32)


def test_a_bump_within_the_context_hides_no_failure_beyond_it():
    result = verdict_of(losses(bumped(0.4), noise=0.02))
    assert result.outcome == "FAIL"
    assert result.worst_position <= 32
    assert result.gap == pytest.approx(1.0, abs=0.05)
    assert result.fails_beyond is True
    assert result.worst_beyond > 32
    assert result.gap_beyond == pytest.approx(0.4, abs=0.05)
    assert 0.02 < result.gap_beyond_low < result.gap_beyond < result.gap_beyond_high


def test_a_bump_within_the_context_is_no_failure_beyond_it():
    result = verdict_of(losses(bumped(-0.2), noise=0.02))
    assert result.outcome == "FAIL"
    assert result.worst_position <= 32
    assert result.fails_beyond is False
    assert result.worst_beyond > 32
    assert result.gap_beyond == pytest.approx(-0.2, abs=0.05)


def test_beyond_the_context_of_a_falling_or_rising_curve():
    rising = verdict_of(losses(lambda t: falling(t) + 0.4 * np.log2(np.maximum(t / 32, 1))))
    assert rising.fails_beyond is True
    assert (rising.worst_beyond, rising.gap_beyond, rising.gap_beyond_low) == (rising.worst_position, rising.gap, rising.gap_low)
    assert verdict_of(losses(lambda t: 4.0 - 0.3 * np.log2(t))).fails_beyond is False


def test_few_documents_are_split_by_stretches():
    shape = lambda t: falling(t) + 0.4 * np.log2(np.maximum(t / 32, 1))  # noqa: E731
    result = verdict_of(losses(shape, 4, 8), 4, 8)
    assert (result.outcome, result.split) == ("FAIL", "stretches")
    assert result.interval == "95 % two-level bootstrap over 4 documents and their 16 stretches"
    single = verdict_of(losses(shape, 1, 1), 1, 1)
    assert single.outcome == "UNDECIDED"
    assert single.interval.startswith("no interval")
    assert single.fails_beyond is None
    assert single.worst_beyond == OCTAVES.position[-1]
    assert single.gap_beyond > 1.0
    assert np.isnan(single.gap_beyond_low)


def test_halves_are_deterministic_disjoint_and_even():
    for documents, stretches in ((40, 2), (5, 3), (5, 1), (2, 1)):
        numbers = [number % stretches for number in range(documents * stretches)]
        halves = halve(names(documents, stretches), numbers)
        again = halve(names(documents, stretches), numbers)
        assert np.array_equal(halves.test, again.test)
        assert sorted([*halves.choose, *halves.test]) == list(range(documents * stretches))
        assert abs(len(halves.choose) - len(halves.test)) <= 2
        if halves.by == "documents":
            chosen = {names(documents, stretches)[i] for i in halves.choose}
            assert not chosen & {names(documents, stretches)[i] for i in halves.test}


def test_nothing_beyond_the_context_is_undecided():
    bins = log_bins(32, 32, 2)
    sums = np.tile(np.linspace(4, 3, len(bins)) * bins.tokens, (30, 1))
    options = {"tolerance": 0.02, "confidence": 0.95, "resamples": 200, "generator": np.random.default_rng(0)}
    result = judge(sums, bins, 32, names(30), [0] * 30, **options)
    assert result.outcome == "UNDECIDED"
    assert result.worst_position is None
    assert (result.fails_beyond, result.worst_beyond) == (None, None)


def test_noisy_first_positions_do_not_hide_a_failure():
    """The first bins hold a token or two a text (titles): their scatter must not decide where t* lies, nor widen the band."""
    generator = np.random.default_rng(3)
    sums = losses(lambda t: falling(t) + 0.5 * (t > 64), documents=24)
    first = BINS.high <= 4
    sums[:, first] += (generator.normal(size=(len(sums), first.sum())) * 1.0 - 0.3) * BINS.tokens[first]
    result = verdict_of(sums, documents=24)
    assert result.t_star is not None
    assert result.t_star > 8
    assert result.outcome == "FAIL"
