"""The trainer: the recipe's numbers, what it writes, and that nothing that happens to the process changes either.

Killed runs are real: a forked child sends itself SIGKILL at the chosen place.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from farstate import params
from farstate.corpus.readers import OrderedStreams, ShuffledStreams
from farstate.corpus.store import TokenStore, write_store
from farstate.corpus.tokens import INDEX, INDEX_SCHEMA, TOKENS
from farstate.errors import FarstateError
from farstate.files import atomic_path, only_one, read_manifest, write_manifest
from farstate.grid import snapshot_file
from farstate.models.checkpoints import load_model, save_model
from farstate.models.head import token_nll
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config
from farstate.training import checkpoints, initial_states, trainer
from farstate.training.recipe import clip_gradients, learning_rate, warmup_steps
from farstate.training.settings import RunSettings
from golden import check, ramp

VOCABULARY, CONTEXT, ROWS = 23, 8, 8
CONFIG = Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=VOCABULARY, dt_min=0.01, dt_max=0.2)
RECIPE = params.Recipe(batch_tokens=ROWS * CONTEXT, peak_learning_rate=1e-2)
SETTINGS = RunSettings(device="cpu", threads=1, checkpoint_steps=3)
PASSING = {"initial_state": "state_passing", "reset_probability": 0.3}
STEPS = 10
PRETRAIN_FILES = ["config.json", "manifest.json", "metrics.jsonl", "model.safetensors", snapshot_file(100), snapshot_file(500)]
POSTTRAIN_FILES = ["ages.parquet", "config.json", "manifest.json", "metrics.jsonl", "model.safetensors"]


def text(length: int, phase: int) -> np.ndarray:
    return ((np.arange(length, dtype=np.int64) + phase) ** 2 * 7 + np.arange(length) // 3) % VOCABULARY


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory) -> Path:
    """Twelve training documents of 60 … 390 tokens, written as `write_tokens` would."""
    root = tmp_path_factory.mktemp("store")
    (root / "shard").mkdir()
    documents = [text(60 + 30 * number, number) for number in range(12)]
    offsets = np.cumsum([0] + [len(document) for document in documents[:-1]])
    rows = [
        {"id": f"{number:064x}", "split": "train", "source": "made", "title": str(number), "pile_set_name": None}
        | {"bytes": len(document), "offset": int(offset), "length": len(document)}
        for number, (document, offset) in enumerate(zip(documents, offsets, strict=True))
    ]
    np.concatenate(documents).astype("<u2").tofile(root / "shard" / TOKENS)
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), root / "shard" / INDEX)
    contents = {"dtype": "uint16", "vocabulary_size": VOCABULARY, "tokens": sum(map(len, documents))}
    write_manifest(root / "shard", contents, [TOKENS, INDEX])
    write_store([root / "shard"], VOCABULARY, root / "store")
    return root / "store"


@pytest.fixture(scope="session")
def store(store_folder) -> TokenStore:
    return TokenStore(store_folder)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_model(LanguageModel(CONFIG, torch.Generator().manual_seed(5)), folder)
    return folder


def arm_of(values: dict) -> params.Arm:
    return TypeAdapter(params.Arm).validate_python(values)


def pretrain(store: TokenStore, root: Path, **changed) -> dict:
    given = {
        "config": CONFIG,
        "context": CONTEXT,
        "tokens": STEPS * ROWS * CONTEXT,
        "seed": 1,
        "recipe": RECIPE,
        "store": store,
        "output": root / "output",
        "scratch": root / "scratch",
        "snapshot_tokens": [100, 500],
        "settings": SETTINGS,
        "key": "0123",
    }
    return trainer.pretrain(**(given | changed))


def posttrain(store: TokenStore, base: Path, root: Path, arm: dict = PASSING, **changed) -> dict:
    given = {
        "checkpoint": base,
        "context": CONTEXT,
        "steps": STEPS,
        "seed": 2,
        "arm": arm_of(arm),
        "stretch_tokens": None,
        "recipe": RECIPE,
        "store": store,
        "output": root / "output",
        "scratch": root / "scratch",
        "settings": SETTINGS,
        "key": "0123",
    }
    return trainer.posttrain(**(given | changed))


def weights(root: Path) -> dict[str, torch.Tensor]:
    return load_file(root / "output" / "model.safetensors")


def metrics(root: Path) -> list[dict]:
    return [json.loads(line) for line in (root / "output" / "metrics.jsonl").read_text().splitlines()]


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((root / "output").iterdir())}


def assert_same_weights(left: Path, right: Path) -> None:
    mine, other = weights(left), weights(right)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a child; its exit status as `os.waitstatus_to_exitcode` gives it (−9: killed), 3 for a FarstateError."""
    child = os.fork()
    if child == 0:
        status = 0
        try:
            work()
        except FarstateError:
            status = 3
        except BaseException:
            traceback.print_exc()
            status = 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- the recipe


def test_schedule_by_hand():
    recipe = params.Recipe(batch_tokens=1, peak_learning_rate=3e-3, final_learning_rate=1e-5, warmup=0.1)
    rates = [learning_rate(step, 100, recipe) for step in range(100)]
    assert warmup_steps(100, recipe) == 10
    assert rates[:10] == pytest.approx([3e-4 * n for n in range(1, 11)], rel=1e-12)
    assert rates[9] == 3e-3
    assert rates[99] == 1e-5
    assert rates[9 + 45] == pytest.approx((3e-3 + 1e-5) / 2, rel=1e-12)
    assert rates[9 + 30] == pytest.approx(1e-5 + (3e-3 - 1e-5) * (1 + math.cos(math.pi / 3)) / 2, rel=1e-12)
    assert all(later < sooner for sooner, later in itertools.pairwise(rates[9:]))


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 100, 4321])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.25, 1.0])
def test_schedule_is_exact_at_both_ends(steps, warmup):
    recipe = params.Recipe(batch_tokens=1, peak_learning_rate=0.0123, final_learning_rate=0.00071, warmup=warmup)
    rates = [learning_rate(step, steps, recipe) for step in range(steps)]
    count = warmup_steps(steps, recipe)
    top = max(count - 1, 0)
    assert rates[0] == pytest.approx(0.0123 / max(count, 1))
    assert rates[top] == max(rates) == 0.0123
    assert rates[-1] == (0.00071 if top < steps - 1 else 0.0123)


def test_steps_outside_the_schedule_are_refused():
    for step in (-1, 5):
        with pytest.raises(ValueError, match="of 5"):
            learning_rate(step, 5, RECIPE)


def test_clipping_returns_the_norm_before():
    parameter = torch.zeros(4, requires_grad=True)
    parameter.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    assert clip_gradients([parameter], 1.0).item() == 5.0
    assert torch.linalg.vector_norm(parameter.grad).item() == pytest.approx(1.0, abs=1e-6)


# --- what is trained, against a loop written out


def test_state_passing_is_the_plain_loop(store, base, tmp_path):
    """The arm's definition with torch's own optimizer, loss and gradient clipping, and nothing of the trainer."""
    posttrain(store, base, tmp_path, {"initial_state": "state_passing", "reset_probability": 0.0})
    model = load_model(base)
    dynamics = [p for name, p in model.named_parameters() if p.dim() < 2]
    matrices = [p for name, p in model.named_parameters() if p.dim() >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": dynamics, "weight_decay": 0.0}], betas=(0.9, 0.95), foreach=False
    )
    batches = ShuffledStreams(OrderedStreams(store, "train", CONTEXT, ROWS, STEPS, 2, None), 2)
    state = None
    for step, recorded in enumerate(metrics(tmp_path)):
        tokens = batches.batch(step).tokens
        hidden, state = model(tokens[:, :-1], state)
        state = state.detach()
        logits = (hidden @ model.head_weight.T)[..., :VOCABULARY]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 if step == 0 else 1e-5 + (1e-2 - 1e-5) * (1 + math.cos(math.pi * step / (STEPS - 1))) / 2
        optimizer.step()
        optimizer.zero_grad()
        assert recorded["step"] == step + 1
        assert recorded["tokens"] == (step + 1) * ROWS * CONTEXT
        assert recorded["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert recorded["grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert recorded["learning_rate"] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    trained = weights(tmp_path)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=1e-3, atol=1e-4)


def test_control_is_state_passing_that_always_resets(store, base, tmp_path):
    posttrain(store, base, tmp_path / "control", {"initial_state": "zero"})
    posttrain(store, base, tmp_path / "reset", {"initial_state": "state_passing", "reset_probability": 1.0})
    assert_same_weights(tmp_path / "control", tmp_path / "reset")
    assert contents(tmp_path / "control")["metrics.jsonl"] == contents(tmp_path / "reset")["metrics.jsonl"]


def test_arms_differ_in_their_initial_states_only(store, base, tmp_path):
    """All but TBTT see the same sequences in the same order; the first step of every arm that has seen nothing is the control's."""
    arms = {
        "zero": {"initial_state": "zero"},
        "random_noise": {"initial_state": "random_noise", "sigma": 0.5},
        "fitted_noise": {"initial_state": "fitted_noise"},
        "state_passing": PASSING,
        "tbtt": {"initial_state": "tbtt"},
    }
    for name, arm in arms.items():
        posttrain(store, base, tmp_path / name, arm)
        assert sorted(contents(tmp_path / name)) == POSTTRAIN_FILES
    first = {name: metrics(tmp_path / name)[0]["loss"] for name in arms}
    last = {name: metrics(tmp_path / name)[-1]["loss"] for name in arms}
    assert first["zero"] == first["fitted_noise"] == first["state_passing"] != first["random_noise"]
    assert len(set(last.values())) == len(arms)
    ages = {name: pq.read_table(tmp_path / name / "output" / "ages.parquet").to_pylist() for name in arms}
    assert ages["zero"] == [{"step": step, "age": 0, "sequences": ROWS} for step in range(1, STEPS + 1)]
    assert ages["random_noise"] == [{"step": step, "age": None, "sequences": ROWS} for step in range(1, STEPS + 1)]
    assert [row["age"] for row in ages["fitted_noise"]] == [0] + [None] * (STEPS - 1)
    assert {row["age"] % CONTEXT for row in ages["state_passing"] + ages["tbtt"]} == {0}
    for name in ("state_passing", "tbtt"):
        for step in range(1, STEPS + 1):
            assert sum(row["sequences"] for row in ages[name] if row["step"] == step) == ROWS


def test_ages_under_tbtt_are_the_distance_from_the_start_of_the_stretch(store, base, tmp_path):
    posttrain(store, base, tmp_path, {"initial_state": "tbtt"}, stretch_tokens=3 * CONTEXT)
    streams = OrderedStreams(store, "train", CONTEXT, ROWS, STEPS, 2, 3 * CONTEXT)
    age = np.zeros(ROWS, dtype=int)
    expected = []
    for step in range(STEPS):
        age[streams.batch(step).fresh.numpy()] = 0
        values, counts = np.unique(age, return_counts=True)
        expected += [{"step": step + 1, "age": int(v), "sequences": int(c)} for v, c in zip(values, counts, strict=True)]
        age += CONTEXT
    assert pq.read_table(tmp_path / "output" / "ages.parquet").to_pylist() == expected
    assert max(row["age"] for row in expected) == 2 * CONTEXT


def test_contexts_read_the_same_text_in_blocks(store, tmp_path, monkeypatch):
    """Three trainings of equal budget and other contexts: the same tokens in every step. Blocks of one window are windows."""
    read: list[list[tuple[int, int]]] = []
    batch = trainer.ShuffledWindows.batch

    def spy(self, step, *rows):
        found = batch(self, step, *rows)
        size = found.tokens.shape[1] - 1
        read[-1] += [(d, o + n) for d, o in zip(found.document.tolist(), found.offset.tolist(), strict=True) for n in range(size)]
        return found

    monkeypatch.setattr(trainer.ShuffledWindows, "batch", spy)
    for context in (4, 8, 16):
        read.append([])
        pretrain(store, tmp_path / str(context), context=context, block_tokens=32, tokens=5 * ROWS * CONTEXT, snapshot_tokens=[])
    assert read[0] == read[1] == read[2]
    assert len(set(read[0])) == len(read[0]) == 5 * ROWS * CONTEXT
    for name, given in (("blocks", {"block_tokens": CONTEXT}), ("windows", {})):
        pretrain(store, tmp_path / name, **given)
    assert weights(tmp_path / "blocks").keys() == weights(tmp_path / "windows").keys()
    assert all(torch.equal(value, weights(tmp_path / "windows")[name]) for name, value in weights(tmp_path / "blocks").items())
    assert read_manifest(tmp_path / "blocks/output")["identity"] != read_manifest(tmp_path / "windows/output")["identity"]


@pytest.mark.parametrize(
    "arm",
    [
        {"initial_state": "zero"},
        PASSING,
        {"initial_state": "fitted_noise"},
        {"initial_state": "tbtt"},
        {"initial_state": "gaussian", "scope": "head"},
        {"initial_state": "permuted"},
    ],
)
def test_accumulated_gradients_are_one_batch(store, base, tmp_path, arm):
    posttrain(store, base, tmp_path / "whole", arm, steps=6)
    posttrain(store, base, tmp_path / "parts", arm, steps=6, recipe=RECIPE.model_copy(update={"micro_batches": 4}))
    for whole, parts in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
        assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-3)
    assert contents(tmp_path / "whole")["ages.parquet"] == contents(tmp_path / "parts")["ages.parquet"]


def test_mixed_precision_keeps_weights_and_states_in_float32(store, base, tmp_path, monkeypatch):
    seen = []
    observe = initial_states.StatePassing.observe
    monkeypatch.setattr(
        initial_states.StatePassing, "observe", lambda self, state, m: (seen.append(state), observe(self, state, m))
    )
    recipe = RECIPE.model_copy(update={"precision": "bf16-mixed"})
    posttrain(store, base, tmp_path / "mixed", recipe=recipe)
    posttrain(store, base, tmp_path / "full")
    assert {tensor.dtype for state in seen for layer in state.layers for tensor in layer.tensors()} == {torch.float32}
    assert {tensor.dtype for tensor in weights(tmp_path / "mixed").values()} == {torch.float32}
    mixed, full = metrics(tmp_path / "mixed"), metrics(tmp_path / "full")
    assert [row["loss"] for row in mixed] == pytest.approx([row["loss"] for row in full], rel=2e-2)
    assert mixed != full


def test_training_learns(store, tmp_path):
    recipe = RECIPE.model_copy(update={"peak_learning_rate": 3e-2})
    pretrain(store, tmp_path, tokens=80 * ROWS * CONTEXT, snapshot_tokens=[], recipe=recipe)
    losses = [row["loss"] for row in metrics(tmp_path)]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.2)
    assert losses[-1] < losses[0] - 0.3


# --- what is written


def test_pretraining_writes_what_it_declares(store, tmp_path):
    facts = pretrain(store, tmp_path)
    assert sorted(contents(tmp_path)) == PRETRAIN_FILES
    manifest = read_manifest(tmp_path / "output", verify=True)
    assert sorted(manifest["files"]) == [name for name in PRETRAIN_FILES if name != "manifest.json"]
    assert (manifest["stage"], manifest["steps"], manifest["tokens"]) == ("pretrain", STEPS, STEPS * ROWS * CONTEXT)
    assert os.listdir(tmp_path / "scratch") == ["lock"]
    assert facts["tokens"] == STEPS * ROWS * CONTEXT
    assert facts["threads"] == 1
    load_model(tmp_path / "output")


def test_snapshots_are_the_run_at_their_step(store, tmp_path):
    """At the first step that reaches the count, or the last one where the budget ends in a broken batch before it."""
    tokens = STEPS * ROWS * CONTEXT
    pretrain(store, tmp_path, tokens=tokens + 5, snapshot_tokens=[100, 128, 129, tokens + 3])
    taken = {}
    for count in (100, 128, 129, tokens + 3):
        path = tmp_path / "output" / snapshot_file(count)
        with safe_open(path, framework="pt") as file:
            taken[count] = int(file.metadata()["tokens"])
    assert taken == {100: 128, 128: 128, 129: 192, tokens + 3: tokens}
    final = load_file(tmp_path / "output" / snapshot_file(tokens + 3))
    assert final.keys() == weights(tmp_path).keys()
    assert all(torch.equal(final[name], tensor) for name, tensor in weights(tmp_path).items())
    early = load_file(tmp_path / "output" / snapshot_file(100))
    assert not any(torch.equal(early[name], tensor) for name, tensor in weights(tmp_path).items() if "in_proj" in name)


def test_a_snapshot_is_a_checkpoint_that_evaluation_reads(store, tmp_path):
    pretrain(store, tmp_path)
    folder = tmp_path / "as_model"
    folder.mkdir()
    os.link(tmp_path / "output" / snapshot_file(100), folder / "model.safetensors")
    os.link(tmp_path / "output" / "config.json", folder / "config.json")
    load_model(folder)


def test_a_complete_result_is_left_alone(store, tmp_path, capfd):
    pretrain(store, tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "output").iterdir()}
    assert pretrain(store, tmp_path) == {}
    assert "already complete" in capfd.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "output").iterdir()} == before
    assert pretrain(store, tmp_path, seed=9) != {}


def test_threads_and_denormals_are_given_back(store, base, tmp_path):
    torch.set_num_threads(2)
    posttrain(store, base, tmp_path, steps=2)
    assert torch.get_num_threads() == 2
    assert (torch.tensor([1e-39]) * 0.5).item() != 0.0
    torch.set_num_threads(1)


def test_log_lines(store, base, tmp_path, capfd):
    posttrain(store, base, tmp_path)
    lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"farstate: output: step {STEPS}/{STEPS}, loss \d\.\d{{4}}, [\d.]+[KM]? tokens/s, 0:00:00 left", lines[-1]
    )
    assert all(len(line) < 200 for line in lines)


# --- refusals


def test_parameters_that_do_not_fit(store, base, tmp_path):
    with pytest.raises(FarstateError, match="not a multiple of context × micro_batches = 24"):
        posttrain(store, base, tmp_path, recipe=RECIPE.model_copy(update={"micro_batches": 3}))
    with pytest.raises(FarstateError, match="less than one batch"):
        pretrain(store, tmp_path, tokens=10)
    with pytest.raises(FarstateError, match="snapshot at 9999"):
        pretrain(store, tmp_path, snapshot_tokens=[9999])
    with pytest.raises(FarstateError, match="knows 22 symbols, the token store uses 23"):
        pretrain(store, tmp_path, config=CONFIG.model_copy(update={"vocabulary_size": 22}))
    with pytest.raises(FarstateError, match="whole windows"):
        posttrain(store, base, tmp_path, steps=10_000)
    if not torch.cuda.is_available():
        with pytest.raises(FarstateError, match="finds no GPU"):
            pretrain(store, tmp_path, settings=replace(SETTINGS, device="cuda"))


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"checkpoint_seconds": 0.0}, {"checkpoint_steps": 0}])
def test_settings_out_of_range(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RunSettings(**wrong)


def test_two_at_once(store, base, tmp_path):
    with only_one(tmp_path / "scratch" / "lock", "posttrain output"), pytest.raises(FarstateError, match="is already running"):
        posttrain(store, base, tmp_path)
    posttrain(store, base, tmp_path)


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_loss_that_is_not_finite_stops_the_run(store, base, tmp_path, monkeypatch, what):
    calls = []
    honest = trainer.mean_nll

    def break_at_step_8(*given, **named):
        calls.append(1)
        loss = honest(*given, **named)
        if len(calls) < 8:
            return loss
        if what == "loss":
            return loss * float("nan")
        loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss * 1.0

    monkeypatch.setattr(trainer, "mean_nll", break_at_step_8)
    with pytest.raises(FarstateError, match=f"step 8 of {STEPS} .*lower posttrain.recipe.peak_learning_rate"):
        posttrain(store, base, tmp_path)
    assert not list((tmp_path / "output").iterdir())
    assert (tmp_path / "scratch" / "checkpoint-000000000006.json").exists()


# --- killed, and going on


@pytest.fixture(scope="session")
def undisturbed(store, base, tmp_path_factory) -> dict[str, dict[str, bytes]]:
    root = tmp_path_factory.mktemp("undisturbed")
    pretrain(store, root / "pretrain")
    posttrain(store, base, root / "posttrain")
    return {stage: contents(root / stage) for stage in ("pretrain", "posttrain")}


def runner(stage: str, store: TokenStore, base: Path, root: Path) -> Callable[[], object]:
    return (lambda: pretrain(store, root)) if stage == "pretrain" else (lambda: posttrain(store, base, root))


def at_call(module: object, name: str, number: int, action: Callable[..., object]) -> Callable[[], None]:
    """In the child: the `number`-th call of `module.name` is `action`'s, given what the call was given."""

    def install() -> None:
        honest = getattr(module, name)
        calls = []

        def counted(*given, **named):
            calls.append(1)
            return action(*given, **named) if len(calls) == number else honest(*given, **named)

        setattr(module, name, counted)

    return install


def half_written(path: Path, *_: object) -> None:
    with atomic_path(path) as temporary:
        temporary.write_bytes(os.urandom(2000))
        die()


KILLS = {
    "in the first step": at_call(trainer, "clip_gradients", 1, die),
    "before the first checkpoint": at_call(trainer, "write_checkpoint", 1, die),
    "between metrics and checkpoint": at_call(trainer, "write_checkpoint", 2, die),
    "inside a checkpoint's tensors": at_call(checkpoints, "write_tensors", 2, half_written),
    "between tensors and record": at_call(checkpoints, "write_json", 2, die),
    "after a checkpoint, in the next step": at_call(trainer, "clip_gradients", 7, die),
    "before publishing": at_call(trainer, "_publish", 1, die),
    "before the final configuration": at_call(trainer, "write_json", 1, die),
    "before the manifest": at_call(trainer, "write_manifest", 1, die),
    "before scratch is cleared": at_call(trainer, "_clear_scratch", 1, die),
}


@pytest.mark.parametrize("stage", ["pretrain", "posttrain"])
@pytest.mark.parametrize("kill", KILLS)
def test_killed_at(stage, kill, store, base, tmp_path, undisturbed):
    run = runner(stage, store, base, tmp_path)

    def killed() -> None:
        KILLS[kill]()
        run()

    assert forked(killed) == -signal.SIGKILL
    run()
    assert contents(tmp_path) == undisturbed[stage]
    assert os.listdir(tmp_path / "scratch") == ["lock"]


@pytest.mark.parametrize("seed", range(3))
def test_killed_again_and_again(seed, store, base, tmp_path, undisturbed):
    """At random steps, before or after the optimizer, until it gets through."""
    random_ = random.Random(seed)
    run = runner("posttrain", store, base, tmp_path)
    kills = 0
    while kills < 6:
        place = random_.choice([(trainer, "clip_gradients"), (trainer._Step, "__call__")])
        install = at_call(*place, random_.randint(1, 6), die)

        def killed(install: Callable[[], None] = install) -> None:
            install()
            run()

        if forked(killed) == 0:
            break
        kills += 1
    assert kills
    run()
    assert contents(tmp_path) == undisturbed["posttrain"]


def test_killed_and_resumed_in_processes_of_their_own(store_folder, base, tmp_path, undisturbed):
    """As on a cluster: nothing of the first process is left in the second, and both give the bytes of this one."""
    program = (
        "import sys; from pathlib import Path; import test_trainer as t;"
        "store, base, root, kill = sys.argv[1:]; root = Path(root);"
        "t.at_call(t.trainer, 'clip_gradients', int(kill), t.die)();"
        "t.posttrain(t.TokenStore(store), Path(base), root)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(trainer.__file__).parents[2])])
    statuses = [
        subprocess.run(
            [sys.executable, "-c", program, store_folder, base, tmp_path, kill],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            check=False,
        ).returncode
        for kill in ("8", "0")
    ]
    assert statuses == [-signal.SIGKILL, 0]
    assert contents(tmp_path) == undisturbed["posttrain"]


def test_stopped_by_a_time_limit(store, base, tmp_path, undisturbed):
    """SIGTERM ends the run after its step, with a checkpoint, whatever the interval."""
    before = signal.getsignal(signal.SIGTERM)  # a test of the command line may have left its own

    def stopped() -> None:
        at_call(trainer, "clip_gradients", 5, lambda *given: (os.kill(os.getpid(), signal.SIGTERM), clip_gradients(*given))[1])()
        with pytest.raises(FarstateError, match="stopped by SIGTERM after step 5 of 10; run the same command again"):
            posttrain(store, base, tmp_path, settings=replace(SETTINGS, checkpoint_steps=None))

    assert forked(stopped) == 0
    assert (tmp_path / "scratch" / "checkpoint-000000000005.json").exists()
    assert signal.getsignal(signal.SIGTERM) == before
    posttrain(store, base, tmp_path)
    assert contents(tmp_path) == undisturbed["posttrain"]


def test_checkpoints_by_time(store, base, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(trainer, "write_checkpoint", lambda folder, identity, checkpoint: written.append(checkpoint.step))
    posttrain(store, base, tmp_path, settings=RunSettings(device="cpu", threads=1, checkpoint_seconds=1e-9))
    assert written[0] == 1
    written.clear()
    posttrain(store, base, tmp_path, settings=RunSettings(device="cpu", threads=1), key="other")
    assert written == []


@pytest.fixture
def interrupted(store, base, tmp_path) -> Path:
    """A post-training killed in step 8, with checkpoints after steps 3 and 6."""

    def killed() -> None:
        at_call(trainer, "clip_gradients", 8, die)()
        posttrain(store, base, tmp_path)

    assert forked(killed) == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "scratch").glob("checkpoint-*.json")) == [
        "checkpoint-000000000003.json",
        "checkpoint-000000000006.json",
    ]
    return tmp_path


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES = {
    "flipped tensors": lambda path: flip(path),
    "truncated tensors": lambda path: truncate(path),
    "no tensors": lambda path: path.unlink(),
    "flipped record": lambda path: flip(path.with_suffix(".json")),
    "truncated record": lambda path: truncate(path.with_suffix(".json")),
    "another step in the record": lambda path: path.with_suffix(".json").write_text(
        path.with_suffix(".json").read_text().replace('"step": 6', '"step": 5')
    ),
    "record of something else": lambda path: path.with_suffix(".json").write_text("[1, 2]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(damage, interrupted, store, base, undisturbed, capfd):
    DAMAGES[damage](interrupted / "scratch" / "checkpoint-000000000006.safetensors")
    posttrain(store, base, interrupted)
    told = capfd.readouterr().err
    assert re.search(r"checkpoint-000000000006\.safetensors.*(damaged|missing).*is not used", told)
    assert "goes on after step 3 of 10" in told
    assert contents(interrupted) == undisturbed["posttrain"]


def test_all_checkpoints_damaged(interrupted, store, base, undisturbed, capfd):
    for path in (interrupted / "scratch").glob("checkpoint-*.safetensors"):
        flip(path)
    posttrain(store, base, interrupted)
    assert "no usable checkpoint, training starts from the beginning" in capfd.readouterr().err
    assert contents(interrupted) == undisturbed["posttrain"]


def test_a_checkpoint_of_another_run_is_not_used(interrupted, store, base, tmp_path_factory, capfd):
    other = tmp_path_factory.mktemp("other")
    posttrain(store, base, other, key="4567")
    posttrain(store, base, interrupted, key="4567")
    assert "belongs to another run" in capfd.readouterr().err
    assert contents(interrupted) == contents(other)


def test_a_lost_snapshot_is_taken_again(store, base, tmp_path, undisturbed, capfd):
    def killed() -> None:
        at_call(trainer, "clip_gradients", 10, die)()
        pretrain(store, tmp_path)

    assert forked(killed) == -signal.SIGKILL
    (tmp_path / "scratch" / "snapshots" / snapshot_file(500)).unlink()
    pretrain(store, tmp_path)
    told = capfd.readouterr().err
    assert re.search(rf"relies on .*{snapshot_file(500)}, which is missing", told)
    assert "goes on after step 6 of 10" in told
    assert contents(tmp_path) == undisturbed["pretrain"]


# --- a full disk


@pytest.mark.parametrize("kind", ["safetensors", "fsync"])
def test_disk_full_while_a_checkpoint_is_written(kind, store, base, tmp_path, undisturbed):
    def full(*_: object, **__: object) -> None:
        if kind == "safetensors":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def failing() -> None:
        at_call(checkpoints, "write_tensors" if kind == "safetensors" else "sha256_file", 2, full)()
        with pytest.raises(FarstateError, match=r"no space left on the device .*checkpoints are kept in"):
            posttrain(store, base, tmp_path)

    assert forked(failing) == 0
    assert [path.name for path in (tmp_path / "scratch").glob("checkpoint-*.json")] == ["checkpoint-000000000003.json"]
    assert not list((tmp_path / "scratch").glob(".*.part"))
    assert not (tmp_path / "output" / "manifest.json").exists()
    posttrain(store, base, tmp_path)
    assert contents(tmp_path) == undisturbed["posttrain"]


def test_a_disk_that_is_really_full(store, base, tmp_path, undisturbed):
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("needs to mount a small disk")
    try:
        with pytest.raises(FarstateError, match="no space left on the device"):
            posttrain(store, base, tmp_path, scratch=disk)
        assert not (tmp_path / "output" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        posttrain(store, base, tmp_path, scratch=disk)
        assert contents(tmp_path) == undisturbed["posttrain"]
    finally:
        subprocess.run(["umount", disk], check=True)


# --- the numbers


class _Windows:
    """Made-up batches; rows 0 and 1 continue their windows."""

    def batch(self, step: int) -> object:
        tokens = torch.from_numpy(np.stack([text(CONTEXT + 1, 5 * row + CONTEXT * step) for row in range(4)]))
        return trainer._Part(tokens, torch.tensor([step == 0, step == 0, True, step % 2 == 0]))


def golden_run(arm: dict) -> dict[str, torch.Tensor]:
    model = LanguageModel(CONFIG)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.copy_(ramp(*parameter.shape, phase=float(number), scale=0.4))
        for block in model.backbone.layers:
            block.mixer.A_log.copy_(ramp(4, phase=1.0))
            block.mixer.dt_bias.copy_(ramp(4, phase=2.0) - 2.0)
    model.double()
    recipe = params.Recipe(batch_tokens=4 * CONTEXT, micro_batches=2, peak_learning_rate=1e-2, warmup=0.5)
    run = initial_states.Run(11, 4, 2, CONTEXT, model.zero_state)
    intervention = initial_states.build(arm_of(arm), run)
    division = trainer._Division(4, 2)
    job = trainer._Job("posttrain", "", model, _Windows(), intervention, 4, recipe, division, [], 11, CONFIG.vocabulary_size)  # type: ignore[arg-type]
    step = trainer._Step(job, trainer.build_optimizer(model, recipe), trainer._Scored(model, CONFIG.vocabulary_size))
    rows = torch.tensor([step(number, None) for number in range(4)], dtype=torch.float64)
    return {"steps": rows, "weights": torch.stack([p.detach().double().norm() for p in model.parameters()])}


def test_golden(tmp_path):
    torch.set_num_threads(1)
    arms = {
        "zero": {"initial_state": "zero"},
        "random_noise": {"initial_state": "random_noise", "sigma": 0.5},
        "fitted_noise": {"initial_state": "fitted_noise"},
        "state_passing": {"initial_state": "state_passing", "reset_probability": 0.5},
        "tbtt": {"initial_state": "tbtt"},
        "gaussian_joint": {"initial_state": "gaussian", "scope": "joint", "reset_probability": 0.5},
        "gaussian_head": {"initial_state": "gaussian", "scope": "head", "reset_probability": 0.5},
        "permuted": {"initial_state": "permuted", "reset_probability": 0.5},
    }
    values = {f"{name}.{what}": tensor for name, arm in arms.items() for what, tensor in golden_run(arm).items()}
    recipe = params.Recipe(batch_tokens=1, peak_learning_rate=3e-3)
    values["schedule"] = torch.tensor([learning_rate(step, 57, recipe) for step in range(57)], dtype=torch.float64)
    check("training", values)
    if os.environ.get("FARSTATE_UPDATE_GOLDEN") != "1":
        for name in values:
            with pytest.raises(AssertionError, match="the numbers of 'training' changed"):
                check("training", values | {name: values[name] * (1.0 + 1e-6)})


def test_loss_is_the_mean_over_tokens(store, base, tmp_path):
    posttrain(store, base, tmp_path, {"initial_state": "zero"}, steps=1)
    model = load_model(base)
    tokens = ShuffledStreams(OrderedStreams(store, "train", CONTEXT, ROWS, 1, 2, None), 2).batch(0).tokens
    hidden, _ = model(tokens[:, :-1])
    nll = token_nll(hidden, model.head_weight, tokens[:, 1:], vocabulary_size=VOCABULARY)
    assert metrics(tmp_path)[0]["loss"] == pytest.approx(nll.mean().item(), rel=1e-6)


def test_a_step_does_not_load_torchs_compiler() -> None:
    """It takes longer than many a training of the tests; the numbers are those of torch's own optimizer (above)."""
    code = (
        "import sys, torch\n"
        "from farstate.training.recipe import AdamW\n"
        "layer = torch.nn.Linear(3, 3)\n"
        "optimizer = AdamW(layer.parameters(), lr=0.1, fused=True)\n"
        "layer(torch.ones(2, 3)).sum().backward()\n"
        "optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "assert layer.weight.grad is None\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
