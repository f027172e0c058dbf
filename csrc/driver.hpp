// The functions of the CUDA driver that the device layer calls. The library is opened at run time: nothing of CUDA is
// needed to compile this, and a machine without a driver has no GPUs.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

// Our name, the driver's name, the parameters. All of them return an error code, 0 for success.
#define DELTIC_DRIVER_FUNCTIONS(ENTRY)                                                                     \
    ENTRY(init, "cuInit", unsigned)                                                                        \
    ENTRY(device_count, "cuDeviceGetCount", int *)                                                         \
    ENTRY(device, "cuDeviceGet", int *, int)                                                               \
    ENTRY(device_name, "cuDeviceGetName", char *, int, int)                                                \
    ENTRY(device_memory, "cuDeviceTotalMem_v2", size_t *, int)                                             \
    ENTRY(device_attribute, "cuDeviceGetAttribute", int *, int, int)                                       \
    ENTRY(retain_context, "cuDevicePrimaryCtxRetain", void **, int)                                        \
    ENTRY(release_context, "cuDevicePrimaryCtxRelease_v2", int)                                            \
    ENTRY(push_context, "cuCtxPushCurrent_v2", void *)                                                     \
    ENTRY(pop_context, "cuCtxPopCurrent_v2", void **)                                                      \
    ENTRY(memory_info, "cuMemGetInfo_v2", size_t *, size_t *)                                              \
    ENTRY(allocate, "cuMemAlloc_v2", uint64_t *, size_t)                                                   \
    ENTRY(free, "cuMemFree_v2", uint64_t)                                                                  \
    ENTRY(copy_to_device, "cuMemcpyHtoDAsync_v2", uint64_t, const void *, size_t, void *)                  \
    ENTRY(copy_to_host, "cuMemcpyDtoHAsync_v2", void *, uint64_t, size_t, void *)                          \
    ENTRY(copy_on_device, "cuMemcpyDtoDAsync_v2", uint64_t, uint64_t, size_t, void *)                      \
    ENTRY(copy_to_peer, "cuMemcpyPeerAsync", uint64_t, void *, uint64_t, void *, size_t, void *)           \
    ENTRY(set_bytes, "cuMemsetD8Async", uint64_t, unsigned char, size_t, void *)                           \
    ENTRY(make_stream, "cuStreamCreate", void **, unsigned)                                                \
    ENTRY(free_stream, "cuStreamDestroy_v2", void *)                                                       \
    ENTRY(synchronize, "cuStreamSynchronize", void *)                                                      \
    ENTRY(error_name, "cuGetErrorName", int, const char **)                                                \
    ENTRY(error_text, "cuGetErrorString", int, const char **)

namespace deltic {

// What a function of the device layer returns, and why.
struct DeviceError {
    int status;
    std::string text;
};

struct Driver {
#define DELTIC_DRIVER_MEMBER(member, name, ...) int (*member)(__VA_ARGS__) = nullptr;
    DELTIC_DRIVER_FUNCTIONS(DELTIC_DRIVER_MEMBER)
#undef DELTIC_DRIVER_MEMBER

    // Throws DeviceError if a function of the driver failed. call: its name and what it was to do.
    void check(int result, const std::string &call) const;
};

// The driver, initialised; null if there is none that can be used, and then `why` says the reason.
std::unique_ptr<Driver> open_driver(std::string &why);

}  // namespace deltic
