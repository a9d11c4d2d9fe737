"""What swapped states change, as rows of a table with intervals, and when it may be said that drift explains the excess."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from farstate.evaluation.shift_states import Carried, Measurement
from farstate.evaluation.swaps import Swap
from farstate.evaluation.uncertainty import Floats


class SwapRows:
    """Rows of `swaps.parquet` from what swaps change in every text.

    Args:
        place: of the swap position among the run's positions.
    """

    def __init__(self, run: Measurement, carried: Carried, place: int) -> None:
        self.run = run
        self.excess = carried.excess[:, place]

    def rows(self, planned: Sequence[Swap], change: Floats, drift: Floats, reason: str) -> list[dict[str, Any]]:
        """The excess at the swap; each head alone; groups together, their means over heads, and the contrasts that decide.

        Args:
            change: (swaps, texts) nats per token.
            drift: (heads,) of the analysed heads.
            reason: why nothing was swapped, where nothing was.
        """
        run = self.run
        why = None if run.swap_position >= run.context else "zero by definition up to the training length"
        found = [self._row("untouched", "none", self.excess, reason=why, heads=0)]
        if not planned:
            return [*found, self._row("top", "training state", None, reason=reason)]
        together: dict[tuple[str, str], Floats] = {}
        alone: dict[tuple[str, str], Floats] = {}
        for source in ("training state", "other document"):
            single = [n for n, swap in enumerate(planned) if len(swap.heads) == 1 and swap.source == source]
            found += self._single(planned, single, change, drift)
            for group in ("top", "random", "all"):
                for n, swap in enumerate(planned):
                    if swap.group == group and swap.source == source and len(swap.heads) > 1:
                        together[group, source] = change[n]
                        found.append(self._row(group, source, change[n], heads=len(swap.heads), together=True))
                members = [n for n in single if planned[n].group == group]
                if members:
                    alone[group, source] = change[members].mean(axis=0)
                    found.append(self._row(group, source, alone[group, source], heads=len(members)))
        for values, jointly in ((alone, False), (together, True)):
            for left, right in _CONTRASTS:
                if left in values and right in values:
                    group = left[0] if left[0] == right[0] else f"{left[0]} − {right[0]}"
                    source = left[1] if left[1] == right[1] else f"{left[1]} − {right[1]}"
                    found.append(self._row(group, source, values[left] - values[right], together=jointly))
        return found

    def _single(self, planned: Sequence[Swap], single: Sequence[int], change: Floats, drift: Floats) -> list[dict[str, Any]]:
        """Each head alone, with a band that holds for all of a source at once."""
        run = self.run
        estimate, again = run.resamples.mean(change[list(single)].T, np.ones(change.shape[1]))
        low, high = run.resamples.band(estimate, again)
        found = []
        for place, n in enumerate(single):
            number = planned[n].heads[0]
            row = self._row(planned[n].group, planned[n].source, change[n], heads=1)
            if row["value"] is not None:
                row |= {"low": float(low[place]), "high": float(high[place])}
            label = f"simultaneous over {len(single)} heads, {run.resamples.label}"
            head = run.heads[number]
            found.append(row | {"interval": label, "layer": head.layer, "head": head.head, "drift": float(drift[number])})
        return found

    def _row(
        self,
        group: str,
        source: str,
        values: Floats | None,
        *,
        heads: int | None = None,
        together: bool = False,
        reason: str | None = None,
    ) -> dict[str, Any]:
        """A row with the mean of `values`, (texts,), and its pointwise interval."""
        run = self.run
        row: dict[str, Any] = {
            "position": run.swap_position,
            "group": group,
            "source": source,
            "together": together,
            "heads": heads,
            "n_texts": len(run.texts),
            "n_documents": run.resamples.documents,
            "value": None,
            "interval": run.resamples.label,
            "reason": reason,
        }
        if values is None:
            return row
        if not np.all(np.isfinite(values)):
            return row | {"reason": reason or "no state of another document, or a loss that is not finite"}
        estimate, again = run.resamples.mean(values, np.ones(values.size))
        low, high = run.resamples.interval(estimate, again)
        return row | {"value": float(estimate), "low": float(low), "high": float(high)}


_CONTRASTS: tuple[tuple[tuple[str, str], tuple[str, str]], ...] = (
    (("top", "training state"), ("random", "training state")),
    (("top", "training state"), ("top", "other document")),
    (("all", "training state"), ("all", "other document")),
)


def explains(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether the drift of heads explains the excess: only what swapping shows may say so.

    It does when the excess is above zero, and replacing the heads of the largest drift by training states lowers the loss, by
    more than replacing random heads does, and by more than replacing them by states of other documents does: each with an
    interval that excludes zero. Judged for heads swapped one at a time and for each group swapped together.

    Returns:
        `alone`, `together`: true, false, or None where a number or an interval is missing; `excess`: whether it is above zero,
        None without an interval.
    """

    def find(group: str, source: str, jointly: bool) -> Mapping[str, Any] | None:
        wanted = (group, source, jointly)
        return next(
            (
                row
                for row in rows
                if (row["group"], row["source"], row["together"]) == wanted
                and row.get("layer") is None
                and all(row.get(name) is not None and math.isfinite(row[name]) for name in ("value", "low", "high"))
            ),
            None,
        )

    untouched = find("untouched", "none", False)
    above = None if untouched is None else bool(untouched["low"] > 0.0)
    verdicts: dict[str, Any] = {"excess": above}
    for name, jointly in (("alone", False), ("together", True)):
        needed = [
            find("top", "training state", jointly),
            find("top − random", "training state", jointly),
            find("top", "training state − other document", jointly),
        ]
        if above is None or any(row is None for row in needed):
            verdicts[name] = None
        else:
            verdicts[name] = above and all(row is not None and row["high"] < 0.0 for row in needed)
    return verdicts
