"""Settings are read, overridden, saved and compared; each mistake is named with its line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.core.config import ABSENT, changed, checked, describe, differences, dump, identity, load, plain, read_text
from danlu.core.errors import InputError
from tests.unit.core.garden import FILE, RULES, Cutting, Fern, Garden, Rose, Seeds, Water, grow


def refusal(text: str, *typed: str) -> list[str]:
    """The lines of the message that a text is refused with, without the heading."""
    with pytest.raises(InputError) as caught:
        grow(text, *typed)
    lines = str(caught.value).splitlines()
    if len(lines) == 1:
        return [lines[0].removeprefix(f"{FILE} ").removeprefix(f"{FILE}: ")]
    assert lines[0] == f"{FILE} has {len(lines) - 1} mistakes:"
    return [line.removeprefix("  ") for line in lines[1:]]


def test_defaults_stand_where_nothing_is_written() -> None:
    assert grow("name: a") == Garden(name="a", plant=Rose(petals="auto"), water=Water(rate=0.25))


def test_a_section_keeps_the_rest_of_the_fields_own_default() -> None:
    assert grow("name: a\nwater: {mode: spray}").water == Water(rate=0.25, mode="spray")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("1e-4", "1e-4"),
        ("010", "010"),
        ("2026-11-30", "2026-11-30"),
        ("1_000", "1_000"),
        ("true", "true"),
        (".inf", ".inf"),
        ("'null'", "null"),
        ('"~"', "~"),
        ("=", "="),
    ],
)
def test_a_text_stays_as_it_was_written(written: str, meant: str) -> None:
    assert grow(f"name: {written}").name == meant
    assert grow("name: x", f"name={written}").name == meant


def test_numbers_as_people_write_them() -> None:
    garden = grow("name: a\nwater: {rate: 1e-4}\nvisitors: 1.5M\nplant: {petals: 1e2}\nlabels: {a: 0x10, b: 1_000}")
    assert garden.water.rate == 0.0001 and isinstance(garden.water.rate, float)
    assert (garden.visitors, garden.plant.petals, garden.labels) == (1_500_000, 100, {"a": 16, "b": 1000})


def test_whole_numbers_for_a_number_become_one() -> None:
    assert repr(grow("name: a\nfence: 1").fence) == "1.0"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("open: no", "open: must be true or false, not no"),
        ("open: 1", "open: must be true or false, not 1"),
        ("labels: {a: 010}", "labels.a: must be a whole number, not 010"),
        ("labels: {a: 12:30}", "labels.a: must be a whole number, not 12:30"),
        ("labels: {a: 3.0}", "labels.a: must be a whole number, not 3.0"),
        ("labels: {a: 5k}", "labels.a: must be a whole number, not 5k"),
        ('labels: {a: "3"}', "labels.a: must be a whole number, not the text '3'"),
        ("labels: {a: 1e400}", "labels.a: must be a whole number, not 1e400"),
        ("labels: auto", "labels: auto is not built yet; name them"),
        ("water: {rate: 0}", "water.rate: must be a number above 0, not 0"),
        ("water: {rate: .nan}", "water.rate: must be a number above 0, not .nan"),
        ("water: {rate: 1e999}", "water.rate: must be a number above 0, not 1e999"),
        ("water: {mode: spry}", "water.mode: must be drip or spray, not spry; did you mean spray?"),
        ("water: {mode: }", "water.mode: must be drip or spray, not empty"),
        ("water: 3", "water: must be a section (with rate, mode, …), not 3"),
        ("water: {mode: spray, rate: 2}", "water: a spray takes at most 1 litre a second"),
        ("water: {heated: yes}", "water.heated: yes is not built yet; water is cold"),
        ("seeds: poppy", "seeds: must be a list (of a text or a section), not poppy; write [poppy]"),
        ("seeds: [[x]]", "seeds.0: must be a text or a section, not a list"),
        ("seeds: [{weight: 2}]", "seeds.0.path: missing; give a text: the packet"),
        ("visitors: 0", "visitors: must be a whole number at least 1 (1M and 100k may be written) or null, not 0"),
        ("visitors: 1.5", "visitors: must be a whole number at least 1 (1M and 100k may be written) or null, not 1.5"),
        ("fence: high", "fence: must be a number at least 0 or a list (of a text), not high"),
        ("plant: {petals: 4}", "plant.petals: must be a whole number at least 5 or auto, not 4"),
        (
            "plant: {colours: 0.5}",
            "plant.colours: must be a list of 2 (a number at least 0 and below 1 each), not 0.5; write [0.5, …]",
        ),
        (
            "plant: {colours: [0.5]}",
            "plant.colours: must be a list of 2 (a number at least 0 and below 1 each), not a list of 1",
        ),
        ("plant: {colours: [0.5, 1.0]}", "plant.colours.1: must be a number at least 0 and below 1, not 1.0"),
        ("plant: {kind: palm, height: 3}", "plant.kind: palm is not built yet; rose and fern are"),
        ("plant: {kind: rosse}", "plant.kind: must be rose or fern, not rosse; did you mean rose?"),
        (
            "plant: {kind: mine.py:Oak}",
            "plant.kind: parts of your own (mine.py:Oak) are not built yet; rose | fern are",
        ),
        ("plant: {kind: rose, fronds: 2}", "plant.fronds: unknown key; it is a key of kind: fern, not of kind: rose"),
        (
            "plant: {kind: rose, from: x}",
            "plant.from: unknown key; it is a key of the form with from, not of kind: rose",
        ),
        ("plant: {from: x, petals: 9}", "plant.petals: unknown key; it is a key of kind: rose, not of this form"),
        ("plant: rose", "plant: must be a section, not rose"),
        ("watr: {rate: 1}", "watr.rate: unknown key; it belongs elsewhere: water.rate"),
        ("nmae: x", "nmae: unknown key; did you mean name?"),
        ("rate: 1", "rate: unknown key; it belongs elsewhere: water.rate"),
        ("Open: true", "Open: unknown key; did you mean open?"),
        ("water: {rat-e: 1}", "water.rat-e: unknown key; did you mean water.rate?"),
        ("irrigation-rate: 1", "irrigation-rate: unknown key; here it is water.rate"),
        ("irigation_rate: 1", "irigation_rate: unknown key; did you mean irrigation_rate? Here it is water.rate"),
        ("beds: {count: 3}", "beds.count: unknown key; here it is labels"),
        (
            "zebra: 1",
            "zebra: unknown key; known here: name, plant, seeds, fence, water, visitors, notes, labels, open",
        ),
        ("visitors: 2\nplant: {kind: fern}", "plant.fronds: more fronds than visitors"),
    ],
)
def test_each_mistake_says_what_would_do(line: str, says: str) -> None:
    [said] = refusal(f"name: a\n{line}")
    where, _, text = said.partition(": ")
    assert text == says
    assert where == f"line {3 if line.startswith('visitors: 2') else 2}"


def test_all_mistakes_stand_in_one_message_in_the_files_order() -> None:
    text = """\
plant:
  kind: fern
  fronds: 0
water: {mode: mist,
        irrigation_rate: 2}
open: maybe
open: true
"""
    assert refusal(text, "visitors=-1", "watre.rate=2", "nonsense") == [
        "line 1: name: missing; give a text: what it is called",
        "line 3: plant.fronds: must be a whole number at least 1, not 0",
        "line 4: water.mode: must be drip or spray, not mist",
        "line 5: water.irrigation_rate: unknown key; here it is water.rate",
        "line 6: open: must be true or false, not maybe",
        "line 7: open: given twice (first on line 6)",
        "command line: 'nonsense' is not KEY=VALUE, like optimizer.learning_rate=1e-3",
        "command line: watre.rate: unknown key; it belongs elsewhere: water.rate",
        "command line: visitors: must be a whole number at least 1 (1M and 100k may be written) or null, not -1",
    ]


def test_checks_between_settings_speak_beside_other_mistakes_but_not_of_broken_values() -> None:
    assert refusal("name: a\nvisitors: 2\nplant: {kind: fern, thorns: 1}\nopen: 3") == [
        "line 3: plant.thorns: unknown key; it is a key of kind: rose, not of kind: fern",
        "line 3: plant.fronds: more fronds than visitors",
        "line 4: open: must be true or false, not 3",
    ]
    assert refusal("name: a\nvisitors: x\nplant: {kind: fern, fronds: 9}") == [
        "line 2: visitors: must be a whole number at least 1 (1M and 100k may be written) or null, not x"
    ]


def test_a_misspelt_kind_does_not_hide_the_mistakes_beside_it() -> None:
    assert refusal("name: a\nplant:\n  kind: frn\n  frond: 2\n  fronds: many\nopen: 3") == [
        "line 3: plant.kind: must be rose or fern, not frn; did you mean fern?",
        "line 4: plant.frond: unknown key; did you mean plant.fronds?",
        "line 5: plant.fronds: must be a whole number at least 1, not many",
        "line 6: open: must be true or false, not 3",
    ]
    assert refusal("name: a\nplant: {kind: palm, fronds: many}") == [
        "line 2: plant.kind: palm is not built yet; rose and fern are"
    ]


def test_overrides() -> None:
    text = "name: a\nseeds: [x, {path: y}]\nplant: {kind: fern}\nwater: {rate: 2}"
    garden = grow(
        text, "--plant.fronds=7", "seeds.1.weight=3", "seeds.2=z", "notes=a: b # c", "fence=[l, r]", "visitors=null"
    )
    assert garden == Garden(
        name="a",
        plant=Fern(fronds=7),
        seeds=["/plots/x", Seeds(path="/plots/y", weight=3.0), "/elsewhere/z"],
        fence=["l", "r"],
        water=Water(rate=2.0),
        notes="a: b # c",
    )
    assert grow(text, "plant={from: q}").plant == Cutting(from_="/elsewhere/q")
    assert grow(text, "water.mode=spray", "water.rate=1").water == Water(rate=1.0, mode="spray")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["open=1"], "command line: open: must be true or false, not 1"),
        (["open=true", "open=false"], "command line: open: given twice"),
        (
            ["water.rate=1", "water={}"],
            "command line: water: would undo water.rate, typed before it; give the whole first",
        ),
        (["seeds.3=x"], "command line: seeds.3: seeds is a list of 2 (from 0); 3 is no place in it"),
        (["seeds.-1=x"], "command line: seeds.-1: seeds is a list of 2 (from 0); -1 is no place in it"),
        (
            ["seeds.0.weight=2"],
            "command line: seeds.0.weight: seeds.0 is 'x', which has no parts; give it whole: seeds.0={weight: …}",
        ),
        (["a..b=1"], "command line: 'a..b=1' is not KEY=VALUE, like optimizer.learning_rate=1e-3"),
        (
            ["labels={a: 1"],
            "command line: labels: not valid YAML: "
            "while parsing a flow mapping expected ',' or '}', but got '<stream end>'",
        ),
    ],
)
def test_mistakes_of_the_command_line(typed: list[str], says: str) -> None:
    with pytest.raises(InputError) as caught:
        grow("name: a\nseeds: [x, {path: y}]", *typed)
    assert str(caught.value) == says


def test_paths_resolve_against_the_file_and_typed_ones_against_the_working_folder() -> None:
    garden = grow("name: a\nseeds: [b/../c, {path: d}, /e, hf://f]\nplant: {from: wild}", "seeds.1.path=g")
    assert garden.seeds == ["/plots/c", Seeds(path="/elsewhere/g"), "/e", "hf://f"]
    assert garden.plant == Cutting(from_="wild")


def test_json_is_read_too() -> None:
    garden = grow('{\n\t"name": "\\ud83c\\udf39 \\/",\n\t"water": {"rate": 1e-3}, "notes": null}')
    assert garden == Garden(name="\N{ROSE} /", water=Water(rate=0.001))
    assert refusal('{"name": "a",\n\t"open": 0}') == ["line 2: open: must be true or false, not 0"]


def test_anchors_and_merges_are_followed() -> None:
    text = "name: &n a\nnotes: *n\nwater: &w {rate: 2}\nplant: {kind: fern}\nlabels: {<<: {a: 1, b: 2}, b: 3}"
    assert grow(text) == Garden(name="a", notes="a", water=Water(rate=2.0), plant=Fern(), labels={"a": 1, "b": 3})


@settings(max_examples=200, deadline=None)
@given(st.text(), st.lists(st.text(alphabet="acdelmnopstuwr.=[{}]:'0-1 "), max_size=2))
def test_whatever_is_written_is_read_or_refused(text: str, typed: list[str]) -> None:
    for whole in (text, f"name: {text}", f"name: a\n{text}"):
        try:
            assert isinstance(grow(whole, *typed), Garden)
        except InputError as error:
            assert str(error).startswith((str(FILE), "command line"))


texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            "no",
            "on",
            "null",
            "~",
            "1e-4",
            "12:30",
            "0x1",
            "010",
            "- a",
            "a: b",
            "#",
            "!!x",
            "&a",
            "*a",
            "1M",
            "auto",
            " x ",
            "\n",
            "a\nb",
            "\x85",
            "\u2028",
        ]
    ),
)
texts = texts.filter(lambda text: all(not "\ud800" <= character <= "\udfff" for character in text))
numbers = st.floats(min_value=1e-300, max_value=1e300)
gardens = st.builds(
    Garden,
    name=texts,
    plant=st.one_of(
        st.builds(
            Rose,
            kind=st.just("rose"),
            petals=st.one_of(st.integers(5, 2**62), st.just("auto")),
            colours=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
            thorns=st.booleans(),
        ),
        st.builds(Fern, kind=st.just("fern"), fronds=st.just(1)),
        st.builds(Cutting, from_=texts),
    ),
    seeds=st.lists(st.one_of(texts, st.builds(Seeds, path=texts, weight=numbers)), max_size=3),
    fence=st.one_of(numbers, st.lists(texts, max_size=3)),
    water=st.builds(Water, rate=numbers, mode=st.just("drip")),
    visitors=st.one_of(st.none(), st.integers(1, 2**62)),
    notes=st.one_of(st.none(), texts),
    labels=st.dictionaries(texts, st.integers(-5, 5), max_size=3),
    open=st.booleans(),
)


@settings(max_examples=150, deadline=None)
@given(gardens)
def test_what_is_saved_is_read_back_equal(garden: Garden) -> None:
    rules = replace(RULES, paths={})
    text = dump(garden)
    again = load(Garden, text, file=FILE, rules=rules)
    assert again == garden and repr(again) == repr(garden)
    assert dump(again) == text
    assert load(Garden, json.dumps(plain(garden)), file=FILE, rules=rules) == garden
    assert checked(garden, rules=rules) == garden


def test_every_field_is_saved_in_the_classes_order() -> None:
    saved = yaml.safe_load(dump(grow("open: false\nname: a\nplant: {from: wild}")))
    assert list(saved) == ["name", "plant", "seeds", "fence", "water", "visitors", "notes", "labels", "open"]
    assert saved["plant"] == {"from": "wild"}
    assert saved["water"] == {"rate": 0.25, "mode": "drip"}


def test_settings_made_in_python_are_held_to_the_same() -> None:
    with pytest.raises(InputError) as caught:
        checked(Garden(name="a", plant=Fern(fronds=0), water=Water(rate=-1)), rules=RULES, name="the garden")
    assert str(caught.value).splitlines() == [
        "the garden has 2 mistakes:",
        "  plant.fronds: must be a whole number at least 1, not 0",
        "  water.rate: must be a number above 0, not -1",
    ]


def test_differences_are_named_by_path() -> None:
    old = Garden(name="a", plant=Rose(petals=5), seeds=["x"], fence=1.0)
    new = Garden(name="b", plant=Fern(), seeds=["x", "y"], fence=1.0, open=False)
    assert differences(old, old) == []
    assert differences(old, new) == [
        ("name", "a", "b"),
        ("plant.kind", "rose", "fern"),
        ("plant.petals", 5, ABSENT),
        ("plant.colours", [0.9, 0.1], ABSENT),
        ("plant.thorns", True, ABSENT),
        ("plant.fronds", ABSENT, 3),
        ("seeds", ["x"], ["x", "y"]),
        ("open", True, False),
    ]


def test_one_setting_is_changed_by_its_path() -> None:
    old = Garden(name="a", plant=Cutting(from_="x"))
    assert changed(old, "water.rate", 3.0) == replace(old, water=Water(rate=3.0))
    assert changed(old, "plant.from", "y").plant == Cutting(from_="y")
    with pytest.raises(KeyError):
        changed(old, "water.rates", 3.0)


def test_identity_moves_with_every_field_and_with_nothing_else() -> None:
    one = Garden(name="a")
    assert identity(one) == identity(grow("name: a"))
    others = [changed(one, "water.rate", 0.26), changed(one, "name", "b"), changed(one, "open", False)]
    assert len({identity(each) for each in [one, *others]}) == 4


def test_every_setting_is_described() -> None:
    rows = {row.path: row for row in describe(Garden)}
    assert list(rows)[:6] == [
        "name",
        "plant",
        "plant(rose).kind",
        "plant(rose).petals",
        "plant(rose).colours",
        "plant(rose).thorns",
    ]
    assert (rows["name"].default, rows["name"].doc) == ("required", "what it is called")
    assert rows["plant(rose).petals"].takes == "a whole number at least 5 or auto"
    assert rows["water.rate"].default == "0.25"  # the field's own default, not the class's
    assert rows["seeds.*.weight"].takes == "a number above 0"
    assert rows["plant.from"].within("plant") and not rows["plant.from"].within("plan")


def test_unreadable_files_name_the_place(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    with pytest.raises(InputError, match=r"x\.yaml: no such file or directory$"):
        read_text(file)
    file.write_bytes(b"name: a\nnotes: \xff\n")
    with pytest.raises(InputError, match=r"x\.yaml line 2: byte 15 is not UTF-8"):
        read_text(file)
    file.write_bytes(b"\xef\xbb\xbfname: a\n")
    assert grow(read_text(file)).name == "a"
