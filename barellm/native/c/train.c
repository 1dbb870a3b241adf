/* The driver: trains from shards of tokens, as `barellm train` does, and goes on from its checkpoints. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver.h"
#include "shards.h"

/* What of the configuration is the loop's (settings.c). */
extern const struct settings {
    int order;
    int64_t seed, eval_every, eval_tokens, final_tokens, checkpoint_every, milestones, sample_every;
} settings;

enum { DRAWN = 160 }; /* tokens of a text on the way */
enum { NOT_FINITE_LIMIT = 10 }; /* steps in a row whose loss or norm is not finite, which end the run */
enum { FULL_DISK_S = 3600, FULL_DISK_PAUSE_S = 10 }; /* the last save waits for room so long, and tries so often */

static const char USAGE[] =
    "usage: train --train PATTERN --val PATTERN [--out DIR] [--threads N] [--stop STEP]\n"
    "  --train, --val   shards of tokens (.bin), a pattern of names in quotes\n"
    "  --out DIR        metrics.jsonl and checkpoints; a run that is there goes on from its newest checkpoint\n"
    "  --threads N      default: one for each processor\n"
    "  --stop STEP      end behind this step, with a checkpoint, as Ctrl-C does\n";

static const char *const KNOWN[] = {"--train", "--val", "--out", "--threads", "--stop", NULL};

/* --- signals, and an output that nobody reads --- */

static volatile sig_atomic_t stopped; /* the signal */

static void tell(const char *text) {
    int before = errno;
    if (write(2, text, strlen(text)) < 0) errno = before; /* nobody reads any more */
}

static void on_signal(int number) {
    if (stopped) {
        tell("\nbarellm: stopped at once, without a checkpoint of the last steps\n");
        _exit(128 + stopped);
    }
    stopped = number;
    tell("\nbarellm: stopping after this step; once more to stop at once\n");
}

static void catch_signals(void) {
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    if (signal(SIGHUP, on_signal) == SIG_IGN) signal(SIGHUP, SIG_IGN); /* nohup */
    signal(SIGPIPE, SIG_IGN);
}

/* A reader that went away ends the run after this step; a full disk behind the stream costs the text only. */
static void shown(void) {
    if (fflush(stdout) && (errno == EPIPE || errno == EIO) && !stopped) stopped = SIGPIPE;
}

/* --- the run's folder --- */

static barellm *session;
static const char *out; /* NULL: nothing is kept */
static char folder[4096];
static int64_t saved = -1;
static double started;

static int save(void) {
    int64_t step = barellm_about(session).step;
    int wrong = barellm_save(session, folder, seconds_now() - started);
    if (!wrong) saved = step;
    return wrong;
}

/* A save that fails costs only itself: older checkpoints stay, and the training goes on. */
static void save_or_warn(void) {
    if (save()) warn("no checkpoint of step %lld: %s", (long long)barellm_about(session).step, barellm_error());
}

/* Nothing else holds these weights: if the disk is full, wait for room. Ctrl-C gives up. */
static void save_last(void) {
    int before = stopped, wrong;
    if (!out || barellm_about(session).step == saved) return;
    for (int left = FULL_DISK_S; (wrong = save()); left -= FULL_DISK_PAUSE_S) {
        if (wrong != -2 || left <= 0 || stopped != before) end("%s", barellm_error());
        warn("%s. The last checkpoint is tried again every %d s, %d s more. Ctrl-C gives up", barellm_error(), FULL_DISK_PAUSE_S, left);
        sleep(FULL_DISK_PAUSE_S);
    }
}

/* End for a reason that is not the weights': they are saved first. */
static void give_up(const char *why) {
    char reason[8192];
    snprintf(reason, sizeof reason, "%s", why);
    int64_t step = barellm_about(session).step;
    if (out && step && step != saved) save_or_warn();
    end("%s", reason);
}

static void go_on(int wrong) {
    if (wrong) give_up(barellm_error());
}

/* Rows of metrics.jsonl. A full disk does not stop the training: rows wait until they can be written. */
static struct {
    int fd, full;
    off_t end;
    char *waiting, path[4200];
    size_t count;
} rows = {.fd = -1};

static void keep(const char *line, size_t count) {
    char *more = realloc(rows.waiting, rows.count + count);
    if (!more) return;
    memcpy(more + rows.count, line, count);
    rows.waiting = more;
    rows.count += count;
}

static int write_rows(void) {
    size_t at = 0;
    for (ssize_t done; at < rows.count && (done = pwrite(rows.fd, rows.waiting + at, rows.count - at, rows.end)) > 0; at += done) rows.end += done;
    memmove(rows.waiting, rows.waiting + at, rows.count -= at);
    return rows.count != 0;
}

static void record(const char *form, ...) __attribute__((format(printf, 1, 2)));

static void record(const char *form, ...) {
    char line[512];
    va_list list;
    if (rows.fd < 0) return;
    va_start(list, form);
    keep(line, vsnprintf(line, sizeof line, form, list));
    va_end(list);
    int full = write_rows();
    if (full && !rows.full) warn("metrics wait in memory: %s: %s", rows.path, strerror(errno));
    rows.full = full;
}

/* This process alone writes to --out. metrics.jsonl keeps the rows that were known when the checkpoint of `step` was written. */
static int lock(void) {
    if (mkdir(out, 0777) && errno != EEXIST) end("--out %s: %s", out, strerror(errno));
    int fd = open(out, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0 && !flock(fd, LOCK_EX | LOCK_NB)) return fd;
    if (fd >= 0 && errno == EWOULDBLOCK) end("another barellm process is writing to %s", out);
    end("--out %s: %s", out, strerror(errno));
}

static void open_rows(int locked, int64_t step) {
    char fresh[4200], *line = NULL;
    size_t size = 0;
    snprintf(rows.path, sizeof rows.path, "%s/metrics.jsonl", out);
    snprintf(fresh, sizeof fresh, "%s/.tmp-metrics.jsonl", out);
    FILE *old = fopen(rows.path, "r");
    int wrong = !old && errno != ENOENT;
    for (ssize_t length; old && (length = getline(&line, &size, old)) > 0;) {
        char *at = strstr(line, "\"step\": ");
        if (!at || (size_t)length != strlen(line) || length < 3 || strcmp(line + length - 2, "}\n")) break; /* a kill cut it short */
        int64_t of = strtoll(at + 8, NULL, 10);
        int last = of == step && strstr(line, "\"kind\": \"train\"");
        if (of < step || last) keep(line, length);
        if (last && strstr(line, ": null")) saved = step; /* the loss or the norm: saved anew it would push good ones out */
    }
    wrong = wrong || (old && ferror(old)) || (unlink(fresh) && errno != ENOENT);
    if (!wrong) rows.fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (wrong || rows.fd < 0 || write_rows() || fsync(rows.fd) || rename(fresh, rows.path) || fsync(locked)) end("%s: %s", rows.path, strerror(errno));
    if (old) fclose(old);
    free(line);
}

struct text {
    char text[32];
};

static struct text json(double value) {
    struct text found = {"null"};
    if (isfinite(value)) snprintf(found.text, sizeof found.text, "%.17g", value);
    return found;
}

/* --- validation, and a text on the way --- */

static void window(const struct stream *s, int64_t first, int64_t count, int32_t *ids) {
    const char *wrong = read_window(s, first, count, ids);
    if (wrong) give_up(wrong);
}

/* The mean loss over windows side by side; of more than `most` tokens over as many, spread evenly. Whether it was not stopped. */
static int evaluate(const struct stream *val, int64_t most) {
    barellm_info about = barellm_about(session);
    int64_t seq = about.seq, all = (val->count - 1 + seq - 1) / seq, windows = all, seen = 0, bytes = 0, length;
    if (most && (most / seq > 1 ? most / seq : 1) < windows) windows = most / seq > 1 ? most / seq : 1;
    int32_t *tokens = room(about.batch * seq, 4), *targets = room(about.batch * seq, 4), *ids = room(seq + 1, 4);
    double total = 0;
    for (int64_t first = 0; first < windows && !stopped; first += about.batch) {
        int64_t count = windows - first < about.batch ? windows - first : about.batch, counted = 0;
        for (int64_t row = 0; row < count; row++) {
            int64_t start = (first + row) * all / windows * seq;
            int64_t valid = val->count - 1 - start < seq ? val->count - 1 - start : seq;
            window(val, start, valid + 1, ids);
            for (int64_t i = 0; i < seq; i++) {
                tokens[row * seq + i] = i < valid ? ids[i] : 0;
                targets[row * seq + i] = i < valid ? ids[i + 1] : -1;
                if (i < valid && barellm_token(ids[i + 1], &length)) bytes += length;
            }
            counted += valid;
        }
        double loss;
        go_on(barellm_evaluate(session, tokens, targets, count, seq, &loss));
        total += loss * (double)counted;
        seen += counted;
    }
    free(tokens);
    free(targets);
    free(ids);
    if (stopped) return 0;
    double nats = total / (double)seen, bits = bytes ? nats * (double)seen / 0.6931471805599453 / (double)bytes : NAN;
    printf("val loss %.6f\n", nats);
    record("{\"kind\": \"eval\", \"step\": %lld, \"val_nats\": %s, \"val_bits_per_byte\": %s, \"targets\": %lld}\n", (long long)about.step,
           json(nats).text, json(bits).text, (long long)seen);
    return 1;
}

static int write_token(int32_t token, void *own) {
    int64_t length;
    const char *bytes = barellm_token(token, &length);
    (void)own;
    if (barellm_ends(token) || stopped) return 1;
    if (bytes) fwrite(bytes, 1, length, stdout);
    return 0;
}

/* What `barellm train` shows behind this step. */
static void draw(void) {
    int64_t step = barellm_about(session).step;
    barellm_sampling how = {.temperature = 0.8, .top_p = 0.95, .repetition_penalty = 1, .seed = ((uint64_t)settings.seed << 32) + ((uint64_t)step << 8)};
    int32_t text[1 + DRAWN];
    int64_t known = barellm_prompt("", text, 1);
    go_on(known < 0);
    printf("sample of step %lld: ", (long long)step);
    go_on(barellm_sample(session, text, known, DRAWN, &how, write_token, NULL) < 0);
    putchar('\n');
}

/* --- the loop --- */

static barellm_result step(const struct stream *train) {
    static int32_t *tokens, *targets, *ids;
    static int64_t most;
    barellm_info about = barellm_about(session);
    int64_t count = about.micro_batches * about.batch, seq = about.seq;
    if (!ids) ids = room(seq + 1, 4);
    if (count > most) {
        free(tokens);
        free(targets);
        tokens = room(count * seq, 4);
        targets = room(count * seq, 4);
        most = count;
    }
    double begin = seconds_now();
    for (int64_t row = 0; row < count; row++) {
        window(train, window_of(train, settings.order, settings.seed, seq, about.samples + row), seq + 1, ids);
        memcpy(tokens + row * seq, ids, 4 * seq);
        memcpy(targets + row * seq, ids + 1, 4 * seq);
    }
    barellm_result r;
    go_on(barellm_step(session, tokens, targets, &r));
    double took = seconds_now() - begin;
    barellm_info after = barellm_about(session);
    printf("step %lld/%lld | loss %.6f | norm %.4f | lr %.2e | %.2f ms | %.0f tok/s\n", (long long)after.step, (long long)after.steps, r.loss,
           r.norm, r.lr, 1e3 * took, count * seq / took);
    shown();
    char muon[64] = "";
    if (r.muon_lr >= 0) snprintf(muon, sizeof muon, ", \"muon_lr\": %s", json(r.muon_lr).text);
    record("{\"kind\": \"train\", \"step\": %lld, \"loss\": %s, \"lr\": %s%s, \"grad_norm\": %s, \"tokens\": %lld, \"tokens_per_s\": %.1f, \"seconds\": %.3f}\n",
           (long long)after.step, json(r.loss).text, json(r.lr).text, muon, json(r.norm).text, (long long)(after.samples * seq), count * seq / took,
           seconds_now() - started);
    return r;
}

static void diverged(barellm_result r) {
    char held[4300] = "";
    int64_t newest = out ? barellm_newest(folder, INT64_MAX) : -1;
    if (newest >= 0) snprintf(held, sizeof held, "; %s/step-%06lld is the last checkpoint", folder, (long long)newest);
    end("loss or gradient norm was not finite for %d steps up to step %lld (loss %g, norm %g): try a lower optim.lr or a longer optim.warmup%s",
        NOT_FINITE_LIMIT, (long long)barellm_about(session).step, r.loss, r.norm, held);
}

static int due(int64_t every, int64_t step) { return every && step && step % every == 0; }

int main(int argc, char **argv) {
    started = seconds_now();
    start(argc, argv, KNOWN, USAGE);
    const char *train = option(argc, argv, "--train", NULL), *held = option(argc, argv, "--val", NULL), *wrong;
    int64_t last = whole("--stop", option(argc, argv, "--stop", "0"), 0, INT64_MAX), from = -1, not_finite = 0;
    out = option(argc, argv, "--out", NULL);
    if (!train || !held) end("--train and --val name the shards of tokens, expected both");
    if (out && strlen(out) > 3900) end("--out has %zu bytes, expected 3900 at most", strlen(out));
    static struct stream text, val;
    if ((wrong = open_stream(&text, train)) || (wrong = open_stream(&val, held))) end("%s", wrong);
    session = barellm_open(whole("--threads", option(argc, argv, "--threads", "0"), 0, INT32_MAX));
    must(!session);
    pin();
    barellm_info about = barellm_about(session);
    if (text.count < about.seq + 1 || val.count < 2) end("the shards have fewer tokens than one sequence");
    if (out) {
        int locked = lock();
        snprintf(folder, sizeof folder, "%s/checkpoints", out);
        from = resume(session, out);
        open_rows(locked, from < 0 ? 0 : from);
    }
    if (from < 0) must(barellm_initialize(session));
    catch_signals();
    about = barellm_about(session);
    printf("%lld parameters, %lld bytes of arena, %lld + %lld tokens, step %lld of %lld, ready after %.3f s\n", (long long)about.parameters,
           (long long)about.arena_bytes, (long long)text.count, (long long)val.count, (long long)about.step, (long long)about.steps, seconds_now() - started);
    for (; about.step < about.steps && !stopped && !(last && about.step >= last); about = barellm_about(session)) {
        if (settings.eval_every && about.step % settings.eval_every == 0 && !evaluate(&val, settings.eval_tokens)) break;
        if (due(settings.sample_every, about.step) && !not_finite) draw();
        barellm_result r = step(&text);
        int64_t done = about.step + 1;
        not_finite = isfinite(r.loss) && isfinite(r.norm) ? 0 : not_finite + 1;
        if (not_finite == NOT_FINITE_LIMIT) diverged(r);
        /* Weights that diverged push no good ones out. The last step is saved below. */
        if (out && !not_finite && !stopped && done != about.steps && (due(settings.checkpoint_every, done) || due(settings.milestones, done))) save_or_warn();
    }
    save_last();
    int over = about.step == about.steps && evaluate(&val, settings.final_tokens);
    if (over) draw();
    else printf("stopped after step %lld\n", (long long)about.step);
    printf("digest %016llx\n", (unsigned long long)barellm_digest(session));
    barellm_close(session);
    return over ? 0 : stopped ? 128 + stopped : 0;
}
