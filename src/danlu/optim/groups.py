"""Which weights decay and which do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Group:
    """Weights of one role, which are updated alike."""

    role: str
    weight_decay: float
    parameters: Mapping[str, nn.Parameter]

    @property
    def count(self) -> int:
        """Numbers in it, over all ranks."""
        return sum(parameter.numel() for parameter in self.parameters.values())


def split(
    named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float, roles: Mapping[str, str] | None = None
) -> list[Group]:
    """Every trained weight is in exactly one group, by its role: matrices and embedding tables decay; norms, biases
    and all other 1-D weights do not. A weight without a role is a matrix or a vector.
    """
    found: dict[tuple[str, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            decays = _matrix(parameter)
            role = (roles or {}).get(name, "matrix" if decays else "vector")
            found.setdefault((role, decays), {})[name] = parameter
    return [Group(role, weight_decay if decays else 0.0, weights) for (role, decays), weights in found.items()]


def _matrix(parameter: Tensor) -> bool:
    return parameter.dim() >= 2
