// Samples tokens: the best logit, or the best of logits / temperature + the keyed noise of `ops/noise.py`. A block reduces one
// part of a row's logits, then one block merges the parts. If the vocabulary is split over devices, the first device merges
// the parts of all devices, which lie one after the other. A device's parts lie as [score, bounds, token].

struct Choice {
    const float *logits;       // [L, V]
    const float *temperature;  // [L]; 0: greedy
    const i64 *key;            // [L]
    const i64 *ids;            // [V]: the token of each logit; null: logit i is of token first + i
    double *score;             // [L, parts]
    float *bounds;             // [L, parts, 2]: lowest, highest logit; highest is NaN if one is not finite
    i64 *token;                // [L, parts]
    i64 *chosen;               // [2, L]: tokens, then 1 if the logits are finite and not all equal
    i64 *landing;              // the same in host memory; may be null
    int vocabulary, parts, rows, first, devices;  // first: token of the first logit. parts: per device
};

DEVICE double noise(u64 key, u64 id) {
    u64 z = key + id * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return -log(-log(fmin((double(z >> 11) + 0.5) * 0x1p-53, 1.0 - 0x1p-53)));
}

struct Best {
    double score;
    i64 token;
    float low, high;
    bool sound;
    DEVICE void join(double s, i64 t, float l, float h, bool ok) {
        if (s > score || (s == score && t < token)) score = s, token = t;
        low = fminf(low, l), high = fmaxf(high, h), sound = sound && ok;
    }
    DEVICE void reduce(double *scores, i64 *tokens, float *bounds) {  // over the block; shared [32], [32], [64]
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        for (int pass = 0; pass < 2; ++pass) {
            for (int i = 16; i; i >>= 1) {
                double s = __shfl_xor_sync(~0u, score, i);
                i64 t = __shfl_xor_sync(~0u, token, i);
                float l = __shfl_xor_sync(~0u, low, i), h = __shfl_xor_sync(~0u, high, i);
                join(s, t, l, h, __shfl_xor_sync(~0u, int(sound), i));
            }
            if (pass) return;
            if (lane == 0) {
                scores[warp] = score, tokens[warp] = token, bounds[2 * warp] = low;
                bounds[2 * warp + 1] = sound ? high : __int_as_float(0x7fffffff);
            }
            __syncthreads();
            const bool mine = lane < blockDim.x / 32;
            score = mine ? scores[lane] : -1e308, token = mine ? tokens[lane] : 0x7fffffff;
            low = mine ? bounds[2 * lane] : 3e38f, high = mine ? bounds[2 * lane + 1] : -3e38f;
            sound = high == high;
            high = sound ? high : 0;
        }
    }
};

// Finds the best logit of a part without noise, four logits per load. begin and end are multiples of four.
DEVICE void best_logit(Best &best, const float *logits, int begin, int end) {
    float top = -3.4e38f, low = 3e38f, high = -3e38f, odd = 0;
    int token = 0x7fffffff;
    const float4 *quads = reinterpret_cast<const float4 *>(logits);
#pragma unroll 4
    for (int i = begin / 4 + threadIdx.x; i < end / 4; i += 256) {
        const float4 four = __ldcg(quads + i);
        const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (x[j] > top) top = x[j], token = 4 * i + j;
            low = fminf(low, x[j]), high = fmaxf(high, x[j]), odd += x[j] - x[j];  // NaN unless all are finite
        }
    }
    best.join(top, token, low, high, odd == 0);
}

// Grid [parts, rows], 256 threads.
DEVICE void choose_part(const Choice &a) {
    __shared__ double scores[32];
    __shared__ i64 tokens[32];
    __shared__ float bounds[64];
    const int row = blockIdx.y, part = blockIdx.x, size = (a.vocabulary + 4 * a.parts - 1) / (4 * a.parts) * 4;
    const float *logits = a.logits + i64(row) * a.vocabulary;
    const float temperature = a.temperature[row];
    const u64 key = u64(a.key[row]);
    Best best{-1e308, 0x7fffffff, 3e38f, -3e38f, true};
    const int begin = part * size, end = min(begin + size, a.vocabulary);
    if (temperature == 0 && a.vocabulary % 4 == 0)
        best_logit(best, logits, begin, end);
    else for (int i = begin + threadIdx.x; i < end; i += 256) {
        const float x = __ldcg(logits + i);
        best.join(temperature == 0 ? double(x) : double(x) / fmax(double(temperature), 1e-9) + noise(key, a.ids ? a.ids[i] : a.first + i), i, x, x,
                  x - x == 0);
    }
    best.reduce(scores, tokens, bounds);
    if (threadIdx.x == 0) {
        const i64 at = i64(row) * a.parts + part;
        a.score[at] = best.score, a.token[at] = best.token + a.first, a.bounds[2 * at] = best.low;
        a.bounds[2 * at + 1] = best.sound ? best.high : __int_as_float(0x7fffffff);
    }
}

// Grid [rows], 32 threads.
DEVICE void choose(const Choice &a) {
    const int row = blockIdx.x;
    Best best{-1e308, 0x7fffffff, 3e38f, -3e38f, true};
    for (int p = threadIdx.x; p < a.devices * a.parts; p += 32) {
        const i64 at = i64(p / a.parts * 3 * a.rows + row) * a.parts + p % a.parts;
        const float high = a.bounds[2 * at + 1];
        best.join(a.score[at], a.token[at], a.bounds[2 * at], high == high ? high : 0, high == high);
    }
    for (int i = 16; i; i >>= 1) {
        double s = __shfl_xor_sync(~0u, best.score, i);
        i64 t = __shfl_xor_sync(~0u, best.token, i);
        float l = __shfl_xor_sync(~0u, best.low, i), h = __shfl_xor_sync(~0u, best.high, i);
        best.join(s, t, l, h, __shfl_xor_sync(~0u, int(best.sound), i));
    }
    if (threadIdx.x == 0) {
        const i64 place = best.token < a.vocabulary ? best.token : 0, token = a.ids ? a.ids[place] : place;
        const i64 sound = best.sound && best.high - best.low >= 1e-6f;
        a.chosen[row] = token, a.chosen[a.rows + row] = sound;
        if (a.landing) a.landing[row] = token, a.landing[a.rows + row] = sound;
    }
}
