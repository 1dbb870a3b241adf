/* A disk that fails, for LD_PRELOAD. Calls that change what lies below $FAULTS_UNDER are counted from 1 and written to $FAULTS_LOG, a
 * line each; with a file $FAULTS_COUNT a process and those that it starts are counted together. Calls from $FAULTS_FIRST to $FAULTS_LAST
 * fail with the error $FAULTS_DO, a number; or the first of them comes back only when somebody continues the process (stop), or never,
 * where a write leaves half of its bytes (kill). sleep() and Python's time.sleep() take no time, threading.Event's
 * wait() does: a process that waits to be ended by another has to use it. With $FAULTS_SLEEP a signal comes meanwhile. The
 * names with 64 are those that Python calls; where long has 64 bits they are the same functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int log_file = -1;

static void say(const char *name, const char *path) {
    char line[8300];
    if (log_file < 0) log_file = REAL(open)(getenv("FAULTS_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int length = snprintf(line, sizeof line, "%s %s\n", name, path);
    if (REAL(write)(log_file, line, length) != length) abort();
}

static int counted(void) {
    static int own, *calls = &own;
    const char *shared = getenv("FAULTS_COUNT");
    if (shared && calls == &own) {
        int fd = REAL(open)(shared, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (REAL(ftruncate)(fd, sizeof *calls)) abort();
        calls = mmap(NULL, sizeof *calls, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (calls == MAP_FAILED) abort();
        close(fd);
    }
    return __atomic_add_fetch(calls, 1, __ATOMIC_SEQ_CST);
}

enum { PASS, FAIL, DIE };

static int fault(const char *name, const char *path) {
    const char *under = getenv("FAULTS_UNDER"), *first = getenv("FAULTS_FIRST"), *last = getenv("FAULTS_LAST"), *what = getenv("FAULTS_DO");
    if (!under || strncmp(path, under, strlen(under))) return PASS;
    say(name, path + strlen(under));
    int calls = counted();
    if (!first || calls < atoi(first) || calls > (last ? atoi(last) : atoi(first))) return PASS;
    if (!strcmp(what, "kill")) return DIE;
    if (!strcmp(what, "stop")) return raise(SIGSTOP), PASS;
    errno = atoi(what);
    return FAIL;
}

static const char *named(int fd) {
    static __thread char link[64], path[4200];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

static const char *within(int fd, const char *name) {
    static __thread char path[8400];
    if (fd == AT_FDCWD || name[0] == '/') return name;
    snprintf(path, sizeof path, "%s/%s", named(fd), name);
    return path;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

#define TRY(name, path, half, ...) \
    switch (fault(#name, path)) { \
    case FAIL: return -1; \
    case DIE: half; die(); \
    } \
    return REAL(name)(__VA_ARGS__)

int open(const char *path, int flags, ...) {
    va_list list;
    va_start(list, flags);
    int mode = flags & O_CREAT ? va_arg(list, int) : 0;
    va_end(list);
    if (!(flags & O_CREAT)) return REAL(open)(path, flags);
    TRY(open, path, , path, flags, mode);
}

ssize_t write(int fd, const void *data, size_t count) { TRY(write, named(fd), REAL(write)(fd, data, count / 2), fd, data, count); }
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) { TRY(pwrite, named(fd), REAL(pwrite)(fd, data, count / 2, at), fd, data, count, at); }
int fsync(int fd) { TRY(fsync, named(fd), , fd); }
int mkdir(const char *path, mode_t mode) { TRY(mkdir, path, , path, mode); }
int rmdir(const char *path) { TRY(rmdir, path, , path); }
int unlink(const char *path) { TRY(unlink, path, , path); }

int openat(int fd, const char *name, int flags, ...) {
    va_list list;
    va_start(list, flags);
    int mode = flags & O_CREAT ? va_arg(list, int) : 0;
    va_end(list);
    if (!(flags & O_CREAT)) return REAL(openat)(fd, name, flags);
    TRY(openat, within(fd, name), , fd, name, flags, mode);
}

int unlinkat(int fd, const char *name, int flags) { TRY(unlinkat, within(fd, name), , fd, name, flags); }
int ftruncate(int fd, off_t size) { TRY(ftruncate, named(fd), , fd, size); }
int truncate(const char *path, off_t size) { TRY(truncate, path, , path, size); }

ssize_t sendfile(int to, int from, off_t *at, size_t count) {
    TRY(sendfile, named(to), REAL(sendfile)(to, from, at, count < 2 ? 0 : 1), to, from, at, count);
}

int posix_fallocate(int fd, off_t at, off_t size) {  /* gives the error itself */
    switch (fault("posix_fallocate", named(fd))) {
    case FAIL: return errno;
    case DIE: die();
    }
    return REAL(posix_fallocate)(fd, at, size);
}

int open64(const char *path, int flags, ...) __attribute__((alias("open")));
int openat64(int fd, const char *name, int flags, ...) __attribute__((alias("openat")));
ssize_t pwrite64(int fd, const void *data, size_t count, off_t at) __attribute__((alias("pwrite")));
int ftruncate64(int fd, off_t size) __attribute__((alias("ftruncate")));
int truncate64(const char *path, off_t size) __attribute__((alias("truncate")));
ssize_t sendfile64(int to, int from, off_t *at, size_t count) __attribute__((alias("sendfile")));
int posix_fallocate64(int fd, off_t at, off_t size) __attribute__((alias("posix_fallocate")));

int rename(const char *from, const char *to) {
    char both[8400];
    snprintf(both, sizeof both, "%s -> %s", from, to);
    TRY(rename, both, , from, to);
}

unsigned sleep(unsigned seconds) {
    const char *number = getenv("FAULTS_SLEEP");
    (void)seconds;
    say("sleep", "");
    if (number) raise(atoi(number));
    return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    (void)clock, (void)flags, (void)until, (void)left;
    sched_yield();
    return 0;
}
