"""The optimisation layer: what a step may ask of it, and its state by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from danlu.optim.common import Common
from danlu.optim.groups import split


class OptimLayer:
    """Turns gradients into an update of the weights.

    The rate is a pure function of the update's number, set before each update. State is given out and taken in by
    parameter name, never by position, so that a moment can only land on its own weight.
    """

    def __init__(
        self,
        settings: Common,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        total: int,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        self.settings = settings
        self.total = total
        self.groups = split(named, weight_decay=settings.weight_decay, roles=roles)
        self.names = {p: name for group in self.groups for name, p in group.parameters.items()}
        self.torch = settings.over(self.groups)

    def rate(self, update: int) -> float:
        """The learning rate of an update, 1 to total."""
        return self.settings.learning_rate * self.settings.schedule.share(update, self.total)

    def clip(self, norm: Tensor) -> None:
        """Gradients are scaled down so that their global norm, which is given, is at most max_grad_norm."""
        limit = self.settings.max_grad_norm
        if not limit or norm.item() <= limit:
            return
        share = limit / (norm.item() + 1e-6)
        torch._foreach_mul_([_local(p.grad) for p in self.names if p.grad is not None], share)

    def step(self, update: int) -> None:
        """The weights have moved once, at the rate of this update."""
        share = self.settings.schedule.share(update, self.total)
        for group in self.torch.param_groups:
            group["lr"] = group["peak"] * share
        self.torch.step()

    def zero(self) -> None:
        """Gradients are gone, and their memory with them."""
        self.torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every moment and counter: `exp_avg/NAME` and the like. Weights that never had a gradient have none."""
        return {
            f"{kind}/{name}": value
            for parameter, name in self.names.items()
            for kind, value in self.torch.state.get(parameter, {}).items()
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Every moment and counter is as `state` says, matched by name; a name that no weight has is an error."""
        by_name = {name: parameter for parameter, name in self.names.items()}
        self.torch.state.clear()
        for key, value in state.items():
            kind, _, name = key.partition("/")
            self.torch.state[by_name[name]][kind] = value


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
