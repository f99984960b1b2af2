"""What a backend's device can do at most: one module per backend, found by its name.

A backend without such a module is measured all the same, but has no % of limit.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Limits:
    """One reading: streaming read in GB/s; GFLOP/s of float32 and Gop/s of int8 dot products."""

    gbps: float
    gflops: float
    int8_gops: float


class Probe(Protocol):
    working_set: int  # bytes that must pass through between two uses of one set of arguments

    def limits(self) -> Limits:
        """Takes a few milliseconds, so that it can run between samples."""
        ...

    def freedom(self) -> float:
        """Larger when no neighbour slows the device; 0 when unknown."""
        ...

    def others(self) -> float | None:
        """Seconds of device time that other processes have used; None when unknown."""
        ...


def probe_of(backend: str) -> Probe | None:
    """The probe of a backend's device, or None when there is none."""
    name = f"{__name__}.{backend}"
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.import_module(name).PROBE()
