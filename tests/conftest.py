"""Shared fixtures: where the test data is, and a clone of the working tree to run the workflow in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from filelock import FileLock

# Tensors here are tiny, and the threads of a job that runs beside others wait for each other most of the time.
if "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)

# Before any kernel is imported: without a GPU, Triton's interpreter runs them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

REPOSITORY = Path(__file__).resolve().parent.parent
# Real data that no package delivers; tests that read them are skipped where they are absent.
SHARED = Path(os.environ.get("FARSTATE_SHARED", REPOSITORY.parent / "shared"))


# Files whose tests run pipelines, the longest first: the two workers of a run, which take file after file, then end at about the same time.
_LONGEST = ("test_workflow.py", "test_dvc.py", "test_slurm.py", "test_faults.py", "test_distributed.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONGEST.index(item.path.name) if item.path.name in _LONGEST else len(_LONGEST))


def environment(clone: Path, **extra: str) -> dict[str, str]:
    """The environment of a command run in `clone`: its own source first, no profile or cache of the caller's."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SNAKEMAKE_", "FARSTATE_", "OMP_NUM"))}
    return {
        **kept,
        "PYTHONPATH": str(clone / "src"),
        "PATH": str(Path(sys.executable).parent) + os.pathsep + kept["PATH"],
        "OMP_WAIT_POLICY": "PASSIVE",
        "DVC_NO_ANALYTICS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        **extra,
    }


def run(clone: Path, *command: str, check: bool = True, timeout: float = 1200, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `clone` as a user would; its output, both streams together, in `stdout`."""
    done = subprocess.run(
        command,
        cwd=clone,
        env=environment(clone, **extra),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        check=False,
    )
    if check:
        assert done.returncode == 0, f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout[-6000:]}"
    return done


def make_clone(target: Path) -> Path:
    """Copy what git would carry (tracked and new files) to `target` and commit it there; `params.yaml` is the test's."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=REPOSITORY, capture_output=True, check=True
    )
    for name in listed.stdout.decode().split("\0"):
        source = REPOSITORY / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    shutil.copy(REPOSITORY / "config/test.yaml", target / "params.yaml")
    for command in (
        ["git", "init", "-q"],
        ["git", "config", "user.email", "test@example.org"],
        ["git", "config", "user.name", "test"],
        ["git", "add", "-A"],
        ["git", "commit", "-qm", "clone"],
    ):
        subprocess.run(command, cwd=target, check=True, capture_output=True)
    return target


@pytest.fixture(scope="session")
def finished_clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which `snakemake` ran to the end on the test configuration: one for all workers, copied by each."""
    own = tmp_path_factory.getbasetemp()
    clone = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "finished"
    with FileLock(clone.with_suffix(".lock")):
        if not clone.exists():
            made = make_clone(tmp_path_factory.mktemp("making") / "clone")
            run(made, "snakemake")
            made.rename(clone)
    return shutil.copytree(clone, own / "finished_copy", symlinks=True)


@pytest.fixture
def clone_with_results(finished_clone: Path, tmp_path: Path) -> Path:
    """A clone of its own with all results of `finished_clone` in it, to be edited freely."""
    return shutil.copytree(finished_clone, tmp_path / "clone", symlinks=True)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that is used before it is written shows up as NaN."""
    torch.use_deterministic_algorithms(True)
    previous = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = previous
    torch.use_deterministic_algorithms(False)
