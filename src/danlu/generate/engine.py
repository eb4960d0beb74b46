"""Many prompts in one batch go on, until each has ended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from danlu.core.contracts import Cache, Head
from danlu.core.errors import Failure, InputError
from danlu.core.world import generator
from danlu.generate.cache import KeyValues
from danlu.generate.pick import Pick

CPU = torch.device("cpu")


class Forward(Protocol):
    """A model up to its hidden states, as models.stack.Trunk."""

    def __call__(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, packed: bool, cache: Cache | None
    ) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked of the model.

    max_new_tokens  how far each prompt goes on, at most; it may end before
    limit           tokens that the model can read: its largest position + 1
    vocabulary      ids that may be drawn: those below it (a model may have spare rows)
    end             ids after which a row has ended
    cached          keep keys and values; without, each step reads everything again
    """

    max_new_tokens: int
    limit: int
    vocabulary: int
    end: Collection[int] = ()
    pick: Pick = field(default_factory=Pick)
    seed: int = 0
    cached: bool = True


def generate(
    forward: Forward, head: Head, prompts: Sequence[Sequence[int]], ask: Ask, *, device: torch.device = CPU
) -> Iterator[list[int | None]]:
    """The prompts' next ids as they come: one id a prompt, its end id included, then None.

    Row b draws from a stream of its own, made of (seed, b): a prompt's text depends neither on the other rows nor on
    whether keys and values are cached. Raises InputError, before anything runs, for a prompt that is empty, too long or
    holds an unknown id.
    """
    _check(prompts, ask)
    return _steps(forward, head, prompts, ask, device)


def complete(
    forward: Forward, head: Head, prompts: Sequence[Sequence[int]], ask: Ask, *, device: torch.device = CPU
) -> list[list[int]]:
    """The new ids of each prompt, all of them, its end id included."""
    new: list[list[int]] = [[] for _ in prompts]
    for ids in generate(forward, head, prompts, ask, device=device):
        for row, token in zip(new, ids):
            if token is not None:
                row.append(token)
    return new


def _check(prompts: Sequence[Sequence[int]], ask: Ask) -> None:
    if ask.max_new_tokens < 1:
        raise InputError(f"max_new_tokens must be at least 1, not {ask.max_new_tokens}.")
    for prompt in prompts:
        if not len(prompt):
            raise InputError("The prompt is empty: give at least one token to go on from.")
        if min(prompt) < 0 or max(prompt) >= ask.vocabulary:
            wrong = next(i for i in prompt if not 0 <= i < ask.vocabulary)
            raise InputError(f"The prompt holds the id {wrong}, but the vocabulary ends at {ask.vocabulary - 1}.")
        if len(prompt) + ask.max_new_tokens > ask.limit:
            raise InputError(
                f"A prompt of {len(prompt)} tokens and {ask.max_new_tokens} new ones are more than the {ask.limit} "
                "that the model can read: shorten the prompt, or ask for fewer."
            )


def _steps(
    forward: Forward, head: Head, prompts: Sequence[Sequence[int]], ask: Ask, device: torch.device
) -> Iterator[list[int | None]]:
    tokens, documents = _aligned(prompts)
    positions = (documents.cumsum(1) - 1).clamp(min=0)
    packed = not bool(documents.all())
    tokens, documents, positions = tokens.to(device), documents.to(device), positions.to(device)
    draws = [generator(ask.seed, "generate", row) for row in range(len(prompts))]
    cache = KeyValues(limit=tokens.shape[1] + ask.max_new_tokens) if ask.cached else None
    ended = [False] * len(prompts)
    end = frozenset(ask.end)
    for _ in range(ask.max_new_tokens):
        # no_grad must not be held while the caller works: it would be in force there too
        with torch.no_grad():
            held = 0 if cache is None else cache.length
            hidden = forward(tokens[:, held:], positions[:, held:], documents, packed=packed, cache=cache)
            scores = head.logits(hidden[:, -1])[:, : ask.vocabulary]
            if not scores.isfinite().all():
                raise Failure("The model's scores are not finite: its weights are damaged, or its training diverged.")
            chosen = ask.pick(scores, draws)
        ids = [None if gone else int(token) for gone, token in zip(ended, chosen)]
        ended = [gone or token in end for gone, token in zip(ended, ids)]
        yield ids
        if all(ended):
            return
        tokens = torch.cat((tokens, chosen[:, None].to(device)), 1)
        documents = torch.cat((documents, torch.ones_like(documents[:, :1])), 1)
        positions = torch.cat((positions, positions[:, -1:] + 1), 1)


def _aligned(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Tokens and documents [B, S] of prompts that end together; what stands before a shorter one is a document apart.

    So the last column is every row's last token, and no row reads its padding.
    """
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    documents = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return tokens, documents
