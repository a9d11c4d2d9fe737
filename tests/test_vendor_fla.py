"""fla's operations through our wrappers. Its chunked kernels are the real ones, interpreted (interpreted_vendors.py)."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from farstate.errors import FarstateError
from farstate.ops import backends, checks
from farstate.ops.vendors import fla
from farstate.ops.vendors.submodules import import_submodule
from test_vendor_mamba_ssm import agrees, interpreted

pytestmark = [
    pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed"),
]

TOLERANCE = 2e-5
# The library differentiates decays by differences of sums, of which strong decays leave rounding.
TOLERANCES = {"ssd, extreme decays": 1e-3}


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    return interpreted("fla")


@pytest.mark.parametrize(
    "case",
    [
        *(f"{name}, {case}" for name in ("ssd", "gla", "wkv6", "gated_delta") for case in ("past a chunk", "extreme decays")),
        "gla, own scale, from zero",
        "gated_delta, own scale, from zero",
        "gated_delta, in pieces",
        "ssd, two groups, no skip",
    ],
)
def test_outputs_states_and_gradients_are_those_of_the_definition(cases: dict[str, Any], case: str) -> None:
    agrees(cases[case], TOLERANCES.get(case, TOLERANCE))


def test_pieces_and_dtypes(cases: dict[str, Any]) -> None:
    assert cases["lengths of pieces"] == [64]
    assert cases["dtypes"] == ["torch.float16", "torch.float32"]


def test_operations_load_without_layers_models_and_transformers(cases: dict[str, Any]) -> None:
    assert cases["loaded"] == []


@pytest.mark.parametrize("operation", ["ssd", "gla", "wkv6", "gated_delta"])
def test_float64_is_refused(operation: str) -> None:
    with pytest.raises(TypeError, match="float64"):
        backends.load(operation, "fla")(**checks.inputs(operation))


def test_what_the_library_cannot_do_is_refused_in_one_line() -> None:
    q = torch.zeros(1, 2, 1, 257)
    with pytest.raises(FarstateError, match="at most 256 keys a head, this model has 257"):
        fla.gated_delta(q, q, q, q[..., 0], q[..., 0])
    with pytest.raises(ValueError, match="chunks of 64"):
        fla.gla(q, q, q, q, chunk_length=32)


def test_a_package_runs_its_code_when_asked_for_more(tmp_path: Path) -> None:
    """What `import_submodule` leaves behind is the real package to whoever imports it afterwards."""
    package = tmp_path / "lazily_tested"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("import builtins\nbuiltins.lazily_ran = True\nfrom .other import value\n")
    (package / "other.py").write_text("value = 7\n")
    (package / "inner" / "__init__.py").write_text("raise RuntimeError('slow or broken')\n")
    (package / "inner" / "operation.py").write_text("from lazily_tested import __version__ as version\n")
    code = f"""
import builtins, sys
sys.path.insert(0, {str(tmp_path)!r})
from farstate.ops.vendors.submodules import import_submodule
operation = import_submodule("lazily_tested.inner.operation", "torch")
assert operation.version.startswith("2."), operation.version
assert not hasattr(builtins, "lazily_ran")
import lazily_tested.inner.operation as again
assert again is operation
from lazily_tested import value
assert value == 7 and builtins.lazily_ran
import lazily_tested
assert type(lazily_tested) is type(sys) and lazily_tested.inner.operation is operation
try:
    lazily_tested.inner.missing
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "slow or broken", done.stderr[-2000:]


def test_absent_libraries_are_import_errors() -> None:
    with pytest.raises(ImportError, match="no_such_library"):
        import_submodule("no_such_library.ops", "no-such-library")
