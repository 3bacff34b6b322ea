"""Rules for lines about the script: failed imports, wrong options, NaN values.

An exception that no rule matches counts as the script's own: class ``user exception``, reason ``user-exception``.
"""

from __future__ import annotations

from everstep.decisions.blame.classify.rule import FaultClass, LogRule, Weight
from everstep.model.finding import Owner

CODE_RULES = (
    LogRule(
        "dependency-missing",
        FaultClass.DEPENDENCY,
        Owner.CODE,
        hints=(
            "modulenotfounderror|importerror|no module named|dllerror|cannot open shared object|undefined symbol"
            "|versionconflict|distributionnotfound|packagenotfounderror|glibc|cxxabi|symbol lookup error"
            "|command not found|glibcxx|incompatible"
        ),
        pattern=(
            r"ModuleNotFoundError|\bImportError\b|No module named |cannot open shared object file|undefined symbol: "
            "|VersionConflict|DistributionNotFound|PackageNotFoundError|version `(?:GLIBC|GLIBCXX"
            r"|CXXABI)_[\d.]+' not found|symbol lookup error|: command not found"
            r"|numpy\.dtype size changed, may indicate binary incompatibility"
        ),
        source="Python, the dynamic linker, shells",
        matches=(
            "ModuleNotFoundError: No module named 'flash_attn'",
            "ImportError: cannot import name 'foo' from 'torch' (/venv/lib/python3.11/site-packages/torch/__init__.py)",
            "OSError: libcudart.so.12: cannot open shared object file: No such file or directory",
            "bash: line 1: torchrun: command not found",
        ),
        misses=("the import errors column",),
    ),
    LogRule(
        "wrong-usage",
        FaultClass.WRONG_USAGE,
        Owner.CODE,
        hints=(
            "error: unrecognized arguments|the following arguments are required|error: argument|invalid choice"
            "|can't open file|expected one argument"
        ),
        pattern="error: unrecognized arguments|the following arguments are required|error: argument |can't open file '",
        source="Python: argparse, the interpreter",
        matches=(
            "train.py: error: unrecognized arguments: --lrr 3",
            "/usr/bin/python: can't open file '/w/train.py': [Errno 2] No such file or directory",
        ),
        misses=("the argument is an error",),
        weight=Weight.DECISIVE,
    ),
    LogRule(
        "nan-value",
        FaultClass.NAN,
        Owner.UNKNOWN,
        hints="nan|inf|non-finite|nonfinite",
        pattern=(
            r"(?:found|encountered|detected|got) (?:a )?(?:NaN|nan|Inf|inf)(?:/Inf)?\b.*(?:loss|grad|norm|tensor|local"
            r"|output|input)|loss (?:is|became|was|=) ?:?(?:nan|NaN|inf)\b|non-?finite (?:loss|grad|norm)"
            r"|norm .* is non-finite|returned nan values in its \d+th output|Rerun.*unexpected result nan"
        ),
        source="Megatron-LM, torch: clip_grad_norm_, anomaly mode",
        matches=(
            "AssertionError: Rank 3: found NaN in local grad norm for bucket #0 in backward pass before "
            "data-parallel communication collective",
            "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot "
            "be clipped",
            "RuntimeError: Function 'LogBackward0' returned nan values in its 0th output.",
            "ValueError: loss is nan at step 12, stopping",
        ),
        misses=("number of nan iterations: 0", "information was found"),
    ),
)
