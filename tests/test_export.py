"""From a published checkpoint through import and post-training back into the format it came from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file

from farstate import cli, params, sources
from farstate.errors import FarstateError
from farstate.models.checkpoints import export, load_model, load_with_origin
from farstate.models.importing import import_stage, locate
from farstate.training.settings import RunSettings
from farstate.training.trainer import posttrain
from test_evaluation import VOCABULARY, make_store
from test_formats import TOKENS, load_transformers, save_transformers, transformers_model

CONTEXT, ROWS = 5, 2


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a published checkpoint of float16 in shards, its tokenizer beside it, registered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sources, "_SEEN", tmp_path / "seen.json")
    save_transformers(transformers_model("mamba2").half(), tmp_path / "published", "shards")
    (tmp_path / "published/tokenizer.json").write_text("{}")
    sources.register(sources.Outside("checkpoint", "published"), path=tmp_path / sources.LOCK)
    return tmp_path


def imported(home: Path) -> Path:
    stage = SimpleNamespace(
        params={"checkpoint": "published", "architecture": "mamba2", "content": "c"},
        identity={"key": "0"},
        output=home / "imported",
        verify=False,
    )
    import_stage(stage)  # type: ignore[arg-type]
    return stage.output


def trained(home: Path, checkpoint: Path, steps: int = 2) -> Path:
    store = make_store(home / "corpus", [60, 50, 40], split="train")
    posttrain(
        checkpoint=checkpoint,
        context=CONTEXT,
        steps=steps,
        seed=0,
        arm=TypeAdapter(params.Arm).validate_python({"initial_state": "zero"}),
        stretch_tokens=None,
        recipe=params.Recipe(batch_tokens=ROWS * CONTEXT, peak_learning_rate=1e-3),
        store=store,
        output=home / "trained",
        scratch=home / "scratch",
        settings=RunSettings(device="cpu", threads=1),
        key="0",
    )
    return home / "trained"


def called(*arguments: str) -> None:
    cli.app(list(arguments), standalone_mode=False)


def test_from_publication_to_publication(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = imported(home)
    assert sorted(path.name for path in base.iterdir()) == ["config.json", "manifest.json", "model.safetensors"]
    called("export", str(base), "--output", "untouched")
    assert "wrote untouched: transformers format, float16" in capsys.readouterr().out
    reference, again = load_transformers(home / "published"), load_transformers(home / "untouched")
    for name, tensor in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(again(TOKENS).logits, reference(TOKENS).logits)

    result = trained(home, base)
    assert load_with_origin(result)[1] == load_with_origin(base)[1]
    called("export", str(result), "--output", "back")
    assert capsys.readouterr().out == (
        "wrote back: transformers format, float32\n"
        "not there to copy: tokenizer.json, generation_config.json; take them from published\n"
    )
    theirs, ours = load_transformers(home / "back"), load_model(result)
    hidden, _ = ours(TOKENS)
    torch.testing.assert_close(theirs(TOKENS).logits, hidden @ ours.head_weight.T, rtol=1e-4, atol=1e-5)
    assert not torch.equal(ours.head_weight, load_model(base).head_weight), "it was trained"
    config, original = (json.loads((home / name / "config.json").read_text()) for name in ("back", "published"))
    assert config == original | {"dtype": "float32"}

    called("export", str(result), "--output", "other", "--format", "mamba-ssm", "--dtype", "bfloat16")
    assert "wrote other: mamba-ssm format, bfloat16" in capsys.readouterr().out
    assert load_with_origin("other")[1]["storage"]["dtype"] == "bfloat16"


def test_ids_of_special_tokens_go_along(home: Path) -> None:
    path = home / "published/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token_id": 7, "eos_token_id": [8, 9], "pad_token_id": 6}))
    export("published", "fla", "fla")
    export("fla", "back", "transformers")
    for name in ("fla", "back"):
        data = json.loads((home / name / "config.json").read_text())
        assert (data["bos_token_id"], data["eos_token_id"], data["pad_token_id"]) == (7, [8, 9], 6), name
    # Its loader takes no key that it does not know.
    export("published", "mamba-ssm", "mamba-ssm")
    assert "bos_token_id" not in json.loads((home / "mamba-ssm/config.json").read_text())


ORIGIN = {"format": "transformers", "config": {"model_type": "mamba2"}, "storage": {"file": "model.safetensors"}}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"storage": {"file": "../../x.safetensors"}}, "storage.file"),
        ({"storage": {"file": "/tmp/x.safetensors"}}, "storage.file"),
        ({"storage": {"file": "config.json"}}, "storage.file"),
        ({"storage": {"file": ".."}}, "storage.file"),
        ({"storage": {"file": 3}}, "storage.file"),
        ({"storage": {"weight_map": {"backbone.norm_f.weight": "../../x.safetensors"}}}, "storage.weight_map.backbone"),
        ({"storage": {"weight_map": {"backbone.norm_f.weight": "config.json"}}}, "storage.weight_map.backbone"),
        ({"storage": {"weight_map": ["a"]}}, "storage.weight_map"),
        ({"storage": {"dtype": "load"}}, "storage.dtype"),
        ({"storage": {"dtype": "int8"}}, "storage.dtype"),
        ({"storage": {"dtypes": {"backbone.norm_f.weight": "nn"}}}, "storage.dtypes.backbone"),
        ({"storage": []}, "storage"),
        ({"format": "blinkdl", "file": "../x.pth"}, "file"),
        ({"format": "pickle"}, "format"),
        ({"format": ["fla"]}, "format"),
        ({"config": []}, "config"),
        ({"beside": ["../tokenizer.json"]}, "beside.0"),
        ({"checkpoint": "\x1b[2J"}, "checkpoint"),
        ({"strange": 1}, "strange"),
    ],
)
def test_a_header_cannot_name_files_outside(change: dict[str, Any], where: str, tmp_path: Path) -> None:
    from farstate.models.checkpoints import save_model
    from farstate.models.language_model import LanguageModel
    from farstate.models.mamba2.shape import Mamba2Config

    model = LanguageModel(Mamba2Config(vocabulary_size=10, width=16, layers=1, state_size=4, head_size=8))
    save_model(model, tmp_path / "good", ORIGIN)
    export(tmp_path / "good", tmp_path / "a/b/written")
    save_model(model, tmp_path / "bad", ORIGIN | change)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FarstateError, match=rf"model\.safetensors: header: 'origin\.{where}") as caught:
        export(tmp_path / "bad", tmp_path / "a/b/out")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("origin", ["{", "[" * 100_000, "3"])
def test_a_damaged_header_is_explained(origin: str, tmp_path: Path) -> None:
    from farstate.models.checkpoints import save_model
    from farstate.models.language_model import LanguageModel
    from farstate.models.mamba2.shape import Mamba2Config

    model = LanguageModel(Mamba2Config(vocabulary_size=10, width=16, layers=1, state_size=4, head_size=8))
    save_model(model, tmp_path)
    config = json.dumps(model.config.model_dump(mode="json"))
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(tensors, tmp_path / "model.safetensors", {"config": config, "origin": origin})
    with pytest.raises(FarstateError, match=r"model\.safetensors: header: 'origin") as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_what_a_narrow_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    from farstate.models.checkpoints import save_model
    from farstate.models.language_model import LanguageModel
    from farstate.models.mamba2.shape import Mamba2Config

    model = LanguageModel(Mamba2Config(vocabulary_size=10, width=16, layers=1, state_size=4, head_size=8))
    with torch.no_grad():
        model.backbone.layers[0].mixer.D[1] = 7e4
    save_model(model, tmp_path / "ours")
    match = r"--dtype float16: backbone\.layers\.0\.mixer\.D holds 70000, beyond the largest number of float16, 65504"
    with pytest.raises(FarstateError, match=match):
        export(tmp_path / "ours", tmp_path / "out", "transformers", "float16")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "ours", tmp_path / "out", "transformers", "bfloat16")
    with torch.no_grad():
        model.backbone.layers[0].mixer.D[1] = float("inf")
    save_model(model, tmp_path / "spoilt")
    export(tmp_path / "spoilt", tmp_path / "narrow", "transformers", "float16")  # it was infinite before


def test_the_tokenizer_is_copied_where_it_lies(home: Path) -> None:
    done = export("published", "copy", "mamba-ssm")
    assert done.beside == ["tokenizer.json", "generation_config.json"]
    assert (home / "copy/tokenizer.json").read_text() == "{}"
    assert not done.absent


def test_a_model_trained_here_has_no_origin(home: Path) -> None:
    from farstate.models.checkpoints import save_model

    model, origin = load_with_origin("published")
    assert origin["format"] == "transformers"
    save_model(model, "plain")
    result = trained(home, home / "plain")
    assert load_with_origin(result)[1] == {}
    with pytest.raises(FarstateError, match="was trained here and comes from no other format; give --format"):
        called("export", str(result), "--output", "out")
    assert not (home / "out").exists()


def test_the_training_loss_counts_the_store_symbols(home: Path) -> None:
    """transformers' vocabulary of 50 holds padding where the store has 23 symbols: the loss is over 23."""
    base = imported(home)
    model = load_model(base)
    assert model.config.vocabulary_size == 50 > VOCABULARY
    seen: list[Any] = []

    from farstate.training import trainer

    real = trainer.mean_nll

    def noted(*arguments: Any, **options: Any) -> Any:
        seen.append(options["vocabulary_size"])
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "mean_nll", noted)
        result = trained(home, base, steps=1)
    assert seen == [VOCABULARY]
    moved = (load_model(result).head_weight - model.head_weight).abs().amax(1).detach().numpy()
    assert np.all(moved[:VOCABULARY] > 0)


def test_checkpoints_are_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(name: str, **_: Any) -> str:
        raise OSError(f"cannot reach {name}\nfor many reasons")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    (tmp_path / "there").mkdir()
    assert locate("there", root=tmp_path) == tmp_path / "there"
    with pytest.raises(
        FarstateError, match=r"some/model: neither a local folder nor reachable on the hub .cannot reach some/model.;"
    ):
        locate("some/model", root=tmp_path)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, revision: f"/cache/{name}@{revision}/{file}")
    assert locate("BlinkDL/rwkv/x/one.pth", "abc") == Path("/cache/BlinkDL/rwkv@abc/x/one.pth")
    (tmp_path / "one.pth").write_bytes(b"weights")
    assert locate("one.pth", root=tmp_path) == tmp_path / "one.pth"
    monkeypatch.setenv("FARSTATE_INPUTS_ROOT", str(tmp_path))
    assert sources.local_files(sources.Outside("checkpoint", "one.pth")) == [Path("one.pth")]
    for name in ("absent", "/absent/model", "a/b/c"):
        with pytest.raises(FarstateError, match=f"{name}: no such folder or file"):
            locate(name, root=tmp_path)
