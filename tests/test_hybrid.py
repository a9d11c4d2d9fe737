"""The hybrid: attention against its definition, the cache that travels in the state, and the interventions on it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

import model_checks
from farstate import params
from farstate.errors import FarstateError
from farstate.models.head import mean_nll
from farstate.models.hybrid.shape import HybridConfig
from farstate.models.language_model import LanguageModel
from farstate.ops import attention
from farstate.state import State
from farstate.training.initial_states import Intervention, Run, build
from test_ops import compare, draw

pytestmark = pytest.mark.usefixtures("poisoned_memory")

VOCABULARY = 20
VARIANTS: list[dict[str, Any]] = [
    {},
    {"attention_window": 4, "attention_kv_heads": 1},
    {"attention_window": 1},
    {"attention_window": None, "rope_theta": None, "attention_offset": 0},
]


def config(**changes: Any) -> HybridConfig:
    values: dict[str, Any] = {"vocabulary_size": VOCABULARY, "width": 16, "layers": 2, "state_size": 6, "head_size": 8}
    return HybridConfig(**(values | {"attention_every": 2, "attention_heads": 2, "attention_window": None} | changes))


def caches(state: State) -> dict[str, Tensor]:
    """The cache of the one attention layer."""
    return next(layer.auxiliary for layer in state.layers if "keys" in layer.auxiliary)


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, **model_checks.SPLIT)


# --- attention -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("some_invalid", [False, True])
@pytest.mark.parametrize(
    ("time", "cached", "window", "kv_heads"),
    [(1, 0, None, 2), (5, 0, 3, 4), (20, 7, None, 1), (70, 9, 5, 2), (90, 0, 70, 2), (9, 4, 1, 4), (3, 10, 4, 2)],
)
def test_attention_is_the_definition(
    time: int,
    cached: int,
    window: int | None,
    kv_heads: int,
    some_invalid: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    inputs = {"q": draw(generator, 2, time, 4, 6)}
    inputs |= {name: draw(generator, 2, cached + time, kv_heads, 6) for name in "kv"}
    # Some queries see nothing at all.
    valid = torch.rand(2, cached + time, generator=generator) > 0.6 if some_invalid else None
    compare(
        lambda **kw: (attention.attend(**kw, valid=valid, window=window),),
        lambda **kw: (attention.naive(**kw, valid=valid, window=window),),
        inputs,
        dtype,
    )


def test_work_with_a_window_is_linear() -> None:
    """Of a long segment, no block of queries is given keys that none of them sees."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as record:
        attention.attend(*(torch.zeros(1, 2048, 2, 4) for _ in range(3)), window=64)
    calls = [event.input_shapes for event in record.events() if event.name == "aten::scaled_dot_product_attention"]
    assert len(calls) == 32
    assert max(shapes[1][2] for shapes in calls) == 64 + 63


def test_transformers_rotates_alike() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    x = draw(torch.Generator().manual_seed(0), 2, 9, 3, 8).float()
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=24, num_attention_heads=3, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
        )
    )
    cosine, sine = theirs(x, torch.arange(9)[None])
    expected, _ = apply_rotary_pos_emb(x, x, cosine, sine, unsqueeze_dim=2)
    torch.testing.assert_close(attention.rotate(x, torch.arange(9), 500.0), expected, rtol=1e-5, atol=1e-6)


def test_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (draw(generator, 1, 6, 2, 8) for _ in range(2))

    def scores(start: int) -> Tensor:
        rotated = (attention.rotate(t, torch.arange(start, start + 6), 10000.0) for t in (q, k))
        return torch.einsum("bihc,bjhc->bhij", *rotated)

    torch.testing.assert_close(scores(-100_000), scores(0), rtol=1e-9, atol=1e-9)


# --- the cache in the state ------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, 18), max_size=5), variant=st.sampled_from(VARIANTS))
def test_any_split_is_the_whole(cuts: list[int], variant: dict[str, Any]) -> None:
    model = model_checks.random_model(config(**variant))
    ids = model_checks.tokens(VOCABULARY, 2, 19)
    with torch.no_grad():
        whole, final = model(ids)
        state, parts = model.zero_state(2), []
        for start, end in itertools.pairwise(sorted({0, 19, *cuts})):
            hidden, state = model(ids[:, start:end], state)
            parts.append(hidden)
    same(torch.cat(parts, dim=1), whole)
    model_checks.same_states(state, final)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_flow_through_the_cache_unless_detached(variant: dict[str, Any]) -> None:
    # A window of one token sees itself: its scores, and so queries and keys, have no gradient.
    if variant.get("attention_window") != 1:
        model_checks.check_gradients_through_the_state(config(**variant))
    model = model_checks.random_model(config(**variant))
    ids = model_checks.tokens(VOCABULARY, 1, 6)
    _, state = model(ids)
    cache = caches(state)
    assert cache["keys"].shape[1] == {4: 3, 1: 0}.get(variant.get("attention_window", 0), 6)
    hidden, _ = model(ids, state)
    if cache["keys"].numel():
        for gradient in torch.autograd.grad(hidden.sin().sum(), [cache["keys"], cache["values"]]):
            assert (gradient.abs().amax((2, 3)) > 0).all(), "every cached token matters"


def test_a_window_as_long_as_the_text_is_full_attention() -> None:
    full, windowed = (model_checks.random_model(config(attention_window=window)) for window in (None, 12))
    ids = model_checks.tokens(VOCABULARY, 2, 12)
    same(windowed(ids)[0], full(ids)[0])
    assert not torch.allclose(windowed(torch.cat([ids, ids], 1))[0], full(torch.cat([ids, ids], 1))[0])


def test_a_reset_row_begins_afresh_and_the_others_go_on() -> None:
    model = model_checks.random_model(config())
    first, second = model_checks.tokens(VOCABULARY, 3, 7), model_checks.tokens(VOCABULARY, 3, 5, seed=1)
    with torch.no_grad():
        _, state = model(first)
        hidden, after = model(second, state.reset(torch.tensor([False, True, False])))
        same(hidden[1:2], model(second[1:2])[0])
        same(hidden[::2], model(second[::2], state.select([0, 2]))[0])
        # What was cleared in one row is masked there ever after.
        third = model_checks.tokens(VOCABULARY, 3, 4, seed=2)
        same(model(third, after)[0][1:2], model(third[1:2], model(second[1:2])[1])[0])


def test_caches_of_different_lengths_are_joined() -> None:
    model = model_checks.random_model(config())
    ids = model_checks.tokens(VOCABULARY, 3, 11)
    with torch.no_grad():
        states = [model(ids[:1, :3])[1], model.zero_state(1), model(ids[2:, :6])[1]]
        joined = State.cat(states)
        assert caches(joined)["valid"].sum(1).tolist() == [3, 0, 6]
        hidden, _ = model(ids, joined)
        for row, state in enumerate(states):
            same(hidden[row : row + 1], model(ids[row : row + 1], state)[0])
        model_checks.same_states(joined.permute([2, 0, 1]).select([1]), joined.select([0]))


def test_without_the_auxiliary_state_only_recurrences_are_passed() -> None:
    model = model_checks.random_model(config(attention_every=1, layers=1))
    ids = model_checks.tokens(VOCABULARY, 2, 5)
    with torch.no_grad():
        _, state = model(ids)
        hidden, after = model(ids, state.without_auxiliary())
        same(hidden, model(ids)[0])
    assert caches(after)["keys"].shape[1] == 5, "cleared entries are dropped, or they would pile up"


def test_a_cache_with_a_window_is_bounded_and_without_one_guarded() -> None:
    ids = model_checks.tokens(VOCABULARY, 2, 6)
    with torch.no_grad():
        model, state = LanguageModel(config(attention_window=9)), None
        for length in (6, 8, 8, 8):
            _, state = model(ids, state)
            assert caches(state)["keys"].shape == (2, length, 2, 8)
        guarded = LanguageModel(config(attention_cache=12))
        _, state = guarded(ids, guarded(ids)[1])
        with pytest.raises(FarstateError, match=r"carry 18 tokens, more than attention_cache = 12.*oldest row") as caught:
            guarded(ids, state)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [0, 5])
def test_states_are_saved_and_loaded(read: int, tmp_path: Path) -> None:
    model = LanguageModel(config())
    ids = model_checks.tokens(VOCABULARY, 2, 5)
    state = model(ids[:, :read])[1].detach() if read else model.zero_state(2)
    state.save(tmp_path / "state")
    loaded = State.load(tmp_path / "state")
    assert caches(loaded)["keys"].shape == (2, read, 2, 8)
    assert torch.equal(model(ids, loaded)[0], model(ids, state)[0])


# --- the interventions -----------------------------------------------------------------------------------

ROWS, CONTEXT = 4, 6


@dataclass
class Batch:
    tokens: Tensor
    fresh: Tensor


def intervention(model: LanguageModel, **arm: Any) -> Intervention:
    return build(TypeAdapter(params.Arm).validate_python(arm), Run(3, ROWS, 2, CONTEXT, model.zero_state))


def post_train(model: LanguageModel, arm: Intervention, steps: range, see: Callable[[State | None], None]) -> list[float]:
    """A few steps of training in two micro-batches; `see` is shown every initial state."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in steps:
        ids = model_checks.tokens(VOCABULARY, ROWS, CONTEXT + 1, seed=step)
        for number, part in enumerate(ids.split(ROWS // 2)):
            initial = arm.initial(step, Batch(part, torch.tensor([step % 3 == 0, step == 0])), number)
            see(initial)
            hidden, final = model(part[:, :-1], initial)
            loss = mean_nll(hidden, model.head_weight, part[:, 1:])
            loss.backward()
            losses.append(loss.item())
            arm.observe(final, number)
        optimizer.step()
        optimizer.zero_grad()
    return losses


ARMS: tuple[dict[str, Any], ...] = (
    {"initial_state": "zero"},
    {"initial_state": "random_noise", "sigma": 0.5},
    {"initial_state": "fitted_noise"},
    {"initial_state": "state_passing", "reset_probability": 0.4},
    {"initial_state": "state_passing", "carry_auxiliary": False},
    {"initial_state": "state_passing", "previous": "micro_batch", "reset_unit": "batch", "reset_auxiliary": False},
    {"initial_state": "tbtt"},
    {"initial_state": "gaussian", "scope": "joint"},
    {"initial_state": "gaussian", "scope": "head"},
    {"initial_state": "permuted"},
)
MAKE_THEIR_OWN = ("zero", "random_noise", "fitted_noise", "gaussian", "permuted")


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: "-".join(map(str, arm.values())))
def test_interventions_work_and_resume(arm: dict[str, Any], window: int | None, tmp_path: Path) -> None:
    """Through a file after two steps: the same losses as undisturbed, whatever the cache held."""
    lengths: list[int] = []

    def see(state: State | None) -> None:
        cache = {"valid": torch.zeros(1, 0)} if state is None else caches(state)
        lengths.append(int((cache["valid"] != 0).any(0).sum()))

    undisturbed = LanguageModel(config(attention_window=window))
    reference = intervention(undisturbed, **arm)
    expected = post_train(undisturbed, reference, range(4), see)
    model = LanguageModel(config(attention_window=window))
    before, after = (intervention(model, **arm) for _ in range(2))
    losses = post_train(model, before, range(2), lambda state: None)
    save_file({name: tensor.contiguous() for name, tensor in before.state_dict().items()}, tmp_path / "state")
    after.load_state_dict(load_file(tmp_path / "state"))
    assert losses + post_train(model, after, range(2, 4), lambda state: None) == expected
    if arm["initial_state"] in MAKE_THEIR_OWN or arm.get("carry_auxiliary") is False:
        assert not any(lengths)
    else:
        assert max(lengths) == {None: 7 * CONTEXT if "previous" in arm else 3 * CONTEXT, 9: 8}[window]


def test_passing_with_certain_reset_is_the_control() -> None:
    losses = []
    for arm in (ARMS[0], {"initial_state": "state_passing", "reset_probability": 1.0}):
        model = LanguageModel(config(), dtype=torch.float64)
        losses.append(post_train(model, intervention(model, **arm), range(3), lambda state: None))
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


# --- sizes and initialisation ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant", [*VARIANTS, {"layers": 7, "attention_every": 3, "attention_offset": 1, "attention_head_size": 4}]
)
def test_parameters_are_counted(variant: dict[str, Any]) -> None:
    model_checks.check_count(config(**variant))


def test_where_attention_is() -> None:
    def layers(**changes: Any) -> list[int]:
        shape = config(layers=8, **changes)
        return [layer for layer in range(8) if shape.attends(layer)]

    assert layers(attention_every=3) == [2, 5]
    assert layers(attention_every=4, attention_offset=0) == [0, 4]
    assert layers(attention_every=1) == list(range(8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_heads": 3}, "width = 16 must be a multiple of attention_heads = 3"),
        ({"attention_kv_heads": 4}, "multiple of attention_kv_heads"),
        ({"attention_head_size": 3}, "must be even"),
        ({"attention_offset": 2}, "must be below attention_every"),
        ({"attention_every": 3}, "none of 2 layers would be attention"),
        ({"attention_window": 0}, "attention_window"),
        ({"head_size": 5}, "multiple of head_size"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_initialisation() -> None:
    model_checks.check_initialisation(config())
    mixer = LanguageModel(config(layers=4), torch.Generator().manual_seed(1)).backbone.layers[3].mixer
    for weight, bound in ((mixer.q_proj.weight, 0.25), (mixer.v_proj.weight, 0.25), (mixer.o_proj.weight, 0.125)):
        assert 0.9 * bound < weight.abs().max().item() <= bound


def test_rows_backends_and_autocast() -> None:
    model_checks.check_rows(config())
    model_checks.check_backends(config())
    model_checks.check_autocast(config())


def test_golden() -> None:
    model_checks.check_golden(
        config(vocabulary_size=7, vocabulary_multiple=8, width=8, state_size=3, attention_window=5, attention_kv_heads=1),
        "models_hybrid",
    )
