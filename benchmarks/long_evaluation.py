"""Does an evaluation of 131,072 positions cost what one of 4,096 does, per token and in memory?

    python benchmarks/long_evaluation.py

Evaluates the same Mamba-2, with the same rows and segment length, at both lengths, carried state and references,
each in a process of its own. Exit status 1 when the long evaluation takes more than 5 % more memory or gives less
than 90 % of the tokens/s (positions of text per second of the whole measurement).

Speed: the long texts once, the short ones before and after them, as many as make up the same number of tokens.
The two are held against each other in processor seconds, which other jobs on the machine disturb least; wall
time is printed beside.

Memory: the peak of the resident set above its size after the model was loaded, with the allocator told to give
freed blocks of 64 KiB and more back at once. With glibc's default it keeps what it likes: the peak of one and the same
run then scatters by 10 %, whatever the length.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHORT, LONG = 4096, 131072
MEMORY, SPEED = 1.05, 0.90


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", type=int, default=SHORT, help="positions of the short evaluation (default %(default)s)")
    parser.add_argument("--long", type=int, default=LONG, help="positions of the long evaluation (default %(default)s)")
    parser.add_argument(
        "--context",
        type=int,
        default=128,
        help="T_train in tokens; up to it the references cost nothing, which favours the short text (default %(default)s)",
    )
    parser.add_argument("--rows", type=int, default=1, help="texts read side by side (default %(default)s)")
    parser.add_argument("--segment-tokens", type=int, default=2048, help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="(default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the model (default %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="(default %(default)s)")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--texts", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments, arguments.measure)))
        return 0

    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), arguments)
        texts = arguments.rows
        repeats = max(1, arguments.long // arguments.short)
        half = max(1, repeats // 2)
        speeds = [
            child(folder, length, number)
            for length, number in ((arguments.short, texts * half), (arguments.long, texts), (arguments.short, texts * half))
        ]
        memories = [child(folder, length, texts, give_back=True) for length in (arguments.short, arguments.long)]
    for result in speeds:
        print(
            f"{result['length']:>8} positions × {result['texts']:>3} texts: {result['tokens_per_second']:>8.0f} tokens/s "
            f"({result['tokens_per_cpu_second']:.0f} per processor second)"
        )
    for result in memories:
        print(
            f"{result['length']:>8} positions × {result['texts']:>3} texts: peak {result['peak_mib']:.1f} MiB "
            f"above the {result['loaded_mib']:.0f} MiB after loading"
        )
    memory = memories[1]["peak_mib"] / memories[0]["peak_mib"]
    speed = 2 * speeds[1]["tokens_per_cpu_second"] / (speeds[0]["tokens_per_cpu_second"] + speeds[2]["tokens_per_cpu_second"])
    good = memory <= MEMORY and speed >= SPEED
    print(f"memory × {memory:.3f} (≤ {MEMORY}), tokens/s × {speed:.3f} (≥ {SPEED}): {'ok' if good else 'too much'}")
    return 0 if good else 1


def child(folder: str, length: int, texts: int, *, give_back: bool = False) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--store", folder, "--measure", str(length), "--texts", str(texts)]
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"} if give_back else {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def prepare(root: Path, arguments: argparse.Namespace) -> None:
    """A model and a store with as many long documents as are needed, all of made-up tokens."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from farstate.corpus.store import write_store
    from farstate.corpus.tokens import INDEX, INDEX_SCHEMA, TOKENS
    from farstate.files import write_manifest
    from farstate.models.checkpoints import save_model
    from farstate.models.language_model import LanguageModel
    from farstate.models.mamba2.shape import Mamba2Config

    config = Mamba2Config(
        width=arguments.width, layers=arguments.layers, state_size=64, head_size=16, vocabulary_size=arguments.vocabulary
    )
    save_model(LanguageModel(config), root / "model")
    length, documents = arguments.long + 1, arguments.rows
    generator = np.random.default_rng(0)
    shard = root / "shard"
    shard.mkdir()
    generator.integers(arguments.vocabulary, size=length * (documents + 1)).astype("<u2").tofile(shard / TOKENS)
    rows = [
        {
            "id": f"{number:064x}",
            "split": "test" if number else "train",
            "source": "made up",
            "title": str(number),
            "pile_set_name": None,
            "bytes": 2 * length,
            "offset": number * length,
            "length": length,
        }
        for number in range(documents + 1)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA), shard / INDEX)
    contents = {"dtype": "uint16", "vocabulary_size": arguments.vocabulary, "tokens": length * (documents + 1)}
    write_manifest(shard, contents, [TOKENS, INDEX])
    write_store([shard], arguments.vocabulary, root / "store")


def measure(arguments: argparse.Namespace, length: int) -> dict[str, float]:
    """One evaluation in this process: tokens/s and the peak of the resident set above what loading took."""
    import torch

    from farstate.corpus.store import TokenStore
    from farstate.evaluation.perplexity import EvaluationSettings, measure
    from farstate.evaluation.positions import write_positions
    from farstate.evaluation.texts import select
    from farstate.models.checkpoints import load_model
    from farstate.params import Evaluate

    torch.set_num_threads(arguments.threads)
    store = TokenStore(arguments.store / "store")
    model = load_model(arguments.store / "model")
    settings = EvaluationSettings(rows=arguments.rows, segment_tokens=arguments.segment_tokens, threads=arguments.threads)
    parameters = Evaluate(length=length, stretches_per_document=-(-arguments.texts // arguments.rows))
    texts = select(store, parameters)[: arguments.texts]
    loaded = resident()
    reset_peak()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    losses = measure(model, store, texts, parameters, arguments.context, settings)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    write_positions(arguments.store / "positions.parquet", losses.positions["carried"], losses.positions["window"], len(texts))
    return {
        "length": length,
        "texts": len(texts),
        "tokens_per_second": len(texts) * length / seconds,
        "tokens_per_cpu_second": len(texts) * length / cpu,
        "loaded_mib": loaded / 2**20,
        "peak_mib": (peak_resident() - loaded) / 2**20,
    }


def resident() -> int:
    """Bytes of this process in memory now."""
    import resource

    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def reset_peak() -> None:
    """Let the kernel's record of the largest resident set start anew (Linux); without it the imports would count."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """Bytes of the largest resident set since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")))


if __name__ == "__main__":
    sys.exit(main())
