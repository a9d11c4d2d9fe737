"""Distances of predictive distributions, streamed over the vocabulary, against their definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from farstate.ops import divergence

# Largest absolute error: what float32 logits of the order of ten are uncertain by.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 5e-6}


def inputs(
    *, tokens: int = 5, width: int = 12, vocabulary: int = 301, apart: float = 0.3, strength: float = 3.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Two hidden states and a head, float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * width**-0.5
    hidden, noise = torch.randn(2, tokens, width, generator=generator, dtype=torch.float64)
    return strength * hidden, strength * hidden + apart * noise, weight


def errors(actual: divergence.Divergence, expected: divergence.Divergence) -> dict[str, float]:
    assert all(torch.isfinite(value).all() for value in actual)
    return {
        name: (a.double() - e.double()).abs().max().item() for name, a, e in zip(actual._fields, actual, expected, strict=True)
    }


def test_two_symbols_by_hand() -> None:
    """Probabilities (1/4, 3/4) and (1/2, 1/2): every term is a small fraction."""
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    hidden, other = torch.tensor([[-math.log(3.0)]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    shannon = (math.log(2 / 3) / 4 + 3 * math.log(6 / 5) / 4 + math.log(4 / 3) / 2 + math.log(4 / 5) / 2) / 2
    for function in (divergence.naive, divergence.streamed):
        found = function(hidden, other, weight)
        assert found.total_variation.item() == pytest.approx(1 / 4, abs=1e-15)
        assert found.jensen_shannon.item() == pytest.approx(shannon, abs=1e-15)
        assert found.cosine_distance.item() == pytest.approx(1 - 2 / math.sqrt(5), abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("apart", [1e-4, 0.3, 30.0])
@pytest.mark.parametrize("vocabulary_size", [None, 256, 290, 1])
def test_streamed_is_the_definition(vocabulary_size: int | None, apart: float, dtype: torch.dtype) -> None:
    arguments = inputs(apart=apart)
    expected = divergence.naive(*arguments, vocabulary_size=vocabulary_size, chunk_tokens=2)
    found = divergence.streamed(
        *(t.to(dtype) for t in arguments), vocabulary_size=vocabulary_size, block_tokens=3, block_vocabulary=64
    )
    measured = errors(found, expected)
    print(measured)
    assert max(measured.values()) <= TOLERANCE[dtype], measured
    assert all(value.dtype == dtype for value in found)


def test_small_distances_keep_their_digits_in_float32() -> None:
    """The definition of Jensen–Shannon loses all of them: it subtracts entropies of the order of one."""
    hidden, other, weight = inputs(apart=3e-4, strength=0.3)
    expected = divergence.naive(hidden, other, weight)
    found = divergence.streamed(hidden.float(), other.float(), weight.float())
    plain = divergence.naive(hidden.float(), other.float(), weight.float())
    assert expected.jensen_shannon.max() < 1e-7

    def relative(actual: Tensor, exact: Tensor) -> float:
        return ((actual.double() - exact) / exact).abs().max().item()

    for name in ("jensen_shannon", "cosine_distance"):
        ours, theirs = (relative(getattr(d, name), getattr(expected, name)) for d in (found, plain))
        print(f"{name}: {ours:.1e}, by the definition in float32 {theirs:.1e}")
        assert ours <= 1e-3
        assert theirs > 0.1


def test_the_series_is_long_enough_and_used_far_enough() -> None:
    """φ in float32 where its series is longest, and where the other formula has the most to cancel."""
    square = torch.linspace(0.9, 1.1, 20_001, dtype=torch.float64) * divergence.SERIES_BELOW
    delta = square.sqrt()
    faded = ((1.0 - delta) / (1.0 + delta)).float()
    a = -faded.double().log()
    delta = torch.tanh(a / 2)
    exact = 0.5 * ((1.0 + delta) * torch.log1p(delta) + (1.0 - delta) * torch.log1p(-delta))
    relative = divergence.phi(a.float(), faded).double() / exact - 1.0
    # The mean of many: rounding goes either way, what a series leaves out goes one.
    below = square < divergence.SERIES_BELOW
    left_out = relative[(square > 0.99 * divergence.SERIES_BELOW) & below].mean().item()
    print(f"left out {left_out:.1e}, largest errors {relative[below].abs().max():.1e} and {relative[~below].abs().max():.1e}")
    assert abs(left_out) <= 5e-8
    assert relative.abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_distribution_is_at_no_distance_from_itself(dtype: torch.dtype) -> None:
    hidden, _, weight = (t.to(dtype) for t in inputs(tokens=37, width=33, vocabulary=1031))
    # Elsewhere in memory, and with other strides.
    other = torch.cat([torch.zeros(37, 3, dtype=dtype), hidden], dim=1)[:, 3:]
    assert all((value == 0.0).all() for value in divergence.streamed(hidden, other, weight, block_tokens=16))


def test_bounds_are_reached() -> None:
    weight = torch.eye(4)
    hidden, other = 200.0 * torch.tensor([[1.0, 0, 0, 0]]), 200.0 * torch.tensor([[0, 1.0, 0, 0]])
    for function in (divergence.naive, divergence.streamed):
        found = function(hidden, other, weight)
        assert found.total_variation.item() == 1.0
        assert found.jensen_shannon.item() == pytest.approx(math.log(2.0), abs=1e-7)
        assert found.jensen_shannon <= torch.tensor(math.log(2.0))
        assert found.cosine_distance.item() == 1.0


def test_two_heads_and_leading_dimensions() -> None:
    hidden, other, weight = inputs(tokens=6)
    other_weight = weight.flip(0)
    shaped = [t.view(2, 3, -1) for t in (hidden, other)]
    found = divergence.streamed(*shaped, weight, other_weight, vocabulary_size=300)
    expected = divergence.naive(hidden, other, weight, other_weight, vocabulary_size=300)
    assert found.total_variation.shape == (2, 3)
    assert max(errors(divergence.Divergence(*(v.flatten() for v in found)), expected).values()) <= 1e-13


def test_half_precision_is_widened_first() -> None:
    halves = [t.bfloat16() for t in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = divergence.divergence(*halves)
    assert found.total_variation.dtype == torch.float32
    assert max(errors(found, divergence.naive(*(t.double() for t in halves))).values()) <= TOLERANCE[torch.float32]


def test_it_is_a_distance() -> None:
    """Symmetry; and the triangle inequality for total variation and for the root of Jensen–Shannon."""
    hidden, other, weight = inputs(tokens=40, apart=2.0)
    third = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    ab, bc, ac, ba = (
        divergence.streamed(a, b, weight) for a, b in ((hidden, other), (other, third), (hidden, third), (other, hidden))
    )
    assert all(torch.equal(x, y) for x, y in zip(ab, ba, strict=True))
    assert (ac.total_variation <= ab.total_variation + bc.total_variation + 1e-12).all()
    assert (ac.jensen_shannon.sqrt() <= ab.jensen_shannon.sqrt() + bc.jensen_shannon.sqrt() + 1e-12).all()


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that `function` has allocated at any time beyond what was there."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


def test_full_logits_never_exist() -> None:
    tokens, vocabulary = 8, 50_288
    hidden, other, weight = (t.float() for t in inputs(tokens=tokens, width=8, vocabulary=vocabulary))
    two_matrices = 2 * tokens * vocabulary * 4
    needed = peak_bytes(lambda: divergence.streamed(hidden, other, weight))
    print(f"{needed / 1e6:.2f} MB beside {two_matrices / 1e6:.1f} MB that two matrices of logits take")
    assert needed < two_matrices / 10


@pytest.mark.parametrize("function", [divergence.naive, divergence.streamed])
def test_inputs_are_not_written_to(function: Callable[..., object]) -> None:
    for tokens, width, vocabulary in ((5, 12, 301), (1, 1, 1)):
        hidden, other, weight = (t.float() for t in inputs(tokens=tokens, width=width, vocabulary=vocabulary))
        for given in ([hidden, other, weight, weight.flip(0)], [t.t().contiguous().t() for t in (hidden, other, weight, weight)]):
            before, versions = [t.clone() for t in given], [t._version for t in given]
            function(*given)
            assert all(torch.equal(now, was) for now, was in zip(given, before, strict=True))
            assert [t._version for t in given] == versions


@pytest.mark.parametrize("function", [divergence.naive, divergence.streamed])
def test_no_tokens(function: Callable[..., divergence.Divergence]) -> None:
    hidden, _, weight = inputs()
    assert all(value.shape == (0, 3) for value in function(hidden.new_empty(0, 3, 12), hidden.new_empty(0, 3, 12), weight))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"other_hidden": torch.zeros(5, 11)}, "do not fit"),
        ({"head_weight": torch.zeros(7, 11)}, "do not fit"),
        ({"other_head_weight": torch.zeros(7, 12)}, "beside"),
        ({"vocabulary_size": 302}, "vocabulary_size must be in 1 … 301"),
        ({"vocabulary_size": 0}, "vocabulary_size"),
    ],
)
@pytest.mark.parametrize("function", [divergence.naive, divergence.streamed])
def test_refuses_what_does_not_fit(function: Callable[..., object], changes: dict[str, object], message: str) -> None:
    hidden, other, weight = inputs()
    with pytest.raises(ValueError, match=message):
        function(**({"hidden": hidden, "other_hidden": other, "head_weight": weight} | changes))
