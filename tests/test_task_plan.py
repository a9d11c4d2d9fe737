"""Which stages the figures of the tasks ask for, what a change of their parameters moves, and what cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY
from farstate.errors import FarstateError
from farstate.params import flatten, load, merge, read_yaml, validate
from farstate.plan import Plan
from farstate.sources import read_lock
from test_params import put
from test_plan import phases_that_differ

FIG5 = {"models": ["tiny"], "arms": ["base", "control"]}
TASK_FIGURES = ("fig6", "fig7", "table1")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    both = merge(read_yaml(REPOSITORY / "config/test.yaml"), read_yaml(REPOSITORY / "config/test_figures.yaml"))
    return {**both, "figures": {name: both["figures"][name] for name in TASK_FIGURES}}


def plan_of(data: dict[str, Any]) -> Plan:
    return Plan(validate(data, "test"), read_lock(REPOSITORY / "config/sources.lock"))


def names(plan: Plan, rule: str) -> set[str]:
    return {stage.name for stage in plan.of(rule=rule)}


def moved(before: Plan, after: Plan) -> set[str]:
    """Rules of the stages that are new."""
    return {after.stages[directory].rule for directory in set(after.stages) - set(before.stages)}


def test_the_figures_ask_for_these_models(data: dict[str, Any]) -> None:
    plan = plan_of(data)
    assert names(plan, "tune") == {
        "model.tiny.context-256.base.babilong.control.s0",
        "model.tiny.context-256.state_passing.babilong.control.s0",
        "model.tiny.context-256.fitted_noise.passkey.s0",
        "model.tiny.control.copying.s0",
        "model.tiny.state_passing.copying.s0",
    }
    assert names(plan, "posttrain") == {"tiny.context-256.state_passing.s0"}, "the others are trained on their task alone"
    assert names(plan, "pretrain") == {"tiny.context-256.s0"}, "copying begins from random weights"
    copying = next(stage for stage in plan.of(rule="tune") if "copying" in stage.name)
    assert set(copying.upstream) == {"data"}
    assert copying.params["shape"]["width"] == 16
    by_prompting = {(s.params["labels"]["arm"], s.params["labels"]["prompting"]) for s in plan.of(rule="task")}
    assert by_prompting == {
        *(("base", how) for how in ("few_shot", "fine_tuned", "zero_shot")),
        *(("state_passing", how) for how in ("few_shot", "fine_tuned", "trained")),
        ("fitted_noise", "fine_tuned"),
        ("control", "trained"),
    }


def test_jobs_are_one_a_model_or_one_a_cell(data: dict[str, Any]) -> None:
    passkey = [stage for stage in plan_of(data).of(rule="task") if stage.params["task"] == "passkey"]
    assert len(passkey) == 2 * 4
    assert "task.passkey.tiny.context-256.base.zero_shot.s0.passkey-128-0.1" in {stage.name for stage in passkey}
    together = plan_of(put(data, "tasks.passkey.jobs", "model"))
    assert len([stage for stage in together.of(rule="task") if stage.params["task"] == "passkey"]) == 2
    cells = [stage.params["cells"] for stage in together.of(rule="task_data") if stage.name == "data.passkey.test"]
    assert cells == [[{"task": "passkey", "length": n, "depth": d} for n in (128, 192) for d in (0.1, 0.9)]]


def test_every_cell_of_the_paper_is_planned_on_its_own() -> None:
    plan = Plan(load(REPOSITORY / "config/paper.yaml"), read_lock(REPOSITORY / "config/sources.lock"))
    counts: dict[str, int] = {}
    for stage in plan.of(rule="task"):
        (data,) = stage.upstream["data"]
        assert len(data.params["cells"]) == 1
        counts[stage.params["task"]] = counts.get(stage.params["task"], 0) + 1
    assert counts["babilong"] == 4 * 2 * 10 * 10, "arms, promptings, tasks, lengths"
    assert counts["passkey"] == 2 * 4 * 8 * 3, "models, arms, lengths, depths"
    assert counts["copying"] == 2 * 3 * 5, "arms, seeds, lengths"


MOVES = {
    "tasks.passkey.examples": {"task_data", "task", "compare_task"},
    "tasks.passkey.keys": {"task_data", "tune", "task", "compare_task"},
    "tasks.passkey.training.examples": {"task_data", "tune", "task", "compare_task"},
    "tasks.passkey.training.rest_weight": {"tune", "task", "compare_task"},
    "tasks.passkey.training.packing": {"tune", "task", "compare_task"},
    "tasks.passkey.training.recipe.peak_learning_rate": {"tune", "task", "compare_task"},
    "tasks.passkey.precision": {"task", "compare_task"},
    "tasks.passkey.lengths": {"task_data", "task", "compare_task"},
    "tasks.babilong.max_new_tokens": {"task", "compare_task"},
    "tasks.babilong.shots": {"task_data", "task", "compare_task"},
    "tasks.babilong.facts": {"task_data", "tune", "task", "compare_task"},
    "tasks.babilong.mixture": {"task_data", "tune", "task", "compare_task"},
    "tasks.babilong.training_lengths": {"task_data", "tune", "task", "compare_task"},
    "tasks.copying.alphabet": {"task_data", "tune", "task", "compare_task"},
    "tasks.copying.training_lengths": {"task_data", "tune", "task", "compare_task"},
    "posttrain.arms.fitted_noise.beta": {"tune", "task", "compare_task"},
    "compare.confidence": {"compare_task"},
    "compare.tolerance": set(),
}
VALUES = {
    "tasks.passkey.keys": [10, 98],
    "tasks.passkey.training.packing": "packed",
    "tasks.passkey.precision": "bf16-mixed",
    "tasks.passkey.lengths": [128, 200],
    "tasks.babilong.facts": [2, 3],
    "tasks.babilong.mixture": {"qa1": 2, "qa6": 1},
    "tasks.babilong.training_lengths": "uniform",
    "tasks.copying.alphabet": "abcde",
    "tasks.copying.training_lengths": [3, 7],
    "tasks.passkey.training.rest_weight": 0.5,
    "compare.confidence": 0.9,
}


@pytest.mark.parametrize("key", MOVES)
def test_a_parameter_moves_exactly_what_depends_on_it(key: str, data: dict[str, Any]) -> None:
    value = VALUES.get(key, flatten(data)[key] * 2 if key in flatten(data) else None)
    before, after = plan_of(data), plan_of(put(data, key, value))
    assert moved(before, after) == MOVES[key]
    assert phases_that_differ(before, after) <= {"tasks", "evaluate"}


def test_few_shot_answers_do_not_depend_on_the_training(data: dict[str, Any]) -> None:
    before, after = plan_of(data), plan_of(put(data, "tasks.babilong.training.examples", 32))
    again = {stage.name for directory, stage in after.stages.items() if directory not in before.stages}
    assert not any("few_shot" in name for name in again)


def test_published_sets_enter_the_key_by_content_and_must_be_registered(data: dict[str, Any]) -> None:
    published = {"hub": "RMT-team/babilong", "files": None, "lengths": ["0k", "4k"]}
    plan = plan_of(put(data, "tasks.babilong.published", published))
    assert [outside.name for outside in plan.outside()][-1] == "hub:RMT-team/babilong"
    sets = next(stage for stage in plan.of(rule="task_data") if stage.name == "data.babilong.0-shot.test")
    assert sets.params["content"] == "unregistered"
    assert {cell["set"] for cell in sets.params["cells"]} == {"0k", "4k"}
    lock = {"hub:RMT-team/babilong": {"revision": "abc"}}
    registered = Plan(validate(put(data, "tasks.babilong.published", published), "test"), lock)
    other = next(stage for stage in registered.of(rule="task_data") if stage.name == "data.babilong.0-shot.test")
    assert other.params["content"] == {"revision": "abc"}
    assert other.key != sets.key
    local = {"hub": None, "files": "data/babilong", "lengths": ["0k"]}
    swapped = [{"files": [{"path": f"data/babilong/qa1/{name}.json", "sha256": sha} for name, sha in pairs]}
               for pairs in ((("0k", "aa"), ("1k", "bb")), (("1k", "aa"), ("2k", "bb")))]  # fmt: skip
    keys = {
        stage.key
        for entry in swapped
        for stage in Plan(validate(put(data, "tasks.babilong.published", local), "test"), {"files:data/babilong/**": entry}).of(
            rule="task_data"
        )
        if stage.name == "data.babilong.0-shot.test"
    }
    assert len(keys) == 2, "a file that was renamed is another set"
    assert plan_of(put(data, "tasks.babilong.published", local)).outside()[-1].name == "files:data/babilong/**"


REFUSED = {
    "depth": (
        "tasks.passkey.depths",
        [0.1, 1.5],
        "tasks.passkey.depths[1]: 1.5 is out of range; input should be less than or equal to 1",
    ),
    "keys beyond all": ("tasks.passkey.keys", [0, 10**30], "tasks.passkey.keys[1]: "),
    "lengths beyond all": ("tasks.babilong.lengths", [10**12], "tasks.babilong.lengths[0]: 1000000000000 is out of range"),
    "a set under two names": (
        "tasks.babilong.published",
        {"hub": "x/y", "files": None, "lengths": ["1M", "1024k"]},
        "tasks.babilong.published: '1048576' is named twice",
    ),
    "keys": ("tasks.passkey.keys", [99, 10], "tasks.passkey: the lowest of keys, 99, is not below the highest, 10"),
    "facts": ("tasks.babilong.facts", [5, 3], "tasks.babilong: the fewest facts, 5, are more than the most, 3"),
    "a task": ("tasks.babilong.tasks", ["qa11"], "tasks.babilong.tasks[0]: 'qa11' is not allowed"),
    "mixture": ("tasks.babilong.mixture", {"qa20": 1}, "tasks.babilong.mixture"),
    "two origins": (
        "tasks.babilong.published",
        {"hub": "x/y", "files": "z", "lengths": ["0k"]},
        "tasks.babilong.published: give exactly one of hub and files",
    ),
    "a set's name": (
        "tasks.babilong.published",
        {"hub": "x/y", "files": None, "lengths": ["4096"]},
        "tasks.babilong.published.lengths[0]: '4096' is",
    ),
    "alphabet": (
        "tasks.copying.alphabet",
        "abc.",
        "tasks.copying: the alphabet 'abc.' has a letter twice, or what is neither letter nor digit",
    ),
    "strings and rows": (
        "tasks.copying.training_lengths",
        [2, 9],
        "tasks.copying.training_lengths: a string of 9 letters is a row of 20 tokens, more than models.tiny.context = 16",
    ),
    "batch": (
        "tasks.copying.training.recipe.batch_tokens",
        500,
        "tasks.copying.training.recipe.batch_tokens: 500 is not a multiple of models.tiny.context × micro_batches = 16",
    ),
    "too few examples": (
        "tasks.copying.training.examples",
        3,
        "tasks.copying.training.examples: 3 do not fill one batch of 32 rows",
    ),
    "context": (
        "figures.fig6.context",
        384,
        "tasks.babilong.training.recipe.batch_tokens: 1024 is not a multiple of figures.fig6.context × micro_batches = 384",
    ),
    "stretch": ("posttrain.stretch_tokens", 100, "posttrain.stretch_tokens: 100 is below figures.fig6.context = 256"),
    "base of a copying model": ("figures.table1.arms", ["base"], "figures.table1.arms: 'base' is not among them"),
    "no base": ("figures.fig7.arms", ["control"], "figures.fig7.arms: 'base' must be among them"),
    "tbtt": ("figures.fig7.arms", ["base", "tbtt"], "figures.fig7.arms: 'tbtt' passes states along a document"),
    "an arm": (
        "figures.table1.arms",
        ["contrl"],
        "figures.table1.arms: 'contrl' is not in posttrain.arms (did you mean 'control'?)",
    ),
    "no section": ("tasks.passkey", None, "tasks.passkey: missing, and figures.fig7 shows it"),
    "a misspelt key": ("tasks.passkey.depth", [0.5], "tasks.passkey.depth: unknown parameter (did you mean 'depths'?)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_one_line(case: str, data: dict[str, Any]) -> None:
    key, value, message = REFUSED[case]
    with pytest.raises(FarstateError) as error:
        validate(put(data, key, value), "test")
    assert message in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


def test_a_published_checkpoint_keeps_its_context(data: dict[str, Any]) -> None:
    published = {"architecture": "mamba2", "context": 256, "checkpoint": "state-spaces/mamba2-130m"}
    more = {"models": {"published": published}, "posttrain": {"recipe": {"batch_tokens": 1024}}}
    for figure, message in (("fig7", r"figures\.fig7\.context: 'published' is a published checkpoint"),
                            ("table1", r"figures\.table1\.models: 'published' is a published checkpoint")):  # fmt: skip
        with pytest.raises(FarstateError, match=message):
            validate(merge(data, {**more, "figures": {figure: {"models": ["published"]}}}), "test")
    plan = plan_of(merge(data, {**more, "figures": {"fig7": {"models": ["published"], "context": None}}}))
    assert "model.published.fitted_noise.passkey.s0" in names(plan, "tune")


def test_a_phase_without_results_leaves_a_folder_for_dvc(tmp_path: Path, data: dict[str, Any]) -> None:
    """DVC fails on an output that is not there; most figures have no task."""
    plan = Plan(validate({**data, "figures": {"fig5": FIG5}}, "test"), read_lock(REPOSITORY / "config/sources.lock"))
    assert not plan.of(phase="tasks")
    assert plan.supersede(tmp_path, "tasks") == []
    assert (tmp_path / "results/tasks").is_dir()
