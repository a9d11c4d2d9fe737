"""The devices that a plan is made for: memory, and the operations a second that they reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from farstate.errors import FarstateError, nearest
from farstate.settings import Settings

UTILISATION = 0.3
"""Share of a GPU's peak that training is assumed to reach. Not measured; `planner.rate` takes what you measured."""
CPU_RATE = 2.0e10
"""FLOP/s of one CPU thread: 30,000 tokens/s of the demo's Mamba-2 of width 64 (docs/performance.md) at 0.65 MFLOP a token."""


@dataclass(frozen=True)
class Device:
    """Where a training process computes.

    Attributes:
        memory: bytes that one process may use.
        peak: FLOP/s of matrix products in bfloat16 and in float32, by precision; as the vendor states them, without sparsity.
        rate: FLOP/s reached, whatever the precision; None: UTILISATION · peak.
        why: what made it the device that is planned for.
    """

    name: str
    memory: float
    peak: Mapping[str, float]
    rate: float | None = None
    why: str = ""

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    def reached(self, precision: str) -> float:
        """FLOP/s of one device in training."""
        return self.rate or UTILISATION * self.peak[precision]


def _gpu(name: str, gigabytes: float, half: float, single: float) -> Device:
    return Device(name, gigabytes * 1e9, {"bf16-mixed": half * 1e12, "float32": single * 1e12})


GPUS = {
    device.name: device
    for device in (
        _gpu("a100-40gb", 40, 312, 19.5),
        _gpu("a100-80gb", 80, 312, 19.5),
        _gpu("l40s", 48, 362, 91.6),
        _gpu("h100", 80, 989, 67),
        _gpu("h200", 141, 989, 67),
        _gpu("b200", 180, 2250, 75),
    )
}
AUTOMATIC_GPU = "a100-40gb"
"""What `auto` stands for where a GPU is used: what fits it, fits all others of the list."""
NAMES = ("auto", "cpu", *GPUS)


def device_of(settings: Settings, *, elsewhere: bool, threads: int = 1) -> Device:
    """The device that `settings.device` and `settings.planner` describe.

    Args:
        elsewhere: whether jobs run on a cluster: then `auto` is a GPU unless `settings.device` says cpu.
        threads: CPU threads of a process, where the device is the CPU.

    Raises:
        FarstateError: a name that is not in the list, or one that contradicts `settings.device`.
    """
    planner = settings.planner
    name, why = _named(settings, elsewhere)
    if name == "cpu":
        rate = threads * CPU_RATE
        device = Device("cpu", _memory_of_this_machine(), {"bf16-mixed": rate, "float32": rate}, rate)
    else:
        device = GPUS[name]
    device = replace(device, why=why)
    if planner.memory_gb is not None:
        device = replace(device, memory=planner.memory_gb * 1e9)
    return device if planner.rate is None else replace(device, rate=planner.rate)


def _named(settings: Settings, elsewhere: bool) -> tuple[str, str]:
    """The device's name, and why it is that one."""
    name, computes = settings.planner.device, settings.device
    if name not in NAMES:
        raise FarstateError(f"settings: planner.device: unknown device '{name}'{nearest(name, NAMES)}; known: {', '.join(NAMES)}")
    if computes == "cpu" and name in GPUS:
        raise FarstateError(f"settings: planner.device: {name}, but with device: cpu no job uses a GPU; set one of them to auto")
    if computes == "cuda" and name == "cpu":
        raise FarstateError("settings: planner.device: cpu, but with device: cuda every job needs a GPU; set one of them to auto")
    if computes == "cpu":
        return "cpu", "device: cpu"
    if name != "auto":
        return name, f"planner.device: {name}"
    if computes == "cuda":
        return AUTOMATIC_GPU, "device: cuda, planner.device: auto"
    if elsewhere:
        return AUTOMATIC_GPU, "as the jobs of a cluster, planner.device: auto"
    if _has_gpu():
        return AUTOMATIC_GPU, "this machine has a GPU, planner.device: auto"
    return "cpu", "this machine has no GPU; --cluster plans as the jobs of a cluster do"


def _has_gpu() -> bool:
    return os.path.exists("/proc/driver/nvidia/version")


def _memory_of_this_machine() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
