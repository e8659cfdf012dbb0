"""`python -m stop_mim`, which is also what torchrun starts."""

from stop_mim.cli import main

if __name__ == "__main__":
    main()
