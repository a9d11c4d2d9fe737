"""Kernels compiled ahead of time, for a GPU that need not be there: what they would use of it, and their PTX.

    python -m farstate.kernels.aot < jobs.json > results.json

A kernel that was defined under TRITON_INTERPRET=1 is a Python function and cannot be compiled. `compile_in_child` therefore
compiles in another process, which imports the kernels without that variable: all jobs in one, for its start takes longer
than a kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_WARP = 32


@dataclass(frozen=True)
class Compiled:
    """A kernel as one kind of GPU would run it.

    Attributes:
        registers: of a thread.
        spills: bytes of a thread that did not fit in registers and are stored in memory.
        shared_bytes: shared memory of a program.
        ptx, cubin: the code; cubin is empty where it came from another process.
    """

    name: str
    capability: int
    registers: int
    spills: int
    shared_bytes: int
    ptx: str = field(repr=False)
    cubin: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class Job:
    """One kernel with the types of its arguments, for one kind of GPU.

    Attributes:
        kernel: `farstate.kernels.<module>:<function>`.
        signature: argument → type in Triton's words: `*fp32`, `*bf16`, `i32`, `i64`, `fp32`. Arguments that stand in
            `constexprs` may be left out.
        constexprs: argument → value; None for a pointer that is not given.
        capability: 80 or 90, ten times the compute capability.
        options: `num_warps`, `num_stages`.
    """

    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, Any]
    capability: int
    options: dict[str, int] = field(default_factory=dict)


def compile_for(
    kernel: Any, signature: Mapping[str, str], constexprs: Mapping[str, Any], capability: int, **options: int
) -> Compiled:
    """Compile `kernel`, a function under `@triton.jit`. Arguments as in `Job`.

    Raises:
        RuntimeError: the kernel was defined under TRITON_INTERPRET=1, or an argument has neither a type nor a value.
    """
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError(f"{kernel}: defined under TRITON_INTERPRET=1; `compile_in_child` compiles it in a process without")
    types = {name: "constexpr" if name in constexprs else signature.get(name) for name in kernel.arg_names}
    if missing := [name for name, kind in types.items() if kind is None]:
        raise RuntimeError(f"{kernel.__name__}: no type given for {', '.join(missing)}")
    source = ASTSource(kernel, types, dict(constexprs))
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, _WARP), options=options)
    ptx = compiled.asm["ptx"]
    registers, spills = _resources(ptx, capability)
    return Compiled(kernel.__name__, capability, registers, spills, compiled.metadata.shared, ptx, compiled.asm["cubin"])


def compile_in_child(jobs: Sequence[Job], timeout: float = 600.0) -> list[Compiled]:
    """Compile `jobs` in one other process that knows no interpreter, in their order.

    Raises:
        RuntimeError: a kernel does not compile; with what the compiler said.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps([asdict(job) for job in jobs]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"ahead-of-time compilation failed:\n{done.stderr[-4000:]}")
    return [Compiled(**result) for result in json.loads(done.stdout)]


def report(compiled: Sequence[Compiled]) -> str:
    """A line a kernel."""
    return "\n".join(
        f"{c.name:<44} sm_{c.capability}  {c.registers:3d} registers  {c.spills:4d} B spilled  {c.shared_bytes:6d} B shared"
        for c in compiled
    )


def _resources(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes it spills, as the assembler that Triton brings reports them."""
    arch = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        done = subprocess.run(
            [
                triton.knobs.nvidia.ptxas.path,
                "-v",
                "--regAllocOptLevel=2",
                f"--gpu-name={arch.group(1) if arch else f'sm_{capability}'}",
                str(source),
                "-o",
                str(Path(folder, "kernel.cubin")),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    said = done.stdout + done.stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    if registers is None or spills is None:
        raise RuntimeError(f"the assembler reported no resources: {said[-500:]}")
    return int(registers.group(1)), int(spills.group(1))


def _main() -> None:
    results = []
    for entry in json.load(sys.stdin):
        job = Job(**entry)
        module, name = job.kernel.split(":")
        compiled = compile_for(getattr(import_module(module), name), job.signature, job.constexprs, job.capability, **job.options)
        results.append({key: value for key, value in vars(compiled).items() if key != "cubin"})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    _main()
