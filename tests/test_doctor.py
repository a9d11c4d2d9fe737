"""`farstate doctor`: what it prints, what it finds, how it ends."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from farstate import cli, doctor
from farstate.models.registry import ARCHITECTURES
from farstate.ops import backends
from farstate.ops.checks import Errors


@pytest.fixture(scope="module")
def examined() -> dict[str, Any]:
    """The report of a process of its own, and which slow libraries it had imported by then."""
    code = """
import json, sys
from farstate import doctor
report = doctor.examine("fla")
print(json.dumps({"report": report, "imported": sorted({"transformers", "fla", "mamba_ssm"} & sys.modules.keys())}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture
def report(examined: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(examined["report"])


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str | int | None:
    monkeypatch.setattr(sys, "argv", ["farstate", "doctor", *arguments])
    try:
        cli.main()
    except SystemExit as leave:
        return leave.code
    return 0


def test_every_architecture_has_its_operations_and_a_backend(report: dict[str, Any]) -> None:
    rows = [row for row in report["architectures"] if row["device"] == "cpu"]
    assert {row["architecture"] for row in rows} == set(ARCHITECTURES)
    assert {row["operation"] for row in rows} <= set(backends.OPERATIONS)
    assert all((row["backend"], row["why"]) == ("chunked", "the fastest on a CPU") for row in rows)
    assert {(row["architecture"], row["operation"]) for row in rows} >= {("mamba2", "ssd")}
    # The backend of the settings beside it.
    assert all("fla" in row["requested"] for row in rows)


def test_every_backend_that_can_run_is_checked_and_every_other_has_a_reason(report: dict[str, Any]) -> None:
    device = report["unavailable"][0]["device"] if report["unavailable"] else "cuda"
    checked = {(row["operation"], row["backend"]) for row in report["checks"] if row["device"] == device}
    refused = {(row["operation"], row["backend"]): row["why"] for row in report["unavailable"]}
    known = {(o, b) for o in backends.OPERATIONS for b in ("chunked", *backends.ACCELERATED.get(o, {}))}
    assert checked | refused.keys() == known
    assert not checked & refused.keys()
    assert all(refused.values())
    for row in report["checks"]:
        print(row)
        assert row["passed"]
        assert max(row["outputs"], row["final_state"], row["gradients"]) <= row["tolerance"]
    assert doctor.healthy(report)


def test_the_machine_is_described(report: dict[str, Any]) -> None:
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"].keys() >= {"python", "CUDA of torch", "GPU", "driver", "CPU", "memory", "threads"}
    assert report["libraries"].keys() == {"triton", "mamba_ssm", "causal_conv1d", "fla"}


def test_the_report_prints_and_is_json(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report["checks"][0]["worst_gradient"] = "a_name_that_is_folded"
    monkeypatch.setattr(doctor, "examine", lambda requested: report)
    monkeypatch.setenv("COLUMNS", "72")
    assert call(monkeypatch, "--json") == 0
    assert json.loads(capsys.readouterr().out) == report
    assert call(monkeypatch) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*ARCHITECTURES, *backends.OPERATIONS))
    assert printed.count("agrees") == len(report["checks"])


def test_a_failed_check_is_shown_and_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def agreement(operation: str, backend: str, device: torch.device) -> Errors | str:
        if operation == "ssd":
            return Errors(float("nan"), 0.5, 1e-7, "x", 1e-4, 0.0)
        return "fails on small inputs with CompilationError: no" if operation == "gla" else Errors(0.0, 0.0, 0.0, "x", 1e-4, 0.0)

    monkeypatch.setattr(backends, "agreement", agreement)
    assert str(call(monkeypatch)).startswith("farstate: a backend disagrees")
    printed = capsys.readouterr().out
    assert printed.count("FAILS") == 2
    assert "not finite" in printed
    assert "CompilationError" in printed
    assert str(call(monkeypatch, "--json")).startswith("farstate: a backend disagrees")
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [row["passed"] for row in found["checks"] if row["operation"] in ("ssd", "gla")] == [False, False]


def test_nothing_slow_is_imported_without_a_gpu(examined: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the vendors' kernels are loaded to be checked")
    assert examined["imported"] == []
