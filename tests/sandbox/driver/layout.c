/* Prints each field of NVML's structs: struct, field, offset, size. NVML_SOURCE names who declares them. */
#include NVML_SOURCE
#include <stddef.h>
#include <stdio.h>

#define F(type, field) printf("%s %s %zu %zu\n", #type, #field, offsetof(type, field), sizeof(((type *)0)->field));
#define WHOLE(type) printf("%s . 0 %zu\n", #type, sizeof(type));

int main(void) {
    WHOLE(nvmlPciInfo_t) F(nvmlPciInfo_t, busIdLegacy) F(nvmlPciInfo_t, domain) F(nvmlPciInfo_t, bus)
    F(nvmlPciInfo_t, device) F(nvmlPciInfo_t, pciDeviceId) F(nvmlPciInfo_t, pciSubSystemId) F(nvmlPciInfo_t, busId)
    WHOLE(nvmlMemory_t) F(nvmlMemory_t, total) F(nvmlMemory_t, free) F(nvmlMemory_t, used)
    WHOLE(nvmlMemory_v2_t) F(nvmlMemory_v2_t, version) F(nvmlMemory_v2_t, total) F(nvmlMemory_v2_t, reserved)
    F(nvmlMemory_v2_t, free) F(nvmlMemory_v2_t, used)
    WHOLE(nvmlFieldValue_t) F(nvmlFieldValue_t, fieldId) F(nvmlFieldValue_t, scopeId) F(nvmlFieldValue_t, timestamp)
    F(nvmlFieldValue_t, latencyUsec) F(nvmlFieldValue_t, valueType) F(nvmlFieldValue_t, nvmlReturn) F(nvmlFieldValue_t, value)
    WHOLE(nvmlGpuFabricInfo_t) F(nvmlGpuFabricInfo_t, clusterUuid) F(nvmlGpuFabricInfo_t, status)
    F(nvmlGpuFabricInfo_t, cliqueId) F(nvmlGpuFabricInfo_t, state)
    WHOLE(nvmlProcessInfo_t) F(nvmlProcessInfo_t, pid) F(nvmlProcessInfo_t, usedGpuMemory)
    F(nvmlProcessInfo_t, gpuInstanceId) F(nvmlProcessInfo_t, computeInstanceId)
    WHOLE(nvmlGpuInstancePlacement_t) F(nvmlGpuInstancePlacement_t, start) F(nvmlGpuInstancePlacement_t, size)
    WHOLE(nvmlComputeInstancePlacement_t) F(nvmlComputeInstancePlacement_t, start) F(nvmlComputeInstancePlacement_t, size)
    WHOLE(nvmlGpuInstanceProfileInfo_t) F(nvmlGpuInstanceProfileInfo_t, id) F(nvmlGpuInstanceProfileInfo_t, isP2pSupported)
    F(nvmlGpuInstanceProfileInfo_t, sliceCount) F(nvmlGpuInstanceProfileInfo_t, instanceCount)
    F(nvmlGpuInstanceProfileInfo_t, multiprocessorCount) F(nvmlGpuInstanceProfileInfo_t, copyEngineCount)
    F(nvmlGpuInstanceProfileInfo_t, decoderCount) F(nvmlGpuInstanceProfileInfo_t, encoderCount)
    F(nvmlGpuInstanceProfileInfo_t, jpegCount) F(nvmlGpuInstanceProfileInfo_t, ofaCount)
    F(nvmlGpuInstanceProfileInfo_t, memorySizeMB)
    WHOLE(nvmlGpuInstanceProfileInfo_v2_t) F(nvmlGpuInstanceProfileInfo_v2_t, version) F(nvmlGpuInstanceProfileInfo_v2_t, id)
    F(nvmlGpuInstanceProfileInfo_v2_t, memorySizeMB) F(nvmlGpuInstanceProfileInfo_v2_t, name)
    WHOLE(nvmlGpuInstanceInfo_t) F(nvmlGpuInstanceInfo_t, device) F(nvmlGpuInstanceInfo_t, id)
    F(nvmlGpuInstanceInfo_t, profileId) F(nvmlGpuInstanceInfo_t, placement)
    WHOLE(nvmlComputeInstanceProfileInfo_t) F(nvmlComputeInstanceProfileInfo_t, id)
    F(nvmlComputeInstanceProfileInfo_t, sliceCount) F(nvmlComputeInstanceProfileInfo_t, instanceCount)
    F(nvmlComputeInstanceProfileInfo_t, multiprocessorCount) F(nvmlComputeInstanceProfileInfo_t, sharedCopyEngineCount)
    F(nvmlComputeInstanceProfileInfo_t, sharedDecoderCount) F(nvmlComputeInstanceProfileInfo_t, sharedEncoderCount)
    F(nvmlComputeInstanceProfileInfo_t, sharedJpegCount) F(nvmlComputeInstanceProfileInfo_t, sharedOfaCount)
    WHOLE(nvmlComputeInstanceProfileInfo_v2_t) F(nvmlComputeInstanceProfileInfo_v2_t, version)
    F(nvmlComputeInstanceProfileInfo_v2_t, id) F(nvmlComputeInstanceProfileInfo_v2_t, name)
    WHOLE(nvmlComputeInstanceInfo_t) F(nvmlComputeInstanceInfo_t, device) F(nvmlComputeInstanceInfo_t, gpuInstance)
    F(nvmlComputeInstanceInfo_t, id) F(nvmlComputeInstanceInfo_t, profileId) F(nvmlComputeInstanceInfo_t, placement)
    WHOLE(nvmlEventData_t) F(nvmlEventData_t, device) F(nvmlEventData_t, eventType) F(nvmlEventData_t, eventData)
    F(nvmlEventData_t, gpuInstanceId) F(nvmlEventData_t, computeInstanceId)
}
