/* Decodes with the native kernels alone. The model is tiny and made of pseudo-random numbers: one Gated DeltaNet layer,
 * one attention layer, weights of three types.
 *
 *   decode [THREADS [LEVEL]]
 *
 * The prompt is read twice: by one sequence in a single step, by another one token by token. Then both go on together,
 * as two rows of one batch. Prints the ids that are chosen; exit code 1 if the two sequences ever differ in a bit. At
 * last the logits are copied to every device and back. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "deltic.h"

enum {
    HIDDEN = 256, VOCABULARY = 500, WIDTH = 512, LAYERS = 2, /* WIDTH: of the MLP */
    KEY_HEADS = 2, VALUE_HEADS = 4, KEY_DIM = 32, VALUE_DIM = 32, KERNEL = 4,
    CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, VALUES = VALUE_HEADS * VALUE_DIM,
    HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64, ROTARY_DIM = 32,
    PROMPT = 150, ANSWER = 30, SEQUENCES = 2,
    TABLE = (PROMPT + ANSWER + DELTIC_PAGE - 1) / DELTIC_PAGE, /* pages of a sequence */
    MOST_TOKENS = PROMPT
};

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "decode: %s\n", what);
    exit(2);
}

/* ---- Devices. The processor's memory is aligned as packed matrices must be; deltic_devices_close gives it back. */

static deltic_devices *devices;

static void check(int status) {
    if (status) fail(deltic_devices_error(devices));
}

static void *allocate(int64_t bytes) {
    void *memory = NULL;
    check(deltic_device_allocate(devices, 0, bytes, &memory));
    return memory;
}

/* Copies numbers to a device and back, in a stream of its own: they must be the same. */
static void visit(int64_t device, const void *numbers, int64_t bytes) {
    void *there = NULL, *back = allocate(bytes);
    int64_t stream = 0;
    check(deltic_device_allocate(devices, device, bytes, &there));
    check(deltic_stream_new(devices, device, &stream));
    check(deltic_device_copy(devices, device, there, 0, numbers, bytes, stream));
    check(deltic_device_copy(devices, 0, back, device, there, bytes, stream));
    check(deltic_stream_synchronize(devices, stream));
    if (memcmp(numbers, back, (size_t)bytes)) fail("a device gave other numbers back");
    check(deltic_stream_free(devices, stream));
    check(deltic_device_free(devices, there));
    check(deltic_device_free(devices, back));
}

/* Names every device on standard error, and visits it. */
static void visit_all(const void *numbers, int64_t bytes) {
    int64_t count = 0;
    check(deltic_device_count(devices, &count));
    for (int64_t device = 0; device < count; ++device) {
        deltic_device_properties found;
        check(deltic_device_get(devices, device, &found));
        fprintf(stderr, "device %lld: %s, %lld of %lld MiB free\n", (long long)device, found.name,
                (long long)(found.memory_free >> 20), (long long)(found.memory_total >> 20));
        visit(device, numbers, bytes);
    }
}

/* ---- Numbers: the same ones in every language. */

static uint64_t counter;

static uint64_t draw(void) { /* splitmix64 */
    uint64_t bits = counter += 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return bits ^ bits >> 31;
}

/* From middle - reach to middle + reach. */
static float number(float middle, float reach) {
    float unit = (float)(int32_t)(draw() >> 40) / 8388608.0f - 1.0f;
    return middle + reach * unit;
}

static const float *numbers(int64_t count, float middle, float reach) {
    float *made = allocate(count * (int64_t)sizeof *made);
    for (int64_t i = 0; i < count; ++i) made[i] = number(middle, reach);
    return made;
}

/* ---- Weights. */

/* Rows of blocks as a GGUF file has them. */
static void make_blocks(int64_t type, int64_t rows, int64_t columns, float *room, uint8_t *blocks) {
    if (type == DELTIC_Q8_0) { /* by hand: per 32 weights a float16 scale, then 32 signed bytes */
        for (int64_t block = 0; block < rows * columns / 32; ++block, blocks += 34) {
            blocks[0] = 0x00, blocks[1] = 0x10; /* 2^-11, so that weights stay within 1/16 */
            for (int i = 0; i < 32; ++i) blocks[2 + i] = (uint8_t)(int8_t)((int)(draw() >> 40) % 255 - 127);
        }
        return;
    }
    for (int64_t i = 0; i < rows * columns; ++i) room[i] = number(0, 1.0f / 16);
    if (type == DELTIC_F32)
        memcpy(blocks, room, (size_t)(rows * columns) * sizeof *room);
    else if (deltic_quantize(type, room, rows, columns, blocks))
        fail("this type cannot be quantized to");
}

/* A packed matrix, made a few rows at a time: a file would be read like this. */
static deltic_matrix make_matrix(int64_t type, int64_t rows, int64_t columns) {
    int64_t size = deltic_packed_bytes(type, rows, columns);
    if (size < 0) fail("no matrix of this type can have so many columns");
    uint8_t *packed = allocate(size);
    /* whole panels take as many bytes as the same rows in a file */
    uint8_t *blocks = allocate(deltic_packed_bytes(type, DELTIC_PANEL, columns));
    float *room = allocate(DELTIC_PANEL * columns * (int64_t)sizeof *room);
    for (int64_t first = 0; first < rows; first += DELTIC_PANEL) {
        int64_t count = rows - first < DELTIC_PANEL ? rows - first : DELTIC_PANEL;
        make_blocks(type, count, columns, room, blocks);
        deltic_pack(type, blocks, first, count, columns, packed);
    }
    return (deltic_matrix){type, rows, columns, packed};
}

static deltic_weight make_weight(int64_t type, int64_t rows, int64_t columns) {
    return (deltic_weight){1, {make_matrix(type, rows, columns)}, 0, 1};
}

/* ---- The model. Structs point to each other, so they live as long as the program. */

static deltic_gdn_layer gdn;
static deltic_attention_layer attention;
static deltic_states states;
static deltic_kv kv;
static deltic_layer layers[LAYERS];
static deltic_model model;

static void make_mlp(deltic_layer *layer) {
    layer->input_norm = numbers(HIDDEN, 1, 0.125f);
    layer->post_norm = numbers(HIDDEN, 1, 0.125f);
    layer->gate_up = make_weight(DELTIC_Q4_K, 2 * WIDTH, HIDDEN);
    layer->down = make_weight(DELTIC_Q4_K, HIDDEN, WIDTH);
}

static void make_gdn(void) {
    gdn.in_proj = make_weight(DELTIC_Q8_0, CHANNELS + VALUES + 2 * VALUE_HEADS, HIDDEN);
    gdn.out_proj = make_weight(DELTIC_Q8_0, HIDDEN, VALUES);
    gdn.conv = numbers(CHANNELS * KERNEL, 0, 0.5f);
    gdn.decay = numbers(VALUE_HEADS, -0.5f, 0.25f);
    gdn.dt_bias = numbers(VALUE_HEADS, 0, 1);
    gdn.norm = numbers(VALUE_DIM, 1, 0.125f);
    gdn.key_heads = KEY_HEADS, gdn.value_heads = VALUE_HEADS, gdn.key_dim = KEY_DIM, gdn.value_dim = VALUE_DIM;
    gdn.kernel = KERNEL, gdn.eps = 1e-6f;
    layers[0].gdn = &gdn, layers[0].states = &states;
    make_mlp(&layers[0]);
}

static void make_attention(void) {
    /* matrices of different types, whose rows make one layer: queries with their gates, then keys and values */
    attention.qkv.count = 2;
    attention.qkv.parts[0] = make_matrix(DELTIC_Q4_K, 2 * HEADS * HEAD_DIM, HIDDEN);
    attention.qkv.parts[1] = make_matrix(DELTIC_Q8_0, 2 * KV_HEADS * HEAD_DIM, HIDDEN);
    attention.o_proj = make_weight(DELTIC_Q4_K, HIDDEN, HEADS * HEAD_DIM);
    attention.q_norm = numbers(HEAD_DIM, 1, 0.125f);
    attention.k_norm = numbers(HEAD_DIM, 1, 0.125f);
    attention.heads = HEADS, attention.kv_heads = KV_HEADS, attention.head_dim = HEAD_DIM;
    attention.rotary_dim = ROTARY_DIM, attention.gate = 1, attention.eps = 1e-6f;
    layers[1].attention = &attention, layers[1].kv = &kv;
    make_mlp(&layers[1]);
}

static void make_model(void) {
    make_gdn();
    make_attention();
    model.hidden = HIDDEN, model.layers = LAYERS, model.layer = layers;
    model.embedding = make_matrix(DELTIC_F32, VOCABULARY, HIDDEN);
    model.head = make_weight(DELTIC_Q8_0, VOCABULARY, HIDDEN); /* a tied one would be {1, {model.embedding}} */
    model.norm = numbers(HIDDEN, 1, 0.125f);
    float *frequencies = allocate(ROTARY_DIM / 2 * (int64_t)sizeof *frequencies), frequency = 1;
    int64_t *axes = allocate(ROTARY_DIM / 2 * (int64_t)sizeof *axes);
    for (int i = 0; i < ROTARY_DIM / 2; ++i, frequency /= 2) {
        frequencies[i] = frequency;
        axes[i] = 0; /* text: all three positions are the same */
    }
    model.frequencies = frequencies, model.axes = axes, model.rotary_dim = ROTARY_DIM, model.eps = 1e-6f;
    model.attention_factor = 1;
}

/* A slot per sequence for the recurrent state, pages for keys and values. All bits are set, which is NaN everywhere:
 * nothing is read that has not been written. */
static void *make_store(int64_t bytes) { return memset(allocate(bytes), 0xff, (size_t)bytes); }

static void make_stores(void) {
    int64_t pages = SEQUENCES * TABLE * DELTIC_PAGE * KV_HEADS * HEAD_DIM * (int64_t)sizeof(uint16_t);
    states.recurrent = make_store(SEQUENCES * VALUE_HEADS * KEY_DIM * VALUE_DIM * (int64_t)sizeof(float));
    states.conv = make_store(SEQUENCES * KERNEL * CHANNELS * (int64_t)sizeof(uint16_t));
    states.places = KERNEL, states.type = DELTIC_BF16, states.slots = SEQUENCES;
    kv.keys = make_store(pages), kv.values = make_store(pages), kv.type = DELTIC_BF16, kv.pages = SEQUENCES * TABLE;
}

/* ---- Steps. */

typedef struct {
    int64_t slot, length;  /* length: tokens that its state, keys and values hold */
    int64_t pages[TABLE];
} Sequence;

/* Runs `chunk` tokens of each of `count` sequences: ids [count, chunk], logits of the last ones [count, VOCABULARY]. */
static void run(deltic_pool *pool, Sequence *sequences, int64_t count, int64_t chunk, const int64_t *ids,
                float *logits) {
    int64_t tokens = count * chunk, positions[3 * MOST_TOKENS], store[MOST_TOKENS], starts[SEQUENCES + 1] = {0};
    int64_t done[SEQUENCES], slots[SEQUENCES], pages[SEQUENCES * TABLE], wanted[SEQUENCES];
    for (int64_t row = 0; row < count; ++row) {
        Sequence *sequence = sequences + row;
        memcpy(pages + row * TABLE, sequence->pages, sizeof sequence->pages);
        starts[row + 1] = starts[row] + chunk;
        done[row] = sequence->length;
        slots[row] = sequence->slot;
        wanted[row] = starts[row + 1] - 1;
        for (int64_t token = starts[row]; token < starts[row + 1]; ++token) {
            int64_t place = sequence->length++;
            store[token] = sequence->pages[place / DELTIC_PAGE] * DELTIC_PAGE + place % DELTIC_PAGE;
            for (int axis = 0; axis < 3; ++axis) positions[axis * tokens + token] = place;
        }
    }
    deltic_batch batch = {
        .rows = count, .tokens = tokens, .logits = count, .table = TABLE, .ids = ids, .positions = positions,
        .starts = starts, .done = done, .pages = pages, .store = store, .source = slots, .target = slots,
        .logit_tokens = wanted,
    };
    if (deltic_forward(pool, &model, &batch, NULL, logits)) fail("a step failed");
}

static void check_same(const float *logits, const char *when) {
    if (!memcmp(logits, logits + VOCABULARY, VOCABULARY * sizeof *logits)) return;
    fprintf(stderr, "decode: the sequences differ %s\n", when);
    exit(1);
}

int main(int count, char **arguments) {
    if (deltic_abi() != DELTIC_ABI || deltic_page() != DELTIC_PAGE || deltic_panel() != DELTIC_PANEL)
        fail("library and header are of different versions");
    int threads = count > 1 ? atoi(arguments[1]) : 1;
    int level = count > 2 ? atoi(arguments[2]) : deltic_best_level();
    deltic_pool *pool = deltic_pool_new(threads, level);
    if (!pool) fail("this processor has no such level, or memory ran out");
    if (deltic_devices_open(&devices)) fail("out of memory");
    make_model();
    make_stores();

    Sequence sequences[SEQUENCES] = {{.slot = 0}, {.slot = 1}};
    for (int64_t i = 0; i < TABLE; ++i) { /* any pages in any order will do */
        sequences[0].pages[i] = 2 * i;
        sequences[1].pages[i] = 2 * (TABLE - i) - 1;
    }
    int64_t prompt[PROMPT];
    for (int64_t i = 0; i < PROMPT; ++i) prompt[i] = (int64_t)(draw() % VOCABULARY);
    float *logits = allocate(SEQUENCES * VOCABULARY * (int64_t)sizeof *logits);

    run(pool, &sequences[0], 1, PROMPT, prompt, logits);
    for (int64_t i = 0; i < PROMPT; ++i) run(pool, &sequences[1], 1, 1, prompt + i, logits + VOCABULARY);
    check_same(logits, "after the prompt");
    fprintf(stderr, "level %d of %d, threads: %d\n", level, deltic_best_level(), threads);
    for (int64_t i = 0; i < ANSWER; ++i) {
        float best[SEQUENCES];
        int64_t chosen[SEQUENCES];
        uint8_t healthy[SEQUENCES];
        if (deltic_top(pool, logits, SEQUENCES, VOCABULARY, 1, NULL, best, chosen, NULL, healthy))
            fail("out of memory");
        if (!healthy[0] || !healthy[1]) fail("the logits are not sound");
        printf("%lld%c", (long long)chosen[0], i + 1 < ANSWER ? ' ' : '\n');
        run(pool, sequences, SEQUENCES, 1, chosen, logits);
        check_same(logits, "in a batch");
    }
    visit_all(logits, SEQUENCES * VOCABULARY * (int64_t)sizeof *logits);
    deltic_pool_free(pool);
    deltic_devices_close(devices);
    return 0;
}
