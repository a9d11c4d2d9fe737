"""Tokens: the store holds what the tokenizer says, whatever happens to the process on the way."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from farstate.corpus import documents as documents_module
from farstate.corpus import tokens as tokens_module
from farstate.corpus.tokenizer import load_tokenizer, make_tokenizer
from farstate.corpus.tokens import INDEX_SCHEMA, choose_dtype, write_tokens
from farstate.errors import FarstateError
from farstate.files import MANIFEST, read_manifest
from farstate.params import Store, Tokenizer
from test_tokenizer import TEXTS, written


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """300 documents in about 10 row groups, and a tokenizer of them."""
    monkeypatch.setattr(documents_module, "_GROUP_BYTES", 3000)
    documents = written(tmp_path, TEXTS, validation=0.2, test=0.2)
    make_tokenizer(Tokenizer(kind="train", vocabulary_size=300), [documents], tmp_path / "tokenizer")
    return documents, tmp_path / "tokenizer"


def contents(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in output.iterdir()}


@pytest.mark.parametrize("dtype", ["auto", "uint16", "uint32"])
def test_tokens_and_index(inputs: tuple[Path, Path], tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, tokenizer = inputs
    monkeypatch.setattr(tokens_module, "_BATCH_BYTES", 700)
    calls: list[tuple[int, int | None]] = []
    output = tmp_path / "out"
    write_tokens(documents, tokenizer, Store(dtype=dtype), 300, output, progress=lambda *at: calls.append(at))  # type: ignore[arg-type]
    manifest = read_manifest(output, verify=True)
    assert manifest["dtype"] == ("uint32" if dtype == "uint32" else "uint16")
    tokens = np.fromfile(output / "tokens.bin", dtype=f"<u{4 if dtype == 'uint32' else 2}")
    encoder = load_tokenizer(tokenizer)
    rows = pq.read_table(documents / "documents.parquet").to_pylist()
    table = pq.read_table(output / "index.parquet")
    assert table.schema.equals(INDEX_SCHEMA)
    end = 0
    for row, entry in zip(rows, table.to_pylist(), strict=True):
        assert entry["offset"] == end
        end += entry["length"]
        assert tokens[entry["offset"] : end].tolist() == encoder.encode(row["text"]).ids
        assert {key: entry[key] for key in ("id", "split", "source", "title", "pile_set_name", "bytes")} == {
            key: row[key] for key in ("id", "split", "source", "title", "pile_set_name", "bytes")
        }
    assert end == tokens.size == manifest["tokens"]
    assert manifest["splits"]["test"]["documents"] == sum(row["split"] == "test" for row in rows) > 0
    assert sum(counts["tokens"] for counts in manifest["splits"].values()) == end
    assert calls[-1] == (300, 300)
    assert len(calls) > 20
    assert sorted(contents(output)) == ["index.parquet", MANIFEST, "tokens.bin"]


KILLED = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from deadly import kill_at
from farstate.corpus import tokens
from farstate.params import Store
documents, tokenizer, output = map(Path, sys.argv[1:4])
step, left = sys.argv[4], int(sys.argv[5])
tokens._BATCH_BYTES = 700
where = tokens if step in ("_write_index", "write_manifest") else tokens._Scratch
kill_at(where, step, left)
tokens.write_tokens(documents, tokenizer, Store(), 300, output)
"""


@pytest.mark.parametrize(
    ("step", "after"), [("append", 0), ("append", 17), ("commit", 3), ("_write_index", 0), ("finish", 0), ("write_manifest", 0)]
)
def test_killed_run_goes_on_where_it_was(inputs: tuple[Path, Path], tmp_path: Path, step: str, after: int) -> None:
    documents, tokenizer = inputs
    write_tokens(documents, tokenizer, Store(), 300, tmp_path / "whole")
    output = tmp_path / "killed"
    done = subprocess.run([sys.executable, "-c", KILLED, documents, tokenizer, output, step, str(after)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (output / MANIFEST).exists()
    calls: list[int] = []
    write_tokens(documents, tokenizer, Store(), 300, output, progress=lambda count, _: calls.append(count))
    assert contents(output) == contents(tmp_path / "whole")
    groups = pq.ParquetFile(documents / "documents.parquet").num_row_groups
    if after == 17:
        assert 1 < len(calls) < groups, "finished row groups were not encoded again"
    elif step in ("_write_index", "finish", "write_manifest"):
        assert calls == []


def test_scratch_that_does_not_fit_is_not_used(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    documents, tokenizer = inputs
    write_tokens(documents, tokenizer, Store(), 300, tmp_path / "whole")
    killed = tmp_path / "killed"
    subprocess.run([sys.executable, "-c", KILLED, documents, tokenizer, killed, "_write_index", "0"], check=False)
    other = json.loads((killed / ".progress.json").read_text(encoding="utf-8"))
    other["inputs"]["tokenizer"] = "another"
    tokens = (killed / ".tokens.part").read_bytes()
    for number, changes in enumerate(
        [
            {".progress.json": b"{ torn"},
            {".progress.json": b"[]"},
            {".tokens.part": tokens[:-50]},
            {".lengths.part": b""},
            {".progress.json": json.dumps(other).encode(), ".tokens.part": bytes(len(tokens))},
        ]
    ):
        output = tmp_path / f"damaged-{number}"
        shutil.copytree(killed, output)
        for name, data in changes.items():
            (output / name).write_bytes(data)
        write_tokens(documents, tokenizer, Store(), 300, output)
        assert contents(output) == contents(tmp_path / "whole"), changes


def test_a_finished_result_can_be_made_again(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    documents, tokenizer = inputs
    write_tokens(documents, tokenizer, Store(), 300, tmp_path / "out")
    before = contents(tmp_path / "out")
    write_tokens(documents, tokenizer, Store(), 300, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_vocabulary_and_dtype(inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents, tokenizer = inputs
    assert [choose_dtype("auto", size) for size in (65536, 65537)] == ["uint16", "uint32"]
    assert choose_dtype("uint16", 65536) == "uint16"
    with pytest.raises(FarstateError, match=r"store\.dtype: uint16 holds 65536 symbols, the vocabulary has 65537; use uint32"):
        write_tokens(documents, tokenizer, Store(dtype="uint16"), 65537, tmp_path / "out")
    with pytest.raises(FarstateError, match="has 300 symbols, the vocabulary size is 299"):
        write_tokens(documents, tokenizer, Store(), 299, tmp_path / "out")
    monkeypatch.setattr(tokens_module, "symbols", lambda _: 0)
    with pytest.raises(FarstateError, match=r"documents\.parquet row 1: the tokenizer gave id \d+, the vocabulary size is 280"):
        write_tokens(documents, tokenizer, Store(), 280, tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_unfinished_inputs(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    documents, tokenizer = inputs
    with pytest.raises(FarstateError, match=r"documents\.parquet: no such file"):
        write_tokens(tmp_path, tokenizer, Store(), 300, tmp_path / "out")
    (documents / MANIFEST).unlink()
    with pytest.raises(FarstateError, match="the result is unfinished"):
        write_tokens(documents, tokenizer, Store(), 300, tmp_path / "out")


def test_thread_count_changes_nothing(inputs: tuple[Path, Path], tmp_path: Path) -> None:
    documents, tokenizer = inputs
    write_tokens(documents, tokenizer, Store(), 300, tmp_path / "default")
    code = """
    import sys
    from pathlib import Path
    from farstate.corpus.tokens import write_tokens
    from farstate.params import Store
    write_tokens(Path(sys.argv[1]), Path(sys.argv[2]), Store(), 300, Path(sys.argv[3]), threads=1)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), documents, tokenizer, tmp_path / "one"], check=True)
    assert contents(tmp_path / "one") == contents(tmp_path / "default")
