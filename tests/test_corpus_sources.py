"""Globs: which files and members they name, and what is said when they name none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from farstate.corpus.sources import matches, resolve_files
from farstate.errors import FarstateError


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("a/b/c.txt", "a/b/*.txt", True),
        ("a/b/c.txt", "a/*.txt", False),
        ("a/b/c.txt", "a/**/*.txt", True),
        ("a/c.txt", "a/**/*.txt", True),
        ("a/b/c.txt", "**", True),
        ("a/b/c.txt", "*.txt", True),
        ("a/b/c.txt", "c.tx", False),
        ("a/lost_(no_introduction)_gut.txt", "lost_*_gut.txt", True),
        ("a/b1.txt", "b[0-9].txt", True),
        ("a/b1.txt", "b[!0-9].txt", False),
        ("a/b.txt", "b?txt", True),
        ("a/b.txt", "?/b.txt", True),
        ("a.txt", "a+txt", False),
    ],
)
def test_globs_mean_what_a_shell_means(path: str, pattern: str, expected: bool) -> None:
    assert matches(path, pattern) is expected


def test_files_are_sorted_and_excluded(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "draft.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = resolve_files(f"{tmp_path}/**/*.txt", ["draft.*"])
    assert found == [tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "deep/er/c.txt"]
    assert resolve_files(f"{tmp_path}/**/*.txt", ["**/er/*", "draft.txt"]) == [tmp_path / "a.txt", tmp_path / "b.txt"]


def test_nothing_matches(tmp_path: Path) -> None:
    with pytest.raises(FarstateError, match=r"'.*missing.*': no file matches"):
        resolve_files(f"{tmp_path}/missing/*.txt")
    (tmp_path / "a.txt").touch()
    with pytest.raises(FarstateError, match="all 1 files that match are excluded"):
        resolve_files(f"{tmp_path}/*.txt", ["a.*"])


def test_a_dry_run_imports_nothing_heavy() -> None:
    code = "import sys; import farstate.corpus.sources; print([m for m in ('torch', 'pyarrow', 'numpy', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_only_the_readers_import_torch() -> None:
    modules = ["compressed", "documents", "fetch", "permutation", "records", "sources", "stage", "store", "tokenizer", "tokens"]
    code = f"import sys; [__import__('farstate.corpus.' + m) for m in {modules}]; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
