"""`python -m danlu …` is `danlu …`; so is `torchrun -m danlu …`."""

from danlu.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
