// Draws tokens, after changes of logits by penalties and grammars. Every level draws the tokens that torch draws:
// engine/sampler.py is the reference.
//
// Filters count the steps of fp32 scores in one pass. Of the tokens that they keep, the one with the highest key (score
// plus Gumbel noise, in fp64) is drawn. Few keys are computed: a bound without logarithms shows which tokens cannot
// reach the best key so far.

#include <omp.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "../memory.h"
#include "vec.h"

namespace {

using namespace pdmesh;

// Of the filters' grid, as in sampler.py: steps in a nat, and the steps told apart.
constexpr int kStepsPerNat = 256, kNumSteps = 32 * kStepsPerNat;
// No noise is higher: -log(-log(1 - 2^-32)) is 22.181.
constexpr double kMostNoise = 22.19;
constexpr double kLog2 = 0.6931471805599453;  // natural
// More than fp32 loses of any score that a draw can be decided by, and of the bound of noise.
constexpr double kSlack = 1e-3;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Vectors that are tested together for any token that may be drawn.
constexpr int kTogether = 4;

// How a row is drawn, as `sampler.row_settings` lays it out.
struct Settings {
    double temperature;  // 0 or less: the highest logit is taken
    double num_steps;    // that min_p leaves
    double top_k;
    double top_p;
    double noise_keys[2];
};

// A bit for each lane of a mask that is set.
uint32_t set_lanes(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_cmplt_epi32_mask((__m512i)mask, _mm512_setzero_si512());
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask);
#elif defined(__x86_64__)
    return _mm_movemask_ps((__m128)mask);
#elif defined(__aarch64__)
    const uint32x4_t bits = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32((uint32x4_t)mask, bits));
#endif
}

// The largest float that is not above `value`.
float round_down(double value) {
    const float nearest = static_cast<float>(value);
    return nearest > value ? std::nextafter(nearest, -kInfinity) : nearest;
}

// A row of logits in vectors; behind its end they are -inf.
struct Row {
    const float* logits;
    int64_t size;

    Floats at(int64_t i) const {
        if (size - i >= kLanes) return load(logits + i);
        float values[kLanes];
        std::fill(values, values + kLanes, -kInfinity);
        std::copy(logits + i, logits + size, values);
        return load(values);
    }

    // The highest logit; NaN if any is.
    float highest() const {
        Floats best[kTogether];
        Ints is_nan = splat(0);
        for (Floats& each : best) each = splat(-kInfinity);
        int64_t i = 0;
        for (; i + kTogether * kLanes <= size; i += kTogether * kLanes)
            for (int part = 0; part < kTogether; ++part) {
                const Floats values = load(logits + i + part * kLanes);
                is_nan |= where_nan(values);
                best[part] = max(values, best[part]);
            }
        for (; i < size; i += kLanes) {
            const Floats values = at(i);
            is_nan |= where_nan(values);
            best[0] = max(values, best[0]);
        }
        if (set_lanes(is_nan)) return std::numeric_limits<float>::quiet_NaN();
        return max_lane(max(max(best[0], best[1]), max(best[2], best[3])));
    }

    // The first token from `first` on whose logit is no lower than `lowest`, which one of them must reach.
    int64_t first_from(int64_t first, float lowest) const {
        for (int64_t i = first;; i += kLanes)
            if (const uint32_t found = set_lanes((Ints)(at(i) >= splat(lowest)))) return i + __builtin_ctz(found);
    }
};

// Scores in fp32: logits less the highest, over the temperature.
struct Scores {
    float highest, temperature;

    Floats operator()(Floats logits) const {
        const Floats below = logits - splat(highest);
        return temperature == 1.0f ? below : below / splat(temperature);
    }
    float of(float logit) const { return (logit - highest) / temperature; }

    // A logit that every score from `score` on exceeds, errors of both included.
    float logit_below(double score) const { return round_down(highest + score * temperature); }
};

// Steps of scores on the filters' grid, to the nearest, ties to even; 1 for the highest.
Ints steps_of(Floats scores) {
    const Floats magic = splat(0x1.8p23f);  // a float of this size has no fraction
    const Floats steps = min(scores * static_cast<float>(-kStepsPerNat), splat(static_cast<float>(kNumSteps - 1)));
    return as_ints(steps + magic) - as_ints(magic) + 1;
}

// What the filters keep besides the most likely token: all tokens of steps before `last_step`, and its first ones.
struct Kept {
    int32_t last_step;
    int64_t num_of_last;
};

// Walks along the histogram of a row's steps. Weights are summed in their order, as torch sums them.
struct Walk {
    const uint32_t* counts;
    const double* weights;
    int32_t step = 0;
    int64_t num_tokens = counts[0];
    double weight = counts[0] * weights[0];

    void next() {
        ++step;
        num_tokens += counts[step];
        weight += counts[step] * weights[step];
    }
};

Kept filtered(const Row& row, const Scores& scores, const Settings& settings, const double* weights) {
    uint32_t counts[kNumSteps + 1] = {};
    int32_t steps[kLanes];
    for (int64_t i = 0; i < row.size; i += kLanes) {
        store(steps, steps_of(scores(row.at(i))));
        const int64_t count = std::min<int64_t>(kLanes, row.size - i);
        for (int lane = 0; lane < count; ++lane) ++counts[steps[lane]];
    }
    --counts[1];  // the most likely token has step 0 to itself
    ++counts[0];

    Walk walk{counts, weights};
    while (walk.step < settings.num_steps) walk.next();
    int64_t num_cached = std::min(walk.num_tokens, static_cast<int64_t>(settings.top_k));
    if (settings.top_p < 1.0) {
        walk = Walk{counts, weights};
        while (walk.num_tokens < num_cached) walk.next();
        const double surplus = static_cast<double>(walk.num_tokens - num_cached) * weights[walk.step];
        const double target = settings.top_p * (walk.weight - surplus);
        walk = Walk{counts, weights};
        while (walk.weight < target && walk.step < kNumSteps) walk.next();
        const double beyond = std::floor((walk.weight - target) / weights[walk.step]);
        num_cached = std::max<int64_t>(1, std::min(num_cached, walk.num_tokens - static_cast<int64_t>(beyond)));
    }
    walk = Walk{counts, weights};
    while (walk.num_tokens < num_cached) walk.next();
    return {walk.step, num_cached - walk.num_tokens + counts[walk.step]};
}

// 31 random bits for each token.
struct Noise {
    uint32_t factor, offset;
    Words lanes = (Words)lane_numbers() * factor + offset;

    // Of kLanes tokens from `first` on.
    Ints bits(int64_t first) const {
        Words mixed = lanes + static_cast<uint32_t>(first) * factor;
        mixed ^= mixed >> 16;
        mixed *= 0x21F0AAADu;
        mixed ^= mixed >> 15;
        mixed *= 0x735A2D97u;
        mixed ^= mixed >> 15;
        return (Ints)(mixed & 0x7fffffffu);
    }

    // Gumbel noise v -> -log(-log(1 - v)) of v = (bits + 1/2) / 2^31.
    static double gumbel(int32_t bits) { return -logarithm(-std::log1p((bits + 0.5) * -0x1p-31)); }

    // By log1p: `log` of a newer C library would ask for glibc 2.29.
    static double logarithm(double value) {
        int exponent;
        double fraction = std::frexp(value, &exponent);  // in [1/2, 1)
        if (fraction < 0.7071) {
            fraction *= 2;
            --exponent;
        }
        return exponent * kLog2 + std::log1p(fraction - 1);
    }

    // An upper bound of `gumbel`, within a tenth where noise is high: -log(1 - v) > v, and the bits of a float, read
    // as a number, are at most its logarithm.
    static Floats most(Ints bits) {
        const Floats numbers = __builtin_convertvector(bits, Floats) + 0.5f;
        const Floats logs = __builtin_convertvector(as_ints(numbers), Floats);
        return splat(static_cast<float>((127 + 31) * kLog2 + kSlack)) - logs * static_cast<float>(kLog2 * 0x1p-23);
    }
};

// The best token so far, and its key in fp64.
struct Best {
    const Row& row;
    const Scores& scores;
    double temperature;
    int64_t token = 0;
    double key = -std::numeric_limits<double>::infinity();

    void offer(int64_t candidate, int32_t bits) {
        const double below = static_cast<double>(row.logits[candidate]) - static_cast<double>(scores.highest);
        const double candidate_key = below / temperature + Noise::gumbel(bits);
        if (candidate_key < key || (candidate_key == key && candidate > token)) return;
        key = candidate_key;
        token = candidate;
    }
};

// Offers the tokens of a vector whose bit is set in `lanes`.
void offer_lanes(Best& best, int64_t first, uint32_t lanes, Ints bits) {
    for (; lanes; lanes &= lanes - 1) {
        const int lane = __builtin_ctz(lanes);
        best.offer(first + lane, bits[lane]);
    }
}

// A bit for each token of a vector that the filters keep. The last step keeps `num_left` more tokens, in order of ids,
// and does not count tokens of `ignored`.
uint32_t kept_lanes(Floats scores, const Kept& kept, uint32_t ignored, int64_t& num_left) {
    const Ints steps = steps_of(scores);
    uint32_t lanes = set_lanes((Ints)(steps < kept.last_step));
    uint32_t last = set_lanes((Ints)(steps == kept.last_step)) & ~ignored;
    for (; last && num_left > 0; last &= last - 1) {
        lanes |= last & -last;
        --num_left;
    }
    return lanes;
}

// The drawn token; -1 where torch has to draw: NaN, no finite highest logit, or a temperature not normal in fp32.
int64_t draw(const Row& row, const Settings& settings, const double* weights) {
    const float highest = row.highest();
    if (!std::isfinite(highest)) return -1;
    if (settings.temperature <= 0.0) return row.first_from(0, highest);
    const Scores scores{highest, static_cast<float>(settings.temperature)};
    if (!std::isnormal(scores.temperature)) return -1;

    // The first of the highest scores: a division may make scores of other logits equal.
    int64_t likeliest = -1;
    do likeliest = row.first_from(likeliest + 1, scores.logit_below(-0x1p-149));
    while (scores.of(row.logits[likeliest]) != 0.0f);

    const bool is_filtered =
        settings.num_steps < kNumSteps || settings.top_k < static_cast<double>(row.size) || settings.top_p < 1.0;
    Kept kept = is_filtered ? filtered(row, scores, settings, weights) : Kept{kNumSteps + 1, 0};
    const auto number = [](double value) { return static_cast<uint32_t>(static_cast<int64_t>(value)); };
    const Noise noise{number(settings.noise_keys[0]) | 1, number(settings.noise_keys[1])};
    Best best{row, scores, settings.temperature};
    best.offer(likeliest, noise.bits(likeliest)[0]);
    if (kept.last_step == 0) return best.token;

    // Tokens with lower logits cannot be drawn.
    float lowest = -kInfinity;
    if (kept.last_step < kNumSteps) lowest = scores.logit_below(-kept.last_step / static_cast<double>(kStepsPerNat));
    if (!is_filtered) lowest = scores.logit_below(best.key - kMostNoise - kSlack);
    for (int64_t first = 0; first < row.size; first += kTogether * kLanes) {
        const int64_t end = std::min(first + kTogether * kLanes, row.size);
        Floats logits[kTogether];
        for (int part = 0; part < kTogether; ++part)
            logits[part] = first + part * kLanes < end ? row.at(first + part * kLanes) : splat(-kInfinity);
        const Floats most = max(max(logits[0], logits[1]), max(logits[2], logits[3]));
        if (!set_lanes((Ints)(most >= splat(lowest)))) continue;
        for (int64_t i = first; i < end; i += kLanes) {
            const Floats values = scores(logits[(i - first) / kLanes]);
            uint32_t lanes = ~0u;
            if (is_filtered) {
                const int64_t place = likeliest - i;
                lanes = kept_lanes(values, kept, place >= 0 && place < kLanes ? 1u << place : 0, kept.num_of_last);
                if (!lanes) continue;
            }
            const Ints bits = noise.bits(i);
            lanes &= set_lanes((Ints)(values + Noise::most(bits) >= splat(round_down(best.key))));
            if (!lanes) continue;
            offer_lanes(best, i, lanes, bits);
            if (!is_filtered) lowest = scores.logit_below(best.key - kMostNoise - kSlack);
        }
    }
    return best.token;
}

// The highest logits of a row, of equal ones the lowest ids first, at most as many as there are tokens.
void find_top(const Row& row, int64_t count, float* values, int64_t* ids) {
    int64_t num_found = 0;
    for (int64_t first = 0; first < row.size; first += kLanes) {
        const Floats logits = row.at(first);
        uint32_t lanes = (uint64_t{1} << std::min<int64_t>(kLanes, row.size - first)) - 1;
        if (num_found == count) lanes &= set_lanes((Ints)(logits > splat(values[count - 1])));
        for (; lanes; lanes &= lanes - 1) {
            const int lane = __builtin_ctz(lanes);
            if (num_found == count && !(logits[lane] > values[count - 1])) continue;
            int64_t place = num_found == count ? count - 1 : num_found++;
            for (; place > 0 && logits[lane] > values[place - 1]; --place) {
                values[place] = values[place - 1];
                ids[place] = ids[place - 1];
            }
            values[place] = logits[lane];
            ids[place] = first + lane;
        }
    }
}

// The token ids of a sequence that lie in the vocabulary, each once. Calls `visit` with an id and how often it occurs.
template <class Visit>
void for_each_id(const int32_t* ids, int64_t num_ids, int64_t size, Visit visit) {
    static thread_local std::vector<int32_t> counts;  // zeros between calls, so that no call passes over all
    if (static_cast<int64_t>(counts.size()) < size) counts.resize(size);
    const auto is_known = [=](int32_t id) { return id >= 0 && id < size; };
    for (int64_t i = 0; i < num_ids; ++i)
        if (is_known(ids[i])) ++counts[ids[i]];
    for (int64_t i = 0; i < num_ids; ++i)
        if (is_known(ids[i]) && counts[ids[i]]) {
            visit(ids[i], counts[ids[i]]);
            counts[ids[i]] = 0;
        }
}

}  // namespace

extern "C" {

// Draws a token of each row of `size` logits, which begins at an address of `rows`; -1 where torch has to. `weights` of
// the filters' steps: kNumSteps + 1.
void pdmesh_draw(
    const float* const* rows, const Settings* settings, const double* weights, int64_t* tokens, int64_t num_rows,
    int64_t size, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i) tokens[i] = draw(Row{rows[i], size}, settings[i], weights);
}

// The `count` highest logits of each row of `size`, which are at least as many, and their tokens.
void pdmesh_top(
    const float* logits, float* values, int64_t* ids, int64_t num_rows, int64_t size, int64_t count,
    int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1 && num_rows > 1)
    for (int64_t i = 0; i < num_rows; ++i)
        find_top(Row{logits + i * size, size}, count, values + i * count, ids + i * count);
}

// Sets the logits of tokens without a bit in `allowed`, lowest first, to -inf.
void pdmesh_keep_allowed(float* logits, const uint8_t* allowed, int64_t size) {
    for (int64_t first = 0; first < size; first += 8) {
        const uint8_t bits = allowed[first / 8];
        if (bits == 0xff) continue;
        const int64_t count = std::min<int64_t>(8, size - first);
        for (int64_t i = 0; i < count; ++i) logits[first + i] = bits >> i & 1 ? logits[first + i] : -kInfinity;
    }
}

// Divides logits of tokens among `ids` by `repetition`, or multiplies negative ones.
void pdmesh_penalize_repetition(float* logits, const int32_t* ids, int64_t num_ids, int64_t size, float repetition) {
    for_each_id(ids, num_ids, size, [=](int32_t id, int32_t) {
        logits[id] = logits[id] < 0 ? logits[id] * repetition : logits[id] / repetition;
    });
}

// Lowers logits of tokens among `ids` by `presence`, and by `frequency` for each time that they occur.
void pdmesh_penalize_counts(
    float* logits, const int32_t* ids, int64_t num_ids, int64_t size, double frequency, double presence) {
    for_each_id(ids, num_ids, size, [=](int32_t id, int32_t count) {
        logits[id] -= static_cast<float>(frequency * count + presence);
    });
}

}  // extern "C"
