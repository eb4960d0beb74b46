"""Bad samples among good ones: counted, listed with line and reason; the good ones are unchanged and in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.files.megatron import Index
from tests.fault import runs

FLOOD = 200 << 20  # bytes of one line
BAD: dict[str, tuple[bytes, str]] = {
    "bytes that are not UTF-8": (b'{"text": "abc\xe6\x28"}', "not UTF-8 at e6 28"),
    "a NUL": (b'{"text": "a\\u0000b"}', "NUL"),
    "half a surrogate pair": (b'{"text": "a\\ud800b"}', "surrogate"),
    "too deep": (b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
    "not JSON": (b'{"text": "a"', "not JSON"),
    "a number of 10,000 digits": (b'{"text": "a", "x": ' + b"9" * 10_000 + b"}", "digits"),
    "NaN for a text": (b'{"text": NaN}', "is a number, not a string"),
    "a list": (b'["text"]', "the record is a list, not an object"),
    "no such field": (b'{"content": "a"}', "no field 'text'"),
}
EMPTY = b'{"text": "  "}'
TWICE = b'{"text": "first", "text": "last wins"}'


def good(number: int) -> str:
    return f"good {number}: 红楼梦 " + "abc " * (number % 7)


def mixed(path: Path, *, flood: int = 0) -> list[str]:
    """The texts that count, in order; between them lie bad ones, an empty one, and one with a key twice."""
    texts, lines = [], []
    for number, (line, _) in enumerate([*BAD.values(), (EMPTY, ""), (TWICE, "")]):
        texts.append(good(number))
        lines += [json.dumps({"text": texts[-1]}).encode(), line]
        if line == TWICE:
            texts.append("last wins")
    with open(path, "wb") as file:
        file.write(b"\n".join(lines) + b"\n")
        if flood:
            file.write(b'{"text": "')
            for _ in range(flood >> 20):
                file.write(b"a" * (1 << 20))
            file.write(b'"}\n')
        file.write(json.dumps({"text": good(99)}).encode() + b"\n")
    return [*texts, good(99)]


def read(cache: Path) -> tuple[list[str], list[dict[str, object]]]:
    """The documents of the only shard, and the list of what was left out."""
    [shard] = cache.glob("*/tokens.bin")
    index = Index(shard.with_suffix(""))
    texts = [bytes(int(token) for token in index.document(n)[:-1]).decode() for n in range(index.count)]
    return texts, [json.loads(line) for line in (shard.parent / "rejects.jsonl").read_text().splitlines()]


def test_a_run_leaves_them_out_counted_and_listed(tmp_path: Path) -> None:
    recipe, path = runs.write_recipe(tmp_path, steps=3), tmp_path / "mixed.jsonl"
    texts = mixed(path)
    where = (f"data.train=[{path}]", "data.on_bad=skip", "data.validation=0", "batch.global_batch_size=2")
    assert runs.finish(recipe, *where, "checkpoint.keep_best=0") == 0, runs.said(recipe)
    made, rejects = read(tmp_path / "runs" / ".cache")
    assert made == texts
    assert [reject["line"] for reject in rejects] == [2 * n + 2 for n in range(len(BAD))]
    for reject, (_, reason) in zip(rejects, BAD.values(), strict=True):
        assert reason in str(reject["reason"]), reject
    assert f"{len(texts)} documents" in runs.said(recipe)
    assert f"1 empty ones left out, {len(BAD)} bad records left out" in runs.said(recipe)


@pytest.mark.parametrize("name", BAD)
def test_a_run_that_is_not_told_to_skip_stops_at_the_first_with_its_line(tmp_path: Path, name: str) -> None:
    from danlu.core.errors import InputError
    from danlu.corpus.tokenise import tokenise
    from danlu.data.tokenizer import load

    line, reason = BAD[name]
    path = tmp_path / "one.jsonl"
    path.write_bytes(json.dumps({"text": good(1)}).encode() + b"\n" + line + b"\n")
    with pytest.raises(InputError, match="line 2") as caught:
        tokenise([path], load("byte"), cache=tmp_path / "cache", announce=lambda text: None)
    assert reason in str(caught.value) and "data.on_bad to skip" in str(caught.value)
    assert not list((tmp_path / "cache").glob("*/tokens.bin"))


FLOODED = """
import resource, sys
from pathlib import Path
from danlu.corpus.tokenise import tokenise
from danlu.data.tokenizer import load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenise([Path(sys.argv[1])], load("byte"), cache=Path(sys.argv[2]), on_bad="skip", announce=print)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_one_line_of_200_megabytes_takes_no_more_memory_than_the_limit_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    texts = mixed(path, flood=FLOOD)
    words = [sys.executable, "-c", FLOODED, str(path), str(tmp_path / "cache")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made, rejects = read(tmp_path / "cache")
    assert made == texts
    assert "longer than 67,108,864 bytes" in str(rejects[-1]["reason"]) and len(rejects) == len(BAD) + 1
    assert int(done.stdout.split()[-1]) < 200 << 10  # kilobytes; the limit is 64 MB, of which there may be a copy
