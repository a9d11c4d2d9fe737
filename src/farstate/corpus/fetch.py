"""Packages of the Python registry as data: fetched by pip, held against a checksum, never installed or run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from farstate.corpus import inert_backend, stage
from farstate.errors import FarstateError
from farstate.files import atomic_path, sha256_file, write_manifest


def fetch_package(pin: str, sha256: str, archive: Literal["wheel", "sdist"], output: Path) -> None:
    """Download the archive of the package `pin` ("name==version") to `output/archive`, with a manifest.

    pip does the transfer, with the mirrors and proxies it is configured for, and refuses an archive of another
    checksum before it looks inside. A wheel is only stored. Of an sdist pip wants to know the metadata, for which it
    would run the package's `setup.py`: an inert build back-end answers in its place (see `inert_backend`).

    Raises:
        FarstateError: wrong checksum, unknown package or version, no connection, no pip.
    """
    stage.begin(output)
    scratch = (output / ".download").absolute()
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        requirements = scratch / "requirements.txt"
        requirements.write_text(f"{pin} --hash=sha256:{sha256}\n", encoding="utf-8")
        backend = scratch / "backend" / "setuptools"
        backend.mkdir(parents=True)
        (backend / "__init__.py").touch()
        shutil.copyfile(inert_backend.__file__, backend / "build_meta.py")
        target = scratch / "files"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--no-input",
            "--progress-bar",
            "off",
            "-vv",
        ]
        command += ["--no-deps", "--require-hashes", "--no-build-isolation", "--dest", str(target), "-r", str(requirements)]
        command += ["--only-binary" if archive == "wheel" else "--no-binary", ":all:"]
        environment = {**os.environ, "PIP_USE_PEP517": "1", "FARSTATE_PIN": pin, "PYTHONPATH": str(backend.parent)}
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=scratch, check=False)
        except OSError as error:
            raise FarstateError(f"{pin}: pip cannot be started ({error})") from None
        files = sorted(target.iterdir()) if target.is_dir() else []
        if done.returncode or len(files) != 1:
            raise FarstateError(_explain(pin, sha256, archive, done.stdout + done.stderr))
        if (found := sha256_file(files[0])) != sha256:
            raise FarstateError(_mismatch(pin, sha256, found))
        with atomic_path(output / stage.ARCHIVE) as temporary:
            os.replace(files[0], temporary)
        contents = {"package": pin, "archive": archive, "original_name": files[0].name, "sha256": sha256}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    write_manifest(output, contents, [stage.ARCHIVE])


def _explain(pin: str, sha256: str, archive: str, log: str) -> str:
    """One line for the reader out of what pip printed."""
    if found := re.search(r"Got\s+([0-9a-f]{64})", log):
        return _mismatch(pin, sha256, found.group(1))
    if "No module named pip" in log:
        return f"{pin}: this Python has no pip ({sys.executable}); install it with {sys.executable} -m ensurepip"
    if re.search(
        r"Could not fetch URL \S+: (connection error|timed out|There was a problem confirming)|Max retries|ReadTimeoutError", log
    ):
        return f"{pin}: the package registry cannot be reached; check the network or PIP_INDEX_URL and PIP_PROXY, then run again"
    if versions := re.search(r"\(from versions: ([^)]*)\)", log):
        known = versions.group(1)
        if known != "none":
            return f"{pin}: the registry has no {archive} of this version; it has {known}"
        return (
            f"{pin}: no {archive} of this package is in the registry or the folders that pip is set to; "
            "check the name and PIP_INDEX_URL, PIP_NO_INDEX, PIP_FIND_LINKS"
        )
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")] or [
        "it says nothing"
    ]
    return f"{pin}: pip download failed ({errors[-1]})"


def _mismatch(pin: str, expected: str, found: str) -> str:
    return f"{pin}: wrong checksum, refused: expected sha256 {expected}, found {found}"
