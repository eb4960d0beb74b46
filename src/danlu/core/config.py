"""Settings: typed dataclasses from YAML, overridden and saved; every mistake named with its line.

A settings dataclass is frozen and keyword-only; its fields are made by `setting`. It may hold whole numbers, numbers,
truth values, texts, null, choices (`Literal`), lists, tuples, tables (`dict[str, …]`), further settings dataclasses,
and unions of these; a union of dataclasses is settled by `kind`, or by the shape of what was written.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from danlu.core.errors import InputError
from danlu.core.fields import FAILED, Facts, expected, settings_of, walk
from danlu.core.nodes import Items, Mark, Mistake, Node, Scalar, Section, override, read, resolve
from danlu.core.schema import Broken, Conversion, Rules

T = TypeVar("T")
ABSENT = "(absent)"  # in differences: the setting is not there on this side
LARGEST_FILE = 2_000_000  # bytes
LONGEST_LINE = 100  # characters, about, of a section or list that is saved on one line


def setting(
    default: Any = MISSING,
    doc: str = "",
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    suffixes: bool = False,
) -> Any:
    """A field of a settings dataclass: its default (none: it must be given), its one-line doc, and its bounds.

    suffixes: a count that may also be written 100k, 1.5M, 2B.
    """
    facts = {"doc": doc, "at_least": at_least, "above": above, "at_most": at_most, "below": below, "suffixes": suffixes}
    if isinstance(default, (list, dict)) or (callable(default) and not isinstance(default, type)):
        return field(default_factory=default if callable(default) else lambda: type(default)(default), metadata=facts)
    if default is MISSING:
        return field(metadata=facts)
    return field(default=default, metadata=facts)


def load(
    form: type[T],
    text: str,
    *,
    file: Path,
    overrides: Iterable[str] = (),
    rules: Rules | None = None,
    here: Path | None = None,
) -> T:
    """The settings that a YAML or JSON text and the overrides (``key.sub=value``) write.

    file: where the text comes from, for messages, and what relative paths in it resolve against; paths typed as
    overrides resolve against `here` (the working folder). Raises InputError with every mistake in one message.
    """
    rules = rules or Rules()
    mistakes: list[Mistake] = []
    tree = read(text, mistakes)
    unreadable = bool(mistakes) and not tree.entries
    override(tree, overrides, mistakes)
    if not unreadable:
        resolve(tree, rules.paths, rules.places, base=file.absolute().parent, here=here or Path.cwd())
        converted = _convert(form, tree, rules, mistakes)
        if not mistakes:
            assert isinstance(converted, form)
            return converted
    raise InputError(message(mistakes, str(file)))


def read_text(file: Path) -> str:
    """The text of a settings file; InputError where it is missing, unreadable, huge or not UTF-8."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file}: {(error.strerror or str(error)).lower()}") from None
    if len(content) > LARGEST_FILE:
        raise InputError(f"{file}: {len(content)} bytes are too many for a file of settings")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file} line {line}: byte {error.start} is not UTF-8; save the file as UTF-8") from None


def checked(value: T, *, rules: Rules | None = None, name: str = "settings", here: Path | None = None) -> T:
    """The same settings, made in Python, held to what a file is held to, relative paths resolved against `here`.

    Raises InputError with every mistake in one message.
    """
    rules = rules or Rules()
    mistakes: list[Mistake] = []
    tree = _node(plain(value))
    assert isinstance(tree, Section)
    where = here or Path.cwd()
    resolve(tree, rules.paths, rules.places, base=where, here=where)
    converted = _convert(type(value), tree, rules, mistakes)
    if mistakes:
        raise InputError(message(mistakes, name))
    return converted


def message(mistakes: list[Mistake], name: str) -> str:
    """All mistakes as one text: one line where there is one, else a heading and a line each, in the file's order."""
    ordered = sorted(dict.fromkeys(mistakes), key=lambda mistake: mistake.mark)
    if len(ordered) == 1:
        [one] = ordered
        place = f"{name} {one.mark}".rstrip() if not one.mark.typed else "command line"
        return f"{place}: {one}"
    lines = [f"  {f'{one.mark}: ' if str(one.mark) else ''}{one}" for one in ordered]
    return "\n".join([f"{name} has {len(ordered)} mistakes:", *lines])


def plain(value: Any) -> Any:
    """The settings as dicts, lists, texts and numbers: every field, in the classes' order, named as in a file."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.field.name)) for one in settings_of(type(value))}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def dump(value: Any) -> str:
    """The settings as YAML: every field, in a stable order; `load` reads equal settings back."""
    return yaml.dump(
        plain(value),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=None,
        width=float("inf"),
    )


def identity(value: Any) -> str:
    """A hash of the settings: equal exactly where every field is equal."""
    text = json.dumps(plain(value), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def differences(old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    """What differs between two settings: (path, old, new), in the old one's order; ABSENT where not there."""
    return list(_differences(plain(old), plain(new), ""))


def changed(value: T, path: str, new: Any) -> T:
    """The same settings but for one, given by its path (``batch.micro_batch_size``); nothing is checked."""
    first, _, rest = path.partition(".")
    form: Any = type(value)
    for one in settings_of(form):
        if one.name == first:
            inner = changed(getattr(value, one.field.name), rest, new) if rest else new
            return replace(value, **{one.field.name: inner})  # type: ignore[type-var]
    raise KeyError(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """One setting in words. Where a section has several kinds, its path names the kind in brackets."""

    path: str  # optimizer.schedule(cosine).final_ratio
    takes: str
    default: str
    doc: str

    def within(self, section: str) -> bool:
        """Whether it is a section's, or the setting itself; kinds may be left out."""
        path = re.sub(r"\([^)]*\)", "", self.path)
        return path == section or path.startswith(f"{section}.")


def describe(form: type) -> list[Description]:
    """Every setting below a dataclass, in order; what several kinds of a section have below them stands once."""
    rows = []
    for place in walk(form):
        section, _, name = place.path.rpartition(".")
        default = place.default
        if default is MISSING:
            shown = "required"
        elif is_dataclass(default) and not isinstance(default, type):
            shown = getattr(default, "kind", "of its settings")
        else:
            shown = default if isinstance(default, str) else json.dumps(plain(default), ensure_ascii=False)
        one = place.setting
        path = f"{section}({place.kind}).{name}" if place.kind and section else place.path
        rows.append(Description(path=path, takes=expected((one.hint,), one.facts), default=shown, doc=one.facts.doc))
    return list(dict.fromkeys(rows))


class _Dumper(yaml.SafeDumper):
    """Writes short sections and lists on one line, longer ones a line each; repeats what stands twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        node = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = node.flow_style and len(str(mapping)) < LONGEST_LINE
        return node

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        node = super().represent_sequence(tag, sequence, flow_style)
        node.flow_style = node.flow_style and len(str(sequence)) < LONGEST_LINE
        return node


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """A text, quoted where a reader might take it for something else."""
    style = None
    if any(character in text for character in "\x85\u2028\u2029"):  # line breaks of YAML 1.1: written as escapes
        style = '"'
    elif (text[:1] in "+-.0123456789" or text in ("null", "~", "")) and "\n" not in text:
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _convert(form: type, tree: Section, rules: Rules, mistakes: list[Mistake]) -> Any:
    conversion = Conversion(form, rules, mistakes)
    converted = conversion.convert(tree, form, Facts(), "")
    if isinstance(converted, Broken) or converted is not FAILED:
        conversion.check(converted)
    return converted


def _node(value: Any) -> Node:
    """A plain value as a tree without lines."""
    nowhere = Mark()
    if isinstance(value, dict):
        return Section(entries={key: _node(inner) for key, inner in value.items()}, mark=nowhere)
    if isinstance(value, list):
        return Items(items=[_node(inner) for inner in value], mark=nowhere)
    if isinstance(value, str):
        return Scalar(text=value, quoted=True, mark=nowhere)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return Scalar(text=text, quoted=False, mark=nowhere)


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new)):
            yield from _differences(one, other, f"{path}.{index}")
    elif old != new or type(old) is not type(new):
        yield path, old, new
