"""What is known and not built yet: words of the plan that a recipe may not use, refused and never ignored."""

from __future__ import annotations

from danlu.core.schema import Planned

PLANNED: dict[str, Planned] = {
    "adapter": Planned(built=("null",), advice="leave adapter out, or null"),
    "data.kind": Planned(values=frozenset({"chats", "preferences", "prompts", "images", "masked"}), built=("corpus",)),
    "data.images": Planned(advice="a corpus is text"),
    "memory.precision": Planned(
        values=frozenset({"int8", "int4", "nf4"}), built=("fp32", "bf16", "fp16", "fp8", "auto")
    ),
    "model.vision": Planned(advice="the families read text"),
    "monitor.wandb": Planned(values=frozenset({"true", "True", "TRUE"}), built=("false",)),
    "objective.kind": Planned(
        values=frozenset({"masked", "preference", "dpo", "kto", "orpo", "reward", "policy", "ppo", "grpo", "distill"}),
        built=("causal",),
    ),
    "optimizer.kind": Planned(
        values=frozenset({"shampoo", "soap", "sophia", "ademamix"}),
        built=("adamw", "lamb", "lion", "adafactor", "muon", "sgd", "adamw8bit"),
    ),
    "parallel": Planned(values=frozenset({"auto"}), advice="give parallel: {shard: auto}"),
    "parallel.context": Planned(built=("1",)),
    "parallel.expert": Planned(built=("1",)),
    "parallel.pipeline": Planned(built=("1",)),
    "parallel.tensor": Planned(built=("1",)),
}
