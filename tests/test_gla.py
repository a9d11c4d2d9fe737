"""GLA as a model: against fla's own, against itself in pieces, its sizes and its initialisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import model_checks
from farstate.models.checkpoints import load_model
from farstate.models.gla.shape import GLAConfig, gated_mlp_width
from farstate.models.language_model import LanguageModel
from fla_oracle import oracle

VOCABULARY = 20
# Largest difference from fla, relative to the largest magnitude: float32 on both sides.
ORACLE_TOLERANCE = 1e-4

VARIANTS: list[dict[str, Any]] = [{}, {"heads": 4, "kv_heads": 2, "conv_width": 3}, {"tied_embeddings": True, "conv_width": 4}]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def config(**changes: Any) -> GLAConfig:
    values: dict[str, Any] = {"vocabulary_size": VOCABULARY, "width": 16, "layers": 2, "heads": 2, "mlp_width": 24}
    return GLAConfig(**(values | changes))


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 2},
        {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "expand_k": 1.0, "expand_v": 2.0},
        {
            "num_heads": 2,
            "clamp_min": -0.04,
            "fuse_norm": False,
            "tie_word_embeddings": True,
            "use_short_conv": True,
            "conv_size": 3,
        },
    ],
)
def test_fla_agrees(options: dict[str, Any], tmp_path: Path) -> None:
    ids = model_checks.tokens(VOCABULARY, 2, 13)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "intermediate_size": 24}
    reference = oracle().make(tmp_path, "gla", ids, 6, **sizes, **options)
    if not options.get("fuse_norm", True):
        reference["gradients"] = {
            name.replace("g_norm.", "g_norm_swish_gate."): gradient for name, gradient in reference["gradients"].items()
        }
    model = load_model(tmp_path)
    errors = model_checks.check_against_fla(reference, model, ids, [2, 3, 6])
    print(
        {name: f"{error:.1e}" for name, error in errors.items() if not name.startswith("gradient")}, f"{max(errors.values()):.1e}"
    )
    assert max(errors.values()) <= ORACLE_TOLERANCE, errors


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 18), max_size=5), variant=st.sampled_from(VARIANTS))
def test_any_split_is_the_whole(cuts: list[int], variant: dict[str, Any]) -> None:
    model_checks.check_split(config(**variant), cuts)


def test_token_by_token_is_parallel() -> None:
    model_checks.check_split(config(conv_width=4), list(range(19)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_flow_through_the_state_unless_detached(variant: dict[str, Any]) -> None:
    model_checks.check_gradients_through_the_state(config(**variant))


def test_rows_backends_and_autocast() -> None:
    model_checks.check_rows(config(conv_width=4))
    model_checks.check_backends(config(heads=4, kv_heads=2))
    model_checks.check_autocast(config())


@pytest.mark.parametrize("variant", [*VARIANTS, {"mlp_width": None, "expand_k": 1.0}])
def test_parameters_are_counted(variant: dict[str, Any]) -> None:
    model_checks.check_count(config(**variant))


def test_sizes_of_the_published_model() -> None:
    # fla-hub/gla-1.3B-100B; its card rounds.
    published = GLAConfig(vocabulary_size=32000, width=2048, layers=24, heads=4)
    assert published.inner_mlp_width == 5632
    assert (published.key_size, published.value_size) == (256, 512)
    assert 1.3e9 < published.parameter_count() < 1.4e9
    assert [gated_mlp_width(width, 4.0) for width in (96, 97, 384, 1024)] == [256, 512, 1024, 2816]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "width × expand_k = 8 must be a multiple of heads = 3"),
        ({"expand_v": 0.7}, "expand_v"),
        ({"heads": 4, "kv_heads": 3}, "multiple of kv_heads"),
        ({"decay_bias_range": (1.0, 0.0)}, "low, high"),
        ({"log_decay_floor": 0.5}, "less than 0"),
        ({"expand": 2}, "expand"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_initialisation() -> None:
    model_checks.check_initialisation(config(conv_width=4))
    slow = config(width=64, decay_bias_range=(2.0, 6.0), gate_logit_normalizer=32.0, initializer_range=0.01)
    attn = LanguageModel(slow, torch.Generator().manual_seed(1)).backbone.layers[1].attn
    bias = attn.gk_proj[1].bias
    assert (bias.min() >= 2.0) & (bias.max() <= 6.0) & (bias.std() > 0.5)
    assert attn.q_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)
    # The knobs set the initial decays: at a zero input they are those of the bias.
    log_decay = attn._log_decay(torch.zeros(1, 1, 64))
    torch.testing.assert_close(log_decay.flatten(), F.logsigmoid(bias) / 32.0)
    assert log_decay.abs().max() < 0.005


def test_only_matrices_are_decayed() -> None:
    model = LanguageModel(config(conv_width=4))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)] for parameter in model.parameter_groups(0.1)[1]["params"]}
    assert {name.rpartition("layers.0.")[2] for name in kept if "layers.0" in name} == {
        *("attn_norm.weight", "mlp_norm.weight", "attn.g_norm_swish_gate.weight", "attn.gk_proj.1.bias"),
    }


def test_golden() -> None:
    model_checks.check_golden(
        config(
            vocabulary_size=7,
            vocabulary_multiple=8,
            width=8,
            heads=2,
            kv_heads=1,
            conv_width=3,
            mlp_width=5,
            log_decay_floor=-0.1,
        ),
        "models_gla",
    )
