"""What is known of a checkpoint before anything is measured: format, sizes, training length, tokenizer, what its own record tells."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farstate.corpus.tokenizer import load_tokenizer, symbols
from farstate.errors import FarstateError
from farstate.evaluation.by_hand import manifest_beside
from farstate.evaluation.published import tokenizer_of
from farstate.files import MANIFEST, read_json
from farstate.models.checkpoints import detect_format
from farstate.models.config import Config
from farstate.models.formats import FORMATS
from farstate.models.importing import locate
from farstate.plan import record_path


@dataclass(frozen=True)
class Known:
    """A checkpoint.

    Attributes:
        given: as it was typed.
        where: as parameters name it: an absolute path, or its name on the hub.
        path: on this machine.
        format: that of `farstate.models.formats`.
        context: T_train in tokens.
        tokenizer: its `tokenizer.json`; `symbols` are those it knows.
        pretrained_tokens, pretraining_rate: of its pre-training, where its own record tells.
    """

    given: str
    where: str
    path: Path
    format: str
    config: Config
    context: int
    tokenizer: Path
    symbols: int
    pretrained_tokens: int | None
    pretraining_rate: float | None

    @property
    def folder(self) -> Path:
        """Where its further files lie."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def name(self) -> str:
        """What the model is called in parameters and results."""
        about = manifest_beside(self.path)
        name = str(about.get("name") or (self.given.rpartition("/")[2] if self.where == self.given else self.path.resolve().name))
        if about:  # <model>.s<seed>, <model>.<arm>.s<seed>
            name = re.sub(r"\.s\d+$", "", name) + ("" if self.path.is_dir() else f".{self.path.stem}")
        name = re.sub(r"\.(pth|safetensors|bin)$", "", name)
        plain = re.sub(r"[^a-z0-9_.-]+", "-", name.lower()).strip("-._") or "model"
        return plain.removeprefix("checkpoint.") or "model"


def know(given: str, context: int | None, tokenizer: Path | None) -> Known:
    """Look at a checkpoint of any format that Farstate reads.

    Args:
        given: folder, file or hub name.
        context: T_train; None: as its own record says.
        tokenizer: a `tokenizer.json`; None: that beside it, or of a result of this pipeline that of its corpus.

    Raises:
        FarstateError: it is not there or of no known format; T_train or the tokenizer are not known; the tokenizer knows more symbols
            than the model.
    """
    path = locate(given)
    kind = detect_format(path)
    config = FORMATS[kind].read(path).config
    about = manifest_beside(path)
    found = _tokenizer(path, tokenizer, about)
    known = symbols(load_tokenizer(found))
    if known > config.vocabulary_size:
        raise FarstateError(
            f"{found}: knows {known:,} symbols, the model {given} has {config.vocabulary_size:,}; give with --tokenizer the one it was "
            "trained with"
        )
    origin = _pretraining(path, about)
    return Known(
        given=given,
        where=str(path.resolve()) if Path(given).exists() else given,
        path=path,
        format=kind,
        config=config,
        context=_context(given, context, about),
        tokenizer=found.resolve(),
        symbols=known,
        pretrained_tokens=origin.get("tokens"),
        pretraining_rate=origin.get("recipe", {}).get("peak_learning_rate"),
    )


def _context(given: str, context: int | None, about: dict[str, Any]) -> int:
    if context is not None and context < 1:
        raise FarstateError(f"--context: {context} is not allowed; the training length is at least 1 token")
    told = context if context is not None else about.get("params", {}).get("context")
    if isinstance(told, int):
        return told
    raise FarstateError(
        f"{given}: does not say on how many tokens at a time it was trained, and whether it works beyond that is the question; give "
        "--context T_TRAIN"
    )


def _tokenizer(path: Path, given: Path | None, about: dict[str, Any]) -> Path:
    beside = (path if path.is_dir() else path.parent) / "tokenizer.json"
    if given is None and about and not beside.exists():
        found = _of_corpus(path, about)
        if found is not None:
            return found
    found = tokenizer_of(path, given)
    return found / "tokenizer.json" if found.is_dir() else found


def _of_corpus(path: Path, about: dict[str, Any]) -> Path | None:
    """The tokenizer of the token store that a result of this pipeline was trained on.

    The records of its stages name it; where only results were copied, it is the one tokenizer beside the store, if there is one.
    """
    root = _root(path)
    waiting = list((about.get("upstream") or {}).get("store") or [])
    for directory in waiting:  # grows
        record = root / record_path(directory)
        upstream = read_json(record)["upstream"] if record.is_file() else {}
        for found in upstream.get("tokenizer", ()):
            if (root / found / "tokenizer.json").is_file():
                return root / found / "tokenizer.json"
        waiting += upstream.get("shards", ())
    candidates = [file for directory in waiting[:1] for file in (root / directory).parent.glob("tokenizer.*/tokenizer.json")]
    return candidates[0] if len(candidates) == 1 else None


def _root(path: Path) -> Path:
    """The folder under which a result's directory is `results/<phase>/<name>-<key>`."""
    parents = (path if path.is_dir() else path.parent).resolve().parents
    return parents[2] if len(parents) > 2 else parents[-1]


def _pretraining(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the pre-training that a result of this pipeline comes from; empty for other checkpoints."""
    if about.get("rule") == "pretrain":
        return dict(about["params"])
    for directory in (about.get("upstream") or {}).get("checkpoint", ()):
        if (manifest := _root(path) / directory / MANIFEST).is_file():
            return _pretraining(manifest.parent, read_json(manifest))
    return {}
