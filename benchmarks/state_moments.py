"""What recording the state's moments costs beside a plain forward pass on this CPU.

    python benchmarks/state_moments.py [--threads 1] [--repeats 9] [--long] [--json FILE]

Every registered architecture, at the demo's sizes and at width 256, with and without recording, in alternation. Times are those
of the processor, which a busy machine distorts less than the clock's; the ratio of each pair is taken before the median. With
--long one recurrence of 131,072 steps shows by how much float32 has drifted from float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from farstate.models.language_model import LanguageModel
from farstate.models.registry import ARCHITECTURES, config_from_json
from farstate.ops import state_moments

VOCABULARY = 2048
LONG = 131_072

# By architecture, what differs from its own defaults at the two sizes; batch and time of a call.
DEMO: dict[str, dict[str, Any]] = {
    "mamba1": {},
    "mamba2": {"state_size": 64, "head_size": 16},
    "gla": {},
    "rwkv6": {},
    "gated_deltanet": {"heads": 2},
    "hybrid": {"state_size": 64, "head_size": 16, "attention_heads": 2, "attention_every": 2},
}
WIDE: dict[str, dict[str, Any]] = {
    "gated_deltanet": {"heads": 4},
    "hybrid": {"attention_heads": 4, "attention_every": 2},
}
SIZES = {"demo": (64, 8, 512, DEMO), "width 256": (256, 4, 1024, WIDE)}


def measure(architecture: str, size: str, repeats: int) -> dict[str, Any]:
    width, batch, length, overrides = SIZES[size]
    shape = {"width": width, "layers": 2, "vocabulary_size": VOCABULARY, **overrides.get(architecture, {})}
    model = LanguageModel(config_from_json({**shape, "architecture": architecture}))
    tokens = torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))

    def plain() -> float:
        start = time.process_time()
        model(tokens)
        return time.process_time() - start

    def recording() -> float:
        start = time.process_time()
        with state_moments.recording() as record:
            model(tokens)
        assert record.layers
        return time.process_time() - start

    with torch.no_grad():
        plain(), recording()
        pairs = [(plain(), recording()) for _ in range(repeats)]
    return {
        "architecture": architecture,
        "size": size,
        "plain_ms": 1e3 * statistics.median(p for p, _ in pairs),
        "recording_ms": 1e3 * statistics.median(r for _, r in pairs),
        "ratio": statistics.median(r / p for p, r in pairs),
    }


def drift() -> float:
    """Largest relative error of ‖S‖² over a long sequence with slow decays, against the same in float64 by the scalar path."""
    generator = torch.Generator().manual_seed(0)
    x, k = (torch.randn(1, LONG, heads, size, generator=generator) for heads, size in ((2, 16), (1, 32)))
    log_decay = -torch.rand(1, LONG, 2, generator=generator) * 1e-3
    short = state_moments.scalar_decay(x, k, log_decay)
    exact = torch.zeros(1, 2, 16, 32, dtype=torch.float64)
    worst = 0.0
    for t, (x_t, k_t, decay) in enumerate(zip(x[0].double(), k[0, :, 0].double(), log_decay[0].double().exp(), strict=True)):
        exact.mul_(decay[:, None, None]).add_(x_t[:, :, None] * k_t)
        if t % 64 == 0 or t == LONG - 1:
            norms = exact.square().sum((-2, -1))[0]
            worst = max(worst, ((short.squared_norms[0, t].double() - norms) / norms).abs().max().item())
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--architectures", nargs="+", default=list(ARCHITECTURES))
    parser.add_argument("--long", action="store_true", help=f"also {LONG:,} steps of one recurrence against float64")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    print(f"{'architecture':<16} {'size':<10} {'plain':>10} {'recording':>10} {'ratio':>6}")
    for architecture in options.architectures:
        for size in SIZES:
            result = measure(architecture, size, options.repeats)
            results.append(result)
            print(
                f"{architecture:<16} {size:<10} {result['plain_ms']:>7.1f} ms {result['recording_ms']:>7.1f} ms {result['ratio']:>6.2f}",
                flush=True,
            )
    if options.long:
        print(f"{LONG:,} steps in float32: squared norms within {drift():.1e} of float64")
    if options.json is not None:
        options.json.write_text(json.dumps({"threads": options.threads, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
