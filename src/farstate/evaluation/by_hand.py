"""A measurement of one checkpoint by hand: the tables of a stage without Snakemake, from any checkpoint and any text.

`farstate perplexity|remembrance|states|shift CHECKPOINT --corpus WHERE` resolves its options to what the stage's record would
hold and calls the stage's own function, so that equal parameters on equal texts give equal tables.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from pydantic import ValidationError

from farstate import params
from farstate.corpus.documents import write_documents
from farstate.corpus.sources import resolve_files
from farstate.corpus.store import STORE, TokenStore, write_store
from farstate.corpus.tokenizer import load_tokenizer, symbols
from farstate.corpus.tokens import write_tokens
from farstate.errors import FarstateError
from farstate.evaluation import stages
from farstate.evaluation.progress import PhaseProgress
from farstate.evaluation.published import tokenizer_of
from farstate.evaluation.texts import select
from farstate.files import MANIFEST, only_one, read_json, read_manifest, sha256_file, write_json
from farstate.models.checkpoints import detect_format
from farstate.models.importing import locate
from farstate.ops import backends
from farstate.provenance import commit, versions
from farstate.settings import Settings, current_settings
from farstate.stages import Stage
from farstate.training.progress import notice

DEFAULT_LENGTH = 8192
_STORES = "by_hand"
_COMMAND = "command.json"
_PIPELINE_TOKENIZER = "results/corpus/tokenizer.<name>-<key>/tokenizer.json"
_SNAPSHOT = re.compile(r"snapshot-(\d+)\.safetensors")
# Half of the documents on each side: a two-sample test needs as many states of one as of the other.
_SHIFT_SPLIT = params.Split(validation=0.0, test=0.5)


@dataclass(frozen=True)
class Measure:
    """A measurement as it is called by hand.

    Attributes:
        parameters: the class of its parameters; an option of the command for each of its fields.
        key: under which a stage's record holds them.
        trains: whether it reads the training split too.
    """

    parameters: type[params.Texts]
    key: str
    trains: bool = False


MEASURES: dict[str, Measure] = {
    "perplexity": Measure(params.Evaluate, "evaluate"),
    "remembrance": Measure(params.Remembrance, "remembrance"),
    "states": Measure(params.States, "states"),
    "shift": Measure(params.Shift, "shift", trains=True),
}


class HandStage(Stage):
    """What a stage's function reads from its record, made from the options of a command."""

    def __init__(
        self, rule: str, given: Mapping[str, Any], upstream: Mapping[str, Path], output: Path, settings: Settings
    ) -> None:
        self.record = {
            **{"rule": rule, "phase": _STORES, "name": output.name, "params": dict(given)},
            "upstream": {role: [str(path)] for role, path in upstream.items()},
        }
        self.params = dict(given)
        self.output = output
        self.settings, self.verify = settings, False


def measure(
    rule: str,
    checkpoint: str,
    corpus: Sequence[str],
    options: Mapping[str, Any],
    *,
    context: int | None = None,
    tokenizer: Path | None = None,
    text_key: str = "text",
    arm_record: Path | None = None,
    output: Path | None = None,
    device: str | None = None,
) -> list[str]:
    """Measure a checkpoint and write the tables of the stage `rule`; say in lines where they are.

    Args:
        rule: a key of MEASURES.
        checkpoint: folder, file or hub name, of any format.
        corpus: a token store's directory, or files and globs of .txt, .jsonl, .parquet, compressed or not. Of such texts a store
            is made in the scratch folder and kept there: all documents are held out, but for `shift`, which needs states of
            documents on two sides and halves them by their content.
        options: fields of the measure's parameters, those that were given.
        context: T_train in tokens; None: as the checkpoint's manifest says.
        tokenizer: of text files; None: that beside the checkpoint.
        text_key: the field or column that holds a document's text.
        arm_record: of `shift`, the record (or manifest) of the checkpoint's post-training, whose states are the reference; None:
            what the checkpoint's own manifest says of it, and without one states that begin from zero.
        output: folder; None: `results/by_hand/<rule>.<checkpoint>-<digest of all that was asked>`.
        device: auto, cpu or cuda; None: that of the settings.

    Raises:
        FarstateError: an argument that is not allowed, texts or checkpoints that cannot be read or do not fit.
    """
    kind = MEASURES[rule]
    settings, _ = current_settings()
    if device is not None:
        settings = settings.model_copy(update={"device": device})
    if arm_record is not None and rule != "shift":
        raise FarstateError("--arm-record: only `farstate shift` compares with the states of a training")
    given = _validated(kind, {"length": DEFAULT_LENGTH, **options} if rule == "perplexity" else dict(options))
    path = locate(checkpoint)
    detect_format(path)  # before the texts are read
    about = manifest_beside(path)
    training, reference = (None, "") if rule != "shift" else _reference(arm_record, about, path)
    asked: dict[str, Any] = {
        kind.key: given.model_dump(mode="json"),
        "context": _context(context, about, checkpoint),
        "labels": _labels(about, path),
    }
    if rule == "shift":
        asked["training"] = training
    if output is not None:
        _check_output(output, rule, path)
    store = _store(corpus, path, tokenizer, text_key, kind, settings, about)
    if output is None:
        digest = hashlib.sha256(
            json.dumps([str(path.resolve()), str(store.resolve()), asked], sort_keys=True).encode()
        ).hexdigest()
        output = Path("results/by_hand") / f"{rule}.{_name(about, path)}-{digest[:8]}"
    stage = HandStage(rule, asked, {"checkpoint": path, "store": store}, output, settings)
    there = output.exists()
    with backends.use(settings.backend) as operations:
        try:
            select(TokenStore(store), given)  # what cannot be read is refused before anything is written
            getattr(stages, f"{rule}_stage")(stage)
        except FarstateError as error:
            if not there and output.is_dir() and not any(output.iterdir()):
                output.rmdir()
            raise FarstateError(_in_options(str(error), kind)) from None
    manifest = read_manifest(output)
    asked_for = {"checkpoint": str(path), "corpus": list(corpus), "store": str(store), **asked}
    write_json(
        output / _COMMAND,
        {"rule": rule, **asked_for, "versions": versions(), **commit(), "operations": operations.record()},
    )
    return [
        f"wrote {output}: {', '.join(sorted(manifest['files']))}",
        f"T_train {asked['context']}, token store {store}",
        *([reference] if reference else []),
        *_within(rule, given, asked["context"]),
        *_broken(manifest),
        *_unanswered(output, manifest),
    ]


def _check_output(output: Path, rule: str, checkpoint: Path) -> None:
    """Refuse a folder that holds anything but an earlier result of this measure of this checkpoint, or that cannot be made."""
    parent = next(path for path in (output, *output.absolute().parents) if path.exists() or path.is_symlink())
    if not parent.is_dir():
        raise FarstateError(f"--output: {parent} is a file; give a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise FarstateError(f"--output: no permission to write in {parent}; give another folder")
    # A killed run leaves hidden parts of tables.
    if not output.is_dir() or all(path.name.startswith(".") and path.suffix == ".part" for path in output.iterdir()):
        return
    found = read_json(output / _COMMAND) if (output / _COMMAND).is_file() else None
    earlier = found if isinstance(found, dict) else {}
    if earlier.get("rule") != rule or Path(str(earlier.get("checkpoint"))).resolve() != checkpoint.resolve():
        raise FarstateError(
            f"--output: {output} holds something else than `farstate {rule}` of {checkpoint}, which would be overwritten; give a new "
            "or empty folder"
        )


def _validated(kind: Measure, options: Mapping[str, Any]) -> params.Texts:
    _check_range(kind, options)
    try:
        return kind.parameters.model_validate(params.as_written(dict(options)))
    except ValidationError as error:
        raise FarstateError(_one_line(error)) from None


def _check_range(kind: Measure, options: Mapping[str, Any]) -> None:
    """Positions within the length, in terms of the options."""
    fields = kind.parameters.model_fields
    length = options.get("length", fields["length"].default)
    if not isinstance(length, int) or length < 2:
        return
    starts = options.get("starts") or ()
    if wrong := [start for start in starts if not 0 <= start <= length]:
        raise FarstateError(f"--starts: {wrong[0]} is no start point; allowed are 0 … {length} (T, --length)")
    if twice := [start for number, start in enumerate(starts) if start in starts[:number]]:
        raise FarstateError(f"--starts: {twice[0]} is given twice; give each start point once")
    if "last" in fields and (last := options.get("last", fields["last"].default)) > length:
        raise FarstateError(f"--last: {last} positions do not fit into --length {length}; give --last {length} or less")
    for name in ("positions", "swap_position"):
        found = options.get(name)
        for position in (found,) if isinstance(found, int) else found or ():
            if not 1 <= position <= length:
                raise FarstateError(
                    f"--{name.replace('_', '-')}: {position} is not a position that is read; allowed are 1 … {length} (--length)"
                )


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    option = f"--{str(first['loc'][0]).replace('_', '-')}: " if first["loc"] else ""
    if first["type"] == "value_error":
        return option + str(first["ctx"]["error"])
    message = first["msg"]
    return f"{option}{first['input']!r} is not allowed; {message[:1].lower()}{message[1:]}"


def _in_options(message: str, kind: Measure) -> str:
    """A stage's message with the command's option in place of the parameter's key."""
    for name in kind.parameters.model_fields:
        message = message.replace(f"{kind.key}.{name}", f"--{name.replace('_', '-')}")
    message = message.replace("hold out more documents (corpus.split)", "give more text")
    return message.replace("raise its share (corpus.split) or add documents", "choose another --split or give more text")


def manifest_beside(checkpoint: Path) -> dict[str, Any]:
    """What the result of a training says about itself; empty for other checkpoints."""
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if not (folder / MANIFEST).is_file():
        return {}
    manifest = read_json(folder / MANIFEST)
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("params"), dict) else {}


def _context(given: int | None, about: Mapping[str, Any], checkpoint: str) -> int:
    if given is not None:
        if given < 1:
            raise FarstateError(f"--context: {given} is not allowed; the training length is at least 1 token")
        return given
    known = about.get("params", {}).get("context")
    if isinstance(known, int):
        return known
    raise FarstateError(f"{checkpoint}: does not say on how many tokens it was trained; give --context T_TRAIN")


def _labels(about: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Model, arm and seed as the pipeline names them, where the checkpoint is a result of it."""
    name, seed = str(about.get("name", "")), about.get("params", {}).get("seed")
    snapshot = _SNAPSHOT.fullmatch(path.name)
    end = f".s{seed}"
    if about.get("rule") in ("pretrain", "posttrain") and isinstance(seed, int) and name.endswith(end):
        name = name.removesuffix(end)
        if about["rule"] == "pretrain":
            return {"model": name, "arm": f"snapshot_{int(snapshot[1])}" if snapshot else "base", "seed": seed}
        model, _, arm = name.rpartition(".")
        if model:
            return {"model": model, "arm": arm, "seed": seed}
    return {"model": path.stem if path.is_file() else path.resolve().name, "arm": "base", "seed": None}


def _name(about: Mapping[str, Any], path: Path) -> str:
    """Of the default output folder: that of the checkpoint's folder, whole, and of a result's snapshot beside it."""
    if path.is_dir():
        return path.resolve().name
    return f"{path.resolve().parent.name}.{path.stem}" if about else path.stem


def _training(record: Path) -> dict[str, Any]:
    """What a post-training's record says about the initial states it gave."""
    found = read_json(record)
    asked = found.get("params") if isinstance(found, dict) else None
    names = ("arm", "steps", "seed", "stretch_tokens", "recipe")
    if not isinstance(asked, dict) or found.get("rule") != "posttrain" or any(name not in asked for name in names):
        raise FarstateError(
            f"{record}: not the record of a post-training; give .farstate/stages/posttrain.<name>-<key>.json or "
            "results/posttrain/<name>-<key>/manifest.json"
        )
    return {name: asked[name] for name in names}


def _reference(record: Path | None, about: Mapping[str, Any], checkpoint: Path) -> tuple[dict[str, Any] | None, str]:
    """What training's states are the reference, None for states that begin from zero; and a line that says which."""
    own = about.get("rule")
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    if record is None:
        if own != "posttrain":
            return None, "reference: states that begin from zero, within the training length"
        record = folder / MANIFEST
    training = _training(record)
    found = read_json(record)
    if own == "pretrain":
        raise FarstateError(
            f"--arm-record: {record} is the post-training {found.get('name')}, {checkpoint} was trained from zero states; leave it out"
        )
    if own == "posttrain" and any(about.get(key) != found.get(key) for key in ("name", "key", "params", "upstream")):
        raise FarstateError(
            f"--arm-record: {record} is the record of {_named(found)}, the checkpoint {checkpoint} is {_named(about)}; leave it out: the "
            "checkpoint's own manifest is taken"
        )
    return training, f"reference: states of the training {_named(found)} ({training['arm'].get('initial_state')}), by {record}"


def _named(found: Mapping[str, Any]) -> str:
    return "-".join(str(found[key]) for key in ("name", "key") if key in found) or "an unnamed training"


def _store(
    corpus: Sequence[str],
    checkpoint: Path,
    tokenizer: Path | None,
    text_key: str,
    kind: Measure,
    settings: Settings,
    about: Mapping[str, Any],
) -> Path:
    """The token store's directory that `corpus` is, or one made of its files."""
    directories = [where for where in corpus if Path(where).is_dir()]
    if directories:
        if len(corpus) > 1:
            raise FarstateError(f"--corpus: {directories[0]} is a folder; give one token store, or files")
        if not (Path(directories[0]) / STORE).is_file():
            raise FarstateError(
                f"--corpus: {directories[0]} is no token store (no {STORE} in it); give results/corpus/store-<key>, or text files: "
                f"'{directories[0].rstrip('/')}/*.txt'"
            )
        if tokenizer is not None:
            raise FarstateError(f"--tokenizer: {directories[0]} is a token store, its tokens are made already")
        _check_shards(Path(directories[0]))
        return Path(directories[0])
    try:
        files = list(dict.fromkeys(path for pattern in corpus for path in resolve_files(pattern)))
    except FarstateError as error:
        raise FarstateError(_of_texts(str(error))) from None
    given = _tokenizer(checkpoint, tokenizer, about)
    if given.is_dir():
        given = given / "tokenizer.json"
    notice(f"reading {len(files)} file(s): {files[0]}{' …' if len(files) > 1 else ''}")
    identity = [[sha256_file(path) for path in files], sha256_file(given), text_key, kind.trains]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    root = Path(settings.scratch) / _STORES / f"text-{digest}"
    with only_one(root / "lock", "the tokenising of this text"):
        if not (root / "store" / MANIFEST).is_file():
            try:
                _write_store(files, corpus, given, text_key, kind, root)
            except FarstateError as error:
                raise FarstateError(_of_texts(str(error))) from None
    return root / "store"


def _check_shards(store: Path) -> None:
    contents = read_json(store / STORE)
    for record in contents.get("shards", []) if isinstance(contents, dict) else []:
        if not (store / record["path"] / MANIFEST).is_file():
            raise FarstateError(
                f"--corpus: the token store {store} needs the token shard {os.path.normpath(store / record['path'])}, which is not there; "
                "a store holds no tokens itself: copy the shards' folders beside it"
            )


def _tokenizer(checkpoint: Path, given: Path | None, about: Mapping[str, Any]) -> Path:
    """The tokenizer.json that was given, or that beside the checkpoint; a result of a training has none beside it."""
    beside = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "tokenizer.json"
    if given is None and about.get("rule") in ("pretrain", "posttrain") and not beside.exists():
        made = sorted(Path("results/corpus").glob("tokenizer.*/tokenizer.json"))
        raise FarstateError(
            f"{checkpoint}: no tokenizer.json beside it; give --tokenizer {' or '.join(map(str, made)) or _PIPELINE_TOKENIZER}, that of "
            "the corpus it was trained on"
        )
    return tokenizer_of(checkpoint, given)


def _of_texts(message: str) -> str:
    """A message of the corpus stages in terms of the command: there are no parameters in which a source could be described."""
    for theirs, ours in (
        ("list the file's encoding in the source's encodings", "convert it to UTF-8"),
        ("; or leave such records out and count them: corpus.damaged_records: skip", ""),
        ("corpus source files", "--corpus"),
        ("corpus source 'by-hand'", "--corpus"),
        ("(text_key)", "(--text-key)"),
    ):
        message = message.replace(theirs, ours)
    if message.endswith(("(it held no record)", "too_short)")):
        message += "; give files that hold text"
    return message


def _write_store(files: list[Path], corpus: Sequence[str], tokenizer: Path, text_key: str, kind: Measure, root: Path) -> None:
    source = params.Source(name="by-hand", files=", ".join(corpus), text_key=text_key, assign="hash" if kind.trains else "test")
    write_documents(source, params.Corpus(sources=(source,), split=_SHIFT_SPLIT), root / "documents", files=files)
    size = symbols(load_tokenizer(tokenizer))
    with PhaseProgress(files[0].name) as progress:
        write_tokens(
            root / "documents",
            tokenizer,
            params.Store(),
            size,
            root / "tokens",
            progress=lambda done, total: progress("tokenising", done, total or done),
        )
    write_store([root / "tokens"], size, root / "store", to_train_on=False)
    (root / "documents" / "documents.parquet").unlink()
    if kind.trains:
        store = TokenStore(root / "store")
        if empty := [split for split in ("train", "test") if not len(store.documents(split))]:
            (root / "store" / MANIFEST).unlink()
            raise FarstateError(
                f"--corpus: all documents fell on one side, none is left for '{empty[0]}'; states are compared across documents: "
                "give more of them"
            )


def _broken(manifest: Mapping[str, Any]) -> list[str]:
    """Lines about what is not finite: the manifests of the stages say it by kind, as one place, or by position."""
    broken = manifest.get("broken_at") or {}
    places = {"": broken} if "position" in broken else broken
    lines = []
    for name, where in places.items():
        if isinstance(where, Mapping):
            texts = f"{where['stretches']} of {manifest['stretches']} texts"
            lines.append(
                f"not finite: {name + ', ' if name else ''}first at position {where['position']} ({texts}), first in document "
                f"{where['document']}"
            )
        elif where:
            lines.append(f"not finite: at position {name}, first in document {where[0]}")
    return lines


def _within(rule: str, given: params.Texts, context: int) -> list[str]:
    """A line where nothing beyond the training length was measured."""
    if rule != "perplexity" or given.length > context:
        return []
    return [f"no position beyond the training length was measured: --length {given.length}, T_train {context}"]


def _unanswered(output: Path, manifest: Mapping[str, Any]) -> list[str]:
    """A line for each table with rows that hold a reason in place of a number."""
    lines = []
    for name in sorted(manifest["files"]):
        table = pl.scan_parquet(output / name)
        if "reason" in table.collect_schema():
            reasons = table.select("reason").collect()["reason"]
            if given := reasons.drop_nulls().to_list():
                lines.append(f"{name}: no number in {len(given)} of {len(reasons)} rows: {given[0]}")
    return lines
