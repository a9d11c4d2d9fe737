"""The recurrences on this CPU: chunked against naive and against the best that public libraries offer, forward and backward.

    python benchmarks/recurrences.py [--only gla wkv6] [--decays mixed] [--repeats 7] [--threads 2] [--json FILE]

One layer's recurrence at T = 1024, batch 1 and 8, float32, gradients of all inputs, from the zero state. Contestants: `naive`,
`chunked`, and the pure torch code of others that is fastest here among those that CASES names, each held against `naive` first:
transformers' torch paths (at several chunk lengths), fla's references. Their steps alternate, so that a busy machine slows them
alike; medians are reported. One that takes over half a minute is run once and not at the larger batch. Then, in a process of its own, the peak of the
resident set during such a step at batch 1 above what the inputs take, and how it grows with T.

`--decays typical`: as an initialised layer has them; `mixed`: log-uniform from -20 to -1e-4 in one sequence.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TIME = 1024
BATCHES = (1, 8)
GROWTH = (1024, 2048, 4096)
CHUNKS = (16, 32, 64, 128, 256)
PATIENCE = 30.0  # Seconds after which a contestant is not run again.
AGREEMENT = 1e-3

Inputs = dict[str, Any]
Operation = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """One operation: its sizes in words, its inputs, and the public code for it by name."""

    sizes: str
    inputs: Callable[[Draw], Inputs]
    public: Callable[[], dict[str, Operation]]


class Draw:
    """Inputs of one size and kind of decays, from one seed."""

    def __init__(self, batch: int, time: int, decays: str) -> None:
        import torch

        self.batch, self.time, self.decays = batch, time, decays
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(*shape, generator=self._generator)

    def in_time(self, *shape: int) -> Tensor:
        return self.normal(self.batch, self.time, *shape)

    def log_uniform(self, *shape: int, low: float, high: float) -> Tensor:
        import torch

        return low * (high / low) ** torch.rand(*shape, generator=self._generator)

    def log_decay(self, typical: Tensor) -> Tensor:
        """`typical`, or log-uniform values from -20 to -1e-4 of its shape."""
        return typical if self.decays == "typical" else -self.log_uniform(*typical.shape, low=1e-4, high=20.0)


# --- the operations --------------------------------------------------------------------------------------


def ssd_inputs(draw: Draw) -> Inputs:
    import torch

    dt = torch.nn.functional.softplus(draw.in_time(8) - 4.0)
    return {
        "x": draw.in_time(8, 64),
        "dt": -draw.log_decay(-dt),
        "A": -torch.linspace(1.0, 16.0, 8) if draw.decays == "typical" else -torch.ones(8),
        "B": draw.in_time(1, 64),
        "C": draw.in_time(1, 64),
        "D": torch.ones(8),
    }


def ssd_public() -> dict[str, Operation]:
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

    scan = inspect.unwrap(mamba2_chunk_scan)

    def with_chunks(length: int) -> Operation:
        return lambda x, dt, A, B, C, D: scan(x, dt, A, B, C, length, D=D, return_final_states=True)

    return {f"transformers, chunk {length}": with_chunks(length) for length in CHUNKS}


def selective_scan_inputs(draw: Draw) -> Inputs:
    import torch

    width, state_size = 512, 16
    A = -torch.arange(1.0, state_size + 1).repeat(width, 1)
    return {
        "x": draw.in_time(width),
        "dt": -draw.log_decay(-torch.nn.functional.softplus(draw.in_time(width) - 4.0)),
        "A": A if draw.decays == "typical" else -torch.ones_like(A),
        "B": draw.in_time(state_size),
        "C": draw.in_time(state_size),
        "D": torch.ones(width),
    }


def selective_scan_public() -> dict[str, Operation]:
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    reference = inspect.unwrap(mamba_selective_scan)

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
        y, final = reference(*(t.mT for t in (x, dt)), A, *(t.mT for t in (B, C)), D=D, return_last_state=True)
        return y.mT, final

    return {"transformers": scan}


def gla_inputs(draw: Draw) -> Inputs:
    import torch

    keys = (4, 64)
    return {
        "q": draw.in_time(*keys),
        "k": draw.in_time(*keys),
        "v": draw.in_time(4, 128),
        "log_decay": draw.log_decay(torch.nn.functional.logsigmoid(draw.in_time(*keys)) / 16.0),
    }


def gla_public() -> dict[str, Operation]:
    reference = fla_file("gla/naive").naive_recurrent_gla
    return {"fla, naive_recurrent": lambda log_decay, **kw: reference(**kw, gk=log_decay, output_final_state=True)}


def wkv6_inputs(draw: Draw) -> Inputs:
    import torch

    keys = (8, 64)
    base = torch.linspace(-6.0, -1.0, keys[1])
    return {
        "r": draw.in_time(*keys),
        "k": draw.in_time(*keys),
        "v": draw.in_time(*keys),
        "log_decay": draw.log_decay(-torch.exp(base + 0.3 * draw.in_time(*keys))),
        "bonus": draw.normal(*keys),
    }


def wkv6_public() -> dict[str, Operation]:
    recurrent = fla_file("rwkv6/recurrent_naive").naive_recurrent_rwkv6
    chunk = fla_file("rwkv6/chunk_naive").naive_chunk_rwkv6

    def of_recurrent(r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
        heads_first = (t.transpose(1, 2) for t in (r, k, v, log_decay))
        o, final = recurrent(*heads_first, bonus, scale=1.0, output_final_state=True)
        return o.transpose(1, 2), final

    def of_chunks(length: int) -> Operation:
        def run(r: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, bonus: Tensor) -> tuple[Tensor]:
            return (chunk(*(t.transpose(1, 2) for t in (r, k, v, log_decay)), bonus, chunk_size=length).transpose(1, 2),)

        return run

    return {"fla, naive_recurrent": of_recurrent} | {f"fla, naive_chunk {length}": of_chunks(length) for length in CHUNKS[:3]}


def gated_delta_inputs(draw: Draw) -> Inputs:
    import torch

    heads, keys = 4, 64
    return {
        "q": torch.nn.functional.normalize(draw.in_time(heads, keys), dim=-1),
        "k": torch.nn.functional.normalize(draw.in_time(heads, keys), dim=-1),
        "v": draw.in_time(heads, 128),
        "log_decay": draw.log_decay(-torch.nn.functional.softplus(draw.in_time(heads) - 4.0) * torch.linspace(1.0, 16.0, heads)),
        "beta": torch.sigmoid(draw.in_time(heads)),
    }


def gated_delta_public() -> dict[str, Operation]:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    chunk = inspect.unwrap(torch_chunk_gated_delta_rule)
    reference = fla_file("gated_delta_rule/naive")

    def of_fla(function: Operation, **options: int) -> Operation:
        return lambda log_decay, **kw: function(**kw, g=log_decay, output_final_state=True, **options)

    def of_transformers(length: int) -> Operation:
        return lambda q, k, v, log_decay, beta: chunk(q, k, v, g=log_decay, beta=beta, chunk_size=length, output_final_state=True)

    return {
        "fla, naive_recurrent": of_fla(reference.naive_recurrent_gated_delta_rule),
        **{
            f"fla, naive_chunk {length}": of_fla(reference.naive_chunk_gated_delta_rule, chunk_size=length)
            for length in CHUNKS[:3]
        },
        **{f"transformers, chunk {length}": of_transformers(length) for length in CHUNKS[:3]},
    }


CASES = {
    "ssd": Case("H 8, P 64, N 64", ssd_inputs, ssd_public),
    "selective_scan": Case("D 512, N 16", selective_scan_inputs, selective_scan_public),
    "gla": Case("H 4, K 64, V 128", gla_inputs, gla_public),
    "wkv6": Case("H 8, K 64, V 64", wkv6_inputs, wkv6_public),
    "gated_delta": Case("H 4, K 64, V 128", gated_delta_inputs, gated_delta_public),
}


def fla_file(path: str) -> ModuleType:
    """One of fla's pure torch files by itself: importing the package takes ten seconds and changes transformers.

    Raises:
        ImportError: flash-linear-attention is not installed, or has no such file.
    """
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise ImportError("flash-linear-attention is not installed")
    file = Path(package.submodule_search_locations[0]) / f"ops/{path}.py"
    found = importlib.util.spec_from_file_location("fla_" + path.replace("/", "_"), file)
    if not file.exists() or found is None or found.loader is None:
        raise ImportError(f"{file} is not there")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


# --- measuring -------------------------------------------------------------------------------------------


def forward_backward(function: Operation, inputs: Inputs) -> tuple[Any, ...]:
    """One step; the outputs. An output that the public code does not have adds nothing to its loss."""
    import torch

    outputs = tuple(output for output in function(**inputs) if output is not None)
    torch.autograd.grad(sum(output.sum() for output in outputs), list(inputs.values()))
    return outputs


def seconds(function: Operation, inputs: Inputs) -> float:
    began = time.perf_counter()
    forward_backward(function, inputs)
    return time.perf_counter() - began


def trial(name: str, other: str, function: Operation, inputs: Inputs, expected: tuple[Any, ...]) -> float | None:
    """Seconds of one step of public code; None if it gives other outputs than `naive`, or no gradients."""
    began = time.perf_counter()
    try:
        outputs = forward_backward(function, inputs)
    except RuntimeError as error:
        print(f"{name}: {other} left out: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        return None
    taken = time.perf_counter() - began
    # The layout of the final state is each library's own.
    difference = (outputs[0] - expected[0]).abs().max() / expected[0].abs().max()
    if not difference <= AGREEMENT:
        print(f"{name}: {other} left out: its outputs are {difference:.1e} from those of naive", file=sys.stderr)
        return None
    return taken


def speed(name: str, batch: int, decays: str, repeats: int, left_out: set[str]) -> dict[str, Any]:
    """Times of one operation at one batch; public code in `left_out` is not run, and what turns out too slow is added to it."""
    module = importlib.import_module(f"farstate.ops.{name}")
    case = CASES[name]
    inputs = {key: value.requires_grad_() for key, value in case.inputs(Draw(batch, TIME, decays)).items()}
    expected = forward_backward(module.naive, inputs)
    contestants: dict[str, Operation] = {"naive": module.naive, "chunked": module.chunked}
    try:
        public = case.public()
    except ImportError as error:
        print(f"{name}: no public code to compare with: {error}", file=sys.stderr)
        public = {}
    trials = {}
    for other in [other for other in public if other not in left_out]:
        if (taken := trial(name, other, public[other], inputs, expected)) is None:
            left_out.add(other)
            continue
        trials[other] = taken
        if taken > PATIENCE:
            left_out.add(other)
    del expected
    best = min(trials, key=lambda other: trials[other], default=None)
    if best is not None:
        contestants[best] = public[best]
    for _ in range(2):
        forward_backward(module.chunked, inputs)
    times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    if best in left_out:
        times[best].append(trials[best])
    for _ in range(repeats):
        for contestant, function in contestants.items():
            if contestant not in left_out and sum(times[contestant]) < PATIENCE:
                times[contestant].append(seconds(function, inputs))
    medians = {contestant: statistics.median(values) for contestant, values in times.items()}
    return {
        "operation": name,
        "batch": batch,
        "decays": decays,
        "public": best,
        "seconds": times,
        "medians": medians,
        "trials": trials,
    }


def resident(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key):
            return 1024 * int(line.split()[1])
    raise KeyError(key)


def peak(name: str, form: str, length: int, decays: str) -> int:
    """Bytes of the resident set at the peak of one step at batch 1, above what the inputs take."""
    function = getattr(importlib.import_module(f"farstate.ops.{name}"), form)
    before = 0
    # The short step before lets libraries set up what they keep.
    for steps in (16, length):
        inputs = {key: value.requires_grad_() for key, value in CASES[name].inputs(Draw(1, steps, decays)).items()}
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # The peak starts from here.
        before = resident("VmRSS")
        forward_backward(function, inputs)
    return resident("VmHWM") - before


def memory(names: list[str], decays: str) -> Iterator[dict[str, Any]]:
    """Peaks of naive at TIME and of chunked at each of GROWTH, each in a child of this process: none finds what another freed."""
    import torch

    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as children:
        for name in names:
            wanted = [(name, "naive", TIME, decays), *((name, "chunked", length, decays) for length in GROWTH)]
            naive, *chunked = (children.apply(peak, arguments) for arguments in wanted)
            yield {"operation": name, "naive": naive, "chunked": dict(zip(GROWTH, chunked, strict=True))}


def memory_elsewhere(names: list[str], decays: str) -> list[dict[str, Any]]:
    """`memory` in a process in which freed blocks go back at once and one thread works: peaks do not scatter then."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--memory-only", "--decays", decays, "--only", *names]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# --- reporting -------------------------------------------------------------------------------------------


def speed_row(found: dict[str, Any]) -> str:
    medians, best = found["medians"], found["public"]
    ours = medians["chunked"]
    cells = [
        f"`{found['operation']}`",
        CASES[found["operation"]].sizes,
        str(found["batch"]),
        f"{1e3 * ours:,.1f}",
        f"{1e3 * medians['naive']:,.0f}",
        f"{medians['naive'] / ours:.1f}×",
        "–" if best is None else best + (", once" if len(found["seconds"][best]) == 1 else ""),
        "–" if best is None else f"{1e3 * medians[best]:,.0f}",
        "–" if best is None else f"{medians[best] / ours:.1f}×",
    ]
    return f"| {' | '.join(cells)} |"


def memory_row(found: dict[str, Any]) -> str:
    chunked = {int(length): peak for length, peak in found["chunked"].items()}
    first = chunked[GROWTH[0]]
    cells = [
        f"`{found['operation']}`",
        f"{found['naive'] / 2**20:,.0f}",
        *(f"{chunked[length] / 2**20:,.1f}" for length in GROWTH),
        f"1/{found['naive'] / first:.1f}",
        f"{chunked[GROWTH[-1]] / first:.2f}×",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="operations (default: all)")
    parser.add_argument("--decays", choices=("typical", "mixed"), default="typical")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--repeats", type=int, default=7, help="steps of each contestant that are timed (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--json", type=Path, help="write all measurements here")
    parser.add_argument("--memory-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = []
    for name in arguments.only:
        if importlib.util.find_spec(f"farstate.ops.{name}") is None:
            print(f"{name}: this version has no such operation; left out", file=sys.stderr)
        else:
            names.append(name)
    if arguments.memory_only:
        for found in memory(names, arguments.decays):
            print(json.dumps(found), flush=True)
        return

    # Read when torch starts its thread pool: spinning threads of a busy machine would be measured, not the code.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(
        f"torch {torch.__version__}, {arguments.threads} threads, T = {TIME}, {arguments.decays} decays, "
        f"load average {os.getloadavg()[0]:.1f} before the run\n"
    )
    print("| operation | sizes | batch | chunked, ms | naive, ms | against naive | best public code | ms | against it |")
    print("|---|---|---:|---:|---:|---:|---|---:|---:|")
    speeds = []
    for name in names:
        left_out: set[str] = set()
        for batch in arguments.batches:
            speeds.append(speed(name, batch, arguments.decays, arguments.repeats, left_out))
            print(speed_row(speeds[-1]), flush=True)
    print("\nPeak memory of a step at batch 1, MiB:\n")
    at = " | ".join(f"chunked, T {length}" for length in GROWTH)
    print(f"| operation | naive, T {TIME} | {at} | of naive's | T × {GROWTH[-1] // GROWTH[0]} takes |")
    print("|---|" + "---:|" * (len(GROWTH) + 3))
    memories = memory_elsewhere(names, arguments.decays)
    for found in memories:
        print(memory_row(found))
    if arguments.json:
        arguments.json.write_text(json.dumps({"speed": speeds, "memory": memories}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
