"""The registry as pytest parameters: op × backend, with cases or variants."""

from __future__ import annotations

import pytest

from glimmer_ops.backends import BACKENDS
from glimmer_ops.ops import OPS

SUPPORTED = [(o, b) for o in OPS.values() for b in BACKENDS.values() if b.supports(o)]
PAIRS = [pytest.param(o, b, id=f"{o.name}-{b.name}") for o, b in SUPPORTED]
CASES = [
    pytest.param(o, b, c, id=f"{o.name}-{b.name}-{c.id}", marks=[pytest.mark.slow] * c.slow)
    for o, b in SUPPORTED
    for c in o.all_cases()
]
VARIANTS = [
    pytest.param(o, b, v, id=f"{o.name}-{b.name}-{v.name}")
    for o, b in SUPPORTED
    for v in b.variants(o)
]
