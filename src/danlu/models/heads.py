"""The ends of a model: what its last hidden states are asked. Whole logits never exist unless they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from danlu.core.batch import IGNORE

# Rows of logits that exist at a time. Products of a thousand rows run at full speed, more rows only take memory.
ROWS = 1024
# With a large vocabulary a thousand rows are much memory too, most of it touched for the first time at every call.
BYTES = 64 * 2**20


class LanguageHead(nn.Module):
    """Scores tokens: logits = hidden · weightᵀ, no bias (implements core.contracts.Head).

    weight [V, D] is its own, or, tied, the very Parameter of the embedding. Under autocast products are made in its
    dtype, log-sum-exp and sums in at least fp32. rows: how many rows of logits may exist at a time; BYTES bounds them
    too.
    """

    roles: ClassVar[dict[str, str]] = {"weight": "vocab"}

    def __init__(
        self, hidden_size: int, vocab_size: int, weight: nn.Parameter | None = None, *, rows: int = ROWS
    ) -> None:
        super().__init__()
        if weight is not None and tuple(weight.shape) != (vocab_size, hidden_size):
            raise ValueError(f"a tied weight of shape {tuple(weight.shape)} is not ({vocab_size}, {hidden_size})")
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size)) if weight is None else weight
        self.rows = rows

    def nll(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed -log p of the labels that are not IGNORE: 0-d, at least fp32.

        hidden [..., D], labels [...]. The gradient is made here, chunk by chunk, and only scaled in the backward, which
        can therefore run once only.
        """
        grad = torch.is_grad_enabled()
        return _Nll.apply(hidden, self.weight, labels, self.rows, grad)

    def logp(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """log p of each label, shaped as labels, at least fp32; exactly 0 where the label is IGNORE.

        The backward makes the logits again, chunk by chunk: what each token weighs is not known in the forward.
        """
        return _Logp.apply(hidden, self.weight, labels, self.rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Whole logits, [..., V]."""
        return F.linear(hidden, self.weight)


class _Chunks:
    """hidden and labels as flat rows, cut for one buffer of logits that every chunk is written to.

    Rows whose label is IGNORE are read as zeros, so that nothing they hold (NaN too) reaches value or gradient.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> None:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if autocast else weight.dtype  # of products
        self.exact = torch.promote_types(self.dtype, torch.float32)  # of log-sum-exp and sums
        if weight.dtype == torch.float64:  # autocast leaves float64 alone
            self.dtype = self.exact = torch.float64
        self.weight = weight.to(self.dtype)
        self.asked = labels.reshape(-1) != IGNORE
        self.labels = torch.where(self.asked, labels.reshape(-1), 0)
        self.hidden = torch.where(self.asked[:, None], hidden.reshape(-1, hidden.shape[-1]).to(self.dtype), 0)
        most = max(1, min(rows, BYTES // (weight.shape[0] * self.exact.itemsize)))
        count = len(self.labels)
        pieces = max(1, -(-count // most))
        self.size = -(-count // pieces)  # equal chunks: a small last one would run slowly
        self.buffer = hidden.new_empty(self.size, weight.shape[0], dtype=self.exact)
        self.count = count

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Each chunk's rows and its logits, in at least fp32; they are overwritten by the next chunk's."""
        for start in range(0, self.count, self.size):
            part = slice(start, min(start + self.size, self.count))
            logits = self.buffer[: part.stop - part.start]
            if self.dtype == self.exact:
                torch.mm(self.hidden[part], self.weight.t(), out=logits)
            else:
                logits.copy_(torch.mm(self.hidden[part], self.weight.t()))
            yield part, logits

    def give(self, part: slice, of_logits: Tensor, of_hidden: Tensor | None, of_weight: Tensor | None) -> None:
        """A chunk's gradient of logits is carried on: written to its rows of hidden's, added to weight's."""
        of_logits = of_logits.to(self.dtype)
        if of_hidden is not None:
            torch.mm(of_logits, self.weight, out=of_hidden[part])
        if of_weight is None:
            return
        if self.dtype == of_weight.dtype:
            of_weight.addmm_(of_logits.t(), self.hidden[part])
        else:
            of_weight.add_(torch.mm(of_logits.t(), self.hidden[part]))


class _Nll(torch.autograd.Function):
    """The sum of -log p, with the gradient made on the way: d logits = p - onehot, for hidden and weight at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, grad: bool) -> Tensor:
        chunks = _Chunks(hidden, weight, labels, rows)
        to_hidden, to_weight = (grad and needed for needed in ctx.needs_input_grad[:2])
        losses = chunks.hidden.new_zeros(chunks.count, dtype=chunks.exact)
        of_hidden = torch.empty_like(chunks.hidden) if to_hidden else None
        of_weight = torch.zeros_like(weight, dtype=chunks.exact) if to_weight else None
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in chunks:
                labels_here = chunks.labels[part, None]
                label_logits = logits.gather(1, labels_here)
                total = _softmax(logits)
                losses[part] = (total - label_logits).squeeze(1)
                if not (to_hidden or to_weight):
                    continue
                logits.scatter_add_(1, labels_here, -torch.ones_like(label_logits))
                chunks.give(part, logits, of_hidden, of_weight)
        if of_hidden is not None:
            of_hidden = torch.where(chunks.asked[:, None], of_hidden, 0).to(hidden.dtype).view(hidden.shape)
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        ctx.made = (of_hidden, of_weight)
        return torch.where(chunks.asked, losses, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.made is None:
            raise RuntimeError("the gradient of a language head's nll was already given: it can be asked for once only")
        # Scaled in place, and given away: weight's gradient is as large as the embedding, a copy would cost memory.
        of_hidden, of_weight = (None if made is None else made.mul_(upstream) for made in ctx.made)
        ctx.made = None
        return of_hidden, of_weight, None, None, None


class _Logp(torch.autograd.Function):
    """log p of each label; d logits = upstream · (onehot - p), from logits made again in the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        chunks = _Chunks(hidden, weight, labels, rows)
        scores = chunks.hidden.new_zeros(chunks.count, dtype=chunks.exact)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in chunks:
                label_logits = logits.gather(1, chunks.labels[part, None])
                scores[part] = (label_logits - torch.logsumexp(logits, 1, keepdim=True)).squeeze(1)
        ctx.save_for_backward(hidden, weight, labels)
        ctx.rows, ctx.dtype = rows, chunks.dtype
        return torch.where(chunks.asked, scores, 0).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels = ctx.saved_tensors
        device = hidden.device.type
        to_hidden, to_weight = ctx.needs_input_grad[:2]
        # The products of the forward, in its dtype, also when the backward runs outside its autocast.
        with torch.autocast(device, dtype=ctx.dtype, enabled=ctx.dtype != weight.dtype):
            chunks = _Chunks(hidden, weight, labels, ctx.rows)
        of_hidden = torch.empty_like(chunks.hidden) if to_hidden else None
        of_weight = torch.zeros_like(weight, dtype=chunks.exact) if to_weight else None
        upstream = torch.where(chunks.asked, upstream.reshape(-1).to(chunks.exact), 0)[:, None]
        with torch.autocast(device, enabled=False):
            for part, logits in chunks:
                _softmax(logits)
                logits.mul_(-upstream[part])
                logits.scatter_add_(1, chunks.labels[part, None], upstream[part])
                chunks.give(part, logits, of_hidden, of_weight)
        if of_hidden is not None:
            of_hidden = torch.where(chunks.asked[:, None], of_hidden, 0).to(hidden.dtype).view(hidden.shape)
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        return of_hidden, of_weight, None, None


def _softmax(logits: Tensor) -> Tensor:
    """logits [n, V] become p, in place; gives back their log-sum-exp, [n, 1]."""
    largest = logits.amax(1, keepdim=True)
    logits.sub_(largest).exp_()
    total = logits.sum(1, keepdim=True)
    logits.div_(total)
    return largest + total.log()
