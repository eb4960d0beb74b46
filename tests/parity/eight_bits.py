"""What bitsandbytes' 8-bit AdamW makes of a matrix, kept beside this file; run as a program, it is made anew:

    python -m venv apart; apart/bin/pip install torch bitsandbytes==0.50.2 safetensors
    apart/bin/python -m tests.parity.eight_bits

bitsandbytes is no dependency of the tests, so that its own torch cannot change what they run on.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

FILE = Path(__file__).with_name("eight_bits.safetensors")
SHAPE, UPDATES, RATE, DECAY, BETAS, EPS = (16, 256), 12, 0.01, 0.1, (0.9, 0.95), 1e-8  # rows of one block each


def begin() -> Tensor:
    """The matrix before the first update."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def gradient(update: int) -> Tensor:
    """No number of it is so small that its square would become code zero, which is not used here."""
    drawn = torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 + update))
    return drawn + 0.1 * drawn.sign()


def make() -> None:
    """The file holds where the matrix and its moments are after the updates."""
    import bitsandbytes
    from safetensors.torch import save_file

    weight = torch.nn.Parameter(begin())
    optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    for update in range(1, UPDATES + 1):
        weight.grad = gradient(update)
        optimizer.step()
    state = optimizer.state[weight]
    save_file(
        {
            "weight": weight.detach(),
            "exp_avg_codes": state["state1"],
            "exp_avg_scales": state["absmax1"],
            "exp_avg_table": state["qmap1"],
            "exp_avg_sq_codes": state["state2"],
            "exp_avg_sq_scales": state["absmax2"],
            "exp_avg_sq_table": state["qmap2"],
        },
        FILE,
        metadata={"made_by": f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}"},
    )


if __name__ == "__main__":
    make()
