// A layer of a TurboQuant cache (kernels/turboquant/store.py), and how its vectors are rotated and read.
#pragma once

#include "simd.h"

// How keys, or values, are encoded. A record holds the planes and scales of a block's positions in one head.
struct Side {
    int64_t bits, low, high, scales;  // low, high, scales: where they begin in a record; of 2 and 4 bits there is no high
    const float *levels, *thresholds;  // [32], by code as it is kept; [2^bits - 1], ascending
};

struct Coded {
    uint8_t* records;  // [blocks, kv_heads, record_bytes]
    int64_t record_bytes, kv_heads, block_size, dim, width;
    Side keys, values;
    const float* turn;    // [dim]: signs over the root of the width
    const float* centre;  // [kv_heads, dim], or null
    float* pages;         // [pages, 2, kv_heads, block_size, dim], or null
    const int32_t* page_of;
    int64_t first, recent;  // positions from the beginning, and from each token back, that are read from pages
};

constexpr int64_t LARGEST_DIM = 1024;

// Hadamard's transform of every 'width' numbers, in place: sums and differences of pairs ever further apart.
INLINE void hadamard(float* x, int64_t dim, int64_t width) {
    for (int64_t i = 0; i < dim; i += 4) {
        const float a = x[i] + x[i + 1], b = x[i] - x[i + 1], c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
        store4(x + i, f32x4{a + c, b + d, a - c, b - d});
    }
    for (int64_t step = 4; step < width; step *= 2) {
        for (int64_t i = 0; i < dim; i += 2 * step) {
            for (int64_t j = i; j < i + step; j += 4) {
                const f32x4 low = load4(x + j), high = load4(x + j + step);
                store4(x + j, low + high);
                store4(x + j + step, low - high);
            }
        }
    }
}

INLINE void rotate(const Coded& c, const float* x, const float* less, float* out) {
    for (int64_t d = 0; d < c.dim; d += 4) {
        store4(out + d, (less ? load4(x + d) - load4(less + d) : load4(x + d)) * load4(c.turn + d));
    }
    hadamard(out, c.dim, c.width);
}

INLINE void rotate_back(const Coded& c, float* x) {
    hadamard(x, c.dim, c.width);
    for (int64_t d = 0; d < c.dim; d += 4) store4(x + d, load4(x + d) * load4(c.turn + d));
}

// ---- Codes of one vector ------------------------------------------------------------------------------------------

INLINE int64_t low_bits(int64_t bits) { return bits == 3 ? 2 : bits == 5 ? 4 : bits; }

typedef uint8_t u8x16 __attribute__((vector_size(16)));

// One plane of WIDTH bits a code: stretch by stretch of the vector, as they lie in the bits of its bytes. SHIFT: the bits
// of the plane below, to which these are added.
template <int WIDTH, int SHIFT>
INLINE void unpack_plane(const uint8_t* plane, int64_t dim, uint8_t* codes) {
    const int64_t bytes = dim * WIDTH / 8;
    const auto put = [&](uint8_t* at, u8x16 code) __attribute__((always_inline)) {
        u8x16 below{};
        if (SHIFT) std::memcpy(&below, at, 16);
        const u8x16 both = below | code << SHIFT;
        std::memcpy(at, &both, 16);
    };
    int64_t j = 0;
    for (; j + 16 <= bytes; j += 16) {
        u8x16 packed;
        std::memcpy(&packed, plane + j, 16);
        unroll<8 / WIDTH>(EACH(s) { put(codes + s * bytes + j, packed >> (s * WIDTH) & ((1 << WIDTH) - 1)); });
    }
    if (WIDTH == 1 && bytes == 8) {  // two stretches at once
        u8x16 packed;
        std::memcpy(&packed, plane, 8), std::memcpy(reinterpret_cast<uint8_t*>(&packed) + 8, plane, 8);
        unroll<4>(EACH(s) {
            constexpr uint8_t a = 1 << 2 * s, b = 2 << 2 * s;
            const u8x16 bit{a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
            put(codes + 16 * s, u8x16((packed & bit) == bit) & 1);
        });
        return;
    }
    for (; j < bytes; ++j) {
        for (int s = 0; s < 8 / WIDTH; ++s) {
            const uint8_t code = uint8_t(plane[j] >> (s * WIDTH) & ((1 << WIDTH) - 1)), *below = codes + s * bytes + j;
            codes[s * bytes + j] = SHIFT ? uint8_t(*below | code << SHIFT) : code;
        }
    }
}

// out[i] = levels[codes[i]] * scale
INLINE void look_up(const float* levels, int64_t bits, const uint8_t* codes, int64_t count, float scale, float* out) {
    int64_t i = 0;
#if SPARKDRAFT_AVX512
    const __m512 low = _mm512_loadu_ps(levels), high = _mm512_loadu_ps(levels + 16), factor = _mm512_set1_ps(scale);
    for (; i + 16 <= count; i += 16) {
        const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        const __m512 level = bits < 5 ? _mm512_permutexvar_ps(index, low) : _mm512_permutex2var_ps(low, index, high);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(level, factor));
    }
#elif SPARKDRAFT_AVX2
    const __m256 factor = _mm256_set1_ps(scale);
    __m256 tables[4];
    unroll<4>(EACH(t) { tables[t] = _mm256_loadu_ps(levels + 8 * t); });
    for (; i + 8 <= count; i += 8) {
        const __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i)));
        __m256 level = _mm256_permutevar8x32_ps(tables[0], index);
        if (bits > 3) {  // the fourth bit chooses between two tables, the fifth between two pairs of them
            const __m256 fourth = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
            level = _mm256_blendv_ps(level, _mm256_permutevar8x32_ps(tables[1], index), fourth);
            if (bits > 4) {
                const __m256 fifth = _mm256_castsi256_ps(_mm256_slli_epi32(index, 27));
                const __m256 other = _mm256_blendv_ps(_mm256_permutevar8x32_ps(tables[2], index),
                                                      _mm256_permutevar8x32_ps(tables[3], index), fourth);
                level = _mm256_blendv_ps(level, other, fifth);
            }
        }
        _mm256_storeu_ps(out + i, _mm256_mul_ps(level, factor));
    }
#elif SPARKDRAFT_NEON
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(levels);
    const uint8x16x4_t low = vld1q_u8_x4(bytes), high = vld1q_u8_x4(bytes + 64);
    const uint8x16_t byte = vreinterpretq_u8_u32(vdupq_n_u32(0x03020100));  // of a level
    for (; i + 16 <= count; i += 16) {
        const uint8x16_t sixteen = vshlq_n_u8(vld1q_u8(codes + i), 2);
        uint8x16_t which = vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(0x0101010100000000), vcreate_u64(0x0303030302020202)));
        for (int64_t j = 0; j < 16; j += 4) {
            const uint8x16_t at = vaddq_u8(vqtbl1q_u8(sixteen, which), byte);
            uint8x16_t level = vqtbl4q_u8(low, at);
            if (bits > 4) level = vqtbx4q_u8(level, high, vsubq_u8(at, vdupq_n_u8(64)));
            vst1q_f32(out + i + j, vmulq_n_f32(vreinterpretq_f32_u8(level), scale));
            which = vaddq_u8(which, vdupq_n_u8(4));
        }
    }
#endif
    for (; i < count; ++i) out[i] = levels[codes[i]] * scale;
}

// A position in a record, as attention.cpp numbers keys: the record's number, then AT bits for the position.
constexpr int AT = 16;

// One vector, rotated as it was kept: through bytes, for any shape.
INLINE void decode(const Coded& c, const Side& side, const uint8_t* record, int64_t at, float* out) {
    uint8_t codes[LARGEST_DIM];
    const int64_t dim = c.dim, blocks = dim / c.width;
    const uint8_t *low = record + side.low + at * (dim * low_bits(side.bits) / 8);
    const uint8_t *high = record + side.high + at * (dim / 8), *scales = record + side.scales + at * 2 * blocks;
    if (side.bits > 3) {
        unpack_plane<4, 0>(low, dim, codes);
    } else {
        unpack_plane<2, 0>(low, dim, codes);
    }
    if (side.bits == 3) unpack_plane<1, 2>(high, dim, codes);
    if (side.bits == 5) unpack_plane<1, 4>(high, dim, codes);
    for (int64_t b = 0; b < blocks; ++b) {
        uint16_t half;
        std::memcpy(&half, scales + 2 * b, 2);
        look_up(side.levels, side.bits, codes + b * c.width, c.width, half_to_float(half), out + b * c.width);
    }
}

#if SPARKDRAFT_AVX512
// Vectors of one block of 64 numbers or more, in one pass. A permutation looks at four bits of its index, so those of
// other codes need no clearing where a table repeats itself.
template <int WIDTH, bool HIGH, int DIM>
INLINE void decode_blocks(const Coded& c, const Side& side, const int64_t* places, int64_t count, float* out) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i entry = WIDTH == 4 ? lanes : _mm512_and_si512(lanes, _mm512_set1_epi32(3));
    const __m512 table = _mm512_permutexvar_ps(entry, _mm512_loadu_ps(side.levels));
    const __m512 upper = _mm512_permutexvar_ps(entry, _mm512_loadu_ps(side.levels + (1 << WIDTH)));
    constexpr int BYTES = DIM * WIDTH / 8, STRETCH = DIM / 8;  // of the low plane, and of the high one
    for (int64_t n = 0; n < count; ++n, out += DIM) {
        const uint8_t* record = c.records + (places[n] >> AT) * c.record_bytes;
        const int64_t at = places[n] & ((1 << AT) - 1);
        const uint8_t *low = record + side.low + at * BYTES, *high = record + side.high + at * STRETCH;
        uint16_t half;
        std::memcpy(&half, record + side.scales + 2 * at, 2);
        const __m512 factor = _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
        unroll<BYTES / 16>(EACH(j) {
            const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(low + 16 * j));
            const __m512i packed = _mm512_cvtepu8_epi32(sixteen);
            unroll<8 / WIDTH>(EACH(s) {
                constexpr int i = s * BYTES + 16 * j;  // the first of these codes
                const __m512i index = _mm512_srli_epi32(packed, s * WIDTH);
                __m512 level = _mm512_permutexvar_ps(index, table);
                if constexpr (HIGH) {  // 16 codes are a bit of 16 bytes, or in the shortest plane two bits of all 8
                    constexpr uint64_t first = 0x0101010101010101u << i / STRETCH, second = STRETCH == 8 ? 2 * first : first;
                    const __m128i bit = _mm_set_epi64x(int64_t(second), int64_t(first));
                    const __m128i* from = reinterpret_cast<const __m128i*>(high + i % STRETCH);
                    const __m128i bits = STRETCH == 8 ? _mm_broadcastq_epi64(_mm_loadl_epi64(from)) : _mm_loadu_si128(from);
                    level = _mm512_mask_permutexvar_ps(level, _mm_test_epi8_mask(bits, bit), index, upper);
                }
                _mm512_storeu_ps(out + i, _mm512_mul_ps(level, factor));
            });
        });
    }
}

template <int DIM>
INLINE void decode_blocks(const Coded& c, const Side& side, const int64_t* places, int64_t count, float* out) {
    if (side.bits == 2) decode_blocks<2, false, DIM>(c, side, places, count, out);
    if (side.bits == 3) decode_blocks<2, true, DIM>(c, side, places, count, out);
    if (side.bits == 4) decode_blocks<4, false, DIM>(c, side, places, count, out);
    if (side.bits == 5) decode_blocks<4, true, DIM>(c, side, places, count, out);
}
#endif

// The vectors at these places, one after the other.
INLINE void decode_all(const Coded& c, const Side& side, const int64_t* places, int64_t count, float* out) {
#if SPARKDRAFT_AVX512
    if (c.dim == c.width && c.dim == 64) return decode_blocks<64>(c, side, places, count, out);
    if (c.dim == c.width && c.dim == 128) return decode_blocks<128>(c, side, places, count, out);
    if (c.dim == c.width && c.dim == 256) return decode_blocks<256>(c, side, places, count, out);
#endif
    for (int64_t n = 0; n < count; ++n, out += c.dim) {
        decode(c, side, c.records + (places[n] >> AT) * c.record_bytes, places[n] & ((1 << AT) - 1), out);
    }
}
