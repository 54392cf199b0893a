"""Attention over codes and exact rows: decode rows, drafted blocks and prompt chunks.

Codes come from memory, two tiles ahead of their use, and become levels in the very registers in which tensor cores want
them: a sum does not mind its order, so columns are taken as the bytes happen to lie, and the query and the result
follow. Scores stand on their side, keys down and lanes (rows x grouped heads) across, so that 8 lanes are enough. A
program of one warp has 8; one of four has 64, unpacks a quarter of the keys in each warp and hands the levels round
through shared memory. Written in Gluon, Triton's language with layouts.

    keys of a row at p     | first |............ coded ............| recent .. p |     its own border, whatever its tile
    shares of a tile       | 0 .. S: tiles of coded keys, t to share t % S | S .. S + E: of exact keys, 16 each, alike |
    codes of 16 keys       K: lane 4k + c of a warp has key k and k + 8, a quarter c of their bytes
                           V: lane 4c + k has the keys 2k, 2k + 1, 2k + 8, 2k + 9, an eighth c of their bytes
    columns of a result    n of a stretch is column n % 8 * chunk + n // 8, where an eighth of the bytes is a chunk

Queries come rotated, and results leave so (join.py takes them back). A row's bits hang on its own query and keys alone,
as attention.py has it: tiles are counted from the first key, keys that a row does not see add exact zeros, one warp and
four do the same in the same order, and launches of up to most_query rows are cut alike. Products are not fused with
sums: a score is rounded alike with and without a mask.
"""

# Tuples grow while a kernel is compiled, by sums, which are all that the compiler takes for it:
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_wait

from sparkdraft.kernels.cuda.turboquant.levels import high_plane, num_stretches, registers

# Layouts. W: warps of a program.


@triton.constexpr_function
def _mma(W: int) -> gl.NVMMADistributedLayout:
    return gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])


@triton.constexpr_function
def _keys(W: int) -> gl.SliceLayout:
    return gl.SliceLayout(1, gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8]))


@triton.constexpr_function
def _lanes(W: int) -> gl.SliceLayout:
    return gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8]))


@triton.constexpr_function
def _left(W: int) -> gl.DotOperandLayout:
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8]), 2)


@triton.constexpr_function
def _right(W: int) -> gl.DotOperandLayout:
    return gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8]), 2)


@triton.constexpr_function
def _powers(stop: int) -> list[list[int]]:
    return [[0, 2**i] for i in range(stop.bit_length() - 1)]


@triton.constexpr_function
def _key_bytes(width: int, W: int) -> gl.DistributedLinearLayout:
    """[16 keys a warp, width]"""
    chunk = width // 4
    lanes = [[0, chunk], [0, 2 * chunk], [1, 0], [2, 0], [4, 0]]
    warps = [[16, 0], [32, 0]] if W == 4 else []
    return gl.DistributedLinearLayout([*_powers(chunk), [8, 0]], lanes, warps, [], [16 * W, width])


@triton.constexpr_function
def _value_bytes(width: int, W: int) -> gl.DistributedLinearLayout:
    """[16 keys a warp, width]; even and odd keys lie in the same lanes"""
    chunk = width // 8
    lanes = [[2, 0], [4, 0], [0, chunk], [0, 2 * chunk], [0, 4 * chunk]]
    warps = [[16, 0], [32, 0]] if W == 4 else []
    return gl.DistributedLinearLayout([*_powers(chunk), [8, 0], [1, 0]], lanes, warps, [], [16 * W, width])


@triton.constexpr_function
def _pair_bytes(width: int, W: int) -> gl.DistributedLinearLayout:
    """[8 pairs of keys a warp, width]: of the even keys, or of the odd ones"""
    chunk = width // 8
    lanes = [[1, 0], [2, 0], [0, chunk], [0, 2 * chunk], [0, 4 * chunk]]
    warps = [[8, 0], [16, 0]] if W == 4 else []
    return gl.DistributedLinearLayout([*_powers(chunk), [4, 0]], lanes, warps, [], [8 * W, width])


@triton.constexpr_function
def _apart(layout: gl.DistributedLinearLayout, eighth: int) -> gl.SliceLayout:
    """[keys, an eighth of the columns], for bytes that serve all columns of a layout [keys, columns]"""
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


@triton.constexpr_function
def _lines(length: int) -> gl.DistributedLinearLayout:
    """[32 lanes, length], in all of four warps"""
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]]
    return gl.DistributedLinearLayout(_powers(length), lanes, [[0, 0], [0, 0]], [], [32, length])


@triton.constexpr_function
def _shared_lines(length: int) -> gl.SwizzledSharedLayout:
    """[128, length] of float16: lanes side by side do not meet in a bank when each reads 16 bytes of its line."""
    return gl.SwizzledSharedLayout(8, max(64 // length, 1), max(min(length // 8, 8), 1), [1, 0])


@triton.constexpr_function
def _loaded(width: int, W: int) -> gl.BlockedLayout:
    """[16 keys, width] of float16, read 16 bytes at a time"""
    across = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [W, 1], [1, 0])


# Codes: staged in shared memory two tiles deep, plane by plane, and unpacked from there


@gluon.jit
def _stages(LEVELS: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Room for the low plane, the high plane and the scales of two tiles' keys, or values."""
    WIDTH: gl.constexpr = DIM // num_stretches(LEVELS)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    low = gl.allocate_shared_memory(gl.uint8, [2, BLOCK_N, WIDTH], PLAIN)
    scale = gl.allocate_shared_memory(gl.float16, [2, BLOCK_N], LINE)
    if high_plane(LEVELS):
        return low, scale, gl.allocate_shared_memory(gl.uint8, [2, BLOCK_N, DIM // 8], PLAIN)
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
def _shift(byte, first, EIGHTH: gl.constexpr):
    """How far the high bits of these columns lie up in a byte, once in every register of four."""
    return gl.where(first, byte // EIGHTH, 0).to(gl.uint8)


@gluon.jit
def _load_high(shared, KEYS: gl.constexpr, EIGHTH: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    """Bytes of the high plane beside those of the low one: each serves columns an eighth apart."""
    APART: gl.constexpr = _apart(LAYOUT, EIGHTH)
    x = gl.expand_dims(shared.load(gl.SliceLayout(1, APART)), 1)
    x = x + gl.zeros([KEYS, WIDTH // EIGHTH, EIGHTH], gl.uint8, APART)
    return gl.convert_layout(gl.reshape(x, [KEYS, WIDTH]), LAYOUT, True)


@gluon.jit
def _unpack_keys(
    stages, stage, start: gl.constexpr, LEVELS: gl.constexpr, PTX: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr
):
    """Levels of 16 keys a warp, a tensor a stretch, as their bytes lie."""
    COUNT: gl.constexpr = num_stretches(LEVELS)
    WIDTH: gl.constexpr = DIM // COUNT
    TYPES: gl.constexpr = (gl.float16,) * COUNT
    LAYOUT: gl.constexpr = _key_bytes(WIDTH, W)
    low = stages[0].index(stage).slice(start, 16 * W).load(LAYOUT)
    if high_plane(LEVELS):
        EIGHTH: gl.constexpr = DIM // 8
        byte = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
        high = _load_high(stages[2].index(stage).slice(start, 16 * W), 16 * W, EIGHTH, WIDTH, LAYOUT)
        shift = _shift(byte, byte % 4 == 0, EIGHTH) + gl.zeros([16 * W, WIDTH], gl.uint8, LAYOUT)
        return gl.inline_asm_elementwise(PTX, registers(2 * COUNT, 3), [low, high, shift], TYPES, True, 4)
    else:
        return gl.inline_asm_elementwise(PTX, registers(2 * COUNT, 1), [low], TYPES, True, 4)


@gluon.jit
def _left_keys(x, WIDTH: gl.constexpr, W: gl.constexpr, TRIVIAL: gl.constexpr):
    """[16, WIDTH] with columns in the order of the bytes -> in that of the query's columns, as the left of a dot."""
    x = gl.permute(gl.reshape(x, [16, 4, WIDTH // 8, 2]), (0, 2, 1, 3)).reshape([16, WIDTH])
    return gl.convert_layout(x, _left(W), TRIVIAL)


@gluon.jit
def _left_values(x, W: gl.constexpr):
    """[16, columns] -> [columns, 16] as the left of a dot."""
    return gl.convert_layout(gl.permute(x, (1, 0)), _left(W), True)


@gluon.jit
def _even_and_odd(x, WIDTH: gl.constexpr, W: gl.constexpr):
    even, odd = gl.split(gl.permute(gl.reshape(x, [8 * W, 2, WIDTH]), (0, 2, 1)))
    LAYOUT: gl.constexpr = _pair_bytes(WIDTH, W)
    return gl.convert_layout(even, LAYOUT, True), gl.convert_layout(odd, LAYOUT, True)


@gluon.jit
def _unpack_values(
    stages, stage, start: gl.constexpr, LEVELS: gl.constexpr, PTX: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr
):
    """Levels of 16 keys' values a warp in pairs, two tensors a stretch."""
    COUNT: gl.constexpr = num_stretches(LEVELS)
    WIDTH: gl.constexpr = DIM // COUNT
    TYPES: gl.constexpr = (gl.float16,) * (2 * COUNT)
    LAYOUT: gl.constexpr = _value_bytes(WIDTH, W)
    even, odd = _even_and_odd(stages[0].index(stage).slice(start, 16 * W).load(LAYOUT), WIDTH, W)
    if high_plane(LEVELS):
        EIGHTH: gl.constexpr = DIM // 8
        high = _load_high(stages[2].index(stage).slice(start, 16 * W), 16 * W, EIGHTH, WIDTH, LAYOUT)
        high_even, high_odd = _even_and_odd(high, WIDTH, W)
        PAIRS: gl.constexpr = _pair_bytes(WIDTH, W)
        byte = gl.arange(0, WIDTH, gl.SliceLayout(0, PAIRS))[None, :]
        pair = gl.arange(0, 8 * W, gl.SliceLayout(1, PAIRS))[:, None]
        if WIDTH >= 32:
            shift = _shift(byte, (byte % 4 == 0) & (pair >= 0), EIGHTH)
        else:  # a lane has two bytes of a key: the four of a register are those of two pairs
            shift = _shift(byte, (byte % 2 == 0) & (pair % 8 < 4), EIGHTH)
        planes = [even, odd, high_even, high_odd, shift]
        return gl.inline_asm_elementwise(PTX, registers(4 * COUNT, 5), planes, TYPES, True, 4)
    else:
        return gl.inline_asm_elementwise(PTX, registers(4 * COUNT, 2), [even, odd], TYPES, True, 4)


@gluon.jit
def _as_values(first, last, WIDTH: gl.constexpr, W: gl.constexpr):
    """Pairs of levels of two bytes each, [8 a warp, WIDTH] -> [16 keys a warp, WIDTH columns]."""
    both = gl.join(first, last)  # the last index: which half of a register's four bytes
    CHUNK: gl.constexpr = WIDTH // 8
    if CHUNK >= 4:
        apart = gl.reshape(both, [8 * W, 8, CHUNK // 4, 2, 2, 2])  # pair, chunk, word, byte of its half, odd, half
        return gl.permute(apart, (0, 4, 2, 5, 3, 1)).reshape([16 * W, WIDTH])
    else:  # a lane has two bytes of a key: the four of a register are those of two pairs
        few = gl.reshape(both, [W, 2, 4, 8, 2, 2])  # warp, byte of its half, pair, chunk, odd, pair's highest bit
        return gl.permute(few, (0, 5, 2, 4, 1, 3)).reshape([16 * W, WIDTH])


@gluon.jit
def _put_keys(x, shared, WIDTH: gl.constexpr):
    """What each lane of a warp has, in a line of its own: a warp that reads it has it in the same lanes.

    The 8 levels that one product takes from a lane lie side by side, in the order of its registers.
    """
    apart = gl.reshape(x, [4, 2, 8, 4, WIDTH // 16, 2, 2])  # warp, upper half of its keys, key, quarter, and 3 of bytes
    shared.store(gl.permute(apart, (0, 2, 3, 4, 5, 1, 6)).reshape([128, WIDTH // 2]))


@gluon.jit
def _take_keys(shared, i: gl.constexpr, WIDTH: gl.constexpr):
    x = gl.reshape(shared.slice(32 * i, 32).load(_lines(WIDTH // 2)), [8, 4, WIDTH // 16, 2, 2, 2])
    return _left_keys(gl.permute(x, (4, 0, 1, 2, 3, 5)).reshape([16, WIDTH]), WIDTH, 4, True)


@gluon.jit
def _put_values(x, shared, WIDTH: gl.constexpr):
    apart = gl.reshape(
        x, [4, 2, 4, 2, WIDTH // 16, 2, 8]
    )  # warp, upper half of its keys, pair, odd, 2 of columns, chunk
    shared.store(gl.permute(apart, (0, 6, 2, 4, 1, 5, 3)).reshape([128, WIDTH // 2]))


@gluon.jit
def _take_values(shared, i: gl.constexpr, WIDTH: gl.constexpr):
    x = gl.reshape(shared.slice(32 * i, 32).load(_lines(WIDTH // 2)), [8, 4, WIDTH // 16, 2, 2, 2])
    return _left_values(gl.permute(x, (3, 1, 5, 2, 4, 0)).reshape([16, WIDTH]), 4)


# Softmax


@gluon.jit
def _load_query(q, row, head, valid, stride_row, stride_head, WIDTH: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr):
    """Its stretches, [columns, lanes] each, with columns in the order of a key's bytes."""
    RIGHT: gl.constexpr = _right(W)
    n = gl.arange(0, WIDTH, gl.SliceLayout(1, RIGHT))
    column = n % 8 // 2 * (WIDTH // 4) + n // 8 * 2 + n % 2
    line = gl.convert_layout(row * stride_row + head * stride_head, gl.SliceLayout(0, RIGHT))
    mask = gl.convert_layout(valid, gl.SliceLayout(0, RIGHT))[None, :]
    place = q + line[None, :] + column[:, None]
    stretches = ()
    for s in gl.static_range(DIM // WIDTH):
        stretches = stretches + (gl.load(place + s * WIDTH, mask=mask, other=0.0).to(gl.float16),)
    return stretches


@gluon.jit
def _as_right(weights, LANES: gl.constexpr, W: gl.constexpr):
    """Weights [16, lanes] as the right of a dot: in float16, squares of 8 x 8 turned over within the warp."""
    x = gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [weights.to(gl.float16)], gl.float16, False, 2
    )
    x = gl.permute(gl.reshape(x, [2, 8, LANES // 8, 8]), (0, 3, 2, 1)).reshape([16, LANES])
    return gl.convert_layout(x, _right(W), True)


@gluon.jit
def _times(acc, factor, COUNT: gl.constexpr):
    scaled = ()
    for s in gl.static_range(COUNT):
        scaled = scaled + (acc[s] * factor[None, :],)
    return scaled


@gluon.jit
def _raise_peak(peak, scores):
    """The new peak of each lane, what is taken off its scores, and what earlier weights are worth now."""
    new = gl.maximum(peak, gl.max(scores, 0))
    base = gl.where(new == float("-inf"), 0.0, new)  # a lane that has seen no key yet
    return new, base[None, :], gl.exp2(peak - base)


@gluon.jit
def _hide(scores, key, position, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr):
    """Scores of coded keys; -inf of those that a row takes exactly or does not see."""
    seen = (key[:, None] + RECENT <= position[None, :]) & (key >= FIRST)[:, None]
    if WINDOW > 0:
        seen = seen & (key[:, None] > position[None, :] - WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _copy_tile(
    blocks, key_stages, value_stages, stage, records, stride_record,
    KEY_LEVELS: gl.constexpr, VALUE_LEVELS: gl.constexpr, AT: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """The records of some blocks on their way to shared memory."""
    for i in gl.static_range(len(blocks)):
        record = records + blocks[i].to(gl.int64) * stride_record
        _copy(record, key_stages, stage, i, KEY_LEVELS, AT[0], AT[1], AT[4], DIM, W)
        _copy(record, value_stages, stage, i, VALUE_LEVELS, AT[2], AT[3], AT[5], DIM, W)
    async_copy.commit_group()


@gluon.jit
def _find_blocks(table, tile, stop, STEPS: gl.constexpr):
    """Blocks of a tile; past the end the last one again, whose keys are then read and not seen."""
    blocks = ()
    for i in gl.static_range(STEPS):
        blocks = blocks + (gl.load(table + gl.minimum(tile * STEPS + i, (stop - 1) // 16)),)
    return blocks


@gluon.jit
def _buffers(COUNT: gl.constexpr, DIM: gl.constexpr):
    LENGTH: gl.constexpr = DIM // COUNT // 2
    a = gl.allocate_shared_memory(gl.float16, [128, LENGTH], _shared_lines(LENGTH))
    b = gl.allocate_shared_memory(gl.float16, [128, LENGTH], _shared_lines(LENGTH))
    if COUNT == 4:
        c = gl.allocate_shared_memory(gl.float16, [128, LENGTH], _shared_lines(LENGTH))
        d = gl.allocate_shared_memory(gl.float16, [128, LENGTH], _shared_lines(LENGTH))
        return a, b, c, d
    else:
        return a, b


@gluon.jit
def _scan_codes(
    acc, peak, total, q, position, begin, end, step, top, bottom, stop, records, table, stride_record, scale,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, LANES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Online softmax over the coded keys of tiles begin, begin + step .., 16 keys after the other.

    While a tile is worked on, the next one's bytes and the numbers of the blocks after that are on their way.
    """
    K: gl.constexpr = num_stretches(KEY_LEVELS)
    V: gl.constexpr = num_stretches(VALUE_LEVELS)
    STEPS: gl.constexpr = BLOCK_N // 16
    lane_key = gl.arange(0, 16, _keys(W))
    key_stages = _stages(KEY_LEVELS, DIM, BLOCK_N)
    value_stages = _stages(VALUE_LEVELS, DIM, BLOCK_N)
    if W == 4:
        gl.static_assert(STEPS == 4)
        shared_keys = _buffers(K, DIM)
        shared_values = _buffers(V, DIM)
    stage = 0
    _copy_tile(
        _find_blocks(table, begin, stop, STEPS), key_stages, value_stages, 0, records, stride_record,
        KEY_LEVELS, VALUE_LEVELS, AT, DIM, W,
    )  # fmt: skip
    blocks = _find_blocks(table, begin + step, stop, STEPS)
    for tile in range(begin, end, step):
        start = tile * BLOCK_N
        _copy_tile(
            blocks, key_stages, value_stages, 1 - stage, records, stride_record, KEY_LEVELS, VALUE_LEVELS, AT, DIM, W
        )
        blocks = _find_blocks(table, tile + 2 * step, stop, STEPS)
        async_copy.wait_group(1)
        if W == 4:
            found = _unpack_keys(key_stages, stage, 0, KEY_LEVELS, KEY_PTX, DIM, W)
            for s in gl.static_range(K):
                _put_keys(found[s], shared_keys[s], DIM // K)
            found = _unpack_values(value_stages, stage, 0, VALUE_LEVELS, VALUE_PTX, DIM, W)
            for s in gl.static_range(V):
                _put_values(_as_values(found[2 * s], found[2 * s + 1], DIM // V, W), shared_values[s], DIM // V)
        scores = ()
        value_scales = ()
        for i in gl.static_range(STEPS):
            score = gl.zeros([16, LANES], gl.float32, _mma(W))
            if W == 1:
                k = _unpack_keys(key_stages, stage, 16 * i, KEY_LEVELS, KEY_PTX, DIM, W)
            for s in gl.static_range(K):
                if W == 1:
                    score = mma_v2(_left_keys(k[s], DIM // K, W, True), q[s], score)
                else:
                    score = mma_v2(_take_keys(shared_keys[s], i, DIM // K), q[s], score)
            key_scale = key_stages[1].index(stage).slice(16 * i, 16).load(_keys(W)).to(gl.float32)
            scores = scores + (score * (key_scale * scale)[:, None],)
            value_scales = value_scales + (value_stages[1].index(stage).slice(16 * i, 16).load(_keys(W)),)
        some_hidden = (start < FIRST) | (start + BLOCK_N + RECENT > top + 1)
        if WINDOW > 0:
            some_hidden = some_hidden | (start <= bottom - WINDOW)
        if some_hidden:
            seen = ()
            read = ()
            for i in gl.static_range(STEPS):
                key = start + 16 * i + lane_key
                seen = seen + (_hide(scores[i], key, position, FIRST, RECENT, WINDOW),)
                # 0 of keys that no row takes by their codes: 0 * NaN of a stale block would poison a sum.
                read = read + (gl.where((key >= FIRST) & (key < stop), value_scales[i], 0.0),)
            scores, value_scales = seen, read
        highest = scores[0]
        for i in gl.static_range(1, STEPS):
            highest = gl.maximum(highest, scores[i])
        peak, base, decay = _raise_peak(peak, highest)
        total, acc = total * decay[None, :], _times(acc, decay, V)
        for i in gl.static_range(STEPS):
            weights = gl.exp2(scores[i] - base)
            total += weights
            right = _as_right(weights * value_scales[i].to(gl.float32)[:, None], LANES, W)
            if W == 1:
                v = _unpack_values(value_stages, stage, 16 * i, VALUE_LEVELS, VALUE_PTX, DIM, W)
            grown = ()
            for s in gl.static_range(V):
                if W == 1:
                    x = _as_values(v[2 * s], v[2 * s + 1], DIM // V, W)
                    grown = grown + (mma_v2(_left_values(x, W), right, acc[s]),)
                else:
                    grown = grown + (mma_v2(_take_values(shared_values[s], i, DIM // V), right, acc[s]),)
            acc = grown
        stage = 1 - stage
    async_copy.wait_group(0)
    return acc, peak, total


# Exact rows


@gluon.jit
def _exact_key(place, mask, WIDTH: gl.constexpr, W: gl.constexpr):
    return _left_keys(gl.load(place, mask=mask, other=0.0).to(gl.float16), WIDTH, W, False)


@gluon.jit
def _exact_value(place, mask, WIDTH: gl.constexpr, W: gl.constexpr):
    x = gl.reshape(gl.load(place, mask=mask, other=0.0).to(gl.float16), [16, 8, WIDTH // 8])
    return gl.convert_layout(gl.permute(x, (2, 1, 0)).reshape([WIDTH, 16]), _left(W))


@gluon.jit
def _exact_places(page, held, WIDTH: gl.constexpr, DIM: gl.constexpr, W: gl.constexpr):
    """Pointers to the first stretch of 16 keys, and which of them are to be read."""
    LAYOUT: gl.constexpr = _loaded(WIDTH, W)
    key = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))[:, None]
    place = page + key * DIM + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]
    return place, gl.convert_layout(held, gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _scan_exact(
    acc, peak, total, q, position, begin, end, step, top, bottom, pages, exact_of, table, stride_page, stride_part,
    scale, K: gl.constexpr, V: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr,
    DIM: gl.constexpr, LANES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Online softmax over the exact keys of tiles begin, begin + step ..: 16 keys each, in pages that are read."""
    lane_key = gl.arange(0, 16, _keys(W))
    for tile in range(begin, end, step):
        key = tile * 16 + lane_key
        page = gl.load(exact_of + gl.load(table + tile)).to(gl.int64)
        place = pages + page * stride_page
        # Only those that some row takes exactly are there for sure: 0 * NaN of a stale page would poison a sum.
        held = (page >= 0) & (key <= bottom) & ((key < FIRST) | (key + RECENT > top))
        part, mask = _exact_places(place, held, DIM // K, DIM, W)
        scores = gl.zeros([16, LANES], gl.float32, _mma(W))
        for s in gl.static_range(K):
            scores = mma_v2(_exact_key(part + s * (DIM // K), mask, DIM // K, W), q[s], scores)
        recent = key[:, None] + RECENT > position[None, :]
        seen = (key[:, None] <= position[None, :]) & (recent | (key < FIRST)[:, None])
        if WINDOW > 0:
            seen = seen & (key[:, None] > position[None, :] - WINDOW)
        scores = gl.where(seen, scores * scale, float("-inf"))
        peak, base, decay = _raise_peak(peak, scores)
        weights = gl.exp2(scores - base)
        total, acc = total * decay[None, :] + weights, _times(acc, decay, V)
        part, mask = _exact_places(place + stride_part, held, DIM // V, DIM, W)
        right = _as_right(weights, LANES, W)
        grown = ()
        for s in gl.static_range(V):
            grown = grown + (mma_v2(_exact_value(part + s * (DIM // V), mask, DIM // V, W), right, acc[s]),)
        acc = grown
    return acc, peak, total


# The kernel


@gluon.jit
def _find_sequence(query_start, tile, seqs, LANES: gl.constexpr, GROUP: gl.constexpr):
    """As in attention.py: the last sequence whose first tile is not after 'tile'; s begins at lanes // LANES + s."""
    left = 0
    right = seqs
    while left < right:
        middle = (left + right) // 2
        if gl.load(query_start + middle) * GROUP // LANES + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@gluon.jit
def _first_own(begin, share, shares):
    """The first of a share's tiles that is not before 'begin'."""
    return begin + (share + shares - begin % shares) % shares


@gluon.jit(do_not_specialize=["query_start", "context_len", "block_tables", "stride_table", "splits", "seqs"])
def attend(
    q, records, pages, exact_of, out, lse, query_start, context_len, block_tables, seqs, splits, scale,
    stride_row, stride_q_head, stride_record, stride_record_head, stride_page, stride_part, stride_page_head,
    stride_table,
    KEY_LEVELS: gl.constexpr, KEY_PTX: gl.constexpr, VALUE_LEVELS: gl.constexpr, VALUE_PTX: gl.constexpr,
    AT: gl.constexpr, FIRST: gl.constexpr, RECENT: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr,
    W: gl.constexpr, TILES: gl.constexpr, SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Writes rotated means of the values: one share, or where SPLIT each of them with the log2 of its weights' sum.

    TILES: tiles of each sequence, or 0 where sequences differ much and a tile looks for its own. W: warps.
    """
    if PDL:
        gdc_wait()
    K: gl.constexpr = num_stretches(KEY_LEVELS)
    V: gl.constexpr = num_stretches(VALUE_LEVELS)
    LANES: gl.constexpr = 8 if W == 1 else 16 * W
    kv_head, share, shares = gl.program_id(1), gl.program_id(2), gl.num_programs(2)
    if TILES > 0:
        seq, tile = gl.program_id(0) // TILES, gl.program_id(0) % TILES
    else:
        number = gl.num_programs(0) - 1 - gl.program_id(0)  # the last tiles see most keys: start them first
        seq = _find_sequence(query_start, number, seqs, LANES, GROUP)
        tile = number - gl.load(query_start + seq) * GROUP // LANES - seq
    row_start = gl.load(query_start + seq)
    num_query = gl.load(query_start + seq + 1) - row_start
    if tile * LANES >= num_query * GROUP:
        return
    before = gl.load(context_len + seq) - num_query  # the position of the sequence's first row
    lane = tile * LANES + gl.arange(0, LANES, _lanes(W))
    query = lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    valid = query < num_query
    row = (row_start + query).to(gl.int64)
    position = before + query
    top = before + tile * LANES // GROUP  # positions of the tile's first row
    bottom = before + gl.minimum((tile * LANES + LANES - 1) // GROUP, num_query - 1)  # and of its last
    line = row * (gl.num_programs(1) * GROUP) + head
    if SPLIT:
        line = line * shares + share

    low = 0
    if WINDOW > 0:
        low = gl.maximum(top - WINDOW + 1, 0)
    stop = gl.maximum(bottom - RECENT + 1, 0)  # past the last key that any row takes by its code
    end = (stop + BLOCK_N - 1) // BLOCK_N
    begin = _first_own(low // BLOCK_N, share, splits)
    if SPLIT:
        if (share < splits) & (begin >= end):
            gl.store(lse + line, gl.full([LANES], float("-inf"), gl.float32, _lanes(W)), mask=valid)
            return
        end = gl.where(share < splits, end, begin)

    turned = _load_query(q, row, head, valid, stride_row, stride_q_head, DIM // K, DIM, W)
    table = block_tables + seq.to(gl.int64) * stride_table
    acc = ()
    for _ in gl.static_range(V):
        acc = acc + (gl.zeros([DIM // V, LANES], gl.float32, _mma(W)),)
    peak = gl.full([LANES], float("-inf"), gl.float32, _lanes(W))
    total = gl.zeros([16, LANES], gl.float32, _mma(W))  # of a lane's weights, by where in a block their keys lie
    if begin < end:
        acc, peak, total = _scan_codes(
            acc, peak, total, turned, position, begin, end, splits, top, bottom, stop,
            records + kv_head * stride_record_head, table, stride_record, scale,
            KEY_LEVELS, KEY_PTX, VALUE_LEVELS, VALUE_PTX, AT, FIRST, RECENT, WINDOW, DIM, BLOCK_N, LANES, W,
        )  # fmt: skip
    if FIRST + RECENT > 0:
        own, step, last = 0, 1, gl.maximum(bottom + 16, 0) // 16
        if SPLIT:
            own, step = gl.maximum(share - splits, 0), shares - splits
            last = gl.where(share < splits, 0, last)
        firsts = gl.minimum((FIRST + 15) // 16, last)
        border = gl.maximum(gl.maximum(top - RECENT + 1, low) // 16, firsts)  # the first recent key of any row
        if FIRST > 0:
            acc, peak, total = _scan_exact(
                acc, peak, total, turned, position, _first_own(low // 16, own, step), firsts, step, top, bottom,
                pages + kv_head * stride_page_head, exact_of, table, stride_page, stride_part, scale,
                K, V, FIRST, RECENT, WINDOW, DIM, LANES, W,
            )  # fmt: skip
        if RECENT > 0:
            acc, peak, total = _scan_exact(
                acc, peak, total, turned, position, _first_own(border, own, step), last, step, top, bottom,
                pages + kv_head * stride_page_head, exact_of, table, stride_page, stride_part, scale,
                K, V, FIRST, RECENT, WINDOW, DIM, LANES, W,
            )  # fmt: skip
    sums = gl.sum(total, 0)
    acc = _times(acc, 1.0 / gl.where(sums == 0.0, 1.0, sums), V)  # a row without keys (padding) gives zeros
    n = gl.arange(0, DIM // V, _keys(W))
    place = out + (line * DIM)[None, :] + (n % 8 * (DIM // V // 8) + n // 8)[:, None]
    for s in gl.static_range(V):
        gl.store(place + s * (DIM // V), acc[s].to(out.dtype.element_ty), mask=valid[None, :] & (n >= 0)[:, None])
    if SPLIT:
        gl.store(lse + line, peak + gl.log2(sums), mask=valid)
