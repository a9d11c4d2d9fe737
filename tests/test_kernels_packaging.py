"""`farstate.kernels` is installed from the folder `kernels`, hides nobody's package, and compiles without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import REPOSITORY
from farstate.kernels import aot
from farstate.ops import backends


def python(code: str, folder: Path, *options: str) -> str:
    """What `code` prints when Python starts in `folder`, which is then the first place it imports from."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_kernels_are_importable_from_anywhere(tmp_path: Path) -> None:
    found = python("import farstate.kernels.aot as module; print(module.__file__)", tmp_path)
    assert Path(found) == REPOSITORY / "kernels/aot.py"


def test_there_is_no_top_level_package_of_ours() -> None:
    code = "import farstate.kernels\ntry:\n    import kernels.aot\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert python(code, REPOSITORY) == "No module named 'kernels.aot'"


def test_the_package_of_that_name_is_found_from_the_repository(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/__init__.py").write_text("from kernels.part import value\n")
    (tmp_path / "kernels/part.py").write_text("value = 7\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels, farstate.kernels; print(kernels.value, kernels.__file__)"
    assert python(code, REPOSITORY) == f"7 {tmp_path / 'kernels/__init__.py'}"


def test_transformers_works_from_the_repository() -> None:
    code = (
        "import torch\n"
        "from transformers import MambaConfig, MambaForCausalLM\n"
        "from transformers.utils.import_utils import is_kernels_available\n"
        "from importlib.metadata import packages_distributions\n"
        "config = MambaConfig(vocab_size=11, hidden_size=8, state_size=4, num_hidden_layers=1)\n"
        "logits = MambaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits\n"
        "print(tuple(logits.shape), is_kernels_available() == ('kernels' in packages_distributions()))"
    )
    assert python(code, REPOSITORY) == "(1, 3, 11) True"


def test_the_wheel_holds_both_places(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path / "wheel"),
    ]
    # From a copy: building leaves folders behind.
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("src", "kernels", "pyproject.toml", "setup.py", "requirements.txt", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(REPOSITORY / name), str(copy)], check=True)
    subprocess.run([*command, str(copy)], check=True, timeout=120)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"farstate/kernels/__init__.py", "farstate/kernels/aot.py", "farstate/models/mamba2/block.py"} <= set(names)
    assert {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")} == {"farstate"}


def test_a_kernel_of_the_interpreter_is_refused() -> None:
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        aot.compile_for(lambda: None, {}, {}, 90)


def test_a_failed_compilation_says_why() -> None:
    with pytest.raises(RuntimeError, match="no_such_kernel"):
        aot.compile_in_child([aot.Job("farstate.kernels.aot:no_such_kernel", {}, {}, 90)])


def gpu_script(*arguments: str, visible: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if visible is None else {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, str(REPOSITORY / "benchmarks/gpu.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)


def test_the_gpu_script_says_in_one_line_that_there_is_no_gpu() -> None:
    done = gpu_script(visible="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "no CUDA GPU" in done.stderr


def test_the_gpu_script_runs_through_on_tiny_shapes(tmp_path: Path) -> None:
    done = gpu_script("--cpu-smoke", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    checked = {(row["what"], row["backend"]) for row in rows if row["size"] == "check" and row["error"] is not None}
    assert {(operation, backend) for operation in backends.OPERATIONS for backend in ("naive", "chunked")} <= checked
    assert {(f"{kernel} kernel", "triton") for kernel in ("divergence", "state moments", "initial state")} <= checked
    timed = {row["what"] for row in rows if row["forward_ms"] is not None}
    assert {*backends.OPERATIONS, "divergence", "Mamba-2 model, recording"} <= timed
    skipped = [row["note"] for row in rows if row["size"] == "check" and row["error"] is None]
    assert all(note.startswith("skipped: ") for note in skipped)
