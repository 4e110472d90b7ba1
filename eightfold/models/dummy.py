"""Weights that nobody trained: any configuration becomes a model at once, for measuring what does not depend on what they say.

A tensor is made of blocks of 32 values. There is one table of normal values, and a hash of the seed, of the tensor's name and
of the block's position says which row of the table a block is. The table is drawn on the CPU and the hash is whole numbers, so
that a seed gives the same weights on every device. A tensor that is to be MXFP8 takes its blocks from the same table quantized,
so it is what quantizing the other would give, to the bit, and is written in its place without ever being held in bf16.

Scales are those of networks before training, which trained ones stay near: a standard deviation of 1 / sqrt(K), norms of one,
and for the recurrence the ranges that Mamba2 begins with (steps of 0.001 to 0.1, decays of 1 to 16; arXiv 2405.21060). A
router like that, without a correction of its scores, chooses evenly as long as hidden states have no direction in common. What
attention gathers is nearly the same for neighbours, so an embedding that is not tied to the output head has a standard
deviation of one, and tokens stay apart. Functions that are never negative, such as relu², would give all tokens the same
vector, so the values of down projections come in pairs of opposite sign: what all channels of their input share is cancelled.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from eightfold.errors import CheckpointError
from eightfold.kernels.selection import Kernels
from eightfold.kernels.storage import Arena
from eightfold.models.causal_lm import CausalLM
from eightfold.models.checkpoint import DTYPES, Checkpoint, TensorInfo, serialized_form
from eightfold.models.loader import LoadPlan, LoadReport, TensorReport, read_model
from eightfold.quant import mxfp8
from eightfold.quant.fp8 import WeightTensor
from eightfold.quant.mxfp8 import BLOCK_SIZE, MXTensor, ScaleRule, num_blocks
from eightfold.quant.policy import Role
from eightfold.types import Progress

# Rows of the table of blocks: a million values.
_NUM_BLOCKS = 1 << 15
_BIAS_STD = 0.02
_STEPS, _DECAYS = (1e-3, 1e-1), (1.0, 16.0)
_LOW_BITS = 0xFFFFFFFF


class _Values(NamedTuple):
    """What the values of a tensor are: their scale, their dtype in safetensors' spelling, and whether they come in pairs."""

    std: float
    dtype: str
    in_pairs: bool


class DummyCheckpoint(Checkpoint):
    """The tensors that a configuration asks for, as a checkpoint without files.

    Args:
        path: a folder with a config.json.
        seed: of all values.
        device: where tensors are made.

    Raises:
        CheckpointError: the configuration is not supported, or is that of weights which are quantized already.
    """

    def __init__(self, path: Path, *, seed: int, device: torch.device) -> None:
        form = serialized_form(path)
        if form is not None:
            raise CheckpointError(
                "load_format",
                got=f"dummy for {path}, whose weights are {' and '.join(form.algorithms)} by {form.source}",
                expected="a configuration of weights that are not quantized",
                remedy="Leave quantization_config out of a copy of config.json, and give --quantization mxfp8.",
            )
        self.path, self.seed, self.device = path, seed, device
        self.unused: Mapping[str, str] = MappingProxyType({})
        self.serialized = None
        self.tensors: dict[str, TensorInfo] = {}
        self._roles: dict[str, Role] = {}
        self._list_tensors(read_model(path))
        table = torch.randn(_NUM_BLOCKS, BLOCK_SIZE, generator=torch.Generator().manual_seed(seed % (1 << 63)))
        self._table = table.to(device)  # [blocks, 32]
        self._scaled: dict[_Values, Tensor] = {}
        self._quantized: dict[tuple[_Values, ScaleRule, int], MXTensor] = {}

    def read(self) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Every tensor once, made when it is asked for, on the device and in the dtype of the configuration."""
        for info in self.tensors.values():
            yield info, self.read_one(info.name)

    def read_one(self, name: str) -> Tensor:
        """One tensor by name, as `read` has it."""
        info, role = self.tensors[name], self._roles[name]
        match role:
            case Role.NORM:
                return self._full(info, 1.0)
            case Role.RECURRENCE:
                return self._recurrence(info)
            case Role.ROUTER if len(info.shape) == 1:  # a correction of scores, which would prefer some experts
                return self._full(info, 0.0)
        k = info.shape[-1]
        index = self._index(info)  # [rows * blocks]
        blocks = self._blocks(self._values_of(info)).index_select(0, index)  # [rows * blocks, 32]
        return blocks.view(-1, num_blocks(k) * BLOCK_SIZE)[:, :k].reshape(info.shape)

    def write(self, name: str, target: WeightTensor, rule: ScaleRule) -> None:
        """Make one tensor in its place: quantized where `target` is MXFP8, and then what quantizing `read_one(name)` gives."""
        if isinstance(target, MXTensor):
            self._write_quantized(self.tensors[name], target, rule)
        elif isinstance(target, Tensor):
            target.copy_(self.read_one(name))

    def _write_quantized(self, info: TensorInfo, target: MXTensor, rule: ScaleRule) -> None:
        k, index = info.shape[-1], self._index(info)
        groups, rest = num_blocks(k), k % BLOCK_SIZE
        table = self._quantized_blocks(self._values_of(info), rule, BLOCK_SIZE)
        elements, data = table.data.view(torch.uint8), target.data.view(torch.uint8).view(-1, k)
        scale = target.scale.view(-1)
        torch.index_select(table.scale.view(-1), 0, index, out=scale)
        if not rest:
            torch.index_select(elements, 0, index, out=data.view(-1, BLOCK_SIZE))
            return
        # The last block of a row is shorter, and its scale is that of the values that it has.
        data.copy_(elements.index_select(0, index).view(-1, groups * BLOCK_SIZE)[:, :k])
        short, ends = self._quantized_blocks(self._values_of(info), rule, rest), index.view(-1, groups)[:, -1]
        data[:, -rest:] = short.data.view(torch.uint8).index_select(0, ends)
        scale.view(-1, groups)[:, -1] = short.scale.view(-1).index_select(0, ends)

    def _list_tensors(self, model: CausalLM) -> None:
        """Take the names, shapes and roles of a model's tensors; a tied head has none of its own."""
        dtypes = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
        dtype = dtypes.get(model.arch.dtype or "bfloat16", "BF16")
        for weight in model.weights():
            for part in weight.parts:
                nbytes = math.prod(part.shape) * DTYPES[dtype].itemsize
                info = TensorInfo(part.name, part.name, self.path / "config.json", part.shape, dtype, nbytes)
                self.tensors.setdefault(part.name, info)
                self._roles.setdefault(part.name, weight.role)
        untied = model.lm_head.embedding is None
        self._wide = frozenset(name for name, role in self._roles.items() if untied and role is Role.EMBEDDING)

    def _values_of(self, info: TensorInfo) -> _Values:
        std = 1 / math.sqrt(info.shape[-1])
        if len(info.shape) == 1:
            std = _BIAS_STD
        elif info.name in self._wide:
            std = 1.0
        return _Values(std, info.dtype, "down_proj" in info.name and len(info.shape) > 1)

    def _full(self, info: TensorInfo, value: float) -> Tensor:
        return torch.full(info.shape, value, dtype=DTYPES[info.dtype], device=self.device)

    def _recurrence(self, info: TensorInfo) -> Tensor:
        """Decays, steps or skips of a recurrence."""
        # On the CPU, since devices disagree about the last bit of a logarithm.
        share = self._hash(info, math.prod(info.shape)).cpu().double() / (_LOW_BITS + 1)  # uniform in [0, 1)
        if info.name.endswith("A_log"):
            values = torch.log(_DECAYS[0] + share * (_DECAYS[1] - _DECAYS[0]))
        elif info.name.endswith("dt_bias"):
            low, high = (math.log(step) for step in _STEPS)
            values = torch.log(torch.expm1(torch.exp(low + share * (high - low))))  # softplus of it is the step
        else:
            return self._full(info, 1.0)
        return values.to(DTYPES[info.dtype]).view(info.shape).to(self.device)

    def _blocks(self, values: _Values) -> Tensor:
        """The table of some values, as tensors hold them, `[blocks, 32]`."""
        if values not in self._scaled:
            table = self._table
            if values.in_pairs:
                halves = table[:, : BLOCK_SIZE // 2]
                table = torch.stack((halves, -halves), dim=-1).flatten(1)
            self._scaled[values] = (table * values.std).to(DTYPES[values.dtype])
        return self._scaled[values]

    def _quantized_blocks(self, values: _Values, rule: ScaleRule, width: int) -> MXTensor:
        """The first `width` columns of the same table, quantized."""
        key = (values, rule, width)
        if key not in self._quantized:
            self._quantized[key] = mxfp8.quantize(self._blocks(values)[:, :width].contiguous(), rule)
        return self._quantized[key]

    def _index(self, info: TensorInfo) -> Tensor:
        """The row of the table for each block of a tensor, `int64 [rows * blocks]`."""
        *rows, k = info.shape
        return self._hash(info, math.prod(rows) * num_blocks(k)) & (_NUM_BLOCKS - 1)

    def _hash(self, info: TensorInfo, count: int) -> Tensor:
        """Numbers of 32 bits that look random, `int64 [count]`, by MurmurHash3's last step (fmix32)."""
        digest = hashlib.blake2b(f"{self.seed} {info.name}".encode(), digest_size=4).digest()
        bits = torch.arange(count, dtype=torch.int64, device=self.device).mul_(0x9E3779B1).add_(int.from_bytes(digest))
        bits.bitwise_and_(_LOW_BITS)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits.bitwise_xor_(bits >> shift).mul_(factor).bitwise_and_(_LOW_BITS)  # a product that wraps keeps its low bits
        return bits.bitwise_xor_(bits >> 16)


def load_dummy(
    model: CausalLM,
    checkpoint: DummyCheckpoint,
    load_plan: LoadPlan,
    kernels: Kernels,
    *,
    rule: ScaleRule = ScaleRule.CEIL,
    report: Progress | None = None,
) -> LoadReport:
    """`eightfold.models.loader.load` for weights that are made instead of read, one tensor at a time."""
    start = time.perf_counter()
    model.release()
    for places in load_plan.destinations.values():
        for place in places:
            place.weight.begin()
    arena = Arena(kernels.hardware.device)
    tensors: list[TensorReport] = []
    done, total = 0, checkpoint.nbytes
    for info in checkpoint.tensors.values():
        for index, place in enumerate(load_plan.destinations[info.name]):
            target = place.weight.place(place.part, decision=place.decision, dtype=place.dtype, arena=arena)
            checkpoint.write(info.name, target, rule)
            before = 0 if index else info.nbytes
            tensors.append(TensorReport(info.name, place.weight.role, info.shape, place.decision, before, place.nbytes))
        done += info.nbytes
        if report is not None:
            report("load", done, total)
    model.bind(kernels)
    return LoadReport(tuple(tensors), load_plan.skipped, load_plan.notes, time.perf_counter() - start)
