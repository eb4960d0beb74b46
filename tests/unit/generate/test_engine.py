"""Ids come out as a plain loop over whole sequences would give them, cached or not, alone or in company."""

from __future__ import annotations

import pytest
import torch

from danlu.core.errors import Failure, InputError
from danlu.generate.engine import Ask, complete, generate
from danlu.generate.pick import Pick
from danlu.models.families import Family, Gpt2, Llama
from danlu.models.stack import Trunk
from danlu.models.start import fill

FAMILIES = [
    Llama(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=40,
        initializer_range=0.3,
    ),
    Gpt2(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=40, initializer_range=0.3),
]
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [60, 0, 60]]
GREEDY = Pick(temperature=0)


def made(family: Family) -> Trunk:
    model = family.build().double()
    fill(model, 3)
    return model


def ask(**changes: object) -> Ask:
    return Ask(**{"max_new_tokens": 20, "limit": 40, "vocabulary": 61, "pick": GREEDY} | changes)


def plain(model: Trunk, prompt: list[int], count: int) -> list[int]:
    """The most probable continuation, by whole logits of the whole sequence, again for every token."""
    ids = list(prompt)
    for _ in range(count):
        tokens = torch.tensor([ids])
        hidden = model(tokens, torch.arange(len(ids))[None], torch.zeros_like(tokens), packed=False)
        ids.append(int((hidden[0, -1] @ model.heads["language"].weight.t()).argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.kind)
def test_each_prompt_goes_on_as_it_would_alone(family: Family, cached: bool) -> None:
    model = made(family)
    got = complete(model, model.heads["language"], PROMPTS, ask(cached=cached))
    assert got == [plain(model, prompt, 20) for prompt in PROMPTS]
    assert len({tuple(row) for row in got}) == len(PROMPTS)  # they do differ


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.kind)
def test_cached_scores_equal_uncached_ones(family: Family) -> None:
    model = made(family)
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}

    class Watched:
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            seen[cached].append(model.heads["language"].logits(hidden))
            return seen[cached][-1]

    for cached in (True, False):
        complete(model, Watched(), PROMPTS, ask(cached=cached))
    torch.testing.assert_close(seen[True], seen[False], rtol=1e-11, atol=1e-11)


def test_the_seed_settles_the_text() -> None:
    model = made(FAMILIES[0])
    head = model.heads["language"]
    free = Pick(temperature=1.5)
    one, again, other = (complete(model, head, PROMPTS, ask(pick=free, seed=seed)) for seed in (1, 1, 2))
    assert one == again
    assert all(a != b for a, b in zip(one, other))
    before = torch.random.get_rng_state()
    assert one == complete(model, head, PROMPTS, ask(pick=free, seed=1, cached=False))
    assert one[0] == complete(model, head, PROMPTS[:1], ask(pick=free, seed=1))[0]
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_row_ends_with_its_end_id_and_the_others_go_on() -> None:
    model = made(FAMILIES[0])
    whole = [plain(model, prompt, 20) for prompt in PROMPTS]
    end = whole[0][3]
    got = complete(model, model.heads["language"], PROMPTS, ask(end=[end]))
    assert got == [row[: row.index(end) + 1] if end in row else row for row in whole]
    assert len(got[0]) <= 4
    steps = list(generate(model, model.heads["language"], PROMPTS[:1], ask(end=[end])))
    assert steps == [[token] for token in got[0]]  # nothing runs on when all have ended


def test_only_ids_that_exist_are_drawn() -> None:
    model = made(FAMILIES[0])
    with torch.no_grad():
        model.heads["language"].weight[50:] *= 100
    rows = complete(model, model.heads["language"], [[1]], ask(vocabulary=50, pick=Pick(temperature=2.0)))
    assert max(rows[0]) < 50


def test_the_callers_gradients_are_left_on_between_steps() -> None:
    model = made(FAMILIES[0])
    for _ in generate(model, model.heads["language"], [[1]], ask(max_new_tokens=2)):
        assert torch.is_grad_enabled()


def test_up_to_the_last_position_and_not_beyond() -> None:
    model = made(FAMILIES[1])
    head = model.heads["language"]
    assert len(complete(model, head, [[1] * 10], ask(max_new_tokens=30))[0]) == 30
    with pytest.raises(InputError, match="10 tokens and 31 new ones are more than the 40"):
        generate(model, head, [[1] * 10], ask(max_new_tokens=31))


@pytest.mark.parametrize(
    ("prompts", "changes", "said"),
    [
        ([[1], []], {}, "prompt is empty"),
        ([[1, 61]], {}, "holds the id 61, but the vocabulary ends at 60"),
        ([[-1]], {}, "holds the id -1"),
        ([[1]], {"max_new_tokens": 0}, "at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(prompts: list[list[int]], changes: dict, said: str) -> None:
    def never(*_: object, **__: object) -> torch.Tensor:
        raise AssertionError

    with pytest.raises(InputError, match=said):
        generate(never, made(FAMILIES[0]).heads["language"], prompts, ask(**changes))


def test_scores_that_are_no_numbers_are_said() -> None:
    model = made(FAMILIES[0])
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(Failure, match="not finite"):
        complete(model, model.heads["language"], [[1]], ask())
