// Sampling: which id a row of logits draws. Noise is that of kernels/noise.py (Gumbel noise from seed, position and id),
// and the filters are those of engine/sampler.py. Each row is computed by itself, in one fixed order, so its draw does not
// depend on the rows beside it.

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace {

constexpr uint64_t SEED = uint64_t(-7046029254386353131), POSITION = uint64_t(-4417276706812531889);
constexpr uint64_t ID = uint64_t(-2643881736870682267);
constexpr int UNIFORM_BITS = 23;
constexpr float LARGEST = 16.635533f, LN2 = 0.69314718f;
constexpr int32_t IN_PROMPT = 1 << 30;  // in a table of counts
constexpr int64_t STRIP = 64;  // columns that are looked at together
constexpr int64_t ADDED = 16;  // columns whose weights are added up together

uint32_t noise_bits(uint64_t x) {
    x = (x ^ (x >> 30)) * uint64_t(-4658895280553007687);
    x = (x ^ (x >> 27)) * uint64_t(-7723592293110705685);
    return uint32_t((x ^ (x >> 31)) >> (64 - UNIFORM_BITS));
}

float noise_of(uint32_t bits) { return -std::log(-std::log((float(bits) + 0.5f) / float(1 << UNIFORM_BITS))); }

INLINE float largest_of_4(f32x4 v) { return std::max(std::max(v[0], v[1]), std::max(v[2], v[3])); }

INLINE float largest_of_strip(const float* x) {
    f32x4 most[4];
    unroll<4>(EACH(j) { most[j] = load4(x + 4 * j); });
    for (int64_t i = 16; i < STRIP; i += 16) unroll<4>(EACH(j) { most[j] = max4(most[j], load4(x + i + 4 * j)); });
    return largest_of_4(max4(max4(most[0], most[1]), max4(most[2], most[3])));
}

float largest(const float* x, int64_t n) {
    f32x4 most[4];
    unroll<4>(EACH(j) { most[j] = splat4(x[0]); });
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) unroll<4>(EACH(j) { most[j] = max4(most[j], load4(x + i + 4 * j)); });
    float found = largest_of_4(max4(max4(most[0], most[1]), max4(most[2], most[3])));
    for (; i < n; ++i) found = std::max(found, x[i]);
    return found;
}

// The first column of the largest, which is 'top'; 0 if none is.
int64_t first_of(const float* x, int64_t n, float top) {
    int64_t i = 0;
    while (i + STRIP <= n && !(largest_of_strip(x + i) >= top)) i += STRIP;
    for (; i < n; ++i) {
        if (x[i] == top) return i;
    }
    return 0;
}

// One row of logits and how it is sampled. Scaled logits are (x - top) / temperature, so that the largest is 0.
struct Row {
    const float* x;
    int64_t columns;
    float temperature, min_p, top_p;
    int64_t top_k;
    uint64_t noise;  // of seed and position
    const int64_t* ids;
    float top;

    float scaled(int64_t v) const { return (x[v] - top) / temperature; }
    float margin() const { return 1e-4f * (1 + std::fabs(top)); }  // by which a logit's bound is lowered for rounding
    uint32_t bits(int64_t v) const { return noise_bits(noise + uint64_t(ids ? ids[v] : v) * ID); }
    bool filtered() const { return top_k > 0 || min_p > 0 || top_p < 1; }
};

// The sum of all weights e^scaled, the largest of which is 1, added up in double precision strip by strip.
double total_weight(const Row& row) {
    const f32x4 top = splat4(row.top), temperature = splat4(row.temperature);
    double total = 0;
    int64_t i = 0;
    for (; i + ADDED <= row.columns; i += ADDED) {
        f32x4 e[4];
        unroll<4>(EACH(j) { e[j] = exp4((load4(row.x + i + 4 * j) - top) / temperature); });
        total += sum_lanes((e[0] + e[1]) + (e[2] + e[3]));
    }
    for (; i < row.columns; ++i) total += exp4(splat4(row.scaled(i)))[0];
    return total;
}

// The columns that filters have left so far, in their order, and their weights.
struct Kept {
    std::vector<int64_t> columns;
    std::vector<float> weights, sorted;

    // Those of at least 'least'. Few are, so whole strips are passed over.
    void gather(const Row& row, float least) {
        columns.clear(), weights.clear();
        const float needed = least > 0 ? row.top + std::log(least) * row.temperature - row.margin() : -INFINITY;
        for (int64_t i = 0; i < row.columns; i += STRIP) {
            const int64_t end = std::min(i + STRIP, row.columns);
            if (end == i + STRIP && largest_of_strip(row.x + i) < needed) continue;
            for (int64_t v = i; v < end; ++v) {
                if (!(row.x[v] >= needed)) continue;
                const float weight = exp4(splat4(row.scaled(v)))[0];
                if (weight >= least) columns.push_back(v), weights.push_back(weight);
            }
        }
    }

    void drop_below(float least) {
        size_t left = 0;
        for (size_t i = 0; i < columns.size(); ++i) {
            if (weights[i] >= least) columns[left] = columns[i], weights[left++] = weights[i];
        }
        columns.resize(left), weights.resize(left);
    }

    float kth_largest(int64_t k) {
        sorted = weights;
        std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<float>());
        return sorted[k - 1];
    }

    // The least of the largest weights that reach this mass.
    float least_of(double mass) {
        sorted = weights;
        std::sort(sorted.begin(), sorted.end(), std::greater<float>());
        double reached = 0;
        for (const float weight : sorted) {
            if ((reached += weight) >= mass) return weight;
        }
        return sorted.empty() ? 0 : sorted.back();
    }
};

// Keeps what min_p, top_k and top_p leave. Only top_p alone needs the weights of all columns. Those below a share
// (1 - top_p) / n of the mass hold less than 1 - top_p together, so that the others hold enough and only they are sorted.
void filter(const Row& row, Kept& kept) {
    const bool has_k = row.top_k > 0 && row.top_k < row.columns;
    double total = 0;
    if (has_k) {
        for (const float least : {0x1p-8f, 0x1p-20f, 0x1p-48f, 0x1p-100f, 0.0f}) {
            kept.gather(row, least);
            if (int64_t(kept.columns.size()) >= row.top_k) break;
        }
        if (int64_t(kept.columns.size()) >= row.top_k) kept.drop_below(kept.kth_largest(row.top_k));
        if (row.min_p > 0) kept.drop_below(row.min_p);
    } else if (row.min_p > 0) {
        kept.gather(row, row.min_p);
    } else {
        total = total_weight(row);
        kept.gather(row, float((1 - double(row.top_p)) * total / double(row.columns)));
    }
    if (row.top_p >= 1) return;
    if (has_k || row.min_p > 0) {
        for (const float weight : kept.weights) total += weight;
    }
    kept.drop_below(kept.least_of(double(row.top_p) * total));
}

// The column that a row takes, and how far its score stands above the rest, at most 'widest'.
struct Taken {
    int64_t column;
    float gap;
};

// The column with the largest scaled logit + noise, beginning with the first of the largest logits. Below the best those
// columns count that may be second, within 'widest' of it.
struct Draw {
    const Row& row;
    const float widest;
    const int64_t first;
    int64_t best;
    float total, second = -INFINITY;

    Draw(const Row& row, float widest)
        : row(row), widest(widest), first(first_of(row.x, row.columns, row.top)), best(first),
          total(row.scaled(best) + noise_of(row.bits(best))) {}

    float counts() const { return std::max(second, total - widest); }
    // A logit below this cannot reach what counts: noise is never above LARGEST.
    float needed() const { return row.top + (counts() - LARGEST) * row.temperature - row.margin(); }

    // Noise is below (n + 1) ln 2 where its bits begin with n ones, so hardly any logarithm is taken.
    void consider(int64_t v) {
        const float scaled = row.scaled(v);
        const uint32_t bits = row.bits(v);
        const int ones = __builtin_clz(~(bits << (32 - UNIFORM_BITS)));
        if (v == first || float(ones + 1) * LN2 < counts() - scaled) return;
        const float here = scaled + noise_of(bits);
        if (here > total) {
            second = total, total = here, best = v;
        } else {
            second = std::max(second, here);
        }
    }

    void consider_all() {
        for (int64_t i = 0; i < row.columns; i += STRIP) {
            const int64_t end = std::min(i + STRIP, row.columns);
            const float least = needed();
            if (end == i + STRIP && largest_of_strip(row.x + i) < least) continue;
            for (int64_t v = i; v < end; ++v) {
                if (row.x[v] >= least) consider(v);
            }
        }
    }

    Taken taken() const { return {best, std::min(total - second, widest)}; }
};

// The largest, the first of equals. Its gap, where it is wanted, is that to the logarithm of the sum of the others'
// exponentials, of those within 'widest' of it: nearly the logit of its probability. Strips without any are passed over.
Taken take_largest(const float* x, int64_t n, float widest) {
    const float top = largest(x, n), least = top - widest;
    const int64_t best = first_of(x, n, top);
    if (widest == 0) return {best, 0};
    double others = -1;  // without the largest itself, whose exponential is 1
    int64_t i = 0;
    while (i + ADDED <= n) {
        if (i % STRIP == 0 && i + STRIP <= n && largest_of_strip(x + i) < least) {
            i += STRIP;
            continue;
        }
        f32x4 e[4];
        unroll<4>(EACH(j) {
            const f32x4 v = load4(x + i + 4 * j);
            e[j] = v >= splat4(least) ? exp4(v - splat4(top)) : splat4(0);
        });
        others += sum_lanes((e[0] + e[1]) + (e[2] + e[3]));
        i += ADDED;
    }
    for (; i < n; ++i) others += x[i] >= least ? exp4(splat4(x[i] - top))[0] : 0;
    return {best, others > std::exp(-double(widest)) ? float(-std::log(others)) : widest};
}

Taken sample(const Row& row, Kept& kept, float widest) {
    // If no logit is a number, or one is not, there is nothing to weigh.
    if (!std::isfinite(row.top)) return {first_of(row.x, row.columns, row.top), 0};
    Draw draw(row, widest);
    if (row.filtered()) {
        filter(row, kept);
        for (const int64_t v : kept.columns) draw.consider(v);
    } else {
        draw.consider_all();
    }
    return draw.taken();
}

}  // namespace

extern "C" {

// ops.LogitEdits: penalties, which count the drafts before a row, then biases and excluded ids.
void sd_edit_logits(float* logits, int64_t stride, int64_t rows, int64_t columns, const int32_t* slots,
                    const int32_t* positions, const int32_t* ids, const int32_t* ahead, const int32_t* counts,
                    const float* penalties, const int32_t* biased, const float* bias, const int32_t* until,
                    int64_t most) {
    pool::parallel_ranges(rows, double(rows * columns) * 4, 1, [&](int64_t begin, int64_t end) {
        std::vector<int32_t> table;
        for (int64_t r = begin; r < end; ++r) {
            const int64_t slot = slots[r];
            if (slot < 0) continue;
            float* x = logits + r * stride;
            const float repetition = penalties[3 * slot], presence = penalties[3 * slot + 1];
            const float frequency = penalties[3 * slot + 2];
            if (repetition != 1 || presence != 0 || frequency != 0) {
                table.assign(counts + slot * columns, counts + (slot + 1) * columns);
                for (int64_t k = 0; k < ahead[r]; ++k) table[ids[r - k]] += 1;
                for (int64_t v = 0; v < columns; ++v) {
                    if (table[v] == 0) continue;
                    const int32_t output = table[v] % IN_PROMPT;
                    const float seen = x[v] > 0 ? x[v] / repetition : x[v] * repetition;
                    x[v] = seen - (frequency * float(output) + presence * float(output > 0));
                }
            }
            for (int64_t k = slot * most; k < (slot + 1) * most; ++k) {
                if (biased[k] < 0) continue;
                x[biased[k]] = positions[r] < until[k] ? -INFINITY : x[biased[k]] + bias[k];
            }
        }
    });
}

// The column that each row takes: the one it draws, or at temperature 0 and without a slot the first of its largest.
// slots, positions [rows]: whose parameters a row has, and where its id will stand; both are null where all rows take
// their largest. floats [3, num_slots] are temperature, min_p and top_p, integers [2, num_slots] top_k and seed. ids: what
// columns stand for, or null for themselves. gaps [rows]: how far each row's best stands above the rest, up to 'widest';
// null if nobody asks.
void sd_sample(const float* logits, int64_t stride, int64_t rows, int64_t columns, int64_t num_slots,
               const int32_t* slots, const int32_t* positions, const float* floats, const int64_t* integers,
               const int64_t* ids, int64_t* out, float* gaps, float widest) {
    pool::parallel_ranges(rows, double(rows * columns) * 4, 1, [&](int64_t begin, int64_t end) {
        Kept kept;
        for (int64_t r = begin; r < end; ++r) {
            const float* x = logits + r * stride;
            const float within = gaps ? widest : 0;
            Taken taken;
            const int64_t slot = slots ? slots[r] : -1;
            if (slot < 0 || floats[slot] == 0) {
                taken = take_largest(x, columns, within);
            } else {
                const float top = largest(x, columns), temperature = std::max(floats[slot], 1e-5f);
                const float min_p = floats[num_slots + slot], top_p = floats[2 * num_slots + slot];
                const uint64_t noise =
                    uint64_t(integers[num_slots + slot]) * SEED + uint64_t(positions[r]) * POSITION;
                const Row row{x, columns, temperature, min_p, top_p, integers[slot], noise, ids, top};
                taken = sample(row, kept, within);
            }
            out[r] = taken.column;
            if (gaps) gaps[r] = taken.gap;
        }
    });
}

}  // extern "C"
