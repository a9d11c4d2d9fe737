"""Other libraries' models, and modules of one's own, behind the contract `model(tokens, state) → (hidden, state)`.

A model of transformers or fla cannot be given an initial state with a gradient, nor continue from one in training: its forward pass
takes a cache that serves generation. So its *parameters* are taken, not its forward pass: the same `nn.Parameter` objects become those
of a `LanguageModel`, under our names. Nothing is copied: an optimizer on either trains both, and theirs saves what was trained.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from farstate.errors import FarstateError
from farstate.models.checkpoints import Unfilled
from farstate.models.formats import fla, transformers
from farstate.models.formats.checks import check_names_and_shapes
from farstate.models.formats.files import dtypes_of
from farstate.models.language_model import LanguageModel
from farstate.state import State
from farstate.trees import Layout

_FORMATS = {"transformers": transformers, "fla": fla}


def adapt(model: nn.Module, batch_dimension: int = 0) -> LanguageModel | Carrying:
    """`model` as one that follows the contract, with the same parameters.

    Args:
        model: transformers' `MambaForCausalLM` or `Mamba2ForCausalLM`; fla's `GLAForCausalLM`, `RWKV6ForCausalLM`,
            `Mamba2ForCausalLM` or `GatedDeltaNetForCausalLM`; or a module of one's own, `module(tokens, state=None) → (hidden, state)`,
            whose state is any nest of tensors.
        batch_dimension: of the tensors of such a module's state.

    Returns:
        A `LanguageModel` whose parameters are those of the library's model, in training mode where that is; a `LanguageModel` itself;
        or a `Carrying` around the module.

    Raises:
        FarstateError: a library's model of another architecture, or with an option or tensors that ours does not have (quantised
            weights, adapters of other kinds inside).
    """
    if isinstance(model, LanguageModel | Carrying):
        return model
    library = next(
        (base.__module__.partition(".")[0] for base in type(model).__mro__ if base.__module__.startswith(tuple(_FORMATS))), ""
    )
    if library in _FORMATS:
        return _sharing(model, library)
    if callable(getattr(model, "save_pretrained", None)):
        raise FarstateError(
            f"{type(model).__name__}: neither a model of transformers nor of fla; save it in a format that Farstate reads and "
            "load that (farstate.load)"
        )
    return Carrying(model, batch_dimension)


def _sharing(model: nn.Module, library: str) -> LanguageModel:
    kind = type(model).__name__
    form = _FORMATS[library]
    data = {**model.config.to_dict(), "model_type": model.config.model_type}  # type: ignore[operator, union-attr]
    if data.get("quantization_config") is not None or getattr(model, "is_quantized", False):
        raise FarstateError(f"{kind}: quantised weights cannot be trained or continued here; load it in a floating-point dtype")
    config = form.to_config(data, Path(f"{kind}.config"))
    theirs = {form.our_name(name, data): p for name, p in model.named_parameters(remove_duplicate=False)}
    try:
        # Sizes only: no second copy of the weights ever exists.
        with torch.device("meta"):
            ours = Unfilled(config)
    except (RuntimeError, OverflowError, TypeError):
        raise FarstateError(f"{kind}: its configuration has sizes that no tensor can have") from None
    expected = dict(ours.named_parameters(remove_duplicate=False))
    check_names_and_shapes(theirs, expected, Path(kind))
    for name in expected:
        owner, _, leaf = name.rpartition(".")
        setattr(ours.get_submodule(owner), leaf, theirs[name])
    ours.origin = {"format": library, "config": data, "storage": dtypes_of(theirs)}
    return ours.train(model.training)


class Carrying(nn.Module):
    """A module of one's own, its state packed as `State`.

    Args:
        module: `module(tokens, state=None) → (hidden, state)`, state a nest of lists, tuples and dictionaries of floating-point
            tensors; None is its zero state.
        batch_dimension: where every tensor of it has the batch: 1 in `torch.nn.GRU` and `torch.nn.LSTM`.
    """

    def __init__(self, module: nn.Module, batch_dimension: int = 0) -> None:
        super().__init__()
        self.module = module
        self.batch_dimension = batch_dimension
        self._layout: Layout | None = None
        self._zero: State | None = None

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """tokens (B, …) and the state before them → what the module returns, its state as `State`, with its gradients.

        Raises:
            FarstateError: the module returns no pair, or a state that is no nest of tensors; or a state is given before a first call
                without one has shown what the module's looks like.
        """
        if state is not None and self._layout is None:
            raise FarstateError(f"{type(self.module).__name__}: call it once without a state, which shows how its states lie")
        own = None if state is None or self._layout is None else self._layout.tree(state)
        result = self.module(tokens, own)
        if not isinstance(result, tuple) or len(result) != 2:
            raise FarstateError(
                f"{type(self.module).__name__}: returned {type(result).__name__}; a module that carries a state is called as "
                "module(tokens, state) and returns (hidden, state)"
            )
        hidden, own = result
        self._layout = Layout.of(own, self.batch_dimension)
        after = self._layout.state(own)
        self._zero = after.detach().select(()).zeros_like()
        return hidden, after

    def zero_state(self, batch_size: int) -> State:
        """Zeros of the shapes, dtypes and device of the states that it returned last.

        Raises:
            FarstateError: it has not been called yet.
        """
        if self._zero is None:
            raise FarstateError(
                f"{type(self.module).__name__}: call it once before its zero state is asked for; noise takes its shapes"
            )
        return self._zero.map(lambda tensor: tensor.new_zeros(batch_size, *tensor.shape[1:]))

    @property
    def head_weight(self) -> Tensor:
        """That of the module.

        Raises:
            FarstateError: it has none.
        """
        weight = getattr(self.module, "head_weight", None)
        if not isinstance(weight, Tensor):
            raise FarstateError(
                f"{type(self.module).__name__}: give it a property head_weight, (V, D), so that logits are hidden @ head_weight.T"
            )
        return weight
