"""What a sweep of Effective Remembrance costs beside reading the same tokens plainly.

    python benchmarks/remembrance.py                                # a model of the demo's size
    python benchmarks/remembrance.py --width 768 --layers 24 --state-size 128 --head-size 64 --vocabulary 50288 --length 2048 --texts 2
    python benchmarks/remembrance.py --device cuda …

The yardstick is (sum of the suffix lengths) ÷ (tokens/s of the plain forward pass, hidden states only, at its best batch size):
the same model reads segments of the same length with a carried state, at several batch sizes. Plain passes and sweeps take
turns, and every time printed is the median of its rounds, so that other jobs on the machine disturb both alike. Exit status 1
when the sweep costs more than 1.15 times the yardstick.

Printed beside: the share of the distances, and the padding that the model read. The distances look at the head for the last
positions of every suffix: of a model as small as the demo's they take a fifth of the time at T = 1,024 (--length 1024 --texts 25),
where these are an eighth of the mean suffix, and a few per cent at the paper's T = 8,192.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch

from farstate.evaluation import remembrance
from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES
from farstate.ops import backends
from farstate.ops.precision import flushed_denormals

LIMIT = 1.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=list(ARCHITECTURES), default="mamba2", help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--state-size", type=int, default=64, help="of Mamba-2 (default %(default)s)")
    parser.add_argument("--head-size", type=int, default=16, help="of Mamba-2 (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=1024, help="(default %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="T (default %(default)s)")
    parser.add_argument("--last", type=int, default=64, help="positions of the mean (default %(default)s)")
    parser.add_argument("--texts", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--rows", type=int, default=16, help="of the sweep, side by side (default %(default)s)")
    parser.add_argument("--segment-tokens", type=int, default=512, help="(default %(default)s)")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[8, 16, 32, 64], help="of the plain forward (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--backend", default="auto", help="(default %(default)s)")
    parser.add_argument("--precision", choices=("float32", "bf16-mixed"), default="float32", help="(default %(default)s)")
    arguments = parser.parse_args()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    with backends.use(arguments.backend), flushed_denormals():
        return compare(arguments)


def compare(arguments: argparse.Namespace) -> int:
    device = torch.device(arguments.device)
    sizes: dict[str, Any] = {"width": arguments.width, "layers": arguments.layers, "vocabulary_size": arguments.vocabulary}
    if arguments.architecture in ("mamba2", "hybrid"):
        sizes |= {"state_size": arguments.state_size, "head_size": arguments.head_size}
    config = ARCHITECTURES[arguments.architecture].config(architecture=arguments.architecture, **sizes)
    model = LanguageModel(config, device=device).eval()
    length = arguments.length
    tokens = np.random.default_rng(0).integers(arguments.vocabulary, size=(max(arguments.texts, *arguments.batches), length + 1))
    starts = remembrance.default_starts(length, 2)
    suffixes = arguments.texts * sum(length + 1 - start for start in starts)

    def plain(batch: int) -> float:
        """Tokens/s."""
        begin = clock(device)
        state = None
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=arguments.precision == "bf16-mixed"):
            for at in range(0, length, arguments.segment_tokens):
                part = torch.from_numpy(tokens[:batch, at : at + arguments.segment_tokens].copy()).to(device)
                _, state = model(part[:, : length - at], state)
        return batch * length / (clock(device) - begin)

    distance_seconds, read = 0.0, 0
    distances = remembrance._distances

    def timed(*args: Any) -> list[Any]:
        nonlocal distance_seconds
        begin = clock(device)
        found = list(distances(*args))
        distance_seconds += clock(device) - begin
        return found

    class Counted:
        head_weight = model.head_weight

        def __call__(self, part: torch.Tensor, state: Any = None) -> Any:
            nonlocal read
            read += part.numel()
            return model(part, state)

    def sweep() -> tuple[float, float]:
        """Seconds, and those of them spent on distances."""
        nonlocal distance_seconds, read
        distance_seconds, read = 0.0, 0
        begin = clock(device)
        remembrance.sweep(
            Counted(),
            lambda text, start, count: tokens[text, start : start + count],
            arguments.texts,
            length,
            starts,
            last=arguments.last,
            rows=arguments.rows,
            segment_tokens=arguments.segment_tokens,
            device=device,
            vocabulary_size=arguments.vocabulary,
            precision=arguments.precision,
        )
        return clock(device) - begin, distance_seconds

    remembrance._distances = timed  # type: ignore[assignment]
    for batch in arguments.batches:  # warm
        plain(batch)
    if device.type == "cuda":
        sweep()
    speeds: dict[int, list[float]] = {batch: [] for batch in arguments.batches}
    sweeps: list[tuple[float, float]] = []
    for _ in range(arguments.rounds):
        for batch in arguments.batches:
            speeds[batch].append(plain(batch))
        sweeps.append(sweep())
    medians = {batch: statistics.median(found) for batch, found in speeds.items()}
    best = max(medians.values())
    seconds, spent = (statistics.median(column) for column in zip(*sweeps, strict=True))
    for batch, speed in medians.items():
        print(f"plain forward, batch {batch:>4} × {arguments.segment_tokens}: {speed:>10,.0f} tokens/s")
    yardstick = suffixes / best
    print(
        f"sweep, {arguments.texts} texts × {len(starts)} starts, T = {length}, {arguments.rows} rows: {suffixes:,} tokens in {seconds:.2f} s "
        f"({suffixes / seconds:,.0f} tokens/s), of it distances {spent:.2f} s ({spent / seconds:.1%}), padding {read / suffixes - 1:.1%}"
    )
    ratio = seconds / yardstick
    print(f"yardstick {yardstick:.2f} s: ratio {ratio:.3f} (≤ {LIMIT}): {'ok' if ratio <= LIMIT else 'too much'}")
    return 0 if ratio <= LIMIT else 1


def clock(device: torch.device) -> float:
    """Seconds: on a CPU those of the processor, which other jobs on the machine disturb least."""
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
