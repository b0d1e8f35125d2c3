"""What happens on the host when an op is called on CUDA: the stages of dispatch, and what is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from genesis.array import Array
from genesis.autograd.record import TensorBase, apply
from genesis.backend import backend_for
from genesis.measure.cases import Case
from genesis.measure.limits import has_gpu_time, wait_for
from genesis.measure.timing import Plan, measure, of_host
from genesis.profile.resources import resources_of
from genesis.profile.schema import Dispatch, Launch

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from genesis.backend import Device
    from genesis.backend.cuda import CudaBackend
    from genesis.backend.cuda.launch import KernelLaunch

QUEUE = 100  # calls that may wait for the GPU at once: a full queue would make the host wait


def launches_of(call: Callable[[], object], device: Device) -> list[Launch]:
    """The kernels and fills that a call launches on a CUDA device, and what each takes of it."""
    driver = cast("CudaBackend", backend_for(device)).driver
    found = kernel_launches_of(call, device)
    return [Launch(kernel=s.name, grid=list(s.grid), resources=resources_of(s, driver)) for s in found]


def kernel_launches_of(call: Callable[[], object], device: Device) -> list[KernelLaunch]:
    """What a call launches on a CUDA device, in order, as the backend has it."""
    from genesis.backend.cuda.launch import watching_launches

    driver = cast("CudaBackend", backend_for(device)).driver
    found: list[KernelLaunch] = []

    def watch(launched: KernelLaunch, stream: int) -> None:
        found.append(launched)
        launched.run(stream)

    with watching_launches(watch):
        call()
        driver.synchronize()  # launches may wait for their kernels' compilation
    return found


def stages_of(case: Case, plan: Plan) -> Dispatch | None:
    """The stages of a call whose launches are recorded, as they are after its first run; None without a GPU."""
    from genesis.backend.cuda.dispatch import call_key

    backend = cast("CudaBackend", backend_for(case.device))
    (inputs, attrs), op = _joined(case), case.op
    outputs = backend.replay(op, inputs, attrs) if has_gpu_time(case.device) and case.arrays else None
    if outputs is None:
        return None
    made, tensors = outputs, [TensorBase.wrap(x) if isinstance(x, Array) else x for x in case.inputs]
    limited = Plan(plan.precision, plan.seconds / 5, plan.warm_up, plan.sample, QUEUE, plan.clock)

    def seconds(call: Callable[[], object]) -> float:
        return measure(of_host(call, wait_for(case.device)), limited).seconds

    lookup = seconds(lambda: call_key(op, inputs, attrs))
    allocate = seconds(lambda: [backend.allocate(a.nbytes) for a in made])
    wrap = seconds(lambda: [TensorBase.wrap(a) for a in made])
    replay = seconds(lambda: backend.replay(op, inputs, attrs))
    whole = seconds(lambda: apply(op, *tensors, **case.attrs))
    return Dispatch(
        entry=_positive(whole - replay - wrap),
        lookup=lookup,
        allocate=allocate,
        launch=_positive(replay - lookup - allocate),
        wrap=wrap,
    )


def _positive(seconds: float) -> float | None:
    return seconds if seconds >= 0 else None


def _joined(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as dispatch sees them."""
    return case.op.join(case.inputs, dict(case.attrs)) if case.op.join else (case.inputs, dict(case.attrs))
