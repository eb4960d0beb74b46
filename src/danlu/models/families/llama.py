"""Llama (arXiv:2302.13971, arXiv:2407.21783): RMSNorm, rotary positions, gated feed-forward, grouped queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from danlu.core.config import setting
from danlu.core.errors import InputError
from danlu.models.shape import Activation, Shape, Stored
from danlu.models.stack import Trunk

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


@dataclass(frozen=True, kw_only=True)
class Llama:
    """Sizes of a Llama, under the names of its config.json."""

    kind: Literal["llama"] = setting("llama", "the family")
    vocab_size: int | Literal["auto"] = setting("auto", "rows of the embedding; auto: the tokenizer's", at_least=1)
    hidden_size: int = setting(384, "width of the hidden states", at_least=1)
    num_hidden_layers: int = setting(6, "blocks", at_least=1)
    num_attention_heads: int = setting(6, "query heads", at_least=1)
    num_key_value_heads: int | None = setting(None, "key and value heads; none: as many as query heads", at_least=1)
    intermediate_size: int = setting(1024, "width inside the feed-forward part", at_least=1)
    max_position_embeddings: int = setting(512, "longest sequence", at_least=1)
    rms_norm_eps: float = setting(1e-5, "added under the norm's root", above=0)
    rope_theta: float = setting(10000.0, "base of the rotary wavelengths", above=0)
    tie_word_embeddings: bool = setting(True, "the language head is the embedding")
    head_dim: int | None = setting(None, "width of a head; none: hidden_size / num_attention_heads", at_least=2)
    attention_bias: bool = setting(False, "biases in q, k, v and o")
    mlp_bias: bool = setting(False, "biases in the feed-forward part")
    hidden_act: str = setting("silu", "silu, gelu, gelu_pytorch_tanh or relu")
    initializer_range: float = setting(0.02, "standard deviation of the first weights", above=0)

    def shape(self) -> Shape:
        """What the trunk is built from; sizes that do not fit together are refused."""
        if self.vocab_size == "auto":
            raise InputError("model.vocab_size is auto: a tokenizer must settle it before the model is built.")
        heads, size = self.num_attention_heads, self.hidden_size
        groups = self.num_key_value_heads or heads
        if heads % groups:
            raise InputError(f"model.num_attention_heads {heads} is no multiple of num_key_value_heads {groups}.")
        if self.head_dim is None and size % heads:
            raise InputError(f"model.hidden_size {size} does not divide by num_attention_heads {heads}: set head_dim.")
        head_dim = self.head_dim or size // heads
        if head_dim % 2:
            raise InputError(f"model.head_dim {head_dim} is odd: rotary positions turn pairs.")
        if self.hidden_act not in ACTIVATIONS:
            raise InputError(f"model.hidden_act {self.hidden_act!r} is not built: one of {', '.join(ACTIVATIONS)}.")
        return Shape(
            vocab_size=self.vocab_size,
            hidden_size=size,
            layers=self.num_hidden_layers,
            heads=heads,
            key_value_heads=groups,
            head_dim=head_dim,
            inner_size=self.intermediate_size,
            max_positions=self.max_position_embeddings,
            norm="rms",
            eps=self.rms_norm_eps,
            gated=True,
            activation=ACTIVATIONS[self.hidden_act],
            attention_bias=self.attention_bias,
            mlp_bias=self.mlp_bias,
            positions="rope",
            theta=self.rope_theta,
            tied=self.tie_word_embeddings,
            initializer_range=self.initializer_range,
        )

    def build(self) -> Trunk:
        """The model, its weights not yet filled."""
        return Trunk(self.shape())

    def stored(self) -> list[Stored]:
        """Every tensor of a Hugging Face file, and the parameters it is made of."""
        parts = {
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "mlp_norm",
            **{f"self_attn.{p}_proj": f"attention.{p}" for p in "qkvo"},
            **{f"mlp.{p}_proj": f"mlp.{p}" for p in ("gate", "up", "down")},
        }
        biased = {p for p in parts if (self.attention_bias and "attn." in p) or (self.mlp_bias and "mlp." in p)}
        table = [Stored("model.embed_tokens.weight", ("embed.weight",))]
        for n in range(self.num_hidden_layers):
            for theirs, ours in parts.items():
                for leaf in ("weight", "bias") if theirs in biased else ("weight",):
                    table.append(Stored(f"model.layers.{n}.{theirs}.{leaf}", (f"blocks.{n}.{ours}.{leaf}",)))
        table.append(Stored("model.norm.weight", ("norm.weight",)))
        if not self.tie_word_embeddings:
            table.append(Stored("lm_head.weight", ("heads.language.weight",)))
        return table

    def to_config(self) -> dict[str, Any]:
        """config.json's facts of the model, in a form that transformers 4 and 5 both read."""
        names = [n for n in self.__dataclass_fields__ if n not in ("kind", "num_key_value_heads", "head_dim")]
        shape = self.shape()
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{name: getattr(self, name) for name in names},
            "num_key_value_heads": shape.key_value_heads,
            "head_dim": shape.head_dim,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_dropout": 0.0,
            "pretraining_tp": 1,
        }


def from_config(config: Mapping[str, Any]) -> Llama:
    """The family of a config.json; what is not built is refused. Absent keys take Hugging Face's defaults, not ours."""
    rope = config.get("rope_parameters") or {}  # transformers 5; version 4 writes rope_scaling and rope_theta
    for facts in (rope, config.get("rope_scaling") or {}):
        kind = facts.get("rope_type", facts.get("type", "default"))
        if kind != "default":
            raise InputError(f"it asks for {kind!r} rope scaling, which is not built: only plain rotary positions.")
    theirs = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
    }
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return Llama(rope_theta=theta, **{name: config.get(name, default) for name, default in theirs.items()})
