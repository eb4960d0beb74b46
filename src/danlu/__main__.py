"""`python -m danlu …` is `danlu …`; so is `torchrun -m danlu …`."""

from danlu.cli.main import program

if __name__ == "__main__":
    raise SystemExit(program())
