// The few vector operations that the kernels are written in, for NEON, AVX2, AVX-512 and in plain C++ for the rest.
// Everything that must give the same bits in every tiling goes through these: multiply-adds are explicit (the compiler
// is told to fuse none by itself), and a function of one lane never looks at another.
// Algorithms are in matmul.cpp, experts.cpp, attention.cpp, recurrent.cpp, elementwise.cpp and sampling.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#if !defined(SPARKDRAFT_PLAIN) && defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define SPARKDRAFT_NEON 1
#include <arm_neon.h>
#elif !defined(SPARKDRAFT_PLAIN) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define SPARKDRAFT_AVX2 1  // AVX-512 too, whose vectors are twice as wide
#include <immintrin.h>
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && !SPARKDRAFT_8_LANES
#define SPARKDRAFT_AVX512 1
#else
#define SPARKDRAFT_AVX512 0
#endif
#if SPARKDRAFT_AVX512 ? defined(__AVX512VNNI__) : defined(__AVXVNNI__)
#define SPARKDRAFT_VNNI 1  // one instruction adds four products of bytes to a sum
#else
#define SPARKDRAFT_VNNI 0
#endif
#endif

#define INLINE inline __attribute__((always_inline))

// Calls f with the constants 0 .. N - 1. Unlike a loop, this is unrolled before the compiler decides which arrays can
// live in registers, which is what all arrays of vectors here are meant to do.
template <class F, int... I>
INLINE void unroll_over(std::integer_sequence<int, I...>, F f) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
INLINE void unroll(F f) {
    unroll_over(std::make_integer_sequence<int, N>{}, f);
}
#define EACH(i) [&](auto i) __attribute__((always_inline))

// ---- Four floats --------------------------------------------------------------------------------------------------

typedef float f32x4 __attribute__((vector_size(16)));

INLINE f32x4 load4(const float* p) {
    f32x4 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store4(float* p, f32x4 v) { std::memcpy(p, &v, sizeof v); }

INLINE f32x4 splat4(float x) { return f32x4{x, x, x, x}; }

INLINE float multiply_add(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;  // no fused instruction: libm's emulation would be a hundred times slower
#endif
}

INLINE f32x4 multiply_add(f32x4 a, f32x4 b, f32x4 c) {
#if SPARKDRAFT_NEON
    return (f32x4)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif SPARKDRAFT_AVX2
    return (f32x4)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#else
    f32x4 r;
    for (int i = 0; i < 4; ++i) r[i] = multiply_add(a[i], b[i], c[i]);
    return r;
#endif
}

// a * b[LANE] + c, in the order as written: the compiler's own order needs more registers than there are
template <int LANE>
INLINE f32x4 multiply_add_lane(f32x4 a, f32x4 b, f32x4 c) {
#if SPARKDRAFT_NEON
    asm volatile("fmla %0.4s, %1.4s, %2.s[%c3]" : "+w"(c) : "w"(a), "w"(b), "i"(LANE));
    return c;
#else
    return multiply_add(a, splat4(b[LANE]), c);
#endif
}

INLINE float sum_lanes(f32x4 v) { return (v[0] + v[1]) + (v[2] + v[3]); }

// The lane sums of four vectors as the lanes of one.
INLINE f32x4 sum_lanes(f32x4 a, f32x4 b, f32x4 c, f32x4 d) {
#if SPARKDRAFT_NEON
    return (f32x4)vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d));
#else
    return f32x4{sum_lanes(a), sum_lanes(b), sum_lanes(c), sum_lanes(d)};
#endif
}

// ---- exp ----------------------------------------------------------------------------------------------------------

typedef int32_t i32x4 __attribute__((vector_size(16)));

INLINE f32x4 max4(f32x4 a, f32x4 b) {  // not a number where b is none
#if SPARKDRAFT_NEON
    return (f32x4)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, to about 1e-7 relative: x = n + f with |f| <= 1 / 2, a polynomial for 2^f, n added to the exponent
// bits. Exactly 1 at 0 and exactly 0 from -127 on, so that masked keys vanish.
INLINE f32x4 power_of_2(f32x4 x) {
    const f32x4 round_magic = splat4(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
    const f32x4 y = max4(splat4(-127.0f), x);
    const f32x4 shifted = y + round_magic;
    const f32x4 f = y - (shifted - round_magic);
    f32x4 p = splat4(1.3264715469e-3f);
    p = multiply_add(p, f, splat4(9.6715140431e-3f));
    p = multiply_add(p, f, splat4(5.5507337875e-2f));
    p = multiply_add(p, f, splat4(2.4022242058e-1f));
    p = multiply_add(p, f, splat4(6.9314697757e-1f));
    p = multiply_add(p, f, splat4(1.0f));
    return (f32x4)((i32x4)p + ((i32x4)shifted << 23));
}

// e^x to about 1e-7 relative: x = n ln2 + r with |r| <= ln2 / 2, a polynomial for e^r, and n put into the exponent
// bits. Exactly 1 at 0 and exactly 0 below -87; above 88.3 it stays at about 2e38.
INLINE f32x4 exp4(f32x4 x) {
    const f32x4 round_magic = splat4(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, left in the low bits
    f32x4 y = x > splat4(88.3f) ? splat4(88.3f) : x;
    y = max4(splat4(-87.0f), y);
    const f32x4 shifted = multiply_add(y, splat4(1.44269504f), round_magic);
    const f32x4 n = shifted - round_magic;
    f32x4 r = multiply_add(n, splat4(-0.693145752f), y);  // ln2 in two parts, the first with few bits: n * it is exact
    r = multiply_add(n, splat4(-1.42860677e-6f), r);
    f32x4 p = splat4(1.9875691500e-4f);
    p = multiply_add(p, r, splat4(1.3981999507e-3f));
    p = multiply_add(p, r, splat4(8.3334519073e-3f));
    p = multiply_add(p, r, splat4(4.1665795894e-2f));
    p = multiply_add(p, r, splat4(1.6666665459e-1f));
    p = multiply_add(p, r, splat4(5.0000001201e-1f));
    const f32x4 e = multiply_add(p * r, r, r) + splat4(1.0f);
    const i32x4 power = ((i32x4)shifted - 0x4b400000 + 127) << 23;
    const i32x4 kept = ~(x < splat4(-87.0f));
    return (f32x4)((i32x4)(e * (f32x4)power) & kept);
}

// ---- Integer dot products of one group: LANES outputs at once -----------------------------------------------------
//
// Weights of a group stand as 8 vectors; vector j holds, for each of LANES outputs, the four weights k = 4j .. 4j + 3.
// The 32 products of each output are added to BIAS, the bits of the float 1.5 * 2^23. Read as a float, such a sum *is*
// BIAS_VALUE + dot, exactly, for |dot| < 2^22 (ours stay below 2^19): no conversion from int to float is needed, and
// multiply_add(biased, scale, shift)  with  shift = -BIAS_VALUE * scale  is dot * scale with one rounding, because this
// shift is exact for a scale of 11 bits. dot_group gives the biased sums of a strip of weights with ROWS rows of x,
// GROUP bytes apart; add_scaled adds a[STRIDE * r] * factors[r] to the sum of each row r. Up to PAIR_ROWS rows,
// there are registers to take two groups at once. byte_floats gives byte k of each lane's four as a float.

constexpr int GROUP = 32;

INLINE float half_to_float(uint16_t h) {
    const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
    uint32_t bits = rest << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    value *= 0x1p112f;  // moves the exponent's bias from 15 to 127, and is right for subnormal halves too
    std::memcpy(&bits, &value, 4);
    if (rest >= 0x7c00) bits = 0x7f800000 | rest << 13;  // infinity, not a number
    bits |= sign;
    std::memcpy(&value, &bits, 4);
    return value;
}
constexpr float BIAS_VALUE = 12582912.0f;

#if SPARKDRAFT_NEON

constexpr int LANES = 4, PAIR_ROWS = 4;
typedef float32x4_t vfloat;
typedef int8x16_t vbytes;
alignas(16) static const int32_t BIAS[4] = {0x4b400000, 0x4b400000, 0x4b400000, 0x4b400000};

INLINE vfloat vload(const float* p) { return vld1q_f32(p); }
INLINE void vstore(float* p, vfloat v) { vst1q_f32(p, v); }
INLINE vfloat vzero() { return vdupq_n_f32(0); }
INLINE vfloat vsplat(float x) { return vdupq_n_f32(x); }
INLINE vfloat vadd(vfloat a, vfloat b) { return vaddq_f32(a, b); }
INLINE vfloat vscale(vfloat a, float b) { return vmulq_n_f32(a, b); }
INLINE vfloat load_halves(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void store_bytes(void* p, vbytes v) { vst1q_s8(static_cast<int8_t*>(p), v); }

// The rest is in assembly, one instruction each, because the order counts and compilers spoil it; 'volatile' keeps it
// as written. The two vector pipes are the bottleneck, and a short instruction (a dot product, unpacking) loses its
// turn behind a long one (a multiply-add), so these come in long runs of a kind; the load pipes are idle, so what can
// be loaded again is not copied between registers.

INLINE vfloat vload_anew(const void* p) {
    vfloat v;
    asm volatile("ldr %q0, %1" : "=w"(v) : "m"(*static_cast<const char(*)[16]>(p)));
    return v;
}

INLINE vbytes load_bytes(const void* p) { return vreinterpretq_s8_f32(vload_anew(p)); }

INLINE vbytes low_nibbles(vbytes v) {
    asm volatile("and %0.16b, %0.16b, %1.16b" : "+w"(v) : "w"(vdupq_n_s8(15)));
    return v;
}

INLINE vbytes high_nibbles(vbytes v) {
    asm volatile("ushr %0.16b, %0.16b, #4" : "+w"(v));
    return v;
}

INLINE vbytes look_up(vbytes table, vbytes codes) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(codes)); }
INLINE vbytes load_table(const int8_t* table) { return vld1q_s8(table); }
INLINE vfloat vmultiply(vfloat a, vfloat b) { return vmulq_f32(a, b); }
INLINE vfloat byte_floats(vbytes v, uint32_t k) {
    constexpr int32_t ONE = 1, TWO = 1 << 8, THREE = 1 << 16, FOUR = 1 << 24;  // a 1 in that byte
    alignas(16) static const int32_t CHOOSE[4][4] = {
        {ONE, ONE, ONE, ONE}, {TWO, TWO, TWO, TWO}, {THREE, THREE, THREE, THREE}, {FOUR, FOUR, FOUR, FOUR}};
    const int32x4_t biased = vdotq_s32(vld1q_s32(BIAS), v, vreinterpretq_s8_s32(vld1q_s32(CHOOSE[k])));
    return vsubq_f32(vreinterpretq_f32_s32(biased), vdupq_n_f32(BIAS_VALUE));
}

INLINE vfloat vfma(vfloat a, vfloat b, vfloat c) {
    asm volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(c) : "w"(a), "w"(b));
    return c;
}

template <int ROWS, int STRIDE>
INLINE void add_scaled(vfloat* sums, const vfloat* a, const float* factors) {
    unroll<ROWS>(EACH(r) {
        constexpr int LANE = r % 4;
        const vfloat four = vload(factors + r - LANE);
        asm volatile("fmla %0.4s, %1.4s, %2.s[%c3]" : "+w"(sums[r]) : "w"(a[STRIDE * r]), "w"(four), "i"(LANE));
    });
}

// The products of COUNT vectors of weights with ROWS rows, from 'x' on: a part of a group.
template <int ROWS, int COUNT>
INLINE void dot_part(const vbytes* w, const int8_t* x, vfloat* biased) {
    unroll<ROWS>(EACH(r) { biased[r] = vload_anew(BIAS); });
    unroll<COUNT / 4>(EACH(i) {
        vbytes x16[ROWS];
        unroll<ROWS>(EACH(r) { x16[r] = load_bytes(x + r * GROUP + 16 * i); });
        unroll<4>(EACH(j) {
            unroll<ROWS>(EACH(r) {
                asm volatile("sdot %0.4s, %1.16b, %2.4b[%c3]"
                             : "+w"(biased[r])
                             : "w"(w[4 * i + j]), "w"(x16[r]), "i"(int(j)));
            });
        });
    });
}

// Product by product over all rows, so that no sum waits for itself, with the weights unpacked a little ahead.
template <class Strip, int ROWS>
INLINE void dot_group(const Strip& strip, int64_t g, const int8_t* x, vfloat* biased) {
    constexpr int AHEAD = ROWS <= 4 ? 3 : 2;  // as far as the registers reach
    vbytes w[8], half[ROWS];
    unroll<AHEAD>(EACH(j) { w[j] = strip.template weight<j>(g); });
    unroll<ROWS>(EACH(r) { biased[r] = vload_anew(BIAS); });
    unroll<8>(EACH(j) {
        constexpr int QUAD = j % 4;
        if constexpr (QUAD == 0) unroll<ROWS>(EACH(r) { half[r] = load_bytes(x + r * GROUP + 4 * j); });
        unroll<ROWS>(EACH(r) {
            asm volatile("sdot %0.4s, %1.16b, %2.4b[%c3]" : "+w"(biased[r]) : "w"(w[j]), "w"(half[r]), "i"(QUAD));
        });
        if constexpr (j + AHEAD < 8) w[j + AHEAD] = strip.template weight<j + AHEAD>(g);
    });
}

#elif SPARKDRAFT_AVX2

#if SPARKDRAFT_AVX512
#define VECTOR(operation) _mm512_##operation
#define WHOLE(operation) _mm512_##operation##_si512
typedef __m512 vfloat;
typedef __m512i vbytes;
#else
#define VECTOR(operation) _mm256_##operation
#define WHOLE(operation) _mm256_##operation##_si256
typedef __m256 vfloat;
typedef __m256i vbytes;
#endif
constexpr int LANES = sizeof(vfloat) / sizeof(float), PAIR_ROWS = 0;

INLINE vfloat vload(const float* p) { return VECTOR(loadu_ps)(p); }
INLINE void vstore(float* p, vfloat v) { VECTOR(storeu_ps)(p, v); }
INLINE vfloat vzero() { return VECTOR(setzero_ps)(); }
INLINE vfloat vsplat(float x) { return VECTOR(set1_ps)(x); }
INLINE vfloat vadd(vfloat a, vfloat b) { return VECTOR(add_ps)(a, b); }
INLINE vfloat vmultiply(vfloat a, vfloat b) { return VECTOR(mul_ps)(a, b); }
INLINE vfloat vscale(vfloat a, float b) { return VECTOR(mul_ps)(a, VECTOR(set1_ps)(b)); }
INLINE vfloat vfma(vfloat a, vfloat b, vfloat c) { return VECTOR(fmadd_ps)(a, b, c); }
INLINE vfloat vfma(vfloat a, float b, vfloat c) { return VECTOR(fmadd_ps)(a, VECTOR(set1_ps)(b), c); }
INLINE vbytes load_bytes(const void* p) { return WHOLE(loadu)((const vbytes*)p); }
INLINE void store_bytes(void* p, vbytes v) { WHOLE(storeu)((vbytes*)p, v); }
INLINE vfloat byte_floats(vbytes v, uint32_t k) {
    return VECTOR(cvtepi32_ps)(VECTOR(srai_epi32)(VECTOR(sll_epi32)(v, _mm_cvtsi32_si128(24 - 8 * int(k))), 24));
}
INLINE vbytes look_up(vbytes table, vbytes codes) { return VECTOR(shuffle_epi8)(table, codes); }
INLINE vbytes low_nibbles(vbytes v) { return WHOLE(and)(v, VECTOR(set1_epi8)(15)); }
INLINE vbytes high_nibbles(vbytes v) { return low_nibbles(VECTOR(srli_epi16)(v, 4)); }
INLINE vbytes splat_integer(int32_t n) { return VECTOR(set1_epi32)(n); }
INLINE vbytes sizes_of(vbytes v) { return VECTOR(abs_epi8)(v); }
INLINE vbytes multiply_pairs(vbytes w, vbytes x) { return VECTOR(maddubs_epi16)(w, x); }
INLINE vbytes add_pairs(vbytes a, vbytes b) { return VECTOR(add_epi16)(a, b); }
INLINE vbytes add_integers(vbytes a, vbytes b) { return VECTOR(add_epi32)(a, b); }
INLINE vbytes widen_pairs(vbytes pairs) { return VECTOR(madd_epi16)(pairs, VECTOR(set1_epi16)(1)); }

#if SPARKDRAFT_AVX512
INLINE vfloat load_halves(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE vbytes load_table(const int8_t* table) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)); }
INLINE vbytes with_signs_of(vbytes w, vbytes x) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
}
INLINE vfloat as_floats(vbytes v) { return _mm512_castsi512_ps(v); }
INLINE vfloat add_halves(vfloat a, vfloat b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
INLINE f32x4 sum_lanes(vfloat a, vfloat b, vfloat c, vfloat d) {
    vfloat v = add_halves(add_halves(a, b), add_halves(c, d));  // four lanes of each
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
    const __m512i firsts = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    return (f32x4)_mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, v));
}
#if SPARKDRAFT_VNNI
INLINE vbytes add_quads(vbytes w, vbytes x, vbytes sum) { return _mm512_dpbusd_epi32(sum, w, x); }
#endif
#else
INLINE vfloat load_halves(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE vbytes load_table(const int8_t* table) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
}
INLINE vbytes with_signs_of(vbytes w, vbytes x) { return _mm256_sign_epi8(x, w); }
INLINE vfloat as_floats(vbytes v) { return _mm256_castsi256_ps(v); }
INLINE f32x4 sum_lanes(vfloat a, vfloat b, vfloat c, vfloat d) {
    const vfloat v = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return (f32x4)_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}
#if SPARKDRAFT_VNNI
INLINE vbytes add_quads(vbytes w, vbytes x, vbytes sum) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#endif
#endif

#else

constexpr int LANES = 4, PAIR_ROWS = 0;
struct vfloat {
    float lane[LANES];
};
struct vbytes {
    int8_t byte[4 * LANES];
};

template <class F>
INLINE vfloat each_lane(F f) {
    vfloat r;
    for (int i = 0; i < LANES; ++i) r.lane[i] = f(i);
    return r;
}

INLINE vfloat vload(const float* p) { return each_lane([&](int i) { return p[i]; }); }
INLINE void vstore(float* p, vfloat v) { std::memcpy(p, v.lane, sizeof v); }
INLINE vfloat vzero() { return vfloat{}; }
INLINE vfloat vsplat(float x) { return each_lane([&](int) { return x; }); }
INLINE vfloat vadd(vfloat a, vfloat b) { return each_lane([&](int i) { return a.lane[i] + b.lane[i]; }); }
INLINE vfloat vscale(vfloat a, float b) { return each_lane([&](int i) { return a.lane[i] * b; }); }
INLINE vfloat vfma(vfloat a, vfloat b, vfloat c) {
    return each_lane([&](int i) { return multiply_add(a.lane[i], b.lane[i], c.lane[i]); });
}
INLINE vfloat vfma(vfloat a, float b, vfloat c) {
    return each_lane([&](int i) { return multiply_add(a.lane[i], b, c.lane[i]); });
}
INLINE vfloat load_halves(const uint16_t* p) { return each_lane([&](int i) { return half_to_float(p[i]); }); }

INLINE vbytes load_bytes(const void* p) {
    vbytes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store_bytes(void* p, vbytes v) { std::memcpy(p, &v, sizeof v); }

INLINE vfloat vmultiply(vfloat a, vfloat b) { return each_lane([&](int i) { return a.lane[i] * b.lane[i]; }); }
INLINE vfloat byte_floats(vbytes v, uint32_t k) { return each_lane([&](int i) { return float(v.byte[4 * i + k]); }); }

INLINE vbytes load_table(const int8_t* table) {
    vbytes v;
    std::memcpy(&v, table, 16);
    return v;
}

INLINE vbytes look_up(vbytes table, vbytes codes) {
    for (auto& b : codes.byte) b = table.byte[b];
    return codes;
}

INLINE vbytes low_nibbles(vbytes v) {
    for (auto& b : v.byte) b = int8_t(b & 15);
    return v;
}
INLINE vbytes high_nibbles(vbytes v) {
    for (auto& b : v.byte) b = int8_t(uint8_t(b) >> 4);
    return v;
}

template <bool SMALL, int COUNT = 8>
INLINE vfloat group_dot(const vbytes w[COUNT], const int8_t* x) {
    int32_t sum[LANES] = {};
    for (int j = 0; j < COUNT; ++j) {
        for (int i = 0; i < LANES; ++i) {
            for (int k = 0; k < 4; ++k) sum[i] += int32_t(w[j].byte[4 * i + k]) * x[4 * j + k];
        }
    }
    return each_lane([&](int i) { return BIAS_VALUE + float(sum[i]); });
}

#endif

#if !SPARKDRAFT_NEON
INLINE vfloat vload_anew(const float* p) { return vload(p); }

template <int ROWS, int STRIDE>
INLINE void add_scaled(vfloat* sums, const vfloat* a, const float* factors) {
    unroll<ROWS>(EACH(r) { sums[r] = vfma(a[STRIDE * r], factors[r], sums[r]); });
}
#endif

#if SPARKDRAFT_AVX2
// The products of COUNT vectors of weights with ROWS rows, vector by vector over all rows. Instructions multiply sizes
// of weights by x, which takes over their signs. Where none adds four products to a sum, some are added in 16 bits
// first: two of at most 128 * 127, or of small weights all 16 of at most 15 * 127.
template <bool SMALL, int ROWS, int COUNT>
INLINE void dot_rows(const vbytes* w, const int8_t* x, vfloat* biased) {
    constexpr bool PAIRS = SMALL && !SPARKDRAFT_VNNI;
    const vbytes bias = splat_integer(0x4b400000);
    vbytes sums[ROWS];
    unroll<ROWS>(EACH(r) { sums[r] = PAIRS ? splat_integer(0) : bias; });
    unroll<COUNT>(EACH(j) {
        const vbytes sizes = SMALL ? w[j] : sizes_of(w[j]);
        unroll<ROWS>(EACH(r) {
            int32_t four;
            std::memcpy(&four, x + r * GROUP + 4 * j, 4);
            const vbytes quad = SMALL ? splat_integer(four) : with_signs_of(w[j], splat_integer(four));
#if SPARKDRAFT_VNNI
            sums[r] = add_quads(sizes, quad, sums[r]);
#else
            const vbytes pairs = multiply_pairs(sizes, quad);
            sums[r] = PAIRS ? add_pairs(sums[r], pairs) : add_integers(sums[r], widen_pairs(pairs));
#endif
        });
    });
    unroll<ROWS>(EACH(r) { biased[r] = as_floats(PAIRS ? add_integers(bias, widen_pairs(sums[r])) : sums[r]); });
}

// The 32 registers of AVX-512 hold the sums of all rows; the 16 of AVX2 the weights, and row after row meets them.
template <bool SMALL, int ROWS, int COUNT>
INLINE void dot_tile(const vbytes* w, const int8_t* x, vfloat* biased) {
    constexpr int STEP = SPARKDRAFT_AVX512 ? ROWS : 1;
    unroll<ROWS / STEP>(EACH(i) { dot_rows<SMALL, STEP, COUNT>(w, x + STEP * i * GROUP, biased + STEP * i); });
}

template <int ROWS, int COUNT>
INLINE void dot_part(const vbytes* w, const int8_t* x, vfloat* biased) {
    dot_tile<false, ROWS, COUNT>(w, x, biased);
}

template <class Strip, int ROWS>
INLINE void dot_group(const Strip& strip, int64_t g, const int8_t* x, vfloat* biased) {
    vbytes w[8];
    unroll<8>(EACH(j) { w[j] = strip.template weight<j>(g); });
    dot_tile<Strip::SMALL, ROWS, 8>(w, x, biased);
}
#elif !SPARKDRAFT_NEON
template <int ROWS, int COUNT>
INLINE void dot_part(const vbytes* w, const int8_t* x, vfloat* biased) {
    unroll<ROWS>(EACH(r) { biased[r] = group_dot<false, COUNT>(w, x + r * GROUP); });
}

template <class Strip, int ROWS>
INLINE void dot_group(const Strip& strip, int64_t g, const int8_t* x, vfloat* biased) {
    vbytes w[8];
    unroll<8>(EACH(j) { w[j] = strip.template weight<j>(g); });
    unroll<ROWS>(EACH(r) { biased[r] = group_dot<Strip::SMALL>(w, x + r * GROUP); });
}
#endif
