// The operators around the matmuls: embedding, RMS norm, rotary positions, activations, writing K and V into the cache.
// Each row (or head of a row) is computed by itself in one fixed order, so its bits do not depend on the batch around
// it; rows are shared out to threads where there are enough of them, and a single decode row stays on the caller's
// thread. Tensors arrive as pointers with strides in elements; shapes are checked, if at all, by the Python side.

#include <algorithm>
#include <cstddef>

#include "activation.h"
#include "pool.h"
#include "simd.h"

namespace {

// Sum of squares in four interleaved vectors, then their lanes: a fixed order for a given length.
INLINE float sum_of_squares(const float* x, int64_t n) {
    f32x4 sums[4] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        unroll<4>(EACH(j) {
            const f32x4 v = load4(x + i + 4 * j);
            sums[j] = multiply_add(v, v, sums[j]);
        });
    }
    float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; ++i) total = multiply_add(x[i], x[i], total);
    return total;
}

inline void norm_row(const float* x, const float* weight, float* y, int64_t n, float eps) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

inline void add_normed_row(float* residual, const float* y, const float* weight, int64_t n, float eps, float factor) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(y, n) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) residual[i] = (residual[i] + y[i] * scale * weight[i]) * factor;
}

// By its series near 0, where 1 - e^-2x would lose what counts.
INLINE f32x4 tanh4(f32x4 x) {
    const f32x4 size = x < splat4(0.0f) ? -x : x, square = x * x;
    const f32x4 e = exp4(size * splat4(-2.0f)), far = (splat4(1.0f) - e) / (splat4(1.0f) + e);
    f32x4 p = splat4(-8.8632356e-3f);
    p = multiply_add(p, square, splat4(2.1869488e-2f));
    p = multiply_add(p, square, splat4(-5.3968254e-2f));
    p = multiply_add(p, square, splat4(1.3333334e-1f));
    p = multiply_add(p, square, splat4(-3.3333334e-1f));
    const f32x4 near = multiply_add(p * square, x, x);
    return size < splat4(0.3f) ? near : x < splat4(0.0f) ? -far : far;
}

INLINE float half_at(const uint8_t* p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return half_to_float(half);
}

// One head in place: pairs (a, b) = (x[i], x[i + half]) turn by the angle of their position; the rest stays.
INLINE void rotate(float* x, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

}  // namespace

extern "C" {

// Rows of a table of 4- or 8-bit groups, by id, times 'factor'. Strides in bytes, of a row and of a group.
void sd_embed(const int32_t* ids, int64_t rows, int64_t bits, const uint8_t* q, int64_t q_row, int64_t q_group,
              const uint8_t* scale, int64_t s_row, int64_t s_group, const uint8_t* offset, int64_t o_row,
              int64_t o_group, int64_t groups, float* y, float factor) {
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t g = 0; g < groups; ++g, y += GROUP) {
            const uint8_t* from = q + ids[r] * q_row + g * q_group;
            const float step = half_at(scale + ids[r] * s_row + g * s_group);
            const float base = offset ? half_at(offset + ids[r] * o_row + g * o_group) : 0.0f;
            for (int64_t k = 0; k < GROUP; ++k) {
                const int value = bits == 8 ? int8_t(from[k]) : (k < 16 ? from[k] & 15 : from[k - 16] >> 4);
                y[k] = (float(value) * step + base) * factor;
            }
        }
    }
}

// Row r of 'y' is row ids[r] of 'x', or row r without ids, times 'factor'.
void sd_copy_rows(const float* x, int64_t x_stride, float* y, int64_t y_stride, const int32_t* ids, int64_t rows,
                  int64_t width, float factor) {
    for (int64_t r = 0; r < rows; ++r, y += y_stride) {
        const float* from = x + (ids ? ids[r] : r) * x_stride;
        if (factor == 1) {
            std::memcpy(y, from, size_t(width) * sizeof(float));
        } else {
            for (int64_t i = 0; i < width; ++i) y[i] = from[i] * factor;
        }
    }
}

// Translates slots and tables of blocks to pages: a slot without a page is -1, a table entry 'missing'.
void sd_find_pages(const int32_t* page_of, const int32_t* slots, const int32_t* tables, int32_t* page_slots,
                   int32_t* page_tables, int64_t rows, int64_t entries, int64_t block_size, int64_t missing) {
    for (int64_t r = 0; r < rows; ++r) {
        const int32_t page = slots[r] < 0 ? -1 : page_of[slots[r] / block_size];
        page_slots[r] = page < 0 ? -1 : int32_t(page * block_size + slots[r] % block_size);
    }
    for (int64_t i = 0; i < entries; ++i) {
        const int32_t page = page_of[tables[i]];
        page_tables[i] = page < 0 ? int32_t(missing) : page;
    }
}

void sd_rms_norm(const float* x, int64_t x_stride, const float* weight, float* y, int64_t rows, int64_t dim,
                 float eps) {
    pool::parallel_ranges(rows, double(rows * dim), 2, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) norm_row(x + r * x_stride, weight, y + r * dim, dim, eps);
    });
}

// Each head of each row divided by its RMS. y is [rows, heads, head_dim], dense.
void sd_unit_rms(const float* x, int64_t x_row, int64_t x_head, float* y, int64_t rows, int64_t heads, int64_t head_dim,
                 float eps) {
    pool::parallel_ranges(rows, double(rows * heads * head_dim), 2, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            for (int64_t h = 0; h < heads; ++h) {
                const float* from = x + r * x_row + h * x_head;
                float* to = y + (r * heads + h) * head_dim;
                const float scale = 1.0f / std::sqrt(sum_of_squares(from, head_dim) / float(head_dim) + eps);
                for (int64_t i = 0; i < head_dim; ++i) to[i] = from[i] * scale;
            }
        }
    });
}

void sd_qk_norm_rope(float* qkv, int64_t stride, const int32_t* positions, const float* table, int64_t rotary,
                     int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, const float* q_norm,
                     const float* k_norm, float eps) {
    const int64_t half = rotary / 2, turned = heads + kv_heads;
    pool::parallel_ranges(rows, double(rows * turned * head_dim), 2, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const float* angles = table + int64_t(positions[r]) * rotary;
            for (int64_t h = 0; h < turned; ++h) {
                float* x = qkv + r * stride + h * head_dim;
                const float* weight = h < heads ? q_norm : k_norm;
                if (weight) norm_row(x, weight, x, head_dim, eps);
                rotate(x, angles, angles + half, half);
            }
        }
    });
}

void sd_gated(const float* gate_up, int64_t stride, float* y, int64_t rows, int64_t inter, int64_t activation,
              float limit) {
    const int64_t piece = 512, pieces = (inter + piece - 1) / piece;  // a wide single row is shared out too
    pool::parallel_ranges(rows * pieces, double(rows * inter) * 8, 2, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            const int64_t r = p / pieces, first = p % pieces * piece;
            const int64_t n = inter - first < piece ? inter - first : piece;
            const float* gate = gate_up + r * stride + first;
            gated_row(activation, gate, gate + inter, y + r * inter + first, n, limit);
        }
    });
}

// Caches are [blocks, kv_heads, block_size, head_dim], dense.
void sd_kv_write(const float* k, int64_t k_row, int64_t k_head, const float* v, int64_t v_row, int64_t v_head,
                 float* k_cache, float* v_cache, const int32_t* slots, int64_t rows, int64_t kv_heads,
                 int64_t block_size, int64_t head_dim) {
    const size_t bytes = size_t(head_dim) * sizeof(float);
    pool::parallel_ranges(rows, double(rows * kv_heads * head_dim), 2, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            if (slots[r] < 0) continue;
            const int64_t block = slots[r] / block_size, offset = slots[r] % block_size;
            for (int64_t h = 0; h < kv_heads; ++h) {
                const int64_t at = ((block * kv_heads + h) * block_size + offset) * head_dim;
                std::memcpy(k_cache + at, k + r * k_row + h * k_head, bytes);
                std::memcpy(v_cache + at, v + r * v_row + h * v_head, bytes);
            }
        }
    });
}

// Where the rows of a step are, a sequence at a time: kernels/reference's make_rows without drafts. 'first' may be null. out
// holds ids, positions and slots [seqs * width each], then the keys that each sequence's last row sees [seqs].
void sd_make_rows(const int32_t* length, const int32_t* tables, const int32_t* token, const int32_t* first, int64_t seqs,
                int64_t max_blocks, int64_t width, int64_t block_size, int64_t fill, int32_t* out) {
    const int64_t rows = seqs * width;
    int32_t *ids = out, *positions = out + rows, *slots = out + 2 * rows, *context_len = out + 3 * rows;
    for (int64_t s = 0; s < seqs; ++s) {
        const bool alive = length[s] > 0;
        for (int64_t i = 0; i < width; ++i) {
            const int64_t row = s * width + i, place = std::max<int64_t>(length[s] - 1 + i, 0);
            const int64_t block = place / block_size;
            const bool inside = alive && block < max_blocks;
            ids[row] = i ? int32_t(fill) : token[s];
            positions[row] = int32_t(first ? first[s] + i : place);
            slots[row] = inside ? int32_t(tables[s * max_blocks + block] * block_size + place % block_size) : -1;
        }
        context_len[s] = alive ? int32_t(std::min(length[s] - 1 + width, max_blocks * block_size)) : 0;
    }
}

// residual = (residual + norm(y)) * factor.
void sd_add_normed(float* residual, int64_t stride, const float* y, int64_t y_stride, const float* weight, int64_t rows,
                   int64_t dim, float eps, float factor) {
    pool::parallel_ranges(rows, double(rows * dim), 2, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            add_normed_row(residual + r * stride, y + r * y_stride, weight, dim, eps, factor);
        }
    });
}

// x = tanh(x / cap) * cap, of 'count' numbers.
void sd_softcap(float* x, int64_t count, float cap) {
    const int64_t piece = 1024, pieces = (count + piece - 1) / piece;
    pool::parallel_ranges(pieces, double(count) * 8, 2, [&](int64_t begin, int64_t end) {
        const int64_t last = std::min(end * piece, count);
        int64_t i = begin * piece;
        for (; i + 16 <= last; i += 16) {
            f32x4 v[4];
            unroll<4>(EACH(j) { v[j] = tanh4(load4(x + i + 4 * j) / splat4(cap)) * splat4(cap); });
            unroll<4>(EACH(j) { store4(x + i + 4 * j, v[j]); });
        }
        for (; i < last; ++i) x[i] = (tanh4(splat4(x[i]) / splat4(cap)) * splat4(cap))[0];
    });
}

}  // extern "C"
