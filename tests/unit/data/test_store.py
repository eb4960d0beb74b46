from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from danlu.core.errors import Failure, InputError
from danlu.data.store import Shards, Span
from tests.shared import shared
from tests.unit.data.made import documents, shard

DOCUMENTS = [[5, 6, 0], [], [7, 0], [8, 9, 10, 11, 0], [], [0]]


def both(folder: Path) -> Shards:
    """Two shards of two types, empty documents in the middle and at the end."""
    return Shards([shard(folder / "a", DOCUMENTS[:4]), shard(folder / "b", DOCUMENTS[3:], dtype="i4")])


def test_any_stretch_reads_as_the_documents_written(tmp_path: Path) -> None:
    store = both(tmp_path)
    line = [token for each in DOCUMENTS[:4] + DOCUMENTS[3:] for token in each]
    begins = [0, 3, 5, 10, 15]  # counted by hand: 3 + 0 + 2 + 5 tokens, then 5 + 0 + 1
    assert (store.tokens, store.documents) == (16, 7)
    assert store.starts().tolist() == begins
    for position in range(17):
        for length in range(17 - position):
            ids, starts = store.read(position, length)
            assert ids.dtype == np.int64
            assert ids.tolist() == line[position : position + length]
            assert starts.tolist() == [at - position for at in begins if position <= at < position + length]


def test_empty_documents_at_the_end_start_nowhere(tmp_path: Path) -> None:
    store = Shards([shard(tmp_path / "a", [[3, 0], [], []])])
    assert store.starts().tolist() == [0]
    assert store.read(0, 2)[1].tolist() == [0]


def test_a_shard_of_nothing_is_passed_over(tmp_path: Path) -> None:
    store = Shards([shard(tmp_path / name, made) for name, made in (("a", [[3, 0]]), ("b", []), ("c", [[4, 0]]))])
    assert [found.tolist() for found in store.read(0, 4)] == [[3, 0, 4, 0], [0, 2]]
    assert (store.starts().tolist(), store.documents) == ([0, 2], 2)
    assert store.locate(1, 2) == [Span(tmp_path / "a", 0, 1, 2), Span(tmp_path / "c", 0, 0, 1)]


def test_a_run_of_empty_documents_longer_than_the_read_hides_none(tmp_path: Path) -> None:
    store = Shards([shard(tmp_path / "a", [[3, 0], *[[]] * 50, [4, 0], [5, 0]])])
    assert store.read(1, 4)[1].tolist() == [1, 3]


def test_positions_lead_back_to_documents(tmp_path: Path) -> None:
    store = both(tmp_path)
    a, b = tmp_path / "a", tmp_path / "b"
    assert store.locate(1, 12) == [Span(a, 0, 1, 3), Span(a, 2, 0, 2), Span(a, 3, 0, 5), Span(b, 0, 0, 3)]


def test_many_positions_at_once(tmp_path: Path) -> None:
    store = both(tmp_path)
    line = store.read(0, 16)[0]
    positions = np.array([[15, 0], [9, 10], [3, 3]])
    assert np.array_equal(store.sample(positions), line[positions])


def test_megatrons_own_shard_reads_unchanged() -> None:
    """Against the bytes of both files, read here by their offsets: 34 bytes of header, then 1,000 lengths (int32)."""
    prefix = shared("pretrain/megatron_indexed/owt_text_document.bin").with_suffix("")
    raw = np.fromfile(prefix.with_suffix(".bin"), "<u2")
    lengths = np.fromfile(prefix.with_suffix(".idx"), "<i4", count=1000, offset=34)
    store = Shards([prefix], vocab_size=50257)
    ids, starts = store.read(0, store.tokens)
    assert store.documents == 1000
    assert np.array_equal(ids, raw)
    assert np.array_equal(starts[1:], np.cumsum(lengths)[:-1])
    assert starts[0] == 0
    middle = len(raw) // 2
    assert np.array_equal(store.read(middle, 2048)[0], raw[middle : middle + 2048])


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    prefix = shard(tmp_path / "a", documents([9] * 5), tokenizer="one", vocab=100)
    Shards([prefix], tokenizer="one", vocab_size=100)
    with pytest.raises(InputError, match=r"a was made by another tokenizer .*one.*two.*data\.tokenizer"):
        Shards([prefix], tokenizer="two")


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_numbers(tmp_path: Path) -> None:
    prefix = shard(tmp_path / "a", documents([9] * 5), tokenizer="one", vocab=300)
    with pytest.raises(InputError, match=r"300 ids.*model\.vocab_size is 258"):
        Shards([prefix], tokenizer="one", vocab_size=258)


def test_an_id_beyond_the_vocabulary_is_refused_with_both_numbers(tmp_path: Path) -> None:
    prefix = shard(tmp_path / "a", [[1, 280, 0]] * 4)
    Shards([prefix], vocab_size=281)
    for size in (258, 280):
        with pytest.raises(InputError, match=rf"a\.bin holds id 280, but model\.vocab_size is {size}"):
            Shards([prefix], vocab_size=size)


def test_ids_above_32767_stay_positive(tmp_path: Path) -> None:
    store = Shards([shard(tmp_path / "a", [[40000, 65535, 0]])])
    assert store.read(0, 3)[0].tolist() == [40000, 65535, 0]


def test_a_file_cut_while_it_is_read_is_an_error_not_a_crash(tmp_path: Path) -> None:
    store = Shards([shard(tmp_path / "a", documents([100] * 100))])
    with open(tmp_path / "a.bin", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(Failure, match=r"a\.bin ends at byte 1000"):
        store.read(400, 200)


def test_outside_is_refused(tmp_path: Path) -> None:
    store = both(tmp_path)
    for position, length in ((-1, 2), (10, 7), (17, 0)):
        with pytest.raises(IndexError):
            store.read(position, length)
    with pytest.raises(InputError, match="no token shards"):
        Shards([])
    with pytest.raises(InputError, match="empty"):
        Shards([shard(tmp_path / "none", [[], []])])


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 128, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    """100 shards hold 500 files, where 128 more were allowed."""
    store = Shards([shard(tmp_path / str(number), [[number, 0]]) for number in range(100)])
    assert store.read(0, 200)[0][::2].tolist() == list(range(100))
    store.close()


def test_too_many_shards_are_refused_with_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 300))
    with pytest.raises(InputError, match=r"100 token shards need .* open files, but the system allows 300"):
        Shards([tmp_path / str(number) for number in range(100)])
