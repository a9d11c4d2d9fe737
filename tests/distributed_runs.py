"""Trainings that `test_distributed.py` runs in one process and, through torchrun, in two.

    torchrun --standalone --nproc-per-node 2 tests/distributed_runs.py FOLDER CASE[@ROOT][!]…

FOLDER holds `store`, `base` and `hybrid` (models) and `examples`. What a case writes lies in FOLDER/ROOT/CASE, ROOT by default the number
of processes. `!` leaves it in step 5, after a checkpoint in step 4. With the environment variable DIES the last process kills itself
in that step of the first case.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from farstate import params
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.models.mamba2.shape import Mamba2Config
from farstate.tasks.copying import Copying
from farstate.tasks.examples import Examples
from farstate.tasks.rows import TaskRows
from farstate.training import distributed, trainer
from farstate.training.recipe import clip_gradients
from farstate.training.settings import RunSettings

CONTEXT, ROWS, STEPS, VOCABULARY = 8, 8, 6, 23
SIZES: dict[str, Any] = {"width": 16, "layers": 2, "state_size": 8, "head_size": 8, "vocabulary_size": VOCABULARY}
CONFIG = Mamba2Config(**SIZES, dt_min=0.01, dt_max=0.2)
RECIPE = params.Recipe(batch_tokens=ROWS * CONTEXT, micro_batches=2, peak_learning_rate=1e-2)
MAKER = Copying("abcdef", seed=1, split="train", training_lengths=(2, 8))
EXAMPLE_CONTEXT = 20

ARMS: dict[str, dict[str, Any]] = {
    "zero": {"initial_state": "zero"},
    "random_noise": {"initial_state": "random_noise", "sigma": 0.5},
    "fitted_noise": {"initial_state": "fitted_noise"},
    "state_passing": {"initial_state": "state_passing", "reset_probability": 0.3},
    "micro_batch": {"initial_state": "state_passing", "reset_probability": 0.3, "previous": "micro_batch"},
    "reset_batch": {"initial_state": "state_passing", "reset_probability": 0.3, "reset_unit": "batch", "previous": "micro_batch"},
    "tbtt": {"initial_state": "tbtt"},
    "gaussian": {"initial_state": "gaussian", "scope": "head", "reset_probability": 0.3},
    "permuted": {"initial_state": "permuted", "reset_probability": 0.3},
}


def settings(**changed: Any) -> RunSettings:
    return RunSettings(**({"device": "cpu", "threads": 1, "checkpoint_steps": 2} | changed))


def pretrain(folder: Path, root: Path, **where: Any) -> dict[str, Any]:
    return trainer.pretrain(
        config=CONFIG, context=CONTEXT, tokens=STEPS * ROWS * CONTEXT, seed=1, recipe=RECIPE, store=TokenStore(folder / "store"),
        output=root / "output", scratch=root / "scratch", snapshot_tokens=[100, 300], settings=settings(**where), key="0123",
    )  # fmt: skip


def posttrain(
    folder: Path, root: Path, arm: str, base: str = "base", recipe: dict[str, Any] | None = None, **where: Any
) -> dict[str, Any]:
    return trainer.posttrain(
        checkpoint=folder / base, context=CONTEXT, steps=STEPS, seed=2, arm=TypeAdapter(params.Arm).validate_python(ARMS[arm]),
        stretch_tokens=None, recipe=RECIPE.model_copy(update=recipe or {}), store=TokenStore(folder / "store"),
        output=root / "output", scratch=root / "scratch", settings=settings(**where), key="0123",
    )  # fmt: skip


def tune(folder: Path, root: Path, **where: Any) -> dict[str, Any]:
    """Rows have answers of different lengths, so that processes have different shares of the loss."""
    batches = TaskRows(Examples(folder / "examples"), EXAMPLE_CONTEXT, ROWS, 3, "one_per_row", 0.0)
    return trainer.tune(
        checkpoint=None, config=Mamba2Config(**(SIZES | {"vocabulary_size": len(MAKER.vocabulary)})), batches=batches,
        vocabulary_size=len(MAKER.vocabulary), context=EXAMPLE_CONTEXT, seed=2,
        arm=TypeAdapter(params.Arm).validate_python(ARMS["state_passing"]),
        recipe=RECIPE.model_copy(update={"batch_tokens": ROWS * EXAMPLE_CONTEXT}),
        output=root / "output", scratch=root / "scratch", settings=settings(**where), key="0123",
    )  # fmt: skip


@contextmanager
def in_float64() -> Iterator[None]:
    """Have the trainer compute in float64, where differences are mistakes."""
    load, model = trainer.load_with_origin, trainer.LanguageModel
    trainer.load_with_origin = functools.partial(load, dtype=torch.float64)
    trainer.LanguageModel = functools.partial(model, dtype=torch.float64)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        trainer.load_with_origin, trainer.LanguageModel = load, model  # type: ignore[misc]


def mixed(folder: Path, root: Path) -> dict[str, Any]:
    """In bf16-mixed; tells the dtypes of what checkpoints hold."""
    dtypes: dict[str, str] = {}
    write = trainer.write_checkpoint

    def written(scratch: Path, identity: str, checkpoint: Any) -> None:
        dtypes.update({name: str(tensor.dtype) for name, tensor in checkpoint.tensors.items()})
        write(scratch, identity, checkpoint)

    trainer.write_checkpoint = written
    facts = posttrain(folder, root, "state_passing", recipe={"precision": "bf16-mixed"})
    trainer.write_checkpoint = write
    return facts | {"dtypes": dtypes}


Case = Callable[[Path, Path], dict[str, Any]]


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {f"ddp-{arm}": functools.partial(posttrain, arm=arm) for arm in ARMS}
    for arm in ("state_passing", "micro_batch"):
        cases[f"fsdp-{arm}"] = functools.partial(posttrain, arm=arm, mode="fsdp")
    cases["fsdp-recomputed"] = functools.partial(posttrain, arm="state_passing", mode="fsdp", activation_checkpointing=True)
    cases["ddp-split"] = functools.partial(posttrain, arm="state_passing", split_micro_batches=2)
    cases["ddp-hybrid"] = functools.partial(posttrain, arm="state_passing", base="hybrid")
    cases["fsdp-pretrain"] = functools.partial(pretrain, mode="fsdp")
    cases["ddp-tune"] = tune
    cases["ddp-bf16"] = mixed
    cases["fsdp-float32"] = functools.partial(posttrain, arm="state_passing", mode="fsdp")
    cases["fsdp-tune"] = functools.partial(tune, mode="fsdp")
    return cases


CASES = _cases()


class Left(Exception):
    """A training was left, by all processes in the same place."""


def leave() -> None:
    raise Left


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_step(number: int, what: Callable[[], None]) -> None:
    """Have the trainer do `what` in its `number`th step from now."""
    calls = iter(range(1, 1_000_000))

    def changed(*given: Any) -> Any:
        if next(calls) == number:
            what()
        return clip_gradients(*given)

    trainer.clip_gradients = changed


def run(folder: Path, *cases: str) -> dict[str, Any]:
    """What the trainer told of each case, CASE[@ROOT][!]; nothing of those that were left."""
    facts = {}
    for given in cases:
        name, _, root = given.removesuffix("!").partition("@")
        path = folder / (root or str(distributed.current().world)) / name
        if given.endswith("!"):
            in_step(5, leave)
        with nullcontext() if name.endswith(("-bf16", "-float32")) else in_float64():
            try:
                facts[given] = CASES[name](folder, path)
            except Left:
                trainer.clip_gradients = clip_gradients
    return facts


def main() -> None:
    torch.set_num_threads(1)
    with distributed.launched(lambda: None) as processes:
        if processes.rank == processes.world - 1 and "DIES" in os.environ:
            in_step(int(os.environ["DIES"]), die)
        facts = run(Path(sys.argv[1]), *sys.argv[2:])
        if processes.first:
            print(json.dumps(facts))


if __name__ == "__main__":
    try:
        main()
    except FarstateError as error:
        sys.exit(f"farstate: {error}")
