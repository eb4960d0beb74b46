"""A small tree of settings for tests: it has one of everything that settings may hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.core.config import load, setting
from danlu.core.schema import At, Planned, Rules


@dataclass(frozen=True, kw_only=True)
class Rose:
    kind: Literal["rose"] = "rose"
    petals: int | Literal["auto"] = setting("auto", "how many", at_least=5)
    colours: tuple[float, float] = setting((0.9, 0.1), "red, and the rest", at_least=0, below=1)
    thorns: bool = True


@dataclass(frozen=True, kw_only=True)
class Fern:
    kind: Literal["fern"] = "fern"
    fronds: int = setting(3, "how many", at_least=1)


@dataclass(frozen=True, kw_only=True)
class Cutting:
    from_: str = setting(doc="the plant it was taken from")


@dataclass(frozen=True, kw_only=True)
class Seeds:
    path: str = setting(doc="the packet")
    weight: float = setting(1.0, "its share", above=0)


@dataclass(frozen=True, kw_only=True)
class Water:
    rate: float = setting(1e-3, "litres a second", above=0)
    mode: Literal["drip", "spray"] = "drip"

    def __post_init__(self) -> None:
        if self.mode == "spray" and self.rate > 1:
            raise ValueError("a spray takes at most 1 litre a second")


@dataclass(frozen=True, kw_only=True)
class Garden:
    name: str = setting(doc="what it is called")
    plant: Rose | Fern | Cutting = setting(Rose(), "what grows")
    seeds: list[str | Seeds] = setting([], "what is sown")
    fence: float | list[str] = setting(0.5, "a height, or its panels", at_least=0)
    water: Water = setting(Water(rate=0.25), "how it is watered")
    visitors: int | None = setting(None, "how many may come", at_least=1, suffixes=True)
    notes: str | None = None
    labels: dict[str, int] = setting({}, "numbers on sticks")
    open: bool = True


def _room(at: At) -> Iterator[tuple[str, str]]:
    visitors = at("visitors")
    if visitors is not None and at("plant.fronds") > visitors:
        yield "plant.fronds", "more fronds than visitors"


RULES = Rules(
    names={"irrigation_rate": "water.rate", "sprinkler": "water.mode: spray", "beds.count": "labels"},
    planned={
        "plant.kind": Planned(values=frozenset({"palm"}), built=("rose", "fern")),
        "water.heated": Planned(advice="water is cold"),
        "labels": Planned(values=frozenset({"auto"}), advice="name them"),
    },
    paths={"plant.from": frozenset({"wild"}), "seeds.*": frozenset(), "seeds.*.path": frozenset()},
    checks=(_room,),
)
FILE = Path("/plots/garden.yaml")


def grow(text: str, *typed: str, here: Path = Path("/elsewhere"), rules: Rules = RULES) -> Any:
    """The garden that a text and overrides write."""
    return load(Garden, text, file=FILE, overrides=typed, rules=rules, here=here)
