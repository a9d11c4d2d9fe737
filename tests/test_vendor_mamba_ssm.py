"""mamba-ssm's operations through our wrappers. Its Triton kernels are the real ones, interpreted (interpreted_vendors.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from farstate.ops import checks
from farstate.ops.vendors import mamba_ssm

pytestmark = [
    pytest.mark.skipif(find_spec("mamba_ssm") is None, reason="mamba-ssm is not installed"),
]

TOLERANCE = 5e-6
HALF_TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    return interpreted("mamba_ssm")


def interpreted(library: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "interpreted_vendors.py", library],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def agrees(errors: dict[str, float], tolerance: float) -> None:
    found = {name: errors[name] for name in ("outputs", "final_state", "gradients")}
    print(f"{found}, worst gradient: {errors['worst_gradient']}")
    assert all(error <= tolerance for error in found.values()), found


@pytest.mark.parametrize(
    "case",
    [
        "no whole number of chunks",
        "two groups, one whole chunk, no skip",
        "one position, from zero",
        "extreme decays",
        "in pieces",
        "selective scan",
        "selective scan, from zero, no skip",
        "selective scan, in pieces",
    ],
)
def test_outputs_states_and_gradients_are_those_of_the_definition(cases: dict[str, Any], case: str) -> None:
    agrees(cases[case], TOLERANCE)


def test_half_precision_inputs_keep_float32_states(cases: dict[str, Any]) -> None:
    agrees(cases["half precision, views"], HALF_TOLERANCE)
    assert cases["dtypes"] == ["torch.float16", "torch.float32"]


def test_pieces_are_whole_chunks_that_can_be_addressed(cases: dict[str, Any]) -> None:
    # 64 entries a position, 1,280 addressable: 19 positions, of which one chunk of 16 is whole.
    assert cases["lengths of pieces"] == [16]
    # 30 positions and the 32 before and 32 after that carry the state.
    assert cases["lengths of the scan's pieces"] == [30 + 64]


@pytest.mark.skipif(find_spec("selective_scan_cuda") is not None, reason="the compiled extension is installed")
def test_the_missing_extension_is_named(cases: dict[str, Any]) -> None:
    assert "selective_scan_cuda" in cases["without the extension"]


def test_float64_is_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        mamba_ssm.ssd(**checks.inputs("ssd"))


def test_the_library_loads_without_its_extension_and_without_transformers() -> None:
    code = """
import sys
from farstate.ops.vendors import mamba_ssm
assert mamba_ssm.unavailable("ssd") is None, mamba_ssm.unavailable("ssd")
print([name for name in ("transformers", "selective_scan_cuda", "mamba_ssm.models") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr[-2000:]


def test_64_bit_sizes_are_cut_before_they_wrap() -> None:
    """The published limit of the 1.3B model, whose kernels see rows of 8,512 entries: 252,288 positions in one row."""
    from farstate.ops.vendors.pieces import entries_per_position, piece_length

    assert piece_length(1, 252_288, 8512, 256) == 252_288
    assert piece_length(1, 252_289, 8512, 256) == 252_160
    assert piece_length(8, 2**20, 8512, 256) % 256 == 0
    assert 8 * piece_length(8, 2**20, 8512, 256) * 8512 < 2**31
    with pytest.raises(ValueError, match="lower the batch size"):
        piece_length(2**12, 2**10, 8512, 256)
    # A view of the projection counts with the projection's rows.
    projection = torch.empty(1, 4, 8512, device="meta")
    assert entries_per_position(projection[..., :4096].unflatten(-1, (64, 64))) == 8512
