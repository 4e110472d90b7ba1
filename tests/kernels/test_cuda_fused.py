"""The GPU's backend for the small operations: what it declines, and that a graph of them equals them one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eightfold.kernels import jit
from eightfold.kernels.cuda_fused import TritonFused
from eightfold.kernels.operations import Routing
from eightfold.kernels.registry import Hardware

gpu_test = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
needs_triton = pytest.mark.skipif(jit.MISSING is not None, reason="needs triton")
ROUTING = Routing(64, 4, "sigmoid", normalize=True)


@needs_triton
def test_what_is_declined_and_why() -> None:
    def declines(dtype: torch.dtype, *capability: int) -> str | None:
        gpu = Hardware(torch.device("cuda"), "a GPU", (capability[0], capability[1]), frozenset(), 1 << 34, 8)
        return TritonFused().declines(dtype, gpu)

    cpu = Hardware(torch.device("cpu"), "a CPU", None, frozenset(), 1 << 34, 8)
    assert TritonFused().declines(torch.bfloat16, cpu) == "needs a CUDA GPU"
    assert declines(torch.bfloat16, 7, 5) == "needs compute capability 8.0 and up, and this GPU has 7.5"
    assert declines(torch.float64, 9, 0) == "torch.float64 activations"
    assert [declines(dtype, 8, 0) for dtype in (torch.bfloat16, torch.float16, torch.float32)] == [None] * 3


@needs_triton
def test_no_tokens_give_empty_results() -> None:
    backend, empty = TritonFused(), torch.zeros(0, 64)
    weight, heads = torch.ones(64), torch.zeros(0, 4, 16)
    assert backend.rms_norm(empty, weight, 1e-5).shape == (0, 64)
    assert backend.add_rms_norm(empty, empty, weight, 1e-5)[0].shape == (0, 64)
    assert backend.gated_rms_norm(empty, empty, weight, 1e-5, 16).shape == (0, 64)
    assert backend.silu_and_mul(empty).shape == (0, 32)
    assert backend.relu2(empty).shape == (0, 64)
    assert backend.rotary(heads, heads, torch.zeros(8, 16), torch.zeros(0, dtype=torch.int64))[0].shape == heads.shape
    assert [part.shape for part in backend.route(empty, torch.zeros(64, 64), None, ROUTING)] == [(0, 4), (0, 4)]
    backend.write_kv(heads, heads, torch.zeros(1, 8, 4, 16), torch.zeros(1, 8, 4, 16), torch.zeros(0, dtype=torch.int64))


@pytest.mark.gpu
@gpu_test
@pytest.mark.parametrize("num_tokens", [1, 40, 500])
def test_a_graph_of_overlapping_operations_equals_one_at_a_time(num_tokens: int) -> None:
    backend = TritonFused()
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    x, residual = (torch.randn(num_tokens, 1024, device="cuda", generator=generator).bfloat16() for _ in range(2))
    weight, gate = (torch.randn(*shape, device="cuda", generator=generator) for shape in ((1024,), (64, 512)))
    cos_sin, positions = torch.randn(600, 64, device="cuda", generator=generator), torch.arange(num_tokens, device="cuda")
    caches = torch.zeros(2, 40, 16, 4, 64, dtype=torch.bfloat16, device="cuda")

    def run(wait: bool) -> tuple[Tensor, ...]:
        def step(tensor: Tensor) -> Tensor:
            if wait:
                torch.cuda.synchronize()
            return tensor

        normed, total = backend.add_rms_norm(x, residual.clone(), weight, 1e-5)
        heads = step(normed).unflatten(1, (16, 64))
        query, key = backend.rotary(heads[:, :8], heads[:, 8:12], cos_sin, positions)
        backend.write_kv(step(key), heads[:, 12:], caches[0], caches[1], positions)
        mixed = step(backend.gated_rms_norm(query.flatten(1), normed[:, 512:], weight[:512], 1e-5, 64))
        active = step(backend.silu_and_mul(backend.relu2(normed)))
        ids, weights = backend.route(mixed, gate, None, ROUTING)
        return total, step(mixed), active, ids, weights, caches.clone()

    expected = run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(wait=False)
    for _ in range(10):
        caches.zero_()
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
