"""The recurrences with a decay for each key channel, GLA and RWKV-6, against their definitions and against fla's references."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import golden
from farstate.ops import gla, vector_decay, wkv6
from farstate.ops.vector_decay_factored import FactoredDecays
from farstate.ops.vector_decay_halves import HalvedDecays
from test_ops import compare, draw, outputs_and_gradients, worst_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

OPERATIONS = [gla, wkv6]
IN_TIME = ("q", "r", "k", "v", "log_decay")
WEAK, STRONG = 0.1, 30.0

every_operation = pytest.mark.parametrize("op", OPERATIONS, ids=["gla", "wkv6"])


def inputs(
    op: ModuleType,
    *,
    batch: int = 2,
    time: int = 7,
    heads: int = 3,
    keys: int = 5,
    values: int = 4,
    strength: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reader = "q" if op is gla else "r"
    drawn = {
        reader: draw(generator, batch, time, heads, keys),
        "k": draw(generator, batch, time, heads, keys),
        "v": draw(generator, batch, time, heads, values),
        "log_decay": -draw(generator, batch, time, heads, keys).abs() * strength,
        "initial_state": draw(generator, batch, heads, keys, values),
    }
    return drawn if op is gla else {**drawn, "bonus": draw(generator, heads, keys)}


def mixed_decays(batch: int, time: int, heads: int, keys: int) -> Tensor:
    """Log decays from −20 to −1e-4, also in long stretches of one strength."""
    exponent = torch.empty(batch, time, heads, keys, dtype=torch.float64)
    exponent.uniform_(-4.0, 1.301, generator=torch.Generator().manual_seed(4))
    exponent[:, time // 4 : time // 3] = 1.301
    exponent[:, time // 3 : time // 2] = -4.0
    exponent[:, :, 0, 0] = -4.0
    return -(10.0**exponent)


def by_form(op: ModuleType, form: type[torch.autograd.Function], length: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """`op` computed by one of the two chunked forms, whatever the decays."""

    def run(
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        q: Tensor | None = None,
        r: Tensor | None = None,
        bonus: Tensor | None = None,
        initial_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        scale = k.shape[-1] ** -0.5 if op is gla else 1.0
        return form.apply(q if op is gla else r, k, v, log_decay, bonus, scale, initial_state, length)

    return run


# --- the definition --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@every_operation
@pytest.mark.parametrize("strength", [WEAK, STRONG], ids=["factored", "halved"])
@pytest.mark.parametrize(("time", "chunk"), [(1, None), (2, 4), (5, 1), (7, 3), (16, 16), (19, None), (33, 8), (70, 64)])
def test_chunked_is_the_definition(op: ModuleType, time: int, chunk: int | None, strength: float, dtype: torch.dtype) -> None:
    given_inputs = inputs(op, time=time, strength=strength)
    compare(lambda **kw: op.chunked(**kw, chunk_length=chunk), op.naive, given_inputs, dtype)


@every_operation
@pytest.mark.parametrize("form", [FactoredDecays, HalvedDecays])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (1, 8, 2, 16, 3), (3, 16, 1, 2, 9), (2, 64, 2, 3, 3)])
@pytest.mark.parametrize("length", [1, 2, 8])
def test_each_form_is_the_definition(op: ModuleType, form: type, shape: tuple[int, ...], length: int) -> None:
    batch, time, heads, keys, values = shape
    given_inputs = inputs(op, batch=batch, time=time, heads=heads, keys=keys, values=values, strength=0.2)
    compare(by_form(op, form, min(length, time)), op.naive, given_inputs, torch.float64)


@every_operation
@pytest.mark.parametrize("form", [FactoredDecays, HalvedDecays])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("used", [0, 1], ids=["only o", "only the final state"])
@pytest.mark.parametrize("count", [1, 3])
def test_each_form_with_one_output_used(op: ModuleType, form: type, count: int, used: int, with_state: bool) -> None:
    given_inputs = inputs(op, time=4 * count, strength=0.3)
    if not with_state:
        del given_inputs["initial_state"]

    def one_output(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor]]:
        # The sum keeps every input in the graph of the output that is looked at.
        return lambda **kw: (function(**kw)[used] + 0.0 * sum(t.sum() for t in kw.values()),)

    compare(one_output(by_form(op, form, 4)), one_output(op.naive), given_inputs, torch.float64)


@every_operation
@pytest.mark.parametrize("strength", [WEAK, STRONG], ids=["factored", "halved"])
@pytest.mark.parametrize("time", [1, 6, 11])
def test_without_an_initial_state(op: ModuleType, time: int, strength: float) -> None:
    given_inputs = inputs(op, batch=1, time=time, strength=strength)
    del given_inputs["initial_state"]
    compare(lambda **kw: op.chunked(**kw, chunk_length=4), op.naive, given_inputs, torch.float64)


@pytest.mark.parametrize("strength", [WEAK, STRONG], ids=["factored", "halved"])
def test_scale(strength: float) -> None:
    given_inputs = inputs(gla, time=11, strength=strength)
    compare(lambda **kw: gla.chunked(**kw, scale=-0.7), lambda **kw: gla.naive(**kw, scale=-0.7), given_inputs, torch.float64)
    of_keys, _ = gla.naive(**given_inputs)
    torch.testing.assert_close(of_keys, gla.naive(**given_inputs, scale=5**-0.5)[0])


def test_the_form_is_chosen_by_the_decays() -> None:
    shape = (1, 128, 2, 4)
    for total, expected in ((-59.0, (64, True)), (-61.0, (32, True)), (-239.0, (16, True)), (-245.0, (32, False))):
        log_decay = torch.full(shape, -1e-3)
        log_decay[0, :, 1, 2] = total / 64
        assert vector_decay._plan(log_decay, 64, None) == expected
    assert vector_decay._plan(torch.full(shape, -1.0), 64, 64) == (64, False)
    assert vector_decay._plan(torch.full((1, 1, 2, 4), -20.0), 64, None) == (1, False)


@pytest.mark.parametrize(
    ("time", "values", "expected"), [(1024, 128, 64), (1024, 16, 16), (32, 64, 32), (3, 64, 4), (65, 64, 16)]
)
def test_default_chunk_length(time: int, values: int, expected: int) -> None:
    assert vector_decay.default_chunk_length(time, values) == expected


# --- decays of any strength ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@every_operation
@pytest.mark.parametrize("chunk", [None, 4, 64])
def test_extreme_decays_in_one_sequence(op: ModuleType, chunk: int | None, dtype: torch.dtype) -> None:
    given_inputs = {**inputs(op, time=130, seed=3), "log_decay": mixed_decays(2, 130, 3, 5)}
    compare(lambda **kw: op.chunked(**kw, chunk_length=chunk), op.naive, given_inputs, dtype)


@every_operation
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(("step", "time"), [(0.0, 2), (-1.8, 2), (-3.7, 2), (-3.7, 48), (-10.0, 48), (-20.0, 48)])
def test_the_gradient_of_a_decay_is_more_than_rounding(op: ModuleType, step: float, time: int, with_state: bool) -> None:
    """Relative to its own size, which is that of exp(step) and does not grow with values that nothing fades."""
    given_inputs = inputs(op, time=time)
    given_inputs["log_decay"] = torch.full_like(given_inputs["log_decay"], step)
    if time == 2:
        given_inputs |= {name: 1e3 * given_inputs[name] for name in given_inputs if name in ("q", "r", "k", "v")}
    if not with_state:
        del given_inputs["initial_state"]
    exact = outputs_and_gradients(op.naive, given_inputs, torch.float64)["d log_decay"]
    actual = outputs_and_gradients(op.chunked, given_inputs, torch.float32)["d log_decay"]
    error = ((actual.double() - exact).abs().max() / exact.abs().max()).item()
    print(f"decays of exp({step}): worst relative error {error:.1e} of d log_decay, which is at most {exact.abs().max():.1e}")
    assert error <= 2e-6


@every_operation
@pytest.mark.parametrize("step", [-3.7, -1.8])
@pytest.mark.parametrize(("values", "gradients"), [(1e6, 1.0), (1e9, 1.0), (1.0, 1e-14)])
def test_the_range_of_float32_suffices(op: ModuleType, values: float, gradients: float, step: float) -> None:
    """The factors of decays neither overflow with large values nor push small gradients below the normal numbers."""
    given_inputs = inputs(op, time=64)
    given_inputs["log_decay"] = torch.full_like(given_inputs["log_decay"], step)
    given_inputs |= {name: values * given_inputs[name] for name in ("k", "v")}

    def scaled(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda **kw: tuple(gradients * output for output in function(**kw))

    exact = outputs_and_gradients(scaled(op.naive), given_inputs, torch.float64)
    actual = outputs_and_gradients(scaled(op.chunked), given_inputs, torch.float32)
    for name, expected in exact.items():
        assert (actual[name].double() - expected).abs().max() <= 1e-5 * expected.abs().max(), name


@every_operation
def test_a_channel_may_be_cleared(op: ModuleType) -> None:
    """A log decay of minus infinity: what was before is gone, and no gradient passes."""
    given_inputs = inputs(op, time=21)
    given_inputs["log_decay"][:, 9, :, 2:] = -torch.inf
    compare(op.chunked, op.naive, given_inputs, torch.float32)


@every_operation
def test_no_decay_at_all(op: ModuleType) -> None:
    given_inputs = inputs(op, time=70)
    given_inputs["log_decay"] = torch.zeros_like(given_inputs["log_decay"])
    compare(op.chunked, op.naive, given_inputs, torch.float32)


@every_operation
@pytest.mark.parametrize("form", [FactoredDecays, HalvedDecays])
def test_long_sequences_lose_nothing(op: ModuleType, form: type) -> None:
    """Slow decays over 4,096 steps: the error does not grow with the length."""
    given_inputs = inputs(op, batch=1, time=4096, heads=2, strength=1e-2, seed=5)
    with torch.no_grad():
        reference, final = op.naive(**given_inputs)
        o, state = by_form(op, form, 32)(**{name: value.float() for name, value in given_inputs.items()})
    for actual, expected in ((o, reference), (o[:, -64:], reference[:, -64:]), (state, final)):
        assert (actual.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


# --- invariants ------------------------------------------------------------------------------------------


@every_operation
@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 40), max_size=5),
    strength=st.sampled_from([0.01, 3.0, 40.0]),
    chunk=st.sampled_from([None, 1, 3, 8, 64]),
)
def test_any_split_is_the_whole(op: ModuleType, cuts: list[int], strength: float, chunk: int | None) -> None:
    check_split(op, inputs(op, time=41, strength=strength), sorted({0, 41, *cuts}), chunk)


@every_operation
def test_token_by_token_is_the_whole(op: ModuleType) -> None:
    check_split(op, {**inputs(op, time=24), "log_decay": mixed_decays(2, 24, 3, 5)}, list(range(25)), None)


def check_split(op: ModuleType, given_inputs: dict[str, Tensor], bounds: list[int], chunk: int | None) -> None:
    state = given_inputs.pop("initial_state")
    whole, final = op.chunked(**given_inputs, initial_state=state, chunk_length=chunk)
    parts = []
    for start, end in itertools.pairwise(bounds):
        segment = {name: value[:, start:end] if name in IN_TIME else value for name, value in given_inputs.items()}
        o, state = op.chunked(**segment, initial_state=state, chunk_length=chunk)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-11)


@every_operation
@pytest.mark.parametrize("strength", [WEAK, STRONG])
def test_affine_in_the_initial_state(op: ModuleType, strength: float) -> None:
    given_inputs = inputs(op, time=9, strength=strength)
    first = given_inputs.pop("initial_state")
    second = torch.flip(first, (0,))

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        return op.chunked(**given_inputs, initial_state=state)

    for zero, one, two, mixed in zip(
        run(torch.zeros_like(first)), run(first), run(second), run(0.3 * first - 2.0 * second), strict=True
    ):
        torch.testing.assert_close(mixed - zero, 0.3 * (one - zero) - 2.0 * (two - zero), rtol=1e-10, atol=1e-10)


@every_operation
@pytest.mark.parametrize("strength", [WEAK, STRONG])
def test_memory_layout_does_not_matter(op: ModuleType, strength: float) -> None:
    """Heads before time, every other entry of a wider tensor, one row of heads for the whole batch; and a strided gradient."""
    given_inputs = inputs(op, time=24, strength=strength)
    given_inputs["k"] = given_inputs["k"][:1].expand(2, -1, -1, -1)

    def relaid(**kw: Tensor) -> tuple[Tensor, Tensor]:
        kw["v"] = kw["v"].transpose(1, 2).contiguous().transpose(1, 2)
        kw["log_decay"] = kw["log_decay"].repeat_interleave(2, dim=-1)[..., ::2]
        kw["k"] = kw["k"][:1].expand(2, -1, -1, -1)
        kw["initial_state"] = kw["initial_state"].mT.contiguous().mT
        o, state = op.chunked(**kw, chunk_length=8)
        return o.transpose(1, 2), state.mT

    def definition(**kw: Tensor) -> tuple[Tensor, Tensor]:
        o, state = op.naive(**{**kw, "k": kw["k"][:1].expand(2, -1, -1, -1)})
        return o.transpose(1, 2), state.mT

    compare(relaid, definition, given_inputs, torch.float64)


@every_operation
@pytest.mark.parametrize("strength", [0.3, STRONG])
def test_half_precision_inputs_are_computed_in_float32(op: ModuleType, strength: float) -> None:
    half = {name: value.bfloat16() for name, value in inputs(op, time=20, strength=strength).items()}
    expected, _ = op.naive(**{name: value.double() for name, value in half.items()})
    for function in (op.naive, op.chunked):
        o, state = function(**half)
        assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
        assert (o.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            under_autocast, _ = function(**{name: value.float() for name, value in half.items()})
        assert (under_autocast.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@every_operation
@pytest.mark.parametrize("strength", [WEAK, STRONG])
def test_memory_is_linear_in_time(op: ModuleType, strength: float) -> None:
    """What the backward pass keeps, for twice the time: twice as much."""

    def kept(time: int) -> int:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        given_inputs = inputs(op, time=time, keys=16, values=16, strength=strength)
        leaves = {name: value.float().requires_grad_() for name, value in given_inputs.items()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            o, _ = op.chunked(**leaves)
        assert o.requires_grad
        return sum(storages.values())

    assert 1.8 < kept(512) / kept(256) < 2.2


@every_operation
def test_wrong_shapes_are_refused(op: ModuleType) -> None:
    given_inputs = inputs(op)
    for function in (op.naive, op.chunked):
        with pytest.raises(ValueError, match="initial_state must have shape"):
            function(**{**given_inputs, "initial_state": given_inputs["initial_state"][:1]})
        with pytest.raises(ValueError, match="log_decay must have shape"):
            function(**{**given_inputs, "log_decay": given_inputs["log_decay"][..., :1]})
        with pytest.raises(ValueError, match="T ≥ 1"):
            function(**{name: value[:, :0] if name in IN_TIME else value for name, value in given_inputs.items()})
    for time in (1, 7):
        with pytest.raises(ValueError, match="chunk_length"):
            op.chunked(**inputs(op, time=time), chunk_length=0)


def test_a_bonus_of_the_wrong_shape_is_refused() -> None:
    given_inputs = inputs(wkv6)
    with pytest.raises(ValueError, match="bonus must have shape"):
        wkv6.chunked(**{**given_inputs, "bonus": given_inputs["bonus"][:1]})


# --- others' numbers -------------------------------------------------------------------------------------


def fla_reference(path: str) -> ModuleType:
    """One of fla's pure torch files by itself: importing the package takes ten seconds and changes transformers."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed")
    found = importlib.util.spec_from_file_location(
        "fla_" + path.replace("/", "_"), Path(package.submodule_search_locations[0]) / f"ops/{path}.py"
    )
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("strength", [WEAK, STRONG])
def test_fla_agrees_on_gla(strength: float) -> None:
    theirs = fla_reference("gla/naive").naive_recurrent_gla

    def reference(log_decay: Tensor, **kw: Tensor) -> tuple[Tensor, Tensor]:
        return theirs(**kw, gk=log_decay, output_final_state=True)

    expect(reference, gla, inputs(gla, time=21, strength=strength))


@pytest.mark.parametrize("strength", [WEAK, STRONG])
def test_fla_agrees_on_rwkv6(strength: float) -> None:
    theirs = fla_reference("rwkv6/recurrent_naive").naive_recurrent_rwkv6

    def reference(**kw: Tensor) -> tuple[Tensor, Tensor]:
        r, k, v, log_decay = (kw[name].transpose(1, 2) for name in ("r", "k", "v", "log_decay"))
        state = kw["initial_state"]
        o, final = theirs(r, k, v, log_decay, kw["bonus"], scale=1.0, initial_state=state, output_final_state=True)
        return o.transpose(1, 2), final

    expect(reference, wkv6, inputs(wkv6, time=21, strength=strength))


def expect(reference: Callable[..., tuple[Tensor, Tensor]], op: ModuleType, given_inputs: dict[str, Tensor]) -> None:
    expected = outputs_and_gradients(reference, given_inputs, torch.float32)
    for ours in (op.naive, op.chunked):
        error, name = worst_error(outputs_and_gradients(ours, given_inputs, torch.float32), expected)
        print(f"{op.__name__}: worst relative error {error:.1e} in {name}")
        assert error <= 2e-5, name


def test_golden() -> None:
    values = {}
    for strength, word in ((0.2, "weak"), (20.0, "strong")):
        shared = {
            "k": golden.ramp(1, 5, 2, 3, phase=2.0),
            "v": golden.ramp(1, 5, 2, 2, phase=3.0),
            "log_decay": -golden.ramp(1, 5, 2, 3, phase=4.0).abs() * strength,
            "initial_state": golden.ramp(1, 2, 3, 2, phase=5.0),
        }
        for op, extra in (
            (gla, {"q": golden.ramp(1, 5, 2, 3)}),
            (wkv6, {"r": golden.ramp(1, 5, 2, 3, phase=1.0), "bonus": golden.ramp(2, 3, phase=6.0)}),
        ):
            found = outputs_and_gradients(
                lambda op=op, **kw: op.chunked(**kw, chunk_length=4), {**shared, **extra}, torch.float64
            )
            values |= {f"{op.__name__.rpartition('.')[2]}, {word} decays, {key}": value for key, value in found.items()}
    golden.check("ops", values, path=golden.FOLDER / "ops_vector_decay.json")
