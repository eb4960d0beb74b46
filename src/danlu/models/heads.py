"""The ends of a model: what its last hidden states are asked. Whole logits never exist unless they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.core.batch import IGNORE
from danlu.models.product import faster, multiply

# Rows of logits that exist at a time. Products of about a thousand rows run at full speed; fewer carry the weight's
# gradient through memory too often, more only take room.
ROWS = 1024
# With a large vocabulary a thousand rows are much memory too, most of it touched for the first time at every call.
LOGITS = 2**25
# Logits that are turned into probabilities at a time, in at least fp32. On a CPU not as few as its caches would like:
# blocks of 2**18 are a tenth faster on idle cores, but far slower where threads wait for busy ones at every block.
# Elsewhere, enough to keep the device busy.
BLOCK = 2**22
BLOCK_DEVICE = 2**24
# In fp16 a probability below 6e-5 has few bits and one below 3e-8 none, where the loss's scale is not known yet: until
# then probabilities are this much larger.
FACTOR = 4096.0


class LanguageHead(nn.Module):
    """Scores tokens: logits = hidden · weightᵀ, no bias (implements core.contracts.Head).

    weight [V, D] is its own, or, tied, the very Parameter of the embedding. Products are made in the dtype that
    `products` says, or autocast's where there is one; log-sum-exp and sums in at least fp32. rows: how many rows of
    logits may exist at a time; LOGITS bounds them too.
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
        self.products: torch.dtype | None = None

    def nll(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Summed -log p of the labels that are not IGNORE: 0-d, at least fp32.

        hidden [..., D], labels [...]. The gradient is made here, chunk by chunk, and only scaled in the backward, which
        can therefore run once only.
        """
        return _Nll.apply(hidden, self.weight, labels, self.rows, self._dtype(), torch.is_grad_enabled())

    def logp(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """log p of each label, shaped as labels, at least fp32; exactly 0 where the label is IGNORE.

        The backward makes the logits again, chunk by chunk: what each token weighs is not known in the forward.
        """
        return _Logp.apply(hidden, self.weight, labels, self.rows, self._dtype())

    def logits(self, hidden: Tensor) -> Tensor:
        """Whole logits, [..., V]."""
        if self.products is None:
            return F.linear(hidden, self.weight)
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.to(self._dtype()), self.weight.to(self._dtype()))

    def _dtype(self) -> torch.dtype:
        """Of products: what was said, else autocast's where there is one, else the weight's; float64 stays it."""
        device = self.weight.device.type
        if self.weight.dtype == torch.float64:
            return self.weight.dtype
        if self.products is not None:
            return self.products
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.weight.dtype


class _Chunks:
    """hidden and labels as flat rows, cut so that one buffer serves the logits of every chunk.

    Rows whose label is IGNORE are read as zeros, so that nothing they hold (NaN too) reaches value or gradient.
    narrow: fp16, whose numbers end at 6e-8 and at 65504. There the gradients of hidden and weight are gathered in fp32.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype) -> None:
        self.dtype = dtype  # of products; log-sum-exp and sums are made in exact
        self.exact = torch.promote_types(dtype, torch.float32)
        self.narrow = dtype == torch.float16
        self.weight = weight.to(dtype)
        self.asked = labels.reshape(-1) != IGNORE
        self.labels = torch.where(self.asked, labels.reshape(-1), 0)
        self.hidden = torch.where(self.asked[:, None], hidden.reshape(-1, hidden.shape[-1]).to(dtype), 0)
        self.count = len(self.labels)
        most = max(1, min(rows, LOGITS // len(weight)))
        pieces = max(1, -(-self.count // most))
        self.size = -(-self.count // pieces)  # equal chunks: a small last one would run slowly
        by_onednn = faster(self.hidden[: self.size], self.weight)  # which has no way to write into a given buffer
        self.buffer = None if by_onednn else torch.empty(self.size, len(weight), dtype=dtype, device=hidden.device)
        self.product: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Each chunk's rows and its logits, [n, V], which are to be let go of before the next chunk's."""
        for start in range(0, self.count, self.size or 1):
            rows = slice(start, min(start + self.size, self.count))
            if self.buffer is None:
                yield rows, multiply(self.hidden[rows], self.weight)
                continue
            logits = self.buffer[: rows.stop - rows.start]
            torch.mm(self.hidden[rows], self.weight.t(), out=logits)
            yield rows, logits

    def score(
        self, rows: slice, logits: Tensor, *, gradient: bool, weights: Tensor | None = None, factor: float = 1
    ) -> Tensor:
        """log p of a chunk's labels, [n]; with gradient, logits become that of -log p: factor · weights · (p - onehot).

        Made block by block in at least fp32. Softmax is one pass where log-sum-exp is several, and gives it too: at the
        largest logit z, log p = z - log-sum-exp.
        """
        labels = self.labels[rows, None]
        scores = torch.empty_like(labels, dtype=self.exact)
        size = max(1, (BLOCK if logits.is_cpu else BLOCK_DEVICE) // logits.shape[1])
        for start in range(0, len(labels), size):
            part = slice(start, start + size)
            block = logits[part].to(self.exact)
            p = torch.softmax(block, 1)
            log_sum = block.amax(1, keepdim=True) - p.amax(1, keepdim=True).log()
            torch.sub(block.gather(1, labels[part]), log_sum, out=scores[part])
            if gradient:
                p.scatter_add_(1, labels[part], p.new_full((len(p), 1), -1))
                if factor != 1:
                    p.mul_(factor)
                logits[part] = p if weights is None else p.mul_(weights[part, None])
        return scores.squeeze(1)

    def carry(self, rows: slice, of_logits: Tensor, of_hidden: Tensor | None, of_weight: Tensor | None) -> None:
        """A chunk's gradient of logits is carried on: written to its rows of hidden's, added to weight's."""
        if self.narrow:
            if of_hidden is not None:
                of_hidden[rows] = _exact_product(of_logits, self.weight)
            if of_weight is not None:
                of_weight.add_(_exact_product(of_logits.t(), self.hidden[rows]))
            return
        if of_hidden is not None:
            torch.mm(of_logits, self.weight, out=of_hidden[rows])
        if of_weight is None:
            return
        if self.dtype == self.exact:
            of_weight.addmm_(of_logits.t(), self.hidden[rows])
        else:
            self.product = torch.empty_like(self.weight) if self.product is None else self.product
            of_weight.add_(torch.mm(of_logits.t(), self.hidden[rows], out=self.product))

    def room(self, to_hidden: bool, to_weight: bool) -> tuple[Tensor | None, Tensor | None]:
        """Where the gradients that are needed will be gathered."""
        dtype = self.exact if self.narrow else self.dtype
        of_hidden = torch.empty_like(self.hidden, dtype=dtype) if to_hidden else None
        of_weight = torch.zeros_like(self.weight, dtype=self.exact) if to_weight else None
        return of_hidden, of_weight

    def settle(
        self, made: tuple[Tensor | None, Tensor | None], hidden: Tensor, weight: Tensor, *, last: bool = True
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gathered gradients in the shape and dtype of what they are of; of rows not asked, exactly zero.

        last: whether they will not be scaled any more; until then fp16's stay as they were gathered.
        """
        of_hidden, of_weight = made
        if of_hidden is not None:
            of_hidden = torch.where(self.asked[:, None], of_hidden, 0).view(hidden.shape)
        if last or not self.narrow:
            of_hidden, of_weight = _cast(of_hidden, hidden.dtype), _cast(of_weight, weight.dtype)
        return of_hidden, of_weight


class _Nll(torch.autograd.Function):
    """The sum of -log p, with the gradient made on the way."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype, grad: bool
    ) -> Tensor:
        chunks = _Chunks(hidden, weight, labels, rows, dtype)
        ctx.factor = FACTOR if chunks.narrow else 1
        needed = tuple(grad and need for need in ctx.needs_input_grad[:2])
        made = chunks.room(*needed)
        scores = torch.zeros_like(chunks.labels, dtype=chunks.exact)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in chunks:
                scores[part] = chunks.score(part, logits, gradient=any(needed), factor=ctx.factor)
                chunks.carry(part, logits, *made)
                del logits
        ctx.made = chunks.settle(made, hidden, weight, last=False)
        ctx.dtypes = hidden.dtype, weight.dtype
        return -torch.where(chunks.asked, scores, 0).sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        if ctx.made is None:
            raise RuntimeError("the gradient of a language head's nll was already given: it can be asked for once only")
        # Scaled in place, and given away: weight's gradient is as large as the embedding, a copy would cost memory.
        share = upstream / ctx.factor if ctx.factor != 1 else upstream
        scaled = [None if made is None else _cast(made.mul_(share), dtype) for made, dtype in zip(ctx.made, ctx.dtypes)]
        ctx.made = None
        return *scaled, None, None, None, None


class _Logp(torch.autograd.Function):
    """log p of each label; the backward makes the logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        chunks = _Chunks(hidden, weight, labels, rows, dtype)
        scores = torch.zeros_like(chunks.labels, dtype=chunks.exact)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in chunks:
                scores[part] = chunks.score(part, logits, gradient=False)
                del logits
        ctx.save_for_backward(hidden, weight, labels)
        ctx.rows, ctx.dtype = rows, dtype
        return torch.where(chunks.asked, scores, 0).view(labels.shape)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        hidden, weight, labels = ctx.saved_tensors
        chunks = _Chunks(hidden, weight, labels, ctx.rows, ctx.dtype)
        made = chunks.room(*ctx.needs_input_grad[:2])
        weights = torch.where(chunks.asked, -upstream.reshape(-1).to(chunks.exact), 0)
        with torch.autocast(hidden.device.type, enabled=False):
            for part, logits in chunks:
                chunks.score(part, logits, gradient=True, weights=weights[part])
                chunks.carry(part, logits, *made)
                del logits
        return *chunks.settle(made, hidden, weight), None, None, None


def _exact_product(left: Tensor, right: Tensor) -> Tensor:
    """left · right of fp16 numbers, in fp32, where nothing overflows."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _cast(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gradient is None else gradient.to(dtype)


def _refuse_second_derivatives() -> None:
    """In a backward: raises where its graph is kept, since the gradient would look like a constant there."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the gradient of a language head's nll or logp cannot be differentiated again (create_graph=True): "
            "score its logits instead"
        )
