from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danlu.checkpoint.manifest import Damaged, misplaced, seal, step_name, step_of, unseal
from danlu.checkpoint.shard import digest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(st.text().filter(lambda key: key != "hash"), JSON, min_size=1, max_size=4), st.none() | st.just(1)
)
def test_what_is_sealed_comes_back_exactly(body: dict[str, object], indent: int | None) -> None:
    try:
        content = seal(body, indent)
    except UnicodeEncodeError:  # a half of a surrogate pair is no text
        return
    value = unseal(content, "x")
    hashed = value.pop("hash")
    assert value == body
    # The hash is over all that stands before it, so it can be checked by hand.
    assert hashed == digest(content[: content.rindex(b',\n"hash"')])
    assert json.loads(content) == {**body, "hash": hashed}


def test_the_hash_is_xxh3_of_128_bits() -> None:
    # The published value for no bytes: XXH3_128bits("") with seed 0.
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("content", [b"", b"{}", b"x" * 100, seal({"a": 1})[:-1], seal({"a": 1}) + b" ", b"\x80\x04N."])
def test_what_is_not_sealed_is_refused(content: bytes) -> None:
    with pytest.raises(Damaged, match="x: its content does not match its hash"):
        unseal(content, "x")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-000000", 0),
        ("step-000100", 100),
        ("step-999999", 999_999),
        ("step-1000000", 1_000_000),
        ("step-0001000", None),
        ("step-100", None),
        ("step-00010a", None),
        ("step-best", None),
        ("step-000100.bak", None),
        ("xstep-000100", None),
        ("step-٠٠٠٠٠١", None),
    ],
)
def test_names_of_steps(name: str, step: int | None) -> None:
    assert step_of(name) == step
    assert step is None or step_name(step) == name


def test_slices_must_lie_within_the_whole() -> None:
    assert misplaced((4, 3), (2, 0), (2, 3)) is None
    assert misplaced((), (), ()) is None
    assert misplaced((4, 3), (3, 0), (2, 3)) == "a slice of [2, 3] at [3, 0] does not fit into [4, 3]"
    assert misplaced((4, 3), (-1, 0), (2, 3)) == "a slice of [2, 3] at [-1, 0] does not fit into [4, 3]"
    assert "not as many dimensions" in str(misplaced((4, 3), (0,), (4, 3)))
