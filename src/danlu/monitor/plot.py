"""The loss curve: as a picture, and as text for a terminal."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path

from danlu.core.paths import write_whole
from danlu.monitor.sinks import Curve, Message

Points = Sequence[tuple[int, float]]

# Braille cells are 2 dots wide and 4 high; these are the bits of the dots, column by column from the top.
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


class Picture:
    """Draws each curve that it is given into one file, whole or not at all."""

    def __init__(self, path: Path, *, title: str = ""):
        self._path, self._title = path, title

    def take(self, message: Message) -> None:
        if isinstance(message, Curve) and (message.train or message.evaluation):
            write_whole(self._path, draw(message, title=self._title))

    def close(self) -> None:
        pass


def draw(curve: Curve, *, title: str = "") -> bytes:
    """A PNG of 1200 x 750: training loss (each point, and a running mean), evaluation loss, and the learning rate."""
    # Without pyplot: no global state, so it may run in any thread and opens no window.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    rate_axis = figure.add_subplot()
    axis = rate_axis.twinx()
    if curve.learning_rate:
        steps, rates = zip(*curve.learning_rate)
        rate_axis.fill_between(steps, rates, color="#d9d9d9", alpha=0.5, linewidth=0, label="learning rate")
        rate_axis.set_ylim(bottom=0, top=max(*rates, 1e-12) * 1.6)
    if curve.train:
        steps, losses = zip(*curve.train)
        many = len(steps) > 40
        axis.plot(
            steps,
            losses,
            color="#9ecae1" if many else "#2171b5",
            linewidth=0.8 if many else 1.4,
            marker=None if len(steps) > 1 else "o",
            label="training loss",
        )
        if many:
            axis.plot(steps, smooth(losses, len(steps) // 25), color="#2171b5", linewidth=1.6, label="its running mean")
    if curve.evaluation:
        steps, losses = zip(*curve.evaluation)
        axis.plot(steps, losses, color="#e6550d", marker="o", markersize=4, linewidth=1.4, label="evaluation loss")
        best = min(curve.evaluation, key=lambda point: point[1])
        axis.annotate(
            f"{best[1]:.3f}", best, textcoords="offset points", xytext=(0, 7), ha="center", fontsize=9, color="#e6550d"
        )
    low, high = limits(curve)
    axis.set_ylim(low, high)
    axis.yaxis.set_label_position("left")
    axis.yaxis.tick_left()
    rate_axis.yaxis.set_label_position("right")
    rate_axis.yaxis.tick_right()
    rate_axis.tick_params(axis="y", colors="#888888", labelsize=8)
    rate_axis.set_ylabel("learning rate", color="#888888")
    rate_axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    rate_axis.set_xlabel("step")
    rate_axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_ylabel("loss (nats per token)")
    axis.grid(True, color="#eeeeee", linewidth=0.8)
    handles, labels = (a + b for a, b in zip(axis.get_legend_handles_labels(), rate_axis.get_legend_handles_labels()))
    axis.legend(handles, labels, frameon=False, fontsize=9, loc="upper right")
    if title and title.isascii():  # the fonts that are always there lack most other scripts
        figure.suptitle(title.replace("$", r"\$"), fontsize=11)
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        canvas.print_png(picture)
    return picture.getvalue()


def limits(curve: Curve) -> tuple[float, float]:
    """The lowest and highest loss to show: all but the spikes, so that one does not flatten the rest."""
    train = [loss for _, loss in curve.train]
    evaluation = [loss for _, loss in curve.evaluation]
    ordered = sorted(train)
    top = ordered[min(len(ordered) - 1, math.ceil(len(ordered) * 0.995))] if ordered else -math.inf
    high = max([top, *train[:1], *evaluation])
    low = min([*ordered[:1], *evaluation])
    margin = (high - low) * 0.06 or 0.5
    return low - margin, high + margin


def smooth(values: Sequence[float], window: int) -> list[float]:
    """A running mean over about this many points round each, fewer at the ends, so that it does not lag."""
    sums = [0.0, *accumulate(values)]
    smoothed = []
    for k in range(len(values)):
        reach = min(window // 2, k, len(values) - 1 - k)
        smoothed.append((sums[k + reach + 1] - sums[k - reach]) / (2 * reach + 1))
    return smoothed


def text(curve: Curve, *, width: int = 72, height: int = 12, unicode: bool = True) -> str:
    """The training loss as text: a line of dots over steps, evaluations as circles, and what the axes span.

    ``unicode`` false draws with plain letters, for terminals that know no other.
    """
    if not curve.train:
        return ""
    low, high = limits(curve)
    first = min(curve.train[0][0], *(step for step, _ in curve.evaluation)) if curve.evaluation else curve.train[0][0]
    last = max([curve.train[-1][0], *(step for step, _ in curve.evaluation)])
    columns = max(10, width - 9)
    across, down = (2, 4) if unicode else (1, 1)
    grid = [[0] * columns for _ in range(height)]

    def place(step: float, loss: float) -> tuple[int, int]:
        x = round((step - first) / max(last - first, 1) * (columns * across - 1))
        y = round((high - min(max(loss, low), high)) / (high - low) * (height * down - 1))
        return x, y

    for x, (lowest, highest) in _strokes(curve.train, place).items():
        for y in range(lowest, highest + 1):
            grid[y // down][x // across] |= DOTS[x % across][y % down] if unicode else 1
    cells = [
        [(chr(0x2800 + cell) if cell else " ") if unicode else ("*" if cell else " ") for cell in row] for row in grid
    ]
    for step, loss in curve.evaluation:
        x, y = place(step, loss)
        cells[y // down][x // across] = "●" if unicode else "o"
    bar, corner, flat = ("│", "└", "─") if unicode else ("|", "+", "-")
    rows = []
    for number, row in enumerate(cells):
        label = {0: high, height // 2: (high + low) / 2, height - 1: low}.get(number)
        rows.append((f"{label:7.3f}" if label is not None else " " * 7) + f" {bar}" + "".join(row).rstrip())
    rows.append(" " * 8 + corner + flat * (columns - 1))
    ends = f"step {first}", f"{last}"
    rows.append(" " * 9 + ends[0] + ends[1].rjust(max(1, columns - 1 - len(ends[0]))))
    if curve.evaluation:
        rows.append(" " * 9 + ("● evaluation loss" if unicode else "o evaluation loss"))
    return "\n".join(rows)


def _strokes(points: Points, place: Callable[[float, float], tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """For each dot column, from which to which dot row the line runs; each point is joined to the one before."""
    spans: dict[int, tuple[int, int]] = {}
    previous: tuple[int, int] | None = None
    for step, loss in points:
        x, y = place(step, loss)
        if previous is not None:
            steps = max(x - previous[0], 1)
            for k in range(1, steps + 1):
                between = previous[1] + round((y - previous[1]) * k / steps)
                column = previous[0] + min(k, x - previous[0])
                low, high = spans.get(column, (between, between))
                spans[column] = min(low, between), max(high, between)
        low, high = spans.get(x, (y, y))
        spans[x] = min(low, y), max(high, y)
        previous = x, y
    return spans
