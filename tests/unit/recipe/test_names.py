"""Other tools' names lead to settings that exist."""

from __future__ import annotations

import re

from danlu.core.fields import walk
from danlu.recipe.names import LATER, NAMES
from danlu.recipe.planned import PLANNED
from danlu.recipe.recipe import Recipe

PATHS = {place.path for place in walk(Recipe)}


def test_each_name_leads_to_a_setting_that_exists() -> None:
    assert len(NAMES) > 150
    for key, there in NAMES.items():
        assert key == key.lower().replace("-", "_")
        if there.startswith(("not needed (", "the option --", "the verb ")):
            continue
        path = re.split(r"[ :]", there)[0]
        if LATER not in there or not path.startswith("adapter"):
            assert path in PATHS, f"{key}: {there}"


def test_no_name_of_ours_is_given_away() -> None:
    """A key that stands at the top of a recipe is never taken for another tool's."""
    assert not {place.path for place in walk(Recipe) if "." not in place.path} & NAMES.keys()


def test_what_is_planned_is_not_built() -> None:
    for path, planned in PLANNED.items():
        if path in PATHS and planned.values:
            for place in walk(Recipe):
                if place.path == path:
                    assert not planned.values & set(getattr(place.setting.hint, "__args__", ())), path
