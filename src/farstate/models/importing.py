"""The stage that brings a published checkpoint, local or from the hub, into Farstate's format."""

from __future__ import annotations

import re
from pathlib import Path

from farstate import sources
from farstate.errors import FarstateError
from farstate.files import write_manifest
from farstate.models.checkpoints import files_beside, load_with_origin, save_model
from farstate.stages import Stage

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.pth)?", re.ASCII)
_WANTED = ("config.json", "*.safetensors", "pytorch_model*.bin", "*.index.json", "tokenizer.json")


def import_stage(stage: Stage) -> None:
    """Read the checkpoint that the record names, hold it against `config/sources.lock`, and write it anew.

    Where it came from (format, configuration, how its tensors lay) enters the header of the weights, for `farstate export`.

    Raises:
        FarstateError: it is not registered, changed since, not reachable, or not a checkpoint we read.
    """
    name = stage.params["checkpoint"]
    entry = sources.check(sources.Outside("checkpoint", name), verify=stage.verify)
    path = locate(name, entry.get("revision"), sources.inputs_root())
    model, origin = load_with_origin(path)
    if model.config.architecture != stage.params["architecture"]:
        raise FarstateError(
            f"{name}: its architecture is {model.config.architecture}, the parameters say {stage.params['architecture']}"
        )
    if origin:
        origin |= {"checkpoint": name, "beside": files_beside(path if path.is_dir() else path.parent)}
    save_model(model, stage.output, origin)
    write_manifest(stage.output, {**stage.identity, "source": stage.params["content"]}, ["config.json", "model.safetensors"])


def locate(name: str, revision: str | None = None, root: Path = Path()) -> Path:
    """The checkpoint `name` on this machine: a path from `root`, or a name on the hub, whose files are fetched.

    A repository of several `.pth` files is named with the file: `BlinkDL/rwkv-6-world/<file>.pth`.

    Raises:
        FarstateError: neither is there.
    """
    if (root / name).exists():
        return root / name
    if not _HUB_NAME.fullmatch(name):
        raise FarstateError(f"{name}: no such folder or file, and no name on the hub")
    from huggingface_hub import hf_hub_download, snapshot_download

    repository, file = sources.hub_parts(name)
    try:
        if file is not None:
            return Path(hf_hub_download(repository, file, revision=revision))
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
    except Exception as error:  # the client raises many kinds; to the user they are one
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FarstateError(
            f"{name}: neither a local folder nor reachable on the hub ({first[:160]}); download it elsewhere and give "
            "the folder (in the parameters: as models.<name>.checkpoint, then run `farstate register`)"
        ) from None
