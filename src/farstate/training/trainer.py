"""One trainer for pre-training, post-training and training on a task: deterministic on a CPU, safe to kill at any instant.

While it runs, everything lies in `scratch`: checkpoints, snapshots, the live metrics. The results appear in `output` when
the training is complete, its manifest last. Numbers of steps count completed optimizer steps, from 1, in all that is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from farstate import params
from farstate.corpus.readers import Batch, OrderedStreams, ShuffledStreams, ShuffledWindows
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
from farstate.training import initial_states
from farstate.training.checkpoints import (
    Checkpoint,
    clear,
    clear_parts,
    disk_errors,
    read_checkpoint,
    write_checkpoint,
)
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

    def batch(self, step: int) -> Batch: ...


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

    Returns:
        What was measured (seconds, tokens per second, device, threads …): provenance, no part of the result. Empty where
        the result was complete already.

    Raises:
        FarstateError: parameters that do not fit each other or the store, a loss or gradient that is not finite, a full disk,
            a second run in the same scratch, a stop by signal. The last checkpoint is kept, no result is written.
    """
    rows = _rows(recipe, context)
    steps = tokens // recipe.batch_tokens
    if steps < 1:
        raise FarstateError(f"pretrain.tokens: {tokens} is less than one batch of {recipe.batch_tokens}")
    if wrong := [n for n in snapshot_tokens if not 0 < n <= tokens]:
        raise FarstateError(f"a snapshot at {wrong[0]} tokens was asked of a training of {tokens}")
    _check_vocabulary(store, config, "models.*.shape")
    identity = _identity(
        stage="pretrain", key=key, config=config.model_dump(mode="json"), context=context, steps=steps, seed=seed,
        recipe=recipe.model_dump(mode="json"), snapshots=snapshot_tokens,
    )  # fmt: skip
    with _only_run("pretrain", identity, output, scratch, settings) as device:
        if device is None:
            return {}
        model = LanguageModel(config, torch.Generator().manual_seed(seed), device=device)
        run = initial_states.Run(seed, rows, recipe.micro_batches, context, model.zero_state)
        job = _Job(
            stage="pretrain",
            identity=identity,
            model=model,
            batches=ShuffledWindows(store, "train", context, rows, seed),
            intervention=initial_states.ZeroInit(params.ZeroInit(initial_state="zero"), run),
            steps=steps,
            recipe=recipe,
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
    rows = _rows(recipe, context)
    identity = _identity(
        stage="posttrain", key=key, context=context, steps=steps, seed=seed, arm=arm.model_dump(mode="json"),
        stretch_tokens=stretch_tokens, recipe=recipe.model_dump(mode="json"),
    )  # fmt: skip
    with _only_run("posttrain", identity, output, scratch, settings) as device:
        if device is None:
            return {}
        model, origin = load_with_origin(checkpoint, device=device)
        _check_vocabulary(store, model.config, str(checkpoint))
        streams = OrderedStreams(store, "train", context, rows, steps, seed, stretch_tokens)
        run = initial_states.Run(seed, rows, recipe.micro_batches, context, model.zero_state)
        job = _Job(
            stage="posttrain",
            identity=identity,
            model=model,
            batches=streams if isinstance(arm, params.Tbtt) else ShuffledStreams(streams, seed),
            intervention=initial_states.build(arm, run),
            steps=steps,
            recipe=recipe,
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
    rows = _rows(recipe, context)
    identity = _identity(
        stage="tune", key=key, context=context, seed=seed, arm=arm.model_dump(mode="json"),
        steps=batches.steps, recipe=recipe.model_dump(mode="json"),
    )  # fmt: skip
    with _only_run("tune", identity, output, scratch, settings) as device:
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
        run = initial_states.Run(seed, rows, recipe.micro_batches, context, model.zero_state)
        job = _Job(
            stage="tune",
            identity=identity,
            model=model,
            batches=batches,
            intervention=initial_states.build(arm, run),
            steps=batches.steps,
            recipe=recipe,
            snapshots=[],
            seed=seed,
            vocabulary_size=vocabulary_size,
            keeps_ages=True,
            origin=origin,
        )
        return _train(job, output, scratch, settings, manifest or {})


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
    """A micro-batch: tokens (B, T + 1) and weights (B, T) or None on the model's device, fresh (B,) on the CPU.

    `share`: of the batch's loss, by the weights.
    """

    tokens: Tensor
    fresh: Tensor
    weights: Tensor | None = None
    share: float = 1.0


def _train(job: _Job, output: Path, scratch: Path, settings: RunSettings, manifest: dict[str, Any]) -> dict[str, Any]:
    recipe, model = job.recipe, job.model
    model.train()
    optimizer = build_optimizer(model, recipe)
    done, spent, resumed, files = 0, 0.0, 0, dict[str, str]()
    metric_rows, age_rows = None, None
    if (checkpoint := read_checkpoint(scratch, job.identity, notice)) is not None:
        notice(f"{job.stage} goes on after step {checkpoint.step} of {job.steps} ({scratch})")
        _restore(job, optimizer, checkpoint.tensors)
        done, spent, resumed = checkpoint.step, checkpoint.facts["seconds"], checkpoint.facts["resumed"] + 1
        files = checkpoint.files
        metric_rows, age_rows = checkpoint.tensors["metrics"], checkpoint.tensors.get("ages")
    ages = Ages(age_rows) if job.keeps_ages else None
    step_of = _Step(job, optimizer)
    kept = f"checkpoints are kept in {scratch}"

    with (
        disk_errors(scratch, kept),
        closing(Metrics(scratch / METRICS, recipe.batch_tokens, metric_rows)) as metrics,
        Progress(output.name, job.steps, recipe.batch_tokens, done) as progress,
        _stop_requests() as stop,
    ):
        began = last_write = time.monotonic()
        pause = settings.checkpoint_seconds
        for step in range(done, job.steps):
            loss, norm, rate = step_of(step, ages)
            done = step + 1
            metrics.add(loss, norm, rate)
            for due in job.snapshots_due(done):
                path = scratch / _SNAPSHOTS / snapshot_file(due)
                write_weights(model, path, tokens=str(done * recipe.batch_tokens))
                files[f"{_SNAPSHOTS}/{path.name}"] = sha256_file(path)
            progress.update(done, loss)
            if done == job.steps:
                break
            now = time.monotonic()
            counted = settings.checkpoint_steps is not None and done % settings.checkpoint_steps == 0
            if counted or stop.requested or now - last_write >= pause:
                tensors = _tensors(job, optimizer) | {"metrics": metrics.tensor()}
                if ages is not None:
                    tensors["ages"] = ages.tensor()
                told: dict[str, Any] = {"seconds": spent + now - began, "resumed": resumed}
                write_checkpoint(scratch, job.identity, Checkpoint(done, tensors, files, told))
                last_write = time.monotonic()
                pause = max(settings.checkpoint_seconds, (last_write - now) / _CHECKPOINT_SHARE)
            if stop.requested:
                raise FarstateError(
                    f"{job.stage} was stopped by {stop.requested} after step {done} of {job.steps}; run the same command again to go on"
                )
        spent += time.monotonic() - began

        _publish(job, metrics, ages, output, scratch, manifest)
    _clear_scratch(scratch)
    return {
        "seconds": round(spent, 3),
        "tokens": job.steps * recipe.batch_tokens,
        "tokens_per_second": round(job.steps * recipe.batch_tokens / max(spent, 1e-9), 1),
        "resumed": resumed,
        "seed": job.seed,
        "device": torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


class _Step:
    """One optimizer step; called with its number from 0, it returns mean loss (nats per token), gradient norm, rate."""

    def __init__(self, job: _Job, optimizer: torch.optim.Optimizer) -> None:
        self._job = job
        self._optimizer = optimizer
        self._parameters = list(job.model.parameters())

    def __call__(self, step: int, ages: Ages | None) -> tuple[float, float, float]:
        job, recipe = self._job, self._job.recipe
        rate = learning_rate(step, job.steps, recipe)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        given: list[Tensor] = []
        total = torch.zeros((), device=job.device)
        for number, part in enumerate(self._parts(job.batches.batch(step))):
            state = job.intervention.initial(step, part, number)
            if ages is not None:
                given.append(job.intervention.ages())
            with precision_context(recipe.precision, job.device):
                hidden, final_state = job.model(part.tokens[:, :-1], state)
                loss = mean_nll(
                    hidden, job.model.head_weight, part.tokens[:, 1:], part.weights, vocabulary_size=job.vocabulary_size
                )
            (loss * part.share).backward()
            job.intervention.observe(final_state, number)
            total = total + loss.detach() * part.share
        norm = clip_gradients(self._parameters, recipe.gradient_clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        # The one synchronisation of a step, after all its work is queued. Weights spoilt by a NaN are never written.
        mean, size = torch.stack((total.double(), norm.double())).tolist()
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

    def _parts(self, batch: Batch) -> Iterator[_Part]:
        size = batch.tokens.shape[0] // self._job.recipe.micro_batches
        for first in range(0, batch.tokens.shape[0], size):
            rows = slice(first, first + size)
            tokens = batch.tokens[rows].to(self._job.device, non_blocking=True)
            weights, share = None, 1.0 / self._job.recipe.micro_batches
            if batch.weights is not None:
                weights = batch.weights[rows].to(self._job.device, non_blocking=True)
                share = float(batch.weights[rows].double().sum() / batch.weights.double().sum())
            yield _Part(tokens, batch.fresh[rows], weights, share)


# Names of the checkpoint's tensors: model/<parameter>, optimizer/<slot>/<parameter>, intervention/<name>, metrics, ages.


def _tensors(job: _Job, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in job.model.named_parameters():
        tensors[f"model/{name}"] = parameter
        tensors |= {f"optimizer/{slot}/{name}": value for slot, value in optimizer.state[parameter].items()}
    return tensors | {f"intervention/{name}": value for name, value in job.intervention.state_dict().items()}


@torch.no_grad()
def _restore(job: _Job, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(job.model.named_parameters())
    numbers = {
        parameter: number for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    slots: dict[int, dict[str, Tensor]] = {number: {} for number in numbers.values()}
    kept: dict[str, Tensor] = {}
    for full, value in tensors.items():
        kind, _, name = full.partition("/")
        if kind == "model":
            parameters[name].copy_(value)
        elif kind == "optimizer":
            slot, _, name = name.partition("/")
            slots[numbers[parameters[name]]][slot] = value
        elif kind == "intervention":
            kept[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})
    job.intervention.load_state_dict(kept)


def _publish(job: _Job, metrics: Metrics, ages: Ages | None, output: Path, scratch: Path, manifest: dict[str, Any]) -> None:
    names = [CONFIG, SAFETENSORS, METRICS]
    for due in job.snapshots:
        name = snapshot_file(due)
        _place(scratch / _SNAPSHOTS / name, output / name)
        names.append(name)
    tokens = job.steps * job.recipe.batch_tokens
    write_weights(job.model, output / SAFETENSORS, job.origin, tokens=str(tokens))
    write_json(output / CONFIG, job.model.config.model_dump(mode="json"))
    metrics.write(output / METRICS)
    if ages is not None:
        ages.write(output / AGES)
        names.append(AGES)
    contents = {
        **manifest,
        "stage": job.stage,
        "identity": job.identity,
        "steps": job.steps,
        "tokens": job.steps * job.recipe.batch_tokens,
    }
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
def _only_run(stage: str, identity: str, output: Path, scratch: Path, settings: RunSettings) -> Iterator[torch.device | None]:
    """Hold the run's lock and give its device, or None where the result is already there.

    Within, torch has the settings' threads, and numbers below the normal range are flushed: on a CPU they are slow, and slow
    decays underflow into them.
    """
    device = _device(settings)
    with only_one(scratch / "lock", f"{stage} {output.name}"):
        if _is_finished(output, identity):
            notice(f"{output}: already complete")
            _clear_scratch(scratch)
            yield None
            return
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
        except torch.OutOfMemoryError as error:
            raise FarstateError(
                f"{stage}: the GPU's memory does not hold a micro-batch; raise {_recipe_key(stage)}.micro_batches ({str(error).splitlines()[0]})"
            ) from error
        finally:
            torch.set_num_threads(threads)


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
    return torch.device("cuda", torch.cuda.current_device())


class _Stop:
    """The name of the signal that asked the run to stop, or empty."""

    requested = ""


@contextmanager
def _stop_requests() -> Iterator[_Stop]:
    """Let SIGTERM (a cluster's time limit) and Ctrl-C end the run after the current step; a second one acts at once."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        stop.requested = signal.Signals(number).name
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


def _rows(recipe: params.Recipe, context: int) -> int:
    part = context * recipe.micro_batches
    if recipe.batch_tokens % part:
        raise FarstateError(f"recipe.batch_tokens: {recipe.batch_tokens} is not a multiple of context × micro_batches = {part}")
    return recipe.batch_tokens // context


def _check_vocabulary(store: TokenStore, config: Config, where: str) -> None:
    if store.vocabulary_size > config.vocabulary_size:
        raise FarstateError(
            f"{where}: knows {config.vocabulary_size} symbols, the token store uses {store.vocabulary_size}; make the store with the model's own tokenizer"
        )


def _identity(**values: Any) -> str:
    """Hash of all that decides a run's numbers."""
    values["numerics"] = {module: NUMERICS[module] for module in ("corpus", "ops", "models", "training")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
