"""What both ways through the codes share: codes on their way through shared memory, and the softmax's steps.

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

from sparkdraft.kernels.cuda.attention.turboquant.levels import high_plane, num_stretches, registers


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
def _apart(layout: gl.DistributedLinearLayout, eighth: int) -> gl.DistributedLinearLayout:
    """A layout [keys, columns] with columns as [of which eighth, in it]"""
    bases = [
        [[key, column // eighth, column % eighth] for key, column in part]
        for part in (layout.reg_bases, layout.lane_bases, layout.warp_bases)
    ]
    keys, columns = layout.shape
    return gl.DistributedLinearLayout(*bases, [], [keys, columns // eighth, eighth])


@triton.constexpr_function
def _copied(width: int, W: int) -> gl.DistributedLinearLayout:
    """[64 keys, width] of bytes on their way to shared memory, 16 at a time; each of four warps has a block of keys"""
    vector, rows = min(width, 16), 16 if W == 4 else 64
    columns = [[0, 2**i] for i in range(vector.bit_length() - 1, width.bit_length() - 1)]
    places = [*columns, *([2**i, 0] for i in range(rows.bit_length() - 1))]
    lanes = [*places[:5], *[[0, 0]] * (5 - len(places))]
    warps = [[16, 0], [32, 0]] if W == 4 else []
    return gl.DistributedLinearLayout([*powers(vector), *places[5:]], lanes, warps, [], [64, width])


# Codes: staged in shared memory plane by plane, and unpacked from there


@gluon.jit
def stages(LEVELS: gl.constexpr, DEPTH: gl.constexpr, DIM: gl.constexpr):
    """Room for the low plane, the scales and the high plane of some tiles' keys, or values; scales of two always."""
    WIDTH: gl.constexpr = DIM // num_stretches(LEVELS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    low = gl.allocate_shared_memory(gl.uint8, [DEPTH, 64, WIDTH], PLAIN)
    scale = gl.allocate_shared_memory(gl.float16, [2, 64], LINE)
    if high_plane(LEVELS):
        return low, scale, gl.allocate_shared_memory(gl.uint8, [DEPTH, 64, DIM // 8], PLAIN)
    else:
        return low, scale


@gluon.jit
def _find_records(records, blocks, row, stride_record):
    """The record of each of a tile's 64 keys."""
    number = row // 16
    block = gl.where(number < 2, gl.where(number < 1, blocks[0], blocks[1]), gl.where(number < 3, blocks[2], blocks[3]))
    return records + block.to(gl.int64) * stride_record


@gluon.jit
def _copy_plane(records, blocks, shared, stride_record, AT: gl.constexpr, WIDTH: gl.constexpr, W: gl.constexpr):
    LAYOUT: gl.constexpr = _copied(WIDTH, W)
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    byte = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    place = _find_records(records, blocks, row, stride_record) + AT
    async_copy.async_copy_global_to_shared(shared, place + row % 16 * WIDTH + byte)


@gluon.jit
def _copy_codes(
    records, blocks, stages, slot, stage, stride_record, LEVELS: gl.constexpr,
    LOW: gl.constexpr, HIGH: gl.constexpr, SCALE: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A tile's keys, or values, on their way: codes to the slot, scales to the stage."""
    _copy_plane(records, blocks, stages[0].index(slot), stride_record, LOW, DIM // num_stretches(LEVELS), W)
    if high_plane(LEVELS):
        _copy_plane(records, blocks, stages[2].index(slot), stride_record, HIGH, DIM // 8, W)
    row = gl.arange(0, 64, gl.BlockedLayout([2], [32], [W], [0]))
    place = (_find_records(records, blocks, row, stride_record) + SCALE).to(gl.pointer_type(gl.float16), bitcast=True)
    async_copy.async_copy_global_to_shared(stages[1].index(stage), place + row % 16)


@gluon.jit
def copy_tile(
    blocks, key_stages, value_stages, key_slot, stage, records, stride_record,
    KEY_LEVELS: gl.constexpr, VALUE_LEVELS: gl.constexpr, AT: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A tile's records on their way to shared memory."""
    _copy_codes(records, blocks, key_stages, key_slot, stage, stride_record, KEY_LEVELS, AT[0], AT[1], AT[4], DIM, W)
    _copy_codes(records, blocks, value_stages, stage, stage, stride_record, VALUE_LEVELS, AT[2], AT[3], AT[5], DIM, W)
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
    """Return how far the high bits of these columns lie up in a byte, once in every register of four."""
    return gl.where(first, byte // EIGHTH, 0).to(gl.uint8)


@gluon.jit
def load_high(shared, KEYS: gl.constexpr, EIGHTH: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Bytes of the high plane beside those of the low one: each serves columns an eighth apart."""
    APART: gl.constexpr = _apart(LAYOUT, EIGHTH)
    x = gl.expand_dims(shared.load(gl.SliceLayout(1, APART)), 1)
    x = x + gl.zeros([KEYS, WIDTH // EIGHTH, EIGHTH], gl.uint8, APART)
    return gl.convert_layout(gl.reshape(x, [KEYS, WIDTH]), LAYOUT, True)


@gluon.jit
def load_codes(stages, slot, start: gl.constexpr, LEVELS: gl.constexpr, LAYOUT: gl.constexpr, DIM: gl.constexpr):
    """Bytes of some keys, or of their values: of the low plane, and of the high one."""
    KEYS: gl.constexpr = LAYOUT.shape[0]
    low = stages[0].index(slot).slice(start, KEYS).load(LAYOUT)
    if high_plane(LEVELS):
        return low, load_high(stages[2].index(slot).slice(start, KEYS), KEYS, DIM // 8, LAYOUT.shape[1], LAYOUT)
    else:
        return (low,)


@gluon.jit
def unpack(codes, LEVELS: gl.constexpr, PTX: gl.constexpr, LAYOUT: gl.constexpr, DIM: gl.constexpr):
    """Their levels, a tensor a stretch, as their bytes lie."""
    COUNT: gl.constexpr = num_stretches(LEVELS)
    TYPES: gl.constexpr = (gl.float16,) * COUNT
    if high_plane(LEVELS):
        KEYS: gl.constexpr = codes[0].shape[0]
        WIDTH: gl.constexpr = codes[0].shape[1]
        byte = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
        shift = once_in_four(byte, byte % 4 == 0, DIM // 8) + gl.zeros([KEYS, WIDTH], gl.uint8, LAYOUT)
        return gl.inline_asm_elementwise(PTX, registers(2 * COUNT, 3), [codes[0], codes[1], shift], TYPES, True, 4)
    else:
        return gl.inline_asm_elementwise(PTX, registers(2 * COUNT, 1), [codes[0]], TYPES, True, 4)


@gluon.jit
def in_order(x, KEYS: gl.constexpr, WIDTH: gl.constexpr):
    """[KEYS, WIDTH] with columns in the order of the bytes -> in the order in which lanes have them, the query's."""
    return gl.permute(gl.reshape(x, [KEYS, 4, WIDTH // 8, 2]), (0, 2, 1, 3)).reshape([KEYS, WIDTH])


# Softmax


@gluon.jit
def raise_peak(peak, scores, AXIS: gl.constexpr):
    """The new peak of each lane, what is taken off its scores, and what earlier weights are worth now."""
    new = gl.maximum(peak, gl.max(scores, AXIS))
    base = gl.where(new == float("-inf"), 0.0, new)  # a lane that has seen no key yet
    return new, base, gl.exp2(peak - base)


@gluon.jit
def hide(scores, key, position, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr):
    """Scores of coded keys; -inf of those that a row takes uncoded or does not see."""
    seen = (key + RECENT <= position) & (key >= FIRST)
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def hide_uncoded(scores, key, position, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr):
    """Scores of uncoded keys; -inf of those that a row takes by their codes or does not see."""
    seen = (key <= position) & ((key + RECENT > position) | (key < FIRST))
    if WINDOW > 0:
        seen = seen & (key > position - WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def is_held(key, page, top, bottom, FIRST: gl.constexpr, RECENT: gl.constexpr):
    """Only keys that some row takes uncoded are there for sure: 0 * NaN of a stale page would poison a sum."""
    return (page >= 0) & (key <= bottom) & ((key < FIRST) | (key + RECENT > top))


@gluon.jit
def some_hidden(start, top, bottom, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr):
    """Return whether some row does not take some key of a tile by its code."""
    hidden = (start < FIRST) | (start + 64 + RECENT > top + 1)
    if WINDOW > 0:
        hidden = hidden | (start <= bottom - WINDOW)
    return hidden


@gluon.jit
def only_read(value_scale, key, stop, FIRST: gl.constexpr):
    """0 for keys that no row takes by their codes: 0 * NaN of a stale block would poison a sum."""
    return gl.where((key >= FIRST) & (key < stop), value_scale, 0.0)
