"""What all interventions share: the interface, what they know of their run, and the draws that belong to a row of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor

from farstate import params
from farstate.corpus.permutation import mix
from farstate.corpus.readers import rank_rows
from farstate.errors import FarstateError
from farstate.state import State
from farstate.training.distributed import ALONE, Processes

NO_AGE = -1
"""Stands for the age of a state that no text led to."""

# Keys that keep the pseudo-random draws of one seed apart, from each other and from the data order's.
NOISE, RESET, COMBINATION, PERMUTATION = 101, 102, 103, 104


class Rows(Protocol):
    """The rows of a micro-batch, as far as interventions look at them (`corpus.readers.Batch` has more)."""

    @property
    def tokens(self) -> Tensor:
        """(B, T + 1) int64."""

    @property
    def fresh(self) -> Tensor:
        """(B,) bool, true where a row does not continue its window of the step before."""


@dataclass(frozen=True)
class Windows:
    """`Rows` for a training loop of one's own: what a batch's rows read, and which of them begin something new.

    Attributes:
        tokens: (B, T + 1) int64.
        fresh: (B,) bool, true where a row does not continue what it read in the step before.
    """

    tokens: Tensor
    fresh: Tensor


class HasZeroState(Protocol):
    """A model that can say what its state is before the first token."""

    def zero_state(self, batch_size: int, /) -> State: ...


@dataclass(frozen=True)
class Run:
    """What an intervention knows of the run it serves.

    Attributes:
        seed: of the post-training.
        rows: rows of a whole batch, a multiple of micro_batches × processes.
        micro_batches: parts in which a batch is computed; part m holds rows m · rows / micro_batches onwards, of which each
            process has an equal, contiguous share.
        context: T in tokens.
        zero_state: gives a zero state of so many rows, on the model's device.
        processes: among which the rows are shared, always the same rows to the same one.
    """

    seed: int
    rows: int
    micro_batches: int
    context: int
    zero_state: Callable[[int], State]
    processes: Processes = ALONE

    @staticmethod
    def of(model: HasZeroState, rows: int, context: int, seed: int = 0, micro_batches: int = 1) -> Run:
        """The run of a training loop of one's own: batches of `rows` sequences of `context` tokens, in one process.

        Raises:
            FarstateError: sizes below 1, or rows that the micro-batches do not divide.
        """
        if min(rows, context, micro_batches) < 1 or rows % micro_batches:
            raise FarstateError(
                f"Run: rows = {rows}, context = {context}, micro_batches = {micro_batches}: each must be at least 1, and rows a "
                "multiple of micro_batches"
            )
        return Run(seed, rows, micro_batches, context, model.zero_state)

    @property
    def part(self) -> int:
        """B: rows of a micro-batch on this process."""
        return self.rows // (self.micro_batches * self.processes.world)

    def rows_of(self, micro_batch: int) -> Tensor:
        """(B,) int64: the numbers, in the whole batch, of a micro-batch's rows on this process."""
        own = rank_rows(self.rows, self.micro_batches, self.processes.rank, self.processes.world)
        return torch.from_numpy(own[micro_batch * self.part : (micro_batch + 1) * self.part])


class Intervention(Protocol):
    """For each micro-batch in turn: `initial`, then (if wanted) `ages`, then `observe`.

    Of a run on several processes each sees its own rows; together they are the run on one.
    """

    def initial(self, step: int, batch: Rows | None = None, micro_batch: int = 0) -> State | None:
        """The state from which the rows of this micro-batch begin, without gradient; None is the zero state.

        Args:
            step: number of the optimizer step, from 0; the draws of a step do not depend on what was drawn before.
            batch: what is about to be read; truncated backpropagation alone looks at it.
        """

    def ages(self) -> Tensor:
        """(B,) int64 on the CPU: age in tokens of each row's state that `initial` gave last; 0 is zero, NO_AGE is noise."""

    def observe(self, final_state: State, micro_batch: int = 0) -> None:
        """See the state after the micro-batch; what is kept of it is detached."""

    def state_dict(self) -> dict[str, Tensor]:
        """Between two steps: all that is needed to go on, as tensors; complete on the first process, called by all."""

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back, on whatever number of processes, what `state_dict` gave the first; all read in the same order."""


def hold_to_parameters(initial_state: str, **options: Any) -> None:
    """Refuse options of an intervention that `params.yaml` would refuse too.

    Raises:
        FarstateError: the first that does not fit, with its value and what is allowed.
    """
    try:
        params.ARMS[initial_state].parameters.model_validate({"initial_state": initial_state, **options})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join([initial_state, *(str(part) for part in first["loc"])])
        raise FarstateError(f"{where}: {first['msg'].lower()} (found {first['input']!r})") from None


def hold_to_run(state: State, run: Run) -> None:
    """Refuse a final state of another number of rows than the run's micro-batches have.

    Raises:
        ValueError: naming both.
    """
    if state.batch_size != run.part:
        raise ValueError(f"a final state of {state.batch_size} rows in a run whose micro-batches have {run.part}")


def generators(run: Run, what: int, step: int, rows: Tensor) -> list[torch.Generator]:
    """For each of `rows`, numbered in the whole batch, a CPU generator of its own; `what` is one of the keys above."""
    return [torch.Generator().manual_seed(int(seed)) for seed in mix(run.seed, what, step, rows.numpy())]


def drawn_resets(run: Run, step: int, units: Tensor, probability: float) -> Tensor:
    """Whether each of `units` (integers: rows of the batch, or what stands for several) is reset, bool on the CPU.

    The same for every intervention with this probability, so that arms differ in their states and not in their resets.
    """
    bits = mix(run.seed, RESET, step, units.numpy()) >> 11  # 53 of them: every double in [0, 1) of that spacing
    return torch.from_numpy(bits.astype("float64") * 2.0**-53) < probability
