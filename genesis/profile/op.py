"""One op measured: each case becomes a row with its times, its counted work and what follows from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from genesis.array import Array
from genesis.autograd import TensorBase, apply, enable_grad, no_grad
from genesis.backend import CPU, Device, backend_for
from genesis.dtypes import DType
from genesis.errors import DeviceError, GenesisError, OutOfMemoryError, UsageError, of_user
from genesis.measure.call_memory import peak_bytes
from genesis.measure.cases import Case, choices, label_of, make_case, op_named
from genesis.measure.factories import Axes, Passes, passes_of
from genesis.measure.limits import Limits, has_gpu_time, limits_of, time_on_gpu, wait_for
from genesis.measure.timing import Plan, Timing, cold_calls, measure, of_wall
from genesis.op import execute
from genesis.profile.dispatch import launches_of, stages_of
from genesis.profile.peer import Child, versus
from genesis.profile.resources import hint_of
from genesis.profile.roofline import Facts, Verdict, judge
from genesis.profile.schema import Backward, Failure, Launch, OpRow, Time
from genesis.shapes import Shape

if TYPE_CHECKING:
    from genesis.backend.cuda import CudaBackend


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        backward: the gradient, too.
        cold: GPU time with an emptied L2.
        stages: those of dispatch, on CUDA.
        plan: how hard to try, for each of the times.
        peer: what to compare with.
    """

    backward: bool = False
    cold: bool = False
    stages: bool = True
    plan: Plan = field(default_factory=Plan)
    peer: Child | None = None


def profile_op(
    name: str,
    device: Device,
    dtype: DType | None = None,
    shapes: Sequence[Shape] = (),
    axes: Sequence[Axes] = (),
    settings: Settings | None = None,
) -> Iterator[OpRow | Failure]:
    """A row for each case of an op, in order. A case that fails gives a `Failure`, and the others are measured.

    Args:
        name: see `cases.op_named`.
        dtype: None takes the first of float32, int32 and bool that the op takes.
        shapes, axes: the kind's typical ones where empty.

    Raises:
        UsageError: the op, a shape, an axis, the dtype or a setting makes no sense.
    """
    chosen = Settings() if settings is None else settings
    _check(name, device, chosen)
    for shape, over in choices(name, device, shapes, axes):
        try:
            case = make_case(name, shape, over, dtype, device)
            yield profile_case(case, limits_of(device, case.dtype), chosen)
        except (GenesisError, MemoryError) as error:
            if isinstance(error, UsageError) or of_user(error) is not None:
                raise
            known = error if isinstance(error, GenesisError) else OutOfMemoryError(f"the host has no memory: {error}")
            yield Failure(name=name, label=label_of(name, shape, over), error=known.what, exit_code=known.exit_code)


def _check(name: str, device: Device, settings: Settings) -> None:
    op, _ = op_named(name)
    if settings.backward and op.vjp is None:
        raise UsageError(f"{name} has no gradient", where="--backward", next="leave --backward out")
    if settings.cold and not has_gpu_time(device):
        raise UsageError("only a GPU's cache can be emptied", where="--cold", next="leave --cold out")


def profile_case(case: Case, limits: Limits, settings: Settings) -> OpRow:
    """Measure one case against the limits of its device and dtype.

    Raises:
        UsageError: a gradient was asked for and the result has none.
    """
    tensors, notes = [_wrapped(x) for x in case.inputs], list[str]()

    def call() -> Any:
        return apply(case.op, *tensors, **case.attrs)

    with no_grad():
        wall = measure(of_wall(call, wait_for(case.device)), settings.plan)
        gpu = _gpu_time(call, case.device, wall, settings, notes)
        peak = peak_bytes(call, case.device)
        outputs = execute(case.op, case.inputs, dict(case.attrs))
        on_cuda = case.device != CPU
        launches = launches_of(call, case.device) if on_cuda else None
        dispatch = stages_of(case, settings.plan) if on_cuda and settings.stages else None
    passes = passes_of(case.op, case.inputs, case.attrs) if settings.backward else None
    backward = None if passes is None else _backward(case, passes, wall, settings, notes)
    peer = None
    if settings.peer is not None:
        backward_call = None if passes is None else passes.backward
        with no_grad():
            peer = versus(case, settings.peer, settings.plan, call, backward_call, outputs[0].shape, notes)
    cost = case.op.cost(case.inputs, outputs, case.attrs)
    facts = Facts(
        flops=cost.flops,
        nbytes=cost.bytes,
        wall=wall.seconds,
        gpu=None if gpu is None else gpu.seconds,
        bytes_per_second=limits.bytes_per_second,
        flops_per_second=limits.flops_per_second,
        smallest_wall=limits.call_seconds,
        smallest_gpu=limits.kernel_seconds,
        recording=None if backward is None else backward.recording,
        multiplies=op_named(case.name)[1].multiplies,
    )
    return OpRow(
        **_about(case),
        is_cold=settings.cold,
        wall=Time.of(wall),
        gpu=None if gpu is None else Time.of(gpu),
        flops=cost.flops,
        bytes=cost.bytes,
        bytes_per_second=cost.bytes / facts.seconds,
        flops_per_second=cost.flops / facts.seconds,
        **_advised(judge(facts), launches or ())._asdict(),
        peak_bytes=peak,
        launches=launches,
        dispatch=dispatch,
        backward=backward,
        peer=peer,
        notes=notes,
    )


def _advised(verdict: Verdict, launches: Sequence[Launch]) -> Verdict:
    """The verdict; where the work itself is far from its limit, with what the kernels' resources say to that."""
    is_slow = verdict.cause == verdict.limit and verdict.band in ("fair", "poor", "critical")
    hint = hint_of(launches) if is_slow else ""
    return verdict._replace(advice=f"{verdict.advice}; {hint}") if hint else verdict


def _about(case: Case) -> dict[str, Any]:
    """The columns that say what was measured."""
    axes = [case.axes] if isinstance(case.axes, int) else None if case.axes is None else list(case.axes)
    inputs = [f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in case.arrays]
    names = {
        "name": case.name,
        "op": case.op.name,
        "family": case.op.family,
        "label": case.label,
        "dtype": case.dtype.name,
    }
    return {**names, "shape": list(case.shape), "axes": axes, "inputs": inputs}


def _wrapped(x: Any) -> Any:
    return TensorBase.wrap(x) if isinstance(x, Array) else x


def _gpu_time(
    call: Callable[[], object], device: Device, wall: Timing, settings: Settings, notes: list[str]
) -> Timing | None:
    """GPU time, or None with a note where it cannot be measured."""
    if not has_gpu_time(device):
        return None
    if settings.cold:
        with cold_calls(call, cast("CudaBackend", backend_for(device))) as sample:
            return measure(sample, settings.plan)
    try:
        return time_on_gpu(call, device, wall.seconds, settings.plan)
    except DeviceError as error:
        notes.append(f"no GPU time: {error.what}")
        return None


def _backward(case: Case, passes: Passes, wall: Timing, settings: Settings, notes: list[str]) -> Backward:
    """The cost of recording the call, and of its backward pass."""
    wait = wait_for(case.device)
    with enable_grad():
        recorded = measure(of_wall(passes.forward, wait), settings.plan)
    back = measure(of_wall(passes.backward, wait), settings.plan)
    gpu = _gpu_time(passes.backward, case.device, back, settings, notes)
    return Backward(
        recorded=Time.of(recorded),
        recording=recorded.seconds - wall.seconds,
        wall=Time.of(back),
        gpu=None if gpu is None else Time.of(gpu),
        launches=None if case.device == CPU else launches_of(passes.backward, case.device),
    )
