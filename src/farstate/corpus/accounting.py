"""What a token store holds and what was left out on the way, from the manifests of the store and its shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from farstate.corpus.stage import SPLITS
from farstate.corpus.store import STORE
from farstate.files import read_json, read_manifest

_UNKNOWN = "–"


def account(store: Path) -> dict[str, Any]:
    """The accounts of a store, as JSON values.

    Returns:
        `splits` and `pile_set_names`: documents, tokens and bytes that are kept; a document that several shards hold counts once.
        `sources`: by source, of all its shards, the `records` there were, and what became of them: `documents` and their
        tokens and bytes, `duplicates` inside a shard, `skipped` by reason. `duplicates`: within shards, and between them.
        `shards`: of each its path, counts, checksum and `inputs` (path, size and checksum of what was read). What an older
        shard did not record is null.

    Raises:
        FarstateError: the store or a shard is missing or unfinished.
    """
    manifest, contents = read_manifest(store), read_json(store / STORE)
    shards = [_shard(store, record) for record in contents["shards"]]
    sources: dict[str, list[dict[str, Any]]] = {}
    for shard in shards:
        sources.setdefault(shard["source"] or _name(shard), []).append(shard)
    return {
        "store": store.as_posix(),
        "dtype": manifest["dtype"],
        "vocabulary_size": manifest["vocabulary_size"],
        "documents": manifest["documents"],
        "tokens": sum(counts["tokens"] for counts in manifest["splits"].values()),
        "bytes": sum(counts["bytes"] for counts in manifest["splits"].values()),
        "splits": {split: {key: manifest["splits"][split][key] for key in ("documents", "tokens", "bytes")} for split in SPLITS},
        "pile_set_names": _sets(counts["pile_set_names"] for counts in manifest["splits"].values()),
        "sources": {name: {"shards": len(those), **_sum(those)} for name, those in sources.items()},
        "duplicates": {"within_shards": _sum(shards)["duplicates"], "between_shards": manifest["duplicates"]},
        "shards": shards,
    }


def show(accounts: dict[str, Any], console: Console) -> None:
    """Print the accounts as tables."""
    kept = _table("kept", "split", "documents", "tokens", "bytes", "tokens/document")
    for split, counts in [*accounts["splits"].items(), ("all", accounts)]:
        mean = f"{counts['tokens'] / counts['documents']:,.0f}" if counts["documents"] else _UNKNOWN
        kept.add_row(split, *_numbers(counts), mean, end_section=split == SPLITS[-1])
    console.print(f"{accounts['store']}: {accounts['dtype']}, a vocabulary of {accounts['vocabulary_size']:,}", kept, sep="\n")
    if accounts["pile_set_names"]:
        sets = _table("kept, by set", "pile_set_name", "documents", "tokens", "bytes", "share of tokens")
        for name, counts in sorted(accounts["pile_set_names"].items(), key=lambda item: -item[1]["tokens"]):
            sets.add_row(name, *_numbers(counts), f"{100 * counts['tokens'] / max(accounts['tokens'], 1):.1f} %")
        console.print(sets)
    read = _table("read, by source", "source", "shards", "records", "documents", "duplicates", "skipped", "why")
    for name, counts in accounts["sources"].items():
        skipped = counts["skipped"]
        why = "\n".join(f"{count:,} {reason}" for reason, count in sorted((skipped or {}).items()))
        read.add_row(
            name,
            *map(_number, (counts["shards"], counts["records"], counts["documents"], counts["duplicates"])),
            _number(None if skipped is None else sum(skipped.values())),
            why,
        )
    console.print(read)
    console.print(f"The same document in another shard: {accounts['duplicates']['between_shards']:,} left out.")
    if any(shard["records"] is None for shard in accounts["shards"]):
        console.print(f"{_UNKNOWN}: not recorded, the shard was made by an earlier version")


def _name(shard: dict[str, Any]) -> str:
    return Path(shard["path"]).name.removeprefix("tokens.").rpartition("-")[0]


def _shard(store: Path, record: dict[str, Any]) -> dict[str, Any]:
    manifest = read_manifest(store / record["path"])
    counts = {key: manifest[key] for key in ("documents", "tokens", "bytes")}
    given = {key: manifest.get(key) for key in ("source", "inputs", "duplicates", "skipped")}
    return {"path": record["path"], "sha256": record["sha256"], **counts, **given, "records": _records({**counts, **given})}


def _records(counts: dict[str, Any]) -> int | None:
    if counts["duplicates"] is None or counts["skipped"] is None:
        return None
    return int(counts["documents"] + counts["duplicates"] + sum(counts["skipped"].values()))


def _sum(shards: list[dict[str, Any]]) -> dict[str, Any]:
    totals: dict[str, Any] = {key: sum(shard[key] for shard in shards) for key in ("documents", "tokens", "bytes")}
    skipped: Counter[str] = Counter()
    for shard in shards:
        skipped.update(shard["skipped"] or {})
    recorded = all(shard["records"] is not None for shard in shards)
    totals["records"] = sum(shard["records"] for shard in shards) if recorded else None
    totals["duplicates"] = sum(shard["duplicates"] for shard in shards) if recorded else None
    totals["skipped"] = dict(skipped) if recorded else None
    return totals


def _sets(parts: Iterable[dict[str, dict[str, int]]]) -> dict[str, dict[str, int | None]]:
    sums: dict[str, dict[str, int | None]] = {}
    for part in parts:
        for name, counts in part.items():
            total = sums.setdefault(name, {"documents": 0, "tokens": 0, "bytes": 0})
            for key, before in total.items():
                here = counts.get(key)
                total[key] = None if here is None or before is None else before + here
    return sums


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column == "why" else "right", overflow="fold")
    return table


def _numbers(counts: dict[str, Any]) -> list[str]:
    return [_number(counts[key]) for key in ("documents", "tokens", "bytes")]


def _number(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value:,}"
