/* The driver that writes text from a run's newest checkpoint, as `barellm sample` does. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static const char USAGE[] =
    "usage: sample --run DIR [--prompt TEXT | --ids 1,2,3] [--max-new-tokens N] [--seed N] [--temperature T] [--top-k K]\n"
    "              [--top-p P] [--min-p P] [--repetition-penalty X] [--threads N]\n"
    "  --run DIR        a run, whose newest checkpoint is taken, or a checkpoint's folder\n"
    "  --prompt TEXT    what the text begins with, for tokenizers of bytes or characters; --ids: the ids of its tokens\n"
    "  --max-new-tokens N  how many tokens are drawn (default: 256); the others are those of barellm sample, defaults too\n";
/* The last two are the names of older versions. */
static const char *const KNOWN[] = {"--run", "--prompt", "--ids", "--max-new-tokens", "--seed", "--temperature", "--top-k",
                                    "--top-p", "--min-p", "--repetition-penalty", "--threads", "--tokens", "--repetition", NULL};

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

/* The ids of a list with commas between. */
static int64_t list(char *value, int32_t *ids, int64_t vocabulary) {
    int64_t count = 0;
    while (value) {
        char *one = strsep(&value, ",");
        ids[count++] = whole("one of --ids", one, 0, vocabulary - 1);
    }
    return count;
}

int main(int argc, char **argv) {
    start(argc, argv, KNOWN, USAGE);
    const char *run = option(argc, argv, "--run", NULL), *prompt = option(argc, argv, "--prompt", NULL);
    char *ids = option(argc, argv, "--ids", NULL), *tokens = option(argc, argv, "--tokens", "256");
    char *penalty = option(argc, argv, "--repetition", "1");
    if (!run) end("--run names a run or a checkpoint, expected it");
    if (prompt && ids) end("--prompt and --ids are two ways to say what the text begins with: choose one");
    int64_t count = whole("--max-new-tokens", option(argc, argv, "--max-new-tokens", tokens), 1, INT32_MAX);
    int64_t longest = strlen(prompt ? prompt : ids ? ids : "") + 1, known;
    barellm_sampling how = {
        .temperature = number("--temperature", option(argc, argv, "--temperature", "0.8")),
        .top_p = number("--top-p", option(argc, argv, "--top-p", "1")),
        .min_p = number("--min-p", option(argc, argv, "--min-p", "0")),
        .repetition_penalty = number("--repetition-penalty", option(argc, argv, "--repetition-penalty", penalty)),
        .top_k = whole("--top-k", option(argc, argv, "--top-k", "0"), 0, INT32_MAX),
        .seed = whole("--seed", option(argc, argv, "--seed", "1337"), 0, UINT64_MAX),
    };
    barellm *s = barellm_open(whole("--threads", option(argc, argv, "--threads", "0"), 0, INT32_MAX));
    must(!s);
    pin();
    if (resume(s, run) < 0) must(barellm_load(s, run));
    int32_t *text = room(longest + count, sizeof *text);
    known = ids ? list(ids, text, barellm_about(s).vocabulary) : barellm_prompt(prompt ? prompt : "", text, longest);
    must(known < 0);
    if (prompt) fputs(prompt, stdout);
    else if (ids)
        for (int64_t i = 0; i < known; i++) write_token(text[i]);
    must(barellm_sample(s, text, known, count, &how, each, NULL) < 0);
    putchar('\n');
    barellm_close(s);
    return 0;
}
