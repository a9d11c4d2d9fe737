"""`farstate diagnose` and `farstate repair`: from a checkpoint to a page and a plain recommendation."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farstate.errors import FarstateError, nearest
from farstate.keys import Stage
from farstate.own_model.budgets import BUDGETS, Sizes, measurements, sizes
from farstate.own_model.checkpoint import Known, know
from farstate.own_model.folder import (
    arms_of,
    corpus_of,
    overrides_of,
    parameters,
    peak_rate,
    place,
    register,
    repository,
    write_parameters,
)
from farstate.own_model.running import BACKWARD, Work, snakemake, work_of
from farstate.params import merge
from farstate.plan import Plan
from farstate.reports.text import short_count
from farstate.runs import BASE

Say = Callable[[str], None]
DIAGNOSIS, REPAIR = "diagnosis", "repair"
SUGGESTED_STEPS = 100
SUGGESTED_ARM = "state_passing"
_TRIAL_TOKENS, _TRIAL_ROWS, _TRIALS = 256, 4, 3


@dataclass(frozen=True)
class Asked:
    """The options that both commands share."""

    checkpoint: str
    corpus: Sequence[str] = ()
    tokenizer: Path | None = None
    context: int | None = None
    budget: str = "small"
    output: Path | None = None
    cores: int | None = None
    profile: str | None = None
    device: str | None = None
    dry_run: bool = False
    overrides: Sequence[str] = ()


@dataclass(frozen=True)
class Repairing:
    """What a repair asks for besides."""

    arms: Sequence[str]
    steps: int = SUGGESTED_STEPS
    seeds: Sequence[int] = (0,)
    tolerance: float = 0.02
    least_removed: float = 0.5
    control: bool = True


def diagnose(asked: Asked, say: Say) -> Path:
    """Measure a checkpoint and draw `reports/diagnosis.html`; returns the folder.

    Raises:
        FarstateError: what is wrong with the checkpoint, the texts, an option, or a job.
    """
    return _Session(asked, None, say).run()


def repair(asked: Asked, repairing: Repairing, say: Say) -> Path:
    """Post-train a checkpoint, measure it before and after, draw `reports/repair.html`, write the repaired one; returns the folder.

    Raises:
        FarstateError: as `diagnose`.
    """
    if repairing.steps < 1:
        raise FarstateError(f"--steps: {repairing.steps} is not allowed; at least 1 step is trained")
    return _Session(asked, repairing, say).run()


class _Session:
    """One call."""

    def __init__(self, asked: Asked, repairing: Repairing | None, say: Say) -> None:
        if asked.budget not in BUDGETS:
            raise FarstateError(
                f"--budget: '{asked.budget}' is unknown{nearest(asked.budget, BUDGETS)}; known: {', '.join(BUDGETS)}"
            )
        self.asked, self.repairing, self.say = asked, repairing, say
        self.page = DIAGNOSIS if repairing is None else REPAIR
        self.root = repository()
        self.arms = {} if repairing is None else arms_of(repairing.arms, self.root, control=repairing.control)
        self.overrides = overrides_of(asked.overrides)
        self.known = know(asked.checkpoint, asked.context, asked.tokenizer)
        self.corpus = corpus_of(asked.corpus, self.root, trains=repairing is not None)
        self.folder = place(asked.output, self.known, {"corpus": list(self.corpus.sources), "split": self.corpus.split}).resolve()

    def run(self) -> Path:
        known, started = self.known, time.monotonic()
        count = known.config.parameter_count()
        self.say(
            f"{known.given}: {known.config.architecture}, {short_count(count)} parameters, {known.format} format, trained on {known.context:,} "
            f"tokens at a time; {known.symbols:,} symbols of {known.tokenizer}"
        )
        # The texts decide how far and in how many documents is measured: they are made into tokens first.
        plan = self._planned(sizes(BUDGETS[self.asked.budget], known.context, None, wanted=self._wanted()))
        early = plan.wanted(self.folder, ["corpus", "pretrained"], absent=True)
        if self.asked.dry_run and early:
            self.say(f"texts: {self.corpus.given}, not made into tokens yet; what follows holds if they are long enough")
            return self._estimate(plan)
        if early:
            self.say(f"texts: {self.corpus.given}; making them into tokens ({self.folder})")
            self._snakemake(["corpus", "pretrained"], None)
        size = self._sizes(plan)
        if size.notice:
            self.say(f"notice: {size.notice}")
        plan = self._planned(size)
        if self.asked.dry_run:
            return self._estimate(plan)
        page = plan.pages[self.page]
        if page.carried(self.folder) == page.wanted() and not plan.wanted(self.folder, [self.page], absent=True):
            self.say("nothing to be done: all of it is measured already")
        else:
            work = self._work(plan)
            self._tell(work)
            self._snakemake([page.outputs["html"]], work)
        from farstate.own_model.summary import lines, result_of

        for line in lines(result_of(known, plan, page, self.folder)):
            self.say(line)
        if self.repairing is None and page.params["models"][known.name]["posttrain"]:
            self._say_minutes(page.params)
        self.say(f"{time.monotonic() - started:.0f} s in all")
        return self.folder

    def _say_minutes(self, report: Mapping[str, Any]) -> None:
        """How long the repair that is suggested would train here."""
        model = report["models"][self.known.name]
        tokens = model["steps"] * model["posttrain"]["batch_tokens"]
        minutes = 2.0 * BACKWARD * tokens / self.rate() / 60.0 / max(1, min(2, self.asked.cores or os.cpu_count() or 1))
        self.say(
            f"a repair with {model['steps']} steps and its control would train for about {max(minutes, 0.1):.1f} minutes here (estimate)"
        )

    def _wanted(self) -> int | None:
        found = self.overrides.get("evaluate", {}).get("length")
        return found if isinstance(found, int) else None

    def _planned(self, size: Sizes) -> Plan:
        """Write the parameters for these sizes and plan them."""
        known, repairing = self.known, self.repairing
        sections = measurements(BUDGETS[self.asked.budget], known.context, size)
        suggested = arms_of([SUGGESTED_ARM], self.root, control=True)
        told = {"given": known.given, "pretrained_tokens": known.pretrained_tokens, "rate": peak_rate(known)[1]}
        if repairing is None:
            figure: dict[str, Any] = {**told, "arms": [BASE]}
        else:
            figure = {
                **told,
                "arms": [BASE, *self.arms],
                "least_removed": repairing.least_removed,
                "short_context_tolerance": repairing.tolerance,
            }
        given = parameters(
            known,
            self.corpus,
            self.root,
            sections,
            {self.page: figure},
            arms=self.arms or suggested,
            steps=repairing.steps if repairing else SUGGESTED_STEPS,
            seeds=repairing.seeds if repairing else (0,),
            overrides=self.overrides,
        )
        params = write_parameters(self.folder, given, "diagnose" if repairing is None else "repair")
        plan = register(self.folder, params)
        parts = self._micro_batches(plan)
        if parts > params.posttrain.recipe.micro_batches:
            given = merge(given, {"posttrain": {"recipe": {"micro_batches": parts}}})
            plan = register(self.folder, write_parameters(self.folder, given, "repair"))
        return plan

    def _micro_batches(self, plan: Plan) -> int:
        """In how many parts a batch is computed so that it fits the device's memory, as far as the planner knows the model."""
        from farstate.planner.devices import device_of
        from farstate.planner.jobs import estimate
        from farstate.settings import load_settings

        settings = load_settings(self.root / "config" / "settings.yaml")
        device = device_of(settings, elsewhere=self.asked.profile is not None)
        parts = 1
        for stage in plan.of(rule="posttrain"):
            recipe = stage.params["recipe"]
            rows = recipe["batch_tokens"] // stage.params["context"]
            parts = max(parts, recipe["micro_batches"])
            job = estimate(stage, settings, device, self.folder)
            held = {name: size for name, size in job.memory.items() if name in ("activations", "moment", "states")}
            fixed = job.bytes - sum(held.values())
            while parts < rows and rows % (2 * parts) == 0 and fixed + sum(held.values()) / parts > device.memory / 2:
                parts *= 2
        return parts

    def _sizes(self, plan: Plan) -> Sizes:
        from farstate.corpus.store import TokenStore

        lengths = TokenStore(self.folder / plan.store.directory).documents("test").length.tolist()
        return sizes(BUDGETS[self.asked.budget], self.known.context, lengths, wanted=self._wanted())

    def _snakemake(self, targets: Sequence[str], work: Work | None) -> None:
        asked = self.asked
        cores = asked.cores if asked.cores is not None or asked.profile is not None else os.cpu_count()
        device = "" if asked.device is None else json.dumps({"device": asked.device})
        snakemake(self.root, self.folder, targets, cores=cores, profile=asked.profile, work=work, settings=device)

    # --- what it will cost -------------------------------------------------------------------------------

    def _work(self, plan: Plan) -> Work:
        return work_of(self._missing(plan), page=True, rate=self.rate())

    def _missing(self, plan: Plan) -> list[Stage]:
        return [plan.at(directory) for directory in sorted(plan.wanted(self.folder, [self.page], absent=True))]

    def rate(self) -> float:
        """Tokens that the model reads in a second on one core (or the GPU), forward: tried."""
        if not hasattr(self, "_rate"):
            self._rate = trial(self.known, self.asked.device)
        return self._rate

    def _tell(self, work: Work) -> None:
        cores = self.asked.cores or os.cpu_count() or 1
        minutes = work.total / min(cores, max(work.count, 1)) / 60.0
        jobs = ", ".join(f"{number} × {rule}" for rule, number in work.jobs.items())
        self.say(f"to run: {jobs}")
        where = "on the cluster, see `farstate plan --cluster`" if self.asked.profile else f"on {cores} core(s)"
        self.say(f"estimate: about {minutes:.1f} minutes {where} (from a trial at {self.rate():,.0f} tokens/s a core)")

    def _estimate(self, plan: Plan) -> Path:
        self._tell(self._work(plan))
        self.say(f"parameters: {self.folder / 'params.yaml'}; nothing was run")
        return self.folder


def trial(known: Known, device: str | None) -> float:
    """Tokens a second that the model reads on one thread, or on the GPU: the fastest of a few trials."""
    import torch

    from farstate.models.checkpoints import load_model

    where = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
    model = load_model(known.path, where)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tokens = torch.zeros(_TRIAL_ROWS, _TRIAL_TOKENS, dtype=torch.long, device=where)
        with torch.inference_mode():
            fastest = min(_seconds(model, tokens) for _ in range(_TRIALS + 1))
        return tokens.numel() / max(fastest, 1e-6)
    finally:
        torch.set_num_threads(threads)


def _seconds(model: Any, tokens: Any) -> float:
    started = time.monotonic()
    hidden, _ = model(tokens)
    float(hidden.sum())  # waits for a GPU
    return time.monotonic() - started
