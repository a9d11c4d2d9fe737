"""What every architecture must do, as functions of a configuration: splits, states, gradients, counts, initialisation."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import golden
from farstate.models.config import Config
from farstate.models.head import mean_nll
from farstate.models.language_model import LanguageModel
from farstate.ops import backends
from farstate.state import State

SPLIT = {"rtol": 1e-9, "atol": 1e-10}
"""In float64: how far a sequence in pieces may be from the whole."""


def tokens(vocabulary: int, batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(0, vocabulary, (batch, time), generator=torch.Generator().manual_seed(seed))


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


def random_model(config: Config) -> LanguageModel:
    """In float64, away from the initialisation, where norms are one and matrices zero and mistakes cancel."""
    model = LanguageModel(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def same_states(actual: State, expected: State) -> None:
    for mine, theirs in zip(actual.layers, expected.layers, strict=True):
        assert mine.auxiliary.keys() == theirs.auxiliary.keys()
        torch.testing.assert_close(mine.recurrent, theirs.recurrent, **SPLIT)
        for name, tensor in mine.auxiliary.items():
            torch.testing.assert_close(tensor, theirs.auxiliary[name], **SPLIT)


def check_split(config: Config, cuts: list[int]) -> None:
    """A sequence of 19 tokens cut anywhere is the whole; `state=None` is the zero state."""
    model = random_model(config)
    ids = tokens(config.vocabulary_size, 2, 19)
    with torch.no_grad():
        whole, final = model(ids)
        state, parts = model.zero_state(2), []
        for start, end in itertools.pairwise(sorted({0, 19, *cuts})):
            hidden, state = model(ids[:, start:end], state)
            parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **SPLIT)
    same_states(state, final)
    for mine, zero in zip(final.layers, model.zero_state(2).layers, strict=True):
        assert [t.shape for t in mine.tensors()] == [t.shape for t in zero.tensors()]


def check_gradients_through_the_state(config: Config) -> None:
    """All parameters get the gradient of the whole sequence through the carried state, and another one when it is detached."""
    model = random_model(config)
    ids = tokens(config.vocabulary_size, 2, 12)

    def gradients(cut: int | None, detach: bool = False) -> dict[str, Tensor]:
        model.zero_grad()
        state = None
        if cut is not None:
            _, state = model(ids[:, :cut])
        hidden, _ = model(ids[:, cut or 0 :], state.detach() if state is not None and detach else state)
        hidden[:, (5 if cut is None else 0) :].sin().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    whole, through, detached = gradients(None), gradients(5), gradients(5, detach=True)
    assert whole.keys() == through.keys()
    # Only an untied head has no part in the hidden states.
    assert whole.keys() >= {name for name, _ in model.named_parameters()} - {"lm_head.weight"}
    for name, gradient in whole.items():
        assert gradient.abs().max() > 0.0, f"no gradient reaches {name}"
        torch.testing.assert_close(through[name], gradient, rtol=1e-8, atol=1e-9, msg=name)
    assert any(relative(detached[name], gradient) > 1e-3 for name, gradient in whole.items())


def check_rows(config: Config) -> None:
    """Rows of a batch do not meet."""
    model = random_model(config)
    ids = tokens(config.vocabulary_size, 3, 10)
    with torch.no_grad():
        whole, _ = model(ids)
        for row in range(3):
            torch.testing.assert_close(model(ids[row : row + 1])[0], whole[row : row + 1], **SPLIT)


def check_backends(config: Config) -> None:
    """The model is the same on the definition and on the chunked form."""
    model = random_model(config)
    ids = tokens(config.vocabulary_size, 2, 37)
    results = []
    for backend in ("naive", "chunked"):
        with backends.use(backend), torch.no_grad():
            results.append(model(ids))
    torch.testing.assert_close(results[1][0], results[0][0], **SPLIT)
    same_states(results[1][1], results[0][1])


def check_count(config: Config) -> None:
    """`block_parameters` counts what is there."""
    model = LanguageModel(config)
    for layer, block in enumerate(model.backbone.layers):
        assert config.block_parameters(layer) == sum(parameter.numel() for parameter in block.parameters())
    assert config.parameter_count() == sum(parameter.numel() for parameter in model.parameters())


def check_initialisation(config: Config) -> None:
    """Everything is drawn, from the given generator and no other."""
    before = torch.get_rng_state()
    # Memory that holds NaN shows what is never written.
    first = LanguageModel(config, torch.Generator().manual_seed(3))
    second = LanguageModel(config, torch.Generator().manual_seed(3))
    other = LanguageModel(config, torch.Generator().manual_seed(4))
    assert torch.equal(before, torch.get_rng_state())
    differ = []
    for name, value in first.state_dict().items():
        assert value.isfinite().all(), name
        assert torch.equal(value, second.state_dict()[name]), name
        if not torch.equal(value, other.state_dict()[name]):
            differ.append(name)
    assert any("layers.1" in name for name in differ)


def check_autocast(config: Config) -> None:
    """Under bf16 autocast states stay float32 and near the exact ones, and all gradients are finite."""
    model = random_model(config).float()
    ids = tokens(config.vocabulary_size, 2, 17)
    exact, exact_state = model(ids[:, :-1])
    loss = mean_nll(exact, model.head_weight, ids[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, state = model(ids[:, :-1])
        rounded = mean_nll(hidden, model.head_weight, ids[:, 1:])
    assert all(tensor.dtype == torch.float32 for layer in state.layers for tensor in layer.tensors())
    assert relative(state.layers[0].recurrent, exact_state.layers[0].recurrent) < 0.05
    torch.testing.assert_close(rounded, loss, rtol=0.05, atol=0.0)
    rounded.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def check_golden(config: Config, name: str) -> None:
    """Outputs, states and gradients against stored numbers, in two segments."""
    model = LanguageModel(config, dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(golden.ramp(*parameter.shape, phase=float(number), scale=0.7))
    ids = torch.tensor([[1, 5, 2, 0, 3, 3, 6], [4, 4, 1, 2, 0, 6, 5]])
    _, state = model(ids[:, :3])
    hidden, state = model(ids[:, 3:-1], state)
    loss = mean_nll(hidden, model.head_weight, ids[:, 4:])
    loss.backward()
    values = {"hidden": hidden, "loss": loss, "recurrent": state.layers[-1].recurrent, **state.layers[-1].auxiliary}
    values |= {f"d {name}": p.grad.square().sum() for name, p in model.named_parameters() if p.grad is not None}
    fresh = LanguageModel(config, torch.Generator().manual_seed(5))
    values |= {f"initial {name}": value.double().square().sum() for name, value in fresh.state_dict().items()}
    golden.check("models", values, path=golden.FOLDER / f"{name}.json")


def check_against_fla(reference: dict[str, Any], model: LanguageModel, ids: Tensor, cuts: list[int]) -> dict[str, float]:
    """Logits, logits of a continued sequence and gradients of the mean cross entropy against fla's model of the same weights.

    Returns:
        The relative errors.
    """
    errors = {}
    with torch.no_grad():
        hidden, _ = model(ids)
        errors["logits"] = relative(F.linear(hidden, model.head_weight), reference["logits"])
        state, parts = None, []
        for start, end in itertools.pairwise([0, *cuts, ids.shape[1]]):
            hidden, state = model(ids[:, start:end], state)
            parts.append(F.linear(hidden, model.head_weight))
        errors["continued"] = relative(torch.cat(parts, dim=1), reference["continued"])
    model.train()
    hidden, _ = model(ids[:, :-1])
    mean_nll(hidden, model.head_weight, ids[:, 1:]).backward()
    gradients = {fla_name(name): parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == reference["gradients"].keys()
    for name, expected in reference["gradients"].items():
        gradient = gradients[name]
        assert gradient is not None
        errors[f"gradient of {name}"] = relative(gradient, expected)
    return errors


def fla_name(name: str) -> str:
    """The parameter `name` of ours in fla's models other than Mamba-2."""
    return (
        name.replace("backbone.embedding.", "model.embeddings.")
        .replace("backbone.norm_f.", "model.norm.")
        .replace("backbone.", "model.")
    )
