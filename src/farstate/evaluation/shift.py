"""The stage `shift`: are the states of long texts those that training met, and do the predictions suffer from the difference?

Three questions about each analysed head, at a few positions t. Are the states at t distributed as those met in training (sliced
Wasserstein distance, classifier two-sample test)? Are they new (novelty)? Does it matter (swapped states)? Beside every number
stands a null band: the same number for held-out states at positions that training does reach.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from farstate import params
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation import swaps as swapping
from farstate.evaluation.association import Correlations, spearman
from farstate.evaluation.head_tests import MEASURES, NULLS, HeadTests
from farstate.evaluation.perplexity import EvaluationSettings, prepare
from farstate.evaluation.sampled_states import StateSet
from farstate.evaluation.shift_states import NULL_DRAWS, Carried, Measurement, Progress, Reference
from farstate.evaluation.swap_effects import SwapRows, explains
from farstate.evaluation.texts import Text
from farstate.evaluation.training_states import Training
from farstate.evaluation.uncertainty import Floats
from farstate.evaluation.windows import stride
from farstate.files import atomic_path, write_manifest
from farstate.models.language_model import LanguageModel
from farstate.ops.precision import flushed_denormals
from farstate.state import State

OWN, ZERO = "own training", "zero start"
FEWEST_UNITS = 6
"""Below so many documents (or heads) no rank correlation is computed."""

_LABELS: dict[str, Any] = {"model": pl.String, "arm": pl.String, "seed": pl.Int64, "train_length": pl.Int64}
SHIFT_SCHEMA: dict[str, Any] = {
    **_LABELS,
    "layer": pl.Int64,
    "head": pl.Int64,
    "position": pl.Int64,
    "reference": pl.String,
    "measure": pl.String,
    "value": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "null": pl.Float64,
    "null_low": pl.Float64,
    "null_high": pl.Float64,
    "null_end": pl.Float64,
    "null_end_low": pl.Float64,
    "null_end_high": pl.Float64,
    "beyond": pl.Boolean,
    "n_states": pl.Int64,
    "n_documents": pl.Int64,
    "n_reference": pl.Int64,
    "n_reference_documents": pl.Int64,
    "interval": pl.String,
    "reason": pl.String,
}
ASSOCIATION_SCHEMA: dict[str, Any] = {
    **_LABELS,
    "position": pl.Int64,
    "reference": pl.String,
    "across": pl.String,
    "layer": pl.Int64,
    "head": pl.Int64,
    "predictor": pl.String,
    "outcome": pl.String,
    "value": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "p": pl.Float64,
    "p_holm": pl.Float64,
    "n": pl.Int64,
    "reason": pl.String,
}
SWAPS_SCHEMA: dict[str, Any] = {
    **_LABELS,
    "position": pl.Int64,
    "group": pl.String,
    "source": pl.String,
    "together": pl.Boolean,
    "layer": pl.Int64,
    "head": pl.Int64,
    "heads": pl.Int64,
    "drift": pl.Float64,
    "value": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "n_texts": pl.Int64,
    "n_documents": pl.Int64,
    "interval": pl.String,
    "reason": pl.String,
}


def default_positions(context: int, length: int) -> tuple[int, ...]:
    """T_train · 4^k for k ≥ 0 as far as they fit, and the last position that does: after it ⌈T_train / 2⌉ tokens are scored."""
    last = length - stride(context)
    found = []
    position = context
    while position < last:
        found.append(position)
        position *= 4
    return (*found, last)


def positions_of(shift: params.Shift, context: int) -> tuple[tuple[int, ...], int]:
    """The positions whose states are taken, ascending, and the one at which states are swapped.

    Raises:
        FarstateError: a position after which the text does not go on for ⌈T_train / 2⌉ tokens.
    """
    last = shift.length - stride(context)
    if last < 1:
        raise FarstateError(
            f"shift.length: {shift.length} leaves no position followed by ⌈T_train / 2⌉ = {stride(context)} tokens to score; "
            f"take at least {stride(context) + 1}"
        )
    given = shift.positions or default_positions(context, shift.length)
    swap = shift.swap_position or max(given)
    for key, position in [("positions", max(given)), ("swap_position", swap)]:
        if position > last:
            raise FarstateError(
                f"shift.{key}: after position {position} the text must go on for ⌈T_train / 2⌉ = {stride(context)} tokens to score, "
                f"shift.length = {shift.length} allows positions to {last}; lower it or raise shift.length"
            )
    return tuple(sorted({*given, swap})), swap


def evaluate_shift(
    *,
    checkpoint: Path,
    store_directory: Path,
    shift: params.Shift,
    context: int,
    labels: Mapping[str, Any],
    training: Mapping[str, Any] | None,
    output: Path,
    settings: EvaluationSettings,
    scratch: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Measure a checkpoint and write `shift.parquet`, `association.parquet`, `swaps.parquet` and, last, `manifest.json`.

    The states of each analysed head at each position t of held-out texts, read from zero, against two references: those that
    this model's own training met (`training` replayed with the final weights; a model that was not post-trained met zero starts)
    and zero starts on the training split, both after 1 … T_train tokens of a text.

    `shift.parquet`, a row for each head, position, reference and measure:
      sliced_wasserstein: mean W₁ between projections on random unit vectors, in units of the reference's root mean square
          deviation of entries.
      accuracy, auc: out of fold, of a logistic regression on the reference's principal components and the log norm; ½: the
          sides cannot be told apart.
      novelty: median over states of the distance to the k-th nearest reference state, relative to the median of that among
          reference states.
    `null`, `null_low`, `null_high`: the same for held-out states inside training, at random positions as those of the reference, and
    where it lies (an interval over documents); `null_end`, `null_end_low`, `null_end_high`: at its last position, T_train tokens
    after the arm's own initial states. `beyond`: see the function of that name.
    `association.parquet`: rank correlations at one t, across documents (a document's mean novelty with its mean excess NLL) and
    across heads (drift with what a swap changes). `swaps.parquet`: changes of the NLL, in nats per token, over the ⌈T_train / 2⌉
    tokens after a swap.

    Args:
        shift: what is measured.
        context: T_train in tokens.
        labels: `model`, `arm`, `seed`.
        training: the record of the post-training (arm, steps, seed, stretch_tokens, recipe); None: zero starts.
        scratch: folder for temporary files of the run's own; None: the system's.

    Raises:
        FarstateError: no text is long enough, positions that do not fit, the store's vocabulary is larger than the model's,
            a model without a recurrence.
    """
    positions, swap_position = positions_of(shift, context)
    store, texts, model = prepare(checkpoint, store_directory, shift, output, settings)
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
        for left in scratch.glob(f"{_FOLDER}*"):
            shutil.rmtree(left, ignore_errors=True)
    with flushed_denormals(), tempfile.TemporaryDirectory(prefix=_FOLDER, dir=scratch) as folder:
        measured = measure(
            model,
            store,
            texts,
            shift,
            context,
            positions,
            swap_position,
            None if training is None else Training.from_json(training),
            settings,
            Path(folder),
            progress,
        )
    named = {key: labels[key] for key in ("model", "arm", "seed")}
    tables = {
        "shift.parquet": (measured.shift, SHIFT_SCHEMA),
        "association.parquet": (measured.association, ASSOCIATION_SCHEMA),
        "swaps.parquet": (measured.swaps, SWAPS_SCHEMA),
    }
    for name, (rows, schema) in tables.items():
        with atomic_path(output / name) as path:
            frame = pl.DataFrame([{**named, "train_length": context, **row} for row in rows], schema=schema)
            frame.with_columns(pl.col(pl.Float64).fill_nan(None)).write_parquet(path)
    write_manifest(
        output,
        {
            "labels": named,
            "context": context,
            "parameters": model.config.parameter_count(),
            "parameters_without_embeddings": model.config.parameter_count(embeddings=False),
            "shift": shift.model_dump(mode="json"),
            "positions": list(positions),
            "swap_position": swap_position,
            "scored_after": stride(context),
            "documents": len({text.document for text in texts}),
            "stretches": len(texts),
            **measured.facts,
        },
        list(tables),
    )


_FOLDER = "shift-"


@dataclass
class Measured:
    """Rows of the three tables, and what the manifest says of them."""

    shift: list[dict[str, Any]] = field(default_factory=list)
    association: list[dict[str, Any]] = field(default_factory=list)
    swaps: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def measure(
    model: LanguageModel,
    store: TokenStore,
    texts: list[Text],
    shift: params.Shift,
    context: int,
    positions: tuple[int, ...],
    swap_position: int,
    training: Training | None,
    settings: EvaluationSettings,
    folder: Path,
    progress: Progress | None = None,
) -> Measured:
    """All of `evaluate_shift` but files: `folder` takes temporary ones."""
    run = Measurement(model, store, texts, shift, context, positions, swap_position, settings, folder, progress or _silent)
    zero = run.zero_starts()
    own = zero if training is None or training.from_zero else run.met_in(training)
    references = {OWN: own, ZERO: zero}
    carried = run.carried()
    found = Measured()
    novelty, drift = _compare(run, references, carried, found)
    _associate(run, novelty, carried, found)
    _swap(run, own, carried, drift, found)
    document_count = len({text.document for text in texts})
    found.facts |= {
        "heads": [list(head) for head in run.heads],
        "heads_of_model": sum(
            run.like.entries(layer).shape[1] for layer in range(len(run.like)) if run.like.entries(layer).shape[2]
        ),
        "summary": summary(found.shift),
        "references": {name: reference.facts for name, reference in references.items()},
        "comparisons": len(run.heads) * len(positions),
        "broken_at": {str(position): list(where) for position, where in carried.broken.items()} or None,
        "null": f"{NULL_DRAWS} sets of held-out states after 1 … {context} tokens of their text",
        "null_end": f"a set of held-out states after {context} tokens of their text",
        "units": {
            "sliced_wasserstein": "root mean square deviations of the reference's entries",
            "accuracy": "share",
            "auc": "share of pairs",
            "novelty": "median distance among reference states",
            "swaps": "nats per token",
        },
        "interval": run.resamples.label,
        "n_documents": document_count,
    }
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All heads together, by reference, measure and position: the median and the largest head, and how many lie above their nulls.

    `above`: heads beyond training (`beyond`) of the `with_band` of which it is known; nulls are medians over heads; None: no number.
    """
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["reference"], row["measure"], row["position"]), []).append(row)
    found = []
    for (reference, measure, position), heads in groups.items():
        known = [row for row in heads if row.get("value") is not None]
        numbers: dict[str, float | None] = dict.fromkeys(("median", "largest", *NULLS))
        if known:
            values = [row["value"] for row in known]
            numbers |= {"median": float(np.median(values)), "largest": float(np.max(values))}
            for name in NULLS:
                middle = float(np.median([row[name] for row in known]))
                numbers[name] = middle if math.isfinite(middle) else None
        held = [one for row in known if (one := beyond(row)) is not None]
        found.append(
            {
                **{"reference": reference, "measure": measure, "position": position, **numbers},
                **{"heads": len(heads), "known": len(known), "with_band": len(held)},
                "above": sum(held),
            }
        )
    return found


def beyond(row: Mapping[str, Any]) -> bool | None:
    """Whether a row's interval lies above both null bands, inside training and at T_train; None where an end is missing.

    One band is not enough: training met states of all positions up to T_train, and states that have settled by then, so that
    nothing changes any more, differ from that mixture at every position beyond.
    """
    ends = [float(row[name]) for name in ("low", "null_high", "null_end_high") if row.get(name) is not None]
    if len(ends) < 3 or not all(map(math.isfinite, ends)):
        return None
    return ends[0] > max(ends[1:])


def _silent(what: str, done: int, total: int) -> None:
    pass


def _compare(
    run: Measurement, references: Mapping[str, Reference], carried: Carried, found: Measured
) -> tuple[dict[str, Floats], Floats]:
    """Rows of `shift`; the novelty of every text by reference, (heads, positions, texts); drift at the swap, (heads,)."""
    shape = (len(run.heads), len(run.positions), len(run.texts))
    novelty: dict[str, Floats] = {}
    drift = np.full(len(run.heads), np.nan)
    done: dict[int, str] = {}
    for name, reference in references.items():
        if id(reference) in done:
            # A model trained from zero alone met nothing but zero starts: one set of states is both references.
            other = done[id(reference)]
            found.shift += [{**row, "reference": name} for row in found.shift if row["reference"] == other]
            novelty[name] = novelty[other]
            continue
        done[id(reference)] = name
        novelty[name] = np.full(shape, np.nan)
        comparison = HeadTests(run, reference)
        for number, head in enumerate(run.heads):
            results = comparison.of_head(number, [carried.states[position] for position in run.positions])
            for place, (position, result) in enumerate(zip(run.positions, results, strict=True)):
                sampled = carried.states[position]
                for measure in MEASURES:
                    numbers = result.row(measure)
                    found.shift.append(
                        {
                            "layer": head.layer,
                            "head": head.head,
                            "position": position,
                            "reference": name,
                            "measure": measure,
                            "n_states": len(sampled),
                            "n_documents": int(np.unique(sampled.documents).size),
                            "n_reference": len(reference.states),
                            "n_reference_documents": int(np.unique(reference.states.documents).size),
                            **numbers,
                            "beyond": beyond(numbers),
                        }
                    )
                novelty[name][number, place] = result.novelty
                if name == OWN and position == run.swap_position:
                    value = result.numbers.get("sliced_wasserstein")
                    if value is not None:
                        drift[number] = value.value - (0.0 if math.isnan(value.null) else value.null)
            run.progress(f"heads against {name}", number + 1, len(run.heads))
    return novelty, drift


def _associate(run: Measurement, novelty: Mapping[str, Floats], carried: Carried, found: Measured) -> None:
    """Across documents at each t: a head's mean novelty in a document with the document's mean excess."""
    names, inverse = np.unique(run.documents, return_inverse=True)
    counts = np.bincount(inverse)
    for reference, values in novelty.items():
        for place, position in enumerate(run.positions):
            reason = ""
            excess = carried.excess[:, place]
            if position < run.context:
                reason = "the excess is zero by definition up to the training length"
            elif names.size < FEWEST_UNITS:
                reason = f"{names.size} documents; a rank correlation needs {FEWEST_UNITS}"
            elif not np.all(np.isfinite(excess)):
                reason = "a loss is not finite"
            known = np.all(np.isfinite(values[:, place]), axis=1)
            result = None
            if not reason and known.any():
                means = np.stack([np.bincount(inverse, weights=row) / counts for row in values[known, place]])
                outcome = np.bincount(inverse, weights=excess) / counts
                result = spearman(
                    means,
                    outcome,
                    run.generator(4),
                    resamples=run.shift.resamples,
                    confidence=run.shift.confidence,
                )
            order = np.cumsum(known) - 1
            for number, head in enumerate(run.heads):
                have = result is not None and bool(known[number])
                found.association.append(
                    {
                        "position": position,
                        "reference": reference,
                        "across": "documents",
                        "layer": head.layer,
                        "head": head.head,
                        "predictor": "novelty",
                        "outcome": "excess_nll",
                        "n": int(names.size),
                        **_correlation(result if have else None, int(order[number])),
                        "reason": None if have else reason or "no novelty: see shift.parquet",
                    }
                )


def _swap(run: Measurement, own: Reference, carried: Carried, drift: Floats, found: Measured) -> None:
    """Rows of `swaps`, and the association of drift with what a swap changes, across heads."""
    shift, step = run.shift, stride(run.context)
    place = run.positions.index(run.swap_position)
    reason = ""
    if len(own.states) < shift.minimum_states or not np.isfinite(drift).any():
        reason = "no head's drift at this position is known: see shift.parquet"
    elif not np.all(np.isfinite(carried.nll[:, place])):
        reason = "a loss after this position is not finite"
    planned = [] if reason else swapping.plan(drift, shift.swap_heads, len(run.heads), run.generator(5))
    sources: dict[swapping.Source, StateSet] = {
        "training state": own.states.states,
        "other document": carried.states[run.swap_position].states,
    }
    chosen = swapping.donors(run.documents.tolist(), max(1, len(own.states)), run.generator(6))
    change = np.full((len(planned), len(run.texts)), np.nan)
    untouched = np.full(len(run.texts), np.nan)
    for number, (here, path) in enumerate(carried.saved if planned else []):
        tokens = run.tokens([run.texts[text] for text in here], run.swap_position, step + 1)
        state = State.load(path, run.device)
        options: Any = (run.store.vocabulary_size, run.settings.segment_tokens, shift.precision)
        untouched[here] = swapping.continued_nll(run.model, tokens, state, *options)
        change[:, here] = swapping.swapped_nll(run.model, tokens, state, here, planned, sources, chosen, *options)
        run.progress("swapped states", number + 1, len(carried.saved))
    found.swaps += SwapRows(run, carried, place).rows(planned, change - untouched, drift, reason)
    found.facts["swaps"] = {
        "explains": explains(found.swaps),
        "single_heads": f"simultaneous over the heads swapped from one source: {run.resamples.label}",
        "groups_and_contrasts": f"pointwise: {run.resamples.label}",
    }
    _across_heads(run, planned, change - untouched, drift, reason, found)


def _across_heads(
    run: Measurement, planned: Sequence[swapping.Swap], change: Floats, drift: Floats, reason: str, found: Measured
) -> None:
    single = [n for n, swap in enumerate(planned) if len(swap.heads) == 1 and swap.source == "training state"]
    heads = [planned[n].heads[0] for n in single]
    result = None
    if not reason and len(single) < FEWEST_UNITS:
        reason = f"{len(single)} heads were swapped; a rank correlation needs {FEWEST_UNITS}"
    elif not reason:
        result = spearman(
            drift[None, heads],
            change[single].mean(axis=1),
            run.generator(7),
            resamples=run.shift.resamples,
            confidence=run.shift.confidence,
        )
    found.association.append(
        {
            "position": run.swap_position,
            "reference": OWN,
            "across": "heads",
            "layer": None,
            "head": None,
            "predictor": "drift",
            "outcome": "change when swapped",
            "n": len(single),
            **_correlation(result, 0),
            "reason": reason or None,
        }
    )


def _correlation(result: Correlations | None, row: int) -> dict[str, Any]:
    names = ("value", "low", "high", "p", "p_holm")
    return {name: None if result is None else float(getattr(result, name)[row]) for name in names}
