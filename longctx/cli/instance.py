"""`python -m longctx.cli.instance ARGUMENTS`: the command line as a launcher runs it, which ends with its launcher."""

from longctx.cli import program
from longctx.cluster.launcher.supervised import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    program()
