"""Lists the names of environment variables that are read only when a process starts or imports torch.

A rank is forked from a process that has already imported torch. Variables that torch, Python or their libraries read at
import must be in the environment of that process; in the rank it would be too late. So a job that sets such a variable
gets its own fork server, which is started with it.

The names are collected from torch's modules (tests/agent/launcher/test_import_variables.py checks all of them). If the
installed torch reads further names, the rank's log lists them.
"""

from __future__ import annotations

_PYTHON = ("PYTHON", "_PYTHON", "LC_", "LANG")
_LIBRARIES = (
    *("LD_", "GLIBC_", "MALLOC_", "ATEN_", "MKL_", "OPENBLAS_", "OMP_", "KMP_", "GOMP_", "DNNL_", "ONEDNN_"),
    *("NPY_", "NUMPY_", "SYMPY_", "MPMATH_", "SAGE_", "FSSPEC_", "TRITON_"),
)
_TORCH = (
    *("TORCH", "PYTORCH", "AOT_", "AOTINDUCTOR_", "INDUCTOR_", "PT2_", "FX_", "LOG_", "COMPILE_STROBELIGHT_"),
    *("CUTEDSL_", "CUTLASS_", "DUMP_AOTI_", "ENABLE_", "FAKE_", "FLYDSL_", "PARTITIONER_", "UNSAFE_SKIP_"),
)
BEGINNINGS = _PYTHON + _LIBRARIES + _TORCH
"""Beginnings of the names of such variables."""

NAMES = frozenset(("CI", "CXX", "LOGLEVEL", "HOME", "TMPDIR", "TEMP", "TMP", "USER", "USERNAME", "LOGNAME", "LNAME"))
"""Complete names of such variables. Torch and the standard library make paths and names from them, once."""

BY_THE_RANK = frozenset({"OMP_NUM_THREADS", "TORCH_CUDA_SANITIZER"})
"""Exceptions: a rank applies these itself after its fork, since a fork server has one thread and does not use CUDA."""


def read_at_import(name: str) -> bool:
    """Whether a variable has an effect in ranks only if their fork server was started with it."""
    return name not in BY_THE_RANK and (name in NAMES or name.startswith(BEGINNINGS))
