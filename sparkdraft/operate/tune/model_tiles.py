"""Searches tiles for the matrices and experts of a loaded model, on the GPU that it runs on.

The layers' own weights are the copies that a graph reads one after the other, so nothing of a matrix is in the L2 when
it is read, and the search needs no memory of its own. Tiles of attention and of recurrent layers are left to
tools/cuda_kernels.py and tools/cuda_delta_rule.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sparkdraft.kernels import cuda
from sparkdraft.kernels.cuda.linear import few_rows
from sparkdraft.kernels.cuda.moe import experts as kernels
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.gpu import Gpu, gpu_of
from sparkdraft.kernels.ops import SILU, Activation, Norm, Normed, Routing
from sparkdraft.models.common.blocks import Decoder, GatedMLP
from sparkdraft.models.common.experts import Experts
from sparkdraft.operate.tune import tiles
from sparkdraft.operate.tune.search import Say
from sparkdraft.operate.tune.tiles import TileSearch
from sparkdraft.weights.linear import Linear, WeightTiles

SHARE = 0.4  # of the time that is left for a search, for all tiles
ROWS = {1: 2.0, 4: 1.0, 16: 2.0}  # rows of a step, and how much each counts in the choice of a tile
WIDE_ROWS = (32, 64)
EXPERT_ROWS = (16, 64, 256, 1024)
MOST_COPIES = 32  # of a matrix in a graph
GOAL = 0.02  # seconds of replays per figure


class FoundTiles:
    """Tiles that were found, beside those that they replace."""

    def __init__(self, gpu: Gpu, found: tuned.Tables, before: tuned.Tables) -> None:
        self.gpu, self.found, self.before = gpu, found, before

    def use(self, on: bool) -> None:
        """Put them, or those before them, into the tables that launches look into."""
        for (kernel, form), each in self.found.items():
            for shape, tile in each.items():
                old = self.before.get((kernel, form), {}).get(shape)
                tiles.put(self.gpu, kernel, form, shape, tile if on else old)

    @property
    def path(self) -> Path:
        """The user's own file, which comes before the package's."""
        return tuned.user_file(self.gpu)

    def save(self) -> None:
        tuned.save(self.path, self.found)


def find_tiles(model: Decoder, has_time: Callable[[], bool], stage: Say, say: Say) -> FoundTiles | None:
    """Tiles that are better than those in use; None if there are none. Those in use stay in use."""
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
            tiles.put(gpu, *key, shape, before.get(key, {}).get(shape))
            if tile != search.in_use[key][shape]:
                changed.setdefault(key, {})[shape] = tile
                say(f"tile of {key[0]} {'x'.join(map(str, shape))} ({key[1]}): {tile}")
    return FoundTiles(gpu, changed, before) if changed else None


# ---- matrices


@dataclass(slots=True)
class Family:
    """The matrices of a model that share a tile, and how they are used."""

    kind: str  # "linear", "norm_gated" or "norm_argmax"
    form: str
    shape: tuple[int, int]
    members: list[WeightTiles] = field(default_factory=list)
    activation: Activation = SILU


def families(model: Decoder) -> list[Family]:
    """Largest first: they take most of a step's time."""
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
        tried = tiles.coded_tiles(out, in_, first.layout.tile, family.form, search.gpu, may_split)
    elif dtype.itemsize == 2:
        tried = tiles.float_tiles(out, in_, search.gpu, may_split)
    else:
        return  # the lists are of 16 bits

    def measure() -> list[float]:
        alone = launch(1, first)
        if any(not torch.equal(alone[0], launch(rows, first)[0]) for rows in ROWS):
            raise RuntimeError("rows depend on their neighbours")
        return _times(launch, list(ROWS), members)

    weights = list(ROWS.values())
    search.best(few_rows.KERNEL, family.form, family.shape, tried, measure, lambda: launch(1, first), weights)
    if not first.layout or family.kind == "norm_argmax":
        return
    for rows in WIDE_ROWS:
        wide, shape = tiles.wide_tiles(first.layout.tile, rows), (out, in_, few_rows.block_rows(rows))
        run = _wide_launcher(_normal(rows, in_, device, dtype), out)
        timed = partial(_times, run, [rows], members)
        search.best(few_rows.WIDE, family.form, shape, wide, timed, partial(run, rows, first))


Runner = Callable[[int, WeightTiles], Tensor]  # rows, weight


def _wide_launcher(x: Tensor, out: int) -> Runner:
    target = torch.empty(len(x), out, dtype=x.dtype, device=x.device)

    def launch(rows: int, weight: WeightTiles) -> Tensor:
        few_rows.wide_linear(x[:rows], weight, target[:rows])
        return target

    return launch


def _launcher(family: Family, device: torch.device, dtype: torch.dtype) -> Runner:
    """Runs the family's kernel over so many rows; the first rows are the same for any number of them."""
    in_ = family.shape[1]
    rows16 = _normal(few_rows.MOST_ROWS, in_, device, dtype)
    norm = Norm(torch.ones(in_, dtype=dtype, device=device), 1e-6)
    scaled, squares = few_rows.prepare(Normed(rows16, norm))

    def launch(rows: int, weight: WeightTiles) -> Tensor:
        if family.kind == "linear":
            return few_rows.linear(rows16[:rows], weight)
        normed = Normed(rows16[:rows], norm, scaled[:rows], squares[:rows])
        if family.kind == "norm_gated":
            return few_rows.norm_gated(normed, weight, family.activation)
        return few_rows.norm_argmax(normed, weight)

    return launch


def _times(run: Runner, rows: list[int], members: list[WeightTiles]) -> list[float]:
    return [tiles.seconds([partial(run, count, weight) for weight in members], GOAL) for count in rows]


def _normal(rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device).manual_seed(0)
    return torch.empty(rows, width, dtype=dtype, device=device).normal_(generator=generator)


def _mlps(model: Decoder) -> Iterator[GatedMLP]:
    for part in _parts(model):
        if isinstance(part, GatedMLP):
            yield part


def _parts(model: Decoder) -> Iterator[object]:
    """The MLPs of all layers, and what they are made of."""
    for layer in model.layers:
        mlp = getattr(layer, "mlp", None)
        yield from (mlp, getattr(mlp, "mlp", None), getattr(mlp, "experts", None))


# ---- experts


def expert_groups(model: Decoder) -> list[list[Experts]]:
    """Layers of experts by shape."""
    found: dict[tuple[object, ...], list[Experts]] = {}
    for part in _parts(model):
        if isinstance(part, Experts) and part.gate_up.tiles and part.down.tiles:
            key = (part.gate_up.tiles.format, part.gate_up.tiles.shape, part.down.tiles.shape, part.spec.top_k)
            found.setdefault(key, []).append(part)
    return list(found.values())


def search_experts(search: TileSearch, group: list[Experts], device: torch.device, dtype: torch.dtype) -> None:
    """Each kernel by the time of a layer's experts as a whole, with routings drawn at random."""
    first, top_k, count = group[0], group[0].spec.top_k, group[0].gate_up.count
    assert first.gate_up.tiles and first.down.tiles
    hidden, inter = first.gate_up.tiles.shape[1], first.down.tiles.shape[1]
    wide, narrow = (2 * inter, hidden), (hidden, inter)
    coded = first.gate_up.tiles.layout is not None
    few = [rows for rows in (1, 2) if kernels.one_by_one(rows, top_k, count)]
    choices = 1 << (top_k - 1).bit_length()
    jobs = [(kernels.ROW_DOWN, (*narrow, choices), few)] if few else []
    for rows in EXPERT_ROWS:
        if rows <= few_rows.MOST_ROWS:
            jobs += [(kernels.FEW_GATE_UP, (*wide, choices), [1, rows]), (kernels.FEW_DOWN, (*narrow, choices), [rows])]
        else:
            size = kernels.block_size(rows, top_k, count, coded)
            jobs += [(kernels.GATE_UP, (*wide, size), [rows]), (kernels.DOWN, (*narrow, size), [rows])]
    seen = set[tuple[str, tuple[int, ...]]]()
    for kernel, key, each in jobs:
        if (kernel, key) in seen:
            continue
        seen.add((kernel, key))
        matrix = first.gate_up if key[:2] == wide else first.down
        assert matrix.tiles
        form, step = matrix.tiles.format, few_rows.step_of(matrix.tiles)
        tried = tiles.expert_tiles(kernel, key, form, search.gpu, step, dtype.itemsize)
        cases = [_expert_launches(group, rows, device, dtype) for rows in each]
        search.best(kernel, matrix.tiles.format, key, tried, partial(_case_times, cases), cases[0][0])


def _case_times(cases: list[list[tiles.Launch]]) -> list[float]:
    return [tiles.seconds(launches, GOAL) for launches in cases]


def _expert_launches(group: list[Experts], rows: int, device: torch.device, dtype: torch.dtype) -> list[tiles.Launch]:
    tile = group[0].gate_up.tiles
    assert tile
    x = _normal(rows, tile.shape[1], device, dtype)
    norm = Norm(torch.ones(tile.shape[1], dtype=dtype, device=device), 1e-6)
    generator, made = torch.Generator(device).manual_seed(rows), list[tiles.Launch]()
    for layer in group[:MOST_COPIES]:
        chance = torch.rand(rows, layer.gate_up.count, generator=generator, device=device)
        ids = chance.argsort(1)[:, : layer.spec.top_k].int().contiguous()
        routing = Routing(ids, torch.full(ids.shape, 1 / layer.spec.top_k, device=device))
        weights = layer.gate_up, layer.down, layer.spec.activation
        made.append(partial(cuda.norm_experts, Normed(x, norm), routing, *weights))
    return made
