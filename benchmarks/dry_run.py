"""How long a dry run takes, for the demo and for the paper's configuration, and what it loads.

    python benchmarks/dry_run.py [--runs 5]

Prints medians of whole-process wall time, each beside that of `snakemake --version` measured in turn: what Snakemake
costs before it has read a line of ours.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time

CASES = {
    "snakemake --version": ["snakemake", "--version"],
    "demo: snakemake -n": ["snakemake", "-n", "reports/fig5.html"],
    "paper: snakemake -n --configfile config/paper.yaml": [
        "snakemake", "-n", "reports/fig5.html", "--configfile", "config/paper.yaml",
    ],
}  # fmt: skip


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    for command in CASES.values():
        seconds(command)  # warm the file cache
    measured: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(runs):
        for name, command in CASES.items():
            measured[name].append(seconds(command))
    base = statistics.median(measured["snakemake --version"])
    print(f"{'command':52} median s   min – max       ratio to the first")
    for name, times in measured.items():
        median = statistics.median(times)
        print(f"{name:52} {median:8.2f}   {min(times):.2f} – {max(times):.2f}   {median / base:6.1f}")


if __name__ == "__main__":
    main()
