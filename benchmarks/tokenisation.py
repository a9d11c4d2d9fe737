"""How fast shards are read and tokenised, and how that grows with cores; the rival is the `tokenizers` library's own `encode_batch`.

`write_tokens` reads parquet, encodes, writes tokens and an index, and makes every row group durable; the library's call gets
the texts in memory and leaves its result there. Both run in one process, in turns; the ratio of the medians should be at least
0.9. Each number of threads has a process of its own, since the library settles its threads once; `scaling` is our tokens/s
against those on the first of them. Processor seconds, which other jobs on the machine move less, say what a thread loses to
the others. `write_documents` is timed on the way, on one core. Prints one JSON object.

    python benchmarks/tokenisation.py --documents results/documents/<name> --tokenizer results/tokenizer/<name>
    python benchmarks/tokenisation.py --threads 1 2     # the Pile sample in ../shared/data, a 2,048-symbol BPE of it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from farstate.corpus import stage
from farstate.corpus.documents import write_documents
from farstate.corpus.tokenizer import load_tokenizer, make_tokenizer, symbols
from farstate.corpus.tokens import write_tokens
from farstate.files import read_manifest
from farstate.params import Corpus, Source, Store, Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=Path, help="a result of the documents stage")
    parser.add_argument("--tokenizer", type=Path, help="a result of the tokenizer stage, or a tokenizer.json")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, len(os.sched_getaffinity(0))])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        documents, tokenizer = arguments.documents, arguments.tokenizer
        if arguments.here:
            stage.use_threads(arguments.threads[0])
            print(json.dumps(measure(documents, tokenizer, scratch, arguments.threads[0], arguments.repeats)))
            return
        found: dict[str, Any] = {}
        if documents is None:
            documents = scratch / "documents"
            found |= read_sample(documents)
        if tokenizer is None:
            tokenizer = scratch / "tokenizer"
            make_tokenizer(Tokenizer(kind="train", vocabulary_size=2048), [documents], tokenizer)
        rows = []
        for threads in arguments.threads:
            given = ["--documents", documents, "--tokenizer", tokenizer, "--threads", threads, "--repeats", arguments.repeats]
            done = subprocess.run([sys.executable, __file__, "--here", *map(str, given)], stdout=subprocess.PIPE, check=True)
            rows.append(json.loads(done.stdout))
            rows[-1]["scaling"] = round(rows[-1]["tokens_per_second"] / rows[0]["tokens_per_second"], 3)
        print(json.dumps({**found, "by_threads": rows}, indent=2))


def read_sample(output: Path) -> dict[str, float]:
    """Write the documents of the sample; megabytes of text a second."""
    shared = Path(os.environ.get("FARSTATE_SHARED", Path(__file__).parents[2] / "shared"))
    sample = Source(name="pile-sample", files=str(shared / "data" / "pile_test_sample_small.jsonl.zst"))
    start = time.perf_counter()
    write_documents(sample, Corpus(sources=(sample,)), output)
    return {"documents_megabytes_per_second": round(read_manifest(output)["bytes"] / 1e6 / (time.perf_counter() - start), 1)}


def measure(documents: Path, tokenizer: Path, scratch: Path, threads: int, repeats: int) -> dict[str, float | int]:
    """Median seconds of both, and their ratio; each time with a tokenizer whose cache of words is cold."""
    table = pq.read_table(stage.part(documents, stage.DOCUMENTS), columns=["text", "bytes"])
    texts = table["text"].to_pylist()
    vocabulary = symbols(load_tokenizer(tokenizer))
    library: list[float] = []
    ours: list[float] = []
    processor: list[float] = []
    for repeat in range(repeats):
        encoder = load_tokenizer(tokenizer)
        start = time.perf_counter()
        with stage.parallelism(True):
            encoder.encode_batch(texts, add_special_tokens=False)
        library.append(time.perf_counter() - start)
        start, busy = time.perf_counter(), time.process_time()
        write_tokens(documents, tokenizer, Store(), vocabulary, scratch / f"tokens-{repeat}", threads=threads)
        ours.append(time.perf_counter() - start)
        processor.append(time.process_time() - busy)
    size = sum(table["bytes"].to_pylist())
    seconds = statistics.median(ours)
    return {
        "threads": threads,
        "documents": len(texts),
        "bytes": size,
        "repeats": repeats,
        "library_seconds": round(statistics.median(library), 3),
        "write_tokens_seconds": round(seconds, 3),
        "write_tokens_processor_seconds": round(statistics.median(processor), 3),
        "tokens_per_second": round(read_manifest(scratch / "tokens-0")["tokens"] / seconds),
        "megabytes_per_second": round(size / 1e6 / seconds, 2),
        "throughput_ratio": round(statistics.median(library) / seconds, 3),
    }


if __name__ == "__main__":
    main()
