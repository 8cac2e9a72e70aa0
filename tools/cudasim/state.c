/* The node's folder, the record of this process in it, and orders. */
#include "sim.h"
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static const char *NAMES[NUM_COUNTERS] = {
    "pid", "contexts", "allocations", "allocated_bytes", "mappings", "streams", "events", "pins",
    "pinned_bytes", "batches", "single_copies", "pieces", "copied_bytes", "pageable_pieces",
    "writes_to_imports", "illegal_pieces", "refused_batches", "contexts_on_0", "contexts_on_1", "contexts_on_2",
    "contexts_on_3", "contexts_on_4", "contexts_on_5", "contexts_on_6", "contexts_on_7",
};
struct entry { char name[24]; int64_t value; };
static struct entry *record;
static int lock_fd = -1;
static pid_t node_pid;

const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

const char *node_path(char *out, const char *name) {
    snprintf(out, 512, "%s/%s", setting("CUDASIM_NODE", "/dev/shm/cudasim"), name);
    return out;
}

void count(enum counter which, int64_t by) { __atomic_fetch_add(&record[which].value, by, __ATOMIC_RELAXED); }

/* The record is locked last, so that readers of live processes' counters find it complete. */
static int make_record(int fd) {
    const size_t bytes = sizeof(struct entry) * NUM_COUNTERS;
    if (fd < 0 || ftruncate(fd, (off_t)bytes)) return NO_DEVICE;
    struct entry *mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) return NO_DEVICE;
    for (int i = 0; i < NUM_COUNTERS; i++) strcpy(mapped[i].name, NAMES[i]);
    record = mapped;
    node_pid = getpid();
    count(PID, node_pid);
    while (flock(fd, LOCK_EX) && errno == EINTR) {} /* held until the process ends */
    return OK;
}

int node_open(void) {
    if (record) return node_pid == getpid() ? OK : NOT_INITIALIZED; /* a driver does not survive a fork */
    char path[512], name[64];
    mkdir(node_path(path, ""), 0777);
    lock_fd = open(node_path(path, "lock"), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock_fd < 0) return NO_DEVICE;
    snprintf(name, sizeof name, "process-%s-XXXXXX", setting("CUDASIM_ROLE", "any"));
    node_lock(); /* otherwise the unlocked file would look like that of a dead process */
    int rc = make_record(mkostemp((char *)node_path(path, name), O_CLOEXEC));
    node_unlock();
    return rc;
}

void node_lock(void) { while (flock(lock_fd, LOCK_EX) && errno == EINTR) {} }
void node_unlock(void) { flock(lock_fd, LOCK_UN); }

int is_abandoned(const char *path) {
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return 1;
    int abandoned = !flock(fd, LOCK_EX | LOCK_NB);
    close(fd);
    return abandoned;
}

/* Node locked. */
static int contexts_in_records(int device, int without_own) {
    char path[512];
    int found = 0;
    struct entry entry;
    DIR *folder = opendir(node_path(path, ""));
    for (struct dirent *file; folder && (file = readdir(folder));) {
        if (strncmp(file->d_name, "process-", 8)) continue;
        int fd = open(node_path(path, file->d_name), O_RDWR | O_CLOEXEC);
        if (fd < 0) continue;
        off_t place = (off_t)sizeof entry * (CONTEXTS_ON_0 + device);
        if (!flock(fd, LOCK_EX | LOCK_NB)) unlink(path); /* its process is dead */
        else if (pread(fd, &entry, sizeof entry, place) == sizeof entry) found += (int)entry.value;
        close(fd);
    }
    if (folder) closedir(folder);
    return found - (without_own ? (int)record[CONTEXTS_ON_0 + device].value : 0);
}

int contexts_of_others(int device) { return contexts_in_records(device, 1); }
int num_contexts(int device) { return contexts_in_records(device, 0); }

/* ---- entry points of this library ---- */

void *find_entry(const char *name, int is_newer_form) {
    static void *self;
    Dl_info info;
    char symbol[128];
    if (!self && dladdr((void *)find_entry, &info)) self = dlopen(info.dli_fname, RTLD_NOW);
    snprintf(symbol, sizeof symbol, "%s%s", name, is_newer_form ? "_v2" : "");
    return dlsym(self, symbol);
}

/* ---- orders ---- */

#define MAX_ORDERS 64
struct order {
    char function[64]; /* function of `fail`, or the command itself */
    long calls, nth;   /* nth 0: every call */
    double value;
};
static struct order orders[MAX_ORDERS];
static int num_orders, has_read_environment;
static struct timespec orders_time;
static off_t orders_size = -1;
static ino_t orders_file;
static pthread_mutex_t orders_lock = PTHREAD_MUTEX_INITIALIZER;

static void check(int is_right, const char *text) {
    if (is_right) return;
    fprintf(stderr, "cudasim: no such order: %s\n", text); /* a silent mistake would make a test meaningless */
    abort();
}

/* Orders may name a function with or without the suffix of its newer form. */
static void without_suffix(char *function) {
    char *suffix = strstr(function, "_v2");
    if (suffix) *suffix = 0;
}

static int is_word(const char *word) {
    return !strcmp(word, "stall") || !strcmp(word, "capture") || !strcmp(word, "rate") || !strcmp(word, "die_after");
}

/* One order: [ROLE:] fail FUNCTION N|* CODE | stall | capture | rate B | die_after BYTES */
static void add_order(char *text) {
    char *colon = strchr(text, ':'), role[64], word[64], nth[32];
    if (colon) {
        *colon = 0;
        if (sscanf(text, "%63s", role) != 1 || strcmp(role, setting("CUDASIM_ROLE", "any"))) return;
        text = colon + 1;
    }
    struct order order = {0};
    if (sscanf(text, "%63s", word) != 1) return;
    check(num_orders < MAX_ORDERS, "too many");
    if (!strcmp(word, "fail")) {
        check(sscanf(text, "%*s %63s %31s %lf", order.function, nth, &order.value) == 3, text);
        without_suffix(order.function);
        check(find_entry(order.function, 0) || find_entry(order.function, 1), text);
        order.nth = *nth == '*' ? 0 : atol(nth);
    } else {
        check(is_word(word), text);
        strcpy(order.function, word);
        sscanf(text, "%*s %lf", &order.value);
    }
    orders[num_orders++] = order;
}

static void add_orders(const char *text) {
    char copy[8192], *rest = copy;
    snprintf(copy, sizeof copy, "%s", text);
    for (char *part; (part = strsep(&rest, ";\n"));) add_order(part);
}

/* Counts start at 0 when orders are read again. Each check costs a system call, so a copy of many pieces checks
 * once per millisecond. */
static void read_orders(int is_urgent) {
    static int num_of_environment;
    static struct timespec looked;
    struct timespec clock;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &clock);
    if (!is_urgent && clock.tv_sec == looked.tv_sec && clock.tv_nsec - looked.tv_nsec < 1000000) return;
    looked = clock;
    if (!has_read_environment) {
        has_read_environment = 1;
        add_orders(setting("CUDASIM_ORDERS", ""));
        num_of_environment = num_orders;
    }
    char path[512], text[8192];
    struct stat now = {.st_size = -1};
    if (stat(node_path(path, "orders"), &now)) now.st_size = -1;
    if (now.st_ino == orders_file && now.st_size == orders_size && !memcmp(&now.st_mtim, &orders_time, sizeof orders_time)) return;
    orders_file = now.st_ino;
    orders_size = now.st_size;
    orders_time = now.st_mtim;
    num_orders = num_of_environment;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length > 0) {
        text[length] = 0;
        add_orders(text);
    }
}

int fault(const char *entry) {
    int code = 0;
    char function[64];
    snprintf(function, sizeof function, "%s", entry);
    without_suffix(function);
    pthread_mutex_lock(&orders_lock);
    read_orders(1);
    for (int i = 0; i < num_orders; i++)
        if (!strcmp(orders[i].function, function) && (++orders[i].calls == orders[i].nth || !orders[i].nth))
            code = (int)orders[i].value;
    pthread_mutex_unlock(&orders_lock);
    return code;
}

static int order_value(const char *word, double *value) {
    int found = 0;
    pthread_mutex_lock(&orders_lock);
    read_orders(0);
    for (int i = 0; i < num_orders; i++)
        if (!strcmp(orders[i].function, word)) found = 1, *value = orders[i].value;
    pthread_mutex_unlock(&orders_lock);
    return found;
}

int is_capturing(void) { double unused; return order_value("capture", &unused); }
int is_stalled(void) { double unused; return order_value("stall", &unused); }
double rate(void) { double value = 0; order_value("rate", &value); return value; }
double die_after(void) { double value = 0; order_value("die_after", &value); return value; }

void nap(double seconds) {
    struct timespec time = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&time, &time) && errno == EINTR) {}
}
