"""Families: sizes, parts and Hugging Face names of a kind of model; one file each.

llama  RMSNorm, rotary positions, gated feed-forward, grouped-query attention
gpt2   LayerNorm, learned positions, plain feed-forward, biases
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from danlu.core.config import checked, setting
from danlu.core.errors import InputError
from danlu.core.log import logger
from danlu.models.families import gpt2, llama
from danlu.models.families.gpt2 import Gpt2
from danlu.models.families.llama import Llama

Family = Llama | Gpt2
READERS: Mapping[str, Callable[[Mapping[str, Any]], Family]] = {"llama": llama.from_config, "gpt2": gpt2.from_config}


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """Start from the weights of a Hugging Face folder, or of a run."""

    kind: Literal["pretrained"] = setting("pretrained", "start from weights that exist")
    from_: str = setting(doc="a Hugging Face folder, or a run's folder")


def model_folder(path: str | Path) -> Path:
    """The folder that holds config.json: the path itself, or a run's model/ in it."""
    path = Path(path)
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            return folder
    raise InputError(f"{path} is no model: neither it nor its model/ holds a config.json.")


def read_config(path: str | Path) -> Family:
    """The family and sizes of a Hugging Face or run folder. Code that a folder brings is refused, never run."""
    file = model_folder(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{file} is no JSON: {error}.") from None
    if not isinstance(config, dict):
        raise InputError(f"{file} holds no table of settings.")
    if "auto_map" in config:
        raise InputError(f"{file} brings its own code (auto_map), which danlu does not run: only built families load.")
    if config.get("quantization_config"):
        raise InputError(f"{file} describes quantized weights, which cannot be loaded: use the unquantized folder.")
    kind = str(config.get("model_type"))
    if kind not in READERS:
        raise InputError(f"{file} is of model_type {kind!r}, which is not built: one of {', '.join(READERS)}.")
    dropped = {key: value for key, value in config.items() if key.endswith(("pdrop", "dropout")) and value}
    if dropped:
        logger.info("%s asks for dropout %s; this model is run without dropout.", file, dropped)
    try:
        family = checked(READERS[kind](config), name=str(file))
        family.shape()
    except InputError as error:
        said = str(error)
        raise InputError(said if str(file) in said else f"{file}: {said}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{file} holds a value of the wrong type: {error}.") from None
    return family


def check_vocabulary(family: Family, size: int, *, tokenizer: str) -> None:
    """The model has a row for every id of the tokenizer, or the two are refused; spare rows are said."""
    rows = family.vocab_size
    if isinstance(rows, int) and size > rows:
        raise InputError(
            f"The tokenizer {tokenizer} has {size} ids, but the model has {rows} rows: use the model's own tokenizer."
        )
    if isinstance(rows, int) and size < rows:
        logger.info(
            "The model has %d rows, the tokenizer %s %d ids: the rest is never asked for.", rows, tokenizer, size
        )
