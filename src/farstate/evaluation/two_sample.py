"""Are two sets of states from the same distribution? Distances and tests for one head, with documents as the unit.

States of one document are alike, and the two sides are read from different documents. A test that forgets this is fooled: with
random folds a classifier recognises the documents it was fitted on and tells the sides apart where there is no shift at all.
Here folds and resamples always keep a document whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from farstate.evaluation.uncertainty import Floats, Resamples

Integers = npt.NDArray[np.int64]

_ITERATIONS = 12
_EXTRA = 10
_RIDGE = 1.0
_NEWTON_STEPS = 50
_PROJECTIONS_AT_ONCE = 16


def directions(count: int, entries: int, generator: np.random.Generator) -> Floats:
    """Random unit vectors, (entries, count)."""
    drawn = generator.standard_normal((entries, count))
    return drawn / np.linalg.norm(drawn, axis=0)


Estimate = tuple[float, Floats]
"""A number and its resamples, (resamples,)."""


def sliced_wasserstein(left: Floats, right: Floats, ours: Resamples, theirs: Resamples) -> Estimate:
    """Mean over projections of W₁ = ∫ |F(x) − G(x)| dx.

    F and G are the distribution functions of the projected states, each state of a side with the same weight: the two sides may
    hold different numbers. A distance is biased upwards by every resampling with replacement, which makes states coincide.
    So it is resampled to first order: with s = sign(F − G), a state at x counts a(x) = ∫_x^∞ s dx for its side, and the resampled
    distance is W₁ plus the change of the mean of a on the left less that on the right.

    Args:
        left, right: projections, (n, directions) and (m, directions).
        ours, theirs: resamples of the n and of the m states.
    """
    count, total = left.shape[0], 0.0
    influence = np.zeros(count + right.shape[0])
    for first in range(0, left.shape[1], _PROJECTIONS_AT_ONCE):
        block = np.concatenate([left[:, first : first + _PROJECTIONS_AT_ONCE], right[:, first : first + _PROJECTIONS_AT_ONCE]])
        order = np.argsort(block, axis=0)
        width = np.diff(np.take_along_axis(block, order, axis=0), axis=0)
        step = np.where(order < count, 1.0 / count, -1.0 / right.shape[0])
        gap = np.cumsum(step, axis=0)[:-1]
        total += float((np.abs(gap) * width).sum())
        # Equal shares differ by rounding alone.
        sign = np.where(np.abs(gap) > 1e-12, np.sign(gap), 0.0)
        beyond = np.zeros(block.shape)
        beyond[:-1] = np.cumsum((sign * width)[::-1], axis=0)[::-1]
        placed = np.empty(block.shape)
        np.put_along_axis(placed, order, beyond, axis=0)
        influence += placed.sum(axis=1)
    influence /= left.shape[1]
    value = total / left.shape[1]
    changes = []
    for resamples, part in ((ours, influence[:count]), (theirs, influence[count:])):
        mean, again = resamples.mean(part, np.ones(part.size))
        changes.append(again - mean)
    return value, value + changes[0] - changes[1]


class Products:
    """Inner products of all states of a head with its reference states: all that distances and principal components need.

    Entries are centred at the reference's mean and divided by its root mean square deviation, so that heads compare.

    Args:
        reference: (n, E) float64; `others`: sets of states, (m, E) each.

    Attributes:
        scale: root mean square deviation of the reference's entries from their means, in units of the state.
        inner: (n + Σ m, n): rows are the reference, then the others in order.
        square: (n + Σ m,) squared norms of the centred states.
        log_norm: (n + Σ m,) natural logarithm of the norm of the states as they are.
    """

    def __init__(self, reference: Tensor, others: Sequence[Tensor]) -> None:
        mean = reference.mean(0)
        centred = reference - mean
        self.scale = float(centred.square().mean().sqrt())
        unit = self.scale or 1.0
        centred = centred / unit
        inner, square, norm = [], [], []
        for states in (reference, *others):
            moved = (states - mean) / unit
            inner.append((moved @ centred.T).cpu().numpy())
            square.append(moved.square().sum(1).cpu().numpy())
            norm.append(states.norm(dim=1).clamp_min(1e-30).log().cpu().numpy())
        self.inner: Floats = np.concatenate(inner)
        self.square: Floats = np.concatenate(square)
        self.log_norm: Floats = np.concatenate(norm)
        self.mean, self.unit = mean, unit

    def project(self, states: Tensor, onto: Tensor) -> Floats:
        """Scaled states on unit vectors `onto`, (E, directions): (n, directions)."""
        return ((states - self.mean) / self.unit @ onto).cpu().numpy()

    def squared_distances(self) -> Floats:
        """(n + Σ m, n) squared Euclidean distances to the reference states."""
        count = self.inner.shape[1]
        found = self.square[:, None] + self.square[None, :count] - 2.0 * self.inner
        return np.maximum(found, 0.0)

    def features(self, fitted: Integers, components: int) -> Floats:
        """Scores on the principal components of the reference states `fitted`, then the log norm: (n + Σ m, ≤ components + 1)."""
        gram = self.inner[np.ix_(fitted, fitted)]
        column = gram.mean(0)
        values, vectors = _largest(gram - column - column[:, None] + column.mean(), min(components, fitted.size - 1))
        # The vectors sum to zero, so that constants of a row vanish.
        scores = (self.inner[:, fitted] - column) @ (vectors / np.sqrt(values))
        return np.column_stack([scores, self.log_norm])


def _largest(gram: Floats, count: int) -> tuple[Floats, Floats]:
    """The largest eigenvalues of a positive semidefinite matrix and their vectors, by subspace iteration where it is large.

    Values that rounding alone accounts for are left out.
    """
    size = gram.shape[0]
    if size <= 4 * (count + _EXTRA):
        values, vectors = np.linalg.eigh(gram)
    else:
        basis = np.random.default_rng(0).standard_normal((size, count + _EXTRA))
        for _ in range(_ITERATIONS):
            basis, _ = np.linalg.qr(gram @ basis)
        values, rotation = np.linalg.eigh(basis.T @ gram @ basis)
        vectors = basis @ rotation
    keep = np.flatnonzero(values > 1e-9 * max(float(values[-1]), 1e-300))[-count:][::-1]
    return values[keep], vectors[:, keep]


def logistic(features: Floats, labels: npt.NDArray[np.bool_]) -> Floats | None:
    """Weights of a ridge logistic regression, the intercept last; the two classes weigh the same in all.

    Minimises Σ w_i log(1 + exp(∓ z_i)) + ½ ‖w‖² with Σ w_i the number of states, by Newton's method. None: a class is missing.
    """
    positive = int(labels.sum())
    count = labels.size
    if positive in (0, count):
        return None
    weight = np.where(labels, 0.5 * count / positive, 0.5 * count / (count - positive))
    design = np.column_stack([features, np.ones(count)])
    penalty = np.full(design.shape[1], _RIDGE)
    penalty[-1] = 0.0
    target = labels.astype(np.float64)

    def objective(coefficients: Floats) -> float:
        z = design @ coefficients
        return float((weight * (np.logaddexp(0.0, z) - target * z)).sum() + 0.5 * (penalty * coefficients**2).sum())

    coefficients = np.zeros(design.shape[1])
    value = objective(coefficients)
    for _ in range(_NEWTON_STEPS):
        z = design @ coefficients
        probability = 0.5 * (1.0 + np.tanh(0.5 * z))
        gradient = design.T @ (weight * (probability - target)) + penalty * coefficients
        curvature = (design * (weight * probability * (1.0 - probability))[:, None]).T @ design + np.diag(penalty + 1e-10)
        step = np.linalg.solve(curvature, gradient)
        size = 1.0
        while (new := objective(coefficients - size * step)) > value and size > 1e-6:
            size *= 0.5
        coefficients = coefficients - size * step
        if value - new <= 1e-12 * (1.0 + abs(value)):
            break
        value = new
    return coefficients


@dataclass(frozen=True)
class Scores:
    """Out-of-fold scores of both sides, positive for the other side; a fold without a fit has NaN."""

    reference: Floats
    other: Floats
    reference_folds: Integers
    other_folds: Integers


def out_of_fold(features: Sequence[Floats], reference_folds: Integers, other: slice, other_folds: Integers) -> Scores:
    """Scores of states by classifiers that saw no document of their fold.

    Args:
        features: by fold, the features of all states fitted without that fold; the reference states come first.
        reference_folds: (n,), `other_folds`: (m,).
        other: where the other side's states are among the rows.
    """
    count = reference_folds.size
    left, right = np.full(count, np.nan), np.full(other_folds.size, np.nan)
    for fold, table in enumerate(features):
        inside, outside = reference_folds != fold, other_folds != fold
        mine, theirs = table[:count], table[other]
        fitted = np.concatenate([mine[inside], theirs[outside]])
        centre, spread = fitted.mean(0), fitted.std(0)
        spread[spread == 0.0] = 1.0
        labels = np.concatenate([np.zeros(int(inside.sum()), dtype=bool), np.ones(int(outside.sum()), dtype=bool)])
        weights = logistic((fitted - centre) / spread, labels)
        if weights is not None:
            left[~inside] = (mine[~inside] - centre) / spread @ weights[:-1] + weights[-1]
            right[~outside] = (theirs[~outside] - centre) / spread @ weights[:-1] + weights[-1]
    return Scores(left, right, reference_folds, other_folds)


def accuracy(scores: Scores, reference: Resamples, other: Resamples) -> Estimate:
    """Balanced out-of-fold accuracy, the mean of both sides' shares of states told right, and its resamples."""
    left = _right(-scores.reference)
    right = _right(scores.other)
    resampled = 0.5 * (reference.weights @ left / reference.weights.sum(1) + other.weights @ right / other.weights.sum(1))
    return 0.5 * float(left.mean() + right.mean()), resampled


def auc(scores: Scores, reference: Resamples, other: Resamples) -> Estimate:
    """Share of pairs of a fold, one state of each side, whose scores are in the right order, and its resamples.

    Pairs across folds are not compared: their scores come from different classifiers.
    """
    top, bottom = np.zeros(reference.weights.shape[0]), np.zeros(reference.weights.shape[0])
    won, pairs = 0.0, 0
    for fold in np.unique(scores.reference_folds):
        mine, theirs = scores.reference_folds == fold, scores.other_folds == fold
        difference = scores.other[theirs][None, :] - scores.reference[mine][:, None]
        order = _right(difference)
        won, pairs = won + float(order.sum()), pairs + order.size
        left, right = reference.weights[:, mine], other.weights[:, theirs]
        top += ((left @ order) * right).sum(1)
        bottom += left.sum(1) * right.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (won / pairs if pairs else math.nan), top / bottom


def _right(values: Floats) -> Floats:
    """1 where positive, ½ where zero, 0 where negative."""
    return 0.5 * (1.0 + np.sign(values))
