from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.batch import IGNORE
from danlu.core.errors import Failure, InputError
from danlu.data.pack import Cut, Row, stack
from danlu.data.split import split
from danlu.data.store import Shards
from tests.unit.data.made import documents, shard

PAD = 999


def rows(cut: Cut) -> np.ndarray:
    """[rows, 4, S]: every row of a cut."""
    made = np.zeros((cut.rows, 4, cut.length), np.int64)
    for row in range(cut.rows):
        cut.fill(row, made[row], pad_id=PAD)
    return made


def test_packed_rows_by_hand(tmp_path: Path) -> None:
    """Documents A = 1 2 0, B = 3 4 5 6 0 and C = 7 0, in rows of four; written out by hand."""
    cut = Cut(Shards([shard(tmp_path / "a", documents([3, 5, 2]))]), length=4, packing=True)
    x, p = IGNORE, PAD
    assert rows(cut).tolist() == [
        [[1, 2, 0, 3], [2, 0, x, 4], [0, 1, 2, 0], [0, 0, 0, 1]],
        [[4, 5, 6, 0], [5, 6, 0, x], [0, 1, 2, 3], [0, 0, 0, 0]],
        [[7, 0, p, p], [0, x, x, x], [0, 1, 0, 1], [0, 0, 1, 1]],
    ]


def test_rows_of_one_document_by_hand(tmp_path: Path) -> None:
    cut = Cut(Shards([shard(tmp_path / "a", documents([3, 5, 2]))]), length=4, packing=False)
    x, p = IGNORE, PAD
    assert (cut.rows, cut.pieces) == (4, 1)
    assert rows(cut).tolist() == [
        [[1, 2, 0, p], [2, 0, x, x], [0, 1, 2, 0], [0, 0, 0, 1]],
        [[3, 4, 5, 6], [4, 5, 6, 0], [0, 1, 2, 3], [0, 0, 0, 0]],
        [[0, p, p, p], [x, x, x, x], [0, 0, 1, 2], [0, 1, 1, 1]],
        [[7, 0, p, p], [0, x, x, x], [0, 1, 0, 1], [0, 0, 1, 1]],
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    length=st.integers(1, 50),
    packing=st.booleans(),
    share=st.sampled_from([0.0, 0.3]),
)
def test_each_token_is_read_once_and_asked_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, packing: bool, share: float
) -> None:
    """The closed formula: labels = tokens - documents; and the labels, in stream order, are all tokens but firsts."""
    folder = tmp_path_factory.mktemp("shard")
    store = Shards([shard(folder / "a", documents(lengths))])
    if max(lengths) < 4 or len(set(lengths)) < 2:
        share = 0
    for stream in filter(None, split(store, share)):
        ids, starts = stream.read(0, stream.tokens)
        made = rows(Cut(stream, length=length, packing=packing))
        tokens, labels, positions, inside = made.transpose(1, 0, 2)
        real = tokens != PAD
        assert np.array_equal(tokens[real], ids)
        asked = labels != IGNORE
        assert asked.sum() == stream.tokens - len(starts)
        assert not asked[~real].any()
        assert np.array_equal(labels[asked], np.delete(ids, starts))
        # A position goes on by one within a document of the row, and is 0 wherever a new one begins.
        new = np.diff(inside, axis=1, prepend=-1) == 1
        assert np.array_equal(new, positions == 0)
        assert ((np.diff(positions, axis=1) == 1) | new[:, 1:]).all()


def test_the_end_of_one_document_does_not_ask_for_the_next(tmp_path: Path) -> None:
    """The label at a seam is IGNORE, whatever A's last token is; B's labels do not move with it."""
    a, b = [1, 2, 3], [4, 5, 6]
    found = []
    for last in (0, 77):
        store = Shards([shard(tmp_path / f"a{last}", [[*a, last], [*b, 0]])])
        found.append(rows(Cut(store, length=8, packing=True))[0, 1])
    assert found[0].tolist() == [2, 3, 0, IGNORE, 5, 6, 0, IGNORE]
    assert found[1][3:].tolist() == found[0][3:].tolist()


def test_a_stack_of_rows(tmp_path: Path) -> None:
    cut = Cut(Shards([shard(tmp_path / "a", documents([3, 5, 2]))]), length=4, packing=True)
    batch = stack([Row(cut, 1, "a:0:1"), None, Row(cut, 2, "a:0:2")], length=4, pad_id=PAD)
    assert batch.samples == ("a:0:1", "", "a:0:2")
    assert batch.tokens.tolist() == [[4, 5, 6, 0], [PAD] * 4, [7, 0, PAD, PAD]]
    assert batch.labels[1].tolist() == [IGNORE] * 4
    assert batch.tokens.dtype == torch.int64
    assert not batch.packed  # padding is no second document: nothing before it can see it
    assert stack([Row(cut, 0, "a:0:0")], length=4, pad_id=PAD).packed


def test_ids_beyond_the_vocabulary_name_the_sample(tmp_path: Path) -> None:
    cut = Cut(Shards([shard(tmp_path / "a", documents([30]))]), length=8, packing=True)
    with pytest.raises(InputError, match=r"a:0:2 holds id 24, but model\.vocab_size is 24"):
        stack([Row(cut, 2, "a:0:2")], length=8, pad_id=0, vocab_size=24)
    assert len(stack([Row(cut, 2, "a:0:2")], length=8, pad_id=0, vocab_size=25)) == 1


def test_what_cannot_be_read_names_the_sample(tmp_path: Path) -> None:
    cut = Cut(Shards([shard(tmp_path / "a", documents([30]))]), length=8, packing=True)
    with pytest.raises(Failure, match=r"sample a:0:9 could not be read"):
        stack([Row(cut, 9, "a:0:9")], length=8, pad_id=0)
