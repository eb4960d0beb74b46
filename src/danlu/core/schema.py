"""From what was written to typed settings: each text becomes what its field asks for, and every mistake is kept."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from danlu.core.errors import Failure
from danlu.core.fields import FAILED, Facts, expected, external, forms_of, hints_of, number, settings_of, walk
from danlu.core.nodes import Items, Mark, Mistake, Node, Scalar, Section

At = Callable[[str], Any]
Check = Callable[[At], Iterable[tuple[str, str]]]


class Unknown(Exception):
    """A check asked for a setting that does not exist here, or was written wrongly; the check has nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What is known and not built yet at one path, so that it is refused and not taken for a misspelling.

    values  the words that are not built; empty: all that are not `built`
    built   what can be written now
    advice  what would do in its place, where that says more than `built`
    """

    values: frozenset[str] = frozenset()
    built: tuple[str, ...] = ()
    advice: str = ""

    def refusal(self, node: Node) -> str:
        """The sentence that refuses it, or nothing."""
        if isinstance(node, Scalar):
            text = "null" if node.null else node.text
            if (text not in self.values) if self.values else (text in self.built):
                return ""
        elif self.values or (isinstance(node, Items) and not node.items and "[]" in self.built):
            return ""
        what = f"{node.text} is not built yet" if isinstance(node, Scalar) else "not built yet"
        is_are = "is" if len(self.built) == 1 else "are"
        words = " and ".join([", ".join(self.built[:-1]), *self.built[-1:]] if len(self.built) > 1 else self.built)
        do = self.advice or (f"{words} {is_are}" if self.built else "")
        return f"{what}; {do}" if do else what


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a tree of settings knows beyond its types.

    names    other tools' keys and what they are called here; "KIND:KEY" is what another kind's key is called in KIND
    planned  path -> what is not built there
    paths    patterns of the settings that are file paths, each with the words that are none
    places   folders that a path may begin with by name: NAME:REST is REST in that folder
    checks   what must hold between settings; each yields (path, sentence), from values it asks for by path
    """

    names: Mapping[str, str] = field(default_factory=dict)
    planned: Mapping[str, Planned] = field(default_factory=dict)
    paths: Mapping[str, frozenset[str]] = field(default_factory=dict)
    places: Mapping[str, Path] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()


@dataclass(slots=True)
class Broken:
    """What could be read of a section that has mistakes."""

    values: dict[str, Any]


class Conversion:
    """One tree being converted; the mistakes found so far."""

    def __init__(self, root: type, rules: Rules, mistakes: list[Mistake]):
        self.root = root
        self.rules = rules
        self.mistakes = mistakes
        self.marks: dict[str, Mark] = {}

    def wrong(self, node_mark: Mark, path: str, text: str) -> Any:
        """Keep a mistake; the value that stands for it."""
        self.mistakes.append(Mistake(mark=node_mark, path=path, text=text))
        return FAILED

    def convert(self, node: Node, hint: Any, facts: Facts, path: str, default: Any = MISSING) -> Any:
        """The value that the annotation asks for, or FAILED (or Broken) with the mistakes kept."""
        self.marks.setdefault(path, node.mark)
        planned = self.rules.planned.get(path)
        if planned and (refusal := planned.refusal(node)):
            return self.wrong(node.mark, path, refusal)
        origin = get_origin(hint)
        if origin in (Union, types.UnionType):
            return self._union(node, get_args(hint), facts, path, default)
        if hint is Any:
            return _untyped(node)
        if is_dataclass(hint) and isinstance(hint, type):
            return self._section(node, hint, path, default, ())
        if origin in (list, tuple) or hint is list:
            return self._items(node, hint, facts, path)
        if origin is dict or hint is dict:
            return self._table(node, hint, facts, path)
        return self._scalar(node, (hint,), facts, path)

    def check(self, value: Any) -> None:
        """Keep what the rules' checks find between settings that were read without mistake."""
        found: dict[tuple[str, str], None] = {}
        for check in self.rules.checks:
            try:
                found.update(dict.fromkeys(check(lambda path: _at(value, path))))
            except Unknown:
                continue
        for path, text in found:
            mark = Mark()
            parts = path.split(".")
            for end in range(len(parts), 0, -1):
                if (known := self.marks.get(".".join(parts[:end]))) is not None:
                    mark = known
                    break
            self.wrong(mark, path, text)

    def _scalar(self, node: Node, hints: tuple[Any, ...], facts: Facts, path: str) -> Any:
        if isinstance(node, Scalar):
            for hint in hints:
                value = _read(node, hint, facts)
                if value is not FAILED:
                    return value
        choices = [str(c) for hint in hints if get_origin(hint) is Literal for c in get_args(hint)]
        near = difflib.get_close_matches(node.text, choices, 1, 0.6) if isinstance(node, Scalar) else []
        hint_text = f"; did you mean {near[0]}?" if near and not facts.numeric(hints) else ""
        return self.wrong(node.mark, path, f"must be {expected(hints, facts)}, not {_given(node)}{hint_text}")

    def _items(self, node: Node, hint: Any, facts: Facts, path: str) -> Any:
        arguments = get_args(hint) or (Any,)
        fixed = get_origin(hint) is tuple and arguments[-1] is not Ellipsis
        if not isinstance(node, Items):
            rest = ", …" * fixed  # the others are not known
            write = f"; write [{node.text}{rest}]" if isinstance(node, Scalar) and not node.null else ""
            return self.wrong(node.mark, path, f"must be {expected((hint,), facts)}, not {_given(node)}{write}")
        if fixed and len(arguments) != len(node.items):
            wanted = expected((hint,), facts)
            return self.wrong(node.mark, path, f"must be {wanted}, not a list of {len(node.items)}")
        each = arguments if fixed else [arguments[0]] * len(node.items)
        values = [
            self.convert(child, one, facts, f"{path}.{i}") for i, (child, one) in enumerate(zip(node.items, each))
        ]
        if any(value is FAILED or isinstance(value, Broken) for value in values):
            return FAILED
        return tuple(values) if get_origin(hint) is tuple else values

    def _table(self, node: Node, hint: Any, facts: Facts, path: str) -> Any:
        if not isinstance(node, Section):
            return self.wrong(node.mark, path, f"must be {expected((hint,), facts)}, not {_given(node)}")
        inner = (get_args(hint) or (str, Any))[1]
        values = {key: self.convert(child, inner, facts, f"{path}.{key}") for key, child in node.entries.items()}
        return FAILED if any(v is FAILED or isinstance(v, Broken) for v in values.values()) else values

    def _union(self, node: Node, hints: tuple[Any, ...], facts: Facts, path: str, default: Any) -> Any:
        if isinstance(node, Scalar) and node.null and type(None) in hints:
            return None
        forms = forms_of(hints)
        if isinstance(node, Section) and forms:
            form = self._choose(node, forms, path, default)
            rivals = tuple(other for other in forms if other is not form)
            return FAILED if form is None else self._section(node, form, path, default, rivals)
        containers = {Items: (list, tuple), Section: (dict,)}.get(type(node), ())
        for hint in hints:
            if (get_origin(hint) or hint) in containers:
                return self.convert(node, hint, facts, path)
        return self._scalar(node, hints, facts, path)

    def _choose(self, node: Section, forms: tuple[type, ...], path: str, default: Any) -> type | None:
        """Which of the forms a section is: by its kind, else by its shape, else the default's."""
        kinds = {kind: form for form in forms for kind in _kinds(form)}
        written = node.entries.get("kind")
        if written is not None and kinds:
            text = written.text if isinstance(written, Scalar) else ""
            if text in kinds:
                self.marks.setdefault(f"{path}.kind", written.mark)
                return kinds[text]
            meant = self._scalar_kind(node, kinds, f"{path}.kind")
            return kinds[meant] if meant else None
        shaped = [form for form in forms if _required(form) and _required(form) <= set(node.entries)]
        unkinded = [form for form in forms if not _kinds(form)]
        if type(default) in forms:
            shaped.append(type(default))
        if fitting := shaped or (unkinded if len(unkinded) == len(forms) else list(forms) if len(forms) == 1 else []):
            return fitting[0]
        others = "".join(f", or {key}" for form in forms for key in sorted(_required(form)))
        self.wrong(node.mark, f"{path}.kind", f"missing; give {' | '.join(kinds)}{others}")
        return None

    def _scalar_kind(self, section: Section, kinds: Iterable[str], path: str) -> str:
        """Keep what is wrong with a kind; a misspelt one is mended, so that the keys beside it can be read."""
        written = section.entries["kind"]
        planned = self.rules.planned.get(path)
        if planned and (refusal := planned.refusal(written)):
            self.wrong(written.mark, path, refusal)
        elif isinstance(written, Scalar) and ".py:" in written.text:
            self.wrong(
                written.mark, path, f"parts of your own ({written.text}) are not built yet; {' | '.join(kinds)} are"
            )
        else:
            self._scalar(written, (Literal[tuple(kinds)],), Facts(), path)
            if isinstance(written, Scalar) and (near := difflib.get_close_matches(written.text, list(kinds), 1, 0.6)):
                section.entries["kind"] = replace(written, text=near[0])
                return near[0]
        return ""

    def _section(self, node: Node, form: type, path: str, default: Any, rivals: tuple[type, ...]) -> Any:
        if not isinstance(node, Section):
            self._not_a_section(node, form, path)
            return FAILED
        known = {one.name: one for one in settings_of(form)}
        before = len(self.mistakes)
        if (kind := node.entries.get("kind")) is not None and "kind" in known:
            allowed = _kinds(form)
            right = isinstance(kind, Scalar) and kind.text in allowed
            if not right and not self._scalar_kind(node, allowed, f"{path}.kind" if path else "kind"):
                return FAILED  # what the other keys should be cannot be known
        for key in node.entries:
            if key not in known:
                self._unknown(node, key, path, form, rivals)
        values: dict[str, Any] = {}
        for name, one in known.items():
            inner = f"{path}.{name}" if path else name
            fallback = getattr(default, one.field.name) if type(default) is form else one.default()
            if name in node.entries:
                self.marks[inner] = node.marks.get(name, node.mark)
                values[one.field.name] = self.convert(node.entries[name], one.hint, one.facts, inner, fallback)
            elif fallback is MISSING:
                about = f": {one.facts.doc}" if one.facts.doc else ""
                self.wrong(node.mark, inner, f"missing; give {expected((one.hint,), one.facts)}{about}")
                values[one.field.name] = FAILED
            else:
                values[one.field.name] = fallback
        if len(self.mistakes) > before:
            return Broken(values)
        try:
            return form(**values)
        except (ValueError, Failure) as error:
            first, _, rest = str(error).partition(": ")  # it may name one of its own settings
            name = first.removeprefix(f"{path}.")
            inner, text = (f"{path}.{name}" if path else name, rest) if name in known else (path, str(error))
            self.wrong(self.marks.get(inner, node.mark), inner, text)
            return Broken(values)

    def _not_a_section(self, node: Node, form: type, path: str) -> None:
        write = ""
        if isinstance(node, Scalar) and node.text in _kinds(form):
            write = f"; write {{kind: {node.text}}}"
        keys = ", ".join(one.name for one in settings_of(form)[:4])
        self.wrong(node.mark, path, f"must be a section (with {keys}, …), not {_given(node)}{write}")

    def _unknown(self, node: Section, key: str, path: str, form: type, rivals: tuple[type, ...]) -> None:
        inner = f"{path}.{key}" if path else key
        mark = node.marks.get(key, node.mark)
        child = node.entries[key]
        if isinstance(child, Section) and not self.rules.planned.get(inner):
            below = _leaves(child, inner, self.rules.names)
            said = [(p, m, self._advice(p, p.rsplit(".", 1)[-1], None, ())) for p, m in below]
            told = [(p, m, advice) for p, m, advice in said if advice]
            for deep, deep_mark, advice in told:
                self.wrong(deep_mark, deep, f"unknown key; {advice}")
            if told:
                return
        if planned := self.rules.planned.get(inner):
            self.wrong(mark, inner, planned.refusal(child) or "not built yet; leave it out")
            return
        advice = self._advice(inner, key, form, rivals)
        known = ", ".join(one.name for one in settings_of(form))
        self.wrong(mark, inner, f"unknown key; {advice or f'known here: {known}'}")

    def _advice(self, path: str, key: str, form: type | None, rivals: tuple[type, ...]) -> str:
        """What the key is called here, or the nearest right name; empty where nothing is near."""
        section = path.rpartition(".")[0]
        where = f"{section}." if section else ""
        plain = _normal(key)
        here = [] if form is None else [one.name for one in settings_of(form)]
        for name in here:
            if _normal(name) == plain:
                return f"did you mean {where}{name}?"
        own = _kinds(form)[:1] if form else ()
        if own and (twin := self.rules.names.get(f"{own[0]}:{plain}")):
            return f"of kind: {own[0]} it is {twin}"
        for rival in rivals:
            if key in {one.name for one in settings_of(rival)}:
                kinds = _kinds(rival)
                whose = f"kind: {kinds[0]}" if kinds else f"the form with {settings_of(rival)[0].name}"
                return f"it is a key of {whose}, not of {f'kind: {own[0]}' if own else 'this form'}"
        for name in (_normal(path), plain):
            if name in self.rules.names:
                return f"here it is {self.rules.names[name]}"
        everywhere = [one for one in walk(self.root) if one.path != path]
        if elsewhere := dict.fromkeys(one.path for one in everywhere if _normal(one.name) == plain):
            return f"it belongs elsewhere: {' or '.join(elsewhere)}"
        if near := difflib.get_close_matches(plain, here, 1, 0.7):
            return f"did you mean {where}{near[0]}?"
        names = {one.name: one.path for one in reversed(everywhere) if one.name != "kind"}
        if near := difflib.get_close_matches(plain, names, 1, 0.8):
            return f"did you mean {names[near[0]]}?"
        if near := difflib.get_close_matches(plain, self.rules.names, 1, 0.85):
            return f"did you mean {near[0]}? Here it is {self.rules.names[near[0]]}"
        return ""


def _read(node: Scalar, hint: Any, facts: Facts) -> Any:
    """What one scalar annotation makes of a text, or FAILED."""
    if get_origin(hint) is Literal:
        for choice in get_args(hint):
            if isinstance(choice, str):
                if node.text == choice:
                    return choice
            elif (value := _read(node, type(choice), facts)) is not FAILED and value == choice:
                return choice
        return FAILED
    if hint is str:
        return FAILED if node.null else node.text
    if node.quoted:
        return FAILED
    if hint is type(None):
        return None if node.null else FAILED
    if hint is bool:
        return {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}.get(
            node.text, FAILED
        )
    if hint in (int, float):
        value = number(node.text, whole=hint is int, suffixes=facts.suffixes)
        return value if value is not FAILED and facts.within(value) else FAILED
    return FAILED


def _untyped(node: Node) -> Any:
    """A value of a setting that takes any: by YAML 1.2's core rules."""
    if isinstance(node, Section):
        return {key: _untyped(child) for key, child in node.entries.items()}
    if isinstance(node, Items):
        return [_untyped(child) for child in node.items]
    for hint in (type(None), bool, int, float):
        if (value := _read(node, hint, Facts())) is not FAILED:
            return value
    return node.text


def _kinds(form: type) -> tuple[str, ...]:
    """The words that `kind` takes in a settings dataclass; empty where it has none."""
    hint = hints_of(form).get("kind")
    return get_args(hint) if get_origin(hint) is Literal else ()


def _required(form: type) -> set[str]:
    """The keys that a settings dataclass must be given."""
    return {one.name for one in settings_of(form) if one.required}


def _given(node: Node) -> str:
    if isinstance(node, Scalar):
        if node.null:
            return "empty" if node.text == "" else "null"
        return f"the text '{node.text}'" if node.quoted else node.text
    return "a list" if isinstance(node, Items) else "a section"


def _normal(name: str) -> str:
    return name.lower().replace("-", "_")


def _leaves(node: Section, path: str, known: Iterable[str]) -> Iterator[tuple[str, Mark]]:
    """The keys below a section that is unknown as a whole; of sections that have a name here, the section's key."""
    for key, child in node.entries.items():
        if isinstance(child, Section) and child.entries and _normal(key) not in known:
            yield from _leaves(child, f"{path}.{key}", known)
        else:
            yield f"{path}.{key}", node.marks.get(key, node.mark)


def _at(value: Any, path: str) -> Any:
    """The setting at a path of converted values, whole or broken."""
    for part in path.split("."):
        if isinstance(value, Broken):
            names = {external(name): found for name, found in value.values.items()}
            value = names.get(part, FAILED)
        elif is_dataclass(value) and not isinstance(value, type):
            names = {one.name: one.field.name for one in settings_of(type(value))}
            value = getattr(value, names[part]) if part in names else FAILED
        elif isinstance(value, (list, tuple)):
            value = value[int(part)] if part.isdecimal() and int(part) < len(value) else FAILED
        else:
            raise Unknown(path)
        if value is FAILED:
            raise Unknown(path)
    if isinstance(value, Broken):
        raise Unknown(path)
    return value
