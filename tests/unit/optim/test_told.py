"""What check says of an optimiser."""

from __future__ import annotations

import torch
from torch import nn

from danlu.optim.adafactor import Adafactor
from danlu.optim.adamw import AdamW
from danlu.optim.average import Average
from danlu.optim.common import Common
from danlu.optim.groups import Rate, split
from danlu.optim.schedule import Linear
from danlu.optim.sgd import Sgd
from danlu.optim.told import lines, moments

SHAPES = {"embed": (50, 8), "norm": (8,), "up": (32, 8), "down": (8, 32)}
ROLES = {"embed": "embedding", "norm": "norm", "up": "matrix", "down": "matrix"}


def said(settings: AdamW) -> list[str]:
    named = [(name, nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in SHAPES.items()]
    groups = split(named, weight_decay=settings.weight_decay, roles=ROLES, rates=settings.rates)
    return list(lines(settings, groups, total=200, dtype=torch.float32))


def test_a_line_for_each_group_with_its_bytes() -> None:
    """AdamW keeps two numbers of four bytes a weight, and a count of four bytes."""
    schedule = Linear(warmup_steps=20, final_ratio=0.1)
    found = said(AdamW(learning_rate=0.002, schedule=schedule, rates=[Rate(role="norm", rate=0.5)]))
    assert found == [
        "adamw, rate 0.002 at its peak: linear over 200 updates, 20 of them warm-up, to 0.0002",
        "gradients: norm at most 1",
        "role       weights          numbers      rate    decay  kept bytes",
        "embedding        1              400     0.002      0.1       3,204",
        "norm             1                8     0.001     none          68",
        "matrix           2              512     0.002      0.1       4,104",
    ]


def test_widths_averages_and_clipping_are_told() -> None:
    rates = [Rate(role="matrix", width=8)]
    found = said(AdamW(max_grad_norm=0, max_grad_value=0.5, rates=rates, average=Average(decay=0.99)))
    assert found[1] == "gradients: numbers at most 0.5"
    assert [line.split()[0:4] for line in found[3:7]] == [
        ["embedding", "1", "400", "0.001"],
        ["norm", "1", "8", "0.001"],
        ["matrix", "1", "256", "0.001"],
        ["matrix", "1", "256", "0.00025"],
    ]
    assert found[5].split()[-1] == f"{256 * 12 + 4:,}"  # an average of four bytes more
    assert found[7] == "average: an update keeps 0.99 of it, less at first; its bytes are among those kept"


def test_what_is_kept_is_told_of_the_optimiser_at_hand() -> None:
    """Adafactor, in bf16: 4 bytes for each of 58 + 40 + 40 rows and columns, and 2 for each of the norm's 8 numbers."""
    named = [(name, nn.Parameter(torch.empty(shape, device="meta"))) for name, shape in SHAPES.items()]

    def told(settings: Common, dtype: torch.dtype) -> tuple[tuple[torch.dtype, ...], str]:
        groups = split(named, weight_decay=0.1, roles=ROLES, rates=[])
        return moments(settings, groups, dtype=dtype)

    each = (4 * (58 + 40 + 40) + 2 * 8) / (400 + 8 + 512)
    dtypes, said = told(Adafactor(), torch.bfloat16)
    assert set(dtypes) == {torch.float32, torch.bfloat16}
    assert said.startswith(f"{each:.2g} bytes a number with adafactor: ")
    assert set(said.partition(": ")[2].split(", ")) == {"row_var", "col_var", "variance"}
    assert told(AdamW(average=Average()), torch.float32) == (
        (torch.float32,),
        "8 bytes a number with adamw: exp_avg, exp_avg_sq",
    )
    assert told(Sgd(momentum=0.0), torch.float32)[0] == ()
