// A mixture of experts: which experts each row is sent to, and the weighted sum of what they make of it.
// Rows are gathered by expert, so that an expert's weights are read once however many rows chose it, and all strips of
// all chosen experts are shared out to threads together: one row of eight experts keeps as many threads busy as one
// large matrix. A chosen expert's result for a row has the bits of that row alone (matmul.cpp), and a row sums its
// experts in the order of its own choice, so company and threads change nothing.

#include <algorithm>
#include <vector>

#include "activation.h"
#include "matmul.h"
#include "pool.h"

namespace {

constexpr int64_t MOST_ROWS = 512;  // at once: more take more memory, and read no weight less often to speak of

struct Call {  // mirrored in experts.py
    const float* x;  // [rows, width], normed
    int64_t x_stride, rows;
    const int32_t* ids;    // [rows, top_k]; negative: none
    const float* weights;  // [rows, top_k]
    int64_t top_k, experts;
    const Matrix* gate_up;  // one per expert, as 'down'
    const Matrix* down;
    int64_t activation;
    float limit;
    float* out;  // [rows, width]
    int64_t out_stride;
    bool add;  // to what is there
};

struct Chosen {  // an expert and the rows that chose it, which are pairs first .. first + rows of the sorted ones
    int64_t expert, first, rows;
    int64_t place[2];  // of its prepared rows: before gate_up, and before down
    int64_t cost;      // of all strips of the experts before it
};

struct Scratch {
    std::vector<Chosen> chosen;
    std::vector<int64_t> count, row_of, pair_of;  // by expert; the row of a sorted pair; the sorted pair of a row's choice
    std::vector<int64_t> chosen_of;               // the index in 'chosen' of a sorted pair
    std::vector<uint8_t> prepared;
    std::vector<float> gate_up, down;  // [pairs, 2 * inter], [pairs, width]
};

template <class T>
T* room(std::vector<T>& v, int64_t size) {
    if (v.size() < size_t(size)) v.resize(size_t(size));
    return v.data();
}

// Sorts the pairs of (row, choice) by expert; within an expert they keep their order. Returns how many have an expert.
int64_t gather(const Call& c, Scratch& s) {
    const int64_t pairs = c.rows * c.top_k;
    s.count.assign(size_t(c.experts), 0);
    for (int64_t p = 0; p < pairs; ++p)
        if (c.ids[p] >= 0) ++s.count[size_t(c.ids[p])];
    s.chosen.clear();
    int64_t first = 0, bytes[2] = {0, 0};
    for (int64_t e = 0; e < c.experts; ++e) {
        const int64_t rows = s.count[size_t(e)];
        if (rows) s.chosen.push_back({e, first, rows, {bytes[0], bytes[1]}, 0});
        s.count[size_t(e)] = first;
        if (rows) bytes[0] += prepared_bytes(c.gate_up[e], rows), bytes[1] += prepared_bytes(c.down[e], rows);
        first += rows;
    }
    int64_t *row_of = room(s.row_of, pairs), *pair_of = room(s.pair_of, pairs), *of = room(s.chosen_of, pairs);
    for (int64_t p = 0; p < pairs; ++p) {
        pair_of[p] = -1;
        if (c.ids[p] < 0) continue;
        const int64_t sorted = s.count[size_t(c.ids[p])]++;
        row_of[sorted] = p / c.top_k, pair_of[p] = sorted;
    }
    for (size_t i = 0; i < s.chosen.size(); ++i) std::fill_n(of + s.chosen[i].first, s.chosen[i].rows, int64_t(i));
    room(s.prepared, std::max(bytes[0], bytes[1]));
    return first;
}

// One projection of all chosen experts: prepared rows to 'y' [pairs, out].
void project(const Matrix* matrices, int stage, Scratch& s, float* y, int64_t y_stride) {
    int64_t total = 0;
    double work = 0;
    for (Chosen& chosen : s.chosen) {
        const Matrix& m = matrices[chosen.expert];
        chosen.cost = total;
        total += m.strips() * (4 + chosen.rows);  // reading a strip costs about as much as four rows of products
        work += double(chosen.rows * m.width) * double(m.out_features) / 8;
    }
    const uint8_t* prepared = s.prepared.data();
    pool::parallel_ranges(total, work, 4, [&](int64_t begin, int64_t end) {
        const auto after = [](int64_t cost, const Chosen& chosen) { return cost < chosen.cost; };
        auto chosen = std::upper_bound(s.chosen.begin(), s.chosen.end(), begin, after) - 1;
        for (; chosen != s.chosen.end() && chosen->cost < end; ++chosen) {
            const Matrix& m = matrices[chosen->expert];
            const int64_t each = 4 + chosen->rows;
            const auto strip = [&](int64_t cost) {
                return std::min(m.strips(), (std::max<int64_t>(cost - chosen->cost, 0) + each - 1) / each);
            };
            const Output out{y + chosen->first * y_stride, y_stride, false};
            multiply(m, prepared + chosen->place[stage], chosen->rows, out, strip(begin), strip(end));
        }
    });
}

// Puts each pair's row into its place before a projection; row_of(pair) is the row.
template <class Row>
void prepare(const Matrix* matrices, int stage, Scratch& s, int64_t pairs, double work, const Row& row_of) {
    uint8_t* prepared = s.prepared.data();
    pool::parallel_ranges(pairs, work, 2, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            const Chosen& chosen = s.chosen[size_t(s.chosen_of[size_t(p)])];
            const Matrix& m = matrices[chosen.expert];
            prepare_row(m, row_of(p), p - chosen.first, chosen.rows, prepared + chosen.place[stage]);
        }
    });
}

// out = the sum over a row's choices, in their order.
void weigh(const Call& c, const Scratch& s, int64_t width) {
    const int64_t piece = 512, pieces = (width + piece - 1) / piece;
    const double work = double(c.rows * c.top_k * width);
    pool::parallel_ranges(c.rows * pieces, work, 2, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            const int64_t r = p / pieces, first = p % pieces * piece, n = std::min(width - first, piece);
            float total[piece] = {};
            for (int64_t k = 0; k < c.top_k; ++k) {
                if (s.pair_of[size_t(r * c.top_k + k)] < 0) continue;
                const float* part = s.down.data() + s.pair_of[size_t(r * c.top_k + k)] * width + first;
                const float weight = c.weights[r * c.top_k + k];
                for (int64_t i = 0; i < n; ++i) total[i] = multiply_add(weight, part[i], total[i]);
            }
            float* out = c.out + r * c.out_stride + first;
            for (int64_t i = 0; i < n; ++i) out[i] = c.add ? out[i] + total[i] : total[i];
        }
    });
}

void run(const Call& c) {
    thread_local Scratch scratch;  // of the caller; workers get its address
    Scratch& s = scratch;
    const int64_t width = c.down->out_features, inter = c.down->width, pairs = gather(c, s);
    if (!pairs) return weigh(c, s, width);
    float *gate_up = room(s.gate_up, pairs * 2 * inter), *down = room(s.down, pairs * width);
    prepare(c.gate_up, 0, s, pairs, 4 * double(pairs * width), [&](int64_t p) {
        return c.x + s.row_of[size_t(p)] * c.x_stride;
    });
    project(c.gate_up, 0, s, gate_up, 2 * inter);
    prepare(c.down, 1, s, pairs, 8 * double(pairs * inter), [&](int64_t p) {
        float* gate = gate_up + p * 2 * inter;
        gated_row(c.activation, gate, gate + inter, gate, inter, c.limit);
        return gate;
    });
    project(c.down, 1, s, down, width);
    weigh(c, s, width);
}

// Whether a logit comes before one of a lower number: equal ones do not, and what is not a number comes first of all.
INLINE bool larger(float a, float b) { return a > b || (a != a && b == b); }

void route_row(const float* logits, int64_t experts, int64_t top_k, bool renormalise, const float* scale, int32_t* ids,
               float* weights) {
    for (int64_t e = 0; e < experts; ++e) {
        int64_t at = std::min(e, top_k);  // of those found so far, the largest first
        if (at == top_k && !larger(logits[e], logits[ids[top_k - 1]])) continue;
        if (at == top_k) --at;
        for (; at > 0 && larger(logits[e], logits[ids[at - 1]]); --at) ids[at] = ids[at - 1];
        ids[at] = int32_t(e);
    }
    const float most = logits[ids[0]];
    float total = 0;
    for (int64_t k = 0; k < top_k; ++k) total += weights[k] = exp4(splat4(logits[ids[k]] - most))[0];
    if (!renormalise) {
        f32x4 sums = {};
        int64_t e = 0;
        for (; e + 4 <= experts; e += 4) sums += exp4(load4(logits + e) - splat4(most));
        total = sum_lanes(sums);
        for (; e < experts; ++e) total += exp4(splat4(logits[e] - most))[0];
    }
    for (int64_t k = 0; k < top_k; ++k) weights[k] = weights[k] / total * (scale ? scale[ids[k]] : 1.0f);
}

}  // namespace

extern "C" {

// The top_k largest logits of each row, of equal ones the lower number first, and their weights: shares among the chosen
// ('renormalise') or among all, times the expert's scale, which may be null.
void sd_route(const float* logits, int64_t rows, int64_t experts, int64_t top_k, int64_t renormalise,
              const float* scale, int32_t* ids, float* weights) {
    pool::parallel_ranges(rows, double(rows * experts * 4), 2, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            route_row(logits + r * experts, experts, top_k, renormalise != 0, scale, ids + r * top_k,
                      weights + r * top_k);
        }
    });
}

void sd_experts(const void* call) {
    const Call& all = *static_cast<const Call*>(call);
    for (int64_t first = 0; first < all.rows; first += MOST_ROWS) {
        Call some = all;
        some.rows = std::min(all.rows - first, MOST_ROWS);
        some.x += first * all.x_stride, some.out += first * all.out_stride;
        some.ids += first * all.top_k, some.weights += first * all.top_k;
        run(some);
    }
}

}  // extern "C"
