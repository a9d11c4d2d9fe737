"""One trainer for pre-training, post-training and training on a task: deterministic on a CPU, safe to kill at any instant.

While it runs, everything lies in `scratch`: checkpoints, snapshots, the live metrics. The results appear in `output` when
the training is complete, its manifest last. Numbers of steps count completed optimizer steps, from 1, in all that is written.

Started by torchrun it runs in several processes, each with its share of every micro-batch (`farstate.training.distributed`): the
same training to float tolerance. The first writes all files, and whatever a process holds a share of is whole in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from farstate import params
from farstate.corpus.readers import Batch, Integers, OrderedStreams, ShuffledStreams, ShuffledWindows, rank_rows
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.files import MANIFEST, atomic_path, only_one, read_manifest, sha256_file, write_json, write_manifest
from farstate.grid import snapshot_file
from farstate.models.checkpoints import CONFIG, SAFETENSORS, load_with_origin, write_weights
from farstate.models.config import Config
from farstate.models.formats import Origin
from farstate.models.head import mean_nll
from farstate.models.language_model import LanguageModel
from farstate.numerics import NUMERICS
from farstate.ops.precision import flushed_denormals
from farstate.state import State
from farstate.training import distributed, initial_states
from farstate.training.checkpoints import (
    Checkpoint,
    clear,
    clear_parts,
    disk_errors,
    read_checkpoint,
    write_checkpoint,
)
from farstate.training.distributed import ALONE, Processes
from farstate.training.division import rows_of_batch
from farstate.training.progress import Progress, notice
from farstate.training.recipe import build_optimizer, clip_gradients, learning_rate, precision_context
from farstate.training.records import Ages, Metrics
from farstate.training.settings import RunSettings

METRICS = "metrics.jsonl"
AGES = "ages.parquet"
_SNAPSHOTS = "snapshots"

# Writing a checkpoint may take this share of the time.
_CHECKPOINT_SHARE = 0.05


class Batches(Protocol):
    """Where the sequences come from."""

    def batch(self, step: int, rows: Integers | None = None) -> Batch: ...


class FiniteBatches(Batches, Protocol):
    """Batches of which there are only so many."""

    @property
    def steps(self) -> int: ...


def pretrain(
    *,
    config: Config,
    context: int,
    tokens: int,
    seed: int,
    recipe: params.Recipe,
    store: TokenStore,
    output: Path,
    scratch: Path,
    snapshot_tokens: list[int],
    settings: RunSettings,
    key: str,
    manifest: dict[str, Any] | None = None,
    block_tokens: int | None = None,
) -> dict[str, Any]:
    """Train a model from random weights on shuffled windows, every sequence from the zero state.

    Writes `config.json`, `model.safetensors`, `metrics.jsonl`, one `snapshot_file(n)` for each n of `snapshot_tokens`,
    and, last, `manifest.json`. A call that finds the complete result of the same run does nothing; one
    that finds checkpoints of it in `scratch` goes on from there.

    Args:
        context: T_train in tokens.
        tokens: budget; training stops at the last whole batch within it.
        seed: of the initial weights and the data order.
        recipe: its peak learning rate is the one used.
        scratch: a folder of this run's own, on a disk that survives the process.
        snapshot_tokens: a snapshot is taken at the first step whose token count reaches n, or at the last step where the
            budget ends in a broken batch before n; its header records the exact count.
        key: names all that the result depends on, the token store included.
        manifest: what the manifest says besides stage, identity, steps, tokens and files.
        block_tokens: what is shuffled, a multiple of `context` (see `ShuffledWindows`); None: single windows.

    Returns:
        What was measured (seconds, tokens per second, device, threads …): provenance, no part of the result. Empty where
        the result was complete already.

    Raises:
        FarstateError: parameters that do not fit each other or the store, a loss or gradient that is not finite, a full disk,
            a second run in the same scratch, a stop by signal. The last checkpoint is kept, no result is written.
    """
    division = _divided(recipe, context, settings)
    steps = tokens // recipe.batch_tokens
    if steps < 1:
        raise FarstateError(f"pretrain.tokens: {tokens} is less than one batch of {recipe.batch_tokens}")
    if wrong := [n for n in snapshot_tokens if not 0 < n <= tokens]:
        raise FarstateError(f"a snapshot at {wrong[0]} tokens was asked of a training of {tokens}")
    _check_vocabulary(store, config, "models.*.shape")
    identity = _identity(
        stage="pretrain", key=key, config=config.model_dump(mode="json"), context=context, steps=steps, seed=seed,
        recipe=recipe.model_dump(mode="json"), snapshots=snapshot_tokens,
        **({} if block_tokens is None else {"block_tokens": block_tokens}),
    )  # fmt: skip
    with _only_run("pretrain", identity, output, scratch, settings, division) as device:
        if device is None:
            return {}
        model = LanguageModel(config, torch.Generator().manual_seed(seed), device=device)
        run = division.run(seed, context, model)
        job = _Job(
            stage="pretrain",
            identity=identity,
            model=model,
            batches=ShuffledWindows(store, "train", context, division.rows, seed, block_tokens),
            intervention=initial_states.ZeroInit(run),
            steps=steps,
            recipe=recipe,
            division=division,
            snapshots=snapshot_tokens,
            seed=seed,
            vocabulary_size=store.vocabulary_size,
        )
        return _train(job, output, scratch, settings, manifest or {})


def posttrain(
    *,
    checkpoint: Path,
    context: int,
    steps: int,
    seed: int,
    arm: params.Arm,
    stretch_tokens: int | None,
    recipe: params.Recipe,
    store: TokenStore,
    output: Path,
    scratch: Path,
    settings: RunSettings,
    key: str,
    manifest: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train the model in the folder `checkpoint` further, each sequence from the initial state that `arm` gives.

    Every arm reads the same windows: TBTT in reading order, all others in one shuffled order. The optimizer is fresh.
    Writes `config.json`, `model.safetensors`, `metrics.jsonl`, `ages.parquet` (step, age, sequences: how many sequences of the
    step began from a state of that age in tokens, null for noise) and, last, `manifest.json`.

    Args, Returns, Raises, resuming: as for `pretrain`; `seed` is that of the data order and of the arm's draws.
    """
    division = _divided(recipe, context, settings, arm)
    identity = _identity(
        stage="posttrain", key=key, context=context, steps=steps, seed=seed, arm=arm.model_dump(mode="json"),
        stretch_tokens=stretch_tokens, recipe=recipe.model_dump(mode="json"),
    )  # fmt: skip
    with _only_run("posttrain", identity, output, scratch, settings, division) as device:
        if device is None:
            return {}
        model, origin = load_with_origin(checkpoint, device=device)
        _check_vocabulary(store, model.config, str(checkpoint))
        streams = OrderedStreams(store, "train", context, division.rows, steps, seed, stretch_tokens)
        run = division.run(seed, context, model)
        job = _Job(
            stage="posttrain",
            identity=identity,
            model=model,
            batches=streams if isinstance(arm, params.Tbtt) else ShuffledStreams(streams, seed),
            intervention=initial_states.build(arm, run),
            steps=steps,
            recipe=recipe,
            division=division,
            snapshots=[],
            seed=seed,
            vocabulary_size=store.vocabulary_size,
            keeps_ages=True,
            origin=origin,
        )
        return _train(job, output, scratch, settings, manifest or {})


def tune(
    *,
    checkpoint: Path | None,
    config: Config | None,
    batches: FiniteBatches,
    vocabulary_size: int,
    context: int,
    seed: int,
    arm: params.Arm,
    recipe: params.Recipe,
    output: Path,
    scratch: Path,
    settings: RunSettings,
    key: str,
    manifest: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a model on all of `batches`, each sequence from the initial state that `arm` gives.

    Writes what `posttrain` writes.

    Args:
        checkpoint: the model to train further; None: `config` from random weights.
        batches: of `recipe.batch_tokens` tokens in rows of `context`; what decides them must be in `key`.
        vocabulary_size: symbols that its tokens come from.
        seed: of the arm's draws, and of random weights.

    Returns, Raises, resuming: as for `pretrain`.
    """
    division = _divided(recipe, context, settings, arm)
    identity = _identity(
        stage="tune", key=key, context=context, seed=seed, arm=arm.model_dump(mode="json"),
        steps=batches.steps, recipe=recipe.model_dump(mode="json"),
    )  # fmt: skip
    with _only_run("tune", identity, output, scratch, settings, division) as device:
        if device is None:
            return {}
        origin: Origin = {}
        if checkpoint is not None:
            model, origin = load_with_origin(checkpoint, device=device)
        else:
            assert config is not None
            model = LanguageModel(config, torch.Generator().manual_seed(seed), device=device)
        if vocabulary_size > model.config.vocabulary_size:
            raise FarstateError(
                f"{checkpoint}: knows {model.config.vocabulary_size} symbols, the examples use {vocabulary_size}; make them with the "
                "model's own tokenizer"
            )
        run = division.run(seed, context, model)
        job = _Job(
            stage="tune",
            identity=identity,
            model=model,
            batches=batches,
            intervention=initial_states.build(arm, run),
            steps=batches.steps,
            recipe=recipe,
            division=division,
            snapshots=[],
            seed=seed,
            vocabulary_size=vocabulary_size,
            keeps_ages=True,
            origin=origin,
        )
        return _train(job, output, scratch, settings, manifest or {})


@dataclass(frozen=True)
class _Division:
    """How the rows of a batch are divided among micro-batches and processes.

    Attributes:
        rows: of a whole batch.
        micro_batches: of the recipe.
        split: parts of each of those, for less memory.
        passes: states pass from micro-batch to micro-batch.
    """

    rows: int
    micro_batches: int
    split: int = 1
    passes: bool = False
    processes: Processes = ALONE

    @property
    def parts(self) -> int:
        return self.micro_batches * self.split

    @property
    def part(self) -> int:
        """Rows of a part on one process."""
        return self.rows // (self.parts * self.processes.world)

    @property
    def own_rows(self) -> Integers | None:
        """Those that this process reads; None for all."""
        if self.processes.world == 1:
            return None
        return rank_rows(self.rows, self.parts, self.processes.rank, self.processes.world)

    def run(self, seed: int, context: int, model: LanguageModel) -> initial_states.Run:
        return initial_states.Run(seed, self.rows, self.parts, context, model.zero_state, self.processes)


def _divided(recipe: params.Recipe, context: int, settings: RunSettings, arm: params.Arm | None = None) -> _Division:
    processes, split = distributed.current(), settings.split_micro_batches
    passes = isinstance(arm, params.StatePassing) and arm.previous == "micro_batch"
    rows = rows_of_batch(
        batch_tokens=recipe.batch_tokens, micro_batches=recipe.micro_batches, context=context, split=split,
        processes=processes.world, passes=passes,
    )  # fmt: skip
    return _Division(rows, recipe.micro_batches, split, passes, processes)


@dataclass(frozen=True)
class _Job:
    """A training, once everything it needs is open.

    Attributes:
        vocabulary_size: of the token store; a checkpoint's own may count padding as symbols.
        origin: where the weights came from, to be kept with the result.
    """

    stage: str
    identity: str
    model: LanguageModel
    batches: Batches
    intervention: initial_states.Intervention
    steps: int
    recipe: params.Recipe
    division: _Division
    snapshots: list[int]
    seed: int
    vocabulary_size: int
    keeps_ages: bool = False
    origin: Origin = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device

    def snapshots_due(self, step: int) -> list[int]:
        """Snapshots to take once `step` steps are done."""
        tokens = step * self.recipe.batch_tokens
        last = step == self.steps
        return [n for n in self.snapshots if tokens - self.recipe.batch_tokens < n and (n <= tokens or last)]


@dataclass(frozen=True)
class _Part:
    """This process's rows of a micro-batch: tokens (B, T + 1), weights (B, T) or None on the model's device, fresh (B,) on the CPU.

    `share`: of the whole batch's loss, by the weights.
    """

    tokens: Tensor
    fresh: Tensor
    weights: Tensor | None = None
    share: float = 1.0


class _Scored(nn.Module):
    """A model and its loss in one forward pass: what is shared out among processes."""

    def __init__(self, model: LanguageModel, vocabulary_size: int) -> None:
        super().__init__()
        self.model = model
        self.vocabulary_size = vocabulary_size

    def forward(self, tokens: Tensor, weights: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """tokens (B, T + 1), weights (B, T) → mean loss in nats per token, state after the segment."""
        hidden, final_state = self.model(tokens[:, :-1], state)
        loss = mean_nll(hidden, self.model.head_weight, tokens[:, 1:], weights, vocabulary_size=self.vocabulary_size)
        return loss, final_state


def _train(job: _Job, output: Path, scratch: Path, settings: RunSettings, manifest: dict[str, Any]) -> dict[str, Any]:
    recipe, model, processes = job.recipe, job.model, job.division.processes
    model.train()
    model.recomputes = settings.activation_checkpointing
    scored = distributed.shared_out(
        _Scored(model, job.vocabulary_size), list(model.backbone.layers), settings.mode, processes, job.device
    )
    optimizer = build_optimizer(model, recipe)
    done, spent, resumed, files = 0, 0.0, 0, dict[str, str]()
    checkpoint = read_checkpoint(scratch, job.identity, notice) if processes.first else None
    facts = processes.told(None if checkpoint is None else (checkpoint.step, checkpoint.facts))
    if facts is not None:
        done, spent, resumed = facts[0], facts[1]["seconds"], facts[1]["resumed"] + 1
        if processes.first:
            notice(f"{job.stage} goes on after step {done} of {job.steps} ({scratch})")
        _restore(job, optimizer, {} if checkpoint is None else checkpoint.tensors)
    kept = dict[str, Tensor]()
    if checkpoint is not None:
        files, kept = checkpoint.files, checkpoint.tensors
    ages = Ages(kept.get("ages"), processes) if job.keeps_ages else None
    step_of = _Step(job, optimizer, scored)

    with ExitStack() as stack:
        stack.enter_context(disk_errors(scratch, f"checkpoints are kept in {scratch}"))
        metrics = progress = None
        if processes.first:
            metrics = stack.enter_context(closing(Metrics(scratch / METRICS, recipe.batch_tokens, kept.get("metrics"))))
            progress = stack.enter_context(Progress(output.name, job.steps, recipe.batch_tokens, done))
        stop = stack.enter_context(_stop_requests(repeated=processes.world > 1))
        del checkpoint, kept
        began = last_write = time.monotonic()
        pause = settings.checkpoint_seconds
        for step in range(done, job.steps):
            loss, norm, rate = step_of(step, ages)
            done = step + 1
            if metrics is not None:
                metrics.add(loss, norm, rate)
            for due in job.snapshots_due(done):
                path = scratch / _SNAPSHOTS / snapshot_file(due)
                _write_weights(job, path, {}, done * recipe.batch_tokens)
                if processes.first:
                    files[f"{_SNAPSHOTS}/{path.name}"] = sha256_file(path)
            if progress is not None:
                progress.update(done, loss)
            if done == job.steps:
                break
            now = time.monotonic()
            counted = settings.checkpoint_steps is not None and done % settings.checkpoint_steps == 0
            # The first process's clock, but a signal that reached any: ranks must not disagree on what they do next.
            stopped, timed = processes.agreed(stop.requested, processes.first and now - last_write >= pause)
            if counted or stopped or timed:
                tensors = _tensors(job, optimizer)
                if metrics is not None:
                    tensors["metrics"] = metrics.tensor()
                if ages is not None:
                    tensors["ages"] = ages.tensor()
                if processes.first:
                    told: dict[str, Any] = {"seconds": spent + now - began, "resumed": resumed}
                    write_checkpoint(scratch, job.identity, Checkpoint(done, tensors, files, told))
                last_write = time.monotonic()
                pause = max(settings.checkpoint_seconds, (last_write - now) / _CHECKPOINT_SHARE)
            if stopped:
                raise FarstateError(
                    f"{job.stage} was stopped by {signal.Signals(stopped).name} after step {done} of {job.steps}; "
                    "run the same command again to go on"
                )
        spent += time.monotonic() - began

        _publish(job, metrics, ages, output, scratch, manifest)
    if processes.first:
        _clear_scratch(scratch)
    return {
        "seconds": round(spent, 3),
        "tokens": job.steps * recipe.batch_tokens,
        "tokens_per_second": round(job.steps * recipe.batch_tokens / max(spent, 1e-9), 1),
        "resumed": resumed,
        "seed": job.seed,
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "processes": processes.world,
        "mode": settings.mode if processes.world > 1 else None,
        "activation_checkpointing": settings.activation_checkpointing,
        "split_micro_batches": settings.split_micro_batches,
        "torch": str(torch.__version__),
    }


class _Step:
    """One optimizer step; called with its number from 0, it returns mean loss (nats per token), gradient norm, rate."""

    def __init__(self, job: _Job, optimizer: torch.optim.Optimizer, scored: nn.Module) -> None:
        self._job = job
        self._optimizer = optimizer
        self._scored = scored
        self._own_rows = job.division.own_rows
        self._parameters = list(job.model.parameters())

    def __call__(self, step: int, ages: Ages | None) -> tuple[float, float, float]:
        job, recipe = self._job, self._job.recipe
        rate = learning_rate(step, job.steps, recipe)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        given: list[Tensor] = []
        total = torch.zeros((), device=job.device)
        processes, last = job.division.processes, job.division.parts - 1
        for number, part in enumerate(self._parts(step)):
            state = job.intervention.initial(step, part, number)
            if ages is not None:
                given.append(job.intervention.ages())
            with distributed.accumulating(self._scored, number == last):
                with precision_context(recipe.precision, job.device):
                    loss, final_state = self._scored(part.tokens, part.weights, state)
                # Gradients are the mean over the processes, whose shares add up to the whole.
                (loss * (part.share * processes.world)).backward()
            job.intervention.observe(final_state, number)
            total = total + loss.detach() * part.share
        norm = clip_gradients(self._parameters, recipe.gradient_clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        # The one synchronisation of a step, after all its work is queued. Weights spoilt by a NaN are never written.
        mean, size = torch.stack((total.double(), norm.double())).tolist()
        mean = processes.summed(mean)
        if not (abs(mean) < float("inf") and abs(size) < float("inf")):
            raise FarstateError(
                f"{job.stage}: the loss is {mean} and the gradient's norm {size} in step {step + 1} of {job.steps} (learning rate {rate:.3g}); "
                f"lower {_recipe_key(job.stage)}.peak_learning_rate or gradient_clip, lengthen warmup"
                + (", or use precision: float32" if recipe.precision != "float32" else "")
                + "; no result was written"
            )
        if ages is not None:
            ages.add(step + 1, given)
        return mean, size, rate

    def _parts(self, step: int) -> Iterator[_Part]:
        job, own = self._job, self._own_rows
        batch = job.batches.batch(step) if own is None else job.batches.batch(step, own)
        total = None
        if batch.weights is not None:
            total = job.division.processes.summed(float(batch.weights.double().sum()))
        size = batch.tokens.shape[0] // job.division.parts
        for first in range(0, batch.tokens.shape[0], size):
            rows = slice(first, first + size)
            tokens = batch.tokens[rows].to(job.device, non_blocking=True)
            weights, share = None, 1.0 / (job.division.parts * job.division.processes.world)
            if batch.weights is not None and total is not None:
                weights = batch.weights[rows].to(job.device, non_blocking=True)
                share = float(batch.weights[rows].double().sum()) / total
            yield _Part(tokens, batch.fresh[rows], weights, share)


# Names of the checkpoint's tensors: model/<parameter>, optimizer/<slot>/<parameter>, intervention/<name>, metrics, ages.


def _tensors(job: _Job, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What a run goes on from, whole: called by all processes, complete on the first."""
    first = job.division.processes.first
    tensors: dict[str, Tensor] = {}
    for name, parameter in job.model.named_parameters():
        own = {f"model/{name}": parameter} | {f"optimizer/{slot}/{name}": t for slot, t in optimizer.state[parameter].items()}
        whole = _whole(own)
        if first:
            tensors |= whole
    return tensors | {f"intervention/{name}": value for name, value in job.intervention.state_dict().items()}


def _whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors put together where they are shared out, those on the CPU: one at a time is on the device."""
    return {name: whole if (whole := distributed.whole(t)) is t else whole.cpu() for name, t in tensors.items()}


@torch.no_grad()
def _restore(job: _Job, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Take back what `_tensors` gave the first process, on any number of them."""
    processes = job.division.processes
    kinds: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "intervention": {}}
    for full, value in tensors.items():
        kind, _, name = full.partition("/")
        if kind in kinds:
            kinds[kind][name] = value
    model, slotted, kept = (processes.received(kinds[kind]) for kind in kinds)
    parameters = dict(job.model.named_parameters())
    for name, value in model.items():
        parameters[name].copy_(distributed.placed_like(value, parameters[name]))
    numbers = {
        parameter: number for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    slots: dict[int, dict[str, Tensor]] = {number: {} for number in numbers.values()}
    for full, value in slotted.items():
        slot, _, name = full.partition("/")
        parameter = parameters[name]
        slots[numbers[parameter]][slot] = value if slot == "step" else distributed.placed_like(value, parameter)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
    job.intervention.load_state_dict(kept)


def _write_weights(job: _Job, path: Path, origin: Origin, tokens: int) -> None:
    """Write the weights with what they were trained on; called by all processes."""
    weights = _whole(dict(job.model.named_parameters()))
    if job.division.processes.first:
        write_weights(job.model, path, origin, weights, tokens=str(tokens))


def _publish(
    job: _Job, metrics: Metrics | None, ages: Ages | None, output: Path, scratch: Path, manifest: dict[str, Any]
) -> None:
    names = [CONFIG, SAFETENSORS, METRICS]
    tokens = job.steps * job.recipe.batch_tokens
    if metrics is not None:
        for due in job.snapshots:
            name = snapshot_file(due)
            _place(scratch / _SNAPSHOTS / name, output / name)
            names.append(name)
    _write_weights(job, output / SAFETENSORS, job.origin, tokens)
    age_rows = None if ages is None else ages.tensor()
    if metrics is None:  # the first process writes
        return
    write_json(output / CONFIG, job.model.config.model_dump(mode="json"))
    metrics.write(output / METRICS)
    if age_rows is not None:
        Ages.write(age_rows, output / AGES)
        names.append(AGES)
    contents = {**manifest, "stage": job.stage, "identity": job.identity, "steps": job.steps, "tokens": tokens}
    write_manifest(output, contents, names)


def _place(source: Path, target: Path) -> None:
    """Make `source` appear as `target`, whole; a link where the disk allows, so that large snapshots are not copied."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with atomic_path(target) as copy:
            shutil.copyfile(source, copy)


def _clear_scratch(scratch: Path) -> None:
    """Remove what a finished run leaves but the lock, which a waiting process may hold open."""
    clear(scratch)
    (scratch / METRICS).unlink(missing_ok=True)
    shutil.rmtree(scratch / _SNAPSHOTS, ignore_errors=True)


@contextmanager
def _only_run(
    stage: str, identity: str, output: Path, scratch: Path, settings: RunSettings, division: _Division
) -> Iterator[torch.device | None]:
    """Hold the run's lock and give its device, or None where the result is already there.

    Within, torch has the settings' threads, and numbers below the normal range are flushed: on a CPU they are slow, and slow
    decays underflow into them.
    """
    device = _device(settings)
    processes = division.processes
    with ExitStack() as stack:
        if processes.first:
            stack.enter_context(only_one(scratch / "lock", f"{stage} {output.name}"))
        if processes.told(processes.first and _is_finished(output, identity)):
            if processes.first:
                notice(f"{output}: already complete")
                _clear_scratch(scratch)
            yield None
            return
        if processes.first:
            output.mkdir(parents=True, exist_ok=True)
            (output / MANIFEST).unlink(missing_ok=True)
            for folder in (output, scratch, scratch / _SNAPSHOTS):
                clear_parts(folder)
        threads = torch.get_num_threads()
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        try:
            with flushed_denormals():
                yield device
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            raise FarstateError(_more_memory(stage, division, device, settings, str(error))) from error
        finally:
            torch.set_num_threads(threads)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or bool(
        re.search(r"DefaultCPUAllocator: (can't allocate|not enough) memory", str(error))
    )


def _more_memory(stage: str, division: _Division, device: torch.device, settings: RunSettings, cause: str) -> str:
    """What to do where memory does not hold a micro-batch, without changing the experiment."""
    where = "GPU's memory" if device.type == "cuda" else "memory"
    told = f"{stage}: the {where} does not hold {division.part} rows of a micro-batch"
    share = division.part * division.split
    splits = [n for n in range(division.split + 1, share + 1) if share % n == 0]
    remedies = []
    if division.passes:
        told += "; states pass from micro-batch to micro-batch here (`previous: micro_batch`), so a smaller one would be another experiment"
    elif splits:
        remedies.append(f"--config 'settings={{split_micro_batches: {splits[0]}}}'")
    if not settings.activation_checkpointing:
        remedies.append("--config 'settings={distributed: {activation_checkpointing: true}}'")
    remedies.append("more processes (settings.distributed.processes, mode: fsdp)")
    detail = cause.strip().splitlines()[0][:200] if cause.strip() else "MemoryError"
    return f"{told}; use {', or '.join(remedies)}: the same numbers to float32 tolerance, from the last checkpoint on ({detail})"


def _is_finished(output: Path, identity: str) -> bool:
    try:
        return bool(read_manifest(output, verify=True).get("identity") == identity)
    except FarstateError:
        return False


def _device(settings: RunSettings) -> torch.device:
    if settings.device == "cpu" or (settings.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise FarstateError("settings.device: 'cuda' was asked for, but torch finds no GPU; use 'auto' or 'cpu'")
    return distributed.local_gpu()


class _Stop:
    """The number of the signal that asked the run to stop, or 0."""

    requested = 0


@contextmanager
def _stop_requests(repeated: bool) -> Iterator[_Stop]:
    """Let SIGTERM (a cluster's time limit) and Ctrl-C end the run after the current step; a second one acts at once.

    `repeated`: a signal may come twice, from the cluster and from torchrun, which kills by itself in the end; more of them
    change nothing.
    """
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        stop.requested = number
        if not repeated:
            restore()

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()


def _recipe_key(stage: str) -> str:
    """Where the parameters say how a stage trains."""
    return "tasks.*.training.recipe" if stage == "tune" else f"{stage}.recipe"


def _check_vocabulary(store: TokenStore, config: Config, where: str) -> None:
    if store.vocabulary_size > config.vocabulary_size:
        raise FarstateError(
            f"{where}: knows {config.vocabulary_size} symbols, the token store uses {store.vocabulary_size}; make the store with the model's own tokenizer"
        )


def _identity(**values: Any) -> str:
    """Hash of all that decides a run's numbers."""
    values["numerics"] = {module: NUMERICS[module] for module in ("corpus", "ops", "models", "training")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
