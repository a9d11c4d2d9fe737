"""Training on a task: the loss of chosen tokens only, from any initial state; what happens to the process changes nothing."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file

from farstate import params
from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.models.checkpoints import load_model, save_model
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.task_plan import EXAMPLES
from farstate.tasks.copying import Copying
from farstate.tasks.examples import Examples, write_examples
from farstate.tasks.rows import TaskRows
from farstate.training import checkpoints, trainer
from farstate.training.settings import RunSettings

CONTEXT, ROWS = 20, 8
MAKER = Copying("abcdef", seed=1, split="train", training_lengths=(2, 8))
CONFIG = Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=len(MAKER.vocabulary))
RECIPE = params.Recipe(batch_tokens=ROWS * CONTEXT, peak_learning_rate=1e-2)
PASSING = {"initial_state": "state_passing", "reset_probability": 0.3}


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    path = tmp_path_factory.mktemp("data") / EXAMPLES
    write_examples((MAKER.training(number) for number in range(70)), path)
    return Examples(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_model(LanguageModel(CONFIG, torch.Generator().manual_seed(5)), folder)
    return folder


def rows_of(examples: Examples, packing: Any = "one_per_row", rest_weight: float = 0.0) -> TaskRows:
    return TaskRows(examples, CONTEXT, ROWS, 3, packing, rest_weight)


def tune(batches: Any, root: Path, arm: dict[str, Any] | None = None, **changed: Any) -> list[dict[str, Any]]:
    """Train, and return the metrics."""
    given = {
        "checkpoint": None,
        "config": CONFIG,
        "batches": batches,
        "vocabulary_size": CONFIG.vocabulary_size,
        "context": CONTEXT,
        "seed": 2,
        "arm": TypeAdapter(params.Arm).validate_python(arm or {"initial_state": "zero"}),
        "recipe": RECIPE,
        "output": root / "output",
        "scratch": root / "scratch",
        "settings": RunSettings(device="cpu", threads=1, checkpoint_steps=2),
        "key": "0123",
    }
    trainer.tune(**(given | changed))
    return [json.loads(line) for line in (root / "output" / "metrics.jsonl").read_text().splitlines()]


def weights(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "output" / "model.safetensors")


@pytest.mark.parametrize("packing", ["one_per_row", "packed"])
def test_it_is_the_plain_loop_over_the_answers(examples: Examples, base: Path, tmp_path: Path, packing: Any) -> None:
    """torch's own cross entropy of the answers' tokens, picked one by one from the text, and its own optimizer."""
    batches = rows_of(examples, packing)
    recorded = tune(batches, tmp_path, {"initial_state": "state_passing", "reset_probability": 0.0}, checkpoint=base)
    assert len(recorded) == batches.steps > 2
    model = load_model(base)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    state = None
    for step, row in enumerate(recorded):
        tokens = batches.batch(step).tokens
        hidden, state = model(tokens[:, :-1], state)
        state = state.detach()
        logits = (hidden @ model.head_weight.T)[..., : CONFIG.vocabulary_size]
        losses = []
        for line, told in zip(logits, tokens, strict=True):
            inside = False
            for place in range(CONTEXT):
                symbol = MAKER.vocabulary.symbols[told[place]]
                inside = symbol == "|" or (inside and symbol not in (".", "$", ""))
                if inside:
                    losses.append(torch.nn.functional.cross_entropy(line[place], told[place + 1]))
        loss = torch.stack(losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = row["learning_rate"]
        optimizer.step()
        optimizer.zero_grad()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-4)
    trained = weights(tmp_path)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("packing", ["one_per_row", "packed"])
def test_micro_batches_of_unequal_weight_are_one_batch(examples: Examples, base: Path, tmp_path: Path, packing: Any) -> None:
    """Answers differ in length, so that a mean of the parts' means would be another loss."""
    batches = rows_of(examples, packing)
    sizes = batches.batch(0).weights
    assert sizes is not None
    assert sizes[:4].sum() != sizes[4:].sum()
    whole = tune(batches, tmp_path / "whole", PASSING, checkpoint=base)
    parts = tune(batches, tmp_path / "parts", PASSING, checkpoint=base, recipe=RECIPE.model_copy(update={"micro_batches": 4}))
    for one, other in zip(whole, parts, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)


def test_padding_and_prompt_do_not_enter_the_loss(examples: Examples, base: Path, tmp_path: Path) -> None:
    """The first loss is the same whatever stands behind the answers; with a weight on the rest it is another."""

    class Refilled:
        def __init__(self, batches: TaskRows) -> None:
            self._batches = batches
            self.steps = 1

        def batch(self, step: int) -> Any:
            batch = self._batches.batch(step)
            batch.tokens[batch.tokens == 0] = 3
            return batch

    plain = tune(rows_of(examples), tmp_path / "plain", checkpoint=base)[0]["loss"]
    refilled = tune(Refilled(rows_of(examples)), tmp_path / "refilled", checkpoint=base)[0]["loss"]
    assert refilled == pytest.approx(plain, rel=1e-6)
    assert tune(rows_of(examples, rest_weight=0.5), tmp_path / "rest", checkpoint=base)[0]["loss"] != pytest.approx(
        plain, rel=1e-4
    )


def test_from_random_weights_it_learns(tmp_path: Path) -> None:
    maker = Copying("abcd", seed=1, split="train", training_lengths=(1, 2))
    path = tmp_path / EXAMPLES
    write_examples((maker.training(number) for number in range(3200)), path)
    config = Mamba2Config(width=32, layers=2, state_size=16, head_size=16, vocabulary_size=len(maker.vocabulary))
    recipe = params.Recipe(batch_tokens=32 * 8, peak_learning_rate=1e-2)
    found = tune(TaskRows(Examples(path), 8, 32, 0, "one_per_row", 0.0), tmp_path, config=config, context=8, recipe=recipe,
                 vocabulary_size=config.vocabulary_size)  # fmt: skip
    assert found[0]["loss"] > 0.9 * math.log(len(maker.vocabulary))
    assert found[-1]["loss"] < 0.5, "a guess among the letters costs 0.84 nats"
    manifest = read_manifest(tmp_path / "output", verify=True)
    assert manifest["stage"] == "tune"
    assert manifest["steps"] == 100
    assert (tmp_path / "output" / "ages.parquet").exists()


def test_the_arm_decides_the_initial_states_only(examples: Examples, base: Path, tmp_path: Path) -> None:
    losses = {
        name: tune(rows_of(examples), tmp_path / name, arm, checkpoint=base)
        for name, arm in (
            ("zero", {"initial_state": "zero"}),
            ("reset", {"initial_state": "state_passing", "reset_probability": 1.0}),
            ("passing", PASSING),
            ("fitted", {"initial_state": "fitted_noise"}),
        )
    }
    assert losses["zero"] == losses["reset"], "the control is state passing that always resets"
    assert len({rows[0]["loss"] for rows in losses.values()}) == 1
    assert len({rows[-1]["loss"] for rows in losses.values()}) == 3


def test_killed_and_resumed(examples: Examples, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that kills itself after its third checkpoint; the next call ends with the bits of an undisturbed run."""
    undisturbed = tune(rows_of(examples), tmp_path / "whole", PASSING, checkpoint=base)
    child = os.fork()
    if child == 0:
        write = checkpoints.write_checkpoint
        count = 0

        def dying(*given: Any) -> None:
            nonlocal count
            write(*given)
            count += 1
            if count == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.write_checkpoint = dying  # type: ignore[assignment]
        tune(rows_of(examples), tmp_path / "killed", PASSING, checkpoint=base)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert not (tmp_path / "killed" / "output" / "manifest.json").exists()
    assert tune(rows_of(examples), tmp_path / "killed", PASSING, checkpoint=base) == undisturbed
    mine, other = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_examples_of_another_tokenizer_are_refused(examples: Examples, base: Path, tmp_path: Path) -> None:
    with pytest.raises(FarstateError, match="make them with the model's own tokenizer"):
        tune(rows_of(examples), tmp_path, checkpoint=base, vocabulary_size=400)
    with pytest.raises(FarstateError, match=r"lower tasks\.\*\.training\.recipe\.peak_learning_rate"):
        tune(
            rows_of(examples),
            tmp_path / "b",
            recipe=RECIPE.model_copy(update={"peak_learning_rate": 1e30, "gradient_clip": 1e30}),
        )
