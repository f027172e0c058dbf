// Kernels of a draft head (multi-token prediction): those between the products of its layer, and `accept`, which compares
// drafts with the model's draws and prepares the next drafts.

struct HeadEnter {
    const i64 *ids, *positions;   // [T], [3, T]
    const u16 *embedding;         // [V, H]; null: `embedded` has the tokens' embeddings
    const float *embedded;        // [T, H]
    const float *norm_embedding, *norm_hidden;
    const float *hidden;          // [T, H]: hidden states: the model's of the tokens, or the head's of the tokens before
    const float *norm;            // [H]: scale of a norm to apply to `hidden` first; null: none
    float *slots;                 // [S, H]: the model's hidden state of the token before a row; null: `hidden` is the head's
    const float *kept;            // [N, H]: the model's hidden states of the last step
    const i64 *taken;             // [R]: index in `kept` of the state to copy to the row's slot first; -1: none. May be null
    const float *frequencies;     // [rotary / 2]
    const i64 *axes;              // [rotary / 2]
    const i64 *count, *starts, *done, *source;
    u16 *x;                       // [T, 2 H]: the normed embedding, then the normed hidden state of the token before
    float *turns;                 // [T, rotary]
    float *last;                  // [T, H]: receives a copy of `hidden`; null: no copy
    float eps, factor;            // factor: scales cosines and sines
    int size, rotary, tokens;     // size: H
};

// Sums over a block of 256 threads. red: 8 floats of shared memory.
DEVICE float block_sum(float v, float *red) {
    v = warp_sum(v);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) red[threadIdx.x >> 5] = v;
    __syncthreads();
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += red[i];
    return sum;
}
DEVICE float square(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
DEVICE float4 scaled(float4 v, float factor, const float *norm) {
    const float4 n = __ldg((const float4 *)norm);
    return make_float4(v.x * factor * n.x, v.y * factor * n.y, v.z * factor * n.z, v.w * factor * n.w);
}

// One block of 256 threads per token. SIZE: H.
template <int SIZE> DEVICE void head_enter(const HeadEnter &a) {
    constexpr int PASSES = (SIZE + 1023) / 1024;
    __shared__ float red[8];
    launch_dependents();
    const int token = blockIdx.x, rows = int(*a.count), found = row_of(a.starts, rows, token), row = min(found, rows - 1);
    const bool first = a.slots && token == int(a.starts[row]), fresh = first && a.done[row] == 0;
    wait();
    if (found >= rows) return;
    const u16 *word = a.embedding ? a.embedding + a.ids[token] * a.size : nullptr;
    const float *row_of_table = a.embedded + i64(token) * a.size;
    float *const slot = first ? a.slots + a.source[row] * a.size : nullptr;
    const i64 taken = first && a.taken ? a.taken[row] : -1;
    const float *before = taken >= 0 ? a.kept + taken * a.size : first ? slot : a.hidden + i64(a.slots ? token - 1 : token) * a.size;
    float4 e[PASSES], h[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        const int i = p * 1024 + threadIdx.x * 4;
        if (word) {
            const uint2 w = i < a.size ? __ldg((const uint2 *)(word + i)) : make_uint2(0, 0);
            e[p] = make_float4(low(w.x), high(w.x), low(w.y), high(w.y));
        } else {
            e[p] = i < a.size ? load4(row_of_table + i) : make_float4(0, 0, 0, 0);
        }
        h[p] = i < a.size && !fresh ? load4(before + i) : make_float4(0, 0, 0, 0);
        if (taken >= 0 && i < a.size) *(float4 *)(slot + i) = h[p];
        if (a.last && i < a.size) *(float4 *)(a.last + i64(token) * a.size + i) = load4(a.hidden + i64(token) * a.size + i);
    }
    float sum_e = 0, sum_h = 0;
#pragma unroll
    for (int p = 0; p < PASSES; ++p) sum_e += square(e[p]), sum_h += square(h[p]);
    if (a.norm) {
        const float factor = rsqrtf(block_sum(sum_h, red) / a.size + a.eps);
        sum_h = 0;
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int i = p * 1024 + threadIdx.x * 4;
            if (i < a.size) h[p] = scaled(h[p], factor, a.norm + i);
            sum_h += square(h[p]);
        }
    }
    const float of_e = rsqrtf(block_sum(sum_e, red) / a.size + a.eps), of_h = rsqrtf(block_sum(sum_h, red) / a.size + a.eps);
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
        const int i = p * 1024 + threadIdx.x * 4;
        if (i >= a.size) continue;
        const float4 x = scaled(e[p], of_e, a.norm_embedding + i), y = scaled(h[p], of_h, a.norm_hidden + i);
        u16 *to = a.x + i64(token) * 2 * a.size + i;
        *(uint2 *)to = make_uint2(narrow2(x.x, x.y), narrow2(x.z, x.w));
        *(uint2 *)(to + a.size) = make_uint2(narrow2(y.x, y.y), narrow2(y.z, y.w));
    }
    const int half = a.rotary / 2;
    for (int i = threadIdx.x; i < half; i += 256) {
        const float angle = float(a.positions[a.axes[i] * a.tokens + token]) * a.frequencies[i];
        a.turns[token * a.rotary + i] = cosf(angle) * a.factor;
        a.turns[token * a.rotary + half + i] = sinf(angle) * a.factor;
    }
}

struct HeadKeys {
    const void *proj;       // [T, stride]: keys, then values
    const float *key_norm;
    const float *turns;     // [T, rotary]
    const float *last;      // [T, H]
    float *slots;           // [S, H]: receives the hidden state of each row's last token, except of rows with drafts
    u16 *keys, *values;     // [pages, PAGE, kv_heads, D] of type KV
    const i64 *count, *starts, *done, *target, *append, *pages;
    float eps;
    int kv_heads, stride, rotary, width, size;
};
// Stores keys and values of all tokens. One block of 256 threads per token.
template <int D, class In, class KV> DEVICE void head_keys(const HeadKeys &a) {
    constexpr int N = D / 32;
    __shared__ float buffers[8][D];
    launch_dependents();
    const int token = blockIdx.x, rows = int(*a.count), found = row_of(a.starts, rows, token), row = min(found, rows - 1);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, position = int(a.done[row]) + token - int(a.starts[row]);
    const int begin = int(a.starts[row]), end = int(a.starts[row + 1]);
    const bool ends = token + 1 == end && !(a.append && a.append[row] && end > begin + 1);
    wait();
    if (found >= rows) return;
    const In *from = (const In *)a.proj + i64(token) * a.stride;
    const i64 place = a.pages[i64(row) * a.width + position / PAGE] * PAGE + position % PAGE;
    for (int job = warp; job < 2 * a.kv_heads; job += 8) {
        float v[N];
        const int head = job % a.kv_heads;
        if (job < a.kv_heads) turn<D, kNormed>(v, from + head * D, nullptr, a.key_norm, a.turns + token * a.rotary, a.rotary, a.eps, buffers[warp]);
        else load_all<N>(v, from + (a.kv_heads + head) * D + lane * N);
        void *const pool = job < a.kv_heads ? a.keys : a.values;
        if constexpr (IS_INT4<KV>) store_int4<D>(pool, job < a.kv_heads, place, head, a.kv_heads, v);
        else store_all<N>((KV *)pool + (place * a.kv_heads + head) * D + lane * N, v);
    }
    for (int i = threadIdx.x; ends && i < a.size; i += 256) a.slots[a.target[row] * a.size + i] = __ldcg(a.last + i64(token) * a.size + i);
}

struct Accept {
    const i64 *count, *ids, *starts, *done, *positions, *source, *pages;  // of the step
    const i64 *chosen;         // [T]: the token that the model drew after each token; null: drafts follow the rows' tokens
    const i64 *keys;           // [R, key_width]: of the draws after the row's first token and the following ones
    const float *temperature;  // [T]; if `chosen` is null [R, key_width]
    i64 *next;                 // receives the integers of the next drafts, in the layout of `mtp.py`
    i64 *accepted;             // [rows, 2]: the token that the drafts follow, and its position
    int tokens, rows, drafts, width, key_width;  // tokens, rows: of the step's bucket, which the drafts share
};
// Accepts the leading drafts that equal the model's draws. The next drafts follow the model's draw after them. One block per
// row.
DEVICE void accept(const Accept &a) {
    const int row = blockIdx.x, rows = int(*a.count), real = min(row, rows - 1);
    const int start = int(a.starts[real]), chunk = int(a.starts[real + 1]) - start;
    int right = a.chosen ? 0 : -1;
    while (a.chosen && right + 1 < chunk && a.chosen[start + right] == a.ids[start + right + 1]) ++right;
    const i64 done = a.done[real] + right + 1, slot = a.source[real];
    const i64 token = a.chosen ? a.chosen[start + right] : a.ids[start];
    // layout of `next`: count, ids, starts, source; positions, done, keys of each draft; temperature, taken, pages
    i64 *ids = a.next + 1, *starts = ids + a.rows, *source = starts + a.rows + 1, *each = source + a.rows;
    const int step = 5 * a.rows;
    float *temperature = (float *)(each + i64(a.drafts) * step);
    i64 *taken = each + i64(a.drafts) * step + a.rows, *pages = taken + a.rows;
    if (threadIdx.x == 0) {
        if (row == 0) a.next[0] = rows, starts[0] = 0;
        ids[row] = token, starts[row + 1] = row + 1, source[row] = slot;
        a.accepted[2 * row] = token, a.accepted[2 * row + 1] = done;
        temperature[row] = a.temperature[a.chosen ? start : real * a.key_width];
        taken[row] = row < rows && a.chosen ? start + right : -1;
        for (int d = 0; d < a.drafts; ++d) {
            i64 *to = each + i64(d) * step;
            for (int axis = 0; axis < 3; ++axis)
                to[axis * a.rows + row] = a.positions[axis * a.tokens + start] + right + 1 + d;
            to[3 * a.rows + row] = done + d;
            to[4 * a.rows + row] = a.keys[real * a.key_width + right + 1 + d];
        }
    }
    for (int i = threadIdx.x; i < a.width; i += 256) pages[i64(row) * a.width + i] = a.pages[i64(real) * a.width + i];
}
