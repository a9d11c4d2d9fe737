"""What a training says about its steps: `metrics.jsonl` and `ages.parquet`. Deterministic: no times, no machine."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from farstate.files import atomic_path, write_text
from farstate.training.distributed import ALONE, Processes
from farstate.training.initial_states import NO_AGE

AGES_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("age", pa.int64()),
        pa.field("sequences", pa.int64(), nullable=False),
    ]
)


class Metrics:
    """One line a step: step (from 1), tokens read so far, mean loss in nats per token, gradient norm, learning rate.

    The numbers live in memory and in checkpoints, so that a resumed run has neither gaps nor doubles; the file at
    `live` shows them while the run lasts.

    Args:
        rows: (steps so far, 3) float64 from a checkpoint, or None.
    """

    def __init__(self, live: Path, batch_tokens: int, rows: Tensor | None) -> None:
        self._batch_tokens = batch_tokens
        self._rows: list[tuple[float, float, float]] = [] if rows is None else [(row[0], row[1], row[2]) for row in rows.tolist()]
        write_text(live, self._text())
        self._live = open(live, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)

    def add(self, loss: float, gradient_norm: float, learning_rate: float) -> None:
        self._rows.append((loss, gradient_norm, learning_rate))
        self._live.write(self._line(len(self._rows)))
        self._live.flush()

    def tensor(self) -> Tensor:
        """(steps, 3) float64: loss, gradient norm, learning rate."""
        return torch.tensor(self._rows, dtype=torch.float64).reshape(-1, 3)

    def write(self, path: Path) -> None:
        write_text(path, self._text())

    def close(self) -> None:
        self._live.close()

    def _text(self) -> str:
        return "".join(self._line(step) for step in range(1, len(self._rows) + 1))

    def _line(self, step: int) -> str:
        loss, norm, rate = self._rows[step - 1]
        tokens = step * self._batch_tokens
        return json.dumps({"step": step, "tokens": tokens, "loss": loss, "grad_norm": norm, "learning_rate": rate}) + "\n"


class Ages:
    """How many sequences of each step began from a state of which age, in tokens; null where no text led to the state.

    Each process counts its own sequences; `tensor` brings them together.

    Args:
        rows: (n, 3) int64 from a checkpoint, or None.
    """

    def __init__(self, rows: Tensor | None, processes: Processes = ALONE) -> None:
        self._rows: list[Tensor] = [] if rows is None else [rows]
        self._processes = processes

    def add(self, step: int, ages: list[Tensor]) -> None:
        """`step` from 1; `ages` (B,) int64 of each micro-batch."""
        values, counts = torch.cat(ages).unique(return_counts=True)
        self._rows.append(torch.stack((torch.full_like(values, step), values, counts), dim=1))

    def tensor(self) -> Tensor:
        """(n, 3) int64: step, age (NO_AGE for none), sequences of all processes; called by all, complete on the first."""
        own = torch.cat([torch.empty(0, 3, dtype=torch.int64), *self._rows])
        if self._processes.world > 1:
            gathered = self._processes.gathered(own)
            own = _added(torch.cat(gathered)) if gathered else own[:0]
        self._rows = [own]
        return own

    @staticmethod
    def write(rows: Tensor, path: Path) -> None:
        """Write what `tensor` gave."""
        step, age, sequences = rows.t().contiguous().numpy()
        columns = [pa.array(step), pa.array(age, mask=age == NO_AGE), pa.array(sequences)]
        with atomic_path(path) as temporary:
            pq.write_table(pa.Table.from_arrays(columns, schema=AGES_SCHEMA), temporary, compression="zstd")


def _added(rows: Tensor) -> Tensor:
    """One row for each step and age, in that order, with the sum of the sequences."""
    kinds, kind = rows[:, :2].unique(dim=0, return_inverse=True)
    return torch.column_stack((kinds, torch.zeros(len(kinds), dtype=torch.int64).index_add_(0, kind, rows[:, 2])))
