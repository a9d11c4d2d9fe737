"""The real kernels of mamba-ssm and fla under Triton's interpreter, through our wrappers, against our definitions.

`python interpreted_vendors.py mamba_ssm|fla` prints one JSON object: errors by case. A process of its own, since all of this
must be in place before the libraries are imported, and must not be seen by anything else: transformers chooses its kernels
by what it finds.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import json
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec

os.environ |= {"TRITON_INTERPRET": "1", "MAMBA_DETERMINISTIC": "1", "FLA_DISABLE_BACKEND_DISPATCH": "1"}

import torch
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from farstate.ops import backends, checks
from farstate.ops.vendors import fla, mamba_ssm, pieces

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = True

EXTREME = torch.tensor([-20.0, -1e-4, -3.0, -1e-2], dtype=torch.float64)


class Index(int):
    """A loop index of a kernel: the interpreter hands out plain integers, the compiler's can be cast."""

    def to(self, dtype: object) -> Index:
        return self


def without_gpu() -> None:
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, misc]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=1)  # type: ignore[assignment]
    # Nothing can be timed: of several configurations the first is taken.
    Autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]


def castable_indices() -> None:
    """Loop indices that kernels of fla can cast."""
    for operation in ("ssd", "gla", "wkv6", "gated_delta"):
        fla._function(operation)
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.ops."):
            module.__dict__["range"] = lambda *bounds: map(Index, builtins.range(*bounds))


@contextlib.contextmanager
def addressable(entries: int) -> Iterator[list[int]]:
    """Kernels that can address so many entries only; the value lists the lengths of the pieces they were given."""
    lengths: list[int] = []
    real, limit = pieces.piece_length, pieces.ADDRESSABLE

    def noted(*arguments: int) -> int:
        lengths.append(real(*arguments))
        return lengths[-1]

    pieces.ADDRESSABLE = entries
    mamba_ssm.piece_length = fla.piece_length = noted
    try:
        yield lengths
    finally:
        pieces.ADDRESSABLE = limit
        mamba_ssm.piece_length = fla.piece_length = real


def shortened(given: dict[str, Tensor], time: int, rows: int = 1) -> dict[str, Tensor]:
    """The first positions and rows of the inputs that have them."""
    full = given["initial_state"].shape[0]
    result = {}
    for name, value in given.items():
        if name == "initial_state":
            result[name] = value[:rows]
        elif value.dim() >= 3 and value.shape[0] == full:
            result[name] = value[:rows, :time]
        else:
            result[name] = value
    return result


def extreme(operation: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Log decays from −20 to −1e-4 in one sequence, next to each other."""
    if operation == "ssd":
        time = given["dt"].shape[1]
        decays = EXTREME.repeat(time)[: time * 2].view(1, time, 2)
        return {**given, "dt": -decays, "A": -torch.ones(2).double(), "x": given["x"] / -decays.unsqueeze(-1)}
    decays = given["log_decay"]
    return {**given, "log_decay": EXTREME.repeat(decays.numel())[: decays.numel()].view_as(decays)}


def mamba_cases() -> dict[str, object]:
    cases: dict[str, object] = {}
    given = checks.inputs("ssd")

    def case(name: str, given: dict[str, Tensor], function=mamba_ssm.ssd, operation: str = "ssd") -> None:
        errors = checks.measure(
            lambda **kw: function(**kw, chunk_length=16), backends.load(operation, "naive"), given, torch.device("cpu")
        )
        cases[name] = asdict(errors)

    case("no whole number of chunks", shortened(given, 21))
    grouped = shortened(given, 16)
    grouped |= {name: torch.cat([grouped[name], grouped[name].flip(1)], dim=2) for name in "BC"}
    case("two groups, one whole chunk, no skip", {name: value for name, value in grouped.items() if name != "D"})
    case("one position, from zero", {name: value for name, value in shortened(given, 1).items() if name != "initial_state"})
    case("extreme decays", extreme("ssd", shortened(given, 13)))
    with addressable(2 * 32 * 20) as lengths:
        case("in pieces", shortened(given, 21))
    cases["lengths of pieces"] = lengths

    def halves(x: Tensor, B: Tensor, C: Tensor, **kw: Tensor) -> tuple[Tensor, Tensor]:
        # Views of one tensor, as the block has them.
        together = torch.cat([x.flatten(2), B.flatten(2), C.flatten(2)], dim=-1).half()
        parts = together.split([x.shape[2:].numel(), B.shape[-1], C.shape[-1]], dim=-1)
        y, state = mamba_ssm.ssd(parts[0].unflatten(-1, x.shape[2:]), B=parts[1].unsqueeze(2), C=parts[2].unsqueeze(2), **kw)
        cases["dtypes"] = [str(y.dtype), str(state.dtype)]
        return y.float(), state

    case("half precision, views", shortened(given, 13), halves)

    # The scan of Mamba-1 is a CUDA extension. Where it is not built the library's own definition, of the same signature,
    # stands in for it: what is tested is what our wrapper puts around it.
    cases["without the extension"] = mamba_ssm.unavailable("selective_scan")
    if find_spec("selective_scan_cuda") is None:
        sys.modules["selective_scan_cuda"] = types.ModuleType("selective_scan_cuda")
    library = mamba_ssm._scan_module()
    signature = inspect.signature(library.selective_scan_fn)

    def definition(*args: object, **kwargs: object) -> Tensor:
        signature.bind(*args, **kwargs)
        return library.selective_scan_ref(*args, **kwargs)

    library.selective_scan_fn = definition
    given = checks.inputs("selective_scan")
    case("selective scan", given, mamba_ssm.selective_scan, "selective_scan")
    without = {name: value for name, value in shortened(given, 5).items() if name not in ("D", "initial_state")}
    case("selective scan, from zero, no skip", without, mamba_ssm.selective_scan, "selective_scan")
    with addressable(2 * 16 * (30 + 64) + 1) as lengths:
        case("selective scan, in pieces", given, mamba_ssm.selective_scan, "selective_scan")
    cases["lengths of the scan's pieces"] = lengths
    return cases


def fla_cases() -> dict[str, object]:
    cases: dict[str, object] = {}
    castable_indices()
    checks._KEYS = 16
    for operation in ("ssd", "gla", "wkv6", "gated_delta"):
        given = checks.inputs(operation)
        checks._HEADS = 1
        long = shortened(checks.inputs(operation), 65)
        checks._HEADS = 2

        def case(name: str, given: dict[str, Tensor], operation: str = operation, **more: object) -> None:
            errors = checks.measure(
                lambda **kw: backends.load(operation, "fla")(**kw, **more),
                lambda **kw: backends.load(operation, "naive")(**kw, **more),
                given,
                torch.device("cpu"),
            )
            cases[f"{operation}, {name}"] = asdict(errors)

        case("past a chunk", long)
        # Less than 65 positions: there the library's recurrent kernel of RWKV-6 would give the final state no gradient.
        case("extreme decays", extreme(operation, shortened(given, 21)))
        if operation in ("gla", "gated_delta"):
            case("own scale, from zero", {k: v for k, v in shortened(given, 5).items() if k != "initial_state"}, scale=0.7)
        if operation == "gated_delta":
            with addressable(64 * 64 + 1) as lengths:
                case("in pieces", long)
            cases["lengths of pieces"] = lengths
    grouped = shortened(checks.inputs("ssd"), 5)
    grouped |= {name: torch.cat([grouped[name], grouped[name].flip(1)], dim=2) for name in "BC"}
    case("two groups, no skip", {name: value for name, value in grouped.items() if name != "D"}, "ssd")

    half = {name: value.half() for name, value in shortened(checks.inputs("gla"), 5).items()}
    o, state = fla.gla(**half)
    cases["dtypes"] = [str(o.dtype), str(state.dtype)]
    cases["loaded"] = [name for name in ("transformers", "fla.layers", "fla.models") if name in sys.modules]
    return cases


if __name__ == "__main__":
    without_gpu()
    print(json.dumps({"mamba_ssm": mamba_cases, "fla": fla_cases}[sys.argv[1]]()))
