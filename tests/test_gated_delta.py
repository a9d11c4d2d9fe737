"""The gated delta rule over chunks against its definition, and against fla's references."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import golden
from farstate.ops import gated_delta
from farstate.ops.gated_delta_chunks import GatedDelta, unit_lower_inverse
from test_ops import compare, draw, outputs_and_gradients, worst_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")

IN_TIME = ("q", "k", "v", "log_decay", "beta")


def inputs(
    *,
    batch: int = 2,
    time: int = 7,
    heads: int = 3,
    keys: int = 5,
    values: int = 4,
    strength: float = 1.0,
    strongest_write: float = 1.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "q": draw(generator, batch, time, heads, keys),
        "k": F.normalize(draw(generator, batch, time, heads, keys), dim=-1),
        "v": draw(generator, batch, time, heads, values),
        "log_decay": -draw(generator, batch, time, heads).abs() * strength,
        "beta": torch.rand(batch, time, heads, generator=generator, dtype=torch.float64) * strongest_write,
        "initial_state": draw(generator, batch, heads, keys, values),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strongest_write", [1.0, 2.0])
@pytest.mark.parametrize(
    ("time", "chunk"), [(1, None), (2, 4), (5, 1), (7, 3), (16, 16), (19, None), (33, 8), (70, 70), (75, 33), (129, None)]
)
def test_chunked_is_the_definition(time: int, chunk: int | None, strongest_write: float, dtype: torch.dtype) -> None:
    given_inputs = inputs(time=time, strength=0.3, strongest_write=strongest_write)
    compare(lambda **kw: gated_delta.chunked(**kw, chunk_length=chunk), gated_delta.naive, given_inputs, dtype)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 2, 8, 3), (3, 1, 2, 9)])
def test_odd_sizes_and_a_scale(shape: tuple[int, ...]) -> None:
    batch, heads, keys, values = shape
    given_inputs = inputs(batch=batch, time=11, heads=heads, keys=keys, values=values)
    compare(
        lambda **kw: gated_delta.chunked(**kw, scale=0.7, chunk_length=4),
        lambda **kw: gated_delta.naive(**kw, scale=0.7),
        given_inputs,
        torch.float64,
    )


@pytest.mark.parametrize("time", [1, 6, 11])
def test_without_an_initial_state(time: int) -> None:
    given_inputs = inputs(batch=1, time=time)
    del given_inputs["initial_state"]
    compare(lambda **kw: gated_delta.chunked(**kw, chunk_length=4), gated_delta.naive, given_inputs, torch.float64)


@pytest.mark.parametrize("used", [0, 1], ids=["only o", "only the final state"])
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_one_output_used(count: int, with_state: bool, used: int) -> None:
    given_inputs = inputs(time=4 * count)
    if not with_state:
        del given_inputs["initial_state"]

    def of_form(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor | None = None):
        # The sum keeps q in the graph of the final state, which does not depend on it.
        return (GatedDelta.apply(q * 5**-0.5, k, v, log_decay, beta, initial_state, 4)[used] + 0.0 * q.sum(),)

    compare(of_form, lambda **kw: (gated_delta.naive(**kw)[used] + 0.0 * kw["q"].sum(),), given_inputs, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("strongest_write", [1.0, 2.0])
@pytest.mark.parametrize("chunk", [None, 4, 64])
def test_extreme_decays_in_one_sequence(chunk: int | None, strongest_write: float, dtype: torch.dtype) -> None:
    """Log decays from −20 to −1e-4."""
    given_inputs = inputs(time=130, seed=3, strongest_write=strongest_write)
    log_decay = torch.empty(2, 130, 3, dtype=torch.float64).uniform_(-4.0, 1.3, generator=torch.Generator().manual_seed(4))
    log_decay[:, 40:60] = 1.301
    log_decay[:, 60:80] = -4.0
    given_inputs["log_decay"] = -(10.0**log_decay)
    compare(
        lambda **kw: gated_delta.chunked(**kw, chunk_length=chunk),
        gated_delta.naive,
        given_inputs,
        dtype,
        {torch.float64: 1e-10, torch.float32: 1e-4}[dtype],
    )


@pytest.mark.parametrize("chunk", [None, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_state_may_be_cleared(chunk: int | None, dtype: torch.dtype) -> None:
    """A log decay of minus infinity: what was before is gone, what it gave before stays, and no gradient passes."""
    given_inputs = inputs(time=21)
    given_inputs["log_decay"][0, 9] = -torch.inf
    given_inputs["log_decay"][1, 3:5, 1:] = -torch.inf
    compare(lambda **kw: gated_delta.chunked(**kw, chunk_length=chunk), gated_delta.naive, given_inputs, dtype)


@pytest.mark.parametrize("strongest_write", [1.0, 2.0])
def test_equal_keys_are_safe(strongest_write: float) -> None:
    """One key at every step and no decay: the system of a chunk is as far from diagonal as it can be."""
    given_inputs = inputs(time=128, strength=1e-4)
    given_inputs["k"] = given_inputs["k"][:, :1].expand(-1, 128, -1, -1)
    given_inputs["beta"] = torch.full_like(given_inputs["beta"], strongest_write)
    compare(
        lambda **kw: gated_delta.chunked(**kw, chunk_length=64),
        gated_delta.naive,
        given_inputs,
        torch.float32,
        # β = 2 reflects for ever: the exact gradients themselves add up 128 terms of equal size.
        {1.0: 2e-5, 2.0: 2e-4}[strongest_write],
    )


@pytest.mark.parametrize("length", [1, 2, 31, 33, 64, 77])
def test_the_inverse(length: int) -> None:
    A = draw(torch.Generator().manual_seed(0), 3, length, length).tril(-1) / length
    identity = torch.eye(length, dtype=torch.float64)
    torch.testing.assert_close(unit_lower_inverse(A) @ (A + identity), identity.expand_as(A), rtol=0, atol=1e-12)


def test_long_sequences_lose_nothing() -> None:
    """Slow decays over 4,096 steps: the error does not grow with the length."""
    given_inputs = inputs(batch=1, time=4096, heads=2, strength=1e-2, seed=5)
    with torch.no_grad():
        reference, final = gated_delta.naive(**given_inputs)
        o, state = gated_delta.chunked(**{name: value.float() for name, value in given_inputs.items()})
    for actual, expected in ((o, reference), (o[:, -64:], reference[:, -64:]), (state, final)):
        assert (actual.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 40), max_size=5),
    strength=st.sampled_from([0.01, 3.0]),
    chunk=st.sampled_from([None, 1, 3, 8, 64]),
)
def test_any_split_is_the_whole(cuts: list[int], strength: float, chunk: int | None) -> None:
    given_inputs = inputs(time=41, strength=strength)
    state = given_inputs.pop("initial_state")
    whole, final = gated_delta.chunked(**given_inputs, initial_state=state, chunk_length=chunk)
    parts = []
    for start, end in itertools.pairwise(sorted({0, 41, *cuts})):
        segment = {name: value[:, start:end] for name, value in given_inputs.items()}
        o, state = gated_delta.chunked(**segment, initial_state=state, chunk_length=chunk)
        parts.append(o)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-11)


def test_affine_in_the_initial_state() -> None:
    given_inputs = inputs(time=9)
    first = given_inputs.pop("initial_state")
    second = torch.flip(first, (0,))

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta.chunked(**given_inputs, initial_state=state)

    for zero, one, two, mixed in zip(
        run(torch.zeros_like(first)), run(first), run(second), run(0.3 * first - 2.0 * second), strict=True
    ):
        torch.testing.assert_close(mixed - zero, 0.3 * (one - zero) - 2.0 * (two - zero), rtol=1e-10, atol=1e-10)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    half = {name: value.bfloat16() for name, value in inputs(time=20, strength=0.3).items()}
    o, state = gated_delta.chunked(**half)
    expected, _ = gated_delta.naive(**{name: value.double() for name, value in half.items()})
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (o.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast, _ = gated_delta.chunked(**{name: value.float() for name, value in half.items()})
    assert (under_autocast.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_memory_is_linear_in_time() -> None:
    """What the backward pass keeps, for twice the time: twice as much."""

    def kept(time: int) -> int:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        leaves = {name: value.float().requires_grad_() for name, value in inputs(time=time, keys=16, values=16).items()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            o, _ = gated_delta.chunked(**leaves)
        assert o.requires_grad
        return sum(storages.values())

    assert 1.8 < kept(512) / kept(256) < 2.2


def test_wrong_shapes_are_refused() -> None:
    given_inputs = inputs()
    with pytest.raises(ValueError, match="initial_state must have shape"):
        gated_delta.chunked(**{**given_inputs, "initial_state": given_inputs["initial_state"][:1]})
    with pytest.raises(ValueError, match="beta must have shape"):
        gated_delta.naive(**{**given_inputs, "beta": given_inputs["beta"][..., :1]})
    with pytest.raises(ValueError, match="chunk_length"):
        gated_delta.chunked(**given_inputs, chunk_length=0)


def fla_reference() -> ModuleType:
    """fla's `ops/gated_delta_rule/naive.py` by itself: importing the package takes ten seconds and changes transformers."""
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed")
    path = Path(package.submodule_search_locations[0]) / "ops/gated_delta_rule/naive.py"
    found = importlib.util.spec_from_file_location("fla_naive_gated_delta_rule", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
def test_fla_agrees(form: str) -> None:
    theirs = getattr(fla_reference(), form)
    given_inputs = inputs(time=21, strength=0.3)

    def reference(log_decay: Tensor, **kw: Tensor) -> tuple[Tensor, Tensor]:
        return theirs(**kw, g=log_decay, output_final_state=True)

    expected = outputs_and_gradients(reference, given_inputs, torch.float32)
    for ours in (gated_delta.naive, gated_delta.chunked):
        error, name = worst_error(outputs_and_gradients(ours, given_inputs, torch.float32), expected)
        print(f"{form}: worst relative error {error:.1e} in {name}")
        assert error <= 5e-5, name


def test_golden() -> None:
    given_inputs = {
        "q": golden.ramp(1, 5, 2, 3),
        "k": F.normalize(golden.ramp(1, 5, 2, 3, phase=1.0), dim=-1),
        "v": golden.ramp(1, 5, 2, 2, phase=2.0),
        "log_decay": -golden.ramp(1, 5, 2, phase=3.0).exp(),
        "beta": torch.sigmoid(golden.ramp(1, 5, 2, phase=4.0)),
        "initial_state": golden.ramp(1, 2, 3, 2, phase=5.0),
    }
    values = outputs_and_gradients(lambda **kw: gated_delta.chunked(**kw, chunk_length=3), given_inputs, torch.float64)
    golden.check("ops", values, path=golden.FOLDER / "ops_gated_delta.json")
