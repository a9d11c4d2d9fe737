"""The interventions: from which state each training sequence begins (paper §3 and App. B; everything else is equal).

Adding one: a file with a class that has the methods of `Intervention` (`farstate.training.interventions`), and one line in
`farstate.params.ARMS` (docs/adding_an_intervention.md). The five of the paper are here, those that take them apart in `mechanism`.
A training loop of one's own makes them by hand: `StatePassing(Run.of(model, rows=8, context=64), reset_probability=0.1)`.

Draws depend only on (seed, step, row of the batch): not on how a batch is cut into micro-batches, nor on what was drawn
before. Hence no generator has to be saved, and a resumed run draws what the uninterrupted one does. Noise is drawn on the
CPU, so that every device sees the same. Ages are in tokens: how much text a state has read since it was zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from farstate import params
from farstate.errors import FarstateError
from farstate.state import LayerState, State, joined
from farstate.training.interventions import (
    NO_AGE,
    NOISE,
    Intervention,
    Rows,
    Run,
    drawn_resets,
    generators,
    hold_to_parameters,
    hold_to_run,
)

__all__ = ["NO_AGE", "Intervention", "Rows", "Run", "build"]


class ZeroInit:
    """The control: every sequence begins from zero, as in pre-training."""

    def __init__(self, run: Run) -> None:
        self._ages = torch.zeros(run.part, dtype=torch.int64)

    def initial(self, step: int, batch: Rows | None = None, micro_batch: int = 0) -> State | None:
        return None

    def ages(self) -> Tensor:
        return self._ages

    def observe(self, final_state: State, micro_batch: int = 0) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        pass


class RandomNoise:
    """N(0, σ²) for every element of the recurrent state, one σ for all layers and heads; the auxiliary state is zero."""

    def __init__(self, run: Run, *, sigma: float) -> None:
        hold_to_parameters("random_noise", sigma=sigma)
        self._run = run
        self._sigma = sigma
        self._ages = torch.full((run.part,), NO_AGE, dtype=torch.int64)

    def initial(self, step: int, batch: Rows | None = None, micro_batch: int = 0) -> State | None:
        return _noise(self._run, step, micro_batch, lambda layer, values: values.mul_(self._sigma))

    def ages(self) -> Tensor:
        return self._ages

    def observe(self, final_state: State, micro_batch: int = 0) -> None:
        pass

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        pass


class FittedNoise:
    """N(μ, σ²) with one μ and σ² for each layer and head, fitted to the final states; the auxiliary state is zero.

    A batch's mean and (population) variance are over the head's entries and all rows, across micro-batches and processes. After
    each batch μ ← (1 − β) · batch + β · μ, and σ² alike; the first batch's values are taken as they are [assumed], and
    the batches before there are any begin from zero.
    """

    def __init__(self, run: Run, *, beta: float = 0.1) -> None:
        hold_to_parameters("fitted_noise", beta=beta)
        self._run = run
        self._beta = beta
        self._mean: Tensor | None = None  # (all heads of all layers,) float64, on the CPU
        self._variance: Tensor | None = None
        self._parts: list[tuple[Tensor, Tensor]] = []

    def initial(self, step: int, batch: Rows | None = None, micro_batch: int = 0) -> State | None:
        if self._mean is None or self._variance is None:
            return None
        heads = [values.shape[1] for values in _all_entries(self._run.zero_state(1))]
        mean, deviation = self._mean.split(heads), self._variance.sqrt().split(heads)

        def shape(layer: int, values: Tensor) -> Tensor:
            return values.mul_(deviation[layer][:, None].to(values.dtype)).add_(mean[layer][:, None].to(values.dtype))

        return _noise(self._run, step, micro_batch, shape)

    def ages(self) -> Tensor:
        return torch.full((self._run.part,), 0 if self._mean is None else NO_AGE, dtype=torch.int64)

    @torch.no_grad()
    def observe(self, final_state: State, micro_batch: int = 0) -> None:
        hold_to_run(final_state, self._run)
        moments = [_moments(entries) for entries in _all_entries(final_state)]
        # Layers may differ in their heads: all heads of all layers side by side.
        mean, variance = (torch.cat(parts) for parts in zip(*moments, strict=True))
        self._parts.append((mean, variance))
        if micro_batch == self._run.micro_batches - 1:
            self._update()

    def _update(self) -> None:
        means, variances = (
            torch.cat(self._run.processes.everywhere(torch.stack(parts).cpu())) for parts in zip(*self._parts, strict=True)
        )
        self._parts.clear()
        # Parts of equal size: the variance of the whole is the mean variance plus the variance of the means.
        mean, variance = means.mean(0), variances.mean(0) + means.var(0, correction=0)
        if self._mean is not None and self._variance is not None:
            mean = (1.0 - self._beta) * mean + self._beta * self._mean
            variance = (1.0 - self._beta) * variance + self._beta * self._variance
        self._mean, self._variance = mean, variance

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._mean is None or self._variance is None else {"mean": self._mean, "variance": self._variance}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        # Not `get`: processes that share a checkpoint read the same names in the same order.
        self._mean, self._variance = (tensors["mean"], tensors["variance"]) if "mean" in tensors else (None, None)


class _Carried(ABC):
    """Hands out final states it has seen, detached, after zeroing some rows. A slot holds the state of one micro-batch.

    In checkpoints a slot has the rows of all processes, so that another number of them, or of slots, can go on.
    """

    def __init__(self, run: Run, slots: int, carry_auxiliary: bool, reset_auxiliary: bool) -> None:
        self._run = run
        self._carry_auxiliary = carry_auxiliary
        self._reset_auxiliary = reset_auxiliary
        self._states: list[State | None] = [None] * slots
        self._state_ages = [torch.zeros(run.part, dtype=torch.int64) for _ in range(slots)]
        self._given = self._state_ages[0]

    @abstractmethod
    def _resets(self, step: int, batch: Rows | None, micro_batch: int) -> Tensor:
        """(B,) bool on the CPU: which rows begin from zero whatever was carried."""

    def initial(self, step: int, batch: Rows | None = None, micro_batch: int = 0) -> State | None:
        slot = micro_batch % len(self._states)
        state = self._states[slot]
        if state is None:
            self._given = torch.zeros(self._run.part, dtype=torch.int64)
            return None
        resets = self._resets(step, batch, micro_batch)
        self._given = self._state_ages[slot].masked_fill(resets, 0)
        return state.reset(resets, self._reset_auxiliary) if resets.any() else state

    def ages(self) -> Tensor:
        return self._given

    def observe(self, final_state: State, micro_batch: int = 0) -> None:
        hold_to_run(final_state, self._run)
        slot = micro_batch % len(self._states)
        state = final_state.detach()
        self._states[slot] = state if self._carry_auxiliary else state.without_auxiliary()
        self._state_ages[slot] = self._given + self._run.context

    def state_dict(self) -> dict[str, Tensor]:
        tensors = {}
        for slot, state in enumerate(self._states):
            if state is None:
                continue
            own = {"ages": self._state_ages[slot], **_flatten(state)}
            for name, tensor in own.items():
                if parts := self._run.processes.gathered(tensor):
                    tensors[f"{slot}.{name}"] = parts[0] if len(parts) == 1 else joined(parts)
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        template = self._run.zero_state(1)
        slots = [name.removesuffix(".ages") for name in tensors if name.endswith(".ages")]
        slots.sort(key=int)
        if not slots:
            return
        own: list[dict[str, Tensor]] = [{} for _ in self._states]
        for name in ("ages", *_flatten(template)):
            parts = [tensors[f"{slot}.{name}"] for slot in slots]
            ends = list(accumulate(len(part) for part in parts))
            for slot in range(len(own)):
                own[slot][name] = _rows(parts, ends, self._run.rows_of(slot))
        for slot, values in enumerate(own):
            self._state_ages[slot] = values.pop("ages")
            self._states[slot] = _unflatten(values, template).to(device=template.device)


class StatePassing(_Carried):
    """The final state of the previous batch of shuffled sequences, zeroed with a probability.

    `previous: batch` (default): row i begins from what row i of the previous batch ended in, however the batch is cut.
    `previous: micro_batch`: from what the same place of the micro-batch just before ended in.
    `reset_unit: batch`: one draw for the whole batch, or for each micro-batch where states pass between those.
    `reset_auxiliary: false` keeps the convolution state of a reset row; its age, that of the recurrent state, is 0.
    """

    def __init__(
        self,
        run: Run,
        *,
        reset_probability: float = 0.1,
        reset_unit: Literal["sequence", "batch"] = "sequence",
        reset_auxiliary: bool = True,
        carry_auxiliary: bool = True,
        previous: Literal["batch", "micro_batch"] = "batch",
    ) -> None:
        hold_to_parameters(
            "state_passing", reset_probability=reset_probability, reset_unit=reset_unit, reset_auxiliary=reset_auxiliary,
            carry_auxiliary=carry_auxiliary, previous=previous,
        )  # fmt: skip
        self._between_parts = previous == "micro_batch"
        super().__init__(run, 1 if self._between_parts else run.micro_batches, carry_auxiliary, reset_auxiliary)
        self._probability = reset_probability
        self._unit = reset_unit

    def _resets(self, step: int, batch: Rows | None, micro_batch: int) -> Tensor:
        if self._unit == "sequence":
            unit = self._run.rows_of(micro_batch)
        else:
            unit = torch.full((self._run.part,), micro_batch if self._between_parts else 0)
        return drawn_resets(self._run, step, unit, self._probability)


class TruncatedBackpropagation(_Carried):
    """TBTT: the final state of the row's previous window.

    `at_document_end: reset` (default): zeroed exactly where the row does not continue that window, at the end of a document or of a
    stretch of it. `keep`: never zeroed; the next document begins from the state that the one before ended in.
    """

    def __init__(self, run: Run, *, at_document_end: Literal["reset", "keep"] = "reset", carry_auxiliary: bool = True) -> None:
        hold_to_parameters("tbtt", at_document_end=at_document_end, carry_auxiliary=carry_auxiliary)
        super().__init__(run, run.micro_batches, carry_auxiliary, reset_auxiliary=True)
        self._keeps = at_document_end == "keep"

    def _resets(self, step: int, batch: Rows | None, micro_batch: int) -> Tensor:
        if self._keeps:
            return torch.zeros(self._run.part, dtype=torch.bool)
        if batch is None:
            raise FarstateError(
                "tbtt: give `initial` the batch, whose `fresh` says which rows begin a new document (farstate.Windows(tokens, fresh))"
            )
        return batch.fresh


def build(arm: params.Arm, run: Run) -> Intervention:
    """The intervention that `arm.initial_state` names, with the arm's parameters."""
    module, _, name = params.ARMS[arm.initial_state].intervention.partition(":")
    kind: Callable[..., Intervention] = getattr(import_module(module), name)
    options = {name: getattr(arm, name) for name in type(arm).model_fields if name != "initial_state"}
    return kind(run, **options)


def _all_entries(state: State) -> list[Tensor]:
    return [state.entries(layer) for layer in range(len(state))]


def _moments(entries: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, E) → mean and population variance of each head, (H,) float64; several times faster than `torch.var_mean`."""
    if entries.shape[2] == 0:  # a layer without a recurrence
        return 2 * (entries.new_zeros(entries.shape[1], dtype=torch.float64),)
    mean = entries.mean(2).double().mean(0)
    centred = entries - mean[:, None].to(entries.dtype)
    variance = torch.linalg.vector_norm(centred, dim=2).double().square().mean(0) / entries.shape[2]
    return mean, variance


def _noise(run: Run, step: int, micro_batch: int, shape: Callable[[int, Tensor], Tensor]) -> State:
    """Standard normal entries, each row from a generator of its own, given by layer as (B, H, E) to `shape`."""
    state = run.zero_state(run.part)
    of_rows = generators(run, NOISE, step, run.rows_of(micro_batch))
    for layer in range(len(state)):
        zeros = state.entries(layer)
        values = torch.empty(zeros.shape, dtype=zeros.dtype)
        for row, generator in zip(values, of_rows, strict=True):
            row.normal_(generator=generator)
        state = state.with_entries(layer, shape(layer, values))
    return state


def _rows(parts: list[Tensor], ends: list[int], rows: Tensor) -> Tensor:
    """Consecutive `rows` of all `parts` joined, of which part i ends before row `ends[i]`."""
    first, last = int(rows[0]), int(rows[-1])
    needed = range(bisect_right(ends, first), bisect_right(ends, last) + 1)
    start = ends[needed[0]] - len(parts[needed[0]])
    return joined([parts[number] for number in needed])[first - start : last + 1 - start].clone()


def _flatten(state: State) -> dict[str, Tensor]:
    tensors = {}
    for number, layer in enumerate(state.layers):
        tensors[f"{number}.recurrent"] = layer.recurrent
        tensors |= {f"{number}.auxiliary.{name}": tensor for name, tensor in layer.auxiliary.items()}
    return tensors


def _unflatten(tensors: dict[str, Tensor], like: State) -> State:
    return State(
        tuple(
            LayerState(tensors[f"{number}.recurrent"], {name: tensors[f"{number}.auxiliary.{name}"] for name in layer.auxiliary})
            for number, layer in enumerate(like.layers)
        )
    )
