"""Does a model generalise in length? Definition 3.2 of the paper, as a decision with an error rate.

The definition: p* is the lowest perplexity within the training context, reached at t*; the model generalises
to T iff PPL(t) ≤ p* for all t in [t*, T]. A curve is an estimate, so the verdict has three values and a
stated tolerance, and t* is chosen on other texts than those it is tested on (the lowest of noisy values is
too low on the texts it was picked from).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from farstate.evaluation.bins import Bins
from farstate.evaluation.uncertainty import MANY_DOCUMENTS, Floats, resample

Outcome = Literal["PASS", "FAIL", "UNDECIDED"]


@dataclass(frozen=True)
class Halves:
    """A deterministic split of the texts: t* is chosen on `choose`, the gap is tested on `test` (indices).

    `by` says what was split: documents, or stretches within documents; `nothing` when there is one text only.
    """

    choose: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]
    by: Literal["documents", "stretches", "nothing"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of Definition 3.2 for one model.

    Attributes:
        outcome: PASS: the upper band of the gap is within the tolerance at every position beyond t*. FAIL: the
            lower band is above it somewhere, or a loss is not finite. UNDECIDED: neither.
        t_star: position of the lowest perplexity within the training context, on the choosing half.
        p_star: perplexity there on the testing half.
        worst_position: where the gap is largest; for a broken model, where it breaks.
        gap: largest gap NLL(t) − NLL(t*) over t > t*, in nats, on the testing half; NaN for a broken model.
        gap_low, gap_high: the simultaneous band there.
        interval: what the band is, in words.
        split: what was halved.
        fails_beyond: whether the model fails at some position beyond the training context, by the same band: a rise within
            the context, however large, is not a failure to generalise. None: not decidable, without a band or positions there.
        worst_beyond: of the positions beyond the training context, where the gap is largest (of a model that fails
            there, its lower band); for a broken model, where it breaks there. None: there are none.
        gap_beyond, gap_beyond_low, gap_beyond_high: gap and band there.
        would_be: of UNDECIDED, the outcome that more documents would lead to, if every gap stayed as it is. None: decided,
            or nothing can be said without a band.
        documents_to_decide: how many documents of this length that would take in all, see `to_decide`; infinite where the
            gap is the tolerance itself.
    """

    outcome: Outcome
    t_star: int | None
    p_star: float
    worst_position: int | None
    gap: float
    gap_low: float
    gap_high: float
    interval: str
    split: str
    fails_beyond: bool | None = None
    worst_beyond: int | None = None
    gap_beyond: float = math.nan
    gap_beyond_low: float = math.nan
    gap_beyond_high: float = math.nan
    would_be: Literal["PASS", "FAIL"] | None = None
    documents_to_decide: float | None = None


def halve(documents: Sequence[str], stretches: Sequence[int]) -> Halves:
    """Split texts by the hash of their names.

    With 20 documents or more, documents are split. With fewer, the stretches of each document are, so that
    both halves hold all documents; documents of a single stretch alternate.
    """
    if len(documents) < 2:
        everything = np.arange(len(documents))
        return Halves(everything, everything, "nothing")
    many = len(set(documents)) >= MANY_DOCUMENTS
    ranked = sorted(set(documents), key=_hash)
    if many:
        half = {name: number % 2 for number, name in enumerate(ranked)}
        side = np.array([half[name] for name in documents])
    else:
        rank = {name: number for number, name in enumerate(ranked)}
        order = sorted(
            range(len(documents)), key=lambda unit: (rank[documents[unit]], _hash(f"{documents[unit]}/{stretches[unit]}"))
        )
        side = np.empty(len(documents), dtype=np.int64)
        side[order] = np.arange(len(documents)) % 2
    return Halves(np.flatnonzero(side == 0), np.flatnonzero(side == 1), "documents" if many else "stretches")


def judge(
    sums: Floats,
    bins: Bins,
    context: int,
    documents: Sequence[str],
    stretches: Sequence[int],
    *,
    tolerance: float,
    confidence: float,
    resamples: int,
    generator: np.random.Generator,
    broken_at: int | None = None,
) -> Verdict:
    """Decide Definition 3.2 for the losses of one model (or the mean over seeds).

    Losses are judged by octaves of position, one of which ends at T_train: finer bins near the start hold a few
    tokens each, whose scatter would hide any failure. t* is the octave up to T_train whose mean loss plus one standard
    error (over documents) is lowest, on one half of the texts: the lowest loss that this half can tell from luck. A
    FAIL needs no more, since p* is at most the perplexity at any position of the training context. On the other half the gap Δ(t) = NLL(t) − NLL(t*) of every later octave is estimated on the same
    documents (paired), with a two-sided band that holds for all positions at once.

    Args:
        sums: nats summed over each bin's positions, shape (texts, bins).
        bins: the bins.
        context: T_train in tokens.
        documents: each text's document.
        stretches: each text's number in its document.
        tolerance: nats above p* that still count as generalising.
        confidence: of the band.
        resamples: of the bootstrap.
        generator: source of the resamples.
        broken_at: first position whose loss is not finite, where known.
    """
    halves = halve(documents, stretches)
    resampled = resample([documents[i] for i in halves.test], resamples=resamples, confidence=confidence, generator=generator)
    label = resampled.label
    if halves.by == "nothing":
        label = "no interval: one stretch of text, t* chosen and tested on it"
    nan = float("nan")
    sums, bins = _by_octave(sums, bins, context)
    means = sums / bins.tokens
    lost = np.flatnonzero(~np.isfinite(means).all(axis=0))
    if lost.size:
        worst = broken_at if broken_at is not None else int(bins.low[lost[0]])
        lost_beyond = bins.low[lost][bins.low[lost] > context]
        if not lost_beyond.size:
            return Verdict("FAIL", None, nan, worst, nan, nan, nan, label, halves.by)
        beyond = worst if worst > context else int(lost_beyond[0])
        return Verdict("FAIL", None, nan, worst, nan, nan, nan, label, halves.by, fails_beyond=True, worst_beyond=beyond)

    inside = np.flatnonzero(bins.high <= context)
    if not inside.size:
        inside = np.array([0])
    chosen = means[halves.choose][:, inside]
    star = int(inside[np.argmin(chosen.mean(axis=0) + _standard_error(chosen, [documents[i] for i in halves.choose]))])
    tested = means[halves.test]
    with np.errstate(over="ignore"):
        t_star, p_star = int(bins.position[star]), float(np.exp(tested[:, star].mean()))
    if star == len(bins) - 1:  # the evaluation ends at t*: there is nothing beyond to fail at
        return Verdict("UNDECIDED", t_star, p_star, None, nan, nan, nan, label, halves.by)
    gap, drawn = resampled.mean(tested[:, star + 1 :] - tested[:, star, None], np.ones(len(tested)))
    low, high = resampled.band(gap, drawn)
    outcome: Outcome = "UNDECIDED"
    if np.all(high <= tolerance):
        outcome = "PASS"
    elif np.any(low > tolerance):
        outcome = "FAIL"
    worst = _worst(gap, low, tolerance)
    first = int(np.searchsorted(bins.low[star + 1 :], context, side="right"))
    fails_beyond: bool | None = None
    worst_beyond: int | None = None
    numbers = nan, nan, nan
    if first < gap.size:
        at = first + _worst(gap[first:], low[first:], tolerance)
        if np.all(np.isfinite(low)):
            fails_beyond = bool(low[at] > tolerance)
        worst_beyond = int(bins.position[star + 1 + at])
        numbers = float(gap[at]), float(low[at]), float(high[at])
    would_be: Literal["PASS", "FAIL"] | None = None
    needed: float | None = None
    # Resampled stretches say nothing about other documents, of which more would be read.
    if outcome == "UNDECIDED" and np.all(np.isfinite(low)) and resampled.kind in ("documents", "documents and stretches"):
        would_be, needed = to_decide(gap, (high - low) / 2.0, tolerance, len(set(documents)))
        # From MANY_DOCUMENTS on each half has only half of the documents, of which it has all below.
        if halves.by == "stretches" and needed >= MANY_DOCUMENTS:
            needed *= 2.0
    return Verdict(
        outcome,
        t_star,
        p_star,
        int(bins.position[star + 1 + worst]),
        float(gap[worst]),
        float(low[worst]),
        float(high[worst]),
        label,
        halves.by,
        fails_beyond,
        worst_beyond,
        *numbers,
        would_be=would_be,
        documents_to_decide=needed,
    )


def to_decide(gap: Floats, half: Floats, tolerance: float, documents: int) -> tuple[Literal["PASS", "FAIL"], float]:
    """Which way an undecided gap would be decided, and with how many documents in all.

    Assumed: estimates stay as they are, and half-widths shrink as 1/√n with the number n of documents. Then FAIL needs
    one position with gap > tolerance and half-width below their distance, PASS a half-width below tolerance − gap at
    every position: n = documents · (half / |gap − tolerance|)², its minimum over the positions above the tolerance where there
    are any, else its maximum over all. With exactly n the chance of a decision is about a half, since estimates do not stay as
    they are; they can turn the answer round too.

    Args:
        gap, half: of every position, shape (positions,), nats; finite.
        documents: read so far.
    """
    above = gap > tolerance
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num((half / np.abs(gap - tolerance)) ** 2, nan=0.0, posinf=np.inf)  # 0/0: no spread, nothing to decide
    outcome: Literal["PASS", "FAIL"] = "FAIL" if above.any() else "PASS"
    times = float(ratio[above].min() if above.any() else ratio.max())
    return outcome, float(np.ceil(round(documents * times, 6)))


def octaves(bins: Bins, context: int) -> npt.NDArray[np.int64]:
    """Of each bin the whole j for which it lies in (context·2^(j−1), context·2^j]."""
    return np.asarray(np.ceil(np.log2(bins.high / context) - 1e-9).astype(np.int64))


def _by_octave(sums: Floats, bins: Bins, context: int) -> tuple[Floats, Bins]:
    """Losses summed, and bins joined, over (context·2^(j−1), context·2^j] for whole j."""
    octave = octaves(bins, context)
    starts = np.flatnonzero(np.diff(octave, prepend=octave[0] - 1))
    ends = np.append(starts[1:], len(bins)) - 1
    return np.add.reduceat(sums, starts, axis=1), Bins(bins.low[starts], bins.high[ends])


def _standard_error(losses: Floats, documents: Sequence[str]) -> Floats:
    """Standard error of the mean over texts (texts, bins) with documents as the independent units; 0 for one document."""
    names, which = np.unique(np.asarray(documents), return_inverse=True)
    count = len(names)
    if count < 2:
        return np.zeros(losses.shape[1])
    off = np.zeros((count, losses.shape[1]))
    np.add.at(off, which, losses - losses.mean(axis=0))
    return np.asarray(np.sqrt(count / (count - 1) * (off**2).sum(axis=0)) / len(losses))


def _worst(gap: Floats, low: Floats, tolerance: float) -> int:
    """Index of the largest gap; of the largest lower band where one is above the tolerance."""
    return int(np.argmax(low if np.any(low > tolerance) else gap))


def _hash(name: str) -> str:
    return hashlib.sha256(f"farstate verdict {name}".encode()).hexdigest()
