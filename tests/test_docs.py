"""The documentation: links, names of files, commands, options, parameters, and the code it shows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import environment, make_clone
from documents import (
    GENERATED,
    PAGES,
    REPOSITORY,
    Page,
    command_lines,
    missing_path,
    read,
    wrong_call,
    wrong_key,
    wrong_mapping,
)
from farstate.command_page import commands
from farstate.reference_pages import reference_pages

WRITTEN = [path for path in PAGES if str(path.relative_to(REPOSITORY)) not in GENERATED]


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@pytest.fixture(params=PAGES, ids=name)
def page(request: pytest.FixtureRequest) -> Page:
    return read(request.param)


@pytest.fixture(params=WRITTEN, ids=name)
def written(request: pytest.FixtureRequest) -> Page:
    return read(request.param)


def test_links_lead_somewhere(page: Page) -> None:
    broken = []
    for target, line in page.links:
        if re.match(r"(https?|mailto):", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.path.parent / file).resolve() if file else page.path
        if not there.exists():
            broken.append(f"line {line}: {target}: no such file")
        elif anchor and there.suffix == ".md" and anchor not in read(there).anchors:
            broken.append(f"line {line}: {target}: no such heading")
    assert not broken, broken


def test_every_page_can_be_reached_from_the_readme() -> None:
    found, waiting = set(), [REPOSITORY / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in found or path.suffix != ".md" or not path.exists():
            continue
        found.add(path)
        waiting += [(path.parent / target.partition("#")[0]).resolve() for target, _ in read(path).links if ":" not in target]
    assert {name(path) for path in PAGES} - {"CONTRIBUTING.md"} <= {name(path) for path in found}


MADE_HERE = r"`([^`]+)`:? <!-- made here -->"


def test_files_that_are_named_exist(written: Page) -> None:
    text = written.path.read_text(encoding="utf-8")
    # Files that a reader of the page makes.
    text, made = re.sub(MADE_HERE, "", text), {match[1] for match in re.finditer(MADE_HERE, text)}
    wrong = [f"line {line}: {missing}" for span, line in written.spans if span not in made and (missing := missing_path(span))]
    wrong += [
        found
        for found in re.findall(r"\b(?:docs|tests|src|rules|config|benchmarks)/[\w./-]*\w\.\w+", text)
        if missing_path(found)
    ]
    assert not wrong, wrong


def test_commands_options_and_targets_that_are_named_exist(page: Page) -> None:
    wrong = [f"line {line}: {told}" for words, line in command_lines(page) if (told := wrong_call(words))]
    assert not wrong, wrong


def test_parameters_that_are_named_exist(written: Page) -> None:
    wrong = [f"line {line}: {told}" for span, line in written.spans if (told := wrong_key(span))]
    for block in written.blocks:
        if block.language == "yaml" and not block.marker and (told := wrong_mapping(yaml.safe_load(block.text))):
            wrong.append(f"line {block.line}: {told}")
    assert not wrong, wrong


def test_the_checks_see_mistakes() -> None:
    """Each check refuses what it is there for."""
    assert wrong_call(["farstate", "perplexty", "X"])
    assert wrong_call(["farstate", "plan", "--clusters"])
    assert wrong_call(["make", "demos"])
    assert wrong_call(["snakemake", "reports/fig8.html"])
    assert wrong_call(["snakemake", "--profil-of", "x"])
    assert not wrong_call(["snakemake", "-n", "reports/fig5.html", "--config", "posttrain={steps: 300}"])
    assert not wrong_call(["farstate", "perplexity|states", "CHECKPOINT", "--corpus", "TEXTS"])
    assert wrong_key("posttrain.arms.random_noise.sigmma")
    assert wrong_key("corpus.sourcs")
    assert not wrong_key("posttrain.arms.<name>.sigma")
    assert not wrong_key("models.mine.shape.width")
    assert wrong_mapping({"models": {"mine": {"shape": {"widht": 3}}}})
    assert wrong_mapping({"corpus": {"sources": [{"nmae": "x"}]}})
    assert missing_path("docs/nothing.md")
    assert missing_path("evaluation/nothing.py")
    assert not missing_path("evaluation/perplexity.py")


def _with(language: str, *markers: str) -> list[Path]:
    return [path for path in PAGES if any(b.language == language and b.marker in markers for b in read(path).blocks)]


@pytest.mark.parametrize("path", _with("python", ""), ids=name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    for block in read(path).blocks:
        if block.language == "python" and not block.marker:
            # Blank lines put the lines of a traceback where they stand in the page.
            exec(compile("\n" * block.line + block.text, str(path), "exec"), namespace)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the demo's parameters and no results."""
    target = make_clone(tmp_path_factory.mktemp("docs") / "clone")
    subprocess.run(["git", "checkout", "-q", "--", "."], cwd=target, check=True)
    (target / "params.yaml").write_bytes((REPOSITORY / "params.yaml").read_bytes())
    subprocess.run(["git", "commit", "-qam", "the demo"], cwd=target, check=True)
    return target


DRY = 'snakemake() { command snakemake "$@" -n -q all; }; make() { command make -n "$@"; }\n'


@pytest.mark.workflow
@pytest.mark.parametrize("path", _with("bash", "test", "dry"), ids=name)
def test_shell_blocks_run(path: Path, clone: Path) -> None:
    """All marked blocks of a page, in order, in one shell; the folder is as it was before afterwards."""
    blocks = [block for block in read(path).blocks if block.language == "bash" and block.marker in ("test", "dry")]
    script = "".join((DRY if block.marker == "dry" else "unset -f snakemake make\n") + block.text for block in blocks)
    env = environment(clone) | {"HOME": str(clone), "GIT_CONFIG_NOSYSTEM": "1", "PATH": environment(clone)["PATH"]}
    done = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=clone, env=env, text=True, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    subprocess.run(["git", "checkout", "-q", "--", "."], cwd=clone, check=True)
    subprocess.run(["git", "clean", "-qfd"], cwd=clone, check=True)


def test_generated_pages_are_what_the_code_says() -> None:
    for path, text in reference_pages().items():
        assert (REPOSITORY / path).read_text(encoding="utf-8") == text, f"{path}: run `farstate schema`"


def test_every_command_and_every_option_says_what_it_is_for() -> None:
    for command_name, command in commands().items():
        assert command.help, command_name
        for parameter in command.params:
            assert parameter.help or parameter.hidden, f"{command_name} {parameter.name}"
            # Help is Markdown: what stands in angle brackets is shown only within a code span.
            assert "<" not in re.sub("`[^`]*`", "", parameter.help or ""), f"{command_name} {parameter.name}"


def test_the_reference_needs_no_torch() -> None:
    code = "import sys, farstate.reference_pages as r; r.reference_pages(); print([m for m in ('torch', 'polars', 'altair') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment(REPOSITORY), text=True, capture_output=True, check=True
    )
    assert done.stdout.strip() == "[]"
