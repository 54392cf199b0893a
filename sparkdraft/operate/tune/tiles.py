"""Searches the tiles of GPU kernels: which are tried, how each is timed, and which is taken.

`sparkdraft tune` searches the shapes of the user's model, and tools/cuda_*.py those of published models. While a tile
is timed it replaces the one in the table (kernels/cuda/runtime/tuned). A figure is the time of a replayed CUDA graph
whose launches read more than the L2 holds. In Triton's interpreter everything runs, and the times mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.attention import paged
from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.linear.few_tokens import Tile
from sparkdraft.kernels.cuda.moe import experts
from sparkdraft.kernels.cuda.recurrent import delta_chunks, delta_steps
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.compiling import only_compiling
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.cuda.runtime.timing import Launch, seconds
from sparkdraft.kernels.ops import SILU, Activation, Norm, Normed, Routing
from sparkdraft.models.common.blocks import Decoder, GatedMLP
from sparkdraft.models.common.experts import Experts
from sparkdraft.weights.linear import Linear, WeightTiles

FEW = [(64, 2), (128, 2), (32, 1), (64, 4)]  # lines and warps over codes; all but the last run mma.sync
SLICED = [(16, 4), (32, 4), (16, 8), (32, 2), (64, 2)]  # lines, and slices of 'in', a warp each
WIDE = [(64, 2), (64, 4), (128, 4)]
Say = Callable[[str], None]


def say_now(text: str) -> None:
    print(text, flush=True)


def forget() -> None:
    """Forget which tiles were chosen for launches."""
    for cached in (
        few_tokens._launch, few_tokens._wide_launch, experts._launch, paged._launch, delta_steps.choose_tile,
        delta_chunks.choose_tiles,
    ):  # fmt: skip
        cached.cache_clear()


def put(gpu: Gpu, kernel: str, form: str, shape: tuple[int, ...], tile: Any) -> Any:
    """Put a tile into the table that launches look into, or remove the entry for None. Returns the entry before."""
    table = tuned.tables(gpu).setdefault((kernel, form), {})
    before = table.pop(shape, None)
    if tile is not None:
        table[shape] = tile
    forget()
    return before


@contextmanager
def using(gpu: Gpu, kernel: str, form: str, shape: tuple[int, ...], tile: list[int]) -> Iterator[None]:
    """Use a tile in place of the table's within the block."""
    before = put(gpu, kernel, form, shape, tile)
    try:
        yield
    finally:
        put(gpu, kernel, form, shape, before)


@contextmanager
def compiling(what: str, say: Say = say_now) -> Iterator[None]:
    """Compile, without running, the kernels launched within the block. What fails will fail again when it is timed."""
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
        """most: tiles to try per shape; None: all."""
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
        """Return the best tile over all that 'measure' times, each relative to its fastest, and use it from now on.
        tiles: the rule's first. once: launches the kernel, so that all tiles compile together. weights: of each time.
        """
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
    """Tell if the table's tile is the one that runs: FEW_DOWN's gives way if it sums in another order than the tiles to
    try."""
    return kernel != experts.FEW_DOWN or experts.adds_up_alike(Tile(*tile), Tile(*tiles[0]))


# ---- which tiles are tried


def numbers(tile: Tile) -> list[int]:
    more = [tile.split, tile.slices] if tile.slices > 1 else [tile.split] if tile.split > 1 else []
    return [tile.block_n, tile.block_k, tile.warps, tile.stages, *more]


def sliced(steps: Sequence[int], across: int = 1, only: int = 0) -> list[list[int]]:
    """Return tiles whose warps share 'in'. across: lines of each line of the tile. only: this number of slices."""
    made = [
        [max(lines // across, 8 if across > 1 else 16), step, slices, stages, 1, slices]
        for lines, slices in SLICED
        for step in steps
        for stages in (3, 5)
        if slices == (only or slices)
    ]
    return [list(tile) for tile in dict.fromkeys(map(tuple, made))]


def float_tiles(out: int, in_: int, gpu: Gpu, may_split: bool = True) -> list[list[int]]:
    """Return tiles for few tokens times 16-bit floats: the rule's, then others. may_split: whether the kernel may split
    'in'."""
    first = numbers(few_tokens._choose(out, in_, 2, gpu.sms))
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
    """Return tiles for few tokens times codes. step: columns of a tile, set by the format. form: its name in the
    tables."""
    rule = few_tokens._choose_coded(out, in_, step, 2, gpu.sms, "offset" in form)
    splits = sorted({1, 2, 4, rule.split}) if may_split else [1]
    found = [[64, step, 2, 6, k] for k in splits]
    found += [[n, step, w, s, k] for n, w in FEW for s in (3, 6) for k in splits[-2:]]
    return [numbers(rule), *sliced([step]), *(tile if tile[4] > 1 else tile[:4] for tile in found)]


def wide_tiles(step: int, rows: int) -> list[list[int]]:
    """Return tiles for blocks of so many tokens times codes."""
    rule = [64, step, 2 if rows <= 32 else 4, 4]
    return [rule, *([n, step, w, s] for n, w in WIDE for s in (3, 5))]


def expert_tiles(
    kernel: str, shape: tuple[int, ...], form: str, gpu: Gpu, step: int = 0, itemsize: int = 2
) -> list[list[int]]:
    """Return tiles for experts. shape, form: as in the tables. step: columns of a tile of codes, 0 for floats."""
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


# ---- the tiles of a loaded model
#
# A graph reads the weights of many layers one after the other, so no weight is in the L2 when it is read, and the
# search needs no memory of its own. Attention and recurrent layers are left to tools/cuda_kernels.py and
# cuda_delta_rule.py.

SHARE = 0.4  # of the time that is left for a search, for all tiles
ROWS = {1: 2.0, 4: 1.0, 16: 2.0}  # tokens of a step, and how much each counts in the choice of a tile
WIDE_ROWS = (32, 64)
EXPERT_ROWS = (16, 64, 256, 1024)
MOST_COPIES = 32  # of a matrix in a graph
GOAL = 0.02  # seconds of replays per figure


class FoundTiles:
    """Found tiles, and those that they replace."""

    def __init__(self, gpu: Gpu, found: tuned.Tables, before: tuned.Tables) -> None:
        self.gpu, self.found, self.before = gpu, found, before

    def use(self, on: bool) -> None:
        """Put these tiles, or those before them, into the tables that launches look into."""
        for (kernel, form), each in self.found.items():
            for shape, tile in each.items():
                old = self.before.get((kernel, form), {}).get(shape)
                put(self.gpu, kernel, form, shape, tile if on else old)

    @property
    def path(self) -> Path:
        """The user's file, which precedes the package's."""
        return tuned.user_file(self.gpu)

    def save(self) -> None:
        tuned.save(self.path, self.found)


def find_tiles(model: Decoder, has_time: Callable[[], bool], stage: Say, say: Say) -> FoundTiles | None:
    """Return tiles that are better than those in use, or None. Those in use stay in use."""
    device, dtype = model.norm.gain.device, model.dtype
    gpu = gpu_of(device)
    before = {key: dict(each) for key, each in tuned.tables(gpu).items()}  # some tiles in use are by rule, in no table
    search = TileSearch(gpu, has_time, lambda text: None)
    with torch.inference_mode():
        for family in families(model):
            stage(f"tiles of {family.kind}, {family.shape[0]} x {family.shape[1]} ({family.form})")
            search_matrices(search, family, device, dtype)
        for group in expert_groups(model):
            stage(f"tiles of {group[0].gate_up.count} experts")
            search_experts(search, group, device, dtype)
    changed: tuned.Tables = {}
    for key, each in search.found.items():
        for shape, tile in each.items():
            put(gpu, *key, shape, before.get(key, {}).get(shape))
            if tile != search.in_use[key][shape]:
                changed.setdefault(key, {})[shape] = tile
                say(f"tile of {key[0]} {'x'.join(map(str, shape))} ({key[1]}): {tile}")
    return FoundTiles(gpu, changed, before) if changed else None


# ---- matrices


@dataclass(slots=True)
class Family:
    """Matrices of a model that share a tile, and how they are used."""

    kind: str  # "linear", "norm_gated" or "norm_argmax"
    form: str
    shape: tuple[int, int]
    members: list[WeightTiles] = field(default_factory=list)
    activation: Activation = SILU


def families(model: Decoder) -> list[Family]:
    """Return the families, the largest first: they take most of a step's time."""
    found: dict[tuple[str, tuple[int, int]], Family] = {}
    gated = {id(m.gate_up): m.activation for m in _mlps(model)}
    for matrix in model.matrices:
        if not isinstance(matrix, Linear):
            continue
        for part in matrix.parts or [matrix]:
            if part.tiles is None:
                continue
            kind = "norm_gated" if id(part) in gated else "norm_argmax" if part is model.head else "linear"
            made = Family(kind, part.tiles.format, part.tiles.shape, [], gated.get(id(part), SILU))
            family = found.setdefault((made.form, made.shape), made)
            if len(family.members) < MOST_COPIES:
                family.members.append(part.tiles)
    return sorted(found.values(), key=lambda f: -len(f.members) * f.shape[0] * f.shape[1])


def search_matrices(search: TileSearch, family: Family, device: torch.device, dtype: torch.dtype) -> None:
    (out, in_), members, first = family.shape, family.members, family.members[0]
    launch = _launcher(family, device, dtype)
    may_split = family.kind == "linear"
    if first.layout:
        tried = coded_tiles(out, in_, first.layout.tile, family.form, search.gpu, may_split)
    elif dtype.itemsize == 2:
        tried = float_tiles(out, in_, search.gpu, may_split)
    else:
        return  # the lists are of 16 bits

    def measure() -> list[float]:
        alone = launch(1, first)
        if any(not torch.equal(alone[0], launch(rows, first)[0]) for rows in ROWS):
            raise RuntimeError("rows depend on their neighbours")
        return _times(launch, list(ROWS), members)

    weights = list(ROWS.values())
    search.best(few_tokens.KERNEL, family.form, family.shape, tried, measure, lambda: launch(1, first), weights)
    if not first.layout or family.kind == "norm_argmax":
        return
    for rows in WIDE_ROWS:
        wide, shape = wide_tiles(first.layout.tile, rows), (out, in_, few_tokens.block_tokens(rows))
        run = _wide_launcher(_normal(rows, in_, device, dtype), out)
        timed = partial(_times, run, [rows], members)
        search.best(few_tokens.WIDE, family.form, shape, wide, timed, partial(run, rows, first))


Runner = Callable[[int, WeightTiles], Tensor]  # tokens, weight


def _wide_launcher(x: Tensor, out: int) -> Runner:
    target = torch.empty(len(x), out, dtype=x.dtype, device=x.device)

    def launch(rows: int, weight: WeightTiles) -> Tensor:
        few_tokens.wide_linear(x[:rows], weight, target[:rows])
        return target

    return launch


def _launcher(family: Family, device: torch.device, dtype: torch.dtype) -> Runner:
    """Return a function that runs the family's kernel over so many tokens; the first are always the same."""
    in_ = family.shape[1]
    rows16 = _normal(few_tokens.MOST_TOKENS, in_, device, dtype)
    norm = Norm(torch.ones(in_, dtype=dtype, device=device), 1e-6)
    scaled, squares = few_tokens.prepare(Normed(rows16, norm))

    def launch(rows: int, weight: WeightTiles) -> Tensor:
        if family.kind == "linear":
            return few_tokens.linear(rows16[:rows], weight)
        normed = Normed(rows16[:rows], norm, scaled[:rows], squares[:rows])
        if family.kind == "norm_gated":
            return few_tokens.norm_gated(normed, weight, family.activation)
        return few_tokens.norm_argmax(normed, weight)

    return launch


def _times(run: Runner, rows: list[int], members: list[WeightTiles]) -> list[float]:
    return [seconds([partial(run, count, weight) for weight in members], GOAL) for count in rows]


def _normal(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(rows, width, dtype=dtype, device=device).normal_(generator=generator)


def _mlps(model: Decoder) -> Iterator[GatedMLP]:
    for part in _parts(model):
        if isinstance(part, GatedMLP):
            yield part


def _parts(model: Decoder) -> Iterator[object]:
    """Yield the MLPs of all layers, and their parts."""
    for layer in model.layers:
        mlp = getattr(layer, "mlp", None)
        yield from (mlp, getattr(mlp, "mlp", None), getattr(mlp, "experts", None))


# ---- experts


def expert_groups(model: Decoder) -> list[list[Experts]]:
    """Group layers of experts by shape."""
    found: dict[tuple[object, ...], list[Experts]] = {}
    for part in _parts(model):
        if isinstance(part, Experts) and part.gate_up.tiles and part.down.tiles:
            key = (part.gate_up.tiles.format, part.gate_up.tiles.shape, part.down.tiles.shape, part.spec.top_k)
            found.setdefault(key, []).append(part)
    return list(found.values())


def search_experts(search: TileSearch, group: list[Experts], device: torch.device, dtype: torch.dtype) -> None:
    """Search each kernel by the time of a layer's experts as a whole, with random routings."""
    first, top_k, count = group[0], group[0].spec.top_k, group[0].gate_up.count
    assert first.gate_up.tiles and first.down.tiles
    hidden, inter = first.gate_up.tiles.shape[1], first.down.tiles.shape[1]
    wide, narrow = (2 * inter, hidden), (hidden, inter)
    coded = first.gate_up.tiles.layout is not None
    few = [rows for rows in (1, 2) if experts.one_by_one(rows, top_k, count)]
    choices = 1 << (top_k - 1).bit_length()
    jobs = [(experts.ROW_DOWN, (*narrow, choices), few)] if few else []
    for rows in EXPERT_ROWS:
        if rows <= few_tokens.MOST_TOKENS:
            jobs += [(experts.FEW_GATE_UP, (*wide, choices), [1, rows]), (experts.FEW_DOWN, (*narrow, choices), [rows])]
        else:
            size = experts.block_size(rows, top_k, count, coded)
            jobs += [(experts.GATE_UP, (*wide, size), [rows]), (experts.DOWN, (*narrow, size), [rows])]
    seen = set[tuple[str, tuple[int, ...]]]()
    for kernel, key, each in jobs:
        if (kernel, key) in seen:
            continue
        seen.add((kernel, key))
        matrix = first.gate_up if key[:2] == wide else first.down
        assert matrix.tiles
        form, step = matrix.tiles.format, few_tokens.step_of(matrix.tiles)
        tried = expert_tiles(kernel, key, form, search.gpu, step, dtype.itemsize)
        cases = [_expert_launches(group, rows, device, dtype) for rows in each]
        search.best(kernel, matrix.tiles.format, key, tried, partial(_case_times, cases), cases[0][0])


def _case_times(cases: list[list[Launch]]) -> list[float]:
    return [seconds(launches, GOAL) for launches in cases]


def _expert_launches(group: list[Experts], rows: int, device: torch.device, dtype: torch.dtype) -> list[Launch]:
    tile = group[0].gate_up.tiles
    assert tile
    x = _normal(rows, tile.shape[1], device, dtype)
    norm = Norm(torch.ones(tile.shape[1], dtype=dtype, device=device), 1e-6)
    generator, made = torch.Generator(device).manual_seed(rows), list[Launch]()
    for layer in group[:MOST_COPIES]:
        chance = torch.rand(rows, layer.gate_up.count, generator=generator, device=device)
        ids = chance.argsort(1)[:, : layer.spec.top_k].int().contiguous()
        routing = Routing(ids, torch.full(ids.shape, 1 / layer.spec.top_k, device=device))
        weights = layer.gate_up, layer.down, layer.spec.activation
        made.append(partial(cuda.norm_experts, Normed(x, norm), routing, *weights))
    return made
