/* The driver that writes text from a run's newest checkpoint, as `barellm sample` does. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "barellm.h"
#include "driver.h"

static const char USAGE[] =
    "usage: sample --run DIR [--prompt TEXT | --ids 1,2,3] [--tokens N] [--seed N] [--temperature T] [--top-k K] [--top-p P]\n"
    "              [--min-p P] [--repetition X] [--threads N]\n"
    "  --run DIR        a run, whose newest checkpoint is taken, or a checkpoint's folder\n"
    "  --prompt TEXT    what the text begins with, for tokenizers of bytes or characters; --ids: the ids of its tokens\n"
    "  --tokens N       how many tokens are drawn (default: 256); the others are those of barellm sample, defaults too\n";
static const char *const KNOWN[] = {"--run", "--prompt", "--ids", "--tokens", "--seed", "--temperature", "--top-k",
                                    "--top-p", "--min-p", "--repetition", "--threads", NULL};

static void write_token(int32_t token) {
    int64_t length;
    const char *bytes = barellm_token(token, &length);
    if (bytes) fwrite(bytes, 1, length, stdout);
    fflush(stdout);
}

static int each(int32_t token, void *own) {
    (void)own;
    if (barellm_ends(token)) return 1;
    write_token(token);
    return 0;
}

static double number(int argc, char **argv, const char *name, const char *usual) {
    char *value = option(argc, argv, name, usual), *rest, wrong[256];
    double found = strtod(value, &rest);
    if (!*value || *rest) {
        snprintf(wrong, sizeof wrong, "%s is %.100s, expected a number", name, value);
        end(wrong);
    }
    return found;
}

/* The numbers of a list with commas between. */
static int64_t list(const char *text, int32_t *ids) {
    int64_t count = 0;
    for (char *rest; *text; text = *rest ? rest + 1 : rest) {
        ids[count++] = strtol(text, &rest, 10);
        if (rest == text || (*rest && *rest != ',')) end("--ids has something else than numbers with commas between");
    }
    return count;
}

int main(int argc, char **argv) {
    check_options(argc, argv, KNOWN, USAGE);
    const char *run = option(argc, argv, "--run", NULL), *prompt = option(argc, argv, "--prompt", NULL), *ids = option(argc, argv, "--ids", NULL);
    if (!run) end("--run names a run or a checkpoint, expected it");
    if (prompt && ids) end("--prompt and --ids are two ways to say what the text begins with: choose one");
    int64_t count = number(argc, argv, "--tokens", "256"), longest = strlen(prompt ? prompt : ids ? ids : "") + 1, known;
    if (count < 1) end("--tokens is below 1");
    barellm_sampling how = {
        .temperature = number(argc, argv, "--temperature", "0.8"), .top_p = number(argc, argv, "--top-p", "1"),
        .min_p = number(argc, argv, "--min-p", "0"), .repetition = number(argc, argv, "--repetition", "1"),
        .top_k = number(argc, argv, "--top-k", "0"), .seed = strtoull(option(argc, argv, "--seed", "1337"), NULL, 10),
    };
    barellm *s = barellm_open(number(argc, argv, "--threads", "0"));
    if (!s) end(barellm_error());
    pin();
    char folder[4096], path[4200];
    snprintf(folder, sizeof folder, "%s/checkpoints", run);
    int64_t step = newest(folder);
    if (step < 0) snprintf(path, sizeof path, "%s", run);
    else snprintf(path, sizeof path, "%s/step-%06lld", folder, (long long)step);
    must(barellm_load(s, path));
    int32_t *text = room(longest + count, sizeof *text);
    known = ids ? list(ids, text) : barellm_prompt(prompt ? prompt : "", text, longest);
    must(known < 0);
    for (int64_t i = 0, length; i < known; i++) must(!barellm_token(text[i], &length));
    if (prompt) fputs(prompt, stdout);
    else if (ids)
        for (int64_t i = 0; i < known; i++) write_token(text[i]);
    must(barellm_sample(s, text, known, count, &how, each, NULL) < 0);
    putchar('\n');
    barellm_close(s);
    return 0;
}
