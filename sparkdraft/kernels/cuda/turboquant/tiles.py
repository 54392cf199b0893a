"""What both ways through the codes share: layouts, codes on their way through shared memory, and the softmax's steps.

Scores stand on their side, keys down and lanes (rows x grouped heads) across, so that 8 lanes are enough for a warp.
W is the number of a program's warps, 1 or 4.
"""

# Tuples grow while a kernel is compiled, by sums, which are all that the compiler takes for it:
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from sparkdraft.kernels.cuda.turboquant.levels import high_plane, num_stretches, registers


@triton.constexpr_function
def mma(W: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])


@triton.constexpr_function
def key_slice(W: int) -> gl.SliceLayout:
    return gl.SliceLayout(1, gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8]))


@triton.constexpr_function
def lane_slice(W: int) -> gl.SliceLayout:
    return gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8]))


@triton.constexpr_function
def left(W: int) -> gl.DotOperandLayout:
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8]), 2)


@triton.constexpr_function
def right(W: int) -> gl.DotOperandLayout:
    return gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8]), 2)


@triton.constexpr_function
def powers(stop: int) -> list[list[int]]:
    return [[0, 2**i] for i in range(stop.bit_length() - 1)]


@triton.constexpr_function
def key_bytes(width: int, W: int) -> gl.DistributedLinearLayout:
    """[16 keys a warp, width]"""
    chunk = width // 4
    lanes = [[0, chunk], [0, 2 * chunk], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]] if W == 4 else []
    return gl.DistributedLinearLayout([*powers(chunk), [8, 0]], lanes, warps, [], [16 * W, width])


@triton.constexpr_function
def apart(layout: gl.DistributedLinearLayout, eighth: int) -> gl.DistributedLinearLayout:
    """A layout [keys, columns] with columns as [of which eighth, in it]"""
    bases = [
        [[key, column // eighth, column % eighth] for key, column in part]
        for part in (layout.reg_bases, layout.lane_bases, layout.warp_bases)
    ]
    keys, columns = layout.shape
    return gl.DistributedLinearLayout(*bases, [], [keys, columns // eighth, eighth])


@triton.constexpr_function
def _copied(width: int, W: int) -> gl.BlockedLayout:
    """[16 keys, width] of bytes on their way to shared memory, 16 at a time"""
    across = max(width // 16, 1)
    return gl.BlockedLayout([1, min(width, 16)], [32 // across, across], [W, 1], [1, 0])


# Codes: staged in shared memory two tiles deep, plane by plane, and unpacked from there


@gluon.jit
def stages(LEVELS: gl.constexpr, DIM: gl.constexpr):
    """Room for the low plane, the high plane and the scales of two tiles' keys, or values."""
    WIDTH: gl.constexpr = DIM // num_stretches(LEVELS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    low = gl.allocate_shared_memory(gl.uint8, [2, 64, WIDTH], PLAIN)
    scale = gl.allocate_shared_memory(gl.float16, [2, 64], LINE)
    if high_plane(LEVELS):
        return low, scale, gl.allocate_shared_memory(gl.uint8, [2, 64, DIM // 8], PLAIN)
    else:
        return low, scale


@gluon.jit
def _copy_plane(record, shared, i: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr):
    """16 keys of a plane, which lie side by side."""
    LAYOUT: gl.constexpr = _copied(WIDTH, W)
    key = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    byte = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    async_copy.async_copy_global_to_shared(shared.slice(16 * i, 16), record + (key * WIDTH + byte))


@gluon.jit
def _copy(
    record, stages, stage, i: gl.constexpr, LEVELS: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """16 keys, or values, of a record on their way."""
    _copy_plane(record + LOW, stages[0].index(stage), i, DIM // num_stretches(LEVELS), W)
    if high_plane(LEVELS):
        _copy_plane(record + HIGH, stages[2].index(stage), i, DIM // 8, W)
    place = (record + SCALE).to(gl.pointer_type(gl.float16), bitcast=True)
    key = gl.arange(0, 16, gl.BlockedLayout([2], [32], [W], [0]))
    async_copy.async_copy_global_to_shared(stages[1].index(stage).slice(16 * i, 16), place + key)


@gluon.jit
def copy_tile(
    blocks, key_stages, value_stages, stage, records, stride_record,
    KEY_LEVELS: gl.constexpr, VALUE_LEVELS: gl.constexpr, AT: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The records of some blocks on their way to shared memory."""
    for i in gl.static_range(4):
        record = records + blocks[i].to(gl.int64) * stride_record
        _copy(record, key_stages, stage, i, KEY_LEVELS, AT[0], AT[1], AT[4], DIM, W)
        _copy(record, value_stages, stage, i, VALUE_LEVELS, AT[2], AT[3], AT[5], DIM, W)
    async_copy.commit_group()


@gluon.jit
def find_blocks(table, tile, stop):
    """Blocks of a tile; past the end the last one again, whose keys are then read and not seen."""
    blocks = ()
    for i in gl.static_range(4):
        blocks = blocks + (gl.load(table + gl.minimum(tile * 4 + i, (stop - 1) // 16)),)
    return blocks


@gluon.jit
def once_in_four(byte, first, EIGHTH: gl.constexpr):
    """How far the high bits of these columns lie up in a byte, once in every register of four."""
    return gl.where(first, byte // EIGHTH, 0).to(gl.uint8)


@gluon.jit
def load_high(shared, KEYS: gl.constexpr, EIGHTH: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Bytes of the high plane beside those of the low one: each serves columns an eighth apart."""
    APART: gl.constexpr = apart(LAYOUT, EIGHTH)
    x = gl.expand_dims(shared.load(gl.SliceLayout(1, APART)), 1)
    x = x + gl.zeros([KEYS, WIDTH // EIGHTH, EIGHTH], gl.uint8, APART)
    return gl.convert_layout(gl.reshape(x, [KEYS, WIDTH]), LAYOUT, True)


@gluon.jit
def unpack_keys(
    stages, stage, start: gl.constexpr, LEVELS: gl.constexpr, PTX: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr
):
    """Levels of 16 keys a warp, a tensor a stretch, as their bytes lie."""
    COUNT: gl.constexpr = num_stretches(LEVELS)
    WIDTH: gl.constexpr = DIM // COUNT
    TYPES: gl.constexpr = (gl.float16,) * COUNT
    LAYOUT: gl.constexpr = key_bytes(WIDTH, W)
    low = stages[0].index(stage).slice(start, 16 * W).load(LAYOUT)
    if high_plane(LEVELS):
        EIGHTH: gl.constexpr = DIM // 8
        byte = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
        high = load_high(stages[2].index(stage).slice(start, 16 * W), 16 * W, EIGHTH, WIDTH, LAYOUT)
        shift = once_in_four(byte, byte % 4 == 0, EIGHTH) + gl.zeros([16 * W, WIDTH], gl.uint8, LAYOUT)
        return gl.inline_asm_elementwise(PTX, registers(2 * COUNT, 3), [low, high, shift], TYPES, True, 4)
    else:
        return gl.inline_asm_elementwise(PTX, registers(2 * COUNT, 1), [low], TYPES, True, 4)


@gluon.jit
def in_order(x, KEYS: gl.constexpr, WIDTH: gl.constexpr):
    """[KEYS, WIDTH] with columns in the order of the bytes -> in the order in which lanes have them, the query's."""
    return gl.permute(gl.reshape(x, [KEYS, 4, WIDTH // 8, 2]), (0, 2, 1, 3)).reshape([KEYS, WIDTH])


@gluon.jit
def order(n, WIDTH: gl.constexpr):
    """The column that in_order puts at n."""
    return n % 8 // 2 * (WIDTH // 4) + n // 8 * 2 + n % 2


# Softmax


@gluon.jit
def times(acc, factor, COUNT: gl.constexpr):
    scaled = ()
    for s in gl.static_range(COUNT):
        scaled = scaled + (acc[s] * factor[None, :],)
    return scaled


@gluon.jit
def raise_peak(peak, scores):
    """The new peak of each lane, what is taken off its scores, and what earlier weights are worth now."""
    new = gl.maximum(peak, gl.max(scores, 0))
    base = gl.where(new == float("-inf"), 0.0, new)  # a lane that has seen no key yet
    return new, base[None, :], gl.exp2(peak - base)


@gluon.jit
def hide(scores, key, position, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr):
    """Scores of coded keys; -inf of those that a row takes exactly or does not see."""
    seen = (key[:, None] + RECENT <= position[None, :]) & (key >= FIRST)[:, None]
    if WINDOW > 0:
        seen = seen & (key[:, None] > position[None, :] - WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def as_right(weights, LANES: gl.constexpr, W: gl.constexpr):
    """Weights [16, lanes] as the right of a dot: in float16, squares of 8 x 8 turned over within the warp."""
    x = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [weights.to(gl.float16)], gl.float16, False, 2
    )
    x = gl.permute(gl.reshape(x, [2, 8, LANES // 8, 8]), (0, 3, 2, 1)).reshape([16, LANES])
    return gl.convert_layout(x, right(W), True)


@gluon.jit
def some_hidden(start, top, bottom, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr):
    """Whether some row does not take some key of a tile by its code."""
    hidden = (start < FIRST) | (start + 64 + RECENT > top + 1)
    if WINDOW > 0:
        hidden = hidden | (start <= bottom - WINDOW)
    return hidden


@gluon.jit
def only_read(value_scale, key, stop, FIRST: gl.constexpr):
    """0 for keys that no row takes by their codes: 0 * NaN of a stale block would poison a sum."""
    return gl.where((key >= FIRST) & (key < stop), value_scale, 0.0)
