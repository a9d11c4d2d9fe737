"""Stored numbers that hold a module's results and its numerics version together.

    check("ops", {"y": y, "final": final})

compares with `tests/golden/ops.json`. The file remembers `NUMERICS["ops"]`: results that moved under the same version fail
here, and so does a version raised without new numbers. `FARSTATE_UPDATE_GOLDEN=1` rewrites the file.
Inputs must be made without a random generator (`ramp`), so that no library release moves them; compute in float64.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import torch
from torch import Tensor

from farstate.numerics import NUMERICS

FOLDER = Path(__file__).parent / "golden"
RELATIVE = 1e-9


def ramp(*shape: int, phase: float = 0.0, scale: float = 1.0) -> Tensor:
    """Reproducible float64 values in (−scale, scale) with no pattern a recurrence would notice."""
    count = math.prod(shape)
    return scale * torch.sin(torch.arange(count, dtype=torch.float64) * 1.6180339887 + phase).reshape(shape)


def check(module: str, values: dict[str, Tensor], *, relative: float = RELATIVE, path: Path | None = None) -> None:
    """Compare `values` with the stored ones, each to `relative` of its largest magnitude.

    Args:
        module: a key of `farstate.numerics.NUMERICS`.
        path: where the numbers are kept; default `tests/golden/<module>.json`.

    Raises:
        AssertionError: numbers, shapes, names or the numerics version differ, naming what to do.
    """
    path = FOLDER / f"{module}.json" if path is None else path
    if os.environ.get("FARSTATE_UPDATE_GOLDEN") == "1":
        _write(module, values, path)
        return
    assert path.exists(), f"{path} is missing; write it with FARSTATE_UPDATE_GOLDEN=1"
    stored = json.loads(path.read_text(encoding="utf-8"))
    differences = _differences(stored["values"], values, relative)
    version = NUMERICS[module]
    if stored["numerics"] != version:
        assert differences, f"NUMERICS[{module!r}] was raised to {version} but no number changed: take it back"
        raise AssertionError(f"NUMERICS[{module!r}] is now {version}: rewrite {path} with FARSTATE_UPDATE_GOLDEN=1")
    assert not differences, (
        f"the numbers of '{module}' changed ({'; '.join(differences)}): raise NUMERICS[{module!r}] and rewrite {path} with FARSTATE_UPDATE_GOLDEN=1"
    )


def _differences(stored: dict[str, dict[str, list[float]]], values: dict[str, Tensor], relative: float) -> list[str]:
    if stored.keys() != values.keys():
        return [f"names {sorted(values)} instead of {sorted(stored)}"]
    found = []
    for name, value in values.items():
        expected = torch.tensor(stored[name]["data"], dtype=torch.float64).reshape([int(n) for n in stored[name]["shape"]])
        actual = value.detach().double().cpu()
        if actual.shape != expected.shape:
            found.append(f"{name}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
            continue
        largest = expected.abs().max().item() if expected.numel() else 0.0
        error = (actual - expected).abs().max().item() if expected.numel() else 0.0
        if not error <= relative * largest:
            found.append(f"{name}: off by {error:.2e}, magnitude {largest:.2e}")
    return found


def _write(module: str, values: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {
        name: {"shape": list(value.shape), "data": value.detach().double().cpu().flatten().tolist()}
        for name, value in values.items()
    }
    path.write_text(json.dumps({"numerics": NUMERICS[module], "values": entries}) + "\n", encoding="utf-8")
