"""How much of the traffic between ranks is hidden behind computation, by a trace of one update on gloo.

    .venv/bin/python bench/overlap.py --vocab 4096 --seq 512 --zero 3 [--wait] [--trace FILE]

Of each rank: the time in which any collective was under way (their spans, laid over each other), the part of it in
which the training thread computed, and the share that is hidden. `--wait` leaves collectives as FSDP2 makes them on a
CPU, begun and waited for on the spot; `--trace` writes the first rank's trace, for ui.perfetto.dev.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from typing import Any

Spans = list[tuple[float, float]]
trace = sys.argv.pop(sys.argv.index("--trace") + 1) if "--trace" in sys.argv else ""
sys.argv = [word for word in sys.argv if word != "--trace"]

from ranks import assemble, chosen

import torch
import torch.distributed as dist

WAITS = ("danlu::land", "FSDP::all_gather", "FSDP::post_backward_reduce", "gloo:")


def main() -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        others = [context.Process(target=work, args=(rank, f"{folder}/store", "")) for rank in range(1, chosen.ranks)]
        for other in others:
            other.start()
        work(0, f"{folder}/store", trace)
        for other in others:
            other.join()


def work(rank: int, store: str, to: str) -> None:
    from danlu.core.world import World
    from danlu.train.step import step

    torch.set_num_threads(chosen.threads)
    dist.init_process_group("gloo", store=dist.FileStore(store, chosen.ranks), rank=rank, world_size=chosen.ranks)
    run = assemble(World(rank=rank, size=chosen.ranks, local_rank=rank))
    for _ in range(chosen.warm):
        step(run, run.source.take(chosen.micros))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(run, run.source.take(chosen.micros))
    if to:
        profile.export_chrome_trace(to)
    found: list[Any] = [None] * chosen.ranks
    dist.all_gather_object(found, measured(list(profile.events())))
    for number, figures in enumerate(found if rank == 0 else []):
        print("RESULT " + json.dumps({"rank": number, "zero": chosen.zero, "wait": chosen.wait, **figures}), flush=True)
    dist.destroy_process_group()


def measured(events: list[Any]) -> dict[str, float]:
    """Milliseconds of traffic, of traffic beside which was computed, and the share."""
    spans = lambda chosen: merged([(e.time_range.start, e.time_range.end) for e in events if chosen(e)])  # noqa: E731
    main_thread = next(e.thread for e in events if e.name.startswith("FSDP::"))
    traffic = spans(lambda e: e.name.startswith("gloo:"))
    on_main = lambda e: e.thread == main_thread  # noqa: E731
    waits = spans(lambda e: on_main(e) and e.name.startswith(WAITS))
    work = spans(lambda e: on_main(e) and e.name.startswith(("aten::", "CompiledFunction")))
    hidden = length(common(traffic, work)) - length(common(common(traffic, work), waits))
    whole = length(traffic)
    return {
        "update_ms": round((max(e.time_range.end for e in events) - min(e.time_range.start for e in events)) / 1e3, 1),
        "traffic_ms": round(whole / 1e3, 1),
        "hidden_ms": round(hidden / 1e3, 1),
        "hidden_share": round(hidden / whole, 3) if whole else 0.0,
    }


def merged(spans: Spans) -> Spans:
    """The same time, each moment once."""
    out: Spans = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def common(a: Spans, b: Spans) -> Spans:
    """The time that both have."""
    found = [(max(s, t), min(e, f)) for s, e in a for t, f in b if max(s, t) < min(e, f)]
    return merged(found)


def length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


if __name__ == "__main__":
    main()
