"""Reading the tables that a page shows; each error says which file, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars

from farstate.errors import FarstateError


def read_table(directory: Path, name: str, columns: Sequence[str], *, may_be_empty: bool = False) -> polars.DataFrame:
    """`name`.parquet in `directory`, held against the `columns` that are read from it.

    Raises:
        FarstateError: the table is missing, damaged, lacks a column, or is empty and must not be.
    """
    path = directory / f"{name}.parquet"
    try:
        table = polars.read_parquet(path)
    except FileNotFoundError:
        raise FarstateError(f"{path}: no such file; run the comparison that writes it") from None
    except polars.exceptions.PolarsError as error:
        raise FarstateError(
            f"{path}: damaged, not a parquet table ({str(error).splitlines()[0]}); delete it and run again"
        ) from None
    if missing := [column for column in columns if column not in table.columns]:
        raise FarstateError(
            f"{path}: column {', '.join(missing)} is missing; it was written by another version, delete it and run again"
        )
    if not may_be_empty and table.is_empty():
        raise FarstateError(f"{path}: holds no rows, there is nothing to draw")
    return table


def rounded(value: float) -> float:
    """Six significant digits: more than a hover shows, a third of the bytes, and steady against the last bits of a float."""
    return float(f"{value:.6g}")
