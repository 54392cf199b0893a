// Recurrent layers: kernels/reference/recurrent.py for CPUs, which says what a layer keeps and why nothing is ever undone.
// A task is a sequence's value head, or some of its channels. It takes the rows one after the other, always by the
// recurrence and always by the same functions, so a row's bits depend neither on how rows are cut into steps nor on the
// threads. Of a state S [key_dim, value_dim] it holds a strip of columns at a time, small enough for the first cache:
// columns of S do not know each other. Replayed and run rows change S by the one function `update`.
//
// Tasks run side by side. Heads that share a key head share its ring of keys, which is long enough that nobody writes
// to a position that another may still replay (record_ring in kernels/ops.py).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define SPARKDRAFT_8_LANES 1  // dimensions are multiples of 8
#include "activation.h"
#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t MOST_KEY_DIM = 256, MOST_WIDTH = 8;  // checked in recurrent.py
constexpr int VECTORS = 32 / LANES;                    // of a strip
constexpr int64_t CHANNELS = 64;                       // of a task of the convolution

// Both are mirrored in recurrent.py. Strides in elements.
struct Conv {
    const float* x;
    int64_t x_row;
    const float* weight;
    float* inputs;
    const int32_t *slots, *query_start, *context_len;
    int64_t seqs, channels, width, ring;
    float* out;
};

struct Rule {
    const float* qkv;
    int64_t qkv_row;
    const float* decay_beta;
    int64_t decay_beta_row;
    float* state;
    int32_t* base;
    float *keys, *updates, *decays;
    const int32_t *slots, *query_start, *context_len;
    int64_t seqs, ring, most_rows, fold, key_heads, value_heads, key_dim, value_dim;
    const float *rate, *bias;
    float eps;
    float* out;
};

// In four interleaved vectors, then their lanes: a fixed order for a given length.
INLINE float dot(const float* a, const float* b, int64_t n) {
    f32x4 sums[4] = {};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        unroll<4>(EACH(j) { sums[j] = multiply_add(load4(a + i + 4 * j), load4(b + i + 4 * j), sums[j]); });
    }
    float total = sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; ++i) total = multiply_add(a[i], b[i], total);
    return total;
}

// ---- The convolution ----------------------------------------------------------------------------------------------

// One row, 'n' channels: taps[j] is where the input that meets weights[j] lies.
INLINE void convolve(const float* const* taps, const float (*weights)[CHANNELS], int64_t width, float* out, int64_t n) {
    for (int64_t c = 0; c < n; c += 4) {
        f32x4 total = splat4(0.0f);
        for (int64_t j = 0; j < width; ++j) total = multiply_add(load4(weights[j] + c), load4(taps[j] + c), total);
        store4(out + c, times_sigmoid(total, total));
    }
}

// All rows of a sequence, for the channels from 'from' on.
void convolve_sequence(const Conv& call, int64_t s, int64_t from, int64_t n) {
    static const float zeros[CHANNELS] = {};
    const int64_t begin = call.query_start[s], count = call.query_start[s + 1] - begin;
    const int64_t first = call.context_len[s] - count, slot = call.slots[s];
    if (slot < 0) {  // rows of nobody
        for (int64_t i = 0; i < count; ++i) {
            std::memset(call.out + (begin + i) * call.channels + from, 0, size_t(n) * sizeof(float));
        }
        return;
    }
    float weights[MOST_WIDTH][CHANNELS];
    for (int64_t c = 0; c < n; ++c) {
        for (int64_t j = 0; j < call.width; ++j) weights[j][c] = call.weight[(from + c) * call.width + j];
    }
    float* inputs = call.inputs + slot * call.ring * call.channels + from;
    for (int64_t i = 0; i < count; ++i) {
        const float* taps[MOST_WIDTH];
        for (int64_t j = 0; j < call.width; ++j) {
            const int64_t row = i + j - (call.width - 1), position = first + row;  // negative rows: before the step
            if (row >= 0) {
                taps[j] = call.x + (begin + row) * call.x_row + from;
            } else {
                taps[j] = position < 0 ? zeros : inputs + position % call.ring * call.channels;
            }
        }
        convolve(taps, weights, call.width, call.out + (begin + i) * call.channels + from, n);
    }
    for (int64_t i = std::max<int64_t>(0, count - call.ring); i < count; ++i) {
        std::memcpy(inputs + (first + i) % call.ring * call.channels, call.x + (begin + i) * call.x_row + from,
                    size_t(n) * sizeof(float));
    }
}

// ---- The rule -----------------------------------------------------------------------------------------------------

// What one row is to one head. Queries are unit vectors, scaled; keys are unit vectors.
struct Row {
    float decay, beta, query_key;  // query_key: their product
    float key[MOST_KEY_DIM], query[MOST_KEY_DIM];
};

INLINE void unit(const float* x, float* y, int64_t n, float eps, float factor) {
    const float scale = factor / std::sqrt(dot(x, x, n) + eps);
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] * scale;
}

INLINE float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

void read_row(const Rule& call, int64_t row, int64_t head, Row* to) {
    const int64_t dim = call.key_dim, key_head = head / (call.value_heads / call.key_heads);
    const float* q = call.qkv + row * call.qkv_row + key_head * dim;
    unit(q, to->query, dim, call.eps, 1.0f / std::sqrt(float(dim)));
    unit(q + call.key_heads * dim, to->key, dim, call.eps, 1.0f);
    to->query_key = dot(to->query, to->key, dim);
    const float* ab = call.decay_beta + row * call.decay_beta_row + head;
    to->decay = std::exp(call.rate[head] * softplus(ab[0] + call.bias[head]));
    to->beta = 1.0f / (1.0f + std::exp(-ab[call.value_heads]));
}

// S = decay * S + key update^T. The only way in which a strip changes.
template <int N>
INLINE void update(float* strip, const float* key, float decay, const vfloat* u, int64_t dim) {
    for (int64_t i = 0; i < dim; ++i, strip += N * LANES) {
        const vfloat k = vsplat(key[i]);
        vfloat s[N];
        unroll<N>(EACH(j) { s[j] = vscale(vload(strip + j * LANES), decay); });
        unroll<N>(EACH(j) { s[j] = vfma(k, u[j], s[j]); });
        unroll<N>(EACH(j) { vstore(strip + j * LANES, s[j]); });
    }
}

// A row's o and its u, then its change of S. Both products are of S before the row:
// u = beta (v - decay k^T S), o = decay q^T S + (q^T k) u.
template <int N>
INLINE void run_row(float* strip, const Row& row, const float* value, float* record, float* out, int64_t dim) {
    vfloat by_key[N], by_query[N], u[N];
    unroll<N>(EACH(j) { by_key[j] = by_query[j] = vzero(); });
    const float* from = strip;
    for (int64_t i = 0; i < dim; ++i, from += N * LANES) {
        const vfloat k = vsplat(row.key[i]), q = vsplat(row.query[i]);
        vfloat s[N];
        unroll<N>(EACH(j) { s[j] = vload(from + j * LANES); });
        unroll<N>(EACH(j) { by_key[j] = vfma(k, s[j], by_key[j]); });
        unroll<N>(EACH(j) { by_query[j] = vfma(q, s[j], by_query[j]); });
    }
    unroll<N>(EACH(j) {
        u[j] = vscale(vfma(by_key[j], vsplat(-row.decay), vload(value + j * LANES)), row.beta);
        vstore(out + j * LANES, vfma(u[j], vsplat(row.query_key), vscale(by_query[j], row.decay)));
        if (record) vstore(record + j * LANES, u[j]);
    });
    update<N>(strip, row.key, row.decay, u, dim);
}

// Some columns of one head's state, in memory and in hand.
template <int N>
struct Strip {
    static constexpr int64_t WIDTH = N * LANES;
    float *memory, *hand;
    int64_t rows, stride;

    void load(bool zeros) {
        for (int64_t i = 0; i < rows; ++i) {
            if (zeros) std::memset(hand + i * WIDTH, 0, WIDTH * sizeof(float));
            else std::memcpy(hand + i * WIDTH, memory + i * stride, WIDTH * sizeof(float));
        }
    }
    void store() {
        for (int64_t i = 0; i < rows; ++i) std::memcpy(memory + i * stride, hand + i * WIDTH, WIDTH * sizeof(float));
    }
};

// Where a head's records lie, and the rows of its step.
struct Head {
    const Rule& call;
    int64_t head, key_head, slot, begin, count, first, base, fold;

    int64_t place(int64_t position) const { return slot * call.ring + position % call.ring; }
    float* key(int64_t position) const {
        return call.keys + (place(position) * call.key_heads + key_head) * call.key_dim;
    }
    float* updates(int64_t position, int64_t column) const {
        return call.updates + (place(position) * call.value_heads + head) * call.value_dim + column;
    }
    float* decay(int64_t position) const { return call.decays + place(position) * call.value_heads + head; }
};

template <int N>
INLINE void replay(float* hand, const float* key, float decay, const float* record, int64_t dim) {
    vfloat u[N];
    unroll<N>(EACH(j) { u[j] = vload(record + j * LANES); });
    update<N>(hand, key, decay, u, dim);
}

template <int N>
void run_strip(const Head& at, int64_t column) {
    const Rule& call = at.call;
    const int64_t dim = call.key_dim;
    const bool recorded = at.count <= call.most_rows, writes_key = at.head % (call.value_heads / call.key_heads) == 0;
    alignas(64) float hand[MOST_KEY_DIM * N * LANES];
    float* memory = call.state + (at.slot * call.value_heads + at.head) * dim * call.value_dim + column;
    Strip<N> strip{memory, hand, dim, call.value_dim};
    strip.load(at.first == 0);
    for (int64_t position = at.base; position < at.first; ++position) {
        if (position == at.fold && at.fold > at.base) strip.store();
        replay<N>(hand, at.key(position), *at.decay(position), at.updates(position, column), dim);
    }
    if (at.fold == at.first) strip.store();
    Row row;
    for (int64_t i = 0; i < at.count; ++i) {
        const int64_t position = at.first + i, r = at.begin + i;
        read_row(call, r, at.head, &row);
        const int64_t past_keys = 2 * call.key_heads * dim, own = at.head * call.value_dim + column;
        run_row<N>(hand, row, call.qkv + r * call.qkv_row + past_keys + own,
                   recorded ? at.updates(position, column) : nullptr,
                   call.out + r * call.value_heads * call.value_dim + own, dim);
        if (recorded && column == 0) {
            *at.decay(position) = row.decay;
            if (writes_key) std::memcpy(at.key(position), row.key, size_t(dim) * sizeof(float));
        }
    }
    if (!recorded) strip.store();
}

void run_head(const Rule& call, int64_t s, int64_t head) {
    const int64_t begin = call.query_start[s], count = call.query_start[s + 1] - begin, slot = call.slots[s];
    if (count == 0) return;
    if (slot < 0) {  // rows of nobody
        for (int64_t i = 0; i < count; ++i) {
            float* out = call.out + ((begin + i) * call.value_heads + head) * call.value_dim;
            std::memset(out, 0, size_t(call.value_dim) * sizeof(float));
        }
        return;
    }
    const int64_t first = call.context_len[s] - count;
    int32_t* kept = call.base + slot * call.value_heads + head;
    const int64_t base = first == 0 ? 0 : *kept, fold = std::max(base, first / call.fold * call.fold);
    const Head at{call, head, head / (call.value_heads / call.key_heads), slot, begin, count, first, base, fold};
    int64_t column = 0;
    for (; column + VECTORS * LANES <= call.value_dim; column += VECTORS * LANES) run_strip<VECTORS>(at, column);
    for (; column < call.value_dim; column += LANES) run_strip<1>(at, column);
    *kept = int32_t(count > call.most_rows ? first + count : fold);
}

}  // namespace

extern "C" {

void sd_find_states(const int32_t* slot_of, const int32_t* query_start, const int32_t* context_len,
                    const int32_t* tables, int32_t* out, int64_t seqs, int64_t max_blocks, int64_t block_size) {
    for (int64_t s = 0; s < seqs; ++s) {
        const int64_t rows = query_start[s + 1] - query_start[s], first = context_len[s] - rows;
        const int32_t block = rows > 0 && first >= 0 ? tables[s * max_blocks + first / block_size] : -1;
        out[s] = block < 0 ? -1 : slot_of[block];
    }
}

void sd_causal_conv(const Conv* call) {
    const int64_t pieces = (call->channels + CHANNELS - 1) / CHANNELS, rows = call->query_start[call->seqs];
    const double work = double(rows * call->channels * (call->width + 8));
    pool::parallel_ranges(call->seqs * pieces, work, 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t from = i % pieces * CHANNELS;
            convolve_sequence(*call, i / pieces, from, std::min(CHANNELS, call->channels - from));
        }
    });
}

void sd_delta_rule(const Rule* call) {
    pool::parallel_for(call->seqs * call->value_heads,
                       [&](long i) { run_head(*call, i / call->value_heads, i % call->value_heads); });
}

// Each head of 'o' divided by its RMS, times 'gain', times silu(gate). y is [rows, heads * dim], dense.
void sd_gated_norm(const float* o, int64_t o_row, const float* gate, int64_t gate_row, const float* gain, float* y,
                   int64_t rows, int64_t heads, int64_t dim, float eps) {
    pool::parallel_ranges(rows * heads, double(rows * heads * dim) * 8, 2, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t at = i % heads * dim;
            const float *x = o + i / heads * o_row + at, *z = gate + i / heads * gate_row + at;
            const f32x4 scale = splat4(1.0f / std::sqrt(dot(x, x, dim) / float(dim) + eps));
            for (int64_t c = 0; c < dim; c += 4) {
                const f32x4 g = load4(z + c);
                store4(y + i * dim + c, load4(x + c) * scale * load4(gain + c) * times_sigmoid(g, g));
            }
        }
    });
}

// x *= sigmoid(gate), in place; gate_step 0: one gate per row.
void sd_sigmoid_gate(float* x, int64_t x_row, const float* gate, int64_t gate_row, int64_t gate_step, int64_t rows,
                     int64_t width) {
    pool::parallel_ranges(rows, double(rows * width) * 8, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            float* to = x + i * x_row;
            const float* g = gate + i * gate_row;
            for (int64_t c = 0; c < width; c += 4) {
                const f32x4 by = gate_step ? load4(g + c) : splat4(*g);
                store4(to + c, times_sigmoid(load4(to + c), by));
            }
        }
    });
}

}  // extern "C"
