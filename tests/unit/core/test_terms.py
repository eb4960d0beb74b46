"""Named sums."""

from __future__ import annotations

import torch

from danlu.core.terms import Terms


def tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_sums_keep_names_that_only_one_side_has() -> None:
    both = Terms(a=tensor(1.0), b=tensor(2.0)) + Terms(b=tensor(3.0), c=tensor(4.0))
    assert {name: value.item() for name, value in both.items()} == {"a": 1.0, "b": 5.0, "c": 4.0}


def test_ratio_is_exact_for_fractional_weights_and_zero_where_nothing_is_asked() -> None:
    ratio = Terms(a=tensor(1.0), b=tensor(7.0)) / Terms(a=torch.tensor(0.25), b=torch.tensor(0))
    assert ratio["a"].item() == 4.0  # a weight below one is not clamped to one
    assert ratio["b"].item() == 0.0


def test_a_term_of_no_weight_gives_no_gradient_and_no_nan() -> None:
    asked, unasked = tensor(3.0), tensor(5.0)
    loss = (Terms(a=asked * 2, b=unasked * 2) / Terms(a=torch.tensor(4), b=torch.tensor(0))).total()
    loss.backward()
    assert asked.grad is not None and asked.grad.item() == 0.5
    assert unasked.grad is not None and unasked.grad.item() == 0.0


def test_zeros_are_floating_even_where_counts_are_whole_numbers() -> None:
    zeros = Terms(a=torch.tensor(5)).zeros()
    assert zeros["a"].dtype.is_floating_point and zeros["a"].item() == 0.0
