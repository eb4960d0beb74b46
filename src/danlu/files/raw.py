"""Any raw file by its kind: which there are, and documents out of each."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from danlu.core.errors import InputError
from danlu.files import jsonl
from danlu.files import text as plain
from danlu.files.document import Document, Reject
from danlu.files.megatron import is_shard
from danlu.files.sidecar import prefix_of
from danlu.files.stream import readable

Kind = Literal["text", "jsonl", "parquet"]
KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".txt.gz": "text",
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
}
SUPPORTED = "raw text comes as .txt, .jsonl (both may be .gz) or .parquet, token shards as .bin with .idx"


def kind_of(path: Path) -> Kind | None:
    """The kind that the file's name tells; None if it is none that can be read."""
    name = path.name.lower()
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def read(path: Path, *, split: plain.Split = "document", text: str = "text") -> Iterator[Document | Reject]:
    """The documents of a raw file, in its order, and a Reject for each record that is bad.

    ``split`` says what a document is in plain text, ``text`` which field or column holds it elsewhere. InputError
    if the path is no readable file of a kind that can be read; nothing is raised for what is in it.
    """
    readable(path)
    kind = kind_of(path)
    if kind == "text":
        return plain.read(path, split=split)
    if kind == "jsonl":
        return jsonl.read(path, text=text)
    if kind == "parquet":
        from danlu.files import parquet  # noqa: PLC0415 - pyarrow takes 0.2 s to import: who reads none need not wait

        return parquet.read(path, text=text)
    raise InputError(f"{path} is of a kind that cannot be read; {SUPPORTED}.")


def find(paths: Iterable[str | Path], *, announce: Callable[[str], None]) -> list[Path]:
    """The files that the paths name, each once, in order: files, shards (as prefixes), folders (with all below), globs.

    What stands in a folder is taken in the order of its names; what cannot be read there is left out, with a word.
    """
    found: dict[Path, Path] = {}
    for given in paths:
        path = Path(given).expanduser()
        try:
            files = _expand(path, announce)
        except OSError as error:
            raise InputError(f"{path} cannot be looked at: {error.strerror}.") from error
        for file in files:
            place = file.resolve()
            if place in found:
                announce(f"{file} is named twice; it is read once.")
            found.setdefault(place, file)
    return list(found.values())


def _expand(path: Path, announce: Callable[[str], None]) -> list[Path]:
    if is_shard(path):
        return [prefix_of(path)]
    if path.is_dir():
        return _folder(path, announce)
    if path.exists():
        readable(path)
        if kind_of(path) is None:
            raise InputError(f"{path} is of a kind that cannot be read; {SUPPORTED}.")
        return [path]
    if glob.has_magic(str(path)):
        names = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        matches = sorted(map(Path, names), key=lambda match: match.parts)
        # A glob may match files and, with **, the folders that hold them: each file counts by its own name.
        files = _readable_ones([match for match in matches if match.is_file()], str(path), announce)
        files = files or [file for match in matches if match.is_dir() for file in _folder(match, announce)]
        if not files:
            raise InputError(f"{path} matches no file that can be read; {SUPPORTED}.")
        return files
    readable(path)  # raises, and says why
    raise AssertionError(path)


def _folder(folder: Path, announce: Callable[[str], None]) -> list[Path]:
    """All below it that can be read, in the order of its names; hidden files and folders are passed over."""
    inside = sorted(folder.rglob("*"), key=lambda file: file.relative_to(folder).parts)
    hidden = [any(part.startswith(".") for part in file.relative_to(folder).parts) for file in inside]
    files = [file for file, hide in zip(inside, hidden) if not hide and file.is_file()]
    found = _readable_ones(files, str(folder), announce)
    if not found:
        raise InputError(f"the folder {folder} holds no file that can be read; {SUPPORTED}.")
    return found


def _readable_ones(files: list[Path], where: str, announce: Callable[[str], None]) -> list[Path]:
    shards = {prefix_of(file) for file in files if file.name.endswith((".bin", ".idx")) and is_shard(file)}
    kept: dict[Path, None] = {}
    others: list[Path] = []
    for file in files:
        if kind_of(file):
            kept[file] = None
        elif prefix_of(file) in shards:
            kept[prefix_of(file)] = None
        elif not file.name.endswith(".meta.json"):
            others.append(file)
    if others and kept:
        named = ", ".join(file.name for file in others[:3]) + (", …" if len(others) > 3 else "")
        announce(f"{where}: {len(others)} files of other kinds are left out ({named}).")
    return list(kept)
