"""The commands of the corpus that read outside inputs: what was registered of them, and what a job reads of it."""

from __future__ import annotations

from typing import Any

from farstate import sources
from farstate.corpus.documents import write_documents
from farstate.corpus.hub import HubFile
from farstate.corpus.progress import DocumentProgress
from farstate.errors import FarstateError
from farstate.params import Corpus, Source, as_written
from farstate.plan import outside_of
from farstate.stages import Stage


def documents_stage(stage: Stage) -> None:
    """Read one source, or one file of it, as its record says.

    Raises:
        FarstateError: the input is not registered or not what was registered, or see `write_documents`.
    """
    given = stage.params
    source = Source.model_validate(as_written({"name": given["source_name"], **given["source"]}))
    corpus = Corpus.model_validate(
        as_written(
            {
                "sources": [{"name": given["source_name"], **given["source"]}],
                "damaged_records": given["damaged_records"],
                "minimum_bytes": given["minimum_bytes"],
                "split": given["split"],
            }
        )
    )
    archives = stage.many("archive")
    registered = _registered(source, given, stage)
    with DocumentProgress(stage.label) as progress:
        write_documents(
            source,
            corpus,
            stage.output,
            archive=archives[0] / "archive" if archives else None,
            progress=progress,
            **registered,
        )


def _registered(source: Source, given: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """`inputs` for the manifest, and what is read: `files`, or the `revision` of a data set that is streamed as a whole."""
    if source.package is not None:
        return {"inputs": [{"path": source.package, "sha256": source.sha256}]}
    name: str | None = given["file"]
    outside = outside_of(source)
    entry = sources.check(outside, only=name, verify=stage.verify)
    records = [record for record in entry.get("files", []) if record["path"] == name]
    if source.hub is None:
        return {"inputs": records, "files": [sources.inputs_root() / str(name)]}
    revision = entry["revision"]
    now = {"revision": revision} if name is None else next(map(sources.checksum, records), None)
    if now != given["content"]:
        raise FarstateError(f"hub data set {outside.where}: registered anew since this job was planned; run Snakemake again")
    if name is None:
        return {"inputs": [{"path": source.hub, "revision": revision}], "revision": revision}
    return {"inputs": records, "files": [HubFile(source.hub, revision, name, records[0]["bytes"], given["content"])]}
