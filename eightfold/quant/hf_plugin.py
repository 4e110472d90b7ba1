"""MXFP8 in transformers: the format, the policy and the files of Eightfold, for models that transformers runs.

    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=Mxfp8Config())     quantizes while it loads
    model.save_pretrained(folder)                                                             writes the native dialect
    model = AutoModelForCausalLM.from_pretrained(folder, config=stored_config(folder))        reads it again

It is for comparing with Eightfold, and for models that it does not serve. transformers has a quantizer of this format of its
own, under the name that files have. That one stays as it is: this one has another name in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, PrefixChange, revert_weight_conversion
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from eightfold.errors import CheckpointError, InputError
from eightfold.quant.checkpoints import MXFP8, Serialized, read_serialized, written_configuration
from eightfold.quant.hf_modules import SCALE_SUFFIX, hold, kind_of
from eightfold.quant.mxfp8 import SCALE_NAN, MXTensor, ScaleRule, quantize
from eightfold.quant.policy import Policy, Role

METHOD = "eightfold-mxfp8"
"""The name of the quantizer in memory. Files say "mxfp8", which transformers reads by itself where shapes permit."""
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16"}
# One tensor each in Eightfold, whose parts are quantized or kept together.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@register_quantization_config(METHOD)
class Mxfp8Config(QuantizationConfigMixin):
    """What to quantize, and how; what comes from a stored checkpoint replaces both arguments.

    Args:
        rule: "ceil" or "floor", as in `eightfold.quant.mxfp8`.
        ignored_layers: dotted names, or parts of them, of layers to keep; matched at the dots with the names that layers have
            in the files and in the model.

    Raises:
        InputError: a rule that does not exist, or names that are no list of names.
    """

    def __init__(self, rule: ScaleRule | str = ScaleRule.CEIL, ignored_layers: Sequence[str] = ()) -> None:
        rules = [item.value for item in ScaleRule]
        if not isinstance(rule, ScaleRule) and rule not in rules:
            raise InputError("rule", got=rule, expected=f"one of: {', '.join(rules)}")
        names = ignored_layers if isinstance(ignored_layers, list | tuple) else [None]
        if not all(isinstance(name, str) and name.strip(".") for name in names):
            raise InputError("ignored_layers", got=repr(ignored_layers), expected='a list of names, such as ["down_proj"]')
        self.quant_method: Any = METHOD
        self.rule = ScaleRule(rule)
        self.ignored_layers = tuple(ignored_layers)
        self.serialized: Serialized | None = None
        self.kept: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The configuration of a stored checkpoint, from the `quantization_config` of its `config.json`.

        Raises:
            CheckpointError: it says something else than MXFP8.
        """
        made = cls()
        made.serialized = read_serialized({"quantization_config": {**config_dict, "quant_method": "mxfp8"}})
        return (made, kwargs) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        """What `config.json` says of the model: the native dialect, with the layers that were kept."""
        return written_configuration("native", self.kept)[0]


def stored_config(folder: str | Path, **options: Any) -> PreTrainedConfig:
    """The configuration of a folder in the native dialect, with which `from_pretrained` reads it through this module.

    Args:
        folder: a path, or whatever `AutoConfig.from_pretrained` takes.
        options: handed to that.

    Raises:
        CheckpointError: the checkpoint is not in the native dialect.
    """
    config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **options)
    inner: dict[str, Any] = getattr(config, "quantization_config", None) or {}
    serialized = read_serialized({"quantization_config": inner})
    if serialized is None or (serialized.dialect, serialized.algorithms) != ("native", ("mxfp8",)):
        got = "no quantization" if serialized is None else f"{serialized.dialect}, {', '.join(serialized.algorithms)}"
        raise CheckpointError(
            f"quantization_config of {folder}",
            got=got,
            expected="MXFP8 in the native dialect",
            remedy="A checkpoint that is not quantized takes quantization_config=Mxfp8Config() instead.",
        )
    config.quantization_config = inner | {"quant_method": METHOD}
    return config


@dataclass(frozen=True, slots=True)
class _Layer:
    """A module that the policy decides on.

    Attributes:
        name: of the module.
        role: what it is.
        weights: names of its parameters.
        stored: the names in the files of the layers that it is made of.
        obstacle: why it cannot be quantized here, whatever the policy says.
    """

    name: str
    role: Role
    weights: tuple[str, ...]
    stored: tuple[str, ...]
    obstacle: str

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names that its weights may have in the files."""
        return (*(f"{name}.weight" for name in self.stored), *(f"{self.name}.{weight}" for weight in self.weights))


class _Quantize(ConversionOps):
    """What transformers calls for each whole parameter that arrives."""

    def __init__(self, quantizer: Mxfp8HfQuantizer) -> None:
        self._quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        """Elements and scales for each weight `[..., K]`."""
        made: dict[str, Any] = {}
        for name, value in input_dict.items():
            mx = self._quantizer.quantize(name, value[0] if isinstance(value, list) else value)
            made |= {name: nn.Parameter(mx.data, False), name + SCALE_SUFFIX: nn.Parameter(mx.scale, False)}
        return made


@register_quantizer(METHOD)
class Mxfp8HfQuantizer(HfQuantizer):
    """Quantizes a model as its weights arrive, or makes room for weights that are in MXFP8 already."""

    quantization_config: Mxfp8Config
    serialized_names: Any = MappingProxyType({"weight": ("weight", "weight" + SCALE_SUFFIX)})

    def __init__(self, quantization_config: Mxfp8Config, **options: Any) -> None:
        # A copy, since it will say which layers of this one model were kept.
        super().__init__(copy.deepcopy(quantization_config), **options)
        self._quantized: set[str] = set()
        self._fault: CheckpointError | None = None
        self._in_fp32: Any = None

    def is_serializable(self) -> bool:
        """It is, in the native dialect."""
        return True

    @property
    def is_trainable(self) -> bool:
        """It is not."""
        return False

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:  # noqa: ARG002
        """Whether a parameter arrives as values and is to be in MXFP8."""
        return not self.pre_quantized and param_name in self._quantized

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that does it."""
        return _Quantize(self)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """The dtype to cast a stored tensor to; bytes of scales stay bytes, whichever type they have in the file."""
        is_scale = "E8M0" in str(param.get_dtype() if hasattr(param, "get_dtype") else param.dtype).upper()
        return None if is_scale else super().get_new_dtype(converter, param, dtype)

    def quantize(self, name: str, weight: Tensor) -> MXTensor:
        """One weight `[..., K]`, on its own device. A fault waits for the end of loading, since transformers hides it."""
        try:
            return quantize(weight, self.quantization_config.rule)
        except ValueError as error:
            self._fault = self._fault or CheckpointError(f"tensor {name}", got=str(error), expected="finite values")
            return quantize(torch.zeros_like(weight))

    def _process_model_before_weight_loading(
        self, model: Any, dtype: Any = None, checkpoint_files: Sequence[str] | None = None, **__: Any
    ) -> Any:
        """Replace the parameters, before there are any weights."""
        # What would be found anew for each name otherwise; loading replaces it by what it used.
        model._weight_conversions = [
            x for x in get_model_conversion_mapping(model, add_legacy=False) if type(x) is not PrefixChange
        ]
        config, files = self.quantization_config, _headers(checkpoint_files or ())
        layers = {layer.name: layer for layer in _layers(model)}
        if not any(layer.role in (Role.LINEAR, Role.EXPERTS) for layer in layers.values()):
            raise InputError("model", got=type(model).__name__, expected="one with layers of the class Linear, or with experts")
        policy = Policy("mxfp8", config.ignored_layers)
        policy.check_ignored(x for layer in layers.values() if layer.role.quantizable for x in (*layer.stored, layer.name))
        # Whatever else is a matrix is no layer to a reader of the files: routers and embeddings.
        known = {f"{layer.name}.{weight}" for layer in layers.values() for weight in layer.weights}
        other = [name for name, value in model.named_parameters() if value.ndim == 2 and name not in known]
        kept = {item for name in other for item in (name.removesuffix(".weight"), *_stored_names(model, name))}
        for layer in layers.values():
            if self._is_quantized(layer, layers, policy, files):
                module = model.get_submodule(layer.name)
                hold(module, layer.weights)
                module._is_hf_initialized = True  # what is missing is refused later, and not made up
                self._quantized.update(f"{layer.name}.{weight}" for weight in layer.weights)
            else:
                kept.update((*layer.stored, layer.name))
        config.kept = tuple(sorted(kept))
        self._in_fp32 = model._keep_in_fp32_modules_strict
        if not self.pre_quantized:
            # Values of another dtype than the model's are quantized as they are in the files, and not rounded twice.
            same = {x.name for x in layers.values() if {files.get(y) for y in x.tensors} - {None} == {_DTYPES.get(dtype)}}
            finer = {name for name in self._quantized if name.rpartition(".")[0] not in same}
            model._keep_in_fp32_modules_strict = {*(self._in_fp32 or ()), *finer}
        return model

    def _is_quantized(self, layer: _Layer, layers: Mapping[str, _Layer], policy: Policy, files: Mapping[str, str]) -> bool:
        elements = next((name for name in layer.tensors if files.get(name, "").startswith("F8")), None)
        serialized = self.quantization_config.serialized
        if serialized is None:
            parent, _, leaf = layer.name.rpartition(".")
            group = next((group for group in _FUSED if leaf in group), (leaf,))
            parts = [layers[name] for item in group if (name := f"{parent}.{item}".lstrip(".")) in layers]
            names = [name for part in parts for name in part.stored]
            wanted = all(policy.decide(layer.role, x).quantized for x in (names, [part.name for part in parts]))
        else:
            listed = [serialized.scheme_of((name, layer.name)) == MXFP8 for name in layer.stored]
            wanted = layer.role.quantizable and any(listed)
            if wanted and not all(listed):
                raise CheckpointError(f"layer {layer.name}", got="exclusions of some of its parts", expected="all or none")
        if elements is not None and not (wanted and serialized):
            raise CheckpointError(f"tensor {elements}", got=files[elements], expected="values, by what config.json says of it")
        if wanted and layer.obstacle:
            remedy = "" if serialized else f'ignored_layers=["{layer.name}"] keeps it as it is.'
            raise InputError(
                f"layer {layer.name}", got=layer.obstacle, expected="a Linear, or experts [E, N, K]", remedy=remedy
            )
        return wanted

    def _process_model_after_weight_loading(self, model: Any, **__: Any) -> Any:
        """Look at what arrived."""
        model._keep_in_fp32_modules_strict = self._in_fp32
        if self._fault is not None:
            raise self._fault
        for path in sorted({name.rpartition(".")[0] for name in self._quantized}):
            for part, value in model.get_submodule(path).named_parameters(recurse=False):
                if not getattr(value, "_is_hf_initialized", False):
                    raise CheckpointError(f"tensor {path}.{part}", got="none", expected="elements, scales and bias, where due")
        for name in sorted(self._quantized):
            path, _, weight = name.rpartition(".")
            module = model.get_submodule(path)
            getattr(module, weight).requires_grad_(False)
            scale = getattr(module, weight + SCALE_SUFFIX).detach().view(torch.uint8)
            if bool((scale == SCALE_NAN).any()):
                raise CheckpointError(f"tensor {name}{SCALE_SUFFIX}", got="NaN, the byte 255", expected="finite scales")
            setattr(module, weight + SCALE_SUFFIX, nn.Parameter(scale, False))
        if not self.pre_quantized:
            # When the model is saved, names of scales follow those of weights, although no scales were read.
            update: Any = self.update_weight_conversions
            model._weight_conversions = update(model._weight_conversions, model)
        return model


def _headers(files: Sequence[str]) -> dict[str, str]:
    """Names and dtypes of the tensors in safetensors files, such as "BF16"."""
    found: dict[str, str] = {}
    for file in (file for file in files if str(file).endswith(".safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return found


def _layers(model: Any) -> list[_Layer]:
    """The modules that could be quantized, and those of their kind that could not."""
    found = []
    for name, module in model.named_modules():
        role, weights, obstacle = kind_of(name, module, model.get_output_embeddings())
        if weights:
            stored = tuple(item for weight in weights for item in _stored_names(model, f"{name}.{weight}"))
            found.append(_Layer(name, role, weights, stored, obstacle))
    return found


def _stored_names(model: Any, name: str) -> tuple[str, ...]:
    """The layers that a parameter is made of, by their names in the files that transformers would save."""
    return tuple(x.removesuffix(".weight") for x in revert_weight_conversion(model, {name: model.get_parameter(name)}))
