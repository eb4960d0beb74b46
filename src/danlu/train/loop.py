"""Round the step: where a run begins, what happens between two updates, and how it ends."""

from __future__ import annotations

import gc
import secrets
import textwrap
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch

from danlu.checkpoint.load import Found, newest
from danlu.checkpoint.model import settle
from danlu.checkpoint.save import NotSaved, Outcome, Saver
from danlu.compute.norms import layer_norms
from danlu.core import device as devices
from danlu.core import heap, log
from danlu.core import world as worlds
from danlu.core.contracts import Signal
from danlu.core.errors import Bereft, Failure, InputError, Interrupted, Unhealthy
from danlu.core.log import logger
from danlu.core.paths import RunFolder, shown
from danlu.core.world import World
from danlu.eval.perplexity import Stopping
from danlu.monitor.causes import Likely, remedy
from danlu.monitor.layers import GRADIENT, WEIGHT
from danlu.monitor.profile import Tracer
from danlu.monitor.spikes import Trouble
from danlu.monitor.watch import Guard, Watch
from danlu.recipe import yaml
from danlu.recipe.recipe import Recipe
from danlu.train.assemble import Materials, build, gather
from danlu.train.begin import asked, locked, move_aside, open_folder, open_watch, over, published, same_data
from danlu.train.finish import finish, rehearse
from danlu.train.measure import measure
from danlu.train.peak import Peak
from danlu.train.retreat import go_back, last_good, standing
from danlu.train.run import Run
from danlu.train.signals import Told, listening
from danlu.train.state import restore, snapshot
from danlu.train.step import step
from danlu.train.trial import explained, proven

LOST = "another rank failed, ended or does not answer; its own message says why"
BEREFT_SECONDS = 3.0  # after losing a rank: time for its message and its end to come first


def train(recipe: Recipe, *, restart: bool = False, told: Told | None = None) -> RunFolder:
    """The recipe's run has come to its end; gives its folder.

    Goes on from the newest whole checkpoint where the folder holds one. Raises InputError before anything is started,
    Unhealthy after saving what was good, Interrupted when a signal ended it and everything is saved. ``told``: what
    hears signals, if something does already.
    """
    world = worlds.here()
    log.start(rank=world.rank, size=world.size)
    with listening() if told is None else nullcontext(told) as told:
        told.ranks, told.launched = world.size > 1, worlds.launched()
        told.name = f"[rank {world.rank}] " if told.ranks else ""
        device = devices.choose(local_rank=world.local_rank)
        try:
            worlds.join(world, backend=devices.backend_for(device))
            return _train(yaml.complete(recipe), told, world=world, device=device, restart=restart)
        except (RuntimeError, Bereft) as error:
            if isinstance(error, Bereft) or worlds.lost(error):
                raise _bereft(told, str(error).partition("\n")[0]) from error
            raise
        finally:
            if not told.owner:  # a process that ends now needs no taking apart, see cli.main.program
                worlds.leave()


def _train(recipe: Recipe, told: Told, *, world: World, device: torch.device, restart: bool) -> RunFolder:
    folder = RunFolder(recipe.run_folder)
    if restart:
        worlds.once(world, lambda: move_aside(folder, logger.info))
    with locked(folder, world):
        changes: list[str] = []  # said where there is something yet to be done
        opened = worlds.once(world, lambda: open_folder(recipe, folder, ranks=world.size, announce=changes.append))
        worlds.first_only(world, lambda: settle(folder.model))
        found = worlds.once(world, lambda: newest(folder.checkpoints))
        ended = over(opened, found)
        if ended and found and worlds.once(world, lambda: published(folder, found, opened.recipe)):
            logger.info(
                "%s: this run is finished (%d updates); --restart begins it anew", shown(folder.root), found.step
            )
            return folder
        for change in changes:
            logger.info("%s", change)
        materials = gather(opened.recipe, world=world, device=device, announce=logger.info)
        same_data(materials, folder, found)
        if device.type == "cpu":
            heap.keep()  # from here on, since what tokenising took will not be asked for again
        materials = proven(materials, announce=logger.info)
        torch.manual_seed(worlds.stream(recipe.seed, "torch", world.rank))  # nothing of ours draws from it; others may
        with explained(materials):
            run = build(materials)
            if found is not None:
                restore(run, found)
            if world.first:
                yaml.save(materials.recipe, folder.recipe)
            if found is None:
                rehearse(run, materials, folder)
            Loop(run, materials, folder, told, found, ended=ended).go()
    return folder


def _bereft(told: Told, said: str) -> Failure:
    """What this rank says when another is gone: nothing, where its launcher knows of it and will say why.

    It waits first, so that the message of the rank that failed, and that rank's end, come before its own.
    """
    told.wait_for_step()
    until = time.monotonic() + BEREFT_SECONDS
    while not told and time.monotonic() < until:
        time.sleep(0.05)
    failure = Failure(f"another rank failed, ended or does not answer ({said[:300]}); its own message says why")
    failure.told = bool(told)
    return failure


class Loop:
    """One run on its way, with what watches, saves and measures it."""

    def __init__(
        self, run: Run, materials: Materials, folder: RunFolder, told: Told, found: Found | None, *, ended: bool = False
    ) -> None:
        recipe, world = materials.recipe, materials.world
        self.run, self.materials, self.recipe, self.folder, self.told = run, materials, recipe, folder, told
        attempt = worlds.once(world, lambda: secrets.token_hex(8))
        others = worlds.neighbours(world)
        self.saver = Saver(
            folder.checkpoints,
            recipe.checkpoint,
            rank=world.rank,
            world=world.size,
            attempt=attempt,
            gone=lambda: worlds.gone(others),
        )
        early = recipe.evaluate.early_stopping
        self.stopping = None if early is None else Stopping(patience=early.patience, min_delta=early.min_delta)
        self.peak = Peak(run, materials)
        self.watch: Watch | Guard = open_watch(run, materials, folder, found, room=self.saver.room)
        self.stopped_early = ended and run.step < materials.total  # but its model was not yet published
        self.missed: str | None = None  # why the newest state was not saved
        self.rollbacks: list[dict[str, Any]] = []
        self.at = run.source.state()  # where the data of the last update began
        self._take_up({} if found is None else found.manifest.facts)
        for record in self.rollbacks:  # a run killed just then may not have said so
            self.watch.remember(record)
        run.look = self._look
        profile = recipe.monitor.profile
        self.tracer = (
            None if profile is None else Tracer(profile, folder.profile, world.rank, materials.device, logger.info)
        )

    def go(self) -> None:
        """Update after update, to the end."""
        try:
            gc.freeze()  # what assembling left behind need not be looked through again by every collection
            worlds.hurry()
            self.told.wait_for_step()
            borne = self.watch.health.trouble is not None and not self._retreat()
            if self.owing or borne:  # what was due when it left
                self._after_update(self._agreed(Signal.GO))
            while self.run.step < self.materials.total and not self.stopped_early:
                self._after_update(self._update())
            self._settle(self.saver.finish())
            texts = self._publish()
            self._farewell(self.watch.close(), texts)
            if self._all_know(self.missed):
                raise Unhealthy(
                    f"the model is in {self.folder.model}, but the run's end could not be kept: {self.missed}"
                )
        except BaseException as cause:
            self.saver.abandon()
            if not isinstance(cause, Failure) and self.run.step < self.materials.total:
                cause.add_note(f"in update {self.run.step + 1}:")
            lost = isinstance(cause, Bereft) or worlds.lost(cause)
            self.watch.event("stopped", cause=LOST if lost else str(cause) or type(cause).__name__)
            raise
        finally:
            if self.tracer is not None:
                self.tracer.close()
            self.run.source.close()
            self.watch.close()

    def _publish(self) -> list[str]:
        """The model is in the run's folder; gives the prompts gone on with. Where it cannot be, nothing is lost."""
        worlds.take_time()  # the first rank writes alone
        try:
            return finish(self.run, self.materials, self.folder, self.watch)
        except InputError:
            raise
        except Failure as failure:
            raise Unhealthy(
                f"trained to the end, but {failure}; when that is mended, the same command goes on"
            ) from None

    def _farewell(self, summary: dict[str, Any], texts: list[str]) -> None:
        """What the run came to, for whoever sits before it."""
        if not summary:
            return
        logger.info("\n%s\n", self.watch.curve())
        for text in texts:
            logger.info("%s\n", textwrap.indent(text, "    "))
        held = summary.get("best_eval_loss")
        logger.info(
            "%s: %d updates in %.0f s%s. The model is in %s",
            self.recipe.name,
            self.run.step,
            summary.get("wall_seconds", 0.0),
            "" if held is None else f", evaluation loss {held:.3f} at best",
            shown(self.folder.model),
        )

    def _update(self) -> Signal:
        """One update; gives what the ranks agree is to follow."""
        run = self.run
        self.at, run.limits = run.source.state(), self.watch.health.limits
        with self._traced(run.step + 1), self.peak.watching(run):
            report = step(run, run.source.take(self.materials.micros))
        while run.compute.noted:
            self.watch.event("compile", cause=run.compute.noted.pop(0))
        report = self.peak.told(report, self.watch.event)
        if not report.sound:  # whichever rank met it, its samples are to be known
            report = replace(report, samples=worlds.together(run.compute.world, report.samples))
        signal = self.watch(replace(report, data_seconds=run.source.waited))
        self._settle(self.saver.ready())
        if self.saver.unprepared:  # the first update has made the moments: it is known how much there is to save
            self.saver.reserve(snapshot(run, facts={}, metric=None))
        return self._agreed(signal)

    def _traced(self, update: int) -> AbstractContextManager[None]:
        return nullcontext() if self.tracer is None else self.tracer.update(update, lambda: self.run.source.waited)

    def _agreed(self, signal: Signal) -> Signal:
        """The gravest that any rank says; one that was told to stop says LEAVE."""
        return Signal(self.run.compute.largest(Signal.LEAVE if self.told else signal))

    def _after_update(self, signal: Signal) -> None:
        """What is due after an update: evaluate, save, leave. Who leaves owes the evaluation, and makes it first when
        the run goes on: it decides which checkpoint is best and when to stop early. What it saves only because it
        leaves, or in a trouble that it has not yet met, is not due: a run that is not told to leave has it not."""
        if signal is Signal.ROLLBACK:
            if self._retreat():
                return
            signal = Signal.GO
        settings, now = self.recipe, self.run.step
        last = now >= self.materials.total
        save = last or now % settings.checkpoint.save_steps == 0
        # A checkpoint that may be kept as the best is measured.
        measure = last or now % settings.evaluate.eval_steps == 0 or (save and settings.checkpoint.keep_best > 0)
        measure = measure and self.materials.held is not None
        self.owing = measure and signal >= Signal.STOP
        loss = self._evaluate() if measure and not self.owing else None
        if save or signal is not Signal.GO or self.stopped_early:
            due = (save or self.stopped_early) and self.watch.health.trouble is None
            self._save(loss, wait=signal >= Signal.STOP, due=due)
        if signal >= Signal.STOP:
            self._leave(signal)

    def _retreat(self) -> bool:
        """Back to a checkpoint from before the trouble, the data since then passed over; or, False, the trouble is
        borne. Killed anywhere in here, the run comes to the same state when it goes on: what was decided follows from
        what is saved."""
        run, health, folder = self.run, self.watch.health, self.folder
        trouble = health.trouble
        assert trouble is not None and self.recipe.monitor.spikes is not None
        self._settle(self.saver.finish())
        worlds.take_time()  # the first rank reads alone
        found = worlds.once(run.compute.world, lambda: last_good(folder.checkpoints, trouble, self.rollbacks))
        worlds.hurry()
        many = len(self.rollbacks) >= self.recipe.monitor.spikes.max_rollbacks
        by_data = bool(self.rollbacks) and self.rollbacks[-1]["likely"] == Likely.DATA
        if (found is None and trouble.kind == "spikes") or (many and by_data):
            self.watch.bear(trouble, Likely.DATA if by_data else None)
            return False
        if found is None or many:
            self._no_way_back(trouble, found)
        number = len(self.rollbacks) + 1
        with self.watch.pause("retreat"):
            before = [*self.rollbacks]
            record = go_back(run, found, trouble, micros=self.materials.micros, at=self.at, number=number)
            self.watch.set_aside(f"{number:03d}-step-{record['from']:06d}-to-{found.step:06d}.jsonl", after=found.step)
            self.saver.drop_after(found.step)
            self._take_up(found.manifest.facts)
            self.at, self.rollbacks, self.stopped_early = run.source.state(), [*before, record], False
            self._save(found.manifest.metric, wait=True)
            self.watch.went_back(found.step, record)
        if self.owing:
            self._after_update(self._agreed(Signal.GO))
        return True

    def _no_way_back(self, trouble: Trouble, found: Found | None) -> NoReturn:
        """Raises why the run ends in its trouble; of what it has come to nothing is saved."""
        self.told.stop_listening()
        worlds.meet(self.run.compute.world)
        likely = Likely.DATA if self.watch.unshuffled else Likely.RATE
        if found is None:
            why = "No checkpoint from before it is kept."
        else:
            most = f"{len(self.rollbacks)} times before, and may not again (monitor.spikes.max_rollbacks)"
            why = f"The run went back {most}; the checkpoint of step {found.step} is {standing(found, trouble)}."
        raise Unhealthy(f"Stopped at step {trouble.step}: {trouble.cause} {remedy(likely)} {why}")

    def _take_up(self, facts: Mapping[str, Any]) -> None:
        """What stands beside the weights is as the checkpoint's facts say."""
        if self.stopping is not None and facts.get("stopping"):
            self.stopping.restore(facts["stopping"])
        self.watch.health.restore(facts.get("health"))
        self.owing = bool(facts.get("owing"))  # an evaluation, as it left
        self.at = facts.get("at", self.at)
        self.rollbacks = list(facts.get("rollbacks", ()))

    def _look(self) -> dict[str, float]:
        """Norms layer by layer, where they are due."""
        layers = self.recipe.monitor.layers
        if layers is None or not layers.due(self.run.step + 1):
            return {}
        trained = {name: weight for name, weight in self.run.weights.items() if weight.requires_grad}
        gradients = layer_norms({name: weight.grad for name, weight in trained.items()})
        return {GRADIENT + n: v for n, v in gradients.items()} | {
            WEIGHT + n: v for n, v in layer_norms(trained).items()
        }

    def _leave(self, signal: Signal) -> None:
        """Raises why the run ends here. No rank ends before all have saved: its launcher would end the others."""
        missed = self._all_know(self.missed)
        self.told.stop_listening()
        worlds.meet(self.run.compute.world)
        if signal is Signal.STOP:
            cause = self.watch.cause or "another rank found the run not healthy; its message says why"
            kept = f"The run is saved after update {self.run.step}, with the weights that were good."
            raise Unhealthy(f"{cause} {self.missed or kept}")
        by = f"stopped by {self.told.by or 'a signal'} after update {self.run.step}"
        if missed:
            raise Unhealthy(f"{by}, but that could not be kept: {self.missed or 'another rank says why'}")
        raise Interrupted(f"{by}, and saved; the same command goes on")

    def _all_know(self, missed: str | None) -> bool:
        """Whether any rank could not save; the same on all of them."""
        return bool(self.run.compute.largest(missed is not None))

    def _evaluate(self) -> float:
        """The loss over the whole validation set; early stopping has seen it. That of the average stands beside it."""
        assert self.materials.held is not None
        with self.watch.pause("evaluate"):
            loss, beside = measure(self.run, self.materials.held)
            self.watch.evaluated(self.run.step, loss, **beside)
        if self.stopping is not None and self.stopping.see(self.run.step, loss):
            self.stopped_early = True
            self.watch.event(
                "early_stop",
                cause=f"no gain in {self.stopping.patience} evaluations",
                best_step=self.stopping.best_step,
            )
            logger.info("stopped early: the evaluation loss has not fallen since step %d", self.stopping.best_step)
        return loss

    def _save(self, loss: float | None, *, wait: bool, due: bool = True) -> None:
        """The run is saved, or will be in the background; what became of saves that are done is told."""
        facts = {
            "data_id": self.materials.data_id,
            "held_id": self.materials.held_id,
            "total": self.materials.total,
            "over": self.stopped_early or self.run.step >= self.materials.total,
            "stopping": self.stopping.state() if self.stopping else None,
            "owing": self.owing,
            "health": self.watch.health.state(),
            "at": self.at,
            "rollbacks": self.rollbacks,
            "asked": asked(self.recipe),
        }
        metric = loss if loss is not None and torch.tensor(loss).isfinite() else None
        with self.watch.pause("save"):
            done = self.saver.save(snapshot(self.run, facts=facts, metric=metric, due=due))
            if wait:
                done += self.saver.finish()
        self._settle(done)

    def _settle(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            self.missed = outcome.message if isinstance(outcome, NotSaved) else None
            if isinstance(outcome, NotSaved):
                self.watch.event("not_saved", step=outcome.step, cause=outcome.message)
                logger.warning("%s", outcome.message)
            else:
                self.watch.event(
                    "saved", step=outcome.step, path=str(outcome.path), stall_seconds=outcome.stall_seconds
                )
