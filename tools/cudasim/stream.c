/* Streams with a queue and a thread each, events, and asynchronous copies. */
#include "sim.h"
#include <signal.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct event { uint64_t handle, recorded, reached; double time; struct event *next; };

enum what { COPY, FILL, KERNEL, RECORD, WAIT, WAIT_VALUE, WRITE_VALUE };

struct op {
    struct op *next;
    enum what what;
    size_t count;
    struct event *event;
    uint64_t version;        /* version of the event */
    uint64_t address, bytes; /* target of a fill or a value */
    struct region *region;
    uint32_t value;
    struct piece pieces[];
};

struct stream {
    uint64_t handle, submitted, done;
    struct stream *next;
    struct context *context;
    struct op *first, **last;
    int is_closing;
    pthread_t thread;
};

/* Handles are numbers that are never reused, so a destroyed object differs from each new one. */
static struct stream *streams;
static struct event *events;
static uint64_t next_handle = 0x51000000;

static struct stream *create(void);

/* 0 and 1 mean the legacy stream of the current context. */
static struct stream *find_stream(uint64_t handle) {
    if (handle == 0 || handle == 1) {
        if (!current->legacy) current->legacy = create();
        return current->legacy;
    }
    struct stream *s = streams;
    while (s && s->handle != handle) s = s->next;
    return s;
}

static struct event *find_event(uint64_t handle) {
    struct event *e = events;
    while (e && e->handle != handle) e = e->next;
    return e;
}

/* ---- the thread of a stream ---- */

static int can_touch(struct region *region, uint64_t address, uint64_t bytes) {
    if (!region) return !is_device_address(address); /* host memory: checked at the copy */
    return region->is_live && address - region->start + bytes <= region->bytes;
}

static void illegal(struct context *context) {
    context->sticky = ILLEGAL_ADDRESS;
    count(ILLEGAL_PIECES, 1);
}

/* Pageable memory may be unmapped. The kernel reports this as an error, and memcpy would crash. */
static int copy_bytes(const struct piece *piece, uint64_t done, uint64_t bytes) {
    void *to = (void *)(piece->to + done), *from = (void *)(piece->from + done);
    struct iovec here = {to, bytes}, there = {from, bytes};
    if (!piece->from_region) return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == (ssize_t)bytes;
    if (!piece->to_region) return here.iov_base = from, there.iov_base = to,
        process_vm_writev(getpid(), &here, 1, &there, 1, 0) == (ssize_t)bytes;
    memcpy(to, from, bytes);
    return 1;
}

#define SLICE (256ull << 10)

static void pace(uint64_t bytes) {
    static __thread double debt; /* seconds */
    static uint64_t total;
    double limit = die_after(), speed = rate();
    if (limit > 0 && (double)__atomic_add_fetch(&total, bytes, __ATOMIC_RELAXED) >= limit) kill(getpid(), SIGKILL);
    while (is_stalled()) nap(5e-4);
    if (speed > 0 && (debt += (double)bytes / speed) > 2e-4) nap(debt), debt = 0;
}

/* Lock held; released during each slice. Memory can be removed between two slices, but not during one. */
static void run_piece(struct context *context, const struct piece *piece) {
    for (uint64_t done = 0; done < piece->bytes && !context->sticky;) {
        while (removing) pthread_cond_wait(&changed, &lock);
        uint64_t bytes = piece->bytes - done < SLICE ? piece->bytes - done : SLICE;
        if (!can_touch(piece->from_region, piece->from + done, bytes) ||
            !can_touch(piece->to_region, piece->to + done, bytes)) {
            illegal(context);
            return;
        }
        running++;
        pthread_mutex_unlock(&lock);
        int is_good = copy_bytes(piece, done, bytes);
        pthread_mutex_lock(&lock);
        running--;
        if (removing) pthread_cond_broadcast(&changed);
        if (!is_good) {
            illegal(context);
            return;
        }
        done += bytes;
        count(COPIED_BYTES, (int64_t)bytes);
        pthread_mutex_unlock(&lock);
        pace(bytes);
        pthread_mutex_lock(&lock);
    }
}

static int value_reached(const struct op *op) {
    return (int32_t)(__atomic_load_n((uint32_t *)op->address, __ATOMIC_ACQUIRE) - op->value) >= 0;
}

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void run_op(struct stream *stream, struct op *op) {
    struct context *context = stream->context;
    switch (op->what) {
    case COPY:
        /* Hardware may copy in any order. Here, the last piece is first. */
        for (size_t i = op->count; i-- && !context->sticky;) run_piece(context, &op->pieces[i]);
        break;
    case FILL:
        if (can_touch(op->region, op->address, op->bytes)) memset((void *)op->address, (int)op->value, op->bytes);
        else illegal(context);
        break;
    case KERNEL:
        pthread_mutex_unlock(&lock);
        nap(atof(setting("CUDASIM_KERNEL_SECONDS", "0.0001")));
        pthread_mutex_lock(&lock);
        break;
    case RECORD:
        op->event->time = seconds_now();
        if (op->event->reached < op->version) op->event->reached = op->version;
        break;
    case WAIT:
        while (op->event->reached < op->version && !context->sticky) pthread_cond_wait(&changed, &lock);
        break;
    case WAIT_VALUE:
        while (!context->sticky) {
            if (!can_touch(op->region, op->address, 4)) illegal(context);
            else if (value_reached(op)) break;
            pthread_mutex_unlock(&lock);
            nap(2e-4);
            pthread_mutex_lock(&lock);
        }
        break;
    case WRITE_VALUE:
        if (can_touch(op->region, op->address, 4)) __atomic_store_n((uint32_t *)op->address, op->value, __ATOMIC_RELEASE);
        else illegal(context);
        break;
    }
}

static void *work(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && !stream->is_closing) pthread_cond_wait(&changed, &lock);
        struct op *op = stream->first;
        if (!op) break; /* closing, and the queue is empty */
        while (is_stalled() && !stream->context->sticky) {
            pthread_mutex_unlock(&lock);
            nap(5e-4);
            pthread_mutex_lock(&lock);
        }
        run_op(stream, op);
        if (!(stream->first = op->next)) stream->last = &stream->first;
        free(op);
        stream->done++;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    free(stream);
    return NULL;
}

/* ---- streams ---- */

static struct stream *create(void) {
    struct stream *new = calloc(1, sizeof *new);
    sigset_t all, before;
    *new = (struct stream){.handle = next_handle += 16, .context = current, .next = streams};
    new->last = &new->first;
    streams = new;
    count(STREAMS, 1);
    sigfillset(&all); /* the program's threads handle all signals */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_create(&new->thread, NULL, work, new);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_detach(new->thread);
    return new;
}

static struct op *new_op(enum what what, size_t count) {
    struct op *op = calloc(1, sizeof *op + count * sizeof *op->pieces);
    op->what = what;
    op->count = count;
    return op;
}

static void submit(struct stream *stream, struct op *op) {
    *stream->last = op;
    stream->last = &op->next;
    stream->submitted++;
    pthread_cond_broadcast(&changed);
}

static CUresult wait_for(struct stream *stream) {
    uint64_t target = stream->submitted, handle = stream->handle;
    struct context *context = stream->context;
    while ((stream = find_stream(handle)) && stream->done < target) pthread_cond_wait(&changed, &lock);
    return context->sticky;
}

API CUresult cuStreamCreate(uint64_t *out, unsigned flags) {
    ENTER(1);
    (void)flags;
    pthread_mutex_lock(&lock);
    *out = create()->handle;
    pthread_mutex_unlock(&lock);
    return OK;
}

API CUresult cuStreamCreateWithPriority(uint64_t *out, unsigned flags, int priority) {
    (void)priority;
    return cuStreamCreate(out, flags);
}

API CUresult cuStreamDestroy_v2(uint64_t handle) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    struct stream **place = &streams;
    while (*place && (*place)->handle != handle) place = &(*place)->next;
    struct stream *stream = *place;
    if (stream) {
        *place = stream->next;
        stream->is_closing = 1; /* the thread ends after its queue */
        count(STREAMS, -1);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return stream ? OK : INVALID_HANDLE;
}

#define WITH_STREAM(handle)                                     \
    pthread_mutex_lock(&lock);                                  \
    struct stream *stream = find_stream(handle);                \
    if (!stream) return pthread_mutex_unlock(&lock), INVALID_HANDLE

API CUresult cuStreamSynchronize(uint64_t handle) {
    ENTER(1);
    WITH_STREAM(handle);
    CUresult rc = wait_for(stream);
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuStreamQuery(uint64_t handle) {
    ENTER(1);
    WITH_STREAM(handle);
    CUresult rc = stream->context->sticky ? stream->context->sticky : stream->done == stream->submitted ? OK : NOT_READY;
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuCtxSynchronize(void) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    for (struct stream *s = streams; s;) /* start again after each wait, because the list may have changed */
        s = s->context == current && s->done < s->submitted ? wait_for(s), streams : s->next;
    CUresult rc = current->sticky;
    pthread_mutex_unlock(&lock);
    return rc;
}

/* ---- events ---- */

API CUresult cuEventCreate(uint64_t *out, unsigned flags) {
    ENTER(1);
    (void)flags;
    pthread_mutex_lock(&lock);
    struct event *new = calloc(1, sizeof *new);
    *new = (struct event){.handle = next_handle += 16, .next = events};
    events = new;
    *out = new->handle;
    count(EVENTS, 1);
    pthread_mutex_unlock(&lock);
    return OK;
}

#define WITH_EVENT(handle)                                      \
    struct event *event = find_event(handle);                   \
    if (!event) return pthread_mutex_unlock(&lock), INVALID_HANDLE

API CUresult cuEventDestroy_v2(uint64_t handle) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    WITH_EVENT(handle);
    struct event **place = &events;
    while (*place != event) place = &(*place)->next;
    *place = event->next; /* never freed, because queued work may refer to it */
    count(EVENTS, -1);
    pthread_mutex_unlock(&lock);
    return OK;
}

static CUresult add_event_op(uint64_t stream_handle, uint64_t event_handle, enum what what) {
    WITH_STREAM(stream_handle);
    WITH_EVENT(event_handle);
    struct op *op = new_op(what, 0);
    op->event = event;
    op->version = what == RECORD ? ++event->recorded : event->recorded;
    submit(stream, op);
    pthread_mutex_unlock(&lock);
    return OK;
}

API CUresult cuEventRecord(uint64_t event, uint64_t stream) { ENTER(1); return add_event_op(stream, event, RECORD); }

API CUresult cuStreamWaitEvent(uint64_t stream, uint64_t event, unsigned flags) {
    ENTER(1);
    (void)flags;
    return add_event_op(stream, event, WAIT);
}

API CUresult cuEventQuery(uint64_t handle) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    WITH_EVENT(handle);
    CUresult rc = event->reached == event->recorded ? OK : NOT_READY;
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuEventSynchronize(uint64_t handle) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    WITH_EVENT(handle);
    uint64_t target = event->recorded;
    while (event->reached < target && !current->sticky) pthread_cond_wait(&changed, &lock);
    CUresult rc = current->sticky;
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuEventElapsedTime(float *milliseconds, uint64_t start, uint64_t end) {
    ENTER(1);
    pthread_mutex_lock(&lock);
    struct event *first = find_event(start), *last = find_event(end);
    CUresult rc = first && last ? OK : INVALID_HANDLE;
    if (!rc) *milliseconds = (float)(1e3 * (last->time - first->time));
    pthread_mutex_unlock(&lock);
    return rc;
}

/* ---- kernels: they only take time ---- */

API CUresult cuModuleLoadData(void **module, const void *image) { ENTER(1); *module = (void *)image; return OK; }
API CUresult cuModuleUnload(void *module) { ENTER(1); (void)module; return OK; }
API CUresult cuModuleGetFunction(void **out, void *module, const char *name) { ENTER(1); (void)name; *out = module; return OK; }

API CUresult cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y,
                            unsigned threads_z, unsigned shared, uint64_t handle, void **arguments, void **extra) {
    ENTER(1);
    (void)function, (void)x, (void)y, (void)z, (void)threads_x, (void)threads_y, (void)threads_z;
    (void)shared, (void)arguments, (void)extra;
    WITH_STREAM(handle);
    submit(stream, new_op(KERNEL, 0));
    pthread_mutex_unlock(&lock);
    return OK;
}

/* ---- values in memory: they delay a stream, also on hardware ---- */

static CUresult add_value_op(uint64_t handle, uint64_t address, uint32_t value, enum what what) {
    WITH_STREAM(handle);
    struct op *op = new_op(what, 0);
    op->address = address;
    op->value = value;
    op->region = find_region(address);
    CUresult rc = op->region ? OK : INVALID_VALUE; /* device memory or pinned */
    if (rc) free(op); else submit(stream, op);
    pthread_mutex_unlock(&lock);
    return rc;
}

API CUresult cuStreamWaitValue32_v2(uint64_t stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    ENTER(1);
    if (flags) return NOT_SUPPORTED; /* 0: wait until the value is at least this large */
    return add_value_op(stream, address, value, WAIT_VALUE);
}

API CUresult cuStreamWriteValue32_v2(uint64_t stream, CUdeviceptr address, uint32_t value, unsigned flags) {
    ENTER(1);
    (void)flags;
    return add_value_op(stream, address, value, WRITE_VALUE);
}

/* ---- copies ---- */

/* Find the region of an address. Host memory of a copy must be in one registration or in none. */
static CUresult resolve(uint64_t address, uint64_t bytes, struct region **last) {
    struct region *region = *last;
    if (!region || !region->is_live || address - region->start >= region->bytes) region = find_region(address);
    *last = region;
    if (is_device_address(address)) return OK; /* the copy itself detects errors */
    if (region) return address - region->start + bytes <= region->bytes ? OK : INVALID_VALUE;
    struct region *after = region_after(address);
    return after && after->kind == PINNED && after->start - address < bytes ? INVALID_VALUE : OK;
}

static CUresult copy(uint64_t handle, const uint64_t *to, const uint64_t *from, const size_t *sizes, size_t number, size_t *failed,
                     int takes_pageable) {
    WITH_STREAM(handle);
    struct op *op = new_op(COPY, number);
    struct region *to_region = NULL, *from_region = NULL;
    int64_t pageable = 0, to_imports = 0;
    CUresult rc = OK;
    for (size_t i = 0; i < number && !rc; i++) {
        rc = resolve(to[i], sizes[i], &to_region);
        if (!rc) rc = resolve(from[i], sizes[i], &from_region);
        if (rc && failed) *failed = i;
        op->pieces[i] = (struct piece){to[i], from[i], sizes[i], to_region, from_region};
        pageable += (!to_region && !is_device_address(to[i])) || (!from_region && !is_device_address(from[i]));
        to_imports += to_region && to_region->kind == IMPORTED;
    }
    if (!rc && pageable && !takes_pageable) rc = INVALID_VALUE;
    if (rc) {
        free(op);
    } else {
        count(PIECES, (int64_t)number);
        count(PAGEABLE_PIECES, pageable);
        count(WRITES_TO_IMPORTS, to_imports);
        submit(stream, op);
        if (pageable) rc = wait_for(stream); /* hardware returns after it has read or written host memory */
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

static CUresult copy_one(uint64_t stream, uint64_t to, uint64_t from, size_t bytes) {
    if (!bytes) return OK;
    count(SINGLE_COPIES, 1);
    return copy(stream, &to, &from, &bytes, 1, NULL, 1);
}

API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, uint64_t stream) { ENTER(1); return copy_one(stream, to, from, bytes); }
API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, uint64_t stream) { ENTER(1); return copy_one(stream, (uint64_t)to, from, bytes); }
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, uint64_t stream) { ENTER(1); return copy_one(stream, to, (uint64_t)from, bytes); }
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, uint64_t stream) { ENTER(1); return copy_one(stream, to, from, bytes); }

static CUresult copy_now(uint64_t to, uint64_t from, size_t bytes) {
    CUresult rc = copy_one(0, to, from, bytes);
    return rc ? rc : cuStreamSynchronize(0);
}

API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) { ENTER(1); return copy_now(to, from, bytes); }
API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) { ENTER(1); return copy_now((uint64_t)to, from, bytes); }
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) { ENTER(1); return copy_now(to, (uint64_t)from, bytes); }

API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, uint64_t handle) {
    ENTER(1);
    WITH_STREAM(handle);
    struct op *op = new_op(FILL, 0);
    op->address = to;
    op->bytes = bytes;
    op->value = value;
    op->region = find_region(to);
    submit(stream, op);
    pthread_mutex_unlock(&lock);
    return OK;
}

API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes) {
    CUresult rc = cuMemsetD8Async(to, value, bytes, 0);
    return rc ? rc : cuStreamSynchronize(0);
}

struct location { int type, id; };
struct attributes { int order; struct location from, to; unsigned flags; };

static CUresult batch(uint64_t *to, uint64_t *from, size_t *sizes, size_t number, const struct attributes *attributes,
                      const size_t *firsts, size_t num_attributes, size_t *failed, uint64_t stream) {
    if (failed) *failed = SIZE_MAX; /* the error has no single piece */
    if (!number || !to || !from || !sizes || !attributes || !num_attributes || num_attributes > number) return INVALID_VALUE;
    if (stream == 0 || stream == 1 || firsts[0]) return INVALID_VALUE;
    for (size_t i = 0; i < num_attributes; i++)
        if (attributes[i].order < 1 || attributes[i].order > 3 || (i && firsts[i] <= firsts[i - 1]) || firsts[i] >= number)
            return INVALID_VALUE;
    for (size_t i = 0; i < number; i++)
        if (!sizes[i]) return failed ? *failed = i : 0, INVALID_VALUE;
    CUresult rc = copy(stream, to, from, sizes, number, failed, 0); /* no document allows memory that is not pinned */
    count(rc ? REFUSED_BATCHES : BATCHES, 1);
    return rc;
}

/* CUDA 12.8 reports the invalid piece. CUDA 13 does not. */
API CUresult cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *sizes, size_t number, struct attributes *attributes,
                                size_t *firsts, size_t num_attributes, size_t *failed, uint64_t stream) {
    ENTER(1);
    return batch(to, from, sizes, number, attributes, firsts, num_attributes, failed, stream);
}

API CUresult cuMemcpyBatchAsync_v2(uint64_t *to, uint64_t *from, size_t *sizes, size_t number, struct attributes *attributes,
                                   size_t *firsts, size_t num_attributes, uint64_t stream) {
    ENTER(1);
    return batch(to, from, sizes, number, attributes, firsts, num_attributes, NULL, stream);
}
