"""Check that each room of the house stays under its ceiling of lines and files: `python tools/check_rooms.py`.

Lines are those of `.py` and `.pyi` files, docstrings included. A change that needs more raises the ceiling here, and
its commit message says why. `--targets` prints what a room should come to.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LONGEST = 500  # lines of a file


class Room(NamedTuple):
    """Folders and files that belong together, the lines and files that they may have, and the lines aimed at."""

    parts: tuple[str, ...]
    lines: int
    files: int
    target: int


SERVING = "longctx/serving"
ROOMS = {
    "kernels": Room(("longctx/kernels",), 8340, 60, 6000),  # partitioning for JAX's own sharding came after the plan
    "parallel": Room(("longctx/parallel",), 4900, 25, 2800),
    "models": Room(("longctx/models",), 6320, 33, 4200),
    "nnx": Room(("longctx/nnx",), 1260, 7, 1200),
    "settings and requests": Room((f"{SERVING}/*.py", f"{SERVING}/*.pyi", f"{SERVING}/request"), 2550, 15, 1200),
    "engine": Room((f"{SERVING}/engine",), 3670, 16, 2600),
    "executor and runner": Room((f"{SERVING}/executor", f"{SERVING}/runner"), 4670, 26, 3300),
    "KV cache": Room((f"{SERVING}/kv_cache",), 3440, 19, 2600),
    "predictor": Room((f"{SERVING}/predictor",), 1630, 9, 900),
    "scheduler": Room((f"{SERVING}/scheduler",), 4140, 16, 2700),
    "distributed": Room((f"{SERVING}/distributed",), 1990, 13, 1400),
    "recording": Room(
        (f"{SERVING}/recording", "longctx/simulation/incident", "longctx/cli/replay*.py"), 1590, 12, 1500
    ),
    "server": Room((f"{SERVING}/server",), 10510, 49, 4200),
    "cluster": Room(("longctx/cluster",), 8990, 47, 6500),
    "simulation": Room(("longctx/simulation",), 8890, 50, 6500),
    "command line": Room(("longctx/cli",), 4650, 28, 2400),
    "longctx": Room(("longctx",), 78070, 432, 50000),
    "papers": Room(("papers",), 5880, 44, 4500),
    "tests": Room(("tests",), 66830, 417, 38000),
    "benchmarks": Room(("benchmarks",), 10290, 70, 8000),
}


def files_of(parts: tuple[str, ...]) -> set[Path]:
    """Return the Python files of folders, and files that match a pattern."""
    found: set[Path] = set()
    for part in parts:
        for path in ROOT.glob(part):
            found |= {path} if path.is_file() else {each for each in path.rglob("*.py*") if each.suffix != ".pyc"}
    return found


def main() -> int:
    """Print each room's lines and files; return 1 if a room or a file has more than it may have."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", action="store_true", help="print the lines aimed at, too")
    targets = parser.parse_args().targets
    counted = files_of(("longctx", "papers", "tests", "benchmarks"))
    lines = {path: len(path.read_text().splitlines()) for path in counted}
    apart = files_of(ROOMS["recording"].parts)
    failures = []
    for name, room in ROOMS.items():
        paths = files_of(room.parts) - (set() if name in ("recording", "longctx") else apart)
        total = sum(lines[path] for path in paths)
        aim = f" (aim {room.target:,})" if targets else ""
        print(f"{name:22} {total:7,} of {room.lines:7,} lines, {len(paths):4} of {room.files:4} files{aim}")
        if total > room.lines or len(paths) > room.files:
            failures.append(f"{name}: {total:,} lines in {len(paths)} files, at most {room.lines:,} in {room.files}")
    failures += [f"{path.relative_to(ROOT)}: {n} lines, at most {LONGEST}" for path, n in lines.items() if n > LONGEST]
    for failure in failures:
        print(failure, file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
