// The scan over the chunks of a row (delta.cuh): with wgmma, which only compute capability 9.0 has, or with mma.sync.

struct DeltaScan {
    const u16 *tiles, *terms;
    const float *gates;
    State *state;  // [slots, Hv, D, D]; State: gdn.cuh
    u16 *core;     // [T, Hv * D]
    const i64 *starts, *done, *source, *target, *firsts, *emit_row, *emit_length, *emit_slot;  // firsts: first chunk of a row
    int key_heads, value_heads, tiled, row, emits;  // row: the first of several tokens; emits: state checkpoints
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// wgmma, asynchronous: d [64, N] = d * keep + SIGN a b. Warp w has rows 16 w ... of d in the layout of mma. a [64, 16] is in
// registers. b is a descriptor of [N, 16] in shared memory if N = 64, else of [16, N].
DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
template <int SIGN> DEVICE void multiply_64(float (&d)[32], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, %38, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(SIGN));
}
DEVICE void multiply_128(float (&d)[64], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
DEVICE void multiply_32(float (&d)[16], const u32 (&a)[4], u64 b, int keep) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
template <int D> DEVICE void multiply_state(float (&d)[D / 2], const u32 (&a)[4], u64 b) {
    if constexpr (D == 128) multiply_128(d, a, b, 1);
    else multiply_32(d, a, b, 1);
}
// Descriptors of a tile of D columns as right operand. Step s sums over 16 columns of it (`columns_step`), or 16 rows.
template <int D> DEVICE u64 descriptor(u32 address) {
    constexpr u64 WIDE = D >= 64, EIGHT_ROWS = WIDE ? 1024 : 512;
    return u64((address & 0x3ffff) >> 4) | (u64(CHUNK * 128 >> 4) << 16) | (EIGHT_ROWS >> 4 << 32)
           | ((WIDE ? 1ull : 2ull) << 62);
}
template <int D> DEVICE u64 columns_step(u32 tile, int s) {
    return descriptor<D>(tile + (D >= 64 ? (s >> 2) * (CHUNK * 128) + (s & 3) * 32 : s * 32));
}
template <int D> DEVICE u64 rows_step(u32 tile, int s) { return descriptor<D>(tile + s * 16 * (D >= 64 ? 128 : 64)); }

template <int SIGN, int D> DEVICE void add_columns(float (&d)[32], const u32 (&a)[4], u32 tile, int s, int keep) {
    multiply_64<SIGN>(d, a, columns_step<D>(tile, s), keep);
}
template <int D> DEVICE void add_rows(float (&d)[D / 2], const u32 (&a)[4], u32 tile, int s) {
    multiply_state<D>(d, a, rows_step<D>(tile, s));
}
constexpr __device__ bool WARP_GROUPS = true;
#else  // the same products with mma.sync, one instruction after the other
DEVICE void begin_products() {}
DEVICE void end_products() {}
template <int N> DEVICE void await_products() {}
template <int SIGN, int D> DEVICE void add_columns(float (&d)[32], const u32 (&a)[4], u32 tile, int s, int keep) {
    const int lane = threadIdx.x & 31;
    const u32 sign = SIGN < 0 ? 0x80008000u : 0u;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        u32 right[4];
        load_matrices<false>(right, tile + tile_unit<D>(n * 16 + (lane & 7) + (lane >> 4) * 8, s * 2 + (lane >> 3 & 1)) * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float(&part)[4] = *(float(*)[4])&d[n * 8 + half * 4];
            if (!keep) part[0] = part[1] = part[2] = part[3] = 0;
            multiply(part, a[0] ^ sign, a[1] ^ sign, a[2] ^ sign, a[3] ^ sign, right[half * 2], right[half * 2 + 1]);
        }
    }
}
template <int D> DEVICE void add_rows(float (&d)[D / 2], const u32 (&a)[4], u32 tile, int s) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
        u32 right[4];
        load_matrices<true>(right, tile + tile_unit<D>(s * 16 + (lane & 15), n * 2 + (lane >> 4)) * 16);
        multiply(*(float(*)[4])&d[n * 8], a[0], a[1], a[2], a[3], right[0], right[1]);
        multiply(*(float(*)[4])&d[n * 8 + 4], a[0], a[1], a[2], a[3], right[2], right[3]);
    }
}
constexpr __device__ bool WARP_GROUPS = false;
#endif

DEVICE void arrive(int barrier) { asm volatile("bar.arrive %0, 256;" :: "r"(barrier) : "memory"); }
DEVICE void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory"); }

// Grid [D / C, Hv, rows]: two warp groups for C columns of a state. The first group holds the state and computes the updates
// u. The second group computes the outputs, up to a chunk later, and gets its operands through `published`. All matrices are
// transposed, so that state and updates stay in registers: a result has the layout of a left operand. Warp w has columns
// 16 w ... of the state.
// With wgmma, chunks arrive by bulk copies, STAGES at a time. Without it there is room for one chunk, and each group copies
// its own operands: W and U of the next chunk while the state is updated with this chunk's keys, and the next chunk's keys
// while its W is multiplied.
template <int D> struct Scan {
    using Shape = DeltaShape<D>;
    // Named barriers. STATE, UPDATES: these are in `published`. TAKEN: both were read. OUTPUTS, STATES: within a group.
    static constexpr int STEPS = Shape::STEPS, C = Shape::COLUMNS, STATE = 1, UPDATES = 2, TAKEN = 3, OUTPUTS = 4, STATES = 5;
    // A stage: q at byte 0, k at T, W at 2 T, P at 3 T, then U's columns, gates, and without wgmma gates again.
    static constexpr int T = Shape::TILE, P = Shape::SCORES, GATES = 4 * CHUNK * 4;
    const DeltaScan &a;
    unsigned char *memory;
    uint4 *published;  // [STEPS + 4, 128]: state, then updates, in bfloat16
    u32 barriers;
    int tid, warp, lane, g, q, block, head, row, tokens, from, chunks;
    i64 start, done, first_chunk;

    DEVICE Scan(const DeltaScan &args, unsigned char *shared) : a(args) {
        memory = shared + (-shared_address(shared) & 1023);
        published = (uint4 *)(memory + (WARP_GROUPS ? Shape::STAGES * Shape::STAGE : Shape::STAGE + GATES));
        barriers = shared_address(published + (STEPS + 4) * 128);
        tid = threadIdx.x & 127, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
        block = blockIdx.x, head = blockIdx.y, row = a.row + blockIdx.z;
        start = a.starts[row], done = a.done[row], tokens = int(a.starts[row + 1] - start), first_chunk = a.firsts[row];
        from = a.tiled ? head % a.key_heads : head / (a.value_heads / a.key_heads);
        chunks = (tokens + CHUNK - 1) / CHUNK;
    }
    DEVICE bool has_columns() const { return C == 64 || warp * 16 < C; }
    DEVICE State *state_at(i64 slot) const {  // address of s[0]
        return a.state + ((slot * a.value_heads + head) * D + q * 2) * D + block * C + warp * 16 + g;
    }
    DEVICE static int offset(int i) { return ((i >> 2) * 8 + (i & 1)) * D + (i >> 1 & 1) * 8; }
    DEVICE void store_state(i64 slot, const float (&x)[D / 2]) const {
        if (!has_columns()) return;
        State *to = state_at(slot);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) put(to + offset(i), x[i]);
    }
    template <int N> DEVICE void publish(int at, const u32 (&x)[N][4]) const {
#pragma unroll
        for (int k = 0; k < N; ++k) published[(at + k) * 128 + tid] = make_uint4(x[k][0], x[k][1], x[k][2], x[k][3]);
    }
    template <int N> DEVICE void take(u32 (&x)[N][4], int at) const {
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const uint4 v = published[(at + k) * 128 + tid];
            x[k][0] = v.x, x[k][1] = v.y, x[k][2] = v.z, x[k][3] = v.w;
        }
    }
    template <int N> DEVICE static void narrow_all(u32 (&y)[N][4], const float (&x)[N * 8]) {
#pragma unroll
        for (int k = 0; k < N; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) y[k][i] = narrow2(x[k * 8 + i * 2], x[k * 8 + i * 2 + 1]);
    }
    // x = y diag(factor): one factor for each token.
    DEVICE void scale_tokens(float (&x)[32], const float (&y)[32], const float *factor) const {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const float2 f = *(const float2 *)(factor + n * 8 + q * 2);
            x[n * 4] = y[n * 4] * f.x, x[n * 4 + 1] = y[n * 4 + 1] * f.y;
            x[n * 4 + 2] = y[n * 4 + 2] * f.x, x[n * 4 + 3] = y[n * 4 + 3] * f.y;
        }
    }
    // Stores the state checkpoints after tokens of this chunk, except after its last token. s: state before the chunk.
    // v: the chunk's updates.
    DEVICE void emit(const float (&s)[D / 2], const float (&v)[32], int first, int count, const float *sums,
                     const float *unit, u32 tile_k) const {
        for (int e = 0; e < a.emits; ++e) {
            if (a.emit_row[e] != row) continue;
            const int last = int(a.emit_length[e] - done - 1 - first);
            if (last < 0 || last >= count - 1) continue;
            float x[D / 2], y[32];
            u32 u[4][4];
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const int t = (i >> 2) * 8 + q * 2 + (i & 1);
                y[i] = t <= last ? v[i] * exponential(sums[last] - sums[t]) * unit[t] : 0.f;
            }
            narrow_all<4>(u, y);
#pragma unroll
            for (int i = 0; i < D / 2; ++i) x[i] = s[i] * exponential(sums[last]);
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int n = 0; n < D / 16; ++n) {
                    u32 right[4];
                    load_matrices<true>(right, tile_k + tile_unit<D>(k * 16 + (lane & 15), n * 2 + (lane >> 4)) * 16);
                    multiply(*(float(*)[4])&x[n * 8], u[k][0], u[k][1], u[k][2], u[k][3], right[0], right[1]);
                    multiply(*(float(*)[4])&x[n * 8 + 4], u[k][0], u[k][1], u[k][2], u[k][3], right[2], right[3]);
                }
            store_state(a.emit_slot[e], x);
        }
    }
    // Copies a part of a chunk to byte `to` of the stage, by the threads of a group.
    DEVICE void copy(int to, const void *from, int bytes) const {
        for (int at = tid * 16; at < bytes; at += 128 * 16) copy_async<16>(shared_address(memory) + to + at, (const char *)from + at);
    }
    DEVICE const unsigned char *terms_of(int chunk) const {
        return (const unsigned char *)a.terms + ((first_chunk + chunk) * a.value_heads + head) * Shape::TERMS;
    }
    DEVICE const u16 *tiles_of(int chunk) const {
        return a.tiles + (first_chunk + chunk) * (2 * a.key_heads + a.value_heads) * CHUNK * D + from * CHUNK * D;
    }
    DEVICE const float *gates_of(int chunk) const { return a.gates + ((first_chunk + chunk) * a.value_heads + head) * 4 * CHUNK; }
    DEVICE void copy_updates(int chunk) const {
        if (chunk >= chunks) return;
        copy(2 * T, terms_of(chunk), T);
        copy(3 * T + P, terms_of(chunk) + T + P + block * Shape::SLICE, Shape::SLICE);
    }
    DEVICE void copy_keys(int chunk) const {
        copy(T, tiles_of(chunk) + a.key_heads * CHUNK * D, T);
        copy(3 * T + P + Shape::SLICE, gates_of(chunk), GATES);
    }
    DEVICE void copy_queries(int chunk) const {
        copy(0, tiles_of(chunk), T);
        copy(3 * T, terms_of(chunk) + T, P);
        copy(3 * T + P + Shape::SLICE + GATES, gates_of(chunk), GATES);
    }
    // First group: waits for W and U of a chunk. No warp reads the previous chunk's keys afterwards.
    DEVICE void await_updates(int chunk) const {
        if constexpr (WARP_GROUPS) return await_stage(chunk);
        await_copies();
        meet(STATES, 128);
        copy_keys(chunk);
    }
    // First group: waits for keys and gates of a chunk. No warp reads its W and U afterwards.
    DEVICE void await_keys(int chunk) const {
        if constexpr (WARP_GROUPS) return;
        await_copies();
        meet(STATES, 128);
        copy_updates(chunk + 1);
    }
    // Second group: waits for q, P and gates of a chunk.
    DEVICE void await_queries(int chunk) const {
        if constexpr (WARP_GROUPS) return await_stage(chunk);
        await_copies();
        meet(OUTPUTS, 128);
    }
    DEVICE void fetch(int chunk) const {
        const u32 to = shared_address(stage_of(chunk)), barrier = barriers + chunk % Shape::STAGES * 8;
        const i64 at = first_chunk + chunk;
        const u16 *tiles = a.tiles + at * (2 * a.key_heads + a.value_heads) * CHUNK * D;
        const unsigned char *terms = (const unsigned char *)a.terms + (at * a.value_heads + head) * Shape::TERMS;
        expect_bytes(barrier, Shape::STAGE);
        bulk_copy_kept(to + 2 * T, terms, T + P, barrier);
        bulk_copy_kept(to + 3 * T + P, terms + T + P + block * Shape::SLICE, Shape::SLICE, barrier);
        bulk_copy_kept(to, tiles + from * CHUNK * D, T, barrier);
        bulk_copy_kept(to + T, tiles + (a.key_heads + from) * CHUNK * D, T, barrier);
        bulk_copy_kept(to + 3 * T + P + Shape::SLICE, a.gates + (at * a.value_heads + head) * 4 * CHUNK, 4 * CHUNK * 4, barrier);
    }
    DEVICE int slice_unit(int n) const {  // the lane's unit for ldmatrix: tokens 8 n ... 8 n + 15, the warp's columns
        return tile_unit<C>(n * 8 + (lane & 7) + (lane >> 4) * 8, warp * 2 + (lane >> 3 & 1));
    }
    DEVICE const unsigned char *stage_of(int chunk) const { return WARP_GROUPS ? memory + chunk % Shape::STAGES * Shape::STAGE : memory; }
    DEVICE void await_stage(int chunk) const {
        await_barrier(barriers + chunk % Shape::STAGES * 8, chunk / Shape::STAGES & 1);
    }
    DEVICE void load_updates(float (&v)[32], int chunk) const {
        const u32 slice = shared_address(stage_of(chunk)) + 3 * Shape::TILE + Shape::SCORES;
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            u32 u[4] = {};
            if (has_columns()) load_matrices<true>(u, slice + slice_unit(n * 2) * 16);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[n * 8 + i * 2] = low(u[i]), v[n * 8 + i * 2 + 1] = high(u[i]);
        }
    }
    // Work on which the next products do not depend is done while other products run.
    template <bool EMITS> DEVICE void run_states() {
        float s[D / 2] = {}, v[32];  // [columns, D], [columns, tokens]
        u32 left[STEPS][4], u[4][4];
        if (done && has_columns()) {
            const State *from = state_at(a.source[row]);
#pragma unroll
            for (int i = 0; i < D / 2; ++i) s[i] = load(from + offset(i));
        }
        if constexpr (!WARP_GROUPS) copy_updates(0);
        narrow_all<STEPS>(left, s);
        await_updates(0);
        load_updates(v, 0);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const unsigned char *data = stage_of(chunk);
            const u32 tile_k = shared_address(data) + T, tile_w = tile_k + T;
            const float *gates = (const float *)(data + 3 * T + P + Shape::SLICE);
            const int first = chunk * CHUNK, count = min(CHUNK, tokens - first);
            begin_products();
#pragma unroll
            for (int k = 0; k < STEPS; ++k) add_columns<-1, D>(v, left[k], tile_w, k, 1);
            end_products();
            await_keys(chunk);
            if (chunk) meet(TAKEN, 256);
            publish<STEPS>(0, left);
            arrive(STATE);
            const float decay = exponential(gates[3 * CHUNK - 1]);
            float2 factors[8];
#pragma unroll
            for (int n = 0; n < 8; ++n) factors[n] = *(const float2 *)(gates + CHUNK + n * 8 + q * 2);
            if constexpr (!EMITS)
#pragma unroll
                for (int i = 0; i < D / 2; ++i) s[i] *= decay;
            await_products<0>();
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 f = factors[k * 2 + (i >> 1)];
                    u[k][i] = narrow2(v[k * 8 + i * 2] * f.x, v[k * 8 + i * 2 + 1] * f.y);
                }
            if constexpr (EMITS) {
                emit(s, v, first, count, gates + 2 * CHUNK, gates + 3 * CHUNK, tile_k);
#pragma unroll
                for (int i = 0; i < D / 2; ++i) s[i] *= decay;
            }
            begin_products();
#pragma unroll
            for (int k = 0; k < 4; ++k) add_rows<D>(s, u[k], tile_k, k);
            end_products();
            u32 plain[4][4];
            narrow_all<4>(plain, v);
            publish<4>(STEPS, plain);
            arrive(UPDATES);
            if (chunk + 1 < chunks) {
                await_updates(chunk + 1);
                load_updates(v, chunk + 1);
            }
            await_products<0>();
            narrow_all<STEPS>(left, s);
            if constexpr (EMITS)
                for (int e = 0; e < a.emits; ++e)
                    if (a.emit_row[e] == row && a.emit_length[e] == done + first + count) store_state(a.emit_slot[e], s);
        }
        meet(TAKEN, 256);
        arrive(STATE);
        store_state(a.target[row], s);
    }
    DEVICE void run_outputs() {
        if constexpr (!WARP_GROUPS) copy_queries(0);
        float o[32], inner[32];
        u32 left[STEPS][4], updates[4][4], rounded[4][4];
        for (int chunk = 0; chunk < chunks; ++chunk) {
            meet(STATE, 256);  // both groups have read the previous chunk's stage
            if (WARP_GROUPS && tid == 0 && chunk && chunk + Shape::STAGES - 1 < chunks) fetch(chunk + Shape::STAGES - 1);
            take<STEPS>(left, 0);
            meet(UPDATES, 256);
            take<4>(updates, STEPS);
            arrive(TAKEN);
            await_queries(chunk);
            const unsigned char *data = stage_of(chunk);
            const u32 tile_q = shared_address(data), tile_p = tile_q + 3 * T;
            const float *gates = (const float *)(data + 3 * T + P + Shape::SLICE + (WARP_GROUPS ? 0 : GATES));
            begin_products();
#pragma unroll
            for (int k = 0; k < STEPS; ++k) add_columns<1, D>(o, left[k], tile_q, k, k > 0);
#pragma unroll
            for (int k = 0; k < 4; ++k) add_columns<1, 64>(inner, updates[k], tile_p, k, k > 0);
            end_products();
            await_products<0>();
            scale_tokens(o, o, gates);
#pragma unroll
            for (int i = 0; i < 32; ++i) o[i] += inner[i];
            narrow_all<4>(rounded, o);
            meet(OUTPUTS, 128);  // P is free: its memory is used to transpose the outputs
            if (has_columns())
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    store_matrices<true>(tile_p + slice_unit(n * 2) * 16, rounded[n][0], rounded[n][1], rounded[n][2],
                                         rounded[n][3]);
            end_reads();
            meet(OUTPUTS, 128);
            const int first = chunk * CHUNK, count = min(CHUNK, tokens - first);
            u16 *to = a.core + (start + first) * (a.value_heads * D) + head * D + block * C;
#pragma unroll
            for (int i = 0; i < C / 16; ++i) {
                const int t = (tid + i * 128) / (C / 8), unit = tid % (C / 8);
                if (t < count)
                    *(uint4 *)(to + i64(t) * (a.value_heads * D) + unit * 8) =
                        ((const uint4 *)(data + 3 * T))[tile_unit<C>(t, unit)];
            }
            if constexpr (!WARP_GROUPS) {
                meet(OUTPUTS, 128);
                if (chunk + 1 < chunks) copy_queries(chunk + 1);
            }
        }
        meet(STATE, 256);
    }
    DEVICE void run() {
        if (WARP_GROUPS && threadIdx.x == 0) {
            for (int i = 0; i < Shape::STAGES; ++i) init_barrier(barriers + i * 8, 1);
            publish_barriers();
            for (int i = 0; i < Shape::STAGES && i < chunks; ++i) fetch(i);
        }
        __syncthreads();
        if (threadIdx.x >= 128) run_outputs();
        else if (a.emits) run_states<true>();
        else run_states<false>();
    }
};

template <int D> DEVICE void delta_scan(const DeltaScan &a) {
    launch_dependents();
    wait();
    extern __shared__ __align__(1024) unsigned char memory[];
    Scan<D>(a, memory).run();
}
