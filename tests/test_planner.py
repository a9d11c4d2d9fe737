"""What the planner reckons against what is: memory of real training steps, operations that torch counts, jobs that a cluster is asked for."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from conftest import REPOSITORY
from farstate import params
from farstate.corpus.readers import Batch, chosen
from farstate.errors import FarstateError
from farstate.keys import Stage
from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.plan import Plan
from farstate.planner.activations import HALVED
from farstate.planner.command import too_long
from farstate.planner.devices import GPUS, NAMES, Device, device_of
from farstate.planner.jobs import MEASUREMENTS, TRAININGS, Job, config_of, estimate, estimates
from farstate.planner.refusal import refusal
from farstate.planner.resources import UNKNOWN_MINUTES, Asks, jobs_together, over_nodes, refuse_what_cannot_fit, torchrun
from farstate.planner.work import forward_flops, state_bytes
from farstate.settings import Distributed, Planner, Settings
from farstate.training import trainer
from farstate.training.settings import RunSettings

VOCABULARY = 300
SHAPES = {
    "mamba1": {"width": 48, "layers": 2, "state_size": 12},
    "mamba2": {"width": 48, "layers": 2, "state_size": 24, "head_size": 16, "groups": 2},
    "gla": {"width": 48, "layers": 2, "heads": 4, "mlp_width": 96, "expand_v": 1.5},
    "rwkv6": {"width": 48, "layers": 2, "heads": 4, "mix_rank": 6, "decay_rank": 8},
    "gated_deltanet": {"width": 48, "layers": 2, "heads": 3, "mlp_width": 96},
    "hybrid": {"width": 48, "layers": 2, "state_size": 24, "head_size": 16, "attention_every": 2, "attention_window": 40},
}
"""Sizes of the demo's order; each with two and with four layers."""
PASSING = {"initial_state": "state_passing", "reset_probability": 0.1}


class Made:
    """Two steps of random tokens."""

    steps = 2

    def __init__(self, rows: int, context: int) -> None:
        self._tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCABULARY, (rows, context + 1)))

    def batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
        which = torch.from_numpy(chosen(rows, len(self._tokens)))
        nothing = torch.zeros(len(which), dtype=torch.int64)
        return Batch(self._tokens[which], nothing, nothing, torch.full((len(which),), step == 0))


def recipe_of(rows: int, context: int, **changed: object) -> params.Recipe:
    return params.Recipe(batch_tokens=rows * context, peak_learning_rate=1e-3, **changed)  # type: ignore[arg-type]


def stage_of(architecture: str, shape: dict, rows: int, context: int, arm: dict | None = None, **changed: object) -> Stage:
    given = {
        "architecture": architecture,
        "shape": shape,
        "vocabulary_size": VOCABULARY,
        "context": context,
        "tokens": 2 * rows * context,
    }
    recipe = recipe_of(rows, context, **changed).model_dump(mode="json")
    return Stage(
        rule="pretrain",
        phase="pretrain",
        name="it.s0",
        params={**given, "recipe": recipe, **({"arm": arm} if arm else {})},
        files=(),
    )


def measured(stage: Stage, root: Path, **settings: object) -> int:
    """Bytes that torch's allocator had given out at the most while the trainer built the model and made two steps."""
    given = stage.params
    config = config_of(stage, root)
    recipe = params.Recipe.model_validate(params.as_written(given["recipe"]))
    rows = recipe.batch_tokens // given["context"]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.tune(
            checkpoint=None, config=config, batches=Made(rows, given["context"]), vocabulary_size=VOCABULARY, context=given["context"],
            seed=0, arm=params.arm_from_json(given.get("arm", {"initial_state": "zero"})), recipe=recipe, output=root / "output",
            scratch=root / "scratch", settings=RunSettings(device="cpu", threads=1, **settings), key="0",  # type: ignore[arg-type]
        )  # fmt: skip
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_memory_is_within_a_fifth_of_what_torch_allocates(architecture: str, layers: int, tmp_path: Path) -> None:
    rows, context = (24, 64) if layers == 2 else (8, 112)
    stage = stage_of(architecture, {**SHAPES[architecture], "layers": layers}, rows, context)
    job = estimate(stage, Settings(device="cpu"), device_of(Settings(device="cpu"), elsewhere=False), tmp_path)
    found = measured(stage, tmp_path)
    print(
        f"{architecture}, {layers} layers: {job.bytes / 1e6:.1f} MB planned, {found / 1e6:.1f} MB measured, {job.bytes / found:.3f}"
    )
    assert 0.8 <= job.bytes / found <= 1.2


@pytest.mark.parametrize(
    ("changed", "settings", "arm"),
    [
        ({}, {"activation_checkpointing": True}, None),
        ({"micro_batches": 4}, {}, None),
        ({"micro_batches": 2}, {"split_micro_batches": 2}, PASSING),
    ],
    ids=["checkpointing", "micro-batches", "states passed on"],
)
def test_memory_follows_settings_and_recipe(changed: dict, settings: dict, arm: dict | None, tmp_path: Path) -> None:
    stage = stage_of("mamba2", {**SHAPES["mamba2"], "layers": 4}, 32, 64, arm, **changed)
    told = Settings(
        device="cpu",
        distributed=Distributed(activation_checkpointing=settings.get("activation_checkpointing", False)),
        split_micro_batches=settings.get("split_micro_batches", 1),
    )
    job = estimate(stage, told, device_of(told, elsewhere=False), tmp_path)
    found = measured(stage, tmp_path, **settings)
    print(f"{job.bytes / 1e6:.1f} MB planned, {found / 1e6:.1f} MB measured, {job.bytes / found:.3f}")
    assert 0.8 <= job.bytes / found <= 1.2


def test_shared_out_weights_and_smaller_parts_need_less() -> None:
    stage = stage_of("mamba2", {"width": 1024, "layers": 48}, 64, 2048, precision="bf16-mixed")
    device = GPUS["h100"]

    def needed(**settings: object) -> dict[str, float]:
        return estimate(stage, Settings.model_validate({"device": "cuda", **settings}), device, Path()).memory

    alone, ddp = needed(), needed(distributed={"processes": 8})
    fsdp = needed(distributed={"processes": 8, "mode": "fsdp"})
    assert ddp["optimizer"] == alone["optimizer"]
    assert ddp["activations"] == pytest.approx(alone["activations"] / 8)
    assert fsdp["optimizer"] == alone["optimizer"] / 8
    assert fsdp["gradients"] == alone["gradients"] / 8
    assert alone["weights"] / 8 < fsdp["weights"] < alone["weights"] / 2
    assert needed(split_micro_batches=4)["activations"] == pytest.approx(alone["activations"] / 4)
    assert needed(distributed={"activation_checkpointing": True})["activations"] < alone["activations"] / 5
    assert needed(backend="chunked")["activations"] > 1.2 * alone["activations"], (
        "the kernels compute the inside of a recurrence again"
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_matrix_products_are_those_that_torch_counts(architecture: str) -> None:
    """Products with weights, which torch counts as mm and addmm; what a recurrence multiplies depends on its form and is left out."""
    # Wide, so that convolutions, norms and biases, which are no matrices but counted as such, are few.
    shape = {**SHAPES[architecture], "width": 192, "layers": 2}
    config = config_from_json({"architecture": architecture, **shape, "vocabulary_size": VOCABULARY})
    model = LanguageModel(config)
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hidden, state = model(tokens)
        torch.mm(hidden.flatten(0, 1), model.head_weight.t())
    counts = counter.get_flop_counts()["Global"]
    products = sum(count for operation, count in counts.items() if str(operation) in ("aten.mm", "aten.addmm"))
    recurrence = forward_flops(config, 64) - 2 * (
        config.parameter_count(embeddings=False) + config.padded_vocabulary * config.width
    )
    assert recurrence > 0
    assert (forward_flops(config, 64) - recurrence) * tokens.numel() == pytest.approx(products, rel=0.05)
    held = sum(
        tensor.numel()
        for layer in state.layers
        for tensor in (layer.recurrent, *layer.auxiliary.values())
        if tensor.is_floating_point()
    )
    assert state_bytes(config, 64) * 2 == pytest.approx(4 * held, rel=0.02)


def test_published_checkpoints_have_the_sizes_of_their_names() -> None:
    for architecture, name, millions in (
        ("mamba1", "state-spaces/mamba-130m", 129.1),
        ("mamba1", "state-spaces/mamba-1.4b", 1372.2),
        ("mamba2", "state-spaces/mamba2-130m", 128.9),
        ("mamba2", "state-spaces/mamba2-2.7b", 2702.6),
    ):
        given = {"architecture": architecture, "checkpoint": name, "content": ""}
        config = config_of(
            Stage(rule="import_checkpoint", phase="pretrain", name="checkpoint.it", params=given, files=()), Path()
        )
        assert config is not None
        assert config.parameter_count() / 1e6 == pytest.approx(millions, rel=1e-3)
    unknown = {"architecture": "mamba2", "checkpoint": "somewhere/else", "content": ""}
    assert (
        config_of(Stage(rule="import_checkpoint", phase="pretrain", name="checkpoint.it", params=unknown, files=()), Path())
        is None
    )


@cache
def paper() -> Plan:
    return Plan(params.load(REPOSITORY / "config/paper.yaml"), {})


def due(settings: Settings, plan: Plan, device: Device, *rules: str) -> list[Job]:
    stages = [stage for stage in plan.stages.values() if stage.rule in (rules or TRAININGS)]
    return estimates(stages, settings, device, REPOSITORY)


def follows(settings: Settings, said: str) -> Settings:
    """The settings with what a line advises."""
    parts = re.search(r"split_micro_batches: (\d+)", said)
    spread = settings.distributed.model_copy(update={"activation_checkpointing": "activation_checkpointing: true" in said})
    return settings.model_copy(
        update={"split_micro_batches": int(parts.group(1)) if parts else settings.split_micro_batches, "distributed": spread}
    )


def test_the_advice_makes_a_job_fit() -> None:
    settings = Settings(device="cuda")
    refused = [job for job in due(settings, paper(), GPUS["h100"]) if not job.fits]
    assert refused, "the paper's pre-training takes a batch of 524,288 tokens at once"
    for job in {job.model: job for job in refused}.values():
        assert "split_micro_batches: " in job.advice
        advised = follows(settings, job.advice)
        again = estimate(job.stage, advised, GPUS["h100"], REPOSITORY)
        assert again.fits
        assert not again.refused
        assert not estimate(job.stage, advised.model_copy(update={"split_micro_batches": 1}), GPUS["h100"], REPOSITORY).fits


def test_one_advice_suits_all_trainings() -> None:
    """Those that fit already too: the trainer must be able to divide every batch."""
    settings = Settings(device="cuda")
    said = refusal(due(settings, paper(), GPUS["h100"]), settings, GPUS["h100"], REPOSITORY)
    assert re.search(
        r"^\d+ of 157 trainings do not fit h100 \(80 GB\); .*: \d+\.\d GB; all of them fit with split_micro_batches: ", said
    )
    assert refusal(due(follows(settings, said), paper(), GPUS["h100"]), follows(settings, said), GPUS["h100"], REPOSITORY) == ""


def test_where_no_one_setting_suits_all_each_is_told_its_own() -> None:
    """3 rows and 256: no number but 1 divides both."""
    stages = [stage_of("mamba2", {"width": 768, "layers": 24}, rows, 8192) for rows in (3, 256)]
    settings = Settings(device="cuda")
    device = Device("small", 24e9, GPUS["l40s"].peak)
    jobs = [estimate(stage, settings, device, Path()) for stage in stages]
    said = refusal(jobs, settings, device, Path())
    assert re.search(r"; no one setting suits all 2, call for them apart: .*_batches: 3 in .*; .*_batches: 128 in ", said), said
    for job in jobs:
        advised = follows(settings, job.advice)
        assert not refusal([estimate(job.stage, advised, device, Path())], advised, device, Path())


def test_what_the_trainer_would_refuse_is_refused_with_its_own_line() -> None:
    three = Settings(device="cuda", distributed=Distributed(processes=3), split_micro_batches=16)
    said = refusal(due(three, paper(), GPUS["h100"]), three, GPUS["h100"], REPOSITORY)
    assert re.search(
        r"^\w+ \S+ \(and 156 more of 157 trainings\): a micro-batch of \d+ rows .* cannot be shared by 3 processes; start 1, 2, .*; "
        r"all 157 trainings allow 1, 2, 4, 8 or 16 processes$",
        said,
    ), said
    many = Settings(device="cuda", split_micro_batches=64)
    said = refusal(due(many, paper(), GPUS["h100"]), many, GPUS["h100"], REPOSITORY)
    assert re.search(
        r"^posttrain .* \(and 115 more of 157 trainings\): settings\.split_micro_batches: 64 does not divide the 16 rows .*; "
        r"all 157 trainings allow split_micro_batches: 1, 2, 4, 8 or 16$",
        said,
    ), said


def test_states_that_pass_from_micro_batch_to_micro_batch_allow_no_parts() -> None:
    arm = {**PASSING, "previous": "micro_batch"}
    stage = stage_of("mamba2", SHAPES["mamba2"], 32, 64, arm, micro_batches=4)
    split = Settings(device="cpu", split_micro_batches=2)
    job = estimate(stage, split, device_of(split, elsewhere=False), Path())
    assert job.refused.startswith("settings.split_micro_batches: 2, but with `previous: micro_batch` ")
    with pytest.raises(FarstateError) as caught:
        trainer._divided(recipe_of(32, 64, micro_batches=4), 64, RunSettings(split_micro_batches=2), params.arm_from_json(arm))
    assert str(caught.value) == job.refused, "the trainer says the same"


def test_what_cannot_fit_is_refused_before_it_is_submitted(tmp_path: Path) -> None:
    settings = Settings(device="cuda", planner=Planner(device="h100"))
    with pytest.raises(
        FarstateError,
        match=r"^\d+ of \d+ trainings do not fit h100 \(80 GB\); the largest is pretrain .*; all of them fit with split_micro_",
    ):
        refuse_what_cannot_fit(paper(), settings, tmp_path, ["reports/fig2.html"])
    refuse_what_cannot_fit(paper(), settings, tmp_path, ["corpus"])
    fitting = settings.model_copy(update={"split_micro_batches": 16})
    refuse_what_cannot_fit(paper(), fitting, tmp_path, ["reports/fig2.html"])
    with pytest.raises(FarstateError, match=r"cannot be shared by 3 processes"):
        refuse_what_cannot_fit(
            paper(), fitting.model_copy(update={"distributed": Distributed(processes=3)}), tmp_path, ["reports/fig2.html"]
        )
    wide = fitting.model_copy(update={"evaluation_rows": 4096})
    with pytest.raises(
        FarstateError,
        match=r"^\d+ of \d+ measurements do not fit h100 .*; all of them fit with evaluation_rows: \d+ in config/settings",
    ) as caught:
        refuse_what_cannot_fit(paper(), wide, tmp_path, ["reports/fig2.html"])
    fewer = int(str(caught.value).partition("evaluation_rows: ")[2].split()[0])
    refuse_what_cannot_fit(paper(), fitting.model_copy(update={"evaluation_rows": fewer}), tmp_path, ["reports/fig2.html"])


def test_every_job_with_a_model_has_a_plan(tmp_path: Path) -> None:
    plan = Plan(params.load(REPOSITORY / "params.yaml"), {})
    device = device_of(Settings(device="cpu"), elsewhere=False)
    jobs = estimates(plan.stages.values(), Settings(device="cpu"), device, tmp_path)
    assert {job.stage.rule for job in jobs} == {"pretrain", "posttrain", "tune", *MEASUREMENTS}
    assert all(job.memory and job.fits and job.parameters for job in jobs)
    assert all(job.hours and job.flops for job in jobs if job.stage.rule in TRAININGS)
    assert {job.model for job in jobs} >= set(plan.params.models)


def test_an_architecture_without_formulas_is_planned_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(HALVED, "gla")
    job = estimate(stage_of("gla", SHAPES["gla"], 8, 64), Settings(), GPUS["h100"], Path())
    assert (job.parameters, job.memory, job.hours, job.fits) == (None, {}, None, True)
    assert job.tokens == 2 * 8 * 64


@cache
def small() -> Plan:
    return Plan(params.load(REPOSITORY / "config/test.yaml"), {})


def asked(what: str, attempt: int, *, elsewhere: bool, **settings: object) -> int:
    asks = Asks(small(), Settings.model_validate(settings), elsewhere=elsewhere, root=REPOSITORY)
    stage = small().of(rule="posttrain")[0]
    return asks.function(what, stage.directory)({}, attempt)


def test_jobs_ask_for_more_at_each_attempt_and_never_for_more_than_the_limit() -> None:
    assert asked("mem_mb", 2, elsewhere=True) == 2 * asked("mem_mb", 1, elsewhere=True)
    assert asked("mem_mb", 9, elsewhere=True) == asked("mem_mb", 3, elsewhere=True) == 3 * asked("mem_mb", 1, elsewhere=True)
    assert asked("mem_mb", 1, elsewhere=True) == 6100, "a GPU job: its process, and a small model's checkpoint"
    assert asked("mem_mb", 1, elsewhere=False, device="cpu") == 1600
    assert asked("runtime", 1, elsewhere=True) == 21
    assert asked("runtime", 3, elsewhere=True) == 63
    assert asked("runtime", 3, elsewhere=True, planner={"longest_job_hours": 1.0}) == 60
    slow = asked("runtime", 1, elsewhere=True, planner={"rate": 1e5, "longest_job_hours": 1000.0})
    assert slow > 60, "a slower device takes longer"


def test_measurements_of_one_job_stay_within_its_limit_together() -> None:
    profile = yaml.safe_load((REPOSITORY / "slurm/config.yaml").read_text())
    groups = dict(given.split("=") for given in profile["groups"])
    components = {name: int(number) for name, _, number in (given.partition("=") for given in profile["group-components"])}
    together = jobs_together(groups, components)
    assert {rule: together[rule] for rule in MEASUREMENTS} == dict.fromkeys(MEASUREMENTS, 4)
    assert together["report"] == 1
    stage = small().of(rule="perplexity")[0]
    for number in (1, 4, 10):
        settings = Settings(planner=Planner(rate=1.0, longest_job_hours=10.0))
        asks = Asks(small(), settings, elsewhere=True, root=REPOSITORY, together={**together, "perplexity": number})
        assert asks.function("runtime", stage.directory)({}, 3) == min(600 // number, 3 * UNKNOWN_MINUTES)


def test_a_training_longer_than_all_attempts_is_warned_of() -> None:
    jobs = due(Settings(), small(), GPUS["h100"], "pretrain")
    hours = max(job.hours for job in jobs if job.hours is not None)
    limited = Settings(planner=Planner(longest_job_hours=hours / 2.5))
    assert too_long(jobs, limited, 2) == ""
    assert re.search(
        r"^warning: pretrain tiny\.s0 is planned for .*: retries: 2 in slurm/config\.yaml", too_long(jobs, limited, 1)
    )


def test_jobs_ask_for_as_many_gpus_as_a_training_has_processes() -> None:
    assert asked("gpu", 1, elsewhere=True) == 1
    assert asked("gpu", 1, elsewhere=False) == 0
    assert asked("gpu", 1, elsewhere=True, device="cpu") == 0
    assert asked("gpu", 1, elsewhere=True, planner={"device": "cpu"}) == 0
    assert asked("gpu", 1, elsewhere=True, distributed={"processes": 4, "nodes": 2}) == 8


def sbatch_of(distributed: Distributed, threads: int) -> str:
    """What the executor would call for a training, from what its rule asks for."""
    plugin = pytest.importorskip("snakemake_executor_plugin_slurm.submit_string")
    from snakemake_executor_plugin_slurm.utils import set_gres_string

    class Resources(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__

    gpus = asked("gpu", 1, elsewhere=True, distributed=distributed.model_dump())
    job = SimpleNamespace(resources=Resources(mem_mb=64_000, runtime=720, gpu=gpus, **over_nodes(distributed)), threads=threads)
    given = {
        "run_uuid": "run",
        "slurm_logfile": "log",
        "comment_str": "it",
        "account": "",
        "partition": " -p gpu",
        "workdir": None,
    }
    return str(plugin.get_submit_command(job, given) + set_gres_string(job))


def test_a_training_on_several_gpus_goes_through_torchrun() -> None:
    alone, one_node, two_nodes = Distributed(), Distributed(processes=4), Distributed(processes=4, nodes=2)
    assert torchrun(alone, 8) == "farstate"
    assert torchrun(one_node, 8) == "torchrun --standalone --nproc-per-node=4 -m farstate"
    assert torchrun(two_nodes, 8).startswith(
        "srun --nodes=2 --ntasks-per-node=1 --cpus-per-task=8 torchrun --nnodes=2 --nproc-per-node=4 "
    )
    for distributed, gpus in ((alone, 1), (one_node, 4), (two_nodes, 8)):
        submitted = sbatch_of(distributed, 8)
        assert f"--gpus={gpus}" in submitted
        assert "--cpus-per-task=8" in submitted
        assert ("--nodes=2" in submitted) == (distributed.nodes == 2)
        assert ("--ntasks=2" in submitted) == (distributed.nodes == 2), submitted
        assert "--ntasks-per-gpu" not in submitted


def test_devices_by_name() -> None:
    h100 = device_of(Settings(planner=Planner(device="h100")), elsewhere=True)
    assert h100.memory == 80e9
    assert h100.reached("bf16-mixed") > 10 * h100.reached("float32")
    measured_rate = device_of(Settings(planner=Planner(device="h100", rate=1e14, memory_gb=94.0)), elsewhere=True)
    assert (measured_rate.memory, measured_rate.reached("float32")) == (94e9, 1e14)
    assert not device_of(Settings(device="cpu"), elsewhere=True).is_gpu
    assert not device_of(Settings(planner=Planner(device="cpu")), elsewhere=True).is_gpu
    assert device_of(Settings(), elsewhere=True).is_gpu
    with pytest.raises(FarstateError, match=r"planner\.device: h100, but with device: cpu no job uses a GPU"):
        device_of(Settings(device="cpu", planner=Planner(device="h100")), elsewhere=True)
    with pytest.raises(FarstateError, match=r"planner\.device: cpu, but with device: cuda every job needs a GPU"):
        device_of(Settings(device="cuda", planner=Planner(device="cpu")), elsewhere=True)
    with pytest.raises(
        FarstateError, match=r"planner\.device: unknown device 'h10' \(did you mean 'h100'\?\); known: auto, cpu, "
    ):
        device_of(Settings(planner=Planner(device="h10")), elsewhere=True)
    assert all(name in str(Planner.model_fields["device"].description) for name in NAMES)


def plan_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys\nfrom farstate.cli import main\n"
        f"sys.argv = ['farstate', 'plan', *{list(arguments)!r}]\n"
        "try:\n    main()\nfinally:\n"
        "    heavy = [name for name in ('torch', 'polars', 'pyarrow', 'transformers') if name in sys.modules]\n"
        "    assert not heavy, heavy\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FARSTATE_")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=kept, text=True, capture_output=True, check=False, timeout=60
    )


def test_the_command_prints_a_table_loads_nothing_heavy_and_refuses() -> None:
    done = plan_command("--configfile", "config/paper.yaml", "--device-rate", "h100")
    assert done.returncode == 1
    assert done.stdout.startswith("Planned for h100 (planner.device: h100): 80 GB")
    assert "does not fit" in done.stdout
    assert "mamba2-125m.context-256" in done.stdout, "nothing is cut off"
    assert done.stderr.startswith("farstate: ")
    assert "trainings do not fit h100 (80 GB); the largest is pretrain mamba2-125m.context-256.s0: " in done.stderr
    assert done.stderr.count("\n") == 1
    here, there = plan_command("fig10"), plan_command("fig10", "--cluster")
    assert (
        "--cluster plans as the jobs of a cluster do" in here.stdout.partition("\n")[0]
        or device_of(Settings(), elsewhere=False).is_gpu
    )
    assert there.stdout.startswith("Planned for a100-40gb (as the jobs of a cluster, planner.device: auto): 40 GB, ")


def test_the_command_as_json_and_for_a_target() -> None:
    done = plan_command("fig10", "--configfile", "config/paper.yaml", "--device-rate", "1e14", "--memory", "1000", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {job["model"] for job in told["jobs"]} == {"rwkv6-70m"}
    pretrain = next(job for job in told["jobs"] if job["rule"] == "pretrain")
    assert pretrain["hours"] == pytest.approx(pretrain["flops"] / 1e14 / 3600)
    assert pretrain["memory_bytes"]["all"] == pytest.approx(
        sum(v for name, v in pretrain["memory_bytes"].items() if name != "all")
    )
    assert plan_command("fig99").stderr.startswith(
        "farstate: 'fig99' is no page, phase or result of these parameters; pages: fig1, "
    )


def test_a_lock_holds_every_package_to_a_checksum() -> None:
    spec = importlib.util.spec_from_file_location("lock", REPOSITORY / "containers/lock.py")
    assert spec is not None
    assert spec.loader is not None
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)

    def item(name: str, **archive: object) -> dict[str, object]:
        return {
            "metadata": {"name": name, "version": "1.0"},
            "download_info": {"url": f"https://index/{name}", "archive_info": archive},
        }

    found = {"install": [item("Zeta_b", hashes={"sha256": "bb"}), item("alpha", hashes={"sha256": "aa"})]}
    assert lock.lines(found) == ["alpha==1.0 --hash=sha256:aa", "zeta-b==1.0 --hash=sha256:bb"]
    with pytest.raises(SystemExit, match=r"alpha==1\.0: the index gives no SHA-256"):
        lock.lines({"install": [item("alpha")]})
