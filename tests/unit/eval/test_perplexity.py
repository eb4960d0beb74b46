"""The loss over the whole validation set."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from danlu.core.batch import IGNORE, Batch
from danlu.core.contracts import Output
from danlu.core.errors import InputError
from danlu.core.terms import Terms
from danlu.eval.perplexity import Evaluate, Stopping, evaluate, resting, sweep

VOCAB = 50


class Tiny(nn.Module):
    """A model with something that acts differently in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, VOCAB)
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.table(tokens))


class Whole:
    """An objective that is torch's own cross entropy, summed."""

    def __init__(self) -> None:
        self.living: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most_living = 0

    def enrich(self, batch, frozen):
        return batch

    def count(self, batch):
        return Terms(language=(batch.labels != IGNORE).sum())

    def loss(self, out, batch):
        self.living.add(out.hidden)
        self.most_living = max(self.most_living, len(self.living))
        logits, labels = out.hidden.flatten(0, 1), batch.labels.flatten()
        return Terms(language=nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum"))


def batch(seed: int, *, rows: int = 2, length: int = 8, labelled: int | None = None) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (rows, length), generator=draw)
    labels = torch.randint(VOCAB, (rows, length), generator=draw)
    if labelled is not None:
        labels.flatten()[labelled:] = IGNORE
    zeros = torch.zeros_like(tokens)
    return Batch(
        tokens=tokens,
        labels=labels,
        positions=zeros,
        documents=zeros,
        packed=False,
        samples=tuple(map(str, range(rows))),
    )


def alone(terms: Terms) -> Terms:
    return terms


def forward_of(model: nn.Module):
    return lambda one: Output(hidden=model(one.tokens), heads={})


UNEVEN = [batch(seed, labelled=count) for seed, count in enumerate((16, 1, 3, 16, 0, 2))]


def expected(model: Tiny, batches: list[Batch]) -> float:
    """torch's own mean over all labels of all batches at once, in float64."""
    tokens, labels = (torch.cat([getattr(one, name) for one in batches]).flatten() for name in ("tokens", "labels"))
    return nn.functional.cross_entropy(model.table.weight.double()[tokens], labels, ignore_index=IGNORE).item()


def test_it_is_the_mean_over_tokens_not_over_batches():
    model = Tiny()
    found = evaluate(forward_of(model), UNEVEN, Whole(), alone, model=model)
    assert found.loss == pytest.approx(expected(model, UNEVEN), rel=1e-6)
    assert found.weights == {"language": 38}
    assert found.losses == {"language": found.loss}
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    each = [evaluate(forward_of(model), [one], Whole(), alone, model=model).loss for one in UNEVEN[:4]]
    assert abs(sum(each) / len(each) - found.loss) > 0.02  # the mean of means is something else


def test_how_the_set_is_cut_over_ranks_changes_nothing():
    model = Tiny()
    whole = evaluate(forward_of(model), UNEVEN, Whole(), alone, model=model)
    parts = []

    def gather(terms: Terms) -> Terms:
        parts.append(terms)
        return terms

    for share in (UNEVEN[:2], UNEVEN[2:]):
        evaluate(forward_of(model), share, Whole(), gather, model=model)
    sums, counts = parts[0] + parts[2], parts[1] + parts[3]

    def total(terms: Terms) -> Terms:  # what a rank with the first share would be told
        return sums if terms["language"] == parts[0]["language"] else counts

    assert evaluate(forward_of(model), UNEVEN[:2], Whole(), total, model=model).loss == pytest.approx(
        whole.loss, rel=1e-12
    )


def test_a_rank_whose_rows_are_all_padding_takes_part():
    model = Tiny()
    padding = batch(9, labelled=0)
    found = evaluate(forward_of(model), [*UNEVEN, padding, padding], Whole(), alone, model=model)
    assert found.loss == pytest.approx(expected(model, UNEVEN), rel=1e-6)


def test_nothing_of_a_batch_is_kept():
    # PB-058: as many outputs live at once in a set of 300 as in one of 3.
    model = Tiny()
    most = {}
    for count in (3, 300):
        objective = Whole()
        evaluate(forward_of(model), (batch(seed) for seed in range(count)), objective, alone, model=model)
        gc.collect()
        assert len(objective.living) == 0
        most[count] = objective.most_living
    assert most[300] == most[3] <= 2


def test_the_model_is_as_it_was():
    model = Tiny()
    model.train()
    model.table.eval()  # a part that was put to rest stays at rest
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(forward_of(model), UNEVEN, Whole(), alone, model=model)
    assert (model.training, model.dropout.training, model.table.training) == (True, True, False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(ZeroDivisionError), resting(model):
        assert not model.dropout.training
        _ = 1 / 0
    assert model.dropout.training


def test_no_gradient_is_recorded():
    model = Tiny()
    seen = []

    def forward(one: Batch) -> Output:
        hidden = model(one.tokens)
        seen.append(hidden.requires_grad)
        return Output(hidden=hidden, heads={})

    evaluate(forward, UNEVEN[:1], Whole(), alone, model=model)
    assert seen == [False]


def test_half_precision_sums_do_not_lose_the_small_ones():
    class Half(Whole):
        def loss(self, out, batch):
            return Terms(language=torch.tensor(1.0, dtype=torch.bfloat16))

        def count(self, batch):
            return Terms(language=torch.tensor(1))

    model = Tiny()
    many = [UNEVEN[0]] * 1000  # in bf16 a sum of ones ends at 256
    assert evaluate(forward_of(model), many, Half(), alone).loss == 1.0


def test_a_set_without_labels_is_refused():
    with pytest.raises(InputError, match=r"data\.validation"):
        evaluate(forward_of(Tiny()), [batch(1, labelled=0)], Whole(), alone)
    with pytest.raises(InputError, match=r"data\.validation"):
        evaluate(forward_of(Tiny()), [], Whole(), alone)


class Source:
    def __init__(self) -> None:
        self.samples = 40

    def take(self, micros):
        self.samples += 2
        return [batch(self.samples)] * micros

    def state(self):
        return {"samples": self.samples}

    def seek(self, state):
        self.samples = state["samples"]


def test_a_sweep_starts_at_the_beginning_each_time():
    source = Source()
    first = [one.tokens for one in sweep(source, updates=3, micros=2)]
    again = [one.tokens for one in sweep(source, updates=3, micros=2)]
    assert len(first) == 6
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert torch.equal(first[0], batch(2).tokens)


def test_stopping_waits_its_patience_and_keeps_the_best():
    rule = Stopping(patience=3)
    losses = [5.0, 4.0, 4.5, 4.1, 3.9, 4.0, 3.9, math.nan]
    answers = [rule.see(10 * (k + 1), loss) for k, loss in enumerate(losses)]
    assert answers == [False] * 7 + [True]
    assert (rule.best, rule.best_step) == (3.9, 50)


def test_a_gain_smaller_than_min_delta_counts_as_none_but_may_be_the_best():
    rule = Stopping(patience=2, min_delta=0.5)
    assert [rule.see(step, loss) for step, loss in ((1, 4.0), (2, 3.9), (3, 3.8))] == [False, False, True]
    assert (rule.best, rule.best_step) == (3.8, 3)
    slow = Stopping(patience=2, min_delta=0.5)
    assert [slow.see(step, 4.0 - 0.3 * step) for step in range(1, 7)] == [False, False, False, False, False, False]


def test_the_rule_goes_on_from_its_state():
    whole, first = Stopping(patience=3, min_delta=0.1), Stopping(patience=3, min_delta=0.1)
    losses = [5.0, 4.0, 3.95, 3.97, 4.2]
    for k, loss in enumerate(losses[:3]):
        whole.see(k, loss)
        first.see(k, loss)
    second = Stopping(patience=3, min_delta=0.1)
    second.restore(first.state())
    assert [second.see(k, losses[k]) for k in (3, 4)] == [whole.see(k, losses[k]) for k in (3, 4)] == [False, True]
    fresh = Stopping(patience=3)
    fresh.restore(Stopping(patience=3).state())
    assert fresh.best == math.inf


def test_defaults():
    assert Evaluate().eval_steps == 50
    assert Evaluate().early_stopping is None
