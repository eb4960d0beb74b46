"""Settings as they were written: a tree of texts, each with its line; made from YAML or JSON and from the command line.

Nothing is constructed from a tag, so reading a file can run nothing. Aliases are bounded, and a key stands once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

MOST_VALUES = 20_000  # values after aliases are followed
DEEPEST = 40  # sections within sections
STANDARD = "tag:yaml.org,2002:"
PLAIN_TAGS = {
    STANDARD + name for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp", "merge", "value")
}
NULLS = frozenset(("", "~", "null", "Null", "NULL"))


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Where something was written: a line of the file (from 1; 0: no line of it), or the command line."""

    line: int = 0
    typed: bool = False

    def __str__(self) -> str:
        return "command line" if self.typed else f"line {self.line}" if self.line else ""


TYPED = Mark(line=1_000_000_000, typed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing that is wrong: where, which setting (empty: the file as a whole), and what would be right."""

    mark: Mark
    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A text as it was written; quoted ones are never numbers, nor null."""

    text: str
    quoted: bool
    mark: Mark

    @property
    def null(self) -> bool:
        return not self.quoted and self.text in NULLS


@dataclass(slots=True, kw_only=True)
class Items:
    """A list."""

    items: list[Node]
    mark: Mark


@dataclass(slots=True, kw_only=True)
class Section:
    """Keys and what stands under them; marks are the keys'."""

    entries: dict[str, Node]
    marks: dict[str, Mark] = field(default_factory=dict)
    mark: Mark


Node = Scalar | Items | Section


def read(text: str, mistakes: list[Mistake]) -> Section:
    """The tree of a YAML or JSON text. What is wrong with its form is added to the mistakes; what is right is read."""
    empty = Section(entries={}, mark=Mark(line=1))
    try:
        # A tab may indent in JSON but not in YAML; inside a JSON string a bare tab is not allowed.
        root = yaml.compose(text.replace("\t", " ") if text.lstrip().startswith("{") else text, Loader=yaml.SafeLoader)
        tree = None if root is None else _Reading(mistakes).node(root, "", 0)
    except yaml.MarkedYAMLError as error:
        where = error.problem_mark or error.context_mark
        said = " ".join(part for part in (error.context, error.problem) if part)
        mistakes.append(Mistake(mark=Mark(where.line + 1 if where else 0), path="", text=f"not valid YAML: {said}"))
        return empty
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        said = f"the character U+{ord(text[error.position]):04X} may not stand in a YAML file"
        mistakes.append(Mistake(mark=Mark(line), path="", text=said))
        return empty
    except RecursionError:
        mistakes.append(Mistake(mark=Mark(), path="", text=f"nested deeper than {DEEPEST} levels"))
        return empty
    except _TooMuch as error:
        mistakes.append(Mistake(mark=error.mark, path="", text=error.text))
        return empty
    if isinstance(tree, Section):
        return tree
    what = "empty" if root is None or (isinstance(tree, Scalar) and tree.null) else "not a section of KEY: VALUE lines"
    mistakes.append(Mistake(mark=Mark(), path="", text=f"the file is {what}"))
    return empty


def override(tree: Section, typed: Iterable[str], mistakes: list[Mistake]) -> None:
    """Each ``key.sub=value`` stands in place of what the file says; a list takes places in it (``data.train.0``)."""
    seen: set[str] = set()
    for text in typed:
        path, equals, value = text.partition("=")
        path = path.strip().lstrip("-")
        if not equals or not path or not all(path.split(".")):
            mistakes.append(
                Mistake(mark=TYPED, path="", text=f"{text!r} is not KEY=VALUE, like optimizer.learning_rate=1e-3")
            )
        elif path in seen:
            mistakes.append(Mistake(mark=TYPED, path=path, text="given twice"))
        elif undone := sorted(other for other in seen if other.startswith(f"{path}.")):
            said = f"would undo {undone[0]}, typed before it; give the whole first"
            mistakes.append(Mistake(mark=TYPED, path=path, text=said))
        else:
            seen.add(path)
            if (node := _typed(value.strip(), path, mistakes)) is not None:
                _place(tree, path, node, mistakes)


def resolve(
    node: Node,
    paths: Mapping[str, frozenset[str]],
    places: Mapping[str, Path],
    *,
    base: Path,
    here: Path,
    at: str = "",
) -> Node:
    """The same tree with its file paths absolute: against ``base`` where the file says them, ``here`` where typed.

    paths: patterns like ``data.train.*``, each with the words that are no paths there. places: see ``Rules``.
    """
    if isinstance(node, Section):
        for key, child in node.entries.items():
            inner = f"{at}.{key}" if at else key
            node.entries[key] = resolve(child, paths, places, base=base, here=here, at=inner)
    elif isinstance(node, Items):
        node.items[:] = [
            resolve(child, paths, places, base=base, here=here, at=f"{at}.{index}")
            for index, child in enumerate(node.items)
        ]
    elif not node.null and "://" not in node.text:
        words = paths.get(re.sub(r"\.\d+(?=\.|$)", ".*", at))
        if words is not None and node.text not in words:
            place, _, rest = node.text.partition(":")
            if place in places:
                return replace(node, text=str(places[place] / rest))
            whole = (here if node.mark.typed else base) / Path(node.text).expanduser()
            return replace(node, text=str(whole.resolve()))
    return node


class _TooMuch(Exception):
    def __init__(self, mark: Mark, text: str):
        self.mark, self.text = mark, text


class _Reading:
    """From yaml's nodes to ours."""

    def __init__(self, mistakes: list[Mistake]):
        self.mistakes = mistakes
        self.values = 0

    def node(self, node: yaml.Node, path: str, depth: int) -> Node:
        mark = Mark(node.start_mark.line + 1)
        self.values += 1
        if self.values > MOST_VALUES:
            raise _TooMuch(mark, f"over {MOST_VALUES} values once its aliases (*name) are followed")
        if depth > DEEPEST:
            raise _TooMuch(mark, f"nested deeper than {DEEPEST} levels")
        if node.tag not in PLAIN_TAGS:
            tag = node.tag.replace(STANDARD, "!!")
            self.mistakes.append(
                Mistake(mark=mark, path=path, text=f"the tag {tag} is refused; only plain values are read")
            )
            return Scalar(text="", quoted=False, mark=mark)
        if isinstance(node, yaml.MappingNode):
            return self.section(node, path, depth, mark)
        if isinstance(node, yaml.SequenceNode):
            return Items(
                items=[self.node(child, f"{path}.{i}", depth + 1) for i, child in enumerate(node.value)], mark=mark
            )
        assert isinstance(node, yaml.ScalarNode)
        quoted = node.style is not None and node.tag == STANDARD + "str"
        return Scalar(text=_whole_characters(node.value), quoted=quoted, mark=mark)

    def section(self, node: yaml.MappingNode, path: str, depth: int, mark: Mark) -> Section:
        section = Section(entries={}, mark=mark)
        merged: list[Section] = []
        for name, child in node.value:
            at = Mark(name.start_mark.line + 1)
            if not isinstance(name, yaml.ScalarNode):
                self.mistakes.append(Mistake(mark=at, path=path, text="a key must be a text"))
                continue
            key = _whole_characters(name.value)
            inner = f"{path}.{key}" if path else key
            if name.tag == STANDARD + "merge":
                merged += self.merge(child, path, depth, at)
            elif key in section.entries:
                first = section.marks[key].line
                self.mistakes.append(Mistake(mark=at, path=inner, text=f"given twice (first on line {first})"))
            else:
                section.entries[key] = self.node(child, inner, depth + 1)
                section.marks[key] = at
        for other in merged:
            for key, value in other.entries.items():
                if section.entries.setdefault(key, value) is value:
                    section.marks.setdefault(key, other.marks[key])
        return section

    def merge(self, child: yaml.Node, path: str, depth: int, at: Mark) -> list[Section]:
        found = self.node(child, path, depth + 1)
        several = found.items if isinstance(found, Items) else [found]
        sections = [one for one in several if isinstance(one, Section)]
        if len(sections) < len(several):
            self.mistakes.append(Mistake(mark=at, path=path, text="<< takes a section, or a list of them"))
        return sections


def _typed(value: str, path: str, mistakes: list[Mistake]) -> Node | None:
    """A value of the command line: YAML where it opens a list, a section or a quote, else the text as it stands."""
    if value[:1] not in ("[", "{", '"', "'"):
        return Scalar(text=value, quoted=False, mark=TYPED)
    wrong: list[Mistake] = []
    tree = read(f"{{value: {value}}}", wrong)
    mistakes += [Mistake(mark=TYPED, path=path, text=mistake.text) for mistake in wrong]
    return None if wrong else _as_typed(tree.entries["value"])


def _as_typed(node: Node) -> Node:
    """The same tree, every mark the command line's."""
    if isinstance(node, Scalar):
        return replace(node, mark=TYPED)
    if isinstance(node, Items):
        return Items(items=[_as_typed(child) for child in node.items], mark=TYPED)
    entries = {key: _as_typed(child) for key, child in node.entries.items()}
    return Section(entries=entries, marks=dict.fromkeys(entries, TYPED), mark=TYPED)


def _place(tree: Section, path: str, value: Node, mistakes: list[Mistake]) -> None:
    """Put a value at a path; sections on the way are made where nothing, or null, stands."""
    node: Node = tree
    *way, last = path.split(".")
    for position, part in enumerate([*way, last]):
        final = position == len(way)
        so_far = ".".join(way[:position])
        if isinstance(node, Section):
            child = node.entries.get(part)
            if final:
                node.entries[part], node.marks[part] = value, TYPED
                return
            if child is None or (isinstance(child, Scalar) and child.null):
                child = node.entries[part] = Section(entries={}, mark=TYPED)
                node.marks[part] = TYPED
            node = child
        elif isinstance(node, Items):
            index = int(part) if part.isdecimal() and len(part) < 9 else -1
            if not 0 <= index <= len(node.items) - (not final):
                has = f"a list of {len(node.items)} (from 0)"
                mistakes.append(Mistake(mark=TYPED, path=path, text=f"{so_far} is {has}; {part} is no place in it"))
                return
            if final:
                node.items[index : index + 1] = [value]
                return
            node = node.items[index]
        else:
            whole = f"give it whole: {so_far}={{{part}: …}}"
            mistakes.append(
                Mistake(mark=TYPED, path=path, text=f"{so_far} is {node.text!r}, which has no parts; {whole}")
            )
            return


def _whole_characters(text: str) -> str:
    r"""JSON writes characters beyond U+FFFF as two escapes (\ud83d\ude00); yaml leaves them two halves."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        return text
