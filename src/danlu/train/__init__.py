"""A recipe becomes a run, and the run goes round its step to the end.

assemble   a recipe becomes a run; the only place that knows the order
data       raw files become a run's sources
forecast   how much memory a run needs: what each room says of its part, put together
compiling  whether blocks are compiled, settled once, and blocks compiled
trial      a micro-batch that was forecast to fit is tried; what is said when memory runs out
peak       the forecast of memory against what was really held, once in a run
run        the state of one run
step       one update of the weights: the three layers meet there, and only there
noise      the gradient of an update's first part, looked at by itself for its noise
loop       round the step: save, evaluate, leave, end
measure    the loss over held-out text, of the weights and of their average
begin      the run folder is opened and compared; what watches is told
retreat    the run goes back to before its trouble, and on with other data
branch     a run's checkpoint becomes the start of another run, with named changes
state      what a checkpoint holds of a run, and a run gone back to it
finish     the model is published, the prompts are continued
signals    told to stop from outside

`danlu.train(recipe)` is the Python API's word for what `danlu train` does, and this room has its name: so the room
itself answers the call.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self, recipe: Any, *, restart: bool = False) -> Any:
        """The recipe's run has come to its end; gives its folder. See `danlu.train.loop.train`."""
        return import_module("danlu.train.loop").train(recipe, restart=restart)


sys.modules[__name__].__class__ = _Room
