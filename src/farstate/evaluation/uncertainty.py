"""Bootstrap over documents: resampled means, intervals and simultaneous bands, the same resamples for everyone.

A *unit* is one text (a stretch of a document). A resample is a vector of weights over the units, so every
estimate is a ratio of two matrix products, and estimates of different arms on the same texts are paired by
using the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Kind = Literal["documents", "documents and stretches", "stretches", "none"]

MANY_DOCUMENTS = 20
"""From so many documents on, documents alone are resampled."""
FEW_DOCUMENTS = 3
"""Below so many documents nothing can be said about other documents: only stretches are resampled."""


@dataclass(frozen=True)
class Resamples:
    """Weights of the units in every resample.

    Attributes:
        weights: times each unit is drawn, shape (resamples, units).
        kind: what was resampled.
        factor: by how much an interval is wider than the bootstrap's own, ≥ 1. The bootstrap of n units
            underestimates the standard error by √((n − 1)/n) and takes the normal for Student's t; the
            factor makes good for both (Hesterberg 2015, "What teachers should know about the bootstrap", on narrowness bias).
        confidence: of the intervals.
        documents, stretches: how many there are.
        freedom: degrees of freedom of Student's t behind `factor`; 0 without an interval.
    """

    weights: Floats
    kind: Kind
    factor: float
    confidence: float
    documents: int
    stretches: int
    freedom: int

    @property
    def label(self) -> str:
        """What an interval made from these resamples is, in words for tables and pages."""
        if self.kind == "none":
            return "no interval: too few texts"
        level = f"{100 * self.confidence:g} %"
        if self.kind == "documents":
            return f"{level} bootstrap over {self.documents} documents"
        if self.kind == "documents and stretches":
            return f"{level} two-level bootstrap over {self.documents} documents and their {self.stretches} stretches"
        many = "one document" if self.documents == 1 else f"{self.documents} documents"
        return f"{level} bootstrap over {self.stretches} stretches of {many}; says nothing about other documents"

    def mean(self, sums: npt.ArrayLike, counts: npt.ArrayLike) -> tuple[Floats, Floats]:
        """Mean over all (unit, position) pairs, and its resamples: Σ weights · sums / Σ weights · counts.

        Args:
            sums: per unit, shape (units, …).
            counts: per unit, broadcast to the shape of `sums` from the left.

        Returns:
            The estimate, shape (…), and its resamples, shape (resamples, …).
        """
        top = np.asarray(sums, dtype=np.float64)
        bottom = np.asarray(counts, dtype=np.float64)
        bottom = np.broadcast_to(bottom.reshape(bottom.shape + (1,) * (top.ndim - bottom.ndim)), top.shape)
        estimate = top.sum(axis=0) / bottom.sum(axis=0)
        flat = top.reshape(top.shape[0], -1)
        resampled = (self.weights @ flat) / (self.weights @ bottom.reshape(flat.shape))
        return estimate, resampled.reshape(-1, *top.shape[1:])

    def interval(self, estimate: npt.ArrayLike, resampled: Floats) -> tuple[Floats, Floats]:
        """Pointwise percentile interval, its arms stretched by `factor`; NaN where there is none.

        Args:
            estimate: shape (…).
            resampled: shape (resamples, …).

        Returns:
            Lower and upper end, shape (…).
        """
        centre = np.asarray(estimate, dtype=np.float64)
        if self.kind == "none":
            return np.full_like(centre, np.nan), np.full_like(centre, np.nan)
        tail = (1.0 - self.confidence) / 2.0
        low, high = np.quantile(resampled, [tail, 1.0 - tail], axis=0)
        return centre - self.factor * (centre - low), centre + self.factor * (high - centre)

    def band(self, estimate: npt.ArrayLike, resampled: Floats) -> tuple[Floats, Floats]:
        """Simultaneous band: with the stated confidence the whole curve lies within it.

        The half-width is c standard errors, c the larger of two critical values: `factor` times the quantile over
        resamples of the largest standardised deviation over all positions (max-statistic), and Bonferroni's for
        Student's t. The first alone covers too little for few documents whose positions vary independently: n documents
        span n − 1 directions, so their resamples hold fewer independent positions than there are, and the errors of
        all positions are taken for known. The second holds for any dependence. A position without spread gets a
        band of width zero.

        Args:
            estimate: a curve, shape (positions,).
            resampled: shape (resamples, positions).

        Returns:
            Lower and upper band, shape (positions,); NaN where there is none.
        """
        centre = np.asarray(estimate, dtype=np.float64)
        if self.kind == "none" or not np.all(np.isfinite(resampled)) or not centre.size:
            return np.full_like(centre, np.nan), np.full_like(centre, np.nan)
        deviation = np.abs(resampled - centre)
        error = resampled.std(axis=0, ddof=1)
        # Rounding leaves a spread of about 1e-16 where every unit agrees: that is no spread.
        spread = error > 1e-12 * np.maximum(1.0, np.abs(centre))
        largest = (deviation[:, spread] / error[spread]).max(axis=1) if spread.any() else np.zeros(len(resampled))
        critical = max(self.factor * float(np.quantile(largest, self.confidence)), self._bonferroni(centre.size))
        half = np.where(spread, critical * error, 0.0)
        return centre - half, centre + half

    def _bonferroni(self, positions: int) -> float:
        tail = (1.0 - self.confidence) / (2.0 * positions)
        return math.sqrt((self.freedom + 1) / self.freedom) * student_t_quantile(1.0 - tail, self.freedom)


def resample(documents: Sequence[str], *, resamples: int, confidence: float, generator: np.random.Generator) -> Resamples:
    """Draw the weights for units that belong to `documents` (one name a unit).

    At least 20 documents: documents are drawn with replacement, all their stretches with them. 3 to 19:
    documents, then within each drawn document its stretches (two levels); this counts the variance within
    documents twice and errs on the wide side. Below 3: the stretches within each document, the documents
    held fixed; no interval where one of them has a single stretch, whose variance nothing tells.
    """
    names, inverse = np.unique(np.asarray(documents), return_inverse=True)
    count, units = int(names.size), int(inverse.size)
    members = [np.flatnonzero(inverse == number) for number in range(count)]
    if count < FEW_DOCUMENTS:
        drawn = np.ones((resamples, count), dtype=np.int64)
        kind: Kind = "stretches"
        freedom = min(which.size for which in members) - 1
    else:
        drawn = generator.multinomial(count, np.full(count, 1.0 / count), size=resamples)
        kind = "documents" if count >= MANY_DOCUMENTS or units == count else "documents and stretches"
        freedom = count - 1
    if freedom == 0:
        return Resamples(np.ones((resamples, units)), "none", 1.0, confidence, count, units, 0)
    weights = np.empty((resamples, units))
    for number, which in enumerate(members):
        if kind == "documents":
            weights[:, which] = drawn[:, number, None]
        else:
            weights[:, which] = generator.multinomial(drawn[:, number] * which.size, np.full(which.size, 1.0 / which.size))
    return Resamples(weights, kind, _factor(freedom, confidence), confidence, count, units, freedom)


def _factor(freedom: int, confidence: float) -> float:
    upper = 0.5 + confidence / 2.0
    return math.sqrt((freedom + 1) / freedom) * student_t_quantile(upper, freedom) / NormalDist().inv_cdf(upper)


def t_interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """Student's t interval of the mean of independent values (seeds); None below three of them or when one is not finite."""
    sample = np.asarray(values, dtype=np.float64)
    if sample.size < 3 or not np.all(np.isfinite(sample)):
        return None
    half = student_t_quantile(0.5 + confidence / 2.0, sample.size - 1) * float(sample.std(ddof=1)) / math.sqrt(sample.size)
    return float(sample.mean()) - half, float(sample.mean()) + half


def student_t_cdf(value: float, freedom: int) -> float:
    """Distribution function of Student's t with integer degrees of freedom (Abramowitz & Stegun 26.7.3 and 26.7.4)."""
    if freedom < 1:
        raise ValueError("degrees of freedom must be at least 1")
    angle = math.atan2(abs(value), math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    if freedom % 2:
        term, total = cosine, 0.0
        for k in range(1, (freedom - 1) // 2 + 1):
            total += term
            term *= cosine * cosine * 2 * k / (2 * k + 1)
        within = 2.0 / math.pi * (angle + sine * total)
    else:
        term, total = 1.0, 0.0
        for k in range(1, freedom // 2 + 1):
            total += term
            term *= cosine * cosine * (2 * k - 1) / (2 * k)
        within = sine * total
    return 0.5 + math.copysign(within / 2.0, value)


def student_t_quantile(probability: float, freedom: int) -> float:
    """Inverse of `student_t_cdf` for probabilities in [0.5, 1), by bisection; the normal beyond 10,000 degrees of freedom."""
    if not 0.5 <= probability < 1.0:
        raise ValueError("probability must lie in [0.5, 1)")
    if freedom > 10_000:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while student_t_cdf(high, freedom) < probability:
        high *= 2.0
    for _ in range(200):
        middle = (low + high) / 2.0
        if not low < middle < high:
            break
        low, high = (middle, high) if student_t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2.0
