"""Training steps per second against transformers' Mamba-2, both on this CPU, in one run.

    python benchmarks/training_step.py [--threads 2] [--repeats 7] [--sizes small large large-few-heads] [--compile] [--json FILE]

Forward, backward, AdamW; float32; same sizes, vocabulary, batch and number of threads. The steps of all contestants
alternate, so that a busy machine slows them alike; medians are reported. transformers runs its torch path at the default
chunk of 256 and at the chunk that is fastest here among 16, 32, 64, plain and, with --compile, compiled (compilation is
not timed). Then: the share of the measured float32 matrix product rate, and where the time goes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOCABULARY = 2048
CHUNKS = (16, 32, 64)
DEFAULT_CHUNK = 256
Step = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Size:
    name: str
    width: int
    layers: int
    state_size: int
    head_size: int
    batch: int
    time: int

    @property
    def tokens(self) -> int:
        return self.batch * self.time


SIZES = {
    "small": Size("small", width=64, layers=2, state_size=64, head_size=16, batch=128, time=32),
    "large": Size("large", width=128, layers=4, state_size=64, head_size=16, batch=16, time=256),
    "large-few-heads": Size("large-few-heads", width=128, layers=4, state_size=64, head_size=64, batch=16, time=256),
}


def step_flops(size: Size, chunk: int) -> float:
    """Floating point operations of the matrix products of one step: forward once, backward twice.

    Per token: the projections, the head, and the scan (C Bᵀ and its product with x within a chunk; increments and read-outs of
    the state at its ends). Element-wise work is not counted.
    """
    inner = 2 * size.width
    heads = inner // size.head_size
    projections = size.width * (2 * inner + 2 * size.state_size + heads) + inner * size.width
    scan = chunk * (size.state_size + inner) + inner * size.state_size * (2 if size.time > chunk else 1)
    return 3.0 * 2.0 * size.tokens * (size.layers * (projections + scan) + size.width * VOCABULARY)


def with_optimizer(loss: Callable[[], Any], groups: list[dict[str, Any]] | list[Any]) -> Step:
    import torch

    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> float:
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(value.detach())

    return step


def ours(size: Size, batch: Any) -> Step:
    from farstate.models.head import mean_nll
    from farstate.models.language_model import LanguageModel
    from farstate.models.mamba2.shape import Mamba2Config

    model = LanguageModel(
        Mamba2Config(
            vocabulary_size=VOCABULARY,
            width=size.width,
            layers=size.layers,
            state_size=size.state_size,
            head_size=size.head_size,
        )
    )

    def loss() -> Any:
        hidden, _ = model(batch[:, :-1])
        return mean_nll(hidden, model.head_weight, batch[:, 1:])

    return with_optimizer(loss, model.parameter_groups(0.1))


def transformers_(size: Size, batch: Any, chunk: int, compiled: bool) -> Step:
    import torch
    from transformers import Mamba2Config, Mamba2ForCausalLM

    model = Mamba2ForCausalLM(
        Mamba2Config(
            num_heads=2 * size.width // size.head_size,
            head_dim=size.head_size,
            vocab_size=VOCABULARY,
            hidden_size=size.width,
            state_size=size.state_size,
            num_hidden_layers=size.layers,
            n_groups=1,
            tie_word_embeddings=True,
            chunk_size=chunk,
            use_cache=False,
        )
    ).train()
    run = torch.compile(model) if compiled else model

    def loss() -> Any:
        logits = run(batch[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return with_optimizer(loss, [*model.parameters()])


def alternate(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Seconds of `repeats` steps of each, taken in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def matmul_rate() -> float:
    """Float32 operations per second of a large square matrix product, the best of several."""
    import torch

    left, right, out = (torch.ones(1024, 1024) for _ in range(3))
    best = min(_timed(lambda: torch.mm(left, right, out=out)) for _ in range(15))
    return 2.0 * 1024**3 / best


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def profile(step: Step, rows: int) -> list[tuple[str, float]]:
    """Share of the time of the operations that take most of it."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            step()
    events = profiler.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    top = sorted(events, key=lambda event: -event.self_cpu_time_total)[:rows]
    return [(event.key, event.self_cpu_time_total / total) for event in top]


def contest(size: Size, repeats: int, compiled: bool) -> dict[str, Any]:
    import torch

    from farstate.ops.ssd import default_chunk_length

    batch = torch.randint(0, VOCABULARY, (size.batch, size.time + 1), generator=torch.Generator().manual_seed(0))
    plain = {chunk: transformers_(size, batch, chunk, False) for chunk in (*CHUNKS, DEFAULT_CHUNK)}
    for step in plain.values():
        step()
    trials = {chunk: min(_timed(plain[chunk]) for _ in range(2)) for chunk in CHUNKS}
    best = min(trials, key=lambda chunk: trials[chunk])

    steps: dict[str, Step] = {
        "farstate": ours(size, batch),
        f"transformers, chunk {best}": plain[best],
        f"transformers, chunk {DEFAULT_CHUNK} (default)": plain[DEFAULT_CHUNK],
    }
    if compiled:
        steps[f"transformers, chunk {best}, compiled"] = transformers_(size, batch, best, True)
    for step in steps.values():
        step()
        step()
    seconds = alternate(steps, repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rate = matmul_rate()
    flops = step_flops(size, default_chunk_length(size.time, size.head_size, size.state_size))
    return {
        "size": dataclasses.asdict(size),
        "seconds": seconds,
        "tokens_per_second": {name: size.tokens / median for name, median in medians.items()},
        "ratio": {name: median / medians["farstate"] for name, median in medians.items()},
        "matmul_rate": rate,
        "share_of_matmul_rate": flops / medians["farstate"] / rate,
        "profile": profile(steps["farstate"], 12),
    }


def show(result: dict[str, Any]) -> None:
    size = result["size"]
    print(
        f"\n{size['name']}: width {size['width']}, {size['layers']} layers, state {size['state_size']}, head {size['head_size']}, "
        f"vocabulary {VOCABULARY}, batch {size['batch']} × {size['time']} tokens"
    )
    print(f"{'':45s} {'tokens/s':>10s} {'ms a step':>10s} {'fastest':>10s} {'farstate is':>12s}")
    for name, per_second in result["tokens_per_second"].items():
        seconds = result["seconds"][name]
        print(
            f"{name:45s} {per_second:10,.0f} {1e3 * statistics.median(seconds):10.1f} {1e3 * min(seconds):10.1f} {result['ratio'][name]:11.2f}×"
        )
    print(
        f"matrix products of a step run at {result['share_of_matmul_rate']:.0%} of the {result['matmul_rate'] / 1e9:.0f} GFLOP/s of a large one"
    )
    print("time by operation: " + ", ".join(f"{name.removeprefix('aten::')} {share:.0%}" for name, share in result["profile"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7, help="steps of each contestant that are timed")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--compile", action="store_true", help="also torch.compile transformers' model: minutes, needs a C++ compiler"
    )
    parser.add_argument("--json", type=Path, help="write all measurements here")
    arguments = parser.parse_args()
    # Read when torch starts its thread pool: spinning threads of a busy machine would be measured, not the code.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {arguments.threads} threads, load average {os.getloadavg()[0]:.1f} before the run")
    results = []
    for name in arguments.sizes:
        results.append(contest(SIZES[name], arguments.repeats, arguments.compile))
        show(results[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
