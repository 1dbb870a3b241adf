/* What both drivers have: options, errors in one line, a pinned thread, a run's checkpoints. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"

double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void say(const char *kind, const char *form, va_list list) {
    fflush(stdout); /* in a log of both, what was before comes before */
    fprintf(stderr, "%s: ", kind);
    vfprintf(stderr, form, list);
    fputc('\n', stderr);
}

void warn(const char *form, ...) {
    va_list list;
    va_start(list, form);
    say("warning", form, list);
    va_end(list);
}

void end(const char *form, ...) {
    char kind[256];
    va_list list;
    va_start(list, form);
    snprintf(kind, sizeof kind, "%s: error", program_invocation_short_name);
    say(kind, form, list);
    exit(2);
}

void must(int wrong) {
    if (wrong) end("%s", barellm_error());
}

void *room(size_t count, size_t size) {
    void *found = calloc(count, size);
    if (!found) end("no memory");
    return found;
}

char *option(int argc, char **argv, const char *name, const char *usual) {
    char *found = (char *)usual;
    for (int i = 1; i < argc; i += 2)
        if (!strcmp(argv[i], name)) found = argv[i + 1]; /* the last one, as in every command */
    return found;
}

uint64_t whole(const char *name, const char *value, uint64_t least, uint64_t most) {
    errno = 0;
    uint64_t found = strtoull(value, NULL, 10);
    if (!*value || value[strspn(value, "0123456789")] || errno || found < least || found > most)
        end("%s is %.100s, expected a whole number from %llu to %llu", name, value, (unsigned long long)least, (unsigned long long)most);
    return found;
}

double number(const char *name, const char *value) {
    char *rest;
    double found = strtod(value, &rest);
    if (!*value || *rest || value[strspn(value, "0123456789+-.eE")]) end("%s is %.100s, expected a number", name, value);
    return found;
}

void start(int argc, char **argv, const char *const *known, const char *usage) {
    int fd;
    do fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= 2); /* a stream that is closed: no file of the run may get its number */
    close(fd);
    for (int i = 1; i < argc; i += 2) {
        int found = 0;
        for (const char *const *name = known; *name; name++) found |= !strcmp(argv[i], *name);
        if (found && i + 1 < argc) continue;
        if (strcmp(argv[i], "--help")) fprintf(stderr, "%s: %.100s\n", found ? "a value is missing" : "unknown option", argv[i]);
        fputs(usage, stderr);
        exit(!strcmp(argv[i], "--help") ? 0 : 2);
    }
}

/* This thread takes part in every step, beside helpers that are pinned to the processors behind the first one. */
void pin(void) {
    const char *asked = getenv("BARELLM_PIN");
    cpu_set_t set, one;
    if ((asked && !strcmp(asked, "0")) || sched_getaffinity(0, sizeof set, &set)) return;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &set)) {
            CPU_SET(cpu, &one);
            break;
        }
    sched_setaffinity(0, sizeof one, &one); /* where it is refused, it runs unpinned */
}

int64_t resume(barellm *s, const char *run) {
    char folder[4096], path[4200];
    int64_t step = INT64_MAX, skipped = 0;
    snprintf(folder, sizeof folder, "%s/checkpoints", run);
    while ((step = barellm_newest(folder, step)) >= 0) {
        snprintf(path, sizeof path, "%s/step-%06lld", folder, (long long)step);
        int wrong = barellm_load(s, path);
        if (!wrong) return step;
        must(wrong != -2);
        warn("skipped %s", barellm_error());
        skipped++;
    }
    must(step < -1);
    if (skipped) end("no checkpoint in %s is whole", folder);
    return -1;
}
