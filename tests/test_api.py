"""What notebooks import: names, the example of the docs, models of transformers, fla and one's own."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import farstate
from farstate.models.mamba2.shape import Mamba2Config
from farstate.params import ARMS
from fla_oracle import oracle

VOCABULARY = 20
ROOT = Path(__file__).parents[1]


def ids(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def small(seed: int = 0, **shape: Any) -> farstate.LanguageModel:
    config = Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=VOCABULARY, **shape)
    return farstate.LanguageModel(config, torch.Generator().manual_seed(seed))


def entries(state: farstate.State) -> Tensor:
    """(B, all entries), recurrent and auxiliary."""
    return torch.cat([tensor.flatten(1) for layer in state.layers for tensor in layer.tensors()], dim=1)


# --- names -----------------------------------------------------------------------------------------------


def test_importing_the_package_loads_nothing():
    code = "import sys, farstate; dir(farstate); print(sorted({'torch', 'polars', 'pydantic', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_every_public_name_is_there_and_explained():
    for name in farstate.__all__:
        assert getattr(farstate, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'StatePasing'"):
        farstate.StatePasing  # noqa: B018


# --- the page of the docs --------------------------------------------------------------------------------

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"<!-- the example -->\n```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_table_of_names_is_complete():
    table = PAGE[PAGE.index("## Names") :]
    named = [name for cell in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)", cell)]
    assert sorted(named) == sorted(farstate.__all__)


class Watched:
    """A model that keeps what it was given and what it returned."""

    def __init__(self, model: farstate.LanguageModel) -> None:
        self.model, self.given, self.final = model, [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, state: farstate.State | None = None) -> tuple[Tensor, farstate.State]:
        assert state is None or not any(tensor.requires_grad for layer in state.layers for tensor in layer.tensors())
        hidden, final = self.model(tokens, state)
        self.given.append(self.model.zero_state(len(tokens)) if state is None else state)
        self.final.append(final)
        return hidden, final


def run_example(code: str) -> Watched:
    watched = Watched(small())
    text = ids(1, 33 * 8 * 30).view(30, 8, 33)
    optimizer = torch.optim.AdamW(watched.model.parameters(), lr=2e-3)
    exec(code, {"farstate": farstate, "model": watched, "batch_of": text.__getitem__, "optimizer": optimizer})
    return watched


def test_the_example_of_the_page_is_short_and_passes_states():
    assert EXAMPLE is not None
    code = EXAMPLE[1]
    lines = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) <= 10
    assert "reset_probability=0.1" in code
    watched = run_example(code)
    assert len(watched.given) == 30
    assert not entries(watched.given[0]).any()
    resets = 0
    for before, given in zip(watched.final, watched.given[1:], strict=False):
        for row, (was, now) in enumerate(zip(entries(before), entries(given), strict=True)):
            assert torch.equal(now, was) or not now.any(), row
            assert was.any()
            resets += not now.any()
    # Of 232 draws with probability 0.1; the seed is fixed.
    assert 8 <= resets <= 42

    always = run_example(code.replace("reset_probability=0.1", "reset_probability=1.0"))
    control = run_example(code.replace("StatePassing(run, reset_probability=0.1)", "ZeroInit(run)"))
    moved = False
    for mine, zero, passed in zip(*(each.model.parameters() for each in (always, control, watched)), strict=True):
        assert torch.equal(mine, zero)
        moved |= not torch.equal(zero, passed)
    assert moved


def test_every_arm_of_the_page_takes_the_place_of_the_example():
    code = re.search(r"^arms = \[\n.*?^\]$", PAGE, re.DOTALL | re.MULTILINE)
    assert code is not None
    model = small()
    names: dict[str, Any] = {"farstate": farstate, "run": farstate.Run.of(model, rows=4, context=8)}
    exec(code[0], names)
    assert {type(arm).__name__ for arm in names["arms"]} == set(farstate.__all__) & {
        each.intervention.partition(":")[2] for each in ARMS.values()
    }
    for arm in names["arms"]:
        for step in range(2):
            tokens = ids(4, 9, seed=step)
            _, final = model(tokens[:, :-1], arm.initial(step, farstate.Windows(tokens, torch.zeros(4, dtype=torch.bool))))
            arm.observe(final)


def test_the_script_shows_what_state_passing_is_for(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(ROOT / "examples" / "state_passing.py"), run_name="__main__")
    lines = {
        line[:16].strip(): [float(value) for value in line[16:].split()] for line in capsys.readouterr().out.splitlines()[1:]
    }
    print(lines)
    # In 32 tokens all are alike; at 2,048, of 64 times the training length, only the states that were met in training do.
    assert lines["state passing"][2] < 0.6 * min(lines["control"][2], lines["base"][2])
    assert max(values[0] for values in lines.values()) < 1.2 * min(values[0] for values in lines.values())


# --- carrying, measuring, saving -------------------------------------------------------------------------


def test_nll_is_that_of_the_whole_in_any_segments():
    model = small().double()
    text = ids(3, 41)
    with torch.no_grad():
        hidden, _ = model(text[:, :-1])
        logits = hidden @ model.head_weight.T
    expected = F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").numpy()
    for segment in (1, 7, 1024):
        np.testing.assert_allclose(farstate.nll(model, text, segment_tokens=segment), expected, rtol=1e-9)
    np.testing.assert_allclose(farstate.perplexity_by_position(model, text), np.exp(expected.mean(0)), rtol=1e-9)
    real = F.cross_entropy(logits[..., :VOCABULARY].transpose(1, 2), text[:, 1:], reduction="none").numpy()
    np.testing.assert_allclose(farstate.nll(model, text, vocabulary_size=VOCABULARY), real, rtol=1e-9)


def test_effective_remembrance_is_the_distance_of_two_predictions():
    model = small().double()
    text = ids(2, 20)
    found = farstate.effective_remembrance(model, text, starts=[0, 5, 19])
    with torch.no_grad():
        whole, *others = (torch.softmax(model(text[:, t:])[0][:, -1] @ model.head_weight.T, -1) for t in (0, 5, 19))
    assert found.starts.tolist() == [0, 5, 19]
    assert not found.total_variation[:, 0].any()
    for place, other in enumerate(others, start=1):
        np.testing.assert_allclose(found.total_variation[:, place], 0.5 * (whole - other).abs().sum(-1).numpy(), rtol=1e-6)
        np.testing.assert_allclose(found.cosine_distance[:, place], (1 - F.cosine_similarity(whole, other)).numpy(), atol=1e-9)
    last = farstate.effective_remembrance(model, text, starts=[0, 5, 19], last=4)
    assert np.isnan(last.total_variation[:, 2]).all()
    assert np.isfinite(last.total_variation[:, :2]).all()
    assert farstate.effective_remembrance(model, text).starts[-1] == 19


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (torch.zeros(5, dtype=torch.int64), r"found \(5,\)"),
        (torch.zeros(2, 5), "float32"),
        (torch.full((1, 4), 99), "99 do not lie in the model's vocabulary"),
        (torch.full((1, 4), -1), "-1 … -1 do not lie"),
    ],
)
def test_tokens_that_are_none_are_refused(text: Tensor, message: str):
    with pytest.raises(farstate.FarstateError, match=message):
        farstate.nll(small(), text)


def test_save_goes_back_to_the_source_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, text = small(), ids(2, 9)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "tokenizer.json").write_text("of something else")
    monkeypatch.chdir(tmp_path / "here")
    own = farstate.save(model, tmp_path / "own")
    assert (own.format, own.beside) == ("farstate", [])
    assert farstate.save(model, tmp_path / "theirs", format="transformers").format == "transformers"
    (tmp_path / "theirs" / "tokenizer.json").write_text("{}")
    loaded = farstate.load(tmp_path / "theirs")
    with torch.no_grad():
        loaded.head_weight.mul_(1.5)
    done = farstate.save(loaded, tmp_path / "back")
    assert (done.format, done.dtype, done.beside, done.absent) == ("transformers", "float32", ["tokenizer.json"], [])
    again = farstate.load(tmp_path / "back", dtype=torch.float64)
    assert again.head_weight.dtype == torch.float64
    assert not again.training
    np.testing.assert_allclose(farstate.nll(again, text), farstate.nll(loaded, text), rtol=1e-4)
    assert not np.allclose(farstate.nll(again, text), farstate.nll(model, text), rtol=1e-4)
    with pytest.raises(farstate.FarstateError, match="already there"):
        farstate.save(loaded, tmp_path / "back")
    with pytest.raises(farstate.FarstateError, match="has no architecture 'mamba2'"):
        farstate.save(loaded, tmp_path / "new", format="blinkdl")
    with pytest.raises(farstate.FarstateError, match=r"^format: 'transformer' is unknown .did you mean 'transformers'"):
        farstate.save(loaded, tmp_path / "new", format="transformer")
    with pytest.raises(farstate.FarstateError, match=r"^dtype: 'int8' is unknown"):
        farstate.save(loaded, tmp_path / "new", dtype="int8")
    assert not (tmp_path / "new").exists()


# --- interventions in a loop of one's own ----------------------------------------------------------------


def train(model: Any, intervention: farstate.Intervention, steps: int, rows: int, context: int) -> list[farstate.State | None]:
    """Plain gradient descent; the states that were handed out."""
    given = []
    for step in range(steps):
        text = ids(rows, context + 1, seed=step)
        state = intervention.initial(step)
        given.append(state)
        hidden, final = model(text[:, :-1], state)
        farstate.mean_nll(hidden, model.head_weight, text[:, 1:]).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        intervention.observe(final)
    return given


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("StatePassing", {"reset_probability": 1.5}, r"state_passing.reset_probability: .*less than or equal to 1 \(found 1.5\)"),
        ("StatePassing", {"reset_unit": "row"}, "state_passing.reset_unit: .*'sequence' or 'batch'"),
        ("RandomNoise", {"sigma": -1.0}, "random_noise.sigma: .*greater than 0"),
        ("Gaussian", {"scope": "layer"}, "gaussian.scope: .*'joint' or 'head'"),
    ],
)
def test_options_are_held_to_what_the_parameters_allow(name: str, options: dict[str, Any], message: str):
    with pytest.raises(farstate.FarstateError, match=message):
        getattr(farstate, name)(farstate.Run.of(small(), rows=4, context=8), **options)


def test_a_run_and_its_states_must_fit():
    model = small()
    with pytest.raises(farstate.FarstateError, match="rows a multiple of micro_batches"):
        farstate.Run.of(model, rows=4, context=8, micro_batches=3)
    for kind in (farstate.StatePassing, farstate.FittedNoise, farstate.Permuted):
        with pytest.raises(ValueError, match="3 rows in a run whose micro-batches have 4"):
            kind(farstate.Run.of(model, rows=4, context=8)).observe(model.zero_state(3))
    tbtt = farstate.TruncatedBackpropagation(farstate.Run.of(model, rows=4, context=8))
    tbtt.observe(model.zero_state(4).map(lambda tensor: tensor + 1.0))
    with pytest.raises(farstate.FarstateError, match=r"farstate.Windows\(tokens, fresh\)"):
        tbtt.initial(1)
    fresh = torch.tensor([True, False, False, True])
    state = tbtt.initial(1, farstate.Windows(ids(4, 9), fresh))
    assert (entries(state) == 0).all(1).tolist() == fresh.tolist()


# --- a module of one's own -------------------------------------------------------------------------------


class TwoGRUs(nn.Module):
    """Someone's model: torch's GRU, whose state has the batch at dimension 1, beside cells that keep a dictionary."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.nested = nested
        self.gru = nn.GRU(12, 12, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(12, 12)

    @property
    def head_weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, tokens: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        x = self.embedding(tokens)
        if not self.nested:
            return self.gru(x, state)
        h = x.new_zeros(len(x), 12) if state is None else state["cells"][0]
        seen = x.new_zeros(len(x)) if state is None else state["seen"]
        out = []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            out.append(h)
        return torch.stack(out, dim=1), {"cells": [h], "seen": seen + x.shape[1]}


@pytest.mark.parametrize("nested", [False, True])
def test_states_of_a_module_of_ones_own_are_passed(nested: bool):
    module = TwoGRUs(nested)
    model = farstate.adapt(module, batch_dimension=0 if nested else 1)
    text = ids(3, 17)
    with torch.no_grad():
        whole, final = model(text)
        first, state = model(text[:, :6])
        second, after = model(text[:, 6:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(entries(after), entries(final))
    assert final.batch_size == 3
    assert model.zero_state(5).batch_size == 5
    np.testing.assert_allclose(farstate.nll(model, text, segment_tokens=4), farstate.nll(model, text), rtol=1e-5)

    passing = farstate.StatePassing(farstate.Run.of(model, rows=3, context=8), reset_probability=0.5)
    given = train(model, passing, 6, 3, 8)
    assert given[0] is None
    rows = torch.cat([entries(state) for state in given[1:] if state is not None])
    assert 0 < (rows == 0).all(1).sum() < len(rows)
    noise = farstate.RandomNoise(farstate.Run.of(model, rows=3, context=8), sigma=0.5)
    assert all(state is not None and entries(state).any(1).all() for state in train(model, noise, 2, 3, 8))


def test_a_nest_of_tensors_there_and_back():
    nest = {"h": torch.randn(2, 3, 4), "more": [torch.randn(2), (torch.randn(2, 5),)]}
    state = farstate.State.from_tensors(nest)
    assert [tuple(layer.recurrent.shape) for layer in state.layers] == [(2, 3, 4), (2, 1, 1), (2, 1, 5)]
    back = state.select([1, 0, 1]).to_tensors(nest)
    assert torch.equal(back["more"][1][0], nest["more"][1][0][[1, 0, 1]])
    assert back["more"][0].shape == (3,)
    gru = torch.randn(2, 7, 12)
    packed = farstate.State.from_tensors((gru,), batch_dimension=1)
    assert packed.batch_size == 7
    assert torch.equal(packed.to_tensors((gru,), batch_dimension=1)[0], gru)
    for wrong, message in [([torch.zeros(2, dtype=torch.int64)], "int64"), ([3], "is int"), ([], "without tensors")]:
        with pytest.raises(farstate.FarstateError, match=message):
            farstate.State.from_tensors(wrong)


def test_a_module_without_the_contract_is_told_so():
    with pytest.raises(farstate.FarstateError, match=r"Alone: returned Tensor; .* module\(tokens, state\)"):
        farstate.adapt(Alone())(torch.zeros(2, 3))
    with pytest.raises(farstate.FarstateError, match="TwoGRUs: call it once without a state"):
        farstate.adapt(TwoGRUs(True))(ids(2, 3), small().zero_state(2))
    with pytest.raises(farstate.FarstateError, match="Alone: give it a property head_weight"):
        farstate.nll(farstate.adapt(Alone()), ids(2, 3))
    with pytest.raises(farstate.FarstateError, match="call it once before its zero state"):
        farstate.adapt(TwoGRUs(True)).zero_state(2)


class Alone(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor, state: Any = None) -> Tensor:
        return super().forward(x)


# --- transformers' and fla's models ----------------------------------------------------------------------


def theirs(kind: str, dtype: torch.dtype, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shared = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 6, "num_hidden_layers": 2}
    if kind == "mamba2":
        shared |= {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shared | options))).to(dtype).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (0.2 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("mamba", {"tie_word_embeddings": True}),
        ("mamba", {"tie_word_embeddings": False, "use_bias": True}),
        ("mamba2", {"tie_word_embeddings": True}),
        ("mamba2", {"tie_word_embeddings": False, "n_groups": 2}),
    ],
)
def test_a_model_of_transformers_is_the_same_model(kind: str, options: dict[str, Any], tmp_path: Path):
    reference = theirs(kind, torch.float64, **options)
    text = ids(2, 13)
    before = reference(text).logits.detach()
    model = farstate.adapt(reference)
    assert isinstance(model, farstate.LanguageModel)
    assert not model.training
    mine, own = {id(p) for p in model.parameters()}, {id(p) for p in reference.parameters()}
    assert mine == own
    hidden, _ = model(text)
    # Their recurrence and norms compute in float32 whatever the model's dtype is.
    error = ((hidden @ model.head_weight.T - before).abs().max() / before.abs().max()).item()
    print(f"{kind}: logits differ by {error:.1e}")
    assert error < 1e-5

    # Training ours with states passed trains theirs, and theirs saves it.
    model.train()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    passing = farstate.StatePassing(farstate.Run.of(model, rows=2, context=12))
    for step in range(3):
        hidden, final = model(text[:, :-1], passing.initial(step))
        farstate.mean_nll(hidden, model.head_weight, text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        passing.observe(final)
    after = reference.eval()(text).logits.detach()
    assert (after - before).abs().max() > 0.01
    with torch.no_grad():
        hidden, _ = model(text)
    assert ((hidden @ model.head_weight.T - after).abs().max() / after.abs().max()).item() < 1e-5
    reference.save_pretrained(tmp_path / "hf")
    farstate.save(model, tmp_path / "saved")
    for folder in ("hf", "saved"):
        again = farstate.load(tmp_path / folder, dtype=torch.float64)
        assert torch.equal(again(text)[0], hidden), folder


def test_what_cannot_share_its_weights_is_refused():
    from transformers import AutoConfig, AutoModelForCausalLM

    gpt = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_layer=1, n_embd=8, n_head=2, vocab_size=VOCABULARY))
    with pytest.raises(
        farstate.FarstateError, match=r"GPT2LMHeadModel.config: unknown architecture 'gpt2'.*known: mamba, mamba2"
    ):
        farstate.adapt(gpt)
    other = theirs("mamba", torch.float32, hidden_act="relu")
    with pytest.raises(farstate.FarstateError, match=r"MambaForCausalLM.config: only hidden_act = 'silu'"):
        farstate.adapt(other)
    more = theirs("mamba2", torch.float32)
    more.backbone.layers[0].mixer.adapter = nn.Linear(2, 2)
    with pytest.raises(farstate.FarstateError, match=r"Mamba2ForCausalLM: unexpected backbone.layers.0.mixer.adapter.weight"):
        farstate.adapt(more)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gla", {"num_heads": 4, "num_kv_heads": 2, "use_short_conv": True, "intermediate_size": 24, "fuse_norm": False}),
        ("rwkv6", {"num_heads": 2, "proj_low_rank_dim": 3, "gate_low_rank_dim": 5}),
        ("mamba2", {"head_dim": 8, "state_size": 6}),
        ("gated_deltanet", {"head_dim": 8, "num_heads": 2, "intermediate_size": 24, "tie_word_embeddings": True}),
    ],
)
def test_a_model_of_fla_is_the_same_model(kind: str, options: dict[str, Any], tmp_path: Path):
    """In the process where fla is; its kernels are replaced there by its own references."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    found = oracle().adapt(tmp_path / "trained", kind, ids(2, 13), **sizes, **options)
    assert found["same"]
    for when in ("before", "after"):
        own, ours = found[when]
        error = ((ours - own).abs().max() / own.abs().max()).item()
        print(f"{kind}: logits {when} training differ by {error:.1e}")
        assert error < 1e-4
    assert (found["after"][0] - found["before"][0]).abs().max() > 0.01
    model = farstate.load(tmp_path / "trained")
    with torch.no_grad():
        hidden, _ = model(ids(2, 13))
    assert ((hidden @ model.head_weight.T - found["after"][0]).abs().max() / found["after"][0].abs().max()).item() < 1e-4


# --- how to add an intervention --------------------------------------------------------------------------

ADDED = """
import sys, yaml
from pathlib import Path
from farstate import params
config = yaml.safe_load(Path("params.yaml").read_text())
change = yaml.safe_load(Path("change.yaml").read_text())
config["posttrain"]["arms"] |= change["posttrain"]["arms"]
config["figures"]["fig5"]["arms"] = change["figures"]["fig5"]["arms"]
Path("params.yaml").write_text(yaml.safe_dump(config))
loaded = params.load(Path("params.yaml"))
assert loaded.posttrain.arms["halved"].factor == 0.5
assert "torch" not in sys.modules
import torch, farstate
from farstate.models.mamba2.shape import Mamba2Config
from farstate.training.initial_states import build
model = farstate.LanguageModel(Mamba2Config(width=16, layers=2, state_size=8, head_size=8, vocabulary_size=20))
run = farstate.Run.of(model, rows=4, context=8)
halved, plain = build(loaded.posttrain.arms["halved"], run), farstate.StatePassing(run)
_, final = model(torch.arange(4)[:, None].expand(4, 8))
for each in (halved, plain):
    assert each.initial(0) is None
    each.observe(final)
given, expected = halved.initial(1), plain.initial(1)
for layer in range(2):
    assert torch.equal(given.entries(layer), 0.5 * expected.entries(layer))
    assert torch.equal(given.layers[layer].auxiliary["conv"], expected.layers[layer].auxiliary["conv"])
    assert given.entries(layer).any()
from farstate.training.scaled import ScaledPassing
try:
    ScaledPassing(run, factor=-1.0)
except farstate.FarstateError as error:
    print(error)
"""


def test_the_page_on_interventions_adds_one(tmp_path: Path):
    """A copy of the package after the page was followed to the letter."""
    page = (ROOT / "docs" / "adding_an_intervention.md").read_text(encoding="utf-8")
    file, line, listed = re.findall(r"```python no-run\n(.*?)```", page, re.DOTALL)
    (change,) = re.findall(r"```yaml no-run\n(.*?)```", page, re.DOTALL)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "src/farstate/training/scaled.py").write_text(file)
    parameters = tmp_path / "src/farstate/params.py"
    before = parameters.read_text()
    last = before.index('    "permuted": Registered(')
    parameters.write_text(before[:last] + line + before[last:])
    (tmp_path / "change.yaml").write_text(change)
    shutil.copy(ROOT / "config/test.yaml", tmp_path / "params.yaml")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    done = subprocess.run(
        [sys.executable, "-c", ADDED], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "scaled_passing.factor: input should be greater than 0 (found -1.0)\n"
    assert '"initial_state": "scaled_passing"' in listed
