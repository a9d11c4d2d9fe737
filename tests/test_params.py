"""Parameters: what is accepted, and one clear line for what is not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from farstate.errors import FarstateError
from farstate.params import Params, flatten, load, merge, read_yaml, validate
from farstate.plan import MEASURES, command_line_overrides
from farstate.reference_pages import parameter_pages
from farstate.settings import load_settings

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIGURATIONS = ["params.yaml", "config/paper.yaml", "config/test.yaml"]


@pytest.fixture(scope="module")
def valid() -> dict[str, Any]:
    return read_yaml(REPOSITORY / "config/test.yaml")


def put(data: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A deep copy with the value at a dotted key replaced."""
    data = copy.deepcopy(data)
    *path, last = key.split(".")
    place = data
    for part in path:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return data


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_configurations_are_valid_and_read_alike_by_both_loaders(name: str) -> None:
    assert isinstance(load(REPOSITORY / name), Params)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_configurations_write_every_leaf_down(name: str) -> None:
    """DVC compares what is written: a default that is not written could change without being seen."""
    written = flatten(read_yaml(REPOSITORY / name))
    params = load(REPOSITORY / name)
    for group in ("posttrain", "evaluate", *MEASURES, "tasks", "compare", "figures", "report", "store"):
        resolved = flatten(getattr(params, group).model_dump(mode="json"), group)
        # What single models change is written where it is changed; a figure left out is not drawn.
        resolved = {key: value for key, value in resolved.items() if ".by_model" not in key}
        resolved = {key: value for key, value in resolved.items() if value is not None or key.count(".") > 1}
        assert set(resolved) <= set(written), f"{name}: not written: {sorted(set(resolved) - set(written))}"


BAD = {
    "misspelt key": ("posttrain.stps", 3, ["posttrain.stps", "did you mean 'steps'"]),
    "misspelt key in an arm": (
        "posttrain.arms.state_passing.reset_prob",
        0.1,
        ["posttrain.arms.state_passing.reset_prob", "unknown"],
    ),
    "misspelt required key": (
        "posttrain.arms.random_noise",
        {"initial_state": "random_noise", "sigmma": 0.1},
        ["posttrain.arms.random_noise.sigmma", "did you mean 'sigma'"],
    ),
    "misspelt top key": ("pretrian", {}, ["pretrian", "did you mean 'pretrain'"]),
    "wrong type": ("posttrain.steps", "many", ["posttrain.steps", "'many'", "integer"]),
    "number as text": ("pretrain.recipe.peak_learning_rate", "3e-3", ["pretrain.recipe.peak_learning_rate", "'3e-3'"]),
    "out of range": (
        "posttrain.arms.state_passing.reset_probability",
        1.5,
        ["reset_probability", "1.5", "less than or equal to 1"],
    ),
    "not a number": ("compare.tolerance", float("nan"), ["compare.tolerance"]),
    "unknown choice": ("evaluate.split", "train", ["evaluate.split", "'validation' or 'test'"]),
    "unknown arm kind": ("posttrain.arms.control.initial_state", "zeros", ["posttrain.arms.control", "state_passing"]),
    "unknown model in a figure": ("figures.fig5.models", ["tinny"], ["figures.fig5.models", "did you mean 'tiny'"]),
    "unknown arm in a figure": ("figures.fig5.arms", ["base", "contrl"], ["figures.fig5.arms", "did you mean 'control'"]),
    "a figure without base": ("figures.fig5.arms", ["control"], ["figures.fig5.arms", "'base'"]),
    "an arm called base": ("posttrain.arms.base", {"initial_state": "zero"}, ["'base'"]),
    "a model twice in a figure": ("figures.fig5.models", ["tiny", "tiny"], ["figures.fig5.models", "'tiny' is named twice"]),
    "an arm twice in a figure": (
        "figures.fig5.arms",
        ["base", "control", "control"],
        ["figures.fig5.arms", "'control' is named twice"],
    ),
    "batch of one model not a multiple": (
        "posttrain.by_model",
        {"tiny": {"recipe": {"batch_tokens": 500}}},
        ["posttrain.by_model.tiny.recipe.batch_tokens: 500", "× posttrain.recipe.micro_batches"],
    ),
    "parts of one model that do not divide": (
        "pretrain.by_model",
        {"tiny": {"recipe": {"micro_batches": 7}}},
        ["pretrain.recipe.batch_tokens: ", "× pretrain.by_model.tiny.recipe.micro_batches"],
    ),
    "a budget of one model below one batch": (
        "pretrain.by_model",
        {"tiny": {"tokens": 5}},
        ["pretrain.by_model.tiny.tokens: 5 is less", "pretrain.recipe.batch_tokens"],
    ),
    "an infinite range": ("models.tiny.shape.dt_limit", [0.0, float("inf")], ["models.tiny.shape.dt_limit[1]", "finite"]),
    "a size beyond all": ("models.tiny.shape.width", 10**30, ["models.tiny.shape.width", "must not exceed"]),
    "batch not a multiple": ("posttrain.recipe.batch_tokens", 500, ["posttrain.recipe.batch_tokens", "500", "multiple"]),
    "sizes that do not divide": ("models.tiny.shape.head_size", 7, ["models.tiny.shape", "head_size = 7"]),
    "no source": ("corpus.sources", [], ["corpus.sources"]),
    "a source of two kinds": ("corpus.sources.0.hub", "x/y", ["corpus.sources[0]", "exactly one"]),
    "nothing left to train on": ("corpus.split.test", 1.0, ["corpus.split", "nothing would be left"]),
    "evaluation shorter than training": ("evaluate.length", 8, ["evaluate.length", "models.tiny.context"]),
    "equal seeds": ("posttrain.seeds", [1, 1], ["posttrain.seeds", "differ"]),
    "negative seed": ("posttrain.seeds", [-1], ["posttrain.seeds[0]", "-1"]),
    "a package without checksum": (
        "corpus.sources.0",
        {"name": "a", "package": "x==1"},
        ["corpus.sources[0]", "sha256"],
    ),
    "unpinned package": (
        "corpus.sources.0",
        {"name": "a", "package": "x>=1", "members": "*"},
        ["corpus.sources[0].package", "'x>=1'"],
    ),
}


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("rwkv6", "decay_init_range", (-8.0, float("inf"))),
        ("gla", "decay_bias_range", (float("-inf"), 0.0)),
        ("gla", "log_decay_floor", float("-inf")),
        ("mamba2", "A_init_range", (1.0, float("inf"))),
        ("gated_deltanet", "A_init_range", (0.0, float("inf"))),
        ("hybrid", "rope_theta", float("inf")),
    ],
)
def test_shapes_hold_finite_numbers(architecture: str, key: str, value: Any) -> None:
    from farstate.models.registry import ARCHITECTURES

    with pytest.raises(ValidationError, match="finite number"):
        ARCHITECTURES[architecture].shape(width=64, layers=4, **{key: value})


def test_an_unknown_key_of_an_arm_lists_the_keys_of_its_kind(valid: dict[str, Any]) -> None:
    with pytest.raises(FarstateError) as caught:
        validate(put(valid, "posttrain.arms.state_passing.sigma", 0.1), "my.yaml")
    assert "reset_probability" in str(caught.value)
    assert "beta" not in str(caught.value)


@pytest.mark.parametrize("case", BAD)
def test_bad_values_get_one_line_with_file_key_and_remedy(case: str, valid: dict[str, Any]) -> None:
    key, value, expected = BAD[case]
    with pytest.raises(FarstateError) as caught:
        validate(put(valid, key, value), "my.yaml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("my.yaml: ")
    for part in expected:
        assert part in message, message


def without_window(valid: dict[str, Any], cache: int, arms: list[str], **changes: Any) -> dict[str, Any]:
    """The tests' parameters with a hybrid whose attention has no window; context 16, 20 steps of 32 rows, 256 positions measured."""
    shape = {"width": 16, "layers": 2, "state_size": 8, "head_size": 8, "attention_every": 2, "attention_heads": 2}
    shape |= {"attention_window": None, "attention_cache": cache}
    data = put(valid, "models.all", {"architecture": "hybrid", "context": 16, "shape": shape})
    data = put(data, "figures", {"fig5": {"models": ["tiny"], "arms": ["base", "state_passing", "tbtt"]}})
    data = put(data, "figures.fig1", {"models": ["all"], "arms": ["base", *arms]})
    for key, value in changes.items():
        data = put(data, f"posttrain.{key.replace('__', '.')}", value)
    return data


@pytest.mark.parametrize(
    ("arms", "changes", "needed"),
    [
        (["control"], {}, 256),
        (["state_passing"], {}, 320),
        (["state_passing"], {"arms__state_passing__previous": "micro_batch", "recipe__micro_batches": 2}, 640),
        # 16 segments without a reset: once in hundreds of millions of runs.
        (["state_passing"], {"arms__state_passing__reset_probability": 0.8}, 256),
        (["state_passing"], {"arms__state_passing__reset_probability": 1.0, "arms__state_passing__reset_auxiliary": False}, 320),
        (["state_passing"], {"arms__state_passing__carry_auxiliary": False}, 256),
        (["tbtt"], {}, 256),
        (["tbtt"], {"stretch_tokens": 300}, 300),
        (["tbtt"], {"stretch_tokens": None}, 320),
    ],
)
def test_attention_without_a_window_must_fit_its_cache(
    arms: list[str], changes: dict[str, Any], needed: int, valid: dict[str, Any]
) -> None:
    assert validate(without_window(valid, needed, arms, **changes), "my.yaml")
    with pytest.raises(
        FarstateError, match=rf"^my\.yaml: models\.all\.shape\.attention_window: .* to {needed} tokens .*= {needed - 1};"
    ):
        validate(without_window(valid, needed - 1, arms, **changes), "my.yaml")


def test_missing_section(valid: dict[str, Any]) -> None:
    with pytest.raises(FarstateError, match=r"my\.yaml: corpus: missing"):
        validate({key: value for key, value in valid.items() if key != "corpus"}, "my.yaml")


YAML = {
    "a number only YAML 1.2 reads": ("posttrain: {steps: 1e3}", ["posttrain.steps", "1.0e-3"]),
    "on is true for one": ("report: {paper_values: on}", ["report.paper_values", "true or false"]),
    "not a number": ("compare: {tolerance: .nan}", ["compare.tolerance: nan is not allowed"]),
    "octal": ("compare: {seed: 010}", ["compare.seed"]),
    "sexagesimal": ("compare: {seed: 1:30}", ["compare.seed"]),
    "a key given twice": ("compare: {seed: 1, seed: 2}", ["line 1"]),
    "broken": ("compare: {seed: 1", ["not valid YAML"]),
    "not a mapping": ("- 1\n- 2", ["a mapping"]),
    "a tag that builds an object": ("compare: !!python/object/apply:os.system ['true']", ["not valid YAML"]),
    "a key that is read as true": ("on: 1", ["'True'"]),
}


@pytest.mark.parametrize("case", YAML)
def test_yaml_that_the_two_loaders_read_differently_is_refused(case: str, tmp_path: Path) -> None:
    text, expected = YAML[case]
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(FarstateError) as caught:
        read_yaml(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    for part in expected:
        assert part in message, message


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(FarstateError, match="no such file"):
        read_yaml(tmp_path / "absent.yaml")
    with pytest.raises(FarstateError, match="is a folder"):
        read_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"note: caf\xe9")
    with pytest.raises(FarstateError, match="not UTF-8"):
        read_yaml(tmp_path / "latin.yaml")


def test_command_line_values_arrive_as_text_and_are_read_as_yaml() -> None:
    read = command_line_overrides({"posttrain": {"steps": "50", "seeds": ["0", "1"], "recipe": {"peak_learning_rate": "1.0e-3"}}})
    assert read == {"posttrain": {"steps": 50, "seeds": [0, 1], "recipe": {"peak_learning_rate": 1e-3}}}


def test_merge_replaces_lists_and_merges_mappings() -> None:
    assert merge({"a": {"b": 1, "c": [1, 2]}}, {"a": {"c": [3]}, "d": 1}) == {"a": {"b": 1, "c": [3]}, "d": 1}


def test_generated_pages_do_not_drift() -> None:
    for path, text in parameter_pages().items():
        assert (REPOSITORY / path).read_text(encoding="utf-8") == text, f"{path}: run `farstate schema`"


def test_the_schema_accepts_the_configurations() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="the jsonschema package comes with snakemake")
    schema = json.loads((REPOSITORY / "config/params.schema.json").read_text())
    for name in CONFIGURATIONS:
        jsonschema.validate(yaml.safe_load((REPOSITORY / name).read_text()), schema)


def test_settings_name_the_unknown_and_the_impossible(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("devise: cpu\n")
    with pytest.raises(FarstateError, match="did you mean 'device'"):
        load_settings(path)
    path.write_text("device: tpu\n")
    with pytest.raises(FarstateError, match="'tpu' is not allowed"):
        load_settings(path)
    assert load_settings(tmp_path / "absent.yaml").device == "auto"
