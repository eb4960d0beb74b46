"""Where things are kept never changes the mathematics: to the bit, against the same layout with everything in place.

On a CPU the device and the host are one place, so that most kinds are asked for past the settings, which would say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from danlu.core.world import World
from danlu.memory import offload
from danlu.memory.activations import Activations
from danlu.memory.offload import Offload
from danlu.memory.places import Host
from danlu.memory.states import StatesAway
from danlu.train.run import Run
from tests.equal.curves import Curve, curve, write_recipe
from tests.equal.gradients import Gradients, apart, gradients
from tests.equal.test_optimizers import KINDS
from tests.ranks import Ranks

MICRO = "batch.micro_batch_size=2"
# What is asked for past the settings, and with what else.
ASKED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "activations": ({"activations": True}, []),
    "activations, low": ({"activations": True}, ["memory.precision=bf16"]),
    "activations, recomputed": ({"activations": True}, ["memory.recompute=full"]),
    "activations, partly recomputed": ({"activations": True}, ["memory.recompute=selective"]),
    "states": ({"states": "host"}, []),
    "weights": ({"weights": True}, []),
    "all": ({"weights": True, "activations": True, "states": "host"}, ["memory.recompute=full"]),
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_recipe(tmp_path_factory.mktemp("equal")))


@contextmanager
def asked(given: dict[str, Any] | None) -> Iterator[list[Activations]]:
    """Inside it, runs keep things elsewhere as given, and in small portions. Gives what kept activations."""
    choose, begin, made = offload.choose, Activations.__init__, []
    place = Offload.place

    def watched(self: Activations, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, large=256, ahead=4096, **named)
        made.append(self)

    defaults = StatesAway.__init__.__kwdefaults__
    bucket = defaults["bucket"]
    defaults["bucket"] = 2**13
    Activations.__init__ = watched  # type: ignore[method-assign]
    if given is not None:
        offload.choose = lambda *_: Offload(**given)
        Offload.place = lambda self: Host(pin=False) if self.states == "host" else None  # type: ignore[method-assign]
    try:
        yield made
    finally:
        offload.choose, Activations.__init__, defaults["bucket"] = choose, begin, bucket  # type: ignore[method-assign]
        Offload.place = place  # type: ignore[method-assign]


def same(one: Curve, other: Curve) -> bool:
    """To the bit."""
    return (
        one.losses == other.losses
        and one.norms == other.norms
        and one.end.keys() == other.end.keys()
        and all(np.array_equal(one.end[name], other.end[name]) for name in one.end)
    )


def in_a_file(folder: str) -> list[str]:
    return ["memory.offload=[optimizer]", f"memory.offload_folder={folder}"]


def of_every_kind(world: World, recipe: str, folder: str) -> dict[str, tuple[Curve, Curve]]:
    """Each optimiser's curve with its states beside the weights, and with them in a file."""
    with asked(None):
        return {
            kind: (curve(world, recipe, [*given, MICRO]), curve(world, recipe, [*given, MICRO, *in_a_file(folder)]))
            for kind, given in (KINDS | {"pure": ["memory.precision=bf16_pure"]}).items()
        }


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_states_in_a_file(recipe: str, ranks: Ranks, tmp_path: Path, size: int) -> None:
    for rank in ranks.run(of_every_kind, recipe, str(tmp_path), size=size):
        for kind, (beside, away) in rank.items():
            assert same(beside, away), kind
    assert list(tmp_path.iterdir()) == [], "something was left in the folder"


def of_every_part(world: World, recipe: str) -> dict[str, tuple[Gradients, Gradients, Curve, Curve, int]]:
    """Gradients and curve with everything in place, the same with each part elsewhere, and how many bytes moved."""
    found = {}
    for name, (given, overrides) in ASKED.items():
        here = gradients(world, recipe, [MICRO, *overrides]), curve(world, recipe, [MICRO, *overrides])
        with asked(given) as made:
            there = gradients(world, recipe, [MICRO, *overrides]), curve(world, recipe, [MICRO, *overrides])
        found[name] = (here[0], there[0], here[1], there[1], sum(one.moved for one in made))
    return found


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_each_part_elsewhere(recipe: str, ranks: Ranks, size: int) -> None:
    for rank in ranks.run(of_every_part, recipe, size=size):
        for name, (here, there, before, after, moved) in rank.items():
            assert apart(here, there) == 0, name
            assert same(before, after), name
            assert (moved > 100_000) == ("activations" in ASKED[name][0]), name


def saved(world: World, recipe: str, overrides: list[str], folder: str) -> Curve:
    with asked(None):
        return curve(world, recipe, [MICRO, *overrides], 0, folder)


def gone_on(world: World, recipe: str, overrides: list[str], folder: str) -> Curve:
    with asked(None):
        return curve(world, recipe, [MICRO, *overrides], 2, folder)


@pytest.mark.parametrize(("saved_on", "resumed_on"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_resume_with_states_elsewhere_than_they_were(
    recipe: str, ranks: Ranks, tmp_path: Path, saved_on: int, resumed_on: int
) -> None:
    file = in_a_file(str(tmp_path / "states"))
    for before, after in (([], file), (file, []), (file, file)):
        folder = str(tmp_path / f"{len(before)} {len(after)}")
        whole = ranks.run(saved, recipe, before, folder, size=saved_on)[0]
        for made in ranks.run(gone_on, recipe, after, folder, size=resumed_on):
            rest = Curve(whole.losses[2:], whole.norms[2:], whole.weights[2:], whole.samples[2:], whole.end)
            assert same(rest, made) if saved_on == resumed_on else rest.distance(made) <= 1e-12


def test_a_wrong_memory_is_caught(recipe: str) -> None:
    """Mutant: what comes back is what was sent last, whatever was asked for."""

    def spoil(run: Run) -> None:
        away = run.memory.activations
        assert away is not None
        pack, sent = away._pack, {}

        def last(tensor: Any) -> Any:
            kept = pack(tensor)
            form = kept if isinstance(kept, type(tensor)) else (kept.size, kept.stride, kept.dtype)
            if isinstance(form, tuple):
                kept = sent.setdefault(form, kept)
            return kept

        away._pack = last  # type: ignore[method-assign]

    with asked({"activations": True}):
        assert apart(gradients(World(), recipe, [MICRO]), gradients(World(), recipe, [MICRO], spoil)) > 1e-4
