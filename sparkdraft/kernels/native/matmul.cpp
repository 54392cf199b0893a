// y = x W^T + bias, for weights of 4 or 8 bits in groups of 32 and float activations that each row rounds to int8 by
// itself, and for the few matrices that stay floats (at the end of this file).
// Outputs are interleaved LANES at a time into 'strips', so that one vector instruction yields a lane for each output;
// a strip meets up to 8 rows at once, so that its weights are loaded and unpacked once for all of them. Each output of
// each row is summed over the groups in their order with the same operations in every tiling, so its bits depend on
// nothing but its row and its weights; who stores the weights, and what they mean, is packed.py's.
//
//   strip, 4 bits:  groups x { half scale[LANES], half offset[LANES] },  groups x { uint8 nibbles[16 * LANES] }
//   strip, 8 bits:  groups x { half scale[LANES] },                      groups x { int8 weights[32 * LANES] }
//   with Levels:    groups x { half or float scale[1 or 2][LANES], perhaps float offset[LANES] }, and the same bodies
//   rows, in tiles of R <= 8:  groups x { int8 x[R][32], float step[8], float sum[8] },  Outliers[R]

#include <algorithm>
#include <vector>

#include "matmul.h"
#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t BLOCK = 192 << 10;  // bytes of rounded rows that stay in the second-level cache while strips pass by
constexpr int TILE = 8;               // rows that share a strip's weights while these are in registers

// ---- Rows to int8 -------------------------------------------------------------------------------------------------

constexpr int64_t group_bytes(int rows) { return rows * GROUP + 2 * TILE * sizeof(float); }

// Up to two elements of a row that are not rounded, by their columns. One large element makes the step of its group
// large, and with it the error of the 31 others; so it is taken out and multiplied as a float (TileOutliers).
struct Outliers {
    static constexpr uint32_t MOST = 2;
    uint32_t count;
    uint32_t column[MOST];
    float value[MOST];
};

constexpr int64_t tile_bytes(int64_t groups, int rows) {
    return groups * group_bytes(rows) + rows * int64_t(sizeof(Outliers));
}

#if SPARKDRAFT_NEON
INLINE float peak_of(const float* x) {
    float32x4_t peak = vdupq_n_f32(0);
    for (int i = 0; i < GROUP; i += 4) peak = vmaxq_f32(peak, vabsq_f32(vld1q_f32(x + i)));
    return vmaxvq_f32(peak);
}

INLINE int32_t round_group(const float* x, float inverse, int8_t* q) {
    int32x4_t total = vdupq_n_s32(0);
    for (int i = 0; i < GROUP; i += 16) {
        int16x8_t n[4];
        // Adding 1.5 * 2^23 rounds to the nearest, ties to even, as torch.round does; the low byte is the integer.
        for (int j = 0; j < 4; ++j) {
            const float32x4_t scaled = vmulq_n_f32(vld1q_f32(x + i + 4 * j), inverse);
            n[j] = vreinterpretq_s16_f32(vaddq_f32(scaled, vdupq_n_f32(BIAS_VALUE)));
        }
        const int16x8_t a = vuzp1q_s16(n[0], n[1]), b = vuzp1q_s16(n[2], n[3]);
        const int8x16_t bytes = vuzp1q_s8(vreinterpretq_s8_s16(a), vreinterpretq_s8_s16(b));
        total = vdotq_s32(total, bytes, vdupq_n_s8(1));
        vst1q_s8(q + i, bytes);
    }
    return vaddvq_s32(total);
}
#elif SPARKDRAFT_AVX2
template <class F>
INLINE int32_t reduce(__m256i v, F f) {
    __m128i four = f(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    four = f(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(f(four, _mm_shuffle_epi32(four, 0xb1)));
}

// As integers, the bits of sizes have the order of the sizes, and those of what is no number are above all.
INLINE float peak_of(const float* x) {
    __m256i peak = _mm256_setzero_si256();
    for (int i = 0; i < GROUP; i += 8) {
        const __m256i bits = _mm256_loadu_si256((const __m256i*)(x + i));
        peak = _mm256_max_epi32(peak, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    const int32_t most = reduce(peak, [](__m128i a, __m128i b) { return _mm_max_epi32(a, b); });
    float size;
    std::memcpy(&size, &most, 4);
    return size;
}

INLINE int32_t round_group(const float* x, float inverse, int8_t* q) {
    const __m256 most = _mm256_set1_ps(127), least = _mm256_set1_ps(-127);
    __m256i n[4];
    for (int i = 0; i < 4; ++i) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse));
        n[i] = _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(scaled, least), most));  // ties to even, as torch.round
    }
    const __m256i total = _mm256_add_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing keeps to halves of vectors
    _mm256_storeu_si256((__m256i*)q, _mm256_permutevar8x32_epi32(bytes, order));
    return reduce(total, [](__m128i a, __m128i b) { return _mm_add_epi32(a, b); });
}
#else
INLINE float peak_of(const float* x) {
    float peak = 0;
    for (int i = 0; i < GROUP; ++i) {
        const float size = std::fabs(x[i]);
        peak = size > peak || size != size ? size : peak;
    }
    return peak;
}

INLINE int32_t round_group(const float* x, float inverse, int8_t* q) {
    int32_t total = 0;
    for (int i = 0; i < GROUP; ++i) {
        const float scaled = std::min(127.0f, std::max(-127.0f, x[i] * inverse));
        const float biased = scaled + BIAS_VALUE;  // rounds to the nearest, ties to even, as torch.round
        q[i] = int8_t(int32_t(biased - BIAS_VALUE));
        total += q[i];
    }
    return total;
}
#endif

// Group 'g' of a row, with its outliers set to zero.
INLINE void copy_group(const float* x, int64_t g, const Outliers& outliers, float* to) {
    std::memcpy(to, x + g * GROUP, GROUP * sizeof(float));
    for (uint32_t i = 0; i < outliers.count; ++i) {
        if (outliers.column[i] / GROUP == g) to[outliers.column[i] % GROUP] = 0;
    }
}

// The expected squared error of a row is proportional to the sum of its groups' squared peaks. Elements are taken out
// while that lowers it by a fifth or more.
constexpr float WORTH = 0.2f;

void take_outliers(const float* x, int64_t groups, float* peaks, float error, Outliers& outliers) {
    float copy[GROUP];
    while (outliers.count < Outliers::MOST) {
        const int64_t g = std::max_element(peaks, peaks + groups) - peaks;
        copy_group(x, g, outliers, copy);
        int at = 0;
        while (at < GROUP - 1 && std::fabs(copy[at]) != peaks[g]) ++at;
        const float value = copy[at];
        copy[at] = 0;
        const float rest = peak_of(copy), removed = peaks[g] * peaks[g] - rest * rest;
        if (!(removed > WORTH * error)) break;
        outliers.column[outliers.count] = uint32_t(g * GROUP + at);
        outliers.value[outliers.count++] = value;
        peaks[g] = rest;
        error -= removed;
    }
}

// Rounds one group of a row into its place in a tile; 'group' points at the group in the tile.
INLINE void write_group(const float* x, float inverse, float step, int64_t place, int rows, uint8_t* group) {
    float* steps = reinterpret_cast<float*>(group + rows * GROUP) + place;
    const int32_t total = round_group(x, inverse, reinterpret_cast<int8_t*>(group + place * GROUP));
    steps[0] = step, steps[TILE] = float(total) * step;
}

INLINE float inverse_step(float peak) { return peak > 0 ? (1 / peak) * 127 : 0; }  // as torch computes 127 / peak

// One row of the batch, into its place in a tile of 'rows' rows; by four groups, so that their divisions overlap.
void round_row(const float* x, int64_t groups, int64_t place, int rows, uint8_t* tile) {
    thread_local std::vector<float> scratch;
    if (int64_t(scratch.size()) < groups) scratch.resize(size_t(groups));
    float *peaks = scratch.data(), error = 0, most = 0;
    for (int64_t g = 0; g < groups; ++g) {
        const float peak = peak_of(x + g * GROUP);
        peaks[g] = peak, error += peak * peak, most = peak > most ? peak : most;
    }
    const auto group = [&](int64_t g) { return tile + g * group_bytes(rows); };
    Outliers& outliers = reinterpret_cast<Outliers*>(group(groups))[place];
    outliers.count = 0;
    if (most * most > WORTH * error) take_outliers(x, groups, peaks, error, outliers);  // not if one is not finite
    for (int64_t g = 0; g < groups; g += 4) {
        const int count = int(std::min<int64_t>(4, groups - g));
        float inverse[4] = {}, step[4] = {};
        for (int i = 0; i < count; ++i) inverse[i] = inverse_step(peaks[g + i]), step[i] = peaks[g + i] / 127;
        for (int i = 0; i < count; ++i) {
            write_group(x + (g + i) * GROUP, inverse[i], step[i], place, rows, group(g + i));
        }
    }
    for (uint32_t i = 0; i < outliers.count; ++i) {  // their groups again, without them
        const int64_t g = outliers.column[i] / GROUP;
        float copy[GROUP];
        copy_group(x, g, outliers, copy);
        write_group(copy, inverse_step(peaks[g]), peaks[g] / 127, place, rows, group(g));
    }
}

// The outliers of all rows of a tile, by ascending columns: a column of weights is unpacked once for all rows. Where a row
// has none, its value is 0, which changes no bit of its sum.
struct TileOutliers {
    int count = 0;
    uint32_t column[TILE * Outliers::MOST];
    float value[TILE * Outliers::MOST][TILE];

    TileOutliers(const Outliers* of, int rows) {
        for (int r = 0; r < rows; ++r) {
            for (uint32_t i = 0; i < of[r].count; ++i) *place(of[r].column[i], r) = of[r].value[i];
        }
    }

    float* place(uint32_t at, int row) {
        int i = 0;
        while (i < count && column[i] < at) ++i;
        if (i == count || column[i] != at) {
            std::copy_backward(column + i, column + count, column + count + 1);
            std::memmove(value[i + 1], value[i], size_t(count - i) * sizeof value[0]);
            column[i] = at, ++count;
            std::fill(value[i], value[i] + TILE, 0.0f);
        }
        return value[i] + row;
    }
};

// ---- One strip times one tile of rows -----------------------------------------------------------------------------

// Three forms of a strip. weight<J>(g) is vector J of group g, integers(g, k) is its column k as floats; scale, offset
// and shift belong to its LANES outputs. The shift, which undoes the bias of the dot products, is kept in memory because
// each row's sum starts from a fresh copy ('spare' is room for it where the strip has none).

INLINE const float* make_shift(vfloat scale, float* spare) {
    vstore(spare, vscale(scale, -BIAS_VALUE));
    return spare;
}

// Weights are read once, from end to end: ask for what will be needed this many bytes later, be it in the next strip.
constexpr int AHEAD = LANES > 4 ? 4096 : 2048;  // wide strips are done sooner

template <int BYTES>
INLINE void prefetch_ahead(const void* strip, int64_t g) {
    const char* from = static_cast<const char*>(strip) + g * BYTES + AHEAD;
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(from + i);
}

struct Nibbles {  // as packed, 4 bits
    static constexpr bool LEVELED = false, SMALL = true, OFFSET = true;
    const uint16_t* head;
    const uint8_t* body;
    Nibbles(const Matrix& m, const uint8_t* strip)
        : head(reinterpret_cast<const uint16_t*>(strip)), body(strip + m.head_bytes()) {}
    template <int J>
    INLINE vbytes weight(int64_t g) const {
        const vbytes both = load_bytes(body + 16 * LANES * g + 4 * LANES * (J % 4));
        return J < 4 ? low_nibbles(both) : high_nibbles(both);
    }
    INLINE vfloat integers(int64_t g, uint32_t k) const {
        const vbytes both = load_bytes(body + 16 * LANES * g + 4 * LANES * (k / 4 % 4));
        return byte_floats(k < GROUP / 2 ? low_nibbles(both) : high_nibbles(both), k % 4);
    }
    INLINE void prefetch(int64_t g) const { prefetch_ahead<20 * LANES>(head, g); }
    INLINE vfloat scale(int64_t g) const { return load_halves(head + 2 * LANES * g); }
    INLINE vfloat offset(int64_t g) const { return load_halves(head + 2 * LANES * g + LANES); }
    INLINE const float* shift(int64_t, vfloat scale, float* spare) const { return make_shift(scale, spare); }
};

struct Bytes {  // as packed, 8 bits
    static constexpr bool LEVELED = false, SMALL = false, OFFSET = false;
    const uint16_t* head;
    const uint8_t* body;
    Bytes(const Matrix& m, const uint8_t* strip)
        : head(reinterpret_cast<const uint16_t*>(strip)), body(strip + m.head_bytes()) {}
    template <int J>
    INLINE vbytes weight(int64_t g) const {
        return load_bytes(body + 32 * LANES * g + 4 * LANES * J);
    }
    INLINE vfloat integers(int64_t g, uint32_t k) const {
        return byte_floats(load_bytes(body + 32 * LANES * g + 4 * LANES * (k / 4)), k % 4);
    }
    INLINE void prefetch(int64_t g) const { prefetch_ahead<34 * LANES>(head, g); }
    INLINE vfloat scale(int64_t g) const { return load_halves(head + LANES * g); }
    INLINE vfloat offset(int64_t) const { return vzero(); }
    INLINE const float* shift(int64_t, vfloat scale, float* spare) const { return make_shift(scale, spare); }
};

struct Unpacked {  // a 4-bit strip unpacked to memory beforehand: cheaper once several tiles of rows use it
    static constexpr bool LEVELED = false, SMALL = true, OFFSET = true;
    static constexpr int64_t BYTES = 32 * LANES + 3 * sizeof(float) * LANES;
    const uint8_t* groups;
    Unpacked(const Matrix&, const uint8_t* unpacked) : groups(unpacked) {}
    INLINE const float* floats(int64_t g) const {
        return reinterpret_cast<const float*>(groups + BYTES * g + 32 * LANES);
    }
    template <int J>
    INLINE vbytes weight(int64_t g) const {
        return load_bytes(groups + BYTES * g + 4 * LANES * J);
    }
    INLINE vfloat integers(int64_t g, uint32_t k) const {
        return byte_floats(load_bytes(groups + BYTES * g + 4 * LANES * (k / 4)), k % 4);
    }
    INLINE void prefetch(int64_t) const {}
    INLINE vfloat scale(int64_t g) const { return vload(floats(g)); }
    INLINE vfloat offset(int64_t g) const { return vload(floats(g) + LANES); }
    INLINE const float* shift(int64_t g, vfloat, float*) const { return floats(g) + 2 * LANES; }

    static void fill(const Matrix& m, const uint8_t* strip, uint8_t* to) {
        const Nibbles packed(m, strip);
        for (int64_t g = 0; g < m.groups(); ++g, to += BYTES) {
            float* floats = reinterpret_cast<float*>(to + 32 * LANES);
            unroll<8>(EACH(j) { store_bytes(to + 4 * LANES * j, packed.weight<j>(g)); });
            const vfloat scale = packed.scale(g);
            vstore(floats, scale), vstore(floats + LANES, packed.offset(g)), make_shift(scale, floats + 2 * LANES);
        }
    }
};

// The general form: 4-bit codes that a table gives a meaning, or bytes; a scale for a group or for each of its halves.
template <bool NIBBLES>
struct Leveled {
    static constexpr bool LEVELED = true;
    const Levels& levels;
    const uint8_t *head, *body;
    vbytes table;
    Leveled(const Matrix& m, const uint8_t* strip)
        : levels(*m.levels), head(strip), body(strip + m.head_bytes()), table() {
        if constexpr (NIBBLES) table = load_table(levels.table);
    }
    template <int J>
    INLINE vbytes weight(int64_t g) const {
        if constexpr (!NIBBLES) return load_bytes(body + 32 * LANES * g + 4 * LANES * J);
        const vbytes both = load_bytes(body + 16 * LANES * g + 4 * LANES * (J % 4));
        return look_up(table, J < 4 ? low_nibbles(both) : high_nibbles(both));
    }
    INLINE vfloat integers(int64_t g, uint32_t k) const {
        if constexpr (!NIBBLES) return byte_floats(load_bytes(body + 32 * LANES * g + 4 * LANES * (k / 4)), k % 4);
        const vbytes both = load_bytes(body + 16 * LANES * g + 4 * LANES * (k / 4 % 4));
        return byte_floats(look_up(table, k < GROUP / 2 ? low_nibbles(both) : high_nibbles(both)), k % 4);
    }
    INLINE void prefetch(int64_t g) const { prefetch_ahead<(NIBBLES ? 16 : 32) * LANES>(body, g); }
    INLINE vfloat scale(int64_t g, int64_t half) const {
        const uint8_t* from = head + LANES * (levels.head() * g + levels.scale_bytes * half);
        if (levels.scale_bytes == 4) return vload(reinterpret_cast<const float*>(from));
        return load_halves(reinterpret_cast<const uint16_t*>(from));
    }
    INLINE vfloat offset(int64_t g) const {
        return vload(reinterpret_cast<const float*>(head + LANES * (levels.head() * (g + 1) - 4)));
    }
};

// 'bias' is null, or that of these lanes.
INLINE void store_lanes(vfloat v, const float* bias, float* y, int64_t lanes, bool add) {
    if (lanes == LANES) {
        if (bias) v = vadd(v, vload(bias));
        return vstore(y, add ? vadd(vload(y), v) : v);
    }
    float values[LANES];
    vstore(values, v);
    for (int64_t i = 0; i < lanes; ++i) {
        const float value = bias ? values[i] + bias[i] : values[i];
        y[i] = add ? y[i] + value : value;
    }
}

// GROUPS groups of a strip from 'g' on, added to the sums of each row.
template <class Strip, int ROWS, int GROUPS>
INLINE void add_groups(const Strip& strip, int64_t g, const uint8_t* tile, vfloat* sums) {
    vfloat scale[GROUPS], offset[GROUPS], dots[GROUPS][ROWS];
    alignas(32) float spare[GROUPS][LANES];
    const float* shift[GROUPS];
    unroll<GROUPS>(EACH(i) { scale[i] = strip.scale(g + i), offset[i] = strip.offset(g + i); });
    unroll<GROUPS>(EACH(i) { shift[i] = strip.shift(g + i, scale[i], spare[i]); });
    unroll<GROUPS>(EACH(i) {
        strip.prefetch(g + i);
        const auto* x = reinterpret_cast<const int8_t*>(tile + i * group_bytes(ROWS));
        dot_group<Strip, ROWS>(strip, g + i, x, dots[i]);
    });
    unroll<GROUPS>(EACH(i) {
        unroll<ROWS>(EACH(r) {
            const vfloat fresh = ROWS == 1 ? vscale(scale[i], -BIAS_VALUE) : vload_anew(shift[i]);
            dots[i][r] = vfma(dots[i][r], scale[i], fresh);
        });
    });
    unroll<GROUPS>(EACH(i) {
        const auto* steps = reinterpret_cast<const float*>(tile + i * group_bytes(ROWS) + ROWS * GROUP);
        add_scaled<ROWS, 1>(sums, dots[i], steps);
        if constexpr (Strip::OFFSET) add_scaled<ROWS, 0>(sums, &offset[i], steps + TILE);
    });
}

// Column k of group g as it is in the matrix.
template <class Strip>
INLINE vfloat column(const Strip& strip, int64_t g, uint32_t k) {
    return vfma(strip.integers(g, k), strip.scale(g), strip.offset(g));
}
template <bool NIBBLES>
INLINE vfloat column(const Leveled<NIBBLES>& strip, int64_t g, uint32_t k) {
    const int64_t half = strip.levels.scales == 2 ? k / (GROUP / 2) : 0;
    return vfma(strip.integers(g, k), strip.scale(g, half), strip.levels.offsets ? strip.offset(g) : vzero());
}

template <class Strip, int ROWS>
INLINE void add_outliers(const Strip& strip, const TileOutliers& outliers, vfloat (&sums)[ROWS]) {
    for (int i = 0; i < outliers.count; ++i) {
        const vfloat weights = column(strip, outliers.column[i] / GROUP, outliers.column[i] % GROUP);
        add_scaled<ROWS, 0>(sums, &weights, outliers.value[i]);
    }
}

template <class Strip, int ROWS>
void multiply_tile(const Matrix& m, const uint8_t* data, const uint8_t* tile, const TileOutliers& outliers,
                   const float* bias, const Output& out, int64_t lanes) {
    constexpr int AT_ONCE = ROWS <= PAIR_ROWS ? 2 : 1;
    const int64_t groups = m.groups();
    const Strip strip(m, data);
    vfloat sums[ROWS];
    unroll<ROWS>(EACH(r) { sums[r] = vzero(); });
    int64_t g = 0;
    for (; g + AT_ONCE <= groups; g += AT_ONCE, tile += AT_ONCE * group_bytes(ROWS)) {
        add_groups<Strip, ROWS, AT_ONCE>(strip, g, tile, sums);
    }
    if (g < groups) add_groups<Strip, ROWS, 1>(strip, g, tile, sums);
    add_outliers(strip, outliers, sums);
    unroll<ROWS>(EACH(r) { store_lanes(sums[r], bias, out.y + r * out.stride, lanes, out.add); });
}

// Vectors FIRST to FIRST + COUNT of a group, which share a scale, times all rows, four at a time: more would not fit the
// registers. The bias is taken off before the scale, which may have all bits of a float.
template <int FIRST, int COUNT, class Strip, int ROWS>
INLINE void add_part(const Strip& strip, int64_t g, vfloat scale, const int8_t* x, const float* steps,
                     vfloat (&sums)[ROWS]) {
    vbytes w[COUNT];
    unroll<COUNT>(EACH(j) { w[j] = strip.template weight<FIRST + j>(g); });
    unroll<(ROWS + 3) / 4>(EACH(i) {
        constexpr int AT = 4 * i, SOME = ROWS - AT < 4 ? ROWS - AT : 4;
        vfloat dots[SOME];
        dot_part<SOME, COUNT>(w, x + AT * GROUP + 4 * FIRST, dots);
        unroll<SOME>(EACH(r) { dots[r] = vmultiply(vadd(dots[r], vsplat(-BIAS_VALUE)), scale); });
        add_scaled<SOME, 1>(sums + AT, dots, steps + AT);
    });
}

template <class Strip, int ROWS>
void multiply_leveled(const Matrix& m, const uint8_t* data, const uint8_t* tile, const TileOutliers& outliers,
                      const float* bias, const Output& out, int64_t lanes) {
    const Strip strip(m, data);
    const bool halved = m.levels->scales == 2, offset = m.levels->offsets;
    vfloat sums[ROWS];
    unroll<ROWS>(EACH(r) { sums[r] = vzero(); });
    for (int64_t g = 0; g < m.groups(); ++g, tile += group_bytes(ROWS)) {
        strip.prefetch(g);
        const auto* x = reinterpret_cast<const int8_t*>(tile);
        const auto* steps = reinterpret_cast<const float*>(tile + ROWS * GROUP);
        const vfloat first = strip.scale(g, 0);
        if (halved) {
            add_part<0, 4>(strip, g, first, x, steps, sums);
            add_part<4, 4>(strip, g, strip.scale(g, 1), x, steps, sums);
        } else {
            add_part<0, 8>(strip, g, first, x, steps, sums);
        }
        if (offset) {
            const vfloat added = strip.offset(g);
            add_scaled<ROWS, 0>(sums, &added, steps + TILE);
        }
    }
    add_outliers(strip, outliers, sums);
    const int64_t strip_number = (data - m.data) / m.strip_bytes();
    const vfloat factor = m.levels->row_scale ? vload(m.levels->row_scale + strip_number * LANES) : vsplat(1);
    unroll<ROWS>(EACH(r) {
        store_lanes(vmultiply(sums[r], factor), bias, out.y + r * out.stride, lanes, out.add);
    });
}

using Multiply = void (*)(const Matrix&, const uint8_t*, const uint8_t*, const TileOutliers&, const float*,
                          const Output&, int64_t);

template <class Strip, int... ROWS>
Multiply multiply_for(int rows, std::integer_sequence<int, ROWS...>) {
    if constexpr (Strip::LEVELED) {
        static constexpr Multiply table[] = {multiply_leveled<Strip, ROWS + 1>...};
        return table[rows - 1];
    } else {
        static constexpr Multiply table[] = {multiply_tile<Strip, ROWS + 1>...};
        return table[rows - 1];
    }
}

// Multiplies strips of this form with so many rows.
template <class Strip>
Multiply multiply_for(int rows) {
    return multiply_for<Strip>(rows, std::make_integer_sequence<int, TILE>{});
}

Multiply multiply_packed_for(const Matrix& m, int rows) {
    if (m.levels) return m.bits == 4 ? multiply_for<Leveled<true>>(rows) : multiply_for<Leveled<false>>(rows);
    return m.bits == 4 ? multiply_for<Nibbles>(rows) : multiply_for<Bytes>(rows);
}

// ---- All strips times all rows ------------------------------------------------------------------------------------

struct Rows {  // rounded rows in tiles; all tiles but the last have TILE rows
    const uint8_t* data;
    int64_t count, tile_bytes;
    int64_t tiles() const { return (count + TILE - 1) / TILE; }
    int rows_of(int64_t tile) const { return int(std::min<int64_t>(TILE, count - tile * TILE)); }
};

// Strips 'begin' to 'end', which lie 'strip_bytes' apart from 'data' on, times one tile of rows.
void multiply_strips(Multiply multiply, const Matrix& m, const uint8_t* data, int64_t strip_bytes, int64_t begin,
                     int64_t end, const Rows& rows, int64_t tile, Output out) {
    const uint8_t* x = rows.data + tile * rows.tile_bytes;
    const int count = rows.rows_of(tile);
    const TileOutliers outliers(reinterpret_cast<const Outliers*>(x + m.groups() * group_bytes(count)), count);
    float* y = out.y + tile * TILE * out.stride;
    for (int64_t s = begin; s < end; ++s, data += strip_bytes) {
        const int64_t lanes = std::min<int64_t>(LANES, m.out_features - s * LANES);
        const float* bias = m.bias ? m.bias + s * LANES : nullptr;
        multiply(m, data, x, outliers, bias, Output{y + s * LANES, out.stride, out.add}, lanes);
    }
}

// Strips 'begin' to 'end' times all rows. With several tiles of rows, a few strips at a time stay in the first-level
// cache while a block of tiles passes by, and 4-bit strips are unpacked once for a block.
void multiply_all(const Matrix& m, const Rows& rows, Output out, int64_t begin, int64_t end) {
    thread_local std::vector<uint8_t> scratch;
    const int64_t few = rows.tiles() == 1 ? std::max<int64_t>(end - begin, 1) : 4;
    const int64_t block = std::max<int64_t>(2, BLOCK / rows.tile_bytes), unpacked_bytes = m.groups() * Unpacked::BYTES;
    for (int64_t first = 0; first < rows.tiles(); first += block) {
        const int64_t last = std::min(first + block, rows.tiles());
        const bool unpack = m.bits == 4 && !m.levels && last - first >= 5;  // from there on it pays
        if (unpack) scratch.resize(size_t(few * unpacked_bytes));
        for (int64_t s = begin; s < end; s += few) {
            const int64_t stop = std::min(s + few, end);
            const uint8_t* strips = m.data + s * m.strip_bytes();
            for (int64_t i = 0; unpack && i < stop - s; ++i) {
                Unpacked::fill(m, strips + i * m.strip_bytes(), scratch.data() + i * unpacked_bytes);
            }
            for (int64_t t = first; t < last; ++t) {
                const int count = rows.rows_of(t);
                if (unpack) {
                    const Multiply by = multiply_for<Unpacked>(count);
                    multiply_strips(by, m, scratch.data(), unpacked_bytes, s, stop, rows, t, out);
                } else {
                    multiply_strips(multiply_packed_for(m, count), m, strips, m.strip_bytes(), s, stop, rows, t, out);
                }
            }
        }
    }
}

// Output 'o' of a part goes to lane o % LANES of its strip, four weights (or eight nibbles: k .. k + 3 and k + 16 ..
// k + 19, as the file pairs them) at a time.
void pack_output(const Matrix& m, int64_t o, const uint8_t* q, int64_t q_step, const uint8_t* scale, int64_t scale_step,
                 const uint8_t* offset, int64_t offset_step) {
    uint8_t* strip = const_cast<uint8_t*>(m.data) + o / LANES * m.strip_bytes();
    const int64_t lane = o % LANES, quads = m.bits == 4 ? 4 : 8, halves = m.bits == 4 ? 2 : 1;
    uint8_t* head = strip + 2 * lane;
    uint8_t* body = strip + m.head_bytes() + 4 * lane;
    for (int64_t g = 0; g < m.groups(); ++g) {
        for (int64_t j = 0; j < quads; ++j, body += 4 * LANES) std::memcpy(body, q + g * q_step + 4 * j, 4);
        std::memcpy(head, scale + g * scale_step, 2);
        if (offset) std::memcpy(head + 2 * LANES, offset + g * offset_step, 2);
        head += 2 * LANES * halves;
    }
}

// The same for the general form: 'head' holds the scales and the offset of each group together, 'body' its weights.
void pack_leveled(const Matrix& m, int64_t o, const uint8_t* q, const uint8_t* head) {
    uint8_t* strip = const_cast<uint8_t*>(m.data) + o / LANES * m.strip_bytes();
    const int64_t lane = o % LANES, quads = m.bits == 4 ? 4 : 8, size = m.levels->scale_bytes;
    uint8_t* body = strip + m.head_bytes() + 4 * lane;
    for (int64_t g = 0; g < m.groups(); ++g, strip += LANES * m.levels->head()) {
        for (int64_t j = 0; j < quads; ++j, body += 4 * LANES, q += 4) std::memcpy(body, q, 4);
        uint8_t* to = strip;
        for (int64_t i = 0; i < m.levels->scales; ++i, to += LANES * size, head += size) {
            std::memcpy(to + lane * size, head, size_t(size));
        }
        if (m.levels->offsets) std::memcpy(to + lane * 4, head, 4), head += 4;
    }
}

// ---- Floats ---------------------------------------------------------------------------------------------------------

// ROWS rows times OUTS outputs, whose weights follow each other. Each sum is made of eight interleaved ones and what is
// left over, in the same order in every tile.
template <int ROWS, int OUTS>
void multiply_floats(const float* w, int64_t width, const float* x, const float* bias, Output out) {
    f32x4 sums[ROWS][OUTS][2] = {};
    int64_t k = 0;
    for (; k + 8 <= width; k += 8) {
        f32x4 a[OUTS][2];
        unroll<OUTS>(EACH(o) { unroll<2>(EACH(j) { a[o][j] = load4(w + o * width + k + 4 * j); }); });
        unroll<ROWS>(EACH(r) {
            unroll<2>(EACH(j) {
                const f32x4 b = load4(x + r * width + k + 4 * j);
                unroll<OUTS>(EACH(o) { sums[r][o][j] = multiply_add(a[o][j], b, sums[r][o][j]); });
            });
        });
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int o = 0; o < OUTS; ++o) {
            float total = sum_lanes(sums[r][o][0] + sums[r][o][1]);
            for (int64_t i = k; i < width; ++i) total = multiply_add(w[o * width + i], x[r * width + i], total);
            if (bias) total += bias[o];
            float* y = out.y + r * out.stride + o;
            *y = out.add ? *y + total : total;
        }
    }
}

// Outputs 'begin' to 'end' times all rows, a block of which stays in the second-level cache meanwhile.
void multiply_all_floats(const Matrix& m, const float* x, int64_t count, Output out, int64_t begin, int64_t end) {
    const auto* w = reinterpret_cast<const float*>(m.data);
    const int64_t width = m.width, block = std::max<int64_t>(2, BLOCK / int64_t(width * sizeof(float)));
    const auto tile = [&](int64_t r, int64_t o, auto rows, auto outs) {
        const Output to{out.y + r * out.stride + o, out.stride, out.add};
        multiply_floats<rows, outs>(w + o * width, width, x + r * width, m.bias ? m.bias + o : nullptr, to);
    };
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    const std::integral_constant<int, 4> four;
    for (int64_t first = 0; first < count; first += block) {
        const int64_t last = std::min(first + block, count);
        int64_t o = begin;
        for (; o + 4 <= end; o += 4) {
            int64_t r = first;
            for (; r + 2 <= last; r += 2) tile(r, o, two, two), tile(r, o + 2, two, two);
            if (r < last) tile(r, o, one, four);
        }
        for (; o < end; ++o) {
            for (int64_t r = first; r < last; ++r) tile(r, o, one, one);
        }
    }
}

Rows layout(const Matrix& m, const uint8_t* data, int64_t count) {
    return Rows{data, count, tile_bytes(m.groups(), int(std::min<int64_t>(count, TILE)))};
}

}  // namespace

int64_t prepared_bytes(const Matrix& m, int64_t count) {
    if (m.bits == 32) return count * m.width * int64_t(sizeof(float));
    const Rows rows = layout(m, nullptr, count);
    return rows.tiles() * rows.tile_bytes;
}

void prepare_row(const Matrix& m, const float* x, int64_t row, int64_t count, uint8_t* prepared) {
    const size_t bytes = size_t(m.width) * sizeof(float);
    if (m.bits == 32) {
        std::memcpy(prepared + size_t(row) * bytes, x, bytes);
        return;
    }
    const Rows rows = layout(m, prepared, count);
    const int64_t tile = row / TILE;
    round_row(x, m.groups(), row % TILE, rows.rows_of(tile), prepared + tile * rows.tile_bytes);
}

void multiply(const Matrix& m, const uint8_t* prepared, int64_t count, Output out, int64_t begin, int64_t end) {
    if (m.bits != 32) return multiply_all(m, layout(m, prepared, count), out, begin, end);
    const int64_t last = std::min(end * LANES, m.out_features);
    multiply_all_floats(m, reinterpret_cast<const float*>(prepared), count, out, begin * LANES, last);
}

extern "C" {

void sd_set_threads(int threads) { pool::set_threads(threads); }

int sd_lanes() { return LANES; }

// Strides in bytes, of an output and of a group; 'offset' may be null. Bytes of the matrix not written stay zero.
void sd_pack(const Matrix* m, int64_t first, int64_t count, const uint8_t* q, int64_t q_out, int64_t q_group,
             const uint8_t* scale, int64_t scale_out, int64_t scale_group, const uint8_t* offset, int64_t offset_out,
             int64_t offset_group) {
    pool::parallel_ranges(count, double(count * m->width), 4, [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; ++o) {
            pack_output(*m, first + o, q + o * q_out, q_group, scale + o * scale_out, scale_group,
                        offset ? offset + o * offset_out : nullptr, offset_group);
        }
    });
}

// 'q' [count, groups, 16 or 32], 'head' [count, groups, bytes of a head], both without gaps.
void sd_pack_leveled(const Matrix* m, int64_t first, int64_t count, const uint8_t* q, const uint8_t* head) {
    const int64_t q_out = m->groups() * (m->bits == 4 ? 16 : 32), head_out = m->groups() * m->levels->head();
    pool::parallel_ranges(count, double(count * m->width), 4, [&](int64_t begin, int64_t end) {
        for (int64_t o = begin; o < end; ++o) pack_leveled(*m, first + o, q + o * q_out, head + o * head_out);
    });
}

void sd_linear(const Matrix* m, const float* x, int64_t x_stride, int64_t count, float* y, int64_t y_stride, int add) {
    thread_local std::vector<uint8_t> buffer;  // of the caller; workers get its address
    const auto bytes = size_t(prepared_bytes(*m, count));
    if (buffer.size() < bytes) buffer.resize(bytes);
    uint8_t* prepared = buffer.data();
    const double elements = double(count * m->width);
    pool::parallel_ranges(count, 4 * elements, 2, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) prepare_row(*m, x + r * x_stride, r, count, prepared);
    });
    const Output out{y, y_stride, add != 0};
    pool::parallel_ranges(m->strips(), elements * double(m->out_features) / 8, 2, [&](int64_t begin, int64_t end) {
        multiply(*m, prepared, count, out, begin, end);
    });
}

}  // extern "C"
