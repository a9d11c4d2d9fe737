"""Keys and the plan: what a change of parameters, code or files moves, and what it leaves."""

from __future__ import annotations

import copy
import html
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import REPOSITORY
from farstate import keys, sources
from farstate.errors import FarstateError
from farstate.grid import snapshot_file, snapshot_tokens
from farstate.keys import Stage
from farstate.params import flatten, merge, read_yaml, validate
from farstate.plan import MEASURES, PAGE_FILES, PHASES, Page, Plan
from farstate.workflow import command_of, refuse_other_parameters, runs_elsewhere, targets_of
from test_params import put


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return read_yaml(REPOSITORY / "config/test.yaml")


@pytest.fixture(scope="module")
def lock() -> dict[str, Any]:
    return sources.read_lock(REPOSITORY / "config/sources.lock")


def plan_of(data: dict[str, Any], lock: dict[str, Any]) -> Plan:
    return Plan(validate(data, "test"), lock)


def control_of(plan: Plan) -> Stage:
    return next(stage for stage in plan.of(rule="posttrain") if stage.name == "tiny.control.s0")


def phases_that_differ(one: Plan, other: Plan) -> set[str]:
    changed = set(other.stages) - set(one.stages)
    return {directory.split("/")[1] for directory in changed}


LATER = {
    "corpus": set(PHASES) - {"tasks"},  # no figure here shows a task (tests/test_task_plan.py has some that do)
    "pretrain": {"pretrain", "posttrain", "evaluate"},
    "posttrain": {"posttrain", "evaluate"},
    "evaluate": {"evaluate"},
    "report": set(),
}
GROUPS = {
    "corpus": "corpus",
    "tokenizer": "corpus",
    "store": "corpus",
    "models": "pretrain",
    "pretrain": "pretrain",
    "posttrain": "posttrain",
    "evaluate": "evaluate",
    "remembrance": "evaluate",
    "states": "evaluate",
    "shift": "evaluate",
    "compare": "evaluate",
    "figures": "evaluate",
    "report": "report",
}


def another(value: Any, key: str) -> Any:
    """A different value that is still allowed."""
    special = {
        "store.dtype": "uint32",
        "corpus.damaged_records": "skip",
        "evaluate.split": "validation",
        "evaluate.streams": "concatenated",
        "evaluate.softmax": "padded",
        "evaluate.documents": 3,
        "posttrain.arms.state_passing.reset_unit": "batch",
        "posttrain.arms.state_passing.previous": "micro_batch",
        "posttrain.stretch_tokens": 320,
        "posttrain.arms.tbtt.at_document_end": "keep",
        "pretrain.block_tokens": 128,
        "figures.fig5.arms": ["base", "control"],
        "models.tiny.context": 32,
        "models.tiny.shape.head_size": 16,
        "models.tiny.shape.width": 32,
        "compare.confidence": 0.9,
        "models.tiny.shape.A_init_range": [1.0, 2.0],
        "report.scale": "demo",
        "report.paper_models": {"tiny": "mamba2-370m"},
        "compare.resamples": 700,
        "pretrain.tokens": 200_000,
        "evaluate.length": 128,
        "posttrain.seeds": [0, 1],
        "posttrain.recipe.betas": [0.8, 0.95],
        "pretrain.recipe.betas": [0.8, 0.95],
    }
    if key in special:
        return special[key]
    if key.endswith("precision"):
        return "bf16-mixed"
    if key.endswith("batch_tokens"):
        return value * 2
    if key.endswith("micro_batches"):
        return 2
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * 0.5
    if isinstance(value, str):
        return value + "x"
    raise AssertionError(f"no other value known for {key} = {value!r}")


SKIPPED = {
    "corpus.sources": "a list, tested below",
    "tokenizer.kind": "needs other keys beside it",
    "models.tiny.architecture": "there is one",
    "figures.fig5.models": "there is one",
    "figures.fig5.steps": "moves post-training, tested below",
    "figures.fig5.length": "tested below",
    "figures.fig5.seeds": "tested below",
}


def leaves() -> list[str]:
    found = flatten(read_yaml(REPOSITORY / "config/test.yaml"))
    # What no figure here measures moves nothing (tests/test_runs.py has figures that do).
    found = {key: value for key, value in found.items() if key.split(".")[0] not in (*MEASURES, "tasks")}
    return [key for key in found if key not in SKIPPED and not key.endswith("initial_state")]


@pytest.mark.parametrize("key", leaves())
def test_each_parameter_moves_exactly_the_phases_that_depend_on_it(key: str, data: dict[str, Any], lock: dict[str, Any]) -> None:
    before = plan_of(data, lock)
    after = plan_of(put(data, key, another(flatten(data)[key], key)), lock)
    group = GROUPS[key.split(".")[0]]
    assert phases_that_differ(before, after) == LATER[group]
    assert before.pages["fig5"].wanted() != after.pages["fig5"].wanted(), "the page must be drawn again"


BY_MODEL = {
    "pretrain.by_model.tiny.block_tokens": (128, "pretrain"),
    "pretrain.by_model.tiny": ({"tokens": 200_000}, "pretrain"),
    "pretrain.by_model": ({"tiny": {"recipe": {"peak_learning_rate": 1e-3}}}, "pretrain"),
    "posttrain.by_model": ({"tiny": {"recipe": {"weight_decay": 0.0}, "steps": 30}}, "posttrain"),
    "figures.fig5.steps": (30, "posttrain"),
    "figures.fig5.length": (128, "evaluate"),
    "figures.fig5.seeds": ([3], "posttrain"),
}


@pytest.mark.parametrize("key", BY_MODEL)
def test_values_of_single_models_and_figures_move_the_phases_they_belong_to(
    key: str, data: dict[str, Any], lock: dict[str, Any]
) -> None:
    value, group = BY_MODEL[key]
    before, after = plan_of(data, lock), plan_of(merge(data, nested(key, value)), lock)
    assert phases_that_differ(before, after) == LATER[group]


def test_a_models_own_steps_go_before_a_figures(data: dict[str, Any], lock: dict[str, Any]) -> None:
    both = merge(data, {"figures": {"fig5": {"steps": 30}}, "posttrain": {"by_model": {"tiny": {"steps": 40}}}})
    assert control_of(plan_of(both, lock)).params["steps"] == 40


def test_only_what_a_figure_shows_is_planned_and_figures_share_it(data: dict[str, Any], lock: dict[str, Any]) -> None:
    one = plan_of(data, lock)
    other = {**data["models"]["tiny"], "context": 8}
    same = {"models": ["tiny"], "arms": ["base", "control"], "remembrance": False}
    two = plan_of(merge(data, {"models": {"unused": other}, "figures": {"fig1": same}}), lock)
    assert set(two.stages) - set(one.stages) == {stage.directory for stage in two.pages["fig1"].shown}
    assert set(two.pages) == {"fig1", "fig5"}


def test_models_with_other_snapshots_have_a_rule_of_their_own(data: dict[str, Any], lock: dict[str, Any]) -> None:
    assert [*plan_of(data, lock).budgets] == ["pretrain"]
    more = {
        "models": {"long": data["models"]["tiny"], "alike": data["models"]["tiny"]},
        "pretrain": {"by_model": {"long": {"tokens": 300_000}, "alike": {"tokens": 110_000}}},
        "figures": {"fig5": {"models": ["tiny", "long", "alike"]}},
    }
    plan = plan_of(merge(data, more), lock)
    assert {name: budget["models"] for name, budget in plan.budgets.items()} == {
        "pretrain": ["tiny", "alike"],
        "pretrain_2": ["long"],
    }
    for budget in plan.budgets.values():
        for model in budget["models"]:
            assert set(budget["snapshots"].values()) < set(
                next(s for s in plan.of(rule="pretrain") if s.name == f"{model}.s0").files
            )


def test_pages_that_no_figure_asks_for_are_moved_away(tmp_path: Path, data: dict[str, Any], lock: dict[str, Any]) -> None:
    (tmp_path / "reports").mkdir()
    for name in ("fig1.html", "fig5.html", "notes.txt"):
        (tmp_path / "reports" / name).write_text(name)
    assert plan_of(data, lock).supersede(tmp_path, "report") == ["fig1.html"]
    assert sorted(path.name for path in (tmp_path / "reports").iterdir()) == ["fig5.html", "notes.txt"]
    assert (tmp_path / ".superseded/reports/fig1.html").exists()


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    result: dict[str, Any] = value
    return result


def test_every_group_of_parameters_is_named_by_its_dvc_stage() -> None:
    """What DVC compares and what enters the keys of a phase are the same groups."""
    stages = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
    named: dict[str, set[str]] = {}
    for stage, content in stages.items():
        for group in content["params"]:
            named.setdefault(group, set()).add(stage)
    expected = {group: {stage} for group, stage in GROUPS.items()}
    # Models are trained on a task from random weights, or from the arms' initial states, without pre- or post-training them.
    expected |= {"models": {"pretrain", "tasks"}, "posttrain": {"posttrain", "tasks"}, "tasks": {"tasks", "evaluate"}}
    # Which models are trained is decided by the figures that show them.
    assert named == expected | {"figures": {"pretrain", "posttrain", "tasks", "evaluate"}}


def test_a_new_arm_adds_runs_and_moves_none(data: dict[str, Any], lock: dict[str, Any]) -> None:
    before = plan_of(data, lock)
    louder = put(data, "posttrain.arms.loud", {"initial_state": "random_noise", "sigma": 3.0})
    assert set(plan_of(louder, lock).stages) == set(before.stages), "no figure shows it"
    after = plan_of(put(louder, "figures.fig5.arms", [*data["figures"]["fig5"]["arms"], "loud"]), lock)
    added = {name.split("/")[2].rsplit("-", 1)[0] for name in set(after.stages) - set(before.stages)}
    assert added == {"tiny.loud.s0", "perplexity.tiny.loud.s0", "fig5"}


def test_one_arms_parameter_moves_only_that_arm(data: dict[str, Any], lock: dict[str, Any]) -> None:
    before = plan_of(data, lock)
    after = plan_of(put(data, "posttrain.arms.random_noise.sigma", 0.7), lock)
    moved = {name.split("/")[2].rsplit("-", 1)[0] for name in set(after.stages) - set(before.stages)}
    assert moved == {"tiny.random_noise.s0", "perplexity.tiny.random_noise.s0", "fig5"}


def test_numerics_versions_move_the_stages_that_use_them(
    data: dict[str, Any], lock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = plan_of(data, lock)
    expected = {"evaluation": {"evaluate"}, "training": LATER["pretrain"], "ops": LATER["pretrain"], "corpus": LATER["corpus"]}
    for module, phases in expected.items():
        with monkeypatch.context() as patch:
            patch.setitem(keys.NUMERICS, module, 99)
            assert phases_that_differ(before, plan_of(data, lock)) == phases, module


def test_keys_do_not_depend_on_the_order_of_keys_or_on_integers_for_floats(data: dict[str, Any], lock: dict[str, Any]) -> None:
    shuffled = json.loads(json.dumps(data, sort_keys=True))
    shuffled["pretrain"]["recipe"]["gradient_clip"] = 1
    assert set(plan_of(shuffled, lock).stages) == set(plan_of(data, lock).stages)


def test_content_of_outside_inputs_enters_the_key(data: dict[str, Any], lock: dict[str, Any]) -> None:
    before = plan_of(data, lock)
    other = copy.deepcopy(lock)
    other["files:tests/data/corpus.jsonl"]["files"][0]["sha256"] = "0" * 64
    assert phases_that_differ(before, plan_of(data, other)) == LATER["corpus"]
    unregistered = plan_of(data, {})
    assert unregistered.documents[0].params["content"] == "unregistered"


def test_snapshots_are_one_grid() -> None:
    assert snapshot_tokens(65_536) == []
    assert snapshot_tokens(300_000) == [65_536, 131_072, 262_144]
    assert set(snapshot_tokens(1_000_000)) < set(snapshot_tokens(10**9))
    assert snapshot_file(65_536) == "snapshot-000000065536.safetensors"


# --- registering ------------------------------------------------------------------------------------------


def test_register_and_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text, lockfile = Path("a.txt"), Path("config/sources.lock")
    text.write_text("one two three")
    outside = sources.Outside("files", "*.txt")
    with pytest.raises(FarstateError, match="farstate register"):
        sources.check(outside, path=lockfile)
    sources.register(outside, path=lockfile)
    sources.check(outside, path=lockfile)
    os.utime(text, ns=(5, 5))
    sources.check(outside, path=lockfile)  # another date, the same content
    text.write_text("one two four!")  # the same size
    os.utime(text, ns=(5, 5))  # and the date that was seen: only the checksum tells
    sources.check(outside, path=lockfile)
    with pytest.raises(FarstateError, match=r"a\.txt: its content"):
        sources.check(outside, path=lockfile, verify=True)
    os.utime(text, ns=(6, 6))
    with pytest.raises(FarstateError, match=r"a\.txt: its content"):
        sources.check(outside, path=lockfile)
    Path("b.txt").write_text("more")
    with pytest.raises(FarstateError, match=r"b\.txt: matches '\*\.txt' but is not registered"):
        sources.check(outside, path=lockfile)
    Path("b.txt").unlink()
    text.unlink()
    with pytest.raises(FarstateError, match=r"a\.txt: registered .* but missing"):
        sources.check(outside, path=lockfile)
    with pytest.raises(FarstateError, match="no file matches"):
        sources.register(sources.Outside("files", "none/*.txt"), path=lockfile)


def test_a_hub_name_that_cannot_be_reached_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no route")))
    with pytest.raises(FarstateError, match=r"someone/model: neither a local path nor reachable .* local path"):
        sources.register(sources.Outside("checkpoint", "someone/model"), path=tmp_path / "lock")
    assert not (tmp_path / "lock").exists()


# --- pages, superseding, restoring ------------------------------------------------------------------------


def make_page(root: Path, page: Page, carried: dict[str, Any]) -> None:
    for kind in PAGE_FILES:
        path = root / page.outputs[kind]
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    text = html.escape(json.dumps(carried), quote=True)
    (root / page.outputs["html"]).write_text(f'<head><meta name="farstate-keys" content="{text}"></head>')


def test_a_page_that_carries_the_wanted_keys_is_newer_than_its_manifest(
    tmp_path: Path, data: dict[str, Any], lock: dict[str, Any]
) -> None:
    plan = plan_of(data, lock)
    page = plan.pages["fig5"]
    make_page(tmp_path, page, page.wanted())
    for kind in PAGE_FILES:  # pulled pages have arbitrary dates
        os.utime(tmp_path / page.outputs[kind], (1000, 1000))
    plan.write_pages(tmp_path)
    assert (tmp_path / page.manifest).stat().st_mtime < 1000
    make_page(tmp_path, page, {"figure": "fig5", "comparison": "results/evaluate/fig5-00000000"})
    plan.write_pages(tmp_path)
    assert (tmp_path / page.manifest).stat().st_mtime >= (tmp_path / page.outputs["html"]).stat().st_mtime - 1


def test_superseded_results_come_back(tmp_path: Path, data: dict[str, Any], lock: dict[str, Any]) -> None:
    old, new = plan_of(data, lock), plan_of(put(data, "posttrain.steps", 21), lock)
    stage = control_of(old)
    for path in stage.outputs:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
    (tmp_path / "results/posttrain/notes").mkdir()
    assert new.supersede(tmp_path, "posttrain") == [stage.directory.split("/")[2]]
    assert not (tmp_path / stage.directory).exists()
    assert (tmp_path / "results/posttrain/notes").exists(), "only results are moved"
    assert new.restore(tmp_path) == []
    assert old.restore(tmp_path) == [stage.directory]
    assert (tmp_path / stage.manifest).exists()


def test_a_finished_result_is_never_given_up_for_an_unfinished_one(
    tmp_path: Path, data: dict[str, Any], lock: dict[str, Any]
) -> None:
    old, new = plan_of(data, lock), plan_of(put(data, "posttrain.steps", 21), lock)
    stage = control_of(old)
    away = tmp_path / ".superseded/posttrain" / stage.directory.split("/")[2]
    away.mkdir(parents=True)
    (away / "manifest.json").write_text("{}")
    home = tmp_path / stage.directory
    home.mkdir(parents=True)
    (home / "model.safetensors").write_text("half")
    new.supersede(tmp_path, "posttrain")
    assert (away / "manifest.json").exists()
    home.mkdir(parents=True)
    assert old.restore(tmp_path) == [stage.directory]
    assert (home / "manifest.json").exists()


def test_two_sets_of_parameters_have_two_page_manifests(data: dict[str, Any], lock: dict[str, Any]) -> None:
    one, other = plan_of(data, lock).pages["fig5"], plan_of(put(data, "compare.tolerance", 0.5), lock).pages["fig5"]
    assert one.manifest != other.manifest


def test_what_snakemake_was_called_for() -> None:
    assert command_of(["snakemake", "reports/fig5.html"]) == "run"
    assert (
        command_of(["snakemake", "-n"]) == command_of(["snakemake", "-np"]) == command_of(["snakemake", "--dry-run"]) == "dry run"
    )
    assert command_of(["snakemake", "--lint"]) == command_of(["snakemake", "--rulegraph", "dot"]) == "look"
    assert not runs_elsewhere(["snakemake", "-n"], {})
    assert runs_elsewhere(["snakemake", "--executor", "slurm"], {})
    assert runs_elsewhere(["snakemake", "--profile", str(REPOSITORY / "slurm")], {})
    assert runs_elsewhere(["snakemake"], {"SNAKEMAKE_PROFILE": str(REPOSITORY / "slurm")})
    assert runs_elsewhere(["snakemake", "--workflow-profile", str(REPOSITORY / "slurm")], {})
    assert not runs_elsewhere(["snakemake", "--profile", str(REPOSITORY / "slurm"), "--executor", "local"], {})


def test_a_job_of_other_parameters_is_refused_in_one_line(data: dict[str, Any], lock: dict[str, Any]) -> None:
    def job(key: str) -> list[str]:
        return ["snakemake", "--mode", "remote", "--target-jobs", f"posttrain:model=tiny,arm=control,seed=0,key={key}"]

    plan = plan_of(data, lock)
    refuse_other_parameters(plan, job(plan.of(rule="posttrain")[0].directory[-8:]))
    refuse_other_parameters(plan, ["snakemake", "--target-jobs", "report:figure=fig5"])
    with pytest.raises(
        FarstateError, match=r"^posttrain with key 00000000: no current parameter asks for this .* after Snakemake was"
    ):
        refuse_other_parameters(plan, job("00000000"))


def test_what_snakemake_was_asked_for() -> None:
    assert targets_of(["snakemake", "-n", "--config", 'evaluate={"length": 8}', "recompute=true"]) == []
    assert targets_of(["snakemake", "reports/fig5.html", "corpus", "--configfile", "config/paper.yaml"]) == [
        "corpus",
        "reports/fig5.html",
    ]
    assert targets_of(["snakemake", "--profile", "slurm", "--slurm-logdir", "logs", "corpus", "-j", "3"]) == ["corpus"]


def test_an_unfinished_superseded_result_stays_away(tmp_path: Path, data: dict[str, Any], lock: dict[str, Any]) -> None:
    plan = plan_of(data, lock)
    stage = control_of(plan)
    away = tmp_path / ".superseded/posttrain" / stage.directory.split("/")[2]
    away.mkdir(parents=True)
    (away / "model.safetensors").write_text("half")
    assert plan.restore(tmp_path) == []
