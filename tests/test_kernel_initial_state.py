"""The Triton scan of Mamba-1, under the interpreter against the definition in float64, and compiled for GPUs."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import kernel_checks
from farstate.kernels import aot
from farstate.kernels import initial_state as kernel
from farstate.ops import backends, selective_scan
from test_ops import compare, outputs_and_gradients, worst_error
from test_selective_scan import inputs

# Relative to the largest entry of the float64 reference, float32.
TOLERANCE = 2e-6
# The same where outputs and gradients are rounded to float16.
HALF_TOLERANCE = 2.0**-10
INCREMENT = ("dt", "A", "C", "initial_state")


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def increment(**kw: Tensor) -> tuple[Tensor]:
    return (kernel.increment(**kw),)


def naive_increment(**kw: Tensor) -> tuple[Tensor]:
    return (selective_scan.naive_increment(**kw),)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 3, 3), (1, 9, 5, 2), (1, 2, 3, 17)])
@pytest.mark.parametrize("chunk", [4, 8])
def test_the_scan_is_the_definition(shape: tuple[int, int, int, int], chunk: int) -> None:
    batch, time, width, state = shape
    given_inputs = inputs(batch=batch, time=time, width=width, state=state)
    compare(
        lambda **kw: kernel.selective_scan(**kw, chunk_length=chunk),
        selective_scan.naive,
        given_inputs,
        torch.float32,
        TOLERANCE,
    )


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 3, 3), (1, 21, 5, 2), (1, 2, 3, 17)])
def test_the_increment_is_the_definition(shape: tuple[int, int, int, int]) -> None:
    batch, time, width, state = shape
    given_inputs = inputs(batch=batch, time=time, width=width, state=state)
    compare(increment, naive_increment, {name: given_inputs[name] for name in INCREMENT}, torch.float32, TOLERANCE)


def test_the_increment_is_what_the_initial_state_adds() -> None:
    given_inputs = {name: value.float() for name, value in inputs(time=6).items()}
    y, _ = kernel.selective_scan(**given_inputs)
    del given_inputs["initial_state"]
    from_zero, _ = kernel.selective_scan(**given_inputs)
    given_inputs = {name: value.float() for name, value in inputs(time=6).items()}
    torch.testing.assert_close(from_zero + kernel.increment(**{name: given_inputs[name] for name in INCREMENT}), y)


@pytest.mark.parametrize("left_out", [("D",), ("initial_state",), ("D", "initial_state")])
def test_optional_inputs(left_out: tuple[str, ...]) -> None:
    given_inputs = {name: value for name, value in inputs(batch=1, time=5).items() if name not in left_out}
    compare(
        lambda **kw: kernel.selective_scan(**kw, chunk_length=4), selective_scan.naive, given_inputs, torch.float32, TOLERANCE
    )


@pytest.mark.parametrize("used", [0, 1], ids=["only y", "only the final state"])
def test_one_output_used(used: int) -> None:
    compare(
        lambda **kw: (kernel.selective_scan(**kw, chunk_length=4)[used],),
        # The sum keeps C and D in the graph of the final state, which does not depend on them.
        lambda **kw: (selective_scan.naive(**kw)[used] + 0.0 * (kw["C"].sum() + kw["D"].sum()),),
        inputs(batch=1, time=6),
        torch.float32,
        TOLERANCE,
    )


def test_several_programs_share_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_ENTRIES", 8)
    given_inputs = inputs(time=3, width=5, state=3)
    compare(
        lambda **kw: kernel.selective_scan(**kw, chunk_length=2), selective_scan.naive, given_inputs, torch.float32, TOLERANCE
    )
    compare(increment, naive_increment, {name: given_inputs[name] for name in INCREMENT}, torch.float32, TOLERANCE)


def test_half_precision_inputs() -> None:
    """x, B and C in float16, as under autocast, everything else in float32."""
    exact = inputs(time=7, strength=0.3)
    given_inputs = {name: value.half() if name in "xBC" else value.float() for name, value in exact.items()}

    def run(**leaves: Tensor) -> tuple[Tensor, Tensor]:
        return kernel.selective_scan(**{n: t.to(given_inputs[n].dtype) for n, t in leaves.items()}, chunk_length=4)

    y, state = run(**given_inputs)
    assert (y.dtype, state.dtype) == (torch.float16, torch.float32)
    rounded = {name: value.double() for name, value in given_inputs.items()}
    expected = outputs_and_gradients(selective_scan.naive, rounded, torch.float64)
    found = outputs_and_gradients(run, rounded, torch.float32)
    error, name = worst_error(found, expected)
    print(f"worst relative error {error:.1e} in {name}")
    assert error <= HALF_TOLERANCE, name
    # What is not rounded at the end is not rounded on the way.
    assert worst_error({"output 1": found["output 1"]}, {"output 1": expected["output 1"]})[0] <= TOLERANCE
    C = given_inputs["C"]
    exact_increment = selective_scan.naive_increment(rounded["dt"], rounded["A"], C.double(), rounded["initial_state"])
    found_increment = kernel.increment(given_inputs["dt"], given_inputs["A"], C, given_inputs["initial_state"])
    assert (found_increment.double() - exact_increment).abs().max() <= TOLERANCE * exact_increment.abs().max()


def test_decays_of_all_strengths() -> None:
    """Log decays of −20, −1e-4 and what lies between, one after the other in every channel."""
    given_inputs = inputs(time=10, width=4)
    strengths = torch.tensor([20.0, 1e-4, 3.0, 0.1, 700.0], dtype=torch.float64)
    given_inputs["dt"] = torch.stack([strengths.repeat(2).roll(shift) for shift in range(4)], dim=-1).expand(2, 10, 4)
    given_inputs["A"] = -torch.ones_like(given_inputs["A"])
    given_inputs["x"] = given_inputs["x"] / given_inputs["dt"]
    compare(lambda **kw: kernel.selective_scan(**kw, chunk_length=8), selective_scan.naive, given_inputs, torch.float32, 1e-5)
    compare(increment, naive_increment, {name: given_inputs[name] for name in INCREMENT}, torch.float32, 1e-5)


def test_a_split_is_the_whole() -> None:
    given_inputs = {name: value.float() for name, value in inputs(time=9).items()}
    state = given_inputs.pop("initial_state")
    whole, final = kernel.selective_scan(**given_inputs, initial_state=state, chunk_length=4)
    parts = []
    for start, end in itertools.pairwise((0, 1, 3, 9)):
        segment = {name: value if name in "AD" else value[:, start:end] for name, value in given_inputs.items()}
        y, state = kernel.selective_scan(**segment, initial_state=state, chunk_length=4)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    torch.testing.assert_close(state, final)


def test_any_strides() -> None:
    given_inputs = inputs(time=5)

    def apart(op):
        def run(**leaves: Tensor) -> tuple[Tensor, ...]:
            outputs = op(**{name: _Apart.apply(leaf) for name, leaf in leaves.items()})
            # Gradients of the outputs arrive with the strides of an expanded sum and of a transposed product.
            return tuple(output.transpose(1, 2) for output in outputs)

        return run

    def turned(op):
        return lambda **kw: tuple(output.transpose(1, 2) for output in op(**kw))

    compare(apart(kernel.selective_scan), turned(selective_scan.naive), given_inputs, torch.float32, TOLERANCE)
    compare(apart(increment), turned(naive_increment), {name: given_inputs[name] for name in INCREMENT}, torch.float32, TOLERANCE)


class _Apart(torch.autograd.Function):
    """The same values with NaN between them in memory."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        return kernel_checks.strided(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "initial_state"])
def test_addresses_past_two_to_the_31(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch row of one input lies 3 · 2³⁰ elements into it; a 32-bit product would read zeros 2³⁰ before it."""
    given_inputs = {n: value.half().float() for n, value in inputs(batch=4, time=2, width=2, state=2).items()}
    value = given_inputs[name]
    far = kernel_checks.sparse(tuple(value.shape), (1 << 30, *value[0].stride()), torch.float16)
    far.copy_(value)
    assert 3 * far.stride(0) > 2**31

    def all_of(tensor: Tensor) -> list[Tensor]:
        leaves = {n: t.clone().requires_grad_() for n, t in given_inputs.items() if n != name}
        y, final = kernel.selective_scan(**{**leaves, name: tensor})
        gradients = torch.autograd.grad(y.float().sum() + final.sin().sum(), list(leaves.values()))
        return [y.float(), final, *gradients]

    with kernel_checks.in_place(monkeypatch):
        found = all_of(far)
    for actual, expected in zip(found, all_of(value.half()), strict=True):
        assert torch.equal(actual, expected)


def test_it_is_the_backend_triton() -> None:
    assert backends.load("selective_scan", "triton") is kernel.selective_scan
    assert backends.unavailable("selective_scan", "triton", "cpu") == "triton needs a CUDA GPU"


def test_refuses_what_does_not_fit() -> None:
    given_inputs = {name: value.float() for name, value in inputs().items()}
    with pytest.raises(ValueError, match="initial_state must have shape"):
        kernel.selective_scan(**{**given_inputs, "initial_state": given_inputs["initial_state"][:1]})
    with pytest.raises(ValueError, match="C must have shape"):
        kernel.increment(**{**{n: given_inputs[n] for n in INCREMENT}, "C": given_inputs["C"][..., :1]})
    with pytest.raises(ValueError, match="power of two"):
        kernel.selective_scan(**given_inputs, chunk_length=3)
    with pytest.raises(TypeError, match="float32"):
        kernel.selective_scan(**{**given_inputs, "x": given_inputs["x"].double()})


SEQUENCES = ("x", "dt", "B", "C", "y", "dy", "dx", "ddt")
# Registers of a thread that each kernel may use without spilling, and bytes of shared memory.
LIMITS = {
    "selective_scan_fwd_kernel": (128, 8192),
    "selective_scan_bwd_kernel": (224, 16384),
    "increment_fwd_kernel": (128, 8192),
    "increment_bwd_kernel": (160, 16384),
}


def test_compiles_for_gpus() -> None:
    _, blocks = kernel._launch(torch.empty(1, 0, 1536), 16, kernel._STEPS)
    warps = {"num_warps": blocks.pop("num_warps")}
    jobs = []
    for capability, dtype in ((80, "fp32"), (80, "bf16"), (90, "bf16")):
        for name in LIMITS:
            arguments = [n for n in getattr(kernel, name).arg_names if n not in blocks]
            signature = {
                n: "i32" if n.startswith("stride_") or n in ("time", "width", "state_size") else "*fp32" for n in arguments
            }
            # The last dimension dense, as usual.
            dense = {
                n: 1 for n in arguments if n in ("stride_xd", "stride_dtd", "stride_Bn", "stride_Cn", "stride_yd", "stride_gd")
            }
            signature |= {n: f"*{dtype}" for n in arguments if n in SEQUENCES}
            jobs.append(aot.Job(f"farstate.kernels.initial_state:{name}", signature, blocks | dense, capability, warps))
    # One position: its number becomes a constant, and nothing optional is given.
    nothing = {"D": None, "initial": None, "entering": None}
    one = jobs[0]
    jobs.append(aot.Job(one.kernel, one.signature, {**one.constexprs, **nothing, "time": 1}, 90, warps))
    compiled = aot.compile_in_child(jobs)
    print(aot.report(compiled))
    for result in compiled:
        registers, shared = LIMITS[result.name]
        assert result.spills == 0
        assert result.registers <= registers
        assert result.shared_bytes <= shared
        kernel_checks.check_addresses(result)
