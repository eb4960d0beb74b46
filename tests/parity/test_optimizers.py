"""Each optimiser against torch's, or against its paper's formula written out here, over twelve updates with a schedule
and decay; in float64 unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from danlu.optim.adafactor import Adafactor
from danlu.optim.adamw import AdamW
from danlu.optim.adamw8bit import AdamW8bit
from danlu.optim.blocks import table
from danlu.optim.common import Common
from danlu.optim.lamb import Lamb
from danlu.optim.layer import OptimLayer
from danlu.optim.lion import Lion
from danlu.optim.muon import Muon
from danlu.optim.schedule import Constant, Linear
from danlu.optim.sgd import Sgd
from tests.parity import eight_bits

UPDATES, WARMUP, DECAY = 12, 3, 0.1
SHAPES = {"wide": (6, 10), "tall": (9, 4), "table": (7, 5), "gain": (8,), "still": (3, 4)}
ROLES = {"wide": "matrix", "tall": "matrix", "table": "embedding", "gain": "norm", "still": "matrix"}
Weights = dict[str, Tensor]
# Moves weights by their gradients: (weights, gradients, rate, number of the update)
Reference = Callable[[Weights, Weights, float, int], None]


def rate(update: int, peak: float) -> float:
    """Linear warm-up and fall, written out."""
    return peak * (update / WARMUP if update <= WARMUP else 1 - (update - WARMUP) / (UPDATES - WARMUP))


def start(shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> Weights:
    source = torch.Generator().manual_seed(1)
    return {n: torch.randn(s, generator=source, dtype=torch.float64).to(dtype) * 0.3 for n, s in shapes.items()}


def gradients(update: int, like: Weights) -> Weights:
    """Normal, of very different sizes; rows of the table that no token met are zero, and one weight never has any."""
    source = torch.Generator().manual_seed(100 + update)
    made = {}
    for name, weight in like.items():
        grad = torch.randn(weight.shape, generator=source, dtype=torch.float64)
        grad *= torch.rand(weight.shape, generator=source, dtype=torch.float64) ** 4
        if name == "table":
            grad[update % 3 :: 3] = 0
        made[name] = (grad * (0.0 if name == "still" else 1.0)).to(weight.dtype)
    return made


def ours(settings: Common, begin: Weights, updates: int = UPDATES) -> Weights:
    """Where the weights are after the updates."""
    named = {name: nn.Parameter(weight.clone()) for name, weight in begin.items()}
    layer = OptimLayer(settings, named.items(), total=UPDATES, roles=ROLES)
    for update in range(1, updates + 1):
        for name, grad in gradients(update, begin).items():
            named[name].grad = grad
        layer.step(update)
        layer.zero()
    return {name: parameter.detach() for name, parameter in named.items()}


def theirs(reference: Reference, begin: Weights, peak: float) -> Weights:
    weights = {name: weight.clone() for name, weight in begin.items()}
    for update in range(1, UPDATES + 1):
        reference(weights, gradients(update, begin), rate(update, peak), update)
    return weights


def decay(name: str) -> float:
    return 0.0 if name == "gain" else DECAY


def by_torch(make: Callable[[list[dict[str, object]]], torch.optim.Optimizer]) -> Reference:
    """One of torch's optimisers as a reference."""
    held: dict[str, object] = {}

    def move(weights: Weights, grads: Weights, rate: float, update: int) -> None:
        if not held:
            held.update({name: nn.Parameter(weight) for name, weight in weights.items()})
            held[""] = make([{"params": [p], "weight_decay": decay(name)} for name, p in held.items()])
        optimizer = held[""]
        for name, grad in grads.items():
            held[name].grad = grad
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        weights.update({name: held[name].detach() for name in weights})

    return move


def close(a: Weights, b: Weights, tolerance: float = 1e-12) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    assert not torch.equal(a["wide"], start()["wide"].to(a["wide"].dtype)), "nothing has moved"


COMMON = {"weight_decay": DECAY, "schedule": Linear(warmup_steps=WARMUP)}


def test_adamw_equals_torchs() -> None:
    reference = by_torch(lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, foreach=False))
    settings = AdamW(learning_rate=0.03, betas=(0.8, 0.95), eps=1e-6, **COMMON)
    close(ours(settings, start()), theirs(reference, start(), 0.03))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_sgd_equals_torchs(momentum: float, nesterov: bool) -> None:
    reference = by_torch(
        lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=momentum, nesterov=nesterov, foreach=False)
    )
    settings = Sgd(learning_rate=0.2, momentum=momentum, nesterov=nesterov, **COMMON)
    close(ours(settings, start()), theirs(reference, start(), 0.2))


def test_lion_follows_algorithm_2_of_its_paper() -> None:
    momentum: Weights = {}

    def move(weights: Weights, grads: Weights, rate: float, update: int) -> None:
        for name, g in grads.items():
            m = momentum.get(name, torch.zeros_like(g))
            c = 0.9 * m + (1 - 0.9) * g
            weights[name] = weights[name] - rate * (torch.sign(c) + decay(name) * weights[name])
            momentum[name] = 0.99 * m + (1 - 0.99) * g

    close(ours(Lion(learning_rate=0.01, **COMMON), start()), theirs(move, start(), 0.01))


@pytest.mark.parametrize("most", [0.0, 0.5])
def test_lamb_follows_algorithm_2_of_its_paper(most: float) -> None:
    first: Weights = {}
    second: Weights = {}
    ratios: list[float] = []

    def move(weights: Weights, grads: Weights, rate: float, update: int) -> None:
        for name, g in grads.items():
            first[name] = 0.9 * first.get(name, torch.zeros_like(g)) + 0.1 * g
            second[name] = 0.99 * second.get(name, torch.zeros_like(g)) + 0.01 * g * g
            r = first[name] / (1 - 0.9**update) / ((second[name] / (1 - 0.99**update)).sqrt() + 1e-6)
            u = r + decay(name) * weights[name]
            size, length = weights[name].pow(2).sum().sqrt().item(), u.pow(2).sum().sqrt().item()
            ratio = size / length if size > 0 and length > 0 and name != "gain" else 1.0
            ratio = min(ratio, most) if most and name != "gain" else ratio
            ratios.append(ratio)
            weights[name] = weights[name] - rate * ratio * u

    settings = Lamb(learning_rate=0.05, betas=(0.9, 0.99), max_trust_ratio=most, **COMMON)
    close(ours(settings, start()), theirs(move, start(), 0.05))
    assert not most or 0.05 < ratios.count(most) / len(ratios) < 0.9, "the bound must be met, and must not always be"


def test_lambs_zero_weight_moves_by_the_update_alone() -> None:
    zero = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    moved = ours(Lamb(learning_rate=0.5, betas=(0.9, 0.99), **COMMON), zero, updates=1)
    grad = gradients(1, zero)["wide"]
    torch.testing.assert_close(moved["wide"], -0.5 / WARMUP * grad / (grad.abs() + 1e-6), rtol=1e-12, atol=1e-12)
    assert moved["still"].eq(0).all()


@pytest.mark.parametrize("clip", [1.0, 1.2])
def test_adafactor_equals_torchs(clip: float) -> None:
    # torch bounds a variance from below where the paper adds to each square: the same to far below 1e-12 here.
    reference = by_torch(lambda groups: torch.optim.Adafactor(groups, eps=(1e-30, 1e-3), d=clip, foreach=False))
    settings = Adafactor(learning_rate=0.4, clip_threshold=clip, relative_step=True, **COMMON)
    begin = {name: weight for name, weight in start().items() if name != "still"}
    close(ours(settings, begin), theirs(reference, begin, 0.4))


@pytest.mark.parametrize("scaled", [True, False])
def test_adafactor_follows_algorithms_4_and_5_of_its_paper(scaled: bool) -> None:
    rows: Weights = {}
    columns: Weights = {}
    variance: Weights = {}

    def move(weights: Weights, grads: Weights, rate: float, update: int) -> None:
        beta = 1 - update**-0.8
        for name, g in grads.items():
            w, square = weights[name], g**2 + 1e-30
            if g.dim() == 2:  # algorithm 4, sums as they stand there
                rows[name] = beta * rows.get(name, 0) + (1 - beta) * square.sum(1)
                columns[name] = beta * columns.get(name, 0) + (1 - beta) * square.sum(0)
                v = torch.outer(rows[name], columns[name]) / rows[name].sum()
            else:  # algorithm 5
                variance[name] = beta * variance.get(name, 0) + (1 - beta) * square
                v = variance[name]
            u = g / v.sqrt()
            u = u / max(1.0, _rms(u) / 1.0)
            size = max(1e-3, _rms(w)) if scaled else 1.0
            weights[name] = w - rate * decay(name) * w - rate * size * u

    settings = Adafactor(learning_rate=0.05, scale_parameter=scaled, **COMMON)
    close(ours(settings, start()), theirs(move, start(), 0.05))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_muon_equals_torchs_to_the_bit_and_adamw_for_the_rest(scale: str, nesterov: bool) -> None:
    """In fp32, where both iterate in bf16."""
    held: dict[str, Tensor] = {}

    def make(groups: list[dict[str, object]]) -> torch.optim.Optimizer:
        muon = [g for g in groups if ROLES[_name(g, held)] == "matrix"]
        rest = [g for g in groups if ROLES[_name(g, held)] != "matrix"]
        one = torch.optim.Muon(muon, momentum=0.9, nesterov=nesterov, adjust_lr_fn=scale, weight_decay=DECAY)
        other = torch.optim.AdamW(rest, betas=(0.9, 0.95), fused=True)
        return _Two(one, other)

    begin = start(dtype=torch.float32)
    held.update(begin)
    settings = Muon(
        learning_rate=0.02,
        adamw_learning_rate=0.02,
        momentum=0.9,
        nesterov=nesterov,
        adjust_lr_fn=scale,  # type: ignore[arg-type]
        **COMMON,
    )
    close(ours(settings, begin), theirs(by_torch(make), begin, 0.02), tolerance=0)


def test_muon_sets_singular_values_by_the_quintic() -> None:
    """The iteration through the singular values that it is a polynomial of."""
    momentum: Weights = {}

    def move(weights: Weights, grads: Weights, rate: float, update: int) -> None:
        for name in ("wide", "tall"):
            g, w = grads[name], weights[name]
            momentum[name] = 0.95 * momentum.get(name, torch.zeros_like(g)) + 0.05 * g
            u, s, v = torch.linalg.svd(0.05 * g + 0.95 * momentum[name], full_matrices=False)
            s = s / s.pow(2).sum().sqrt()
            for _ in range(5):
                s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
            scale = math.sqrt(max(1, w.shape[0] / w.shape[1]))
            weights[name] = w - rate * DECAY * w - rate * scale * (u * s) @ v

    begin = {name: weight for name, weight in start().items() if name in ("wide", "tall")}
    close(ours(Muon(learning_rate=0.02, **COMMON), begin), theirs(move, begin, 0.02), tolerance=1e-10)


LARGE = {"wide": (8, 600), "tall": (70, 61), "table": (100, 50), "gain": (300,)}  # blocks of 200 and 61; rows uneven


def test_8_bit_adamw_follows_its_paper() -> None:
    """With the codes' values made from their bits, and each number's nearest found by looking at all of them."""
    signed, unsigned = _dynamic_tree(signed=True), _dynamic_tree(signed=False)
    kept: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def move(weights: Weights, grads: Weights, rate: float, update: int) -> None:
        for name, grad in grads.items():
            g, w = grad.double().numpy(), weights[name].double().numpy()
            m, v = kept.get(name, (np.zeros_like(g), np.zeros_like(g)))
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            step = m / (1 - 0.9**update) / (np.sqrt(v / (1 - 0.95**update)) + 1e-8)
            weights[name] = torch.from_numpy(w - rate * (step + decay(name) * w))
            if name in ("wide", "tall"):
                m, v = _rounded(m, signed), _rounded(v, unsigned[1:])  # a second moment never becomes zero
            kept[name] = (m, v)

    begin = start(LARGE)
    close(ours(AdamW8bit(learning_rate=0.02, **COMMON), begin), theirs(move, begin, 0.02), tolerance=1e-11)


def test_8_bit_adamw_keeps_close_to_adamw() -> None:
    begin = start(LARGE)
    full = ours(AdamW(learning_rate=0.02, **COMMON), begin)
    coded = ours(AdamW8bit(learning_rate=0.02, **COMMON), begin)
    assert torch.equal(full["table"], coded["table"]) and torch.equal(full["gain"], coded["gain"])
    way = (full["wide"] - begin["wide"]).norm()
    assert 1e-4 < (full["wide"] - coded["wide"]).norm() / way < 0.1


def test_8_bit_adamw_equals_bitsandbytes() -> None:
    """But for the few numbers (within 3e-5 of a block's scale) that stand half-way between two codes: its processor
    kernel takes either there, and the moments of such a number go their own way for a while.
    """
    golden = load_file(eight_bits.FILE)
    for kind, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        torch.testing.assert_close(
            torch.tensor(table(signed=signed)), golden[f"{kind}_table"], rtol=1e-6, atol=0, check_dtype=False
        )
    weight = nn.Parameter(eight_bits.begin())
    settings = AdamW8bit(
        learning_rate=eight_bits.RATE,
        weight_decay=eight_bits.DECAY,
        betas=eight_bits.BETAS,
        eps=eight_bits.EPS,
        schedule=Constant(),
    )
    layer = OptimLayer(settings, [("weight", weight)], total=eight_bits.UPDATES)
    for update in range(1, eight_bits.UPDATES + 1):
        weight.grad = eight_bits.gradient(update)
        layer.step(update)
    apart = (weight.detach() - golden["weight"]).abs()
    assert (apart > 1e-5).float().mean() < 0.05
    assert apart.norm() < 1e-3 * (golden["weight"] - eight_bits.begin()).norm()
    state = layer.state()
    for kind in ("exp_avg", "exp_avg_sq"):
        scales = state[f"{kind}_scales/weight"].flatten()
        torch.testing.assert_close(scales, golden[f"{kind}_scales"], rtol=1e-3, atol=0)
        off = state[f"{kind}_codes/weight"].int() - golden[f"{kind}_codes"].int()
        assert off.ne(0).float().mean() < 0.02, kind


def _dynamic_tree(*, signed: bool) -> np.ndarray:
    """The numbers of all 256 codes, from their bits: (sign,) leading zeros, a one, and the fraction after it.

    n leading zeros: the decade below 10^-n; the fraction's bits cut [0.1, 1) into equal cells, whose middles stand for
    them. The code without a one is 0; the one that would be minus zero (signed) or has no bit left (unsigned) is 1.
    """
    width = 7 if signed else 8
    values = [0.0, 1.0]
    for code in range(2 if not signed else 1, 2**width):
        bits = f"{code:0{width}b}"
        zeros = bits.index("1")
        fraction = bits[zeros + 1 :]
        cell = int(fraction, 2) if fraction else 0
        value = 10.0**-zeros * (0.1 + 0.9 * (cell + 0.5) / 2 ** len(fraction))
        values += [value, -value] if signed else [value]
    assert len(values) == 256, len(values)
    return np.sort(np.array(values))


def _rounded(values: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Each number as the nearest known one, in blocks of at most 256, as alike as can be, of each row; zero as zero."""
    made = np.empty_like(values)
    length = values.shape[1]
    each = math.ceil(length / math.ceil(length / 256))
    for row in range(values.shape[0]):
        for begin in range(0, length, each):
            block = values[row, begin : begin + each]
            scale = np.abs(block).max() or 1.0
            nearest = np.abs(block[:, None] / scale - known[None]).argmin(1)
            made[row, begin : begin + each] = np.where(block == 0, 0.0, known[nearest] * scale)
    return made


def _rms(x: Tensor) -> float:
    return x.pow(2).mean().sqrt().item()


class _Two:
    """Two optimisers as one."""

    def __init__(self, *both: torch.optim.Optimizer) -> None:
        self.both = both
        self.param_groups = [group for one in both for group in one.param_groups]

    def step(self) -> None:
        for one in self.both:
            one.step()


def _name(group: dict[str, object], begin: Weights) -> str:
    [weight] = group["params"]  # type: ignore[misc]
    return next(name for name, one in begin.items() if one.shape == weight.shape)
