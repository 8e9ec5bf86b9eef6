"""Who may import whom, and what the planner must not load."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardwright

ROOT = Path(shardwright.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

ROOMS = (
    *("errors", "units", "axes", "description", "naming", "families", "model"),
    *("hf_reader", "hf_families", "hf_config"),
    *("program", "job", "bandwidth_map", "cluster", "layout", "planfile"),
    *("data", "plan", "hf_meta", "derive", "run", "measure", "check", "doctor", "export", "report", "web"),
    *("launcher", "cli_options", "cli_groups", "cli_train_options", "cli_parity_options"),
    *("cli_print", "cli_proof", "cli_map", "cli"),
)
"""A room imports only from itself and from rooms to the left of it."""

OUTSIDE = ("__init__", "__main__")

PLANNER = frozenset(ROOMS[: ROOMS.index("plan") + 1]) | {
    *("cli", "cli_options", "cli_groups", "cli_train_options", "cli_parity_options"),
    *("cli_print", "cli_proof", "cli_map", "report"),
}
"""Rooms that work on every system and without torch."""

POSIX_ONLY = frozenset(
    {"crypt", "fcntl", "grp", "nis", "posix", "pty", "pwd", "resource", "spwd", "syslog", "termios", "tty"}
)


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path, *, top_level: bool = False) -> Iterator[tuple[str, int]]:
    """Module names that a file imports, with their lines; ``from shardwright import x`` is shardwright.x."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "shardwright":
                yield from ((f"shardwright.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield str(node.module), node.lineno


def test_every_file_is_in_a_known_room():
    assert {room_of(path) for path in FILES} <= {*ROOMS, *OUTSIDE}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_room_imports_only_rooms_listed_above_it(path):
    room = room_of(path)
    allowed = ROOMS if room in OUTSIDE else ROOMS[: ROOMS.index(room) + 1]
    for name, line in imports(path):
        first, _, rest = name.partition(".")
        inner = rest.partition(".")[0]
        if first != "shardwright" or inner in ("", "__version__"):
            continue
        assert inner in allowed, f"{path}:{line}: {room} imports {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "report").glob("*.py")), ids=lambda path: path.name)
def test_report_knows_documents_and_units_only(path):
    for name, line in imports(path):
        if name.split(".")[0] not in sys.stdlib_module_names:
            assert name.startswith(("rich", "plotly", "shardwright.units", "shardwright.report")), (
                f"{path}:{line}: {name}"
            )


@pytest.mark.parametrize("path", sorted((ROOT / "plan").glob("*.py")), ids=lambda path: path.name)
def test_plan_needs_numpy_and_nothing_else(path):
    for name, line in imports(path):
        first = name.split(".")[0]
        assert first in {*sys.stdlib_module_names, "numpy", "shardwright"}, f"{path}:{line}: {name}"


@pytest.mark.parametrize(
    "path", [path for path in FILES if room_of(path) in PLANNER], ids=lambda path: path.name
)
def test_the_planner_has_no_posix_only_import(path):
    found = [name for name, _ in imports(path, top_level=True) if name.split(".")[0] in POSIX_ONLY]
    assert not found


def modules_after(code: str, folder: Path) -> set[str]:
    """Top-level packages loaded in a fresh Python once ``code`` has run."""
    tail = "import sys; print('\\n' + ' '.join(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{code}\n{tail}"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


COMMAND = """
import sys
from shardwright.cli import main
sys.argv = {argv!r}
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""


def test_planning_loads_no_torch(tmp_path):
    names = [
        f"shardwright.plan.{path.stem}" for path in (ROOT / "plan").glob("*.py") if path.stem != "__init__"
    ]
    assert len(names) > 10
    loaded = modules_after("\n".join(f"import {name}" for name in ["shardwright.plan", *names]), tmp_path)
    assert {"numpy", "shardwright"} <= loaded
    assert not loaded & {"torch", "transformers", "rich", "typer"}


@pytest.mark.parametrize(
    "argv",
    [
        ["plan", "--help"],
        [
            "plan",
            "llama-3.1-8b",
            "--gpus=8",
            "--device=h100-sxm",
            "--seq=4096",
            "--global-batch=16",
            "--json",
        ],
        ["plan", "bytes-5m", "--gpus=2", "--seq=64", "--global-batch=4", "--modelled", "--why", "tp=2"],
        ["params", "llama-3.1-8b"],
        ["presets"],
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_commands_of_the_planner_load_no_torch(tmp_path, argv):
    assert "torch" not in modules_after(COMMAND.format(argv=["shardwright", *argv]), tmp_path)


def test_writing_and_explaining_a_plan_loads_no_torch(tmp_path):
    plan = ["plan", "bytes-5m", "--gpus=2", "--seq=64", "--global-batch=4", "-o", "plan.toml"]
    code = "".join(COMMAND.format(argv=["shardwright", *argv]) for argv in (plan, ["explain", "plan.toml"]))
    assert "torch" not in modules_after(code, tmp_path)
