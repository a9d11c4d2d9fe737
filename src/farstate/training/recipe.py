"""The optimisation recipe of paper App. B.1: schedule, optimizer, clipping, precision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from farstate.models.language_model import LanguageModel
from farstate.params import Recipe
from farstate.training.distributed import whole


def warmup_steps(steps: int, recipe: Recipe) -> int:
    """Steps of the linear warm-up: the recipe's share of `steps`, rounded half up."""
    return math.floor(recipe.warmup * steps + 0.5)


def learning_rate(step: int, steps: int, recipe: Recipe) -> float:
    """The rate of `step` in [0, steps): linear to the peak over W warm-up steps, then a cosine to the final rate.

    Step 0 has peak / W, step W − 1 exactly the peak, step `steps` − 1 exactly the final rate (the peak where nothing
    follows the warm-up).

    Raises:
        ValueError: `step` is not in [0, steps).
    """
    if not 0 <= step < steps:
        raise ValueError(f"step {step} of {steps}")
    peak, final = recipe.peak_learning_rate, recipe.final_learning_rate
    warmup = warmup_steps(steps, recipe)
    if step < warmup:
        return peak * ((step + 1) / warmup)
    top = max(warmup - 1, 0)
    if step == top:
        return peak
    weight = 0.5 * (1.0 + math.cos(math.pi * (step - top) / (steps - 1 - top)))
    return weight * peak + (1.0 - weight) * final


def _undecorated(function: Any) -> Any:
    return getattr(function, "__wrapped__", function)


_STEP = _undecorated(torch.optim.AdamW.step)


class AdamW(torch.optim.AdamW):
    """torch's own, without the decorators that load torch's compiler for 3 s when the first optimizer is made. Nothing here is compiled."""

    add_param_group = _undecorated(torch.optim.AdamW.add_param_group)
    zero_grad = _undecorated(torch.optim.AdamW.zero_grad)

    def step(self, closure: Any = None) -> Any:
        """One step, outside of autograd."""
        with torch.no_grad():
            return _STEP(self, closure)


def build_optimizer(model: LanguageModel, recipe: Recipe) -> AdamW:
    """AdamW on the model's own groups (no decay on the dynamics, norms and biases), one fused kernel a step."""
    return AdamW(model.parameter_groups(recipe.weight_decay), lr=recipe.peak_learning_rate, betas=recipe.betas, fused=True)


def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale all gradients so that their joint 2-norm is at most `limit`; returns the norm before, a scalar tensor.

    The norm is that of the whole model, also where processes hold shards of it.
    """
    owned = list(parameters)
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in owned if p.grad is not None]))
    torch.nn.utils.clip_grads_with_norm_(owned, limit, norm)
    return norm


def precision_context(precision: Literal["float32", "bf16-mixed"], device: torch.device) -> AbstractContextManager[object]:
    """What the forward pass runs in. bf16-mixed: matrix products in bfloat16, weights, states and losses in float32."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
