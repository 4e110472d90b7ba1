"""The contracts of operations: every registered backend has their shape, their texts are whole, and their formulas hold."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from eightfold.kernels import operations, selection
from eightfold.kernels.hardware import detect
from eightfold.kernels.operations import (
    Activation,
    AttentionBackend,
    AttentionSpec,
    BatchMetadata,
    FusedBackend,
    LinearBackend,
    LinearSpec,
    LowLatencyBackend,
    MambaBackend,
    MoeBackend,
    MoeSpec,
    Routing,
)
from eightfold.kernels.reference_mixers import GeneralProduct, activate
from eightfold.kernels.registry import Hardware
from tests.kernels.mamba_oracle import HEADS, filters, metadata, randn, scan_of, spec_of
from tests.kernels.moe_oracle import call_of, dense, experts_of

TABLES: dict[type, Mapping[str, tuple[Any, ...]]] = {
    LinearBackend: selection.LINEAR,
    AttentionBackend: selection.ATTENTION,
    FusedBackend: selection.FUSED,
    LowLatencyBackend: selection.LOW_LATENCY,
    MoeBackend: selection.MOE,
    MambaBackend: selection.MAMBA,
}
REGISTERED = [
    pytest.param(protocol, backend, id=f"{protocol.__name__} {device} {backend.name}")
    for protocol, table in TABLES.items()
    for device, row in table.items()
    for backend in row
]
PLAIN_DATA: list[Any] = [
    item for item in vars(operations).values() if dataclasses.is_dataclass(item) and item.__module__ == operations.__name__
]
SPECS: dict[type, Any] = {
    LinearBackend: LinearSpec("layer", 33, 7, "mxfp8", torch.float32),
    AttentionBackend: AttentionSpec(6, 3, 20, 0.3, 5, torch.float32),
    FusedBackend: torch.float32,
    LowLatencyBackend: LinearSpec("layer", 33, 7, "mxfp8", torch.float32),
    MoeBackend: experts_of(gated=True).spec,
    MambaBackend: spec_of(),
}
CPU = detect("cpu")


def on_this_cpu(protocol: type) -> list[Any]:
    """The backends of the CPU's row that take fp32 here."""
    return [backend for backend in TABLES[protocol]["cpu"] if backend.declines(SPECS[protocol], CPU) is None]


# Shape.


def methods(protocol: type) -> Iterator[tuple[str, Any]]:
    return ((name, item) for name, item in vars(protocol).items() if inspect.isfunction(item) and not name.startswith("_"))


def departures(protocol: type, backend: object) -> list[str]:
    """Where a backend has not the shape of a protocol: its attributes, its methods' parameters and their types."""
    found = [
        f"{name} is no {kind.__name__}"
        for name, kind in get_type_hints(protocol).items()
        if not isinstance(getattr(backend, name, None), kind)
    ]
    for name, asked in methods(protocol):
        given = getattr(type(backend), name, None)
        if given is None:
            found.append(f"no {name}")
            continue
        shapes = [
            [(item.name, item.kind, item.default) for item in inspect.signature(function).parameters.values()]
            for function in (asked, given)
        ]
        if shapes[0] != shapes[1]:
            found.append(f"{name} takes {[item[0] for item in shapes[1]]}, not {[item[0] for item in shapes[0]]}")
            continue
        wanted, hints = get_type_hints(asked), get_type_hints(given)
        found += [
            f"{name}: {item} is {hints.get(item)}, not {kind}"
            for item, kind in wanted.items()
            if kind is not Any and hints.get(item) != kind and not (hints.get(item) is object and item != "return")
        ]
    prepare, run = (getattr(type(backend), name, None) for name in ("prepare", "run"))
    if prepare is not None and run is not None and not found:
        makes, takes = get_type_hints(prepare)["return"], get_type_hints(run)["prepared"]
        found += [] if makes == takes else [f"prepare makes {makes} and run takes {takes}"]
    return found


@pytest.mark.parametrize(("protocol", "backend"), REGISTERED)
def test_a_registered_backend_has_the_shape_of_its_protocol(protocol: type, backend: object) -> None:
    assert departures(protocol, backend) == []


def test_a_backend_of_another_shape_is_found() -> None:
    class Wrong:
        name = 3

        def declines(self, spec: LinearSpec, hardware: Hardware) -> str:
            return ""

        def prepare(self, bias: Tensor | None, weight: Tensor) -> int:
            return 0

    class Inconsistent(GeneralProduct):
        def run(self, x: Tensor, prepared: int) -> Tensor:  # type: ignore[override]
            return x

    assert departures(LinearBackend, Wrong()) == [
        "name is no str",
        "declines: return is <class 'str'>, not str | None",
        "prepare takes ['self', 'bias', 'weight'], not ['self', 'weight', 'bias']",
        "no run",
    ]
    assert departures(LowLatencyBackend, Inconsistent()) == ["prepare makes <class 'NoneType'> and run takes <class 'int'>"]


def test_every_operation_has_a_table_and_every_table_the_same_devices() -> None:
    protocols = {item for name, item in vars(operations).items() if name.endswith("Backend")}
    assert protocols == set(TABLES)
    tables = [item for item in vars(selection).values() if isinstance(item, types.MappingProxyType)]
    assert {id(table) for table in tables} == {id(table) for table in TABLES.values()}
    assert {tuple(table) for table in tables} == {("cpu", "cuda")}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("protocol", TABLES)
def test_names_in_a_row_differ_and_its_last_takes_everything(protocol: type, device: str) -> None:
    row = TABLES[protocol][device]
    assert len({backend.name for backend in row}) == len(row)
    odd = Hardware(torch.device(device), "a machine", (5, 0) if device == "cuda" else None, frozenset(), 0, 1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        spec = SPECS[protocol]
        spec = dtype if protocol is FusedBackend else dataclasses.replace(spec, activation_dtype=dtype)
        assert row[-1].declines(spec, odd) is None


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        (LinearBackend, selection.UNBUILT_LINEAR),
        (MoeBackend, selection.UNBUILT_MOE),
        (AttentionBackend, selection.UNBUILT_ATTENTION),
    ],
)
def test_a_word_that_is_not_built_names_no_backend(protocol: type, words: frozenset[str]) -> None:
    assert not words & {backend.name for row in TABLES[protocol].values() for backend in row}


# Plain data.


@pytest.mark.parametrize("kind", PLAIN_DATA)
def test_plain_data_is_frozen_and_has_no_other_attributes(kind: Any) -> None:
    item = kind(*(None for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(item, dataclasses.fields(kind)[0].name, 1)
    assert not hasattr(item, "__dict__")


def test_what_a_caller_may_leave_out() -> None:
    defaults = {
        (kind.__name__, field.name): field.default
        for kind in PLAIN_DATA
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
    assert defaults == {
        ("LinearSpec", "weight"): None,
        ("Routing", "scale"): 1.0,
        ("Routing", "num_groups"): 1,
        ("Routing", "topk_groups"): 1,
        ("MoeSpec", "weights"): None,
        ("BatchMetadata", "state"): None,
    }


def listed(text: str, title: str) -> list[str]:
    """Names in one section of a docstring."""
    section = re.search(rf"^{title}:\n((?:    .*\n?)+)", text, re.MULTILINE)
    return re.findall(r"^    (\w+):", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("kind", [kind for kind in PLAIN_DATA if kind is not BatchMetadata])
def test_every_attribute_is_described(kind: Any) -> None:
    assert listed(inspect.getdoc(kind) or "", "Attributes") == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("protocol", TABLES)
def test_arguments_are_described_as_they_are_taken(protocol: type) -> None:
    """A method that describes some of its arguments describes all, but for those that its sentence has named."""
    for name, method in methods(protocol):
        text = inspect.getdoc(method) or ""
        assert text, name
        described = listed(text, "Args")
        taken = [item for item in inspect.signature(method).parameters if item != "self"]
        assert not described or described == [item for item in taken if item in described]
        for left_out in set(taken) - set(described) if described else ():
            assert (protocol, name, left_out) in {
                (AttentionBackend, "run", "metadata"),
                (AttentionBackend, "run", "spec"),
            }


# Formulas.

NOTATION = (
    ("²", "**2"),
    (" Wᵀ", " @ W.T"),
    (" Gᵀ", " @ G.T"),
    ("x[h] b[g]ᵀ", "outer(x[h], b[g])"),
    ("state[h] c[g]", "state[h] @ c[g]"),
    ("h / (H / G)", "h // (H // G)"),
    ("sum over j of weight[c, j] * x[t - (kernel - 1) + j, c]", "sum(weight[c, j] * x[t - (kernel - 1) + j, c] for j in taps)"),
)
FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "outer": torch.outer,
    "mean": lambda x: x.mean(dim=-1, keepdim=True),
    "max": lambda x, least: x.clamp(min=least),
    "clamp": lambda x, limits: x.clamp(*limits),
}


def formula(text: str, written: str, **values: Any) -> Any:
    """The value of a formula that stands in a text, from tensors in fp64."""
    assert written in " ".join(text.split())
    expression = functools.reduce(lambda so_far, pair: so_far.replace(*pair), NOTATION, written)
    wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in values.items()}
    return eval(expression, {"__builtins__": {"sum": sum}} | FUNCTIONS | wide)


def doc(item: object) -> str:
    return inspect.getdoc(item) or ""


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-6)


def act(activation: Activation, x: Tensor) -> Tensor:
    """By the text under the name `Activation`."""
    (text,) = re.findall(r'^Activation: .*\n"""(.*)"""$', inspect.getsource(operations), re.MULTILINE)
    formulas = dict(part.rstrip(".").split("(x) = ") for part in text.split("; "))
    assert tuple(formulas) == get_args(Activation)
    value: Tensor = formula(text, formulas[activation], x=x)
    return value


@pytest.mark.parametrize("backend", on_this_cpu(LinearBackend), ids=lambda backend: backend.name)
def test_linear_is_its_formula(backend: LinearBackend) -> None:
    x, weight, bias = randn(5, 7), randn(33, 7, seed=1), randn(33, seed=2)
    assert_close(backend.run(x, backend.prepare(weight, bias)), formula(doc(LinearSpec), "x Wᵀ + b", x=x, W=weight, b=bias))


@pytest.mark.parametrize("backend", on_this_cpu(FusedBackend), ids=lambda backend: backend.name)
def test_the_small_operations_are_their_formulas(backend: FusedBackend) -> None:
    x, other, weight = 3 * randn(5, 24), randn(5, 24, seed=1), randn(24, seed=2)

    def norm(x: Tensor) -> Tensor:
        value: Tensor = formula(doc(FusedBackend.rms_norm), "x / sqrt(mean(x²) + eps) * weight", x=x, eps=1e-2, weight=weight)
        return value

    assert_close(backend.rms_norm(x, weight, 1e-2), norm(x))
    total = formula(doc(FusedBackend.add_rms_norm), "residual + x", residual=other, x=x)
    found = backend.add_rms_norm(x, other.clone(), weight, 1e-2)
    assert_close(found[0], norm(total))
    assert_close(found[1], total)
    gated = formula(doc(FusedBackend.gated_rms_norm), "x * silu(gate)", x=x, gate=other)
    assert_close(backend.gated_rms_norm(x, other, weight, 1e-2, 24), norm(gated))
    product = formula(doc(FusedBackend.silu_and_mul), "silu(gate) * up", gate=x[:, :12], up=x[:, 12:])
    assert_close(backend.silu_and_mul(x), product)
    assert_close(backend.relu2(x), formula(doc(FusedBackend.relu2), "max(x, 0)²", x=x))
    assert_close(backend.relu2(x), act("relu2", x))


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("gated", [False, True])
def test_what_is_between_an_experts_products_is_its_formula(gated: bool, activation: Activation) -> None:
    spec = dataclasses.replace(experts_of(gated=gated).spec, activation=activation)
    h, width = randn(5, 56), 28 if gated else 56
    written = "act(h[:I]) * h[I:]" if gated else "act(h)"
    assert f"a(h) = {written}" in " ".join(doc(MoeSpec).split())
    for row in h:
        expected = formula(doc(MoeSpec), written, h=row, I=width, act=functools.partial(act, activation))
        assert_close(activate(row[None], spec)[0], expected)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("backend", on_this_cpu(MoeBackend), ids=lambda backend: backend.name)
def test_experts_sum_as_their_formula_says(backend: MoeBackend, gated: bool) -> None:
    assert "y = sum over a token's experts e of weight * W2[e] a(W13[e] x)" in doc(MoeSpec)
    call = call_of(experts_of(gated=gated), 5)
    w13, w2 = dense(call.experts.w13).double(), dense(call.experts.w2).double()
    for token, row in enumerate(call.run(backend)):
        expected = torch.zeros_like(row).double()
        for expert, weight in zip(call.ids[token].tolist(), call.weights[token], strict=True):
            h = (w13[expert] @ call.x[token].double())[None]
            expected += weight * (w2[expert] @ activate(h, call.experts.spec)[0])
        torch.testing.assert_close(row, expected.float(), rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("backend", on_this_cpu(MambaBackend), ids=lambda backend: backend.name)
def test_the_convolution_is_its_formula(backend: MambaBackend) -> None:
    (weight, bias), x, kernel = filters(5, 4, torch.float32, has_bias=True), randn(7, 5), 4
    states = randn(1, 5, kernel - 1, seed=3)
    before = states[0].T.clone()
    assert bias is not None
    found = backend.conv(x, weight, bias, states, metadata([7], [0], is_new=False), spec_of())
    written = "silu(bias[c] + sum over j of weight[c, j] * x[t - (kernel - 1) + j, c])"
    inputs = torch.cat((before, x))
    expected = [
        [
            formula(doc(MambaBackend.conv), written, x=inputs, t=t, c=c, weight=weight, bias=bias, kernel=kernel, taps=range(4))
            for c in range(5)
        ]
        # The inputs before the first token come with the state.
        for t in range(kernel - 1, kernel - 1 + 7)
    ]
    assert_close(found, torch.tensor(expected))
    assert torch.equal(states[0].T, inputs[-(kernel - 1) :])


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("backend", on_this_cpu(MambaBackend), ids=lambda backend: backend.name)
def test_the_scan_is_its_formula(backend: MambaBackend, num_groups: int) -> None:
    spec, text = spec_of(num_groups, limits=(0.3, 1.5)), doc(MambaBackend.scan)
    scan, states = scan_of(7, spec), randn(1, HEADS, spec.head_dim, spec.state_size, seed=9)
    state = states[0].double()
    found = scan.run(backend, states, metadata([7], [0], is_new=False), spec)
    for token in range(7):
        for h in range(HEADS):
            g = formula(text, "h / (H / G)", h=h, H=HEADS, G=num_groups)
            step = formula(
                text,
                "clamp(softplus(dt + dt_bias), dt_limits)",
                dt=scan.dt[token, h],
                dt_bias=scan.dt_bias[h],
                dt_limits=spec.dt_limits,
            )
            names = {"h": h, "g": g, "step": step, "a": scan.a, "d": scan.d, "x": scan.x[token]}
            names |= {"b": scan.b[token], "c": scan.c[token], "state": state}
            state[h] = formula(text, "exp(step * a[h]) * state[h] + step * x[h] b[g]ᵀ", **names)
            assert_close(found[token, h], formula(text, "state[h] c[g] + d[h] * x[h]", **names))
    assert_close(states[0], state)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("backend", on_this_cpu(FusedBackend), ids=lambda backend: backend.name)
def test_weights_of_routing_are_their_formula(backend: FusedBackend, scoring: Literal["softmax", "sigmoid"]) -> None:
    assert scoring in " ".join(doc(Routing).split())
    x, gate = randn(9, 12), randn(6, 12, seed=1)
    logits = formula(doc(Routing), "x Gᵀ", x=x, G=gate)
    scores = logits.softmax(1) if scoring == "softmax" else logits.sigmoid()
    for normalize in (False, True):
        routing = Routing(6, 2, scoring, normalize, scale=2.5)
        ids, weights = backend.route(x, gate, torch.zeros(6), routing)
        chosen = scores.gather(1, ids)
        assert_close(weights, 2.5 * chosen / (chosen.sum(1, keepdim=True) if normalize else 1))
        assert torch.equal(ids, scores.topk(2, dim=1).indices)


# Few tokens.


def test_the_backend_that_leaves_all_to_the_general_product_computes_none() -> None:
    general = GeneralProduct()
    assert general.max_tokens == 0
    with pytest.raises(RuntimeError, match=r"prepares \(33, 7\) for its general product itself, bias True"):
        general.prepare(randn(33, 7), randn(33))
    with pytest.raises(RuntimeError, match=r"runs its general product itself: \(5, 7\)"):
        general.run(randn(5, 7), None)
