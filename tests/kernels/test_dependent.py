"""Kernels wait for the one before them in their first instructions, so that graphs may bring them up early."""

from __future__ import annotations

import pytest

from genesis.backend.cuda.compile import dependent

PTX = """
.visible .entry add(
	.param .u64 .ptr .global .align 1 add_param_0,
	.param .u32 add_param_1
)
.reqntid 128
{
	.local .align 8 .b8 	__local_depot0[48];
	.reg .pred 	%p<2>;
	.reg .b32 	%r<9>;
	.loc	1 10 0
$L__func_begin0:

// %bb.0:
	ld.param.b32 	%r1, [add_param_1];
	{
	.reg .pred p;
	setp.ne.b32 p, %r1, 0;
	}
	ret;
}
"""


def test_the_kernel_waits_before_it_does_anything() -> None:
    lines = dependent(PTX).splitlines()
    at = lines.index("\tgriddepcontrol.wait;")
    assert lines[at - 1].endswith("%r<9>;")
    assert [line for line in lines if "griddepcontrol" not in line] == PTX.splitlines()


def test_a_kernel_that_says_where_it_waits_does_so_there() -> None:
    lines = PTX.replace("\tld.param", "\tgriddepcontrol.wait; // %r2\n\tld.param")
    assert dependent(lines) == lines


def test_ptx_without_a_kernel_is_an_error() -> None:
    with pytest.raises(AssertionError, match="without an entry"):
        dependent(".version 8.7\n")
