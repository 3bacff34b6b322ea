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
        "nan-before-communication",
        FaultClass.NAN,
        Owner.UNKNOWN,
        hints="before data-parallel communication|in local grad norm|local grad",
        pattern=(
            "(?:NaN|Inf|inf|nan) in local grad(?:ient)?(?: norm)?|local grad(?:ient)?s? (?:norm )?(?:is|are|contains?)"
            " (?:NaN|Inf|not finite)|before data-parallel communication collective"
        ),
        source="Megatron-LM: the gradients of one rank were not finite before they were added to those of others",
        matches=(
            "AssertionError: Rank 3: found NaN in local grad norm for bucket #0 in backward pass before "
            "data-parallel communication collective",
            "AssertionError: Rank 11: found NaN in local grad norm in backwards pass. Device: 3, node: m7",
        ),
        misses=("ValueError: loss is nan at step 12, stopping", "the local grad norm is 2.1"),
    ),
    LogRule(
        "nan-value",
        FaultClass.NAN,
        Owner.UNKNOWN,
        hints="nan|inf|finite|minimum loss scale|scale already at minimum",
        pattern=(
            r"(?:found|encountered|detected|got|contains) (?:an? "
            r")?(?:NaNs?|Infs?)(?:/Infs?)?\b.*(?:loss|grad|norm|tensor"
            r"|output|input)|\bloss\b.{0,40} (?:is|became|was|=) ?:?(?:nan|NaN|inf)\b|non-?finite (?:loss|grad|norm)"
            r"|norm .* is non-finite|returned nan values in its \d+th output|Rerun.*unexpected result nan"
            r"|Unexpected result nan on rank|\bNaNs? (?:values? )?(?:was |were |is )?(?:detected|found|encountered)"
            r"|\b(?:nan|NaN) (?:loss|gradients?|values?) (?:detected|found|encountered|in)\b|loss contains a NaN"
            r"|(?:loss|metric) \S* ?= nan is not finite|Monitored metric .* is not finite|parameters in `\S+`.*nan"
            "|loss scale already at minimum|Minimum loss scale reached|invalid value \\(nan\\) encountered"
        ),
        source=(
            "Megatron-LM, torch: clip_grad_norm_, anomaly mode; Lightning, Hugging Face, "
            "Composer, DeepSpeed, fairseq, jax"
        ),
        matches=(
            "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot "
            "be clipped",
            "RuntimeError: Function 'LogBackward0' returned nan values in its 0th output.",
            "ValueError: loss is nan at step 12, stopping",
            "ValueError: The loss returned in `training_step` is nan.",
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
            "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.",
            "Monitored metric train_loss = nan is not finite. Previous best value was 0.31. Signaling Trainer to stop.",
            "FATAL: loss is NaN, exiting",
            "NaN detected in loss, aborting.",
        ),
        misses=("number of nan iterations: 0", "information was found", "the loss is finite", "NaN checks are on"),
    ),
    LogRule(
        "nan-in-metrics",
        FaultClass.NAN,
        Owner.UNKNOWN,
        hints="nan",
        pattern=r"(?:loss|norm)['\"]?\s*[:=|]?\s*['\"]?nan\b",
        source="the metrics of a step, as Megatron-LM, Hugging Face and many scripts print them",
        matches=(
            "Epoch 2 | step 4100 | loss nan | lr 3.0e-04",
            "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.3}",
            " iteration 5426/250000 | loss scale: 1.0 | grad norm: nan | number of skipped iterations:   0 |",
        ),
        misses=("| grad norm: 0.741 | number of nan iterations:   0 |", "loss: nanoseconds"),
        weight=Weight.WEAK,
    ),
)
