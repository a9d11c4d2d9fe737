"""Official RWKV-6 files. No published one can be reached from here, so that what they mean is held against the official equations,
written out below one token and one head at a time under the official names, and through fla's own model.

What only a published file could show: that its tensors have the names, ranks and order of RWKV-LM's training code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model_checks
from farstate.errors import FarstateError
from farstate.models.checkpoints import detect_format, export, load_model, load_with_origin, save_model
from farstate.models.formats import blinkdl
from farstate.models.language_model import LanguageModel
from farstate.models.rwkv6.shape import RWKV6Config
from fla_oracle import oracle

VOCABULARY, WIDTH, LAYERS, HEAD, FFN, MIX, DECAY = 20, 16, 2, 8, 56, 3, 5
ATTENTION = WIDTH


def official_file(attention: int = ATTENTION, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights under the official names, in the official shapes."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"emb.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        for norm in ["ln1", "ln2"] + ["ln0"] * (layer == 0):
            shapes |= {f"blocks.{layer}.{norm}.{part}": (WIDTH,) for part in ("weight", "bias")}
        att, ffn = f"blocks.{layer}.att.", f"blocks.{layer}.ffn."
        shapes |= {f"{att}time_maa_{part}": (1, 1, WIDTH) for part in "xwkvrg"}
        shapes |= {f"{att}time_maa_w1": (WIDTH, 5 * MIX), f"{att}time_maa_w2": (5, MIX, WIDTH)}
        shapes |= {f"{att}time_decay": (1, 1, attention), f"{att}time_decay_w1": (WIDTH, DECAY)}
        shapes |= {f"{att}time_decay_w2": (DECAY, attention), f"{att}time_faaaa": (attention // HEAD, HEAD)}
        shapes |= {f"{att}{matrix}.weight": (attention, WIDTH) for matrix in ("receptance", "key", "value", "gate")}
        shapes |= {f"{att}output.weight": (WIDTH, attention), f"{att}ln_x.weight": (attention,), f"{att}ln_x.bias": (attention,)}
        shapes |= {f"{ffn}time_maa_{part}": (1, 1, WIDTH) for part in "kr"}
        shapes |= {
            f"{ffn}key.weight": (FFN, WIDTH),
            f"{ffn}receptance.weight": (WIDTH, WIDTH),
            f"{ffn}value.weight": (WIDTH, FFN),
        }
    shapes |= {"ln_out.weight": (WIDTH,), "ln_out.bias": (WIDTH,), "head.weight": (VOCABULARY, WIDTH)}
    return {name: (0.6 * torch.randn(shape, generator=generator)).to(dtype) for name, shape in shapes.items()}


def official_logits(w: dict[str, Tensor], tokens: list[int], ln_x_epsilon: float = 64e-5) -> Tensor:
    """RWKV-6 (arXiv 2404.05892, §4.2; RWKV-LM's names), one sequence, in float64: (T, V)."""
    w = {name: tensor.double() for name, tensor in w.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    heads = w["blocks.0.att.time_faaaa"].shape[0]
    before = [{"att": torch.zeros(WIDTH).double(), "ffn": torch.zeros(WIDTH).double()} for _ in range(LAYERS)]
    states = [[torch.zeros(HEAD, HEAD).double() for _ in range(heads)] for _ in range(LAYERS)]
    rows = []
    for token in tokens:
        x = norm(w["emb.weight"][token], "blocks.0.ln0")
        for layer in range(LAYERS):
            b = f"blocks.{layer}"
            now = norm(x, f"{b}.ln1")
            change, before[layer]["att"] = before[layer]["att"] - now, now
            parts = torch.tanh((now + change * w[f"{b}.att.time_maa_x"].flatten()) @ w[f"{b}.att.time_maa_w1"]).chunk(5)
            mixed = {}
            for number, name in enumerate("wkvrg"):
                amount = w[f"{b}.att.time_maa_{name}"].flatten() + parts[number] @ w[f"{b}.att.time_maa_w2"][number]
                mixed[name] = now + change * amount
            exponent = torch.tanh(mixed["w"] @ w[f"{b}.att.time_decay_w1"]) @ w[f"{b}.att.time_decay_w2"]
            decay = torch.exp(-torch.exp(w[f"{b}.att.time_decay"].flatten() + exponent))
            r, k, v, g = (
                w[f"{b}.att.{matrix}.weight"] @ mixed[name]
                for matrix, name in (("receptance", "r"), ("key", "k"), ("value", "v"), ("gate", "g"))
            )
            outputs = []
            for head in range(heads):
                part = slice(head * HEAD, (head + 1) * HEAD)
                written = torch.outer(k[part], v[part])
                read = states[layer][head] + w[f"{b}.att.time_faaaa"][head][:, None] * written
                states[layer][head] = decay[part][:, None] * states[layer][head] + written
                out = r[part] @ read
                outputs.append((out - out.mean()) / torch.sqrt(out.var(unbiased=False) + ln_x_epsilon))
            out = torch.cat(outputs) * w[f"{b}.att.ln_x.weight"] + w[f"{b}.att.ln_x.bias"]
            x = x + w[f"{b}.att.output.weight"] @ (out * F.silu(g))

            now = norm(x, f"{b}.ln2")
            change, before[layer]["ffn"] = before[layer]["ffn"] - now, now
            key = torch.relu(w[f"{b}.ffn.key.weight"] @ (now + change * w[f"{b}.ffn.time_maa_k"].flatten())) ** 2
            receptance = w[f"{b}.ffn.receptance.weight"] @ (now + change * w[f"{b}.ffn.time_maa_r"].flatten())
            x = x + torch.sigmoid(receptance) * (w[f"{b}.ffn.value.weight"] @ key)
        rows.append(w["head.weight"] @ norm(x, "ln_out"))
    return torch.stack(rows)


def logits(model: LanguageModel, tokens: list[int], cut: int) -> Tensor:
    ids = torch.tensor([tokens])
    with torch.no_grad():
        first, state = model(ids[:, :cut])
        second, _ = model(ids[:, cut:], state)
        return (torch.cat([first, second], dim=1) @ model.head_weight.t())[0]


TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 19, 0, 7]


@pytest.mark.parametrize("attention", [WIDTH, 2 * WIDTH])
def test_official_equations_agree(attention: int, tmp_path: Path) -> None:
    weights = official_file(attention)
    torch.save(weights, tmp_path / "rwkv.pth")
    model = load_model(tmp_path / "rwkv.pth", dtype=torch.float64)
    assert isinstance(model.config, RWKV6Config)
    assert (model.config.heads, model.config.key_size, model.config.value_size) == (attention // HEAD, HEAD, HEAD)
    assert (model.config.mix_rank, model.config.decay_rank, model.config.inner_ffn_width) == (MIX, DECAY, FFN)
    error = model_checks.relative(logits(model, TOKENS, 4), official_logits(weights, TOKENS))
    print(f"official equations: logits differ by {error:.1e}")
    assert error <= 1e-10
    # Every tensor matters within four tokens, so that none could be misread unseen.
    few = official_logits(weights, TOKENS[:4])
    for name, tensor in weights.items():
        changed = weights | {name: tensor + 0.1 * torch.sin(torch.arange(tensor.numel())).view_as(tensor)}
        assert model_checks.relative(official_logits(changed, TOKENS[:4]), few) > 1e-6, name


def test_fla_agrees_with_the_official_equations(tmp_path: Path) -> None:
    """Through our names into fla's model, which has one ε for all norms."""
    weights = official_file()
    torch.save(weights, tmp_path / "rwkv.pth")
    model = load_model(tmp_path / "rwkv.pth")
    same = LanguageModel(model.config.model_copy(update={"group_norm_epsilon": 1e-5}))
    same.load_state_dict(model.state_dict())
    save_model(same, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "fla", "fla")
    theirs = oracle().load(tmp_path / "fla", torch.tensor([TOKENS]))
    assert theirs["problems"] == []
    assert model_checks.relative(theirs["logits"][0].double(), official_logits(weights, TOKENS, 1e-5)) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = official_file(dtype=dtype)
    # As in the published files, where some tensors were kept in another precision.
    weights["blocks.1.att.time_faaaa"] = weights["blocks.1.att.time_faaaa"].float()
    source = tmp_path / "RWKV-x060.pth"
    torch.save(weights, source)
    assert detect_format(source) == "blinkdl"
    _, origin = load_with_origin(source)
    assert (origin["format"], origin["file"]) == ("blinkdl", source.name)
    export(source, tmp_path / "written")
    assert detect_format(tmp_path / "written") == "blinkdl"
    again = torch.load(tmp_path / "written" / source.name, weights_only=True)
    assert again.keys() == weights.keys()
    for name, tensor in weights.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor), name
        assert again[name].untyped_storage().nbytes() == tensor.nbytes, f"{name} drags more than itself along"
    # By way of our own format, as after an import.
    model, origin = load_with_origin(source)
    save_model(model, tmp_path / "ours", origin)
    export(tmp_path / "ours", tmp_path / "back")
    back = torch.load(tmp_path / "back" / source.name, weights_only=True)
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in weights.items())


def test_a_model_trained_here_becomes_an_official_file(tmp_path: Path) -> None:
    config = RWKV6Config(vocabulary_size=VOCABULARY, width=WIDTH, layers=LAYERS, heads=2, mix_rank=MIX, decay_rank=DECAY)
    model = model_checks.random_model(config).float()
    save_model(model, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "official", "blinkdl")
    weights = torch.load(tmp_path / "official/rwkv6.pth", weights_only=True)
    shapes = {name: tensor.shape for name, tensor in official_file().items()}
    # The vocabulary is padded, and the channel mix has its default width.
    assert {name for name, tensor in weights.items() if tensor.shape != shapes[name]} == {
        *("emb.weight", "head.weight"),
        *(f"blocks.{layer}.ffn.{name}.weight" for layer in range(LAYERS) for name in ("key", "value")),
    }
    error = model_checks.relative(logits(model.double(), TOKENS, 3), official_logits(weights, TOKENS))
    assert error <= 1e-10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_norm_epsilon": 1e-5}, "cannot express group_norm_epsilon = 1e-05, only 0.00064"),
        ({"tied_embeddings": True}, "tied_embeddings = True, only False"),
        ({"norm_first": False}, "norm_first = False"),
        ({"expand_v": 2.0}, "expand_v = 2.0, only 1.0"),
    ],
)
def test_what_official_files_cannot_say_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    config = RWKV6Config.model_validate({"vocabulary_size": VOCABULARY, "width": 16, "layers": 1, "heads": 2, **changes})
    save_model(LanguageModel(config), tmp_path / "ours")
    with pytest.raises(FarstateError, match=message):
        export(tmp_path / "ours", tmp_path / "official", "blinkdl")


def test_bad_files_are_explained_in_a_line(tmp_path: Path) -> None:
    weights = official_file()
    path = tmp_path / "rwkv.pth"

    def refused(match: str) -> None:
        with pytest.raises(FarstateError, match=match) as caught:
            load_model(path)
        assert "\n" not in str(caught.value)

    def without(name: str) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in weights.items() if key != name}

    torch.save(without("blocks.1.att.time_decay_w2"), path)
    refused("missing blocks.1.att.time_decay_w2")
    torch.save(without("blocks.0.att.time_faaaa"), path)
    refused("missing blocks.0.att.time_faaaa")
    torch.save(weights | {"blocks.1.att.time_first": torch.zeros(2)}, path)
    refused("unexpected blocks.1.att.time_first")
    torch.save(weights | {"blocks.987654321.att.time_first": torch.zeros(2)}, path)
    refused("missing blocks.2.ln1.weight, .*; unexpected blocks.987654321.att.time_first")
    torch.save(weights | {"blocks.1.att.time_maa_w2": torch.zeros(5, WIDTH, MIX)}, path)
    refused(r"wrong shape: blocks.1.att.time_maa_w2 is \(5, 16, 3\), expected \(5, 3, 16\)")
    torch.save(weights | {"blocks.0.att.time_maa_x": torch.zeros(WIDTH)}, path)
    refused(r"wrong shape: blocks.0.att.time_maa_x is \(16,\), expected \(1, 1, 16\)")
    torch.save(weights | {"emb.weight": torch.zeros(4)}, path)
    refused(r"wrong shape: emb.weight is \(4,\), expected 2 dimensions")
    torch.save(weights | {"head.weight": torch.zeros(VOCABULARY, WIDTH, dtype=torch.int8)}, path)
    refused("not floating point: head.weight")
    torch.save({"emb.weight": weights["emb.weight"], "blocks.0.att.x_r": torch.zeros(1, 1, WIDTH)}, path)
    refused("not an RWKV-6 model, the only one that is read: .*looks like RWKV-7")
    torch.save({"blocks.0.att.time_mix_k": torch.zeros(1, 1, WIDTH)}, path)
    refused("looks like RWKV-4")
    torch.save({"epoch": 3}, path)
    refused("not a dictionary of tensors")
    torch.save(weights | {"code": Path("x")}, path)
    refused("holds more than tensors")
    torch.save(weights, path)
    path.write_bytes(path.read_bytes()[:5000])
    refused("damaged or truncated")
    path.unlink()
    refused("no such")


def test_a_folder_with_two_files_is_ambiguous(tmp_path: Path) -> None:
    torch.save(official_file(), tmp_path / "a.pth")
    assert detect_format(tmp_path) == "blinkdl"
    assert load_model(tmp_path).config.layers == LAYERS
    torch.save(official_file(), tmp_path / "b.pth")
    assert not blinkdl.detects(tmp_path)
    with pytest.raises(FarstateError, match=r"holds 2 \.pth files and no config\.json; name one of them: .*a\.pth"):
        load_model(tmp_path)
    assert load_model(tmp_path / "b.pth").config.layers == LAYERS
