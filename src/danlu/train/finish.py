"""A run ends: its model is published, its prompts are continued."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor

from danlu.checkpoint.folder import whole
from danlu.checkpoint.load import open_checkpoint
from danlu.checkpoint.manifest import step_name
from danlu.checkpoint.model import publish
from danlu.core.log import logger
from danlu.core.paths import RunFolder
from danlu.monitor.watch import Guard, Watch
from danlu.train.assemble import Materials
from danlu.train.run import Run
from danlu.train.state import restore_weights


def finish(run: Run, materials: Materials, folder: RunFolder, watch: Watch | Guard) -> None:
    """The run's `model/` holds its final weights, or its best ones if the recipe asks for those."""
    if materials.recipe.checkpoint.publish == "best":
        _go_to_best(run, folder)
    tensors = _whole(run)
    if materials.world.first:
        publish(folder.model, materials.family, tensors, materials.tokenizer)
    else:
        for _ in tensors:  # each whole tensor is gathered from all ranks, one at a time
            pass
    watch.event("published", path=str(folder.model), weights=materials.recipe.checkpoint.publish)


def _whole(run: Run) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in run.weights.items():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _go_to_best(run: Run, folder: RunFolder) -> None:
    """The weights are those of the checkpoint with the lowest evaluation loss."""
    measured = {step: found.metric for step, found in whole(folder.checkpoints).items() if found.metric is not None}
    if not measured:
        logger.warning("checkpoint.publish: no checkpoint was evaluated, so the final weights are published")
        return
    best = min(measured, key=lambda step: (measured[step], -step))
    restore_weights(run, open_checkpoint(folder.checkpoints / step_name(best)))
    logger.info("the weights of step %d are published, with evaluation loss %.4f", best, measured[best])
