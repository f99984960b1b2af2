"""The thin layer between a Muse Glimmer model and ExecuTorch.

`fuse(model)` turns upstream's eager model into the fused graph, `from_gguf(file)` builds the same
graph straight from a GGUF file, and `to_executorch(graph, ...)` writes `model.pte` and `model.ptd`.
"""

from .export import ExportOptions, to_executorch
from .fuse import fuse
from .graph import FusedModel, Weight, from_gguf

__all__ = ["ExportOptions", "FusedModel", "Weight", "from_gguf", "fuse", "to_executorch"]
