// The device layer: memory and streams of the CPU and of NVIDIA GPUs. A deltic_devices owns all resources.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "deltic.h"
#include "driver.hpp"

namespace {

using deltic::DeviceError;
using deltic::Driver;

constexpr int64_t kCpu = 0, kAlignment = 64;
constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_*

struct Allocation {
    int64_t device, bytes;
};

struct Stream {
    int64_t device;
    void *handle;  // CUstream; null: the CPU, or the default stream of a GPU
};

uint64_t address_of(const void *memory) { return reinterpret_cast<uintptr_t>(memory); }

[[noreturn]] void refuse(const std::string &text, int status = DELTIC_BAD_ARGUMENT) {
    throw DeviceError{status, text};
}

void check_pointer(const void *pointer, const char *name) {
    if (!pointer) refuse(std::string(name) + " must not be null");
}

// Returns the value of a key in a /proc file, from kB to bytes; -1 if it is missing. Copies its text to `text`.
int64_t proc_entry(const char *path, const char *key, std::string *text = nullptr) {
    std::unique_ptr<FILE, int (*)(FILE *)> file(std::fopen(path, "r"), std::fclose);
    char line[512];
    while (file && std::fgets(line, sizeof line, file.get())) {
        const char *value = std::strchr(line, ':');
        if (!value || std::strncmp(line, key, std::strlen(key))) continue;
        value += 1 + std::strspn(value + 1, " ");
        if (text) text->assign(value, std::strcspn(value, "\n"));
        return std::atoll(value) * 1024;
    }
    return -1;
}

int64_t processors() {
#if defined(__linux__)
    cpu_set_t own;
    if (!sched_getaffinity(0, sizeof own, &own)) return CPU_COUNT(&own);
#endif
    return std::thread::hardware_concurrency();
}

void set_name(deltic_device_properties &properties, const std::string &name) {
    size_t length = std::min(name.size(), sizeof properties.name - 1);
    std::memcpy(properties.name, name.data(), length);
    properties.name[length] = 0;
}

}  // namespace

struct deltic_devices {
    deltic_devices() : driver(deltic::open_driver(why)) {
        int count = 0;
        if (!driver) return;
        if (driver->device_count(&count) || count <= 0)
            why = "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES may hide them)";
        else
            contexts.resize(static_cast<size_t>(count));
    }

    ~deltic_devices() {
        // if the driver fails here, for example at process exit, there is nothing left to free
        for (auto &entry : streams) quietly([&] { destroy(entry.second); });
        for (auto &entry : allocations) quietly([&] { give_back(entry.first, entry.second); });
        for (size_t index = 0; index < contexts.size(); ++index)
            if (contexts[index]) quietly([&] { driver->release_context(handle(index)); });
    }

    template <typename Call> static void quietly(Call &&call) {
        try {
            call();
        } catch (const DeviceError &) {
        }
    }

    int64_t count() const { return 1 + static_cast<int64_t>(contexts.size()); }

    void check_device(int64_t device) const {
        if (device >= 0 && device < count()) return;
        std::string reason = device > 0 && contexts.empty() ? why : "the devices are 0 to " + std::to_string(count() - 1);
        refuse("there is no device " + std::to_string(device) + ": " + reason, DELTIC_NO_DEVICE);
    }

    void *context(int64_t device) {
        std::lock_guard<std::mutex> held(lock);
        void *&found = contexts[device - 1];
        if (!found) driver->check(driver->retain_context(&found, handle(device - 1)), "cuDevicePrimaryCtxRetain");
        return found;
    }

    Stream stream(int64_t number) {
        std::lock_guard<std::mutex> held(lock);
        auto found = streams.find(number);
        if (found == streams.end()) refuse("there is no stream " + std::to_string(number));
        return found->second;
    }

    // Returns the stream for work on two devices. Rejects a stream of another device, or of the CPU if one is a GPU.
    Stream chosen(int64_t number, int64_t device, int64_t other) {
        int64_t own = device == kCpu ? other : device;
        if (!number) return {own, nullptr};
        Stream found = stream(number);
        bool joins = found.device == device || found.device == other;
        if (joins && (found.device != kCpu || own == kCpu)) return found;
        refuse("stream " + std::to_string(number) + " is of device " + std::to_string(found.device) +
               ": give one of device " + std::to_string(own) + ", or 0");
    }

    void check_range(const char *name, int64_t device, const void *memory, int64_t bytes) {
        check_device(device);
        check_pointer(memory, name);
        if (bytes < 0) refuse("bytes must be at least 0, not " + std::to_string(bytes));
        std::lock_guard<std::mutex> held(lock);
        uint64_t address = address_of(memory);
        auto next = allocations.upper_bound(address);
        if (next == allocations.begin()) return;
        const auto &[start, found] = *std::prev(next);
        int64_t offset = static_cast<int64_t>(address - start);
        if (offset >= found.bytes) return;  // memory that was allocated elsewhere
        if (found.device != device)
            refuse(std::string(name) + " is memory of device " + std::to_string(found.device) + ", not of device " +
                   std::to_string(device));
        if (bytes > found.bytes - offset)
            refuse(std::to_string(bytes) + " bytes at " + name + " are more than the " +
                   std::to_string(found.bytes - offset) + " that are left of its memory");
    }

    int64_t memory_of(int64_t device) const;
    uint64_t take(int64_t device, int64_t bytes);
    void destroy(const Stream &stream);
    void give_back(uint64_t address, const Allocation &allocation);
    void describe_cpu(deltic_device_properties &properties) const;
    void describe_gpu(int64_t device, deltic_device_properties &properties);
    void copy(int64_t target_device, void *target, int64_t source_device, const void *source, int64_t bytes,
              const Stream &stream);

    int handle(size_t index) const {
        int found = 0;
        driver->check(driver->device(&found, static_cast<int>(index)), "cuDeviceGet");
        return found;
    }

    std::string why;  // reason why there is no GPU
    std::unique_ptr<Driver> driver;
    std::vector<void *> contexts;  // primary context of each GPU; null until its first use
    std::mutex lock;               // guards `contexts` and all fields below
    std::map<uint64_t, Allocation> allocations;
    std::map<int64_t, Stream> streams;
    int64_t last_stream = 0;
    std::map<std::thread::id, std::string> errors;
};

namespace {

// Makes the context of a GPU the thread's current one while the object exists.
class Current {
  public:
    Current(deltic_devices &devices, int64_t device) : driver_(*devices.driver) {
        driver_.check(driver_.push_context(devices.context(device)), "cuCtxPushCurrent");
    }
    ~Current() {
        void *popped = nullptr;
        driver_.pop_context(&popped);
    }
    Current(const Current &) = delete;

  private:
    const Driver &driver_;
};

// Runs a call and converts exceptions to a status. Stores the error text for the calling thread.
template <typename Call> int guarded(deltic_devices *devices, Call &&call) {
    if (!devices) return DELTIC_BAD_ARGUMENT;
    DeviceError error{DELTIC_NO_MEMORY, "memory ran out"};
    try {
        call();
        return 0;
    } catch (DeviceError &found) {
        error = std::move(found);
    } catch (const std::bad_alloc &) {
    }
    try {
        std::lock_guard<std::mutex> held(devices->lock);
        devices->errors[std::this_thread::get_id()] = std::move(error.text);
    } catch (const std::bad_alloc &) {
    }
    return error.status;
}

}  // namespace

int64_t deltic_devices::memory_of(int64_t device) const {
    if (device == kCpu) return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    size_t total = 0;
    driver->check(driver->device_memory(&total, handle(device - 1)), "cuDeviceTotalMem");
    return static_cast<int64_t>(total);
}

// Allocates memory on a device, without an entry in `allocations`.
uint64_t deltic_devices::take(int64_t device, int64_t bytes) {
    uint64_t address = 0;
    if (device == kCpu) {
        void *made = nullptr;
        if (posix_memalign(&made, kAlignment, static_cast<size_t>(bytes))) throw std::bad_alloc();
        return address_of(made);
    }
    Current current(*this, device);
    driver->check(driver->allocate(&address, static_cast<size_t>(bytes)),
                  "cuMemAlloc of " + std::to_string(bytes) + " bytes on device " + std::to_string(device));
    return address;
}

void deltic_devices::destroy(const Stream &stream) {
    if (stream.device == kCpu) return;
    Current current(*this, stream.device);
    int waited = driver->synchronize(stream.handle);
    driver->check(driver->free_stream(stream.handle), "cuStreamDestroy");
    driver->check(waited, "cuStreamSynchronize");
}

void deltic_devices::give_back(uint64_t address, const Allocation &allocation) {
    if (allocation.device == kCpu) return std::free(reinterpret_cast<void *>(address));
    Current current(*this, allocation.device);
    driver->check(driver->free(address), "cuMemFree");
}

void deltic_devices::describe_cpu(deltic_device_properties &properties) const {
    std::string name = "CPU";
    proc_entry("/proc/cpuinfo", "model name", &name);
    int64_t free = proc_entry("/proc/meminfo", "MemAvailable");
    properties.kind = DELTIC_DEVICE_CPU;
    properties.memory_total = memory_of(kCpu);
    properties.memory_free = free < 0 ? properties.memory_total : free;
    properties.cores = processors();
    set_name(properties, name);
}

void deltic_devices::describe_gpu(int64_t device, deltic_device_properties &properties) {
    int own = handle(device - 1);
    char name[sizeof properties.name] = "";
    driver->check(driver->device_name(name, sizeof name, own), "cuDeviceGetName");
    set_name(properties, name);
    auto attribute = [&](int which) {
        int value = 0;
        driver->check(driver->device_attribute(&value, which, own), "cuDeviceGetAttribute");
        return value;
    };
    properties.kind = DELTIC_DEVICE_CUDA, properties.number = device - 1;
    properties.major = attribute(kMajor), properties.minor = attribute(kMinor);
    properties.cores = attribute(kMultiprocessors);
    properties.memory_total = memory_of(device);
    size_t total = 0, free = 0;
    Current current(*this, device);
    driver->check(driver->memory_info(&free, &total), "cuMemGetInfo");
    properties.memory_free = static_cast<int64_t>(free);
}

void deltic_devices::copy(int64_t target_device, void *target, int64_t source_device, const void *source,
                          int64_t bytes, const Stream &stream) {
    size_t size = static_cast<size_t>(bytes);
    if (stream.device == kCpu) {
        std::memmove(target, source, size);
        return;
    }
    uint64_t to = address_of(target), from = address_of(source);
    void *target_context = target_device == kCpu ? nullptr : context(target_device);
    void *source_context = source_device == kCpu ? nullptr : context(source_device);
    Current current(*this, stream.device);
    if (!source_context)
        driver->check(driver->copy_to_device(to, source, size, stream.handle), "cuMemcpyHtoDAsync");
    else if (!target_context)
        driver->check(driver->copy_to_host(target, from, size, stream.handle), "cuMemcpyDtoHAsync");
    else if (target_device == source_device)
        driver->check(driver->copy_on_device(to, from, size, stream.handle), "cuMemcpyDtoDAsync");
    else
        driver->check(driver->copy_to_peer(to, target_context, from, source_context, size, stream.handle),
                      "cuMemcpyPeerAsync");
    if (!stream.handle) driver->check(driver->synchronize(nullptr), "cuStreamSynchronize");
}

extern "C" {

int deltic_devices_open(deltic_devices **devices) {
    if (!devices) return DELTIC_BAD_ARGUMENT;
    try {
        *devices = new deltic_devices();
        return 0;
    } catch (const std::bad_alloc &) {
        return DELTIC_NO_MEMORY;
    }
}

int deltic_devices_close(deltic_devices *devices) {
    if (!devices) return DELTIC_BAD_ARGUMENT;
    delete devices;
    return 0;
}

const char *deltic_devices_error(deltic_devices *devices) {
    if (!devices) return "devices must not be null: call deltic_devices_open";
    std::lock_guard<std::mutex> held(devices->lock);
    auto found = devices->errors.find(std::this_thread::get_id());
    return found == devices->errors.end() ? "" : found->second.c_str();
}

int deltic_device_count(deltic_devices *devices, int64_t *count) {
    return guarded(devices, [&] {
        check_pointer(count, "count");
        *count = devices->count();
    });
}

int deltic_device_get(deltic_devices *devices, int64_t device, deltic_device_properties *properties) {
    return guarded(devices, [&] {
        check_pointer(properties, "properties");
        devices->check_device(device);
        deltic_device_properties found{};
        if (device == kCpu) devices->describe_cpu(found);
        else devices->describe_gpu(device, found);
        *properties = found;
    });
}

int deltic_device_allocate(deltic_devices *devices, int64_t device, int64_t bytes, void **memory) {
    return guarded(devices, [&] {
        check_pointer(memory, "memory");
        devices->check_device(device);
        if (bytes < 1) refuse("bytes must be at least 1, not " + std::to_string(bytes));
        int64_t total = devices->memory_of(device);
        if (bytes > total)
            refuse("device " + std::to_string(device) + " has " + std::to_string(total) + " bytes of memory, not " +
                   std::to_string(bytes), DELTIC_NO_MEMORY);
        uint64_t address = devices->take(device, bytes);
        try {
            std::lock_guard<std::mutex> held(devices->lock);
            devices->allocations[address] = {device, bytes};
        } catch (const std::bad_alloc &) {
            devices->give_back(address, {device, bytes});
            throw;
        }
        *memory = reinterpret_cast<void *>(address);
    });
}

int deltic_device_free(deltic_devices *devices, void *memory) {
    return guarded(devices, [&] {
        if (!memory) return;
        std::unique_lock<std::mutex> held(devices->lock);
        auto found = devices->allocations.find(address_of(memory));
        if (found == devices->allocations.end())
            refuse("memory was not allocated by deltic_device_allocate, or was given back before");
        auto [address, allocation] = *found;
        devices->allocations.erase(found);
        held.unlock();
        devices->give_back(address, allocation);
    });
}

int deltic_stream_new(deltic_devices *devices, int64_t device, int64_t *stream) {
    return guarded(devices, [&] {
        check_pointer(stream, "stream");
        devices->check_device(device);
        Stream made{device, nullptr};
        if (device != kCpu) {
            Current current(*devices, device);
            // flags 0: the stream is ordered with the default stream, which torch uses
            devices->driver->check(devices->driver->make_stream(&made.handle, 0), "cuStreamCreate");
        }
        std::lock_guard<std::mutex> held(devices->lock);
        devices->streams[devices->last_stream + 1] = made;
        *stream = ++devices->last_stream;
    });
}

int deltic_stream_free(deltic_devices *devices, int64_t stream) {
    return guarded(devices, [&] {
        Stream found = devices->stream(stream);
        {
            std::lock_guard<std::mutex> held(devices->lock);
            if (!devices->streams.erase(stream)) refuse("there is no stream " + std::to_string(stream));
        }
        devices->destroy(found);
    });
}

int deltic_stream_synchronize(deltic_devices *devices, int64_t stream) {
    return guarded(devices, [&] {
        Stream found = devices->stream(stream);
        if (found.device == kCpu) return;
        Current current(*devices, found.device);
        devices->driver->check(devices->driver->synchronize(found.handle), "cuStreamSynchronize");
    });
}

int deltic_device_copy(deltic_devices *devices, int64_t target_device, void *target, int64_t source_device,
                       const void *source, int64_t bytes, int64_t stream) {
    return guarded(devices, [&] {
        devices->check_range("target", target_device, target, bytes);
        devices->check_range("source", source_device, source, bytes);
        Stream chosen = devices->chosen(stream, target_device, source_device);
        if (bytes) devices->copy(target_device, target, source_device, source, bytes, chosen);
    });
}

int deltic_device_set(deltic_devices *devices, int64_t device, void *memory, int value, int64_t bytes,
                      int64_t stream) {
    return guarded(devices, [&] {
        devices->check_range("memory", device, memory, bytes);
        if (value < 0 || value > 255) refuse("value must be from 0 to 255, not " + std::to_string(value));
        Stream chosen = devices->chosen(stream, device, device);
        if (!bytes) return;
        if (device == kCpu) {
            std::memset(memory, value, static_cast<size_t>(bytes));
            return;
        }
        const Driver &driver = *devices->driver;
        Current current(*devices, device);
        driver.check(driver.set_bytes(address_of(memory), static_cast<unsigned char>(value),
                                      static_cast<size_t>(bytes), chosen.handle), "cuMemsetD8Async");
        if (!chosen.handle) driver.check(driver.synchronize(nullptr), "cuStreamSynchronize");
    });
}
}
