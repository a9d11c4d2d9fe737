"""What every registered architecture must do. A new one needs a line in `SHAPES`, and everything here holds it to the contract."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import model_checks
from farstate.models.checkpoints import load_model, save_model
from farstate.models.config import Config
from farstate.models.head import mean_nll
from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.state import State

SHAPES: dict[str, dict[str, Any]] = {
    "mamba1": {"state_size": 4},
    "mamba2": {"state_size": 6, "head_size": 8},
    "gla": {"heads": 2, "mlp_width": 24, "conv_width": 3},
    "rwkv6": {"heads": 2, "mix_rank": 3, "decay_rank": 5, "ffn_width": 24},
    "gated_deltanet": {"heads": 2, "mlp_width": 24},
    "hybrid": {"state_size": 6, "head_size": 8, "attention_every": 2, "attention_heads": 2, "attention_window": 7},
}
"""Small sizes of each, beside a width of 16 and two layers."""

VOCABULARY = 20
every = pytest.mark.parametrize("architecture", ARCHITECTURES)


pytestmark = pytest.mark.usefixtures("poisoned_memory")


def config(architecture: str) -> Config:
    assert architecture in SHAPES, f"give '{architecture}' a line in SHAPES of {__file__}"
    sizes = {"width": 16, "layers": 2, "vocabulary_size": VOCABULARY, **SHAPES[architecture]}
    return ARCHITECTURES[architecture].config(architecture=architecture, **sizes)


def tokens(batch: int, time: int, seed: int = 0) -> Tensor:
    return model_checks.tokens(VOCABULARY, batch, time, seed)


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, **model_checks.SPLIT)


# --- configuration, parameters ---------------------------------------------------------------------------


def test_shapes_are_read_without_torch() -> None:
    code = "import sys, farstate.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@every
def test_parameters_are_counted(architecture: str) -> None:
    model_checks.check_count(config(architecture))


@every
def test_initialisation_takes_its_generator_and_no_other(architecture: str) -> None:
    model_checks.check_initialisation(config(architecture))


@every
def test_decayed_or_not(architecture: str) -> None:
    """Every parameter is in one group; vectors and what the block names are not decayed."""
    model = LanguageModel(config(architecture))
    named = dict(model.named_parameters())
    decayed, kept = ({id(p) for p in group["params"]} for group in model.parameter_groups(0.1))
    assert not decayed & kept
    assert decayed | kept == {id(parameter) for parameter in named.values()}
    undecayed = {name for block in model.backbone.layers for name in block.undecayed}
    assert undecayed <= {name.rpartition(".")[2] for name in named}, "a name in `undecayed` that no parameter has"
    for name, parameter in named.items():
        assert (id(parameter) in kept) == (parameter.dim() < 2 or name.rpartition(".")[2] in undecayed), name


@every
def test_saved_and_loaded(architecture: str, tmp_path: Path) -> None:
    model = LanguageModel(config(architecture), torch.Generator().manual_seed(1)).eval()
    assert config_from_json(json.loads(json.dumps(model.config.model_dump(mode="json")))) == model.config
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(tokens(2, 9))[0], model(tokens(2, 9))[0])


def test_the_page_says_what_is_there() -> None:
    """docs/adding_an_architecture.md: the files it names exist, its example is valid, its lines stand where it says."""
    root = Path(__file__).parent.parent
    page = (root / "docs/adding_an_architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:src|tests|config|docs)/[\w/.]+)`", page):
        assert (root / name).exists(), name
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (model,) = yaml.safe_load(example)["models"].values()
    shape = ARCHITECTURES[model["architecture"]].shape(**model["shape"])
    assert shape.block_parameters(0) > 0
    (line,) = [line for line in page.splitlines() if line.strip().startswith('"gated_deltanet": ')]
    assert line in (root / "src/farstate/models/registry.py").read_text(encoding="utf-8")
    source = "\n".join(path.read_text(encoding="utf-8") for path in (*root.glob("src/farstate/**/*.py"), Path(__file__)))
    for name in re.findall(r"`(_?[A-Z]+[A-Z_]+)`", page):
        assert re.search(rf"^{name}\b", source, re.MULTILINE), name


# --- the carried state -----------------------------------------------------------------------------------


@every
@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(1, 18), max_size=5))
def test_any_split_is_the_whole(architecture: str, cuts: list[int]) -> None:
    _check_split(architecture, cuts)


@every
def test_token_by_token_is_the_whole(architecture: str) -> None:
    _check_split(architecture, list(range(1, 19)))


def _check_split(architecture: str, cuts: list[int]) -> None:
    model = model_checks.random_model(config(architecture))
    ids = tokens(2, 19)
    with torch.no_grad():
        whole, final = model(ids)
        state, parts = None, []
        for start, end in itertools.pairwise(sorted({0, 19, *cuts})):
            hidden, state = model(ids[:, start:end], state)
            parts.append(hidden)
    assert state is not None
    same(torch.cat(parts, dim=1), whole)
    model_checks.same_states(state, final)


@every
def test_none_is_the_zero_state(architecture: str) -> None:
    model = model_checks.random_model(config(architecture))
    zero = model.zero_state(2)
    assert all(tensor.dtype == torch.float64 and not tensor.any() for layer in zero.layers for tensor in layer.tensors())
    (hidden, state), (expected, final) = model(tokens(2, 9), zero), model(tokens(2, 9))
    same(hidden, expected)
    model_checks.same_states(state, final)
    single = model.float().zero_state(3)
    assert all(tensor.dtype == torch.float32 and len(tensor) == 3 for layer in single.layers for tensor in layer.tensors())
    _, final = model(tokens(2, 9))
    for mine, zeros in zip(final.layers, single.layers, strict=True):
        assert mine.recurrent.shape[1:] == zeros.recurrent.shape[1:]
        assert mine.auxiliary.keys() == zeros.auxiliary.keys()
        assert all(tensor.dtype == torch.float32 for tensor in mine.tensors())


@every
def test_gradients_flow_through_the_state_unless_detached(architecture: str) -> None:
    model_checks.check_gradients_through_the_state(config(architecture))


@every
def test_gradients_of_both_states(architecture: str) -> None:
    """Along a random direction of the initial state, of outputs and final state together, against a difference quotient."""
    model = model_checks.random_model(config(architecture))
    _, state = model(tokens(2, 6))

    def loss(initial: State) -> Tensor:
        generator = torch.Generator().manual_seed(6)
        hidden, final = model(tokens(2, 7, seed=1), initial)
        outputs = (hidden, *(tensor for layer in final.layers for tensor in layer.tensors()))
        return sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in outputs)

    def differentiated(given_state: State) -> dict[str, Tensor]:
        tensors = {}
        for number, layer in enumerate(given_state.layers):
            tensors |= {f"{number}.{name}": tensor for name, tensor in {"recurrent": layer.recurrent, **layer.auxiliary}.items()}
        # What is empty, and which entries of a cache are valid, is no number to differentiate by.
        return {name: tensor for name, tensor in tensors.items() if tensor.numel() and not name.endswith("valid")}

    leaves = state.map(lambda tensor: tensor.detach().clone().requires_grad_())
    inputs = differentiated(leaves)
    gradients = torch.autograd.grad(loss(leaves), list(inputs.values()))
    for name, gradient in zip(inputs, gradients, strict=True):
        assert gradient.abs().max() > 0.0, f"no gradient reaches {name}"
    generator = torch.Generator().manual_seed(5)
    directions = [torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) for tensor in inputs.values()]
    slope = sum((gradient * direction).sum() for gradient, direction in zip(gradients, directions, strict=True)).item()

    @torch.no_grad()
    def moved(size: float) -> float:
        moving = leaves.map(lambda tensor: tensor.detach().clone())
        for tensor, direction in zip(differentiated(moving).values(), directions, strict=True):
            tensor += size * direction
        return loss(moving).item()

    expected = (8 * (moved(1e-5) - moved(-1e-5)) - (moved(2e-5) - moved(-2e-5))) / 12e-5
    print(f"{architecture}: {slope:.9g}, difference quotient {expected:.9g}")
    assert slope == pytest.approx(expected, rel=1e-6)


@every
def test_states_are_rearranged_by_row(architecture: str, tmp_path: Path) -> None:
    """reset, select, permute, cat, save, load: each row goes on as if it were alone."""
    model = model_checks.random_model(config(architecture))
    first, second = tokens(3, 8), tokens(3, 5, seed=1)
    with torch.no_grad():
        _, state = model(first)
        expected, _ = model(second, state)
        fresh, _ = model(second)

        hidden, _ = model(second, state.reset(torch.tensor([False, True, False])))
        same(hidden[1], fresh[1])
        same(hidden[::2], expected[::2])
        same(model(second, state.reset(torch.tensor([True] * 3)))[0], fresh)
        same(model(second[[2, 0, 2]], state.select([2, 0, 2]))[0], expected[[2, 0, 2]])
        same(model(second[[1, 2, 0]], state.permute([1, 2, 0]))[0], expected[[1, 2, 0]])

        # Rows that have read more or less: their states are those of a batch all the same.
        _, shorter = model(first[1:, :3])
        joined = State.cat([state.select([0]), shorter, model.zero_state(1)])
        hidden, _ = model(tokens(4, 5, seed=2), joined)
        for row, alone in enumerate((state.select([0]), shorter.select([0]), shorter.select([1]), None)):
            same(hidden[row : row + 1], model(tokens(4, 5, seed=2)[row : row + 1], alone)[0])

        state.save(tmp_path / "state")
        same(model(second, State.load(tmp_path / "state"))[0], expected)


@every
def test_rows_do_not_meet_and_later_tokens_do_not_matter(architecture: str) -> None:
    model_checks.check_rows(config(architecture))
    model = model_checks.random_model(config(architecture))
    ids = tokens(2, 12)
    padded = torch.cat([ids[:, :7], torch.zeros_like(ids[:, 7:])], dim=1)
    with torch.no_grad():
        same(model(padded)[0][:, :7], model(ids)[0][:, :7])


# --- numbers ---------------------------------------------------------------------------------------------


@every
def test_backends_agree(architecture: str) -> None:
    model_checks.check_backends(config(architecture))


@every
def test_float32_is_close_to_float64(architecture: str) -> None:
    model = model_checks.random_model(config(architecture))
    ids = tokens(2, 40)
    with torch.no_grad():
        exact, exact_state = model(ids)
        rounded, state = model.float()(ids)
    error = model_checks.relative(rounded.double(), exact)
    print(f"{architecture}: hidden states differ by {error:.1e}")
    assert error <= 1e-4
    for mine, expected in zip(state.layers, exact_state.layers, strict=True):
        if mine.recurrent.numel():
            assert model_checks.relative(mine.recurrent.double(), expected.recurrent) <= 1e-4


@every
def test_autocast_is_close(architecture: str) -> None:
    model_checks.check_autocast(config(architecture))


@every
def test_training_lowers_the_loss(architecture: str) -> None:
    """A batch learned by heart in a few steps, the second half of each sequence from the state that the first led to."""
    model = LanguageModel(config(architecture))
    optimizer = torch.optim.AdamW(model.parameter_groups(0.01), lr=1e-2)
    ids = tokens(2, 17)
    losses = []
    for _ in range(12):
        _, state = model(ids[:, :8])
        hidden, _ = model(ids[:, 8:-1], state)
        loss = mean_nll(hidden, model.head_weight, ids[:, 9:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{architecture}: {losses[0]:.3f} → {losses[-1]:.3f}")
    assert losses[-1] < 0.9 * losses[0]
