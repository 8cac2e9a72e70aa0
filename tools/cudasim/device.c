/* Devices, primary contexts, and the current context of each thread. */
#include "sim.h"
#include <dirent.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static char uuids[MAX_DEVICES][64]; /* of the node's devices: "GPU-..." or "MIG-..." */
static int num_devices, visible_devices[MAX_DEVICES], num_visible, is_initialized;
static struct context contexts[MAX_DEVICES];

#define MAX_DEPTH 16
__thread struct context *current;
static __thread struct context *stack[MAX_DEPTH];
static __thread int depth;

CUresult entered(const char *function, int needs_context) {
    if (!is_initialized || node_open()) return NOT_INITIALIZED;
    int code = fault(function);
    if (code >= 700 && code < 720 && code != ALREADY_REGISTERED && code != NOT_REGISTERED && current) {
        pthread_mutex_lock(&lock);
        current->sticky = code;
        pthread_cond_broadcast(&changed); /* waits end */
        pthread_mutex_unlock(&lock);
    }
    if (code) return code;
    if (!needs_context) return OK;
    if (!current || !current->retained) return INVALID_CONTEXT;
    return current->sticky;
}

#define RELAXED 2
static __thread int capture_mode; /* 0: global, 1: by thread */

int may_call(void) { return capture_mode == RELAXED || !is_capturing(); }

API CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(0);
    int former = capture_mode;
    capture_mode = *mode;
    *mode = former;
    return OK;
}

static void read_devices(void) {
    char copy[1024], *rest = copy;
    snprintf(copy, sizeof copy, "%s", setting("CUDASIM_DEVICES", "GPU-00000000-0000-0000-0000-000000000000"));
    for (char *part; num_devices < MAX_DEVICES && (part = strsep(&rest, ","));)
        snprintf(uuids[num_devices++], sizeof *uuids, "%s", part);
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    if (!wanted) {
        for (; num_visible < num_devices; num_visible++) visible_devices[num_visible] = num_visible;
        return;
    }
    snprintf(copy, sizeof copy, "%s", wanted);
    rest = copy;
    for (char *part; num_visible < MAX_DEVICES && (part = strsep(&rest, ","));) {
        int found = -1;
        for (int i = 0; i < num_devices; i++) {
            char number[16];
            snprintf(number, sizeof number, "%d", i);
            if (!strcmp(part, number) || (strlen(part) > 4 && !strncmp(part, uuids[i], strlen(part)))) found = i;
        }
        if (found < 0) return; /* as the real driver: devices after an unknown name are hidden, too */
        visible_devices[num_visible++] = found;
    }
}

int visible(int ordinal) { return ordinal >= 0 && ordinal < num_visible ? visible_devices[ordinal] : -1; }
const char *device_uuid(int device) { return uuids[device]; }

int ordinal_of(int device) {
    for (int i = 0; i < num_visible; i++) if (visible_devices[i] == device) return i;
    return -1;
}

API CUresult cuInit(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    CUresult rc = node_open();
    if (!rc && !is_initialized) read_devices();
    if (!rc && !(rc = fault(__func__)) && !num_visible) rc = NO_DEVICE;
    is_initialized |= !rc;
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuDriverGetVersion(int *version) {
    *version = atoi(setting("CUDASIM_DRIVER_VERSION", "13000"));
    return OK;
}

API CUresult cuDeviceGetCount(int *number) { ENTER(0); *number = num_visible; return OK; }

API CUresult cuDeviceGet(int *device, int ordinal) {
    ENTER(0);
    if (visible(ordinal) < 0) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}

API CUresult cuDeviceGetName(char *name, int length, int device) {
    ENTER(0);
    if (visible(device) < 0) return INVALID_DEVICE;
    int is_slice = !strncmp(uuids[visible(device)], "MIG-", 4);
    snprintf(name, (size_t)length, is_slice ? "Simulated GPU MIG 1g.10gb" : "Simulated GPU");
    return OK;
}

API CUresult cuDeviceGetPCIBusId(char *name, int length, int device) {
    ENTER(0);
    if (visible(device) < 0) return INVALID_DEVICE;
    snprintf(name, (size_t)length, "0000:%02X:00.0", visible(device) + 1);
    return OK;
}

API CUresult cuDeviceGetUuid_v2(unsigned char *out, int device) {
    ENTER(0);
    if (visible(device) < 0) return INVALID_DEVICE;
    const char *text = uuids[visible(device)] + 4;
    for (int i = 0; i < 16; text += 2) {
        unsigned byte = 0;
        if (*text == '-') text++;
        sscanf(text, "%2x", &byte);
        out[i++] = (unsigned char)byte;
    }
    return OK;
}

static int compute_mode(void) { return atoi(setting("CUDASIM_COMPUTE_MODE", "0")); }

API CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(0);
    if (visible(device) < 0) return INVALID_DEVICE;
    switch (attribute) {
    case 16: *value = 1; break;              /* multiprocessors */
    case 20: *value = compute_mode(); break;
    case 40: *value = 2; break;              /* copy engines */
    case 41: *value = 1; break;              /* unified addressing */
    case 75: *value = 9; break;              /* compute capability */
    case 76: *value = 0; break;
    case 91: *value = !*setting("CUDASIM_NO_HOST_POINTERS", ""); break; /* pinned memory has its own address */
    case 125: *value = 1; break;             /* IPC events */
    default: return INVALID_VALUE;           /* not simulated */
    }
    return OK;
}

/* ---- used memory of a device: memory files that a process has locked ---- */

static uint64_t used_bytes(int device) {
    char path[512];
    uint64_t used = 0;
    DIR *folder = opendir(node_path(path, ""));
    for (struct dirent *file; folder && (file = readdir(folder));) {
        int number;
        struct stat info;
        if (sscanf(file->d_name, "memory-%d-", &number) != 1 || number != device) continue;
        if (stat(node_path(path, file->d_name), &info)) continue;
        if (is_abandoned(path)) unlink(path);
        else used += (uint64_t)info.st_size;
    }
    if (folder) closedir(folder);
    return used + (uint64_t)num_contexts(device) * strtoull(setting("CUDASIM_CONTEXT_BYTES", "0"), NULL, 0);
}

static uint64_t total_bytes(void) { return strtoull(setting("CUDASIM_MEMORY", "17179869184"), NULL, 0); }

CUresult check_room(int device, uint64_t bytes) {
    uint64_t used = used_bytes(device);
    return used + bytes > total_bytes() ? OUT_OF_MEMORY : OK;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER(0);
    if (visible(device) < 0) return INVALID_DEVICE;
    *bytes = total_bytes();
    return OK;
}

API CUresult cuDevicePrimaryCtxRetain(struct context **out, int ordinal) {
    ENTER(0);
    int device = visible(ordinal);
    if (device < 0) return INVALID_DEVICE;
    struct context *context = &contexts[device];
    CUresult rc = OK;
    pthread_mutex_lock(&lock);
    node_lock();
    if (!context->retained) {
        if (compute_mode() == 2 || (compute_mode() == 3 && contexts_of_others(device))) rc = DEVICE_UNAVAILABLE;
        else rc = check_room(device, strtoull(setting("CUDASIM_CONTEXT_BYTES", "0"), NULL, 0));
        if (!rc) {
            context->device = device;
            count(CONTEXTS, 1);
            count(CONTEXTS_ON_0 + device, 1);
        }
    }
    if (!rc) context->retained++;
    node_unlock();
    pthread_mutex_unlock(&lock);
    *out = rc ? NULL : context;
    return rc;
}

API CUresult cuDevicePrimaryCtxRelease_v2(int ordinal) {
    ENTER(0);
    int device = visible(ordinal);
    if (device < 0) return INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    CUresult rc = contexts[device].retained ? OK : INVALID_CONTEXT;
    if (!rc && !--contexts[device].retained) {
        count(CONTEXTS, -1);
        count(CONTEXTS_ON_0 + device, -1);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuCtxPushCurrent_v2(struct context *context) {
    ENTER(0);
    if (!context || depth == MAX_DEPTH) return INVALID_CONTEXT;
    stack[depth++] = current;
    current = context;
    return OK;
}

API CUresult cuCtxPopCurrent_v2(struct context **context) {
    ENTER(0);
    if (!depth) return INVALID_CONTEXT;
    if (context) *context = current;
    current = stack[--depth];
    return OK;
}

API CUresult cuCtxSetCurrent(struct context *context) { ENTER(0); current = context; return OK; }
API CUresult cuCtxGetCurrent(struct context **context) { ENTER(0); *context = current; return OK; }

API CUresult cuCtxGetDevice(int *device) { ENTER(1); *device = ordinal_of(current->device); return OK; }

API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    node_lock();
    uint64_t used = used_bytes(current->device);
    node_unlock();
    pthread_mutex_unlock(&lock);
    *total = total_bytes();
    *free_bytes = used < *total ? *total - used : 0;
    return OK;
}
