"""The kernel of the state's moments, under the interpreter against states materialised one by one, and compiled for GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernel_checks
import test_state_moments
from farstate.kernels import aot
from farstate.kernels import state_moments as kernel
from farstate.ops import gated_delta, gla, state_moments

# Relative to the largest entry of the float64 reference on the same (rounded) inputs.
TOLERANCE = 2e-6


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(
    *, time: int = 7, keys: int = 5, values: int = 3, groups: int = 2, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    batch, heads = 2, 2
    return {
        "k": draw(batch, time, groups, keys, seed=1, dtype=dtype),
        "v": draw(batch, time, heads, values, seed=2, dtype=dtype),
        "log_decay": -draw(batch, time, heads, keys, seed=3).exp(),
        "weight": draw(batch, time, heads, seed=4).sigmoid(),
        "initial_state": draw(batch, heads, keys, values, seed=5),
    }


def reference(
    k: Tensor, v: Tensor, log_decay: Tensor, weight: Tensor | None, initial_state: Tensor | None, delta: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """By the operations' own definitions, in float64."""
    k, v, log_decay = (t.double() for t in (k, v, log_decay))
    k = k.repeat_interleave(v.shape[2] // k.shape[2], dim=2)
    initial_state = None if initial_state is None else initial_state.double()
    if delta:
        assert weight is not None
        inputs = {"q": k, "k": k, "v": v, "log_decay": log_decay, "beta": weight.double()}
        operation = gated_delta.naive
    else:
        v = v if weight is None else v * weight.double().unsqueeze(-1)
        inputs = {
            "q": k,
            "k": k,
            "v": v,
            "log_decay": log_decay.expand_as(k) if log_decay.dim() == 4 else log_decay[..., None].expand_as(k),
        }
        operation = gla.naive
    moments = state_moments.naive(operation, inputs, {}, initial_state)
    return moments.sums, moments.squared_norms, operation(**inputs, initial_state=initial_state)[1]


def compare(arguments: dict[str, Tensor | None], delta: bool = False) -> None:
    found = kernel.scan(**arguments, delta=delta)  # type: ignore[arg-type]
    expected = reference(**{"weight": None, "initial_state": None} | arguments, delta=delta)  # type: ignore[arg-type]
    errors = {}
    for name, actual, exact in zip(("sums", "squared norms", "final state"), found, expected, strict=True):
        assert torch.isfinite(actual).all()
        assert actual.dtype == (torch.float32 if name == "final state" else torch.float64)
        errors[name] = ((actual.double() - exact).abs().max() / exact.abs().max()).item()
    print(errors)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("time", "keys", "values", "groups"), [(1, 1, 1, 1), (5, 5, 3, 2), (9, 8, 17, 1), (2, 33, 19, 2)])
def test_a_decay_for_each_key_channel(time: int, keys: int, values: int, groups: int, dtype: torch.dtype) -> None:
    compare(inputs(time=time, keys=keys, values=values, groups=groups, dtype=dtype))


@pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_decay_a_head(dtype: torch.dtype, delta: bool) -> None:
    arguments = inputs(time=11, values=19, keys=7, dtype=dtype)
    arguments["log_decay"] = arguments["log_decay"][..., 0]
    arguments["k"] = torch.nn.functional.normalize(arguments["k"], dim=-1)
    compare(arguments, delta)


def test_a_small_standard_deviation_keeps_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_ENTRIES", 64)
    arguments = {name: 1.0 + 0.01 * value for name, value in inputs(time=9, keys=7, values=19).items()}
    arguments["log_decay"] = torch.full_like(arguments["log_decay"], -0.05)
    sums, squares, _ = kernel.scan(**arguments)
    exact_sums, exact_squares, _ = reference(**arguments, delta=False)
    exact, found = (state_moments.Moments(a, b, 7 * 19) for a, b in ((exact_sums, exact_squares), (sums, squares)))
    ratio = (exact.mean / exact.std).median().item()
    relative = ((found.std - exact.std) / exact.std).abs().max().item()
    print(f"mean / std {ratio:.0f}, std to {relative:.1e}")
    assert ratio > 50.0
    assert relative <= 2.5e-7 * ratio


@pytest.mark.parametrize("left_out", ["weight", "initial_state"])
def test_optional_inputs(left_out: str) -> None:
    compare({name: value for name, value in inputs().items() if name != left_out})


def test_several_programs_share_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_ENTRIES", 16)
    compare(inputs(values=7))


def test_decays_of_all_strengths() -> None:
    arguments = inputs(time=12)
    strengths = torch.tensor([-20.0, -1e-4, -3.0, -0.1, -700.0])
    arguments["log_decay"] = strengths.expand(2, 12, 2, 5).roll(1, dims=-1).clone()
    compare(arguments)


@pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"])
def test_any_strides(delta: bool) -> None:
    arguments = inputs()
    arguments["log_decay"] = arguments["log_decay"][..., 0] if delta else arguments["log_decay"]
    arguments["k"] = torch.nn.functional.normalize(arguments["k"], dim=-1)
    compare({name: kernel_checks.strided(value) for name, value in arguments.items()}, delta)


@pytest.mark.parametrize("name", ["k", "v", "log_decay", "weight", "initial_state"])
def test_addresses_past_two_to_the_31(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch row of one input lies 3 · 2³⁰ elements into it; a 32-bit product would read zeros 2³⁰ before it."""
    batch = 4
    arguments = {n: torch.cat([value, value.flip(0)]).half().float() for n, value in inputs(time=2).items()}
    value = arguments[name]
    far = kernel_checks.sparse(tuple(value.shape), (1 << 30, *value[0].stride()), torch.float16)
    far.copy_(value)
    assert (batch - 1) * far.stride(0) > 2**31
    with kernel_checks.in_place(monkeypatch):
        found = kernel.scan(**{**arguments, name: far})
    expected = kernel.scan(**arguments)
    assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("operation", ["ssd", "gla", "wkv6", "gated_delta"])
def test_a_recording_on_a_gpu_takes_the_kernel(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {name: value.float() for name, value in test_state_moments.inputs(operation, 5).items()}
    module = test_state_moments.MODULES[operation]
    _, expected = test_state_moments.recorded(operation, module.chunked, arguments)
    calls = []
    scan = kernel.scan
    monkeypatch.setattr(kernel, "scan", lambda *args, **kwargs: calls.append(1) or scan(*args, **kwargs))
    monkeypatch.setattr(state_moments, "_on_gpu", lambda tensor: True)
    result, moments = test_state_moments.recorded(operation, module.chunked, arguments)
    assert calls
    torch.testing.assert_close(moments.sums, expected.sums, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.squared_norms, expected.squared_norms, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result, module.chunked(**arguments))


def test_refuses_what_does_not_fit() -> None:
    arguments = inputs()
    with pytest.raises(ValueError, match="log_decay must have shape"):
        kernel.scan(**{**arguments, "log_decay": torch.zeros(2, 7, 2, 4)})
    with pytest.raises(ValueError, match="float32"):
        kernel.scan(**{**arguments, "k": arguments["k"].double()})


def test_compiles_for_gpus() -> None:
    integers = ("time", "heads", "per_group", "keys", "values")
    names = kernel.state_moments_fwd_kernel.arg_names
    jobs = []
    for capability in (80, 90):
        for dtype, delta in (("fp32", True), ("bf16", False)):
            signature = {n: "i32" for n in names if n in integers or n.startswith("stride_")}
            signature |= dict.fromkeys(("k", "v"), f"*{dtype}")
            signature |= dict.fromkeys(("log_decay", "weight", "initial", "final", "partial"), "*fp32")
            blocks = {"DELTA": delta, "BLOCK_K": 128, "BLOCK_V": kernel._ENTRIES // 128}
            jobs.append(
                aot.Job(
                    "farstate.kernels.state_moments:state_moments_fwd_kernel", signature, blocks, capability, {"num_warps": 1}
                )
            )
    compiled = aot.compile_in_child(jobs)
    print(aot.report(compiled))
    for result in compiled:
        assert result.spills == 0
        assert result.registers <= 168
        assert result.shared_bytes <= 4096
        kernel_checks.check_addresses(result)
