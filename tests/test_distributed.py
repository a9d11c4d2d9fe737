"""Training on several processes: the same numbers as on one, whatever happens to one of them, in less memory.

Two processes started by torchrun, gloo between them. The trainings are in `distributed_runs.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import distributed_runs as runs
from conftest import REPOSITORY, environment
from farstate import cli
from farstate.errors import FarstateError
from farstate.files import read_manifest, write_json
from farstate.grid import snapshot_file
from farstate.models.checkpoints import save_model
from farstate.models.head import mean_nll
from farstate.models.hybrid.shape import HybridConfig
from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES
from farstate.params import Recipe
from farstate.tasks.examples import write_examples
from farstate.training import trainer
from farstate.training.distributed import ALONE, Processes
from farstate.training.settings import RunSettings
from model_checks import random_model
from test_architectures import config
from test_trainer import store_folder  # noqa: F401 (a fixture)

# Of float64 results; measured 2e-14.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SCRIPT = str(Path(runs.__file__))
# Arms that keep something from step to step, each in its own way.
RESUMED = ("fsdp-micro_batch", "ddp-state_passing", "ddp-fitted_noise", "ddp-permuted", "ddp-hybrid", "ddp-split")
ENOUGH = 300.0


def started(*command: str, **extra: str) -> subprocess.Popen[str]:
    env = environment(REPOSITORY, OMP_NUM_THREADS="1", **extra)
    env["PYTHONPATH"] += os.pathsep + str(REPOSITORY / "tests")
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; the test fails where it takes too long."""
    try:
        out, err = process.communicate(timeout=ENOUGH)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends what it started
        process.communicate()
        raise
    return process.returncode, out, err


def reference(case: str) -> str:
    """The case that is the same training on one process, undivided."""
    arm = case.partition("-")[2]
    arm = {"recomputed": "state_passing", "split": "state_passing"}.get(arm, arm)
    return f"fsdp-{arm}" if arm in ("pretrain", "float32") else f"ddp-{arm}"


@pytest.fixture(scope="module")
def folder(store_folder: Path) -> Path:  # noqa: F811
    root = store_folder.parent
    generator = torch.Generator().manual_seed(5)
    save_model(LanguageModel(runs.CONFIG, generator), root / "base")
    hybrid = HybridConfig(**runs.SIZES, attention_every=2, attention_heads=2, attention_window=12)
    save_model(LanguageModel(hybrid, generator), root / "hybrid")
    write_examples((runs.MAKER.training(number) for number in range(70)), root / "examples")
    return root


KILLED = "fsdp-state_passing"


@pytest.fixture(scope="module")
def last_words(folder: Path) -> str:
    """What is said where the second process kills itself in step 5; its training lies in `killed`."""
    began = time.monotonic()
    status, _, err = ended(started(*TORCHRUN, SCRIPT, str(folder), f"{KILLED}@killed", DIES="5"))
    assert status != 0
    assert time.monotonic() - began < 120.0  # of which most is the start
    assert not (folder / "killed" / KILLED / "output" / "manifest.json").exists()
    assert (folder / "killed" / KILLED / "scratch" / "checkpoint-000000000004.json").exists()
    shutil.copytree(folder / "killed", folder / "killed_one")
    return err


@pytest.fixture(scope="module")
def facts(folder: Path, last_words: str) -> dict[str, Any]:
    """All cases, on one process and on two; and each way of going on with what the other number of processes began."""
    alone = dict.fromkeys([*map(reference, runs.CASES), "ddp-split", "fsdp-recomputed"])
    one = runs.run(folder, *alone, *(f"{case}@from_one!" for case in RESUMED), f"{KILLED}@killed_one")
    going_on = [*(f"{case}@from_one" for case in RESUMED), f"{KILLED}@killed"]
    status, out, err = ended(
        started(*TORCHRUN, SCRIPT, str(folder), *runs.CASES, *going_on, *(f"{case}@from_two!" for case in RESUMED))
    )
    assert status == 0, err[-6000:]
    back = runs.run(folder, *(f"{case}@from_two" for case in RESUMED))
    return {"one": one, "two": json.loads(out.splitlines()[-1]), "back": back}


def weights(root: Path) -> dict[str, Tensor]:
    return load_file(root / "output" / "model.safetensors")


def metrics(root: Path) -> Tensor:
    lines = (root / "output" / "metrics.jsonl").read_text().splitlines()
    return torch.tensor([list(json.loads(line).values()) for line in lines], dtype=torch.float64)


def assert_same_training(actual: Path, expected: Path, **close: float) -> None:
    mine, other = read_manifest(actual / "output"), read_manifest(expected / "output")
    assert mine.pop("files").keys() == other.pop("files").keys()
    assert mine == other  # the identity among it: the number of processes is no part of a run
    torch.testing.assert_close(weights(actual), weights(expected), **(close or CLOSE))
    torch.testing.assert_close(metrics(actual), metrics(expected), **(close or CLOSE))
    ages = actual / "output" / "ages.parquet"
    if ages.exists():
        assert ages.read_bytes() == (expected / "output" / "ages.parquet").read_bytes()


# --- the same numbers


@pytest.mark.parametrize("case", [case for case in runs.CASES if not case.endswith(("-bf16", "-float32"))])
def test_two_processes_are_one(folder: Path, facts: dict[str, Any], case: str) -> None:
    assert facts["two"][case]["processes"] == 2
    assert facts["two"][case]["mode"] == case.partition("-")[0]
    assert_same_training(folder / "2" / case, folder / "1" / reference(case))


def test_snapshots_are_whole(folder: Path, facts: dict[str, Any]) -> None:
    for name in (snapshot_file(100), snapshot_file(300)):
        mine, other = (load_file(folder / world / "fsdp-pretrain" / "output" / name) for world in ("2", "1"))
        torch.testing.assert_close(mine, other, **CLOSE)


def test_arms_differ(folder: Path, facts: dict[str, Any]) -> None:
    """What is compared above is not all the same."""
    last = {case: metrics(folder / "2" / f"ddp-{case}")[-1, 2].item() for case in runs.ARMS}
    assert len({round(value, 6) for value in last.values()}) == len(runs.ARMS)


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize(("began", "ended"), [("one", "two"), ("two", "back")])
def test_another_number_of_processes_goes_on(folder: Path, facts: dict[str, Any], case: str, began: str, ended: str) -> None:
    assert facts[ended][f"{case}@from_{began}"]["resumed"] == 1
    assert_same_training(folder / f"from_{began}" / case, folder / "1" / reference(case))


def test_states_are_float32_in_mixed_precision(folder: Path, facts: dict[str, Any]) -> None:
    for told in (facts["one"]["ddp-bf16"], facts["two"]["ddp-bf16"]):
        states = {dtype for name, dtype in told["dtypes"].items() if name.startswith("intervention/") and ".ages" not in name}
        others = {dtype for name, dtype in told["dtypes"].items() if name.startswith(("model/", "optimizer/"))}
        assert states == others == {"torch.float32"}
    # The same products in half precision, their sums over other groups of rows: measured 1e-4.
    torch.testing.assert_close(
        metrics(folder / "2" / "ddp-bf16")[:, 2], metrics(folder / "1" / "ddp-bf16")[:, 2], rtol=0.0, atol=2e-3
    )


def test_in_float32_the_difference_is_rounding(folder: Path, facts: dict[str, Any]) -> None:
    mine, other = metrics(folder / "2" / "fsdp-float32"), metrics(folder / "1" / "fsdp-float32")
    print("float32, loss and norm:", (mine - other).abs().max(0).values[2:4].tolist())
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


# --- less memory, the same numbers


def test_recomputed_blocks_change_nothing(folder: Path, facts: dict[str, Any]) -> None:
    assert_same_training(folder / "1" / "fsdp-recomputed", folder / "1" / "ddp-state_passing", rtol=0.0, atol=0.0)
    assert_same_training(folder / "2" / "fsdp-recomputed", folder / "2" / "fsdp-state_passing", rtol=0.0, atol=0.0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_can_be_recomputed(architecture: str) -> None:
    """Loss, final state and all gradients, that of the initial state among them, bit by bit; and less is kept."""
    model = random_model(config(architecture))
    tokens = torch.arange(2 * 14).view(2, 14) % 20
    found: list[dict[str, Tensor]] = []
    kept = []
    for model.recomputes in (False, True):
        with torch.no_grad():
            _, state = model(tokens[:, :6])
        state = state.map(lambda tensor: tensor.clone().requires_grad_())
        saved = dict[int, int]()

        def keep(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden, final = model(tokens[:, 6:-1], state)
            loss = mean_nll(hidden, model.head_weight, tokens[:, 7:])
        kept.append(sum(saved.values()))
        loss.backward()
        of_state = {f"state.{number}": tensor.grad for number, layer in enumerate(state.layers) for tensor in layer.tensors()[:1]}
        after = {f"final.{number}": layer.recurrent.detach() for number, layer in enumerate(final.layers)}
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert gradients.keys() == dict(model.named_parameters()).keys()  # processes wait for every one of them
        model.zero_grad()
        found.append({"loss": loss.detach(), **of_state, **after, **gradients})
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain if plain[name] is not None)
    assert kept[1] < 0.5 * kept[0]


def test_parts_of_a_micro_batch_change_nothing(folder: Path, facts: dict[str, Any]) -> None:
    assert_same_training(folder / "1" / "ddp-split", folder / "1" / "ddp-state_passing")


def test_no_smaller_parts_where_states_pass_between_them(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FarstateError, match=r"split_micro_batches: 2, but with `previous: micro_batch`.*another experiment"):
        runs.posttrain(folder, tmp_path, "micro_batch", split_micro_batches=2)


def exhausted(*_: object, **__: object) -> None:
    torch.empty(1 << 50)  # what the allocator of a CPU says


def exhausted_gpu(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")


def exhausted_python(*_: object, **__: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("how", [exhausted, exhausted_gpu, exhausted_python])
@pytest.mark.parametrize(
    ("arm", "where", "expected"),
    [
        ("tbtt", {}, r"hold 4 rows .*split_micro_batches: 2.*same numbers to float32 tolerance"),
        ("tbtt", {"split_micro_batches": 2}, r"hold 2 rows .*split_micro_batches: 4"),
        (
            "tbtt",
            {"split_micro_batches": 4, "activation_checkpointing": True},
            r"hold 1 rows of a micro-batch; use more processes",
        ),
        ("micro_batch", {}, r"another experiment; use --config 'settings=\{distributed: \{activation_checkpointing: true"),
    ],
)
def test_memory_that_does_not_suffice(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[..., None], arm: str, where: Any, expected: str
) -> None:
    monkeypatch.setattr(trainer, "mean_nll", how)
    with pytest.raises(FarstateError, match=expected) as caught:
        runs.posttrain(folder, tmp_path, arm, **where)
    assert "\n" not in str(caught.value)
    if arm == "micro_batch":
        assert "split_micro_batches" not in str(caught.value)


@pytest.mark.parametrize(
    ("world", "split", "expected"),
    [
        (3, 1, r"micro-batch of 4 rows .* cannot be shared by 3 processes; start 1, 2, 4 of them"),
        (2, 3, r"split_micro_batches: 3 does not divide the 2 rows that a process has of a micro-batch; allowed: 1, 2"),
    ],
)
def test_rows_that_cannot_be_shared(world: int, split: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.distributed, "current", lambda: Processes(0, world))
    with pytest.raises(FarstateError, match=expected):
        trainer._divided(runs.RECIPE, runs.CONTEXT, RunSettings(split_micro_batches=split))


# --- one of them dies, or all are stopped


def test_a_killed_process_ends_all(last_words: str) -> None:
    said = [
        line for line in last_words.splitlines() if line.startswith("farstate: another of the 2 processes of this training ended")
    ]
    # torchrun may end the other before it has noticed; then its own table says which was killed.
    ended_by_torchrun = "Signal 9 (SIGKILL)" in last_words and "Signal 15 (SIGTERM)" in last_words
    assert len(said) == 1 or (not said and ended_by_torchrun), last_words[-4000:]


def test_what_a_killed_process_left_goes_on(folder: Path, facts: dict[str, Any]) -> None:
    """On two processes bit by bit as if nothing had been, and on one."""
    assert facts["two"][f"{KILLED}@killed"]["resumed"] == facts["one"][f"{KILLED}@killed_one"]["resumed"] == 1
    assert_same_training(folder / "killed" / KILLED, folder / "2" / KILLED, rtol=0.0, atol=0.0)
    assert_same_training(folder / "killed_one" / KILLED, folder / "1" / reference(KILLED))


LONG = 200


@pytest.fixture
def record(folder: Path, tmp_path: Path) -> Path:
    """A stage's record as Snakemake would write it, of a pre-training that lasts some seconds."""
    shape = {
        key: value for key, value in runs.CONFIG.model_dump(mode="json").items() if key not in ("architecture", "vocabulary_size")
    }
    write_json(
        tmp_path / "record.json",
        {
            "rule": "pretrain", "phase": "pretrain", "name": "made", "key": "0123", "directory": "results/pretrain/made-0123",
            "numerics": {}, "upstream": {"store": [str(folder / "store")]},
            "params": {
                "architecture": "mamba2", "shape": shape, "vocabulary_size": runs.VOCABULARY, "context": runs.CONTEXT, "seed": 1,
                "tokens": LONG * runs.ROWS * runs.CONTEXT,
                "recipe": Recipe(batch_tokens=runs.ROWS * runs.CONTEXT, peak_learning_rate=1e-4).model_dump(mode="json"),
            },
        },
    )  # fmt: skip
    return tmp_path / "record.json"


def test_the_command_is_stopped_and_goes_on(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`torchrun -m farstate pretrain RECORD`: SIGTERM leaves a checkpoint and one line; one process ends the training."""
    monkeypatch.chdir(tmp_path)
    live = tmp_path / ".farstate/scratch/pretrain/made-0123/metrics.jsonl"
    process = started(*TORCHRUN, "-m", "farstate", "pretrain", str(record))
    deadline = time.monotonic() + ENOUGH
    while not (live.exists() and live.read_text().count("\n") >= 3):
        assert process.poll() is None, ended(process)[2][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert status != 0
    stops = re.findall(
        rf"^farstate: pretrain was stopped by SIGTERM after step (\d+) of {LONG}; run the same command", err, re.MULTILINE
    )
    assert len(stops) == 1, err[-4000:]
    assert (live.parent / f"checkpoint-{int(stops[0]):012d}.json").exists()
    assert not (tmp_path / "results/pretrain/made-0123/manifest.json").exists()
    cli.pretrain(record)
    assert f"goes on after step {stops[0]} of {LONG}" in capsys.readouterr().err
    manifest = read_manifest(tmp_path / "results/pretrain/made-0123")
    assert (manifest["steps"], manifest["key"]) == (LONG, "0123")
    provenance = json.loads((tmp_path / "logs/pretrain/made-0123.provenance.json").read_text())
    assert (provenance["run"]["resumed"], provenance["run"]["processes"]) == (1, 1)


def test_a_stage_that_is_not_shared_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FarstateError, match="store: is computed by one process, torchrun started 2; call farstate itself"):
        cli.store(tmp_path / "record.json")


def test_one_process_communicates_nothing() -> None:
    tensor = torch.ones(2)
    assert ALONE.agreed(1, 0) == [1, 0]
    assert ALONE.summed(0.1) == 0.1
    assert ALONE.told("word") == "word"
    assert ALONE.gathered(tensor)[0] is tensor
    assert ALONE.everywhere(tensor)[0] is tensor
    assert ALONE.received({"name": tensor})["name"] is tensor
