"""The language model against transformers' Mamba-2, against itself in pieces, and on disk."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

import golden
from farstate.errors import FarstateError
from farstate.models.checkpoints import detect_format, load_model, save_model
from farstate.models.head import mean_nll, token_nll
from farstate.models.language_model import LanguageModel
from farstate.models.mamba2.shape import Mamba2Config

# Largest difference from the oracle, relative to the largest magnitude: float32 on both sides.
ORACLE_TOLERANCE = 1e-4
VOCABULARY = 50


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def config(**changes: Any) -> Mamba2Config:
    values: dict[str, Any] = {"vocabulary_size": VOCABULARY, "width": 16, "layers": 2, "state_size": 6, "head_size": 8}
    return Mamba2Config(**(values | changes))


def tokens(batch: int, time: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


# --- against transformers --------------------------------------------------------------------------------


def oracle(groups: int, width: int, tied: bool, residual_in_fp32: bool = True) -> Any:
    from transformers import Mamba2Config as OracleConfig
    from transformers import Mamba2ForCausalLM

    generator = torch.Generator().manual_seed(0)
    model = Mamba2ForCausalLM(
        OracleConfig(
            num_heads=4,
            head_dim=8,
            vocab_size=VOCABULARY,
            hidden_size=16,
            state_size=6,
            num_hidden_layers=2,
            n_groups=groups,
            conv_kernel=width,
            tie_word_embeddings=tied,
            residual_in_fp32=residual_in_fp32,
            chunk_size=8,
        )
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the initialisation, where norms are one and biases zero and mistakes cancel.
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.mark.parametrize(("groups", "width", "tied"), [(1, 4, True), (2, 4, False), (2, 2, True), (1, 2, False)])
def test_transformers_agrees(groups: int, width: int, tied: bool, tmp_path: Path) -> None:
    reference = oracle(groups, width, tied)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path).train()
    assert detect_format(tmp_path) == "transformers"
    assert model.config.groups == groups
    for time in (1, 2, 3, 21):
        ids = tokens(3, time)
        hidden, _ = model(ids)
        error = relative(hidden @ model.head_weight.t(), reference(ids).logits)
        print(f"groups {groups}, width {width}, {time} tokens: logits differ by {error:.1e}")
        assert error <= ORACLE_TOLERANCE

    ids = tokens(3, 22, seed=1)
    F.cross_entropy(reference(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    hidden, _ = model(ids[:, :-1])
    mean_nll(hidden, model.head_weight, ids[:, 1:]).backward()
    theirs = {
        name.replace("embeddings", "embedding"): parameter.grad
        for name, parameter in reference.named_parameters(remove_duplicate=False)
    }
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = relative(parameter.grad, theirs[name])
        assert error <= ORACLE_TOLERANCE, f"gradient of {name}: {error:.2e}"


def test_transformers_agrees_on_continuing(tmp_path: Path) -> None:
    reference = oracle(1, 4, True)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    ids = tokens(2, 19)
    with torch.no_grad():
        first = reference(ids[:, :12], use_cache=True)
        second = reference(ids[:, 12:], cache=first.cache, use_cache=True)
        _, state = model(ids[:, :12])
        hidden, _ = model(ids[:, 12:], state)
    assert relative(hidden @ model.head_weight.t(), second.logits) <= ORACLE_TOLERANCE


# --- the carried state -----------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(1, 22), max_size=5), groups=st.sampled_from([1, 2]))
def test_any_split_is_the_whole(cuts: list[int], groups: int) -> None:
    model = LanguageModel(config(groups=groups), dtype=torch.float64)
    ids = tokens(2, 23)
    with torch.no_grad():
        whole, final = model(ids)
        state, parts = None, []
        for start, end in itertools.pairwise(sorted({0, 23, *cuts})):
            hidden, state = model(ids[:, start:end], state)
            parts.append(hidden)
    assert state is not None
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-10, atol=1e-12)
    for mine, expected in zip(state.layers, final.layers, strict=True):
        torch.testing.assert_close(mine.recurrent, expected.recurrent, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(mine.auxiliary["conv"], expected.auxiliary["conv"], rtol=1e-10, atol=1e-12)


def test_token_by_token_is_parallel_and_zero_state_is_none() -> None:
    model = LanguageModel(config(), dtype=torch.float64)
    ids = tokens(1, 9)
    with torch.no_grad():
        whole, _ = model(ids)
        state = model.zero_state(1)
        for t in range(9):
            hidden, state = model(ids[:, t : t + 1], state)
            torch.testing.assert_close(hidden[:, 0], whole[:, t], rtol=1e-10, atol=1e-12)
    assert state.layers[0].recurrent.dtype == torch.float64
    assert model.float().zero_state(4).nbytes == 4 * 2 * 4 * (4 * 8 * 6 + (32 + 12) * 3)


def test_gradients_flow_through_the_state_unless_detached() -> None:
    model = LanguageModel(config(), dtype=torch.float64)
    ids = tokens(2, 12)

    def gradients(cut: bool) -> list[Tensor]:
        model.zero_grad()
        _, state = model(ids[:, :5])
        hidden, _ = model(ids[:, 5:], state.detach() if cut else state)
        hidden.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    model.zero_grad()
    model(ids)[0][:, 5:].square().sum().backward()
    whole = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for through, expected in zip(gradients(cut=False), whole, strict=True):
        torch.testing.assert_close(through, expected, rtol=1e-9, atol=1e-11)
    assert any(not torch.allclose(a, b) for a, b in zip(gradients(cut=True), whole, strict=True))


def test_rows_of_a_batch_do_not_meet() -> None:
    model = LanguageModel(config(), dtype=torch.float64)
    ids = tokens(3, 10)
    with torch.no_grad():
        whole, _ = model(ids)
        for row in range(3):
            torch.testing.assert_close(model(ids[row : row + 1])[0], whole[row : row + 1], rtol=1e-10, atol=1e-12)


def test_wrong_inputs_are_refused() -> None:
    model = LanguageModel(config())
    with pytest.raises(ValueError, match="tokens must be"):
        model(tokens(1, 3)[0])
    with pytest.raises(ValueError, match="batch size 2"):
        model(tokens(1, 3), model.zero_state(2))


def test_bf16_autocast_keeps_recurrence_and_losses_in_float32() -> None:
    model = LanguageModel(config())
    ids = tokens(2, 17)
    exact, exact_state = model(ids[:, :-1])
    loss = mean_nll(exact, model.head_weight, ids[:, 1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden, state = model(ids[:, :-1])
        rounded = mean_nll(hidden, model.head_weight, ids[:, 1:])
        per_token = token_nll(hidden, model.head_weight, ids[:, 1:])
    assert (state.layers[0].recurrent.dtype, rounded.dtype, per_token.dtype) == (torch.float32,) * 3
    assert state.layers[0].auxiliary["conv"].dtype == torch.float32
    assert relative(state.layers[1].recurrent, exact_state.layers[1].recurrent) < 0.05
    torch.testing.assert_close(rounded, loss, rtol=0.01, atol=0.0)
    torch.testing.assert_close(per_token.mean(), rounded)
    rounded.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


# --- head ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 5, 100, None])
@pytest.mark.parametrize("vocabulary", [None, 11])
def test_token_nll_is_cross_entropy(chunk: int | None, vocabulary: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(13, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 11, (2, 7), generator=generator)
    weights = torch.rand(2, 7, generator=generator, dtype=torch.float64)
    weights[0, :3] = 0.0
    expected = F.cross_entropy((hidden @ head[:vocabulary].t()).flatten(0, 1), targets.flatten(), reduction="none").view(2, 7)
    per_token = token_nll(hidden, head, targets, vocabulary, chunk)
    torch.testing.assert_close(per_token, expected, rtol=1e-12, atol=1e-12)

    def same_gradients(actual: Tensor, reference: Tensor) -> None:
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(
            torch.autograd.grad(actual, (hidden, head), retain_graph=True),
            torch.autograd.grad(reference, (hidden, head), retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)

    same_gradients((per_token * weights).sum(), (expected * weights).sum())
    same_gradients(3.0 * mean_nll(hidden, head, targets, None, vocabulary, chunk), 3.0 * expected.mean())
    same_gradients(mean_nll(hidden, head, targets, weights, vocabulary, chunk), (expected * weights).sum() / weights.sum())


def test_nll_of_extreme_logits_is_finite() -> None:
    hidden = torch.tensor([[100.0], [-100.0]], requires_grad=True)
    head = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    targets = torch.tensor([1, 0])
    loss = mean_nll(hidden, head, targets)
    torch.testing.assert_close(loss, torch.tensor(200.0))
    torch.testing.assert_close(token_nll(hidden, head, targets), torch.tensor([200.0, 200.0]))
    loss.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_head_refuses_what_does_not_fit() -> None:
    hidden, head, targets = torch.zeros(2, 3, 4), torch.zeros(5, 4), torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="do not fit"):
        token_nll(hidden, head, targets[:1])
    with pytest.raises(ValueError, match="vocabulary_size"):
        token_nll(hidden, head, targets, 6)
    with pytest.raises(ValueError, match="chunk_tokens"):
        token_nll(hidden, head, targets, None, 0)
    with pytest.raises(ValueError, match="sum to zero"):
        mean_nll(hidden, head, targets, torch.zeros(2, 3))


# --- configuration, parameters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"tied_embeddings": False}, {"groups": 2, "conv_bias": False}, {"linear_bias": True, "conv_width": 2}]
)
def test_parameters_are_counted(changes: dict[str, Any]) -> None:
    model = LanguageModel(config(**changes))
    total = sum(parameter.numel() for parameter in model.parameters())
    embeddings = {id(p): p.numel() for p in (model.backbone.embedding.weight, model.head_weight)}
    assert model.config.parameter_count() == total
    assert model.config.parameter_count(embeddings=False) == total - sum(embeddings.values())


def test_sizes_of_the_paper() -> None:
    published = Mamba2Config(vocabulary_size=50277, width=768, layers=24)
    assert published.padded_vocabulary == 50288
    assert round(published.parameter_count() / 1e6) == 129


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_size": 5}, "multiple of head_size"),
        ({"groups": 3}, "multiple of groups"),
        ({"width": 0}, "greater than"),
        ({"typo": 1}, "typo"),
    ],
)
def test_impossible_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_initialisation_takes_its_generator_and_no_other() -> None:
    before = torch.get_rng_state()
    first = LanguageModel(config(), torch.Generator().manual_seed(3))
    second = LanguageModel(config(), torch.Generator().manual_seed(3))
    other = LanguageModel(config(), torch.Generator().manual_seed(4))
    assert torch.equal(before, torch.get_rng_state())
    for name, value in first.state_dict().items():
        assert value.isfinite().all(), name
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.head_weight, other.head_weight)
    mixer = first.backbone.layers[0].mixer
    dt = F.softplus(mixer.dt_bias)
    assert dt.min() >= 1e-3 * 0.999
    assert dt.max() <= 0.1 * 1.001
    assert mixer.A_log.exp().min() >= 1.0
    assert mixer.A_log.exp().max() <= 16.0


def test_only_matrices_are_decayed() -> None:
    model = LanguageModel(config())
    decayed, kept = model.parameter_groups(0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(kept["params"]) == len(names)
    assert {names[id(p)].rpartition("mixer.")[2] for p in kept["params"]} == {
        *("A_log", "D", "dt_bias", "norm.weight", "conv1d.bias", "backbone.norm_f.weight"),
        *(f"backbone.layers.{n}.norm.weight" for n in range(2)),
    }


# --- checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": False, "groups": 2, "dt_limit": (0.001, 0.2)}])
def test_round_trip(changes: dict[str, Any], tmp_path: Path) -> None:
    model = LanguageModel(config(**changes), torch.Generator().manual_seed(1))
    save_model(model, tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert detect_format(tmp_path / "model") == "farstate"
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    assert (again.head_weight is again.backbone.embedding.weight) == model.config.tied_embeddings
    assert load_model(tmp_path / "model", dtype=torch.bfloat16).head_weight.dtype == torch.bfloat16


def write_mamba_ssm(folder: Path, model: LanguageModel, **changes: Any) -> None:
    data = {
        "d_model": 16,
        "d_intermediate": 0,
        "n_layer": 2,
        "vocab_size": VOCABULARY,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 6, "headdim": 8},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data | changes))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def test_mamba_ssm_checkpoints_load_by_identity(tmp_path: Path) -> None:
    model = LanguageModel(config(), torch.Generator().manual_seed(1))
    write_mamba_ssm(tmp_path, model)
    again = load_model(tmp_path)
    assert detect_format(tmp_path) == "mamba-ssm"
    assert again.config.padded_vocabulary == 64
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_bad_checkpoints_are_explained_in_a_line(tmp_path: Path) -> None:
    model = LanguageModel(config())
    folder = tmp_path / "model"

    def refused(match: str) -> None:
        with pytest.raises(FarstateError, match=match) as caught:
            load_model(folder)
        assert "\n" not in str(caught.value)

    refused("no such folder")
    folder.mkdir()
    refused(r"config\.json: no such file")
    (folder / "config.json").write_text("{")
    refused("not JSON")
    (folder / "config.json").write_text('{"something": 1}')
    refused("not a configuration")
    (folder / "config.json").write_text('{"architecture": "mamba3"}')
    refused("unknown architecture 'mamba3' .did you mean 'mamba2'")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    refused("unknown architecture 'llama'")
    (folder / "config.json").write_text('{"model_type": "mamba2", "hidden_size": 12}')
    refused("hidden_size × expand = 24 must be a multiple of head_dim = 64")

    save_model(model, folder)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refused(r"model\.safetensors: damaged or truncated")
    weights.unlink()
    refused("no model.safetensors in it")
    save_model(LanguageModel(config(layers=1)), tmp_path / "other")
    weights.write_bytes((tmp_path / "other/model.safetensors").read_bytes())
    refused("written for another configuration")
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"width": "wide"}))
    refused("width: ")
    weights.unlink()

    tensors = model.state_dict()
    write_mamba_ssm(folder, model, ssm_cfg={"layer": "Mamba3"})
    refused("unknown architecture 'Mamba3'")
    write_mamba_ssm(folder, model, ssm_cfg={"layer": "Mamba2", "D_has_hdim": True})
    refused("only D_has_hdim = False")
    write_mamba_ssm(folder, model, n_layer=1)
    refused("unexpected backbone.layers.1")
    write_mamba_ssm(folder, model, n_layer=3)
    refused("missing backbone.layers.2")
    write_mamba_ssm(folder, model)
    torch.save(tensors | {"backbone.norm_f.weight": torch.ones(3)}, folder / "pytorch_model.bin")
    refused(r"wrong shape: backbone.norm_f.weight is \(3,\), expected \(16,\)")
    torch.save(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1.0}, folder / "pytorch_model.bin")
    refused("differ although the configuration ties them")
    torch.save({"model": model}, folder / "pytorch_model.bin")
    refused("holds more than tensors")
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing")
    refused("damaged")


# --- golden ----------------------------------------------------------------------------------------------


def golden_values() -> dict[str, Tensor]:
    model = LanguageModel(config(vocabulary_size=7, vocabulary_multiple=8, width=8, state_size=3), dtype=torch.float64)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(golden.ramp(*parameter.shape, phase=float(number), scale=0.7))
    ids = torch.tensor([[1, 5, 2, 0, 3, 3, 6], [4, 4, 1, 2, 0, 6, 5]])
    _, state = model(ids[:, :3])
    hidden, state = model(ids[:, 3:-1], state)
    nll = token_nll(hidden, model.head_weight, ids[:, 4:])
    loss = mean_nll(hidden, model.head_weight, ids[:, 4:], vocabulary_size=7)
    loss.backward()
    values = {
        "hidden": hidden,
        "nll": nll,
        "loss": loss,
        "recurrent": state.layers[1].recurrent,
        "conv": state.layers[1].auxiliary["conv"],
    }
    return values | {f"d {name}": p.grad.square().sum() for name, p in model.named_parameters() if p.grad is not None}


def test_golden() -> None:
    golden.check("models", golden_values())


def test_golden_of_the_initialisation() -> None:
    model = LanguageModel(config(width=8, vocabulary_size=16), torch.Generator().manual_seed(5))
    golden.check(
        "models",
        {name: value.sum() for name, value in model.state_dict().items()},
        path=golden.FOLDER / "models_initialisation.json",
    )


def test_golden_notices_a_change_of_a_millionth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARSTATE_UPDATE_GOLDEN", raising=False)
    values = golden_values()
    with pytest.raises(AssertionError, match=r"raise NUMERICS\['models'\]"):
        golden.check("models", values | {"hidden": values["hidden"] * (1.0 + 1e-6)})
