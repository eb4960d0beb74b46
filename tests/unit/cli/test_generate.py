"""`danlu generate` from a folder of a run: what is written where, and what is refused with which sentence."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from danlu.cli.main import main
from danlu.data import tokenizer as tokenizers
from danlu.models import weights
from danlu.models.families import Llama
from danlu.models.start import fill


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, with a model over bytes that was never trained."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "recipe.yaml").write_text("name: run\n")
    family = Llama(
        vocab_size=258,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    model = family.build()
    fill(model, 1)
    tokenizer = tokenizers.load("byte")
    control = {"eos_token_id": 256, "pad_token_id": 257}
    weights.save(folder / "model", family, model.named_parameters(), dtype=torch.float32, control=control)
    tokenizer.save(folder / "model")
    return folder


def output(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["generate", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_text_and_what_follows(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = output(capsys, run, "--prompt", "丹炉", "--max-new-tokens", 12, "--seed", 4)
    assert code == 0
    assert out.startswith("丹炉")
    assert len(out) > len("丹炉\n")
    assert " tokens in " in err
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("丹炉", encoding="utf-8")
    same = ["--prompt-file", prompt, "--max-new-tokens", 12, "--seed", 4, "--no-cache"]
    assert output(capsys, run / "model", *same)[:2] == (0, out)
    assert output(capsys, run, "--prompt", "丹炉", "--max-new-tokens", 12, "--seed", 5)[1] != out


def test_the_prompt_may_come_from_standard_input(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("火".encode())))
    code, out, _ = output(capsys, run, "--prompt-file", "-", "--max-new-tokens", 3, "--temperature", 0)
    assert code == 0
    assert out.startswith("火")


def test_more_than_the_model_reads_is_cut_and_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, run, "--prompt", "a" * 60, "--max-new-tokens", 9)
    assert code == 0
    assert "Adding at most 4 tokens: the model reads 64, the prompt takes 60." in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "a" * 64], "The prompt is 64 tokens long, but the model reads 64"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "a", "--top-p", "0"], "top_p must be above 0 and at most 1, not 0.0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--prompt-file", "/no/such/file"], "--prompt-file /no/such/file cannot be read: No such file"),
    ],
)
def test_what_is_wrong_is_said(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, out, err = output(capsys, run, *words)
    assert (code, out) == (2, "")
    assert err.startswith(said)
    assert err.count("\n") == 1


def test_a_prompt_that_is_not_utf8(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("一\n二".encode() + b"\xff")
    code, _, err = output(capsys, run, "--prompt-file", file)
    assert code == 2
    assert err == f"--prompt-file {file} is not UTF-8: line 2, byte 7 of the file.\n"


def test_folders_that_hold_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = [f"There is no folder {tmp_path}/none"]
    (tmp_path / "file").touch()
    said.append(f"{tmp_path}/file is a file")
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "recipe.yaml").touch()
    said.append(f"{tmp_path}/young has no model/ yet, which a run writes when it ends: go on with danlu train")
    (tmp_path / "other").mkdir()
    said.append(f"{tmp_path}/other is no model")
    for name, sentence in zip(("none", "file", "young", "other"), said):
        code, _, err = output(capsys, tmp_path / name, "--prompt", "x")
        assert code == 2
        assert err.startswith(sentence)
