/* The driver: trains from shards of tokens, as `barellm train` does, and goes on from its checkpoints. */
#define _GNU_SOURCE
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "barellm.h"
#include "driver.h"
#include "shards.h"

/* What of the configuration is the loop's (settings.c). */
extern const struct settings {
    int order;
    int64_t seed, eval_every, eval_tokens, final_tokens, checkpoint_every, milestones, sample_every;
} settings;

enum { DRAWN = 160 }; /* tokens of a text on the way */

static volatile sig_atomic_t stopped;

static void on_signal(int number) { stopped = number; }

static const char USAGE[] =
    "usage: train --train PATTERN --val PATTERN [--out DIR] [--threads N] [--stop STEP]\n"
    "  --train, --val   shards of tokens (.bin), a pattern of names in quotes\n"
    "  --out DIR        metrics.jsonl and checkpoints; a run that is there goes on from its newest checkpoint\n"
    "  --threads N      default: one for each processor\n"
    "  --stop STEP      end behind this step, with a checkpoint, as Ctrl-C does\n";

static const char *const KNOWN[] = {"--train", "--val", "--out", "--threads", "--stop", NULL};

/* The mean loss over windows side by side; of more than `most` tokens over as many, spread evenly. */
static double evaluate(barellm *s, const struct stream *val, int64_t most, int64_t *targets_seen) {
    barellm_info about = barellm_about(s);
    int64_t seq = about.seq, all = (val->count - 1 + seq - 1) / seq, windows = all, seen = 0;
    if (most && (most / seq > 1 ? most / seq : 1) < windows) windows = most / seq > 1 ? most / seq : 1;
    int32_t *tokens = room(about.batch * seq, 4), *targets = room(about.batch * seq, 4), *window = room(seq + 1, 4);
    double total = 0;
    for (int64_t first = 0; first < windows; first += about.batch) {
        int64_t rows = windows - first < about.batch ? windows - first : about.batch, counted = 0;
        for (int64_t row = 0; row < rows; row++) {
            int64_t start = (first + row) * all / windows * seq;
            int64_t valid = val->count - 1 - start < seq ? val->count - 1 - start : seq;
            read_window(val, start, valid + 1, window);
            for (int64_t i = 0; i < seq; i++) {
                tokens[row * seq + i] = i < valid ? window[i] : 0;
                targets[row * seq + i] = i < valid ? window[i + 1] : -1;
            }
            counted += valid;
        }
        double loss;
        must(barellm_evaluate(s, tokens, targets, rows, seq, &loss));
        total += loss * (double)counted;
        seen += counted;
    }
    free(tokens);
    free(targets);
    free(window);
    *targets_seen = seen;
    return total / (double)seen;
}

/* --- the run's folder --- */

/* metrics.jsonl with the rows that were known when the checkpoint of `step` was written. */
static FILE *metrics(const char *out, int64_t step) {
    char path[4096], fresh[4096];
    snprintf(path, sizeof path, "%s/metrics.jsonl", out);
    snprintf(fresh, sizeof fresh, "%s/.tmp-metrics.jsonl", out);
    FILE *old = fopen(path, "r"), *file = fopen(fresh, "w");
    char *line = NULL;
    size_t size = 0;
    while (file && old && getline(&line, &size, old) > 0) {
        char *at = strstr(line, "\"step\": ");
        long long of = at ? atoll(at + 8) : 0;
        int own = strstr(line, "\"kind\": \"train\"") != NULL;
        if (at && (of < step || (own && of == step))) fputs(line, file);
    }
    free(line);
    if (old) fclose(old);
    if (!file || rename(fresh, path)) end("cannot write metrics.jsonl in --out");
    return file;
}

static void number(FILE *file, const char *name, double value) {
    if (isfinite(value)) fprintf(file, ", \"%s\": %.17g", name, value);
    else fprintf(file, ", \"%s\": null", name);
}

static void look(barellm *s, const struct stream *val, int64_t tokens, FILE *file) {
    int64_t step = barellm_about(s).step, targets;
    double loss = evaluate(s, val, tokens, &targets);
    printf("val loss %.6f\n", loss);
    if (!file) return;
    fprintf(file, "{\"kind\": \"eval\", \"step\": %lld", (long long)step);
    number(file, "val_nats", loss);
    fprintf(file, ", \"val_bits_per_byte\": null, \"targets\": %lld}\n", (long long)targets);
    fflush(file);
}

/* --- a text on the way --- */

static int write_token(int32_t token, void *own) {
    int64_t length;
    const char *bytes = barellm_token(token, &length);
    (void)own;
    if (barellm_ends(token)) return 1;
    if (bytes) fwrite(bytes, 1, length, stdout);
    return 0;
}

/* What `barellm train` shows behind this step. */
static void draw(barellm *s) {
    int64_t step = barellm_about(s).step;
    barellm_sampling how = {.temperature = 0.8, .top_p = 0.95, .repetition = 1, .seed = ((uint64_t)settings.seed << 32) + ((uint64_t)step << 8)};
    int32_t text[1 + DRAWN];
    int64_t known = barellm_prompt("", text, 1);
    must(known < 0);
    printf("sample of step %lld: ", (long long)step);
    must(barellm_sample(s, text, known, DRAWN, &how, write_token, NULL) < 0);
    putchar('\n');
}

int main(int argc, char **argv) {
    double started = seconds_now(), spent = 0;
    check_options(argc, argv, KNOWN, USAGE);
    const char *out = option(argc, argv, "--out", NULL), *train = option(argc, argv, "--train", NULL), *held = option(argc, argv, "--val", NULL);
    int64_t last = atoll(option(argc, argv, "--stop", "0"));
    if (!train || !held) end("--train and --val name the shards of tokens, expected both");
    static struct stream text, val;
    char wrong[8192], folder[4096], path[4096];
    if (open_stream(&text, train, wrong, sizeof wrong) || open_stream(&val, held, wrong, sizeof wrong)) end(wrong);
    barellm *s = barellm_open(atoi(option(argc, argv, "--threads", "0")));
    if (!s) end(barellm_error());
    pin();
    barellm_info about = barellm_about(s);
    if (text.count < about.seq + 1 || val.count < 2) end("the shards have fewer tokens than one sequence");
    FILE *file = NULL;
    int64_t from = -1;
    if (out) {
        if (mkdir(out, 0777) && errno != EEXIST) end("--out cannot be made");
        snprintf(folder, sizeof folder, "%s/checkpoints", out);
        from = newest(folder);
    }
    if (from >= 0) {
        snprintf(path, sizeof path, "%s/step-%06lld", folder, (long long)from);
        must(barellm_load(s, path));
    } else must(barellm_initialize(s));
    about = barellm_about(s);
    if (out) file = metrics(out, about.step);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    printf("%lld parameters, %lld bytes of arena, %lld + %lld tokens, step %lld of %lld, ready after %.3f s\n", (long long)about.parameters,
           (long long)about.arena_bytes, (long long)text.count, (long long)val.count, (long long)about.step, (long long)about.steps, seconds_now() - started);
    int64_t most = 0, saved = from;
    int32_t *tokens = NULL, *targets = NULL, *window = room(about.seq + 1, 4);
    for (; about.step < about.steps; about = barellm_about(s)) {
        if (settings.eval_every && about.step % settings.eval_every == 0) look(s, &val, settings.eval_tokens, file);
        if (settings.sample_every && about.step && about.step % settings.sample_every == 0) draw(s);
        int64_t rows = about.micro_batches * about.batch, seq = about.seq;
        if (rows > most) {
            free(tokens);
            free(targets);
            tokens = room(rows * seq, 4);
            targets = room(rows * seq, 4);
            most = rows;
        }
        double begin = seconds_now();
        for (int64_t row = 0; row < rows; row++) {
            read_window(&text, window_of(&text, settings.order, settings.seed, seq, about.samples + row), seq + 1, window);
            memcpy(tokens + row * seq, window, 4 * seq);
            memcpy(targets + row * seq, window + 1, 4 * seq);
        }
        barellm_result r;
        must(barellm_step(s, tokens, targets, &r));
        double took = seconds_now() - begin;
        spent += took;
        barellm_info after = barellm_about(s);
        printf("step %lld/%lld | loss %.6f | norm %.4f | lr %.2e | %.2f ms | %.0f tok/s\n", (long long)after.step, (long long)after.steps, r.loss,
               r.norm, r.lr, 1e3 * took, rows * seq / took);
        fflush(stdout);
        if (file) {
            fprintf(file, "{\"kind\": \"train\", \"step\": %lld", (long long)after.step);
            number(file, "loss", r.loss);
            number(file, "lr", r.lr);
            if (r.muon_lr >= 0) number(file, "muon_lr", r.muon_lr);
            number(file, "grad_norm", r.norm);
            fprintf(file, ", \"tokens\": %lld, \"tokens_per_s\": %.1f, \"seconds\": %.3f}\n", (long long)(after.samples * seq), rows * seq / took, seconds_now() - started);
            fflush(file);
        }
        int due = (settings.checkpoint_every && after.step % settings.checkpoint_every == 0) || (settings.milestones && after.step % settings.milestones == 0);
        int over = stopped || after.step == last || after.step == after.steps;
        if (out && (due || over) && after.step != saved) {
            must(barellm_save(s, folder, seconds_now() - started));
            saved = after.step;
        }
        if (stopped || (after.step == last && after.step != after.steps)) {
            printf("stopped after step %lld\n", (long long)after.step);
            printf("digest %016llx\n", (unsigned long long)barellm_digest(s));
            return stopped ? 128 + stopped : 0;
        }
    }
    look(s, &val, settings.final_tokens, file);
    draw(s);
    printf("digest %016llx\n", (unsigned long long)barellm_digest(s));
    if (file) fclose(file);
    barellm_close(s);
    return 0;
}
