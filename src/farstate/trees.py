"""States that are nests of tensors (lists, tuples, dictionaries, as user's modules return them), as `State` and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from farstate.errors import FarstateError
from farstate.state import LayerState, State


@dataclass(frozen=True)
class Layout:
    """How a nest of tensors lies in a `State`: one layer a tensor, in the nest's order, all of it recurrent state.

    A tensor of three or more dimensions, batch first, is (batch, head, …) as it is; one of fewer becomes one head, (batch, 1, entries).

    Attributes:
        spec: of the nest.
        shapes: of each tensor without its batch; the dimension at which the batch stood is left out.
        batch_dimension: where every tensor has its batch; 1 in `torch.nn.GRU` and `torch.nn.LSTM`.
    """

    spec: TreeSpec
    shapes: tuple[torch.Size, ...]
    batch_dimension: int = 0

    @staticmethod
    def of(tree: Any, batch_dimension: int = 0) -> Layout:
        """The layout of `tree`.

        Raises:
            FarstateError: no tensor in it, or a leaf that is not a tensor of floating-point numbers with such a dimension.
        """
        leaves, spec = tree_flatten(tree)
        if not leaves:
            raise FarstateError("a state without tensors: give a tensor, or lists, tuples or dictionaries of tensors")
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dim() <= batch_dimension:
                found = f"{tuple(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
                raise FarstateError(
                    f"leaf {number} of the state is {found}; floating-point tensors with the batch at dimension {batch_dimension} are "
                    "carried (batch_dimension=1 for torch.nn.GRU and LSTM); keep anything else out of the state"
                )
        return Layout(spec, tuple(leaf.movedim(batch_dimension, 0).shape[1:] for leaf in leaves), batch_dimension)

    def state(self, tree: Any) -> State:
        """`tree`, a nest of this layout, as a `State`; views of its tensors where their memory allows it."""
        layers = []
        for leaf in tree_flatten(tree)[0]:
            rows = leaf.movedim(self.batch_dimension, 0)
            layers.append(LayerState(rows if rows.dim() > 2 else rows.reshape(rows.shape[0], 1, -1)))
        return State(tuple(layers))

    def tree(self, state: State) -> Any:
        """`state` as a nest of this layout.

        Raises:
            FarstateError: a state of another number of tensors.
        """
        if len(state) != len(self.shapes):
            raise FarstateError(f"a state of {len(state)} tensors, where the module's has {len(self.shapes)}")
        leaves = []
        for layer, shape in zip(state.layers, self.shapes, strict=True):
            rows = layer.recurrent if len(shape) > 1 else layer.recurrent.reshape(state.batch_size, *shape)
            # cuDNN's recurrences refuse anything but contiguous states.
            leaves.append(rows.movedim(0, self.batch_dimension).contiguous())
        return tree_unflatten(leaves, self.spec)
