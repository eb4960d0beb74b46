"""Strict load and save of Hugging Face folders: every tensor has its place, or nothing is loaded.

Only safetensors are read: a pickle can run code.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from danlu.core.errors import InputError
from danlu.core.log import logger
from danlu.core.paths import make_durable, write_whole
from danlu.models.families import Family, model_folder, read_config
from danlu.models.shape import Stored
from danlu.models.stack import Trunk, plain
from danlu.models.start import put

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # old files hold these; they are no weights
PREFIXES = ("_orig_mod.", "module.", "model.", "transformer.")
SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True, slots=True)
class _Entry:
    """One tensor of a file: where it lies, what it is."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def load(path: str | Path, *, announce: bool = True) -> tuple[Family, Iterator[tuple[str, Tensor]]]:
    """The family of a model (or run) folder, and its parameters by name, one after the other, in the file's dtype.

    All names and shapes are checked before the first tensor is read: whatever is missing, extra or mis-shaped is named
    in one InputError. Known prefixes of names are taken off; tied weights come once. How many there are is said,
    unless ``announce`` is off.
    """
    folder = model_folder(path)
    family = read_config(folder)
    entries, said = _match(family, _entries(folder), folder)
    if announce:
        logger.info("%s", said)
    return family, _read(family, entries)


def copy(model: Trunk, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Every parameter holds its tensor, cast to its dtype, a sharded one its part; how many there were.

    Raises InputError with all names that are missing, extra or mis-shaped; the model is then not to be used.
    """
    wanted = {plain(name): parameter for name, parameter in model.named_parameters()}
    faults, found = [], set()
    for name, tensor in tensors:
        name = plain(name)
        if name not in wanted:
            faults.append(f"extra {name}")
        elif tensor.shape != wanted[name].shape:
            faults.append(f"{name} is {list(tensor.shape)}, not {list(wanted[name].shape)}")
        else:
            put(wanted[name], tensor)
        found.add(name)
    faults += [f"missing {name}" for name in wanted if name not in found]
    if faults:
        raise InputError(f"The weights do not fit the model: {'; '.join(faults)}.")
    return len(wanted)


def restore(path: str | Path, *, dtype: torch.dtype | None = None) -> tuple[Family, Trunk]:
    """The model of a folder, on the CPU, with its weights, in `dtype` or the widest of the files'."""
    family, tensors = load(path)
    with torch.device("meta"):
        model = family.build()
    model = model.to(dtype or _widest(path)).to_empty(device="cpu")
    copy(model, tensors)
    return family, model


def stored_dtype(path: str | Path) -> torch.dtype:
    """The widest floating dtype that the folder's tensors are stored in."""
    return _widest(path)


def _widest(path: str | Path) -> torch.dtype:
    widest: torch.dtype | None = None
    for entry in _entries(model_folder(path)):
        dtype = DTYPES.get(entry.dtype, torch.float32)
        widest = dtype if widest is None else torch.promote_types(widest, dtype)
    return widest or torch.float32


def _entries(folder: Path) -> list[_Entry]:
    """Every tensor of the folder's safetensors, from the files' headers alone."""
    expected: dict[str, str] | None = None
    if (folder / INDEX).is_file():
        expected = _index(folder / INDEX)
        files = sorted(set(expected.values()))
    elif (folder / SINGLE).is_file():
        files = [SINGLE]
    else:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
        if pickles:
            raise InputError(
                f"{folder} has {pickles[0]} but no {SINGLE}: pickled weights can run code and are not read; "
                "convert them to safetensors."
            )
        raise InputError(f"{folder} holds no {SINGLE} and no {INDEX}.")
    entries = [entry for file in files for entry in _header(folder / file)]
    if expected is not None:
        there = {entry.key: entry.file.name for entry in entries}
        wrong = sorted(key for key in expected.keys() | there.keys() if expected.get(key) != there.get(key))
        if wrong:
            raise InputError(f"{folder / INDEX} and its files disagree about {', '.join(wrong)}.")
    return entries


def _index(file: Path) -> dict[str, str]:
    try:
        places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        valid = isinstance(places, dict) and all(isinstance(name, str) for name in places.values())
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        valid = False
    if not valid:
        raise InputError(f"{file} is no index: it needs a weight_map of tensor names to file names.")
    for name in places.values():
        if Path(name).name != name or name in ("", ".", "..") or "\\" in name or not name.endswith(".safetensors"):
            raise InputError(f"{file} points to {name!r}: only safetensors files beside it are read.")
    return places


def _header(file: Path) -> list[_Entry]:
    if not file.is_file():
        raise InputError(f"{file} is missing.")
    try:
        with safe_open(file, framework="pt") as opened:
            entries = []
            for key in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(key)
                entries.append(_Entry(file, key, tuple(part.get_shape()), part.get_dtype()))
            return entries
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is damaged or no safetensors file: {error}.") from None


def _match(family: Family, entries: Sequence[_Entry], folder: Path) -> tuple[dict[str, _Entry], str]:
    """Each stored name to its entry, and how many in words; strict both ways, all faults in one error."""
    shapes = stored_shapes(family)
    found: dict[str, _Entry] = {}
    faults: list[str] = []
    renamed: Counter[str] = Counter()
    head: _Entry | None = None
    for entry in entries:
        name, prefix = _known(entry.key, shapes)
        if name is None and _known(entry.key, {"lm_head.weight": ()})[0] and family.tie_word_embeddings:
            head = entry
        elif name is None:
            if not entry.key.endswith(BUFFERS):
                faults.append(f"extra {entry.key}")
        elif name in found:
            faults.append(f"{entry.key} and {found[name].key} are both {name}")
        else:
            found[name] = entry
            renamed[prefix] += bool(prefix)
            if entry.dtype not in DTYPES:
                faults.append(f"{entry.key} is stored as {entry.dtype}, not as one of {', '.join(DTYPES)}")
            if entry.shape != shapes[name]:
                faults.append(f"{entry.key} is {list(entry.shape)}, not {list(shapes[name])}")
    faults += [f"missing {name}" for name in shapes if name not in found]
    if faults:
        raise InputError(f"{folder}: the weights do not fit config.json: {'; '.join(faults)}.")
    if head is not None and not torch.equal(_tensor(head), _tensor(found[family.stored()[0].name])):
        raise InputError(f"{folder}: config.json ties the head to the embedding, but {head.key} differs from it.")
    said = "".join(f", {count} after the prefix {prefix!r}" for prefix, count in renamed.items() if count)
    return found, f"{folder}: {len(found)} of {len(shapes)} tensors loaded{said}."


def _known(key: str, names: Mapping[str, Any]) -> tuple[str | None, str]:
    """The stored name that a file's key means, and what prefix was taken off (or put on, with a +) to see it."""
    inner, cut = key, ""
    while True:
        name = plain(inner)
        if inner.split(".")[0] == name.split(".")[0]:  # a wrapper in front is cut below, and said
            for missing in ("", "model.", "transformer."):
                if missing + name in names:
                    return missing + name, cut + (f"+{missing}" if missing else "")
        prefix = next((p for p in PREFIXES if inner.startswith(p)), None)
        if prefix is None:
            return None, ""
        inner, cut = inner.removeprefix(prefix), cut + prefix


def stored_shapes(family: Family) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of the family's file, by its name there."""
    with torch.device("meta"):
        ours = {name: tuple(parameter.shape) for name, parameter in family.build().named_parameters()}
    shapes = {}
    for stored in family.stored():
        parts = [ours[part] for part in stored.parts]
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        shapes[stored.name] = shape[::-1] if stored.transposed else shape
    return shapes


def _read(family: Family, entries: Mapping[str, _Entry]) -> Iterator[tuple[str, Tensor]]:
    with torch.device("meta"):
        rows = {name: parameter.shape[0] for name, parameter in family.build().named_parameters()}
    for stored in family.stored():
        tensor = _tensor(entries[stored.name])
        tensor = tensor.T if stored.transposed else tensor
        yield from zip(stored.parts, tensor.split([rows[part] for part in stored.parts]))


def _tensor(entry: _Entry) -> Tensor:
    with safe_open(entry.file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(entry.key)
        return tensor


def save(
    path: str | Path,
    family: Family,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtype: torch.dtype,
    control: Mapping[str, int | list[int]] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """The folder holds config.json, generation_config.json and model*.safetensors, as transformers reads them.

    Tensors are whole and come in any order, under the model's names; each is cast and written as soon as its shard is
    full. A tied head is stored once. `control` are token ids by name (eos_token_id, bos_token_id, pad_token_id).
    Raises ValueError if a parameter is missing, extra or mis-shaped.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    names = {torch.float64: "float64", torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    config = {**family.to_config(), **_ids(control), "torch_dtype": names[dtype], "dtype": names[dtype]}
    shards = _Shards(path, max_shard_bytes)
    try:
        for name, tensor in _stored(family, tensors):
            shards.add(name, tensor.to(dtype))
        shards.finish()
    except BaseException:
        shards.discard()
        raise
    _json(path / "config.json", config)
    _json(path / "generation_config.json", {"_from_model_config": True, **_ids(control)})
    make_durable(path)


def _ids(control: Mapping[str, int | list[int]] | None) -> dict[str, int | list[int] | None]:
    given = control or {}
    return {name: given.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _stored(family: Family, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The file's tensors, each as soon as all parts of it have come."""
    shapes, waiting = stored_shapes(family), dict[str, Tensor]()
    of: dict[str, Stored] = {part: stored for stored in family.stored() for part in stored.parts}
    left = set(of)
    for name, tensor in tensors:
        name = plain(name)
        if name == "heads.language.weight" and family.tie_word_embeddings:
            continue
        if name not in left:
            raise ValueError(f"{name} is no parameter of the model, or came twice")
        left.remove(name)
        waiting[name] = tensor.detach()
        stored = of[name]
        if any(part not in waiting for part in stored.parts):
            continue
        parts = [waiting.pop(part) for part in stored.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        whole = whole.T if stored.transposed else whole
        if tuple(whole.shape) != shapes[stored.name]:
            raise ValueError(f"{', '.join(stored.parts)} make {list(whole.shape)}, not {list(shapes[stored.name])}")
        yield stored.name, whole
    if left:
        raise ValueError(f"parameters are missing: {', '.join(sorted(left))}")


class _Shards:
    """Safetensors files of bounded size, named when their number is known."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.open: dict[str, Tensor] = {}
        self.size = self.total = 0
        self.written: list[tuple[Path, list[str]]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """The tensor belongs to the last shard; a shard that would grow over the limit is written first."""
        size = tensor.numel() * tensor.element_size()
        if self.open and self.size + size > self.limit:
            self._write()
        # A copy: a file may not hold two views of one memory, and the caller may reuse its own.
        self.open[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        self.size += size
        self.total += size

    def finish(self) -> None:
        """All shards are on disk under their last names, with an index if there are several; older ones are gone."""
        self._write()
        count = len(self.written)
        places: dict[str, str] = {}
        for number, (part, names) in enumerate(self.written, 1):
            final = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            part.replace(self.folder / final)
            places |= dict.fromkeys(names, final)
        for old in self.folder.glob("model*.safetensors"):
            if old.name not in places.values():
                old.unlink()
        if count > 1:
            _json(
                self.folder / INDEX,
                {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(places.items()))},
            )
        else:
            (self.folder / INDEX).unlink(missing_ok=True)

    def discard(self) -> None:
        """Nothing half-written is left."""
        for part, _ in self.written:
            part.unlink(missing_ok=True)

    def _write(self) -> None:
        part = self.folder / f".model-{len(self.written) + 1:05}.part"
        self.written.append((part, list(self.open)))
        try:
            save_file(self.open, part, metadata={"format": "pt"})
        except SafetensorError as error:  # it hides the system's own error in a text
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(part)) from None
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        self.open, self.size = {}, 0


def _json(file: Path, content: Mapping[str, Any]) -> None:
    write_whole(file, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
