"""Norms layer by layer: what is told of them."""

from __future__ import annotations

import json

from danlu.monitor.causes import Likely
from danlu.monitor.layers import Layers, Strata


def look(strata: Strata, step: int, **norms: float) -> list[tuple[str, Likely | None]]:
    extra = {f"grad_norm/{name.replace('_', '.')}": value for name, value in norms.items()} | {"weight_norm/embed": 3.0}
    return [(finding.kind, finding.likely) for finding in strata.see(step, extra)]


def test_layers_are_looked_at_at_first_and_every_so_many_updates() -> None:
    assert [step for step in range(1, 201) if Layers(steps=50).due(step)] == [1, 50, 100, 150, 200]


def test_norms_within_their_range_are_not_told() -> None:
    strata = Strata(Layers())
    for step in range(100):
        assert look(strata, step, embed=40.0, blocks_0=1.0, blocks_1=0.05, blocks_2=9.0, norm=0.001) == []


def test_what_explodes_vanishes_or_does_not_come_is_told_once_it_is_no_chance() -> None:
    for value, kind, likely in (
        (0.0, "dead_layer", Likely.LAYER),
        (1e-6, "vanishing", Likely.DEPTH),
        (1e4, "exploding", Likely.DEPTH),
    ):
        strata = Strata(Layers())
        norms = {"blocks_0": 1.0, "blocks_1": value, "blocks_2": 1.2, "blocks_3": 0.9, "embed": 2.0}
        assert look(strata, 1, **norms) == look(strata, 2, **norms) == []
        assert look(strata, 3, **norms) == [(kind, likely)]
        assert look(strata, 4, **norms) == []
        assert strata.dead == (("blocks.1",) if value == 0 else ())
        assert look(strata, 5, **(norms | {"blocks_1": 1.0})) == []
        assert look(strata, 6, **norms) == []  # counted anew


def test_where_nothing_has_a_gradient_no_layer_is_to_blame() -> None:
    strata = Strata(Layers())
    for step in range(10):
        assert look(strata, step, blocks_0=0.0, blocks_1=0.0) == []
    assert strata.dead == ()


def test_an_update_without_a_look_says_nothing() -> None:
    assert Strata(Layers()).see(7, {"loss_scale": 4.0}) == []


def test_gone_on_from_its_state_it_answers_as_if_never_interrupted() -> None:
    norms = {"blocks_0": 1.0, "blocks_1": 0.0, "blocks_2": 1.2}
    first, second = Strata(Layers()), Strata(Layers())
    look(first, 1, **norms)
    look(first, 2, **norms)
    second.restore(json.loads(json.dumps(first.state())))
    assert look(second, 3, **norms) == [("dead_layer", Likely.LAYER)]
    third = Strata(Layers())
    third.restore(json.loads(json.dumps(second.state())))
    assert look(third, 4, **norms) == [] and third.dead == ("blocks.1",)
