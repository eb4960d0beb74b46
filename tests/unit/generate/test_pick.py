"""What is drawn, and how often: transformers' warpers give the same probabilities, and draws follow them."""

from __future__ import annotations

import pytest
import torch

from danlu.core.errors import InputError
from danlu.core.world import generator
from danlu.generate.pick import Pick

SCORES = torch.randn(5, 300, generator=torch.Generator().manual_seed(3)) * 4


@pytest.mark.parametrize(
    "pick",
    [
        Pick(),
        Pick(temperature=0.7),
        Pick(temperature=1.8, top_k=1),
        Pick(top_k=17),
        Pick(top_k=1000),
        Pick(top_p=0.5),
        Pick(temperature=2.5, top_p=0.9),
        Pick(temperature=0.3, top_k=40, top_p=0.95),
        Pick(top_p=1e-6),
    ],
    ids=repr,
)
def test_probabilities_are_transformers(pick: Pick) -> None:
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList()
    if pick.temperature != 1:
        warpers.append(TemperatureLogitsWarper(pick.temperature))
    if pick.top_k:
        warpers.append(TopKLogitsWarper(pick.top_k))
    if pick.top_p < 1:
        warpers.append(TopPLogitsWarper(pick.top_p))
    expected = warpers(torch.zeros(5, 1, dtype=torch.int64), SCORES.clone()).softmax(-1)
    assert torch.equal(pick.probabilities(SCORES), expected)


def test_by_hand() -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8: three tokens make up 0.8; the first two of them, as 2 to 1, are the top two."""
    scores = torch.tensor([[0.125, 0.5, 0.125, 0.25]]).log()
    torch.testing.assert_close(Pick(top_k=2).probabilities(scores), torch.tensor([[0, 2 / 3, 0, 1 / 3]]))
    torch.testing.assert_close(Pick(top_p=0.75).probabilities(scores), torch.tensor([[0, 2 / 3, 0, 1 / 3]]))
    torch.testing.assert_close(Pick(temperature=0.5).probabilities(scores), torch.tensor([[1.0, 16, 1, 4]]) / 22)
    assert Pick(temperature=0).probabilities(scores).tolist() == [[0, 1, 0, 0]]
    assert Pick(temperature=0)(scores, []).tolist() == [1]


def test_draws_follow_the_probabilities() -> None:
    """Chi-squared, 9 degrees of freedom: 45 is the 99.9999th percentile. An excluded token never comes."""
    count, pick = 20_000, Pick(temperature=1.5, top_k=10)
    scores = SCORES[:1].expand(count, -1)
    expected = pick.probabilities(scores[:1])[0].double() * count
    draw = generator(1, "test")
    seen = pick(scores, [draw] * count).bincount(minlength=300)
    allowed = expected > 0
    assert allowed.sum() == 10
    assert seen[~allowed].sum() == 0
    assert ((seen - expected)[allowed] ** 2 / expected[allowed]).sum() < 45


def test_a_row_draws_the_same_in_any_company() -> None:
    pick = Pick(temperature=3.0)
    together = pick(SCORES, [generator(0, row) for row in range(5)])
    alone = [pick(SCORES[row : row + 1], [generator(0, row)]).item() for row in range(5)]
    assert together.tolist() == alone


def test_bf16_scores_are_weighed_in_fp32() -> None:
    scores = SCORES.bfloat16()
    assert torch.equal(Pick(top_p=0.9).probabilities(scores), Pick(top_p=0.9).probabilities(scores.float()))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -0.1}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"top_k": -1}, "top_k must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": 1.1}, "top_p must be"),
    ],
)
def test_senseless_values_are_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        Pick(**wrong)
