"""The search for kernels' tiles on a GPU: which tiles are tried, how each is timed, and which one is taken.

`sparkdraft tune` searches the shapes of the user's model (model_tiles.py), and tools/cuda_*.py those of published
models; both use this file. A tile that is tried takes the place of the table's (kernels/cuda/runtime/tuned) while
it is timed.
A figure is a replayed CUDA graph of launches that read more than the L2 holds. In Triton's interpreter everything runs,
and the times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.linear import few_rows
from sparkdraft.kernels.cuda.linear.few_rows import Tile
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.recurrent import delta_chunks, delta_steps
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.compiling import only_compiling
from sparkdraft.kernels.cuda.runtime.gpu import Gpu

COLD_BYTES = 256 << 20  # a graph reads this much at least, five times the L2 of an H200
FEW = [(64, 2), (128, 2), (32, 1), (64, 4)]  # lines and warps over codes; all but the last run mma.sync
SLICED = [(16, 4), (32, 4), (16, 8), (32, 2), (64, 2)]  # lines, and slices of 'in', a warp each
WIDE = [(64, 2), (64, 4), (128, 4)]
Launch = Callable[[], object]
Say = Callable[[str], None]


def say_now(text: str) -> None:
    print(text, flush=True)


def seconds(launches: Sequence[Launch], goal: float = 0.1) -> float:
    """Seconds per launch: the median of five timings of a graph that holds all of them."""
    if not torch.cuda.is_available():  # in the interpreter
        begin = time.perf_counter()
        launches[-1]()
        return time.perf_counter() - begin
    launches[0]()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    begin_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(times: int) -> float:
        begin_event.record()
        for _ in range(times):
            graph.replay()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) / 1e3 / times / len(launches)

    once = max(replay(2), 1e-7) * len(launches)
    return sorted(replay(max(1, int(goal / 5 / once))) for _ in range(5))[2]


def forget() -> None:
    """Launches that were chosen are chosen again."""
    for cached in (
        few_rows._launch, few_rows._wide_launch, experts._launch, paged._launch, delta_steps.choose_tile,
        delta_chunks.choose_tiles,
    ):  # fmt: skip
        cached.cache_clear()


def put(gpu: Gpu, kernel: str, form: str, shape: tuple[int, ...], tile: Any) -> Any:
    """Into the table that launches look into; None removes the entry. Returns what was there."""
    table = tuned.tables(gpu).setdefault((kernel, form), {})
    before = table.pop(shape, None)
    if tile is not None:
        table[shape] = tile
    forget()
    return before


@contextmanager
def using(gpu: Gpu, kernel: str, form: str, shape: tuple[int, ...], tile: list[int]) -> Iterator[None]:
    """The tile in place of the table's."""
    before = put(gpu, kernel, form, shape, tile)
    try:
        yield
    finally:
        put(gpu, kernel, form, shape, before)


@contextmanager
def compiling(what: str, say: Say = say_now) -> Iterator[None]:
    """Kernels that are launched within are compiled and not run; what fails, fails again when it is timed."""
    begin = time.perf_counter()
    try:
        with only_compiling():
            yield
    except Exception as error:  # of Triton or of its threads: all is compiled once more where it is used
        say(f"compiling {what} ahead stopped: {error!r}")
    say(f"{what} compiled in {time.perf_counter() - begin:.1f} s")


def micros(times: Sequence[float]) -> str:
    return "  ".join(f"{each * 1e6:7.1f} us" for each in times)


class TileSearch:
    """Tries tiles, one kernel and shape after the other, and remembers the best."""

    def __init__(self, gpu: Gpu, has_time: Callable[[], bool], say: Say = say_now, most: int | None = None) -> None:
        """most: tiles of a shape that are tried; None: all."""
        self.gpu, self.has_time, self.say, self.most = gpu, has_time, say, most
        self.found: tuned.Tables = {}
        self.in_use: tuned.Tables = {}  # before, for the same shapes

    def best(
        self,
        kernel: str,
        form: str,
        shape: tuple[int, ...],
        tiles: Sequence[Sequence[int]],
        measure: Callable[[], list[float]],
        once: Launch | None = None,
        weights: Sequence[float] = (),
        describe: Callable[[list[float]], str] = micros,
    ) -> list[int] | None:
        """The tile that is the best over all that 'measure' times, each beside its own fastest; it is in use from now
        on. tiles: the rule's first. once: launches the kernel, so that all tiles are compiled at once. weights: how
        much each time counts."""
        in_use = tuned.tables(self.gpu).get((kernel, form), {}).get(shape) or list(tiles[0])
        first = [in_use] if runs(kernel, in_use, tiles) else []
        tried = [list(tile) for tile in dict.fromkeys(map(tuple, [*first, *tiles]))][: self.most]
        if once and self.has_time():
            with compiling(f"  {len(tried)} tiles of {kernel} {form} {shape}", self.say):
                for tile in tried:
                    with using(self.gpu, kernel, form, shape, tile), suppress(Exception):  # said below
                        once()
        times: dict[tuple[int, ...], list[float]] = {}
        for tile in tried:
            if not self.has_time():
                self.say("  no time for more tiles")
                break
            try:
                with using(self.gpu, kernel, form, shape, tile):
                    times[tuple(tile)] = measure()
            except Exception as error:  # a tile too large for this GPU is a result as well
                self.say(f"  {tile} failed: {(str(error).splitlines() or [repr(error)])[0][:120]}")
                continue
            self.say(f"  {tile!s:24s} {describe(times[tuple(tile)])}")
        if not times:
            return None
        fastest = [min(column) for column in zip(*times.values(), strict=True)]
        counts = weights or [1.0] * len(fastest)
        totals = {t: sum(w * a / b for w, a, b in zip(counts, times[t], fastest, strict=True)) for t in times}
        fastest_tile = min(totals, key=lambda t: totals[t])
        best = list(fastest_tile)
        self.say(f"  best {best}")
        put(self.gpu, kernel, form, shape, best)
        self.found.setdefault((kernel, form), {})[shape] = best
        self.in_use.setdefault((kernel, form), {})[shape] = in_use
        return best

    def save(self, path: Path) -> None:
        tuned.save(path, self.found)
        self.say(f"{sum(map(len, self.found.values()))} tiles written to {path}")


def runs(kernel: str, tile: Sequence[int], tiles: Sequence[Sequence[int]]) -> bool:
    """Whether the tile of a table is the one that runs: that of FEW_DOWN gives way if it adds up otherwise than those
    that may be tried."""
    return kernel != experts.FEW_DOWN or experts.adds_up_alike(Tile(*tile), Tile(*tiles[0]))


# ---- which tiles are tried


def numbers(tile: Tile) -> list[int]:
    more = [tile.split, tile.slices] if tile.slices > 1 else [tile.split] if tile.split > 1 else []
    return [tile.block_n, tile.block_k, tile.warps, tile.stages, *more]


def sliced(steps: Sequence[int], across: int = 1, only: int = 0) -> list[list[int]]:
    """Tiles whose warps share 'in'. across: lines of each line of the tile. only: so many slices."""
    made = [
        [max(lines // across, 8 if across > 1 else 16), step, slices, stages, 1, slices]
        for lines, slices in SLICED
        for step in steps
        for stages in (3, 5)
        if slices == (only or slices)
    ]
    return [list(tile) for tile in dict.fromkeys(map(tuple, made))]


def float_tiles(out: int, in_: int, gpu: Gpu, may_split: bool = True) -> list[list[int]]:
    """Of few rows times floats of 16 bits: the rule's, then others of its kind. may_split: the kernel that runs may
    take parts of 'in'."""
    first = numbers(few_rows._choose(out, in_, 2, gpu.sms))
    if in_ < 2048:
        others = [[16, 64, 4, 10], [16, 64, 2, 10], [32, 64, 4, 10], [64, 64, 4, 6]]
        others += [[16, 128, 4, 13], [32, 128, 4, 13]] * (in_ % 128 == 0)
    elif out < 1024:
        others = [[16, 128, 4, 13], [16, 256, 4, 8], [16, 128, 8, 13], [16, 64, 4, 13], [16, 512, 8, 4]]
    elif out < 8192:
        others = [[64, 128, 4, 8], [64, 128, 4, 5], [64, 256, 4, 5], [32, 128, 4, 8], [32, 256, 4, 6], [128, 128, 8, 5]]
        others += [[32, 64, 4, 10], [16, 128, 4, 13], [16, 256, 4, 8], [64, 64, 4, 10]]
    else:
        others = [[64, 128, 4, 5], [64, 128, 4, 8], [64, 64, 4, 8], [128, 64, 4, 6], [128, 128, 8, 4], [128, 128, 8, 5]]
    tiles = [first, *(sliced([64, 128]) if out < 64 * gpu.sms else [])]
    tiles += [tile for tile in others if in_ % tile[1] == 0]
    if may_split and out < 64 * gpu.sms:  # too few strips to fill it
        splits = (2, 3, 4, 8) if out >= 1024 else (4, 8, 16)
        tiles += [[n, k, w, 8, s] for n, k, w in ((64, 128, 4), (32, 128, 4), (16, 128, 4)) for s in splits]
    return tiles


def coded_tiles(out: int, in_: int, step: int, form: str, gpu: Gpu, may_split: bool = True) -> list[list[int]]:
    """Of few rows times codes; step: columns of a tile, which the format decides. form: its name in the tables."""
    rule = few_rows._choose_coded(out, in_, step, 2, gpu.sms, "offset" in form)
    splits = sorted({1, 2, 4, rule.split}) if may_split else [1]
    found = [[64, step, 2, 6, k] for k in splits]
    found += [[n, step, w, s, k] for n, w in FEW for s in (3, 6) for k in splits[-2:]]
    return [numbers(rule), *sliced([step]), *(tile if tile[4] > 1 else tile[:4] for tile in found)]


def wide_tiles(step: int, rows: int) -> list[list[int]]:
    """Of blocks of so many rows times codes."""
    rule = [64, step, 2 if rows <= 32 else 4, 4]
    return [rule, *([n, step, w, s] for n, w in WIDE for s in (3, 5))]


def expert_tiles(
    kernel: str, shape: tuple[int, ...], form: str, gpu: Gpu, step: int = 0, itemsize: int = 2
) -> list[list[int]]:
    """Of experts. shape and form: as in the tables. step: columns of a tile of codes, 0 for floats."""
    in_, size = shape[1:]
    is_row, is_few = kernel == experts.ROW_DOWN, kernel in experts.FEW
    across = size if is_row else 1
    steps = [step] if step else [64, 128] if in_ % 128 == 0 else [64]
    if kernel == experts.FEW_DOWN:
        row = experts.find_tile(experts.ROW_DOWN, shape, form, itemsize, gpu, step)
        if row.slices > 1:  # it adds up as ROW_DOWN does
            return sliced([row.block_k], only=row.slices)
    first = numbers(experts.choose(kernel, shape, itemsize, step))
    found = sliced(steps, across) if is_few and kernel != experts.FEW_DOWN else []
    if step:
        lines = [(max(n // across, 8) if is_row else n, w) for n, w in FEW[:3]]
        few = is_few or size <= 16
        forms, stages = (lines, (3, 5, 8)) if few else (WIDE, (3, 5))
        return [first, *found, *([n, step, w, s] for n, w in forms for s in stages)]
    deep = [128, 256] if in_ % 128 == 0 else [64, 128]
    if is_row:
        strips = [max(n // size, 8) for n in (64, 128, 256)]
        found += [[n, k, 4, s] for n in strips[:2] for k in deep for s in (4, 10)]
        found += [[strips[2], deep[0], 4, 10], [strips[2], deep[0], 8, 10], [strips[1], deep[0], 8, 10]]
        found += [[strips[1], 64, 4, 6], [strips[0], 64, 4, 6]]
    elif is_few or size == 16:
        found += [[n, k, w, s] for n, w in ((64, 4), (128, 4)) for k in deep for s in (4, 8)]
        found += [[64, 64, 4, 6], [128, 64, 4, 6], [128, deep[0], 8, 6]]
    elif size == 32:
        found = [[64, 128, 4, 4], [64, 64, 4, 5], [128, 64, 4, 5], [128, 128, 8, 4], [128, 64, 8, 5]]
    else:
        found = [[128, 64, 8, 4], [128, 64, 4, 4], [256, 64, 8, 3], [256, 64, 8, 4], [128, 64, 8, 5], [128, 32, 4, 6]]
    return [first, *found]


def delta_tiles(kernel: str, dim: int) -> list[list[int]]:
    """Of recurrent layers, the likeliest first: there may be no time for all."""
    if kernel == delta_steps.KERNEL:
        found = [[16, 1], [8, 1], [32, 1], [16, 2], [32, 2], [64, 4], [128, 8]]
    elif kernel == delta_chunks.INSIDE:
        return [[4], [8], [2]]
    else:
        found = [[32, 4, 2], [64, 4, 2]]  # with one stage, Triton 3.6 reads memory that is not its own on an H200
    return [tile for tile in found if tile[0] <= dim]
