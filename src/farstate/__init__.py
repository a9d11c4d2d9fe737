"""Farstate: how far does the state of a recurrent language model carry?

The names of `__all__` are for notebooks and training loops of one's own (docs/python.md). They are loaded when first asked for:
importing the package loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farstate.api import EffectiveRemembrance, effective_remembrance, load, nll, perplexity_by_position, save
    from farstate.errors import FarstateError
    from farstate.models.adapters import adapt
    from farstate.models.contract import Model, Recurrent
    from farstate.models.head import mean_nll, token_nll
    from farstate.models.language_model import LanguageModel
    from farstate.state import LayerState, State
    from farstate.training.initial_states import (
        FittedNoise,
        RandomNoise,
        StatePassing,
        TruncatedBackpropagation,
        ZeroInit,
    )
    from farstate.training.interventions import Intervention, Run, Windows
    from farstate.training.mechanism import Gaussian, Permuted

__version__ = "0.1.0"

__all__ = [
    "EffectiveRemembrance",
    "FarstateError",
    "FittedNoise",
    "Gaussian",
    "Intervention",
    "LanguageModel",
    "LayerState",
    "Model",
    "Permuted",
    "RandomNoise",
    "Recurrent",
    "Run",
    "State",
    "StatePassing",
    "TruncatedBackpropagation",
    "Windows",
    "ZeroInit",
    "adapt",
    "effective_remembrance",
    "load",
    "mean_nll",
    "nll",
    "perplexity_by_position",
    "save",
    "token_nll",
]

_WHERE = {
    "api": ("EffectiveRemembrance", "effective_remembrance", "load", "nll", "perplexity_by_position", "save"),
    "errors": ("FarstateError",),
    "models.adapters": ("adapt",),
    "models.contract": ("Model", "Recurrent"),
    "models.head": ("mean_nll", "token_nll"),
    "models.language_model": ("LanguageModel",),
    "state": ("LayerState", "State"),
    "training.initial_states": ("FittedNoise", "RandomNoise", "StatePassing", "TruncatedBackpropagation", "ZeroInit"),
    "training.interventions": ("Intervention", "Run", "Windows"),
    "training.mechanism": ("Gaussian", "Permuted"),
}


def __getattr__(name: str) -> Any:
    for module, names in _WHERE.items():
        if name in names:
            value = getattr(import_module(f"farstate.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'farstate' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
