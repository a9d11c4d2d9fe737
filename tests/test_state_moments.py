"""Moments of the states at every position against states that were materialised one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from conftest import REPOSITORY
from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.ops import backends, gated_delta, gla, selective_scan, ssd, state_moments, wkv6
from farstate.ops.moment_scan import ANCHOR_STEPS

# Largest error, relative to the largest entry of the float64 reference.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}

MODULES = {"ssd": ssd, "gla": gla, "wkv6": wkv6, "gated_delta": gated_delta, "selective_scan": selective_scan}
IN_TIME = {
    "ssd": ("x", "dt", "B", "C"),
    "gla": ("q", "k", "v", "log_decay"),
    "wkv6": ("r", "k", "v", "log_decay"),
    "gated_delta": ("q", "k", "v", "log_decay", "beta"),
    "selective_scan": ("x", "dt", "B", "C"),
}


def inputs(
    operation: str,
    time: int,
    strength: float = 0.3,
    seed: int = 0,
    *,
    batch: int = 2,
    heads: int = 4,
    keys: int = 5,
    values: int = 3,
) -> dict[str, Tensor]:
    """Arguments of an operation in float64, odd sizes; `strength` scales the log decays."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    groups = min(heads, 2)
    if operation == "ssd":
        return {
            "x": draw(batch, time, heads, values),
            "dt": draw(batch, time, heads).abs() * strength,
            "A": -draw(heads).exp(),
            "B": draw(batch, time, groups, keys),
            "C": draw(batch, time, groups, keys),
            "D": draw(heads),
            "initial_state": draw(batch, heads, values, keys),
        }
    if operation == "selective_scan":
        return {
            "x": draw(batch, time, heads),
            "dt": draw(batch, time, heads).abs() * strength,
            "A": -draw(heads, keys).exp(),
            "B": draw(batch, time, keys),
            "C": draw(batch, time, keys),
            "D": draw(heads),
            "initial_state": draw(batch, heads, keys),
        }
    found = {
        "r" if operation == "wkv6" else "q": draw(batch, time, heads, keys),
        "k": draw(batch, time, heads, keys),
        "v": draw(batch, time, heads, values),
    }
    if operation == "gated_delta":
        found["k"] = torch.nn.functional.normalize(found["k"], dim=-1)
        found["log_decay"] = -draw(batch, time, heads).abs() * strength
        found["beta"] = draw(batch, time, heads).sigmoid()
    else:
        found["log_decay"] = -draw(batch, time, heads, keys).abs() * strength
    if operation == "wkv6":
        found["bonus"] = draw(heads, keys)
    return found | {"initial_state": draw(batch, heads, keys, values)}


def definition(operation: str, arguments: dict[str, Tensor]) -> state_moments.Moments:
    in_time = {name: arguments[name] for name in IN_TIME[operation]}
    constants = {name: value for name, value in arguments.items() if name not in in_time and name != "initial_state"}
    return state_moments.naive(MODULES[operation].naive, in_time, constants, arguments.get("initial_state"))


def recorded(
    operation: str, function: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[tuple[Tensor, Tensor], state_moments.Moments]:
    with state_moments.recording() as record:
        result = state_moments.observed(operation, function)(**arguments)
    (moments,) = record.layers
    return result, moments


def error(actual: Tensor, expected: Tensor) -> float:
    assert torch.isfinite(actual).all()
    return ((actual.double() - expected.double()).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("path", ["chunked", "naive"])
@pytest.mark.parametrize(("time", "strength"), [(1, 0.3), (2, 3.0), (47, 0.3), (33, 20.0)])
@pytest.mark.parametrize("operation", MODULES)
def test_moments_are_those_of_the_states(operation: str, time: int, strength: float, path: str, dtype: torch.dtype) -> None:
    arguments = inputs(operation, time, strength)
    expected = definition(operation, arguments)
    outputs = MODULES[operation].naive(**arguments)
    cast = {name: value.to(dtype) for name, value in arguments.items()}
    result, moments = recorded(operation, getattr(MODULES[operation], path), cast)
    errors = {
        "sums": error(moments.sums, expected.sums),
        "squared norms": error(moments.squared_norms, expected.squared_norms),
        "outputs": error(result[0], outputs[0]),
        "final state": error(result[1], outputs[1]),
    }
    print(errors)
    assert max(errors.values()) <= TOLERANCE[dtype], errors
    assert moments.entries == expected.entries
    assert moments.sums.dtype == moments.squared_norms.dtype == torch.float64
    assert result[1].dtype == dtype


@pytest.mark.parametrize("operation", MODULES)
def test_without_an_initial_state(operation: str) -> None:
    arguments = inputs(operation, 19)
    del arguments["initial_state"]
    expected = definition(operation, arguments)
    _, moments = recorded(operation, MODULES[operation].chunked, arguments)
    assert error(moments.sums, expected.sums) <= TOLERANCE[torch.float64]
    assert error(moments.squared_norms, expected.squared_norms) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("operation", MODULES)
def test_decays_of_all_strengths_in_one_sequence(operation: str) -> None:
    arguments = inputs(operation, 67)
    name = "dt" if operation in ("ssd", "selective_scan") else "log_decay"
    generator = torch.Generator().manual_seed(5)
    strengths = torch.exp(torch.empty(arguments[name].shape, dtype=torch.float64).uniform_(-9.2, 3.0, generator=generator))
    if name == "dt":
        arguments["A"] = torch.full_like(arguments["A"], -1.0)
    arguments[name] = strengths if name == "dt" else -strengths
    expected = definition(operation, arguments)
    _, moments = recorded(operation, MODULES[operation].chunked, {n: v.float() for n, v in arguments.items()})
    relative = ((moments.squared_norms.double() - expected.squared_norms) / expected.squared_norms).abs().max().item()
    print(f"{operation}: each squared norm to {relative:.1e}")
    assert relative <= 1e-4
    assert error(moments.sums, expected.sums) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("operation", MODULES)
def test_nothing_drifts(operation: str) -> None:
    """Slow decays over many chunks and anchors: every position, relative to its own norm."""
    time = 4 * ANCHOR_STEPS + 77
    arguments = {name: value.float() for name, value in inputs(operation, time, strength=1e-3).items()}
    exact = definition(operation, {name: value.double() for name, value in arguments.items()})
    _, moments = recorded(operation, MODULES[operation].chunked, arguments)
    squares = ((moments.squared_norms.double() - exact.squared_norms) / exact.squared_norms).abs().amax((0, 2))
    sums = ((moments.sums.double() - exact.sums).abs() / (exact.norm * exact.entries**0.5)).amax((0, 2))
    print(
        f"{operation}: squared norms to {squares.max():.1e}, sums to {sums.max():.1e}, first and last hundred {squares[:100].max():.1e} {squares[-100:].max():.1e}"
    )
    assert squares.max() <= 1e-5
    assert sums.max() <= 1e-5


@pytest.mark.parametrize("operation", MODULES)
def test_a_small_standard_deviation_keeps_its_digits(operation: str) -> None:
    """Entries that are all nearly the same. Rounding of the states themselves moves their relative standard deviation by
    mean / std; float32 sums of them and of their squares do by the square of it, which is allowed for Mamba-1."""
    arguments = inputs(operation, 4 * ANCHOR_STEPS, strength=1e-3)
    for name in {"x", "B", "k", "v"} & arguments.keys():
        arguments[name] = 1.0 + 0.5 * arguments[name]
    for name in {"A", "beta"} & arguments.keys():
        arguments[name] = torch.full_like(arguments[name], -1.0 if name == "A" else 0.05)
    if operation == "gated_delta":
        arguments["k"] = torch.nn.functional.normalize(arguments["k"], dim=-1)
    arguments["initial_state"] = torch.ones_like(arguments["initial_state"])
    arguments = {name: value.float() for name, value in arguments.items()}
    exact = definition(operation, {name: value.double() for name, value in arguments.items()})
    _, moments = recorded(operation, MODULES[operation].chunked, arguments)
    ratio = (exact.mean / exact.std)[:, ANCHOR_STEPS:].median().item()
    relative = ((moments.std - exact.std).abs() / exact.std)[:, ANCHOR_STEPS:]
    print(f"{operation}: mean / std {ratio:.0f}, std to {relative.max():.1e}, {relative.mean():.1e} on average")
    assert ratio > 8.0
    assert relative.mean() <= 2.5e-7 * (ratio**2 if operation == "selective_scan" else ratio)


@pytest.mark.parametrize("size", [1e3, 1e9])
@pytest.mark.parametrize("operation", ["gla", "wkv6"])
def test_large_inputs_do_not_overflow_where_decays_are_written_as_products(operation: str, size: float) -> None:
    arguments = inputs(operation, 64)
    arguments |= {"k": size * arguments["k"], "v": size * arguments["v"], "log_decay": torch.full_like(arguments["k"], -0.93)}
    expected = definition(operation, arguments)
    k, v, log_decay, initial_state = (arguments[name].float() for name in ("k", "v", "log_decay", "initial_state"))
    found = state_moments.vector_decay(k, v, log_decay, initial_state=initial_state)
    assert error(found.sums, expected.sums) <= TOLERANCE[torch.float32]
    assert error(found.squared_norms, expected.squared_norms) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("operation", MODULES)
def test_a_state_that_is_forgotten_altogether(operation: str, dtype: torch.dtype) -> None:
    """Log decays of −∞."""
    arguments = inputs(operation, 21)
    if "A" in arguments:
        arguments["A"][1] = -torch.inf
    else:
        arguments["log_decay"][:, 4:15:5] = -torch.inf
    expected = definition(operation, arguments)
    (y, final), moments = recorded(operation, MODULES[operation].chunked, {n: v.to(dtype) for n, v in arguments.items()})
    assert error(moments.sums, expected.sums) <= TOLERANCE[dtype]
    assert error(moments.squared_norms, expected.squared_norms) <= TOLERANCE[dtype]
    if operation not in ("gla", "wkv6"):
        # The others leave it to the operation where decays are too strong.
        exact = MODULES[operation].naive(**arguments)
        assert error(y, exact[0]) <= TOLERANCE[dtype]
        assert error(final, exact[1]) <= TOLERANCE[dtype]


@pytest.mark.parametrize("path", ["naive", "chunked", "recorded", "recorded, apart"])
@pytest.mark.parametrize("operation", MODULES)
def test_inputs_are_not_written_to(operation: str, path: str) -> None:
    """Of any layout: what need not be copied to be dense is an alias of the caller's."""
    function = getattr(MODULES[operation], "naive" if path in ("naive", "recorded, apart") else "chunked")
    sizes = (
        {},
        {"keys": 1},
        {"values": 1},
        {"heads": 1},
        {"batch": 1, "heads": 1},
        {"batch": 1, "heads": 1, "keys": 1, "values": 1},
    )
    for (size, time), layout in itertools.product(itertools.product(sizes, (1, 32)), ("dense", "transposed", "time last")):
        arguments = {name: value.float() for name, value in inputs(operation, time, **size).items()}
        if layout == "transposed":
            arguments = {name: value.mT.contiguous().mT if value.dim() > 1 else value for name, value in arguments.items()}
        elif layout == "time last":
            arguments = {name: value.transpose(0, -1).contiguous().transpose(0, -1) for name, value in arguments.items()}
        before = {name: value.clone() for name, value in arguments.items()}
        versions = {name: value._version for name, value in arguments.items()}
        with torch.no_grad():
            if path.startswith("recorded"):
                recorded(operation, function, arguments)
            else:
                function(**arguments)
        if not path.startswith("recorded"):
            leaves = {name: value.detach().requires_grad_() for name, value in arguments.items()}
            y, final = function(**leaves)
            torch.autograd.grad((y.sum() + final.sum()), list(leaves.values()), allow_unused=True)
        for name, value in arguments.items():
            assert torch.equal(value, before[name]), (name, size, time, layout)
            assert value._version == versions[name], (name, size, time, layout)


@pytest.mark.parametrize("operation", MODULES)
def test_gradients_flow_as_without_a_recording(operation: str) -> None:
    arguments = {name: value.requires_grad_() for name, value in inputs(operation, 9).items()}

    def gradients(function: Callable[..., Any]) -> tuple[Tensor, ...]:
        y, final = function(**arguments)
        return torch.autograd.grad(y.square().sum() + final.square().sum(), list(arguments.values()))

    plain = gradients(MODULES[operation].chunked)
    with state_moments.recording() as record:
        observed = gradients(state_moments.observed(operation, MODULES[operation].chunked))
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert not record.layers[0].sums.requires_grad
    assert error(record.layers[0].squared_norms, definition(operation, arguments).squared_norms.detach()) <= 1e-12


def test_half_precision_inputs_are_computed_in_float32() -> None:
    arguments = inputs("ssd", 17)
    halves = {name: value.bfloat16() if name in "xBC" else value.float() for name, value in arguments.items()}
    (y, final), moments = recorded("ssd", ssd.chunked, halves)
    expected = definition("ssd", {name: value.double() for name, value in halves.items()})
    assert (y.dtype, final.dtype, moments.sums.dtype) == (torch.bfloat16, torch.float32, torch.float64)
    assert error(moments.squared_norms, expected.squared_norms) <= TOLERANCE[torch.float32]


def test_statistics_of_the_entries() -> None:
    entries = torch.randn(2, 3, 4, 35, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    moments = state_moments.Moments(entries.sum(-1), entries.square().sum(-1), 35)
    torch.testing.assert_close(moments.mean, entries.mean(-1))
    torch.testing.assert_close(moments.std, entries.std(-1, correction=0))
    torch.testing.assert_close(moments.norm, torch.linalg.vector_norm(entries, dim=-1))
    still = state_moments.Moments(torch.tensor([0.3 * 3]), torch.tensor([0.09 * 3 - 1e-9]), 3)
    assert still.std.isfinite().all()


def test_nothing_is_wrapped_outside_a_recording() -> None:
    assert state_moments.observed("ssd", ssd.chunked) is ssd.chunked
    with state_moments.recording():
        assert state_moments.observed("ssd", ssd.chunked) is not ssd.chunked
    assert state_moments.observed("ssd", ssd.chunked) is ssd.chunked


def tiny(architecture: str) -> LanguageModel:
    """The tiny model of that architecture in the tests' configurations, away from its initialisation."""
    files = [yaml.safe_load((REPOSITORY / "config" / name).read_text()) for name in ("test.yaml", "test_architectures.yaml")]
    models = [model for file in files for model in file["models"].values()]
    shape = next(model["shape"] for model in models if model["architecture"] == architecture)
    config = config_from_json({**shape, "architecture": architecture, "vocabulary_size": 17})
    model, generator = LanguageModel(config, dtype=torch.float64), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


@pytest.mark.parametrize("backend", ["chunked", "naive"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_records_every_recurrent_layer(architecture: str, backend: str) -> None:
    """Against the statistics of `State.entries` after every token, in a second segment that starts from a state."""
    model = tiny(architecture)
    tokens = torch.randint(0, 17, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), backends.use(backend):
        _, state = model(tokens[:, :3])
        with state_moments.recording() as record:
            hidden, final = model(tokens[:, 3:], state)
        plain, _ = model(tokens[:, 3:], state)
        torch.testing.assert_close(hidden, plain)
        recurrent = [layer for layer in range(len(state)) if state.entries(layer).shape[-1]]
        assert len(record.layers) == len(recurrent)
        for position in range(tokens.shape[1] - 3):
            _, state = model(tokens[:, 3 + position : 4 + position], state)
            for moments, layer in zip(record.layers, recurrent, strict=True):
                entries = state.entries(layer)
                assert moments.entries == entries.shape[-1]
                torch.testing.assert_close(moments.mean[:, position], entries.mean(-1))
                torch.testing.assert_close(moments.std[:, position], entries.std(-1, correction=0))
                torch.testing.assert_close(moments.norm[:, position], torch.linalg.vector_norm(entries, dim=-1))
    assert final.batch_size == 2
