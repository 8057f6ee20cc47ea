/* NVML of GPUs whose counters are files: the UUID of a GPU is "GPU-" and the path of its file. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9 };

int nvmlInit_v2(void) { return getenv("FAKE_NVML_BROKEN") ? DRIVER_NOT_LOADED : SUCCESS; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strncmp(uuid, "GPU-", 4) != 0) return INVALID_ARGUMENT;
    *device = strdup(uuid + 4);
    return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) {
    FILE *file = fopen(device, "r");
    if (file == NULL) return NOT_SUPPORTED;
    int numbers = fscanf(file, "%llu", millijoules);
    fclose(file);
    return numbers == 1 ? SUCCESS : NOT_SUPPORTED;
}
