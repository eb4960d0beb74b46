"""What an update costs with each optimiser: milliseconds, against torch's own or AdamW, and bytes kept.

    python bench/optimizers.py [--hidden 384 --layers 6 --vocab 4096] [--rounds 9] [--threads 2] [--kinds adamw,lamb]

Only the update is timed, on weights of a decoder's shapes with gradients that are there already. Each optimiser and
torch's fused AdamW make an update in turn, and the ratio of each pair counts; beside it stands the ratio to torch's own
optimiser of the same kind, where it has one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

parser = argparse.ArgumentParser()
for name, value in {"hidden": 384, "layers": 6, "vocab": 4096, "rounds": 9, "threads": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--kinds", default="adamw,lamb,lion,adafactor,muon,sgd,adamw8bit")
chosen = parser.parse_args()
os.environ["OMP_NUM_THREADS"] = str(chosen.threads)

import torch
from torch import nn

from danlu.models.families import Llama
from danlu.models.roles import roles
from danlu.optim.adafactor import Adafactor
from danlu.optim.adamw import AdamW
from danlu.optim.adamw8bit import AdamW8bit
from danlu.optim.common import Common
from danlu.optim.lamb import Lamb
from danlu.optim.layer import OptimLayer
from danlu.optim.lion import Lion
from danlu.optim.muon import Muon
from danlu.optim.schedule import Constant
from danlu.optim.sgd import Sgd

FORMS: dict[str, type[Common]] = {
    "adamw": AdamW,
    "lamb": Lamb,
    "lion": Lion,
    "adafactor": Adafactor,
    "muon": Muon,
    "sgd": Sgd,
    "adamw8bit": AdamW8bit,
}
Update = Callable[[], None]


def model() -> nn.Module:
    """A decoder whose weights all have gradients."""
    family = Llama(
        vocab_size=chosen.vocab,
        hidden_size=chosen.hidden,
        num_hidden_layers=chosen.layers,
        num_attention_heads=max(1, chosen.hidden // 64),
        num_key_value_heads=max(1, chosen.hidden // 64),
        intermediate_size=chosen.hidden * 8 // 3 // 64 * 64,
        tie_word_embeddings=True,
    )
    made = family.build()
    source = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        weight.data = torch.randn(weight.shape, generator=source) * 0.02
        weight.grad = torch.randn(weight.shape, generator=source) * 1e-3
    return made


def ours(kind: str) -> tuple[Update, int]:
    """An update by danlu's optimiser, and the bytes it keeps."""
    made = model()
    layer = OptimLayer(FORMS[kind](schedule=Constant()), made.named_parameters(), total=10**6, roles=roles(made))
    return lambda: layer.step(1), layer.bytes


def theirs(kind: str) -> Update | None:
    """An update by torch's optimiser of that kind, where there is one."""
    made = model()
    weights = list(made.parameters())
    if kind == "adamw":
        return torch.optim.AdamW(weights, fused=True).step  # type: ignore[return-value]
    if kind == "sgd":
        return torch.optim.SGD(weights, momentum=0.9, fused=True).step  # type: ignore[return-value]
    if kind == "adafactor":
        return torch.optim.Adafactor(weights).step  # type: ignore[return-value]
    if kind == "muon":
        role = roles(made)
        hidden = [weight for name, weight in made.named_parameters() if role[name] == "matrix"]
        rest = [weight for name, weight in made.named_parameters() if role[name] != "matrix"]
        both = torch.optim.Muon(hidden), torch.optim.AdamW(rest, fused=True)
        return lambda: [one.step() for one in both] and None
    return None


def milliseconds(update: Update) -> float:
    start = time.perf_counter()
    update()
    return 1000 * (time.perf_counter() - start)


def main() -> None:
    torch.set_num_threads(chosen.threads)
    numbers = sum(weight.numel() for weight in model().parameters())
    print(f"{numbers:,} weights, {chosen.threads} threads, medians of {chosen.rounds} rounds")
    print("kind         ms   of torch's AdamW   of torch's own   bytes a weight")
    base = theirs("adamw")
    assert base is not None
    for kind in chosen.kinds.split(","):
        (update, kept), own = ours(kind), theirs(kind)
        times: list[tuple[float, float, float]] = []
        for _ in range(chosen.rounds + 2):
            times.append((milliseconds(update), milliseconds(base), milliseconds(own) if own else float("nan")))
        timed = times[2:]
        took = statistics.median(mine for mine, _, _ in timed)
        adamw = statistics.median(mine / other for mine, other, _ in timed)
        same = f"{statistics.median(mine / other for mine, _, other in timed):.2f} x" if own else "none"
        print(f"{kind:<10} {took:>7.1f} {adamw:>16.2f} x {same:>16} {kept / numbers:>16.2f}", flush=True)


if __name__ == "__main__":
    main()
