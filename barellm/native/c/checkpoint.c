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
    case FP16_FP32: memcpy(out, at + (2 * t->size + 3) / 4 * 4 + 4 * first, 4 * count); return;
    case BF16: for (int64_t i = 0; i < count; i++) out[i] = (uint32_t)low[i] << 16; return;
    case BF16_I16: for (int64_t i = 0; i < count; i++) out[i] = ((uint32_t)low[i] << 16) + (uint32_t)(int32_t)(int16_t)second[i]; return;
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
    case FP16_FP32:
        memcpy(at + (2 * t->size + 3) / 4 * 4 + 4 * first, in, 4 * count);
        for (int64_t i = 0; i < count; i++) low[i] = half_of(in[i]);
        return;
    case BF16: for (int64_t i = 0; i < count; i++) low[i] = (in[i] + 0x7fff + (in[i] >> 16 & 1)) >> 16; return;
    case BF16_I16:
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

/* What is wrong with a path: -2 where the disk is full, as barellm_save has it. */
static int io(const char *path) {
    int full = errno == ENOSPC || errno == EDQUOT;
    return fail("%s: %s", path, strerror(errno)) - full;
}

struct file {
    int fd;
    struct hash hash;
    char path[4096];
};

static int add(struct file *f, const void *data, size_t count) {
    hash_add(&f->hash, data, count);
    for (const char *at = data; count;) {
        ssize_t done = write(f->fd, at, count);
        if (done < 0 && errno != EINTR) return io(f->path);
        if (done > 0) at += done, count -= done;
    }
    return 0;
}

static int make(struct file *f, const char *folder, const char *name) {
    snprintf(f->path, sizeof f->path, "%s/%s", folder, name);
    hash_begin(&f->hash);
    f->fd = open(f->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return f->fd < 0 ? io(f->path) : 0;
}

static int finish(struct file *f, int wrong) {
    if (!wrong && fsync(f->fd)) wrong = io(f->path);
    close(f->fd);
    return wrong;
}

static int sync_folder(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int wrong = fd < 0 || fsync(fd) ? io(path) : 0;
    if (fd >= 0) close(fd);
    return wrong;
}

/* Remove a flat folder or a file, without a message; a link is not followed. */
static int remove_flat(const char *path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC), wrong = 0;
    DIR *listed = fd < 0 ? NULL : fdopendir(fd);
    if (!listed) return unlink(path);
    for (struct dirent *entry; !wrong && (entry = readdir(listed));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) wrong = unlinkat(fd, entry->d_name, 0);
    closedir(listed);
    return wrong ? wrong : rmdir(path);
}

/* Remove what unfinished saves and removals left. */
static int remove_temporaries(const char *folder) {
    char path[4096];
    DIR *listed = opendir(folder);
    int wrong = listed ? 0 : io(folder);
    for (struct dirent *entry; !wrong && (entry = readdir(listed));) {
        if (strncmp(entry->d_name, ".tmp-", 5)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        if (remove_flat(path)) wrong = io(path);
    }
    if (listed) closedir(listed);
    return wrong;
}

/* It is renamed first: a removal that is cut short never looks like a checkpoint. */
static int remove_step(const char *folder, int64_t step) {
    char path[4000], doomed[4000];
    snprintf(path, sizeof path, "%s/step-%06lld", folder, (long long)step);
    snprintf(doomed, sizeof doomed, "%s/.tmp-step-%06lld", folder, (long long)step);
    return rename(path, doomed) || remove_flat(doomed) ? io(path) : 0;
}

int64_t barellm_newest(const char *folder, int64_t below) {
    DIR *listed = opendir(folder);
    int64_t found = -1;
    if (!listed) return errno == ENOENT ? -1 : (io(folder), -2);
    for (struct dirent *entry; errno = 0, (entry = readdir(listed));) {
        char name[32];
        long long step = strncmp(entry->d_name, "step-", 5) ? -1 : strtoll(entry->d_name + 5, NULL, 10);
        snprintf(name, sizeof name, "step-%06lld", step);
        if (step > found && step < below && !strcmp(entry->d_name, name)) found = step;
    }
    if (errno) found = (io(folder), -2);
    closedir(listed);
    return found;
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
    int wrong = make(&f, folder, name);
    if (wrong) return wrong;
    wrong = finish(&f, add(&f, text, count));
    if (entry) snprintf(entry, room, "    \"%s\": {\"bytes\": %zu, \"xxh3_64\": \"%016llx\"}", name, count, (unsigned long long)hash_end(&f.hash));
    return wrong;
}

/* What a session goes on from. */
static const char *const NAMES[] = {"weights.safetensors", "optimizer.safetensors", "meta.json"};

static int milestone(int64_t step) { return run.milestones && step && step % run.milestones == 0; }

static int fill(struct barellm *s, const char *folder, double seconds) {
    char weights[256], optimizer[256], meta[256], *text = NULL, *manifest = NULL;
    int64_t done = micro_batches_before(s->step) * run.batch;
    size_t count = meta_text.end - meta_text.begin;
    int wrong = write_tensors(s, folder, NAMES[0], &weights_header, 'p', weights, sizeof weights);
    if (!wrong) wrong = write_tensors(s, folder, NAMES[1], &optimizer_header, 's', optimizer, sizeof optimizer);
    if (wrong) return wrong;
    int length = asprintf(&text,
        "{\n  \"format\": 1,\n  \"step\": %lld,\n%.*s,\n  \"total_steps\": %lld,\n  \"samples\": %lld,\n  \"tokens\": %lld,\n"
        "  \"seconds\": %.3f,\n  \"milestone\": %s\n}\n",
        (long long)s->step, (int)count, meta_text.begin, (long long)s->total, (long long)done, (long long)(done * run.seq), seconds,
        milestone(s->step) ? "true" : "false");
    if (length < 0) return fail("no memory for meta.json");
    wrong = write_text(folder, NAMES[2], text, length, meta, sizeof meta);
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
    return wrong ? wrong : sync_folder(folder);
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

/* `known`: the same file of this program. It stands in for the checksum of few bytes, which xxh3.c does not have. */
static int verify(const char *folder, const char *manifest, const char *name, const struct blob *known) {
    char path[4096], wanted[128], buffer[65536], digest[17] = "", found[17];
    unsigned long long size = 0;
    snprintf(wanted, sizeof wanted, "\"%s\":", name);
    const char *entry = strstr(manifest, wanted), *bytes = entry ? strstr(entry, "\"bytes\":") : NULL;
    const char *sum = bytes ? strstr(bytes, "\"xxh3_64\":") : NULL;
    if (!sum || sscanf(bytes, "\"bytes\": %llu", &size) != 1 || sscanf(sum, "\"xxh3_64\": \"%16[0-9a-f]", digest) != 1)
        return fail("%s: manifest.json does not list %s", folder, name);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "rb");
    if (!f) return errno == ENOENT ? fail("%s: %s is missing", folder, name) : io(path);
    struct hash h;
    hash_begin(&h);
    for (size_t count; (count = fread(buffer, 1, sizeof buffer, f));) hash_add(&h, buffer, count);
    fclose(f);
    if (h.bytes != size) return fail("%s: %s has %llu bytes, expected %llu", folder, name, (unsigned long long)h.bytes, size);
    if (size > 240) snprintf(found, sizeof found, "%016llx", (unsigned long long)hash_end(&h));
    else if (!known || size != (size_t)(known->end - known->begin) || memcmp(buffer, known->begin, size)) strcpy(found, "another");
    else strcpy(found, known->xxh3_64);
    return strcmp(found, digest) ? fail("%s: the checksum of %s is %s, expected %s", folder, name, found, digest) : 0;
}

/* -2 with the reason where a step's folder is not whole. */
static int problem(const char *folder) {
    char *manifest = text_of(folder, "manifest.json");
    int wrong = !manifest;
    const char *end = manifest ? strstr(manifest, "\n  }\n}\n") : NULL;
    if (manifest && (!end || end[7] || !strstr(manifest, "\"format\": 1,"))) wrong = fail("%s: manifest.json is damaged, or of another version", folder);
    for (int i = 0; i < 3 && !wrong; i++) wrong = verify(folder, manifest, NAMES[i], NULL);
    for (int i = 0; i < tokenizer_file_count && !wrong; i++) wrong = verify(folder, manifest, tokenizer_files[i].name, &tokenizer_files[i]);
    free(manifest);
    return wrong ? -2 : 0;
}

/* Remove all but the newest `run.keep` checkpoints up to a step; a later one comes of steps that are done again. Those that say that
 * they are milestones stay, whatever this run was asked for. */
static int thin(const char *folder, int64_t last) {
    int64_t step = last + 1, count = 0;
    int wrong = 0;
    while (!wrong && (step = barellm_newest(folder, step)) >= 0) {
        char path[4000];
        snprintf(path, sizeof path, "%s/step-%06lld", folder, (long long)step);
        char *meta = text_of(path, "meta.json");
        if (!(meta && strstr(meta, "\"milestone\": true")) && ++count > run.keep) wrong = remove_step(folder, step);
        free(meta);
    }
    return wrong;
}

int barellm_save(barellm *s, const char *folder, double seconds) {
    char temporary[4000], target[4000];
    int wrong = 0;
    snprintf(target, sizeof target, "%s/..", folder);
    if (!mkdir(folder, 0777)) wrong = sync_folder(target);
    else if (errno != EEXIST) wrong = io(folder);
    snprintf(temporary, sizeof temporary, "%s/.tmp-step-%06lld", folder, (long long)s->step);
    snprintf(target, sizeof target, "%s/step-%06lld", folder, (long long)s->step);
    if (!wrong) wrong = remove_temporaries(folder);
    if (!wrong && !access(target, F_OK) && problem(target)) wrong = remove_step(folder, s->step);
    if (!wrong && access(target, F_OK)) { /* the same step of the same run has the same bits */
        wrong = mkdir(temporary, 0777) ? io(temporary) : fill(s, temporary, s->seconds + seconds);
        if (!wrong && rename(temporary, target)) wrong = io(target);
        if (wrong) remove_flat(temporary);
        else wrong = sync_folder(folder);
    }
    return wrong || s->not_finite ? wrong : thin(folder, s->step); /* weights that diverged push no other ones out */
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

/* A number of meta.json that has only these digits, up to `most`. */
static int number(const char *folder, const char *meta, const char *key, const char *digits, double most, double *value) {
    char line[64];
    snprintf(line, sizeof line, "\n  \"%s\": ", key); /* two spaces: not one of the configuration's */
    const char *at = strstr(meta, line), *rest = at ? at + strlen(line) : "";
    size_t count = strspn(rest, digits);
    *value = strtod(rest, NULL);
    if (count && (rest[count] == ',' || rest[count] == '\n') && *value <= most) return 0;
    return fail("%s: meta.json has no %s up to %.0f, expected what barellm writes there", folder, key, most);
}

int barellm_load(barellm *s, const char *path) {
    double step = 0, total = 0, seconds = 0;
    if (problem(path)) return -2;
    char *meta = text_of(path, "meta.json");
    int wrong = !meta || number(path, meta, "total_steps", "0123456789", 0x1p31, &total) || number(path, meta, "step", "0123456789", total, &step);
    wrong = wrong || number(path, meta, "seconds", "0123456789.", 1e12, &seconds);
    wrong = wrong || read_tensors(s, path, NAMES[0], &weights_header, 'p') || read_tensors(s, path, NAMES[1], &optimizer_header, 's');
    free(meta);
    if (wrong) return -1;
    s->step = (int64_t)step;
    s->total = (int64_t)total;
    s->seconds = seconds;
    s->not_finite = 0;
    return 0;
}
