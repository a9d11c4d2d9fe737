# Corpus: from outside sources to a token store.
#
# Inputs:  packages of the Python registry, local files or hub data sets (params: corpus, tokenizer, store)
# Outputs: results/corpus/store-<key>/store.json, the index over results/corpus/tokens.*-<key>/tokens.bin
#
# Reading and tokenising have a job for each file of a source, which goes on inside the file when it was killed. Their
# memory does not depend on the file's size; their time is that of a 40 GB shard of the Pile.


# Compute nodes often have no network.
localrules:
    fetch,


rule corpus:
    """The token store and all it stands on."""
    input:
        manifests("corpus"),


rule fetch:
    """Download a pinned package as an archive, checked by SHA-256."""
    output:
        multiext(
            "results/corpus/package.{run}-{key}/",
            manifest="manifest.json",
            archive="archive",
        ),
    log:
        "logs/corpus/package.{run}-{key}.log",
    benchmark:
        "logs/benchmarks/corpus/package.{run}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=500,
        runtime=30,
    params:
        stage=record("results/corpus/package.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Fetching {wildcards.run}"
    shell:
        "farstate fetch {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule documents:
    """Read one file of a source, or a source, into documents with boundaries, origin and split."""
    input:
        unpack(upstream("results/corpus/documents.{run}-{key}")),
    output:
        multiext(
            "results/corpus/documents.{run}-{key}/",
            manifest="manifest.json",
            documents="documents.parquet",
        ),
    log:
        "logs/corpus/documents.{run}-{key}.log",
    benchmark:
        "logs/benchmarks/corpus/documents.{run}-{key}.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=240,
    params:
        stage=record("results/corpus/documents.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Reading documents of {wildcards.run}"
    shell:
        "farstate documents {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule tokenizer:
    """Train a byte-level BPE on the training split, or copy a ready tokenizer."""
    input:
        unpack(upstream("results/corpus/tokenizer.{run}-{key}")),
    output:
        multiext(
            "results/corpus/tokenizer.{run}-{key}/",
            manifest="manifest.json",
            tokenizer="tokenizer.json",
        ),
    log:
        "logs/corpus/tokenizer.{run}-{key}.log",
    benchmark:
        "logs/benchmarks/corpus/tokenizer.{run}-{key}.tsv"
    threads: THREADS.tokens
    resources:
        mem_mb=8000,
        runtime=120,
    params:
        stage=record("results/corpus/tokenizer.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Making the tokenizer"
    shell:
        "OMP_NUM_THREADS={threads} farstate tokenizer {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule tokens:
    """Tokenise one shard of documents."""
    input:
        unpack(upstream("results/corpus/tokens.{run}-{key}")),
    output:
        multiext(
            "results/corpus/tokens.{run}-{key}/",
            manifest="manifest.json",
            tokens="tokens.bin",
            index="index.parquet",
        ),
    log:
        "logs/corpus/tokens.{run}-{key}.log",
    benchmark:
        "logs/benchmarks/corpus/tokens.{run}-{key}.tsv"
    threads: THREADS.tokens
    resources:
        mem_mb=4000,
        runtime=480,
    params:
        stage=record("results/corpus/tokens.{run}-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Tokenising {wildcards.run}"
    shell:
        "OMP_NUM_THREADS={threads} farstate tokens {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"


rule store:
    """Index the token shards: one store, documents with offsets."""
    input:
        unpack(upstream("results/corpus/store-{key}", manifests_only=("shards",))),
    output:
        multiext(
            "results/corpus/store-{key}/",
            manifest="manifest.json",
            store="store.json",
            index="index.parquet",
        ),
    log:
        "logs/corpus/store-{key}.log",
    benchmark:
        "logs/benchmarks/corpus/store-{key}.tsv"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=240,
    params:
        stage=record("results/corpus/store-{key}"),
        output=subpath(output.manifest, parent=True),
    message:
        "Indexing the token store"
    shell:
        "farstate store {params.stage:q} --output {params.output:q} 2>&1 | tee {log:q}"
