// What launches ask of the current device, and of the knobs.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>

#include "knobs.h"

// The major number of the compute capability that this library's code for the current device was compiled for.
cudaError_t macko_code_major_cuda(int *major);

namespace macko {

struct device_info {
    int index;
    int major; // of its compute capability, or of that which its code was compiled for, if that is PTX of an older one
    int num_sms;
    int shared_bytes;   // what a block may have at most, having asked for it
    int shared_per_sm;  // of all its blocks
    double memory_rate; // bytes a ns, by the memory's clock and width; 0 where the driver does not say
};

constexpr int MAX_DEVICES = 64;

// The current device, with as many SMs as MACKO_PLAN's sms says at most: two at least, which a pair of blocks needs. Asked
// once: the driver takes microseconds to answer.
inline cudaError_t current_device(device_info *device) {
    static device_info devices[MAX_DEVICES];
    static std::once_flag asked[MAX_DEVICES];
    int index = 0;
    if (const cudaError_t error = cudaGetDevice(&index)) return error;
    if (index >= MAX_DEVICES) return cudaErrorInvalidDevice;
    std::call_once(asked[index], [index] {
        device_info &d = devices[index];
        d.index = index;
        int code;
        cudaDeviceGetAttribute(&d.major, cudaDevAttrComputeCapabilityMajor, index);
        if (!macko_code_major_cuda(&code)) d.major = std::min(d.major, code);
        cudaDeviceGetAttribute(&d.num_sms, cudaDevAttrMultiProcessorCount, index);
        cudaDeviceGetAttribute(&d.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
        cudaDeviceGetAttribute(&d.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index);
        int kilohertz = 0, bits = 0; // two transfers a clock
        if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, index) ||
            cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, index))
            (void)cudaGetLastError(); // what was asked is not known there, and no launch has failed
        d.memory_rate = 2e-6 * kilohertz * bits / 8;
    });
    *device = devices[index];
    device->num_sms = std::min(device->num_sms, std::max(2, macko_knob_number(MACKO_KNOB_SMS, device->num_sms)));
    return cudaSuccess;
}

// What a block of the kernel of rings has of shared memory: as much as on another GPU, if MACKO_PLAN says so.
inline int ring_shared_bytes(const device_info &device) {
    return std::min(device.shared_bytes, macko_knob_number(MACKO_KNOB_SHARED_KB, device.shared_bytes / 1024) * 1024);
}

} // namespace macko
