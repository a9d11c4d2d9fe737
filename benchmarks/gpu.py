"""All kernels and backends on one GPU: held against the definitions, then timed beside mamba_ssm and fla in the same run.

    python benchmarks/gpu.py [--budget 270] [--json FILE]        # needs a CUDA GPU; under five minutes
    python benchmarks/gpu.py --cpu-smoke                         # tiny shapes, kernels under Triton's interpreter: does the script run?

First, on small inputs, the largest error of every operation on every backend that is installed, and of every kernel, against the
sequential definition in float64. Then times, forward and forward + backward, at realistic sizes with half-precision inputs; the
ratio is to the vendor's time, where there is one. What is not installed is named with the reason. When the budget is used up,
what is left is named as well. A failed check makes the exit status 1; without a GPU it is 2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Before the kernels are imported: the smoke test interprets them.
if "--cpu-smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from farstate.models.head import token_nll
from farstate.models.language_model import LanguageModel
from farstate.models.registry import config_from_json
from farstate.ops import backends, checks, divergence, gla, selective_scan, ssd, state_moments

VENDORS = {"ssd": "mamba_ssm", "selective_scan": "mamba_ssm", "gla": "fla", "wkv6": "fla", "gated_delta": "fla"}
"""The backend whose time is 1, by operation."""

KERNEL_TOLERANCE = 1e-4
"""Of a kernel's float32 results, relative to the largest entry: no kernel of ours rounds factors to TF32."""


@dataclass
class Row:
    """One line of the table: a check, a time, or why there is neither."""

    what: str
    size: str
    backend: str
    error: float | None = None
    forward_ms: float | None = None
    both_ms: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclass
class Run:
    """Where it runs and what it has found."""

    device: torch.device
    smoke: bool
    ends: float
    rows: list[Row] = field(default_factory=list)
    failed: bool = False

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row), flush=True)

    def late(self) -> bool:
        return time.monotonic() > self.ends


def line(row: Row) -> str:
    def ms(value: float | None) -> str:
        return f"{value:9.3f}" if value is not None else " " * 9

    error = f"{row.error:8.1e}" if row.error is not None else " " * 8
    ratio = f"{row.ratio:5.2f}" if row.ratio is not None else " " * 5
    return f"{row.what:<28} {row.size:<30} {row.backend:<12} {error} {ms(row.forward_ms)} {ms(row.both_ms)} {ratio}  {row.note}".rstrip()


HEADER = f"{'what':<28} {'size':<30} {'backend':<12} {'error':>8} {'fwd ms':>9} {'f+b ms':>9} ratio  note"


# --- checks ----------------------------------------------------------------------------------------------


def check_operations(run: Run) -> None:
    """Every operation on every backend, forward, final state and gradients, against `naive` in float64."""
    for operation in backends.OPERATIONS:
        given = small(checks.inputs(operation)) if run.smoke else checks.inputs(operation)
        definition = backends.load(operation, "naive")
        for backend in backends.BACKENDS[1:]:
            reason = backends.unavailable(operation, backend, run.device.type)
            if reason is not None:
                run.add(Row(operation, "check", backend, note=f"skipped: {reason}"))
                continue
            try:
                errors = checks.measure(backends.load(operation, backend), definition, given, run.device)
            except Exception as problem:  # whatever a compiler or a driver raises: the other rows are still worth having
                report_failure(run, operation, backend, problem)
                continue
            worst = max((errors.outputs, errors.final_state, errors.gradients), key=lambda e: (math.isnan(e), e))
            run.failed |= not errors.passed
            run.add(Row(operation, "check", backend, worst, note="" if errors.passed else f"FAILED: {errors}"))


def small(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same inputs with fewer steps."""
    times = {value.shape[1] for value in given.values() if value.dim() > 2}
    longest = max(times)
    return {name: value[:, :9] if value.dim() > 2 and value.shape[1] == longest else value for name, value in given.items()}


def check_kernels(run: Run) -> None:
    for name, compare in (
        ("divergence kernel", divergence_error),
        ("state moments kernel", moments_error),
        ("initial state kernel", initial_state_error),
    ):
        try:
            error = compare(run.device)
        except Exception as problem:  # as above
            report_failure(run, name, "triton", problem)
            continue
        passed = error <= KERNEL_TOLERANCE
        run.failed |= not passed
        run.add(Row(name, "check", "triton", error, note="" if passed else f"FAILED: allowed {KERNEL_TOLERANCE:.0e}"))


def report_failure(run: Run, what: str, backend: str, problem: Exception) -> None:
    run.failed = True
    run.add(Row(what, "check", backend, note=f"FAILED: {type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:160]}"))


def divergence_error(device: torch.device) -> float:
    from farstate.kernels import divergence as kernel

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(131, 24, generator=generator) * 24**-0.5
    hidden, noise = torch.randn(2, 37, 24, generator=generator)
    arguments = hidden * 3.0, hidden * 3.0 + noise, weight
    exact = divergence.naive(*(t.double() for t in arguments), vocabulary_size=127)
    found = kernel.fused(*(t.to(device) for t in arguments), vocabulary_size=127)
    same = kernel.fused(arguments[0].to(device), arguments[0].to(device), weight.to(device))
    if any(value.any() for value in same):
        raise ArithmeticError("a distribution is at a distance from itself")
    return max(relative(f, e) for f, e in zip(found, exact, strict=True))


def moments_error(device: torch.device) -> float:
    from farstate.kernels import state_moments as kernel

    worst = 0.0
    for operation, delta in (("gla", False), ("gated_delta", True)):
        given = {name: value[:, :11] if name != "initial_state" else value for name, value in checks.inputs(operation).items()}
        start = given.pop("initial_state")
        exact = state_moments.naive(backends.load(operation, "naive"), given, {}, start)
        inputs = {name: given[name].float().to(device) for name in ("k", "v", "log_decay")}
        if delta:
            inputs["weight"] = given["beta"].float().to(device)
        sums, squares, _ = kernel.scan(**inputs, initial_state=start.float().to(device), delta=delta)
        worst = max(worst, relative(sums, exact.sums), relative(squares, exact.squared_norms))
    return worst


def initial_state_error(device: torch.device) -> float:
    from farstate.kernels import initial_state as kernel

    given = checks.inputs("selective_scan")
    given = {name: value[:, :11] if name in ("x", "dt", "B", "C") else value for name, value in given.items()}
    errors = checks.measure(kernel.selective_scan, selective_scan.naive, given, device)
    part = {name: given[name] for name in ("dt", "A", "C", "initial_state")}
    exact = selective_scan.naive_increment(**part)
    increment = kernel.increment(**{name: value.float().to(device) for name, value in part.items()})
    return max(errors.outputs, errors.final_state, errors.gradients, relative(increment, exact))


def relative(actual: Tensor, exact: Tensor) -> float:
    actual = actual.detach().cpu().double()
    if not torch.isfinite(actual).all():
        return math.inf
    return ((actual - exact).abs().max() / exact.abs().max()).item()


# --- times -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """Of one layer: those of a published model of about that many parameters."""

    name: str
    batch: int
    time: int
    heads: int
    keys: int
    values: int


SIZES = {
    "ssd": [Size("130M", 8, 2048, 24, 128, 64), Size("1.3B", 4, 4096, 64, 128, 64)],
    "selective_scan": [Size("130M", 8, 2048, 1536, 16, 1), Size("1.4B", 4, 2048, 4096, 16, 1)],
    "gla": [Size("340M", 8, 2048, 4, 128, 256), Size("1.3B", 4, 4096, 4, 256, 512)],
    "wkv6": [Size("430M", 8, 2048, 16, 64, 64), Size("1.6B", 4, 4096, 32, 64, 64)],
    "gated_delta": [Size("370M", 8, 2048, 4, 192, 384), Size("1.3B", 4, 4096, 6, 256, 512)],
}
SMOKE = Size("tiny", 1, 8, 2, 4, 4)


def layer_inputs(operation: str, size: Size, device: torch.device) -> dict[str, Tensor]:
    """Inputs of the magnitudes of a trained layer; activations in bfloat16 on a GPU, decays and states in float32."""
    generator = torch.Generator(device).manual_seed(0)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch, length, heads, keys, values = size.batch, size.time, size.heads, size.keys, size.values

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(half)

    def decays(*shape: int) -> Tensor:
        return -0.1 * torch.rand(*shape, device=device, generator=generator)

    if operation == "ssd":
        return {
            "x": draw(batch, length, heads, values),
            "dt": -decays(batch, length, heads),
            "A": decays(heads) * 10.0 - 1.0,
            "B": draw(batch, length, 1, keys),
            "C": draw(batch, length, 1, keys),
            "D": torch.ones(heads, device=device),
            "initial_state": draw(batch, heads, values, keys).float(),
        }
    if operation == "selective_scan":
        return {
            "x": draw(batch, length, heads),
            "dt": -decays(batch, length, heads),
            "A": -torch.arange(1.0, keys + 1.0, device=device).repeat(heads, 1),
            "B": draw(batch, length, keys),
            "C": draw(batch, length, keys),
            "D": torch.ones(heads, device=device),
            "initial_state": draw(batch, heads, keys).float(),
        }
    state = draw(batch, heads, keys, values).float()
    k = torch.nn.functional.normalize(draw(batch, length, heads, keys).float(), dim=-1).to(half)
    inputs = {"k": k, "v": draw(batch, length, heads, values), "initial_state": state}
    if operation == "wkv6":
        return {
            "r": draw(batch, length, heads, keys),
            **inputs,
            "log_decay": decays(batch, length, heads, keys),
            "bonus": draw(heads, keys).float(),
        }
    inputs["q"] = torch.nn.functional.normalize(draw(batch, length, heads, keys).float(), dim=-1).to(half)
    if operation == "gla":
        return {**inputs, "log_decay": decays(batch, length, heads, keys)}
    return {**inputs, "log_decay": decays(batch, length, heads), "beta": draw(batch, length, heads).float().sigmoid()}


def milliseconds(run: Run, function: Callable[[], object]) -> float:
    """Median of a few calls; the first ones, which compile and tune, are not counted."""
    for _ in range(1 if run.smoke else 3):
        function()
    taken = []
    until = time.monotonic() + 0.4
    while len(taken) < (1 if run.smoke else 5) or (time.monotonic() < until and len(taken) < 50 and not run.smoke):
        if run.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end))
        else:
            begun = time.perf_counter()
            function()
            taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken)


def time_operations(run: Run) -> None:
    for operation in backends.OPERATIONS:
        for size in [SMOKE] if run.smoke else SIZES.get(operation, []):
            inputs = layer_inputs(operation, size, run.device)
            name = f"{size.name}: {size.batch} x {size.time}, H {size.heads} K {size.keys} V {size.values}"
            # The vendor first: its times are what the others are divided by.
            order = sorted(backends.BACKENDS[1:], key=lambda backend: backend != VENDORS.get(operation))
            vendor_ms = None
            reference = None
            for backend in order:
                if backend == "naive" or backends.unavailable(operation, backend, run.device.type) is not None:
                    continue
                if run.late():
                    run.add(Row(operation, name, backend, note="skipped: the budget is used up"))
                    continue
                try:
                    reference = first_row_in_float64(operation, inputs) if reference is None else reference
                    row = timed(run, operation, name, backend, inputs, reference)
                except Exception as problem:  # out of memory, a compiler: the other rows are still worth having
                    report_failure(run, operation, backend, problem)
                    continue
                if backend == VENDORS.get(operation):
                    vendor_ms = row.both_ms
                row.ratio = None if vendor_ms is None or row.both_ms is None else row.both_ms / vendor_ms
                run.add(row)


def first_row_in_float64(operation: str, inputs: dict[str, Tensor]) -> Tensor:
    """Outputs of the first sequence by the chunked form in float64."""
    batch = inputs["initial_state"].shape[0]
    first = {n: (t[:1] if t.shape[0] == batch and n not in ("A", "D", "bonus") else t).double() for n, t in inputs.items()}
    with torch.no_grad():
        outputs: Tensor = backends.load(operation, "chunked")(**first)[0]
    return outputs.cpu()


def timed(run: Run, operation: str, name: str, backend: str, inputs: dict[str, Tensor], reference: Tensor) -> Row:
    function = backends.load(operation, backend)
    leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}

    def forward() -> Tensor:
        with torch.no_grad():
            outputs: Tensor = function(**inputs)[0]
        return outputs

    def both() -> None:
        outputs, final = function(**leaves)
        (outputs.float().sum() + final.sum()).backward()
        for leaf in leaves.values():
            leaf.grad = None

    error = relative(forward()[:1], reference)
    return Row(operation, name, backend, error, milliseconds(run, forward), milliseconds(run, both))


def time_kernels(run: Run) -> None:
    for part in (time_divergence, time_moments, time_recording):
        if run.late():
            run.add(Row(part.__name__.removeprefix("time_"), "", "", note="skipped: the budget is used up"))
            continue
        try:
            for row in part(run):
                run.add(row)
        except Exception as problem:  # as above
            report_failure(run, part.__name__.removeprefix("time_"), "triton", problem)


def time_divergence(run: Run) -> Iterator[Row]:
    from farstate.kernels import divergence as kernel

    tokens, width, vocabulary = (5, 8, 70) if run.smoke else (2048, 1024, 50_288)
    half = torch.float32 if run.smoke else torch.bfloat16
    generator = torch.Generator(run.device).manual_seed(0)
    weight = (torch.randn(vocabulary, width, device=run.device, generator=generator) * width**-0.5).to(half)
    hidden, other = torch.randn(2, tokens, width, device=run.device, generator=generator).to(half)
    name = f"T {tokens} D {width} V {vocabulary}"
    once = milliseconds(run, lambda: token_nll(hidden, weight, torch.zeros(tokens, dtype=torch.int64, device=run.device)))
    yield Row("one NLL of these", name, "torch", forward_ms=once)
    for backend, function in (("triton", kernel.fused), ("streamed", divergence.streamed)):
        yield Row("divergence", name, backend, forward_ms=milliseconds(run, lambda f=function: f(hidden, other, weight)))


def time_moments(run: Run) -> Iterator[Row]:
    """The kernel beside the torch form, both against one forward pass of the same recurrence."""
    from farstate.kernels import state_moments as kernel

    size = SMOKE if run.smoke else SIZES["ssd"][1]
    name = f"{size.name}: {size.batch} x {size.time}, H {size.heads} K {size.keys} V {size.values}"
    given = layer_inputs("ssd", size, run.device)
    x, dt, A, B, state = (given[n] for n in ("x", "dt", "A", "B", "initial_state"))

    def scan() -> object:
        return kernel.scan(B, x, dt * A, weight=dt, initial_state=state.mT)

    def torch_form() -> object:
        return state_moments.scalar_decay(x, B, dt * A, weight=dt, initial_state=state)

    with torch.no_grad():
        scanned = milliseconds(run, lambda: ssd.chunked(**given))
    yield Row("state moments (Mamba-2)", name, "ssd.chunked", forward_ms=scanned, note="the recurrence alone")
    for backend, function in (("triton", scan), ("torch", torch_form)):
        yield Row("state moments (Mamba-2)", name, backend, forward_ms=milliseconds(run, function))
    size = SMOKE if run.smoke else SIZES["gla"][0]
    name = f"{size.name}: {size.batch} x {size.time}, H {size.heads} K {size.keys} V {size.values}"
    given = layer_inputs("gla", size, run.device)
    arguments = given["k"], given["v"], given["log_decay"]
    with torch.no_grad():
        scanned = milliseconds(run, lambda: gla.chunked(**given))
    yield Row("state moments (GLA)", name, "gla.chunked", forward_ms=scanned, note="the recurrence alone")
    yield Row("state moments (GLA)", name, "triton", forward_ms=milliseconds(run, lambda: kernel.scan(*arguments)))
    yield Row("state moments (GLA)", name, "torch", forward_ms=milliseconds(run, lambda: state_moments.vector_decay(*arguments)))


def time_recording(run: Run) -> Iterator[Row]:
    """A forward pass of a model with and without recording."""
    shape: dict[str, Any] = (
        {"width": 16, "layers": 1, "head_size": 8, "state_size": 4} if run.smoke else {"width": 2048, "layers": 4}
    )
    config = config_from_json({**shape, "architecture": "mamba2", "vocabulary_size": 1024})
    model = LanguageModel(config, device=run.device)
    tokens = torch.arange(8 if run.smoke else 8192, device=run.device).remainder(1024).view(1 if run.smoke else 4, -1)
    half = torch.autocast(run.device.type, torch.bfloat16, enabled=not run.smoke)

    def plain() -> None:
        with torch.no_grad(), half:
            model(tokens)

    def recording() -> None:
        with state_moments.recording():
            plain()

    name = f"width {config.width}, {config.layers} layers, {tokens.shape[0]} x {tokens.shape[1]}"
    before, after = milliseconds(run, plain), milliseconds(run, recording)
    yield Row("Mamba-2 model", name, "auto", forward_ms=before)
    yield Row("Mamba-2 model, recording", name, "auto", forward_ms=after, ratio=after / before, note="ratio to the line above")


# --- the run ---------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("triton", "mamba-ssm", "causal-conv1d", "flash-linear-attention"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=270.0, help="seconds after which nothing new is timed")
    parser.add_argument("--cpu-smoke", action="store_true", help="tiny shapes on the CPU; times mean nothing")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_args()
    if not options.cpu_smoke and not torch.cuda.is_available():
        print("benchmarks/gpu.py: no CUDA GPU is visible to torch: nothing was checked or timed", file=sys.stderr)
        return 2
    run = Run(torch.device("cpu" if options.cpu_smoke else "cuda"), options.cpu_smoke, time.monotonic() + options.budget)
    where = "CPU, interpreted" if run.smoke else torch.cuda.get_device_name()
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    print(f"{stamp} · {where} · " + " · ".join(f"{name} {number}" for name, number in versions().items()))
    print(HEADER)
    started = time.monotonic()
    check_operations(run)
    check_kernels(run)
    time_operations(run)
    time_kernels(run)
    print(f"{'some checks FAILED' if run.failed else 'all checks passed'} · {time.monotonic() - started:.0f} s")
    if options.json is not None:
        content = {"date": stamp, "device": where, "versions": versions(), "rows": [asdict(row) for row in run.rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
