// Attention of ragged batches over the paged float cache, or over TurboQuant's codes and pages. Keys are taken in spans of
// 128 by their absolute position: all scores of a span, their softmax, then the weighted values, and span after span is
// merged. So a row's sums have the same order in a prompt chunk and in a decode step, however spans or queries are shared
// among threads. Query heads that share a key head go together, so that a key and a value are loaded once for them.
//
// A TurboQuant layer is read from three sources, each in spans of its own: the first keys from pages, the next from codes,
// which are decoded TILE keys at a time, and the last from pages. Which source a key has depends on the row.
//
//   unit of work:  (up to ROWS rows of a sequence) x (one key head) x (all spans; where units are few: one span)
//   queries of a unit:  row 0 head 0, row 0 head 1, .. row 1 head 0, ..  in groups of up to QUERIES in registers

#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd.h"
#include "turboquant.h"

namespace {

constexpr int64_t SPAN = 128, ROWS = 16;
constexpr int64_t TILE = 64;   // so many keys stay in the nearest cache while all queries go over them
constexpr int64_t AHEAD = 16;  // and so many keys ahead they are asked for
constexpr double EVEN = 8;     // units are split where one has more than an 8th of a thread's share of the work
constexpr int QUERIES = 4, KEYS = 4;
constexpr float LOG2E = 1.44269504f;

struct Call {  // strides in elements
    const float* q;
    int64_t q_row, q_head;
    const float *k_cache, *v_cache;
    const int32_t *query_start, *context_len, *block_tables;
    int64_t seqs, max_blocks, heads, kv_heads, head_dim, block_size;
    float scale;
    bool causal;
    int64_t window;
    float* out;          // [rows, heads * head_dim]
    const float* sinks;  // [heads]: a logit in each head's softmax that has no value; null where there are none
    const Coded* coded;  // a TurboQuant layer, in place of the caches; else null

    int64_t group() const { return heads / kv_heads; }
    int64_t state() const { return head_dim + 2; }  // floats of a query's state: weighted values, maximum, total
};

struct Range {
    int64_t begin, end;

    int64_t spans() const { return begin < end ? (end + SPAN - 1) / SPAN - begin / SPAN : 0; }
};

enum Source { FIRST, CODES, LAST, SOURCES };  // all keys of an exact cache are LAST

struct Unit {
    int64_t seq, first, count;  // rows of the batch
    int64_t position;           // of the first row in its sequence
    int64_t kv_head;
    Range seen[SOURCES];  // keys that any of its rows sees
    int64_t partial;      // of a unit that is split: where its states begin in the scratch,
    int64_t left;         // and how many of its tasks are not done

    int64_t spans() const { return seen[FIRST].spans() + seen[CODES].spans() + seen[LAST].spans(); }
};

Range keys_seen(const Call& c, int64_t position, int64_t context) {
    Range seen{0, c.causal ? std::min(position + 1, context) : context};
    if (c.window > 0) {
        seen.begin = std::max<int64_t>(0, position - c.window + 1);
        seen.end = std::min(seen.end, position + c.window);
    }
    return seen;
}

// Those of one source.
Range keys_from(const Call& c, int source, int64_t position, int64_t context) {
    const Range seen = keys_seen(c, position, context);
    const int64_t first = c.coded ? c.coded->first : 0;
    const int64_t border = c.coded ? std::max(first, position - c.coded->recent + 1) : 0;
    if (source == FIRST) return {seen.begin, std::min(seen.end, first)};
    if (source == CODES) return {std::max(seen.begin, first), std::min(seen.end, border)};
    return {std::max(seen.begin, border), seen.end};
}

// ---- Two small matmuls --------------------------------------------------------------------------------------------

// scores[n][0 .. 3] = q[n] . k[0 .. 3] for N queries; each product is summed over the dimension in the same order
// always.
#if SPARKDRAFT_AVX2
template <int N>
INLINE void score_keys(const float* const* q, const float* const* k, int64_t dim, float scale, float* scores) {
    constexpr int SOME = SPARKDRAFT_AVX512 || N < 2 ? N : 2;  // so many have their sums in registers
    vfloat sums[SOME * KEYS];
    unroll<SOME * KEYS>(EACH(i) { sums[i] = vzero(); });
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        unroll<KEYS>(EACH(i) {
            const vfloat key = vload(k[i] + d);
            unroll<SOME>(EACH(n) { sums[n * KEYS + i] = vfma(vload(q[n] + d), key, sums[n * KEYS + i]); });
        });
    }
    f32x4 totals[SOME];
    unroll<SOME>(EACH(n) {
        const vfloat* s = sums + n * KEYS;
        totals[n] = sum_lanes(s[0], s[1], s[2], s[3]);
    });
    for (; d < dim; d += 4) {  // what is left of a dimension that is no multiple of LANES
        unroll<SOME>(EACH(n) {
            f32x4 p[KEYS];
            unroll<KEYS>(EACH(i) { p[i] = load4(q[n] + d) * load4(k[i] + d); });
            totals[n] = totals[n] + sum_lanes(p[0], p[1], p[2], p[3]);
        });
    }
    unroll<SOME>(EACH(n) { store4(scores + n * SPAN, totals[n] * splat4(scale)); });
    if constexpr (SOME < N) score_keys<N - SOME>(q + SOME, k, dim, scale, scores + SOME * SPAN);
}

// mix_values for VECTORS * LANES dimensions.
template <int N, int VECTORS>
INLINE void mix_wide(const float* weights, const float* v, const int64_t* place, int64_t keys, float* values,
                     int64_t stride) {
    vfloat sums[N * VECTORS];
    unroll<N>(EACH(n) {
        unroll<VECTORS>(EACH(j) { sums[n * VECTORS + j] = vload(values + n * stride + LANES * j); });
    });
    for (int64_t key = 0; key < keys; ++key) {
        vfloat value[VECTORS];
        unroll<VECTORS>(EACH(j) { value[j] = vload(v + place[key] + LANES * j); });
        unroll<N>(EACH(n) {
            const vfloat weight = vsplat(weights[n * SPAN + key]);
            unroll<VECTORS>(EACH(j) { sums[n * VECTORS + j] = vfma(value[j], weight, sums[n * VECTORS + j]); });
        });
    }
    unroll<N>(EACH(n) {
        unroll<VECTORS>(EACH(j) { vstore(values + n * stride + LANES * j, sums[n * VECTORS + j]); });
    });
}
#else
template <int N>
INLINE void score_keys(const float* const* q, const float* const* k, int64_t dim, float scale, float* scores) {
    f32x4 sums[N * KEYS];
    unroll<N>(EACH(n) {
        const f32x4 query = load4(q[n]);
        unroll<KEYS>(EACH(i) { sums[n * KEYS + i] = query * load4(k[i]); });
    });
    for (int64_t d = 4; d < dim; d += 4) {
        f32x4 key[KEYS];
        unroll<KEYS>(EACH(i) { key[i] = load4(k[i] + d); });
        unroll<N>(EACH(n) {
            const f32x4 query = load4(q[n] + d);
            unroll<KEYS>(EACH(i) { sums[n * KEYS + i] = multiply_add(query, key[i], sums[n * KEYS + i]); });
        });
    }
    unroll<N>(EACH(n) {
        const f32x4* s = sums + n * KEYS;
        store4(scores + n * SPAN, sum_lanes(s[0], s[1], s[2], s[3]) * splat4(scale));
    });
}
#endif

// values[n][d ..] += sum over keys of weights[n][key] * v[place[key]][d ..], for VECTORS * 4 dimensions of N queries.
template <int N, int VECTORS>
INLINE void mix_values(const float* weights, const float* v, const int64_t* place, int64_t keys, float* values,
                       int64_t stride) {
    f32x4 sums[N * VECTORS];
    unroll<N>(EACH(n) {
        unroll<VECTORS>(EACH(j) { sums[n * VECTORS + j] = load4(values + n * stride + 4 * j); });
    });
    for (int64_t key = 0; key < keys; key += KEYS) {
        f32x4 four[N];
        unroll<N>(EACH(n) { four[n] = load4(weights + n * SPAN + key); });
        unroll<KEYS>(EACH(i) {
            unroll<VECTORS>(EACH(j) {
                const f32x4 value = load4(v + place[key + i] + 4 * j);
                unroll<N>(EACH(n) {
                    sums[n * VECTORS + j] = multiply_add_lane<i>(value, four[n], sums[n * VECTORS + j]);
                });
            });
        });
    }
    unroll<N>(EACH(n) {
        unroll<VECTORS>(EACH(j) { store4(values + n * stride + 4 * j, sums[n * VECTORS + j]); });
    });
}

// ---- Softmax, in powers of 2 --------------------------------------------------------------------------------------

// Turns a query's scores of a span into weights relative to their maximum. Keys outside 'seen' get weight 0, which
// changes no sum; 'keys' is how many weights are wanted.
void soften(float* scores, int64_t keys, Range seen, float* maximum_and_total) {
    const int64_t begin = std::max<int64_t>(0, seen.begin), end = std::min(keys, seen.end);
    maximum_and_total[0] = -INFINITY, maximum_and_total[1] = 0;
    if (begin >= end) {
        std::fill(scores, scores + keys, 0.0f);
        return;
    }
    const int64_t low = begin / 16 * 16, high = (end + 15) / 16 * 16;
    std::fill(scores, scores + low, 0.0f);
    std::fill(scores + low, scores + begin, -INFINITY);
    std::fill(scores + end, scores + high, -INFINITY);
    if (high < keys) std::fill(scores + high, scores + keys, 0.0f);
    f32x4 most[4];
    unroll<4>(EACH(j) { most[j] = load4(scores + low + 4 * j); });
    for (int64_t i = low + 16; i < high; i += 16) {
        unroll<4>(EACH(j) { most[j] = max4(most[j], load4(scores + i + 4 * j)); });
    }
    most[0] = max4(max4(most[0], most[1]), max4(most[2], most[3]));
    const float maximum = std::max(std::max(most[0][0], most[0][1]), std::max(most[0][2], most[0][3]));
    f32x4 sum = splat4(0);
    for (int64_t i = low; i < high; i += 16) {  // four at a time: each is a long chain of dependent steps
        f32x4 weights[4];
        unroll<4>(EACH(j) { weights[j] = power_of_2(load4(scores + i + 4 * j) - splat4(maximum)); });
        unroll<4>(EACH(j) { store4(scores + i + 4 * j, weights[j]); });
        sum = sum + ((weights[0] + weights[1]) + (weights[2] + weights[3]));
    }
    maximum_and_total[0] = maximum, maximum_and_total[1] = sum_lanes(sum);
}

// into := both states together, as if their keys had been one span's
void merge(float* into, const float* from, int64_t dim) {
    if (from[dim + 1] == 0) return;
    const float highest = std::max(into[dim], from[dim]);
    const f32x4 factors = power_of_2(f32x4{into[dim], from[dim], 0, 0} - splat4(highest));
    const f32x4 a = splat4(factors[0]), b = splat4(factors[1]);
    for (int64_t d = 0; d < dim; d += 4) {
        store4(into + d, multiply_add(load4(into + d), a, load4(from + d) * b));
    }
    into[dim + 1] = multiply_add(into[dim + 1], a[0], from[dim + 1] * b[0]);
    into[dim] = highest;
}

// ---- One span of one unit -----------------------------------------------------------------------------------------

struct Span {
    int source;
    int64_t first, keys;  // position of its first key, and how many there are
    int64_t place[SPAN];  // of each key in the caches or pages; for codes its record, and its position there (AT bits)
};

// Spans begin at multiples of SPAN, or of TILE where the unit sees nothing before. Keys before the first that it sees may
// have no page: their places are that of the first, and they get no weight.
void find_keys(const Call& c, const Unit& u, int64_t index, Span& span) {
    span.source = 0;
    while (index >= u.seen[span.source].spans()) index -= u.seen[span.source++].spans();
    const Range seen = u.seen[span.source];
    const int64_t number = seen.begin / SPAN + index;
    span.first = std::max(number * SPAN, seen.begin / TILE * TILE);
    span.keys = std::min((number + 1) * SPAN, seen.end) - span.first;
    const int32_t* blocks = c.block_tables + u.seq * c.max_blocks;
    const bool paged = c.coded && span.source != CODES;
    const int64_t width = span.source == CODES ? 1 : c.head_dim, unseen = std::max<int64_t>(seen.begin - span.first, 0);
    int64_t i = unseen, block = (span.first + i) / c.block_size, offset = (span.first + i) % c.block_size;
    while (i < span.keys) {
        const int64_t at = paged ? 2 * c.coded->page_of[blocks[block]] : blocks[block];  // a page has keys, then values
        const int64_t head = at * c.kv_heads + u.kv_head;
        int64_t place = span.source == CODES ? (head << AT) + offset : (head * c.block_size + offset) * c.head_dim;
        const int64_t stop = std::min(span.keys, i + c.block_size - offset);
        for (; i < stop; ++i, place += width) span.place[i] = place;
        ++block, offset = 0;
    }
    std::fill(span.place, span.place + unseen, span.place[unseen]);
    for (; i % KEYS; ++i) span.place[i] = span.place[i - 1];  // taken KEYS at a time; these get no weight
}

// The keys, or the values, of a tile.
struct Rows {
    const float* base;
    const int64_t* place;  // by key of the tile
};

Rows find_rows(const Call& c, const Span& span, Range tile, bool values) {
    const int64_t* place = span.place + tile.begin;
    if (!c.coded) return {values ? c.v_cache : c.k_cache, place};
    const Coded& layer = *c.coded;
    const Side& side = values ? layer.values : layer.keys;
    if (span.source != CODES) return {layer.pages + int64_t(values) * c.kv_heads * c.block_size * c.head_dim, place};
    thread_local std::vector<float> decoded;
    thread_local std::vector<int64_t> places;
    decoded.resize(size_t(TILE * c.head_dim)), places.resize(TILE);
    const int64_t count = (tile.end - tile.begin + KEYS - 1) / KEYS * KEYS;
    decode_all(layer, side, place, count, decoded.data());
    for (int64_t i = 0; i < count; ++i) places[size_t(i)] = i * c.head_dim;
    return {decoded.data(), places.data()};
}

// Blocks lie anywhere in memory, so the core cannot guess what comes next: ask for the next KEYS rows by name.
INLINE void prefetch_rows(const float* cache, const Span& span, int64_t begin, int64_t dim) {
    const int64_t end = std::min(begin + KEYS, span.keys);
    for (int64_t i = begin; i < end; ++i) {
        for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(cache + span.place[i] + d);
    }
}

// Calls f with (constant N, first query) for groups of at most QUERIES queries.
template <class F>
INLINE void each_group(Range queries, F f) {
    int64_t n = queries.begin;
    for (; n + QUERIES <= queries.end; n += QUERIES) f(std::integral_constant<int, QUERIES>{}, n);
    if (queries.end - n == 3) f(std::integral_constant<int, 3>{}, n);
    if (queries.end - n == 2) f(std::integral_constant<int, 2>{}, n);
    if (queries.end - n == 1) f(std::integral_constant<int, 1>{}, n);
}

template <int N>
void score_tile(const Call& c, const Unit& u, const Span& span, Range keys, Rows rows, int64_t first_query, bool fetch,
                float* scores) {
    const float* q[N];
    for (int n = 0; n < N; ++n) {
        const int64_t row = u.first + (first_query + n) / c.group();
        const int64_t head = u.kv_head * c.group() + (first_query + n) % c.group();
        q[n] = c.q + row * c.q_row + head * c.q_head;
    }
    for (int64_t i = keys.begin; i < keys.end; i += KEYS) {
        if (fetch) {
            prefetch_rows(c.k_cache, span, i + AHEAD, c.head_dim);
            prefetch_rows(c.v_cache, span, i, c.head_dim);
        }
        const float* k[KEYS];
        unroll<KEYS>(EACH(j) { k[j] = rows.base + rows.place[i - keys.begin + j]; });
        score_keys<N>(q, k, c.head_dim, c.scale * LOG2E, scores + i);
    }
}

template <int N>
void mix_tile(const Call& c, Range keys, Rows rows, const float* weights, float* values) {
    const int64_t *place = rows.place, count = keys.end - keys.begin;
    const float* v = rows.base;
    weights += keys.begin;
    int64_t d = 0;
#if SPARKDRAFT_AVX2
    constexpr int MANY = SPARKDRAFT_AVX512 ? 4 : 2;
    for (; d + MANY * LANES <= c.head_dim; d += MANY * LANES) {
        mix_wide<N, MANY>(weights, v + d, place, count, values + d, c.state());
    }
    for (; d + LANES <= c.head_dim; d += LANES) {
        mix_wide<N, 1>(weights, v + d, place, count, values + d, c.state());
    }
#endif
    for (; d + 16 <= c.head_dim; d += 16) {
        mix_values<N, 4>(weights, v + d, place, count, values + d, c.state());
    }
    for (; d < c.head_dim; d += 4) {
        mix_values<N, 1>(weights, v + d, place, count, values + d, c.state());
    }
}

// Some queries of a unit against the keys of one span, whose states they get.
void attend_span(const Call& c, const Unit& u, int64_t index, Range queries, float* states) {
    thread_local std::vector<float> scratch;
    Span span;
    find_keys(c, u, index, span);
    const int64_t count = queries.end - queries.begin;
    if (int64_t(scratch.size()) < count * SPAN) scratch.resize(size_t(count * SPAN));
    float* scores = scratch.data();
    for (int64_t i = 0; i < span.keys; i += TILE) {
        const Range keys{i, std::min(i + TILE, span.keys)};
        const Rows rows = find_rows(c, span, keys, false);
        each_group(queries, [&](auto n, int64_t first) {
            const int64_t at = first - queries.begin;
            score_tile<n>(c, u, span, keys, rows, first, at == 0 && !c.coded, scores + at * SPAN);
        });
    }
    const int64_t padded = (span.keys + KEYS - 1) / KEYS * KEYS;
    for (int64_t n = 0; n < count; ++n) {
        float* state = states + n * c.state();
        std::fill(state, state + c.head_dim, 0.0f);
        Range seen = keys_from(c, span.source, u.position + (queries.begin + n) / c.group(), c.context_len[u.seq]);
        seen.begin -= span.first, seen.end -= span.first;
        soften(scores + n * SPAN, padded, seen, state + c.head_dim);
    }
    for (int64_t i = 0; i < span.keys; i += TILE) {
        const Range keys{i, std::min(i + TILE, span.keys)};
        const Rows rows = find_rows(c, span, keys, true);
        each_group({0, count}, [&](auto n, int64_t first) {
            mix_tile<n>(c, keys, rows, scores + first * SPAN, states + first * c.state());
        });
    }
}

// What the weighted values are multiplied by where a sink joins their weights: once, after all spans are merged.
float with_sink(float sink, const float* maximum_and_total) {
    const float scaled = sink * LOG2E, highest = std::max(scaled, maximum_and_total[0]);
    const f32x4 powers = power_of_2(f32x4{maximum_and_total[0], scaled, 0, 0} - splat4(highest));
    return powers[0] / multiply_add(maximum_and_total[1], powers[0], powers[1]);
}

void write_result(const Call& c, const Unit& u, const float* states) {
    for (int64_t n = 0; n < u.count * c.group(); ++n, states += c.state()) {
        const int64_t row = u.first + n / c.group(), head = u.kv_head * c.group() + n % c.group();
        float* to = c.out + (row * c.heads + head) * c.head_dim;
        const float factor = c.sinks ? with_sink(c.sinks[head], states + c.head_dim) : 1.0f / states[c.head_dim + 1];
        for (int64_t d = 0; d < c.head_dim; ++d) to[d] = states[d] * factor;
        if (c.coded) rotate_back(*c.coded, to);
    }
}

// ---- All units ----------------------------------------------------------------------------------------------------

void attend_all_spans(const Call& c, const Unit& u) {
    thread_local std::vector<float> scratch;
    const int64_t queries = u.count * c.group(), size = queries * c.state();
    scratch.resize(size_t(2 * size));
    float *states = scratch.data(), *part = states + size;
    attend_span(c, u, 0, {0, queries}, states);
    for (int64_t span = 1; span < u.spans(); ++span) {
        attend_span(c, u, span, {0, queries}, part);
        for (int64_t n = 0; n < queries; ++n) merge(states + n * c.state(), part + n * c.state(), c.head_dim);
    }
    write_result(c, u, states);
}

void find_units(const Call& c, std::vector<Unit>& units) {
    units.clear();
    for (int64_t s = 0; s < c.seqs; ++s) {
        const int64_t start = c.query_start[s], stop = c.query_start[s + 1], context = c.context_len[s];
        for (int64_t first = start; first < stop; first += ROWS) {
            const int64_t count = std::min(ROWS, stop - first), position = context - (stop - first);
            Unit unit{s, first, count, position, 0, {}, 0, 0};
            for (int source = 0; source < SOURCES; ++source) {
                const Range top = keys_from(c, source, position, context);
                const Range last = keys_from(c, source, position + count - 1, context);
                if (top.begin < top.end || last.begin < last.end) unit.seen[source] = {top.begin, last.end};
            }
            if (unit.spans() == 0) {  // padding: without keys a row is zeros
                std::fill_n(c.out + first * c.heads * c.head_dim, count * c.heads * c.head_dim, 0.0f);
                continue;
            }
            for (unit.kv_head = 0; unit.kv_head < c.kv_heads; ++unit.kv_head) units.push_back(unit);
        }
    }
    std::reverse(units.begin(), units.end());  // the last rows of a prompt have the most keys: begin with these
}

struct Work {
    double all = 0, largest = 0;  // of all units, and of one
};

Work work_of(const Call& c, const std::vector<Unit>& units) {
    Work work;
    for (const Unit& u : units) {
        int64_t keys = 0;
        for (const Range& seen : u.seen) keys += std::max<int64_t>(seen.end - seen.begin, 0);
        const double one = double(keys * u.count * c.group() * c.head_dim);
        work.all += one, work.largest = std::max(work.largest, one);
    }
    return work;
}

struct Part {
    int64_t unit, span;
};

// Splits units into spans; returns how many floats all their states take.
int64_t find_parts(const Call& c, std::vector<Unit>& units, std::vector<Part>& parts) {
    int64_t size = 0;
    parts.clear();
    for (size_t i = 0; i < units.size(); ++i) {
        units[i].partial = size, units[i].left = units[i].spans();
        size += units[i].spans() * units[i].count * c.group() * c.state();
        for (int64_t span = 0; span < units[i].spans(); ++span) parts.push_back({int64_t(i), span});
    }
    return size;
}

// Few units, or some much larger than others: every span by itself, and the last ones, too few for all threads, in slices
// of their queries. The last task of a unit merges its spans, in their order.
void attend_split(const Call& c, std::vector<Unit>& units) {
    thread_local std::vector<float> scratch;
    thread_local std::vector<Part> kept;
    std::vector<Part>& parts = kept;  // the caller's for all threads, as 'states' is
    const int64_t size = find_parts(c, units, parts);
    if (int64_t(scratch.size()) < size) scratch.resize(size_t(size));
    float* states = scratch.data();
    const int64_t slices = pool::wanted_threads, sliced = int64_t(parts.size()) % slices;
    const int64_t whole = int64_t(parts.size()) - sliced;
    for (int64_t i = whole; i < whole + sliced; ++i) units[size_t(parts[size_t(i)].unit)].left += slices - 1;
    pool::parallel_for(whole + sliced * slices, [&](int64_t i) {
        const Part& part = parts[size_t(i < whole ? i : whole + (i - whole) / slices)];
        Unit& u = units[size_t(part.unit)];
        const int64_t count = u.count * c.group(), step = count * c.state(), slice = (i - whole) % slices;
        const Range queries = i < whole ? Range{0, count} : Range{count * slice / slices, count * (slice + 1) / slices};
        float* first = states + u.partial;
        if (queries.begin < queries.end) {
            attend_span(c, u, part.span, queries, first + part.span * step + queries.begin * c.state());
        }
        if (__atomic_sub_fetch(&u.left, 1, __ATOMIC_ACQ_REL) > 0) return;
        for (int64_t at = step; at < u.spans() * step; at += c.state()) {
            merge(first + at % step, first + at, c.head_dim);
        }
        write_result(c, u, first);
    });
}

}  // namespace

extern "C" void sd_paged_attention(const Call* c) {
    thread_local std::vector<Unit> kept;
    std::vector<Unit>& units = kept;  // the caller's for all threads
    find_units(*c, units);
    const Work work = work_of(*c, units);
    if (work.all < 20000) {
        for (const Unit& u : units) attend_all_spans(*c, u);
    } else if (work.largest * EVEN * double(pool::wanted_threads) > work.all) {
        attend_split(*c, units);
    } else {
        pool::parallel_for(int64_t(units.size()), [&](int64_t i) { attend_all_spans(*c, units[size_t(i)]); });
    }
}
