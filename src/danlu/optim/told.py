"""What `danlu check` says of an optimiser: its groups, what decays, their rates, and the bytes kept of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from danlu.optim.common import Common
from danlu.optim.groups import Group


def moments(settings: Common, groups: Sequence[Group], *, dtype: torch.dtype) -> tuple[tuple[torch.dtype, ...], str]:
    """The dtypes of what the optimiser keeps of these weights, each once, and a word on what that is; counts and the
    average of the weights left out. dtype: that weights are stored in."""
    kept = [
        (kind, state)
        for group in groups
        for weight in group.parameters.values()
        for kind, state in settings.states(weight.shape, dtype=dtype, role=group.role).items()
        if state.shape
    ]
    if not kept:
        return (), f"{settings.kind} keeps none with these settings"
    each = sum(state.bytes for _, state in kept) / sum(group.count for group in groups)
    kinds = ", ".join(dict.fromkeys(kind for kind, _ in kept))
    dtypes = tuple(dict.fromkeys(state.dtype for _, state in kept))
    return dtypes, f"{each:.2g} bytes a number with {settings.kind}: {kinds}"


def lines(settings: Common, groups: Sequence[Group], *, total: int, dtype: torch.dtype) -> Iterator[str]:
    """The optimiser and its schedule, then a line a group. dtype: that weights are stored in."""
    schedule, last = settings.schedule, settings.schedule.share(total, total)
    yield (
        f"{settings.kind}, rate {settings.learning_rate:g} at its peak: {schedule.kind} over {total:,} updates, "
        f"{schedule.warmup_steps:,} of them warm-up, to {settings.learning_rate * last:.3g}"
    )
    limits = [f"norm at most {settings.max_grad_norm:g}"] if settings.max_grad_norm else []
    limits += [f"numbers at most {settings.max_grad_value:g}"] if settings.max_grad_value is not None else []
    yield f"gradients: {', then '.join(limits) or 'not clipped'}"
    yield "role       weights          numbers      rate    decay  kept bytes"
    for group in groups:
        kept = sum(
            kept.bytes
            for weight in group.parameters.values()
            for kept in settings.kept(weight.shape, dtype=dtype, role=group.role).values()
        )
        rate, decay = settings.peak(group) * group.rate, f"{group.weight_decay:g}" if group.weight_decay else "none"
        yield f"{group.role:<9} {len(group.parameters):>8} {group.count:>16,} {rate:>9.3g} {decay:>8} {kept:>11,}"
    if settings.average is not None:
        warm = ", less at first" if settings.average.warmup else ""
        yield f"average: an update keeps {settings.average.decay:g} of it{warm}; its bytes are among those kept"
