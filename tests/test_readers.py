"""Readers: what a window is, which windows are read, in which order, and that the step number is the whole position."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farstate.corpus.document_table import DocumentTable
from farstate.corpus.permutation import mix, permute
from farstate.corpus.readers import Batch, OrderedStreams, ShuffledStreams, ShuffledWindows, held_out, rank_rows
from farstate.corpus.store import TokenStore
from farstate.errors import FarstateError
from farstate.files import read_manifest
from golden import check
from test_corpus_store import expected_tokens, make_store

T = 8
LENGTHS = [3, 8, 9, 10, 16, 17, 25, 40, 41, 100, 137, 200, 77, 9, 300]
WINDOWS = sum(max(length - 1, 0) // T for length in LENGTHS)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    documents = [(f"document {n}", "train", length) for n, length in enumerate(LENGTHS)]
    documents += [(f"held {n}", "test", length) for n, length in enumerate([31, 32, 33, 65, 97, 129])]
    return make_store(tmp_path_factory.mktemp("store"), documents)


def windows(batch: Batch) -> list[tuple[int, int]]:
    return list(zip(batch.document.tolist(), batch.offset.tolist(), strict=True))


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "document", "offset", "fresh"))


def assert_true_to_the_text(store: TokenStore, batch: Batch, rows: int) -> None:
    """Shapes, types, and every window inside one document, token by token."""
    table = store.documents("train")
    assert batch.tokens.shape == (rows, T + 1)
    assert batch.tokens.dtype == batch.document.dtype == batch.offset.dtype == torch.int64
    assert batch.fresh.dtype == torch.bool
    assert batch.document.shape == batch.offset.shape == batch.fresh.shape == (rows,)
    for row, (document, offset) in enumerate(windows(batch)):
        assert 0 <= offset <= table.length[document] - (T + 1)
        assert batch.tokens[row].tolist() == expected_tokens(str(table.title[document]), offset, T + 1).tolist()


# --- permutations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 9, 31, 32, 33, 1000, 4097])
def test_permute_is_a_permutation(size: int) -> None:
    index = np.arange(size)
    images = [permute(index, size, seed, 1) for seed in range(4)]
    for image in images:
        assert sorted(image.tolist()) == index.tolist()
    if size > 30:
        assert all((images[0] != other).mean() > 0.7 for other in images[1:])
        assert permute(index[5:9], size, 2, 1).tolist() == images[2][5:9].tolist()
        assert permute(np.full(4, 7), size, np.arange(4), 1).tolist() == [image[7] for image in images]


def test_permute_looks_uniform() -> None:
    """Over many keys each value goes to each place equally often: chi-squared, 42 expected."""
    size, keys = 7, 20_000
    counts = np.stack([np.bincount(permute(np.full(keys, n), size, np.arange(keys)), minlength=size) for n in range(size)])
    expected = keys / size
    assert ((counts - expected) ** 2 / expected).sum() < 80
    image = permute(np.arange(10_000), 10_000, 3)
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.04


def test_large_numbers_do_not_overflow() -> None:
    size = 2**40 + 3
    image = permute(np.array([0, 1, size - 1]), size, 1)
    assert len(set(image.tolist())) == 3
    assert all(0 <= value < size for value in image.tolist())
    assert mix(0).dtype == np.uint64
    assert int(mix(0)) != int(mix(0, 0)) != int(mix(1, 0))


# --- shuffled windows ------------------------------------------------------------------------------------


def test_epochs_are_permutations_with_phases_of_their_own(store: TokenStore) -> None:
    reader = ShuffledWindows(store, "train", T, 1, seed=3)
    assert reader.windows == WINDOWS
    table = store.documents("train")
    orders = []
    for epoch in range(3):
        read = [windows(reader.batch(epoch * WINDOWS + step))[0] for step in range(WINDOWS)]
        per_document = Counter(document for document, _ in read)
        phases = {}
        for document, count in per_document.items():
            length = int(table.length[document])
            assert count == (length - 1) // T
            offsets = sorted(offset for where, offset in read if where == document)
            phase = offsets[0]
            assert 0 <= phase <= (length - 1) % T
            assert offsets == [phase + number * T for number in range(count)]
            phases[document] = phase
        orders.append((read, phases))
    assert orders[0][0] != orders[1][0] != orders[2][0]
    assert orders[0][1] != orders[1][1]


def test_shuffled_batches(store: TokenStore) -> None:
    reader = ShuffledWindows(store, "train", T, 32, seed=0)
    batches = [reader.batch(step) for step in range(6)]  # crosses into a second epoch in mid-batch
    for batch in batches:
        assert_true_to_the_text(store, batch, 32)
        assert batch.fresh.all()
    assert same(ShuffledWindows(store, "train", T, 32, seed=0).batch(4), batches[4])
    assert not same(ShuffledWindows(store, "train", T, 32, seed=1).batch(4), batches[4])
    one_by_one = [windows(ShuffledWindows(store, "train", T, 1, seed=0).batch(step))[0] for step in range(64)]
    assert one_by_one == windows(batches[0]) + windows(batches[1])
    far = reader.batch(10**9)
    assert_true_to_the_text(store, far, 32)


def test_batch_larger_than_an_epoch(store: TokenStore) -> None:
    batch = ShuffledWindows(store, "train", T, 3 * WINDOWS, seed=0).batch(0)
    assert_true_to_the_text(store, batch, 3 * WINDOWS)
    counts = Counter(batch.document.tolist())
    assert set(counts.values()) == {3 * ((int(length) - 1) // T) for length in store.documents("train").length if length > T}


# --- blocks that all contexts read alike -----------------------------------------------------------------


def positions(batch: Batch) -> list[tuple[int, int]]:
    """Document and place of every input token, in the order of the rows."""
    size = batch.tokens.shape[1] - 1
    return [(document, offset + n) for document, offset in windows(batch) for n in range(size)]


def test_contexts_read_the_same_text_in_the_same_order(store: TokenStore) -> None:
    """Equal blocks and seed: after n tokens readers of any context have read the same, over epochs and broken blocks."""
    block, budget = 4 * T, 3 * 4 * T
    alike = [ShuffledWindows(store, "train", context, budget // context, 6, block) for context in (1, 4, T, 2 * T, 4 * T)]
    per_epoch = alike[-1].windows
    for step in (0, 1, 2, per_epoch // 3, per_epoch, 10**8):
        batches = [positions(reader.batch(step)) for reader in alike]
        assert all(batch == batches[0] for batch in batches)
    # With other batches, none a multiple of the block: the same text up to one batch.
    readers = [ShuffledWindows(store, "train", context, rows, 6, block) for context, rows in ((T, 5), (2 * T, 3), (4 * T, 2))]
    texts = [[p for step in range(30) for p in positions(reader.batch(step))] for reader in readers]
    assert len({len(text) for text in texts}) == len(texts)
    shortest = min(map(len, texts))
    assert all(text[:shortest] == texts[0][:shortest] for text in texts)
    for text in texts:
        for document, place in text:
            assert place < store.documents("train").length[document]


def test_an_epoch_of_blocks_reads_each_whole_block_once(store: TokenStore) -> None:
    """A document of fewer than K + 1 tokens is never read, of the others ⌊(length − 1) / K⌋ · K tokens in a row from the phase on."""
    block = 4 * T
    reader = ShuffledWindows(store, "train", T, 4, 6, block)
    table = store.documents("train")
    assert reader.windows == 4 * sum((length - 1) // block for length in LENGTHS)
    assert reader.windows % 4 == 0
    for epoch in range(2):
        read: dict[int, list[int]] = {}
        for step in range(epoch * reader.windows // 4, (epoch + 1) * reader.windows // 4):
            for document, place in positions(reader.batch(step)):
                read.setdefault(document, []).append(place)
        assert set(read) == {document for document in range(len(table)) if table.length[document] > block}
        for document, places in read.items():
            length = int(table.length[document])
            first = min(places)
            assert first <= (length - 1) % block
            assert sorted(places) == list(range(first, first + (length - 1) // block * block))


def test_blocks_of_one_window_are_windows(store: TokenStore) -> None:
    plain, blocks = (ShuffledWindows(store, "train", T, 16, 1, block) for block in (None, T))
    assert all(same(plain.batch(step), blocks.batch(step)) for step in (0, 5, 10**6))
    with pytest.raises(FarstateError, match=r"pretrain\.block_tokens: 12 is not a multiple of the context of 8 tokens"):
        ShuffledWindows(store, "train", T, 16, 1, 12)
    with pytest.raises(FarstateError, match=r"no document has 401 tokens; .*; lower pretrain\.block_tokens or add"):
        ShuffledWindows(store, "train", T, 16, 1, 400)


# --- ordered streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "steps"), [(1, WINDOWS), (4, 20), (4, WINDOWS // 4), (7, 16), (WINDOWS, 1), (30, 3)])
@pytest.mark.parametrize("stretch_tokens", [None, T, 3 * T + 5])
def test_reading_order(store: TokenStore, rows: int, steps: int, stretch_tokens: int | None) -> None:
    reader = OrderedStreams(store, "train", T, rows, steps, 5, stretch_tokens)
    longest = WINDOWS if stretch_tokens is None else stretch_tokens // T
    previous: list[tuple[int, int]] = [(-1, -1)] * rows
    run = [0] * rows
    read: list[tuple[int, int]] = []
    for step in range(steps):
        batch = reader.batch(step)
        assert_true_to_the_text(store, batch, rows)
        for row, (document, offset) in enumerate(windows(batch)):
            assert offset % T == 0
            if batch.fresh[row]:
                run[row] = 0
            else:
                assert (document, offset - T) == previous[row]
            run[row] += 1
            assert run[row] <= longest
            previous[row] = (document, offset)
            read.append((document, offset))
        if step == 0:
            assert batch.fresh.all()
    assert len(set(read)) == len(read) == rows * steps, "no window is read twice"


@pytest.mark.parametrize("stretch_tokens", [None, 4 * T])
def test_restart_at_any_step(store: TokenStore, stretch_tokens: int | None) -> None:
    arguments = (store, "train", T, 5, 20, 1, stretch_tokens)
    reader = OrderedStreams(*arguments)
    batches = [reader.batch(step) for step in range(20)]
    for step in (19, 3, 11, 0):
        assert same(OrderedStreams(*arguments).batch(step), batches[step])
    other = OrderedStreams(store, "train", T, 5, 20, 2, stretch_tokens)
    assert not all(same(other.batch(step), batches[step]) for step in range(20))
    for step in (-1, 20):
        with pytest.raises(IndexError):
            reader.batch(step)


def test_rows_are_balanced_and_fresh_exactly_where_a_stretch_begins(store: TokenStore) -> None:
    """One document of 25 windows among many of one: every row reads a window in every step, the long document included."""
    rows, steps = 4, WINDOWS // 4
    reader = OrderedStreams(store, "train", T, rows, steps, 3, None)
    step, row = np.divmod(np.arange(rows * steps), rows)
    document, offset, began = reader.locate(step, row)
    assert len(set(zip(document.tolist(), offset.tolist(), strict=True))) == rows * steps
    longest = max(Counter(document.tolist()).values())
    assert longest > steps // 2, "one document alone takes most of a row"
    assert [int((row == number).sum()) for number in range(rows)] == [steps] * rows
    fresh = torch.stack([reader.batch(number).fresh for number in range(steps)]).numpy()
    assert (fresh == (began == step).reshape(steps, rows)).all()
    before = np.full(rows, -1)
    for number in range(steps):
        now = document.reshape(steps, rows)[number]
        goes_on = (now == before) & (offset.reshape(steps, rows)[number] > 0)
        assert (fresh[number] == ~goes_on).all()
        before = now


def test_whole_documents_are_read_to_their_end(store: TokenStore) -> None:
    """A row changes document only where the document has no further whole window."""
    rows, steps = 3, WINDOWS // 3
    reader = OrderedStreams(store, "train", T, rows, steps, 0, None)
    length = torch.tensor(store.documents("train").length)
    for before, after in pairwise(reader.batch(step) for step in range(steps)):
        assert (before.offset + 2 * T + 1 > length[before.document])[after.fresh].all()


@pytest.mark.parametrize("stretch_tokens", [None, 2 * T])
def test_shuffled_streams_read_the_same_windows(store: TokenStore, stretch_tokens: int | None) -> None:
    rows, steps = 6, 17
    ordered = OrderedStreams(store, "train", T, rows, steps, 9, stretch_tokens)
    shuffled = ShuffledStreams(ordered, seed=2)
    batches = [shuffled.batch(step) for step in range(steps)]
    for batch in batches:
        assert_true_to_the_text(store, batch, rows)
        assert batch.fresh.all()
    wanted = Counter(window for step in range(steps) for window in windows(ordered.batch(step)))
    found = Counter(window for batch in batches for window in windows(batch))
    assert found == wanted
    assert [windows(batch) for batch in batches] != [windows(ordered.batch(step)) for step in range(steps)]
    assert same(ShuffledStreams(ordered, seed=2).batch(8), batches[8])
    assert not same(ShuffledStreams(ordered, seed=3).batch(8), batches[8])
    with pytest.raises(IndexError):
        shuffled.batch(steps)


def test_too_little_text(store: TokenStore) -> None:
    with pytest.raises(
        FarstateError,
        match=rf"has {WINDOWS} whole windows of 8 tokens, posttrain\.steps .*posttrain\.recipe\.batch_tokens.* 50 × 4 = 200 ",
    ):
        OrderedStreams(store, "train", T, 4, 50, 0, None)
    with pytest.raises(FarstateError, match=r"posttrain\.stretch_tokens: 7 is shorter than one window of 8 tokens"):
        OrderedStreams(store, "train", T, 4, 5, 0, 7)
    for make in (lambda: ShuffledWindows(store, "train", 300, 1, 0), lambda: OrderedStreams(store, "train", 300, 1, 1, 0, None)):
        with pytest.raises(
            FarstateError, match=r"split 'train': no document has 301 tokens; the longest of 15 is 'document 14' with 300"
        ):
            make()
    with pytest.raises(FarstateError, match="split 'validation': has no documents"):
        ShuffledWindows(store, "validation", T, 1, 0)
    assert ShuffledWindows(store, "train", 299, 1, 0).windows == 1


# --- held-out stretches ----------------------------------------------------------------------------------


def test_held_out_stretches(store: TokenStore) -> None:
    table = store.documents("test")
    stretches = held_out(store, "test", 32, None, 1)
    assert [stretch.id for stretch in stretches] == [str(name) for name in table.ids[table.length >= 33]]
    assert all(stretch.stretch == stretch.offset == 0 for stretch in stretches)
    assert [table.ids[stretch.document_index] for stretch in stretches] == [stretch.id for stretch in stretches]
    assert held_out(store, "test", 32, 2, 1) == stretches[:2]
    several = held_out(store, "test", 32, None, 3)
    counts = Counter(stretch.document_index for stretch in several)
    assert {int(table.length[index]): count for index, count in counts.items()} == {33: 1, 65: 2, 97: 3, 129: 3}
    for stretch in several:
        assert stretch.offset == 32 * stretch.stretch
        assert stretch.offset + 33 <= table.length[stretch.document_index]


def test_held_out_too_short(store: TokenStore) -> None:
    with pytest.raises(
        FarstateError,
        match=r"no document has 130 tokens; the longest of 6 is 'held 5' with 129 \(documents by length in tokens: 1 from 16, 2 from 32, 2 from 64, 1 from 128\); lower evaluate\.length",
    ):
        held_out(store, "test", 129, None, 1)
    assert len(held_out(store, "test", 128, None, 9)) == 1


# --- numbers that must not move without a new numerics version --------------------------------------------


def test_golden(store: TokenStore) -> None:
    ordered = OrderedStreams(store, "train", T, 4, 12, 7, 4 * T)
    values = {
        "mix": torch.from_numpy((mix(np.arange(4), 9) >> np.uint64(12)).astype(np.float64)),
        "permute": torch.from_numpy(permute(np.arange(50), 50, 11, 2)),
        "shuffled": torch.cat([ShuffledWindows(store, "train", T, 16, 1).batch(step).tokens for step in (0, 7)]),
        "ordered": torch.cat([ordered.batch(step).tokens for step in (0, 5, 11)]),
        "ordered_fresh": torch.stack([ordered.batch(step).fresh for step in range(12)]),
        "streams": torch.cat([ShuffledStreams(ordered, 1).batch(step).tokens for step in (0, 11)]),
        "held_out": torch.tensor([[s.document_index, s.stretch, s.offset] for s in held_out(store, "test", 32, None, 2)]),
    }
    check("corpus", values)


# --- any number of processes ------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro_batches", "world"), [(1, 1), (1, 2), (2, 2), (3, 4), (2, 6), (12, 2), (1, 24)])
def test_processes_share_every_micro_batch(store: TokenStore, micro_batches: int, world: int) -> None:
    """Micro-batch m of all processes together is micro-batch m of one, at any step, in any reader opened at any time."""
    rows, steps = 24, 3
    ordered = OrderedStreams(store, "train", T, rows, steps, 5, 4 * T)
    makers = (
        lambda: ShuffledWindows(store, "train", T, rows, 1),
        lambda: OrderedStreams(store, "train", T, rows, steps, 5, 4 * T),
        lambda: ShuffledStreams(ordered, 1),
    )
    for make in makers:
        for step in (2, 0):
            whole = make().batch(step)
            shares = [make().batch(step, rank_rows(rows, micro_batches, rank, world)) for rank in range(world)]
            for name in ("tokens", "document", "offset", "fresh"):
                parts = [getattr(share, name).chunk(micro_batches) for share in shares]
                assert {len(part) for of_rank in parts for part in of_rank} == {rows // micro_batches // world}
                joined = torch.cat([of_rank[number] for number in range(micro_batches) for of_rank in parts])
                assert torch.equal(joined, getattr(whole, name))


def test_a_batch_that_cannot_be_shared_or_has_no_such_row(store: TokenStore) -> None:
    with pytest.raises(FarstateError, match=r"24 rows .* in 2 micro-batches .* cannot be shared by 5 processes; .* divides 12"):
        rank_rows(24, 2, 0, 5)
    with pytest.raises(FarstateError, match="cannot be shared by 2 processes"):
        rank_rows(1, 1, 0, 2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        rank_rows(4, 1, 2, 2)
    reader = ShuffledWindows(store, "train", T, 4, 1)
    for rows in ([4], [-1], [0, 9]):
        with pytest.raises(IndexError, match="of a batch of 4"):
            reader.batch(0, np.array(rows))


# --- against the plain way: all documents in memory --------------------------------------------------------


def plain_windows(table: DocumentTable, context: int, rows: int, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Document and offset of a shuffled batch, by cumulative sums over all documents."""
    counts = np.maximum(table.length - 1, 0) // context
    ends = np.cumsum(counts)
    number = np.arange(step * rows, (step + 1) * rows)
    epoch, place = np.divmod(number, ends[-1])
    window = permute(place, int(ends[-1]), seed, 0, epoch)
    document = np.searchsorted(ends, window, side="right")
    slack = (table.length[document] - 1) % context
    phase = (mix(seed, 1, epoch, document) % (slack + 1).astype(np.uint64)).astype(np.int64)
    return document, (window - (ends - counts)[document]) * context + phase


def plain_streams(table: DocumentTable, context: int, rows: int, steps: int, seed: int, longest: int) -> list[list[Any]]:
    """[step][row] → (document, offset, fresh), by a list of all stretches of all documents, handed to the row that is free first."""
    counts = np.maximum(table.length - 1, 0) // context
    stretches = [
        (document, first, min(longest, count - first))
        for document, count in enumerate(counts.tolist())
        for first in range(0, count, longest)
    ]
    order = [stretches[n] for n in permute(np.arange(len(stretches)), len(stretches), seed, 2)]
    read: list[list[Any]] = [[None] * rows for _ in range(steps)]
    ends, rests = [0] * rows, []
    while min(ends) < steps:
        row = ends.index(min(ends))
        document, first, count = order.pop(0) if order else rests.pop()
        room = min(count, steps - ends[row])
        for n in range(room):
            read[ends[row] + n][row] = (document, (first + n) * context, n == 0)
        if count > room:
            rests.append((document, first + room, count - room))
        ends[row] += room
    return read


@pytest.mark.parametrize("number", range(6))
def test_the_same_batches_as_with_everything_in_memory(tmp_path: Path, number: int) -> None:
    """Random stores of several blocks of documents, most too short for a window; also without the raw columns, as older stores are."""
    generator = np.random.default_rng(number)
    count = int(generator.integers(1, 3000))
    lengths = np.where(generator.random(count) < 0.6, generator.integers(0, T, count), generator.geometric(0.02, count))
    lengths[generator.integers(count)] = 40 * T
    store = make_store(tmp_path, [(f"{number}.{n}", "train", int(length)) for n, length in enumerate(lengths)])
    table = store.documents("train")
    rows, seed = int(generator.integers(1, 40)), int(generator.integers(100))
    steps = max(1, min(9, int((np.maximum(lengths - 1, 0) // T).sum()) // rows))
    manifest = read_manifest(tmp_path / "store")
    manifest["files"] = {name: record for name, record in manifest["files"].items() if not name.endswith(".bin")}
    stores = [store]
    if number % 2:
        (tmp_path / "older").mkdir()
        for name in (*manifest["files"], "manifest.json"):
            shutil.copy(tmp_path / "store" / name, tmp_path / "older" / name)
        (tmp_path / "older" / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        stores.append(TokenStore(tmp_path / "older"))
    for opened in stores:
        reader = ShuffledWindows(opened, "train", T, rows, seed)
        for step in (0, 1, 10**6):
            batch = reader.batch(step)
            document, offset = plain_windows(table, T, rows, seed, step)
            assert (batch.document.tolist(), batch.offset.tolist()) == (document.tolist(), offset.tolist())
            assert_true_to_the_text(opened, batch, rows)
        for longest in (None, 3):
            streams = OrderedStreams(opened, "train", T, rows, steps, seed, longest and longest * T)
            wanted = plain_streams(table, T, rows, steps, seed, longest or 10**9)
            for step in range(steps):
                batch = streams.batch(step)
                assert (
                    list(zip(batch.document.tolist(), batch.offset.tolist(), batch.fresh.tolist(), strict=True)) == wanted[step]
                )
