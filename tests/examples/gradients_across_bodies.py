"""Scripts in which gradients live from one body of the loop to the next."""

# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import everstep
from tests.examples.bodies import SCRIPTS, WINDOW, Numbers, Script, adamw, batch, last_of_window, network, script


def accumulation(zero: str, *, clip: bool = False) -> Callable[[everstep.Run], Script]:
    def make(_: everstep.Run) -> Script:
        model = network()
        unused = nn.Parameter(torch.ones(3))  # weight decay changes it if its gradient is zero, but not if it is None
        optimizer = torch.optim.AdamW([*model.parameters(), unused], lr=0.01)

        def body(step: int) -> Tensor:
            if zero == "first" and step % WINDOW == 0:
                optimizer.zero_grad()
            if zero == "zeros first" and step % WINDOW == 0:
                optimizer.zero_grad(set_to_none=False)
            loss = model(batch(step)).square().mean() + (unused.sum() if step < WINDOW else 0.0)
            loss.backward()
            if last_of_window(step):
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                if zero == "last":
                    optimizer.zero_grad()
                if zero == "zeros last":
                    optimizer.zero_grad(set_to_none=False)
                if zero == "less":
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(0.5)
            return loss.detach() + unused.detach().sum()

        return {"model": model, "unused": nn.ParameterList([unused]), "optimizer": optimizer}, body

    return make


SCRIPTS["accumulate_zero_last"] = accumulation("last", clip=True)
SCRIPTS["accumulate_zero_first"] = accumulation("first")
SCRIPTS["accumulate_zeros_last"] = accumulation("zeros last")
SCRIPTS["accumulate_zeros_first"] = accumulation("zeros first")
SCRIPTS["accumulate_for_ever"] = accumulation("never")
SCRIPTS["accumulate_with_decay"] = accumulation("less")


@script
def zero_first(_: everstep.Run) -> Script:
    """The loop of most tutorials. The gradients of a body stay, and the next body drops them."""
    model = network()
    optimizer = adamw(model)

    def body(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {"model": model, "optimizer": optimizer}, body


@script
def never_zero(_: everstep.Run) -> Script:
    """An optimizer step in each body, with gradients that are never dropped."""
    model = network()
    optimizer = adamw(model)

    def body(step: int) -> Tensor:
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return {"model": model, "optimizer": optimizer}, body


@script
def two_optimizers(_: everstep.Run) -> Script:
    """Two optimizers step in different bodies, as in a GAN. Each backward pass adds to the gradients of both."""
    model, judge = network(), nn.Linear(4, 1)
    first, second = torch.optim.SGD(judge.parameters(), 0.05, momentum=0.9), adamw(model)

    def body(step: int) -> Tensor:
        if step % 3 == 0:
            first.zero_grad()
        loss = judge(model(batch(step))).square().mean()
        loss.backward()
        if step % 3 == 2:
            first.step()
        if step % 2 == 1:
            second.step()
            second.zero_grad()
        return loss.detach()

    return {"model": model, "judge": judge, "first": first, "second": second}, body


@script
def frozen_later(_: everstep.Run) -> Script:
    """Parameters are frozen in some steps. A frozen parameter keeps its gradient."""
    model = network()
    optimizer = adamw(model)

    def body(step: int) -> Tensor:
        model[0].requires_grad_(not 6 <= step < 11)
        loss = model(batch(step)).square().mean()
        loss.backward()
        if last_of_window(step):
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return {"model": model, "optimizer": optimizer}, body


@script
def own_gradients(_: everstep.Run) -> Script:
    """Gradients that are collected in the script's own tensors (main_grad)."""
    model = network()
    optimizer = adamw(model)
    main = Numbers(**{name: torch.zeros_like(one) for name, one in model.named_parameters()})

    def body(step: int) -> Tensor:
        loss = model(batch(step)).square().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            main.values[name] = main.values[name] + parameter.grad
            parameter.grad = main.values[name] if last_of_window(step) else None
        if last_of_window(step):
            optimizer.step()
            optimizer.zero_grad()
            main.values = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
        return loss.detach()

    return {"model": model, "optimizer": optimizer, "main": main}, body


@script
def in_backward(_: everstep.Run) -> Script:
    """Optimizers that step during the backward pass, one for each parameter."""
    model = network()
    optimizers = {f"o{i}": torch.optim.SGD([one], 0.05, momentum=0.9) for i, one in enumerate(model.parameters())}
    of = dict(zip(model.parameters(), optimizers.values(), strict=True))

    def step_now(parameter: Tensor) -> None:
        of[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)

    def body(step: int) -> Tensor:
        loss = model(batch(step)).square().mean()
        loss.backward()
        return loss.detach()

    return {"model": model, **optimizers}, body


# Mixed precision.


@script
def scaler(_: everstep.Run) -> Script:
    """Autocast, and a GradScaler that skips some steps, with accumulated gradients."""
    model = network()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def body(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch(step)).square().mean()
        scaler.scale(loss * (float("inf") if step == 6 else 1.0)).backward()
        if last_of_window(step):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.detach().float() + scaler.get_scale() / 2**30

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, body


@script
def scaler_zero_first(_: everstep.Run) -> Script:
    """A GradScaler skips some steps. The gradients of a skipped step stay, and the next body drops them."""
    model = network()
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def body(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        scaler.scale(loss * (float("inf") if step in {1, 8} else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach().float() + scaler.get_scale() / 2**30

    return {"model": model, "optimizer": optimizer, "scaler": scaler}, body


# Several ranks.


def ddp(*, view: bool, zero_last: bool = True, window: int = WINDOW) -> Callable[[everstep.Run], Script]:
    def make(run: everstep.Run) -> Script:
        model = network(nn.BatchNorm1d(16))
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=view)
        optimizer = adamw(model)

        def body(step: int) -> Tensor:
            if not zero_last and step % window == 0:
                optimizer.zero_grad()
            last = step % window == window - 1
            parallel.require_backward_grad_sync = last  # the effect of no_sync()
            loss = parallel(batch(step, run.rank)).square().mean()
            loss.backward()
            if last:
                optimizer.step()
                if zero_last:
                    optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            return mean

        return {"model": model, "optimizer": optimizer}, body

    return make


SCRIPTS["ddp_no_sync"] = ddp(view=False)
SCRIPTS["ddp_no_sync_bucket_view"] = ddp(view=True)
SCRIPTS["ddp_no_sync_bucket_view_zero_first"] = ddp(view=True, zero_last=False)
SCRIPTS["ddp_bucket_view_zero_first"] = ddp(view=True, zero_last=False, window=1)


def fsdp(*, sync: bool) -> Callable[[everstep.Run], Script]:
    def make(run: everstep.Run) -> Script:
        from torch.distributed.fsdp import fully_shard

        model = network()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=run.device_mesh("cpu")["dp"])
        fully_shard(model, mesh=run.device_mesh("cpu")["dp"])
        optimizer = adamw(model)

        def body(step: int) -> Tensor:
            model.set_requires_gradient_sync(sync or last_of_window(step))  # type: ignore[operator]
            loss = model(batch(step, run.rank)).square().mean()
            loss.backward()
            if last_of_window(step):
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
            mean: Tensor = loss.detach().clone()
            dist.all_reduce(mean)
            return mean

        return {"model": model, "optimizer": optimizer}, body

    return make


SCRIPTS["fsdp_accumulate"] = fsdp(sync=True)
SCRIPTS["fsdp_without_sync"] = fsdp(sync=False)
