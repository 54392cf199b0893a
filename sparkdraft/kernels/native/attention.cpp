// Attention of ragged batches over the paged float cache: each row's heads against the keys that the row may see.
// Keys are taken in tiles of 64 by their absolute position with an online softmax, and the state starts anew every 1024
// keys ('span') and is merged span after span: a row's sums have the same order in a prompt chunk and in a decode step,
// and the spans of a single long row can still be given to several threads.
// All query heads that share a key head go together, so that a key and a value are loaded once for them.
//
//   unit of work:  (up to ROWS rows of a sequence) x (one key head) x (one span, or all spans where units abound)
//   queries of a unit:  row 0 head 0, row 0 head 1, .. row 1 head 0, ..  in groups of up to QUERIES in registers

#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t TILE = 64, SPAN = 1024, ROWS = 16;
constexpr int QUERIES = 4, KEYS = 4;

struct Call {  // strides in elements
    const float* q;
    int64_t q_row, q_head;
    const float *k_cache, *v_cache;
    const int32_t *query_start, *context_len, *block_tables;
    int64_t seqs, max_blocks, heads, kv_heads, head_dim, block_size;
    float scale;
    bool causal;
    int64_t window;
    float* out;  // [rows, heads * head_dim]

    int64_t group() const { return heads / kv_heads; }
    int64_t state() const { return head_dim + 2; }  // floats of a query's state: weighted values, maximum, total
};

struct Unit {
    int64_t seq, first, count;  // rows of the batch
    int64_t position;           // of the first row in its sequence
    int64_t kv_head;
    int64_t begin, end;     // keys that any of its rows sees
    int64_t span, partial;  // where 'split': the only span to compute, and the place of its states in the scratch
};

struct Range {
    int64_t begin, end;
};

Range keys_seen(const Call& c, int64_t position, int64_t context) {
    Range seen{0, c.causal ? std::min(position + 1, context) : context};
    if (c.window > 0) {
        seen.begin = std::max<int64_t>(0, position - c.window + 1);
        seen.end = std::min(seen.end, position + c.window);
    }
    return seen;
}

// ---- Two small matmuls --------------------------------------------------------------------------------------------

// scores[n][0 .. 3] = q[n] . k[0 .. 3] for N queries; each product is summed over the dimension in the same order
// always.
template <int N>
INLINE void score_keys(const float* const* q, const float* const* k, int64_t dim, float scale, float* scores) {
    f32x4 sums[N * KEYS];
    unroll<N * KEYS>(EACH(i) { sums[i] = splat4(0); });
    for (int64_t d = 0; d < dim; d += 4) {
        f32x4 key[KEYS];
        unroll<KEYS>(EACH(i) { key[i] = load4(k[i] + d); });
        unroll<N>(EACH(n) {
            const f32x4 query = load4(q[n] + d);
            unroll<KEYS>(EACH(i) { sums[n * KEYS + i] = multiply_add(query, key[i], sums[n * KEYS + i]); });
        });
    }
    unroll<N>(EACH(n) {
        const f32x4* s = sums + n * KEYS;
        store4(scores + n * TILE, sum_lanes(s[0], s[1], s[2], s[3]) * splat4(scale));
    });
}

// values[n][d ..] += sum over keys of weights[n][key] * v[key][d ..], for VECTORS * 4 dimensions of N queries.
template <int N, int VECTORS>
INLINE void mix_values(const float* weights, const float* const* v, int64_t keys, int64_t d, float* const* values) {
    f32x4 sums[N * VECTORS];
    unroll<N>(EACH(n) {
        unroll<VECTORS>(EACH(j) { sums[n * VECTORS + j] = load4(values[n] + d + 4 * j); });
    });
    for (int64_t key = 0; key < keys; ++key) {
        f32x4 value[VECTORS];
        unroll<VECTORS>(EACH(j) { value[j] = load4(v[key] + d + 4 * j); });
        unroll<N>(EACH(n) {
            const f32x4 weight = splat4(weights[n * TILE + key]);
            unroll<VECTORS>(EACH(j) {
                sums[n * VECTORS + j] = multiply_add(value[j], weight, sums[n * VECTORS + j]);
            });
        });
    }
    unroll<N>(EACH(n) {
        unroll<VECTORS>(EACH(j) { store4(values[n] + d + 4 * j, sums[n * VECTORS + j]); });
    });
}

// ---- Softmax ------------------------------------------------------------------------------------------------------

// Takes the scores of one tile into a query's state: scores become weights relative to the new maximum, and what was
// summed so far is scaled to it. Keys outside 'seen' get weight 0, which changes no sum.
void soften(float* scores, int64_t keys, Range seen, float* state, int64_t dim) {
    const int64_t begin = std::max<int64_t>(0, seen.begin), end = std::min(keys, seen.end);
    float &maximum = state[dim], &total = state[dim + 1];
    if (begin >= end) {
        std::fill(scores, scores + TILE, 0.0f);
        return;
    }
    std::fill(scores, scores + begin, -INFINITY);
    std::fill(scores + end, scores + TILE, -INFINITY);
    f32x4 most = splat4(maximum), sum = splat4(0);
    for (int64_t i = 0; i < TILE; i += 4) most = max4(most, load4(scores + i));
    const float highest = std::max(std::max(most[0], most[1]), std::max(most[2], most[3]));
    for (int64_t i = 0; i < TILE; i += 16) {  // four at a time: each is a long chain of dependent steps
        f32x4 weights[4];
        unroll<4>(EACH(j) { weights[j] = exp4(load4(scores + i + 4 * j) - splat4(highest)); });
        unroll<4>(EACH(j) { store4(scores + i + 4 * j, weights[j]); });
        sum = sum + ((weights[0] + weights[1]) + (weights[2] + weights[3]));
    }
    const float shrink = maximum == highest ? 1.0f : exp1(maximum - highest);
    total = multiply_add(total, shrink, sum_lanes(sum));
    maximum = highest;
    if (shrink == 1.0f) return;
    for (int64_t d = 0; d < dim; ++d) state[d] *= shrink;
}

void clear(float* state, int64_t dim) {
    std::fill(state, state + dim, 0.0f);
    state[dim] = -INFINITY, state[dim + 1] = 0;
}

// into := both states together, as if their keys had been one span's
void merge(float* into, const float* from, int64_t dim) {
    if (from[dim + 1] == 0) return;
    const float highest = std::max(into[dim], from[dim]);
    const float a = exp1(into[dim] - highest), b = exp1(from[dim] - highest);
    for (int64_t d = 0; d < dim; ++d) into[d] = multiply_add(into[d], a, from[d] * b);
    into[dim + 1] = multiply_add(into[dim + 1], a, from[dim + 1] * b);
    into[dim] = highest;
}

// ---- One unit -----------------------------------------------------------------------------------------------------

struct Tile {
    const float *k[TILE], *v[TILE];
    int64_t first, keys;  // position of its first key, and how many there are
};

void find_keys(const Call& c, const Unit& u, int64_t first, int64_t end, Tile& tile) {
    const int32_t* blocks = c.block_tables + u.seq * c.max_blocks;
    tile.first = first, tile.keys = std::max<int64_t>(0, std::min(TILE, end - first));
    int64_t i = 0, block = first / c.block_size, offset = first % c.block_size;
    while (i < tile.keys) {
        const int64_t row = (blocks[block] * c.kv_heads + u.kv_head) * c.block_size + offset;
        const float *k = c.k_cache + row * c.head_dim, *v = c.v_cache + row * c.head_dim;
        const int64_t stop = std::min(tile.keys, i + c.block_size - offset);
        for (; i < stop; ++i, k += c.head_dim, v += c.head_dim) tile.k[i] = k, tile.v[i] = v;
        ++block, offset = 0;
    }
    for (; i % KEYS; ++i) tile.k[i] = tile.k[i - 1];  // keys are taken KEYS at a time; these scores are not used
}

// Blocks lie anywhere in memory, so the core cannot guess what comes next: ask for the next tile's rows by name.
INLINE void prefetch_row(const float* row, int64_t dim) {
    for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d);
}

// N queries against one tile. The first queries of a unit fetch the 'next' tile while they compute on this one.
template <int N>
void attend_queries(const Call& c, const Unit& u, const Tile& tile, const Tile& next, int64_t first_query,
                    float* states) {
    const float* q[N];
    float* values[N];
    float scores[N * TILE];
    for (int n = 0; n < N; ++n) {
        const int64_t row = u.first + (first_query + n) / c.group();
        const int64_t head = u.kv_head * c.group() + (first_query + n) % c.group();
        q[n] = c.q + row * c.q_row + head * c.q_head;
        values[n] = states + (first_query + n) * c.state();
    }
    const int64_t fetched = first_query == 0 ? next.keys : 0;
    for (int64_t i = 0; i < tile.keys; i += KEYS) {
        for (int64_t j = i; j < std::min(i + KEYS, fetched); ++j) {
            prefetch_row(next.k[j], c.head_dim), prefetch_row(next.v[j], c.head_dim);
        }
        score_keys<N>(q, tile.k + i, c.head_dim, c.scale, scores + i);
    }
    int64_t last = 0;  // no key from here on has a weight
    for (int n = 0; n < N; ++n) {
        const int64_t position = u.position + (first_query + n) / c.group();
        Range seen = keys_seen(c, position, c.context_len[u.seq]);
        seen.begin -= tile.first, seen.end -= tile.first;
        soften(scores + n * TILE, tile.keys, seen, values[n], c.head_dim);
        last = std::max(last, std::min(tile.keys, seen.end));
    }
    int64_t d = 0;
    for (; d + 16 <= c.head_dim; d += 16) mix_values<N, 4>(scores, tile.v, last, d, values);
    for (; d < c.head_dim; d += 4) mix_values<N, 1>(scores, tile.v, last, d, values);
}

// All queries of the unit against the keys of one span. Tiles begin at multiples of TILE, whatever the unit sees.
void attend_span(const Call& c, const Unit& u, int64_t span, float* states) {
    const int64_t queries = u.count * c.group();
    const int64_t end = std::min((span + 1) * SPAN, u.end);
    Tile tiles[2];
    int64_t first = std::max(span * SPAN, u.begin / TILE * TILE);
    find_keys(c, u, first, end, tiles[0]);
    for (int64_t t = 0; first < end; first += TILE, ++t) {
        const Tile& tile = tiles[t % 2];
        Tile& next = tiles[(t + 1) % 2];
        find_keys(c, u, first + TILE, end, next);
        int64_t n = 0;
        for (; n + QUERIES <= queries; n += QUERIES) attend_queries<QUERIES>(c, u, tile, next, n, states);
        if (queries - n == 3) attend_queries<3>(c, u, tile, next, n, states);
        if (queries - n == 2) attend_queries<2>(c, u, tile, next, n, states);
        if (queries - n == 1) attend_queries<1>(c, u, tile, next, n, states);
    }
}

void write_result(const Call& c, const Unit& u, const float* states) {
    for (int64_t n = 0; n < u.count * c.group(); ++n, states += c.state()) {
        const int64_t row = u.first + n / c.group(), head = u.kv_head * c.group() + n % c.group();
        float* to = c.out + (row * c.heads + head) * c.head_dim;
        const float inverse = 1.0f / states[c.head_dim + 1];
        for (int64_t d = 0; d < c.head_dim; ++d) to[d] = states[d] * inverse;
    }
}

void attend_all_spans(const Call& c, const Unit& u) {
    thread_local std::vector<float> scratch;
    const int64_t queries = u.count * c.group(), size = queries * c.state();
    scratch.resize(size_t(2 * size));
    float *states = scratch.data(), *part = states + size;
    for (int64_t n = 0; n < queries; ++n) clear(states + n * c.state(), c.head_dim);
    for (int64_t span = u.begin / SPAN; span * SPAN < u.end; ++span) {
        for (int64_t n = 0; n < queries; ++n) clear(part + n * c.state(), c.head_dim);
        attend_span(c, u, span, part);
        for (int64_t n = 0; n < queries; ++n) merge(states + n * c.state(), part + n * c.state(), c.head_dim);
    }
    write_result(c, u, states);
}

// ---- All units ----------------------------------------------------------------------------------------------------

std::vector<Unit> units_of(const Call& c) {
    std::vector<Unit> units;
    for (int64_t s = 0; s < c.seqs; ++s) {
        const int64_t start = c.query_start[s], stop = c.query_start[s + 1], context = c.context_len[s];
        for (int64_t first = start; first < stop; first += ROWS) {
            const int64_t count = std::min(ROWS, stop - first), position = context - (stop - first);
            const int64_t begin = keys_seen(c, position, context).begin;
            const int64_t end = keys_seen(c, position + count - 1, context).end;
            for (int64_t h = 0; h < c.kv_heads; ++h) units.push_back({s, first, count, position, h, begin, end, 0, 0});
        }
    }
    std::reverse(units.begin(), units.end());  // the last rows of a prompt have the most keys: begin with these
    return units;
}

double work_of(const Call& c, const std::vector<Unit>& units) {
    double work = 0;
    for (const Unit& u : units) work += double((u.end - u.begin) * u.count * c.group() * c.head_dim);
    return work;
}

// Few units with many keys: every span by itself, then each unit's spans merged in their order.
void attend_split(const Call& c, const std::vector<Unit>& units) {
    thread_local std::vector<float> scratch;
    std::vector<Unit> parts;
    int64_t size = 0;
    for (const Unit& u : units) {
        for (int64_t span = u.begin / SPAN; span * SPAN < u.end; ++span) {
            parts.push_back(u);
            parts.back().span = span, parts.back().partial = size;
            size += u.count * c.group() * c.state();
        }
    }
    scratch.resize(size_t(size));
    float* states = scratch.data();
    pool::parallel_for(int64_t(parts.size()), [&](int64_t i) {
        const Unit& u = parts[size_t(i)];
        const int64_t queries = u.count * c.group();
        for (int64_t n = 0; n < queries; ++n) clear(states + u.partial + n * c.state(), c.head_dim);
        attend_span(c, u, u.span, states + u.partial);
    });
    std::vector<float> whole;
    size_t next = 0;
    for (const Unit& u : units) {
        const int64_t queries = u.count * c.group();
        whole.resize(size_t(queries * c.state()));
        for (int64_t n = 0; n < queries; ++n) clear(whole.data() + n * c.state(), c.head_dim);
        for (int64_t span = u.begin / SPAN; span * SPAN < u.end; ++span, ++next) {
            const float* part = states + parts[next].partial;
            for (int64_t n = 0; n < queries; ++n) merge(whole.data() + n * c.state(), part + n * c.state(), c.head_dim);
        }
        write_result(c, u, whole.data());
    }
}

}  // namespace

extern "C" void sd_paged_attention(const Call* c) {
    const std::vector<Unit> units = units_of(*c);
    if (work_of(*c, units) < 20000) {
        for (const Unit& u : units) attend_all_spans(*c, u);
    } else if (int64_t(units.size()) < 4 * pool::wanted_threads) {
        attend_split(*c, units);
    } else {
        pool::parallel_for(int64_t(units.size()), [&](int64_t i) { attend_all_spans(*c, units[size_t(i)]); });
    }
}
