"""`python -m planner`, which is `plan`."""

from planner.cli import main

if __name__ == "__main__":
    main()
