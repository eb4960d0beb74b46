"""`danlu doctor`: what this machine has, how fast it is, and whether everything works."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

MARKS = {True: "ok   ", False: "FAIL ", None: "     "}
Check = tuple[bool | None, str, str]  # whether it is well (None: nothing to judge), what it is of, what was found

# Run twice, as rank 0 and 1: a sum over both, by way of the loopback device alone and a file, so that nothing listens
# for others.
PAIR = """
import os, sys, datetime, torch, torch.distributed as dist
rank, meeting = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(meeting, 2)
options = dist.ProcessGroupGloo._Options()
options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
options._timeout = datetime.timedelta(seconds=20)
group = dist.ProcessGroupGloo(store, rank, 2, options)
value = torch.tensor([float(rank + 1)])
group.allreduce([value]).wait()
store.set(f"done{rank}", "yes")
store.wait(["done0", "done1"])
os._exit(0 if value.item() == 3.0 else 1)  # gloo's threads may abort a process that takes itself apart
"""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The verb and its options are known to the parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="say what this machine has, how fast it is, and whether everything works",
        description="Say what this machine has and how fast it is, and try what a run needs. Exit code 0 if all is "
        "well, 1 if something that a run needs fails.",
    )
    parser.add_argument("--folder", default="runs", help="where runs will be written (default ./runs)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Each finding stands on a line of its own; 1 if one that matters is bad."""
    well = True
    for heading, check in (
        ("versions", versions),
        ("devices", devices),
        ("speed", speed),
        ("disk", lambda: disk(Path(arguments.folder))),
        ("processes", processes),
        ("extras", extras),
    ):
        print(heading)
        for good, name, found in _tried(check):
            print(f"  {MARKS[good]}{name:<22} {found}", flush=True)
            well = well and good is not False
    print("all is well" if well else "something that a run needs does not work: see the lines marked FAIL")
    return 0 if well else 1


def versions() -> Iterator[Check]:
    """Of Python, torch, danlu and the packages that it needs."""
    import platform
    import sys

    import torch

    import danlu
    from danlu.monitor.environment import PACKAGES, installed

    yield None, "danlu", danlu.__version__
    yield (
        sys.version_info >= (3, 11),
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
    )
    fits = torch.__version__.split("+")[0].startswith("2.13.")
    yield fits, "torch", torch.__version__ + ("" if fits else ": danlu is made for 2.13; `make setup` installs it")
    optional = ("sentencepiece", "tiktoken")
    for name in PACKAGES:
        if name not in optional:
            version = installed(name)
            yield version is not None, name, version or f"missing: pip install {name}"


def devices() -> Iterator[Check]:
    """Every device, and what it can do."""
    import psutil
    import torch

    from danlu.core import device

    for kind in device.available():
        for index in range(torch.cuda.device_count() if kind == "cuda" else 1):
            one = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
            able, memory = device.abilities(one), device.memory(one)
            dtypes = ["fp32", *(name for name in ("bf16", "fp16", "fp8") if getattr(able, name))]
            yield (
                None,
                str(one),
                f"{able.name}; {memory.total / 1e9:.1f} GB, {memory.free / 1e9:.1f} GB free; {', '.join(dtypes)}; "
                f"attention {', '.join(able.attention)} (packed: {', '.join(able.attention_packed)})"
                f"{'; fused AdamW' if able.fused_adamw else ''}{'; pinned memory' if able.pinned else ''}",
            )
    if "cuda" not in device.available() and device.driver():
        yield (
            False,
            "cuda",
            f"NVIDIA driver {device.driver()} is there, but this torch ({torch.__version__}) cannot use it",
        )
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count()
    threads = psutil.cpu_count()
    more = "" if threads == cores else f" ({threads} hardware threads)"
    yield None, "cores", f"{cores}{more}; torch uses {torch.get_num_threads()}"


def speed() -> Iterator[Check]:
    """Matrix products and memory, measured."""
    import torch

    from danlu.core import device

    best = device.choose()
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        peak = device.measure_peak(dtype, torch.get_num_threads())
        yield None, f"cpu {name}", f"{peak / 1e9:,.0f} GFLOP/s measured" if peak else "cannot"
        if best.type == "cuda":
            known = device.peak_flops(best, dtype)
            yield (
                None,
                f"{best} {name}",
                f"{known / 1e12:,.0f} TFLOP/s by its maker" if known else "peak unknown, so no MFU",
            )
    yield None, "memory", f"{device.bytes_per_second() / 1e9:.1f} GB/s copied (read and written)"
    watts = device.Gauges(best).watts()
    yield None, "power", f"{watts:.0f} W now" if watts is not None else "cannot be read here"


def disk(folder: Path) -> Iterator[Check]:
    """Whether the folder for runs can be written, how fast, and how much fits."""
    import os
    import shutil
    import tempfile
    import time

    from danlu.monitor.console import size

    made = [path for path in (folder, *folder.parents) if not path.exists()]
    block = os.urandom(2**20)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            start = time.perf_counter()
            for _ in range(64):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            took = time.perf_counter() - start
        yield True, "writable", f"{folder} ({64 * 2**20 / took / 1e6:,.0f} MB/s to the disk)"
        free = shutil.disk_usage(folder).free
        yield free > 2**30, "free", size(free) + ("" if free > 2**30 else ": a run's checkpoints need more")
    except OSError as fault:
        yield False, "writable", f"{folder}: {fault.strerror}; run from another folder, or give --folder"
    finally:
        for path in made:  # what was only made for the trial
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def processes() -> Iterator[Check]:
    """Whether two processes can add up a number, and whether memory can be shared."""
    import multiprocessing.shared_memory
    import shutil
    import subprocess
    import sys
    import tempfile

    from danlu.monitor.console import size

    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-c", PAIR]
        pair = [
            subprocess.Popen(
                [*words, str(rank), str(Path(folder) / "meeting")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            for rank in (0, 1)
        ]
        said = ""
        try:
            for one in pair:
                error = one.communicate(timeout=60)[1].decode(errors="replace").strip()
                said = said or (error.splitlines() or [f"exit code {one.returncode}"])[-1] * (one.returncode != 0)
        except subprocess.TimeoutExpired:
            said = "no answer within 60 s"
        finally:
            for one in pair:
                one.kill()
                one.wait()
    yield not said, "two processes (gloo)", said or "they meet on the loopback device and agree"
    try:
        block = multiprocessing.shared_memory.SharedMemory(create=True, size=2**24)
        block.close()
        block.unlink()
        known = Path("/dev/shm")
        yield True, "shared memory", f"{size(shutil.disk_usage(known).free)} free" if known.exists() else "works"
    except OSError as fault:
        yield False, "shared memory", f"{fault.strerror}; in a container, start it with a larger --shm-size"


def extras() -> Iterator[Check]:
    """What may be added, and how."""
    from danlu.monitor.environment import installed

    for name, use, extra in (
        ("sentencepiece", "tokenizer.model files", "tokenizers"),
        ("tiktoken", "tiktoken's files", "tokenizers"),
    ):
        version = installed(name)
        yield None, name, version or f"not installed; only needed for {use}: pip install 'danlu[{extra}]'"


def _tried(check: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """What the check finds; one that breaks is a finding too."""
    try:
        yield from check()
    except Exception as fault:
        said = str(fault).strip().splitlines()
        yield False, "this check itself", f"{type(fault).__name__}: {said[0] if said else 'no message'}"
