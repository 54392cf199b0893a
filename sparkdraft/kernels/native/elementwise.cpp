// The operators between the matmuls: RMS norm, rotary embedding, SiLU, and writing keys and values into the cache.
// Each row (or head of a row) is computed by itself in one fixed order, so its bits do not depend on the batch around
// it; rows are shared out to threads where there are enough of them, and a single decode row stays on the caller's
// thread. Tensors arrive as pointers with strides in elements; shapes are checked, if at all, by the Python side.

#include <cstddef>

#include "pool.h"
#include "rows.h"

namespace {

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

void sd_rms_norm(const float* x, int64_t x_stride, const float* weight, float* y, int64_t rows, int64_t dim,
                 float eps) {
    pool::parallel_ranges(rows, double(rows * dim), 2, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) norm_row(x + r * x_stride, weight, y + r * dim, dim, eps);
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

void sd_silu_mul(const float* gate_up, int64_t stride, float* y, int64_t rows, int64_t inter) {
    const int64_t piece = 512, pieces = (inter + piece - 1) / piece;  // a wide single row is shared out too
    pool::parallel_ranges(rows * pieces, double(rows * inter) * 8, 2, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            const int64_t r = p / pieces, first = p % pieces * piece;
            const int64_t n = inter - first < piece ? inter - first : piece;
            const float* gate = gate_up + r * stride + first;
            silu_mul_row(gate, gate + inter, y + r * inter + first, n);
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

}  // extern "C"
