"""What danlu generates is what transformers generates with the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from danlu.generate.engine import Ask, complete, generate
from danlu.generate.pick import Pick
from danlu.models import weights
from danlu.models.families import Family, Gpt2, Llama
from danlu.models.start import fill
from tests.shared import shared

FAMILIES = [
    Llama(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        rope_theta=5000.0,
        tie_word_embeddings=False,
        initializer_range=0.2,
    ),
    Gpt2(vocab_size=97, n_embd=48, n_layer=3, n_head=6, n_positions=64, initializer_range=0.2),
]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [42], list(range(24))]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.kind)
def test_greedy_ids_are_transformers(family: Family, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = family.build()
    fill(model, 11)
    weights.save(tmp_path, family, model.named_parameters(), dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    expected = [
        theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=40,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    ask = Ask(max_new_tokens=40, limit=64, vocabulary=97, pick=Pick(temperature=0))
    assert complete(model, model.heads["language"], PROMPTS, ask) == expected


def test_a_real_model_goes_on_as_written_down() -> None:
    """expected_greedy.json beside the weights was made with transformers."""
    folder = shared("weights/stories260k_hf")
    expected = json.loads((folder / "expected_greedy.json").read_text())
    prompt = expected["prompt_ids"]
    family, model = weights.restore(folder)
    limit = family.shape().max_positions
    ask = Ask(
        max_new_tokens=len(expected["greedy_ids"]) - len(prompt),
        limit=limit,
        vocabulary=512,
        pick=Pick(temperature=0),
    )
    got = [ids[0] for ids in generate(model, model.heads["language"], [prompt], ask)]
    assert prompt + got == expected["greedy_ids"]
