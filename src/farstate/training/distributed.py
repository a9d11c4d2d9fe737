"""Several processes that train one model: who this one is, what they decide together, how they share memory, and how they end.

torchrun starts them (docs/distributed.md). Each reads and computes a fixed share of every micro-batch; what one alone may decide
(a stop, a checkpoint, where to go on) the first one decides, since clocks and disks differ. A process that is alone
communicates nothing, and its numbers do not depend on this module.

Tensors on the CPU travel through gloo, those on GPUs through NCCL.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from farstate.errors import FarstateError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Mode = Literal["ddp", "fsdp"]
T = TypeVar("T")

# How long a process waits for the others: longer than the first needs to write a checkpoint, shorter than a night.
_PATIENCE = timedelta(minutes=30)
# Those whose error says nothing new leave this long after the one that speaks, so that its line is seen.
_SPEAKER_FIRST = 1.0
_FAILURE = "farstate/failure"
_CHECKED = "farstate/checked"
_LOST = re.compile(r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|socket|timed out", re.IGNORECASE)


@dataclass(frozen=True)
class Processes:
    """The processes of one training, as one of them sees them. All must call a method for any to return from it.

    Attributes:
        rank: of this one, from 0.
        world: how many.
    """

    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes, decides and speaks."""
        return self.rank == 0

    def agreed(self, *numbers: int) -> list[int]:
        """The largest of each number over all processes."""
        if self.world == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()

    def summed(self, number: float) -> float:
        """The sum over all processes, in float64; the same on each."""
        if self.world == 1:
            return number
        value = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(value)
        return value.item()

    def told(self, value: T) -> T:
        """What the first process gave, on all of them."""
        if self.world == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0)
        told: T = values[0]
        return told

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """The first process gets every process's tensor on the CPU, in order of rank, the others nothing; shapes may differ."""
        if self.world == 1:
            return [tensor]
        own = tensor.detach().cpu().contiguous()
        shapes: list[Any] = [None] * self.world
        dist.all_gather_object(shapes, tuple(own.shape))
        if not self.first:
            if own.numel():
                dist.send(own, 0)
            return []
        others = [torch.empty(shape, dtype=own.dtype) for shape in shapes[1:]]
        for rank, other in enumerate(others, start=1):
            if other.numel():
                dist.recv(other, rank)
        return [own, *others]

    def everywhere(self, tensor: Tensor) -> list[Tensor]:
        """Every process's tensor (of one shape and device) on all of them, in order of rank."""
        if self.world == 1 or not tensor.numel():
            return [tensor] * self.world
        own = tensor.contiguous()
        tensors = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(tensors, own)
        return tensors

    def received(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The first process's tensors (on the CPU), to be read by all in the same order: one at a time is in memory elsewhere."""
        return tensors if self.world == 1 else _Received(tensors, self)


class _Received(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], processes: Processes) -> None:
        self._own = tensors
        own = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
        self._kinds = processes.told(own)
        self._first = processes.first

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._kinds[name]
        tensor = self._own[name].contiguous() if self._first else torch.empty(shape, dtype=dtype)
        if tensor.numel():
            dist.broadcast(tensor, src=0)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._kinds

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)


ALONE = Processes()


def current() -> Processes:
    """The processes that have joined, or this one alone."""
    return Processes(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else ALONE


@contextmanager
def launched(first: Callable[[], object]) -> Iterator[Processes]:
    """Join the processes that torchrun started together with this one; without torchrun it is alone.

    When one fails all do: one says why in one line, the others leave with status 1 and without a word.

    Args:
        first: done by the first process before they join, however long it takes: inputs may be large, and are checked once.

    Raises:
        FarstateError: another process ended without a word.
        SystemExit: another process has said what went wrong.
    """
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        first()
        yield current()
        return
    store, rank, world = next(dist.rendezvous("env://"))
    if rank == 0:
        first()
        store.set(_CHECKED, "")
    else:
        store.wait([_CHECKED], timedelta(days=7))
    gpus = torch.cuda.is_available() and dist.is_nccl_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", store=store, rank=rank, world_size=world, timeout=_PATIENCE)
    processes = Processes(rank, world)
    try:
        yield processes
        processes.agreed(0)
    except Exception as error:
        if not _speaks(store, rank):
            time.sleep(_SPEAKER_FIRST)
            sys.exit(1)
        if _is_loss(error):
            raise FarstateError(
                f"another of the {world} processes of this training ended without a word (killed, or its machine failed); checkpoints are "
                f"kept, run the same command again to go on ({str(error).strip().splitlines()[0][:200]})"
            ) from error
        raise
    dist.destroy_process_group()


def _speaks(store: dist.Store, rank: int) -> bool:
    """Whether this process is the first that failed."""
    try:
        return bool(store.compare_set(_FAILURE, "", str(rank)) == str(rank).encode())
    except Exception:  # the store is gone with the process that held it
        return True


def _is_loss(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_LOST.search(str(error))))


def local_gpu() -> torch.device:
    """The GPU of this process: the one whose number is its rank on the node.

    Raises:
        FarstateError: the node has fewer GPUs than processes.
    """
    if "LOCAL_RANK" not in os.environ or not dist.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    number, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= count:
        raise FarstateError(
            f"torchrun --nproc-per-node: at least {number + 1} processes on a node of {count} GPUs; start one a GPU "
            "(settings.distributed.processes), or use settings.device: cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def shared_out(module: nn.Module, blocks: list[nn.Module], mode: Mode, processes: Processes, device: torch.device) -> nn.Module:
    """`module` as all processes compute it: its gradients are the mean of theirs after `backward`.

    fsdp changes the parameters of `module` in place into shards, one group a block and one of the rest; build the optimizer after.
    """
    if processes.world == 1:
        return module
    if mode == "ddp":
        return DistributedDataParallel(module, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes.world,))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def accumulating(module: nn.Module, last: bool) -> AbstractContextManager[object]:
    """A context for the forward and backward pass of a micro-batch: gradients travel with the last one only.

    Shards are reduced with every micro-batch: else each process would hold the gradients of the whole model.
    """
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()


def whole(tensor: Tensor) -> Tensor:
    """The tensor that is shared out, on every process; any other is returned as it is."""
    return tensor.full_tensor() if _is_shared_out(tensor) else tensor


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, equal on all processes, shared out as `like` is."""
    if not _is_shared_out(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _is_shared_out(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor; that library takes seconds to load, and a process that is alone has no use for it."""
    return hasattr(tensor, "full_tensor")
