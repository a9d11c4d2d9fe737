"""The kernel of the distances between distributions, under the interpreter against the definition, and compiled for GPUs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kernel_checks
from farstate.kernels import aot
from farstate.kernels import divergence as kernel
from farstate.ops import divergence

# Largest absolute error: what float32 logits of a few units are uncertain by.
TOLERANCE = 5e-6


pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def several_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, so that small inputs have several of everything."""
    monkeypatch.setattr(kernel, "TILE", {"BLOCK_T": 4, "BLOCK_V": 16, "BLOCK_D": 16})
    monkeypatch.setattr(kernel, "_SHORTEST_PART", 2)
    monkeypatch.setattr(kernel, "_processors", lambda device: 1)


def inputs(
    *, tokens: int = 5, width: int = 19, vocabulary: int = 61, apart: float = 0.3, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator) * width**-0.5
    hidden, noise = torch.randn(2, tokens, width, generator=generator)
    return (3.0 * hidden).to(dtype), (3.0 * hidden + apart * noise).to(dtype), weight.to(dtype)


def compare(found: divergence.Divergence, *arguments: Tensor, **options: int) -> None:
    expected = divergence.naive(*(t.double() for t in arguments), **options)  # type: ignore[arg-type]
    errors = {}
    for name, actual, exact in zip(found._fields, found, expected, strict=True):
        assert torch.isfinite(actual).all()
        assert actual.dtype == torch.float32
        errors[name] = (actual.double() - exact).abs().max().item()
    print(errors)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "width", "vocabulary_size"), [(1, 1, 1), (5, 19, 61), (9, 32, 48), (4, 16, 33)])
def test_kernel_is_the_definition(tokens: int, width: int, vocabulary_size: int, dtype: torch.dtype) -> None:
    arguments = inputs(tokens=tokens, width=width, dtype=dtype)
    compare(kernel.fused(*arguments, vocabulary_size=vocabulary_size), *arguments, vocabulary_size=vocabulary_size)


@pytest.mark.parametrize("apart", [1e-4, 30.0])
def test_near_and_far(apart: float) -> None:
    arguments = inputs(apart=apart)
    found = kernel.fused(*arguments)
    compare(found, *arguments)
    if apart < 1.0:
        exact = divergence.naive(*(t.double() for t in arguments)).jensen_shannon
        assert ((found.jensen_shannon - exact).abs() / exact).max() <= 0.05


def test_the_series_is_long_enough() -> None:
    """Two symbols whose log probabilities differ by just less than where the series ends."""
    furthest = 2.0 * math.atanh(divergence.SERIES_BELOW**0.5)
    hidden = -0.5 * furthest * torch.linspace(0.9, 0.99, 7).unsqueeze(1)
    arguments = (hidden, -hidden, torch.tensor([[1.0], [-1.0]]))
    exact = divergence.naive(*(t.double() for t in arguments)).jensen_shannon
    assert ((kernel.fused(*arguments).jensen_shannon - exact).abs() / exact).max() <= 2e-6


def test_no_tokens() -> None:
    _, _, weight = inputs()
    found = kernel.fused(weight.new_empty(2, 0, 19), weight.new_empty(2, 0, 19), weight)
    assert all(value.shape == (2, 0) and value.dtype == torch.float32 for value in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_distribution_is_at_no_distance_from_itself(dtype: torch.dtype) -> None:
    hidden, _, weight = inputs(dtype=dtype)
    found = kernel.fused(hidden, kernel_checks.strided(hidden), weight, kernel_checks.strided(weight))
    assert all((value == 0.0).all() for value in found)


def test_two_heads_leading_dimensions_and_any_strides() -> None:
    hidden, other, weight = inputs(tokens=6)
    other_weight = weight.flip(0)
    shaped = [kernel_checks.strided(t.view(2, 3, -1)) for t in (hidden, other)]
    found = kernel.fused(*shaped, kernel_checks.strided(weight), other_weight.t().contiguous().t(), vocabulary_size=50)
    assert found.total_variation.shape == (2, 3)
    compare(divergence.Divergence(*(v.flatten() for v in found)), hidden, other, weight, other_weight, vocabulary_size=50)


@pytest.mark.parametrize("name", ["hidden", "head_weight"])
def test_addresses_past_two_to_the_31(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row lies 3 · 2³⁰ elements into the matrix; a 32-bit product would read zeros 2³⁰ before it."""
    hidden, other, weight = inputs(tokens=4, vocabulary=4, dtype=torch.float16)
    arguments = {"hidden": hidden, "other_hidden": other, "head_weight": weight}
    value = arguments[name]
    far = kernel_checks.sparse(tuple(value.shape), (1 << 30, 1), torch.float16)
    far.copy_(value)
    with kernel_checks.in_place(monkeypatch):
        found = kernel.fused(**{**arguments, name: far})
    expected = kernel.fused(**arguments)
    assert all(torch.equal(a, e) for a, e in zip(found, expected, strict=True))


def test_refuses_float64() -> None:
    with pytest.raises(ValueError, match="float64"):
        kernel.fused(*(t.double() for t in inputs()))


def test_compiles_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    jobs = []
    for capability in (80, 90):
        for dtype in ("fp32", "bf16"):
            for name in ("divergence_normalizers_fwd_kernel", "divergence_distances_fwd_kernel"):
                names = getattr(kernel, name).arg_names
                signature = {n: "i32" for n in names if n.startswith("stride_") or n in ("tokens", "vocabulary", "width", "part")}
                signature |= dict.fromkeys(("h", "h_other", "w", "w_other"), f"*{dtype}") | {"norms": "*fp32", "partial": "*fp32"}
                jobs.append(aot.Job(f"farstate.kernels.divergence:{name}", signature, kernel.TILE, capability, kernel.OPTIONS))
    compiled = aot.compile_in_child(jobs)
    print(aot.report(compiled))
    for result in compiled:
        assert result.spills <= 64
        assert result.shared_bytes <= 48 * 1024
        kernel_checks.check_addresses(result)
