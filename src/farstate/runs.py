"""Which models a figure shows: its models and arms, and the variants of them that it asks for. Loads no torch.

A variant that equals what the parameters say anyway carries the plain name, so that figures share its training and its
measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from farstate.grid import snapshot_tokens
from farstate.params import (
    Arm,
    ArmsFigure,
    BabilongFigure,
    ContextsFigure,
    CostFigure,
    Model,
    Params,
    Recipe,
    Shown,
    SigmasFigure,
    SnapshotsFigure,
    WarmUpsFigure,
)

BASE, CONTROL = "base", "control"


@dataclass(frozen=True)
class Origin:
    """A model before post-training.

    Attributes:
        model: its name in `models`.
        name: that name, followed by what differs from the parameters.
        spec: architecture, context, shape or checkpoint.
        tokens, seed, recipe, block_tokens: of its pre-training; a published checkpoint has its own.
    """

    model: str
    name: str
    spec: Model
    tokens: int
    seed: int
    recipe: Recipe
    block_tokens: int | None = None


@dataclass(frozen=True)
class Further:
    """A post-training: `arm` is its name in `posttrain.arms`, `name` that name followed by what differs."""

    arm: str
    name: str
    initial: Arm
    steps: int
    seed: int
    recipe: Recipe


@dataclass(frozen=True)
class Run:
    """A model that is measured: an origin, post-trained or as it was at a snapshot, or neither."""

    origin: Origin
    further: Further | None = None
    snapshot: int | None = None

    @property
    def arm(self) -> str:
        """Its arm's name in tables."""
        if self.further is not None:
            return self.further.name
        return BASE if self.snapshot is None else f"snapshot_{self.snapshot}"

    @property
    def seed(self) -> int | None:
        """Of the training that made it; None for a published checkpoint."""
        if self.further is not None:
            return self.further.seed
        return self.origin.seed if self.origin.spec.checkpoint is None else None

    @property
    def labels(self) -> dict[str, Any]:
        return {"model": self.origin.name, "arm": self.arm, "seed": self.seed}


@dataclass(frozen=True)
class Series:
    """One curve of a figure in which a quantity is varied.

    Attributes:
        panel: the model whose variants stand together.
        model, arm: in the tables.
        of: the arm that is varied.
        label: the value in words.
        value: the value; `axis` names it, with its unit.
    """

    panel: str
    model: str
    arm: str
    of: str
    label: str
    value: float
    axis: str


CONTEXT_AXIS = "training context, tokens"
TOKENS_AXIS = "training tokens"
WARMUP_AXIS = "warm-up, share of the steps"
SIGMA_AXIS = "σ of every element"
STEPS_AXIS = "post-training steps"
RESET_AXIS = "reset probability p"
RATE_AXIS = "peak learning rate"


def runs_of(params: Params, figure: Shown) -> tuple[list[Run], list[Series]]:
    """The runs that a figure shows, each once, in the order of the parameters, and its curves where a quantity is varied."""
    found = [item for model in figure.models for item in _EXPAND.get(type(figure), _arms)(params, figure, model)]
    runs = list(dict.fromkeys(run for run, _ in found))
    return runs, [series for _, several in found for series in several]


Found = Iterator[tuple[Run, list[Series]]]


def _arms(params: Params, figure: Any, model: str) -> Found:
    origin = origin_of(params, model)
    yield Run(origin), []
    for arm in figure.arms:
        if arm != BASE:
            for further in further_of(params, figure, model, arm):
                yield Run(origin, further), []


def _contexts(params: Params, figure: ContextsFigure, model: str) -> Found:
    for context in figure.contexts:
        origin = origin_of(params, model, context=context)
        yield Run(origin), [Series(model, origin.name, BASE, BASE, f"T_train = {context:,}", context, CONTEXT_AXIS)]


def _snapshots(params: Params, figure: SnapshotsFigure, model: str) -> Found:
    origin = origin_of(params, model)
    final = origin.tokens // origin.recipe.batch_tokens * origin.recipe.batch_tokens
    counts = snapshot_tokens(origin.tokens) if figure.snapshots is None else sorted(figure.snapshots)
    for tokens in counts:
        run = Run(origin, snapshot=tokens)
        yield run, [Series(model, origin.name, run.arm, BASE, f"{tokens:,} tokens", tokens, TOKENS_AXIS)]
    yield Run(origin), [Series(model, origin.name, BASE, BASE, f"{final:,} tokens, end of the schedule", final, TOKENS_AXIS)]


def _warmups(params: Params, figure: WarmUpsFigure, model: str) -> Found:
    for warmup in figure.warmups:
        series = None
        for seed in figure.seeds or (params.pretrain.seed,):
            origin = origin_of(params, model, warmup=warmup, tokens=figure.tokens, seed=seed)
            given = [] if series is not None else [Series(model, origin.name, BASE, BASE, f"{warmup:.3g}", warmup, WARMUP_AXIS)]
            series = series or given[0]
            yield Run(origin), given


def _sigmas(params: Params, figure: SigmasFigure, model: str) -> Found:
    yield from _arms(params, figure, model)
    origin = origin_of(params, model)
    for sigma in figure.sigmas:
        runs = [Run(origin, f) for f in further_of(params, figure, model, figure.noise, sigma=sigma)]
        yield from _varied(runs, model, figure.noise, f"σ = {sigma:g}", sigma, SIGMA_AXIS)


def _cost(params: Params, figure: CostFigure, model: str) -> Found:
    yield from _arms(params, figure, model)
    origin = origin_of(params, model)
    steps = params.posttrain.steps_of(model, figure)
    rate = params.posttrain.recipe_of(model).peak_learning_rate
    for arm in figure.vary:
        own = getattr(params.posttrain.arms[arm], "reset_probability", None)
        grids: list[tuple[str, str, Any, Iterable[Any]]] = [
            (STEPS_AXIS, "steps", steps, figure.vary_steps),
            (RESET_AXIS, "reset_probability", own, figure.vary_reset_probability if own is not None else ()),
            (RATE_AXIS, "peak_learning_rate", rate, figure.vary_peak_learning_rate),
        ]
        for axis, key, usual, values in grids:
            for value in sorted({*values, usual}) if values else ():
                runs = [Run(origin, f) for f in further_of(params, figure, model, arm, **{key: value})]
                yield from _varied(runs, model, arm, f"{value:g}", value, axis)


def _varied(runs: list[Run], model: str, of: str, label: str, value: float, axis: str) -> Found:
    for number, run in enumerate(runs):
        yield run, [] if number else [Series(model, run.origin.name, run.arm, of, label, value, axis)]


_EXPAND: dict[type[Shown], Callable[[Params, Any, str], Found]] = {
    ContextsFigure: _contexts,
    SnapshotsFigure: _snapshots,
    WarmUpsFigure: _warmups,
    SigmasFigure: _sigmas,
    CostFigure: _cost,
}


def origin_of(
    params: Params,
    model: str,
    *,
    context: int | None = None,
    warmup: float | None = None,
    tokens: int | None = None,
    seed: int | None = None,
) -> Origin:
    """The model, with what is given in the place of what the parameters say."""
    spec, recipe = params.models[model], params.pretrain.recipe_of(model)
    usual_tokens, usual_seed = params.pretrain.tokens_of(model), params.pretrain.seed
    name = model
    for key, value, usual in (
        ("context", context, spec.context),
        ("warmup", warmup, recipe.warmup),
        ("tokens", tokens, usual_tokens),
    ):
        if value is not None and value != usual:
            name += f".{key}-{value:g}" if isinstance(value, float) else f".{key}-{value}"
    return Origin(
        model=model,
        name=name,
        spec=spec if context is None else spec.model_copy(update={"context": context}),
        tokens=usual_tokens if tokens is None else tokens,
        seed=usual_seed if seed is None else seed,
        recipe=recipe if warmup is None else recipe.model_copy(update={"warmup": warmup}),
        block_tokens=params.pretrain.block_tokens_of(model),
    )


def further_of(
    params: Params,
    figure: ArmsFigure | BabilongFigure,
    model: str,
    arm: str,
    *,
    sigma: float | None = None,
    steps: int | None = None,
    reset_probability: float | None = None,
    peak_learning_rate: float | None = None,
) -> Iterator[Further]:
    """The arm's post-trainings, one a seed, with what is given in the place of what the parameters say."""
    initial, recipe = params.posttrain.arms[arm], params.posttrain.recipe_of(model)
    usual_steps = params.posttrain.steps_of(model, figure)
    name = arm
    for key, value, usual in (
        ("sigma", sigma, getattr(initial, "sigma", None)),
        ("reset_probability", reset_probability, getattr(initial, "reset_probability", None)),
    ):
        if value is not None and value != usual:
            name += f"-{key}-{_written(value)}"
            initial = initial.model_copy(update={key: value})
    if steps is not None and steps != usual_steps:
        name += f"-steps-{steps}"
    if peak_learning_rate is not None and peak_learning_rate != recipe.peak_learning_rate:
        name += f"-rate-{_written(peak_learning_rate)}"
        recipe = recipe.model_copy(update={"peak_learning_rate": peak_learning_rate})
    one = Further(arm, name, initial, usual_steps if steps is None else steps, 0, recipe)
    for seed in figure.seeds or params.posttrain.seeds:
        yield replace(one, seed=seed)


def _written(value: float) -> str:
    """A number as part of an arm's name, which has no points: 0.05 is 0p05."""
    return f"{value:g}".replace(".", "p").replace("+", "")
