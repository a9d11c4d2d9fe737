"""The stage that draws a page: from the keys it must show to the figure's function."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.params import flatten
from farstate.provenance import commit, versions
from farstate.reports.figures import FIGURES, About
from farstate.reports.page import OUTPUTS, Draw
from farstate.reports.text import short_count

_ASSUMED = {
    *("weight_decay", "sigma", "carry_auxiliary", "reset_unit", "reset_auxiliary", "previous", "at_document_end", "block_tokens"),
    *("peak_learning_rate", "streams"),
}
"""What no text of the paper gives."""
_PAPER_BETA, _PAPER_RESETS, _PAPER_RATE = 0.1, 0.1, 0.1
_PARTS = ("pretrain", "posttrain", "evaluate", "remembrance", "states", "shift", "arms", "tasks", "compare", "figure")
"""Parts of the parameters a page prints, where it has them."""
_TASK_ASSUMED = {
    "babilong": {"examples", "facts", "shots", "mixture", "max_new_tokens", "split_labels", "training_lengths", "training"},
    "passkey": {"examples", "filler", "instruction", "training"},
    "copying": {"examples", "alphabet", "training"},
}
"""By task, what no text of the paper gives; `training` is the part of the parameters, but for what stands below."""
_POWERS = [1024 * 2**power for power in range(9)]
_PAPER_TASKS: dict[str, dict[str, tuple[Any, str]]] = {
    "babilong": {
        "tasks": ([f"qa{number}" for number in range(1, 11)], "qa1 to qa10"),
        "lengths": ([0, *_POWERS], "0 and 1024 to 262144"),
    },
    "passkey": {
        "lengths": (_POWERS[1:], "2048 to 262144"),
        "depths": ([0.1, 0.5, 0.9], "0.1, 0.5, 0.9"),
        "keys": ([10000, 99999], "five digits"),
        "training.rest_weight": (0.0, "0, loss on the key alone"),
    },
    "copying": {
        "training_lengths": ([50, 100], "50 to 100"),
        "lengths": ([300], "300"),
        "training.examples": (1_000_000, "1000000"),
    },
}
"""By task and key what the paper has, and how it is said."""
_PAPER_PASSKEY_STEPS = 1000
_ELSEWHERE = ("figure.models", "figure.arms", "figure.given", "figure.rate")
"""What a page shows at length elsewhere."""


def report_stage(wanted: Mapping[str, Any], folder: Path) -> None:
    """Draw the page that `wanted` (a page's small manifest) describes into `folder`.

    Args:
        wanted: `figure`, `inputs` (role → result directories), `params` (what the page prints), `version`.
        folder: where `<figure>.html` and its siblings go.

    Raises:
        FarstateError: the figure is unknown, or the tables it shows are missing or unfinished.
    """
    about = FIGURES.get(wanted["figure"])
    if about is None:
        raise FarstateError(f"'{wanted['figure']}' is not a figure we draw; known: {', '.join(FIGURES)}")
    inputs = {role: [Path(directory) for directory in directories] for role, directories in wanted["inputs"].items()}
    if missing := [role for role in about.roles if not inputs.get(role)]:
        raise FarstateError(f"{wanted['figure']}: no directory given for {', '.join(missing)}, which the page shows")
    # A result's key is the end of its directory's name.
    manifests = {
        role: [{"key": directory.name} | read_manifest(directory) for directory in directories]
        for role, directories in inputs.items()
    }
    # Each kind of page has a module of its own; only the one that draws is loaded.
    module = importlib.import_module(f"farstate.reports.{about.draws}")
    draw: Draw = module.draw
    draw(
        about,
        inputs=inputs,
        output={kind: folder / f"{wanted['figure']}.{kind}" for kind in OUTPUTS},
        context=_context(about, wanted["params"], manifests),
        keys=wanted,
    )


def _context(about: About, report: dict[str, Any], manifests: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """What the page prints besides the tables (`farstate.reports.context.Context`)."""
    sizes = _sizes([manifest for of_role in manifests.values() for manifest in of_role])
    models = {}
    for name in report["order"]:
        label, size = report["models"][name], sizes.get(name, {})
        models[name] = {
            "label": f"{name} ({short_count(size['parameters'])})" if size else name,
            "parameters": size.get("parameters"),
            "parameters_without_embeddings": size.get("parameters_without_embeddings"),
            "training_tokens": label["training_tokens"],
            "context": label["context"],
            "architecture": label["architecture"],
            "paper_model": _paper_model(about, report, name) if report["paper_values"] else None,
        }
    trained_here = any(model["shape"] for model in report["models"].values())
    keys = {
        role if len(of_role) == 1 else f"{role} {number}": manifest.get("key", "")
        for role, of_role in manifests.items()
        for number, manifest in enumerate(of_role, start=1)
    }
    return {
        "models": models,
        "scale": report["scale"],
        "budget": _budget(about, report),
        "parameters": _printed(about, report),
        "provenance": {
            **{f"version of {name}": version for name, version in versions().items()},
            "commit": commit().get("commit", "not a git checkout"),
            **keys,
            **(_pretraining_seeds(about, report) if trained_here and "pretrain" in report else {}),
            **_training_seeds(about, report),
        },
        "note": report["note"],
        "figure": report.get("figure", {}),
        "tasks": _task(about, report),
        "posttrain": _posttrain(report),
        "series": report.get("series", []),
        "sizes": sizes,
    }


def _posttrain(report: dict[str, Any]) -> dict[str, Any]:
    """Recipe and steps of the first model that is post-trained, or for which that is suggested."""
    models = (report["models"][name] for name in report["order"])
    return next(
        ({**model["posttrain"], "steps": model["steps"]} for model in models if model["posttrain"] and model["steps"]), {}
    )


def _pretraining_seeds(about: About, report: dict[str, Any]) -> dict[str, Any]:
    """A page that shows no post-training may show several pre-trainings; the figure's own seeds are theirs then."""
    further = report.get("posttrain") or _task(about, report)
    several = None if further else report.get("figure", {}).get("seeds")
    return {"pre-training seeds": list(several)} if several else {"pre-training seed": report["pretrain"]["seed"]}


def _training_seeds(about: About, report: dict[str, Any]) -> dict[str, Any]:
    """Seeds of the post-training; of a page that shows a task without one, those of the training on it."""
    if report.get("posttrain"):
        return {"post-training seeds": list(report["posttrain"]["seeds"])}
    return {"seeds of the training on the task": list(report["seeds"])} if _task(about, report) else {}


def _paper_model(about: About, report: dict[str, Any], name: str) -> str | None:
    """The paper's name of a model. A task may have it trained on rows of another length, which is part of its name here."""
    names: dict[str, str] = report["paper_models"]
    return names.get(name) or (names.get(report["models"][name]["of"]) if _task(about, report) else None)


def _task(about: About, report: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the page's long-context task; empty where it shows none."""
    return dict(report.get("tasks", {}).get(about.family, {}))


def _sizes(manifests: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Parameter counts by model: comparisons hold those of all their models, a measurement those of its one."""
    found: dict[str, dict[str, int]] = {}
    for manifest in manifests:
        given = dict(manifest.get("models", {})) if isinstance(manifest.get("models"), dict) else {}
        if "parameters" in manifest and "labels" in manifest:
            given[manifest["labels"]["model"]] = manifest
        for name, counts in given.items():
            if counts.get("parameters") is not None:
                found[name] = {key: counts[key] for key in ("parameters", "parameters_without_embeddings")}
    return found


def _budget(about: About, report: dict[str, Any]) -> str:
    """Post-training steps and their tokens in words, and the examples of a task; nothing where the page shows no such training."""
    task = _task(about, report)
    own = f"{task['training']['examples']:,} examples of the task, each read once" if task else ""
    further = _posttraining_budget(report)
    return f"{further}; then {own}" if further and own else further or own


def _posttraining_budget(report: dict[str, Any]) -> str:
    budgets: dict[str, list[str]] = {}
    if not report.get("posttrain") or not report["posttrain"].get("arms"):
        return ""
    for name, model in report["models"].items():
        if model["posttrain"] is None:
            continue
        words = f"{model['steps']} post-training steps of {model['posttrain']['batch_tokens']:,} tokens"
        budgets.setdefault(words, []).append(name)
    if len(budgets) > 1:
        return "; ".join(f"{', '.join(names)}: {words}" for words, names in budgets.items())
    return next(iter(budgets), "")


def _printed(about: About, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters worth printing: which the paper does not give, and which differ from it.

    Published checkpoints were trained elsewhere: for them nothing is said of pre-training.
    """
    rows = []
    trained_here = any(model["shape"] for model in report["models"].values())
    shapes: dict[str, str] = {}
    for name, model in report["models"].items():
        value = "of the published checkpoint"
        if model["shape"] is not None:
            value = ", ".join(f"{key} {_shown(item, key)}" for key, item in model["shape"].items() if item is not None)
        value = f"{model['architecture']}: {value}"
        first = shapes.setdefault(value, name)
        if first != name and model["shape"] is not None:
            value = f"as models.{first}"
        rows.append({"name": f"models.{name}", "value": value, "assumed": model["shape"] is not None})
    several = "pre-training seeds" in _pretraining_seeds(about, report) if "pretrain" in report else False
    hidden = (*_ELSEWHERE, *(("pretrain.seed",) if several else ()))
    given = [
        (key, value, None)
        for part in _PARTS
        if report.get(part) and (part != "pretrain" or trained_here)
        for key, value in flatten(report[part], part).items()
        if value != {} and key != f"tasks.{about.family}.jobs" and not key.endswith(".initial_state") and key not in hidden
        if value is not None or part not in ("figure", "tasks")
    ]
    for key, value, model_name in [*given, *_changes(report)]:
        path = key.split(".")
        rows.append(
            {
                "name": key,
                "value": _shown(value),
                "assumed": _is_assumed(path),
                "differs": _differs(about, report, key, value, model_name),
            }
        )
    arms = _arms(report)
    if trained_here or arms:
        rows.append({"name": "optimizer", "value": "AdamW", "assumed": True})
    if report.get("posttrain", {}).get("arms"):
        rows.append({"name": "optimizer state when post-training begins", "value": "fresh", "assumed": True})
    if _task(about, report) and about.family != "copying":
        rows.append({"name": "optimizer state when training on the task begins", "value": "fresh", "assumed": True})
    if any(arm["initial_state"] == "fitted_noise" for arm in arms.values()):
        rows.append(
            {"name": "fitted noise, moments over", "value": "a head's channels, its state and the batch", "assumed": True}
        )
        rows.append({"name": "fitted noise, first update", "value": "takes the batch's values", "assumed": True})
    return rows


def _arms(report: dict[str, Any]) -> dict[str, Any]:
    """The arms of the post-training, or of the training on a task, with their parameters."""
    return dict(report.get("posttrain", {}).get("arms", {}) or report.get("arms", {}))


def _is_assumed(path: Sequence[str]) -> bool:
    """Whether no text of the paper gives a value."""
    if path[0] == "tasks":
        task, key = path[1], path[2]
        return key in _TASK_ASSUMED[task] and ".".join(path[2:]) not in _PAPER_TASKS[task]
    return path[-1] in _ASSUMED or path[1] in _ASSUMED


def _shown(value: Any, name: str = "") -> Any:
    """A value as it is printed: the ends of a range, or all members of a list."""
    if isinstance(value, list | tuple):
        if any(isinstance(item, list | tuple) for item in value):
            return ", ".join("/".join(map(str, item)) for item in value)
        return (" to " if name.endswith(("_range", "_limit")) and None not in value else ", ").join(map(str, value))
    return value


def _changes(report: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """What single models have instead of the common values: key, value, model."""
    found: list[tuple[str, Any, str]] = []
    for name, model in report["models"].items():
        if model["pretrain"] is not None and "pretrain" in report:
            recipe, tokens = report["pretrain"]["recipe"], report["pretrain"]["tokens"]
            if model["training_tokens"] != tokens // model["pretrain"]["batch_tokens"] * model["pretrain"]["batch_tokens"]:
                found.append((f"pretrain.by_model.{name}.tokens", model["training_tokens"], name))
            if model.get("block_tokens") != report["pretrain"].get("block_tokens"):
                found.append((f"pretrain.by_model.{name}.block_tokens", model.get("block_tokens"), name))
            found += _recipe_changes(f"pretrain.by_model.{name}", recipe, model["pretrain"], name)
        if not report.get("posttrain") or model["posttrain"] is None:
            continue
        if model["steps"] != report["posttrain"]["steps"]:
            found.append((f"posttrain.by_model.{name}.steps", model["steps"], name))
        found += _recipe_changes(f"posttrain.by_model.{name}", report["posttrain"]["recipe"], model["posttrain"], name)
    return found


def _recipe_changes(prefix: str, common: dict[str, Any], own: dict[str, Any], name: str) -> list[tuple[str, Any, str]]:
    return [(f"{prefix}.recipe.{key}", value, name) for key, value in own.items() if value != common[key]]


def _differs(about: About, report: dict[str, Any], key: str, value: Any, model: str | None) -> str:
    """What the paper has instead, or nothing. `model`: whose own value it is; None: the common one."""
    names = list(report["models"]) if model is None else [model]
    path = key.split(".")
    if path[0] == "tasks":
        return _task_differs(report, path[1], ".".join(path[2:]), value)
    if path[0] == "posttrain" and path[-1] == "steps":
        wanted = [about.steps.get(report["models"][name]["architecture"], about.steps[""]) for name in names]
        if model is None:
            wanted = [steps for steps, name in zip(wanted, names, strict=True) if report["models"][name]["steps"] == value]
        other = sorted({steps for steps in wanted if steps is not None and steps != value})
        return " or ".join(map(str, other))
    for name, arm in _arms(report).items():
        if key.endswith(f"arms.{name}.reset_probability"):
            return "" if value == _PAPER_RESETS else f"{_PAPER_RESETS}"
        if key.endswith(f"arms.{name}.beta") and arm["initial_state"] == "fitted_noise":
            return "" if value == _PAPER_BETA else f"{_PAPER_BETA}"
    if path[0] == "posttrain" and path[-1] == "peak_learning_rate":
        for name in names:
            own = report["models"][name]
            if own["pretrain"] is None or own["posttrain"] is None or own["posttrain"]["peak_learning_rate"] != value:
                continue
            if not math.isclose(value, _PAPER_RATE * own["pretrain"]["peak_learning_rate"]):
                return "a tenth of the pre-training rate"
    return ""


def _task_differs(report: dict[str, Any], task: str, key: str, value: Any) -> str:
    """What the paper has instead of a task's parameter, or nothing; more lengths than its own are no difference."""
    training = report["tasks"][task].get("training", {})  # none, where models are asked as they are
    if (task, key) == ("passkey", "training.examples") and training["packing"] == "one_per_row":
        steps = {value * model["context"] // training["recipe"]["batch_tokens"] for model in report["models"].values()}
        return (
            ""
            if steps == {_PAPER_PASSKEY_STEPS}
            else f"{_PAPER_PASSKEY_STEPS} steps, these are {', '.join(map(str, sorted(steps)))}"
        )
    paper, said = _PAPER_TASKS[task].get(key, (None, ""))
    if key in ("tasks", "lengths", "depths"):
        return "" if set(paper) <= set(value) else said
    return said if paper is not None and value != paper else ""
