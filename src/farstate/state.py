"""What a recurrent language model carries from one segment to the next.

A `State` holds, for every layer, the recurrent state and whatever else the layer needs to continue exactly
(the last columns of a convolution, a token shift). Interventions and statistics work on it without knowing
the architecture: dimension 0 of every tensor is the batch, dimension 1 of a recurrent state is the head.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from farstate.errors import FarstateError
from farstate.tensor_files import write_tensors

_FORMAT = "farstate.state"


@dataclass(frozen=True, eq=False)
class LayerState:
    """The state of one layer.

    Attributes:
        recurrent: (batch, head, ...), float32 or float64; Mamba-2: (B, H, P, N). A layer without a recurrence has (B, H, 0).
        auxiliary: tensors with the batch first, by name; Mamba-2: `conv`, (B, channels, width − 1), oldest column first.
            Floating point, zero in the zero state.
    """

    recurrent: Tensor
    auxiliary: dict[str, Tensor] = field(default_factory=dict)

    def map(self, fn: Callable[[Tensor], Tensor]) -> LayerState:
        """`fn` applied to every tensor."""
        return LayerState(fn(self.recurrent), {name: fn(tensor) for name, tensor in self.auxiliary.items()})

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.recurrent, *self.auxiliary.values())


@dataclass(frozen=True, eq=False)
class State:
    """The state of a whole model, one `LayerState` a layer. Immutable: every method returns a new object.

    Raises:
        ValueError: no layer, or tensors that disagree on batch size or device.
    """

    layers: tuple[LayerState, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a state needs at least one layer")
        batch_size, device = self.batch_size, self.device
        for number, layer in enumerate(self.layers):
            if layer.recurrent.dim() < 3:
                raise ValueError(
                    f"layer {number}: the recurrent state must be (batch, head, ...), found {tuple(layer.recurrent.shape)}"
                )
            for tensor in layer.tensors():
                if tensor.shape[0] != batch_size or tensor.device != device:
                    raise ValueError(
                        f"layer {number}: shape {tuple(tensor.shape)} on {tensor.device} beside a state of batch size {batch_size} on {device}"
                    )

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def batch_size(self) -> int:
        return self.layers[0].recurrent.shape[0]

    @property
    def device(self) -> torch.device:
        return self.layers[0].recurrent.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer.tensors())

    def map(self, fn: Callable[[Tensor], Tensor]) -> State:
        """`fn` applied to every tensor, recurrent and auxiliary."""
        return State(tuple(layer.map(fn) for layer in self.layers))

    def detach(self) -> State:
        """The same values, cut from the graph: no gradient flows from one batch into the one before."""
        return self.map(torch.Tensor.detach)

    def to(self, *args: Any, **kwargs: Any) -> State:
        """`Tensor.to` on every tensor."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def zeros_like(self) -> State:
        """The zero state of the same shapes."""
        return self.map(torch.zeros_like)

    def reset(self, mask: Tensor, auxiliary: bool = True) -> State:
        """Rows where `mask` is true become zero; the others stay as they are.

        Args:
            mask: (B,), boolean.
            auxiliary: whether the auxiliary tensors of those rows are cleared too.

        A row that holds NaN is cleared as well, in value and in gradient, which a multiplication by zero would not do.

        Raises:
            ValueError: `mask` is not a boolean vector of the batch size.
        """
        if mask.dtype != torch.bool or mask.shape != (self.batch_size,):
            raise ValueError(f"mask must be boolean of shape ({self.batch_size},), found {mask.dtype} {tuple(mask.shape)}")
        mask = mask.to(self.device)

        def clear(tensor: Tensor) -> Tensor:
            return torch.where(mask.view(-1, *(1,) * (tensor.dim() - 1)), tensor.new_zeros(()), tensor)

        return State(
            tuple(layer.map(clear) if auxiliary else LayerState(clear(layer.recurrent), layer.auxiliary) for layer in self.layers)
        )

    def without_auxiliary(self) -> State:
        """The recurrent state as it is, the auxiliary tensors zero."""
        return State(
            tuple(
                LayerState(layer.recurrent, {name: torch.zeros_like(tensor) for name, tensor in layer.auxiliary.items()})
                for layer in self.layers
            )
        )

    def select(self, index: Tensor | Sequence[int]) -> State:
        """The rows `index`, in that order, repetitions allowed; a boolean mask keeps the rows where it is true.

        Raises:
            IndexError: an index outside the batch.
        """
        index = torch.as_tensor(index, device=self.device)
        if index.dtype == torch.bool:
            if index.shape != (self.batch_size,):
                raise IndexError(f"a mask of shape {tuple(index.shape)} on a batch of {self.batch_size}")
            index = index.nonzero().squeeze(1)
        elif index.numel() == 0:
            index = index.long()
        return self.map(lambda tensor: tensor.index_select(0, index))

    def permute(self, index: Tensor | Sequence[int]) -> State:
        """The rows in the order `index`, which must name each row exactly once.

        Raises:
            ValueError: `index` is not a permutation of the batch.
        """
        index = torch.as_tensor(index, device=self.device)
        rows = torch.arange(self.batch_size, device=self.device)
        if index.shape != rows.shape or not torch.equal(index.sort().values, rows):
            raise ValueError(f"not a permutation of {self.batch_size} rows: {index.tolist()}")
        return self.select(index)

    @staticmethod
    def from_tensors(tree: Any, batch_dimension: int = 0) -> State:
        """The state of a module of one's own: any nest of lists, tuples and dictionaries of tensors, one layer a tensor.

        Args:
            tree: floating-point tensors with the batch at `batch_dimension` (1 for `torch.nn.GRU` and `torch.nn.LSTM`). Of three or
                more dimensions, batch first, they are (batch, head, …); of fewer they become one head, (batch, 1, entries).

        Raises:
            FarstateError: a leaf that is something else.
        """
        from farstate.trees import Layout

        return Layout.of(tree, batch_dimension).state(tree)

    def to_tensors(self, like: Any, batch_dimension: int = 0) -> Any:
        """The nest that `from_tensors` was given, of the form of `like`, whose batch may be of another size.

        Raises:
            FarstateError: `like` has another number of tensors.
        """
        from farstate.trees import Layout

        return Layout.of(like, batch_dimension).tree(self)

    @staticmethod
    def cat(states: Sequence[State]) -> State:
        """One state whose batch is the batches of `states` one after the other.

        Auxiliary tensors that grow with the text (an attention cache: time is dimension 1, the latest entry last) are
        filled up with zeros at the front to the longest.

        Raises:
            ValueError: nothing to join, or states of different models.
        """
        if not states:
            raise ValueError("no states to join")
        first = states[0]
        for state in states[1:]:
            if len(state) != len(first) or any(
                mine.auxiliary.keys() != other.auxiliary.keys() for mine, other in zip(state.layers, first.layers, strict=True)
            ):
                raise ValueError("states of different models cannot be joined")
        layers = []
        for parts in zip(*(state.layers for state in states), strict=True):
            auxiliary = {name: joined([part.auxiliary[name] for part in parts]) for name in parts[0].auxiliary}
            layers.append(LayerState(torch.cat([part.recurrent for part in parts]), auxiliary))
        return State(tuple(layers))

    def entries(self, layer: int) -> Tensor:
        """The recurrent state of `layer` as (batch, head, entries): a view where the memory layout allows it."""
        return self.layers[layer].recurrent.flatten(2)

    def with_entries(self, layer: int, values: Tensor) -> State:
        """This state with the recurrent entries of `layer` replaced by `values`, (batch, head, entries).

        Raises:
            ValueError: `values` has another shape than `entries(layer)`.
        """
        old = self.layers[layer]
        expected = (*old.recurrent.shape[:2], old.recurrent.shape[2:].numel())
        if tuple(values.shape) != expected:
            raise ValueError(f"layer {layer}: entries of shape {tuple(values.shape)}, expected {expected}")
        new = LayerState(values.to(old.recurrent).reshape(old.recurrent.shape), old.auxiliary)
        position = layer % len(self)
        return State((*self.layers[:position], new, *self.layers[position + 1 :]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one safetensors file, whole or not at all."""
        tensors = {}
        for number, layer in enumerate(self.layers):
            tensors[f"layers.{number}.recurrent"] = layer.recurrent
            for name, tensor in layer.auxiliary.items():
                tensors[f"layers.{number}.auxiliary.{name}"] = tensor
        # Views of one buffer share memory, which safetensors refuses.
        owned = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        write_tensors(path, owned, {"format": _FORMAT, "layers": str(len(self))})

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> State:
        """Read a state that `save` wrote.

        Raises:
            FarstateError: no such file, a damaged one, or one that holds something else.
        """
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise FarstateError(f"{path}: not a saved state")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except FileNotFoundError:
            raise FarstateError(f"{path}: no such file") from None
        except (SafetensorError, OSError) as error:
            raise FarstateError(f"{path}: damaged or truncated ({error}); delete it and run again") from None
        layers = []
        for number in range(int(metadata["layers"])):
            prefix = f"layers.{number}.auxiliary."
            auxiliary = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            layers.append(LayerState(tensors[f"layers.{number}.recurrent"], auxiliary))
        return State(tuple(layers))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor whose rows are those of `tensors`; the shorter of those that grow with the text are filled up at the front."""
    if len({tensor.shape[1:] for tensor in tensors}) > 1:
        longest = max(tensor.shape[1] for tensor in tensors)
        tensors = [torch.cat([t.new_zeros(t.shape[0], longest - t.shape[1], *t.shape[2:]), t], dim=1) for t in tensors]
    return torch.cat(list(tensors))
