"""The run's model folder in Hugging Face's layout, swapped in whole."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from danlu.checkpoint.disk import FULL, Disk
from danlu.core.errors import Failure, InputError
from danlu.core.paths import make_durable
from danlu.data.tokenizer import Tokenizer
from danlu.models import weights
from danlu.models.families import Family


def publish(
    folder: Path,
    family: Family,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype | None = None,
    disk: Disk | None = None,
) -> None:
    """The folder holds this model and its tokenizer, ready for any tool that reads Hugging Face's layout.

    Written beside it first, then opened again, then swapped in: a crash leaves the old model or the new one. Without
    a ``dtype`` weights keep the type of the first. Raises Failure, with the old model in place, where the disk has no
    room or cannot be written.
    """
    disk = disk or Disk()
    settle(folder, disk)
    beside, aside = _beside(folder), _aside(folder)
    try:
        _write(beside, family, tensors, tokenizer, dtype)
        for path in beside.iterdir():
            make_durable(path)
        disk.sync_folder(beside)
        if folder.exists():
            disk.rename(folder, aside)
        disk.rename(beside, folder)
        disk.sync_folder(folder.parent)
    except OSError as error:
        settle(folder, disk)
        raise Failure(_said(folder, error, disk)) from None
    except BaseException:
        settle(folder, disk)
        raise
    disk.remove(aside)


def rehearse(
    folder: Path,
    family: Family,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype | None = None,
) -> int:
    """What ``publish`` will do to the folder at the end works: the bytes that it will take. Nothing of the try is left.

    Tried before a long training, so that a model that cannot be stored, or a disk that cannot hold it, is found now.
    Raises what ``publish`` would.
    """
    disk, trial = Disk(), folder.with_name(f"{folder.name}.trial")
    disk.remove(trial)
    try:
        _write(trial, family, tensors, tokenizer, dtype)
        return sum(path.stat().st_size for path in trial.iterdir())
    except OSError as error:
        raise InputError(_said(folder, error, disk)) from None
    finally:
        disk.remove(trial)


def settle(folder: Path, disk: Disk | None = None) -> None:
    """What an interrupted swap left is put right: the old model is back where the new one did not arrive."""
    disk = disk or Disk()
    if _aside(folder).exists() and not folder.exists():
        disk.rename(_aside(folder), folder)
    disk.remove(_aside(folder))
    disk.remove(_beside(folder))


def _write(
    folder: Path,
    family: Family,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    dtype: torch.dtype | None,
) -> None:
    """Weights and tokenizer are in the folder, agree with each other, and every tensor has its place there."""
    rows = family.vocab_size
    if isinstance(rows, int) and tokenizer.vocab_size > rows:
        raise InputError(f"{folder}: the tokenizer has {tokenizer.vocab_size} ids and the model {rows} rows")
    rest = iter(tensors)
    first = next(rest)
    ids = {"eos_token_id": tokenizer.eos_id, "bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    control: dict[str, int | list[int]] = {name: value for name, value in ids.items() if value is not None}
    weights.save(folder, family, chain([first], rest), dtype=dtype or first[1].dtype, control=control)
    tokenizer.save(folder)
    weights.load(folder, announce=False)  # names and shapes are checked before it gives the first tensor


def _said(folder: Path, error: OSError, disk: Disk) -> str:
    reason = "the disk is full" if error.errno in FULL else error.strerror or repr(error)
    try:
        free = f"{disk.free(folder.parent):,} bytes are free"
    except OSError:
        free = "its folder cannot be looked at"
    return f"{folder}: the model was not written: {reason} ({free}); what was there before is untouched"


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tmp")


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.old")
