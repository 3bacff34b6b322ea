"""Environment variables that are read only when a process starts or imports torch. Pure.

A rank is forked from a process that has imported torch already. What torch, Python and the libraries below them read at
import must have been in the environment of that process; what is set later changes nothing. So a job that sets such a
variable gets a fork server of its own, started with it.

Which names torch's modules read is known from the modules themselves (tests/agent/launcher/test_import_variables.py
looks at all of them). Names that the installed torch reads and that are not known here are said in the rank's log.
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
"""Beginnings of their names."""

NAMES = frozenset(
    ("CI", "CXX", "LOGLEVEL", "HOME", "TMPDIR", "TEMP", "TMP", "USER", "USERNAME", "LOGNAME", "LNAME")  # whole names
)
"""Those that go by no beginning; torch and the standard library make paths and names of them once."""

BY_THE_RANK = frozenset({"OMP_NUM_THREADS", "TORCH_CUDA_SANITIZER"})
"""A rank takes these over itself after its fork: a fork server has one thread, and has not initialised CUDA."""


def read_at_import(name: str) -> bool:
    """Whether a fork server must have been started with a variable for its ranks to go by it."""
    return name not in BY_THE_RANK and (name in NAMES or name.startswith(BEGINNINGS))
