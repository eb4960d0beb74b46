"""The house keeps its own laws: storeys, captions, sizes, and a light front door."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import ROOT

SOURCE = ROOT / "src" / "danlu"
FILES = sorted(SOURCE.rglob("*.py"))
ROOMS = sorted({path.parent for path in FILES if path.parent != SOURCE})
FILE_LINES, FUNCTION_LINES = 400, 60


def test_rooms_import_only_from_lower_storeys() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert "1 kept, 0 broken" in done.stdout


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(SOURCE)))
def test_each_room_captions_its_files(room: Path) -> None:
    page = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    named = set(re.findall(r"^\s*([\w/]+)", page, flags=re.MULTILINE))
    missing = {path.stem for path in room.glob("*.py")} - {"__init__"} - named
    assert not missing, f"{room.name}/__init__.py has no line for {sorted(missing)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES, f"{path.name} has over {FILE_LINES} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{path.name}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_pickle_no_free_yaml_no_stray_environment(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"^\s*(import|from) pickle|\btorch\.load\(|yaml\.(load|unsafe_load|full_load)\(", text, re.M)
    if path.name != "world.py":
        assert not re.search(r"\bos\.(environ|getenv)\b", text), "only core/world.py reads the environment"


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; sys.argv = ['danlu', '--help']\n"
        "from danlu.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'numpy', 'pyarrow', 'tokenizers', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def test_ruff_and_types() -> None:
    tools = Path(sys.executable).parent
    for command in (
        ["ruff", "check", "src", "tests", "bench"],
        ["ruff", "format", "--check", "src", "tests", "bench"],
        ["mypy"],
    ):
        done = subprocess.run([str(tools / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
