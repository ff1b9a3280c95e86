/* The part of NVIDIA's management library that this project asks, as it answers on a machine with 8 GPUs.
 *
 * GPU i draws 500 + 10 i W; its energy counter is that times CLOCK_MONOTONIC. GPU 3 is at its power cap, the others idle.
 * Of GPU 7 no memory is in use. No GPU tells the temperature of its memory. Clocks of applications are deprecated, as with drivers from 575 on.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define GPUS 8
#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define DEPRECATED 26

typedef void *device;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { unsigned long long total, free, used; } memory_info;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_info_v2;
typedef struct { unsigned gpu, memory; } utilization;
typedef struct { uint32_t id, scope; int64_t time, latency; uint32_t type, status; uint64_t value; } field_value;

static unsigned number(device gpu) { return (unsigned)((uintptr_t)gpu - 1); }
static unsigned milliwatts(device gpu) { return 500000 + 10000 * number(gpu); }

const char *nvmlErrorString(int status) {
    if (status == NOT_SUPPORTED) return "Not Supported";
    return status == DEPRECATED ? "The requested functionality has been deprecated" : "Unknown Error";
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.95.05"); return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *gpu) {
    if (index >= GPUS) return INVALID_ARGUMENT;
    *gpu = (device)(uintptr_t)(index + 1);
    return OK;
}

int nvmlDeviceGetName(device gpu, char *text, unsigned size) {
    (void)gpu;
    snprintf(text, size, "NVIDIA B300 SXM6 AC");
    return OK;
}

int nvmlDeviceGetUUID(device gpu, char *text, unsigned size) {
    snprintf(text, size, "GPU-%08u-1111-2222-3333-444444444444", number(gpu));
    return OK;
}

int nvmlDeviceGetVbiosVersion(device gpu, char *text, unsigned size) {
    (void)gpu;
    snprintf(text, size, "97.10.3B.00.01");
    return OK;
}

int nvmlDeviceGetPciInfo_v3(device gpu, pci_info *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", 0x1A + 0x10 * number(gpu));
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device gpu, memory_info_v2 *info) {
    info->total = 275040ull << 20;
    info->reserved = 1500ull << 20;
    info->used = (number(gpu) == 7 ? 4ull : 4096ull) << 20;
    info->free = info->total - info->reserved - info->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo(device gpu, memory_info *info) {
    memory_info_v2 told;
    nvmlDeviceGetMemoryInfo_v2(gpu, &told);
    info->total = told.total;
    info->used = told.reserved + told.used;
    info->free = told.free;
    return OK;
}

int nvmlDeviceGetEnforcedPowerLimit(device gpu, unsigned *limit) { (void)gpu; *limit = 1000000; return OK; }
int nvmlDeviceGetPowerManagementDefaultLimit(device gpu, unsigned *limit) { (void)gpu; *limit = 1100000; return OK; }

int nvmlDeviceGetPowerManagementLimitConstraints(device gpu, unsigned *least, unsigned *most) {
    (void)gpu;
    *least = 200000;
    *most = 1100000;
    return OK;
}

int nvmlDeviceGetPowerUsage(device gpu, unsigned *power) { *power = milliwatts(gpu); return OK; }

int nvmlDeviceGetTotalEnergyConsumption(device gpu, unsigned long long *energy) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *energy = (unsigned long long)((now.tv_sec + now.tv_nsec / 1e9) * milliwatts(gpu));
    return OK;
}

int nvmlDeviceGetClockInfo(device gpu, unsigned kind, unsigned *clock) {
    *clock = kind == 2 ? 3996 : 1900 + number(gpu);
    return OK;
}

int nvmlDeviceGetMaxClockInfo(device gpu, unsigned kind, unsigned *clock) {
    (void)gpu;
    *clock = kind == 2 ? 3996 : 2032;
    return OK;
}

int nvmlDeviceGetApplicationsClock(device gpu, unsigned kind, unsigned *clock) {
    (void)gpu, (void)kind, (void)clock;
    return DEPRECATED;
}

int nvmlDeviceGetTemperature(device gpu, unsigned sensor, unsigned *temperature) {
    (void)sensor;
    *temperature = 40 + number(gpu);
    return OK;
}

int nvmlDeviceGetFieldValues(device gpu, int count, field_value *values) {
    (void)gpu;
    for (int i = 0; i < count; i++) values[i].status = NOT_SUPPORTED;
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(device gpu, unsigned long long *reasons) {
    *reasons = number(gpu) == 3 ? 0x4 : 0x1;
    return OK;
}

int nvmlDeviceGetUtilizationRates(device gpu, utilization *used) {
    used->gpu = 10 * number(gpu);
    used->memory = 0;
    return OK;
}

int nvmlDeviceGetPersistenceMode(device gpu, unsigned *mode) { (void)gpu; *mode = 1; return OK; }
int nvmlDeviceGetComputeMode(device gpu, unsigned *mode) { (void)gpu; *mode = 0; return OK; }
int nvmlDeviceGetMigMode(device gpu, unsigned *now, unsigned *next) { (void)gpu; *now = *next = 0; return OK; }
int nvmlDeviceGetEccMode(device gpu, unsigned *now, unsigned *next) { (void)gpu; *now = *next = 1; return OK; }

int nvmlDeviceGetTotalEccErrors(device gpu, unsigned kind, unsigned counter, unsigned long long *count) {
    (void)counter;
    *count = kind == 0 && number(gpu) == 5 ? 12 : 0;
    return OK;
}

int nvmlDeviceGetCurrPcieLinkGeneration(device gpu, unsigned *value) { (void)gpu; *value = 1; return OK; }
int nvmlDeviceGetMaxPcieLinkGeneration(device gpu, unsigned *value) { (void)gpu; *value = 5; return OK; }
int nvmlDeviceGetCurrPcieLinkWidth(device gpu, unsigned *value) { (void)gpu; *value = 16; return OK; }
int nvmlDeviceGetMaxPcieLinkWidth(device gpu, unsigned *value) { (void)gpu; *value = 16; return OK; }

int nvmlDeviceGetNvLinkVersion(device gpu, unsigned link, unsigned *version) {
    (void)gpu, (void)link;
    *version = 7;
    return OK;
}
