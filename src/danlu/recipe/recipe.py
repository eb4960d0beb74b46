"""One run: a choice from each room, and what must hold between them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.checkpoint.keep import Checkpoint
from danlu.compute.mesh import Parallel
from danlu.core.config import differences, setting
from danlu.core.errors import InputError
from danlu.core.schema import At, Check, Unknown
from danlu.data.sizes import Ramp, sizes
from danlu.data.source import Corpus
from danlu.eval.perplexity import Evaluate
from danlu.memory import plan
from danlu.memory.plan import Memory
from danlu.models.families import Pretrained
from danlu.models.families.gpt2 import Gpt2
from danlu.models.families.llama import Llama
from danlu.monitor.settings import Monitor
from danlu.objectives.causal import Causal
from danlu.optim.adamw import AdamW
from danlu.optim.kinds import Optimizer

ROWS = 32  # rows of an update, where nothing says otherwise
BYTE_TOKENS = 258  # ids of the byte tokenizer: 256 bytes, end of text, padding
DURATIONS = ("max_steps", "num_train_epochs", "max_tokens")


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """Rows of one update, and of one forward. The learning rate is not scaled with them."""

    global_batch_size: int | Literal["auto"] = setting(
        "auto", "rows of one update, over all ranks and micro-batches; auto: 32, or global_batch_tokens", at_least=1
    )
    global_batch_tokens: int | None = setting(
        None,
        "tokens of one update, in place of rows; within 1 %, in a number of rows that ranks can share",
        at_least=1,
        suffixes=True,
    )
    micro_batch_size: int | Literal["auto"] = setting(
        "auto", "rows of one forward on one rank; auto: as many as fit", at_least=1
    )
    ramp: Ramp | None = setting(None, "the batch grows over the first updates, from a few rows; null: it does not")

    def rows(self, sequence_length: int) -> int:
        """Rows of a full update; InputError where its tokens are no number of rows, or rows and tokens differ."""
        tokens, rows = self.global_batch_tokens, self.global_batch_size
        if tokens is None:
            return ROWS if rows == "auto" else rows
        whole = rows_of(tokens, sequence_length)
        if whole is None:
            low = tokens // sequence_length
            near = [f"{n * sequence_length} ({n} rows)" for n in (low, low + 1) if n]
            raise InputError(
                f"batch.global_batch_tokens is {tokens}, no whole number of rows of {sequence_length}, nor near one "
                f"(data.sequence_length); {' or '.join(near)} would do"
            )
        if rows not in ("auto", whole):
            raise InputError(
                f"batch.global_batch_tokens is {tokens}, which is {whole} rows of {sequence_length}, and "
                f"batch.global_batch_size is {rows}; keep one of the two (global_batch_size: auto, or "
                "global_batch_tokens: null)"
            )
        return whole


def rows_of(tokens: int, sequence_length: int) -> int | None:
    """Rows that hold so many tokens: exactly, or else within 1 %, as often even as that allows; None: there are none.

    1M tokens are 1,952 rows of 512 (61 x 32: up to 32 ranks can share them), not 1,953.125.
    """
    if tokens % sequence_length == 0:
        return tokens // sequence_length
    for power in range(tokens.bit_length(), -1, -1):
        block = sequence_length << power
        if abs(round(tokens / block) * block - tokens) * 100 <= tokens:
            return round(tokens / block) << power
    return None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run. Exactly one of max_steps, num_train_epochs and max_tokens says how long it is."""

    format: Literal[1] = setting(1, "version of this file's form")
    name: str = setting(doc="the run's name; its folder is FOLDER/NAME")
    seed: int = setting(1, "all that is random follows from it", at_least=0)
    folder: str = setting("runs", "where run folders are made")
    max_steps: int | None = setting(None, "updates of the weights", at_least=1, suffixes=True)
    num_train_epochs: float | None = setting(None, "times that every row is read", above=0)
    max_tokens: int | None = setting(None, "tokens to read, rounded up to whole updates", at_least=1, suffixes=True)
    model: Llama | Gpt2 | Pretrained = setting(doc="a family and its sizes, or {from: FOLDER} to start from weights")
    data: Corpus = setting(doc="what is learned from")
    batch: BatchSize = setting(BatchSize(), "rows of one update, and of one forward")
    objective: Causal = setting(Causal(), "what is asked of the model")
    optimizer: Optimizer = setting(AdamW(), "what gradients become")
    memory: Memory = setting(Memory(), "what is kept, where, and how precisely")
    parallel: Parallel = setting(Parallel(), "how ranks are laid out")
    checkpoint: Checkpoint = setting(Checkpoint(), "when the run is saved, and what is kept")
    evaluate: Evaluate = setting(Evaluate(), "when the run is measured on held-out text")
    compile: bool | Literal["auto", "graphs"] = setting(
        "auto", "blocks run as compiled code; auto: where the run is long enough to repay it; graphs: and CUDA graphs"
    )
    deterministic: bool = setting(
        False, "the same run gives the same bits on a GPU too; slower, and what cannot do so is refused"
    )
    adapter: None = setting(None, "small trainable weights beside frozen ones; not built yet")
    monitor: Monitor = setting(Monitor(), "what is shown and written")

    @property
    def run_folder(self) -> Path:
        """Where this run lives."""
        return Path(self.folder) / self.name


Difference = tuple[str, Any, Any]  # path, old value, new value


def resumes(old: Recipe, new: Recipe) -> tuple[list[Difference], list[Difference]]:
    """What a run that goes on may change, and what it may not: two lists of (path, old, new).

    The layout, the micro-batch, and what is shown, saved and measured may change; the text may lie elsewhere (whoever
    opens it sees whether its tokens are the same); and the run may become longer by the same measure. Anything else
    would make it another run.
    """
    allowed: list[Difference] = []
    refused: list[Difference] = []
    for path, before, after in differences(old, new):
        section, place = path.partition(".")[0], ".".join(path.split(".")[:2])
        free = section in ("parallel", "checkpoint", "evaluate", "monitor") or path in (
            "batch.micro_batch_size",
            "folder",
            "compile",
            "data.workers",
            "data.prefetch",
        )
        free = free or path.startswith(("memory.recompute", "memory.offload"))  # the same mathematics in less memory
        longer = path in DURATIONS and before is not None and after is not None and after > before
        moved = place in ("data.train", "data.tokenizer") or (
            place == "data.validation" and not _is_share(before, after)
        )
        (allowed if free or longer or moved else refused).append((path, before, after))
    return allowed, refused


def branches(old: Recipe, new: Recipe) -> tuple[list[Difference], list[tuple[str, str]]]:
    """What a run gone back to a checkpoint may change from there on, and what it may not, with why: (path, old, new)
    and (path, sentence).

    Besides what any run may change on its way: its length, its batch, and how gradients become updates, by the same
    optimiser. What the weights, their moments and the position in the data mean must stay.
    """
    allowed, others = resumes(old, new)
    refused = []
    for path, before, after in others:
        switched = path.startswith("optimizer.average") and None in (old.optimizer.average, new.optimizer.average)
        free = path in (*DURATIONS, "name", "deterministic") or path.startswith("batch.")
        free = free or (path.startswith("optimizer.") and path != "optimizer.kind" and not switched)
        free = free or (path == "memory.precision" and {before, after} <= {"fp32", "bf16", "fp8"})  # weights are fp32
        if free:
            allowed.append((path, before, after))
        else:
            section = "optimizer.average" if switched else path.partition(".")[0]
            refused.append((path, f"is {before} in the checkpoint's run, and cannot become {after}: {FIXED[section]}"))
    return allowed, refused


FIXED = {
    "format": "it is the file's own",
    "seed": "the order of the data follows from it, and with it what was read so far",
    "model": "the weights would not fit",
    "data": "where the run stands in the data would mean nothing",
    "objective": "what the weights were trained for would be another thing",
    "optimizer": "what it keeps of each weight would mean nothing to another kind",
    "optimizer.average": "the average of the weights so far is kept from the first update on, or not at all",
    "memory": "the weights and what the optimiser keeps are stored in that precision",
    "adapter": "the weights would not fit",
}


def _is_share(*values: Any) -> bool:
    return any(isinstance(value, int | float) for value in values)


def _name(at: At) -> Iterator[tuple[str, str]]:
    name = at("name")
    if not re.fullmatch(r"[^\s/\\.-][^/\\\x00-\x1f]*", name) or name != name.strip():
        yield "name", f"must be a plain folder name (no slash, no dot or hyphen in front), not {name!r}"


def _duration(at: At) -> Iterator[tuple[str, str]]:
    given = [path for path in DURATIONS if at(path) is not None]
    if not given:
        yield "max_steps", f"missing; give exactly one of {', '.join(DURATIONS)}"
    for extra in given[1:]:
        yield extra, f"a second answer to how long the run is; keep one, and set the other to null ({given[0]}=null)"


def _warmup(at: At) -> Iterator[tuple[str, str]]:
    warmup, steps, tokens = at("optimizer.schedule.warmup_steps"), at("max_steps"), at("max_tokens")
    if steps is None and tokens is not None:
        length = at("data.sequence_length")
        steps = sizes(_rows(at), at("batch.ramp"), sequence_length=length).updates(math.ceil(tokens / length))
    if steps is not None and warmup > steps:
        yield "optimizer.schedule.warmup_steps", f"{warmup} updates of warm-up do not fit in {steps}; at most {steps}"


def _length(at: At) -> Iterator[tuple[str, str]]:
    length = at("data.sequence_length")
    for path in ("model.max_position_embeddings", "model.n_positions"):
        positions = _maybe(at, path)
        if positions is not None and length > positions:
            yield "data.sequence_length", f"{length} is more than the model reads ({path} is {positions}); at most that"


def _heads(at: At) -> Iterator[tuple[str, str]]:
    for width_path, heads_path in (
        ("model.hidden_size", "model.num_attention_heads"),
        ("model.n_embd", "model.n_head"),
    ):
        width, heads = _maybe(at, width_path), _maybe(at, heads_path)
        if width and heads and width % heads and _maybe(at, "model.head_dim") is None:
            yield heads_path, f"{heads} heads do not divide {width_path} {width}; give one of {_divisors(width)}"
    heads, groups = _maybe(at, "model.num_attention_heads"), _maybe(at, "model.num_key_value_heads")
    if heads and groups and heads % groups:
        yield (
            "model.num_key_value_heads",
            f"{groups} do not divide {heads} attention heads; give one of {_divisors(heads)}",
        )


def _size(at: At) -> Iterator[tuple[str, str]]:
    batch, length = at("batch"), at("data.sequence_length")
    try:
        rows = batch.rows(length)
    except InputError as error:
        yield "batch.global_batch_tokens", str(error).removeprefix("batch.global_batch_tokens is ")
        return
    try:
        sizes(rows, batch.ramp, sequence_length=length)
    except InputError as error:
        yield "batch.ramp.from", str(error).removeprefix("batch.ramp.from is ")


def _rows(at: At) -> int:
    """Rows of a full update; where that cannot be known, another check says why."""
    batch: BatchSize = at("batch")
    try:
        return batch.rows(at("data.sequence_length"))
    except InputError:
        raise Unknown("batch") from None


def _batch(at: At) -> Iterator[tuple[str, str]]:
    whole, ramp = _rows(at), at("batch.ramp")
    micro, replicate, shard = (
        _maybe(at, path) for path in ("batch.micro_batch_size", "parallel.replicate", "parallel.shard")
    )
    ranks = (replicate or 1) * (shard if isinstance(shard, int) else 1)
    if whole % ranks:
        path = "parallel.shard" if isinstance(shard, int) and shard > 1 else "parallel.replicate"
        asked = "global_batch_size" if at("batch.global_batch_tokens") is None else "global_batch_tokens"
        yield path, f"{ranks} ranks cannot share {whole} rows (batch.{asked}) evenly"
    elif ramp is not None and ramp.from_ % ranks:
        yield (
            "batch.ramp.from",
            f"{ranks} ranks cannot share {ramp.from_} rows evenly; {_next(ramp.from_, ranks)} would do",
        )
    elif isinstance(micro, int) and (whole // ranks) % micro:
        rows = f"{whole} rows of an update" if ranks == 1 else f"the {whole // ranks} rows of one rank"
        yield (
            "batch.micro_batch_size",
            f"{micro} does not divide {rows}; give one of {_divisors(whole // ranks)}, or auto",
        )


def _sources(at: At) -> Iterator[tuple[str, str]]:
    if not at("data.train"):
        yield "data.train", "is empty; name at least one file, folder or shard"


def _held_out(at: At) -> Iterator[tuple[str, str]]:
    publish, kept = at("checkpoint.publish"), at("checkpoint.keep_best")
    if publish == "best" and kept == 0:
        yield (
            "checkpoint.publish",
            "the best weights are published only if they are kept; set checkpoint.keep_best to 1",
        )
    if publish == "average" and _maybe(at, "optimizer.average") is None:
        yield "checkpoint.publish", "there is no average to publish; set optimizer.average to {decay: 0.999}, or final"
    if at("data.validation") in (0, []):
        nothing = "needs held-out text; set data.validation to a share like 0.05, or a list of files"
        if publish == "best":
            yield "checkpoint.publish", nothing
        if _maybe(at, "evaluate.early_stopping") is not None:
            yield "evaluate.early_stopping", nothing


def _offload(at: At) -> Iterator[tuple[str, str]]:
    parts = at("memory.offload")
    yield from plan.mistakes(parts, at("memory.offload_folder"))
    if _maybe(at, "compile") == "graphs" and (moved := [part for part in ("weights", "activations") if part in parts]):
        yield (
            "compile",
            f"graphs need {' and '.join(moved)} where they were; set compile to true, or change memory.offload",
        )


def _vocabulary(at: At) -> Iterator[tuple[str, str]]:
    size = at("model.vocab_size")
    if at("data.tokenizer") == "byte" and size != "auto" and size < BYTE_TOKENS:
        yield "model.vocab_size", f"{size} is fewer than the byte tokenizer's {BYTE_TOKENS} ids; give that, or auto"


CHECKS: tuple[Check, ...] = (
    _name,
    _duration,
    _warmup,
    _length,
    _heads,
    _size,
    _batch,
    _sources,
    _held_out,
    _vocabulary,
    _offload,
)


def _maybe(at: At, path: str) -> Any:
    """The setting, or None where this recipe has none or it was written wrongly."""
    try:
        return at(path)
    except Unknown:
        return None


def _next(number: int, by: int) -> int:
    """The next multiple."""
    return -(-number // by) * by


def _divisors(number: int) -> str:
    """The divisors of a number, in words; the largest few where there are many."""
    found = [d for d in range(1, min(number, 100_000) + 1) if number % d == 0]
    return ", ".join(map(str, found if len(found) <= 10 else found[:10])) + ("" if len(found) <= 10 else ", …")
