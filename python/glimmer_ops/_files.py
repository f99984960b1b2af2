"""What must hold of a path before it is opened."""

from __future__ import annotations

import os
import stat


def check_not_special(path: str | os.PathLike[str], error: type[ValueError] = ValueError) -> None:
    """Raises `error` for a pipe, socket or device, which might never end or never begin.

    A path that is not there, or a folder, passes: opening it gives its own error.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise error(f"{os.fspath(path)}: expected a regular file, found a pipe, socket or device")
