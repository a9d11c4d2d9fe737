"""Values published by others, for showing beside ours; no stage computes with them.

`paper_curves.csv` holds points read off the authors' figures in R. Buitrago Ruiz and A. Gu, *Understanding
and Improving Length Generalization in Recurrent Models*, arXiv 2507.02782v2 (ICML 2025): one value a row,
`tol` the reading tolerance, `bound = lower` where the curve leaves the axis and the value is a lower bound.
Base curves of one checkpoint differ by 0.07 to 0.24 PPL between the authors' own figures, so no comparison
is finer than that.

`published.csv` holds Pile validation perplexities of the official checkpoints; each row names its source.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class PaperPoint:
    """One digitised value: `value` ± `tolerance` (reading), or at least `value` when `lower_bound`."""

    method: str
    position: float
    value: float
    tolerance: float
    lower_bound: bool
    note: str


def paper_points(figure: str, model: str) -> list[PaperPoint]:
    """The points of one of the paper's figures for one of its models, in the file's order; empty when it has none."""
    text = resources.files(__name__).joinpath("paper_curves.csv").read_text(encoding="utf-8")
    return [
        PaperPoint(
            method=row["method"],
            position=float(row["x"]),
            value=float(row["value"]),
            tolerance=float(row["tol"]),
            lower_bound=row["bound"] == "lower",
            note=row["note"] or "",
        )
        for row in csv.DictReader(text.splitlines())
        if row["figure"] == figure and row["model"] == model
    ]
