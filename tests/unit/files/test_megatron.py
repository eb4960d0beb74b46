"""Token shards: the bytes of the layout, what is refused, and that size does not matter."""

from __future__ import annotations

import errno
import json
import os
import pickle
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from danlu.core.errors import InputError, Unhealthy
from danlu.files import megatron
from danlu.files.megatron import Index, Writer, dtype_for, is_shard, verify
from danlu.files.sidecar import Sidecar, part, prefix_of
from tests.shared import shared

# Written by hand from the layout's table: magic, version 1, code 8 (u16), 4 sequences, 5 bounds; i32 lengths 3 1 0 2;
# i64 byte offsets 0 6 8 8; i64 documents 0 1 2 3 4.
GOLDEN_IDX = bytes.fromhex(
    "4d4d49444944580000" "0100000000000000" "08" "0400000000000000" "0500000000000000"
    "03000000" "01000000" "00000000" "02000000"
    "0000000000000000" "0600000000000000" "0800000000000000" "0800000000000000"
    "0000000000000000" "0100000000000000" "0200000000000000" "0300000000000000" "0400000000000000"
)  # fmt: skip
GOLDEN_BIN = bytes.fromhex("0100 0200 0300 2c01 0500 0600")


def write(prefix: Path, documents: list[list[int]], *, vocab_size: int = 1000) -> Path:
    with Writer(prefix, vocab_size=vocab_size, tokenizer="t", eos_id=0) as writer:
        for document in documents:
            writer.add(document)
    return prefix


def documents(shard: Index) -> list[list[int]]:
    return [shard.document(number).tolist() for number in range(shard.count)]


def foreign(prefix: Path, ids: np.ndarray, lengths: list[int], bounds: list[int], *, code: int) -> Path:
    """A shard written straight from the layout, as another tool would."""
    size = ids.dtype.itemsize
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) * size if lengths else []
    prefix.with_name(prefix.name + ".bin").write_bytes(ids.tobytes())
    prefix.with_name(prefix.name + ".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(bounds))
        + np.array(lengths, "<i4").tobytes()
        + np.array(starts, "<i8").tobytes()
        + np.array(bounds, "<i8").tobytes()
    )
    return prefix


def test_writer_gives_the_bytes_of_the_layout(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a.b", [[1, 2, 3], [300], [], [5, 6]])  # a dot in the prefix is no suffix
    assert (tmp_path / "a.b.idx").read_bytes() == GOLDEN_IDX
    assert len(GOLDEN_IDX) == 122
    assert (tmp_path / "a.b.bin").read_bytes() == GOLDEN_BIN
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx", "a.b.meta.json"]
    assert documents(Index(prefix)) == [[1, 2, 3], [300], [], [5, 6]]


def test_sidecar_tells_whose_ids_they_are(tmp_path: Path) -> None:
    with Writer(tmp_path / "a", vocab_size=70000, tokenizer="abc", eos_id=7, created_by="me") as writer:
        writer.add([69999, 7])
        writer.sources.append({"file": "x.txt", "documents": 1})
    facts = json.loads((tmp_path / "a.meta.json").read_text())
    assert facts.pop("xxh3_128").keys() == {"bin", "idx"}
    assert facts == {
        "format": "danlu-tokens/1",
        "tokenizer": "abc",
        "vocab_size": 70000,
        "eos_id": 7,
        "dtype": "int32",
        "n_tokens": 2,
        "n_documents": 1,
        "created_by": "me",
        "sources": [{"file": "x.txt", "documents": 1}],
    }


@pytest.mark.parametrize(("vocab_size", "name"), [(65499, "uint16"), (65500, "int32"), (65536, "int32"), (2, "uint16")])
def test_type_follows_the_vocabulary(vocab_size: int, name: str) -> None:
    assert dtype_for(vocab_size).name == name


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 69_999), max_size=9), max_size=12), st.sampled_from([65_499, 70_000]))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, many: list[list[int]], vocab: int) -> None:
    many = [[token % vocab for token in one] for one in many]
    prefix = write(tmp_path_factory.mktemp("shard") / "s", many, vocab_size=vocab)
    shard = verify(prefix)
    assert documents(shard) == many
    flat = [token for one in many for token in one]
    assert shard.read(0, len(flat)).tolist() == flat
    owners = [number for number, one in enumerate(many) for _ in one]
    assert [shard.find(position) for position in range(len(flat))] == owners
    begins = [sum(map(len, many[:number])) for number in range(len(many) + 1)]
    assert shard.starts(0, shard.count).tolist() == begins == [shard.start(n) for n in range(shard.count + 1)]


def test_documents_may_come_in_pieces_and_in_lines(tmp_path: Path) -> None:
    with Writer(tmp_path / "a", vocab_size=100, tokenizer="t", eos_id=0) as writer:
        writer.add_many(np.array([1, 2, 3, 4]), np.array([1, 3]))
        writer.add_many(np.array([5]), np.array([], np.int64))
        writer.add_many(np.array([6, 7]), np.array([1, 1, 2]))
    assert documents(verify(tmp_path / "a")) == [[1], [2, 3], [4, 5, 6], [], [7]]


def test_more_than_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [[number % 900] * (number % 5) for number in range(50)]
    whole = write(tmp_path / "whole", many)
    monkeypatch.setattr(megatron, "CHUNK", 7)
    assert documents(verify(write(tmp_path / "cut", many))) == many
    for ending in (".bin", ".idx"):
        assert part(tmp_path / "cut", ending).read_bytes() == part(whole, ending).read_bytes()


@pytest.mark.parametrize(
    ("ids", "named"), [([5, 70000], "70000"), ([-1], "-1"), ([999, 1000], "1000"), ([2**40], "10995")]
)
def test_ids_outside_the_vocabulary_are_refused_before_the_cast(tmp_path: Path, ids: list[int], named: str) -> None:
    with pytest.raises(InputError, match=f"document 1 holds id {named}.* 1000 ids"):
        write(tmp_path / "a", [[1], ids])
    assert list(tmp_path.iterdir()) == []  # nothing half done, under any name


def test_only_whole_numbers(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="float64"):
        write(tmp_path / "a", [[1.5]])  # type: ignore[list-item]


def test_a_writer_that_fails_leaves_the_old_shard(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    with (
        pytest.raises(KeyboardInterrupt),
        Writer(tmp_path / "a", vocab_size=9, tokenizer="t", eos_id=0) as writer,
    ):
        writer.add([2])
        raise KeyboardInterrupt
    assert documents(verify(tmp_path / "a")) == [[1]]
    assert len(list(tmp_path.iterdir())) == 3
    assert documents(verify(write(tmp_path / "a", [[3], [4]]))) == [[3], [4]]


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unhealthy, match=r"disk is full.*a\.bin"):
        write(tmp_path / "a", [[1]])
    assert list(tmp_path.iterdir()) == []


def test_a_shard_is_on_the_disk_unless_it_is_small_and_so_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), real(handle)))
    for sync_from, documents, expected in ((0, 1, 5), (1000, 1, 0), (1000, 46, 5)):  # 22 bytes a document of one token
        synced.clear()
        with Writer(tmp_path / "a", vocab_size=9, tokenizer="t", eos_id=0, sync_from=sync_from) as writer:
            for _ in range(documents):
                writer.add([1])
        assert len(synced) == expected  # three files, and the folder after the sidecar and at the end
        verify(tmp_path / "a")


def test_index_is_published_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every rename and removal, either no .idx is there or the three files belong together."""
    write(tmp_path / "a", [[1]])
    seen = []

    def look(*_: object) -> None:
        seen.append(documents(verify(tmp_path / "a")) if is_shard(tmp_path / "a") else None)

    for name in ("replace", "unlink"):
        real = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda *a, real=real, **k: (look(), real(*a, **k), look())[1])
    write(tmp_path / "a", [[2], [3]])
    assert seen[0] == [[1]] and seen[-1] == [[2], [3]] and None in seen


def test_megatrons_own_form_of_empty_documents(tmp_path: Path) -> None:
    ids = np.arange(1, 6, dtype="<i4")
    shard = verify(foreign(tmp_path / "f", ids, [3, 2], [0, 0, 1, 1, 2, 2], code=4))
    assert documents(shard) == [[], [1, 2, 3], [], [4, 5], []]
    assert [shard.find(position) for position in range(5)] == [1, 1, 1, 3, 3]
    assert shard.starts(0, 5).tolist() == [0, 0, 3, 3, 5, 5]


def test_a_document_of_several_sequences(tmp_path: Path) -> None:
    shard = verify(foreign(tmp_path / "f", np.arange(6, dtype="u1"), [1, 2, 3], [0, 2, 3], code=1))
    assert documents(shard) == [[0, 1, 2], [3, 4, 5]]


def test_empty_shard(tmp_path: Path) -> None:
    shard = verify(write(tmp_path / "a", []))
    assert (shard.count, len(shard.tokens), shard.starts(0, 0).tolist()) == (0, 0, [0])
    with pytest.raises(IndexError):
        shard.find(0)


def change(file: Path, offset: int, content: bytes) -> None:
    held = bytearray(file.read_bytes())
    held[offset : offset + len(content)] = content
    file.write_bytes(held)


@pytest.mark.parametrize(
    ("offset", "content", "reason"),
    [
        (0, b"X", "not a Megatron index"),
        (9, b"\x02", "version 2"),
        (17, b"\x07", "type code 7"),
        (17, b"\x63", "type code 99"),
        (18, b"\x05", "cut short"),
        (18, b"\xff" * 8, "damaged"),
        (26, b"\x00", "damaged"),
        (26, b"\x06", "cut short"),
        (46, b"\x09", "bytes, but x.idx tells of"),
        (50, b"\x02", "do not agree"),
        (82, b"\x01", "do not agree"),
        (114, b"\x03", "do not agree"),
        (17, b"\x01", "bytes, but x.idx tells of"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, offset: int, content: bytes, reason: str) -> None:
    write(tmp_path / "x", [[1, 2, 3], [300], [], [5, 6]])
    change(tmp_path / "x.idx", offset, content)
    with pytest.raises(InputError, match=reason) as told:
        Index(tmp_path / "x")
    assert str(tmp_path / "x.") in str(told.value)


@pytest.mark.parametrize("length", [0, 8, 33, 34, 60, 121, 123, 126])
def test_an_index_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    write(tmp_path / "x", [[1, 2, 3], [300], [], [5, 6]])
    (tmp_path / "x.idx").write_bytes((GOLDEN_IDX + b"\0" * 9)[:length])
    with pytest.raises(InputError, match=r"x\.idx"):
        Index(tmp_path / "x")


@pytest.mark.parametrize("length", [0, 11, 13, 14])
def test_a_bin_of_another_length_is_refused(tmp_path: Path, length: int) -> None:
    write(tmp_path / "x", [[1, 2, 3], [300], [], [5, 6]])
    (tmp_path / "x.bin").write_bytes((GOLDEN_BIN + b"\0\0")[:length])
    with pytest.raises(InputError, match=rf"x\.bin is {length} bytes.*tells of 12"):
        Index(tmp_path / "x")


def test_missing_half(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1]])
    (tmp_path / "x.bin").unlink()
    with pytest.raises(InputError, match=r"x\.bin does not exist"):
        Index(tmp_path / "x")


def test_flipped_bits_are_found(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2, 3], [300], [], [5, 6]])
    for name in ("x.bin", "x.idx"):
        good = (tmp_path / name).read_bytes()
        for bit in range(0, 8 * len(good), 1 if name == "x.bin" else 5):
            change(tmp_path / name, bit // 8, bytes([good[bit // 8] ^ 1 << bit % 8]))
            with pytest.raises(InputError):
                verify(tmp_path / "x")
            (tmp_path / name).write_bytes(good)
    verify(tmp_path / "x")


def test_a_sidecar_of_another_shard_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", [[1, 2, 3]])
    write(tmp_path / "y", [[1, 2], [3, 4]])
    (tmp_path / "y.meta.json").replace(tmp_path / "x.meta.json")
    with pytest.raises(InputError, match="do not belong together"):
        Index(tmp_path / "x")


@pytest.mark.parametrize(
    ("content", "reason"), [("", "damaged"), ("{}", "damaged"), ('{"format": "x/9"}', "format 'x/9'")]
)
def test_a_damaged_sidecar_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    write(tmp_path / "x", [[1, 2, 3]])
    (tmp_path / "x.meta.json").write_text(content)
    with pytest.raises(InputError, match=reason):
        Index(tmp_path / "x")


def test_ids_of_a_foreign_shard_are_held_against_the_vocabulary(tmp_path: Path) -> None:
    foreign(tmp_path / "f", np.array([1, 2, 900, 3], "<u2"), [2, 2], [0, 1, 2], code=8)
    verify(tmp_path / "f", vocab_size=901)
    with pytest.raises(InputError, match=r"token 2 has id 900.* 900 ids"):
        verify(tmp_path / "f", vocab_size=900)
    foreign(tmp_path / "g", np.array([1, -2], "<i4"), [2], [0, 1], code=4)
    with pytest.raises(InputError, match="id -2"):
        verify(tmp_path / "g")


@pytest.mark.parametrize(
    ("lengths", "bounds", "reason"),
    [([2, 3], [0, 2, 1, 2], "document 2 starts before"), ([-1, 6], [0, 1, 2], "sequence 0|bytes")],
)
def test_a_damaged_middle_is_found(tmp_path: Path, lengths: list[int], bounds: list[int], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        verify(foreign(tmp_path / "f", np.arange(5, dtype="<u2"), lengths, bounds, code=8))


def test_multimodal_is_refused(tmp_path: Path) -> None:
    foreign(tmp_path / "f", np.arange(4, dtype="<u2"), [2, 2], [0, 1, 2], code=8)
    with open(tmp_path / "f.idx", "ab") as file:
        file.write(b"\0\1")
    with pytest.raises(InputError, match="multimodal"):
        Index(tmp_path / "f")


def test_real_shard_of_another_tool() -> None:
    """1,000 documents of web text, written by Megatron with GPT-2's vocabulary."""
    prefix = shared("pretrain/megatron_indexed/owt_text_document.idx").with_suffix("")
    shard = verify(prefix, vocab_size=50257)
    assert shard.sidecar is None and shard.count == 1000 and shard.dtype == np.uint16
    assert len(shard.tokens) == part(prefix, ".bin").stat().st_size // 2 == 1_361_845
    # Its tokenizer was GPT-2's cut to 5,000 entries, so that the end of a document is the last of them.
    assert all(shard.document(number)[-1] == 4999 == shard.tokens.max() for number in range(1000))
    folder = shared("tokenizers/gpt2/vocab.json").parent
    tokenizer = Tokenizer(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.decoder = decoders.ByteLevel()
    text = tokenizer.decode(shard.document(0)[:-1].tolist())
    assert text.startswith("A magazine supplement with an image of Adolf Hitler and the title 'The Unreadable Book' is")


def test_opening_costs_the_same_however_large(tmp_path: Path) -> None:
    """Two billion tokens in ten million documents, in files with holes: only their ends are read."""
    sequences, tokens = 10_000_000, 2_000_000_000
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(2 * tokens)
    with open(tmp_path / "x.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, sequences, sequences + 1))
        file.seek(34 + 12 * sequences - 8)
        file.write(struct.pack("<q", 2 * tokens))
        file.seek(34 + 20 * sequences)
        file.write(struct.pack("<q", sequences))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        shard = Index(tmp_path / "x")
        assert shard.count == sequences and len(shard.tokens) == tokens
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.1


def test_pickled_it_opens_again(tmp_path: Path) -> None:
    shard = pickle.loads(pickle.dumps(Index(write(tmp_path / "x", [[1, 2], [3]]))))
    assert documents(shard) == [[1, 2], [3]]


def test_prefixes(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x.v1", [[1]])
    assert prefix_of(Path("a/x.v1.bin")) == prefix_of(Path("a/x.v1.idx")) == prefix_of(Path("a/x.v1")) == Path("a/x.v1")
    assert all(is_shard(Path(f"{prefix}{ending}")) for ending in ("", ".bin", ".idx"))
    assert not is_shard(tmp_path) and not is_shard(tmp_path / "x")
    assert documents(Index(tmp_path / "x.v1.bin")) == [[1]]
    assert Sidecar.read(tmp_path / "nothing") is None
