"""The CPU lowering: plain ExecuTorch custom ops on the stock runtime, weights in a .ptd.

The three methods share the page pools in place (`share_mutable_buffers`); weights are external
constants that the runtime maps without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
from executorch.exir.passes import MemoryPlanningPass
from torch.export import ExportedProgram

from .export import WEIGHTS_FILE
from .graph import FusedModel
from .stream import Progress, WeightBytes, streamed_constants


def _sources(model: FusedModel, progress: Progress) -> dict[str, WeightBytes]:
    names = {name: f"weights_{model.id}.{name}" for name in model.weights}
    return {names[name]: WeightBytes(names[name], w, progress) for name, w in model.weights.items()}


def write(
    programs: Mapping[str, ExportedProgram],
    model: FusedModel,
    constants: Mapping[str, Any],
    folder: Path,
    progress: Progress,
) -> None:
    """Lowers the programs and writes model.pte and model.ptd into folder."""
    edge = to_edge(
        dict(programs),
        constant_methods=dict(constants),
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    config = ExecutorchBackendConfig(
        # Pools are buffers too, and stay inside the program.
        external_constants=lambda node: WEIGHTS_FILE,
        emit_mutable_buffer_names=True,
        memory_planning_pass=MemoryPlanningPass(
            share_mutable_buffers=True, alloc_graph_input=False
        ),
    )
    with streamed_constants(_sources(model, progress)):
        program = edge.to_executorch(config)
        with open(folder / "model.pte", "wb") as f:
            program.write_to_file(f)
        program.write_tensor_data_to_file(str(folder))


def verify(folder: Path) -> None:
    """Loads what was written: every method, pool and weight must be there and fit.

    Nothing is run: that would page in all weights, 16 GB for the 30B.
    """
    from glimmer_ops.session import Session

    Session.load(folder)
