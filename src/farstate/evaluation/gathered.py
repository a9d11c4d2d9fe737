"""What all comparisons of a figure's arms begin with: each measurement once and none missing, and one set of resamples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np

from farstate import params
from farstate.errors import FarstateError
from farstate.evaluation.uncertainty import Resamples, resample
from farstate.runs import BASE


class Measured(Protocol):
    """A measurement, as far as its place in a figure goes."""

    @property
    def model(self) -> str: ...

    @property
    def arm(self) -> str: ...

    @property
    def seed(self) -> int | None: ...


M = TypeVar("M", bound=Measured)


class Gathered(Generic[M]):
    """The measurements of a figure by model and arm.

    Args:
        models, arms: of the figure.
        noun, verb: how a measurement is called in messages; `of`: of what, where one is missing.
        absent: pairs of model and arm that the figure does not show.

    Raises:
        FarstateError: the base is not among the arms.
    """

    def __init__(
        self,
        models: Sequence[str],
        arms: Sequence[str],
        *,
        noun: str = "measurement",
        verb: str = "measures",
        of: str = "",
        absent: Collection[tuple[str, str]] = (),
    ) -> None:
        if BASE not in arms:
            raise FarstateError(f"figure: '{BASE}' must be among the arms, every arm is compared with it")
        self._shown = [(model, arm) for model in models for arm in arms if (model, arm) not in absent]
        self._noun, self._verb, self._of = noun, verb, of
        self._runs: dict[tuple[str, str], list[M]] = {}

    def add(self, directory: Path, run: M) -> list[M]:
        """The group that `run` of `directory` belongs to, it included.

        Raises:
            FarstateError: the figure does not show it, or it is there already.
        """
        if (run.model, run.arm) not in self._shown:
            raise FarstateError(f"{directory}: {self._verb} {run.model} / {run.arm}, which the figure does not show")
        group = self._runs.setdefault((run.model, run.arm), [])
        if any(other.seed == run.seed for other in group):
            raise FarstateError(f"{directory}: a second {self._noun} of {run.model} / {run.arm}, seed {run.seed}")
        group.append(run)
        return group

    def complete(self) -> dict[tuple[str, str], list[M]]:
        """All, each group by seed.

        Raises:
            FarstateError: one that the figure shows is missing.
        """
        for model, arm in self._shown:
            if (model, arm) not in self._runs:
                raise FarstateError(f"no {self._noun}{self._of} of {model} / {arm}, which the figure shows")
        for group in self._runs.values():
            group.sort(key=lambda run: -1 if run.seed is None else run.seed)
        return self._runs


def resamples_of(documents: Sequence[str], compare: params.Compare) -> Resamples:
    """The resamples that all arms of a figure share, from its texts' documents."""
    return resample(
        documents,
        resamples=compare.resamples,
        confidence=compare.confidence,
        generator=np.random.default_rng(compare.seed),
    )
