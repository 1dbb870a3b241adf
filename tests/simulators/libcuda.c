/* A driver library for processes that call it through NVIDIA's own bindings, over memory of the host. It is compiled with NVIDIA's
   cuda.h, so each function has the type that the real one has; what barellm does not call is not here.

   Calls are held against the rules of NVIDIA's manual: what breaks one is refused, with a line that has the rule. Work is done as late
   as a driver may do it: copies, launches and graphs wait in their stream until somebody asks whether it is done. Kernels do nothing,
   or what the function does that `libcuda_execute` was given.

   LIBCUDA_ARCH: compute capability, 90 for 9.0. LIBCUDA_LOG: a file that gets a line for each call. LIBCUDA_PYTHON: a module that
   the process's own Python imports when the driver starts, and which may call `libcuda_execute`.
   At the n-th call of a function: LIBCUDA_FAIL=cuMemAlloc:2:3, that call fails with status 2; LIBCUDA_LOSE=cuGraphLaunch:700:1, it and
   all later calls of any function fail, as where a context is lost; LIBCUDA_HANG=cuGraphLaunch:1, the work that it begins never ends,
   or the call itself, if it begins none. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

#define SPACE ((CUcontext)0x1000)

enum { FREE_SHARED = 48 << 10, MOST_THREADS = 1024, REGISTERS = 65536, MOST_PARAMETERS = 256, LAUNCH_US = 250 };

/* What does a launch's work: 0, the status of all later calls, or -1 where it never ends. `parameters`: their bytes, placed as the cubin says. */
typedef int (*Execute)(const void *cubin, size_t nbytes, const char *name, const void *parameters, size_t parameter_bytes,
                       const unsigned *grid, unsigned threads, unsigned shared_bytes);

struct block { char *start; size_t nbytes; int device; struct block *next; };
struct parameter { size_t offset, nbytes; };
struct library {
    char *cubin, *name;
    size_t nbytes, parameter_bytes;
    unsigned threads, registers, count, static_shared, dynamic_shared;
    int got, ready, unloaded;
    struct parameter parameters[MOST_PARAMETERS];
};
struct event { int recorded, destroyed; long waiting; float ms; };
struct work {
    enum { COPY, FILL, LAUNCH, REACH } kind;
    char *to, *from, *owned;
    size_t nbytes;
    int value;
    struct event *event;
    struct library *code;
    unsigned grid[3], shared_bytes;
    struct work *next;
};
struct queue { struct work *first, **last; };
struct stream { struct queue queue; struct graph *captured; struct stream *next; };
struct graph { struct queue queue; int instantiated; };
struct map { /* a CUtensorMap, as parameters.py reads it */
    unsigned long long magic;
    unsigned type, element_bytes;
    unsigned long long address, columns, rows, pitch;
    unsigned box[2], swizzle, promotion, fill;
};

static const unsigned long long MAGIC = 0x70616D206B636F6D; /* "mock map" */
static _Thread_local CUcontext current;
static pthread_mutex_t lock;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int lost, hung, counts[3];
static float clock_ms;
static struct block *blocks;
static struct stream *streams;
static Execute execute;

/* --- what every call does --- */

static void make_lock(void) {
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE); /* a kernel's function may ask for its allocation */
    pthread_mutex_init(&lock, &kind);
}

static int locked(void) { pthread_once(&once, make_lock); return pthread_mutex_lock(&lock); }
static void unlocked(int *held) { pthread_mutex_unlock(&lock); }

/* Whether this is the n-th call of the function that a variable names, as name:n or name:status:n. */
static int due(const char *variable, int *count, const char *name, int *status) {
    const char *given = getenv(variable);
    char wanted[64];
    int first, second, fields = given ? sscanf(given, "%63[^:]:%d:%d", wanted, &first, &second) : 0;
    if (fields < 2 || strcmp(name, wanted)) return 0;
    *status = first;
    return ++*count == (fields == 3 ? second : first);
}

static CUresult called(const char *symbol, int needs_context) {
    const char *log = getenv("LIBCUDA_LOG"), *version = strstr(symbol, "_v");
    char name[64];
    int status = 0, begins;
    snprintf(name, sizeof name, "%.*s", (int)(version ? version - symbol : (long)strlen(symbol)), symbol);
    if (log) {
        FILE *file = fopen(log, "a");
        fprintf(file, "%s\n", name);
        fclose(file);
    }
    if (due("LIBCUDA_HANG", &counts[0], name, &status)) {
        begins = strstr(name, "Async") || strstr(name, "Launch") || strstr(name, "Query");
        hung = 1;
        while (!begins) {
            pthread_mutex_unlock(&lock);
            pause();
            pthread_mutex_lock(&lock);
        }
    }
    if (due("LIBCUDA_LOSE", &counts[1], name, &status)) lost = status;
    if (lost) return lost;
    if (due("LIBCUDA_FAIL", &counts[2], name, &status)) return status;
    return needs_context && current != SPACE ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

static CUresult refused(CUresult status, const char *function, const char *rule) {
    fprintf(stderr, "libcuda: %s: not %s\n", function, rule);
    return status;
}

#define ENTER(needs_context) \
    int held __attribute__((cleanup(unlocked), unused)) = locked(); \
    CUresult bad = called(__func__, needs_context); \
    if (bad) return bad
#define REQUIRE_OR(status, ...) do { if (!(__VA_ARGS__)) return refused(status, __func__, #__VA_ARGS__); } while (0)
#define REQUIRE(...) REQUIRE_OR(CUDA_ERROR_INVALID_VALUE, __VA_ARGS__)

/* --- the device --- */

static int arch(void) { return getenv("LIBCUDA_ARCH") ? atoi(getenv("LIBCUDA_ARCH")) : 90; }
static unsigned most_shared(void) { return arch() == 80 ? 163 << 10 : arch() == 90 || arch() == 100 ? 227 << 10 : 99 << 10; }

/* Lets the process's own Python import a module, if there is one. */
static void import(const char *module) {
    int (*ensure)(void) = dlsym(RTLD_DEFAULT, "PyGILState_Ensure"), (*run)(const char *) = dlsym(RTLD_DEFAULT, "PyRun_SimpleString");
    void (*release)(int) = dlsym(RTLD_DEFAULT, "PyGILState_Release");
    char line[256];
    if (!module || !ensure || !run || !release) return;
    snprintf(line, sizeof line, "import importlib; importlib.import_module('%s').start()", module);
    int state = ensure();
    if (run(line)) abort();
    release(state);
}

CUresult cuInit(unsigned flags) {
    static int begun;
    ENTER(0);
    REQUIRE(!flags);
    if (!begun++) import(getenv("LIBCUDA_PYTHON"));
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) { ENTER(0); *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *found) { ENTER(0); *found = 1; return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t *nbytes, CUdevice device) { ENTER(0); *nbytes = 1ul << 34; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { ENTER(0); *context = SPACE; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { ENTER(0); current = context; return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int number) {
    ENTER(0);
    REQUIRE_OR(CUDA_ERROR_INVALID_DEVICE, number == 0);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    ENTER(0);
    for (int i = 0; i < 16; i++) uuid->bytes[i] = i;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
    ENTER(0);
    REQUIRE(room > 16);
    strcpy(name, "C stand-in");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    ENTER(0);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = arch() / 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = arch() % 10; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = getenv("LIBCUDA_SMS") ? atoi(getenv("LIBCUDA_SMS")) : 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = most_shared(); break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* --- streams of work --- */

static void put(struct queue *queue, struct work *one) {
    if (!queue->first) queue->last = &queue->first;
    *queue->last = one;
    queue->last = &one->next;
    one->next = NULL;
}

static void perform(struct work *w) {
    struct library *l = w->code;
    if (w->kind == COPY) memcpy(w->to, w->from, w->nbytes);
    else if (w->kind == FILL) memset(w->to, w->value, w->nbytes);
    else if (w->kind == REACH) { w->event->ms = clock_ms; w->event->waiting--; }
    else {
        clock_ms += LAUNCH_US * 1e-3f;
        int status = execute ? execute(l->cubin, l->nbytes, l->name, w->owned, l->parameter_bytes, w->grid, l->threads,
                                       w->shared_bytes) : 0;
        if (status < 0) hung = 1;
        else lost = status;
    }
}

static int busy(void) {
    for (struct stream *s = streams; s; s = s->next) if (s->queue.first) return 1;
    return 0;
}

/* Does all work that waits; a graph's stays with the graph, which has it again at its next launch. */
static void drain(void) {
    for (struct stream *s = streams; s; s = s->next)
        while (s->queue.first && !hung && !lost) {
            struct work *w = s->queue.first;
            s->queue.first = w->next;
            perform(w);
            if (w->value >= 0) free(w->owned);
            free(w);
        }
}

static int capturing(void) {
    for (struct stream *s = streams; s; s = s->next) if (s->captured) return 1;
    return 0;
}

static void add(struct stream *s, struct work w) {
    struct work *one = malloc(sizeof *one);
    *one = w;
    put(s->captured ? &s->captured->queue : &s->queue, one);
}

static CUresult asked(void) {
    int waited = busy();
    if (!hung) drain();
    return lost ? lost : hung || waited ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

/* --- memory --- */

static struct block *around(const void *at, size_t nbytes, int device) {
    for (struct block *b = blocks; b; b = b->next)
        if (b->device == device && (char *)at >= b->start && (char *)at + nbytes <= b->start + b->nbytes) return b;
    return NULL;
}

static struct block *allocate(size_t nbytes, int device) {
    struct block *b = malloc(sizeof *b);
    *b = (struct block){.nbytes = nbytes, .device = device, .next = blocks};
    if (posix_memalign((void **)&b->start, device ? 256 : 4096, nbytes)) { free(b); return NULL; }
    memset(b->start, 0xFF, nbytes);
    return blocks = b;
}

static CUresult release(const void *at, int device, const char *function) {
    struct block **place = &blocks;
    while (*place && ((*place)->start != at || (*place)->device != device)) place = &(*place)->next;
    if (!*place) return refused(CUDA_ERROR_INVALID_VALUE, function, "an allocation");
    drain(); /* it waits for the GPU */
    struct block *gone = *place;
    *place = gone->next;
    free(gone->start);
    free(gone);
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *left, size_t *total) { ENTER(1); *left = *total = 1ul << 34; return CUDA_SUCCESS; }
CUresult cuMemFree(CUdeviceptr at) { ENTER(1); return release((void *)at, 1, __func__); }
CUresult cuMemFreeHost(void *at) { ENTER(1); return release(at, 0, __func__); }

CUresult cuMemAlloc(CUdeviceptr *at, size_t nbytes) {
    ENTER(1);
    REQUIRE(nbytes > 0);
    struct block *b = allocate(nbytes, 1);
    *at = b ? (CUdeviceptr)b->start : 0;
    return b ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostAlloc(void **at, size_t nbytes, unsigned flags) {
    ENTER(1);
    REQUIRE(nbytes > 0 && flags < 8);
    struct block *b = allocate(nbytes, 0);
    *at = b ? b->start : NULL;
    return b ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t nbytes, CUstream stream) {
    ENTER(1);
    struct stream *s = (struct stream *)stream;
    REQUIRE(s && around((void *)to, nbytes, 1));
    struct work w = {.kind = COPY, .to = (void *)to, .from = (void *)from, .nbytes = nbytes};
    if (!around(from, nbytes, 0)) { /* of pageable memory a copy is taken now */
        REQUIRE_OR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, !s->captured);
        w.from = w.owned = memcpy(malloc(nbytes), from, nbytes);
    }
    add(s, w);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    ENTER(1);
    struct stream *s = (struct stream *)stream;
    REQUIRE(s && around((void *)from, nbytes, 1));
    REQUIRE_OR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, !s->captured || around(to, nbytes, 0));
    add(s, (struct work){.kind = COPY, .to = to, .from = (void *)from, .nbytes = nbytes});
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    ENTER(1);
    REQUIRE(stream && around((void *)to, nbytes, 1));
    REQUIRE(around((void *)from, nbytes, 1));
    REQUIRE(to + nbytes <= from || from + nbytes <= to);
    add((struct stream *)stream, (struct work){.kind = COPY, .to = (void *)to, .from = (void *)from, .nbytes = nbytes});
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t nbytes, CUstream stream) {
    ENTER(1);
    REQUIRE(stream && around((void *)at, nbytes, 1));
    add((struct stream *)stream, (struct work){.kind = FILL, .to = (void *)at, .value = value, .nbytes = nbytes});
    return CUDA_SUCCESS;
}

/* --- streams, events, graphs --- */

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    ENTER(1);
    REQUIRE(flags == CU_STREAM_NON_BLOCKING);
    struct stream *made = calloc(1, sizeof *made);
    made->next = streams;
    streams = made;
    *stream = (CUstream)made;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream stream) {
    ENTER(1);
    struct stream **place = &streams;
    while (*place && *place != (struct stream *)stream) place = &(*place)->next;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, *place);
    REQUIRE(!(*place)->captured);
    drain();
    *place = (*place)->next;
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream stream) {
    ENTER(1);
    struct stream *s = (struct stream *)stream;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, s);
    REQUIRE_OR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, !s->captured);
    return asked();
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    ENTER(1);
    REQUIRE(stream && event && !flags);
    REQUIRE_OR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, !capturing()); /* nothing here is captured from two streams */
    drain();
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    ENTER(1);
    REQUIRE(flags < 8);
    *event = calloc(1, sizeof(struct event));
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
    ENTER(1);
    struct event *e = (struct event *)event;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, e && !e->destroyed);
    e->destroyed = 1; /* what waits to reach it keeps it */
    return CUDA_SUCCESS;
}

static void record(struct stream *s, struct event *e) {
    e->recorded = 1;
    e->waiting += !s->captured;
    add(s, (struct work){.kind = REACH, .event = e});
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
    ENTER(1);
    struct event *e = (struct event *)event;
    struct stream *s = (struct stream *)stream;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, e && s && !e->destroyed);
    REQUIRE(!s->captured); /* it would only order the graph's own work, of which there is one stream */
    record(s, e);
    return CUDA_SUCCESS;
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    ENTER(1);
    struct event *e = (struct event *)event;
    struct stream *s = (struct stream *)stream;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, e && s && !e->destroyed);
    REQUIRE(s->captured && flags == CU_EVENT_RECORD_EXTERNAL);
    record(s, e);
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent event) {
    ENTER(1);
    struct event *e = (struct event *)event;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, e && !e->destroyed);
    return hung && e->recorded ? CUDA_ERROR_NOT_READY : !e->waiting ? CUDA_SUCCESS : asked();
}

#undef cuEventElapsedTime  /* the one that drivers before CUDA 12.8 have */
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) {
    ENTER(1);
    struct event *first = (struct event *)from, *second = (struct event *)to;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, first && second && first->recorded && second->recorded);
    REQUIRE_OR(CUDA_ERROR_NOT_READY, !first->waiting && !second->waiting);
    *ms = second->ms - first->ms;
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ENTER(1);
    struct stream *s = (struct stream *)stream;
    REQUIRE_OR(CUDA_ERROR_ILLEGAL_STATE, s && !s->captured);
    REQUIRE(mode == CU_STREAM_CAPTURE_MODE_RELAXED); /* or a thread that frees memory meanwhile spoils it */
    s->captured = calloc(1, sizeof *s->captured);
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ENTER(1);
    struct stream *s = (struct stream *)stream;
    REQUIRE_OR(CUDA_ERROR_ILLEGAL_STATE, s && s->captured);
    *graph = (CUgraph)s->captured;
    s->captured = NULL;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph graph, unsigned long long flags) {
    ENTER(1);
    struct graph *g = (struct graph *)graph;
    REQUIRE(g && !flags);
    *made = (CUgraphExec)g;
    g->instantiated = 1;
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec graph, CUstream stream) {
    ENTER(1);
    struct stream *s = (struct stream *)stream;
    REQUIRE(graph && s && !s->captured);
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) {
    ENTER(1);
    struct graph *g = (struct graph *)graph;
    struct stream *s = (struct stream *)stream;
    REQUIRE(g && s && g->instantiated);
    REQUIRE_OR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, !s->captured);
    for (struct work *w = g->queue.first; w; w = w->next) {
        struct work again = *w;
        if (w->kind == LAUNCH) again.value = -1; /* the parameters stay the graph's */
        if (w->kind == REACH) w->event->waiting++;
        add(s, again);
    }
    return CUDA_SUCCESS;
}

CUresult cuGraphExecDestroy(CUgraphExec graph) {
    ENTER(1);
    struct graph *g = (struct graph *)graph;
    REQUIRE(g && g->instantiated);
    REQUIRE(!busy()); /* it may still run */
    g->instantiated = 0;
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) { ENTER(1); REQUIRE(graph); return CUDA_SUCCESS; }

/* --- code --- */

/* What .nv.info of a kernel says: its parameters (0x17), the threads it needs (0x10); of all of them their registers (0x2F). */
static void describe(struct library *l, const unsigned char *at, const unsigned char *end) {
    while (at + 4 <= end) {
        unsigned form = at[0], which = at[1], size = at[2] | at[3] << 8, words[3] = {0};
        const unsigned char *value = at + 4;
        at = value + (form == 4 ? size : 0);
        if (form == 4) memcpy(words, value, size < sizeof words ? size : sizeof words);
        if (form == 4 && which == 0x17) {
            unsigned number = words[1] & 0xFFFF, offset = words[1] >> 16, nbytes = words[2] >> 18;
            if (number >= MOST_PARAMETERS) abort();
            l->parameters[number] = (struct parameter){offset, nbytes};
            if (number >= l->count) l->count = number + 1;
            if (offset + nbytes > l->parameter_bytes) l->parameter_bytes = offset + nbytes;
        }
        if (form == 4 && which == 0x10) l->threads = words[0];
        if (form == 4 && which == 0x2F && words[1] > l->registers) l->registers = words[1];
    }
}

/* Reads a cubin's sections; the name of its first kernel, or of the one that is `wanted`. */
static const char *read_cubin(struct library *l, const char *wanted) {
    const Elf64_Ehdr *head = (void *)l->cubin;
    const Elf64_Shdr *sections = (void *)(l->cubin + head->e_shoff);
    const char *names = l->cubin + sections[head->e_shstrndx].sh_offset, *found = NULL;
    for (int i = 0; i < head->e_shnum; i++) {
        const char *name = names + sections[i].sh_name, *kernel = strncmp(name, ".nv.info.", 9) ? NULL : name + 9;
        const unsigned char *start = (unsigned char *)l->cubin + sections[i].sh_offset;
        if (kernel && !wanted) return kernel;
        if (wanted && (!strcmp(name, ".nv.info") || (kernel && !strcmp(kernel, wanted)))) {
            describe(l, start, start + sections[i].sh_size);
            if (kernel) found = kernel;
        }
        if (wanted && !strncmp(name, ".nv.shared.", 11) && !strcmp(name + 11, wanted)) l->static_shared = sections[i].sh_size;
    }
    return found;
}

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values, unsigned jits,
                           CUlibraryOption *options, void **values, unsigned number) {
    ENTER(0);
    const Elf64_Ehdr *head = code;
    REQUIRE_OR(CUDA_ERROR_INVALID_IMAGE, !memcmp(code, ELFMAG, SELFMAG) && head->e_machine == 190);
    REQUIRE(!jits && !number);
    int made_for = head->e_flags & 0xFF, exact = made_for >= 90; /* ours for Hopper and later are for that card alone: sm_90a */
    REQUIRE_OR(CUDA_ERROR_NO_BINARY_FOR_GPU, made_for / 10 == arch() / 10 && made_for <= arch() && (!exact || made_for == arch()));
    struct library *l = calloc(1, sizeof *l);
    const Elf64_Shdr *sections = (void *)((char *)code + head->e_shoff);
    l->nbytes = head->e_shoff + head->e_shnum * sizeof *sections;
    for (int i = 0; i < head->e_shnum; i++)
        if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > l->nbytes)
            l->nbytes = sections[i].sh_offset + sections[i].sh_size;
    if (head->e_phoff && head->e_phoff + head->e_phnum * sizeof(Elf64_Phdr) > l->nbytes)
        l->nbytes = head->e_phoff + head->e_phnum * sizeof(Elf64_Phdr);
    l->cubin = memcpy(malloc(l->nbytes), code, l->nbytes);
    l->dynamic_shared = FREE_SHARED;
    *library = (CUlibrary)l;
    return CUDA_SUCCESS;
}

CUresult cuLibraryUnload(CUlibrary library) {
    ENTER(0);
    struct library *l = (struct library *)library;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, l && !l->unloaded);
    REQUIRE(!busy()); /* it may still run */
    l->unloaded = 1;
    return CUDA_SUCCESS;
}

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    ENTER(0);
    struct library *l = (struct library *)library;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, l && !l->unloaded);
    const char *found = read_cubin(l, name);
    REQUIRE_OR(CUDA_ERROR_NOT_FOUND, found);
    l->name = (char *)found;
    *kernel = (CUkernel)l;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    ENTER(1);
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, kernel);
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult cuFuncLoad(CUfunction function) {
    ENTER(1);
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, function);
    REQUIRE_OR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, !capturing());
    ((struct library *)function)->ready = 1;
    return CUDA_SUCCESS;
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t number, size_t *offset, size_t *nbytes) {
    ENTER(0);
    struct library *l = (struct library *)kernel;
    if (number >= l->count) return CUDA_ERROR_INVALID_VALUE; /* which is how one finds out how many there are */
    *offset = l->parameters[number].offset;
    *nbytes = l->parameters[number].nbytes;
    return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    ENTER(0);
    struct library *l = (struct library *)kernel;
    REQUIRE(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
    REQUIRE(value >= 0 && (unsigned)value + l->static_shared <= most_shared());
    l->dynamic_shared = value;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **params, void **extra) {
    ENTER(1);
    struct library *l = (struct library *)function;
    REQUIRE_OR(CUDA_ERROR_INVALID_HANDLE, l && !l->unloaded && c->hStream);
    REQUIRE(params && !extra && !c->numAttrs);
    REQUIRE(c->gridDimX >= 1 && c->gridDimY >= 1 && c->gridDimZ >= 1);
    REQUIRE(c->gridDimX <= 0x7FFFFFFF && c->gridDimY <= 65535 && c->gridDimZ <= 65535);
    unsigned threads = c->blockDimX * c->blockDimY * c->blockDimZ, warps = (threads + 31) / 32;
    REQUIRE(threads >= 1 && c->blockDimZ <= 64 && threads <= MOST_THREADS);
    REQUIRE(!l->threads || (c->blockDimX == l->threads && c->blockDimY == 1 && c->blockDimZ == 1));
    REQUIRE(c->sharedMemBytes <= l->dynamic_shared);
    REQUIRE_OR(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, warps * ((l->registers * 32 + 255) / 256 * 256) <= REGISTERS);
    REQUIRE_OR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, l->ready || !capturing()); /* code that is loaded by its first launch */
    char *packed = calloc(1, l->parameter_bytes);
    for (unsigned i = 0; i < l->count; i++) {
        struct parameter p = l->parameters[i];
        memcpy(packed + p.offset, params[i], p.nbytes);
        if (p.nbytes == sizeof(CUtensorMap)) {
            struct map map;
            memcpy(&map, params[i], sizeof map);
            REQUIRE((size_t)params[i] % 64 == 0 && map.magic == MAGIC);
            REQUIRE(around((void *)map.address, (map.rows - 1) * map.pitch + map.columns * map.element_bytes, 1));
        }
    }
    struct work w = {.kind = LAUNCH, .code = l, .owned = packed, .shared_bytes = c->sharedMemBytes};
    memcpy(w.grid, (unsigned[]){c->gridDimX, c->gridDimY, c->gridDimZ}, sizeof w.grid);
    add((struct stream *)c->hStream, w);
    return CUDA_SUCCESS;
}

static const unsigned char ELEMENT_BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave inner, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
                                CUtensorMapFloatOOBfill fill) {
    ENTER(0);
    REQUIRE_OR(CUDA_ERROR_NOT_SUPPORTED, arch() >= 90);
    REQUIRE((size_t)map % 64 == 0);
    REQUIRE((unsigned)type < sizeof ELEMENT_BYTES); /* those of 4 and 6 bits are not here */
    REQUIRE((unsigned)inner <= CU_TENSOR_MAP_INTERLEAVE_32B && (unsigned)swizzle <= CU_TENSOR_MAP_SWIZZLE_128B);
    REQUIRE((unsigned)l2 <= CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
    REQUIRE(rank >= 1 && rank <= 5);
    REQUIRE(inner == CU_TENSOR_MAP_INTERLEAVE_NONE || rank >= 3);
    size_t unit = inner == CU_TENSOR_MAP_INTERLEAVE_32B ? 32 : 16, nbytes = ELEMENT_BYTES[type], end = sizes[0] * nbytes;
    REQUIRE((size_t)address % unit == 0);
    for (unsigned i = 0; i < rank; i++) {
        REQUIRE(sizes[i] >= 1 && sizes[i] <= 1ul << 32);
        REQUIRE(box[i] >= 1 && box[i] <= 256);
        REQUIRE(steps[i] >= 1 && steps[i] <= 8);
    }
    for (unsigned i = 0; i + 1 < rank; i++) {
        REQUIRE(strides[i] % unit == 0 && strides[i] < 1ul << 40);
        REQUIRE(strides[i] >= (i ? strides[i - 1] : sizes[0] * nbytes));
        end += (sizes[i + 1] - 1) * strides[i];
    }
    size_t width = box[0] * nbytes;
    REQUIRE(inner != CU_TENSOR_MAP_INTERLEAVE_NONE || width % 16 == 0);
    REQUIRE(inner != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || width <= 16u << swizzle);
    REQUIRE(inner != CU_TENSOR_MAP_INTERLEAVE_32B || swizzle == CU_TENSOR_MAP_SWIZZLE_32B);
    REQUIRE(fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || type >= CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
    REQUIRE(around(address, end, 1)); /* not in the manual: a map may only lead into memory that there is */
    struct map made = {.magic = MAGIC, .type = type, .element_bytes = nbytes, .address = (size_t)address, .columns = sizes[0],
                       .rows = rank > 1 ? sizes[1] : 1, .pitch = rank > 1 ? strides[0] : end, .swizzle = swizzle, .promotion = l2,
                       .box = {box[0], rank > 1 ? box[1] : 1}, .fill = fill};
    memset(map, 0, sizeof *map);
    memcpy(map, &made, sizeof made);
    return CUDA_SUCCESS;
}

CUresult cuProfilerStart(void) { ENTER(1); return CUDA_SUCCESS; }
CUresult cuProfilerStop(void) { ENTER(1); return CUDA_SUCCESS; }

/* --- for who does the kernels' work --- */

void libcuda_execute(Execute function) { execute = function; }

/* The allocation of the device that an address is in; 0 where there is none. */
int libcuda_allocation(const void *at, void **start, size_t *nbytes) {
    int held __attribute__((cleanup(unlocked), unused)) = locked();
    struct block *b = around(at, 1, 1);
    if (b) *start = b->start, *nbytes = b->nbytes;
    return b != NULL;
}

/* --- how the bindings find functions: the latest version of each --- */

CUresult cuGetProcAddress(const char *name, void **found, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *why) {
    char versioned[128];
    Dl_info here;
    void *self = dladdr((void *)cuInit, &here) ? dlopen(here.dli_fname, RTLD_NOW) : NULL;
    *found = NULL;
    for (int v = 3; v >= 2 && !*found; v--) {
        snprintf(versioned, sizeof versioned, "%s_v%d", name, v);
        *found = dlsym(self, versioned);
    }
    if (!*found) *found = dlsym(self, name);
    if (why) *why = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
