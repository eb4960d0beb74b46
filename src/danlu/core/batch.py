"""One micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

IGNORE = -100  # a label that asks nothing; the value torch's cross entropy ignores


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of equal length, packed: one row holds one or more documents, or pieces of them, side by side.

    tokens     [B, S] int64, what the model reads
    labels     [B, S] int64, what position s is to predict: the next token of the same document (the shift is made
               here, in the data, and nowhere else); IGNORE where nothing is asked, so also at a document's last token
    positions  [B, S] int64, restart at 0 at each document and at a continuation that opens a row
    documents  [B, S] int64, which document of the row a token belongs to: 0, 1, 2 … never falling within a row
    packed     whether any row holds more than one document (known on the host, so that no device need be asked)
    samples    one id a row, for the log when a step goes wrong; empty for a row that holds only padding
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    packed: bool
    samples: tuple[str, ...]
    images: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def rows(self, start: int, stop: int) -> Batch:
        """Rows start to stop of it."""
        documents = self.documents[start:stop]
        return replace(
            self,
            tokens=self.tokens[start:stop],
            labels=self.labels[start:stop],
            positions=self.positions[start:stop],
            documents=documents,
            packed=self.packed and bool((documents[:, -1] > 0).any()),
            samples=self.samples[start:stop],
            images=None if self.images is None else self.images[start:stop],
            extra={name: value[start:stop] for name, value in self.extra.items()},
        )

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; the copy overlaps with what runs there where the memory is pinned."""
        move = lambda value: value.to(device, non_blocking=True)  # noqa: E731
        return replace(
            self,
            tokens=move(self.tokens),
            labels=move(self.labels),
            positions=move(self.positions),
            documents=move(self.documents),
            images=None if self.images is None else move(self.images),
            extra={name: move(value) for name, value in self.extra.items()},
        )
