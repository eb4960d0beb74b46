"""The pictures of the README, from a run in a real terminal (tmux) and its loss.png.

    .venv/bin/python scripts/make_pictures.py [FOLDER]

Trains the demo in FOLDER (a temporary one unless given), captures the screen half-way and at the end, and writes
docs/pictures/terminal.svg and docs/pictures/loss.png.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 112, 46
SESSION = "danlu-pictures"


def tmux(*words: str) -> str:
    """What tmux says to a command."""
    return subprocess.run(["tmux", *words], capture_output=True, text=True, check=True).stdout


def screen() -> str:
    """The terminal's content, with its colours."""
    return tmux("capture-pane", "-t", SESSION, "-e", "-p")


def main() -> None:
    """Both pictures are drawn."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    command = f"cd {folder} && PS1= {ROOT / '.venv/bin/danlu'} train shakespeare; sleep 600"
    tmux("new-session", "-d", "-s", SESSION, "-x", str(WIDTH), "-y", str(HEIGHT), command)
    run = folder / "runs" / "shakespeare"
    try:
        while not (run / "model" / "model.safetensors").exists():
            time.sleep(1)
        time.sleep(8)
        last = screen()
    finally:
        tmux("kill-session", "-t", SESSION)
    console = Console(record=True, width=WIDTH, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(Text("$ danlu train shakespeare", style="bold"))
    shown = last.rstrip().replace(f"{folder}/", "").replace(f"{ROOT}/", "")
    console.print(Text.from_ansi(shown))
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / "terminal.svg").write_text(console.export_svg(title="danlu train shakespeare"), encoding="utf-8")
    shutil.copy(run / "loss.png", PICTURES / "loss.png")


main()
