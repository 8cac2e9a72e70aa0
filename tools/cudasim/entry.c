/* Names of errors, and entry points by name and version. */
#include "sim.h"

API CUresult cuGetErrorName(CUresult error, const char **name) {
    static const struct { CUresult error; const char *name; } NAMES[] = {
        {OK, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
        {DEVICE_UNAVAILABLE, "CUDA_ERROR_DEVICE_UNAVAILABLE"}, {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
        {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"}, {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
        {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
        {NOT_READY, "CUDA_ERROR_NOT_READY"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
        {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
        {719, "CUDA_ERROR_LAUNCH_FAILED"}, {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
        {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    };
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (NAMES[i].error == error) return *name = NAMES[i].name, OK;
    return *name = NULL, INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

/* `version`: newest CUDA version that the caller supports. */
API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)flags;
    static const int BATCHES_SINCE = 12080, NEW_BATCHES_SINCE = 13000;
    int driver = atoi(setting("CUDASIM_DRIVER_VERSION", "13000")), is_batch = !strcmp(name, "cuMemcpyBatchAsync");
    if (version > driver) version = driver;
    *function = is_batch && version < NEW_BATCHES_SINCE ? NULL : find_entry(name, 1);
    if (!*function) *function = find_entry(name, 0);
    if (is_batch && version < BATCHES_SINCE) *function = NULL;
    if (!strcmp(name, setting("CUDASIM_MISSING", ""))) *function = NULL;
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
