"""RWKV-6 as a model: against fla's own, against itself in pieces, its sizes and its initialisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import model_checks
from farstate.models.checkpoints import load_model
from farstate.models.language_model import LanguageModel
from farstate.models.rwkv6.shape import RWKV6Config
from fla_oracle import oracle

VOCABULARY = 20
# Largest difference from fla, relative to the largest magnitude: float32 on both sides.
ORACLE_TOLERANCE = 1e-4

VARIANTS: list[dict[str, Any]] = [
    {},
    {"heads": 4, "expand_k": 0.5, "expand_v": 2.0},
    {"norm_first": False, "tied_embeddings": True},
]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def config(**changes: Any) -> RWKV6Config:
    values: dict[str, Any] = {"vocabulary_size": VOCABULARY, "width": 16, "layers": 2, "heads": 2, "mix_rank": 3, "decay_rank": 5}
    return RWKV6Config(**(values | changes))


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 2},
        {"num_heads": 4, "expand_k": 1.0, "norm_first": False, "intermediate_size": 24, "tie_word_embeddings": True},
        {"num_heads": 2, "expand_k": 1.0, "expand_v": 2.0, "fuse_norm": False, "hidden_ratio": 2.0, "norm_eps": 1e-3},
    ],
)
def test_fla_agrees(options: dict[str, Any], tmp_path: Path) -> None:
    ids = model_checks.tokens(VOCABULARY, 2, 13)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5}
    reference = oracle().make(tmp_path, "rwkv6", ids, 6, **sizes, **options)
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
    model_checks.check_split(config(), list(range(19)))


def test_all_three_states_matter() -> None:
    model = model_checks.random_model(config())
    ids = model_checks.tokens(VOCABULARY, 2, 9)
    with torch.no_grad():
        _, state = model(ids[:, :5])
        exact = model(ids[:, 5:], state)[0]
        for name in ("recurrent", "attention_shift", "ffn_shift"):
            layers = []
            for layer in state.layers:
                auxiliary = {key: torch.zeros_like(t) if key == name else t for key, t in layer.auxiliary.items()}
                recurrent = torch.zeros_like(layer.recurrent) if name == "recurrent" else layer.recurrent
                layers.append(type(layer)(recurrent, auxiliary))
            assert model_checks.relative(model(ids[:, 5:], type(state)(tuple(layers)))[0], exact) > 1e-3, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_flow_through_the_state_unless_detached(variant: dict[str, Any]) -> None:
    model_checks.check_gradients_through_the_state(config(**variant))


def test_rows_backends_and_autocast() -> None:
    model_checks.check_rows(config())
    model_checks.check_backends(config(expand_k=0.5))
    model_checks.check_autocast(config())


@pytest.mark.parametrize("variant", [*VARIANTS, {"ffn_width": 7}, {"mix_rank": 32, "decay_rank": 64}])
def test_parameters_are_counted(variant: dict[str, Any]) -> None:
    model_checks.check_count(config(**variant))


def test_sizes_of_the_published_model() -> None:
    # RWKV-6 World 1.6B: 24 layers of width 2048, heads of 64 channels, vocabulary 65536.
    published = RWKV6Config(vocabulary_size=65536, width=2048, layers=24, heads=32)
    assert (published.key_size, published.value_size, published.inner_ffn_width) == (64, 64, 7168)
    assert round(published.parameter_count() / 1e7) == 160


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "width × expand_k = 16 must be a multiple of heads = 3"),
        ({"expand_v": 0.7}, "expand_v"),
        ({"mix_rank": 0}, "greater than"),
        ({"head_size": 2}, "head_size"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_initialisation() -> None:
    model_checks.check_initialisation(config())
    model = LanguageModel(config(width=32, layers=3, heads=2), torch.Generator().manual_seed(1))
    first, middle, last = (block.attn for block in model.backbone.layers)

    # The official numbers at the ends of the scales, in the first and in the last layer.
    for attn in (first, last):
        decay = attn.w_proj.linear.lora[2].bias
        torch.testing.assert_close(decay[[0, -1]], torch.tensor([-6.0, -1.0]))
        assert (decay.diff() > 0.0).all()
    torch.testing.assert_close(first.w_proj.linear.lora[2].bias[16], torch.tensor(-6.0 + 5.0 * (16 / 31) ** 0.7))
    torch.testing.assert_close(last.w_proj.linear.lora[2].bias[16], torch.tensor(-6.0 + 5.0 * (16 / 31) ** 2.0))
    torch.testing.assert_close(first.bonus.flatten()[:3], torch.tensor([0.0, 0.1, -0.1]))
    torch.testing.assert_close(last.bonus.flatten()[[0, 31]], torch.tensor([1.0, 0.1]))
    torch.testing.assert_close(first.x_bias[0], 1.0 - (torch.arange(32) / 32) ** 0.5)
    torch.testing.assert_close(middle.x_bias[3], 1.0 - (torch.arange(32) / 32) ** (2 / 3) - 0.15)
    torch.testing.assert_close(middle.g_norm.weight, torch.full((32,), (2 / 3) ** 0.7))
    eye = torch.eye(32)
    torch.testing.assert_close(middle.r_proj.linear.weight @ middle.r_proj.linear.weight.t(), eye, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(middle.k_proj.linear.weight @ middle.k_proj.linear.weight.t(), 0.01 * eye, atol=1e-6, rtol=0.0)
    key = model.backbone.layers[1].ffn.key.linear.weight
    torch.testing.assert_close(key.t() @ key, eye, atol=1e-5, rtol=0.0)
    assert not middle.o_proj.weight.any()

    slow = LanguageModel(config(decay_init_range=(-9.0, -4.0)), torch.Generator().manual_seed(1))
    # At the start the low-rank part is zero: all log decays are those of the bias.
    attn = slow.backbone.layers[0].attn
    log_decay = -torch.exp(attn.w_proj.linear(torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0))))
    assert log_decay.min().item() == pytest.approx(-torch.tensor(-4.0).exp().item(), rel=1e-5)
    assert log_decay.max().item() == pytest.approx(-torch.tensor(-9.0).exp().item(), rel=1e-5)


def test_only_matrices_are_decayed() -> None:
    model = LanguageModel(config())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)] for parameter in model.parameter_groups(0.1)[1]["params"]}
    assert {name.rpartition("layers.0.")[2] for name in kept if "layers.0" in name} == {
        *(f"{norm}.{part}" for norm in ("pre_norm", "attn_norm", "ffn_norm", "attn.g_norm") for part in ("weight", "bias")),
        *("attn.bonus", "attn.x_bias", "attn.x_proj.0.mu", "attn.w_proj.linear.lora.2.bias", "ffn.key.mu", "ffn.receptance.mu"),
    }


def test_golden() -> None:
    model_checks.check_golden(
        config(vocabulary_size=7, vocabulary_multiple=8, width=8, heads=2, expand_k=0.5, ffn_width=5), "models_rwkv6"
    )
