"""What commands print with."""

from typing import Any

from rich.console import Console


class OutputConsole(Console):
    """A console that prints every text as it is, also in tables: "[a]" and ":a:" in a path are no markup and no emoji.

    To it, a pipe that nobody reads is an error like any other. rich would end the process with status 1, which says
    something else of a command.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again that rich has caught."""
        raise
