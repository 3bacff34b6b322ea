"""This module turns a forked child into a trial of a script: it acts as a rank until the script joins the job.

First it compiles every module of the snapshot; the compiled files stay beside their sources, for later ranks. Then it
runs the script until the script calls ``everstep.join``, makes a process group, or begins an optimizer step. At that
point the trial ends. The fork server loads this file under a private name, after ``rank_process.py``.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.machinery
import os
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from everstep.system import procfs

if TYPE_CHECKING:
    from agent.launcher import rank_process
else:
    rank_process = sys.modules["_everstep_rank_process"]

Message = dict[str, Any]

PR_SET_PDEATHSIG = 1
SIZES_UNKNOWN = "it makes its process group before it calls everstep.join(): whether its sizes fit was not tried"
MOST_ERRORS = 4
"""The output names at most this many files that do not compile; further files are only counted."""


def run_trial(
    server: int, request: Message, *, read: Mapping[str, str | None], joins: Sequence[types.ModuleType]
) -> NoReturn:
    """Become a process that tries a script.

    Args:
        server: Pid of the fork server. This process dies when the fork server dies.
        request: The ``try`` request: script, folder of the snapshot (or empty), args, cwd, env, output.
        read: Variables that the server's imports read.
        joins: Imported modules that have ``init_process_group``.
    """
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        os.setsid()
        rank_process.reset_signals()
        procfs.set_own_name("everstep trial")
        rank_process.redirect(request["output"], request["output"])
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        rank_process.warn_of_ignored(read)
        code = None
        if request["folder"]:
            if not all_compile(Path(request["folder"]), Path(request["script"])):
                sys.exit(1)
            code = importlib.machinery.SourceFileLoader("__main__", request["script"]).get_code("__main__")
        rank_process.fit_torch()
        end_at_barriers(joins)
        rank_process.fit_path(request["script"])
        rank_process.become_main(request["script"], request["args"], code)
        status = 0
    except SystemExit as error:
        status = rank_process.exit_code(error)
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, rank_process.__file__):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    finally:
        rank_process.leave(status)


def end_at_barriers(joins: Sequence[types.ModuleType]) -> None:
    """Make this process end when the script begins to work with other ranks, or to train.

    Args:
        joins: Modules that have ``init_process_group``.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from everstep.training.trial import end_if_tried

    def ends(*_: object, **__: object) -> None:
        end_if_tried()

    def ends_before_join(*_: object, **__: object) -> None:
        end_if_tried(SIZES_UNKNOWN if knows_everstep() else "")

    for module in joins:
        vars(module)["init_process_group"] = ends_before_join
    register_optimizer_step_pre_hook(ends)


def knows_everstep() -> bool:
    """Return whether the script intends to join the job: it has imported everstep or ``join``."""
    import everstep

    return any(value is everstep or value is everstep.join for value in vars(sys.modules["__main__"]).values())


def all_compile(folder: Path, script: Path) -> bool:
    """Compile all modules of a snapshot, and print the errors of modules that do not compile.

    A file that no other file seems to import, such as test data, may be invalid: its error is only printed.
    """
    broken: dict[Path, str] = {}
    keeps, sys.dont_write_bytecode = sys.dont_write_bytecode, False  # the folder belongs to the agent
    sources = [path for path in sorted(folder.rglob("*.py")) if path.is_file()]
    for path in sources:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.machinery.SourceFileLoader(path.stem, str(path)).get_code(path.stem)
        except Exception as error:
            broken[path] = "".join(traceback.format_exception_only(error)).rstrip()
    sys.dont_write_bytecode = keeps
    if not broken:
        return True
    names = _imported(path for path in sources if path not in broken)
    fatal = {path: text for path, text in broken.items() if path == script or _name(path) in names}
    for path, text in [*(broken.items() - fatal.items()), *fatal.items()][-MOST_ERRORS:]:
        print(f"{path} does not compile" + ("" if path in fatal else ", and nothing imports it") + f":\n{text}")
    if len(broken) > MOST_ERRORS:
        print(f"{len(broken)} files do not compile")
    return not fatal


def _name(path: Path) -> str:
    return path.parent.name if path.stem == "__init__" else path.stem


def _imported(sources: Any) -> set[str]:
    """Return all names that occur in the import statements of some files."""
    names: set[str] = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {part for alias in node.names for part in alias.name.split(".")}
            if isinstance(node, ast.ImportFrom):
                names |= set((node.module or "").split("."))
    return names
