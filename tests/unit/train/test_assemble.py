"""A recipe put together: what is told of before any weight has memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from danlu.core.errors import InputError
from danlu.core.world import World
from danlu.models import weights
from danlu.recipe.yaml import load
from danlu.train.assemble import gather
from tests.fault.runs import write_recipe
from tests.shared import shared
from tests.unit.models.tiny import FAMILIES, lively


@pytest.mark.parametrize(
    ("name", "told"), [("byte", True), (".", False), ("tokenizer.json", False), ("tokenizer.model", False)]
)
def test_a_tokenizer_that_a_models_weights_do_not_know_is_told_of(name: str, told: bool, tmp_path: Path) -> None:
    """The byte tokenizer's 258 ids fit the model's 512 rows, so nothing else would notice."""
    start = shared("weights/stories260k_hf/config.json").parent
    tokenizer = name if name == "byte" else start / name
    said: list[str] = []
    gather(
        load(str(write_recipe(tmp_path)), [f"model={{from: {start}}}", f"data.tokenizer={tokenizer}"]),
        world=World(),
        device=torch.device("cpu"),
        announce=said.append,
    )
    assert any("comes with a tokenizer of its own" in line for line in said) == told


def test_weights_that_do_not_fit_are_refused_before_any_text_is_tokenised(tmp_path: Path) -> None:
    start, family = tmp_path / "start", replace(FAMILIES["llama"], vocab_size=258)
    weights.save(start, family, lively(family).named_parameters(), dtype=torch.float32)
    tensors = load_file(start / weights.SINGLE)
    del tensors["model.norm.weight"]
    save_file(tensors, start / weights.SINGLE)
    recipe = write_recipe(tmp_path)
    with pytest.raises(InputError, match=r"the weights do not fit config.json: missing model.norm.weight"):
        gather(
            load(str(recipe), [f"model={{from: {start}}}"]),
            world=World(),
            device=torch.device("cpu"),
            announce=lambda said: None,
        )
    assert not (tmp_path / "runs" / ".cache").exists()
