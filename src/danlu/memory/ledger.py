"""Where the bytes are: a forecast by closed formulas, for a model's shape, a precision, a micro-batch and a layout.

Everything here is counted as autograd and our own functions keep it: memory by memory, once however many tensors look
at it, so that it can be held against `tracker`. Sizes: n tokens in a micro-batch, D hidden, Q queries, K keys (heads
times their size), I inner, V vocabulary; w bytes of a weight's number and of the residual stream's, p of a product's,
e of an exact sum's (at least 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from danlu.memory.activations import AHEAD
from danlu.memory.recompute import KINDS, Budget, Kind, Recompute
from danlu.models import heads
from danlu.models.attention import Path
from danlu.models.shape import Shape

INDEX = 8  # bytes of a token id, a label, a position, a document's number
CHEAP = 0.1  # time of recomputing a block selectively, against fully: no matrix product is made again


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All that decides the bytes of one update on one rank.

    parameters     numbers learned, over all ranks
    rows, micros   of a micro-batch; micro-batches of an update
    weight, product   bytes of a weight's number, and of a product's
    weights, gradients, moments   bytes of them on this rank, at most
    working   bytes that the update itself takes beside them
    gathered, travel   where weights are cut over ranks: bytes of whole copies in use, and of buffers under way
    elsewhere   bytes of these that are not on the device: on the host or a disk
    waiting  whether activations wait on the host for their backward
    block    logits that the head turns into probabilities at a time
    path     how packed rows are attended to; None: rows hold one document each
    kinds    of recomputation, one a block
    """

    shape: Shape
    parameters: int
    sequence_length: int
    rows: int
    micros: int
    weight: int
    product: int
    weights: int
    gradients: int
    moments: int
    path: Path | None
    working: int = 0
    kinds: tuple[Kind, ...] = ()
    gathered: int = 0
    travel: int = 0
    waiting: bool = False
    block: int = heads.BLOCK
    elsewhere: int = 0

    @property
    def tokens(self) -> int:
        """In one micro-batch."""
        return self.rows * self.sequence_length

    @property
    def exact(self) -> int:
        """Bytes of a number in sums, softmax and the head's weight gradient."""
        return max(4, self.product)

    @property
    def one(self) -> int:
        """Bytes of the weights of one block, or of their gradients, biases and norms left out."""
        s = self.shape
        products = 2 * (s.heads + s.key_value_heads) * s.head_dim + (3 if s.gated else 2) * s.inner_size
        return products * s.hidden_size * self.weight

    @property
    def low(self) -> bool:
        """Whether products are in fewer bytes than weights."""
        return self.product < self.weight


@dataclass(frozen=True, slots=True)
class Ledger:
    """A forecast: bytes by part at the moment when most are held."""

    moment: str
    parts: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Bytes in all."""
        return sum(self.parts.values())


def kept(case: Case, kind: Kind) -> dict[str, int]:
    """What one block keeps from its forward to its backward, by part of the block."""
    s, n, w, p = case.shape, case.tokens, case.weight, case.product
    if kind == "full":
        return {"input": n * s.hidden_size * w}
    d, q, k, i = s.hidden_size, s.heads * s.head_dim, s.key_value_heads * s.head_dim, s.inner_size
    joined = q + 2 * k
    scores = n * s.heads * case.exact  # the softmax's log-sum-exp
    if kind == "selective":
        up = 2 * i if s.gated else i
        return {"input": n * d * w, "products": n * (joined + d + up) * p, "attention": n * q * p + scores}
    scales = (1 if s.norm == "rms" else 2) * n * case.exact
    turned = q + k if s.positions == "rope" else 0
    cut = q if case.path == "loop" else 0
    inner = 4 * i if s.gated else 2 * i
    copies = joined * d * p + (2 * i * d * p if s.gated else 0)
    return {
        "norms": 2 * (n * d * max(w, case.exact) + scales + n * d * p),
        "attention": n * (joined + turned + q + cut) * p + scores,
        "mlp": n * inner * p,
        "weights side by side": copies,
    }


def choose(setting: Recompute, case: Case) -> tuple[Kind, ...]:
    """The kind of each block, first to last: the setting's; for a budget the least recomputation that keeps to it.

    What is recomputed stands first: by the time those blocks' backward comes, the others' activations are gone. Where
    not even full recomputation of all keeps to the budget, that is what is chosen.
    """
    layers = case.shape.layers
    if not isinstance(setting, Budget):
        return (setting,) * layers
    each = {kind: sum(kept(case, kind).values()) for kind in KINDS}
    allowed = setting.budget * layers * each["none"]
    mixes = ((full, some, layers - full - some) for full in range(layers + 1) for some in range(layers - full + 1))
    fitting = [
        (full + CHEAP * some, full, some, rest)
        for full, some, rest in mixes
        if full * each["full"] + some * each["selective"] + rest * each["none"] <= allowed
    ]
    _, full, some, rest = min(fitting, default=(0, layers, 0, 0))
    counts: dict[Kind, int] = {"full": full, "selective": some, "none": rest}
    return tuple(kind for kind, count in counts.items() for _ in range(count))


def forecast(case: Case) -> Ledger:
    """The moment of an update at which most is held, and what is."""
    moments = {
        "in the language head": _head(case),
        "in the backward of the last block": _backward(case),
        "in the backward of the block before the last": _backward(case, after=1),
        "in the backward of the embedding": _embedding(case),
        "in the update": _rest(case) | {"gradients": case.gradients, "working": case.working},
    }
    name = max(moments, key=lambda name: sum(moments[name].values()))
    return Ledger(name, moments[name])


def _rest(case: Case) -> dict[str, int]:
    """What is there all the time: weights, moments, and the rows of the whole update."""
    return {
        "weights": case.weights,
        "moments": case.moments,
        "batch": 4 * INDEX * case.micros * case.tokens,
    }


def _activations(case: Case) -> dict[str, int]:
    """All that the backward waits for once the forward is done, the head's part left out."""
    s, n = case.shape, case.tokens
    each = [sum(kept(case, kind).values()) for kind in case.kinds]
    blocks = min(sum(each), 2 * max(each) + AHEAD) if case.waiting else sum(each)  # one leaves, others are on their way
    turn = n * s.head_dim * case.product if s.positions == "rope" else 0
    last = n * s.hidden_size * max(case.weight, case.exact) + (1 if s.norm == "rms" else 2) * n * case.exact
    mask = case.rows * case.sequence_length**2 * case.product if case.path == "mask" else 0
    casts = 0
    if case.low:  # autocast keeps its copies of plain weights to the end of the update
        inner = s.heads * s.head_dim + s.inner_size * (1 if s.gated else 2)
        casts = s.layers * inner * s.hidden_size * case.product
    return {"activations": blocks + turn + last + mask, "low weights": casts, "gathered weights": case.gathered}


def _gradients(case: Case, own: int) -> dict[str, int]:
    """Gradients held while a backward runs: its own, and from the second micro-batch on those of all weights."""
    return {"gradients": own + (case.gradients if case.micros > 1 else 0)}


def _head(case: Case) -> dict[str, int]:
    s, n, p, e = case.shape, case.tokens, case.product, case.exact
    v, d = s.vocab_size, s.hidden_size
    most = max(1, min(heads.ROWS, heads.LOGITS // v))
    pieces = max(1, -(-n // most))
    size = -(-n // pieces)
    hidden = 3 * n * d * p  # as it came, with unasked rows zeroed, and its gradient
    chunk = size * v * p
    block = min(size, max(1, case.block // v)) * v * e * (2 if p < e else 1)
    low = v * d * p if p != case.weight else 0  # the weight
    product = v * d * p if p < e else 0  # its gradient by one chunk
    cast = v * d * case.weight if case.weight < e else 0  # all of that, as the weight is stored
    work = max(block + (product if pieces > 1 else 0), product + n * d * p + cast)
    small = n * (2 * INDEX + 2 * 1 + 2 * e)
    return (
        _rest(case) | _activations(case) | _gradients(case, v * d * e) | {"head": hidden + chunk + low + work + small}
    )


def _backward(case: Case, after: int = 0) -> dict[str, int]:
    """In a block's backward, with `after` blocks done: the gradients in its feed-forward part, where most are alive.

    There the gradients of the product and of its two factors stand beside the factors, n (3 I) p more than was kept,
    less the product itself. What is recomputed is there again.
    """
    s, n, w, p = case.shape, case.tokens, case.weight, case.product
    d, i = s.hidden_size, s.inner_size
    kinds = case.kinds[: len(case.kinds) - after]
    if not kinds:
        return {}
    again = sum(kept(case, "none").values()) - sum(kept(case, kinds[-1]).values())
    gone = 0 if case.waiting else sum(sum(kept(case, kind).values()) for kind in case.kinds[len(kinds) :])
    activations = _activations(case)
    activations["activations"] -= gone + n * d * max(w, case.exact)  # what the last norm kept is gone too
    stream = n * d * (w + (p if case.low else 0))
    inner = (2 if s.gated else 1) * n * i * p
    done = case.one * after + i * d * w  # gradients of the blocks that are done, and of this one's last product
    own = s.vocab_size * d * w + (0 if case.micros > 1 else done)
    return (
        _rest(case)
        | activations
        | _gradients(case, own)
        | {"backward": stream + inner + again, "travel": case.travel if after else 0}
    )


def _embedding(case: Case) -> dict[str, int]:
    """The last of a backward: the embedding's gradient is made, whole, beside all others.

    A tied weight's has waited for it since the head's part was made, and autograd adds the two into a third.
    """
    s = case.shape
    table = s.vocab_size * s.hidden_size * case.weight
    again = table * ((2 if s.tied else 0) + (1 if case.micros > 1 else 0))
    return _rest(case) | {
        "gradients": case.gradients + again,
        "gathered weights": case.gathered,
        "travel": case.travel,
        "backward": case.tokens * s.hidden_size * case.weight,
    }
