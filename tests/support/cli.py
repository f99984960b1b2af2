"""What every failure of the command line looks like."""

from __future__ import annotations


def refused(result: tuple[int, str, str], *words: str) -> None:
    """Asserts status 1 and one line on stderr that holds the words. result: of `glimmer`."""
    status, out, err = result
    assert status == 1, result
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert "Traceback" not in out + err
    for word in words:
        assert word in err, err
