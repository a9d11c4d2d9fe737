"""One head's states at all positions against one reference: distances, classifier tests and novelty, with null bands."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farstate.evaluation.novelty import novelties, weighted_median
from farstate.evaluation.sampled_states import Sampled
from farstate.evaluation.shift_states import Measurement, Reference
from farstate.evaluation.two_sample import Estimate, Products, accuracy, auc, directions, out_of_fold, sliced_wasserstein
from farstate.evaluation.uncertainty import Floats, Resamples

MEASURES = ("sliced_wasserstein", "accuracy", "auc", "novelty")
NULLS = ("null", "null_low", "null_high", "null_end", "null_end_low", "null_end_high")
"""Columns of `shift.parquet`: held-out states after 1 … T_train tokens, and after exactly T_train."""
_INSIDE, _END = -1, -2


@dataclass(frozen=True)
class Number:
    """A measure with its interval and its null bands, inside training and at the end of it; NaN where there is none."""

    value: float
    low: float
    high: float
    interval: str
    null: float = math.nan
    null_low: float = math.nan
    null_high: float = math.nan
    null_end: float = math.nan
    null_end_low: float = math.nan
    null_end_high: float = math.nan


@dataclass
class Result:
    """A head at a position.

    Attributes:
        numbers: by measure.
        reasons: by measure, why there is no number; under "" for all measures.
        novelty: of every text, (texts,); NaN without one.
    """

    numbers: dict[str, Number] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    novelty: float | Floats = math.nan

    def row(self, measure: str) -> dict[str, Any]:
        """The columns of `shift.parquet` that hold the measure."""
        number = self.numbers.get(measure)
        if number is None:
            return {"reason": self.reasons.get(measure, self.reasons.get("", ""))}
        names = ("value", "low", "high", *NULLS, "interval")
        return {name: getattr(number, name) for name in names}


@dataclass(frozen=True)
class _Set:
    """States against the reference: those at a position, a null draw (`place` _INSIDE), or the null at the end (_END)."""

    place: int
    sampled: Sampled
    resamples: Resamples
    values: Tensor


class HeadTests:
    """All sets of held-out states against one reference, head by head."""

    def __init__(self, run: Measurement, reference: Reference) -> None:
        self.run, self.reference = run, reference.states
        self.ours = run.resample(self.reference.documents, training=True)
        few = run.shift.minimum_states
        nulls = [(_INSIDE, null) for null in reference.nulls]
        if reference.ends is not None:
            nulls.append((_END, reference.ends))
        self.nulls = [(place, null, run.resample(null.documents)) for place, null in nulls if len(null) >= few]

    def of_head(self, number: int, tested: Sequence[Sampled]) -> list[Result]:
        """The head `number` (its place among the analysed heads) at each position: results in the order of `tested`."""
        run = self.run
        results = [Result() for _ in tested]
        table = self.reference.values(number)
        if reason := self._reason(table):
            for result in results:
                result.reasons[""] = reason
            return results
        sets: list[_Set] = []
        for place, sampled in enumerate(tested):
            values = sampled.values(number)
            lost = np.flatnonzero(~np.isfinite(values).all(axis=1))
            if not lost.size:
                sets.append(_Set(place, sampled, run.resamples, self._tensor(values)))
                continue
            text = run.texts[int(lost[0])]
            results[place].reasons[""] = (
                f"the state is not finite at position {run.positions[place]} in {lost.size} of {len(run.texts)} texts, "
                f"first in document {text.document}, stretch {text.stretch}"
            )
        for kind, null, resamples in self.nulls:
            values = null.values(number)
            if np.isfinite(values).all():
                sets.append(_Set(kind, null, resamples, self._tensor(values)))
        ours = self._tensor(table)
        products = Products(ours, [one.values for one in sets])
        ends = np.cumsum([len(self.reference), *(len(one.sampled) for one in sets)])
        spans = [slice(int(first), int(last)) for first, last in pairwise(ends)]
        found = {
            "sliced_wasserstein": self._distances(products, ours, sets),
            **self._classified(products, sets, spans),
            "novelty": self._novelty(products, sets, spans, results),
        }
        for measure, estimates in found.items():
            if isinstance(estimates, str):
                for one in sets:
                    if one.place >= 0:
                        results[one.place].reasons[measure] = estimates
                continue
            inside, end = ([e for one, e in zip(sets, estimates, strict=True) if one.place == kind] for kind in (_INSIDE, _END))
            for one, estimate in zip(sets, estimates, strict=True):
                if one.place >= 0:
                    results[one.place].numbers[measure] = self._number(measure, estimate, inside, end)
        return results

    def _reason(self, table: npt.NDArray[np.float32]) -> str:
        """Why nothing can be said of this head at any position."""
        few = self.run.shift.minimum_states
        for count, side in ((len(self.reference), "training"), (len(self.run.texts), "held-out")):
            if count < few:
                return f"{count} {side} states; a test needs {few} (shift.minimum_states)"
        if not np.isfinite(table).all():
            return "a training state of this head is not finite"
        return "" if (table != table[0]).any() else "the training states of this head all coincide"

    def _tensor(self, values: npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values.astype(np.float64)).to(self.run.device)

    def _distances(self, products: Products, ours: Tensor, sets: Sequence[_Set]) -> list[Estimate]:
        run = self.run
        onto = torch.from_numpy(directions(run.shift.projections, ours.shape[1], run.generator(9))).to(run.device)
        left = products.project(ours, onto)
        return [sliced_wasserstein(left, products.project(one.values, onto), self.ours, one.resamples) for one in sets]

    def _classified(self, products: Products, sets: Sequence[_Set], spans: Sequence[slice]) -> dict[str, list[Estimate] | str]:
        run, folds = self.run, self.reference.folds
        if run.folds < 2:
            few = "one document on a side; a test whose folds are whole documents needs two of each"
            return {"accuracy": few, "auc": few}
        features = [products.features(np.flatnonzero(folds != fold), run.shift.components) for fold in range(run.folds)]
        accuracies, areas = [], []
        for one, span in zip(sets, spans, strict=True):
            scores = out_of_fold(features, folds, span, one.sampled.folds)
            if not (np.isfinite(scores.reference).all() and np.isfinite(scores.other).all()):
                return dict.fromkeys(("accuracy", "auc"), "all states of a side are in one fold")
            accuracies.append(accuracy(scores, self.ours, one.resamples))
            areas.append(auc(scores, self.ours, one.resamples))
        return {"accuracy": accuracies, "auc": areas}

    def _novelty(
        self, products: Products, sets: Sequence[_Set], spans: Sequence[slice], results: Sequence[Result]
    ) -> list[Estimate] | str:
        """The median novelty of each set; the texts' own go to `results`."""
        run = self.run
        squared, neighbours = products.squared_distances(), run.shift.neighbours
        novel = novelties(squared, neighbours, self.reference.documents, self.reference.chains, run.generator(8))
        if novel is None:
            return f"a training state has fewer than {neighbours} others of another document (shift.neighbours), or they coincide"
        for one, span in zip(sets, spans, strict=True):
            if one.place >= 0:
                results[one.place].novelty = novel[span]
        return [
            (float(np.median(novel[span])), weighted_median(novel[span], one.resamples.weights))
            for one, span in zip(sets, spans, strict=True)
        ]

    def _number(self, measure: str, own: Estimate, inside: Sequence[Estimate], end: Sequence[Estimate]) -> Number:
        """With an interval over documents, and where the null sets lie when documents vary."""
        run = self.run
        held, label = run.resamples, run.resamples.label
        if measure != "novelty":
            # Both sides vary; the one with the fewer documents decides how far an interval is stretched.
            held = max((self.ours, held), key=lambda resamples: (resamples.kind == "none", resamples.factor))
            label = f"{label}; training side: {self.ours.label}"
        low, high = _ends(own, held)
        bands = []
        for nulls in (inside, end):
            null = float(np.mean([value for value, _ in nulls])) if nulls else math.nan
            ends = _ends((null, np.concatenate([again for _, again in nulls])), held) if nulls else (math.nan, math.nan)
            bands += [null, *ends]
        return Number(own[0], low, high, label, *bands)


def _ends(estimate: Estimate, resamples: Resamples) -> tuple[float, float]:
    value, again = estimate
    low, high = resamples.interval(value, again[np.isfinite(again)])
    # No measure is below zero.
    return float(np.maximum(0.0, low)), float(high)
