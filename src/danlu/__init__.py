"""danlu (丹炉): raw text in, a trained language model out.

The Python API is the words of a recipe:

    import danlu
    recipe = danlu.Recipe(name="mine", max_steps=100, model=danlu.Llama(), data=danlu.Corpus(train=["mine.txt"]))
    folder = danlu.train(recipe)

Names are looked up when they are first asked for, so that `import danlu` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danlu import train as train

__version__ = "0.1.0"

_WORDS = {
    "danlu.recipe.recipe": ("Recipe", "BatchSize"),
    "danlu.models.families": ("Llama", "Gpt2", "Pretrained"),
    "danlu.data.source": ("Corpus", "Weighted"),
    "danlu.objectives.causal": ("Causal",),
    "danlu.optim.kinds": ("AdamW", "AdamW8bit", "Adafactor", "Lamb", "Lion", "Muon", "Sgd"),
    "danlu.optim.schedule": ("Cosine", "Linear", "Constant"),
    "danlu.memory.plan": ("Memory",),
    "danlu.compute.mesh": ("Parallel",),
    "danlu.checkpoint.keep": ("Checkpoint",),
    "danlu.eval.perplexity": ("Evaluate", "EarlyStopping"),
    "danlu.monitor.settings": ("Monitor",),
}


def __getattr__(name: str) -> Any:
    if name == "train":
        return import_module("danlu.train")  # the room itself, which answers a call
    for module, words in _WORDS.items():
        if name in words:
            return getattr(import_module(module), name)
    known = ", ".join(word for words in _WORDS.values() for word in words)
    raise AttributeError(f"danlu has no {name}; it has train, {known}")
