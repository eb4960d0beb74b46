"""The README is run: each command of both READMEs, as written, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import ROOT

READMES = ("README.md", "README.zh-CN.md")
SHORT = [
    "model.hidden_size=48",
    "model.num_hidden_layers=1",
    "optimizer.schedule.warmup_steps=1",
    "data.sequence_length=64",
]


def commands(readme: str) -> list[str]:
    """Lines of the ```bash blocks, without comments; a line that ends in a backslash goes on."""
    text = (ROOT / readme).read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*$", "", line).strip() for line in lines if line.strip() and not line.startswith("#")]


def test_both_languages_show_the_same_commands() -> None:
    english, chinese = (commands(readme) for readme in READMES)
    assert english == chinese and len(english) >= 6


def test_commands_run_as_written(tmp_path: Path) -> None:
    """All but set-up and demo, which have a test of their own; training is kept short here, not in the README."""
    (tmp_path / "mine").mkdir()
    for name in ("shakespeare.txt", "classics.jsonl"):
        text = (ROOT / "src" / "danlu" / "recipe" / "shipped" / "text" / name).read_text()[:200_000]
        (tmp_path / "mine" / name).with_suffix(".txt").write_text(text)
    for command in commands("README.md"):
        if command.startswith(("git ", "cd ", "make ", "pip ")):
            continue
        words = command
        if command.startswith("danlu train"):
            steps = re.sub(r" max_steps=\d{3,}", "", command)
            few = [] if "max_steps" in steps else ["max_steps=4"]
            words = " ".join([steps, *few, *(SHORT if "mine.yaml" in command else [])])
        done = _shell(words, tmp_path)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_make_targets_named_in_the_readme_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {word for command in commands("README.md") if command.startswith("make ") for word in command.split()[1:]}
    assert named and named <= targets


@pytest.mark.long
def test_the_two_commands_on_a_bare_clone(tmp_path: Path) -> None:
    """git clone, make demo: a model trains, writes in two languages, and leaves a folder that transformers opens."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tmp_path / "danlu")], check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL", "PYTHON"))}
    done = subprocess.run(
        ["make", "demo"], cwd=tmp_path / "danlu", env=clean, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "danlu" / "runs" / "shakespeare"
    assert "ROMEO" in done.stderr and "宝玉笑道" in done.stderr and "Next:" in done.stdout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(run / "model")
    assert AutoTokenizer.from_pretrained(run / "model").vocab_size >= 4000


def _shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    tools = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    shell = shutil.which("bash") or "sh"
    return subprocess.run(
        [shell, "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
