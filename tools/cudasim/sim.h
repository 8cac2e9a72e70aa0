/* A simulated CUDA driver: the interface of libcuda.so.1, on memory of the host.
 *
 * It simulates streams with one thread each, so that copies are asynchronous. It also simulates events, IPC
 * between processes, pinning, broken contexts, exhausted memory, and faults on demand. It is stricter than
 * hardware: a copy that touches freed, closed or unregistered memory, or memory outside of all allocations,
 * breaks its context (error 700). Hardware may read the bytes of another process instead.
 *
 * It does not simulate bandwidth, overlap of copies with kernels, implicit waits of the legacy stream, the cost
 * of calls, defects of drivers, or the results of kernels. `make gpu-check` measures those on a GPU.
 *
 * docs/reference/simulated-driver.md lists the environment variables and the commands of the control file.
 *
 * A file uses only the files above it in this list:
 * state.c   the node (a folder that all processes share), the record of this process, entry points, orders, faults
 * device.c  devices and their used memory, primary contexts, the current context of a thread
 * memory.c  allocations, mappings of virtual memory, IPC, pins, questions about pointers
 * stream.c  streams, events, copies
 * entry.c   names of errors, entry points by name and version
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef int CUresult;
typedef unsigned long long CUdeviceptr;

enum { /* as in cuda.h */
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, DEVICE_UNAVAILABLE = 46,
    NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500,
    NOT_READY = 600, ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

/* ---- state.c ---- */

/* Counters of a process, which other processes read in its record. An entry has 24 bytes of name and 8 of value. */
enum counter {
    PID, CONTEXTS, ALLOCATIONS, ALLOCATED_BYTES, MAPPINGS, STREAMS, EVENTS, PINS, PINNED_BYTES,
    BATCHES, SINGLE_COPIES, PIECES, COPIED_BYTES, PAGEABLE_PIECES, WRITES_TO_IMPORTS, ILLEGAL_PIECES,
    REFUSED_BATCHES,
    CONTEXTS_ON_0, /* .. + MAX_DEVICES - 1: contexts by device */
    NUM_COUNTERS = CONTEXTS_ON_0 + 8,
};
#define MAX_DEVICES 8

extern pthread_mutex_t lock;    /* guards all state of this process */
extern pthread_cond_t changed;  /* broadcast after each change that a thread may wait for */

void count(enum counter which, int64_t by);
int node_open(void);            /* join the node, once; returns an error code */
const char *node_path(char *out, const char *name); /* out: 512 bytes */
void node_lock(void);           /* lock the node's folder against other processes; `lock` must be held */
void node_unlock(void);
int is_abandoned(const char *path); /* no process has this file locked */
int contexts_of_others(int device);
int num_contexts(int device);   /* of all processes */

/* Orders: the environment variable CUDASIM_ORDERS and the file `orders` in the node's folder. */
int fault(const char *function); /* error that this call must return, or 0; counts the call */
int is_stalled(void);
int is_capturing(void);          /* an engine captures a CUDA graph, in the mode "global" */
double rate(void);               /* copies in bytes per second; 0: no limit */
double die_after(void);          /* bytes of copies after which the process dies; 0: never */
void nap(double seconds);
const char *setting(const char *name, const char *otherwise);
void *find_entry(const char *name, int is_newer_form); /* entry point of this library, or NULL */

/* ---- device.c ---- */

struct context {
    int device;   /* number on the node, not among the visible devices */
    int retained;
    int sticky;   /* the error that broke it */
    struct stream *legacy;
};
extern __thread struct context *current;

int visible(int ordinal);          /* number on the node of a visible device, or -1 */
int ordinal_of(int device);
const char *device_uuid(int device);
CUresult entered(const char *function, int needs_context);
CUresult check_room(int device, uint64_t bytes); /* OUT_OF_MEMORY if less of its memory is free; the node must be locked */
int may_call(void); /* 0: a capture forbids calls that may synchronize, and this thread is not exempt */

/* First line of every entry point: faults on demand, no context, a broken context. */
#define ENTER(needs_context)                                    \
    do {                                                        \
        CUresult rc_ = entered(__func__, needs_context);        \
        if (rc_) return rc_;                                    \
    } while (0)

/* ---- memory.c ---- */

enum kind { ALLOCATED, VIRTUAL, IMPORTED, PINNED };

/* Never freed, so that a queued copy can detect that its memory was freed. */
struct region {
    struct region *next;  /* live regions by address */
    uint64_t start, bytes, id;
    enum kind kind;
    int is_live, fd, opens;
    struct context *context;
    unsigned char handle[64];
};

struct region *find_region(uint64_t address);           /* region with this address; lock held */
struct region *region_after(uint64_t address);          /* first region above it; lock held */
int is_device_address(uint64_t address);
extern int running, removing; /* number of pieces in copy, and of calls that wait until it is 0 */

/* ---- stream.c ---- */

struct piece {
    uint64_t to, from, bytes;
    struct region *to_region, *from_region; /* NULL: pageable memory of the host */
};
