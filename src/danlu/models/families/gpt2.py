"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, plain feed-forward, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from danlu.core.config import setting
from danlu.core.errors import InputError
from danlu.models.shape import Activation, Shape, Stored
from danlu.models.stack import Trunk

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "relu": "relu",
}


@dataclass(frozen=True, kw_only=True)
class Gpt2:
    """Sizes of a GPT-2, under the names of its config.json."""

    kind: Literal["gpt2"] = setting("gpt2", "the family")
    vocab_size: int | Literal["auto"] = setting("auto", "rows of the embedding; auto: the tokenizer's", at_least=1)
    n_embd: int = setting(768, "width of the hidden states", at_least=1)
    n_layer: int = setting(12, "blocks", at_least=1)
    n_head: int = setting(12, "heads", at_least=1)
    n_inner: int | None = setting(None, "width inside the feed-forward part; none: 4 n_embd", at_least=1)
    n_positions: int = setting(1024, "longest sequence: one learned row each", at_least=1)
    layer_norm_epsilon: float = setting(1e-5, "added under the norm's root", above=0)
    activation_function: str = setting("gelu_new", "gelu_new, gelu_pytorch_tanh, gelu, silu or relu")
    tie_word_embeddings: bool = setting(True, "the language head is the embedding")
    initializer_range: float = setting(0.02, "standard deviation of the first weights", above=0)

    def shape(self) -> Shape:
        """What the trunk is built from; sizes that do not fit together are refused."""
        if self.vocab_size == "auto":
            raise InputError("model.vocab_size is auto: a tokenizer must settle it before the model is built.")
        if self.n_embd % self.n_head:
            raise InputError(f"model.n_embd {self.n_embd} does not divide by n_head {self.n_head}.")
        if self.activation_function not in ACTIVATIONS:
            known = ", ".join(ACTIVATIONS)
            raise InputError(f"model.activation_function {self.activation_function!r} is not built: one of {known}.")
        return Shape(
            vocab_size=self.vocab_size,
            hidden_size=self.n_embd,
            layers=self.n_layer,
            heads=self.n_head,
            key_value_heads=self.n_head,
            head_dim=self.n_embd // self.n_head,
            inner_size=self.n_inner or 4 * self.n_embd,
            max_positions=self.n_positions,
            norm="layer",
            eps=self.layer_norm_epsilon,
            gated=False,
            activation=ACTIVATIONS[self.activation_function],
            attention_bias=True,
            mlp_bias=True,
            positions="learned",
            theta=10000.0,
            tied=self.tie_word_embeddings,
            initializer_range=self.initializer_range,
        )

    def build(self) -> Trunk:
        """The model, its weights not yet filled."""
        return Trunk(self.shape())

    def stored(self) -> list[Stored]:
        """Every tensor of a Hugging Face file and its parameters: q, k and v are one, products are transposed."""
        table = [
            Stored("transformer.wte.weight", ("embed.weight",)),
            Stored("transformer.wpe.weight", ("places.weight",)),
        ]
        products = {
            "attn.c_attn": ("attention.q", "attention.k", "attention.v"),
            "attn.c_proj": ("attention.o",),
            "mlp.c_fc": ("mlp.up",),
            "mlp.c_proj": ("mlp.down",),
        }
        for n in range(self.n_layer):
            for leaf in ("weight", "bias"):
                for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
                    table.append(Stored(f"transformer.h.{n}.{theirs}.{leaf}", (f"blocks.{n}.{ours}.{leaf}",)))
                for name, parts in products.items():
                    made = tuple(f"blocks.{n}.{part}.{leaf}" for part in parts)
                    table.append(Stored(f"transformer.h.{n}.{name}.{leaf}", made, transposed=leaf == "weight"))
        table += [Stored(f"transformer.ln_f.{leaf}", (f"norm.{leaf}",)) for leaf in ("weight", "bias")]
        if not self.tie_word_embeddings:
            table.append(Stored("lm_head.weight", ("heads.language.weight",)))
        return table

    def to_config(self) -> dict[str, Any]:
        """config.json's facts of the model."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name != "kind"},
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        }


def from_config(config: Mapping[str, Any]) -> Gpt2:
    """The family of a config.json; what is not built is refused. Absent keys take Hugging Face's defaults."""
    usual = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
    for key, value in usual.items():
        if config.get(key, value) != value:
            raise InputError(f"it sets {key} to {config[key]}, which is not built: only {value}.")
    names = [name for name in Gpt2.__dataclass_fields__ if name not in ("kind", "vocab_size")]
    given = {name: config[name] for name in names if name in config}
    return Gpt2(vocab_size=config.get("vocab_size", 50257), **given)
