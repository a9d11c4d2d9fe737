"""Every table that a stage or a page writes: its columns with type, unit and meaning, in one place.

`docs/tables.md` is generated from it, and `hold` refuses a table that has other columns: who adds a column says here what it means.
Loads neither polars nor pyarrow until a table is held.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from farstate.errors import FarstateError

Kind = Literal["text", "whole number", "number", "true or false", "list of whole numbers"]
_TEXT, _INT, _REAL, _FLAG, _LIST = "text", "whole number", "number", "true or false", "list of whole numbers"


@dataclass(frozen=True)
class Column:
    """A column. `unit`: what a number counts or is measured in, empty for names. A null is explained in `meaning`."""

    name: str
    kind: Kind
    unit: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: unique, a heading of docs/tables.md.
        file: its name; `<figure>` stands for a figure's name.
        where: the folder, as a path with placeholders.
        rows: what a row is.
        columns: in the order of the file.
    """

    name: str
    file: str
    where: str
    rows: str
    columns: tuple[Column, ...]


def _column(name: str, kind: Any, unit: str, meaning: str) -> Column:
    return Column(name, kind, unit, meaning)


def _whose(seed: str = "of the training; null: a published checkpoint, which has none") -> tuple[Column, ...]:
    return (
        _column("model", _TEXT, "", "name under `models`, with what a figure varies (`demo-small.context-128`)"),
        _column("arm", _TEXT, "", "name under `posttrain.arms`; `base`: before post-training"),
        _column("seed", _INT, "", seed),
    )


_TRAIN_LENGTH = _column("train_length", _INT, "tokens", "T_train, the context length the model was trained on")
_COMPARED = (*_whose("of the post-training; null: the mean over seeds"), _TRAIN_LENGTH)
_MEASURED = (*_whose(), _TRAIN_LENGTH)
_TEXT_READ = (
    _column("document", _TEXT, "", "name of the text, 128 bits of its SHA-256"),
    _column("stretch", _INT, "", "number of the stretch within the document, from 0; each is read from the zero state"),
)
_BIN = (
    _column("position_low", _INT, "tokens", "first position of the bin; position t has t tokens read before it"),
    _column("position_high", _INT, "tokens", "its last position, included"),
)
_POSITION = _column("position", _INT, "tokens", "tokens read before the predicted one")
_BIN_POSITION = _column("position", _INT, "tokens", "where the bin is drawn: its geometric middle")
_DOCUMENTS = _column("n_documents", _INT, "documents", "behind the number")
_STRETCHES = _column("n_stretches", _INT, "stretches", "behind the number")
_WHICH = (
    _column("layer", _INT, "", "from 0; null: all layers together"),
    _column("head", _INT, "", "from 0; null: all heads of the layer together. Of Mamba-1 a head is a channel"),
)
_PART = _column("part", _TEXT, "", "`recurrent`, or the name of an auxiliary state (`conv`, a token shift, an attention cache)")
_INTERVAL = _column("interval", _TEXT, "", "how `low` and `high` were made, in words")
_REASON = _column("reason", _TEXT, "", "why there is no number; null where there is one")


def _bounds(unit: str, over: str, prefix: str = "") -> tuple[Column, ...]:
    return (
        _column(f"{prefix}low", _REAL, unit, f"lower end of its interval over {over}"),
        _column(f"{prefix}high", _REAL, unit, "upper end"),
    )


def _estimate(name: str, unit: str, meaning: str) -> tuple[Column, ...]:
    return (
        _column(name, _REAL, unit, meaning),
        _column(f"{name}_low", _REAL, unit, "lower end of its interval over documents"),
        _column(f"{name}_high", _REAL, unit, "upper end"),
    )


def _over_seeds(name: str, unit: str) -> tuple[Column, ...]:
    return (
        _column(
            f"{name}_seeds_low", _REAL, unit, f"lower end of Student's t interval of `{name}` over seeds; null below three seeds"
        ),
        _column(f"{name}_seeds_high", _REAL, unit, "upper end"),
    )


_STATISTICS = (
    _column("mean", _REAL, "as the state", "of the entries"),
    _column("std", _REAL, "as the state", "standard deviation of the entries, as of one population"),
    _column("norm", _REAL, "as the state", "root of the sum of their squares"),
)
_DOCUMENT = (
    _column("id", _TEXT, "", "name of the document, 128 bits of its SHA-256"),
    _column("split", _TEXT, "", "`train`, `validation` or `test`"),
    _column("source", _TEXT, "", "name under `corpus.sources`"),
    _column("title", _TEXT, "", "where in its source it stands: the file, of records with their number"),
    _column("pile_set_name", _TEXT, "", "of the Pile's `meta`; null elsewhere"),
    _column("bytes", _INT, "bytes", "of its text in UTF-8"),
)
_PLACE = (
    _column("offset", _INT, "tokens", "tokens before it in the shard's `tokens.bin`"),
    _column("length", _INT, "tokens", "of the document; no special token is added"),
)
_CURVE = (
    *_COMPARED,
    _column("metric", _TEXT, "", "which quantity the row holds"),
    _BIN_POSITION,
    _column("value", _REAL, "nats a token; of `ppl…` a perplexity", "the quantity in this bin"),
    *_bounds("as `value`", "documents"),
    _DOCUMENTS,
    _column("n_tokens", _INT, "tokens", "predicted tokens behind the point, of one seed"),
)
_REMEMBERED = (
    *_COMPARED,
    _column("T", _INT, "tokens", "the tokens x_0 … x_T are read"),
    _column(
        "measure", _TEXT, "", "`curve`: by start; `far`, `far_share`, `half_reach`: one number of a curve (docs/diagnostics.md)"
    ),
    _column("target", _TEXT, "", "`T`: the prediction after x_T; `last 64`: the mean over those after the last 64 tokens"),
    _column("distance", _TEXT, "", "`total_variation`, `jensen_shannon`, `jensen_shannon_distance` or `cosine_distance`"),
    _column("against", _TEXT, "", "empty: the value itself; `base`, `control`: the paired difference to that arm"),
    _column("start", _INT, "tokens", "t, tokens dropped from the front; null for a measure of the whole curve"),
    _column(
        "value",
        _REAL,
        "of `distance`; `far_share`: share; `half_reach`: tokens",
        "of the measure; null where an output was not finite",
    ),
    *_bounds("as `value`", "documents, for this number alone"),
    *_bounds("as `value`", "documents, for all starts of a curve at once", "band_"),
    *_bounds("as `value`", "seeds (Student's t); null below three seeds", "seeds_"),
    _DOCUMENTS,
    _STRETCHES,
    _column("n_tokens", _INT, "predictions", "compared behind the number, of one seed"),
    _column("n_seeds", _INT, "seeds", "behind the number"),
)
_STATE_CURVE = (
    *_COMPARED,
    *_WHICH,
    _PART,
    _column("statistic", _TEXT, "", "`mean`, `std`, `norm`, `largest` or `effective_rank`"),
    _column("against", _TEXT, "", "empty: the value itself; `base`: the paired difference to the base model"),
    _BIN_POSITION,
    *_BIN,
    _column("value", _REAL, "as the state; `effective_rank`: directions", "of the statistic"),
    *_bounds("as `value`", "documents, at this point alone"),
    _DOCUMENTS,
    _STRETCHES,
    _column("n_tokens", _INT, "states", "behind the point, of one seed"),
)
_DRIFT = (
    _column("std_near", _REAL, "as the state", "standard deviation in the last bin within the training length"),
    _column("std_far", _REAL, "as the state", "the same far out (from 32 T_train on, else the last octave)"),
    _column("drift", _REAL, "doublings", "log2 (std_far / std_near); null: a state of zeros or not finite"),
)
_RANKED = (
    _column("beyond", _FLAG, "", "the simultaneous interval of `drift` does not hold zero"),
    _column("rank", _INT, "", "by the size of the drift, 1 the largest"),
    _column("against_base", _REAL, "doublings", "drift − that of the same head of the base model"),
    _column("against_base_low", _REAL, "doublings", "lower end of its interval, simultaneous over all heads"),
    _column("against_base_high", _REAL, "doublings", "upper end"),
)
_SCORED = (
    *_whose("of the training on the task; null: the mean over seeds")[:2],
    _column(
        "prompting",
        _TEXT,
        "",
        "`zero_shot`, `few_shot` (solved examples stand before the question), `fine_tuned` (on the task), `trained` (on it from random weights)",
    ),
    _column("seed", _INT, "", "of the training on the task; null: the mean over seeds"),
    _column("task", _TEXT, "", "`qa1` … `qa10`, `mean` over them, `passkey` or `copying`"),
    _column("length", _INT, "tokens; copying: letters", "of the prompt; BABILong 0: no background"),
    _column("depth", _REAL, "0 to 1", "where the fact stands, 0 at the front; null: no such place"),
    _column("score", _TEXT, "", "`strict`, `lenient`, `exact`, `characters` or `characters_forced` (docs/tasks.md)"),
    _column("against", _TEXT, "", "empty: the score itself; otherwise the arm from which the difference is taken"),
    _column("value", _REAL, "share, 0 to 1", "mean over examples"),
    *_bounds("as `value`", "examples"),
    *_bounds("as `value`", "seeds (Student's t, cut at 0 and 1); null below three seeds", "seeds_"),
    _column("n", _INT, "examples", "asked"),
    _column("n_seeds", _INT, "seeds", "behind the number"),
    _column("chance", _REAL, "share, 0 to 1", "of a guess among the possible answers; null: not known"),
    _column("train_length", _INT, "tokens; copying: letters", "of a training example"),
    _column("measured", _REAL, "tokens", "of a prompt, mean over examples"),
)
_SHIFT = (
    *_MEASURED,
    _column("layer", _INT, "", "from 0"),
    _column("head", _INT, "", "from 0, within its layer"),
    _POSITION,
    _column(
        "reference",
        _TEXT,
        "",
        "`own training`: states that this arm's training met; `zero start`: states read from zero up to T_train",
    ),
    _column("measure", _TEXT, "", "`sliced_wasserstein`, `accuracy`, `auc` or `novelty` (docs/diagnostics.md)"),
    _column("value", _REAL, "of `measure`", "distance in deviations of the reference; share; area; multiple of what is usual"),
    *_bounds("as `value`", "documents"),
    _column("null", _REAL, "as `value`", "the same number for held-out states inside training"),
    *_bounds("as `value`", "documents", "null_"),
    _column("null_end", _REAL, "as `value`", "the same for held-out states at exactly T_train"),
    *_bounds("as `value`", "documents", "null_end_"),
    _column("beyond", _FLAG, "", "`low` lies above both null bands; null where there is no number"),
    _column("n_states", _INT, "states", "at this position"),
    _DOCUMENTS,
    _column("n_reference", _INT, "states", "of the reference"),
    _column("n_reference_documents", _INT, "documents", "they are of"),
    _INTERVAL,
    _REASON,
)
_FAMILY = (
    _column("panel", _TEXT, "", "the model, and what else tells panels apart"),
    _column("series", _TEXT, "", "the value of what the figure varies, as in its legend"),
    _column("seed", _INT, "", "null: the mean over seeds"),
    _TRAIN_LENGTH,
    _column("metric", _TEXT, "", "`ppl`, `excess_nll`, …, `short_context_cost` or `short_loss`"),
    _column("axis", _TEXT, "", "name of the axis of the small panel; null: a curve by position"),
    _column("varied", _REAL, "of `axis`", "the value on that axis; null: a curve by position"),
    _column("position", _INT, "tokens", "of the bin's middle; null: a number against what is varied"),
    _column("value", _REAL, "nats a token; of `ppl` a perplexity", "the quantity"),
    *_bounds("as `value`", "documents"),
    _DOCUMENTS,
)

TABLES: tuple[Table, ...] = (
    Table(
        "documents",
        "documents.parquet",
        "results/corpus/documents.<source>-<key>/",
        "a document of one file or shard",
        (
            _DOCUMENT[0],
            _column("text", _TEXT, "", "the document"),
            *_DOCUMENT[2:],
            _DOCUMENT[1],
        ),
    ),
    Table(
        "tokens",
        "index.parquet",
        "results/corpus/tokens.<source>-<key>/",
        "a document of one shard, beside the shard's `tokens.bin`",
        (*_DOCUMENT, *_PLACE),
    ),
    Table(
        "store",
        "index.parquet",
        "results/corpus/store-<key>/",
        "a document of the whole store, by split and name",
        (*_DOCUMENT, *_PLACE, _column("shard", _INT, "", "number of its shard in `store.json`")),
    ),
    Table(
        "training steps",
        "metrics.jsonl",
        "results/pretrain/<model>…-<key>/, results/posttrain/…, results/tasks/model.…",
        "an optimiser step, one JSON object a line",
        (
            _column("step", _INT, "", "from 1"),
            _column("tokens", _INT, "tokens", "read so far"),
            _column("loss", _REAL, "nats a token", "mean over the step's predicted tokens"),
            _column("grad_norm", _REAL, "", "norm of the gradient before it is clipped"),
            _column("learning_rate", _REAL, "", "of the step"),
        ),
    ),
    Table(
        "state ages of a training",
        "ages.parquet",
        "results/posttrain/<model>.<arm>.s<seed>-<key>/, results/tasks/model.…",
        "a step and an age",
        (
            _column("step", _INT, "", "from 1"),
            _column(
                "age",
                _INT,
                "tokens",
                "that a sequence's initial state had read since it was zero; null: noise, no text led there",
            ),
            _column("sequences", _INT, "sequences", "of the step that began from a state of this age"),
        ),
    ),
    Table(
        "examples",
        "examples.arrow",
        "results/tasks/data.<task>.<set>-<key>/",
        "a question with its answer",
        (
            _column("task", _TEXT, "", "`qa1` … `qa10`, `passkey` or `copying`"),
            _column("number", _INT, "", "within its cell (task, length, depth)"),
            _column("length", _INT, "tokens; copying: letters", "of the prompt; BABILong 0: facts and question alone"),
            _column("depth", _REAL, "0 to 1", "where the fact stands; null: no such place"),
            _column("label", _TEXT, "", "the right answer, without what ends it"),
            _column("prompt", _LIST, "token numbers", "what is read"),
            _column("answer", _LIST, "token numbers", "what a right model goes on with, the token that ends it included"),
            _column("facts", _LIST, "positions in the prompt", "where the facts that decide begin"),
        ),
    ),
    Table(
        "perplexity",
        "perplexity.parquet",
        "results/evaluate/perplexity.<model>.<arm>…-<key>/",
        "a text (document, stretch) and a bin of positions",
        (
            *_MEASURED,
            *_TEXT_READ,
            *_BIN,
            _column("tokens", _INT, "tokens", "of the bin; divide the sums by it"),
            _column("nll_carried", _REAL, "nats, summed", "the state is carried from the start of the stretch"),
            _column(
                "nll_window", _REAL, "nats, summed", "fresh windows of T_train, second half scored: the reference of the excess"
            ),
            _column("nll_reset", _REAL, "nats, summed", "the state is reset every T_train tokens"),
        ),
    ),
    Table(
        "perplexity by position",
        "positions.parquet",
        "results/evaluate/perplexity.<model>.<arm>…-<key>/",
        "a position",
        (
            _POSITION,
            _column("documents", _INT, "documents", "behind the means"),
            _column("nll_carried", _REAL, "nats a token", "mean over all stretches, each with the same weight"),
            _column("nll_window", _REAL, "nats a token", "the same in fresh windows of T_train"),
        ),
    ),
    Table(
        "remembrance",
        "remembrance.parquet",
        "results/evaluate/remembrance.<model>.<arm>…-<key>/",
        "a text, a start and a target",
        (
            *_MEASURED,
            *_TEXT_READ,
            _column("T", _INT, "tokens", "the tokens x_0 … x_T are read"),
            _column("start", _INT, "tokens", "t, tokens dropped from the front"),
            _column(
                "target", _TEXT, "", "`T`: the prediction after x_T; `last 64`: the mean over those after the last 64 tokens"
            ),
            _column("total_variation", _REAL, "0 to 1", "half the sum of |q − q′|"),
            _column("jensen_shannon", _REAL, "nats, 0 to ln 2", "divergence of the two distributions"),
            _column("jensen_shannon_distance", _REAL, "√nats, 0 to √ln 2", "its root, taken before any mean"),
            _column("cosine_distance", _REAL, "0 to 1", "1 − cosine of the probability vectors"),
        ),
    ),
    Table(
        "states",
        "states.parquet",
        "results/evaluate/states.<model>.<arm>…-<key>/",
        "a text, a layer, head and part, and a bin",
        (*_MEASURED, *_TEXT_READ, *_WHICH, _PART, *_BIN, _column("tokens", _INT, "states", "of the bin"), *_STATISTICS),
    ),
    Table(
        "sampled states",
        "samples.parquet",
        "results/evaluate/states.<model>.<arm>…-<key>/",
        "a text, a layer, head and part, and a sampled position",
        (
            *_MEASURED,
            *_TEXT_READ,
            *_WHICH,
            _PART,
            _column("position", _INT, "tokens", "tokens the state has read"),
            *_STATISTICS,
            _column("largest", _REAL, "as the state", "absolute value of the largest entry"),
            _column(
                "effective_rank",
                _REAL,
                "directions",
                "exp of the entropy of the singular values' shares; null: no matrix, or zeros",
            ),
        ),
    ),
    Table(
        "states by position",
        "positions.parquet",
        "results/evaluate/states.<model>.<arm>…-<key>/",
        "a position, a layer, head and part",
        (
            _column("position", _INT, "tokens", "tokens the state has read"),
            *_WHICH,
            _PART,
            *_STATISTICS,
            _column("documents", _INT, "documents", "behind the means, in which each text has the same weight"),
        ),
    ),
    Table(
        "shift",
        "shift.parquet",
        "results/evaluate/shift.<model>.<arm>…-<key>/",
        "a head, position, reference and measure",
        _SHIFT,
    ),
    Table(
        "association",
        "association.parquet",
        "results/evaluate/shift.<model>.<arm>…-<key>/",
        "a rank correlation at one position",
        (
            *_MEASURED,
            _POSITION,
            _column("reference", _TEXT, "", "of the novelty or drift: `own training` or `zero start`"),
            _column("across", _TEXT, "", "`documents` or `heads`"),
            _column("layer", _INT, "", "null across heads"),
            _column("head", _INT, "", "null: mean over heads, and across heads"),
            _column("predictor", _TEXT, "", "`novelty` or `drift`"),
            _column("outcome", _TEXT, "", "`excess_nll` or `change when swapped`"),
            _column("value", _REAL, "−1 to 1", "Spearman's ρ"),
            *_bounds("−1 to 1", "what it is taken across"),
            _column("p", _REAL, "0 to 1", "of a permutation test"),
            _column("p_holm", _REAL, "0 to 1", "corrected over the heads at this position (Holm)"),
            _column("n", _INT, "documents or heads", "behind ρ"),
            _REASON,
        ),
    ),
    Table(
        "swaps",
        "swaps.parquet",
        "results/evaluate/shift.<model>.<arm>…-<key>/",
        "a head or group of heads whose state was replaced",
        (
            *_MEASURED,
            _column("position", _INT, "tokens", "where the state was replaced"),
            _column(
                "group", _TEXT, "", "`top`: heads that drift most; `random`; `all`; `top − random`; `untouched`: the excess there"
            ),
            _column("source", _TEXT, "", "`training state`, `other document`, their difference, or `none`"),
            _column("together", _FLAG, "", "all heads of the group at once; otherwise one at a time"),
            _column("layer", _INT, "", "null: a group"),
            _column("head", _INT, "", "null: a group"),
            _column("heads", _INT, "heads", "of the group"),
            _column(
                "drift",
                _REAL,
                "deviations of the reference",
                "sliced Wasserstein distance of the head's states from its own training; null: a group",
            ),
            _column(
                "value",
                _REAL,
                "nats a token",
                "change of the loss of the next ⌈T_train / 2⌉ tokens; negative: the state did harm",
            ),
            *_bounds("nats a token", "documents"),
            _column("n_texts", _INT, "texts", "swapped"),
            _DOCUMENTS,
            _INTERVAL,
            _REASON,
        ),
    ),
    Table(
        "answers",
        "answers.parquet",
        "results/evaluate/task.<task>.<model>.<arm>…-<key>/",
        "an example that was asked",
        (
            *_whose()[:2],
            _SCORED[2],
            _column("seed", _INT, "", "of the training on the task"),
            _column("train_length", _INT, "tokens; copying: letters", "of a training example"),
            *_SCORED[4:7],
            _column("example", _INT, "", "number within its cell"),
            _column("tokens", _INT, "tokens", "of the prompt"),
            _column("label", _TEXT, "", "the right answer"),
            _column("generated", _TEXT, "", "what the model wrote, greedily"),
            _column("generated_tokens", _INT, "tokens", "it wrote"),
            _column("nll", _REAL, "nats, summed", "of the right answer, its end included; NaN where not finite"),
            _column("finite", _FLAG, "", "all outputs were finite numbers"),
            _column(
                "strict",
                _REAL,
                "0 or 1",
                "BABILong: exactly one of the task's labels in the first sentence, and the right one; null elsewhere",
            ),
            _column("lenient", _REAL, "0 or 1", "BABILong: the label stands in the first 16 tokens; null elsewhere"),
            _column("exact", _REAL, "0 or 1", "passkey, copying: the whole answer; null elsewhere"),
            _column("characters", _REAL, "share, 0 to 1", "characters in place, free-running; null for BABILong"),
            _column(
                "characters_forced",
                _REAL,
                "share, 0 to 1",
                "the same with the right answer before each (teacher-forced); null for BABILong",
            ),
        ),
    ),
    Table(
        "curves",
        "curves.parquet",
        "results/evaluate/<figure>-<key>/",
        "a model, arm, seed and bin; `metric` is `ppl`, `excess_nll` (own windows) or `excess_nll_base` (the base model's windows)",
        _CURVE,
    ),
    Table(
        "references",
        "references.parquet",
        "results/evaluate/<figure>-<key>/",
        "as in `curves`; `metric` is `ppl_window`, `ppl_reset` or `reset_excess` (reset − windows of the same model)",
        _CURVE,
    ),
    Table(
        "verdicts",
        "verdicts.parquet",
        "results/evaluate/<figure>-<key>/",
        "a model, arm and seed; far positions are `far_from` … `far_to`",
        (
            *_COMPARED,
            _column("verdict", _TEXT, "", "of Def. 3.2: PASS, FAIL or UNDECIDED"),
            _column("t_star", _INT, "tokens", "t*, where PPL is lowest within T_train, chosen on one half of the texts"),
            _column("p_star", _REAL, "perplexity", "p*, its value there on the other half"),
            _column("worst_position", _INT, "tokens", "after t*, where PPL exceeds p* most"),
            _column("gap", _REAL, "nats a token", "log PPL there − log p*"),
            _column("gap_low", _REAL, "nats a token", "lower end of its simultaneous interval"),
            _column("gap_high", _REAL, "nats a token", "upper end"),
            _column("fails_beyond", _FLAG, "", "shown to exceed p* beyond T_train, not only before"),
            _column("worst_beyond", _INT, "tokens", "the worst position beyond T_train"),
            _column("gap_beyond", _REAL, "nats a token", "the gap there"),
            _column("gap_beyond_low", _REAL, "nats a token", "lower end"),
            _column("gap_beyond_high", _REAL, "nats a token", "upper end"),
            _column("would_be", _TEXT, "", "of UNDECIDED: the verdict if this gap were the true one"),
            _column("documents_to_decide", _REAL, "documents", "of UNDECIDED: how many would decide, roughly"),
            _column("control", _TEXT, "", "the arm that `…_vs_control` compares with; null: none"),
            _column("tolerance", _REAL, "nats a token", "what the verdict tolerates"),
            _column("confidence", _REAL, "0 to 1", "of all intervals"),
            _column("verdict_interval", _TEXT, "", "how the verdict's interval was made"),
            _column("verdict_split", _TEXT, "", "what the two halves are halves of: `documents`, `stretches` or `nothing`"),
            _INTERVAL,
            _DOCUMENTS,
            _STRETCHES,
            _column("n_seeds", _INT, "seeds", "behind the row"),
            _column("broken_at", _INT, "tokens", "first position with a loss that is no number; null: none"),
            _column("far_from", _INT, "tokens", "first far position: 32 T_train, else the last octave"),
            _column("far_to", _INT, "tokens", "the last position"),
            *_estimate("excess_nll", "nats a token", "far out, carried state − the same model's windows of T_train"),
            *_estimate("excess_nll_base", "nats a token", "far out, carried state − the *base* model's windows"),
            *_estimate("ppl_far", "perplexity", "far out"),
            *_estimate("ppl_ratio", "", "far perplexity / p*"),
            *_estimate("removed", "share", "of the base's `excess_nll` that the arm takes away; null where the base has none"),
            *_estimate("removed_base", "share", "the same by `excess_nll_base`"),
            *_estimate("removed_vs_control", "share", "`removed`, from the control's excess instead of the base's"),
            *_estimate("removed_base_vs_control", "share", "`removed_base`, from the control's"),
            *_estimate("short_context_cost", "nats a token", "loss within T_train − the base's: what the repair costs"),
            *_estimate("short_context_cost_vs_control", "nats a token", "the same − the control's"),
            *_estimate(
                "beats_reset", "nats a token", "far loss − that of the same model, reset every T_train tokens; negative is better"
            ),
            *_estimate("beats_base_reset", "nats a token", "far loss − that of the base model reset so, which needs no training"),
            *_over_seeds("excess_nll", "nats a token"),
            *_over_seeds("excess_nll_base", "nats a token"),
            *_over_seeds("removed", "share"),
            *_over_seeds("removed_base", "share"),
            *_over_seeds("short_context_cost", "nats a token"),
            _column("steps", _INT, "", "of the post-training; null: the base"),
            _column("tokens", _INT, "tokens", "of the post-training"),
            _column("learning_rate", _REAL, "", "its peak"),
        ),
    ),
    Table(
        "differences",
        "differences.parquet",
        "results/evaluate/<figure>-<key>/",
        "a pair of runs that a figure asks to compare, a seed and a quantity",
        (
            *_COMPARED[:3],
            _column("against_model", _TEXT, "", "the other run's model"),
            _column("against_arm", _TEXT, "", "the other run's arm"),
            _column("quantity", _TEXT, "", "`excess_nll` and `nll` far out, `short_context_nll`"),
            _column("value", _REAL, "nats a token", "the first − the other, paired by texts and seeds"),
            *_bounds("nats a token", "documents"),
            *_bounds("nats a token", "seeds (Student's t); null below three seeds", "seeds_"),
            _column("n_seeds", _INT, "seeds", "that both have"),
            _DOCUMENTS,
        ),
    ),
    Table(
        "state ages",
        "ages.parquet",
        "results/evaluate/<figure>-<key>/",
        "an arm and an age",
        (
            *_COMPARED[:3],
            _column("age", _INT, "tokens", "of initial states; null: noise"),
            _column("share", _REAL, "0 to 1", "of the training's sequences that began from such a state"),
        ),
    ),
    Table(
        "reach",
        "reach.parquet",
        "results/evaluate/compare_reach.<figure>-<key>/",
        "a model, arm, seed and T: the verdict of Def. 3.2 to every octave",
        (
            *_COMPARED,
            _column("T", _INT, "tokens", "the last position that is looked at"),
            _column("verdict", _TEXT, "", "of Def. 3.2 to T: PASS, FAIL or UNDECIDED"),
            _column("fails_beyond", _FLAG, "", "shown to exceed p* beyond T_train, not only before"),
            _column("t_star", _INT, "tokens", "t*, where PPL is lowest within T_train, chosen on one half of the texts"),
            _column("worst_beyond", _INT, "tokens", "the worst position beyond T_train"),
            _column("would_be", _TEXT, "", "of UNDECIDED: the verdict if this gap were the true one"),
            _column("p_star", _REAL, "perplexity", "p*, its value there on the other half"),
            _column("gap", _REAL, "nats a token", "log PPL at the worst position after t* − log p*"),
            _column("gap_low", _REAL, "nats a token", "lower end of its simultaneous interval"),
            _column("gap_high", _REAL, "nats a token", "upper end"),
            _column("gap_beyond", _REAL, "nats a token", "the gap at the worst position beyond T_train"),
            _column("gap_beyond_low", _REAL, "nats a token", "lower end"),
            _column("gap_beyond_high", _REAL, "nats a token", "upper end"),
            _column("documents_to_decide", _REAL, "documents", "of UNDECIDED: how many would decide, roughly"),
        ),
    ),
    Table(
        "compared remembrance",
        "remembrance.parquet",
        "results/evaluate/compare_remembrance.<figure>-<key>/",
        "a model, arm, seed, measure, target, distance, `against` and start",
        _REMEMBERED,
    ),
    Table(
        "compared states",
        "states.parquet",
        "results/evaluate/compare_states.<figure>-<key>/",
        "a model, arm, seed, layer, head, part, statistic and position",
        _STATE_CURVE,
    ),
    Table(
        "heads",
        "heads.parquet",
        "results/evaluate/compare_states.<figure>-<key>/",
        "a model, arm, seed, layer and head",
        (
            *_COMPARED,
            *_WHICH,
            *_DRIFT,
            *_bounds("doublings", "documents, simultaneous over all heads"),
            *_RANKED,
            _DOCUMENTS,
            _STRETCHES,
        ),
    ),
    Table(
        "scores",
        "scores.parquet",
        "results/evaluate/compare_task.<figure>-<key>/",
        "a model, arm, seed, cell (task, length, depth) and score",
        _SCORED,
    ),
    Table(
        "page of curves",
        "<figure>.parquet",
        "reports/, for fig1, fig5, fig10, diagnosis, repair",
        "a point that is drawn, as in `curves`",
        _CURVE,
    ),
    Table(
        "page of a family",
        "<figure>.parquet",
        "reports/, for fig2, fig3, fig11, fig12, cost",
        "a point that is drawn",
        _FAMILY,
    ),
    Table(
        "page of states",
        "<figure>.parquet",
        "reports/, for fig4",
        "a point that is drawn, as in `compared states`",
        _STATE_CURVE,
    ),
    Table(
        "page of heads",
        "<figure>.parquet",
        "reports/, for fig9",
        "a point that is drawn, as in `compared states`; below them, with no position, the drawn heads' drifts, as in `heads`",
        (*_STATE_CURVE, *_DRIFT, *_RANKED),
    ),
    Table(
        "page of remembrance",
        "<figure>.parquet",
        "reports/, for fig13",
        "a point that is drawn, as in `compared remembrance`",
        _REMEMBERED,
    ),
    Table(
        "page of shift",
        "<figure>.parquet",
        "reports/, for shift",
        "as in `shift`",
        _SHIFT,
    ),
    Table(
        "page of a task",
        "<figure>.parquet",
        "reports/, for fig6, fig7, table1",
        "as in `scores`",
        _SCORED,
    ),
    Table(
        "summary of curves",
        "<figure>.csv",
        "summary/curves/",
        "a point, mean over seeds; for `dvc plots`",
        (
            *_COMPARED[:2],
            _column("quantity", _TEXT, "", "`excess_nll`, `ppl`, or a score"),
            _column("position", _REAL, "tokens", "read before the predicted one"),
            _column("value", _REAL, "of `quantity`", "mean over seeds"),
            *_bounds("as `value`", "documents; empty for a score"),
        ),
    ),
)


def hold_all(directory: Path) -> None:
    """Hold every table of a result (`hold`)."""
    for path in sorted(directory.iterdir()):
        if path.suffix in (".parquet", ".arrow", ".jsonl") and not path.name.startswith("."):
            hold(path)


def hold(path: Path, *, page: bool = False) -> None:
    """Refuse a table whose columns are not those of a declared one with its name.

    Args:
        path: a `.parquet`, `.arrow`, `.csv` or `.jsonl` file.
        page: it is a figure's, whose name is that of the figure.

    Raises:
        FarstateError: other columns, or other types. It is an error of the code that writes.
    """
    name = f"<figure>{path.suffix}" if page else path.name
    known = [table for table in TABLES if table.file == name]
    found = _columns_of(path, path.suffix)
    if any(_fits(found, table) for table in known):
        return
    nearest = min(known, key=lambda table: len(set(found) ^ {column.name for column in table.columns}), default=None)
    if nearest is None:
        raise FarstateError(f"{path}: no such table is declared in src/farstate/tables.py")
    declared = {column.name: column.kind for column in nearest.columns}
    wrong = [f"'{name}' is not declared" for name in found if name not in declared]
    wrong += [f"'{name}' is missing" for name in declared if name not in found]
    wrong += [
        f"'{name}' is {kind}, declared {declared[name]}"
        for name, kind in found.items()
        if kind not in (None, declared.get(name, kind))
    ]
    raise FarstateError(
        f"{path}: {'; '.join(wrong) or 'columns in another order'} (table '{nearest.name}' in src/farstate/tables.py); "
        "declare what the code writes"
    )


def _fits(found: Mapping[str, str | None], table: Table) -> bool:
    if list(found) != [column.name for column in table.columns]:
        return False
    return all(kind in (None, column.kind) for kind, column in zip(found.values(), table.columns, strict=True))


def _columns_of(path: Path, ending: str) -> dict[str, str | None]:
    """Name and kind of each column; the kind None where the file does not tell it."""
    if ending in (".csv", ".jsonl"):
        with open(path, encoding="utf-8") as lines:
            first = lines.readline()
        names: Sequence[str] = list(json.loads(first)) if ending == ".jsonl" else first.strip().split(",")
        return dict.fromkeys(names)
    import pyarrow as pa

    if ending == ".arrow":
        with pa.memory_map(str(path)) as source:
            schema = pa.ipc.open_file(source).schema
    else:
        import pyarrow.parquet as pq

        schema = pq.read_schema(path)
    return {field.name: _kind(field.type) for field in schema}


def _kind(arrow: Any) -> str:
    import pyarrow as pa

    if pa.types.is_list(arrow) or pa.types.is_large_list(arrow):
        return f"list of {_kind(arrow.value_type)}s"
    for test, kind in (
        (pa.types.is_boolean, _FLAG),
        (pa.types.is_integer, _INT),
        (pa.types.is_floating, _REAL),
        (pa.types.is_string, _TEXT),
        (pa.types.is_large_string, _TEXT),
        (pa.types.is_null, None),
    ):
        if test(arrow):
            return kind  # type: ignore[return-value]
    return str(arrow)
