from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from danlu.core.batch import IGNORE, Batch
from danlu.core.config import load
from danlu.core.errors import Failure, InputError
from danlu.data import source
from danlu.data.sizes import Ramp
from danlu.data.source import Corpus, Held, Rows, Set, Weighted
from danlu.data.store import Array, Shards
from tests.unit.data.made import documents, shard


@pytest.fixture
def store(tmp_path: Path) -> Shards:
    """97 rows of 8 tokens, the last one short: 770 tokens in 70 documents of 11."""
    return Shards([shard(tmp_path / "a", documents([11] * 70))])


@pytest.fixture
def make(store: Shards) -> Iterator[Any]:
    made: list[Rows] = []

    def rows(sets: list[Set] | None = None, **given: Any) -> Rows:
        facts = {"sequence_length": 8, "global_batch_size": 12, "seed": 5, "pad_id": 999} | given
        made.append(Rows(sets or [Set(name="a", stream=store)], **facts))
        return made[-1]

    yield rows
    for each in made:
        each.close()


def samples(rows: Rows, updates: int, micros: int = 1) -> list[str]:
    return [sample for _ in range(updates) for batch in rows.take(micros) for sample in batch.samples]


def same(a: Batch, b: Batch) -> bool:
    fields = ("tokens", "labels", "positions", "documents")
    return a.samples == b.samples and all(torch.equal(getattr(a, name), getattr(b, name)) for name in fields)


def test_every_row_once_an_epoch_in_an_order_of_its_own(make: Any) -> None:
    line = samples(make(epochs=3), 25)  # 291 rows in 25 batches of 12: 9 of padding
    assert line[291:] == [""] * 9
    epochs = [line[at : at + 97] for at in (0, 97, 194)]
    orders = []
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == sorted(f"a:{number}:{row}" for row in range(97))
        orders.append(tuple(sample.rsplit(":")[-1] for sample in epoch))
    assert len({*orders, tuple(map(str, range(97)))}) == 4
    assert samples(make(epochs=3), 25) == line
    assert samples(make(epochs=3, seed=6), 25) != line


@pytest.mark.parametrize(("workers", "prefetch"), [(0, 0), (0, 2), (1, 0), (1, 1), (2, 3), (3, 2)])
def test_workers_and_prefetch_change_nothing(make: Any, workers: int, prefetch: int) -> None:
    plain = make(workers=0)
    other = make(workers=workers, prefetch=prefetch)
    for _ in range(20):
        assert all(itertools.starmap(same, zip(plain.take(2), other.take(2), strict=True)))


@pytest.mark.parametrize(("size", "micros"), [(2, 1), (2, 3), (3, 2), (4, 3)])
def test_ranks_share_a_batch_between_them(make: Any, size: int, micros: int) -> None:
    whole = make(epochs=1)
    ranks = [make(rank=rank, size=size, epochs=1) for rank in range(size)]
    for _ in range(9):
        expected = whole.take(1)[0]
        parts = [batch for rank in ranks for batch in rank.take(micros)]
        assert {len(part) for part in parts} == {12 // size // micros}
        assert torch.cat([part.tokens for part in parts]).equal(expected.tokens)
        assert tuple(sample for part in parts for sample in part.samples) == expected.samples


def test_ranks_have_as_many_rows_and_nothing_repeats(make: Any) -> None:
    """7 batches and one row: both ranks answer 9 takes, all 97 samples come once, the rest is padding."""
    ranks = [make(rank=rank, size=2, epochs=1) for rank in range(2)]
    assert ranks[0].updates == ranks[0].updates_per_epoch(12) == 9
    seen = Counter(sample for rank in ranks for sample in samples(rank, 9))
    assert seen.pop("") == 9 * 12 - 97
    assert set(seen.values()) == {1} and len(seen) == 97
    padding = ranks[1].take(1)[0]
    assert padding.samples == ("",) * 6 and padding.labels.eq(IGNORE).all()


def test_resumed_is_uninterrupted_on_any_ranks_and_batch(make: Any) -> None:
    line = samples(make(), 20)
    two = [make(rank=rank, size=2) for rank in range(2)]
    for rank in two:
        samples(rank, 7)
    assert two[0].state() == two[1].state() == {"samples": 84}
    one = make(workers=2)
    one.seek(two[0].state())
    assert samples(one, 5) == line[84:144]
    other = make(global_batch_size=4)
    other.seek(one.state())
    assert samples(other, 6) == line[144:168]
    one.seek({"samples": 12})
    assert samples(one, 1) == line[12:24]


def test_seeking_reads_nothing(make: Any, store: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    read = Shards.read

    def counted(self: Shards, position: int, length: int) -> tuple[Array, Array]:
        calls.append(position)
        return read(self, position, length)

    monkeypatch.setattr(Shards, "read", counted)
    rows = make(workers=0)
    rows.seek({"samples": 12 * 10**12})
    assert not calls
    rows.take(1)
    assert len(calls) == 12


@pytest.mark.parametrize("state", [{}, {"samples": -1}, {"samples": 3, "epoch": 1}])
def test_states_of_another_kind_are_refused(make: Any, state: dict[str, int]) -> None:
    with pytest.raises(InputError, match="data position"):
        make().seek(state)


def test_labels_of_an_epoch_are_tokens_less_documents(make: Any) -> None:
    rows = make(epochs=1)
    labels = tokens = 0
    for _ in range(9):
        labels += sum(int(batch.labels.ne(IGNORE).sum()) for batch in rows.take(1))
        tokens += rows.tokens
    assert (labels, tokens) == (770 - 70, 770)


def test_mixed_sources_keep_their_shares_and_cover_their_rows(tmp_path: Path, make: Any) -> None:
    sets = [
        Set(name=name, stream=Shards([shard(tmp_path / name, documents([9] * count))]), weight=weight)
        for name, count, weight in (("x", 20, 0.5), ("y", 7, 0.3), ("z", 100, 0.2))
    ]
    rows = make(sets, global_batch_size=10)
    line = samples(rows, 40)
    for number in range(1, 401):
        counts = Counter(sample.split(":")[0] for sample in line[:number])
        for each in sets:
            assert abs(counts[each.name] - each.weight * number) < 3
    # y has 63 tokens, so 8 rows: 120 of its rows are 15 whole epochs.
    for epoch in range(15):
        found = [sample for sample in line if sample.startswith(f"y:{epoch}:")]
        assert sorted(found) == [f"y:{epoch}:{row}" for row in range(8)]
    assert [(s.name, s.tokens, s.documents, s.rows, s.share) for s in rows.describe()] == [
        ("x", 180, 20, 23, 0.5),
        ("y", 63, 7, 8, 0.3),
        ("z", 900, 100, 113, 0.2),
    ]
    assert rows.updates_per_epoch(10) == 15  # 23 + 8 + 113 = 144 samples


def test_one_long_document_does_not_fill_a_stretch(tmp_path: Path, make: Any) -> None:
    """A book 200 times as long as each of 100 short texts: its share of any 10 updates is near its share of tokens."""
    book = documents([8000], first=10000)
    short = documents([40] * 100)
    rows = make([Set(name="a", stream=Shards([shard(tmp_path / "b", short[:50] + book + short[50:])]))])
    for at in range(8):
        window = [batch.tokens for _ in range(10) for batch in rows.take(1)]
        share = torch.cat(window).ge(10000).float().mean().item()
        assert abs(share - 2 / 3) < 5 * (2 / 9 / 120) ** 0.5, at  # 120 rows drawn: 5 standard deviations


def test_a_sample_leads_back_to_its_text(make: Any, store: Shards) -> None:
    rows = make()
    made = documents([11] * 70)
    batch = rows.take(1)[0]
    for number, sample in enumerate(batch.samples):
        spans = rows.locate(sample)
        text = [token for span in spans for token in made[span.document][span.start : span.stop]]
        assert batch.tokens[number, : len(text)].tolist() == text


def test_a_failing_read_surfaces_at_its_take(make: Any, store: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    order = samples(make(), 4)
    bad = int(order[30].rsplit(":")[-1])  # in the third batch
    read = Shards.read

    def broken(self: Shards, position: int, length: int) -> tuple[Array, Array]:
        if position == bad * 8:
            raise OSError(5, "Input/output error")
        return read(self, position, length)

    monkeypatch.setattr(Shards, "read", broken)
    rows = make(workers=2, prefetch=3)
    assert samples(rows, 2) == order[:24]
    with pytest.raises(Failure, match=rf"sample a:0:{bad} could not be read.*Input/output error"):
        rows.take(1)
    assert rows.state() == {"samples": 24}
    monkeypatch.undo()
    assert samples(rows, 2) == order[24:48]


def test_a_read_that_stays_away_is_told_and_nothing_waits_for_it(
    make: Any, store: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, go, read = samples(make(), 4), threading.Event(), Shards.read
    away = int(order[30].rsplit(":")[-1])  # in the third batch

    def late(self: Shards, position: int, length: int) -> tuple[Array, Array]:
        if position == away * 8:
            go.wait(30)
        return read(self, position, length)

    monkeypatch.setattr(Shards, "read", late)
    monkeypatch.setattr(source, "STUCK_SECONDS", 0.3)
    rows = make()
    assert samples(rows, 2) == order[:24]
    with pytest.raises(Failure, match=r"the batch that begins with sample 24 was not there after 0.3 s"):
        rows.take(1)
    assert rows.state() == {"samples": 24}
    begun = time.monotonic()
    rows.close()
    assert time.monotonic() - begun < 5
    go.set()


def test_waiting_is_measured(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Shards.read

    def slow(self: Shards, position: int, length: int) -> tuple[Array, Array]:
        time.sleep(0.005)
        return read(self, position, length)

    monkeypatch.setattr(Shards, "read", slow)
    inline, ahead = make(workers=0), make(workers=2, prefetch=4)
    inline.take(1)
    assert inline.waited >= 12 * 0.005
    ahead.take(1)
    wait(ahead.ahead)  # a long step: what comes next is ready
    ahead.take(1)
    assert ahead.waited < 0.03


def test_threads_end(make: Any) -> None:
    before = threading.active_count()
    rows = make(workers=3, prefetch=4)
    rows.take(1)
    assert threading.active_count() > before
    rows.close()
    assert threading.active_count() == before


def test_memory_stays_flat(make: Any) -> None:
    """3,000 updates by two threads: memory at the end is that after 500, within 2 %."""
    rows = make(workers=2, global_batch_size=4)
    process = psutil.Process()
    for update in range(3000):
        rows.take(1)
        if update == 500:
            early = process.memory_info().rss
    assert process.memory_info().rss < early * 1.02


def test_senseless_cuts_are_refused(make: Any, store: Shards) -> None:
    with pytest.raises(InputError, match=r"global_batch_size is 12, which 5"):
        make(size=5)
    with pytest.raises(InputError, match="12 rows a rank cannot be cut into 5"):
        make().take(5)
    with pytest.raises(InputError, match="name of its own"):
        make([Set(name="a", stream=store), Set(name="a", stream=store)])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("packing", [True, False])
def test_validation_rows_come_once_in_order_on_all_ranks_together(store: Shards, size: int, packing: bool) -> None:
    ranks = [
        Held(
            [Set(name="v", stream=store)],
            sequence_length=8,
            batch_size=5,
            pad_id=999,
            packing=packing,
            rank=rank,
            size=size,
        )
        for rank in range(size)
    ]
    batches = [list(rank) for rank in ranks]
    assert {len(each) for each in batches} == {len(ranks[0])}
    line = [batch for round_ in zip(*batches, strict=True) for batch in round_]
    count = 97 if packing else 140  # 770 / 8; two pieces of each of 70 documents
    assert [(each.rows, each.pieces) for each in ranks[0].describe()] == [(count, 0 if packing else 70)]
    assert [s for batch in line for s in batch.samples if s] == [f"v:0:{row}" for row in range(count)]
    assert sum(int(batch.labels.ne(IGNORE).sum()) for batch in line) == 770 - 70
    tokens = torch.cat([batch.tokens for batch in line])
    assert np.array_equal(tokens[tokens != 999].numpy(), store.read(0, 770)[0])
    assert all(len(batch) == 5 for batch in line)


def test_settings_read_as_written() -> None:
    text = "train: [{path: a, weight: 0.3}, {path: b, weight: 1}]\nvalidation: [c]\nsequence_length: 64\n"
    settings = load(Corpus, text, file=Path("data.yaml"))
    assert settings.train == [Weighted(path="a", weight=0.3), Weighted(path="b", weight=1)]
    assert (settings.validation, settings.sequence_length, settings.packing) == (["c"], 64, True)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("train: [a, {path: b, weight: 1}]", "either every entry has a weight"),
        ("train: [{path: a, weight: 0}]", r"weight: must be a number above 0, not 0"),
        ("train: [a]\nvalidation: 1", r"line 2: validation: must be a number at least 0 and below 1 or a list"),
        ("train: [a]\nworkers: -1", r"line 2: workers"),
    ],
)
def test_senseless_settings_are_refused(line: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load(Corpus, line, file=Path("data.yaml"))


def test_a_ramp_cuts_the_same_line_of_samples_into_growing_batches(make: Any) -> None:
    flat, grown = make(workers=0), make(ramp=Ramp(from_=4, steps=4), workers=2, prefetch=3)
    halves = [make(ramp=Ramp(from_=4, steps=4), rank=rank, size=2) for rank in (0, 1)]
    line, sizes, seen, shared = [], [], [], []
    for _ in range(6):
        line += [s for batch in flat.take(1) for s in batch.samples]
        micros = grown.take(3)  # of 4 rows each
        sizes.append([len(batch) for batch in micros])
        seen += [s for batch in micros for s in batch.samples]
        shared += [s for half in halves for batch in half.take(2) for s in batch.samples]
    assert sizes == [[4], [4], [4, 4], [4, 4], [4, 4, 4], [4, 4, 4]]
    assert seen == shared == line[: len(seen)] and grown.state() == {"samples": 48}
    assert [len(batch) for batch in make(ramp=Ramp(from_=4, steps=4), rank=1, size=2).take(2)] == [2]
    again = make(ramp=Ramp(from_=4, steps=4), workers=2, prefetch=3)
    again.seek({"samples": 16})  # in the middle of the ramp
    assert [s for batch in again.take(3) for s in batch.samples] == line[16:24]


def test_a_ramp_goes_on_where_it_was_when_samples_are_passed_over(make: Any) -> None:
    rows = make(ramp=Ramp(from_=4, steps=4))
    for _ in range(3):  # 4, 4 and 8
        rows.take(1)
    rows.pass_over({"samples": 60})
    assert [sum(len(b) for b in rows.take(1)) for _ in range(2)] == [8, 12] and rows.state()["samples"] == 80


def test_a_ramp_makes_more_updates_of_an_epoch(make: Any) -> None:
    rows = make(ramp=Ramp(from_=4, steps=4), epochs=1)
    read = 0
    for _ in range(rows.updates):
        read += sum(bool(s) for batch in rows.take(1) for s in batch.samples)
    assert read == rows.rows and rows.updates > make(epochs=1).updates


def test_a_ramp_that_ranks_cannot_share_is_refused(make: Any) -> None:
    with pytest.raises(InputError, match=r"batch.ramp: 3 rows cannot be shared evenly by 2"):
        make(ramp=Ramp(from_=3, steps=4), size=2)


def test_what_is_passed_over_is_not_read_and_the_end_comes_as_much_later(make: Any) -> None:
    line = samples(make(epochs=3), 25)
    rows = make(epochs=1)  # 97 rows in 9 batches of 12, the last with 11 of padding
    assert samples(rows, 3) == line[:36]
    rows.pass_over({"samples": 60})
    assert rows.state() == {"samples": 60, "passed": 24} and rows.updates == 9
    assert samples(rows, 6) == [*line[60 : 97 + 24], *[""] * 11]  # as many updates as there would have been
    again = make(epochs=1)
    again.seek({"samples": 84, "passed": 24})
    assert samples(again, 4) == [*line[84 : 97 + 24], *[""] * 11]
    again.seek({"samples": 12})
    assert again.state() == {"samples": 12} and samples(again, 8) == [*line[12:97], *[""] * 11]
    endless = make()
    endless.pass_over({"samples": 24})
    assert samples(endless, 2) == line[24:48]
