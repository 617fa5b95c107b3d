"""`python -m trainer`, which is `train`."""

from trainer.cli import main

if __name__ == "__main__":
    main()
