"""The declared tables (docs/tables.md) against the schemas of the code that writes them, and the gate that holds a written table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from farstate import tables
from farstate.errors import FarstateError

BY_NAME = {table.name: table for table in tables.TABLES}


def kinds(schema: Any) -> list[tuple[str, str]]:
    """Name and kind of the columns of a polars or an arrow schema."""
    arrow = pl.DataFrame(schema=schema).to_arrow().schema if isinstance(schema, dict) else schema
    return [(field.name, tables._kind(field.type)) for field in arrow]


def schemas() -> dict[str, Any]:
    from farstate.corpus import documents, store, tokens
    from farstate.evaluation import compare, compare_remembrance, compare_states, positions, reach, shift, states
    from farstate.tasks import compare as scores
    from farstate.tasks import examples, measure
    from farstate.training import records

    return {
        "documents": documents.SCHEMA,
        "tokens": tokens.INDEX_SCHEMA,
        "store": store.STORE_SCHEMA,
        "state ages of a training": records.AGES_SCHEMA,
        "examples": examples.SCHEMA,
        "perplexity by position": positions.SCHEMA,
        "states": states.STATES_SCHEMA,
        "sampled states": states.SAMPLES_SCHEMA,
        "states by position": states.POSITIONS_SCHEMA,
        "shift": shift.SHIFT_SCHEMA,
        "association": shift.ASSOCIATION_SCHEMA,
        "swaps": shift.SWAPS_SCHEMA,
        "answers": measure.ANSWER_SCHEMA,
        "curves": compare.CURVE_SCHEMA,
        "references": compare.CURVE_SCHEMA,
        "verdicts": compare.VERDICT_SCHEMA,
        "differences": compare.DIFFERENCE_SCHEMA,
        "state ages": compare.AGE_SCHEMA,
        "reach": reach.REACH_SCHEMA,
        "compared remembrance": compare_remembrance.TABLE_SCHEMA,
        "compared states": compare_states.CURVE_SCHEMA,
        "heads": compare_states.HEAD_SCHEMA,
        "scores": scores.SCORE_SCHEMA,
    }


@pytest.mark.parametrize(("name", "schema"), schemas().items(), ids=list(schemas()))
def test_the_declared_columns_are_those_of_the_writer(name: str, schema: Any) -> None:
    assert kinds(schema) == [(column.name, column.kind) for column in BY_NAME[name].columns]


def test_tables_without_a_schema_in_the_code_are_held_as_their_writers_make_them(tmp_path: Path) -> None:
    from farstate.evaluation.bins import log_bins
    from farstate.evaluation.perplexity import KINDS, Losses, PositionSums, perplexity_table
    from farstate.evaluation.texts import Text
    from farstate.summary import CURVE_COLUMNS
    from farstate.training.records import Metrics

    bins = log_bins(64, 16, 2)
    sums = {kind: np.zeros((1, len(bins))) for kind in KINDS}
    losses = Losses(bins, sums, {kind: PositionSums(64) for kind in ("carried", "window")}, {})
    labels = {"model": "m", "arm": "base", "seed": None}
    perplexity_table(losses, [Text("d", 0, ())], labels, 16).write_parquet(tmp_path / "perplexity.parquet")
    metrics = Metrics(tmp_path / "live", 64, None)
    metrics.add(1.0, 2.0, 1.0e-3)
    metrics.write(tmp_path / "metrics.jsonl")
    metrics.close()
    (tmp_path / "fig5.csv").write_text(",".join(CURVE_COLUMNS) + "\n")
    tables.hold_all(tmp_path)
    tables.hold(tmp_path / "fig5.csv", page=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda table: table.append_column("extra", pa.array([1])), "'extra' is not declared"),
        (lambda table: table.drop_columns("age"), "'age' is missing"),
        (lambda table: table.set_column(1, "age", pa.array([1.0])), "'age' is number, declared whole number"),
        (lambda table: table.select(["age", "step", "sequences"]), "columns in another order"),
    ],
)
def test_a_table_with_other_columns_is_refused(tmp_path: Path, change: Any, told: str) -> None:
    table = pa.table({"step": [1], "age": [16], "sequences": [4]})
    pq.write_table(table, tmp_path / "ages.parquet")
    tables.hold_all(tmp_path)
    pq.write_table(change(table), tmp_path / "ages.parquet")
    with pytest.raises(FarstateError, match=r"ages\.parquet: .*" + told):
        tables.hold_all(tmp_path)


def test_a_result_with_a_table_that_nobody_declared_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"panel": ["a"]}), tmp_path / "new.parquet")
    with pytest.raises(FarstateError, match="no such table is declared"):
        tables.hold(tmp_path / "new.parquet")


def test_every_kind_of_page_has_a_table() -> None:
    """A page of a new kind declares what it draws, and a figure its kind's table."""
    from farstate.reports.figures import FIGURES

    named = " ".join(table.where for table in tables.TABLES if table.where.startswith("reports/"))
    listed = set(named.replace(",", " ").split())
    assert set(FIGURES) <= listed, f"figures without a declared table: {sorted(set(FIGURES) - listed)}"


def test_columns_have_words_and_numbers_have_units() -> None:
    for table in tables.TABLES:
        names = [column.name for column in table.columns]
        assert len(set(names)) == len(names), table.name
        for column in table.columns:
            assert column.meaning, f"{table.name}.{column.name}"
            assert column.kind != "text" or not column.unit, f"{table.name}.{column.name}"
    assert len(BY_NAME) == len(tables.TABLES)
