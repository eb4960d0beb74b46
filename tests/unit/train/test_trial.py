"""A micro-batch that is to be found is tried in the worst case, and nothing else moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from danlu.core.batch import IGNORE
from danlu.core.device import Memory
from danlu.core.errors import Failure
from danlu.core.world import World
from danlu.memory.ledger import forecast
from danlu.recipe.yaml import load
from danlu.train import trial
from danlu.train.assemble import Materials, gather
from danlu.train.trial import largest, proven, remedies, worst
from tests.equal.curves import write_recipe


def _materials(folder: Path, *overrides: str) -> Materials:
    recipe = load(str(write_recipe(folder)), ["memory.precision=fp32", *overrides])
    return gather(recipe, world=World(), device=torch.device("cpu"), announce=lambda text: None)


def _free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr("danlu.core.device.memory", lambda device: Memory(total=10**12, free=int(size)))


def test_the_worst_case_has_labels_everywhere_and_several_documents(tmp_path: Path) -> None:
    materials = _materials(tmp_path)
    batch, case = largest(materials), materials.case
    assert batch.tokens.shape == (case.rows, case.sequence_length) and batch.packed
    assert (batch.labels != IGNORE).all() and (batch.documents[:, -1] == 1).all()
    assert batch.tokens.min() >= 0 and batch.tokens.max() < case.shape.vocab_size
    assert worst(materials) == pytest.approx(forecast(case).peak, rel=0.05)


def test_what_was_given_is_taken_and_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    materials, said = _materials(tmp_path, "batch.micro_batch_size=4"), []
    assert proven(materials, announce=said.append) is materials and not said
    _free(monkeypatch, 1000)
    assert proven(materials, announce=said.append) is materials
    assert said[0].startswith("warning: ") and "batch.micro_batch_size=2 (" in said[0]


def test_ample_room_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    materials, said = _materials(tmp_path, "batch.micro_batch_size=auto"), []
    assert materials.untried and materials.case.rows == 8
    monkeypatch.setattr(trial, "worst", lambda materials: pytest.fail("it was tried"))
    assert not proven(materials, announce=said.append).untried
    assert said[0].startswith("batch.micro_batch_size: 8; ") and said[0].endswith("not tried")


def test_what_holds_more_than_was_forecast_goes_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    materials, said = _materials(tmp_path, "batch.micro_batch_size=auto"), []
    need = forecast(materials.case).peak
    _free(monkeypatch, 1.5 * need)
    held = {8: 2 * need, 4: 1.4 * need, 2: need}
    monkeypatch.setattr(trial, "worst", lambda materials: held[materials.case.rows])
    made = proven(materials, announce=said.append)
    assert made.case.rows == made.recipe.batch.micro_batch_size == 2 and made.micros == 4
    assert made.held is not None and made.held.batch_size == 2
    assert [text.split(" ")[:2] for text in said] == [["batch.micro_batch_size:", size] for size in ("8", "4", "2;")]


def test_nothing_of_the_run_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    materials = _materials(tmp_path, "batch.micro_batch_size=auto")
    _free(monkeypatch, 1.5 * forecast(materials.case).peak)
    random, position = torch.get_rng_state(), materials.rows.state()
    assert proven(materials, announce=lambda text: None).case.rows == 8
    assert torch.equal(torch.get_rng_state(), random) and materials.rows.state() == position
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


def test_where_not_even_a_row_fits_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    materials = _materials(tmp_path, "batch.micro_batch_size=auto")

    def refuses(materials: Materials) -> int:
        raise MemoryError

    monkeypatch.setattr(trial, "worst", refuses)
    _free(monkeypatch, forecast(materials.case).peak)
    with pytest.raises(Failure, match=r"out of memory with a single row: about .* memory.recompute=full"):
        proven(materials, announce=lambda text: None)


def test_another_error_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    materials = _materials(tmp_path, "batch.micro_batch_size=auto")

    def breaks(materials: Materials) -> int:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(trial, "worst", breaks)
    _free(monkeypatch, forecast(materials.case).peak)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        proven(materials, announce=lambda text: None)


def test_remedies_are_only_what_would_need_less(tmp_path: Path) -> None:
    materials = _materials(tmp_path, "batch.micro_batch_size=1", "memory.recompute=full")
    less = list(remedies(materials.case, materials.sizes, materials.recipe.memory, materials.device))
    assert less == []
    gpu = list(remedies(materials.case, materials.sizes, materials.recipe.memory, torch.device("cuda")))
    assert gpu == ["memory.offload=[optimizer]", "more ranks to cut the weights over (parallel.shard)"]
