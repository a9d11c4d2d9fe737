"""What a model must do to be evaluated, passed states to, and taken apart: the contract, as types.

`model(tokens, state=None) → (hidden, state)`. `None` is the zero state. Any split of a sequence into segments of any length ≥ 1, the
state handed on, gives the same outputs and the same final state. Nothing else is asked of a model that is trained from carried
states; evaluation also asks for the head, which it multiplies in chunks, so that logits of a long text never exist.

`farstate.models.adapters.adapt` makes one of other libraries' models, and of a module whose state is any nest of tensors.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from farstate.state import State


class Recurrent(Protocol):
    """What continues from a state."""

    def __call__(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """tokens (B, T) int64, T ≥ 1, and a state of batch size B → hidden (B, T, D), and the state after the segment.

        `hidden[:, t]` predicts token t + 1. The state carries gradients; whoever keeps it detaches it.
        """


class Model(Recurrent, Protocol):
    """A language model: what an evaluation needs."""

    @property
    def head_weight(self) -> Tensor:
        """(V, D): logits are `hidden @ head_weight.T`."""
