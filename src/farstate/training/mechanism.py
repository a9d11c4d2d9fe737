"""Initial states that take state passing apart: which structure of real states does a repair need?

State passing hands out the final states of the batch before. Of those the arms here keep, from most to least:
`gaussian` with `scope: joint` mean and covariance; with `scope: head` the covariance within each head; `permuted` every
element's own distribution, and no correlation at all. Resets are state passing's, row by row and draw by draw, so that only the
structure differs; the auxiliary state is zero, as in the noise arms: state passing with `carry_auxiliary: false` is the match.

The batch before is always whole, however it is cut into micro-batches and shared among processes, each of which holds the
states of all its rows; the first batch begins from zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from farstate.state import State
from farstate.training.interventions import (
    COMBINATION,
    NO_AGE,
    PERMUTATION,
    Rows,
    Run,
    drawn_resets,
    generators,
    hold_to_parameters,
    hold_to_run,
)


class _Made(ABC):
    """Keeps the recurrent final states of the last whole batch, by layer (rows, H, E), and makes new ones of them."""

    def __init__(self, run: Run, probability: float) -> None:
        self._run = run
        self._probability = probability
        self._last: list[Tensor] | None = None
        self._parts: list[State] = []
        self._ages = torch.zeros(run.part, dtype=torch.int64)

    @abstractmethod
    def _make(self, last: list[Tensor], step: int, micro_batch: int) -> list[Tensor]:
        """The micro-batch's recurrent states, by layer (B, H, E), on the device of `last`."""

    def initial(self, step: int, batch: Rows | None = None, micro_batch: int = 0) -> State | None:
        if self._last is None:
            self._ages = torch.zeros(self._run.part, dtype=torch.int64)
            return None
        resets = drawn_resets(self._run, step, self._run.rows_of(micro_batch), self._probability)
        self._ages = torch.full((self._run.part,), NO_AGE, dtype=torch.int64).masked_fill(resets, 0)
        state = self._run.zero_state(self._run.part)
        for layer, values in enumerate(self._make(self._last, step, micro_batch)):
            state = state.with_entries(layer, values)
        return state.reset(resets) if resets.any() else state

    def ages(self) -> Tensor:
        return self._ages

    def observe(self, final_state: State, micro_batch: int = 0) -> None:
        hold_to_run(final_state, self._run)
        self._parts.append(final_state.detach())
        if micro_batch == self._run.micro_batches - 1:
            everywhere = self._run.processes.everywhere
            self._last = [
                torch.cat([rows for part in self._parts for rows in everywhere(part.entries(layer))])
                for layer in range(len(final_state))
            ]
            self._parts.clear()

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._last is None else {str(layer): values for layer, values in enumerate(self._last)}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        device = self._run.zero_state(1).device
        self._last = [tensors[str(layer)].to(device) for layer in range(len(tensors))] or None


class Gaussian(_Made):
    """Gaussian states with the mean and covariance of the last batch's final states S_b, without ever forming a covariance.

    h_i = μ + Σ_b w_ib (S_b − μ) / √(B − 1), μ the mean of the B states and w standard normal: given the batch, h_i is
    N(μ, C) with C its unbiased covariance. `joint`: one w_i for all heads and layers. `head`: a w_i for each head of each
    layer, so that heads are independent. A batch of one row has no spread: μ itself.
    """

    def __init__(self, run: Run, *, scope: Literal["joint", "head"], reset_probability: float = 0.1) -> None:
        hold_to_parameters("gaussian", scope=scope, reset_probability=reset_probability)
        super().__init__(run, reset_probability)
        self._by_head = scope == "head"

    def _make(self, last: list[Tensor], step: int, micro_batch: int) -> list[Tensor]:
        heads = [values.shape[1] if self._by_head else 1 for values in last]
        drawn = sum(heads) if self._by_head else 1
        weights = torch.empty(self._run.part, drawn, self._run.rows, dtype=last[0].dtype)
        for row, generator in zip(weights, generators(self._run, COMBINATION, step, self._run.rows_of(micro_batch)), strict=True):
            row.normal_(generator=generator)
        weights = weights.to(last[0].device) / max(self._run.rows - 1, 1) ** 0.5
        of_layer = weights.split(heads, dim=1) if self._by_head else [weights] * len(last)
        made = []
        for values, w in zip(last, of_layer, strict=True):
            mean = values.mean(0)
            made.append(torch.einsum("ihb,bhe->ihe", w.expand(-1, values.shape[1], -1), values - mean) + mean)
        return made


class Permuted(_Made):
    """The last batch's final states, every element of every layer permuted across the rows by a permutation of its own.

    Exact and independent: all columns at once by Fisher and Yates' shuffle, each row's draws from a generator of its own.
    """

    def __init__(self, run: Run, *, reset_probability: float = 0.1) -> None:
        hold_to_parameters("permuted", reset_probability=reset_probability)
        super().__init__(run, reset_probability)
        self._shuffled: tuple[int, list[Tensor]] | None = None  # of one step: all its micro-batches are parts of it

    def _make(self, last: list[Tensor], step: int, micro_batch: int) -> list[Tensor]:
        if self._shuffled is None or self._shuffled[0] != step:
            self._shuffled = step, self._shuffle(last, step)
        first = int(self._run.rows_of(micro_batch)[0])
        return [values[first : first + self._run.part] for values in self._shuffled[1]]

    def _shuffle(self, last: list[Tensor], step: int) -> list[Tensor]:
        of_rows = generators(self._run, PERMUTATION, step, torch.arange(self._run.rows))
        shuffled = []
        for values in last:
            columns = values.flatten(1).clone()
            for row in range(self._run.rows - 1, 0, -1):
                partner = torch.randint(row + 1, (1, columns.shape[1]), generator=of_rows[row]).to(columns.device)
                chosen = columns.gather(0, partner)
                columns.scatter_(0, partner, columns[row : row + 1].clone())
                columns[row] = chosen[0]
            shuffled.append(columns.view_as(values))
        return shuffled

    def observe(self, final_state: State, micro_batch: int = 0) -> None:
        super().observe(final_state, micro_batch)
        if micro_batch == self._run.micro_batches - 1:
            self._shuffled = None

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state_dict(tensors)
        self._shuffled = None
