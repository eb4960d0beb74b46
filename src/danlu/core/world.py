"""Which of how many processes this is; how they start, end, and draw their random numbers.

The only reader of the environment: torchrun's variables and ours are read here and nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from danlu.core.errors import Failure

T = TypeVar("T")
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
LAUNCHER = "DANLU_LAUNCHER"  # the process id of our own launcher
COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # where torch keeps compiled code
PATIENCE = timedelta(days=7)  # while starting: the first rank may tokenise for hours while the others wait


@dataclass(frozen=True, slots=True)
class World:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the one that writes what is written once."""
        return self.rank == 0


def here() -> World:
    """The world that torchrun started this process in, or a world of one."""
    rank, size, local = (
        int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
    )
    return World(rank=rank, size=size, local_rank=local)


def join(world: World, *, backend: str, meeting: timedelta = timedelta(minutes=10)) -> None:
    """Every process of the world has met the others; nothing to do in a world of one.

    From now on they wait for each other as long as it takes, until ``hurry``. Each attempt of torchrun's meets in a
    store of its own: in torch 2.13 the store is kept across restarts and holds the dead ranks' addresses, so that a
    second attempt could never connect.
    """
    if world.size == 1 or dist.is_initialized():
        return
    store, rank, size = next(dist.rendezvous("env://", timeout=meeting))
    attempt = dist.PrefixStore(f"attempt{os.environ.get(RESTARTS, '0')}", store)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=PATIENCE)


def alone(*, backend: str) -> None:
    """This process has a group of its own, for what asks for one."""
    if not dist.is_initialized():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def hurry(*, seconds: float = 600) -> None:
    """From now on a rank that does not answer for so long is lost: there is nothing left that only one of them does."""
    if dist.is_initialized():
        _set_pg_timeout(timedelta(seconds=seconds))


def take_time() -> None:
    """From now on ranks wait for each other as long as it takes, as before ``hurry``."""
    if dist.is_initialized():
        _set_pg_timeout(PATIENCE)


def lost(error: BaseException) -> bool:
    """Whether this is what a collective says when another rank is gone or does not answer."""
    said = str(error)
    return isinstance(error, RuntimeError) and any(mark in said for mark in ("gloo", "NCCL", "closed by peer"))


def neighbours(world: World) -> tuple[int, ...]:
    """The process ids of the other ranks that this one can see: those on its machine, in its room of process ids."""
    room = Path("/proc/self/ns/pid")
    place = (socket.gethostname(), str(room.readlink()) if room.exists() else "")
    everyone = together(world, ((place, os.getpid()),))
    return tuple(pid for there, pid in everyone if there == place and pid != os.getpid())


def gone(pids: tuple[int, ...]) -> bool:
    """Whether any of these processes has ended."""
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            continue
    return False


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that is cut or copied over ranks; a plain one is its own."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def meet(world: World) -> None:
    """Every rank has come to this point."""
    if world.size > 1:
        dist.barrier()


def together(world: World, values: tuple[T, ...]) -> tuple[T, ...]:
    """The values of all ranks, in the order of the ranks."""
    if world.size == 1:
        return values
    each: list[tuple[T, ...]] = [()] * world.size
    dist.all_gather_object(each, values)
    return tuple(value for own in each for value in own)


def prepare_children(count: int) -> None:
    """Processes started from here are ranks of ours (``launched``), share the cores evenly, and talk over loopback,
    unless the user chose otherwise."""
    os.environ[LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def launched() -> bool:
    """Whether our own launcher started this process."""
    return os.environ.get(LAUNCHER) == str(os.getppid())


def once(world: World, function: Callable[[], T]) -> T:
    """What `function` gave on the first rank, on every rank; a Failure there is raised on all of them."""
    if world.size == 1:
        return function()
    told: list[tuple[T | None, Failure | None]] = [(None, None)]
    if world.first:
        try:
            told = [(function(), None)]
        except Failure as refusal:
            refusal.shared = True
            told = [(None, refusal)]
    dist.broadcast_object_list(told, src=0)
    value, failure = told[0]
    if failure is not None:
        raise failure
    return cast(T, value)


def first_only(world: World, function: Callable[[], T]) -> T | None:
    """What `function` gave on the first rank; None on the others. A Failure there is raised on all of them."""
    made: list[T] = []
    once(world, lambda: made.append(function()))
    return made[0] if made else None


def be_deterministic() -> None:
    """From now on the same work gives the same bits, and torch refuses what it can only do otherwise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read by cuBLAS at its first product
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cuda.enable_cudnn_sdp(False)


def compiled_folder() -> Path:
    """Where torch keeps compiled code: in the user's cache, unless TORCHINDUCTOR_CACHE_DIR says otherwise."""
    given = Path(os.environ.get(COMPILED, ""))
    by_torch = given.parent == Path(tempfile.gettempdir()) and given.name.startswith("torchinductor_")
    if given.name and not by_torch:  # torch itself writes there where it would keep it, which no restart outlives
        return given
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "danlu" / "compiled"


def keep_compiled() -> None:
    """Compiled code is kept there from now on, for the next run; nobody else may write there."""
    folder = compiled_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return  # torch then keeps it where it does by itself
    os.environ[COMPILED] = str(folder)


def variables() -> Mapping[str, str]:
    """The environment of this process, for the record; whoever keeps any of it chooses by name."""
    return dict(os.environ)


def leave() -> None:
    """The process group is gone; without this, gloo processes may abort at exit."""
    if dist.is_initialized():
        dist.destroy_process_group()


def stream(seed: int, *names: str | int) -> int:
    """A seed of 63 bits for one purpose, a pure function of (seed, names): streams do not depend on ranks or order."""
    key = "\x1f".join(str(part) for part in (seed, *names)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A random stream of its own on the CPU, from ``stream``."""
    return torch.Generator().manual_seed(stream(seed, *names))
