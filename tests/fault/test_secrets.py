"""Secrets of the environment stand nowhere in a run's folder; a run's name is shown as it is, whatever it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.fault import runs

CANARY = "canary-7f3a9b"
SECRETS = {
    "HF_TOKEN": f"hf_{CANARY}",
    "WANDB_API_KEY": CANARY,
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}/+",
    "MY_PASSWORD": f"{CANARY}!",
    "DATABASE_URL": f"postgres://user:{CANARY}@host/db",
    "HTTPS_PROXY": f"http://user:{CANARY}@proxy:3128",
    "PYTORCH_ALLOC_CONF": f"token:{CANARY}",  # a variable that is recorded
}
NAME = "<img src=x onerror=alert(1)> & $x^$ [bold red]b[/] {0} %s 红楼 🙂"
NAME = NAME.replace("/", "")  # a name is one of a folder


@dataclass(frozen=True)
class Planted:
    """The environment is full of secrets."""

    def __call__(self) -> None:
        """The process is prepared."""
        os.environ |= SECRETS | {"PYTORCH_ALLOC_CONF": ""}
        import sys

        sys.argv = ["danlu", "train", "--api-key", CANARY, f"--token={CANARY}", f"https://me:{CANARY}@host/x"]


def test_no_file_holds_a_secret_and_no_name_is_taken_for_markup(tmp_path: Path) -> None:
    recipe = runs.write_recipe(tmp_path, steps=6)
    recipe.write_text(recipe.read_text().replace("name: fault", f"name: '{NAME}'"))
    given = ("monitor.tensorboard=true", "monitor.curve=true", "evaluate.prompts=[ab]")
    assert runs.finish(recipe, *given, prepare=Planted()) == 0, runs.said(recipe)
    folder = recipe.parent / "runs" / NAME
    assert NAME in runs.said(recipe)  # not swallowed as a colour, not filled in

    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"environment.json", "recipe.yaml", "events.jsonl", "metrics.jsonl", "loss.png"} <= {p.name for p in files}
    for path in [*files, recipe.parent / "said.txt"]:
        assert CANARY.encode() not in path.read_bytes(), path
        if path.suffix in (".html", ".htm", ".svg", ".xml"):
            assert b"<img" not in path.read_bytes(), path
    picture = (folder / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and b"onerror" not in picture
    assert not [event for event in events(folder) if "warning" in event], events(folder)


def events(folder: Path) -> list[str]:
    return (folder / "events.jsonl").read_text().splitlines()
