"""Mamba-1 as a model: against transformers', against itself in pieces, its sizes and its initialisation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import model_checks
from farstate.models.head import mean_nll
from farstate.models.language_model import LanguageModel
from farstate.models.mamba1.shape import Mamba1Config
from farstate.ops import backends

VOCABULARY = 20
# Largest difference from transformers, relative to the largest magnitude: float32 on both sides.
ORACLE_TOLERANCE = 1e-4

VARIANTS: list[dict[str, Any]] = [
    {},
    {"dt_rank": 3, "state_size": 1, "conv_width": 2, "conv_bias": False},
    {"expand": 1, "linear_bias": True, "tied_embeddings": False},
]


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def config(**changes: Any) -> Mamba1Config:
    values: dict[str, Any] = {"vocabulary_size": VOCABULARY, "width": 16, "layers": 2, "state_size": 5}
    return Mamba1Config(**(values | changes))


def oracle(**changes: Any) -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    generator = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "state_size": 5, "num_hidden_layers": 2}
    model = MambaForCausalLM(MambaConfig(**(values | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the initialisation, where norms are one and biases zero and mistakes cancel.
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        (
            {"time_step_rank": 3, "conv_kernel": 2, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False},
            {"dt_rank": 3, "conv_width": 2, "linear_bias": True, "conv_bias": False, "tied_embeddings": False},
        ),
    ],
)
def test_transformers_agrees(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    reference = oracle(**theirs)
    model = LanguageModel(config(vocabulary_size=32, **ours))

    def renamed(name: str) -> str:
        return name.replace("backbone.embeddings.", "backbone.embedding.")

    model.load_state_dict({renamed(name): value for name, value in reference.state_dict().items()})
    ids = model_checks.tokens(32, 2, 22)
    for time in (1, 3, 21):
        hidden, _ = model(ids[:, :time])
        error = model_checks.relative(hidden @ model.head_weight.t(), reference(ids[:, :time]).logits)
        print(f"{time} tokens: logits differ by {error:.1e}")
        assert error <= ORACLE_TOLERANCE

    F.cross_entropy(reference(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    hidden, _ = model(ids[:, :-1])
    mean_nll(hidden, model.head_weight, ids[:, 1:]).backward()
    gradients = {renamed(name): p.grad for name, p in reference.named_parameters(remove_duplicate=False)}
    errors = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        errors[name] = model_checks.relative(parameter.grad, gradients[name])
    print(f"gradients differ by {max(errors.values()):.1e}")
    assert max(errors.values()) <= ORACLE_TOLERANCE, errors


def test_transformers_agrees_on_continuing() -> None:
    """It continues from a state token by token only."""
    reference = oracle()
    model = LanguageModel(config(vocabulary_size=32))
    model.load_state_dict({n.replace("embeddings.", "embedding."): value for n, value in reference.state_dict().items()})
    ids = model_checks.tokens(32, 2, 12)
    with torch.no_grad():
        cache = reference(ids[:, :8], use_cache=True).cache
        _, state = model(ids[:, :8])
        for t in range(8, 12):
            step = reference(ids[:, t : t + 1], cache=cache, use_cache=True)
            cache = step.cache
            hidden, state = model(ids[:, t : t + 1], state)
            assert model_checks.relative(hidden @ model.head_weight.t(), step.logits) <= ORACLE_TOLERANCE


@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(1, 18), max_size=5), variant=st.sampled_from(VARIANTS))
def test_any_split_is_the_whole(cuts: list[int], variant: dict[str, Any]) -> None:
    model_checks.check_split(config(**variant), cuts)


def test_token_by_token_is_parallel() -> None:
    model_checks.check_split(config(), list(range(19)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_flow_through_the_state_unless_detached(variant: dict[str, Any]) -> None:
    model_checks.check_gradients_through_the_state(config(**variant))


def test_a_head_is_one_channel() -> None:
    state = LanguageModel(config()).zero_state(3)
    assert [state.entries(layer).shape for layer in range(2)] == [(3, 32, 5)] * 2
    assert state.layers[0].auxiliary["conv"].shape == (3, 32, 3)


def test_rows_backends_and_autocast() -> None:
    model_checks.check_rows(config())
    model_checks.check_backends(config())
    model_checks.check_autocast(config())


def test_time_steps_are_rounded_after_the_bias_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under bf16, a bias added in bf16 would move every slow time step by up to a percent."""
    seen: list[torch.Tensor] = []
    real = backends.implementation

    def spying(*where: Any) -> Any:
        operation = real(*where)
        return lambda x, dt, *rest: (seen.append(dt), operation(x, dt, *rest))[1]

    monkeypatch.setattr(backends, "implementation", spying)
    model = LanguageModel(config(layers=1))
    mixer = model.backbone.layers[0].mixer
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        mixer.dt_proj.weight.zero_()
        model(model_checks.tokens(VOCABULARY, 1, 3))
    assert seen[0].dtype == torch.float32
    torch.testing.assert_close(seen[0], F.softplus(mixer.dt_proj.bias).expand_as(seen[0]))


@pytest.mark.parametrize("variant", [*VARIANTS, {"width": 17}])
def test_parameters_are_counted(variant: dict[str, Any]) -> None:
    model_checks.check_count(config(**variant))


def test_sizes_of_the_published_models() -> None:
    # state-spaces/mamba-130m and mamba-2.8b
    small = Mamba1Config(vocabulary_size=50277, width=768, layers=24, vocabulary_multiple=8)
    large = Mamba1Config(vocabulary_size=50277, width=2560, layers=64, vocabulary_multiple=8)
    assert (small.inner_width, small.time_step_rank, large.time_step_rank) == (1536, 48, 160)
    assert round(small.parameter_count() / 1e6) == 129
    assert round(large.parameter_count() / 1e6) == 2768


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dt_min": 0.2}, "dt_min = 0.2 must not exceed"),
        ({"A_init_range": (2.0, 1.0)}, "low, high"),
        ({"A_init_range": (0.0, 1.0)}, "greater than 0"),
        ({"conv_width": 1}, "greater than or equal to 2"),
        ({"head_size": 2}, "head_size"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_initialisation() -> None:
    model_checks.check_initialisation(config())
    mixer = LanguageModel(config(width=64, layers=4), torch.Generator().manual_seed(1)).backbone.layers[1].mixer
    dt = F.softplus(mixer.dt_proj.bias)
    assert (dt.min() >= 1e-3 * 0.999) & (dt.max() <= 0.1 * 1.001)
    assert dt.log().std() > 1.0
    torch.testing.assert_close(-torch.exp(mixer.A_log), -torch.arange(1.0, 6.0).expand(128, 5))
    assert (mixer.D == 1.0).all()
    for weight, bound in (
        (mixer.in_proj.weight, 64**-0.5),
        (mixer.x_proj.weight, 128**-0.5),
        (mixer.dt_proj.weight, 4**-0.5),
        (mixer.out_proj.weight, 128**-0.5 / 2.0),
        (mixer.conv1d.weight, 4**-0.5),
    ):
        assert 0.95 * bound < weight.abs().max() <= bound


def test_the_knobs_set_the_initial_decays() -> None:
    slow = config(
        layers=1, dt_init="constant", dt_scale=0.1, dt_min=0.01, dt_max=0.02, dt_init_floor=0.015, A_init_range=(0.1, 0.5)
    )
    mixer = LanguageModel(slow, torch.Generator().manual_seed(1)).backbone.layers[0].mixer
    torch.testing.assert_close(mixer.dt_proj.weight, torch.full((32, 1), 0.1))
    dt = F.softplus(mixer.dt_proj.bias)
    assert (dt.min() >= 0.015 * 0.999) & (dt.max() <= 0.02 * 1.001)
    torch.testing.assert_close(mixer.A_log.exp(), torch.linspace(0.1, 0.5, 5).expand(32, 5))
    assert (dt[:, None] * mixer.A_log.exp()).max() <= 0.0101


def test_dynamics_are_not_decayed() -> None:
    model = LanguageModel(config())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)] for parameter in model.parameter_groups(0.1)[1]["params"]}
    assert {name.rpartition("layers.0.")[2] for name in kept if "layers.0" in name} == {
        *("norm.weight", "mixer.A_log", "mixer.D", "mixer.dt_proj.bias", "mixer.conv1d.bias"),
    }


def test_golden() -> None:
    model_checks.check_golden(
        config(vocabulary_size=7, vocabulary_multiple=8, width=6, state_size=3, conv_width=3, dt_rank=2), "models_mamba1"
    )
