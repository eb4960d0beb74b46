"""Where an optimiser's states are between updates: beside the weights, or wherever memory keeps them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

Carry = Callable[[torch.optim.Optimizer, int], None]  # makes an update, given its number, of what the optimiser holds


class States(Protocol):
    """The states of all weights, by weight and kind; an update finds them, wherever they are.

    still: what `state` gave stays as it was, whatever updates follow, for as long as it is held.
    """

    @property
    def still(self) -> bool: ...

    def step(self, update: int) -> None:
        """Every weight that has a gradient has moved, and its states with it."""
        ...

    def state(self, weight: nn.Parameter) -> Mapping[str, Tensor]:
        """Every state of a weight; none where it never had a gradient."""
        ...

    def restore(self, weight: nn.Parameter, kind: str, value: Tensor) -> None:
        """This state of this weight is as given."""
        ...

    def clear(self) -> None:
        """No weight has a state."""
        ...


class Beside:
    """States lie in torch's own table, on the devices of their weights."""

    still = False

    def __init__(self, optimizer: torch.optim.Optimizer, carry: Carry) -> None:
        self.optimizer, self.carry = optimizer, carry

    def step(self, update: int) -> None:
        """Every weight that has a gradient has moved, and its states with it."""
        self.carry(self.optimizer, update)

    def state(self, weight: nn.Parameter) -> Mapping[str, Tensor]:
        """Every state of a weight; none where it never had a gradient."""
        held: Mapping[str, Tensor] = self.optimizer.state.get(weight, {})
        return held

    def restore(self, weight: nn.Parameter, kind: str, value: Tensor) -> None:
        """This state of this weight is as given."""
        self.optimizer.state[weight][kind] = value

    def clear(self) -> None:
        """No weight has a state."""
        self.optimizer.state.clear()


def whole(optimizer: torch.optim.Optimizer, update: int) -> None:
    """Torch's optimiser has made its step: how most updates are carried out."""
    optimizer.step()
