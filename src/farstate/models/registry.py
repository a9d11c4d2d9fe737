"""Architectures by name. A new one is a file with a configuration and a block, and one line here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from farstate.errors import FarstateError, nearest
from farstate.models.config import Mamba2Config
from farstate.models.mamba2 import Mamba2Block
from farstate.state import LayerState


class Block(Protocol):
    """What the language model asks of a layer."""

    def __call__(self, residual: Tensor, state: LayerState | None = None) -> tuple[Tensor, LayerState]: ...

    def zero_state(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> LayerState: ...

    def initialize(self, generator: torch.Generator) -> None: ...


BLOCKS: dict[str, Callable[[Mamba2Config], nn.Module]] = {
    "mamba2": Mamba2Block,
}


def build_block(config: Mamba2Config) -> nn.Module:
    """A layer of `config.architecture`, a `Block`, its parameters not yet initialised.

    Raises:
        FarstateError: the architecture is not registered.
    """
    try:
        return BLOCKS[config.architecture](config)
    except KeyError:
        raise FarstateError(
            f"unknown architecture '{config.architecture}'{nearest(config.architecture, BLOCKS)}; known: {', '.join(sorted(BLOCKS))}"
        ) from None
