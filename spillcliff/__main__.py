"""`python -m spillcliff`, which is `spillcliff`."""

from spillcliff.cli import main

if __name__ == "__main__":
    main()
