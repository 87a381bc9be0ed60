"""What ends a bench command."""

from __future__ import annotations


class BenchError(Exception):
    """The command cannot go on; the message is one line: what happened, where, what to do."""
