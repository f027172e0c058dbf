// Opens the CUDA driver.
#include "driver.hpp"

#include <dlfcn.h>

#include "deltic.h"

namespace deltic {
namespace {

constexpr int kInvalidValue = 1, kOutOfMemory = 2;  // CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY

// The name of the first function that the library lacks; null if it has all.
const char *find_functions(void *library, Driver &driver) {
#define DELTIC_DRIVER_FIND(member, name, ...)                                         \
    driver.member = reinterpret_cast<int (*)(__VA_ARGS__)>(dlsym(library, name));    \
    if (!driver.member) return name;
    DELTIC_DRIVER_FUNCTIONS(DELTIC_DRIVER_FIND)
#undef DELTIC_DRIVER_FIND
    return nullptr;
}

std::string describe(const Driver &driver, int result) {
    const char *name = nullptr, *text = nullptr;
    driver.error_name(result, &name);
    driver.error_text(result, &text);
    return (name ? std::string(name) : "error " + std::to_string(result)) + (text ? std::string(": ") + text : "");
}

}  // namespace

void Driver::check(int result, const std::string &call) const {
    if (!result) return;
    int status = result == kOutOfMemory ? DELTIC_NO_MEMORY
                                        : result == kInvalidValue ? DELTIC_BAD_ARGUMENT : DELTIC_DEVICE_FAILED;
    throw DeviceError{status, call + " failed: " + describe(*this, result)};
}

std::unique_ptr<Driver> open_driver(std::string &why) {
    // never closed: the driver has threads of its own, and others in this process may use it
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *error = dlerror();
        why = std::string("there is no NVIDIA driver: ") + (error ? error : "libcuda.so.1 cannot be opened");
        return nullptr;
    }
    auto driver = std::make_unique<Driver>();
    if (const char *missing = find_functions(library, *driver)) {
        why = std::string("the NVIDIA driver is too old: libcuda.so.1 has no ") + missing;
        return nullptr;
    }
    if (int result = driver->init(0)) {
        why = "the NVIDIA driver cannot be used: " + describe(*driver, result);
        return nullptr;
    }
    return driver;
}

}  // namespace deltic
