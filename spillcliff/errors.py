"""Failures that a user can put right, each told in one line."""


class UserError(Exception):
    """Bad input or usage: the message names the thing, what is wrong and what would be right, in one line whatever it
    quotes."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class NoPlan(UserError):
    """Nothing fits, or no plan is possible from what was measured."""

    exit_code = 3


class NoKernels(UserError):
    """The torch build has no machine code for the card."""


class Refused(UserError):
    """The machine is not in a state in which a run should start."""

    exit_code = 4
