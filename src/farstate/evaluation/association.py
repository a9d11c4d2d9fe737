"""Rank correlation with a permutation test, and Holm's correction for many of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from farstate.evaluation.uncertainty import Floats

PERMUTATIONS = 9999


@dataclass(frozen=True)
class Correlations:
    """Spearman's ρ of each row of predictors with one outcome.

    Attributes:
        value: (rows,); NaN where a row or the outcome is constant.
        low, high: (rows,) bootstrap interval over the units, pointwise.
        p: (rows,) two-sided permutation p; `p_holm`: corrected for all rows.
    """

    value: Floats
    low: Floats
    high: Floats
    p: Floats
    p_holm: Floats


def spearman(
    predictors: Floats, outcome: Floats, generator: np.random.Generator, *, resamples: int, confidence: float
) -> Correlations:
    """Correlate every row of `predictors`, (rows, units), with `outcome`, (units,), by rank.

    The same permutations of the units serve all rows. The interval is a percentile bootstrap of the units.
    """
    units = outcome.size
    below = [_below(row) for row in (*predictors, outcome)]
    ranks = [_standard(matrix.sum(axis=1)) for matrix in below]
    standard, target = np.stack(ranks[:-1]), ranks[-1]
    value = standard @ target
    orders = np.argsort(generator.random((PERMUTATIONS, units)), axis=1)
    drawn = np.abs(standard @ target[orders].T)
    p = (1.0 + (drawn >= np.abs(value)[:, None] - 1e-12).sum(axis=1)) / (1.0 + PERMUTATIONS)
    p[~np.isfinite(value)] = np.nan
    weights = generator.multinomial(units, np.full(units, 1.0 / units), size=resamples).astype(np.float64)
    again = np.stack([_weighted_correlation(matrix, below[-1], weights) for matrix in below[:-1]])
    tail = (1.0 - confidence) / 2.0
    # A resample in which a side is constant shows no association.
    low, high = np.quantile(np.nan_to_num(again), [tail, 1.0 - tail], axis=1)
    broken = ~np.isfinite(value)
    low[broken], high[broken] = np.nan, np.nan
    return Correlations(value, low, high, p, holm(p))


def holm(p: npt.ArrayLike) -> Floats:
    """Holm's step-down correction: P(any false finding among all) is held; NaN entries are no tests and stay NaN."""
    given = np.asarray(p, dtype=np.float64)
    corrected = np.full_like(given, math.nan)
    tests = np.flatnonzero(np.isfinite(given))
    order = tests[np.argsort(given[tests], kind="stable")]
    steps = given[order] * (order.size - np.arange(order.size))
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if order.size else steps
    return corrected


def _below(values: Floats) -> Floats:
    """[i, j]: 1 where value j is below value i, ½ where they are equal; its row sums are ranks, equal values sharing theirs."""
    return 0.5 * (1.0 + np.sign(values[:, None] - values[None, :]))


def _standard(ranks: Floats) -> Floats:
    """Centred, of length 1; NaN where all are equal."""
    centred = ranks - ranks.mean()
    length = float(np.linalg.norm(centred))
    return centred / length if length > 0.0 else np.full_like(centred, math.nan)


def _weighted_correlation(left: Floats, right: Floats, weights: Floats) -> Floats:
    """Rank correlation under each row of `weights`, (resamples, units), as if each unit were there so many times."""
    ranks = [weights @ matrix.T for matrix in (left, right)]
    total = weights.sum(axis=1, keepdims=True)
    centred = [rank - (weights * rank).sum(axis=1, keepdims=True) / total for rank in ranks]
    covariance, *variances = (
        (weights * one * other).sum(axis=1)
        for one, other in ((centred[0], centred[1]), (centred[0], centred[0]), (centred[1], centred[1]))
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        return covariance / np.sqrt(variances[0] * variances[1])
