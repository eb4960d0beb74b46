"""environment.json: in what surroundings a run was made, without its secrets."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

import danlu
from danlu.core import device as devices

PACKAGES = ("numpy", "pyarrow", "safetensors", "tokenizers", "sentencepiece", "tiktoken", "tensorboard", "matplotlib")
# Variables that change how a run goes and hold no secret. No other is ever written.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "GLOO_SOCKET_IFNAME",
    "KMP_AFFINITY",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "WORLD_SIZE",
)
HIDDEN = "***"
SECRET_WORDS = {
    "apikey",
    "auth",
    "authorization",
    "credential",
    "credentials",
    "key",
    "passwd",
    "password",
    "pwd",
    "secret",
    "token",
}
SECRET_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
)
USERINFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def environment(
    *,
    device: torch.device,
    world_size: int,
    precision: str,
    attention: str,
    fallbacks: Iterable[str] = (),
    data_id: str | None = None,
    variables: Mapping[str, str] | None = None,
    arguments: Iterable[str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What environment.json holds: ``precision`` and ``attention`` as really used, ``fallbacks`` a sentence each.

    ``variables`` is the process's environment; only those in ``VARIABLES`` are kept. Secrets are redacted throughout.
    """
    abilities, memory = devices.abilities(device), devices.memory(device)
    facts: dict[str, Any] = {
        "format": 1,
        "versions": {
            "danlu": danlu.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            **{name: version for name in PACKAGES if (version := installed(name))},
        },
        "system": platform.platform(),
        "device": {
            "kind": abilities.kind,
            "name": abilities.name,
            "count": abilities.count,
            "memory_bytes": memory.total,
            "driver": _driver(device),
        },
        "processors": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "main_memory_bytes": psutil.virtual_memory().total,
        "world_size": world_size,
        "precision": precision,
        "attention": attention,
        "fallbacks": list(fallbacks),
        "data_id": data_id,
        "commit": {"danlu": commit(Path(danlu.__file__).parent), "folder": commit(Path.cwd())},
        "command": redact_arguments(sys.argv if arguments is None else arguments),
        "variables": {name: value for name in VARIABLES if (value := (variables or {}).get(name)) is not None},
    }
    return redact({**facts, **(extra or {})})


def content(facts: Mapping[str, Any]) -> bytes:
    """The bytes of environment.json."""
    return (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode()


def installed(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> str | None:
    """The git commit of the folder's files, with "-dirty" where they differ from it; None where there is none."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"],
            capture_output=True,
            text=True,
            timeout=3,
            check=True,
        )
        tracked = subprocess.run(
            ["git", "-C", str(folder), "ls-files", "--", "."], capture_output=True, text=True, timeout=3, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() if tracked.stdout.strip() else None


def redact(value: Any, *, name: str = "") -> Any:
    """The same value with secrets hidden: by the name they stand under, by their form, and in addresses."""
    if isinstance(value, Mapping):
        return {key: redact(inner, name=str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(inner, name=name) for inner in value]
    if not isinstance(value, str):
        return value
    if secret(name) and value:
        return HIDDEN
    return USERINFO.sub(HIDDEN, SECRET_FORMS.sub(HIDDEN, value))


def redact_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line with secrets hidden, whether they stand after "=" or as the word after an option."""
    hidden, follows = [], False
    for argument in arguments:
        head, sign, _ = argument.partition("=")
        if follows:
            hidden.append(HIDDEN)
        elif sign and secret(head):
            hidden.append(f"{head}={HIDDEN}")
        else:
            hidden.append(redact(argument))
        follows = not sign and not follows and argument.startswith("-") and secret(argument)
    return hidden


def secret(name: str) -> bool:
    """Whether what stands under this name is kept to oneself; "tokenizer" and "max_tokens" are not such names."""
    parts = re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower()
    return bool(SECRET_WORDS & set(re.split(r"[^a-z0-9]+", parts)))


def _driver(device: torch.device) -> str | None:
    return devices.driver() if device.type == "cuda" else None
