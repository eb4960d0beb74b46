"""The fields of settings dataclasses: what each takes, in types and in words, and how a number may be written."""

from __future__ import annotations

import functools
import keyword
import math
import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from decimal import Decimal
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

FAILED: Any = type("Failed", (), {"__repr__": lambda self: "FAILED", "__slots__": ()})()  # no value could be read
SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]{0,24})|0x[0-9a-fA-F]{1,16}")
SHORT = re.compile(r"([-+]?[0-9][0-9_]{0,20}(?:\.[0-9]{0,20})?)(?:[eE]\+?([0-9]{1,2}))?([kKMBGT]?)")
REAL = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,4})?")
LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What `setting` says of a field beyond its type."""

    doc: str = ""
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    suffixes: bool = False

    def within(self, value: float) -> bool:
        """Whether a number keeps the bounds."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words: "at least 0 and below 1"."""
        words = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most), ("below", self.below))
        return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)

    def numeric(self, hints: tuple[Any, ...]) -> bool:
        """Whether a number is among what may be written."""
        return int in hints or float in hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a settings dataclass."""

    name: str  # as the file writes it
    field: Field[Any]
    hint: Any
    facts: Facts

    @property
    def required(self) -> bool:
        return self.field.default is MISSING and self.field.default_factory is MISSING

    def default(self) -> Any:
        """Its default, MISSING where it must be given."""
        return self.field.default if self.field.default_factory is MISSING else self.field.default_factory()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A setting somewhere in the tree: its path from the root, and of which kind of section it is."""

    path: str
    name: str
    kind: str
    setting: Setting
    default: Any


def external(name: str) -> str:
    """A field's name as a file writes it: `from_` is `from`."""
    return name[:-1] if name.endswith("_") and keyword.iskeyword(name[:-1]) else name


@functools.cache
def hints_of(form: Any) -> dict[str, Any]:
    """The annotations of a dataclass, as types."""
    return get_type_hints(form)


@functools.cache
def settings_of(form: Any) -> tuple[Setting, ...]:
    """The fields of a settings dataclass, in their order."""
    known = {f.name for f in fields(Facts)}
    return tuple(
        Setting(
            name=external(one.name),
            field=one,
            hint=hints_of(form)[one.name],
            facts=Facts(**{key: value for key, value in one.metadata.items() if key in known}),
        )
        for one in fields(form)
        if one.init
    )


def parts_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def forms_of(hints: tuple[Any, ...]) -> tuple[type, ...]:
    """The settings dataclasses among annotations."""
    return tuple(hint for hint in hints if isinstance(hint, type) and is_dataclass(hint))


@functools.cache
def walk(form: type) -> tuple[Place, ...]:
    """Every setting below a dataclass, each under its path, in order; `*` stands for a place in a list."""
    return tuple(_walk(form, "", MISSING, ()))


def _walk(form: type, path: str, default: Any, above: tuple[type, ...]) -> Iterator[Place]:
    kinds = get_args(hints_of(form)["kind"]) if "kind" in hints_of(form) else ()
    for one in settings_of(form):
        inner = f"{path}.{one.name}" if path else one.name
        value = getattr(default, one.field.name) if type(default) is form else one.default()
        yield Place(path=inner, name=one.name, kind=kinds[0] if kinds else "", setting=one, default=value)
        for part in parts_of(one.hint):
            within = inner
            if get_origin(part) in (list, dict):
                part, within = Union[get_args(part)[-1], None], f"{inner}.*"  # noqa: UP007
            for deeper in forms_of(parts_of(part)):
                if deeper not in above:
                    yield from _walk(deeper, within, value, (*above, form))


def number(text: str, *, whole: bool, suffixes: bool = False) -> Any:
    """The number that a text writes, or FAILED.

    Whole ones: 300, 1_000, 0x10, 1e4, and with `suffixes` 100k, 1.5M, 2B; never 010, 3.0 or 12:30. Others: 1, 1e-4, .5;
    never inf or nan.
    """
    if not whole:
        value = float(text.replace("_", "")) if REAL.fullmatch(text) else math.inf
        return value if math.isfinite(value) else FAILED
    if WHOLE.fullmatch(text):
        found = int(text.replace("_", ""), 16 if text.startswith("0x") else 10)
    elif (match := SHORT.fullmatch(text)) and (match[2] or (suffixes and match[3])):
        exact = Decimal(match[1].replace("_", "")) * 10 ** int(match[2] or 0)
        exact *= SUFFIXES[match[3]] if match[3] and suffixes else 1
        if (match[3] and not suffixes) or exact != int(exact):
            return FAILED
        found = int(exact)
    else:
        return FAILED
    return found if abs(found) <= LARGEST else FAILED


def expected(hints: tuple[Any, ...], facts: Facts) -> str:
    """What may be written, in words: "a whole number at least 1, or auto"."""
    flat = [part for hint in hints for part in parts_of(hint)]
    words = [word for hint in flat for word in _words(hint, facts)]
    ordered = list(dict.fromkeys(words))
    return ordered[0] if len(ordered) == 1 else f"{', '.join(ordered[:-1])} or {ordered[-1]}"


def _words(hint: Any, facts: Facts) -> list[str]:
    bounds = f" {facts.bounds}" if facts.bounds else ""
    if get_origin(hint) is Literal:
        return [f"{choice}".lower() if isinstance(choice, bool) else f"{choice}" for choice in get_args(hint)]
    if get_origin(hint) is tuple and get_args(hint)[-1] is not Ellipsis:
        return [f"a list of {len(get_args(hint))} ({expected(get_args(hint), facts)} each)"]
    if (get_origin(hint) or hint) in (list, tuple):
        inner = [a for a in get_args(hint) if a is not Ellipsis]
        return [f"a list (of {expected(tuple(inner), facts)})" if inner else "a list"]
    if (get_origin(hint) or hint) is dict:
        return ["a section of KEY: VALUE lines"]
    if isinstance(hint, type) and is_dataclass(hint):
        return ["a section"]
    shorts = " (1M and 100k may be written)" if facts.suffixes else ""
    plain = {int: f"a whole number{bounds}{shorts}", float: f"a number{bounds}", str: "a text", bool: "true or false"}
    return [plain.get(hint, "null" if hint is type(None) else "any value")]
