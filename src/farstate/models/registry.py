"""Architectures by name. No torch here: parameters and dry runs read the shapes.

A new one is a folder `models/<name>/` with `shape.py` and `block.py`, and one line in `ARCHITECTURES`
(docs/adding_an_architecture.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from farstate.errors import FarstateError, nearest
from farstate.models.config import Config, Shape
from farstate.models.gated_deltanet.shape import GatedDeltaNetConfig, GatedDeltaNetShape
from farstate.models.gla.shape import GLAConfig, GLAShape
from farstate.models.hybrid.shape import HybridConfig, HybridShape
from farstate.models.mamba1.shape import Mamba1Config, Mamba1Shape
from farstate.models.mamba2.shape import Mamba2Config, Mamba2Shape
from farstate.models.rwkv6.shape import RWKV6Config, RWKV6Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from farstate.state import LayerState


class Architecture(NamedTuple):
    """Its sizes as `params.yaml` gives them, and its configuration as `config.json` holds it."""

    shape: type[Shape]
    config: type[Config]


ARCHITECTURES: dict[str, Architecture] = {
    "mamba1": Architecture(Mamba1Shape, Mamba1Config),
    "mamba2": Architecture(Mamba2Shape, Mamba2Config),
    "gla": Architecture(GLAShape, GLAConfig),
    "rwkv6": Architecture(RWKV6Shape, RWKV6Config),
    "gated_deltanet": Architecture(GatedDeltaNetShape, GatedDeltaNetConfig),
    "hybrid": Architecture(HybridShape, HybridConfig),
}


class Block(Protocol):
    """What the language model asks of a layer, `Block(config, layer)` in `models/<architecture>/block.py`."""

    undecayed: ClassVar[tuple[str, ...]]
    """Last parts of the names of parameters with two or more dimensions that weight decay leaves alone."""

    def __call__(self, residual: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]: ...

    def zero_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> LayerState: ...

    def initialize(self, generator: torch.Generator) -> None: ...


def build_block(config: Config, layer: int) -> nn.Module:
    """Block number `layer` of `config.architecture`, a `Block`, its parameters not yet initialised.

    Raises:
        FarstateError: the architecture is not registered.
    """
    known_architecture(config.architecture)
    block: nn.Module = import_module(f"farstate.models.{config.architecture}.block").Block(config, layer)
    return block


def known_architecture(name: str) -> Architecture:
    """The architecture `name`.

    Raises:
        FarstateError: the architecture is not registered.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        raise FarstateError(
            f"unknown architecture '{name}'{nearest(name, ARCHITECTURES)}; known: {', '.join(sorted(ARCHITECTURES))}"
        ) from None


def config_from_json(data: dict[str, Any]) -> Config:
    """The configuration that a `config.json` written by `save_model` holds.

    Raises:
        FarstateError: the architecture is not registered.
        pydantic.ValidationError: a key or a value that the architecture does not know.
    """
    architecture = known_architecture(str(data.get("architecture")))
    return architecture.config.model_validate(
        {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    )
