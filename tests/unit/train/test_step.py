"""One update: what it learns, what it counts, and what it says of itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from danlu.compute.norms import layer_norms
from danlu.core.batch import IGNORE
from danlu.core.report import Limits
from danlu.core.world import World
from danlu.recipe.yaml import load
from danlu.train.assemble import build, gather
from danlu.train.run import Run
from danlu.train.step import step
from tests.fault.runs import write_recipe


def assembled(folder: Path, text: str, *overrides: str, split: str = "document") -> tuple[Run, int]:
    recipe = write_recipe(folder)
    (folder / "lines.txt").write_text(text)
    materials = gather(
        load(str(recipe), ["data.validation=0", f"data.split={split}", *overrides]),
        world=World(),
        device=torch.device("cpu"),
        announce=lambda said: None,
    )
    return build(materials), materials.micros


def test_a_cyclic_text_is_learned_and_gone_on_with(tmp_path: Path) -> None:
    """Labels shifted twice would learn the token after the next one, with a loss that falls just as well."""
    run, micros = assembled(tmp_path, "abcdefgh" * 400, "optimizer.learning_rate=2e-2")
    reports = [step(run, run.source.take(micros)) for _ in range(30)]
    run.source.close()
    assert reports[0].loss > 5 and reports[-1].loss < 0.3
    ids = list(b"abc")
    with torch.no_grad():
        for _ in range(10):
            tokens = torch.tensor([ids])
            places = torch.arange(len(ids))[None]
            hidden = run.compute.model(tokens, places, torch.zeros_like(tokens), packed=False)
            ids.append(int(run.compute.heads["language"].logits(hidden)[0, -1].argmax()))
    assert bytes(ids) == b"abcdefghabcde"[: len(ids)]


def test_the_loss_is_that_of_an_independent_computation(tmp_path: Path) -> None:
    """Cross entropy of whole logits against the tokens themselves, one place on, within each document."""
    text = "\n\n".join("abcdefghij"[: 2 + n % 9] * 3 for n in range(60))
    run, micros = assembled(tmp_path, text, "batch.micro_batch_size=2", split="paragraph")
    batches = run.source.take(micros)
    losses, labelled = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            hidden = run.compute.forward(batch).hidden
            logits = run.compute.heads["language"].logits(hidden)
            for row in range(len(batch.tokens)):
                tokens, document, labels = batch.tokens[row], batch.documents[row], batch.labels[row]
                inside = document[1:] == document[:-1]
                asked = labels[:-1] != IGNORE
                assert torch.equal(labels[:-1][asked & inside], tokens[1:][asked & inside])
                assert not (asked & ~inside).any()  # the first token of a document is nobody's target
                losses += F.cross_entropy(logits[row], labels, ignore_index=IGNORE, reduction="sum").item()
                labelled += int((labels != IGNORE).sum())
    report = step(run, batches)
    run.source.close()
    assert report.weights["language"].item() == labelled
    assert report.loss == pytest.approx(losses / labelled, rel=1e-5)
    assert (
        report.sound and report.step == run.step == 1 and report.samples == tuple(s for b in batches for s in b.samples)
    )
    assert report.learning_rate == pytest.approx(0.01 / 3)


def test_a_step_without_a_label_moves_nothing_and_is_no_number_that_is_not_one(tmp_path: Path) -> None:
    run, micros = assembled(tmp_path, "abcdefgh" * 200)
    batches = run.source.take(micros)
    for batch in batches:
        batch.labels.fill_(IGNORE)
    before = {name: weight.detach().clone() for name, weight in run.weights.items()}
    report = step(run, batches)
    run.source.close()
    assert report.loss == 0.0 and report.norm.item() == 0.0 and report.weights["language"].item() == 0
    moved = [name for name, weight in run.weights.items() if not torch.equal(weight, before[name])]
    assert all(run.weights[name].dim() >= 2 for name in moved)  # weight decay alone


@pytest.mark.parametrize("limits", [Limits(loss=1.0), Limits(norm=1e-3)])
def test_an_update_above_the_limits_is_not_made(tmp_path: Path, limits: Limits) -> None:
    run, micros = assembled(tmp_path, "abcdefgh" * 400)
    before = {name: weight.detach().clone() for name, weight in run.weights.items()}
    run.limits = limits
    report = step(run, run.source.take(micros))
    assert not report.sound and report.loss > 5 and report.norm > 0.1
    assert (run.step, run.skipped) == (1, 1) and run.optim.state() == {}
    assert all(torch.equal(weight, before[name]) and weight.grad is None for name, weight in run.weights.items())
    run.limits = Limits()
    assert step(run, run.source.take(micros)).sound
    assert not torch.equal(run.weights["embed.weight"], before["embed.weight"])
    run.source.close()


def test_an_update_that_is_not_made_says_nothing_of_the_noise(tmp_path: Path) -> None:
    run, micros = assembled(tmp_path, "abcdefgh" * 400, "monitor.noise_steps=1")
    assert run.noise is not None
    run.limits = Limits(norm=1e-3)
    report = step(run, run.source.take(micros))
    assert not report.sound and "noise_spread" not in report.extra and run.noise.weight == 0
    run.limits = Limits()
    report = step(run, run.source.take(micros))
    assert report.sound and "noise_spread" in report.extra and run.noise.weight > 0
    run.source.close()


def test_what_is_looked_at_is_looked_at_while_gradients_are_there(tmp_path: Path) -> None:
    run, micros = assembled(tmp_path, "abcdefgh" * 400, "optimizer.max_grad_norm=0.01")
    run.look = lambda: layer_norms({name: weight.grad for name, weight in run.weights.items()})
    report = step(run, run.source.take(micros))
    run.source.close()
    assert set(report.extra) >= {"embed", "blocks.0", "blocks.1", "norm"}
    norms = [report.extra[name] for name in ("embed", "blocks.0", "blocks.1", "norm")]
    assert math.sqrt(sum(norm**2 for norm in norms)) == pytest.approx(report.norm.item(), rel=1e-5)  # before clipping
