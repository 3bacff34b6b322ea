"""Programs that replace py-spy and hang in the middle of its work."""

_HEAD = """
import ctypes, os, signal, sys, time
from pathlib import Path
pid = int(sys.argv[sys.argv.index("--pid") + 1])
"""
_TAIL = """
Path(__file__).with_suffix(".met").touch()
time.sleep(600)
"""
ATTACH_AND_HANG = _HEAD + "assert ctypes.CDLL(None).ptrace(16, pid, 0, 0) == 0  # PTRACE_ATTACH" + _TAIL
"""Attaches and hangs. When it dies, the process stays stopped by the stop signal that attaching sends."""
STOP_AND_HANG = _HEAD + "os.kill(pid, signal.SIGSTOP)" + _TAIL
