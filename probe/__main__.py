"""`python -m probe`, which is `probe`."""

from probe.cli import main

if __name__ == "__main__":
    main()
