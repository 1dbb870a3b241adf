/* What both drivers have: options, errors in one line, a pinned thread, a run's checkpoints. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "barellm.h"
#include "driver.h"

double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

void end(const char *reason) {
    fprintf(stderr, "%s: error: %s\n", program_invocation_short_name, reason);
    exit(2);
}

void must(int wrong) {
    if (wrong) end(barellm_error());
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

void check_options(int argc, char **argv, const char *const *known, const char *usage) {
    for (int i = 1; i < argc; i += 2) {
        int found = 0;
        for (const char *const *name = known; *name; name++) found |= !strcmp(argv[i], *name);
        if (found && i + 1 < argc) continue;
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

int64_t newest(const char *folder) {
    DIR *listed = opendir(folder);
    int64_t found = -1;
    for (struct dirent *entry; listed && (entry = readdir(listed));) {
        long long step;
        int length = 0;
        if (sscanf(entry->d_name, "step-%lld%n", &step, &length) == 1 && !entry->d_name[length] && step > found) found = step;
    }
    if (listed) closedir(listed);
    return found;
}

