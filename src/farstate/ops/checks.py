"""An implementation of an operation against its definition, on small inputs: outputs, final state, every gradient.

The inputs hold what implementations get wrong: a length that no chunk divides, decays from weak to strong in one sequence,
initial states, a loss that depends on the final state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farstate.ops.precision import without_autocast

Function = Callable[..., tuple[Tensor, Tensor]]

TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}
"""Largest error, relative to the largest entry of the float64 definition. A GPU may round the factors of float32 products to
TF32, with 10 bits; what is wrong there is wrong by a lot."""

_BATCH, _TIME, _HEADS, _CHANNELS, _KEYS = 2, 83, 2, 16, 32


@dataclass(frozen=True)
class Errors:
    """The largest of each tensor, relative to its largest entry; NaN where an entry is not finite."""

    outputs: float
    final_state: float
    gradients: float
    worst_gradient: str
    tolerance: float
    seconds: float

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerance for error in (self.outputs, self.final_state, self.gradients))

    def __str__(self) -> str:
        return (
            f"outputs {self.outputs:.1e}, final state {self.final_state:.1e}, "
            f"gradients {self.gradients:.1e} (d {self.worst_gradient}), allowed {self.tolerance:.0e}"
        )


def inputs(operation: str) -> dict[str, Tensor]:
    """Small inputs of an operation by argument name, float32-exact, on the CPU in float64."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).double()

    def log_uniform(*shape: int, low: float = -4.0, high: float = 0.7) -> Tensor:
        return (10.0 ** torch.empty(*shape).uniform_(low, high, generator=generator)).double()

    def keys() -> Tensor:
        return draw(_BATCH, _TIME, _HEADS, _KEYS)

    values = draw(_BATCH, _TIME, _HEADS, _CHANNELS)
    state = draw(_BATCH, _HEADS, _KEYS, _CHANNELS)
    match operation:
        case "ssd":
            return {
                "x": values,
                "dt": log_uniform(_BATCH, _TIME, _HEADS),
                "A": -log_uniform(_HEADS, low=-0.3, high=0.3),
                "B": draw(_BATCH, _TIME, 1, _KEYS),
                "C": draw(_BATCH, _TIME, 1, _KEYS),
                "D": draw(_HEADS),
                "initial_state": state.mT.contiguous(),
            }
        case "selective_scan":
            return {
                "x": draw(_BATCH, _TIME, _CHANNELS),
                "dt": log_uniform(_BATCH, _TIME, _CHANNELS),
                "A": -log_uniform(_CHANNELS, _KEYS, low=-0.3, high=0.3),
                "B": draw(_BATCH, _TIME, _KEYS),
                "C": draw(_BATCH, _TIME, _KEYS),
                "D": draw(_CHANNELS),
                "initial_state": draw(_BATCH, _CHANNELS, _KEYS),
            }
        case "gla":
            decays = -log_uniform(_BATCH, _TIME, _HEADS, _KEYS)
            return {"q": keys(), "k": keys(), "v": values, "log_decay": decays, "initial_state": state}
        case "wkv6":
            decays, bonus = -log_uniform(_BATCH, _TIME, _HEADS, _KEYS), draw(_HEADS, _KEYS)
            return {"r": keys(), "k": keys(), "v": values, "log_decay": decays, "bonus": bonus, "initial_state": state}
        case "gated_delta":
            return {
                "q": F.normalize(keys(), dim=-1),
                "k": F.normalize(keys(), dim=-1),
                "v": values,
                "log_decay": -log_uniform(_BATCH, _TIME, _HEADS),
                "beta": torch.sigmoid(draw(_BATCH, _TIME, _HEADS)),
                "initial_state": state,
            }
    raise KeyError(f"no inputs to check '{operation}' with")


def measure(function: Function, definition: Function, given: dict[str, Tensor], device: torch.device) -> Errors:
    """Errors of `function` in float32 on `device` against `definition` in float64 on the CPU, with the inputs `given`."""
    started = time.perf_counter()
    expected = _everything(definition, given, torch.float64, torch.device("cpu"))
    actual = _everything(function, given, torch.float32, device)
    errors = {name: _error(actual[name], value) for name, value in expected.items()}
    gradients = {name: error for name, error in errors.items() if name not in ("outputs", "final_state")}
    worst = max(gradients, key=lambda name: (gradients[name] != gradients[name], gradients[name]))
    return Errors(
        errors["outputs"],
        errors["final_state"],
        gradients[worst],
        worst,
        TOLERANCE.get(device.type, TOLERANCE["cuda"]),
        time.perf_counter() - started,
    )


def _everything(function: Function, given: dict[str, Tensor], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    with torch.inference_mode(False), torch.enable_grad(), without_autocast(device):
        leaves = {name: value.to(device, dtype).clone().requires_grad_() for name, value in given.items()}
        outputs, final = function(**leaves)
        generator = torch.Generator().manual_seed(1)
        loss = outputs.new_zeros(())
        for tensor in (outputs, final):
            loss = loss + (tensor * torch.randn(tensor.shape, generator=generator).to(tensor)).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"outputs": outputs, "final_state": final, **dict(zip(leaves, gradients, strict=True))}


def _error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().cpu().double(), expected.detach()
    if not torch.isfinite(actual).all():
        return float("nan")
    # The inputs are of the order of one, which sets the scale where the definition gives zero.
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=0.1)).item()
