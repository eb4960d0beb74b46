"""When compiling pays, what is said of it, and what runs as compiled code."""

from __future__ import annotations

import contextvars
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from danlu.compute import compile as compiling
from danlu.compute import graphs
from danlu.compute.compile import GAIN, MARGIN, USE, Choice, Compiled, Cost, Costs, choose
from danlu.core.errors import InputError
from danlu.models import attention
from danlu.models.attention import Scope

CPU = torch.device("cpu")
COST = Cost(10.0, "measured")


def settled(asked: Any, *, updates: int = 1000, flops: float = 1e12, peak: float | None = 1e12, cost: Cost = COST):
    return choose(asked, device=CPU, ranks=1, updates=updates, flops=flops, peak=lambda: peak, cost=cost)


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: f"/usr/bin/{name}")


def test_auto_is_on_from_where_what_is_saved_repays_the_cost_twice() -> None:
    """Seconds of an update by the assumed use of the peak; the border is where both sides are equal."""
    seconds = 1e12 / (USE * 1e12)
    border = MARGIN * COST.seconds / (GAIN["cpu"] * seconds)
    assert settled("auto", updates=int(border) + 1).compile is True
    assert settled("auto", updates=int(border)).compile is False
    assert settled("auto", updates=int(border), cost=Cost(5.0, "measured")).compile is True


def test_a_short_run_is_settled_without_measuring_the_device() -> None:
    def never() -> float:
        raise AssertionError("measured")

    choice = choose("auto", device=CPU, ranks=1, updates=3, flops=1e6, peak=never, cost=COST)
    assert choice.compile is False and "too short" in choice.why and "10 s to compile (measured)" in choice.why


def test_what_is_asked_is_done_whatever_the_length() -> None:
    assert settled(True, updates=1) == Choice(True, "compile: blocks are compiled, as asked")
    assert not settled(False, updates=10**9).on


@pytest.mark.parametrize("asked", ["auto", True])
def test_without_a_compiler_blocks_run_as_written_and_it_is_said(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    choice = settled(asked)
    assert choice.compile is False and "no C++ compiler" in choice.why and "install" in choice.why


def test_a_platform_that_is_not_known_is_not_compiled_for() -> None:
    choice = choose("auto", device=torch.device("mps"), ranks=1, updates=9, flops=1, peak=lambda: None, cost=COST)
    assert choice.compile is False and "mps" in choice.why


def test_graphs_are_refused_where_there_are_none() -> None:
    with pytest.raises(InputError, match=r"compile: graphs are CUDA's, and this device is cpu; compile: true would do"):
        settled("graphs")
    with pytest.raises(InputError, match="2 ranks gather anew"):
        graphs.refuse(torch.device("cuda"), ranks=2)
    graphs.refuse(torch.device("cuda"), ranks=1)


def test_costs_are_kept_and_told_of(tmp_path: Path) -> None:
    costs = Costs(tmp_path, 384, 6, "bf16")
    assert costs.expected(CPU).seconds == compiling.COLD["cpu"] and "first time" in costs.expected(CPU).known
    costs.keep(29.0)
    assert costs.expected(CPU) == Cost(compiling.WARM["cpu"], "estimated: compiled before")
    costs.keep(7.6)
    assert costs.expected(CPU) == Cost(7.6, "measured: compiled before")
    assert Costs(tmp_path, 384, 6, "fp32").expected(CPU).seconds == compiling.COLD["cpu"]
    costs.file.write_text("[1]")
    assert costs.expected(CPU).seconds == compiling.WARM["cpu"]
    (tmp_path / "file").write_text("")
    Costs(tmp_path / "file", 1).keep(1.0)  # nowhere to write: nothing is lost


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, hidden: Tensor, turn: Any, seen: Scope, cache: Any = None) -> Tensor:
        return hidden + self.linear(hidden).relu()


@pytest.fixture
def fresh() -> Iterator[Any]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    torch._dynamo.reset()


def test_one_code_serves_all_blocks_and_only_training_in_one_shape(fresh: Any) -> None:
    blocks, said, took = [Block() for _ in range(5)], [], []
    Compiled(blocks, say=said.append, done=took.append, backend="eager")
    run = lambda rows: [block(torch.randn(rows, 3, 8), None, Scope()) for block in blocks]  # noqa: E731
    for _ in range(3):
        sum(out.sum() for out in run(4)).backward()
    assert fresh["unique_graphs"] == 1
    with torch.no_grad():
        run(4), run(2)
    run(2)
    assert fresh["unique_graphs"] == 1
    assert len(said) == len(took) == 1 and "ready after" in said[0] and took[0] > 0
    assert set(dict(blocks[0].named_parameters())) == {"linear.weight", "linear.bias"}  # names are as they were


def test_smaller_batches_that_come_first_are_not_what_is_compiled_for(fresh: Any) -> None:
    block, took = Block(), []
    Compiled([block], say=lambda text: None, done=took.append, rows=4, backend="eager")
    for rows in (1, 2, 3):
        block(torch.randn(rows, 3, 8), None, Scope())
    assert not fresh["unique_graphs"] and not took
    block(torch.randn(4, 3, 8), None, Scope())
    block(torch.randn(2, 3, 8), None, Scope())
    assert fresh["unique_graphs"] == 1 and len(took) == 1


def test_any_number_of_documents_is_one_code(fresh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packed rows go by cuts, as on CUDA; here with something else in the kernel's place."""
    monkeypatch.setattr(attention, "_varlen", lambda q, k, v, cuts: q + v * cuts.sum())

    class Attending(Block):
        def forward(self, hidden: Tensor, turn: Any, seen: Scope, cache: Any = None) -> Tensor:
            heads = self.linear(hidden).unflatten(-1, (2, 4))
            return attention.attend(heads, heads, heads, seen).flatten(-2)

    blocks = [Attending() for _ in range(2)]
    Compiled(blocks, say=lambda text: None, backend="eager")
    for count in (3, 7, 5, 12):
        cuts = torch.arange(count, dtype=torch.int32)
        hidden = torch.randn(2, 3, 8)
        made = [block(hidden, None, Scope(cuts=cuts)) for block in blocks]
        assert all(torch.allclose(out, block.linear(hidden) * (1 + cuts.sum())) for out, block in zip(made, blocks))
    assert fresh["unique_graphs"] == 1


def test_where_compiling_fails_all_runs_as_written_and_it_is_said_once(fresh: Any) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise OSError("g++ ended with 1")

    blocks, said = [Block(), Block()], []
    compiled = Compiled(blocks, say=said.append, done=said.append, backend=broken)
    hidden = torch.randn(2, 3, 8)
    for block in blocks:
        assert torch.equal(block(hidden, None, Scope()), hidden + block.linear(hidden).relu())
    assert len(said) == 1 and "g++ ended with 1" in said[0] and "as written" in said[0]
    assert not compiled.on


def test_an_error_of_the_block_itself_is_no_failure_to_compile(fresh: Any) -> None:
    class Failing(Block):
        def forward(self, hidden: Tensor, turn: Any, seen: Scope, cache: Any = None) -> Tensor:
            return late(hidden)

    @torch.library.custom_op("blocks::late", mutates_args=())
    def late(given: Tensor) -> Tensor:
        raise ArithmeticError("of the block")

    late.register_fake(torch.empty_like)
    block = Failing()
    compiled = Compiled([block], say=lambda text: None, backend="eager")
    with pytest.raises(ArithmeticError, match="of the block"):
        block(torch.randn(2, 3, 8, requires_grad=False), None, Scope())
    assert compiled.on


def test_calls_leave_nothing_behind(fresh: Any) -> None:
    """Settings of the compiler are changed around each call; each such change, made anew, would stay for good."""
    block = Block()
    Compiled([block], say=lambda text: None, backend="eager")
    run = lambda: block(torch.randn(4, 3, 8), None, Scope())  # noqa: E731
    run()
    before = len(contextvars.copy_context())
    for _ in range(5):
        run()
    assert len(contextvars.copy_context()) == before
