"""Precisions by name and by role: what is chosen, what is refused, and what the model then really computes in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.core import device as devices
from danlu.core.errors import InputError
from danlu.memory.layer import MemoryLayer
from danlu.memory.precision import Roles, apply, choose, remarks, table
from danlu.models.families.llama import Llama
from danlu.models.linear import Float8Linear
from danlu.models.stack import Trunk
from danlu.models.start import fill

CPU = torch.device("cpu")
SIZES = Llama(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
    max_position_embeddings=16,
)  # fmt: skip


def able(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> None:
    """The device is said to be able to do this, and not that."""
    usual = devices.abilities(CPU)
    monkeypatch.setattr(devices, "abilities", lambda device: replace(usual, **facts))


@pytest.mark.parametrize(
    ("kind", "bf16", "fp16", "chosen"),
    [("cpu", True, False, "bf16"), ("cpu", False, False, "fp32"), ("cuda", True, True, "bf16"),
     ("cuda", False, True, "fp16"), ("mps", False, True, "fp32")],
)  # fmt: skip
def test_auto(monkeypatch: pytest.MonkeyPatch, kind: str, bf16: bool, fp16: bool, chosen: str) -> None:
    able(monkeypatch, kind=kind, bf16=bf16, fp16=fp16, name="this one")
    device = torch.device(kind)
    precision = choose("auto", device)
    assert precision.name == chosen and precision.weights == torch.float32
    said = remarks("auto", precision, device, {})
    assert bool(said) == (chosen != "bf16") and all("this one does not multiply bf16" in text for text in said)
    assert precision.scaled == (chosen == "fp16")


@pytest.mark.parametrize(
    ("name", "facts", "said"),
    [
        ("bf16", {"bf16": False}, "memory.precision: X cannot multiply bf16; auto and fp32 would do"),
        ("bf16_pure", {"bf16": False}, "memory.precision: X cannot multiply bf16_pure; auto and fp32 would do"),
        ("fp8", {"kind": "cuda"}, r"memory.precision: X cannot multiply fp8 \(it begins with compute capability 8.9\)"),
        ("fp8", {"kind": "mps"}, "memory.precision: X cannot multiply fp8; auto, bf16 and fp32 would do"),
        ("fp16", {"kind": "mps"}, "memory.precision: X cannot multiply fp16"),
        ("fp64", {"kind": "mps"}, "memory.precision: X cannot multiply fp64"),
    ],
)
def test_what_the_device_lacks_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: Any, facts: dict[str, Any], said: str
) -> None:
    able(monkeypatch, **{"name": "X", "bf16": True, "fp16": False, "fp8": False, **facts})
    with pytest.raises(InputError, match=said):
        choose(name, CPU)
    if name in ("bf16", "fp16", "fp8"):
        with pytest.raises(InputError, match=r"memory.roles.mlp: X cannot"):
            choose("fp32", CPU, Roles(mlp=name))


@pytest.mark.parametrize(
    ("name", "role", "said"),
    [
        ("fp64", {"mlp": "bf16"}, "memory.roles.mlp: bf16 does not go with memory.precision fp64"),
        ("bf16_pure", {"head": "fp16"}, "memory.roles.head: fp16 does not go with memory.precision bf16_pure"),
        ("bf16_pure", {"attention": "fp32"}, "memory.roles.attention: fp32 products want fp32 weights"),
    ],
)
def test_what_does_not_go_together_is_refused(name: Any, role: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        choose(name, CPU, Roles(**role))


def test_what_is_emulated_or_left_out_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    able(monkeypatch, bf16=True, fp16=False, fp8=False)
    slow = "is emulated on this cpu: right, but slow"
    assert slow in remarks("fp16", choose("fp16", CPU), CPU, {})[0]
    sizes = {"hidden_size": 32, "intermediate_size": 50}
    said = remarks("fp8", choose("fp8", CPU), CPU, sizes)
    assert [slow in said[0], said[1]] == [
        True, "fp8 wants sizes that are multiples of 16; products over intermediate_size 50 stay bf16"
    ]  # fmt: skip
    assert remarks("bf16", choose("bf16", CPU), CPU, sizes, given=torch.float32) == ()
    starts = "the weights that the run starts from are"
    for name, given, said in (
        ("bf16_pure", torch.float32, f"{starts} fp32; they are rounded to bf16"),
        ("fp32", torch.float16, f"{starts} fp16; they are trained as fp32"),
        ("bf16_pure", torch.bfloat16, None),
    ):
        assert remarks(name, choose(name, CPU), CPU, sizes, given=given) == (() if said is None else (said,))


def test_fp32_for_a_role_is_at_least_fp32() -> None:
    precision = choose("fp64", CPU, Roles(head="fp32", norm="fp32"))
    assert precision == choose("fp64", CPU) and precision.roles["head"] == torch.float64


def test_table() -> None:
    lines = {line.role: line for line in table(choose("bf16", CPU, Roles(head="fp32", mlp="fp8")))}
    assert list(lines) == [
        "embedding", "residual", "norm", "attention", "softmax", "phases", "mlp", "head", "loss", "gradients",
        "moments", "update",
    ]  # fmt: skip
    assert all(line.why for line in lines.values())
    computed = {role: line.computed for role, line in lines.items()}
    assert computed["attention"] == "bf16" and computed["mlp"] == "fp8"
    assert lines["mlp"].why == "as memory.roles.mlp says"
    assert "e5m2" in {line.role: line.why for line in table(choose("fp8", CPU))}["mlp"]
    assert {computed[role] for role in ("residual", "norm", "softmax", "phases", "head", "loss")} == {"fp32"}
    assert lines["attention"].stored == "fp32" and lines["softmax"].stored == "-"
    pure = {line.role: line for line in table(choose("bf16_pure", CPU))}
    assert {pure[role].stored for role in ("embedding", "attention", "gradients", "moments")} == {"bf16"}
    kept = ((torch.float32, torch.bfloat16, torch.uint8), "rows and columns")
    told = {line.role: line for line in table(choose("bf16_pure", CPU), moments=kept)}["moments"]
    assert told == ("moments", "fp32, bf16, uint8", "fp32", "rows and columns")
    none = {line.role: line for line in table(choose("bf16", CPU), moments=((), "none"))}["moments"]
    assert (none.stored, none.computed) == ("-", "-")
    assert "stochastically" in pure["update"].why and pure["norm"].computed == "fp32"
    assert [line.role for line in table(choose("fp16", CPU))][-1] == "loss scale"


class Products(TorchDispatchMode):
    """The dtypes that matrix products and attention get, and that softmax and norms are made in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        tensors = [a for a in args if isinstance(a, Tensor)]
        if tensors:
            self.seen.setdefault(name, []).append(tensors[-1].dtype)
        return func(*args, **(kwargs or {}))


def computed(name: Any, **roles: Any) -> tuple[dict[str, set[torch.dtype]], Trunk, Tensor]:
    """The dtypes of each part's products in a forward and backward, by part."""
    precision = choose(name, CPU, Roles(**roles))
    model = SIZES.build()
    apply(model, precision)
    model.to(precision.weights)
    fill(model, 1)
    memory = MemoryLayer(device=CPU, precision=precision)
    tokens = torch.arange(16)[None] % 40
    places = torch.arange(16)[None]
    seen: dict[str, set[torch.dtype]] = {}
    for path, part in model.named_modules():
        kind = path.rpartition(".")[2]
        if kind in ("attention", "mlp", "attention_norm", "mlp_norm", "embed", "norm"):
            part.register_forward_hook(lambda m, a, out, kind=kind: seen.setdefault(kind, set()).add(out.dtype))
    for block in model.blocks.values():
        block.attention.register_forward_pre_hook(lambda m, a: seen.setdefault("phases", set()).add(a[1][0].dtype))
        block.register_forward_hook(lambda m, a, out: seen.setdefault("stream", set()).add(out.dtype))
    with memory.policy(), Products() as products:
        hidden = model(tokens, places, torch.zeros_like(tokens), packed=False)
        seen["mm"] = {t for n in ("mm", "addmm", "bmm") for t in products.seen.get(n, [])}
        seen["attend"] = {
            t for n, ts in products.seen.items() if "scaled_dot_product" in n for t in ts if t.is_floating_point
        }
        seen["fp8"] = set(products.seen.get("_scaled_mm", []))
        products.seen.clear()
        loss = model.heads["language"].nll(hidden, tokens)
        seen["head"] = set(products.seen["mm"])
        products.seen.clear()
        with torch.autocast("cpu", enabled=False):  # as the compute layer does
            loss.backward()
        seen["mm back"] = {t for n in ("mm", "addmm", "bmm") for t in products.seen.get(n, [])}
    assert loss.dtype == torch.promote_types(precision.weights, torch.float32)
    assert all(
        p.grad is not None and p.grad.dtype == precision.weights and p.grad.isfinite().all() for p in model.parameters()
    )
    return seen, model, loss.detach()


F32, B16, F16 = {torch.float32}, {torch.bfloat16}, {torch.float16}


@pytest.mark.parametrize(
    ("name", "roles", "attention", "mlp", "head", "residual"),
    [
        ("fp32", {}, F32, F32, F32, F32),
        ("bf16", {}, B16, B16, B16, F32),
        ("fp16", {}, F16, F16, F16, F32),
        ("bf16_pure", {}, B16, B16, B16, B16),
        ("bf16", {"head": "fp32"}, B16, B16, F32, F32),
        ("bf16", {"attention": "fp32"}, F32, B16, B16, F32),
        ("bf16", {"mlp": "fp32"}, B16, F32, B16, F32),
        ("bf16", {"residual": "bf16"}, B16, B16, B16, B16),
        ("bf16", {"residual": "bf16", "attention": "fp32", "head": "fp32"}, F32, B16, F32, B16),
        ("fp32", {"residual": "bf16"}, F32, F32, F32, B16),
        ("fp32", {"residual": "bf16", "mlp": "bf16"}, F32, B16, F32, B16),
        ("fp32", {"mlp": "bf16"}, F32, B16, F32, F32),
        ("fp32", {"attention": "bf16", "head": "bf16"}, B16, F32, B16, F32),
        ("fp16", {"mlp": "bf16", "residual": "fp16"}, F16, B16, F16, F16),
        ("bf16_pure", {"head": "fp32", "residual": "fp32"}, B16, B16, F32, F32),
        ("fp64", {}, {torch.float64}, {torch.float64}, {torch.float64}, {torch.float64}),
    ],
)
def test_each_role_computes_in_what_the_table_says(
    name: Any, roles: dict[str, Any], attention: set, mlp: set, head: set, residual: set
) -> None:
    seen, _, loss = computed(name, **roles)
    stream = residual - F32 - {torch.float64}  # a low stream is never widened
    assert (seen["attention_norm"], seen["attend"], seen["attention"]) == (attention, attention, stream or attention)
    assert (seen["mlp_norm"], seen["mlp"]) == (mlp, stream or mlp)
    assert (seen["head"] - (F32 if head == F16 else set()), seen["norm"]) == (head,) * 2  # fp16's gradients are wider
    assert seen["embed"] == seen["stream"] == residual
    assert seen["phases"] == attention
    assert seen["mm"] == seen["mm back"] == attention | mlp
    exact = computed("fp64")[2]
    assert (loss.double() - exact).abs() / exact < (0.01 if B16 & {*attention, *mlp, *head} else 1e-3)


def test_fp8_is_for_the_blocks_products_alone() -> None:
    seen, model, loss = computed("fp8")
    assert seen["fp8"]
    assert seen["mm"] == set() and seen["attend"] == B16 and seen["head"] == B16 and seen["embed"] == F32
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 2 * 7 and all(type(m) is Float8Linear for m in linears)
    exact = computed("fp64")[2]
    assert 0 < (loss.double() - exact).abs() / exact < 0.02
    only, model, _ = computed("bf16", mlp="fp8")
    assert only["mm"] == B16 and sum(type(m) is Float8Linear for m in model.modules()) == 2 * 3


def test_phases_of_a_whole_attention_are_whole() -> None:
    """Where attention alone is fp32, its rotations are not made of bf16's cosines."""
    _, low, _ = computed("bf16", attention="fp32")
    assert low.attends_in == torch.float32
    _, usual, _ = computed("bf16")
    assert usual.attends_in is None


def test_weights_keep_their_names_under_every_precision() -> None:
    names = dict(SIZES.build().named_parameters()).keys()
    for name in ("fp8", "bf16", "fp16"):
        model = SIZES.build()
        apply(model, choose(name, CPU, Roles(attention="fp32", residual="bf16")))
        assert dict(model.named_parameters()).keys() == names


def test_a_blocks_roles_survive_compiling() -> None:
    precision = choose("bf16", CPU, Roles(attention="fp32", mlp="fp8"))
    results = []
    for compiled in (False, True):
        model = SIZES.build()
        apply(model, precision)
        if compiled:
            for block in model.blocks.values():
                block.compile(backend="eager", fullgraph=True)
        fill(model, 1)
        tokens = torch.arange(16)[None] % 40
        with MemoryLayer(device=CPU, precision=precision).policy():
            hidden = model(tokens, torch.arange(16)[None], torch.zeros_like(tokens), packed=False)
            F.mse_loss(hidden.float(), torch.zeros(1, 16, 32)).backward()
        results.append([hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other, rtol=2e-2, atol=2e-2 * plain.abs().max().item())
