"""A recipe put together: what is told of before any weight has memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danlu.core.world import World
from danlu.recipe.yaml import load
from danlu.train.assemble import gather
from tests.fault.runs import write_recipe
from tests.shared import shared


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
