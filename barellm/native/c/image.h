/* What image.c, which barellm wrote, tells runtime.c: one run as data. layout.h beside it has the places that kernels know. */
#ifndef BARELLM_IMAGE_H
#define BARELLM_IMAGE_H

#include <stdint.h>
#include "layout.h"

typedef void kernel(void *thread, const int64_t *arguments, int32_t *counters);

struct call {
    kernel *function;
    int64_t first; /* of its arguments, in `arguments` */
    int64_t barrier; /* whether all threads meet after it */
};

struct program {
    const char *name;
    const struct call *calls;
    int64_t count;
    int64_t tokens, targets, output; /* offsets in the arena, -1: none */
    int64_t batch, seq; /* the most that are planned */
};

struct tensor {
    const char *name;
    char role; /* 'p'arameter, 's'tate; others are not kept */
    enum { FP32, I32, BF16, FP16, BF16_I16, FP16_FP32, E6M9, UE6M10 } format;
    int64_t offset, size, nbytes;
};

struct constant {
    int64_t offset, nbytes;
    const uint64_t *bytes;
};

struct schedule {
    double lr, min_lr;
    double adamw, muon; /* the rates of both as multiples of lr; muon is below 0 where it has none of its own */
    double cooldown, momentum, momentum_start;
    int64_t warmup, momentum_warmup, momentum_cooldown;
    enum { COSINE, LINEAR, CONSTANT, WSD } kind;
};

struct run {
    int64_t batch, seq, accumulate, ramp_from, ramp_tokens, steps, seed, keep, milestones, vocabulary;
    int64_t whole; /* the model has no cache: it is fed all of a text for each token */
    double loss_gradient; /* 0: one over the number of targets */
};

struct blob {
    const char *name;
    const char *begin, *end;
    const char *xxh3_64; /* of files */
};

struct tokenizer {
    struct blob table; /* where each token ends, uint32, then their bytes */
    int64_t count;
    enum { BY_RULES, BY_BYTE, BY_CHARACTER } by_piece; /* how a text is cut */
    int32_t start; /* from which a text without a prompt goes on */
    const int32_t *ends; /* the ids that end a text */
    int64_t end_count;
};

extern const struct program programs[];
extern const struct tensor tensors[]; /* in the order of files */
extern const int64_t tensor_count, by_name[]; /* and the order of their names */
extern const struct constant constants[];
extern const int64_t constant_count;
extern const int64_t arguments[], argument_count;
extern const int32_t relocations[]; /* which arguments are places in the arena */
extern const int64_t relocation_count;
extern const int64_t arena_bytes, private_offset, private_bytes, most_threads;
extern const int64_t defaults[][2], default_count; /* scalars that each run begins with: row, bits */
extern const struct schedule schedule;
extern const struct run run;
extern const char *const instructions; /* flags of /proc/cpuinfo that the code needs, spaces between */
extern const struct blob weights_header, optimizer_header, meta_text;
extern const struct tokenizer tokenizer;
extern const struct blob tokenizer_files[];
extern const int64_t tokenizer_file_count;

#endif
