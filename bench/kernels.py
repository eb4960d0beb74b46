"""How many operators and kernels an update takes, blocks as written against compiled, and where its time goes.

    .venv/bin/python bench/kernels.py --vocab 4096 --seq 512 --dtype bf16

Counted by torch's profiler over one update after `--warm` others: operators as they are called from outside (`top`),
all of them (`operators`: what they call in turn, too), kernels sent to a GPU, and calls of compiled code. A line each,
`RESULT {json}`; then the operators that take most time.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from common import options, tokens

chosen = options(top={"type": int, "default": 8})

import torch
from decoder import batch, family

from danlu.compute.compile import Compiled
from danlu.compute.layer import ComputeLayer
from danlu.core.batch import Batch
from danlu.core.device import choose as choose_device
from danlu.core.terms import Terms
from danlu.core.world import World, keep_compiled
from danlu.memory.layer import MemoryLayer
from danlu.memory.precision import choose
from danlu.models.start import fill
from danlu.objectives.causal import Causal
from danlu.optim.adamw import AdamW
from danlu.optim.layer import OptimLayer


def update(compiled: bool, device: torch.device) -> Any:
    """What makes one update of the benchmark's decoder."""
    model = family(chosen).build().to(device)
    fill(model, 0)
    if compiled:
        Compiled(model.blocks.values(), say=print)
    named = dict(model.named_parameters())
    compute = ComputeLayer(model, world=World(), device=device)
    memory = MemoryLayer(device=device, precision=choose(chosen.dtype, device), weights=named.values())
    optim = OptimLayer(AdamW(), named.items(), total=100)
    objective = Causal()
    rows = batch(tokens(chosen, chosen.mb))

    def once() -> None:
        micro = memory.fetch(rows)
        count = objective.count(micro)

        def loss(out: Any, given: Batch) -> tuple[torch.Tensor, Terms]:
            terms = objective.loss(out, given) / count
            return terms.total(), terms.detach()

        with memory.policy():
            list(compute.forward_backward([micro], loss))
        optim.clip(compute.norm(named.values()))
        optim.step(1)
        optim.zero()

    return once


def main() -> None:
    torch.set_num_threads(chosen.threads)
    keep_compiled()
    device = choose_device()
    for compiled in (False, True):
        once = update(compiled, device)
        for _ in range(chosen.warm):
            once()
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds) as profile:
            once()
        events = list(profile.events())
        on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
        operators = [event for event in on_host if event.name.startswith("aten::")]
        outer = [e for e in operators if e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::")]
        counts = {
            "blocks": "compiled" if compiled else "as written",
            "device": device.type,
            "vocab": chosen.vocab,
            "seq": chosen.seq,
            "dtype": chosen.dtype,
            "top": len(outer),
            "operators": len(operators),
            "kernels": sum(event.device_type == torch.autograd.DeviceType.CUDA for event in events),
            "compiled_calls": sum("CompiledFunction" in e.name or "Torch-Compiled" in e.name for e in on_host),
        }
        print("RESULT " + json.dumps(counts), flush=True)
        spent: Counter[str] = Counter()
        for event in on_host:
            spent[event.name] += event.self_cpu_time_total
        whole = sum(spent.values())
        for name, time in spent.most_common(chosen.top):
            print(f"    {time / whole:6.1%}  {name[:90]}")


if __name__ == "__main__":
    main()
