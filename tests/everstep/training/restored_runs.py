"""Runs that are restored by everstep and by torch, from the same objects, to compare how they go on."""

from __future__ import annotations

import copy
import io
import itertools
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from everstep.slots.file import SlotFile
from everstep.training.checkpoint import Checkpoint
from everstep.training.copies.cuda import Cuda
from everstep.training.state.digest import digest_of

HALF, TOTAL = 3, 6


class Scaled8Bit(Tensor):
    """A tensor of 8-bit numbers and one scale, which is dequantized by each operation, as low-bit optimizers have."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Scaled8Bit:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, value: Tensor) -> Scaled8Bit:
        scale = value.abs().max().clamp_min(1e-12) / 127
        return cls((value / scale).round().to(torch.int8), scale, value.dtype)

    def plain(self) -> Tensor:
        return self.codes.to(self.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"dtype": self.dtype}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Scaled8Bit:
        return Scaled8Bit(inner["codes"], inner["scale"], context["dtype"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.copy_.default and isinstance(args[0], Scaled8Bit):
            new = Scaled8Bit.of(args[1].plain() if isinstance(args[1], Scaled8Bit) else args[1])
            args[0].codes.copy_(new.codes)
            args[0].scale.copy_(new.scale)
            return args[0]
        if func in {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}:
            own = args[0]
            return Scaled8Bit(func(own.codes), func(own.scale), (kwargs or {}).get("dtype", own.dtype))
        unwrapped = pytree.tree_map_only(Scaled8Bit, Scaled8Bit.plain, (args, kwargs or {}))
        return func(*unwrapped[0], **unwrapped[1])


class LowBitAdam(torch.optim.Optimizer):
    """Adam with 8-bit moments."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                if not state:
                    state["step"] = 0
                    state["m"], state["v"] = (Scaled8Bit.of(torch.zeros_like(grad)) for _ in range(2))
                state["step"] += 1
                m, v = state["m"].plain().lerp(grad, 0.1), state["v"].plain().mul(0.9).addcmul(grad, grad, value=0.1)
                state["m"].copy_(m)
                state["v"].copy_(v)
                parameter.addcdiv_(m, v.abs().sqrt().add(1e-6), value=-group["lr"])


class MasterAdam(torch.optim.Optimizer):
    """Adam with float32 master weights and moments beside parameters of any type."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad.float()
                if not state:
                    state["master"] = parameter.float().clone()
                    state["m"], state["v"] = torch.zeros_like(grad), torch.zeros_like(grad)
                state["m"].lerp_(grad, 0.1)
                state["v"].mul_(0.99).addcmul_(grad, grad, value=0.01)
                state["master"].addcdiv_(state["m"], state["v"].sqrt().add_(1e-8), value=-group["lr"])
                parameter.copy_(state["master"])


class FlatMomentum(torch.optim.Optimizer):
    """Momentum in one flat buffer, of which each parameter's state is a view, and a step that all share."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if not self.state[parameters[0]]:
            flat = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters))
            steps = torch.zeros((), device=flat.device)
            views = torch.split(flat, [parameter.numel() for parameter in parameters])
            for parameter, view in zip(parameters, views, strict=True):
                self.state[parameter] = {"flat": flat, "momentum": view.view(parameter.shape), "steps": steps}
        first = self.state[parameters[0]]
        first["steps"].add_(1)
        first["flat"].mul_(0.9)  # decays the momentum of all parameters
        for parameter in parameters:
            state = self.state[parameter]
            state["momentum"].add_(parameter.grad)
            parameter.sub_(self.param_groups[0]["lr"] * state["momentum"] / state["steps"].sqrt())


def _torch(kind: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: kind(params, **({"lr": 1e-2} | options))


OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{
        f"{kind.__name__} {way}": _torch(kind, **{way: True} if way != "single" else {"foreach": False}, **more)
        for kind, more in (
            (torch.optim.Adam, {"amsgrad": True}),
            (torch.optim.AdamW, {}),
            (torch.optim.SGD, {"momentum": 0.9}),
            (torch.optim.Adagrad, {}),
        )
        for way in ("single", "foreach", "fused")
    },
    **{
        f"{kind.__name__} {way}": _torch(kind, foreach=way == "foreach")
        for kind in (
            *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam),
            *(torch.optim.RMSprop, torch.optim.Rprop),
        )
        for way in ("single", "foreach")
    },
    "Adafactor": _torch(torch.optim.Adafactor),
    "master weights": MasterAdam,
    "8-bit moments": LowBitAdam,
    "flat buffer": FlatMomentum,
}
"""Optimizers of parameters with any number of dimensions."""
OF_GPUS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    f"{kind.__name__} capturable {way}": _torch(kind, capturable=True, **{way: True})
    for kind, ways_of_kind in (
        (torch.optim.Adam, ("foreach", "fused")),
        (torch.optim.AdamW, ("foreach", "fused")),
        *((kind, ("foreach",)) for kind in (torch.optim.Adadelta, torch.optim.Adamax, torch.optim.ASGD)),
        *((kind, ("foreach",)) for kind in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop)),
        (torch.optim.Rprop, ("foreach",)),
    )
    for way in ways_of_kind
}
"""Optimizers whose steps can be captured in a CUDA graph; torch makes them for parameters on a GPU only."""


class Model(nn.Module):
    """A small model; its parameters, and a buffer that each step changes, have a layout."""

    seen: Any
    flat: Any

    def __init__(self, layout: str) -> None:
        super().__init__()
        dtype = {"bfloat16": torch.bfloat16, "complex": torch.complex64}.get(layout, torch.float32)
        self.first = nn.Conv2d(4, 6, 3, padding=1, dtype=dtype)
        self.second = nn.Conv2d(6, 4, 1, dtype=dtype)
        self.third = nn.Linear(5, 5, dtype=dtype)
        seen = torch.zeros(4, 5)
        if layout == "channels_last":
            self.to(memory_format=torch.channels_last)
        elif layout == "transposed":
            self.third.weight = nn.Parameter(self.third.weight.detach().T.clone().T)
            seen = torch.zeros(5, 4).T
        elif layout == "tied":
            self.fourth = nn.Linear(5, 5)
            self.fourth.weight = self.third.weight
        elif layout == "aliased":
            self.register_buffer("flat", torch.zeros(30))
            seen = self.flat[10:].view(4, 5)
        elif layout == "wrapper":
            self.third.weight = nn.Parameter(Scaled8Bit.of(self.third.weight.detach()), requires_grad=False)
        elif layout == "fp8":
            seen = seen.to(torch.float8_e4m3fn)
        elif layout == "sparse":
            seen = torch.eye(4, 5).to_sparse()
        elif layout == "sliced":
            seen = torch.zeros(4, 9)[:, 2:7]
        self.register_buffer("seen", seen)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.third(self.second(torch.tanh(self.first(x))))
        if hasattr(self, "fourth"):
            made = self.fourth(torch.tanh(made))
        with torch.no_grad():
            mean = (made.real if made.is_complex() else made).mean(dim=(0, 1, 2)).float()
            if self.seen.layout is torch.sparse_coo:
                self.seen = (self.seen * float(mean.mean())).coalesce()
            elif self.seen.dtype is torch.float8_e4m3fn:
                self.seen.copy_((self.seen.float() + mean).to(torch.float8_e4m3fn))
            else:
                self.seen.add_(mean)
        sum_of_seen: Tensor = self.seen.to_dense().float().sum().to(made.dtype)
        return made + sum_of_seen * 1e-3


LAYOUTS = (
    *(
        "contiguous",
        "bfloat16",
        "complex",
        "channels_last",
        "transposed",
        "tied",
        "aliased",
        "wrapper",
        "fp8",
        "sparse",
    ),
    "sliced",
)


class Loader:
    """A loader with a position and a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.position = 0

    def batch(self) -> Tensor:
        self.position += 1
        return torch.randn(2, 4, 5, 5, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"].clone())
        self.position = state["position"]


EXTRAS = ("nothing", "scheduler", "average", "scaler", "loader")


@dataclass(frozen=True)
class Way:
    """The objects of a run."""

    optimizer: str
    layout: str
    extra: str
    device: str = "cpu"


def ways(device: str = "cpu") -> Iterator[Way]:
    """All runs that torch can do on a device."""
    optimizers = [*OPTIMIZERS, *(OF_GPUS if device == "cuda" else ())]
    for optimizer, layout, extra in itertools.product(optimizers, LAYOUTS, EXTRAS):
        real_only = optimizer.endswith("fused") or optimizer in {"Adafactor", "8-bit moments"}
        if not (layout == "complex" and (real_only or extra == "scaler")):
            yield Way(optimizer, layout, extra, device)


class Run:
    """A run of a few steps."""

    def __init__(self, way: Way, seed: int) -> None:
        torch.manual_seed(seed)
        self.way = way
        model = Model(way.layout).to(way.device)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.things: dict[str, Any] = {"model": model, "optimizer": {**OPTIMIZERS, **OF_GPUS}[way.optimizer](trained)}
        match way.extra:
            case "scheduler":
                self.things["schedule"] = torch.optim.lr_scheduler.OneCycleLR(
                    self.things["optimizer"], 0.02, TOTAL, cycle_momentum=False
                )
            case "average":
                self.things["average"] = torch.optim.swa_utils.AveragedModel(nn.ModuleList([model.first, model.second]))
            case "scaler":
                self.things["scaler"] = torch.amp.GradScaler(way.device, init_scale=4.0, growth_interval=2)
            case "loader":
                self.things["loader"] = Loader()

    def step(self, number: int) -> Any:
        things, model = self.things, self.things["model"]
        if "loader" in things:
            batch = things["loader"].batch()
        else:
            batch = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(number))
        batch = batch.to(self.way.device, model.first.weight.dtype)
        if self.way.layout == "channels_last":
            batch = batch.to(memory_format=torch.channels_last)
        things["optimizer"].zero_grad()
        made = model(batch)
        made, wanted = (torch.view_as_real(one) if one.is_complex() else one for one in (made, batch))
        loss = nn.functional.mse_loss(made, wanted)
        if "scaler" in things:
            things["scaler"].scale(loss).backward()
            things["scaler"].step(things["optimizer"])
            things["scaler"].update()
        else:
            loss.backward()  # type: ignore[no-untyped-call]
            things["optimizer"].step()
        if "schedule" in things:
            things["schedule"].step()
        if "average" in things:
            things["average"].update_parameters(nn.ModuleList([model.first, model.second]))
        return loss.item()

    def end(self, losses: list[Any]) -> tuple[Any, ...]:
        """What two equal runs have in common, bit for bit."""
        state = {name: thing.state_dict() for name, thing in self.things.items()}
        return [repr(loss) for loss in losses], digest_of(state)


def undisturbed(way: Way) -> Any:
    """The losses after half of the steps and the last state of a run that nothing interrupts."""
    run = Run(way, 1)
    for number in range(HALF):
        run.step(number)
    return run.end([run.step(number) for number in range(HALF, TOTAL)])


def restored_by_torch(way: Way) -> Any:
    """The same of a run that torch restores after half of the steps; a text: it fails."""
    run, file = Run(way, 1), io.BytesIO()
    for number in range(HALF):
        run.step(number)
    torch.save({name: thing.state_dict() for name, thing in run.things.items()}, file)
    file.seek(0)
    run = Run(way, 2)
    try:
        for name, state in torch.load(file, weights_only=False).items():
            run.things[name].load_state_dict(copy.copy(state))
        return run.end([run.step(number) for number in range(HALF, TOTAL)])
    except Exception as error:
        return repr(error)


def restored_by_everstep(way: Way, cuda: Cuda | None = None) -> Any:
    """The same of a run that everstep restores after half of the steps; ``cuda`` are the calls to CUDA."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        path = Path(folder) / "checkpoint-0"
        run = Run(way, 1)
        saved = Checkpoint(run.things, SlotFile(path, slots=4), overlap=True, cuda=cuda)
        saved.discard()
        for number in range(HALF):
            run.step(number)
            saved.save(number + 1)
        saved.close()
        run = Run(way, 2)
        again = Checkpoint(run.things, SlotFile(path, slots=4), overlap=True, cuda=cuda)
        again.restore(HALF)
        losses = []
        for number in range(HALF, TOTAL):
            losses.append(run.step(number))
            again.save(number + 1)
        again.close()
        return run.end(losses)


def verdict(way: Way, cuda: Cuda | None = None) -> str:
    """How a run that everstep restores goes on: ``undisturbed``, ``as with torch`` or ``otherwise``."""
    ours = restored_by_everstep(way, cuda)
    if ours == undisturbed(way):
        return "undisturbed"
    return "as with torch" if ours == restored_by_torch(way) else "otherwise"
