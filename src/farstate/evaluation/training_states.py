"""The states that a training met: its batches and its intervention replayed, with the trained weights frozen.

A training's sequence begins from the state that its arm gave it and reads a window of T tokens, so it meets the states after
1 … T of them. They are met again here with the *final* weights: which windows, from which initial states, in which order and with
which draws is exactly the training's; only the weights do not change on the way. Forward passes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farstate import params
from farstate.corpus.permutation import mix
from farstate.corpus.readers import Batch, OrderedStreams, ShuffledStreams, windows_of
from farstate.corpus.store import TokenStore
from farstate.evaluation.perplexity import Progress
from farstate.evaluation.sampled_states import Integers, StateSet, inference, read_to
from farstate.evaluation.stream import Precision
from farstate.models.language_model import LanguageModel
from farstate.params import arm_from_json, as_written
from farstate.state import LayerState, State
from farstate.training import initial_states
from farstate.training.interventions import NO_AGE

NO_CHAIN = -1
_CHAINS = 201
"""Keeps the draws of a chain's fold apart from all others of a seed."""
_OVERSAMPLE = 8
"""So many windows are met for one whose state is taken, where rows can be left out at all."""


@dataclass(frozen=True)
class Training:
    """What decides which initial states a post-training met."""

    arm: params.Arm
    steps: int
    seed: int
    stretch_tokens: int | None
    batch_tokens: int
    micro_batches: int

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Training:
        """From the record of the training: arm, steps, seed, stretch_tokens, recipe."""
        recipe = params.Recipe.model_validate(as_written(dict(data["recipe"])))
        return Training(
            arm_from_json(data["arm"]),
            data["steps"],
            data["seed"],
            data["stretch_tokens"],
            recipe.batch_tokens,
            recipe.micro_batches,
        )

    @property
    def from_zero(self) -> bool:
        return isinstance(self.arm, params.ZeroInit)

    @property
    def without_memory(self) -> bool:
        """Whether an initial state depends on nothing that was read before."""
        return isinstance(self.arm, params.ZeroInit | params.RandomNoise)

    @property
    def rows_apart(self) -> bool:
        """Whether a row's initial states do not depend on what other rows read."""
        passes = isinstance(self.arm, params.StatePassing) and self.arm.previous == "batch"
        return self.without_memory or passes


class _Batches(Protocol):
    def batch(self, step: int) -> Batch: ...


@dataclass(frozen=True)
class Part:
    """A micro-batch of the replay: tokens (B, T + 1), document (B,), fresh (B,)."""

    tokens: Tensor
    document: Tensor
    fresh: Tensor


@dataclass(frozen=True)
class Met:
    """The windows that a replay reads, (n,) each, in the order of reading.

    Attributes:
        step, part, row: from 0; the row is that of the micro-batch `part`.
        document: index into the split's DocumentTable.
        age: tokens that the initial state had read since it was zero; NO_AGE: no text led to it.
        chain: windows with the same number were read one after the other with a passed state; NO_CHAIN: with no other.
    """

    step: Integers
    part: Integers
    row: Integers
    document: Integers
    age: Integers
    chain: Integers

    def __len__(self) -> int:
        return int(self.step.size)

    def take(self, which: Integers) -> Met:
        """The windows at the indices `which`."""
        return Met(self.step[which], self.part[which], self.row[which], self.document[which], self.age[which], self.chain[which])


class Replay:
    """A post-training's windows and initial states, on the split it read or on another.

    On another split the same intervention reads other documents. A split with windows for fewer steps of whole batches is read
    for all steps with fewer rows where these do not depend on each other, so that initial states get as old as in training;
    otherwise, or with windows for less than a row, for as many steps as it has windows for.

    Args:
        wanted: states that will be taken. Where the rows of a batch do not depend on each other, only the first so many
            are read that there are 8 windows for each state; otherwise all.

    Raises:
        FarstateError: the split has no document of T + 1 tokens.
    """

    def __init__(self, store: TokenStore, split: str, training: Training, context: int, wanted: int) -> None:
        rows = training.batch_tokens // context
        windows = windows_of(store.documents(split), context)
        self.training = training
        self.context = context
        self.rows_of_training = rows
        self.rows, self.micro_batches = rows, training.micro_batches
        self.steps = training.steps
        if split != "train":
            if training.rows_apart:
                rows = max(1, min(rows, windows // training.steps))
            self.rows = rows
            self.steps = min(training.steps, windows // rows)
        self._streams: _Batches | None = None
        if self.steps < 1:
            return
        streams = OrderedStreams(store, split, context, rows, self.steps, training.seed, training.stretch_tokens)
        self._streams = streams if isinstance(training.arm, params.Tbtt) else ShuffledStreams(streams, training.seed)
        if training.rows_apart:
            # Draws are numbered by row: the first rows alone are given the states that they have in the whole batch.
            self.rows = min(rows, -(-_OVERSAMPLE * wanted // self.steps))
            self.micro_batches = 1

    def parts(self, step: int) -> list[Part]:
        """The micro-batches of a step."""
        assert self._streams is not None
        batch = self._streams.batch(step)
        size = self.rows // self.micro_batches
        return [
            Part(batch.tokens[first : first + size], batch.document[first : first + size], batch.fresh[first : first + size])
            for first in range(0, self.rows, size)
        ]

    def met(self) -> Met:
        """All windows with the ages of their initial states: the intervention runs, the model does not."""
        intervention = self._intervention(_tiny_state)
        found: list[npt.NDArray[np.int64]] = []
        size = self.rows // self.micro_batches
        for step in range(self.steps):
            for number, part in enumerate(self.parts(step)):
                intervention.initial(step, part, number)
                age = intervention.ages().numpy()
                intervention.observe(_tiny_state(size), number)
                row = np.arange(size)
                found.append(
                    np.stack(
                        [
                            np.full(size, step),
                            np.full(size, number),
                            row,
                            part.document.numpy(),
                            age,
                            self._chains(step, number, row, age),
                        ]
                    )
                )
        return Met(*np.concatenate(found, axis=1)) if found else Met(*np.empty((6, 0), dtype=np.int64))

    def read(
        self,
        model: LanguageModel,
        chosen: Met,
        positions: Integers,
        into: StateSet,
        *,
        segment_tokens: int,
        precision: Precision = "float32",
        progress: Progress | None = None,
    ) -> None:
        """Replay with the model, and write to `into` the state of each chosen window after `positions` of its tokens, (n,)."""
        device = model.head_weight.device
        intervention = self._intervention(model.zero_state)
        last = int(chosen.step.max())
        place: dict[tuple[int, int], list[int]] = {}
        for index, key in enumerate(zip(chosen.step.tolist(), chosen.part.tolist(), strict=True)):
            place.setdefault(key, []).append(index)
        history = not self.training.without_memory
        done, total = 0, (last + 1) * self.rows * self.context
        for step in range(last + 1):
            for number, part in enumerate(self.parts(step)):
                wanted = np.array(place.get((step, number), []), dtype=np.int64)
                if not history and not wanted.size:
                    continue
                tokens = part.tokens[:, :-1].to(device)
                with inference(device, precision):
                    initial = intervention.initial(step, part, number)
                if wanted.size:
                    rows = torch.from_numpy(chosen.row[wanted])

                    def keep(which: Integers, state: State, wanted: Integers = wanted) -> None:
                        into.write(wanted[which], state)

                    read_to(
                        model,
                        tokens[rows.to(device)],
                        positions[wanted],
                        None if initial is None else initial.select(rows),
                        keep,
                        segment_tokens=segment_tokens,
                        precision=precision,
                    )
                if history:
                    with inference(device, precision):
                        state = initial
                        for start in range(0, self.context, segment_tokens):
                            _, state = model(tokens[:, start : start + segment_tokens], state)
                        assert state is not None
                        intervention.observe(state, number)
            done += self.rows * self.context
            if progress is not None:
                progress(done, total)

    def _intervention(self, zero_state: Any) -> initial_states.Intervention:
        run = initial_states.Run(self.training.seed, self.rows, self.micro_batches, self.context, zero_state)
        return initial_states.build(self.training.arm, run)

    def _chains(self, step: int, part: int, row: Integers, age: Integers) -> Integers:
        """Of arms whose rows go on from text to text; TBTT's may stay within a stretch, the others' states are new."""
        arm = self.training.arm
        made = params.ZeroInit | params.RandomNoise | params.FittedNoise | params.Gaussian | params.Permuted
        # Of an intervention that is not the project's own the ages tell.
        if isinstance(arm, made) or (isinstance(arm, params.Tbtt) and arm.at_document_end == "reset"):
            return np.full(row.size, NO_CHAIN)
        place, time = part * row.size + row, np.full(row.size, step)
        if isinstance(arm, params.StatePassing) and arm.previous == "micro_batch":
            place, time = row, time * self.micro_batches + part
        begin = time - age // self.context
        return np.where(age == NO_AGE, NO_CHAIN, begin * self.rows + place)


def choose(met: Met, count: int, folds: Mapping[int, int], chain_folds: int, quota: Mapping[int, int] | None, seed: int) -> Met:
    """A random choice of windows, at most `count`, in the order of reading.

    A window whose state was passed from other documents belongs to a document and to a chain, and both shall be in one fold:
    a chain's fold is drawn from its number, and only windows whose document is in the same fold are taken. Each document
    loses the same share, so the law of documents and ages stays as it is.

    Args:
        folds: the fold of each document that may be taken.
        chain_folds: folds that chains are drawn to.
        quota: at most so many windows of each document; None: no bound.
    """
    fold = np.array([folds.get(int(document), -1) for document in met.document], dtype=np.int64)
    chained = met.chain != NO_CHAIN
    of_chain = (mix(seed, _CHAINS, met.chain) % np.uint64(chain_folds)).astype(np.int64)
    allowed = np.flatnonzero((fold >= 0) & (~chained | (of_chain == fold)))
    order = np.random.default_rng(seed).permutation(allowed)
    if quota is not None:
        of_document = met.document[order]
        order = np.concatenate([order[of_document == document][:most] for document, most in quota.items()] or [order[:0]])
    return met.take(np.sort(order[:count]))


def _tiny_state(rows: int) -> State:
    return State((LayerState(torch.zeros(rows, 1, 1)),))
