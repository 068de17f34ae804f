"""How files are written of which half would be worse than none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside `path`, to be written in the context: what was written takes the place of `path` when the context
    ends. Where it ends by an error, `path` stays as it was.
    """
    new = path.with_name(path.name + ".new")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
