"""The recurrences against their sequential definitions: outputs and every gradient."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import golden
from farstate.numerics import NUMERICS
from farstate.ops import convolution, normalization, ssd
from farstate.ops.ssd_factored import FactoredSSD
from farstate.ops.ssd_masked import MaskedSSD

# Largest error of an output or gradient, relative to the largest entry of the float64 reference.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5}

Op = Callable[..., tuple[Tensor, ...]]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ssd_inputs(
    *,
    batch: int = 2,
    time: int = 7,
    heads: int = 4,
    channels: int = 3,
    state: int = 5,
    groups: int = 1,
    strength: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": draw(generator, batch, time, heads, channels),
        "dt": draw(generator, batch, time, heads).abs() * strength,
        "A": -draw(generator, heads).exp(),
        "B": draw(generator, batch, time, groups, state),
        "C": draw(generator, batch, time, groups, state),
        "D": draw(generator, heads),
        "initial_state": draw(generator, batch, heads, channels, state),
    }


def outputs_and_gradients(op: Op, inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """All outputs, and the gradients of a fixed random projection of all of them with respect to all inputs."""
    leaves = {name: value.to(dtype).clone().requires_grad_() for name, value in inputs.items()}
    outputs = op(**leaves)
    generator = torch.Generator().manual_seed(99)
    loss = sum((output * draw(generator, *output.shape).to(dtype)).sum() for output in outputs)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {f"output {n}": o for n, o in enumerate(outputs)} | {f"d {n}": g for n, g in zip(leaves, gradients, strict=True)}


def worst_error(actual: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, str]:
    errors = []
    for name, expected in reference.items():
        assert torch.isfinite(actual[name]).all(), f"{name} is not finite"
        if expected.numel():
            # An entry of the order of one sets the scale where the reference is zero, as dA is for one step from zero.
            scale = expected.abs().max().clamp(min=0.1)
            errors.append((((actual[name].double() - expected).abs().max() / scale).item(), name))
    return max(errors)


def compare(op: Op, definition: Op, inputs: dict[str, Tensor], dtype: torch.dtype, tolerance: float | None = None) -> None:
    reference = outputs_and_gradients(definition, inputs, torch.float64)
    error, name = worst_error(outputs_and_gradients(op, inputs, dtype), reference)
    print(f"{dtype}: worst relative error {error:.1e} in {name}")
    assert error <= (TOLERANCE[dtype] if tolerance is None else tolerance), f"{name}: {error:.2e}"


# --- state-space duality ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("strength", [0.3, 30.0], ids=["factored", "masked"])
@pytest.mark.parametrize(("time", "chunk"), [(1, None), (2, 4), (5, 1), (7, 3), (16, 16), (19, None), (33, 8)])
def test_chunked_is_the_definition(time: int, chunk: int | None, strength: float, groups: int, dtype: torch.dtype) -> None:
    inputs = ssd_inputs(time=time, groups=groups, strength=strength)
    compare(lambda **kw: ssd.chunked(**kw, chunk_length=chunk), ssd.naive, inputs, dtype)


@pytest.mark.parametrize("left_out", [("D",), ("initial_state",), ("D", "initial_state")])
@pytest.mark.parametrize("strength", [0.3, 30.0], ids=["factored", "masked"])
@pytest.mark.parametrize("time", [1, 6, 11])
def test_optional_inputs(time: int, strength: float, left_out: tuple[str, ...]) -> None:
    inputs = {name: value for name, value in ssd_inputs(batch=1, time=time, strength=strength).items() if name not in left_out}
    compare(lambda **kw: ssd.chunked(**kw, chunk_length=4), ssd.naive, inputs, torch.float64)


@pytest.mark.parametrize("form", [FactoredSSD, MaskedSSD])
@pytest.mark.parametrize("used", [0, 1], ids=["only y", "only the final state"])
@pytest.mark.parametrize("count", [1, 3])
def test_each_form_with_one_output_used(form: type[torch.autograd.Function], used: int, count: int) -> None:
    inputs = ssd_inputs(time=4 * count, strength=0.3)

    def of_form(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, initial_state: Tensor) -> tuple[Tensor, ...]:
        # The sum keeps every input in the graph of the output that is looked at.
        unused = 0.0 * sum(t.sum() for t in (C, D))
        return (form.apply(x, dt, A, B.squeeze(2), C.squeeze(2), D, initial_state, 4)[used] + unused,)

    compare(of_form, lambda **kw: (ssd.naive(**kw)[used] + 0.0 * (kw["C"].sum() + kw["D"].sum()),), inputs, torch.float64)


def test_the_two_forms_are_chosen_by_the_decays() -> None:
    weak, strong = ssd_inputs(time=32, strength=0.1), ssd_inputs(time=32, strength=100.0)
    for inputs, factored in ((weak, True), (strong, False)):
        _, chosen = ssd._plan(inputs["x"], inputs["dt"], inputs["A"], inputs["B"], 16)
        assert chosen is factored


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [None, 4, 64])
def test_extreme_decays_in_one_sequence(chunk: int | None, dtype: torch.dtype) -> None:
    inputs = ssd_inputs(time=130, seed=3)
    generator = torch.Generator().manual_seed(4)
    log_decay = torch.empty(2, 130, 4, dtype=torch.float64).uniform_(-4.0, 1.3, generator=generator)
    log_decay[:, 40:60] = 1.301
    log_decay[:, 60:80] = -4.0
    inputs["dt"], inputs["A"] = 10.0**log_decay, -torch.ones(4, dtype=torch.float64)
    inputs["x"] = inputs["x"] / inputs["dt"].unsqueeze(-1)
    compare(
        lambda **kw: ssd.chunked(**kw, chunk_length=chunk),
        ssd.naive,
        inputs,
        dtype,
        {torch.float64: 1e-10, torch.float32: 1e-4}[dtype],
    )


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    ("dt", "D", "time"), [(3.7, None, 128), (1.0, None, 128), (1e-5, 1.0, 256)], ids=["strong", "medium", "hardly any"]
)
def test_the_gradient_of_a_decay_is_more_than_rounding(dt: float, D: float | None, time: int, with_state: bool) -> None:
    """Where a step reads little except its own input, which no decay acts on: relative to the size of each gradient itself."""
    inputs = ssd_inputs(time=time, heads=2, channels=16, state=16)
    inputs["dt"] = torch.full_like(inputs["dt"], dt)
    inputs["A"] = -torch.ones_like(inputs["A"])
    if D is None:
        del inputs["D"]
    if not with_state:
        del inputs["initial_state"]
    exact = outputs_and_gradients(ssd.naive, inputs, torch.float64)
    actual = outputs_and_gradients(ssd.chunked, inputs, torch.float32)
    for name in ("d A", "d dt"):
        error = ((actual[name].double() - exact[name]).abs().max() / exact[name].abs().max()).item()
        print(f"dt {dt}: worst relative error {error:.1e} of {name}")
        assert error <= 5e-6, name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [None, 4])
def test_a_state_may_be_cleared(chunk: int | None, dtype: torch.dtype) -> None:
    """A log decay of −1e4, which is nothing left in any precision, in the midst of slow ones."""
    inputs = ssd_inputs(time=21, strength=0.1)
    inputs["A"] = -torch.ones_like(inputs["A"])
    inputs["dt"][0, 9] = 1e4
    inputs["x"][0, 9] *= 1e-4
    compare(lambda **kw: ssd.chunked(**kw, chunk_length=chunk), ssd.naive, inputs, dtype)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("dt", [3.7, 1.8])
@pytest.mark.parametrize(("values", "gradients"), [(1e6, 1.0), (1.0, 1e-14)], ids=["large values", "small gradients"])
def test_the_range_of_float32_suffices(values: float, gradients: float, dt: float, with_state: bool) -> None:
    """The factors of decays neither overflow with large values nor push small gradients below the normal numbers."""
    inputs = ssd_inputs(time=64)
    inputs |= {"dt": torch.full_like(inputs["dt"], dt), "A": -torch.ones_like(inputs["A"])}
    inputs |= {name: values * inputs[name] for name in ("x", "B")}
    if not with_state:
        del inputs["initial_state"]

    def scaled(op: Op) -> Op:
        return lambda **kw: tuple(gradients * output for output in op(**kw))

    exact = outputs_and_gradients(scaled(ssd.naive), inputs, torch.float64)
    actual = outputs_and_gradients(scaled(ssd.chunked), inputs, torch.float32)
    for name, expected in exact.items():
        assert (actual[name].double() - expected).abs().max() <= 1e-5 * expected.abs().max(), name


def test_long_sequences_lose_nothing() -> None:
    """Slow decays over 8,192 steps: the error does not grow with the length."""
    inputs = ssd_inputs(batch=1, time=8192, heads=2, seed=5)
    inputs["dt"], inputs["A"] = torch.full_like(inputs["dt"], 1e-2), -torch.tensor([1e-2, 1.0], dtype=torch.float64)
    with torch.no_grad():
        reference, final = ssd.naive(**inputs)
        y, state = ssd.chunked(**{name: value.float() for name, value in inputs.items()})
    for actual, expected in ((y, reference), (y[:, -64:], reference[:, -64:]), (state, final)):
        assert (actual.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 40), max_size=5),
    strength=st.sampled_from([0.1, 3.0, 40.0]),
    chunk=st.sampled_from([None, 1, 3, 8, 64]),
)
def test_any_split_is_the_whole(cuts: list[int], strength: float, chunk: int | None) -> None:
    inputs = ssd_inputs(time=41, groups=2, strength=strength)
    state = inputs.pop("initial_state")
    whole, final = ssd.chunked(**inputs, initial_state=state, chunk_length=chunk)
    parts = []
    for start, end in itertools.pairwise(sorted({0, 41, *cuts})):
        segment = {name: value if name in "AD" else value[:, start:end] for name, value in inputs.items()}
        y, state = ssd.chunked(**segment, initial_state=state, chunk_length=chunk)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("strength", [0.3, 30.0])
def test_affine_in_the_initial_state(strength: float) -> None:
    inputs = ssd_inputs(time=9, strength=strength)
    first = inputs.pop("initial_state")
    second = torch.flip(first, (0,))

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        return ssd.chunked(**inputs, initial_state=state)

    for zero, one, two, mixed in zip(
        run(torch.zeros_like(first)), run(first), run(second), run(0.3 * first - 2.0 * second), strict=True
    ):
        torch.testing.assert_close(mixed - zero, 0.3 * (one - zero) - 2.0 * (two - zero), rtol=1e-10, atol=1e-10)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    inputs = {name: value.bfloat16() for name, value in ssd_inputs(time=20, strength=0.3).items()}
    y, state = ssd.chunked(**inputs)
    expected, _ = ssd.naive(**{name: value.double() for name, value in inputs.items()})
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast, _ = ssd.chunked(**{name: value.float() for name, value in inputs.items()})
    assert (under_autocast.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_ssd_refuses_wrong_shapes() -> None:
    inputs = ssd_inputs()
    with pytest.raises(ValueError, match="initial_state must have shape"):
        ssd.chunked(**{**inputs, "initial_state": inputs["initial_state"][:1]})
    with pytest.raises(ValueError, match="cannot be shared"):
        ssd.chunked(**{**inputs, "B": inputs["B"].expand(-1, -1, 3, -1)})
    with pytest.raises(ValueError, match="chunk_length"):
        ssd.chunked(**inputs, chunk_length=0)


# --- convolution -----------------------------------------------------------------------------------------


def convolution_inputs(time: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (2, time, 3), "weight": (3, width), "bias": (3,), "initial_state": (2, 3, width - 1)}
    return {name: draw(generator, *shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize(("time", "width"), [(1, 4), (2, 4), (3, 4), (9, 4), (5, 2), (1, 2)])
@pytest.mark.parametrize("left_out", [(), ("initial_state",), ("bias", "initial_state")])
def test_convolution_is_the_definition(
    time: int, width: int, activation: convolution.Activation, left_out: tuple[str, ...], dtype: torch.dtype
) -> None:
    inputs = {name: value for name, value in convolution_inputs(time, width).items() if name not in left_out}
    defaults = {} if "bias" in inputs else {"bias": None}

    compare(
        lambda **kw: convolution.causal_conv1d(**kw, **defaults, activation=activation),
        lambda **kw: convolution.naive(**kw, **defaults, activation=activation),
        inputs,
        dtype,
    )


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 10), max_size=6), width=st.sampled_from([2, 4]))
def test_convolution_of_any_split_is_that_of_the_whole(cuts: list[int], width: int) -> None:
    inputs = convolution_inputs(11, width)
    x, state = inputs.pop("x"), inputs.pop("initial_state")
    whole, final = convolution.causal_conv1d(x, **inputs, initial_state=state)
    parts = []
    for start, end in itertools.pairwise(sorted({0, 11, *cuts})):
        y, state = convolution.causal_conv1d(x[:, start:end], **inputs, initial_state=state)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, final)


def test_convolution_refuses_wrong_shapes() -> None:
    inputs = convolution_inputs(5, 4)
    with pytest.raises(ValueError, match="initial_state must have shape"):
        convolution.causal_conv1d(**{**inputs, "initial_state": torch.zeros(2, 3, 4)})
    with pytest.raises(ValueError, match="activation"):
        convolution.causal_conv1d(**inputs, activation="relu")  # type: ignore[arg-type]


# --- norms -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_norms_are_their_definitions(groups: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {"x": draw(generator, 2, 3, 8), "z": draw(generator, 2, 3, 8), "weight": draw(generator, 8)}
    compare(
        lambda **kw: (normalization.gated_rms_norm(**kw, epsilon=1e-5, groups=groups),),
        lambda **kw: (normalization.naive_gated_rms_norm(**kw, epsilon=1e-5, groups=groups),),
        inputs,
        dtype,
    )
    del inputs["z"]
    compare(
        lambda **kw: (normalization.rms_norm(**kw, epsilon=1e-5),),
        lambda **kw: (normalization.naive_rms_norm(**kw, epsilon=1e-5),),
        inputs,
        dtype,
    )


def test_gated_norm_refuses_groups_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="multiple of 3"):
        normalization.gated_rms_norm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8), 1e-5, 3)


# --- golden ----------------------------------------------------------------------------------------------


def golden_values() -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    for name, strength in (("weak decays", 0.2), ("strong decays", 20.0)):
        inputs = {
            "x": golden.ramp(1, 5, 2, 2),
            "dt": golden.ramp(1, 5, 2, phase=1.0).abs() * strength,
            "A": -golden.ramp(2, phase=2.0).exp(),
            "B": golden.ramp(1, 5, 1, 3, phase=3.0),
            "C": golden.ramp(1, 5, 1, 3, phase=4.0),
            "D": golden.ramp(2, phase=5.0),
            "initial_state": golden.ramp(1, 2, 2, 3, phase=6.0),
        }
        results = outputs_and_gradients(lambda **kw: ssd.chunked(**kw, chunk_length=3), inputs, torch.float64)
        values |= {f"ssd, {name}, {key}": value for key, value in results.items()}
    inputs = {
        "x": golden.ramp(1, 4, 2),
        "weight": golden.ramp(2, 4, phase=1.0),
        "bias": golden.ramp(2, phase=2.0),
        "initial_state": golden.ramp(1, 2, 3, phase=3.0),
    }
    values |= {
        f"convolution, {key}": value
        for key, value in outputs_and_gradients(convolution.causal_conv1d, inputs, torch.float64).items()
    }
    inputs = {"x": golden.ramp(2, 4), "z": golden.ramp(2, 4, phase=1.0), "weight": golden.ramp(4, phase=2.0)}
    results = outputs_and_gradients(
        lambda **kw: (normalization.gated_rms_norm(**kw, epsilon=1e-5, groups=2),), inputs, torch.float64
    )
    return values | {f"gated norm, {key}": value for key, value in results.items()}


def test_golden() -> None:
    golden.check("ops", golden_values())


def test_golden_notices_a_change_of_a_millionth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARSTATE_UPDATE_GOLDEN", raising=False)
    values = golden_values()
    name = next(iter(values))
    values[name] = values[name] * (1.0 + 1e-6)
    with pytest.raises(AssertionError, match=r"raise NUMERICS\['ops'\]"):
        golden.check("ops", values)


def test_golden_notices_a_version_that_moved_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARSTATE_UPDATE_GOLDEN", raising=False)
    monkeypatch.setitem(NUMERICS, "ops", NUMERICS["ops"] + 1)
    with pytest.raises(AssertionError, match="no number changed"):
        golden.check("ops", golden_values())
