"""Probes of this CPU, by C++ loops on the pool of threads that runs the kernels.

Memory: a read with 8 streams a thread, in huge pages where the system gives them. The peaks are
those of the best instructions that the CPU has: int8 dot products by AMX tiles, VNNI or what AVX2
offers. Freedom is the number of independent adds a cycle, which a neighbour on the core's other
hardware thread halves.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from glimmer_ops import _bench  # type: ignore[attr-defined]

from . import Limits

READ = 64 << 20  # bytes of a reading
LEAST = 256 << 20


def last_level_cache() -> int:
    """Bytes of the largest cache of CPU 0, or 0 where the system does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes)


def available_memory() -> int:
    """Bytes that can be had without swapping; half of all memory where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def working_set() -> int:
    """256 MiB or twice the last-level cache; no more than a quarter of the memory at hand."""
    return min(max(LEAST, 2 * last_level_cache()), available_memory() // 4)


class CpuProbe:
    def __init__(self) -> None:
        self.working_set = working_set()
        self._stream = _bench.Stream(self.working_set)

    def limits(self) -> Limits:
        size, ns = self._stream.read(READ)
        fp32, int8 = _bench.fp32_peak(), _bench.int8_peak()
        return Limits(size / ns, fp32, max(fp32, int8))

    def freedom(self) -> float:
        return _bench.ipc()

    def others(self) -> float | None:
        try:
            words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        except OSError:
            return None  # not Linux
        user, nice, system, _, _, irq, soft, steal = map(int, words[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return busy - time.process_time()


PROBE = CpuProbe
