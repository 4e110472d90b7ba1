"""Declares the CPU's native kernels. They are optional: without a C++ compiler the install goes on, and `doctor` says so."""

import sys
from pathlib import Path

from setuptools import Extension, setup

sources = sorted(str(path) for path in Path("eightfold/kernels/csrc").glob("*.cpp"))
headers = sorted(str(path) for path in Path("eightfold/kernels/csrc").glob("*.h"))
# The sources choose their instructions function by function, so no flag here names a processor.
# GCC warns of the deliberately undefined operands in its own AVX-512 headers.
quiet = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
unix = ["-std=c++17", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", *quiet]
flags = ["/std:c++17", "/O2"] if sys.platform == "win32" else unix

setup(
    ext_modules=[
        Extension(
            "eightfold.kernels._native",
            sources=sources,
            depends=headers,
            extra_compile_args=flags,
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
