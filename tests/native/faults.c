/* A disk that fails, for LD_PRELOAD. Calls that change what lies below $FAULTS_UNDER are counted from 1 and written to $FAULTS_LOG, a
 * line each. Those from $FAULTS_FIRST to $FAULTS_LAST fail with the error $FAULTS_DO, a number; or the first of them comes back only
 * when somebody continues the process (stop), or never, where a write leaves half of its bytes (kill). sleep() takes no time; with
 * $FAULTS_SLEEP a signal comes meanwhile. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int calls, log_file = -1;

static void say(const char *name, const char *path) {
    char line[8300];
    if (log_file < 0) log_file = REAL(open)(getenv("FAULTS_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int length = snprintf(line, sizeof line, "%s %s\n", name, path);
    if (REAL(write)(log_file, line, length) != length) abort();
}

enum { PASS, FAIL, DIE };

static int fault(const char *name, const char *path) {
    const char *under = getenv("FAULTS_UNDER"), *first = getenv("FAULTS_FIRST"), *last = getenv("FAULTS_LAST"), *what = getenv("FAULTS_DO");
    if (strncmp(path, under, strlen(under))) return PASS;
    say(name, path + strlen(under));
    calls++;
    if (!first || calls < atoi(first) || calls > (last ? atoi(last) : atoi(first))) return PASS;
    if (!strcmp(what, "kill")) return DIE;
    if (!strcmp(what, "stop")) return raise(SIGSTOP), PASS;
    errno = atoi(what);
    return FAIL;
}

static const char *named(int fd) {
    static char link[64], path[4200];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
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

int unlinkat(int fd, const char *name, int flags) {
    char path[8400];
    snprintf(path, sizeof path, "%s/%s", named(fd), name);
    TRY(unlinkat, path, , fd, name, flags);
}

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
