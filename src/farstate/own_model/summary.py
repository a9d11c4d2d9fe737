"""What a diagnosis or a repair says at its end, and the repaired checkpoint with its card."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farstate.files import read_json, write_json, write_text
from farstate.models.checkpoints import export, files_beside
from farstate.own_model.card import card
from farstate.own_model.checkpoint import Known
from farstate.own_model.folder import ASKED
from farstate.plan import Page, Plan
from farstate.reports.diagnosis import Answer, answer
from farstate.runs import BASE, CONTROL

REPAIRED = "repaired"
_WIDTH = 110


@dataclass(frozen=True)
class Result:
    """The plain answer, the page, and where a repaired checkpoint was written, by arm and seed."""

    answer: Answer
    page: Path
    repaired: dict[str, Path]


def result_of(known: Known, plan: Plan, page: Page, folder: Path) -> Result:
    """Read the tables of a finished page, and write the repaired checkpoints that it is about.

    Raises:
        FarstateError: a table is missing, or a checkpoint cannot be written in the format that it came from.
    """
    report = page.params["models"][known.name]
    recipe = {**report["posttrain"], "steps": report["steps"]}
    inputs = {role: [folder / stage.directory for stage in stages] for role, stages in page.inputs.items()}
    found = answer(inputs, known.name, known.given, page.params["figure"], recipe)
    return Result(found, folder / page.outputs["html"], _repaired(known, plan, found, folder, recipe))


def lines(result: Result) -> list[str]:
    """The answer for a terminal."""
    said = ["", *_wrapped(result.answer.headline)]
    for finding in result.answer.findings:
        said += _wrapped(f"{finding.topic} {finding.text}", "  ")
    if result.answer.lines:
        columns = [name for name, _ in result.answer.lines[0]["cells"]]
        rows = [["", *columns], *([line["measure"], *(cell for _, cell in line["cells"])] for line in result.answer.lines)]
        widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))]
        said += [
            "",
            *("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows),
        ]
    said += ["", f"page: {result.page}"]
    said += [f"checkpoint after {name}: {where} (README.md beside it)" for name, where in result.repaired.items()]
    return said


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _repaired(known: Known, plan: Plan, found: Answer, folder: Path, recipe: dict[str, Any]) -> dict[str, Path]:
    """Export each post-trained checkpoint that is no control, unless it is there already."""
    stages = [
        stage
        for stage in plan.of(rule="posttrain")
        if stage.name.removeprefix(f"{known.name}.").rpartition(".s")[0] not in (BASE, CONTROL)
    ]
    written: dict[str, Path] = {}
    for stage in stages:
        arm, _, seed = stage.name.removeprefix(f"{known.name}.").rpartition(".s")
        name = f"{arm}, seed {seed}"
        where = folder / REPAIRED / (f"{arm}.s{seed}" if len(stages) > 1 else "")
        written[name] = where
        told = read_json(folder / ASKED)
        text = card(known, plan, stage, arm, found, recipe)
        if told["repaired"].get(name) == stage.key and (where / "README.md").is_file():
            if (where / "README.md").read_text(encoding="utf-8") != text:
                write_text(where / "README.md", text)
            continue
        _export(known, folder / stage.directory, where)
        write_text(where / "README.md", text)
        write_json(folder / ASKED, {**told, "repaired": {**told["repaired"], name: stage.key}})
    return written


def _export(known: Known, source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    done = export(source, target, known.format)
    # Weights alone went through the training; the tokenizer's files lie beside the checkpoint that came in.
    missing: Sequence[str] = [name for name in files_beside(known.folder) if name not in done.beside]
    for name in missing:
        shutil.copyfile(known.folder / name, target / name)
    if not (target / "tokenizer.json").is_file():
        shutil.copyfile(known.tokenizer, target / "tokenizer.json")
