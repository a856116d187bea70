"""How a Python process is started that runs a module of this package, with the modules that this process finds."""

import os
import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module`; the working directory is searched for modules only if it is in our path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def module_environment() -> dict[str, str]:
    """Its environment: ours, and our module search path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
