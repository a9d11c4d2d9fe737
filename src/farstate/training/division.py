"""How the rows of a batch are divided among micro-batches, processes and parts: for the trainer and for the planner. Loads no torch."""

from __future__ import annotations

from farstate.errors import FarstateError


def rows_of_batch(
    *, batch_tokens: int, micro_batches: int, context: int, split: int = 1, processes: int = 1, passes: bool = False
) -> int:
    """Rows of a whole batch, once it is known that they can be divided.

    Args:
        split: parts of each micro-batch (`settings.split_micro_batches`).
        processes: that share a micro-batch.
        passes: states pass from micro-batch to micro-batch (`previous: micro_batch`).

    Raises:
        FarstateError: they cannot; naming the numbers that are allowed.
    """
    part = context * micro_batches
    if batch_tokens % part:
        raise FarstateError(f"recipe.batch_tokens: {batch_tokens} is not a multiple of context × micro_batches = {part}")
    whole = batch_tokens // part
    if passes and split > 1:
        raise FarstateError(
            f"settings.split_micro_batches: {split}, but with `previous: micro_batch` states pass from micro-batch to micro-batch, and a "
            "smaller one is another experiment: set it to 1 for this run"
        )
    if whole % processes:
        raise FarstateError(
            f"a micro-batch of {whole} rows (recipe.batch_tokens / context / recipe.micro_batches) cannot be shared by {processes} "
            f"processes; start {_listed(whole)} of them (settings.distributed.processes × nodes)"
        )
    if whole // processes % split:
        raise FarstateError(
            f"settings.split_micro_batches: {split} does not divide the {whole // processes} rows that a process has of a micro-batch; "
            f"allowed: {_listed(whole // processes)}"
        )
    return batch_tokens // context


def allowed_splits(*, batch_tokens: int, micro_batches: int, context: int, processes: int = 1, passes: bool = False) -> list[int]:
    """Values of `settings.split_micro_batches` that `rows_of_batch` accepts, ascending; none where processes cannot share a micro-batch."""
    whole, rest = divmod(batch_tokens, context * micro_batches)
    if rest or whole % processes:
        return []
    return [1] if passes else divisors(whole // processes)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(number: int) -> str:
    return ", ".join(map(str, divisors(number)))
