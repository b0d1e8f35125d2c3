"""What `genesis profile --op` does: an op measured and reported, or the code of its kernels shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from genesis.errors import UsageError, escape
from genesis.files.paths import quote
from genesis_cli.measured import device_name, dtype_of, integers, peer_of, raise_first, show

if TYPE_CHECKING:
    from genesis.measure.factories import Axes
    from genesis.shapes import Shape


@dataclass(frozen=True)
class Request:
    """The words of a command line about one op, as they were given."""

    op: str
    shape: str | None
    axis: str | None
    dtype: str | None
    device: str
    backward: bool
    cold: bool
    vs: str | None
    torch_python: str | None
    stage: str | None
    kernel: str | None
    arch: str | None

    @property
    def command(self) -> str:
        """The command without where the report went."""
        given = {"--op": self.op, "--shape": self.shape, "--axis": self.axis, "--dtype": self.dtype}
        given |= {"--device": self.device, "--vs": self.vs}
        words = [f"{name} {value}" for name, value in given.items() if value is not None]
        words += [name for name, is_set in (("--backward", self.backward), ("--cold", self.cold)) if is_set]
        return escape(" ".join(["genesis profile", *words]))

    @property
    def shapes(self) -> list[Shape]:
        """The one that was given."""
        return [] if self.shape is None else [_shape(self.shape)]

    @property
    def axes(self) -> list[Axes]:
        """Those that were given, as one choice."""
        return [] if self.axis is None else [_axes(self.axis)]


def measure_op(asked: Request, json: str | None) -> None:
    """Measure, print the report, and end with the first failure's exit code, if there is one."""
    from genesis.measure.op import Settings, profile_op, tables_of
    from genesis.measure.record import Failure, Report, to_text
    from genesis_cli.environment import facts
    from genesis_cli.session.preparation import resolve_device

    for option, word in (("--kernel", asked.kernel), ("--arch", asked.arch)):
        if word is not None:
            raise UsageError(f"{option} says whose code to show", where=option, next="add --show ptx, or leave it out")
    where, kind = resolve_device(asked.device), dtype_of(asked.dtype)
    with peer_of(where, asked.vs, asked.torch_python) as peer:
        settings = Settings(backward=asked.backward, cold=asked.cold, peer=peer)
        found = list(profile_op(asked.op, where, kind, asked.shapes, asked.axes, settings))
    failures = [each for each in found if isinstance(each, Failure)]
    rows = [each for each in found if not isinstance(each, Failure)]
    machine = facts()
    report = Report(
        kind="profile-op",
        command=asked.command,
        device=str(where),
        device_name=device_name(where, machine),
        machine=machine,
        tables=tables_of(rows),
        failures=failures,
    )
    show(report, to_text(report) if rows else (), json)
    raise_first(failures, len(rows))


def show_code(asked: Request, json: str | None) -> None:
    """Print the code of the op's kernels, and measure nothing."""
    from genesis.measure.code import code_of, render_lines, target_named
    from genesis_cli.session.preparation import resolve_device

    assert asked.stage is not None
    for option, is_set in (("--json", json is not None), ("--cold", asked.cold), ("--vs", asked.vs is not None)):
        if is_set:
            what = f"{option} is for measuring, and --show prints code alone"
            raise UsageError(what, where=option, next=f"leave {option} or --show out")
    target = target_named(asked.arch, resolve_device(asked.device))
    kind, shapes, axes = dtype_of(asked.dtype), asked.shapes, asked.axes
    found = list(code_of(asked.op, asked.stage, target, kind, shapes, axes, asked.backward, asked.kernel))
    if not found:
        print(f"{asked.op} launches no kernel: it sets or copies memory, or only describes it anew")
    for code in found:
        print("\n".join(render_lines(code)))


def _shape(text: str) -> Shape:
    """`4,512,896` as sizes."""
    sizes = integers(text)
    if not sizes or min(sizes) < 1:
        raise UsageError(f"{quote(text)} is not a shape", where="--shape", next="write sizes of 1 and more: 4,512,896")
    return sizes


def _axes(text: str) -> Axes:
    """One dimension, several, or None for all."""
    if text == "all":
        return None
    axes = integers(text)
    if not axes:
        raise UsageError(f"{quote(text)} is not an axis", where="--axis", next="write -1, or several as in 0,1, or all")
    return axes if len(axes) > 1 else axes[0]
