"""Reading a file of settings runs nothing, stays small, and says where its form is wrong."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from danlu.core.errors import InputError
from danlu.core.nodes import Mistake, Scalar, Section, read
from tests.unit.core.garden import FILE, grow


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("name: !!python/object/apply:os.mkdir [MARKER]", "!!python/object/apply:os.mkdir"),
        ("name: !!python/name:os.system", "!!python/name:os.system"),
        ("name: !!python/object/new:os.mkdir [MARKER]", "!!python/object/new:os.mkdir"),
        ("name: !include other.yaml", "!include"),
        ("name: !!binary aGVsbG8=", "!!binary"),
    ],
)
def test_tags_are_refused_with_file_and_line_and_run_nothing(text: str, tag: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(InputError) as caught:
        grow("# a comment\n" + text.replace("MARKER", str(marker)))
    message = str(caught.value)
    assert message.startswith(f"{FILE} ")
    assert f"line 2: name: the tag {tag} is refused; only plain values are read" in message
    assert not marker.exists()


def test_tags_on_the_command_line_are_texts() -> None:
    assert grow("name: a", "notes=!!python/name:os.system").notes == "!!python/name:os.system"
    with pytest.raises(InputError, match=r"the tag !!python/name:os\.system is refused"):
        grow("name: a", "seeds=[!!python/name:os.system x]")


def test_an_alias_bomb_is_refused_in_bounded_memory() -> None:
    lines = ["a: &a [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefghi", "bcdefghij")]
    tracemalloc.start()
    with pytest.raises(InputError, match=r"line \d+: over 20000 values once its aliases"):
        grow("\n".join(lines))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6  # followed whole, it would be 10^10 values


def test_a_section_within_itself_ends() -> None:
    with pytest.raises(InputError, match="nested deeper than 40 levels"):
        grow("name: a\nlabels: &l {a: *l}")


def test_deep_nesting_ends() -> None:
    with pytest.raises(InputError, match="nested deeper than 40 levels"):
        grow("name: " + "[" * 500)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", f"{FILE}: the file is empty"),
        ("# only a comment\n", f"{FILE}: the file is empty"),
        ("- a\n- b", f"{FILE}: the file is not a section of KEY: VALUE lines"),
        (
            "name: a\n---\nname: b",
            f"{FILE} line 2: not valid YAML: expected a single document in the stream but found another document",
        ),
        ("name: a\n open: true", f"{FILE} line 2: not valid YAML: mapping values are not allowed here"),
        ("name: a\nnotes: \x07", f"{FILE} line 2: the character U+0007 may not stand in a YAML file"),
        ("name: *a", f"{FILE} line 1: not valid YAML: found undefined alias 'a'"),
        ("name: a\nlabels: {[1]: 2}", f"{FILE} line 2: labels: a key must be a text"),
        ("name: a\nlabels: {<<: 3}", f"{FILE} line 2: labels: << takes a section, or a list of them"),
    ],
)
def test_wrong_form_is_named_with_its_line(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        grow(text)
    assert str(caught.value) == says


def test_quoting_is_kept() -> None:
    mistakes: list[Mistake] = []
    tree = read("a: '1'\nb: 1\nc: !!str 1\nd: >\n  1\ne: !!int '1'", mistakes)
    assert not mistakes and isinstance(tree, Section)
    kept = {key: (node.text, node.quoted) for key, node in tree.entries.items() if isinstance(node, Scalar)}
    assert kept == {"a": ("1", True), "b": ("1", False), "c": ("1", False), "d": ("1\n", True), "e": ("1", False)}
