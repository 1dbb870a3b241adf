/* llm.c's shards of tokens, read as one stream, and barellm's orders of windows in it. */
#ifndef BARELLM_SHARDS_H
#define BARELLM_SHARDS_H

#include <stdint.h>

struct stream {
    int parts;
    struct part {
        char *path;
        int64_t count;
        int fd, width; /* width: bytes of a token, 2 or 4 */
    } part[1024];
    int64_t count;
};

/* The shards that a pattern matches, sorted. NULL, or why not. */
const char *open_stream(struct stream *s, const char *pattern);

/* Tokens from one on. They are read, not mapped: a file that became shorter meanwhile is a reason, not a signal. */
const char *read_window(const struct stream *s, int64_t first, int64_t count, int32_t *out);

/* The first token of a sample's window. order: 0 epoch, 1 random, 2 sequential. */
int64_t window_of(const struct stream *s, int order, uint64_t seed, int64_t seq, int64_t sample);

#endif
