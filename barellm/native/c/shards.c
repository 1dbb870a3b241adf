#include "shards.h"

#include <fcntl.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER 1024
#define ROUNDS 6

static int open_shard(struct part *p, const char *path, char *wrong, int room) {
    struct stat about;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &about)) return snprintf(wrong, room, "cannot read %s", path), -1;
    int32_t header[3] = {0};
    int64_t size = about.st_size, known = size >= HEADER && read(fd, header, sizeof header) == sizeof header;
    p->width = header[0] == 20240520 && header[1] == 1 ? 2 : header[0] == 20240801 && header[1] == 7 ? 4 : 0;
    p->count = header[2];
    if (!known || !p->width || p->count < 1 || size != HEADER + p->count * p->width) {
        close(fd);
        return snprintf(wrong, room, "%s is not a shard of tokens: magic %d, version %d, %d tokens in %lld bytes", path, header[0], header[1], header[2], (long long)size), -1;
    }
    char *at = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return snprintf(wrong, room, "cannot map %s", path), -1;
    p->tokens = (unsigned char *)at + HEADER;
    return 0;
}

int open_stream(struct stream *s, const char *pattern, char *wrong, int room) {
    glob_t found;
    memset(s, 0, sizeof *s);
    if (glob(pattern, 0, NULL, &found)) return snprintf(wrong, room, "no shard of tokens matches %s", pattern), -1;
    int bad = found.gl_pathc > 1024 ? snprintf(wrong, room, "%s matches more than 1024 shards", pattern), -1 : 0;
    for (size_t i = 0; i < found.gl_pathc && !bad; i++) {
        bad = open_shard(&s->part[i], found.gl_pathv[i], wrong, room);
        s->count += s->part[i].count;
        s->parts++;
    }
    globfree(&found);
    return bad;
}

void read_window(const struct stream *s, int64_t start, int64_t count, int32_t *out) {
    const struct part *p = s->part;
    for (; start >= p->count; p++) start -= p->count;
    for (int64_t i = 0; i < count; i++, start++) {
        if (start == p->count) p++, start = 0;
        const unsigned char *at = p->tokens + start * p->width;
        out[i] = at[0] | at[1] << 8 | (p->width == 4 ? at[2] << 16 | (uint32_t)at[3] << 24 : 0);
    }
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
