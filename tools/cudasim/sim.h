/* A simulated CUDA driver: what a program sees of libcuda.so.1, on memory of the host.
 *
 * It shows: queues with a thread each, so that copies are late; events; IPC between processes; pinning;
 * contexts that break; memory that runs out; faults on demand. It is stricter than hardware: a copy that
 * touches memory that was freed, closed or unregistered, or that lies in no allocation, breaks its context
 * (error 700) where hardware may well read somebody else's bytes.
 *
 * It can't show: bandwidth, overlap of copies with kernels, the legacy stream's implicit waits, what a call
 * costs, drivers' quirks, what kernels compute. Only a GPU shows those: `make gpu-check`.
 *
 * docs/reference/simulated-driver.md has the environment variables and the words of the control file.
 *
 * state.c   the node (a folder that all processes share), this process's record, orders, faults
 * device.c  devices, primary contexts, the current context of a thread
 * memory.c  allocations, mappings of virtual memory, IPC, pins, questions about pointers
 * stream.c  streams, events, copies
 * entry.c   names of errors, the table of entry points
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
    NOT_READY = 600, ILLEGAL_ADDRESS = 700, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

/* ---- state.c ---- */

/* What a process has and did; others read it in its record. An entry each, 24 bytes name and 8 value. */
enum counter {
    PID, CONTEXTS, ALLOCATIONS, ALLOCATED_BYTES, MAPPINGS, STREAMS, EVENTS, PINS, PINNED_BYTES,
    BATCHES, SINGLE_COPIES, PIECES, COPIED_BYTES, PAGEABLE_PIECES, WRITES_TO_IMPORTS, ILLEGAL_PIECES,
    CONTEXTS_ON_0, /* .. + MAX_DEVICES - 1: which devices they are on */
    NUM_COUNTERS = CONTEXTS_ON_0 + 8,
};
#define MAX_DEVICES 8

extern pthread_mutex_t lock;    /* guards everything in this process */
extern pthread_cond_t changed;  /* broadcast when anything that somebody waits for has changed */

void count(enum counter which, int64_t by);
int node_open(void);            /* take part in the node; once. Returns an error code. */
const char *node_path(char *out, const char *name); /* out: 512 bytes */
void node_lock(void);           /* between processes, and `lock` held: for what lies in the node's folder */
void node_unlock(void);
int is_abandoned(const char *path); /* does no process hold this file any more? */
int contexts_of_others(int device);
int num_contexts(int device);   /* of all processes */

/* Orders: the environment variable CUDASIM_ORDERS and the file `orders` in the node's folder. */
int fault(const char *function); /* the error that this call has to return, or 0; counts the call */
int is_stalled(void);
double rate(const char *name);   /* `rate` or `pin_rate` in bytes per second; 0: as fast as it goes */
double die_after(void);          /* bytes of copies after which the process dies; 0: never */
void nap(double seconds);
const char *setting(const char *name, const char *otherwise);

/* ---- entry.c ---- */

void *find_entry(const char *name, int is_newer_form);

/* ---- device.c ---- */

struct context {
    int device;   /* its number on the node, not among the visible */
    int retained;
    int sticky;   /* the error that broke it */
    struct stream *legacy;
};
extern __thread struct context *current;

int visible(int ordinal);          /* number on the node of a visible device, or -1 */
int ordinal_of(int device);
const char *device_uuid(int device);
CUresult entered(const char *function, int needs_context);

/* First line of every entry point: faults on demand, no context, a broken context. */
#define ENTER(needs_context)                                    \
    do {                                                        \
        CUresult rc_ = entered(__func__, needs_context);        \
        if (rc_) return rc_;                                    \
    } while (0)

/* ---- memory.c ---- */

enum kind { ALLOCATED, VIRTUAL, IMPORTED, PINNED };

/* Never freed: a queued copy must be able to tell that its memory is gone. */
struct region {
    struct region *next;  /* by address; only what is live */
    uint64_t start, bytes, id;
    enum kind kind;
    int is_live, fd, opens;
    struct context *context;
    unsigned char handle[64];
};

struct region *find_region(uint64_t address);           /* what holds this address; lock held */
struct region *region_after(uint64_t address);          /* the first that starts above it; lock held */
int is_device_address(uint64_t address);

/* ---- stream.c ---- */

struct piece {
    uint64_t to, from, bytes;
    struct region *to_region, *from_region; /* NULL: pageable memory of the host */
};
extern int running, removing; /* pieces that are being copied; calls that wait until there are none */
