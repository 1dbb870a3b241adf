/* A driver library for processes that call it through NVIDIA's own bindings: memory of the host, kernels that do nothing. It is
   compiled with NVIDIA's cuda.h, so each function has the type that the real one has; what barellm does not call is not here.

   LIBCUDA_LOG: a file that gets a line for each call. LIBCUDA_FAIL=cuMemAlloc:700:3 lets the third call of a function, and every
   later call of any, fail with a status, as a lost context does. LIBCUDA_HANG=1: no work ever ends. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda.h"

#define SPACE ((CUcontext)0x1000)

static _Thread_local CUcontext current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int lost, count;
static unsigned long handles = 0x100000, capturing;

static CUresult called(const char *name, int needs_context) {
    const char *log = getenv("LIBCUDA_LOG"), *fail = getenv("LIBCUDA_FAIL");
    char wanted[64];
    int status, at = 1;
    pthread_mutex_lock(&lock);
    if (log) {
        FILE *file = fopen(log, "a");
        fprintf(file, "%s\n", name);
        fclose(file);
    }
    if (fail && sscanf(fail, "%63[^:]:%d:%d", wanted, &status, &at) >= 2 && !strcmp(name, wanted) && ++count >= at)
        lost = status;
    pthread_mutex_unlock(&lock);
    return lost ? lost : needs_context && current != SPACE ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

#define ENTER(needs) do { CUresult bad = called(__func__, needs); if (bad) return bad; } while (0)
#define REQUIRE(condition) do { if (!(condition)) { \
    fprintf(stderr, "libcuda: %s: not %s\n", __func__, #condition); return CUDA_ERROR_INVALID_VALUE; } } while (0)
#define HANDLE(type) ((type)(handles += 16))

/* --- the device --- */

CUresult cuInit(unsigned flags) { ENTER(0); REQUIRE(!flags); return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { ENTER(0); *version = 13000; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *found) { ENTER(0); *found = 1; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { ENTER(0); REQUIRE(!number); *device = 0; return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t *nbytes, CUdevice device) { ENTER(0); *nbytes = 1ul << 34; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { ENTER(0); *context = SPACE; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { ENTER(0); current = context; return CUDA_SUCCESS; }

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
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* --- memory --- */

CUresult cuMemGetInfo(size_t *left, size_t *total) { ENTER(1); *left = *total = 1ul << 34; return CUDA_SUCCESS; }
CUresult cuMemFree(CUdeviceptr at) { ENTER(1); free((void *)at); return CUDA_SUCCESS; }
CUresult cuMemFreeHost(void *at) { ENTER(1); free(at); return CUDA_SUCCESS; }

CUresult cuMemAlloc(CUdeviceptr *at, size_t nbytes) {
    ENTER(1);
    REQUIRE(nbytes > 0);
    return posix_memalign((void **)at, 256, nbytes) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **at, size_t nbytes, unsigned flags) {
    ENTER(1);
    return posix_memalign(at, 4096, nbytes) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t nbytes, CUstream stream) {
    ENTER(1);
    memcpy((void *)to, from, nbytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoHAsync(void *to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    ENTER(1);
    memcpy(to, (void *)from, nbytes);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
    ENTER(1);
    memcpy((void *)to, (void *)from, nbytes);
    return CUDA_SUCCESS;
}

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t nbytes, CUstream stream) {
    ENTER(1);
    memset((void *)at, value, nbytes);
    return CUDA_SUCCESS;
}

/* --- streams, events, graphs --- */

static CUresult ready(void) { return getenv("LIBCUDA_HANG") ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS; }

CUresult cuStreamCreate(CUstream *stream, unsigned flags) { ENTER(1); *stream = HANDLE(CUstream); return CUDA_SUCCESS; }
CUresult cuStreamDestroy(CUstream stream) { ENTER(1); return CUDA_SUCCESS; }
CUresult cuStreamQuery(CUstream stream) { ENTER(1); REQUIRE(!capturing); return ready(); }
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) { ENTER(1); return CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent *event, unsigned flags) { ENTER(1); *event = HANDLE(CUevent); return CUDA_SUCCESS; }
CUresult cuEventDestroy(CUevent event) { ENTER(1); return CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent event) { ENTER(1); return ready(); }
CUresult cuEventRecord(CUevent event, CUstream stream) { ENTER(1); REQUIRE(event && stream); return CUDA_SUCCESS; }
#undef cuEventElapsedTime  /* the one that drivers before CUDA 12.8 have */
CUresult cuEventElapsedTime(float *ms, CUevent from, CUevent to) { ENTER(1); *ms = 0.25f; return CUDA_SUCCESS; }

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    ENTER(1);
    REQUIRE(capturing && flags == CU_EVENT_RECORD_EXTERNAL);
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
    ENTER(1);
    REQUIRE(!capturing && mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    capturing = 1;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) {
    ENTER(1);
    REQUIRE(capturing);
    capturing = 0;
    *graph = HANDLE(CUgraph);
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph graph, unsigned long long flags) {
    ENTER(1);
    *made = HANDLE(CUgraphExec);
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec graph, CUstream stream) { ENTER(1); return CUDA_SUCCESS; }
CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream) { ENTER(1); REQUIRE(graph && stream); return CUDA_SUCCESS; }
CUresult cuGraphExecDestroy(CUgraphExec graph) { ENTER(1); return CUDA_SUCCESS; }
CUresult cuGraphDestroy(CUgraph graph) { ENTER(1); return CUDA_SUCCESS; }

/* --- code --- */

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jit, void **jit_values, unsigned jits,
                           CUlibraryOption *options, void **values, unsigned number) {
    ENTER(0);
    REQUIRE(!memcmp(code, "\177ELF", 4) && !jits && !number);
    *library = HANDLE(CUlibrary);
    return CUDA_SUCCESS;
}

CUresult cuLibraryUnload(CUlibrary library) { ENTER(0); return CUDA_SUCCESS; }
CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) { ENTER(1); *function = HANDLE(CUfunction); return CUDA_SUCCESS; }
CUresult cuFuncLoad(CUfunction function) { ENTER(1); REQUIRE(!capturing); return CUDA_SUCCESS; }

CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    ENTER(0);
    REQUIRE(name && *name);
    *kernel = HANDLE(CUkernel);
    return CUDA_SUCCESS;
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device) {
    ENTER(0);
    REQUIRE(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value <= 232448);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **params, void **extra) {
    ENTER(1);
    REQUIRE(function && params && !extra && c->hStream && !c->numAttrs);
    REQUIRE(c->gridDimX >= 1 && c->gridDimY >= 1 && c->gridDimZ >= 1 && c->gridDimY <= 65535 && c->gridDimZ <= 65535);
    REQUIRE(c->blockDimX >= 32 && c->blockDimX <= 1024 && c->blockDimY == 1 && c->blockDimZ == 1 && c->sharedMemBytes <= 232448);
    return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave inner, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
                                CUtensorMapFloatOOBfill fill) {
    ENTER(0);
    REQUIRE((size_t)map % 128 == 0 && (size_t)address % 16 == 0 && rank == 2);
    REQUIRE(sizes[0] && sizes[1] && strides[0] % 16 == 0 && box[0] <= 256 && box[1] <= 256 && steps[0] == 1 && steps[1] == 1);
    memset(map, 0xAB, 128);
    return CUDA_SUCCESS;
}

CUresult cuProfilerStart(void) { ENTER(1); return CUDA_SUCCESS; }
CUresult cuProfilerStop(void) { ENTER(1); return CUDA_SUCCESS; }

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
