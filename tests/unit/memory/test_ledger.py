"""The ledger's closed formulas by hand, and what a budget comes to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from danlu.memory.ledger import Case, choose, forecast, kept
from danlu.memory.recompute import Budget
from danlu.models.families.llama import Llama

SHAPE = Llama(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=20,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
).shape()
CASE = Case(
    shape=SHAPE,
    parameters=1000,
    sequence_length=16,
    rows=3,
    micros=2,
    weight=4,
    product=2,
    weights=4000,
    gradients=4000,
    moments=8000,
    path="mask",
)


def test_what_a_block_keeps_by_hand() -> None:
    """48 tokens of width 8; queries 8, keys and values 4 each; inner 20. The stream in fp32, products in bf16."""
    whole = kept(CASE, "none")
    assert whole["norms"] == 48 * 2 * (8 * 4 + 4 + 8 * 2)  # twice: the stream, its scale, the normalised states
    # queries, keys and values as one; turned queries and keys; what is attended to; log-sum-exp of 4 heads
    assert whole["attention"] == 48 * (16 + 12 + 8) * 2 + 48 * 4 * 4
    assert whole["mlp"] == 48 * 4 * 20 * 2  # gate, up, the activated gate, their product
    assert whole["weights side by side"] == (16 + 40) * 8 * 2
    assert kept(CASE, "full") == {"input": 48 * 8 * 4}
    some = kept(CASE, "selective")
    assert some["input"] == 48 * 8 * 4 and some["products"] == 48 * (16 + 8 + 40) * 2
    assert some["attention"] == 48 * 8 * 2 + 48 * 4 * 4


def test_the_parts_add_up_to_the_peak() -> None:
    ledger = forecast(replace(CASE, kinds=("none",) * 4))
    assert ledger.peak == sum(ledger.parts.values())
    assert ledger.parts["weights"] == 4000 and ledger.parts["moments"] == 8000
    assert ledger.parts["batch"] == 2 * 48 * 4 * 8
    assert ledger.parts["gradients"] == 4000 + 10 * 8 * 4  # in the second micro-batch: all, and the head's new one


def test_an_update_that_takes_much_is_the_peak() -> None:
    ledger = forecast(replace(CASE, kinds=("full",) * 4, working=10**9))
    assert ledger.moment == "in the update" and ledger.parts["working"] == 10**9


@pytest.mark.parametrize("budget", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0])
def test_a_budget_is_kept_with_the_least_recomputed(budget: float) -> None:
    kinds = choose(Budget(budget=budget), CASE)
    each = {kind: sum(kept(CASE, kind).values()) for kind in ("none", "selective", "full")}
    allowed = budget * 4 * each["none"]
    held = sum(each[kind] for kind in kinds)
    assert len(kinds) == 4
    if 4 * each["full"] > allowed:
        assert kinds == ("full",) * 4
        return
    assert held <= allowed
    # One step less recomputation anywhere would not keep to it.
    order = ["full", "selective", "none"]
    for place, kind in enumerate(kinds):
        if kind != "none":
            more = order[order.index(kind) + 1]
            assert held - each[kind] + each[more] > allowed, (kinds, place)
    assert list(kinds) == sorted(kinds, key=order.index), "what is recomputed stands first"


def test_all_is_kept_where_all_may_be() -> None:
    assert choose(Budget(budget=1.0), CASE) == ("none",) * 4
    assert choose("selective", CASE) == ("selective",) * 4
