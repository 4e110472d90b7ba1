"""The import graph of a package, read from its sources, and the rules that it must keep."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# Lower layers first. A module may import from its own layer and from those named; the longest prefix of its name decides.
BASE = ("errors", "types", "config", "_version")
BOOKS = ("cache.blocks", "cache.prefix", "cache.states", "cache.manager")
WHOLE = ("quant", "kernels", "layers", "models", "hub", "engine", "text", "llm", "memory", "evaluate", "quantize")
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "errors": (),
    "_version": (),
    "types": ("errors",),
    "config": ("errors", "types"),
    "memory": (),
    "quant": BASE,
    "kernels": (*BASE, "quant"),
    "layers": (*BASE, "quant", "kernels"),
    "models": (*BASE, "kernels", "layers"),
    "models.checkpoint": (*BASE, "quant"),
    "models.stored": (*BASE, "quant", "models.checkpoint"),
    "models.matching": (*BASE, "quant", "layers", "models"),
    "models.loader": (*BASE, "quant", "kernels", "layers", "models"),
    "models.dummy": (*BASE, "quant", "kernels", "layers", "models"),
    "hub": BASE,
    "cache": BASE,
    "cache.pools": (*BASE, "layers"),
    "text": ("errors", "types"),
    "detokenizer": ("errors", "types", "text"),
    "grammar": ("errors", "types", "text"),
    "requests": ("errors", "types"),
    "engine": (*BASE, *BOOKS),
    "engine.loading": (*BASE, "quant", "kernels", "layers", "models", "hub"),
    "engine.runner": (*BASE, "kernels", "layers", "cache.pools", "engine.loading", "engine.sampler", "engine.constraints"),
    "engine.engine": (*BASE, *BOOKS, "engine", "requests"),
    "engine.constraints": BASE,
    "engine.sampler": (*BASE, "engine.constraints"),
    "evaluate": (*BASE, "quant", "kernels", "layers", "models"),
    "inspection": (*BASE, "quant", "kernels", "layers", "models", "hub"),
    "comparison": (*BASE, "quant", "models"),
    "serialization": (*BASE, "quant", "models"),
    "quality": (*BASE, "quant", "kernels", "models", "hub", "evaluate", "inspection", "comparison"),
    "budget": (*BASE, "quant", "layers", "models", "evaluate", "quality"),
    "quantize": (*BASE, "quant", "kernels", "models", "hub"),
    "llm": (*BASE, "engine", "hub", "text", "detokenizer", "grammar", "requests"),
    "server": (*BASE, "requests", "text", "detokenizer", "grammar"),
    "server.inprocess": (*BASE, "requests", "text", "engine", "server"),
    "server.engine_loop": (*BASE, "engine", "server"),
    "server.engine_process": (*BASE, "server", "server.engine_loop"),
    "server.null_engine": (*BASE, *BOOKS, "engine", "hub", "server"),
    "server.real_engine": (*BASE, "engine", "grammar", "inspection", "text", "server"),
    "batch": (*BASE, "llm", "server"),
    "cli": (*BASE, *WHOLE, "batch", "server", "inspection", "serialization", "comparison", "quality", "budget", "benchmarks"),
    "benchmarks": (*BASE, *WHOLE, "quality", "budget"),
    "__init__": ("llm", *BASE),
    "__main__": ("cli",),
}
CORE_LIBRARIES = frozenset({"torch", "triton", "numpy", "safetensors", "transformers", "tokenizers", "huggingface_hub"})
FURTHER_LIBRARIES: Mapping[str, frozenset[str]] = {
    "kernels.vendor": frozenset({"flashinfer"}),
    "grammar": frozenset({"llguidance"}),
    "hub.gguf_folder": frozenset({"gguf"}),
    "cli": frozenset({"typer", "rich", "click"}),
    "server": frozenset({"fastapi", "msgspec", "prometheus_client", "pydantic", "starlette", "uvicorn", "uvloop", "zmq"}),
    "batch": frozenset({"msgspec"}),
    "benchmarks": frozenset({"llama_cpp", "mamba_ssm", "matplotlib", "rich"}),
}
# The engine knows no text, so those who do are few.
TEXT_LIBRARIES = frozenset({"transformers", "tokenizers"})
TEXT_ALLOWED = ("text", "hub", "evaluate", "benchmarks", "quant.hf_plugin")
WITHOUT_TORCH = (
    "engine.scheduler",
    "cache.blocks",
    "cache.prefix",
    "cache.states",
    "cache.manager",
    "errors",
    "types",
    "config",
    "text",
)
LOCAL_IMPORTS_ALLOWED = ("cli", "kernels.vendor", "quant.hf_plugin")
# Only kernels/ asks what the hardware is; benchmarks say where they ran.
HARDWARE_QUESTIONS = ("torch.cuda", "torch.backends", "torch.version", "platform.machine", "platform.processor", "os.uname")
HARDWARE_ALLOWED = ("kernels", "benchmarks")
# Only quant/ knows the bit layout, and kernels repack it.
LAYOUT_WORDS = frozenset({"float8_e4m3fn", "float8_e8m0fnu", "E4M3_MAX", "SCALE_BIAS", "SCALE_NAN"})
LAYOUT_ALLOWED = ("quant", "kernels", "benchmarks")


@dataclass(frozen=True)
class Edge:
    """One import: who, what (dotted, without the package's name for our own), on which line, and whether in a function."""

    importer: str
    imported: str
    line: int
    is_ours: bool
    is_local: bool

    def __str__(self) -> str:
        return f"{self.importer} line {self.line} imports {self.imported}"


def module_names(package: Path) -> dict[str, Path]:
    """Every module of a package, by its dotted name below the package; a folder's `__init__` has the folder's name."""
    found: dict[str, Path] = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = file
    return found


def edges(package: Path) -> list[Edge]:
    """Every import in the package: at the top, inside functions, for type checking, and by `import_module` of a plain name."""
    names = module_names(package)
    found: list[Edge] = []
    for importer, file in names.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        local = {id(child) for node in functions for child in ast.walk(node)}
        for node in ast.walk(tree):
            named = [*_named_at_run_time(node)]
            for target in (*_targets(node, _parent(importer, file, package.name), names, package.name), *named):
                is_ours = target == package.name or target.startswith(f"{package.name}.")
                imported = target.removeprefix(package.name).lstrip(".") or "__init__" if is_ours else target
                found.append(Edge(importer, imported, getattr(node, "lineno", 0), is_ours, id(node) in local and not named))
    return found


def _parent(importer: str, file: Path, package: str) -> str:
    """The dotted folder of a module, from which its relative imports start."""
    inner = [] if importer == "__init__" else importer.split(".")
    return ".".join([package, *(inner if file.stem == "__init__" else inner[:-1])])


def _targets(node: ast.AST, parent: str, names: Mapping[str, Path], package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        start = parent.split(".")[: len(parent.split(".")) + 1 - node.level] if node.level else []
        module = ".".join([*start, *([node.module] if node.module else [])])
        for alias in node.names:
            submodule = f"{module}.{alias.name}"
            yield submodule if submodule.removeprefix(f"{package}.") in names else module


def _named_at_run_time(node: ast.AST) -> Iterator[str]:
    """What a call such as `import_module("triton")` imports: a library that may be missing, so not counted as local."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        yield from (item.value for item in node.args[:1] if isinstance(item, ast.Constant) and isinstance(item.value, str))


def rule_for(module: str) -> str:
    """The key of MAY_IMPORT for a module: its longest prefix there."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in MAY_IMPORT:
            return ".".join(parts[:length])
    raise KeyError(f"{module} stands in no layer: give it a place in MAY_IMPORT")


def _within(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def direction_faults(package: Path) -> list[str]:
    """Imports that run against the order of the layers."""
    faults = []
    for edge in edges(package):
        own = rule_for(edge.importer)
        if edge.is_ours and not _within(edge.imported, MAY_IMPORT[own]) and rule_for(edge.imported) != own:
            faults.append(f"{edge}, which {own} may not")
    return faults


def cycles(package: Path) -> list[str]:
    """Modules that import themselves through others."""
    graph: dict[str, set[str]] = {}
    for edge in edges(package):
        if edge.is_ours:
            graph.setdefault(edge.importer, set()).add(edge.imported)
    faults = []
    for module, imported in graph.items():
        seen: set[str] = set()
        front = set(imported)
        while front:
            seen |= front
            front = {target for name in front for target in graph.get(name, ())} - seen
        if module in seen:
            faults.append(f"{module} imports itself through others")
    return faults


def torch_faults(package: Path) -> list[str]:
    """Modules that must do without torch and import it, directly or through others."""
    # Importing a module runs the folders that it lies in.
    graph = {name: {name.rpartition(".")[0]} - {""} for name in module_names(package)}
    for edge in edges(package):
        graph[edge.importer].add(edge.imported if edge.is_ours else edge.imported.split(".")[0])
    faults = []
    for module in module_names(package):
        if _within(module, WITHOUT_TORCH):
            seen, front = {module}, set(graph.get(module, ()))
            while front:
                seen |= front
                front = {target for name in front for target in graph.get(name, ())} - seen
            if "torch" in seen:
                faults.append(f"{module} imports torch, directly or through others")
    return faults


def library_faults(package: Path) -> list[str]:
    """Libraries beyond those that the core runs with, where they are not allowed."""
    faults = []
    for edge in edges(package):
        library = edge.imported.split(".")[0]
        if library in TEXT_LIBRARIES and not edge.is_ours and not _within(edge.importer, TEXT_ALLOWED):
            faults.append(f"{edge}, a library for text")
        if edge.is_ours or library in sys.stdlib_module_names or library in CORE_LIBRARIES:
            continue
        allowed = [name for prefix, names in FURTHER_LIBRARIES.items() if _within(edge.importer, (prefix,)) for name in names]
        if library not in allowed:
            faults.append(f"{edge}, a library that the core does without")
    return faults


def local_import_faults(package: Path) -> list[str]:
    """Imports inside functions, where they are not allowed."""
    return [
        f"{edge} inside a function"
        for edge in edges(package)
        if edge.is_local and not _within(edge.importer, LOCAL_IMPORTS_ALLOWED)
    ]


def hardware_faults(package: Path) -> list[str]:
    """Questions about the hardware outside kernels/, whether by attribute or by import."""
    faults = [
        f"{module} line {line} imports {name}, which asks about the hardware"
        for module, line, name in _imported_names(package)
        if _within(name, HARDWARE_QUESTIONS) and not _within(module, HARDWARE_ALLOWED)
    ]
    for module, line, text in _attributes(package):
        if text in HARDWARE_QUESTIONS and not _within(module, HARDWARE_ALLOWED):
            faults.append(f"{module} line {line} asks {text}")
    return faults


def layout_faults(package: Path) -> list[str]:
    """Words of the bit layout outside quant/ and kernels/."""
    return [
        f"{module} line {line} knows {text}"
        for module, line, text in _attributes(package)
        if text.split(".")[-1] in LAYOUT_WORDS and not _within(module, LAYOUT_ALLOWED)
    ]


def _attributes(package: Path) -> Iterator[tuple[str, int, str]]:
    """Every name and dotted attribute that a module uses, with its line."""
    for module, file in module_names(package).items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.Name):
                yield module, node.lineno, ast.unparse(node)


def _imported_names(package: Path) -> Iterator[tuple[str, int, str]]:
    """Every module, and every name out of a module, that a module imports, with its line."""
    for module, file in module_names(package).items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                yield from ((module, node.lineno, f"{start}{alias.name}") for alias in node.names)


CHECKS = (
    direction_faults,
    cycles,
    torch_faults,
    library_faults,
    local_import_faults,
    hardware_faults,
    layout_faults,
)
