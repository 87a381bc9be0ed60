"""What can go wrong on the way from one k to another."""

from __future__ import annotations


class ActError(Exception):
    """A step of a change that did not succeed.

    The message is one line for a person on call: what was seen, where, and what to do. Neither it
    nor `output` carries a secret of ours.
    """

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output
        """The end of what a failing command printed."""


class Refused(ActError):
    """A step that was not begun: what is to be changed stands as it was."""
