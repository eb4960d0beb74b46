"""How the ranks are laid out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from danlu.compute.zero import Zero
from danlu.core.config import setting
from danlu.core.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How many ranks each axis has; their product is the number of ranks."""

    replicate: int = setting(1, "ranks that hold whole copies and share the batch", at_least=1)
    shard: int | Literal["auto"] = setting("auto", "ranks that cut weights and states; auto: the rest", at_least=1)
    zero: Zero = setting(
        3,
        "what is cut over the shard ranks: 1: optimizer states; 2: gradients too; 3: weights too; "
        "1 and 2 keep whole weights through an update: less traffic, more memory",
    )
    tensor: Literal[1] = setting(1, "ranks that cut each matrix product")
    pipeline: Literal[1] = setting(1, "ranks that hold successive layers")
    context: Literal[1] = setting(1, "ranks that cut the sequence")
    expert: Literal[1] = setting(1, "ranks that hold different experts")

    def over(self, size: int) -> Parallel:
        """The same layout with `auto` settled for this many ranks; refused where they do not divide."""
        shard = size // self.replicate if self.shard == "auto" else self.shard
        if self.replicate * shard != size or shard < 1:
            would = sorted({d for d in range(1, size + 1) if size % d == 0})
            raise InputError(
                f"parallel: replicate {self.replicate} x shard {self.shard} does not make {size} ranks; "
                f"each must divide {size} ({', '.join(map(str, would))}), and shard: auto takes the rest"
            )
        return replace(self, shard=shard)

    @property
    def ranks(self) -> int:
        """Ranks that hold different rows; `auto` must be settled."""
        assert isinstance(self.shard, int)
        return self.replicate * self.shard

    def mesh(self, device_type: str) -> DeviceMesh:
        """The ranks on their axes; `auto` must be settled. Ranks of one shard group are neighbours."""
        assert isinstance(self.shard, int)
        return init_device_mesh(device_type, (self.replicate, self.shard), mesh_dim_names=("replicate", "shard"))
