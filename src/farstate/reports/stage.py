"""The stage that draws a page: from the keys it must show to the figure's function."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.params import flatten
from farstate.plan import PAGE_FILES
from farstate.provenance import commit, versions
from farstate.reports import curves
from farstate.reports.figures import FIGURES, About

_ASSUMED = {
    *("weight_decay", "sigma", "carry_auxiliary", "reset_unit", "reset_auxiliary", "previous"),
    *("peak_learning_rate", "streams"),
}
"""What no text of the paper gives."""
_PAPER_BETA, _PAPER_RESETS, _PAPER_RATE = 0.1, 0.1, 0.1


def report_stage(wanted: dict[str, Any], folder: Path) -> None:
    """Draw the page that `wanted` (a page's small manifest) describes into `folder`.

    Raises:
        FarstateError: the figure is unknown, or the tables it shows are missing or unfinished.
    """
    about = FIGURES.get(wanted["figure"])
    if about is None:
        raise FarstateError(f"'{wanted['figure']}' is not a figure we draw; known: {', '.join(FIGURES)}")
    comparison = Path(wanted["comparison"])
    manifest = read_manifest(comparison)
    curves.draw(
        about,
        comparison=comparison,
        output={kind: folder / f"{wanted['figure']}.{kind}" for kind in PAGE_FILES},
        context=_context(about, wanted["params"], manifest),
        keys=wanted,
    )


def _context(about: About, report: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """What the page prints besides the tables."""
    models = {}
    for name in report["order"]:
        label = report["models"][name]
        sizes = manifest["models"][name]
        models[name] = {
            "label": f"{name} ({_short(sizes['parameters'])})",
            "parameters": sizes["parameters"],
            "parameters_without_embeddings": sizes["parameters_without_embeddings"],
            "training_tokens": label["training_tokens"],
            "context": label["context"],
            "architecture": label["architecture"],
            "paper_model": report["paper_models"].get(name) if report["paper_values"] else None,
        }
    posttrain = report["posttrain"]
    budgets: dict[str, list[str]] = {}
    for name, model in report["models"].items():
        budgets.setdefault(f"{model['steps']} post-training steps of {model['posttrain']['batch_tokens']:,} tokens", []).append(
            name
        )
    budget = next(iter(budgets))
    if len(budgets) > 1:
        budget = "; ".join(f"{', '.join(names)}: {words}" for words, names in budgets.items())
    trained_here = any(model["shape"] for model in report["models"].values())
    return {
        "models": models,
        "scale": report["scale"],
        "budget": budget,
        "parameters": _printed(about, report),
        "provenance": {
            **{f"version of {name}": version for name, version in versions().items()},
            "commit": commit().get("commit", "not a git checkout"),
            "comparison": manifest.get("key", ""),
            **({"pre-training seed": report["pretrain"]["seed"]} if trained_here else {}),
            "post-training seeds": list(posttrain["seeds"]),
        },
        "note": report["note"],
    }


def _printed(about: About, report: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters worth printing: which the paper does not give, and which differ from it.

    Published checkpoints were trained elsewhere: for them nothing is said of pre-training.
    """
    rows = []
    trained_here = any(model["shape"] for model in report["models"].values())
    for name, model in report["models"].items():
        value = "of the published checkpoint"
        if model["shape"] is not None:
            value = ", ".join(f"{key} {_shown(item)}" for key, item in model["shape"].items() if item is not None)
        rows.append(
            {"name": f"models.{name}", "value": f"{model['architecture']}: {value}", "assumed": model["shape"] is not None}
        )
    given = [
        (key, value, None)
        for part in (("pretrain", "posttrain", "evaluate") if trained_here else ("posttrain", "evaluate"))
        for key, value in flatten(report[part], part).items()
        if value != {} and not key.endswith(".initial_state")
    ]
    for key, value, model_name in [*given, *_changes(report)]:
        path = key.split(".")
        rows.append(
            {
                "name": key,
                "value": _shown(value),
                "assumed": path[-1] in _ASSUMED or path[1] in _ASSUMED,
                "differs": _differs(about, report, key, value, model_name),
            }
        )
    rows.append({"name": "optimizer", "value": "AdamW", "assumed": True})
    rows.append({"name": "optimizer state when post-training begins", "value": "fresh", "assumed": True})
    if any(arm["initial_state"] == "fitted_noise" for arm in report["posttrain"]["arms"].values()):
        rows.append(
            {"name": "fitted noise, moments over", "value": "a head's channels, its state and the batch", "assumed": True}
        )
        rows.append({"name": "fitted noise, first update", "value": "takes the batch's values", "assumed": True})
    return rows


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return " to ".join(map(str, value)) if len(value) == 2 and None not in value else ", ".join(map(str, value))
    return value


def _changes(report: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """What single models have instead of the common values: key, value, model."""
    found: list[tuple[str, Any, str]] = []
    for name, model in report["models"].items():
        if model["pretrain"] is not None:
            recipe, tokens = report["pretrain"]["recipe"], report["pretrain"]["tokens"]
            if model["training_tokens"] != tokens // model["pretrain"]["batch_tokens"] * model["pretrain"]["batch_tokens"]:
                found.append((f"pretrain.by_model.{name}.tokens", model["training_tokens"], name))
            found += _recipe_changes(f"pretrain.by_model.{name}", recipe, model["pretrain"], name)
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
    if path[0] == "posttrain" and path[-1] == "steps":
        wanted = [about.steps.get(report["models"][name]["architecture"], about.steps[""]) for name in names]
        if model is None:
            wanted = [steps for steps, name in zip(wanted, names, strict=True) if report["models"][name]["steps"] == value]
        other = sorted({steps for steps in wanted if steps is not None and steps != value})
        return " or ".join(map(str, other))
    for name, arm in report["posttrain"]["arms"].items():
        if key == f"posttrain.arms.{name}.reset_probability":
            return "" if value == _PAPER_RESETS else f"{_PAPER_RESETS}"
        if key == f"posttrain.arms.{name}.beta" and arm["initial_state"] == "fitted_noise":
            return "" if value == _PAPER_BETA else f"{_PAPER_BETA}"
    if path[0] == "posttrain" and path[-1] == "peak_learning_rate":
        for name in names:
            own = report["models"][name]
            if own["pretrain"] is None or own["posttrain"]["peak_learning_rate"] != value:
                continue
            if not math.isclose(value, _PAPER_RATE * own["pretrain"]["peak_learning_rate"]):
                return "a tenth of the pre-training rate"
    return ""


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
