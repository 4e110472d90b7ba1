"""What a checkpoint that is already quantized says of itself: which layers are quantized, how, and under which names.

The payload of MXFP8 is the same everywhere, E4M3 `[N, K]` and one E8M0 byte for 32 columns. What differs is the dialect: where
the configuration stands, how it names layers, and what the tensors of scales are called.

    native              quant_method "mxfp8", and "fp8" for weights that are not MX       weight_scale_inv, weight_scale
    modelopt            quant_method "modelopt", or hf_quant_config.json                  weight_scale, input_scale
    compressed-tensors  quant_method "compressed-tensors", groups of layers               weight_scale, input_scale

Reading ends in a `Serialized`, which is asked about layers and knows no file. A pattern of layers is a dotted name or part of
one, matched at the dots; a glob with `*`, `?` or `[`; or a regular expression after `re:`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NoReturn, TypeAlias

from eightfold.errors import CheckpointError
from eightfold.quant.mxfp8 import BLOCK_SIZE
from eightfold.quant.policy import matches

Dialect: TypeAlias = Literal["native", "modelopt", "compressed-tensors"]
ScaleOf: TypeAlias = Literal["group", "tensor", "channel", "row", "block"]

SCALE_SUFFIXES = ("_scale_inv", "_scale", "_weight_scale")
"""What the name of a scale adds to that of its weight. The last is for experts in one tensor, which have no `.weight`."""
INPUT_SCALES = (".input_scale", ".activation_scale", ".in_scale")
KV_SCALE = re.compile(r"(\.|_)(kv?|v|q|prob_output)_scale$|\.[kv]_proj\.output_scale$")
"""Names of scales of a cache of keys and values in FP8."""
HF_QUANT_CONFIG = "hf_quant_config.json"
_METHODS = ("mxfp8", "fp8", "fbgemm_fp8", "modelopt", "compressed-tensors")
_EVERY_LAYER = ("*",)


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weight of a layer is stored.

    Attributes:
        algorithm: the format of the weight.
        scale_of: what has a scale of its own: a group of 32 columns in MXFP8; else the tensor, an output channel, a block, or
            "row" where the configuration leaves open which of the first two.
        block: rows and columns of a block.
        static: whether the scale of activations was settled in calibration and is in the file.
    """

    algorithm: Literal["mxfp8", "fp8"]
    scale_of: ScaleOf
    block: tuple[int, int] | None = None
    static: bool = False


MXFP8 = Scheme("mxfp8", "group")
_ALGORITHMS: Mapping[str, Scheme] = {
    "MXFP8": MXFP8,
    "FP8": Scheme("fp8", "tensor", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", "channel"),
    "FP8_PB_WO": Scheme("fp8", "block", (128, 128)),
}


@dataclass(frozen=True, slots=True)
class Serialized:
    """A checkpoint that is already quantized, by its configuration.

    Attributes:
        dialect: whose names and keys it has.
        source: the file that says so.
        groups: patterns of layers and how those are stored; the first that matches counts.
        layers: the same for layers by their full names, ahead of `groups`.
        excluded: patterns of layers that are not quantized.
        kv_cache: format of keys and values that the checkpoint was calibrated for, such as "fp8"; None where it says nothing.
    """

    dialect: Dialect
    source: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...] = ()
    layers: Mapping[str, Scheme] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    kv_cache: str | None = None

    def scheme_of(self, names: Sequence[str]) -> Scheme | None:
        """How a layer is stored.

        Args:
            names: what it is called: in the files, in the model, and where it is part of a fused layer that one's name.

        Returns:
            None where it is not quantized.
        """
        if self.excluding(names) is not None:
            return None
        for name in names:
            while name:
                if name in self.layers:
                    return self.layers[name]
                name = name.rpartition(".")[0]  # noqa: PLW2901
        return next((scheme for patterns, scheme in self.groups if any(_fits(item, names) for item in patterns)), None)

    def excluding(self, names: Sequence[str]) -> str | None:
        """The pattern that excludes a layer; None where none does."""
        return next((pattern for pattern in self.excluded if _fits(pattern, names)), None)

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The formats in it, such as ("mxfp8",)."""
        found = [scheme.algorithm for scheme in (*(scheme for _, scheme in self.groups), *self.layers.values())]
        return tuple(dict.fromkeys(found))


def read_serialized(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None) -> Serialized | None:
    """What a checkpoint's configuration says of its quantization.

    Args:
        config: the content of `config.json`.
        hf_quant_config: the content of `hf_quant_config.json`, which ModelOpt writes; None where there is no such file.

    Returns:
        None where it is not quantized.

    Raises:
        CheckpointError: a method, an algorithm or a value that is not supported, by key or by layer; two files that disagree.
    """
    inner = config.get("quantization_config")
    found = None if not inner else _read_inner(inner)
    if hf_quant_config is None:
        return found
    quantization = hf_quant_config.get("quantization")
    if not isinstance(quantization, Mapping):
        raise CheckpointError(HF_QUANT_CONFIG, got="no quantization in it", expected="a JSON object under that key")
    if quantization.get("quant_algo") is None and found is None:
        return None
    other = _read_modelopt(quantization, HF_QUANT_CONFIG, "exclude_modules")
    if found is not None and found.algorithms != other.algorithms:
        raise CheckpointError(
            HF_QUANT_CONFIG,
            got=", ".join(other.algorithms) or "no quantization",
            expected=f"{', '.join(found.algorithms)}, as the quantization_config of config.json says",
        )
    return found or other


def _read_inner(inner: Any) -> Serialized:
    method = inner.get("quant_method") if isinstance(inner, Mapping) else inner
    if not isinstance(inner, Mapping) or method not in _METHODS:
        raise CheckpointError(
            "quantization_config",
            got=f"quant_method {method or 'unknown'}",
            expected=f"one of: {', '.join(_METHODS)}",
            remedy="Serve the checkpoint that this one was made from: Eightfold quantizes as it loads.",
        )
    if method == "modelopt":
        nested = inner.get("quantization")
        return _read_modelopt(nested if isinstance(nested, Mapping) else inner, "config.json", "ignore")
    return _read_compressed(inner) if method == "compressed-tensors" else _read_native(inner, str(method))


def _read_native(inner: Mapping[str, Any], method: str) -> Serialized:
    """The configurations of transformers, and of DeepSeek and vLLM under the same `quant_method`."""
    excluded = (*_names(inner, "modules_to_not_convert"), *_names(inner, "ignored_layers"))
    if method == "fbgemm_fp8":
        return Serialized("native", "config.json", ((_EVERY_LAYER, Scheme("fp8", "channel")),), excluded=excluded)
    block = inner.get("weight_block_size", [1, BLOCK_SIZE] if method == "mxfp8" else None)
    if block is not None and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(item) is int and item > 0 for item in block)
    ):
        _refuse("weight_block_size", block, "two whole numbers, rows and columns")
    static = _choice(inner, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    scale_format = _choice(inner, "scale_fmt", ("ue8m0", "float"), "ue8m0" if method == "mxfp8" else "float")
    _choice(inner, "expert_dtype", ("fp8",), "fp8")
    _choice(inner, "fmt", ("e4m3",), "e4m3")
    is_mx = block is not None and tuple(block) == (1, BLOCK_SIZE) and scale_format == "ue8m0"
    if method == "mxfp8" and (not is_mx or static):
        got = f"weight_block_size {block}, scale_fmt {scale_format}, {'static' if static else 'dynamic'} activations"
        _refuse("quant_method", f"mxfp8 with {got}", "blocks of [1, 32], ue8m0 scales and dynamic activations")
    if is_mx:
        scheme = MXFP8
    else:
        scheme = Scheme("fp8", "row" if block is None else "block", None if block is None else (block[0], block[1]), static)
    return Serialized("native", "config.json", ((_EVERY_LAYER, scheme),), excluded=excluded)


def _read_modelopt(values: Mapping[str, Any], source: str, excluded_key: str) -> Serialized:
    algorithm = str(values.get("quant_algo")).upper()
    excluded = (*_names(values, excluded_key), *(_names(values, "exclude_modules") if excluded_key == "ignore" else ()))
    cache = values.get("kv_cache_quant_algo") or values.get("kv_cache_scheme")
    kv_cache = str(cache).lower() if isinstance(cache, str) else "fp8" if cache else None
    if algorithm != "MIXED_PRECISION":
        scheme = _algorithm("quant_algo", algorithm, values)
        return Serialized("modelopt", source, ((_EVERY_LAYER, scheme),), excluded=excluded, kv_cache=kv_cache)
    listed = values.get("quantized_layers")
    if not isinstance(listed, Mapping) or not all(isinstance(item, Mapping) for item in listed.values()):
        _refuse("quantized_layers", listed, "a JSON object of layers, each with its quant_algo", source)
    schemes = {name: _algorithm(f"layer {name}", str(item.get("quant_algo")).upper(), item) for name, item in listed.items()}
    globs = tuple(((name,), scheme) for name, scheme in schemes.items() if _is_pattern(name))
    return Serialized("modelopt", source, globs, schemes, excluded, kv_cache)


def _algorithm(what: str, name: str, values: Mapping[str, Any]) -> Scheme:
    if name not in _ALGORITHMS:
        raise CheckpointError(what, got=f"quant_algo {name}", expected=f"one of: {', '.join(_ALGORITHMS)}")
    if name == "MXFP8" and values.get("group_size") not in (None, BLOCK_SIZE):
        raise CheckpointError(what, got=f"MXFP8 with group_size {values['group_size']}", expected=f"{BLOCK_SIZE}")
    return _ALGORITHMS[name]


def _read_compressed(inner: Mapping[str, Any]) -> Serialized:
    groups = inner.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _refuse("config_groups", groups, "groups of layers, each with targets and weights")
    sparsity = inner.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        _refuse("sparsity_config", sparsity.get("format"), "dense weights")
    read = []
    for name, group in groups.items():
        targets = _names(group, "targets")
        # A class of layers is spelled as a class; every projection is a Linear.
        if kinds := [item for item in targets if item.isidentifier() and item[0].isupper() and item != "Linear"]:
            _refuse(f"config_groups.{name}.targets", kinds[0], "Linear, names, or patterns after re:")
        patterns = tuple("*" if item == "Linear" else item for item in targets)
        read.append((patterns, _compressed_scheme(name, group, str(group.get("format") or inner.get("format")))))
    # Names count before a class that holds them.
    read.sort(key=lambda item: item[0] == _EVERY_LAYER)
    kv_cache = "fp8" if inner.get("kv_cache_scheme") else None
    return Serialized("compressed-tensors", "config.json", tuple(read), excluded=_names(inner, "ignore"), kv_cache=kv_cache)


def _compressed_scheme(name: str, group: Mapping[str, Any], layout: str) -> Scheme:
    weights, inputs = group.get("weights"), group.get("input_activations")
    what = f"config_groups.{name}"
    if not isinstance(weights, Mapping) or (weights.get("num_bits"), weights.get("type")) != (8, "float"):
        bits, kind = (weights.get("num_bits"), weights.get("type")) if isinstance(weights, Mapping) else (None, None)
        _refuse(what, f"weights of {bits} bits, type {kind}, format {layout}", "weights of 8 bits, type float")
    static = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
    match weights.get("strategy"), weights.get("group_size"), weights.get("block_structure"):
        case "group", 32, _ if layout == "mxfp8-quantized" or str(weights.get("scale_dtype")).endswith("uint8"):
            return MXFP8
        case "tensor", _, _:
            return Scheme("fp8", "tensor", static=static)
        case "channel", _, _:
            return Scheme("fp8", "channel", static=static)
        case "block", _, [int(rows), int(columns)]:
            return Scheme("fp8", "block", (rows, columns), static)
        case strategy, size, structure:
            got = f"strategy {strategy}, group_size {size}, block_structure {structure}, format {layout}"
    return _refuse(f"{what}.weights", got, "MXFP8 in groups of 32, or one scale a tensor, channel or block")


def _fits(pattern: str, names: Sequence[str]) -> bool:
    if pattern == "*":
        return True
    if pattern.startswith("re:"):
        return any(re.match(pattern[3:], name) for name in names)
    if _is_pattern(pattern):
        return any(fnmatchcase(name, pattern) for name in names)
    return any(matches(pattern, name) for name in names)


def _is_pattern(name: str) -> bool:
    return any(letter in name for letter in "*?[")


def _names(values: Any, key: str) -> tuple[str, ...]:
    given = values.get(key) if isinstance(values, Mapping) else None
    if given is None:
        return ()
    if not isinstance(given, list | tuple) or not all(isinstance(item, str) and item for item in given):
        _refuse(key, given, "a list of names")
    for item in given:
        if item.startswith("re:"):
            try:
                re.compile(item[3:])
            except re.error as error:
                raise CheckpointError(f"quantization_config.{key}", got=f"{item} ({error})", expected="a pattern") from error
    return tuple(given)


def _choice(values: Mapping[str, Any], key: str, words: Sequence[str], default: str) -> str:
    value = values.get(key) or default
    if value not in words:
        _refuse(key, value, f"one of: {', '.join(words)}")
    return str(value)


def _refuse(key: str, got: object, expected: str, source: str = "quantization_config") -> NoReturn:
    raise CheckpointError(f"{source}.{key}", got=got, expected=expected)


def written_configuration(dialect: Dialect, kept: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What a checkpoint in MXFP8 says of itself.

    Args:
        dialect: in which words.
        kept: layers that are not quantized, by their full names.

    Returns:
        The `quantization_config` of `config.json`, and the content of `hf_quant_config.json` where the dialect has one.
    """
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "group",
        "group_size": BLOCK_SIZE,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    match dialect:
        case "native":
            block = {"weight_block_size": [1, BLOCK_SIZE], "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
            return {"quant_method": "mxfp8", **block, "modules_to_not_convert": list(kept)}, None
        case "modelopt":
            file = {"quant_algo": "MXFP8", "kv_cache_quant_algo": None, "group_size": BLOCK_SIZE, "exclude_modules": list(kept)}
            inner = {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": BLOCK_SIZE, "ignore": list(kept)}
            return inner, {"producer": {"name": "eightfold"}, "quantization": file}
        case "compressed-tensors":
            group = {"targets": ["Linear"], "weights": weights, "input_activations": weights | {"dynamic": True}}
            inner = {
                "quant_method": "compressed-tensors",
                "format": "mxfp8-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": group | {"format": "mxfp8-quantized"}},
                "ignore": list(kept),
                "kv_cache_scheme": None,
            }
            return inner, None
