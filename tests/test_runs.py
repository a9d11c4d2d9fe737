"""Which runs a figure asks for: names, what is shared, the series of a varied quantity; what cannot be drawn is refused."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import REPOSITORY
from farstate.errors import FarstateError
from farstate.params import Params, flatten, merge, read_yaml, validate
from farstate.plan import MEASURES, Plan
from farstate.runs import CONTEXT_AXIS, RATE_AXIS, RESET_AXIS, SIGMA_AXIS, STEPS_AXIS, TOKENS_AXIS, WARMUP_AXIS, runs_of
from farstate.sources import read_lock
from test_params import put
from test_plan import phases_that_differ


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return merge(read_yaml(REPOSITORY / "config/test.yaml"), read_yaml(REPOSITORY / "config/test_figures.yaml"))


@pytest.fixture(scope="module")
def params(data: dict[str, Any]) -> Params:
    return validate(data, "test")


def plan_of(data: dict[str, Any]) -> Plan:
    return Plan(validate(data, "test"), read_lock(REPOSITORY / "config/sources.lock"))


def names(params: Params, figure: str) -> list[tuple[str, str, int | None]]:
    runs, _ = runs_of(params, params.figures.given()[figure])
    return [tuple(run.labels.values()) for run in runs]


def series(params: Params, figure: str) -> list[tuple[str, str, str, float]]:
    _, found = runs_of(params, params.figures.given()[figure])
    return [(one.axis, one.model, one.arm, one.value) for one in found]


def test_a_variant_that_changes_nothing_has_the_plain_name(params: Params) -> None:
    assert names(params, "fig2") == [("tiny.context-8", "base", 0), ("tiny", "base", 0)]
    assert names(params, "fig12") == [
        ("tiny", "base", 0),
        ("tiny", "control", 0),
        ("tiny", "random_noise", 0),
        ("tiny", "random_noise-sigma-1", 0),
    ]


def test_series_of_every_figure_that_varies_something(params: Params) -> None:
    assert series(params, "fig2") == [(CONTEXT_AXIS, "tiny.context-8", "base", 8), (CONTEXT_AXIS, "tiny", "base", 16)]
    assert series(params, "fig3") == [
        (TOKENS_AXIS, "tiny", "snapshot_65536", 65536),
        (TOKENS_AXIS, "tiny", "base", 99840),
    ], "the last whole batch of the budget ends the schedule"
    assert series(params, "fig11") == [
        (WARMUP_AXIS, "tiny.tokens-10000", "base", 0.1),
        (WARMUP_AXIS, "tiny.warmup-0.25.tokens-10000", "base", 0.25),
    ]
    assert names(params, "fig11") == [
        (model, "base", seed) for model in ("tiny.tokens-10000", "tiny.warmup-0.25.tokens-10000") for seed in (0, 1)
    ], "seeds of the pre-training"
    assert series(params, "fig12") == [
        (SIGMA_AXIS, "tiny", "random_noise", 0.1),
        (SIGMA_AXIS, "tiny", "random_noise-sigma-1", 1.0),
    ]
    assert series(params, "cost") == [
        (STEPS_AXIS, "tiny", "state_passing-steps-5", 5),
        (STEPS_AXIS, "tiny", "state_passing", 20),
        (RESET_AXIS, "tiny", "state_passing", 0.1),
        (RESET_AXIS, "tiny", "state_passing-reset_probability-0p5", 0.5),
    ], "the usual value is part of each sweep; a rate was not asked for"


@pytest.mark.parametrize("warmups", [[0.1, 0.25], [0.25, 0.1]])
def test_warmups_are_paired_with_the_shortest(warmups: list[float], data: dict[str, Any]) -> None:
    plan = plan_of(put(data, "figures.fig11.warmups", warmups))
    (comparison,) = plan.pages["fig11"].inputs["comparison"]
    assert comparison.params["figure"]["pairs"] == [
        {
            "model": "tiny.warmup-0.25.tokens-10000",
            "arm": "base",
            "against_model": "tiny.tokens-10000",
            "against_arm": "base",
        }
    ]


def test_rates_are_varied_one_at_a_time(data: dict[str, Any]) -> None:
    params = validate(put(data, "figures.cost.vary_peak_learning_rate", [3.0e-4, 1.5e-3]), "test")
    assert [one for one in series(params, "cost") if one[0] == RATE_AXIS] == [
        (RATE_AXIS, "tiny", "state_passing-rate-0p0003", 0.0003),
        (RATE_AXIS, "tiny", "state_passing", 0.0015),
    ]


def test_all_figures_together_train_only_what_they_do_not_share(data: dict[str, Any]) -> None:
    plan = plan_of(data)
    trained = sorted(stage.name for rule in ("pretrain", "posttrain") for stage in plan.of(rule=rule))
    assert trained == sorted(
        [
            *("tiny.s0", "tiny.context-8.s0"),
            *("tiny.context-256.s0", "tiny.context-256.state_passing.s0"),  # of Figures 6 and 7
            *("tiny.tokens-10000.s0", "tiny.tokens-10000.s1"),
            *("tiny.warmup-0.25.tokens-10000.s0", "tiny.warmup-0.25.tokens-10000.s1"),
            *(f"tiny.{arm}.s0" for arm in ("control", "random_noise", "fitted_noise", "state_passing", "tbtt")),
            *("tiny.control.s0", "tiny.random_noise.s0", "tiny.random_noise-sigma-1.s0"),  # of Figure 12's 5 steps
            *("tiny.state_passing-steps-5.s0", "tiny.state_passing-reset_probability-0p5.s0"),
        ]
    )
    keys = [stage.key for stage in plan.stages.values() if not stage.rule.startswith("compare")]  # named by their figure
    assert len(set(keys)) == len(keys), "the same content under two names"


def test_figures_share_their_measurements(data: dict[str, Any]) -> None:
    plan = plan_of(data)
    assert len(plan.of(rule="states")) == 2, "Figures 4 and 9"
    with_first = plan_of(put(data, "figures.fig1", {"models": ["tiny"], "arms": ["base", "state_passing"]}))
    assert len(with_first.of(rule="remembrance")) == len(plan.of(rule="remembrance")) == 2, "Figures 1 and 13"
    assert set(with_first.pages["fig1"].inputs) == {"comparison", "remembrance"}
    without = plan_of(put(data, "figures.fig1", {"models": ["tiny"], "arms": ["base", "state_passing"], "remembrance": False}))
    assert set(without.pages["fig1"].inputs) == {"comparison"}


def test_a_snapshot_is_measured_from_the_training_it_was_taken_in(data: dict[str, Any]) -> None:
    plan = plan_of(data)
    (stage,) = [s for s in plan.of(rule="perplexity") if s.params.get("snapshot")]
    assert stage.params["snapshot"] == 65536
    assert [s.name for s in stage.upstream["checkpoint"]] == ["tiny.s0"]
    assert any(file.endswith("snapshot-000000065536.safetensors") for file in stage.upstream["checkpoint"][0].outputs)


def test_snapshots_that_a_shorter_training_has_not_are_named_as_absent(data: dict[str, Any]) -> None:
    longer = {"models": {"long": data["models"]["tiny"]}, "pretrain": {"by_model": {"long": {"tokens": 150_000}}}}
    plan = plan_of(merge(merge(data, longer), {"figures": {"fig3": {"models": ["long", "tiny"]}}}))
    (comparison,) = plan.pages["fig3"].inputs["comparison"]
    assert comparison.params["figure"] == {
        "models": ["long", "tiny"],
        "arms": ["snapshot_65536", "snapshot_131072", "base"],
        "absent": [{"model": "tiny", "arm": "snapshot_131072"}],
    }


def test_a_shift_knows_the_training_whose_states_it_meets_again(data: dict[str, Any]) -> None:
    by_arm = {s.params["labels"]["arm"]: s.params["training"] for s in plan_of(data).of(rule="shift")}
    assert by_arm["base"] is None
    assert by_arm["state_passing"]["arm"]["initial_state"] == "state_passing"
    assert by_arm["state_passing"]["steps"] == 20


@pytest.mark.parametrize("group", MEASURES)
def test_a_measures_parameters_move_that_measure_alone(group: str, data: dict[str, Any]) -> None:
    before = plan_of(data)
    other = {"precision": "bf16-mixed", "streams": "concatenated", "split": "validation", "softmax": "padded"}
    for key, value in flatten(data[group], group).items():
        name = key.rpartition(".")[2]
        fixed = {"documents": 3, "starts": [0, 5], "positions": [16], "swap_position": 16, "confidence": 0.9}
        changed = other.get(name, fixed.get(name, value + 1 if isinstance(value, int) else value))
        after = plan_of(put(data, key, changed))
        moved = {after.stages[directory].rule for directory in set(after.stages) - set(before.stages)}
        expected = {group} if group == "shift" else {group, f"compare_{group}"}
        assert moved == expected, key
        assert phases_that_differ(before, after) == {"evaluate"}


REFUSED = {
    "a name": ("figures.fig2.models", ["tinyy"], "figures.fig2.models: 'tinyy' is not in models (did you mean 'tiny'?)"),
    "context": (
        "figures.fig2.contexts",
        [16, 24],
        "figures.fig2.contexts: 24 × micro_batches = 24 does not divide pretrain.recipe.batch_tokens = 512",
    ),
    "length": ("figures.fig2.contexts", [16, 128], "figures.fig2.length: 64 is below figures.fig2.contexts = 128"),
    "doubles": ("figures.fig2.contexts", [16, 16], "'16' is named twice"),
    "snapshot": (
        "figures.fig3.snapshots",
        [70000],
        "figures.fig3.snapshots: 70000 is not on the grid of snapshots of 'tiny': 65536",
    ),
    "tokens": ("figures.fig11.tokens", 100, "figures.fig11.tokens: 100 is less than one batch of 512 for 'tiny'"),
    "noise": (
        "figures.fig12.noise",
        "tbtt",
        "figures.fig12.noise: 'tbtt' is no arm of random noise; in posttrain.arms: random_noise",
    ),
    "base": ("figures.fig13.arms", ["control"], "figures.fig13.arms: 'base' must be among them"),
    "vary": (
        "figures.cost.vary",
        ["tbtt"],
        "figures.cost.vary: 'tbtt' is not among the arms of the figure that are post-trained",
    ),
    "starts": ("remembrance.starts", [3, 65], "remembrance: start point 65 is beyond T = length = 64"),
    "last": ("remembrance.last", 65, "remembrance: last = 65 positions do not fit into length = 64"),
    "positions": ("shift.positions", [16, 65], "shift: 65 of positions is beyond length = 64"),
    "unscored": (
        "shift.positions",
        [60],
        "shift.positions: after position 60 the text must go on for ⌈T_train / 2⌉ = 8 tokens to score; shift.length = 64 allows positions to 56",
    ),
    "shift": ("figures.shift.length", 24, "figures.shift.length: 24 leaves no position beyond models.tiny.context = 16"),
    "layer": ("figures.fig9.heads", [[2, 0]], "figures.fig9.heads: 'tiny' has no head 0 in layer 2; it has 2 layers of 4 heads"),
    "head": ("figures.fig9.heads", [[0, 4]], "figures.fig9.heads: 'tiny' has no head 4 in layer 0"),
    "states": ("states.length", 8, "states.length: 8 is below models.tiny.context = 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_drawn_is_refused_in_one_line(case: str, data: dict[str, Any]) -> None:
    key, value, message = REFUSED[case]
    with pytest.raises(FarstateError) as error:
        validate(put(data, key, value), "test")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_published_checkpoint_is_not_trained_from_scratch(data: dict[str, Any]) -> None:
    published = {"architecture": "mamba2", "context": 16, "checkpoint": "state-spaces/mamba2-130m"}
    changed = merge(data, {"models": {"published": published}, "figures": {"fig3": {"models": ["published"]}}})
    with pytest.raises(FarstateError, match=r"figures\.fig3\.models: 'published' is a published checkpoint"):
        validate(changed, "test")
