/* Device memory (files in the node's folder), IPC, virtual memory management, pins, pointers. */
#include "sim.h"
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

/* Range of device addresses in every process, so that a restarted process gets the same addresses. */
#define SPACE 0x600000000000ull
#define SPACE_BYTES (1ull << 42)
#define ALIGNMENT (2ull << 20)

static struct region *regions; /* live regions, by address */
static uint64_t next_id = 1;
int running, removing;

static uint64_t rounded(uint64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }
int is_device_address(uint64_t address) { return address >= SPACE && address < SPACE + SPACE_BYTES; }

struct region *find_region(uint64_t address) {
    for (struct region *r = regions; r && r->start <= address; r = r->next)
        if (address - r->start < r->bytes) return r;
    return NULL;
}

struct region *region_after(uint64_t address) {
    struct region *r = regions;
    while (r && r->start <= address) r = r->next;
    return r;
}

static struct region *add_region(enum kind kind, uint64_t start, uint64_t bytes, int fd) {
    struct region *new = calloc(1, sizeof *new), **place = &regions;
    *new = (struct region){.start = start, .bytes = bytes, .id = next_id++, .kind = kind, .is_live = 1, .fd = fd,
                           .opens = 1, .context = current};
    while (*place && (*place)->start < start) place = &(*place)->next;
    new->next = *place;
    return *place = new;
}

/* Queued copies detect the removal. The running copy ends first, so that no copy touches unmapped memory. */
static void remove_region(struct region *region) {
    struct region **place = &regions;
    while (*place != region) place = &(*place)->next;
    *place = region->next;
    region->is_live = 0;
    removing++;
    while (running) pthread_cond_wait(&changed, &lock);
    removing--;
    pthread_cond_broadcast(&changed);
    if (region->kind == PINNED) return;
    mmap((void *)region->start, rounded(region->bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    close(region->fd); /* also releases the lock that marks the memory as used */
}

/* The lowest free address for so many bytes. Freed addresses are used again. 0: no free address. */
static uint64_t find_place(uint64_t bytes) {
    static int is_reserved;
    if (!is_reserved) {
        void *space = mmap((void *)SPACE, SPACE_BYTES, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
        if (space != (void *)SPACE) return 0;
        is_reserved = 1;
    }
    uint64_t place = SPACE;
    for (struct region *r = regions; r; r = r->next) {
        if (!is_device_address(r->start)) continue;
        if (r->start >= place && r->start - place >= rounded(bytes)) break;
        place = r->start + rounded(r->bytes);
    }
    return place + rounded(bytes) <= SPACE + SPACE_BYTES ? place : 0;
}

/* ---- allocations and their handles ---- */

/* Content of a simulated IPC handle; the rest of its 64 bytes is 0. */
struct handle {
    int32_t pid, device;
    uint64_t start, bytes;
    uint64_t id; /* 0 with CUDASIM_SAME_HANDLES: then a reused address has the same handle again */
};

static const char *memory_path(char *path, const struct handle *h, int is_freed) {
    char name[128];
    snprintf(name, sizeof name, "memory-%d-%s%d-%llx-%llx", h->device, is_freed ? "freed-" : "", h->pid,
             (unsigned long long)h->start, (unsigned long long)h->id);
    return node_path(path, name);
}

/* No process can open it from now on. Processes with an open handle retain the memory. Node locked. */
static void hide(const struct handle *handle) {
    char path[512], hidden[512];
    struct handle unique = *handle;
    getrandom(&unique.id, sizeof unique.id, 0);
    rename(memory_path(path, handle, 0), memory_path(hidden, &unique, 1));
}

static CUresult allocate(uint64_t *out, uint64_t start, uint64_t bytes, enum kind kind) {
    char path[512];
    struct handle handle = {.pid = getpid(), .device = current->device, .start = start, .bytes = bytes};
    if (kind == VIRTUAL || !*setting("CUDASIM_SAME_HANDLES", "")) getrandom(&handle.id, sizeof handle.id, 0);
    node_lock();
    CUresult rc = check_room(current->device, bytes);
    int fd = -1;
    if (!rc) {
        hide(&handle); /* handle of a dead process with the same number and address */
        fd = open(memory_path(path, &handle, 0), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (fd < 0 || flock(fd, LOCK_SH) || ftruncate(fd, (off_t)bytes)) rc = OUT_OF_MEMORY;
    }
    node_unlock();
    if (rc) return rc;
    if (mmap((void *)start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return close(fd), OUT_OF_MEMORY;
    memcpy(add_region(kind, start, bytes, fd)->handle, &handle, sizeof handle);
    count(ALLOCATIONS, 1);
    count(ALLOCATED_BYTES, (int64_t)bytes);
    *out = start;
    return OK;
}

static CUresult release(uint64_t start, enum kind kind) {
    struct region *region = find_region(start);
    if (!region || region->start != start || region->kind != kind) return INVALID_VALUE;
    node_lock();
    hide((struct handle *)region->handle);
    node_unlock();
    remove_region(region);
    count(ALLOCATIONS, -1);
    count(ALLOCATED_BYTES, -(int64_t)region->bytes);
    return OK;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes) {
    ENTER(1);
    if (!bytes) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    uint64_t place = find_place(bytes), start = 0;
    CUresult rc = place ? allocate(&start, place, bytes, ALLOCATED) : OUT_OF_MEMORY;
    pthread_mutex_unlock(&lock);
    *out = start;
    return rc;
}

API CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    CUresult rc = release(address, ALLOCATED);
    pthread_mutex_unlock(&lock);
    return rc;
}

/* ---- IPC ---- */

API CUresult cuIpcGetMemHandle(unsigned char *out, CUdeviceptr address) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    struct region *region = find_region(address);
    CUresult rc = region && region->kind == ALLOCATED ? OK : INVALID_VALUE;
    if (!rc) memcpy(out, region->handle, 64);
    pthread_mutex_unlock(&lock);
    return rc;
}

struct raw_handle { unsigned char bytes[64]; };

static CUresult import(uint64_t *out, const struct handle *handle) {
    char path[512];
    node_lock();
    int fd = open(memory_path(path, handle, 0), O_RDWR | O_CLOEXEC);
    if (fd >= 0) flock(fd, LOCK_SH);
    node_unlock();
    struct stat info;
    if (fd < 0) return INVALID_VALUE;
    uint64_t place = fstat(fd, &info) ? 0 : find_place((uint64_t)info.st_size);
    if (!place || mmap((void *)place, (size_t)info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return close(fd), OUT_OF_MEMORY;
    memcpy(add_region(IMPORTED, place, (uint64_t)info.st_size, fd)->handle, handle, sizeof *handle);
    count(MAPPINGS, 1);
    *out = place;
    return OK;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, struct raw_handle raw, unsigned flags) {
    ENTER(1);
    struct handle handle;
    memcpy(&handle, &raw, sizeof handle);
    if (flags != 1) return INVALID_VALUE;
    if (handle.pid == getpid()) return INVALID_CONTEXT; /* only the value counts, not the namespace */
    if (handle.device != current->device) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct region *r = regions;
    while (r && (r->kind != IMPORTED || memcmp(r->handle, &raw, 64))) r = r->next;
    uint64_t start = r ? r->start : 0;
    CUresult rc = r ? (r->opens++, OK) : import(&start, &handle);
    pthread_mutex_unlock(&lock);
    *out = start;
    return rc;
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    struct region *region = find_region(address);
    CUresult rc = region && region->start == address && region->kind == IMPORTED ? OK : INVALID_VALUE;
    if (!rc && !--region->opens) {
        remove_region(region);
        count(MAPPINGS, -1);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

/* ---- pins ---- */

API CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    ENTER(1);
    (void)flags;
    uint64_t start = (uint64_t)address;
    unsigned char resident;
    if (!may_call()) return CAPTURE_UNSUPPORTED;
    if (!bytes || is_device_address(start) || mincore((void *)(start & ~4095ull), 1, &resident)) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    struct region *after = region_after(start);
    int overlaps = find_region(start) || (after && after->start - start < bytes);
    if (!overlaps) {
        add_region(PINNED, start, bytes, -1);
        count(PINS, 1);
        count(PINNED_BYTES, (int64_t)bytes);
    }
    pthread_mutex_unlock(&lock);
    return overlaps ? ALREADY_REGISTERED : OK;
}

API CUresult cuMemHostUnregister(void *address) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    struct region *region = find_region((uint64_t)address);
    CUresult rc = region && region->kind == PINNED && region->start == (uint64_t)address ? OK : NOT_REGISTERED;
    if (!rc) {
        remove_region(region);
        count(PINS, -1);
        count(PINNED_BYTES, -(int64_t)region->bytes);
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

/* ---- virtual memory management for sleep mode and expandable segments; it has no IPC handles ---- */

static size_t created[64]; /* sizes; a handle is an index + 1 */

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
    ENTER(1);
    (void)alignment, (void)hint, (void)flags;
    static uint64_t next = SPACE + SPACE_BYTES / 2; /* addresses are not reused: enough for tests */
    pthread_mutex_lock(&lock);
    CUresult rc = find_place(bytes) ? OK : OUT_OF_MEMORY; /* reserves the space at the first call */
    *out = next;
    next += rounded(bytes);
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) { ENTER(1); (void)address, (void)bytes; return OK; }

API CUresult cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    ENTER(0);
    (void)properties, (void)option;
    *bytes = ALIGNMENT;
    return OK;
}

API CUresult cuMemCreate(unsigned long long *out, size_t bytes, const void *properties, unsigned long long flags) {
    ENTER(1);
    (void)properties, (void)flags;
    for (unsigned i = 0; i < 64; i++)
        if (!created[i]) return created[i] = bytes, *out = i + 1, OK;
    return OUT_OF_MEMORY;
}

API CUresult cuMemRelease(unsigned long long handle) {
    ENTER(1);
    if (!handle || handle > 64) return INVALID_VALUE;
    created[handle - 1] = 0;
    return OK;
}

API CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, unsigned long long handle, unsigned long long flags) {
    ENTER(1);
    (void)offset, (void)flags;
    if (!handle || handle > 64 || bytes != created[handle - 1]) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    uint64_t start;
    CUresult rc = find_region(address) ? INVALID_VALUE : allocate(&start, address, bytes, VIRTUAL);
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const void *descriptions, size_t number) {
    ENTER(1);
    (void)address, (void)bytes, (void)descriptions, (void)number;
    return OK;
}

API CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    ENTER(1);
    (void)bytes;
    pthread_mutex_lock(&lock);
    CUresult rc = release(address, VIRTUAL);
    pthread_mutex_unlock(&lock);
    return rc;
}

/* ---- questions about pointers ---- */

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr address) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    struct region *region = find_region(address);
    CUresult rc = region && region->kind != PINNED ? OK : NOT_FOUND;
    if (!rc && start) *start = region->start;
    if (!rc && bytes) *bytes = region->bytes;
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuPointerGetAttribute(void *value, int attribute, CUdeviceptr address) {
    ENTER(0);
    pthread_mutex_lock(&lock);
    struct region *region = find_region(address);
    CUresult rc = region ? OK : INVALID_VALUE;
    if (!rc) switch (attribute) {
    case 1: *(void **)value = region->context; break;
    case 2: *(unsigned *)value = region->kind == PINNED ? 1 : 2; break; /* host, device */
    case 7: *(uint64_t *)value = region->id; break;
    case 9: *(int *)value = ordinal_of(region->context->device); break;
    case 10: *(unsigned *)value = region->kind == ALLOCATED; break;     /* whether IPC can export it */
    case 11: *(uint64_t *)value = region->start; break;
    case 12: *(size_t *)value = region->bytes; break;
    default: rc = INVALID_VALUE;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}
