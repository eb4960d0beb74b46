"""What a recipe may say of monitoring."""

from __future__ import annotations

from dataclasses import dataclass

from danlu.core.config import setting
from danlu.core.errors import InputError
from danlu.monitor.layers import Layers
from danlu.monitor.profile import Profile
from danlu.monitor.spikes import Spikes


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """What is shown and written while a model trains."""

    logging_steps: int = setting(
        1, "updates between two points in the console, TensorBoard and trainer_state.json (each their mean)", at_least=1
    )
    console: bool = setting(True, "show progress: a live display in a terminal, a few plain lines elsewhere")
    tensorboard: bool = setting(True, "write TensorBoard event files into tensorboard/")
    curve: bool = setting(True, "draw loss.png at each evaluation and at the end")
    wandb: bool = setting(False, "Weights & Biases; not built yet")
    profile: Profile | None = setting(None, "trace some updates, for Perfetto and as a page of text; null: none")
    max_unsound_steps: int = setting(
        10, "updates in a row skipped for a loss or gradient that is not finite, after which the run stops", at_least=1
    )
    max_unlabelled_steps: int = setting(
        3, "updates in a row without a single label, after which the run stops", at_least=1
    )
    spikes: Spikes | None = setting(
        Spikes(), "skip updates far above the usual, and go back when they do not end; null: neither"
    )
    plateau_steps: int = setting(
        500, "updates without a gain, at a rate not yet run down, after which a warning says so", at_least=32
    )
    layers: Layers | None = setting(
        Layers(), "watch the norms of each layer's gradients and weights; null: they are not looked at"
    )
    noise_steps: int | None = setting(
        None,
        "updates from one measurement of the gradient noise scale (which batch size pays) to the next; null: none",
        at_least=1,
    )
    max_data_wait: float = setting(
        0.1, "share of the time spent waiting for data, above which a warning says what to change", above=0, at_most=1
    )

    def __post_init__(self) -> None:
        if self.wandb:
            raise InputError("monitor.wandb is not built yet; leave it out (monitor.tensorboard is there).")
