"""What must hold between the settings of a recipe is checked, and said with the rest; what is not built is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from danlu.core.config import changed, load
from danlu.core.errors import InputError
from danlu.models.families import Pretrained
from danlu.optim.schedule import Constant
from danlu.recipe.recipe import Recipe, resumes, rows_of
from danlu.recipe.yaml import RULES

FILE = Path("/recipes/mine.yaml")
WHOLE = """\
name: mine
max_steps: 100
model:
  kind: llama
  hidden_size: 64
  num_attention_heads: 4
  num_key_value_heads: 2
  max_position_embeddings: 128
data:
  train: [a.txt]
  sequence_length: 64
batch:
  global_batch_size: 12
  micro_batch_size: 4
optimizer:
  schedule:
    kind: cosine
    warmup_steps: 10
"""


def read(*typed: str, text: str = WHOLE) -> Recipe:
    return load(Recipe, text, file=FILE, overrides=typed, rules=RULES, here=Path("/here"))


def refusal(*typed: str, text: str = WHOLE) -> list[str]:
    with pytest.raises(InputError) as caught:
        read(*typed, text=text)
    lines = str(caught.value).removeprefix(f"{FILE} ").splitlines()
    return [line.strip() for line in (lines if len(lines) == 1 else lines[1:])]


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        # values that make no sense
        (["optimizer.learning_rate=-1"], "optimizer.learning_rate: must be a number at least 0, not -1"),
        (["batch.global_batch_size=0"], "batch.global_batch_size: must be a whole number at least 1 or auto, not 0"),
        (["batch.micro_batch_size=0"], "batch.micro_batch_size: must be a whole number at least 1 or auto, not 0"),
        (["optimizer.betas=[0.9, 1.0]"], "optimizer.betas.1: must be a number at least 0 and below 1, not 1.0"),
        (
            ["data.validation=1.0"],
            "data.validation: must be a number at least 0 and below 1 or a list (of a text), not 1.0",
        ),
        (
            ["memory.precision=bf17"],
            "memory.precision: must be auto, fp32, bf16, fp16, fp8, fp64 or bf16_pure, not bf17; did you mean bf16?",
        ),
        (["memory.roles.norm=bf16"], "memory.roles.norm: must be auto or fp32, not bf16"),
        (["memory.roles={heads: fp32}"], "memory.roles.heads: unknown key; did you mean memory.roles.head?"),
        (
            ["memory.loss_scale.start=1000"],
            "memory.loss_scale.start: 1000 is no power of two, by which alone nothing is rounded; 1024 would do",
        ),
        (["seed=-1"], "seed: must be a whole number at least 0, not -1"),
        # between settings
        (
            ["optimizer.schedule.warmup_steps=101"],
            "optimizer.schedule.warmup_steps: 101 updates of warm-up do not fit in 100; at most 100",
        ),
        (
            ["max_steps=null", "max_tokens=6k"],
            "optimizer.schedule.warmup_steps: 10 updates of warm-up do not fit in 8; at most 8",
        ),
        (
            ["data.sequence_length=129"],
            "data.sequence_length: 129 is more than the model reads "
            "(model.max_position_embeddings is 128); at most that",
        ),
        (
            ["model.num_attention_heads=6", "model.num_key_value_heads=3"],
            "model.num_attention_heads: 6 heads do not divide model.hidden_size 64; give one of 1, 2, 4, 8, 16, 32, 64",
        ),
        (
            ["model.num_key_value_heads=3"],
            "model.num_key_value_heads: 3 do not divide 4 attention heads; give one of 1, 2, 4",
        ),
        (
            ["batch.micro_batch_size=5"],
            "batch.micro_batch_size: 5 does not divide 12 rows of an update; give one of 1, 2, 3, 4, 6, 12, or auto",
        ),
        (
            ["parallel.replicate=4"],
            "batch.micro_batch_size: 4 does not divide the 3 rows of one rank; give one of 1, 3, or auto",
        ),
        (["parallel.shard=5"], "parallel.shard: 5 ranks cannot share 12 rows (batch.global_batch_size) evenly"),
        (
            ["batch.global_batch_size=auto", "batch.global_batch_tokens=1000"],
            "batch.global_batch_tokens: 1000, no whole number of rows of 64, nor near one (data.sequence_length); "
            "960 (15 rows) or 1024 (16 rows) would do",
        ),
        (
            ["batch.global_batch_tokens=1024"],
            "batch.global_batch_tokens: 1024, which is 16 rows of 64, and batch.global_batch_size is 12; keep one of "
            "the two (global_batch_size: auto, or global_batch_tokens: null)",
        ),
        (
            ["batch.global_batch_size=auto", "batch.global_batch_tokens=64K", "parallel.replicate=3"],
            "parallel.replicate: 3 ranks cannot share 1000 rows (batch.global_batch_tokens) evenly",
        ),
        (
            ["batch.ramp={from: 5, steps: 10}"],
            "batch.ramp.from: 5, which does not divide the 12 rows of a full update; 1 would do",
        ),
        (
            ["batch.ramp={from: 3, steps: 10}", "batch.micro_batch_size=1", "parallel.replicate=2"],
            "batch.ramp.from: 2 ranks cannot share 3 rows evenly; 4 would do",
        ),
        (["batch.ramp={from: 4}"], "batch.ramp.steps: give either steps or tokens, in which the batch grows"),
        (
            ["optimizer.schedule={kind: wsd, stable_steps: 3}"],
            "optimizer.schedule.stable_steps: unknown key; here it is not needed (what is neither warm-up nor decay is "
            "stable)",
        ),
        (
            ["optimizer.rates=[{role: bias, width: 64}]"],
            "optimizer.rates.0.width: the rate of bias weights does not go by width; leave it out",
        ),
        (["max_steps=null"], "max_steps: missing; give exactly one of max_steps, num_train_epochs, max_tokens"),
        (
            ["num_train_epochs=2"],
            "num_train_epochs: a second answer to how long the run is; keep one, and set the other to null "
            "(max_steps=null)",
        ),
        (["data.train=[]"], "data.train: is empty; name at least one file, folder or shard"),
        (["name=a/b"], "name: must be a plain folder name (no slash, no dot or hyphen in front), not 'a/b'"),
        (["name=.."], "name: must be a plain folder name (no slash, no dot or hyphen in front), not '..'"),
        (
            ["data.validation=0", "evaluate.early_stopping.patience=3"],
            "evaluate.early_stopping: needs held-out text; "
            "set data.validation to a share like 0.05, or a list of files",
        ),
        (
            ["checkpoint.publish=average"],
            "checkpoint.publish: there is no average to publish; set optimizer.average to {decay: 0.999}, or final",
        ),
        (
            ["checkpoint.publish=best", "checkpoint.keep_best=0"],
            "checkpoint.publish: the best weights are published only if they are kept; set checkpoint.keep_best to 1",
        ),
        (
            ["model.vocab_size=100"],
            "model.vocab_size: 100 is fewer than the byte tokenizer's 258 ids; give that, or auto",
        ),
        (
            ["checkpoint.keep_last=0"],
            "checkpoint.keep_last: 0 would keep nothing to go on from; give 1 or more, or -1 to keep all",
        ),
        (["format=2"], "format: must be 1, not 2"),
        # known, and not built yet
        (
            ["optimizer.kind=sophia"],
            "optimizer.kind: sophia is not built yet; adamw, lamb, lion, adafactor, muon, sgd and adamw8bit are",
        ),
        (
            ["optimizer.kind=adamw_8bit"],
            "optimizer.kind: must be adamw, lamb, lion, adafactor, muon, sgd or adamw8bit, not adamw_8bit; "
            "did you mean adamw8bit?",
        ),
        (
            ["optimizer.kind=adam"],
            "optimizer.kind: must be adamw, lamb, lion, adafactor, muon, sgd or adamw8bit, not adam; "
            "did you mean adamw?",
        ),
        (["optimizer.momentum=0.9"], "optimizer.momentum: unknown key; it is a key of kind: muon, not of kind: adamw"),
        (
            ["memory.precision=int8"],
            "memory.precision: int8 is not built yet; fp32, bf16, fp16, fp8 and auto are",
        ),
        (["memory.recompute=half"], "memory.recompute: must be none, selective, full or a section, not half"),
        (
            ["memory.offload=[weights]"],
            "memory.offload: weights and gradients leave the device together, and their optimizer states with them; "
            "add gradients and optimizer, or keep only optimizer and activations",
        ),
        (
            ["memory.offload=[activations]", "compile=graphs"],
            "compile: graphs need activations where they were; set compile to true, or change memory.offload",
        ),
        (
            ["memory.offload_folder=x"],
            "memory.offload_folder: is for optimizer states, which stay where they are; add optimizer to "
            "memory.offload, or set it to null",
        ),
        (["parallel.tensor=2"], "parallel.tensor: 2 is not built yet; 1 is"),
        (["parallel.pipeline=2"], "parallel.pipeline: 2 is not built yet; 1 is"),
        (["parallel.context=2"], "parallel.context: 2 is not built yet; 1 is"),
        (["parallel.expert=2"], "parallel.expert: 2 is not built yet; 1 is"),
        (["parallel=auto"], "parallel: auto is not built yet; give parallel: {shard: auto}"),
        (["adapter={kind: lora, r: 8}"], "adapter: not built yet; leave adapter out, or null"),
        (["data.kind=chats"], "data.kind: chats is not built yet; corpus is"),
        (["objective.kind=dpo"], "objective.kind: dpo is not built yet; causal is"),
        (["monitor.wandb=true"], "monitor.wandb: true is not built yet; false is"),
        (["monitor.profile=3"], "monitor.profile: must be a section or null, not 3"),
        (
            ["model={kind: mine.py:Mamba}"],
            "model.kind: parts of your own (mine.py:Mamba) are not built yet; llama | gpt2 | pretrained are",
        ),
        # unknown names
        (["optimizer.learning_rte=1"], "optimizer.learning_rte: unknown key; did you mean optimizer.learning_rate?"),
        (["learning_rate=1e-3"], "learning_rate: unknown key; it belongs elsewhere: optimizer.learning_rate"),
        (["warmup_steps=1"], "warmup_steps: unknown key; it belongs elsewhere: optimizer.schedule.warmup_steps"),
        (
            ["model={from: x, n_layer: 2}"],
            "model.n_layer: unknown key; it is a key of kind: gpt2, not of kind: pretrained",
        ),
        (
            ["zero_optimization={offload_optimizer: {device: cpu}}"],
            "zero_optimization.offload_optimizer: unknown key; here it is memory.offload: [optimizer] "
            "(and memory.offload_folder for a disk)",
        ),
        (["model.hidden-size=64"], "model.hidden-size: unknown key; did you mean model.hidden_size?"),
        (["model.n_layer=2"], "model.n_layer: unknown key; of kind: llama it is model.num_hidden_layers"),
        (
            ["per_device_train_batch_size=4"],
            "per_device_train_batch_size: unknown key; here it is batch.micro_batch_size",
        ),
        (["cutoff_len=64"], "cutoff_len: unknown key; here it is data.sequence_length"),
        (["lora_r=8"], "lora_r: unknown key; here it is adapter.r (not built yet)"),
        (["bf16=true"], "bf16: unknown key; here it is memory.precision: bf16"),
        (["optimizer.params.lr=1"], "optimizer.params.lr: unknown key; here it is optimizer.learning_rate"),
        (["training.seq_len=64"], "training.seq_len: unknown key; here it is data.sequence_length"),
        (
            ["tensor-model-parallel-size=2"],
            "tensor-model-parallel-size: unknown key; here it is parallel.tensor (not built yet)",
        ),
    ],
)
def test_each_is_refused_in_one_line_that_says_what_would_do(typed: list[str], says: str) -> None:
    [said] = refusal(*typed)
    where, _, text = said.partition(": ")
    assert text == says
    assert where.startswith(("line", "command line"))


def test_lines_of_the_file_are_named() -> None:
    text = WHOLE.replace("warmup_steps: 10", "warmup_steps: 1000").replace("global_batch_size: 12", "global_batch: 12")
    assert refusal("optimizer.weight_decay=x", text=text) == [
        "line 13: batch.global_batch: unknown key; did you mean batch.global_batch_size?",
        "line 18: optimizer.schedule.warmup_steps: 1000 updates of warm-up do not fit in 100; at most 100",
        "command line: optimizer.weight_decay: must be a number at least 0, not x",
    ]


def test_both_precisions_at_once_are_two_unknown_keys() -> None:
    assert refusal("bf16=true", "fp16=true", text=WHOLE) == [
        "command line: bf16: unknown key; here it is memory.precision: bf16",
        "command line: fp16: unknown key; here it is memory.precision: fp16",
    ]


def test_what_is_right_is_read() -> None:
    recipe = read("optimizer.schedule={kind: constant}", "model={from: x}", "max_steps=null", "max_tokens=1.5M")
    assert recipe.model == Pretrained(from_="/here/x")
    assert recipe.optimizer.schedule == Constant()
    assert recipe.max_tokens == 1_500_000
    assert recipe.data.train == ["/recipes/a.txt"]
    assert recipe.run_folder == Path("runs/mine")
    assert read("checkpoint.keep_last=-1").checkpoint.keep_last == -1
    assert read("parallel.shard=3").parallel.shard == 3


def test_a_resumed_run_may_change_its_layout_and_grow_but_not_its_mathematics() -> None:
    old = read()
    free = replace(old, max_steps=200)
    for path, value in (
        ("parallel.shard", 2),
        ("batch.micro_batch_size", 2),
        ("monitor.console", False),
        ("checkpoint.save_steps", 7),
        ("evaluate.eval_steps", 7),
        ("data.workers", 0),
        ("data.train", ["moved.txt"]),
        ("data.tokenizer", "moved.json"),
        ("memory.offload", ["optimizer"]),
        ("memory.offload_folder", "/disk"),
    ):
        free = changed(free, path, value)
    allowed, refused = resumes(old, free)
    assert not refused and len(allowed) == 11
    back = resumes(free, old)
    assert {path for path, _, _ in back[0]} >= {"memory.offload", "memory.offload_folder"}
    listed = changed(old, "data.validation", ["held.txt"])
    assert resumes(listed, changed(old, "data.validation", ["moved.txt", "and.txt"]))[1] == []
    assert resumes(listed, old)[1] == [("data.validation", ["held.txt"], old.data.validation)]
    for path, value in (
        ("max_steps", 50),
        ("seed", 2),
        ("batch.global_batch_size", 24),
        ("optimizer.learning_rate", 1.0),
        ("data.sequence_length", 32),
        ("memory.precision", "bf16"),
    ):
        before = old
        for part in path.split("."):
            before = getattr(before, part)
        assert resumes(old, changed(old, path, value)) == ([], [(path, before, value)])


def test_a_batch_may_be_given_in_tokens_and_read_again_as_it_was_settled() -> None:
    asked = ["batch.global_batch_size=auto", "batch.global_batch_tokens=1024"]
    assert read(*asked).batch.rows(64) == 16
    settled = read("batch.global_batch_size=16", "batch.global_batch_tokens=1024")  # as the run's recipe.yaml has it
    assert settled.batch.rows(64) == 16
    assert read("batch.global_batch_size=auto").batch.rows(64) == 32
    assert read("batch.global_batch_size=auto", "batch.global_batch_tokens=64K").batch.rows(64) == 1000


def test_warm_up_is_measured_against_the_updates_of_a_ramp() -> None:
    """1536 tokens are 24 rows: 2 updates of 12, or 4 + 4 + 8 + 8 with a ramp."""
    typed = ["max_steps=null", "max_tokens=1536", "optimizer.schedule.warmup_steps=4"]
    assert "at most 2" in refusal(*typed)[0]
    assert read(*typed, "batch.ramp={from: 4, steps: 4}").batch.ramp is not None


def test_tokens_that_are_no_whole_rows_are_as_many_rows_as_ranks_can_share_best() -> None:
    assert rows_of(1_000_000, 512) == 1952 == 61 * 32
    assert rows_of(1_000_000, 256) == 3904 == 61 * 64
    assert rows_of(100_000, 256) == 392 == 49 * 8  # 0.35 % more; 384 = 3 * 128 would be 1.7 % less
    assert rows_of(1953 * 512, 512) == 1953  # exact is exact
    assert rows_of(1000, 64) is None and rows_of(10, 64) is None
    for tokens in range(700, 200_000, 977):
        rows = rows_of(tokens, 64)
        exact = [n for n in range(max(1, tokens // 65), tokens // 63 + 2) if abs(n * 64 - tokens) <= tokens / 100]
        assert (rows in exact) if exact else rows is None
