// The activations of a gated MLP (kernels/ops.py), four lanes at a time.
#pragma once

#include "simd.h"

enum Activation : int64_t { SILU, GELU_TANH, CLAMPED_SWIGLU };  // the order of ACTIVATIONS in experts.py

// Each is the gate times a sigmoid: x / (1 + e^-x). GELU's tanh is one too: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u).
INLINE f32x4 times_sigmoid(f32x4 x, f32x4 z) { return x / (splat4(1.0f) + exp4(-z)); }

template <Activation KIND>
INLINE f32x4 gated4(f32x4 gate, f32x4 up, float limit) {
    if constexpr (KIND == SILU) return times_sigmoid(gate, gate) * up;
    if constexpr (KIND == GELU_TANH) {
        const f32x4 cubic = multiply_add(gate * gate, splat4(0.044715f), splat4(1.0f));
        return times_sigmoid(gate, gate * cubic * splat4(1.5957691216f)) * up;  // 2 * sqrt(2 / pi)
    }
    const f32x4 most = splat4(limit), least = splat4(-limit);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < least ? least : up;
    return times_sigmoid(gate, gate * splat4(1.702f)) * (up + splat4(1.0f));
}

// y may be 'gate' itself.
template <Activation KIND>
inline void gated_row(const float* gate, const float* up, float* y, int64_t n, float limit) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {  // four at a time: each is a long chain of dependent steps
        f32x4 v[4];
        unroll<4>(EACH(j) { v[j] = gated4<KIND>(load4(gate + i + 4 * j), load4(up + i + 4 * j), limit); });
        unroll<4>(EACH(j) { store4(y + i + 4 * j, v[j]); });
    }
    for (; i < n; ++i) y[i] = gated4<KIND>(splat4(gate[i]), splat4(up[i]), limit)[0];
}

inline void gated_row(int64_t kind, const float* gate, const float* up, float* y, int64_t n, float limit) {
    if (kind == SILU) return gated_row<SILU>(gate, up, y, n, limit);
    if (kind == GELU_TANH) return gated_row<GELU_TANH>(gate, up, y, n, limit);
    gated_row<CLAMPED_SWIGLU>(gate, up, y, n, limit);
}
