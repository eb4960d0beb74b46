"""Causal language modelling: counted before, summed after."""

from __future__ import annotations

import torch

from danlu.core.batch import IGNORE, Batch
from danlu.core.contracts import Output
from danlu.models.heads import LanguageHead
from danlu.objectives.causal import Causal


def test_sum_over_count_is_the_mean_over_labelled_tokens() -> None:
    source = torch.Generator().manual_seed(5)
    head = LanguageHead(8, 11).double()
    head.weight.data = torch.randn(11, 8, generator=source, dtype=torch.float64)
    labels = torch.randint(11, (3, 7), generator=source)
    labels[0, 2:] = IGNORE
    hidden = torch.randn(3, 7, 8, generator=source, dtype=torch.float64)
    zeros = torch.zeros_like(labels)
    batch = Batch(tokens=zeros, labels=labels, positions=zeros, documents=zeros, packed=False, samples=("a", "b", "c"))
    asked = Causal()
    loss = asked.loss(Output(hidden=hidden, heads={"language": head}), batch) / asked.count(batch)
    expected = torch.nn.functional.cross_entropy(
        (hidden @ head.weight.detach().T).flatten(0, 1), labels.flatten(), ignore_index=IGNORE
    )
    assert asked.count(batch)["language"].item() == 16
    torch.testing.assert_close(loss.total().detach(), expected, rtol=1e-12, atol=0)
