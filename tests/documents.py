"""What a documentation page says, taken apart: links, anchors, code spans, fenced blocks; and what may be named in them.

Fenced blocks have a language and perhaps a word after it:

    ```python           runs, all blocks of a page in order, in one namespace, in an empty folder, offline, on a CPU
    ```bash test        runs in a clone with the demo's parameters and no results
    ```bash dry         the same with `snakemake` and `make` as dry runs
    anything else       is not run; its commands, options and keys are still looked up
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from markdown_it import MarkdownIt
from pydantic import BaseModel

from farstate.command_page import commands
from farstate.params import Params
from farstate.reports.figures import FIGURES
from farstate.settings import Settings

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((REPOSITORY / "docs").rglob("*.md"))
GENERATED = ("docs/parameters.md", "docs/commands.md", "docs/tables.md")
MADE = ("results", "reports", "logs", "summary", "own_models", ".farstate", ".superseded", ".snakemake", ".venv", "dvc_plots")
"""Folders that runs make: paths into them are not looked for, but for modules of the package's folder of the same name."""
MADE_FILES = ("config/recorded", ".dvc/config.local")
ENDINGS = ("md", "py", "smk", "yaml", "yml", "json", "csv", "svg", "png", "txt", "toml", "lock", "cff", "def", "j2", "js", "css")


@dataclass(frozen=True)
class Block:
    language: str
    marker: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    """A page of Markdown.

    Attributes:
        links: targets of links and images, with their lines.
        spans: code spans, with the lines of their paragraphs.
        blocks: fenced blocks.
        anchors: as GitHub makes them of headings.
    """

    path: Path
    links: tuple[tuple[str, int], ...]
    spans: tuple[tuple[str, int], ...]
    blocks: tuple[Block, ...]
    anchors: frozenset[str]


@cache
def read(path: Path) -> Page:
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    links, spans, blocks, anchors = [], [], [], []
    line = 0
    for number, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else line
        if token.type == "fence":
            language, _, marker = token.info.strip().partition(" ")
            blocks.append(Block(language, marker, token.content, line))
        if token.type != "inline":
            continue
        children = token.children or []
        spans += [(child.content, line) for child in children if child.type == "code_inline"]
        links += [(str(child.attrs.get("href") or child.attrs.get("src")), line) for child in children if child.attrs]
        if tokens[number - 1].type == "heading_open":
            heading = "".join(child.content for child in children if child.type in ("text", "code_inline"))
            anchor = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
            anchors.append(f"{anchor}-{anchors.count(anchor)}" if anchor in anchors else anchor)
    return Page(path, tuple(links), tuple(spans), tuple(blocks), frozenset(anchors))


def command_lines(page: Page) -> Iterator[tuple[list[str], int]]:
    """Every call of farstate, make, snakemake in code spans and in blocks without a language or of a shell's, as words."""
    sources = list(page.spans)
    for block in page.blocks:
        if block.language in ("", "bash", "sh", "shell"):
            text = block.text.replace("\\\n", "  ")
            sources += [(line, block.line + number) for number, line in enumerate(text.splitlines(), start=1)]
    for text, line in sources:
        for part in re.split(r"&&|\|\||;|\|(?= )|\bdo\b|\bthen\b", text.replace("\\|", "|")):
            try:
                words = shlex.split(part.strip().removeprefix("$ "), comments=True)
            except ValueError:
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if len(words) > 1 and words[0] in ("farstate", "make", "snakemake"):
                yield words, line


def wrong_call(words: list[str]) -> str | None:
    """What a call names that does not exist."""
    return {"farstate": _wrong_farstate, "make": _wrong_make, "snakemake": _wrong_snakemake}[words[0]](words[1:])


def _wrong_farstate(words: list[str]) -> str | None:
    known = commands()
    if words[0].startswith("-"):
        return None if words[0] in ("--help", "-h") else f"farstate has no option {words[0]}"
    if words[0].isupper() or words[0] in ("…", "..."):
        return None
    for name in words[0].split("|"):
        if name not in known:
            return f"farstate has no command '{name}'"
        options = {option for parameter in known[name].params for option in (*parameter.opts, *parameter.secondary_opts)} | {
            "--help",
            "-h",
        }
        for word in words[1:]:
            if (option := word.strip("[]").partition("=")[0]).startswith("-") and len(option) > 1 and option not in options:
                return f"farstate {name} has no option {option}"
    return None


def _wrong_make(words: list[str]) -> str | None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    called = [word for word in words if "=" not in word and not word.startswith("-")]
    return next((f"make has no target '{word}'" for word in called if word not in targets), None)


def _wrong_snakemake(words: list[str]) -> str | None:
    try:
        given = _snakemake().parse_args([word for word in words if word not in ("…", "...")])
    except SystemExit as end:
        if not end.code:
            return None  # --help, --version
        return f"snakemake does not take {' '.join(words)}"
    return next((wrong for target in given.targets if (wrong := _wrong_target(target))), None)


@cache
def _snakemake() -> Any:
    from snakemake.cli import get_argument_parser

    return get_argument_parser()


@cache
def rule_names() -> frozenset[str]:
    files = [REPOSITORY / "workflow/Snakefile", *(REPOSITORY / "rules").glob("*.smk")]
    return frozenset(name for file in files for name in re.findall(r"^rule (\w+):", file.read_text(), re.MULTILINE))


def _wrong_target(target: str) -> str | None:
    if match := re.fullmatch(r"reports/([a-z0-9_]+)\.(html|svg|png|json|parquet|csv)", target):
        return None if match[1] in FIGURES or match[1] == "index" else f"there is no page {target}"
    if target.startswith("results/") or target in rule_names() or target.isupper():
        return None
    return f"'{target}' is no target"


def wrong_key(span: str) -> str | None:
    """What a dotted key of params.yaml or config/settings.yaml names that does not exist; None for other things too."""
    text = re.sub(r"\[\]", "", span)
    if not re.fullmatch(r"[a-z][a-z_0-9]*(\.(<[a-z]+>|[\w-]+))+", text) or text.rpartition(".")[2] in (
        *ENDINGS,
        "parquet",
        "jsonl",
    ):
        return None
    parts = text.split(".")
    for model in (Params, Settings):
        if parts[0] in model.model_fields:
            return None if _has(model, parts) else f"there is no parameter '{span}'"
    return None


def wrong_mapping(value: Any, prefix: tuple[str, ...] = ()) -> str | None:
    """The first key of a YAML block that neither Params nor Settings has; blocks that begin with other keys are not theirs."""
    if isinstance(value, dict):
        for key, inner in value.items():
            path = (*prefix, str(key))
            owner = next((model for model in (Params, Settings) if path[0] in model.model_fields), None)
            if owner is None:
                return None
            if not _has(owner, list(path)):
                return f"there is no parameter '{'.'.join(path)}'"
            if wrong := wrong_mapping(inner, path):
                return wrong
    elif isinstance(value, list):
        return next((wrong for item in value if (wrong := wrong_mapping(item, prefix))), None)
    return None


def _has(model: Any, parts: list[str]) -> bool:
    """Whether a key below `model` exists; names of models, arms, figures … are free where they are free in the parameters."""
    places: list[Any] = [model]
    for part in parts:
        following: list[Any] = []
        for place in places:
            following += _below(place, part)
        if not following:
            return False
        places = following
    return True


def _below(annotation: Any, part: str) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(part)
        return [field.annotation] if field else []
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return [arguments[1]]
    if origin is Literal:
        return []
    return [found for argument in arguments for found in _below(argument, part)]


def missing_path(span: str) -> str | None:
    """A path of the repository that a code span or text names and that is not there."""
    text = span.removeprefix("./").rstrip("/")
    if not re.fullmatch(r"\.?[A-Za-z][\w.-]*(/[\w.-]+)*", text):
        return None
    first = text.partition("/")[0]
    if text.startswith(MADE_FILES) or (first in MADE and not text.endswith(".py")):
        return None
    tops = {path.name for path in REPOSITORY.iterdir()} - set(MADE)
    package = {path.name for path in (REPOSITORY / "src/farstate").iterdir()}
    if "/" not in text:
        if text.rpartition(".")[2] not in ("md", "smk", "toml", "cff") or text in tops:
            return None
        return None if list(REPOSITORY.glob(f"docs/{text}")) + list(REPOSITORY.glob(f"rules/{text}")) else text
    if (
        first in tops
        and not (REPOSITORY / text).exists()
        and not (first in package and (REPOSITORY / "src/farstate" / text).exists())
    ):
        return text
    if (
        first in package
        and first not in tops
        and "." in text.rpartition("/")[2]
        and not (REPOSITORY / "src/farstate" / text).exists()
    ):
        return text
    return None
