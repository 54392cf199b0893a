// Writing to a TurboQuant cache: queries, keys and values are rotated, and keys and values encoded and packed. A token's
// codes depend on that token alone.

#include "turboquant.h"

#include <algorithm>

#include "pool.h"

namespace {

struct Call {  // strides in elements
    const Coded* coded;
    float* q;  // rotated in place
    int64_t q_row, heads, kv_heads;  // kv_heads: 0 where nothing is written
    const float* k;
    int64_t k_row;
    const float* v;
    int64_t v_row;
    const int32_t* slots;
    int64_t rows, num_slots;
};

constexpr float LARGEST_HALF = 65504.0f;

// To the nearest half, ties to even, for 0 <= x <= LARGEST_HALF, or for what is no number.
uint16_t to_half(float x) {
    uint32_t bits;
    if (x != x) return 0x7e00;
    if (x < 0x1p-14f) {  // subnormal: adding this leaves its multiple of 2^-24 in the low bits
        x += 0.5f;
        std::memcpy(&bits, &x, 4);
        return uint16_t(bits - 0x3f000000);
    }
    std::memcpy(&bits, &x, 4);
    return uint16_t((bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13);
}

template <int WIDTH>
void pack_plane(const uint8_t* codes, int shift, int64_t dim, uint8_t* plane) {
    const int64_t bytes = dim * WIDTH / 8;
    for (int64_t j = 0; j < bytes; ++j) {
        uint32_t packed = 0;
        for (int stretch = 0; stretch < 8 / WIDTH; ++stretch) {
            packed |= (uint32_t(codes[stretch * bytes + j]) >> shift & ((1 << WIDTH) - 1)) << (stretch * WIDTH);
        }
        plane[j] = uint8_t(packed);
    }
}

// Each coordinate of y becomes its nearest level, y having been rotated and brought to length 1.
void encode(const Coded& c, const Side& side, const float* y, uint8_t* record, int64_t offset) {
    uint8_t codes[LARGEST_DIM];
    const int64_t dim = c.dim, blocks = dim / c.width, half = int64_t(1) << (side.bits - 1);
    for (int64_t b = 0; b < blocks; ++b) {
        const float* x = y + b * c.width;
        f32x4 squares = splat4(0);
        for (int64_t i = 0; i < c.width; i += 4) squares = multiply_add(load4(x + i), load4(x + i), squares);
        const float length = std::sqrt(sum_lanes(squares));
        const f32x4 divisor = splat4(length > 0 ? length : 1.0f);
        float inner = 0;
        for (int64_t i = 0; i < c.width; i += 4) {
            const f32x4 unit = load4(x + i) / divisor;
            i32x4 above{0, 0, 0, 0};  // thresholds below it
            for (int64_t t = 0; t < 2 * half - 1; ++t) above -= unit > splat4(side.thresholds[t]);
            for (int64_t j = 0; j < 4; ++j) {
                const int64_t code = above[j] >= half ? above[j] : half - 1 - above[j];
                codes[b * c.width + i + j] = uint8_t(code);
                inner = multiply_add(side.levels[code], unit[j], inner);
            }
        }
        const uint16_t scale = to_half(std::min(length * (1.0f / (inner > 0 ? inner : 1.0f)), LARGEST_HALF));
        std::memcpy(record + side.scales + 2 * (offset * blocks + b), &scale, 2);
    }
    uint8_t *low = record + side.low + offset * (dim * low_bits(side.bits) / 8);
    uint8_t* high = record + side.high + offset * (dim / 8);
    if (side.bits > 3) {
        pack_plane<4>(codes, 0, dim, low);
    } else {
        pack_plane<2>(codes, 0, dim, low);
    }
    if (side.bits == 3) pack_plane<1>(codes, 2, dim, high);
    if (side.bits == 5) pack_plane<1>(codes, 4, dim, high);
}

void write(const Call& call, int64_t row, int64_t head) {
    const Coded& c = *call.coded;
    const int64_t slot = call.slots[row];
    if (slot < 0 || slot >= call.num_slots) return;
    const int64_t block = slot / c.block_size, offset = slot % c.block_size, size = c.kv_heads * c.block_size * c.dim;
    uint8_t* record = c.records + (block * c.kv_heads + head) * c.record_bytes;
    const int64_t page = c.page_of ? c.page_of[block] : -1;
    float rotated[LARGEST_DIM];
    for (int part = 0; part < 2; ++part) {
        const float* x = (part ? call.v + row * call.v_row : call.k + row * call.k_row) + head * c.dim;
        rotate(c, x, !part && c.centre ? c.centre + head * c.dim : nullptr, rotated);
        encode(c, part ? c.values : c.keys, rotated, record, offset);
        if (page >= 0) {
            float* to = c.pages + (2 * page + part) * size + (head * c.block_size + offset) * c.dim;
            std::copy_n(rotated, c.dim, to);
        }
    }
}

}  // namespace

extern "C" void sd_tq_write(const Call* call) {
    const Coded& c = *call->coded;
    const int64_t tasks = call->heads + call->kv_heads;  // of a row: a query is rotated, or a key and its value are written
    pool::parallel_ranges(call->rows * tasks, double(call->rows * tasks * c.dim) * 16, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = i / tasks, task = i % tasks;
            if (task < call->heads) {
                float* q = call->q + row * call->q_row + task * c.dim;
                rotate(c, q, nullptr, q);
            } else {
                write(*call, row, task - call->heads);
            }
        }
    });
}
