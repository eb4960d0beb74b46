"""Recipes are found, read, completed and saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml as pyyaml

from danlu.core.errors import InputError
from danlu.data.source import Corpus, Weighted
from danlu.models.families.gpt2 import Gpt2
from danlu.models.families.llama import Llama
from danlu.recipe import yaml
from danlu.recipe.recipe import Recipe
from danlu.recipe.shelf import SHIPPED, caption, shipped

SMALL = """\
name: small
max_steps: 3
model: {kind: llama}
data: {train: [{path: t/a.txt, weight: 1}, {path: b, weight: 2}], sequence_length: 8}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "small.yaml").write_text(SMALL)
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    return tmp_path


def test_paths_are_absolute_each_against_where_it_was_said(folder: Path) -> None:
    recipe = yaml.load("../in/small.yaml", ["data.tokenizer=tok", "data.validation=[v.txt]"])
    assert recipe.data.train == [
        Weighted(path=str(folder / "in/t/a.txt"), weight=1.0),
        Weighted(path=str(folder / "in/b"), weight=2.0),
    ]
    assert recipe.data.tokenizer == str(folder / "out/tok")
    assert recipe.data.validation == [str(folder / "out/v.txt")]
    assert recipe.run_folder == folder / "out/runs/small"
    assert yaml.load("../in/small.yaml").data.tokenizer == "byte"


def test_a_saved_recipe_reads_back_equal_from_anywhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = yaml.load("../in/small.yaml")
    file = folder / "in" / "recipe.yaml"
    yaml.save(recipe, file)
    monkeypatch.chdir("/")
    assert yaml.load(str(file)) == recipe
    assert yaml.load(str(file.parent)) == recipe  # a run's folder stands for its recipe
    saved = pyyaml.safe_load(file.read_text())
    assert saved["format"] == 1 and list(saved)[1] == "name"
    assert set(saved) == set(Recipe.__dataclass_fields__)


@pytest.mark.parametrize("model", [Llama(), Gpt2()], ids=["llama", "gpt2"])
def test_the_defaults_go_together(folder: Path, model: Llama | Gpt2) -> None:
    """A row is no longer than what either family reads."""
    recipe = yaml.complete(Recipe(name="x", max_steps=1, model=model, data=Corpus(train=["a.txt"])))
    assert recipe.data.sequence_length == 512
    assert recipe.model == model


def test_a_recipe_made_in_python_is_held_to_the_same(folder: Path) -> None:
    recipe = Recipe(
        name="x", max_steps=1, model=Llama(), data=Corpus(train=[Weighted(path="a", weight=1)], sequence_length=8)
    )
    whole = yaml.complete(recipe)
    assert whole.data.train == [Weighted(path=str(folder / "out/a"), weight=1.0)]
    assert whole.run_folder == folder / "out/runs/x"
    assert yaml.complete(whole) == whole
    with pytest.raises(InputError) as caught:
        yaml.complete(replace(recipe, max_tokens=3, model=Llama(hidden_size=0)))
    assert str(caught.value).splitlines() == [
        "the recipe has 2 mistakes:",
        "  model.hidden_size: must be a whole number at least 1, not 0",
        "  max_tokens: a second answer to how long the run is; keep one, and set the other to null (max_steps=null)",
    ]


def test_a_recipe_that_is_not_there_gets_the_nearest_name(folder: Path) -> None:
    with pytest.raises(InputError, match=r"no recipe shakespear: .*did you mean shakespeare\?"):
        yaml.load("shakespear")
    with pytest.raises(InputError, match=r"is a folder without recipe\.yaml"):
        yaml.load(str(folder))


@pytest.mark.parametrize("name", sorted(shipped()))
def test_shipped_recipes_are_right_and_say_what_they_are(name: str) -> None:
    recipe = yaml.load(name)
    assert recipe.name == name
    assert len(caption(shipped()[name])) > 20
    for path in recipe.data.train:
        assert isinstance(path, str) and Path(path).exists() and Path(path).is_relative_to(SHIPPED)
    assert recipe.data.tokenizer == "byte" or Path(recipe.data.tokenizer).exists()


def test_the_contract_s_own_example_is_read(folder: Path) -> None:
    text = """\
name: shakespeare
seed: 1
max_steps: 300
model:
  kind: llama
  vocab_size: auto
  hidden_size: 384
  num_hidden_layers: 6
  num_attention_heads: 6
  num_key_value_heads: 6
  intermediate_size: 1024
  max_position_embeddings: 512
  tie_word_embeddings: true
data:
  kind: corpus
  tokenizer: byte
  train: [data/shakespeare.txt]
  validation: 0.05
  sequence_length: 256
  packing: true
  workers: 1
  prefetch: 2
batch: {global_batch_size: 32, micro_batch_size: auto}
objective: {kind: causal}
optimizer:
  kind: adamw
  learning_rate: 1e-3
  weight_decay: 0.1
  betas: [0.9, 0.95]
  max_grad_norm: 1.0
  schedule: {kind: cosine, warmup_steps: 20, final_ratio: 0.1}
memory: {precision: auto, recompute: none, offload: []}
parallel: {replicate: 1, shard: auto, tensor: 1, pipeline: 1, context: 1, expert: 1}
checkpoint: {save_steps: 100, keep_last: 2, keep_best: 1, asynchronous: true}
evaluate: {eval_steps: 50, early_stopping: {patience: 5, min_delta: 0.0}}
adapter: null
monitor: {logging_steps: 1, console: true, tensorboard: true, wandb: false, profile: null}
"""
    (folder / "in" / "contract.yaml").write_text(text)
    recipe = yaml.load("../in/contract.yaml")
    assert recipe.optimizer.learning_rate == 0.001
    assert recipe.evaluate.early_stopping is not None and recipe.evaluate.early_stopping.patience == 5
