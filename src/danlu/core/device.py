"""Facts about devices: kinds, dtypes, peak FLOP/s, bytes of memory, watts. Nothing here fails for want of a GPU."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from danlu.core.errors import InputError
from danlu.core.limits import limits

KINDS = ("cuda", "mps", "cpu")  # the order in which ``choose`` prefers them; "cuda" is AMD's too

TERA = 1e12
TRIALS = 3  # of each measurement the best counts: others may use the machine meanwhile
T = TypeVar("T")
# Dense peaks (no sparsity) in TFLOP/s: bf16, fp16, tf32, fp32, fp8. None: the device has no such unit. Matched against
# the whole name that the driver gives (figures were noted from memory of the sheets named: check one before you lean
# on it), so that slices (MIG), laptop and cut-down editions are unknown, not wrong.
# For GeForce and RTX cards, fp16 and bf16 are the rates that add up in fp32, which is what training uses.
PEAKS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    # NVIDIA V100 data sheet (DA-09293); T4 data sheet (DS-09383)
    (r"Tesla V100-SXM[23]-(16|32)GB(-LS)?", (None, 125.0, None, 15.7, None)),
    (r"Tesla V100-PCIE-(16|32)GB", (None, 112.0, None, 14.0, None)),
    (r"Tesla T4", (None, 65.0, None, 8.1, None)),
    # NVIDIA A100 data sheet (2021); A10 and A40 data sheets; RTX A6000 data sheet
    (r"NVIDIA A100(-SXM4|-PCIE|-PG509|-SXM)?(-80GB|-40GB| 80GB PCIe)?", (312.0, 312.0, 156.0, 19.5, None)),
    (r"NVIDIA A10", (125.0, 125.0, 62.5, 31.2, None)),
    (r"NVIDIA A40", (149.7, 149.7, 74.8, 37.4, None)),
    (r"NVIDIA RTX A6000", (154.8, 154.8, 77.4, 38.7, None)),
    # NVIDIA H100 data sheet (2023): SXM, PCIe, NVL; H200 data sheet (2024): SXM, NVL; GH200 data sheet
    (r"NVIDIA H100 (80GB|64GB|96GB) HBM[23]e?", (989.4, 989.4, 494.7, 66.9, 1978.9)),
    (r"NVIDIA H100 PCIe", (756.0, 756.0, 378.0, 51.2, 1513.0)),
    (r"NVIDIA H100 NVL", (835.5, 835.5, 417.5, 60.0, 1670.5)),
    (r"NVIDIA H200", (989.4, 989.4, 494.7, 66.9, 1978.9)),
    (r"NVIDIA H200 NVL", (835.5, 835.5, 417.5, 60.0, 1670.5)),
    (r"NVIDIA GH200 (480GB|120GB|144G HBM3e)", (989.4, 989.4, 494.7, 66.9, 1978.9)),
    # NVIDIA HGX B200 data sheet (2024), halved from its sparse figures and divided by eight
    (r"NVIDIA B200", (2250.0, 2250.0, 1125.0, 75.0, 4500.0)),
    # NVIDIA L4 and L40S data sheets (2023); Ada GPU architecture white paper (RTX 6000 Ada, 4090)
    (r"NVIDIA L4", (121.0, 121.0, 60.0, 30.3, 242.0)),
    (r"NVIDIA L40S", (362.05, 362.05, 183.0, 91.6, 733.0)),
    (r"NVIDIA RTX 6000 Ada Generation", (364.2, 364.2, 182.1, 91.1, 728.5)),
    (r"NVIDIA GeForce RTX 4090", (165.2, 165.2, 82.6, 82.6, 330.3)),
    # NVIDIA GA102 white paper (RTX 3090); RTX Blackwell white paper (RTX 5090)
    (r"NVIDIA GeForce RTX 3090", (71.0, 71.0, 35.6, 35.6, None)),
    (r"NVIDIA GeForce RTX 5090", (209.5, 209.5, 104.8, 104.8, 419.0)),
    # AMD Instinct data sheets: MI250X (one of its two dies is one device), MI300X, MI325X
    (r"AMD Instinct MI250X( / MI250)?", (191.5, 191.5, None, 47.9, None)),
    (r"AMD Instinct MI300X", (1307.4, 1307.4, 653.7, 163.4, 2614.9)),
    (r"AMD Instinct MI325X", (1307.4, 1307.4, 653.7, 163.4, 2614.9)),
)
COLUMNS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3, torch.float8_e4m3fn: 4, torch.float8_e5m2: 4}
TF32 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What a device can do, asked once at the start, so that nothing fails deep in the first step.

    bf16, fp16, fp8   whether the device multiplies them itself; what it can only emulate, slowly, it cannot
    attention   the kernels that plain causal attention may use there, fastest first
    attention_packed   the same for packed documents: "varlen" and "flex" run kernels, "mask" is a dense mask
    pinned      whether copies from pinned memory overlap with work
    """

    kind: str
    name: str
    count: int
    bf16: bool
    fp16: bool
    fp8: bool
    fused_adamw: bool
    attention: tuple[str, ...]
    attention_packed: tuple[str, ...]
    pinned: bool


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device's memory; for the CPU and for MPS, of the machine's."""

    total: int
    free: int


def available() -> tuple[str, ...]:
    """The kinds of device that this machine has, best first; "cpu" is always the last."""
    has: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "cpu": lambda: True,
    }
    return tuple(kind for kind in KINDS if _try(has[kind]))


def choose(name: str | None = None, *, local_rank: int = 0) -> torch.device:
    """The device of this process: the kind that is named, else the best that is there; of many GPUs, the local rank's.

    Errors: InputError where the named device is not on this machine.
    """
    kinds = available()
    if name is None:
        name = kinds[0]
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is not a device; one of {', '.join(kinds)} would do.") from None
    if device.type not in kinds:
        raise InputError(
            f"device {name!r} is not on this machine (or this torch cannot use it); it has: {', '.join(kinds)}."
        )
    if device.type != "cuda":
        return torch.device(device.type)
    index, count = local_rank if device.index is None else device.index, torch.cuda.device_count()
    if index >= count:
        raise InputError(
            f"device cuda:{index} is not there: this machine has {count}; start at most {count} processes a machine."
        )
    return torch.device("cuda", index)


def name_of(device: torch.device) -> str:
    """The name that the driver, or for a CPU the system, gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return (_try(_cpu_name) or "CPU") if device.type == "cpu" else "Apple GPU"


def abilities(device: torch.device) -> Abilities:
    """What the device can do."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        amd = torch.version.hip is not None
        return Abilities(
            kind="cuda",
            name=name_of(device),
            count=torch.cuda.device_count(),
            bf16=amd or capability >= (8, 0),
            fp16=True,
            fp8=not amd and capability >= (8, 9),
            fused_adamw=True,
            attention=("flash", "efficient", "math") if amd or capability >= (8, 0) else ("efficient", "math"),
            attention_packed=("varlen", "flex", "mask") if capability >= (8, 0) else ("flex", "mask"),
            pinned=True,
        )
    cpu = device.type == "cpu"
    return Abilities(
        kind=device.type,
        name=name_of(device),
        count=1,
        bf16=_multiplies_bf16() if cpu else _works(device, torch.bfloat16),
        fp16=not cpu,  # a CPU emulates it, some hundred times slower than bf16 (measured)
        fp8=False,
        fused_adamw=True,
        attention=("flash", "math") if cpu else ("math",),
        attention_packed=("mask",),
        pinned=False,
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The most multiply-adds a second, times two, that the device can do in this dtype; None where nobody knows.

    GPUs: the maker's dense figure by exact name (fp32 is TF32's where torch is allowed to use it). A CPU is measured,
    once a process, in about 0.2 s, with the threads that torch uses now.
    """
    if device.type == "cpu":
        return measure_peak(dtype, torch.get_num_threads())
    if device.type == "cuda":
        return known_peak(name_of(device), dtype, tf32=_try(torch.get_float32_matmul_precision) != "highest")
    return None


def known_peak(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """The table's dense peak, FLOP/s, of a GPU by the driver's name for it; None if the name or the unit is unknown."""
    if dtype not in COLUMNS:
        return None
    column = TF32 if dtype is torch.float32 and tf32 else COLUMNS[dtype]
    for pattern, peaks in PEAKS:
        if re.fullmatch(pattern, name.strip()):
            peak = peaks[column] or (peaks[3] if column == TF32 else None)
            return None if peak is None else peak * TERA
    return None


@functools.cache
def measure_peak(dtype: torch.dtype, threads: int, *, seconds: float = 0.2) -> float | None:
    """The best rate, FLOP/s, of square matrix products on the CPU, in about this time; None if it has no such product.

    ``threads`` is torch's number of threads, and only part of the key by which the figure is kept.
    """
    del threads
    best, size = 0.0, 256
    try:
        with torch.no_grad():
            while True:
                left = torch.ones(size, size, dtype=dtype)
                product = torch.empty_like(left)
                torch.mm(left, left, out=product)  # the first product of a size also prepares its kernel
                took = _fastest(partial(torch.mm, left, left, out=product), least=seconds / 8, most=seconds / 2)
                best = max(best, 2 * size**3 / took)
                # Twice the size is eight times the work. Small ones say little: where others use the machine too, the
                # threads of a short product wait for each other longer than they work.
                if took > seconds / 4 or size == 4096:
                    return best
                size *= 2
    except RuntimeError:
        return None


def bytes_per_second(*, megabytes: int = 64) -> float:
    """How fast the CPU copies memory: bytes read and written a second, best of a few copies."""
    source = torch.zeros(megabytes * 2**20, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / _fastest(lambda: target.copy_(source), least=0.1, most=0.5)


def memory(device: torch.device) -> Memory:
    """Bytes of memory in all, and not yet used by anybody; of a machine's no more than this process was allotted."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total=total, free=free)
    now, bounds = psutil.virtual_memory(), limits()
    return Memory(
        total=min([now.total, *(bound.total for bound in bounds)]),
        free=min([now.available, *(bound.free for bound in bounds)]),
    )


def memory_peak(device: torch.device) -> int | None:
    """The most bytes that tensors of this process ever held on the device; None where torch does not count them."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return None


def driver() -> str | None:
    """The version of NVIDIA's driver; None where there is none."""
    return _try(lambda: str(_nvml().nvmlSystemGetDriverVersion()))


def backend_for(device: torch.device) -> str:
    """The backends by which processes on such devices speak with each other, of what is there and on their hosts."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def synchronize(device: torch.device) -> None:
    """All work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Gauges:
    """Use and power of one device, read cheaply and as often as wanted; what cannot be read is None, for good."""

    def __init__(self, device: torch.device):
        self.device = device
        self._handle = _try(lambda: _nvml_handle(device)) if device.type == "cuda" else None
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first reading has no span to measure over
        self._energy = Energy() if device.type != "cuda" else None

    def use(self) -> float | None:
        """Share of the time since the last reading that the device was busy, 0 to 1; for a CPU, by this process."""
        if self._handle is not None:
            return _try(lambda: _nvml().nvmlDeviceGetUtilizationRates(self._handle).gpu / 100)
        if self.device.type == "cpu":
            return _try(lambda: min(1.0, self._process.cpu_percent() / 100 / (psutil.cpu_count() or 1)))
        return None

    def watts(self) -> float | None:
        """Power drawn now by the device; for a CPU by the whole machine's, where the system shows it."""
        if self._handle is not None:
            return _try(lambda: _nvml().nvmlDeviceGetPowerUsage(self._handle) / 1000)
        return self._energy.watts() if self._energy else None

    def resident(self) -> int | None:
        """Bytes of main memory that this process holds."""
        return _try(lambda: int(self._process.memory_info().rss))

    def held(self) -> int | None:
        """Bytes of the device's memory that torch holds in this process; None for a CPU."""
        return _try(lambda: torch.cuda.memory_reserved(self.device)) if self.device.type == "cuda" else None


class Energy:
    """The energy counters that Linux shows for Intel and AMD CPUs (RAPL), often readable by root alone."""

    def __init__(self, folder: Path = Path("/sys/class/powercap"), clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        packages = _try(lambda: sorted(folder.glob("intel-rapl:[0-9]*"))) or []
        files = [package / "energy_uj" for package in packages if package.name.count(":") == 1]
        self._counters = [file for file in files if _number(file) is not None]
        self._last = self._joules()

    def watts(self) -> float | None:
        """Mean power since the last reading; None where there is no counter or it went round."""
        before, now = self._last, self._joules()
        self._last = now
        if before is None or now is None or now[1] < before[1] or now[0] <= before[0]:
            return None
        return (now[1] - before[1]) / (now[0] - before[0])

    def _joules(self) -> tuple[float, float] | None:
        values = [_number(file) for file in self._counters]
        known = [value for value in values if value is not None]
        return (self._clock(), sum(known) / 1e6) if known and len(known) == len(values) else None


def _multiplies_bf16() -> bool:
    """Whether the CPU has instructions for it."""
    can = _try(torch.cpu.get_capabilities) or {}
    return any(bool(can.get(name)) for name in ("avx512_bf16", "amx_bf16", "avx10_1", "bf16", "sve_bf16"))


def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a small matrix product runs there in this dtype."""
    ones = lambda: torch.ones(8, 8, device=device, dtype=dtype)  # noqa: E731
    return _try(lambda: bool((ones() @ ones()).float().sum().item() == 512)) or False


def _fastest(work: Callable[[], Any], *, least: float, most: float) -> float:
    """Seconds of the fastest call, over a few calls and at least this long, but no further call after ``most``."""
    best, start, calls = float("inf"), time.perf_counter(), 0
    while True:
        before = time.perf_counter()
        work()
        now = time.perf_counter()
        best, calls = min(best, now - before), calls + 1
        if now - start >= (least if calls >= TRIALS else most):
            return max(best, 1e-9)


def _try(read: Callable[[], T | None]) -> T | None:
    """What it reads, or None: a gauge that fails is a gauge that is not there."""
    try:
        return read()
    except Exception:
        return None


def _number(path: Path) -> int | None:
    return _try(lambda: int(path.read_text()))


def _cpu_name() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return None


@functools.cache
def _nvml() -> Any:
    """NVIDIA's management library, started; raises where there is none."""
    import pynvml  # noqa: PLC0415  (only machines with such a GPU need it)

    pynvml.nvmlInit()
    return pynvml


def _nvml_handle(device: torch.device) -> Any:
    """By the GPU's own id: numbers differ between torch and NVML where only some GPUs are visible."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return _nvml().nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
