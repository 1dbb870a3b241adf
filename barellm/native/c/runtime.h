#ifndef BARELLM_RUNTIME_H
#define BARELLM_RUNTIME_H

#include <pthread.h>
#include "barellm.h"
#include "image.h"

struct thread {
    struct barellm *session;
    char *block; /* what each kernel gets as its first argument */
    pthread_t handle;
};

struct barellm {
    int threads, running; /* running: helpers that were started */
    struct thread *thread;
    char *shared, *mapped, *arena, *records;
    int64_t mapped_bytes, *arguments;
    char *table[PROGRAMS];
    int64_t scalars[SCALARS];
    int64_t step, total, not_finite; /* not_finite: the last steps in a row whose loss or norm was not */
    double seconds; /* of the sessions before, from a checkpoint */
};

int fail(const char *form, ...) __attribute__((format(printf, 1, 2)));
int64_t micro_batches_before(int64_t step);
double learning_rate(int64_t step, int64_t total);

/* XXH3-64 of bytes that come in pieces, more than 240 in all. */
struct hash {
    uint64_t lane[8];
    uint8_t before[64], held[64]; /* the last stripe that was taken in, and what has come since */
    uint64_t bytes, filled, stripes;
};
void hash_begin(struct hash *h);
void hash_add(struct hash *h, const void *data, uint64_t count);
uint64_t hash_end(struct hash *h);

#endif
