"""A Hugging Face checkpoint folder: its configuration, and its tensors one at a time.

Everything that can be known without reading weights is checked on opening: the index, the files, their headers, and the
name, shape and dtype of each tensor. Files are mapped, so a tensor costs memory only while somebody copies from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eightfold.errors import CheckpointError
from eightfold.quant.checkpoints import HF_QUANT_CONFIG, Serialized, read_serialized
from eightfold.types import NEUTRAL_SAMPLING, SamplingParams

_FLOATS = ("Infinity", "-Infinity", "NaN")
INDEX_NAME = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file's header says of a tensor.

    Attributes:
        name: the name that the model uses for it.
        stored_name: the name in the file.
        file: where it is.
        shape: its shape.
        dtype: in safetensors' spelling, such as "BF16".
        nbytes: its size.
    """

    name: str
    stored_name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What a checkpoint says of generating.

    Attributes:
        sampling: values for what a request leaves open, by the names of `SamplingParams`.
        eos_token_ids: tokens that end an answer.
    """

    sampling: Mapping[str, Any]
    eos_token_ids: frozenset[int]


class Checkpoint:
    """The safetensors files of a folder.

    Args:
        path: the folder.
        canonical: a name in the files to the name that the model uses.
        unused: patterns of names in the files that no model computes with, each with the reason.
        serialized: what the configuration says of quantized weights; None where there are none.

    Attributes:
        path: the folder.
        unused: as given.
        serialized: as given.
        tensors: the model's name to header, in the order in which the tensors lie in the files.

    Raises:
        CheckpointError: no weights, a damaged index or file, or an index and files that disagree, each by name.
    """

    def __init__(
        self,
        path: Path,
        *,
        canonical: Callable[[str], str] = str,
        unused: Mapping[str, str] = MappingProxyType({}),
        serialized: Serialized | None = None,
    ) -> None:
        self.path, self.unused, self.serialized = path, unused, serialized
        # The file that read() is in the middle of.
        self._open: tuple[Path, Any] | None = None
        self.tensors: dict[str, TensorInfo] = {}
        index = path / INDEX_NAME
        expected = _read_index(index) if index.exists() else None
        for file in _weight_files(path, expected):
            for info in _read_header(file, canonical):
                if info.name in self.tensors:
                    other = self.tensors[info.name]
                    same = info.stored_name == other.stored_name
                    raise CheckpointError(
                        info.stored_name,
                        got=f"it in {other.file.name} and in {file.name}" if same else f"{other.stored_name} as well",
                        expected="each tensor in one file" if same else "one of the two, which are names of the same tensor",
                    )
                self.tensors[info.name] = info
        files = {info.stored_name: info.file.name for info in self.tensors.values()}
        for name, file_name in (expected or {}).items():
            if files.get(name) != file_name:
                raise CheckpointError(
                    f"tensor {name}", got=f"no such tensor in {file_name}", expected=f"it there, as {INDEX_NAME} says"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read_one(self, name: str) -> Tensor:
        """One tensor by name, as a view of its mapped file."""
        info = self.tensors[name]
        if self._open is not None and self._open[0] == info.file:
            return cast("Tensor", self._open[1].get_tensor(info.stored_name))
        with safe_open(info.file, framework="pt") as reader:
            return cast("Tensor", reader.get_tensor(info.stored_name))

    def read(self) -> Iterator[tuple[TensorInfo, Tensor]]:
        """Every tensor once, in the order of the files. A tensor is a view of its mapped file: copy from it, do not keep it."""
        files: dict[Path, list[TensorInfo]] = {}
        for info in self.tensors.values():
            files.setdefault(info.file, []).append(info)
        for file, infos in files.items():
            with safe_open(file, framework="pt") as reader:
                self._open = file, reader
                try:
                    for info in infos:
                        yield info, reader.get_tensor(info.stored_name)
                finally:
                    self._open = None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: the file is missing or holds no JSON object.
    """
    if not path.is_file():
        raise CheckpointError(str(path), got="no such file", expected=f"{path.name} beside the weights")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_spelled_float)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), got=f"damaged JSON ({error})", expected="a JSON object") from error
    if not isinstance(content, dict):
        raise CheckpointError(str(path), got=f"JSON of type {type(content).__name__}", expected="a JSON object")
    return content


def serialized_form(path: Path) -> Serialized | None:
    """What a folder's configuration says of weights that are quantized already; None where it says nothing.

    Raises:
        CheckpointError: something that is not supported, by key or by layer.
    """
    other = path / HF_QUANT_CONFIG
    return read_serialized(read_json(path / "config.json"), read_json(other) if other.is_file() else None)


def read_generation_config(path: Path) -> GenerationConfig:
    """Read `generation_config.json`, which may be missing; end tokens come from `config.json` as well.

    Raises:
        InputError: a sampling value out of its range.
    """
    file = path / "generation_config.json"
    generation = read_json(file) if file.is_file() else {}
    sampling = {name: generation[name] for name in NEUTRAL_SAMPLING if generation.get(name) is not None}
    SamplingParams(**sampling)  # the same checks as for a user's values
    eos: set[int] = set()
    for config in (generation, read_json(path / "config.json")):
        value = config.get("eos_token_id")
        eos.update(value if isinstance(value, list) else [] if value is None else [value])
    return GenerationConfig(MappingProxyType(sampling), frozenset(eos))


def _spelled_float(item: dict[str, Any]) -> Any:
    """Infinity, as transformers writes it into a configuration: JSON itself has no word for it."""
    return float(item["__float__"]) if item.keys() == {"__float__"} and item["__float__"] in _FLOATS else item


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(
            str(path), got="no weight_map of names to files", expected="the index that save_pretrained writes"
        )
    return weight_map


def _weight_files(path: Path, index: dict[str, str] | None) -> list[Path]:
    """The files to read, in order: those of the index, else the only file there is."""
    if index is not None:
        files = [path / name for name in dict.fromkeys(index.values())]
        for file in files:
            if file.parent != path:
                raise CheckpointError(f"{INDEX_NAME}", got=f"a shard outside the folder, {file}", expected="file names alone")
            if not file.is_file():
                raise CheckpointError(str(file), got="no such file", expected=f"a shard that {INDEX_NAME} names")
        return sorted(files)
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in path.glob(pattern))
        got = f"no *.safetensors, but {others[0]}" if others else "no *.safetensors"
        remedy = "Convert them with transformers: save_pretrained writes safetensors." if others else ""
        raise CheckpointError(str(path), got=got, expected="a folder with safetensors weights", remedy=remedy)
    if len(files) > 1 and (path / "model.safetensors") in files:
        return [path / "model.safetensors"]
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:3])
        raise CheckpointError(
            str(path), got=f"{len(files)} weight files ({names}...)", expected=f"{INDEX_NAME} to say which to read"
        )
    return files


def _read_header(file: Path, canonical: Callable[[str], str]) -> Iterator[TensorInfo]:
    try:
        with safe_open(file, framework="pt") as reader:
            for name in reader.offset_keys():
                part = reader.get_slice(name)
                shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
                width = DTYPES[dtype].itemsize if dtype in DTYPES else 1
                yield TensorInfo(canonical(name), name, file, shape, dtype, torch.Size(shape).numel() * width)
    except SafetensorError as error:
        size = file.stat().st_size
        raise CheckpointError(
            str(file),
            got=f"a damaged file of {size} bytes ({error})",
            expected="whole safetensors",
            remedy="Download it again.",
        ) from error
