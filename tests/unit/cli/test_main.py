"""The command: light at the door, one sentence for each failure, and exit codes that scripts can lean on."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable

import pytest

from danlu import __version__
from danlu.cli import main as door
from danlu.core.errors import InputError, Interrupted, Unhealthy

HEAVY = ("torch", "numpy", "yaml", "pyarrow", "tokenizers", "transformers", "matplotlib", "rich")


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], int]], None]:
    """`danlu doctor` does what the test says."""

    def put(work: Callable[[argparse.Namespace], int]) -> None:
        module = types.ModuleType("danlu.cli.doctor")

        def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
            parser = subparsers.add_parser("doctor")
            parser.add_argument("recipe", nargs="?")
            parser.add_argument("overrides", nargs="*")
            parser.add_argument("--nproc", type=int, default=1)
            parser.set_defaults(run=work)

        module.add = add  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "danlu.cli.doctor", module)

    return put


def raiser(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def work(arguments: argparse.Namespace) -> int:
        raise error

    return work


def test_help_imports_nothing_heavy_and_says_how_long_it_took() -> None:
    code = (
        "import sys\n"
        "from danlu.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        f"print('HEAVY', sorted(set({HEAVY!r}) & set(sys.modules)))\n"
    )
    begun = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    print(f"danlu --help took {time.perf_counter() - begun:.3f} s, the interpreter's start included")
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout
    for name in door.VERBS:
        assert re.search(rf"^    {name}\b", done.stdout, re.M)


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "danlu", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"danlu {__version__}\n")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InputError("no such thing; give another"), 2, "no such thing; give another\n"),
        (Unhealthy("diverged"), 3, "diverged\n"),
        (Interrupted("saved"), 75, "saved\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (RuntimeError("a\n  b"), 1, "RuntimeError: a b (run again with --debug for the traceback)\n"),
        (
            MemoryError(),
            1,
            "out of memory: no more was given; a smaller batch.micro_batch_size would need less "
            "(run again with --debug for the traceback)\n",
        ),
    ],
)
def test_each_failure_is_one_sentence_and_a_code(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    verb(raiser(error))
    assert door.main(["doctor"]) == code
    assert capsys.readouterr().err == says


@pytest.mark.parametrize("words", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_traceback(
    verb: Callable[..., None], capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    verb(raiser(InputError("wrong")))
    assert door.main(words) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_the_verb_s_answer_is_the_exit_code(verb: Callable[..., None]) -> None:
    verb(lambda arguments: 7)
    assert door.main(["doctor"]) == 7


def test_settings_may_stand_anywhere(verb: Callable[..., None]) -> None:
    seen: list[argparse.Namespace] = []
    verb(lambda arguments: seen.append(arguments) or 0)  # type: ignore[func-returns-value]
    assert door.main(["doctor", "r", "a=1", "--nproc", "2", "b=2", "--c.d=3"]) == 0
    assert seen[0].overrides == ["a=1", "b=2", "--c.d=3"]
    assert seen[0].nproc == 2


def test_an_unknown_option_is_refused(verb: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    verb(lambda arguments: 0)
    with pytest.raises(SystemExit) as caught:
        door.main(["doctor", "r", "--fast"])
    assert caught.value.code == 2
    assert "unrecognized arguments: --fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("serve", "danlu serve is not built yet; train, rollback, generate, check, recipes, tokenizer, doctor are\n"),
        ("trian", "danlu has no verb trian; did you mean train?\n"),
        ("xyz", "danlu has no verb xyz; give one of train, rollback, generate, check, recipes, tokenizer, doctor\n"),
    ],
)
def test_other_verbs_are_refused(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main([word]) == 2
    assert capsys.readouterr().err == says


def test_without_a_verb_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert door.main([]) == 0
    assert "exit codes:" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_failure() -> None:
    script = f"{{ sleep 0.3; {sys.executable} -m danlu recipes; echo $? >&2; }} | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == f"{door.CLOSED}\n"
