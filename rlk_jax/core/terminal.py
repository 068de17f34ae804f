"""What commands print with."""

from rich.console import Console


class OutputConsole(Console):
    """A console to which a pipe that nobody reads is an error like any other. rich would end the process with status 1,
    which says something else of a command.
    """

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again that rich has caught."""
        raise
