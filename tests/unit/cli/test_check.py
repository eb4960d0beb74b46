"""`danlu check` shows what a run would do, and refuses what a run would refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from danlu.cli.check import duration, show, size
from danlu.cli.main import main
from danlu.core import device
from danlu.core.batch import IGNORE, Batch
from danlu.data.tokenizer import load
from danlu.recipe import yaml

RECIPE = """\
name: small
num_train_epochs: 2
model: {kind: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64}
data: {train: [text.txt], validation: 0, split: line, sequence_length: 16}
batch: {global_batch_size: 4}
checkpoint: {save_steps: 1, keep_last: -1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("hello\nworld\n" * 20)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_counts_what_the_run_will_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small.yaml", "--quick"]) == 0
    out = capsys.readouterr().out
    # 40 documents of 5 bytes and an end token each: 240 tokens in 15 rows of 16; 2 epochs are 30 rows: 8 updates of 4.
    assert "40 documents, 240 tokens, 15 rows of 16; 100.0% of what is drawn" in out
    assert "8 updates of 4 rows" in out
    # 258 x 32 embedding; a block: 4 x 32 x 32 attention, 3 x 32 x 64 gated, 2 x 32 norms; a last norm of 32.
    parameters = 258 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert f"llama: {parameters:,} parameters, {258 * 32:,} of them the embedding" in out
    assert f"8 checkpoints of {size(3 * 4 * parameters)}, all kept; the model {size(4 * parameters)}" in out
    assert f"{folder / 'runs' / 'small'}: new" in out
    assert "validation: none" in out
    table = out.split("\nprecision\n")[1].split("\n\n")[0]
    assert (
        "  softmax     stored -     computed fp32      made and summed high, of whatever dtype its scores are" in table
    )
    assert "moments" in table
    assert not (folder / "runs" / "small").exists()


def test_checkpoints_hold_the_average_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small.yaml", "--quick", "optimizer.average={decay: 0.9}", "memory.precision=fp32"]) == 0
    out = capsys.readouterr().out
    [parameters] = re.findall(r"llama: ([\d,]+) parameters", out)
    [each] = re.findall(r"8 checkpoints of ([\d.]+) kB, all kept", out)
    assert float(each) * 1000 == pytest.approx(4 * 4 * int(parameters.replace(",", "")), rel=1e-3)  # counts beside


def test_too_little_disk_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small.yaml", "--quick", "num_train_epochs=1e9"]) == 0
    assert "WARNING: not enough room; set checkpoint.keep_last lower" in capsys.readouterr().out


def test_memory_is_told_part_by_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small.yaml", "--quick", "memory.recompute=full", "memory.precision=fp32"]) == 0
    out = capsys.readouterr().out
    parameters = 258 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert re.search(rf"\n    weights +{re.escape(size(4 * parameters))} +[0-9.]+%\n", out)
    assert f"activations of blocks 0 to 1, recompute full: the input kept, {size(4 * 16 * 32 * 4)} each (input" in out
    assert re.search(r"about .* of tensors each, most in ", out) and "WARNING: more than is free" not in out


def test_what_would_need_less_is_told_where_memory_is_short(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "memory", lambda where: device.Memory(total=10_000_000, free=100_000))
    assert main(["check", "small.yaml", "--quick", "batch.micro_batch_size=4", "memory.precision=fp32"]) == 0
    out = capsys.readouterr().out
    assert "WARNING: more than is free; less would be needed with batch.micro_batch_size=2 (" in out
    assert "memory.recompute=full (" in out and "memory.recompute=none" not in out


def test_the_forecast_is_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small.yaml"]) == 0
    out = capsys.readouterr().out
    assert "an update on one process here" in out and "8 updates and 0 evaluations: about" in out


def test_what_is_measured_is_a_full_update(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a ramp's smaller one, and not one whose micro-batch is run in halves for its noise."""
    from danlu.compute.layer import ComputeLayer

    rows, forward = [], ComputeLayer.forward
    monkeypatch.setattr(
        ComputeLayer, "forward", lambda self, batch, *rest: rows.append(len(batch)) or forward(self, batch, *rest)
    )
    given = ["batch.ramp={from: 2, steps: 5}", "monitor.noise_steps=2", "batch.micro_batch_size=4", "compile=false"]
    assert main(["check", "small.yaml", "memory.precision=fp32", *given]) == 0
    assert len(rows) >= 2 and set(rows) == {4}
    assert " of tensors at most in an update, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("data.train=[gone.txt]", "gone.txt"),
        ("model.vocab_size=300000000000000000000", "model.vocab_size: must be a whole number at least 1 or auto"),
        ("data.tokenizer=nothing", "nothing"),
        ("batch.micro_batch_size=3", "batch.micro_batch_size: 3 does not divide 4 rows"),
    ],
)
def test_what_a_run_would_refuse_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], typed: str, says: str
) -> None:
    assert main(["check", "small.yaml", typed]) == 2
    said = capsys.readouterr()
    assert says in said.err and "one batch" not in said.out


def test_an_older_run_in_the_folder_is_told_or_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = folder / "runs" / "small"
    for step in (2, 4):
        (root / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
        (root / "checkpoints" / f"step-{step:06d}" / "manifest.json").write_text("{}")
    yaml.save(yaml.load("small.yaml"), root / "recipe.yaml")
    assert main(["check", "small.yaml", "--quick"]) == 0
    assert f"{root}: exists; goes on after update 4 of 8" in capsys.readouterr().out
    assert main(["check", "small.yaml", "--quick", "seed=7"]) == 2
    assert "is the folder of another recipe:\n  seed: 1 there, 7 now" in capsys.readouterr().err


def test_several_ranks_share_the_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small.yaml", "--quick", "--nproc", "4", "batch.global_batch_size=8"]) == 0
    out = capsys.readouterr().out
    assert "batch: {global_batch_size: 8, global_batch_tokens: null, micro_batch_size: 2, ramp: null}" in out
    assert "parallel: {replicate: 1, shard: 4," in out
    assert "each of 4 ranks: 1 micro-batches of 2 rows an update" in out


def test_ranks_that_do_not_divide_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "small.yaml", "parallel.replicate=2", "--nproc", "3"]) == 2
    assert "does not make 3 ranks" in capsys.readouterr().err


def test_a_batch_is_shown_with_its_boundaries() -> None:
    tokens = torch.tensor([[104, 105, 256, 121, 111, 256]])
    batch = Batch(
        tokens=tokens,
        labels=torch.tensor([[105, 256, IGNORE, 111, 256, IGNORE]]),
        positions=torch.tensor([[0, 1, 2, 0, 1, 2]]),
        documents=torch.tensor([[0, 0, 0, 1, 1, 1]]),
        packed=True,
        samples=("train:0:7",),
    )
    assert list(show(batch, load("byte"), colour=False)) == [
        "1 rows of 6 tokens; 4 labels, 2 places without one",
        "row 0 (sample train:0:7): 2 documents or pieces of them",
        "      0-2     hi<|endoftext|>",
        "      3-5     yo<|endoftext|>",
        "  place  document  position  reads             is to predict",
        "      0         0         0  'h'               'i'",
        "      1         0         1  'i'               '<|endoftext|>'",
        "      2         0         2  '<|endoftext|>'   -",
        "      3         1         0  'y'               'o'",
        "      4         1         1  'o'               '<|endoftext|>'",
        "      5         1         2  '<|endoftext|>'   -",
    ]
    assert "\x1b[36mhi<|endoftext|>\x1b[0m" in "\n".join(show(batch, load("byte"), colour=True))


def test_sizes_and_times_in_words() -> None:
    assert [size(n) for n in (1, 999, 1500, 2.5e9, 3e12)] == ["1 bytes", "999 bytes", "1.5 kB", "2.5 GB", "3.0 TB"]
    assert [duration(s) for s in (5, 300, 7200, 3 * 86400)] == ["5 seconds", "5 minutes", "2.0 hours", "3.0 days"]


def test_the_optimiser_is_told_group_by_group(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["optimizer.rates=[{role: matrix, rate: 0.5}]", "batch.ramp={from: 2, steps: 10}"]
    assert main(["check", "small.yaml", "--quick", *typed]) == 0
    out = capsys.readouterr().out
    told = out.split("\noptimizer\n")[1].split("\n\n")[0].splitlines()
    roles = {line.split()[0]: line.split()[1:] for line in told[3:]}
    assert roles.keys() == {"embedding", "norm", "matrix"} and roles["norm"][3] == "none"
    assert float(roles["matrix"][2]) == 0.5 * float(roles["embedding"][2])
    numbers = sum(int(facts[1].replace(",", "")) for facts in roles.values())
    assert f"{numbers:,} parameters" in out and "rows (the first of 2)" in out
