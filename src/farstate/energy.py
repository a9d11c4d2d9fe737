"""What a job's devices used, where they tell: processor packages by RAPL, NVIDIA GPUs by `nvidia-smi`. Best effort, never an error.

Both count whole devices, so what other programs used at the same time is in it. Most systems let only root read RAPL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
SECONDS = 5.0
"""Between two samples of a GPU's power."""


class Meter:
    """Energy since it was started, in joules.

    Attributes:
        joules: None as long as, and where, no device tells.
    """

    def __init__(self, powercap: Path = POWERCAP, seconds: float = SECONDS) -> None:
        self.joules: float | None = None
        self._powercap, self._seconds = powercap, seconds
        self._before = _counters(powercap)
        self._gpus = 0.0
        self._told = False
        self._done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True) if shutil.which("nvidia-smi") else None
        if self._sampler is not None:
            self._sampler.start()

    def stop(self) -> None:
        """Read once more, and add up."""
        if self._sampler is not None:
            self._done.set()
            self._sampler.join(timeout=15)
        after = _counters(self._powercap)
        used = 0.0
        for package, (start, wraps_at) in self._before.items():
            if package in after:
                end = after[package][0]
                used += (end - start if end >= start else end - start + wraps_at) * 1e-6
        if self._before.keys() & after.keys() or self._told:
            self.joules = round(used + self._gpus, 1)

    def _sample(self) -> None:
        """Power times the time since the sample before, until stopped."""
        last = time.monotonic()
        while True:
            stopped = self._done.wait(self._seconds)
            watts, now = _power(), time.monotonic()
            if watts is None:
                return
            self._gpus += watts * (now - last)
            self._told, last = True, now
            if stopped:
                return


@contextmanager
def metered() -> Iterator[Meter]:
    """A meter that runs as long as the block does."""
    meter = Meter()
    try:
        yield meter
    finally:
        meter.stop()


def _counters(powercap: Path) -> dict[str, tuple[int, int]]:
    """By processor package its counter and where that starts anew, in microjoules; empty where they cannot be read."""
    found = {}
    for package in sorted(powercap.glob("intel-rapl:[0-9]*")):
        if package.name.count(":") > 1:
            continue  # a part of a package, which its package counts
        try:
            counter, wraps_at = (int((package / name).read_text()) for name in ("energy_uj", "max_energy_range_uj"))
        except (OSError, ValueError):
            continue
        found[package.name] = counter, wraps_at
    return found


def _power() -> float | None:
    """Watts of the visible GPUs together; None where they do not tell."""
    command = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return sum(float(line) for line in done.stdout.split()) if done.returncode == 0 and done.stdout.strip() else None
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
