"""Which weights decay and which do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Group:
    """Weights that are updated alike."""

    name: str
    weight_decay: float
    parameters: Mapping[str, nn.Parameter]

    @property
    def count(self) -> int:
        """Numbers in it, over all ranks."""
        return sum(parameter.numel() for parameter in self.parameters.values())


def split(named: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float) -> list[Group]:
    """Every trained weight is in exactly one group: matrices and embedding tables decay; norms, biases and all other
    1-D weights do not.
    """
    matrices: dict[str, nn.Parameter] = {}
    vectors: dict[str, nn.Parameter] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            (matrices if _matrix(parameter) else vectors)[name] = parameter
    groups = [Group("decay", weight_decay, matrices), Group("no decay", 0.0, vectors)]
    return [group for group in groups if group.parameters]


def _matrix(parameter: Tensor) -> bool:
    return parameter.dim() >= 2
