"""The stage `compare_reach`: how far Definition 3.2 holds, as a verdict to every octave beyond the training length.

The verdict to the last position says whether a model fails somewhere; these say from where on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from farstate import params
from farstate.evaluation.bins import Bins
from farstate.evaluation.compare import begun, with_mean
from farstate.evaluation.verdict import judge, octaves
from farstate.files import atomic_path, write_manifest

_NUMBERS = ("p_star", "gap", "gap_low", "gap_high", "gap_beyond", "gap_beyond_low", "gap_beyond_high", "documents_to_decide")
REACH_SCHEMA: dict[str, Any] = {
    **{"model": pl.String, "arm": pl.String, "seed": pl.Int64, "train_length": pl.Int64, "T": pl.Int64, "verdict": pl.String},
    **{"fails_beyond": pl.Boolean, "t_star": pl.Int64, "worst_beyond": pl.Int64, "would_be": pl.String},
    **dict.fromkeys(_NUMBERS, pl.Float64),
}
"""One row a model, arm, seed (null: their mean) and T, the last position that is looked at: T_train · 2^k, and the last measured.
The other columns are those of `farstate.evaluation.verdict.Verdict` for the losses up to T."""


def reach(*, evaluations: Sequence[Path], compare: params.Compare, figure: Mapping[str, Any], output: Path) -> None:
    """Write `reach.parquet` (REACH_SCHEMA), the manifest last; the arguments are those of `farstate.evaluation.compare.compare`.

    Raises:
        FarstateError: an evaluation is missing, unexpected or there twice, or evaluations differ in their texts or bins.
    """
    runs, texts = begun(evaluations, figure, output)
    rows: list[dict[str, Any]] = []
    for (model, arm), group in runs.items():
        own = texts[model]
        octave = octaves(own.bins, own.context)
        for seed, run in with_mean(group):
            for number in sorted({int(one) for one in octave if one > 0}):
                count = int(np.searchsorted(octave, number, side="right"))
                last = int(own.bins.high[count - 1])
                verdict = judge(
                    run.carried[:, :count],
                    Bins(own.bins.low[:count], own.bins.high[:count]),
                    own.context,
                    own.documents,
                    own.stretches,
                    tolerance=compare.tolerance,
                    confidence=compare.confidence,
                    resamples=compare.resamples,
                    generator=np.random.default_rng(compare.seed),
                    broken_at=run.broken_at if run.broken_at is not None and run.broken_at <= last else None,
                )
                told = {**asdict(verdict), "verdict": verdict.outcome, "T": last, "train_length": own.context}
                row = {"model": model, "arm": arm, "seed": seed, **told}
                rows.append({name: _known(row[name]) for name in REACH_SCHEMA})
    with atomic_path(output / "reach.parquet") as path:
        pl.DataFrame(rows, schema=REACH_SCHEMA).write_parquet(path)
    write_manifest(output, {"compare": compare.model_dump(mode="json"), "evaluations": len(evaluations)}, ["reach.parquet"])


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
