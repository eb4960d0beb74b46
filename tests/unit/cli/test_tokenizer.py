"""danlu tokenizer train: what it writes, what it says, what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from danlu.cli.main import main
from danlu.data.tokenizer import load, train

LINES = ["The quick brown fox jumps over the lazy dog.", "话说宝玉听了，便走到黛玉房中来，笑道：“好妹妹。”"] * 40


def words(*files: Path, out: Path, size: int = 320) -> list[str]:
    return ["tokenizer", "train", *map(str, files), "--vocab-size", str(size), "--out", str(out)]


def test_it_learns_from_every_kind_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES), encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"body": line}) + "\n" for line in LINES)
    out = tmp_path / "learnt"
    command = [*words(tmp_path / "a.txt", tmp_path / "b.jsonl.gz", out=out), "--text", "body"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "320 tokens, learnt from 81 documents in 2 files." in said
    assert "Han" in said and "tokens a character" in said and "Latin" in said and "tokens a word" in said
    assert str(out) in said and "tokenizer_config.json" in said
    tokenizer = load(out)
    assert tokenizer.vocab_size == 320
    assert tokenizer.fingerprint == train(["\n".join(LINES), *LINES], vocab_size=320).fingerprint


def test_it_replaces_only_a_tokenizer_and_only_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "a.txt", tmp_path / "out"
    text.write_text("\n".join(LINES), encoding="utf-8")
    assert main(words(text, out=out)) == 0
    first = load(out).fingerprint
    capsys.readouterr()
    assert main(words(text, out=out, size=330)) == 2
    assert "say --force to replace it" in capsys.readouterr().err
    assert load(out).fingerprint == first
    assert main([*words(text, out=out, size=330), "--force"]) == 0
    assert load(out).vocab_size == 330
    (out / "thesis.txt").write_text("mine")
    assert main([*words(text, out=out), "--force"]) == 2
    assert "holds more than a tokenizer (thesis.txt)" in capsys.readouterr().err
    assert load(out).vocab_size == 330
    assert main(words(text, out=text)) == 2
    assert "is a file; name a folder" in capsys.readouterr().err
    assert main(words(text, out=text / "below")) == 2
    assert f"{text} is a file; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        (b'{"text": "good"}\n{"text": 3}\n', [], "line 2"),
        (b'{"other": "good"}\n', [], "no field 'text'"),
        (b'{"text": "good"}\n', ["--vocab-size", "100"], "258 are needed"),
        (b'{"text": "good"}\n', ["--max-bytes", "0"], "at least 1 is needed"),
        (b"", [], "no text to learn a tokenizer from"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(
    content: bytes, more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert main([*words(tmp_path / "a.jsonl", out=tmp_path / "out"), *more]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bad_records_are_left_out_and_counted_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two one two"}\n{"text": 3}\n{"text": "one two"}\n')
    assert main([*words(tmp_path / "a.jsonl", out=tmp_path / "out", size=260), "--on-bad", "skip"]) == 0
    said = capsys.readouterr().out
    assert "260 tokens, learnt from 2 documents" in said and "Bad records left out: 1." in said


def test_a_share_of_the_documents_is_drawn_the_same_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.dumps({"text": f"{line} {i}"}) for i, line in enumerate(LINES * 5)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), encoding="utf-8")
    limit = ["--max-bytes", str((tmp_path / "a.jsonl").stat().st_size // 4)]
    for out in ("one", "two"):
        assert main([*words(tmp_path / "a.jsonl", out=tmp_path / out), *limit]) == 0
        said = capsys.readouterr().out
        assert "one document in 4.0 is learnt from" in said
        number = int(said.split("learnt from ")[2].split(" ")[0])
        assert 60 < number < 140  # 100 of 400 are meant; four standard deviations are 35
    assert load(tmp_path / "one").fingerprint == load(tmp_path / "two").fingerprint
