"""Which weights are updated alike: what decays, and how each role's rate stands to the run's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from danlu.core.config import setting

WIDE = ("matrix", "head")  # roles whose inputs grow with the model's width


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The rate of the weights of one role, against the run's.

    With a width it follows muP (Yang et al. 2022, arXiv:2203.03466, table 3): under Adam the rate of a matrix goes as
    1 / its inputs, so that what was tuned at one width is right at another.
    """

    role: Literal["embedding", "head", "matrix", "norm", "bias"] = setting(doc="whose rate it is")
    rate: float = setting(1.0, "what learning_rate is multiplied by", at_least=0)
    width: int | None = setting(
        None, "inputs of a matrix at which that is right; others are multiplied by width / inputs (muP)", at_least=1
    )

    def __post_init__(self) -> None:
        if self.width is not None and self.role not in WIDE:
            raise ValueError(f"width: the rate of {self.role} weights does not go by width; leave it out")

    def of(self, weight: Tensor) -> float:
        """What learning_rate is multiplied by for this weight, [outputs, inputs]."""
        return self.rate if self.width is None else self.rate * self.width / weight.shape[-1]


@dataclass(frozen=True, slots=True)
class Group:
    """Weights of one role, which are updated alike: with one decay, at `rate` times the run's learning rate."""

    role: str
    weight_decay: float
    parameters: Mapping[str, nn.Parameter]
    rate: float = 1.0

    @property
    def count(self) -> int:
        """Numbers in it, over all ranks."""
        return sum(parameter.numel() for parameter in self.parameters.values())


def split(
    named: Iterable[tuple[str, nn.Parameter]],
    *,
    weight_decay: float,
    roles: Mapping[str, str] | None = None,
    rates: Sequence[Rate] = (),
) -> list[Group]:
    """Every trained weight is in exactly one group, by its role and rate: matrices and embedding tables decay; norms,
    biases and all other 1-D weights do not. A weight without a role is a matrix or a vector.
    """
    by_role = {rate.role: rate for rate in rates}
    found: dict[tuple[str, bool, float], dict[str, nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            decays = _matrix(parameter)
            role = (roles or {}).get(name, "matrix" if decays else "vector")
            own = next((rate.of(parameter) for given, rate in by_role.items() if given == role), 1.0)
            found.setdefault((role, decays, own), {})[name] = parameter
    return [
        Group(role, weight_decay if decays else 0.0, weights, rate) for (role, decays, rate), weights in found.items()
    ]


def twice(rates: Sequence[Rate]) -> str | None:
    """A role that has two answers, if there is one."""
    roles = [rate.role for rate in rates]
    return next((role for role in roles if roles.count(role) > 1), None)


def _matrix(parameter: Tensor) -> bool:
    return parameter.dim() >= 2
