"""Which implementation runs: by name, by device, by dtype; and what is said when it cannot."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from farstate.errors import FarstateError
from farstate.ops import backends, checks

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What is asked once per process is asked again in each test."""
    backends.unavailable.cache_clear()
    backends.agreement.cache_clear()
    yield
    backends.unavailable.cache_clear()
    backends.agreement.cache_clear()


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU where the vendors' operations are our own chunked ones, recorded; `broken` holds those that are not."""
    state: dict[str, Any] = {"broken": {}, "calls": [], "absent": set()}
    real = backends.load

    def load(operation: str, backend: str) -> Callable[..., Any]:
        if backend in ("naive", "chunked"):
            return real(operation, backend)

        def vendor(*args: Any, **kwargs: Any) -> Any:
            state["calls"].append((operation, backend))
            y, final = real(operation, "chunked")(*args, **kwargs)
            return state["broken"].get(backend, lambda y, final: (y, final))(y, final)

        return vendor

    def measure(
        function: checks.Function, definition: checks.Function, given: dict[str, Tensor], _: torch.device
    ) -> checks.Errors:
        return real_measure(function, definition, given, CPU)

    def unavailable(operation: str, backend: str, device_type: str) -> str | None:
        if backend not in backends._where(operation):
            return f"{backend} has no such operation"
        return f"{backend} is not installed" if backend in state["absent"] else None

    real_measure = checks.measure
    monkeypatch.setattr(backends, "load", load)
    monkeypatch.setattr(backends, "unavailable", unavailable)
    monkeypatch.setattr(checks, "measure", measure)
    return state


def given(operation: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: value.to(dtype) for name, value in checks.inputs(operation).items()}


# --- names -----------------------------------------------------------------------------------------------


def test_the_default_is_auto_and_auto_is_chunked_on_a_cpu() -> None:
    for operation in backends.OPERATIONS:
        assert backends.choose(operation, "auto", CPU).backend == "chunked"
        assert backends.implementation(operation, CPU) is backends.load(operation, "chunked")


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("operation", backends.OPERATIONS)
def test_a_named_backend_runs_and_is_recorded(operation: str, backend: str) -> None:
    with backends.use(backend) as selection:
        function = backends.implementation(operation, CPU)
    assert function is backends.load(operation, backend)
    assert selection.record() == {operation: {"requested": backend, "resolved": {backend: "chosen in the settings"}}}


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("operation", backends.OPERATIONS)
def test_autocast_does_not_reach_into_a_recurrence(operation: str, backend: str) -> None:
    function, inputs = backends.load(operation, backend), given(operation)
    expected = function(**inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = function(**inputs)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("operation", backends.OPERATIONS)
def test_one_step_is_the_same_step_of_a_segment_under_autocast(operation: str, backend: str, dtype: torch.dtype) -> None:
    """Generation, one position at a time, continues what a whole segment left; states stay in float32 in between."""
    function, inputs = backends.load(operation, backend), given(operation)
    time = next(iter(inputs.values())).shape[1]
    in_time = {name: value.to(dtype) for name, value in inputs.items() if value.dim() > 2 and value.shape[1] == time}
    fixed = {name: value for name, value in inputs.items() if name not in in_time}
    state = fixed.pop("initial_state")

    def run(start: int, end: int, state: Tensor) -> tuple[Tensor, Tensor]:
        return function(**{name: value[:, start:end] for name, value in in_time.items()}, **fixed, initial_state=state)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole, final = run(0, time, state)
        first, state = run(0, time - 3, state)
        parts = [first]
        for step in range(time - 3, time):
            output, state = run(step, step + 1, state)
            assert state.dtype == torch.float32
            parts.append(output)
    found = torch.cat(parts, dim=1)
    assert found.dtype == whole.dtype == dtype
    # Outputs in half precision may be rounded to either side.
    assert (found - whole).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-8) * whole.abs().max()
    assert (state - final).abs().max() <= 1e-5 * final.abs().max()


@pytest.mark.parametrize("backend", ["naive", "chunked"])
@pytest.mark.parametrize("operation", backends.OPERATIONS)
def test_an_empty_batch_has_empty_outputs_and_no_gradients(operation: str, backend: str) -> None:
    function, full = backends.load(operation, backend), given(operation)
    batch = full["initial_state"].shape[0]
    time = next(iter(full.values())).shape[1]
    in_time = {name for name, value in full.items() if value.dim() > 2 and value.shape[1] == time}
    leaves = {
        name: (value[:0] if name in in_time or name == "initial_state" else value).clone().requires_grad_()
        for name, value in full.items()
    }
    for expected, found in zip(function(**full), function(**leaves), strict=True):
        assert expected.shape[0] == batch
        assert found.shape == (0, *expected.shape[1:])
        assert found.dtype == expected.dtype
    gradients = torch.autograd.grad(sum(output.sum() for output in function(**leaves)), list(leaves.values()))
    for leaf, gradient in zip(leaves.values(), gradients, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


def test_nothing_is_recorded_of_what_did_not_run() -> None:
    with backends.use("fla") as selection:
        pass
    assert selection.record() == {}


def test_selections_nest() -> None:
    with backends.use("naive"):
        with backends.use("chunked"):
            assert backends.implementation("ssd", CPU) is backends.load("ssd", "chunked")
        assert backends.implementation("ssd", CPU) is backends.load("ssd", "naive")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(FarstateError, match=r"'chunkd' is unknown .did you mean 'chunked'.*known: auto, naive, chunked, triton"):
        backends.use("chunkd").__enter__()


@pytest.mark.parametrize("backend", ["triton", "mamba_ssm", "fla"])
@pytest.mark.parametrize("operation", backends.OPERATIONS)
def test_a_backend_that_cannot_is_refused_in_one_line(operation: str, backend: str) -> None:
    with backends.use(backend), pytest.raises(FarstateError) as caught:
        backends.implementation(operation, CPU)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{backend} cannot compute '{operation}' on cpu: " in message
    assert "these can: auto, naive, chunked" in message
    assert any(why in message for why in ("no such operation", "needs a CUDA GPU", "is not installed"))


def test_absent_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert backends.unavailable("gla", "fla", "cuda") == "fla is not installed"


def test_every_implementation_has_the_signature_of_the_definition() -> None:
    for operation, implementations in backends.OPERATIONS.items():
        definition = list(inspect.signature(backends.load(operation, "naive")).parameters.values())
        for backend in [*implementations, *backends.ACCELERATED.get(operation, {})]:
            parameters = list(inspect.signature(backends.load(operation, backend)).parameters.values())
            found = [(p.name, p.default) for p in parameters[: len(definition)]]
            assert found == [(p.name, p.default) for p in definition], (operation, backend)
            assert all(p.default is not p.empty for p in parameters[len(definition) :]), (operation, backend)


def test_backends_load_no_torch() -> None:
    code = "import sys, farstate.settings; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "False"


# --- auto on a GPU ---------------------------------------------------------------------------------------


def test_auto_takes_the_first_that_is_installed_and_agrees(pretended_gpu: dict[str, Any]) -> None:
    assert backends.choose("ssd", "auto", GPU).backend == "mamba_ssm"
    assert backends.choose("gla", "auto", GPU).backend == "fla"
    pretended_gpu["absent"].add("mamba_ssm")
    assert backends.choose("ssd", "auto", GPU).backend == "fla"


def test_auto_leaves_out_what_disagrees_or_fails(pretended_gpu: dict[str, Any]) -> None:
    # The last state without its gradient: outputs alone would not show it.
    pretended_gpu["broken"] = {"mamba_ssm": lambda y, final: (y, final.detach()), "fla": lambda y, final: 1 / 0}
    choice = backends.choose("ssd", "auto", GPU)
    assert choice.backend == "chunked"
    assert "mamba_ssm: differs from naive here" in choice.why
    assert "fla: fails on small inputs with ZeroDivisionError" in choice.why


def test_agreement_is_asked_once(pretended_gpu: dict[str, Any]) -> None:
    for _ in range(3):
        backends.choose("gla", "auto", GPU)
    assert pretended_gpu["calls"] == [("gla", "fla")]


def test_auto_on_other_devices_is_chunked() -> None:
    assert backends.choose("ssd", "auto", torch.device("meta")) == ("chunked", "no kernels for meta")


# --- float64 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requested", ["auto", "fla"])
def test_float64_inputs_run_chunked_call_by_call(pretended_gpu: dict[str, Any], requested: str) -> None:
    with backends.use(requested) as selection:
        function = backends.implementation("gla", GPU)
        pretended_gpu["calls"].clear()
        inputs = given("gla", torch.float64)
        _, state = function(**inputs)
        assert (state.dtype, pretended_gpu["calls"]) == (torch.float64, [])
        positional = [value.float() for name, value in inputs.items() if name != "initial_state"]
        function(*positional, initial_state=inputs["initial_state"])
        assert pretended_gpu["calls"] == []
        function(**given("gla"))
        assert pretended_gpu["calls"] == [("gla", "fla")]
    resolved = selection.record()["gla"]["resolved"]
    assert resolved["chunked"] == "float64 inputs, which fla does not compute"
    assert set(resolved) == {"chunked", "fla"}


# --- the checks themselves -------------------------------------------------------------------------------


def test_checks_notice_what_backends_get_wrong() -> None:
    """Each of the defects that were seen in the field, made on purpose."""
    naive = backends.load("ssd", "naive")
    chunked = backends.load("ssd", "chunked")
    inputs = checks.inputs("ssd")

    def errors(function: checks.Function) -> checks.Errors:
        return checks.measure(function, naive, inputs, CPU)

    def forgets_initial_state(**kw: Any) -> tuple[Tensor, Tensor]:
        return chunked(**{**kw, "initial_state": 0.0 * kw["initial_state"]})

    def forgets_last_gradient(**kw: Any) -> tuple[Tensor, Tensor]:
        y, final = chunked(**kw)
        return y, final.detach()

    def not_finite(**kw: Any) -> tuple[Tensor, Tensor]:
        y, final = chunked(**kw)
        return y / 0.0, final

    assert errors(chunked).passed
    assert not errors(forgets_initial_state).passed
    dropped = errors(forgets_last_gradient)
    assert dropped.outputs < dropped.tolerance < dropped.gradients
    assert not errors(not_finite).passed
