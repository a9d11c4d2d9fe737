"""The stages of the long-context tasks: data sets, models trained on a task, measurements, their comparison. Loads no torch.

Used by `farstate.plan`, which knows the models and the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

from farstate import sources
from farstate.keys import Stage
from farstate.params import (
    Arm,
    Babilong,
    BabilongFigure,
    Copying,
    CopyingFigure,
    DiagnosisFigure,
    Params,
    Passkey,
    PublishedBabilong,
    Task,
    TaskFigure,
    ZeroInit,
)
from farstate.runs import BASE, Further, Origin, Run, further_of, origin_of, runs_of

FEW_SHOT, ZERO_SHOT, FINE_TUNED, TRAINED = "few_shot", "zero_shot", "fine_tuned", "trained"
"""How a model comes to answer: from solved stories in the prompt, from nothing, after training on the task, having learnt it alone."""
EXAMPLES, ANSWERS, SCORES = "examples.arrow", "answers.parquet", "scores.parquet"


@dataclass(frozen=True)
class Tuning:
    """Training on a task's examples: `arm` is the name of its initial states in `posttrain.arms`."""

    arm: str
    initial: Arm
    seed: int


@dataclass(frozen=True)
class TaskRun:
    """A model that is asked.

    Attributes:
        run: the model before it is trained on the task; for `trained` only its origin's shape is used.
        arm: its name in tables.
        prompting: FEW_SHOT, ZERO_SHOT, FINE_TUNED or TRAINED.
        tuning: its training on the task, or None.
    """

    run: Run
    arm: str
    prompting: str
    tuning: Tuning | None = None

    @property
    def labels(self) -> dict[str, Any]:
        seed = self.run.seed if self.tuning is None else self.tuning.seed
        return {"model": self.run.origin.name, "arm": self.arm, "prompting": self.prompting, "seed": seed}


class Builder(Protocol):
    """What the plan gives: stages that tasks stand on, each added once."""

    params: Params
    lock: dict[str, Any]
    tokenizer: Stage
    store: Stage

    def add(self, stage: Stage) -> Stage: ...

    def origin(self, origin: Origin) -> Stage: ...

    def posttrained(self, origin: Origin, checkpoint: Stage, further: Further) -> Stage: ...


Asking = TaskFigure | DiagnosisFigure
"""The figures that ask models."""


def task_runs(params: Params, figure: Asking) -> list[TaskRun]:
    """The models that a figure asks, each once, in the order of the parameters."""
    return list(dict.fromkeys(run for model in figure.models for run in _runs(params, figure, model)))


def _runs(params: Params, figure: Asking, model: str) -> Iterator[TaskRun]:
    if isinstance(figure, DiagnosisFigure):  # as they are
        yield from (TaskRun(run, run.arm, ZERO_SHOT) for run in runs_of(params, figure)[0] if run.origin.model == model)
        return
    origin = origin_of(params, model, context=figure.context)
    seeds = getattr(figure, "seeds", None) or params.posttrain.seeds
    if isinstance(figure, BabilongFigure):
        zero, initial = _zero(params)
        for prompting, arm in product(figure.prompting, figure.arms):
            befores = [Run(origin)] if arm == BASE else [Run(origin, one) for one in further_of(params, figure, model, arm)]
            for before in befores:
                if prompting == FEW_SHOT:
                    yield TaskRun(before, arm, prompting)
                else:
                    own = seeds if before.further is None else (before.further.seed,)
                    for seed in own:
                        yield TaskRun(before, arm, prompting, Tuning(zero, initial, seed))
        return
    learnt = TRAINED if isinstance(figure, CopyingFigure) else FINE_TUNED
    for arm in figure.arms:
        if arm == BASE:
            yield TaskRun(Run(origin), arm, ZERO_SHOT)
        else:
            for seed in seeds:
                yield TaskRun(Run(origin), arm, learnt, Tuning(arm, params.posttrain.arms[arm], seed))


def _zero(params: Params) -> tuple[str, Arm]:
    """No intervention: the arm of zero initial states, whatever its name."""
    named = ((name, arm) for name, arm in params.posttrain.arms.items() if isinstance(arm, ZeroInit))
    return next(named, ("zero", ZeroInit(initial_state="zero")))


class TaskStages:
    """The stages of one figure.

    Attributes:
        runs: the models asked.
        comparison: the stage whose tables the page shows.
    """

    def __init__(self, builder: Builder, name: str, figure: Asking) -> None:
        self._builder = builder
        self._params = builder.params
        self._figure = figure
        self.task, section = self._params.task_of(figure)
        self._section: Task = section
        self.runs = task_runs(self._params, figure)
        measured = [stage for run in self.runs for stage in self._measurements(run)]
        self.comparison = self._compare(name, measured)

    # --- data sets ---------------------------------------------------------------------------------------

    def _cells(self) -> list[dict[str, Any]]:
        """What is measured: each cell a task, a length in tokens (copying: in letters) and a depth."""
        section = self._section
        if isinstance(section, Babilong):
            if section.published is not None:
                return [{"task": task, "set": name} for task in section.tasks for name in section.published.lengths]
            return [{"task": task, "length": length, "depth": None} for task in section.tasks for length in section.lengths]
        if isinstance(section, Passkey):
            return [
                {"task": "passkey", "length": length, "depth": depth} for length in section.lengths for depth in section.depths
            ]
        assert isinstance(section, Copying)
        return [{"task": "copying", "length": length, "depth": None} for length in section.lengths]

    def _generator(self, shots: int) -> dict[str, Any]:
        """What an example depends on besides its cell."""
        section = self._section
        if isinstance(section, Babilong):
            return {"facts": list(section.facts), "shots": shots, "split_labels": section.split_labels}
        if isinstance(section, Passkey):
            return {"keys": list(section.keys), "filler": section.filler, "instruction": section.instruction}
        assert isinstance(section, Copying)
        return {"alphabet": section.alphabet}

    def _data(self, name: str, params: dict[str, Any], *, shots: int = 0) -> Stage:
        section = self._section
        upstream: dict[str, tuple[Stage, ...]] = {}
        if not isinstance(section, Copying):
            upstream["tokenizer"] = (self._builder.tokenizer,)
        if isinstance(section, Babilong) or (isinstance(section, Passkey) and section.filler == "text"):
            upstream["store"] = (self._builder.store,)
        return self._builder.add(
            Stage(
                rule="task_data",
                phase="tasks",
                name=f"data.{self.task}.{name}",
                params={"task": self.task, "generator": self._generator(shots), "seed": section.seed, **params},
                files=(EXAMPLES,),
                upstream=upstream,
                numerics=("tasks", "corpus"),
            )
        )

    def _evaluation_data(self, shots: int) -> list[tuple[str, Stage]]:
        """Data sets of all cells, or one a cell, each with its name."""
        section, cells = self._section, self._cells()
        common: dict[str, Any] = {"split": "test", "examples": section.examples}
        if isinstance(section, Babilong) and section.published is not None:
            outside = published_outside(section.published)
            common["published"] = {**section.published.model_dump(mode="json", exclude={"lengths"})}
            # Which set is read is decided by its file's name: paths enter beside checksums.
            content, paths = sources.content(outside, self._builder.lock), sources.registered_files(outside, self._builder.lock)
            common["content"] = [list(pair) for pair in zip(paths, content, strict=True)] if paths else content
        kind = f"{shots}-shot." if isinstance(section, Babilong) else ""
        if section.jobs == "model":
            return [("", self._data(f"{kind}test", {**common, "cells": cells}, shots=shots))]
        return [
            (_named(cell), self._data(f"{kind}test.{_named(cell)}", {**common, "cells": [cell]}, shots=shots)) for cell in cells
        ]

    def _training_data(self, context: int) -> Stage:
        section = self._section
        given: dict[str, Any] = {"split": "train", "examples": section.training.examples, "context": context}
        if isinstance(section, Babilong):
            given["mixture"] = dict(section.mixture) or dict.fromkeys(section.tasks, 1)
            given["training_lengths"] = section.training_lengths
        if isinstance(section, Copying):
            given["training_lengths"] = list(section.training_lengths)
            del given["context"]  # of the rows, which the examples do not know
        return self._data("train", given)

    # --- models and measurements -------------------------------------------------------------------------

    def _model(self, run: TaskRun) -> Stage:
        """The model that is asked."""
        builder, origin, tuning = self._builder, run.run.origin, run.tuning
        scratch = run.prompting == TRAINED
        before: Stage | None = None
        if not scratch:
            before = builder.origin(origin)
            if run.run.further is not None:
                before = builder.posttrained(origin, before, run.run.further)
        if tuning is None:
            assert before is not None
            return before
        training = self._section.training
        given: dict[str, Any] = {
            "task": self.task,
            "context": origin.spec.context,
            "arm": tuning.initial.model_dump(mode="json"),
            "seed": tuning.seed,
            "training": training.model_dump(mode="json", exclude={"examples"}),
        }
        if scratch:
            assert origin.spec.shape is not None
            given["architecture"] = origin.spec.architecture
            given["shape"] = origin.spec.shape.model_dump(mode="json")
        labels = run.labels
        initial = f".{tuning.arm}" if isinstance(self._figure, BabilongFigure) else ""
        return builder.add(
            Stage(
                rule="tune",
                phase="tasks",
                name=f"model.{labels['model']}.{run.arm}.{self.task}{initial}.s{tuning.seed}",
                params=given,
                files=("config.json", "model.safetensors", "metrics.jsonl", "ages.parquet"),
                upstream={
                    **({} if before is None else {"checkpoint": (before,)}),
                    "data": (self._training_data(origin.spec.context),),
                },
                numerics=("ops", "models", "training", "tasks"),
            )
        )

    def _measurements(self, run: TaskRun) -> Iterator[Stage]:
        section, labels = self._section, run.labels
        model = self._model(run)
        shots = section.shots if isinstance(section, Babilong) and run.prompting == FEW_SHOT else 0
        longest = section.training_lengths[1] if isinstance(section, Copying) else run.run.origin.spec.context
        seed = f".s{labels['seed']}" if labels["seed"] is not None else ""
        params: dict[str, Any] = {"task": self.task, "train_length": longest, "precision": section.precision, "labels": labels}
        if isinstance(section, Babilong):
            params["max_new_tokens"] = section.max_new_tokens
        for cell, data in self._evaluation_data(shots):
            name = f"task.{self.task}.{labels['model']}.{labels['arm']}.{labels['prompting']}{seed}"
            yield self._builder.add(
                Stage(
                    rule="task",
                    phase="evaluate",
                    name=f"{name}.{cell}" if cell else name,
                    params=params,
                    files=(ANSWERS,),
                    upstream={
                        "checkpoint": (model,),
                        "data": (data,),
                        **({} if isinstance(section, Copying) else {"tokenizer": (self._builder.tokenizer,)}),
                    },
                    numerics=("ops", "models", "evaluation", "tasks"),
                )
            )

    def _compare(self, name: str, measured: list[Stage]) -> Stage:
        figure = self._figure
        shown = list(dict.fromkeys((run.labels["model"], run.arm, run.prompting) for run in self.runs))
        return self._builder.add(
            Stage(
                rule="compare_task",
                phase="evaluate",
                name=f"compare_task.{name}",
                params={
                    "compare": self._params.compare.model_dump(mode="json", include={"confidence", "resamples", "seed"}),
                    "task": self.task,
                    "figure": {"arms": list(figure.arms), "shown": [list(one) for one in shown], "cells": self._cells()},
                },
                files=(SCORES,),
                upstream={"evaluations": tuple(sorted(measured, key=lambda stage: stage.directory))},
                numerics=("tasks",),
            )
        )


def task_report(params: Params, figure: TaskFigure, runs: list[TaskRun]) -> dict[str, Any]:
    """What a page of a task prints besides its tables."""
    task, section = params.task_of(figure)
    report = params.report.model_dump(mode="json")
    report["tasks"] = {task: section.model_dump(mode="json")}
    report["figure"] = figure.model_dump(mode="json")
    seeds = list(getattr(figure, "seeds", None) or params.posttrain.seeds)
    report["seeds"] = seeds
    report["arms"] = {run.tuning.arm: run.tuning.initial.model_dump(mode="json") for run in runs if run.tuning is not None}
    if not isinstance(figure, CopyingFigure):
        report["pretrain"] = params.pretrain.model_dump(mode="json", exclude={"by_model"})
    if isinstance(figure, BabilongFigure):
        report["posttrain"] = params.posttrain.model_dump(mode="json", exclude={"by_model"})
        report["posttrain"]["arms"] = {
            arm: params.posttrain.arms[arm].model_dump(mode="json") for arm in figure.arms if arm != BASE
        }
        report["posttrain"]["steps"] = params.posttrain.steps if figure.steps is None else figure.steps
        report["posttrain"]["seeds"] = seeds
    report["series"] = []
    report["order"] = list(dict.fromkeys(run.run.origin.name for run in runs))
    report["models"] = {}
    for origin in dict.fromkeys(run.run.origin for run in runs):
        spec = origin.spec
        here = spec.checkpoint is None and not isinstance(figure, CopyingFigure)
        further = isinstance(figure, BabilongFigure)
        report["models"][origin.name] = {
            "of": origin.model,
            "architecture": spec.architecture,
            "context": spec.context,
            "shape": None if spec.shape is None else spec.shape.model_dump(mode="json"),
            "training_tokens": origin.tokens // origin.recipe.batch_tokens * origin.recipe.batch_tokens if here else None,
            "pretrain": origin.recipe.model_dump(mode="json") if here else None,
            "posttrain": params.posttrain.recipe_of(origin.model).model_dump(mode="json") if further else None,
            "steps": params.posttrain.steps_of(origin.model, figure) if isinstance(figure, BabilongFigure) else None,
        }
    return report


def published_outside(published: PublishedBabilong) -> sources.Outside:
    """The published sets as an outside input: a hub data set, or the files of a local copy."""
    if published.hub is not None:
        return sources.Outside("hub", published.hub)
    return sources.Outside("files", f"{published.files}/**")


def _named(cell: dict[str, Any]) -> str:
    """A cell as part of a directory's name."""
    parts = [str(cell["task"]), str(cell.get("set", cell.get("length")))]
    if cell.get("depth") is not None:
        parts.append(f"{cell['depth']:g}")
    return "-".join(parts)
