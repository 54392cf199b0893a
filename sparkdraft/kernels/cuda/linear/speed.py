"""How long a model's quantised matrices take as codes and as bfloat16, for the plan to choose (plan/resolve.py).

Codes are a quarter or half of the bytes, and decoding them takes arithmetic: a large matrix is read faster as codes, a
small one as floats. So the products of a pass are timed on the GPU that will run them, one layer after the other, each
with weights of its own, for a few numbers of tokens. Times are kept in the user's cache folder, by GPU, and measured
again when the kernels or the tiles of these matrices change.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from sparkdraft.kernels.cuda.linear import few_tokens
from sparkdraft.kernels.cuda.linear.matmul import linear
from sparkdraft.kernels.cuda.linear.planes import PlaneLinear
from sparkdraft.kernels.cuda.runtime import tuned
from sparkdraft.kernels.cuda.runtime.compiling import compile_ahead
from sparkdraft.kernels.cuda.runtime.gpu import gpu_of
from sparkdraft.kernels.cuda.runtime.timing import COLD_BYTES, seconds
from sparkdraft.util.files import write_whole
from sparkdraft.weights.hub import cache_dir
from sparkdraft.weights.linear import DenseLinear, Linear, WeightTiles
from sparkdraft.weights.plane_layout import ROWS, CodeForm, PassTimes, PlaneLayout
from sparkdraft.weights.planes import empty

log = logging.getLogger(__name__)
Matrix = tuple[int, int, CodeForm]  # rows, width, and how it is stored
GOAL = 0.02  # seconds of each timing
DTYPE = torch.bfloat16  # of activations, and of decoded matrices


def pass_times(matrices: Sequence[Matrix]) -> PassTimes:
    """The times of these products on the current GPU, measured where they are not known."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # CPU: in Triton's interpreter
    key, path = _key(matrices, device), cache_dir() / "tuned" / "passes.json"
    known = _read(path)
    if key not in known:
        with torch.inference_mode():
            known[key] = measure(matrices, device)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(known, indent=1) + "\n")
        except OSError as error:
            log.warning("%s cannot be written (%s): weights are timed at every start", path, error.strerror)
    return known[key]


def measure(matrices: Sequence[Matrix], device: torch.device) -> PassTimes:
    """Of a long list only as many matrices as the L2 does not hold are measured: what they are worth is a ratio."""
    shown, read = [], 0.0
    for rows, width, form in matrices:
        if read < COLD_BYTES:
            shown.append((rows, width, form))
            read += rows * width * form.per_weight
    inputs = {width: torch.zeros((max(ROWS), width), dtype=DTYPE, device=device) for _, width, _ in shown}
    found = [_times([make(each, device) for each in shown], inputs) for make in (_codes, _floats)]
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the plan asks how much is free
    return PassTimes(*found)


def _times(matrices: Sequence[Linear], inputs: dict[int, Tensor]) -> tuple[float, ...]:
    def run(rows: int) -> None:
        for matrix in matrices:
            assert matrix.tiles
            linear(inputs[matrix.tiles.shape[1]][:rows], matrix)

    if torch.cuda.is_available():
        compile_ahead([partial(run, rows) for rows in ROWS])
    return tuple(seconds([partial(run, rows)], GOAL) for rows in ROWS)


def _codes(matrix: Matrix, device: torch.device) -> Linear:
    rows, width, form = matrix
    planes = empty(_layout(matrix), rows, device, form.has_row_scale(width))
    planes.codes.random_()
    return PlaneLinear(planes)


def _floats(matrix: Matrix, device: torch.device) -> Linear:
    return DenseLinear(torch.randn(matrix[:2], dtype=DTYPE, device=device))


def _layout(matrix: Matrix) -> PlaneLayout:
    layout = matrix[2].layout(matrix[1])
    assert not isinstance(layout, str), layout
    return layout


def _key(matrices: Sequence[Matrix], device: torch.device) -> str:
    """The GPU's name, and a hash of the kernels, of what compiles them, of the matrices and of the tiles that their
    launches have."""
    gpu, tiles = gpu_of(device), {}
    for rows, width, form in set(matrices):
        coded = WeightTiles(torch.empty(0), _layout((rows, width, form)), lines=rows)
        floats = WeightTiles(torch.empty((rows, width), dtype=DTYPE, device="meta"))
        for key in (*few_tokens.tile_keys(coded), *few_tokens.tile_keys(floats)):
            tiles[str(key)] = tuned.find(gpu, key)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"
    forms = [(rows, width, *form) for rows, width, form in matrices]
    what: list[Any] = [torch.__version__, triton.__version__, COLD_BYTES, ROWS, forms, sorted(tiles.items())]
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return f"{name} {hashlib.sha256(code + json.dumps(what).encode()).hexdigest()[:16]}"


def _read(path: Path) -> dict[str, PassTimes]:
    """A file that cannot be read is written anew."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {key: PassTimes(*map(tuple, times)) for key, times in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
