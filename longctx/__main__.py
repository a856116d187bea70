"""`python -m longctx COMMAND`: the command line, where its script is not on PATH."""

from longctx.cli import program

if __name__ == "__main__":
    program()
