"""Real documents of the Pile in its original form, from registered shards to a training batch, every count held against a direct one."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
import zstandard
from typer.testing import CliRunner

from conftest import SHARED
from farstate.cli import app
from farstate.corpus.readers import ShuffledWindows
from farstate.corpus.store import TokenStore
from farstate.corpus.tokenizer import load_tokenizer
from farstate.params import load
from farstate.plan import Plan
from farstate.sources import read_lock

ROOT = Path(__file__).parents[1]
SAMPLE = SHARED / "data" / "pile_test_sample_small.jsonl.zst"
pytestmark = pytest.mark.skipif(not SAMPLE.is_file(), reason=f"no Pile sample: {SAMPLE} is absent")
STAGES = ("documents", "tokenizer", "tokens", "store")


def rows(*paths: Path) -> Iterator[dict[str, Any]]:
    """The records of original shards, read with json and zstandard alone."""
    for path in paths:
        with open(path, "rb") as handle:
            text = zstandard.ZstdDecompressor().stream_reader(handle).read().decode()
        yield from (json.loads(line) for line in text.split("\n") if line)


def write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(zstandard.ZstdCompressor().compress("".join(f"{line}\n" for line in lines).encode()))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Pile's own layout in small: two shards of training text, validation and test apart, and the stages run by their commands."""
    folder = tmp_path_factory.mktemp("pile")
    lines = [json.dumps(row) for row in rows(SAMPLE)]
    # A document twice in one shard, one in both, a line that is none, and one without text.
    write(folder / "data/pile/train/00.jsonl.zst", [*lines[:500], lines[0], '{"text": "torn'])
    write(folder / "data/pile/train/01.jsonl.zst", [*lines[500:1000], lines[1], '{"text": ""}'])
    write(folder / "data/pile/val.jsonl.zst", lines[1000:1100])
    write(folder / "data/pile/test.jsonl.zst", lines[1100:])
    params = yaml.safe_load((ROOT / "config/test.yaml").read_text())
    paper = yaml.safe_load((ROOT / "config/paper.yaml").read_text())
    params["corpus"] = paper["corpus"]
    params["tokenizer"] = {"kind": "train", "vocabulary_size": 1024}
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    before = Path.cwd()
    os.chdir(folder)
    try:
        command("register")
        plan = Plan(load(Path("params.yaml")), read_lock())
        plan.write_records(folder)
        for rule in STAGES:
            for stage in plan.of(rule=rule):
                command(rule, f".farstate/stages/corpus.{Path(stage.directory).name}.json")
        yield folder
    finally:
        os.chdir(before)


def command(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_every_count_is_that_of_a_direct_count(project: Path) -> None:
    accounts = json.loads(command("corpus", "--json"))
    files = {
        "train": [project / "data/pile/train/00.jsonl.zst", project / "data/pile/train/01.jsonl.zst"],
        "validation": [project / "data/pile/val.jsonl.zst"],
        "test": [project / "data/pile/test.jsonl.zst"],
    }
    tokenizer = load_tokenizer(next(project.glob("results/corpus/tokenizer.*")))
    documents: dict[str, tuple[str, str, str]] = {}
    for split, paths in files.items():
        for path in paths:
            with open(path, "rb") as handle:
                lines = zstandard.ZstdDecompressor().stream_reader(handle).read().decode().split("\n")
            for line in lines:
                if '"meta"' in line:
                    row = json.loads(line)
                    documents.setdefault(row["text"], (split, row["meta"]["pile_set_name"], row["text"]))
    by_split, by_set = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for (split, name, text), encoding in zip(
        documents.values(), tokenizer.encode_batch([text for *_, text in documents.values()]), strict=True
    ):
        for counter, key in ((by_split, split), (by_set, name)):
            counter[key, "documents"] += 1
            counter[key, "tokens"] += len(encoding.ids)
            counter[key, "bytes"] += len(text.encode())
    assert len(documents) == 1280
    assert {(split, key): value for split, counts in accounts["splits"].items() for key, value in counts.items()} == by_split
    kept = {
        (name, key): value
        for name, counts in accounts["pile_set_names"].items()
        for key, value in counts.items()
        if value is not None
    }
    assert kept == {key: value for key, value in by_set.items() if key in kept}
    assert {(name, key) for name, _ in by_set for key in ("documents", "tokens")} <= set(kept)

    pile = accounts["sources"]["pile"]
    assert pile["shards"] == 2
    assert pile["records"] == 1004
    assert pile["documents"] == 1001
    assert pile["duplicates"] == 1
    assert pile["skipped"] == {"not_json": 1, "too_short": 1}
    assert accounts["duplicates"] == {"within_shards": 1, "between_shards": 1}
    inputs = {record["path"]: record["sha256"] for shard in accounts["shards"] for record in shard["inputs"]}
    assert inputs == {
        path.relative_to(project).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for paths in files.values()
        for path in paths
    }


def test_tables_for_people(project: Path) -> None:
    shown = command("corpus")
    assert "1 not_json" in shown
    assert "1 too_short" in shown
    assert "USPTO Backgrounds" in shown
    assert "The same document in another shard: 1 left out." in shown


def test_a_batch_is_the_text(project: Path) -> None:
    """Windows of a batch are consecutive tokens of the documents that they name."""
    (directory,) = project.glob("results/corpus/store-*")
    store = TokenStore(directory)
    table = store.documents("train")
    tokenizer = load_tokenizer(next(project.glob("results/corpus/tokenizer.*")))
    texts = {
        row["id"]: row["text"]
        for path in project.glob("results/corpus/documents.pile.*/documents.parquet")
        for row in pq.read_table(path, columns=["id", "text"]).to_pylist()
    }
    batch = ShuffledWindows(store, "train", context=64, batch_size=16, seed=0).batch(3)
    for tokens, document, offset in zip(batch.tokens.tolist(), batch.document.tolist(), batch.offset.tolist(), strict=True):
        whole = tokenizer.encode(texts[str(table.ids[document])]).ids
        assert tokens == whole[offset : offset + 65]
