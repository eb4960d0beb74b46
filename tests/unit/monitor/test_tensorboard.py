"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import pytest

from danlu.monitor.sinks import Back, Evaluated, Norms
from danlu.monitor.tensorboard import TensorBoard
from tests.unit.monitor.test_console import point


def read(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_points_and_evaluations_are_scalars(tmp_path):
    board = TensorBoard(tmp_path)
    for step in range(1, 6):
        board.take(point(step, loss=5.0 - step, mfu=0.5, norm=None if step == 3 else 1.0))
    board.take(point(6, logged=False))
    board.take(Evaluated(5, 300, 2.5, True))
    board.close()
    scalars = read(tmp_path)
    assert scalars["train/loss"] == [(step, 5.0 - step) for step in range(1, 6)]
    assert [step for step, _ in scalars["train/grad_norm"]] == [1, 2, 4, 5]
    assert scalars["eval/loss"] == [(5, 2.5)]
    assert scalars["speed/mfu"][0] == (1, 0.5)
    assert "device/watts" not in scalars
    assert "train/loss/language" not in scalars  # the only term is the loss itself


def test_steps_done_again_after_a_resume_stand_once(tmp_path):
    board = TensorBoard(tmp_path)
    for step in range(1, 9):
        board.take(point(step, loss=1.0))
    board.close()
    board = TensorBoard(tmp_path, start_step=5)
    for step in range(6, 11):
        board.take(point(step, loss=2.0))
    board.close()
    assert read(tmp_path)["train/loss"] == [(s, 1.0) for s in range(1, 6)] + [(s, 2.0) for s in range(6, 11)]


def test_terms_are_told_apart_where_there_are_several(tmp_path):
    board = TensorBoard(tmp_path)
    board.take(point(1, loss=2.25, losses={"language": 2.0, "router": 0.25}))
    board.close()
    assert read(tmp_path)["train/loss/router"] == [(1, 0.25)]


def test_a_run_that_went_back_has_each_step_once_and_layers_have_their_norms(tmp_path):
    board = TensorBoard(tmp_path)
    for step in range(1, 9):
        board.take(point(step, loss=1.0))
    board.take(Back(5))
    for step in range(6, 8):
        board.take(point(step, loss=2.0))
    board.take(Norms(7, {"grad_norm/blocks.0": 0.5, "weight_norm/embed": 3.0}))
    board.close()
    scalars = read(tmp_path)
    assert scalars["train/loss"] == [(step, 1.0) for step in range(1, 6)] + [(6, 2.0), (7, 2.0)]
    assert scalars["layers/grad_norm/blocks.0"] == [(7, 0.5)] and scalars["layers/weight_norm/embed"] == [(7, 3.0)]
