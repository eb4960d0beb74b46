"""The optimisation layer: what a step may ask of it, and its state by parameter name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from danlu.optim.average import KIND, Averages
from danlu.optim.clip import clip
from danlu.optim.common import Common, Kept
from danlu.optim.groups import split
from danlu.optim.own import laid
from danlu.optim.states import Beside, Carry, States, whole


class OptimLayer:
    """Turns gradients into an update of the weights.

    The rate is a pure function of the update's number, set before each update. State is given out and taken in by
    parameter name, never by position, so that a moment can only land on its own weight. carry: how an update is
    carried out by torch's optimiser, where that is not simply its step. states: where they are between updates.
    """

    def __init__(
        self,
        settings: Common,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        total: int,
        roles: Mapping[str, str] | None = None,
        carry: Carry | None = None,
    ) -> None:
        self.settings = settings
        self.total = total
        self.groups = split(named, weight_decay=settings.weight_decay, roles=roles, rates=settings.rates)
        self.names = {p: name for group in self.groups for name, p in group.parameters.items()}
        self.roles = {name: group.role for group in self.groups for name in group.parameters}
        self.torch = settings.over(self.groups)
        self.carry = carry or whole
        self.states: States = Beside(self.torch, self.carry)
        self.weights = {name: parameter for parameter, name in self.names.items()}
        self.averages = Averages(settings.average, self.weights) if settings.average else None

    def rate(self, update: int) -> float:
        """The learning rate of an update, 1 to total."""
        return self.settings.learning_rate * self.settings.schedule.share(update, self.total)

    def clip(self, norm: Tensor) -> None:
        """The global norm of the gradients, which is given, is at most max_grad_norm, then each number of them at most
        max_grad_value.
        """
        clip(self.names, norm.item(), max_norm=self.settings.max_grad_norm, max_value=self.settings.max_grad_value)

    def step(self, update: int) -> None:
        """The weights have moved once, at the rate of this update."""
        share = self.settings.schedule.share(update, self.total)
        for group in self.torch.param_groups:
            group["lr"] = group["peak"] * share
        moved = [name for name, parameter in self.weights.items() if parameter.grad is not None]
        self.states.step(update)
        if self.averages is not None:
            self.averages.follow(update, moved)

    def zero(self) -> None:
        """Gradients are gone, and their memory with them."""
        self.torch.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Every moment and counter: `exp_avg/NAME` and the like. Weights that never had a gradient have none."""
        return {
            f"{kind}/{name}": value
            for parameter, name in self.names.items()
            for kind, value in self.states.state(parameter).items()
        } | (self.averages.state() if self.averages is not None else {})

    def here(self) -> Iterator[Tensor]:
        """What of `state` takes memory between updates: all that is not kept elsewhere."""
        for kinds in self.torch.state.values():
            yield from kinds.values()
        if self.averages is not None:
            yield from self.averages.state().values()

    def still(self, key: str) -> bool:
        """Whether this part of `state` stays as it was given, whatever updates follow, for as long as it is held."""
        return self.states.still and not key.startswith(f"{KIND}/")

    def kept(self, name: str) -> dict[str, Kept]:
        """What `state` holds of a weight that has moved, by kind."""
        weight = self.weights[name]
        return self.settings.kept(weight.shape, dtype=weight.dtype, role=self.roles[name])

    @property
    def bytes(self) -> int:
        """Bytes of all that `state` holds once every weight has moved, over all ranks that hold a part."""
        return sum(kept.bytes for name in self.weights for kept in self.kept(name).values())

    def restore(self, portions: Iterable[Mapping[str, Tensor]]) -> None:
        """Every moment and counter is as the portions of a `state` say (this rank's part of each), matched by name; a
        name that no weight has is an error. Each portion is put in its place before the next is asked for.
        """
        averages: dict[str, Tensor] = {}
        self.states.clear()
        for state in portions:
            for key, value in state.items():
                kind, name = key.split("/", 1)
                placed = laid(value, self.kept(name)[kind], self.weights[name])
                if kind == KIND:
                    averages[key] = placed
                else:
                    self.states.restore(self.weights[name], kind, placed)
        if self.averages is not None:
            self.averages.restore(averages)
