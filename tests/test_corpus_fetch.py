"""Packages as data: through pip, against a checksum, without running a line of them."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from farstate.corpus.fetch import fetch_package
from farstate.errors import FarstateError
from farstate.files import MANIFEST, read_manifest


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all pip knows of the world."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def wheel(shelf: Path) -> tuple[Path, str]:
    path = shelf / "quiet_books-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("quiet_books/a.txt", "text")
        zipped.writestr("quiet_books-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: quiet-books\nVersion: 1.0\n")
        zipped.writestr("quiet_books-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        zipped.writestr("quiet_books-1.0.dist-info/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def sdist(shelf: Path, marker: Path) -> tuple[Path, str]:
    path = shelf / "loud-books-0.6.tar.gz"
    setup = f"open({str(marker)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='loud-books', version='0.6')\n"
    with tarfile.open(path, "w:gz") as tarred:
        for name, data in {"setup.py": setup, "loud/a.txt": "text", "setuptools.py": f"open({str(marker)!r}, 'w')"}.items():
            entry = tarfile.TarInfo(f"loud-books-0.6/{name}")
            entry.size = len(data)
            tarred.addfile(entry, io.BytesIO(data.encode()))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def test_wheel(shelf: Path, tmp_path: Path) -> None:
    path, digest = wheel(shelf)
    output = tmp_path / "out"
    fetch_package("quiet-books==1.0", digest, "wheel", output)
    assert (output / "archive").read_bytes() == path.read_bytes()
    manifest = read_manifest(output, verify=True)
    assert manifest["original_name"] == path.name
    assert manifest["package"] == "quiet-books==1.0"
    assert sorted(entry.name for entry in output.iterdir()) == ["archive", MANIFEST]


def test_sdist_is_not_run(shelf: Path, tmp_path: Path) -> None:
    path, digest = sdist(shelf, tmp_path / "was-run")
    output = tmp_path / "out"
    (output / ".download").mkdir(parents=True)
    (output / ".download" / "left-by-a-killed-run").touch()
    fetch_package("loud-books==0.6", digest, "sdist", output)
    assert (output / "archive").read_bytes() == path.read_bytes()
    assert not (tmp_path / "was-run").exists()
    assert sorted(entry.name for entry in output.iterdir()) == ["archive", MANIFEST]


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_wrong_checksum_is_refused(shelf: Path, tmp_path: Path, kind: str) -> None:
    _, digest = wheel(shelf) if kind == "wheel" else sdist(shelf, tmp_path / "was-run")
    pin = "quiet-books==1.0" if kind == "wheel" else "loud-books==0.6"
    with pytest.raises(FarstateError, match=f"{pin}: wrong checksum, refused: expected sha256 {'1' * 64}, found {digest}"):
        fetch_package(pin, "1" * 64, kind, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "was-run").exists()
    assert list((tmp_path / "out").iterdir()) == []


def test_unknown_version_and_package(shelf: Path, tmp_path: Path) -> None:
    _, digest = wheel(shelf)
    with pytest.raises(FarstateError, match=r"quiet-books==2\.0: the registry has no wheel of this version; it has 1\.0"):
        fetch_package("quiet-books==2.0", digest, "wheel", tmp_path / "out")
    with pytest.raises(FarstateError, match=r"silent-books==1\.0: no wheel of this package.*PIP_NO_INDEX"):
        fetch_package("silent-books==1.0", digest, "wheel", tmp_path / "out")
    with pytest.raises(FarstateError, match=r"quiet-books==1\.0: no sdist of this package"):
        fetch_package("quiet-books==1.0", digest, "sdist", tmp_path / "out")


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(FarstateError, match=r"quiet-books==1\.0: the package registry cannot be reached; check the network"):
        fetch_package("quiet-books==1.0", "1" * 64, "wheel", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lame = tmp_path / "python"
    lame.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n', encoding="utf-8")
    lame.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(lame))
    with pytest.raises(FarstateError, match="this Python has no pip"):
        fetch_package("quiet-books==1.0", "1" * 64, "wheel", tmp_path / "out")
