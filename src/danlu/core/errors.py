"""The failures a user is told of, each with its exit code. Anything else that is raised is a fault of ours."""

from __future__ import annotations


class Failure(Exception):
    """Ends the run with one plain sentence: what, where, and what would do.

    shared: every rank raises it alike, so that one of them may speak for all.
    told: someone else has said why, so that nothing is printed.
    """

    code = 1
    shared = False
    told = False


class InputError(Failure):
    """The user's input is wrong; nothing was started."""

    code = 2


class Unhealthy(Failure):
    """The run stopped itself (diverged, no labels, disk full) after saving what was good."""

    code = 3
    shared = True


class Bereft(Failure):
    """Another rank is gone; its own message, or its launcher's, says why."""


class Interrupted(Failure):
    """Told to stop by a signal; saved; the same command goes on."""

    code = 75
    shared = True
