"""glimmer-ops: fused kernels and backends for Muse Glimmer 30B on ExecuTorch.

Importing this package defines `torch.ops.glimmer.*`. On CPU tensors they run the C++ kernels; the
same shared library registers them with the ExecuTorch runtime of this process.
"""

from . import (
    _native,  # noqa: F401  (first: checks the installed executorch before loading kernels)
    library,  # noqa: F401  (defines torch.ops.glimmer.*)
)
from ._native import exact_mode, isa, isas, set_exact, set_isa, use_exact, use_isa

__version__ = "0.1.0"
__all__ = ["exact_mode", "isa", "isas", "set_exact", "set_isa", "use_exact", "use_isa"]
