"""A run ends: its model is published, its prompts are continued."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor
from torch.distributed.tensor import DTensor

from danlu.checkpoint.folder import whole
from danlu.checkpoint.load import open_checkpoint
from danlu.checkpoint.manifest import step_name
from danlu.checkpoint.model import publish
from danlu.checkpoint.model import rehearse as try_publishing
from danlu.core import world as worlds
from danlu.core.errors import Failure
from danlu.core.log import logger
from danlu.core.paths import RunFolder
from danlu.generate.engine import Ask, complete
from danlu.generate.pick import Pick
from danlu.monitor.watch import Guard, Watch
from danlu.train.assemble import Materials
from danlu.train.run import Run
from danlu.train.state import restore_weights


def finish(run: Run, materials: Materials, folder: RunFolder, watch: Watch | Guard) -> list[str]:
    """The run's `model/` holds its final weights, or its best ones or their average if the recipe asks for those.

    Gives the recipe's prompts, each with what the model goes on with.
    """
    if materials.recipe.checkpoint.publish == "best":
        _go_to_best(run, folder)
    elif materials.recipe.checkpoint.publish == "average" and run.optim.averages is not None:
        run.compute.release()
        run.optim.averages.settle()
    _with_whole(run, materials, lambda t: publish(folder.model, materials.family, t, materials.tokenizer))
    watch.event("published", path=str(folder.model), weights=materials.recipe.checkpoint.publish)
    texts = _go_on(run, materials)
    for text in texts:
        watch.event("sample", text=text)
    return texts


def rehearse(run: Run, materials: Materials, folder: RunFolder) -> None:
    """A model that cannot be stored, or a disk that cannot hold it, is found now and not at the end."""
    _with_whole(run, materials, lambda t: try_publishing(folder.model, materials.family, t, materials.tokenizer))


def _with_whole(run: Run, materials: Materials, write: Callable[[Iterator[tuple[str, Tensor]]], object]) -> None:
    """Every weight was given whole to `write` on the first rank; a failure there is raised on all of them.

    One weight at a time is gathered from all ranks, so every rank goes through all of them, whatever happens.
    """
    tensors, failures = _whole(run), []
    if materials.world.first:
        try:
            write(tensors)
        except Failure as failure:
            failures.append(failure)
    for _ in tensors:
        pass

    def outcome() -> None:
        for failure in failures:
            raise failure

    worlds.once(materials.world, outcome)


def _whole(run: Run) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in run.weights.items():
        tensor = parameter.detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _go_on(run: Run, materials: Materials) -> list[str]:
    """Each prompt with its continuation; every rank does the same, so that it works under any layout."""
    asked, tokenizer = materials.recipe.evaluate, materials.tokenizer
    limit = materials.family.shape().max_positions
    texts = []
    for prompt in asked.prompts:
        ids = [*tokenizer.begin, *tokenizer.encode(prompt)][: limit - 1]
        ask = Ask(
            max_new_tokens=min(asked.prompt_tokens, limit - len(ids)),
            limit=limit,
            vocabulary=tokenizer.vocab_size,
            end={tokenizer.eos_id},
            pick=Pick(temperature=0.8, top_p=0.95),
            seed=materials.recipe.seed,
        )
        compute = run.compute
        with run.memory.policy():
            new = complete(compute.model, compute.heads["language"], [ids], ask, device=compute.device)[0]
        texts.append(prompt + tokenizer.decode([token for token in new if token != tokenizer.eos_id]))
    return texts


def _go_to_best(run: Run, folder: RunFolder) -> None:
    """The weights are those of the checkpoint with the lowest evaluation loss."""
    measured = {step: found.metric for step, found in whole(folder.checkpoints).items() if found.metric is not None}
    if not measured:
        logger.warning("checkpoint.publish: no checkpoint was evaluated, so the final weights are published")
        return
    best = min(measured, key=lambda step: (measured[step], -step))
    restore_weights(run, open_checkpoint(folder.checkpoints / step_name(best)))
    logger.info("the weights of step %d are published, with evaluation loss %.4f", best, measured[best])
