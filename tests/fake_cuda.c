/* A CUDA driver without a GPU: two devices whose memory is the host's. It fails where a call is wrong that the true one
 * would take for wrong: no current context, unknown memory, too much of it. fake_left counts what was not given back. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { DEVICES = 2, BLOCKS = 64, BAD = 1, NO_ROOM = 2, NO_CONTEXT = 201 };

static struct {
    char *start;
    size_t bytes;
    int device;
} blocks[BLOCKS];
static int stack[8], depth, retained[DEVICES], streams;

int fake_left(void) {
    int left = depth + streams;
    for (int i = 0; i < BLOCKS; ++i) left += blocks[i].start != NULL;
    for (int i = 0; i < DEVICES; ++i) left += retained[i];
    return left;
}

static int is_block(uint64_t address, size_t bytes, int device) {
    for (int i = 0; i < BLOCKS; ++i) {
        char *start = blocks[i].start, *wanted = (char *)(uintptr_t)address;
        if (start && wanted >= start && wanted + bytes <= start + blocks[i].bytes)
            return device < 0 || blocks[i].device == device;
    }
    return 0;
}

static int copy(uint64_t to, uint64_t from, size_t bytes) {
    if (!depth) return NO_CONTEXT;
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return 0;
}

int cuInit(unsigned flags) { return flags ? BAD : getenv("FAKE_INIT") ? atoi(getenv("FAKE_INIT")) : 0; }
int cuDeviceGetCount(int *count) { return *count = DEVICES, 0; }
int cuDeviceGet(int *device, int index) { return *device = index, index < 0 || index >= DEVICES ? 101 : 0; }
int cuDeviceGetName(char *name, int size, int device) {
    strncpy(name, device ? "Second" : "First", (size_t)size);
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = (size_t)1 << (30 + device), 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 16 ? 100 + device : which == 75 ? 9 : 0;
    return which == 16 || which == 75 || which == 76 ? 0 : BAD;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    ++retained[device];
    *context = &retained[device];
    return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return retained[device]-- > 0 ? 0 : NO_CONTEXT; }
int cuCtxPushCurrent_v2(void *context) {
    if (depth == 8) return NO_CONTEXT;
    stack[depth++] = (int)((int *)context - retained);
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return NO_CONTEXT;
    *context = &retained[stack[--depth]];
    return 0;
}
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    if (!depth) return NO_CONTEXT;
    *total = (size_t)1 << (30 + stack[depth - 1]);
    *free_bytes = *total / 2;
    return 0;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    if (!depth) return NO_CONTEXT;
    for (int i = 0; i < BLOCKS && bytes < (size_t)1 << 30; ++i)
        if (!blocks[i].start) {
            blocks[i].start = aligned_alloc(256, (bytes + 255) / 256 * 256);
            blocks[i].bytes = bytes;
            blocks[i].device = stack[depth - 1];
            *address = (uint64_t)(uintptr_t)blocks[i].start;
            return 0;
        }
    return NO_ROOM;
}
int cuMemFree_v2(uint64_t address) {
    if (!depth) return NO_CONTEXT;
    for (int i = 0; i < BLOCKS; ++i)
        if ((uint64_t)(uintptr_t)blocks[i].start == address && blocks[i].device == stack[depth - 1]) {
            free(blocks[i].start);
            blocks[i].start = NULL;
            return 0;
        }
    return BAD;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    (void)stream;
    return is_block(to, bytes, -1) ? copy(to, (uint64_t)(uintptr_t)from, bytes) : BAD;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    (void)stream;
    return is_block(from, bytes, -1) ? copy((uint64_t)(uintptr_t)to, from, bytes) : BAD;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    (void)stream;
    if (!depth) return NO_CONTEXT;
    int device = stack[depth - 1];
    return is_block(to, bytes, device) && is_block(from, bytes, device) ? copy(to, from, bytes) : BAD;
}
int cuMemcpyPeerAsync(uint64_t to, void *target, uint64_t from, void *source, size_t bytes, void *stream) {
    (void)stream;
    int one = (int)((int *)target - retained), other = (int)((int *)source - retained);
    return one != other && is_block(to, bytes, one) && is_block(from, bytes, other) ? copy(to, from, bytes) : BAD;
}
int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void *stream) {
    (void)stream;
    if (!depth) return NO_CONTEXT;
    if (!is_block(address, bytes, stack[depth - 1])) return BAD;
    memset((void *)(uintptr_t)address, value, bytes);
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) {
    if (!depth || flags) return NO_CONTEXT;
    ++streams;
    *stream = malloc(1);
    return 0;
}
int cuStreamDestroy_v2(void *stream) {
    if (!depth || !stream) return NO_CONTEXT;
    --streams;
    free(stream);
    return 0;
}
int cuStreamSynchronize(void *stream) { return (void)stream, depth ? 0 : NO_CONTEXT; }
int cuGetErrorName(int error, const char **name) {
    *name = error == NO_ROOM ? "CUDA_ERROR_OUT_OF_MEMORY" : error == BAD ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR";
    return 0;
}
int cuGetErrorString(int error, const char **text) { return (void)error, *text = "as the driver puts it", 0; }
