"""The selective scan in tiles against its definition, and against mamba-ssm's reference."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import golden
from farstate.ops import selective_scan
from test_ops import compare, draw, outputs_and_gradients, worst_error

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def inputs(
    *, batch: int = 2, time: int = 7, width: int = 5, state: int = 3, strength: float = 1.0, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": draw(generator, batch, time, width),
        "dt": draw(generator, batch, time, width).abs() * strength,
        "A": -draw(generator, width, state).exp(),
        "B": draw(generator, batch, time, state),
        "C": draw(generator, batch, time, state),
        "D": draw(generator, width),
        "initial_state": draw(generator, batch, width, state),
    }


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of a test in more than one tile of rows and of channels, the last of them smaller."""
    monkeypatch.setattr(selective_scan, "_STEP_ENTRIES", 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("time", "chunk"), [(1, None), (2, 4), (5, 1), (7, 3), (16, 16), (33, None), (40, 8)])
def test_chunked_is_the_definition(time: int, chunk: int | None, dtype: torch.dtype) -> None:
    compare(lambda **kw: selective_scan.chunked(**kw, chunk_length=chunk), selective_scan.naive, inputs(time=time), dtype)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 3), (1, 7, 2), (5, 1, 4), (3, 2, 9)])
def test_odd_sizes_in_several_tiles(shape: tuple[int, int, int]) -> None:
    batch, width, state = shape
    given_inputs = inputs(batch=batch, time=11, width=width, state=state)
    compare(lambda **kw: selective_scan.chunked(**kw, chunk_length=4), selective_scan.naive, given_inputs, torch.float64)


def test_the_tiles_of_usual_sizes() -> None:
    def tile(batch: int, width: int) -> tuple[int, int]:
        return selective_scan._tile_size(torch.empty(batch, 0, width), 16)

    assert tile(1, 768) == (1, 384)
    assert tile(8, 768) == (2, 768)
    assert tile(2, 5120) == (1, 1707)
    assert tile(64, 128) == (16, 128)


@pytest.mark.parametrize("left_out", [("D",), ("initial_state",), ("D", "initial_state")])
@pytest.mark.parametrize("time", [1, 6, 11])
def test_optional_inputs(time: int, left_out: tuple[str, ...]) -> None:
    given_inputs = {name: value for name, value in inputs(batch=1, time=time).items() if name not in left_out}
    compare(lambda **kw: selective_scan.chunked(**kw, chunk_length=4), selective_scan.naive, given_inputs, torch.float64)


@pytest.mark.parametrize("used", [0, 1], ids=["only y", "only the final state"])
def test_one_output_used(used: int) -> None:
    def only(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor]]:
        # The sum keeps C and D in the graph of the final state, which does not depend on them.
        return lambda **kw: (op(**kw)[used] + 0.0 * (kw["C"].sum() + kw["D"].sum()),)

    compare(only(selective_scan.chunked), only(selective_scan.naive), inputs(time=9), torch.float64)


def test_strided_inputs() -> None:
    """Slices of wider tensors, as the projections of the block leave them, and an expanded A."""
    dense = inputs(time=9)

    def strided(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(**kw: Tensor) -> tuple[Tensor, Tensor]:
            joint = torch.cat([kw["x"], kw["dt"]], dim=-1)
            maps = torch.stack([kw["B"], kw["C"]], dim=-1)
            x, dt = joint.chunk(2, dim=-1)
            state = kw["initial_state"].transpose(1, 2).contiguous().transpose(1, 2)
            return op(x, dt, kw["A"][:1].expand_as(kw["A"]), maps[..., 0], maps[..., 1], kw["D"], state)

        return run

    compare(strided(selective_scan.chunked), strided(selective_scan.naive), dense, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk", [None, 4, 64])
def test_extreme_decays_in_one_sequence(chunk: int | None, dtype: torch.dtype) -> None:
    """Log decays from −20 to −1e-4."""
    given_inputs = inputs(time=130, seed=3)
    log_decay = torch.empty(2, 130, 5, dtype=torch.float64).uniform_(-4.0, 1.3, generator=torch.Generator().manual_seed(4))
    log_decay[:, 40:60] = 1.301
    log_decay[:, 60:80] = -4.0
    given_inputs["dt"], given_inputs["A"] = 10.0**log_decay, -torch.ones(5, 3, dtype=torch.float64)
    given_inputs["x"] = given_inputs["x"] / given_inputs["dt"]
    compare(
        lambda **kw: selective_scan.chunked(**kw, chunk_length=chunk),
        selective_scan.naive,
        given_inputs,
        dtype,
        {torch.float64: 1e-10, torch.float32: 1e-4}[dtype],
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_state_may_be_cleared(dtype: torch.dtype) -> None:
    """A log decay of −1e4, which is nothing left in any precision, in the midst of slow ones."""
    given_inputs = inputs(time=21, strength=0.1)
    given_inputs["A"] = -torch.ones_like(given_inputs["A"])
    given_inputs["dt"][0, 9] = 1e4
    given_inputs["x"][0, 9] *= 1e-4
    compare(selective_scan.chunked, selective_scan.naive, given_inputs, dtype)


@pytest.mark.parametrize("spread", [0.5, 0.0], ids=["steps of all sizes", "all steps equal"])
def test_long_sequences_lose_nothing(spread: float) -> None:
    """Slow decays over 4,096 steps: no larger error late than early.

    Steps of equal size are the worst case of any sequential form in float32: each rounds its decay to the same side.
    """
    given_inputs = inputs(batch=1, time=4096, width=2, state=2, seed=5)
    given_inputs["dt"].uniform_(1e-2 * (1 - spread), 1e-2 * (1 + spread), generator=torch.Generator().manual_seed(6))
    given_inputs["A"] = -torch.tensor([[1e-2, 1.0], [0.1, 0.05]], dtype=torch.float64)
    with torch.no_grad():
        reference, final = selective_scan.naive(**given_inputs)
        y, state = selective_scan.chunked(**{name: value.float() for name, value in given_inputs.items()})
    tolerance = 1e-5 if spread else 1e-4
    for actual, expected in ((y, reference), (y[:, -64:], reference[:, -64:]), (state, final)):
        assert (actual.double() - expected).abs().max() <= tolerance * expected.abs().max()


@settings(max_examples=20, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 40), max_size=5),
    strength=st.sampled_from([0.01, 3.0]),
    chunk=st.sampled_from([None, 1, 3, 8, 64]),
)
def test_any_split_is_the_whole(cuts: list[int], strength: float, chunk: int | None) -> None:
    given_inputs = inputs(time=41, strength=strength)
    state = given_inputs.pop("initial_state")
    whole, final = selective_scan.chunked(**given_inputs, initial_state=state, chunk_length=chunk)
    parts = []
    for start, end in itertools.pairwise(sorted({0, 41, *cuts})):
        segment = {name: value if name in "AD" else value[:, start:end] for name, value in given_inputs.items()}
        y, state = selective_scan.chunked(**segment, initial_state=state, chunk_length=chunk)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, final, rtol=1e-11, atol=1e-11)


def test_affine_in_the_initial_state() -> None:
    given_inputs = inputs(time=9)
    first = given_inputs.pop("initial_state")
    second = torch.flip(first, (0,))

    def run(state: Tensor) -> tuple[Tensor, Tensor]:
        return selective_scan.chunked(**given_inputs, initial_state=state)

    for zero, one, two, mixed in zip(
        run(torch.zeros_like(first)), run(first), run(second), run(0.3 * first - 2.0 * second), strict=True
    ):
        torch.testing.assert_close(mixed - zero, 0.3 * (one - zero) - 2.0 * (two - zero), rtol=1e-10, atol=1e-10)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    half = {name: value.bfloat16() for name, value in inputs(time=20, strength=0.3).items()}
    y, state = selective_scan.chunked(**half)
    expected, _ = selective_scan.naive(**{name: value.double() for name, value in half.items()})
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert (y.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for op in (selective_scan.naive, selective_scan.chunked):
            under_autocast, _ = op(**{name: value.float() for name, value in half.items()})
            assert (under_autocast.double() - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_what_is_kept_is_linear_in_time_and_far_less_than_the_states() -> None:
    def kept(time: int) -> int:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        leaves = {name: value.float().requires_grad_() for name, value in inputs(time=time, width=16, state=16).items()}
        before = sum(leaf.nbytes for leaf in leaves.values())
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y, _ = selective_scan.chunked(**leaves)
        assert y.requires_grad
        return sum(storages.values()) - before

    assert 1.8 < kept(512) / kept(256) < 2.2
    # One state in 32; the definition keeps each state and each decay.
    assert kept(512) <= 2 * 512 * 16 * 16 * 4 / 16


def peak(function: Callable[[], object]) -> int:
    """Bytes allocated at one time within a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def test_peak_memory_is_an_eighth_of_the_definitions() -> None:
    leaves = {name: value.float().requires_grad_() for name, value in inputs(batch=1, time=1024, width=384, state=16).items()}

    def step(op: Callable[..., tuple[Tensor, Tensor]]) -> None:
        y, state = op(**leaves)
        torch.autograd.grad(y.sum() + state.sum(), list(leaves.values()))

    definition, tiled = (peak(lambda op=op: step(op)) for op in (selective_scan.naive, selective_scan.chunked))
    print(f"{definition / 1e6:.1f} MB and {tiled / 1e6:.1f} MB: {definition / tiled:.1f} times")
    assert tiled <= definition / 8


def test_without_gradients_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    real = selective_scan._SelectiveScan.apply
    monkeypatch.setattr(selective_scan._SelectiveScan, "apply", lambda *args: (asked.append(args[-1]), real(*args))[1])
    leaves = {name: value.requires_grad_() for name, value in inputs().items()}
    with torch.no_grad():
        without = selective_scan.chunked(**leaves)
    with_gradients = selective_scan.chunked(**leaves)
    assert asked == [False, True]
    for one, other in zip(without, with_gradients, strict=True):
        assert torch.equal(one, other)


def test_wrong_shapes_are_refused() -> None:
    given_inputs = inputs()
    with pytest.raises(ValueError, match="initial_state must have shape"):
        selective_scan.chunked(**{**given_inputs, "initial_state": given_inputs["initial_state"][:1]})
    with pytest.raises(ValueError, match="B must have shape"):
        selective_scan.naive(**{**given_inputs, "B": given_inputs["B"][..., :1]})
    with pytest.raises(ValueError, match="x must be"):
        selective_scan.naive(**{**given_inputs, "x": given_inputs["x"][:, :0]})
    with pytest.raises(ValueError, match="chunk_length"):
        selective_scan.chunked(**given_inputs, chunk_length=0)


@contextmanager
def mamba_ssm_reference() -> Iterator[Callable[..., tuple[Tensor, Tensor]]]:
    """mamba-ssm's `selective_scan_ref` by itself: the package asks for its CUDA extension and imports transformers.

    The stubs go again at once: transformers chooses its kernels by what it finds.
    """
    package = find_spec("mamba_ssm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("mamba-ssm is not installed")
    bare = ModuleType("mamba_ssm")
    bare.__path__ = list(package.submodule_search_locations)
    before = dict(sys.modules)
    sys.modules |= {"mamba_ssm": bare, "selective_scan_cuda": ModuleType("selective_scan_cuda")}
    try:
        yield import_module("mamba_ssm.ops.selective_scan_interface").selective_scan_ref
    finally:
        for name in sys.modules.keys() - before.keys():
            if name.partition(".")[0] in ("mamba_ssm", "selective_scan_cuda"):
                del sys.modules[name]


@pytest.mark.filterwarnings("ignore:Deterministic mode")
def test_mamba_ssm_agrees() -> None:
    """Its reference knows no initial state."""
    given_inputs = {name: value for name, value in inputs(time=21, strength=0.3).items() if name != "initial_state"}
    with mamba_ssm_reference() as theirs:

        def reference(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
            time_last = (t.transpose(1, 2) for t in (x, dt))
            y, state = theirs(*time_last, A, B.transpose(1, 2), C.transpose(1, 2), D, return_last_state=True)
            return y.transpose(1, 2), state

        expected = outputs_and_gradients(reference, given_inputs, torch.float32)
    for ours in (selective_scan.naive, selective_scan.chunked):
        error, name = worst_error(outputs_and_gradients(ours, given_inputs, torch.float32), expected)
        print(f"worst relative error {error:.1e} in {name}")
        assert error <= 5e-6, name


def test_golden() -> None:
    given_inputs = {
        "x": golden.ramp(1, 5, 2),
        "dt": golden.ramp(1, 5, 2, phase=1.0).abs(),
        "A": -golden.ramp(2, 3, phase=2.0).exp(),
        "B": golden.ramp(1, 5, 3, phase=3.0),
        "C": golden.ramp(1, 5, 3, phase=4.0),
        "D": golden.ramp(2, phase=5.0),
        "initial_state": golden.ramp(1, 2, 3, phase=6.0),
    }
    values = outputs_and_gradients(lambda **kw: selective_scan.chunked(**kw, chunk_length=3), given_inputs, torch.float64)
    golden.check("ops", values, path=golden.FOLDER / "ops_selective_scan.json")
