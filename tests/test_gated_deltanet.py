"""Gated DeltaNet as a model: against fla's own, against itself in pieces, its sizes and its initialisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file

import model_checks
from farstate.models.gated_deltanet.block import unit_length
from farstate.models.gated_deltanet.shape import GatedDeltaNetConfig
from farstate.models.language_model import LanguageModel
from fla_oracle import oracle

VOCABULARY = 20
# Largest difference from fla, relative to the largest magnitude: float32 on both sides.
ORACLE_TOLERANCE = 1e-4

VARIANTS: list[dict[str, Any]] = [
    {},
    {"value_heads": 4, "conv_width": 2, "negative_eigenvalues": True},
    {"output_gate": False, "expand_v": 1.5, "head_size": 4, "tied_embeddings": True},
    {"conv_width": None},
]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def config(**changes: Any) -> GatedDeltaNetConfig:
    values: dict[str, Any] = {"vocabulary_size": VOCABULARY, "width": 16, "layers": 2, "heads": 2, "mlp_width": 24}
    return GatedDeltaNetConfig(**(values | changes))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        (
            {"num_v_heads": 4, "conv_size": 2, "allow_neg_eigval": True, "tie_word_embeddings": True},
            {"value_heads": 4, "conv_width": 2, "negative_eigenvalues": True, "tied_embeddings": True},
        ),
        ({"use_gate": False, "expand_v": 1.5}, {"output_gate": False, "expand_v": 1.5}),
        ({"use_short_conv": False, "norm_eps": 0.01}, {"conv_width": None, "norm_epsilon": 0.01}),
    ],
    ids=["default", "shared keys", "no gate", "no convolution"],
)
def test_fla_agrees(theirs: dict[str, Any], ours: dict[str, Any], tmp_path: Path) -> None:
    """Weights by fla's parameter names; logits in one segment and continued, gradients of all parameters."""
    ids = model_checks.tokens(VOCABULARY, 2, 13)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "num_heads": 2, "head_dim": 4}
    reference = oracle().make(tmp_path, "gated_deltanet", ids, 6, **{**sizes, "intermediate_size": 24, **theirs})
    model = LanguageModel(config(head_size=4, vocabulary_multiple=1, residual_in_fp32=False, **ours))
    stored = load_file(tmp_path / "model.safetensors")
    if model.config.tied_embeddings:
        stored["lm_head.weight"] = stored["model.embeddings.weight"]
    model.load_state_dict({name: stored.pop(model_checks.fla_name(name)) for name in model.state_dict()})
    assert not stored
    errors = model_checks.check_against_fla(reference, model, ids, [2, 3, 6])
    print(f"logits {errors['logits']:.1e}, continued {errors['continued']:.1e}, worst {max(errors.values()):.1e}")
    assert max(errors.values()) <= ORACLE_TOLERANCE, errors


def test_unit_length() -> None:
    x = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    expected = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(unit_length(x), expected, rtol=1e-12, atol=1e-12)
    zero = torch.zeros(1, 4, requires_grad=True)
    unit_length(zero).sum().backward()
    torch.testing.assert_close(zero.grad, torch.full((1, 4), 1e3))


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 18), max_size=5), variant=st.sampled_from(VARIANTS))
def test_any_split_is_the_whole(cuts: list[int], variant: dict[str, Any]) -> None:
    model_checks.check_split(config(**variant), cuts)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_flow_through_the_state_unless_detached(variant: dict[str, Any]) -> None:
    model_checks.check_gradients_through_the_state(config(**variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_backends_and_autocast(variant: dict[str, Any]) -> None:
    model_checks.check_backends(config(**variant))
    model_checks.check_autocast(config(**variant))


@pytest.mark.parametrize("variant", [*VARIANTS, {"mlp_width": None}])
def test_parameters_are_counted(variant: dict[str, Any]) -> None:
    model_checks.check_count(config(**variant))


def test_default_sizes_follow_fla() -> None:
    """Six width² a layer in the recurrence, whatever the heads, as its layer's documentation advises, and 8 width² in the MLP."""
    shape = GatedDeltaNetConfig(vocabulary_size=32000, width=2048, layers=21)
    assert (shape.key_size, shape.value_size, shape.inner_mlp_width) == (256, 512, 5632)
    assert shape.block_parameters(0) / 2048**2 == pytest.approx(6 + 8, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "¾ · width = 12 must be a multiple of heads = 5"),
        ({"head_size": 3, "expand_v": 1.5}, r"head_size × expand_v = 4\.5"),
        ({"value_heads": 3}, "multiple of heads"),
        ({"dt_min": 0.2}, "must not exceed dt_max"),
        ({"A_init_range": (2.0, 1.0)}, "low, high"),
        ({"state_size": 4}, "state_size"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_initialisation() -> None:
    model_checks.check_initialisation(config())
    slow = config(heads=6, head_size=2, A_init_range=(0.0, 0.5), dt_min=1e-3, dt_max=2e-3, initializer_range=0.01)
    attn = LanguageModel(slow, torch.Generator().manual_seed(1)).backbone.layers[1].attn
    assert (attn.A_log.exp() <= 0.5).all()
    assert attn.A_log.exp().std() > 0.05
    dt = F.softplus(attn.dt_bias)
    assert (dt >= 1e-3 * 0.999).all()
    assert (dt <= 2e-3 * 1.001).all()
    for weight in (attn.q_proj.weight, attn.q_conv1d.weight, attn.o_proj.weight):
        assert weight.std().item() == pytest.approx(0.01, rel=0.2)
    assert (attn.o_norm.weight == 1).all()


def test_golden() -> None:
    model_checks.check_golden(
        config(
            vocabulary_size=7,
            vocabulary_multiple=8,
            width=8,
            heads=1,
            value_heads=2,
            head_size=3,
            conv_width=3,
            mlp_width=5,
            expand_v=1.0,
        ),
        "models_gated_deltanet",
    )
