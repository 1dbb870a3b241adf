/* From logits to text: cuts, one draw with bits of (seed, index), and the bytes that ids stand for. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

/* --- the tokenizer's table --- */

const char *barellm_token(int32_t id, int64_t *length) {
    if (id < 0 || id >= tokenizer.count) {
        fail("id is %d, expected 0 to %lld", id, (long long)tokenizer.count - 1);
        return NULL;
    }
    const uint32_t *ends = (const uint32_t *)tokenizer.table.begin; /* of each token, in the bytes behind them */
    uint32_t first = id ? ends[id - 1] : 0;
    *length = ends[id] - first;
    return (const char *)(ends + tokenizer.count) + first;
}

int barellm_ends(int32_t id) {
    for (int64_t i = 0; i < tokenizer.end_count; i++)
        if (tokenizer.ends[i] == id) return 1;
    return 0;
}

/* The id whose bytes these are, or -1. */
static int32_t id_of(const char *bytes, int64_t count) {
    for (int32_t id = 0; id < tokenizer.count; id++) {
        int64_t length;
        const char *token = barellm_token(id, &length);
        if (length == count && !memcmp(token, bytes, count)) return id;
    }
    return -1;
}

int64_t barellm_prompt(const char *text, int32_t *ids, int64_t room) {
    int64_t found = 0, length = strlen(text);
    if (length && !tokenizer.by_piece)
        return fail("a text of this model's tokenizer is cut by rules that are not in this program: give the ids of its tokens");
    if (room < 1 || room < length) return fail("there is room for %lld ids, the text may need %lld", (long long)room, (long long)(length ? length : 1));
    for (int64_t at = 0; at < length;) {
        int64_t next = at + 1; /* by bytes, or by characters: up to the next byte that begins one */
        while (tokenizer.by_piece == BY_CHARACTER && (text[next] & 0xc0) == 0x80) next++;
        int32_t id = id_of(text + at, next - at);
        if (id < 0) return fail("%.*s at byte %lld is not among the %lld tokens", (int)(next - at), text + at, (long long)at, (long long)tokenizer.count);
        ids[found++] = id;
        at = next;
    }
    if (!found) ids[found++] = tokenizer.start;
    return found;
}

/* --- one draw --- */

/* The first of the four words that Philox-4x64-10 (Salmon et al. 2011) gives for the counter and the key. */
static uint64_t philox(uint64_t c0, uint64_t c1, uint64_t c2, uint64_t c3, uint64_t k0) {
    uint64_t k1 = 0;
    for (int i = 0; i < 10; i++) {
        unsigned __int128 first = (unsigned __int128)0xD2E7470EE14C6C93u * c0, second = (unsigned __int128)0xCA5A826395121157u * c2;
        c0 = (uint64_t)(second >> 64) ^ c1 ^ k0;
        c2 = (uint64_t)(first >> 64) ^ c3 ^ k1;
        c1 = (uint64_t)second;
        c3 = (uint64_t)first;
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    return c0;
}

static double uniform(uint64_t seed, int64_t index) { return (double)(philox(1, 0, (uint64_t)index, 0, seed) >> 11) * 0x1p-53; }

struct choice {
    float logit;
    int32_t id;
};

/* Of equal logits the lower id comes first. */
static int likelier(const void *one, const void *other) {
    const struct choice *a = one, *b = other;
    if (a->logit != b->logit) return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

struct draws {
    float *logits;
    double *p;
    struct choice *order;
    char *seen;
};

static int32_t draw(struct draws *d, const barellm_sampling *how, const int32_t *text, int64_t known, int64_t index) {
    int64_t V = run.vocabulary > 0 ? run.vocabulary : 0, kept = V;
    float *logits = d->logits, *best = logits;
    for (int64_t i = 0; i < V; i++)
        if (!isfinite(logits[i])) return fail("the model's logits are not finite: its weights diverged");
    if (how->repetition_penalty != 1) {
        float penalty = (float)how->repetition_penalty;
        memset(d->seen, 0, (size_t)V);
        for (int64_t i = 0; i < known; i++) {
            if (d->seen[text[i]]) continue;
            d->seen[text[i]] = 1;
            logits[text[i]] = logits[text[i]] < 0 ? logits[text[i]] * penalty : logits[text[i]] / penalty;
        }
    }
    for (int64_t i = 1; i < V; i++)
        if (logits[i] > *best) best = logits + i;
    if (how->temperature == 0) return best - logits;
    double total = 0, most = *best;
    for (int64_t i = 0; i < V; i++) total += d->p[i] = exp(((double)logits[i] - most) / how->temperature);
    if (how->top_k > 0 || how->top_p < 1 || how->min_p > 0) {
        for (int64_t i = 0; i < V; i++) d->order[i] = (struct choice){logits[i], (int32_t)i};
        qsort(d->order, V, sizeof *d->order, likelier);
        if (how->top_k > 0 && how->top_k < V) kept = how->top_k;
        if (how->top_p < 1) {
            double all = 0, sum = 0;
            int64_t needed = 0;
            for (int64_t i = 0; i < kept; i++) all += d->p[d->order[i].id];
            while (needed < kept && (sum += d->p[d->order[needed].id]) < how->top_p * all) needed++;
            if (needed + 1 < kept) kept = needed + 1;
        }
        double least = how->min_p * d->p[d->order[0].id];
        while (how->min_p > 0 && d->p[d->order[kept - 1].id] < least) kept--;
        for (int64_t i = kept; i < V; i++) d->p[d->order[i].id] = 0;
        total = 0;
        for (int64_t i = 0; i < V; i++) total += d->p[i];
    }
    double sum = 0, wanted = uniform(how->seed, index) * total;
    int32_t last = 0;
    for (int64_t i = 0; i < V; i++) {
        if (d->p[i] > 0) last = i;
        if ((sum += d->p[i]) > wanted) return i;
    }
    return last;
}

/* --- texts --- */

static int check_sampling(const barellm_sampling *how, const int32_t *text, int64_t known) {
    if (!(isfinite(how->temperature) && how->temperature >= 0)) return fail("temperature is %g, expected a number from 0 on", how->temperature);
    if (how->top_k < 0) return fail("top_k is %lld, expected 0 (off) or more", (long long)how->top_k);
    if (!(how->top_p > 0 && how->top_p <= 1)) return fail("top_p is %g, expected 0 < top_p <= 1", how->top_p);
    if (!(how->min_p >= 0 && how->min_p <= 1)) return fail("min_p is %g, expected 0 (off) up to 1", how->min_p);
    if (!(isfinite(how->repetition_penalty) && how->repetition_penalty > 0)) return fail("repetition_penalty is %g, expected a number above 0 (1: no penalty)", how->repetition_penalty);
    if (known < 1) return fail("the text has no token, expected at least one to go on from");
    for (int64_t i = 0; i < known; i++)
        if (text[i] < 0 || text[i] >= run.vocabulary)
            return fail("text[%lld] is %d, expected an id from 0 to %lld", (long long)i, text[i], (long long)run.vocabulary - 1);
    return 0;
}

/* Feed what the model sees of a text: all of it if it fits, else as much of its end as fills half of the positions. */
static int64_t feed(barellm *s, const int32_t *text, int64_t count, float *logits) {
    int64_t most = barellm_positions(), seen = count <= most ? count : most / 2 > 1 ? most / 2 : 1;
    return barellm_logits(s, text + count - seen, seen, 0, logits) ? -1 : seen;
}

int64_t barellm_sample(barellm *s, int32_t *text, int64_t known, int64_t count, const barellm_sampling *how, int (*each)(int32_t, void *), void *own) {
    if (check_sampling(how, text, known)) return -1;
    int64_t V = run.vocabulary, drawn = 0, position = 0;
    struct draws d = {malloc(V * sizeof(float)), malloc(V * sizeof(double)), malloc(V * sizeof(struct choice)), malloc(V)};
    int wrong = !d.logits || !d.p || !d.order || !d.seen ? fail("no memory for a draw") : 0;
    while (!wrong && drawn < count) {
        int64_t have = known + drawn;
        if (run.whole || position == 0 || position == barellm_positions()) wrong = (position = feed(s, text, have, d.logits)) < 0;
        else wrong = barellm_logits(s, text + have - 1, 1, position++, d.logits);
        int32_t token = wrong ? -1 : draw(&d, how, text, have, drawn);
        if (token < 0) wrong = -1;
        else {
            text[have] = token;
            drawn++;
            if (each && each(token, own)) break;
        }
    }
    free(d.logits);
    free(d.p);
    free(d.order);
    free(d.seen);
    return wrong ? -1 : drawn;
}
