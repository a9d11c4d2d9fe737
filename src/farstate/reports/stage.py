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
from farstate.reports.fig5 import fig5

_FIGURES = {"fig5": fig5}
_ASSUMED = {
    *("weight_decay", "sigma", "carry_auxiliary", "reset_unit", "reset_auxiliary", "previous"),
    *("peak_learning_rate", "peak_learning_rates", "streams"),
}
"""What shared/paper.md marks [assumed]."""
_PAPER_STEPS, _PAPER_BETA, _PAPER_RESETS, _PAPER_RATE = 100, 0.1, 0.1, 0.1


def report_stage(wanted: dict[str, Any], folder: Path) -> None:
    """Draw the page that `wanted` (a page's small manifest) describes into `folder`.

    Raises:
        FarstateError: the figure is unknown, or the tables it shows are missing or unfinished.
    """
    draw = _FIGURES.get(wanted["figure"])
    if draw is None:
        raise FarstateError(f"'{wanted['figure']}' is not a figure we draw; known: {', '.join(_FIGURES)}")
    comparison = Path(wanted["comparison"])
    manifest = read_manifest(comparison)
    draw(
        comparison=comparison,
        output={kind: folder / f"{wanted['figure']}.{kind}" for kind in PAGE_FILES},
        context=_context(wanted["params"], manifest),
        keys=wanted,
    )


def _context(report: dict[str, Any], manifest: dict[str, Any]) -> dict[str, Any]:
    """What the page prints besides the tables."""
    models = {}
    for name, label in report["models"].items():
        sizes = manifest["models"][name]
        models[name] = {
            "label": f"{name} ({_short(sizes['parameters'])})",
            "parameters": sizes["parameters"],
            "parameters_without_embeddings": sizes["parameters_without_embeddings"],
            "training_tokens": label["training_tokens"],
            "context": label["context"],
            "paper_model": report["paper_models"].get(name) if report["paper_values"] else None,
        }
    posttrain = report["posttrain"]
    budget = f"{posttrain['steps']} post-training steps of {posttrain['recipe']['batch_tokens']:,} tokens"
    trained_here = any(report["shapes"].values())
    return {
        "models": models,
        "scale": report["scale"],
        "budget": budget,
        "parameters": _printed(report),
        "provenance": {
            **{f"version of {name}": version for name, version in versions().items()},
            "commit": commit().get("commit", "not a git checkout"),
            "comparison": manifest.get("key", ""),
            **({"pre-training seed": report["pretrain"]["seed"]} if trained_here else {}),
            "post-training seeds": list(posttrain["seeds"]),
        },
        "note": report["note"],
    }


def _printed(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The parameters worth printing: which the paper does not give, and which differ from it.

    Published checkpoints were trained elsewhere: for them nothing is said of pre-training.
    """
    rows = []
    trained_here = any(report["shapes"].values())
    for name, shape in report["shapes"].items():
        value = "of the published checkpoint"
        if shape is not None:
            value = ", ".join(f"{key} {_shown(item)}" for key, item in shape.items() if item is not None)
        rows.append({"name": f"models.{name}.shape", "value": value, "assumed": shape is not None})
    for part in ("pretrain", "posttrain", "evaluate") if trained_here else ("posttrain", "evaluate"):
        for key, value in flatten(report[part], part).items():
            if value == {} or key.endswith(".initial_state"):
                continue
            path = key.split(".")
            rows.append(
                {
                    "name": key,
                    "value": _shown(value),
                    "assumed": path[-1] in _ASSUMED or path[1] in _ASSUMED,
                    "differs": _differs(report, key, value),
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


def _differs(report: dict[str, Any], key: str, value: Any) -> str:
    """What the paper has instead, or nothing."""
    posttrain = report["posttrain"]
    if key == "posttrain.steps":
        return "" if value == _PAPER_STEPS else f"{_PAPER_STEPS}"
    for name, arm in posttrain["arms"].items():
        if key == f"posttrain.arms.{name}.reset_probability":
            return "" if value == _PAPER_RESETS else f"{_PAPER_RESETS}"
        if key == f"posttrain.arms.{name}.beta" and arm["initial_state"] == "fitted_noise":
            return "" if value == _PAPER_BETA else f"{_PAPER_BETA}"
    if key.startswith("posttrain.") and "peak_learning_rate" in key:
        for name in (name for name, shape in report["shapes"].items() if shape is not None):
            before, after = (_rate(report[part], name) for part in ("pretrain", "posttrain"))
            own = name in posttrain["peak_learning_rates"]
            here = key == (f"posttrain.peak_learning_rates.{name}" if own else "posttrain.recipe.peak_learning_rate")
            if here and not math.isclose(after, _PAPER_RATE * before):
                return "a tenth of the pre-training rate"
    return ""


def _rate(training: dict[str, Any], model: str) -> float:
    return float(training["peak_learning_rates"].get(model, training["recipe"]["peak_learning_rate"]))


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
