/* Tensors as fp32, and checkpoints: barellm's own folders, written whole or not at all. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime.h"

#define PIECE 131072 /* numbers that are converted at a time */

/* --- numbers as they lie in memory --- */

static uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static uint32_t decode16(int format, uint16_t code) {
    uint32_t magnitude = format == E6M9 ? code & 0x7fff : code, shift = format == E6M9 ? 14 : 13;
    uint32_t bits = magnitude ? (magnitude << shift) + ((127 - 60) << 23) : 0;
    return format == E6M9 ? bits | (uint32_t)(code & 0x8000) << 16 : bits;
}

/* To nearest, ties away from zero: what decode16 gave comes back as it was. */
static uint16_t encode16(int format, uint32_t bits) {
    uint32_t shift = format == E6M9 ? 14 : 13, rebias = (127 - 60) << 23, least = (1u << shift) + rebias;
    uint32_t most = (((format == E6M9 ? 1u << 15 : 1u << 16) - 1) << shift) + rebias, magnitude = bits & 0x7fffffff;
    if (magnitude > most) magnitude = most;
    uint32_t code = ((magnitude < least ? 0 : magnitude - rebias) + (1u << (shift - 1))) >> shift;
    return format == E6M9 && code ? code | (bits >> 16 & 0x8000) : code;
}

/* The 32 bits of elements from `first`, as files have them: fp32, or i32. */
static void get(const struct barellm *s, const struct tensor *t, int64_t first, int64_t count, uint32_t *out) {
    const char *at = s->arena + t->offset;
    const uint16_t *low = (const uint16_t *)at + first, *second = low + t->size;
    switch (t->format) {
    case FP32: case I32: memcpy(out, at + 4 * first, 4 * count); return;
    case HALF: memcpy(out, at + (2 * t->size + 3) / 4 * 4 + 4 * first, 4 * count); return;
    case BF16: for (int64_t i = 0; i < count; i++) out[i] = (uint32_t)low[i] << 16; return;
    case SPLIT: for (int64_t i = 0; i < count; i++) out[i] = ((uint32_t)low[i] << 16) + (uint32_t)(int32_t)(int16_t)second[i]; return;
    default: for (int64_t i = 0; i < count; i++) out[i] = decode16(t->format, low[i]); return;
    }
}

/* fp16, ties to even: the plane that products read beside the fp32 weight. */
static uint16_t half_of(uint32_t bits) {
    uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x47800000) return sign | (magnitude > 0x7f800000 ? 0x7e00 : 0x7c00);
    if (magnitude < 0x38800000) { /* denormals: the sum rounds */
        float x, half = 0.5f;
        memcpy(&x, &magnitude, sizeof x);
        return sign | (bits_of(x + half) - bits_of(half));
    }
    return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
}

static void put(struct barellm *s, const struct tensor *t, int64_t first, int64_t count, const uint32_t *in) {
    char *at = s->arena + t->offset;
    uint16_t *low = (uint16_t *)at + first, *second = low + t->size;
    switch (t->format) {
    case FP32: case I32: memcpy(at + 4 * first, in, 4 * count); return;
    case HALF:
        memcpy(at + (2 * t->size + 3) / 4 * 4 + 4 * first, in, 4 * count);
        for (int64_t i = 0; i < count; i++) low[i] = half_of(in[i]);
        return;
    case BF16: for (int64_t i = 0; i < count; i++) low[i] = (in[i] + 0x7fff + (in[i] >> 16 & 1)) >> 16; return;
    case SPLIT:
        for (int64_t i = 0; i < count; i++) low[i] = (in[i] + 0x8000) >> 16, second[i] = in[i];
        return;
    default: for (int64_t i = 0; i < count; i++) low[i] = encode16(t->format, in[i]); return;
    }
}

static const struct tensor *find(const char *name) {
    for (int64_t i = 0; i < tensor_count; i++)
        if (!strcmp(tensors[i].name, name)) return &tensors[i];
    fail("no tensor is named %s", name);
    return NULL;
}

int64_t barellm_size(const barellm *s, const char *name) {
    (void)s;
    const struct tensor *t = find(name);
    return t ? t->size : -1;
}

static const struct tensor *sized(const char *name, size_t count) {
    const struct tensor *t = find(name);
    if (t && (int64_t)count != t->size) {
        fail("%s has %lld elements, given room for %zu", name, (long long)t->size, count);
        return NULL;
    }
    return t;
}

int barellm_read(barellm *s, const char *name, float *values, size_t count) {
    const struct tensor *t = sized(name, count);
    if (t) get(s, t, 0, t->size, (uint32_t *)values);
    return t ? 0 : -1;
}

int barellm_write(barellm *s, const char *name, const float *values, size_t count) {
    const struct tensor *t = sized(name, count);
    if (t) put(s, t, 0, t->size, (const uint32_t *)values);
    return t ? 0 : -1;
}

uint64_t barellm_digest(const barellm *s) {
    struct hash h;
    hash_begin(&h);
    for (int64_t i = 0; i < tensor_count; i++) {
        const struct tensor *t = &tensors[by_name[i]];
        hash_add(&h, s->arena + t->offset, t->nbytes);
    }
    return hash_end(&h);
}

/* --- files --- */

struct file {
    FILE *stream;
    struct hash hash;
    char path[4096];
};

static int add(struct file *f, const void *data, size_t count) {
    hash_add(&f->hash, data, count);
    return fwrite(data, 1, count, f->stream) == count ? 0 : fail("%s: %s", f->path, strerror(errno));
}

static int make(struct file *f, const char *folder, const char *name) {
    snprintf(f->path, sizeof f->path, "%s/%s", folder, name);
    hash_begin(&f->hash);
    f->stream = fopen(f->path, "wb");
    return f->stream ? 0 : fail("%s: %s", f->path, strerror(errno));
}

static int finish(struct file *f, int wrong) {
    if (!wrong && (fflush(f->stream) || fsync(fileno(f->stream)))) wrong = fail("%s: %s", f->path, strerror(errno));
    fclose(f->stream);
    return wrong;
}

static int sync_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY);
    int wrong = fd < 0 || fsync(fd);
    if (fd >= 0) close(fd);
    return wrong ? fail("%s: %s", path, strerror(errno)) : 0;
}

static int write_tensors(struct barellm *s, const char *folder, const char *name, const struct blob *header, char role, char *entry, size_t room) {
    struct file f;
    uint32_t *piece = malloc(PIECE * sizeof *piece);
    if (!piece) return fail("no memory for %s", name);
    int wrong = make(&f, folder, name);
    if (!wrong) {
        wrong = add(&f, header->begin, header->end - header->begin);
        for (int64_t i = 0; i < tensor_count && !wrong; i++)
            for (int64_t at = 0; tensors[i].role == role && at < tensors[i].size && !wrong; at += PIECE) {
                int64_t count = tensors[i].size - at < PIECE ? tensors[i].size - at : PIECE;
                get(s, &tensors[i], at, count, piece);
                wrong = add(&f, piece, 4 * count);
            }
        wrong = finish(&f, wrong);
    }
    free(piece);
    snprintf(entry, room, "    \"%s\": {\"bytes\": %llu, \"xxh3_64\": \"%016llx\"}", name, (unsigned long long)f.hash.bytes, wrong ? 0 : (unsigned long long)hash_end(&f.hash));
    return wrong;
}

static int write_text(const char *folder, const char *name, const char *text, size_t count, char *entry, size_t room) {
    struct file f;
    if (make(&f, folder, name)) return -1;
    int wrong = finish(&f, add(&f, text, count));
    if (entry) snprintf(entry, room, "    \"%s\": {\"bytes\": %zu, \"xxh3_64\": \"%016llx\"}", name, count, (unsigned long long)hash_end(&f.hash));
    return wrong;
}

static int milestone(int64_t step) { return run.milestones && step && step % run.milestones == 0; }

static int fill(struct barellm *s, const char *folder, double seconds) {
    char weights[256], optimizer[256], meta[256], *text = NULL, *manifest = NULL;
    int64_t done = micro_batches_before(s->step) * run.batch;
    size_t count = meta_text.end - meta_text.begin;
    if (write_tensors(s, folder, "weights.safetensors", &weights_header, 'p', weights, sizeof weights)) return -1;
    if (write_tensors(s, folder, "optimizer.safetensors", &optimizer_header, 's', optimizer, sizeof optimizer)) return -1;
    int length = asprintf(&text,
        "{\n  \"format\": 1,\n  \"step\": %lld,\n%.*s,\n  \"total_steps\": %lld,\n  \"samples\": %lld,\n  \"tokens\": %lld,\n"
        "  \"seconds\": %.3f,\n  \"milestone\": %s\n}\n",
        (long long)s->step, (int)count, meta_text.begin, (long long)s->total, (long long)done, (long long)(done * run.seq), seconds,
        milestone(s->step) ? "true" : "false");
    if (length < 0) return fail("no memory for meta.json");
    int wrong = write_text(folder, "meta.json", text, length, meta, sizeof meta);
    free(text);
    char *files = calloc(1, 512 * (tokenizer_file_count + 1));
    for (int64_t i = 0; i < tokenizer_file_count && files && !wrong; i++) {
        const struct blob *b = &tokenizer_files[i];
        wrong = write_text(folder, b->name, b->begin, b->end - b->begin, NULL, 0);
        sprintf(files + strlen(files), ",\n    \"%s\": {\"bytes\": %lld, \"xxh3_64\": \"%s\"}", b->name, (long long)(b->end - b->begin), b->xxh3_64);
    }
    length = wrong || !files ? -1 : asprintf(&manifest, "{\n  \"format\": 1,\n  \"files\": {\n%s,\n%s,\n%s%s\n  }\n}\n", weights, optimizer, meta, files);
    if (!wrong && length < 0) wrong = fail("no memory for manifest.json");
    if (!wrong) wrong = write_text(folder, "manifest.json", manifest, length, NULL, 0);
    free(manifest);
    free(files);
    return wrong || sync_folder(folder) ? -1 : 0;
}

/* Of barellm's own checkpoints; one between two micro-batches has gradients too. */
static const char *const NAMES[] = {"weights.safetensors", "optimizer.safetensors", "meta.json", "manifest.json", "gradients.safetensors"};
enum { NAME_COUNT = sizeof NAMES / sizeof *NAMES };

static void remove_files(const char *folder) {
    char path[4096];
    for (int i = 0; i < NAME_COUNT + tokenizer_file_count; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, i < NAME_COUNT ? NAMES[i] : tokenizer_files[i - NAME_COUNT].name);
        unlink(path);
    }
    rmdir(folder);
}

/* All of a small file, with a zero behind it. */
static char *text_of(const char *folder, const char *name) {
    char path[4096];
    struct stat about;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    char *text = f && !fstat(fileno(f), &about) ? malloc(about.st_size + 1) : NULL;
    if (text) text[fread(text, 1, about.st_size, f)] = 0;
    else fail("%s: %s", path, strerror(errno));
    if (f) fclose(f);
    return text;
}

/* Remove all but the newest `run.keep` checkpoints up to a step; a later one comes of steps that are done again. Those that say that
 * they are milestones stay, whatever this run was asked for. */
static int thin(const char *folder, int64_t last) {
    for (;;) {
        char path[4000], doomed[4000];
        int64_t oldest = -1, count = 0;
        DIR *listed = opendir(folder);
        if (!listed) return fail("%s: %s", folder, strerror(errno));
        for (struct dirent *entry; (entry = readdir(listed));) {
            long long step;
            int length = 0;
            if (sscanf(entry->d_name, "step-%lld%n", &step, &length) != 1 || entry->d_name[length] || step > last) continue;
            snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
            char *meta = text_of(path, "meta.json");
            int stays = meta && strstr(meta, "\"milestone\": true");
            free(meta);
            if (stays) continue;
            count++;
            if (oldest < 0 || step < oldest) oldest = step;
        }
        closedir(listed);
        if (count <= run.keep) return 0;
        snprintf(path, sizeof path, "%s/step-%06lld", folder, (long long)oldest);
        snprintf(doomed, sizeof doomed, "%s/.tmp-step-%06lld", folder, (long long)oldest);
        if (rename(path, doomed)) return fail("%s: %s", path, strerror(errno)); /* half of one never looks like a checkpoint */
        remove_files(doomed);
    }
}

int barellm_save(barellm *s, const char *folder, double seconds) {
    char temporary[4000], target[4000];
    snprintf(temporary, sizeof temporary, "%s/.tmp-step-%06lld", folder, (long long)s->step);
    snprintf(target, sizeof target, "%s/step-%06lld", folder, (long long)s->step);
    if (!access(target, F_OK)) return 0; /* the same step of the same run has the same bits */
    if (mkdir(folder, 0777) && errno != EEXIST) return fail("%s: %s", folder, strerror(errno));
    remove_files(temporary);
    if (mkdir(temporary, 0777)) return fail("%s: %s", temporary, strerror(errno));
    if (fill(s, temporary, s->seconds + seconds)) {
        remove_files(temporary);
        return -1;
    }
    if (rename(temporary, target)) return fail("%s: %s", target, strerror(errno));
    return sync_folder(folder) ? -1 : thin(folder, s->step);
}

static int verify(const char *folder, const char *manifest, const char *name) {
    char path[4096], wanted[128], buffer[65536], digest[17] = "";
    unsigned long long size = 0;
    snprintf(wanted, sizeof wanted, "\"%s\":", name);
    const char *entry = strstr(manifest, wanted), *bytes = entry ? strstr(entry, "\"bytes\":") : NULL;
    const char *sum = bytes ? strstr(bytes, "\"xxh3_64\":") : NULL;
    if (!sum || sscanf(bytes, "\"bytes\": %llu", &size) != 1 || sscanf(sum, "\"xxh3_64\": \"%16[0-9a-f]", digest) != 1)
        return fail("%s: manifest.json does not list %s", folder, name);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    if (!f) return fail("%s: %s", path, strerror(errno));
    struct hash h;
    hash_begin(&h);
    for (size_t count; (count = fread(buffer, 1, sizeof buffer, f));) hash_add(&h, buffer, count);
    fclose(f);
    if (h.bytes != size) return fail("%s has %llu bytes, expected %llu", path, (unsigned long long)h.bytes, size);
    char found[17];
    snprintf(found, sizeof found, "%016llx", (unsigned long long)hash_end(&h));
    return strcmp(found, digest) ? fail("the checksum of %s is %s, expected %s", path, found, digest) : 0;
}

static int read_tensors(struct barellm *s, const char *folder, const char *name, const struct blob *header, char role) {
    char path[4096];
    size_t length = header->end - header->begin;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    char *found = malloc(length);
    uint32_t *piece = malloc(PIECE * sizeof *piece);
    int wrong = 0;
    if (!f || !found || !piece) wrong = fail("%s: %s", path, strerror(errno));
    else if (fread(found, 1, length, f) != length || memcmp(found, header->begin, length))
        wrong = fail("%s has other tensors than this program: it is of another model", path);
    for (int64_t i = 0; i < tensor_count && !wrong; i++)
        for (int64_t at = 0; tensors[i].role == role && at < tensors[i].size && !wrong; at += PIECE) {
            size_t count = tensors[i].size - at < PIECE ? tensors[i].size - at : PIECE;
            if (fread(piece, 4, count, f) != count) wrong = fail("%s ends inside the tensor %s", path, tensors[i].name);
            else put(s, &tensors[i], at, count, piece);
        }
    if (f) fclose(f);
    free(found);
    free(piece);
    return wrong;
}

static int number(const char *meta, const char *key, double *value) {
    char line[64];
    snprintf(line, sizeof line, "\n  \"%s\": ", key); /* two spaces: not one of the configuration's */
    const char *at = strstr(meta, line);
    return at && sscanf(at + strlen(line), "%lf", value) == 1 ? 0 : fail("meta.json has no %s, expected what barellm writes there", key);
}

int barellm_load(barellm *s, const char *path) {
    double step = 0, total = 0, seconds = 0;
    char *manifest = text_of(path, "manifest.json"), *meta = manifest ? text_of(path, "meta.json") : NULL;
    int wrong = !meta;
    for (int i = 0; i < 3 && !wrong; i++) wrong = verify(path, manifest, NAMES[i]);
    wrong = wrong || number(meta, "step", &step) || number(meta, "total_steps", &total) || number(meta, "seconds", &seconds);
    wrong = wrong || read_tensors(s, path, NAMES[0], &weights_header, 'p') || read_tensors(s, path, NAMES[1], &optimizer_header, 's');
    free(manifest);
    free(meta);
    if (wrong) return -1;
    s->step = (int64_t)step;
    s->total = (int64_t)total;
    s->seconds = seconds;
    return 0;
}
