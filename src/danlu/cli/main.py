"""The `danlu` command: its verbs, failures as one plain sentence, and exit codes."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence

from danlu import __version__
from danlu.core.errors import Failure, InputError

VERBS = ("train", "rollback", "generate", "check", "recipes", "tokenizer", "doctor")
LATER = (
    "chat",
    "eval",
    "plan",
    "ladder",
    "data",
    "import",
    "export",
    "merge",
    "quantize",
    "prune",
    "serve",
    "board",
    "runs",
    "adopt",
    "launch",
)
INTERRUPTED = 130  # ended by the keyboard where nothing could be saved, as shells count it
NOT_DETERMINISTIC = " does not have a deterministic implementation"  # how torch says so
CLOSED = 141  # whoever read our output went away

EPILOG = """exit codes: 0 done; 1 the run failed; 2 the input is wrong, nothing was started; 3 the run stopped itself
for its health, after saving what was good; 75 stopped by a signal and saved: the same command goes on"""


def program() -> int:
    """``main``, as a process of its own, which ends with it.

    One rank of several ends at once, once all it wrote is on its way: taken apart piece by piece, gloo's threads now
    and then abort a process whose work is done, and its launcher would call that a failure. So does any process that
    has a thread left which nobody waits for: Python would stop it inside of torch, and C++ answers that with an abort.
    And so does one that failed and has another thread left: that waits for a disk which does not answer.
    """
    code = main()
    world = sys.modules.get("danlu.core.world")
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if any(code or thread.daemon for thread in left) or (world and world.here().size > 1):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def main(words: Sequence[str] | None = None) -> int:
    """The verb has run, and this is its exit code. Failures are one sentence on standard error."""
    words = list(sys.argv[1:] if words is None else words)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without Chinese still shows the rest
    debug = "--debug" in words
    try:
        arguments = parse(words)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at exit
        return CLOSED
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        return _ended(error, debug=debug)


def parse(words: list[str]) -> argparse.Namespace:
    """The verb's arguments, ready to run. `key=value` may stand before, between and after options."""
    verb = next((word for word in words if not word.startswith("-")), "")
    if verb and verb not in VERBS:
        raise InputError(_no_verb(verb))
    parser = argparse.ArgumentParser(
        prog="danlu",
        description="Raw text in, a trained language model out.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"danlu {__version__}")
    parser.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb")
    for name in VERBS:
        importlib.import_module(f"danlu.cli.{name}").add(subparsers)
    for inner in subparsers.choices.values():
        inner.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    arguments, rest = parser.parse_known_args(words)
    if not verb:
        parser.print_help()
        arguments.run = lambda _: 0
        return arguments
    settings = [word for word in rest if "=" in word]
    if rest and not (hasattr(arguments, "overrides") and len(settings) == len(rest)):
        unknown = " ".join(word for word in rest if word not in settings) or " ".join(settings)
        hint = "; a recipe's settings are written key=value" if hasattr(arguments, "overrides") else ""
        subparsers.choices[verb].error(f"unrecognized arguments: {unknown}{hint}")
    if settings:
        arguments.overrides = [*arguments.overrides, *settings]
    return arguments


def _no_verb(verb: str) -> str:
    if verb in LATER:
        return f"danlu {verb} is not built yet; {', '.join(VERBS)} are"
    near = difflib.get_close_matches(verb, VERBS, 1, 0.5)
    hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(VERBS)}"
    return f"danlu has no verb {verb}; {hint}"


def _ended(error: BaseException, *, debug: bool) -> int:
    """What ended the verb has been said in one sentence; its exit code."""
    if isinstance(error, Failure):
        if not error.told:
            _say(str(error), once=error.shared)
        return error.code
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted", once=True)
        return INTERRUPTED
    _say(_sentence(error) + ("" if debug else " (run again with --debug for the traceback)"))
    return Failure.code


def _sentence(error: BaseException) -> str:
    """What an unforeseen fault says, on one line."""
    said = " ".join(str(error).split())
    said = said if len(said) <= 500 else f"{said[:500]} …"
    said = " ".join([*getattr(error, "__notes__", []), said])
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return f"out of memory: {said or 'no more was given'}; a smaller batch.micro_batch_size would need less"
    if NOT_DETERMINISTIC in said:
        what = said.partition(NOT_DETERMINISTIC)[0]
        return f"deterministic: true refuses what torch can only do with other bits each time: {what}; leave it out"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _say(text: str, *, once: bool = False) -> None:
    """A line on standard error; among several ranks it names its own, or only the first speaks."""
    world = sys.modules.get("danlu.core.world")
    here = world.here() if world else None
    if here is None or here.size == 1:
        print(text, file=sys.stderr, flush=True)
    elif here.first or not once:
        print(text if once else f"[rank {here.rank}] {text}", file=sys.stderr, flush=True)
