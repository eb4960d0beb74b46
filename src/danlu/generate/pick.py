"""The next token of its scores: temperature, top-k (arXiv:1805.04833), top-p (arXiv:1904.09751), greedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.core.config import setting
from danlu.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Pick:
    """How the next token is drawn; the three work one after the other, each on what the one before left."""

    temperature: float = setting(1.0, "what scores are divided by; 0: always the most probable token", at_least=0)
    top_k: int = setting(0, "draw from the k most probable tokens; 0: from all", at_least=0)
    top_p: float = setting(1.0, "draw from the fewest tokens that make up this probability", above=0, at_most=1)

    def __post_init__(self) -> None:
        """Senseless values are refused."""
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature must be a number of at least 0, not {self.temperature}.")
        if self.top_k < 0:
            raise InputError(f"top_k must be at least 0 (all tokens), not {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, not {self.top_p}.")

    def __call__(self, scores: Tensor, draws: Sequence[torch.Generator]) -> Tensor:
        """One token a row, [B] int64 on the CPU, of scores [B, V]; row b takes one number from draws[b].

        Each row has its own stream, so that what a row becomes does not depend on the others.
        """
        if self.temperature == 0:
            return scores.argmax(-1).cpu()
        # On the CPU, where a running sum has one order: a GPU's is refused by a deterministic run.
        probabilities = self.probabilities(scores.cpu()).to(torch.float64)
        points = torch.stack([torch.rand((), generator=draw, dtype=torch.float64) for draw in draws])
        cumulative = probabilities.cumsum(-1)
        # A little less than the whole, or rounding could reach past the last token that has a probability.
        points = points * cumulative[:, -1] * (1 - 2**-52)
        return torch.searchsorted(cumulative, points[:, None], right=True).squeeze(1)

    def probabilities(self, scores: Tensor) -> Tensor:
        """What each token is drawn with, [B, V], in at least fp32. At temperature 0, all on the most probable one."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.temperature == 0:
            return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1)
        scores = scores / self.temperature
        if 0 < self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < least, float("-inf"))
        if self.top_p < 1:
            ascending, order = scores.sort(descending=False)
            unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            unlikely[..., -1] = False  # the most probable one always stays
            scores = scores.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))
        return scores.softmax(-1)
