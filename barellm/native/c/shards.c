#include "shards.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER 1024
#define ROUNDS 6

static char reason[8192];

static const char *open_shard(struct part *p, const char *path) {
    struct stat about;
    int32_t header[3] = {0};
    p->path = strdup(path);
    p->fd = open(path, O_RDONLY | O_CLOEXEC);
    if (!p->path || p->fd < 0 || fstat(p->fd, &about)) return snprintf(reason, sizeof reason, "cannot read %s: %s", path, strerror(errno)), reason;
    int64_t size = about.st_size, known = pread(p->fd, header, sizeof header, 0) == sizeof header;
    p->width = header[0] == 20240520 && header[1] == 1 ? 2 : header[0] == 20240801 && header[1] == 7 ? 4 : 0;
    p->count = header[2];
    if (known && p->width && p->count >= 1 && size == HEADER + p->count * p->width) return NULL;
    return snprintf(reason, sizeof reason, "%s is not a shard of tokens: magic %d, version %d, %d tokens in %lld bytes", path, header[0], header[1], header[2], (long long)size), reason;
}

const char *open_stream(struct stream *s, const char *pattern) {
    glob_t found;
    struct rlimit files;
    const char *wrong = NULL;
    memset(s, 0, sizeof *s);
    if (!getrlimit(RLIMIT_NOFILE, &files)) files.rlim_cur = files.rlim_max, setrlimit(RLIMIT_NOFILE, &files); /* shards stay open */
    if (glob(pattern, 0, NULL, &found)) return snprintf(reason, sizeof reason, "no shard of tokens matches %s", pattern), reason;
    if (found.gl_pathc > 1024) wrong = (snprintf(reason, sizeof reason, "%s matches more than 1024 shards", pattern), reason);
    for (size_t i = 0; i < found.gl_pathc && !wrong; i++) {
        wrong = open_shard(&s->part[i], found.gl_pathv[i]);
        s->count += s->part[i].count;
        s->parts++;
    }
    globfree(&found);
    return wrong;
}

const char *read_window(const struct stream *s, int64_t first, int64_t count, int32_t *out) {
    const struct part *p = s->part;
    for (; first >= p->count; p++) first -= p->count;
    for (int64_t n; count; count -= n, out += n, first = 0, p++) {
        n = p->count - first < count ? p->count - first : count;
        unsigned char *at = (unsigned char *)out + (4 - p->width) * n; /* behind what the tokens before it become */
        ssize_t size = n * p->width, found = pread(p->fd, at, size, HEADER + first * p->width);
        if (found != size)
            return snprintf(reason, sizeof reason, "%s: %s", p->path, found < 0 ? strerror(errno) : "it has become shorter while the program read it"), reason;
        for (int64_t i = 0; i < n; i++, at += p->width) out[i] = at[0] | at[1] << 8 | (p->width == 4 ? at[2] << 16 | (uint32_t)at[3] << 24 : 0);
    }
    return NULL;
}

/* splitmix64 (Steele, Lea, Flood 2014), and a Feistel network on it that permutes 0 to size - 1 (Black and Rogaway 2002). */
static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static uint64_t draw(uint64_t key, uint64_t index) { return mix(key + (index + 1) * 0x9E3779B97F4A7C15u); }

static uint64_t permuted(uint64_t index, uint64_t size, uint64_t key) {
    int bits = 0;
    while (bits < 64 && (size - 1) >> bits) bits++;
    int low_bits = (bits + 1) / 2;
    uint64_t low_mask = (1ull << low_bits) - 1, high_mask = (1ull << (bits - low_bits)) - 1;
    do {
        uint64_t high = index >> low_bits, low = index & low_mask;
        for (int r = 0; r < ROUNDS; r += 2) {
            high ^= mix(low ^ draw(key, r)) & high_mask;
            low ^= mix(high ^ draw(key, r + 1)) & low_mask;
        }
        index = high << low_bits | low;
    } while (index >= size);
    return index;
}

int64_t window_of(const struct stream *s, int order, uint64_t seed, int64_t seq, int64_t sample) {
    uint64_t windows = (s->count - 1) / seq;
    if (order == 1) return draw(draw(seed, 1), sample) % (uint64_t)(s->count - seq);
    if (order == 2) return sample % windows * seq;
    return permuted(sample % windows, windows, draw(draw(seed, 0), sample / windows)) * seq;
}
