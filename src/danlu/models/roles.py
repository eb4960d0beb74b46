"""What each weight is for: by this, optimisers and precisions treat weights differently."""

from __future__ import annotations

from torch import nn

from danlu.models.norm import Norm
from danlu.models.stack import plain

ROLES = ("embedding", "head", "matrix", "norm", "bias")


def roles(model: nn.Module) -> dict[str, str]:
    """The role of each weight, by its plain name: embedding, head, matrix (of a block), norm or bias.

    Tables of places are embeddings. A head that shares the embedding's weight is an embedding.
    """
    found: dict[str, str] = {}
    heads = {id(weight) for weight in getattr(model, "heads", nn.ModuleDict()).parameters()}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(prefix=path, recurse=False):
            if isinstance(module, nn.Embedding):
                role = "embedding"
            elif isinstance(module, Norm):
                role = "norm"
            elif name.endswith("bias"):
                role = "bias"
            else:
                role = "head" if id(weight) in heads else "matrix"
            found.setdefault(plain(name), role)
    return found
