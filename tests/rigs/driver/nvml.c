/*
 * A libnvidia-ml.so.1 without a driver: every call goes to a server that runs the simulated driver.
 *
 * The server listens on the socket `nvml.sock` in the folder of this file. Without a server, NVML
 * answers as it does without a driver. Sources: nvml.h of NVIDIA's CUDA toolkit for names, arguments
 * and structs; the wire is described in server.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef void *handle_t;
typedef unsigned int uint;
typedef unsigned long long ulonglong;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };

/* The structs of nvml.h, with the header's field names. */

typedef struct {
    char busIdLegacy[16];
    uint domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
typedef struct { ulonglong total, free, used; } nvmlMemory_t;
typedef struct { uint version; ulonglong total, reserved, free, used; } nvmlMemory_v2_t;
typedef union { double dVal; uint uiVal; unsigned long ulVal; ulonglong ullVal; long long sllVal; } nvmlValue_t;
typedef struct {
    uint fieldId, scopeId;
    long long timestamp, latencyUsec;
    uint valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct {
    unsigned char clusterUuid[16]; nvmlReturn_t status; uint cliqueId; unsigned char state;
} nvmlGpuFabricInfo_t;
typedef struct {
    uint multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount;
    uint sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    ulonglong memorySizeMB;
} nvmlDeviceAttributes_t;
typedef struct { uint pid; ulonglong usedGpuMemory; uint gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct { uint start, size; } nvmlGpuInstancePlacement_t;
typedef struct { uint start, size; } nvmlComputeInstancePlacement_t;
typedef struct {
    uint id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount;
    uint decoderCount, encoderCount, jpegCount, ofaCount;
    ulonglong memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;
typedef struct {
    uint version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount;
    uint decoderCount, encoderCount, jpegCount, ofaCount;
    ulonglong memorySizeMB;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;
typedef struct {
    handle_t device;
    uint id, profileId;
    nvmlGpuInstancePlacement_t placement;
} nvmlGpuInstanceInfo_t;
typedef struct {
    uint id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount;
    uint sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
} nvmlComputeInstanceProfileInfo_t;
typedef struct {
    uint version, id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount;
    uint sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
    char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;
typedef struct {
    handle_t device, gpuInstance;
    uint id, profileId;
    nvmlComputeInstancePlacement_t placement;
} nvmlComputeInstanceInfo_t;
typedef struct {
    handle_t device;
    ulonglong eventType, eventData;
    uint gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

/* The wire. */

typedef struct {
    char kind;    /* 'v' value, 'n' NULL, 'm' memory in and out, 's' string */
    uint64_t value;
    void *memory;
    uint32_t size;
} argument_t;

#define V(x) {'v', (uint64_t)(uintptr_t)(x), NULL, 0}
#define M(pointer, bytes) at('m', pointer, bytes)
#define S(text) at('s', text, (text) ? strlen(text) : 0)

static argument_t at(char kind, const void *memory, size_t size) {
    if (!memory)
        return (argument_t){'n', 0, NULL, 0};
    return (argument_t){kind, 0, (void *)memory, (uint32_t)size};
}

static __thread int connection = -1;
static __thread pid_t connected_as;
static pthread_key_t closing;
static unsigned char process_id[16];
static pid_t identified;
static pthread_mutex_t identity = PTHREAD_MUTEX_INITIALIZER;

static void close_connection(void *descriptor) { close((int)(intptr_t)descriptor - 1); }

__attribute__((constructor)) static void prepare(void) { pthread_key_create(&closing, close_connection); }

static int whole(ssize_t (*move)(int, void *, size_t), int file, void *bytes, size_t size) {
    for (size_t done = 0; done < size;) {
        ssize_t n = move(file, (char *)bytes + done, size - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        done += (size_t)n;
    }
    return 0;
}

static ssize_t put(int file, void *bytes, size_t size) { return send(file, bytes, size, MSG_NOSIGNAL); }
static ssize_t take(int file, void *bytes, size_t size) { return recv(file, bytes, size, 0); }

/* A path to a socket may have 107 bytes; a path through a descriptor always fits. */
static int dial(void) {
    Dl_info self;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!dladdr((void *)dial, &self))
        return -1;
    char *path = realpath(self.dli_fname, NULL);
    if (!path)
        return -1;
    int folder = open(dirname(path), O_PATH | O_DIRECTORY | O_CLOEXEC);
    free(path);
    if (folder < 0)
        return -1;
    snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/nvml.sock", folder);
    int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int failed = connect(file, (struct sockaddr *)&address, sizeof address);
    close(folder);
    if (failed) {
        close(file);
        return -1;
    }
    pthread_mutex_lock(&identity);
    if (identified != getpid()) {
        identified = getpid();
        if (getrandom(process_id, sizeof process_id, 0) != sizeof process_id)
            abort();
    }
    pthread_mutex_unlock(&identity);
    if (whole(put, file, process_id, sizeof process_id)) {
        close(file);
        return -1;
    }
    return file;
}

/* One connection a thread: a child made by fork has its own session, as with the real library. */
static int connected(void) {
    if (connection >= 0 && connected_as == getpid())
        return connection;
    connection = dial();
    connected_as = getpid();
    pthread_setspecific(closing, (void *)(intptr_t)(connection + 1));
    return connection;
}

static void add(char **end, const void *bytes, size_t size) {
    memcpy(*end, bytes, size);
    *end += size;
}

/* The server has no answer: it found an overrun or broke, where a real library corrupts memory. */
static void die(const char *function) {
    fprintf(stderr, "simulated libnvidia-ml: %s cannot be answered\n", function);
    abort();
}

static nvmlReturn_t call(const char *function, argument_t *arguments, int count) {
    int file = connected();
    if (file < 0)
        return DRIVER_NOT_LOADED;
    size_t size = 4 + strlen(function) + 1 + 1;
    for (int i = 0; i < count; i++)
        size += 1 + 8 + arguments[i].size;
    char *request = malloc(size), *end = request + 4;
    if (!request)
        abort();
    add(&end, function, strlen(function) + 1);
    *end++ = (char)count;
    for (int i = 0; i < count; i++) {
        argument_t *one = &arguments[i];
        uint64_t number = one->kind == 'v' ? one->value : one->kind == 'n' ? 0 : one->size;
        *end++ = one->kind;
        add(&end, &number, 8);
        if (one->kind == 'm' || one->kind == 's')
            add(&end, one->memory, one->size);
    }
    uint32_t length = (uint32_t)(end - request - 4);
    memcpy(request, &length, 4);
    int failed = whole(put, file, request, length + 4);
    free(request);
    if (failed) {
        close(file);
        connection = -1;
        return DRIVER_NOT_LOADED;
    }
    int32_t code;
    if (whole(take, file, &code, 4))
        die(function);
    for (int i = 0; i < count; i++)
        if (arguments[i].kind == 'm' && whole(take, file, arguments[i].memory, arguments[i].size))
            die(function);
    return code;
}

#define API __attribute__((visibility("default"))) nvmlReturn_t
#define CALL(...)                                                          \
    argument_t arguments[] = {__VA_ARGS__};                                \
    return call(__func__, arguments, (int)(sizeof arguments / sizeof *arguments))

/* Shapes that many functions share. */

#define GET(name, type) \
    API name(handle_t from, type *out) { CALL(V(from), M(out, sizeof(type))); }
#define GET_BY(name, key, type) \
    API name(handle_t from, key by, type *out) { CALL(V(from), V(by), M(out, sizeof(type))); }
#define TEXT(name) \
    API name(handle_t from, char *text, uint length) { CALL(V(from), M(text, length), V(length)); }
#define DO(name) \
    API name(handle_t with) { CALL(V(with)); }

/* Arrays have no length on the way in: what comes back is copied as far as the count goes. */
static nvmlReturn_t listed(const char *function, handle_t from, uint profile, void *out, size_t each, uint *count) {
    enum { MOST = 64 };
    char room[MOST * 64] = {0};
    argument_t arguments[] = {V(from), V(profile), M(out ? room : NULL, MOST * each), M(count, sizeof *count)};
    nvmlReturn_t code = call(function, arguments, 4);
    if (code == SUCCESS && out && count)
        memcpy(out, room, *count * each);
    return code;
}

static nvmlReturn_t processes(const char *function, handle_t device, uint *count, void *out, size_t each) {
    argument_t arguments[] = {V(device), M(count, sizeof *count), M(out, count ? *count * each : 0)};
    return call(function, arguments, 3);
}

#define LIST(name, type) \
    API name(handle_t from, uint profile, type *out, uint *count) { \
        return listed(__func__, from, profile, out, sizeof(type), count); \
    }
#define PROCESSES(name, type) \
    API name(handle_t device, uint *count, type *out) { \
        return processes(__func__, device, count, out, sizeof(type)); \
    }

/* The library and the node. */

API nvmlInit_v2(void) { return call(__func__, NULL, 0); }
API nvmlInit(void) { return call(__func__, NULL, 0); }
API nvmlInitWithFlags(uint flags) { CALL(V(flags)); }
API nvmlShutdown(void) { return call(__func__, NULL, 0); }
API nvmlSystemGetDriverVersion(char *text, uint length) { CALL(M(text, length), V(length)); }
API nvmlSystemGetNVMLVersion(char *text, uint length) { CALL(M(text, length), V(length)); }
API nvmlSystemGetCudaDriverVersion(int *version) { CALL(M(version, sizeof *version)); }
API nvmlSystemGetCudaDriverVersion_v2(int *version) { CALL(M(version, sizeof *version)); }
API nvmlSystemGetProcessName(uint pid, char *text, uint length) { CALL(V(pid), M(text, length), V(length)); }

__attribute__((visibility("default"))) const char *nvmlErrorString(nvmlReturn_t code) {
    static char texts[1000][64];
    static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
    char text[64] = "Unknown Error";
    argument_t arguments[] = {V(code), M(text, sizeof text)};
    call(__func__, arguments, 2);
    char *kept = texts[code >= 0 && code < 999 ? code : 999];
    pthread_mutex_lock(&writing);
    memcpy(kept, text, sizeof text);
    pthread_mutex_unlock(&writing);
    return kept;
}

/* Devices. */

API nvmlDeviceGetCount(uint *count) { CALL(M(count, sizeof *count)); }
API nvmlDeviceGetCount_v2(uint *count) { CALL(M(count, sizeof *count)); }
API nvmlDeviceGetHandleByIndex(uint index, handle_t *out) { CALL(V(index), M(out, sizeof *out)); }
API nvmlDeviceGetHandleByIndex_v2(uint index, handle_t *out) { CALL(V(index), M(out, sizeof *out)); }
API nvmlDeviceGetHandleByPciBusId(const char *id, handle_t *out) { CALL(S(id), M(out, sizeof *out)); }
API nvmlDeviceGetHandleByPciBusId_v2(const char *id, handle_t *out) { CALL(S(id), M(out, sizeof *out)); }
API nvmlDeviceGetHandleByUUID(const char *uuid, handle_t *out) { CALL(S(uuid), M(out, sizeof *out)); }
TEXT(nvmlDeviceGetName)
TEXT(nvmlDeviceGetUUID)
GET(nvmlDeviceGetIndex, uint)
GET(nvmlDeviceGetMinorNumber, uint)
GET(nvmlDeviceGetPciInfo_v3, nvmlPciInfo_t)
GET(nvmlDeviceGetMemoryInfo, nvmlMemory_t)
GET(nvmlDeviceGetMemoryInfo_v2, nvmlMemory_v2_t)
GET(nvmlDeviceGetArchitecture, uint)
GET(nvmlDeviceGetVirtualizationMode, uint)
GET(nvmlDeviceGetBrand, uint)
API nvmlDeviceGetTopologyCommonAncestor(handle_t one, handle_t other, uint *level) {
    CALL(V(one), V(other), M(level, sizeof *level));
}
GET_BY(nvmlDeviceGetNvLinkState, uint, uint)
API nvmlDeviceGetCudaComputeCapability(handle_t device, int *major, int *minor) {
    CALL(V(device), M(major, sizeof *major), M(minor, sizeof *minor));
}
API nvmlDeviceGetFieldValues(handle_t device, int count, nvmlFieldValue_t *values) {
    CALL(V(device), V(count), M(values, count * sizeof *values));
}
GET(nvmlDeviceGetGpuFabricInfo, nvmlGpuFabricInfo_t)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)

/* MIG on a GPU. */

API nvmlDeviceGetMigMode(handle_t device, uint *current, uint *pending) {
    CALL(V(device), M(current, sizeof *current), M(pending, sizeof *pending));
}
API nvmlDeviceSetMigMode(handle_t device, uint mode, nvmlReturn_t *status) {
    CALL(V(device), V(mode), M(status, sizeof *status));
}
GET_BY(nvmlDeviceGetGpuInstanceProfileInfo, uint, nvmlGpuInstanceProfileInfo_t)
GET_BY(nvmlDeviceGetGpuInstanceProfileInfoV, uint, nvmlGpuInstanceProfileInfo_v2_t)
LIST(nvmlDeviceGetGpuInstancePossiblePlacements, nvmlGpuInstancePlacement_t)
LIST(nvmlDeviceGetGpuInstancePossiblePlacements_v2, nvmlGpuInstancePlacement_t)
GET(nvmlDeviceIsMigDeviceHandle, uint)
GET(nvmlDeviceGetAttributes_v2, nvmlDeviceAttributes_t)
GET(nvmlDeviceGetGpuInstanceId, uint)
GET(nvmlDeviceGetComputeInstanceId, uint)
GET(nvmlDeviceGetMaxMigDeviceCount, uint)
GET_BY(nvmlDeviceGetMigDeviceHandleByIndex, uint, handle_t)
GET(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle_t)

/* GPU instances. */

GET_BY(nvmlDeviceCreateGpuInstance, uint, handle_t)
API nvmlDeviceCreateGpuInstanceWithPlacement(handle_t device, uint profile, const nvmlGpuInstancePlacement_t *place, handle_t *out) {
    CALL(V(device), V(profile), M(place, sizeof *place), M(out, sizeof *out));
}
DO(nvmlGpuInstanceDestroy)
LIST(nvmlDeviceGetGpuInstances, handle_t)
GET_BY(nvmlDeviceGetGpuInstanceById, uint, handle_t)
GET(nvmlGpuInstanceGetInfo, nvmlGpuInstanceInfo_t)

/* Compute instances. */

API nvmlGpuInstanceGetComputeInstanceProfileInfo(handle_t instance, uint profile, uint engines, nvmlComputeInstanceProfileInfo_t *out) {
    CALL(V(instance), V(profile), V(engines), M(out, sizeof *out));
}
API nvmlGpuInstanceGetComputeInstanceProfileInfoV(handle_t instance, uint profile, uint engines, nvmlComputeInstanceProfileInfo_v2_t *out) {
    CALL(V(instance), V(profile), V(engines), M(out, sizeof *out));
}
LIST(nvmlGpuInstanceGetComputeInstancePossiblePlacements, nvmlComputeInstancePlacement_t)
GET_BY(nvmlGpuInstanceCreateComputeInstance, uint, handle_t)
API nvmlGpuInstanceCreateComputeInstanceWithPlacement(handle_t instance, uint profile, const nvmlComputeInstancePlacement_t *place, handle_t *out) {
    CALL(V(instance), V(profile), M(place, sizeof *place), M(out, sizeof *out));
}
DO(nvmlComputeInstanceDestroy)
LIST(nvmlGpuInstanceGetComputeInstances, handle_t)
GET_BY(nvmlGpuInstanceGetComputeInstanceById, uint, handle_t)
GET(nvmlComputeInstanceGetInfo_v2, nvmlComputeInstanceInfo_t)

/* Events. */

GET(nvmlDeviceGetSupportedEventTypes, ulonglong)
API nvmlDeviceRegisterEvents(handle_t device, ulonglong types, handle_t set) { CALL(V(device), V(types), V(set)); }
API nvmlEventSetCreate(handle_t *set) { CALL(M(set, sizeof *set)); }
DO(nvmlEventSetFree)
API nvmlEventSetWait(handle_t set, nvmlEventData_t *data, uint timeout_ms) {
    CALL(V(set), M(data, sizeof *data), V(timeout_ms));
}
API nvmlEventSetWait_v2(handle_t set, nvmlEventData_t *data, uint timeout_ms) {
    CALL(V(set), M(data, sizeof *data), V(timeout_ms));
}

/* CUDA's driver library, if this file is named libcuda.so.1: a context is a client of its process. */

API cuInit(uint flags) { CALL(V(flags)); }
API cuDeviceGet(int *device, int ordinal) { CALL(M(device, sizeof *device), V(ordinal)); }
API cuCtxCreate_v2(handle_t *context, uint flags, int device) {
    CALL(M(context, sizeof *context), V(flags), V(device), S(getenv("CUDA_VISIBLE_DEVICES")), V(getpid()));
}
