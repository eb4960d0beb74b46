"""The curve, as a picture and as text."""

from __future__ import annotations

import io
import math
import threading

import numpy as np
import pytest
from matplotlib import image

from danlu.monitor.plot import Picture, draw, limits, smooth, text
from danlu.monitor.sinks import Curve

STEPS = range(1, 301)
CURVE = Curve(
    train=tuple((step, 2 + 6 * math.exp(-step / 60)) for step in STEPS),
    evaluation=tuple((step, 2.2 + 6 * math.exp(-step / 60)) for step in range(50, 301, 50)),
    learning_rate=tuple((step, 1e-3 * min(1, step / 20)) for step in STEPS),
)
EMPTY = Curve(train=(), evaluation=(), learning_rate=())


def pixels(content: bytes) -> np.ndarray:
    return image.imread(io.BytesIO(content), format="png")[..., :3]


def share(picture: np.ndarray, colour: tuple[int, int, int]) -> float:
    """Of the pixels, those about this colour."""
    return float((np.abs(picture - np.array(colour) / 255).max(axis=2) < 0.06).mean())


def test_the_picture_shows_training_evaluation_and_rate():
    whole = pixels(draw(CURVE, title="demo"))
    assert whole.shape == (750, 1200, 3)
    assert share(whole, (33, 113, 181)) > 5e-4  # the running mean
    assert share(whole, (230, 85, 13)) > 5e-4  # evaluations
    assert share(whole, (236, 236, 236)) > 0.05  # the rate's area
    alone = pixels(draw(Curve(train=CURVE.train, evaluation=(), learning_rate=())))
    assert share(alone, (230, 85, 13)) == 0
    assert share(alone, (255, 255, 255)) < 0.99  # not blank


def test_the_curve_falls_from_the_upper_left_to_the_lower_right():
    picture = pixels(draw(CURVE))
    line = np.abs(picture - np.array((33, 113, 181)) / 255).max(axis=2) < 0.06
    line[:200, 800:] = False  # the legend
    rows, columns = np.nonzero(line)
    left, right = rows[columns < np.quantile(columns, 0.05)].mean(), rows[columns > np.quantile(columns, 0.95)].mean()
    assert left < 300 < 550 < right


@pytest.mark.parametrize(
    "curve",
    [
        Curve(train=((1, 3.0),), evaluation=(), learning_rate=((1, 0.0),)),
        Curve(train=(), evaluation=((5, 2.0),), learning_rate=()),
        Curve(train=((1, 2.0), (2, 2.0)), evaluation=((2, 2.0),), learning_rate=((1, 1e-3), (2, 1e-3))),
        Curve(train=((1, 1e30), (2, 1.0)), evaluation=(), learning_rate=((1, 1e-9), (2, 0.0))),
    ],
)
def test_odd_curves_are_drawn_too(curve):
    assert share(pixels(draw(curve, title="$x_1^")), (255, 255, 255)) < 0.999


def test_a_title_that_the_font_cannot_show_is_left_out_without_a_word(recwarn):
    draw(CURVE, title="红楼梦")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


def test_the_file_is_whole_and_any_thread_may_draw_it(tmp_path):
    picture = Picture(tmp_path / "loss.png", title="demo")
    thread = threading.Thread(target=picture.take, args=(CURVE,))
    thread.start()
    thread.join()
    picture.take(EMPTY)  # nothing to draw: the old one stays
    picture.close()
    assert pixels((tmp_path / "loss.png").read_bytes()).shape == (750, 1200, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_one_spike_does_not_flatten_the_rest():
    losses = [(step, 2.0 + 1 / step) for step in range(1, 1001)]
    losses[500] = (501, 900.0)
    low, high = limits(Curve(train=tuple(losses), evaluation=(), learning_rate=()))
    assert low < 2.0
    assert high < 4


def test_the_running_mean_does_not_lag():
    values = [float(k) for k in range(100)]
    assert smooth(values, 9) == pytest.approx(values)
    assert smooth([0.0, 3.0, 0.0], 3) == pytest.approx([0.0, 1.0, 0.0])


@pytest.mark.parametrize(("unicode", "width"), [(True, 72), (False, 72), (True, 40)])
def test_text_falls_as_the_loss_does_and_fits(unicode, width):
    drawn = text(CURVE, width=width, height=10, unicode=unicode)
    lines = drawn.splitlines()
    assert all(len(line) <= width for line in lines)
    assert drawn.isascii() is not unicode
    bar = "│" if unicode else "|"
    rows = [line.split(bar, 1)[1] for line in lines if bar in line]
    assert len(rows) == 10
    ends = [len(row) for row in rows]
    assert ends[0] < 8  # at the top only the beginning
    assert max(ends) >= width - 12  # further down all the way to the end
    assert ends.index(max(ends)) >= 7
    first, last = limits(CURVE)
    assert f"{last:.3f}" in lines[0]
    assert f"{first:.3f}" in lines[9]
    assert sum(row.count("●" if unicode else "o") for row in rows) == 6
    assert "step 1 " in drawn
    assert "300" in lines[11]


def test_there_is_no_text_of_nothing():
    assert text(EMPTY) == ""
    assert text(Curve(train=((7, 2.0),), evaluation=(), learning_rate=()))


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 300])
def test_steps_are_marked_at_whole_numbers(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "suptitle", lambda figure, *_, **__: figures.append(figure))
    points = tuple((step, 5.0 - step / 100) for step in range(1, steps + 1))
    draw(Curve(train=points, evaluation=(), learning_rate=points), title="ticks")
    [figure] = figures
    ticks = [tick for axis in figure.axes for tick in axis.get_xticks()]
    assert ticks and all(tick == int(tick) for tick in ticks)
