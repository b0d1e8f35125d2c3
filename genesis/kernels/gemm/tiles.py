"""The choice of a GEMM's tile: a model of its time, from counted rounds and constants that were measured on an H200.

`ranked` predicts every candidate: sizes, pipeline stages, programs per SM, the order of the operands, copies of
operands first, and the split along k. Runs measure nothing. `python -m benchmarks.gemm --candidates 10` times the first
candidates; the constants are a fit to over 1,900 matmuls. Of the last 120 the choice takes 1.03 times the fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple


class GemmTile(NamedTuple):
    """Tile sizes and launch options of a GEMM."""

    bm: int  # rows of a tile
    bn: int  # columns of a tile
    bk: int  # elements along k
    warps: int  # warps per program
    stages: int  # pipeline stages
    split: int = 1  # parts along k of each tile left over after full rounds over the SMs
    swapped: bool = False  # compute outᵀ = bᵀ·aᵀ
    ctas_per_sm: int = 1  # programs per SM; one's epilogue overlaps the other's main loop
    copies: str = ""  # operands, in the tile's order, copied to aligned rows first; float32 becomes K-major
    by_tma: bool = True  # whether TMA loads tiles; otherwise each thread copies 16 bytes at a time
    specialized: bool = False  # whether warp_specialized.py computes them and adds the residual

    @property
    def is_single(self) -> bool:
        """True if a program with a single tile has no loop over tiles, which is not profitable for large tiles."""
        return self.bm * self.bn < 1 << 15


class Problem(NamedTuple):
    """A GEMM as the model sees it: [m, k] x [k, n] for each of several matrices."""

    kind: str  # a key of `TILES`
    layout: str  # "t" for an MN-major operand A and for a K-major B: "nt" is x·wᵀ
    m: int
    n: int
    k: int
    matrices: int = 1
    item: int = 2  # bytes per element of the operands
    out: int = 2  # bytes per element of out
    pitches: tuple[int, int] = (0, 0)  # bytes from a row of A, and of B, to the next one in memory
    reads: bool = False  # whether the epilogue reads as much as it stores
    is_swappable: bool = True
    has_vectors: bool = True  # whether threads can load 16 bytes of both operands at a time
    residual: bool = False  # whether the epilogue only adds a residual
    is_specializable: bool = False  # whether warp_specialized.py can add it

    @property
    def swapped(self) -> Problem:
        a, b = ("nt"[x == "n"] for x in self.layout)
        return self._replace(layout=b + a, m=self.n, n=self.m, pitches=self.pitches[::-1])

    @property
    def has_tma(self) -> bool:
        return self.kind not in ("float32", "pointers")

    @property
    def is_aligned(self) -> bool:
        """True if rows of both operands begin at multiples of 128 bytes."""
        return all(pitch % 128 == 0 for pitch in self.pitches)


_WIDE8, _TILES8 = ((128, 256, 128, 8, 3), (128, 128, 128, 4, 3, 2)), (
    (128, 128, 128, 8, 4), (64, 128, 128, 4, 4, 2), (64, 64, 128, 4, 4, 2), (64, 64, 256, 4, 4), (64, 32, 256, 4, 4, 2),
    (64, 16, 256, 4, 4, 2),
)  # fmt: skip
# The candidates of each kind of operands: sizes, warps, stages and programs per SM. Without TMA, an SM has as many
# programs as registers allow. Long sums of 8-bit floats are promoted to float32, which doubles the registers.
_SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "half": (
        (128, 256, 64, 8, 4), (128, 128, 64, 4, 3, 2), (128, 128, 64, 4, 4), (64, 256, 64, 4, 4), (64, 128, 128, 4, 4),
        (64, 128, 64, 4, 4, 2), (64, 64, 128, 4, 4), (64, 64, 64, 4, 4, 3), (64, 32, 128, 4, 4, 2),
        (64, 16, 128, 4, 4, 2),
    ),
    "fp8": _WIDE8 + _TILES8,
    "fp8_long": _TILES8,
    "tf32": (
        (128, 256, 32, 8, 4), (128, 128, 32, 4, 3, 2), (64, 128, 32, 4, 4, 2), (64, 64, 64, 4, 3, 2),
        (64, 32, 64, 4, 4, 2), (64, 16, 64, 4, 4, 2),
    ),
    "float32": (  # no tensor cores
        (128, 128, 16, 8, 3), (128, 64, 16, 8, 3), (64, 64, 16, 4, 3), (64, 64, 32, 4, 3), (32, 64, 32, 2, 3),
        (32, 32, 32, 4, 4), (16, 32, 32, 4, 4), (16, 16, 64, 4, 3), (8, 32, 64, 2, 3), (8, 16, 128, 1, 3),
    ),
    "pointers": (  # 2-byte floats and tf32 without TMA
        (128, 128, 32, 8, 3), (64, 64, 32, 4, 4), (32, 32, 32, 4, 3), (16, 64, 64, 4, 3), (64, 16, 64, 4, 3)
    ),
}  # fmt: skip


def _tile(bm: int, bn: int, bk: int, warps: int, stages: int, programs: int = 0, *, by_tma: bool) -> GemmTile:
    """Return a candidate. If `programs` is 0, an SM runs one program by TMA, else as many as its registers allow."""
    programs = programs or (1 if by_tma else max(1, min(8, (1 << 16) // (bm * bn + 60 * 32 * warps))))
    return GemmTile(bm, bn, bk, warps, stages, ctas_per_sm=programs, by_tma=by_tma)


TILES = {
    kind: tuple(_tile(*sizes, by_tma=kind not in ("float32", "pointers")) for sizes in rows)
    for kind, rows in _SIZES.items()
}
# Further candidates of 2-byte floats for rows that are not aligned to 128 bytes, which TMA loads at half its speed.
_UNALIGNED = (128, 64, 4, 3, 2), (64, 64, 4, 4, 3), (32, 128, 4, 4, 2), (16, 128, 4, 4, 2)
UNALIGNED_TILES = tuple(_tile(64, *sizes, by_tma=False) for sizes in _UNALIGNED)

# --- Constants of an H200: microseconds, and bytes and cycles per microsecond -----------------------------------------

LAUNCH = 1.8  # a kernel, with the first loads
CYCLES = 1515.0  # of the tensor cores, at the power limit
LATENCY = 0.67  # from a load's issue to its data; the stages of a pipeline share it
ROUND = 0.11  # start and end of a round, without its store
SM_BYTES = 208e3  # through L2 to an SM
L2_BYTES = 16.4e6  # through L2 to all SMs
DRAM_BYTES = 6.4e6  # operands and results, in part from L2
STORE_BYTES = 43e3  # an SM's results
UNALIGNED, HALF_SECTORS = 1.59, 1.46  # factors on bytes of rows not aligned to 128, and to 32 bytes
SECTORS, RESIDENT = 2.35, 32e6  # the same for copies by threads, of operands with more bytes than stay in L2
THREAD_LAUNCH, THREAD_LATENCY, THREAD_BYTES, THREAD_ROUND = 0.9, 0.48, 55e3, 0.7  # for copies by threads
REDUCE, FMA_REDUCE, PART_BYTES = 2.0, 1.1, 4e6  # the kernel that adds parts, of float32; storing and adding them
LARGE_PARTS = 3.0  # parts of large tiles, of operands whose rows are aligned to 128 bytes
COPY, COPY_BYTES, TRANSPOSED_BYTES = 0.9, 2.15e6, 1.5e6  # copying an operand; transposing it
RESTART_BYTES = 15.6e3  # an SM's residuals and results, where they do not overlap a main loop
# Warp-specialized tiles with a residual: the start of the kernel, and a tile's time besides its steps, by its columns.
WS_START, WS_TILES = 0.8, {256: 4.0, 128: 1.6}
PROMOTION = 0.13  # cycles of a warp to add an element of a sum outside the tensor cores
THROUGH_REGISTERS = 0.6  # cycles of a warp to move an element of MN-major float32 through registers
EQUALS = 1.02  # wide tiles of many rows, and two large programs per SM of few tiles or an MN-major A, are slower
OVERLAP = 5.0  # exponent of a norm: as times that overlap become equal, they take longer than the longest one
# Without tensor cores: cycles of four warps per element of a thread and per load of its operands, then the time of a
# step's barriers, and of its loads.
FMA_CYCLES, FMA_LOADS, FMA_STEP, FMA_LATENCY, FMA_BYTES = 1.0, 4.1, 0.063, 0.078, 29.7e3

# The most terms of 8-bit floats that tensor cores alone accumulate. Hopper's accumulators keep some 14 bits and drop
# the rest every 32 terms, by at most 2^-13 of the sum: 0.8 % for 2048 terms, while e4m3 itself is uncertain by 4 %.
MAX_IMPRECISE = 2048
RESERVED = 1 << 10  # bytes of shared memory that the driver reserves for each program
MAX_SPLIT = 32  # more parts only move more partial sums
GAIN = 1.05  # the time of a GEMM in one part, relative to one in several that is worth its memory
PROGRAMS_PER_SM = 4  # programs without tensor cores that fit on an SM; a single one leaves latency exposed
FEW = 64  # float32 operands with at most this many rows or columns are read MN-major in place
LARGE = 1 << 14  # elements of tiles that read enough for copies to aligned rows to be profitable
MOST_CHOICES = 4096
WASTE = 2.5  # tiles that compute more than this many times the elements of another one are excluded


class Candidate(NamedTuple):
    """A tile and its predicted microseconds."""

    us: float
    tile: GemmTile
    schedule: Schedule


chosen: dict[tuple[Problem, int, int, bool], GemmTile] = {}  # choices so far, by the arguments of `ranked`


def choose(p: Problem, sm_count: int, shared: int, one_chain: bool = False) -> GemmTile:
    """Return the first tile of `ranked`."""
    asked = (p, sm_count, shared, one_chain)
    if (tile := chosen.get(asked)) is None:
        tile = chosen[asked] = min(_candidates(*asked), key=_worth).tile
        if len(chosen) > MOST_CHOICES:
            del chosen[next(iter(chosen))]
    return tile


def ranked(p: Problem, sm_count: int, shared: int, one_chain: bool = False) -> list[Candidate]:
    """Return the candidates, the fastest one first; parts along k have to gain 5 %.

    Args:
        sm_count: SMs of the device.
        shared: bytes of a program's shared memory: it limits stages, programs per SM and sizes.
        one_chain: do not split sums: one accumulator adds all steps along k in ascending order, whatever the tile.
    """
    return sorted(_candidates(p, sm_count, shared, one_chain), key=_worth)


def _worth(candidate: Candidate) -> float:
    """Return the microseconds by which candidates are compared. Partial sums take memory, so they must gain `GAIN`."""
    return candidate.us * (GAIN if candidate.schedule.split > 1 else 1)


def _candidates(p: Problem, sm_count: int, shared: int, one_chain: bool) -> Iterator[Candidate]:
    tiles = []
    is_unaligned = p.kind == "half" and p.has_vectors and not p.is_aligned
    for tile in TILES[p.kind] + UNALIGNED_TILES * is_unaligned:
        for is_swapped in (False, True)[: 1 + (p.has_tma and p.is_swappable and tile.bm != tile.bn)]:
            t, q = tile._replace(swapped=is_swapped), p.swapped if is_swapped else p
            if t.by_tma:
                t = fitted(t, p.item, shared, p.reads, p.out)
            covered = -(-q.m // t.bm) * t.bm * -(-q.n // t.bn) * t.bn
            tiles.append((covered, t, q))
    least = min(covered for covered, _, _ in tiles)
    for covered, t, q in tiles:
        if covered > WASTE * least:
            continue
        count, steps = q.matrices * -(-q.m // t.bm) * -(-q.n // t.bn), -(-q.k // t.bk)
        programs = sm_count * t.ctas_per_sm
        for copies, split in itertools.product(_copies(q, t), [1] if one_chain else _splits(count, steps, programs)):
            tile = t._replace(copies=copies, split=split)
            schedule = schedule_of(count, steps, programs, split, t.by_tma)
            yield Candidate(predicted(q, tile, schedule, sm_count), tile, schedule)
    for columns, us in WS_TILES.items() if p.is_specializable else ():
        tile = GemmTile(128, columns, 64, 8, 3 if columns == 256 else 5, specialized=True)
        count, steps = -(-p.m // 128) * -(-p.n // columns), -(-p.k // 64)
        step = _overlapped(_cycles(p, tile) / CYCLES, (128 + columns) * 128 * sm_count / L2_BYTES)
        yield Candidate(WS_START + -(-count // sm_count) * (steps * step + us), tile, Schedule(count, 0, 1, steps))


def explained(p: Problem, found: list[Candidate]) -> Iterator[str]:
    """Yield a GEMM and the candidates of its tile, with what the model predicts for each."""
    matrices = f", {p.matrices} matrices" if p.matrices > 1 else ""
    sizes = f"[{p.m}, {p.k}] x [{p.k}, {p.n}]{matrices}"
    yield f"{p.kind} {sizes}, layout {p.layout}: {len(found)} candidates, fastest first"
    yield "  predicted    tile            warps  stages  programs/SM  order    loads    copies  tiles  parts along k"
    for us, t, s in found[:8]:
        size, order = f"{t.bm} x {t.bn} x {t.bk}", "swapped" if t.swapped else "plain"
        parts = f"{s.split} of the last {s.leftover} tiles" if s.split > 1 else "1"
        yield (
            f"{us:8.1f} us   {size:15} {t.warps:5}  {t.stages:6}  {t.ctas_per_sm:11}  {order:8} "
            f"{'special' if t.specialized else 'TMA' if t.by_tma else 'threads':8} {t.copies or '-':6}  "
            f"{s.full + s.leftover:5}  {parts}"
        )


def _copies(p: Problem, t: GemmTile) -> list[str]:
    """Return the choices of operands to copy. Tensor cores read float32 from shared memory only K-major."""
    if p.kind == "tf32":
        b = "b" * (p.layout[1] == "n")
        return sorted({b, "a" * (p.layout[0] == "t") + b, b if min(p.m, p.n) > FEW else ""})
    if not t.by_tma or t.bm * t.bn < LARGE:
        return [""]
    a, b = (x * (pitch % 128 != 0) for x, pitch in zip("ab", p.pitches, strict=True))
    # Few unaligned rows of A arrive as late as many of B.
    return sorted({"", a, a + b, b if t.bn <= 2 * t.bm or not a else ""})


def _splits(tiles: int, steps: int, programs: int) -> set[int]:
    """Return numbers of parts along k whose programs fill one to three rounds, or a half or a quarter of one."""
    leftover = tiles % programs
    if not leftover:
        return {1}
    most = min(MAX_SPLIT, steps // 2)
    return {1, *(max(1, min(programs * fill // (leftover * 4), most)) for fill in (1, 2, 4, 8, 12))}


def predicted(p: Problem, t: GemmTile, s: Schedule, sm_count: int) -> float:
    """Return the microseconds of a GEMM. The operands are in the tile's order.

    A step along k takes the latency of its loads, the multiply-adds of an SM's programs, or their bytes through L2 to
    the SM or to all SMs. Rounds, stores, the bytes of the operands, copies and parts along k follow.
    """
    per_sm, sizes = t.ctas_per_sm, (p.matrices * p.m * p.k, p.matrices * p.k * p.n)
    a, b = (1.0 if x in t.copies else _inflation(pitch) for x, pitch in zip("ab", p.pitches, strict=True))
    cycles, latency, sm_bytes, start = _cycles(p, t), LATENCY / t.stages, SM_BYTES, ROUND
    # TMA takes as long for rows that are out of bounds, and for rows of MN-major tiles that are shorter than 128 bytes.
    columns = t.bn if p.layout[1] == "t" or not t.by_tma else max(t.bn, 128 // p.item)
    step_bytes = (t.bm * a + columns * b) * t.bk * p.item
    if p.kind == "float32":
        # Each warp runs on one of an SM's four parts.
        latency, sm_bytes = FMA_STEP + cycles * max(1, 4 / t.warps) / CYCLES + FMA_LATENCY / t.stages, FMA_BYTES
    elif p.has_tma and not t.by_tma:
        a = b = SECTORS if sum(sizes) * p.item > RESIDENT else 1.0
        step_bytes = (t.bm + min(t.bn, p.n)) * t.bk * p.item
        latency, sm_bytes, start = THREAD_LATENCY / t.stages, THREAD_BYTES, THREAD_ROUND

    def rounds(tiles: int, steps: int, stored: int) -> float:
        """Return the time of tiles with this many steps, and of their stores."""
        time = -(-tiles // sm_count) * t.bm * t.bn * stored / STORE_BYTES
        full, rest = divmod(tiles, sm_count * per_sm)
        for count, programs in ((full, sm_count * per_sm), (rest > 0, rest)):
            if count:
                busy = min(-(-programs // sm_count), per_sm)
                through_l2 = step_bytes * max(busy / sm_bytes, programs / L2_BYTES)
                time += count * (start + steps * _overlapped(latency, busy * cycles / CYCLES, through_l2))
        return time

    time = rounds(s.full, -(-p.k // t.bk), p.out * (1 + p.reads)) + rounds(s.leftover * s.split, s.steps_per_split, 4)
    nbytes = (sizes[0] * a + sizes[1] * b) * p.item + p.matrices * p.m * p.n * p.out * (1 + p.reads)
    time = (LAUNCH if t.by_tma or not p.has_tma else THREAD_LAUNCH) + _overlapped(time, nbytes / DRAM_BYTES)
    if s.split > 1:
        time += (REDUCE if t.by_tma else FMA_REDUCE) + s.leftover * s.split * t.bm * t.bn * 4 / PART_BYTES
        time += LARGE_PARTS * (t.bm * t.bn >= LARGE and 1 in (a, b))
    if p.residual:
        if t.is_single:  # a residual that is not loaded before the main loop is waited for, too
            waited = -(-s.full // (sm_count * per_sm)) - (s.split == 1)
            time += waited * per_sm * t.bm * t.bn * 2 * p.out / RESTART_BYTES
        elif p.kind == "half":  # added by another kernel
            time += LAUNCH + 3 * p.matrices * p.m * p.n * p.out / DRAM_BYTES
    for x, size, is_transposed in zip("ab", sizes, (p.layout[0] == "t", p.layout[1] == "n"), strict=True):
        speed = TRANSPOSED_BYTES if is_transposed and p.kind == "tf32" else COPY_BYTES
        time += (COPY + size * p.item / speed) * (x in t.copies)
    is_wide = t.by_tma and t.is_single and t.bm < t.bn and p.m > 1.5 * p.n
    is_uneven = p.layout[0] == "t" or s.full < 2 * per_sm * sm_count
    return time * (EQUALS if is_wide or (is_uneven and per_sm > 1 and s.split == 1 and t.bm * t.bn >= LARGE) else 1)


def _overlapped(*times: float) -> float:
    return sum(x**OVERLAP for x in times) ** (1 / OVERLAP)


def _inflation(pitch: int) -> float:
    """Return the bytes that loading a row moves, for each of its bytes."""
    return 1.0 if pitch % 128 == 0 else UNALIGNED * (1.0 if pitch % 32 == 0 else HALF_SECTORS)


def _cycles(p: Problem, t: GemmTile) -> float:
    """Return the cycles of an SM for a step. Tensor cores read 32 bytes of 64 rows and of all columns along k at once
    from shared memory, and take at least as long as that.
    """
    if p.kind == "float32":
        loads = 2 if p.layout[0] == "t" and t.bm * t.bn <= 256 else 1  # the banks of an MN-major A conflict
        return t.bk * (t.bm * t.bn / 128 * FMA_CYCLES + t.warps / 4 * loads * FMA_LOADS)
    cycles = t.bm / 64 * t.bk * p.item / 32 * max(t.bn / 2, 1.33 * (16 + t.bn / 4))
    if p.kind == "fp8_long":
        cycles += PROMOTION * t.bm * t.bn / t.warps
    if p.kind == "tf32":  # an MN-major B goes through registers and back
        moved = t.bm * (p.layout[0] == "t" and "a" not in t.copies) + 2 * t.bn * (
            p.layout[1] == "n" and "b" not in t.copies
        )
        cycles += THROUGH_REGISTERS * moved * t.bk / t.warps
    return cycles


def unaligned_tile(matrices: int, m: int, n: int, k: int, item: int, sm_count: int) -> GemmTile:
    """Return the tile of operands that are loaded element by element, which is bound by memory latency. It is small
    enough that each SM has a tile, and split along k into parts of at least 4 steps, so that each SM has four.
    """
    bm, bn, bk = *(max(16, min(64, 1 << (x - 1).bit_length())) for x in (m, n)), 128 // item
    while max(bm, bn) > 32 and matrices * -(-m // bm) * -(-n // bn) < sm_count:
        bm, bn = (bm // 2, bn) if bm > bn else (bm, bn // 2)
    tiles = matrices * -(-m // bm) * -(-n // bn)
    split = min(PROGRAMS_PER_SM * sm_count // tiles, -(-k // bk) // 4, MAX_SPLIT)
    return GemmTile(bm, bn, bk, 4, 1, split=max(split, 1), by_tma=False)


def shared_bytes(tile: GemmTile, item: int, reads: bool = False, out: int = 0) -> int:
    """Return the bytes of shared memory that the kernel uses: for the stages of both tiles, and for the epilogue."""
    stage, out = (tile.bm + tile.bn) * tile.bk * item, out or item
    epilogue = _epilogue_bytes(tile, out, reads) // epilogue_slices(tile, out, reads)
    return tile.stages * stage + epilogue + 1024


def epilogue_slices(tile: GemmTile, out: int, reads: bool = False) -> int:
    """Return the number of slices that the epilogue stores: each at most 32 KiB per SM, but at least 32 columns."""
    count = 1
    while tile.ctas_per_sm * _epilogue_bytes(tile, out, reads) // count > 32 << 10 and tile.bn // count > 32:
        count *= 2
    return count


def _epilogue_bytes(tile: GemmTile, out: int, reads: bool) -> int:
    """Return the bytes of shared memory that storing, and reading, an unsliced tile would use. Triton upcasts values of
    a swapped tile, whose columns are contiguous, before it changes their layout, and other values afterwards.
    """
    return tile.bm * tile.bn * (out + reads * (max(out, 4) if tile.swapped else out))


def fitted(tile: GemmTile, item: int, shared: int, reads: bool = False, out: int = 0) -> GemmTile:
    """Return the tile with fewer programs per SM, fewer stages, then smaller sizes, until it fits `shared` bytes."""
    while shared_bytes(tile, item, reads, out) > (shared + RESERVED) // tile.ctas_per_sm - RESERVED:
        if tile.ctas_per_sm > 1:
            tile = tile._replace(ctas_per_sm=1)
        elif tile.stages > 2:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.bn > 64:
            tile = tile._replace(bn=tile.bn // 2)
        else:
            tile = tile._replace(bk=tile.bk // 2)
    return tile


class Schedule(NamedTuple):
    """The distribution of tiles: `full` tiles over all of k, `leftover` tiles in `split` parts of `steps_per_split`."""

    full: int
    leftover: int
    split: int
    steps_per_split: int


def schedule_of(tiles: int, steps: int, programs: int, split: int, is_persistent: bool = True) -> Schedule:
    """Return the schedule of tiles in `split` non-empty parts each; of persistent programs, only those left over after
    full rounds are split.
    """
    steps_per_split = max(-(-steps // split), 1)
    split = max(-(-steps // steps_per_split), 1)
    full = tiles if split == 1 else tiles // programs * programs if is_persistent else 0
    return Schedule(tiles, 0, 1, steps) if full == tiles else Schedule(full, tiles - full, split, steps_per_split)
