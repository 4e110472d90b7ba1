"""A weight as the files hold it: a tensor alone, or elements and scales. What can be wrong is found here, by name.

All but NaN is found by headers, before any weight is read. Two faults leave no trace in a header and cannot be found: scales in
a kernel's own order that happen to have the shape of linear ones, and a square weight that is transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn

import torch
from torch import Tensor

from eightfold.errors import CheckpointError
from eightfold.models.checkpoint import DTYPES, Checkpoint, TensorInfo
from eightfold.quant import fp8
from eightfold.quant.checkpoints import INPUT_SCALES, KV_SCALE, SCALE_SUFFIXES, Scheme
from eightfold.quant.fp8 import WeightTensor
from eightfold.quant.mxfp8 import BLOCK_SIZE, MXTensor, num_blocks

_ELEMENTS, _BYTES = "F8_E4M3", ("U8", "F8_E8M0")
# Rows and groups of scales to which the layouts of tensor cores are padded.
_SWIZZLED = (128, 4)


@dataclass(frozen=True, slots=True)
class Stored:
    """One weight of a checkpoint.

    Attributes:
        info: its elements.
        scheme: how they are to be read; None where they are values.
        scale: its scales.
        input_scale: the scale of activations, where the scheme has one.
        excluded: the checkpoint's pattern by which it is not quantized, if any.
    """

    info: TensorInfo
    scheme: Scheme | None = None
    scale: TensorInfo | None = None
    input_scale: TensorInfo | None = None
    excluded: str | None = None

    @property
    def format(self) -> str | None:
        """ "mxfp8" or "fp8"; None where it is not quantized."""
        return None if self.scheme is None else self.scheme.algorithm

    @property
    def form(self) -> tuple[object, ...]:
        """What parts of one fused weight must agree in."""
        if self.scheme is None:
            return ("not quantized",)
        return (self.scheme.algorithm, f"groups of {self.group_size}" if self.scheme.block else "a scale a row")

    @property
    def group_size(self) -> int:
        """Columns under one scale."""
        if self.scheme is not None and self.scheme.algorithm == "mxfp8":
            return BLOCK_SIZE
        return self.info.shape[-1] if self.scheme is None or self.scheme.block is None else self.scheme.block[1]

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.info.nbytes + sum(item.nbytes for item in self.scales)

    @property
    def scales(self) -> tuple[TensorInfo, ...]:
        """The tensors that belong to it beside its elements."""
        return tuple(item for item in (self.scale, self.input_scale) if item is not None)


def describe(checkpoint: Checkpoint, info: TensorInfo, *, fused: str = "", quantizable: bool = True) -> Stored:
    """How one weight is stored, after the configuration and after the headers, which must agree.

    Args:
        checkpoint: where it is.
        info: the weight's own tensor.
        fused: the name of the weight that it becomes a part of.
        quantizable: whether a layer of its kind is meant where the configuration says "all layers".

    Raises:
        CheckpointError: the two disagree, or a scale is missing, of a wrong dtype or of a wrong shape.
    """
    names = tuple(dict.fromkeys(_layer(name) for name in (info.stored_name, info.name, fused) if name))
    serialized = checkpoint.serialized
    scheme = None if serialized is None else serialized.scheme_of(names)
    excluded = None if serialized is None else serialized.excluding(names)
    scale = _first(checkpoint, info.name, SCALE_SUFFIXES)
    if info.dtype not in (_ELEMENTS, *DTYPES):
        _refuse(info, f"dtype {info.dtype}", f"one of: {', '.join(DTYPES)}{', F8_E4M3' if serialized else ''}")
    if info.dtype != _ELEMENTS:
        if scheme is not None and quantizable:
            expected = f"F8_E4M3 elements of {scheme.algorithm.upper()}, by {serialized.source if serialized else ''}"
            _refuse(info, f"dtype {info.dtype}", expected, remedy="If it is not quantized, the list of exclusions lacks it.")
        if scale is not None:
            why = f"since {excluded} excludes the layer" if excluded else "since the weight is not quantized"
            _refuse(scale, "a scale", f"none, {why}")
        return Stored(info, excluded=excluded)
    if serialized is None:
        _refuse(info, "dtype F8_E4M3", f"a quantization_config that says how to read it, or one of: {', '.join(DTYPES)}")
    if scheme is None:
        got = f"dtype F8_E4M3{' and a scale' if scale else ''}"
        why = f"since {excluded} excludes the layer" if excluded else f"since {serialized.source} does not list the layer"
        _refuse(info, got, f"one of: {', '.join(DTYPES)}, {why}")
    if scale is None:
        near = " or ".join(info.stored_name + suffix for suffix in SCALE_SUFFIXES[:2])
        _refuse(info, "no scale beside it", near)
    check = _check_mx_scale if scheme.algorithm == "mxfp8" else _check_fp8_scale
    check(info, scale, scheme)
    input_scale = _first(checkpoint, _layer(info.name), INPUT_SCALES)
    if scheme.static and input_scale is None:
        _refuse(info, "no input_scale beside it", f"one, since activations are static by {serialized.source}")
    return Stored(info, scheme, scale, input_scale if scheme.static else None)


def read_stored(checkpoint: Checkpoint, stored: Stored, tensor: Tensor) -> WeightTensor:
    """A weight in its form, from its elements and the scales beside them; views of the mapped files where possible.

    Raises:
        CheckpointError: a scale that does not fit, by name.
    """
    if stored.scheme is None or stored.scale is None:
        return tensor
    scale = checkpoint.read_one(stored.scale.name)
    if stored.scheme.algorithm == "mxfp8":
        return MXTensor(tensor, scale.view(torch.uint8))
    static = None if stored.input_scale is None else float(checkpoint.read_one(stored.input_scale.name).float().max())
    if scale.dtype == torch.uint8:
        factors = torch.where(scale == 255, torch.nan, torch.exp2(scale.double() - 127)).float()
    else:
        factors = scale.float()
    try:
        return fp8.from_blocks(tensor, factors, stored.scheme.block, input_scale=static)
    except ValueError as error:
        raise CheckpointError(f"tensor {stored.scale.stored_name}", got=str(error), expected="a scale of that shape") from error


def what_is_wrong_with_shape(stored: Stored, expected: tuple[int, ...]) -> str:
    """A guess at why a quantized weight has another shape than the model's; empty where there is none."""
    shape = stored.info.shape
    if stored.scheme is None or len(shape) != len(expected):
        return ""
    if shape == (*expected[:-2], expected[-1], expected[-2]):
        return "It is transposed: rows are outputs, and blocks run along the inputs."
    if shape[:-1] == expected[:-1] and expected[-1] % shape[-1] == 0:
        cut = f"It is one of {expected[-1] // shape[-1]} shards of a tensor-parallel export"
        is_cut = shape[-1] % BLOCK_SIZE and stored.scheme.algorithm == "mxfp8"
        return f"{cut}, which cuts a block of {BLOCK_SIZE}." if is_cut else f"{cut}; merge them first."
    return ""


def scale_reasons(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Reasons for scales that no weight asks for, by their names: those of a KV cache, and those of dynamic activations."""
    if checkpoint.serialized is None:
        return MappingProxyType({})
    reasons: dict[str, str] = {}
    for name in checkpoint.tensors:
        if KV_SCALE.search(name):
            reasons[name] = "scale of a KV cache in FP8, which has the activations' type here"
        elif name.endswith(INPUT_SCALES):
            reasons[name] = "scale of activations, which are dynamic by the configuration"
    return MappingProxyType(reasons)


def kv_cache_scales(checkpoint: Checkpoint) -> Mapping[str, float]:
    """The scales of keys and values that a checkpoint brings, by their names in the files."""
    if checkpoint.serialized is None:
        return MappingProxyType({})
    infos = [info for name, info in checkpoint.tensors.items() if KV_SCALE.search(name)]
    return MappingProxyType({info.stored_name: float(checkpoint.read_one(info.name).float().max()) for info in infos})


def _check_mx_scale(info: TensorInfo, scale: TensorInfo, scheme: Scheme) -> None:
    del scheme
    if scale.dtype not in _BYTES:
        _refuse(scale, f"dtype {scale.dtype}", f"{' or '.join(_BYTES)}: a byte for each block of {BLOCK_SIZE}")
    expected = (*info.shape[:-1], num_blocks(info.shape[-1]))
    if scale.shape == expected:
        return
    remedy = ""
    *_, rows, groups = (1, *expected)
    padded = -(-rows // _SWIZZLED[0]) * _SWIZZLED[0] * -(-groups // _SWIZZLED[1]) * _SWIZZLED[1]
    matrices = torch.Size(expected[:-2]).numel()
    if scale.shape == (*expected[:-2], groups, rows):
        remedy = "It is transposed."
    elif torch.Size(scale.shape).numel() == padded * matrices:
        remedy = "It is swizzled for a kernel; files hold scales row by row."
    elif torch.Size(scale.shape).numel() in (1, rows):
        remedy = "That is a scale of FP8 that is not MX; the configuration names the wrong format."
    _refuse(scale, f"shape {list(scale.shape)}", f"{list(expected)}, one for each block of {BLOCK_SIZE}", remedy=remedy)


def _check_fp8_scale(info: TensorInfo, scale: TensorInfo, scheme: Scheme) -> None:
    dtypes = (*DTYPES, *_BYTES) if scheme.scale_of == "block" else tuple(DTYPES)
    if scale.dtype not in dtypes:
        _refuse(scale, f"dtype {scale.dtype}", f"one of: {', '.join(dtypes)}")
    *outer, n, k = info.shape
    count, matrices = torch.Size(scale.shape).numel(), torch.Size(outer).numel()
    if scheme.block is not None:
        rows, columns = scheme.block
        grid = [*outer, -(-n // rows), -(-k // columns)]
        if [size for size in scale.shape if size != 1] != [size for size in grid if size != 1]:
            is_turned = list(scale.shape) == [*outer, *reversed(grid[-2:])]
            remedy = "It is transposed." if is_turned else ""
            _refuse(scale, f"shape {list(scale.shape)}", f"{grid}, for blocks of {rows} x {columns}", remedy=remedy)
        return
    allowed = {"tensor": {1, matrices}, "channel": {matrices * n}}.get(scheme.scale_of, {1, matrices, matrices * n})
    if count not in allowed:
        expected = {"tensor": "one number", "channel": f"one number for each of {n} rows"}.get(
            scheme.scale_of, f"one number, or one for each of {n} rows"
        )
        _refuse(scale, f"shape {list(scale.shape)}", expected)


def _first(checkpoint: Checkpoint, name: str, suffixes: tuple[str, ...]) -> TensorInfo | None:
    return next((checkpoint.tensors[name + suffix] for suffix in suffixes if name + suffix in checkpoint.tensors), None)


def _layer(name: str) -> str:
    """The layer of a weight: its name without `.weight`, which experts in one tensor do not have."""
    return name.removesuffix(".weight")


def _refuse(info: TensorInfo, got: str, expected: str, *, remedy: str = "") -> NoReturn:
    raise CheckpointError(f"tensor {info.stored_name}", got=got, expected=expected, remedy=remedy)
