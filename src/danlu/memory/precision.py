"""Which numbers are low and which are not.

Under bf16, fp16 and fp8 only matrix products are low: weights, gradients, moments, norms, softmax, the loss and RoPE's
phases are fp32 (at least: in fp64 they are fp64). Master weights are therefore always whole, and an update of 1e-3 on a
weight of 1.0, which bf16 would round away, is kept. Pure bf16, in which weights, gradients and moments are bf16 too and
updates are rounded stochastically, is a choice of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from danlu.core import device as devices
from danlu.core.config import setting
from danlu.core.errors import InputError
from danlu.models.heads import LanguageHead
from danlu.models.linear import Float8Linear, fits
from danlu.models.product import Linear
from danlu.models.stack import Block, Trunk

Name = Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp64", "bf16_pure"]
Product = Literal["auto", "fp32", "bf16", "fp16", "fp8"]
Sum = Literal["auto", "fp32", "bf16", "fp16"]
Exact = Literal["auto", "fp32"]
FP8 = torch.float8_e4m3fn
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8, "fp64": torch.float64}
WORDS = {dtype: word for word, dtype in DTYPES.items()}
HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What each part of the model computes in, where that is not to follow from memory.precision."""

    attention: Product = setting("auto", "products and kernel of attention")
    mlp: Product = setting("auto", "products of the feed-forward part")
    head: Sum = setting("auto", "products of the head: logits and their gradients")
    residual: Sum = setting("auto", "the stream of hidden states that blocks add to; auto: as weights are stored")
    norm: Exact = setting("auto", "norms; never below fp32")
    softmax: Exact = setting("auto", "attention's softmax and its sums; never below fp32")
    phases: Exact = setting("auto", "rotary phases; never below fp32")
    loss: Exact = setting("auto", "log-sum-exp, the loss and its sums; never below fp32")


class Line(NamedTuple):
    """What is said of a role: what it is stored in, what it computes in, and why."""

    role: str
    stored: str
    computed: str
    why: str


@dataclass(frozen=True, slots=True)
class Precision:
    """What numbers are kept and computed in.

    weights   weights, gradients and moments are stored in it
    products  most matrix products are made in it (autocast's dtype, where it is lower than fp32)
    roles     of each role, what it is computed in
    """

    name: Name
    weights: torch.dtype
    products: torch.dtype
    roles: Mapping[str, torch.dtype]

    @property
    def low(self) -> bool:
        """Whether products run under autocast."""
        return self.products in HALF

    @property
    def attention(self) -> torch.dtype:
        """What attention's kernel runs in."""
        return self.products if self.roles["attention"] == FP8 else self.roles["attention"]

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled: something is computed in fp16."""
        return torch.float16 in (self.products, *self.roles.values())

    @property
    def pure(self) -> bool:
        """Whether weights are stored so low that an update must be rounded stochastically."""
        return self.weights in HALF


_KNOWN: dict[str, tuple[torch.dtype, torch.dtype, dict[str, torch.dtype]]] = {
    "fp32": (torch.float32, torch.float32, {}),
    "bf16": (torch.float32, torch.bfloat16, {}),
    "fp16": (torch.float32, torch.float16, {}),
    "fp8": (torch.float32, torch.bfloat16, {"attention": FP8, "mlp": FP8}),
    "fp64": (torch.float64, torch.float64, {}),
    "bf16_pure": (torch.bfloat16, torch.bfloat16, {}),
}


def choose(name: Name, device: torch.device, roles: Roles | None = None) -> Precision:
    """The precision of that name, with the roles that are chosen otherwise.

    `auto` is bf16 where the device multiplies it itself, else fp16 on a GPU that has no bf16, else fp32. Raises
    InputError for what the device lacks and for choices that do not go together.
    """
    can = devices.abilities(device)
    if name == "auto":
        name = "bf16" if can.bf16 else "fp16" if can.fp16 and device.type == "cuda" else "fp32"
    _refuse("memory.precision", name, can)
    weights, products, _ = _KNOWN[name]
    exact = torch.promote_types(weights, torch.float32)
    chosen = roles or Roles()
    given = {f.name: getattr(chosen, f.name) for f in fields(chosen) if getattr(chosen, f.name) != "auto"}
    for role, word in given.items():
        _refuse(f"memory.roles.{role}", word, can)
        _refuse_together(name, role, word)
    asked = {role: _at_least(word, exact) for role, word in given.items()}
    return Precision(name, weights, products, usual(name) | asked)


def usual(name: Name) -> dict[str, torch.dtype]:
    """What each role computes in under the precision of that name, where nothing else is said."""
    weights, products, own = _KNOWN[name]
    exact = torch.promote_types(weights, torch.float32)
    most = {"attention": products, "mlp": products, "head": products, "residual": weights}
    return {**most, **dict.fromkeys(("norm", "softmax", "phases", "loss"), exact), **own}


def _at_least(word: str, exact: torch.dtype) -> torch.dtype:
    """The dtype of that name; fp32 means at least fp32."""
    return exact if word == "fp32" else DTYPES[word]


def _refuse(path: str, word: str, can: devices.Abilities) -> None:
    """Raises InputError where the device cannot do it. A CPU emulates fp16 and fp8, which is told elsewhere."""
    lacks = {
        "bf16": not can.bf16,
        "bf16_pure": not can.bf16,
        "fp16": not can.fp16 and can.kind != "cpu",
        "fp8": not can.fp8 and can.kind != "cpu",
        "fp64": can.kind == "mps",
    }
    if lacks.get(word):
        would = "auto and fp32" if not can.bf16 else "auto, bf16 and fp32"
        more = " (it begins with compute capability 8.9)" if word == "fp8" and can.kind == "cuda" else ""
        raise InputError(f"{path}: {can.name} cannot multiply {word}{more}; {would} would do")


def _refuse_together(name: str, role: str, word: str) -> None:
    if name == "fp64" and word != "fp32":
        raise InputError(f"memory.roles.{role}: {word} does not go with memory.precision fp64, in which all is exact")
    if name == "bf16_pure" and word == "fp16":
        raise InputError(f"memory.roles.{role}: fp16 does not go with memory.precision bf16_pure; bf16 would do")
    if name == "bf16_pure" and role in ("attention", "mlp") and word == "fp32":
        raise InputError(
            f"memory.roles.{role}: fp32 products want fp32 weights, which memory.precision bf16_pure does not keep; "
            "memory.precision: bf16 does"
        )


def remarks(
    asked: Name,
    precision: Precision,
    device: torch.device,
    sizes: Mapping[str, int],
    *,
    given: torch.dtype | None = None,
) -> tuple[str, ...]:
    """What was chosen because the device lacks something better, or will be slow or otherwise done, a sentence each.

    sizes: of the products' sides, by name. given: what the weights that the run starts from are stored in.
    """
    can, said = devices.abilities(device), []
    used = {precision.products, *precision.roles.values()}
    if asked == "auto" and precision.name != "bf16":
        said.append(f"memory.precision auto: {precision.name}, since {can.name} does not multiply bf16 itself")
    for dtype, has in ((torch.float16, can.fp16), (FP8, can.fp8), (torch.bfloat16, can.bf16)):
        if dtype in used and not has:
            word = WORDS[dtype]
            said.append(f"{word} is emulated on this {can.kind}: right, but slow (bf16 and fp32 are many times faster)")
    odd = [f"{name} {size}" for name, size in sizes.items() if size % 16]
    if FP8 in used and odd:
        said.append(
            f"fp8 wants sizes that are multiples of 16; products over {', '.join(odd)} stay {WORDS[precision.products]}"
        )
    if given is not None and given != precision.weights:
        kept = WORDS[precision.weights]
        how = "rounded to" if given.itemsize > precision.weights.itemsize else "trained as"
        said.append(f"the weights that the run starts from are {WORDS.get(given, given)}; they are {how} {kept}")
    return tuple(said)


def table(precision: Precision, *, moments: tuple[Sequence[torch.dtype], str] | None = None) -> Iterator[Line]:
    """What each role is stored in and computed in, and why. moments: the optimiser's dtypes, and what they are; None:
    as weights are stored."""
    stored = WORDS[precision.weights]
    computed = {role: WORDS[dtype] for role, dtype in precision.roles.items()}
    most = "most of the work, and the least hurt by rounding" if precision.low else "one arithmetic throughout"
    why = {
        "attention": most,
        "mlp": most,
        "head": f"{most}; its gradients are summed in fp32" if precision.low else most,
        "residual": "the sum of all that blocks add: small parts must not be lost in it",
        "norm": "a sum of squares over a whole row",
        "softmax": "made and summed high, of whatever dtype its scores are",
        "phases": "bf16 cannot tell position 256 from 257",
        "loss": "a sum over a whole batch",
    }
    why |= {role: f"e4m3, its gradients e5m2; {most}" for role, word in computed.items() if word == "fp8"}
    asked = [role for role, dtype in usual(precision.name).items() if precision.roles[role] != dtype]
    why |= {role: f"as memory.roles.{role} says" for role in asked}
    yield Line("embedding", stored, "a lookup", "nothing is multiplied")
    for role in ("residual", "norm", "attention", "softmax", "phases", "mlp", "head", "loss"):
        own = role in ("norm", "attention", "mlp", "head")
        yield Line(role, stored if own else "-", computed[role], why[role])
    yield Line("gradients", stored, "-", "summed over micro-batches and ranks")
    dtypes, what = moments or ((precision.weights,), "what the optimizer keeps of each weight")
    held = ", ".join(WORDS.get(dtype, str(dtype).removeprefix("torch.")) for dtype in dtypes) or "-"
    yield Line("moments", held, ("fp32" if precision.pure else stored) if dtypes else "-", what)
    rounded = "rounded stochastically: to the nearest, small updates would be lost" if precision.pure else "kept whole"
    yield Line("update", stored, "fp32" if precision.pure else stored, rounded)
    if precision.scaled:
        yield Line("loss scale", "-", "fp32", "keeps fp16's small gradients above 6e-8; halved when one overflows")


def apply(model: Trunk, precision: Precision) -> None:
    """Each part of the model computes as its role says, within ``MemoryLayer.policy``.

    To be called before anything takes hold of the model (recomputing, compiling, sharding). Weights and their names
    stay as they are.
    """
    roles, base, stream = precision.roles, precision.products, precision.roles["residual"]
    usual = precision.low or stream == base  # norms then give the base by themselves
    for block in model.blocks.values():
        assert isinstance(block, Block)
        for role, norm, part in (
            ("attention", block.attention_norm, block.attention),
            ("mlp", block.mlp_norm, block.mlp),
        ):
            dtype = base if roles[role] == FP8 else roles[role]
            if roles[role] == FP8:
                _to_fp8(part)
            if dtype != base or not usual:
                _within(norm, dtype)
                _within(part, dtype)
            if stream in HALF and dtype != stream:  # or the sum of both would be wider than the stream
                part.register_forward_hook(_cast_to(stream))
            if role == "attention" and (dtype != base or not usual):
                model.attends_in = dtype
    if roles["head"] != base or not usual:
        head = model.heads["language"]
        assert isinstance(head, LanguageHead)
        head.products = roles["head"]
        if model.norm is not None:
            _within(model.norm, roles["head"])
    if stream != precision.weights:
        for rows in (model.embed, model.places):
            if rows is not None:
                rows.register_forward_hook(_cast_to(stream))


def _to_fp8(part: nn.Module) -> None:
    """Its linear products whose sizes fit are made in fp8."""
    for name, linear in list(part.named_children()):
        if type(linear) is Linear and fits(linear):
            setattr(part, name, Float8Linear.of(linear))


def _within(part: nn.Module, dtype: torch.dtype) -> None:
    """Its forward computes in that dtype: under autocast where it is low, else under none, with its input in it."""
    plain: Callable[..., Any] = part.forward

    def forward(hidden: Tensor, *rest: Any) -> Any:
        with torch.autocast(hidden.device.type, dtype=dtype if dtype in HALF else None, enabled=dtype in HALF):
            return plain(hidden if dtype in HALF else hidden.to(dtype), *rest)

    part.forward = forward


def _cast_to(dtype: torch.dtype) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda module, given, made: made.to(dtype)
