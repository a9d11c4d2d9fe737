"""The states that the stage `shift` compares: met in training, held out inside training, and far into held-out texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farstate import params
from farstate.corpus.readers import ShuffledWindows
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.evaluation.perplexity import EvaluationSettings
from farstate.evaluation.perplexity import Progress as Count
from farstate.evaluation.sampled_states import Integers, Sampled, StateSet, choose_heads, grouped_folds, inference, read_to
from farstate.evaluation.stream import stream_nll
from farstate.evaluation.texts import Text
from farstate.evaluation.training_states import NO_CHAIN, Met, Replay, Training, choose
from farstate.evaluation.uncertainty import Floats, Resamples, resample
from farstate.evaluation.windows import stride
from farstate.models.head import token_nll
from farstate.models.language_model import LanguageModel
from farstate.state import State
from farstate.training.initial_states import NO_AGE

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the units of it that are done, and those in all."""

NULL_DRAWS = 3
"""Sets of held-out states inside training behind a null band."""


@dataclass(frozen=True)
class Reference:
    """States that training met, and held-out states that training could have met.

    Attributes:
        nulls: NULL_DRAWS sets of the same law: after 1 … T tokens; or none.
        ends: after exactly T tokens of the windows of one of those sets, from the same initial states; or None. Training met
            states of all positions up to T, so that even states that have settled by T are of another law than `nulls`.
        facts: what the manifest says.
    """

    states: Sampled
    nulls: tuple[Sampled, ...]
    ends: Sampled | None
    facts: dict[str, Any]


@dataclass(frozen=True)
class Carried:
    """What the held-out texts gave, in their order.

    Attributes:
        states: by position, the analysed heads' states.
        nll: (texts, positions) mean loss over the ⌈T/2⌉ tokens after each position, carried; `excess`: less the window
            reference, NaN below T_train, where it is zero by definition.
        saved: files with the whole states at the swap position, a batch each, and its texts.
    """

    states: dict[int, Sampled]
    nll: Floats
    excess: Floats
    saved: list[tuple[Integers, Path]]
    broken: dict[int, tuple[str, int]]


class Measurement:
    """One model on its texts: what all steps of the measurement share."""

    def __init__(
        self,
        model: LanguageModel,
        store: TokenStore,
        texts: list[Text],
        shift: params.Shift,
        context: int,
        positions: tuple[int, ...],
        swap_position: int,
        settings: EvaluationSettings,
        folder: Path,
        progress: Progress,
    ) -> None:
        self.model, self.store, self.texts, self.shift, self.context = model, store, texts, shift, context
        self.positions, self.swap_position, self.settings = positions, swap_position, settings
        self.folder, self.progress = folder, progress
        self.device = torch.device(settings.device)
        self.like = model.zero_state(1)
        self.heads = choose_heads(self.like, shift.heads, self.generator(0))
        if not self.heads:
            raise FarstateError("shift: the model has no recurrent state; there is nothing to compare")
        self.documents = np.array([text.document for text in texts])
        in_training = sum(int((lengths > context).sum()) for lengths in store.documents("train").scan())
        self.folds = min(shift.folds, in_training, int(np.unique(self.documents).size))
        self.test_folds = grouped_folds(*_counted(self.documents), max(1, self.folds))
        self.resamples = self.resample(self.documents)

    def generator(self, number: int) -> np.random.Generator:
        """A generator of its own for each purpose."""
        return np.random.default_rng((self.shift.seed, number))

    def resample(self, documents: npt.NDArray[np.str_], *, training: bool = False) -> Resamples:
        """Resamples of one side; the two sides, read from different documents, are drawn apart."""
        return resample(
            documents.tolist(),
            resamples=self.shift.resamples,
            confidence=self.shift.confidence,
            generator=self.generator(10 if training else 1),
        )

    def count(self, what: str) -> Count:
        return lambda done, total: self.progress(what, done, total)

    # --- states ---------------------------------------------------------------------------------------

    def states(self, count: int) -> StateSet:
        return StateSet(self.heads, self.like, count, self.folder)

    def zero_starts(self) -> Reference:
        """Windows of the training split from the zero state, and as many of the held-out texts."""
        shift, context = self.shift, self.context
        generator = self.generator(2)
        windows = ShuffledWindows(self.store, "train", context, 1, shift.seed).windows
        count = min(shift.reference_states, windows)
        batch = ShuffledWindows(self.store, "train", context, count, shift.seed).batch(0)
        ids = self.store.documents("train").strings("id", batch.document.numpy())
        own = self._from_zero(batch.tokens[:, :-1].numpy(), ids, None, generator, "states met in training, zero start")
        nulls, ends = [], None
        for draw in range(NULL_DRAWS):
            first = generator.integers(shift.length - context + 1, size=len(self.texts))
            tokens = np.stack([text.read(self.store, int(start), context) for text, start in zip(self.texts, first, strict=True)])
            what = f"held-out states inside training, zero start, {draw + 1} of {NULL_DRAWS}"
            nulls.append(self._from_zero(tokens, self.documents, self.test_folds, generator, what))
            if draw == 0:
                what = "held-out states at the end of training, zero start"
                ends = self._from_zero(tokens, self.documents, self.test_folds, None, what)
        facts = {"initial_state": "zero", "steps": None, **_facts(own, nulls, ends)}
        return Reference(own, tuple(nulls), ends, facts)

    def _from_zero(
        self,
        tokens: Integers,
        documents: npt.NDArray[np.str_],
        folds: dict[str, int] | None,
        generator: np.random.Generator | None,
        what: str,
    ) -> Sampled:
        """The state of each window, (n, T), after a random number of its tokens, or after all without a generator."""
        count = tokens.shape[0]
        positions = np.full(count, self.context)
        if generator is not None:
            positions = np.asarray(generator.integers(1, self.context + 1, size=count))
        folds = folds or grouped_folds(*_counted(documents), max(1, self.folds))
        states = self.states(count)
        size = max(1, self.settings.rows * self.settings.segment_tokens // self.context)
        for first in range(0, count, size):
            here = np.arange(first, min(first + size, count))

            def keep(which: Integers, state: State, here: Integers = here) -> None:
                states.write(here[which], state)

            block = torch.from_numpy(tokens[here]).to(self.device)
            read_to(
                self.model,
                block,
                positions[here],
                None,
                keep,
                segment_tokens=self.settings.segment_tokens,
                precision=self.shift.precision,
            )
            self.progress(what, int(here[-1]) + 1, count)
        return self._sampled(states, documents, folds, np.full(count, NO_CHAIN), positions, positions)

    def _sampled(
        self,
        states: StateSet,
        documents: npt.NDArray[np.str_],
        folds: Mapping[str, int],
        chains: Integers,
        positions: Integers,
        ages: Integers,
    ) -> Sampled:
        of_state = np.array([folds[str(name)] for name in documents], dtype=np.int64)
        return Sampled(states, np.arange(documents.size), documents, of_state, chains, positions, ages)

    def met_in(self, training: Training) -> Reference:
        """Windows from the initial states of a post-training, and its intervention on the held-out split."""
        shift = self.shift
        replay = Replay(self.store, "train", training, self.context, shift.reference_states)
        chosen, folds = self._choose(replay.met(), shift.reference_states, "train", None)
        own, _ = self._met(replay, chosen, "train", folds, 0, "states met in training, replayed")
        held_out = Replay(self.store, shift.split, training, self.context, NULL_DRAWS * len(self.texts))
        nulls: list[Sampled] = []
        ends: Sampled | None = None
        if held_out.steps >= 1:
            quota = None
            if shift.streams == "documents":
                names, counts = _counted(self.documents)
                quota = {name: NULL_DRAWS * count for name, count in zip(names, counts, strict=True)}
            chosen, folds = self._choose(held_out.met(), NULL_DRAWS * len(self.texts), shift.split, quota)
            if len(chosen) >= NULL_DRAWS:
                draw = _draws(self.store.documents(shift.split).strings("id", chosen.document))
                # The windows of the first set are read to their end as well: last in the order of reading.
                first = np.flatnonzero(draw == 0)
                again = chosen.take(np.concatenate([np.arange(len(chosen)), first]))
                what = "held-out states inside training, replayed"
                inside, ends = self._met(held_out, again, shift.split, folds, first.size, what)
                nulls = [inside.take(np.flatnonzero(draw == number)) for number in range(NULL_DRAWS)]
        facts = {
            "initial_state": training.arm.initial_state,
            "steps": training.steps,
            "steps_replayed": replay.steps,
            "rows_of_a_batch": replay.rows_of_training,
            "rows_replayed": replay.rows,
            "steps_replayed_held_out": held_out.steps,
            "rows_replayed_held_out": held_out.rows if held_out.steps else 0,
            "weights": "final, frozen",
            **_facts(own, nulls, ends),
        }
        return Reference(own, tuple(nulls), ends, facts)

    def _choose(self, met: Met, count: int, split: str, quota: Mapping[str, int] | None) -> tuple[Met, dict[str, int]]:
        """Windows whose states are taken, and the fold of each document."""
        documents, windows = np.unique(met.document, return_counts=True)
        names = dict(zip(documents.tolist(), map(str, self.store.documents(split).strings("id", documents)), strict=True))
        if split == "train" or quota is None:
            of_name = grouped_folds(list(names.values()), windows.tolist(), max(1, self.folds))
        else:
            of_name = self.test_folds
        folds = {index: of_name[name] for index, name in names.items() if name in of_name}
        wanted = None if quota is None else {index: quota[names[index]] for index in folds}
        return choose(met, count, folds, max(1, self.folds), wanted, self.shift.seed), of_name

    def _met(
        self, replay: Replay, chosen: Met, split: str, folds: Mapping[str, int], ends: int, what: str
    ) -> tuple[Sampled, Sampled]:
        """The states of chosen windows after a random number of their tokens, and of the last `ends` after all T."""
        generator = self.generator(3)
        count = len(chosen)
        positions = np.asarray(generator.integers(1, self.context + 1, size=count))
        positions[count - ends :] = self.context
        states = self.states(count)
        if count:
            replay.read(
                self.model,
                chosen,
                positions,
                states,
                segment_tokens=self.settings.segment_tokens,
                precision=self.shift.precision,
                progress=self.count(what),
            )
        documents = self.store.documents(split).strings("id", chosen.document)
        ages = np.where(chosen.age == NO_AGE, NO_AGE, chosen.age + positions)
        found = self._sampled(states, documents, folds, chosen.chain, positions, ages)
        return found.take(np.arange(count - ends)), found.take(np.arange(count - ends, count))

    def carried(self) -> Carried:
        """Read every text once from zero: the states at the positions, and the losses after them."""
        shift, step = self.shift, stride(self.context)
        positions = self.positions
        marks = sorted({*positions, *(position + step for position in positions)})
        count = len(self.texts)
        sets = {position: self.states(count) for position in positions}
        nll = np.zeros((count, len(positions)))
        saved: list[tuple[Integers, Path]] = []
        done, total = 0, count * marks[-1]
        for first in range(0, count, self.settings.rows):
            here = np.arange(first, min(first + self.settings.rows, count))
            batch = [self.texts[number] for number in here]
            state, start = None, 0
            for mark in marks:
                while start < mark:
                    stop = min(start + self.settings.segment_tokens, mark)
                    tokens = self.tokens(batch, start, stop - start + 1)
                    wanted = [
                        number for number, position in enumerate(positions) if position <= start and stop <= position + step
                    ]
                    with inference(self.device, shift.precision):
                        hidden, state = self.model(tokens[:, :-1], state)
                        if wanted:
                            loss = token_nll(hidden, self.model.head_weight, tokens[:, 1:], self.store.vocabulary_size)
                            nll[here[:, None], wanted] += loss.double().sum(1).cpu().numpy()[:, None]
                    done += here.size * (stop - start)
                    self.progress("held-out texts", done, total)
                    start = stop
                assert state is not None
                if mark in sets:
                    sets[mark].write(here, state)
                if mark == self.swap_position:
                    path = self.folder / f"{first}.safetensors"
                    state.save(path)
                    saved.append((here, path))
        nll /= step
        nll[~np.isfinite(nll)] = np.nan
        excess = nll - self._window_reference()
        chains = np.full(count, NO_CHAIN)
        states = {
            position: self._sampled(found, self.documents, self.test_folds, chains, *2 * (np.full(count, position),))
            for position, found in sets.items()
        }
        broken = {}
        for number, position in enumerate(positions):
            lost = np.flatnonzero(np.isnan(nll[:, number]))
            if lost.size:
                broken[position] = (self.texts[lost[0]].document, self.texts[lost[0]].stretch)
        return Carried(states, nll, excess, saved, broken)

    def tokens(self, batch: Sequence[Text], start: int, count: int) -> torch.Tensor:
        """The tokens x_start … x_{start+count−1} of some texts, (texts, count), on the device."""
        return torch.from_numpy(np.stack([text.read(self.store, start, count) for text in batch])).to(self.device)

    def _window_reference(self) -> Floats:
        """Mean loss over the ⌈T/2⌉ tokens after each position read from zero with a window of T tokens; NaN below T."""
        context, step = self.context, stride(self.context)
        found = np.full((len(self.texts), len(self.positions)), np.nan)
        size = max(1, self.settings.rows * self.settings.segment_tokens // context)
        for number, position in enumerate(self.positions):
            if position < context:
                continue
            begin = position + step - context
            for first in range(0, len(self.texts), size):
                batch = self.texts[first : first + size]

                def read(start: int, count: int, batch: list[Text] = batch, begin: int = begin) -> Integers:
                    return np.stack([text.read(self.store, begin + start, count) for text in batch])

                total = np.zeros(len(batch))
                for _, nll in stream_nll(
                    self.model,
                    read,
                    context,
                    segment_tokens=self.settings.segment_tokens,
                    device=self.device,
                    vocabulary_size=self.store.vocabulary_size,
                    precision=self.shift.precision,
                    score_from=context - step + 1,
                ):
                    total += nll.sum(axis=1)
                found[first : first + len(batch), number] = total / step
        return found


def _counted(documents: npt.NDArray[np.str_]) -> tuple[list[str], list[int]]:
    names, counts = np.unique(documents, return_counts=True)
    return [str(name) for name in names], [int(count) for count in counts]


def _draws(documents: npt.NDArray[np.str_]) -> Integers:
    """States dealt to NULL_DRAWS sets, those of each document to all sets in turn: the set of each."""
    order = np.argsort(documents, kind="stable")
    draw = np.empty(documents.size, dtype=np.int64)
    _, starts = np.unique(documents[order], return_index=True)
    for first, last in zip(starts, [*starts[1:], documents.size], strict=True):
        draw[order[first:last]] = np.arange(last - first) % NULL_DRAWS
    return draw


def _facts(own: Sampled, nulls: Sequence[Sampled], ends: Sampled | None) -> dict[str, Any]:
    ages = own.ages[own.ages != NO_AGE]
    return {
        "states": len(own),
        "documents": int(np.unique(own.documents).size),
        "chains": int(np.unique(own.chains[own.chains != NO_CHAIN]).size),
        "age_median": float(np.median(ages)) if ages.size else None,
        "age_largest": int(ages.max()) if ages.size else None,
        "null_states": [len(null) for null in nulls],
        "null_end_states": 0 if ends is None else len(ends),
        "null_documents": int(np.unique(np.concatenate([null.documents for null in nulls])).size) if nulls else 0,
    }
