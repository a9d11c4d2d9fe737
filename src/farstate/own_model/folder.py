"""The folder of one diagnosis or repair: its parameters, what outside inputs contain, and the repository whose rules run in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from farstate import sources
from farstate.errors import FarstateError, nearest
from farstate.files import read_json, write_json, write_text
from farstate.own_model.checkpoint import Known
from farstate.params import Params, merge, read_yaml, validate
from farstate.plan import Plan

ASKED = "own_model.json"
PARAMS = "params.yaml"
HOME = Path("own_models")
_HEADER = "# Written by `farstate {command}`; a change here is overwritten by the next call, give --set KEY=VALUE instead.\n"
_OWN_TEXTS = "own-texts"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
# Peak rates of the paper's pre-trainings by parameters, as config/paper.yaml has them (Table 2 of the Mamba paper, assumed there).
_RATES = ((250e6, 3.0e-3), (600e6, 1.5e-3), (1.0e9, 1.25e-3), (2.0e9, 1.0e-3), (float("inf"), 8.0e-4))
_TENTH = 0.1
# Sequences of a post-training batch. The paper's has 524,288 tokens; on a small machine that is hours.
_SEQUENCES, _MOST_TOKENS = 64, 524288


def repository() -> Path:
    """The checkout whose rules are run: that of this package, else the working directory.

    Raises:
        FarstateError: neither holds a `workflow/Snakefile`.
    """
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "workflow" / "Snakefile").is_file():
            return root
    raise FarstateError(
        "no workflow/Snakefile: Farstate is installed without its repository, whose rules this command runs; clone the repository and "
        "call it there, or install it with pip install -e"
    )


@dataclass(frozen=True)
class Corpus:
    """Which texts: sources and their split, as parameters; `given` names them for readers, `trains`: some are to train on."""

    given: str
    sources: tuple[dict[str, Any], ...]
    split: dict[str, Any]
    trains: bool = True


def corpus_of(given: Sequence[str], root: Path, *, trains: bool) -> Corpus:
    """The demo's books, own texts (files, globs, folders), or a data set on the hub.

    Args:
        given: what the user named; empty: the demo's books.
        root: the repository, whose `params.yaml` names the books.
        trains: whether a part of own texts is trained on: then they are split by their content, otherwise all are held out. Documents
            of the books are split as the demo's are, so that its models have not been trained on those that are read.

    Raises:
        FarstateError: nothing is there under a name that cannot be one of the hub.
    """
    if not given:
        demo = read_yaml(root / PARAMS)["corpus"]
        return Corpus("the demo's books", tuple(demo["sources"]), demo["split"])
    found = []
    for number, where in enumerate(given):
        name = _OWN_TEXTS if number == 0 else f"{_OWN_TEXTS}-{number + 1}"
        path = Path(where).expanduser()
        source: dict[str, Any] = {"name": name, "assign": "hash" if trains else "test"}
        pattern = str((path / "**" / "*") if path.is_dir() else path)
        if sources.local_files(sources.Outside("files", str(Path(pattern).absolute()))):
            found.append({**source, "files": str(Path(pattern).absolute())})
        elif _HUB_NAME.fullmatch(where):
            found.append({**source, "hub": where})
        else:
            raise FarstateError(
                f"--corpus: {where}: no file matches, and it is no name on the hub; give an existing path or glob"
            )
    split = {"validation": 0.0, "test": 0.4 if trains else 0.0, "salt": "farstate"}
    return Corpus(", ".join(given), tuple(found), split, trains)


def peak_rate(known: Known) -> tuple[float, str]:
    """A tenth of the pre-training's peak rate, and in words where that is from."""
    if known.pretraining_rate is not None:
        return _TENTH * known.pretraining_rate, "a tenth of the peak rate that its own pre-training's record tells"
    size = known.config.parameter_count()
    rate = next(rate for most, rate in _RATES if size <= most)
    return _TENTH * rate, f"a tenth of {rate:g}, the paper's rate for models of that size [assumed]"


def batch_tokens(context: int) -> int:
    """Tokens of a post-training step: as many sequences as the paper's tokens hold, at most 64."""
    return context * max(1, min(_SEQUENCES, _MOST_TOKENS // context))


def parameters(
    known: Known,
    corpus: Corpus,
    root: Path,
    sections: Mapping[str, Any],
    figures: Mapping[str, Any],
    *,
    arms: Mapping[str, Any],
    steps: int,
    seeds: Sequence[int],
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """All parameters, as they are written into the folder.

    Args:
        sections: what is measured (`budgets.measurements`).
        figures: by name.
        arms: of the post-training.
        overrides: what the user set, over everything.
    """
    rate, _ = peak_rate(known)
    tokens = batch_tokens(known.context)
    given: dict[str, Any] = {
        "corpus": {
            **{"sources": list(corpus.sources), "damaged_records": "stop", "minimum_bytes": 1, "split": corpus.split},
            **({} if corpus.trains else {"to_train_on": False}),
        },
        "tokenizer": {"kind": "file", "vocabulary_size": known.symbols, "file": str(known.tokenizer)},
        "models": {
            known.name: {"architecture": known.config.architecture, "context": known.context, "checkpoint": known.where},
        },
        # The checkpoint takes its place; the parameters want the section.
        "pretrain": {"tokens": known.context, "recipe": {"batch_tokens": known.context, "peak_learning_rate": 1.0e-3}},
        "posttrain": {
            "steps": steps,
            "seeds": list(seeds),
            "recipe": {"batch_tokens": tokens, "peak_learning_rate": rate, "final_learning_rate": min(1.0e-5, rate)},
            "arms": dict(arms),
        },
        **sections,
        "figures": {name: {**figure, "models": [known.name]} for name, figure in figures.items()},
        "report": {"paper_values": False, "scale": "own"},
    }
    return merge(json.loads(json.dumps(given)), dict(overrides))


def overrides_of(given: Sequence[str]) -> dict[str, Any]:
    """What `--set KEY=VALUE` gave, as a nested mapping; values are read as YAML.

    Raises:
        FarstateError: no `=`, no key, or a value that is no YAML.
    """
    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not all(key.split(".")):
            raise FarstateError(f"--set {item}: KEY=VALUE is expected, like posttrain.recipe.peak_learning_rate=3.0e-4")
        try:
            inner: Any = yaml.safe_load(value)
        except yaml.YAMLError:
            raise FarstateError(f"--set {item}: the value is not valid YAML; put text in quotes") from None
        if isinstance(inner, str):
            with contextlib.suppress(ValueError):  # YAML 1.1 takes 1e-3 for text
                inner = float(inner)
        for part in reversed(key.split(".")):
            inner = {part: inner}
        found = merge(found, inner)
    return found


def arms_of(names: Sequence[str], root: Path, *, control: bool) -> dict[str, Any]:
    """The arms asked for, as the paper's parameters have them, the control first.

    Raises:
        FarstateError: a name that is none of them.
    """
    known: dict[str, Any] = read_yaml(root / "config" / "paper.yaml")["posttrain"]["arms"]
    others = [name for name in known if name != "control"]
    for name in names:
        if name not in others:
            raise FarstateError(f"--with: '{name}' is not an intervention{nearest(name, others)}; known: {', '.join(others)}")
    return {name: known[name] for name in (*(("control",) if control else ()), *dict.fromkeys(names))}


def place(output: Path | None, known: Known, asked: Mapping[str, Any]) -> Path:
    """The folder for what was asked, made; one that holds something else is refused.

    Raises:
        FarstateError: it holds what another question, or something else, has written.
    """
    told = {"checkpoint": known.where, "tokenizer": str(known.tokenizer), "context": known.context, **asked}
    if output is None:
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
        output = HOME / f"{known.name}-{digest}"
    if output.exists() and not output.is_dir():
        raise FarstateError(f"--output: {output} is a file; give a folder")
    found: Any = {}
    if output.is_dir() and any(output.iterdir()):
        found = read_json(output / ASKED) if (output / ASKED).is_file() else None
        if not isinstance(found, dict) or found.get("checkpoint") != known.where:
            raise FarstateError(
                f"--output: {output} holds something else than results of {known.given}; give a new or empty folder"
            )
    write_json(output / ASKED, {**told, "repaired": found.get("repaired", {})})
    return output


def write_parameters(folder: Path, given: Mapping[str, Any], command: str) -> Params:
    """Check the parameters and write them, where they are not those that stand there.

    Raises:
        FarstateError: they contradict each other, or what was set is none.
    """
    params = validate(dict(given), "--set")
    text = _HEADER.format(command=command) + yaml.safe_dump(dict(given), sort_keys=False, allow_unicode=True)
    path = folder / PARAMS
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)
    return params


def register(folder: Path, params: Params) -> Plan:
    """Record what the outside inputs contain, as `farstate register` does, and return the plan that stands on it.

    What the lock names already and is still there unchanged is not read again.

    Raises:
        FarstateError: an input is not there.
    """
    with contextlib.chdir(folder):
        for outside in Plan(params, sources.read_lock()).outside():
            try:
                sources.check(outside)
            except FarstateError:
                sources.register(outside)
        return Plan(params, sources.read_lock())
