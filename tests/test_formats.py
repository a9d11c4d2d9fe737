"""Checkpoints of transformers and mamba-ssm, made and loaded by the real libraries, and what is said of bad ones."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

import mamba_ssm_oracle
from farstate.errors import FarstateError
from farstate.models.checkpoints import detect_format, export, load_model, load_with_origin, save_model
from farstate.models.formats import FORMATS, files
from farstate.models.head import mean_nll

# Largest difference from the oracle, relative to the largest magnitude: float32 on both sides.
TOLERANCE = 1e-4
VOCABULARY = 50
TOKENS = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))

TRANSFORMERS = [
    pytest.param("mamba", {"tie_word_embeddings": True}, id="mamba1-tied"),
    pytest.param("mamba", {"tie_word_embeddings": False, "use_bias": True}, id="mamba1-untied"),
    pytest.param("mamba2", {"tie_word_embeddings": True, "time_step_limit": (0.01, 0.3)}, id="mamba2-tied"),
    pytest.param("mamba2", {"tie_word_embeddings": False, "n_groups": 2, "use_conv_bias": False}, id="mamba2-untied"),
]
MAMBA_SSM = [
    pytest.param({"d_state": 5}, {"tie_embeddings": False}, id="mamba1"),
    pytest.param({}, {"residual_in_fp32": False}, id="mamba1-by-default"),
    pytest.param({"layer": "Mamba2", "d_state": 6, "headdim": 8, "ngroups": 2}, {}, id="mamba2"),
    pytest.param(
        {"layer": "Mamba2", "d_state": 6, "headdim": 8, "dt_limit": [0.01, 0.3], "bias": True},
        {"tie_embeddings": False},
        id="mamba2-untied",
    ),
]


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


# --- transformers ----------------------------------------------------------------------------------------


def transformers_model(kind: str, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    shared = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 6, "num_hidden_layers": 2}
    if kind == "mamba2":
        shared |= {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(shared | options))).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Away from the initialisation, where norms are one and biases zero and mistakes cancel.
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def load_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not [kind for kind, found in info.items() if len(found)], info
    return model.eval()


def save_transformers(model: Any, folder: Path, layout: str) -> None:
    """As `safetensors`, in `shards` of them, or as torch's `bin`, which earlier versions wrote."""
    model.save_pretrained(folder, max_shard_size="2KB" if layout == "shards" else "1GB")
    if layout == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize(("kind", "options"), TRANSFORMERS)
def test_transformers_reads_its_own_again(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    reference = transformers_model(kind, **options)
    logits = reference(TOKENS).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    for layout in ("safetensors", "shards", "bin"):
        save_transformers(reference, tmp_path / layout, layout)
        model, origin = load_with_origin(tmp_path / layout)
        assert detect_format(tmp_path / layout) == "transformers"
        assert ("weight_map" in origin["storage"]) == (layout == "shards")

        hidden, _ = model.train()(TOKENS)
        error = relative(hidden @ model.head_weight.t(), logits)
        print(f"{kind}: logits differ by {error:.1e}")
        assert error <= TOLERANCE
        mean_nll(hidden[:, :-1], model.head_weight, TOKENS[:, 1:]).backward()
        theirs = {name.replace("embeddings", "embedding"): p.grad for name, p in reference.named_parameters()}
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative(parameter.grad, theirs[name]) <= TOLERANCE, f"gradient of {name}"

        save_model(model, tmp_path / "ours" / layout, origin)
        done = export(tmp_path / "ours" / layout, tmp_path / "back" / layout)
        assert (done.format, done.dtype) == ("transformers", "float32")
        back, original = (json.loads((tmp_path / part / layout / "config.json").read_text()) for part in ("back", "."))
        assert back == original
        files_of = [{path.name for path in (tmp_path / part / layout).iterdir()} for part in ("back", ".")]
        assert files_of[0] == files_of[1] - {"generation_config.json"}
        again = load_transformers(tmp_path / "back" / layout)
        for name, tensor in reference.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
        assert torch.equal(again(TOKENS).logits, logits)


def test_a_hub_configuration_with_the_keys_of_both_libraries_is_transformers(tmp_path: Path) -> None:
    """The hub's mamba-*-hf carry mamba-ssm's `d_model`, `n_layer` and `ssm_cfg` along, and leave the tie unsaid."""
    save_transformers(transformers_model("mamba"), tmp_path, "safetensors")
    path = tmp_path / "config.json"
    data = json.loads(path.read_text()) | {"d_model": 16, "n_layer": 2, "ssm_cfg": {}, "rms_norm": True, "d_inner": 32}
    data.pop("tie_word_embeddings", None)
    path.write_text(json.dumps(data))
    assert detect_format(tmp_path) == "transformers"
    assert load_model(tmp_path).config.tied_embeddings


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_weights_come_back_narrow_unless_something_is_lost(dtype: torch.dtype, tmp_path: Path) -> None:
    reference = transformers_model("mamba2").to(dtype)
    reference.backbone.norm_f.float()
    save_transformers(reference, tmp_path / "theirs", "safetensors")
    model, origin = load_with_origin(tmp_path / "theirs")
    save_model(model, tmp_path / "ours", origin)
    name = str(dtype).removeprefix("torch.")
    assert export(tmp_path / "ours", tmp_path / "back").dtype == name
    stored = files.read_file(tmp_path / "back/model.safetensors")
    for key, tensor in files.read_file(tmp_path / "theirs/model.safetensors").items():
        assert stored[key].dtype == tensor.dtype
        assert torch.equal(stored[key], tensor)

    with torch.no_grad():
        model.backbone.layers[0].mixer.D += 1e-6
    save_model(model, tmp_path / "trained", origin)
    assert export(tmp_path / "trained", tmp_path / "wide").dtype == "float32"
    assert json.loads((tmp_path / "wide/config.json").read_text())["dtype"] == "float32"
    assert torch.equal(load_model(tmp_path / "wide").backbone.layers[0].mixer.D, model.backbone.layers[0].mixer.D)
    assert export(tmp_path / "trained", tmp_path / "forced", dtype=name).dtype == name
    assert load_transformers(tmp_path / "forced").dtype == dtype


# --- mamba-ssm -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layer", "options"), MAMBA_SSM)
def test_mamba_ssm_reads_its_own_again(layer: dict[str, Any], options: dict[str, Any], tmp_path: Path) -> None:
    given = {"d_model": 16, "n_layer": 2, "vocab_size": VOCABULARY, "ssm_cfg": layer, "pad_vocab_size_multiple": 16, **options}
    reference = mamba_ssm_oracle.oracle().make(tmp_path / "theirs", TOKENS, **given)
    model, origin = load_with_origin(tmp_path / "theirs")
    assert detect_format(tmp_path / "theirs") == "mamba-ssm"
    assert (model.config.vocabulary_size, model.config.padded_vocabulary) == (50, 64)
    hidden, _ = model.train()(TOKENS)
    error = relative(hidden @ model.head_weight.t(), reference["logits"])
    print(f"logits differ by {error:.1e}")
    assert error <= TOLERANCE
    mean_nll(hidden[:, :-1], model.head_weight, TOKENS[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert relative(parameter.grad, reference["gradients"][name]) <= TOLERANCE, f"gradient of {name}"

    save_model(model, tmp_path / "ours", origin)
    assert export(tmp_path / "ours", tmp_path / "back").format == "mamba-ssm"
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((tmp_path / "theirs/config.json").read_text())
    again = mamba_ssm_oracle.oracle().load(tmp_path / "back", TOKENS)
    assert again["tensors"].keys() == reference["tensors"].keys()
    for name, tensor in reference["tensors"].items():
        assert torch.equal(again["tensors"][name], tensor), name
    assert torch.equal(again["logits"], reference["logits"])

    # In transformers' words, and from there in mamba-ssm's again.
    export(tmp_path / "ours", tmp_path / "other", "transformers")
    assert relative(load_transformers(tmp_path / "other")(TOKENS).logits, reference["logits"]) <= TOLERANCE
    export(tmp_path / "other", tmp_path / "third", "mamba-ssm")
    assert torch.equal(mamba_ssm_oracle.oracle().load(tmp_path / "third", TOKENS)["logits"], reference["logits"])


def test_the_published_configuration_of_mamba1(tmp_path: Path) -> None:
    """An empty `ssm_cfg` and few keys, as in state-spaces/mamba-130m."""
    given = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True}
    from farstate.models.formats import mamba_ssm

    config = mamba_ssm.to_config(given | {"fused_add_norm": True, "pad_vocab_size_multiple": 8}, tmp_path)
    assert (config.architecture, config.padded_vocabulary, config.tied_embeddings) == ("mamba1", 50280, True)
    assert config.parameter_count() == 129_135_360


# --- what is wrong ---------------------------------------------------------------------------------------


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("good")
    save_transformers(transformers_model("mamba2"), root / "transformers", "shards")
    export(root / "transformers", root / "mamba-ssm", "mamba-ssm")
    return root


@pytest.fixture
def refused(good: Path, tmp_path: Path) -> Any:
    """`refused(format, change, match)`: a good folder, changed, is refused in one line that names a file of it."""
    import shutil

    def check(name: str, change: Any, match: str) -> None:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        folder = shutil.copytree(good / name, tmp_path / name)
        change(folder)
        with pytest.raises(FarstateError, match=match) as caught:
            load_model(folder)
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)

    return check


def configured(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ssm_cfg": {"layer": "Mamba3"}}, "unknown architecture 'Mamba3' .did you mean 'Mamba2'.*; known: Mamba1, Mamba2"),
        ({"ssm_cfg": "Mamba2"}, "ssm_cfg is 'Mamba2', an object"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "strange": 1}}, "ssm_cfg: 'strange' is not supported"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "D_has_hdim": True}}, "only D_has_hdim = False .* .found True"),
        (
            {"ssm_cfg": {"layer": "Mamba2", "headdim": 5}},
            "d_model × ssm_cfg.expand = 32 must be a multiple of ssm_cfg.headdim = 5",
        ),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": 8, "dt_limit": 3}}, "two numbers .found 3"),
        ({"attn_layer_idx": [1]}, r"attn_layer_idx = \[1\]: mamba-ssm's attention"),
        ({"d_intermediate": 64}, "only d_intermediate = 0"),
        ({"rms_norm": False}, "only rms_norm = True"),
        ({"d_model": "wide"}, "d_model: .*found 'wide'"),
        ({"vocab_size": 200}, r"wrong shape: backbone.embedding.weight is \(50, 16\), expected \(200, 16\)"),
        ({"n_layer": 3}, "missing backbone.layers.2.norm.weight, .* and 6 more"),
        ({"n_layer": 1}, "unexpected backbone.layers.1"),
        ({"ssm_cfg": {"layer": ["Mamba2"]}}, r"unknown architecture \['Mamba2'\]"),
        ({"tie_embeddings": "false"}, "tie_embeddings: .* boolean .found 'false'"),
        ({"ssm_cfg": {"layer": "Mamba2", "headdim": "8"}}, "ssm_cfg.headdim: .* integer .found '8'"),
    ],
)
def test_configurations_of_mamba_ssm_that_are_refused(changes: dict[str, Any], match: str, refused: Any) -> None:
    refused("mamba-ssm", configured(**changes), match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"model_type": "mambb"}, "unknown architecture 'mambb'"),
        ({"hidden_act": "gelu"}, "only hidden_act = 'silu'"),
        ({"hidden_size": None}, "hidden_size: .* integer .found None"),
        ({"hidden_size": "32"}, "hidden_size: .* integer .found '32'"),
        ({"hidden_size": [32]}, "hidden_size: .* integer .found"),
        ({"num_heads": "4"}, "num_heads: an integer up to 2147483648 is expected .found '4'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings: .* boolean .found 'false'"),
        ({"expand": 2.5}, "expand: .* integer"),
        ({"head_dim": 5}, "hidden_size × expand = 32 must be a multiple of head_dim = 5"),
        ({"model_type": ["mamba2"]}, r"unknown architecture \['mamba2'\]"),
        ({"model_type": {"mamba2": 1}}, "unknown architecture {'mamba2': 1}"),
        ({"model_type": "a\nb"}, r"unknown architecture 'a\\nb'"),
        ({"time_step_limit": [0, 10**400]}, "the limits of the time step are two numbers .* …"),
        ({"layer_norm_epsilon": 10**400}, "layer_norm_epsilon: "),
        ({"hidden_size": 10**30}, "hidden_size: must not exceed 2147483648 .found 1000"),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**20, "num_heads": 2**18}, "wrong shape: backbone.embedding.weight"),
        (
            {"vocab_size": 2**31 - 1, "hidden_size": 2**30, "expand": 2**30, "num_heads": 2**29, "head_dim": 2**31},
            "sizes that no tensor can have",
        ),
        ({"num_hidden_layers": 10**9}, "holds 21 tensors, the configuration has 1000000000 layers"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config = .*: quantised weights are not read"),
        ({"num_heads": 3}, "num_heads × head_dim = 24 differs from hidden_size × expand = 32"),
        ({"time_step_limit": [0.0]}, "the limits of the time step are two numbers"),
        ({"state_size": 7}, "wrong shape: backbone.layers.0.mixer.in_proj.weight"),
        ({"tie_word_embeddings": True}, "lm_head.weight and backbone.embedding.weight differ although"),
    ],
)
def test_configurations_of_transformers_that_are_refused(changes: dict[str, Any], match: str, refused: Any) -> None:
    refused("transformers", configured(**changes), match)


def test_files_that_are_refused(refused: Any, tmp_path: Path) -> None:
    def halve(pattern: str) -> Any:
        def change(folder: Path) -> None:
            path = sorted(folder.glob(pattern))[0]
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

        return change

    def indexed(change_map: Any) -> Any:
        def change(folder: Path) -> None:
            path = folder / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            change_map(index["weight_map"])
            path.write_text(json.dumps(index))

        return change

    def pickled(value: Any, plain: bool = False) -> Any:
        def change(folder: Path) -> None:
            path = folder / "pytorch_model.bin"
            path.write_bytes(pickle.dumps(value, protocol=2)) if plain else torch.save(value, path)

        return change

    def reshaped(folder: Path) -> None:
        tensors = files.read_file(folder / "pytorch_model.bin")
        tensors["backbone.norm_f.weight"] = torch.ones(3)
        tensors["extra"] = tensors.pop("backbone.layers.0.norm.weight").long()
        torch.save(tensors, folder / "pytorch_model.bin")

    refused("transformers", halve("model-00002*"), "model-00002-of-.*safetensors: damaged or truncated")
    refused("transformers", halve("config.json"), "config.json: damaged, not JSON")
    for text, match in (
        ("[" * 100_000, "JSON nested too deeply"),
        ('{"model_type": "mamba2", "hidden_size": ' + "1" * 5_000 + "}", "a number in it has thousands of digits"),
    ):
        refused("transformers", lambda folder, text=text: (folder / "config.json").write_text(text), match)
    refused("transformers", lambda folder: (folder / "config.json").write_text("[]"), "config.json: an object is expected")
    refused("transformers", lambda folder: next(folder.glob("model-00003*")).unlink(), "model-00003-of-.*: no such file")
    refused("transformers", indexed(lambda names: names.update(more="model-00001-of-00002.safetensors")), "no such file|does not")
    refused(
        "transformers", indexed(lambda names: names.update(more=next(iter(names.values())))), "says that it holds more, it does"
    )
    for name in ("../x.safetensors", "/x.safetensors", "", "..", "config.json", "x\n.bin"):
        refused(
            "transformers", indexed(lambda names, name=name: names.update(more=name)), "names '.*', which is not a file beside"
        )
    refused("mamba-ssm", halve("pytorch_model.bin"), "pytorch_model.bin: damaged or truncated")
    refused("mamba-ssm", lambda folder: (folder / "pytorch_model.bin").unlink(), "no model.safetensors and no pytorch_model.bin")
    refused("mamba-ssm", pickled([torch.ones(1)]), "not a dictionary of tensors")
    refused(
        "mamba-ssm",
        reshaped,
        r"missing backbone.layers.0.norm.weight; unexpected extra; wrong shape: backbone.norm_f.weight is \(3,\), expected \(16,\); "
        r"not floating point: extra is torch.int64",
    )
    norm = "backbone.norm_f.weight"
    refused("mamba-ssm", pickled({norm: torch.eye(16).to_sparse()}), f"{norm} is sparse_coo; only dense tensors")
    refused("mamba-ssm", pickled({norm: torch.eye(16).to_sparse_csr()}), f"{norm} is sparse_csr; only dense tensors")
    refused("mamba-ssm", pickled({norm: torch.empty(16, device="meta")}), f"{norm} has a shape and no numbers")

    def narrowed(folder: Path) -> None:
        path = sorted(folder.glob("model-00001*"))[0]
        tensors = files.read_file(path)
        save_file(tensors | {name: t.to(torch.float8_e4m3fn) for name, t in list(tensors.items())[:1]}, path, {"format": "pt"})

    head = {"lm_head.weight": torch.ones(3).to(torch.float8_e4m3fn), "backbone.embedding.weight": torch.ones(3)}
    refused(
        "mamba-ssm",
        lambda folder: (configured(tie_embeddings=True)(folder), pickled(head)(folder)),
        "lm_head.weight is torch.flo",
    )
    refused("transformers", narrowed, "not of float64, float32, float16, bfloat16: .* is torch.float8_e4m3fn$")
    for plain in (False, True):
        refused("mamba-ssm", pickled({"w": Exploit(tmp_path / "was_run")}, plain), "damaged|holds more than tensors")
    assert not (tmp_path / "was_run").exists()


def test_memory_is_taken_only_for_sizes_that_the_file_has(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    from farstate.models import checkpoints

    devices: list[str] = []
    whole = checkpoints.Unfilled.__init__

    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        whole(self, *arguments, **options)
        devices.extend({tensor.device.type for tensor in self.state_dict().values()})

    monkeypatch.setattr(checkpoints.Unfilled, "__init__", noted)
    folder = shutil.copytree(good / "transformers", tmp_path / "large")
    configured(hidden_size=2**20, num_heads=2**18)(folder)
    with pytest.raises(FarstateError, match="wrong shape"):
        load_model(folder)
    assert devices == ["meta"]
    load_model(good / "transformers")
    assert devices == ["meta", "meta", "cpu"]


def test_swish_is_silu(good: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(good / "transformers", tmp_path / "swish")
    configured(hidden_act="swish")(folder)
    hidden, _ = load_model(folder)(TOKENS)
    assert torch.equal(hidden, load_model(good / "transformers")(TOKENS)[0])
    export(folder, tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["hidden_act"] == "swish"


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_what_transformers_rescales_at_loading_is_read_as_it_stands(kind: str, tmp_path: Path) -> None:
    """`rescale_prenorm_residual` is about the initialisation, but transformers divides what it loaded by √layers."""
    save_transformers(transformers_model(kind), tmp_path, "safetensors")
    configured(rescale_prenorm_residual=True)(tmp_path)
    stored = files.read_file(tmp_path / "model.safetensors")
    theirs, ours = load_transformers(tmp_path).state_dict(), load_model(tmp_path).state_dict()
    for layer in range(2):
        name = f"backbone.layers.{layer}.mixer.out_proj.weight"
        assert torch.equal(ours[name], stored[name])
        torch.testing.assert_close(theirs[name], stored[name] / 2**0.5)


def test_mamba_ssm_has_defaults(good: Path, tmp_path: Path) -> None:
    """`MambaConfig`'s own, of which our refusals know the names."""
    from farstate.models.formats import mamba_ssm

    config = mamba_ssm.to_config({"d_model": 64, "n_layer": 1}, tmp_path)
    assert (config.vocabulary_size, config.padded_vocabulary, config.tied_embeddings) == (50277, 50280, True)


# --- what cannot be written ------------------------------------------------------------------------------


def test_exports_that_are_refused_leave_nothing(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from farstate.models.language_model import LanguageModel
    from farstate.models.mamba2.shape import Mamba2Config

    sizes = {"vocabulary_size": VOCABULARY, "width": 16, "layers": 1, "state_size": 6, "head_size": 8}
    save_model(LanguageModel(Mamba2Config(**sizes, groups=2, norm_groups=1)), tmp_path / "odd")
    save_model(LanguageModel(Mamba2Config(**sizes, norm_epsilon=1e-6)), tmp_path / "small")
    target = tmp_path / "out"
    for source, options, match in (
        (tmp_path / "odd", {}, "was trained here .* give --format: farstate, fla, transformers, mamba-ssm"),
        (tmp_path / "odd", {"format_name": "transformer"}, "unknown .did you mean 'transformers'"),
        (tmp_path / "odd", {"format_name": "transformers"}, "transformers: its files cannot express norm_groups = 1, only None"),
        (tmp_path / "odd", {"format_name": "mamba-ssm"}, "mamba-ssm: its files cannot express norm_groups = 1"),
        (tmp_path / "small", {"format_name": "mamba-ssm"}, "cannot express norm_epsilon = 1e-06, only 1e-05"),
        (
            tmp_path / "small",
            {"format_name": "blinkdl"},
            "blinkdl has no architecture 'mamba2'; formats that have it: .*transformers",
        ),
        (tmp_path / "small", {"format_name": "farstate", "dtype": "int8"}, "--dtype: 'int8' is unknown"),
        (tmp_path / "nothing", {"format_name": "farstate"}, "nothing: no such folder"),
    ):
        with pytest.raises(FarstateError, match=match) as caught:
            export(source, target, **options)
        assert "\n" not in str(caught.value)
        assert not target.exists()
    export(tmp_path / "small", target, "transformers")
    with pytest.raises(FarstateError, match="out: already there"):
        export(tmp_path / "small", target, "transformers")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        export(good / "transformers", tmp_path / "half", "mamba-ssm")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["odd", "out", "small"]


def test_every_format_says_what_it_can_express() -> None:
    for name, kind in FORMATS.items():
        assert kind.name == name
        assert kind.architectures
