// The core of a Gated DeltaNet layer for rows of several tokens that end with drafts, and for rows with entries in
// their state delta log. A row that appends adds its tokens to its log and does not write its state, unless the log is full.
// The log is replayed on the state in registers, with the operations of `GatedDelta::update` in their order, so that the bits
// are the same. A block of four warps has BV columns of a value head, for all tokens of the row. The head's last block to end
// norms and gates it. New inputs, keys and decays go to scratch memory first, because other blocks still read the log;
// `append` moves them to the log later. Updates go to the log at once: no other block reads the block's columns.

struct Verify : Gdn {      // y: [T, Hv * DV] bf16
    const i64 *base, *unit, *append;
    const u16 *inputs;     // [units, RING, C]
    const float *keys;     // [units, RING, Hk, DK]
    float *updates;        // [units, RING, Hv, DV]
    const float *decays;   // [units, RING, Hv]
    u16 *new_inputs;       // [T, C]
    float *new_keys;       // [T, Hk, DK]
    float *new_decays;     // [T, Hv]
    float *core;           // [T, Hv * DV], before norm and gate
    int *ended;            // [rows, Hv]: slices that have ended; zero before and after the kernel
};

template <int DK, int DV, int BV, class In> struct VerifiedSlice : GatedDelta<DK, DV, BV, 1, false, In> {
    using Base = GatedDelta<DK, DV, BV, 1, false, In>;
    using Base::start, Base::done, Base::tokens, Base::source, Base::target, Base::head, Base::from, Base::slice;
    using Base::tid, Base::lane, Base::warp, Base::channels, Base::s, Base::history, Base::taps, Base::leads;
    static constexpr int PASS = 4, EACH = Base::EACH, ROWS = Base::ROWS, GROUPS = Base::GROUPS, COLUMNS = Base::COLUMNS,
                         CHANNELS = Base::CHANNELS, WARPS = Base::WARPS, SLICES = Base::SLICES;
    struct alignas(16) Room : Base::Shared {
        float more_parts[WARPS][2][BV], channels[PASS][CHANNELS], sums[PASS][EACH * WARPS];
        Factors factors[PASS];
        Rates rates[PASS];
        float squares[PASS][128 / BV];
        int last;
    };
    const Verify &v;
    Room &room;
    int row, base, append;
    i64 unit;

    DEVICE VerifiedSlice(const Verify &args, Room &shared, int first, const Place &place)
        : Base(args, shared, first, place), v(args), room(shared), row(place.row) {
        base = int(v.base[row]), append = v.append && v.append[row], unit = v.unit[row];
    }
    DEVICE i64 entry(int position) const { return unit * RING + (position & (RING - 1)); }
    // Loads the slot's state and replays the log's entries on it. Loads the three inputs before the first token.
    DEVICE void load_state() {
        const State *old = this->state(source) + this->place();
        const u64 policy = read_once();
        const int column = tid % COLUMNS, group = tid / COLUMNS;
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            s[i] = base ? load4_once(old + i * GROUPS * DV, policy) : make_float4(0, 0, 0, 0);
        const u16 *ring = v.ring + i64(source) * 4 * channels;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            taps[i] = this->mixes(i) ? __ldg((const uint2 *)v.conv + this->channel(i)) : make_uint2(0, 0);
#pragma unroll
            for (int p = 0; p < 3; ++p) {
                const int position = done - 3 + p;
                const u16 *at = position >= base ? v.inputs + entry(position) * channels : ring + (position & 3) * channels;
                history[i][p] = this->mixes(i) && position >= 0 ? load(at + this->channel(i)) : 0.f;
            }
        }
        for (int position = base; position < done; position += 4) {
            float k[4][ROWS], keep[4];
            float4 u[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (position + j >= done) continue;
                const i64 place = entry(position + j);
                keep[j] = __ldcg(v.decays + place * v.value_heads + head);
                u[j] = load4(v.updates + (place * v.value_heads + head) * DV + slice * BV + column * 4);
#pragma unroll
                for (int i = 0; i < ROWS; ++i)
                    k[j][i] = __ldcg(v.keys + (place * v.key_heads + from) * DK + group + i * GROUPS);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (position + j >= done) continue;
                const float taken[4] = {u[j].x, u[j].y, u[j].z, u[j].w};
#pragma unroll
                for (int i = 0; i < ROWS; ++i) s[i] = follow(s[i], k[j][i], taken, keep[j]);
            }
        }
    }
    // Stores the last three inputs before `end` in the target's convolution ring, except inputs that it has already.
    DEVICE void store_history(int end) {
        u16 *const to = this->ring();
#pragma unroll
        for (int i = 0; i < EACH; ++i)
#pragma unroll
            for (int p = 0; p < 3; ++p) {
                const int position = end - 3 + p;
                if (this->writes(i) && position >= 0 && (position >= base || source != target))
                    to[(position & 3) * channels + this->channel(i)] = narrow(history[i][p]);
            }
    }
    // Flushes the log if it has no room for the row's tokens after its entries: stores the state after `done` tokens.
    DEVICE void fold() {
        if (!append || done + tokens - base <= RING) return;
        const u64 policy = read_once();
        State *const to = this->state(target) + this->place();
#pragma unroll
        for (int i = 0; i < ROWS; ++i) store4_once(to + i * GROUPS * DV, s[i], policy);
        store_history(done);
    }
    // Convolves `count` tokens from `first` on. Warp t computes the gates and factors of the t-th of them.
    DEVICE void convolve(int first, int count) {
        float raws[PASS][EACH];
        Gates of{0, 0, 0, __ldg(v.decay + head), __ldg(v.dt_bias + head), 0};
#pragma unroll
        for (int t = 0; t < PASS; ++t)
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                raws[t][i] = t < count && this->mixes(i) ? load(this->inputs(first + t) + this->channel(i)) : 0.f;
        if (warp < count) {
            const In *gates = this->gates(first + warp);
            of.beta = load(gates + head), of.steep = load(gates + v.value_heads + head);
        }
#pragma unroll
        for (int t = 0; t < PASS; ++t) {
            if (t >= count) continue;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                float x = 0;
                if (this->mixes(i)) {
                    const u16 raw = narrow(raws[t][i]);
                    x = this->mix(i, raw);
                    this->shift(i, raw);
                    room.channels[t][this->local(i)] = x;
                    if (append && this->writes(i)) v.new_inputs[i64(start + first + t) * channels + this->channel(i)] = raw;
                }
                const float square = warp_sum(__fmul_rn(x, x));
                if (lane == 0) room.sums[t][this->local(i) / 32] = square;
            }
        }
        __syncthreads();
        if (warp < count) {
            const Factors f = this->factors(room.channels[warp], room.sums[warp]);
            const Rates r = Base::rates(of);
            if (lane == 0) room.factors[warp] = f, room.rates[warp] = r;
        }
        __syncthreads();
    }
    // Writes the keys and decays of `count` tokens from `first` on to scratch memory.
    DEVICE void append_entries(int first, int count) {
        for (int t = 0; t < count; ++t) {
            const i64 token = start + first + t;
            if (leads && tid < DK)
                v.new_keys[(token * v.key_heads + from) * DK + tid] = __fmul_rn(room.channels[t][DK + tid], room.factors[t].key);
            if (slice == 0 && tid == 0) v.new_decays[token * v.value_heads + head] = room.rates[t].keep;
        }
    }
    DEVICE void run() {
        for (int first = 0; first < tokens; first += PASS) {
            const int count = min(PASS, tokens - first);
            convolve(first, count);
            for (int t = 0; t < count; ++t) {
                const int token = first + t;
                const float *mixed = room.channels[t], *value = mixed + 2 * DK;
                const Factors f = room.factors[t];
                const Rates r = room.rates[t];
                // two buffers in turn, so that no warp overwrites sums that another warp still reads
                float (&parts)[WARPS][2][BV] = token & 1 ? room.more_parts : room.parts[0];
                this->project(mixed, f, parts);
                __syncthreads();
                if (tid < BV) {
                    float u;
                    v.core[this->output_place(token)] = this->output(value, f, r, parts, u);
                    if (append) v.updates[(entry(done + token) * v.value_heads + head) * DV + slice * BV + tid] = u;
                }
                this->update(mixed, value, f, r, parts,
                             !append && token + 1 == tokens ? this->state(target) : nullptr);
            }
            if (append) append_entries(first, count);
            __syncthreads();
        }
        if (!append) store_history(done + tokens);
    }
    // In the head's last block to end: norms and gates all of the row's tokens, as `GatedDelta` does.
    DEVICE void finish() {
        int *const ended = v.ended + row * v.value_heads + head;
        if (tid == 0) {
            room.last = count_up(ended) == SLICES - 1;
        }
        __syncthreads();
        if (!room.last) return;
        if (tid == 0) *ended = 0;
        constexpr int SIDE = 128 / DV;  // tokens at the same time
        const int column = tid % DV, side = tid / DV;
        const float scale = __ldg(v.norm + column);
        for (int first = 0; first < tokens; first += PASS * SIDE) {
            float found[PASS], gate[PASS];
#pragma unroll
            for (int j = 0; j < PASS; ++j) {
                const int token = first + j * SIDE + side;
                found[j] = token < tokens ? load(v.core + i64(start + token) * (v.value_heads * DV) + head * DV + column) : 0.f;
                gate[j] = token < tokens ? load(this->inputs(token) + channels + head * DV + column) : 0.f;
            }
#pragma unroll
            for (int j = 0; j < PASS; ++j) {
                float square = __fmul_rn(found[j], found[j]);
#pragma unroll
                for (int other = BV / 2; other; other >>= 1) square += __shfl_xor_sync(~0u, square, other);
                if (tid % BV == 0) room.squares[j][tid / BV] = square;
            }
            __syncthreads();
#pragma unroll
            for (int j = 0; j < PASS; ++j) {
                const int token = first + j * SIDE + side;
                float mean = 0;
#pragma unroll
                for (int i = 0; i < SLICES; ++i) mean += room.squares[j][side * SLICES + i];
                if (token < tokens)
                    ((u16 *)v.y)[i64(start + token) * (v.value_heads * DV) + head * DV + column] =
                        narrow(__fmul_rn(__fmul_rn(found[j], __fmul_rn(scale, silu(gate[j]))), rsqrtf(mean / DV + v.eps)));
            }
            __syncthreads();
        }
    }
};

// Grid [DV / BV * value heads of all rows], blocks of 128 threads.
template <int DK, int DV, int BV, class In> DEVICE void gdn_verify(const Verify &a) {
    using Slice = VerifiedSlice<DK, DV, BV, In>;
    __shared__ typename Slice::Room room;
    launch_dependents();
    const int item = blockIdx.x / Slice::SLICES;
    if (item / a.value_heads >= *a.count) return wait();
    Slice g(a, room, blockIdx.x % Slice::SLICES, Place::of(a, item));
    g.load_state();
    g.fold();
    wait();
    g.run();
    g.finish();
}

struct Append {
    const u16 *new_inputs;                // [layers, T, C]
    const float *new_keys, *new_decays;   // [layers, T, keys], [layers, T, Hv]
    u16 *inputs;                          // [layers, units, RING, C]
    float *keys, *decays;                 // [layers, units, RING, keys], [layers, units, RING, Hv]
    const i64 *count, *starts, *done, *unit, *append;
    int channels, key_size, value_heads, tokens, units;
};
// Copies a step's new entries from scratch memory to the rows' logs, for all layers. Grid [T, layers].
DEVICE void append(const Append &a) {
    launch_dependents();
    const int token = blockIdx.x, rows = int(*a.count), row = row_of(a.starts, rows, token);
    wait();
    if (row >= rows || !a.append[row]) return;
    const int place = int(a.done[row] + token - a.starts[row]) & (RING - 1);
    const i64 from = i64(blockIdx.y) * a.tokens + token, to = (i64(blockIdx.y) * a.units + a.unit[row]) * RING + place;
    const auto copy = [&](auto *target, const auto *source, int count) {
        for (int i = threadIdx.x; i < count; i += blockDim.x) target[to * count + i] = __ldcg(source + from * count + i);
    };
    copy((u32 *)a.inputs, (const u32 *)a.new_inputs, a.channels / 2);
    copy((float4 *)a.keys, (const float4 *)a.new_keys, a.key_size / 4);
    copy(a.decays, a.new_decays, a.value_heads);
}

struct Fold {
    const State *source_state;  // [layers, Hv, DK, DV]; *_step: elements from one layer to the next
    const u16 *source_conv;     // [layers, 4, C]
    State *state;
    u16 *conv;
    const u16 *inputs;          // [layers, RING, C]: of the log; keys, updates and decays alike
    const float *keys, *updates, *decays;
    i64 state_step, conv_step, inputs_step, keys_step, updates_step, decays_step;
    int key_heads, value_heads, key_dim, value_dim, channels, tiled, base, done;
};
// Flushes a delta log: applies its entries base .. done - 1 to the source slot's states and inputs, and writes the result to
// the target slot, which may be the same. Grid [Hv, parts, layers], blocks of 256 threads.
DEVICE void fold(Fold a) {
    const i64 layer = blockIdx.z;
    a.source_state += layer * a.state_step, a.state += layer * a.state_step;
    a.source_conv += layer * a.conv_step, a.conv += layer * a.conv_step;
    a.inputs += layer * a.inputs_step, a.keys += layer * a.keys_step;
    a.updates += layer * a.updates_step, a.decays += layer * a.decays_step;
    const int head = blockIdx.x, from = a.tiled ? head % a.key_heads : head / (a.value_heads / a.key_heads);
    const int quads = a.key_dim * a.value_dim / 4, part = (quads + gridDim.y - 1) / gridDim.y, columns = a.value_dim / 4;
    const u64 policy = read_once();
    for (int i = blockIdx.y * part + threadIdx.x; i < min(int(blockIdx.y + 1) * part, quads); i += 256) {
        const i64 at = (i64(head) * quads + i) * 4;
        const int row = i / columns, column = i % columns * 4;
        float4 s = a.base ? load4_once(a.source_state + at, policy) : make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int position = a.base; position < a.done; ++position) {
            const int place = position & (RING - 1);
            const float k = a.keys[(place * a.key_heads + from) * a.key_dim + row];
            const float4 u = *(const float4 *)(a.updates + (place * a.value_heads + head) * a.value_dim + column);
            const float taken[4] = {u.x, u.y, u.z, u.w}, keep = a.decays[place * a.value_heads + head];
            s = follow(s, k, taken, keep);
        }
        store4_once(a.state + at, s, policy);
    }
    for (int c = (blockIdx.y * gridDim.x + head) * 256 + threadIdx.x; c < a.channels; c += gridDim.x * gridDim.y * 256)
        for (int p = 0; p < 4; ++p) {
            const int position = a.done - 4 + p;
            if (position >= a.base && position >= 0)
                a.conv[(position & 3) * a.channels + c] = a.inputs[(position & (RING - 1)) * a.channels + c];
            else if (position >= 0)
                a.conv[(position & 3) * a.channels + c] = a.source_conv[(position & 3) * a.channels + c];
        }
}
