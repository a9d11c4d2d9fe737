"""Values published by others, for showing beside ours; no stage computes with them.

`paper_curves.csv` holds points read off the authors' figures in R. Buitrago Ruiz and A. Gu, *Understanding
and Improving Length Generalization in Recurrent Models*, arXiv 2507.02782v2 (ICML 2025): one value a row,
`tol` the reading tolerance, `bound = lower` where the curve leaves the axis and the value is a lower bound.
Base curves of one checkpoint differ by 0.07 to 0.24 PPL between the authors' own figures, so no comparison
is finer than that.

`published.csv` holds Pile validation perplexities of the official checkpoints; each row names its source, and the sizes by
which the checkpoint is recognised.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class PaperPoint:
    """One digitised value: `value` ± `tolerance` (reading), or at least `value` when `lower_bound` (without a tolerance then: 0).

    `position`: tokens read, of a task the tokens of its prompt (copying: letters of the string). `depth`: where in the text a passkey
    stands, 0 to 1; None elsewhere. In `table1_copy` the tolerance is the paper's own ±, of which it does not say what it means.
    """

    method: str
    position: float
    value: float
    tolerance: float
    lower_bound: bool
    note: str
    depth: float | None = None


def paper_points(figure: str, model: str) -> list[PaperPoint]:
    """The points of one of the paper's figures for one of its models, in the file's order; empty when it has none."""
    return [point for name, point in _points(figure) if name == model]


def paper_curves(figure: str) -> dict[tuple[str, str], list[PaperPoint]]:
    """All points of one of the paper's figures, by model and method, in the file's order."""
    found: dict[tuple[str, str], list[PaperPoint]] = {}
    for model, point in _points(figure):
        found.setdefault((model, point.method), []).append(point)
    return found


def _points(figure: str) -> list[tuple[str, PaperPoint]]:
    text = resources.files(__name__).joinpath("paper_curves.csv").read_text(encoding="utf-8")
    return [
        (
            row["model"],
            PaperPoint(
                method=row["method"],
                position=float(row["x"]),
                value=float(row["value"]),
                tolerance=float(row["tol"] or 0),
                lower_bound=row["bound"] == "lower",
                note=row["note"] or "",
                depth=float(row["depth"]) if row["depth"] else None,
            ),
        )
        for row in csv.DictReader(text.splitlines())
        if row["figure"] == figure
    ]


PUBLISHED_TOLERANCE = 0.05
"""Perplexities that are no further apart than this count as the same: values are printed with two digits, and the protocol
behind them is known in part only."""
PUBLISHED_CONTEXT = 2048
"""Tokens of a window behind the published perplexities [assumed: the context length of the training]."""
PUBLISHED_FILE = "val.jsonl.zst"
"""The original Pile's validation file."""
_PILE_VOCABULARY = range(50277, 50305)


@dataclass(frozen=True)
class Published:
    """A perplexity that the authors of a checkpoint give, and the sizes of its model."""

    model: str
    perplexity: float
    split: str
    source: str
    architecture: str
    layers: int
    width: int

    def fits(self, architecture: str, layers: int, width: int, padded_vocabulary: int) -> bool:
        """Whether these are the sizes of the model, with the vocabulary of GPT-NeoX-20B, padded in one way or another."""
        sizes = (architecture, layers, width) == (self.architecture, self.layers, self.width)
        return sizes and padded_vocabulary in _PILE_VOCABULARY


def published() -> dict[str, Published]:
    """The published Pile perplexities by model."""
    text = resources.files(__name__).joinpath("published.csv").read_text(encoding="utf-8")
    return {
        row["model"]: Published(
            row["model"],
            float(row["value"]),
            row["split"],
            row["source"],
            row["architecture"],
            int(row["layers"]),
            int(row["width"]),
        )
        for row in csv.DictReader(text.splitlines())
        if row["metric"] == "pile_ppl"
    }
