/* A model that trains: what `barellm build` made of one configuration. No Python and no LLVM are needed at run time.
 *
 * Every function that returns int gives 0, or less with the reason in one line at barellm_error(). A session is used by one thread at
 * a time; several sessions may live in one process. The calling thread takes part in the work. */
#ifndef BARELLM_H
#define BARELLM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct barellm barellm;

/* Sizes and limits, fixed when the program was built, and where the session stands. */
typedef struct {
    int64_t batch, seq;        /* a micro-batch has batch x seq tokens */
    int64_t vocabulary;        /* ids are 0 to vocabulary - 1; a target of -1 is not counted */
    int64_t steps, step;       /* optimizer steps of the whole run, and how many are done */
    int64_t micro_batches;     /* of the next step */
    int64_t samples;           /* sequences that all steps before the next one have taken */
    int64_t arena_bytes;       /* memory of the session */
    int64_t parameters;        /* numbers that are trained */
} barellm_info;

typedef struct {
    double loss;               /* nats per target, the mean of the step */
    double norm;               /* of the gradient, before it is clipped */
    double lr;                 /* learning rate of the step; of AdamW, where Muon has another */
    double muon_lr;            /* of Muon; -1 where it has none of its own */
} barellm_result;

/* Open a session with so many threads, 0: one for each processor that the process may use, up to the number it was built for.
 * NULL where it fails: no memory, too many threads, or a processor without the instructions that the code has. */
barellm *barellm_open(int threads);
void barellm_close(barellm *session);

/* The reason of the last failure in this thread. */
const char *barellm_error(void);

barellm_info barellm_about(const barellm *session);

/* Parameters as at the beginning of a run, drawn from the configuration's seed. The state of the optimizer is zero after open. */
int barellm_initialize(barellm *session);

/* One optimizer step. tokens and targets: micro_batches x batch x seq ids, of which the targets are those that follow. */
int barellm_step(barellm *session, const int32_t *tokens, const int32_t *targets, barellm_result *result);

/* The mean loss in nats of up to batch sequences of up to seq tokens, without dropout. */
int barellm_evaluate(barellm *session, const int32_t *tokens, const int32_t *targets, int64_t batch, int64_t seq, double *loss);

/* Feed `count` tokens at positions `position` on. logits: `vocabulary` numbers for the token that follows the last of them. */
int barellm_logits(barellm *session, const int32_t *tokens, int64_t count, int64_t position, float *logits);

/* How a token is chosen. temperature 0 takes the most likely one; top_k 0, top_p 1 and min_p 0 cut nothing, and a repetition
 * penalty of 1 changes nothing. Draw number i of a text has bits of (seed, i), which are those of `barellm sample --seed`. */
typedef struct {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
    uint64_t seed;
} barellm_sampling;

/* Go on from the first `known` ids of a text, which has room for known + count. Gives how many tokens were drawn, or -1. Where
 * `each` is not NULL it gets every token as soon as it is known, and ends the text by a result other than 0. */
int64_t barellm_sample(barellm *session, int32_t *text, int64_t known, int64_t count, const barellm_sampling *how,
                       int (*each)(int32_t token, void *own), void *own);

/* Ids for a model to go on from a text, at most `room`, which is at least 1 and the bytes of the text: their number, or -1. An
 * empty text has the id from which texts begin; others need a tokenizer of bytes or of characters. */
int64_t barellm_prompt(const char *text, int32_t *ids, int64_t room);

/* The bytes that an id stands for, which end with no zero, and whether a text ends with it. */
const char *barellm_token(int32_t id, int64_t *length);
int barellm_ends(int32_t id);

/* Positions that barellm_logits has. A text that is longer is fed again from its newer half. */
int64_t barellm_positions(void);

/* A tensor by its name, such as "wte", row-major in fp32. count: its number of elements, which is checked. */
int64_t barellm_size(const barellm *session, const char *name); /* elements, or -1 */
int barellm_read(barellm *session, const char *name, float *values, size_t count);
int barellm_write(barellm *session, const char *name, const float *values, size_t count);

/* A checkpoint folder of barellm's own format, which `barellm train --resume` reads, and the other way round. Saving writes
 * FOLDER/step-NNNNNN, whole and on the disk or not at all, also where a damaged one has its name. It removes what unfinished saves
 * left, and older checkpoints as train.save_total_limit and train.keep_every of the run say, unless the last step's loss or norm was not finite.
 * -2 where the disk is full. Loading takes such a folder and checks its sizes and checksums: -2 where it is damaged. */
int barellm_save(barellm *session, const char *folder, double seconds);
int barellm_load(barellm *session, const char *path);

/* The highest step below `below` that a folder has a checkpoint of, damaged or not: -1 where it has none, -2 where it cannot be
 * listed. */
int64_t barellm_newest(const char *folder, int64_t below);

/* XXH3-64 of the bytes of all parameters and states, by name: equal for any number of threads. */
uint64_t barellm_digest(const barellm *session);

#ifdef __cplusplus
}
#endif
#endif
