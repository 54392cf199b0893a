// What happens to one row between two matmuls: RMS norm and SiLU gating. Both the operators of elementwise.cpp and the
// matmuls that take them in as their first step (matmul.cpp) call these, so that fused and separate calls give the
// same bits; a row is summed in one fixed order, whatever its batch. Which rows there are, and who computes them, is
// the callers' business.
#pragma once

#include "simd.h"

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

INLINE f32x4 silu_mul4(f32x4 gate, f32x4 up) { return gate / (splat4(1.0f) + exp4(-gate)) * up; }

inline void silu_mul_row(const float* gate, const float* up, float* y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {  // four at a time: each is a long chain of dependent steps
        f32x4 v[4];
        unroll<4>(EACH(j) { v[j] = silu_mul4(load4(gate + i + 4 * j), load4(up + i + 4 * j)); });
        unroll<4>(EACH(j) { store4(y + i + 4 * j, v[j]); });
    }
    for (; i < n; ++i) y[i] = silu_mul4(splat4(gate[i]), splat4(up[i]))[0];
}
