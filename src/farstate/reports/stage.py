"""The stage that draws a page: from the keys it must show to the figure's function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from farstate.errors import FarstateError
from farstate.files import read_manifest
from farstate.plan import PAGE_FILES
from farstate.provenance import commit, versions
from farstate.reports.fig5 import fig5

_FIGURES = {"fig5": fig5}
_ASSUMED = {"weight_decay", "sigma", "carry_auxiliary", "reset_unit", "reset_auxiliary", "previous"}


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
    code = commit()
    return {
        "models": models,
        "scale": "paper" if report["scale"] == "paper" else "demo",
        "budget": budget,
        "parameters": _printed(report),
        "provenance": {
            **{f"version of {name}": version for name, version in versions().items()},
            "commit": code.get("commit", "not a git checkout") + (" with uncommitted changes" if code.get("dirty") else ""),
            "comparison": manifest.get("key", ""),
            "pre-training seed": report["pretrain"]["seed"],
            "post-training seeds": list(posttrain["seeds"]),
        },
        "note": report["note"],
    }


def _printed(report: dict[str, Any]) -> list[dict[str, Any]]:
    from farstate.params import flatten

    rows = []
    for part in ("pretrain", "posttrain", "evaluate"):
        for key, value in flatten(report[part], part).items():
            if value == {} or key.endswith(".initial_state"):
                continue
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
            rows.append({"name": key, "value": shown, "assumed": key.rpartition(".")[2] in _ASSUMED})
    return rows


def _short(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
