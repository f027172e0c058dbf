// Runs sums of kernels/allreduce.cuh over DEVICES devices with HIDDEN columns on the processor: a thread for each device.
#define PER_DEVICE thread_local
#include "emulated_gpu.h"
#define __shared__ static thread_local
#include "allreduce.cuh"

// Each device makes the same sums one after the other, and begins some of them late. many: for each sum, whether it is of many
// tokens. given: arguments of all sums of a device, then those of the next one. absent: the device that makes none, or -1.
extern "C" void run_sums(int sums, const int *many, const void *const *given, int absent) {
    std::vector<std::thread> devices;
    for (int i = 0; i < 8; ++i) idle_rounds[i] = i < DEVICES && i != absent ? 0 : ENDED;
    for (int number = 0; number < DEVICES; ++number)
        if (number != absent) devices.emplace_back([=] {
            device = number, draw.seed(number);
            for (int i = 0; i < sums; ++i) {
                if (draw() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw() % 3000));
                const auto &few = *(const AllReduce *)given[number * sums + i];
                const auto &rows = *(const AllReduceNorm *)given[number * sums + i];
                if (many[i]) launch(rows.cells, 256, [&] { all_reduce_norm<DEVICES, HIDDEN>(rows); });
                else launch((few.cells + 511) / 512, 512, [&] { all_reduce<DEVICES>(few); });
            }
            idle_rounds[number] = ENDED;
        });
    for (auto &each : devices) each.join();
}
