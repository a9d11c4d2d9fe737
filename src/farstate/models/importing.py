"""The stage that brings a published checkpoint, local or from the hub, into Farstate's format."""

from __future__ import annotations

from pathlib import Path

from farstate import sources
from farstate.errors import FarstateError
from farstate.files import write_manifest
from farstate.models.checkpoints import load_model, save_model
from farstate.stages import Stage

_WANTED = ("config.json", "*.safetensors", "pytorch_model*.bin", "*.index.json")


def import_stage(stage: Stage) -> None:
    """Read the checkpoint that the record names, hold it against `config/sources.lock`, and write it anew.

    Raises:
        FarstateError: it is not registered, changed since, not reachable, or not a checkpoint we read.
    """
    name = stage.params["checkpoint"]
    entry = sources.check(sources.Outside("checkpoint", name), verify=stage.verify)
    folder = sources.inputs_root() / name if (sources.inputs_root() / name).is_dir() else _download(name, entry.get("revision"))
    model = load_model(folder)
    if model.config.architecture != stage.params["architecture"]:
        raise FarstateError(
            f"{name}: its architecture is {model.config.architecture}, the parameters say {stage.params['architecture']}"
        )
    save_model(model, stage.output)
    write_manifest(stage.output, {**stage.identity, "source": stage.params["content"]}, ["config.json", "model.safetensors"])


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
    except Exception as error:  # the client raises many kinds; to the user they are one
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FarstateError(
            f"{name}: neither a local folder nor reachable on the hub ({first[:160]}); download it elsewhere, give the "
            "folder as models.<name>.checkpoint and run `farstate register`"
        ) from None
