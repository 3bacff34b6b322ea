"""Make the logs of ``labelled/runs``: run small programs that fail, and keep their output.

    python -P -m tests.everstep.decisions.blame.classify.inject FOLDER [NAME…]

A program whose name begins with ``ranks-`` runs as three gloo processes with a log each. The programs need root, since
some of them use small file systems.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = """
import os, sys, time, signal, datetime
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(os.environ.get("LIMIT", "60"))))
rank = dist.get_rank()
def train_step(step):
    loss = torch.ones(4) * step
    dist.all_reduce(loss)
    return float(loss[0])
def fault(step):
    pass
{fault}
def main():
    for step in range(12):
        if step == 5:
            fault(step)
        loss = train_step(step)
        print(f"step {step} loss {loss:.3f}", flush=True)
main()
"""


def ranks(fault: str) -> str:
    """Return a training loop that calls the function ``fault`` in step 5."""
    return RANKS.replace("{fault}", fault)


FAULTS: dict[str, str] = {
    "ranks-killed": ranks("def fault(step):\n    if rank == 2:\n        os.kill(os.getpid(), signal.SIGKILL)"),
    "ranks-value-error": ranks("def fault(step):\n    if rank == 1:\n        raise ValueError(f'bad batch {step}')"),
    "ranks-hang": ranks("def fault(step):\n    if rank == 1:\n        time.sleep(25)"),
    "ranks-disk-full": ranks(
        "def fault(step):\n    if rank == 0:\n        with open(os.environ['SMALL'] + '/ckpt', 'wb') as f:\n"
        "            f.write(bytes(4 << 20))"
    ),
    "ranks-all-import": "import flash_attention_of_nobody\n",
    "ranks-segfault": ranks(
        "def fault(step):\n    if rank == 1:\n        import ctypes, faulthandler\n        faulthandler.enable()\n"
        "        ctypes.string_at(0)"
    ),
    "ranks-wrapped": ranks(
        "def fault(step):\n    if rank == 2:\n        try:\n            {}['weights']\n"
        "        except KeyError as error:\n"
        "            raise RuntimeError('cannot build the model') from error"
    ),
    "ranks-memory": ranks(
        "def fault(step):\n    if rank == 0:\n        keep = [bytearray(1 << 20) for _ in range(1 << 40)]\n"
    ).replace("import os,", "import resource; resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))\nimport os,"),
    "ranks-barrier": ranks(
        "def fault(step):\n    if rank != 1:\n        dist.monitored_barrier(timeout=datetime.timedelta(seconds=4))\n"
        "    else:\n        time.sleep(12)"
    ),
    "port-taken": """
import socket, torch.distributed as dist
held = socket.socket(); held.bind(("127.0.0.1", 29611)); held.listen()
dist.TCPStore("127.0.0.1", 29611, 1, is_master=True)
""",
    "port-taken-python": """
import socket
from http.server import HTTPServer, BaseHTTPRequestHandler
held = socket.socket(); held.bind(("127.0.0.1", 29612)); held.listen()
class Metrics(HTTPServer):
    allow_reuse_address = False
Metrics(("127.0.0.1", 29612), BaseHTTPRequestHandler).serve_forever()
""",
    "dns": "import urllib.request\nurllib.request.urlopen('http://data.invalid/shard-1.tar')\n",
    "service-refused": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/model.json')\n",
    "service-503": """
import threading, urllib.request
from http.server import HTTPServer, BaseHTTPRequestHandler
class Busy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503)
server = HTTPServer(("127.0.0.1", 0), Busy)
threading.Thread(target=server.serve_forever, daemon=True).start()
urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/tokenizer.json")
""",
    "no-gpu": "import torch\nmodel = torch.nn.Linear(4, 4).cuda()\n",
    "no-gpu-set-device": "import torch\ntorch.cuda.set_device(0)\n",
    "nccl-without-gpu": """
import os, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29613", RANK="0", WORLD_SIZE="1")
dist.init_process_group("nccl")
dist.barrier()
""",
    "worker-killed": """
import os, signal, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        if i == 20: os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(4)
for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2): pass
""",
    "worker-raises": """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        return {"text": torch.zeros(4)}["tokens" if i == 20 else "text"]
def main():
    for batch in torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2): pass
main()
""",
    "worker-shm": """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.zeros(4 << 20)
for batch in torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2): pass
""",
    "array-too-large": "import numpy\nnumpy.ones(10**13)\n",
    "tensor-too-large": "import torch\ntorch.ones(10**13)\n",
    "json": 'import json\njson.loads(\'{"text": "abc" "label": 3}\')\n',
    "cut-checkpoint": """
import torch
torch.save({"w": torch.zeros(1000)}, "/tmp/everstep-cut.pt")
data = open("/tmp/everstep-cut.pt", "rb").read()
open("/tmp/everstep-cut.pt", "wb").write(data[: len(data) // 2])
torch.load("/tmp/everstep-cut.pt")
""",
    "cut-safetensors": """
import torch
from safetensors.torch import save_file, load_file
save_file({"w": torch.zeros(1000)}, "/tmp/everstep-cut.safetensors")
data = open("/tmp/everstep-cut.safetensors", "rb").read()
open("/tmp/everstep-cut.safetensors", "wb").write(data[:-700])
load_file("/tmp/everstep-cut.safetensors")
""",
    "cut-gzip": """
import gzip
data = gzip.compress(bytes(range(256)) * 9000)
open("/tmp/everstep-cut.gz", "wb").write(data[:-300])
gzip.open("/tmp/everstep-cut.gz").read()
""",
    "not-utf8": "print(b'caf\\xe9 au lait'.decode())\n",
    "arguments": """
import argparse
p = argparse.ArgumentParser('train.py'); p.add_argument('--lr')
p.parse_args(['--lrr', '3'])
""",
    "script-missing": "",
    "shared-object": "import ctypes\nctypes.CDLL('libnccl_of_nobody.so.2')\n",
    "cannot-import-name": "from torch import flash_attention_of_nobody\n",
    "read-only": "import os\nopen(os.environ['READ_ONLY'] + '/ckpt', 'w')\n",
    "file-missing": "open('/data/of/nobody/train.bin', 'rb')\n",
    "many-files": "kept = []\nwhile True: kept.append(open('/dev/null'))\n",
    "many-threads": """
import threading, time
while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
""",
    "nan-anomaly": """
import torch
torch.autograd.set_detect_anomaly(True)
x = torch.tensor([-1.0], requires_grad=True)
x.sqrt().sum().backward()
""",
    "nan-clip": """
import torch
w = torch.ones(2, requires_grad=True)
(w.sum() * float("nan")).backward()
torch.nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True)
""",
    "interrupt": """
import os, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
""",
    "shape": """
import torch
def forward(model, batch):
    return model(batch)
def main():
    forward(torch.nn.Linear(8, 2), torch.zeros(3, 7))
main()
""",
    "index": "import torch\ntable = torch.nn.Embedding(10, 4)\ntable(torch.tensor([3, 11]))\n",
    "store-alone": """
import datetime, torch.distributed as dist
dist.TCPStore("127.0.0.1", 29614, 2, True, timeout=datetime.timedelta(seconds=2))
""",
    "store-silent": """
import datetime, torch.distributed as dist
dist.TCPStore("127.0.0.1", 29615, 2, False, timeout=datetime.timedelta(seconds=3))
""",
    "store-key": """
import datetime, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 29616, 1, True, timeout=datetime.timedelta(seconds=2))
store.get("of-nobody")
""",
    "abort": "import os, faulthandler\nfaulthandler.enable()\nos.abort()\n",
    "cxx-abort": """
import torch, ctypes
ctypes.CDLL(None).abort
import threading
ctypes.CDLL('libstdc++.so.6')['_ZSt9terminatev']()
""",
    "assertion": "def check(batch):\n    assert len(batch) == 8, f'batch of {len(batch)}'\ncheck([1, 2])\n",
    "exit-3": "import sys\nprint('step 7 loss 2.31')\nsys.exit(3)\n",
    "fine": "for step in range(40): print(f'step {step} loss {2.5 / (step + 1):.4f} errors 0')\n",
    "retried-and-fine": """
import logging, socket
logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
for step in range(300):
    if step == 3:
        try: socket.create_connection(("127.0.0.1", 9))
        except OSError as error: logging.warning("upload failed, trying again: %s", error)
    logging.info("step %d loss %.3f", step, 3 / (step + 1))
""",
    "handled-then-value-error": """
import logging, socket
logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
def train(step):
    if step == 400:
        raise ValueError("tokens do not fit the vocabulary")
for step in range(401):
    if step == 3:
        try: socket.create_connection(("127.0.0.1", 9))
        except OSError: logging.exception("upload of metrics failed, going on")
    logging.info("step %d loss %.3f", step, 3 / (step + 1))
    train(step)
""",
}

LIMITS = {"many-files": "ulimit -n 64", "many-threads": "ulimit -v 1000000"}
"""Name of a program → the limits under which it runs."""


def start(name: str, script: Path, log: Path, **more: str) -> subprocess.Popen[bytes]:
    """Start a process that writes its output to a file."""
    command = [sys.executable, "-u", str(script)]
    if name in LIMITS:
        command = ["sh", "-c", f"{LIMITS[name]}; exec {' '.join(command)}"]
    if name == "read-only":
        more["READ_ONLY"] = "/mnt"
        command = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o ro none /mnt && exec {' '.join(command)}"]
    if name == "worker-shm":
        command = ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=8m none /dev/shm && exec {' '.join(command)}"]
    environment = os.environ | more
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def run(name: str, folder: Path, small: Path) -> None:
    """Run a program. Its output becomes a file ``NAME.log``, or a folder ``NAME`` with a file for each rank."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "train.py"
        if name != "script-missing":
            script.write_text(FAULTS[name])
        if not name.startswith("ranks-"):
            print(name, start(name, script, folder / f"{name}.log").wait(timeout=60), flush=True)
            return
        (folder / name).mkdir(exist_ok=True)
        more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29620 + list(FAULTS).index(name)), "WORLD_SIZE": "3"}
        more |= {"SMALL": str(small), "LIMIT": "6" if name == "ranks-hang" else "60", "OMP_NUM_THREADS": "1"}
        started = [start(name, script, folder / name / f"rank-{rank}.log", RANK=str(rank), **more) for rank in range(3)]
        print(name, [process.wait(timeout=90) for process in started], flush=True)


def neutral(folder: Path) -> None:
    """Replace the paths of this machine in all logs."""
    for path in (path for path in folder.rglob("*.log") if path.is_file()):
        data = path.read_bytes().replace(sys.prefix.encode(), b"/venv").replace(sys.base_prefix.encode(), b"/usr")
        path.write_bytes(re.sub(rb"/tmp/tmp\w+/", b"/job/", data))


def main() -> None:
    """Run the named programs, or all programs."""
    folder, names = Path(sys.argv[1]), sys.argv[2:] or list(FAULTS)
    with tempfile.TemporaryDirectory() as small:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=True)
        try:
            for name in names:
                run(name, folder, Path(small))
        finally:
            subprocess.run(["umount", small], check=True)
            neutral(folder)


if __name__ == "__main__":
    main()
