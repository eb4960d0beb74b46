from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from danlu.core.errors import InputError
from danlu.data.split import split
from danlu.data.store import Shards, Stream
from tests.unit.data.made import documents, shard


def texts(stream: Stream) -> list[tuple[int, ...]]:
    """Its documents, cut where documents start."""
    ids, starts = stream.read(0, stream.tokens)
    return [tuple(piece.tolist()) for piece in np.split(ids, starts)[1:]]


def some(count: int) -> list[list[int]]:
    lengths = np.random.default_rng(3).integers(2, 90, count)
    return documents(lengths.tolist())


def test_documents_go_whole_to_one_side(tmp_path: Path) -> None:
    made = some(400)
    train, held = split(Shards([shard(tmp_path / "a", made)]), 0.1)
    assert held is not None
    assert sorted(texts(train) + texts(held)) == sorted(map(tuple, made))
    assert (train.documents, held.documents) == (len(texts(train)), len(texts(held)))
    assert 15 <= held.documents <= 70  # 40 expected, standard deviation 6


def test_a_side_does_not_depend_on_place_order_or_sharding(tmp_path: Path) -> None:
    made = some(300)
    (tmp_path / "else").mkdir()
    one = split(Shards([shard(tmp_path / "a", made)]), 0.2)[1]
    back = made[::-1]
    two = Shards([shard(tmp_path / "else" / "x", back[:100]), shard(tmp_path / "else" / "y", back[100:], dtype="i4")])
    other = split(two, 0.2)[1]
    assert one is not None and other is not None
    assert sorted(texts(one)) == sorted(texts(other))


def test_a_larger_share_holds_out_the_same_documents_and_more(tmp_path: Path) -> None:
    store = Shards([shard(tmp_path / "a", some(300))])
    less, more = split(store, 0.1)[1], split(store, 0.3)[1]
    assert less is not None and more is not None
    assert set(texts(less)) < set(texts(more))


def test_copies_are_never_on_both_sides(tmp_path: Path) -> None:
    made = some(100)
    train, held = split(Shards([shard(tmp_path / "a", made + made)]), 0.3)
    assert held is not None
    assert not set(texts(train)) & set(texts(held))


def test_below_twenty_documents_the_tail_of_each_is_held_out(tmp_path: Path) -> None:
    made = documents([100] * 19)
    train, held = split(Shards([shard(tmp_path / "a", made)]), 0.05)
    assert held is not None
    assert texts(train) == [tuple(each[:95]) for each in made]
    assert texts(held) == [tuple(each[95:]) for each in made]


def test_from_twenty_on_at_least_one_document_is_held_out_and_one_kept(tmp_path: Path) -> None:
    store = Shards([shard(tmp_path / "a", some(20))])
    for share, expected in ((1e-12, 1), (1 - 1e-12, 19)):
        train, held = split(store, share)
        assert held is not None
        assert (train.documents, held.documents) == (20 - expected, expected)


def test_documents_too_short_to_cut_stay_in_training(tmp_path: Path) -> None:
    train, held = split(Shards([shard(tmp_path / "a", [[1, 2, 0], [3, 4, 5, 6, 7, 0]])]), 0.01)
    assert held is not None
    assert texts(train) == [(1, 2, 0), (3, 4, 5, 6)]
    assert texts(held) == [(7, 0)]
    with pytest.raises(InputError, match=r"data\.validation to 0"):
        split(Shards([shard(tmp_path / "b", [[1, 0]])]), 0.5)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_any_stretch_of_a_part_reads_the_same(tmp_path: Path, share: float) -> None:
    """Read in pieces of every size against read at once; starts() against what read() finds."""
    store = Shards([shard(tmp_path / "a", some(25)), shard(tmp_path / "b", some(40)[25:])])
    for part in split(store, share):
        assert part is not None
        ids, starts = part.read(0, part.tokens)
        assert np.array_equal(part.starts(), starts)
        for length in (1, 7, 64, 300):
            for position in range(0, part.tokens - length, 5):
                found, begins = part.read(position, length)
                assert np.array_equal(found, ids[position : position + length])
                assert np.array_equal(begins, starts[(starts >= position) & (starts < position + length)] - position)


def test_a_part_leads_back_to_the_shard(tmp_path: Path) -> None:
    made = some(60)
    train, held = split(Shards([shard(tmp_path / "a", made)]), 0.2)
    assert held is not None
    for part in (train, held):
        ids = part.read(10, 80)[0].tolist()
        spans = part.locate(10, 80)
        assert [token for span in spans for token in made[span.document][span.start : span.stop]] == ids


def test_no_share_holds_nothing_out(tmp_path: Path) -> None:
    store = Shards([shard(tmp_path / "a", some(30))])
    assert split(store, 0) == (store, None)
    with pytest.raises(InputError, match=r"\[0, 1\)"):
        split(store, 1.0)
    with pytest.raises(InputError, match="are the same"):
        split(Shards([shard(tmp_path / "b", [[1, 2, 0]] * 30)]), 0.5)
