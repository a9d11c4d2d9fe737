"""What several processes and less memory cost: training steps of one and of two processes, and of recomputed blocks, on this CPU.

    python benchmarks/distributed.py [--repeats 3] [--steps 10] [--json FILE]

Mamba-2 at sizes of the demo, float32, AdamW, one thread a process unless said otherwise; every contestant trains on the same batch. Those of
several processes are started by torchrun, all contestants in turns, and the medians over the repeats are reported:

- seconds of a step;
- memory of one process in bytes: parameters, gradients and optimizer (shards count as what they hold), and what the forward pass keeps
  for the backward pass, counted tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = 2048
SIZES = {
    "small": {"width": 64, "layers": 2, "batch": 64, "time": 32},
    "large": {"width": 128, "layers": 4, "batch": 16, "time": 256},
}
CONTESTANTS: dict[str, dict[str, Any]] = {
    "1 process": {},
    "1 process, 2 threads": {"threads": 2},
    "2 processes, ddp": {"processes": 2, "mode": "ddp"},
    "2 processes, fsdp": {"processes": 2, "mode": "fsdp"},
    "1 process, activation_checkpointing": {"recomputes": True},
    "1 process, split_micro_batches: 2": {"split": 2},
}


def work(size: dict[str, int], steps: int, *, mode: str = "ddp", recomputes: bool = False, split: int = 1) -> dict[str, float]:
    """What one process measures."""
    import torch
    from torch.distributed.tensor import DTensor

    from farstate.models.language_model import LanguageModel
    from farstate.models.mamba2.shape import Mamba2Config
    from farstate.params import Recipe
    from farstate.training import distributed
    from farstate.training.recipe import build_optimizer, clip_gradients
    from farstate.training.trainer import _Scored

    config = Mamba2Config(vocabulary_size=VOCABULARY, width=size["width"], layers=size["layers"], state_size=64, head_size=16)
    with distributed.launched() as processes:
        model = LanguageModel(config, torch.Generator().manual_seed(0))
        model.recomputes = recomputes
        blocks = list(model.backbone.layers)
        scored = distributed.shared_out(_Scored(model, VOCABULARY), blocks, mode, processes, torch.device("cpu"))
        optimizer = build_optimizer(model, Recipe(batch_tokens=1, peak_learning_rate=1e-4))
        shape = (size["batch"] // processes.world, size["time"] + 1)
        parts = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(processes.rank)).chunk(split)
        kept: dict[int, int] = {}

        def keep(tensor: Any) -> Any:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        def local(tensor: Any) -> int:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            return int(own.numel() * own.element_size())

        def step(count: bool = False) -> None:
            for number, part in enumerate(parts):
                with distributed.accumulating(scored, number == len(parts) - 1):
                    if count:
                        kept.clear()
                        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                            loss, _ = scored(part, None, None)
                    else:
                        loss, _ = scored(part, None, None)
                    (loss / len(parts)).backward()
            clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            if not count:
                optimizer.zero_grad(set_to_none=True)

        step()
        step(count=True)
        owned = list(model.parameters())
        held = sum(map(local, owned)) + sum(local(p.grad) for p in owned if p.grad is not None)
        held += sum(local(value) for slots in optimizer.state.values() for value in slots.values())
        optimizer.zero_grad(set_to_none=True)
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            step()
            processes.agreed(0)
            seconds.append(time.perf_counter() - began)
        # What enters a recomputed block is held beside the tensors that autograd saves.
        entering = len(blocks) * parts[0][:, 1:].numel() * size["width"] * 4 if recomputes else 0
        return {"seconds": statistics.median(seconds), "held": held, "kept": sum(kept.values()) + entering}


def measured(size: str, contestant: str, steps: int) -> dict[str, float]:
    given = CONTESTANTS[contestant]
    processes = given.get("processes", 1)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, __file__, "--work", size, contestant, "--steps", str(steps)],
        env={**os.environ, "OMP_NUM_THREADS": str(given.get("threads", 1)), "OMP_WAIT_POLICY": "PASSIVE"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        size, contestant = options.work
        given = {key: value for key, value in CONTESTANTS[contestant].items() if key not in ("threads", "processes")}
        told = work(SIZES[size], options.steps, **given)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(told))
        return
    results: dict[str, Any] = {}
    for size, sizes in SIZES.items():
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(options.repeats):
            for name in CONTESTANTS:
                runs[name].append(measured(size, name, options.steps))
        medians = {name: {what: statistics.median(run[what] for run in of) for what in of[0]} for name, of in runs.items()}
        results[size] = medians
        print(f"\n{size}: {sizes}, load {os.getloadavg()[0]:.1f}")
        first = medians["1 process"]
        for name, told in medians.items():
            print(
                f"{name:38s} {1e3 * told['seconds']:8.1f} ms ({told['seconds'] / first['seconds']:.2f}×)   "
                f"held {told['held'] / 1e6:7.2f} MB ({told['held'] / first['held']:.2f}×)   "
                f"kept {told['kept'] / 1e6:7.2f} MB ({told['kept'] / first['kept']:.2f}×)"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
