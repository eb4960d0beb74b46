"""Raw files to shards: once, the same however many processes, keyed by content, every record accounted for."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.errors import Failure, InputError
from danlu.corpus import batches
from danlu.corpus import tokenise as room
from danlu.corpus.tokenise import tokenise
from danlu.data.tokenizer import load
from danlu.files.megatron import Index, Writer, verify
from danlu.files.sidecar import part
from tests.shared import shared
from tests.unit.corpus.encoder import Told


@pytest.fixture
def pool_always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes are started however little there is, and batches are small."""
    monkeypatch.setattr(room, "POOL_FROM", 0)
    monkeypatch.setattr(batches, "SIZE", 2000)
    monkeypatch.setattr(batches, "WHOLE", 5000)
    yield


def put(folder: Path, name: str, *texts: str) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts) if ".jsonl" in name else "".join(texts)
    (folder / name).write_bytes(gzip.compress(content.encode(), mtime=0) if name.endswith(".gz") else content.encode())
    return folder / name


def run(*paths: Path | str, cache: Path, said: list[str] | None = None, **how: object) -> list[list[list[int]]]:
    """The documents of each shard."""
    say = (said if said is not None else []).append
    shards = tokenise(paths, how.pop("tokenizer", Told()), cache=cache, announce=say, **how)  # type: ignore[arg-type]
    indices = [verify(prefix) for prefix in shards]
    return [[shard.document(number).tolist() for number in range(shard.count)] for shard in indices]


def ids(*texts: str) -> list[list[int]]:
    return [[*text.encode(), 256] for text in texts]


def test_raw_files_become_documents_in_order(tmp_path: Path) -> None:
    paths = [
        put(tmp_path, "b.txt", "one\r\n\r\ntwo\n"),
        put(tmp_path, "a.jsonl", "three", "", "明月"),
        put(tmp_path, "c.jsonl.gz", "four"),
    ]
    said: list[str] = []
    expected = [ids("one\n\ntwo\n"), ids("three", "明月"), ids("four")]
    assert run(*paths, cache=tmp_path / "cache", said=said) == expected
    assert said == [
        "tokenising 3 files: each document ends with one end token (id 256).",
        f"{paths[0]}: 1 documents, 10 tokens",
        f"{paths[1]}: 2 documents, 13 tokens, 1 empty ones left out",
        f"{paths[2]}: 1 documents, 5 tokens",
        "3 shards: 4 documents, 28 tokens (0 of them made before).",
    ]
    said.clear()
    assert run(*paths, cache=tmp_path / "cache", said=said) == expected
    assert said == ["3 shards: 4 documents, 28 tokens (3 of them made before)."]


def test_begin_and_end_are_the_tokenizers_document(tmp_path: Path) -> None:
    tokenizer = load(str(shared("tokenizers/llama_hf")))
    texts = ["Two days after.", " leading blank", "明月几时有", "</s> is text"]
    (found,) = run(put(tmp_path, "a.jsonl", *texts), cache=tmp_path / "cache", tokenizer=tokenizer)
    assert found == [tokenizer.document(text) for text in texts]
    assert all(one[0] == 1 and one[-1] == 2 and one.count(2) == 1 for one in found)  # that family's <s> and </s>


@pytest.mark.parametrize(("split", "texts"), [("line", ["a b", "c", "d"]), ("paragraph", ["a b\nc", "d"])])
def test_splits(tmp_path: Path, split: str, texts: list[str]) -> None:
    path = put(tmp_path, "a.txt", "a b\nc\n\nd")
    assert run(path, cache=tmp_path / "cache", split=split) == [ids(*texts)]
    assert run(path, cache=tmp_path / "cache") == [ids("a b\nc\n\nd")]  # another entry, not the same


def test_any_number_of_processes_gives_the_same_bytes(tmp_path: Path, pool_always: None) -> None:
    paths = [
        put(tmp_path, "a.jsonl", *(f"record {n} " * (n % 70) for n in range(400))),
        put(tmp_path, "long.txt", "words and lines\n" * 3000),
        put(tmp_path, "b.jsonl", "x"),
        put(tmp_path, "nothing.txt", "\n"),
        put(tmp_path, "c.jsonl", *("明" * 900 for _ in range(30))),
    ]
    files: dict[int, dict[str, bytes]] = {}
    for workers in (0, 1, 2, 3):
        cache = tmp_path / f"cache{workers}"
        found = run(*paths, cache=cache, workers=workers)
        assert found[1] == ids("words and lines\n" * 3000)
        files[workers] = {str(f.relative_to(cache)): f.read_bytes() for f in cache.rglob("*") if f.is_file()}
    assert files[0] == files[1] == files[2] == files[3] and len(files[0]) == 15


def test_an_edit_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    path = put(tmp_path, "a.txt", "the cat")
    facts = path.stat()
    assert run(path, cache=tmp_path / "cache") == [ids("the cat")]
    put(tmp_path, "a.txt", "the hat")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (facts.st_size, facts.st_mtime_ns)
    assert run(path, cache=tmp_path / "cache") == [ids("the hat")]


def test_what_determines_ids_makes_a_new_entry_and_a_name_does_not(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = put(tmp_path, "a.txt", "same")

    def count() -> int:
        return len(list(cache.iterdir()))

    run(path, cache=cache)
    run(put(tmp_path, "b.txt", "same"), cache=cache)
    assert count() == 1
    run(path, cache=cache, tokenizer=Told(fingerprint="other"))
    run(path, cache=cache, split="line")
    run(path, cache=cache, on_bad="skip")
    assert count() == 4
    put(tmp_path, "c.jsonl", "x")
    run(tmp_path / "c.jsonl", cache=cache)
    with pytest.raises(InputError, match="no field 'body'"):
        run(tmp_path / "c.jsonl", cache=cache, text="body")
    assert count() == 5


def test_the_same_content_twice_is_built_once_and_read_twice(tmp_path: Path) -> None:
    said: list[str] = []
    paths = [put(tmp_path, "a.txt", "same"), put(tmp_path, "b.txt", "same")]
    assert run(*paths, cache=tmp_path / "cache", said=said) == [ids("same")] * 2
    assert "tokenising 1 files" in said[0]
    assert run(paths[0], paths[0], cache=tmp_path / "cache", said=said) == [ids("same")]
    assert f"{paths[0]} is named twice; it is read once." in said


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.idx", "tokens.meta.json"])
@pytest.mark.parametrize("how", ["cut", "flip", "gone"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, name: str, how: str) -> None:
    path, cache = put(tmp_path, "a.jsonl", "one", "two"), tmp_path / "cache"
    run(path, cache=cache)
    (file,) = cache.glob(f"*/{name}")
    content = bytearray(file.read_bytes())
    file.unlink()
    if how == "cut":
        file.write_bytes(content[:-3])
    if how == "flip":
        content[0] ^= 4
        file.write_bytes(content)
    said: list[str] = []
    assert run(path, cache=cache, said=said) == [ids("one", "two")]
    assert said[0].startswith(f"the tokens kept of {path} are damaged (") and said[0].endswith("they are made again.")
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_record_stops_before_anything_is_made(tmp_path: Path, pool_always: None, workers: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "b"}\n{"text": "\xe6\x28"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, line 3, byte 38: not UTF-8 at e6 28.*data\.on_bad") as error:
        run(path, cache=tmp_path / "cache", workers=workers)
    assert error.value.code == 2
    assert list((tmp_path / "cache").iterdir()) == []


def test_skipping_counts_and_lists(tmp_path: Path) -> None:
    path = shared("dirty/broken/bad_lines.jsonl")
    for turn in range(2):  # also when it was made before
        said: list[str] = []
        (found,) = run(path, cache=tmp_path / "cache", on_bad="skip", said=said)
        (listed,) = (tmp_path / "cache").glob("*/rejects.jsonl")
        assert (
            said[-2]
            == f"{path}: 6 documents, {sum(map(len, found))} tokens, 14 bad records left out (listed in {listed})"
        )
        rejects = [json.loads(line) for line in listed.read_text().splitlines()]
        assert [one["line"] for one in rejects] == [2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 16, 18, 19, 20]
        assert rejects[0].keys() == {"file", "line", "byte", "reason"} and len(said) == 3 - turn
    sidecar = Index(listed.parent / "tokens").sidecar
    assert sidecar is not None
    (source,) = sidecar.sources
    assert {name: source[name] for name in ("records", "documents", "rejects", "empty")} == {
        "records": 20,
        "documents": 6,
        "rejects": 14,
        "empty": 0,
    }


def test_damaged_files_among_good_ones(tmp_path: Path) -> None:
    """By default the first damage stops; skipping, the numbers add up to what the data's manifest says."""
    names = ["truncated.jsonl.gz", "multi_member.jsonl.gz", "bad_crc.jsonl.gz", "garbage.parquet", "crlf.jsonl"]
    paths = [shared(f"dirty/broken/{name}") for name in names]
    with pytest.raises(InputError, match=r"truncated\.jsonl\.gz, line 139: the gzip data is cut short after 138 whole"):
        run(*paths, cache=tmp_path / "cache")
    said: list[str] = []
    found = run(*paths, cache=tmp_path / "cache", on_bad="skip", said=said)
    assert [len(one) for one in found] == [138, 20, 200, 20]
    assert any(line.startswith(f"warning: {paths[3]} holds no text and is left out, 1 bad records") for line in said)


def test_empty_files_among_good_ones(tmp_path: Path) -> None:
    paths = [
        put(tmp_path, "a.txt", "good"),
        put(tmp_path, "b.txt"),
        put(tmp_path, "c.jsonl"),
        put(tmp_path, "d.txt", "\n\n"),
    ]
    said: list[str] = []
    assert run(*paths, cache=tmp_path / "cache", said=said) == [ids("good")]
    assert [line for line in said if "warning" in line] == [
        f"warning: {path} holds no text and is left out" for path in paths[1:]
    ]
    with pytest.raises(InputError, match=r"there is no text to train on in .*b\.txt, .*c\.jsonl"):
        run(*paths[1:3], cache=tmp_path / "cache")


def test_a_wrong_field_is_told_with_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x", "id": 1}\n' * 3)
    told = r"a\.jsonl, line 1: the record has no field 'text'; its fields are 'content', 'id'"
    for on_bad in ("stop", "skip"):
        with pytest.raises(InputError, match=told):
            run(path, cache=tmp_path / "cache", on_bad=on_bad)


def test_an_id_outside_the_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="document 0 holds id 258, but the vocabulary has 258 ids"):
        run(put(tmp_path, "a.txt", "BIG"), cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_killed_process_is_told_and_nothing_is_kept(tmp_path: Path, pool_always: None) -> None:
    path = put(tmp_path, "a.jsonl", *(f"{n} " * 300 for n in range(40)), "KILL", *(f"{n} " * 300 for n in range(40)))
    with pytest.raises(Failure, match=r"tokenising process [12] of 2 .* killed by signal 9, SIGKILL .*memory.*workers"):
        run(path, cache=tmp_path / "cache", workers=2)
    assert list((tmp_path / "cache").iterdir()) == []


def test_killed_itself_it_leaves_nothing_that_is_taken(tmp_path: Path) -> None:
    path = put(tmp_path, "a.jsonl", *("WAIT" for _ in range(40)))
    code = (
        "import sys\nfrom pathlib import Path\nfrom danlu.corpus import batches\n"
        "from danlu.corpus.tokenise import tokenise\nfrom tests.unit.corpus.encoder import Told\n"
        "batches.RECORDS = 1\nprint('go', flush=True)\n"
        "tokenise([sys.argv[1]], Told(), cache=Path(sys.argv[2]), announce=print)\n"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "cache")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    assert process.stdout is not None and process.stdout.readline() == b"go\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -9
    process.stdout.close()
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.startswith(".building-")
    assert run(path, cache=tmp_path / "cache", tokenizer=Told(pause=0)) == [ids(*["WAIT"] * 40)]


def test_two_runs_at_once(tmp_path: Path) -> None:
    paths = [put(tmp_path, f"{n}.jsonl", *(f"{n} {k}" for k in range(200))) for n in range(4)]
    code = (
        "import sys\nfrom pathlib import Path\nfrom danlu.corpus.tokenise import tokenise\n"
        "from danlu.data.tokenizer import load\n"
        "print(*tokenise(sys.argv[2:], load('byte'), cache=Path(sys.argv[1]), announce=lambda word: None))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), *map(str, paths)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    (answer,) = answers
    for prefix, n in zip(answer.split(), range(4), strict=True):
        assert [verify(Path(prefix)).document(k).tolist() for k in range(200)] == ids(*(f"{n} {k}" for k in range(200)))
    assert len(list((tmp_path / "cache").iterdir())) == 4


def shard(prefix: Path, documents: list[list[int]], *, fingerprint: str = "bytes", vocab_size: int = 258) -> Path:
    with Writer(prefix, vocab_size=vocab_size, tokenizer=fingerprint, eos_id=256) as writer:
        for one in documents:
            writer.add(one)
    return prefix


def test_shards_are_passed_on(tmp_path: Path) -> None:
    prefix = shard(tmp_path / "s/x", ids("made before"))
    text = put(tmp_path, "a.txt", "raw")
    cache = tmp_path / "cache"
    for path in (prefix, part(prefix, ".bin"), part(prefix, ".idx"), tmp_path / "s"):
        assert run(path, text, cache=cache) == [ids("made before"), ids("raw")]
        assert tokenise([path], Told(), cache=cache, announce=print) == [prefix]
    with pytest.raises(InputError, match=r"x was made by another tokenizer \(fingerprint bytes, this run's is other"):
        run(prefix, cache=cache, tokenizer=Told(fingerprint="other"))


def test_foreign_shards_are_taken_with_a_word_after_a_look(tmp_path: Path) -> None:
    prefix = shard(tmp_path / "x", [[97, 98, 256], [99, 256]])
    part(prefix, ".meta.json").unlink()
    said: list[str] = []
    assert run(prefix, cache=tmp_path / "cache", said=said) == [[[97, 98, 256], [99, 256]]]
    assert "x has no sidecar, so which tokenizer made it is not known" in said[0] and len(said) == 2
    with pytest.raises(InputError, match=r"x\.bin: token 2 has id 256, but the vocabulary has 200 ids"):
        run(prefix, cache=tmp_path / "cache", said=said, tokenizer=Told(vocab_size=200))
    assert len(said) == 2, "that its ids fit is not said where they do not"
    run(prefix, cache=tmp_path / "cache", said=said, tokenizer=Told(eos_id=0))
    assert "do not end with this tokenizer's end token (id 0) but with id 256" in said[-2]


def test_the_real_foreign_shard(tmp_path: Path) -> None:
    """Its tokenizer was GPT-2's cut to 5,000 entries: the ids fit GPT-2's vocabulary, the end token does not."""
    prefix = shared("pretrain/megatron_indexed/owt_text_document.bin").with_suffix("")
    said: list[str] = []
    tokenizer = load(str(shared("tokenizers/gpt2")))
    found = tokenise([prefix.with_suffix(".idx")], tokenizer, cache=tmp_path / "cache", announce=said.append)
    assert found == [prefix] and said[-1] == "1 shards: 1,000 documents, 1,361,845 tokens (1 of them made before)."
    assert any("(id 50256) but with id 4999" in line for line in said)


def test_a_file_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, "a.txt", "before")
    real = room.raw.read

    def read(path: Path, **how: object) -> object:
        path.write_text("after")
        return real(path, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(room.raw, "read", read)
    with pytest.raises(InputError, match=r"a\.txt changed while it was read"):
        run(path, cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    ("name", "reason"), [("no.txt", "does not exist"), ("a.csv", "is of a kind"), ("empty", "holds no file")]
)
def test_paths_that_lead_nowhere(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(InputError, match=reason):
        run(put(tmp_path, "a.txt", "good"), tmp_path / name, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl"))
    path.write_text('{"text": "a"}\n{}\n')
    assert run(path, cache=tmp_path / "cache", on_bad="skip") == [ids("a")]
    (listed,) = (tmp_path / "cache").glob("*/rejects.jsonl")
    assert json.loads(listed.read_text())["file"] == str(path)


LINE = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="\0")).map(
        lambda text: json.dumps({"text": text}).encode()
    ),
    st.sampled_from([b'{"text": 1}', b'{"text": "\\u0000"}', b'{"text": "\xff"}', b"[", b"", b"  ", b'{"text": " "}']),
)


@settings(max_examples=30, deadline=None)
@given(st.lists(LINE, max_size=30), st.booleans())
def test_records_in_are_documents_rejects_and_empty_ones_out(
    tmp_path_factory: pytest.TempPathFactory, many: list[bytes], packed: bool
) -> None:
    folder = tmp_path_factory.mktemp("records")
    content = b"\n".join([b'{"text": "first"}', *many])
    path = folder / "a.jsonl"
    path.write_bytes(gzip.compress(content) if packed else content)
    (prefix,) = tokenise([path], Told(), cache=folder / "cache", on_bad="skip", announce=lambda word: None)
    found = verify(prefix)
    assert found.sidecar is not None
    (source,) = found.sidecar.sources
    assert source["records"] == 1 + sum(bool(line.strip()) for line in many)
    assert source["records"] == source["documents"] + source["rejects"] + source["empty"]
    assert source["documents"] == found.count == np.count_nonzero(found.tokens == 256)
