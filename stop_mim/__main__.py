"""`python -m stop_mim`, which is also what torchrun and sweeps start."""

from stop_mim.cli import main

if __name__ == "__main__":
    main()
